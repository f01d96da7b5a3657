"""Methods and properties of traced arrays, by name: functions of the package, some with other arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trainkernel.dtypes import DTYPES
from trainkernel.errors import TraceError
from trainkernel.numpy import creation, diagonals, elementwise, indexing, products, reductions, shapes, sorting, updates
from trainkernel.trace import at_user_line, aval_of

Value = Any


def _reshape(x: Value, *shape: Any, order: str = "C") -> Value:
    """``x.reshape(2, 3)`` or ``x.reshape((2, 3))``."""
    return shapes.reshape(x, shape[0] if len(shape) == 1 else shape, order)


def _transpose(x: Value, *axes: Any) -> Value:
    """``x.transpose(1, 0)``, ``x.transpose((1, 0))`` or ``x.transpose()``."""
    if not axes or axes == (None,):
        return shapes.transpose(x)
    return shapes.transpose(x, axes[0] if isinstance(axes[0], (tuple, list)) else axes)


def _copy(x: Value, order: str = "C") -> Value:
    return x


def _astype(x: Value, dtype: Any, copy: bool = False) -> Value:
    return creation.astype(x, dtype)


def _item(x: Value, *args: Any) -> Value:
    raise TraceError(
        f"{x.aval} is traced: it has no value yet; return it from the function and take the item there{at_user_line()}"
    )


METHODS: Mapping[str, Callable[..., Value]] = MappingProxyType(
    {
        **{name: getattr(reductions, name) for name in ("all", "any", "argmax", "argmin", "cumprod", "cumsum")},
        **{name: getattr(reductions, name) for name in ("max", "mean", "min", "prod", "ptp", "std", "sum", "var")},
        **{name: getattr(shapes, name) for name in ("ravel", "repeat", "squeeze", "swapaxes")},
        **{name: getattr(sorting, name) for name in ("argpartition", "argsort", "partition", "sort")},
        "astype": _astype,
        "clip": elementwise.clip,
        "copy": _copy,
        "diagonal": diagonals.diagonal,
        "dot": products.dot,
        "flatten": shapes.ravel,
        "item": _item,
        "reshape": _reshape,
        "round": elementwise.round,
        "take": indexing.take,
        "tolist": _item,
        "trace": diagonals.trace,
        "transpose": _transpose,
    }
)

PROPERTIES: Mapping[str, Callable[[Value], Any]] = MappingProxyType(
    {
        "T": shapes.transpose,
        "at": updates.at,
        "itemsize": lambda x: DTYPES[aval_of(x).dtype].itemsize_bytes,
        "mT": shapes.matrix_transpose,
        "nbytes": lambda x: x.size * DTYPES[aval_of(x).dtype].itemsize_bytes,
    }
)
