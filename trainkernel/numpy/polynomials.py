"""Polynomials by their coefficients."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int
from trainkernel.numpy.indexing import get_item
from trainkernel.numpy.shapes import stack
from trainkernel.promotion import promote
from trainkernel.trace import as_value, at_user_line, aval_of

Value = Any

__all__ = ["polyval", "vander"]


def polyval(p: Value, x: Value, *, unroll: int = 16) -> Value:
    """The polynomial with the coefficients ``p``, the one of the highest power first, at each element of ``x``.

    By Horner's rule, with one step for each coefficient. Further dims of ``p`` broadcast with ``x``; ``unroll``
    changes nothing.
    """
    coefficients, at = b.as_array(p), b.as_array(x)
    dtype, _ = promote([aval_of(as_value(each)) for each in (coefficients, at)])
    at = b.cast(at, dtype)
    shape = tuple(np.broadcast_shapes(coefficients.shape[1:], at.shape))
    result, at = b.full(shape, 0, dtype), b.stretch(at, shape)
    for number in range(coefficients.shape[0]):
        one = b.stretch(b.cast(get_item(coefficients, number), dtype), shape)
        result = one if number == 0 else b.add(b.mul(result, at), one)
    return result


def vander(x: Value, N: int | None = None, increasing: bool = False) -> Value:  # noqa: N803 - NumPy's name for it
    """The powers ``x ** (N - 1), ..., x, 1`` as columns, or with ``increasing`` from 1 on; ``N`` is the size of ``x``.

    Raises
    ------
    TraceError
        If ``x`` is not of rank 1, or ``N`` is negative.
    """
    value = b.numeric(b.as_array(x))
    if len(value.shape) != 1:
        raise TraceError(f"vander needs a row of numbers, got {aval_of(value)}{at_user_line()}")
    count = value.shape[0] if N is None else as_int(N, "the N of vander")
    if count < 0:
        raise TraceError(f"vander: {count} columns{at_user_line()}")
    columns = [b.full(tuple(value.shape), 1, aval_of(value).dtype)]
    while len(columns) < count:
        columns.append(value if len(columns) == 1 else b.mul(columns[-1], value))
    if count == 0:
        return b.full((value.shape[0], 0), 0, aval_of(value).dtype)
    return stack(columns if increasing else columns[::-1], axis=1)
