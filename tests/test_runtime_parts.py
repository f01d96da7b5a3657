"""Runs as launches of a bounded time, on a stand-in device whose launches take what their ticks take."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from test_runtime_launch import OK, FakeDriver, Status, clear_caches, load_kernel, make_plan

from trainkernel.errors import LaunchError
from trainkernel.facts import Segment
from trainkernel.runtime import driver
from trainkernel.runtime.launch import BoundLaunch
from trainkernel.runtime.parts import ALL_TICKS, MAX_LAUNCHES_AHEAD, LaunchTimeWarning, TickTimes, ticks_of
from trainkernel.runtime.scalars import ScalarField

SEGMENTS = (Segment(1), Segment(None, 3, (4,)), Segment(1))
"""A stage, a loop whose length is input 3 and the length of a loop inside of it input 4, and a stage."""
PARAMS_BYTES = 80
TICKS_AT = 64


class TimedDriver(FakeDriver):
    """A device on which a launch takes ``overhead_ms`` and ``tick_ms`` of each of its ticks.

    ``device_ms`` is when all that was submitted is done, ``host_ms`` how much of it the host has waited for;
    ``ahead`` says for each launch how many before it were not known to be done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tick_ms: Any = lambda tick: 1.0
        self.overhead_ms = 0.005
        self.device_ms = self.host_ms = 0.0
        self.event_ms: dict[str, float] = {}
        self.parts: list[tuple[int, int]] = []
        self.launch_ms: list[float] = []
        self.waits = 0
        self.ends_ms: list[float] = []
        self.ahead: list[int] = []
        self.CUevent_flags.CU_EVENT_BLOCKING_SYNC = 1
        self.results["cuFuncGetParamInfo"] = (OK, 0, PARAMS_BYTES)

    def cuLaunchCooperativeKernel(self, *arguments: Any) -> Any:  # noqa: N802
        params = ctypes.c_void_p.from_address(arguments[-1]).value
        assert params is not None
        first, end = struct.unpack_from("<qq", ctypes.string_at(params, PARAMS_BYTES), TICKS_AT)
        self.calls.append(("launch",))
        if self.results.get("launch", (OK,)) != (OK,):
            return self.results["launch"]
        self.ahead.append(sum(at > self.host_ms for at in self.ends_ms))
        self.parts.append((first, end))
        took = self.overhead_ms + sum(self.tick_ms(tick) for tick in range(first, min(end, 10**5)))
        self.launch_ms.append(took)
        self.device_ms += took
        self.ends_ms.append(self.device_ms)
        return (OK,)

    def cuEventRecord(self, event: str, stream: int) -> Any:  # noqa: N802
        self.calls.append(("cuEventRecord", event, stream))
        self.event_ms[event] = self.device_ms
        return (OK,)

    def cuEventQuery(self, event: str) -> Any:  # noqa: N802
        return (OK,) if self.event_ms[event] <= self.host_ms else (Status(600),)

    def cuEventSynchronize(self, event: str) -> Any:  # noqa: N802
        self.waits += 1
        self.host_ms = max(self.host_ms, self.event_ms[event])
        return (OK,)

    def cuEventElapsedTime(self, start: str, end: str) -> Any:  # noqa: N802
        assert self.event_ms[end] <= self.host_ms
        return OK, self.event_ms[end] - self.event_ms[start]

    def cuStreamSynchronize(self, stream: int) -> Any:  # noqa: N802
        self.calls.append(("cuStreamSynchronize", stream))
        self.host_ms = self.device_ms
        return (OK,)

    def take(self) -> list[tuple[int, int]]:
        """The parts since the last time, which follow each other."""
        parts, self.parts, self.launch_ms, self.waits = self.parts, [], [], 0
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        return parts


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[TimedDriver]:
    clear_caches()
    fake = TimedDriver()
    monkeypatch.setattr(driver, "_probe", driver._Probe(fake, 1, None, os.getpid()))
    yield fake
    gc.collect()
    clear_caches()


