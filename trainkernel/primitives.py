"""One function per op of the table, on traced arrays, NumPy arrays and Python numbers.

These are what derivative rules, batching rules and the NumPy-like layer are written with: no
broadcasting and no promotion, except that a Python number goes with any array. ``binary`` and
``unary`` add both for the functions of ``trainkernel.numpy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainkernel.dtypes import DTYPES, name_of_numpy
from trainkernel.errors import ProgramError, TraceError
from trainkernel.ops import OPS
from trainkernel.ops.entry import broadcast_shapes
from trainkernel.promotion import inexact, is_float, promote
from trainkernel.trace import (
    Aval,
    Shape,
    as_value,
    at_user_line,
    aval_of,
    bind,
    bind_to,
    is_scalar,
    is_tracing,
)

Value = Any


def dtype_name(dtype: Any) -> str:
    """The table's name of a dtype given by name, NumPy dtype or scalar type.

    Raises
    ------
    TraceError
        If the table has no such dtype.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    plain = {bool: "bool", int: "int32", float: "float32"}
    if isinstance(dtype, type) and dtype in plain:
        return plain[dtype]
    try:
        name = name_of_numpy(np.dtype(dtype))
    except TypeError:
        name = None
    if name is None:
        raise TraceError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}{at_user_line()}")
    return name


# ---------------------------------------------------------------------------- making values


def full(shape: Sequence[int], value: float, dtype: Any) -> Value:
    """A constant array; in a traced function the kernel makes it."""
    name, shape = dtype_name(dtype), tuple(shape)
    if not is_tracing():
        return np.full(shape, value, DTYPES[name].numpy)
    number = float(value) if is_float(name) else int(value)
    return bind_to("full", (), {"value": number}, [Aval(shape, name)])[0]


def as_array(x: Any, dtype: str | None = None) -> Value:
    """The value as an array; a Python number becomes a weak one in a traced function.

    Parameters
    ----------
    x : array, number or nested list of numbers
    dtype : str, optional
        Of a Python number; an array keeps its own.
    """
    value = as_value(x)
    if not is_scalar(value):
        return value
    name = aval_of(value).dtype if dtype is None else dtype
    number = float(value) if is_float(name) else int(value)
    if not is_tracing():
        return np.full((), number, DTYPES[name].numpy)
    return bind_to("full", (), {"value": number}, [Aval((), name, True)])[0]


def numeric(x: Any) -> Value:
    """The value, as int32 if it is bool."""
    value = as_value(x)
    return cast(value, "int32") if aval_of(value).dtype == "bool" else value


def iota(size: int, dtype: Any = "int32") -> Value:
    """``0, 1, ..., size - 1``."""
    return bind_to("iota", (), {}, [Aval((size,), dtype_name(dtype))])[0]


def random_bits(key: Value, counter: Value | None = None, *, shape: Sequence[int], stream: int = 0) -> Value:
    """uint32 words of Philox 4x32-10: ``key`` is uint32[..., 2], the result has its leading dims before ``shape``."""
    operands = (key,) if counter is None else (key, counter)
    return bind("random_bits", operands, {"shape": tuple(shape), "stream": stream}, ["uint32"])[0]


# ---------------------------------------------------------------------------- views


def reshape(x: Value, shape: Sequence[int]) -> Value:
    if tuple(shape) == tuple(x.shape):
        return x
    return bind("reshape", (x,), {"shape": tuple(shape)}, [_dtype(x)])[0]


def transpose(x: Value, dims: Sequence[int]) -> Value:
    if tuple(dims) == tuple(range(len(dims))) and len(dims) == len(x.shape):
        return x
    return bind("transpose", (x,), {"dims": tuple(dims)}, [_dtype(x)])[0]


