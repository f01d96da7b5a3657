"""The reference against facts that do not come from it: hand values, IEEE rules, Python loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from trainkernel import reference
from trainkernel.builder import ProgramBuilder
from trainkernel.errors import ArgumentError, ProgramError
from trainkernel.ir import Program, TensorSpec
from trainkernel.ops import domains

NAN, INF = math.nan, math.inf
BF16 = np.dtype(ml_dtypes.bfloat16)


def apply(
    op: str,
    *operands: Any,
    dtype: str = "float32",
    shape: Sequence[int] | None = None,
    input_dtype: Any = np.float32,
    **attrs: Any,
) -> NDArray[Any]:
    """One operation on arrays (lists are float32 tensors) and Python numbers (scalar operands)."""
    b = ProgramBuilder()
    specs: list[Any] = []
    arrays: list[NDArray[Any]] = []
    for operand in operands:
        if isinstance(operand, (int, float)):
            specs.append(operand)
            continue
        array = operand if isinstance(operand, np.ndarray) else np.asarray(operand, dtype=input_dtype)
        specs.append(b.input(f"x{len(arrays)}", array.shape, array.dtype.name))
        arrays.append(array)
    outputs = b.multi(op, *specs, dtype=dtype, shape=shape, **attrs)
    results = reference.run(b.build(outputs), arrays)
    return results[0] if len(results) == 1 else np.stack(results)


def same(got: NDArray[Any], want: Any) -> None:
    """Equal bits up to the kind of NaN, the sign of zero included."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        got = got.astype(np.float64)
        expected = np.broadcast_to(np.asarray(want).astype(np.float64), got.shape)
    assert np.array_equal(got, expected, equal_nan=True), (got, expected)
    numbers = ~np.isnan(got)
    assert np.array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers])), (got, expected)


# ---------------------------------------------------------------------------- pointwise

