"""Indexed entries: pointwise operations that read their operands at other coordinates than their own.

They are evaluated inside their consumers like any pointwise operation, so a gather, a padded
border or a concatenation need not be stored. Indices outside their range are clamped to it: no
index can reach outside a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from trainkernel.errors import ProgramError
from trainkernel.ops.entry import (
    REQUIRED,
    Array,
    Attrs,
    Op,
    Shape,
    check_dim,
    check_dims,
    check_sizes,
    wrap_dim,
)

MAX_CONCATENATED = 256

# ---------------------------------------------------------------------------- shapes


def _iota_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    return ((),)


def _flip_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    for dim in attrs["dims"]:
        wrap_dim(dim, len(shapes[0]))
    return (shapes[0],)


def _pad_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    x, value = shapes
    low, high, interior = attrs["low"], attrs["high"], attrs["interior"]
    if value != ():
        raise ProgramError(f"the padding value must be a scalar, got shape {list(value)}")
    if not len(x) == len(low) == len(high) == len(interior):
        raise ProgramError(f"padding {low}, {high}, {interior} does not fit the rank of {list(x)}")
    sizes = zip(x, low, high, interior, strict=True)
    return (tuple(before + size + max(size - 1, 0) * gap + after for size, before, after, gap in sizes),)


def _concatenate_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    dim = wrap_dim(attrs["dim"], len(shapes[0]))
    for shape in shapes:
        if len(shape) != len(shapes[0]) or shape[:dim] + shape[dim + 1 :] != shapes[0][:dim] + shapes[0][dim + 1 :]:
            raise ProgramError(f"cannot concatenate {[list(s) for s in shapes]} along dim {dim}")
    return ((*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :]),)


def _take_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    x, indices = shapes
    if not x or (x[0] == 0 and prod(indices) * prod(x[1:])):
        raise ProgramError(f"cannot take rows of a tensor of shape {list(x)}")
    return ((*indices, *x[1:]),)


def _check_starts(x: Shape, window: Shape, starts: Sequence[Shape]) -> None:
    if len(window) != len(x) or any(size > room for size, room in zip(window, x, strict=False)):
        raise ProgramError(f"a window {list(window)} does not fit a tensor of shape {list(x)}")
    if len(starts) != len(x) or any(start != () for start in starts):
        raise ProgramError(f"a tensor of rank {len(x)} needs as many scalar starts, got {[list(s) for s in starts]}")


def _dynamic_slice_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    _check_starts(shapes[0], tuple(attrs["sizes"]), shapes[1:])
    return (tuple(attrs["sizes"]),)


def _dynamic_update_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    _check_starts(shapes[0], shapes[1], shapes[2:])
    return (shapes[0],)


def _random_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    key = shapes[0]
    if not key or key[-1] != 2:
        raise ProgramError(f"a key is two uint32 words, its shape ends in 2; got {list(key)}")
    if len(shapes) == 2 and shapes[1] != key[:-1]:
        raise ProgramError(f"one counter per key is needed: shape {list(key[:-1])}, got {list(shapes[1])}")
    return ((*key[:-1], *attrs["shape"]),)


# ---------------------------------------------------------------------------- references


def _iota_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (np.broadcast_to(np.arange(shapes[0][-1]) if shapes[0] else 0, shapes[0]),)


def _flip_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (np.flip(arrays[0], attrs["dims"]),)


def _pad_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    x, value = arrays
    result = np.full(_pad_shape((x.shape, ()), attrs)[0], value, x.dtype)
    steps = zip(attrs["low"], x.shape, attrs["interior"], strict=True)
    result[tuple(slice(low, low + size * (gap + 1), gap + 1) for low, size, gap in steps)] = x
    return (result,)


def _take_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    x, indices = arrays
    if not prod(shapes[0]):
        return (np.zeros(shapes[0], x.dtype),)
    return (x[np.clip(indices, 0, x.shape[0] - 1).astype(np.int64)],)


def _window(x: Shape, window: Shape, starts: Sequence[Array]) -> tuple[slice, ...]:
    first = [int(np.clip(start, 0, room - size)) for start, room, size in zip(starts, x, window, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(first, window, strict=True))


def _dynamic_slice_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (arrays[0][_window(arrays[0].shape, attrs["sizes"], arrays[1:])],)


def _dynamic_update_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    x, update, *starts = arrays
    result = np.array(x)
    result[_window(x.shape, update.shape, starts)] = update
    return (result,)


def philox(counter: Sequence[Array], key: Sequence[Array], rounds: int = 10) -> list[Array]:
    """Philox 4x32 of uint32 words held in uint64 arrays (Salmon et al., SC 2011)."""
    low32 = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    words, (k0, k1) = list(counter), key
    for _ in range(rounds):
        first = np.uint64(0xD2511F53) * words[0]
        second = np.uint64(0xCD9E8D57) * words[2]
        words = [
            (second >> shift) ^ words[1] ^ k0,
            second & low32,
            (first >> shift) ^ words[3] ^ k1,
            first & low32,
        ]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low32, (k1 + np.uint64(0xBB67AE85)) & low32
    return words


def _random_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    """Element ``i`` of a key's bits is word ``i % 4`` of the block whose counter is ``i // 4``."""
    word = np.uint64(0xFFFFFFFF)
    key = arrays[0].astype(np.uint64) & word
    lead, count = key.shape[:-1], prod(attrs["shape"])
    element = np.arange(count, dtype=np.uint64)
    block = np.broadcast_to(element >> np.uint64(2), (*lead, count))
    counter = arrays[1].astype(np.uint64) & word if len(arrays) == 2 else np.zeros(lead, np.uint64)
    words = philox(
        (
            block & word,
            block >> np.uint64(32),
            np.broadcast_to(counter[..., None], block.shape),
            np.full(block.shape, attrs["stream"], np.uint64),
        ),
        (key[..., :1], key[..., 1:]),
    )
    place = np.broadcast_to((element & np.uint64(3)).astype(np.int64), (1, *block.shape))
    bits = np.take_along_axis(np.stack(words), place, 0)[0].astype(np.int64)
    return (bits.reshape((*lead, *attrs["shape"])),)


