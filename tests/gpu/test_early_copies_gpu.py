"""Copies that start before a grid barrier, on a device: the emulator's bits, from any address, step after step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from early_programs import target_of, wide_loop, wide_step
from gpu_arrays import compile_program, in_threads, to_device, to_host, torch_module
from harness import bits, emulate
from region_programs import random_inputs

from trainkernel.ir import Program

pytestmark = pytest.mark.gpu

PROGRAMS: dict[str, Program] = {
    "step": wide_step(32, (512, 32, 32, 8)),
    "deep": wide_step(32, (256, 64, 64, 64, 64, 8)),
    "rows": wide_step(32, (512, 32, 32, 64)),
    "loop": wide_loop(32, (256, 64, 64, 64, 64, 8), 5, stacked=False),
    "stack": wide_loop(32, (512, 32, 32, 64), 4, stacked=True),
}


def moved(tensor: Any, elements: int) -> Any:
    """The same numbers, so many elements further in memory."""
    torch = torch_module()
    room = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    own = room[elements:].view(tensor.shape)
    own.copy_(tensor)
    return own


def test_early_copies_give_the_emulator_s_bits() -> None:
    torch = torch_module()
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("bulk copies exist from sm_90 on")
    options = {"region_pieces": 4, "target": target_of(72)}
    jobs = [(program, options) for program in PROGRAMS.values()]
    for name, kernel in zip(PROGRAMS, in_threads(compile_program, jobs), strict=True):
        assert "tk_grid_barrier_arrive(barrier);" in kernel.source, name
        inputs = [np.float32(0.1) * value for value in random_inputs(kernel.program)]
        want = [bits(value) for value in emulate(kernel.stats, inputs, num_blocks=3, check_races=False).outputs]
        for offset in (0, 1):
            for _ in range(20):
                found = kernel(*(moved(to_device(value), offset) for value in inputs))
                assert [bits(to_host(value)) for value in found] == want, (name, offset)
