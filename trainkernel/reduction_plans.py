"""How a reduction, a scatter or a scan uses threads, and whether it has two phases.

The choice depends on the operation's own shapes and dtypes, on the target and on the options,
never on the grid or on what is fused into it: so fusing does not change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from trainkernel.ir import Operation, TensorSpec
from trainkernel.ops import reduced_dims, wrap_dim
from trainkernel.options import Options
from trainkernel.product_plans import ceil_div
from trainkernel.products import MAX_SPLIT
from trainkernel.target import Target

TWO_PHASE_ELEMENTS = 4096
SPLIT_REDUCTIONS = ("sum", "mean", "max", "min", "prod")
"""Reductions whose partial results may be reduced again."""
SCATTERS = ("scatter_add", "scatter_partials")
SCATTER_CHUNK = 256
MAX_SCATTERED = 8
MAX_PARTIALS = 256
MAX_THREAD_COUNT = 16
MIN_COLUMN_PARTIALS = 1024
MAX_PIECE_COUNT = 64
MAX_WARP_COUNT = 256
WARP_COLUMNS = 4
"""Neighbouring rows that a warp reduces at the same time."""


@dataclass(frozen=True)
class ReductionPlan:
    """One reduction's way of using threads.

    Attributes
    ----------
    path : str
        ``"thread"``: one thread per row; ``"warp"``: one warp per row; ``"block"``: one block per
        row; ``"columns"``: a block takes some neighbouring rows and splits their elements;
        ``"warp_columns"``: a warp does, in a block region;
        ``"scatter"``: a block takes neighbouring rows and only the elements which an index sends there.
    rows, count : int
        Number of results, and elements reduced into each.
    partials, chunk : int
        Number of first-phase pieces per row and their length; partials 1 means one phase.
    rows_per_piece : int
    slices : int
        Parts of a chunk that a block reduces one after another, each a piece of a block region.
    """

    path: str
    rows: int
    count: int
    partials: int
    chunk: int
    rows_per_piece: int
    slices: int = 1

    @property
    def own_count(self) -> int:
        """Elements of one piece that go into a result, or fewer in the last."""
        return (self.chunk if self.partials > 1 else self.count) // self.slices

    @property
    def num_pieces(self) -> int:
        return ceil_div(self.rows, self.rows_per_piece) * self.partials

    def __str__(self) -> str:
        phases = f", {self.partials} partials of {self.chunk}" if self.partials > 1 else ""
        return f"{self.path} per row, {self.rows} rows of {self.count}{phases}"


def plan_reduction(operation: Operation, target: Target, options: Options) -> ReductionPlan:
    """Choose how a reduction uses threads, and whether it has two phases."""
    if operation.op in SCATTERS:
        return _plan_scatter(operation, target, options)
    source = operation.inputs[0]
    assert isinstance(source, TensorSpec)
    dims = reduced_dims(source.shape, operation.attrs)
    count = reduced_count(operation)
    rows = prod(size for dim, size in enumerate(source.shape) if dim not in dims)
    by_columns = not _is_innermost(source, dims)
    if "pieces" in operation.attrs:
        pieces = operation.attrs["pieces"]
        if operation.op == "reduce_partials":
            slices = operation.attrs.get("slices", 1)
            path = _path_of_piece(rows, count // pieces // slices, by_columns, options)
            return ReductionPlan(path, rows, count, pieces, count // pieces, _rows_together(path, options), slices)
        path = _path_of_piece(rows // pieces, count, by_columns, options)
        return ReductionPlan(path, rows, count, 1, count, _rows_together(path, options))
    warps = options.threads // 32
    splittable = operation.op not in ("softmax_stats", "moments")
    if by_columns and rows >= 8:
        pieces = ceil_div(rows, options.columns)
        partials = _column_partials(count, pieces, target) if splittable else 1
        if partials > 1:
            chunk = ceil_div(count, partials)
            return ReductionPlan("columns", rows, count, ceil_div(count, chunk), chunk, options.columns)
        if count <= MAX_THREAD_COUNT:
            return ReductionPlan("thread", rows, count, 1, count, options.threads)
        return ReductionPlan("columns", rows, count, 1, count, options.columns)
    if count <= MAX_THREAD_COUNT and ceil_div(rows, options.threads) >= target.num_sms // 8:
        return ReductionPlan("thread", rows, count, 1, count, options.threads)
    if count <= 128 and rows >= 8:
        return ReductionPlan("warp", rows, count, 1, count, warps)
    if count > TWO_PHASE_ELEMENTS and rows < target.num_sms // 2 and splittable:
        partials = min(MAX_PARTIALS, max(2, target.num_sms // max(rows, 1)), ceil_div(count, 1024))
        chunk = ceil_div(count, partials)
        return ReductionPlan("block", rows, count, ceil_div(count, chunk), chunk, 1)
    return ReductionPlan("block", rows, count, 1, count, 1)


def _path_of_piece(rows: int, count: int, by_columns: bool, options: Options) -> str:
    """How a block reduces the rows of a piece, whose operands are near."""
    if (
        by_columns
        and MAX_THREAD_COUNT < count <= MAX_WARP_COUNT
        and 8 <= rows <= 2 * WARP_COLUMNS * options.threads // 32
    ):
        return "warp_columns"
    if count <= MAX_THREAD_COUNT or (by_columns and count <= MAX_PIECE_COUNT and rows >= options.columns):
        return "thread" if rows >= 8 else "warp"
    if by_columns and rows >= 8:
        return "columns"
    return "warp" if count <= MAX_WARP_COUNT or rows >= options.threads // 32 else "block"


def _rows_together(path: str, options: Options) -> int:
    """Rows that a block reduces at the same time."""
    warps = options.threads // 32
    together = {"thread": options.threads, "warp": warps, "warp_columns": WARP_COLUMNS * warps, "block": 1}
    return options.columns if path == "columns" else together[path]


def reduced_count(operation: Operation) -> int:
    """Elements that go into each result of a reduction."""
    source = operation.inputs[0]
    assert isinstance(source, TensorSpec)
    return prod(source.shape[dim] for dim in reduced_dims(source.shape, operation.attrs))


def _is_innermost(source: TensorSpec, dims: tuple[int, ...]) -> bool:
    """Whether elements of one row lie closer to each other in memory than neighbouring rows do."""
    reduced = [source.strides[dim] for dim in dims if source.shape[dim] > 1]
    kept = [source.strides[dim] for dim, size in enumerate(source.shape) if dim not in dims and size > 1]
    return not kept or (bool(reduced) and min(reduced) <= kept[-1])


def _column_partials(count: int, pieces: int, target: Target) -> int:
    if count < MIN_COLUMN_PARTIALS:
        return 1
    return max(1, min(32, target.num_sms // max(pieces, 1), count // 64))


def _plan_scatter(operation: Operation, target: Target, options: Options) -> ReductionPlan:
    """A thread per result, or per few where there are many; many updates of few results are split among the SMs."""
    updates = operation.inputs[1]
    assert isinstance(updates, TensorSpec)
    count = updates.shape[0]
    rows = operation.attrs["size"] * prod(updates.shape[1:])
    per_thread = max(1, min(MAX_SCATTERED, rows // (options.threads * target.num_sms)))
    rows_per_piece = options.threads * per_thread
    pieces = max(1, ceil_div(rows, rows_per_piece))
    partials = max(1, min(MAX_SPLIT, target.num_sms // pieces, count // SCATTER_CHUNK))
    chunk = ceil_div(max(count, 1), partials)
    return ReductionPlan("scatter", rows, count, ceil_div(max(count, 1), chunk), chunk, rows_per_piece)


@dataclass(frozen=True)
class ScanPlan:
    """How a scan uses threads.

    Attributes
    ----------
    path : str
        ``"thread"``, ``"warp"`` or ``"block"``: who goes through one row.
    rows, count : int
        Number of independent rows, and elements of each.
    rows_per_piece : int
    """

    path: str
    rows: int
    count: int
    rows_per_piece: int

    @property
    def num_pieces(self) -> int:
        return ceil_div(self.rows, self.rows_per_piece)

    def __str__(self) -> str:
        return f"{self.path} per row, {self.rows} rows of {self.count}"


# Time of one step of a scan, microseconds: a batch of loads and what must follow it.
_SCAN_STEP_US = {"thread": 0.7, "warp": 0.8, "block": 1.6}


def plan_scan(operation: Operation, target: Target, options: Options) -> ScanPlan:
    """Choose who goes through a row of a scan."""
    source = operation.inputs[0]
    assert isinstance(source, TensorSpec)
    dim = wrap_dim(operation.attrs["dim"], source.ndim)
    count = source.shape[dim]
    rows = prod(size for at, size in enumerate(source.shape) if at != dim)
    along = _is_innermost(source, (dim,))
    plans = (
        ScanPlan("thread", rows, count, options.threads),
        ScanPlan("warp", rows, count, options.threads // 32),
        ScanPlan("block", rows, count, 1),
    )
    return min(plans, key=lambda plan: _scan_cost_us(plan, along, target, options))


def _scan_cost_us(plan: ScanPlan, along: bool, target: Target, options: Options) -> float:
    """Estimated time: its waves of pieces, and the memory that accesses with gaps move for nothing.

    ``along`` says whether neighbours in memory are neighbours of the scan.
    """
    elements = {"thread": 4, "warp": 32, "block": 4 * options.threads}[plan.path]
    waves = ceil_div(plan.num_pieces, target.num_sms)
    gaps = along if plan.path == "thread" else not along
    moved_bytes = plan.rows * plan.count * (64 if gaps else 8)
    steps = ceil_div(plan.count, elements)
    return waves * steps * _SCAN_STEP_US[plan.path] + moved_bytes / target.memory_bytes_per_us
