"""The training steps that are measured.

A new one is a ``Workload`` at the size that is measured, listed below: its first values, its batch,
its loss (or its step) in terms of ``lib``, and its small size. ``tests/test_bench.py`` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable

from workloads.burgers import PINN5
from workloads.ensemble import ENSEMBLE
from workloads.mlp import AUTOENCODER, BASE, FIELD2, FIELD5, Mlp
from workloads.reinforcement import DQN, PPO, TD3_CRITIC
from workloads.transformer import TRANSFORMER
from workloads.workload import NUM_CHECKED_STEPS, Workload

PUBLISHED: tuple[Workload, ...] = (
    PPO, TD3_CRITIC, DQN, PINN5, FIELD5, FIELD2, AUTOENCODER, ENSEMBLE, TRANSFORMER,
)  # fmt: skip

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (*BASE, *PUBLISHED)}

GROUPS: dict[str, tuple[str, ...]] = {
    "base": tuple(workload.name for workload in BASE),
    "published": tuple(workload.name for workload in PUBLISHED),
    "all": tuple(WORKLOADS),
}


def named(names: Iterable[str]) -> list[Workload]:
    """Workloads by their own names and those of groups, each once."""
    flat = [name for given in names for name in GROUPS.get(given, (given,))]
    return [WORKLOADS[name] for name in dict.fromkeys(flat)]


__all__ = ["BASE", "GROUPS", "NUM_CHECKED_STEPS", "PUBLISHED", "WORKLOADS", "Mlp", "Workload", "named"]
