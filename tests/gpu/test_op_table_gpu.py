"""Every case of the op table on a device against the reference, within the same bounds as the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from error_bounds import assert_close
from gpu_arrays import in_threads, launch, torch_module
from harness import MAX_UNKNOWN, bits
from indexed_table import indexed_cases
from scan_table import scan_cases
from table import Case, op_cases

import trainkernel as tk
from trainkernel import emulator
from trainkernel.ir import Operation
from trainkernel.ops import OPS

pytestmark = pytest.mark.gpu

CASES = (*op_cases(), *indexed_cases(), *scan_cases())
CHUNK = 60


def _compile(case: Case) -> Any:
    return tk.compile(case.program, device="cuda", barrier_timeout_ms=2000)


def _must_equal_the_emulator(case: Case) -> bool:
    """Whether IEEE arithmetic fixes every bit: no approximated function, no tensor cores."""
    ops = [OPS[item.op] for item in case.program.operations if isinstance(item, Operation)]
    tensor_cores = "float16" in case.name and "float32" not in case.name
    return all(op.max_ulps <= 0.5 and not (op.kind == "product" and tensor_cores) for op in ops)


@pytest.mark.parametrize("chunk", range(-(-len(CASES) // CHUNK)))
def test_op_table(chunk: int) -> None:
    torch_module()
    cases = CASES[chunk * CHUNK : (chunk + 1) * CHUNK]
    kernels = in_threads(_compile, cases)
    compared = emulator.is_available()
    if compared:
        exact = [kernel.stats for case, kernel in zip(cases, kernels, strict=True) if _must_equal_the_emulator(case)]
        emulator.prepare(exact)
    failures = []
    for case, kernel in zip(cases, kernels, strict=True):
        try:
            outputs = launch(kernel, case.inputs)
            assert assert_close(outputs, case.program, case.inputs, case.name) <= MAX_UNKNOWN
            if compared and _must_equal_the_emulator(case):
                emulated = emulator.emulate(kernel.stats, case.inputs).outputs
                for index, (got, want) in enumerate(zip(outputs, emulated, strict=True)):
                    assert bits(got) == bits(want), f"output {index} differs from the emulator's bits"
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(cases)} cases fail\n\n" + "\n\n".join(failures)


SANITIZED = ("add float32", "exp bfloat16", "sum float16", "softmax_stats float32", "mm float32 float32 33x70x65")


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", SANITIZED)
def test_under_the_sanitizer(name: str) -> None:
    torch_module()
    (case,) = (case for case in CASES if case.name == name)
    assert_close(launch(_compile(case), case.inputs), case.program, case.inputs, name)
