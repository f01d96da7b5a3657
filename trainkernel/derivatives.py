"""``grad``, ``value_and_grad``, ``vjp``, ``jvp``, ``stop_gradient``, ``checkpoint``, ``custom_vjp``.

Names and meanings are JAX's. Arguments and results are trees of arrays.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from trainkernel import primitives as b
from trainkernel import structure, tree
from trainkernel.autodiff import backward, push_forward
from trainkernel.errors import TraceError
from trainkernel.promotion import is_float
from trainkernel.trace import (
    Array,
    alias,
    as_value,
    at_user_line,
    aval_of,
    close,
    is_scalar,
    is_tracing,
    new_trace,
    parameter,
)


class _Traced:
    """A call of a function on aliases of some of its arguments."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int], has_aux: bool
    ) -> None:
        with new_trace("grad") as trace:
            values = list(args)
            self.parameters: list[Array] = []
            self.treedefs = []
            for position in argnums:
                leaves, treedef = tree.flatten(args[position])
                aliases = [_parameter(leaf, trace, position) for leaf in leaves]
                self.parameters += aliases
                self.treedefs.append(treedef)
                values[position] = tree.unflatten(treedef, aliases)
            result = function(*values)
            self.aux: Any = None
            if has_aux:
                if not isinstance(result, tuple) or len(result) != 2:
                    raise TraceError(
                        f"with has_aux=True the function must return (value, aux), got {result!r}{at_user_line()}"
                    )
                result, self.aux = result
            self.outputs, self.structure = tree.flatten(result)
            self.outputs = [as_value(out) for out in self.outputs]

    def pull_back(self, cotangents: Sequence[Any]) -> list[Any]:
        """The gradients, one tree for each argument."""
        results = backward(self.outputs, cotangents, self.parameters)
        leaves = [
            b.full(parameter.shape, 0, parameter.aval.dtype)
            if ct is None
            else b.cast(b.stretch(ct, parameter.shape), parameter.aval.dtype)
            for ct, parameter in zip(results, self.parameters, strict=True)
        ]
        trees, first = [], 0
        for treedef in self.treedefs:
            trees.append(tree.unflatten(treedef, leaves[first : first + treedef.num_leaves]))
            first += treedef.num_leaves
        return trees


def _parameter(leaf: Any, trace: Any, position: int) -> Array:
    value = as_value(leaf)
    aval = aval_of(value)
    if not is_float(aval.dtype):
        raise TraceError(
            f"grad needs floating arguments, and argument {position} holds {aval.dtype}; "
            f"leave it out of argnums or cast it{at_user_line()}"
        )
    return alias(b.cast(value, aval.dtype) if is_scalar(value) else value, trace)


