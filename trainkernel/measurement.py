"""Run a kernel compiled with ``stamps=True`` on a GPU, on inputs of its own, and add its times to a report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainkernel.errors import DeviceError, OptionError
from trainkernel.inspection import BarrierReport, Interval, KernelReport, StageReport
from trainkernel.kernel import Kernel
from trainkernel.sample_arrays import bind_samples
from trainkernel.stamps import Stamps, read_stamps

WARMUP_LAUNCHES, LAUNCHES = 20, 100
_ROUNDING_US = 1e-6


def measure(
    kernel: Kernel, steps: Mapping[int, int], launches: int = LAUNCHES, warmup: int = WARMUP_LAUNCHES
) -> list[Stamps]:
    """The stamps of some launches, after others that are not counted.

    All arrays are the kernel's own, also those updated in place.

    Raises
    ------
    DeviceError
        If the kernel is not on a GPU.
    OptionError
        If it was compiled without ``stamps=True``.
    LaunchError
        If its arrays do not fit on the device.
    """
    if kernel.device is None or not kernel.device.startswith("cuda:"):
        where = "for an architecture alone" if kernel.device is None else f"for device '{kernel.device}'"
        raise DeviceError(f"time stamps are those of a GPU, and this kernel was compiled {where}")
    if not kernel.stats.stamps:
        raise OptionError("this kernel has no time stamps: compile it with stamps=True")
    bound = bind_samples(kernel, steps)
    return read_stamps(kernel, bound.launch, bound, warmup + launches)[warmup:]


# ---------------------------------------------------------------------------- stamps in the report


def with_stamps(report: KernelReport, samples: Sequence[Stamps], device: str) -> KernelReport:
    """The report with the medians of what the stamps of some launches say."""
    reader = _StampReader(samples)
    stages = reader.stages(report.stages)
    total_us = statistics.median(sample.total_us for sample in samples)
    return replace(report, stages=stages, measured_us=total_us, num_launches=len(samples), device=device)


class _StampReader:
    """Gives the stamps, in the order of the source, to what they come before."""

    def __init__(self, samples: Sequence[Stamps]) -> None:
        # The median of each stamp, so that what comes later still does, and intervals add up.
        columns = zip(*((*sample.times_us, sample.total_us) for sample in samples), strict=True)
        self._times = [statistics.median(column) for column in columns]
        self._next = 0

    def _take(self) -> int:
        self._next += 1
        return self._next - 1

    def _interval(self, first: int, last: int) -> Interval | None:
        """From one stamp to another; None where they are not in order: a loop took no step, they are old."""
        start, end = self._times[first], self._times[last]
        if not -_ROUNDING_US <= start <= end <= self._times[-1] + _ROUNDING_US:
            return None
        return Interval(start, end - start)

    def stages(self, stages: Sequence[StageReport]) -> tuple[StageReport, ...]:
        return tuple(self._stage(stage) for stage in stages)

    def _barrier(self, barrier: BarrierReport | None) -> BarrierReport | None:
        if barrier is None or barrier.scope != "grid":  # block barriers have no stamp
            return barrier
        stamp = self._take()
        return replace(barrier, measured=self._interval(stamp, stamp + 1))

    def _stage(self, stage: StageReport) -> StageReport:
        barrier = self._barrier(stage.barrier)
        stamp = self._take()
        loop = stage.loop
        if loop is not None:
            loop = replace(loop, stages=self.stages(loop.stages), back_edge=self._barrier(loop.back_edge))
        parts = []
        for part in stage.parts:
            own = self._take()
            parts.append(replace(part, measured=self._interval(own, own + 1)))
        measured = self._interval(stamp, self._next)
        return replace(stage, barrier=barrier, parts=tuple(parts), loop=loop, measured=measured)
