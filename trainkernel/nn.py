"""Functions of neural networks: names, signatures and defaults of ``jax.nn``.

Also normalizations on the op ``moments``, and pooling and convolution from
``trainkernel.windows``. Outside of a traced function they work on NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trainkernel import initializers
from trainkernel import numpy as tnp
from trainkernel import primitives as b
from trainkernel.custom_rules import custom_vjp
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int, one_axis, some_axes
from trainkernel.numpy.reductions import kept_shape
from trainkernel.primitives import stop_gradient, together
from trainkernel.promotion import inexact
from trainkernel.trace import at_user_line, aval_of, is_scalar
from trainkernel.windows import avg_pool, conv_general_dilated, max_pool

Value = Any
Axes = Any

__all__ = [
    "avg_pool", "celu", "conv_general_dilated", "dot_product_attention", "elu", "gelu", "glu", "hard_sigmoid",
    "hard_silu", "hard_swish", "hard_tanh", "identity", "initializers", "layer_norm", "leaky_relu", "log_sigmoid",
    "log1mexp", "log_softmax", "logmeanexp",
    "logsumexp", "max_pool", "mish", "one_hot", "relu", "relu6", "rms_norm", "selu", "sigmoid", "silu", "soft_sign",
    "softmax", "softplus", "sparse_plus", "squareplus", "standardize", "swish", "tanh",
]  # fmt: skip


# ---------------------------------------------------------------------------- activations


def relu(x: Value) -> Value:
    """``max(x, 0)``, with derivative 0 at 0; NaN stays NaN."""
    return b.unary(b.relu, b.numeric(x))


def relu6(x: Value) -> Value:
    """``min(max(x, 0), 6)``."""
    return tnp.minimum(tnp.maximum(x, 0), 6.0)


def _smooth(name: str, op: Callable[[Value], Value], doc: str) -> Callable[[Value], Value]:
    """A function whose result is floating for integers too."""

    def function(x: Value) -> Value:
        return b.unary(op, x, floating=True)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


sigmoid = _smooth("sigmoid", b.sigmoid, "``1 / (1 + exp(-x))``.")
softplus = _smooth("softplus", b.softplus, "``log(1 + exp(x))``.")
tanh = _smooth("tanh", b.tanh, "The hyperbolic tangent.")
log_sigmoid = _smooth("log_sigmoid", lambda x: b.neg(b.softplus(b.neg(x))), "``log(sigmoid(x))``.")


def _log1mexp(x: Value) -> Value:
    is_small = b.compare(x, math.log(2.0), "lt")
    small, large = b.where(is_small, x, 1.0), b.where(is_small, 1.0, x)  # each side without the other's infinities
    return b.where(is_small, b.log(b.neg(b.expm1(b.neg(small)))), b.log1p(b.neg(b.exp(b.neg(large)))))


log1mexp = _smooth("log1mexp", _log1mexp, "``log(1 - exp(-x))``, exact near 0 and far from it.")
silu = _smooth("silu", lambda x: b.mul(x, b.sigmoid(x)), "``x * sigmoid(x)``.")
swish = silu
soft_sign = _smooth("soft_sign", lambda x: b.div(x, b.add(b.abs(x), 1.0)), "``x / (|x| + 1)``.")
mish = _smooth("mish", lambda x: b.mul(x, b.tanh(b.softplus(x))), "``x * tanh(softplus(x))``.")


def identity(x: Value) -> Value:
    """``x`` itself."""
    return b.as_array(x)


def hard_tanh(x: Value) -> Value:
    """``x`` between -1 and 1, the bound beyond."""
    return tnp.where(tnp.greater(x, 1), 1, tnp.where(tnp.less(x, -1), -1, x))


def hard_sigmoid(x: Value) -> Value:
    """``relu6(x + 3) / 6``."""
    return tnp.divide(relu6(tnp.add(x, 3.0)), 6.0)


def hard_silu(x: Value) -> Value:
    """``x * hard_sigmoid(x)``."""
    return tnp.multiply(x, hard_sigmoid(x))


hard_swish = hard_silu


def leaky_relu(x: Value, negative_slope: Value = 1e-2) -> Value:
    """``x``, times a slope where it is negative."""
    return tnp.where(tnp.greater_equal(x, 0), x, tnp.multiply(x, negative_slope))


def elu(x: Value, alpha: Value = 1.0) -> Value:
    """``x``, or ``alpha * (exp(x) - 1)`` where it is not positive."""
    is_positive = tnp.greater(x, 0)
    return tnp.where(is_positive, x, tnp.multiply(alpha, tnp.expm1(tnp.where(is_positive, 0.0, x))))


def selu(x: Value) -> Value:
    """``scale * elu(x, alpha)`` with the constants that keep activations normalized (Klambauer et al., 2017)."""
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return tnp.multiply(scale, elu(x, alpha))


def celu(x: Value, alpha: Value = 1.0) -> Value:
    """``max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0)``."""
    is_positive = tnp.greater(x, 0)
    below = tnp.divide(tnp.where(is_positive, 0.0, x), alpha)
    return tnp.where(is_positive, x, tnp.multiply(alpha, tnp.expm1(below)))


def gelu(x: Value, approximate: bool = True) -> Value:
    """``x`` times the normal distribution function of ``x``: by ``tanh`` (JAX's default), or exactly by ``erf``."""
    return b.unary(_gelu_tanh if approximate else _gelu_erf, x, floating=True)


def _gelu_tanh(x: Value) -> Value:
    cubic = b.add(x, b.mul(b.mul(b.mul(x, x), x), 0.044715))
    return b.mul(x, b.mul(b.add(b.tanh(b.mul(cubic, math.sqrt(2.0 / math.pi))), 1.0), 0.5))


def _gelu_erf(x: Value) -> Value:
    return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, math.sqrt(0.5))), 1.0))


