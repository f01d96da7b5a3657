"""``x.at[index].set(value)`` and its kin: an array with some elements changed.

Ranges are written as a whole. Elements at index arrays are added in order by the op
``scatter_add``; where several ``set`` the same element, the last one wins. Updates out of range
are dropped, as in JAX. Outside of a traced function, ``at(x)[index]`` does it to NumPy arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.indexing import (
    Entry,
    Gather,
    Plan,
    Range,
    basic_shape,
    flat_index,
    get_item,
    parse_index,
    plan_gather,
    rows_of,
    select_ranges,
)
from trainkernel.trace import Array, Shape, as_value, at_user_line, aval_of, is_scalar

Value = Any
Combine = Callable[[Value, Value], Value]

__all__ = ["at"]


# ---------------------------------------------------------------------------- x.at[index]


def at(x: Value) -> At:
    """What ``x.at`` is: ``at(x)[index].set(value)``."""
    return At(b.as_array(x))


@dataclass(frozen=True)
class At:
    """An array that waits for an index."""

    array: Value

    def __getitem__(self, index: Any) -> Update:
        return Update(self.array, index)


def _second(old: Value, new: Value) -> Value:
    return new


@dataclass(frozen=True)
class Update:
    """An array and an index into it; each method returns the array with the elements there changed.

    The value broadcasts to the shape of ``x[index]`` and is cast to the array's dtype.
    ``mode`` is None, "drop" or "promise_in_bounds"; ``unique_indices=True`` promises that no
    element is named twice.
    """

    array: Value
    index: Any

    def get(self, **options: Any) -> Value:
        """The elements themselves."""
        return get_item(self.array, self.index)

    def set(self, values: Value, **options: Any) -> Value:
        """The elements replaced; the last one wins where an index array names one twice."""
        return self._update(_second, values, options)

    def add(self, values: Value, **options: Any) -> Value:
        """The elements with values added, once for each time that an index array names them."""
        return self._update(b.add, values, options)

    def subtract(self, values: Value, **options: Any) -> Value:
        """The elements with values subtracted."""
        return self.add(b.unary(b.neg, values), **options)

    def multiply(self, values: Value, **options: Any) -> Value:
        """The elements multiplied by values."""
        return self._update(b.mul, values, options)

    mul = multiply

    def divide(self, values: Value, **options: Any) -> Value:
        """The elements divided by values."""
        ones = b.full(self.array.shape, 1, self.array.dtype)
        return b.div(self.array, Update(ones, self.index).multiply(values, **options))

    def power(self, values: Value, **options: Any) -> Value:
        """The elements to the power of values."""
        return self._update(b.power, values, {**options, "unique_indices": True})

    def min(self, values: Value, **options: Any) -> Value:
        """The smaller of the elements and values."""
        return self._update(b.minimum, values, options)

    def max(self, values: Value, **options: Any) -> Value:
        """The larger of the elements and values."""
        return self._update(b.maximum, values, options)

    def apply(self, function: Callable[[Value], Value], **options: Any) -> Value:
        """The elements replaced by a function of them, once each."""
        return self.set(function(self.get()), **options)

    def _update(self, combine: Combine, values: Value, options: dict[str, Any]) -> Value:
        is_unique = _check_options(options)
        x, value = self.array, as_value(values)
        value = b.full((), value, x.dtype) if is_scalar(value) else b.cast(value, x.dtype)
        mask = _lone_mask(self.index, len(x.shape))
        if mask is not None and (isinstance(mask, Array) or not value.shape):
            return _update_masked(x, mask, combine, value)
        entries = parse_index(self.index, tuple(x.shape))
        if any(isinstance(each, Gather) for each in entries):
            return _update_gathered(x, plan_gather(entries, tuple(x.shape)), combine, value, is_unique)
        return _update_ranges(x, entries, combine, value)


def _check_options(options: dict[str, Any]) -> bool:
    unknown = set(options) - {"mode", "unique_indices", "indices_are_sorted", "fill_value"}
    if unknown:
        raise TraceError(f"unknown options {', '.join(sorted(unknown))} of an update{at_user_line()}")
    if options.get("mode") not in (None, "drop", "promise_in_bounds", "fill"):
        raise TraceError(f"updates out of range are dropped; mode {options['mode']!r} is not supported{at_user_line()}")
    return bool(options.get("unique_indices", False))


def _spread(value: Value, shape: Shape, what: str) -> Value:
    have = (1,) * (len(shape) - len(value.shape)) + tuple(value.shape)
    while len(have) > len(shape) and have[0] == 1:
        have = have[1:]
    if len(have) != len(shape) or any(size not in (1, want) for size, want in zip(have, shape, strict=True)):
        raise TraceError(
            f"a value of shape {list(value.shape)} does not broadcast to {what} of shape {list(shape)}{at_user_line()}"
        )
    return b.stretch(b.reshape(value, have), shape)


# ---------------------------------------------------------------------------- masks and ranges


def _lone_mask(index: Any, rank: int) -> Value | None:
    """The index if it is one mask and nothing else."""
    mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if isinstance(mask, (Array, np.ndarray)) and aval_of(mask).dtype == "bool" and 0 < len(mask.shape) <= rank:
        return mask
    return None


def _update_masked(x: Value, mask: Value, combine: Combine, value: Value) -> Value:
    """``where``: each element of the mask decides over one element, or a row of them."""
    rank = len(mask.shape)
    if tuple(mask.shape) != tuple(x.shape[:rank]):
        raise TraceError(
            f"a mask of shape {list(mask.shape)} does not fit an array of shape {list(x.shape)}{at_user_line()}"
        )
    if len(value.shape) > len(x.shape) - rank:
        raise TraceError(
            f"the mask {mask} is traced, so it takes one value for all of shape {list(x.shape[rank:])}, got "
            f"{list(value.shape)}; use where(mask, values, x){at_user_line()}"
        )
    wide = b.broadcast(mask, tuple(x.shape), tuple(range(rank)))
    return b.where(wide, combine(x, _spread(value, tuple(x.shape), "the array")), x)


def _update_ranges(x: Value, entries: list[Entry], combine: Combine, value: Value) -> Value:
    ranges = [each for each in entries if isinstance(each, Range)]
    box = tuple(each.count for each in ranges)
    new = b.reshape(_spread(value, basic_shape(entries), "the elements"), box)
    old = None if combine is _second else select_ranges(x, ranges)
    return _put(x, ranges, new if old is None else combine(old, new))


def _put(x: Value, ranges: list[Range], box: Value) -> Value:
    """``x`` with a box of ranges replaced: one update where they are dense, else selected between the gaps."""
    if prod(box.shape) == 0:
        return x
    turned = tuple(dim for dim, each in enumerate(ranges) if each.step < 0 and each.count > 1)
    box = b.flip(box, dims=turned) if turned else box
    if tuple(box.shape) == tuple(x.shape):
        return box
    first = [min(each.start, each.start + each.step * (each.count - 1)) for each in ranges]
    gaps = [abs(each.step) - 1 if each.count > 1 else 0 for each in ranges]
    if not any(gaps):
        return b.dynamic_update(x, box, *first)
    spans = [each.count + gap * (each.count - 1) for each, gap in zip(ranges, gaps, strict=True)]
    high = [size - low - span for size, low, span in zip(x.shape, first, spans, strict=True)]
    inside = b.pad(b.full(box.shape, True, "bool"), 0, low=first, high=high, interior=gaps)
    return b.where(inside, b.pad(box, 0, low=first, high=high, interior=gaps), x)


# ---------------------------------------------------------------------------- index arrays


def _update_gathered(x: Value, plan: Plan, combine: Combine, value: Value, is_unique: bool) -> Value:
    """The selected ranges with rows changed, put back in their place."""
    ranges = list(plan.ranges)
    selected = select_ranges(x, ranges)
    rows = rows_of(selected, plan)
    updates = _as_rows(_spread(value, plan.result_shape, "the elements"), plan, tuple(rows.shape[1:]))
    sizes = [x.shape[dim] for dim in plan.dims]
    index = b.reshape(_place_of(plan, sizes), (prod(plan.index_shape),))
    new = _updated_rows(rows, index, updates, combine, is_unique)
    moved_sizes = [selected.shape[dim] for dim in (*plan.dims, *plan.others)]
    order = [*plan.dims, *plan.others]
    back = b.transpose(b.reshape(new, moved_sizes), [order.index(dim) for dim in range(len(order))])
    return _put(x, ranges, back)


def _as_rows(value: Value, plan: Plan, rest: Shape) -> Value:
    """A value of the result's shape with the gathered dims in front, as one."""
    lead, before = len(plan.index_shape), plan.num_before
    kept = plan.kept
    x = b.reshape(value, [*kept[:before], *plan.index_shape, *kept[before:]])
    order = [*range(before, before + lead), *range(before), *range(before + lead, len(x.shape))]
    return b.reshape(b.transpose(x, order), (prod(plan.index_shape), *rest))


