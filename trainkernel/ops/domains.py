"""Arithmetic domains: the type in which an operation computes, whatever its operands are stored as.

=========  ==================================  ============================================
domain     operands stored as                  the reference computes in
=========  ==================================  ============================================
float32    float32, float16, bfloat16, bool    float64, rounded once to the output's dtype
float64    float64                             float64
int32      int32, uint8                        int64, wrapped to 32 bits
uint32     uint32                              int64, wrapped to 32 bits
int64      int64, or int32 beside uint32       int64, wrapped
=========  ==================================  ============================================

A floating operand decides over an integer one, and bool gives way to everything. A result goes
to the output's dtype by one conversion: floats round to nearest even; a float becomes an integer
by truncation, saturating, NaN as 0; an integer wraps; anything becomes bool by ``!= 0``. A
float32 result that becomes an integer or a float64 is rounded to float32 first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainkernel.dtypes import DTYPES
from trainkernel.errors import ProgramError

FLOAT_DOMAINS = ("float32", "float64")
INTEGER_DOMAINS = ("int32", "uint32", "int64")
_STORED = {
    "float32": "float32",
    "float16": "float32",
    "bfloat16": "float32",
    "float64": "float64",
    "int32": "int32",
    "uint8": "int32",
    "uint32": "uint32",
    "int64": "int64",
}


def domain_of_dtype(dtype: str) -> str:
    """The domain in which a value of one dtype is held; bool is held in float32, as 0 or 1."""
    return _STORED.get(dtype, "float32")


def promote(dtypes: Iterable[str], accepts: str = "any") -> str:
    """The domain of an operation with operands of these dtypes.

    Parameters
    ----------
    dtypes : iterable of dtype names
    accepts : str
        ``"any"``; ``"float"``: integers are computed in a floating domain; ``"int"``: floating
        operands are refused, bool counts as int32.

    Raises
    ------
    ProgramError
        For a floating operand of an integer operation.
    """
    domains = {_STORED[dtype] for dtype in dtypes if dtype in _STORED}
    floating = [domain for domain in FLOAT_DOMAINS if domain in domains]
    if accepts == "int" and floating:
        raise ProgramError(f"the operands must be integers or bools, got {floating[-1]}")
    if floating:
        return floating[-1]
    if accepts == "float":
        return "float64" if "int64" in domains else "float32"
    if not domains:
        return "int32" if accepts == "int" else "float32"
    if "int64" in domains or domains == {"int32", "uint32"}:
        return "int64"
    return domains.pop()


class _HasDomainRules(Protocol):
    """What of an entry of the op table decides the domain."""

    @property
    def accepts(self) -> str: ...

    @property
    def data_operands(self) -> tuple[int, ...] | None: ...


def operation_domain(op: _HasDomainRules, operands: Sequence[tuple[Any, str | None]], output_dtype: str) -> str:
    """The domain in which an operation computes.

    Parameters
    ----------
    op : Op
    operands : sequence of (value, dtype)
        The dtype of a tensor operand; None for a Python number, of which the value counts: a
        Python float makes an operation on integers a float32 one.
    output_dtype : str
        Decides where there is no tensor operand.

    Raises
    ------
    ProgramError
        For a floating operand of an integer operation.
    """
    positions = range(len(operands)) if op.data_operands is None else op.data_operands
    data = [operands[position] for position in positions if position < len(operands)]
    dtypes = [dtype for _, dtype in data if dtype is not None]
    if not dtypes:
        dtypes = [output_dtype]
    if any(dtype is None and isinstance(value, float) for value, dtype in data):
        domain = promote(dtypes, "any")
        return promote([*dtypes, "float32"] if domain in INTEGER_DOMAINS else dtypes, op.accepts)
    return promote(dtypes, op.accepts)


def domain_of_operand(value: Any, dtype: str | None) -> str:
    """The domain of an operand that keeps its own: an index, a condition, a key."""
    if dtype is not None:
        return domain_of_dtype(dtype)
    return "float32" if isinstance(value, float) else "int32"


# ---------------------------------------------------------------------------- NumPy values


def to_float32(value: float) -> np.float32:
    """A Python number rounded to float32 (an int beyond its range becomes infinite)."""
    try:
        with np.errstate(over="ignore"):
            return np.float32(value)
    except OverflowError:
        return np.float32(math.inf if value > 0 else -math.inf)


def constant(value: float, domain: str) -> np.float64 | np.int64:
    """A Python number as the reference's constant in a domain.

    Raises
    ------
    ProgramError
        If an integer domain cannot hold the number.
    """
    if domain == "float32":
        return np.float64(to_float32(value))
    if domain == "float64":
        try:
            return np.float64(value)
        except OverflowError:
            return np.float64(math.inf if value > 0 else -math.inf)
    bounds = np.iinfo(domain)
    if not isinstance(value, int) or not bounds.min <= value <= bounds.max:
        raise ProgramError(f"{value!r} is not a number of {domain}, in which the operation computes")
    return np.int64(value)


def load(array: NDArray[Any], domain: str) -> NDArray[Any]:
    """Stored values as the reference computes with them in a domain."""
    if domain not in FLOAT_DOMAINS:
        return array.astype(np.int64)
    if domain == "float32" and array.dtype.kind in "iu" and array.dtype.itemsize >= 4:
        return array.astype(np.float32).astype(np.float64)
    return array.astype(np.float64)


def convert(value: NDArray[Any], domain: str, dtype: str) -> NDArray[Any]:
    """A result in its domain, rounded or wrapped once to the output's dtype."""
    numpy_dtype = DTYPES[dtype].numpy
    if domain in INTEGER_DOMAINS and value.dtype.kind in "iu":
        value = value.astype(np.dtype(domain))
    if domain == "float32" and domain_of_dtype(dtype) != "float32":
        value = value.astype(np.float32).astype(np.float64)
    if dtype == "bool":
        # What float32 rounds to zero is zero: no device holds a result of a wider range to ask.
        return np.asarray((value.astype(np.float32) if domain == "float32" else value) != 0)
    if numpy_dtype.kind in "iu" and value.dtype.kind == "f":
        return _truncate(value, numpy_dtype)
    return round_once(value, numpy_dtype)


