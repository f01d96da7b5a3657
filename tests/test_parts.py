"""Runs as several launches: the bits of one launch, whatever loops there are and wherever they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from harness import MAX_UNKNOWN, bits, copies
from programs import random_options, random_program
from test_kept import inputs_of as inputs_of_training
from test_kept import keeper, looped, training
from test_loops import cell, inputs_of, nested, recurrence

import trainkernel as tk
from trainkernel import emulator
from trainkernel import numpy as tnp
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.emulator import EmulationResult
from trainkernel.errors import EmulatorError, OptionError, RaceError
from trainkernel.facts import Segment
from trainkernel.ir import Program

CUTS: tuple[int | list[int], ...] = (1, 2, 3, [1, 4], [3, 1, 2])
"""Ticks of the launches of a run."""


def run(generated: GeneratedKernel, inputs: Sequence[Any], cut: Any, num_blocks: int = 3, **how: Any) -> Any:
    """A run on copies of the inputs, watched for races and for reads of what nobody wrote."""
    values = copies(inputs)
    return emulator.emulate(generated, values, num_blocks=num_blocks, check_races=True, ticks_per_launch=cut, **how)


def found(result: EmulationResult) -> tuple[bytes, ...]:
    return tuple(bits(output) for output in result.outputs)


def prove(program: Program, inputs: Sequence[Any], cuts: Sequence[Any] = CUTS, **options: Any) -> GeneratedKernel:
    """Parts have the bits of one launch, and those of the kernel that has no parts; returns the one with parts."""
    generated, plain = generate(program, parts=True, **options), generate(program, **options)
    assert plain.segments == () and plain.ticks_offset_bytes is None
    emulator.prepare([generated, plain], check_races=True)
    want = run(plain, inputs, None)
    assert assert_close(want.outputs, program, inputs) <= MAX_UNKNOWN
    num_ticks = sum(segment.num_ticks(inputs) for segment in generated.segments)
    whole = run(generated, inputs, None)
    assert found(whole) == found(want) and whole.num_launches == 1
    for number, cut in enumerate(cuts):
        order = ("forward", "reverse", 7)[number % 3]
        result = run(generated, inputs, cut, num_blocks=1 + number % 4, order=order)
        assert found(result) == found(want), f"ticks_per_launch={cut}"
        if isinstance(cut, int):
            assert result.num_launches == -(-num_ticks // cut)
    return generated


@pytest.mark.parametrize("options", [{}, {"region_pieces": 0}, {"fuse_pointwise": False, "fuse_epilogues": False}])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_between_stages(reverse: bool, options: dict[str, Any]) -> None:
    """It has slices, stacked results and a carry, and a stage before and after it."""
    program = recurrence(5, reverse=reverse)
    generated = prove(program, inputs_of(program), **options)
    assert generated.segments == (Segment(1), Segment(5), Segment(1))


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_a_length_by_value(steps: int) -> None:
    program = recurrence(4, dynamic=True, reverse=steps == 3)
    generated = prove(program, inputs_of(program, steps))
    assert generated.segments[1] == Segment(None, 3)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_stays_near_is_returned_by_each_launch(inplace: bool) -> None:
    program = looped(training(), 5)
    options: dict[str, Any] = {"inplace_outputs": {0: 2, 1: 3, 2: 4} if inplace else {}}
    generated = prove(program, inputs_of_training(program), region_pieces=1, **options)
    assert keeper(generated.schedule) is not None


@pytest.mark.parametrize("pieces", [0, 4, 8])
def test_training_with_a_length_by_value_and_donated_state(pieces: int) -> None:
    program = looped(training(stacked_batch=True, stacked_weights=True), 4, dynamic=True, stacked_batch=True)
    inputs = inputs_of_training(program, 3)
    prove(program, inputs, region_pieces=pieces, inplace_outputs={0: 2, 1: 3, 2: 4})


def test_two_loops_and_what_lies_between() -> None:
    """The ticks of the second come after a length that only the launch knows."""
    b = ProgramBuilder()
    w, start, xs = b.input("w", (33, 33)), b.input("start", (9, 33)), b.input("xs", (4, 9, 33))
    count = b.scalar("steps", "int32")
    after, sums, _ = b.loop(cell(), [w, start, xs], num_carry=1, num_xs=1, length=count, room=4, name="first")
    middle = b.op("tanh", b.op("mm", after, w))
    again = b.loop(cell(), [w, middle, xs], num_carry=1, num_xs=1, length=4, reverse=True, name="second")
    program = b.build([*again, sums, b.op("sum", again[0])])
    for steps in (0, 2, 4):
        generated = prove(program, inputs_of(program, steps), region_pieces=0)
        assert [segment.scalar for segment in generated.segments].count(3) == 1
        assert Segment(4) in generated.segments


def test_only_the_outermost_loop_is_cut() -> None:
    """A loop inside of a step runs whole; its length, by value, decides what a step takes."""

    def outer(x: Any, xs: Any, times: int) -> Any:
        def step(x: Any, y: Any) -> Any:
            x = tk.fori_loop(0, times, lambda _, x: tnp.tanh(x @ xs[0]) + y, x)
            return x, tnp.sum(x)

        return tk.scan(step, x, xs)

    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal((12, 12)).astype(np.float32), rng.standard_normal((3, 12, 12)).astype(np.float32), 2]
    step = tk.jit(outer).lower(*inputs)
    for pieces in (0, 1):
        generated = prove(step.program, inputs, region_pieces=pieces)
        assert Segment(3, None, (2,)) in generated.segments


@pytest.mark.parametrize("reverse", [False, True])
def test_loops_in_a_loop(reverse: bool) -> None:
    program = nested(reverse)
    generated = prove(program, inputs_of(program))
    assert Segment(3) in generated.segments


def test_blocks_are_numbered_anew_by_each_launch() -> None:
    """Where two blocks share a multiprocessor, tiles of a loop go by numbers that each launch finds for itself."""
    body = ProgramBuilder()
    w, carry = body.input("w", (64, 64), "bfloat16"), body.input("carry", (128, 64), "bfloat16")
    after = body.op("tanh", body.op("mm", carry, w), name="after")
    step = body.build([after, body.op("sum", after, dims=(0,), dtype="float32")])
    b = ProgramBuilder()
    operands = [b.input("w", (64, 64), "bfloat16"), b.input("start", (128, 64), "bfloat16")]
    program = b.build(b.loop(step, operands, num_carry=1, length=3))
    generated = prove(program, inputs_of(program), region_pieces=0, blocks_per_sm=2)
    assert "tk_spread_block<" in generated.source


def test_a_table_of_arrays() -> None:
    """With many arrays the parameter block has one pointer to all; the launch's ticks come after it."""
    b = ProgramBuilder()
    inputs = [b.input(f"x{number}", (3,)) for number in range(500)]
    body = ProgramBuilder()
    total, x = body.input("total", (3,)), body.input("x", (3,))
    step = body.build([body.op("add", body.op("mul", total, 0.5), x)])
    start = inputs[0]
    for other in inputs[1:]:
        start = b.op("add", start, other)
    program = b.build(b.loop(step, [start, b.input("xs", (4, 3))], num_carry=1, num_xs=1, length=4))
    generated = prove(program, inputs_of(program), cuts=(1, [2, 1]))
    assert generated.uses_tensor_table and generated.ticks_offset_bytes == 24