# ---------------------------------------------------------------------------- derivatives


def _flip_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return (b.flip(cts[0], dims=attrs["dims"]),)


def _pad_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    x = ins[0]
    stride = tuple(gap + 1 for gap in attrs["interior"])
    limit = [
        low + (size - 1) * step + 1 if size else low
        for low, size, step in zip(attrs["low"], x.shape, stride, strict=True)
    ]
    by_x = b.slice(cts[0], attrs["low"], tuple(limit), stride)
    return by_x, b.sum(cts[0]) - b.sum(by_x)


def _concatenate_vjp(
    b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs
) -> Sequence[Any]:
    shape = outs[0].shape
    dim = wrap_dim(attrs["dim"], len(shape))
    result, first = [], 0
    for x in ins:
        start, limit = [0] * len(shape), list(shape)
        start[dim], limit[dim] = first, first + x.shape[dim]
        first += x.shape[dim]
        result.append(b.slice(cts[0], tuple(start), tuple(limit), (1,) * len(shape)))
    return result


def _take_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    x, indices = ins
    count = prod(indices.shape)
    last = x.shape[0] - 1
    clamped = b.minimum(b.maximum(b.reshape(indices, (count,)), 0), last)
    return b.scatter_add(clamped, b.reshape(cts[0], (count, *x.shape[1:])), size=x.shape[0]), None


def _dynamic_slice_vjp(
    b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs
) -> Sequence[Any]:
    x, *starts = ins
    return (b.dynamic_update(b.full(x.shape, 0, x.dtype), cts[0], *starts), *(None for _ in starts))


def _dynamic_update_vjp(
    b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs
) -> Sequence[Any]:
    _, update, *starts = ins
    by_x = b.dynamic_update(cts[0], b.full(update.shape, 0, update.dtype), *starts)
    return by_x, b.dynamic_slice(cts[0], *starts, sizes=update.shape), *(None for _ in starts)


def _no_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return (None,) * len(ins)


# ---------------------------------------------------------------------------- batching


