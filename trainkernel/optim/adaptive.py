"""Relatives of Adam: AMSGrad, AdaMax, AdaBelief and RAdam.

Names, arguments, states and formulas are optax's, in the order of optax's operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.numpy import abs, add, divide, maximum, multiply, subtract
from trainkernel.optim.base import (
    GradientTransformation,
    OptState,
    Params,
    Updates,
    cast_tree,
    dtype_of,
    safe_increment,
    scalar_of,
    zero_count,
    zeros_like,
)
from trainkernel.optim.moments import bias_correction as without_bias
from trainkernel.optim.moments import first_moment, moment_root, update_moment
from trainkernel.optim.scaling import ScaleByAdamState
from trainkernel.trace import is_scalar

Value = Any


class ScaleByAmsgradState(NamedTuple):
    """``count``: int32[]; ``mu``, ``nu``: the moving averages; ``nu_max``: the largest ``nu`` so far."""

    count: Value
    mu: Updates
    nu: Updates
    nu_max: Updates


def scale_by_amsgrad(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
) -> GradientTransformation:
    """Adam divided by the root of the largest second moment so far.

    Reddi, Kale and Kumar, "On the convergence of Adam and beyond", ICLR 2018.

    Parameters
    ----------
    b1, b2 : number or scalar array
        Decay of the first and the second moment.
    eps, eps_root : number or scalar array
    mu_dtype : dtype or None
        Of the first moment in the state; the parameters' by default.
    bias_correction_mu, bias_correction_nu : bool
        Take the bias out of the moments.
    """

    def init(params: Params) -> ScaleByAmsgradState:
        nu = zeros_like(params)
        return ScaleByAmsgradState(zero_count(), zeros_like(params, mu_dtype), nu, zeros_like(params))

    def update(updates: Updates, state: ScaleByAmsgradState, params: Params | None = None) -> tuple[Updates, OptState]:
        mu = update_moment(updates, state.mu, b1, 1)
        nu = update_moment(updates, state.nu, b2, 2)
        count = safe_increment(state.count)
        mu_hat = without_bias(mu, b1, count) if bias_correction_mu else mu
        nu_hat = without_bias(nu, b2, count) if bias_correction_nu else nu
        nu_max = tree.map(maximum, state.nu_max, nu_hat)
        updates = tree.map(lambda m, v: divide(m, add(moment_root(v, eps_root), eps)), mu_hat, nu_max)
        return updates, ScaleByAmsgradState(count, cast_tree(mu, mu_dtype), nu, nu_max)

    return GradientTransformation(init, update)


def scale_by_adamax(b1: Any = 0.9, b2: Any = 0.999, eps: Any = 1e-8) -> GradientTransformation:
    """Adam by the decaying maximum of gradients instead of the root of the second moment.

    Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, section 7.

    Parameters
    ----------
    b1, b2 : number or scalar array
    eps : number or scalar array
        Added to the size of each gradient.
    """

    def init(params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(zero_count(), zeros_like(params), zeros_like(params))

    def update(updates: Updates, state: ScaleByAdamState, params: Params | None = None) -> tuple[Updates, OptState]:
        count = safe_increment(state.count)
        mu = update_moment(updates, state.mu, b1, 1)
        nu = tree.map(lambda g, v: maximum(add(abs(g), eps), multiply(b2, v)), updates, state.nu)
        updates = tree.map(divide, without_bias(mu, b1, count), nu)
        return updates, ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init, update)


class ScaleByBeliefState(NamedTuple):
    """``count``: int32[]; ``mu``: the moving average of gradients, ``nu``: of their squared distance from it."""

    count: Value
    mu: Updates
    nu: Updates


def scale_by_belief(
    b1: Any = 0.9, b2: Any = 0.999, eps: Any = 1e-16, eps_root: Any = 1e-16, *, nesterov: bool = False
) -> GradientTransformation:
    """Adam by the squared distance of gradients from their average instead of their squares.

    Zhuang et al., "AdaBelief optimizer: adapting stepsizes by the belief in observed gradients", NeurIPS 2020.

    Parameters
    ----------
    b1, b2 : number or scalar array
    eps, eps_root : number or scalar array
    nesterov : bool
    """

    def init(params: Params) -> ScaleByBeliefState:
        return ScaleByBeliefState(zero_count(), zeros_like(params), zeros_like(params))

    def update(updates: Updates, state: ScaleByBeliefState, params: Params | None = None) -> tuple[Updates, OptState]:
        mu = update_moment(updates, state.mu, b1, 1)
        nu = update_moment(tree.map(subtract, updates, mu), state.nu, b2, 2)
        nu = tree.map(lambda v: add(v, eps_root), nu)
        count = safe_increment(state.count)
        mu_hat = first_moment(updates, mu, b1, count, nesterov)
        updates = tree.map(lambda m, v: divide(m, add(moment_root(v), eps)), mu_hat, without_bias(nu, b2, count))
        return updates, ScaleByBeliefState(count, mu, nu)

    return GradientTransformation(init, update)


def scale_by_radam(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    threshold: Any = 5.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam times what rectifies the variance of its first steps, which follow the momentum alone.

    As in optax the length of the average is a float32 number (float64 beside float64 parameters), a
    difference of large ones where ``b2`` is near 1: at 0.999 the first factors have two digits.

    Liu et al., "On the variance of the adaptive learning rate and beyond", ICLR 2020.

    Parameters
    ----------
    b1, b2 : number or scalar array
    eps, eps_root : number or scalar array
    threshold : number or scalar array
        The length of the average of squares from which on it is used.
    nesterov : bool
    """

    def init(params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(zero_count(), zeros_like(params), zeros_like(params))

    def update(updates: Updates, state: ScaleByAdamState, params: Params | None = None) -> tuple[Updates, OptState]:
        mu = update_moment(updates, state.mu, b1, 1)
        nu = update_moment(updates, state.nu, b2, 2)
        count = safe_increment(state.count)
        rectifications: dict[str, tuple[Value, Value]] = {}

        def rectified(m: Value, v: Value) -> Value:
            dtype = dtype_of(m)
            inner = "float64" if dtype == "float64" else "float32"
            if inner not in rectifications:
                rectifications[inner] = _rectification(b2, count, threshold, inner)
            is_long, factor = rectifications[inner]
            adaptive = divide(multiply(b.cast(factor, dtype), m), add(moment_root(v, eps_root), eps))
            return b.where(b.stretch(is_long, b.as_array(m).shape), adaptive, m)

        mu_hat = first_moment(updates, mu, b1, count, nesterov)
        updates = tree.map(rectified, mu_hat, without_bias(nu, b2, count))
        return updates, ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init, update)


