"""What every runner trains with, and the loss by which runners are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from timing import Clock
from workloads import NUM_CHECKED_STEPS


class Trainer(Protocol):
    """Steps of one workload in one library, ``steps_per_launch`` in each launch."""

    steps_per_launch: int
    clock: Clock | None
    """None where time means nothing."""
    note: str

    def reset(self) -> None:
        """Start training anew."""

    def launch(self) -> None:
        """Give the next steps to the device."""

    def losses(self) -> Sequence[float]:
        """Wait for the last launch; the loss of each of its steps, before the step's update."""


def loss_after_checked_steps(trainer: Trainer) -> float:
    """The loss that the next step computes after ``NUM_CHECKED_STEPS`` steps from the start."""
    trainer.reset()
    launches, place = divmod(NUM_CHECKED_STEPS, trainer.steps_per_launch)
    for _ in range(launches + 1):
        trainer.launch()
    return float(trainer.losses()[place])