def _place_of(plan: Plan, sizes: list[int]) -> Value:
    """One index into the gathered dims together; out of range where one of them is.

    A NumPy array where all indices are known.
    """
    if all(isinstance(index, np.ndarray) for index in plan.indices):
        fits = [(index >= 0) & (index < size) for index, size in zip(plan.indices, sizes, strict=True)]
        inside = np.broadcast_to(functools.reduce(np.logical_and, fits), plan.index_shape)
        return np.where(inside, flat_index(plan, sizes), -1).astype(np.int32)
    if len(sizes) == 1:
        return flat_index(plan, sizes)
    fits = [
        b.stretch(b.bitwise_and(b.compare(index, 0, "ge"), b.compare(index, size, "lt")), plan.index_shape)
        for index, size in zip(plan.indices, sizes, strict=True)
    ]
    return b.where(functools.reduce(b.bitwise_and, fits), flat_index(plan, sizes), -1)


def _updated_rows(rows: Value, index: Value, updates: Value, combine: Combine, is_unique: bool) -> Value:
    if combine is b.add:
        return b.add(rows, b.scatter_add(index, updates, size=rows.shape[0]))
    if updates.shape[0] == 0:
        return rows
    if updates.shape[0] == 1:
        return _updated_row(rows, b.reshape(index, ()), updates, combine)
    is_unique = is_unique or (isinstance(index, np.ndarray) and _is_unique(index))
    if combine is not _second and not is_unique:
        updates = _combined(index, updates, combine)
    writer = (
        _known_writers(index, rows.shape[0])
        if isinstance(index, np.ndarray)
        else _writers(index, rows.shape[0], is_unique)
    )
    taken = b.take(updates, b.sub(writer, 1))
    is_written = b.broadcast(b.compare(writer, 0, "gt"), tuple(rows.shape), (0,))
    return b.where(is_written, combine(rows, taken), rows)


