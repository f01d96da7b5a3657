"""What tests of tables and of fusion share: a chunk of cases in one compilation, variants that agree in every bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from error_bounds import assert_close
from harness import MAX_UNKNOWN, bits, check, emulate
from table import Case

from trainkernel import emulator, reference
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program

ON: dict[str, Any] = {"fuse_pointwise": True, "fuse_epilogues": True, "inline_input_casts": True}
OFF: dict[str, Any] = {"fuse_pointwise": False, "fuse_epilogues": False, "inline_input_casts": False}


def check_cases(cases: Sequence[Case], seed: int, *, exact: bool) -> None:
    """All cases in one compilation: right, free of races, the same bits for other grids and orders.

    ``exact`` says that nothing rounds, so the reference's bits are needed; else its error bounds decide.
    """
    kernels = [generate(case.program) for case in cases]
    emulator.prepare(kernels, check_races=True)
    failures = []
    for number, (case, kernel) in enumerate(zip(cases, kernels, strict=True)):
        try:
            _check(case, kernel, seed + number, exact)
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(cases)} cases fail\n\n" + "\n\n".join(failures)


def _check(case: Case, kernel: GeneratedKernel, order: int, exact: bool) -> None:
    first = emulate(kernel, case.inputs, num_blocks=3, order=order).outputs
    if exact:
        expected = reference.run(case.program, case.inputs)
        for position, (got, want) in enumerate(zip(first, expected, strict=True)):
            assert bits(got) == bits(want), f"output {position}, {case.program.outputs[position]}: {got} needs {want}"
    else:
        assert assert_close(first, case.program, case.inputs, case.name) <= MAX_UNKNOWN
    again = emulate(kernel, case.inputs, num_blocks=1, order="reverse").outputs
    assert [bits(x) for x in again] == [bits(x) for x in first]


def inputs_of(program: Program, seed: int = 5) -> list[Any]:
    """Normal numbers; small integers, some of them negative."""
    rng = np.random.default_rng(seed)
    values: list[Any] = []
    for spec in program.tensor_inputs:
        if "int" in spec.dtype:
            values.append(
                rng.integers(0 if spec.dtype[0] == "u" else -2, 9, spec.shape).astype(DTYPES[spec.dtype].numpy)
            )
        else:
            values.append(rng.standard_normal(spec.shape).astype(DTYPES[spec.dtype].numpy))
    return values


def same_bits(program: Program, *, inputs: Sequence[Any] | None = None, **options: Any) -> list[GeneratedKernel]:
    """The kernels fused, unfused and by default, which agree bit for bit."""
    inputs = inputs_of(program) if inputs is None else inputs
    kernels = [check(program, inputs, num_blocks=2, **variant, **options) for variant in (ON, OFF, {})]
    found = [[bits(x) for x in emulate(kernel, inputs).outputs] for kernel in kernels]
    assert found[0] == found[1] == found[2]
    return kernels
