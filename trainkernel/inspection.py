"""Stage by stage: how the work of a kernel is split, what it moves and computes, and how long it takes.

``inspect_kernel`` counts and estimates from the schedule; ``trainkernel.measurement`` adds what time stamps
say. Both tell when something starts, so that ``trainkernel.inspection_views`` can draw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from trainkernel.ir import MAX_LENGTH
from trainkernel.memory import Frame, Scope
from trainkernel.region_plans import Split
from trainkernel.schedule import LoopSchedule, Stage, Task
from trainkernel.target import Target
from trainkernel.work import Work, WorkCounter, bound_us

MOST_STEPS = 100
"""Steps that a loop whose length is a scalar takes in a report, where its maximum is not smaller."""


@dataclass(frozen=True)
class Interval:
    """From the start of the kernel, microseconds."""

    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class PartReport:
    """A task of a stage, or a part of its region.

    Attributes
    ----------
    name, kind : str
    how : str
        Path and tiles of a product or reduction; may be empty.
    num_pieces : int
        Units that blocks share; for a part those of its region.
    waits : bool
        A block barrier stands in front.
    work : Work
    estimated : Interval
    measured : Interval or None
        For a part of a region: of the last piece that block 0 computed. Tasks side by side have no time
        of their own.
    """

    name: str
    kind: str
    how: str
    num_pieces: int
    waits: bool
    work: Work
    estimated: Interval
    measured: Interval | None = None


@dataclass(frozen=True)
class BarrierReport:
    """The barrier in front of a stage, or at the end of a loop's step; ``scope`` is ``"grid"`` or ``"block"``."""

    scope: str
    estimated: Interval
    measured: Interval | None = None


@dataclass(frozen=True)
class LoopReport:
    """A loop: what its body does in a step, and for how many steps.

    Estimates inside are those of the first step, measurements those of the last. ``length`` is the number of
    steps, or the scalar that holds it.
    """

    name: str
    length: int | str
    steps: int
    stages: tuple[StageReport, ...]
    back_edge: BarrierReport | None


@dataclass(frozen=True)
class StageReport:
    """What runs between two barriers.

    Attributes
    ----------
    number : int
        As time stamps and the messages of barriers count: those of loop bodies after their loop.
    scope : str
        ``"block"`` if a region is all of it, ``"grid"`` if the whole grid works together, else ``"grid and block"``.
    barrier : BarrierReport or None
    num_pieces : int
    split : Split or None
        Of the region.
    parts : tuple of PartReport
        Of the region, in order; empty without one.
    tasks : tuple of PartReport
        The other tasks, side by side.
    loop : LoopReport or None
        Then the stage is nothing else.
    work : Work
        Of a loop: of all its steps.
    estimated : Interval
    measured : Interval or None
        Of block 0, without the barrier; None if its stamps are not from this launch.
    """

    number: int
    scope: str
    barrier: BarrierReport | None
    num_pieces: int
    split: Split | None
    parts: tuple[PartReport, ...]
    tasks: tuple[PartReport, ...]
    loop: LoopReport | None
    work: Work
    estimated: Interval
    measured: Interval | None = None


@dataclass(frozen=True)
class KernelReport:
    """A whole kernel; ``measured_us`` is the median of ``num_launches`` launches on ``device``."""

    target: str
    stages: tuple[StageReport, ...]
    estimated_us: float
    measured_us: float | None = None
    num_launches: int = 0
    device: str = ""


# ---------------------------------------------------------------------------- counted and estimated


def loop_steps(generated: Any, most: int | None = None) -> dict[int, int]:
    """The number of steps for each scalar input that is a loop's length: its maximum, but at most ``most``.

    Without ``most``, at most ``MOST_STEPS``.
    """
    limit = MOST_STEPS if most is None else min(most, MAX_LENGTH)
    return {scalar.index: min(scalar.maximum, limit) for scalar in generated.scalars if scalar.maximum is not None}


def inspect_kernel(generated: Any, steps: Mapping[int, int] | None = None) -> KernelReport:
    """The report of a GeneratedKernel, with a lower bound of each time on its target.

    The bound counts each buffer that a task reads or writes once at full memory bandwidth, and a product's
    multiply-adds at the peak rate of as many multiprocessors as it has pieces. Tasks of a stage share the
    bandwidth; parts of a region follow each other. Latencies are not in it.

    Parameters
    ----------
    generated : GeneratedKernel
    steps : mapping of input index to int, optional
        Of each loop whose length is a scalar; ``loop_steps(generated)`` where left out.
    """
    estimator = _Estimator(generated.target, loop_steps(generated) if steps is None else steps)
    frame = Frame.outermost(generated.schedule, generated.plan)
    stages, end_us = estimator.stages(frame, 0.0)
    return KernelReport(generated.target.name, stages, end_us)


