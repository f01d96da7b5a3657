"""``pad``: arrays with a border of a constant, or of their own elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int
from trainkernel.numpy.shapes import cut, join
from trainkernel.trace import at_user_line, is_scalar

Value = Any

__all__ = ["pad"]

_OWN_ELEMENTS = ("edge", "reflect", "symmetric", "wrap")


def pad(array: Value, pad_width: Any, mode: str = "constant", *, constant_values: Value = 0) -> Value:
    """The array with ``pad_width`` elements around it.

    Parameters
    ----------
    array : array
    pad_width : int, (before, after), or one such pair for each axis
    mode : str
        "constant", "edge", "reflect", "symmetric" or "wrap".
    constant_values : scalar

    Raises
    ------
    TraceError
        For another mode, or widths that do not fit.
    """
    x = b.as_array(array)
    widths = _widths(pad_width, len(x.shape))
    if mode == "constant":
        return _constant(x, widths, constant_values)
    if mode not in _OWN_ELEMENTS:
        raise TraceError(
            f"pad: mode must be 'constant', {', '.join(map(repr, _OWN_ELEMENTS))}, got {mode!r}{at_user_line()}"
        )
    for axis, (before, after) in enumerate(widths):
        if before or after:
            places = np.pad(np.arange(x.shape[axis]), (before, after), mode=mode)  # type: ignore[call-overload]
            x = join([_piece(x, axis, run) for run in _runs(places.tolist())], axis)
    return x


def _widths(pad_width: Any, rank: int) -> list[tuple[int, int]]:
    try:
        pairs = np.broadcast_to(np.asarray(pad_width), (rank, 2)).tolist()
    except ValueError:
        raise TraceError(f"pad: widths {pad_width!r} do not fit {rank} axes{at_user_line()}") from None
    widths = [(as_int(before, "a pad width"), as_int(after, "a pad width")) for before, after in pairs]
    if any(width < 0 for pair in widths for width in pair):
        raise TraceError(f"pad: widths must not be negative, got {pad_width!r}{at_user_line()}")
    return widths


def _constant(x: Value, widths: list[tuple[int, int]], value: Value) -> Value:
    if not is_scalar(value):
        value = b.cast(b.as_array(value), x.dtype)
        if tuple(value.shape) != ():
            raise TraceError(f"pad: one constant value is supported, got shape {list(value.shape)}{at_user_line()}")
    elif not isinstance(value, float) or x.dtype.kind in "biu":
        value = int(value)
    low, high = [before for before, _ in widths], [after for _, after in widths]
    return b.pad(x, value, low=low, high=high, interior=(0,) * len(widths))


def _runs(places: list[int]) -> list[tuple[int, int, int]]:
    """Places as (first, step, count) with steps of 1, -1 or 0."""
    runs: list[tuple[int, int, int]] = []
    for place in places:
        if runs:
            first, step, count = runs[-1]
            gap = place - (first + step * (count - 1))
            if gap == step or (count == 1 and gap in (-1, 0, 1)):
                runs[-1] = (first, gap, count + 1)
                continue
        runs.append((place, 0, 1))
    return runs


def _piece(x: Value, axis: int, run: tuple[int, int, int]) -> Value:
    first, step, count = run
    if step == 0:
        one = cut(x, axis, first, first + 1)
        shape = [count if dim == axis else size for dim, size in enumerate(x.shape)]
        return b.stretch(one, tuple(shape))
    if step == 1:
        return cut(x, axis, first, first + count)
    return b.flip(cut(x, axis, first - count + 1, first + 1), dims=(axis,))