POINTWISE: dict[str, tuple[str, list[Any], dict[str, Any], Any]] = {
    "add": ("add", [[1, 2], [3, 5]], {}, [4, 7]),
    "add alpha": ("add", [[1, 2], [3, 5]], {"alpha": 2}, [7, 12]),
    "sub": ("sub", [[1, 2], [3, 5]], {}, [-2, -3]),
    "sub alpha": ("sub", [[1, 2], [3, 5]], {"alpha": -0.5}, [2.5, 4.5]),
    "alpha 0 still reads": ("add", [[1, 1], [NAN, INF]], {"alpha": 0}, [NAN, NAN]),
    "alpha rounds to float32": ("add", [[0.0], [1.0]], {"alpha": 0.1}, [float(np.float32(0.1))]),
    "mul": ("mul", [[3, -0.0, INF, INF], [4, 2, 0, -1]], {}, [12, -0.0, NAN, -INF]),
    "div": ("div", [[1, -1, 0, 3, 0], [0, 0, 0, 2, -5]], {}, [INF, -INF, NAN, 1.5, -0.0]),
    "neg": ("neg", [[1, 0.0, -0.0, INF, NAN]], {}, [-1, -0.0, 0.0, -INF, NAN]),
    "cast": ("cast", [[1.5, -0.0, NAN, -INF]], {}, [1.5, -0.0, NAN, -INF]),
    "relu": ("relu", [[-1, -0.0, 0.0, 2, NAN, INF, -INF]], {}, [0, -0.0, 0, 2, NAN, INF, 0]),
    "pow default": ("pow", [[3, -2, NAN, -INF, -0.0]], {}, [9, 4, NAN, INF, 0]),
    "pow operand": ("pow", [[4, 9, 0], 0.5], {}, [2, 3, 0]),
    "pow attr": ("pow", [[2, -2, 0]], {"exponent": 3}, [8, -8, 0]),
    "pow 0": ("pow", [[2, NAN, 0, INF], 0], {}, [1, 1, 1, 1]),
    "pow negative base": ("pow", [[-2, -2, 0], -1.5], {}, [NAN, NAN, INF]),
    "pow scalar base": ("pow", [3, 4], {"shape": (2,)}, [81, 81]),
    "threshold": ("threshold_backward", [[1, 2, 3, 4, NAN], [-1, 0, 0.5, NAN, 2]], {}, [0, 0, 3, 4, NAN]),
    "threshold -0": ("threshold_backward", [[1, NAN], [-0.0, -1]], {}, [0, 0]),
    "threshold attr": ("threshold_backward", [[1, 2, 3], [1, 2, 3]], {"threshold": 2}, [0, 0, 3]),
    "threshold inf": ("threshold_backward", [[1, 2], [INF, NAN]], {"threshold": INF}, [0, 2]),
    "full": ("full", [], {"value": 1.5, "shape": (3,)}, [1.5, 1.5, 1.5]),
    "full inf": ("full", [], {"value": -INF, "shape": (2,)}, [-INF, -INF]),
    "full nan": ("full", [], {"value": NAN, "shape": (2,)}, [NAN, NAN]),
    "full -0": ("full", [], {"value": -0.0, "shape": (1,)}, [-0.0]),
    "full huge": ("full", [], {"value": 10**400, "shape": (1,)}, [INF]),
    "exp": ("exp", [[0, INF, -INF, NAN, -0.0]], {}, [1, INF, 0, NAN, 1]),
    "log": ("log", [[1, 0, -0.0, -1, INF, NAN]], {}, [0, -INF, -INF, NAN, INF, NAN]),
    "tanh": ("tanh", [[0, -0.0, INF, -INF, NAN]], {}, [0, -0.0, 1, -1, NAN]),
    "sqrt": ("sqrt", [[4, 0, -0.0, -1, INF, NAN]], {}, [2, 0, -0.0, NAN, INF, NAN]),
    "maximum": ("maximum", [[1, 5, NAN, 2, -INF], [3, 2, 1, NAN, INF]], {}, [3, 5, NAN, NAN, INF]),
    "where": ("where", [[1, 0, -0.0, NAN, INF], [1] * 5, [2, 2, NAN, 2, 2]], {}, [1, 2, NAN, 1, 1]),
    "scalar first": ("sub", [1, [3, 4]], {}, [-2, -3]),
    "scalar second": ("mul", [[3, 4], 2.5], {}, [7.5, 10]),
    "scalar inf": ("mul", [[3, -4, 0], INF], {}, [INF, -INF, NAN]),
    "scalar nan": ("add", [NAN, [3, 4]], {}, [NAN, NAN]),
    "scalar -0": ("add", [[-0.0, 0.0], -0.0], {}, [-0.0, 0.0]),
    "scalars only": ("add", [1, 2.5], {}, 3.5),
    "pow 0.5": ("pow", [[-0.0, -INF, 4, -1, NAN], 0.5], {}, [0.0, INF, 2, NAN, NAN]),
    "pow 0.5 of a scalar": ("pow", [-INF], {"exponent": 0.5}, INF),
    "broadcast": ("add", [[[1], [2]], [10, 20, 30]], {}, [[11, 21, 31], [12, 22, 32]]),
    "broadcast output": ("neg", [[1, 2]], {"shape": (3, 2)}, [[-1, -2]] * 3),
    "lt": ("compare", [[1, 2, 3, NAN, 1], [2, 2, 2, 2, NAN]], {"comparison": "lt"}, [1, 0, 0, 0, 0]),
    "le": ("compare", [[1, 2, 3, NAN], [2, 2, 2, 2]], {"comparison": "le"}, [1, 1, 0, 0]),
    "gt": ("compare", [[1, 2, 3, NAN], [2, 2, 2, 2]], {"comparison": "gt"}, [0, 0, 1, 0]),
    "ge": ("compare", [[1, 2, 3, NAN], [2, 2, 2, 2]], {"comparison": "ge"}, [0, 1, 1, 0]),
    "eq": ("compare", [[1, 2, -0.0, NAN], [2, 2, 0.0, NAN]], {"comparison": "eq"}, [0, 1, 1, 0]),
    "ne": ("compare", [[1, 2, -0.0, NAN], [2, 2, 0.0, NAN]], {"comparison": "ne"}, [1, 0, 0, 1]),
}


@pytest.mark.parametrize("case", list(POINTWISE))
def test_pointwise(case: str) -> None:
    op, operands, attrs, want = POINTWISE[case]
    same(apply(op, *operands, **attrs), want)


