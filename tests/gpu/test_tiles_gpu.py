"""Float32 tiles whose depth groups of threads share, and functions that several stages call, on a device."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_arrays import compile_program, in_threads, launch, torch_module
from harness import bits, emulate
from region_programs import TILES, plain_and_fused, random_inputs

from trainkernel import ProgramBuilder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("threads", [128, 256, 512, 1024])
def test_groups_of_threads_give_the_emulator_s_bits(threads: int) -> None:
    torch_module()
    options = {"region_pieces": 0, "gemm_k_tile": 32, "threads_per_block": threads}
    jobs = [(plain_and_fused(shape, layout), options) for shape in TILES for layout in ("nn", "tn", "nt", "tt")]
    for (program, _), kernel in zip(jobs, in_threads(compile_program, jobs), strict=True):
        inputs = random_inputs(program)
        want = emulate(kernel.stats, inputs, num_blocks=2, check_races=False).outputs
        assert [bits(np.asarray(found)) for found in launch(kernel, inputs)] == [bits(value) for value in want]


def test_layers_that_share_a_function() -> None:
    torch_module()
    b = ProgramBuilder()
    x = b.input("x", (1024, 64))
    for n in range(12):
        x = b.op("relu", b.op("mm", x, b.input(f"w{n}", (64, 64))))
    program = b.build([x])
    options = {"region_pieces": 0}
    inputs = [value * np.float32(0.3) for value in random_inputs(program)]
    kernel = compile_program((program, options))
    assert "__device__ TK_NOINLINE void" in kernel.source
    (found,) = launch(kernel, inputs)
    (want,) = emulate(kernel.stats, inputs, num_blocks=3, check_races=False).outputs
    assert bits(np.asarray(found)) == bits(want)
