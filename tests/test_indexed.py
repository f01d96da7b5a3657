"""Indexed operations: the emitted source in the emulator against the reference, fused in every way."""

from __future__ import annotations

import numpy as np
import pytest
from harness import emulate
from indexed_table import indexed_cases
from table import Case
from table_runs import check_cases, same_bits

from trainkernel.access import AccessWalker
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.indexing import ZERO, variable
from trainkernel.ir import Operation, TensorSpec
from trainkernel.runtime import nvrtc

CASES = tuple(indexed_cases())


@pytest.mark.parametrize("half", range(2))
def test_table(half: int) -> None:
    check_cases(CASES[half::2], half, exact=True)


# ---------------------------------------------------------------------------- fusion


def test_a_gather_is_evaluated_inside_a_product() -> None:
    """An embedding that a product and its gradient read."""
    b = ProgramBuilder()
    table, tokens, w = b.input("table", (20, 33)), b.input("tokens", (40,), "int32"), b.input("w", (33, 17))
    rows = b.op("take", table, tokens, name="rows")
    fused, unfused, _ = same_bits(b.build([b.op("relu", b.op("mm", rows, w))]))
    assert (fused.materialized_operations, unfused.materialized_operations) == (1, 3)
    assert "b_table[c_1 * 33 + k]" in fused.source


def test_views_of_inlined_indexed_values() -> None:
    b = ProgramBuilder()
    x, y = b.input("x", (6, 9)), b.input("y", (6, 9))
    joined = b.op("concatenate", b.op("exp", x), y, dim=0, name="joined")
    padded = b.op("pad", joined.T, 0.5, low=(1, 0), high=(0, 2), interior=(0, 1), name="padded")
    part = TensorSpec(padded.buffer, (5, 9), (25, 2), 26, "float32")
    fused, _, _ = same_bits(b.build([b.op("sum", b.op("flip", part, dims=(0,)), dims=(1,))]))
    assert fused.materialized_operations == 1


def test_between_a_reduction_and_a_product() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (12, 40)), b.input("w", (45, 8))
    start = b.input("start", (), "int32")
    window = b.op("dynamic_slice", x, 0, start, sizes=(12, 33))
    wide = b.op("pad", window, 0, low=(0, 5), high=(0, 7), interior=(0, 0))
    scale = b.op("flip", b.op("sum", x, dims=(1,)), dims=(0,))
    program = b.build([b.op("mul", b.op("mm", wide, w), TensorSpec(scale.buffer, (12, 1), (1, 1)))])
    same_bits(program)


def test_a_member_is_not_read_at_another_element() -> None:
    """A flipped value of the same size cannot come from the register of its own element."""
    b = ProgramBuilder()
    x = b.input("x", (300,))
    y = b.op("exp", x, name="y")
    z = b.op("add", y, b.op("flip", y, dims=(0,)), name="z")
    same_bits(b.build([y, z]))


def test_random_bits_are_computed_once_per_use() -> None:
    """Philox is dear: bits that a product would need in every tile are stored."""
    b = ProgramBuilder()
    key = b.input("key", (2,), "uint32")
    uniform = b.op("cast", b.op("random_bits", key, shape=(512, 512), stream=0, name="bits"), dtype="float32")
    program = b.build([b.op("mm", b.input("x", (512, 512)), uniform)])
    stored = {name for task in generate(program).schedule.tasks for name in task.stores}
    assert "cast" in stored
    b = ProgramBuilder()
    key, x = b.input("key", (2,), "uint32"), b.input("x", (33, 40))
    keep = b.op("compare", b.op("random_bits", key, shape=(33, 40), stream=7), 2**31, comparison="lt", dtype="bool")
    program = b.build([b.op("where", keep, b.op("mul", x, 2), 0)])
    assert same_bits(program)[2].materialized_operations == 1


