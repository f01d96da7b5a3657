"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainkernel.errors import ProgramError
from trainkernel.ops.entry import NUMBER, Array, Attrs, Op, Shape, broadcasts_to

# ---------------------------------------------------------------------------- shapes


def _mm_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    a, b = shapes[-2:]
    if len(a) != 2 or len(b) != 2 or a[1] != b[0]:
        raise ProgramError(f"a matrix product needs shapes [m,k] and [k,n], got {list(a)} and {list(b)}")
    return ((a[0], b[1]),)


def _addmm_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    result = _mm_shape(shapes, attrs)
    if not broadcasts_to(shapes[0], result[0]):
        raise ProgramError(f"bias of shape {list(shapes[0])} does not broadcast to {list(result[0])}")
    return result


def _bmm_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    a, b = shapes
    if len(a) != 3 or len(b) != 3 or a[0] != b[0] or a[2] != b[1]:
        raise ProgramError(f"a batched product needs shapes [b,m,k] and [b,k,n], got {list(a)} and {list(b)}")
    return ((a[0], a[1], b[2]),)


# ---------------------------------------------------------------------------- references


def _product(a: Array, b: Array) -> Array:
    return np.matmul(a, b) if a.shape[-1] else np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)


def _mm_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (_product(arrays[0], arrays[1]),)


def _addmm_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    bias, a, b = arrays
    alpha, beta = attrs.get("alpha", 1), attrs.get("beta", 1)
    result = np.zeros(shapes[0], a.dtype) if alpha == 0 else alpha * _product(a, b)
    return (result if beta == 0 else result + beta * np.broadcast_to(bias, shapes[0]),)


# ---------------------------------------------------------------------------- derivatives and batching


def _swap(b: Any, x: Any) -> Any:
    """The last two dims exchanged."""
    ndim = len(x.shape)
    return b.transpose(x, (*range(ndim - 2), ndim - 1, ndim - 2))


def _mm_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return b.mm(cts[0], _swap(b, ins[1])), b.mm(_swap(b, ins[0]), cts[0])


def _bmm_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return b.bmm(cts[0], _swap(b, ins[1])), b.bmm(_swap(b, ins[0]), cts[0])


def _mm_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    """An operand that all examples share makes one larger product of the other."""
    x, y = ins
    if batched[0] and batched[1]:
        return b.bmm(x, y)
    if batched[0]:
        _, m, k = x.shape
        return b.reshape(b.mm(b.reshape(x, (size * m, k)), y), (size, m, y.shape[1]))
    _, k, n = y.shape
    wide = b.reshape(b.transpose(y, (1, 0, 2)), (k, size * n))
    return b.transpose(b.reshape(b.mm(x, wide), (x.shape[0], size, n)), (1, 0, 2))


def _bmm_batch(b: Any, ins: Sequence[Any], batched: Sequence[bool], attrs: Attrs, size: int) -> Any:
    merged = []
    for operand, is_batched in zip(ins, batched, strict=True):
        if not is_batched:
            shape = (size, *operand.shape)
            operand = b.broadcast(operand, shape, tuple(range(1, len(shape))))
        merged.append(b.reshape(operand, (size * operand.shape[1], *operand.shape[2:])))
    result = b.bmm(*merged)
    return b.reshape(result, (size, result.shape[0] // size if size else 0, *result.shape[1:]))


PRODUCTS = (
    Op("mm", "product", (2,), _mm_shape, _mm_reference, scalar_operands=False, vjp=_mm_vjp, batch=_mm_batch),
    Op("bmm", "product", (2,), _bmm_shape, _mm_reference, scalar_operands=False, vjp=_bmm_vjp, batch=_bmm_batch),
    Op(
        "addmm",
        "product",
        (3,),
        _addmm_shape,
        _addmm_reference,
        attrs={"alpha": NUMBER["alpha"], "beta": NUMBER["beta"]},
        constants=("alpha", "beta"),
        scalar_operands=False,
    ),
)
