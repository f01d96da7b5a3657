"""What fusion does, row by row: which values are stored, which are evaluated where, and that the bits stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import bits, check, emulate
from numpy.typing import NDArray

from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Operation, Program, TensorSpec
from trainkernel.passes import canonicalize_transposed_mm
from trainkernel.reference import run

TENSOR_CORE_CALL = re.compile(r"= tk_pipeline_sums<\w+, \d+")
"""A call with numbers for tile sizes: from a task, not from one template to another."""

ON: dict[str, Any] = {"fuse_pointwise": True, "fuse_epilogues": True, "inline_input_casts": True}
OFF: dict[str, Any] = {"fuse_pointwise": False, "fuse_epilogues": False, "inline_input_casts": False}


def inputs_of(program: Program) -> list[NDArray[Any]]:
    """Normal values for all (dense) inputs of a program."""
    rng = np.random.default_rng(3)
    return [rng.standard_normal(spec.shape).astype(DTYPES[spec.dtype].numpy) for spec in program.inputs]


def counts(program: Program, **options: Any) -> tuple[int, int]:
    """Materialized and inlined operations, after proving that the kernel is right."""
    generated = check(program, inputs_of(program), **options)
    return generated.materialized_operations, generated.inlined_operations


def same_bits(program: Program, *variants: dict[str, Any]) -> list[GeneratedKernel]:
    """The kernels under each set of options, whose outputs agree bit for bit."""
    kernels, found = [], []
    for options in variants:
        kernels.append(check(program, inputs_of(program), **options))
        found.append([bits(output) for output in emulate(kernels[-1], inputs_of(program)).outputs])
    assert all(each == found[0] for each in found)
    return kernels


# ---------------------------------------------------------------------------- pointwise inlining


def chain() -> Program:
    b = ProgramBuilder()
    x, y = b.input("x", (33, 7)), b.input("y", (7,))
    h = b.op("mul", b.op("relu", x), y)
    return b.build([b.op("add", h, 1.5)])


def test_a_chain_is_one_task() -> None:
    assert counts(chain(), **ON) == (1, 2)
    assert counts(chain(), **OFF) == (3, 0)
    fused, unfused = same_bits(chain(), ON, OFF)
    assert fused.grid_barriers == 0 and unfused.grid_barriers == 2
    assert fused.workspace_bytes == 256 < unfused.workspace_bytes


@pytest.mark.parametrize("dims", [(0,), (1,), None])
def test_into_a_reduction(dims: tuple[int, ...] | None) -> None:
    b = ProgramBuilder()
    x, y = b.input("x", (20, 33)), b.input("y", (20, 33))
    program = b.build([b.op("sum", b.op("exp", b.op("mul", x, y)), dims=dims)])
    assert counts(program, **ON) == (1, 2)
    assert counts(program, **OFF) == (3, 0)
    same_bits(program, ON, OFF)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_into_a_product_loader(dtype: str, transposed: bool) -> None:
    b = ProgramBuilder()
    x = b.input("x", (40, 20), dtype) if not transposed else b.input("x", (20, 40), dtype).T
    w = b.input("w", (20, 33), dtype)
    h = b.op("relu", x, shape=(40, 20)) if not transposed else b.op("relu", x.T).T
    program = b.build([b.op("mm", h, b.op("mul", w, 0.5), dtype="float32")])
    assert counts(program, **ON) == (1, 2)
    assert counts(program, **OFF) == (3, 0)
    same_bits(program, ON, OFF)


def test_a_value_of_two_operand_positions_is_stored() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (16, 16)), b.input("w", (16, 16))
    h = b.op("exp", x)
    program = b.build([b.op("mm", h, w), b.op("sum", h, dims=(0,))])
    assert counts(program, **ON) == (3, 0)
    same_bits(program, ON, OFF, {})


def test_one_operation_may_use_a_value_twice() -> None:
    b = ProgramBuilder()
    x = b.input("x", (9, 16))
    h = b.op("tanh", x)
    same_bits(b.build([b.op("mul", h, h)]), ON, OFF, {})
    b = ProgramBuilder()
    h = b.op("tanh", b.input("x", (16, 16)))
    same_bits(b.build([b.op("mm", h, h.T), b.op("add", h, h.T)]), ON, OFF, {})


def test_views_of_an_inlined_value() -> None:
    b = ProgramBuilder()
    x, y = b.input("x", (12, 10)), b.input("y", (5, 4))
    h = b.op("neg", x)
    sliced = TensorSpec(h.buffer, (5, 4), (2, 20), 11)
    program = b.build([b.op("add", y, sliced)])
    assert counts(program, **ON) == (1, 1)
    same_bits(program, ON, OFF)


def test_a_rounding_intermediate_rounds_when_inlined() -> None:
    """The intermediate's dtype is part of the meaning: fusing must not keep more bits."""
    b = ProgramBuilder()
    x = b.input("x", (300,))
    h = b.op("mul", x, x, dtype="bfloat16")
    program = b.build([b.op("mul", b.op("add", h, 1, dtype="float16"), 3, dtype="float32")])
    assert counts(program, **ON) == (1, 2)
    same_bits(program, ON, OFF)


