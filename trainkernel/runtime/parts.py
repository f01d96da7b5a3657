"""Runs cut into launches of a stated time: how many ticks each has, from what those before it took.

A run is a row of ticks: stages, and steps of loops at the top. What one takes depends on the kernel, the
device and the lengths of loops inside of it, never on data, so the time of the ticks of one kind is measured
once, by launches of one tick, and watched from then on. A launch is planned to take ``PLANNED_PART`` of what
it may, which is room for a device that has become slower since.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainkernel.errors import LaunchError
from trainkernel.runtime.driver import check, relaxed_capture
from trainkernel.runtime.memory import forget_event

PLANNED_PART = 0.5
"""The part of the time allowed that a launch is planned to take."""
MAX_LAUNCHES_AHEAD = 4
"""Launches of known length that may wait or run while the host goes on: what is left to do after an interrupt."""
ALL_TICKS = 2**62
_LEAST_MS = 1e-3


class LaunchTimeWarning(UserWarning):
    """A launch took longer than ``max_launch_ms``."""


class Segment(Protocol):
    """Neighbouring ticks that are alike; see ``trainkernel.facts.Segment``."""

    @property
    def inner(self) -> tuple[int, ...]: ...

    def num_ticks(self, values: Mapping[int, Any]) -> int: ...


@dataclass(frozen=True)
class Ticks:
    """Neighbouring ticks of one kind: those of one ``kind`` take the same time."""

    kind: Hashable
    num_ticks: int


@dataclass(frozen=True)
class Part:
    """What one launch runs: the ticks from ``first`` to before ``end``.

    ``ticks`` are the same by their kinds; ``is_known`` says whether the time of all has been measured.
    """

    first: int
    end: int
    ticks: tuple[Ticks, ...]
    is_known: bool

    def is_all_of(self, num_ticks: int) -> bool:
        """Whether this is a whole run of so many ticks, of known time."""
        return self.is_known and self.end - self.first == num_ticks


def ticks_of(segments: Sequence[Segment], values: Mapping[int, Any]) -> list[Ticks]:
    """All ticks of a run with these scalar inputs."""
    return [
        Ticks((place, *(values[index] for index in segment.inner)), segment.num_ticks(values))
        for place, segment in enumerate(segments)
    ]


class TickTimes:
    """What the ticks of a kernel take, and how many of them a launch may have.

    Parameters
    ----------
    max_launch_ms : float
        What a launch may take.
    name : str
        What messages call the kernel.
    """

    def __init__(self, max_launch_ms: float, name: str) -> None:
        self._limit_ms = max_launch_ms
        self.name = name
        self._ms: dict[Hashable, float] = {}
        self._warned = False

    def next_part(self, run: Sequence[Ticks], first: int) -> Part:
        """As many ticks from ``first`` on as fit into a launch, at least one; one alone if its time is not known."""
        room = PLANNED_PART * self._limit_ms
        taken: list[Ticks] = []
        place, end = 0, first
        for ticks in run:
            left = ticks.num_ticks - max(first - place, 0)
            place += ticks.num_ticks
            if left <= 0:
                continue
            ms = self._ms.get(ticks.kind)
            if ms is None and not taken:
                return Part(first, first + 1, (Ticks(ticks.kind, 1),), False)
            count = 0 if ms is None else min(left, max(int(room / ms), 0))
            if not taken:
                count = max(count, 1)
            if count:
                assert ms is not None
                taken.append(Ticks(ticks.kind, count))
                end += count
                room -= count * ms
            if count < left:
                break
        return Part(first, end, tuple(taken), True)

    def took(self, part: Part, ms: float) -> None:
        """Take note of the time of a launch; warns once if it was longer than allowed."""
        ms = max(ms, _LEAST_MS)
        count = part.end - part.first
        if len(part.ticks) == 1:
            self._ms[part.ticks[0].kind] = ms / count
        else:
            expected = sum(ticks.num_ticks * self._ms[ticks.kind] for ticks in part.ticks)
            for ticks in part.ticks:
                self._ms[ticks.kind] *= ms / expected
        if ms > self._limit_ms and not self._warned:
            self._warned = True
            why = (
                "one stage, or one step of a loop, is the least that a launch runs"
                if count == 1
                else f"its {count} stages and steps took less before; the launches that follow are shorter"
            )
            warnings.warn(
                f"a launch of kernel '{self.name}' took {ms:.3g} ms, and max_launch_ms is {self._limit_ms:g}: {why}",
                LaunchTimeWarning,
                stacklevel=2,
            )


class PartedRuns:
    """Runs as launches one after another on a stream.

    Parameters
    ----------
    driver : module
        ``cuda.bindings.driver``.
    times : TickTimes
        Told what each launch took.
    segments : sequence of Segment
        The ticks of a run.
    """

    def __init__(self, driver: Any, times: TickTimes, segments: Sequence[Segment]) -> None:
        self._driver = driver
        self._times = times
        self._segments = segments
        # Launches that are not known to be done, between the events before and after each; events of done ones.
        self._under_way: deque[tuple[Any, Any, Part]] = deque()
        self._free: list[tuple[Any, Any]] = []

    def launch(self, values: Mapping[int, Any], stream: Any, submit: Callable[[Part], None]) -> None:
        """Submit a run; returns when all but the last few of several launches are done, the first time all.

        If anything is raised meanwhile, a ``KeyboardInterrupt`` above all, what was submitted is waited for first.

        Parameters
        ----------
        values : mapping of int to number
            The scalar inputs, by input index.
        stream : CUstream
        submit : callable
            Launches a part on the stream.
        """
        run, first = ticks_of(self._segments, values), 0
        num_ticks = sum(ticks.num_ticks for ticks in run)
        with relaxed_capture(self._driver):
            try:
                while first < num_ticks:
                    part = self._next_part(run, first, num_ticks)
                    if part.is_all_of(num_ticks) and self._under_way:  # short runs are timed now and then
                        submit(part)
                    else:
                        self._submit_timed(part, stream, submit)
                    first = part.end
                while not all(part.is_known for _, _, part in self._under_way):
                    self._wait()
            except BaseException:
                self._free += [(start, end) for start, end, _ in self._under_way]
                self._under_way.clear()
                self._driver.cuStreamSynchronize(stream)
                raise

    def capture(self, values: Mapping[int, Any], submit: Callable[[Part], None]) -> None:
        """Submit a run on a stream that is being captured: the graph has these launches at each replay.

        Raises
        ------
        LaunchError
            If what a tick takes has not been measured; nothing was submitted then.
        """
        run = ticks_of(self._segments, values)
        num_ticks = sum(ticks.num_ticks for ticks in run)
        parts: list[Part] = []
        while (first := parts[-1].end if parts else 0) < num_ticks:
            parts.append(self._times.next_part(run, first))
            if not parts[-1].is_known:
                raise LaunchError(
                    f"kernel '{self._times.name}' has max_launch_ms, and what its stages and steps take is not known "
                    "while a stream is being captured; launch it once before the capture"
                )
        for part in parts:
            submit(part)

    def _next_part(self, run: Sequence[Ticks], first: int, num_ticks: int) -> Part:
        """The next launch, once the host is not too far ahead and what has been launched has told its time."""
        not_ready = self._driver.CUresult.CUDA_ERROR_NOT_READY
        while self._under_way and self._driver.cuEventQuery(self._under_way[0][1])[0] != not_ready:
            self._take()
        while True:
            part = self._times.next_part(run, first)
            if not self._under_way or part.is_all_of(num_ticks):
                return part
            if part.is_known and len(self._under_way) < MAX_LAUNCHES_AHEAD:
                return part
            self._wait()

    def _wait(self) -> None:
        """Wait for the oldest launch."""
        check(self._driver.cuEventSynchronize(self._under_way[0][1]), f"a part of kernel '{self._times.name}'")
        self._take()

    def _submit_timed(self, part: Part, stream: Any, submit: Callable[[Part], None]) -> None:
        start, end = self._free.pop() if self._free else (self._event(), self._event())
        check(self._driver.cuEventRecord(start, stream), "cuEventRecord")
        submit(part)
        check(self._driver.cuEventRecord(end, stream), "cuEventRecord")
        self._under_way.append((start, end, part))

    def _take(self) -> None:
        start, end, part = self._under_way.popleft()
        self._free.append((start, end))
        ms = check(self._driver.cuEventElapsedTime(start, end), f"a part of kernel '{self._times.name}'")
        self._times.took(part, float(ms))

    def _event(self) -> Any:
        flags = int(self._driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
        event = check(self._driver.cuEventCreate(flags), "cuEventCreate")
        weakref.finalize(self, forget_event, event).atexit = False
        return event
