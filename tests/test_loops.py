"""Loops on the emitted source: order, lengths, carries that exchange, views, nesting, places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from harness import bits, check, emulate

from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.dtypes import DTYPES
from trainkernel.errors import VerificationError
from trainkernel.ir import Loop, Program, ScalarSpec, TensorSpec
from trainkernel.verify import verify_plan

OFF: dict[str, Any] = {"fuse_pointwise": False, "fuse_epilogues": False, "inline_input_casts": False}


def inputs_of(program: Program, steps: int = 3) -> list[Any]:
    rng = np.random.default_rng(7)
    values: list[Any] = []
    for spec in program.inputs:
        if isinstance(spec, ScalarSpec):
            values.append(steps if spec.dtype == "int32" else 0.5)
        else:
            values.append((0.5 * rng.standard_normal(spec.shape)).astype(DTYPES[spec.dtype].numpy))
    return values


def prove(program: Program, steps: int = 3, **options: Any) -> None:
    """Right and race-free, fused or not, with the same bits on every grid."""
    inputs = inputs_of(program, steps)
    found = set()
    for switches in ({}, OFF):
        generated = check(program, inputs, num_blocks=4, **switches, **options)
        for num_blocks, order in ((1, "forward"), (3, "reverse"), (5, 9)):
            result = emulate(generated, inputs, num_blocks=num_blocks, order=order)
            found.add(tuple(bits(output) for output in result.outputs))
    assert len(found) == 1


def cell(rows: int = 9, width: int = 33) -> Program:
    """next = tanh(carry w + x); y = next's row sums, and the old carry."""
    body = ProgramBuilder()
    w, carry, x = body.input("w", (width, width)), body.input("carry", (rows, width)), body.input("x", (rows, width))
    after = body.op("tanh", body.op("add", body.op("mm", carry, w), x), name="after")
    return body.build([after, body.op("sum", after, dims=(1,)), carry])


def recurrence(length: int, *, dynamic: bool = False, reverse: bool = False) -> Program:
    b = ProgramBuilder()
    operands = [b.input("w", (33, 33)), b.input("start", (9, 33)), b.input("xs", (length, 9, 33))]
    count = b.scalar("steps", "int32") if dynamic else length
    outputs = b.loop(cell(), operands, num_carry=1, num_xs=1, length=count, room=length, reverse=reverse)
    return b.build([*outputs, b.op("max", outputs[0])])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_lengths(length: int, reverse: bool) -> None:
    prove(recurrence(length, reverse=reverse))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_length_by_value(reverse: bool) -> None:
    """Rows of stacked outputs beyond the length are zero."""
    program = recurrence(4, dynamic=True, reverse=reverse)
    generated = generate(program)
    for steps in (0, 1, 3, 4):
        prove(program, steps)
        outputs = emulate(generated, inputs_of(program, steps), num_blocks=3).outputs
        assert not outputs[1][steps:].any()
    assert generated.scalars[0].maximum == 4


def test_a_long_loop_keeps_its_rounding() -> None:
    program = recurrence(40)
    assert_close(emulate(generate(program), inputs_of(program)).outputs, program, inputs_of(program))


def test_carries_that_exchange() -> None:
    body = ProgramBuilder()
    a, b_, c = (body.input(name, (40, 30)) for name in "abc")
    step = body.build([b_, c, body.op("add", a, b_), body.op("mul", a, c)])
    b = ProgramBuilder()
    operands = [b.input(name, (40, 30)) for name in ("first", "second", "third")]
    prove(b.build(b.loop(step, operands, num_carry=3, length=4)))
    prove(b.build(b.loop(step, operands, num_carry=3, length=3, name="again")), inplace_outputs={0: 0, 1: 1, 2: 2})


def test_a_carry_read_transposed() -> None:
    body = ProgramBuilder()
    carry = body.input("carry", (20, 20))
    step = body.build([body.op("mul", body.op("add", carry, carry.T), 0.5), carry.T])
    b = ProgramBuilder()
    prove(b.build(b.loop(step, [b.input("start", (20, 20))], num_carry=1, length=3)), inplace_outputs={0: 0})