def squareplus(x: Value, b: Value = 4) -> Value:
    """``(x + sqrt(x² + b)) / 2``."""
    root = tnp.sqrt(tnp.add(tnp.square(x), b))
    return tnp.multiply(tnp.add(x, root), 0.5)


def sparse_plus(x: Value) -> Value:
    """0 below -1, ``(x + 1)² / 4`` up to 1, ``x`` above."""
    square = tnp.multiply(tnp.square(tnp.add(x, 1.0)), 0.25)
    return tnp.where(tnp.less_equal(x, -1.0), 0.0, tnp.where(tnp.greater_equal(x, 1.0), x, square))


def glu(x: Value, axis: int = -1) -> Value:
    """The first half along an axis times the sigmoid of the second."""
    value = b.as_array(x)
    along = one_axis(axis, len(value.shape), "glu")
    if value.shape[along] % 2:
        raise TraceError(f"glu needs an even size along axis {axis}, got shape {list(value.shape)}{at_user_line()}")
    first, second = tnp.split(value, 2, along)
    return tnp.multiply(first, sigmoid(second))


# ---------------------------------------------------------------------------- softmax


def _floating(x: Value) -> Value:
    value = b.as_array(x)
    return b.cast(value, inexact(aval_of(value).dtype))


def _spread(x: Value, shape: tuple[int, ...], axes: tuple[int, ...]) -> Value:
    """A reduction's result at every element that was reduced."""
    return b.broadcast(x, shape, [dim for dim in range(len(shape)) if dim not in axes])


def softmax(x: Value, axis: Axes = -1, where: Value | None = None) -> Value:
    """Exponentials along axes divided by their sum; elements where the condition does not hold are 0.

    The maximum is subtracted first. Rows without an element give NaN, as in JAX.
    """
    value = _floating(x)
    axes = some_axes(axis, len(value.shape), "softmax")
    chosen = value if where is None else tnp.where(where, value, -math.inf)
    result = _softmax(axes)(chosen)
    return result if where is None else tnp.where(where, result, 0.0)


