"""What all workloads are: sizes, first values and a step, written once for trainkernel and JAX.

``lib`` is either library: the modules ``jax`` and ``trainkernel`` have the same names, so both run
literally the same code. Only NumPy and trainkernel are needed to import this. Data and parameters
come from fixed seeds, and each step trains on the same batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import trainkernel as tk
from trainkernel import tree
from trainkernel.ir import Loop, Program, TensorSpec
from trainkernel.target import Target
from workloads import optimizers

Array = NDArray[Any]
Params = Any

NUM_CHECKED_STEPS = 20
"""The losses of two runners are compared after so many steps."""


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """One training step at one size.

    Attributes
    ----------
    name : str
    batch : int
    optimizer : str
        One of ``optimizers.NAMES``.
    learning_rate : float
    dtype : str
        Of the products' operands; parameters and optimizer state are float32.
    floor_blocks : int or None
        Blocks that share the step without a barrier between them; None where it takes the whole
        device and two grid barriers, one after the batch and one after the update.
    loss_rtol : float
        How far two correct implementations' losses may differ after ``NUM_CHECKED_STEPS`` steps.
    """

    name: str
    batch: int
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    dtype: str = "float32"
    floor_blocks: int | None = None
    loss_rtol: float = 1e-4

    @property
    @abstractmethod
    def shape(self) -> str:
        """What is trained, in a few words."""

    @property
    def summary(self) -> str:
        """The shape, and what else makes a step what it is."""
        names = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
        return f"{self.shape}; batch {self.batch:,}, {names[self.optimizer]}, {self.dtype}"

    @abstractmethod
    def small(self) -> Self:
        """The same step at a size that NumPy does at once."""

    @abstractmethod
    def data(self) -> tuple[Array, ...]:
        """The batch."""

    @abstractmethod
    def parameters(self) -> Params:
        """First values of what is trained."""

    @abstractmethod
    def loss(self, lib: Any, params: Params, *data: Any) -> Any:
        """A scalar."""

    def initial_state(self) -> Any:
        """All that a step updates, as a tree of new NumPy arrays."""
        params = self.parameters()
        return params, optimizers.init(self.optimizer, params)

    def step(self, lib: Any, state: Any, data: Sequence[Any]) -> tuple[Any, Any]:
        """The state after a step, and the loss before it."""
        params, moments = state
        value, grads = lib.value_and_grad(lambda params: self.loss(lib, params, *data))(params)
        return self.update(lib, params, grads, moments), value

    def update(self, lib: Any, params: Params, grads: Params, moments: Any) -> tuple[Any, Any]:
        """The optimizer's step."""
        return optimizers.update(lib, self.optimizer, self.learning_rate, params, grads, moments)

    def training(self, lib: Any, steps: int, unroll: int = 1) -> Callable[[Any, Any], tuple[Any, Any]]:
        """``(state, data) -> (state, losses)`` of one step, or of a scan over ``steps`` of them."""

        def one(state: Any, data: Any) -> tuple[Any, Any]:
            return self.step(lib, state, data)

        def many(state: Any, data: Any) -> Any:
            return lib.lax.scan(lambda state, _: self.step(lib, state, data), state, None, steps, unroll=unroll)

        return one if steps == 1 else many

    def floor_us(self, target: Target, precision: str) -> float:
        """A model of the least time per step: barriers + memory traffic + products at the peak rate of a precision.

        Traffic: the batch is read once; the state is read and written once, from device memory (a
        step whose state stays in the L2 cache can be faster). Products: those of the traced step.
        """
        state, data = self.initial_state(), self.data()
        moved_bytes: int = sum(leaf.nbytes for leaf in data) + 2 * sum(leaf.nbytes for leaf in tree.leaves(state))
        flops = product_flops(tk.jit(self.training(tk, 1)).lower(state, data).program)
        tensor_rate = target.tensor_flops_per_us
        rate = {"float32": target.fma_flops_per_us, "tf32": tensor_rate / 2, "bfloat16": tensor_rate}[precision]
        barriers_us = 0.0 if self.floor_blocks else 2 * target.grid_barrier_us
        share = min((self.floor_blocks or target.num_sms) / target.num_sms, 1.0)
        return barriers_us + moved_bytes / target.memory_bytes_per_us + flops / (share * rate)


def product_flops(program: Program) -> int:
    """Floating-point operations of the matrix products of a Program without loops."""
    flops = 0
    for item in program.operations:
        assert not isinstance(item, Loop)
        if item.op in ("mm", "bmm"):
            left = item.inputs[0]
            assert isinstance(left, TensorSpec)
            flops += 2 * prod(item.outputs[0].shape) * left.shape[-1]
    return flops


def dense_layers(generator: np.random.Generator, widths: Sequence[int], gain: float = 1.0) -> list[dict[str, Array]]:
    """Weights ``w`` [in, out], uniform of variance ``gain / in``, and biases ``b`` of zero."""
    layers = []
    for fan_in, fan_out in pairwise(widths):
        bound = sqrt(3 * gain / fan_in)
        w = generator.uniform(-bound, bound, (fan_in, fan_out)).astype(np.float32)
        layers.append({"w": w, "b": np.zeros(fan_out, np.float32)})
    return layers


def perceptron(layers: Sequence[Any], x: Any, activation: Callable[[Any], Any], dtype: str = "float32") -> Any:
    """Dense layers with an activation between them; ``dtype`` is that of the products' operands and results."""
    x = x.astype(dtype)
    for layer in layers[:-1]:
        x = activation(x @ layer["w"].astype(dtype) + layer["b"].astype(dtype))
    return x @ layers[-1]["w"].astype(dtype) + layers[-1]["b"].astype(dtype)


def float32(values: Any) -> Array:
    """A NumPy array of float32."""
    return np.asarray(values, np.float32)