def test_a_carry_that_does_not_change() -> None:
    body = ProgramBuilder()
    kept, total = body.input("kept", (50,)), body.input("total", (50,))
    step = body.build([kept, body.op("add", total, kept)])
    b = ProgramBuilder()
    prove(b.build(b.loop(step, [b.input("k", (50,)), b.input("t", (50,))], num_carry=2, length=3)))


def test_one_buffer_in_several_places() -> None:
    """The same array is constant, start and stacked input; two outputs are the same value."""
    body = ProgramBuilder()
    c, carry, x = body.input("c", (3, 20)), body.input("carry", (20,)), body.input("x", (20,))
    after = body.op("add", body.op("add", carry, x), body.op("sum", c, dims=(0,)))
    step = body.build([after, after, after])
    b = ProgramBuilder()
    xs = b.input("xs", (3, 20))
    start = TensorSpec("xs", (20,), (1,), 20)
    prove(b.build([*b.loop(step, [xs, start, xs], num_carry=1, num_xs=1, length=3), xs]))


def test_views_as_operands() -> None:
    body = ProgramBuilder()
    w, carry, x = body.input("w", (5, 7)), body.input("carry", (5, 7)), body.input("x", (7, 5))
    step = body.build([body.op("sub", body.op("mul", carry, w), x.T)])
    b = ProgramBuilder()
    b.input("base", (12, 16))
    xs = b.input("xs", (7, 5, 4))
    constant = TensorSpec("base", (5, 7), (32, 2), 17)
    start = TensorSpec("base", (5, 7), (1, 16), 3)
    stacked = TensorSpec(xs.buffer, (4, 7, 5), (1, 20, 4), 0)
    prove(b.build(b.loop(step, [constant, start, stacked], num_carry=1, num_xs=1, length=4)))


def test_body_inputs_of_a_computed_operand() -> None:
    b = ProgramBuilder()
    x = b.input("x", (33, 33))
    operands = [b.op("mul", x, 0.1), b.op("exp", TensorSpec("x", (9, 33), (33, 1))), b.input("xs", (2, 9, 33))]
    outputs = b.loop(cell(), operands, num_carry=1, num_xs=1, length=2)
    prove(b.build([b.op("sum", b.op("relu", outputs[0])), b.op("mean", outputs[2], dims=(0, 1)), outputs[1]]))


def test_scalars_by_value_as_constants() -> None:
    body = ProgramBuilder()
    rate, carry = body.scalar("r"), body.input("carry", (40,))
    step = body.build([body.op("mul", carry, rate)])
    b = ProgramBuilder()
    operands = [b.scalar("rate"), b.input("start", (40,))]
    prove(b.build(b.loop(step, operands, num_carry=1, length=3)), inplace_outputs={0: 1})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool"])
def test_carries_of_other_dtypes(dtype: str) -> None:
    body = ProgramBuilder()
    carry, x = body.input("carry", (300,), dtype), body.input("x", (300,))
    step = body.build([body.op("sub", x, carry, dtype=dtype), body.op("add", carry, x, dtype="float32")])
    b = ProgramBuilder()
    prove(
        b.build(b.loop(step, [b.input("s", (300,), dtype), b.input("xs", (3, 300))], num_carry=1, num_xs=1, length=3))
    )


def test_a_state_that_is_read_after_its_loop() -> None:
    """The final carry cannot take over the state's storage, and must be initialised where it is instead."""
    inner, b = ProgramBuilder(), ProgramBuilder()
    carry = inner.input("carry", (4, 8))
    body = inner.build([inner.op("neg", carry)])
    state = b.input("state", (4, 8))
    (final,) = b.loop(body, [state], num_carry=1, length=3)
    prove(b.build([final, b.op("add", state, final)]), inplace_outputs={0: 0})


