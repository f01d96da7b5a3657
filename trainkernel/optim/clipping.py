"""Transformations that bound updates."""

from __future__ import annotations

from typing import Any

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.errors import TraceError
from trainkernel.numpy import add, broadcast_to, divide, less, maximum, multiply, negative, sqrt, sum, where
from trainkernel.optim.base import GradientTransformation, Params, Updates, needed, stateless
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any


def clip(max_delta: Any) -> GradientTransformation:
    """Each element of the updates in ``[-max_delta, max_delta]``."""
    least = -max_delta if is_scalar(max_delta) else negative(max_delta)

    def clipped(u: Value) -> Value:
        return b.binary(b.minimum, b.binary(b.maximum, u, least), max_delta)

    return stateless(lambda updates, params: tree.map(clipped, updates))


def global_norm(updates: Updates) -> Value:
    """The Euclidean norm of all elements of a tree together: a scalar array."""
    return b.unary(b.sqrt, squared_global_norm(updates), floating=True)


def squared_global_norm(updates: Updates) -> Value:
    """The sum of squares of all elements of a tree."""
    total: Value = None
    for leaf in tree.leaves(updates):
        squares = _sum_of_squares(as_value(leaf))
        total = squares if total is None else add(total, squares)
    return b.full((), 0, "float32") if total is None else total


def _sum_of_squares(x: Value) -> Value:
    squares = multiply(x, x)
    return squares if is_scalar(squares) else b.sum(squares)


def clip_by_global_norm(max_norm: Any) -> GradientTransformation:
    """All updates times ``max_norm / norm`` where their global norm is not below ``max_norm``.

    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", ICML 2013.

    Parameters
    ----------
    max_norm : number or scalar array
    """

    def clip_all(updates: Updates, params: Any) -> Updates:
        norm = global_norm(updates)
        is_short = less(norm, max_norm)

        def clipped(u: Value) -> Value:
            u = as_value(u)
            dtype = aval_of(u).dtype
            bounded = b.cast(multiply(divide(u, b.cast(norm, dtype)), max_norm), dtype)
            return b.where(b.stretch(is_short, u.shape), u, bounded)

        return tree.map(clipped, updates)

    return stateless(clip_all)


def clip_by_block_rms(threshold: Any) -> GradientTransformation:
    """Each array of the updates divided by its root mean square over ``threshold``, where that is above 1.

    Parameters
    ----------
    threshold : number or scalar array
    """

    def clipped(u: Value) -> Value:
        mean = b.mean(multiply(u, u))
        return divide(u, b.binary(b.maximum, 1.0, divide(b.unary(b.sqrt, mean), threshold)))

    return stateless(lambda updates, params: tree.map(clipped, updates))


def adaptive_grad_clip(
    clipping: Any, eps: Any = 1e-3, axis: int | tuple[int, ...] | None = None
) -> GradientTransformation:
    """Updates of each unit bounded by ``clipping`` times the norm of its parameters.

    Brock, De, Smith and Simonyan, "High-performance large-scale image recognition without
    normalization", 2021.

    Parameters
    ----------
    clipping : number or scalar array
    eps : number or scalar array
        Smaller norms of parameters count as this.
    axis : int, tuple of int or None
        What makes up a unit; by default all axes but the last of a matrix or a kernel, and all of a vector.
    """

    def clipped(u: Value, p: Value) -> Value:
        u = as_value(u)
        norm, bound = _unit_norm(u, axis), multiply(clipping, maximum(_unit_norm(as_value(p), axis), eps))
        return where(less(norm, bound), u, multiply(u, divide(bound, maximum(norm, 1e-6))))

    def clip_all(updates: Updates, params: Params | None) -> Updates:
        return tree.map(clipped, updates, needed(params, "adaptive_grad_clip"))

    return stateless(clip_all)


def _unit_norm(x: Value, axis: int | tuple[int, ...] | None) -> Value:
    shape = aval_of(x).shape
    axes = axis
    if axis is None and len([size for size in shape if size != 1]) > 1:
        if len(shape) > 5:
            raise TraceError(
                f"adaptive_grad_clip: got a parameter of shape {list(shape)}, needs at most 5 dims; pass axis to say "
                f"what makes up a unit{at_user_line()}"
            )
        axes = 0 if len(shape) < 4 else tuple(range(len(shape) - 1))
    return broadcast_to(sqrt(sum(multiply(x, x), axis=axes, keepdims=True)), shape)
