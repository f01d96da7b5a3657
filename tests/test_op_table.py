"""Every case of the op table: the emitted source in the emulator, races checked, against the reference."""

from __future__ import annotations

import pytest
from error_bounds import assert_close
from harness import MAX_UNKNOWN, emulate
from indexed_table import indexed_cases
from scan_table import scan_cases
from table import DTYPE_NAMES, Case, accepts, is_covered, op_cases

from trainkernel import emulator
from trainkernel.codegen import generate
from trainkernel.ops import OPS

CASES = op_cases()
CHUNK = 12


@pytest.mark.parametrize("chunk", range(-(-len(CASES) // CHUNK)))
def test_op_table(chunk: int) -> None:
    """One run of the compiler serves a chunk; all its failures are reported together."""
    cases = CASES[chunk * CHUNK : (chunk + 1) * CHUNK]
    kernels = [generate(case.program) for case in cases]
    emulator.prepare(kernels, check_races=True)
    failures = []
    for number, (case, generated) in enumerate(zip(cases, kernels, strict=True)):
        try:
            result = emulate(generated, case.inputs, num_blocks=3, order=chunk + number)
            assert assert_close(result.outputs, case.program, case.inputs, case.name) <= MAX_UNKNOWN
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(cases)} cases fail\n\n" + "\n\n".join(failures)


def test_every_op_is_covered() -> None:
    cases = (*CASES, *indexed_cases(), *scan_cases())
    covered = {item.op for case in cases for item in case.program.operations if hasattr(item, "op")}
    assert covered == {op.name for op in OPS.values() if op.kind != "view"}
    assert sum(len(case.program.outputs) for case in CASES) > 5000


def test_ops_are_covered_in_every_dtype() -> None:
    names = {case.name for case in CASES}
    for op in filter(is_covered, OPS.values()):
        if op.kind != "product":
            assert {f"{op.name} {dtype}" for dtype in DTYPE_NAMES if accepts(op, dtype)} <= names


def test_case_names_are_unique() -> None:
    names: list[str] = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert isinstance(CASES[0], Case)
