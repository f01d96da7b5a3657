"""One launch of a compiled kernel: parameters, memory regions, and what came of it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkernel.emulator.compiler import EmulatedKernel, load_runtime
from trainkernel.errors import EmulatorError, OptionError

NO_TASK = 0xFFFF
REGION_SHARED = 0xFFFFFFFE
_MAX_REPORTS = 64
_INITIALISED, _READ_ONLY, _EXEMPT, _ARENA, _OUTPUT = 1, 2, 4, 8, 16

KINDS = {
    1: "race",
    2: "uninitialised",
    3: "async_pending",
    4: "unwritten",
    5: "unawaited",
    16: "out_of_bounds",
    17: "read_only",
    18: "misaligned",
    19: "deadlock",
    20: "divergent_block",
    21: "divergent_warp",
    22: "dishonest_barrier",
    23: "stack_overflow",
    24: "segmentation",
    25: "exited_block",
    26: "memory",
    27: "unfenced",
}
WAITS = {
    0: "running",
    1: "__syncthreads",
    2: "the cluster barrier",
    3: "__syncwarp",
    4: "a shuffle",
    5: "mma",
    6: "ldmatrix",
    7: "polling a counter",
}


class _Region(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("written", ctypes.c_void_p),
    ]


class _Access(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("block", "thread", "task", "stage", "is_write", "wait")]


class _Report(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("region", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("detail", ctypes.c_uint32),
        ("first", _Access),
        ("second", _Access),
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("barrier_error", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("num_regions", ctypes.c_uint32),
        ("num_blocks", ctypes.c_uint32),
        ("threads_per_block", ctypes.c_uint32),
        ("cluster_blocks", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("idle_rounds", ctypes.c_uint64),
        ("check_races", ctypes.c_uint32),
        ("num_tasks", ctypes.c_uint32),
        ("num_reports", ctypes.c_uint32),
        ("grid_barriers_min", ctypes.c_uint32),
        ("grid_barriers_max", ctypes.c_uint32),
        ("shared_overrun", ctypes.c_uint32),
        ("races", ctypes.c_uint64),
        ("block_barriers", ctypes.c_uint64),
        ("arena_touched_bytes", ctypes.c_uint64),
        ("task_blocks", ctypes.c_void_p),
        ("reports", _Report * _MAX_REPORTS),
    ]


@dataclass(frozen=True)
class Region:
    """Memory that the kernel may touch.

    Attributes
    ----------
    name : str
        For reports.
    address, size_bytes : int
    initialised : bool
        Whether it holds values before the launch; if not, reading a byte first is an error.
    read_only : bool
        Whether writing is an error.
    exempt : bool
        Barrier counters: bounds are checked, races are not.
    arena : bool
        Whether it counts in ``Counters.arena_touched_bytes``.
    output : bool
        Whether every byte must have been written at the end.
    itemsize_bytes : int
        Of an element, for reports; 0 if mixed.
    """

    name: str
    address: int
    size_bytes: int
    initialised: bool
    read_only: bool = False
    exempt: bool = False
    arena: bool = False
    output: bool = False
    itemsize_bytes: int = 0

    @property
    def flags(self) -> int:
        pairs = (
            (self.initialised, _INITIALISED),
            (self.read_only, _READ_ONLY),
            (self.exempt, _EXEMPT),
            (self.arena, _ARENA),
            (self.output, _OUTPUT),
        )
        return sum(bit for on, bit in pairs if on)


class WrittenBytes:
    """Which bytes of some regions launches have written, for the launch that follows them."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], Any] = {}

    def mask(self, region: Region) -> int:
        """The address of a byte for each byte of a region."""
        key = region.address, region.size_bytes
        if key not in self._masks:
            self._masks[key] = ctypes.create_string_buffer(region.size_bytes)
        return ctypes.addressof(self._masks[key])


@dataclass(frozen=True)
class Access:
    """Who touched memory, or waits: ``task`` is None outside every task."""

    block: int
    thread: int
    task: int | None
    stage: int | None
    is_write: bool
    waits_in: str


