"""Each barrier of four sources is removed in turn, and the emulator must notice.

A barrier that no run needs is either superfluous or unproven. Removing one gives a race, a read
of poison, a divergent or dishonest barrier, or a deadlock; a barrier whose removal nothing
notices stands in ``REDUNDANT`` with the reason why it is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
from harness import emulate
from samples import SAMPLES, Sample

from trainkernel import emulator
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.errors import EmulatorError, LaunchError

_FUNCTION = re.compile(r"^(?:__device__|extern \"C\" __global__|template)[^;{]*?(\w+)\([^;{]*\{", re.MULTILINE)
_BLOCK_BARRIER = re.compile(r"__syncthreads\(\);")
_GRID_BARRIER = re.compile(r"if \(!tk_grid_barrier\(barrier, (\d+)\)\) return;")

REDUNDANT: Mapping[tuple[str, str], str] = {}
"""(sample, site) of barriers that may be removed unnoticed, and why they are there."""


@dataclass(frozen=True)
class Site:
    """One barrier in a source: its function and its number there."""

    name: str
    start: int
    end: int

    def removed(self, source: str) -> str:
        return source[: self.start] + "/* removed */" + source[self.end :]


def sites(source: str) -> Iterator[Site]:
    """All block barriers and all calls of the grid barrier, named by function and position."""
    functions = [(match.start(), match.group(1)) for match in _FUNCTION.finditer(source)]
    seen: dict[str, int] = {}
    matches = [*_BLOCK_BARRIER.finditer(source), *_GRID_BARRIER.finditer(source)]
    for match in sorted(matches, key=lambda found: found.start()):
        function = next((name for start, name in reversed(functions) if start < match.start()), "?")
        kind = "grid barrier" if "grid" in match.group(0) else "block barrier"
        label = f"{function}: {kind}"
        seen[label] = seen.get(label, 0) + 1
        yield Site(f"{label} {seen[label]}", match.start(), match.end())


def _mutants(sample: Sample) -> tuple[GeneratedKernel, list[tuple[Site, GeneratedKernel]]]:
    generated = generate(sample.program, **sample.options)
    mutants = [(site, replace(generated, source=site.removed(generated.source))) for site in sites(generated.source)]
    return generated, mutants


def _outcome(mutant: GeneratedKernel, sample: Sample, num_block_barriers: int) -> str:
    """``caught``, ``not executed`` or ``missed``."""
    try:
        result = emulate(mutant, sample.inputs(), num_blocks=4)
    except (EmulatorError, LaunchError):
        return "caught"
    return "not executed" if result.counters.block_barriers == num_block_barriers else "missed"


@pytest.mark.parametrize("name", list(SAMPLES))
def test_no_barrier_can_be_removed_unnoticed(name: str) -> None:
    sample = SAMPLES[name]()
    generated, mutants = _mutants(sample)
    emulator.prepare([generated, *(mutant for _, mutant in mutants)], check_races=True)
    baseline = emulate(generated, sample.inputs(), num_blocks=4).counters
    outcomes = {site.name: _outcome(mutant, sample, baseline.block_barriers) for site, mutant in mutants}
    assert len(outcomes) == len(mutants)
    grid = [outcome for site, outcome in outcomes.items() if "grid barrier" in site]
    assert len(grid) == generated.grid_barriers
    missed = {site for site, outcome in outcomes.items() if outcome == "missed"}
    explained = {site for sample_name, site in REDUNDANT if sample_name == name}
    assert missed == explained, f"{outcomes}"
    assert sum(outcome == "caught" for outcome in outcomes.values()) >= 3
