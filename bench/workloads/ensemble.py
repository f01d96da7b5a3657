"""Many small networks side by side, each with its own weights and batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workloads.workload import Array, Params, Workload, dense_layers, perceptron


@dataclass(frozen=True, kw_only=True)
class Ensemble(Workload):
    """Regressions of one network, by ``vmap``; the loss is the mean over the members."""

    layers: tuple[int, ...]
    members: int

    @property
    def shape(self) -> str:
        return f"{self.members} networks {'-'.join(map(str, self.layers))} relu, MSE"

    def small(self) -> Ensemble:
        return replace(self, batch=8, members=3, layers=(self.layers[0], 8, 8, self.layers[-1]))

    def data(self) -> tuple[Array, ...]:
        """``x`` [members, batch, in] and targets."""
        generator = np.random.default_rng(1)
        x = generator.standard_normal((self.members, self.batch, self.layers[0]), np.float32)
        projection = generator.standard_normal((self.members, self.layers[0], self.layers[-1]), np.float32)
        return x, np.sin(x @ projection)

    def parameters(self) -> Params:
        generator = np.random.default_rng(0)
        nets = [dense_layers(generator, self.layers, gain=2.0) for _ in range(self.members)]
        return [
            {name: np.stack([net[place][name] for net in nets]) for name in ("w", "b")}
            for place in range(len(self.layers) - 1)
        ]

    def loss(self, lib: Any, params: Params, *data: Any) -> Any:
        x, target = data
        return lib.numpy.mean((perceptron(params, x, lib.nn.relu) - target) ** 2)

    def step(self, lib: Any, state: Any, data: Any) -> tuple[Any, Any]:
        params, moments = state
        gradient = lib.value_and_grad(lambda params, *data: self.loss(lib, params, *data))
        values, grads = lib.vmap(gradient)(params, *data)
        return self.update(lib, params, grads, moments), lib.numpy.mean(values)


ENSEMBLE = Ensemble(name="ensemble", batch=64, layers=(4, 64, 64, 2), members=256, floor_blocks=256)
