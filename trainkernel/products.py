"""How a product is split into pieces and which path it takes: chosen from shapes, target and options.

The choice depends on the operation's own shapes and dtypes, on the target and on the options,
never on the grid or on what is fused into it: so fusing does not change a bit. Larger tiles may be taken
beside other tasks, if they add up each sum in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod

from trainkernel.arithmetic import domain_of, scale_of
from trainkernel.block_tiles import block_tile, on_best_cores
from trainkernel.ir import Operation, TensorSpec
from trainkernel.near_products import PANEL_PAD, panel_bytes, panel_depth, panel_operands_bytes
from trainkernel.options import Options
from trainkernel.product_costs import panel_cost_us, tile_cost_us, tile_groups
from trainkernel.product_plans import SIXTEEN_BIT_FORMATS, ProductPlan, ceil_div, tensor_format
from trainkernel.target import Target

GEMV_MIN_DEPTH = 64
SPLIT_MIN_ROWS = 64
SPLIT_THREADS = 256
"""Threads of a block with tiles of float32 products by warpgroups: with more, a small tile has too little for each."""
MANY_OUTPUTS = 1024 * 1024
SPLIT_MIN_DEPTH = 256
"""Depth from which a float32 product may be three TF32 ones: below 128 its error would be above that of a sum of
multiply-adds, and the first step's way from memory is most of the time."""
GEMV_MIN_BATCHED_OUTPUTS = 8
GEMV_SPLIT_DEPTH = 256
GEMV_CHUNK = 64
THIN_DEPTH = 8
THIN_ROWS = 4
THIN_OUTPUTS = 4
"""Outputs of a thread where a float32 product of little depth has many."""
MAX_SPLIT = 32
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
THIN_CHUNK = 32
MAX_PANEL_BYTES = 200 * 1024


