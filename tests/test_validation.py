"""Every refusal of the language: a ProgramError that says what is wrong and prints the operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trainkernel.errors import ProgramError, TrainkernelError
from trainkernel.ir import Item, Loop, Operation, Program, ScalarSpec, TensorSpec, validate

X = TensorSpec.dense("x", (3, 4))
W = TensorSpec.dense("w", (4, 5))
HALF = TensorSpec.dense("half", (3, 4), "float16")
STRIDED = TensorSpec("strided", (3, 4), (8, 2), 5)
INPUTS = (X, W, HALF, STRIDED, ScalarSpec("rate"), ScalarSpec("steps", "int32"))


def dense(*shape: int, dtype: str = "float32", buffer: str = "y") -> TensorSpec:
    return TensorSpec.dense(buffer, shape, dtype)


def operation(op: Any, inputs: Sequence[Any], output: Any, name: Any = "culprit", **attrs: Any) -> Operation:
    return Operation(name, op, tuple(inputs), output, attrs)


def view(
    shape: Sequence[Any], strides: Sequence[Any], offset: Any = 0, buffer: Any = "x", dtype: Any = "float32"
) -> Any:
    return TensorSpec(buffer, tuple(shape), tuple(strides), offset, dtype)


OPERATIONS: dict[str, tuple[Operation, str]] = {
    "unknown op": (operation("conv", [X], dense(3, 4)), "unknown op 'conv'"),
    "op not a string": (operation(["add"], [X, X], dense(3, 4)), "unknown op"),
    "name not a string": (operation("neg", [X], dense(3, 4), name=7), "name must be a string"),
    "unknown attribute": (operation("add", [X, X], dense(3, 4), beta=2), "unknown attribute 'beta' of add"),
    "attribute of none": (operation("relu", [X], dense(3, 4), alpha=2), "unknown attribute 'alpha' of relu"),
    "attribute value": (operation("add", [X, X], dense(3, 4), alpha="2"), "must be a Python int or float"),
    "attribute bool": (operation("add", [X, X], dense(3, 4), alpha=True), "must be a Python int or float"),
    "attribute array": (operation("full", [], dense(2), value=np.ones(1)), "must be a Python int or float"),
    "attribute missing": (operation("full", [], dense(2)), "needs the attribute 'value'"),
    "comparison missing": (operation("compare", [X, X], dense(3, 4)), "needs the attribute 'comparison'"),
    "comparison unknown": (operation("compare", [X, X], dense(3, 4), comparison="<"), "must be one of lt"),
    "comparison list": (operation("compare", [X, X], dense(3, 4), comparison=[]), "must be one of lt"),
    "dims not a tuple": (operation("sum", [X], dense(3), dims=1), "must be None or a tuple of ints"),
    "dims of floats": (operation("sum", [X], dense(3), dims=(1.0,)), "must be None or a tuple of ints"),
    "dims of bools": (operation("sum", [X], dense(3), dims=(True,)), "must be None or a tuple of ints"),
    "too few operands": (operation("add", [X], dense(3, 4)), "add takes 2 operands, got 1"),
    "too many operands": (operation("pow", [X, 2, 3], dense(3, 4)), "pow takes 1 or 2 operands, got 3"),
    "no operands": (operation("mm", [], dense(3, 5)), "mm takes 2 operands, got 0"),
    "full with operands": (operation("full", [X], dense(3, 4), value=1), "full takes 0 operands, got 1"),
    "scalar into a reduction": (operation("sum", [2.0], dense()), "must be a tensor, got 2.0"),
    "scalar into a product": (operation("mm", [X, 2], dense(3, 5)), "must be a tensor, got 2"),
    "bool operand": (operation("add", [X, True], dense(3, 4)), "must be a TensorSpec, an int or a float, got True"),
    "complex operand": (operation("mul", [X, 1j], dense(3, 4)), "must be a TensorSpec, an int or a float"),
    "string operand": (operation("mul", ["x", X], dense(3, 4)), "must be a TensorSpec, an int or a float, got 'x'"),
    "None operand": (operation("mul", [None, X], dense(3, 4)), "must be a TensorSpec, an int or a float, got None"),
    "array operand": (operation("mul", [X, np.float32(2)], dense(3, 4)), "must be a TensorSpec, an int or a float"),
    "tensor exponent": (operation("pow", [X, X], dense(3, 4)), "exponent of pow must be"),
    "two exponents": (operation("pow", [X, 2], dense(3, 4), exponent=3), "not from both"),
    "negative size": (operation("neg", [view((-3, 4), (4, 1))], dense(3, 4)), "shape must hold ints >= 0, got -3"),
    "negative stride": (operation("neg", [view((3, 4), (-4, 1), 8)], dense(3, 4)), "strides must hold ints >= 0"),
    "negative offset": (operation("neg", [view((3,), (1,), -1)], dense(3)), "offset must hold ints >= 0, got -1"),
    "float size": (operation("neg", [view((3.0,), (1,))], dense(3)), "shape must hold ints >= 0, got 3.0"),
    "bool size": (operation("neg", [view((True,), (1,))], dense(1)), "shape must hold ints >= 0, got True"),
    "rank": (operation("neg", [view((3, 4), (4,))], dense(3, 4)), "rank 2 but there are 1 strides"),
    "output rank": (operation("neg", [X], view((3, 4), (4,), buffer="y")), "rank 2 but there are 1 strides"),
    "beyond its buffer": (operation("neg", [view((3, 4), (4, 1), 1)], dense(3, 4)), "reaches elements 1..12"),
    "stride beyond": (operation("neg", [view((3, 4), (5, 1))], dense(3, 4)), "outside its buffer, which spans 0..11"),
    "before its buffer": (
        operation("neg", [view((3,), (1,), 4, buffer="strided")], dense(3)),
        "outside its buffer, which spans 5..27",
    ),
    "operand dtype": (operation("neg", [view((3,), (1,), dtype="float16")], dense(3)), "not that of its buffer"),
    "unknown dtype": (operation("neg", [view((3,), (1,), dtype="float8")], dense(3)), "unknown dtype 'float8'"),
    "dtype not a string": (operation("neg", [view((3,), (1,), dtype=["f"])], dense(3)), "unknown dtype"),
    "output dtype": (operation("neg", [X], dense(3, 4, dtype="complex64")), "unknown dtype 'complex64'"),
    "view": (operation("transpose", [X], dense(4, 3), dims=(1, 0)), "the view"),
    "bits of floats": (operation("bitwise_and", [X, X], dense(3, 4)), "must be integers or bools"),
    "unknown buffer": (operation("neg", [dense(3, buffer="z")], dense(3)), "reads buffer 'z' before it is written"),
    "reads itself": (operation("neg", [dense(3)], dense(3)), "reads buffer 'y' before it is written"),
    "writes an input": (operation("neg", [X], dense(3, 4, buffer="x")), "writes the input 'x'"),
    "writes a scalar": (operation("sum", [X], dense(buffer="rate")), "writes the input 'rate'"),
    "broadcast": (operation("add", [X, W], dense(3, 4)), "do not broadcast"),
    "broadcast to output": (operation("neg", [X], dense(4, 3)), "output shape [4, 3] does not fit"),
    "smaller output": (operation("neg", [X], dense(4)), "output shape [4] does not fit"),
    "output of size 1": (operation("neg", [X], dense(1, 1)), "output shape [1, 1] does not fit"),
    "product ranks": (operation("mm", [view((4,), (1,)), W], dense(5)), "needs shapes [m,k] and [k,n]"),
    "product depths": (operation("mm", [W, X], dense(4, 4)), "needs shapes [m,k] and [k,n], got [4, 5] and [3, 4]"),
    "product output": (operation("mm", [X, W], dense(5, 3)), "does not fit; mm gives [3, 5]"),
    "product broadcast output": (operation("mm", [X, W], dense(2, 3, 5)), "does not fit; mm gives [3, 5]"),
    "bias": (operation("addmm", [X, X, W], dense(3, 5)), "bias of shape [3, 4] does not broadcast to [3, 5]"),
    "larger bias": (operation("addmm", [view((2, 3, 5), (0, 0, 1)), X, W], dense(3, 5)), "does not broadcast"),
    "axis": (operation("sum", [X], dense(3), dims=(2,)), "reduction dim 2 is out of range for shape [3, 4]"),
    "negative axis": (operation("mean", [X], dense(3), dims=(-3,)), "reduction dim -3 is out of range"),
    "axis of a scalar": (operation("sum", [view((), ())], dense(), dims=(0,)), "reduction dim 0 is out of range"),
    "axis twice": (operation("sum", [X], dense(3), dims=(1, -1)), "name a dim twice"),
    "reduction output": (operation("sum", [X], dense(4), dims=(1,)), "does not fit; sum gives [3]"),
    "reduction order": (operation("sum", [view((2, 3, 2), (6, 2, 1))], dense(3, 2), dims=(2,)), "does not fit"),
    "empty maximum": (
        operation("max", [view((0, 4), (4, 1))], dense(4), dims=(0,)),
        "maximum or minimum of no elements",
    ),
    "output strides": (operation("neg", [X], view((3, 4), (1, 3), buffer="y")), "row-major with offset 0"),
    "output gaps": (operation("neg", [X], view((3, 4), (8, 1), buffer="y")), "row-major with offset 0"),
    "output offset": (operation("neg", [X], view((3, 4), (4, 1), 2, buffer="y")), "row-major with offset 0"),
    "output broadcast": (operation("neg", [X], view((3, 4), (0, 1), buffer="y")), "row-major with offset 0"),
    "output not a spec": (operation("neg", [X], "y"), "must be a TensorSpec, got 'y'"),
    "no output": (operation("neg", [X], ()), "neg has 1 outputs, got 0"),
    "one of two outputs": (operation("softmax_stats", [X], dense(3), dims=(1,)), "softmax_stats has 2 outputs, got 1"),
    "same output twice": (operation("softmax_stats", [X], (dense(3), dense(3)), dims=(1,)), "name the same buffer"),
    "size of another type": (operation("neg", [view(("a",), (1,))], dense(3)), "shape must hold ints >= 0, got 'a'"),
    "size of None": (operation("neg", [X], view((None,), (1,), buffer="y")), "shape must hold ints >= 0, got None"),
    "huge size": (operation("neg", [view((10**5000,), (1,))], dense(3)), "shape must hold ints up to 2**60"),
    "huge negative size": (operation("neg", [view((-(10**5000),), (1,))], dense(3)), "shape must hold ints >= 0"),
    "huge stride": (operation("neg", [view((1,), (2**61,))], dense(3)), "strides must hold ints up to 2**60"),
    "huge axis": (operation("sum", [X], dense(3), dims=(10**5000,)), "out of range for shape [3, 4]"),
    "dims": (operation("neg", [X], dense(*[1] * 31, 3, 4)), "33 dims, a tensor has at most 32"),
    "attribute names": (operation("neg", [X], dense(3, 4), **{"1": 2}), "unknown attribute '1' of neg"),
    "huge": (operation("neg", [view((2**40, 2**40), (0, 0))], dense(3)), "more than 2**60 elements"),
}

BAD_NAMES = ["", "1x", "a b", "a-b", "a.b", "größe", "x\n", "a;b", "*/", '"', "x\u200b", "٣", None, 3, ("y",)]


@pytest.mark.parametrize("case", list(OPERATIONS))
def test_operation_refused(case: str) -> None:
    bad, message = OPERATIONS[case]
    with pytest.raises(ProgramError) as caught:
        validate(Program(INPUTS, (bad,), ()))
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TrainkernelError)
    text = str(caught.value)
    assert message in text
    assert f"in operation {bad.name!r}" in text and str(bad) in text


@pytest.mark.parametrize("name", BAD_NAMES)
def test_buffer_names(name: Any) -> None:
    spec = TensorSpec(name, (3,), (1,))
    with pytest.raises(ProgramError, match="must match"):
        validate(Program((spec,), (), ()))
    with pytest.raises(ProgramError, match="must match"):
        validate(Program((ScalarSpec(name),), (), ()))
    for bad in (operation("neg", [spec], dense(3)), operation("neg", [view((3,), (1,))], spec)):
        with pytest.raises(ProgramError, match="must match") as caught:
            validate(Program(INPUTS, (bad,), ()))
        assert "in operation 'culprit'" in str(caught.value)


@pytest.mark.parametrize("name", ["int", "float", "return", "_", "__global__", "X9_", "threadIdx", "p", "a" * 200])
def test_names_that_other_languages_reserve_are_fine(name: str) -> None:
    spec = TensorSpec.dense(name, (3,))
    validate(Program((spec,), (operation("neg", [spec], dense(3)),), (dense(3),)))


def test_a_very_long_name_is_refused() -> None:
    with pytest.raises(ProgramError, match="at most 200 characters"):
        validate(Program((TensorSpec.dense("a" * 201, (3,)),), (), ()))


@pytest.mark.parametrize("name", ["two\nlines", "*/ evil", 'quo"te', "größe", "", "\\", "\0"])
def test_operation_names_are_free_text(name: str) -> None:
    validate(Program((X,), (operation("neg", [X], dense(3, 4), name=name),), ()))


def test_written_twice() -> None:
    first = operation("neg", [X], dense(3, 4), name="first")
    with pytest.raises(ProgramError, match="'y' is written twice") as caught:
        validate(Program(INPUTS, (first, operation("relu", [X], dense(3, 4))), ()))
    assert "in operation 'culprit'" in str(caught.value) and "relu x" in str(caught.value)


def test_read_before_written_in_order() -> None:
    early = operation("neg", [dense(3, 4)], dense(3, 4, buffer="z"))
    late = operation("relu", [X], dense(3, 4), name="late")
    validate(Program((X,), (late, early), ()))
    with pytest.raises(ProgramError, match="reads buffer 'y' before it is written"):
        validate(Program((X,), (early, late), ()))


PROGRAMS: dict[str, tuple[Any, str]] = {
    "not a program": ("x", "expected a Program, got str"),
    "item": (Program((X,), (X,), ()), "an item of a Program is an Operation or a Loop"),  # type: ignore[arg-type]
    "two inputs": (Program((X, dense(2, buffer="x")), (), ()), "two inputs are named 'x'"),
    "input and scalar": (Program((X, ScalarSpec("x")), (), ()), "two inputs are named 'x'"),
    "input kind": (Program((3,), (), ()), "must be a TensorSpec or ScalarSpec, got 3"),  # type: ignore[arg-type]
    "input dtype": (Program((dense(2, dtype="int7"),), (), ()), "unknown dtype 'int7'"),
    "half scalar": (Program((ScalarSpec("s", "float16"),), (), ()), "a scalar by value is float32 or int32"),
    "input rank": (Program((view((3,), ()),), (), ()), "rank 1 but there are 0 strides"),
    "input stride": (Program((view((3,), (-1,)),), (), ()), "strides must hold ints >= 0"),
    "output kind": (Program((X,), (), ("x",)), "must be a TensorSpec, got 'x'"),  # type: ignore[arg-type]
    "output buffer": (Program((X,), (), (dense(2),)), "reads the unknown buffer 'y'"),
    "output view": (Program((X,), (), (view((13,), (1,)),)), "reaches elements 0..12"),
    "output dtype": (Program((X,), (), (view((3,), (1,), dtype="f32"),)), "unknown dtype 'f32'"),
}


@pytest.mark.parametrize("case", list(PROGRAMS))
def test_program_refused(case: str) -> None:
    program, message = PROGRAMS[case]
    with pytest.raises(ProgramError) as caught:
        validate(program)
    assert message in str(caught.value)


def test_the_location_is_reported() -> None:
    bad = Operation("culprit", "conv", (X,), dense(3, 4), location="train.py:12")
    with pytest.raises(ProgramError, match=r"in operation 'culprit' at train\.py:12: y: f32\[3,4\] = conv x"):
        validate(Program((X,), (bad,), ()))


# ---------------------------------------------------------------------------- loops

C = TensorSpec.dense("c", (4,))
CARRY = TensorSpec.dense("carry", (4,))
ROW = TensorSpec.dense("row", (4,))
NEXT = TensorSpec.dense("next", (4,))
BODY = Program((C, CARRY, ROW), (operation("add", [CARRY, ROW], NEXT, name="inner"),), (NEXT, NEXT))
XS = TensorSpec.dense("xs", (6, 4))
OUTER = (C, TensorSpec.dense("start", (4,)), XS, ScalarSpec("steps", "int32"), ScalarSpec("rate"))
FINAL = TensorSpec.dense("final", (4,))
YS = TensorSpec.dense("ys", (6, 4))


def loop(**changes: Any) -> Loop:
    fields: dict[str, Any] = {
        "name": "recurrence",
        "body": BODY,
        "inputs": (C, OUTER[1], XS),
        "outputs": (FINAL, YS),
        "num_carry": 1,
        "num_xs": 1,
        "length": 6,
    }
    return Loop(**(fields | changes))


def strided_carry() -> Program:
    carry = TensorSpec("carry", (4,), (2,))
    return Program((C, carry, ROW), (operation("add", [carry, ROW], NEXT),), (NEXT, NEXT))


LOOPS: dict[str, tuple[Loop, str]] = {
    "length": (loop(length=5), "expected shape [5, 4]"),
    "negative length": (loop(length=-1), "length must be an int from 0 to"),
    "bool length": (loop(length=True), "length must be an int from 0 to"),
    "float length": (loop(length=6.0), "length must be an int from 0 to"),
    "huge length": (loop(length=2**31), "length must be an int from 0 to 2147483647"),
    "unknown length": (loop(length="n"), "must name an int32 scalar input"),
    "float scalar length": (loop(length="rate"), "must name an int32 scalar input"),
    "carry count": (loop(num_carry=2), "expected shape [4]"),
    "negative carry": (loop(num_carry=-1), "num_carry must be an int >= 0"),
    "bool xs": (loop(num_xs=True), "num_xs must be an int >= 0"),
    "too many": (loop(num_carry=2, num_xs=2), "fewer than num_carry + num_xs"),
    "operands": (loop(inputs=(C, OUTER[1])), "the body has 3 inputs, the loop 2 operands"),
    "outputs": (loop(outputs=(FINAL,)), "the body has 2 outputs, the loop 1"),
    "reverse": (loop(reverse=1), "reverse must be True or False"),
    "body": (loop(body=None), "the body must be a Program"),
    "broken body": (loop(body=Program((C, CARRY, ROW), (), (NEXT, NEXT))), "reads the unknown buffer 'next'"),
    "carry shape": (loop(inputs=(C, TensorSpec.dense("start", (2,)), XS)), "does not fit the body's input"),
    "operand kind": (loop(inputs=(C, 1.0, XS)), "must be a TensorSpec, got 1.0"),
    "operand unknown": (loop(inputs=(C, dense(4, buffer="q"), XS)), "reads buffer 'q' before it is written"),
    "output shape": (loop(outputs=(FINAL, TensorSpec.dense("ys", (4, 6)))), "expected shape [6, 4]"),
    "output dtype": (loop(outputs=(TensorSpec.dense("final", (4,), "float16"), YS)), "does not fit the body's output"),
    "output twice": (loop(outputs=(FINAL, TensorSpec.dense("final", (6, 4)))), "name the same buffer"),
    "output strides": (loop(outputs=(FINAL, TensorSpec("ys", (6, 4), (1, 6)))), "row-major with offset 0"),
    "output kind": (loop(outputs=("final", YS)), "must be a TensorSpec, got 'final'"),
    "carry strides": (loop(body=strided_carry()), "carry input must be row-major"),
    "writes an input": (loop(outputs=(FINAL, TensorSpec.dense("xs", (6, 4)))), "writes the input 'xs'"),
    "dynamic room": (
        loop(length="steps", outputs=(FINAL, TensorSpec.dense("ys", (7, 4)))),
        "stacked tensors have different leading dims",
    ),
}


@pytest.mark.parametrize("case", list(LOOPS))
def test_loop_refused(case: str) -> None:
    bad, message = LOOPS[case]
    with pytest.raises(ProgramError) as caught:
        validate(Program(OUTER, (bad,), ()))
    assert message in str(caught.value)
    assert "in operation 'recurrence'" in str(caught.value)


@pytest.mark.parametrize("name", [None, 5, ["recurrence"]])
def test_loop_names(name: Any) -> None:
    with pytest.raises(ProgramError, match="a loop's name must be a string"):
        validate(Program(OUTER, (loop(name=name),), ()))


def test_loops_that_are_fine() -> None:
    for good in (loop(), loop(reverse=True), loop(length="steps")):
        validate(Program(OUTER, (good,), (FINAL, YS)))


# ---------------------------------------------------------------------------- what is allowed

ALLOWED: dict[str, Operation] = {
    "scalar first": operation("sub", [1, X], dense(3, 4)),
    "scalars only": operation("add", [1, 2.5], dense(3, 4)),
    "non-finite scalars": operation("maximum", [X, -math.inf], dense(3, 4)),
    "nan": operation("full", [], dense(3, 4), value=math.nan),
    "huge int": operation("mul", [X, 10**60], dense(3, 4)),
    "int that Python does not print": operation("add", [X, 10**5000], dense(3, 4), alpha=-(10**5000)),
    "broadcast output": operation("neg", [view((4,), (1,))], dense(2, 3, 4)),
    "kept dims": operation("sum", [X], dense(3, 1), dims=(-1,)),
    "dropped dims": operation("sum", [X], dense(3), dims=(-1,)),
    "no dims": operation("sum", [X], dense(3, 4), dims=()),
    "dims list": operation("sum", [X], dense(4), dims=[0]),
    "all dims": operation("mean", [X], dense(1, 1)),
    "square view": operation("mm", [X, view((4, 3), (1, 4))], dense(3, 3)),
    "overlapping view": operation("neg", [view((3, 4), (1, 1))], dense(3, 4)),
    "stride-0 view": operation("neg", [view((9, 4), (0, 1))], dense(9, 4)),
    "empty view": operation("sum", [view((0, 4), (4, 1), 99)], dense(4), dims=(0,)),
    "size-1 stride": operation("neg", [view((1, 4), (999, 1))], dense(1, 4)),
    "output dtypes": operation("mm", [X, W], dense(3, 5, dtype="bool")),
    "mixed dtypes": operation("add", [HALF, X], dense(3, 4, dtype="bfloat16")),
    "column bias": operation("addmm", [view((3, 1), (4, 1)), X, W], dense(3, 5)),
    "scalar by value": operation("mul", [X, ScalarSpec("rate").spec], dense(3, 4)),
    "size-1 output strides": operation("sum", [X], view((1, 1), (7, 9), buffer="y")),
}


@pytest.mark.parametrize("case", list(ALLOWED))
def test_allowed(case: str) -> None:
    items: tuple[Item, ...] = (ALLOWED[case],)
    validate(Program(INPUTS, items, (ALLOWED[case].outputs[0],)))


def test_an_output_may_convert_but_an_operand_may_not() -> None:
    converted = TensorSpec("x", (3, 4), (4, 1), 0, "bfloat16")
    validate(Program((X,), (), (converted, X, X.T)))
    with pytest.raises(ProgramError, match="not that of its buffer"):
        validate(Program((X,), (operation("neg", [converted], dense(3, 4)),), ()))
