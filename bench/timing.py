"""Device time per step by CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MIN_LAUNCHES = 100
NUM_REPEATS = 9
_WARMUP_SECONDS = 0.2
_WARMUP_BATCH = 20
_MIN_REPEAT_SECONDS = 0.02


@dataclass(frozen=True)
class Timing:
    """Median over the repeats, and largest less smallest, microseconds per step."""

    us_per_step: float
    spread_us: float
    samples_us: tuple[float, ...]
    launches: int


def time_steps(run: Callable[[], object], stream: Any, steps_per_run: int = 1) -> Timing:
    """Time calls of ``run`` on a stream between two events, ``NUM_REPEATS`` times.

    A repeat has at least ``MIN_LAUNCHES`` calls and lasts about 20 ms or more. The host runs ahead
    of the device, so this is the time of whichever is slower: what a program that only trains
    would see.
    """
    with torch.cuda.stream(stream):
        launches = max(MIN_LAUNCHES, round(_MIN_REPEAT_SECONDS / _warm_up(run, stream)))
        samples = []
        for _ in range(NUM_REPEATS):
            stream.synchronize()
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            for _ in range(launches):
                run()
            end.record(stream)
            end.synchronize()
            samples.append(1e3 * start.elapsed_time(end) / (launches * steps_per_run))
    return Timing(statistics.median(samples), max(samples) - min(samples), tuple(samples), launches)


def _warm_up(run: Callable[[], object], stream: Any) -> float:
    """Run until the clocks have risen; seconds per call at the end."""
    begin = time.perf_counter()
    while True:
        batch_begin = time.perf_counter()
        for _ in range(_WARMUP_BATCH):
            run()
        stream.synchronize()
        now = time.perf_counter()
        if now - begin > _WARMUP_SECONDS:
            return (now - batch_begin) / _WARMUP_BATCH