def test_bool_is_one_where_not_zero() -> None:
    got = apply("cast", [0.0, -0.0, 1e-45, 2.0, NAN, -INF], dtype="bool")
    assert got.dtype == np.bool_ and got.tolist() == [False, False, True, True, True, True]
    flags = np.array([True, False])
    same(apply("add", flags, flags), [2, 0])
    same(apply("where", flags, [1, 2], [3, 4]), [1, 4])


def test_bool_of_what_float32_does_not_hold() -> None:
    b = ProgramBuilder()
    x = b.input("x", (3,))
    program = b.build([b.op("mul", x, x, dtype="bool")])
    same(reference.run(program, [np.array([1e-30, 1e-20, 1e30], np.float32)])[0], np.array([False, True, True]))


def test_square_is_correctly_rounded() -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    same(apply("pow", x), x * x)
    same(apply("pow", x, 2), x * x)
    same(apply("pow", x, 2.0), x * x)


# ---------------------------------------------------------------------------- reductions

M = [[1, 2, 3], [4, 5, 6]]

REDUCTIONS: dict[str, tuple[str, Any, dict[str, Any], Any]] = {
    "all": ("sum", M, {}, 21),
    "None": ("sum", M, {"dims": None}, 21),
    "no dims": ("sum", M, {"dims": ()}, M),
    "dim 0": ("sum", M, {"dims": (0,)}, [5, 7, 9]),
    "dim -1": ("sum", M, {"dims": (-1,)}, [6, 15]),
    "both": ("sum", M, {"dims": (-1, 0)}, 21),
    "list": ("sum", M, {"dims": [0]}, [5, 7, 9]),
    "kept": ("sum", M, {"dims": (1,), "shape": (2, 1)}, [[6], [15]]),
    "all kept": ("sum", M, {"shape": (1, 1)}, [[21]]),
    "middle": ("sum", [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], {"dims": (1,)}, [[4, 6], [12, 14]]),
    "0-d": ("sum", 3 * np.ones((), np.float32), {}, 3),
    "0-d no dims": ("mean", 3 * np.ones((), np.float32), {"dims": ()}, 3),
    "empty sum": ("sum", np.zeros((0, 3), np.float32), {"dims": (0,)}, [0, 0, 0]),
    "empty sum of all": ("sum", np.zeros((0, 3), np.float32), {}, 0),
    "empty rows": ("sum", np.zeros((0, 3), np.float32), {"dims": (1,)}, np.zeros(0)),
    "empty mean": ("mean", np.zeros((2, 0), np.float32), {"dims": (1,)}, [NAN, NAN]),
    "mean": ("mean", M, {}, 3.5),
    "mean divisor": ("mean", M, {"dims": (0,)}, [2.5, 3.5, 4.5]),
    "mean of two dims": ("mean", np.ones((2, 3, 4), np.float32) * 6, {"dims": (0, 2)}, [6, 6, 6]),
    "mean no dims": ("mean", M, {"dims": ()}, M),
    "nan": ("sum", [[1, NAN], [2, 3]], {"dims": (1,)}, [NAN, 5]),
    "inf": ("sum", [[INF, 1], [INF, -INF]], {"dims": (1,)}, [INF, NAN]),
    "max": ("max", M, {"dims": (0,)}, [4, 5, 6]),
    "max nan": ("max", [[1, NAN], [-INF, -INF]], {"dims": (1,)}, [NAN, -INF]),
    "max empty rows": ("max", np.zeros((0, 3), np.float32), {"dims": (1,)}, np.zeros(0)),
}


@pytest.mark.parametrize("case", list(REDUCTIONS))
def test_reductions(case: str) -> None:
    op, operand, attrs, want = REDUCTIONS[case]
    same(apply(op, operand, **attrs), want)


def test_softmax_stats() -> None:
    largest, total = apply("softmax_stats", [[0, 0], [5, 5 - math.log(4)], [-1000, 1000]], dims=(1,))
    assert largest.tolist() == [0, 5, 1000]
    assert np.allclose(total, [2, 1.25, 1], rtol=1e-6)
    largest, total = apply("softmax_stats", [[INF, 1, INF], [-INF, -INF, -INF], [NAN, 1, 2], [-INF, 0, 0]], dims=(1,))
    same(largest, [INF, -INF, NAN, 0])
    same(total, [2, 3, NAN, 2])


