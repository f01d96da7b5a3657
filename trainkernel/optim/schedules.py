"""Schedules: functions from the step count to a number, such as a learning rate.

Formulas are optax's. A schedule takes an int, an array or a traced count and returns a float32
scalar, so it is computed inside of the training step from the count in the optimizer's state.
Values and bounds may be traced scalars; numbers of steps are ints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy import add, divide, multiply, power, subtract
from trainkernel.optim.base import Schedule, one_minus, scalar_of
from trainkernel.trace import as_value, at_user_line, is_scalar

Value = Any


def constant_schedule(value: Any) -> Schedule:
    """The same value at every step."""
    return lambda count: value


def polynomial_schedule(
    init_value: Any, end_value: Any, power: Any, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """``(init_value - end_value) * (1 - t)**power + end_value``, where ``t`` goes from 0 to 1.

    Parameters
    ----------
    init_value, end_value : number or scalar array
    power : number
    transition_steps : int
        How many steps the transition takes; the value is ``init_value`` always if not positive.
    transition_begin : int
        The step at which it begins.
    """
    if transition_steps <= 0:
        return constant_schedule(init_value)

    def schedule(count: Any) -> Value:
        since = b.minimum(b.maximum(_since(count, max(transition_begin, 0)), 0), transition_steps)
        left = subtract(1, divide(since, transition_steps))
        return add(multiply(_difference(init_value, end_value), _power(left, power)), end_value)

    return schedule


def linear_schedule(init_value: Any, end_value: Any, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """From ``init_value`` to ``end_value`` along a line; see ``polynomial_schedule``."""
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def piecewise_constant_schedule(init_value: Any, boundaries_and_scales: Mapping[int, float] | None = None) -> Schedule:
    """A value that is multiplied by a scale from each boundary on.

    Parameters
    ----------
    init_value : number or scalar array
    boundaries_and_scales : mapping from int to number

    Raises
    ------
    TraceError
        If a scale is negative.
    """
    scales = _checked_scales(boundaries_and_scales)

    def schedule(count: Any) -> Value:
        value, at = scalar_of(init_value, "float32"), _count(count)
        for boundary, scale in scales:
            value = _where(b.compare(at, boundary, "lt"), value, multiply(value, scale))
        return value

    return schedule


def exponential_decay(
    init_value: Any,
    transition_steps: int,
    decay_rate: Any,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: Any = None,
) -> Schedule:
    """``init_value * decay_rate**((count - transition_begin) / transition_steps)``.

    Parameters
    ----------
    init_value : number or scalar array
    transition_steps : int
        The value is ``init_value`` always if not positive.
    decay_rate : number
        The value is ``init_value`` always if 0.
    transition_begin : int
        Up to it the value is ``init_value``.
    staircase : bool
        The exponent is rounded down.
    end_value : number, scalar array or None
        Where the decay (or growth) stops.
    """
    if transition_steps <= 0 or (is_scalar(decay_rate) and decay_rate == 0):
        return constant_schedule(init_value)
    stop = b.maximum if is_scalar(decay_rate) and decay_rate < 1 else b.minimum

    def schedule(count: Any) -> Value:
        since = _since(count, max(transition_begin, 0))
        exponent = divide(since, transition_steps)
        exponent = b.floor(exponent) if staircase else exponent
        decayed = multiply(init_value, b.power(scalar_of(decay_rate, "float32"), exponent))
        value = _where(b.compare(since, 0, "le"), init_value, decayed)
        return value if end_value is None else b.binary(stop, value, end_value)

    return schedule


def cosine_decay_schedule(init_value: Any, decay_steps: int, alpha: Any = 0.0, exponent: Any = 1.0) -> Schedule:
    """Half a period of a cosine, from ``init_value`` to ``alpha * init_value``.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017.

    Parameters
    ----------
    init_value : number or scalar array
    decay_steps : int
    alpha : number or scalar array
    exponent : number
        The power to which the cosine is taken.

    Raises
    ------
    TraceError
        If ``decay_steps`` is not positive.
    """
    if decay_steps <= 0:
        raise TraceError(f"cosine_decay_schedule needs positive decay_steps, got {decay_steps}{at_user_line()}")

    def schedule(count: Any) -> Value:
        at = b.cast(b.minimum(_count(count), decay_steps), "float32")
        angle = divide(multiply(math.pi, at), decay_steps)
        cosine = multiply(0.5, add(1, b.cos(angle)))
        return multiply(init_value, add(multiply(one_minus(alpha), _power(cosine, exponent)), alpha))

    return schedule


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Schedules one after the other, each counting from its boundary.

    Parameters
    ----------
    schedules : sequence of callable
    boundaries : sequence of int
        The first step of each schedule but the first.
    """

    def schedule(count: Any) -> Value:
        at = _count(count)
        value = schedules[0](at)
        for boundary, following in zip(boundaries, schedules[1:], strict=False):
            value = _where(b.compare(at, boundary, "lt"), value, following(b.sub(at, boundary)))
        return value

    return schedule


# ---------------------------------------------------------------------------- compositions


def warmup_constant_schedule(init_value: Any, peak_value: Any, warmup_steps: int) -> Schedule:
    """A line from ``init_value`` to ``peak_value``, which stays."""
    return linear_schedule(init_value, peak_value, warmup_steps)


