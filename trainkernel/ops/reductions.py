"""Reductions and scans: results of many elements each, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    check_flag,
    check_optional_dims,
    reduced_dims,
    reduction_shape,
    wrap_dim,
)

_DIMS = {"dims": (None, check_optional_dims)}

# ---------------------------------------------------------------------------- shapes


def _extremum_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    dims = reduced_dims(shapes[0], attrs)
    if prod(shapes[0][dim] for dim in dims) == 0:
        raise ProgramError(f"the maximum or minimum of no elements is undefined: shape {list(shapes[0])}, dims {dims}")
    return reduction_shape(shapes, attrs)


def _stats_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    return _extremum_shape(shapes, attrs) * 2


def _moments_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    return reduction_shape(shapes, attrs) * 2


def _scatter_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    indices, updates = shapes
    if len(indices) != 1 or updates[:1] != indices:
        raise ProgramError(
            f"scatter_add needs indices [k] and updates [k, ...], got {list(indices)} and {list(updates)}"
        )
    return ((attrs["size"], *updates[1:]),)


def _cumsum_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    wrap_dim(attrs["dim"], len(shapes[0]))
    return (shapes[0],)


# ---------------------------------------------------------------------------- references


def _reduce(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    return lambda arrays, attrs, shapes: (function(arrays[0], axis=reduced_dims(arrays[0].shape, attrs)),)


def _mean_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    dims = reduced_dims(arrays[0].shape, attrs)
    count = np.float64(prod(arrays[0].shape[dim] for dim in dims))
    return (np.asarray(np.sum(arrays[0], axis=dims)) / count,)


def _stats_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array, Array]:
    dims = reduced_dims(arrays[0].shape, attrs)
    # A row's maximum that is infinite must not turn the row's sum into NaN by inf - inf.
    largest = np.max(arrays[0], axis=dims, keepdims=True)
    shifted = np.where(arrays[0] == largest, 0.0, arrays[0] - largest)
    return np.max(arrays[0], axis=dims), np.sum(np.exp(shifted), axis=dims)


def _moments_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array, Array]:
    dims = reduced_dims(arrays[0].shape, attrs)
    count = np.float64(prod(arrays[0].shape[dim] for dim in dims))
    mean = np.asarray(np.sum(arrays[0], axis=dims, keepdims=True)) / count
    square = np.asarray(np.sum((arrays[0] - mean) ** 2, axis=dims)) / count
    return mean, square


def _cumsum_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    dim = wrap_dim(attrs["dim"], arrays[0].ndim)
    if not attrs.get("reverse", False):
        return (np.cumsum(arrays[0], axis=dim),)
    return (np.flip(np.cumsum(np.flip(arrays[0], dim), axis=dim), dim),)


def _scatter_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    indices, updates = arrays
    result = np.zeros(shapes[0], updates.dtype)
    inside = (indices >= 0) & (indices < attrs["size"])
    np.add.at(result, indices[inside].astype(np.int64), updates[inside])
    return (result,)


# ---------------------------------------------------------------------------- derivatives and batching


def _spread(b: Any, value: Any, x: Any, attrs: Attrs) -> Any:
    """A reduction's result (or its cotangent) at every element that was reduced."""
    dims = reduced_dims(x.shape, attrs)
    return b.broadcast(value, x.shape, tuple(dim for dim in range(len(x.shape)) if dim not in dims))


def _count(x: Any, attrs: Attrs) -> int:
    """Elements that share a cotangent; of nothing 1, because no element asks."""
    count: int = prod(x.shape[dim] for dim in reduced_dims(x.shape, attrs))
    return max(1, count)


def _sum_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return (_spread(b, cts[0], ins[0], attrs),)


def _mean_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return (_spread(b, cts[0] / _count(ins[0], attrs), ins[0], attrs),)


def _extremum_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """In equal parts to all elements that tie, as in JAX."""
    x = ins[0]
    ties = b.cast(b.compare(x, _spread(b, outs[0], x, attrs), "eq"), cts[0].dtype)
    share = cts[0] / b.sum(ties, dims=reduced_dims(x.shape, attrs))
    return (ties * _spread(b, share, x, attrs),)


def _prod_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """The product of the other elements; right to first order where one element is zero."""
    x, dims = ins[0], reduced_dims(ins[0].shape, attrs)
    zero = b.compare(x, 0, "eq")
    rest = b.prod(b.where(zero, 1, x), dims=dims)
    zeros = _spread(b, b.sum(b.cast(zero, x.dtype), dims=dims), x, attrs)
    others = _spread(b, rest, x, attrs) / b.where(zero, 1, x)
    keep = b.where(zero, b.compare(zeros, 1, "eq"), b.compare(zeros, 0, "eq"))
    return (_spread(b, cts[0], x, attrs) * b.where(keep, others, 0),)


