"""Keys and random bits.

The fourth word of the generator's counter says what the bits are for, so that the numbers drawn
with a key, the keys split from it and those folded from it have nothing in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.promotion import is_integer
from trainkernel.trace import Array, as_value, at_user_line, aval_of, is_scalar

Value = Any
Shape = tuple[int, ...]

# What the bits are for: the fourth word of the counter. Those of a shuffle count up from the last.
DRAWN, SPLIT, FOLDED, DRAWN_BESIDE, SHUFFLED = 0, 1, 2, 3, 16

_WORD = 0xFFFFFFFF


def key(seed: Any) -> Value:
    """A key of a seed: uint32[2], its high and its low word.

    Parameters
    ----------
    seed : int or integer scalar array
        64 bits count; a negative seed is taken modulo ``2**64``.

    Raises
    ------
    TraceError
        If the seed is no integer scalar, or needs more than 64 bits.
    """
    value = as_value(seed)
    if isinstance(value, bool) or aval_of(value).shape != () or not is_integer(aval_of(value).dtype):
        raise TraceError(f"a seed is an integer, got {_described(value)}{at_user_line()}")
    if not isinstance(value, Array):
        return _key_of_int(int(value))
    wide = b.cast(value, "int64")
    words = [b.cast(b.shift_right(wide, 32), "uint32"), b.cast(wide, "uint32")]
    return b.concatenate(*(b.reshape(word, (1,)) for word in words), dim=0)


def PRNGKey(seed: Any) -> Value:  # noqa: N802 - JAX's name for it
    """``key``, by its older name."""
    return key(seed)


def _key_of_int(seed: int) -> Value:
    if not -(2**63) <= seed < 2**64:
        raise TraceError(f"a seed has 64 bits, got {seed}{at_user_line()}")
    return np.array([seed >> 32 & _WORD, seed & _WORD], np.uint32)


def split(key: Value, num: int | Sequence[int] = 2) -> Value:
    """New keys from a key: uint32[num, 2].

    The first keys do not depend on how many there are.

    Parameters
    ----------
    key : uint32[2]
    num : int or sequence of int
        How many, or the shape of an array of them.
    """
    return b.random_bits(checked_key(key, "split"), shape=(*as_shape(num, "split"), 2), stream=SPLIT)


def fold_in(key: Value, data: Any) -> Value:
    """A new key, uint32[2], from a key and an integer such as the number of a step.

    Parameters
    ----------
    key : uint32[2]
    data : int or integer scalar array
        Taken modulo ``2**32``.

    Raises
    ------
    TraceError
        If ``data`` is no integer scalar.
    """
    value = as_value(data)
    if isinstance(value, bool) or aval_of(value).shape != () or not is_integer(aval_of(value).dtype):
        raise TraceError(f"fold_in takes an integer, got {_described(value)}{at_user_line()}")
    counter = b.full((), value & _WORD, "uint32") if is_scalar(value) else b.cast(value, "uint32")
    return b.random_bits(checked_key(key, "fold_in"), counter, shape=(2,), stream=FOLDED)


def bits(key: Value, shape: int | Sequence[int] = (), dtype: Any = "uint32") -> Value:
    """Uniform random bits.

    Element ``i`` in row-major order is word ``i % 4`` of the Philox block whose counter is
    ``(i // 4, 0, 0)`` (64, 32 and 32 bits) under the key.

    Parameters
    ----------
    key : uint32[2]
    shape : int or sequence of int
    dtype : dtype
        uint32, or uint8: the lowest 8 bits of each word.

    Raises
    ------
    TraceError
        If the dtype is another.
    """
    name = b.dtype_name(dtype)
    if name not in ("uint32", "uint8"):
        raise TraceError(f"random bits are uint32 or uint8, not {name}{at_user_line()}")
    return b.cast(words(checked_key(key, "bits"), as_shape(shape, "bits")), name)


def words(key: Value, shape: Shape, stream: int = DRAWN) -> Value:
    """uint32 words of a checked key."""
    return b.random_bits(key, shape=shape, stream=stream)


def checked_key(key: Any, what: str) -> Value:
    """The key, if it is one.

    Raises
    ------
    TraceError
        If it is no uint32[2].
    """
    value = as_value(key)
    aval = aval_of(value)
    if aval.dtype == "uint32" and aval.shape == (2,):
        return value
    advice = "make one with key(seed)"
    if aval.dtype == "uint32" and len(aval.shape) > 1 and aval.shape[-1] == 2:
        advice = "take one of these keys, or use vmap over them"
    raise TraceError(
        f"{what} needs a key, a uint32 array of shape [2]; got {_described(value)}: {advice}{at_user_line()}"
    )


def as_shape(shape: int | Sequence[int], what: str) -> Shape:
    """A shape given as an int or a sequence of them.

    Raises
    ------
    TraceError
        If a size is no int or negative.
    """
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise TraceError(f"{what} needs a shape of sizes that are not negative, got {shape!r}{at_user_line()}")
    return tuple(int(size) for size in sizes)


def _described(value: Value) -> str:
    """Dtype and shape of a value for a message; a Python number as itself."""
    if is_scalar(value):
        return repr(value)
    aval = aval_of(value)
    return f"{aval.dtype}{list(aval.shape)}"