def _spread(b: Any, x: Any, is_batched: bool, size: int) -> Any:
    """The operand with the batch in front, whether it had one or not."""
    if is_batched:
        return x
    return b.broadcast(x, (size, *x.shape), tuple(range(1, len(x.shape) + 1)))


def _flip_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    ndim = len(ins[0].shape) - 1
    return b.flip(ins[0], dims=tuple(wrap_dim(dim, ndim) + 1 for dim in attrs["dims"]))


def _pad_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    x, value = _spread(b, ins[0], batched[0], size), ins[1]
    sides = {key: (0, *attrs[key]) for key in ("low", "high", "interior")}
    if not batched[1]:
        return b.pad(x, value, **sides)
    inside = b.pad(b.full(x.shape, 1, "bool"), 0, **sides)
    padded = b.pad(x, 0, **sides)
    return b.where(inside, padded, b.broadcast(value, padded.shape, (0,)))


def _concatenate_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    operands = [_spread(b, x, is_batched, size) for x, is_batched in zip(ins, batched, strict=True)]
    return b.concatenate(*operands, dim=wrap_dim(attrs["dim"], len(operands[0].shape) - 1) + 1)


def _take_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    """The examples' tables lie one behind the other in one table."""
    x, indices = ins
    if not batched[0]:
        return b.take(x, indices)
    if not batched[1]:
        rows = b.transpose(x, (1, 0, *range(2, len(x.shape))))
        taken = b.take(rows, indices)
        lead = len(indices.shape)
        return b.transpose(taken, (lead, *range(lead), *range(lead + 1, len(taken.shape))))
    length = x.shape[1]
    clamped = b.minimum(b.maximum(indices, 0), length - 1)
    if len(x.shape) == 2 and len(indices.shape) == 1 and b.is_compared(x, 1):
        return b.reshape(b.pick(x, b.reshape(clamped, (size, 1)), 1), (size,))
    first = b.broadcast(b.iota(size, indices.dtype) * length, indices.shape, (0,))
    return b.take(b.reshape(x, (size * length, *x.shape[2:])), clamped + first)


def _window_index(b: Any, starts: Sequence[Any], batched: Sequence[bool], x: Shape, window: Shape, size: int) -> Any:
    """Flat indices, in each example's own tensor, of the window that starts at its starts."""
    shape = (size, *window)
    total = b.full(shape, 0, "int32")
    stride = prod(x)
    for dim, (start, is_batched) in enumerate(zip(starts, batched, strict=True)):
        stride //= max(x[dim], 1)
        clamped = b.minimum(b.maximum(b.cast(start, "int32"), 0), x[dim] - window[dim])
        along = b.broadcast(clamped, shape, (0,) if is_batched else ())
        along = along + b.broadcast(b.iota(window[dim], "int32"), shape, (dim + 1,))
        total = total + along * stride
    return total


def _dynamic_slice_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    x, *starts = ins
    if not any(batched[1:]):
        return b.dynamic_slice(x, b.full((), 0, "int32"), *starts, sizes=(size, *attrs["sizes"]))
    if tuple(attrs["sizes"][1:]) == tuple(x.shape[2 if batched[0] else 1 :]) and attrs["sizes"][0] == 1 and batched[1]:
        rows = _take_batch(b, (x, b.cast(starts[0], "int32")), (batched[0], True), attrs, size)
        return b.reshape(rows, (size, *attrs["sizes"]))
    x = _spread(b, x, batched[0], size)
    index = _window_index(b, starts, batched[1:], x.shape[1:], tuple(attrs["sizes"]), size)
    example = b.broadcast(b.iota(size, "int32") * prod(x.shape[1:]), index.shape, (0,))
    return b.take(b.reshape(x, (prod(x.shape),)), index + example)


