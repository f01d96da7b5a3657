"""What a product on the whole grid takes, by path: the model behind the choice of tiles."""

from __future__ import annotations

from dataclasses import replace

from trainkernel.block_tiles import CYCLES_PER_US, LONE_WARP_CYCLES, LONE_WARP_FACTOR, multiply_cycles
from trainkernel.product_plans import ProductPlan, ceil_div
from trainkernel.target import Target

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
_PANEL_PIECE_US = 1.1
_PANEL_BYTES_PER_US = 8.0e4
_PANEL_OUTPUT_US = 3.0e-4
_MAX_TILE_SUMS = 32
_ANY_SMS = 2**30
"""As many multiprocessors as there are pieces."""
MAX_PIPELINE_BYTES = 160 * 1024
MAX_STAGES = 4
MAX_WARPGROUP_BYTES = 200 * 1024
SHARED_SM_BYTES = 112 * 1024
"""Shared memory of a block up to which two of them share a multiprocessor."""
MAX_SHARED_TILE = 128 * 64
"""Outputs of a warpgroup tile with which two blocks share a multiprocessor."""
MAX_WARPGROUP_STAGES = 6


def panel_cost_us(plan: ProductPlan, target: Target, threads: int) -> float:
    """Estimated time: waves of pieces that fetch, multiply and store one after another."""
    outputs = plan.tile_m * plan.tile_n
    fetch_us = 4 * plan.tile_k * (plan.tile_m + plan.tile_n) / _PANEL_BYTES_PER_US
    multiply_us = multiply_cycles(plan, threads) / CYCLES_PER_US
    waves = ceil_div(plan.num_pieces, target.num_sms)
    piece_us = _PANEL_PIECE_US + fetch_us + multiply_us + outputs * _PANEL_OUTPUT_US
    # A stage has other tasks, too, which wait for multiprocessors.
    return waves * piece_us + plan.num_pieces / target.num_sms * piece_us + _detour_us(plan)


def _detour_us(plan: ProductPlan) -> float:
    """What partial products take on their way through memory."""
    if plan.split == 1:
        return 0.0
    return _EXTRA_STAGE_US + 8 * plan.split * plan.num_outputs / _PARTIAL_BYTES_PER_US


def pipeline_stages(plan: ProductPlan, target: Target) -> int:
    """Steps of a tensor-core product that have a buffer: the one that is multiplied, and those on their way."""
    outer = plan.tile_m + plan.tile_n
    step_bytes = 2 * outer * plan.tile_k + plan.skew_bytes * max(outer, 2 * plan.tile_k)
    steps = ceil_div(min(plan.chunk, plan.k), plan.tile_k)
    if plan.path == "warpgroup":
        most = SHARED_SM_BYTES if plan.tile_m * plan.tile_n <= MAX_SHARED_TILE else MAX_WARPGROUP_BYTES
        fit = min(target.task_shared_bytes, most) // step_bytes
        return max(3, min(MAX_WARPGROUP_STAGES, fit, 2 + steps))
    fit = min(target.task_shared_bytes, MAX_PIPELINE_BYTES) // step_bytes
    return max(2, min(MAX_STAGES, fit, 1 + steps))


def product_cost_us(plan: ProductPlan, target: Target, threads: int) -> float:
    """Estimated time of a product on the whole grid, whatever its path."""
    if plan.is_tile:
        return tile_cost_us(plan, target)
    if plan.path == "panel":
        return panel_cost_us(plan, target, threads)
    waves = ceil_div(plan.num_pieces, target.num_sms)
    return waves * _PIECE_US + plan.num_outputs * plan.k / _VECTOR_FMAS_PER_US


def piece_cost_us(plan: ProductPlan, target: Target, threads: int) -> float:
    """Estimated time of one piece of a product on the whole grid."""
    if plan.is_tile or plan.path == "panel":
        return product_cost_us(plan, replace(target, num_sms=_ANY_SMS), threads) - _detour_us(plan)
    return _PIECE_US + plan.num_outputs * plan.k / _VECTOR_FMAS_PER_US / max(1, plan.num_pieces)


def conversion_us(plan: ProductPlan, outer: int, target: Target) -> float:
    """What a tensor-core product loses if it converts an operand with ``outer`` places in a tile as it fetches it.

    Every piece converts its part anew; of an operand that is stored in 16 bits it would start copies alone.
    """
    waves = ceil_div(plan.num_pieces, target.num_sms)
    return waves * outer * min(plan.chunk, plan.k) * _CONVERSION_US


def stored_cast_us(num_elements: int, moved_bytes: int, target: Target) -> float:
    """Time of a task that converts elements once; ``moved_bytes`` is what it reads and writes for each."""
    return _EXTRA_STAGE_US + _CAST_US + num_elements * moved_bytes / target.memory_bytes_per_us


def tile_sums_stride(plan: ProductPlan) -> int:
    """Floats between rows of a tile's sums in shared memory, as the template of its path has them."""
    if plan.path != "tile":
        return plan.tile_n + 4
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
        if groups > 1 and 4 * groups * plan.tile_m * tile_sums_stride(plan) > target.task_shared_bytes:
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
    step = max(ceil_div(warps, 4) * instructions, shared, LONE_WARP_CYCLES + LONE_WARP_FACTOR * instructions)
    merged = 60 + 2 * groups * plan.tile_m * plan.tile_n / 32 if groups > 1 else 0
    return rounds * depth / 4 * step + merged


def tile_cost_us(plan: ProductPlan, target: Target) -> float:
    """Estimated time of the product: its waves of pieces, and the detour of partials."""
    outputs = plan.tile_m * plan.tile_n
    depth = min(plan.chunk, plan.k)
    steps = ceil_div(depth, plan.tile_k)
    waves = ceil_div(plan.num_pieces, target.num_sms)
    if plan.is_tensor_tile:
        step_us = _tensor_step_cycles(plan, target) / CYCLES_PER_US
        cost = waves * (_TENSOR_PIECE_US + steps * step_us + outputs * _TENSOR_OUTPUT_US)
    elif plan.path == "split":
        step_us = _split_step_cycles(plan) / CYCLES_PER_US
        cost = waves * (_SPLIT_PIECE_US + steps * step_us + outputs * _SPLIT_OUTPUT_US)
    else:
        work = depth * max(_TILE_MIN_DEPTH_US, outputs * _TILE_OUTPUT_US)
        cost = waves * (_PIECE_US + ceil_div(steps, 2) * _STEP_US + work + outputs * _EPILOGUE_OUTPUT_US)
    return cost + _detour_us(plan)


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
