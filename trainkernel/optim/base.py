"""What all optimizers share: the pair of functions, their composition, and updates of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.errors import TraceError
from trainkernel.numpy import add, equal, multiply, remainder, subtract, where
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any
Params = Any
Updates = Any
OptState = Any
Schedule = Callable[[Any], Any]


class GradientTransformation(NamedTuple):
    """A pair of functions that turns gradients into updates.

    Attributes
    ----------
    init : callable (params) -> state
    update : callable (updates, state, params=None) -> (updates, state)
        ``updates`` is a tree like the parameters: gradients, or what another transformation made
        of them. The state keeps its structure, shapes and dtypes.
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]


class EmptyState(NamedTuple):
    """The state of what has none."""


def init_empty_state(params: Params) -> EmptyState:
    """``init`` of what has no state."""
    return EmptyState()


def stateless(f: Callable[[Updates, Params | None], Updates]) -> GradientTransformation:
    """A transformation by a function of updates and parameters."""

    def update(updates: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        return f(updates, params), state

    return GradientTransformation(init_empty_state, update)


def stateless_with_tree_map(f: Callable[[Any, Any], Any]) -> GradientTransformation:
    """A transformation by a function of the update and the parameter, array by array."""
    return stateless(lambda updates, params: tree.map(f, updates, needed(params, "stateless_with_tree_map")))


def identity() -> GradientTransformation:
    """The transformation that changes nothing."""
    return stateless(lambda updates, params: updates)


def set_to_zero() -> GradientTransformation:
    """The transformation whose updates are zero: it freezes parameters."""
    return stateless(lambda updates, params: zeros_like(updates))


def chain(*args: GradientTransformation) -> GradientTransformation:
    """Transformations one after the other; the state is the tuple of theirs.

    Raises
    ------
    TraceError
        If an argument is no transformation, such as ``sgd`` that is not called; from ``update``, if the
        state is that of another chain, or the updates, the state and the parameters do not fit.
    """
    for position, transformation in enumerate(args):
        if not callable(getattr(transformation, "init", None)) or not callable(getattr(transformation, "update", None)):
            name = getattr(transformation, "__name__", None)
            hint = f"; call it: {name}(...)" if callable(transformation) and name else ""
            raise TraceError(
                f"argument {position} of chain is {name or repr(transformation)}, a {type(transformation).__name__}, "
                f"and no GradientTransformation{hint}{at_user_line()}"
            )

    def init(params: Params) -> OptState:
        return tuple(transformation.init(params) for transformation in args)

    def update(updates: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        if len(state) != len(args):
            raise TraceError(
                f"a chain of {len(args)} transformations got {len(state)} states: make the state with its own "
                f"init(params){at_user_line()}"
            )
        states = []
        for position, (transformation, old) in enumerate(zip(args, state, strict=True)):
            try:
                updates, new = transformation.update(updates, old, params)
            except tree.TreeMismatchError as error:
                raise _explained(error, position, updates, params) from error
            states.append(new)
        return updates, tuple(states)

    return GradientTransformation(init, update)


def _explained(error: tree.TreeMismatchError, position: int, updates: Updates, params: Params | None) -> TraceError:
    """The error of a transformation of a chain, by which of its arguments does not fit."""
    if params is not None:
        where = tree.difference(tree.structure(params), tree.structure(updates))
        if where:
            return TraceError(f"the updates have not the structure of the parameters: {where}{at_user_line()}")
    return TraceError(
        f"the updates do not fit the state of transformation {position} of the chain; make the state with "
        f"init(params) of the same tree: {error}"
    )


# ---------------------------------------------------------------------------- parameters


def apply_updates(params: Params, updates: Updates) -> Params:
    """``params + updates``, in the dtypes of the parameters.

    Raises
    ------
    TraceError
        If the updates are no tree like the parameters.
    """
    where = tree.difference(tree.structure(params), tree.structure(updates))
    if where:
        raise tree.TreeMismatchError(f"the updates have not the structure of the parameters: {where}{at_user_line()}")
    return tree.map(lambda p, u: b.cast(add(p, u), dtype_of(p)), params, updates)


def incremental_update(new_tensors: Params, old_tensors: Params, step_size: Any) -> Params:
    """``step_size * new + (1 - step_size) * old``: a moving average of parameters (Polyak averaging).

    Parameters
    ----------
    new_tensors, old_tensors : trees of arrays
    step_size : number or scalar array
    """
    return tree.map(
        lambda new, old: add(multiply(step_size, new), multiply(one_minus(step_size), old)), new_tensors, old_tensors
    )


def periodic_update(new_tensors: Params, old_tensors: Params, steps: Any, update_period: int) -> Params:
    """``new`` where ``steps`` is a multiple of ``update_period``, else ``old``: a target network's hard update.

    Parameters
    ----------
    new_tensors, old_tensors : trees of arrays
    steps : integer scalar
    update_period : int
    """
    due = equal(remainder(steps, update_period), 0)
    return tree.map(lambda new, old: where(due, new, old), new_tensors, old_tensors)


# ---------------------------------------------------------------------------- values


def needed(params: Params | None, what: str) -> Params:
    """The parameters, where a transformation needs them.

    Raises
    ------
    TraceError
        If there are none.
    """
    if params is None:
        raise TraceError(f"{what} needs the parameters: call update(updates, state, params){at_user_line()}")
    return params


def full_like(params: Params, value: float, dtype: Any = None) -> Any:
    """A tree like the parameters filled with a number, of their dtypes or of one."""

    def fill(leaf: Any) -> Value:
        aval = aval_of(as_value(leaf))
        return b.full(aval.shape, value, aval.dtype if dtype is None else dtype)

    return tree.map(fill, params)


def zeros_like(params: Params, dtype: Any = None) -> Any:
    """Zeros like the parameters, of their dtypes or of one."""
    return full_like(params, 0, dtype)


def cast_tree(values: Any, dtype: Any) -> Any:
    """A tree in another dtype; None leaves it as it is."""
    return values if dtype is None else tree.map(lambda leaf: b.cast(leaf, dtype), values)


def zero_count() -> Value:
    """A step count at 0: int32[]."""
    return b.full((), 0, "int32")


def safe_increment(count: Value) -> Value:
    """``count + 1``; the largest int32 stays.

    Parameters
    ----------
    count : int or integer array
    """
    count = b.full((), count, "int32") if is_scalar(count) else as_value(count)
    largest = 2**31 - 1
    return b.add(b.minimum(count, largest - 1), 1)


def one_minus(value: Any) -> Value:
    """``1 - value``, of a Python number as a Python number."""
    return 1 - value if is_scalar(value) else subtract(1, value)


def dtype_of(x: Any) -> str:
    """The dtype of an array or number, by its name in the dtype table."""
    return aval_of(as_value(x)).dtype


def scalar_of(value: Any, dtype: str) -> Value:
    """A Python number or a scalar array in a dtype."""
    value = as_value(value)
    return b.full((), value, dtype) if is_scalar(value) else b.cast(value, dtype)