def make_bound(max_launch_ms: float | None = 10.0, steps: int = 100, times: TickTimes | None = None) -> BoundLaunch:
    scalars = (
        ScalarField(2, "lr", "float32", 40),
        ScalarField(3, "steps", "int32", 44),
        ScalarField(4, "inner", "int32", 48),
    )
    if times is None and max_launch_ms is not None:
        times = TickTimes(max_launch_ms, "step")
    plan = make_plan(
        params_bytes=PARAMS_BYTES, scalars=scalars, segments=SEGMENTS, ticks_offset_bytes=TICKS_AT, times=times
    )
    kernel = load_kernel(params_bytes=PARAMS_BYTES)
    return BoundLaunch(kernel, plan, (11, 12, 13), {2: 0.5, 3: steps, 4: 2}, framework="numpy")


def test_without_a_bound_one_launch_runs_all(device: TimedDriver) -> None:
    bound = make_bound(None)
    device.names()
    bound.launch(70)
    assert device.take() == [(0, ALL_TICKS)]
    assert device.names() == ["cuStreamIsCapturing", "launch"]


@pytest.mark.parametrize("tick_ms", [0.002, 0.1, 1.0, 4.0])
def test_no_launch_takes_longer(device: TimedDriver, tick_ms: float) -> None:
    device.tick_ms = lambda tick: tick_ms
    bound = make_bound(10.0, steps=5000)
    for _ in range(3):
        bound.launch(70)
        assert max(device.launch_ms) <= 10
        parts = device.take()
        assert parts[0][0] == 0 and parts[-1][1] == 5002
    fewest = 5002 * tick_ms / 5.0  # launches are planned to take half
    assert len(parts) <= 1.3 * fewest + 2


def test_slow_stages_around_the_loop_have_launches_of_their_own(device: TimedDriver) -> None:
    device.tick_ms = lambda tick: 8.0 if tick in (0, 101) else 0.5
    bound = make_bound(10.0)
    for _ in range(3):
        bound.launch(70)
        assert max(device.launch_ms) <= 10
        assert device.take()[0] == (0, 1)


def test_the_first_run_measures_and_those_after_it_do_not_wait(device: TimedDriver) -> None:
    device.tick_ms = lambda tick: 0.01
    bound = make_bound(10.0)
    bound.launch(70)
    assert device.waits == 4 and device.take() == [(0, 1), (1, 2), (2, 101), (101, 102)]
    for number in range(20):
        bound.launch(70)
        assert device.waits == 0 and device.take() == [(0, 102)], number
    bound.set_scalar("steps", 50)
    bound.launch(70)
    assert device.waits == 0 and device.take() == [(0, 52)]
    bound.set_scalar("inner", 7)  # a step takes something else now
    bound.launch(70)
    assert device.take()[0] == (0, 1)
    bound.set_scalar("steps", 0)
    bound.launch(70)
    assert device.take() == [(0, 2)]


def test_the_host_is_a_few_launches_ahead(device: TimedDriver) -> None:
    bound = make_bound(10.0, steps=1000)
    bound.launch(70)
    device.take()
    bound.launch(70)
    assert max(device.ahead) < MAX_LAUNCHES_AHEAD
    assert device.host_ms < device.device_ms  # it does not wait for the last ones


def test_measurements_serve_all_that_launch_the_kernel(device: TimedDriver) -> None:
    times = TickTimes(10.0, "step")
    make_bound(times=times, steps=4).launch(70)
    device.take()
    other = make_bound(times=times, steps=4)
    other.launch(80)
    assert device.waits == 0
    assert device.take() == [(0, 4), (4, 6)]


def test_a_device_that_becomes_slower_is_noticed(device: TimedDriver) -> None:
    bound = make_bound(10.0, steps=500)
    bound.launch(70)
    device.take()
    device.tick_ms = lambda tick: 1.9
    bound.launch(70)
    assert max(device.launch_ms) <= 10
    device.take()
    device.tick_ms = lambda tick: 8.0
    with pytest.warns(
        LaunchTimeWarning, match=r"took [0-9.]+ ms, and max_launch_ms is 10: its 2 stages and steps took"
    ):
        bound.launch(70)
    device.take()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound.launch(70)
    assert max(device.launch_ms) <= 10


