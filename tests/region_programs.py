"""Programs whose products run near a block, for the emulator and for a device; random ones with their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel.builder import ProgramBuilder
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program, TensorSpec
from trainkernel.target import Target

SHAPES = [
    (64, (16, 24, 8), 2),
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


TILES = [(32, 64, 40), (33, 70, 100), (64, 64, 17), (20, 9, 129), (70, 33, 64), (16, 32, 9)]
"""Rows, columns and depth: whole and ragged tiles, depths that end inside of a step and of a group's part of it."""


def plain_and_fused(shape: tuple[int, int, int], layout: str) -> Program:
    """Two float32 products of plain and of fused operands; ``layout`` says for each whether it is transposed."""
    m, n, k = shape
    b = ProgramBuilder()
    x = b.input("x", (m, k) if layout[0] == "n" else (k, m))
    w = b.input("w", (k, n) if layout[1] == "n" else (n, k))
    left, right = x if layout[0] == "n" else x.T, w if layout[1] == "n" else w.T
    return b.build([b.op("relu", b.op("mm", left, right)), b.op("mm", b.op("neg", left), right)])


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


# ---------------------------------------------------------------------------- random steps

WIDTHS = (1, 3, 8, 16, 17, 24, 40, 64, 100, 128)
BATCHES = (7, 16, 48, 60, 96, 144)


@dataclass(frozen=True)
class RandomStep:
    """A step, its inputs, and the options under which it is generated."""

    name: str
    program: Program
    inputs: tuple[Any, ...]
    options: Mapping[str, Any]


class _Draw:
    """Draws a step's sizes, kinds of operands and inputs."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = ProgramBuilder()
        self.inputs: list[NDArray[Any]] = []

    def pick(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def input(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> TensorSpec:
        """A new input, which may begin one element from an aligned address."""
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        whole = np.zeros(values.size + 1, DTYPES[dtype].numpy)[int(self.rng.integers(2)) :][: values.size]
        whole[:] = values.reshape(-1)
        self.inputs.append(whole.reshape(shape))
        return self.builder.input(f"x{len(self.inputs)}", shape, dtype)

    def matrix(self, rows: int, columns: int, dtype: str, scale: float = 1.0) -> TensorSpec:
        """A plain matrix, a transposed one, a window with gaps, or one rounded in the step."""
        kind = self.pick(("plain", "transposed", "window", "rounded"))
        if kind == "transposed":
            return self.input((columns, rows), dtype, scale).T
        if kind == "window":
            offset, stride = self.pick((0, 1, 8)), columns + self.pick((0, 3, 8))
            whole = self.input((offset + rows * stride,), dtype, scale)
            return TensorSpec(whole.buffer, (rows, columns), (stride, 1), offset, dtype)
        if kind == "rounded":
            return self.builder.op("cast", self.input((rows, columns), "float32", scale), dtype=dtype)
        return self.input((rows, columns), dtype, scale)


def random_step(seed: int) -> RandomStep:
    """A perceptron's gradients, or those of several with their own weights, all by products of one dtype."""
    draw = _Draw(seed)
    dtype = draw.pick(("float32", "float16", "bfloat16"))
    models = draw.pick((1, 1, 2, 3))
    batch = draw.pick(BATCHES)
    widths = [draw.pick(WIDTHS) for _ in range(draw.pick((2, 3, 4)))]
    outputs = _perceptron(draw, batch, widths, dtype) if models == 1 else _ensemble(draw, models, batch, widths, dtype)
    pieces = [number for number in range(1, batch + 1) if batch % number == 0 and batch // number >= 7]
    options: dict[str, Any] = {
        "region_pieces": draw.pick((0, None, *pieces)),
        "threads_per_block": draw.pick((None, 128, 512, 1024)),
        "precision": draw.pick((None, "tf32")),
        "target": replace(Target.preset(draw.pick(("sm_90a", "portable"))), num_sms=draw.pick((2, 3, 132))),
    }
    return RandomStep(f"step {seed}", draw.builder.build(outputs), tuple(draw.inputs), options)


def _perceptron(draw: _Draw, batch: int, widths: list[int], dtype: str) -> list[TensorSpec]:
    b, kept = draw.builder, [draw.matrix(batch, widths[0], dtype)]
    weights = []
    for fan_in, fan_out in pairwise(widths):
        weights.append(draw.matrix(fan_in, fan_out, dtype, fan_in**-0.5))
        z = b.op("addmm", draw.input((fan_out,), "float32"), kept[-1], weights[-1], dtype=dtype)
        kept.append(b.op(draw.pick(("relu", "tanh")), z, dtype=dtype))
    grad, outputs = kept[-1], [b.op("sum", kept[-1], dims=(1,), dtype="float32")]
    for number in reversed(range(len(weights))):
        outputs += [b.op("mm", kept[number].T, grad, dtype="float32"), b.op("sum", grad, dims=(0,), dtype="float32")]
        back = b.op("mm", grad, weights[number].T, dtype=dtype)
        grad = b.op("threshold_backward", back, kept[number], dtype=dtype, threshold=0)
    return [*outputs, grad]


def _ensemble(draw: _Draw, models: int, batch: int, widths: list[int], dtype: str) -> list[TensorSpec]:
    b, shared = draw.builder, draw.matrix(batch, widths[0], dtype)
    hidden, outputs = [], []
    first = [draw.matrix(widths[0], widths[1], dtype, widths[0] ** -0.5) for _ in range(models)]
    for w in first:
        hidden.append(b.op("relu", b.op("mm", shared, w, dtype=dtype), dtype=dtype))
        outputs.append(b.op("mm", shared.T, hidden[-1], dtype="float32"))
    x = draw.input((models, batch, widths[0]), dtype)
    w = draw.input((models, *widths[:2]), dtype, widths[0] ** -0.5)
    h = b.op("tanh", b.op("bmm", x, w, dtype=dtype), dtype=dtype)
    return [*outputs, b.op("bmm", x.mT, h, dtype="float32"), b.op("bmm", h, w.mT, dtype=dtype)]
