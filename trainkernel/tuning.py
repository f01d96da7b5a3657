"""Options of a kernel chosen by measuring on the device: ``compile(..., tune=True)``.

The cost model chooses first. What it could have chosen otherwise is measured beside it, one option at
a time, then those together that were faster alone. The choice is kept in the cache, by the Program,
its options and the device's name; without ``tune`` nothing of this happens, and a Program always gets
the same kernel.

The kernels run on arrays of their own: random floats between 0 and 0.1, so that roots and logarithms
stay numbers, zeros for integers, small scalars, and at most 100 steps of a loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from trainkernel.errors import TrainkernelError
from trainkernel.ir import Program, ScalarSpec, length_limits
from trainkernel.program_cache import program_key
from trainkernel.runtime.cache import CubinCache, cache_key
from trainkernel.sample_arrays import bind_samples
from trainkernel.target import PRESETS, Target

VERSION = "1"
GAIN = 0.98
"""What another choice must take, as a part of the cost model's, to be taken instead."""
MAX_STEPS = 100
WARMUP_LAUNCHES, BATCHES = 3, 5
BATCH_SECONDS = 0.004
Choice: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Tried:
    """Options that were measured beside those asked for, and their time.

    ``us`` is microseconds per launch of the sample arrays; None where there is no such kernel, for which
    ``error`` is the reason.
    """

    options: Mapping[str, Any]
    us: float | None
    error: str = ""

    def __str__(self) -> str:
        names = ", ".join(f"{name}={value!r}" for name, value in self.options.items()) or "the cost model's choice"
        return f"{names}: {self.error if self.us is None else f'{self.us:.2f} us'}"


@dataclass(frozen=True)
class Tuning:
    """What was measured for a kernel, in order, and the options that were taken."""

    device: str
    options: Mapping[str, Any]
    tried: tuple[Tried, ...]

    def __str__(self) -> str:
        return "\n".join([f"tuned on {self.device}:", *(f"  {one}" for one in self.tried), f"  taken: {self.options}"])


def tune(
    program: Program,
    arch: str,
    device: str,
    options: Mapping[str, Any],
    asked: Collection[str],
    build: Callable[[Mapping[str, Any]], Any],
) -> Tuning:
    """The tuning of a Program on a device, from the cache or by measuring.

    Parameters
    ----------
    program : Program
    arch : str
    device : str
        The name of the GPU.
    options : mapping
        Of the kernel without tuning.
    asked : collection of str
        Those that the caller gave: they stay as they are.
    build : callable
        Makes the kernel with further options.
    """
    key = program_key(program, arch, options)
    if key is not None:
        key = cache_key({"program": key, "device": device, "tuning": VERSION})
        known = _from_json(device, _load(key))
        if known is not None:
            return known
    first = build({})

    def measure(choice: Choice) -> float:
        return launch_us(build(as_options(choice)) if choice else first)

    found = choose(measure, alternatives(first, asked), device)
    if key is not None:
        _store(key, found)
    return found


def alternatives(kernel: Any, asked: Collection[str]) -> list[Choice]:
    """What the cost model could have chosen otherwise, one option at a time, but for those that were asked for."""
    stats = kernel.stats
    found: list[Choice] = []
    pieces = sorted({split.pieces for split in _splits(stats.schedule)})
    choices: dict[str, list[int]] = {
        "threads_per_block": [256 if stats.threads_per_block == 512 else 512],
        "region_pieces": [0, *(n for count in pieces for n in (count // 2, 2 * count) if 0 < n <= 1024)]
        if pieces
        else [1],
        "blocks_per_sm": [1 if stats.blocks_per_sm > 1 else 2],
    }
    for name, values in choices.items():
        if name not in asked:
            found += [{name: value} for value in dict.fromkeys(values)]
    if "target" not in asked and stats.target == PRESETS["sm_90a"] and "_wgmma" in stats.source:
        found.append({"target": "sm_90"})
    return found


def choose(measure: Callable[[Choice], float], choices: list[Choice], device: str) -> Tuning:
    """Measure nothing changed, each choice alone, then those that were faster together."""
    tried = [_try(measure, {})]
    base = tried[0].us
    if base is None:
        raise TrainkernelError(f"the kernel could not be measured: {tried[0].error}")
    tried += [_try(measure, choice) for choice in choices]
    faster = sorted(
        (one for one in tried[1:] if one.us is not None and one.us < GAIN * base), key=lambda one: one.us or 0
    )
    together: Choice = {}
    for one in faster:
        if not together.keys() & one.options.keys():
            together |= one.options
    if together and together != faster[0].options:
        tried.append(_try(measure, together))
    best = min((one for one in tried if one.us is not None), key=lambda one: one.us or 0)
    taken = best if best.us is not None and best.us < GAIN * base else tried[0]
    return Tuning(device, dict(taken.options), tuple(tried))


def _try(measure: Callable[[Choice], float], choice: Choice) -> Tried:
    try:
        return Tried(choice, measure(choice))
    except TrainkernelError as error:
        return Tried(choice, None, str(error))


def launch_us(kernel: Any) -> float:
    """Microseconds per launch, one after another: the least of some batches."""
    bound = bind_samples(kernel, _steps(kernel.program), low=0.0, high=0.1, scalar=1e-3)

    def run(launches: int) -> float:
        start = time.perf_counter()
        for _ in range(launches):
            bound.launch()
        bound.read_workspace(4)  # waits for them
        return time.perf_counter() - start

    seconds = run(WARMUP_LAUNCHES) / WARMUP_LAUNCHES
    launches = max(1, min(1000, round(BATCH_SECONDS / max(seconds, 1e-7))))
    return 1e6 * min(run(launches) for _ in range(BATCHES)) / launches


def _steps(program: Program) -> dict[int, int]:
    """The steps of loops whose length is an argument."""
    limits = length_limits(program)
    return {
        index: min(MAX_STEPS, limits[spec.buffer])
        for index, spec in enumerate(program.inputs)
        if isinstance(spec, ScalarSpec) and spec.buffer in limits
    }


def _splits(schedule: Any) -> Iterator[Any]:
    for stage in schedule.stages:
        for task in stage.tasks:
            if task.loop is not None:
                yield from _splits(task.loop.schedule)
            elif task.region is not None:
                yield task.region.split


def as_options(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Options as ``generate`` takes them."""
    return {name: Target.preset(value) if name == "target" else value for name, value in choice.items()}


# ---------------------------------------------------------------------------- the cache


def _load(key: str) -> Any:
    """What was stored in a cubin's place, as JSON has it; None if there is nothing."""
    entry = CubinCache.from_environment().load(key)
    try:
        return None if entry is None else json.loads(entry.cubin)
    except ValueError:
        return None


def _store(key: str, found: Tuning) -> None:
    tried = [[dict(one.options), one.us, one.error] for one in found.tried]
    CubinCache.from_environment().put(key, json.dumps({"options": dict(found.options), "tried": tried}).encode(), {})


def _from_json(device: str, data: Any) -> Tuning | None:
    """What was stored; None for anything else."""
    try:
        tried = tuple(Tried(dict(options), us, str(error)) for options, us, error in data["tried"])
        options = dict(data["options"])
    except (TypeError, ValueError, KeyError):
        return None
    known = {"threads_per_block": int, "region_pieces": int, "blocks_per_sm": int, "target": str}
    if any(type(value) is not known.get(name) for name, value in options.items()):
        return None
    return Tuning(device, options, tried) if options.get("target", "sm_90") in PRESETS else None
