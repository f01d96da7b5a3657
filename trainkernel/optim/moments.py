"""Momentum and moving averages of updates."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.numpy import add, divide, multiply
from trainkernel.optim.base import (
    GradientTransformation,
    OptState,
    Params,
    Updates,
    cast_tree,
    dtype_of,
    one_minus,
    safe_increment,
    scalar_of,
    zero_count,
    zeros_like,
)
from trainkernel.trace import is_scalar

Value = Any


class TraceState(NamedTuple):
    """``trace``: the sum of decayed updates."""

    trace: Params


def trace(decay: Any, nesterov: bool = False, accumulator_dtype: Any = None) -> GradientTransformation:
    """``t = g + decay * t``, or with Nesterov's momentum ``g + decay * t`` of the new ``t``.

    Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum", ICML 2013.

    Parameters
    ----------
    decay : number or scalar array
    nesterov : bool
    accumulator_dtype : dtype or None
        That of the state; the parameters' by default.
    """

    def init(params: Params) -> TraceState:
        return TraceState(zeros_like(params, accumulator_dtype))

    def update(updates: Updates, state: TraceState, params: Params | None = None) -> tuple[Updates, OptState]:
        def decayed(g: Value, t: Value) -> Value:
            return add(g, multiply(decay, t))

        new = tree.map(decayed, updates, state.trace)
        updates = tree.map(decayed, updates, new) if nesterov else new
        return updates, TraceState(cast_tree(new, accumulator_dtype))

    return GradientTransformation(init, update)


class EmaState(NamedTuple):
    """``count``: int32[]; ``ema``: the moving average."""

    count: Value
    ema: Params


def ema(decay: Any, debias: bool = True, accumulator_dtype: Any = None) -> GradientTransformation:
    """The exponential moving average of updates: ``m = (1 - decay) * g + decay * m``.

    Parameters
    ----------
    decay : number or scalar array
    debias : bool
        Divide by ``1 - decay**count``: the average starts at zero.
    accumulator_dtype : dtype or None
        That of the state; the parameters' by default.
    """

    def init(params: Params) -> EmaState:
        return EmaState(zero_count(), zeros_like(params, accumulator_dtype))

    def update(updates: Updates, state: EmaState, params: Params | None = None) -> tuple[Updates, OptState]:
        new = update_moment(updates, state.ema, decay, 1)
        count = safe_increment(state.count)
        updates = bias_correction(new, decay, count) if debias else new
        return updates, EmaState(count, cast_tree(new, accumulator_dtype))

    return GradientTransformation(init, update)


def update_moment(updates: Updates, moments: Any, decay: Any, order: int) -> Any:
    """``(1 - decay) * g**order + decay * m``; the order is 1 or 2."""

    def moment(g: Value, m: Value) -> Value:
        powered = g if order == 1 else multiply(g, g)
        return add(multiply(one_minus(decay), powered), multiply(decay, m))

    return tree.map(moment, updates, moments)


def first_moment(updates: Updates, mu: Updates, b1: Any, count: Value, nesterov: bool) -> Updates:
    """The first moment without its bias, with ``nesterov`` a step ahead."""
    if not nesterov:
        return bias_correction(mu, b1, count)
    ahead = bias_correction(mu, b1, safe_increment(count))
    return update_moment(bias_correction(updates, b1, count), ahead, b1, 1)


def moment_root(moment: Value, raised: Any = 0.0) -> Value:
    """The root of a second moment, to which ``raised`` is added before."""
    return b.unary(b.sqrt, moment if is_scalar(raised) and raised == 0 else add(moment, raised))


def bias_correction(moments: Any, decay: Any, count: Value) -> Any:
    """Moments divided by ``1 - decay**count``.

    As in optax the power is a float32 number, so its error of a few units in the last place comes
    out magnified by ``1 / (1 - decay**count)`` in the first steps.
    """

    def corrected(m: Value) -> Value:
        dtype = dtype_of(m)
        inner = "float64" if dtype == "float64" else "float32"
        power = b.power(b.cast(scalar_of(decay, inner), inner), b.cast(count, inner))
        return divide(m, b.cast(b.sub(1.0, power), dtype))

    return tree.map(corrected, moments)
