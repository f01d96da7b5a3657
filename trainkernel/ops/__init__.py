"""The table of operations: everything that any stage knows of an op is in its one entry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainkernel.ops.domains import to_float32
from trainkernel.ops.entry import (
    COMPARISONS,
    REQUIRED,
    Op,
    broadcast_shapes,
    broadcasts_to,
    float_literal,
    is_number,
    literal,
    reduced_dims,
    wrap_dim,
)
from trainkernel.ops.indexed import INDEXED
from trainkernel.ops.pointwise import POINTWISE
from trainkernel.ops.products import PRODUCTS
from trainkernel.ops.reductions import REDUCTIONS
from trainkernel.ops.views import VIEWS

OPS: Mapping[str, Op] = MappingProxyType(
    {entry.name: entry for entry in (*POINTWISE, *INDEXED, *REDUCTIONS, *PRODUCTS, *VIEWS)}
)
"""Every operation by name."""

__all__ = [
    "COMPARISONS",
    "OPS",
    "Op",
    "REQUIRED",
    "broadcast_shapes",
    "broadcasts_to",
    "float_literal",
    "is_number",
    "literal",
    "reduced_dims",
    "to_float32",
    "wrap_dim",
]
