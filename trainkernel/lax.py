"""A small part of ``jax.lax``: what NumPy has no name for, and loops."""

from __future__ import annotations

from builtins import slice as builtin_slice
from collections.abc import Callable, Sequence
from typing import Any

from trainkernel import numpy as tnp
from trainkernel import primitives as b
from trainkernel import structure, tree
from trainkernel.derivatives import stop_gradient
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int, as_shape, one_axis
from trainkernel.numpy.indexing import wrapped
from trainkernel.numpy.products import dot_general
from trainkernel.numpy.reductions import running
from trainkernel.numpy.sorting import sort_together, top_k
from trainkernel.promotion import is_float
from trainkernel.scanning import cond, fori_loop, map, scan, switch, while_loop
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar
from trainkernel.windows import conv_general_dilated, padded

Value = Any

__all__ = [
    "acos", "acosh", "asin", "asinh", "associative_scan", "atan", "atan2", "atanh", "broadcast_in_dim",
    "broadcasted_iota", "cbrt", "clamp", "concatenate", "cond", "conv_general_dilated", "convert_element_type",
    "cummax", "cummin", "cumprod", "cumsum", "dot_general", "dynamic_index_in_dim", "dynamic_slice",
    "dynamic_slice_in_dim", "dynamic_update_index_in_dim", "dynamic_update_slice", "dynamic_update_slice_in_dim",
    "erf", "fori_loop", "integer_pow", "iota", "logistic", "map", "pad", "rev", "rsqrt", "scan", "select", "select_n",
    "slice", "slice_in_dim", "sort", "sort_key_val", "stop_gradient", "switch", "top_k", "while_loop",
]  # fmt: skip


# ---------------------------------------------------------------------------- elements


def rsqrt(x: Value) -> Value:
    """``1 / sqrt(x)``."""
    return b.unary(b.rsqrt, x, floating=True)


def erf(x: Value) -> Value:
    """The error function."""
    return b.unary(b.erf, x, floating=True)


asin, acos, atan, atan2 = tnp.arcsin, tnp.arccos, tnp.arctan, tnp.arctan2
asinh, acosh, atanh, cbrt = tnp.arcsinh, tnp.arccosh, tnp.arctanh, tnp.cbrt


def logistic(x: Value) -> Value:
    """``1 / (1 + exp(-x))``."""
    return b.unary(b.sigmoid, x, floating=True)


def integer_pow(x: Value, y: int) -> Value:
    """``x`` to the power of a Python int."""
    return tnp.power(x, as_int(y, "the exponent of integer_pow"))


def clamp(min: Value, x: Value, max: Value) -> Value:
    """Each element, or the bound that it is beyond."""
    return tnp.clip(x, min, max)


def convert_element_type(operand: Value, new_dtype: Any) -> Value:
    """The array in another dtype; see ``numpy.astype``."""
    return tnp.astype(operand, new_dtype)


def select(pred: Value, on_true: Value, on_false: Value) -> Value:
    """Elements of ``on_true`` where ``pred`` holds, of ``on_false`` elsewhere."""
    return tnp.where(pred, on_true, on_false)


def select_n(which: Value, *cases: Value) -> Value:
    """Each element from the case of its number.

    Parameters
    ----------
    which : bool or int32 array
        A bool chooses between two cases, the first one where it is False. A scalar stands for all elements.
    *cases : arrays of one shape and dtype

    Raises
    ------
    TraceError
        If shapes or dtypes differ, or the numbers are of another dtype.
    """
    number, values = b.as_array(which), [b.as_array(case) for case in cases]
    avals = {(tuple(value.shape), aval_of(value).dtype) for value in values}
    if len(avals) != 1 or tuple(number.shape) not in ((), tuple(values[0].shape)):
        listed = ", ".join(str(aval_of(value)) for value in values) or "none"
        raise TraceError(f"select_n: cases {listed} with numbers {aval_of(number)}{at_user_line()}")
    dtype = aval_of(number).dtype
    if dtype != "int32" and not (dtype == "bool" and len(values) <= 2):
        raise TraceError(f"select_n: {len(values)} cases by {aval_of(number)}, not bool or int32{at_user_line()}")
    number, result = b.stretch(b.numeric(number), tuple(values[0].shape)), values[0]
    for at, value in enumerate(values[1:], start=1):
        result = b.where(b.compare(number, at, "ge"), value, result)
    return result


def iota(dtype: Any, size: int) -> Value:
    """``0, 1, ..., size - 1``."""
    return b.iota(as_int(size, "the size of iota"), dtype)


def broadcasted_iota(dtype: Any, shape: Any, dimension: int) -> Value:
    """The coordinate along one dim."""
    sizes = as_shape(shape)
    dim = one_axis(dimension, len(sizes), "broadcasted_iota")
    return b.broadcast(b.iota(sizes[dim], dtype), sizes, (dim,))


def broadcast_in_dim(operand: Value, shape: Any, broadcast_dimensions: Sequence[int]) -> Value:
    """The array with its dims at ``broadcast_dimensions`` of ``shape``."""
    return b.broadcast(b.as_array(operand), as_shape(shape), tuple(broadcast_dimensions))


