"""Programs that cover the indexed operations: dtypes × views × edges.

One Program holds all cases of one op: each variant in some dtypes, the first in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scan_table import INDEX_DTYPES, indices
from table import Case, CaseBuilder

from trainkernel.dtypes import DTYPES
from trainkernel.ir import TensorSpec

MOVED_DTYPES = tuple(DTYPES)
"""Dtypes of data that is moved and not computed with: all."""


def draw(c: CaseBuilder, shape: Sequence[int], dtype: str) -> NDArray[Any]:
    """Values of any dtype; integers over its whole range, floats with special values among them."""
    numpy_dtype = DTYPES[dtype].numpy
    if dtype == "bool":
        return c.rng.random(shape) < 0.5
    if numpy_dtype.kind in "iu":
        bounds = np.iinfo(numpy_dtype)
        return c.rng.integers(bounds.min, bounds.max, shape, numpy_dtype, endpoint=True)
    values = np.asarray(c.rng.standard_normal(shape))
    special = c.rng.random(shape) < 0.1
    return np.where(special, c.rng.choice([np.nan, np.inf, -0.0, 2.0**-149], shape), values).astype(numpy_dtype)


# ---------------------------------------------------------------------------- indexed operations


def iota_case() -> Case:
    c = CaseBuilder("iota")
    for dtype in DTYPES:
        c.add("iota", shape=(300,), dtype=dtype)
    for shape in ((), (1,), (0,), (7, 1), (3, 5), (2, 3, 40)):
        c.add("iota", shape=shape, dtype="int32")
    position = c.builder.op("iota", shape=(5, 7), dtype="float32")
    c.add("mul", position, position.T.broadcast_to((7, 5)).T, dtype="float32")
    return c.case()


def flip_case() -> Case:
    c = CaseBuilder("flip")
    for dtype in MOVED_DTYPES:
        c.add("flip", c.tensor(draw(c, (5, 7), dtype)), dims=(0,))
    for (layout, dims), dtype in zip(
        product(("dense", "transposed", "input view"), ((), (1,), (-1, 0))), cycle(MOVED_DTYPES), strict=False
    ):
        if "int" in dtype or dtype == "bool":
            dtype = "float64"
        c.add("flip", c.place(draw(c, (6, 9), dtype), layout), dims=dims)
    for shape, dims in (((1, 4), (0,)), ((0, 3), (1,)), ((), ()), ((2, 3, 4), (0, 2))):
        c.add("flip", c.tensor(draw(c, shape, "float32")), dims=dims)
    twice = c.builder.op("flip", c.builder.op("flip", c.tensor(draw(c, (40,), "int64")), dims=(0,)), dims=(0,))
    c.add("flip", twice, dims=())
    return c.case()


PADDINGS: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    ((5, 7), (1, 0), (0, 2), (0, 0)),
    ((5, 7), (0, 3), (4, 0), (2, 1)),
    ((5, 1), (0, 3), (0, 2), (2, 5)),
    ((1, 1), (0, 0), (0, 0), (3, 3)),
    ((4, 6), (0, 0), (0, 0), (0, 0)),
    ((4, 6), (0, 0), (0, 0), (1, 0)),
    ((0, 3), (2, 0), (1, 1), (4, 0)),
    ((0, 3), (0, 0), (0, 0), (0, 0)),
    ((3, 2, 4), (1, 0, 2), (0, 1, 0), (0, 3, 1)),
)
"""Shape, low, high, interior."""


def pad_case() -> Case:
    c = CaseBuilder("pad")
    for dtype in MOVED_DTYPES:
        c.add(
            "pad",
            c.tensor(draw(c, (5, 7), dtype)),
            c.tensor(draw(c, (), dtype)),
            low=(1, 2),
            high=(0, 1),
            interior=(0, 2),
        )
    for (shape, low, high, interior), dtype in zip(
        PADDINGS, cycle(("float32", "int64", "bfloat16", "bool")), strict=False
    ):
        c.add("pad", c.tensor(draw(c, shape, dtype)), 1, low=low, high=high, interior=interior)
    x = c.place(draw(c, (4, 6), "float32"), "transposed")
    c.add("pad", x, float("-inf"), low=(1, 1), high=(2, 2), interior=(1, 0))
    c.add("pad", c.builder.op("exp", x), 0.5, low=(0, 70), high=(0, 3), interior=(0, 0), dtype="float16")
    return c.case()


def concatenate_case() -> Case:
    c = CaseBuilder("concatenate")
    for dtype in MOVED_DTYPES:
        c.add("concatenate", *(c.tensor(draw(c, (size, 5), dtype)) for size in (3, 1, 4)), dim=0)
    for dim, sizes in product((0, 1, -1), ((2, 0, 3), (0, 4, 0), (1, 1), (1,), (0, 0))):
        shapes = [(size, 6) if dim == 0 else (6, size) for size in sizes]
        c.add("concatenate", *(c.place(draw(c, shape, "float32"), "transposed") for shape in shapes), dim=dim)
    mixed = [c.tensor(draw(c, (4,), dtype)) for dtype in ("bool", "float16", "float32")]
    c.add("concatenate", *mixed, dim=0, dtype="float32")
    many = [c.tensor(draw(c, (size,), "int32")) for size in range(1, 30)]
    c.add("concatenate", *many, dim=0)
    halves = [c.builder.op("neg", c.tensor(draw(c, (9, 5), "float32"))).T for _ in range(2)]
    joined = c.builder.op("concatenate", *halves, dim=1)
    c.add("concatenate", joined, c.builder.op("flip", joined, dims=(1,)), dim=0)
    return c.case()


def take_case() -> Case:
    c = CaseBuilder("take")
    for dtype, index_dtype in zip(MOVED_DTYPES, cycle(INDEX_DTYPES), strict=False):
        c.add("take", c.tensor(draw(c, (9, 5), dtype)), c.tensor(indices(c, (13,), 9, index_dtype)))
    for (shape, picks), index_dtype in product(
        (
            ((9,), (4, 3)),
            ((1, 4), (6,)),
            ((7, 3), ()),
            ((7, 3), (0,)),
            ((5, 0), (4,)),
            ((0, 3), (0,)),
            ((300, 2), (40,)),
        ),
        INDEX_DTYPES,
    ):
        c.add("take", c.tensor(draw(c, shape, "float32")), c.tensor(indices(c, picks, shape[0], index_dtype)))
    rows = c.place(draw(c, (6, 8), "bfloat16"), "transposed")
    place = c.tensor(indices(c, (8, 3), 6, "int32"))
    c.add("take", c.builder.op("mul", rows, 0.5), place.T, dtype="float32")
    c.add("take", c.builder.op("take", rows, c.builder.op("add", place, 1)), c.tensor(indices(c, (4,), 8, "int64")))
    return c.case()


def _starts(c: CaseBuilder, rank: int) -> Iterator[Any]:
    """A start per dim: tensors of each dtype of an index, views, Python numbers; some out of range."""
    kinds = cycle((*INDEX_DTYPES, "number", "view"))
    while True:
        chosen: list[Any] = []
        for _ in range(rank):
            kind = next(kinds)
            if kind == "number":
                chosen.append(int(c.rng.integers(-3, 9)))
            elif kind == "view":
                vector = c.tensor(indices(c, (4,), 5, "int32"))
                chosen.append(TensorSpec(vector.buffer, (), (), 2, "int32"))
            else:
                chosen.append(c.tensor(indices(c, (), 5, kind)))
        yield chosen


def dynamic_slice_case() -> Case:
    c = CaseBuilder("dynamic_slice")
    starts = _starts(c, 2)
    for dtype in MOVED_DTYPES:
        c.add("dynamic_slice", c.tensor(draw(c, (7, 9), dtype)), *next(starts), sizes=(3, 4))
    for sizes, layout in product(((7, 9), (1, 1), (7, 2), (0, 4), (3, 9)), ("transposed", "input view")):
        c.add("dynamic_slice", c.place(draw(c, (7, 9), "float32"), layout), *next(starts), sizes=sizes)
    x = c.builder.op("concatenate", *(c.tensor(draw(c, (4, 9), "float32")) for _ in range(2)), dim=0)
    inner = c.builder.op("dynamic_slice", x, *next(starts), sizes=(5, 9))
    c.add("dynamic_slice", inner, *next(starts), sizes=(2, 3))
    c.add("dynamic_slice", c.tensor(draw(c, (), "float32")), sizes=())
    return c.case()


def dynamic_update_case() -> Case:
    c = CaseBuilder("dynamic_update")
    starts = _starts(c, 2)
    for dtype in MOVED_DTYPES:
        c.add("dynamic_update", c.tensor(draw(c, (7, 9), dtype)), c.tensor(draw(c, (3, 4), dtype)), *next(starts))
    for sizes, layout in product(((7, 9), (1, 1), (7, 2), (0, 4), (3, 9)), ("transposed", "input view")):
        x, update = (c.place(draw(c, shape, "float32"), layout) for shape in ((7, 9), sizes))
        c.add("dynamic_update", x, update, *next(starts))
    x = c.builder.op("exp", c.tensor(draw(c, (7, 9), "float32")))
    patch = c.builder.op("dynamic_slice", x, *next(starts), sizes=(2, 5))
    once = c.builder.op("dynamic_update", x, c.builder.op("neg", patch), *next(starts))
    c.add("dynamic_update", once, patch, *next(starts))
    return c.case()


def random_bits_case() -> Case:
    c = CaseBuilder("random_bits")
    key = c.tensor(draw(c, (2,), "uint32"))
    for shape in ((), (1,), (5,), (3, 40), (0, 3), (1100,)):
        c.add("random_bits", key, shape=shape, stream=0)
    keys, counters = c.tensor(draw(c, (3, 2), "uint32")), c.tensor(draw(c, (3,), "uint32"))
    c.add("random_bits", keys, counters, shape=(6, 5), stream=2**32 - 1)
    c.add("random_bits", c.place(draw(c, (2, 3, 2), "uint32"), "transposed"), shape=(7,), stream=9)
    c.add("random_bits", key, shape=(40,), stream=1, dtype="int64")
    c.add("random_bits", key, c.tensor(draw(c, (), "uint32")), shape=(40,), stream=1, dtype="uint8")
    bits = c.builder.op("random_bits", key, shape=(9, 33), stream=3)
    c.add("flip", bits.T, dims=(1,))
    return c.case()


_MOVES: Mapping[str, Callable[[], Case]] = {
    "iota": iota_case,
    "flip": flip_case,
    "pad": pad_case,
    "concatenate": concatenate_case,
    "take": take_case,
    "dynamic_slice": dynamic_slice_case,
    "dynamic_update": dynamic_update_case,
    "random_bits": random_bits_case,
}


def indexed_cases() -> Iterator[Case]:
    """A case of each indexed operation."""
    yield from (make() for make in _MOVES.values())
