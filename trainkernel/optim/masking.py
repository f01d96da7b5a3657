"""Transformations for some of the parameters, and hyperparameters that live in the state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.errors import TraceError
from trainkernel.optim.base import (
    GradientTransformation,
    OptState,
    Params,
    Schedule,
    Updates,
    safe_increment,
    zero_count,
)
from trainkernel.promotion import is_float
from trainkernel.trace import Array, as_value, at_user_line, aval_of, is_scalar

Value = Any


class MaskedNode(NamedTuple):
    """What stands for a parameter that is masked out: a node without leaves."""


class MaskedState(NamedTuple):
    """``inner_state``: of the transformation, which sees only what is not masked out."""

    inner_state: Any


def masked(inner: GradientTransformation, mask: Any) -> GradientTransformation:
    """A transformation of some of the updates; the others pass unchanged.

    Parameters
    ----------
    inner : GradientTransformation
    mask : tree of bool, or callable (params) -> tree of bool
        A tree like the parameters or a prefix of it, True for what is transformed. It is not traced.
    """

    def mask_of(values: Any) -> Any:
        return mask(values) if _is_callable_tree(mask) else mask

    def keep(flags: Any, values: Any) -> Any:
        return tree.map_prefix(lambda flag, value: value if flag else MaskedNode(), flags, values)

    def init(params: Params) -> MaskedState:
        return MaskedState(inner.init(keep(mask_of(params), params)))

    def update(updates: Updates, state: MaskedState, params: Params | None = None) -> tuple[Updates, OptState]:
        flags = mask_of(updates)
        kept = None if params is None else keep(flags, params)
        new, inner_state = inner.update(keep(flags, updates), state.inner_state, kept)
        updates = tree.map_prefix(lambda flag, u, old: u if flag else old, flags, new, updates)
        return updates, MaskedState(inner_state)

    return GradientTransformation(init, update)


def _is_callable_tree(mask: Any) -> bool:
    """Whether the mask is a function; a module of parameters that can be called is none."""
    found = tree.leaves(mask)
    return bool(found) and all(callable(leaf) for leaf in found)


# ---------------------------------------------------------------------------- groups


class PartitionState(NamedTuple):
    """``inner_states``: a MaskedState for each group."""

    inner_states: Mapping[Hashable, OptState]


def partition(transforms: Mapping[Hashable, GradientTransformation], param_labels: Any) -> GradientTransformation:
    """Another transformation for each group of parameters.

    Parameters
    ----------
    transforms : mapping from label to GradientTransformation
    param_labels : tree of labels, or callable (params) -> tree of labels
        A tree like the parameters or a prefix of it.

    Raises
    ------
    TraceError
        From ``init``, if a label has no transformation.
    """

    def labels_of(values: Any) -> Any:
        return param_labels(values) if callable(param_labels) else param_labels

    def group(labels: Any, wanted: Hashable) -> GradientTransformation:
        return masked(transforms[wanted], tree.map(lambda label: label == wanted, labels))

    def init(params: Params) -> PartitionState:
        labels = labels_of(params)
        unknown = set(tree.leaves(labels)) - set(transforms)
        if unknown:
            raise TraceError(
                f"no transformation for the labels {sorted(unknown, key=repr)}; "
                f"there are some for {sorted(transforms, key=repr)}{at_user_line()}"
            )
        return PartitionState({label: group(labels, label).init(params) for label in transforms})

    def update(updates: Updates, state: PartitionState, params: Params | None = None) -> tuple[Updates, OptState]:
        labels, states = labels_of(updates), {}
        for label in transforms:
            updates, states[label] = group(labels, label).update(updates, state.inner_states[label], params)
        return updates, PartitionState(states)

    return GradientTransformation(init, update)


multi_transform = partition


# ---------------------------------------------------------------------------- hyperparameters in the state


class WrappedScheduleState(NamedTuple):
    """``count``: int32[], the steps done."""

    count: Value


class InjectStatefulHyperparamsState(NamedTuple):
    """What ``inject_hyperparams`` keeps.

    Attributes
    ----------
    count : int32[]
    hyperparams : dict of str to scalar array
        May be replaced between steps.
    hyperparams_states : dict of str to WrappedScheduleState
        For those that follow a schedule.
    inner_state : state of the optimizer
    """

    count: Value
    hyperparams: dict[str, Value]
    hyperparams_states: dict[str, WrappedScheduleState]
    inner_state: OptState


def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: Any = None,
) -> Callable[..., GradientTransformation]:
    """An optimizer whose numeric hyperparameters are arrays in its state.

    ``inject_hyperparams(adam)(learning_rate=1e-3)``: then ``state.hyperparams["learning_rate"]`` is
    what a step uses, and may be changed without compiling the step again. Functions are schedules.

    Parameters
    ----------
    inner_factory : callable
        Such as ``adam``.
    static_args : str or iterable of str
        Arguments that stay as they are: numbers that are no arrays, and functions that are no
        schedules, such as a mask.
    hyperparam_dtype : dtype or None
        Of floating hyperparameters; by default the widest floating one of the parameters.

    Raises
    ------
    TraceError
        If the factory has no such argument.
    """
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(inner_factory)
    if not static.issubset(signature.parameters):
        unknown = sorted(static.difference(signature.parameters))
        raise TraceError(f"{unknown} are no arguments of {inner_factory.__name__}{signature}{at_user_line()}")

    @functools.wraps(inner_factory)
    def wrapped(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _injected(inner_factory, bound.arguments, static, hyperparam_dtype)

    return wrapped


def _injected(
    factory: Callable[..., GradientTransformation], arguments: Mapping[str, Any], static: set[str], wanted: Any
) -> GradientTransformation:
    schedules, numbers, others = _sorted_arguments(arguments, static)

    def init(params: Params) -> InjectStatefulHyperparamsState:
        dtype = _widest_float(params) if wanted is None else b.dtype_name(wanted)
        states = {name: WrappedScheduleState(zero_count()) for name in schedules}
        given = {name: _as_array(value, dtype) for name, value in numbers.items()}
        given.update({name: _as_array(follow(states[name].count), dtype) for name, follow in schedules.items()})
        return InjectStatefulHyperparamsState(zero_count(), given, states, factory(**others, **given).init(params))

    def update(
        updates: Updates, state: InjectStatefulHyperparamsState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        dtype = _widest_float(updates if params is None else params) if wanted is None else b.dtype_name(wanted)
        given = {name: _as_array(value, dtype) for name, value in state.hyperparams.items()}
        old = state.hyperparams_states
        given.update({name: _as_array(follow(old[name].count), dtype) for name, follow in schedules.items()})
        states = {name: WrappedScheduleState(safe_increment(old[name].count)) for name in schedules}
        updates, inner = factory(**others, **given).update(updates, state.inner_state, params)
        return updates, InjectStatefulHyperparamsState(safe_increment(state.count), given, states, inner)

    return GradientTransformation(init, update)


def _sorted_arguments(
    arguments: Mapping[str, Any], static: set[str]
) -> tuple[dict[str, Schedule], dict[str, Any], dict[str, Any]]:
    """(schedules, numbers, others) among the arguments of an optimizer."""
    schedules: dict[str, Schedule] = {}
    numbers: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in static or isinstance(value, bool):
            others[name] = value
        elif callable(value) and not isinstance(value, type):
            schedules[name] = value
        elif isinstance(value, (int, float, np.generic, np.ndarray, Array)):
            numbers[name] = value
        else:
            others[name] = value
    return schedules, numbers, others


def _as_array(value: Any, dtype: str) -> Value:
    """A Python float in the dtype of hyperparameters, a Python int as int32; arrays stay."""
    value = as_value(value)
    if not is_scalar(value):
        return value
    return b.full((), value, dtype if isinstance(value, float) else "int32")


def _widest_float(params: Params) -> str:
    found = {aval_of(as_value(leaf)).dtype for leaf in tree.leaves(params)}
    floats = {dtype for dtype in found if is_float(dtype)}
    if "float64" in floats:
        return "float64"
    return floats.pop() if len(floats) == 1 else "float32"
