"""Scans and scatters: the emitted source in the emulator against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from error_bounds import assert_close
from harness import bits, emulate
from scan_table import scan_cases
from table_runs import check_cases, inputs_of, same_bits

from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.runtime import nvrtc

CASES = tuple(scan_cases())


@pytest.mark.parametrize("exact", [True, False])
def test_table(exact: bool) -> None:
    check_cases([case for case in CASES if ("int" in case.name) == exact], 7, exact=exact)


def test_an_epilogue_of_a_scan() -> None:
    b = ProgramBuilder()
    x, y = b.input("x", (9, 300)), b.input("y", (9, 300))
    total = b.op("cumsum", b.op("exp", x), dim=1, name="total")
    fused, unfused, _ = same_bits(b.build([b.op("mul", total, y)]))
    assert (fused.materialized_operations, unfused.materialized_operations) == (1, 3)


def test_the_gradient_of_an_embedding() -> None:
    """Scattered rows, added to the table in place."""
    b = ProgramBuilder()
    table, tokens, ct = b.input("table", (20, 33)), b.input("tokens", (400,), "int32"), b.input("ct", (400, 33))
    places = b.op("minimum", b.op("maximum", tokens, 0), 19)
    gradient = b.op("scatter_add", places, ct, size=20, dtype="float32")
    program = b.build([b.op("sub", table, b.op("mul", gradient, 0.125))])
    kernels = same_bits(program, inplace_outputs={0: 0})
    assert kernels[0].direct_state_commits == 1


def test_many_results_of_a_thread() -> None:
    """So many results that a thread has several, of rows that are wider than a block."""
    b = ProgramBuilder()
    places, updates = b.input("places", (600,), "int32"), b.input("updates", (600, 270))
    program = b.build([b.op("scatter_add", places, updates, size=300, dtype="float32")])
    kernel = generate(program, threads_per_block=128)
    assert "tk_scatter<TkSum, 128, 4>" in kernel.source
    inputs = [np.random.default_rng(0).integers(-1, 301, 600).astype("i4"), inputs_of(program)[1]]
    results = [emulate(kernel, inputs, num_blocks=blocks).outputs for blocks in (2, 5)]
    assert bits(results[0][0]) == bits(results[1][0])
    assert assert_close(results[0], program, inputs) == 0


def test_scattered_updates_are_added_in_order() -> None:
    """1e8 swallows what comes after it and not what came before."""
    b = ProgramBuilder()
    places, updates = b.input("places", (4,), "int32"), b.input("updates", (4,))
    program = b.build([b.op("scatter_add", places, updates, size=2, dtype="float32")])
    inputs = [np.array([1, 1, 1, 1], "i4"), np.array([3, 1e8, -1e8, 1], "f4")]
    assert emulate(generate(program), inputs).outputs[0].tolist() == [0, 1]


@pytest.mark.parametrize("shape", [(3, 5000), (5000, 3), (70, 40)])
def test_a_scan_is_the_same_for_any_grid(shape: tuple[int, int]) -> None:
    b = ProgramBuilder()
    x = b.input("x", shape)
    program = b.build([b.op("cumsum", x, dim=dim, reverse=reverse) for dim in (0, 1) for reverse in (False, True)])
    kernel, inputs = generate(program), inputs_of(program)
    results = [emulate(kernel, inputs, num_blocks=blocks, order=blocks).outputs for blocks in (1, 2, 7)]
    assert all([bits(x) for x in result] == [bits(x) for x in results[0]] for result in results)
    assert assert_close(results[0], program, inputs) == 0


@pytest.mark.parametrize(("name", "arch"), [("cumsum float64", "sm_80"), ("scatter_add int64", "sm_90")])
def test_nvrtc_takes_the_source(name: str, arch: str) -> None:
    (program,) = [case.program for case in CASES if case.name == name]
    assert nvrtc.compile_cubin(generate(program, target=arch).source, arch).startswith(b"\x7fELF")
