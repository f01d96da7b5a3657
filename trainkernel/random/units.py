"""Random words as numbers, and the arguments that all distributions take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.promotion import is_float
from trainkernel.random.keys import DRAWN_BESIDE, Shape, words
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any
Sizes = int | Sequence[int]

# Bits of the grid on which uniform numbers lie: all its points are numbers of the dtype.
GRID_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


def unit(key: Value, shape: Shape, name: str) -> Value:
    """Uniform on the grid of a dtype in [0, 1), in the dtype it is computed in."""
    num_bits = GRID_BITS[name]
    if name != "float64":
        return b.mul(b.cast(b.shift_right(words(key, shape), 32 - num_bits), "float32"), 2.0**-num_bits)
    return b.mul(_wide(key, shape, 5, 6), 2.0**-53)


def _wide(key: Value, shape: Shape, shift: int, other_shift: int) -> Value:
    """The upper bits of two words as one whole float64 number."""
    upper = b.cast(b.shift_right(words(key, shape), shift), "float64")
    lower = b.cast(b.shift_right(words(key, shape, DRAWN_BESIDE), other_shift), "float64")
    return b.add(b.mul(upper, 2.0 ** (32 - other_shift)), lower)


def centred(key: Value, shape: Shape, name: str) -> Value:
    """Uniform and symmetric inside (-1, 1): odd multiples of ``2**-24``, of ``2**-53`` in float64."""
    if name != "float64":
        whole = b.cast(b.shift_right(words(key, shape), 8), "int32")
        odd = b.sub(b.add(b.mul(whole, 2), 1), 1 << 24)
        return b.mul(b.cast(odd, "float32"), 2.0**-24)
    return b.mul(b.sub(b.add(b.mul(_wide(key, shape, 6, 6), 2.0), 1.0), 2.0**52), 2.0**-52)


def small(key: Value, shape: Shape, name: str) -> Value:
    """Uniform inside (0, 1), as fine near 0 as 32 bits allow (52 in float64)."""
    if name == "float64":
        return b.mul(b.add(_wide(key, shape, 6, 6), 0.5), 2.0**-52)
    u = b.mul(b.add(b.cast(words(key, shape), "float32"), 0.5), 2.0**-32)
    return b.minimum(u, 1 - 2.0**-24)


def floating(dtype: Any, what: str) -> str:
    """The name of a floating dtype.

    Raises
    ------
    TraceError
        If it is another.
    """
    name = b.dtype_name(dtype)
    if not is_float(name):
        raise TraceError(f"{what} makes floating numbers, not {name}{at_user_line()}")
    return name


def computed_in(name: str) -> str:
    """The dtype in which samples of a dtype are computed."""
    return "float64" if name == "float64" else "float32"


def operand(bound: Any, shape: Shape, name: str) -> Value:
    """A Python number as a float, an array in a dtype and shape."""
    value = as_value(bound)
    return float(value) if is_scalar(value) else stretched(b.cast(value, name), shape)


def stretched(x: Value, shape: Shape) -> Value:
    """A parameter broadcast to the shape of the samples."""
    missing = len(shape) - len(x.shape)
    if missing < 0 or any(size not in (1, room) for size, room in zip(x.shape, shape[missing:], strict=True)):
        raise TraceError(f"a parameter of shape {list(x.shape)} does not broadcast to {list(shape)}{at_user_line()}")
    return b.stretch(x, shape)


def shape_of(values: Sequence[Any]) -> Shape:
    """The shape of parameters together."""
    shapes = [aval_of(as_value(value)).shape for value in values]
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        found = " and ".join(str(list(shape)) for shape in shapes)
        raise TraceError(f"parameters of shapes {found} do not broadcast together{at_user_line()}") from None
