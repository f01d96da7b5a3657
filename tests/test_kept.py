"""Values that a one-block region keeps in shared memory from one step of a loop to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from harness import bits, check, emulate

from trainkernel import emulator
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.dtypes import DTYPES
from trainkernel.errors import EmulatorError, VerificationError
from trainkernel.ir import Program, ScalarSpec
from trainkernel.memory import plan_memory
from trainkernel.options import check_options
from trainkernel.placement import build_schedule
from trainkernel.schedule import BlockRegion, Schedule
from trainkernel.target import Target
from trainkernel.verify import verify_plan

SIZES = (16, 24, 8)
"""Batch, width of the layers, outputs."""


def inputs_of(program: Program, steps: int = 3) -> list[Any]:
    rng = np.random.default_rng(3)
    values: list[Any] = []
    for spec in program.inputs:
        if isinstance(spec, ScalarSpec):
            values.append(steps if spec.dtype == "int32" else 0.5)
        else:
            values.append((0.3 * rng.standard_normal(spec.shape)).astype(DTYPES[spec.dtype].numpy))
    return values


def training(stacked_batch: bool = False, stacked_weights: bool = False, dtype: str = "float32") -> Program:
    """A step of a net of two layers: constants or a slice of x; carries w, b, v; stacked losses."""
    rows, width, out = SIZES
    body = ProgramBuilder()
    target = body.input("target", (rows, out))
    x = body.input("x", (rows, width)) if not stacked_batch else None
    w, bias = body.input("w", (width, width), dtype), body.input("bias", (width,))
    v = body.input("v", (width, out))
    if x is None:
        x = body.input("x", (rows, width))
    wide = w if dtype == "float32" else body.op("cast", w, dtype="float32")
    h = body.op("relu", body.op("addmm", bias, x, wide))
    gap = body.op("sub", body.op("mm", h, v), target)
    loss = body.op("mean", body.op("mul", gap, gap), dims=(0, 1))
    back = body.op("threshold_backward", body.op("mm", gap, v.T), h, threshold=0)
    new_v = body.op("sub", v, body.op("mul", body.op("mm", h.T, gap), 0.01))
    new_b = body.op("sub", bias, body.op("mul", body.op("sum", back, dims=(0,)), 0.01))
    new_w = body.op("sub", wide, body.op("mul", body.op("mm", x.T, back), 0.01), dtype=dtype)
    return body.build([new_w, new_b, new_v, loss, *([new_v] if stacked_weights else [])])


def looped(step: Program, length: int, *, dynamic: bool = False, stacked_batch: bool = False) -> Program:
    """Some steps, and what reads the carries afterwards."""
    rows, width, out = SIZES
    b = ProgramBuilder()
    target, x = (
        b.input("targets", (rows, out)),
        b.input("xs", (length, rows, width) if stacked_batch else (rows, width)),
    )
    carries = [b.input("w0", (width, width), step.inputs[-4 if stacked_batch else -3].dtype)]
    carries += [b.input("b0", (width,)), b.input("v0", (width, out))]
    operands = [target, *carries, x] if stacked_batch else [target, x, *carries]
    count = b.scalar("steps", "int32") if dynamic else length
    outputs = b.loop(step, operands, num_carry=3, num_xs=int(stacked_batch), length=count, room=length)
    return b.build([*outputs, b.op("sum", outputs[0], dims=(0,), dtype="float32")])


def keeper(schedule: Schedule) -> BlockRegion | None:
    """The region of the first loop that keeps values near."""
    loops = [task.loop for stage in schedule.stages for task in stage.tasks if task.loop is not None]
    return loops[0].keeper


def kept(generated: GeneratedKernel) -> tuple[set[str], set[str]]:
    """The carries and the constants that stay near, by their names in the body."""
    region = keeper(generated.schedule)
    if region is None:
        return set(), set()
    carries = {copy.buffer for copy in region.shared.returned}
    return carries, {copy.buffer for copy in region.shared.kept} - carries


def prove(program: Program, steps: int = 3, **options: Any) -> GeneratedKernel:
    """Right, race-free, and the same bits on any grid and in any order."""
    inputs = inputs_of(program, steps)
    generated = check(program, inputs, num_blocks=2, region_pieces=1, **options)
    found = set()
    for num_blocks, order in ((1, "forward"), (3, "reverse"), (2, 5)):
        result = emulate(generated, inputs, num_blocks=num_blocks, order=order)
        assert_close(result.outputs, program, inputs)
        found.add(tuple(bits(output) for output in result.outputs))
    assert len(found) == 1
    return generated


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_carries_and_constants_stay_near(length: int, inplace: bool) -> None:
    program = looped(training(), length)
    generated = prove(program, inplace_outputs={0: 2, 1: 3, 2: 4} if inplace else {})
    if length:
        assert kept(generated) == ({"w", "bias", "v"}, {"x", "target"})


def test_a_length_by_value() -> None:
    program = looped(training(), 4, dynamic=True)
    for steps in (0, 1, 4):
        assert kept(prove(program, steps))[0] == {"w", "bias", "v"}


def test_slices_are_fetched_in_each_step() -> None:
    generated = prove(looped(training(stacked_batch=True), 3, stacked_batch=True))
    region = keeper(generated.schedule)
    assert kept(generated) == ({"w", "bias", "v"}, {"target"})
    assert region is not None and {copy.buffer for copy in region.shared.staged} == {"x"}


def test_a_carry_that_is_stacked_too() -> None:
    """Its new value lies elsewhere until everybody has read the old one, so it does not stay."""
    assert kept(prove(looped(training(stacked_weights=True), 3)))[0] == {"w", "bias"}


def test_a_carry_of_two_bytes_does_not_stay() -> None:
    assert kept(prove(looped(training(dtype="bfloat16"), 2)))[0] == {"bias", "v"}


def test_two_loops_one_after_another() -> None:
    """The second fetches what the first has returned."""
    rows, width, out = SIZES
    b = ProgramBuilder()
    target, x = b.input("targets", (rows, out)), b.input("xs", (rows, width))
    carries = [b.input("w0", (width, width)), b.input("b0", (width,)), b.input("v0", (width, out))]
    first = b.loop(training(), [target, x, *carries], num_carry=3, length=2, name="first")
    second = b.loop(training(), [target, x, *first[:3]], num_carry=3, length=3, name="second")
    prove(b.build([*second, first[3]]), inplace_outputs={})


def test_a_loop_in_a_loop() -> None:
    """The inner loop's constants are slices of the outer one, its carries those of the outer one."""
    rows, width, out = SIZES
    body = ProgramBuilder()
    target = body.input("target", (rows, out))
    carries = [body.input("w", (width, width)), body.input("bias", (width,)), body.input("v", (width, out))]
    x = body.input("x", (rows, width))
    scaled = [body.op("mul", carry, 0.9) for carry in carries]
    outputs = body.loop(training(), [target, x, *scaled], num_carry=3, length=2)
    outer = body.build([*outputs[:3], outputs[3]])
    b = ProgramBuilder()
    operands = [b.input("targets", (rows, out)), b.input("w0", (width, width)), b.input("b0", (width,))]
    operands += [b.input("v0", (width, out)), b.input("xs", (3, rows, width))]
    generated = prove(b.build(b.loop(outer, operands, num_carry=3, num_xs=1, length=3)))
    inner = [task.loop for task in generated.schedule.tasks if task.loop is not None and task.loop.keeper is not None]
    assert inner and inner[-1].keeper is not None and inner[-1].keeper.shared.returned


