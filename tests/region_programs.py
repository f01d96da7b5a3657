"""Programs whose products run near a block, for the emulator and for a device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel.builder import ProgramBuilder
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program

SHAPES = [
    (32, (16, 24, 8), 2),
    (96, (20, 40, 24, 10), 3),
    (48, (3, 17, 33, 1), 1),
    (256, (64, 64, 64), 2),
    (40, (8, 130, 8), 5),
    (96, (16, 64, 128, 24), 8),
]
"""Batch, layers and pieces: widths of whole runs of 8 and others, one piece and several, of whole steps and not."""


def random_inputs(program: Program) -> list[NDArray[Any]]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(spec.shape, dtype=np.float32).astype(DTYPES[spec.dtype].numpy)
        for spec in program.tensor_inputs
    ]


def product(m: int, n: int, k: int) -> Program:
    """One float32 product."""
    b = ProgramBuilder()
    return b.build([b.op("mm", b.input("x", (m, k)), b.input("w", (k, n)))])


def tf32(value: NDArray[Any]) -> NDArray[Any]:
    """A float32 array rounded to TF32, halves away from zero, as float64."""
    return ((value.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32).astype(np.float64)


def region_step(batch: int, layers: tuple[int, ...], dtype: str) -> Program:
    """A perceptron's step: its weights are float32 and rounded in the step where the dtype is another one."""
    b = ProgramBuilder()
    h, target = b.input("x", (batch, layers[0]), dtype), b.input("target", (batch, layers[-1]))
    weights, kept = [], [h]
    for number, shape in enumerate(pairwise(layers)):
        weights.append(b.input(f"w{number}", shape))
        w = b.op("cast", weights[-1], dtype=dtype)
        h = b.op("relu", b.op("mm", h, w, dtype=dtype), dtype=dtype)
        kept.append(h)
    grad = b.op("cast", b.op("sub", h, target), dtype=dtype)
    updated = []
    for number in reversed(range(len(weights))):
        own = b.op("cast", b.op("mm", kept[number].T, grad, dtype=dtype), dtype="float32")
        updated.append(b.op("sub", weights[number], b.op("mul", own, 0.01)))
        if number:
            w = b.op("cast", weights[number], dtype=dtype)
            grad = b.op(
                "threshold_backward", b.op("mm", grad, w.T, dtype=dtype), kept[number], dtype=dtype, threshold=0
            )
    return b.build([*updated, b.op("sum", grad, dims=(0,), dtype="float32")])
