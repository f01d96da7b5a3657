"""What a program takes under a region plan: the pieces, and the stages of the grid around them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from trainkernel.access import PICKS
from trainkernel.arithmetic import kind_of
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Item, Operation, Program, TensorSpec
from trainkernel.near_products import block_scratch_bytes, block_sums_bytes, near_product_us
from trainkernel.ops import OPS
from trainkernel.options import Options
from trainkernel.product_costs import product_cost_us
from trainkernel.product_plans import ProductPlan, tensor_format
from trainkernel.products import plan_product
from trainkernel.region_plans import PartialSums, RegionPlan, Split, is_block_product, num_elements, product_flops
from trainkernel.target import Target

REGION_THREADS = 512
_MAX_TRIALS = 12
_MIN_TRIAL_FLOPS = 1_000_000
_SLAB_SHARE = 1.2
_SHARED_SHARE = 0.8
_FAR_BYTES_PER_US = 1.0e4
# Time of a part of a piece, microseconds, with 256 threads on one SM; measured on an H200.
_PART_US = 0.25
_SLICE_PART_US = 0.35
_PADDED_SLAB = 1.0625
_BLOCK_FLOPS_PER_US = 1.8e5
_BLOCK_EVALUATIONS_PER_US = 2.5e4
_BLOCK_BYTES_PER_US = 3.5e4
_EARLY_BYTES_PER_US = 8.0e4
_STREAM_BYTES_PER_US = 2.4e4
_L2_BYTES_PER_US = 5.5e6
_REGION_US = 0.8
_GRID_PART_US = 1.3
_TENSOR_STAGE_US = 1.2
_SPLIT_STAGE_US = 3.0
_PARTIAL_BYTES_PER_US = 3.0e6


@dataclass(frozen=True)
class _ItemCost:
    """What the model needs of an item: an operation's numbers, or a loop's operands and results alone.

    ``read_whole`` are the operands of which every row reads everything, ``leading`` the first size of each,
    ``picked_bytes`` what it reads at most of an operand from which it picks elements by an index.
    """

    operation: Operation | None
    name: str
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: str
    flops: int
    num_elements: int
    read_elements: int
    stage_us: float
    read_whole: tuple[str, ...]
    leading: Mapping[str, int]
    picked_bytes: Mapping[str, int]
    tensor: str = ""

    @staticmethod
    def of(item: Item, target: Target, options: Options) -> _ItemCost:
        operands = tuple(spec.buffer for spec in item.tensor_inputs)
        outputs = tuple(spec.buffer for spec in item.outputs)
        if not isinstance(item, Operation) or not num_elements(item):
            return _ItemCost(None, outputs[0], operands, outputs, "", 0, 0, 0, 0.0, (), {}, {})
        kind = kind_of(item)
        return _ItemCost(
            item,
            outputs[0],
            operands,
            outputs,
            kind,
            product_flops(item) if kind == "product" else 0,
            num_elements(item),
            sum(spec.num_elements for spec in item.tensor_inputs),
            _stage_us(item, target, options),
            _read_whole(item),
            {spec.buffer: spec.shape[0] if spec.ndim else 0 for spec in item.tensor_inputs},
            _picked_bytes(item),
            _format_of(item, options) if kind == "product" else "",
        )


def _format_of(product: Operation, options: Options) -> str:
    if not is_block_product(product):
        return ""
    a, b = product.inputs[-2:]
    assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
    return tensor_format(a, b, options)


class RegionCost:
    """Estimated time of a program under a region plan: the pieces, and the stages of the grid around them."""

    def __init__(self, program: Program, target: Target, options: Options) -> None:
        self._program, self._target, self._options = program, target, options
        self._sums: dict[frozenset[str], PartialSums] = {}
        self._threads = options.threads_per_block or REGION_THREADS
        self._items = [_ItemCost.of(item, target, options) for item in program.operations]
        self._sizes = {spec.buffer: DTYPES[spec.dtype].itemsize_bytes * spec.num_elements for spec in program.buffers()}
        self._paths_us: dict[tuple[frozenset[str], frozenset[str], PartialSums, bool], float] = {}

    def fits(self, plan: RegionPlan) -> bool:
        """Whether shared memory holds what each product of the region needs, whatever will be fused."""
        evaluated = {item.name for item in self._items if item.kind == "pointwise" or item.name not in plan.rows}
        return all(
            self._scratch_bytes(item, plan, evaluated) <= self._target.task_shared_bytes
            for item in self._items
            if plan.has(item.name)
        )

    def _scratch_bytes(self, item: _ItemCost, plan: RegionPlan, evaluated: Set[str]) -> int:
        """A bound of the scratch of a product in a piece (``evaluated`` as for ``block_scratch_bytes``); else 0."""
        piece = self._plan_of_piece(item, plan)
        if piece is None or item.operation is None:
            return 0
        return block_scratch_bytes(item.operation, piece, self._target, self._threads, evaluated)

    def _plan_of_piece(self, item: _ItemCost, plan: RegionPlan) -> ProductPlan | None:
        """How a piece of a product near a block is computed; None for what is no such product."""
        operation = item.operation
        if operation is None or item.kind != "product" or not is_block_product(operation):
            return None
        kind = "product_partials" if item.name in plan.partials else operation.op
        attrs: dict[str, Any] = {**operation.attrs, "pieces": plan.split.pieces}
        if item.name in plan.partials:
            attrs |= {"pieces": plan.split.partials, "slices": plan.split.slices}
        return plan_product(replace(operation, op=kind, attrs=attrs), self._target, self._options)

    def largest_products(self) -> list[Operation]:
        """The products that do most of the work, largest first."""
        products = [item for item in self._items if item.flops >= _MIN_TRIAL_FLOPS]
        ranked = sorted(products, key=lambda item: -item.flops)[:_MAX_TRIALS]
        return [item.operation for item in ranked if item.operation is not None]

    def total_us(self, plan: RegionPlan | None) -> float:
        """Time of the pieces, of the longest path through the rest, and of the rest's work."""
        if plan is None:
            return self._path_us(None)
        key = plan.rows, plan.partials, plan.sums, plan.split.pieces > 1
        if key not in self._paths_us:
            self._paths_us[key] = self._path_us(plan)
        return self._pieces_us(plan) + self._paths_us[key]

    def best_us(self, label: int, choices: list[int], rows: frozenset[str], partials: frozenset[str]) -> float:
        """The least time over several numbers of pieces."""
        splits = (Split.over(label, pieces, self._target.num_sms) for pieces in choices)
        return min(self.total_us(self.plan(split, rows, partials)) for split in splits)

    def plan(self, split: Split, rows: frozenset[str], partials: frozenset[str]) -> RegionPlan:
        """The plan with the sums of partial results that a block can add up."""
        if split.slices > 1 or split.pieces == 1:
            return RegionPlan(split, rows, partials)
        if partials not in self._sums:
            self._sums[partials] = PartialSums.of(self._program, partials)
        return RegionPlan(split, rows, partials, self._sums[partials])

    def _pieces_us(self, plan: RegionPlan) -> float:
        """One wave of pieces after another, and the partial results that they leave."""
        split = plan.split
        if split.slices > 1:
            return self._slices_us(plan)
        waves = -(-split.partials // self._target.num_sms)
        inside = [item for item in self._items if plan.has(item.name)]
        piece_us, partial_bytes, slab_bytes = _REGION_US, 0, 0
        for item in inside:
            partial = item.name in plan.partials
            if plan.leaves(item.name):
                partial_bytes += 4 * split.partials * item.num_elements
            elif not partial and item.kind != "pointwise":
                slab_bytes += self._sizes[item.name] // split.pieces
            pieces = 1 if item.name in plan.sums.results else split.pieces
            piece_us += _part_us(item, pieces, partial, self._threads)
        if split.pieces > 1 and slab_bytes > _SLAB_SHARE * self._target.task_shared_bytes:
            return float("inf")  # values would go through device memory, part by part
        kept_bytes, streamed_bytes = self._bytes_from_outside(inside, plan)
        room_bytes = _SHARED_SHARE * self._target.task_shared_bytes
        scratch_bytes = max((self._scratch_bytes(item, plan, frozenset()) for item in inside if item.tensor), default=0)
        if scratch_bytes:
            room_bytes = self._target.task_shared_bytes - scratch_bytes
        far_bytes = max(0.0, slab_bytes + kept_bytes - room_bytes)
        piece_us += far_bytes / _FAR_BYTES_PER_US
        blocks = min(split.partials, self._target.num_sms)
        # Behind products on the whole grid, what is kept comes while a block waits for the others.
        before = {item.name for item in self._items if item.kind == "product" and not plan.has(item.name)}
        early = any(name in before for item in inside for name in item.operands)
        kept_rate = _EARLY_BYTES_PER_US if early else _BLOCK_BYTES_PER_US
        moved_us = max(
            kept_bytes / kept_rate + streamed_bytes / _STREAM_BYTES_PER_US,
            blocks * (kept_bytes + streamed_bytes) / _L2_BYTES_PER_US,
        )
        return waves * (piece_us + moved_us) + self._left_us(plan) + 2 * partial_bytes / _PARTIAL_BYTES_PER_US

    def _left_us(self, plan: RegionPlan) -> float:
        """Time of the rows that travel through device memory to readers outside of the region."""
        outside = {name for item in self._items if not plan.has(item.name) for name in item.operands}
        return 2 * sum(self._sizes[name] for name in outside & plan.rows) / _L2_BYTES_PER_US

    def _slices_us(self, plan: RegionPlan) -> float:
        """Several pieces of a block, one after another, with weights and partial results near it that have room."""
        split = plan.split
        waves = -(-split.partials // self._target.num_sms)
        inside = [item for item in self._items if plan.has(item.name)]
        partials = {item.name: 4 * item.num_elements for item in inside if item.name in plan.partials}
        slab_bytes = self._peak_slab_bytes(inside, plan)
        scratch_bytes: float = max((self._sums_bytes(item, plan) for item in inside if item.tensor), default=0)
        room_bytes = self._target.task_shared_bytes - scratch_bytes - slab_bytes
        if room_bytes < 0:
            return float("inf")
        piece_us = _REGION_US + sum(
            _part_us(item, split.pieces, item.name in partials, self._threads) for item in inside
        )
        piece_us += (_SLICE_PART_US - _PART_US) * sum(item.kind == "product" for item in inside)
        uses: dict[str, int] = {}
        for item in inside:
            for name in item.operands:
                if name in item.picked_bytes:
                    piece_us += item.picked_bytes[name] / split.pieces / _BLOCK_BYTES_PER_US
                elif name not in plan.rows:
                    uses[name] = uses.get(name, 0) + (item.kind == "product")
        common = {item_name for item in inside for item_name in item.read_whole} & uses.keys() - plan.partials
        once_us = 0.0
        for name, count in sorted(uses.items(), key=lambda pair: self._sizes[pair[0]]):
            size = self._sizes[name]
            if name not in common:
                piece_us += size / split.pieces / _BLOCK_BYTES_PER_US
            elif _PADDED_SLAB * size <= room_bytes:
                room_bytes -= _PADDED_SLAB * size
                once_us += 2 * size / _BLOCK_BYTES_PER_US
            else:
                scratch_bytes = max(scratch_bytes, _PADDED_SLAB * size)  # rounded there for each use
                piece_us += 2 * count * size / _BLOCK_BYTES_PER_US
        if slab_bytes + scratch_bytes > self._target.task_shared_bytes:
            return float("inf")
        for size in sorted(partials.values()):
            if size <= room_bytes:
                room_bytes -= size
            else:
                piece_us += 2 * size / _BLOCK_BYTES_PER_US  # adds to what is there
        left_us = self._left_us(plan) + 2 * split.partials * sum(partials.values()) / _PARTIAL_BYTES_PER_US
        return waves * (split.slices * piece_us + once_us) + left_us

    def _peak_slab_bytes(self, inside: list[_ItemCost], plan: RegionPlan) -> float:
        """The most bytes of a piece's rows that parts still read; what continues a result lies in its place."""
        home: dict[str, str] = {}
        last: dict[str, int] = {}
        for number, item in enumerate(inside):
            read = [home[name] for name in item.operands if name in home]
            own = read[-1] if item.kind == "pointwise" and read else item.name
            if item.name in plan.rows:
                home[item.name] = own
            for name in (own, *read):
                last[name] = number
        alive, peak = {}, 0.0
        for number, item in enumerate(inside):
            if home.get(item.name) == item.name:
                alive[item.name] = self._sizes[item.name] / plan.split.pieces * _PADDED_SLAB
            peak = max(peak, sum(alive.values()))
            alive = {name: size for name, size in alive.items() if last[name] > number}
        return peak

    def _sums_bytes(self, item: _ItemCost, plan: RegionPlan) -> int:
        """Scratch of a product whose operands lie near."""
        piece = self._plan_of_piece(item, plan)
        return 0 if piece is None else block_sums_bytes(piece, self._threads, 0.0, self._target)

    def _bytes_from_outside(self, inside: list[_ItemCost], plan: RegionPlan) -> tuple[float, float]:
        """What a block fetches for a piece: what it keeps, and what does not fit, with each use."""
        room = 0.6 * self._target.task_shared_bytes
        uses: dict[tuple[str, bool], int] = {}
        kept, streamed = 0.0, 0.0
        for item in inside:
            product = item.kind == "product"
            whole = item.read_whole if item.name in plan.rows and plan.split.label > 1 else ()
            for name in item.operands:
                if name in item.picked_bytes:
                    streamed += item.picked_bytes[name] / plan.split.pieces
                elif not plan.has(name):
                    key = name, name not in whole and (product or item.leading[name] == plan.split.label)
                    uses[key] = uses.get(key, 0) + product
        for (buffer, own), count in uses.items():
            size = self._sizes[buffer] / (plan.split.pieces if own else 1)
            room -= size
            kept += size if room > 0 else 0.0
            streamed += 0.0 if room > 0 else size * max(count, 1)
        return kept, streamed

    def _path_us(self, plan: RegionPlan | None) -> float:
        """Time of the longest path through the operations on the whole grid, or of their work if that is longer."""
        finished: dict[str, tuple[float, bool]] = {}
        work_us, barrier_us = 0.0, self._target.grid_barrier_us
        for item in self._items:
            rows_us, grid_us, after_rows = 0.0, 0.0, False
            for name in item.operands:
                if name in finished:
                    us, near = finished[name]
                    after_rows |= near
                    rows_us, grid_us = (max(rows_us, us), grid_us) if near else (rows_us, max(grid_us, us))
            start_us = max(rows_us, grid_us)
            own_us, inside = 0.0, plan is not None and plan.has(item.name)
            if inside and plan is not None:
                if plan.leaves(item.name) and plan.split.pieces > 1:
                    own_us, inside = barrier_us + _GRID_PART_US, False
                elif grid_us > rows_us:
                    own_us = _REGION_US  # the region waits here
            elif item.operation is not None:
                own_us = item.stage_us
                if item.kind == "product":
                    work_us += item.flops / _BLOCK_FLOPS_PER_US / self._target.num_sms
                if after_rows and item.kind in ("product", "pointwise"):
                    own_us += barrier_us  # before what reads the region's rows
            for name in item.outputs:
                finished[name] = (start_us + own_us, inside)
        return max(max((us for us, _ in finished.values()), default=0.0), work_us)


def _read_whole(operation: Operation) -> tuple[str, ...]:
    """The operands that each row of a product reads as a whole."""
    if kind_of(operation) != "product" or operation.inputs[-1].ndim == 3:  # type: ignore[union-attr]
        return ()
    return tuple(spec.buffer for spec in operation.tensor_inputs[:-2] + operation.tensor_inputs[-1:])


def _picked_bytes(operation: Operation) -> dict[str, int]:
    """What an operation reads at most of an operand from which it picks elements by an index."""
    if operation.op not in PICKS:
        return {}
    table = operation.tensor_inputs[0]
    most = min(table.num_elements, num_elements(operation))
    return {table.buffer: DTYPES[table.dtype].itemsize_bytes * most}


def _part_us(item: _ItemCost, pieces: int, partial: bool, threads: int) -> float:
    if item.kind == "product":
        stored = item.num_elements if partial else item.num_elements / pieces
        if item.tensor:
            assert item.operation is not None
            return _PART_US + near_product_us(item.operation, item.tensor, pieces, partial, threads)
        return _PART_US + item.flops / pieces / _BLOCK_FLOPS_PER_US + 4 * stored / _BLOCK_BYTES_PER_US
    if item.kind in ("reduction", "scan"):
        return _PART_US + item.read_elements / pieces / _BLOCK_EVALUATIONS_PER_US
    assert item.operation is not None
    evaluations = item.num_elements / pieces * (OPS[item.operation.op].cost + 1)
    return evaluations / 4 / _BLOCK_EVALUATIONS_PER_US


def _stage_us(operation: Operation, target: Target, options: Options) -> float:
    """Time of an operation on the whole grid, the barrier after it included; pointwise ones are fused."""
    kind = kind_of(operation)
    if kind == "pointwise":
        evaluations = prod(operation.outputs[0].shape) * (OPS[operation.op].cost + 1)
        return evaluations / 4 / _BLOCK_EVALUATIONS_PER_US / target.num_sms
    if kind == "product":
        plan = plan_product(operation, target, options)
        extra_us = _TENSOR_STAGE_US if plan.is_tensor_tile else _SPLIT_STAGE_US if plan.path == "split" else 0.0
        return target.grid_barrier_us + product_cost_us(plan, target, options.threads) + extra_us
    return target.grid_barrier_us + _GRID_PART_US
