"""The same training steps in JAX: ``jit`` of one step, and of a scan over many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from timing import wall_clock
from workloads import Workload

# JAX would take most of the device's memory at its first use, and torch is in the same process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bfloat16": "default"}


class JaxTrainer:
    """A jitted step or scan with its state donated.

    Parameters
    ----------
    workload : Workload
    device : str
        ``"cuda:0"``, or any name of a device on the host.
    precision : str
        One of ``PRECISIONS``: how products of float32 are computed, for the whole process. Products
        of bfloat16 are what they are.
    steps, unroll : int
        Of the scan; one step is jitted alone.
    """

    note = ""

    def __init__(self, workload: Workload, device: str, precision: str, steps: int = 1, unroll: int = 1) -> None:
        jax.config.update("jax_default_matmul_precision", PRECISIONS[precision])
        self.workload = workload
        self.steps_per_launch = steps
        self.device = jax_device(device)
        self.clock = wall_clock(self.wait) if device.startswith("cuda") else None
        self.train = jax.jit(workload.training(jax, steps, unroll), donate_argnums=0)
        self.data = jax.device_put(workload.data(), self.device)
        self.reset()

    def reset(self) -> None:
        self.state = jax.device_put(self.workload.initial_state(), self.device)
        self.last: Any = ()

    def launch(self) -> None:
        self.state, self.last = self.train(self.state, self.data)

    def wait(self) -> None:
        """Until the last launch is done, with all that it writes."""
        jax.block_until_ready((self.state, self.last))

    def losses(self) -> Sequence[float]:
        values: list[float] = np.asarray(self.last).ravel().tolist()
        return values


def jax_device(name: str) -> Any:
    """JAX's device of that name; the CPU for a name that is no GPU's."""
    if not name.startswith("cuda"):
        return jax.devices("cpu")[0]
    return jax.devices("cuda")[int(name.partition(":")[2] or 0)]
