"""Arrays as sets: their different elements, and what is among them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy import elementwise, reductions
from trainkernel.numpy.axes import as_int
from trainkernel.numpy.differences import diff
from trainkernel.numpy.sorting import in_order, is_known, order_of, ranks
from trainkernel.promotion import is_float
from trainkernel.trace import at_user_line, aval_of

Value = Any

__all__ = ["isin", "unique"]


def unique(
    ar: Value, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False,
    axis: None = None, *, equal_nan: bool = True, size: int | None = None, fill_value: Value | None = None,
    sorted: bool = True,
) -> Any:  # fmt: skip
    """The different elements of an array in ascending order.

    Parameters
    ----------
    ar : array
        All elements, in the order of their memory.
    return_index, return_inverse, return_counts : bool
        Return int32 arrays too: the first index of each; which of them each element of ``ar`` is, of
        its shape; how often each is there.
    axis : None
        Rows are not compared.
    equal_nan : bool
        NaN is equal to NaN.
    size : int, optional
        The size of the result; needed in a traced function. Beyond the number of different elements
        stand ``fill_value``, the index of the least element and the count 0.
    fill_value : number, optional
        The least element without.

    Returns
    -------
    array, or a tuple of it and of what else is asked for

    Raises
    ------
    TraceError
        With an axis, or without a size in a traced function, or for more elements than ``sort`` takes.
    """
    if axis is not None:
        raise TraceError(f"unique compares elements, not slices: axis must be None, got {axis}{at_user_line()}")
    x = b.as_array(ar)
    flat = b.reshape(x, (prod(x.shape),))
    if size is None and not is_known(flat):
        raise TraceError(f"unique of a traced array needs a size: the result's shape{at_user_line()}")
    if not flat.shape[0]:
        return _of_nothing(x, size, fill_value, (return_index, return_inverse, return_counts))
    places = ranks(flat)
    order = order_of(places, flat.shape[0])
    row = in_order(flat, order, places)
    group = _groups(row, equal_nan)
    count = int(group[-1]) + 1 if size is None else as_int(size, "the size of unique")
    first = _starts(group, count + 1)
    begin = b.slice(first, (0,), (count,), (1,))
    is_there = b.compare(begin, flat.shape[0], "lt")
    begin = b.where(is_there, begin, 0)
    values = b.take(row, begin)
    if fill_value is not None:
        values = b.cast(elementwise.where(is_there, values, fill_value), aval_of(x).dtype)
    results = [values]
    if return_index:
        results.append(b.take(order, begin))
    if return_inverse:
        results.append(b.reshape(b.take(group, places), tuple(x.shape)))
    if return_counts:
        results.append(diff(first))
    return results[0] if len(results) == 1 else tuple(results)


def _groups(row: Value, equal_nan: bool) -> Value:
    """For each element of a sorted row how many different ones come before it, int32."""
    size = row.shape[0]
    own, before = b.slice(row, (1,), (size,), (1,)), b.slice(row, (0,), (size - 1,), (1,))
    is_new = b.compare(own, before, "ne")
    if equal_nan and is_float(aval_of(row).dtype):
        is_new = b.bitwise_and(is_new, b.compare(before, before, "eq"))
    return b.cumsum(b.pad(b.cast(is_new, "int32"), 0, low=(1,), high=(0,), interior=(0,)), dim=0)


def _starts(group: Value, count: int) -> Value:
    """Where each of the first groups begins; the size of the row for those that there are not."""
    if is_known(group):
        return np.asarray(np.searchsorted(group, np.arange(count)), np.int32)
    wide = (count, group.shape[0])
    is_before = b.compare(b.broadcast(group, wide, (1,)), b.broadcast(b.iota(count), wide, (0,)), "lt")
    return b.sum(b.cast(is_before, "int32"), dims=(1,))


def _of_nothing(x: Value, size: int | None, fill_value: Value | None, wanted: tuple[bool, bool, bool]) -> Any:
    if size and fill_value is None:
        raise TraceError(f"unique of no elements in {size} needs a fill_value{at_user_line()}")
    count = 0 if size is None else as_int(size, "the size of unique")
    empty = b.full((count,), 0, "int32")
    values = b.full((count,), 0 if fill_value is None else fill_value, aval_of(x).dtype)
    others = (empty, b.full(tuple(x.shape), 0, "int32"), empty)
    results = [values, *(array for array, is_wanted in zip(others, wanted, strict=True) if is_wanted)]
    return results[0] if len(results) == 1 else tuple(results)


def isin(
    element: Value, test_elements: Value, assume_unique: bool = False, invert: bool = False, *, method: str = "auto"
) -> Value:
    """Whether each element is among ``test_elements``, or with ``invert`` is not; NaN never is.

    Each is compared with all of them; ``assume_unique`` and ``method`` change nothing.
    """
    x, others = b.as_array(element), b.as_array(test_elements)
    others = b.reshape(others, (prod(others.shape),))
    wide = b.reshape(x, (*x.shape, 1))
    same = b.binary(lambda first, second: b.compare(first, second, "eq"), wide, others)
    found = reductions.any(same, axis=-1)
    return b.compare(found, 0, "eq") if invert else found
