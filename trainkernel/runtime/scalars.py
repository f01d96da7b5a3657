"""Scalars passed by value in the parameter block: checks and packing."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainkernel.dtypes import dtype_of
from trainkernel.errors import ArgumentError

INTEGER_DTYPES = frozenset({"int32", "bool"})


def _shown(value: Any) -> str:
    """A value as messages show it: Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length():,} bits"
    return repr(value)


@dataclass(frozen=True)
class ScalarField:
    """Where a scalar lies in the parameter block and what it may be.

    Attributes
    ----------
    index : int
        The position among the kernel's inputs.
    name : str
    dtype : str
        ``int32`` is packed as an int, every other as a float.
    offset_bytes : int
        In the parameter block.
    minimum, maximum : int or None
        Inclusive bounds beyond those of the dtype, for example of a loop's length.
    """

    index: int
    name: str
    dtype: str
    offset_bytes: int = 0
    minimum: int | None = None
    maximum: int | None = None

    def check(self, value: Any) -> int | float:
        """The value as a Python number that the dtype holds.

        Raises
        ------
        ArgumentError
            For anything but a number of the right kind and range.
        """
        label = f"input {self.index} '{self.name}'"
        need = f"a Python or NumPy number for a scalar of dtype {self.dtype}"
        if isinstance(value, np.ndarray):
            if value.ndim != 0:
                raise ArgumentError(f"{label}: got an array of shape {value.shape}, needs {need}")
            value = value[()]
        if isinstance(value, np.floating):
            value = float(value)
        elif isinstance(value, (np.integer, np.bool_)) and not isinstance(value, np.timedelta64):
            value = value.item()
        elif type(value).__module__.startswith("ml_dtypes"):  # whose scalars are no np.generic
            value = float(value)
        if self.dtype == "bool":
            if not isinstance(value, bool):
                raise ArgumentError(f"{label}: got {_shown(value)}, needs True or False")
            return int(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ArgumentError(f"{label}: got {_shown(value)} of type {type(value).__name__}, needs {need}")
        return self._check_integer(label, value) if self.dtype in INTEGER_DTYPES else self._check_float(label, value)

    def _check_integer(self, label: str, value: int | float) -> int:
        if not isinstance(value, int):
            raise ArgumentError(f"{label}: got {value!r}, needs an integer for dtype {self.dtype}")
        low = -(2**31) if self.minimum is None else self.minimum
        high = 2**31 - 1 if self.maximum is None else self.maximum
        if not low <= value <= high:
            raise ArgumentError(f"{label}: got {_shown(value)}, needs an integer from {low} to {high}")
        return value

    def _check_float(self, label: str, value: int | float) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        rounded = _round_to(self.dtype, number)
        overflow = math.isinf(rounded) and not (isinstance(value, float) and math.isinf(value))
        if overflow:
            raise ArgumentError(f"{label}: got {_shown(value)}, which is beyond the range of {self.dtype}")
        return rounded

    def pack(self, value: Any) -> bytes:
        """The checked value's four bytes."""
        return self.pack_checked(self.check(value))

    def pack_checked(self, number: int | float) -> bytes:
        """The four bytes of what ``check`` returned."""
        return struct.pack("<i", number) if self.dtype in INTEGER_DTYPES else struct.pack("<f", number)


def _round_to(dtype: str, number: float) -> float:
    """A number rounded to a dtype, infinite beyond its range."""
    if dtype == "float32":  # the usual one, ten times cheaper than through NumPy
        try:
            return float(struct.unpack("<f", struct.pack("<f", number))[0])
        except OverflowError:
            return math.copysign(math.inf, number)
    with np.errstate(over="ignore"):
        return float(np.asarray(number, dtype=np.float64).astype(dtype_of(dtype).numpy))


def scalars_by_key(fields: Iterable[ScalarField]) -> Mapping[str | int, ScalarField]:
    """The fields by their names and by their input indices, for ``find_scalar``."""
    found: dict[str | int, ScalarField] = {}
    for field in fields:
        found[field.name] = found[field.index] = field
    return found


def find_scalar(fields: Mapping[str | int, ScalarField], scalar: Any) -> ScalarField:
    """The field that a name or an input index stands for.

    Raises
    ------
    ArgumentError
        If there is none; the message lists those that there are.
    """
    is_key = isinstance(scalar, (str, int, np.integer)) and not isinstance(scalar, bool)
    field = fields.get(scalar) if is_key else None
    if field is None:
        known = ", ".join(f"{key} '{field.name}'" for key, field in fields.items() if isinstance(key, int)) or "none"
        raise ArgumentError(f"no scalar input {scalar!r}; the scalar inputs are: {known}")
    return field
