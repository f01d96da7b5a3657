"""Products of arrays: sums over dims that two arrays share, on the matrix products of the table.

Dims have labels. ``contract`` sums over the labels that both operands have and the result does
not; everything here and ``einsum`` says which those are. Transposes and reshapes are views. A
matrix times a vector is a matrix product with one row or column, which ``vmap`` over the vector
makes one larger product; where neither operand has dims of its own it is a sum of products.

``precision`` is taken as JAX takes it and changes nothing: float32 products are float32.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int, one_axis, refuse_out, some_axes
from trainkernel.numpy.indexing import get_item
from trainkernel.numpy.shapes import moveaxis, stack
from trainkernel.promotion import promote
from trainkernel.trace import at_user_line, aval_of

Value = Any
Labels = Sequence[Hashable]

__all__ = ["cross", "dot", "inner", "kron", "matmul", "matvec", "outer", "tensordot", "vdot", "vecdot", "vecmat"]

_WIDE = {"float16": "float32", "bfloat16": "float32", "bool": "int32"}


# ---------------------------------------------------------------------------- the product of labelled arrays


def contract(x: Value, x_labels: Labels, y: Value, y_labels: Labels, labels: Labels, dtype: str) -> Value:
    """The product of two arrays, summed over the labels that both have and the result does not.

    Parameters
    ----------
    x, y : array
        Of the dtype in which they are to be multiplied; no label twice in one of them.
    x_labels, y_labels, labels : sequence
        One label for each dim, of the operands and of the result. A label of one operand alone is
        one of the result.
    dtype : str
        Of the result; sums are at least float32.
    """
    shared = [label for label in x_labels if label in y_labels]
    batch = [label for label in shared if label in labels]
    summed = [label for label in shared if label not in labels]
    x_own = [label for label in x_labels if label not in shared]
    y_own = [label for label in y_labels if label not in shared]
    if summed and (x_own or y_own):
        first = _arranged(x, x_labels, (batch, x_own, summed))
        second = _arranged(y, y_labels, (batch, summed, y_own))
        result = _matrix_product(first, second, dtype)
        sizes = dict(zip(x_labels, x.shape, strict=True)) | dict(zip(y_labels, y.shape, strict=True))
        result = b.reshape(result, [sizes[label] for label in (*batch, *x_own, *y_own)])
    else:
        order = [*batch, *x_own, *y_own, *summed]
        result = _sum_of_products(_aligned(x, x_labels, order), _aligned(y, y_labels, order), len(summed), dtype)
    place = [*batch, *x_own, *y_own]
    return b.transpose(result, [place.index(label) for label in labels])


def _arranged(x: Value, labels: Labels, groups: Sequence[Labels]) -> Value:
    """The array with one dim for each group of labels."""
    sizes = dict(zip(labels, x.shape, strict=True))
    moved = b.transpose(x, [list(labels).index(label) for group in groups for label in group])
    return b.reshape(moved, [prod(sizes[label] for label in group) for group in groups])


def _matrix_product(x: Value, y: Value, dtype: str) -> Value:
    """Batched, unless the batch is one."""
    is_bool = aval_of(x).dtype == "bool"
    if is_bool:
        x, y = b.cast(x, "int32"), b.cast(y, "int32")
    name = "int32" if is_bool else dtype
    if x.shape[0] == 1:
        result = b.mm(b.reshape(x, x.shape[1:]), b.reshape(y, y.shape[1:]), dtype=name)
    else:
        result = b.bmm(x, y, dtype=name)
    return b.cast(result, dtype)


def _aligned(x: Value, labels: Labels, order: Labels) -> Value:
    """The array with a dim for each label of ``order``, of size 1 for those that it lacks."""
    own = [label for label in order if label in labels]
    moved = b.transpose(x, [list(labels).index(label) for label in own])
    sizes = dict(zip(own, moved.shape, strict=True))
    return b.reshape(moved, [sizes.get(label, 1) for label in order])


def _sum_of_products(x: Value, y: Value, num_summed: int, dtype: str) -> Value:
    wide = _WIDE.get(aval_of(x).dtype, aval_of(x).dtype) if num_summed else aval_of(x).dtype
    first, second = b.together((b.cast(x, wide), b.cast(y, wide)))
    product = (b.bitwise_and if wide == "bool" else b.mul)(first, second)
    rank = len(product.shape)
    return b.cast(b.sum(product, dims=tuple(range(rank - num_summed, rank))), dtype)


def factors(arrays: Sequence[Any], preferred_element_type: Any) -> tuple[list[Value], str]:
    """Operands in their common dtype, and the dtype of their product."""
    values = [b.as_array(x) for x in arrays]
    common = promote([aval_of(x) for x in values])[0]
    dtype = common if preferred_element_type is None else b.dtype_name(preferred_element_type)
    return [b.cast(x, common) for x in values], dtype


# ---------------------------------------------------------------------------- matmul


def matmul(a: Value, b: Value, *, precision: Any = None, preferred_element_type: Any = None) -> Value:
    """The matrix product of the last two dims; dims before them broadcast, and vectors are rows or columns.

    Parameters
    ----------
    a, b : array
        ``[..., m, k]`` and ``[..., k, n]``, or vectors of k.
    preferred_element_type : dtype, optional
        Of the result.

    Raises
    ------
    TraceError
        If the shapes do not fit.
    """
    (x, y), dtype = factors((a, b), preferred_element_type)
    x_shape, y_shape = tuple(x.shape), tuple(y.shape)
    if not x_shape or not y_shape or x_shape[-1] != y_shape[-2 if len(y_shape) > 1 else 0]:
        raise _misfit("matmul", x_shape, y_shape, "[..., m, k] and [..., k, n] are needed")
    x_labels: list[Hashable] = ["k"] if len(x_shape) == 1 else [*_batch_labels(x_shape), "m", "k"]
    y_labels: list[Hashable] = ["k"] if len(y_shape) == 1 else [*_batch_labels(y_shape), "k", "n"]
    x, x_labels, y, y_labels = _without_ones(x, x_labels, y, y_labels)
    batch = _result_batch(x_shape[:-2], y_shape[:-2])
    kept = [label for label in (*x_labels, *y_labels) if isinstance(label, int)]
    labels = [*sorted(set(kept)), *(label for label in ("m", "n") if label in x_labels or label in y_labels)]
    product = contract(x, x_labels, y, y_labels, labels, dtype)
    matrix = [size for size, has in ((x_shape[-2:][0], len(x_shape) > 1), (y_shape[-1], len(y_shape) > 1)) if has]
    return _reshape(product, [*batch, *matrix])


def _reshape(x: Value, shape: Sequence[int]) -> Value:
    return b.reshape(x, shape)


def _batch_labels(shape: Sequence[int]) -> list[Hashable]:
    """Dims before the matrix, counted from it: -1 is the nearest."""
    return list(range(2 - len(shape), 0))


def _result_batch(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    rank = max(len(first), len(second))
    pairs = zip((1,) * (rank - len(first)) + tuple(first), (1,) * (rank - len(second)) + tuple(second), strict=True)
    return tuple(y if x == 1 else x for x, y in pairs)


def _without_ones(
    x: Value, x_labels: list[Hashable], y: Value, y_labels: list[Hashable]
) -> tuple[Value, list[Hashable], Value, list[Hashable]]:
    """Operands without the batch dims of size 1, along which they broadcast."""
    sizes: dict[Hashable, int] = {}
    for operand, labels in ((x, x_labels), (y, y_labels)):
        for label, size in zip(labels, operand.shape, strict=True):
            if isinstance(label, int) and size != 1 and sizes.setdefault(label, size) != size:
                raise _misfit("matmul", x.shape, y.shape, "the dims before the matrices do not broadcast")
    results = []
    for operand, labels in ((x, x_labels), (y, y_labels)):
        kept = [
            (label, size)
            for label, size in zip(labels, operand.shape, strict=True)
            if not isinstance(label, int) or size != 1
        ]
        results += [b.reshape(operand, [size for _, size in kept]), [label for label, _ in kept]]
    return results[0], results[1], results[2], results[3]


def _misfit(what: str, first: Sequence[int], second: Sequence[int], needed: str) -> TraceError:
    return TraceError(f"{what}: shapes {list(first)} and {list(second)} do not fit: {needed}{at_user_line()}")


# ---------------------------------------------------------------------------- other products


def dot_general(
    lhs: Value,
    rhs: Value,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Value:
    """A product summed over any dims, with any dims as a batch.

    Parameters
    ----------
    lhs, rhs : array
    dimension_numbers : ((lhs_summed, rhs_summed), (lhs_batch, rhs_batch))

    Returns
    -------
    array
        The batch dims, then the other dims of ``lhs``, then those of ``rhs``.
    """
    (x, y), dtype = factors((lhs, rhs), preferred_element_type)
    (x_summed, y_summed), (x_batch, y_batch) = dimension_numbers
    x_labels, y_labels = [("x", d) for d in range(len(x.shape))], [("y", d) for d in range(len(y.shape))]
    pairs = [*zip(x_batch, y_batch, strict=True), *zip(x_summed, y_summed, strict=True)]
    for x_dim, y_dim in pairs:
        first, second = one_axis(x_dim, len(x.shape), "dot_general"), one_axis(y_dim, len(y.shape), "dot_general")
        if x.shape[first] != y.shape[second]:
            raise _misfit("dot_general", x.shape, y.shape, f"dims {first} and {second} differ")
        y_labels[second] = x_labels[first]
    batch = [x_labels[one_axis(d, len(x.shape), "dot_general")] for d in x_batch]
    x_own = [label for label in x_labels if label not in y_labels]
    y_own = [label for label in y_labels if label not in x_labels]
    return contract(x, x_labels, y, y_labels, [*batch, *x_own, *y_own], dtype)


def tensordot(a: Value, b: Value, axes: Any = 2, *, precision: Any = None, preferred_element_type: Any = None) -> Value:
    """The product summed over the last ``axes`` dims of ``a`` and the first of ``b``, or over pairs of given ones."""
    (x, y), _ = factors((a, b), None)
    if isinstance(axes, (tuple, list)):
        first, second = some_axes(axes[0], len(x.shape), "tensordot"), some_axes(axes[1], len(y.shape), "tensordot")
    else:
        count = as_int(axes, "axes of tensordot")
        if count > min(len(x.shape), len(y.shape)):
            raise _misfit("tensordot", x.shape, y.shape, f"axes={count} is more than their rank")
        first, second = tuple(range(len(x.shape) - count, len(x.shape))), tuple(range(count))
    if len(first) != len(second):
        raise TraceError(f"tensordot: {len(first)} axes of a for {len(second)} of b{at_user_line()}")
    return dot_general(x, y, ((first, second), ((), ())), preferred_element_type=preferred_element_type)


def dot(a: Value, b: Value, *, precision: Any = None, preferred_element_type: Any = None) -> Value:
    """The product summed over the last dim of ``a`` and the second to last of ``b``; with a scalar, the product."""
    (x, y), _ = factors((a, b), None)
    if not x.shape or not y.shape:
        return tensordot(x, y, 0, preferred_element_type=preferred_element_type)
    axes = ((len(x.shape) - 1,), (max(len(y.shape) - 2, 0),))
    return dot_general(x, y, (axes, ((), ())), preferred_element_type=preferred_element_type)


def vdot(a: Value, b: Value, *, precision: Any = None, preferred_element_type: Any = None) -> Value:
    """The sum of the products of all elements."""
    (x, y), _ = factors((a, b), None)
    flat = [_reshape(each, (prod(each.shape),)) for each in (x, y)]
    return dot(*flat, preferred_element_type=preferred_element_type)


def inner(a: Value, b: Value, *, precision: Any = None, preferred_element_type: Any = None) -> Value:
    """The product summed over the last dims."""
    (x, y), _ = factors((a, b), None)
    if not x.shape or not y.shape:
        return dot(x, y, preferred_element_type=preferred_element_type)
    return tensordot(x, y, ((-1,), (-1,)), preferred_element_type=preferred_element_type)


def vecdot(
    x1: Value, x2: Value, /, *, axis: int = -1, precision: Any = None, preferred_element_type: Any = None
) -> Value:
    """The sum of products along one axis; the others broadcast."""
    (x, y), dtype = factors((x1, x2), preferred_element_type)
    first, second = b.together((x, y))
    labels = list(range(len(first.shape)))
    along = one_axis(axis, len(labels), "vecdot")
    return contract(first, labels, second, labels, [label for label in labels if label != along], dtype)


def matvec(x1: Value, x2: Value, /) -> Value:
    """Matrices ``[..., m, k]`` times vectors ``[..., k]``."""
    vector = b.as_array(x2)
    product = matmul(x1, b.reshape(vector, (*vector.shape, 1)))
    return b.reshape(product, product.shape[:-1])


def vecmat(x1: Value, x2: Value, /) -> Value:
    """Vectors ``[..., k]`` times matrices ``[..., k, n]``."""
    vector = b.as_array(x1)
    product = matmul(b.reshape(vector, (*vector.shape[:-1], 1, vector.shape[-1])), x2)
    return b.reshape(product, (*product.shape[:-2], product.shape[-1]))


def outer(a: Value, b: Value, out: None = None) -> Value:
    """The products of all pairs of elements, as a matrix."""
    refuse_out(out)
    (x, y), dtype = factors((a, b), None)
    return contract(_reshape(x, (prod(x.shape),)), "m", _reshape(y, (prod(y.shape),)), "n", "mn", dtype)


def kron(a: Value, b: Value) -> Value:
    """The Kronecker product: each element of ``a`` times the whole of ``b``."""
    (x, y), dtype = factors((a, b), None)
    rank = max(len(x.shape), len(y.shape))
    x, y = (_reshape(each, (1,) * (rank - len(each.shape)) + tuple(each.shape)) for each in (x, y))
    x_labels, y_labels = [("x", d) for d in range(rank)], [("y", d) for d in range(rank)]
    labels = [label for pair in zip(x_labels, y_labels, strict=True) for label in pair]
    product = contract(x, x_labels, y, y_labels, labels, dtype)
    return _reshape(product, [m * n for m, n in zip(x.shape, y.shape, strict=True)])


def cross(a: Value, b: Value, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Value:
    """The cross product of vectors of 3 elements; a third one that is missing is 0, and two of 2 give a number.

    Parameters
    ----------
    a, b : array
        Their other dims broadcast together.
    axisa, axisb, axisc : int
        The dims of the vectors in ``a``, ``b`` and the result.
    axis : int, optional
        Stands for all three.
    """
    if axis is not None:
        axisa = axisb = axisc = axis
    (x, y), _ = factors((a, b), None)
    first, second = _components(x, axisa), _components(y, axisb)
    if len(first) == len(second) == 2:
        return _minor(first, second, 0, 1)
    pairs = ((1, 2), (2, 0), (0, 1))
    parts = [_minor(first, second, *pair) for pair in pairs]
    joined = stack(parts, axis=-1)
    return moveaxis(joined, -1, axisc)


def _components(x: Value, axis: int) -> list[Value]:
    """The 2 or 3 elements of vectors, as arrays."""
    along = one_axis(axis, len(x.shape), "cross")
    size = x.shape[along]
    if size not in (2, 3):
        raise TraceError(f"cross needs vectors of 2 or 3 elements, got {size} along axis {axis}{at_user_line()}")
    return [get_item(x, (*(slice(None),) * along, place)) for place in range(size)]


def _minor(x: Sequence[Value], y: Sequence[Value], i: int, j: int) -> Value:
    """``x[i] y[j] - x[j] y[i]``, in which a third element that is missing is zero."""
    return b.sub(_times(x, i, y, j), _times(x, j, y, i))


def _times(x: Sequence[Value], i: int, y: Sequence[Value], j: int) -> Value:
    first, second = (x[i] if i < len(x) else None), (y[j] if j < len(y) else None)
    if first is None or second is None:
        one = b.binary(b.add, x[0], y[0])
        return b.full(tuple(one.shape), 0, aval_of(one).dtype)
    return b.binary(b.mul, first, second)