def test_a_sum_does_not_lose_small_terms() -> None:
    x = np.array([2.0**24] + [1.0] * 64, np.float32)
    assert apply("sum", x) == 2**24 + 64


# ---------------------------------------------------------------------------- products


def test_products_by_hand() -> None:
    a, b = [[1, 2], [3, 4], [5, 6]], [[1, 0, 2], [-1, 3, 1]]
    want = np.array([[-1, 6, 4], [-1, 12, 10], [-1, 18, 16]])
    same(apply("mm", a, b), want)
    same(apply("addmm", [1, 2, 3], a, b), want + [1, 2, 3])
    same(apply("addmm", [[1], [2], [3]], a, b, alpha=2, beta=-1), 2 * want - [[1], [2], [3]])
    same(apply("addmm", np.ones((), np.float32), a, b), want + 1)


def test_beta_0_never_reads_the_bias() -> None:
    same(apply("addmm", [NAN, INF], [[1.0]], [[2, 3]], beta=0), [[2, 3]])
    same(apply("addmm", [NAN, INF], [[1.0]], [[2, 3]], beta=0.0), [[2, 3]])
    same(apply("addmm", [NAN, INF], [[1.0]], [[2, 3]]), [[NAN, INF]])


def test_alpha_0_skips_the_product() -> None:
    same(apply("addmm", [4, 5], [[NAN]], [[2, INF]], alpha=0, beta=2), [[8, 10]])
    same(apply("addmm", [NAN, NAN], [[NAN]], [[2, INF]], alpha=0, beta=0), [[0, 0]])


def test_no_terms_give_zeros() -> None:
    a, b = np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)
    same(apply("mm", a, b), np.zeros((2, 3)))
    same(apply("addmm", [1, 2, 3], a, b), [[1, 2, 3]] * 2)
    same(apply("mm", np.zeros((0, 2), np.float32), np.zeros((2, 3), np.float32)), np.zeros((0, 3)))


def test_products_spread_nan_and_inf() -> None:
    same(apply("mm", [[NAN, 0], [INF, 0], [1, 1]], [[1], [1]]), [[NAN], [INF], [2]])
    same(apply("mm", [[INF, 1]], [[0], [1]]), [[NAN]])


def test_products_accumulate_beyond_the_output_dtype() -> None:
    a = np.full((1, 4096), 1.0, np.float16)
    assert apply("mm", a, a.T, dtype="float16") == 4096
    assert apply("mm", a * np.float16(8), a.T * np.float16(8), dtype="float16") == INF


# ---------------------------------------------------------------------------- rounding


def ties(dtype: np.dtype[Any]) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """The midpoint above every finite number of a 16-bit dtype, and its neighbour that is even."""
    numbers = np.arange(2**15, dtype=np.uint16).view(dtype)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    exact = numbers.astype(np.float64)
    # Past the largest number the next one would be a whole step further: infinity stands there.
    above = np.append(exact[1:], 2 * exact[-1] - exact[-2])
    bits = np.arange(len(numbers), dtype=np.uint16)
    even = (bits + (bits & 1)).astype(np.uint16).view(dtype)
    return (exact + above) / 2, even


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ties_round_to_even_and_neighbours_do_not(dtype: str) -> None:
    numpy_dtype = np.dtype(np.float16) if dtype == "float16" else BF16
    midpoints, even = ties(numpy_dtype)
    bits = np.arange(len(even), dtype=np.uint16)
    for sign in (1.0, -1.0):
        flip = np.uint16(0 if sign > 0 else 0x8000)
        rounded = domains.round_once(sign * midpoints, numpy_dtype).view(np.uint16)
        assert np.array_equal(rounded, even.view(np.uint16) | flip)
        # Values so near to a tie that a step through float32 would land on it.
        above = domains.round_once(sign * np.nextafter(midpoints, np.inf), numpy_dtype).view(np.uint16)
        below = domains.round_once(sign * np.nextafter(midpoints, -np.inf), numpy_dtype).view(np.uint16)
        assert np.array_equal(above, (bits + np.uint16(1)) | flip)
        assert np.array_equal(below, bits | flip)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_number_survives(dtype: str) -> None:
    numpy_dtype = np.dtype(np.float16) if dtype == "float16" else BF16
    numbers = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(numpy_dtype)
    for through in ("float32", dtype):
        got = apply("cast", numbers, dtype=through)
        same(got, numbers)
        same(apply("cast", got, dtype=dtype), numbers)


