"""The multiplication of a tile whose operands lie near the block: the calls of the prelude's templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainkernel.block_tiles import block_tile, tensor_tile
from trainkernel.codegen.text import flag
from trainkernel.near_products import block_sums_bytes, stores_pairs, tensor_sums_stride
from trainkernel.product_plans import TENSOR_DEPTHS, ProductPlan, ceil_div
from trainkernel.schedule import Schedule

_FORMATS = {"tf32": "TkTf32", "float16": "TkSixteen<false>", "bfloat16": "TkSixteen<true>"}


@dataclass(frozen=True)
class NearOperand:
    """Element (outer, k) of a tile's operand is at ``outer * stride + k`` along the depth, else ``k * stride + outer``.

    ``is_aligned``: in rows that begin at 16 bytes; for tensor cores, in shared memory.
    """

    pointer: str
    stride: int
    along_k: bool
    is_aligned: bool


@dataclass(frozen=True)
class Epilogue:
    """What follows a tile's sums.

    ``functions`` makes ``compute`` and ``write``, with True for pairs of neighbours, and names their results' C type;
    ``cost`` is that of ``block_sums_bytes``, ``bounds`` are the rows and columns inside, all of them if ``whole``;
    ``batch_of`` says for a number of outputs how many of them a thread has under way.
    """

    functions: Callable[[bool], tuple[list[str], str]]
    cost: float
    bounds: str
    whole: bool
    batch_of: Callable[[Sequence[str], int], int]


def multiply(
    plan: ProductPlan, schedule: Schedule, a: NearOperand, b: NearOperand, sums_at: int, epilogue: Epilogue, warp: str
) -> tuple[list[str], int]:
    """The statements that multiply a tile and finish it, and the bytes of its sums in shared memory.

    ``warp`` is the C expression of a warp's number among those that take tiles of the product.
    """
    threads, target = schedule.options.threads, schedule.target
    pairs = stores_pairs(plan, threads, epilogue.cost, target)
    functions, results = epilogue.functions(pairs)
    if pairs:
        return [*functions, _from_registers(plan, threads, a, b, results, epilogue)], 0
    sums_bytes = block_sums_bytes(plan, threads, epilogue.cost, target)
    sums = f"(float*)(shared + {sums_at})" if sums_bytes else "nullptr"
    tile = block_tile(plan.tile_m, plan.tile_n, plan.tile_k, threads)
    outputs = plan.tile_m * plan.tile_n if sums_bytes else tile.kept * threads
    ending: list[object] = [epilogue.batch_of(functions, outputs), flag(epilogue.whole), results]
    if plan.tensor:
        return [*functions, *_on_tensor_cores(plan, threads, a, b, sums, ending, epilogue.bounds)], sums_bytes
    step = 4 if a.is_aligned and b.is_aligned and plan.tile_k % 4 == 0 else 1
    template: list[object] = [plan.tile_m, plan.tile_n, plan.tile_k, threads, *tile.sizes, step]
    template += [a.stride, flag(a.along_k), b.stride, flag(b.along_k), flag(sums_bytes == 0), *ending]
    arguments = f"{a.pointer}, {b.pointer}, {sums}, {warp}, {epilogue.bounds}, compute, write"
    return [*functions, f"tk_block_product<{_joined(template)}>({arguments});"], sums_bytes


def _from_registers(
    plan: ProductPlan, threads: int, a: NearOperand, b: NearOperand, results: str, epilogue: Epilogue
) -> str:
    tile = tensor_tile(plan, threads)
    whole = epilogue.whole and plan.tile_m % (16 * tile.rows) == 0 and plan.tile_n % (8 * tile.units) == 0
    template = [
        _FORMATS[plan.tensor],
        tile.rows,
        tile.units,
        flag(a.along_k),
        flag(b.along_k),
        plan.tile_m,
        plan.tile_n,
    ]
    template += [_whole_depth(plan), tile.log_m, tile.log_n, flag(whole), results]
    return f"tk_tensor_product<{_joined(template)}>({_near(a)}, {_near(b)}, {epilogue.bounds}, compute, write);"


def _on_tensor_cores(
    plan: ProductPlan, threads: int, a: NearOperand, b: NearOperand, sums: str, ending: list[object], bounds: str
) -> list[str]:
    tile, stride = tensor_tile(plan, threads), tensor_sums_stride(plan)
    operands, sizes, strides = [a, b], [plan.tile_m, plan.tile_n], [stride, 1]
    if tile.swapped:
        operands, sizes, strides = operands[::-1], sizes[::-1], strides[::-1]
    last_depth = _whole_depth(plan) - (tile.groups - 1) * tile.depth
    work = [*sizes, tile.depth, last_depth, tile.groups, tile.log_m, tile.log_n, *strides, plan.tile_m * stride]
    template = [_FORMATS[plan.tensor], tile.rows, tile.units, *(flag(operand.along_k) for operand in operands)]
    texts = [_near(operand) for operand in operands]
    finish = [plan.tile_m, plan.tile_n, stride, tile.groups, threads, *ending]
    return [
        f"tk_tensor_sums<{_joined(template)}>({_joined(texts)}, {sums}, TkTensorWork{{{_joined(work)}}});",
        "__syncthreads();  // the sums are complete",
        f"tk_block_finish<{_joined(finish)}>({sums}, {bounds}, compute, write);",
    ]


def _whole_depth(plan: ProductPlan) -> int:
    """The depth in whole steps of the tensor cores."""
    return ceil_div(plan.tile_k, TENSOR_DEPTHS[plan.tensor]) * TENSOR_DEPTHS[plan.tensor]


def _near(operand: NearOperand) -> str:
    return f"tk_near({operand.pointer}, {operand.stride})"


def _joined(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def templates(plan: ProductPlan) -> set[str]:
    """The prelude's files that the statements of ``multiply`` call."""
    return {"block_product", "tensor_sums"} if plan.tensor else {"block_product"}
