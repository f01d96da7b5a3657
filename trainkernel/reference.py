"""What a Program means, in NumPy: the oracle of every test and the device of last resort.

Each operation is computed in float64 (integers in int64) from the exact values of its operands
and rounded once to its output's dtype; ``trainkernel.ops.domains`` says how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel.dtypes import DTYPES, name_of_numpy, scalar_value
from trainkernel.errors import ArgumentError
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec, validate
from trainkernel.ops import OPS
from trainkernel.ops.domains import constant, convert, domain_of_dtype, domain_of_operand, load, operation_domain

Flat = NDArray[Any]


def run(program: Program, inputs: Sequence[Any]) -> tuple[NDArray[Any], ...]:
    """Run a Program on NumPy arrays.

    Parameters
    ----------
    program : Program
    inputs : sequence
        One array per tensor input, of its shape and dtype (any strides), and one number per
        scalar input.

    Returns
    -------
    tuple of numpy.ndarray
        All outputs, row-major arrays of their own; the inputs are unchanged.

    Raises
    ------
    ProgramError
        If the program breaks a rule.
    ArgumentError
        If an input is missing or has another shape or dtype.
    """
    validate(program)
    return evaluate(program, inputs)


def evaluate(program: Program, inputs: Sequence[Any]) -> tuple[NDArray[Any], ...]:
    """``run`` for a Program that is known to be valid: checking one takes as long as a small step does."""
    if not isinstance(inputs, (list, tuple)):
        raise ArgumentError(f"inputs: got {type(inputs).__name__}, needs a list or tuple with one entry for each")
    if len(inputs) != len(program.inputs):
        raise ArgumentError(f"the program takes {len(program.inputs)} inputs, got {len(inputs)}")
    buffers = {}
    for position, (spec, value) in enumerate(zip(program.inputs, inputs, strict=True)):
        buffers[spec.buffer] = _input_buffer(position, spec, value)
    with np.errstate(all="ignore"):
        return _run_program(program, buffers)


def _input_buffer(position: int, spec: TensorSpec | ScalarSpec, value: Any) -> Flat:
    """The input as a flat buffer in which the spec's own strides and offset find its elements."""
    dtype = DTYPES[spec.dtype].numpy
    if isinstance(spec, ScalarSpec):
        try:
            return np.full(1, scalar_value(value, spec.dtype), dtype)
        except ArgumentError as error:
            raise ArgumentError(f"input {position} ({spec.buffer!r}): {error}") from None
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"input {position} ({spec.buffer!r}): got a masked array, whose mask would be ignored")
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ArgumentError(f"input {position} ({spec.buffer!r}): {error}") from None
    if array.shape != spec.shape or array.dtype != dtype:
        raise ArgumentError(
            f"input {position} ({spec.buffer!r}): got {array.dtype}{list(array.shape)}, "
            f"needs {spec.dtype}{list(spec.shape)}"
        )
    flat = np.zeros(max(spec.last_index + 1, 0), dtype)
    if array.size:
        _view(flat, spec)[...] = array
    return flat


def _view(flat: Flat, spec: TensorSpec) -> NDArray[Any]:
    if spec.num_elements == 0:
        return np.zeros(spec.shape, flat.dtype)
    size = flat.dtype.itemsize
    return np.lib.stride_tricks.as_strided(
        flat[spec.offset :], spec.shape, tuple(stride * size for stride in spec.strides)
    )


def _run_program(program: Program, buffers: dict[str, Flat]) -> tuple[NDArray[Any], ...]:
    for item in program.operations:
        if isinstance(item, Loop):
            results = _run_loop(item, buffers)
        else:
            results = _run_operation(item, buffers)
        for spec, result in zip(item.outputs, results, strict=True):
            buffers[spec.buffer] = result.reshape(-1)
    outputs = []
    for spec in program.outputs:
        value = _view(buffers[spec.buffer], spec)
        domain = domain_of_dtype(name_of_numpy(value.dtype) or "")
        outputs.append(_whole(convert(load(value, domain), domain, spec.dtype), spec))
    return tuple(outputs)


def _whole(value: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """The value as a row-major array of its own."""
    return np.array(value.reshape(spec.shape), dtype=DTYPES[spec.dtype].numpy, order="C")


def _run_operation(operation: Operation, buffers: dict[str, Flat]) -> list[NDArray[Any]]:
    arrays = [
        _view(buffers[operand.buffer], operand) if isinstance(operand, TensorSpec) else operand
        for operand in operation.inputs
    ]
    return apply(operation.op, arrays, operation.attrs, operation.outputs)


def apply(
    name: str, operands: Sequence[Any], attrs: Mapping[str, Any], outputs: Sequence[TensorSpec]
) -> list[NDArray[Any]]:
    """One operation on arrays.

    Parameters
    ----------
    name : str
        The op.
    operands : sequence of arrays and Python numbers
    attrs : mapping
    outputs : sequence of TensorSpec
        Shapes and dtypes of the results.

    Returns
    -------
    list of numpy.ndarray
        Row-major arrays of their own.
    """
    op = OPS[name]
    dtypes = [name_of_numpy(value.dtype) if isinstance(value, np.ndarray) else None for value in operands]
    domain = operation_domain(op, list(zip(operands, dtypes, strict=True)), outputs[0].dtype)
    arrays = []
    for position, (value, dtype) in enumerate(zip(operands, dtypes, strict=True)):
        own = domain if op.data_operands is None or position in op.data_operands else domain_of_operand(value, dtype)
        arrays.append(np.asarray(constant(value, own)) if dtype is None else load(value, own))
    constants = {key: constant(value, domain) if key in op.constants else value for key, value in attrs.items()}
    values = op.reference(arrays, constants, [spec.shape for spec in outputs])
    results = []
    for value, spec in zip(values, outputs, strict=True):
        array = np.asarray(value)
        if op.kind == "pointwise":
            array = np.broadcast_to(array, spec.shape)
        results.append(_whole(convert(array, domain, spec.dtype), spec))
    return results


def _loop_length(loop: Loop, buffers: dict[str, Flat]) -> int:
    """The number of steps; a dynamic one must fit the stacked tensors."""
    if isinstance(loop.length, int):
        return loop.length
    length = int(buffers[loop.length][0])
    stacked = (*loop.inputs[len(loop.inputs) - loop.num_xs :], *loop.outputs[loop.num_carry :])
    room = stacked[0].shape[0] if stacked else length
    if not 0 <= length <= room:
        raise ArgumentError(f"loop {loop.name!r}: length {loop.length!r} is {length}; it must lie in 0..{room}")
    return length


def _run_loop(loop: Loop, buffers: dict[str, Flat]) -> list[NDArray[Any]]:
    values = [_view(buffers[spec.buffer], spec) for spec in loop.inputs]
    first_carry, first_xs = loop.num_constants, loop.num_constants + loop.num_carry
    carries = [np.array(value) for value in values[first_carry:first_xs]]
    length = _loop_length(loop, buffers)
    stacked = [np.zeros(spec.shape, DTYPES[spec.dtype].numpy) for spec in loop.outputs[loop.num_carry :]]
    for step in reversed(range(length)) if loop.reverse else range(length):
        arguments = values[:first_carry] + carries + [value[step] for value in values[first_xs:]]
        inner = {
            spec.buffer: _input_buffer(position, spec, value)
            for position, (spec, value) in enumerate(zip(loop.body.inputs, arguments, strict=True))
        }
        results = _run_program(loop.body, inner)
        carries = list(results[: loop.num_carry])
        for array, result in zip(stacked, results[loop.num_carry :], strict=True):
            array[step] = result
    return carries + stacked
