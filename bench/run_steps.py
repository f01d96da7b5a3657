"""Time per training step: trainkernel beside torch eager, torch in a CUDA graph, and a model floor.

::

    python bench/run_steps.py --workload all --out bench/results/h200.json

Each workload runs in a process of its own. A runner is timed only after its loss agrees with torch
eager's; one that fails is recorded with its error, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from workloads import WORKLOADS, Workload  # noqa: E402 - the path is set above

from trainkernel.target import Target  # noqa: E402

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="all", choices=["all", *WORKLOADS])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--floor-target", default="sm_90a", help="target of the floor model (default sm_90a: H200)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of trainkernel.compile, value in JSON, for example arch='\"sm_90a\"' or threads_per_block=512",
    )
    parser.add_argument("--compile", action="store_true", help="also torch.compile in a CUDA graph")
    parser.add_argument("--timeout", type=float, default=240, help="seconds allowed per workload (default 240)")
    parser.add_argument("--in-process", action="store_true", help="run one workload here instead of in a child process")
    parsed = parser.parse_args()
    names = list(WORKLOADS) if parsed.workload == "all" else [parsed.workload]
    run_id = os.environ.get("TRAINKERNEL_BENCH_RUN_ID") or f"{datetime.datetime.now():%Y%m%dT%H%M%S}-{os.getpid()}"
    if parsed.in_process:
        if len(names) != 1:
            parser.error("--in-process takes one workload")
        report = measure(WORKLOADS[names[0]], parsed, run_id)
    else:
        report = {"rows": []}
        for name in names:
            part = run_child(name, parsed, run_id)
            report = {**report, **part, "rows": report["rows"] + part["rows"]}
            print_table(part["rows"])
    if parsed.out is not None:
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row["error"] is not None for row in report["rows"]) else 0


# ---------------------------------------------------------------------------- processes


def run_child(name: str, parsed: argparse.Namespace, run_id: str) -> dict[str, Any]:
    """The report of one workload, measured in a process that a hanging kernel cannot outlive."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, __file__, "--in-process", "--workload", name, "--out", str(out)]
        command += ["--device", parsed.device, "--floor-target", parsed.floor_target]
        command += ["--compile"] if parsed.compile else []
        command += [f"--option={option}" for option in parsed.option]
        environment = {**os.environ, "TRAINKERNEL_BENCH_RUN_ID": run_id}
        try:
            code: int | str = subprocess.run(command, env=environment, timeout=parsed.timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"nothing after {parsed.timeout:g} s"
        try:
            report: dict[str, Any] = json.loads(out.read_text())
        except (OSError, ValueError):
            error = f"the process of this workload gave no report (exit code: {code})"
            report = {"rows": [failed_row(WORKLOADS[name], "process", run_id, error)]}
    return report


def measure(workload: Workload, parsed: argparse.Namespace, run_id: str) -> dict[str, Any]:
    """Rows of all runners of one workload, with what they ran on."""
    report: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    rows: list[Row] = []
    report["rows"] = rows
    rows.append(floor_row(workload, parsed.floor_target, run_id))
    try:
        import torch

        torch.cuda.set_device(parsed.device)
        report |= describe_machine(torch)
        stream = torch.cuda.Stream()
    except Exception as error:
        rows.append(failed_row(workload, "process", run_id, describe(error)))
        return report

    from measurements import Session

    session = Session(workload, parsed.device, stream, compile_options(parsed.option))
    runners: list[tuple[str, Callable[[], Row]]] = [
        ("torch_eager", session.torch_eager),
        ("torch_graph", session.torch_graph),
    ]
    if parsed.compile:
        runners.append(("torch_compile_graph", lambda: session.torch_graph(compiled=True)))
    runners += [("trainkernel", session.trainkernel), ("trainkernel_graph", session.trainkernel_graph)]
    for name, run in runners:
        try:
            rows.append({**new_row(workload, name, run_id), **run()})
        except Exception as error:
            traceback.print_exc()
            rows.append(failed_row(workload, name, run_id, describe(error)))
            rows[-1]["loss_after_20"] = session.last_loss
    return report


def compile_options(texts: list[str]) -> dict[str, Any]:
    """``NAME=JSON`` texts as keyword arguments."""
    return {name: json.loads(value) for name, _, value in (text.partition("=") for text in texts)}


# ---------------------------------------------------------------------------- rows


def new_row(workload: Workload, runner: str, run_id: str) -> Row:
    return {
        "workload": workload.name,
        "runner": runner,
        "us_per_step": None,
        "spread_us": None,
        "steps_per_launch": 1,
        "precision": workload.dtype,
        "run_id": run_id,
        "loss_after_20": None,
        "variant": "",
        "error": None,
    }


def failed_row(workload: Workload, runner: str, run_id: str, error: str) -> Row:
    return {**new_row(workload, runner, run_id), "error": error}


def floor_row(workload: Workload, target: str, run_id: str) -> Row:
    floor_us = workload.floor_us(Target.preset(target))
    variant = f"model for {target}, {workload.floor_barriers} barriers"
    return {**new_row(workload, "floor", run_id), "us_per_step": floor_us, "spread_us": 0.0, "variant": variant}


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def describe_machine(torch: Any) -> dict[str, Any]:
    """Device, driver and versions."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "torch_cuda": torch.version.cuda}
    for distribution in ("numpy", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "trainkernel"):
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[distribution] = "not installed"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {"device": torch.cuda.get_device_name(), "driver": driver, "versions": versions}


def print_table(rows: list[Row]) -> None:
    """One line a runner: time, how many times trainkernel's time and the floor it is, loss, variant."""
    times = {row["runner"]: row["us_per_step"] for row in rows}
    ours, floor = times.get("trainkernel"), times.get("floor")

    def ratio(time_us: float | None, base_us: float | None) -> str:
        return "-" if time_us is None or not base_us else f"{time_us / base_us:.2f}"

    print(
        f"\n{'workload':<11}{'runner':<20}{'us/step':>10}{'spread':>9}{'/ours':>8}{'/floor':>8}{'loss@20':>12}  variant"
    )
    for row in rows:
        time_us, loss = row["us_per_step"], row["loss_after_20"]
        shown = "failed" if time_us is None else f"{time_us:.2f}"
        spread = "-" if row["spread_us"] is None else f"{row['spread_us']:.2f}"
        losses = "-" if loss is None else f"{loss:.6f}"
        print(
            f"{row['workload']:<11}{row['runner']:<20}{shown:>10}{spread:>9}{ratio(time_us, ours):>8}"
            f"{ratio(time_us, floor):>8}{losses:>12}  {row['error'] or row['variant']}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
