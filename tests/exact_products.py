"""Matrix products whose sums are exact, so that any difference is an error of indices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel.builder import ProgramBuilder
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program

Array = NDArray[Any]


def small_integers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Products of these have exact sums: any error is an indexing error."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(DTYPES[dtype].numpy)


def stored(m: int, n: int, k: int, layout: str) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((m, k) if layout[0] == "n" else (k, m)), ((k, n) if layout[1] == "n" else (n, k))


def product(m: int, n: int, k: int, layout: str, dtype: str = "bfloat16") -> tuple[Program, list[Array], Array]:
    """A product, its inputs and what it must be."""
    builder = ProgramBuilder()
    shapes = stored(m, n, k, layout)
    a, b = (builder.input(name, shape, dtype) for name, shape in zip("ab", shapes, strict=True))
    inputs = [small_integers(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    wide = [array.astype(np.float32) for array in inputs]
    expected = (wide[0] if layout[0] == "n" else wide[0].T) @ (wide[1] if layout[1] == "n" else wide[1].T)
    out = builder.op("mm", a if layout[0] == "n" else a.T, b if layout[1] == "n" else b.T, dtype="float32")
    return builder.build([out]), inputs, expected
