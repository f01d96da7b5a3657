"""Every case of the op table: the emitted source in the emulator, races checked, against the reference."""

from __future__ import annotations

import pytest
from error_bounds import assert_close
from harness import MAX_UNKNOWN, emulate
from table import Case, op_cases

from trainkernel import emulator
from trainkernel.codegen import generate

CASES = tuple(op_cases())
CHUNK = 12


@pytest.fixture(scope="module")
def prepared() -> set[int]:
    """Chunks compiled so far: one run of the compiler serves a chunk."""
    return set()


def _prepare(number: int, prepared: set[int]) -> None:
    chunk = number // CHUNK
    if chunk not in prepared:
        cases = CASES[chunk * CHUNK : (chunk + 1) * CHUNK]
        emulator.prepare([generate(case.program) for case in cases], check_races=True)
        prepared.add(chunk)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_case(number: int, prepared: set[int]) -> None:
    _prepare(number, prepared)
    case: Case = CASES[number]
    result = emulate(generate(case.program), case.inputs, num_blocks=3, order=number)
    assert assert_close(result.outputs, case.program, case.inputs, case.name) <= MAX_UNKNOWN
