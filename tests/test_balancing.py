"""Larger tiles beside other tasks: a stage ends sooner, and no bit changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trainkernel as tk
from trainkernel import balancing
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program
from trainkernel.product_plans import ProductPlan
from trainkernel.products import larger_tiles
from trainkernel.schedule import Schedule
from trainkernel.target import Target

TARGET = replace(Target.preset("sm_90a"), num_sms=12)
OPTIONS: dict[str, Any] = {
    "target": TARGET,
    "threads_per_block": 512,
    "region_pieces": 0,
    "inplace_outputs": {0: 4, 1: 5},
}


def updates(dtype: str) -> Program:
    """Two weights of different sizes, updated by the products of what two layers saw."""
    b = ProgramBuilder()
    x, h = b.input("x", (128, 96), dtype), b.input("h", (128, 64), dtype)
    d, e = b.input("d", (128, 96), dtype), b.input("e", (128, 32), dtype)
    w, v = b.input("w", (96, 96)), b.input("v", (64, 32))
    outputs = []
    for weight, left, right in ((w, x, d), (v, h, e)):
        gradient = b.op("mm", left.T, right, dtype=dtype)
        step = b.op("mul", gradient, 0.5, dtype="float32")
        outputs.append(b.op("sub", weight, step))
    return b.build(outputs)


def arguments(program: Program) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(spec.shape).astype(DTYPES[spec.dtype].numpy) for spec in program.inputs]


def schedule_of(program: Program) -> Schedule:
    return generate(program, **OPTIONS).schedule


def pieces(schedule: Schedule) -> int:
    return sum(stage.num_pieces for stage in schedule.stages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fewer_pieces_and_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = updates(dtype)
    options = {**OPTIONS, "check_races": True}
    few = pieces(schedule_of(program))
    balanced = tk.emulator.run(program, arguments(program), **options)
    monkeypatch.setattr(balancing, "_LEAST_GAIN_US", 1e9)
    assert pieces(schedule_of(program)) > few
    for one, other in zip(balanced, tk.emulator.run(program, arguments(program), **options), strict=True):
        np.testing.assert_array_equal(one, other)


def test_larger_tiles_keep_the_order_of_sums() -> None:
    program = updates("float32")
    schedule = schedule_of(program)
    options = schedule.options
    for stage in schedule.stages:
        for task in stage.tasks:
            if not isinstance(task.plan, ProductPlan) or task.root is None:
                continue
            for other in larger_tiles(task.plan, task.root, TARGET, options):
                assert other.num_pieces < task.plan.num_pieces
                assert other.path == task.plan.path and other.split == task.plan.split == 1