def _rectification(b2: Any, count: Value, threshold: Any, dtype: str) -> tuple[Value, Value]:
    """Whether the average of squares is long enough, and then the factor; 1 where it is not."""
    power = b.power(b.cast(scalar_of(b2, dtype), dtype), b.cast(count, dtype))
    longest = 2.0 / (1.0 - b2) - 1.0 if is_scalar(b2) else subtract(divide(2.0, subtract(1.0, b2)), 1.0)
    taken = divide(multiply(multiply(2, b.cast(count, dtype)), power), subtract(1, power))
    length = b.cast(subtract(longest, taken), dtype)
    is_long = b.binary(_at_least, length, threshold)
    upper = multiply(multiply(subtract(length, 4.0), subtract(length, 2.0)), longest)
    lower = multiply(_times(_minus(longest, 4.0), _minus(longest, 2.0)), length)
    return is_long, b.unary(b.sqrt, b.where(is_long, b.cast(divide(upper, lower), dtype), 1.0))


def _at_least(x: Value, y: Value) -> Value:
    return b.compare(x, y, "ge")


def _minus(x: Any, y: float) -> Value:
    return x - y if is_scalar(x) else subtract(x, y)


def _times(x: Any, y: Any) -> Value:
    return x * y if is_scalar(x) else multiply(x, y)