def test_a_training_loop_updates_its_state_in_place() -> None:
    body = ProgramBuilder()
    x, y, w, rate = body.input("x", (40, 20)), body.input("y", (40, 3)), body.input("w", (20, 3)), 0.05
    error = body.op("sub", body.op("mm", x, w), y)
    step = body.build(
        [
            body.op("sub", w, body.op("mul", body.op("mm", x.T, error), rate / 40)),
            body.op("mean", body.op("mul", error, error)),
        ]
    )
    b = ProgramBuilder()
    operands = [b.input("x", (40, 20)), b.input("y", (40, 3)), b.input("w", (20, 3))]
    program = b.build(b.loop(step, operands, num_carry=1, length=10))
    prove(program, inplace_outputs={0: 2})
    losses = emulate(generate(program), inputs_of(program)).outputs[1]
    assert np.all(np.diff(losses) < 0)


def nested(reverse: bool) -> Program:
    inner = ProgramBuilder()
    w, v = inner.input("w", (17, 17)), inner.input("v", (6, 17))
    after = inner.op("tanh", inner.op("mm", v, w), name="after")
    inner_body = inner.build([after, after])
    body = ProgramBuilder()
    w, carry, x = body.input("w", (17, 17)), body.input("carry", (6, 17)), body.input("x", (6, 17))
    final, history = body.loop(inner_body, [w, carry], num_carry=1, length=2, reverse=reverse, name="inner")
    step = body.build([body.op("add", final, x), history, body.op("sum", history, dims=(0,))])
    b = ProgramBuilder()
    operands = [b.input("w", (17, 17)), b.input("start", (6, 17)), b.input("xs", (3, 6, 17))]
    return b.build(b.loop(step, operands, num_carry=1, num_xs=1, length=3, name="outer"))


@pytest.mark.parametrize("reverse", [False, True])
def test_nested(reverse: bool) -> None:
    prove(nested(reverse))


def test_two_loops_and_operations_between() -> None:
    b = ProgramBuilder()
    w, start, xs = b.input("w", (33, 33)), b.input("start", (9, 33)), b.input("xs", (2, 9, 33))
    first = b.loop(cell(), [w, start, xs], num_carry=1, num_xs=1, length=2, name="one")
    between = b.op("relu", first[0])
    second = b.loop(cell(), [w, between, first[2]], num_carry=1, num_xs=1, length=2, reverse=True, name="two")
    program = b.build([*second, b.op("add", second[0], first[0])])
    assert sum(isinstance(item, Loop) for item in program.operations) == 2
    prove(program)


def test_same_buffer_names_inside_and_outside() -> None:
    body = ProgramBuilder()
    step = body.build([body.op("neg", body.input("x", (40,)), name="y")])
    b = ProgramBuilder()
    y = b.op("exp", b.input("x", (40,)), name="y")
    prove(b.build([*b.loop(step, [y], num_carry=1, length=3, name="y"), y]))


def test_a_body_of_no_operations_and_no_carry() -> None:
    body = ProgramBuilder()
    step = body.build([body.input("x", (4, 5)).T])
    b = ProgramBuilder()
    prove(b.build(b.loop(step, [b.input("xs", (3, 4, 5))], num_carry=0, num_xs=1, length=3)))
    body = ProgramBuilder()
    step = body.build([body.op("full", shape=(4,), value=2)])
    b = ProgramBuilder()
    prove(b.build(b.loop(step, [], num_carry=0, length=3)))


def test_loops_of_one_name() -> None:
    """A Loop's name is free text, like an Operation's: each loop keeps a plan of its own."""
    body = ProgramBuilder()
    x = body.input("x", (40,))
    scaled = body.build([body.op("mul", body.op("tanh", x), body.op("sum", body.op("exp", x)))])
    b = ProgramBuilder()
    (first,) = b.loop(scaled, [b.input("start", (40,))], num_carry=1, length=2)
    body = ProgramBuilder()
    plain = body.build([body.op("add", body.input("x", (40,)), 1)])
    program = b.build(b.loop(plain, [first], num_carry=1, length=3))
    assert len({item.name for item in program.operations if isinstance(item, Loop)}) == 1
    prove(program)


