"""A physics-informed network (Raissi et al., 2019) for u_t + u u_x = nu u_xx."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workloads.workload import Array, Params, Workload, dense_layers, perceptron

VISCOSITY = 0.01 / math.pi


@dataclass(frozen=True, kw_only=True)
class Burgers(Workload):
    """The equation inside, u(x, 0) = -sin(pi x), and u = 0 at both ends."""

    width: int
    depth: int

    @property
    def shape(self) -> str:
        return f"Burgers' equation, 2-{self.width}×{self.depth}-1 tanh"

    def small(self) -> Burgers:
        return replace(self, batch=8, width=8, depth=2)

    def data(self) -> tuple[Array, ...]:
        """``x`` and ``t`` of the points, [batch] each."""
        generator = np.random.default_rng(1)
        x = generator.uniform(-1, 1, self.batch).astype(np.float32)
        return x, generator.uniform(0, 1, self.batch).astype(np.float32)

    def parameters(self) -> Params:
        return dense_layers(np.random.default_rng(0), (2, *(self.width,) * self.depth, 1))

    def loss(self, lib: Any, params: Params, *data: Any) -> Any:
        xp = lib.numpy
        x, t = data

        def u(x: Any, t: Any) -> Any:
            return perceptron(params, xp.stack([x, t]), xp.tanh)[0]

        def residual(x: Any, t: Any) -> Any:
            value, (u_x, u_t) = lib.value_and_grad(u, (0, 1))(x, t)
            return u_t + value * u_x - VISCOSITY * lib.grad(lib.grad(u))(x, t)

        inside = lib.vmap(residual)(x, t)
        start = lib.vmap(u)(x, xp.zeros_like(t)) + xp.sin(math.pi * x)
        sides = lib.vmap(u)(xp.sign(x), t)
        return xp.mean(inside**2) + xp.mean(start**2) + xp.mean(sides**2)


PINN5 = Burgers(name="pinn5", batch=2048, width=128, depth=5)
