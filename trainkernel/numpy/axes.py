"""Axes and shapes as NumPy takes them: ints or tuples, counted from either end."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from trainkernel.errors import TraceError
from trainkernel.trace import Array, Shape, at_user_line


def as_int(value: Any, what: str) -> int:
    """A Python int of something that is one.

    Raises
    ------
    TraceError
        For a traced array or anything else that is no int.
    """
    if isinstance(value, Array):
        raise TraceError(f"{what} must be known when the function is traced, got {value.aval}{at_user_line()}")
    try:
        return operator.index(value)
    except TypeError:
        raise TraceError(f"{what} must be an int, got {value!r}{at_user_line()}") from None


def refuse_out(out: Any) -> None:
    """Refuse an array to write the result to.

    Raises
    ------
    TraceError
        If there is one.
    """
    if out is not None:
        raise TraceError(f"out= is not supported, since no array is written in place: use the result{at_user_line()}")


def one_axis(axis: Any, ndim: int, what: str) -> int:
    """An axis counted from the front."""
    number = as_int(axis, f"the axis of {what}")
    if not -ndim <= number < ndim:
        raise TraceError(f"{what}: axis {number} is out of range for an array of rank {ndim}{at_user_line()}")
    return number % ndim


def some_axes(axis: Any, ndim: int, what: str) -> tuple[int, ...]:
    """Axes counted from the front in the order given; None stands for all."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(one_axis(each, ndim, what) for each in given)
    if len(set(axes)) != len(axes):
        raise TraceError(f"{what}: axes {tuple(given)} name an axis twice{at_user_line()}")
    return axes


def as_shape(shape: Any, what: str = "a shape") -> Shape:
    """A shape from an int or a sequence of ints."""
    is_one = isinstance(shape, Array) or not (isinstance(shape, Sequence) or hasattr(shape, "__iter__"))
    sizes = (shape,) if is_one else shape
    return tuple(as_int(size, f"each size of {what}") for size in sizes)
