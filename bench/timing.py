"""Time per step, by CUDA events or by the host's clock.

A clock is a function ``(run, calls) -> seconds`` of so many calls. Steps of torch and trainkernel
are timed between two events on their stream. JAX lends no stream, so its steps are timed by the
host's clock from an idle device until the last result is there; a sample of 50 ms or more makes
nothing of the wait at its end. Either way the host runs ahead of the device, and the time is that
of whichever is slower: what a program that only trains would see.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUM_REPEATS = 9
MIN_SAMPLE_SECONDS = 0.05
WARMUP_SECONDS = 0.2
MAX_WARMUP_BATCH = 64

Run = Callable[[], object]
Clock = Callable[[Run, int], float]


@dataclass(frozen=True)
class Timing:
    """Median over the repeats, and largest less smallest, microseconds per step."""

    us_per_step: float
    spread_us: float
    samples_us: tuple[float, ...]
    launches: int


def event_clock(stream: Any) -> Clock:
    """By two events on a torch stream, which is idle before the first."""
    import torch

    def measure(run: Run, calls: int) -> float:
        stream.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        for _ in range(calls):
            run()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return measure


def wall_clock(wait: Run) -> Clock:
    """By the host's clock; ``wait`` returns when the device is idle."""

    def measure(run: Run, calls: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        return time.perf_counter() - begin

    return measure


def time_steps(run: Run, clock: Clock, steps_per_run: int = 1) -> Timing:
    """Time calls of ``run``, ``NUM_REPEATS`` samples of ``MIN_SAMPLE_SECONDS`` or more."""
    calls = max(1, round(MIN_SAMPLE_SECONDS / _warm_up(run, clock)))
    samples = [1e6 * clock(run, calls) / (calls * steps_per_run) for _ in range(NUM_REPEATS)]
    return Timing(statistics.median(samples), max(samples) - min(samples), tuple(samples), calls)


def _warm_up(run: Run, clock: Clock) -> float:
    """Run until the clocks have risen; seconds per call at the end."""
    begin, calls = time.perf_counter(), 1
    clock(run, calls)
    while True:
        seconds = clock(run, calls)
        if time.perf_counter() - begin > WARMUP_SECONDS:
            return seconds / calls
        calls = min(2 * calls, MAX_WARMUP_BATCH)
