"""The verifier between planning and emission: re-derives hazards from the plan's bytes.

It does not look at how the scheduler chose stages or the planner barriers. It walks the tasks
in the order in which the kernel will run them (loop bodies twice, which shows every hazard between
neighbouring iterations; the barriers of a loop that may take no step order nothing before it), keeps
for every byte range who touched it since the last barrier, and refuses a plan in which two
conflicting tasks meet without a barrier of the scope that they need: the grid's, or, between tasks
that touch the rows of their own piece, the block's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from trainkernel.errors import VerificationError
from trainkernel.memory import ByteRange, Frame, MemoryPlan, Scope, byte_range, copied_range, home_range
from trainkernel.schedule import BlockRegion, Rounded, Schedule, Staged, Task

_Since: TypeAlias = dict[str, dict[str, dict[tuple[ByteRange, bool], str]]]
"""By scope, then by memory space, then by what was touched and how: who was the last."""


@dataclass(frozen=True)
class _Touch:
    task: str
    place: ByteRange
    write: bool


class _Walk:
    """Accesses since the last barrier of each scope, in execution order."""

    def __init__(self) -> None:
        self._since: _Since = {"grid": {}, "block": {}}
        self._written: dict[str, set[ByteRange]] = {}
        # What a loop keeps near: copies and carries; the arrays of both.
        self._kept: list[tuple[ByteRange, frozenset[str]]] = []
        self._homes: list[tuple[ByteRange, bool]] = []

    def barrier(self, scope: Scope) -> None:
        """A grid barrier is a block barrier too."""
        if scope is not None:
            self._since["block"].clear()
        if scope == "grid":
            self._since["grid"].clear()

    def since(self) -> _Since:
        """What was touched since the last barrier of each scope."""
        return {
            scope: {space: dict(touched) for space, touched in spaces.items()} for scope, spaces in self._since.items()
        }

    def may_skip(self, before: _Since) -> None:
        """A loop may have taken no step: its barriers order nothing of what was touched ``before`` it."""
        for scope, spaces in before.items():
            for space, touched in spaces.items():
                self._since[scope][space] = {**touched, **self._since[scope].get(space, {})}

    def copy_early(self, task: Task, names: frozenset[str], frame: Frame) -> None:
        """Before the grid barrier in front of a region some of its copies start: nobody may have written to those."""
        assert task.region is not None
        for name in sorted(names & task.region.copied):
            place = byte_range(frame.storage(name))
            assert place is not None
            for (other, write), writer in self._since["grid"].get(place.space, {}).items():
                if write and other.overlaps(place):
                    raise VerificationError(f"task {task.name!r} copies {name!r} before task {writer!r} has written it")

    def touch(self, task: Task, frame: Frame) -> None:
        if task.region is not None:
            self._region(task, task.region, frame)
            return
        reads = [(name, byte_range(frame.storage(name))) for name in task.reads]
        writes = [byte_range(frame.storage(name)) for name in task.stores]
        if task.copy is not None:
            writes.append(copied_range(task.copy, frame, None))
        self._all(task, reads, writes)

    def enter(self, task: Task, region: BlockRegion, inner: Frame) -> None:
        """Before a loop's first step: what stays near is fetched, and a block barrier follows."""
        homes = {copy: home_range(copy, region, inner) for copy in region.shared.kept}
        self._since["block"].pop("shared", None)
        self._all(
            task,
            [(copy.buffer, home) for copy, home in homes.items()],
            [_copy_range(region, copy) for copy in region.shared.kept],
        )
        self.barrier("block")
        places = inner.schedule.places
        for copy, home in homes.items():
            carried = copy in region.shared.returned
            self._check_home(task, home, carried)
            names = [name for name, place in places.items() if carried and place == places[copy.buffer]]
            self._kept.append((_copy_range(region, copy), frozenset(names)))
            self._homes.append((home, carried))

    def leave(self, task: Task, region: BlockRegion, inner: Frame) -> None:
        """After the last step the carries that stayed near are written to their arrays."""
        self._kept, self._homes = [], []
        returned = region.shared.returned
        reads = [(copy.buffer, _copy_range(region, copy)) for copy in returned]
        self._all(task, reads, [home_range(copy, region, inner) for copy in returned])

    def _check_kept(self, task: Task, name: str | None, place: ByteRange | None) -> None:
        """Nobody writes to what stays near but under a carry's name."""
        for kept, names in self._kept:
            if place is not None and place.overlaps(kept) and name not in names:
                raise VerificationError(f"task {task.name!r} writes {place}, where a loop keeps {kept}")

    def _check_home(self, task: Task, place: ByteRange, write: bool) -> None:
        """Nobody touches the array of a carry that stays near, nor writes to that of another copy."""
        for home, carried in self._homes:
            if place.overlaps(home) and (write or carried):
                raise VerificationError(f"task {task.name!r} touches {place}, which a loop keeps near")

    def _region(self, task: Task, region: BlockRegion, frame: Frame) -> None:
        """The parts of a piece; then, as far as shared memory goes, those of the piece after it."""
        for second in range(2 if region.split.pieces > 1 else 1):
            near_only = second > 0
            if not near_only:
                self._free_shared()
            # What is the same for every piece is fetched once.
            fetched: list[Staged | Rounded] = [
                copy for copy in region.shared.staged if copy.piece_stride or not near_only
            ]
            fetched += [] if near_only else list(region.shared.rounded)
            self._all(task, [], [_copy_range(region, copy) for copy in fetched])
            for copy in fetched:
                self._check_kept(task, None, _copy_range(region, copy))
            for number, part in enumerate(region.parts):
                if region.waits[number]:
                    self.barrier("block")
                reads = [(name, self._in_rows(name, region, frame)) for name in part.reads]
                reads += [(copy.buffer, _copy_range(region, copy)) for copy in region.copies[number]]
                writes = [self._in_rows(name, region, frame) for name in part.stores]
                for name, place in zip(part.stores, writes, strict=True):
                    self._check_kept(part, name, place)
                scratch = ByteRange("shared", region.shared.end_bytes, region.shared.end_bytes + 1)
                if region.scratch[number] == "write":
                    writes.append(scratch)
                    self._check_kept(part, None, scratch)
                if part.copy is not None:
                    writes.append(copied_range(part.copy, frame, region))
                    self._check_kept(part, None, writes[-1])
                if near_only:
                    reads = [(name, place) for name, place in reads if place is not None and place.space == "shared"]
                    writes = [place for place in writes if place is not None and place.space == "shared"]
                self._all(part, reads, writes)
                if region.scratch[number] == "read":
                    self._since["block"].setdefault("shared", {})[scratch, False] = part.name
            if region.waits[-1]:
                self.barrier("block")

    def _free_shared(self) -> None:
        """A region's shared memory is free when it starts, but for what a loop keeps there."""
        near = self._since["block"].get("shared", {})
        for touched in [each for each in near if not any(each[0].overlaps(kept) for kept, _ in self._kept)]:
            del near[touched]

    @staticmethod
    def _in_rows(name: str, region: BlockRegion, frame: Frame) -> ByteRange | None:
        place = byte_range(frame.storage(name))
        return replace(place, split=region.split) if place is not None and name in region.aligned else place

    def _all(
        self, task: Task, reads: Sequence[tuple[str, ByteRange | None]], writes: Sequence[ByteRange | None]
    ) -> None:
        own: list[_Touch] = []
        for name, place in reads:
            if place is not None:
                own.append(_Touch(task.name, place, False))
                self._check_home(task, place, False)
                self._check_written(task, name, place)
        for place in writes:
            assert place is not None
            own.append(_Touch(task.name, place, True))
            self._check_home(task, place, True)
            self._written.setdefault(place.space, set()).add(place)
        for scope, since in self._since.items():
            for mine in own:
                for (place, write), other in since.get(mine.place.space, {}).items():
                    if (mine.write or write) and mine.place.scope(place) == scope:
                        where = f"meet at {mine.place} without a {scope} barrier between them"
                        raise VerificationError(f"tasks {other!r} and {task.name!r} {where}")
        for since in self._since.values():
            for mine in own:
                since.setdefault(mine.place.space, {})[mine.place, mine.write] = mine.task

    def _check_written(self, task: Task, name: str, place: ByteRange) -> None:
        if place.space not in ("arena", "shared"):
            return
        written = self._written.get(place.space, set())
        if place not in written and not any(place.overlaps(other) for other in written):
            raise VerificationError(f"task {task.name!r} reads {name!r} at {place}, which nothing has written")