def plan_product(operation: Operation, target: Target, options: Options) -> ProductPlan:
    """Choose path and tiles of an ``mm``, ``addmm`` or ``bmm``; one in a block region has the attribute ``pieces``."""
    a, b = operation.inputs[-2:]
    assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = a.shape[0] if a.ndim == 3 else 1
    threads = options.threads
    if "pieces" in operation.attrs:
        pieces = operation.attrs["pieces"]
        if operation.op == "product_partials":
            depth = k // pieces // operation.attrs.get("slices", 1)
            plan = ProductPlan("block", m, n, k, m, n, depth, pieces, k // pieces, 16, batch)
        else:
            plan = ProductPlan("block", m, n, k, m if a.ndim == 3 else m // pieces, n, k, 1, k, 16, batch)
        return on_best_cores(plan, tensor_format(a, b, options), threads)
    skew = 16 if options.shared_skew is None else options.shared_skew
    if scale_of(operation, "alpha") == 0:
        return _thin(batch, m, n, 0, target, threads, skew)
    if domain_of(operation) != "float32":
        return _thin(batch, m, n, k, target, threads, skew)
    # A piece of a matrix-vector product has outputs of one product only.
    enough = batch == 1 or max(m, n) >= GEMV_MIN_BATCHED_OUTPUTS
    if k >= GEMV_MIN_DEPTH and options.split_k_gemv is not False and min(m, n) == 1 and enough:
        return _vector_product(batch, m, n, k, target, skew)
    if k <= THIN_DEPTH or m <= THIN_ROWS:
        return _thin(batch, m, n, k, target, threads, skew, THIN_OUTPUTS)
    sixteen_bit = a.dtype == b.dtype and a.dtype in SIXTEEN_BIT_FORMATS
    tiles = _best_tiles(tile_paths((m, n, k), sixteen_bit, target, options), batch, (m, n, k), target, options, skew)
    if sixteen_bit:
        return tiles
    panels = _best_panels(batch, (m, n, k), target, options, tensor_format(a, b, options))
    if panels is None or options.gemm_k_tile or tile_cost_us(tiles, target) < panels[0]:
        return tiles
    return panels[1]


def tile_paths(shape: tuple[int, int, int], sixteen_bit: bool, target: Target, options: Options) -> tuple[str, ...]:
    """The paths whose tiles compete for a product m x n x k on the grid, of 16-bit operands or as float32."""
    m, n, k = shape
    warpgroups = _has_warpgroups(target, options)
    if sixteen_bit:
        return ("tensor", "warpgroup") if warpgroups and min(shape) >= 64 else ("tensor",)
    large = m >= SPLIT_MIN_ROWS and k >= SPLIT_MIN_DEPTH and n >= 16
    return ("tile", "split") if large and warpgroups and options.threads == SPLIT_THREADS else ("tile",)


def _has_warpgroups(target: Target, options: Options) -> bool:
    """Whether products may be multiplied by warpgroups, in steps of 64."""
    return target.arch == "sm_90a" and options.threads in (256, 512) and options.gemm_k_tile is None


@lru_cache(maxsize=1024)
def _best_panels(
    batch: int, shape: tuple[int, int, int], target: Target, options: Options, tensor: str
) -> tuple[float, ProductPlan] | None:
    """Estimated time and plan of the best panels, if any fit."""
    best: tuple[float, ProductPlan] | None = None
    for plan in _panels(batch, shape, target, options, tensor):
        cost = panel_cost_us(plan, target, options.threads)
        if best is None or cost < best[0] - 1e-9:
            best = (cost, plan)
    return best


def _panels(
    batch: int, shape: tuple[int, int, int], target: Target, options: Options, tensor: str
) -> Iterator[ProductPlan]:
    """Panels that fit."""
    m, n, k = shape
    widths = [options.gemm_tile_n] if options.gemm_tile_n else [16, 32, 64]
    most_bytes = min(target.task_shared_bytes, MAX_PANEL_BYTES)
    for tile_m in (8, 16, 32, 64):
        for tile_n in widths:
            if (tile_m > 8 and tile_m >= 2 * m) or (tile_n > 16 and tile_n >= 2 * n and not options.gemm_tile_n):
                continue
            for split in SPLITS:
                chunk = k if split == 1 else ceil_div(ceil_div(k, split), 32) * 32
                depth, skew = panel_depth(chunk), 4 * PANEL_PAD
                plan = ProductPlan("panel", m, n, k, tile_m, tile_n, depth, ceil_div(k, chunk), chunk, skew, batch)
                plan = on_best_cores(plan, tensor, options.threads)
                if panel_operands_bytes(plan) > most_bytes or panel_bytes(plan, target, options.threads) > most_bytes:
                    continue
                yield plan


def _vector_product(batch: int, m: int, n: int, k: int, target: Target, skew: int) -> ProductPlan:
    """32 outputs of a piece; a long depth is split until about every SM has a piece."""
    tiles = batch * ceil_div(max(m, n), 32)
    is_long = k >= GEMV_SPLIT_DEPTH and tiles > 0
    split = max(1, min(MAX_SPLIT, target.num_sms // tiles, k // GEMV_CHUNK)) if is_long else 1
    chunk = ceil_div(ceil_div(k, split), 32) * 32 if split > 1 else k
    path, tile = ("gemv", (1, 32)) if m == 1 else ("gemv_t", (32, 1))
    return ProductPlan(path, m, n, k, *tile, k, ceil_div(k, chunk), chunk, skew, batch)


def _thin(batch: int, m: int, n: int, k: int, target: Target, threads: int, skew: int, each: int = 1) -> ProductPlan:
    """One thread per output, or for ``each``; a long depth is split until about every SM has a piece."""
    pieces = max(1, ceil_div(batch * m * n, threads))
    split = max(1, min(MAX_SPLIT, target.num_sms // pieces, k // THIN_CHUNK))
    chunk = ceil_div(max(k, 1), split)
    each = each if 0 < k <= THIN_DEPTH and pieces >= each * target.num_sms else 1
    split = ceil_div(max(k, 1), chunk)
    return ProductPlan("thin", m, n, k, 1, threads, max(k, 1), split, chunk, skew, batch, each=each)


def _tile_choices(path: str, m: int, n: int, options: Options) -> list[tuple[int, int]]:
    if path == "warpgroup":
        # Every warpgroup has 64 rows and 64 columns at least.
        fit = [pair for pair in ((128, 64), (128, 128), (128, 256), (256, 128)) if prod(pair) >= 32 * options.threads]
        return [
            pair for pair in fit if m > pair[0] // 2 and n > pair[1] // 2 and options.gemm_tile_n in (None, pair[1])
        ]
    if path == "split":
        # Every warpgroup has 64 rows and 16 to 64 columns, every thread a part of both operands. Tiles whose sums
        # leave no registers to a second block are for products that fill the device.
        pairs = [(64, 32), (64, 64), (128, 32)] + ([(128, 64), (64, 128)] if m * n >= MANY_OUTPUTS else [])
        fit = [pair for pair in pairs if prod(pair) <= 32 * options.threads and 8 * min(pair) >= options.threads]
        return [
            pair for pair in fit if m > pair[0] // 2 and n > pair[1] // 2 and options.gemm_tile_n in (None, pair[1])
        ]
    if path == "tensor":
        widths = [options.gemm_tile_n] if options.gemm_tile_n else ([16, 32, 64] if n > 16 else [16])
        heights = [16, 32, 64] if m > 16 else [16]
        pairs = [
            (height, width) for height in heights for width in widths if height == heights[-1] or width <= 2 * height
        ]
        # A thread has room for 64 sums and the fragments that are multiplied next.
        most = min(64 * options.threads, 128 * 128 if options.threads <= 512 else 128 * 64)
        large = [(height, width) for height, width in ((128, 64), (64, 128), (128, 128)) if height * width <= most]
        wide = [*widths, *([] if options.gemm_tile_n else [128])]
        return pairs + [(height, width) for height, width in large if m > 64 and n > 32 and width in wide]
    widths = [options.gemm_tile_n] if options.gemm_tile_n else ([8] if n <= 8 else [32, 64] if n > 32 else [32])
    heights = [height for height in (16, 32, 64) if height == 16 or m > height // 2]
    pairs = [(height, width) for height in heights for width in widths if height * width >= options.threads]
    return pairs or [(64, widths[-1])]


def _depth_step(path: str, chunk: int, outer: int, options: Options) -> int:
    """Depth of one shared-memory step of a tile with so many rows and columns; some steps are under way at a time."""
    if options.gemm_k_tile:
        return options.gemm_k_tile
    if path in ("warpgroup", "split"):
        return 64 if path == "warpgroup" else 32
    if path == "tensor" and chunk <= 32:
        return 32
    return 128 if path == "tensor" and chunk > 64 and outer <= 64 else 64


@lru_cache(maxsize=1024)
def _best_tiles(
    paths: tuple[str, ...], batch: int, shape: tuple[int, int, int], target: Target, options: Options, skew: int
) -> ProductPlan:
    best: tuple[float, ProductPlan] | None = None
    for plan in _tiles(paths, batch, shape, options, skew):
        cost = tile_cost_us(plan, target)
        if best is None or cost < best[0] - 1e-9:
            best = (cost, plan)
    assert best is not None
    return best[1]


def _tiles(
    paths: tuple[str, ...], batch: int, shape: tuple[int, int, int], options: Options, skew: int
) -> Iterator[ProductPlan]:
    """Tiles of some paths, with every split of the depth."""
    m, n, k = shape
    for path in paths:
        own_skew = 0 if path in ("warpgroup", "split") else skew
        for tile_m, tile_n in _tile_choices(path, m, n, options):
            for split in SPLITS:
                chunk = ceil_div(ceil_div(k, split), 32) * 32
                step = _depth_step(path, chunk, tile_m + tile_n, options)
                plan = ProductPlan(path, m, n, k, tile_m, tile_n, step, ceil_div(k, chunk), chunk, own_skew, batch)
                if path == "split":
                    plan = replace(plan, tensor="tf32" if options.precision == "tf32" else "tf32x3")
                yield plan


def larger_tiles(plan: ProductPlan, operation: Operation, target: Target, options: Options) -> list[ProductPlan]:
    """The plan with fewer, larger tiles, in the order of their pieces, that add up each sum in the same order."""
    shape = (plan.m, plan.n, plan.k)
    if plan.split > 1 or plan.path not in ("panel", "tile", "tensor"):
        return []
    if plan.path == "panel":
        a, b = operation.inputs[-2:]
        assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
        others = list(_panels(plan.batch, shape, target, options, tensor_format(a, b, options)))
    else:
        others = list(_tiles((plan.path,), plan.batch, shape, options, plan.skew_bytes))
    order = _order_of_sums(plan, target, options)
    return sorted(
        (
            other
            for other in others
            if other.split == 1
            and other.num_pieces < plan.num_pieces
            and _order_of_sums(other, target, options) == order
        ),
        key=lambda other: -other.num_pieces,
    )


def _order_of_sums(plan: ProductPlan, target: Target, options: Options) -> tuple[object, ...]:
    """What decides in which order a plan's tiles add up a sum."""
    if plan.path == "tensor":
        return ("tensor",)
    if plan.tensor:
        return (plan,)
    if plan.path == "panel":
        return ("panel", plan.tile_k, block_tile(plan.tile_m, plan.tile_n, plan.tile_k, options.threads).lanes_k)
    return ("tile", plan.tile_k, tile_groups(plan, options.threads, target))
