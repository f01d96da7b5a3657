"""Steps whose first layer stays on the grid and whose rest is a region, so that copies may start before a barrier."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from trainkernel.builder import ProgramBuilder
from trainkernel.ir import Program, TensorSpec
from trainkernel.target import Target


def perceptron_step(
    b: ProgramBuilder, x: TensorSpec, target: TensorSpec, weights: list[TensorSpec], biases: list[TensorSpec]
) -> list[TensorSpec]:
    """The updated weights and biases, and a loss per row."""
    kept = [x]
    for w, bias in zip(weights, biases, strict=True):
        kept.append(b.op("relu", b.op("addmm", bias, kept[-1], w)))
    grad = b.op("sub", kept[-1], target)
    loss = b.op("sum", b.op("mul", grad, grad), dims=(1,))
    new_weights, new_biases = [], []
    for number in reversed(range(len(weights))):
        new_weights.append(b.op("sub", weights[number], b.op("mul", b.op("mm", kept[number].T, grad), 0.01)))
        new_biases.append(b.op("sub", biases[number], b.op("mul", b.op("sum", grad, dims=(0,)), 0.01)))
        if number:
            back = b.op("mm", grad, weights[number].T)
            grad = b.op("threshold_backward", back, kept[number], threshold=0)
    return [*reversed(new_weights), *reversed(new_biases), loss]


def wide_step(batch: int, layers: tuple[int, ...]) -> Program:
    """Inputs x, target, weights and biases; results as those of ``perceptron_step``."""
    b = ProgramBuilder()
    x, target = b.input("x", (batch, layers[0])), b.input("target", (batch, layers[-1]))
    weights = [b.input(f"w{number}", shape) for number, shape in enumerate(pairwise(layers))]
    biases = [b.input(f"b{number}", (width,)) for number, width in enumerate(layers[1:])]
    return b.build(perceptron_step(b, x, target, weights, biases))


def wide_loop(
    batch: int, layers: tuple[int, ...], length: int, *, stacked: bool, dynamic: bool = False, inner: int = 0
) -> Program:
    """Steps of it with weights and biases as carries, and a target from a stack or a constant.

    With ``inner`` each step is a loop of so many of them.
    """
    num = len(layers) - 1
    body = ProgramBuilder()
    x = body.input("x", (batch, layers[0]))
    target = None if stacked else body.input("target", (batch, layers[-1]))
    weights = [body.input(f"w{number}", shape) for number, shape in enumerate(pairwise(layers))]
    biases = [body.input(f"b{number}", (width,)) for number, width in enumerate(layers[1:])]
    if target is None:
        target = body.input("target", (batch, layers[-1]))
    step = body.build(perceptron_step(body, x, target, weights, biases))
    if inner:
        outer = ProgramBuilder()
        operands = []
        for spec in step.inputs:
            sliced = stacked and spec.buffer == "target"
            operands.append(outer.input(spec.buffer, (inner, *spec.shape) if sliced else spec.shape))
        results = outer.loop(step, operands, num_carry=2 * num, num_xs=int(stacked), length=inner)
        step = outer.build(list(results))
    b = ProgramBuilder()
    operands = []
    for spec in step.inputs:
        sliced = stacked and spec.buffer == "target"
        operands.append(b.input(spec.buffer, (length, *spec.shape) if sliced else spec.shape))
    count = b.scalar("steps", "int32") if dynamic else length
    results = b.loop(step, operands, num_carry=2 * num, num_xs=int(stacked), length=count, room=length)
    return b.build([*results, b.op("sum", results[1], dims=(0,))])


def odd(values: Any, offset: int) -> Any:
    """The same numbers, so many elements from an address that is a multiple of 64."""
    room = np.zeros(values.size + 32, values.dtype)
    first = -(room.ctypes.data // values.itemsize) % 16 + offset
    own = room[first : first + values.size].reshape(values.shape)
    own[...] = values
    return own


def target_of(shared_kib: int, num_sms: int = 132) -> Target:
    return replace(Target.preset("sm_90a"), shared_bytes_per_block=1024 * shared_kib, num_sms=num_sms)
