"""How a product or a reduction is split into pieces: chosen from shapes, target and options.

The choice depends on the operation's own shapes and dtypes, on the target and on the options,
never on the grid or on what is fused into it: so fusing does not change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from trainkernel.ir import Operation, TensorSpec
from trainkernel.ops import reduced_dims, scale_of
from trainkernel.options import Options
from trainkernel.target import Target

GEMV_MIN_DEPTH = 64
THIN_DEPTH = 8
THIN_ROWS = 4
TWO_PHASE_ELEMENTS = 4096
MAX_PARTIALS = 256
MAX_SPLIT = 32
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
THIN_CHUNK = 32
# Costs behind the choice of tiles, microseconds, with 256 threads per block; measured on an H200.
_PIECE_US = 0.8
_STEP_US = 1.0
_TILE_MIN_DEPTH_US = 0.018
_TILE_OUTPUT_US = 7.0e-6
_TENSOR_FILL_US = 1.5e-4
_TENSOR_OUTPUT_US = 4.0e-7
_EPILOGUE_OUTPUT_US = 4.0e-4
_EXTRA_STAGE_US = 1.2
_PARTIAL_BYTES_PER_US = 2.0e6


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
        ``"thin"`` (one thread per output), ``"tensor"`` (``mma.sync`` tiles), ``"tile"``
        (float32 FMA tiles).
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

    @property
    def num_tiles(self) -> int:
        if self.path == "thin":
            return ceil_div(self.m * self.n, self.tile_n)
        return ceil_div(self.m, self.tile_m) * ceil_div(self.n, self.tile_n)

    @property
    def num_pieces(self) -> int:
        return self.num_tiles * self.split

    def __str__(self) -> str:
        split = f", depth split {self.split} x {self.chunk}" if self.split > 1 else ""
        return f"{self.path} {self.m}x{self.n}x{self.k} tile {self.tile_m}x{self.tile_n}x{self.tile_k}{split}"


def plan_product(operation: Operation, target: Target, options: Options) -> ProductPlan:
    """Choose path and tiles of an ``mm`` or ``addmm``."""
    a, b = operation.inputs[-2:]
    assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
    (m, k), n = a.shape, b.shape[1]
    threads = options.threads
    skew = 16 if options.shared_skew is None else options.shared_skew
    if scale_of(operation.attrs, "alpha") == 0:
        return _thin(m, n, 0, target, threads, skew)
    if k >= GEMV_MIN_DEPTH and options.split_k_gemv is not False and min(m, n) == 1:
        if m == 1:
            return ProductPlan("gemv", m, n, k, 1, 32, k, 1, k, skew)
        return ProductPlan("gemv_t", m, n, k, 32, 1, k, 1, k, skew)
    if k <= THIN_DEPTH or m <= THIN_ROWS:
        return _thin(m, n, k, target, threads, skew)
    if a.dtype == b.dtype and a.dtype in ("float16", "bfloat16"):
        return _best_tiles("tensor", m, n, k, target, options, skew)
    return _best_tiles("tile", m, n, k, target, options, skew)


def _thin(m: int, n: int, k: int, target: Target, threads: int, skew: int) -> ProductPlan:
    """One thread per output; a long depth is split until about every SM has a piece."""
    pieces = max(1, ceil_div(m * n, threads))
    split = max(1, min(MAX_SPLIT, target.num_sms // pieces, k // THIN_CHUNK))
    chunk = ceil_div(max(k, 1), split)
    return ProductPlan("thin", m, n, k, 1, threads, max(k, 1), ceil_div(max(k, 1), chunk), chunk, skew)


def _tile_choices(path: str, m: int, n: int, options: Options) -> list[tuple[int, int]]:
    if path == "tensor":
        widths = [options.gemm_tile_n] if options.gemm_tile_n else ([16, 32, 64] if n > 16 else [16])
        heights = [16, 32, 64] if m > 16 else [16]
        return [
            (height, width) for height in heights for width in widths if height == heights[-1] or width <= 2 * height
        ]
    widths = [options.gemm_tile_n] if options.gemm_tile_n else ([8] if n <= 8 else [32, 64] if n > 32 else [32])
    heights = [height for height in (16, 32, 64) if height == 16 or m > height // 2]
    pairs = [(height, width) for height in heights for width in widths if height * width >= options.threads]
    return pairs or [(64, widths[-1])]


def _depth_step(path: str, chunk: int, options: Options) -> int:
    """Depth of one shared-memory step; two steps are under way at a time."""
    if options.gemm_k_tile:
        return options.gemm_k_tile
    return 128 if path == "tensor" and chunk > 64 else 64


def _best_tiles(path: str, m: int, n: int, k: int, target: Target, options: Options, skew: int) -> ProductPlan:
    best: tuple[float, ProductPlan] | None = None
    for tile_m, tile_n in _tile_choices(path, m, n, options):
        for split in SPLITS:
            chunk = ceil_div(ceil_div(k, split), 32) * 32
            step = _depth_step(path, chunk, options)
            plan = ProductPlan(path, m, n, k, tile_m, tile_n, step, ceil_div(k, chunk), chunk, skew)
            cost = _tile_cost_us(plan, target)
            if best is None or cost < best[0] - 1e-9:
                best = (cost, plan)
    assert best is not None
    return best[1]


def _tile_cost_us(plan: ProductPlan, target: Target) -> float:
    """Estimated time of the product: its waves of pieces, and the detour of partials."""
    outputs = plan.tile_m * plan.tile_n
    depth = min(plan.chunk, plan.k)
    steps = ceil_div(depth, plan.tile_k)
    if plan.path == "tensor":
        work = depth * (plan.tile_m + plan.tile_n) * _TENSOR_FILL_US + depth * outputs * _TENSOR_OUTPUT_US
    else:
        work = depth * max(_TILE_MIN_DEPTH_US, outputs * _TILE_OUTPUT_US)
    waves = ceil_div(plan.num_pieces, target.num_sms)
    cost = waves * (_PIECE_US + ceil_div(steps, 2) * _STEP_US + work + outputs * _EPILOGUE_OUTPUT_US)
    if plan.split > 1:
        cost += _EXTRA_STAGE_US + 8 * plan.split * plan.m * plan.n / _PARTIAL_BYTES_PER_US
    return cost


@dataclass(frozen=True)
class ReductionPlan:
    """One reduction's way of using threads.

    Attributes
    ----------
    path : str
        ``"thread"``: one thread per row; ``"warp"``: one warp per row; ``"block"``: one block per
        row; ``"columns"``: a block takes 32 neighbouring rows and splits their elements.
    rows, count : int
        Number of results, and elements reduced into each.
    partials, chunk : int
        Number of first-phase pieces per row and their length; partials 1 means one phase.
    rows_per_piece : int
    """

    path: str
    rows: int
    count: int
    partials: int
    chunk: int
    rows_per_piece: int

    @property
    def num_pieces(self) -> int:
        return ceil_div(self.rows, self.rows_per_piece) * self.partials

    def __str__(self) -> str:
        phases = f", {self.partials} partials of {self.chunk}" if self.partials > 1 else ""
        return f"{self.path} per row, {self.rows} rows of {self.count}{phases}"


def plan_reduction(operation: Operation, target: Target, options: Options) -> ReductionPlan:
    """Choose how a reduction uses threads, and whether it has two phases."""
    source = operation.inputs[0]
    assert isinstance(source, TensorSpec)
    dims = reduced_dims(source.shape, operation.attrs)
    count = prod(source.shape[dim] for dim in dims)
    rows = prod(size for dim, size in enumerate(source.shape) if dim not in dims)
    last = max((dim for dim, size in enumerate(source.shape) if size > 1), default=-1)
    by_columns = last >= 0 and last not in dims
    warps = options.threads // 32
    splittable = operation.op != "softmax_stats"
    if by_columns and rows >= 8:
        pieces = ceil_div(rows, 32)
        partials = _column_partials(count, pieces, target) if splittable else 1
        if partials > 1:
            chunk = ceil_div(count, partials)
            return ReductionPlan("columns", rows, count, ceil_div(count, chunk), chunk, 32)
        if count <= 16:
            return ReductionPlan("thread", rows, count, 1, count, options.threads)
        return ReductionPlan("columns", rows, count, 1, count, 32)
    if count <= 128 and rows >= 8:
        return ReductionPlan("warp", rows, count, 1, count, warps)
    if count > TWO_PHASE_ELEMENTS and rows < target.num_sms // 2 and splittable:
        partials = min(MAX_PARTIALS, max(2, target.num_sms // max(rows, 1)), ceil_div(count, 1024))
        chunk = ceil_div(count, partials)
        return ReductionPlan("block", rows, count, ceil_div(count, chunk), chunk, 1)
    return ReductionPlan("block", rows, count, 1, count, 1)


def _column_partials(count: int, pieces: int, target: Target) -> int:
    if count < 256:
        return 1
    return max(1, min(32, target.num_sms // max(pieces, 1), count // 64))
