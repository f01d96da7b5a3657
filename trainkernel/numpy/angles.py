"""Trigonometric functions, their inverses, and angles."""

from __future__ import annotations

import math
from typing import Any

from trainkernel import primitives as b
from trainkernel.numpy import elementwise, reductions
from trainkernel.numpy.arithmetic import floor_divide
from trainkernel.numpy.axes import one_axis
from trainkernel.numpy.differences import diff
from trainkernel.numpy.elementwise import floating_function
from trainkernel.numpy.indexing import get_item
from trainkernel.numpy.shapes import concatenate
from trainkernel.promotion import is_float
from trainkernel.trace import aval_of

Value = Any

__all__ = [
    "acos", "arccos", "arcsin", "arctan", "arctan2", "asin", "atan", "atan2", "cos", "deg2rad", "degrees", "rad2deg",
    "radians", "sin", "sinc", "tan", "unwrap",
]  # fmt: skip

# ---------------------------------------------------------------------------- of angles

sin = floating_function("sin", b.sin, "The sine of each element, in radians.")
cos = floating_function("cos", b.cos, "The cosine of each element, in radians.")


def tan(x: Value, /) -> Value:
    """The tangent of each element, in radians."""
    return b.unary(lambda value: b.div(b.sin(value), b.cos(value)), x, floating=True)


def sinc(x: Value, /) -> Value:
    """``sin(πx) / (πx)``, and 1 at 0; its derivatives at 0 are right up to the eighth."""
    return b.unary(_sinc, x, floating=True)


def _sinc(x: Value) -> Value:
    """Near 0, where the derivatives of the quotient cancel, by the first terms of the series, exact to float64."""
    angle = b.mul(x, math.pi)
    near = b.compare(b.abs(x), 0.1, "lt")
    small, large = b.where(near, angle, 0), b.where(near, 1, angle)
    square = b.mul(small, small)
    series: Value = 1.0
    for last in (12, 10, 8, 6, 4, 2):
        series = b.sub(1.0, b.mul(b.mul(square, 1.0 / (last * (last + 1))), series))
    return b.where(near, series, b.div(b.sin(large), large))


# ---------------------------------------------------------------------------- to angles

arcsin = floating_function("arcsin", b.arcsin, "The angle from -π/2 to π/2 with this sine; NaN outside of [-1, 1].")
arccos = floating_function("arccos", b.arccos, "The angle from 0 to π with this cosine; NaN outside of [-1, 1].")
arctan = floating_function("arctan", b.arctan, "The angle from -π/2 to π/2 with this tangent.")


def arctan2(x1: Value, x2: Value, /) -> Value:
    """The angle from -π to π of the point with the second coordinate ``x1`` and the first coordinate ``x2``.

    Zeros count with their sign. The gradient at the origin is NaN, as in JAX.
    """
    return b.binary(b.arctan2, x1, x2, floating=True)


asin, acos, atan, atan2 = arcsin, arccos, arctan, arctan2

# ---------------------------------------------------------------------------- degrees


def deg2rad(x: Value, /) -> Value:
    """Degrees as radians."""
    return b.unary(lambda value: b.mul(value, math.pi / 180.0), x, floating=True)


def rad2deg(x: Value, /) -> Value:
    """Radians as degrees."""
    return b.unary(lambda value: b.mul(value, 180.0 / math.pi), x, floating=True)


radians, degrees = deg2rad, rad2deg


def unwrap(p: Value, discont: Value | None = None, axis: int = -1, period: Value = 2 * math.pi) -> Value:
    """Angles along an axis without the jumps that are not shorter than ``discont``, half a period by default.

    Multiples of the period are added to what comes behind such a jump.
    """
    x = b.as_array(p)
    along = one_axis(axis, len(x.shape), "unwrap")
    if x.shape[along] == 0:
        return x
    x, size = b.together((x, period))
    half = b.binary(b.div, size, 2) if is_float(aval_of(x).dtype) else floor_divide(size, 2)
    step = diff(x, axis=along)
    short = b.binary(b.sub, b.binary(b.remainder, b.binary(b.add, step, half), size), half)
    is_up = b.binary(lambda a, c: b.compare(a, c, "eq"), short, b.unary(b.neg, half))
    short = elementwise.where(b.bitwise_and(is_up, b.compare(step, 0, "gt")), half, short)
    limit = b.binary(b.div, size, 2) if discont is None else discont
    is_small = b.binary(lambda a, c: b.compare(a, c, "lt"), b.abs(step), limit)
    added = reductions.cumsum(elementwise.where(is_small, 0, b.sub(short, step)), along)
    rows = (slice(None),) * along
    first, rest = get_item(x, (*rows, slice(0, 1))), get_item(x, (*rows, slice(1, None)))
    return concatenate([first, b.add(rest, added)], axis=along)
