"""Views: operations of a traced step that Programs never hold, since a TensorSpec says the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from trainkernel.errors import ProgramError
from trainkernel.ops.entry import REQUIRED, Array, Attrs, Op, Shape, check_sizes

# ---------------------------------------------------------------------------- shapes


def _reshape_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    if prod(shapes[0]) != prod(attrs["shape"]):
        raise ProgramError(f"cannot reshape {list(shapes[0])} to {list(attrs['shape'])}")
    return (tuple(attrs["shape"]),)


def _transpose_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    dims = attrs["dims"]
    if sorted(dims) != list(range(len(shapes[0]))):
        raise ProgramError(f"dims {dims} are not a permutation of those of {list(shapes[0])}")
    return (tuple(shapes[0][dim] for dim in dims),)


def _broadcast_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    shape, dims = attrs["shape"], attrs["dims"]
    fits = len(dims) == len(shapes[0]) and all(
        0 <= dim < len(shape) and size in (1, shape[dim]) for size, dim in zip(shapes[0], dims, strict=True)
    )
    if not fits or list(dims) != sorted(set(dims)):
        raise ProgramError(f"cannot broadcast {list(shapes[0])} to {list(shape)} along dims {dims}")
    return (tuple(shape),)


def _slice_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    bounds = list(zip(shapes[0], attrs["start"], attrs["limit"], attrs["stride"], strict=True))
    if any(not (0 <= start <= limit <= size and stride >= 1) for size, start, limit, stride in bounds):
        raise ProgramError(f"slice {dict(attrs)} does not fit {list(shapes[0])}")
    return (tuple(-(-(limit - start) // stride) for _, start, limit, stride in bounds),)


# ---------------------------------------------------------------------------- references


def broadcast_array(x: Array, shape: Shape, dims: Sequence[int]) -> Array:
    """``x`` with its dims at ``dims`` of ``shape``, repeated along the others."""
    aligned = [1] * len(shape)
    for size, dim in zip(x.shape, dims, strict=True):
        aligned[dim] = size
    return np.broadcast_to(x.reshape(aligned), shape)


def _slices(attrs: Attrs) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in zip(attrs["start"], attrs["limit"], attrs["stride"], strict=True))


# ---------------------------------------------------------------------------- derivatives and batching


def _transpose_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    inverse = [0] * len(attrs["dims"])
    for place, dim in enumerate(attrs["dims"]):
        inverse[dim] = place
    return (b.transpose(cts[0], tuple(inverse)),)


def _broadcast_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    x = ins[0]
    kept = {dim for dim, size in zip(attrs["dims"], x.shape, strict=True) if size == attrs["shape"][dim]}
    reduced = tuple(dim for dim in range(len(attrs["shape"])) if dim not in kept)
    return (b.reshape(b.sum(cts[0], dims=reduced), x.shape),)


def _slice_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """The cotangent between zeros."""
    low, high, interior = [], [], []
    for size, start, stride, count in zip(ins[0].shape, attrs["start"], attrs["stride"], outs[0].shape, strict=True):
        span = (count - 1) * stride + 1 if count else 0
        low.append(start)
        high.append(size - start - span)
        interior.append(stride - 1)
    return (b.pad(cts[0], 0, low=tuple(low), high=tuple(high), interior=tuple(interior)),)


def _reshape_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    return b.reshape(ins[0], (size, *attrs["shape"]))


def _transpose_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    return b.transpose(ins[0], (0, *(dim + 1 for dim in attrs["dims"])))


def _broadcast_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    return b.broadcast(ins[0], (size, *attrs["shape"]), (0, *(dim + 1 for dim in attrs["dims"])))


def _slice_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    return b.slice(ins[0], (0, *attrs["start"]), (size, *attrs["limit"]), (1, *attrs["stride"]))


def _same_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    return (shapes[0],)


# ---------------------------------------------------------------------------- entries

_SIZES = (REQUIRED, check_sizes)


def _view(name: str, shape: Any, reference: Callable[..., Array], attrs: Sequence[str], vjp: Any, batch: Any) -> Op:
    return Op(
        name,
        "view",
        (1,),
        shape,
        lambda arrays, attrs, shapes: (reference(arrays[0], attrs),),
        attrs=dict.fromkeys(attrs, _SIZES),
        scalar_operands=False,
        vjp=vjp,
        batch=batch,
    )


VIEWS = (
    _view(
        "reshape",
        _reshape_shape,
        lambda x, attrs: x.reshape(attrs["shape"]),
        ("shape",),
        lambda b, cts, outs, ins, attrs: (b.reshape(cts[0], ins[0].shape),),
        _reshape_batch,
    ),
    _view(
        "transpose",
        _transpose_shape,
        lambda x, attrs: x.transpose(attrs["dims"]),
        ("dims",),
        _transpose_vjp,
        _transpose_batch,
    ),
    _view(
        "broadcast",
        _broadcast_shape,
        lambda x, attrs: broadcast_array(x, attrs["shape"], attrs["dims"]),
        ("shape", "dims"),
        _broadcast_vjp,
        _broadcast_batch,
    ),
    _view(
        "slice",
        _slice_shape,
        lambda x, attrs: x[_slices(attrs)],
        ("start", "limit", "stride"),
        _slice_vjp,
        _slice_batch,
    ),
    # The value itself, and a constant to derivatives.
    _view(
        "stop_gradient",
        _same_shape,
        lambda x, attrs: x,
        (),
        lambda b, cts, outs, ins, attrs: (None,),
        lambda b, ins, batched, attrs, size: b.stop_gradient(ins[0]),
    ),
)
