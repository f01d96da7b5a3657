"""Medians and quantiles, of sorted rows."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy import elementwise
from trainkernel.numpy.axes import refuse_out, some_axes
from trainkernel.numpy.indexing import get_item, take_along_axis
from trainkernel.numpy.reductions import kept_shape
from trainkernel.numpy.sorting import sort
from trainkernel.promotion import inexact, is_float
from trainkernel.trace import Array, as_value, at_user_line, aval_of

Value = Any
Axes = Any

__all__ = ["median", "nanmedian", "nanpercentile", "nanquantile", "percentile", "quantile"]

_METHODS = ("linear", "lower", "higher", "midpoint", "nearest")


def quantile(
    a: Value, q: Value, axis: Axes = None, out: None = None, overwrite_input: bool = False, method: str = "linear",
    keepdims: bool = False, *, weights: None = None,
) -> Value:  # fmt: skip
    """The value below which a share ``q`` of the elements along axes lies; NaN where there is one.

    Parameters
    ----------
    a : array
        Of integers the result is float32.
    q : number or array of rank 1, from 0 to 1
        An array gives the result a dim in front.
    axis : int, tuple of int or None
        None stands for all.
    method : str
        Between two elements: ``"linear"``, ``"lower"``, ``"higher"``, ``"midpoint"`` or ``"nearest"``.

    Raises
    ------
    TraceError
        For another method, weights, a ``q`` of more dims, or more elements than ``sort`` takes.
    """
    return _quantile(a, q, axis, out, (overwrite_input, weights), method, keepdims, False)


def nanquantile(
    a: Value, q: Value, axis: Axes = None, out: None = None, overwrite_input: bool = False, method: str = "linear",
    keepdims: bool = False, *, weights: None = None,
) -> Value:  # fmt: skip
    """``quantile`` of the elements that are not NaN; NaN where all are."""
    return _quantile(a, q, axis, out, (overwrite_input, weights), method, keepdims, True)


def percentile(
    a: Value, q: Value, axis: Axes = None, out: None = None, overwrite_input: bool = False, method: str = "linear",
    keepdims: bool = False, *, weights: None = None,
) -> Value:  # fmt: skip
    """``quantile`` with ``q`` from 0 to 100."""
    return _quantile(a, _share(q), axis, out, (overwrite_input, weights), method, keepdims, False)


def nanpercentile(
    a: Value, q: Value, axis: Axes = None, out: None = None, overwrite_input: bool = False, method: str = "linear",
    keepdims: bool = False, *, weights: None = None,
) -> Value:  # fmt: skip
    """``nanquantile`` with ``q`` from 0 to 100."""
    return _quantile(a, _share(q), axis, out, (overwrite_input, weights), method, keepdims, True)


def median(
    a: Value, axis: Axes = None, out: None = None, overwrite_input: bool = False, keepdims: bool = False
) -> Value:
    """The element in the middle along axes, or the mean of both; NaN where there is one."""
    return _quantile(a, 0.5, axis, out, (overwrite_input, None), "midpoint", keepdims, False)


def nanmedian(
    a: Value, axis: Axes = None, out: None = None, overwrite_input: bool = False, keepdims: bool = False
) -> Value:
    """``median`` of the elements that are not NaN; NaN where all are."""
    return _quantile(a, 0.5, axis, out, (overwrite_input, None), "midpoint", keepdims, True)


def _share(q: Value) -> Value:
    """Percent as a share, as a NumPy array where it is known."""
    value = as_value(q)
    if isinstance(value, Array):
        return b.unary(lambda percent: b.div(percent, 100), value, floating=True)
    single = np.float64 if aval_of(value).dtype == "float64" else np.float32
    return np.asarray(np.divide(value, 100, dtype=single))


def _quantile(
    a: Value, q: Value, axis: Axes, out: None, refused: tuple[bool, Any], method: str, keepdims: bool, without_nan: bool
) -> Value:
    refuse_out(out)
    if refused[0] or refused[1] is not None:
        raise TraceError(f"quantiles take neither overwrite_input nor weights{at_user_line()}")
    if method not in _METHODS:
        raise TraceError(f"the method of a quantile is one of {', '.join(_METHODS)}, got {method!r}{at_user_line()}")
    x, share = b.as_array(a), as_value(q)
    if len(aval_of(share).shape) > 1:
        raise TraceError(f"q has at most one dim, got {aval_of(share)}{at_user_line()}")
    x = x if is_float(aval_of(x).dtype) else b.cast(x, inexact(aval_of(x).dtype))
    axes = some_axes(axis, len(x.shape), "quantile")
    rows = sort(_as_rows(x, axes))
    single = "float64" if aval_of(x).dtype == "float64" else "float32"
    find = _without_nan if without_nan else _of_all
    result = b.cast(find(rows, _as_floats(share, single), single, method), aval_of(x).dtype)
    return b.reshape(result, (*aval_of(share).shape, *kept_shape(x.shape, axes))) if keepdims else result


def _as_rows(x: Value, axes: tuple[int, ...]) -> Value:
    """The elements along axes as the last dim."""
    kept = [dim for dim in range(len(x.shape)) if dim not in axes]
    moved = b.transpose(x, (*kept, *axes))
    return b.reshape(moved, (*moved.shape[: len(kept)], prod(moved.shape[len(kept) :])))


def _as_floats(q: Value, dtype: str) -> Value:
    """Shares in the dtype of the computation: a NumPy array where they are known, so that places are known too."""
    return b.cast(q, dtype) if isinstance(q, Array) else np.asarray(q, dtype)


def _of_all(rows: Value, q: Value, dtype: str, method: str) -> Value:
    """Quantiles of sorted rows, the dim of ``q`` in front; NaN, which comes last, makes them NaN."""
    size = rows.shape[-1]
    if size == 0:
        return b.full((*q.shape, *rows.shape[:-1]), float("nan"), dtype)
    if isinstance(q, np.ndarray):
        place = q * np.asarray(size - 1, dtype)
        low, high = (np.clip(f(place), 0, size - 1).astype(np.int32) for f in (np.floor, np.ceil))
        weight: Value = np.asarray(place - np.floor(place))
    else:
        place = b.mul(q, size - 1)
        low, high = (b.cast(elementwise.clip(f(place), 0, size - 1), "int32") for f in (b.floor, b.ceil))
        weight = b.sub(place, b.floor(place))
    first, second = (_in_front(b.cast(get_item(rows, (..., at)), dtype), len(q.shape)) for at in (low, high))
    shape = tuple(first.shape)
    weight = b.broadcast(weight, shape, tuple(range(len(q.shape))))
    last = b.stretch(b.cast(get_item(rows, (..., -1)), dtype), shape)
    return elementwise.where(b.compare(last, last, "ne"), float("nan"), _between(first, second, weight, method))


def _in_front(x: Value, num_dims: int) -> Value:
    """The array with its last dims in front."""
    ndim = len(x.shape)
    return b.transpose(x, (*range(ndim - num_dims, ndim), *range(ndim - num_dims)))


def _without_nan(rows: Value, q: Value, dtype: str, method: str) -> Value:
    """Quantiles of the elements in front of the NaN of sorted rows, the dim of ``q`` in front."""
    lead, size = tuple(rows.shape[:-1]), rows.shape[-1]
    if size == 0:
        return b.full((*q.shape, *lead), float("nan"), dtype)
    shape = (*lead, prod(q.shape))
    present = b.cast(b.compare(rows, rows, "eq"), dtype)
    last = b.broadcast(b.sub(b.sum(present, dims=(len(lead),)), 1), shape, tuple(range(len(lead))))
    place = b.mul(b.broadcast(b.reshape(q, shape[-1:]), shape, (len(lead),)), last)
    bounds = (b.minimum(f(place), last) for f in (b.floor, b.ceil))
    low, high = (b.cast(b.maximum(bound, 0), "int32") for bound in bounds)
    first, second = (b.cast(take_along_axis(rows, at, -1), dtype) for at in (low, high))
    result = _between(first, second, b.sub(place, b.floor(place)), method)
    return b.reshape(_in_front(result, 1), (*q.shape, *lead))


def _between(low: Value, high: Value, weight: Value, method: str) -> Value:
    """What stands for a place between two elements, ``weight`` of the way to the second."""
    if method == "lower":
        return low
    if method == "higher":
        return high
    if method == "midpoint":
        return b.mul(b.add(low, high), 0.5)
    if method == "nearest":
        return b.where(b.compare(weight, 0.5, "le"), low, high)
    mixed = b.add(b.mul(low, b.sub(1, weight)), b.mul(high, weight))
    return b.where(b.compare(weight, 0, "eq"), low, mixed)