def _softmax(axes: tuple[int, ...]) -> Callable[[Value], Value]:
    """``y``, whose derivative ``y * (ct - sum(y * ct))`` needs nothing but ``y``."""

    def shares(x: Value) -> Value:
        largest, total = b.softmax_stats(x, dims=axes)
        shape = tuple(x.shape)
        return b.div(b.exp(b.sub(x, _spread(largest, shape, axes))), _spread(total, shape, axes))

    def forward(x: Value) -> tuple[Value, Value]:
        result = shares(x)
        return result, result

    def backward(result: Value, cotangent: Value) -> tuple[Value]:
        scaled = b.mul(result, cotangent)
        return (b.sub(scaled, b.mul(result, _spread(b.sum(scaled, dims=axes), tuple(result.shape), axes))),)

    function = custom_vjp(shares)
    function.defvjp(forward, backward)
    return function


def log_softmax(x: Value, axis: Axes = -1, where: Value | None = None) -> Value:
    """The logarithm of ``softmax``; -inf where the condition does not hold."""
    value = _floating(x)
    axes = some_axes(axis, len(value.shape), "log_softmax")
    chosen = value if where is None else tnp.where(where, value, -math.inf)
    largest, total = b.softmax_stats(chosen, dims=axes)
    shape = tuple(value.shape)
    result = b.sub(b.sub(chosen, _spread(largest, shape, axes)), _spread(b.log(total), shape, axes))
    return result if where is None else tnp.where(where, result, -math.inf)


def logsumexp(
    a: Value,
    axis: Axes = None,
    b: Value | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: Value | None = None,
) -> Value:
    """``log(sum(b * exp(a)))`` along axes, without overflow.

    Parameters
    ----------
    a : array
    axis : int, tuple of ints or None
    b : array, optional
        Factors, 1 if left out; where they are 0, ``a`` does not count. A negative sum gives NaN.
    keepdims : bool
    return_sign : bool
        Give ``(log(abs(sum)), sign(sum))`` instead.
    where : array of bools, optional
        The elements that count.
    """
    if b is None and not return_sign:
        return _logsumexp(_floating(a), axis, keepdims, where)
    value, factor = together((_floating(a), 1.0 if b is None else b), floating=True)
    value = tnp.where(factor != 0 if where is None else tnp.logical_and(where, factor != 0), value, -math.inf)
    axes = some_axes(axis, len(value.shape), "logsumexp")
    largest = stop_gradient(tnp.max(value, axes, keepdims=True, initial=-math.inf))
    largest = tnp.where(tnp.isfinite(largest), largest, 0.0)
    total = tnp.sum(tnp.multiply(factor, tnp.exp(tnp.subtract(value, largest))), axes, keepdims=keepdims)
    result = tnp.add(tnp.log(tnp.abs(total)), largest if keepdims else tnp.squeeze(largest, axes))
    if return_sign:
        return result, tnp.sign(total)
    return tnp.where(total < 0, math.nan, result)


def _logsumexp(value: Value, axis: Axes, keepdims: bool, where: Value | None) -> Value:
    axes = some_axes(axis, len(value.shape), "logsumexp")
    chosen = value if where is None else tnp.where(where, value, -math.inf)
    largest, total = b.softmax_stats(chosen, dims=axes)
    result = b.add(b.log(total), largest)
    return b.reshape(result, kept_shape(tuple(value.shape), axes)) if keepdims else result


def logmeanexp(x: Value, axis: Axes = None, where: Value | None = None, keepdims: bool = False) -> Value:
    """``log(mean(exp(x)))`` along axes."""
    value = _floating(x)
    ones = b.full(value.shape, 1, value.dtype)
    count = tnp.sum(ones, axis, keepdims=keepdims, where=where)
    return tnp.subtract(_logsumexp(value, axis, keepdims, where), tnp.log(count))


