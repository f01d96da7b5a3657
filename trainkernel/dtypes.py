"""The dtype table: one entry holds all that any stage needs to know of an element type.

Arithmetic is done in the domain of the operands (``trainkernel.ops.domains``): float32 for the
16-bit floats and bool as well. A load converts exactly, a store rounds once to nearest even.
``bool`` is stored as one byte, read as 0 or 1 and written as ``value != 0``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from trainkernel.errors import ProgramError


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
