"""Transformations of updates, array by array: what optimizers are chained from.

Names, arguments, states and formulas are optax's, in the order of optax's operations, so the
results differ by the rounding of single operations only. Hyperparameters may be traced scalars.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.numpy import add, divide, multiply, subtract
from trainkernel.optim.base import (
    EmptyState,
    GradientTransformation,
    OptState,
    Params,
    Schedule,
    Updates,
    cast_tree,
    dtype_of,
    full_like,
    identity,
    needed,
    safe_increment,
    scalar_of,
    stateless,
    zero_count,
    zeros_like,
)
from trainkernel.optim.masking import masked
from trainkernel.optim.moments import bias_correction as without_bias
from trainkernel.optim.moments import first_moment, moment_root, update_moment
from trainkernel.trace import as_value, is_scalar

Value = Any
ScalarOrSchedule = Any

# ---------------------------------------------------------------------------- step sizes


def scale(step_size: Any) -> GradientTransformation:
    """Updates times a number or scalar array."""
    return stateless(lambda updates, params: tree.map(lambda g: multiply(step_size, g), updates))


class ScaleByScheduleState(NamedTuple):
    """``count``: int32[], the steps done."""

    count: Value


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Updates times the value of a schedule at the count of steps done."""

    def init(params: Params) -> ScaleByScheduleState:
        return ScaleByScheduleState(zero_count())

    def update(updates: Updates, state: ScaleByScheduleState, params: Params | None = None) -> tuple[Updates, OptState]:
        size = step_size_fn(state.count)
        updates = tree.map(lambda g: multiply(scalar_of(size, dtype_of(g)), g), updates)
        return updates, ScaleByScheduleState(safe_increment(state.count))

    return GradientTransformation(init, update)


def scale_by_learning_rate(learning_rate: ScalarOrSchedule = None, *, flip_sign: bool = True) -> GradientTransformation:
    """Updates times minus the learning rate: a descent.

    Parameters
    ----------
    learning_rate : number, scalar array, schedule or None
        None changes nothing.
    flip_sign : bool
        False leaves the sign: an ascent.
    """
    if learning_rate is None:
        return identity()
    sign = -1 if flip_sign else 1
    if callable(learning_rate):
        return scale_by_schedule(lambda count: _signed(sign, learning_rate(count)))
    return scale(_signed(sign, learning_rate))


def _signed(sign: int, value: Any) -> Value:
    return sign * value if is_scalar(value) else multiply(sign, value)


# ---------------------------------------------------------------------------- adaptive steps


class ScaleByAdamState(NamedTuple):
    """``count``: int32[]; ``mu``, ``nu``: the moving averages of gradients and of their squares."""

    count: Value
    mu: Updates
    nu: Updates


