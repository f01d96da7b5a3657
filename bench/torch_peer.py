"""The same training steps in torch: eager, and whole steps captured in a CUDA graph.

A peer is measured at its best: the optimizer's ``fused`` and ``foreach`` implementations, and for
graphs one and ``STEPS_PER_GRAPH`` steps per graph, are all timed and the fastest is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from workloads import NUM_CHECKED_STEPS, Workload

STEPS_PER_GRAPH = 20
IMPLEMENTATIONS = ("fused", "foreach")
_NUM_WARMUP_STEPS = 5


class TorchTrainer:
    """An nn.Sequential, its optimizer and its batch on one device.

    Parameters
    ----------
    workload : Workload
    implementation : {"fused", "foreach"}
        Of the optimizer.
    device : str
    capturable : bool
        Whether the step may be captured in a CUDA graph.
    compiled : bool
        Whether forward and loss go through torch.compile.
    """

    def __init__(
        self,
        workload: Workload,
        implementation: str,
        device: str = "cuda",
        capturable: bool = False,
        compiled: bool = False,
    ) -> None:
        self.workload = workload
        self.device = device
        data = workload.data()
        self.x = torch.from_numpy(data["x"]).to(device)
        target = data["target"] if workload.loss == "mse" else data["classes"]
        self.target = torch.from_numpy(target).to(device)
        self.initial = {name: torch.from_numpy(value).to(device) for name, value in workload.parameters().items()}
        self.model = _model(workload).to(device)
        self.optimizer = _optimizer(workload, self.model, implementation, capturable)
        self.loss: Callable[[], torch.Tensor] = torch.compile(self._loss) if compiled else self._loss
        self.reset()

    def _loss(self) -> torch.Tensor:
        # Each weight is used once per step, so autocast's cache of casts could only cost time.
        with self._autocast():
            prediction = self.model(self.x)
            if self.workload.loss == "mse":
                return functional.mse_loss(prediction, self.target)
            return functional.cross_entropy(prediction, self.target)

    def _autocast(self) -> Any:
        if self.workload.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, cache_enabled=False)

    def step(self) -> torch.Tensor:
        """One training step; the loss before its update, still on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def reset(self) -> None:
        """Start training anew, in place: a captured graph keeps its addresses."""
        for index, layer in enumerate(self._layers()):
            layer.weight.copy_(self.initial[f"w{index}"].T)
            layer.bias.copy_(self.initial[f"b{index}"])
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def _layers(self) -> Iterator[nn.Linear]:
        return (module for module in self.model if isinstance(module, nn.Linear))

    def loss_after_checked_steps(self) -> float:
        """The loss that the next step computes after ``NUM_CHECKED_STEPS`` steps from the start."""
        self.reset()
        for _ in range(NUM_CHECKED_STEPS):
            self.step()
        return float(self.step())


class GraphTrainer:
    """Whole steps of a TorchTrainer captured in a CUDA graph."""

    def __init__(self, trainer: TorchTrainer, stream: Any, steps_per_graph: int) -> None:
        self.trainer = trainer
        self.stream = stream
        self.steps_per_graph = steps_per_graph
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARMUP_STEPS):
                trainer.step()
            trainer.reset()
            trainer.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.losses = [trainer.step() for _ in range(steps_per_graph)]

    def replay(self) -> None:
        """Run the graph's steps on the current stream."""
        self.graph.replay()

    def loss_after_checked_steps(self) -> float:
        """As ``TorchTrainer.loss_after_checked_steps``."""
        with torch.cuda.stream(self.stream):
            self.trainer.reset()
            for _ in range(NUM_CHECKED_STEPS // self.steps_per_graph):
                self.replay()
            self.replay()  # its first step computes the loss asked for
            return float(self.losses[0])


def _model(workload: Workload) -> nn.Sequential:
    activation = {"relu": nn.ReLU, "tanh": nn.Tanh}[workload.activation]
    modules: list[nn.Module] = []
    for fan_in, fan_out in zip(workload.layers, workload.layers[1:], strict=False):
        modules += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*modules[:-1])


def _optimizer(workload: Workload, model: nn.Module, implementation: str, capturable: bool) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": workload.learning_rate, implementation: True}
    if workload.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), **options)
    if workload.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), capturable=capturable, **options)
    return torch.optim.AdamW(model.parameters(), weight_decay=0.01, capturable=capturable, **options)


def is_close(loss: float, expected: float, rtol: float) -> bool:
    """Whether a loss agrees with the expected one; a non-finite one never does."""
    return bool(np.isfinite(loss)) and abs(loss - expected) <= rtol * abs(expected)
