"""The training steps that are measured: sizes, data, initial parameters, model of the least time.

Only NumPy is needed here. Data and parameters come from fixed seeds, so every runner trains the
same network on the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel.mlp import initial_parameters
from trainkernel.target import Target

Array = NDArray[Any]

NUM_CHECKED_STEPS = 20


@dataclass(frozen=True)
class Workload:
    """One training step of an MLP.

    Attributes
    ----------
    name : str
    layers : tuple of int
    batch : int
    activation, loss, optimizer, dtype : str
        As ``trainkernel.mlp.mlp_step`` takes them; ``dtype`` is that of the products' operands,
        parameters and optimizer state are float32.
    learning_rate : float
    floor_barriers : int
        Grid barriers that the step cannot do without: none where one block does it all, else one
        after the batch and one after the update.
    loss_rtol : float
        How far two correct implementations' losses may differ after ``NUM_CHECKED_STEPS`` steps.
    """

    name: str
    layers: tuple[int, ...]
    batch: int
    activation: str
    loss: str
    optimizer: str
    dtype: str
    learning_rate: float
    floor_barriers: int
    loss_rtol: float

    def data(self) -> dict[str, Array]:
        """``x`` float32, and ``target`` float32; for cross-entropy also ``classes`` int64.

        The targets are a function of the inputs, so that training makes the loss smaller.
        """
        generator = np.random.default_rng(1)
        x = generator.standard_normal((self.batch, self.layers[0])).astype(np.float32)
        projection = generator.standard_normal((self.layers[0], self.layers[-1])) / np.sqrt(self.layers[0])
        signal = np.sin(2 * (x.astype(np.float64) @ projection))
        if self.loss == "mse":
            return {"x": x, "target": signal.astype(np.float32)}
        classes = signal.argmax(axis=1)
        return {"x": x, "target": np.eye(self.layers[-1], dtype=np.float32)[classes], "classes": classes}

    def parameters(self) -> dict[str, Array]:
        """``w0`` [in, out], ``b0`` [out], ``w1``, ..."""
        return initial_parameters(self.layers, self.activation, seed=0)

    @property
    def num_parameters(self) -> int:
        return sum(fan_in * fan_out + fan_out for fan_in, fan_out in zip(self.layers, self.layers[1:], strict=False))

    def floor_us(self, target: Target) -> float:
        """A model of the least time per step: barriers + memory traffic + products at peak rate.

        Traffic: the batch is read once; parameters and moments are read and written once, from
        device memory (a step whose state stays in the L2 cache can be faster). Products: forward,
        weight gradients, and input gradients of every layer but the first.
        """
        arrays = 1 if self.optimizer == "sgd" else 3
        data_bytes = 4 * self.batch * (self.layers[0] + self.layers[-1]) + 2 * 4 * arrays * self.num_parameters
        products = [fan_in * fan_out for fan_in, fan_out in zip(self.layers, self.layers[1:], strict=False)]
        flops = 2 * self.batch * (3 * sum(products) - products[0])
        rate = target.fma_flops_per_us if self.dtype == "float32" else target.tensor_flops_per_us
        barriers_us = self.floor_barriers * target.grid_barrier_us
        return barriers_us + data_bytes / target.memory_bytes_per_us + flops / rate


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny", (8, 32, 32, 1), 32, "relu", "mse", "sgd", "float32", 5e-2, 0, 1e-4),
        Workload("pinn", (2, 64, 64, 64, 1), 1024, "tanh", "mse", "adam", "float32", 1e-3, 2, 1e-4),
        Workload("rl", (17, 256, 256, 6), 256, "relu", "mse", "adam", "float32", 1e-3, 2, 1e-4),
        Workload("mnist", (784, 256, 128, 10), 128, "relu", "cross_entropy", "adamw", "float32", 1e-3, 2, 1e-4),
        Workload("mnist_bf16", (784, 256, 128, 10), 128, "relu", "cross_entropy", "adamw", "bfloat16", 1e-3, 2, 3e-2),
    )
}