def scale_by_adam(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """``m / (sqrt(v + eps_root) + eps)`` of the moments without their bias.

    Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015; with ``nesterov`` Dozat,
    "Incorporating Nesterov momentum into Adam", 2016.

    Parameters
    ----------
    b1, b2 : number or scalar array
        Decay of the first and the second moment.
    eps, eps_root : number or scalar array
    mu_dtype : dtype or None
        Of the first moment in the state; the parameters' by default.
    nesterov : bool
    """

    def init(params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(zero_count(), zeros_like(params, mu_dtype), zeros_like(params))

    def update(updates: Updates, state: ScaleByAdamState, params: Params | None = None) -> tuple[Updates, OptState]:
        mu = update_moment(updates, state.mu, b1, 1)
        nu = update_moment(updates, state.nu, b2, 2)
        count = safe_increment(state.count)
        mu_hat = first_moment(updates, mu, b1, count, nesterov)
        nu_hat = without_bias(nu, b2, count)
        updates = tree.map(lambda m, v: divide(m, add(moment_root(v, eps_root), eps)), mu_hat, nu_hat)
        nu = tree.map(lambda new, old: b.cast(new, dtype_of(old)), nu, state.nu)
        return updates, ScaleByAdamState(count, cast_tree(mu, mu_dtype), nu)

    return GradientTransformation(init, update)


class ScaleByLionState(NamedTuple):
    """``count``: int32[]; ``mu``: the momentum."""

    count: Value
    mu: Updates


def scale_by_lion(b1: Any = 0.9, b2: Any = 0.99, mu_dtype: Any = None) -> GradientTransformation:
    """The sign of ``(1 - b1) * g + b1 * m``; then ``m`` decays with ``b2``.

    Chen et al., "Symbolic discovery of optimization algorithms", 2023.

    Parameters
    ----------
    b1, b2 : number or scalar array
    mu_dtype : dtype or None
        Of the momentum in the state; the parameters' by default.
    """

    def init(params: Params) -> ScaleByLionState:
        return ScaleByLionState(zero_count(), zeros_like(params, mu_dtype))

    def update(updates: Updates, state: ScaleByLionState, params: Params | None = None) -> tuple[Updates, OptState]:
        signs = tree.map(b.sign, update_moment(updates, state.mu, b1, 1))
        mu = cast_tree(update_moment(updates, state.mu, b2, 1), mu_dtype)
        return signs, ScaleByLionState(safe_increment(state.count), mu)

    return GradientTransformation(init, update)


class ScaleByRssState(NamedTuple):
    """``sum_of_squares`` of all gradients."""

    sum_of_squares: Updates


def scale_by_rss(initial_accumulator_value: float = 0.1, eps: Any = 1e-7) -> GradientTransformation:
    """Updates divided by the root of the sum of all squares.

    Duchi, Hazan and Singer, "Adaptive subgradient methods", JMLR 2011.

    Parameters
    ----------
    initial_accumulator_value : number
    eps : number or scalar array
        Added under the root.
    """

    def init(params: Params) -> ScaleByRssState:
        return ScaleByRssState(full_like(params, initial_accumulator_value))

    def update(updates: Updates, state: ScaleByRssState, params: Params | None = None) -> tuple[Updates, OptState]:
        sums = tree.map(lambda g, s: add(multiply(g, g), s), updates, state.sum_of_squares)

        def scaled(s: Value, g: Value) -> Value:
            return multiply(b.where(b.compare(s, 0.0, "gt"), b.unary(b.rsqrt, add(s, eps)), 0.0), g)

        return tree.map(scaled, sums, updates), ScaleByRssState(sums)

    return GradientTransformation(init, update)


class ScaleByRmsState(NamedTuple):
    """``nu``: the moving average of squares."""

    nu: Updates


class ScaleByRmsWithCountState(NamedTuple):
    """``count``: int32[]; ``nu``: the moving average of squares."""

    count: Value
    nu: Updates


def scale_by_rms(
    decay: Any = 0.9,
    eps: Any = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """Updates divided by the root of the moving average of squares.

    Hinton, Srivastava and Swersky, "Overview of mini-batch gradient descent", lecture 6e, 2012.

    Parameters
    ----------
    decay : number or scalar array
    eps : number or scalar array
    initial_scale : number
        Where the average starts.
    eps_in_sqrt : bool
        ``sqrt(v + eps)``, or ``sqrt(v) + eps``.
    bias_correction : bool
        Divide the average by ``1 - decay**count``.
    """

    def init(params: Params) -> OptState:
        nu = full_like(params, initial_scale)
        return ScaleByRmsWithCountState(zero_count(), nu) if bias_correction else ScaleByRmsState(nu)

    def update(updates: Updates, state: Any, params: Params | None = None) -> tuple[Updates, OptState]:
        nu = update_moment(updates, state.nu, decay, 2)
        new, (nu_hat,) = _counted(state, bias_correction, decay, nu=nu)
        return tree.map(lambda v, g: multiply(_inverse_root(v, eps, eps_in_sqrt), g), nu_hat, updates), new

    return GradientTransformation(init, update)


class ScaleByRStdDevState(NamedTuple):
    """``mu``, ``nu``: the moving averages of gradients and of their squares."""

    mu: Updates
    nu: Updates


class ScaleByRStdDevWithCountState(NamedTuple):
    """``count``: int32[]; ``mu``, ``nu``: the moving averages of gradients and of their squares."""

    count: Value
    mu: Updates
    nu: Updates


def scale_by_stddev(
    decay: Any = 0.9,
    eps: Any = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """Updates divided by the root of their moving variance: ``scale_by_rms``, centred."""

    def init(params: Params) -> OptState:
        mu, nu = zeros_like(params), full_like(params, initial_scale)
        return ScaleByRStdDevWithCountState(zero_count(), mu, nu) if bias_correction else ScaleByRStdDevState(mu, nu)

    def update(updates: Updates, state: Any, params: Params | None = None) -> tuple[Updates, OptState]:
        mu = update_moment(updates, state.mu, decay, 1)
        nu = update_moment(updates, state.nu, decay, 2)
        new, (mu_hat, nu_hat) = _counted(state, bias_correction, decay, mu=mu, nu=nu)

        def scaled(m: Value, v: Value, g: Value) -> Value:
            return multiply(_inverse_root(subtract(v, multiply(m, m)), eps, eps_in_sqrt), g)

        return tree.map(scaled, mu_hat, nu_hat, updates), new

    return GradientTransformation(init, update)


def _counted(state: Any, has_count: bool, decay: Any, **moments: Any) -> tuple[OptState, list[Any]]:
    """The new state of moments, and the moments, without their bias if there is a count."""
    if not has_count:
        return type(state)(**moments), list(moments.values())
    count = safe_increment(state.count)
    return type(state)(count, **moments), [without_bias(m, decay, count) for m in moments.values()]


def _inverse_root(v: Value, eps: Any, eps_in_sqrt: bool) -> Value:
    return b.unary(b.rsqrt, add(v, eps)) if eps_in_sqrt else divide(1, add(_sqrt(v), eps))


# ---------------------------------------------------------------------------- parameters


class WeightDecaySchedule(NamedTuple):
    """``count``: int32[], the steps done."""

    count: Value


def add_decayed_weights(weight_decay: ScalarOrSchedule = 0.0, mask: Any = None) -> GradientTransformation:
    """Updates plus ``weight_decay`` times the parameters.

    Parameters
    ----------
    weight_decay : number, scalar array or schedule
    mask : tree of bool, callable (params) -> tree of bool, or None
        Which parameters decay.
    """

    def init(params: Params) -> OptState:
        return WeightDecaySchedule(zero_count()) if callable(weight_decay) else EmptyState()

    def update(updates: Updates, state: Any, params: Params | None = None) -> tuple[Updates, OptState]:
        params = needed(params, "add_decayed_weights")
        new = WeightDecaySchedule(safe_increment(state.count)) if callable(weight_decay) else state
        if is_scalar(weight_decay) and weight_decay == 0:
            return updates, new
        share = weight_decay(state.count) if callable(weight_decay) else weight_decay
        return tree.map(lambda g, p: add(g, multiply(share, p)), updates, params), new

    decayed = GradientTransformation(init, update)
    return decayed if mask is None else masked(decayed, mask)


def scale_by_trust_ratio(min_norm: Any = 0.0, trust_coefficient: Any = 1.0, eps: Any = 0.0) -> GradientTransformation:
    """Each array's update times the norm of the parameter over that of the update.

    You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017.

    Parameters
    ----------
    min_norm : number or scalar array
        Smaller norms count as this.
    trust_coefficient, eps : number or scalar array
    """

    def scaled(update: Value, param: Value) -> Value:
        param_norm, update_norm = _norm_at_least(param, min_norm), _norm_at_least(update, min_norm)
        ratio = divide(multiply(trust_coefficient, param_norm), add(update_norm, eps))
        vanishes = b.bitwise_or(b.compare(param_norm, 0.0, "eq"), b.compare(update_norm, 0.0, "eq"))
        return multiply(update, b.where(vanishes, 1.0, ratio))

    def update_all(updates: Updates, params: Params | None) -> Updates:
        return tree.map(scaled, updates, needed(params, "scale_by_trust_ratio"))

    return stateless(update_all)


def _norm_at_least(x: Value, least: Any) -> Value:
    value = as_value(x)
    return b.binary(b.maximum, _sqrt(b.sum(multiply(value, value))), least)


# ---------------------------------------------------------------------------- values


def _sqrt(x: Value) -> Value:
    return b.unary(b.sqrt, x)