def test_a_bool_intermediate_is_zero_or_one_when_inlined() -> None:
    b = ProgramBuilder()
    x = b.input("x", (300,))
    h = b.op("mul", x, 7, dtype="bool")
    program = b.build([b.op("add", h, h, dtype="float32")])
    (result,) = emulate(generate(program, **ON), inputs_of(program)).outputs
    assert set(np.unique(result)) == {2.0}
    same_bits(program, ON, OFF)


# ---------------------------------------------------------------------------- input casts


def test_input_casts_are_inlined_into_every_consumer() -> None:
    b = ProgramBuilder()
    w, x, y = b.input("w", (24, 24)), b.input("x", (16, 24), "bfloat16"), b.input("y", (40, 24), "bfloat16")
    low = b.op("cast", w, dtype="bfloat16")
    program = b.build([b.op("mm", x, low), b.op("mm", y, low.T)])
    assert counts(program, **ON) == (2, 1)
    assert counts(program, **(ON | {"inline_input_casts": False})) == (3, 0)
    same_bits(program, ON, OFF, {}, {"inline_input_casts": True}, {"inline_input_casts": False})


# ---------------------------------------------------------------------------- epilogues


def layer(dtype: str = "float32", m: int = 33, k: int = 20, n: int = 40) -> Program:
    b = ProgramBuilder()
    x, w, bias = b.input("x", (m, k), dtype), b.input("w", (k, n), dtype), b.input("bias", (n,))
    z = b.op("add", b.op("mm", x, w, dtype="float32"), bias)
    return b.build([b.op("mul", b.op("tanh", z), 2, dtype=dtype)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [(33, 20, 40), (1, 80, 40), (2, 6, 40), (70, 130, 65), (40, 80, 1)])
def test_a_chain_behind_a_product_runs_on_its_tile(dtype: str, size: tuple[int, int, int]) -> None:
    program = layer(dtype, *size)
    assert counts(program, **ON)[0] <= 2  # one, and the partials where the depth is split
    assert counts(program, **OFF)[1] == 0
    fused, *_ = same_bits(program, ON, OFF, {}, {"fuse_epilogues": False}, {"fuse_pointwise": False})
    assert fused.inlined_operations == 0 or fused.materialized_operations == 2
    assert fused.tensor_core_operations == len(TENSOR_CORE_CALL.findall(fused.source))


def test_epilogue_counts() -> None:
    assert counts(layer(), **ON) == (1, 0)
    assert counts(layer(), fuse_epilogues=True, fuse_pointwise=False) == (1, 0)
    assert counts(layer(), fuse_epilogues=False, fuse_pointwise=True) == (2, 2)
    assert counts(layer(), **OFF) == (4, 0)


def test_an_epilogue_reads_other_operands_at_the_tile() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (20, 18)), b.input("w", (18, 30))
    gate, row, column = b.input("gate", (30, 20)), b.input("row", (1, 30)), b.input("column", (20, 1))
    h = b.op("threshold_backward", b.op("mm", x, w), gate.T)
    program = b.build([b.op("add", b.op("mul", h, row), column)])
    assert counts(program, **ON) == (1, 0)
    same_bits(program, ON, OFF)


