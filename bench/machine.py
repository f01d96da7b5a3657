"""What results were measured on, and where they are kept."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from trainkernel.errors import DeviceError
from trainkernel.runtime import driver
from trainkernel.runtime.nvrtc import nvrtc_version

RESULTS = Path(__file__).resolve().parent / "results"
HOST_DEVICES = ("reference", "emulator")
_DISTRIBUTIONS = ("numpy", "torch", "jax", "jaxlib", "cuda-bindings", "cuda-core", "trainkernel")


def require_device(device: str) -> None:
    """End the program with a message where there is no such device."""
    if device in HOST_DEVICES:
        return
    try:
        driver.require_driver()
    except DeviceError as error:
        raise SystemExit(f"nothing is measured: {error}") from None


def own_stream(device: str) -> Any:
    """A torch stream on a GPU that is the current one from here on; None on the host."""
    if device in HOST_DEVICES:
        return None
    import torch

    torch.cuda.set_device(device)
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    return stream


def describe_machine(device: str) -> dict[str, Any]:
    """Device, driver, versions and date."""
    name, driver_version = device, "none"
    if device not in HOST_DEVICES:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        query.append(f"--id={device.partition(':')[2] or 0}")
        try:
            text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            name, driver_version = (part.strip() for part in text.strip().split(","))
        except (OSError, subprocess.CalledProcessError, ValueError):
            driver_version = "unknown"
    # What is loaded need not be what is installed.
    versions = {"python": platform.python_version(), "nvrtc": ".".join(map(str, nvrtc_version()))}
    return {
        "device": name,
        "driver": driver_version,
        "versions": versions | {name: _version(name) for name in _DISTRIBUTIONS},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def new_run_id() -> str:
    return f"{datetime.datetime.now():%Y%m%dT%H%M%S}-{os.getpid()}"


def results_path(device_name: str, suffix: str = "") -> Path:
    """``bench/results/h200.json`` for "NVIDIA H200"."""
    return RESULTS / f"{device_name.split()[-1].lower()}{suffix}.json"


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
