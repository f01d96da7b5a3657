"""The runners of one workload: each is compared by its loss first and timed after."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from machine import HOST_DEVICES
from rows import FLOOR, OURS, SYNC, Row, fastest, new_row
from timing import Timing, time_steps, wall_clock
from trainer import Trainer, loss_after_checked_steps
from workloads import NUM_CHECKED_STEPS, Mlp, Workload

from trainkernel.target import Target

LENGTHS = (100, 1000)
"""Steps of a launch of many."""
MAX_LAUNCH_US = 1e6
"""A longer launch is left out where a shorter one was measured."""
TF32_RTOL = 1e-2

Variants = Mapping[str, Callable[[], Trainer]]


class WrongLossError(Exception):
    """A runner's loss does not agree with the first peer's, so its time means nothing."""


@dataclass
class Session:
    """What the runners of a workload share, and the loss that they are held to.

    Attributes
    ----------
    workload : Workload
    device : str
    stream : torch.cuda.Stream or None
        The current stream; None on a host device, where nothing is timed.
    precision : {"float32", "tf32"}
        How the peers compute products of float32.
    compiled : bool
        Whether torch.compile is a peer.
    unrolls : sequence of int
        Of JAX's scan.
    options : mapping
        Further arguments of ``tk.jit``.
    """

    workload: Workload
    device: str
    stream: Any
    precision: str = "float32"
    compiled: bool = False
    unrolls: Sequence[int] = (1,)
    options: Mapping[str, Any] = field(default_factory=dict)
    expected: tuple[str, float] | None = None

    @property
    def row_precision(self) -> str:
        return self.precision if self.workload.dtype == "float32" else self.workload.dtype

    def row(self, runner: str, **values: Any) -> Row:
        return new_row(self.workload.name, runner, self.row_precision, **values)

    def check_loss(self, runner: str, loss: float) -> None:
        """Hold a loss to the first peer's.

        Raises
        ------
        WrongLossError
            If it differs by more than the workload allows, or if there is no peer.
        """
        if self.expected is None:
            if runner == OURS:
                raise WrongLossError("no peer ran, so there is no loss to compare with")
            self.expected = (runner, loss)
        peer, expected = self.expected
        rtol = max(self.workload.loss_rtol, TF32_RTOL if self.row_precision == "tf32" else 0.0)
        if not (math.isfinite(loss) and abs(loss - expected) <= rtol * abs(expected)):
            raise WrongLossError(
                f"the loss after {NUM_CHECKED_STEPS} steps is {loss!r}, that of {peer} is {expected!r}; "
                f"they may differ by {rtol:g} of it"
            )


# ---------------------------------------------------------------------------- the runners


def all_rows(session: Session, floor_target: str) -> Iterator[Row]:
    """The rows of a workload, peers first."""
    yield floor_row(session, floor_target)
    if isinstance(session.workload, Mlp):
        yield from torch_rows(session)
    yield from lengths_of(session, "jax_jit", "jax_scan", jax_variants)
    if session.row_precision == "tf32":
        refusal = "trainkernel has no tf32 products yet; --precision float32 compares it"
        yield session.row(OURS, error=refusal, refused=True)
        return
    yield from lengths_of(session, OURS, OURS, trainkernel_variants)


def floor_row(session: Session, target: str) -> Row:
    floor_us = session.workload.floor_us(Target.preset(target), session.row_precision)
    return session.row(FLOOR, us_per_step=floor_us, spread_us=0.0, variant=f"model for {target}")


def torch_rows(session: Session) -> Iterator[Row]:
    """Eager steps and, on a GPU, steps in CUDA graphs."""
    yield from rows_of(session, "torch_eager", partial(torch_variants, session))
    if session.stream is not None:
        yield from rows_of(session, "torch_graph", partial(graph_variants, session))
        if session.compiled:
            yield from rows_of(session, "torch_compile_graph", partial(graph_variants, session, compiled=True))


def torch_variants(session: Session, **settings: Any) -> Variants:
    """By the optimizer's implementation."""
    from torch_peer import IMPLEMENTATIONS, TorchTrainer

    def make(implementation: str) -> TorchTrainer:
        assert isinstance(session.workload, Mlp)
        arguments = (session.workload, session.device, session.stream, session.row_precision)
        return TorchTrainer(*arguments, implementation, **settings)

    return {name: partial(make, name) for name in IMPLEMENTATIONS}


