"""Block regions and panels: what a launch with few blocks must not get wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
from harness import check
from numpy.typing import NDArray

from trainkernel.builder import ProgramBuilder
from trainkernel.ir import Program
from trainkernel.products import ProductPlan


def _inputs(program: Program) -> list[NDArray[Any]]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(spec.shape, dtype=np.float32) for spec in program.tensor_inputs]


def test_a_block_takes_one_panel_after_another() -> None:
    """A plain product from registers has no barrier of its own between its last read and the next fill."""
    b = ProgramBuilder()
    program = b.build([b.op("mm", b.input("x", (13, 9)), b.input("w", (9, 31)))])
    for num_blocks in (1, 2):
        generated = check(program, _inputs(program), num_blocks=num_blocks, order=1, region_pieces=0, gemm_tile_n=64)
        plan = generated.schedule.tasks[0].plan
        assert isinstance(plan, ProductPlan) and plan.path == "panel" and plan.num_pieces > 1
