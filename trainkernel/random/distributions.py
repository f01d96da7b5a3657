"""Distributions: each element is a function of one or two random words.

float32 samples have the bits of the generator's words, float64 ones those of two. Samples in
float16 and bfloat16 are uniform on the dtype's own grid; other distributions are drawn in float32
and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.promotion import is_float, is_integer
from trainkernel.random.keys import DRAWN_BESIDE, Shape, as_shape, checked_key, words
from trainkernel.random.quantiles import normal_quantile
from trainkernel.random.shuffle import ranks, shuffled_index, take_along
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any
Sizes = int | Sequence[int]

# Bits of the grid on which uniform numbers lie: all its points are numbers of the dtype.
_GRID_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


# ---------------------------------------------------------------------------- uniform numbers


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
    sizes, name = as_shape(shape, "uniform"), _floating(dtype, "uniform")
    u = _unit(checked_key(key, "uniform"), sizes, name)
    if is_scalar(minval) and is_scalar(maxval):
        if maxval < minval:
            raise TraceError(f"uniform from {minval} to {maxval}: the bounds are in the wrong order{at_user_line()}")
        if (minval, maxval) == (0, 1):
            return b.cast(u, name)
    low, high = (_operand(bound, sizes, _computed_in(name)) for bound in (minval, maxval))
    width = high - low if is_scalar(low) and is_scalar(high) else b.sub(high, low)
    return _below(b.add(b.mul(u, width), low), low, high, name)


def _below(x: Value, low: Value, high: Value, name: str) -> Value:
    """``x`` in its dtype, and ``low`` where rounding took it to ``high``."""
    x, (low, high) = b.cast(x, name), (v if is_scalar(v) else b.cast(v, name) for v in (low, high))
    return b.where(b.compare(x, high, "lt"), x, low)


def _unit(key: Value, shape: Shape, name: str) -> Value:
    """Uniform on the grid of a dtype in [0, 1), in the dtype it is computed in."""
    num_bits = _GRID_BITS[name]
    if name != "float64":
        return b.mul(b.cast(b.shift_right(words(key, shape), 32 - num_bits), "float32"), 2.0**-num_bits)
    return b.mul(_wide(key, shape, 5, 6), 2.0**-53)


def _wide(key: Value, shape: Shape, shift: int, other_shift: int) -> Value:
    """The upper bits of two words as one whole float64 number."""
    upper = b.cast(b.shift_right(words(key, shape), shift), "float64")
    lower = b.cast(b.shift_right(words(key, shape, DRAWN_BESIDE), other_shift), "float64")
    return b.add(b.mul(upper, 2.0 ** (32 - other_shift)), lower)


def _centred(key: Value, shape: Shape, name: str) -> Value:
    """Uniform and symmetric inside (-1, 1): odd multiples of ``2**-24``, of ``2**-53`` in float64."""
    if name != "float64":
        whole = b.cast(b.shift_right(words(key, shape), 8), "int32")
        odd = b.sub(b.add(b.mul(whole, 2), 1), 1 << 24)
        return b.mul(b.cast(odd, "float32"), 2.0**-24)
    return b.mul(b.sub(b.add(b.mul(_wide(key, shape, 6, 6), 2.0), 1.0), 2.0**52), 2.0**-52)


def _small(key: Value, shape: Shape, name: str) -> Value:
    """Uniform inside (0, 1), as fine near 0 as 32 bits allow (52 in float64)."""
    if name == "float64":
        return b.mul(b.add(_wide(key, shape, 6, 6), 0.5), 2.0**-52)
    u = b.mul(b.add(b.cast(words(key, shape), "float32"), 0.5), 2.0**-32)
    return b.minimum(u, 1 - 2.0**-24)


# ---------------------------------------------------------------------------- continuous distributions


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
    sizes, name = as_shape(shape, "normal"), _floating(dtype, "normal")
    return b.cast(normal_quantile(_centred(checked_key(key, "normal"), sizes, name)), name)


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
    name = _floating(dtype, "truncated_normal")
    sizes = _shape_of((lower, upper)) if shape is None else as_shape(shape, "truncated_normal")
    inner = _computed_in(name)
    low, high = (b.cast(_operand(bound, sizes, inner), inner) for bound in (lower, upper))
    first, last = (b.stretch(b.erf(b.mul(bound, math.sqrt(0.5))), sizes) for bound in (low, high))
    u = _unit(checked_key(key, "truncated_normal"), sizes, inner)
    largest = 1 - 2.0 ** -(_GRID_BITS[inner] - 1)
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
    sizes, name = as_shape(shape, "exponential"), _floating(dtype, "exponential")
    return b.cast(_waiting(checked_key(key, "exponential"), sizes, name), name)


def _waiting(key: Value, shape: Shape, name: str) -> Value:
    return b.neg(b.log1p(b.neg(_small(key, shape, name))))


def gumbel(key: Value, shape: Sizes = (), dtype: Any = "float32") -> Value:
    """Gumbel numbers: ``-log`` of exponential ones, between -2.8 and 22.9 (-3.6 and 36.7 in float64).

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype
    """
    sizes, name = as_shape(shape, "gumbel"), _floating(dtype, "gumbel")
    return b.cast(b.neg(b.log(_waiting(checked_key(key, "gumbel"), sizes, name))), name)


def laplace(key: Value, shape: Sizes = (), dtype: Any = "float32") -> Value:
    """Laplace numbers of scale 1: ``sign(x) * log1p(-|x|)`` of symmetric uniform ``x``, up to ±16.6.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : floating dtype
    """
    sizes, name = as_shape(shape, "laplace"), _floating(dtype, "laplace")
    x = _centred(checked_key(key, "laplace"), sizes, name)
    return b.cast(b.mul(b.sign(x), b.log1p(b.neg(b.abs(x)))), name)


# ---------------------------------------------------------------------------- discrete distributions


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
    sizes = _shape_of((p,)) if shape is None else as_shape(shape, "bernoulli")
    name = "float64" if aval_of(as_value(p)).dtype == "float64" else "float32"
    return b.compare(_unit(checked_key(key, "bernoulli"), sizes, name), _operand(p, sizes, name), "lt")


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
    first, second = (b.cast(b.shift_right(words(key, sizes, stream), 1), "int64") for stream in (0, DRAWN_BESIDE))
    carried = b.shift_right(b.mul(second, span), 31)
    return b.cast(b.add(b.shift_right(b.add(b.mul(first, span), carried), 31), low), name)


def _whole(bound: Any, shape: Shape) -> Value:
    value = as_value(bound)
    if isinstance(value, bool) or not is_integer(aval_of(value).dtype):
        raise TraceError(f"the bounds of randint are integers, got {bound!r}{at_user_line()}")
    return value if is_scalar(value) else _stretched(b.cast(value, "int64"), shape)


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


# ---------------------------------------------------------------------------- arguments


def _floating(dtype: Any, what: str) -> str:
    name = b.dtype_name(dtype)
    if not is_float(name):
        raise TraceError(f"{what} makes floating numbers, not {name}{at_user_line()}")
    return name


def _computed_in(name: str) -> str:
    return "float64" if name == "float64" else "float32"


def _operand(bound: Any, shape: Shape, name: str) -> Value:
    """A Python number as a float, an array in a dtype and shape."""
    value = as_value(bound)
    return float(value) if is_scalar(value) else _stretched(b.cast(value, name), shape)


def _stretched(x: Value, shape: Shape) -> Value:
    missing = len(shape) - len(x.shape)
    if missing < 0 or any(size not in (1, room) for size, room in zip(x.shape, shape[missing:], strict=True)):
        raise TraceError(f"a parameter of shape {list(x.shape)} does not broadcast to {list(shape)}{at_user_line()}")
    return b.stretch(x, shape)


def _shape_of(values: Sequence[Any]) -> Shape:
    shapes = [aval_of(as_value(value)).shape for value in values]
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        found = " and ".join(str(list(shape)) for shape in shapes)
        raise TraceError(f"parameters of shapes {found} do not broadcast together{at_user_line()}") from None
