"""Scalars passed by value in the parameter block: checks and packing."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainkernel.dtypes import INTEGER_DTYPES, scalar_value
from trainkernel.errors import ArgumentError


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
        try:
            return scalar_value(value, self.dtype, self.minimum, self.maximum)
        except ArgumentError as error:
            raise ArgumentError(f"input {self.index} '{self.name}': {error}") from None

    def pack(self, value: Any) -> bytes:
        """The checked value's four bytes."""
        return self.pack_checked(self.check(value))

    def pack_checked(self, number: int | float) -> bytes:
        """The four bytes of what ``check`` returned."""
        return struct.pack("<i", number) if self.dtype in INTEGER_DTYPES else struct.pack("<f", number)


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
