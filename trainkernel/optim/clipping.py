"""Transformations that bound updates."""

from __future__ import annotations

from typing import Any

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.numpy import add, divide, less, multiply, negative
from trainkernel.optim.base import GradientTransformation, Updates, stateless
from trainkernel.trace import as_value, aval_of, is_scalar

Value = Any


def clip(max_delta: Any) -> GradientTransformation:
    """Each element of the updates in ``[-max_delta, max_delta]``."""
    least = -max_delta if is_scalar(max_delta) else negative(max_delta)

    def clipped(u: Value) -> Value:
        return b.binary(b.minimum, b.binary(b.maximum, u, least), max_delta)

    return stateless(lambda updates, params: tree.map(clipped, updates))


def global_norm(updates: Updates) -> Value:
    """The Euclidean norm of all elements of a tree together: a scalar array."""
    total: Value = None
    for leaf in tree.leaves(updates):
        squares = _sum_of_squares(as_value(leaf))
        total = squares if total is None else add(total, squares)
    return b.full((), 0, "float32") if total is None else b.unary(b.sqrt, total, floating=True)


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
