"""Copies that start before a grid barrier: right on any grid, from any address, and missed if one thing is left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from early_programs import odd, perceptron_step, target_of, wide_loop, wide_step
from error_bounds import assert_close
from harness import MAX_UNKNOWN, bits, copies, emulate

from trainkernel import emulator
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.codegen.kernel import assemble
from trainkernel.errors import EmulatorError, LaunchError, VerificationError
from trainkernel.ir import Program, ScalarSpec
from trainkernel.memory import MemoryPlan
from trainkernel.product_plans import ProductPlan
from trainkernel.products import panel_bytes, panel_operands_bytes
from trainkernel.runtime import nvrtc
from trainkernel.target import ARRIVALS_BYTES
from trainkernel.verify import verify_plan

STEP = wide_step(32, (512, 32, 32, 8))
"""Copies of one group, all the same for every piece."""
DEEP = wide_step(32, (256, 64, 64, 64, 64, 8))
"""Two groups, which arrive on barriers of their own."""
ROWS = wide_step(32, (512, 32, 32, 64))
"""Two groups, one of them with the rows of a piece."""
START = "tk_grid_barrier_arrive(barrier);"


def inputs_of(program: Program, offset: int = 0, steps: int = 2) -> list[Any]:
    """Random inputs, so many elements from an aligned address."""
    rng = np.random.default_rng(1)
    values: list[Any] = []
    for spec in program.inputs:
        if isinstance(spec, ScalarSpec):
            values.append(steps)
        else:
            values.append(odd((0.1 * rng.standard_normal(spec.shape)).astype(np.float32), offset))
    return values


def early(program: Program, **options: Any) -> GeneratedKernel:
    """The program's kernel, in which a region of four pieces starts copies before a grid barrier."""
    generated = generate(program, **{"region_pieces": 4, "target": target_of(72), **options})
    assert START in generated.source
    return generated


def prove(generated: GeneratedKernel, program: Program, inputs: Sequence[Any]) -> tuple[bytes, ...]:
    """Race-free and right, with the same bits on grids that have several pieces a block, one, and blocks too many."""
    found = set()
    for num_blocks, order in ((1, "forward"), (2, "reverse"), (3, 5), (6, 6), (None, "forward")):
        result = emulate(generated, inputs, num_blocks=num_blocks, order=order)
        assert assert_close(result.outputs, program, inputs) <= MAX_UNKNOWN
        found.add(tuple(bits(output) for output in result.outputs))
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("program", [STEP, DEEP, ROWS], ids=["step", "deep", "rows"])
@pytest.mark.parametrize("options", [{}, {"threads_per_block": 128, "stamps": True}], ids=str)
def test_copies_of_a_step(program: Program, options: dict[str, Any]) -> None:
    generated = early(program, **options)
    assert f"tk_arrivals_init<{1 if program is STEP else 2}>" in generated.source
    assert ("piece * " in generated.source[generated.source.index(START) :]) == (program is ROWS)
    prove(generated, program, inputs_of(program))


@pytest.mark.parametrize("offset", [1, 2])
@pytest.mark.parametrize("program", [DEEP, ROWS], ids=["deep", "rows"])
def test_arrays_that_are_not_aligned_come_another_way(program: Program, offset: int) -> None:
    generated = early(program)
    assert prove(generated, program, inputs_of(program, offset)) == prove(generated, program, inputs_of(program))


@pytest.mark.parametrize("shape", [(8, 4), (64, 8)], ids=["a piece of 8 rows in two", "eight in two"])
def test_the_pieces_of_a_block_share_copies(shape: tuple[int, int]) -> None:
    """More pieces than multiprocessors are slices: a block computes several, and fetches weights with the first."""
    rows, pieces = shape
    program = wide_step(rows * pieces, (512, 32, 32, 64))
    generated = early(program, region_pieces=pieces, target=target_of(72, num_sms=2))
    regions = [task.region for stage in generated.schedule.stages for task in stage.tasks]
    assert any(region is not None and region.split.slices > 1 for region in regions)
    prove(generated, program, inputs_of(program))


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("stacked", [False, True])
def test_carries_that_each_step_updates(length: int, stacked: bool) -> None:
    """What a step writes is fetched early by the next: a grid barrier ends each step."""
    program = wide_loop(32, (512, 32, 32, 64), 3, stacked=stacked, dynamic=True)
    state = {place: place + 2 - int(stacked) for place in range(6)}
    generated = early(program, inplace_outputs=state)
    prove(generated, program, inputs_of(program, steps=length))


