"""Small programs that between them use every kind of barrier: for golden files and mutations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainkernel.builder import ProgramBuilder
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program, ScalarSpec


@dataclass(frozen=True)
class Sample:
    """A program with the options that ``generate`` gets."""

    program: Program
    options: Mapping[str, Any] = field(default_factory=dict)

    def inputs(self) -> list[Any]:
        """Normal values; scalars by value are 0.125 or the number 3."""
        rng = np.random.default_rng(11)
        values: list[Any] = []
        for spec in self.program.inputs:
            if isinstance(spec, ScalarSpec):
                values.append(3 if spec.dtype == "int32" else 0.125)
            else:
                values.append((0.5 * rng.standard_normal(spec.shape)).astype(DTYPES[spec.dtype].numpy))
        return values


def mlp_step() -> Sample:
    """Two layers, mean squared error, SGD in place: 20-33-2 on 40 rows."""
    b = ProgramBuilder()
    x, y = b.input("x", (40, 20)), b.input("y", (40, 2))
    w0, b0 = b.input("w0", (20, 33)), b.input("b0", (33,))
    w1, b1 = b.input("w1", (33, 2)), b.input("b1", (2,))
    rate = b.scalar("rate")
    h = b.op("tanh", b.op("addmm", b0, x, w0, name="z0"), name="h")
    difference = b.op("sub", b.op("addmm", b1, h, w1, name="z1"), y, name="difference")
    loss = b.op("mean", b.op("mul", difference, difference, name="squares"), name="loss")
    grad = b.op("mul", difference, 2 / 80, name="grad")
    back = b.op("mm", grad, w1.T, name="back")
    slope = b.op("sub", 1, b.op("mul", h, h, name="h_squared"), name="slope")
    grad_z0 = b.op("mul", back, slope, name="grad_z0")
    gradients = {
        "w0": b.op("mm", x.T, grad_z0, name="grad_w0"),
        "b0": b.op("sum", grad_z0, dims=(0,), name="grad_b0"),
        "w1": b.op("mm", h.T, grad, name="grad_w1"),
        "b1": b.op("sum", grad, dims=(0,), name="grad_b1"),
    }
    outputs = [loss]
    for state, name in ((w0, "w0"), (b0, "b0"), (w1, "w1"), (b1, "b1")):
        outputs.append(b.op("sub", state, b.op("mul", gradients[name], rate), name=f"{name}_next"))
    return Sample(b.build(outputs), {"inplace_outputs": {1: 2, 2: 3, 3: 4, 4: 5}, "region_pieces": 0})


def mlp_block() -> Sample:
    """The same step in one block."""
    sample = mlp_step()
    return Sample(sample.program, {**sample.options, "region_pieces": 1})


def mlp_rows() -> Sample:
    """The same step in a region of 8 pieces, whose partial gradients are added up after a grid barrier."""
    sample = mlp_step()
    return Sample(sample.program, {**sample.options, "region_pieces": 8})


def softmax_rows() -> Sample:
    """Few long rows: softmax, and sums and maxima in two phases, over rows and over columns."""
    b = ProgramBuilder()
    x = b.input("x", (3, 4500))
    largest, total = b.multi("softmax_stats", x, dims=(1,), shape=(3, 1), name="stats")
    weights = b.op("div", b.op("exp", b.op("sub", x, largest, name="shifted"), name="e"), total, name="weights")
    mean = b.op("mean", b.op("mul", x, x, name="x_squared"), dims=(1,), name="mean")
    peak = b.op("max", weights, dims=(1,), name="peak")
    columns = b.op("sum", b.input("long", (1200, 40)), dims=(0,), name="columns")
    few = b.op("sum", b.input("short", (40, 30)), dims=(1,), name="few")
    return Sample(b.build([weights, mean, peak, columns, few]))


def tensor_product() -> Sample:
    """bf16 products on tensor cores, one operand transposed, with an epilogue; and a matrix-vector one."""
    b = ProgramBuilder()
    x, w = b.input("x", (40, 50), "bfloat16"), b.input("w", (70, 50), "bfloat16")
    bias, v = b.input("bias", (70,)), b.input("v", (1, 70), "bfloat16")
    z = b.op("mm", x, w.T, dtype="float32", name="z")
    h = b.op("relu", b.op("add", z, bias, name="z_bias"), dtype="bfloat16", name="h")
    line = b.op("mm", v, w, dtype="float32", name="line")
    out = b.op("mm", h, w, dtype="float32", name="out")
    return Sample(b.build([out, h, line]), {"gemm_k_tile": 16, "region_pieces": 0})


def loop() -> Sample:
    """A recurrent cell over stacked inputs, its length a scalar: carry, constants, stacked outputs."""
    body = ProgramBuilder()
    w, carry, row = body.input("w", (40, 40)), body.input("carry", (9, 40)), body.input("row", (9, 40))
    z = body.op("add", body.op("mm", carry, w, name="product"), row, name="z")
    after = body.op("tanh", z, name="after")
    step = body.build([after, body.op("sum", after, dims=(1,), name="row_sums")])
    b = ProgramBuilder()
    operands = [b.input("w", (40, 40)), b.input("start", (9, 40)), b.input("rows", (4, 9, 40))]
    length = b.scalar("length", "int32")
    final, sums = b.loop(step, operands, num_carry=1, num_xs=1, length=length, room=4, name="cell")
    outputs = [final, sums, b.op("mean", final, dims=(0,), name="average")]
    # Three steps of 16 along the depth: shared-memory buffers are used again within one piece.
    return Sample(b.build(outputs), {"gemm_k_tile": 16})


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "mlp_step": mlp_step,
    "mlp_block": mlp_block,
    "mlp_rows": mlp_rows,
    "softmax_rows": softmax_rows,
    "tensor_product": tensor_product,
    "loop": loop,
}