@dataclass(frozen=True)
class Report:
    """One finding. For a race, ``first`` is the earlier access; else ``first`` is the one at fault.

    Attributes
    ----------
    kind : str
        One of ``KINDS``.
    region : Region or None
        None for shared memory (``is_shared``) and for unknown addresses.
    offset_bytes : int
        From the start of the region or of the block's shared memory.
    count : int
        Accesses folded into this report.
    detail : int
        Depends on the kind: waiting threads (deadlock), exited threads (divergent_block), the
        lane (divergent_warp), blocks that have arrived (dishonest_barrier).
    """

    kind: str
    region: Region | None
    is_shared: bool
    offset_bytes: int
    address: int
    size_bytes: int
    count: int
    detail: int
    first: Access
    second: Access


@dataclass(frozen=True)
class Counters:
    """What a launch did.

    Attributes
    ----------
    grid_barriers : int
        Grid barriers that every block passed.
    block_barriers : int
        ``__syncthreads`` completed, over all blocks.
    task_blocks : tuple of int, or None
        Per task, the number of blocks that touched memory in it; None without race checks.
    arena_touched_bytes : int or None
        Bytes of the arena read or written; None without race checks.
    """

    grid_barriers: int
    block_barriers: int
    task_blocks: tuple[int, ...] | None
    arena_touched_bytes: int | None


@dataclass(frozen=True)
class LaunchResult:
    """Findings, counters, and the total number of accesses that raced."""

    reports: tuple[Report, ...]
    counters: Counters
    num_races: int
    regions: tuple[Region, ...]


def _merge_regions(regions: Sequence[Region]) -> list[Region]:
    """Sorted and disjoint: regions that overlap (one array given twice) become one."""
    merged: list[Region] = []
    for region in sorted((r for r in regions if r.size_bytes), key=lambda r: (r.address, r.size_bytes)):
        last = merged[-1] if merged else None
        if last is None or region.address >= last.address + last.size_bytes:
            merged.append(region)
            continue
        end = max(last.address + last.size_bytes, region.address + region.size_bytes)
        merged[-1] = Region(
            name=f"{last.name} / {region.name}",
            address=last.address,
            size_bytes=end - last.address,
            initialised=last.initialised or region.initialised,
            read_only=last.read_only and region.read_only,
            exempt=last.exempt and region.exempt,
            arena=last.arena and region.arena,
            output=last.output and region.output,
            itemsize_bytes=last.itemsize_bytes if last.itemsize_bytes == region.itemsize_bytes else 0,
        )
    return merged


def parse_order(order: str | int) -> tuple[int, int]:
    """The runtime's code of an order, and its seed.

    Raises
    ------
    OptionError
        Unless it is "forward", "reverse" or an integer seed.
    """
    if isinstance(order, int) and not isinstance(order, bool):
        return 2, order & 0xFFFFFFFFFFFFFFFF
    if order == "forward":
        return 0, 0
    if order == "reverse":
        return 1, 0
    raise OptionError(f"order must be 'forward', 'reverse' or an integer seed, got {order!r}")


def _access(raw: Any) -> Access:
    return Access(
        block=raw.block,
        thread=raw.thread,
        task=None if raw.task == NO_TASK else raw.task,
        stage=None if raw.stage == NO_TASK else raw.stage,
        is_write=bool(raw.is_write),
        waits_in=WAITS.get(raw.wait, "?"),
    )


def _report(raw: Any, regions: Sequence[Region]) -> Report:
    return Report(
        kind=KINDS.get(raw.kind, f"kind {raw.kind}"),
        region=regions[raw.region] if raw.region < len(regions) else None,
        is_shared=raw.region == REGION_SHARED,
        # Unsigned there; an access below the start is negative here.
        offset_bytes=raw.offset if raw.offset < 1 << 63 else raw.offset - (1 << 64),
        address=raw.address,
        size_bytes=raw.size,
        count=raw.count,
        detail=raw.detail,
        first=_access(raw.first),
        second=_access(raw.second),
    )


