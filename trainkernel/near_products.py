"""Shared memory and time of products whose operands lie near a block: panels, steps of columns, 16-bit copies, sums."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from trainkernel.block_tiles import CYCLES_PER_US, TensorTile, block_tile, multiply_cycles, tensor_tile
from trainkernel.ir import Operation, TensorSpec
from trainkernel.product_plans import SIXTEEN_BIT_FORMATS, ProductPlan, ceil_div
from trainkernel.target import Target

_MAX_UNROLLED_COST = 32.0
_MAX_PAIRS_COST = 128.0
_MAX_BATCH = 4
_NEAR_ELEMENTS_PER_US = 4.0e4
PANEL_PAD = 4
SIXTEEN_BIT_PAD = 8
MAX_STAGED_BYTES = 150 * 1024
_STREAM_BYTES = 140 * 1024


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
    return count * (multiply_cycles(plan, threads) / CYCLES_PER_US + (evaluated + 2 * m * n) / _NEAR_ELEMENTS_PER_US)


def panel_depth(chunk: int) -> int:
    """Depth of a panel: that of a chunk, and zeros up to a multiple of four."""
    return -(-chunk // 4) * 4


def panel_bytes(plan: ProductPlan, target: Target, threads: int) -> int:
    """Shared memory of a panel product: both operands, and the sums."""
    return panel_operands_bytes(plan) + block_sums_bytes(plan, threads, _MAX_UNROLLED_COST + 1, target)


def panel_operands_bytes(plan: ProductPlan) -> int:
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


def tensor_sums_stride(plan: ProductPlan) -> int:
    """Floats between rows of the sums in shared memory."""
    return plan.tile_n + PANEL_PAD


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
    return operands_bytes + _tensor_sums_bytes(plan, tile) > target.task_shared_bytes


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