def _truncate(value: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A float as an integer: towards zero, saturating, NaN as 0."""
    bounds = np.iinfo(dtype)
    whole = np.trunc(np.where(np.isnan(value), 0.0, value))
    inside = (whole >= bounds.min) & (whole < float(bounds.max) + 1.0)
    result = np.where(inside, whole, 0.0).astype(np.int64).astype(dtype)
    return np.where(inside, result, np.where(whole > 0, bounds.max, bounds.min).astype(dtype))


def round_once(value: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round float64 or integers to ``dtype`` to nearest even in one step.

    ml_dtypes and NumPy may round float64 to a 16-bit type through float32, which rounds twice;
    a value that lies off its float32 neighbour is moved to an odd float32 first, which makes the
    second rounding exact (Boldo and Melquiond, "When double rounding is odd", 2005).
    """
    if dtype.itemsize != 2:
        return value.astype(dtype)
    if value.dtype.kind in "iu":
        # What float64 cannot hold of an int64 is gathered in the last bit that it can.
        long = value.astype(np.int64)
        gathered = long & ~2047 | np.where(long & 2047 != 0, 2048, 0)
        value = np.where(np.abs(long) < 2**53, long, gathered).astype(np.float64)
    with np.errstate(all="ignore"):
        single = value.astype(np.float32)
        inexact = np.isfinite(single) & (single.astype(np.float64) != value)
        toward_zero = np.where(
            np.abs(single.astype(np.float64)) > np.abs(value), np.nextafter(single, np.float32(0)), single
        )
        odd = (toward_zero.astype(np.float32).view(np.uint32) | np.uint32(1)).view(np.float32)
        return np.where(inexact, odd, single).astype(dtype)
