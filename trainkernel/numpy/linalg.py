"""Norms of vectors and matrices: names and signatures of ``jax.numpy.linalg``."""

from __future__ import annotations

from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy import elementwise, reductions
from trainkernel.numpy.axes import some_axes
from trainkernel.numpy.diagonals import diagonal, trace
from trainkernel.numpy.products import matmul, outer, tensordot, vecdot
from trainkernel.numpy.shapes import matrix_transpose
from trainkernel.promotion import inexact
from trainkernel.trace import at_user_line, aval_of

Value = Any

__all__ = [
    "diagonal", "matmul", "matrix_norm", "matrix_transpose", "norm", "outer", "tensordot", "trace", "vecdot",
    "vector_norm",
]  # fmt: skip


def norm(x: Value, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Value:
    """The norm of vectors along one axis, or of matrices in two.

    Parameters
    ----------
    x : array
    ord : number, "fro" or None
        None: the root of the sum of squares over ``axis``, all axes by default. Vectors: any number, inf
        and -inf. Matrices: "fro", 1, -1, inf, -inf.
    axis : int, (int, int) or None
    keepdims : bool

    Raises
    ------
    TraceError
        For norms that need singular values.
    """
    value = _floating(x)
    axes = some_axes(axis, len(value.shape), "norm")
    if ord is None:
        return _root_of_squares(value, axes, keepdims)
    if len(axes) == 1:
        return vector_norm(value, axis=axes[0], keepdims=keepdims, ord=ord)
    if len(axes) == 2:
        return _matrix_norm(value, ord, axes, keepdims)
    raise TraceError(f"norm: ord {ord!r} of {len(axes)} axes: give one axis or two{at_user_line()}")


def _floating(x: Value) -> Value:
    value = b.as_array(x)
    return b.cast(value, inexact(aval_of(value).dtype))


def _root_of_squares(x: Value, axes: Any, keepdims: bool) -> Value:
    return elementwise.sqrt(reductions.sum(b.mul(x, x), axes, keepdims=keepdims))


def vector_norm(x: Value, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Value:
    """The ``ord``-norm along axes, over all elements by default."""
    value = _floating(x)
    axes = some_axes(axis, len(value.shape), "vector_norm")
    if isinstance(ord, str):
        raise TraceError(f"vector_norm: ord must be a number, got {ord!r}{at_user_line()}")
    if ord == 2:
        return _root_of_squares(value, axes, keepdims)
    size = b.abs(value)
    if ord == 0:
        return reductions.sum(b.cast(b.compare(value, 0, "ne"), value.dtype), axes, keepdims=keepdims)
    if ord == 1:
        return reductions.sum(size, axes, keepdims=keepdims)
    if ord in (float("inf"), float("-inf")):
        return (reductions.max if ord > 0 else reductions.min)(size, axes, keepdims=keepdims)
    return b.pow(reductions.sum(b.pow(size, float(ord)), axes, keepdims=keepdims), 1.0 / ord)


def matrix_norm(x: Value, /, *, keepdims: bool = False, ord: Any = "fro") -> Value:
    """The norm of the matrices in the last two dims."""
    value = _floating(x)
    return _matrix_norm(value, ord, some_axes((-2, -1), len(value.shape), "matrix_norm"), keepdims)


def _matrix_norm(x: Value, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Value:
    if ord in ("fro", None):
        return _root_of_squares(x, axes, keepdims)
    if ord not in (1, -1, float("inf"), float("-inf")):
        raise TraceError(
            f"norm: ord {ord!r} of a matrix needs its singular values; supported: 'fro', 1, -1, inf, -inf"
            f"{at_user_line()}"
        )
    summed = axes[0] if abs(ord) == 1 else axes[1]
    sums = reductions.sum(b.abs(x), summed, keepdims=True)
    result = (reductions.max if ord > 0 else reductions.min)(sums, axes, keepdims=True)
    return result if keepdims else b.reshape(result, [n for dim, n in enumerate(x.shape) if dim not in axes])