def test_a_square_transpose_is_not_an_epilogue() -> None:
    b = ProgramBuilder()
    h = b.op("mm", b.input("x", (32, 20)), b.input("w", (20, 32)))
    program = b.build([b.op("sub", h, h.T)])
    assert counts(program, **ON) == (2, 0)
    same_bits(program, ON, OFF, {})


def test_an_operand_computed_from_the_product_is_not_fused() -> None:
    b = ProgramBuilder()
    h = b.op("mm", b.input("x", (12, 20)), b.input("w", (20, 12)))
    program = b.build([b.op("sub", h, b.op("max", h, dims=(1,), shape=(12, 1)))])
    generated = check(program, inputs_of(program), region_pieces=0, **ON)
    assert generated.materialized_operations == 3 and generated.grid_barriers == 2
    same_bits(program, ON, OFF, {})


def test_operands_computed_after_the_product() -> None:
    """In program order the other operand comes later; the bits and the result stay the same."""
    b = ProgramBuilder()
    x, w, y = b.input("x", (12, 20)), b.input("w", (20, 14)), b.input("y", (12, 14))
    h = b.op("mm", x, w)
    late = b.op("exp", b.op("mean", y, dims=(1,), shape=(12, 1)))
    second = b.op("mm", b.op("relu", y), b.input("v", (14, 14)))
    program = b.build([b.op("mul", h, late), b.op("add", h, second)])
    same_bits(program, ON, OFF, {})


# ---------------------------------------------------------------------------- side epilogues


def test_all_returned_members_are_written_from_the_tile() -> None:
    b = ProgramBuilder()
    h = b.op("mm", b.input("x", (20, 16)), b.input("w", (16, 33)))
    act = b.op("relu", h)
    program = b.build([h, act, b.op("mul", act, act)])
    fused, unfused = same_bits(program, ON, OFF)
    assert fused.grid_barriers == 0 and fused.direct_outputs == 3 and fused.workspace_bytes == 256
    assert unfused.grid_barriers == 2 and unfused.direct_outputs == 3


def test_a_product_that_nothing_else_needs_is_not_stored() -> None:
    b = ProgramBuilder()
    h = b.op("mm", b.input("x", (20, 16)), b.input("w", (16, 33)))
    program = b.build([b.op("relu", h), b.op("tanh", h)])
    fused, unfused = same_bits(program, ON, OFF)
    assert fused.workspace_bytes == 256 and fused.grid_barriers == 0 and fused.direct_outputs == 2
    assert unfused.workspace_bytes > 256


def test_a_member_that_someone_else_reads() -> None:
    b = ProgramBuilder()
    h = b.op("mm", b.input("x", (20, 16)), b.input("w", (16, 33)))
    act = b.op("relu", h)
    program = b.build([h, b.op("mul", act, 2), b.op("sum", act, dims=(0,)), b.op("mm", act, act.T)])
    same_bits(program, ON, OFF, {})


def test_members_returned_as_views_or_in_other_dtypes() -> None:
    b = ProgramBuilder()
    h = b.op("mm", b.input("x", (20, 16)), b.input("w", (16, 20)))
    act = b.op("relu", h)
    low = TensorSpec(act.buffer, act.shape, act.strides, 0, "float16")
    same_bits(b.build([h.T, act, low, act.T, act]), ON, OFF, {})


# ---------------------------------------------------------------------------- transposed products, dead operations