def graph_variants(session: Session, compiled: bool = False) -> Variants:
    """By the optimizer's implementation and the steps per graph."""
    from torch_peer import STEPS_PER_GRAPH, GraphTrainer

    def captured(make: Callable[[], Any], steps: int) -> Trainer:
        return GraphTrainer(make(), session.stream, steps)

    trainers = torch_variants(session, capturable=True, compiled=compiled)
    return {
        f"{name}, {steps} steps per graph": partial(captured, make, steps)
        for name, make in trainers.items()
        for steps in (1, STEPS_PER_GRAPH)
    }


def jax_variants(session: Session, steps: int) -> Variants:
    """One step, or a scan by its unrolling."""
    from jax_peer import JaxTrainer

    make = partial(JaxTrainer, session.workload, session.device, session.row_precision, steps)
    if steps == 1:
        return {"one step": make}
    return {f"{steps} steps, unroll {unroll}": partial(make, unroll) for unroll in session.unrolls}


def trainkernel_variants(session: Session, steps: int) -> Variants:
    """Bound launches; single steps also as calls of the jitted function."""
    from trainkernel_runner import CallTrainer, TrainkernelTrainer

    arguments = (session.workload, session.device, session.stream, steps, session.options)
    variants: dict[str, Callable[[], Trainer]] = {"bound launch": partial(TrainkernelTrainer, *arguments)}
    if steps == 1:
        variants["jitted call"] = partial(CallTrainer, *arguments)
    return variants


def lengths_of(session: Session, single: str, many: str, variants: Callable[[Session, int], Variants]) -> Iterator[Row]:
    """The rows of single steps, then of launches of many steps that do not take too long."""
    rows = rows_of(session, single, partial(variants, session, 1))
    yield from rows
    step_us = rows[0]["us_per_step"] or 0.0
    lengths = (NUM_CHECKED_STEPS + 1,) if session.device in HOST_DEVICES else LENGTHS
    for steps in lengths:
        if steps == lengths[0] or steps * step_us <= MAX_LAUNCH_US:
            yield from rows_of(session, many, partial(variants, session, steps), steps)


# ---------------------------------------------------------------------------- one runner


def rows_of(session: Session, runner: str, variants: Callable[[], Variants], steps_per_launch: int = 1) -> list[Row]:
    """The fastest variant's row, and that of the fastest single step whose loss the host waits for.

    ``steps_per_launch`` is that of the row of a failure.
    """

    def failed(error: str) -> list[Row]:
        return [session.row(runner, steps_per_launch=steps_per_launch, error=error)]

    rows: dict[str, list[Row]] = {}
    errors: dict[str, str] = {}
    try:
        makers = variants()
    except ImportError as error:
        return failed(f"{type(error).__name__}: {error}")
    for name, make in makers.items():
        try:
            rows[name] = _measured(session, runner, name, make())
        except Exception as error:
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}"
    if not rows:
        return failed("; ".join(dict.fromkeys(errors.values())))
    results = []
    for kind in (runner, runner + SYNC):
        times = {name: row for name, measured in rows.items() for row in measured if row["runner"] == kind}
        best = fastest(times.values()) or next(iter(times.values()), None)
        if best is not None:
            best["variants_us"] = {name: row["us_per_step"] for name, row in times.items()}
            best["variants_failed"] = errors
            results.append(best)
    return results


def _measured(session: Session, runner: str, variant: str, trainer: Trainer) -> list[Row]:
    """One variant's row, and for single steps a second one of steps that are waited for."""
    loss = loss_after_checked_steps(trainer)
    session.check_loss(runner, loss)
    steps = trainer.steps_per_launch
    known = {"steps_per_launch": steps, "loss_after_20": loss, "variant": variant, "note": trainer.note}
    if trainer.clock is None:
        return [session.row(runner, **known)]
    rows = [session.row(runner, **known, **_times(time_steps(trainer.launch, trainer.clock, steps)))]
    if steps == 1:

        def step_and_wait() -> None:
            trainer.launch()
            trainer.losses()

        timing = time_steps(step_and_wait, wall_clock(lambda: None))
        rows.append(session.row(runner + SYNC, **known, **_times(timing)))
    trainer.losses()
    return rows


def _times(timing: Timing) -> dict[str, Any]:
    return {
        "us_per_step": timing.us_per_step,
        "spread_us": timing.spread_us,
        "samples_us": timing.samples_us,
        "launches_per_sample": timing.launches,
    }
