"""How a product is split into pieces and which path it takes: chosen from shapes, target and options.

The choice depends on the operation's own shapes and dtypes, on the target and on the options,
never on the grid or on what is fused into it: so fusing does not change a bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from trainkernel.arithmetic import domain_of, scale_of
from trainkernel.ir import Operation, TensorSpec
from trainkernel.options import Options
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
# Costs behind the choice of tiles, microseconds, with 256 threads per block; measured on an H200 inside of steps.
_PIECE_US = 0.8
_STEP_US = 1.0
# Those of a tile's depth were measured with one group of threads: a bound of what several take.
_TILE_MIN_DEPTH_US = 0.018
_TILE_OUTPUT_US = 7.0e-6
_EPILOGUE_OUTPUT_US = 4.0e-4
# Tensor-core tiles: cycles and bytes per cycle of one multiprocessor, and what a piece costs beside its loop.
_TENSOR_PIECE_US = 1.2
_TENSOR_OUTPUT_US = 1.0e-4
_TENSOR_FMAS_PER_CYCLE = 500
_WARPGROUP_FMAS_PER_CYCLE = 1700
_COPIED_BYTES_PER_CYCLE = 40
_LOADED_BYTES_PER_CYCLE = 32
_TF32_FMAS_PER_CYCLE = 900
_SPLIT_CYCLES = 0.05
_SPLIT_PIECE_US = 0.8
_SPLIT_OUTPUT_US = 4.0e-4
_TENSOR_LEAST_CYCLES = 60
_L2_BYTES_PER_CYCLE = 24
_FETCH_BYTES_PER_CYCLE = 48
_FETCH_CYCLES = 1000
_CONVERSION_US = 1.0e-4
_CAST_US = 0.8
_EXTRA_STAGE_US = 1.2
_PARTIAL_BYTES_PER_US = 2.0e6
_VECTOR_FMAS_PER_US = 1.0e6
_MAX_UNROLLED_COST = 32.0
_MAX_PAIRS_COST = 128.0
_PANEL_PIECE_US = 1.1
_PANEL_BYTES_PER_US = 8.0e4
_CYCLES_PER_US = 1800
_LONE_WARP_CYCLES = 40
_LONE_WARP_FACTOR = 2.0
_SHUFFLE_CYCLES = 35.0
_FINISH_CYCLES = 20.0
_FINISH_INSTRUCTIONS = 6.0
_MAX_TOGETHER = 8
_MAX_BATCH = 4
_MICRO_TILES = ((8, 4), (4, 4), (4, 2), (4, 1), (2, 2), (2, 1), (1, 1))
_FLAT_MICRO_TILES = ((2, 4), (1, 4), (1, 2))
_WARP_LANES = tuple((n, k) for n in (1, 2, 4, 8, 16) for k in (1, 2, 4, 8, 16) if n * k <= 32)
_PANEL_OUTPUT_US = 3.0e-4
_NEAR_ELEMENTS_PER_US = 4.0e4
PANEL_PAD = 4
SIXTEEN_BIT_PAD = 8
TENSOR_DEPTHS = {"tf32": 8, "float16": 16, "bfloat16": 16}
"""Depth of one step of a warp, by format."""
SIXTEEN_BIT_FORMATS = ("float16", "bfloat16")
# Cycles of such a step by the rows and units of a warp: of its chain of instructions, and more for each warp that is
# at work. Those of two rows are what shared memory needs for the operands, in proportion to one row.
_SIXTEEN_BIT_CYCLES = {(1, 2): (70.0, 7.0), (1, 4): (80.0, 14.0), (2, 4): (110.0, 18.0)}
_TENSOR_STEP_CYCLES = {
    "tf32": {(1, 1): (80.0, 5.0), (1, 2): (90.0, 8.0), (1, 4): (110.0, 15.0)},
    "float16": _SIXTEEN_BIT_CYCLES,
    "bfloat16": _SIXTEEN_BIT_CYCLES,
}
_TENSOR_START_CYCLES = 100.0
_TENSOR_ROUND_CYCLES = 60.0
_TENSOR_FINISH_CYCLES = 200.0
_MAX_TILE_SUMS = 32
MAX_PANEL_BYTES = 200 * 1024
MAX_STAGED_BYTES = 150 * 1024
MAX_PIPELINE_BYTES = 160 * 1024
MAX_STAGES = 4
MAX_WARPGROUP_BYTES = 200 * 1024
SHARED_SM_BYTES = 112 * 1024
"""Shared memory of a block up to which two of them share a multiprocessor."""
RESERVED_SHARED_BYTES = 1024
"""What each block takes beside its own shared memory."""
MAX_SHARED_TILE = 128 * 64
"""Outputs of a warpgroup tile with which two blocks share a multiprocessor."""
MAX_WARPGROUP_STAGES = 6
GROUPED_ROWS = 8
"""Rows of tiles of a large tensor-core product that are taken together."""
_STREAM_BYTES = 140 * 1024


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class ProductPlan:
    """One product's path and tiles.

    Attributes
    ----------
    path : str
        ``"gemv"`` (one row, depth split over a block's threads), ``"gemv_t"`` (one column),
        ``"thin"`` (one thread per output; all that are not float32), ``"tensor"`` (``mma.sync`` tiles),
        ``"warpgroup"`` (``wgmma`` tiles, sm_90a), ``"split"`` (the same of float32 operands, each the sum of two
        TF32 numbers),
        ``"tile"`` (float32 FMA tiles), ``"panel"`` (float32 tiles whose operands lie in shared memory over
        their whole depth), ``"block"`` (a piece of a block region: its operands lie in shared memory).
    m, n, k : int
        Product shape.
    tile_m, tile_n, tile_k : int
        Outputs of one piece and depth of one shared-memory step, elements.
    split : int
        Number of partial products along the depth; 1 means no split.
    chunk : int
        Depth of one partial product.
    skew_bytes : int
        Padding of shared-memory rows.
    batch : int
        Number of independent products of this shape; each has its own tiles.
    tensor : str
        How tensor cores multiply what lies near a block (paths ``"panel"`` and ``"block"``): ``""`` not at
        all, or the format of their operands: ``"tf32"``, ``"float16"`` or ``"bfloat16"``. Of path ``"split"``:
        ``"tf32x3"``, three products of TF32 numbers for one, or ``"tf32"``.
    each : int
        Outputs of a thread (path ``"thin"``), whose loads are on their way at the same time.
    """

    path: str
    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    tile_k: int
    split: int = 1
    chunk: int = 0
    skew_bytes: int = 16
    batch: int = 1
    tensor: str = ""
    each: int = 1

    @property
    def on_tensor_cores(self) -> bool:
        return self.is_tensor_tile or bool(self.tensor)

    @property
    def is_tile(self) -> bool:
        """Whether a block computes a tile of it on the grid, step by step along the depth."""
        return self.path in ("tile", "split") or self.is_tensor_tile

    @property
    def is_tensor_tile(self) -> bool:
        """Whether its operands are fetched as 16-bit steps for tensor cores."""
        return self.path in ("tensor", "warpgroup")

    @property
    def tf32_products(self) -> int:
        """Products of TF32 numbers that make one of float32 (path ``"split"``)."""
        return 3 if self.tensor == "tf32x3" else 1

    @property
    def num_outputs(self) -> int:
        return self.batch * self.m * self.n

    @property
    def tiles_per_product(self) -> int:
        return ceil_div(self.m, self.tile_m) * ceil_div(self.n, self.tile_n)

    @property
    def num_tiles(self) -> int:
        if self.path == "thin":
            return ceil_div(self.num_outputs, self.each * self.tile_n)
        return self.batch * self.tiles_per_product

    @property
    def num_pieces(self) -> int:
        return self.num_tiles * self.split

    def __str__(self) -> str:
        split = f", depth split {self.split} x {self.chunk}" if self.split > 1 else ""
        batch = f"{self.batch} x " if self.batch != 1 else ""
        tile = f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}"
        cores = f", {self.tensor} on tensor cores" if self.tensor else ""
        return f"{self.path} {batch}{self.m}x{self.n}x{self.k} {tile}{split}{cores}"


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
        return _on_best_cores(plan, tensor_format(a, b, options), threads)
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
    if a.dtype == b.dtype and a.dtype in ("float16", "bfloat16"):
        large = _has_warpgroups(target, options) and min(m, n, k) >= 64
        paths = ("tensor", "warpgroup") if large else ("tensor",)
        return _best_tiles(paths, batch, (m, n, k), target, options, skew)
    large = m >= SPLIT_MIN_ROWS and k >= SPLIT_MIN_DEPTH and n >= 16
    large = large and _has_warpgroups(target, options) and options.threads == SPLIT_THREADS
    tiles = _best_tiles(("tile", "split") if large else ("tile",), batch, (m, n, k), target, options, skew)
    panels = _best_panels(batch, (m, n, k), target, options, tensor_format(a, b, options))
    if panels is None or options.gemm_k_tile or _tile_cost_us(tiles, target) < panels[0]:
        return tiles
    return panels[1]


def _has_warpgroups(target: Target, options: Options) -> bool:
    """Whether products may be multiplied by warpgroups, in steps of 64."""
    return target.arch == "sm_90a" and options.threads in (256, 512) and options.gemm_k_tile is None


def tensor_format(a: TensorSpec, b: TensorSpec, options: Options) -> str:
    """How tensor cores may multiply two operands near a block; empty if they may not."""
    if a.dtype != b.dtype:
        return ""
    if a.dtype == "float32":
        return "tf32" if options.precision == "tf32" else ""
    return a.dtype if a.dtype in SIXTEEN_BIT_FORMATS else ""


def _on_best_cores(plan: ProductPlan, tensor: str, threads: int) -> ProductPlan:
    """The plan of a product near a block with its faster way to multiply.

    For the FMA units 16-bit operands become float32 one by one, and many sums take a detour through shared memory.
    """
    if not tensor or not plan.num_outputs * plan.tile_k or (tensor == "tf32" and plan.tile_k % TENSOR_DEPTHS[tensor]):
        return plan
    on_tensor_cores = replace(plan, tensor=tensor)
    fma_cycles = multiply_cycles(plan, threads)
    if tensor in SIXTEEN_BIT_FORMATS:
        outputs = plan.tile_m * plan.tile_n
        fma_cycles += (plan.tile_m + plan.tile_n) * plan.tile_k / 16
        fma_cycles += outputs / 4 if outputs > 4 * threads else 0
    faster = multiply_cycles(on_tensor_cores, threads) < fma_cycles
    return on_tensor_cores if faster else plan


def multiply_cycles(plan: ProductPlan, threads: int) -> float:
    """Cycles in which a block multiplies a tile whose operands lie near."""
    m, n, k = plan.tile_m, plan.tile_n, plan.tile_k
    if plan.tensor:
        return tensor_tile_cycles(tensor_tile(plan, threads), m, n, plan.tensor)
    return block_tile_cycles(block_tile(m, n, k, threads), m, n, k, threads)


def near_product_us(operation: Operation, tensor: str, pieces: int, partial: bool, threads: int) -> float:
    """Time of one piece of a product on tensor cores in a block region: operands, sums, epilogue."""
    a, b = operation.inputs[-2:]
    assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
    (m, k), n = a.shape[-2:], b.shape[-1]
    count = a.shape[0] if a.ndim == 3 else 1
    if partial:
        k //= pieces
    elif count > 1:
        count = max(1, count // pieces)
    else:
        m //= pieces
    plan = ProductPlan("block", m, n, k, m, n, k, tensor=tensor)
    evaluated = k * (m + n) if tensor in SIXTEEN_BIT_FORMATS else 0
    return count * (multiply_cycles(plan, threads) / _CYCLES_PER_US + (evaluated + 2 * m * n) / _NEAR_ELEMENTS_PER_US)


def panel_depth(chunk: int) -> int:
    """Depth of a panel: that of a chunk, and zeros up to a multiple of four."""
    return -(-chunk // 4) * 4


def panel_bytes(plan: ProductPlan, target: Target, threads: int) -> int:
    """Shared memory of a panel product: both operands, and the sums."""
    return _panel_operands_bytes(plan) + block_sums_bytes(plan, threads, _MAX_UNROLLED_COST + 1, target)


def _panel_operands_bytes(plan: ProductPlan) -> int:
    return 4 * (panel_floats(plan.tile_m, plan.tile_k) + panel_floats(plan.tile_n, plan.tile_k))


def panel_floats(outer: int, depth: int) -> int:
    """A bound of the floats of a panel, whichever of its dims is contiguous."""
    return max(outer * (depth + PANEL_PAD), depth * (outer + PANEL_PAD))


def stream_bytes(plan: ProductPlan, columns: int) -> int:
    """Shared memory of two steps of an operand that is fetched some columns at a time."""
    return 2 * 4 * panel_floats(columns, panel_depth(plan.tile_k))


def stream_columns(plan: ProductPlan) -> int:
    """Columns of one step of an operand that a block fetches in steps, two of which are under way."""
    for columns in (64, 32, 16):
        if stream_bytes(plan, columns) <= _STREAM_BYTES:
            return columns
    return 8


def filled_shape(outer: int, depth: int, along_k: bool) -> tuple[int, int, int]:
    """Rows, columns and stride of a 16-bit operand in scratch: whole steps of the depth, whole runs of 8."""
    depth = ceil_div(depth, 16) * 16
    rows, columns = (outer, depth) if along_k else (depth, ceil_div(outer, 8) * 8)
    return rows, columns, columns + SIXTEEN_BIT_PAD


def filled_bytes(plan: ProductPlan) -> tuple[int, int]:
    """Bounds of the scratch of the operands of a 16-bit product near a block, where they are evaluated before it."""
    return _filled_operand_bytes(plan.tile_m, plan.tile_k), _filled_operand_bytes(plan.tile_n, plan.tile_k)


def _filled_operand_bytes(outer: int, depth: int) -> int:
    shapes = [filled_shape(outer, depth, along) for along in (False, True)]
    return max(2 * rows * stride for rows, _, stride in shapes)


def block_scratch_bytes(
    operation: Operation, plan: ProductPlan, target: Target, threads: int, evaluated: Set[str]
) -> int:
    """A bound of the scratch of a product in a region, whatever is fused into it.

    ``evaluated`` are the buffers that may be evaluated before it rather than read where they lie.
    """
    a, b = operation.inputs[-2:]
    if plan.tensor in SIXTEEN_BIT_FORMATS:
        return sum(filled_bytes(plan)) + block_sums_bytes(plan, threads, 0.0, target)
    sums = block_sums_bytes(plan, threads, 0.0 if plan.split > 1 else _MAX_UNROLLED_COST + 1, target)
    needs = []
    for operand, outer in ((a, plan.tile_m), (b, plan.tile_n)):
        assert isinstance(operand, TensorSpec)
        plain = operand.buffer not in evaluated and operand.dtype == "float32" and 1 in operand.strides[-2:]
        size = 4 * panel_floats(panel_depth(outer), panel_depth(plan.tile_k))
        streamed = plain and operand is b and plan.split == plan.batch == 1 and size > MAX_STAGED_BYTES
        needs.append(size if not plain or (plan.tensor and not streamed) else 0)
    if streamed:
        columns = stream_columns(plan)
        streams = block_sums_bytes(replace(plan, tile_n=columns), threads, _MAX_UNROLLED_COST + 1, target)
        # The operand is streamed only if the caller's memory holds it.
        return sum(needs) + max(sums, streams + stream_bytes(plan, columns))
    return sum(needs) + sums


@lru_cache(maxsize=1024)
def _best_panels(
    batch: int, shape: tuple[int, int, int], target: Target, options: Options, tensor: str
) -> tuple[float, ProductPlan] | None:
    """Estimated time and plan of the best panels, if any fit."""
    m, n, k = shape
    widths = [options.gemm_tile_n] if options.gemm_tile_n else [16, 32, 64]
    best: tuple[float, ProductPlan] | None = None
    for tile_m in (8, 16, 32, 64):
        for tile_n in widths:
            if (tile_m > 8 and tile_m >= 2 * m) or (tile_n > 16 and tile_n >= 2 * n and not options.gemm_tile_n):
                continue
            for split in SPLITS:
                chunk = k if split == 1 else ceil_div(ceil_div(k, split), 32) * 32
                plan = ProductPlan(
                    "panel",
                    m,
                    n,
                    k,
                    tile_m,
                    tile_n,
                    panel_depth(chunk),
                    ceil_div(k, chunk),
                    chunk,
                    4 * PANEL_PAD,
                    batch,
                )
                plan = _on_best_cores(plan, tensor, options.threads)
                most_bytes = min(target.shared_bytes_per_block, MAX_PANEL_BYTES)
                if _panel_operands_bytes(plan) > most_bytes or panel_bytes(plan, target, options.threads) > most_bytes:
                    continue
                cost = _panel_cost_us(plan, target, options.threads)
                if best is None or cost < best[0] - 1e-9:
                    best = (cost, plan)
    return best


def _panel_cost_us(plan: ProductPlan, target: Target, threads: int) -> float:
    """Estimated time: waves of pieces that fetch, multiply and store one after another."""
    outputs = plan.tile_m * plan.tile_n
    fetch_us = 4 * plan.tile_k * (plan.tile_m + plan.tile_n) / _PANEL_BYTES_PER_US
    multiply_us = multiply_cycles(plan, threads) / _CYCLES_PER_US
    waves = ceil_div(plan.num_pieces, target.num_sms)
    piece_us = _PANEL_PIECE_US + fetch_us + multiply_us + outputs * _PANEL_OUTPUT_US
    # A stage has other tasks, too, which wait for multiprocessors.
    cost = waves * piece_us + plan.num_pieces / target.num_sms * piece_us
    if plan.split > 1:
        cost += _EXTRA_STAGE_US + 8 * plan.split * plan.num_outputs / _PARTIAL_BYTES_PER_US
    return cost


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


def pipeline_stages(plan: ProductPlan, target: Target) -> int:
    """Steps of a tensor-core product that have a buffer: the one that is multiplied, and those on their way."""
    outer = plan.tile_m + plan.tile_n
    step_bytes = 2 * outer * plan.tile_k + plan.skew_bytes * max(outer, 2 * plan.tile_k)
    steps = ceil_div(min(plan.chunk, plan.k), plan.tile_k)
    if plan.path == "warpgroup":
        most = SHARED_SM_BYTES if plan.tile_m * plan.tile_n <= MAX_SHARED_TILE else MAX_WARPGROUP_BYTES
        fit = min(target.shared_bytes_per_block, most) // step_bytes
        return max(3, min(MAX_WARPGROUP_STAGES, fit, 2 + steps))
    fit = min(target.shared_bytes_per_block, MAX_PIPELINE_BYTES) // step_bytes
    return max(2, min(MAX_STAGES, fit, 1 + steps))


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


@functools.lru_cache(maxsize=1024)
def _best_tiles(
    paths: tuple[str, ...], batch: int, shape: tuple[int, int, int], target: Target, options: Options, skew: int
) -> ProductPlan:
    m, n, k = shape
    best: tuple[float, ProductPlan] | None = None
    for path in paths:
        own_skew = 0 if path in ("warpgroup", "split") else skew
        for tile_m, tile_n in _tile_choices(path, m, n, options):
            for split in SPLITS:
                chunk = ceil_div(ceil_div(k, split), 32) * 32
                step = _depth_step(path, chunk, tile_m + tile_n, options)
                plan = ProductPlan(path, m, n, k, tile_m, tile_n, step, ceil_div(k, chunk), chunk, own_skew, batch)
                if path == "split":
                    plan = replace(plan, tensor="tf32" if options.precision == "tf32" else "tf32x3")
                cost = _tile_cost_us(plan, target)
                if best is None or cost < best[0] - 1e-9:
                    best = (cost, plan)
    assert best is not None
    return best[1]


def product_cost_us(plan: ProductPlan, target: Target, threads: int) -> float:
    """Estimated time of a product on the whole grid, whatever its path."""
    if plan.is_tile:
        return _tile_cost_us(plan, target)
    if plan.path == "panel":
        return _panel_cost_us(plan, target, threads)
    waves = ceil_div(plan.num_pieces, target.num_sms)
    return waves * _PIECE_US + plan.num_outputs * plan.k / _VECTOR_FMAS_PER_US


def conversion_us(plan: ProductPlan, outer: int, target: Target) -> float:
    """What a tensor-core product loses if it converts an operand with ``outer`` places in a tile as it fetches it.

    Every piece converts its part anew; of an operand that is stored in 16 bits it would start copies alone.
    """
    waves = ceil_div(plan.num_pieces, target.num_sms)
    return waves * outer * min(plan.chunk, plan.k) * _CONVERSION_US


def stored_cast_us(num_elements: int, moved_bytes: int, target: Target) -> float:
    """Time of a task that converts elements once; ``moved_bytes`` is what it reads and writes for each."""
    return _EXTRA_STAGE_US + _CAST_US + num_elements * moved_bytes / target.memory_bytes_per_us


@dataclass(frozen=True)
class BlockTile:
    """How the lanes of a warp share a tile of a product whose operands lie in shared memory.

    It has ``warp_n`` lanes along n and ``lanes_k`` along the depth, which take turns of four of it; the others
    are along m. A lane has ``micro_m`` x ``micro_n`` neighbouring outputs, whose sums those along the depth
    add up and deal out among them. All three numbers of lanes are powers of two.
    """

    warp_n: int
    lanes_k: int
    micro_m: int
    micro_n: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """As ``tk_block_product`` takes them."""
        return (self.warp_n, self.lanes_k, self.micro_m, self.micro_n)

    @cached_property
    def warp_m(self) -> int:
        """Lanes along m."""
        return 32 // (self.warp_n * self.lanes_k)

    @cached_property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warp_m * self.micro_m

    @cached_property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.warp_n * self.micro_n

    def num_tiles(self, m: int, n: int) -> int:
        """Tiles of a product."""
        return -(-m // self.rows) * -(-n // self.columns)

    @cached_property
    def outputs(self) -> int:
        """Sums of a lane."""
        return self.micro_m * self.micro_n

    @cached_property
    def kept(self) -> int:
        """Outputs of a tile that a lane finishes."""
        return max(1, self.outputs // self.lanes_k)

    @cached_property
    def step_instructions(self) -> int:
        """Instructions of a warp for four of the depth."""
        return 4 * self.outputs + 2 * self.micro_m + 3 * self.micro_n + 6

    @cached_property
    def step_loads(self) -> float:
        """Cycles of shared memory that they take."""
        loads = _load_cycles(self.micro_m, self.warp_m, self.warp_n, True)
        return loads + _load_cycles(self.micro_n, self.warp_m, self.warp_n, False)


@lru_cache(maxsize=2)
def _block_tiles(flat: bool) -> tuple[BlockTile, ...]:
    micro_tiles = _MICRO_TILES + (_FLAT_MICRO_TILES if flat else ())
    return tuple(BlockTile(*lanes, *micro) for micro in micro_tiles for lanes in _WARP_LANES)


@lru_cache(maxsize=4096)
def block_tile(m: int, n: int, k: int, threads: int) -> BlockTile:
    """The fastest use of a block's warps by a count of cycles."""
    best: tuple[float, BlockTile] | None = None
    for tile in _block_tiles(m <= 2):
        # Lanes along m that nothing else needs do no harm.
        if (tile.columns >= 2 * n and tile.columns > 1) or (tile.rows >= 2 * m and tile.micro_m > 1):
            continue
        if 2 * tile.lanes_k >= k and tile.lanes_k > 1:
            continue
        cost = block_tile_cycles(tile, m, n, k, threads, math.inf if best is None else best[0])
        if best is None or cost < best[0]:
            best = (cost, tile)
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class TensorTile:
    """How the warps of a block share a product on tensor cores: sums of 16 ``rows`` x 8 ``units`` at a time.

    ``swapped``: the rows lie along n, and the units along m. Warp ``w`` is number ``w % 2**log_m`` along the rows,
    ``w // 2**log_m % 2**log_n`` along the units, then one of ``groups`` along the depth, each of which has ``depth``.
    """

    swapped: bool
    rows: int
    units: int
    log_m: int
    log_n: int
    groups: int
    depth: int


def tensor_sums_stride(plan: ProductPlan) -> int:
    """Floats between rows of the sums in shared memory."""
    return plan.tile_n + PANEL_PAD


def tensor_tile(plan: ProductPlan, threads: int) -> TensorTile:
    """The fastest use of a block's warps by a count of cycles."""
    return _tensor_tile(plan.tile_m, plan.tile_n, plan.tile_k, plan.tensor, threads // 32)


@lru_cache(maxsize=4096)
def _tensor_tile(m: int, n: int, k: int, tensor: str, warps: int) -> TensorTile:
    best: tuple[float, TensorTile] | None = None
    steps = ceil_div(k, TENSOR_DEPTHS[tensor])
    for swapped in (False, True):
        rows, columns = (n, m) if swapped else (m, n)
        for sixteens, units in _TENSOR_STEP_CYCLES[tensor]:
            if (units > 2 and columns <= 4 * units) or (sixteens > 1 and rows <= 16):
                continue
            tiles_m, tiles_n = ceil_div(rows, 16 * sixteens), ceil_div(columns, 8 * units)
            for log_m in range(warps.bit_length()):
                for log_n in range(warps.bit_length() - log_m):
                    if (1 << log_m) >= 2 * tiles_m or (1 << log_n) >= 2 * tiles_n:
                        continue
                    most = min(warps >> (log_m + log_n), steps)
                    for groups in sorted({1, most}):
                        own = ceil_div(steps, groups)
                        tile = TensorTile(
                            swapped, sixteens, units, log_m, log_n, ceil_div(steps, own), own * TENSOR_DEPTHS[tensor]
                        )
                        cost = tensor_tile_cycles(tile, m, n, tensor)
                        if best is None or cost < best[0]:
                            best = (cost, tile)
    assert best is not None
    return best[1]


def tensor_tile_cycles(tile: TensorTile, m: int, n: int, tensor: str) -> float:
    """Cycles of a multiprocessor: rounds of steps, each one warp's chain and the issue of all warps; then the sums.

    Those of several groups, or of a tile that lies across, take a detour through shared memory.
    """
    rows, columns = (n, m) if tile.swapped else (m, n)
    tiles_m, tiles_n = ceil_div(rows, 16 * tile.rows), ceil_div(columns, 8 * tile.units)
    rounds = ceil_div(tiles_m, 1 << tile.log_m) * ceil_div(tiles_n, 1 << tile.log_n)
    active = min(tiles_m, 1 << tile.log_m) * min(tiles_n, 1 << tile.log_n) * tile.groups
    chain, issue = _TENSOR_STEP_CYCLES[tensor][tile.rows, tile.units]
    steps = tile.depth / TENSOR_DEPTHS[tensor]
    stored = 2 * tile.groups * m * n / 32
    if tile.groups > 1 or tile.swapped:
        stored += _TENSOR_FINISH_CYCLES + tile.groups * m * n / 32
    return _TENSOR_START_CYCLES + rounds * (_TENSOR_ROUND_CYCLES + steps * (chain + issue * active)) + stored


def stores_pairs(plan: ProductPlan, threads: int, epilogue_cost: float, target: Target) -> bool:
    """Whether the epilogue of a product on tensor cores takes its sums from registers, two neighbours at a time.

    It does where that is cheap, or where the sums have no room beside both operands: whether a product fits into
    shared memory must not depend on what is fused into it.
    """
    if not plan.tensor or plan.tile_n % 2 or plan.n % 2:
        return False
    tile = tensor_tile(plan, threads)
    if tile.groups > 1 or tile.swapped:
        return False
    if 4 * tile.units * epilogue_cost <= _MAX_PAIRS_COST:
        return True
    operands_bytes = sum(filled_bytes(plan)) if plan.tensor in SIXTEEN_BIT_FORMATS else 0
    return operands_bytes + _tensor_sums_bytes(plan, tile) > target.shared_bytes_per_block


def _tensor_sums_bytes(plan: ProductPlan, tile: TensorTile) -> int:
    return 4 * tile.groups * plan.tile_m * tensor_sums_stride(plan)


def block_sums_bytes(plan: ProductPlan, threads: int, epilogue_cost: float, target: Target) -> int:
    """Shared memory through which the sums of a block product go to the epilogue; 0: from registers.

    A thread has several sums, each of which repeats the epilogue's text: worth it where that is cheap
    (``epilogue_cost`` in the unit of ``Op.cost``; a plain store costs nothing) or the sums are few.
    """
    if plan.tensor:
        if stores_pairs(plan, threads, epilogue_cost, target):
            return 0
        return _tensor_sums_bytes(plan, tensor_tile(plan, threads))
    tile = block_tile(plan.tile_m, plan.tile_n, plan.tile_k, threads)
    outputs = plan.tile_m * plan.tile_n
    cheap = tile.kept <= _MAX_BATCH or tile.kept * epilogue_cost <= _MAX_UNROLLED_COST
    return 0 if cheap or outputs <= threads // 2 else 4 * outputs


def block_tile_cycles(tile: BlockTile, m: int, n: int, k: int, threads: int, limit: float = math.inf) -> float:
    """Cycles of a multiprocessor: rounds of tiles, one for each warp, by steps of four along the depth.

    A step takes what the four schedulers need to issue the instructions of all warps, or what shared memory
    needs, or what one warp needs alone, whose dependent sums nothing hides. Before the steps comes the latency
    of the loads, after them the lanes along the depth add up their sums by shuffles, and the results are finished.
    Once ``limit`` is reached the rest is not counted.
    """
    tiles = tile.num_tiles(m, n)
    warps = min(threads // 32, tiles)
    busiest, instructions = -(-warps // 4), tile.step_instructions
    # The loads of two steps are under way together if they are few.
    latency = _LONE_WARP_CYCLES / (2 if tile.outputs <= _MAX_TOGETHER else 1)
    step = max(busiest * instructions, warps * tile.step_loads, latency + _LONE_WARP_FACTOR * instructions)
    rounds, steps = -(-tiles // (threads // 32)), -(-k // (4 * tile.lanes_k))
    multiplied = _LONE_WARP_CYCLES + steps * step
    if rounds * multiplied >= limit:
        return rounds * multiplied
    merged, sums, lanes = 0.0, tile.outputs, tile.lanes_k
    while lanes > 1:
        sums, lanes = max(1, sums // 2), lanes // 2
        merged += max(_SHUFFLE_CYCLES, 4 * busiest * sums, warps * sums)
    finished = max(_FINISH_CYCLES, _FINISH_INSTRUCTIONS * busiest) * tile.kept
    return rounds * (multiplied + merged + finished)


@lru_cache(maxsize=1024)
def _load_cycles(micro: int, warp_m: int, warp_n: int, of_a: bool) -> float:
    """Cycles of shared memory for a warp's loads of one operand, four of the depth: the mean of both ways it may lie.

    A lane has ``micro`` neighbouring places; rows are a multiple of 32 banks and four more apart. A load of 16 bytes
    goes by halves of the warp, or by quarters where neighbouring lanes do not share their addresses; one of 8 bytes
    by the warp or by halves. Each takes as many cycles as it has different addresses in the same banks.
    """
    low = min(warp_n, 2)
    lanes = []
    for lane in range(32):
        m, n = lane // low % warp_m, lane % low + lane // (low * warp_m) % (warp_n // low) * low
        lanes.append((m if of_a else n, lane // (warp_m * warp_n)))
    parts = 1 if (warp_n if of_a else warp_m) > 1 else 2
    half, whole = set(lanes[:16]), set(lanes)

    def cycles(places: set[tuple[int, int]], banks: set[int]) -> float:
        return max(parts, len(places) / len(banks))

    along = 2 * micro * cycles(half, {(micro * outer + k) % 8 for outer, k in half})
    if micro >= 4:
        across = 2 * micro * cycles(half, {(micro // 4 * outer + 4 * k) % 8 for outer, k in half})
    elif micro == 2:
        across = 4 * cycles(whole, {(outer + 8 * k) % 16 for outer, k in whole})
    else:
        across = 4 * len(whole) / len({(outer + 16 * k) % 32 for outer, k in whole})
    return (along + across) / 2


def tile_sums_stride(plan: ProductPlan) -> int:
    """Floats between rows of a float32 tile's sums in shared memory, as ``TkTile`` has them."""
    return plan.tile_n + (16 if plan.tile_n % 32 == 0 else plan.skew_bytes // 4)


def tile_groups(plan: ProductPlan, threads: int, target: Target) -> int:
    """Groups along the depth among which the threads of a float32 tile share each of its steps; their sums must fit."""
    outputs = plan.tile_m * plan.tile_n
    uses = []
    for groups in (1, 2, 4, 8, 16):
        sums = max(1, outputs * groups // threads)
        micro_n = min(sums, 4)
        micro_m = sums // micro_n
        if groups > 1 and (sums > _MAX_TILE_SUMS or plan.tile_m % micro_m or 4 * groups > plan.tile_k):
            continue
        if groups > 1 and 4 * groups * plan.tile_m * tile_sums_stride(plan) > target.shared_bytes_per_block:
            continue
        uses.append((_tile_groups_cycles(plan, groups, micro_m, micro_n, threads), groups))
    return min(uses)[1]


def _tile_groups_cycles(plan: ProductPlan, groups: int, micro_m: int, micro_n: int, threads: int) -> float:
    """Cycles of a float32 tile, by steps of four along the depth, of which each group of threads has its own."""
    lanes_n, lanes_m = plan.tile_n // micro_n, plan.tile_m // micro_m
    depth = ceil_div(ceil_div(min(plan.chunk, plan.k), groups), 4) * 4
    rounds = ceil_div(plan.tile_m, lanes_m * micro_m) * ceil_div(plan.tile_n, lanes_n * micro_n)
    warps = ceil_div(min(threads, lanes_n * lanes_m * groups), 32)
    instructions = 4 * micro_m * micro_n + micro_m + 4 * micro_n + 8
    shared = warps * (2 * micro_m + (2 if micro_n == 4 else 4) * micro_n)
    step = max(ceil_div(warps, 4) * instructions, shared, _LONE_WARP_CYCLES + _LONE_WARP_FACTOR * instructions)
    merged = 60 + 2 * groups * plan.tile_m * plan.tile_n / 32 if groups > 1 else 0
    return rounds * depth / 4 * step + merged


def _tile_cost_us(plan: ProductPlan, target: Target) -> float:
    """Estimated time of the product: its waves of pieces, and the detour of partials."""
    outputs = plan.tile_m * plan.tile_n
    depth = min(plan.chunk, plan.k)
    steps = ceil_div(depth, plan.tile_k)
    waves = ceil_div(plan.num_pieces, target.num_sms)
    if plan.is_tensor_tile:
        step_us = _tensor_step_cycles(plan, target) / _CYCLES_PER_US
        cost = waves * (_TENSOR_PIECE_US + steps * step_us + outputs * _TENSOR_OUTPUT_US)
    elif plan.path == "split":
        step_us = _split_step_cycles(plan) / _CYCLES_PER_US
        cost = waves * (_SPLIT_PIECE_US + steps * step_us + outputs * _SPLIT_OUTPUT_US)
    else:
        work = depth * max(_TILE_MIN_DEPTH_US, outputs * _TILE_OUTPUT_US)
        cost = waves * (_PIECE_US + ceil_div(steps, 2) * _STEP_US + work + outputs * _EPILOGUE_OUTPUT_US)
    if plan.split > 1:
        cost += _EXTRA_STAGE_US + 8 * plan.split * plan.num_outputs / _PARTIAL_BYTES_PER_US
    return cost


def _tensor_step_cycles(plan: ProductPlan, target: Target) -> float:
    """Cycles of one step of a tensor-core tile whose operands are copied.

    A step takes what the tensor cores need, or the units of a warp one after another; what its bytes need on
    their way from L2, of which each multiprocessor has its share; or its share of the way's latency, which the
    steps under way have together.
    """
    if plan.path == "warpgroup":
        multiply = plan.tile_k * plan.tile_m * plan.tile_n / _WARPGROUP_FMAS_PER_CYCLE
        return max(multiply, 2 * plan.tile_k * (plan.tile_m + plan.tile_n) / _COPIED_BYTES_PER_CYCLE)
    multiply = plan.tile_k / 16 * max(_TENSOR_LEAST_CYCLES, 16 * plan.tile_m * plan.tile_n / _TENSOR_FMAS_PER_CYCLE)
    busy = min(1.0, max(1, plan.num_pieces) / target.num_sms)
    fetch = 2 * plan.tile_k * (plan.tile_m + plan.tile_n) / min(_FETCH_BYTES_PER_CYCLE, _L2_BYTES_PER_CYCLE / busy)
    return max(multiply, fetch, _FETCH_CYCLES / (pipeline_stages(plan, target) - 1))


def _split_step_cycles(plan: ProductPlan) -> float:
    """Cycles of one step of a float32 tile on tensor cores: its bytes come, its numbers are split and multiplied."""
    elements = plan.tile_k * (plan.tile_m + plan.tile_n)
    multiply = plan.tf32_products * plan.tile_k * plan.tile_m * plan.tile_n / _TF32_FMAS_PER_CYCLE
    return 4 * elements / _LOADED_BYTES_PER_CYCLE + elements * _SPLIT_CYCLES + multiply