@pytest.mark.parametrize("op", ["mm", "addmm"])
def test_a_product_read_transposed(op: str) -> None:
    b = ProgramBuilder()
    x, w, bias = b.input("x", (20, 16)), b.input("w", (16, 33)), b.input("bias", (33,))
    h = b.op("mm", x, w) if op == "mm" else b.op("addmm", bias, x, w, alpha=0.5)
    program = b.build([h.T])
    rewritten = canonicalize_transposed_mm(program)
    (product,) = rewritten.operations
    assert isinstance(product, Operation)
    assert product.outputs[0].shape == (33, 20) and rewritten.outputs[0].is_dense
    assert product.inputs[-2:] == (w.T, x.T)
    generated = check(rewritten, inputs_of(program))
    assert generated.direct_outputs == 1 and generated.materialized_operations == 1
    before = emulate(generate(program), inputs_of(program)).outputs[0]
    after = emulate(generated, inputs_of(program)).outputs[0]
    assert np.allclose(before, after, rtol=1e-5, atol=1e-5)


def test_a_chain_of_products_read_transposed() -> None:
    """Each product is rewritten, and the second reads the first by then."""
    b = ProgramBuilder()
    x, y, z = b.input("x", (3, 4)), b.input("y", (4, 2)), b.input("z", (2, 5))
    last = b.op("mm", z.T, b.op("mm", x, y).T)
    program = b.build([last.T])
    rewritten = canonicalize_transposed_mm(program)
    first, second = rewritten.operations
    assert isinstance(second, Operation)
    assert first.outputs[0].shape == (2, 3) and second.inputs[0] == first.outputs[0].T
    check(program, inputs_of(program))
    wanted, got = (run(each, inputs_of(program))[0] for each in (program, rewritten))
    np.testing.assert_array_equal(got, wanted)


def _gradients(b: ProgramBuilder) -> tuple[TensorSpec, TensorSpec]:
    """Products of which a sum of gradients is made: 20 x 33, and its transpose's."""
    x, w, v, y = (
        b.input(name, shape) for name, shape in zip("xwvy", ((20, 16), (16, 33), (33, 8), (8, 20)), strict=True)
    )
    return b.op("mm", x, w), b.op("mm", v, y)


@pytest.mark.parametrize(
    "make",
    [
        lambda b, g, h: b.op("add", g, h.T).T,
        lambda b, g, h: b.op("add", b.input("c", (33, 20)), b.op("mul", b.op("sub", g, h.T), 0.5).T),
        lambda b, g, h: (
            b.op("where", b.op("compare", b.op("neg", g), h.T, comparison="lt"), b.input("one", (1, 1)), h.T).T
        ),
    ],
    ids=["sum", "chain", "where"],
)
def test_what_is_made_of_products_turns_with_them(make: Callable[..., TensorSpec]) -> None:
    b = ProgramBuilder()
    program = b.build([make(b, *_gradients(b))])
    rewritten = canonicalize_transposed_mm(program)
    read = [spec for item in rewritten.operations if item.op != "mm" for spec in item.tensor_inputs]
    assert all(spec.is_dense or spec.strides == (0, 0) for spec in read)
    assert rewritten.outputs[0].is_dense
    wanted, got = (run(each, inputs_of(program))[0] for each in (program, rewritten))
    np.testing.assert_array_equal(got, wanted)
    check(program, inputs_of(program))


@pytest.mark.parametrize(
    "make",
    [
        lambda b, g, h: [b.op("add", g, b.input("c", (20, 33))).T],
        lambda b, g, h: [b.op("neg", g).T, g],
        lambda b, g, h: [b.op("mul", g, b.input("bias", (33,))).T],
        lambda b, g, h: [b.op("neg", g).T, b.op("neg", g)],
        lambda b, g, h: [b.op("flip", g, dims=(0,)).T],
    ],
    ids=["another operand", "read straight", "a row", "two readers", "no element by element"],
)
def test_what_would_be_read_across_does_not_turn(make: Callable[..., list[TensorSpec]]) -> None:
    b = ProgramBuilder()
    program = b.build(make(b, *_gradients(b)))
    assert canonicalize_transposed_mm(program) == program


def test_canonicalization_leaves_other_programs_alone() -> None:
    for program in (chain(), layer()):
        assert canonicalize_transposed_mm(program) == program
    b = ProgramBuilder()
    h = b.op("mm", b.input("x", (20, 16)), b.input("w", (16, 33)))
    both = b.build([h, b.op("neg", h.T)])
    assert canonicalize_transposed_mm(both) == both


