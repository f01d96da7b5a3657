"""A workload's step as one trainkernel launch, bound to torch tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from workloads import NUM_CHECKED_STEPS, Workload

import trainkernel
from trainkernel.mlp import mlp_step


class TrainkernelTrainer:
    """The compiled step of a workload and its tensors.

    Parameters
    ----------
    workload : Workload
    device : str
        For ``trainkernel.compile``.
    stream : torch.cuda.Stream or None
        Where the steps run; None on a host device.
    options : mapping
        Further arguments of ``trainkernel.compile``.
    """

    def __init__(self, workload: Workload, device: str, stream: Any, options: Mapping[str, Any] | None = None) -> None:
        self.workload = workload
        self.stream = stream
        self.mlp = mlp_step(
            workload.layers,
            workload.batch,
            activation=workload.activation,
            loss=workload.loss,
            optimizer=workload.optimizer,
            dtype=workload.dtype,
        )
        program = self.mlp.program
        self.kernel = trainkernel.compile(
            program, device=device, inplace_outputs=self.mlp.inplace_outputs, **(options or {})
        )
        self.has_step = "step" in self.mlp.input_index
        self.initial = self._initial_values()
        memory = device if device.startswith("cuda") else "cpu"
        with self.on_stream():
            self.inputs = [
                torch.from_numpy(value.copy()).to(memory) if isinstance(value, np.ndarray) else value
                for value in self.initial
            ]
            outputs = [
                None if index in self.mlp.inplace_outputs else torch.zeros(spec.shape, device=memory)
                for index, spec in enumerate(program.outputs)
            ]
            self.bound = self.kernel.bind(self.inputs, outputs)
        self.loss = outputs[self.mlp.output_index["loss"]]
        self.next_step = 1

    def _initial_values(self) -> list[Any]:
        values: dict[str, Any] = {**self.workload.data(), **self.workload.parameters()}
        values["learning_rate"] = self.workload.learning_rate
        values["step"] = 1.0
        return [
            values[spec.buffer] if spec.buffer in values else np.zeros(spec.shape, np.float32)
            for spec in self.mlp.program.inputs
        ]

    def on_stream(self) -> Any:
        """The context in which torch works on the trainer's stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def step(self) -> None:
        """One training step on the trainer's stream."""
        if self.has_step:
            self.bound.set_scalar("step", float(self.next_step))
        self.next_step += 1
        self.bound.launch(self.stream)

    def reset(self) -> None:
        """Start training anew, in place."""
        with self.on_stream():
            for value, tensor in zip(self.initial, self.inputs, strict=True):
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(torch.from_numpy(value))
        self.next_step = 1

    def read_loss(self) -> float:
        """Wait for the launches so far and read the last one's loss."""
        self.bound.check()
        with self.on_stream():
            return float(self.loss.reshape(()))

    def loss_after_checked_steps(self) -> float:
        """The loss that the next step computes after ``NUM_CHECKED_STEPS`` steps from the start."""
        self.reset()
        for _ in range(NUM_CHECKED_STEPS + 1):
            self.step()
        return self.read_loss()


class TrainkernelGraph:
    """``NUM_CHECKED_STEPS`` launches captured in a CUDA graph, each with its own step number."""

    steps_per_graph = NUM_CHECKED_STEPS

    def __init__(self, trainer: TrainkernelTrainer) -> None:
        self.trainer = trainer
        trainer.reset()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=trainer.stream):
            for _ in range(self.steps_per_graph):
                trainer.step()

    def replay(self) -> None:
        """Run the captured steps on the current stream."""
        self.graph.replay()

    def loss_after_checked_steps(self) -> float:
        """As ``TrainkernelTrainer.loss_after_checked_steps``; the last step is a plain launch."""
        self.trainer.reset()
        with self.trainer.on_stream():
            self.replay()
        self.trainer.next_step = NUM_CHECKED_STEPS + 1
        self.trainer.step()
        return self.trainer.read_loss()