@pytest.mark.parametrize("length", [0, 1, 2])
def test_loops_in_a_loop(length: int) -> None:
    program = wide_loop(32, (512, 32, 32, 64), 2, stacked=True, inner=length)
    if length:
        prove(early(program), program, inputs_of(program))
    else:
        generated = generate(program, target=target_of(72), region_pieces=4)
        emulate(generated, inputs_of(program))


def test_launches_of_a_part() -> None:
    program = wide_loop(32, (512, 32, 32, 64), 3, stacked=True)
    generated, inputs = early(program, parts=True), inputs_of(program)
    found = {
        tuple(
            bits(output)
            for output in emulator.emulate(
                generated, copies(inputs), num_blocks=blocks, check_races=True, ticks_per_launch=ticks
            ).outputs
        )
        for blocks, ticks in ((3, None), (1, 1), (2, [1, 2]), (4, 1))
    }
    assert len(found) == 1
    plain = emulate(early(program), inputs, num_blocks=3)
    assert found == {tuple(bits(output) for output in plain.outputs)}


def test_pointers_from_a_table() -> None:
    """With more arrays than the parameter block names."""
    b = ProgramBuilder()
    x, target = b.input("x", (32, 512)), b.input("target", (32, 64))
    weights = [b.input(f"w{number}", shape) for number, shape in enumerate(((512, 32), (32, 32), (32, 64)))]
    biases = [b.input(f"b{number}", (width,)) for number, width in enumerate((32, 32, 64))]
    outputs = perceptron_step(b, x, target, weights, biases)
    outputs += [b.op("neg", b.input(f"z{number}", (3,))) for number in range(240)]
    program = b.build(outputs)
    generated = early(program)
    assert generated.uses_tensor_table
    emulate(generated, inputs_of(program), num_blocks=3)


def test_a_block_that_never_arrives_is_named() -> None:
    """Those that have started copies and wait for it leave the kernel, as at any grid barrier."""
    generated = early(DEEP)
    broken = replace(generated, source=generated.source.replace(START, f"if (blockIdx.x == 1) return;\n  {START}", 1))
    with pytest.raises(LaunchError, match="barrier of stage 1 was not passed in time"):
        emulator.emulate(broken, inputs_of(DEEP), num_blocks=3, barrier_timeout_ns=10**8, check_races=True)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120"])
def test_nvrtc_compiles_them(arch: str) -> None:
    assert nvrtc.compile_cubin(early(ROWS).source, arch).startswith(b"\x7fELF")


# ---------------------------------------------------------------------------- what is said to fit


def _panel_bytes(generated: GeneratedKernel) -> int:
    """What the largest panel on the grid is taken to need."""
    target, threads = generated.target, generated.threads_per_block
    plans = [task.plan for stage in generated.schedule.stages for task in stage.tasks]
    panels = [plan for plan in plans if isinstance(plan, ProductPlan) and plan.path == "panel"]
    return max(max(panel_operands_bytes(plan), panel_bytes(plan, target, threads)) for plan in panels)


def test_the_barriers_of_copies_have_room_beside_every_task() -> None:
    """A panel that would take all that a block may have is none."""
    for program in (STEP, ROWS):
        wide = early(program)
        size_bytes = _panel_bytes(wide)
        target = replace(wide.target, shared_bytes_per_block=size_bytes)
        assert _panel_bytes(generate(program, target=target, region_pieces=4)) <= size_bytes - ARRIVALS_BYTES
        assert wide.shared_bytes <= wide.target.shared_bytes_per_block


def test_a_copy_that_can_never_be_aligned_is_none_of_them() -> None:
    """A weight that begins one element behind a whole 16 bytes of its array."""
    for offset, starts in ((0, True), (4, True), (1, False)):
        b = ProgramBuilder()
        x, w0 = b.input("x", (32, 512)), b.input("w0", (512, 32))
        whole = b.input("whole", (64 * 32 + 4,))
        w1 = replace(b.input("w1", (32, 64)), buffer=whole.buffer, shape=(32, 64), strides=(64, 1), offset=offset)
        h = b.op("relu", b.op("mm", x, w0))
        y = b.op("tanh", b.op("mm", h, w1))
        program = b.build([b.op("mm", y, w1.T), b.op("mm", h.T, y)])
        generated = generate(program, target=target_of(72), region_pieces=4)
        assert (START in generated.source) == starts, offset
        prove(generated, program, inputs_of(program))


# ---------------------------------------------------------------------------- what is left out is missed

