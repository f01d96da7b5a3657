"""Optimizers around an optimizer: steps left out, gathered or averaged; NaN taken out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.errors import TraceError
from trainkernel.numpy import (
    add,
    any,
    divide,
    equal,
    greater,
    isfinite,
    isnan,
    less,
    logical_and,
    logical_not,
    logical_or,
    multiply,
    remainder,
    subtract,
    sum,
    where,
)
from trainkernel.numpy import all as all_of
from trainkernel.optim.base import (
    GradientTransformation,
    OptState,
    Params,
    Updates,
    dtype_of,
    needed,
    one_minus,
    safe_increment,
    zero_count,
    zeros_like,
)
from trainkernel.optim.clipping import squared_global_norm
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any

# ---------------------------------------------------------------------------- NaN and infinities


class ZeroNansState(NamedTuple):
    """``found_nan``: for each array of the updates whether it had a NaN, bool[]."""

    found_nan: Any


def zero_nans() -> GradientTransformation:
    """Updates with 0 for each NaN."""

    def init(params: Params) -> ZeroNansState:
        return ZeroNansState(tree.map(lambda leaf: b.full((), False, "bool"), params))

    def update(updates: Updates, state: ZeroNansState, params: Params | None = None) -> tuple[Updates, OptState]:
        found = tree.map(lambda u: any(isnan(u)), updates)
        return tree.map(lambda u: where(isnan(u), 0, u), updates), ZeroNansState(found)

    return GradientTransformation(init, update)


class ApplyIfFiniteState(NamedTuple):
    """What ``apply_if_finite`` keeps.

    Attributes
    ----------
    notfinite_count : int32[]
        Steps in a row whose gradients were not finite.
    last_finite : bool[]
    total_notfinite : int32[]
    inner_state : state of the optimizer
    """

    notfinite_count: Value
    last_finite: Value
    total_notfinite: Value
    inner_state: Any


def apply_if_finite(inner: GradientTransformation, max_consecutive_errors: int) -> GradientTransformation:
    """An optimizer that leaves out steps whose gradients have a NaN or an infinity.

    Parameters
    ----------
    inner : GradientTransformation
    max_consecutive_errors : int
        After so many in a row the next one is taken all the same.
    """

    def init(params: Params) -> ApplyIfFiniteState:
        return ApplyIfFiniteState(zero_count(), b.full((), True, "bool"), zero_count(), inner.init(params))

    def update(updates: Updates, state: ApplyIfFiniteState, params: Params | None = None) -> tuple[Updates, OptState]:
        is_finite = _all_finite(updates)
        errors = where(is_finite, 0, safe_increment(state.notfinite_count))
        taken = logical_or(is_finite, greater(errors, max_consecutive_errors))
        new, inner_state = inner.update(updates, state.inner_state, params)
        total = where(is_finite, state.total_notfinite, safe_increment(state.total_notfinite))
        kept = ApplyIfFiniteState(errors, is_finite, total, _either(taken, inner_state, state.inner_state))
        return _or_zero(taken, new), kept

    return GradientTransformation(init, update)


def _all_finite(updates: Updates) -> Value:
    result: Value = b.full((), True, "bool")
    for leaf in tree.leaves(updates):
        result = logical_and(result, all_of(isfinite(leaf)))
    return result


def _either(flag: Value, new: Any, old: Any) -> Any:
    """The leaves of ``new`` where the flag holds, else of ``old``, in the dtypes of ``old``."""
    return tree.map(lambda x, y: b.cast(where(flag, x, y), dtype_of(y)), new, old)


def _or_zero(flag: Value, values: Any) -> Any:
    return tree.map(lambda x: where(flag, x, 0), values)


# ---------------------------------------------------------------------------- gradient accumulation


def skip_not_finite(updates: Updates, gradient_step: Value, params: Params | None) -> tuple[Value, Any]:
    """For ``MultiSteps``: leave out gradients with a NaN or an infinity."""
    found: Value = zero_count()
    for leaf in tree.leaves(updates):
        found = add(found, sum(logical_not(isfinite(leaf)), dtype="int32"))
    should_skip = greater(found, 0)
    return should_skip, {"should_skip": should_skip, "num_not_finite": found}


def skip_large_updates(
    updates: Updates, gradient_step: Value, params: Params | None, max_squared_norm: Any
) -> tuple[Value, Any]:
    """For ``MultiSteps``: leave out gradients whose squared global norm is not below ``max_squared_norm``."""
    norm = squared_global_norm(updates)
    should_skip = logical_not(less(norm, max_squared_norm))
    return should_skip, {"should_skip": should_skip, "norm_squared": norm}


class MultiStepsState(NamedTuple):
    """What ``MultiSteps`` keeps.

    Attributes
    ----------
    mini_step : int32[]
        Gradients gathered since the last step of the optimizer.
    gradient_step : int32[]
        Steps of the optimizer.
    inner_opt_state : state of the optimizer
    acc_grads : tree like the parameters
    skip_state : tree
        What ``should_skip_update_fn`` returned beside its flag.
    """

    mini_step: Value
    gradient_step: Value
    inner_opt_state: Any
    acc_grads: Any
    skip_state: Any = ()


class MultiSteps:
    """An optimizer that gathers the gradients of some updates and makes one step of them.

    The updates between are zeros.

    Parameters
    ----------
    opt : GradientTransformation
    every_k_schedule : int, or callable (gradient_step) -> integer
        How many gradients make a step.
    use_grad_mean : bool
        Take the mean of the gradients, by Welford's algorithm; False takes their sum.
    should_skip_update_fn : callable (updates, gradient_step, params) -> (bool[], tree), optional
        Which gradients are left out as if they had not been: ``skip_not_finite``, ``skip_large_updates``.
    accumulator_dtype : dtype
    """

    def __init__(
        self,
        opt: GradientTransformation,
        every_k_schedule: int | Callable[[Value], Value],
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable[[Updates, Value, Params | None], tuple[Value, Any]] | None = None,
        accumulator_dtype: Any = "float32",
    ) -> None:
        self._opt = opt
        self._every = every_k_schedule
        self._use_grad_mean = use_grad_mean
        self._should_skip = should_skip_update_fn
        self._dtype = b.dtype_name(accumulator_dtype)

    @property
    def inner_opt(self) -> GradientTransformation:
        """The optimizer that makes the steps."""
        return self._opt

    def init(self, params: Params) -> MultiStepsState:
        """The state before the first gradient."""
        skip_state: Any = ()
        if self._should_skip is not None:
            _, skip_state = self._should_skip(zeros_like(params), zero_count(), params)
        gathered = zeros_like(params, self._dtype)
        return MultiStepsState(zero_count(), zero_count(), self._opt.init(params), gathered, skip_state)

    def update(
        self, updates: Updates, state: MultiStepsState, params: Params | None = None
    ) -> tuple[Updates, MultiStepsState]:
        """Gather gradients; the optimizer's updates where they are enough, else zeros."""
        every = self._every(state.gradient_step) if callable(self._every) else self._every
        new, kept = self._gathered(updates, state, params, every)
        if self._should_skip is None:
            return new, kept
        should_skip, skip_state = self._should_skip(updates, state.gradient_step, params)
        flag = aval_of(as_value(should_skip))
        if (flag.dtype, tuple(flag.shape)) != ("bool", ()):
            raise TraceError(
                f"should_skip_update_fn must return a bool[] first, got {flag.dtype}{list(flag.shape)}{at_user_line()}"
            )
        is_taken = logical_not(should_skip)
        kept = _either(is_taken, kept, state._replace(skip_state=()))
        return _or_zero(is_taken, new), kept._replace(skip_state=skip_state)

    def _gathered(
        self, updates: Updates, state: MultiStepsState, params: Params | None, every: Any
    ) -> tuple[Updates, MultiStepsState]:
        def gather(g: Value, total: Value) -> Value:
            if not self._use_grad_mean:
                return add(g, total)
            return add(total, divide(subtract(g, total), add(state.mini_step, 1)))

        gathered = tree.map(gather, updates, state.acc_grads)
        gradients = tree.map(lambda total, g: b.cast(total, dtype_of(g)), gathered, updates)
        new, inner = self._opt.update(gradients, state.inner_opt_state, params)
        is_step = equal(state.mini_step, every - 1 if is_scalar(every) else subtract(every, 1))
        kept = MultiStepsState(
            b.cast(remainder(safe_increment(state.mini_step), every), "int32"),
            where(is_step, safe_increment(state.gradient_step), state.gradient_step),
            _either(is_step, inner, state.inner_opt_state),
            tree.map(lambda total: b.cast(where(is_step, 0, total), self._dtype), gathered),
        )
        return _or_zero(is_step, new), kept

    def has_updated(self, state: MultiStepsState) -> Value:
        """Whether the last update was a step of the optimizer: bool[]."""
        return logical_and(equal(state.mini_step, 0), greater(state.gradient_step, 0))

    def gradient_transformation(self) -> GradientTransformation:
        """The pair of functions."""
        return GradientTransformation(self.init, self.update)


