"""Products on a device: float32 tiles whose depth groups of threads share, warpgroups, vectors, little depth."""

from __future__ import annotations

import numpy as np
import pytest
from exact_products import product
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


@pytest.mark.parametrize("threads", [128, 256, 512])
def test_vectors_and_little_depth_give_the_emulator_s_bits(threads: int) -> None:
    """Matrix-vector products whose outputs end inside of a piece, and more outputs than one for each thread."""
    torch_module()
    shapes = [(1, 33, 100), (70, 1, 290), (1, 64, 128), (1100, 125, 3), (1024, 600, 1), (2, 400, 200)]
    programs = [plain_and_fused(shape, layout) for shape in shapes for layout in ("nn", "nt", "tn")]
    options = {"region_pieces": 0, "threads_per_block": threads}
    for kernel in in_threads(compile_program, [(program, options) for program in programs]):
        inputs = random_inputs(kernel.program)
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
    assert "_IS TK_NOINLINE" in kernel.source
    (found,) = launch(kernel, inputs)
    (want,) = emulate(kernel.stats, inputs, num_blocks=3, check_races=False).outputs
    assert bits(np.asarray(found)) == bits(want)


@pytest.mark.parametrize("layout", ["nn", "tn", "nt", "tt"])
def test_warpgroups_find_every_element(layout: str) -> None:
    """Small integers have exact sums: ends inside of tiles and steps, many steps, every tile, both formats."""
    torch_module()
    jobs, wanted = [], []
    for m, n, k, dtype in ((1024, 1024, 1024, "bfloat16"), (2500, 2600, 200, "float16"), (4000, 4104, 712, "bfloat16")):
        for threads in (256, 512):
            program, inputs, expected = product(m, n, k, layout, dtype)
            jobs.append((program, {"threads_per_block": threads}))
            wanted.append((inputs, expected))
    for kernel, (inputs, expected) in zip(in_threads(compile_program, jobs), wanted, strict=True):
        if kernel.stats.target.name == "sm_90a":
            assert "tk_warpgroup_sums<" in kernel.source
        assert np.array_equal(np.asarray(launch(kernel, inputs)[0]), expected)