class _Estimator:
    """A walk through the schedule, in the order of the emitted source."""

    def __init__(self, target: Target, steps: Mapping[int, int]) -> None:
        self._target = target
        self._steps = steps
        self._numbers = count()

    def stages(self, frame: Frame, start_us: float) -> tuple[tuple[StageReport, ...], float]:
        """The stages of a frame, and when they end."""
        counter = WorkCounter(frame.schedule)
        reports = []
        for stage, scope in zip(frame.schedule.stages, frame.plan.barriers, strict=True):
            barrier = self._barrier(scope, start_us)
            start_us = start_us if barrier is None else barrier.estimated.end_us
            loop = stage.tasks[0].loop
            if loop is not None:
                report = self._loop_stage(loop, frame, barrier, start_us)
            else:
                report = self._stage(stage, counter, barrier, start_us)
            reports.append(report)
            start_us = report.estimated.end_us
        return tuple(reports), start_us

    def _barrier(self, scope: Scope, start_us: float) -> BarrierReport | None:
        if scope is None:
            return None
        us = self._target.grid_barrier_us if scope == "grid" else self._target.block_barrier_us
        return BarrierReport(scope, Interval(start_us, us))

    def _stage(self, stage: Stage, counter: WorkCounter, barrier: BarrierReport | None, start_us: float) -> StageReport:
        number = next(self._numbers)
        regions = [task for task in stage.tasks if task.region is not None]
        others = [task for task in stage.tasks if task.region is None]
        parts = tuple(part for task in regions for part in self._parts(task, counter, start_us))
        tasks = tuple(self._part(task, counter.task(task), start_us, task.num_pieces) for task in others)
        work = _sum(counter.task(task) for task in stage.tasks)
        ends = [start_us, *(part.estimated.end_us for part in (*parts, *tasks))]
        moved_us = (work.read_bytes + work.written_bytes) / self._target.memory_bytes_per_us
        region = regions[0].region if regions else None
        return StageReport(
            number=number,
            scope="grid" if not regions else "grid and block" if others else "block",
            barrier=barrier,
            num_pieces=stage.num_pieces,
            split=None if region is None else region.split,
            parts=parts,
            tasks=tasks,
            loop=None,
            work=work,
            estimated=Interval(start_us, max(moved_us, max(ends) - start_us)),
        )

    def _part(self, task: Task, work: Work, start_us: float, num_pieces: int, waits: bool = False) -> PartReport:
        how = "" if task.plan is None else str(task.plan)
        us = bound_us(task, work, num_pieces, self._target) + (self._target.block_barrier_us if waits else 0.0)
        return PartReport(task.name, task.kind, how, num_pieces, waits, work, Interval(start_us, us))

    def _parts(self, task: Task, counter: WorkCounter, start_us: float) -> list[PartReport]:
        assert task.region is not None
        reports = []
        for part, waits in zip(task.region.parts, task.region.waits, strict=False):
            reports.append(self._part(part, counter.task(part), start_us, task.num_pieces, waits))
            start_us = reports[-1].estimated.end_us
        return reports

    def _loop_stage(
        self, loop: LoopSchedule, frame: Frame, barrier: BarrierReport | None, start_us: float
    ) -> StageReport:
        number = next(self._numbers)
        length = loop.loop.length
        steps = length if isinstance(length, int) else self._steps[frame.storage(length).index]
        inner = frame.inside(loop)
        stages, end_us = self.stages(inner, start_us)
        back_edge = self._barrier(inner.plan.back_edge, end_us)
        step_us = (end_us if back_edge is None else back_edge.estimated.end_us) - start_us
        work = _sum(stage.work for stage in stages)
        work = Work(steps * work.read_bytes, steps * work.written_bytes, steps * work.flops)
        return StageReport(
            number=number,
            scope="grid",
            barrier=barrier,
            num_pieces=max((stage.num_pieces for stage in stages), default=0),
            split=None,
            parts=(),
            tasks=(),
            loop=LoopReport(loop.name, length, steps, stages, back_edge),
            work=work,
            estimated=Interval(start_us, steps * step_us),
        )


def _sum(works: Iterable[Work]) -> Work:
    total = Work()
    for work in works:
        total = Work(
            total.read_bytes + work.read_bytes, total.written_bytes + work.written_bytes, total.flops + work.flops
        )
    return total
