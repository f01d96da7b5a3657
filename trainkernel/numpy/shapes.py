"""Arrays in other shapes: views that cost nothing, and arrays put together from others."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int, as_shape, one_axis, refuse_out, some_axes
from trainkernel.ops.indexed import MAX_CONCATENATED
from trainkernel.promotion import promote
from trainkernel.trace import at_user_line, aval_of

Value = Any

__all__ = [
    "append", "array_split", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_arrays", "broadcast_shapes",
    "broadcast_to", "column_stack", "concat", "concatenate", "dstack", "expand_dims", "flip", "fliplr", "flipud",
    "hsplit", "hstack", "matrix_transpose", "moveaxis", "ndim", "permute_dims", "ravel", "repeat", "reshape",
    "roll", "rollaxis", "rot90", "shape", "size", "split", "squeeze", "stack", "swapaxes", "tile", "transpose",
    "vsplit", "vstack",
]  # fmt: skip


def ndim(a: Value) -> int:
    """The number of dims."""
    return len(b.as_array(a).shape)


def shape(a: Value) -> tuple[int, ...]:
    """The sizes of the dims."""
    return tuple(b.as_array(a).shape)


def size(a: Value, axis: int | None = None) -> int:
    """The number of elements, or of those along an axis."""
    sizes = shape(a)
    return prod(sizes) if axis is None else sizes[one_axis(axis, len(sizes), "size")]


# ---------------------------------------------------------------------------- reshape


def reshape(a: Value, shape: Any, order: str = "C", *, copy: bool | None = None) -> Value:
    """The elements in another shape; one size may be -1. The last dim runs fastest (order "C").

    Raises
    ------
    TraceError
        If the number of elements differs, or for another order.
    """
    x = b.as_array(a)
    if order != "C":
        raise TraceError(f"reshape: only order 'C' is supported, got {order!r}: transpose first{at_user_line()}")
    return b.reshape(x, _known_shape(tuple(x.shape), as_shape(shape)))


def _known_shape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """The new shape with -1 replaced by what is left."""
    count, given = prod(old), prod(size for size in new if size != -1)
    unknown = new.count(-1)
    fits = (given and count % given == 0) if unknown == 1 else unknown == 0 and count == given
    if not fits or any(size < -1 for size in new):
        raise TraceError(f"reshape: cannot arrange shape {list(old)} ({count} elements) as {list(new)}{at_user_line()}")
    return tuple(count // given if size == -1 else size for size in new)


def ravel(a: Value, order: str = "C") -> Value:
    """All elements in one dim."""
    return reshape(a, -1 if size(a) else 0, order)


def expand_dims(a: Value, axis: int | Sequence[int]) -> Value:
    """New dims of size 1 at ``axis`` of the result."""
    x = b.as_array(a)
    count = len(axis) if isinstance(axis, (tuple, list)) else 1
    axes = some_axes(axis, len(x.shape) + count, "expand_dims")
    rest = iter(x.shape)
    return b.reshape(x, [1 if dim in axes else next(rest) for dim in range(len(x.shape) + count)])


def squeeze(a: Value, axis: int | Sequence[int] | None = None) -> Value:
    """Without dims of size 1: all of them, or those at ``axis``.

    Raises
    ------
    TraceError
        If a dim at ``axis`` has another size.
    """
    x = b.as_array(a)
    if axis is None:
        return b.reshape(x, [each for each in x.shape if each != 1])
    axes = some_axes(axis, len(x.shape), "squeeze")
    for dim in axes:
        if x.shape[dim] != 1:
            raise TraceError(
                f"squeeze: axis {dim} of shape {list(x.shape)} has size {x.shape[dim]}, not 1{at_user_line()}"
            )
    return b.reshape(x, [each for dim, each in enumerate(x.shape) if dim not in axes])


def _at_least(arrays: Sequence[Value], lift: Any) -> Any:
    values = [b.as_array(each) for each in arrays]
    results = [b.reshape(x, lift(tuple(x.shape))) for x in values]
    return results[0] if len(results) == 1 else results


def atleast_1d(*arys: Value) -> Any:
    """Arrays with at least one dim."""
    return _at_least(arys, lambda sizes: sizes or (1,))


def atleast_2d(*arys: Value) -> Any:
    """Arrays with at least two dims; new ones come first."""
    return _at_least(arys, lambda sizes: (1,) * (2 - len(sizes)) + sizes)


def atleast_3d(*arys: Value) -> Any:
    """Arrays with at least three dims."""
    return _at_least(
        arys,
        lambda sizes: sizes if len(sizes) >= 3 else ((1,) * (2 - len(sizes)) + sizes + (1,) if sizes else (1, 1, 1)),
    )


# ---------------------------------------------------------------------------- transpose


def transpose(a: Value, axes: Sequence[int] | None = None) -> Value:
    """The dims in another order, reversed by default."""
    x = b.as_array(a)
    count = len(x.shape)
    order = tuple(reversed(range(count))) if axes is None else some_axes(tuple(axes), count, "transpose")
    if len(order) != count:
        raise TraceError(f"transpose: axes {tuple(axes or ())} do not fit shape {list(x.shape)}{at_user_line()}")
    return b.transpose(x, order)


permute_dims = transpose


def matrix_transpose(x: Value, /) -> Value:
    """The last two dims exchanged."""
    value = b.as_array(x)
    if len(value.shape) < 2:
        raise TraceError(f"matrix_transpose needs at least two dims, got shape {list(value.shape)}{at_user_line()}")
    return swapaxes(value, -1, -2)


def swapaxes(a: Value, axis1: int, axis2: int) -> Value:
    """Two dims exchanged."""
    x = b.as_array(a)
    order = list(range(len(x.shape)))
    first, second = (one_axis(axis, len(order), "swapaxes") for axis in (axis1, axis2))
    order[first], order[second] = second, first
    return b.transpose(x, order)


def moveaxis(a: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    """Dims moved to other places; the others keep their order."""
    x = b.as_array(a)
    count = len(x.shape)
    origins, places = some_axes(source, count, "moveaxis"), some_axes(destination, count, "moveaxis")
    if len(origins) != len(places):
        raise TraceError(f"moveaxis: {len(origins)} sources for {len(places)} destinations{at_user_line()}")
    order = [dim for dim in range(count) if dim not in origins]
    for place, origin in sorted(zip(places, origins, strict=True)):
        order.insert(place, origin)
    return b.transpose(x, order)


def rollaxis(a: Value, axis: int, start: int = 0) -> Value:
    """One dim moved before another."""
    x = b.as_array(a)
    count = len(x.shape)
    origin = one_axis(axis, count, "rollaxis")
    place = start + count if start < 0 else start
    return moveaxis(x, origin, place - 1 if origin < place else place)


# ---------------------------------------------------------------------------- broadcast


def broadcast_to(array: Value, shape: Any) -> Value:
    """The array repeated along new dims and dims of size 1; a view.

    Raises
    ------
    TraceError
        If the shape does not fit.
    """
    x, wanted = b.as_array(array), as_shape(shape)
    have = tuple(x.shape)
    padded = (1,) * (len(wanted) - len(have)) + have
    if len(padded) != len(wanted) or any(h not in (1, w) for h, w in zip(padded, wanted, strict=True)):
        raise TraceError(f"broadcast_to: shape {list(have)} does not broadcast to {list(wanted)}{at_user_line()}")
    return b.stretch(x, wanted)


def broadcast_shapes(*shapes: Any) -> tuple[int, ...]:
    """The shape that shapes have together."""
    given = [as_shape(each) for each in shapes]
    try:
        return tuple(np.broadcast_shapes(*given))
    except ValueError:
        listed = " and ".join(str(list(each)) for each in given)
        raise TraceError(f"shapes {listed} do not broadcast together{at_user_line()}") from None


def broadcast_arrays(*args: Value) -> list[Value]:
    """Arrays in the shape that they have together; each keeps its dtype."""
    arrays = [b.as_array(each) for each in args]
    common = broadcast_shapes(*(x.shape for x in arrays))
    return [b.stretch(x, common) for x in arrays]


# ---------------------------------------------------------------------------- concatenate


def concatenate(arrays: Any, axis: int | None = 0, dtype: Any = None) -> Value:
    """Arrays one behind the other along an axis, flattened without one.

    Raises
    ------
    TraceError
        If other sizes differ.
    """
    parts = _together(arrays, "concatenate", dtype)
    if axis is None:
        parts, axis = [ravel(x) for x in parts], 0
    along = one_axis(axis, len(parts[0].shape), "concatenate")
    rests = [tuple(x.shape[:along]) + tuple(x.shape[along + 1 :]) for x in parts]
    if any(len(x.shape) != len(parts[0].shape) for x in parts) or len(set(rests)) != 1:
        listed = ", ".join(str(list(x.shape)) for x in parts)
        raise TraceError(f"concatenate: shapes {listed} differ beside axis {along}{at_user_line()}")
    return join(parts, along)


concat = concatenate


def append(arr: Value, values: Value, axis: int | None = None) -> Value:
    """Values behind an array along an axis, both flattened without one."""
    return concatenate([arr, values], axis)


def join(parts: Sequence[Value], dim: int) -> Value:
    """Concatenated, in several steps where there are more parts than the op takes."""
    while len(parts) > MAX_CONCATENATED:
        starts = range(0, len(parts), MAX_CONCATENATED)
        parts = [b.concatenate(*parts[first : first + MAX_CONCATENATED], dim=dim) for first in starts]
    return b.concatenate(*parts, dim=dim)


def _together(arrays: Any, what: str, dtype: Any = None) -> list[Value]:
    """Arrays in their common dtype, each in its own shape."""
    if hasattr(arrays, "shape"):
        arrays = list(arrays)
    values = [b.as_array(x) for x in arrays]
    if not values:
        raise TraceError(f"{what} needs at least one array{at_user_line()}")
    name = promote([aval_of(x) for x in values])[0] if dtype is None else dtype
    return [b.cast(x, name) for x in values]


def stack(arrays: Any, axis: int = 0, out: None = None, dtype: Any = None) -> Value:
    """Arrays of one shape along a new axis."""
    refuse_out(out)
    parts = _together(arrays, "stack", dtype)
    for x in parts:
        if tuple(x.shape) != tuple(parts[0].shape):
            raise TraceError(f"stack: shapes {list(parts[0].shape)} and {list(x.shape)} differ{at_user_line()}")
    along = one_axis(axis, len(parts[0].shape) + 1, "stack")
    return join([expand_dims(x, along) for x in parts], along)


def _lifted(tup: Any, lift: Any) -> list[Value]:
    return [lift(x) for x in tup]


def vstack(tup: Any, dtype: Any = None) -> Value:
    """Arrays above each other; vectors are rows."""
    return concatenate(_lifted(tup, atleast_2d), 0, dtype)


def hstack(tup: Any, dtype: Any = None) -> Value:
    """Arrays beside each other; vectors one behind the other."""
    parts = _lifted(tup, atleast_1d)
    return concatenate(parts, 0 if len(parts[0].shape) == 1 else 1, dtype)


def dstack(tup: Any, dtype: Any = None) -> Value:
    """Arrays along the third axis."""
    return concatenate(_lifted(tup, atleast_3d), 2, dtype)


def column_stack(tup: Any) -> Value:
    """Vectors as columns beside matrices."""
    parts = [b.as_array(x) for x in tup]
    return concatenate([b.reshape(x, (prod(x.shape), 1)) if len(x.shape) < 2 else x for x in parts], 1)


# ---------------------------------------------------------------------------- split


def cut(x: Value, axis: int, start: int, limit: int, stride: int = 1) -> Value:
    """A range of one axis."""
    first, last, step = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    first[axis], last[axis], step[axis] = start, limit, stride
    return b.slice(x, first, last, step)


def split(ary: Value, indices_or_sections: Any, axis: int = 0) -> list[Value]:
    """Parts of an array: a number of equal ones, or those between indices.

    Raises
    ------
    TraceError
        If the axis does not divide into equal parts.
    """
    x = b.as_array(ary)
    along = one_axis(axis, len(x.shape), "split")
    if not isinstance(indices_or_sections, (tuple, list, np.ndarray)):
        sections = as_int(indices_or_sections, "the number of parts of split")
        if sections < 1 or x.shape[along] % sections:
            raise TraceError(
                f"split: axis {along} of shape {list(x.shape)} does not divide into {sections} parts; "
                f"array_split makes unequal ones{at_user_line()}"
            )
    return array_split(x, indices_or_sections, along)


def array_split(ary: Value, indices_or_sections: Any, axis: int = 0) -> list[Value]:
    """Parts of an array, the first ones longer where it does not divide evenly."""
    x = b.as_array(ary)
    along = one_axis(axis, len(x.shape), "array_split")
    length = x.shape[along]
    if isinstance(indices_or_sections, (tuple, list, np.ndarray)):
        places = [as_int(each, "an index of split") for each in indices_or_sections]
        ends = [min(max(each + length if each < 0 else each, 0), length) for each in places]
    else:
        sections = as_int(indices_or_sections, "the number of parts of array_split")
        each, longer = divmod(length, sections)
        ends = [(part + 1) * each + min(part + 1, longer) for part in range(sections - 1)]
    bounds = zip([0, *ends], [*ends, length], strict=True)
    return [cut(x, along, first, max(first, last)) for first, last in bounds]


def vsplit(ary: Value, indices_or_sections: Any) -> list[Value]:
    """Parts along the first axis."""
    return split(ary, indices_or_sections, 0)


def hsplit(ary: Value, indices_or_sections: Any) -> list[Value]:
    """Parts along the second axis, along the first of a vector."""
    return split(ary, indices_or_sections, 1 if ndim(ary) > 1 else 0)


# ---------------------------------------------------------------------------- repeat and turn


def tile(A: Value, reps: Any) -> Value:  # noqa: N803
    """The array repeated as a whole, ``reps`` times along each dim."""
    x, counts = b.as_array(A), as_shape(reps, "reps of tile")
    rank = max(len(x.shape), len(counts))
    sizes = (1,) * (rank - len(x.shape)) + tuple(x.shape)
    counts = (1,) * (rank - len(counts)) + counts
    wide = tuple(each for pair in zip(counts, sizes, strict=True) for each in pair)
    spread = b.broadcast(b.reshape(x, sizes), wide, tuple(range(1, 2 * rank, 2))) if rank else x
    return b.reshape(spread, [count * each for count, each in zip(counts, sizes, strict=True)])


def repeat(a: Value, repeats: Any, axis: int | None = None, *, total_repeat_length: int | None = None) -> Value:
    """Each element repeated: ``repeats`` times, or its own number of times (known when traced)."""
    x = b.as_array(a)
    x, along = (ravel(x), 0) if axis is None else (x, one_axis(axis, len(x.shape), "repeat"))
    if not isinstance(repeats, (tuple, list, np.ndarray)):
        count = as_int(repeats, "repeats")
        wide = (*x.shape[: along + 1], count, *x.shape[along + 1 :])
        spread = b.broadcast(x, wide, [dim for dim in range(len(wide)) if dim != along + 1])
        return b.reshape(spread, [*x.shape[:along], x.shape[along] * count, *x.shape[along + 1 :]])
    counts = [as_int(each, "each of repeats") for each in repeats]
    counts = counts * x.shape[along] if len(counts) == 1 else counts
    if len(counts) != x.shape[along]:
        raise TraceError(f"repeat: {len(counts)} counts for {x.shape[along]} elements{at_user_line()}")
    rows = np.repeat(np.arange(x.shape[along], dtype=np.int32), counts)
    return moveaxis(b.take(moveaxis(x, along, 0), rows), 0, along)


def flip(m: Value, axis: int | Sequence[int] | None = None) -> Value:
    """The elements in reverse order along axes."""
    x = b.as_array(m)
    return b.flip(x, dims=some_axes(axis, len(x.shape), "flip"))


def flipud(m: Value) -> Value:
    """The rows in reverse order."""
    return flip(m, 0)


def fliplr(m: Value) -> Value:
    """The columns in reverse order."""
    return flip(m, 1)


def rot90(m: Value, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Value:
    """Turned by ``k`` quarters in the plane of two axes."""
    first, second = axes
    quarters = k % 4
    if quarters == 0:
        return b.as_array(m)
    if quarters == 2:
        return flip(m, axes)
    turned = swapaxes(flip(m, second) if quarters == 1 else m, first, second)
    return turned if quarters == 1 else flip(turned, second)


def roll(a: Value, shift: Any, axis: Any = None) -> Value:
    """The elements moved along axes; what leaves at one end comes in at the other. Shifts are known when traced."""
    x = b.as_array(a)
    if axis is None:
        return b.reshape(_roll(ravel(x), as_int(shift, "the shift of roll"), 0), x.shape)
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    shifts = shift if isinstance(shift, (tuple, list)) else (shift,) * len(given)
    for distance, each in zip(shifts, given, strict=True):
        x = _roll(x, as_int(distance, "the shift of roll"), one_axis(each, len(x.shape), "roll"))
    return x


def _roll(x: Value, shift: int, axis: int) -> Value:
    length = x.shape[axis]
    start = -shift % length if length else 0
    return b.concatenate(cut(x, axis, start, length), cut(x, axis, 0, start), dim=axis) if start else x
