"""Tensor-core products: layouts, tiles and kinds of operands, with exact sums; which tiles and casts are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exact_products import product, small_integers, stored
from harness import bits, check, emulate

from trainkernel import emulator, products
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.dtypes import DTYPES
from trainkernel.errors import EmulatorError
from trainkernel.ir import Operation, Program, TensorSpec
from trainkernel.options import Options
from trainkernel.product_costs import pipeline_stages
from trainkernel.product_plans import ProductPlan
from trainkernel.products import plan_product
from trainkernel.runtime import nvrtc
from trainkernel.target import PRESETS, Target

LAYOUTS = ("nn", "nt", "tn", "tt")
TILES = [(16, 16), (16, 64), (64, 16), (64, 64), (128, 64), (64, 128), (128, 128)]
WARPGROUP_TILES = [(128, 64), (128, 128), (128, 256), (256, 128)]
ForceTile = Callable[..., None]


@pytest.fixture
def force_tile(monkeypatch: pytest.MonkeyPatch) -> ForceTile:
    """Lets a test fix the tile of every product on tensor cores."""

    def force(tile_m: int, tile_n: int, wanted: str = "tensor") -> None:
        monkeypatch.setattr(products, "_tile_choices", lambda path, *_: [(tile_m, tile_n)] if path == wanted else [])
        if wanted == "warpgroup":  # more steps than buffers
            monkeypatch.setattr(products, "SPLITS", (1,))
        products._best_tiles.cache_clear()

    yield force  # type: ignore[misc]
    monkeypatch.undo()
    products._best_tiles.cache_clear()


def plan_of(generated: GeneratedKernel) -> ProductPlan:
    (plan,) = (task.plan for task in generated.schedule.tasks if task.kind == "product")
    assert isinstance(plan, ProductPlan) and plan.is_tensor_tile
    return plan


def plan(m: int, n: int, k: int, target: str = "sm_90a", **options: Any) -> ProductPlan:
    a, b = TensorSpec.dense("a", (m, k), "bfloat16"), TensorSpec.dense("b", (k, n), "bfloat16")
    operation = Operation("out", "mm", (a, b), TensorSpec.dense("out", (m, n), "bfloat16"), {})
    return plan_product(operation, Target.preset(target), Options(**options))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_and_layout(tile: tuple[int, int], layout: str, force_tile: ForceTile) -> None:
    """Aligned rows that end inside of a tile and of a step; rows that are not aligned."""
    force_tile(*tile)
    for m, n, k in ((72, 136, 200), (130, 67, 77)):
        program, inputs, expected = product(m, n, k, layout, "float16" if k == 77 else "bfloat16")
        generated = generate(program, target="sm_90a")
        assert (plan_of(generated).tile_m, plan_of(generated).tile_n) == tile
        assert np.array_equal(emulate(generated, inputs, num_blocks=2, order=1).outputs[0], expected)


@pytest.mark.parametrize("tile", WARPGROUP_TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_of_warpgroups(tile: tuple[int, int], layout: str, force_tile: ForceTile) -> None:
    """Ends inside of a tile and of a step; fewer steps than buffers and more; rows that are not aligned."""
    force_tile(*tile, "warpgroup")
    many = 256 if tile == (128, 64) else 512
    for m, n, k, threads in ((136, 264, 64, 256), (130, 67, 77, many), (64, 72, 456, 256)):
        program, inputs, expected = product(m, n, k, layout, "float16" if k == 77 else "bfloat16")
        generated = generate(program, target="sm_90a", threads_per_block=threads)
        chosen = plan_of(generated)
        assert (chosen.path, chosen.tile_m, chosen.tile_n) == ("warpgroup", *tile)
        assert np.array_equal(emulate(generated, inputs, num_blocks=2, order=1).outputs[0], expected)


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_warpgroups_wait_for_what_they_need(layout: str, force_tile: ForceTile) -> None:
    """Without a barrier or a wait, the emulator finds a race or a wrong sum."""
    force_tile(128, 64, "warpgroup")
    program, inputs, expected = product(128, 64, 520, layout)
    generated = generate(program, target="sm_90a")
    for line in (
        "tk_cp_async_wait<AHEAD - 1>();",
        "__syncthreads();  // this step has arrived, and the last but one has been multiplied, for every thread",
        "tk_wgmma_wait<1>();  // the step before has been multiplied",
        "tk_wgmma_wait<0>();",
        "__syncthreads();  // all steps have been read",
    ):
        assert generated.source.count(line) == 1
        broken = replace(generated, source=generated.source.replace(line, ""))
        try:
            result = emulator.emulate(broken, inputs, num_blocks=1, check_races=True)
        except EmulatorError:
            continue
        assert not np.array_equal(result.outputs[0], expected), line


@pytest.mark.parametrize("threads", [128, 512, 1024])
def test_every_number_of_threads(threads: int, force_tile: ForceTile) -> None:
    force_tile(128, 64)
    program, inputs, expected = product(150, 72, 136, "tn")
    generated = generate(program, target="sm_90a", threads_per_block=threads)
    assert np.array_equal(emulate(generated, inputs, num_blocks=2).outputs[0], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_and_views_off_the_grid_of_16_bytes(layout: str) -> None:
    """An input that begins anywhere, and views that begin or have rows at a few elements from a multiple of eight."""
    m, n, k = 40, 48, 64
    for offset, gap in ((0, 0), (1, 0), (4, 8), (8, 4)):
        shapes = stored(m, n, k, layout)
        builder = ProgramBuilder()
        specs, inputs, wide = [], [], []
        for name, (rows, columns) in zip("ab", shapes, strict=True):
            size = offset + rows * (columns + gap)
            builder.input(name, (size,), "bfloat16")
            specs.append(TensorSpec(name, (rows, columns), (columns + gap, 1), offset, "bfloat16"))
            whole = np.zeros(size + 1, DTYPES["bfloat16"].numpy)[1:]  # two bytes from an aligned address
            whole[:] = small_integers((size,), "bfloat16", size)
            inputs.append(whole)
            wide.append(whole[offset:].reshape(rows, columns + gap)[:, :columns].astype(np.float32))
        a, b = (spec if kind == "n" else spec.T for spec, kind in zip(specs, layout, strict=True))
        expected = (wide[0] if layout[0] == "n" else wide[0].T) @ (wide[1] if layout[1] == "n" else wide[1].T)
        generated = generate(builder.build([builder.op("mm", a, b, dtype="float32")]))
        for arguments in (inputs, [array.copy() for array in inputs]):
            result = emulator.emulate(generated, arguments, num_blocks=2, check_races=True)
            assert np.array_equal(result.outputs[0], expected)


@pytest.mark.parametrize("size", [(3, 40, 24, 72), (2, 33, 17, 45)])
@pytest.mark.parametrize("transposed", [False, True])
def test_batches(size: tuple[int, int, int, int], transposed: bool) -> None:
    batch, m, n, k = size
    builder = ProgramBuilder()
    a = builder.input("a", (batch, k, m) if transposed else (batch, m, k), "float16")
    b = builder.input("b", (batch, n, k) if transposed else (batch, k, n), "float16")
    inputs = [small_integers(spec.shape, "float16", seed) for seed, spec in enumerate((a, b))]
    left, right = (array.astype(np.float32) for array in inputs)
    expected = left.swapaxes(1, 2) @ right.swapaxes(1, 2) if transposed else left @ right
    operands = (a.mT, b.mT) if transposed else (a, b)
    generated = generate(builder.build([builder.op("bmm", *operands, dtype="float32")]))
    assert np.array_equal(emulate(generated, inputs, num_blocks=3, order=2).outputs[0], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_depth_gives_the_same_bits_on_any_grid(layout: str) -> None:
    program, inputs, expected = product(24, 20, 3000, layout)
    generated = generate(program)
    assert any(
        task.plan is not None and task.plan.split > 1 for task in generated.schedule.tasks if task.kind == "product"
    )
    for num_blocks in (1, 3, 7):
        result = emulate(generated, inputs, num_blocks=num_blocks, order=num_blocks).outputs[0]
        assert np.array_equal(result, expected)


def test_tiles_of_large_products_are_taken_in_groups(force_tile: ForceTile) -> None:
    force_tile(16, 16)
    for m, n in ((150, 160), (256, 144)):
        program, inputs, expected = product(m, n, 16, "nn")
        generated = generate(program)
        assert "const tk_index group" in generated.source
        assert np.array_equal(emulate(generated, inputs, num_blocks=4, order=3).outputs[0], expected)


def test_fused_operands_give_the_same_bits(force_tile: ForceTile) -> None:
    """Casts of float32 and of the other 16-bit format, and computed values, along the depth and across it."""
    force_tile(64, 64)
    rng = np.random.default_rng(0)
    for dtype, source in (("bfloat16", "float32"), ("float16", "bfloat16")):
        builder = ProgramBuilder()
        x, w, h = (
            builder.input("x", (72, 80), source),
            builder.input("w", (80, 68), source),
            builder.input("h", (72, 68), source),
        )
        cast_x, cast_w = builder.op("cast", x, dtype=dtype), builder.op("cast", w, dtype=dtype)
        active = builder.op("cast", builder.op("relu", h), dtype=dtype)
        outputs = [
            builder.op("mm", cast_x, cast_w),
            builder.op("mm", cast_x.T, active),
            builder.op("mm", active, cast_w.T),
        ]
        program = builder.build(outputs)
        inputs = [rng.standard_normal(spec.shape).astype(DTYPES[source].numpy) for spec in program.tensor_inputs]
        fused = check(program, inputs, num_blocks=2, inline_input_casts=True)
        apart = generate(program, fuse_pointwise=False, fuse_epilogues=False, inline_input_casts=False)
        assert fused.materialized_operations < apart.materialized_operations
        results = [emulate(generated, inputs).outputs for generated in (fused, apart)]
        assert [bits(array) for array in results[0]] == [bits(array) for array in results[1]]


# ---------------------------------------------------------------------------- what is chosen


def test_large_products_have_large_tiles() -> None:
    chosen = plan(4096, 4096, 4096)
    assert chosen.path == "warpgroup" and chosen.tile_m * chosen.tile_n == 128 * 256
    chosen = plan(4096, 4096, 4096, "sm_90")
    assert (chosen.path, chosen.tile_m, chosen.tile_n) == ("tensor", 128, 128)
    chosen = plan(1024, 1024, 1024)
    assert (chosen.path, chosen.tile_m, chosen.tile_n, chosen.num_pieces) == ("warpgroup", 128, 64, 128)
    chosen = plan(1024, 1024, 1024, "sm_90")
    assert chosen.tile_m * chosen.tile_n == 128 * 64 and chosen.num_pieces <= 132
    for size in (64, 128, 256):
        chosen = plan(size, size, size)
        assert chosen.tile_m * chosen.tile_n <= 32 * 32


@pytest.mark.parametrize("target", PRESETS)
def test_steps_fit_in_shared_memory(target: str) -> None:
    """Two steps at least, no more than there are to be under way."""
    for size in ((4096, 4096, 4096), (1024, 1024, 1024), (200, 200, 40), (65536, 64, 64), (64, 64, 65536)):
        for options in ({}, {"gemm_k_tile": 16}, {"threads_per_block": 1024}, {"shared_skew": 0}):
            chosen = plan(*size, target=target, **options)
            stages = pipeline_stages(chosen, Target.preset(target))
            step_bytes = 2 * (chosen.tile_m + chosen.tile_n) * chosen.tile_k
            assert 2 <= stages <= (6 if chosen.path == "warpgroup" else 4)
            assert stages * step_bytes <= Target.preset(target).shared_bytes_per_block
            assert 4 * chosen.tile_m * (chosen.tile_n + 4) <= Target.preset(target).shared_bytes_per_block


def _layer(batch: int, width: int) -> Program:
    """A layer whose float32 inputs are rounded in the step."""
    builder = ProgramBuilder()
    x, w = builder.input("x", (batch, width)), builder.input("w", (width, width))
    operands = [builder.op("cast", spec, dtype="bfloat16") for spec in (x, w)]
    return builder.build([builder.op("mm", *operands)])


def test_a_cast_that_many_tiles_read_is_stored() -> None:
    def num_casts(program: Program, **options: Any) -> int:
        generated = generate(program, target="sm_90a", **options)
        return sum(task.kind == "pointwise" for task in generated.schedule.tasks)

    assert num_casts(_layer(1024, 1024)) == 2
    assert num_casts(_layer(1024, 1024), inline_input_casts=True) == 0
    assert num_casts(_layer(128, 256)) == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (128, 128)])
def test_registers_suffice(arch: str, tile: tuple[int, int], force_tile: ForceTile) -> None:
    force_tile(*tile)
    source = generate(product(1024, 1024, 1024, "tn")[0], target=arch).source
    (statistics,) = nvrtc.resource_statistics(source, arch).values()
    assert statistics.spill_store_bytes == statistics.spill_load_bytes == 0


@pytest.mark.parametrize(("tile", "threads"), [(tile, 256) for tile in WARPGROUP_TILES] + [((128, 256), 512)])
def test_registers_suffice_for_warpgroups(tile: tuple[int, int], threads: int, force_tile: ForceTile) -> None:
    force_tile(*tile, "warpgroup")
    source = generate(product(1024, 1024, 1024, "tn")[0], target="sm_90a", threads_per_block=threads).source
    (statistics,) = nvrtc.resource_statistics(source, "sm_90a").values()
    assert statistics.spill_store_bytes == statistics.spill_load_bytes == 0


@pytest.mark.parametrize("outputs", [4, 6])
def test_registers_suffice_for_several_results(outputs: int, force_tile: ForceTile) -> None:
    """Those of a batch that a thread holds before it stores them, beside operands without aligned rows."""
    force_tile(256, 128, "warpgroup")
    b = ProgramBuilder()
    x, w = b.input("x", (515, 515), "bfloat16"), b.input("w", (515, 515), "bfloat16")
    total = b.op("mm", x, w, dtype="float32")
    program = b.build([total, *(b.op("mul", total, 0.5 * number) for number in range(1, outputs))])
    source = generate(program, target="sm_90a", threads_per_block=512).source
    (statistics,) = nvrtc.resource_statistics(source, "sm_90a").values()
    assert statistics.spill_store_bytes == statistics.spill_load_bytes == 0
