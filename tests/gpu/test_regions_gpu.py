"""Products near a block on a device's tensor cores, and blocks that compute several pieces of a region."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from gpu_arrays import compile_program, in_threads, launch, torch_module
from harness import MAX_UNKNOWN
from region_programs import SHAPES, product, random_inputs, region_step, tf32

from trainkernel.ir import Program

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_products_of_a_region(dtype: str) -> None:
    torch_module()
    jobs: list[tuple[Program, dict[str, Any]]] = [
        (region_step(batch, layers, dtype), {"region_pieces": pieces}) for batch, layers, pieces in SHAPES
    ]
    jobs.append((region_step(2112, (24, 40, 16), dtype), {"region_pieces": 528}))  # several for each block
    for (program, _), kernel in zip(jobs, in_threads(compile_program, jobs), strict=True):
        inputs = random_inputs(program)
        assert assert_close(launch(kernel, inputs), program, inputs) <= MAX_UNKNOWN
    assert "for each block" in str(kernel.schedule)


def test_tf32_rounds_operands_to_11_bits() -> None:
    torch_module()
    program = product(256, 48, 32)
    inputs = random_inputs(program)
    exact, short = inputs[0].astype(np.float64) @ inputs[1], tf32(inputs[0]) @ tf32(inputs[1])
    for precision, want in (("tf32", short), (None, exact)):
        kernel = compile_program((program, {"region_pieces": 4, "precision": precision}))
        (found,) = launch(kernel, inputs)
        assert np.abs(np.asarray(found) - want.reshape(np.shape(found))).max() < 5e-5
