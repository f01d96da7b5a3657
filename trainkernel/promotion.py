"""Which dtype two values have together: JAX's type promotion over the dtypes of the table.

Python numbers are weak: they take the dtype of the arrays beside them, and int32 or float32 where
there is none. One difference from JAX by design: float64 and int64 stay.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainkernel.trace import Aval

_INTEGERS = ("uint8", "uint32", "int32", "int64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
DEFAULT_INT = "int32"
DEFAULT_FLOAT = "float32"


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS


def is_integer(dtype: str) -> bool:
    return dtype in _INTEGERS


def _two_integers(a: str, b: str) -> str:
    if a == b:
        return a
    pair = {a, b}
    if "int64" in pair or pair == {"uint32", "int32"}:
        return "int64"
    return "int32" if "int32" in pair else "uint32"


def _two_floats(a: str, b: str) -> str:
    if a == b:
        return a
    if "float64" in (a, b):
        return "float64"
    return "float32"


def _two(a: str, b: str) -> str:
    if a == "bool" or b == "bool":
        return b if a == "bool" else a
    if is_float(a) and is_float(b):
        return _two_floats(a, b)
    if is_float(a) or is_float(b):
        return a if is_float(a) else b
    return _two_integers(a, b)


def _kind(dtype: str) -> int:
    return 0 if dtype == "bool" else 1 if is_integer(dtype) else 2


def promote(avals: Iterable[Aval]) -> tuple[str, bool]:
    """(dtype, weak) of values together."""
    strong: str | None = None
    weak: str | None = None
    for aval in avals:
        if aval.weak:
            weak = aval.dtype if weak is None else _two(weak, aval.dtype)
        else:
            strong = aval.dtype if strong is None else _two(strong, aval.dtype)
    if strong is None:
        assert weak is not None
        return weak, True
    if weak is None or _kind(weak) <= _kind(strong):
        return strong, False
    return (DEFAULT_INT if _kind(weak) == 1 else DEFAULT_FLOAT), False


def inexact(dtype: str) -> str:
    """The floating dtype in which a function of values of ``dtype`` has its results."""
    return dtype if is_float(dtype) else DEFAULT_FLOAT
