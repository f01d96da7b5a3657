"""Diagonals of matrices, as views: in a row-major matrix of ``n`` columns they lie ``n + 1`` apart."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int, one_axis
from trainkernel.numpy.reductions import sum
from trainkernel.trace import at_user_line

Value = Any

Indices = tuple[NDArray[np.int32], ...]

__all__ = ["diag", "diag_indices", "diagflat", "diagonal", "trace", "tril_indices", "triu_indices"]


def diagonal(a: Value, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Value:
    """The diagonals of the matrices in two axes, as the last dim; ``offset`` above the main one."""
    x = b.as_array(a)
    if len(x.shape) < 2:
        raise TraceError(f"diagonal needs at least two dims, got shape {list(x.shape)}{at_user_line()}")
    first, second = one_axis(axis1, len(x.shape), "diagonal"), one_axis(axis2, len(x.shape), "diagonal")
    if first == second:
        raise TraceError(f"diagonal: axis1 and axis2 are both {first}{at_user_line()}")
    rest = [dim for dim in range(len(x.shape)) if dim not in (first, second)]
    x = b.transpose(x, [*rest, first, second])
    lead, (rows, columns) = tuple(x.shape[:-2]), x.shape[-2:]
    above = as_int(offset, "the offset of diagonal")
    start = above if above >= 0 else -above * columns
    count = max(min(rows, columns - above) if above >= 0 else min(rows + above, columns), 0)
    flat = b.reshape(x, (*lead, rows * columns))
    limit = start + (count - 1) * (columns + 1) + 1 if count else 0
    none = (0,) * len(lead)
    return b.slice(flat, (*none, start if count else 0), (*lead, limit), (*(1 for _ in lead), columns + 1))


def trace(a: Value, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Value:
    """The sum of a diagonal."""
    return sum(diagonal(a, offset, axis1, axis2), -1, dtype)


def diag(v: Value, k: int = 0) -> Value:
    """The ``k``-th diagonal of a matrix, or the matrix whose ``k``-th diagonal is a vector."""
    x = b.as_array(v)
    if len(x.shape) == 2:
        return diagonal(x, k)
    if len(x.shape) != 1:
        raise TraceError(f"diag needs a vector or a matrix, got shape {list(x.shape)}{at_user_line()}")
    above = as_int(k, "k of diag")
    count = x.shape[0]
    size = count + abs(above)
    if not count:
        return b.full((size, size), 0, x.dtype)
    low = above if above >= 0 else -above * size
    high = size * size - low - ((count - 1) * (size + 1) + 1)
    return b.reshape(b.pad(x, 0, low=(low,), high=(high,), interior=(size,)), (size, size))


def diagflat(v: Value, k: int = 0) -> Value:
    """The matrix whose ``k``-th diagonal has the elements of an array."""
    x = b.as_array(v)
    return diag(b.reshape(x, (prod(x.shape),)), k)


# ---------------------------------------------------------------------------- indices, known when traced


def tril_indices(n: int, k: int = 0, m: int | None = None) -> Indices:
    """The rows and the columns of the elements on and below the ``k``-th diagonal of a matrix ``[n, m]``."""
    rows, columns = _sizes(n, m, "tril_indices")
    return _int32(np.tril_indices(rows, as_int(k, "k of tril_indices"), columns))


def triu_indices(n: int, k: int = 0, m: int | None = None) -> Indices:
    """The rows and the columns of the elements on and above the ``k``-th diagonal of a matrix ``[n, m]``."""
    rows, columns = _sizes(n, m, "triu_indices")
    return _int32(np.triu_indices(rows, as_int(k, "k of triu_indices"), columns))


def diag_indices(n: int, ndim: int = 2) -> Indices:
    """The indices of the main diagonal of an array of ``ndim`` dims of size ``n``."""
    return _int32(np.diag_indices(as_int(n, "n of diag_indices"), as_int(ndim, "ndim of diag_indices")))


def _sizes(n: int, m: int | None, what: str) -> tuple[int, int]:
    rows = as_int(n, f"n of {what}")
    return rows, rows if m is None else as_int(m, f"m of {what}")


def _int32(indices: tuple[Any, ...]) -> Indices:
    return tuple([np.asarray(each, np.int32) for each in indices])
