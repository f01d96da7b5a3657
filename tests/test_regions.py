"""Block regions and panels: what a launch with few blocks or large operands must not get wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check
from numpy.typing import NDArray

from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.ir import Program
from trainkernel.products import ProductPlan
from trainkernel.target import Target


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


def _step(rows: int, width: int, dtype: str) -> Program:
    """A layer with an epilogue, its weights cast first where they are not float32, and its gradient."""
    b = ProgramBuilder()
    x, w, bias = b.input("x", (rows, width)), b.input("w", (width, width), dtype), b.input("bias", (width,))
    h = b.op("tanh", b.op("addmm", bias, x, b.op("cast", w, dtype="float32") if dtype != "float32" else w))
    return b.build([b.op("mm", x.T, h), b.op("sum", h, dims=(0,))])


@pytest.mark.parametrize("target", ["sm_90a", "portable"])
@pytest.mark.parametrize("threads", [None, 128, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_region_fits_into_shared_memory(target: str, threads: int | None, dtype: str) -> None:
    """A region whose products need more scratch than a block has is none; fusion decides nothing about it."""
    cut = []
    for rows, width, pieces in ((4, 32, 1), (64, 32, 8), (4, 300, 1), (4, 300, 2), (256, 300, 1), (4, 1024, 2)):
        program = _step(rows, width, dtype)
        for fuse in (True, False):
            generated = generate(
                program,
                target=target,
                region_pieces=pieces,
                threads_per_block=threads,
                fuse_pointwise=fuse,
                fuse_epilogues=fuse,
            )
            assert generated.shared_bytes <= Target.preset(target).shared_bytes_per_block
            cut.append(any(task.region is not None for stage in generated.schedule.stages for task in stage.tasks))
    assert cut[0::2] == cut[1::2]
    assert cut[0] and (cut[2] or dtype != "float32")