_launch_lock = threading.Lock()
# A process forked during a launch of another thread would find it locked for ever.
os.register_at_fork(
    before=_launch_lock.acquire, after_in_parent=_launch_lock.release, after_in_child=_launch_lock.release
)


def launch(
    kernel: EmulatedKernel,
    params: bytes,
    regions: Sequence[Region],
    *,
    num_blocks: int,
    threads_per_block: int,
    shared_bytes: int = 0,
    cluster_blocks: int = 1,
    order: str | int = "forward",
    num_tasks: int = 0,
    barrier_error_address: int = 0,
    idle_rounds: int = 200,
    written: WrittenBytes | None = None,
) -> LaunchResult:
    """Run the kernel's threads as fibers and return what was found.

    Nothing is raised for findings: see ``report.check_reports``. Without race checks the regions
    are not used, and a stray access does what it does in any C++ program.

    Parameters
    ----------
    params : bytes
        The parameter block, ``TkParams``.
    regions : sequence of Region
        All global memory that the kernel may touch.
    shared_bytes : int
        Dynamic shared memory of a block.
    barrier_error_address : int
        Address of the header's error word: once it is set, threads may leave the kernel early.
    idle_rounds : int
        Rounds in which every thread that can run only polls, without any change, after which
        the launch counts as deadlocked.
    written : WrittenBytes, optional
        What launches before this one wrote, in the same regions; this launch's bytes are added.
    """
    code, seed = parse_order(order)
    if num_blocks < 1 or threads_per_block < 1 or threads_per_block > 1024 or num_blocks % cluster_blocks:
        raise OptionError(
            f"cannot launch {num_blocks} blocks of {threads_per_block} threads in clusters of {cluster_blocks}: "
            "needs at least one block, 1 to 1024 threads, and whole clusters"
        )
    runtime = load_runtime()
    merged = _merge_regions(regions)
    masks = [None if written is None else written.mask(region) for region in merged]
    c_regions = (_Region * max(len(merged), 1))(
        *(_Region(r.address, r.size_bytes, r.flags, 0, mask) for r, mask in zip(merged, masks, strict=True))
    )
    c_params = ctypes.create_string_buffer(params, len(params) + 8)
    aligned = (ctypes.addressof(c_params) + 7) & ~7
    if aligned != ctypes.addressof(c_params):
        ctypes.memmove(aligned, params, len(params))
    task_blocks = (ctypes.c_uint32 * max(num_tasks, 1))()
    request = _Request(
        entry=kernel.entry,
        params=aligned,
        barrier_error=barrier_error_address or None,
        regions=ctypes.addressof(c_regions),
        num_regions=len(merged),
        num_blocks=num_blocks,
        threads_per_block=threads_per_block,
        cluster_blocks=cluster_blocks,
        shared_bytes=shared_bytes,
        order=code,
        seed=seed,
        idle_rounds=idle_rounds,
        check_races=int(kernel.check_races),
        num_tasks=num_tasks,
        task_blocks=ctypes.addressof(task_blocks),
    )
    if runtime.tk_emu_request_bytes() != ctypes.sizeof(_Request):
        raise EmulatorError("the emulator's runtime and trainkernel/emulator/launch.py disagree on Request")
    with _launch_lock:
        runtime.tk_emu_launch(ctypes.addressof(request))
    reports = [_report(request.reports[i], merged) for i in range(request.num_reports)]
    if request.shared_overrun:
        reports.append(_shared_overrun(request.shared_overrun - 1, shared_bytes))
    counters = Counters(
        grid_barriers=request.grid_barriers_max,
        block_barriers=request.block_barriers,
        task_blocks=tuple(task_blocks)[:num_tasks] if kernel.check_races else None,
        arena_touched_bytes=request.arena_touched_bytes if kernel.check_races else None,
    )
    return LaunchResult(tuple(reports), counters, request.races, tuple(merged))


def _shared_overrun(block: int, shared_bytes: int) -> Report:
    nobody = Access(block, 0, None, None, True, "running")
    return Report("out_of_bounds", None, True, shared_bytes, 0, 0, 1, 0, nobody, nobody)