@pytest.mark.parametrize("length", [0, 2])
def test_empty_operands(length: int) -> None:
    """A computed tensor of no elements has no storage, as a constant, a carry and a stacked input."""
    body = ProgramBuilder()
    constant, carry, none, x = (body.input(*spec) for spec in (("k", (0, 3)), ("c", (4,)), ("n", (0,)), ("x", (2, 0))))
    after = body.op("add", carry, body.op("add", body.op("sum", constant), body.op("sum", none)))
    step = body.build([after, body.op("neg", none), body.op("sum", x, dims=(1,)), after])
    b = ProgramBuilder()
    constant, none = b.op("neg", b.input("k", (0, 3))), b.op("neg", b.input("n", (0,)))
    xs = b.op("neg", b.input("xs", (length, 2, 0)))
    prove(b.build(b.loop(step, [constant, b.input("start", (4,)), none, xs], num_carry=2, num_xs=1, length=length)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_room_for_a_step(dynamic: bool) -> None:
    """Stages of the body read each other's values, which lie in stacked outputs of no elements."""
    body = ProgramBuilder()
    carry, x = body.input("carry", (40,)), body.input("x", (3,))
    total = body.op("sum", carry)
    step = body.build([body.op("mul", carry, body.op("sum", body.op("mul", x, total))), total, total])
    b = ProgramBuilder()
    start, xs = b.op("exp", b.input("start", (40,))), b.op("neg", b.input("xs", (0, 3)))
    length = b.scalar("steps", "int32") if dynamic else 0
    outputs = b.loop(step, [start, xs], num_carry=1, num_xs=1, length=length, room=0)
    prove(b.build([*outputs, start]), steps=0)


def test_a_carry_whose_first_value_is_read_later_is_committed_after() -> None:
    """The loop may not begin in the state's own array, so its carry needs a copy of the first value."""
    body = ProgramBuilder()
    carry = body.input("carry", (4, 8))
    step = body.build([body.op("tanh", carry)])
    b = ProgramBuilder()
    state = b.input("state", (4, 8))
    (final,) = b.loop(step, [state], num_carry=1, length=3)
    program = b.build([final, b.op("mul", final, state)])
    kernel = check(program, inputs_of(program), inplace_outputs={0: 0})
    assert kernel.direct_state_commits == 0


def test_blocks_of_one_multiprocessor_are_numbered_far_apart() -> None:
    """Tiles that repeat: every piece is computed once, on grids of any size."""
    body = ProgramBuilder()
    w, x = body.input("w", (40, 40)), body.input("x", (72, 40))
    hidden = body.op("tanh", body.op("mm", x, w))
    step = body.build([body.op("tanh", body.op("mm", hidden, w)), body.op("sum", hidden, dims=(1,))])
    b = ProgramBuilder()
    operands = [b.input("w", (40, 40)), b.input("x", (72, 40))]
    program = b.build(list(b.loop(step, operands, num_carry=1, length=3)))
    options = {"region_pieces": 0, "blocks_per_sm": 2, "gemm_k_tile": 16}
    assert "tk_spread_block<" in generate(program, **options).source
    assert "tk_spread_block<" not in generate(program, region_pieces=0, blocks_per_sm=1, gemm_k_tile=16).source
    for stamps in (False, True):
        prove(program, stamps=stamps, **options)


@pytest.mark.parametrize("length", [None, 1])
def test_barriers_of_a_loop_without_steps_order_nothing(length: int | None) -> None:
    """What stands before a loop and after it needs a barrier beside those of its steps, if it may have none."""
    body = ProgramBuilder()
    carry = body.input("carry", (64, 64))
    step = body.build([body.op("tanh", body.op("mm", carry, carry))])
    b = ProgramBuilder()
    start, x = b.input("start", (64, 64)), b.input("x", (40, 30))
    y = b.op("mm", x, b.input("u", (30, 20)))
    steps = b.scalar("steps", "int32") if length is None else length
    (last,) = b.loop(step, [start], num_carry=1, length=steps)
    program = b.build([last, b.op("mm", y.T, y)])
    generated = generate(program, region_pieces=0, inplace_outputs={0: 0})
    plan = replace(generated.plan, barriers=(None,) * len(generated.plan.barriers))
    if length == 1:
        verify_plan(generated.schedule, plan)
        return
    with pytest.raises(VerificationError, match="meet at"):
        verify_plan(generated.schedule, plan)
