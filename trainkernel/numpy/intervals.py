"""Where numbers lie among others: searches, bins, counts, and interpolation between points."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy import elementwise, reductions
from trainkernel.numpy.axes import as_int
from trainkernel.numpy.creation import linspace
from trainkernel.numpy.differences import diff
from trainkernel.numpy.indexing import get_item
from trainkernel.numpy.shapes import concatenate, ravel
from trainkernel.numpy.sorting import is_known, precedes, sort_together
from trainkernel.promotion import is_float, promote
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any

__all__ = ["bincount", "digitize", "histogram", "histogram_bin_edges", "interp", "searchsorted"]

_METHODS = ("compare_all", "scan", "scan_unrolled", "sort")

# ---------------------------------------------------------------------------- searches


def searchsorted(a: Value, v: Value, side: str = "left", sorter: Value | None = None, *, method: str = "scan") -> Value:
    """How many elements of the sorted ``a`` come before each of ``v``: where to insert it.

    Parameters
    ----------
    a : array of rank 1
        In ascending order, NaN last; with a ``sorter``, the indices that sort it, in any.
    v : array or number
    side : str
        ``"left"``: elements of ``a`` that are equal do not count; ``"right"``: they do.
    method : str
        Is taken and changes nothing: all elements are compared, in one stage.

    Returns
    -------
    int32 array of the shape of ``v``
    """
    x = _ordered(b.as_array(a), "searchsorted")
    if side not in ("left", "right"):
        raise TraceError(f"the side of searchsorted is 'left' or 'right', got {side!r}{at_user_line()}")
    _check_method(method)
    x = x if sorter is None else get_item(x, sorter)
    row, values = _in_common_dtype(x, v)
    return _number_before(row, values, side == "right")


def _check_method(method: str) -> None:
    if method not in _METHODS:
        raise TraceError(f"the method of a search is one of {', '.join(_METHODS)}, got {method!r}{at_user_line()}")


def _ordered(x: Value, what: str) -> Value:
    if len(x.shape) != 1:
        raise TraceError(f"{what} needs one row of ordered numbers, got shape {list(x.shape)}{at_user_line()}")
    return x


def _in_common_dtype(x: Value, y: Value) -> list[Value]:
    """Two arrays in their common dtype, each in its own shape; a Python number takes the dtype of the other."""
    values = [as_value(x), as_value(y)]
    dtype, _ = promote([aval_of(value) for value in values])
    return [b.as_array(value, dtype) if is_scalar(value) else b.cast(value, dtype) for value in values]


def _number_before(x: Value, v: Value, with_equal: bool) -> Value:
    """How many of ``x`` are less than each of ``v``, or not greater."""
    if is_known(x, v) and not is_float(aval_of(x).dtype):
        return np.asarray(np.searchsorted(x, v, "right" if with_equal else "left"), np.int32)
    wide, last = (*v.shape, x.shape[0]), len(v.shape)
    others, own = b.broadcast(x, wide, (last,)), b.broadcast(v, wide, tuple(range(last)))
    before = b.compare(precedes(own, others), 0, "eq") if with_equal else precedes(others, own)
    return b.sum(b.cast(before, "int32"), dims=(last,))


def digitize(x: Value, bins: Value, right: bool = False, *, method: str | None = None) -> Value:
    """The number of the bin of each element, int32.

    Parameters
    ----------
    x : array or number
    bins : array of rank 1
        The edges, ascending or descending. Bin 0 is in front of the first one, bin ``len(bins)`` behind the last.
    right : bool
        An edge belongs to the bin in front of it, not to the one behind it (descending: the other way round).
    """
    edges = _ordered(b.as_array(bins), "digitize")
    _check_method("scan" if method is None else method)
    edges, value = _in_common_dtype(edges, x)
    count = edges.shape[0]
    if count == 0:
        return b.full(tuple(value.shape), 0, "int32")
    below = _number_before(edges, value, not right)
    ascending = b.compare(get_item(edges, -1), get_item(edges, 0), "ge")
    falling = b.sub(count, below)
    return elementwise.where(ascending, below, falling)


# ---------------------------------------------------------------------------- counts


def bincount(x: Value, weights: Value | None = None, minlength: int = 0, *, length: int | None = None) -> Value:
    """How often each of ``0, 1, ...`` is among the elements, or the sum of their weights.

    Parameters
    ----------
    x : integer or bool array of rank 1
        Negative elements count as 0; those beyond the result are dropped.
    weights : array of the shape of ``x``, optional
        Decides the result's dtype, which is int32 without.
    minlength : int
        The least size of the result.
    length : int, optional
        The size of the result; needed in a traced function. Without, one more than the greatest element.

    Raises
    ------
    TraceError
        If ``x`` is not of integers and rank 1, the weights do not fit, or the length is missing.
    """
    places = b.numeric(b.as_array(x))
    if is_float(aval_of(places).dtype) or len(places.shape) != 1:
        raise TraceError(f"bincount needs integers of rank 1, got {aval_of(places)}{at_user_line()}")
    counted = b.full(tuple(places.shape), 1, "int32") if weights is None else b.as_array(weights)
    if tuple(counted.shape) != tuple(places.shape):
        raise TraceError(f"bincount: {aval_of(counted)} weights for {aval_of(places)}{at_user_line()}")
    if length is None:
        if not is_known(places):
            raise TraceError(f"bincount of a traced array needs its length: the result's shape{at_user_line()}")
        length = max(as_int(minlength, "the minlength of bincount"), int(places.max(initial=-1)) + 1)
    size = as_int(length, "the length of bincount")
    places = b.maximum(places, 0)
    if aval_of(places).dtype != "int32":
        places = b.cast(b.minimum(places, min(size, 255 if aval_of(places).dtype == "uint8" else size)), "int32")
    return b.scatter_add(places, b.numeric(counted), size=size)


def histogram_bin_edges(a: Value, bins: Value = 10, range: Any = None, weights: Value | None = None) -> Value:
    """The edges of ``histogram``: ``bins + 1`` evenly spaced ones over the range, or those given.

    Parameters
    ----------
    a : array
    bins : int or array of rank 1
    range : pair of numbers, optional
        The first and the last edge; those of the elements without.
    weights : array, optional
        Changes nothing.
    """
    return _edges(reductions.as_floating(a), bins, range)


def _edges(x: Value, bins: Value, range: Any) -> Value:
    if isinstance(bins, str):
        raise TraceError(f"bins are a number of them or their edges, got {bins!r}{at_user_line()}")
    dtype = aval_of(x).dtype
    value = as_value(bins)
    if len(aval_of(value).shape) == 1:
        return b.cast(value, dtype)
    count = as_int(bins, "the number of bins")
    if range is None:
        bounds = [reductions.min(x), reductions.max(x)]
    else:
        bounds = [b.cast(as_value(bound), dtype) for bound in range]
        if len(bounds) != 2:
            raise TraceError(f"a range has two ends, got {len(bounds)}{at_user_line()}")
    low, high = bounds
    is_point = b.compare(low, high, "eq")
    half = b.where(is_point, b.full((), 0.5, dtype), b.full((), 0, dtype))
    return linspace(b.sub(low, half), b.add(high, half), count + 1, dtype=dtype)


def histogram(
    a: Value, bins: Value = 10, range: Any = None, weights: Value | None = None, density: bool | None = None
) -> tuple[Value, Value]:
    """How many elements lie in each bin, and the edges of the bins.

    The first edge of a bin belongs to it, and of the last bin the second one too. What lies outside does not count.

    Parameters
    ----------
    a : array
        All elements count; integers as float32.
    bins, range
        See ``histogram_bin_edges``.
    weights : array of the shape of ``a``, optional
        To be added instead of ones.
    density : bool, optional
        Divide by the sum and by the widths of the bins.

    Returns
    -------
    counts, edges : arrays of ``bins`` and ``bins + 1`` elements of the dtype of ``a``
    """
    x = ravel(reductions.as_floating(a))
    counted = b.full(tuple(x.shape), 1, aval_of(x).dtype)
    if weights is not None:
        counted = ravel(b.as_array(weights))
        if aval_of(weights).shape != aval_of(b.as_array(a)).shape:
            raise TraceError(f"histogram: {aval_of(weights)} weights for {aval_of(as_value(a))}{at_user_line()}")
        x, counted = b.together((x, counted), floating=True)
    edges = _edges(x, bins, range)
    count = edges.shape[0] - 1
    last = b.stretch(get_item(edges, -1), tuple(x.shape))
    place = b.where(b.compare(x, last, "eq"), count - 1, b.sub(_number_before(edges, x, True), 1))
    result = b.scatter_add(place, counted, size=count)
    if density:
        result = b.binary(b.div, b.div(result, diff(edges)), reductions.sum(result))
    return result, edges


# ---------------------------------------------------------------------------- interpolation


def interp(
    x: Value, xp: Value, fp: Value, left: Value | str | None = None, right: Value | str | None = None,
    period: Value | None = None,
) -> Value:  # fmt: skip
    """The values at ``x`` of lines through the points ``(xp, fp)``.

    Parameters
    ----------
    x : array or number
    xp, fp : arrays of rank 1 and one size
        ``xp`` ascends; with a period it is sorted first.
    left, right : number or "extrapolate", optional
        The value before the first point and behind the last; those of the points without. A period ignores them.
    period : number, optional
        Of ``x`` and ``xp``.

    Returns
    -------
    array of the shape of ``x``
    """
    for end, name in ((left, "left"), (right, "right")):
        if isinstance(end, str) and end != "extrapolate":
            raise TraceError(f"{name} is a number or 'extrapolate', got {end!r}{at_user_line()}")
    places, values = (_ordered(reductions.as_floating(b.as_array(each)), "interp") for each in (xp, fp))
    if places.shape != values.shape or not places.shape[0]:
        raise TraceError(f"interp: {places.shape[0]} places with {values.shape[0]} values{at_user_line()}")
    places, at = _in_common_dtype(places, x)
    if period is not None:
        size = elementwise.abs(period)
        places, at = b.binary(b.remainder, places, size), b.binary(b.remainder, at, size)
        places, values = sort_together((places, values), 0, 1, "interp")
        before, behind = (b.binary(op, places, size) for op in (b.sub, b.add))
        places = concatenate([before[-1:], places, behind[:1]])
        values = concatenate([values[-1:], values, values[:1]])
    result = _on_lines(at, places, values)
    if period is None and not isinstance(left, str):
        first = get_item(values, 0) if left is None else left
        result = elementwise.where(_is_beyond(get_item(places, 0), at), first, result)
    if period is None and not isinstance(right, str):
        end = get_item(values, -1) if right is None else right
        result = elementwise.where(_is_beyond(at, get_item(places, -1)), end, result)
    return result


def _is_beyond(x: Value, y: Value) -> Value:
    return b.binary(lambda first, second: b.compare(second, first, "lt"), x, y)


def _on_lines(x: Value, places: Value, values: Value) -> Value:
    """Of each element the line through the points before and behind it; the first of two that coincide."""
    size = places.shape[0]
    if size == 1:
        return b.binary(b.add, b.mul(x, 0), get_item(values, 0))
    behind = b.minimum(b.maximum(_number_before(places, x, True), 1), size - 1)
    points = [(get_item(p, b.sub(behind, 1)), get_item(p, behind)) for p in (places, values)]
    (start, end), (low, high) = points
    width = b.sub(end, start)
    is_none = b.compare(width, 0, "eq")
    share = b.where(is_none, 0, b.div(b.sub(x, start), b.where(is_none, 1, width)))
    return b.binary(lambda f, product: b.add(f, product), low, b.binary(b.mul, share, b.sub(high, low)))
