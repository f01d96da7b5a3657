"""Programs beyond float32: loops, in-place state, uniform values, epilogues and literals of every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator_support import needs_compiler
from harness import check, emulate
from numpy.typing import NDArray
from table import DTYPE_NAMES, INTEGERS, accepts, attr_sets, is_covered

import trainkernel as tk
from trainkernel import reference
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program, TensorSpec
from trainkernel.ops import OPS, domains
from trainkernel.runtime.nvrtc import compile_cubin


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> NDArray[Any]:
    numbers = np.random.default_rng(seed).integers(0, 5, shape)
    return (numbers > 2 if dtype == "bool" else numbers).astype(DTYPES[dtype].numpy)


@needs_compiler
@pytest.mark.parametrize("reverse", [False, True])
def test_loops_carry_and_stack_every_dtype(reverse: bool) -> None:
    inner, outer = ProgramBuilder(), ProgramBuilder()
    carries = [inner.input("carry", (3, 4), dtype) for dtype in DTYPE_NAMES]
    slices = [inner.input("x", (3, 4), dtype) for dtype in DTYPE_NAMES]
    sums = [inner.op("add", carry, x) for carry, x in zip(carries, slices, strict=True)]
    body = inner.build([*sums, *(inner.op("mul", total, x) for total, x in zip(sums, slices, strict=True))])
    starts = [outer.input("start", (3, 4), dtype) for dtype in DTYPE_NAMES]
    stacked = [outer.input("xs", (5, 3, 4), dtype) for dtype in DTYPE_NAMES]
    count = len(DTYPE_NAMES)
    program = outer.build(
        outer.loop(body, [*starts, *stacked], num_carry=count, num_xs=count, length=5, reverse=reverse)
    )
    inputs = [values((3, 4), dtype, 1) for dtype in DTYPE_NAMES] + [values((5, 3, 4), name, 2) for name in DTYPE_NAMES]
    check(program, inputs)
    check(program, inputs, inplace_outputs={position: position for position in range(count)})
    assert Program.from_json(program.to_json()) == program


@needs_compiler
@pytest.mark.parametrize("dtype", INTEGERS)
def test_counters_are_updated_in_place(dtype: str) -> None:
    b = ProgramBuilder()
    counter, x = b.input("counter", (1000,), dtype), b.input("x", (1000,))
    steps = b.scalar("steps", "int32")
    program = b.build([b.op("add", counter, steps, dtype=dtype), b.op("mul", x, counter, dtype="float32")])
    inputs = [values((1000,), dtype), values((1000,), "float32"), 300]
    check(program, inputs, inplace_outputs={0: 0})


@needs_compiler
def test_uniform_values_keep_their_type() -> None:
    """A step counter's integer arithmetic and its float are computed once per launch."""
    b = ProgramBuilder()
    step, x, y = b.scalar("step", "int32"), b.input("x", (70, 33)), b.input("y", (70, 33), "float64")
    following = b.op("mul", b.op("add", step, 16_777_217), 3)
    rate = b.op("rsqrt", following, dtype="float64")
    program = b.build(
        [b.op("mul", x, rate, dtype="float32"), b.op("mul", y, rate), b.op("add", x, following, dtype="int64")]
    )
    generated = generate(program)
    assert "int v_add" in generated.source and "double v_rsqrt" in generated.source
    check(program, [7, values((70, 33), "float32"), values((70, 33), "float64")])


@needs_compiler
@pytest.mark.parametrize("sizes", [(33, 70, 65), (1, 201, 33), (40, 3, 5)])
def test_float32_products_continue_in_other_dtypes(sizes: tuple[int, int, int]) -> None:
    """Tile, matrix-vector and thin products whose results are kept as integers and float64."""
    m, k, n = sizes
    b = ProgramBuilder()
    product = b.op("mm", b.input("x", (m, k)), b.input("y", (k, n)))
    whole = b.op("cast", product, dtype="int32")
    program = b.build(
        [product, whole, b.op("mul", whole, 3, dtype="uint8"), b.op("add", product, whole, dtype="float64")]
    )
    inputs = [values((m, k), "float32"), values((k, n), "float32")]
    outputs = emulate(generate(program, fuse_epilogues=True), inputs).outputs
    for got, want in zip(outputs, reference.run(program, inputs), strict=True):
        assert np.array_equal(got, want)  # sums of small whole numbers are exact


