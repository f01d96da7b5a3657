"""Programs as versioned JSON text.

One line per input, item and output, so that two versions of a program can be compared as text.
What JSON cannot say is an object with one key: ``{"tuple": [...]}``, ``{"map": {...}}``,
``{"float": "nan" | "inf" | "-inf"}`` and, from 2**53 on, ``{"int": "0x..."}``. Equal Programs give
the same text (source locations aside), and the text gives an equal Program back. NaN equals
nothing, not even itself, so every NaN is read as the one object ``math.nan``: a program written
with ``math.nan`` compares equal after the trip.

Reading checks the structure and types alone; the rules of the language are ``validate``'s, so
that a program which breaks one can still be attached to a report.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from trainkernel.errors import ProgramError
from trainkernel.ir import InputSpec, Item, Loop, Operand, Operation, Program, ScalarSpec, TensorSpec

FORMAT = "trainkernel.program"
VERSION = 1

# Deeper nesting of loops or of attribute values than this is refused in both directions; it
# stays far from Python's own recursion limit.
_MAX_DEPTH = 50
_SAFE_INT = 2**53
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_HEX = re.compile(r"-?0x[0-9a-f]+")

_T = TypeVar("_T")


def program_to_json(program: Program) -> str:
    """The text of a Program.

    Raises
    ------
    ProgramError
        If it is not a Program, or holds a value that has no text (say where).
    """
    if not isinstance(program, Program):
        raise ProgramError(f"expected a Program to write as JSON, got {type(program).__name__}")
    document = _write_program(program, "program", 0)
    parts = [f'"format": {json.dumps(FORMAT)}', f'"version": {VERSION}']
    for key in ("inputs", "operations", "outputs"):
        lines = ",\n".join("  " + json.dumps(entry) for entry in document[key])
        parts.append(f'"{key}": [\n{lines}\n]' if lines else f'"{key}": []')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def program_from_json(text: str) -> Program:
    """The Program that ``program_to_json`` wrote.

    Raises
    ------
    ProgramError
        If the text is not such a Program, or is of a newer format version.
    """
    if not isinstance(text, str):
        raise ProgramError(f"expected the JSON text of a Program as str, got {type(text).__name__}")
    try:
        document = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except ProgramError:
        raise
    except RecursionError:
        raise ProgramError("not the JSON text of a Program: nested too deeply") from None
    except ValueError as error:  # malformed JSON, or a decimal integer too long for Python
        raise ProgramError(f"not the JSON text of a Program: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProgramError(f'not the JSON text of a Program: the top must be an object with "format": "{FORMAT}"')
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ProgramError(f"the format version must be a positive integer, got {_shown(version)}")
    if version > VERSION:
        raise ProgramError(
            f"the program has format version {version}, this trainkernel reads up to {VERSION}; "
            "use a newer trainkernel, or write it again with this one"
        )
    fields = _fields(document, "program", ("format", "version", "inputs", "operations", "outputs"))
    return _read_program(fields, "program", 0)


# ---------------------------------------------------------------------------- writing


def _write_program(program: Program, where: str, depth: int) -> dict[str, Any]:
    if not isinstance(program, Program):
        raise _unwritable(program, where)
    if depth > _MAX_DEPTH:
        raise ProgramError(f"{where}: loops are nested more than {_MAX_DEPTH} deep")
    return {
        "inputs": [_write_input(spec, f"{where}.inputs[{i}]") for i, spec in enumerate(program.inputs)],
        "operations": [
            _write_item(item, f"{where}.operations[{i}]", depth) for i, item in enumerate(program.operations)
        ],
        "outputs": [_write_spec(spec, f"{where}.outputs[{i}]") for i, spec in enumerate(program.outputs)],
    }


def _write_input(spec: InputSpec, where: str) -> dict[str, Any]:
    if isinstance(spec, ScalarSpec):
        return {"scalar": _write_str(spec.buffer, where), "dtype": _write_str(spec.dtype, where)}
    return _write_spec(spec, where)


def _write_spec(spec: object, where: str) -> dict[str, Any]:
    if not isinstance(spec, TensorSpec):
        raise _unwritable(spec, where)
    return {
        "buffer": _write_str(spec.buffer, where),
        "shape": [_write_int(size, f"{where}.shape") for size in spec.shape],
        "strides": [_write_int(stride, f"{where}.strides") for stride in spec.strides],
        "offset": _write_int(spec.offset, f"{where}.offset"),
        "dtype": _write_str(spec.dtype, where),
    }


def _write_specs(specs: Sequence[object], where: str) -> list[dict[str, Any]]:
    return [_write_spec(spec, f"{where}[{i}]") for i, spec in enumerate(specs)]


def _write_item(item: Item, where: str, depth: int) -> dict[str, Any]:
    written: dict[str, Any]
    if isinstance(item, Operation):
        outputs = item.output
        written = {
            "name": _write_str(item.name, f"{where}.name"),
            "op": _write_str(item.op, f"{where}.op"),
            "inputs": [_write_operand(operand, f"{where}.inputs[{i}]") for i, operand in enumerate(item.inputs)],
            "output": _write_specs(outputs, f"{where}.output")
            if isinstance(outputs, tuple)
            else _write_spec(outputs, f"{where}.output"),
            "attrs": _write_map(item.attrs, f"{where}.attrs", 0),
        }
    elif isinstance(item, Loop):
        length = item.length
        written = {
            "loop": _write_str(item.name, f"{where}.loop"),
            "length": length if isinstance(length, str) else _write_int(length, f"{where}.length"),
            "reverse": _write_bool(item.reverse, f"{where}.reverse"),
            "num_carry": _write_int(item.num_carry, f"{where}.num_carry"),
            "num_xs": _write_int(item.num_xs, f"{where}.num_xs"),
            "inputs": _write_specs(item.inputs, f"{where}.inputs"),
            "outputs": _write_specs(item.outputs, f"{where}.outputs"),
            "body": _write_program(item.body, f"{where}.body", depth + 1),
        }
    else:
        raise _unwritable(item, where)
    if item.location is not None:
        written["location"] = _write_str(item.location, f"{where}.location")
    return written


def _write_operand(operand: Operand, where: str) -> Any:
    return _write_spec(operand, where) if isinstance(operand, TensorSpec) else _write_value(operand, where, 0)


def _write_value(value: object, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ProgramError(f"{where}: values are nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return _write_int(value, where)
    if isinstance(value, float):
        return _write_float(float(value))
    if isinstance(value, tuple):
        return {"tuple": [_write_value(entry, f"{where}[{i}]", depth + 1) for i, entry in enumerate(value)]}
    if isinstance(value, list):
        return [_write_value(entry, f"{where}[{i}]", depth + 1) for i, entry in enumerate(value)]
    if isinstance(value, Mapping):
        return {"map": _write_map(value, where, depth)}
    raise _unwritable(value, where)


def _write_map(value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
    for key in value:
        _write_str(key, where)
    # Sorted, because mappings that differ in order alone are equal.
    return {key: _write_value(value[key], f"{where}[{key!r}]", depth + 1) for key in sorted(value)}


def _write_float(value: float) -> Any:
    if math.isnan(value):
        return {"float": "nan"}
    if math.isinf(value):
        return {"float": "inf" if value > 0 else "-inf"}
    return value


def _write_int(value: object, where: str) -> Any:
    if not _is_int(value):
        raise _unwritable(value, where)
    assert isinstance(value, int)
    return int(value) if -_SAFE_INT < value < _SAFE_INT else {"int": hex(value)}


def _write_str(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _unwritable(value, where)
    return value


def _write_bool(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _unwritable(value, where)
    return value


def _unwritable(value: object, where: str) -> ProgramError:
    return ProgramError(f"{where}: a {type(value).__name__} cannot be written in a Program's JSON")


# ---------------------------------------------------------------------------- JSON's own corners


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ProgramError(f"an object has a key twice: {', '.join(_shown(key) for key, _ in pairs[:8])}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ProgramError(f'{name} is not JSON; a non-finite number is written {{"float": "nan"}}')


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ProgramError(f"the number {text[:40]} is out of float's range")
    return value


# ---------------------------------------------------------------------------- reading


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A short text of a JSON value for a message, whatever its size."""
    if _is_int(value) and not -_SAFE_INT < value < _SAFE_INT:  # type: ignore[operator]
        return "a huge integer"
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(value: object, needed: str, where: str) -> ProgramError:
    return ProgramError(f"{where}: needs {needed}, got {_shown(value)}")


