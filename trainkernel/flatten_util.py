"""``ravel_pytree``: a tree of arrays as one row, as in ``jax.flatten_util``."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from trainkernel import primitives as b
from trainkernel import tree
from trainkernel.errors import TraceError
from trainkernel.numpy import concatenate, ravel
from trainkernel.trace import at_user_line, aval_of

Value = Any

__all__ = ["ravel_pytree"]


def ravel_pytree(pytree: Any) -> tuple[Value, Callable[[Value], Any]]:
    """All elements of a tree in one row, and the function that makes a tree of such a row.

    The row has the dtype to which those of the arrays are promoted; the tree gets its own back.

    Raises
    ------
    TraceError
        From the function, if its row has another size.
    """
    leaves, treedef = tree.flatten(pytree)
    arrays = [b.as_array(leaf) for leaf in leaves]
    specs = [(tuple(array.shape), aval_of(array).dtype) for array in arrays]
    row = concatenate([ravel(array) for array in arrays]) if arrays else b.full((0,), 0, "float32")
    size = sum(prod(shape) for shape, _ in specs)

    def unravel(flat: Value) -> Any:
        values = b.as_array(flat)
        if tuple(values.shape) != (size,):
            raise TraceError(f"unravel needs a row of {size} elements, got {aval_of(values)}{at_user_line()}")
        parts, start = [], 0
        for shape, dtype in specs:
            limit = start + prod(shape)
            parts.append(b.cast(b.reshape(b.slice(values, (start,), (limit,), (1,)), shape), dtype))
            start = limit
        return tree.unflatten(treedef, parts)

    return row, unravel