def positions_of(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The arguments that ``argnums`` names, counted from the front."""
    try:
        positions = tuple(operator.index(each) for each in ((argnums,) if isinstance(argnums, int) else argnums))
    except TypeError:
        raise TraceError(f"argnums needs ints, got {argnums!r}{at_user_line()}") from None
    for position in positions:
        if not -count <= position < count:
            raise TraceError(f"argnums names argument {position}, and {count} were given{at_user_line()}")
    return tuple(position % count for position in positions)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns the value of ``fun`` and its gradient.

    Parameters
    ----------
    fun : callable
        Returns a floating scalar, or with ``has_aux`` a pair of one and anything else.
    argnums : int or sequence of int
        Positional arguments to differentiate, trees of floating arrays.
    has_aux : bool

    Returns
    -------
    callable
        ``(value, gradient)``, or ``((value, aux), gradient)``; the gradient has the structure of
        the argument, and is a tuple where ``argnums`` is a sequence.

    Raises
    ------
    TraceError
        If the result is no floating scalar or an argument is not floating.
    """

    @functools.wraps(fun)
    def value_and_grad_of(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            traced = _Traced(functools.partial(fun, **kwargs), args, positions_of(argnums, len(args)), has_aux)
            value = _scalar_result(traced)
            gradients = traced.pull_back([b.full((), 1, aval_of(value).dtype)])
            gradient = gradients[0] if isinstance(argnums, int) else tuple(gradients)
            return ((value, traced.aux) if has_aux else value), gradient

        return structure.settle(run)

    return value_and_grad_of


def _scalar_result(traced: _Traced) -> Any:
    if len(traced.outputs) != 1 or aval_of(traced.outputs[0]).shape != ():
        shapes = ", ".join(str(aval_of(out)) for out in traced.outputs) or "none"
        raise TraceError(f"grad needs a function that returns one scalar, got {shapes}{at_user_line()}")
    value = traced.outputs[0]
    if not is_float(aval_of(value).dtype):
        raise TraceError(f"grad needs a floating result, got {aval_of(value)}{at_user_line()}")
    return b.cast(value, aval_of(value).dtype) if is_scalar(value) else value


def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient of a scalar function; ``value_and_grad`` without the value.

    With ``has_aux`` it returns ``(gradient, aux)``.
    """
    both = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def grad_of(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return grad_of


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of ``fun`` and the function that pulls cotangents of it back to its arguments.

    Returns
    -------
    value, pull_back : tree, callable
        ``pull_back(cotangents)`` gives a tuple with one tree for each of ``primals``; with
        ``has_aux`` a third result follows.
    """
    traced = _Traced(fun, primals, range(len(primals)), has_aux)
    inside = is_tracing()

    def pull_back(cotangents: Any) -> tuple[Any, ...]:
        given, treedef = tree.flatten(cotangents)
        if treedef != traced.structure:
            raise TraceError(
                f"cotangents have the structure {treedef}, the result has {traced.structure}{at_user_line()}"
            )
        values = [_cotangent(c, out) for c, out in zip(given, traced.outputs, strict=True)]
        return tuple(structure.settle(lambda: traced.pull_back(values)))

    value = tree.unflatten(traced.structure, traced.outputs)
    if not inside:
        value, traced_aux = structure.settle(lambda: (value, traced.aux))
    else:
        traced_aux = traced.aux
    return (value, pull_back, traced_aux) if has_aux else (value, pull_back)


def _cotangent(cotangent: Any, out: Any) -> Any:
    aval, given = aval_of(out), as_value(cotangent)
    if not is_scalar(given) and aval_of(given).shape != aval.shape:
        raise TraceError(f"a cotangent has shape {list(given.shape)}, the result {list(aval.shape)}{at_user_line()}")
    if not is_float(aval.dtype):
        return None
    return b.full(aval.shape, given, aval.dtype) if is_scalar(given) else b.cast(given, aval.dtype)


def jvp(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The value of ``fun`` at ``primals`` and its derivative along ``tangents``, trees of the same structure."""

    for what, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise TraceError(f"the {what} of jvp are a tuple or a list, got {type(given).__name__}{at_user_line()}")
    leaves, treedef = tree.flatten(tuple(tangents))
    wanted = tree.flatten(tuple(primals))[1]
    if treedef != wanted:
        raise TraceError(f"the tangents have the structure {treedef}, the primals {wanted}{at_user_line()}")

    def run() -> tuple[Any, Any]:
        traced = _Traced(fun, tuple(primals), range(len(primals)), False)
        given = [as_value(leaf) for leaf in leaves]
        along = [_cotangent(t, p) for t, p in zip(given, traced.parameters, strict=True)]
        tangents_out = push_forward(traced.outputs, traced.parameters, along)
        value = tree.unflatten(traced.structure, traced.outputs)
        return value, tree.unflatten(traced.structure, tangents_out)

    value, tangent = structure.settle(run)
    return value, tangent


def stop_gradient(value: Any) -> Any:
    """The value, as a constant to derivatives; trees are taken leaf by leaf."""

    def stop(leaf: Any) -> Any:
        leaf = as_value(leaf)
        return leaf if not isinstance(leaf, Array) else b.stop_gradient(leaf)

    return tree.map(stop, value)


# ---------------------------------------------------------------------------- functions as a whole


def _closed_call(fun: Callable[..., Any], args: Sequence[Any], kind: str) -> tuple[Any, list[Any], list[Any], Any]:
    """Trace a function by itself: its Body, free variables, flat arguments and the result's structure."""
    flat, treedef = tree.flatten(tuple(args))
    values = structure.as_arrays(flat)
    with new_trace(kind) as trace:
        parameters = [parameter(aval_of(value), trace) for value in values]
        result = fun(*tree.unflatten(treedef, parameters))
        outputs, result_structure = tree.flatten(result)
        body, constants = close(structure.as_arrays(outputs), trace, parameters)
    return body, constants, values, result_structure


def checkpoint(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which derivatives keep the arguments alone and compute the rest again."""

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            body, constants, values, treedef = _closed_call(functools.partial(fun, **kwargs), args, "checkpoint")
            return tree.unflatten(treedef, structure.call(body, [*constants, *values], {}))

        return structure.settle(run)

    return checkpointed


class custom_vjp:  # noqa: N801 - JAX's name for it
    """A function with a derivative of its own.

    ::

        @tk.custom_vjp
        def f(x): ...
        f.defvjp(forward, backward)

    ``forward(*args)`` returns the value and what ``backward(kept, cotangents)`` needs to return a
    tuple with the cotangents of all arguments (None for zero).
    """

    def __init__(self, fun: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._forward: Callable[..., Any] | None = None
        self._backward: Callable[..., Any] | None = None

    def _positional(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, as the two functions of the derivative take them."""
        bound = inspect.signature(self._fun).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            names = ", ".join(bound.kwargs)
            raise TraceError(f"{self._fun.__name__}: a custom derivative has no keyword-only {names}{at_user_line()}")
        return bound.args

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Set the derivative."""
        self._forward, self._backward = forward, backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self._positional(args, kwargs) if kwargs else args
        forward, pull = self._forward, self._backward
        if forward is None or pull is None:
            raise TraceError(f"{self._fun.__name__} has no derivative yet: call its defvjp first{at_user_line()}")

        def run() -> Any:
            body, constants, values, treedef = _closed_call(self._fun, args, "custom_vjp")
            _, arguments = tree.flatten(tuple(args))

            def pull_back(inputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
                own = tree.unflatten(arguments, inputs[len(constants) :])
                kept = _kept(forward(*own), treedef, cotangents)
                results = pull(kept, tree.unflatten(treedef, cotangents))
                return [None] * len(constants) + _flat_cotangents(results, own)

            return tree.unflatten(treedef, structure.call(body, [*constants, *values], {"pull_back": pull_back}))

        return structure.settle(run)


def _kept(result: Any, treedef: Any, cotangents: Sequence[Any]) -> Any:
    """What a custom forward keeps for its backward; its value is like the function's."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TraceError(f"a custom forward must return (value, kept), got {result!r}{at_user_line()}")
    leaves, structure_of = tree.flatten(result[0])
    got = [list(aval_of(as_value(leaf)).shape) for leaf in leaves]
    wanted = [list(aval_of(cotangent).shape) for cotangent in cotangents]
    if structure_of != treedef or got != wanted:
        raise TraceError(
            f"a custom forward returned a value of shapes {got} in {structure_of}, the function {wanted} in {treedef}"
            f"{at_user_line()}"
        )
    return result[1]


def _flat_cotangents(results: Any, arguments: Sequence[Any]) -> list[Any]:
    """One cotangent for each leaf of the arguments; None for a whole argument is zero."""
    if not isinstance(results, tuple) or len(results) != len(arguments):
        raise TraceError(
            f"a custom backward must return a tuple with one entry for each of the {len(arguments)} arguments, "
            f"got {results!r}{at_user_line()}"
        )
    flat: list[Any] = []
    for result, argument in zip(results, arguments, strict=True):
        wanted = tree.leaves(argument)
        given = [None] * len(wanted) if result is None else tree.leaves(result)
        if len(given) != len(wanted):
            raise TraceError(
                f"a custom backward returned {len(given)} arrays where {len(wanted)} belong{at_user_line()}"
            )
        flat += [_of_argument(value, like) for value, like in zip(given, wanted, strict=True)]
    return flat


def _of_argument(cotangent: Any, argument: Any) -> Any:
    """A cotangent in the shape and dtype of the argument that it belongs to; None for one that is not floating."""
    aval = aval_of(argument)
    value = None if cotangent is None or not is_float(aval.dtype) else as_value(cotangent)
    if value is None:
        return None
    if is_scalar(value):
        return b.full(aval.shape, value, aval.dtype)
    if aval_of(value).shape != aval.shape:
        raise TraceError(
            f"a custom backward returned {aval_of(value)} for an argument {aval}: needs its shape{at_user_line()}"
        )
    return b.cast(value, aval.dtype)
