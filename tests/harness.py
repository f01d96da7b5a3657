"""Generate a program's kernel and run its source in the emulator, for tests that prove it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from error_bounds import assert_close
from numpy.typing import NDArray

from trainkernel import emulator
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.ir import Loop, Program

MAX_UNKNOWN = 0.05
"""Largest share of elements about which the error bound may say nothing."""
_ALIGNMENT_BYTES = 64


def copies(inputs: Sequence[Any]) -> list[Any]:
    """Copies of the inputs with their strides and alignment, for launches that update some in place."""
    return [_copy(value) if isinstance(value, np.ndarray) else value for value in inputs]


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    if array.size == 0:
        return array.copy()
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    base = np.zeros(last + array.itemsize + 2 * _ALIGNMENT_BYTES, np.uint8)
    start = -base.ctypes.data % _ALIGNMENT_BYTES + array.ctypes.data % _ALIGNMENT_BYTES
    copy = np.ndarray(array.shape, array.dtype, base, start, array.strides)
    copy[...] = array
    return copy


def bits(array: NDArray[Any]) -> bytes:
    """The array's bytes with every NaN made the same: which NaN an operation gives is not promised."""
    array = np.array(array)
    if array.dtype.kind not in "biu":
        with np.errstate(all="ignore"):
            array[np.isnan(array.astype(np.float32))] = np.nan
    return array.tobytes()


def emulate(
    generated: GeneratedKernel,
    inputs: Sequence[Any],
    *,
    num_blocks: int | None = None,
    order: str | int = "forward",
    check_races: bool = True,
) -> emulator.EmulationResult:
    """Launch on copies of the inputs; what is not updated in place must be unchanged."""
    arguments = copies(inputs)
    result = emulator.emulate(generated, arguments, num_blocks=num_blocks, order=order, check_races=check_races)
    donated = set(generated.inplace_outputs.values())
    for index, (before, after) in enumerate(zip(inputs, arguments, strict=True)):
        if isinstance(before, np.ndarray) and index not in donated:
            assert bits(before) == bits(after), f"input {index} was changed"
    for output_index, input_index in generated.inplace_outputs.items():
        assert result.outputs[output_index] is arguments[input_index]
    return result


def check(
    program: Program,
    inputs: Sequence[Any],
    *,
    num_blocks: int | None = None,
    order: str | int = "forward",
    max_unknown: float = MAX_UNKNOWN,
    **options: Any,
) -> GeneratedKernel:
    """Generate, emulate with race checks, compare with the reference, and check the statistics."""
    generated = generate(program, **options)
    result = emulate(generated, inputs, num_blocks=num_blocks, order=order)
    assert assert_close(result.outputs, program, inputs) <= max_unknown
    check_statistics(generated, result.counters)
    return generated


def check_statistics(generated: GeneratedKernel, counters: emulator.Counters) -> None:
    """What a GeneratedKernel says of itself against what its launch did."""
    assert counters.arena_touched_bytes is None or counters.arena_touched_bytes <= generated.workspace_bytes
    assert generated.max_work_blocks >= 1
    if counters.task_blocks is not None:
        assert max(counters.task_blocks, default=0) <= generated.max_work_blocks
    for region in generated.regions:
        assert region.offset_bytes >= 256 and region.offset_bytes + region.size_bytes <= generated.workspace_bytes


def has_loops(program: Program) -> bool:
    """Whether some barrier may be passed more than once or not at all."""
    return any(isinstance(item, Loop) for item in program.operations)
