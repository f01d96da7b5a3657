"""The runners of one workload: each checks its loss first and is timed after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from timing import Timing, time_steps
from torch_peer import IMPLEMENTATIONS, STEPS_PER_GRAPH, GraphTrainer, TorchTrainer, is_close
from trainkernel_runner import TrainkernelGraph, TrainkernelTrainer
from workloads import Workload

Row = dict[str, Any]


class WrongLossError(Exception):
    """A runner's loss does not agree with torch eager's, so its time means nothing."""


class Session:
    """What the runners of a workload share: the device, the stream and the expected loss."""

    def __init__(self, workload: Workload, device: str, stream: Any, options: Mapping[str, Any]) -> None:
        self.workload = workload
        self.options = options
        self.device = device
        self.stream = stream
        self.expected_loss: float | None = None
        self.last_loss: float | None = None
        self._trainer: TrainkernelTrainer | None = None

    def _check_loss(self, loss: float) -> None:
        self.last_loss = loss
        if self.expected_loss is None:
            self.expected_loss = loss
        rtol = self.workload.loss_rtol
        if not is_close(loss, self.expected_loss, rtol):
            raise WrongLossError(
                f"the loss after 20 steps is {loss!r}, torch eager's is {self.expected_loss!r}; "
                f"they may differ by {rtol:g} of it"
            )

    def _row(self, timing: Timing, variant: str, steps_per_launch: int = 1) -> Row:
        return {
            "us_per_step": timing.us_per_step,
            "spread_us": timing.spread_us,
            "samples_us": timing.samples_us,
            "launches_per_sample": timing.launches,
            "steps_per_launch": steps_per_launch,
            "loss_after_20": self.last_loss,
            "variant": variant,
        }

    def torch_eager(self) -> Row:
        """The faster of the optimizer's implementations."""
        self.last_loss = None

        def measure(implementation: str) -> Row:
            trainer = TorchTrainer(self.workload, implementation, self.device)
            self._check_loss(trainer.loss_after_checked_steps())
            return self._row(time_steps(trainer.step, self.stream), implementation)

        return _fastest({name: partial(measure, name) for name in IMPLEMENTATIONS})

    def torch_graph(self, compiled: bool = False) -> Row:
        """The fastest of implementations and steps per graph."""
        self.last_loss = None
        self._need_expected_loss()

        def measure(implementation: str, steps: int) -> Row:
            trainer = TorchTrainer(self.workload, implementation, self.device, capturable=True, compiled=compiled)
            graph = GraphTrainer(trainer, self.stream, steps)
            self._check_loss(graph.loss_after_checked_steps())
            variant = f"{implementation}, {steps} steps per graph"
            return self._row(time_steps(graph.replay, self.stream, steps), variant, steps)

        choices = [(implementation, steps) for implementation in IMPLEMENTATIONS for steps in (1, STEPS_PER_GRAPH)]
        return _fastest({f"{name}, {steps} steps per graph": partial(measure, name, steps) for name, steps in choices})

    def trainkernel(self) -> Row:
        """One launch per step through the bound launch."""
        self.last_loss = None
        self._need_expected_loss()
        trainer = self._trainer = TrainkernelTrainer(self.workload, self.device, self.stream, self.options)
        self._check_loss(trainer.loss_after_checked_steps())
        variant = " ".join(["bound launch per step", *(f"{name}={value}" for name, value in self.options.items())])
        row = self._row(time_steps(trainer.step, self.stream), variant)
        trainer.bound.check()
        usage, stats = trainer.kernel.resource_usage(), trainer.kernel.stats
        row["kernel"] = f"{stats.grid_barriers} grid barriers; {usage}"
        return row

    def trainkernel_graph(self) -> Row:
        """The same launches in a CUDA graph."""
        self.last_loss = None
        self._need_expected_loss()
        if self._trainer is None:
            raise WrongLossError("the plain launch failed, so there is nothing to capture")
        graph = TrainkernelGraph(self._trainer)
        self._check_loss(graph.loss_after_checked_steps())
        steps = graph.steps_per_graph
        row = self._row(time_steps(graph.replay, self.stream, steps), f"{steps} launches per graph", steps)
        self._trainer.bound.check()
        return row

    def _need_expected_loss(self) -> None:
        if self.expected_loss is None:
            raise WrongLossError("torch eager failed, so there is no loss to compare with")


def _fastest(variants: Mapping[str, Callable[[], Row]]) -> Row:
    """The fastest variant's row, with the times of all; a variant may fail where another does not."""
    rows: dict[str, Row] = {}
    failures: dict[str, Exception] = {}
    for name, measure in variants.items():
        try:
            rows[name] = measure()
        except Exception as error:
            failures[name] = error
    if not rows:
        raise next(iter(failures.values()))
    best = min(rows.values(), key=lambda row: float(row["us_per_step"]))
    times = {name: row["us_per_step"] for name, row in rows.items()}
    errors = {name: f"{type(error).__name__}: {error}" for name, error in failures.items()}
    return {**best, "variants_us": times, "variants_failed": errors}
