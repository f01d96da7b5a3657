"""Discrete distributions, draws from ranges and arrays, and dropout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.promotion import is_float, is_integer
from trainkernel.random.continuous import gumbel, uniform
from trainkernel.random.keys import DRAWN, DRAWN_BESIDE, Shape, as_shape, checked_key, words
from trainkernel.random.shuffle import ranks, shuffled_index, take_along
from trainkernel.random.units import Sizes, operand, shape_of, stretched, unit
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any


def bernoulli(key: Value, p: Any = 0.5, shape: Sizes | None = None) -> Value:
    """Bools that are true with probability ``p``: where ``uniform(key) < p``.

    Parameters
    ----------
    key : uint32[2]
    p : number or array
        Probabilities, exact to ``2**-24`` (``2**-53`` for float64).
    shape : int or sequence of int or None
        That of ``p`` by default.

    Raises
    ------
    TraceError
        If ``p`` does not broadcast to the shape.
    """
    sizes = shape_of((p,)) if shape is None else as_shape(shape, "bernoulli")
    name = "float64" if aval_of(as_value(p)).dtype == "float64" else "float32"
    return b.compare(unit(checked_key(key, "bernoulli"), sizes, name), operand(p, sizes, name), "lt")


def rademacher(key: Value, shape: Sizes = (), dtype: Any = "int32") -> Value:
    """Signs, -1 or 1, by the highest bit of each word.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : signed dtype
    """
    name = b.dtype_name(dtype)
    if name in ("bool", "uint8", "uint32"):
        raise TraceError(f"rademacher needs a dtype with a sign, got {name}{at_user_line()}")
    top = b.cast(b.shift_right(words(checked_key(key, "rademacher"), as_shape(shape, "rademacher")), 31), "int32")
    return b.cast(b.sub(b.mul(top, 2), 1), name)


def randint(key: Value, shape: Sizes, minval: Any, maxval: Any, dtype: Any = "int32") -> Value:
    """Uniform integers in ``[minval, maxval)``: ``minval + floor(r * (maxval - minval) / 2**62)``.

    ``r`` has 62 random bits, so each integer's probability is exact to ``2**-62``. Where an array
    has ``maxval <= minval`` the result is ``minval``.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    minval, maxval : int or integer array
        Broadcast to the shape; at most ``2**32`` apart.
    dtype : integer dtype

    Raises
    ------
    TraceError
        If the dtype is no integer one or ints are in the wrong order or too far apart.
    """
    sizes, name = as_shape(shape, "randint"), b.dtype_name(dtype)
    if not is_integer(name):
        raise TraceError(f"randint makes integers, not {name}{at_user_line()}")
    low, high = (_whole(bound, sizes) for bound in (minval, maxval))
    if is_scalar(low) and is_scalar(high):
        _check_range(low, high, name)
        span: Value = high - low
    else:
        span = b.minimum(b.maximum(b.sub(high, low), 1), 2**32)
    key = checked_key(key, "randint")
    first, second = (b.cast(b.shift_right(words(key, sizes, stream), 1), "int64") for stream in (DRAWN, DRAWN_BESIDE))
    carried = b.shift_right(b.mul(second, span), 31)
    return b.cast(b.add(b.shift_right(b.add(b.mul(first, span), carried), 31), low), name)


def _whole(bound: Any, shape: Shape) -> Value:
    value = as_value(bound)
    if isinstance(value, bool) or not is_integer(aval_of(value).dtype):
        raise TraceError(f"the bounds of randint are integers, got {bound!r}{at_user_line()}")
    return value if is_scalar(value) else stretched(b.cast(value, "int64"), shape)


def _check_range(low: int, high: int, name: str) -> None:
    bounds = np.iinfo(name)
    if not (low < high <= low + 2**32 and bounds.min <= low and high <= bounds.max + 1):
        raise TraceError(
            f"randint from {low} to {high} in {name}: needs minval < maxval, at most 2**32 apart, inside the "
            f"range of the dtype{at_user_line()}"
        )


def categorical(key: Value, logits: Any, axis: int = -1, shape: Sizes | None = None) -> Value:
    """Indices with probabilities ``softmax(logits)``: where logits plus Gumbel noise are largest.

    Parameters
    ----------
    key : uint32[2]
    logits : floating array
    axis : int
        The dim of the categories.
    shape : int or sequence of int or None
        Of the result: the shape of the logits without the axis, behind any further sizes.

    Returns
    -------
    int32 array

    Raises
    ------
    TraceError
        If the shape does not end in that of the logits without the axis.
    """
    value = as_value(logits)
    ndim = len(aval_of(value).shape)
    if not ndim or not -ndim <= axis < ndim or not value.shape[axis]:
        raise TraceError(f"categorical over axis {axis} of {aval_of(value)}{at_user_line()}")
    others = [dim for dim in range(ndim) if dim != axis % ndim]
    last = b.transpose(value, (*others, axis % ndim))
    batch = tuple(value.shape[dim] for dim in others)
    sizes = batch if shape is None else as_shape(shape, "categorical")
    if sizes[len(sizes) - len(batch) :] != batch:
        raise TraceError(f"categorical: the shape {list(sizes)} must end in {list(batch)}{at_user_line()}")
    name = "float64" if aval_of(value).dtype == "float64" else "float32"
    noise = gumbel(checked_key(key, "categorical"), (*sizes, last.shape[-1]), name)
    return _largest(b.add(noise, b.stretch(b.cast(last, name), noise.shape)))


def _largest(x: Value) -> Value:
    """The first index of the largest element along the last dim."""
    lead, size = tuple(range(len(x.shape) - 1)), x.shape[-1]
    top = b.broadcast(b.max(x, dims=(len(lead),)), x.shape, lead)
    places = b.broadcast(b.iota(size), x.shape, (len(lead),))
    found = b.where(b.compare(x, top, "eq"), places, size)
    return b.minimum(b.min(found, dims=(len(lead),)), size - 1)


def choice(key: Value, a: Any, shape: Sizes = (), replace: bool = True, p: Any = None, axis: int = 0) -> Value:
    """Elements drawn from a range or from an array.

    Parameters
    ----------
    key : uint32[2]
    a : int or array
        An int stands for ``0..a - 1``.
    shape : int or sequence of int
    replace : bool
        False: no element comes twice. With ``p`` this compares all pairs of elements.
    p : array or None
        Weights of the elements, 1-d; equal by default.
    axis : int
        Of an array: whole slices along it are drawn.

    Raises
    ------
    TraceError
        If there are too few elements or the weights do not fit.
    """
    key, sizes = checked_key(key, "choice"), as_shape(shape, "choice")
    value = a if isinstance(a, (int, np.integer)) else as_value(a)
    num = int(value) if isinstance(value, (int, np.integer)) else value.shape[axis]
    wanted = math.prod(sizes)
    if wanted > num * (1 if not replace else wanted):
        raise TraceError(f"choice of {wanted} from {num} elements, replace={replace}{at_user_line()}")
    if p is None:
        index = randint(key, sizes, 0, num) if replace else b.reshape(_distinct(key, wanted, num), sizes)
    else:
        index = _weighted(key, _weights(p, num), sizes, replace)
    return index if isinstance(value, int) else take_along(value, index, axis)


def _distinct(key: Value, wanted: int, num: int) -> Value:
    return shuffled_index(key, b.iota(wanted), num) if wanted else b.iota(0)


def _weights(p: Any, num: int) -> Value:
    weights = as_value(p)
    if aval_of(weights).shape != (num,) or not is_float(aval_of(weights).dtype):
        raise TraceError(f"choice needs {num} floating weights, got {aval_of(weights)}{at_user_line()}")
    return b.cast(weights, "float64" if aval_of(weights).dtype == "float64" else "float32")


def _weighted(key: Value, weights: Value, shape: Shape, replace: bool) -> Value:
    """With replacement by the running sum of the weights; without, the largest of Gumbel keys in order."""
    num, name = weights.shape[0], aval_of(weights).dtype
    if not replace:
        scores = b.neg(b.add(b.log(weights), gumbel(key, (num,), name)))
        places = b.iota(num)
        order = b.scatter_add(ranks(scores, scores, places), places, size=num)
        return b.reshape(b.slice(order, (0,), (math.prod(shape),), (1,)), shape)
    sums = b.cumsum(weights, dim=0)
    total = b.broadcast(b.reshape(b.slice(sums, (num - 1,), (num,), (1,)), ()), shape, ())
    drawn = b.mul(uniform(key, shape, name), total)
    room, across = (*shape, num), tuple(range(len(shape)))
    passed = b.compare(b.broadcast(sums, room, (len(shape),)), b.broadcast(drawn, room, across), "le")
    return b.minimum(b.sum(b.cast(passed, "int32"), dims=(len(shape),)), num - 1)


def dropout(key: Value, x: Any, rate: Any) -> Value:
    """Elements set to zero with probability ``rate``, the others divided by ``1 - rate``.

    Parameters
    ----------
    key : uint32[2]
    x : floating array
    rate : number or scalar array
        In ``[0, 1]``; exact to ``2**-24``.

    Raises
    ------
    TraceError
        If ``x`` is not floating, or a number is no rate.
    """
    value, share = as_value(x), as_value(rate)
    name = aval_of(value).dtype
    if is_scalar(value) or not is_float(name):
        raise TraceError(f"dropout takes a floating array, got {aval_of(value)}{at_user_line()}")
    if is_scalar(share):
        if not 0 <= share <= 1:
            raise TraceError(f"a dropout rate lies in [0, 1], got {share}{at_user_line()}")
        if share == 0:
            return value
    kept = bernoulli(key, 1.0 - share if is_scalar(share) else b.sub(1.0, b.cast(share, "float32")), value.shape)
    if is_scalar(share):
        return b.where(kept, b.div(value, 1.0 - share), 0.0) if share < 1 else b.full(value.shape, 0, name)
    return b.where(kept, b.div(value, b.stretch(b.cast(b.sub(1.0, share), name), value.shape)), 0.0)
