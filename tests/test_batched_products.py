"""Batched products: every path against the reference, its plan, its pieces, and what is fused into it."""

from __future__ import annotations

import numpy as np
import pytest
from harness import bits, check, emulate
from table import BATCHED_SIZES, batched_product_case

from trainkernel import emulator
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.ir import Operation, Program, TensorSpec
from trainkernel.options import Options
from trainkernel.passes import canonicalize_transposed_mm
from trainkernel.product_plans import ProductPlan
from trainkernel.products import plan_product
from trainkernel.runtime import nvrtc
from trainkernel.target import Target

PORTABLE = Target.preset("portable")


def plan(batch: int, m: int, k: int, n: int, dtype: str = "float32") -> ProductPlan:
    a, b = TensorSpec.dense("a", (batch, m, k), dtype), TensorSpec.dense("b", (batch, k, n), dtype)
    out = TensorSpec.dense("out", (batch, m, n), dtype)
    return plan_product(Operation("out", "bmm", (a, b), out), PORTABLE, Options())


def test_the_batch_multiplies_the_pieces() -> None:
    for sizes in BATCHED_SIZES:
        if 0 not in sizes:
            alone, batched = plan(1, *sizes[1:]), plan(*sizes)
            assert batched.num_outputs == sizes[0] * alone.num_outputs
            assert batched.num_pieces >= alone.num_pieces or batched.split < alone.split
    assert plan(12, 64, 64, 64).num_tiles == 12 * plan(12, 64, 64, 64).tiles_per_product


def test_a_large_batch_needs_no_split_depth() -> None:
    assert plan(1, 64, 4096, 64).split > 1
    assert plan(256, 64, 4096, 64).split == 1


@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ((4, 1, 64, 40), "gemv"),
        ((4, 40, 64, 1), "gemv_t"),
        ((4, 1, 64, 3), "thin"),
        ((4, 40, 8, 40), "thin"),
        ((4, 40, 64, 40), "panel"),
    ],
)
def test_paths(sizes: tuple[int, int, int, int], path: str) -> None:
    assert plan(*sizes).path == path
    if path == "panel":
        assert plan(*sizes, dtype="bfloat16").path == "tensor"


def test_a_batch_of_one_is_the_matrix_product() -> None:
    """The same plan, and the same bits."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((33, 300)).astype(np.float32), rng.standard_normal((300, 17)).astype(np.float32)]
    b = ProgramBuilder()
    plain = b.build([b.op("mm", b.input("a", (33, 300)), b.input("b", (300, 17)))])
    b = ProgramBuilder()
    batched = b.build([b.op("bmm", b.input("a", (1, 33, 300)), b.input("b", (1, 300, 17)))])
    first = emulate(generate(plain), inputs).outputs[0]
    second = emulate(generate(batched), [array[None] for array in inputs]).outputs[0]
    assert bits(first) == bits(second)


def _attention() -> Program:
    """Scores, softmax and weighted values of three heads that lie inside the rows."""
    b = ProgramBuilder()
    heads, tokens, width = 3, 20, 16
    q, k, v = (b.input(name, (tokens, heads * width)) for name in ("q", "k", "v"))
    q, k, v = (TensorSpec(x.buffer, (heads, tokens, width), (width, heads * width, 1), 0, x.dtype) for x in (q, k, v))
    scores = b.op("mul", b.op("bmm", q, k.mT, name="scores"), 0.25, name="scaled")
    largest, total = b.multi("softmax_stats", scores, dims=(2,), shape=(heads, tokens, 1), name="stats")
    weights = b.op("div", b.op("exp", b.op("sub", scores, largest)), total, name="weights")
    return b.build([b.op("bmm", weights, v, name="mixed")])


def test_attention_fuses_scale_and_weights() -> None:
    program = _attention()
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(spec.shape).astype(np.float32) for spec in program.tensor_inputs]
    fused = check(program, inputs, num_blocks=3)
    unfused = check(program, inputs, fuse_pointwise=False, fuse_epilogues=False)
    assert fused.materialized_operations < unfused.materialized_operations
    assert "batch" in fused.source
    assert bits(emulate(fused, inputs).outputs[0]) == bits(emulate(unfused, inputs, num_blocks=2).outputs[0])


def test_a_result_read_transposed_only_is_computed_transposed() -> None:
    b = ProgramBuilder()
    product = b.op("bmm", b.input("x", (3, 5, 7)), b.input("y", (3, 7, 6)))
    program = canonicalize_transposed_mm(b.build([b.op("exp", product.mT)]))
    assert program.operations[0].outputs[0].shape == (3, 6, 5)
    rng = np.random.default_rng(2)
    check(b.build([b.op("exp", product.mT)]), [rng.standard_normal(s.shape).astype("f4") for s in program.inputs])


def test_any_grid_gives_the_same_bits() -> None:
    case = batched_product_case(("float32", "float32"), (2, 17, 400, 18))
    kernel = generate(case.program)
    emulator.prepare([kernel], check_races=True)
    results = [emulate(kernel, case.inputs, num_blocks=blocks, order=blocks) for blocks in (1, 2, 5)]
    for result in results[1:]:
        assert [bits(x) for x in result.outputs] == [bits(x) for x in results[0].outputs]


@pytest.mark.parametrize(("dtype", "arch"), [("float32", "sm_80"), ("bfloat16", "sm_90")])
def test_nvrtc_takes_the_source(dtype: str, arch: str) -> None:
    program = batched_product_case((dtype, dtype), (3, 33, 70, 65)).program
    assert nvrtc.compile_cubin(generate(program, target=arch).source, arch).startswith(b"\x7fELF")
