"""Launches that run a part of a kernel (the option ``parts``): its ticks, and what guards its statements.

A tick is a stage at the top of the program, or one step of a loop there. A launch runs the ticks that its
arguments name, so a run is one launch, or several one after another on the same workspace and arrays. What a
stage leaves for a later one lies in device memory, and so does what a loop's step leaves for the next one,
but for what a block keeps near: that is fetched and returned by each launch that runs a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainkernel.facts import Segment
from trainkernel.memory import Frame
from trainkernel.schedule import LoopSchedule, Schedule, Stage


def find_segments(frame: Frame) -> tuple[Segment, ...]:
    """The ticks of the outermost schedule: a segment for each of its stages."""
    return tuple(_segment(loop_of(stage), frame) for stage in frame.schedule.stages)


def loop_of(stage: Stage) -> LoopSchedule | None:
    """The loop that is a stage, if it is one."""
    return stage.tasks[0].loop


def _segment(loop: LoopSchedule | None, frame: Frame) -> Segment:
    if loop is None:
        return Segment(1)
    inner = tuple(sorted(set(_inner_lengths(loop.schedule, frame.inside(loop)))))
    if isinstance(loop.loop.length, str):
        return Segment(None, frame.storage(loop.loop.length).index, inner)
    return Segment(loop.loop.length, None, inner)


def _inner_lengths(schedule: Schedule, frame: Frame) -> Iterator[int]:
    """The scalar inputs that are lengths of loops inside of a loop's body."""
    for stage in schedule.stages:
        loop = loop_of(stage)
        if loop is None:
            continue
        if isinstance(loop.loop.length, str):
            yield frame.storage(loop.loop.length).index
        yield from _inner_lengths(loop.schedule, frame.inside(loop))


def first_ticks(segments: Sequence[Segment], scalar: Callable[[int], str]) -> list[str]:
    """The C expression of each segment's first tick; ``scalar`` gives that of a scalar input."""
    found, known, lengths = [], 0, ""
    for segment in segments:
        found.append(f"{known}ll{lengths}")
        if segment.length is not None:
            known += segment.length
        else:
            assert segment.scalar is not None
            lengths += f" + {scalar(segment.scalar)}"
    return found


def runs(tick: str) -> str:
    """The C condition under which a launch runs a stage."""
    return f"tk_runs(p.first_tick, p.end_tick, {tick})"


def step_range(tick: str, length: str, number: int, indent: str) -> list[str]:
    """The steps ``first_<number>`` to before ``end_<number>`` that a launch runs of the loop that begins at a tick."""
    return [
        f"{indent}const int first_{number} = tk_part_of_loop(p.first_tick - ({tick}), {length});",
        f"{indent}const int end_{number} = tk_part_of_loop(p.end_tick - ({tick}), {length});",
    ]


NO_HOST_ENTRY = """\
#error "this kernel runs in parts (max_launch_ms) and has no host entry in C: compile the program without that option"
"""
