"""The dtype table: one entry holds all that any stage needs to know of an element type.

Arithmetic is done in the domain of the operands (``trainkernel.ops.domains``): float32 for the
16-bit floats and bool as well. A load converts exactly, a store rounds once to nearest even.
``bool`` is stored as one byte, read as 0 or 1 and written as ``value != 0``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from trainkernel.errors import ArgumentError, ProgramError


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes
    ----------
    name : str
        The name used in programs, the one NumPy uses.
    short : str
        The name used when a program is printed.
    itemsize_bytes : int
    numpy : numpy.dtype
        The host representation (bfloat16 is that of ml_dtypes).
    cuda : str
        The storage type in the generated source.
    mantissa_bits : int
        Explicit mantissa bits; the distance of 1.0 to the next number is ``2**-mantissa_bits``.
    """

    name: str
    short: str
    itemsize_bytes: int
    numpy: np.dtype[Any]
    cuda: str
    mantissa_bits: int


def _table(*entries: DType) -> Mapping[str, DType]:
    return MappingProxyType({entry.name: entry for entry in entries})


DTYPES = _table(
    DType("float32", "f32", 4, np.dtype(np.float32), "float", 23),
    DType("float16", "f16", 2, np.dtype(np.float16), "tk_float16", 10),
    DType("bfloat16", "bf16", 2, np.dtype(ml_dtypes.bfloat16), "tk_bfloat16", 7),
    DType("bool", "bool", 1, np.dtype(np.bool_), "tk_bool", 0),
    DType("float64", "f64", 8, np.dtype(np.float64), "double", 52),
    DType("int32", "i32", 4, np.dtype(np.int32), "int", 31),
    DType("int64", "i64", 8, np.dtype(np.int64), "long long", 63),
    DType("uint32", "u32", 4, np.dtype(np.uint32), "unsigned", 32),
    DType("uint8", "u8", 1, np.dtype(np.uint8), "unsigned char", 8),
)


def dtype_of(name: str) -> DType:
    """The table's entry for ``name``.

    Raises
    ------
    ProgramError
        If there is no such dtype.
    """
    entry = DTYPES.get(name) if isinstance(name, str) else None
    if entry is None:
        raise ProgramError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return entry


def name_of_numpy(dtype: Any) -> str | None:
    """The table's name for a NumPy dtype, or None if it has no entry."""
    for entry in DTYPES.values():
        if entry.numpy == dtype:
            return entry.name
    return None


INTEGER_DTYPES = frozenset({"int32", "bool"})


def scalar_value(value: Any, dtype: str, minimum: int | None = None, maximum: int | None = None) -> int | float:
    """A scalar that somebody gives, as a Python number that its dtype holds.

    Parameters
    ----------
    value : object
        Refused unless it is a Python or NumPy number of the right kind.
    dtype : str
    minimum, maximum : int, optional
        Inclusive bounds of an integer beyond those of the dtype.

    Raises
    ------
    ArgumentError
        For anything but a number of the right kind and range.
    """
    need = f"a Python or NumPy number for a scalar of dtype {dtype}"
    if isinstance(value, np.ndarray):
        if value.ndim != 0:
            raise ArgumentError(f"got an array of shape {value.shape}, needs {need}")
        value = value[()]
    if isinstance(value, np.floating):
        value = float(value)
    elif isinstance(value, (np.integer, np.bool_)) and not isinstance(value, np.timedelta64):
        value = value.item()
    elif type(value).__module__.startswith("ml_dtypes"):  # whose scalars are no np.generic
        value = float(value)
    if dtype == "bool":
        if not isinstance(value, bool):
            raise ArgumentError(f"got {_shown(value)}, needs True or False")
        return int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"got {_shown(value)} of type {type(value).__name__}, needs {need}")
    return _integer(value, dtype, minimum, maximum) if dtype in INTEGER_DTYPES else _float(value, dtype)


def _integer(value: int | float, dtype: str, minimum: int | None, maximum: int | None) -> int:
    if not isinstance(value, int):
        raise ArgumentError(f"got {value!r}, needs an integer for dtype {dtype}")
    low = -(2**31) if minimum is None else minimum
    high = 2**31 - 1 if maximum is None else maximum
    if not low <= value <= high:
        raise ArgumentError(f"got {_shown(value)}, needs an integer from {low} to {high}")
    return value


def _float(value: int | float, dtype: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    rounded = _round_to(dtype, number)
    if math.isinf(rounded) and not (isinstance(value, float) and math.isinf(value)):
        raise ArgumentError(f"got {_shown(value)}, which is beyond the range of {dtype}")
    return rounded


def _round_to(dtype: str, number: float) -> float:
    """A number rounded to a dtype, infinite beyond its range."""
    if dtype == "float32":  # the usual one, ten times cheaper than through NumPy
        try:
            return float(struct.unpack("<f", struct.pack("<f", number))[0])
        except OverflowError:
            return math.copysign(math.inf, number)
    with np.errstate(over="ignore"):
        return float(np.asarray(number, dtype=np.float64).astype(dtype_of(dtype).numpy))


def _shown(value: Any) -> str:
    """A value as messages show it: Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value)
