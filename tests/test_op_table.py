"""Every case of the op table: the emitted source in the emulator, races checked, against the reference."""

from __future__ import annotations

import pytest
from error_bounds import assert_close
from harness import MAX_UNKNOWN, emulate
from table import DTYPE_NAMES, Case, op_cases

from trainkernel import emulator
from trainkernel.codegen import generate
from trainkernel.ops import OPS

CASES = tuple(op_cases())
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
    covered = {item.op for case in CASES for item in case.program.operations if hasattr(item, "op")}
    assert covered == set(OPS)
    assert sum(len(case.program.outputs) for case in CASES) > 3000


def test_pointwise_ops_are_covered_in_every_dtype() -> None:
    names = {case.name for case in CASES}
    for op in OPS.values():
        if op.kind == "pointwise" and max(op.num_inputs):
            assert {f"{op.name} {dtype}" for dtype in DTYPE_NAMES} <= names


def test_case_names_are_unique() -> None:
    names: list[str] = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert isinstance(CASES[0], Case)