def _fields(value: object, where: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(value, f"an object with {', '.join(required)}", where)
    missing = [key for key in required if key not in value]
    unknown = [key for key in value if key not in required and key not in optional]
    if missing:
        raise ProgramError(f"{where}: missing {', '.join(missing)}")
    if unknown:
        raise ProgramError(f"{where}: unknown {', '.join(_shown(key) for key in unknown[:8])}")
    return value


def _list(value: object, where: str, read: Callable[[Any, str], _T]) -> tuple[_T, ...]:
    if not isinstance(value, list):
        raise _wrong(value, "a list", where)
    return tuple(read(entry, f"{where}[{i}]") for i, entry in enumerate(value))


def _read_program(value: object, where: str, depth: int) -> Program:
    if depth > _MAX_DEPTH:
        raise ProgramError(f"{where}: loops are nested more than {_MAX_DEPTH} deep")
    fields = _fields(value, where, ("inputs", "operations", "outputs"), ("format", "version"))
    return Program(
        _list(fields["inputs"], f"{where}.inputs", _read_input),
        _list(fields["operations"], f"{where}.operations", lambda entry, place: _read_item(entry, place, depth)),
        _list(fields["outputs"], f"{where}.outputs", _read_spec),
    )


def _read_input(value: object, where: str) -> InputSpec:
    if isinstance(value, dict) and "scalar" in value:
        fields = _fields(value, where, ("scalar", "dtype"))
        return ScalarSpec(_read_str(fields["scalar"], f"{where}.scalar"), _read_str(fields["dtype"], f"{where}.dtype"))
    return _read_spec(value, where)


def _read_spec(value: object, where: str) -> TensorSpec:
    fields = _fields(value, where, ("buffer", "shape", "strides", "offset", "dtype"))
    return TensorSpec(
        _read_str(fields["buffer"], f"{where}.buffer"),
        _list(fields["shape"], f"{where}.shape", _read_int),
        _list(fields["strides"], f"{where}.strides", _read_int),
        _read_int(fields["offset"], f"{where}.offset"),
        _read_str(fields["dtype"], f"{where}.dtype"),
    )


def _read_item(value: object, where: str, depth: int) -> Item:
    if isinstance(value, dict) and "loop" in value:
        return _read_loop(value, where, depth)
    fields = _fields(value, where, ("name", "op", "inputs", "output", "attrs"), ("location",))
    output = fields["output"]
    attrs = fields["attrs"]
    if not isinstance(attrs, dict):
        raise _wrong(attrs, "an object", f"{where}.attrs")
    return Operation(
        _read_str(fields["name"], f"{where}.name"),
        _read_str(fields["op"], f"{where}.op"),
        _list(fields["inputs"], f"{where}.inputs", _read_operand),
        _list(output, f"{where}.output", _read_spec)
        if isinstance(output, list)
        else _read_spec(output, f"{where}.output"),
        {key: _read_value(entry, f"{where}.attrs[{_shown(key)}]", 0) for key, entry in attrs.items()},
        _read_location(fields, where),
    )


def _read_loop(value: dict[str, Any], where: str, depth: int) -> Loop:
    required = ("loop", "length", "reverse", "num_carry", "num_xs", "inputs", "outputs", "body")
    fields = _fields(value, where, required, ("location",))
    length, reverse = fields["length"], fields["reverse"]
    if not isinstance(reverse, bool):
        raise _wrong(reverse, "true or false", f"{where}.reverse")
    num_carry, num_xs = (_read_int(fields[key], f"{where}.{key}") for key in ("num_carry", "num_xs"))
    return Loop(
        _read_str(fields["loop"], f"{where}.loop"),
        _read_program(fields["body"], f"{where}.body", depth + 1),
        _list(fields["inputs"], f"{where}.inputs", _read_spec),
        _list(fields["outputs"], f"{where}.outputs", _read_spec),
        num_carry,
        num_xs,
        length if isinstance(length, str) else _read_int(length, f"{where}.length"),
        reverse,
        _read_location(fields, where),
    )


def _read_location(fields: Mapping[str, Any], where: str) -> str | None:
    return _read_str(fields["location"], f"{where}.location") if "location" in fields else None


def _read_operand(value: object, where: str) -> Operand:
    if isinstance(value, dict) and "buffer" in value:
        return _read_spec(value, where)
    operand = _read_value(value, where, 0)
    # Whatever was written can be read, wrong operands included; validate refuses them.
    return operand  # type: ignore[no-any-return]


def _read_value(value: object, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ProgramError(f"{where}: values are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_read_value(entry, f"{where}[{i}]", depth + 1) for i, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ProgramError(f"{where}: needs a value or an object with one of tuple, map, float, int")
    ((kind, content),) = value.items()
    if kind == "tuple" and isinstance(content, list):
        return tuple(_read_value(entry, f"{where}[{i}]", depth + 1) for i, entry in enumerate(content))
    if kind == "map" and isinstance(content, dict):
        return {key: _read_value(entry, f"{where}[{_shown(key)}]", depth + 1) for key, entry in content.items()}
    if kind == "float" and isinstance(content, str) and content in _NON_FINITE:
        return _NON_FINITE[content]
    if kind == "int":
        return _read_int(value, where)
    raise ProgramError(f"{where}: {_shown(kind)} with {_shown(content)} is no value of this format")


def _read_int(value: object, where: str) -> int:
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get("int"), str):
        text = value["int"]
        if not _HEX.fullmatch(text):
            raise _wrong(text, "a hexadecimal integer such as 0x1f", where)
        return int(text, 16)
    if not _is_int(value):
        raise _wrong(value, "an integer", where)
    assert isinstance(value, int)
    return value


def _read_str(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, "a string", where)
    return value
