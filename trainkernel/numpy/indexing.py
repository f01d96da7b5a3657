"""``x[index]``: NumPy's basic and advanced indexing, of traced arrays and by traced arrays.

Ints, slices, ``...`` and ``newaxis`` are views (a negative step is a flip). Integer arrays gather;
several of them broadcast together and count as one dim, where they stand if they stand side by
side, in front otherwise. An int beside arrays counts as one of them, as in NumPy.

Negative indices count from the end. A static int out of range is an error; elements of index
arrays out of range are clamped, as JAX clamps them. A mask must be known when the function is
traced, since it decides a shape.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import one_axis, refuse_out
from trainkernel.promotion import is_float
from trainkernel.trace import Array, Shape, as_value, at_user_line, aval_of

Value = Any

__all__ = ["get_item", "take", "take_along_axis"]


# ---------------------------------------------------------------------------- what an index says


@dataclass(frozen=True)
class Range:
    """``count`` elements of a dim from ``start``, ``step`` apart; a dropped one is an int."""

    start: int
    step: int
    count: int
    is_dropped: bool = False


@dataclass(frozen=True)
class NewAxis:
    """A new dim of size 1."""


@dataclass(frozen=True)
class Gather:
    """Elements of a dim at the indices of an integer array."""

    index: Value


Entry = Range | NewAxis | Gather


def parse_index(index: Any, shape: Shape) -> list[Entry]:
    """What an index does: one entry for each dim of an array of ``shape``, and one for each new dim.

    Raises
    ------
    TraceError
        For too many entries, an int out of range, or an entry of another kind.
    """
    given = index if isinstance(index, tuple) else (index,)
    spread = _without_masks([_plain(entry) for entry in given], shape)
    used = sum(entry is not None and entry is not Ellipsis for entry in spread)
    if sum(entry is Ellipsis for entry in spread) > 1:
        raise TraceError(f"an index has more than one ellipsis{at_user_line()}")
    if used > len(shape):
        raise TraceError(f"{used} indices for an array of shape {list(shape)}{at_user_line()}")
    whole: list[Any] = [slice(None)] * (len(shape) - used)
    place = next((at for at, entry in enumerate(spread) if entry is Ellipsis), None)
    spread = [*spread, *whole] if place is None else [*spread[:place], *whole, *spread[place + 1 :]]
    sizes = iter(enumerate(shape))
    return [NewAxis() if entry is None else _parse_one(entry, *next(sizes), shape) for entry in spread]


def _plain(entry: Any) -> Any:
    """An entry as None, Ellipsis, a slice, an int, or an array."""
    if entry is None or entry is Ellipsis or isinstance(entry, slice) or _is_int(entry):
        return entry
    value = as_value(entry)
    if is_float(aval_of(value).dtype):
        if isinstance(entry, (list, tuple)) and not entry:
            return np.zeros(0, np.int32)
        raise TraceError(f"an index must be ints, slices or bools, got {aval_of(value)}{at_user_line()}")
    return np.asarray(value) if isinstance(value, bool) else value


def _is_int(entry: Any) -> bool:
    return isinstance(entry, (int, np.integer)) and not isinstance(entry, bool)


def _without_masks(entries: Sequence[Any], shape: Shape) -> list[Any]:
    """Masks replaced by the indices of their true elements."""
    found: list[Any] = []
    after = sum(_num_dims(entry) for entry in entries)
    dim = 0
    for entry in entries:
        if entry is Ellipsis:
            dim += len(shape) - after
        if hasattr(entry, "dtype") and not _is_int(entry) and aval_of(entry).dtype == "bool":
            found.extend(_mask_indices(entry, shape[dim : dim + len(entry.shape)], shape))
        else:
            found.append(entry)
        dim += _num_dims(entry)
    return found


def _num_dims(entry: Any) -> int:
    """How many dims an entry stands for."""
    if entry is None or entry is Ellipsis:
        return 0
    is_mask = hasattr(entry, "dtype") and not _is_int(entry) and aval_of(entry).dtype == "bool"
    return len(entry.shape) if is_mask else 1


def _mask_indices(mask: Value, dims: Shape, shape: Shape) -> list[Value]:
    if isinstance(mask, Array):
        raise TraceError(
            f"the mask {mask.aval} is traced, and how many elements it picks is not known: use where(mask, x, y), or "
            f"x.at[mask].set(value) with one value for all of them{at_user_line()}"
        )
    if not mask.shape or tuple(mask.shape) != tuple(dims):
        raise TraceError(f"a mask of shape {list(mask.shape)} does not fit shape {list(shape)}{at_user_line()}")
    return [each.astype(np.int32) for each in np.nonzero(mask)]


def _parse_one(entry: Any, dim: int, size: int, shape: Shape) -> Entry:
    if isinstance(entry, slice):
        try:
            start, stop, step = entry.indices(size)
        except TypeError:
            raise TraceError(
                f"the bounds of {entry} must be ints known when the function is traced: use dynamic_slice for a "
                f"moving window{at_user_line()}"
            ) from None
        return Range(start, step, len(range(start, stop, step)))
    if _is_int(entry):
        place = operator.index(entry)
        if not -size <= place < size:
            raise TraceError(f"index {place} is out of range for dim {dim} of shape {list(shape)}{at_user_line()}")
        return Range(place % size, 1, 1, is_dropped=True)
    if isinstance(entry, np.ndarray) and not entry.shape and -size <= entry < size:
        return Range(int(entry) % size, 1, 1, is_dropped=True)
    return Gather(entry)


# ---------------------------------------------------------------------------- basic indexing


def select_ranges(x: Value, ranges: Sequence[Range]) -> Value:
    """A range of each dim, ints among them as dims of size 1: a view, and flips for negative steps."""
    start, limit, stride = [], [], []
    for each in ranges:
        last = each.start + each.step * (each.count - 1)
        low, high = (each.start, last) if each.step > 0 else (last, each.start)
        start.append(low if each.count else 0)
        limit.append(high + 1 if each.count else 0)
        stride.append(abs(each.step))
    result = b.slice(x, start, limit, stride)
    turned = tuple(dim for dim, each in enumerate(ranges) if each.step < 0 and each.count > 1)
    return b.flip(result, dims=turned) if turned else result


def basic_shape(entries: Sequence[Entry]) -> Shape:
    """The shape of what ints, slices and new axes select."""
    kept = [each for each in entries if not (isinstance(each, Range) and each.is_dropped)]
    return tuple(each.count if isinstance(each, Range) else 1 for each in kept)


# ---------------------------------------------------------------------------- advanced indexing


@dataclass(frozen=True)
class Plan:
    """How an advanced index reads an array.

    Attributes
    ----------
    ranges : tuple of Range
        What is selected of each dim before the gather; a gathered dim is whole.
    dims : tuple of int
        The gathered dims.
    indices : tuple of arrays
        Their int32 indices, negative ones wrapped, which broadcast to ``index_shape``.
    rest : tuple of Range or NewAxis
        The other dims of the result in order; None is where the gathered dims belong.
    """

    ranges: tuple[Range, ...]
    dims: tuple[int, ...]
    indices: tuple[Value, ...]
    index_shape: Shape
    rest: tuple[Range | NewAxis | None, ...]

    @property
    def others(self) -> list[int]:
        """The dims that are not gathered."""
        return [dim for dim in range(len(self.ranges)) if dim not in self.dims]

    @property
    def kept(self) -> list[int]:
        """The sizes of the dims that are neither gathered nor dropped."""
        return [self.ranges[dim].count for dim in self.others if not self.ranges[dim].is_dropped]

    @property
    def num_before(self) -> int:
        """How many of those come before the gathered dims in the result."""
        return sum(isinstance(each, Range) for each in self.rest[: self.rest.index(None)])

    @property
    def result_shape(self) -> Shape:
        """The shape of the result."""
        shape: list[int] = []
        for each in self.rest:
            shape += self.index_shape if each is None else (each.count if isinstance(each, Range) else 1,)
        return tuple(shape)


def plan_gather(entries: Sequence[Entry], shape: Shape) -> Plan:
    """The plan of an index with integer arrays.

    Raises
    ------
    TraceError
        If index arrays do not broadcast together.
    """
    gathers = [each for each in entries if isinstance(each, Gather)]
    try:
        index_shape = tuple(np.broadcast_shapes(*(tuple(each.index.shape) for each in gathers)))
    except ValueError:
        listed = " and ".join(str(list(each.index.shape)) for each in gathers)
        raise TraceError(f"index arrays of shapes {listed} do not broadcast together{at_user_line()}") from None
    ranges: list[Range] = []
    dims, indices = [], []
    for each in entries:
        if isinstance(each, Gather):
            dims.append(len(ranges))
            indices.append(wrapped(each.index, shape[len(ranges)]))
            ranges.append(Range(0, 1, shape[len(ranges)]))
        elif isinstance(each, Range):
            ranges.append(each)
    return Plan(tuple(ranges), tuple(dims), tuple(indices), index_shape, _result_dims(entries))


def _result_dims(entries: Sequence[Entry]) -> tuple[Range | NewAxis | None, ...]:
    """The dims of the result; None for the place of the gathered ones."""
    places = [at for at, each in enumerate(entries) if _is_advanced(each)]
    side_by_side = places == list(range(places[0], places[0] + len(places)))
    result: list[Range | NewAxis | None] = [] if side_by_side else [None]
    for at, each in enumerate(entries):
        if side_by_side and at == places[0]:
            result.append(None)
        if isinstance(each, NewAxis) or (isinstance(each, Range) and not each.is_dropped):
            result.append(each)
    return tuple(result)


def _is_advanced(entry: Entry) -> bool:
    return isinstance(entry, Gather) or (isinstance(entry, Range) and entry.is_dropped)


def wrapped(index: Value, size: int) -> Value:
    """Indices as int32 with negative ones counted from the end; NumPy arrays stay such."""
    if isinstance(index, np.ndarray):
        place = index.astype(np.int64)
        return np.asarray(np.where(place < 0, place + size, place).clip(-1, size), np.int32)
    dtype = aval_of(index).dtype
    if dtype in ("uint8", "uint32"):
        return b.cast(b.minimum(index, min(size, 255) if dtype == "uint8" else size), "int32")
    place = b.where(b.compare(index, 0, "lt"), b.add(index, size), index)
    return b.cast(b.minimum(b.maximum(place, -1), size), "int32") if dtype == "int64" else place


def clamped(index: Value, size: int) -> Value:
    """Indices in the range of a dim."""
    if isinstance(index, np.ndarray):
        return np.asarray(index.clip(0, max(size - 1, 0)))
    return b.minimum(b.maximum(index, 0), max(size - 1, 0))


def flat_index(plan: Plan, sizes: Sequence[int]) -> Value:
    """One index into the gathered dims together, clamped dim by dim; of one dim the gather clamps it itself."""
    known: Any = np.zeros((), np.int32)
    traced: list[Value] = []
    stride = prod(sizes)
    for index, size in zip(plan.indices, sizes, strict=True):
        stride //= max(size, 1)
        place = index if len(sizes) == 1 and isinstance(index, Array) else clamped(index, size)
        if isinstance(place, np.ndarray):
            known = np.asarray(known + place * np.int32(stride))
        else:
            traced.append(b.stretch(place if stride == 1 else b.mul(place, stride), plan.index_shape))
    if not traced:
        return np.array(np.broadcast_to(known, plan.index_shape))
    terms = [*traced, b.stretch(known, plan.index_shape)] if known.any() else traced
    return functools.reduce(b.add, terms)


def rows_of(x: Value, plan: Plan) -> Value:
    """An array of the selected ranges with the gathered dims in front, as one."""
    moved = b.transpose(x, [*plan.dims, *plan.others])
    return b.reshape(moved, (prod(moved.shape[: len(plan.dims)]), *moved.shape[len(plan.dims) :]))


def _gathered(x: Value, plan: Plan) -> Value:
    rows = rows_of(select_ranges(x, plan.ranges), plan)
    index = flat_index(plan, [x.shape[dim] for dim in plan.dims])
    if plan.index_shape == ():
        taken = b.dynamic_slice(rows, index, *(0 for _ in rows.shape[1:]), sizes=(1, *rows.shape[1:]))
    else:
        taken = b.take(rows, index)
    return _as_result(taken, plan)


def _as_result(taken: Value, plan: Plan) -> Value:
    """Gathered dims in front moved to their place, dims of ints dropped and new axes added."""
    lead, before = len(plan.index_shape), plan.num_before
    taken = b.reshape(taken, [*plan.index_shape, *plan.kept])
    order = [*range(lead, lead + before), *range(lead), *range(lead + before, len(taken.shape))]
    return b.reshape(b.transpose(taken, order), plan.result_shape)


# ---------------------------------------------------------------------------- functions


def get_item(x: Value, index: Any) -> Value:
    """``x[index]``.

    Raises
    ------
    TraceError
        If the index does not fit, or its result's shape depends on values.
    """
    array = b.as_array(x)
    shape = tuple(array.shape)
    entries = parse_index(index, shape)
    if any(isinstance(each, Gather) for each in entries):
        chosen = _row_choice(array, entries)
        return _gathered(array, plan_gather(entries, shape)) if chosen is None else chosen
    selected = select_ranges(array, [each for each in entries if isinstance(each, Range)])
    return b.reshape(selected, basic_shape(entries))


def _row_choice(x: Value, entries: Sequence[Entry]) -> Value | None:
    """``x[arange(len(x)), index]`` of a matrix: one element of each row; None for any other index."""
    gathers = [each.index for each in entries if isinstance(each, Gather)]
    if len(x.shape) != 2 or len(entries) != 2 or len(gathers) != 2 or not b.is_compared(x, 1):
        return None
    rows, index = gathers
    if tuple(rows.shape) != x.shape[:1] or tuple(index.shape) != x.shape[:1] or not _counts(rows):
        return None
    place = clamped(wrapped(as_index(index), x.shape[1]), x.shape[1])
    return b.reshape(b.pick(x, b.reshape(place, (*place.shape, 1)), 1), x.shape[:1])


def _counts(index: Value) -> bool:
    """Whether an index is known to be 0, 1, 2, and so on."""
    if isinstance(index, Array):
        return index.node.op == "iota"
    return np.array_equal(np.asarray(index), np.arange(len(index)))


def take(
    a: Value, indices: Value, axis: int | None = None, out: None = None, mode: str | None = None,
    unique_indices: bool = False, indices_are_sorted: bool = False, fill_value: Any = None,
) -> Value:  # fmt: skip
    """Elements along an axis, of all elements without one.

    Indices out of range are clamped (mode "clip", the default); with "wrap" they are taken modulo
    the size. JAX's default fills with NaN instead.
    """
    refuse_out(out)
    x = b.as_array(a)
    if mode not in (None, "clip", "wrap", "promise_in_bounds"):
        raise TraceError(f"take: mode must be 'clip' or 'wrap', got {mode!r}{at_user_line()}")
    if axis is None:
        x, along = b.reshape(x, (prod(x.shape),)), 0
    else:
        along = one_axis(axis, len(x.shape), "take")
    index = as_index(indices)
    if mode == "wrap":
        index = b.remainder(index, x.shape[along])
    elif mode == "clip":
        index = clamped(index, x.shape[along])
    return get_item(x, (*(slice(None) for _ in range(along)), index))


def as_index(indices: Value) -> Value:
    """Indices as an array of integers."""
    index = b.as_array(indices)
    if aval_of(index).dtype in ("bool", "float16", "bfloat16", "float32", "float64"):
        raise TraceError(f"indices must be integers, got {aval_of(index)}{at_user_line()}")
    return index


def take_along_axis(
    arr: Value, indices: Value, axis: int | None = -1, mode: Any = None, fill_value: Any = None
) -> Value:
    """``arr[..., indices[..., i, ...], ...]``: one index for each element of the result.

    The other dims broadcast together. Indices out of range are clamped. One of at most 64 floats of each row (a
    value of the action taken) is found by comparing, without a gather: a -0.0 comes back as 0.0.

    Raises
    ------
    TraceError
        If the ranks differ or the other dims do not broadcast.
    """
    x, index = b.as_array(arr), as_index(indices)
    if axis is None:
        x, along = b.reshape(x, (prod(x.shape),)), 0
    else:
        along = one_axis(axis, len(x.shape), "take_along_axis")
    if len(index.shape) != len(x.shape):
        raise TraceError(
            f"take_along_axis: indices of shape {list(index.shape)} need the rank of shape {list(x.shape)}"
            f"{at_user_line()}"
        )
    sizes = [(size, count) for dim, (size, count) in enumerate(zip(x.shape, index.shape, strict=True)) if dim != along]
    if any(size != count and 1 not in (size, count) for size, count in sizes):
        raise TraceError(
            f"take_along_axis: indices of shape {list(index.shape)} do not broadcast to shape {list(x.shape)} beside "
            f"axis {along}{at_user_line()}"
        )
    if index.shape[along] == 1 and b.is_compared(x, along):
        return b.pick(x, clamped(wrapped(index, x.shape[along]), x.shape[along]), along)
    return _along(x, index, along)


def _along(x: Value, index: Value, along: int) -> Value:
    """Elements at flat indices: an index along one dim, and its own coordinates along the others."""
    pairs = enumerate(zip(x.shape, index.shape, strict=True))
    shape = tuple(count if dim == along or size == 1 else size for dim, (size, count) in pairs)
    stride = prod(x.shape)
    terms = []
    for dim, size in enumerate(x.shape):
        stride //= max(size, 1)
        if dim == along:
            place = b.stretch(clamped(wrapped(index, size), size), shape)
        elif size == 1:
            continue
        else:
            place = b.broadcast(b.iota(size), shape, (dim,))
        terms.append(place if stride == 1 else b.mul(place, stride))
    return b.take(b.reshape(x, (prod(x.shape),)), functools.reduce(b.add, terms))