def test_a_moved_read_is_never_at_its_own_element() -> None:
    """Not even where views of views divide the moved coordinate, as rows of four do here."""
    x = TensorSpec("x", (40, 2, 1), (1, 5, 1))
    spread = Operation("spread", "neg", (x.broadcast_to((40, 2, 4)),), TensorSpec.dense("spread", (40, 2, 4)))
    start = TensorSpec("start", (), (), dtype="int32")
    rows = TensorSpec("spread", (40, 8), (8, 1))
    window = Operation("w", "dynamic_slice", (rows, 0, start), TensorSpec.dense("w", (40, 1)), {"sizes": (40, 1)})
    element = variable("i", 40)
    walker = AccessWalker({"spread": spread})
    indices = [access.index for access in walker.pointwise(window, (element, ZERO)) if access.buffer == "x"]
    assert indices and element not in indices


# ---------------------------------------------------------------------------- in place and loops


def test_a_cache_is_updated_in_place() -> None:
    """The new rows are written into the state, and attention reads the state as it then is."""
    b = ProgramBuilder()
    cache, row, position = b.input("cache", (12, 8)), b.input("row", (1, 8)), b.input("position", (), "int32")
    query = b.input("query", (3, 8))
    after = b.op("dynamic_update", cache, row, position, 0, name="after")
    scores = b.op("mm", query, after.T, name="scores")
    program = b.build([after, scores, b.op("take", after, b.op("iota", shape=(5,), dtype="int32"))])
    for kernel in same_bits(program, inplace_outputs={0: 0}):
        assert kernel.direct_state_commits == 1


def test_a_state_that_is_gathered_from_is_committed_after() -> None:
    """Every element of the new state needs another one of the old: the old must be whole until all are read."""
    b = ProgramBuilder()
    state, order = b.input("state", (40, 5)), b.input("order", (40,), "int32")
    program = b.build([b.op("add", b.op("take", state, order), b.op("flip", state, dims=(0,)))])
    fused, unfused, _ = same_bits(program, inplace_outputs={0: 0})
    assert (fused.direct_state_commits, unfused.direct_state_commits) == (0, 1)


def test_an_update_by_the_state_itself_is_committed_after() -> None:
    b = ProgramBuilder()
    state, start = b.input("state", (40,)), b.input("start", (), "int32")
    window = TensorSpec(state.buffer, (7,), (1,), 30, "float32")
    program = b.build([b.op("dynamic_update", state, window, start)])
    for kernel in same_bits(program, inplace_outputs={0: 0}):
        assert kernel.direct_state_commits == 0


def test_a_loop_fills_a_buffer_and_reads_it_back() -> None:
    """Each step writes one row of the carried buffer and gathers from all rows."""
    body = ProgramBuilder()
    table, buffer, step = body.input("table", (9, 6)), body.input("buffer", (5, 6)), body.input("step", (), "int32")
    token = body.op("take", table, body.op("add", step, 2), name="token")
    row = TensorSpec(token.buffer, (1, 6), (6, 1))
    after = body.op("dynamic_update", buffer, row, step, 0, name="after")
    seen = body.op("cumsum", after, dim=0, name="seen")
    last = body.op("take", seen, step, name="last")
    program = body.build([after, last])
    b = ProgramBuilder()
    steps = b.input("steps", (4,), "int32")
    final, rows = b.loop(
        program, [b.input("table", (9, 6)), b.input("start", (5, 6)), steps], num_carry=1, num_xs=1, length=4
    )
    same_bits(b.build([final, rows]))


# ---------------------------------------------------------------------------- numbers


def test_negative_and_large_indices() -> None:
    """Gathers clamp, scatters drop."""
    b = ProgramBuilder()
    x, places, updates = b.input("x", (4,)), b.input("places", (5,), "int64"), b.input("updates", (5,))
    program = b.build([b.op("take", x, places), b.op("scatter_add", places, updates, size=4, dtype="float32")])
    inputs = [np.arange(4, dtype="f4"), np.array([-(2**40), -1, 2, 4, 2**40]), np.ones(5, "f4")]
    taken, summed = emulate(generate(program), inputs).outputs
    assert taken.tolist() == [0, 0, 2, 3, 3]
    assert summed.tolist() == [0, 0, 1, 0, 0][:4]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nvrtc_takes_the_source(case: Case) -> None:
    arch = ("sm_80", "sm_90")[len(case.name) % 2]
    assert nvrtc.compile_cubin(generate(case.program, target=arch).source, arch).startswith(b"\x7fELF")