def test_ties_of_float32_inputs() -> None:
    for dtype, numpy_dtype in (("float16", np.dtype(np.float16)), ("bfloat16", BF16)):
        midpoints, even = ties(numpy_dtype)
        fits = midpoints.astype(np.float32).astype(np.float64) == midpoints
        got = apply("cast", midpoints[fits].astype(np.float32), dtype=dtype)
        assert fits.mean() > 0.99 and np.array_equal(got.view(np.uint16), even[fits].view(np.uint16))


def test_rounding_at_the_edges() -> None:
    same(apply("cast", [65504, 65519.996, 65520, -65520], dtype="float16"), [65504, 65504, INF, -INF])
    same(
        apply("cast", [2.0**-24, 2.0**-25, 1.0001 * 2.0**-25, -(2.0**-26)], dtype="float16"), [2**-24, 0, 2**-24, -0.0]
    )
    assert np.isinf(apply("cast", [np.finfo(np.float32).max], dtype="bfloat16")[0])
    values = np.array([1e-50, -1e-50, 1e300, -1e300, NAN, 0.0, -0.0])
    same(domains.round_once(values, BF16), [0, -0.0, INF, -INF, NAN, 0, -0.0])
    same(domains.round_once(values, np.dtype(np.float16)), [0, -0.0, INF, -INF, NAN, 0, -0.0])


def test_one_rounding_per_operation() -> None:
    """1 + 2**-8 is a bf16 tie; a little more must round up although float32 cannot hold it."""
    got = apply("add", [1 + 2.0**-8], [2.0**-40], dtype="bfloat16")
    assert float(got[0]) == 1 + 2.0**-7
    for values, want in (([3.0, 7.0], Fraction(3, 7)), ([1.0, 3.0], Fraction(1, 3))):
        exact = apply("div", values[:1], values[1:])[0]
        neighbours = [np.nextafter(exact, np.float32(side)) for side in (-9, 9)]
        assert all(abs(Fraction(float(exact)) - want) < abs(Fraction(float(n)) - want) for n in neighbours)


def test_float32_arithmetic_is_ieee() -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(4096).astype(np.float32) * np.float32(10) for _ in range(2))
    for op, want in (("add", x + y), ("sub", x - y), ("mul", x * y), ("div", x / y), ("sqrt", np.sqrt(np.abs(x)))):
        same(apply(op, *((np.abs(x),) if op == "sqrt" else (x, y))), want)


# ---------------------------------------------------------------------------- views and outputs


def test_views_of_inputs() -> None:
    x = TensorSpec("x", (3, 4), (10, 2), 7)
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    outputs = (
        x,
        TensorSpec("x", (4, 3), (2, 10), 7),
        TensorSpec("x", (2,), (20,), 9),
        TensorSpec("x", (2, 3), (0, 2), 7),
        TensorSpec("x", (3, 4), (10, 2), 7, "bfloat16"),
    )
    got = reference.run(Program((x,), (), outputs), [array])
    for result, want in zip(got, (array, array.T, array[::2, 1], [[0, 1, 2]] * 2, array), strict=True):
        same(result, want)
        assert result.flags.c_contiguous and not np.shares_memory(result, array)
    assert got[4].dtype == BF16


def test_arrays_of_any_strides_are_taken() -> None:
    b = ProgramBuilder()
    program = b.build([b.op("neg", b.input("x", (3, 4)))])
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2].T
    same(reference.run(program, [array])[0], -array)


def test_outputs_convert_once() -> None:
    b = ProgramBuilder()
    x = b.input("x", (3,))
    program = b.build([TensorSpec("x", (3,), (1,), 0, "float16"), TensorSpec("x", (3,), (1,), 0, "bool"), x, x])
    half, flags, first, second = reference.run(program, [np.array([0.1, 0, 1e9], np.float32)])
    assert half.tolist() == [np.float16(0.1), 0, INF] and flags.tolist() == [True, False, True]
    assert not np.shares_memory(first, second)


