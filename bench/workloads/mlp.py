"""Multi-layer perceptrons: all that torch trains too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from workloads.workload import Array, Params, Workload, dense_layers, float32, perceptron


@dataclass(frozen=True, kw_only=True)
class Mlp(Workload):
    """A regression or a classification.

    Attributes
    ----------
    layers : tuple of int
    activation : {"relu", "tanh"}
    objective : {"mse", "cross_entropy", "reconstruction"}
        The last is the mean squared error against the input.
    """

    layers: tuple[int, ...]
    activation: str = "relu"
    objective: str = "mse"

    @property
    def shape(self) -> str:
        return f"{_joined(self.layers)} {self.activation}, {self.objective.replace('_', ' ').replace('mse', 'MSE')}"

    def small(self) -> Mlp:
        layers = tuple(min(width, 12) for width in self.layers)
        return replace(self, layers=layers, batch=min(self.batch, 16))

    def data(self) -> tuple[Array, ...]:
        """``x`` [batch, in]; but for a reconstruction the targets, which are a function of ``x``."""
        generator = np.random.default_rng(1)
        x = generator.standard_normal((self.batch, self.layers[0]), np.float32)
        if self.objective == "reconstruction":
            return (x,)
        projection = generator.standard_normal((self.layers[0], self.layers[-1]), np.float32)
        signal = np.sin(2 * (x @ projection) / np.sqrt(self.layers[0]))
        if self.objective == "mse":
            return x, float32(signal)
        return x, signal.argmax(axis=1).astype(np.int32)

    def parameters(self) -> Params:
        gain = 2.0 if self.activation == "relu" else 1.0
        return dense_layers(np.random.default_rng(0), self.layers, gain)

    def loss(self, lib: Any, params: Params, *data: Any) -> Any:
        x, target = data[0], data[-1]
        activation = {"relu": lib.nn.relu, "tanh": lib.numpy.tanh}[self.activation]
        guess = perceptron(params, x, activation, self.dtype).astype("float32")
        if self.objective != "cross_entropy":
            return lib.numpy.mean((guess - target) ** 2)
        chosen = lib.nn.one_hot(target, self.layers[-1])
        return -lib.numpy.mean(lib.numpy.sum(chosen * lib.nn.log_softmax(guess), axis=-1))


def _joined(layers: tuple[int, ...]) -> str:
    """``3-128×5-3`` for (3, 128, 128, 128, 128, 128, 3)."""
    runs = [(width, len(list(run))) for width, run in groupby(layers)]
    return "-".join(f"{width}×{count}" if count > 2 else "-".join([str(width)] * count) for width, count in runs)


_BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "loss_rtol": 3e-2}
_MNIST: dict[str, Any] = {
    "layers": (784, 256, 128, 10), "batch": 128, "objective": "cross_entropy", "optimizer": "adamw",
}  # fmt: skip

BASE = (
    Mlp(name="tiny", layers=(8, 32, 32, 1), batch=32, optimizer="sgd", learning_rate=5e-2, floor_blocks=1),
    Mlp(name="pinn", layers=(2, 64, 64, 64, 1), batch=1024, activation="tanh"),
    Mlp(name="rl", layers=(17, 256, 256, 6), batch=256),
    Mlp(name="mnist", **_MNIST),
    Mlp(name="mnist_bf16", **_MNIST, **_BFLOAT16),
    Mlp(name="ngp", layers=(32, 64, 64, 64, 16), batch=65536, **_BFLOAT16),
    Mlp(name="wide", layers=(1024,) * 5, batch=1024, optimizer="sgd", learning_rate=1e-2, **_BFLOAT16),
    Mlp(name="wide4k", layers=(4096,) * 3, batch=4096, optimizer="sgd", learning_rate=1e-2, **_BFLOAT16),
)

FIELD5 = Mlp(name="field5", layers=(3, *(128,) * 5, 3), batch=2**18, **_BFLOAT16)
FIELD2 = Mlp(name="field2", layers=(32, 64, 64, 3), batch=2**18, **_BFLOAT16)
AUTOENCODER = Mlp(name="autoencoder", layers=(784, 256, 64, 256, 784), batch=256, objective="reconstruction")
