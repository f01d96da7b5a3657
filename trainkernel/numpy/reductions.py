"""Sums, means, extrema and other results of many elements, along any axes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod as product
from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy import elementwise
from trainkernel.numpy.axes import one_axis, refuse_out, some_axes
from trainkernel.promotion import inexact, is_float
from trainkernel.trace import Shape, at_user_line, aval_of

Value = Any
Axes = Any

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "average", "count_nonzero", "cumprod", "cumsum", "max", "mean",
    "min", "prod", "ptp", "std", "sum", "var",
]  # fmt: skip

# ---------------------------------------------------------------------------- one op of the table each


def kept_shape(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """A shape with the reduced axes as ones."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


def _reduced(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    kept = kept_shape(shape, axes)
    return tuple(size for axis, size in enumerate(kept) if keepdims or axis not in axes)


def reduce_with(op: Callable[..., Value], x: Value, axis: Axes, keepdims: bool, what: str) -> Value:
    """A reduction of the op table along NumPy's axes."""
    axes = some_axes(axis, len(x.shape), what)
    result = op(x, dims=axes)
    return b.reshape(result, kept_shape(x.shape, axes)) if keepdims else result


def _array(x: Value, dtype: Any) -> Value:
    value = b.as_array(x)
    return value if dtype is None else b.cast(value, dtype)


def as_floating(x: Value, dtype: Any = None) -> Value:
    """The array in a dtype; without one integers become floating."""
    value = _array(x, dtype)
    return value if is_float(aval_of(value).dtype) else b.cast(value, inexact(aval_of(value).dtype))


def _summable(x: Value, dtype: Any) -> Value:
    """Bools and narrow integers are summed as int32 and uint32."""
    value = _array(x, dtype)
    wide = {"bool": "int32", "uint8": "uint32"}.get(aval_of(value).dtype)
    return value if wide is None or dtype is not None else b.cast(value, wide)


def _initial(initial: Value, like: Value) -> Value:
    """The initial value in the dtype of what is reduced."""
    return b.cast(initial, aval_of(like).dtype)


def _chosen(x: Value, where: Value | None, neutral: Any) -> Value:
    """``x`` where the condition holds and what does not count elsewhere."""
    return x if where is None else elementwise.where(where, x, neutral)


def sum(
    a: Value,
    axis: Axes = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    initial: Value | None = None,
    where: Value | None = None,
) -> Value:
    """The sum along axes; bools count as int32. 16-bit floats are summed in float32 and rounded once."""
    refuse_out(out)
    value = _chosen(_summable(a, dtype), where, 0)
    result = reduce_with(b.sum, value, axis, keepdims, "sum")
    return result if initial is None else b.binary(b.add, result, _initial(initial, result))


def prod(
    a: Value,
    axis: Axes = None,
    dtype: Any = None,
    out: None = None,
    keepdims: bool = False,
    initial: Value | None = None,
    where: Value | None = None,
) -> Value:
    """The product along axes.

    Its gradient is right to first order where elements are zero.
    """
    refuse_out(out)
    value = _chosen(_summable(a, dtype), where, 1)
    result = reduce_with(b.prod, value, axis, keepdims, "prod")
    return result if initial is None else b.binary(b.mul, result, _initial(initial, result))


def mean(
    a: Value, axis: Axes = None, dtype: Any = None, out: None = None, keepdims: bool = False, *, where: Any = None
) -> Value:
    """The mean along axes; of integers as float32."""
    refuse_out(out)
    value = as_floating(a, dtype)
    if where is None:
        return reduce_with(b.mean, value, axis, keepdims, "mean")
    counted = sum(_chosen(b.full(value.shape, 1, value.dtype), where, 0), axis, keepdims=keepdims)
    return b.div(sum(value, axis, keepdims=keepdims, where=where), counted)


def max(
    a: Value,
    axis: Axes = None,
    out: None = None,
    keepdims: bool = False,
    initial: Value | None = None,
    where: Value | None = None,
) -> Value:
    """The maximum along axes; NaN where there is one. Elements that tie share the gradient.

    Raises
    ------
    TraceError
        Of no elements, or with ``where``, without ``initial``.
    """
    refuse_out(out)
    return _extremum(b.max, b.maximum, _chosen_extremum(a, where, initial, "max"), axis, keepdims, initial)


def min(
    a: Value,
    axis: Axes = None,
    out: None = None,
    keepdims: bool = False,
    initial: Value | None = None,
    where: Value | None = None,
) -> Value:
    """The minimum along axes; see ``max``."""
    refuse_out(out)
    return _extremum(b.min, b.minimum, _chosen_extremum(a, where, initial, "min"), axis, keepdims, initial)


amax, amin = max, min


def _chosen_extremum(a: Value, where: Value | None, initial: Value | None, what: str) -> Value:
    if where is not None and initial is None:
        raise TraceError(f"{what} with where needs an initial value{at_user_line()}")
    value = b.as_array(a)
    return value if where is None else elementwise.where(where, value, _initial(initial, value))


def _extremum(
    op: Callable[..., Value], pair: Callable[..., Value], x: Value, axis: Axes, keepdims: bool, initial: Value | None
) -> Value:
    axes = some_axes(axis, len(x.shape), op.__name__)
    if product(x.shape[each] for each in axes):
        result = reduce_with(op, x, axis, keepdims, op.__name__)
        return result if initial is None else b.binary(pair, result, _initial(initial, x))
    if initial is None:
        raise TraceError(f"{op.__name__} of no elements: shape {list(x.shape)}, axis {axis}{at_user_line()}")
    return b.stretch(_initial(initial, x), _reduced(x.shape, axes, keepdims))


def _truth(x: Value) -> Value:
    value = b.as_array(x)
    return value if aval_of(value).dtype == "bool" else b.compare(value, 0, "ne")


def all(a: Value, axis: Axes = None, out: None = None, keepdims: bool = False) -> Value:
    """Whether all elements along axes are true."""
    refuse_out(out)
    return _logical(b.min, a, axis, keepdims, "all", True)


def any(a: Value, axis: Axes = None, out: None = None, keepdims: bool = False) -> Value:
    """Whether one of the elements along axes is true."""
    refuse_out(out)
    return _logical(b.max, a, axis, keepdims, "any", False)


def _logical(op: Callable[..., Value], a: Value, axis: Axes, keepdims: bool, what: str, of_none: bool) -> Value:
    value = _truth(a)
    axes = some_axes(axis, len(value.shape), what)
    if product(value.shape[each] for each in axes) == 0:
        return b.full(_reduced(value.shape, axes, keepdims), of_none, "bool")
    return reduce_with(op, value, axis, keepdims, what)


def count_nonzero(a: Value, axis: Axes = None, keepdims: bool = False) -> Value:
    """How many elements along axes are not zero, as int32."""
    return sum(_truth(a), axis, keepdims=keepdims)


# ---------------------------------------------------------------------------- places of extrema


def argmax(a: Value, axis: int | None = None, out: None = None, keepdims: bool | None = None) -> Value:
    """The int32 index of the first maximum along an axis, of all elements without one; the first NaN wins."""
    refuse_out(out)
    return _place(b.max, a, axis, bool(keepdims), "argmax")


def argmin(a: Value, axis: int | None = None, out: None = None, keepdims: bool | None = None) -> Value:
    """The int32 index of the first minimum along an axis, of all elements without one; the first NaN wins."""
    refuse_out(out)
    return _place(b.min, a, axis, bool(keepdims), "argmin")


def _place(op: Callable[..., Value], a: Value, axis: int | None, keepdims: bool, what: str) -> Value:
    """The smallest index at which the extremum is reached; NaN, which equals nothing, reaches it too."""
    x = b.as_array(a)
    flat = b.reshape(x, (product(x.shape),)) if axis is None else x
    along = 0 if axis is None else one_axis(axis, len(x.shape), what)
    if not flat.shape or flat.shape[along] == 0:
        if len(flat.shape):
            raise TraceError(f"{what} of no elements: shape {list(x.shape)}, axis {axis}{at_user_line()}")
        return b.full((), 0, "int32")
    rest = tuple(each for each in range(len(flat.shape)) if each != along)
    best = b.broadcast(op(flat, dims=(along,)), flat.shape, rest)
    reached = b.bitwise_or(b.compare(flat, best, "eq"), b.compare(flat, flat, "ne"))
    index = b.broadcast(b.iota(flat.shape[along]), flat.shape, (along,))
    result = b.min(b.where(reached, index, flat.shape[along]), dims=(along,))
    if not keepdims:
        return result
    return b.reshape(result, (1,) * len(x.shape) if axis is None else kept_shape(x.shape, (along,)))


# ---------------------------------------------------------------------------- spread


def var(
    a: Value,
    axis: Axes = None,
    dtype: Any = None,
    out: None = None,
    ddof: float = 0,
    keepdims: bool = False,
    *,
    correction: float | None = None,
) -> Value:
    """The mean squared distance from the mean, divided by ``n - ddof``; accurate where the mean is large."""
    refuse_out(out)
    value = as_floating(a, dtype)
    axes = some_axes(axis, len(value.shape), "var")
    count = product(value.shape[each] for each in axes)
    lost = ddof if correction is None else correction
    _, result = b.moments(value, dims=axes)
    if lost:
        result = b.mul(result, count / (count - lost) if count != lost else float("inf"))
    return b.reshape(result, kept_shape(value.shape, axes)) if keepdims else result


def std(
    a: Value,
    axis: Axes = None,
    dtype: Any = None,
    out: None = None,
    ddof: float = 0,
    keepdims: bool = False,
    *,
    correction: float | None = None,
) -> Value:
    """The square root of ``var``."""
    refuse_out(out)
    return elementwise.sqrt(var(a, axis, dtype, None, ddof, keepdims, correction=correction))


def ptp(a: Value, axis: Axes = None, out: None = None, keepdims: bool = False) -> Value:
    """The distance from the minimum to the maximum along axes."""
    refuse_out(out)
    return b.sub(max(a, axis, keepdims=keepdims), min(a, axis, keepdims=keepdims))


def average(a: Value, axis: Axes = None, weights: Value | None = None, returned: bool = False) -> Value:
    """The mean along axes, weighted if there are weights: of the shape of ``a``, or one per element of one axis."""
    value = b.as_array(a)
    if weights is None:
        result = mean(value, axis)
        axes = some_axes(axis, len(value.shape), "average")
        total = b.full(result.shape, product(value.shape[each] for each in axes), result.dtype)
    else:
        weight = b.as_array(weights)
        if tuple(weight.shape) != tuple(value.shape):
            weight = _weights_along(weight, value, axis)
        value, weight = b.together((value, weight), floating=True)
        total = sum(weight, axis)
        result = b.div(sum(b.mul(value, weight), axis), total)
    return (result, total) if returned else result


def _weights_along(weight: Value, value: Value, axis: Axes) -> Value:
    if len(weight.shape) != 1 or axis is None or isinstance(axis, (tuple, list)):
        raise TraceError(
            f"average: weights of shape {list(weight.shape)} do not fit values of shape {list(value.shape)} "
            f"along axis {axis}{at_user_line()}"
        )
    along = one_axis(axis, len(value.shape), "average")
    if weight.shape[0] != value.shape[along]:
        raise TraceError(
            f"average: {weight.shape[0]} weights for {value.shape[along]} elements along axis {axis}{at_user_line()}"
        )
    return b.broadcast(weight, value.shape, (along,))


# ---------------------------------------------------------------------------- running results


def cumsum(a: Value, axis: int | None = None, dtype: Any = None, out: None = None) -> Value:
    """Running sums along an axis, of all elements without one; bools count as int32."""
    refuse_out(out)
    x, along = _running(a, axis, dtype, "cumsum")
    return b.cumsum(x, dim=along)


def cumprod(a: Value, axis: int | None = None, dtype: Any = None, out: None = None) -> Value:
    """Running products along an axis, in ``log2(n)`` steps that each multiply by elements further back."""
    refuse_out(out)
    x, along = _running(a, axis, dtype, "cumprod")
    return running(b.mul, 1, x, along)


def _running(a: Value, axis: int | None, dtype: Any, what: str) -> tuple[Value, int]:
    x = _array(a, dtype)
    x = b.cast(x, "int32") if aval_of(x).dtype == "bool" else x
    if axis is None:
        return b.reshape(x, (product(x.shape),)), 0
    return x, one_axis(axis, len(x.shape), what)


def running(op: Callable[..., Value], neutral: Any, x: Value, along: int) -> Value:
    """Running results of an associative op, in ``log2(n)`` steps (Hillis and Steele, CACM 29(12), 1986)."""
    size, distance = x.shape[along], 1
    none, zeros = (0,) * len(x.shape), [0] * len(x.shape)
    while distance < size:
        limit, low = list(x.shape), list(zeros)
        limit[along], low[along] = size - distance, distance
        shifted = b.pad(b.slice(x, none, limit, (1,) * len(none)), neutral, low=low, high=none, interior=none)
        x = op(shifted, x)
        distance *= 2
    return x
