"""The steps of ``bench/workloads``: trainkernel's losses against JAX's, from the same code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import jax
from jax_peer import JaxTrainer
from measurements import Session, all_rows
from rows import OURS, failures
from trainer import loss_after_checked_steps
from trainkernel_runner import TrainkernelTrainer
from workloads import NUM_CHECKED_STEPS, WORKLOADS, Mlp
from workloads.workload import product_flops

import trainkernel as tk


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """XLA's optimizations cost more than these steps. Other tests find JAX as it was."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_default_matmul_precision", None)


@pytest.mark.parametrize("name", WORKLOADS)
def test_losses_agree(name: str) -> None:
    workload = WORKLOADS[name].small()
    peer = JaxTrainer(workload, "cpu", workload.dtype)
    ours = TrainkernelTrainer(workload, "reference", None, steps=NUM_CHECKED_STEPS + 1)
    expected = loss_after_checked_steps(peer)
    assert loss_after_checked_steps(ours) == pytest.approx(expected, rel=workload.loss_rtol, abs=0)


def test_all_runners_of_a_workload() -> None:
    session = Session(WORKLOADS["tiny"].small(), "reference", None)
    rows = [row for row in all_rows(session, "sm_90a") if not row["runner"].startswith("torch")]
    assert failures(rows) == []
    length = NUM_CHECKED_STEPS + 1
    expected = [("floor", 1), ("jax_jit", 1), ("jax_scan", length), (OURS, 1), (OURS, length)]
    assert [(row["runner"], row["steps_per_launch"]) for row in rows] == expected


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_array_of_the_state_is_updated_in_place(name: str) -> None:
    workload = WORKLOADS[name].small()
    state = workload.initial_state()
    step = tk.jit(workload.training(tk, 1), donate_argnums=0).lower(state, workload.data())
    passed_on = sum(result.argument is not None for result in step.results)
    assert len(step.inplace_outputs) + passed_on == len(tk.tree.leaves(state))


def test_training_makes_the_loss_smaller() -> None:
    workload = WORKLOADS["tiny"].small()
    train = tk.jit(workload.training(tk, 50), device="reference")
    _, losses = train(workload.initial_state(), workload.data())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["tiny", "mnist_bf16", "autoencoder"])
def test_products_of_a_perceptron(name: str) -> None:
    """Forward, gradients of the weights, and of the inputs of every layer but the first."""
    workload = WORKLOADS[name].small()
    assert isinstance(workload, Mlp)
    sizes = [fan_in * fan_out for fan_in, fan_out in pairwise(workload.layers)]
    program = tk.jit(workload.training(tk, 1)).lower(workload.initial_state(), workload.data()).program
    assert product_flops(program) == 2 * workload.batch * (3 * sum(sizes) - sizes[0])


def test_wrong_losses_and_missing_peers_are_errors() -> None:
    session = Session(WORKLOADS["tiny"].small(), "reference", None)
    with pytest.raises(Exception, match="no peer ran"):
        session.check_loss(OURS, 1.0)
    session.check_loss("jax_jit", 1.0)
    session.check_loss(OURS, 1.00001)
    for wrong in (1.001, np.nan):
        with pytest.raises(Exception, match="that of jax_jit is"):
            session.check_loss(OURS, wrong)


def test_tf32_is_refused() -> None:
    session = Session(WORKLOADS["dqn"].small(), "reference", None, precision="tf32")
    rows = list(all_rows(session, "sm_90a"))
    assert rows[-1]["runner"] == OURS and rows[-1]["refused"] and "no tf32" in rows[-1]["error"]