# ---------------------------------------------------------------------------- lookahead


class LookaheadState(NamedTuple):
    """``fast_state``: of the fast optimizer; ``steps_since_sync``: int32[]."""

    fast_state: OptState
    steps_since_sync: Value


class LookaheadParams(NamedTuple):
    """``fast``: the parameters of gradients; ``slow``: those of inference."""

    fast: Params
    slow: Params

    @classmethod
    def init_synced(cls, params: Params) -> LookaheadParams:
        """Both from the same parameters."""
        return cls(slow=params, fast=params)


def lookahead(
    fast_optimizer: GradientTransformation, sync_period: int, slow_step_size: Any, reset_state: bool = False
) -> GradientTransformation:
    """Slow parameters that follow those of a fast optimizer, which starts again from them after each period.

    Zhang, Lucas, Hinton and Ba, "Lookahead optimizer: k steps forward, 1 step back", NeurIPS 2019.

    Parameters
    ----------
    fast_optimizer : GradientTransformation
        Its parameters and gradients are those of ``LookaheadParams.fast``.
    sync_period : int
    slow_step_size : number or scalar array
    reset_state : bool
        Start the fast optimizer's state again, too.

    Raises
    ------
    TraceError
        If the period is below 1.
    """
    if sync_period < 1:
        raise TraceError(f"lookahead: sync_period must be at least 1, got {sync_period}{at_user_line()}")

    def init(params: Any) -> LookaheadState:
        return LookaheadState(fast_optimizer.init(getattr(params, "fast", params)), zero_count())

    def update(
        updates: Updates, state: LookaheadState, params: LookaheadParams | None = None
    ) -> tuple[Updates, OptState]:
        pair = needed(params, "lookahead")
        new, fast_state = fast_optimizer.update(updates, state.fast_state, pair.fast)
        is_due = equal(state.steps_since_sync, sync_period - 1)
        ahead = tree.map(lambda fast, u, slow: subtract(add(fast, u), slow), pair.fast, new, pair.slow)
        slow = _or_zero(is_due, tree.map(lambda x: multiply(slow_step_size, x), ahead))
        back = _or_zero(is_due, tree.map(lambda x: multiply(one_minus(slow_step_size), x), ahead))
        if reset_state:
            fast_state = _either(is_due, fast_optimizer.init(pair.fast), fast_state)
        steps = b.cast(remainder(add(state.steps_since_sync, 1), sync_period), "int32")
        return LookaheadParams(tree.map(subtract, new, back), slow), LookaheadState(fast_state, steps)

    return GradientTransformation(init, update)
