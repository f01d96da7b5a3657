"""The cost models of reductions and of products near a block: who adds up a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exact_products import product
from harness import check, emulate
from region_programs import plain_and_fused, random_inputs
from table_runs import same_bits

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel.block_tiles import BlockTile, block_tile, block_tile_cycles
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.ir import Operation, TensorSpec
from trainkernel.options import Options
from trainkernel.product_plans import ProductPlan
from trainkernel.reduction_plans import plan_reduction
from trainkernel.target import Target

H100 = Target.preset("sm_90")
NARROW = {"threads_per_block": 128, "region_pieces": 0}


def plans(generated: GeneratedKernel) -> list[ProductPlan]:
    return [task.plan for task in generated.schedule.tasks if isinstance(task.plan, ProductPlan)]


def path(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, op: str = "sum") -> str:
    """The path of a reduction over the last dim."""
    source = TensorSpec.dense("x", shape) if strides is None else TensorSpec("x", shape, strides, 0, "float32")
    out = TensorSpec.dense("out", shape[:-1])
    return plan_reduction(Operation("out", op, (source,), out, {"dims": (len(shape) - 1,)}), H100, Options()).path


def test_many_short_rows_have_a_thread_each() -> None:
    assert path((32768, 2)) == path((8192, 16), op="max") == "thread"
    assert path((64, 10)) == path((32768, 64)) == "warp"
    assert path((4, 64)) == path((1024, 1000)) == "block"


def test_neighbours_in_memory_decide_not_the_order_of_the_dims() -> None:
    columns = (1, 1024)
    assert path((4, 4, 8, 16, 2), (1024, 256, 16, 1, 128)) == "thread"
    assert path((1024, 200), columns) == "columns"


@pytest.mark.parametrize("op", [tnp.max, tnp.sum])
def test_a_thread_per_row_in_the_emulator(op: Any) -> None:
    x = np.random.default_rng(0).standard_normal((4200, 3), np.float32)
    got, want = (tk.jit(lambda x: op(x, axis=1), device=device)(x) for device in ("emulator", "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "prod", "moments"])
@pytest.mark.parametrize("shape", [(17, 8), (32, 33), (100, 60), (128, 31)])
def test_a_warp_takes_some_columns_of_a_piece(shape: tuple[int, int], op: str) -> None:
    """Its lanes share the rows of each; some have no column, some one element more than others."""
    b = ProgramBuilder()
    h = b.op("exp", b.op("mm", b.input("x", (shape[0], 6)), b.input("w", (6, shape[1]))))
    reduced = b.op(op, h, dims=(0,))
    program = b.build([h, *(reduced if isinstance(reduced, tuple) else (reduced,))])
    inputs = [0.1 * array for array in random_inputs(program)]
    generated = check(program, inputs, num_blocks=2, order=1, region_pieces=1, fuse_epilogues=False)
    assert "warp_columns per row" in str(generated.schedule)


# ---------------------------------------------------------------------------- products near a block

SMALL = [(32, 32, 32), (32, 1, 32), (1, 40, 36), (2, 3, 64), (5, 7, 3), (33, 18, 20), (64, 64, 8), (8, 32, 33)]


@pytest.mark.parametrize("layout", ["nn", "tn", "nt", "tt"])
@pytest.mark.parametrize("threads", [128, 512])
def test_the_lanes_of_a_warp_share_a_product(threads: int, layout: str) -> None:
    """Plain and fused operands of either layout; lanes along the depth, tiles beyond the edge, idle warps."""
    for shape in SMALL:
        program = plain_and_fused(shape, layout)
        check(program, random_inputs(program), order=1, region_pieces=1, threads_per_block=threads)


def test_a_small_product_takes_all_warps() -> None:
    """By lanes along the depth, which wait for fewer loads one after another than one lane would."""
    tile = block_tile(32, 32, 32, 512)
    assert tile.lanes_k > 1 and (32 // tile.rows) * (32 // tile.columns) == 16
    alone = BlockTile(8, 1, 2, 1)
    assert block_tile_cycles(tile, 32, 32, 32, 512) < block_tile_cycles(alone, 32, 32, 32, 512)
    assert block_tile(64, 64, 64, 512).kept == 8


@pytest.mark.parametrize("shape", [(32, 32, 32), (1, 200, 100), (128, 16, 256)])
def test_counting_stops_at_a_limit_without_another_choice(shape: tuple[int, int, int]) -> None:
    best = block_tile_cycles(block_tile(*shape, 256), *shape, 256)
    for tile in (BlockTile(8, 1, 2, 1), BlockTile(4, 4, 4, 4), BlockTile(1, 16, 8, 4), BlockTile(16, 2, 1, 1)):
        cycles = block_tile_cycles(tile, *shape, 256)
        assert cycles >= best
        assert block_tile_cycles(tile, *shape, 256, limit=cycles + 1) == cycles
        assert best <= block_tile_cycles(tile, *shape, 256, limit=best) <= cycles


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("op", ["mm", "neg"])
def test_a_product_times_zero_needs_no_operand(op: str, dtype: str) -> None:
    """What nobody else reads is not computed, whether or not it could be fused."""
    b = ProgramBuilder()
    x, w = b.input("x", (12, 8), dtype), b.input("w", (8, 8), dtype)
    h = b.op(op, *((x, w) if op == "mm" else (x,)))
    program = b.build([b.op("mm", b.op("addmm", b.input("c", (12, 8), dtype), h, w, alpha=0), w)])
    for pieces in (0, 1, 2):
        for fuse in (True, False):
            check(program, random_inputs(program), num_blocks=2, region_pieces=pieces, fuse_pointwise=fuse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "n"), [(0, 96), (0, 1), (2, 0), (0, 0)])
def test_large_products_without_outputs(batch: int, n: int, dtype: str) -> None:
    b = ProgramBuilder()
    x, y = b.input("x", (batch, 96, 512), dtype), b.input("y", (batch, 512, n), dtype)
    program = b.build([b.op("bmm", x, y, dtype="float32"), b.op("relu", b.input("z", (3,)))])
    for pieces in (0, None):
        check(program, random_inputs(program), target="sm_90a", region_pieces=pieces)


@pytest.mark.parametrize("op", ["mm", "addmm"])
def test_many_outputs_of_no_depth(op: str) -> None:
    """As many as would share threads if there were something to sum up."""
    b = ProgramBuilder()
    bias = [b.input("c", (70,))] if op == "addmm" else []
    program = b.build([b.op("relu", b.op(op, *bias, b.input("x", (64, 0)), b.input("y", (0, 70))))])
    check(program, random_inputs(program), target=replace(H100, num_sms=2), num_blocks=2)


@pytest.mark.parametrize("shape", [(1, 40, 300), (40, 1, 300)])
@pytest.mark.parametrize("op", ["relu", "cast"])
def test_what_is_fused_into_it_does_not_order_a_vector_product(shape: tuple[int, int, int], op: str) -> None:
    """The matrix lies across in memory, and along once it is stored; or the other way round."""
    m, n, k = shape
    b = ProgramBuilder()
    dtype = "float16" if op == "cast" else "float32"
    across = [b.op(op, b.input(name, size, dtype).T, dtype="float32") for name, size in (("x", (k, m)), ("w", (n, k)))]
    same_bits(b.build([b.op("mm", *across)]))


@pytest.mark.parametrize("outputs", [(1, 512), (17, 31), (5, 128), (5, 205)])
def test_a_thread_has_several_outputs_of_little_depth(outputs: tuple[int, int]) -> None:
    """A whole piece, a part of one, and one more with whole rows of threads or a single output."""
    m, n = outputs
    b = ProgramBuilder()
    x, w, other = b.input("x", (3, m)), b.input("w", (3, n)), b.input("other", outputs)
    total = b.op("addmm", b.input("bias", (n,)), x.T, w)
    program = b.build([b.op("add", total, other), b.op("relu", total, dtype="float16"), total])
    generated = check(program, random_inputs(program), num_blocks=2, target=replace(H100, num_sms=1), **NARROW)
    assert [plan.each for plan in plans(generated)] == [4]


@pytest.mark.parametrize("threads", [128, 256, 512, 1024])
def test_a_warp_sums_several_outputs_of_a_matrix_vector_product(threads: int) -> None:
    """Whole pieces and others, depths that end inside of a step: the sums are exact."""
    for outputs, depth in ((31, 65), (33, 100), (64, 128), (70, 290)):
        for shape, layout in (((1, outputs, depth), "nt"), ((outputs, 1, depth), "nn")):
            program, inputs, expected = product(*shape, layout, "float32")
            generated = generate(program, threads_per_block=threads)
            assert f"tk_vector_product_warps<{threads}>(" in generated.source
            np.testing.assert_array_equal(emulate(generated, inputs, num_blocks=2).outputs[0], expected)
