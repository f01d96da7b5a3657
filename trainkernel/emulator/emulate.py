"""Run a GeneratedKernel on the CPU: memory, parameter block, launch, outputs."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np

from trainkernel.dtypes import dtype_of
from trainkernel.emulator.compiler import EmulatedKernel, compile_sources
from trainkernel.emulator.launch import Counters, LaunchResult, Region, WrittenBytes, launch
from trainkernel.emulator.report import Names, check_reports
from trainkernel.errors import ArgumentError, EmulatorError, LaunchError, OptionError

HEADER_BYTES = 256
_ALIGNMENT = 256
_GUARD_BYTES = 256
_GUARD = 0xA5
_POISON = 0xFF
_MAX_KERNELS = 512
_IDLE_ROUND_NS = 1_000_000
_ALL_TICKS = 2**62


@dataclass(frozen=True)
class EmulationResult:
    """What an emulated launch gave.

    Attributes
    ----------
    outputs : tuple of numpy.ndarray
        All program outputs in order; an in-place one is the caller's own array.
    counters : Counters
        Of all launches: barriers are added up; of a task's blocks and the bytes of the arena, those of the launch
        with the most.
    num_launches : int
        More than one, or none, with ``ticks_per_launch``.
    """

    outputs: tuple[np.ndarray[Any, Any], ...]
    counters: Counters
    num_launches: int = 1


class _Memory:
    """Poisoned bytes, aligned as device memory is, between two guards."""

    def __init__(self, size_bytes: int) -> None:
        self.base = np.full(size_bytes + 2 * _GUARD_BYTES + _ALIGNMENT, _GUARD, np.uint8)
        start = _address(self.base) + _GUARD_BYTES
        self.start = _GUARD_BYTES + -start % _ALIGNMENT
        self.bytes = self.base[self.start : self.start + size_bytes]
        self.bytes.fill(_POISON)
        self.address = _address(self.base) + self.start

    def is_intact(self) -> bool:
        """Whether nobody wrote into the guards."""
        before, after = self.base[: self.start], self.base[self.start + self.bytes.size :]
        return bool((before == _GUARD).all() and (after == _GUARD).all())


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def _span_bytes(array: np.ndarray[Any, Any]) -> int:
    """Bytes from the first element to the end of the last."""
    if array.size == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    return int(last) + array.itemsize


# Compiled kernels of this process, by source and whether they check races; the oldest go first.
_kernels: dict[tuple[str, bool], EmulatedKernel] = {}


def prepare(kernels: Sequence[Any], *, check_races: bool = False) -> None:
    """Compile many GeneratedKernels in one run of the compiler, ahead of ``emulate``."""
    missing = list(dict.fromkeys(k.source for k in kernels if (k.source, check_races) not in _kernels))
    for source, compiled in zip(missing, compile_sources(missing, check_races=check_races), strict=True):
        _kernels[source, check_races] = compiled
    while len(_kernels) > max(_MAX_KERNELS, len(missing)):
        del _kernels[next(iter(_kernels))]


def _compiled(generated: Any, check_races: bool) -> EmulatedKernel:
    key = (generated.source, check_races)
    if key not in _kernels:
        prepare([generated], check_races=check_races)
    return _kernels[key]


def default_num_blocks(generated: Any) -> int:
    """At most four blocks: enough to show what happens between blocks."""
    bounds = [4, generated.max_work_blocks]
    if generated.max_blocks is not None:
        bounds.append(generated.max_blocks)
    cluster = _cluster_blocks(generated)
    return int(max(1, min(bounds) // cluster) * cluster)


def _cluster_blocks(generated: Any) -> int:
    return int(getattr(generated, "cluster_blocks", 1) or 1)


@dataclass
class _Bound:
    """The memory of one launch."""

    workspace: _Memory
    outputs: list[np.ndarray[Any, Any]]
    memories: list[tuple[str, _Memory]]
    regions: list[Region]
    pointers: list[int]
    copies_back: list[tuple[int, _Memory]] = field(default_factory=list)
    table: np.ndarray[Any, Any] | None = None


def _bind(generated: Any, inputs: Sequence[Any]) -> _Bound:
    """Allocate workspace and outputs; list the regions and the pointer of each slot."""
    program = generated.program
    if len(inputs) != len(program.inputs):
        raise ArgumentError(f"the program has {len(program.inputs)} inputs, got {len(inputs)}")
    workspace = _Memory(max(int(generated.workspace_bytes), HEADER_BYTES))
    workspace.bytes[:HEADER_BYTES] = 0
    bound = _Bound(workspace, [], [("the workspace", workspace)], _workspace_regions(generated, workspace), [])
    inplace = dict(generated.inplace_outputs)
    donated = set(inplace.values())
    fresh: dict[int, tuple[np.ndarray[Any, Any], _Memory]] = {}
    for index, spec in enumerate(program.outputs):
        if index in inplace:
            bound.outputs.append(inputs[inplace[index]])
            continue
        dtype = dtype_of(spec.dtype)
        memory = _Memory(spec.num_elements * dtype.itemsize_bytes)
        array = memory.bytes.view(dtype.numpy).reshape(spec.shape)
        fresh[index] = (array, memory)
        bound.outputs.append(array)
        bound.memories.append((f"output {index} ({spec.buffer})", memory))
    for slot in generated.slots:
        if slot.kind == "input":
            array = inputs[slot.index]
            address = _aligned_address(bound, array, slot, slot.index in donated)
            region = Region(
                slot.name,
                address,
                _span_bytes(array),
                initialised=True,
                read_only=slot.index not in donated,
                itemsize_bytes=array.itemsize,
            )
        else:
            array, memory = fresh[slot.index]
            region = Region(
                f"output {slot.index} {slot.name}",
                memory.address,
                array.nbytes,
                initialised=False,
                output=True,
                itemsize_bytes=array.itemsize,
            )
        bound.regions.append(region)
        bound.pointers.append(region.address if array.size else 0)
    if generated.uses_tensor_table:
        bound.table = np.array(bound.pointers or [0], np.uint64)
        bound.regions.append(
            Region("tensor table", _address(bound.table), bound.table.nbytes, True, True, itemsize_bytes=8)
        )
    return bound


def _aligned_address(bound: _Bound, array: np.ndarray[Any, Any], slot: Any, is_donated: bool) -> int:
    """Where the kernel finds an input: the caller's memory, or a copy if that is not aligned as the kernel needs."""
    address = _address(array)
    if address % int(getattr(slot, "alignment_bytes", None) or 1) == 0:
        return address
    memory = _Memory(_span_bytes(array))
    ctypes.memmove(memory.address, address, memory.bytes.size)
    bound.memories.append((f"input {slot.name}", memory))
    if is_donated:
        bound.copies_back.append((address, memory))
    return memory.address


