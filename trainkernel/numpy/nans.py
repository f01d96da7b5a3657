"""Reductions that leave NaN out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkernel import primitives as b
from trainkernel.numpy import elementwise, reductions
from trainkernel.numpy.axes import refuse_out
from trainkernel.promotion import is_float
from trainkernel.trace import aval_of

Value = Any
Axes = Any

__all__ = [
    "nanargmax", "nanargmin", "nancumprod", "nancumsum", "nanmax", "nanmean", "nanmin", "nanprod", "nanstd", "nansum",
    "nanvar",
]  # fmt: skip

# ---------------------------------------------------------------------------- sums, means and extrema


def _without(x: Value, neutral: float) -> Value:
    return elementwise.where(elementwise.isnan(x), neutral, x)


def nansum(a: Value, axis: Axes = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Value:
    """The sum of the elements that are not NaN."""
    refuse_out(out)
    return reductions.sum(_without(a, 0), axis, dtype, keepdims=keepdims)


def nanmean(a: Value, axis: Axes = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Value:
    """The mean of the elements that are not NaN."""
    refuse_out(out)
    value = b.as_array(a)
    if not is_float(aval_of(value).dtype):
        return reductions.mean(value, axis, dtype, keepdims=keepdims)
    total = nansum(value, axis, dtype, keepdims=keepdims)
    present = b.cast(b.compare(value, value, "eq"), aval_of(total).dtype)
    return b.div(total, reductions.sum(present, axis, keepdims=keepdims))


def nanmax(a: Value, axis: Axes = None, out: None = None, keepdims: bool = False) -> Value:
    """The maximum of the elements that are not NaN; NaN where all are."""
    refuse_out(out)
    return _without_nan(reductions.max, -float("inf"), a, axis, keepdims)


def nanmin(a: Value, axis: Axes = None, out: None = None, keepdims: bool = False) -> Value:
    """The minimum of the elements that are not NaN; NaN where all are."""
    refuse_out(out)
    return _without_nan(reductions.min, float("inf"), a, axis, keepdims)


def _without_nan(function: Callable[..., Value], neutral: float, a: Value, axis: Axes, keepdims: bool) -> Value:
    value = b.as_array(a)
    if not is_float(aval_of(value).dtype):
        return function(value, axis, keepdims=keepdims)
    result = function(_without(value, neutral), axis, keepdims=keepdims)
    is_empty = reductions.all(elementwise.isnan(value), axis, keepdims=keepdims)
    return elementwise.where(is_empty, float("nan"), result)


def nanprod(
    a: Value, axis: Axes = None, dtype: Any = None, out: None = None, keepdims: bool = False,
    initial: Value | None = None, where: Value | None = None,
) -> Value:  # fmt: skip
    """The product of the elements that are not NaN."""
    refuse_out(out)
    return reductions.prod(_without(a, 1), axis, dtype, keepdims=keepdims, initial=initial, where=where)


def nancumsum(a: Value, axis: int | None = None, dtype: Any = None, out: None = None) -> Value:
    """Running sums in which NaN counts as 0."""
    return reductions.cumsum(_without(a, 0), axis, dtype, out)


def nancumprod(a: Value, axis: int | None = None, dtype: Any = None, out: None = None) -> Value:
    """Running products in which NaN counts as 1."""
    return reductions.cumprod(_without(a, 1), axis, dtype, out)


# ---------------------------------------------------------------------------- places of extrema


def nanargmax(a: Value, axis: int | None = None, out: None = None, keepdims: bool | None = None) -> Value:
    """The int32 index of the first maximum of the elements that are not NaN; -1 where all are."""
    return _place(reductions.argmax, -float("inf"), a, axis, out, keepdims)


def nanargmin(a: Value, axis: int | None = None, out: None = None, keepdims: bool | None = None) -> Value:
    """The int32 index of the first minimum of the elements that are not NaN; -1 where all are."""
    return _place(reductions.argmin, float("inf"), a, axis, out, keepdims)


def _place(
    function: Callable[..., Value], neutral: float, a: Value, axis: int | None, out: None, keepdims: bool | None
) -> Value:
    value = b.as_array(a)
    if not is_float(aval_of(value).dtype):
        return function(value, axis, out, keepdims)
    place = function(_without(value, neutral), axis, out, keepdims)
    is_empty = reductions.all(elementwise.isnan(value), axis, keepdims=bool(keepdims))
    return elementwise.where(is_empty, -1, place)


# ---------------------------------------------------------------------------- spread


def nanvar(
    a: Value, axis: Axes = None, dtype: Any = None, out: None = None, ddof: float = 0, keepdims: bool = False,
    where: Value | None = None, mean: Value | None = None,
) -> Value:  # fmt: skip
    """``var`` of the elements that are not NaN; NaN where there are not more than ``ddof``.

    ``mean`` is their mean with the reduced axes kept, if it is known already.
    """
    refuse_out(out)
    value = reductions.as_floating(a, dtype)
    counts = b.compare(value, value, "eq")
    if where is not None:
        counts = b.bitwise_and(counts, b.stretch(b.cast(b.as_array(where), "bool"), tuple(value.shape)))
    present = b.cast(counts, aval_of(value).dtype)
    number = reductions.sum(present, axis, keepdims=True)
    finite = b.where(counts, value, 0)
    middle = b.div(reductions.sum(finite, axis, keepdims=True), number) if mean is None else b.as_array(mean)
    distance = b.where(counts, b.binary(b.sub, finite, middle), 0)
    total = reductions.sum(b.mul(distance, distance), axis, keepdims=keepdims)
    free = b.sub(reductions.sum(present, axis, keepdims=keepdims), ddof)
    is_enough = b.compare(free, 0, "gt")
    return b.where(is_enough, b.div(total, b.where(is_enough, free, 1)), float("nan"))


def nanstd(
    a: Value, axis: Axes = None, dtype: Any = None, out: None = None, ddof: float = 0, keepdims: bool = False,
    where: Value | None = None, mean: Value | None = None,
) -> Value:  # fmt: skip
    """The square root of ``nanvar``."""
    return elementwise.sqrt(nanvar(a, axis, dtype, out, ddof, keepdims, where, mean))
