"""``grad``, ``value_and_grad``, ``vjp``, ``jvp``, ``linearize``, ``stop_gradient``.

Names and meanings are JAX's. Arguments and results are trees of arrays.
"""

from __future__ import annotations

import functools
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
    is_scalar,
    is_tracing,
    new_trace,
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
        values = [_direction(c, out, "cotangent", "result") for c, out in zip(given, traced.outputs, strict=True)]
        return tuple(structure.settle(lambda: traced.pull_back(values)))

    value = tree.unflatten(traced.structure, traced.outputs)
    if not inside:
        value, traced_aux = structure.settle(lambda: (value, traced.aux))
    else:
        traced_aux = traced.aux
    return (value, pull_back, traced_aux) if has_aux else (value, pull_back)


def _direction(given: Any, of: Any, kind: str, side: str) -> Any:
    """The tangent of an argument or the cotangent of a result, in its dtype; None if that is no float's."""
    aval, given = aval_of(of), as_value(given)
    if not is_scalar(given) and aval_of(given).shape != aval.shape:
        raise TraceError(f"a {kind} has shape {list(given.shape)}, the {side} {list(aval.shape)}{at_user_line()}")
    if not is_float(aval.dtype):
        return None
    return b.full(aval.shape, given, aval.dtype) if is_scalar(given) else b.cast(given, aval.dtype)


def jvp(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The value of ``fun`` at ``primals`` and its derivative along ``tangents``, trees of the same structure."""

    for what, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise TraceError(f"the {what} of jvp are a tuple or a list, got {type(given).__name__}{at_user_line()}")
    leaves = _tangent_leaves(tuple(primals), tuple(tangents))

    def run() -> tuple[Any, Any]:
        traced = _Traced(fun, tuple(primals), range(len(primals)), False)
        return tree.unflatten(traced.structure, traced.outputs), _pushed(traced, leaves)

    value, tangent = structure.settle(run)
    return value, tangent


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of ``fun`` at ``primals`` and its derivative there, as a function of tangents.

    Parameters
    ----------
    fun : callable
    *primals : trees of floating arrays
    has_aux : bool
        ``fun`` returns a pair of its value and anything else, which is the third result.

    Returns
    -------
    value, push_forward : tree, callable
        ``push_forward(*tangents)`` takes trees like ``primals`` and gives one like the value. It is
        linear, and ``fun`` is traced once, however often it is called.
    """
    traced = _Traced(fun, primals, range(len(primals)), has_aux)

    def push(*tangents: Any) -> Any:
        leaves = _tangent_leaves(primals, tangents)
        return structure.settle(lambda: _pushed(traced, leaves))

    value = tree.unflatten(traced.structure, traced.outputs)
    value, aux = structure.settle(lambda: (value, traced.aux))
    return (value, push, aux) if has_aux else (value, push)


def _tangent_leaves(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> list[Any]:
    leaves, treedef = tree.flatten(tangents)
    wanted = tree.flatten(primals)[1]
    if treedef != wanted:
        raise TraceError(f"the tangents have the structure {treedef}, the primals {wanted}{at_user_line()}")
    return [as_value(leaf) for leaf in leaves]


def _pushed(traced: _Traced, tangents: Sequence[Any]) -> Any:
    """The tangents of the results, as a tree like them."""
    along = [_direction(t, p, "tangent", "primal") for t, p in zip(tangents, traced.parameters, strict=True)]
    return tree.unflatten(traced.structure, push_forward(traced.outputs, traced.parameters, along))


def stop_gradient(value: Any) -> Any:
    """The value, as a constant to derivatives; trees are taken leaf by leaf."""

    def stop(leaf: Any) -> Any:
        leaf = as_value(leaf)
        return leaf if not isinstance(leaf, Array) else b.stop_gradient(leaf)

    return tree.map(stop, value)