def one_hot(x: Value, num_classes: int, *, dtype: Any = None, axis: int = -1) -> Value:
    """1 at the class of each element along a new axis, 0 elsewhere; all 0 for classes out of range."""
    index = b.as_array(x)
    count = as_int(num_classes, "num_classes")
    along = one_axis(axis, len(index.shape) + 1, "one_hot")
    shape = (*index.shape[:along], count, *index.shape[along:])
    dims = [dim for dim in range(len(shape)) if dim != along]
    classes = b.broadcast(b.iota(count, aval_of(index).dtype), shape, (along,))
    return b.cast(b.compare(b.broadcast(index, shape, dims), classes, "eq"), "float32" if dtype is None else dtype)


# ---------------------------------------------------------------------------- normalization


def standardize(
    x: Value,
    axis: Axes = -1,
    mean: Value | None = None,
    variance: Value | None = None,
    epsilon: Value = 1e-5,
    where: Value | None = None,
) -> Value:
    """``(x - mean) / sqrt(variance + epsilon)``, with those of ``x`` along axes unless given."""
    if where is not None:
        raise TraceError(f"standardize has no 'where'{at_user_line()}")
    value = _floating(x)
    axes, shape = some_axes(axis, len(value.shape), "standardize"), tuple(value.shape)
    if mean is None and variance is None and is_scalar(epsilon):
        return _standardize(axes, epsilon)(value)
    if mean is None:
        own_mean, own_variance = b.moments(value, dims=axes)
        mean = _spread(own_mean, shape, axes)
    else:
        own_variance = tnp.mean(tnp.square(tnp.subtract(value, mean)), axis)
    if variance is None:
        factor = _spread(_rsqrt(tnp.add(own_variance, epsilon)), shape, axes)
    else:
        factor = _rsqrt(tnp.add(variance, epsilon))
    return tnp.multiply(tnp.subtract(value, mean), factor)


def _standardize(axes: tuple[int, ...], epsilon: float) -> Callable[[Value], Value]:
    """``y``, whose derivative ``factor * (ct - mean(ct) - y * mean(y * ct))`` needs ``y`` and one factor a row."""

    def parts(x: Value) -> tuple[Value, Value]:
        mean, variance = b.moments(x, dims=axes)
        factor = _rsqrt(b.add(variance, epsilon))
        shape = tuple(x.shape)
        return b.mul(b.sub(x, _spread(mean, shape, axes)), _spread(factor, shape, axes)), factor

    def forward(x: Value) -> tuple[Value, tuple[Value, Value]]:
        result, factor = parts(x)
        return result, (result, factor)

    def backward(kept: tuple[Value, Value], cotangent: Value) -> tuple[Value]:
        result, factor = kept
        shape = tuple(result.shape)
        along = _spread(b.mean(b.mul(result, cotangent), dims=axes), shape, axes)
        centred = b.sub(cotangent, _spread(b.mean(cotangent, dims=axes), shape, axes))
        return (b.mul(_spread(factor, shape, axes), b.sub(centred, b.mul(result, along))),)

    function = custom_vjp(lambda x: parts(x)[0])
    function.defvjp(forward, backward)
    return function


def _rsqrt(x: Value) -> Value:
    return b.unary(b.rsqrt, x, floating=True)


def layer_norm(
    x: Value, scale: Value | None = None, bias: Value | None = None, axis: Axes = -1, eps: float = 1e-5
) -> Value:
    """``standardize`` in float32, times ``scale``, plus ``bias`` (which broadcast), in the dtype of ``x``."""
    value = _floating(x)
    result = standardize(_wide(value), axis, epsilon=eps)
    result = result if scale is None else tnp.multiply(result, scale)
    result = result if bias is None else tnp.add(result, bias)
    return b.cast(result, value.dtype)


