"""Runs as several launches on a device: the bits of one launch, and no launch longer than it may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from gpu_arrays import compile_program, launch, to_device, to_host, torch_module
from harness import bits
from programs import random_program
from test_kept import inputs_of as inputs_of_training
from test_kept import looped, training
from test_loops import inputs_of, recurrence

import trainkernel as tk
from trainkernel import numpy as tnp
from trainkernel.errors import LaunchError
from trainkernel.ir import Program
from trainkernel.runtime.parts import Part, Ticks, TickTimes

pytestmark = pytest.mark.gpu


class FixedCuts(TickTimes):
    """Launches of these numbers of ticks, whatever they take."""

    def __init__(self, cuts: Sequence[int]) -> None:
        super().__init__(1e6, "step")
        self._cuts: Iterator[int] = cycle(cuts)
        self.launches = 0

    def next_part(self, run: Sequence[Ticks], first: int) -> Part:
        end = min(first + next(self._cuts), sum(ticks.num_ticks for ticks in run))
        return Part(first, end, (Ticks("all", end - first),), True)

    def took(self, part: Part, ms: float) -> None:
        self.launches += 1
        super().took(part, ms)


def prove(program: Program, inputs: Sequence[Any], exact: bool, **options: Any) -> None:
    """Many launches have the bits of one; if all operations are ``exact``, those of a kernel without parts, too."""
    options["parts"] = True
    want = [bits(output) for output in launch(compile_program((program, options)), inputs)]
    for cuts in ((1,), (2, 5), (3, 1, 1)):
        kernel = compile_program((program, options))
        kernel._launch_plan = replace(kernel._launch_plan, times=FixedCuts(cuts))
        assert [bits(output) for output in launch(kernel, inputs)] == want, cuts
    if exact:
        plain = compile_program((program, {**options, "parts": None}))
        assert [bits(output) for output in launch(plain, inputs)] == want


@pytest.mark.parametrize("options", [{}, {"region_pieces": 0}])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_loop_with_a_length_by_value(steps: int, options: dict[str, Any]) -> None:
    program = recurrence(7, dynamic=True, reverse=steps == 1)
    prove(program, inputs_of(program, steps), False, **options)


@pytest.mark.parametrize("pieces", [0, 1, 8])
def test_training_with_donated_state(pieces: int) -> None:
    """With one piece its carries stay near, and each launch returns them to their arrays."""
    program = looped(training(), 9)
    prove(program, inputs_of_training(program), True, region_pieces=pieces, inplace_outputs={0: 2, 1: 3, 2: 4})


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    case = random_program(seed)
    prove(case.program, case.inputs, case.is_exact, inplace_outputs=case.inplace_outputs)


# ---------------------------------------------------------------------------- launches of a bounded time

SIZE = 256


# With ``parts=True`` alone a call of this is one launch of the same kernel.
def train(w: Any, x: Any, y: Any, steps: int) -> Any:
    def step(w: Any, _: Any) -> Any:
        value, slope = tk.value_and_grad(lambda w: tnp.mean((tnp.tanh(x @ w) - y) ** 2))(w)
        return w - 0.1 * slope, value

    w, losses = tk.scan(step, w, tnp.arange(3000), steps)
    return w, losses, tnp.min(losses)


def data() -> list[Any]:
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal((SIZE, SIZE)).astype(np.float32) * 0.1 for _ in range(2))
    return [w, x, np.sin(x)]


@pytest.fixture
def launch_times(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Ticks and milliseconds of each timed launch."""
    found: list[tuple[int, float]] = []
    took = TickTimes.took

    def watched(times: TickTimes, part: Part, ms: float) -> None:
        found.append((part.end - part.first, ms))
        took(times, part, ms)

    monkeypatch.setattr(TickTimes, "took", watched)
    return found


def test_launches_keep_within_their_time(launch_times: list[tuple[int, float]]) -> None:
    """A slow host takes nothing from them: events are of the device. A tenth is room for a busy one."""
    torch_module()
    want = [np.asarray(value) for value in tk.jit(train, device="cuda", parts=True)(*data(), 2500)]
    jitted = tk.jit(train, device="cuda", max_launch_ms=4.0)
    for _ in range(3):
        got = [np.asarray(value) for value in jitted(*data(), 2500)]
        assert [bits(value) for value in got] == [bits(value) for value in want]
    assert len(launch_times) > 10
    late = [ms for _, ms in launch_times if ms > 4.0]
    assert len(late) <= len(launch_times) / 10, launch_times
    assert sum(ticks for ticks, _ in launch_times[:-8]) > 2500


def test_a_bound_launch_and_another_length(launch_times: list[tuple[int, float]]) -> None:
    torch_module()
    kernel = tk.jit(train, device="cuda", max_launch_ms=2.0, donate_argnums=0).kernel(*data(), 100)
    w, x, y = (to_device(value) for value in data())
    losses, least = to_device(np.zeros(3000, np.float32)), to_device(np.zeros((), np.float32))
    bound = kernel.bind([w, x, y, 100], [None, losses, least])
    bound.launch()
    bound.set_scalar("steps", 2000)
    bound.launch()
    bound.check()
    want = tk.jit(train, device="cuda", parts=True)(*data(), 2100)
    assert bits(to_host(w)) == bits(np.asarray(want[0]))
    assert bits(to_host(losses)[:2000]) == bits(np.asarray(want[1])[100:2100])
    assert len(launch_times) > 4


def test_a_graph_of_parts() -> None:
    torch = torch_module()
    kernel = tk.jit(train, device="cuda", max_launch_ms=2.0, donate_argnums=0).kernel(*data(), 1000)
    w, x, y = (to_device(value) for value in data())
    losses, least = to_device(np.zeros(3000, np.float32)), to_device(np.zeros((), np.float32))
    bound = kernel.bind([w, x, y, 1000], [None, losses, least])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(LaunchError, match="launch it once before the capture"):
            bound.launch()
        x.add_(0)  # a graph is not empty
    bound.launch()
    bound.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.launch()
    w.copy_(to_device(data()[0]))
    graph.replay()
    torch.cuda.synchronize()
    want = tk.jit(train, device="cuda", parts=True)(*data(), 1000)
    assert bits(to_host(w)) == bits(np.asarray(want[0]))


def test_an_interrupt_between_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was submitted is done when the caller sees the interrupt, and the kernel starts afresh."""
    torch = torch_module()
    jitted = tk.jit(train, device="cuda", max_launch_ms=1.0)
    arguments = [to_device(value) for value in data()]
    jitted(*arguments, 2500)
    took, calls = TickTimes.took, []

    def interrupted(times: TickTimes, part: Part, ms: float) -> None:
        took(times, part, ms)
        calls.append(part)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TickTimes, "took", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jitted(*arguments, 2500)
    assert torch.cuda.current_stream().query()
    got = jitted(*arguments, 2500)
    want = tk.jit(train, device="cuda", parts=True)(*data(), 2500)
    assert [bits(to_host(value)) for value in got] == [bits(np.asarray(value)) for value in want]