# ---------------------------------------------------------------------------- running results


def _running(op: Any, neutral: Any, operand: Value, axis: int, reverse: bool) -> Value:
    x = b.as_array(operand)
    along = one_axis(axis, len(x.shape), "a running result")
    if not reverse:
        return running(op, neutral, x, along)
    return b.flip(running(op, neutral, b.flip(x, dims=(along,)), along), dims=(along,))


def cumsum(operand: Value, axis: int = 0, reverse: bool = False) -> Value:
    """Running sums along an axis."""
    x = b.as_array(operand)
    return b.cumsum(x, dim=one_axis(axis, len(x.shape), "cumsum"), reverse=reverse)


def cumprod(operand: Value, axis: int = 0, reverse: bool = False) -> Value:
    """Running products along an axis."""
    return _running(b.mul, 1, operand, axis, reverse)


def cummax(operand: Value, axis: int = 0, reverse: bool = False) -> Value:
    """Running maxima along an axis."""
    return _running(b.maximum, _bound(operand, False), operand, axis, reverse)


def cummin(operand: Value, axis: int = 0, reverse: bool = False) -> Value:
    """Running minima along an axis."""
    return _running(b.minimum, _bound(operand, True), operand, axis, reverse)


def _bound(operand: Value, is_upper: bool) -> Any:
    """A number that no element is beyond."""
    x = b.as_array(operand)
    if is_float(aval_of(x).dtype):
        return float("inf") if is_upper else -float("inf")
    if aval_of(x).dtype == "bool":
        return int(is_upper)
    limits = tnp.iinfo(x.dtype)
    return int(limits.max if is_upper else limits.min)