def _workspace_regions(generated: Any, workspace: _Memory) -> list[Region]:
    """The header, and those bytes of the arena that the plan gives to some value."""
    regions = [Region("workspace header", workspace.address, HEADER_BYTES, initialised=True, exempt=True)]
    spans = sorted((r.offset_bytes, r.offset_bytes + r.size_bytes) for r in generated.regions if r.size_bytes)
    if generated.unplanned_bytes:
        start = workspace.address + generated.workspace_bytes - generated.unplanned_bytes
        name, size = "places of blocks, time stamps", generated.unplanned_bytes
        regions.append(Region(name, start, size, initialised=False, exempt=True))
    if not generated.regions and workspace.bytes.size > HEADER_BYTES:
        spans = [(HEADER_BYTES, workspace.bytes.size)]
    joined: list[list[int]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    for start, end in joined:
        regions.append(Region("arena", workspace.address + start, end - start, initialised=False, arena=True))
    return regions


def _pack_params(
    generated: Any, inputs: Sequence[Any], bound: _Bound, barrier_timeout_ns: int, part: tuple[int, int]
) -> bytes:
    """The bytes of ``TkParams``; ``part`` are the launch's first tick and that before which it ends."""
    params = bytearray(max(int(generated.params_bytes), 16))
    pointers = [_address(bound.table)] if bound.table is not None else bound.pointers
    struct.pack_into(f"<QQ{len(pointers)}Q", params, 0, bound.workspace.address, barrier_timeout_ns, *pointers)
    for scalar in generated.scalars:
        value = inputs[scalar.index]
        if scalar.dtype == "float32":
            struct.pack_into("<f", params, scalar.offset_bytes, np.float32(value))
        else:
            struct.pack_into("<i", params, scalar.offset_bytes, int(value))
    if getattr(generated, "ticks_offset_bytes", None) is not None:
        struct.pack_into("<qq", params, generated.ticks_offset_bytes, *part)
    return bytes(params)


def _parts(
    generated: Any, inputs: Sequence[Any], ticks_per_launch: int | Sequence[int] | None
) -> list[tuple[int, int]]:
    """The first tick of each launch, and that before which it ends."""
    if ticks_per_launch is None:
        return [(0, _ALL_TICKS)]
    counts = [ticks_per_launch] if isinstance(ticks_per_launch, int) else list(ticks_per_launch)
    if not counts or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise OptionError(
            f"ticks_per_launch must be an integer of at least 1, or a list of such integers, got {ticks_per_launch!r}"
        )
    if generated.ticks_offset_bytes is None:
        raise OptionError("ticks_per_launch: this kernel runs as one launch; generate it with parts=True")
    return list(_cut(sum(segment.num_ticks(inputs) for segment in generated.segments), counts))


def _cut(num_ticks: int, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for count in cycle(counts):
        if first >= num_ticks:
            return
        yield first, min(first + count, num_ticks)
        first += count


def emulate(
    generated: Any,
    inputs: Sequence[Any],
    *,
    num_blocks: int | None = None,
    order: str | int = "forward",
    check_races: bool = False,
    barrier_timeout_ns: int = 0,
    ticks_per_launch: int | Sequence[int] | None = None,
) -> EmulationResult:
    """Compile the emitted source for the CPU and run it.

    Parameters
    ----------
    generated : GeneratedKernel
    inputs : sequence of numpy.ndarray or scalar
        One for each program input, tensors with exactly the strides of their spec.
    num_blocks : int, optional
        Grid size, at least 1; by default at most 4.
    order : "forward", "reverse" or int
        Order of blocks and threads; an integer seeds a random one.
    check_races : bool
        Watch every access: races, bounds, uninitialised reads, unwritten outputs.
    barrier_timeout_ns : int
        As on the device, in the emulator's virtual time; 0 waits until a deadlock is certain.
    ticks_per_launch : int or sequence of int, optional
        Of a kernel generated with ``parts=True``: how many stages and steps of loops at the top each launch runs;
        a sequence begins again at its end. Left out: one launch runs all.

    Raises
    ------
    RaceError
        If accesses race.
    EmulatorError
        For a deadlock, a stray or uninitialised access, a divergent barrier.
    LaunchError
        If a grid barrier timed out.
    """
    num_blocks = default_num_blocks(generated) if num_blocks is None else num_blocks
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
        raise OptionError(f"num_blocks must be an integer of at least 1, got {num_blocks!r}")
    if not isinstance(check_races, bool):
        raise OptionError(f"check_races must be True or False, got {check_races!r}")
    is_integer = isinstance(barrier_timeout_ns, int) and not isinstance(barrier_timeout_ns, bool)
    if not is_integer or not 0 <= barrier_timeout_ns < 1 << 63:
        raise OptionError(
            f"barrier_timeout_ns must be an integer of at least 0 and 63 bits, got {barrier_timeout_ns!r}"
        )
    kernel = _compiled(generated, check_races)
    parts = _parts(generated, inputs, ticks_per_launch)
    bound = _bind(generated, inputs)
    written = WrittenBytes() if len(parts) > 1 and check_races else None
    results: list[LaunchResult] = []
    for part in parts:
        result = launch(
            kernel,
            _pack_params(generated, inputs, bound, barrier_timeout_ns, part),
            # What a later launch is to write is not missing yet.
            bound.regions if part is parts[-1] else [replace(region, output=False) for region in bound.regions],
            num_blocks=num_blocks,
            threads_per_block=generated.threads_per_block,
            shared_bytes=generated.shared_bytes,
            cluster_blocks=_cluster_blocks(generated),
            order=order,
            num_tasks=len(generated.tasks),
            barrier_error_address=bound.workspace.address + 4,
            # The kernel must see its own time-out before the emulator calls it a deadlock.
            idle_rounds=200 + 2 * barrier_timeout_ns // _IDLE_ROUND_NS,
            written=written,
        )
        check_reports(result, Names(generated.tasks, generated.regions, bound.workspace.address))
        _check_after(bound)
        results.append(result)
    for address, memory in bound.copies_back:
        ctypes.memmove(address, memory.address, memory.bytes.size)
    return EmulationResult(tuple(bound.outputs), _all_counters([one.counters for one in results]), len(results))


def _all_counters(each: Sequence[Counters]) -> Counters:
    """The counters of several launches."""
    blocks = [one.task_blocks for one in each if one.task_blocks is not None]
    return Counters(
        grid_barriers=sum(one.grid_barriers for one in each),
        block_barriers=sum(one.block_barriers for one in each),
        task_blocks=tuple(map(max, *blocks)) if len(blocks) > 1 else blocks[0] if blocks else None,
        arena_touched_bytes=max(
            (one.arena_touched_bytes for one in each if one.arena_touched_bytes is not None), default=None
        ),
    )


def _check_after(bound: _Bound) -> None:
    error = int(bound.workspace.bytes[4:8].view(np.uint32)[0])
    if error:
        raise LaunchError(
            f"the grid barrier of stage {error - 1} was not passed in time: some block never arrived. "
            "Pass check_races=True and no barrier_timeout_ns to see which threads wait where."
        )
    for name, memory in bound.memories:
        if not memory.is_intact():
            raise EmulatorError(
                f"the emulated kernel wrote just outside {name}; pass check_races=True to see which task did"
            )


def run(
    program: Any,
    inputs: Sequence[Any],
    *,
    num_blocks: int | None = None,
    order: str | int = "forward",
    check_races: bool = False,
    barrier_timeout_ns: int = 0,
    ticks_per_launch: int | Sequence[int] | None = None,
    **options: Any,
) -> tuple[np.ndarray[Any, Any], ...]:
    """Generate the kernel of a Program, run it on the CPU, and return its outputs.

    Parameters
    ----------
    program : Program
    inputs : sequence of array or number
        As for a call of a Kernel.
    num_blocks : int, optional
        Grid size, at least 1; by default at most 4.
    order : "forward", "reverse" or int
        Order of blocks and threads; an integer seeds a random one.
    check_races : bool
        Watch every access: races, bounds, uninitialised reads, unwritten outputs.
    barrier_timeout_ns : int
        As on the device, in the emulator's virtual time; 0 waits until a deadlock is certain.
    ticks_per_launch : int or sequence of int, optional
        As for ``emulate``; the kernel is then generated with ``parts=True``.
    **options
        Those of ``trainkernel.codegen.generate``.

    Raises
    ------
    RaceError, EmulatorError, LaunchError
        As ``emulate`` does.
    """
    # Late, so that emulating a kernel that exists already needs no code generator.
    # Late too: the rules on arguments are those of every device and stand above this layer.
    from trainkernel.arguments import check_arguments, signature_of
    from trainkernel.codegen import generate
    from trainkernel.runtime.dlpack import as_numpy

    if ticks_per_launch is not None:
        options["parts"] = True
    generated = generate(program, **options)
    checked = check_arguments(signature_of(program, generated.inplace_outputs), inputs, device=("cpu", 0))
    values = [
        checked.scalars[index] if index in checked.scalars else as_numpy(checked.inputs[index])
        for index in range(len(program.inputs))
    ]
    result = emulate(
        generated,
        values,
        num_blocks=num_blocks,
        order=order,
        check_races=check_races,
        barrier_timeout_ns=barrier_timeout_ns,
        ticks_per_launch=ticks_per_launch,
    )
    return result.outputs
