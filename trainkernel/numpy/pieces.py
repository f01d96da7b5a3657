"""Arrays from pieces and without them: blocks, deletions, grids of indices, functions by pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy import elementwise
from trainkernel.numpy.axes import as_shape, one_axis
from trainkernel.numpy.creation import arange, linspace, meshgrid
from trainkernel.numpy.indexing import get_item
from trainkernel.numpy.shapes import concatenate, ravel, stack
from trainkernel.trace import Array, as_value, at_user_line, aval_of

Value = Any

__all__ = ["block", "delete", "indices", "mgrid", "ogrid", "piecewise"]


def block(arrays: Any) -> Value:
    """An array of nested lists of blocks: the innermost lists are joined along the last axis.

    Raises
    ------
    TraceError
        If a list is empty, or lists are nested to different depths.
    """
    return _block(arrays)[0]


def _block(given: Any) -> tuple[Value, int]:
    if not isinstance(given, list):
        return b.as_array(given), 1
    if not given:
        raise TraceError(f"block: a list is empty{at_user_line()}")
    parts = [_block(each) for each in given]
    depth = parts[0][1]
    if any(other != depth for _, other in parts):
        raise TraceError(f"block: lists are nested to different depths{at_user_line()}")
    rank = max(depth, *(len(part.shape) for part, _ in parts))
    lifted = [b.reshape(part, (1,) * (rank - len(part.shape)) + tuple(part.shape)) for part, _ in parts]
    return concatenate(lifted, -depth), depth + 1


def delete(arr: Value, obj: Any, axis: int | None = None, *, assume_unique_indices: bool = False) -> Value:
    """An array without some of its slices along an axis, or of its elements in one row.

    Parameters
    ----------
    arr : array
    obj : int, slice, or array of ints or bools
        Known when the function is traced: it decides the result's shape.
    axis : int or None
    assume_unique_indices : bool
        Changes nothing.
    """
    if isinstance(obj, Array):
        raise TraceError(f"delete needs indices that are known when it is traced{at_user_line()}")
    x = ravel(arr) if axis is None else b.as_array(arr)
    along = one_axis(0 if axis is None else axis, len(x.shape), "delete")
    try:
        kept = np.delete(np.arange(x.shape[along]), obj)
    except (IndexError, ValueError) as error:
        raise TraceError(f"delete: {error}{at_user_line()}") from None
    return get_item(x, (*[slice(None)] * along, kept))


def indices(dimensions: Any, dtype: Any = None, sparse: bool = False) -> Any:
    """The indices of each element of an array of this shape, along a first axis; ``sparse`` gives a tuple of lines."""
    sizes, name = as_shape(dimensions), "int32" if dtype is None else b.dtype_name(dtype)
    lines = [b.iota(size, name) for size in sizes]
    if sparse:
        shapes = ([size if other == axis else 1 for other in range(len(sizes))] for axis, size in enumerate(sizes))
        return tuple(b.reshape(line, shape) for line, shape in zip(lines, shapes, strict=True))
    if not sizes:
        return b.full((0,), 0, name)
    return stack([b.broadcast(line, sizes, (axis,)) for axis, line in enumerate(lines)])


class _Grid:
    """``mgrid[0:3, 0:1:5j]``: a grid by slices; an imaginary step counts points, the end among them."""

    def __init__(self, name: str, is_open: bool) -> None:
        self._name, self._is_open = name, is_open

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._line(key)
        lines = meshgrid(*[self._line(each) for each in key], indexing="ij", sparse=self._is_open)
        return lines if self._is_open else stack(lines)

    def _line(self, key: Any) -> Value:
        if not isinstance(key, slice) or key.stop is None:
            raise TraceError(f"{self._name} needs slices with an end, got {key!r}{at_user_line()}")
        start, step = 0 if key.start is None else key.start, 1 if key.step is None else key.step
        if isinstance(step, complex):
            return linspace(start, key.stop, int(abs(step)))
        return arange(start, key.stop, step)


mgrid = _Grid("mgrid", False)
ogrid = _Grid("ogrid", True)


def piecewise(x: Value, condlist: Any, funclist: Sequence[Any], *args: Any, **kw: Any) -> Value:
    """Where conditions hold the values of their functions, of the last one where several do.

    Parameters
    ----------
    x : array
    condlist : array of bool, or a list of them
    funclist : list of callables and numbers
        One for each condition, and one more for where none holds: 0 without. Each gets all of ``x``.
    *args, **kw
        Given to the functions too.

    Returns
    -------
    array of the dtype and shape of ``x``
    """
    value = b.as_array(x)
    dtype, shape = aval_of(value).dtype, tuple(value.shape)
    conditions = list(condlist) if isinstance(condlist, (list, tuple)) else [as_value(condlist)]
    if len(conditions) == 1 and len(as_value(conditions[0]).shape) > len(shape):
        conditions = [get_item(conditions[0], row) for row in range(conditions[0].shape[0])]
    if len(funclist) not in (len(conditions), len(conditions) + 1):
        raise TraceError(f"piecewise: {len(funclist)} functions for {len(conditions)} conditions{at_user_line()}")
    pieces = [each(value, *args, **kw) if callable(each) else each for each in funclist]
    rest = pieces[len(conditions)] if len(pieces) > len(conditions) else 0
    result = _as(rest, dtype, shape)
    for condition, piece in zip(conditions, pieces, strict=False):
        result = elementwise.where(condition, _as(piece, dtype, shape), result)
    return result


def _as(piece: Any, dtype: str, shape: tuple[int, ...]) -> Value:
    return b.stretch(b.cast(b.as_array(piece), dtype), shape)