def rms_norm(x: Value, scale: Value | None = None, axis: Axes = -1, eps: float = 1e-6) -> Value:
    """``x / sqrt(mean(x²) + eps)`` in float32, times ``scale``, in the dtype of ``x``."""
    value = _floating(x)
    wide = _wide(value)
    square = tnp.mean(b.mul(wide, wide), axis, keepdims=True)
    result = tnp.multiply(wide, _rsqrt(b.add(square, eps)))
    return b.cast(result if scale is None else tnp.multiply(result, scale), value.dtype)


def _wide(x: Value) -> Value:
    """16-bit floats as float32."""
    return b.cast(x, "float32") if aval_of(x).dtype in ("float16", "bfloat16") else x


# ---------------------------------------------------------------------------- attention


def dot_product_attention(
    query: Value,
    key: Value,
    value: Value,
    bias: Value | None = None,
    mask: Value | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Value:
    """Attention: softmax of the scaled products of queries and keys, times the values.

    Products and softmax are float32 for 16-bit floats; the weights get the dtype of ``value``.

    Parameters
    ----------
    query : array
        ``[B, T, N, H]`` or ``[T, N, H]``.
    key, value : array
        ``[B, S, K, H]`` or ``[S, K, H]``; ``K`` divides ``N``, and each key head serves ``N / K``
        query heads in a row.
    bias, mask : array, optional
        Added to the products, or bool; they broadcast to ``[B, N, T, S]``.
    scale : float, optional
        ``1 / sqrt(H)`` by default.
    is_causal : bool
        Queries see the keys up to their own position.

    Returns
    -------
    array
        Of the shape of ``query``.

    Raises
    ------
    TraceError
        If the shapes do not fit.
    """
    q, k, v = (_floating(x) for x in (query, key, value))
    _check_attention(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    if len(q.shape) == 3:
        batched = [b.reshape(x, (1, *x.shape)) for x in (q, k, v)]
        bias, mask = (None if x is None else _with_batch(x) for x in (bias, mask))
        q_one, k_one, v_one = batched
        return b.reshape(_attend(q_one, k_one, v_one, bias, mask, scale, is_causal), q.shape)
    return _attend(q, k, v, bias, mask, scale, is_causal)


def _with_batch(x: Value) -> Value:
    value = b.as_array(x)
    return b.reshape(value, (1, *value.shape)) if len(value.shape) == 3 else value


def _check_attention(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    fits = len(q) == len(k) == len(v) and len(q) in (3, 4) and k[:-1] == v[:-1] and q[:-3] == k[:-3]
    if not fits or q[-1] != k[-1] or q[-1] != v[-1] or not k[-2] or q[-2] % k[-2]:
        raise TraceError(
            f"dot_product_attention: query {list(q)}, key {list(k)} and value {list(v)} do not fit: "
            f"[B, T, N, H] and twice [B, S, K, H] with K dividing N are needed{at_user_line()}"
        )


def _attend(
    q: Value, k: Value, v: Value, bias: Value | None, mask: Value | None, scale: float | None, is_causal: bool
) -> Value:
    batch, length, heads, width = q.shape
    shared, size = heads // k.shape[2], k.shape[1]
    grouped = b.reshape(q, (batch, length, k.shape[2], shared, width))
    wide = aval_of(_wide(q)).dtype
    logits = tnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=wide)
    logits = b.reshape(logits, (batch, heads, length, size))
    logits = b.mul(logits, 1.0 / math.sqrt(width) if scale is None else scale)
    if bias is not None:
        logits = tnp.add(logits, b.cast(b.as_array(bias), wide))
    if is_causal:
        causal = b.broadcast(tnp.tri(length, size, dtype="bool"), tuple(logits.shape), (2, 3))
        mask = causal if mask is None else tnp.logical_and(causal, mask)
    if mask is not None:
        logits = tnp.where(mask, logits, -0.7 * float(tnp.finfo(wide).max))
    weights = b.reshape(b.cast(softmax(logits), v.dtype), (batch, k.shape[2], shared, length, size))
    return b.reshape(tnp.einsum("bkgts,bskh->btkgh", weights, v), q.shape)
