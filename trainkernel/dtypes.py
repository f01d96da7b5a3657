"""The dtype table: one entry holds all that any stage needs to know of an element type.

Arithmetic is done in float32 whatever the storage dtype: a load converts to float32 exactly, a
store rounds once to nearest even. ``bool`` is stored as one byte, read as 0.0 or 1.0 and
written as ``value != 0``. ``int32`` exists for scalars by value (a Loop's length); an operation
reads one as the nearest float32.
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
    tensor : bool
        Whether tensors may have it; otherwise only scalars by value.
    """

    name: str
    short: str
    itemsize_bytes: int
    numpy: np.dtype[Any]
    cuda: str
    mantissa_bits: int
    tensor: bool = True


def _table(*entries: DType) -> Mapping[str, DType]:
    return MappingProxyType({entry.name: entry for entry in entries})


DTYPES = _table(
    DType("float32", "f32", 4, np.dtype(np.float32), "float", 23),
    DType("float16", "f16", 2, np.dtype(np.float16), "tk_float16", 10),
    DType("bfloat16", "bf16", 2, np.dtype(ml_dtypes.bfloat16), "tk_bfloat16", 7),
    DType("bool", "bool", 1, np.dtype(np.bool_), "tk_bool", 0),
    DType("int32", "i32", 4, np.dtype(np.int32), "int", 31, tensor=False),
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
