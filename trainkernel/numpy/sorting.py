"""Sorting by ranks: the place of an element is the number of elements that come before it.

Comparing all pairs of a row and counting is one stage of a kernel, without a barrier in between. A
row of n elements takes n² comparisons: little for the rows of up to a few thousand elements that
training steps sort. Rows longer than ``LONGEST_SORTED`` are refused in a traced function; outside
of one, NumPy's stable sort finds the same ranks.

NaN is greater than all else, as in JAX. Elements that compare equal (so do 0.0 and -0.0) keep their
order, so each sort is stable. The derivative of sorted values is a gather by the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel import structure
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int, one_axis
from trainkernel.promotion import is_float
from trainkernel.trace import at_user_line, aval_of, close, is_tracing, new_trace, parameter

Value = Any

__all__ = ["argpartition", "argsort", "lexsort", "partition", "sort"]

LONGEST_SORTED = 65536

# ---------------------------------------------------------------------------- order


def precedes(x: Value, y: Value) -> Value:
    """Whether each element of ``x`` is less than that of ``y`` (same shape and dtype); NaN is the greatest."""
    less = b.compare(x, y, "lt")
    if not is_float(aval_of(x).dtype):
        return less
    return b.bitwise_or(less, b.bitwise_and(b.compare(x, x, "eq"), b.compare(y, y, "ne")))


def is_known(*values: Value) -> bool:
    """Whether all values are NumPy arrays, outside of any trace."""
    return not is_tracing() and all(isinstance(value, np.ndarray) for value in values)


def ranks(*keys: Value, descending: bool = False) -> Value:
    """The place of each element in its sorted row, int32 of the shape of the keys.

    Rows are the last dim. Elements are compared by the first key, those that tie by the next one,
    those that tie in all by their index.

    Raises
    ------
    TraceError
        If the rows of traced keys are longer than ``LONGEST_SORTED``.
    """
    if is_known(*keys):
        return _known_ranks(keys, descending)
    size = keys[0].shape[-1]
    if size > LONGEST_SORTED:
        raise TraceError(
            f"rows of {size} elements are too long to sort: all pairs of a row are compared, up to {LONGEST_SORTED} "
            f"elements. Sort them outside of the traced function, or in parts{at_user_line()}"
        )
    *firsts, index = _without_nan(keys, descending)
    before = _pairs(index, "lt")
    for key in reversed(firsts):
        before = b.bitwise_or(_pairs(key, "gt" if descending else "lt"), b.bitwise_and(_pairs(key, "eq"), before))
    return b.sum(b.cast(before, "int32"), dims=(len(keys[0].shape),))


def _without_nan(keys: Sequence[Value], descending: bool) -> list[Value]:
    """Keys without NaN that have the same order, the last one an index that makes them all different.

    A NaN is an infinity that comes behind the others (descending: in front of them). The index is computed from
    the last key, of integers too: comparisons of one that all rows share would be hoisted out of them, and the n²
    results stored.
    """
    shape = tuple(keys[0].shape)
    index = b.reshape(b.iota(prod(shape)), shape)
    found: list[Value] = []
    for key in keys:
        is_nan = b.compare(key, key, "ne")
        is_float_key = is_float(aval_of(key).dtype)
        found += [b.where(is_nan, float("inf"), key), b.cast(is_nan, "int32")] if is_float_key else [key]
    behind = found.pop() if is_float_key else b.cast(is_nan, "int32")
    behind = b.mul(behind, prod(shape))
    return [*found, b.sub(index, behind) if descending else b.add(index, behind)]


def _pairs(x: Value, comparison: str) -> Value:
    """Comparisons ``[..., i, j]`` of each element j of a row with each element i of it."""
    last = len(x.shape) - 1
    wide = (*x.shape, x.shape[last])
    own, other = b.broadcast(x, wide, tuple(range(last + 1))), b.broadcast(x, wide, (*range(last), last + 1))
    return b.compare(other, own, comparison)


def _known_ranks(keys: Sequence[Any], descending: bool) -> Any:
    columns = [key.astype(np.float64) if is_float(aval_of(key).dtype) else key for key in keys]
    if descending:
        # What ties keeps its order if it is turned round before and after.
        flipped = np.lexsort([np.flip(column, -1) for column in reversed(columns)], axis=-1)
        order = columns[0].shape[-1] - 1 - np.flip(flipped, -1)
    else:
        order = np.lexsort(columns[::-1], axis=-1)
    places = np.empty(order.shape, np.int32)
    index = np.broadcast_to(np.arange(order.shape[-1], dtype=np.int32), order.shape)
    np.put_along_axis(places, order, index, axis=-1)
    return places


def order_of(places: Value, count: int) -> Value:
    """The indices of the elements at the first ``count`` places of each row: the inverse of ``ranks``."""
    if is_known(places):
        return np.argsort(places, axis=-1, kind="stable")[..., :count].astype(np.int32)
    last = len(places.shape) - 1
    wide = (*places.shape[:-1], count, places.shape[last])
    place = b.broadcast(places, wide, (*range(last), last + 1))
    is_there = b.compare(place, b.broadcast(b.iota(count), wide, (last,)), "eq")
    return b.sum(b.where(is_there, b.broadcast(b.iota(wide[-1]), wide, (last + 1,)), 0), dims=(last + 1,))


# ---------------------------------------------------------------------------- elements in order


def in_order(x: Value, order: Value, places: Value) -> Value:
    """The elements of rows at ``order_of(places, count)``; its derivative needs no scatter."""
    return _with_transpose(_taken, _put_back, x, order, places)


def _taken(x: Value, order: Value, places: Value) -> Value:
    """Elements of rows by indices in range."""
    rows, size = prod(x.shape[:-1]), x.shape[-1]
    flat = b.reshape(order, (rows, order.shape[-1]))
    if rows > 1:
        flat = b.add(flat, b.broadcast(b.mul(b.iota(rows), size), tuple(flat.shape), (0,)))
    return b.reshape(b.take(b.reshape(x, (rows * size,)), flat), tuple(order.shape))


def _put_back(taken: Value, order: Value, places: Value) -> Value:
    """Rows with the elements where they were, and zero for those that were not taken."""
    count = taken.shape[-1]
    if count == 0:
        return b.full(tuple(places.shape), 0, aval_of(taken).dtype)
    if count == places.shape[-1]:
        return _taken(taken, places, order)
    rows = _taken(taken, b.minimum(places, count - 1), order)
    return b.where(b.compare(places, count, "lt"), rows, 0)


def _with_transpose(
    function: Callable[..., Value], transpose: Callable[..., Value], x: Value, order: Value, places: Value
) -> Value:
    """A function that is linear in its first operand, whose derivative is another one."""
    if is_known(x, order, places) or not is_float(aval_of(x).dtype):
        return function(x, order, places)
    operands = (x, order, places)
    with new_trace("sort") as trace:
        parameters = [parameter(aval_of(value), trace) for value in operands]
        body, constants = close([function(*parameters)], trace, parameters)

    def pull_back(inputs: Sequence[Value], cotangents: Sequence[Value]) -> list[Value]:
        _, own_order, own_places = inputs[len(constants) :]
        back = _with_transpose(transpose, function, cotangents[0], own_order, own_places)
        return [None] * len(constants) + [back, None, None]

    return structure.call(body, [*constants, *operands], {"pull_back": pull_back})[0]


# ---------------------------------------------------------------------------- functions


def rows_along(x: Value, axis: int) -> Value:
    """The array with an axis as its last dim."""
    ndim = len(x.shape)
    return b.transpose(x, (*(dim for dim in range(ndim) if dim != axis), axis))


def back_along(x: Value, axis: int) -> Value:
    """The array with its last dim as an axis: undoes ``rows_along``."""
    ndim = len(x.shape)
    return b.transpose(x, (*range(axis), ndim - 1, *range(axis, ndim - 1)))


def _one_axis(a: Value, axis: int | None, what: str) -> tuple[Value, int]:
    """The array and an axis of it; all elements in one row without one."""
    x = b.as_array(a)
    return (b.reshape(x, (prod(x.shape),)), 0) if axis is None else (x, one_axis(axis, len(x.shape), what))


def _refuse(kind: Any, order: Any, what: str) -> None:
    if kind is not None or order is not None:
        raise TraceError(f"{what} takes neither kind nor order: each sort is stable{at_user_line()}")


def sort(
    a: Value, axis: int | None = -1, *, kind: None = None, order: None = None, stable: bool = True,
    descending: bool = False,
) -> Value:  # fmt: skip
    """The elements along an axis in ascending order, of all elements without one; NaN last.

    Descending, NaN comes first. A row of n elements takes n² comparisons.

    Raises
    ------
    TraceError
        For a ``kind`` or ``order``, or rows of more than 65,536 elements in a traced function.
    """
    _refuse(kind, order, "sort")
    x, along = _one_axis(a, axis, "sort")
    rows = rows_along(x, along)
    places = ranks(rows, descending=descending)
    return back_along(in_order(rows, order_of(places, rows.shape[-1]), places), along)


def argsort(
    a: Value, axis: int | None = -1, *, kind: None = None, order: None = None, stable: bool = True,
    descending: bool = False, dtype: Any = None,
) -> Value:  # fmt: skip
    """The indices, int32, that sort along an axis, or all elements without one; those that tie keep their order.

    Raises
    ------
    TraceError
        As ``sort``.
    """
    _refuse(kind, order, "argsort")
    x, along = _one_axis(a, axis, "argsort")
    rows = rows_along(x, along)
    result = back_along(order_of(ranks(rows, descending=descending), rows.shape[-1]), along)
    return result if dtype is None else b.cast(result, dtype)


def lexsort(keys: Any, axis: int = -1) -> Value:
    """The indices, int32, that sort by the last of ``keys``, what ties by the one before it, and so on.

    Parameters
    ----------
    keys : sequence of arrays of one shape, or an array of them
    axis : int
    """
    values = [b.as_array(key) for key in (keys if isinstance(keys, (tuple, list)) else list(b.as_array(keys)))]
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) != 1:
        raise TraceError(f"lexsort needs keys of one shape, got {[list(shape) for shape in shapes]}{at_user_line()}")
    if not shapes[0]:
        return b.full((), 0, "int32")
    along = one_axis(axis, len(shapes[0]), "lexsort")
    rows = [rows_along(value, along) for value in reversed(values)]
    return back_along(order_of(ranks(*rows), rows[0].shape[-1]), along)


def partition(a: Value, kth: int, axis: int = -1) -> Value:
    """The elements along an axis with the one of place ``kth`` there, none greater before and none less behind.

    They are sorted, which is one such order.
    """
    x = b.as_array(a)
    _checked_place(x, kth, axis, "partition")
    return sort(x, axis)


def argpartition(a: Value, kth: int, axis: int = -1) -> Value:
    """The indices, int32, of ``partition``."""
    x = b.as_array(a)
    _checked_place(x, kth, axis, "argpartition")
    return argsort(x, axis)


def _checked_place(x: Value, kth: int, axis: int, what: str) -> None:
    size = x.shape[one_axis(axis, len(x.shape), what)]
    if not -size <= as_int(kth, f"the place of {what}") < size:
        raise TraceError(f"{what}: place {kth} is out of range for {size} elements{at_user_line()}")


def top_k(operand: Value, k: int, *, axis: int = -1) -> tuple[Value, Value]:
    """The ``k`` greatest elements along an axis, the greatest first, and their int32 indices.

    Of elements that tie, the first comes first; NaN is the greatest.

    Raises
    ------
    TraceError
        If there are fewer than ``k`` elements, or more than 65,536 in a traced function.
    """
    x = b.as_array(operand)
    along = one_axis(axis, len(x.shape), "top_k")
    if not 0 <= as_int(k, "the k of top_k") <= x.shape[along]:
        raise TraceError(f"top_k: {k} of {x.shape[along]} elements{at_user_line()}")
    rows = rows_along(x, along)
    places = ranks(rows, descending=True)
    order = order_of(places, k)
    return back_along(in_order(rows, order, places), along), back_along(order, along)


def sort_together(operands: Sequence[Value], axis: int, num_keys: int, what: str) -> tuple[Value, ...]:
    """Arrays of one shape in the order of the first ``num_keys`` of them, along an axis."""
    values = [b.as_array(operand) for operand in operands]
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) != 1 or not 1 <= num_keys <= len(values):
        raise TraceError(
            f"{what}: {num_keys} keys among arrays of shapes {[list(shape) for shape in shapes]}, which must be one"
            f"{at_user_line()}"
        )
    along = one_axis(axis, len(shapes[0]), what)
    rows = [rows_along(value, along) for value in values]
    places = ranks(*rows[:num_keys])
    order = order_of(places, rows[0].shape[-1])
    return tuple(back_along(in_order(each, order, places), along) for each in rows)