def _updated_row(rows: Value, index: Value, update: Value, combine: Combine) -> Value:
    starts = [index, *(0 for _ in rows.shape[1:])]
    old = b.dynamic_slice(rows, *starts, sizes=update.shape)
    fits = b.bitwise_and(b.compare(index, 0, "ge"), b.compare(index, rows.shape[0], "lt"))
    return b.dynamic_update(rows, b.where(b.stretch(fits, tuple(update.shape)), combine(old, update), old), *starts)


def _is_unique(index: Any) -> bool:
    inside = index[index >= 0]
    return len(np.unique(inside)) == len(inside)


def _known_writers(index: Any, size: int) -> Any:
    """``_writers`` of indices that are known: what NumPy assigns last stays."""
    writer = np.zeros(size, np.int32)
    inside = (index >= 0) & (index < size)
    writer[index[inside]] = np.arange(1, len(index) + 1, dtype=np.int32)[inside]
    return writer


def _writers(index: Value, size: int, is_unique: bool) -> Value:
    """For each row one more than the position of its last update, 0 for none.

    Which updates are the last of their row is found by comparing all pairs, unless they are unique.
    """
    count = index.shape[0]
    position = b.iota(count)
    if not is_unique:
        earlier, later = b.broadcast(position, (count, count), (0,)), b.broadcast(position, (count, count), (1,))
        overwritten = b.bitwise_and(_same(index), b.compare(earlier, later, "lt"))
        index = b.where(b.max(overwritten, dims=(1,)), -1, index)
    return b.scatter_add(index, b.add(position, 1), size=size)


def _same(index: Value) -> Value:
    """Which pairs of indices are equal."""
    wide = (index.shape[0], index.shape[0])
    return b.compare(b.broadcast(index, wide, (0,)), b.broadcast(index, wide, (1,)), "eq")


def _combined(index: Value, updates: Value, combine: Combine) -> Value:
    """For each update the product or extremum of all updates of its row."""
    count, rest = updates.shape[0], tuple(updates.shape[1:])
    wide = (count, count, *rest)
    own = 1 if combine is b.mul else b.broadcast(updates, wide, (0, *range(2, len(wide))))
    others = b.broadcast(updates, wide, range(1, len(wide)))
    kept = b.where(b.broadcast(_same(index), wide, (0, 1)), others, own)
    reduce = {b.mul: b.prod, b.maximum: b.max, b.minimum: b.min}[combine]
    return reduce(kept, dims=(1,))
