"""Random programs on a device: within the bound of the reference, and the emulator's bits where they are fixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from gpu_arrays import in_threads, launch, torch_module
from harness import MAX_UNKNOWN, bits, copies
from programs import FUSED, UNFUSED, RandomProgram, random_options, random_program
from samples import SAMPLES

import trainkernel as tk
from trainkernel import emulator

pytestmark = pytest.mark.gpu

NUM_SEEDS = 200
CHUNK = 50
MAX_EMULATED = 15
"""Programs of a chunk whose bits are compared with the emulator's: compiling for it takes longest."""


def _options(seed: int) -> list[dict[str, Any]]:
    """The cost model's choice, and random tuning with and without fusion."""
    tuning = random_options(np.random.default_rng(2_000_000 + seed))
    return [{}, tuning | dict(FUSED if seed % 2 else UNFUSED)]


def _compile(job: tuple[RandomProgram, dict[str, Any]]) -> Any:
    case, options = job
    return tk.compile(
        case.program, device="cuda", barrier_timeout_ms=2000, inplace_outputs=case.inplace_outputs, **options
    )


def _check(case: RandomProgram, kernels: list[Any], emulated: bool) -> None:
    for kernel in kernels:
        first = launch(kernel, case.inputs)
        assert assert_close(first, case.program, case.inputs, case.name) <= MAX_UNKNOWN
        again = launch(kernel, case.inputs)
        assert [bits(output) for output in first] == [bits(output) for output in again], "two launches differ"
    if emulated:
        expected = emulator.emulate(kernels[0].stats, copies(case.inputs)).outputs
        got = launch(kernels[0], case.inputs)
        for index, (output, want) in enumerate(zip(got, expected, strict=True)):
            assert bits(output) == bits(want), f"output {index} differs from the emulator's bits"


@pytest.mark.parametrize("chunk", range(NUM_SEEDS // CHUNK))
def test_random_programs(chunk: int) -> None:
    torch_module()
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    cases = [random_program(seed) for seed in seeds]
    jobs = [(case, options) for case, seed in zip(cases, seeds, strict=True) for options in _options(seed)]
    kernels = in_threads(_compile, jobs)
    exact = [number for number, case in enumerate(cases) if case.is_exact][:MAX_EMULATED]
    if not emulator.is_available():
        exact = []
    emulator.prepare([kernels[2 * number].stats for number in exact])
    failures = []
    for number, case in enumerate(cases):
        try:
            _check(case, kernels[2 * number : 2 * number + 2], number in exact)
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {CHUNK} programs fail\n\n" + "\n\n".join(failures)


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", list(SAMPLES))
def test_samples(name: str) -> None:
    torch_module()
    sample = SAMPLES[name]()
    kernel = tk.compile(sample.program, device="cuda", **sample.options)
    assert_close(launch(kernel, sample.inputs()), sample.program, sample.inputs(), name)


@pytest.mark.sanitizer
@pytest.mark.parametrize("seed", [2, 3, 5])
def test_seeds_under_the_sanitizer(seed: int) -> None:
    torch_module()
    case = random_program(seed)
    _check(case, [_compile((case, {}))], emulated=False)