def associative_scan(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Running results of an associative function, in ``log2(n)`` steps.

    Parameters
    ----------
    fn : callable
        Joins two trees of arrays like ``elems``, element by element along the axis; what is further
        ahead comes first, or with ``reverse`` what is further behind.
    elems : tree of arrays of one size along the axis
    reverse : bool
    axis : int

    Returns
    -------
    tree like ``elems``
        At place k what ``fn`` makes of the elements up to k.

    Raises
    ------
    TraceError
        If sizes differ, or ``fn`` returns another structure.
    """
    leaves, treedef = tree.flatten(elems)
    arrays = structure.as_arrays(leaves)
    axes = [one_axis(axis, len(x.shape), "associative_scan") for x in arrays]
    sizes = {x.shape[along] for x, along in zip(arrays, axes, strict=True)}
    if len(sizes) != 1:
        raise TraceError(f"associative_scan: sizes {sorted(sizes)} along axis {axis}{at_user_line()}")
    (size,), distance = sizes, 1
    while distance < size:
        ahead, behind = (_parts(arrays, axes, *ends) for ends in ((0, size - distance), (distance, size)))
        kept = _parts(arrays, axes, size - distance, size) if reverse else _parts(arrays, axes, 0, distance)
        first, second = (behind, ahead) if reverse else (ahead, behind)
        joined, joined_def = tree.flatten(fn(tree.unflatten(treedef, first), tree.unflatten(treedef, second)))
        if joined_def != treedef:
            raise TraceError(f"associative_scan: fn returns {joined_def}, the elements are {treedef}{at_user_line()}")
        joined = [b.cast(new, x.dtype) for new, x in zip(structure.as_arrays(joined), arrays, strict=True)]
        parts = [(new, old) if reverse else (old, new) for old, new in zip(kept, joined, strict=True)]
        arrays = [b.concatenate(*pair, dim=along) for pair, along in zip(parts, axes, strict=True)]
        distance *= 2
    return tree.unflatten(treedef, arrays)


def _parts(arrays: Sequence[Value], axes: Sequence[int], start: int, limit: int) -> list[Value]:
    """The same range of an axis of each array."""
    return [slice_in_dim(x, start, limit, axis=along) for x, along in zip(arrays, axes, strict=True)]


# ---------------------------------------------------------------------------- borders and order


def sort(operand: Any, dimension: int = -1, is_stable: bool = True, num_keys: int = 1) -> Any:
    """An array sorted along a dim; of several arrays all in the order of the first ``num_keys`` of them.

    Each sort is stable. NaN is the greatest; a row of n elements takes n² comparisons: see ``numpy.sort``.
    """
    if not isinstance(operand, (tuple, list)):
        return sort_together((operand,), dimension, 1, "sort")[0]
    return sort_together(operand, dimension, as_int(num_keys, "the number of keys"), "sort")


def sort_key_val(keys: Value, values: Value, dimension: int = -1, is_stable: bool = True) -> tuple[Value, Value]:
    """Keys sorted along a dim, and values in the order of the keys."""
    first, second = sort_together((keys, values), dimension, 1, "sort_key_val")
    return first, second


def pad(operand: Value, padding_value: Value, padding_config: Sequence[tuple[int, int, int]]) -> Value:
    """The array with elements before, behind and between its own; fewer where before or behind is negative."""
    x = b.as_array(operand)
    if len(padding_config) != len(x.shape):
        raise TraceError(f"pad: {len(padding_config)} triples for an array of shape {list(x.shape)}{at_user_line()}")
    value = as_value(padding_value)
    value = value if is_scalar(value) and is_float(aval_of(x).dtype) else b.cast(value, aval_of(x).dtype)
    pairs = [(low, high) for low, high, _ in padding_config]
    return padded(x, value, 0, pairs, [gap for _, _, gap in padding_config])


def rev(operand: Value, dimensions: Sequence[int]) -> Value:
    """The elements in reverse order along dims."""
    return tnp.flip(operand, tuple(dimensions))


def concatenate(operands: Sequence[Value], dimension: int) -> Value:
    """Arrays one behind the other along a dim."""
    return tnp.concatenate(operands, dimension)


# ---------------------------------------------------------------------------- slices


def slice(
    operand: Value, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Sequence[int] | None = None
) -> Value:
    """A box between static bounds."""
    x = b.as_array(operand)
    return b.slice(x, as_shape(start_indices), as_shape(limit_indices), as_shape(strides or (1,) * len(x.shape)))


def slice_in_dim(
    operand: Value, start_index: int | None, limit_index: int | None, stride: int = 1, axis: int = 0
) -> Value:
    """A range of one dim."""
    x = b.as_array(operand)
    along = one_axis(axis, len(x.shape), "slice_in_dim")
    index = [builtin_slice(None)] * len(x.shape)
    index[along] = builtin_slice(start_index, limit_index, stride)
    return tnp.get_item(x, tuple(index))


def _starts(x: Value, start_indices: Any, what: str) -> list[Value]:
    """One scalar start for each dim, negative ones counted from the end."""
    given = list(start_indices)
    if len(given) != len(x.shape):
        raise TraceError(f"{what}: {len(given)} starts for an array of shape {list(x.shape)}{at_user_line()}")
    return [_start(start, size, what) for start, size in zip(given, x.shape, strict=True)]


def _start(start: Any, size: int, what: str) -> Value:
    value = as_value(start)
    if is_scalar(value):
        number = as_int(value, f"a start of {what}")
        return number + size if number < 0 else number
    if tuple(value.shape) != () or is_float(aval_of(value).dtype):
        raise TraceError(f"{what}: a start must be an integer scalar, got {aval_of(value)}{at_user_line()}")
    return wrapped(value, size)


def dynamic_slice(operand: Value, start_indices: Any, slice_sizes: Sequence[int]) -> Value:
    """A box of static sizes at starts that may be traced; a start is clamped so that the box fits."""
    x, sizes = b.as_array(operand), as_shape(slice_sizes)
    if len(sizes) != len(x.shape) or any(size > room for size, room in zip(sizes, x.shape, strict=True)):
        raise TraceError(
            f"dynamic_slice: a box of sizes {list(sizes)} does not fit shape {list(x.shape)}{at_user_line()}"
        )
    return b.dynamic_slice(x, *_starts(x, start_indices, "dynamic_slice"), sizes=sizes)


def dynamic_update_slice(operand: Value, update: Value, start_indices: Any) -> Value:
    """The array with a box replaced, at starts that may be traced; a start is clamped so that the box fits."""
    x = b.as_array(operand)
    box = b.cast(b.as_array(update), x.dtype)
    starts = list(start_indices) if hasattr(start_indices, "__iter__") else [start_indices]
    return b.dynamic_update(x, box, *_starts(x, starts, "dynamic_update_slice"))


def dynamic_slice_in_dim(operand: Value, start_index: Value, slice_size: int, axis: int = 0) -> Value:
    """``slice_size`` elements of one dim from a start that may be traced."""
    x = b.as_array(operand)
    along = one_axis(axis, len(x.shape), "dynamic_slice_in_dim")
    starts, sizes = _along(x, along, start_index), list(x.shape)
    sizes[along] = slice_size
    return dynamic_slice(x, starts, sizes)


def _along(x: Value, axis: int, start: Value) -> list[Any]:
    starts: list[Any] = [0] * len(x.shape)
    starts[axis] = start
    return starts


def dynamic_index_in_dim(operand: Value, index: Value, axis: int = 0, keepdims: bool = True) -> Value:
    """One element of one dim, at an index that may be traced."""
    result = dynamic_slice_in_dim(operand, index, 1, axis)
    return result if keepdims else tnp.squeeze(result, axis)


def dynamic_update_slice_in_dim(operand: Value, update: Value, start_index: Value, axis: int) -> Value:
    """The array with a range of one dim replaced."""
    x = b.as_array(operand)
    along = one_axis(axis, len(x.shape), "dynamic_update_slice_in_dim")
    return dynamic_update_slice(x, update, _along(x, along, start_index))


def dynamic_update_index_in_dim(operand: Value, update: Value, index: Value, axis: int) -> Value:
    """The array with one element of one dim replaced."""
    x, new = b.as_array(operand), b.as_array(update)
    along = one_axis(axis, len(x.shape), "dynamic_update_index_in_dim")
    new = new if len(new.shape) == len(x.shape) else tnp.expand_dims(new, along)
    return dynamic_update_slice_in_dim(x, new, index, along)
