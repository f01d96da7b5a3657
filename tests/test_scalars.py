"""Values with one element on the way through a step: a norm that is reported, a rate that follows a count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from harness import check

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import optim
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.kernel import assemble
from trainkernel.errors import VerificationError
from trainkernel.memory import plan_memory
from trainkernel.options import Options
from trainkernel.placement import build_schedule
from trainkernel.schedule import Stage
from trainkernel.target import Target

RNG = np.random.default_rng(0)
PARAMS = {name: RNG.standard_normal(shape, np.float32) for name, shape in {"a": (6, 5), "b": (5,), "c": (1,)}.items()}
X = RNG.standard_normal((8, 6), np.float32)
OPTIMIZER = optim.chain(
    optim.clip_by_global_norm(0.5), optim.adam(optim.warmup_cosine_decay_schedule(0.0, 0.1, 3, 20, 0.01))
)


def step(state: Any, x: Any) -> Any:
    params, moments = state

    def loss(p: Any) -> Any:
        return tnp.mean(tnp.square(tnp.tanh(x @ p["a"] + p["b"]).sum(axis=1, keepdims=True) * p["c"]))

    grads = tk.grad(loss)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optim.apply_updates(params, updates), moments), optim.global_norm(grads)


def lower(*, loop: bool) -> Any:
    def steps(state: Any, x: Any) -> Any:
        return tk.scan(lambda carry, _: step(carry, x), state, None, length=3)

    function = steps if loop else step
    return tk.jit(function, donate_argnums=0, device="reference").lower((PARAMS, OPTIMIZER.init(PARAMS)), X)


def step_inputs() -> list[np.ndarray[Any, Any]]:
    return [np.array(leaf) for leaf in tk.tree.leaves(((PARAMS, OPTIMIZER.init(PARAMS)), X))]


@pytest.mark.parametrize("loop", [False, True])
def test_nobody_waits_for_a_reported_norm_or_for_a_count(loop: bool) -> None:
    """Gradients, their sums of squares, the update: the norm is stored beside it, the rate computed before it."""
    lowered = lower(loop=loop)
    options: dict[str, Any] = {"inplace_outputs": dict(lowered.inplace_outputs), "region_pieces": 2}
    generated = generate(lowered.program, **options)
    schedule = generated.schedule
    if loop:
        schedule = next(task.loop.schedule for stage in schedule.stages for task in stage.tasks if task.loop)
    assert len(schedule.stages) == 3, str(schedule)
    for num_blocks, order in ((1, "forward"), (3, "reverse"), (4, 1)):
        check(lowered.program, step_inputs(), num_blocks=num_blocks, order=order, **options)


def test_a_returned_scalar_is_stored_once_and_evaluated_by_its_readers() -> None:
    b = ProgramBuilder()
    x = b.input("x", (4096,))
    norm = b.op("sqrt", b.op("sum", b.op("mul", x, x), dims=(0,)))
    scaled = b.op("div", x, norm.broadcast_to((4096,)))
    program = b.build([scaled, norm])
    generated = check(program, [RNG.standard_normal(4096, np.float32)], num_blocks=3)
    assert len(generated.schedule.stages) == 2
    assert sum(norm.buffer in task.stores for stage in generated.schedule.stages for task in stage.tasks) == 1


def test_a_scalar_state_that_is_updated_in_place_is_written_once() -> None:
    """Its readers take the stored value: if they evaluated it, they would have to run before it is overwritten."""
    b = ProgramBuilder()
    x, mean = b.input("x", (300,)), b.input("mean", ())
    new = b.op("add", b.op("mul", mean, 0.9), b.op("sum", x, dims=(0,)))
    program = b.build([new, b.op("sub", x, new.broadcast_to((300,)))])
    inputs = [RNG.standard_normal(300, np.float32), np.array(2.0, np.float32)]
    generated = check(program, inputs, num_blocks=2, inplace_outputs={0: 1})
    assert len(generated.schedule.stages) == 2


def test_an_epilogue_evaluates_the_scalar_that_it_reads() -> None:
    """Computed before, the scalar would take the pointwise operation out of the reduction's task, into a stage more."""
    b = ProgramBuilder()
    x, count = b.input("x", (300, 40)), b.input("count", ())
    rate = b.op("cos", b.op("power", count, 1.5))
    program = b.build([b.op("mul", b.op("sum", x, dims=(1,)), rate.broadcast_to((300,)))])
    generated = check(program, [RNG.standard_normal((300, 40), np.float32), np.array(2.0, np.float32)], num_blocks=2)
    assert len(generated.schedule.stages) == 1


def test_no_sum_of_a_norm_waits_for_another() -> None:
    """Gradients leave a region one after another; their sums of squares are all of one stage, none ends the norm."""
    shapes = {"a": (6, 16), "b": (16, 16), "c": (16, 1)}
    params = {name: RNG.standard_normal(shape, np.float32) / 4 for name, shape in shapes.items()}

    def clipped(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return tnp.mean(tnp.square(tnp.tanh(tnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]))

        grads = tk.grad(loss)(params)
        norm = optim.global_norm(grads)
        return tk.tree.map(lambda p, g: p - g / (np.float32(1) + norm), params, grads)

    program = tk.jit(clipped, device="reference").lower(params, X).program
    inputs = [np.array(leaf) for leaf in tk.tree.leaves((params, X))]
    generated = check(program, inputs, num_blocks=3, region_pieces=2)
    assert len(generated.schedule.stages) == 3, str(generated.schedule)


def test_a_second_copy_of_a_returned_scalar_is_made_of_the_stored_one() -> None:
    """It must not evaluate the scalar again: what that reads may be gone by then."""
    b = ProgramBuilder()
    x = b.input("x", (9000,))
    norm = b.op("sqrt", b.op("sum", b.op("mul", x, x), dims=(0,)))
    program = b.build([b.op("mul", x, norm.broadcast_to((9000,))), norm, norm.reshape((1,))])
    generated = check(program, [RNG.standard_normal(9000, np.float32)], num_blocks=3, region_pieces=0)
    copied = generated.source.split("copy output_2")[1].split("\n}")[0]
    assert "b_sqrt[0]" in copied and "b_sum_partials" not in copied


def test_a_task_reads_nothing_that_the_plan_does_not_know_of() -> None:
    """Another value could have taken its place."""
    b = ProgramBuilder()
    program = b.build([b.op("add", b.input("x", (8,)), b.input("y", (8,)))])
    target, options = Target.preset("portable"), Options()
    schedule = build_schedule(program, target, options, {})
    (task,) = schedule.stages[0].tasks
    forgetful = replace(schedule, stages=(Stage((replace(task, reads=("x",)),)),))
    assemble(program, schedule, plan_memory(schedule))
    with pytest.raises(VerificationError, match=r"reads \['y'\]"):
        assemble(program, forgetful, plan_memory(forgetful))