def test_a_weight_gradient_used_transposed() -> None:
    b = ProgramBuilder()
    x, g, w = b.input("x", (30, 12)), b.input("g", (30, 17)), b.input("w", (17, 12))
    grad = b.op("mm", x.T, g)
    program = b.build([b.op("sub", w, b.op("mul", grad.T, 0.1))])
    same_bits(program, ON, OFF, {})


def test_dead_operations_are_dropped_and_counted_nowhere() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (20, 16), "bfloat16"), b.input("w", (16, 33), "bfloat16")
    dead = b.op("sum", b.op("mm", x, w))
    b.op("exp", dead)
    program = b.build([b.op("relu", x)])
    generated = check(program, inputs_of(program), **OFF)
    assert (generated.materialized_operations, generated.inlined_operations) == (1, 0)
    assert generated.tensor_core_operations == 0 and generated.grid_barriers == 0
    assert generated.workspace_bytes == 256


def test_one_result_of_two_may_be_dead() -> None:
    b = ProgramBuilder()
    x = b.input("x", (20, 16))
    largest, _ = b.multi("softmax_stats", x, dims=(1,))
    _, total = b.multi("softmax_stats", x, dims=(0,))
    same_bits(b.build([largest, total]), ON, OFF)


# ---------------------------------------------------------------------------- reductions with epilogues


@pytest.mark.parametrize("shape", [(3, 5000), (5000, 3), (12, 33), (1, 131)])
@pytest.mark.parametrize("dim", [0, 1])
def test_pointwise_behind_reductions(shape: tuple[int, int], dim: int) -> None:
    b = ProgramBuilder()
    x = b.input("x", shape)
    mean = b.op("mean", b.op("mul", x, x), dims=(dim,))
    program = b.build([b.op("sqrt", b.op("add", mean, 1e-5)), mean])
    same_bits(program, ON, OFF, {}, {"fuse_epilogues": False}, {"fuse_pointwise": False})


def test_softmax_through_its_statistics() -> None:
    b = ProgramBuilder()
    x = b.input("x", (12, 70))
    largest, total = b.multi("softmax_stats", x, dims=(1,), shape=(12, 1))
    weights = b.op("div", b.op("exp", b.op("sub", x, largest)), total)
    program = b.build([weights, b.op("mm", weights, b.input("v", (70, 9)))])
    generated, *_ = same_bits(program, ON, OFF, {})
    (result, _) = emulate(generated, inputs_of(program)).outputs
    assert np.allclose(result.sum(axis=1), 1, rtol=1e-5)


# ---------------------------------------------------------------------------- without bound


def test_a_chain_deeper_than_python_recurses() -> None:
    b = ProgramBuilder()
    x = b.input("x", (12,))
    y = b.op("exp", x)
    for _ in range(300):
        y = b.op("mul", y, 0.5)
    generated = generate(b.build([b.op("sum", y)]), fuse_pointwise=True)
    assert generated.grid_barriers <= 2  # what is not inlined shares a task


def test_views_of_views_that_do_not_cancel() -> None:
    """Each view multiplies the length of the index behind it: twelve make a megabyte of source."""
    b = ProgramBuilder()
    y = b.input("x", (6, 35))
    shapes = [(35, 6), (21, 10), (15, 14), (42, 5)]
    for step in range(16):
        y = b.op("neg", y.reshape(shapes[step % 4]).T)
    program = b.build([y])
    values = [np.arange(210, dtype=np.float32).reshape(6, 35)]
    generated = check(program, values, num_blocks=3)
    assert len(generated.source) < 2 * len(generate(program, fuse_pointwise=False).source)


def test_a_reader_between_two_tasks_that_become_one() -> None:
    """The group of both stands where the later one stood; what reads the first must still follow it."""
    b = ProgramBuilder()
    x, y = b.input("x", (9, 16)), b.input("y", (9, 16))
    first = b.op("exp", x, name="first")
    total = b.op("sum", first, dims=(0,), name="total")
    second = b.op("tanh", y, name="second")
    program = b.build([total, b.op("add", second, first, name="both"), first, second])
    same_bits(program, ON, OFF, {})
