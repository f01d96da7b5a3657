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

_BODY = "__launch_bounds__: block barrier"
REDUNDANT: Mapping[tuple[str, str], str] = {
    (
        "mlp_rows",
        "tk_grid_arrive: block barrier 1",
    ): "one block has just passed the barrier at the end of its last piece",
    ("loop", f"{_BODY} 3"): "what reads the carry does so after the first barrier of the next step",
}
"""(sample, site) of barriers that may be removed unnoticed, and why they are there."""


@dataclass(frozen=True)
class Site:
    """One barrier in a source: its function and its number there."""

    name: str
    start: int
    end: int

    def removed(self, source: str) -> str:
        return source[: self.start] + "(void)0; /* removed */" + source[self.end :]


def sites(source: str) -> Iterator[Site]:
    """All block barriers and all calls of the grid barrier, named by function and position."""
    functions = [(match.start(), match.group(1)) for match in _FUNCTION.finditer(source)]
    seen: dict[str, int] = {}
    matches = [*_BLOCK_BARRIER.finditer(source), *_GRID_BARRIER.finditer(source)]
    for match in sorted(matches, key=lambda found: found.start()):
        if "grid" in match.group(0):
            label = "kernel: grid barrier"
        else:
            function = next((name for start, name in reversed(functions) if start < match.start()), "?")
            label = f"{function}: block barrier"
        seen[label] = seen.get(label, 0) + 1
        yield Site(f"{label} {seen[label]}", match.start(), match.end())


def _mutants(sample: Sample) -> tuple[GeneratedKernel, list[tuple[Site, GeneratedKernel]]]:
    generated = generate(sample.program, **sample.options)
    mutants = [(site, replace(generated, source=site.removed(generated.source))) for site in sites(generated.source)]
    return generated, mutants


def _outcome(mutant: GeneratedKernel, sample: Sample, num_block_barriers: Mapping[int, int]) -> str:
    """``caught``, ``not executed`` or ``missed``.

    On several blocks the grid barriers matter; on one block it runs all pieces one after the
    other, and the barriers between pieces that use the same shared memory do.
    """
    executed = False
    for num_blocks, expected in num_block_barriers.items():
        try:
            result = emulate(mutant, sample.inputs(), num_blocks=num_blocks)
        except (EmulatorError, LaunchError):
            return "caught"
        executed |= result.counters.block_barriers != expected
    return "missed" if executed else "not executed"


@pytest.mark.parametrize("name", list(SAMPLES))
def test_no_barrier_can_be_removed_unnoticed(name: str) -> None:
    sample = SAMPLES[name]()
    generated, mutants = _mutants(sample)
    emulator.prepare([generated, *(mutant for _, mutant in mutants)], check_races=True)
    baseline = {
        num_blocks: emulate(generated, sample.inputs(), num_blocks=num_blocks).counters.block_barriers
        for num_blocks in (4, 1)
    }
    outcomes = {site.name: _outcome(mutant, sample, baseline) for site, mutant in mutants}
    assert len(outcomes) == len(mutants)
    grid = [outcome for site, outcome in outcomes.items() if "grid barrier" in site]
    assert len(grid) == generated.grid_barriers
    missed = {site for site, outcome in outcomes.items() if outcome == "missed"}
    explained = {site for sample_name, site in REDUNDANT if sample_name == name}
    assert missed == explained, f"{outcomes}"
    assert sum(outcome == "caught" for outcome in outcomes.values()) >= 3
