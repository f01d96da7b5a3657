"""Float32 products by warpgroups, each number as the sum of two of TF32: every element, error, infinities and NaNs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from exact_products import Array, product
from harness import assert_close, bits, check, emulate

from trainkernel import products
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.ir import Operation, Program, TensorSpec
from trainkernel.options import Options
from trainkernel.product_plans import ProductPlan
from trainkernel.products import plan_product
from trainkernel.runtime import nvrtc
from trainkernel.target import Target

LAYOUTS = ("nn", "nt", "tn", "tt")
TILES = [(64, 32), (64, 64), (128, 32), (128, 64), (64, 128)]
ForceTile = Callable[..., None]


@pytest.fixture
def force_tile(monkeypatch: pytest.MonkeyPatch) -> ForceTile:
    """Lets a test fix the tile of every product, and the parts of its depth."""

    def force(tile_m: int, tile_n: int, split: int = 1, threads: int = 256) -> None:
        monkeypatch.setattr(products, "SPLIT_THREADS", threads)
        monkeypatch.setattr(products, "SPLIT_MIN_DEPTH", 64)
        monkeypatch.setattr(products, "_tile_choices", lambda path, *_: [(tile_m, tile_n)] if path == "split" else [])
        monkeypatch.setattr(products, "_best_panels", lambda *_: None)
        monkeypatch.setattr(products, "SPLITS", (split,))
        products._best_tiles.cache_clear()

    yield force  # type: ignore[misc]
    monkeypatch.undo()
    products._best_tiles.cache_clear()


def options(**more: Any) -> dict[str, Any]:
    return {"target": "sm_90a", "region_pieces": 0, **more}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_and_layout(tile: tuple[int, int], layout: str, force_tile: ForceTile) -> None:
    """Integers of few bits have exact products and sums; ends inside of tiles and steps; rows that are not aligned."""
    many = 512 if min(tile) >= 64 else 256
    for m, n, k, threads in ((136, 72, 96, 256), (67, 131, 109, many)):
        force_tile(*tile, threads=threads)
        program, inputs, expected = product(m, n, k, layout, "float32")
        generated = generate(program, **options(threads_per_block=threads))
        assert f"tk_split_sums<{tile[0]}, {tile[1]}, {threads}, 3, " in generated.source
        assert np.array_equal(emulate(generated, inputs, num_blocks=2, order=1).outputs[0], expected)


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_parts_of_the_depth_give_the_same_bits_on_any_grid(layout: str, force_tile: ForceTile) -> None:
    force_tile(64, 64, split=3)
    program, inputs, expected = product(64, 70, 300, layout, "float32")
    generated = generate(program, **options())
    for num_blocks in (1, 3):
        assert np.array_equal(emulate(generated, inputs, num_blocks=num_blocks).outputs[0], expected)


def _normal(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _matrix_product(m: int, n: int, k: int) -> Program:
    b = ProgramBuilder()
    return b.build([b.op("mm", b.input("a", (m, k)), b.input("b", (k, n)))])


def test_error_is_that_of_float32_sums(force_tile: ForceTile) -> None:
    """Root mean square of the error in units of 2^-24 of the sum of magnitudes; one TF32 product has hundreds."""
    force_tile(64, 64)
    a, b = _normal((64, 256), 0), _normal((256, 64), 1)
    exact = a.astype(np.float64) @ b
    unit = 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b))
    program = _matrix_product(64, 64, 256)
    errors = {}
    for precision in ("highest", "tf32"):
        generated = generate(program, **options(precision=precision))
        found = emulate(generated, [a, b], check_races=False).outputs[0]
        errors[precision] = float(np.sqrt(np.mean(((found - exact) / unit) ** 2)))
    fma = np.zeros((64, 64), np.float64)
    for k in range(256):
        fma = (fma + a[:, k, None].astype(np.float64) * b[k]).astype(np.float32).astype(np.float64)
    assert errors["highest"] < float(np.sqrt(np.mean(((fma - exact) / unit) ** 2)))
    assert 10 < errors["tf32"] < 1000


def test_what_is_no_number_is_as_in_float32(force_tile: ForceTile) -> None:
    """Infinities times finite numbers, NaNs of any bits, and numbers that would round to infinity."""
    force_tile(64, 32)
    a, b = _normal((64, 96), 0), _normal((96, 32), 1)
    a[3, 5], a[4, 7], a[5, 9], a[6, 2] = np.inf, -np.inf, np.nan, np.finfo(np.float32).max
    a[8, 1:3] = np.inf, -np.inf
    a[9, 50] = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
    a[10, 4], b[4, 6] = np.inf, 0.0
    b[2] *= 1e-3
    b[:, 20] = np.abs(b[:, 20])
    generated = generate(_matrix_product(64, 32, 96), **options())
    (found,) = emulate(generated, [a, b]).outputs
    with np.errstate(invalid="ignore", over="ignore"):
        want = (a.astype(np.float64) @ b).astype(np.float32)
    assert np.array_equal(np.isnan(found), np.isnan(want)) and np.array_equal(np.isinf(found), np.isinf(want))
    finite = np.isfinite(want)
    assert np.array_equal(found[~finite & ~np.isnan(want)], want[~finite & ~np.isnan(want)])
    assert np.allclose(found[finite], want[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exponent", [-112, -118, -126, -133])
def test_small_numbers_keep_multiples_of_the_smallest_of_tf32(exponent: int, force_tile: ForceTile) -> None:
    """Of an operand, less than 2^-136 is lost."""
    force_tile(64, 32)
    a, b = np.ldexp(_normal((64, 96), 0), exponent).astype(np.float32), np.ldexp(_normal((96, 32), 1), 100)
    (found,) = emulate(generate(_matrix_product(64, 32, 96), **options()), [a, b]).outputs
    want, magnitudes = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
    lost = np.abs(found - want)
    assert np.all(lost <= 96 * 2.0**-23 * magnitudes + 2.0**-136 * np.abs(b).sum(0, dtype=np.float64))
    if exponent < -120:
        assert np.any(lost > 2.0**-20 * magnitudes)


def test_one_product_of_tf32_keeps_a_nan(force_tile: ForceTile) -> None:
    force_tile(64, 32)
    a, b = _normal((64, 64), 0), _normal((64, 32), 1)
    a[9, 50] = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
    generated = generate(_matrix_product(64, 32, 64), **options(precision="tf32"))
    assert "tk_split_sums<64, 32, 256, 1, " in generated.source
    (found,) = emulate(generated, [a, b]).outputs
    assert np.array_equal(np.isnan(found), np.broadcast_to(np.isnan(a).any(1)[:, None], found.shape))


def test_fused_operands_and_epilogues_give_the_same_bits(force_tile: ForceTile) -> None:
    force_tile(64, 64)
    b = ProgramBuilder()
    x, w, h = b.input("x", (72, 80)), b.input("w", (80, 68)), b.input("h", (72, 68))
    active = b.op("relu", h)
    outputs = [b.op("tanh", b.op("mm", x, w)), b.op("mm", x.T, active), b.op("mm", active, w.T)]
    program = b.build(outputs)
    inputs = [_normal(spec.shape, seed) for seed, spec in enumerate(program.tensor_inputs)]
    fused = check(program, inputs, num_blocks=2, **options())
    apart = generate(program, **options(fuse_pointwise=False, fuse_epilogues=False))
    assert "tk_split_sums<" in apart.source and fused.materialized_operations < apart.materialized_operations
    results = [emulate(generated, inputs).outputs for generated in (fused, apart)]
    assert_close(results[0], program, inputs)
    assert [bits(array) for array in results[0][1:]] == [bits(array) for array in results[1][1:]]


def test_where_float32_products_are_split() -> None:
    def path(m: int, n: int, k: int, target: str = "sm_90a", **more: Any) -> str:
        a, b = TensorSpec.dense("a", (m, k)), TensorSpec.dense("b", (k, n))
        operation = Operation("out", "mm", (a, b), TensorSpec.dense("out", (m, n)), {})
        plan = plan_product(operation, Target.preset(target), Options(**more))
        assert isinstance(plan, ProductPlan) and plan.on_tensor_cores == (plan.path == "split")
        return plan.path

    assert path(256, 256, 256) == path(4096, 4096, 4096) == "split"
    for case in ((4096, 4096, 4096, "sm_90"), (4096, 4096, 4096, "sm_100"), (4096, 4096, 128), (32, 2048, 2048)):
        assert path(*case) != "split"
    for more in ({"gemm_k_tile": 16}, {"threads_per_block": 512}):
        assert path(4096, 4096, 4096, **more) == "tile"


@pytest.mark.parametrize(("tile", "threads"), [*((tile, 256) for tile in TILES), ((64, 128), 512)])
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_registers_suffice(tile: tuple[int, int], threads: int, layout: str, force_tile: ForceTile) -> None:
    force_tile(*tile, threads=threads)
    source = generate(product(2048, 1024, 512, layout, "float32")[0], **options(threads_per_block=threads)).source
    (statistics,) = nvrtc.resource_statistics(source, "sm_90a").values()
    assert statistics.spill_store_bytes == statistics.spill_load_bytes == 0
