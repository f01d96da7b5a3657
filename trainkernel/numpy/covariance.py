"""Covariances and correlations of variables, as one matrix product."""

from __future__ import annotations

from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.arithmetic import divide, subtract
from trainkernel.numpy.axes import as_int
from trainkernel.numpy.diagonals import diagonal
from trainkernel.numpy.elementwise import clip, sqrt
from trainkernel.numpy.products import matmul
from trainkernel.numpy.reductions import mean
from trainkernel.numpy.shapes import concatenate, expand_dims, squeeze
from trainkernel.trace import at_user_line

Value = Any

__all__ = ["corrcoef", "cov"]


def cov(m: Value, y: Value | None = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None) -> Value:
    """The covariances of variables: the rows of ``m`` and of ``y``, or their columns without ``rowvar``.

    Parameters
    ----------
    m, y : array of at most two dims
        A vector is one variable.
    rowvar : bool
    bias : bool
        Divide by the number of observations, and not by one less.
    ddof : int, optional
        What is subtracted from that number, whatever ``bias`` says.

    Returns
    -------
    array
        Of shape [variables, variables], or a scalar for one variable.

    Raises
    ------
    TraceError
        For arrays of more dims.
    """
    parts = [_variables(b.as_array(value), rowvar) for value in ([m] if y is None else [m, y])]
    x = parts[0] if len(parts) == 1 else concatenate(parts)
    less = (0 if bias else 1) if ddof is None else as_int(ddof, "ddof")
    centered = subtract(x, mean(x, axis=1, keepdims=True))
    return squeeze(divide(matmul(centered, b.transpose(centered, (1, 0))), float(x.shape[1] - less)))


def corrcoef(x: Value, y: Value | None = None, rowvar: bool = True) -> Value:
    """The correlations of variables, as ``cov`` takes them, between -1 and 1."""
    covariances = cov(x, y, rowvar)
    if not covariances.shape:
        return divide(covariances, covariances)
    deviations = sqrt(diagonal(covariances))
    return clip(divide(divide(covariances, expand_dims(deviations, 1)), deviations), -1, 1)


def _variables(value: Value, rowvar: bool) -> Value:
    """The matrix with a row for each variable."""
    if len(value.shape) > 2:
        raise TraceError(f"cov needs at most two dims, got shape {list(value.shape)}{at_user_line()}")
    if len(value.shape) < 2:
        return b.reshape(value, (1, value.shape[0] if value.shape else 1))
    return value if rowvar else b.transpose(value, (1, 0))
