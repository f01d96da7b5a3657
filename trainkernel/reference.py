"""What a Program means, in NumPy: the oracle of every test and the device of last resort.

Each operation is computed in float64 from the exact values of its operands and rounded once to
its output's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel.dtypes import DTYPES, scalar_value
from trainkernel.errors import ArgumentError
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec, validate
from trainkernel.ops import OPS, to_float32

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
    ArgumentError
        If an input is missing or has another shape or dtype.
    """
    validate(program)
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
    array = np.asarray(value)
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


def _round(value: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    numpy_dtype = DTYPES[dtype].numpy
    rounded = value != 0 if dtype == "bool" else round_once(np.asarray(value), numpy_dtype)
    return np.array(rounded.reshape(shape), dtype=numpy_dtype, order="C")


def round_once(value: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round float64 to ``dtype`` to nearest even in one step.

    ml_dtypes and NumPy may round float64 to a 16-bit type through float32, which rounds twice;
    a value that lies off its float32 neighbour is moved to an odd float32 first, which makes the
    second rounding exact (Boldo and Melquiond, "When double rounding is odd", 2005).
    """
    if dtype.itemsize != 2 or value.dtype != np.float64:
        return value.astype(dtype)
    with np.errstate(all="ignore"):
        single = value.astype(np.float32)
        inexact = np.isfinite(single) & (single.astype(np.float64) != value)
        toward_zero = np.where(
            np.abs(single.astype(np.float64)) > np.abs(value), np.nextafter(single, np.float32(0)), single
        )
        odd = (toward_zero.astype(np.float32).view(np.uint32) | np.uint32(1)).view(np.float32)
        return np.where(inexact, odd, single).astype(dtype)


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
        if value.dtype != DTYPES[spec.dtype].numpy:
            value = value.astype(np.float64)
        outputs.append(_round(value, spec.dtype, spec.shape))
    return tuple(outputs)


def _run_operation(operation: Operation, buffers: dict[str, Flat]) -> list[NDArray[Any]]:
    op = OPS[operation.op]
    arrays = []
    for operand in operation.inputs:
        if isinstance(operand, TensorSpec):
            arrays.append(_view(buffers[operand.buffer], operand).astype(np.float64))
        else:
            arrays.append(np.asarray(to_float32(operand), np.float64))
    shapes = [spec.shape for spec in operation.outputs]
    values = op.reference(arrays, operation.attrs, shapes)
    results = []
    for value, spec in zip(values, operation.outputs, strict=True):
        if op.kind == "pointwise":
            value = np.broadcast_to(value, spec.shape)
        results.append(_round(np.asarray(value), spec.dtype, spec.shape))
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