def test_scalars_by_value() -> None:
    b = ProgramBuilder()
    x, rate = b.input("x", (2,)), b.scalar("rate")
    program = b.build([b.op("mul", x, rate), rate])
    got, back = reference.run(program, [np.array([1, 2], np.float32), 0.1])
    same(got, np.array([1, 2], np.float32) * np.float32(0.1))
    assert back.shape == () and back == np.float32(0.1)


def test_an_int32_scalar_is_read_as_float32() -> None:
    """So the device reads it, and so a Python number is rounded first."""
    b = ProgramBuilder()
    steps = b.scalar("steps", "int32")
    program = b.build([b.op("sub", steps, 2.0**24), TensorSpec("steps", (), (), 0, "float16")])
    difference, back = reference.run(program, [2**24 + 3])
    assert difference == 4 and back == np.inf


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", value) for value in ("1", None, np.ones(3), 10**400)]
    + [("int32", value) for value in ("1", 1.5, 2**31, -(2**31) - 1, math.nan, np.float32(1))],
)
def test_wrong_scalars(dtype: str, value: Any) -> None:
    b = ProgramBuilder()
    program = b.build([b.op("add", b.scalar("s", dtype), 1)])
    with pytest.raises(ArgumentError, match=r"input 0 .'s'.: got "):
        reference.run(program, [value])


def test_wrong_arguments() -> None:
    b = ProgramBuilder()
    program = b.build([b.op("neg", b.input("x", (3,)))])
    with pytest.raises(ArgumentError, match="takes 1 inputs, got 0"):
        reference.run(program, [])
    with pytest.raises(ArgumentError, match=r"input 0 \('x'\): got float64\[3\], needs float32\[3\]"):
        reference.run(program, [np.zeros(3)])
    with pytest.raises(ArgumentError, match=r"input 0 .* inhomogeneous"):
        reference.run(program, [[[1], [1, 2]]])
    with pytest.raises(ArgumentError, match="got float32"):
        reference.run(program, [np.zeros(4, np.float32)])
    with pytest.raises(ProgramError):
        reference.run(Program((), (), (TensorSpec.dense("x", (3,)),)), [])


# ---------------------------------------------------------------------------- loops


def scan(reverse: bool = False, dynamic: bool = False, length: int = 5) -> Program:
    """carry <- carry * c + x; y = carry, before the step."""
    body = ProgramBuilder()
    c, carry, x = body.input("c", ()), body.input("carry", (2,)), body.input("x", (2,))
    step = body.build([body.op("add", body.op("mul", carry, c), x, name="next"), carry])
    b = ProgramBuilder()
    operands = [b.input("c", ()), b.input("start", (2,)), b.input("xs", (length, 2))]
    count = b.scalar("steps", "int32") if dynamic else length
    return b.build(
        b.loop(step, operands, num_carry=1, num_xs=1, length=count, room=length, reverse=reverse, name="scan")
    )


def scan_by_hand(c: float, start: Any, xs: Any, order: Sequence[int]) -> tuple[Any, Any]:
    carry, history = np.array(start), np.zeros_like(xs)
    for step in order:
        history[step] = carry
        carry = (carry * np.float32(c)).astype(np.float32) + xs[step]
    return carry, history


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [None, 0, 1, 3, 5])
def test_loops(reverse: bool, steps: int | None) -> None:
    xs = np.arange(10, dtype=np.float32).reshape(5, 2)
    arguments: list[Any] = [np.float32(0.5) * np.ones((), np.float32), np.array([1, 2], np.float32), xs]
    if steps is not None:
        arguments.append(steps)
    got = reference.run(scan(reverse, dynamic=steps is not None), arguments)
    order = list(range(5 if steps is None else steps))
    want = scan_by_hand(0.5, arguments[1], xs, order[::-1] if reverse else order)
    for result, expected in zip(got, want, strict=True):
        same(result, expected)


