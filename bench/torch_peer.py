"""The same training steps in torch: eager, and whole steps captured in a CUDA graph.

A peer is measured at its best: the optimizer's ``fused`` and ``foreach`` implementations, and for
graphs one and ``STEPS_PER_GRAPH`` steps per graph, are all timed and the fastest is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from timing import event_clock
from torch import nn
from torch.nn import functional
from workloads import Mlp

STEPS_PER_GRAPH = 20
IMPLEMENTATIONS = ("fused", "foreach")
PRECISIONS = {"float32": "highest", "tf32": "high", "bfloat16": "highest"}
_NUM_WARMUP_STEPS = 5


class TorchTrainer:
    """An nn.Sequential, its optimizer and its batch on one device, each step launched from Python.

    Parameters
    ----------
    workload : Mlp
    device : str
        ``"cuda:0"``, or any name of a device on the host.
    stream : torch.cuda.Stream or None
        The current stream, on which the steps run.
    precision : str
        One of ``PRECISIONS``: how products of float32 are computed, for the whole process.
    implementation : {"fused", "foreach"}
        Of the optimizer.
    capturable : bool
        Whether the step may be captured in a CUDA graph.
    compiled : bool
        Whether forward and loss go through torch.compile.
    """

    steps_per_launch = 1
    note = ""

    def __init__(
        self,
        workload: Mlp,
        device: str,
        stream: Any,
        precision: str,
        implementation: str,
        *,
        capturable: bool = False,
        compiled: bool = False,
    ) -> None:
        torch.set_float32_matmul_precision(PRECISIONS[precision])
        self.workload = workload
        self.device = device if device.startswith("cuda") else "cpu"
        self.clock = None if stream is None else event_clock(stream)
        data = [torch.from_numpy(value).to(self.device) for value in workload.data()]
        self.x, self.target = data[0], data[-1]
        if workload.objective == "cross_entropy":
            self.target = self.target.long()
        self.model = _model(workload).to(self.device)
        self.optimizer = _optimizer(workload, self.model, implementation, capturable)
        self.loss: Callable[[], torch.Tensor] = torch.compile(self._loss) if compiled else self._loss
        self.last: torch.Tensor | None = None
        self.reset()

    def _loss(self) -> torch.Tensor:
        # Each weight is used once per step, so autocast's cache of casts could only cost time.
        with self._autocast():
            prediction = self.model(self.x)
            if self.workload.objective == "cross_entropy":
                return functional.cross_entropy(prediction, self.target)
            return functional.mse_loss(prediction, self.target)

    def _autocast(self) -> Any:
        if self.workload.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, cache_enabled=False)

    def launch(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.last = loss.detach()

    def losses(self) -> Sequence[float]:
        assert self.last is not None
        return [float(self.last)]

    @torch.no_grad()
    def reset(self) -> None:
        """Start training anew, in place: a captured graph keeps its addresses."""
        for layer, initial in zip(self._layers(), self.workload.parameters(), strict=True):
            layer.weight.copy_(torch.from_numpy(initial["w"]).T)
            layer.bias.copy_(torch.from_numpy(initial["b"]))
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def _layers(self) -> Iterator[nn.Linear]:
        return (module for module in self.model if isinstance(module, nn.Linear))


class GraphTrainer:
    """Whole steps of a capturable TorchTrainer captured in a CUDA graph on its stream."""

    note = ""

    def __init__(self, trainer: TorchTrainer, stream: Any, steps_per_graph: int) -> None:
        self.trainer = trainer
        self.clock = trainer.clock
        self.steps_per_launch = steps_per_graph
        for _ in range(_NUM_WARMUP_STEPS):
            trainer.launch()
        trainer.reset()
        trainer.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.captured: list[torch.Tensor] = []
        with torch.cuda.graph(self.graph, stream=stream):
            for _ in range(steps_per_graph):
                trainer.launch()
                assert trainer.last is not None
                self.captured.append(trainer.last)
        self.reset = trainer.reset

    def launch(self) -> None:
        self.graph.replay()

    def losses(self) -> Sequence[float]:
        if len(self.captured) == 1:
            return [float(self.captured[0])]
        values: Sequence[float] = torch.stack(self.captured).tolist()
        return values


def _model(workload: Mlp) -> nn.Sequential:
    activation = {"relu": nn.ReLU, "tanh": nn.Tanh}[workload.activation]
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(workload.layers):
        modules += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*modules[:-1])


def _optimizer(workload: Mlp, model: nn.Module, implementation: str, capturable: bool) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": workload.learning_rate, implementation: True}
    if workload.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), **options)
    if workload.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), capturable=capturable, **options)
    return torch.optim.AdamW(model.parameters(), weight_decay=0.01, capturable=capturable, **options)
