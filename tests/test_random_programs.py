"""Random programs under random options: right, race-free, and the same bits however they are run.

For each seed: fused, unfused, and each switch alone give equal bits under the same tuning
options; so do other grids and orders; all lie within the error bound of the reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from harness import MAX_UNKNOWN, bits, check_statistics, emulate, has_loops
from programs import FUSED, UNFUSED, RandomProgram, random_options, random_program

from trainkernel import emulator
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.target import Target

FEW_SMS = replace(Target.preset("portable"), num_sms=3)
NUM_SEEDS = 200
CHUNK = 10


def _variants(case: RandomProgram, seed: int) -> list[list[GeneratedKernel]]:
    """Groups of kernels that must agree bit for bit: within a group only fusion differs."""
    rng = np.random.default_rng(1_000_000 + seed)
    groups: list[list[GeneratedKernel]] = []
    for _ in range(2):
        tuning = random_options(rng)
        if rng.random() < 0.25:
            tuning["target"] = FEW_SMS  # then a block computes several pieces of a region
        mixed = {name: bool(rng.random() < 0.5) for name in FUSED}
        switches: list[dict[str, Any]] = [dict(FUSED), dict(UNFUSED), mixed, {}]
        groups.append(
            [
                generate(case.program, inplace_outputs=case.inplace_outputs, **tuning, **switch)
                for switch in (switches if not groups else switches[:2])
            ]
        )
    return groups


def _check(case: RandomProgram, groups: list[list[GeneratedKernel]], seed: int) -> None:
    for group in groups:
        first: list[bytes] | None = None
        for number, generated in enumerate(group):
            # The grids and orders differ from kernel to kernel; the bits may not.
            num_blocks = (3, 1, 2, 5)[(number + seed) % 4]
            result = emulate(generated, case.inputs, num_blocks=num_blocks, order=seed * 7 + number)
            found = [bits(output) for output in result.outputs]
            if first is None:
                first = found
                unknown = assert_close(result.outputs, case.program, case.inputs, case.name)
                assert unknown <= MAX_UNKNOWN
            assert found == first, f"{case.name}: {group[0].schedule.options} and {generated.schedule.options} differ"
            check_statistics(generated, result.counters)
            if num_blocks > 1 and not has_loops(case.program):
                assert result.counters.grid_barriers == generated.grid_barriers
        check_races = seed % CHUNK > 0  # without the hooks it is another compilation: once per chunk
        for order, num_blocks in (("forward", 1), ("reverse", 4)):
            again = emulate(group[0], case.inputs, num_blocks=num_blocks, order=order, check_races=check_races)
            assert [bits(output) for output in again.outputs] == first, f"{case.name}: {order}, {num_blocks} blocks"


@pytest.mark.parametrize("chunk", range(NUM_SEEDS // CHUNK))
def test_random_programs(chunk: int) -> None:
    """One run of the compiler serves a chunk of seeds; all their failures are reported together."""
    cases: dict[int, tuple[RandomProgram, list[list[GeneratedKernel]]]] = {}
    failures = []
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        case = random_program(seed)
        try:
            cases[seed] = case, _variants(case, seed)
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}\n{case.program}")
    kernels = [groups for _, groups in cases.values()]
    emulator.prepare([kernel for groups in kernels for group in groups for kernel in group], check_races=True)
    for seed, (case, groups) in cases.items():
        try:
            _check(case, groups, seed)
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {CHUNK} programs fail\n\n" + "\n\n".join(failures)


def test_a_seed_gives_the_same_program() -> None:
    for seed in range(20):
        first, second = random_program(seed), random_program(seed)
        assert first.program == second.program and first.inplace_outputs == second.inplace_outputs
        for a, b in zip(first.inputs, second.inputs, strict=True):
            assert np.array_equal(a, b)
