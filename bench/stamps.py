"""The time stamps of a kernel compiled with ``stamps=True``, in microseconds.

Block 0 writes its multiprocessor's clock before each stage, each grid barrier and each part of a block
region; in a loop those of the last step remain. The device's clock at start and end gives the rate.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_NUM_CLOCKS = 4


@dataclass(frozen=True)
class Stamps:
    """One launch: time from its start to its end, and from each stamp to the next one (the last: to the end)."""

    total_us: float
    intervals_us: tuple[float, ...]


def read_stamps(kernel: Any, launch: Callable[[], object], bound: Any, launches: int) -> list[Stamps]:
    """The stamps of so many launches, one after another."""
    count = _NUM_CLOCKS + len(kernel.stats.stamps)
    samples = []
    for _ in range(launches):
        launch()
        words = struct.unpack(f"<{count}q", bound.read_workspace(kernel.stats.workspace_bytes)[-8 * count :])
        start_ns, start, end_ns, end = words[:_NUM_CLOCKS]
        cycles_per_us = (end - start) / (end_ns - start_ns) * 1e3
        stamps = [*words[_NUM_CLOCKS:], end]
        samples.append(
            Stamps(
                (end_ns - start_ns) / 1e3, tuple((after - before) / cycles_per_us for before, after in pairwise(stamps))
            )
        )
    return samples
