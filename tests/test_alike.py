"""Tasks that are alike share one function, and compute what they computed apart."""

from __future__ import annotations

import numpy as np
import pytest
from harness import check
from region_programs import random_inputs

from trainkernel import Program, ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.product_plans import ProductPlan


def _updates(*shapes: tuple[int, ...]) -> Program:
    b = ProgramBuilder()
    outputs = []
    for n, shape in enumerate(shapes):
        value, gradient = b.input(f"w{n}", shape), b.input(f"g{n}", shape)
        outputs.append(b.op("sub", value, b.op("mul", 0.5, gradient)))
    return b.build(outputs)


def _inputs(program: Program) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(spec.shape).astype(np.float32) for spec in program.inputs]


def test_updates_of_several_shapes_share_a_function() -> None:
    program = _updates((700,), (3, 5), (1200,))
    source = generate(program, fuse_pointwise=False).source
    assert "tasks_0_" in source and source.count("__fsub_rn(v_") == 1
    check(program, _inputs(program), num_blocks=2)


@pytest.mark.parametrize("sizes", [(64, 96), (33, 70)])
def test_divisors_stay_constants(sizes: tuple[int, int]) -> None:
    """A division by a size that differs would be slow for every element."""
    b = ProgramBuilder()
    rows = [b.input(f"x{n}", (40, size)) for n, size in enumerate(sizes)]
    scales = [b.input(f"s{n}", (40, 1)) for n in range(2)]
    program = b.build([b.op("mul", x, s) for x, s in zip(rows, scales, strict=True)])
    assert "/ task." not in generate(program).source and "% task." not in generate(program).source


def test_layers_that_are_alike_share_a_function() -> None:
    """Each layer waits for the one before, so that several stages call the same function."""
    b = ProgramBuilder()
    x = b.input("x", (40, 24))
    for n in range(4):
        x = b.op("tanh", b.op("mm", x, b.input(f"w{n}", (24, 24))))
    program = b.build([x])
    source = generate(program, region_pieces=0).source
    assert source.count("= tanhf(") == 1 and source.count("__device__ TK_NOINLINE void tasks_0_tanh(") == 1
    check(program, _inputs(program), region_pieces=0)


def test_a_loop_and_what_follows_it_share_a_function() -> None:
    body = ProgramBuilder()
    w, carry = body.input("w", (24, 24)), body.input("carry", (40, 24))
    step = body.build([body.op("tanh", body.op("mm", carry, w))])
    b = ProgramBuilder()
    operands = [b.input("w", (24, 24)), b.input("x", (40, 24))]
    (final,) = b.loop(step, operands, num_carry=1, length=3)
    program = b.build([b.op("tanh", b.op("mm", final, b.input("w_after", (24, 24))))])
    check(program, _inputs(program), region_pieces=0)


def test_many_tasks_call_what_they_have_in_common() -> None:
    """Barriers and plain products are not repeated in a kernel of many different tasks."""
    b = ProgramBuilder()
    x = b.input("x", (20, 24))
    for n, op in enumerate(("tanh", "sin", "cos", "sigmoid", "softplus", "erf", "neg", "abs", "relu")):
        x = b.op(op, b.op("mm", x, b.input(f"w{n}", (24, 24))))
    program = b.build([x])
    options = {"region_pieces": 0, "gemm_k_tile": 16}
    source = generate(program, **options).source
    assert "#define TK_GRID_BARRIER_IS __forceinline__" in source and "#define TK_MATRIX_SUMS_IS TK_NOINLINE" in source
    check(program, _inputs(program), num_blocks=3, **options)
    assert "#define TK_GRID_BARRIER_IS TK_NOINLINE" in generate(program, fuse_epilogues=False, **options).source
    check(program, _inputs(program), num_blocks=3, fuse_epilogues=False, **options)


@pytest.mark.parametrize(
    ("dtype", "sizes", "path"), [("bfloat16", (8, 16, 16), "tensor"), ("float32", (7, 9, 50), "panel")]
)
def test_a_block_that_takes_several_products_of_one_piece(dtype: str, sizes: tuple[int, int, int], path: str) -> None:
    """None has a barrier after its last read of shared memory, because none has another piece."""
    m, k, n = sizes
    b = ProgramBuilder()
    x = b.input("x", (m, k), dtype)
    program = b.build([b.op("mm", x, b.input(f"w{at}", (k, n), dtype), dtype="float32") for at in range(3)])
    generated = check(program, random_inputs(program), num_blocks=2, order=1, region_pieces=0, gemm_tile_n=64)
    assert "between tasks 0, 1, 2." in generated.source
    for task in generated.schedule.tasks:
        assert isinstance(task.plan, ProductPlan) and task.plan.path == path and task.plan.num_pieces == 1
