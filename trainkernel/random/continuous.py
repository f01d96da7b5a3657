"""Continuous distributions: each element is a function of one random word, in float64 of two.

Uniform samples in float16 and bfloat16 lie on the dtype's own grid; other distributions are drawn
in float32 there and rounded.
"""

from __future__ import annotations

import math
from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.random.keys import Shape, as_shape, checked_key
from trainkernel.random.quantiles import normal_quantile
from trainkernel.random.units import GRID_BITS, Sizes, centred, computed_in, floating, operand, shape_of, small, unit
from trainkernel.trace import at_user_line, is_scalar

Value = Any


def uniform(key: Value, shape: Sizes = (), dtype: Any = "float32", minval: Any = 0.0, maxval: Any = 1.0) -> Value:
    """Uniform numbers in ``[minval, maxval)``.

    ``x = minval + u * (maxval - minval)``, each operation rounded in float32 (float64 for
    float64), where ``u = (word >> 8) * 2**-24``; where that is not below ``maxval`` after rounding
    to the dtype, ``x`` is ``minval``. In float64 ``u = ((word >> 5) * 2**26 + (other >> 6)) *
    2**-53``, in float16 ``(word >> 21) * 2**-11`` and in bfloat16 ``(word >> 24) * 2**-8``.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype
    minval, maxval : number or array
        Broadcast to the shape.

    Raises
    ------
    TraceError
        If the dtype is not floating, bounds do not broadcast, or are numbers in the wrong order.
    """
    sizes, name = as_shape(shape, "uniform"), floating(dtype, "uniform")
    u = unit(checked_key(key, "uniform"), sizes, name)
    if is_scalar(minval) and is_scalar(maxval):
        if maxval < minval:
            raise TraceError(f"uniform from {minval} to {maxval}: the bounds are in the wrong order{at_user_line()}")
        if (minval, maxval) == (0, 1):
            return b.cast(u, name)
    low, high = (operand(bound, sizes, computed_in(name)) for bound in (minval, maxval))
    width = high - low if is_scalar(low) and is_scalar(high) else b.sub(high, low)
    return _below(b.add(b.mul(u, width), low), low, high, name)


def _below(x: Value, low: Value, high: Value, name: str) -> Value:
    """``x`` in its dtype, and ``low`` where rounding took it to ``high``."""
    x, (low, high) = b.cast(x, name), (v if is_scalar(v) else b.cast(v, name) for v in (low, high))
    return b.where(b.compare(x, high, "lt"), x, low)


def normal(key: Value, shape: Sizes = (), dtype: Any = "float32") -> Value:
    """Standard normal numbers.

    The normal quantile of a symmetric uniform grid of ``2**24`` points (``2**52`` in float64), by
    Giles' polynomials (Wichura's AS241): within ``4e-7`` (``1e-15``) of the exact quantile, relative
    to it; the largest are ±5.42 (±8.21). float16 and bfloat16 are float32 samples rounded.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype

    Raises
    ------
    TraceError
        If the dtype is not floating.
    """
    sizes, name = as_shape(shape, "normal"), floating(dtype, "normal")
    return b.cast(normal_quantile(centred(checked_key(key, "normal"), sizes, name)), name)


def truncated_normal(key: Value, lower: Any, upper: Any, shape: Sizes | None = None, dtype: Any = "float32") -> Value:
    """Standard normal numbers under the condition that they lie in ``[lower, upper]``.

    Beyond 4 standard deviations on one side of zero the grid of float32 is coarse.

    Parameters
    ----------
    key : uint32[2]
    lower, upper : number or array
        Broadcast to the shape, which is theirs together by default.
    shape : int or sequence of int or None
    dtype : floating dtype

    Raises
    ------
    TraceError
        If the dtype is not floating or the bounds do not broadcast.
    """
    name = floating(dtype, "truncated_normal")
    sizes = shape_of((lower, upper)) if shape is None else as_shape(shape, "truncated_normal")
    inner = computed_in(name)
    low, high = (b.cast(operand(bound, sizes, inner), inner) for bound in (lower, upper))
    first, last = (b.stretch(b.erf(b.mul(bound, math.sqrt(0.5))), sizes) for bound in (low, high))
    u = unit(checked_key(key, "truncated_normal"), sizes, inner)
    largest = 1 - 2.0 ** -(GRID_BITS[inner] - 1)
    x = b.minimum(b.maximum(b.add(b.mul(u, b.sub(last, first)), first), -largest), largest)
    inside = b.minimum(b.maximum(normal_quantile(x), b.stretch(low, sizes)), b.stretch(high, sizes))
    return b.cast(inside, name)


def exponential(key: Value, shape: Sizes = (), dtype: Any = "float32") -> Value:
    """Exponential numbers of mean 1: ``-log1p(-u)``; the largest is 16.6 (36.7 in float64).

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype
    """
    sizes, name = as_shape(shape, "exponential"), floating(dtype, "exponential")
    return b.cast(_waiting(checked_key(key, "exponential"), sizes, name), name)


def _waiting(key: Value, shape: Shape, name: str) -> Value:
    return b.neg(b.log1p(b.neg(small(key, shape, name))))


def gumbel(key: Value, shape: Sizes = (), dtype: Any = "float32") -> Value:
    """Gumbel numbers: ``-log`` of exponential ones, between -2.8 and 22.9 (-3.6 and 36.7 in float64).

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype
    """
    sizes, name = as_shape(shape, "gumbel"), floating(dtype, "gumbel")
    return b.cast(b.neg(b.log(_waiting(checked_key(key, "gumbel"), sizes, name))), name)


def laplace(key: Value, shape: Sizes = (), dtype: Any = "float32") -> Value:
    """Laplace numbers of scale 1: ``sign(x) * log1p(-|x|)`` of symmetric uniform ``x``, up to ±16.6.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype
    """
    sizes, name = as_shape(shape, "laplace"), floating(dtype, "laplace")
    x = centred(checked_key(key, "laplace"), sizes, name)
    return b.cast(b.mul(b.sign(x), b.log1p(b.neg(b.abs(x)))), name)


def logistic(key: Value, shape: Sizes = (), dtype: Any = "float32") -> Value:
    """Logistic numbers: ``sign(x) * (log1p(|x|) - log1p(-|x|))`` of symmetric uniform ``x``, up to ±17.3.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype
    """
    sizes, name = as_shape(shape, "logistic"), floating(dtype, "logistic")
    x = centred(checked_key(key, "logistic"), sizes, name)
    size = b.abs(x)
    return b.cast(b.mul(b.sign(x), b.sub(b.log1p(size), b.log1p(b.neg(size)))), name)


def cauchy(key: Value, shape: Sizes = (), dtype: Any = "float32") -> Value:
    """Cauchy numbers: ``tan(pi / 2 * x)`` of symmetric uniform ``x``, up to ±1.07e7 (±2.9e15 in float64).

    Beyond ``|x| = 1/2`` they are the cotangent of ``pi / 2 * (1 - |x|)``, which is as exact.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype
    """
    sizes, name = as_shape(shape, "cauchy"), floating(dtype, "cauchy")
    x = centred(checked_key(key, "cauchy"), sizes, name)
    size = b.abs(x)
    angle = b.mul(b.minimum(size, b.sub(1.0, size)), math.pi / 2)
    sine, cosine = b.sin(angle), b.cos(angle)
    is_near = b.compare(size, 0.5, "le")
    ratio = b.div(b.where(is_near, sine, cosine), b.where(is_near, cosine, sine))
    return b.cast(b.mul(b.sign(x), ratio), name)