def test_a_program_without_loops_is_cut_between_stages() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (33, 20)), b.input("w", (20, 20))
    centred = b.op("sub", x, b.op("mean", x, dims=(0,)))
    program = b.build([b.op("mm", b.op("tanh", b.op("mm", centred, w)), w), b.op("sum", centred)])
    generated = prove(program, inputs_of(program), region_pieces=0)
    assert len(generated.segments) > 2 and set(generated.segments) == {Segment(1)}


@pytest.mark.parametrize("chunk", range(4))
def test_random_programs_at_random_cuts(chunk: int) -> None:
    cases = []
    for seed in range(6 * chunk, 6 * chunk + 6):
        rng = np.random.default_rng(4_000 + seed)
        case = random_program(seed)
        options = random_options(rng)
        cases.append((case, generate(case.program, parts=True, inplace_outputs=case.inplace_outputs, **options), rng))
    emulator.prepare([generated for _, generated, _ in cases], check_races=True)
    for case, generated, rng in cases:
        want = found(run(generated, case.inputs, None))
        for _ in range(2):
            cut = [int(n) for n in rng.integers(1, 6, 5)]
            result = run(generated, case.inputs, cut, num_blocks=int(rng.integers(1, 5)), order=int(rng.integers(99)))
            assert found(result) == want, f"{case.name}: {cut}"


# ---------------------------------------------------------------------------- what must be noticed


def test_a_carry_that_is_not_returned_is_noticed() -> None:
    """Without the copy to its array after the last step of a launch the next one goes on from an older state."""
    program = looped(training(), 4)
    inputs = inputs_of_training(program)
    generated = generate(program, parts=True, region_pieces=1)
    before, what, after = generated.source.partition("{  // the carries that stayed near\n")
    call, _, rest = after.partition("\n")
    assert what and call.strip().startswith("tk_")
    broken = replace(generated, source=f"{before}{what}\n{rest}")
    assert found(run(broken, inputs, 2)) != found(run(generated, inputs, 2))


