"""Differences of neighbours, and sums of what lies between them."""

from __future__ import annotations

from math import prod
from typing import Any

from trainkernel import primitives as b
from trainkernel.numpy import reductions
from trainkernel.numpy.axes import one_axis
from trainkernel.numpy.shapes import concatenate, moveaxis, ravel
from trainkernel.trace import as_value, aval_of, is_scalar

Value = Any

__all__ = ["diff", "ediff1d", "trapezoid"]


def diff(a: Value, n: int = 1, axis: int = -1) -> Value:
    """Differences of neighbours along an axis, ``n`` times."""
    x = b.as_array(a)
    along = one_axis(axis, len(x.shape), "diff")
    for _ in range(n):
        size = x.shape[along]
        start, limit, stride = [0] * len(x.shape), list(x.shape), (1,) * len(x.shape)
        limit[along] = size - 1 if size else 0
        before = b.slice(x, start, limit, stride)
        start[along], limit[along] = (1 if size else 0), size
        after = b.slice(x, start, limit, stride)
        is_bool = aval_of(x).dtype == "bool"
        x = b.compare(after, before, "ne") if is_bool else b.sub(after, before)
    return x


def ediff1d(ary: Value, to_end: Value | None = None, to_begin: Value | None = None) -> Value:
    """Differences of neighbours among all elements, with others behind and in front of them.

    ``to_end`` and ``to_begin`` are cast to the dtype of ``ary``.
    """
    x = ravel(ary)
    size = x.shape[0]
    own = b.sub(b.slice(x, (min(size, 1),), (size,), (1,)), b.slice(x, (0,), (max(size - 1, 0),), (1,)))
    parts = [None if end is None else b.cast(ravel(end), aval_of(x).dtype) for end in (to_begin, to_end)]
    return concatenate([part for part in (parts[0], own, parts[1]) if part is not None])


def trapezoid(y: Value, x: Value | None = None, dx: Value = 1.0, axis: int = -1) -> Value:
    """The integral along an axis by the trapezoidal rule.

    Parameters
    ----------
    y : array
        Of integers as float32.
    x : array, optional
        The places of the elements: one row of them, or of the shape of ``y``.
    dx : number or array
        The distances between neighbours where there is no ``x``; one, or one for each pair.
    axis : int
    """
    values = reductions.as_floating(y)
    along = one_axis(axis, len(values.shape), "trapezoid")
    values = moveaxis(values, along, -1)
    size = values.shape[-1]
    rows = (slice(None),) * (len(values.shape) - 1)
    ends = [values[(*rows, part)] for part in (slice(1, None), slice(0, max(size - 1, 0)))]
    if x is None:
        distance = as_value(dx)
        if not is_scalar(distance) and len(distance.shape) > 1:
            distance = moveaxis(distance, axis, -1)
    else:
        places = b.as_array(x)
        is_row = len(places.shape) == 1
        distance = diff(places) if is_row else diff(moveaxis(places, axis, -1))
    heights = b.mul(b.add(*ends), 0.5)
    if is_scalar(distance) or prod(distance.shape) == 1:
        step = distance if is_scalar(distance) else b.reshape(distance, ())
        return b.binary(b.mul, reductions.sum(heights, -1), step)
    return reductions.sum(b.binary(b.mul, heights, distance, floating=True), -1)