def test_literals_are_exact() -> None:
    b = ProgramBuilder()
    x, y = b.input("x", (3,), "int64"), b.input("y", (3,), "float64")
    program = b.build([b.op("maximum", x, -(2**63)), b.op("add", y, 0.1), b.op("add", y, float("nan"))])
    source = generate(program).source
    assert "tk_maximum(v_x, (-9223372036854775807ll - 1))" in source
    assert "tk_add(v_y, 0.1)" in source
    assert "tk_add(v2_y, __longlong_as_double(0x7ff8000000000000ll))" in source or "0x7ff8000000000000ll" in source


def test_a_float32_program_gets_no_other_arithmetic() -> None:
    b = ProgramBuilder()
    x = b.input("x", (3,))
    source = generate(b.build([b.op("maximum", b.op("exp", x), 0)])).source
    assert "double tk_" not in source and "tk_minimum" not in source
    assert "tk_minimum" in generate(b.build([b.op("minimum", x, 0)])).source


def test_a_choice_with_negative_zero_is_a_product() -> None:
    """ptxas gives +0 for -0 where it may choose between the constants -0 and -1."""
    b = ProgramBuilder()
    condition, x = b.input("c", (3,), "bool"), b.input("x", (3,))
    zero = b.op("full", shape=(3,), value=-0.0, dtype="float32")
    outputs = [b.op("where", condition, -0.0, other, dtype="float32") for other in (-1.0, 2, x)]
    outputs.append(b.op("where", condition, -1.0, zero, dtype="float32"))
    program = b.build(outputs)
    source = generate(program).source
    assert "? -0.0f" not in source and ": -0.0f" not in source
    assert source.count("__fmul_rn(-1.0f, (v_c != 0.0f") == 4
    inputs = [np.array([True, False, True]), np.array([1, -2, 3], np.float32)]
    (first, *_) = reference.run(program, inputs)
    assert np.signbit(first).tolist() == [True, True, True]


@needs_compiler
def test_kernels_take_and_give_every_dtype() -> None:
    b = ProgramBuilder()
    specs = [b.input("x", (4, 3), dtype) for dtype in DTYPE_NAMES]
    program = b.build([b.op("add", spec, spec) for spec in specs])
    inputs = [values((4, 3), dtype) for dtype in DTYPE_NAMES]
    expected = reference.run(program, inputs)
    for device in ("emulator", "reference"):
        outputs = tk.compile(program, device=device)(*inputs)
        for got, want in zip(outputs, expected, strict=True):
            assert got.dtype == want.dtype and np.array_equal(got, want)


def every_operation(dtype: str) -> Program:
    """Each op of the table once on operands of a dtype."""
    b = ProgramBuilder()
    outputs: list[TensorSpec] = []
    for op in OPS.values():
        if not is_covered(op) or not accepts(op, dtype):
            continue
        attrs = attr_sets(op, domains.promote([dtype], op.accepts))[0]
        shapes: list[tuple[int, ...]] = [(9, 70)] * max(op.num_inputs) if op.kind == "pointwise" else [(9, 300)]
        if op.kind == "product":
            shapes = [(33,), (17, 40), (40, 33)][-max(op.num_inputs) :]
        if op.name == "bmm":
            shapes = [(2, 17, 40), (2, 40, 33)]
        operands = [b.input("x", shape, dtype) for shape in shapes[: 1 if op.name == "pow" else None]]
        results = b.multi(op.name, *operands, dtype=dtype, **attrs)
        outputs += [*results, b.op("cast", results[0], dtype=DTYPE_NAMES[len(outputs) % len(DTYPE_NAMES)])]
    return b.build(outputs)


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [("float32", "sm_80"), ("float64", "sm_80"), ("int32", "sm_90"), ("uint32", "sm_90"), ("int64", "sm_90")],
)
def test_nvrtc_compiles_every_operation(dtype: str, arch: str) -> None:
    """Header-free, with nothing but the architecture for an option."""
    assert compile_cubin(generate(every_operation(dtype)).source, arch).startswith(b"\x7fELF")
