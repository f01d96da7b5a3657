"""Functions that derivatives take as a whole: ``checkpoint``, ``custom_vjp``, ``custom_jvp``.

Names and meanings are JAX's. A rule by tangents is turned into one by cotangents: it is traced on
tangents that stand for all, and pulled back through what it makes of them, which is linear.
"""

from __future__ import annotations

import abc
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from trainkernel import primitives as b
from trainkernel import structure, tree
from trainkernel.autodiff import backward, zeros
from trainkernel.errors import TraceError
from trainkernel.promotion import is_float
from trainkernel.trace import Array, alias, as_value, at_user_line, aval_of, close, is_scalar, new_trace, parameter

PullBack = Callable[[Sequence[Any], Sequence[Any], Any], list[Any]]
"""Cotangents of the leaves of arguments, by the arguments, the cotangents of the value, and its structure."""


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


# ---------------------------------------------------------------------------- functions with a rule of their own


class _Custom(abc.ABC):
    """A function and which of its arguments are no arrays: those that ``nondiff_argnums`` names."""

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: Sequence[int] = ()) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._fixed = tuple(operator.index(number) for number in nondiff_argnums)

    @property
    def _name(self) -> str:
        return str(getattr(self._fun, "__name__", self._fun))

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The fixed arguments and the others, all by position, as rules take them."""
        if kwargs:
            bound = inspect.signature(self._fun).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.kwargs:
                names = ", ".join(bound.kwargs)
                raise TraceError(f"{self._name}: a custom derivative has no keyword-only {names}{at_user_line()}")
            args = bound.args
        if any(not -len(args) <= number < len(args) for number in self._fixed):
            raise TraceError(
                f"{self._name}: nondiff_argnums {self._fixed} name none of {len(args)} arguments{at_user_line()}"
            )
        places = [number % len(args) for number in self._fixed]
        return [args[place] for place in places], [arg for place, arg in enumerate(args) if place not in places]

    def _applied(self, function: Callable[..., Any], fixed: Sequence[Any], others: Sequence[Any]) -> Any:
        """A function with the signature of this one, of arguments that ``_arguments`` took apart."""
        count = len(fixed) + len(others)
        places = [number % count for number in self._fixed]
        held, moving = iter(fixed), iter(others)
        known = dict(zip(places, held, strict=True))
        return function(*(known[place] if place in known else next(moving) for place in range(count)))

    @abc.abstractmethod
    def _pull_back(self, fixed: Sequence[Any]) -> PullBack:
        """The derivative with these fixed arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fixed, others = self._arguments(args, kwargs)
        pull_back = self._pull_back(fixed)

        def run() -> Any:
            body, constants, values, treedef = _closed_call(
                lambda *own: self._applied(self._fun, fixed, own), others, type(self).__name__
            )
            _, arguments = tree.flatten(tuple(others))

            def rule(inputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
                own = tree.unflatten(arguments, inputs[len(constants) :])
                return [None] * len(constants) + pull_back(own, cotangents, treedef)

            return tree.unflatten(treedef, structure.call(body, [*constants, *values], {"pull_back": rule}))

        return structure.settle(run)


class custom_vjp(_Custom):  # noqa: N801 - JAX's name for it
    """A function with a derivative of its own.

    ::

        @tk.custom_vjp
        def f(x): ...
        f.defvjp(forward, backward)

    ``forward(*args)`` returns the value and what ``backward(kept, cotangents)`` needs to return a
    tuple with the cotangents of all arguments (None for zero).

    Parameters
    ----------
    fun : callable
    nondiff_argnums : sequence of int
        Positional arguments that are no arrays: ``backward`` gets them in front of ``kept``, and
        returns nothing for them.
    """

    _forward: Callable[..., Any] | None = None
    _backward: Callable[..., Any] | None = None

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Set the derivative."""
        self._forward, self._backward = forward, backward

    def _pull_back(self, fixed: Sequence[Any]) -> PullBack:
        forward, pull = self._forward, self._backward
        if forward is None or pull is None:
            raise TraceError(f"{self._name} has no derivative yet: call its defvjp first{at_user_line()}")

        def pull_back(own: Sequence[Any], cotangents: Sequence[Any], treedef: Any) -> list[Any]:
            kept = _kept(self._applied(forward, fixed, own), treedef, cotangents)
            return _flat_cotangents(pull(*fixed, kept, tree.unflatten(treedef, cotangents)), own)

        return pull_back


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


# ---------------------------------------------------------------------------- rules by tangents


class custom_jvp(_Custom):  # noqa: N801 - JAX's name for it
    """A function with a derivative of its own, along tangents.

    ::

        @tk.custom_jvp
        def f(x, y): ...

        @f.defjvp
        def f_jvp(primals, tangents): ...

    The rule takes a tuple of arguments and one of tangents like them, and returns the value and its
    tangent, which is linear in the tangents. It serves derivatives of both directions and of any
    order; the value itself is always that of the function. The tangent of an argument that is not
    floating is zeros of float32.

    Parameters
    ----------
    fun : callable
    nondiff_argnums : sequence of int
        Positional arguments that are no arrays: the rule gets them in front of the others.
    """

    _rule: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Set the derivative, and return the rule.

        Raises
        ------
        TraceError
            With ``symbolic_zeros``: all tangents are arrays.
        """
        if symbolic_zeros:
            raise TraceError(f"{self._name}: there are no symbolic zeros, tangents are arrays{at_user_line()}")
        self._rule = jvp
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Set the derivative by one rule for each argument, or None where it is zero.

        A rule ``(tangent, value, *args)`` returns the tangent of the value due to one argument.

        Raises
        ------
        TraceError
            With ``nondiff_argnums``.
        """
        if self._fixed:
            raise TraceError(f"{self._name}: nondiff_argnums need defjvp, not defjvps{at_user_line()}")

        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            if len(jvps) != len(primals):
                raise TraceError(f"{self._name}: {len(jvps)} rules for {len(primals)} arguments{at_user_line()}")
            value = self(*primals)
            parts = [each(t, value, *primals) for each, t in zip(jvps, tangents, strict=True) if each is not None]
            if not parts:
                return value, tree.map(zeros, value)
            return value, functools.reduce(lambda x, y: tree.map(_sum, x, y), parts)

        self._rule = rule

    def _pull_back(self, fixed: Sequence[Any]) -> PullBack:
        if self._rule is None:
            raise TraceError(f"{self._name} has no derivative yet: call its defjvp first{at_user_line()}")
        rule = self._rule

        def pull_back(own: Sequence[Any], cotangents: Sequence[Any], treedef: Any) -> list[Any]:
            leaves, arguments = tree.flatten(tuple(own))
            with new_trace("grad") as trace:
                tangents = [_probe(leaf, trace) for leaf in leaves]
                result = rule(*fixed, tuple(own), tree.unflatten(arguments, tangents))
            reached = _tangents_out(result, treedef, cotangents)
            given = [
                b.cast(ct, aval_of(t).dtype) if isinstance(t, Array) else None
                for ct, t in zip(cotangents, reached, strict=True)
            ]
            floats = [is_float(aval_of(leaf).dtype) for leaf in leaves]
            live = [tangent for tangent, is_live in zip(tangents, floats, strict=True) if is_live]
            pulled = iter(backward(reached, given, live))
            return [next(pulled) if is_live else None for is_live in floats]

        return pull_back


def _sum(x: Any, y: Any) -> Any:
    return b.binary(b.add, x, y)


def _probe(primal: Any, trace: Any) -> Array:
    """A tangent that stands for all: what depends on it is pulled back."""
    aval = aval_of(primal)
    return alias(b.full(aval.shape, 0, aval.dtype if is_float(aval.dtype) else "float32"), trace)


def _tangents_out(result: Any, treedef: Any, cotangents: Sequence[Any]) -> list[Any]:
    """The leaves of the tangent that a rule returned; None for those of values that are not floating."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TraceError(f"a custom rule must return (value, tangent), got {result!r}{at_user_line()}")
    leaves, structure_of = tree.flatten(result[1])
    values = [as_value(leaf) for leaf in leaves]
    got = [list(aval_of(value).shape) for value in values]
    wanted = [list(aval_of(cotangent).shape) for cotangent in cotangents]
    if structure_of != treedef or got != wanted:
        raise TraceError(
            f"a custom rule returned a tangent of shapes {got} in {structure_of}, the function {wanted} in {treedef}"
            f"{at_user_line()}"
        )
    return [value if is_float(aval_of(ct).dtype) else None for value, ct in zip(values, cotangents, strict=True)]