def _stats_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """The maximum is a shift that softmax and logsumexp do not depend on: it counts as a constant."""
    if cts[1] is None:
        return (None,)
    x = ins[0]
    return (_spread(b, cts[1], x, attrs) * b.exp(x - _spread(b, outs[0], x, attrs)),)


def _moments_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    x, count = ins[0], _count(ins[0], attrs)
    result = None if cts[0] is None else _spread(b, cts[0] / count, x, attrs)
    if cts[1] is not None:
        by_square = _spread(b, cts[1] * (2 / count), x, attrs) * (x - _spread(b, outs[0], x, attrs))
        result = by_square if result is None else result + by_square
    return (result,)


def _cumsum_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return (b.cumsum(cts[0], dim=attrs["dim"], reverse=not attrs.get("reverse", False)),)


def _scatter_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    inside = b.bitwise_and(b.compare(ins[0], 0, "ge"), b.compare(ins[0], attrs["size"], "lt"))
    rows = b.take(cts[0], ins[0])
    return None, b.where(b.broadcast(inside, rows.shape, (0,)), rows, 0)


def _reduction_batch(name: str) -> Callable[..., Any]:
    def rule(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
        dims = reduced_dims(ins[0].shape[1:], attrs)
        return getattr(b, name)(ins[0], dims=tuple(dim + 1 for dim in dims))

    return rule


def _cumsum_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    dim = wrap_dim(attrs["dim"], len(ins[0].shape) - 1) + 1
    return b.cumsum(ins[0], dim=dim, reverse=attrs.get("reverse", False))


def _scatter_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    """The examples' tables lie one behind the other in one table, unless they share their indices."""
    indices, updates = ins
    length = attrs["size"]
    if not batched[0]:
        rest = tuple(range(2, len(updates.shape)))
        together = b.scatter_add(indices, b.transpose(updates, (1, 0, *rest)), size=length)
        return b.transpose(together, (1, 0, *rest))
    if not batched[1]:
        updates = b.broadcast(updates, (size, *updates.shape), tuple(range(1, len(updates.shape) + 1)))
    inside = b.bitwise_and(b.compare(indices, 0, "ge"), b.compare(indices, length, "lt"))
    first = b.broadcast(b.iota(size, indices.dtype) * length, indices.shape, (0,))
    place = b.where(inside, indices + first, -1)
    rest = updates.shape[2:]
    merged = b.scatter_add(
        b.reshape(place, (prod(indices.shape),)), b.reshape(updates, (prod(indices.shape), *rest)), size=size * length
    )
    return b.reshape(merged, (size, length, *rest))


# ---------------------------------------------------------------------------- entries


def _check_size(value: Any) -> str | None:
    message = check_dim(value)
    return message if message is not None or value >= 0 else f"must be an int >= 0, got {value!r}"


def _reduction(name: str, shape: Any, reference: Any, vjp: Any, **rest: Any) -> Op:
    batch = _reduction_batch(name)
    return Op(
        name,
        "reduction",
        (1,),
        shape,
        reference,
        attrs=_DIMS,
        scalar_operands=False,
        vjp=vjp,
        batch=batch,
        **rest,
    )


REDUCTIONS = (
    _reduction("sum", reduction_shape, _reduce(np.sum), _sum_vjp),
    _reduction("mean", reduction_shape, _mean_reference, _mean_vjp, accepts="float"),
    _reduction("max", _extremum_shape, _reduce(np.max), _extremum_vjp),
    _reduction("min", _extremum_shape, _reduce(np.min), _extremum_vjp),
    _reduction("prod", reduction_shape, _reduce(np.prod), _prod_vjp, sample=(0.5, 1.5)),
    _reduction("softmax_stats", _stats_shape, _stats_reference, _stats_vjp, accepts="float", max_ulps=4, num_outputs=2),
    _reduction("moments", _moments_shape, _moments_reference, _moments_vjp, accepts="float", max_ulps=4, num_outputs=2),
    Op(
        "scatter_add",
        "reduction",
        (2,),
        _scatter_shape,
        _scatter_reference,
        attrs={"size": (REQUIRED, _check_size)},
        scalar_operands=False,
        data_operands=(1,),
        vjp=_scatter_vjp,
        batch=_scatter_batch,
    ),
    Op(
        "cumsum",
        "scan",
        (1,),
        _cumsum_shape,
        _cumsum_reference,
        attrs={"dim": (REQUIRED, check_dim), "reverse": (False, check_flag)},
        scalar_operands=False,
        vjp=_cumsum_vjp,
        batch=_cumsum_batch,
    ),
)
