"""``jacrev``, ``jacfwd``, ``hessian``: derivatives of arrays by arrays, each one ``vmap`` of ``vjp`` or ``jvp``.

Names and meanings are JAX's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainkernel import numpy as tnp
from trainkernel import structure, tree
from trainkernel.batching import vmap
from trainkernel.derivatives import jvp, positions_of, vjp
from trainkernel.trace import aval_of


def jacrev(fun: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The Jacobian of ``fun`` by rows, one for each element of the result: for results smaller than the arguments.

    Parameters
    ----------
    fun : callable
        Returns a tree of floating arrays.
    argnums : int or sequence of int
        Positional arguments to differentiate, trees of floating arrays.

    Returns
    -------
    callable
        Its result is ``fun``'s with, in place of each array, a tree like the argument (a tuple of
        such trees where ``argnums`` is a sequence) of arrays whose shape is that of the result, then
        that of the argument.
    """

    @functools.wraps(fun)
    def jacobian_of(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            of_chosen, chosen = _by_argument(fun, argnums, args, kwargs)
            value, pull_back = vjp(of_chosen, chosen)
            outputs, treedef = tree.flatten(value)
            rows = vmap(lambda cotangents: pull_back(cotangents)[0])(tree.unflatten(treedef, list(_basis(outputs))))
            of_outputs = [
                tree.map(
                    lambda row, f=first, o=out: tnp.reshape(row[f : f + _size(o)], (*o.shape, *row.shape[1:])), rows
                )
                for first, out in _placed(outputs)
            ]
            return tree.unflatten(treedef, of_outputs)

        return structure.settle(run)

    return jacobian_of


def jacfwd(fun: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The Jacobian of ``fun`` by columns, one for each element of the arguments; its result is that of ``jacrev``."""

    @functools.wraps(fun)
    def jacobian_of(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            of_chosen, chosen = _by_argument(fun, argnums, args, kwargs)
            inputs, treedef = tree.flatten(chosen)

            def along(tangents: Any) -> Any:
                return jvp(of_chosen, (chosen,), (tangents,))[1]

            columns = vmap(along, out_axes=-1)(tree.unflatten(treedef, list(_basis(inputs))))

            def by_inputs(column: Any) -> Any:
                parts = [
                    tnp.reshape(column[..., first : first + _size(one)], (*column.shape[:-1], *one.shape))
                    for first, one in _placed(inputs)
                ]
                return tree.unflatten(treedef, parts)

            return tree.map(by_inputs, columns)

        return structure.settle(run)

    return jacobian_of


def hessian(fun: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The second derivatives of ``fun``: ``jacfwd`` of ``jacrev``."""
    return jacfwd(jacrev(fun, argnums), argnums)


def _by_argument(
    fun: Callable[..., Any], argnums: int | Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[[Any], Any], Any]:
    """``fun`` as a function of what ``argnums`` names, and its value there: a tree of arrays."""
    positions = positions_of(argnums, len(args))
    leaves, treedef = tree.flatten(
        args[positions[0]] if isinstance(argnums, int) else tuple(args[p] for p in positions)
    )

    def of_chosen(chosen: Any) -> Any:
        values = list(args)
        for position, value in zip(positions, (chosen,) if isinstance(argnums, int) else chosen, strict=True):
            values[position] = value
        return fun(*values, **kwargs)

    return of_chosen, tree.unflatten(treedef, structure.as_arrays(leaves))


def _size(array: Any) -> int:
    return math.prod(array.shape)


def _placed(arrays: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Each array with the place of its first element among the elements of all."""
    first = 0
    for array in arrays:
        yield first, array
        first += _size(array)


def _basis(arrays: Sequence[Any]) -> Iterator[Any]:
    """For each array a batch of arrays like it, as long as all have elements: in each, one element of one is 1."""
    total = sum(_size(array) for array in arrays)
    for first, array in _placed(arrays):
        ones = tnp.eye(total, _size(array), k=-first, dtype=aval_of(array).dtype)
        yield tnp.reshape(ones, (total, *array.shape))


__all__ = ["hessian", "jacfwd", "jacrev"]