def warmup_cosine_decay_schedule(
    init_value: Any, peak_value: Any, warmup_steps: int, decay_steps: int, end_value: Any = 0.0, exponent: Any = 1.0
) -> Schedule:
    """A line up to ``peak_value`` in ``warmup_steps``, then a cosine down to ``end_value``.

    Parameters
    ----------
    init_value, peak_value, end_value : number or scalar array
    warmup_steps, decay_steps : int
        ``decay_steps`` counts all steps, those of the line too.
    exponent : number
    """
    no_peak = is_scalar(peak_value) and peak_value == 0
    alpha = 0.0 if no_peak else _quotient(end_value, peak_value)
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), decay], [warmup_steps])


def warmup_exponential_decay_schedule(
    init_value: Any,
    peak_value: Any,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: Any,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: Any = None,
) -> Schedule:
    """A line up to ``peak_value`` in ``warmup_steps``, then ``exponential_decay``."""
    decay = exponential_decay(peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value)
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), decay], [warmup_steps])


def sgdr_schedule(cosine_kwargs: Iterable[Mapping[str, Any]]) -> Schedule:
    """``warmup_cosine_decay_schedule`` for each of the keyword arguments, with a restart between them."""
    schedules, boundaries, step = [], [], 0
    for arguments in cosine_kwargs:
        schedules.append(warmup_cosine_decay_schedule(**arguments))
        step += arguments["decay_steps"]
        boundaries.append(step)
    return join_schedules(schedules, boundaries[:-1])


def piecewise_interpolate_schedule(
    interpolate_type: str, init_value: Any, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """Values at boundaries, each the one before times a scale, and between them a line or half a cosine.

    Parameters
    ----------
    interpolate_type : str
        ``"linear"`` or ``"cosine"``.
    init_value : number or scalar array
    boundaries_and_scales : mapping from int to number

    Raises
    ------
    TraceError
        For another type, or if a scale is negative.
    """
    between = {"linear": _line, "cosine": _half_cosine}.get(interpolate_type)
    if between is None:
        raise TraceError(f"interpolate_type is 'linear' or 'cosine', got {interpolate_type!r}{at_user_line()}")
    scales = _checked_scales(boundaries_and_scales)

    def schedule(count: Any) -> Value:
        at, start, value = _count(count), 0, scalar_of(init_value, "float32")
        result = value
        for boundary, scale in scales:
            following = multiply(value, scale)
            share = divide(b.sub(at, start), max(boundary - start, 1))
            result = _where(b.compare(at, start, "lt"), result, between(value, following, share))
            start, value = boundary, following
        return _where(b.compare(at, start, "lt"), result, value)

    return schedule


def _check_onecycle(transition_steps: int) -> None:
    if transition_steps <= 0:
        raise TraceError(f"a onecycle schedule needs positive transition_steps, got {transition_steps}{at_user_line()}")


def linear_onecycle_schedule(
    transition_steps: int,
    peak_value: Any,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Up a line to ``peak_value``, down another, and to zero (Smith and Topin, "Super-convergence", 2018).

    Raises
    ------
    TraceError
        If ``transition_steps`` is not positive.
    """
    _check_onecycle(transition_steps)
    scales = {
        int(pct_start * transition_steps): div_factor,
        int(pct_final * transition_steps): 1.0 / div_factor,
        transition_steps: 1.0 / final_div_factor,
    }
    return piecewise_interpolate_schedule("linear", _quotient(peak_value, div_factor), scales)


def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: Any,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Up to ``peak_value`` and down to zero, by half a cosine each.

    Raises
    ------
    TraceError
        If ``transition_steps`` is not positive.
    """
    _check_onecycle(transition_steps)
    scales = {
        int(pct_start * transition_steps): div_factor,
        int(transition_steps): 1.0 / (div_factor * final_div_factor),
    }
    return piecewise_interpolate_schedule("cosine", _quotient(peak_value, div_factor), scales)


# ---------------------------------------------------------------------------- values


def _count(count: Any) -> Value:
    """A step count as int32, of what shape it may be."""
    value = as_value(count)
    return b.full((), value, "int32") if is_scalar(value) else b.cast(value, "int32")


def _since(count: Any, begin: int) -> Value:
    return b.sub(_count(count), begin)


def _where(condition: Value, x: Value, y: Value) -> Value:
    """``where`` of float32 scalars or Python numbers."""
    x, y = (b.stretch(scalar_of(value, "float32"), condition.shape) for value in (x, y))
    return b.where(condition, x, y)


def _difference(x: Any, y: Any) -> Value:
    return x - y if is_scalar(x) and is_scalar(y) else subtract(x, y)


def _quotient(x: Any, y: Any) -> Value:
    return x / y if is_scalar(x) and is_scalar(y) else divide(x, y)


def _power(x: Value, exponent: Any) -> Value:
    return x if is_scalar(exponent) and exponent == 1 else power(x, exponent)


def _line(start: Value, end: Value, share: Value) -> Value:
    return add(multiply(subtract(end, start), share), start)


def _half_cosine(start: Value, end: Value, share: Value) -> Value:
    swing = add(b.cos(multiply(math.pi, share)), 1)
    return add(end, multiply(divide(subtract(start, end), 2.0), swing))


def _checked_scales(boundaries_and_scales: Mapping[int, float] | None) -> list[tuple[int, float]]:
    scales = sorted((boundaries_and_scales or {}).items())
    for boundary, scale in scales:
        if isinstance(scale, (int, float, np.generic)) and scale < 0:
            raise TraceError(f"the scale {scale} at step {boundary} is negative{at_user_line()}")
    return scales
