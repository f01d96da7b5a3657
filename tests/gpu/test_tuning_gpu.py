"""tune=True on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu_arrays import launch, torch_module
from harness import assert_close
from region_programs import random_inputs

from trainkernel import ProgramBuilder, compile, tuning

pytestmark = pytest.mark.gpu


def test_a_tuned_kernel_is_right_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_module()
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path))
    b = ProgramBuilder()
    x = b.input("x", (512, 256))
    for n in range(3):
        x = b.op("tanh", b.op("mm", x, b.input(f"w{n}", (256, 256))))
    program = b.build([x])
    inputs = [value * np.float32(0.2) for value in random_inputs(program)]
    kernel = compile(program, device="cuda:0", tune=True)
    times = [one.us for one in kernel.tuning.tried]
    assert times[0] is not None and len(times) > 3 and all(us is None or us > 0.5 for us in times)
    assert_close([np.asarray(found) for found in launch(kernel, inputs)], program, inputs)
    monkeypatch.setattr(tuning, "launch_us", lambda kernel: pytest.fail("measured again"))
    assert compile(program, device="cuda:0", tune=True).tuning == kernel.tuning
