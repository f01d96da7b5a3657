"""Program to JSON and back."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkernel import Loop, Operation, Program, ProgramBuilder, ProgramError, ScalarSpec, TensorSpec, validate
from trainkernel.mlp import mlp_step
from trainkernel.serialization import FORMAT, VERSION, program_from_json, program_to_json


def loop_program(length: str | int = "count") -> Program:
    inner = ProgramBuilder()
    scale = inner.scalar("scale")
    state = inner.input("state", (3,))
    row = inner.input("row", (3,))
    next_state = inner.op("add", inner.op("mul", state, scale), row)
    twice_builder = ProgramBuilder()
    value = twice_builder.input("value", (3,))
    twice = twice_builder.build([twice_builder.op("mul", value, 2)])
    (doubled,) = inner.loop(twice, [next_state], num_carry=1, length=2, name="twice")
    body = inner.build([doubled, next_state])
    b = ProgramBuilder()
    count = b.scalar("count", "int32")
    factor = b.scalar("factor")
    start = b.input("start", (3,))
    rows = b.input("rows", (5, 3))
    outputs = b.loop(
        body,
        [factor, start, rows],
        num_carry=1,
        num_xs=1,
        length=count if length == "count" else 5,
        room=5,
        reverse=True,
    )
    return b.build(outputs)


PROGRAMS = {
    "mlp": mlp_step((4, 5, 3), 2, loss="cross_entropy", optimizer="adamw", dtype="bfloat16").program,
    "loop": loop_program(),
    "constant loop": loop_program(5),
    "empty": Program((), (), ()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_round_trip(name: str) -> None:
    program = PROGRAMS[name]
    text = program_to_json(program)
    again = program_from_json(text)
    assert again == program
    assert str(again) == str(program)
    assert program_to_json(again) == text
    validate(again)
    assert Program.from_json(program.to_json()) == program
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def one_operation(operands: tuple[Any, ...] = (), attrs: dict[str, Any] | None = None) -> Program:
    output = TensorSpec.dense("y", (2,))
    return Program((), (Operation("name", "op", operands, output, attrs or {}, "file.py:3"),), (output,))


def types_of(value: Any) -> Any:
    """The value with the types that ``==`` does not see: int or float, list or tuple, sign of zero."""
    if isinstance(value, (list, tuple)):
        return (type(value), [types_of(entry) for entry in value])
    if isinstance(value, dict):
        return (dict, {key: types_of(entry) for key, entry in value.items()})
    return (type(value), repr(value))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.lists(st.integers() | st.floats(), max_size=3))
def test_any_attributes_and_numbers_come_back(attrs: dict[str, Any], operands: list[Any]) -> None:
    text = program_to_json(one_operation(tuple(operands), attrs))
    (operation,) = program_from_json(text).operations
    assert isinstance(operation, Operation)
    assert types_of(dict(operation.attrs)) == types_of(attrs)
    assert types_of(list(operation.inputs)) == types_of(operands)
    assert operation.location == "file.py:3"
    assert program_to_json(program_from_json(text)) == text


def test_special_numbers_keep_their_kind() -> None:
    attrs = {"a": -0.0, "b": 1, "c": 1.0, "d": True, "e": math.inf, "f": -math.inf, "g": (1, [2, (3.0,)]), "h": None}
    program = one_operation((-0.0, 10**400, -(10**5000), 5e-324), attrs)
    again = program_from_json(program_to_json(program))
    assert again == program
    assert types_of(dict(again.operations[0].attrs)) == types_of(attrs)  # type: ignore[union-attr]
    assert math.copysign(1, again.operations[0].inputs[0]) == -1  # type: ignore[arg-type]


def test_nan_is_read_as_one_object_so_programs_compare_equal() -> None:
    program = one_operation((math.nan,), {"value": math.nan, "list": [math.nan]})
    assert program_from_json(program_to_json(program)) == program
    other = program_to_json(one_operation((float("nan"),), {"value": -float("nan")}))
    assert program_from_json(other) == program_from_json(other)


def test_attribute_order_does_not_change_the_text() -> None:
    assert program_to_json(one_operation((), {"a": 1, "b": 2})) == program_to_json(one_operation((), {"b": 2, "a": 1}))


def test_single_output_and_tuple_of_one_differ() -> None:
    spec = TensorSpec.dense("y", (2,))
    for output in (spec, (spec,), (spec, TensorSpec.dense("z", ()))):
        program = Program((), (Operation("n", "op", (), output),), ())
        again = program_from_json(program_to_json(program))
        assert again == program
        assert again.operations[0].output == output  # type: ignore[union-attr]


def test_broken_programs_can_be_written_and_read() -> None:
    # A report needs the program that was refused.
    bad = Program((TensorSpec("1 bad", (-1,), (), 3, "float99"),), (), (TensorSpec.dense("missing", (2,)),))
    assert program_from_json(program_to_json(bad)) == bad
    with pytest.raises(ProgramError):
        validate(bad)


@pytest.mark.parametrize(
    ("program", "where"),
    [
        ("text", "expected a Program"),
        (one_operation((object(),)), r"program.operations\[0\].inputs\[0\]: a object"),
        (one_operation((), {"a": (1, {2})}), r"attrs\['a'\]\[1\]: a set"),
        (one_operation((), {1: 2}), "attrs: a int"),
        (Program(("x",), (), ()), r"program.inputs\[0\]: a str"),  # type: ignore[arg-type]
        (Program((), (7,), ()), r"program.operations\[0\]: a int"),  # type: ignore[arg-type]
        (Program((TensorSpec("x", (2.0,), (1,)),), (), ()), r"inputs\[0\].shape: a float"),  # type: ignore[arg-type]
        (Program((ScalarSpec(3),), (), ()), r"inputs\[0\]: a int"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_text_is_refused(program: Any, where: str) -> None:
    with pytest.raises(ProgramError, match=where):
        program_to_json(program)


def nested(depth: int) -> Program:
    program = Program((), (), ())
    for _ in range(depth):
        program = Program((), (Loop("loop", program, (), (), 0, 0, 1),), ())
    return program


def test_nesting_has_a_limit() -> None:
    assert program_from_json(program_to_json(nested(50))) == nested(50)
    with pytest.raises(ProgramError, match="nested more than 50 deep"):
        program_to_json(nested(51))
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    with pytest.raises(ProgramError, match="nested more than 50 deep"):
        program_to_json(one_operation((), {"a": deep}))


HEAD = f'{{"format": "{FORMAT}", "version": {VERSION}, '
SPEC = '{"buffer": "x", "shape": [2], "strides": [1], "offset": 0, "dtype": "float32"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "the top must be an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": "other"}', "the top must be"),
        (f'{{"format": "{FORMAT}", "version": {VERSION + 1}}}', f"format version {VERSION + 1}"),
        (f'{{"format": "{FORMAT}", "version": true}}', "positive integer"),
        (f'{{"format": "{FORMAT}", "version": 0}}', "positive integer"),
        (f'{{"format": "{FORMAT}", "version": {"9" * 5000}}}', "not the JSON text"),
        (HEAD + '"inputs": []}', "missing operations, outputs"),
        (HEAD + '"inputs": [], "operations": [], "outputs": [], "more": 1}', "unknown 'more'"),
        (HEAD + '"inputs": [], "inputs": [], "operations": [], "outputs": []}', "a key twice"),
        (HEAD + '"inputs": {}, "operations": [], "outputs": []}', "program.inputs: needs a list"),
        (HEAD + '"inputs": [NaN], "operations": [], "outputs": []}', "NaN is not JSON"),
        (HEAD + '"inputs": [1e999], "operations": [], "outputs": []}', "out of float's range"),
        (HEAD + '"inputs": [3], "operations": [], "outputs": []}', r"program.inputs\[0\]: needs an object"),
        (
            HEAD + f'"inputs": [{SPEC.replace("[2]", "[true]")}], "operations": [], "outputs": []}}',
            r"inputs\[0\].shape\[0\]: needs an integer, got True",
        ),
        (
            HEAD + f'"inputs": [{SPEC.replace("[2]", "[2.0]")}], "operations": [], "outputs": []}}',
            "needs an integer, got 2.0",
        ),
        (
            HEAD + f'"inputs": [{SPEC.replace("0,", "{{}},".format())}], "operations": [], "outputs": []}}',
            "offset: needs an integer",
        ),
        (HEAD + '"inputs": [], "operations": [{"op": "mm"}], "outputs": []}', r"operations\[0\]: missing name"),
        (HEAD + '"inputs": [], "operations": [{"loop": "l"}], "outputs": []}', r"operations\[0\]: missing length"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        program_from_json(text)


@pytest.mark.parametrize("text", [None, b"{}", 3])
def test_only_text_is_read(text: Any) -> None:
    with pytest.raises(ProgramError, match="as str"):
        program_from_json(text)


@pytest.mark.parametrize(
    "value",
    [
        '{"float": "1.0"}',
        '{"float": "NaN"}',
        '{"int": "12"}',
        '{"int": 3}',
        '{"tuple": 3}',
        '{"map": []}',
        '{"tuple": [], "map": {}}',
        "{}",
        '{"set": []}',
    ],
)
def test_values_of_unknown_kind_are_refused(value: str) -> None:
    operation = f'{{"name": "n", "op": "o", "inputs": [], "output": [], "attrs": {{"a": {value}}}}}'
    with pytest.raises(ProgramError, match=r"operations\[0\].attrs\['a'\]"):
        program_from_json(HEAD + f'"inputs": [], "operations": [{operation}], "outputs": []}}')


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["buffer", "shape", "loop", "scalar", "op", "int", "float", "body"]), inner)
    ),
    max_leaves=10,
)


@given(st.data())
def test_a_damaged_document_is_a_program_error_or_a_program(data: st.DataObject) -> None:
    document = json.loads(program_to_json(PROGRAMS[data.draw(st.sampled_from(sorted(PROGRAMS)))]))
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
            place[key] = data.draw(JSON)
            break
        place = place[key]
    try:
        program = program_from_json(json.dumps(document))
    except ProgramError:
        return
    assert isinstance(program, Program)


@given(st.integers(0, 2000), st.text(max_size=3))
def test_damaged_text_is_a_program_error_or_a_program(position: int, insertion: str) -> None:
    text = program_to_json(PROGRAMS["loop"])
    with contextlib.suppress(ProgramError):
        program_from_json(text[:position] + insertion + text[position + 1 :])
