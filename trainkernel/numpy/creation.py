"""New arrays: constants, ranges, grids, and values as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int, as_shape, one_axis
from trainkernel.promotion import inexact, is_float, promote
from trainkernel.trace import Array, as_value, at_user_line, aval_of, from_sequence, is_scalar

Value = Any

__all__ = [
    "arange", "array", "asarray", "astype", "copy", "empty", "empty_like", "eye", "full", "full_like", "geomspace",
    "identity", "linspace", "logspace", "meshgrid", "ones", "ones_like", "tri", "tril", "triu", "zeros", "zeros_like",
]  # fmt: skip

# ---------------------------------------------------------------------------- values as arrays


def array(
    object: Any,
    dtype: Any = None,
    copy: bool = True,
    order: str | None = "K",
    ndmin: int = 0,
) -> Value:
    """A value as an array: an array, a number, or nested lists of them, traced ones among them.

    An array keeps its dtype, float64 and int64 too; lists of numbers are int32, float32 or bool.
    """
    if _holds_arrays(object):
        value = _stacked(object)
    elif isinstance(object, (list, tuple)) and dtype is not None:
        value = from_sequence(object, b.dtype_name(dtype))
    else:
        value = _strong(as_value(object), dtype)
    if dtype is not None:
        value = b.cast(value, dtype)
    if copy and isinstance(value, np.ndarray):
        value = np.array(value)
    missing = ndmin - len(value.shape)
    return b.reshape(value, (1,) * missing + tuple(value.shape)) if missing > 0 else value


def _strong(value: Value, dtype: Any) -> Value:
    """A Python number as an array; with a dtype it gets that at once, with all its digits."""
    if not is_scalar(value):
        return value
    return b.full((), value, aval_of(value).dtype if dtype is None else dtype)


def _holds_arrays(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(x, (Array, np.ndarray, np.generic)) or _holds_arrays(x) for x in value
    )


def _stacked(value: Any) -> Value:
    """Nested lists of arrays and numbers of the same shape as one array."""
    if not isinstance(value, (list, tuple)):
        return as_value(value)
    parts = b.together([_stacked(each) for each in value])
    dtype = promote([aval_of(part) for part in parts if not is_scalar(part)])[0]
    arrays = [b.as_array(part, dtype) for part in parts]
    shape = max((tuple(each.shape) for each in arrays), key=len)
    rows = [b.reshape(b.stretch(each, shape), (1, *shape)) for each in arrays]
    return b.concatenate(*rows, dim=0)


def asarray(a: Any, dtype: Any = None, order: str | None = None, *, copy: bool | None = None) -> Value:
    """A value as an array; an array is returned as it is unless its dtype has to change."""
    return array(a, dtype, copy=bool(copy))


def copy(a: Any, order: str | None = None) -> Value:
    """An array of its own."""
    return array(a)


def astype(x: Any, dtype: Any, /, *, copy: bool = False) -> Value:
    """The array in another dtype.

    Floats become integers by truncation, saturating, NaN as 0; integers wrap; bool is ``x != 0``.
    """
    return b.cast(array(x, copy=copy), "float32" if dtype is None else dtype)


# ---------------------------------------------------------------------------- constants


def zeros(shape: Any, dtype: Any = None) -> Value:
    """Zeros; float32 unless told otherwise."""
    return b.full(as_shape(shape), 0, "float32" if dtype is None else dtype)


def ones(shape: Any, dtype: Any = None) -> Value:
    """Ones; float32 unless told otherwise."""
    return b.full(as_shape(shape), 1, "float32" if dtype is None else dtype)


def empty(shape: Any, dtype: Any = None) -> Value:
    """Zeros: no array is without values here."""
    return zeros(shape, dtype)


def full(shape: Any, fill_value: Value, dtype: Any = None) -> Value:
    """An array of one value, or of values that broadcast to the shape."""
    value, sizes = as_value(fill_value), as_shape(shape)
    if is_scalar(value):
        return b.full(sizes, value, aval_of(value).dtype if dtype is None else dtype)
    return _broadcast(value if dtype is None else b.cast(value, dtype), sizes)


def _broadcast(value: Value, shape: tuple[int, ...]) -> Value:
    if tuple(np.broadcast_shapes(value.shape, shape)) != shape:
        raise TraceError(f"full: {list(value.shape)} does not broadcast to {list(shape)}{at_user_line()}")
    return b.stretch(value, shape)


def _like(a: Value, dtype: Any, shape: Any) -> tuple[Any, Any]:
    value = as_value(a)
    aval = aval_of(value)
    return (aval.shape if shape is None else as_shape(shape)), (aval.dtype if dtype is None else dtype)


def zeros_like(a: Value, dtype: Any = None, shape: Any = None) -> Value:
    """Zeros of the shape and dtype of an array."""
    return zeros(*_like(a, dtype, shape))


def ones_like(a: Value, dtype: Any = None, shape: Any = None) -> Value:
    """Ones of the shape and dtype of an array."""
    return ones(*_like(a, dtype, shape))


def empty_like(prototype: Value, dtype: Any = None, shape: Any = None) -> Value:
    """Zeros of the shape and dtype of an array."""
    return zeros(*_like(prototype, dtype, shape))


def full_like(a: Value, fill_value: Value, dtype: Any = None, shape: Any = None) -> Value:
    """One value in the shape and dtype of an array."""
    sizes, name = _like(a, dtype, shape)
    return full(sizes, fill_value, name)


# ---------------------------------------------------------------------------- ranges


def arange(start: Any, stop: Any = None, step: Any = None, dtype: Any = None) -> Value:
    """``start, start + step, ...`` below ``stop``; int32 for ints, float32 for floats.

    The bounds are known when a function is traced. The elements are ``start + step * index``,
    computed in the array's dtype.

    Raises
    ------
    TraceError
        For traced bounds.
    """
    first, last, width = (0, start, 1) if stop is None else (start, stop, 1)
    width = width if step is None else step
    for bound in (first, last, width):
        if isinstance(bound, Array):
            raise TraceError(
                f"arange: its bounds decide a shape and must be known when the function is traced, "
                f"got {bound.aval}{at_user_line()}"
            )
    name = promote([aval_of(as_value(bound)) for bound in (first, last, width)])[0] if dtype is None else dtype
    count = max(int(np.ceil((last - first) / width)), 0)
    return _ramp(count, b.dtype_name(name), first, width)


def _ramp(count: int, dtype: str, first: Any, width: Any) -> Value:
    number = float if is_float(dtype) else int
    result = b.iota(count, dtype)
    if width != 1:
        result = b.mul(result, number(width))
    return b.add(result, number(first)) if first != 0 else result


def linspace(
    start: Value,
    stop: Value,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: Any = None,
    axis: int = 0,
) -> Value:
    """``num`` numbers from ``start`` to ``stop``, evenly spaced, along a new axis.

    Returns
    -------
    array, or (array, step) with ``retstep``
    """
    count = as_int(num, "num of linspace")
    dtypes = [aval_of(as_value(value)) for value in (start, stop)]
    computed = inexact(promote(dtypes)[0])
    first, last = b.together([b.cast(b.as_array(value), computed) for value in (start, stop)])
    parts = count - 1 if endpoint else count
    shape = (count, *first.shape)
    place = b.broadcast(b.iota(count, computed), shape, (0,))
    share = b.div(place, float(parts)) if parts > 0 else place
    rest = tuple(range(1, len(shape)))
    low, high = b.broadcast(first, shape, rest), b.broadcast(last, shape, rest)
    result = b.add(b.mul(low, b.sub(1.0, share)), b.mul(high, share))
    along = one_axis(axis, len(shape), "linspace")
    order = [*range(1, along + 1), 0, *range(along + 1, len(shape))]
    name = computed if dtype is None else b.dtype_name(dtype)
    result = b.transpose(_as_linspace(result, name), order)
    step = b.div(b.sub(last, first), float(parts)) if parts > 0 else b.full(first.shape, float("nan"), computed)
    return (result, step) if retstep else result


def _as_linspace(x: Value, dtype: str) -> Value:
    return b.cast(x if is_float(dtype) else b.floor(x), dtype)


def logspace(
    start: Value,
    stop: Value,
    num: int = 50,
    endpoint: bool = True,
    base: float = 10.0,
    dtype: Any = None,
    axis: int = 0,
) -> Value:
    """``base`` to the powers ``linspace(start, stop)``."""
    result = b.power(float(base), linspace(start, stop, num, endpoint, axis=axis))
    return result if dtype is None else b.cast(result, dtype)


def geomspace(
    start: Value, stop: Value, num: int = 50, endpoint: bool = True, dtype: Any = None, axis: int = 0
) -> Value:
    """``num`` positive numbers from ``start`` to ``stop``, each the same multiple of the one before."""
    first, last = (b.unary(b.log, value, floating=True) for value in (start, stop))
    result = b.exp(linspace(first, last, num, endpoint, axis=axis))
    return result if dtype is None else b.cast(result, dtype)


def meshgrid(*xi: Value, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> list[Value]:
    """The coordinates of a grid, one array for each of the 1-D arrays.

    Raises
    ------
    TraceError
        If an array has more than one dim, or ``indexing`` is neither "xy" nor "ij".
    """
    axes = [b.as_array(x) for x in xi]
    if indexing not in ("xy", "ij"):
        raise TraceError(f"meshgrid: indexing must be 'xy' or 'ij', got {indexing!r}{at_user_line()}")
    for x in axes:
        if len(x.shape) > 1:
            raise TraceError(f"meshgrid needs 1-D arrays, got shape {list(x.shape)}{at_user_line()}")
    flat = [b.reshape(x, (1,)) if not x.shape else x for x in axes]
    place = list(range(len(flat)))
    if indexing == "xy" and len(flat) > 1:
        place[0], place[1] = 1, 0
    shape = [0] * len(flat)
    for x, dim in zip(flat, place, strict=True):
        shape[dim] = x.shape[0]
    thin = [
        b.reshape(x, [x.shape[0] if each == dim else 1 for each in range(len(flat))])
        for x, dim in zip(flat, place, strict=True)
    ]
    return thin if sparse else [b.stretch(x, tuple(shape)) for x in thin]


# ---------------------------------------------------------------------------- diagonals


def _below(rows: int, columns: int, k: int, comparison: str) -> Value:
    """Where ``column - row`` compares with ``k``."""
    shape = (rows, columns)
    row, column = b.broadcast(b.iota(rows), shape, (0,)), b.broadcast(b.iota(columns), shape, (1,))
    return b.compare(column, b.add(row, k) if k else row, comparison)


def eye(N: Any, M: Any = None, k: int = 0, dtype: Any = None) -> Value:  # noqa: N803
    """Ones on the ``k``-th diagonal."""
    rows = as_int(N, "the size of eye")
    columns = rows if M is None else as_int(M, "the size of eye")
    return b.cast(_below(rows, columns, as_int(k, "k of eye"), "eq"), "float32" if dtype is None else dtype)


def identity(n: int, dtype: Any = None) -> Value:
    """The square matrix with ones on its diagonal."""
    return eye(n, dtype=dtype)


def tri(N: int, M: int | None = None, k: int = 0, dtype: Any = None) -> Value:  # noqa: N803
    """Ones on and below the ``k``-th diagonal."""
    return b.cast(_below(N, N if M is None else M, k, "le"), "float32" if dtype is None else dtype)


def tril(m: Value, k: int = 0) -> Value:
    """The matrices of the last two dims with zeros above the ``k``-th diagonal."""
    return _triangle(m, k, "le", "tril")


def triu(m: Value, k: int = 0) -> Value:
    """The matrices of the last two dims with zeros below the ``k``-th diagonal."""
    return _triangle(m, k, "ge", "triu")


def _triangle(m: Value, k: int, comparison: str, what: str) -> Value:
    x = b.as_array(m)
    if len(x.shape) < 2:
        raise TraceError(f"{what} needs at least two dims, got shape {list(x.shape)}{at_user_line()}")
    keep = _below(x.shape[-2], x.shape[-1], as_int(k, f"k of {what}"), comparison)
    return b.where(b.stretch(keep, tuple(x.shape)), x, 0)
