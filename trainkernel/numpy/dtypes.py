"""Constants, dtypes by name, and questions about dtypes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from trainkernel import primitives as b
from trainkernel.dtypes import DTYPES
from trainkernel.promotion import is_float, promote
from trainkernel.trace import Aval, as_value, aval_of

__all__ = [
    "bfloat16", "bool_", "e", "euler_gamma", "finfo", "float16", "float32", "float64", "floating", "iinfo", "inexact",
    "inf", "int32", "int64", "integer", "issubdtype", "nan", "newaxis", "number", "pi", "promote_types", "result_type",
    "uint32", "uint8",
]  # fmt: skip

pi, e, inf, nan = math.pi, math.e, math.inf, math.nan
euler_gamma = 0.5772156649015329
newaxis = None

bool_, int32, int64, uint8, uint32 = np.bool_, np.int32, np.int64, np.uint8, np.uint32
float16, bfloat16, float32, float64 = np.float16, ml_dtypes.bfloat16, np.float32, np.float64
number, integer, inexact, floating = np.number, np.integer, np.inexact, np.floating


def finfo(dtype: Any) -> Any:
    """Limits of a floating dtype: ``max``, ``min``, ``eps``, ``tiny``, ..."""
    return ml_dtypes.finfo(DTYPES[b.dtype_name(dtype)].numpy)  # type: ignore[no-untyped-call]


def iinfo(dtype: Any) -> Any:
    """Limits of an integer dtype."""
    return np.iinfo(DTYPES[b.dtype_name(dtype)].numpy)


def promote_types(a: Any, b: Any) -> np.dtype[Any]:
    """The dtype of two dtypes together."""
    return result_type(a, b)


def result_type(*args: Any) -> np.dtype[Any]:
    """The dtype of values and dtypes together; Python numbers are weak."""
    name, _ = promote([_aval(arg) for arg in args])
    return DTYPES[name].numpy


def _aval(value: Any) -> Aval:
    if isinstance(value, (str, type, np.dtype)):
        return Aval((), b.dtype_name(value), value in (bool, int, float) if isinstance(value, type) else False)
    return aval_of(as_value(value))


def issubdtype(arg1: Any, arg2: Any) -> bool:
    """Whether a dtype is of a kind (``floating``, ``integer``, ...) or is a dtype; bfloat16 is floating."""
    if isinstance(arg2, type) and arg2 in (np.floating, np.inexact, np.number):
        name = b.dtype_name(arg1)
        return is_float(name) or (arg2 is np.number and name != "bool")
    return bool(np.issubdtype(np.dtype(arg1), arg2))
