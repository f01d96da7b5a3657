"""The driver probe: sticky, clear and never hanging; and what needs no driver at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainkernel.errors import DeviceError, LaunchError
from trainkernel.runtime import driver
from trainkernel.runtime.driver import DeviceFacts
from trainkernel.runtime.module import LoadedKernel, ResourceUsage, residency_refusal

PROBE = """
import trainkernel as tk
from trainkernel.runtime import driver
messages = []
for attempt in range(3):
    try:
        driver.require_driver()
    except tk.DeviceError as error:
        messages.append(str(error))
assert not driver.is_available() and driver.num_devices() == 0
try:
    driver.device_facts(0)
except tk.DeviceError as error:
    messages.append(str(error))
from trainkernel.runtime.module import load
for attempt in range(2):
    try:
        load(b"", "k", 0, threads_per_block=32)
    except tk.DeviceError as error:
        messages.append(str(error))
assert len(messages) == 6 and len(set(messages)) == 1, messages
print(messages[0])
"""


def run_probe(prefix: str, **environment: str) -> str:
    import os

    result = subprocess.run(
        [sys.executable, "-c", prefix + PROBE],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_device_is_the_same_error_each_time_and_never_hangs() -> None:
    # An empty CUDA_VISIBLE_DEVICES hides the GPUs of a machine that has some.
    assert "no CUDA device" in run_probe("", CUDA_VISIBLE_DEVICES="")


def test_missing_bindings() -> None:
    assert "cuda-bindings cannot be imported" in run_probe("import sys; sys.modules['cuda.bindings'] = None\n")


def test_no_devices_and_failing_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Status(int):
        name = "CUDA_ERROR_UNKNOWN"

    class Fake:
        init = Status(0)
        count = (Status(0), 0)

        def cuInit(self, _: int) -> tuple[Status]:  # noqa: N802
            return (self.init,)

        def cuDeviceGetCount(self) -> tuple[Status, int]:  # noqa: N802
            return self.count

    import cuda.bindings

    fake = Fake()
    monkeypatch.setattr(cuda.bindings, "driver", fake, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    assert "0 devices" in str(driver._run_probe().failure)
    fake.count = (Status(3), 0)
    assert "cuDeviceGetCount returned CUDA_ERROR_UNKNOWN" in str(driver._run_probe().failure)
    fake.init = Status(100)
    assert "cuInit returned CUDA_ERROR_UNKNOWN" in str(driver._run_probe().failure)


def test_forked_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_probe", driver._Probe(object(), 1, None, -1))
    with pytest.raises(DeviceError, match="does not survive a fork"):
        driver.require_driver()


def test_check_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_probe", driver._Probe(None, 0, "none", 0))
    with pytest.raises(LaunchError, match="copying the table failed: 700"):
        driver.check((700,), "copying the table")
    assert driver.check((0,), "") is None
    assert driver.check((0, 5), "") == 5
    assert driver.check((0, 5, 6), "") == (5, 6)


FACTS = DeviceFacts(0, "H200", (9, 0), 132, True, 65536, 232448, 233472, 2048, 13000)


def test_residency_messages() -> None:
    assert FACTS.arch == "sm_90a"
    assert residency_refusal(FACTS, 1024, 64, 1024, 0, 232448) is None
    assert residency_refusal(FACTS, 1024, 80, 512, 0, 0) == (
        "1024 threads × 80 registers = 81,920 of 65,536 per SM. Pass threads_per_block=512."
    )
    assert "at most 640. Pass threads_per_block=512." in str(residency_refusal(FACTS, 1024, 40, 640, 0, 0))
    assert "1,024 static + 232,448 dynamic = 233,472 bytes" in str(
        residency_refusal(FACTS, 256, 40, 1024, 1024, 232448)
    )


def test_grid() -> None:
    usage = ResourceUsage(32, 0, 0, 0, 256, 1024, resident_blocks_per_sm=4, num_sms=132)
    kernel = LoadedKernel.__new__(LoadedKernel)
    kernel.usage = usage
    assert kernel.grid_blocks(8, 10_000, None) == 528
    assert kernel.grid_blocks(2, 10_000, None) == 264
    assert kernel.grid_blocks(2, 100, None) == 100
    assert kernel.grid_blocks(2, 100, 7) == 7
    assert kernel.grid_blocks(1, 0, None) == 1
    assert "4 blocks per SM on 132 SMs" in str(usage)