def broadcast(x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
    """``x`` with its dims at ``dims`` of ``shape``, repeated along the others."""
    if is_scalar(x):
        raise TypeError("a Python number is not broadcast: it goes with any array")
    if tuple(shape) == tuple(x.shape):
        return x
    return bind("broadcast", (x,), {"shape": tuple(shape), "dims": tuple(dims)}, [_dtype(x)])[0]


def slice(x: Value, start: Sequence[int], limit: Sequence[int], stride: Sequence[int]) -> Value:
    if all(
        begin == 0 and end == size and step == 1
        for begin, end, step, size in zip(start, limit, stride, x.shape, strict=True)
    ):
        return x
    attrs = {"start": tuple(start), "limit": tuple(limit), "stride": tuple(stride)}
    return bind("slice", (x,), attrs, [_dtype(x)])[0]


def stop_gradient(x: Value) -> Value:
    """The value itself, and a constant to derivatives."""
    return bind("stop_gradient", (x,), {}, [_dtype(x)])[0]


# ---------------------------------------------------------------------------- pointwise


def _dtype(x: Value) -> str:
    return aval_of(x).dtype


def _data_dtype(operands: Sequence[Value]) -> str:
    """The dtype of the arrays among operands, which all have the same."""
    for operand in operands:
        if not is_scalar(operand):
            return _dtype(operand)
    return promote([aval_of(operand) for operand in operands])[0]


def _pointwise(op: str) -> Callable[..., Value]:
    def function(*operands: Value, **attrs: Any) -> Value:
        return bind(op, _literals(operands), attrs, [_data_dtype(operands)])[0]

    function.__name__ = function.__qualname__ = op
    function.__doc__ = f"The op ``{op}``: all arrays have one shape and dtype."
    return function


def _literals(operands: Sequence[Value]) -> tuple[Value, ...]:
    """Python numbers as the op table takes them: a bool is 0 or 1."""
    return tuple(int(operand) if isinstance(operand, bool) else operand for operand in operands)


add, sub, mul, div, neg, relu = (_pointwise(op) for op in ("add", "sub", "mul", "div", "neg", "relu"))
exp, expm1, log, log1p, tanh = (_pointwise(op) for op in ("exp", "expm1", "log", "log1p", "tanh"))
sigmoid, softplus, erf, sin, cos = (_pointwise(op) for op in ("sigmoid", "softplus", "erf", "sin", "cos"))
arcsin, arccos, arctan, arctan2 = (_pointwise(op) for op in ("arcsin", "arccos", "arctan", "arctan2"))
arcsinh, arccosh, cbrt = (_pointwise(op) for op in ("arcsinh", "arccosh", "cbrt"))
sqrt, rsqrt, abs, sign, floor = (_pointwise(op) for op in ("sqrt", "rsqrt", "abs", "sign", "floor"))
ceil, round, maximum, minimum = (_pointwise(op) for op in ("ceil", "round", "maximum", "minimum"))
remainder, floor_divide, power = (_pointwise(op) for op in ("remainder", "floor_divide", "power"))
bitwise_and, bitwise_or, bitwise_xor = (_pointwise(op) for op in ("bitwise_and", "bitwise_or", "bitwise_xor"))
bitwise_not, shift_left, shift_right = (_pointwise(op) for op in ("bitwise_not", "shift_left", "shift_right"))
threshold_backward = _pointwise("threshold_backward")


def cast(x: Value, dtype: Any) -> Value:
    """The value in another dtype; nothing is done where it has it already and is not weak."""
    name = dtype_name(dtype)
    if is_scalar(x):
        return full((), x, name)
    aval = aval_of(x)
    if aval.dtype == name:
        return x if not aval.weak else bind_to("cast", (x,), {}, [Aval(aval.shape, name)])[0]
    return bind_to("cast", (x,), {}, [Aval(aval.shape, name)])[0]


def pow(x: Value, exponent: float) -> Value:
    """``x`` to a Python number."""
    return bind("pow", (x,), {"exponent": exponent}, [_dtype(x)])[0]


def compare(x: Value, y: Value, comparison: str) -> Value:
    return bind("compare", _literals((x, y)), {"comparison": comparison}, ["bool"])[0]


def where(condition: Value, x: Value, y: Value) -> Value:
    return bind("where", _literals((condition, x, y)), {}, [_data_dtype((x, y))])[0]


# ---------------------------------------------------------------------------- indexed


def flip(x: Value, *, dims: Sequence[int]) -> Value:
    return bind("flip", (x,), {"dims": tuple(dims)}, [_dtype(x)])[0]


def pad(x: Value, value: Value, *, low: Sequence[int], high: Sequence[int], interior: Sequence[int]) -> Value:
    if not any((*low, *high, *interior)):
        return x
    attrs = {"low": tuple(low), "high": tuple(high), "interior": tuple(interior)}
    return bind("pad", (x, value), attrs, [_dtype(x)])[0]


def concatenate(*operands: Value, dim: int) -> Value:
    return operands[0] if len(operands) == 1 else bind("concatenate", operands, {"dim": dim}, [_dtype(operands[0])])[0]


def take(x: Value, indices: Value) -> Value:
    """Rows of ``x`` (its first dim) by indices of any shape, clamped to the range."""
    return bind("take", (x, indices), {}, [_dtype(x)])[0]


def dynamic_slice(x: Value, *starts: Value, sizes: Sequence[int]) -> Value:
    return bind("dynamic_slice", (x, *starts), {"sizes": tuple(sizes)}, [_dtype(x)])[0]


def dynamic_update(x: Value, update: Value, *starts: Value) -> Value:
    return bind("dynamic_update", (x, update, *starts), {}, [_dtype(x)])[0]


# ---------------------------------------------------------------------------- reductions and products


def _reduction(op: str) -> Callable[..., Value]:
    def function(x: Value, *, dims: Sequence[int] | None = None) -> Value:
        kept = tuple(range(len(x.shape))) if dims is None else tuple(dims)
        if not kept and OPS[op].num_outputs == 1:
            return x
        results = bind(op, (x,), {"dims": kept}, [_dtype(x)] * OPS[op].num_outputs)
        return results[0] if len(results) == 1 else results

    function.__name__ = function.__qualname__ = op
    function.__doc__ = f"The reduction ``{op}`` over ``dims`` (all dims by default), which disappear."
    return function


sum, mean, max, min = (_reduction(op) for op in ("sum", "mean", "max", "min"))
prod, softmax_stats, moments = (_reduction(op) for op in ("prod", "softmax_stats", "moments"))


def cumsum(x: Value, *, dim: int, reverse: bool = False) -> Value:
    return bind("cumsum", (x,), {"dim": dim, "reverse": reverse}, [_dtype(x)])[0]


def scatter_add(indices: Value, updates: Value, *, size: int) -> Value:
    """``out[indices[k]] += updates[k]`` from zeros, in order; indices outside are dropped."""
    return bind("scatter_add", (indices, updates), {"size": size}, [_dtype(updates)])[0]


def mm(a: Value, b: Value, *, dtype: str | None = None) -> Value:
    """The product of two matrices, in ``dtype`` or that of ``a``."""
    return bind("mm", (a, b), {}, [_dtype(a) if dtype is None else dtype])[0]


def bmm(a: Value, b: Value, *, dtype: str | None = None) -> Value:
    """Products of matrices, one for each of the batch, in ``dtype`` or that of ``a``."""
    return bind("bmm", (a, b), {}, [_dtype(a) if dtype is None else dtype])[0]


# ---------------------------------------------------------------------------- promotion and broadcasting


def together(values: Sequence[Value], *, floating: bool = False) -> list[Value]:
    """Values in their common dtype and shape; Python numbers stay where an array is there.

    Parameters
    ----------
    values : sequence
    floating : bool
        Integers become float32.

    Raises
    ------
    TraceError
        If the shapes do not broadcast together.
    """
    values = [as_value(value) for value in values]
    dtype, _ = promote([aval_of(value) for value in values])
    dtype = inexact(dtype) if floating else dtype
    arrays = [value for value in values if not is_scalar(value)]
    if not arrays:
        return [as_array(value, dtype) for value in values]
    try:
        shape = broadcast_shapes([array.shape for array in arrays])
    except ProgramError:
        shapes = " and ".join(str(list(array.shape)) for array in arrays)
        raise TraceError(f"shapes {shapes} do not broadcast together{at_user_line()}") from None
    return [_literal(value, dtype) if is_scalar(value) else stretch(_as_dtype(value, dtype), shape) for value in values]


def _as_dtype(x: Value, dtype: str) -> Value:
    """The array in a dtype, as weak as it was."""
    aval = aval_of(x)
    return x if aval.dtype == dtype else bind_to("cast", (x,), {}, [Aval(aval.shape, dtype, aval.weak)])[0]


def _literal(value: float, dtype: str) -> float:
    """A Python number of the kind that the dtype takes."""
    return float(value) if is_float(dtype) else int(value)


def stretch(x: Value, shape: Shape) -> Value:
    """``x`` broadcast to ``shape`` by NumPy's rule."""
    if tuple(x.shape) == tuple(shape):
        return x
    return broadcast(x, shape, tuple(range(len(shape) - len(x.shape), len(shape))))


def binary(op: Callable[..., Value], x: Any, y: Any, *, floating: bool = False) -> Value:
    """A function of two values, promoted and broadcast."""
    return op(*together((x, y), floating=floating))


def unary(op: Callable[..., Value], x: Any, *, floating: bool = False) -> Value:
    """A function of one value; Python numbers become arrays."""
    value = as_value(x)
    dtype = aval_of(value).dtype
    dtype = inexact(dtype) if floating else dtype
    return op(as_array(value, dtype) if is_scalar(value) else _as_dtype(value, dtype))


def num_elements(x: Value) -> int:
    return math.prod(aval_of(x).shape)


MOST_COMPARED = 64


def is_compared(x: Value, dim: int) -> bool:
    """Whether ``pick`` should find an element of a dim: one of a few floats."""
    return x.shape[dim] <= MOST_COMPARED and is_float(_dtype(x))


def pick(x: Value, index: Value, dim: int) -> Value:
    """Elements of ``x`` at an index in range, one along a dim, broadcast: sums in which the others are zero.

    What a gather does, for a few floats (a value of the action taken): neither it nor its derivative reads or writes
    other rows. A -0.0 becomes 0.0.
    """
    shape = broadcast_shapes([x.shape, index.shape])
    chosen = compare(broadcast(iota(shape[dim]), shape, (dim,)), stretch(index, shape), "eq")
    picked = sum(where(chosen, stretch(x, shape), 0.0), dims=(dim,))
    return reshape(picked, (*shape[:dim], 1, *shape[dim + 1 :]))