@pytest.mark.parametrize("steps", [-1, 6])
def test_a_dynamic_length_outside_its_room_is_refused(steps: int) -> None:
    with pytest.raises(ArgumentError, match=rf"length 'steps' is {steps}; it must lie in 0\.\.5"):
        reference.run(
            scan(dynamic=True), [np.ones((), np.float32), np.zeros(2, np.float32), np.zeros((5, 2), np.float32), steps]
        )


def test_length_0_returns_the_start() -> None:
    start = np.array([3, 4], np.float32)
    final, history = reference.run(scan(length=0), [np.ones((), np.float32), start, np.zeros((0, 2), np.float32)])
    same(final, start)
    assert history.shape == (0, 2)


def test_nested_loops() -> None:
    """The inner loop doubles three times, the outer adds its slice: a value by hand."""
    inner = ProgramBuilder()
    doubled = inner.build([inner.op("add", inner.input("v", (2,)), inner.input("one", ()), name="w")])
    doubled = Program(doubled.inputs[::-1], doubled.operations, doubled.outputs)
    body = ProgramBuilder()
    one, carry, x = body.input("one", ()), body.input("carry", (2,)), body.input("x", (2,))
    (thrice,) = body.loop(doubled, [one, carry], num_carry=1, length=3, name="inner")
    step = body.build([body.op("mul", thrice, x, name="next")])
    b = ProgramBuilder()
    operands = [b.input("one", ()), b.input("start", (2,)), b.input("xs", (2, 2))]
    program = b.build(b.loop(step, operands, num_carry=1, num_xs=1, length=2, name="outer"))
    (got,) = reference.run(
        program, [np.ones((), np.float32), np.array([0, 1], np.float32), np.array([[1, 2], [3, 4]], np.float32)]
    )
    same(got, [((0 + 3) * 1 + 3) * 3, ((1 + 3) * 2 + 3) * 4])


def test_loops_read_views_and_swap_carries() -> None:
    """Stacked inputs may be views; carries that swap must all read the old values."""
    body = ProgramBuilder()
    a, b_, x = body.input("a", (2,)), body.input("b", (2,)), body.input("x", (2,))
    step = body.build([b_, a, body.op("add", a, x, name="y")])
    b = ProgramBuilder()
    first, second, xs = b.input("first", (2,)), b.input("second", (2,)), b.input("xs", (2, 3))
    program = b.build(b.loop(step, [first, second, xs.T], num_carry=2, num_xs=1, length=3))
    arrays = [np.array([1, 2]), np.array([10, 20]), np.array([[1, 2, 3], [4, 5, 6]])]
    got = reference.run(program, [array.astype(np.float32) for array in arrays])
    for result, want in zip(got, ([10, 20], [1, 2], [[2, 6], [12, 25], [4, 8]]), strict=True):
        same(result, want)


def test_inputs_are_unchanged() -> None:
    arrays = [np.ones((), np.float32), np.zeros(2, np.float32), np.ones((5, 2), np.float32)]
    before = [array.copy() for array in arrays]
    reference.run(scan(), arrays)
    for array, copy in zip(arrays, before, strict=True):
        same(array, copy)


@pytest.mark.parametrize("value", [None, "1", True, 1.5, [1], 2**31, np.zeros(1), np.timedelta64(1, "s")])
def test_a_scalar_must_be_a_number_of_its_dtype(value: Any) -> None:
    b = ProgramBuilder()
    x = b.input("x", (2,))
    b.scalar("steps", "int32")
    program = b.build([b.op("add", x, 1.0)])
    with pytest.raises(ArgumentError, match=r"input 1 \('steps'\): got"):
        reference.run(program, [np.zeros(2, np.float32), value])


@pytest.mark.parametrize("inputs", [None, 5, np.zeros((1, 2), np.float32)])
def test_inputs_must_be_a_list(inputs: Any) -> None:
    b = ProgramBuilder()
    program = b.build([b.op("add", b.input("x", (2,)), 1.0)])
    with pytest.raises(ArgumentError, match=r"inputs: got .*, needs a list or tuple"):
        reference.run(program, inputs)
    with pytest.raises(ArgumentError, match="masked array"):
        reference.run(program, [np.ma.masked_array(np.zeros(2, np.float32), [True, False])])