def test_what_a_later_launch_reads_must_have_been_written() -> None:
    """A stage that a launch leaves out shows as a read of poison in the launch after it."""
    program = recurrence(3)
    generated = generate(program, parts=True, region_pieces=0)
    broken = replace(
        generated, source=generated.source.replace("if (tk_runs(p.first_tick, p.end_tick, 0ll))", "if (0)")
    )
    assert broken.source != generated.source
    with pytest.raises(EmulatorError):
        run(broken, inputs_of(program), 1)


def test_barriers_inside_of_a_launch_are_still_needed() -> None:
    program = recurrence(3)
    generated = generate(program, parts=True, region_pieces=0)
    before, barrier, after = generated.source.rpartition("if (!tk_grid_barrier(barrier, ")
    broken = replace(generated, source=before + "if (false && !tk_grid_barrier(barrier, " + after)
    assert barrier
    run(broken, inputs_of(program), 1)  # launches of one tick need none between stages
    with pytest.raises(RaceError):
        run(broken, inputs_of(program), None)


# ---------------------------------------------------------------------------- the options


def train(w: Any, xs: Any, rate: float, steps: int) -> Any:
    def step(w: Any, x: Any) -> Any:
        value, slope = tk.value_and_grad(lambda w: tnp.mean((x @ w) ** 2))(w)
        return w - rate * slope, value

    w, losses = tk.scan(step, w, xs, length=steps)
    return w, losses, tnp.sum(losses)


def test_jit_with_bounded_launches_has_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((7, 16, 4)).astype(np.float32)
    w = rng.standard_normal((4, 2)).astype(np.float32)
    want = tk.jit(train, device="emulator")(w.copy(), xs, 0.1, 6)
    jitted = tk.jit(train, device="emulator", max_launch_ms=50.0, donate_argnums=0)
    mine = w.copy()
    got = jitted(mine, xs, 0.1, 6)
    assert got[0] is mine
    assert [bits(value) for value in got] == [bits(value) for value in want]
    kernel = jitted.kernel(w, xs, 0.1, 6)
    losses, total = np.zeros(7, np.float32), np.zeros((), np.float32)
    bound = kernel.bind([w, xs, 0.1, 6], [None, losses, total])
    bound.launch()
    assert bits(w) == bits(want[0]) and bits(losses) == bits(want[1])


def test_the_time_is_no_part_of_the_kernel() -> None:
    program = recurrence(3)
    first, second = (tk.compile(program, arch="sm_90", max_launch_ms=ms) for ms in (1.0, 2000))
    assert first.source == second.source
    assert first.source != tk.compile(program, arch="sm_90").source
    assert "#error" in first.source
    assert first.cubin == second.cubin


def test_the_reference_has_no_launches() -> None:
    program = recurrence(3)
    inputs = inputs_of(program)
    want = tk.compile(program, device="reference")(*inputs)
    got = tk.compile(program, device="reference", max_launch_ms=1)(*inputs)
    assert [bits(value) for value in got] == [bits(value) for value in want]


@pytest.mark.parametrize("value", [0, -1.0, "5", True, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="max_launch_ms must be None or a positive number of milliseconds, less than"):
        tk.compile(recurrence(2), device="reference", max_launch_ms=value)


def test_options_that_exclude_each_other() -> None:
    program = recurrence(2)
    with pytest.raises(OptionError, match=r"stamps and launches in parts .* exclude each other"):
        generate(program, stamps=True, parts=True)
    with pytest.raises(OptionError, match=r"stamps and launches in parts .* exclude each other"):
        tk.compile(program, device="emulator", max_launch_ms=5, stamps=True)
    with pytest.raises(OptionError, match="parts=False rules them out"):
        tk.compile(program, device="emulator", max_launch_ms=5, parts=False)
    with pytest.raises(OptionError, match="option parts must be True, False or None, got 1"):
        generate(program, parts=1)  # type: ignore[arg-type]


def test_cuts_that_are_refused() -> None:
    program = recurrence(2)
    inputs = inputs_of(program)
    for cut in (0, [], [1, 0], True, [2.0], "3"):
        with pytest.raises(OptionError, match="ticks_per_launch must be"):
            emulator.run(program, inputs, ticks_per_launch=cut)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="generate it with parts=True"):
        emulator.emulate(generate(program), inputs, ticks_per_launch=1)
    parts = emulator.run(program, inputs, ticks_per_launch=[1, 2])
    assert [bits(value) for value in parts] == [bits(value) for value in emulator.run(program, inputs)]
