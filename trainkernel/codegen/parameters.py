"""The parameter block of a kernel: what a launch hands to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainkernel.codegen.generated import ScalarSlot, Slot
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program, ScalarSpec, TensorSpec, length_limits

MAX_DIRECT_SLOTS = 480


@dataclass(frozen=True)
class ParameterLayout:
    """The parameter block: workspace, barrier timeout, pointers (or one pointer table), scalars, the launch's ticks."""

    slots: tuple[Slot, ...]
    scalars: tuple[ScalarSlot, ...]
    uses_table: bool
    size_bytes: int
    ticks_offset_bytes: int | None = None


def layout_parameters(program: Program, inplace_outputs: Mapping[int, int], parts: bool = False) -> ParameterLayout:
    """The parameter block of a program; with ``parts``, its launches are told their first and last ticks."""
    slots = [
        Slot("input", index, spec.buffer, itemsize_bytes(spec.dtype))
        for index, spec in enumerate(program.inputs)
        if isinstance(spec, TensorSpec)
    ]
    slots += [
        Slot("output", index, spec.buffer, itemsize_bytes(spec.dtype))
        for index, spec in enumerate(program.outputs)
        if index not in inplace_outputs
    ]
    uses_table = len(slots) > MAX_DIRECT_SLOTS
    offset = 16 + 8 * (1 if uses_table else len(slots))
    lengths = length_limits(program)
    scalars = []
    for index, scalar in enumerate(program.inputs):
        if isinstance(scalar, ScalarSpec):
            scalars.append(ScalarSlot(index, scalar.buffer, scalar.dtype, offset, lengths.get(scalar.buffer)))
            offset += 4
    size_bytes = -(-offset // 8) * 8
    if parts:
        return ParameterLayout(tuple(slots), tuple(scalars), uses_table, size_bytes + 16, size_bytes)
    return ParameterLayout(tuple(slots), tuple(scalars), uses_table, size_bytes)


def itemsize_bytes(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPES[dtype].itemsize_bytes


def params_struct(layout: ParameterLayout) -> list[str]:
    """The C struct of the block."""
    lines = ["struct TkParams {", "  unsigned char* workspace;", "  unsigned long long barrier_timeout_ns;"]
    if layout.uses_table:
        lines.append("  void* const* tensors;")
    else:
        for slot in layout.slots:
            name = f"in_{slot.name}" if slot.kind == "input" else f"out_{slot.index}"
            lines.append(f"  void* {name};")
    lines += [f"  {'int' if slot.dtype == 'int32' else 'float'} scalar_{slot.name};" for slot in layout.scalars]
    if layout.ticks_offset_bytes is not None:
        lines += ["  long long first_tick;  // of those that this launch runs", "  long long end_tick;"]
    lines.append("};")
    return lines