def _copy_range(region: BlockRegion, copy: Staged | Rounded) -> ByteRange:
    start = region.shared.at(copy)
    return ByteRange("shared", start, start + copy.size_bytes)


def verify_plan(schedule: Schedule, plan: MemoryPlan) -> None:
    """Check that every hazard of the plan crosses a barrier and no live buffers overlap.

    Raises
    ------
    VerificationError
        Naming the tasks or buffers.
    """
    _check_lifetimes(plan, plan.end_bytes)
    _walk(Frame.outermost(schedule, plan), _Walk())


def _check_lifetimes(plan: MemoryPlan, limit: int) -> None:
    entries = list(plan.entries.items())
    for position, (name, entry) in enumerate(entries):
        if entry.offset_bytes + entry.size_bytes > limit:
            raise VerificationError(f"buffer {name!r} ends beyond the workspace of {limit} bytes")
        for other_name, other in entries[position + 1 :]:
            lives = entry.first_stage <= other.last_stage and other.first_stage <= entry.last_stage
            first, second = entry.offset_bytes, other.offset_bytes
            if lives and first < second + other.size_bytes and second < first + entry.size_bytes:
                raise VerificationError(f"buffers {name!r} and {other_name!r} are alive in the same bytes")
    for inner in plan.loops.values():
        _check_lifetimes(inner, limit)


def _walk(frame: Frame, walk: _Walk) -> None:
    plan = frame.plan
    for stage, scope, early in zip(frame.schedule.stages, plan.barriers, plan.early, strict=True):
        if early and scope != "grid":
            names = ", ".join(task.name for task in stage.tasks)
            raise VerificationError(f"stage {names!r} copies {sorted(early)} before a grid barrier that it has not")
        for task in stage.tasks:
            if task.region is not None:
                walk.copy_early(task, early, frame)
        walk.barrier(scope)
        for task in stage.tasks:
            if task.loop is None:
                walk.touch(task, frame)
                continue
            inner, keeper = frame.inside(task.loop), task.loop.keeper
            if keeper is not None:
                walk.enter(task, keeper, inner)
            before = walk.since()
            for _ in range(2):
                _walk(inner, walk)
                walk.barrier(inner.plan.back_edge)
            if not isinstance(task.loop.loop.length, int) or task.loop.loop.length < 1:
                walk.may_skip(before)
            if keeper is not None:
                walk.leave(task, keeper, inner)
