"""Programs that cover the scan and the scatter: dtypes × shapes × views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from table import Case, CaseBuilder

from trainkernel.dtypes import DTYPES

INDEX_DTYPES = ("int32", "int64", "uint32", "uint8")
SUMMED_DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint32", "uint8")

SCANNED: tuple[tuple[tuple[int, ...], int], ...] = (
    ((5, 7), 0),
    ((5, 7), 1),
    ((1,), 0),
    ((300, 3), 0),
    ((3, 300), -1),
    ((2, 3000), 1),
    ((3000, 2), 0),
    ((40, 129), 1),
    ((1000, 33), 0),
    ((2000, 4), 1),
    ((3, 4, 5, 6), 2),
    ((0, 7), 1),
    ((4, 0), 1),
)
"""Shape and dim: by thread, warp and block, along and across memory."""


def indices(c: CaseBuilder, shape: Sequence[int], room: int, dtype: str) -> NDArray[Any]:
    """Indices into ``range(room)``, some far outside on both sides where the dtype can say so."""
    bounds = np.iinfo(DTYPES[dtype].numpy)
    inside = c.rng.integers(0, max(room, 1), shape)
    low, high = max(bounds.min, -(2**40)), min(bounds.max, 2**40)
    far = c.rng.choice([low, max(low, -1), min(room, high), high], shape)
    return np.where(c.rng.random(shape) < 0.25, far, inside).astype(dtype)


def summands(c: CaseBuilder, shape: Sequence[int], dtype: str) -> NDArray[Any]:
    """Moderate numbers of a dtype."""
    values = np.asarray(c.rng.standard_normal(shape))
    if DTYPES[dtype].numpy.kind in "iu":
        return np.abs(values * 100).astype(dtype) if dtype.startswith("u") else (values * 1e5).astype(dtype)
    return values.astype(DTYPES[dtype].numpy)


def cumsum_case(dtype: str) -> Case:
    c = CaseBuilder(f"cumsum {dtype}")
    for (shape, dim), reverse in product(SCANNED, (False, True)):
        c.add("cumsum", c.tensor(summands(c, shape, dtype)), dim=dim, reverse=reverse)
    if dtype == "float32":
        for layout, dim in product(("transposed", "input view"), (0, 1)):
            c.add("cumsum", c.place(summands(c, (12, 33), dtype), layout), dim=dim)
    x = c.tensor(summands(c, (9, 40), dtype))
    total = c.builder.op("cumsum", c.builder.op("add", x, 1), dim=1)
    c.add("add", total, c.builder.op("mul", x, 2))
    c.add("cumsum", x, dim=0, dtype="int64" if "int" in dtype else "float32")
    return c.case()


SCATTERED: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (7, 40, (5,)),
    (300, 60, ()),
    (3, 1000, ()),
    (2, 2000, (3,)),
    (40, 100, (33, 2)),
    (5, 0, (3,)),
    (5, 9, (0,)),
    (0, 9, (4,)),
    (1, 33, (64,)),
)
"""Rows, updates, and the shape of a row."""


def scatter_add_case(dtype: str) -> Case:
    c = CaseBuilder(f"scatter_add {dtype}")
    for (size, count, rest), index_dtype in zip(SCATTERED, cycle(INDEX_DTYPES), strict=False):
        place = c.tensor(indices(c, (count,), size, index_dtype))
        c.add("scatter_add", place, c.tensor(summands(c, (count, *rest), dtype)), size=size, dtype=dtype)
    for index_dtype in INDEX_DTYPES:
        place = c.tensor(indices(c, (70,), 4, index_dtype))
        c.add("scatter_add", place, c.tensor(summands(c, (70,), dtype)), size=4, dtype=dtype)
    if dtype == "float32":
        place = c.builder.op("minimum", c.tensor(indices(c, (50,), 9, "int32")), 8)
        updates = c.builder.op("mul", c.place(summands(c, (50, 6), dtype), "transposed"), 0.5)
        summed = c.builder.op("scatter_add", place, updates, size=9, dtype=dtype)
        c.add("add", summed, c.tensor(summands(c, (9, 6), dtype)))
    return c.case()


def scan_cases() -> Iterator[Case]:
    """A case of each in each dtype."""
    for dtype in SUMMED_DTYPES:
        yield cumsum_case(dtype)
        yield scatter_add_case(dtype)