def _dynamic_update_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    x, update, *starts = ins
    if not any(batched[2:]):
        x, update = (_spread(b, v, flag, size) for v, flag in zip((x, update), batched[:2], strict=True))
        return b.dynamic_update(x, update, b.full((), 0, "int32"), *starts)
    x = _spread(b, x, batched[0], size)
    shape, window = x.shape, (update.shape[1:] if batched[1] else update.shape)
    inside, place, stride = b.full(shape, 1, "bool"), b.full(shape, 0, "int32"), prod(window)
    for dim, (start, is_batched) in enumerate(zip(starts, batched[2:], strict=True)):
        stride //= max(window[dim], 1)
        clamped = b.minimum(b.maximum(b.cast(start, "int32"), 0), shape[dim + 1] - window[dim])
        own = b.broadcast(b.iota(shape[dim + 1], "int32"), shape, (dim + 1,))
        own = own - b.broadcast(clamped, shape, (0,) if is_batched else ())
        here = b.bitwise_and(b.compare(own, 0, "ge"), b.compare(own, window[dim], "lt"))
        inside = b.bitwise_and(inside, here)
        place = place + own * stride
    if batched[1]:
        place = place + b.broadcast(b.iota(size, "int32") * prod(window), shape, (0,))
    taken = b.take(b.reshape(update, (prod(update.shape),)), b.where(inside, place, 0))
    return b.where(inside, taken, x)


def _random_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    operands = [_spread(b, x, flag, size) for x, flag in zip(ins, batched, strict=True)]
    return b.random_bits(*operands, shape=attrs["shape"], stream=attrs["stream"])


# ---------------------------------------------------------------------------- entries

_SIZES = (REQUIRED, check_sizes)


def _check_word(value: Any) -> str | None:
    message = check_dim(value)
    return message if message is not None or 0 <= value < 2**32 else f"must fit 32 bits, got {value!r}"


def _indexed(name: str, num_inputs: Sequence[int], shape: Any, reference: Any, **rest: Any) -> Op:
    rest.setdefault("scalar_operands", False)
    return Op(name, "pointwise", num_inputs, shape, reference, indexed=True, **rest)


INDEXED = (
    # The last coordinate; of a float output the exact integer.
    _indexed("iota", (0,), _iota_shape, _iota_reference, vjp=_no_vjp, cost=1),
    _indexed(
        "flip",
        (1,),
        _flip_shape,
        _flip_reference,
        attrs={"dims": (REQUIRED, check_dims)},
        vjp=_flip_vjp,
        batch=_flip_batch,
    ),
    _indexed(
        "pad",
        (2,),
        _pad_shape,
        _pad_reference,
        attrs={"low": _SIZES, "high": _SIZES, "interior": _SIZES},
        scalar_operands=True,
        vjp=_pad_vjp,
        batch=_pad_batch,
        cost=4,
    ),
    _indexed(
        "concatenate",
        range(1, MAX_CONCATENATED + 1),
        _concatenate_shape,
        lambda arrays, attrs, shapes: (np.concatenate(arrays, wrap_dim(attrs["dim"], arrays[0].ndim)),),
        attrs={"dim": (REQUIRED, check_dim)},
        vjp=_concatenate_vjp,
        batch=_concatenate_batch,
        cost=4,
    ),
    _indexed("take", (2,), _take_shape, _take_reference, data_operands=(0,), vjp=_take_vjp, batch=_take_batch, cost=4),
    _indexed(
        "dynamic_slice",
        range(1, 34),
        _dynamic_slice_shape,
        _dynamic_slice_reference,
        scalar_operands=True,
        attrs={"sizes": _SIZES},
        data_operands=(0,),
        vjp=_dynamic_slice_vjp,
        batch=_dynamic_slice_batch,
        cost=4,
    ),
    _indexed(
        "dynamic_update",
        range(2, 35),
        _dynamic_update_shape,
        _dynamic_update_reference,
        scalar_operands=True,
        data_operands=(0, 1),
        vjp=_dynamic_update_vjp,
        batch=_dynamic_update_batch,
        cost=6,
    ),
    # Philox 4x32-10: element i is word i % 4 of the block with counter (i // 4, counter, stream).
    _indexed(
        "random_bits",
        (1, 2),
        _random_shape,
        _random_reference,
        attrs={"shape": _SIZES, "stream": (REQUIRED, _check_word)},
        accepts="int",
        vjp=_no_vjp,
        batch=_random_batch,
        cost=60,
    ),
)
