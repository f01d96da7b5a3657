"""The verifier between planning and emission: re-derives hazards from the plan's bytes.

It does not look at how the scheduler chose stages or the planner barriers. It walks the tasks
in the order in which the kernel will run them (loop bodies twice, which shows every hazard between
neighbouring iterations), keeps for every byte range who touched it since the last barrier, and
refuses a plan in which two conflicting tasks meet without a barrier between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainkernel.errors import VerificationError
from trainkernel.memory import ByteRange, Frame, MemoryPlan, byte_range
from trainkernel.schedule import Schedule, Task


@dataclass(frozen=True)
class _Touch:
    task: str
    place: ByteRange
    write: bool
    pass_number: tuple[int, ...]


class _Walk:
    """Accesses since the last barrier, in execution order."""

    def __init__(self) -> None:
        self._since: list[_Touch] = []
        self._written: dict[str, list[ByteRange]] = {}

    def barrier(self) -> None:
        self._since.clear()

    def touch(self, task: Task, frame: Frame, passes: tuple[int, ...]) -> None:
        own: list[_Touch] = []
        for name in task.reads:
            place = byte_range(frame.storage(name))
            if place is not None:
                own.append(_Touch(task.name, place, False, passes))
                self._check_written(task, name, place)
        destinations = [frame.storage(name) for name in task.stores]
        if task.copy is not None:
            destinations.append(frame.destination(task.copy.destination, task.copy.dtype))
        for storage in destinations:
            place = byte_range(storage)
            assert place is not None
            own.append(_Touch(task.name, place, True, passes))
            self._written.setdefault(place.space, []).append(place)
        for mine in own:
            for other in self._since:
                if (mine.write or other.write) and mine.place.overlaps(other.place):
                    raise VerificationError(
                        f"tasks {other.task!r} and {task.name!r} meet at {mine.place} without a barrier between them"
                    )
        self._since += own

    def _check_written(self, task: Task, name: str, place: ByteRange) -> None:
        if place.space != "arena":
            return
        if not any(place.overlaps(written) for written in self._written.get("arena", [])):
            raise VerificationError(f"task {task.name!r} reads {name!r} at {place}, which nothing has written")


def verify_plan(schedule: Schedule, plan: MemoryPlan) -> None:
    """Check that every hazard of the plan crosses a barrier and no live buffers overlap.

    Raises
    ------
    VerificationError
        Naming the tasks or buffers.
    """
    _check_lifetimes(plan, plan.end_bytes)
    _walk(Frame.outermost(schedule, plan), _Walk(), ())


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


def _walk(frame: Frame, walk: _Walk, passes: tuple[int, ...]) -> None:
    for stage, waits in zip(frame.schedule.stages, frame.plan.barriers, strict=True):
        if waits:
            walk.barrier()
        for task in stage.tasks:
            if task.loop is None:
                walk.touch(task, frame, passes)
                continue
            inner = frame.inside(task.loop)
            for number in range(2):
                _walk(inner, walk, (*passes, number))
                if inner.plan.back_edge:
                    walk.barrier()
