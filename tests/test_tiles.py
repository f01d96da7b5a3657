"""Float32 tiles of products on the whole grid: how a block's threads share them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from exact_products import small_integers
from harness import check
from region_programs import TILES, plain_and_fused
from region_programs import product as float32_product

from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.ir import TensorSpec
from trainkernel.product_costs import tile_groups
from trainkernel.product_plans import ProductPlan
from trainkernel.target import PRESETS, Target

H100 = Target.preset("sm_90")


@pytest.mark.parametrize("threads", [128, 256, 512, 1024])
@pytest.mark.parametrize("layout", ["nn", "tn", "nt", "tt"])
def test_groups_of_threads_share_the_depth_of_a_tile(threads: int, layout: str) -> None:
    """Each group adds up its part of every step; fused operands take the same way to the same bits."""
    rng = np.random.default_rng(threads)
    options = {"region_pieces": 0, "gemm_k_tile": 32, "threads_per_block": threads}
    chosen = set()
    for shape in TILES:
        program = plain_and_fused(shape, layout)
        plans = [task.plan for task in generate(program, **options).schedule.tasks]
        chosen |= {
            tile_groups(plan, threads, H100) for plan in plans if isinstance(plan, ProductPlan) and plan.path == "tile"
        }
        inputs = [rng.standard_normal(spec.shape).astype(np.float32) for spec in program.inputs]
        check(program, inputs, num_blocks=2, order=1, **options)
    assert max(chosen) > 1


@pytest.mark.parametrize("threads", [128, 256, 512, 1024])
def test_groups_give_every_sum_to_one_thread(threads: int) -> None:
    for tile_m, tile_n in itertools.product((16, 32, 64), (8, 32, 64)):
        if tile_m * tile_n < threads and tile_n > 8:
            continue
        for depth in (1, 9, 64, 1000):
            plan = ProductPlan("tile", 256, 256, depth, tile_m, tile_n, 64, 1, depth)
            groups = tile_groups(plan, threads, H100)
            sums = max(1, tile_m * tile_n * groups // threads)
            micro_m = sums // min(sums, 4)
            workers = tile_m // micro_m * (tile_n // min(sums, 4))
            assert workers * groups <= threads and tile_m % micro_m == 0 and sums <= max(32, tile_m * tile_n // threads)


@pytest.mark.parametrize("target", PRESETS.values(), ids=PRESETS)
def test_the_sums_of_all_groups_fit_into_shared_memory(target: Target) -> None:
    """A long depth takes many groups, whose sums lie side by side."""
    for shape, tile_n in (((64, 32, 784), None), ((784, 31, 2000), 64)):
        for depth in (None, 32):
            options = {"threads_per_block": 1024, "gemm_tile_n": tile_n, "gemm_k_tile": depth}
            generated = generate(float32_product(*shape), target=target, **options)
            assert generated.shared_bytes <= target.shared_bytes_per_block


def _within_nan(b: ProgramBuilder, inputs: list[Any], rows: int, columns: int, gap: int) -> TensorSpec:
    """A matrix of small integers with NaN before it and between its rows; behind it lies nothing that may be read."""
    stride = columns + gap
    whole = np.full((rows + 1) * stride, np.nan, np.float32)
    whole[stride:].reshape(rows, stride)[:, :columns] = small_integers((rows, columns), "float32", len(inputs))
    inputs.append(whole[: len(whole) - gap])
    spec = b.input(f"x{len(inputs)}", inputs[-1].shape)
    return TensorSpec(spec.buffer, (rows, columns), (stride, 1), stride, spec.dtype)


@pytest.mark.parametrize("layout", ["nn", "tn", "nt", "tt"])
@pytest.mark.parametrize("gap", [4, 3])
def test_no_sum_has_what_lies_beside_an_operand(gap: int, layout: str) -> None:
    """Of tiles and panels whose last step is not whole, by copies of four elements and of one."""
    for (m, n, k), options in (
        ((20, 36, 44), {"gemm_k_tile": 32, "threads_per_block": 1024}),
        ((68, 40, 36), {"gemm_k_tile": 16, "threads_per_block": 128}),
        ((12, 20, 36), {"shared_skew": 0}),
    ):
        b, inputs = ProgramBuilder(), []
        k -= 4 - gap  # only whole runs of four are copied as such
        x = _within_nan(b, inputs, *((m, k) if layout[0] == "n" else (k, m)), gap)
        w = _within_nan(b, inputs, *((k, n) if layout[1] == "n" else (n, k)), gap)
        program = b.build([b.op("mm", x if layout[0] == "n" else x.T, w if layout[1] == "n" else w.T)])
        check(program, inputs, num_blocks=2, order=1, region_pieces=0, **options)


@pytest.mark.parametrize("gap", [4, 3])
def test_no_sum_has_what_lies_beside_streamed_weights(gap: int) -> None:
    """Of either layout, whose last columns do not fill a step, nor does the depth."""
    b, depth = ProgramBuilder(), 200 + gap
    inputs: list[Any] = [small_integers((8, depth), "float32")]
    x, w = b.input("x", (8, depth)), _within_nan(b, inputs, depth, 204, gap)
    hidden = b.op("relu", b.op("mm", x, w))
    program = b.build([hidden, b.op("mm", hidden, w.T)])
    generated = check(program, inputs, num_blocks=2, order=1, region_pieces=2, target=H100)
    assert generated.source.count("(tile + 1) * ") == 2