def test_what_does_not_fit_is_fetched_in_each_step() -> None:
    target = replace(Target.preset("sm_90a"), shared_bytes_per_block=22 * 1024)
    generated = prove(looped(training(), 3), target=target)
    carries, _ = kept(generated)
    assert carries < {"w", "bias", "v"}
    assert generated.shared_bytes <= target.shared_bytes_per_block


# ---------------------------------------------------------------------------- what must be noticed


def _schedule() -> Schedule:
    options = check_options({"region_pieces": 1})
    return build_schedule(looped(training(), 3), Target.preset("sm_90a"), options, {})


def _with_layout(schedule: Schedule, **changes: Any) -> Schedule:
    """The schedule with another layout of the loop's region."""
    stages = []
    for stage in schedule.stages:
        (task, *others) = stage.tasks
        if task.loop is not None:
            (inner,) = task.loop.schedule.stages
            (region,) = inner.tasks
            assert region.region is not None
            layout = replace(region.region.shared, **changes)
            region = replace(region, region=replace(region.region, shared=layout))
            body = replace(task.loop.schedule, stages=(replace(inner, tasks=(region,)),))
            task = replace(task, loop=replace(task.loop, schedule=body))
        stages.append(replace(stage, tasks=(task, *others)))
    return replace(schedule, stages=tuple(stages))


def test_the_verifier_wants_a_barrier_between_steps() -> None:
    schedule = _schedule()
    plan = plan_memory(schedule)
    verify_plan(schedule, plan)
    ((name, inner),) = plan.loops.items()
    assert inner.back_edge == "block"
    with pytest.raises(VerificationError, match="without a block barrier"):
        verify_plan(schedule, replace(plan, loops={name: replace(inner, back_edge=None)}))


def test_the_verifier_knows_what_stays() -> None:
    """A constant over a value of the step; a carry that is not returned; a constant that a step changes."""
    schedule = _schedule()
    region = keeper(schedule)
    assert region is not None
    shared = region.shared
    slab = next(slab for name, slab in shared.slabs.items() if name not in {copy.buffer for copy in shared.kept})
    constant = next(copy for copy in shared.kept if copy not in shared.returned)
    moved = _with_layout(schedule, kept={**shared.kept, constant: slab.offset_bytes})
    forgotten = _with_layout(schedule, returned=frozenset())
    for broken in (moved, forgotten):
        with pytest.raises(VerificationError, match="where a loop keeps"):
            verify_plan(broken, plan_memory(broken))


def test_each_barrier_around_the_steps_is_needed() -> None:
    program = looped(training(), 3)
    generated = generate(program, region_pieces=1, target="sm_90a")
    start = generated.source.index("what stays near from step to step")
    end = generated.source.index("the carries that stayed near")
    pieces = generated.source[start:end].split("__syncthreads();")
    assert len(pieces) > 3
    mutants = []
    for number in (1, len(pieces) - 1):
        text = "__syncthreads();".join(pieces[:number]) + "(void)0;" + "__syncthreads();".join(pieces[number:])
        mutants.append(replace(generated, source=generated.source[:start] + text + generated.source[end:]))
    emulator.prepare(mutants, check_races=True)
    for mutant in mutants:
        with pytest.raises(EmulatorError):
            emulate(mutant, inputs_of(program))


def test_the_verifier_wants_nobody_at_the_arrays_meanwhile() -> None:
    """Two carries in one array, of which each step would find one where the other was returned."""
    schedule = _schedule()
    region = keeper(schedule)
    assert region is not None
    shared = region.shared
    first, second = sorted((copy for copy in shared.returned if copy.columns > 1), key=lambda copy: copy.buffer)[:2]
    twice = {replace(second, buffer=first.buffer): shared.kept[second]}
    others = {copy: at for copy, at in shared.kept.items() if copy != second}
    broken = _with_layout(schedule, kept={**others, **twice})
    with pytest.raises(VerificationError, match="which a loop keeps near"):
        verify_plan(broken, plan_memory(broken))