def test_a_step_that_alone_takes_longer_is_told_once(device: TimedDriver) -> None:
    device.tick_ms = lambda tick: 12.0 if tick == 1 else 1.0
    bound = make_bound(10.0, steps=1)
    with pytest.warns(LaunchTimeWarning, match="took 12 ms, and max_launch_ms is 10: one stage, or one step of a loop"):
        bound.launch(70)
    device.take()
    for _ in range(3):
        bound.launch(70)
        assert (1, 2) in device.take()


def test_calls_with_other_arrays(device: TimedDriver) -> None:
    bound = make_bound(10.0)
    for _ in range(2):
        assert not bound.launch_with((21, 22, 23), {2: 1.0, 3: 30, 4: 2}, 70, None, [object()])
        parts = device.take()
        assert parts[0][0] == 0 and parts[-1][1] == 32 and len(parts) > 3


def test_capture(device: TimedDriver) -> None:
    bound = make_bound(10.0, steps=20)
    device.capturing.add(70)
    with pytest.raises(LaunchError, match=r"'step' has max_launch_ms, .* launch it once before the capture"):
        bound.launch(70)
    assert device.take() == []
    device.capturing.clear()
    bound.launch(80)
    device.take()
    device.capturing.add(70)
    device.names()
    bound.launch(70)
    assert set(device.names()) == {"cuStreamIsCapturing", "launch"}  # no event: a graph would record it
    parts = device.take()
    assert parts[0][0] == 0 and parts[-1][1] == 22 and len(parts) > 3


def test_an_interrupt_leaves_nothing_under_way(device: TimedDriver) -> None:
    bound = make_bound(10.0, steps=200)
    bound.launch(70)
    device.take()
    device.names()
    wait = device.cuEventSynchronize
    interrupts = iter([False, False, True])

    def interrupted(event: str) -> Any:
        result = wait(event)
        if next(interrupts):
            raise KeyboardInterrupt
        return result

    device.cuEventSynchronize = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bound.launch(70)
    assert device.names()[-1] == "cuStreamSynchronize" and device.host_ms == device.device_ms
    parts = device.take()
    assert parts[0][0] == 0 and 0 < parts[-1][1] < 202
    device.cuEventSynchronize = wait  # type: ignore[method-assign]
    bound.launch(70)
    parts = device.take()
    assert parts[0][0] == 0 and parts[-1][1] == 202  # a run begins with its first stage


def test_a_refused_launch(device: TimedDriver) -> None:
    bound = make_bound(10.0)
    device.results["launch"] = (Status(719),)
    with pytest.raises(LaunchError, match="was not launched"):
        bound.launch(70)
    device.results["launch"] = (OK,)
    bound.launch(70)
    assert device.take()[-1][1] == 102


def test_times_of_ticks() -> None:
    times = TickTimes(10.0, "step")
    run = ticks_of(SEGMENTS, {3: 10, 4: 2})
    assert [ticks.num_ticks for ticks in run] == [1, 10, 1]
    assert len({ticks.kind for ticks in run}) == 3
    part = times.next_part(run, 0)
    assert (part.first, part.end, part.is_known) == (0, 1, False)
    times.took(part, 1.0)
    assert (times.next_part(run, 0).end, times.next_part(run, 0).is_known) == (1, True)
    part = times.next_part(run, 1)
    assert (part.first, part.end, part.is_known) == (1, 2, False)
    times.took(part, 0.75)
    part = times.next_part(run, 0)
    assert (part.end, part.is_known) == (6, True)  # 1 + 5 * 0.75 of the 5 ms planned
    times.took(part, 9.5)  # twice as long as expected: so is each tick
    assert times.next_part(run, 0).end == 3
    assert times.next_part(run, 8).end == 11  # the last stage is not known
    assert not times.next_part(run, 11).is_known
