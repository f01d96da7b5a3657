"""The same training steps in trainkernel: a kernel of one step, or of a loop over many.

On a GPU the arrays are torch's, so that events on torch's stream time the launches; on the host they
are NumPy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from timing import event_clock
from workloads import Workload

import trainkernel as tk
from trainkernel import tree
from trainkernel.dtypes import DTYPES


class TrainkernelTrainer:
    """A kernel bound to its state: each launch is one driver call.

    Parameters
    ----------
    workload : Workload
    device : str
        For ``tk.jit``.
    stream : torch.cuda.Stream or None
        Where the steps run; None on a host device.
    steps : int
        Per launch.
    options : mapping
        Further arguments of ``tk.jit``.
    """

    def __init__(
        self, workload: Workload, device: str, stream: Any, steps: int = 1, options: Mapping[str, Any] | None = None
    ) -> None:
        self.workload = workload
        self.stream = stream
        self.steps_per_launch = steps
        self.clock = None if stream is None else event_clock(stream)
        self.memory = device if device.startswith("cuda") else None
        self.train = tk.jit(workload.training(tk, steps), donate_argnums=0, device=device, **(options or {}))
        self.state, self.data = self.on_device(workload.initial_state()), self.on_device(workload.data())
        self.kernel = self.train.kernel(self.state, self.data)
        self.note = (
            "" if stream is None else f"{self.kernel.stats.grid_barriers} grid barriers; {self.kernel.resource_usage()}"
        )
        self.last: Any = None
        self.bind()

    def bind(self) -> None:
        """Bind the kernel to the state, the data and new losses."""
        step = self.train.lower(self.state, self.data)
        outputs = [
            None if index in step.inplace_outputs else self.on_device(np.zeros(spec.shape, DTYPES[spec.dtype].numpy))
            for index, spec in enumerate(step.program.outputs)
        ]
        self.last = outputs[step.results[-1].output]
        inputs = [*tree.leaves((self.state, self.data)), *self.on_device(list(step.captured))]
        self.bound = self.kernel.bind(inputs, outputs)

    def on_device(self, values: Any) -> Any:
        """A tree of arrays where the kernel wants them."""
        if self.memory is None:
            return tree.map(np.array, values)
        import torch

        return tree.map(lambda value: torch.from_numpy(np.array(value)).to(self.memory), values)

    def reset(self) -> None:
        for leaf, value in zip(tree.leaves(self.state), tree.leaves(self.workload.initial_state()), strict=True):
            leaf[...] = self.on_device(value)

    def launch(self) -> None:
        self.bound.launch(self.stream)

    def losses(self) -> Sequence[float]:
        values: list[float] = self.last.reshape(-1).tolist()
        return values


class CallTrainer(TrainkernelTrainer):
    """The jitted function called as a user would, ``state, loss = train(state, data)``."""

    def bind(self) -> None:
        """Nothing to do ahead: each call looks at its arguments."""

    def launch(self) -> None:
        self.state, self.last = self.train(self.state, self.data)
