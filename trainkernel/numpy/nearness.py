"""Whether arrays are equal, or nearly so."""

from __future__ import annotations

from typing import Any

from trainkernel import primitives
from trainkernel.numpy.elementwise import isfinite, isnan
from trainkernel.numpy.reductions import all

Value = Any

__all__ = ["allclose", "array_equal", "isclose"]


def isclose(a: Value, b: Value, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Value:
    """Whether ``|a - b| <= atol + rtol * |b|``, element by element."""
    return _isclose(a, b, rtol, atol, equal_nan)


def _isclose(x: Value, y: Value, rtol: float, atol: float, equal_nan: bool) -> Value:
    first, second = (primitives.as_array(value) for value in primitives.together((x, y), floating=True))
    first, second = primitives.together((first, second))
    near = primitives.compare(
        primitives.abs(primitives.sub(first, second)),
        primitives.add(primitives.mul(primitives.abs(second), rtol), atol),
        "le",
    )
    near = primitives.bitwise_and(near, primitives.bitwise_and(isfinite(first), isfinite(second)))
    near = primitives.bitwise_or(near, primitives.compare(first, second, "eq"))
    return primitives.bitwise_or(near, primitives.bitwise_and(isnan(first), isnan(second))) if equal_nan else near


def allclose(a: Value, b: Value, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Value:
    """Whether all elements are close; see ``isclose``."""
    return all(_isclose(a, b, rtol, atol, equal_nan))


def array_equal(a1: Value, a2: Value, equal_nan: bool = False) -> Value:
    """Whether two arrays have the same shape and elements."""
    first, second = primitives.as_array(a1), primitives.as_array(a2)
    if tuple(first.shape) != tuple(second.shape):
        return primitives.full((), False, "bool")
    first, second = primitives.together((first, second))
    same = primitives.compare(first, second, "eq")
    return all(primitives.bitwise_or(same, primitives.bitwise_and(isnan(first), isnan(second))) if equal_nan else same)
