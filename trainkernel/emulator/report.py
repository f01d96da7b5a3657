"""Findings of a launch as text, and the errors that carry it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainkernel.emulator.launch import Access, LaunchResult, Region, Report
from trainkernel.errors import EmulatorError, RaceError

_MAX_SHOWN = 12


class Names:
    """How reports name tasks and arena bytes.

    Parameters
    ----------
    tasks : sequence
        Objects with ``stage``, ``name`` and ``operations``; the index is the task id.
    arena : sequence
        Objects with ``name``, ``offset_bytes`` (from the workspace's start), ``size_bytes``,
        ``first_stage`` and ``last_stage``: the arena's layout over time.
    workspace_address : int
    """

    def __init__(self, tasks: Sequence[Any] = (), arena: Sequence[Any] = (), workspace_address: int = 0) -> None:
        self.tasks = tasks
        self.arena = arena
        self.workspace_address = workspace_address

    def task(self, access: Access) -> str:
        if access.task is None:
            return "no task"
        if access.task >= len(self.tasks):
            return f"task {access.task} (stage {access.stage})"
        task = self.tasks[access.task]
        operations = ", ".join(str(name) for name in task.operations)
        return f"task {access.task} {task.name!r} (stage {access.stage}; {operations or 'no operations'})"

    def access(self, access: Access) -> str:
        verb = "write" if access.is_write else "read"
        return f"{verb} by {self.task(access)} in block {access.block} thread {access.thread}"

    def place(self, report: Report) -> str:
        if report.is_shared:
            return f"shared memory +{report.offset_bytes}"
        region = report.region
        if region is None:
            return f"address {report.address:#x}"
        if region.arena and self.arena:
            return self._arena_place(region, report)
        return f"{region.name!r} {_element(region, report.offset_bytes)}"

    def _arena_place(self, region: Region, report: Report) -> str:
        offset = region.address - self.workspace_address + report.offset_bytes
        stages = [access.stage for access in (report.first, report.second) if access.stage is not None]
        holders = [r for r in self.arena if r.offset_bytes <= offset < r.offset_bytes + r.size_bytes]
        live = [r for r in holders if any(r.first_stage <= stage <= r.last_stage for stage in stages)]
        names = " / ".join(f"{r.name!r} +{offset - r.offset_bytes}" for r in live or holders)
        return f"{names or 'arena'} (workspace +{offset})"


def _element(region: Region, offset: int) -> str:
    if region.itemsize_bytes:
        return f"element {offset // region.itemsize_bytes} (byte {offset})"
    return f"+{offset}"


def _nearest(report: Report, regions: Sequence[Region]) -> str:
    """Where a stray address lies, as distance to the nearest region."""
    if report.is_shared:
        return f"shared memory +{report.offset_bytes} is past the block's shared memory"
    best: tuple[int, str] | None = None
    for region in regions:
        end = region.address + region.size_bytes
        if report.address + report.size_bytes > end > report.address >= region.address:
            offset = report.address - region.address
            return f"the access starts at +{offset} of {region.name!r} and reaches past its {region.size_bytes} bytes"
        if report.address >= end:
            found = (report.address - end, f"{report.address - end} bytes past the end of {region.name!r}")
        else:
            found = (region.address - report.address, f"{region.address - report.address} bytes before {region.name!r}")
        if best is None or found < best:
            best = found
    return best[1] if best else "no memory was given to the kernel"


def _race(report: Report, names: Names, _: Sequence[Region]) -> str:
    return (
        f"race at {names.place(report)}, {report.size_bytes} bytes: {names.access(report.first)}, then "
        f"{names.access(report.second)}; no barrier orders them ({report.count} such accesses)"
    )


def _uninitialised(report: Report, names: Names, _: Sequence[Region]) -> str:
    return (
        f"uninitialised read at {names.place(report)}, {report.size_bytes} bytes: {names.access(report.first)}, but "
        f"nobody wrote there in this launch ({report.count} such accesses)"
    )


def _async_pending(report: Report, names: Names, _: Sequence[Region]) -> str:
    return (
        f"cp.async in flight at {names.place(report)}: {names.access(report.first)} before the wait "
        f"({report.count} such accesses)"
    )


def _unwritten(report: Report, names: Names, _: Sequence[Region]) -> str:
    return f"output {names.place(report)} was never written ({report.count} bytes in all)"


def _unawaited(report: Report, names: Names, _: Sequence[Region]) -> str:
    return (
        f"bulk copy to {names.place(report)} that nobody waited for: {names.access(report.first)} "
        f"({report.count} such copies)"
    )


def _unfenced(report: Report, names: Names, _: Sequence[Region]) -> str:
    return (
        f"bulk copy without a fence: {names.access(report.first)} starts it at {names.place(report)} and has passed "
        "no tk_fence_async since its latest block barrier"
    )


def _out_of_bounds(report: Report, names: Names, regions: Sequence[Region]) -> str:
    return (
        f"out of bounds: {report.size_bytes}-byte {names.access(report.first)} at {report.address:#x}: "
        f"{_nearest(report, regions)}"
    )


def _read_only(report: Report, names: Names, _: Sequence[Region]) -> str:
    return f"write to an input that is not in place, {names.place(report)}: {names.access(report.first)}"


def _misaligned(report: Report, names: Names, _: Sequence[Region]) -> str:
    where = names.place(report)
    return f"misaligned {report.size_bytes}-byte {names.access(report.first)} at {where} ({report.address:#x})"


def _waiter(access: Access, names: Names) -> str:
    return f"block {access.block} thread {access.thread} in {access.waits_in} ({names.task(access)})"


def _deadlock(report: Report, names: Names, _: Sequence[Region]) -> str:
    text = f"deadlock: {report.detail} threads wait for ever; {_waiter(report.first, names)}"
    if report.second.waits_in != report.first.waits_in:
        text += f", {_waiter(report.second, names)}"
    return text


def _divergent_block(report: Report, names: Names, _: Sequence[Region]) -> str:
    return (
        f"divergent __syncthreads: {_waiter(report.first, names)} waits, but {report.detail} threads of the block "
        f"have left the kernel, such as thread {report.second.thread} ({names.task(report.second)})"
    )


def _divergent_warp(report: Report, names: Names, _: Sequence[Region]) -> str:
    return (
        f"divergent warp: {_waiter(report.first, names)} waits for lane {report.detail}, which has left the kernel, "
        "does not exist, or is in another warp operation or mask"
    )


def _dishonest_barrier(report: Report, names: Names, _: Sequence[Region]) -> str:
    access = report.first
    return (
        f"grid barrier passed too early by block {access.block} thread {access.thread} after {names.task(access)}: "
        f"{report.detail} blocks had arrived, and it must have seen, or met at a __syncthreads the thread that has "
        "seen, all of them arrive"
    )


def _stack_overflow(report: Report, names: Names, _: Sequence[Region]) -> str:
    access = report.first
    return (
        f"stack overflow in {names.task(access)}, block {access.block} thread {access.thread}: a thread's local "
        "variables need more than 64 KiB"
    )


def _segmentation(report: Report, names: Names, regions: Sequence[Region]) -> str:
    access = report.first
    return (
        f"illegal address {report.address:#x} in {names.task(access)}, block {access.block} thread {access.thread}: "
        f"{_nearest(report, regions)}"
    )


def _exited_block(report: Report, names: Names, _: Sequence[Region]) -> str:
    return f"{names.access(report.first)} touches the shared memory of a block that has left the kernel"


def _memory(report: Report, names: Names, _: Sequence[Region]) -> str:
    return "the host has no memory left for the threads' stacks or the race detector's shadow; pass fewer num_blocks"


_TEXTS: dict[str, Callable[[Report, Names, Sequence[Region]], str]] = {
    "race": _race,
    "uninitialised": _uninitialised,
    "async_pending": _async_pending,
    "unwritten": _unwritten,
    "unawaited": _unawaited,
    "unfenced": _unfenced,
    "out_of_bounds": _out_of_bounds,
    "read_only": _read_only,
    "misaligned": _misaligned,
    "deadlock": _deadlock,
    "divergent_block": _divergent_block,
    "divergent_warp": _divergent_warp,
    "dishonest_barrier": _dishonest_barrier,
    "stack_overflow": _stack_overflow,
    "segmentation": _segmentation,
    "exited_block": _exited_block,
    "memory": _memory,
}


def describe(report: Report, names: Names, regions: Sequence[Region]) -> str:
    """One line on one finding."""
    text = _TEXTS.get(report.kind)
    return text(report, names, regions) if text else f"{report.kind} at {names.place(report)}"


def check_reports(result: LaunchResult, names: Names | None = None, what: str = "the emulated kernel") -> None:
    """Raise if the launch found anything.

    Raises
    ------
    RaceError
        If there is a race among the findings.
    EmulatorError
        For every other finding.
    """
    if not result.reports:
        return
    names = names or Names()
    lines = [describe(report, names, result.regions) for report in result.reports]
    if len(lines) > _MAX_SHOWN:
        lines[_MAX_SHOWN:] = [f"and {len(lines) - _MAX_SHOWN} more findings"]
    has_race = any(report.kind == "race" for report in result.reports)
    total = f", {result.num_races} racing accesses" if has_race else ""
    head = f"{what}: {len(result.reports)} findings{total}" if len(result.reports) > 1 else f"{what}{total}"
    text = head + (":\n  " if len(lines) > 1 else ": ") + "\n  ".join(lines)
    raise (RaceError if has_race else EmulatorError)(text)
