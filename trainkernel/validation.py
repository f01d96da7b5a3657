"""The rules of the language: ``validate_program`` refuses a Program that breaks one.

Each refusal is a ProgramError that says what was got, what is needed, and prints the operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from trainkernel.dtypes import DTYPES
from trainkernel.errors import ProgramError, show
from trainkernel.ir import MAX_LENGTH, InputSpec, Item, Loop, Operation, Program, ScalarSpec, TensorSpec
from trainkernel.ops import OPS, REQUIRED, Op, broadcasts_to, is_number, reduced_dims
from trainkernel.ops.domains import constant, domain_of_operand, operation_domain

_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*", re.ASCII)
_MAX_NAME_LENGTH = 200
_MAX_INDEX = 2**60  # elements; their bytes fit a signed 64-bit int
_MAX_DIMS = 32  # NumPy's own limit where it broadcasts


def validate_program(program: Program) -> None:
    """Check every rule of the language.

    Raises
    ------
    ProgramError
        At the first rule broken.
    """
    if not isinstance(program, Program):
        raise ProgramError(f"expected a Program, got {type(program).__name__}")
    declared = _check_inputs(program.inputs)
    input_names = set(declared)
    for item in program.operations:
        if isinstance(item, Loop):
            _check_loop(item, declared)
        elif isinstance(item, Operation):
            _check_operation(item, declared)
        else:
            raise ProgramError(f"an item of a Program is an Operation or a Loop, got {show(item)}")
        for spec in item.outputs:
            if spec.buffer in input_names:
                raise _fault(item, f"it writes the input {spec.buffer!r}; inputs are read-only")
            if spec.buffer in declared:
                raise _fault(item, f"buffer {spec.buffer!r} is written twice")
            declared[spec.buffer] = spec
    for position, spec in enumerate(program.outputs):
        where = f"program output {position}"
        if not isinstance(spec, TensorSpec):
            raise ProgramError(f"{where} must be a TensorSpec, got {show(spec)}")
        _check_spec(spec, where)
        if spec.buffer not in declared:
            raise ProgramError(f"{where} ({spec}) reads the unknown buffer {spec.buffer!r}")
        _check_inside(spec, declared[spec.buffer], where)


def _fault(item: Item, message: str) -> ProgramError:
    place = f" at {item.location}" if item.location else ""
    return ProgramError(f"{message}\n  in operation {show(item.name)}{place}: {item}")


# ---------------------------------------------------------------------------- specs


def _check_inputs(inputs: Iterable[InputSpec]) -> dict[str, TensorSpec]:
    declared: dict[str, TensorSpec] = {}
    for position, spec in enumerate(inputs):
        where = f"program input {position}"
        if isinstance(spec, ScalarSpec):
            if spec.dtype not in ("float32", "int32"):
                raise ProgramError(f"{where} ({spec}): a scalar by value is float32 or int32, not {show(spec.dtype)}")
            spec = spec.spec
            _check_name(spec.buffer, where)
        elif isinstance(spec, TensorSpec):
            _check_spec(spec, where)
        else:
            raise ProgramError(f"{where} must be a TensorSpec or ScalarSpec, got {show(spec)}")
        if spec.buffer in declared:
            raise ProgramError(f"{where}: two inputs are named {spec.buffer!r}")
        declared[spec.buffer] = spec
    return declared


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ProgramError(f"{where}: buffer name {show(name)} must match [A-Za-z_][A-Za-z_0-9]* in ASCII")
    if len(name) > _MAX_NAME_LENGTH:
        raise ProgramError(f"{where}: a buffer name has at most {_MAX_NAME_LENGTH} characters, got {len(name)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_spec(spec: TensorSpec, where: str) -> None:
    _check_name(spec.buffer, where)
    if not isinstance(spec.dtype, str) or spec.dtype not in DTYPES:
        raise ProgramError(f"{where} ({spec.buffer}): unknown dtype {show(spec.dtype)}; known: {', '.join(DTYPES)}")
    if len(spec.shape) != len(spec.strides):
        raise ProgramError(
            f"{where} ({spec.buffer}): shape has rank {len(spec.shape)} but there are {len(spec.strides)} strides"
        )
    for label, values in (("shape", spec.shape), ("strides", spec.strides), ("offset", (spec.offset,))):
        for value in values:
            if not _is_int(value) or value < 0:
                raise ProgramError(f"{where} ({spec.buffer}): {label} must hold ints >= 0, got {show(value)}")
            if value > _MAX_INDEX:
                raise ProgramError(f"{where} ({spec.buffer}): {label} must hold ints up to 2**60, got {show(value)}")
    if len(spec.shape) > _MAX_DIMS:
        raise ProgramError(f"{where} ({spec.buffer}): {len(spec.shape)} dims, a tensor has at most {_MAX_DIMS}")
    if spec.last_index >= _MAX_INDEX or prod(max(size, 1) for size in spec.shape) > _MAX_INDEX:
        raise ProgramError(f"{where} ({spec.buffer}): more than 2**60 elements")


def _check_inside(view: TensorSpec, buffer: TensorSpec, where: str) -> None:
    if view.dtype != buffer.dtype and not where.startswith("program output"):
        raise ProgramError(f"{where} ({view}): its dtype is not that of its buffer, {buffer.dtype}")
    if view.num_elements == 0:
        return
    first, last = buffer.offset, buffer.last_index
    if view.offset < first or view.last_index > last:
        raise ProgramError(
            f"{where} ({view}) reaches elements {view.offset}..{view.last_index}, "
            f"outside its buffer, which spans {first}..{last}"
        )


# ---------------------------------------------------------------------------- operations


def _check_operation(operation: Operation, declared: dict[str, TensorSpec]) -> None:
    op = OPS.get(operation.op) if isinstance(operation.op, str) else None
    if op is None:
        known = sorted(name for name, entry in OPS.items() if entry.kind != "view")
        raise _fault(operation, f"unknown op {show(operation.op)}; known: {', '.join(known)}")
    if op.kind == "view":
        raise _fault(operation, f"{op.name} is no operation of a Program: an operand's TensorSpec is the view")
    try:
        if not isinstance(operation.name, str):
            raise ProgramError(f"an operation's name must be a string, got {show(operation.name)}")
        check_call(op, operation.inputs, operation.attrs)
        _check_operands(operation, op, declared)
        _check_outputs(operation, op)
    except ProgramError as error:
        raise _fault(operation, str(error)) from None


def _check_operands(operation: Operation, op: Op, declared: dict[str, TensorSpec]) -> None:
    for position, operand in enumerate(operation.inputs):
        where = f"operand {position}"
        if isinstance(operand, TensorSpec):
            _check_spec(operand, where)
            if operand.buffer not in declared:
                raise ProgramError(f"{where} reads buffer {operand.buffer!r} before it is written")
            _check_inside(operand, declared[operand.buffer], where)
            if op.name == "pow" and position == 1:
                raise ProgramError("the exponent of pow must be a Python int or float, got a tensor")
        elif not op.scalar_operands:
            raise ProgramError(f"{where} of {op.name} must be a tensor, got {show(operand)}")
        elif not is_number(operand):
            raise ProgramError(f"{where} must be a TensorSpec, an int or a float, got {show(operand)}")


def check_call(op: Op, operands: Sequence[object], attrs: Mapping[str, object]) -> None:
    """Check the number of operands and the attributes of an op, before its shape rule sees them.

    Raises
    ------
    ProgramError
        Saying what the op takes; it names no operation.
    """
    if len(operands) not in op.num_inputs:
        counts = op.num_inputs
        needed = f"{counts[0]} to {counts[-1]}" if len(counts) > 3 else " or ".join(str(count) for count in counts)
        raise ProgramError(f"{op.name} takes {needed} operands, got {len(operands)}")
    for key, value in attrs.items():
        if key not in op.attrs:
            known = ", ".join(op.attrs) or "none"
            raise ProgramError(f"unknown attribute {show(key)} of {op.name}; known: {known}")
        message = op.attrs[key][1](value)
        if message is not None:
            raise ProgramError(f"attribute {key!r} {message}")
    for key, (default, _) in op.attrs.items():
        if default is REQUIRED and key not in attrs:
            raise ProgramError(f"{op.name} needs the attribute {key!r}")
    if op.name == "pow" and len(operands) == 2 and "exponent" in attrs:
        raise ProgramError("pow takes its exponent from the second operand or from the attribute, not from both")


def _check_outputs(operation: Operation, op: Op) -> None:
    if len(operation.outputs) != op.num_outputs:
        raise ProgramError(f"{op.name} has {op.num_outputs} outputs, got {len(operation.outputs)}")
    for spec in operation.outputs:
        if not isinstance(spec, TensorSpec):
            raise ProgramError(f"an output must be a TensorSpec, got {show(spec)}")
        _check_spec(spec, "output")
        if not spec.is_dense or spec.offset != 0:
            raise ProgramError(f"an output is a whole new buffer: row-major with offset 0, got {spec}")
    if len({spec.buffer for spec in operation.outputs}) != len(operation.outputs):
        raise ProgramError("two outputs name the same buffer")
    shapes = [operand.shape if isinstance(operand, TensorSpec) else () for operand in operation.inputs]
    natural = op.shape(shapes, operation.attrs)
    _check_domain(operation, op)
    for spec, shape in zip(operation.outputs, natural, strict=True):
        if op.kind == "pointwise" and (not op.indexed or not op.num_inputs[-1]):
            fits = broadcasts_to(shape, spec.shape)
        elif op.kind == "reduction" and "dims" in op.attrs:
            dims = reduced_dims(shapes[0], operation.attrs)
            kept = tuple(1 if dim in dims else size for dim, size in enumerate(shapes[0]))
            fits = prod(spec.shape) == prod(shape) and _strip(spec.shape) == _strip(kept)
        else:
            fits = spec.shape == shape
        if not fits:
            raise ProgramError(f"output shape {list(spec.shape)} does not fit; {op.name} gives {list(shape)}")


def _check_domain(operation: Operation, op: Op) -> None:
    """The operands can be computed with in one domain, and it holds every number of the operation."""
    operands = [(operand, operand.dtype if isinstance(operand, TensorSpec) else None) for operand in operation.inputs]
    domain = operation_domain(op, operands, operation.outputs[0].dtype)
    for position, (value, _) in enumerate(operands):
        if not isinstance(value, TensorSpec):
            is_data = op.data_operands is None or position in op.data_operands
            constant(value, domain if is_data else domain_of_operand(value, None))
    for key in op.constants:
        if key in operation.attrs:
            constant(operation.attrs[key], domain)


def _strip(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


# ---------------------------------------------------------------------------- loops


def _check_loop(loop: Loop, declared: dict[str, TensorSpec]) -> None:
    try:
        if not isinstance(loop.name, str):
            raise ProgramError(f"a loop's name must be a string, got {show(loop.name)}")
        _check_loop_counts(loop)
        for position, operand in enumerate(loop.inputs):
            where = f"operand {position}"
            if not isinstance(operand, TensorSpec):
                raise ProgramError(f"{where} of a loop must be a TensorSpec, got {show(operand)}")
            _check_spec(operand, where)
            if operand.buffer not in declared:
                raise ProgramError(f"{where} reads buffer {operand.buffer!r} before it is written")
            _check_inside(operand, declared[operand.buffer], where)
        for spec in loop.outputs:
            if not isinstance(spec, TensorSpec):
                raise ProgramError(f"an output must be a TensorSpec, got {show(spec)}")
        room = _loop_room(loop, declared)
        validate_program(loop.body)
        _check_loop_inputs(loop, room)
        _check_loop_outputs(loop, room)
    except ProgramError as error:
        raise _fault(loop, str(error)) from None


def _check_loop_counts(loop: Loop) -> None:
    for label, value in (("num_carry", loop.num_carry), ("num_xs", loop.num_xs)):
        if not _is_int(value) or value < 0:
            raise ProgramError(f"{label} must be an int >= 0, got {show(value)}")
    if loop.num_constants < 0:
        raise ProgramError(f"{len(loop.inputs)} operands are fewer than num_carry + num_xs")
    if not isinstance(loop.body, Program):
        raise ProgramError(f"the body must be a Program, got {show(loop.body)}")
    if len(loop.body.inputs) != len(loop.inputs):
        raise ProgramError(f"the body has {len(loop.body.inputs)} inputs, the loop {len(loop.inputs)} operands")
    if len(loop.body.outputs) != len(loop.outputs):
        raise ProgramError(f"the body has {len(loop.body.outputs)} outputs, the loop {len(loop.outputs)}")
    if len(loop.outputs) < loop.num_carry:
        raise ProgramError(f"{len(loop.outputs)} outputs are fewer than num_carry={loop.num_carry}")
    if not isinstance(loop.reverse, bool):
        raise ProgramError(f"reverse must be True or False, got {show(loop.reverse)}")


def _loop_room(loop: Loop, declared: dict[str, TensorSpec]) -> int | None:
    """The leading size of stacked tensors; None where a dynamic length meets no stacked tensor."""
    if isinstance(loop.length, str):
        scalar = declared.get(loop.length)
        if scalar is None or scalar.dtype != "int32" or scalar.shape != ():
            raise ProgramError(f"length {show(loop.length)} must name an int32 scalar input")
        stacked = list(loop.inputs[len(loop.inputs) - loop.num_xs :]) + list(loop.outputs[loop.num_carry :])
        sizes = {spec.shape[0] if spec.shape else -1 for spec in stacked}
        if len(sizes) > 1:
            raise ProgramError(f"stacked tensors have different leading dims: {sorted(sizes)}")
        return sizes.pop() if sizes else None
    if not _is_int(loop.length) or not 0 <= loop.length <= MAX_LENGTH:
        raise ProgramError(
            f"length must be an int from 0 to {MAX_LENGTH} or the name of a scalar input, got {show(loop.length)}"
        )
    return loop.length


def _check_loop_inputs(loop: Loop, room: int | None) -> None:
    first_xs = len(loop.inputs) - loop.num_xs
    for position, (operand, inner) in enumerate(zip(loop.inputs, loop.body.inputs, strict=True)):
        where = f"operand {position} ({operand})"
        if isinstance(inner, ScalarSpec):
            if position >= loop.num_constants or operand.shape != () or operand.dtype != inner.dtype:
                raise ProgramError(f"{where} does not fit the body's scalar {inner}")
            continue
        expected = inner.shape if position < first_xs else (room, *inner.shape)
        if operand.shape != expected or operand.dtype != inner.dtype:
            raise ProgramError(f"{where} does not fit the body's input {inner}: expected shape {list(expected)}")


def _check_loop_outputs(loop: Loop, room: int | None) -> None:
    carries = loop.body.inputs[loop.num_constants : loop.num_constants + loop.num_carry]
    for position, (spec, inner) in enumerate(zip(loop.outputs, loop.body.outputs, strict=True)):
        where = f"output {position} ({spec})"
        _check_spec(spec, where)
        if not spec.is_dense or spec.offset != 0:
            raise ProgramError(f"{where} is a whole new buffer: it must be row-major with offset 0")
        expected = inner.shape if position < loop.num_carry else (room, *inner.shape)
        if spec.shape != expected or spec.dtype != inner.dtype:
            raise ProgramError(f"{where} does not fit the body's output {inner}: expected shape {list(expected)}")
        if position < loop.num_carry:
            carry = carries[position]
            if not isinstance(carry, TensorSpec) or carry.shape != inner.shape or carry.dtype != inner.dtype:
                raise ProgramError(f"{where}: the carry changes from {carry} to {inner}")
            if not carry.is_dense or carry.offset != 0:
                raise ProgramError(f"{where}: the body's carry input must be row-major with offset 0, got {carry}")
    if len({spec.buffer for spec in loop.outputs}) != len(loop.outputs):
        raise ProgramError("two outputs name the same buffer")
