"""Running traced code without a compiler: a function is traced as ``jit`` would, and its graph evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkernel import structure, tree
from trainkernel.trace import aval_of, close, new_trace, parameter


def run_traced(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` with every array traced, and the values of its result."""
    leaves, treedef = tree.flatten(args)
    values = structure.as_arrays(leaves)
    with new_trace("jit") as trace:
        parameters = [parameter(aval_of(value), trace) for value in values]
        outputs, structure_out = tree.flatten(function(*tree.unflatten(treedef, parameters)))
        body, constants = close(structure.as_arrays(outputs), trace, parameters)
    results = structure.settle(lambda: list(structure.call(body, [*constants, *values], {})))
    return tree.unflatten(structure_out, results)
