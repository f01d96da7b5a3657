"""16-bit copies of large carries are carried: the same bits, and no cast in the step."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import trainkernel as tk
from trainkernel import carried_casts
from trainkernel import numpy as tnp
from trainkernel.codegen import generate
from trainkernel.ir import Loop, Operation, Program
from trainkernel.passes import normalize
from trainkernel.schedule import ArenaPlace

ROWS, WIDTH, COLUMNS = 4, 128, 256


def step_of(length: int | None) -> tk.jitted.Step:
    """A loop that multiplies by a rounded float32 weight and changes it; its length is a scalar without one."""

    def train(w: Any, x: Any, steps: Any) -> Any:
        def step(w: Any, _: Any) -> Any:
            y = x @ w.astype(tnp.bfloat16)
            return w - 0.01 * (x.T @ y).astype(tnp.float32), y.astype(tnp.float32).sum()

        if length is None:
            return tk.scan(lambda w, _: (step(w, None)[0], None), w, None, steps)[0]
        return tk.scan(step, w, None, length)

    jitted = tk.jit(train, donate_argnums=0, device="reference")
    return jitted.lower(*arguments())


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((WIDTH, COLUMNS)).astype(np.float32)
    x = rng.standard_normal((ROWS, WIDTH)).astype(ml_dtypes.bfloat16)
    return w, x, 3


def run(program: Program, inplace: Any, inputs: Any, **options: Any) -> tuple[np.ndarray[Any, Any], ...]:
    copies = [np.array(value) if isinstance(value, np.ndarray) else value for value in inputs]
    return tk.emulator.run(program, copies, inplace_outputs=inplace, check_races=True, **options)


def casts_in_loop(program: Program) -> list[Operation]:
    """The casts of whole carries in the loops' bodies."""
    return [
        item
        for loop in program.operations
        if isinstance(loop, Loop)
        for item in loop.body.operations
        if isinstance(item, Operation)
        and item.op == "cast"
        and item.tensor_inputs[0].buffer in {spec.buffer for spec in loop.body.inputs}
        and item.tensor_inputs[0].num_elements == WIDTH * COLUMNS
    ]


@pytest.mark.parametrize("length", [1, 4, None])
def test_the_same_bits(length: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(length)
    inputs = arguments()
    carried = run(step.program, step.inplace_outputs, inputs)
    other_grid = run(step.program, step.inplace_outputs, inputs, num_blocks=3, order=1)
    monkeypatch.setattr(carried_casts, "_MIN_ELEMENTS", 2**30)
    without = run(step.program, step.inplace_outputs, inputs)
    for one, grid, other in zip(carried, other_grid, without, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, grid)


def test_no_step_rounds_its_carry_again() -> None:
    program = normalize(step_of(4).program)
    assert len(casts_in_loop(program)) == 1
    carried = carried_casts.carry_casts(program)
    assert not casts_in_loop(carried)
    (loop,) = (item for item in carried.operations if isinstance(item, Loop))
    assert loop.num_carry == 2 and loop.body.outputs[1].dtype == "bfloat16"


def test_its_first_value_is_computed_in_place() -> None:
    step = step_of(4)
    schedule = generate(step.program, inplace_outputs=step.inplace_outputs).schedule
    homes = [place.home for place in schedule.places.values() if isinstance(place, ArenaPlace) and place.home]
    assert len(homes) == 1
    assert not any(task.copy is not None for stage in schedule.stages for task in stage.tasks)


def test_a_carry_that_no_step_changes_is_left_alone() -> None:
    def train(w: Any, x: Any) -> Any:
        return tk.scan(lambda w, _: (w, (x @ w.astype(tnp.bfloat16)).sum()), w, None, 3)

    w, x, _ = arguments()
    program = normalize(tk.jit(train, device="reference").lower(w, x).program)
    assert carried_casts.carry_casts(program) == program


def test_small_carries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_casts, "_MIN_ELEMENTS", WIDTH * COLUMNS + 1)
    program = normalize(step_of(4).program)
    assert carried_casts.carry_casts(program) == program
