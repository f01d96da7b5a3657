"""Specs, printing, equality and immutability of the language's dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

from trainkernel.builder import ProgramBuilder
from trainkernel.errors import ProgramError
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec, dense_strides, format_operand, validate
from trainkernel.ops import OPS

X = TensorSpec.dense("x", (3, 4))


def small_program() -> Program:
    b = ProgramBuilder()
    x = b.input("x", (8, 3))
    w = b.input("w", (3, 2), "bfloat16")
    rate = b.scalar("rate")
    h = b.op("mm", x, w, name="h")
    low, total = b.multi("softmax_stats", h, dims=(1,), name="stats")
    scaled = b.op("mul", b.op("relu", h, name="r"), rate, dtype="float16", name="scaled")
    return b.build([scaled.T, low, total, b.op("sub", 1, h.T, alpha=0.5, name="s")])


def loop_program() -> Program:
    body = ProgramBuilder()
    c, row = body.input("c", (4,)), body.input("row", (4,))
    step = body.build([body.op("add", c, row, name="next"), c])
    b = ProgramBuilder()
    outputs = b.loop(step, [b.input("start", (4,)), b.input("xs", (5, 4))], num_carry=1, num_xs=1, length=5)
    return b.build(outputs)


# ---------------------------------------------------------------------------- specs


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 1, 4), (4, 4, 1)), ((2, 0, 4), (4, 4, 1)), ((1,), (1,))],
)
def test_dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert dense_strides(shape) == strides
    spec = TensorSpec.dense("x", shape)
    assert spec.strides == strides and spec.offset == 0 and spec.is_dense
    assert spec.num_elements == math.prod(shape) and spec.ndim == len(shape)
    assert spec.last_index == math.prod(shape) - 1


def test_last_index() -> None:
    assert TensorSpec("x", (3, 4), (10, 2), 7).last_index == 7 + 20 + 6
    assert TensorSpec("x", (3, 4), (0, 2), 7).last_index == 13
    assert TensorSpec("x", (), (), 7).last_index == 7
    assert TensorSpec("x", (0, 4), (4, 1), 7).last_index == 6
    assert TensorSpec("x", (1, 4), (999, 1), 0).last_index == 3


def test_is_dense_ignores_size_1_dims() -> None:
    assert TensorSpec("x", (1, 4), (999, 1), 3).is_dense
    assert TensorSpec("x", (0, 4), (1, 9)).is_dense
    assert not TensorSpec("x", (2, 4), (1, 2)).is_dense
    assert not TensorSpec("x", (2, 4), (0, 1)).is_dense


def test_views() -> None:
    transposed = X.T
    assert (transposed.shape, transposed.strides) == ((4, 3), (1, 4)) and transposed.T == X
    row = TensorSpec.dense("x", (1, 4), "float16")
    assert row.broadcast_to((3, 4)) == TensorSpec("x", (3, 4), (0, 1), 0, "float16")
    assert row.broadcast_to((2, 3, 4)).strides == (0, 0, 1)
    assert row.broadcast_to((1, 4)) == row
    assert X.reshape((2, 6)) == TensorSpec.dense("x", (2, 6))
    with pytest.raises(ValueError, match="without a copy"):
        X.T.reshape((12,))
    with pytest.raises(ValueError, match="without a copy"):
        X.reshape((13,))


def test_lists_become_tuples() -> None:
    spec = TensorSpec("x", [3, 4], [4, 1])  # type: ignore[arg-type]
    operation = Operation("o", "neg", [spec], [X])  # type: ignore[arg-type]
    assert spec == X and operation.inputs == (X,) and operation.outputs == (X,)
    program = Program([X], [operation], [X])  # type: ignore[arg-type]
    assert program == Program((X,), (operation,), (X,))


# ---------------------------------------------------------------------------- printing


def test_programs_print_as_text() -> None:
    assert str(small_program()).splitlines() == [
        "input x: f32[8,3]",
        "input w: bf16[3,2]",
        "input rate: f32 by value",
        "h: f32[8,2] = mm x w",
        "stats: f32[8], stats_1: f32[8] = softmax_stats h dims=(1,)",
        "r: f32[8,2] = relu h",
        "scaled: f16[8,2] = mul r rate",
        "s: f32[2,8] = sub 1 h[2,8:1,2] alpha=0.5",
        "return scaled[2,8:1,2]",
        "return stats",
        "return stats_1",
        "return s",
    ]


def test_loops_print_with_their_body() -> None:
    assert str(loop_program()).splitlines() == [
        "input start: f32[4]",
        "input xs: f32[5,4]",
        "loop_next: f32[4], loop_c: f32[5,4] = loop 5 carry=1 xs=1 start xs",
        "    input c: f32[4]",
        "    input row: f32[4]",
        "    next: f32[4] = add c row",
        "    return next",
        "    return c",
        "return loop_next",
        "return loop_c",
    ]


def test_operands_print() -> None:
    assert format_operand(X) == "x"
    assert format_operand(TensorSpec("x", (2, 2), (4, 2), 5)) == "x+5[2,2:4,2]"
    assert format_operand(TensorSpec("x", (3,), (1,), 2)) == "x+2[3:1]"
    assert format_operand(2) == "2" and format_operand(2.0) == "2.0" and format_operand(-math.inf) == "-inf"
    assert str(TensorSpec("x", (2,), (3,), 1)) == "x: f32[2] strides (3) offset 1"
    assert str(ScalarSpec("n", "int32")) == "n: i32 by value"


def test_what_is_refused_still_prints() -> None:
    assert "y: f99[3] strides (1,2)" in str(TensorSpec("y", (3,), (1, 2), 0, "f99"))
    assert str(Operation("o", "neg", ("junk",), X)) == "x: f32[3,4] = neg 'junk'"  # type: ignore[arg-type]
    for size in ("a", None, (1,), 1.5):
        assert "f32" in str(TensorSpec("y", (size,), (1,)))  # type: ignore[arg-type]
    assert str(Operation("o", "neg", (X,), X, {1: 2, "a": 3})).endswith("neg x 1=2 a=3")  # type: ignore[dict-item]


def test_ints_that_python_does_not_print() -> None:
    huge = 10**5000
    text = str(Operation("o", "add", (X, huge), X, {"alpha": huge}))
    assert text == "x: f32[3,4] = add x <int too long to print> alpha=<int too long to print>"
    assert str(TensorSpec("y", (huge,), (huge,), huge)).count("too long") == 3


# ---------------------------------------------------------------------------- dataclasses


@pytest.mark.parametrize("make", [small_program, loop_program])
def test_pickling_copying_and_equality(make) -> None:  # type: ignore[no-untyped-def]
    program = make()
    assert make() == program and make() is not program
    assert pickle.loads(pickle.dumps(program)) == program
    assert copy.deepcopy(program) == program
    changed = dataclasses.replace(program, outputs=program.outputs[:1])
    assert changed != program
    validate(pickle.loads(pickle.dumps(program)))


def test_frozen() -> None:
    program = small_program()
    operation = program.operations[0]
    assert isinstance(operation, Operation)
    for instance, field in ((program, "inputs"), (operation, "op"), (X, "shape"), (ScalarSpec("s"), "dtype")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, field, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(loop_program().operations[0], "length", 3)  # noqa: B010 - mypy knows that it is frozen
    with pytest.raises(TypeError):
        operation.attrs["alpha"] = 2  # type: ignore[index]


def test_attrs_are_copied() -> None:
    attrs = {"alpha": 2}
    operation = Operation("o", "add", (X, X), TensorSpec.dense("y", (3, 4)), attrs)
    attrs["alpha"] = 3
    assert operation.attrs["alpha"] == 2


def test_the_location_is_not_compared() -> None:
    y = TensorSpec.dense("y", (3, 4))
    assert Operation("o", "neg", (X,), y, location="a.py:1") == Operation("o", "neg", (X,), y, location="b.py:2")
    assert Operation("o", "neg", (X,), y) != Operation("p", "neg", (X,), y)
    assert Operation("o", "add", (X, X), y, {"alpha": 1}) != Operation("o", "add", (X, X), y)


def test_inputs_by_kind_and_buffers() -> None:
    program = small_program()
    assert [spec.buffer for spec in program.tensor_inputs] == ["x", "w"]
    assert [spec.buffer for spec in program.scalar_inputs] == ["rate"]
    assert [spec.buffer for spec in program.buffers()] == [
        "x",
        "w",
        "rate",
        "h",
        "stats",
        "stats_1",
        "r",
        "scaled",
        "s",
    ]
    loop = loop_program().operations[0]
    assert isinstance(loop, Loop) and loop.num_constants == 0 and loop.tensor_inputs == loop.inputs


# ---------------------------------------------------------------------------- builder


def test_builder_names_shapes_and_dtypes() -> None:
    b = ProgramBuilder()
    x = b.input("x", (3, 4), "float16")
    assert b.op("relu", x).buffer == "relu" and b.op("relu", x).buffer == "relu_1"
    assert b.op("relu", x, name="x").buffer == "x_1"
    assert b.op("add", x, TensorSpec.dense("x", (4,), "float16")).shape == (3, 4)
    assert b.op("sum", x, dims=(0,)).shape == (4,) and b.op("sum", x, dims=(0,), shape=(1, 4)).shape == (1, 4)
    assert b.op("mm", x, x.T).shape == (3, 3) and b.op("mm", x, x.T, dtype="float32").dtype == "float32"
    assert b.op("full", shape=(2, 5), value=1).dtype == "float32"
    assert b.op("neg", x).dtype == "float16"
    b.build([])


def test_builder_refuses_shapes_that_do_not_fit() -> None:
    b = ProgramBuilder()
    x = b.input("x", (3, 4))
    with pytest.raises(ProgramError, match="unknown op 'conv'"):
        b.op("conv", x)
    with pytest.raises(ProgramError, match="do not broadcast"):
        b.op("add", x, x.T)
    with pytest.raises(ProgramError, match="needs shapes"):
        b.op("mm", x, x)
    with pytest.raises(ProgramError, match="unknown attribute 'beta' of neg"):
        b.op("neg", x, beta=1)


@pytest.mark.parametrize("op", list(OPS))
def test_builder_refuses_every_wrong_number_of_operands(op: str) -> None:
    b = ProgramBuilder()
    x = b.input("x", (3, 3))
    required = {"compare": {"comparison": "lt"}, "full": {"value": 1}}.get(op, {})
    for count in {0, 1, 2, 3, 4} - set(OPS[op].num_inputs):
        with pytest.raises(ProgramError, match=f"(?s){op} takes .* operands, got {count}.*in operation 'z':  ?= {op}"):
            b.op(op, *[x] * count, name="z", **required)


def test_builder_refuses_attributes_before_shapes() -> None:
    b = ProgramBuilder()
    x = b.input("x", (3, 3))
    for dims in (5, "ab", (None,), (7,), (10**5000,)):
        with pytest.raises(ProgramError, match="dim"):
            b.op("sum", x, dims=dims)


def test_builder_takes_the_dtype_of_values() -> None:
    b = ProgramBuilder()
    mask, steps = b.input("mask", (3,), "bool"), b.scalar("steps", "int32")
    x = b.input("x", (3,), "float16")
    assert b.op("where", mask, 1.0, x).dtype == "float16"
    assert b.op("where", mask, 1.0, 0.0).dtype == "float32" and b.op("where", x, mask, mask).dtype == "bool"
    assert b.op("mul", mask, x).dtype == "float16" and b.op("mul", mask, 0.5).dtype == "float32"
    assert b.op("relu", mask).dtype == "bool" and b.op("mul", steps, 2).dtype == "int32"
    b.build([])


def test_builder_refuses_what_is_no_sequence() -> None:
    b = ProgramBuilder()
    with pytest.raises(ProgramError, match="input 'x': shape must be a tuple of ints, got 4"):
        b.input("x", 4)  # type: ignore[arg-type]
    x = b.input("x", (4,))
    with pytest.raises(ProgramError, match=r"op 'full': shape must be a tuple of ints, got 4"):
        b.op("full", shape=4, value=1)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match=r"build\(\[output\]\)"):
        b.build(x)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="length must be an int or an int32 scalar of this builder, got 'n'"):
        b.loop(b.build([x]), [x], num_carry=1, length="n")  # type: ignore[arg-type]


def test_builder_dynamic_length() -> None:
    body = ProgramBuilder()
    c = body.input("c", (2,))
    step = body.build([body.op("neg", c, name="n"), c])
    b = ProgramBuilder()
    start, steps = b.input("start", (2,)), b.scalar("steps", "int32")
    final, history = b.loop(step, [start], num_carry=1, length=steps, room=7)
    assert history.shape == (7, 2) and final.shape == (2,)
    loop = b.build([final, history]).operations[0]
    assert isinstance(loop, Loop) and loop.length == "steps"
