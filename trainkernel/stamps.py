"""The time stamps of a kernel compiled with ``stamps=True``.

Block 0 writes its multiprocessor's clock before each stage, each grid barrier and each part of a block
region, into 64-bit words at the end of the workspace; in a loop those of the last step remain, in a region
those of the block's last piece. Four words before them hold the clocks of device and multiprocessor at start
and end, whose quotient is the rate.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trainkernel.errors import LaunchError

NUM_CLOCK_STAMPS = 4
WORD_BYTES = 8


@dataclass(frozen=True)
class Stamps:
    """One launch: its time from start to end, and of each stamp the time since the start, microseconds."""

    total_us: float
    times_us: tuple[float, ...]

    @property
    def intervals_us(self) -> tuple[float, ...]:
        """From each stamp to the next one, and from the last to the end."""
        return tuple(after - before for before, after in pairwise((*self.times_us, self.total_us)))


def stamps_bytes(num_stamps: int) -> int:
    """Bytes at the end of the workspace that hold the clocks and so many stamps."""
    return WORD_BYTES * (NUM_CLOCK_STAMPS + num_stamps)


def decode_stamps(workspace: bytes, num_stamps: int) -> Stamps:
    """The stamps at the end of a workspace, or of its last bytes.

    Raises
    ------
    LaunchError
        If no time lies between start and end: no kernel with stamps has run there.
    """
    size_bytes = stamps_bytes(num_stamps)
    words = struct.unpack(f"<{size_bytes // WORD_BYTES}q", workspace[-size_bytes:])
    start_ns, start, end_ns, end = words[:NUM_CLOCK_STAMPS]
    if end_ns <= start_ns or end <= start:
        raise LaunchError(
            f"the time stamps of start and end are {start_ns} and {end_ns} ns, {start} and {end} cycles: no time lies "
            "between them, so no kernel with stamps has run on this workspace"
        )
    us_per_cycle = (end_ns - start_ns) / (end - start) / 1e3
    times = tuple((word - start) * us_per_cycle for word in words[NUM_CLOCK_STAMPS:])
    return Stamps((end_ns - start_ns) / 1e3, times)


def read_stamps(kernel: Any, launch: Callable[[], object], bound: Any, launches: int) -> list[Stamps]:
    """The stamps of so many launches, one after another.

    Parameters
    ----------
    kernel : Kernel
        Compiled with ``stamps=True``.
    launch : callable
        Launches ``bound`` once.
    bound : BoundLaunch
    launches : int
    """
    num_stamps = len(kernel.stats.stamps)
    size_bytes = stamps_bytes(num_stamps)
    offset_bytes = kernel.stats.workspace_bytes - size_bytes
    samples = []
    for _ in range(launches):
        launch()
        samples.append(decode_stamps(bound.read_workspace(size_bytes, offset_bytes), num_stamps))
    return samples