MUTATIONS = {
    "no wait for the copies": (r"tk_arrivals_wait\(arrivals, \d\);", "", "in flight|nobody waited"),
    "no block barrier after it": (r"(tk_arrivals_wait\(arrivals, \d\);)\s*__syncthreads\(\);", r"\1", "race"),
    "nobody arrives": (r"if \(thread == 0\) tk_mbarrier_arrive\(mbarrier, started\);", "", "deadlock"),
    "all arrive": (r"if \(thread == 0\) (tk_mbarrier_arrive\(mbarrier, started\);)", r"\1", "deadlock"),
    "bytes that are not announced": (r"started \+= tk_fetch_rows", "tk_fetch_rows", "deadlock"),
    "no fence": (r"tk_fence_async\(\);", "", "bulk copy without a fence"),
    "no wait for the grid": (r"if \(!tk_grid_barrier_wait\(barrier, \d\)\) return;", "", "race|passed too early"),
    "blocks without a piece": (r"if \(blockIdx.x < 4\)", "if (true)", "nobody waited|out of bounds"),
    "the first piece again": (r"if \(!\(piece == [^)]*\)blockIdx.x\)\)", "if (true)", "deadlock"),
    "no other piece": (r"if \(!\(piece == [^)]*\)blockIdx.x\)\)", "if (false)", "deadlock"),
    "a phase that does not turn": (r"arrivals\.phases \^= 1u << number;", "", "deadlock"),
}


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_what_is_left_out_is_missed(name: str) -> None:
    pattern, replacement, error = MUTATIONS[name]
    generated, inputs = early(DEEP), inputs_of(DEEP)
    start = 0 if "phase" in name else generated.source.index("__launch_bounds__")
    body, count = re.subn(pattern, replacement, generated.source[start:], count=1)
    assert count == 1
    broken = replace(generated, source=generated.source[:start] + body)
    errors = []
    for num_blocks in (1, 6):
        try:
            emulate(broken, inputs, num_blocks=num_blocks)
        except (EmulatorError, LaunchError) as found:
            errors.append(str(found))
    assert errors and all(re.search(error, text) for text in errors), errors


def _with_early(plan: MemoryPlan, stage: int, names: set[str]) -> MemoryPlan:
    copied = tuple(frozenset(names) if place == stage else own for place, own in enumerate(plan.early))
    return replace(plan, early=copied)


def test_the_verifier_wants_what_is_copied_early_to_be_written() -> None:
    """The input of the region is what the stage before it writes."""
    generated = early(STEP)
    written = generated.schedule.stages[0].tasks[0].stores[0]
    copied = {
        copy.buffer for task in generated.schedule.stages[1].tasks if task.region for copy in task.region.shared.staged
    }
    assert written in copied and written not in generated.plan.early[1]
    verify_plan(generated.schedule, generated.plan)
    broken = _with_early(generated.plan, 1, {written})
    with pytest.raises(VerificationError, match=f"copies '{written}' before task '{written}' has written it"):
        verify_plan(generated.schedule, broken)


def test_the_verifier_wants_a_grid_barrier_behind_early_copies() -> None:
    generated = early(STEP)
    with pytest.raises(VerificationError, match="before a grid barrier that it has not"):
        verify_plan(generated.schedule, _with_early(generated.plan, 0, {"w1"}))


def _frozen_first_layer() -> Program:
    """Steps that update their second layer alone: nothing ends a step with a barrier."""
    body = ProgramBuilder()
    w, v, x = body.input("w", (512, 32)), body.input("v", (32, 64)), body.input("x", (32, 512))
    h = body.op("relu", body.op("mm", x, w))
    grad = body.op("tanh", body.op("mm", body.op("tanh", body.op("mm", h, v)), v.T))
    step = body.build([body.op("sub", v, body.op("mm", h.T, body.op("tanh", body.op("mm", grad, v))))])
    b = ProgramBuilder()
    operands = [b.input("w", (512, 32)), b.input("v", (32, 64)), b.input("xs", (3, 32, 512))]
    return b.build(list(b.loop(step, operands, num_carry=1, num_xs=1, length=3)))


def test_what_the_step_before_wrote_is_not_copied_early() -> None:
    """The planner leaves it out, the verifier refuses it, and the emulator sees it race."""
    program = _frozen_first_layer()
    generated, inputs = generate(program, target=target_of(72), region_pieces=4), inputs_of(program)
    ((name, inner),) = generated.plan.loops.items()
    assert inner.barriers[:2] == (None, "grid") and inner.back_edge is None and not inner.early[1]
    emulate(generated, inputs, num_blocks=3)
    broken = replace(generated.plan, loops={name: _with_early(inner, 1, {"v"})})
    with pytest.raises(VerificationError, match="copies 'v' before task"):
        verify_plan(generated.schedule, broken)
    with pytest.raises(EmulatorError, match="race"):
        emulate(assemble(program, generated.schedule, broken), inputs, num_blocks=3)
