"""Convolution and correlation of rows, and gradients on grids."""

from __future__ import annotations

from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy import reductions
from trainkernel.numpy.axes import some_axes
from trainkernel.numpy.differences import diff
from trainkernel.numpy.padding import pad
from trainkernel.numpy.products import vecmat
from trainkernel.numpy.shapes import concatenate, cut, flip, stack
from trainkernel.promotion import inexact, promote
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any

__all__ = ["convolve", "correlate", "gradient"]


def convolve(
    a: Value, v: Value, mode: str = "full", *, precision: Any = None, preferred_element_type: Any = None
) -> Value:
    """The convolution of two rows: ``sum_k a[n - k] * v[k]``, of integers as float32.

    Parameters
    ----------
    a, v : arrays of rank 1
    mode : str
        ``"full"``: all n; ``"same"``: as many as the longer row has; ``"valid"``: where the rows overlap.
    precision, preferred_element_type
        ``precision`` changes nothing, the other is the result's dtype.
    """
    x, y = _rows(a, v, "convolve")
    if x.shape[0] < y.shape[0]:
        x, y = y, x
    return _slide(x, flip(y), mode, preferred_element_type, "convolve")


def correlate(
    a: Value, v: Value, mode: str = "valid", *, precision: Any = None, preferred_element_type: Any = None
) -> Value:
    """The correlation of two rows: ``sum_k a[n + k] * v[k]``; see ``convolve``."""
    x, y = _rows(a, v, "correlate")
    if x.shape[0] < y.shape[0]:
        return flip(_slide(y, x, mode, preferred_element_type, "correlate"))
    return _slide(x, y, mode, preferred_element_type, "correlate")


def _rows(a: Value, v: Value, what: str) -> list[Value]:
    rows = [b.as_array(a), b.as_array(v)]
    if any(len(row.shape) != 1 or not row.shape[0] for row in rows):
        found = " and ".join(str(aval_of(row)) for row in rows)
        raise TraceError(f"{what} needs two rows with elements, got {found}{at_user_line()}")
    dtype = inexact(promote([aval_of(as_value(row)) for row in rows])[0])
    return [b.cast(row, dtype) for row in rows]


def _slide(x: Value, y: Value, mode: str, dtype: Any, what: str) -> Value:
    """Products of the shorter row with the windows of the longer one, which are slices of it."""
    count = y.shape[0]
    ends = {"valid": (0, 0), "same": (count // 2, count - count // 2 - 1), "full": (count - 1, count - 1)}
    if mode not in ends:
        raise TraceError(f"the mode of {what} is 'full', 'same' or 'valid', got {mode!r}{at_user_line()}")
    x = pad(x, ends[mode])
    size = x.shape[0] - count + 1
    result = vecmat(y, stack([cut(x, 0, place, place + size) for place in range(count)]))
    return result if dtype is None else b.cast(result, dtype)


def gradient(f: Value, *varargs: Any, axis: Any = None, edge_order: int | None = None) -> Any:
    """The slope along each axis: central differences inside, differences of neighbours at the ends.

    Parameters
    ----------
    f : array
        Of integers as float32.
    *varargs : numbers or arrays
        The distance of neighbours, or the places along an axis as a row: one for all axes, or one for each.
    axis : int, sequence of int or None
        None stands for all.
    edge_order : None
        Ends of second order are not there.

    Returns
    -------
    array, or a list of one for each axis
    """
    if edge_order is not None:
        raise TraceError(f"gradient: edge_order must be None, got {edge_order}{at_user_line()}")
    values = reductions.as_floating(f)
    axes = some_axes(axis, len(values.shape), "gradient")
    if len(varargs) not in (0, 1, len(axes)):
        raise TraceError(f"gradient: {len(varargs)} distances for {len(axes)} axes{at_user_line()}")
    given = varargs if len(varargs) == len(axes) else (varargs or (1.0,)) * len(axes)
    slopes = [_slope(values, along, places) for along, places in zip(axes, given, strict=True)]
    return slopes[0] if len(slopes) == 1 else slopes


def _slope(x: Value, axis: int, places: Any) -> Value:
    size = x.shape[axis]
    if size < 2:
        raise TraceError(f"gradient needs two elements along axis {axis}, got {aval_of(x)}{at_user_line()}")
    first, middle, last = (cut(x, axis, start, size - 2 + start) for start in range(3))
    steps = diff(x, axis=axis)
    ends = [cut(steps, axis, place, place + 1) for place in (0, size - 2)]
    places = as_value(places)
    if is_scalar(places) or not places.shape:
        width = places if is_scalar(places) else reductions.as_floating(places)
        inner = _over(b.mul(b.sub(last, first), 0.5), width)
        return concatenate([_over(ends[0], width), inner, _over(ends[1], width)], axis)
    if tuple(places.shape) != (size,):
        raise TraceError(f"gradient: places of {aval_of(places)} along an axis of {size} elements{at_user_line()}")
    shape = [1] * len(x.shape)
    shape[axis] = size - 1
    widths = b.reshape(diff(reductions.as_floating(places)), shape)
    left, right = cut(widths, axis, 0, size - 2), cut(widths, axis, 1, size - 1)
    both = b.add(left, right)
    terms = (
        (b.div(b.neg(right), b.mul(left, both)), first),
        (b.div(b.sub(right, left), b.mul(left, right)), middle),
        (b.div(left, b.mul(right, both)), last),
    )
    products = [b.binary(b.mul, factor, value) for factor, value in terms]
    inner = b.add(b.add(products[0], products[1]), products[2])
    edges = [b.binary(b.div, ends[0], cut(widths, axis, 0, 1))]
    edges.append(b.binary(b.div, ends[1], cut(widths, axis, size - 2, size - 1)))
    return concatenate([edges[0], inner, edges[1]], axis)


def _over(x: Value, width: Any) -> Value:
    return b.binary(b.div, x, width)
