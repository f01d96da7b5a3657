"""Block regions: which operations a block computes for its own rows, without waiting for other blocks.

Cut by a label (``trainkernel.alignment``), a step falls into operations whose rows never talk to
each other (a net's forward and backward pass by examples; a whole step by the models of an
ensemble), operations that sum over rows (weight gradients, the loss), and the rest (the update of
the parameters). The first two make a *region*: piece ``c`` of it is a run of rows, and all tasks of
a piece run in one block with block barriers between them. The sums over rows become one partial
result per piece, which the rest adds up in order after a grid barrier. With one piece the whole
step is a region, and no grid barrier is left.

``plan_region`` chooses label and number of pieces by a cost model, from program, target and options
alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from trainkernel.access import PICKS, AccessWalker
from trainkernel.alignment import PARTIAL, ROW, accesses, by_alignment
from trainkernel.arithmetic import domain_of, kind_of, scale_of
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Item, Operand, Operation, Program, TensorSpec
from trainkernel.ops import OPS
from trainkernel.options import Options
from trainkernel.products import (
    ProductPlan,
    block_scratch_bytes,
    block_sums_bytes,
    near_product_us,
    plan_product,
    product_cost_us,
    tensor_format,
)
from trainkernel.reduction_plans import SPLIT_REDUCTIONS
from trainkernel.target import Target

REGION_THREADS = 512
_DRAWING = ("random_bits", *PICKS)
_MIN_MEETINGS = 2
_ONE_BLOCK_MARGIN = 0.85
_MAX_LABELS = 3
_MAX_BATCHES = 2
_MIN_BATCH = 8
_MAX_TRIALS = 12
_MIN_TRIAL_FLOPS = 1_000_000
_SLAB_SHARE = 1.2
_SHARED_SHARE = 0.8
_FAR_BYTES_PER_US = 1.0e4
_MAX_WAVES = 2
_SLICE_ROWS = (256, 128, 64)
# Time of a part of a piece, microseconds, with 256 threads on one SM; measured on an H200.
_PART_US = 0.25
_SLICE_PART_US = 0.35
_PADDED_SLAB = 1.0625
_BLOCK_FLOPS_PER_US = 1.8e5
_BLOCK_EVALUATIONS_PER_US = 2.5e4
_BLOCK_BYTES_PER_US = 3.5e4
_STREAM_BYTES_PER_US = 2.4e4
_L2_BYTES_PER_US = 5.5e6
_REGION_US = 0.8
_GRID_PART_US = 1.3
_TENSOR_STAGE_US = 1.2
_SPLIT_STAGE_US = 3.0
_PARTIAL_BYTES_PER_US = 3.0e6


@dataclass(frozen=True)
class Split:
    """A label, and the number of pieces (a divisor of it) into which its rows are cut.

    A block computes ``slices`` consecutive pieces, one after another, and adds up one partial result of them.
    """

    label: int
    pieces: int
    slices: int = 1

    @staticmethod
    def over(label: int, pieces: int, num_sms: int) -> Split:
        """The split whose blocks run at the same time."""
        for slices in range(1, pieces // 2 + 1):
            if pieces % slices == 0 and pieces // slices <= num_sms:
                return Split(label, pieces, slices)
        return Split(label, pieces)

    @property
    def partials(self) -> int:
        """Partial results of a sum over all rows, each of one block."""
        return self.pieces // self.slices

    @property
    def rows(self) -> int:
        """Rows of one piece."""
        return self.label // self.pieces

    def __str__(self) -> str:
        slices = f", {self.slices} for each block" if self.slices > 1 else ""
        return f"{self.pieces} pieces of {self.rows} rows{slices}"


@dataclass(frozen=True)
class PartialSums:
    """Additions of sums over rows: the partial results are added, so that one leaves a block for all of them.

    A weight that several evaluations of a net share (derivatives, more than one loss) has a gradient of each.
    ``operands`` are what the additions read: partial results, and ``results`` of others.
    """

    results: frozenset[str] = frozenset()
    operands: frozenset[str] = frozenset()

    @staticmethod
    def of(program: Program, partials: Set[str]) -> PartialSums:
        """The additions whose operands are sums over rows, or such additions, that nobody else reads."""
        reads = Counter(spec.buffer for item in program.operations for spec in item.tensor_inputs)
        reads.update(spec.buffer for spec in program.outputs)
        addable, results, operands = set[str](), set[str](), set[str]()
        for item in program.operations:
            if not isinstance(item, Operation) or item.outputs[0].dtype != "float32":
                continue
            name = item.outputs[0].buffer
            if name in partials and (kind_of(item) == "product" or item.op == "sum"):
                addable.add(name)
            elif item.op == "add" and all(_is_addable(operand, item, addable, reads) for operand in item.inputs):
                addable.add(name)
                results.add(name)
                operands |= {spec.buffer for spec in item.tensor_inputs}
        return PartialSums(frozenset(results), frozenset(operands))


def _is_addable(operand: Operand, addition: Operation, addable: Set[str], reads: Mapping[str, int]) -> bool:
    """Whether an operand of an addition is the whole of a sum that nobody else reads, in any order of its dims."""
    if not isinstance(operand, TensorSpec) or operand.buffer not in addable or reads[operand.buffer] > 1:
        return False
    return operand.num_elements == addition.outputs[0].num_elements and 0 not in (
        stride for size, stride in zip(operand.shape, operand.strides, strict=True) if size > 1
    )


@dataclass(frozen=True)
class RegionPlan:
    """A split, the buffers computed row by row, those that sum over rows, and sums of these.

    ``apart`` says that the rows are groups that have nothing to do with each other, so none waits for another's sake.
    """

    split: Split
    rows: frozenset[str]
    partials: frozenset[str]
    sums: PartialSums = PartialSums()
    apart: bool = False

    def has(self, name: str) -> bool:
        """Whether the operation that makes a buffer is inside of the region."""
        return name in self.rows or name in self.partials or name in self.sums.results

    def leaves(self, name: str) -> bool:
        """Whether a buffer is the sum of partial results of all blocks."""
        return (name in self.partials or name in self.sums.results) and name not in self.sums.operands

    def role(self, operation: Operation) -> str | None:
        """``ROW``, ``PARTIAL``, or None for an operation outside of the region."""
        name = operation.outputs[0].buffer
        return ROW if name in self.rows else PARTIAL if name in self.partials else None


def plan_region(program: Program, target: Target, options: Options) -> RegionPlan | None:
    """The region of a program (of one level, loop bodies apart) that pays, if one does."""
    asked = options.region_pieces
    operations = [item for item in program.operations if isinstance(item, Operation) and _num_elements(item)]
    if asked == 0 or not operations:
        return None
    if asked is None and _num_meetings(operations) < _MIN_MEETINGS:
        return None
    model = RegionCost(program, target, options)
    best_us = model.total_us(None) if asked is None else float("inf")
    best: RegionPlan | None = None
    for label in _labels(program, operations):
        choices = list(_divisors(label, target.num_sms)) if asked is None else _asked(label, asked)
        if not choices:
            continue
        for rows, partials in _classifications(Cuts(program, label), model, choices):
            inside = [each for each in operations if each.outputs[0].buffer in rows | partials]
            if asked is None and _num_meetings(inside) < _MIN_MEETINGS:
                continue
            for pieces in choices if rows else ():
                plan = model.plan(Split.over(label, pieces, target.num_sms), rows, partials)
                cost = model.total_us(plan)
                # One block needs no grid barrier, and a loop's values stay near it: only what is clearly faster counts.
                margin = _ONE_BLOCK_MARGIN if best is not None and best.split.label == 1 < label else 1.0
                if cost < margin * best_us - 1e-9 and model.fits(plan):
                    best_us, best = cost, plan
    return best


def _classifications(
    cuts: Cuts, model: RegionCost, choices: list[int]
) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """What a label cuts; then, one after another, with those products left to the whole grid that are cheaper there."""
    all_rows, partials = classify(cuts, frozenset(), frozenset())
    yield all_rows, partials
    if cuts.label == 1 or not all_rows:
        return
    rows, whole = all_rows, frozenset[str]()
    best_us = model.best_us(cuts.label, choices, rows, partials)
    for operation in model.largest_products():
        name = operation.outputs[0].buffer
        if name not in rows and name not in partials:
            continue
        trial_rows, trial_partials = classify(cuts, whole | {name}, all_rows)
        trial_us = model.best_us(cuts.label, choices, trial_rows, trial_partials)
        if trial_rows and trial_us < best_us:
            rows, partials, whole, best_us = trial_rows, trial_partials, whole | {name}, trial_us
            yield rows, partials


def _num_meetings(operations: list[Operation]) -> int:
    """The operations that others wait for: all but pointwise ones."""
    return sum(kind_of(operation) != "pointwise" for operation in operations)


def _num_elements(operation: Operation) -> int:
    return sum(spec.num_elements for spec in operation.outputs)


def _divisors(label: int, num_sms: int) -> Iterator[int]:
    """Numbers of pieces worth a look, fewest first; one piece of a label is the label 1."""
    if label == 1:
        yield 1
    limit = _MAX_WAVES * num_sms
    for pieces in range(2, min(label, limit) + 1):
        if label % pieces == 0 and 8 * pieces >= min(label, limit):
            yield pieces
    for rows in _SLICE_ROWS:
        if label % rows == 0 and label // rows > limit:
            yield label // rows


def _asked(label: int, pieces: int) -> list[int]:
    return [pieces] if label % pieces == 0 and (label == 1) == (pieces == 1) else []


def _labels(program: Program, operations: list[Operation]) -> list[int]:
    """One, the numbers of rows (examples, or examples times places) that most of the work has, and those of batches.

    They are rows of inputs, or of what is drawn from them (random points, a shuffled mini-batch). A batch is what is
    drawn, or an input that is no state; its rows may cut work that has more of them (images, whose places are rows).
    """
    states = {spec.shape for spec in program.outputs}
    inputs = [spec for spec in program.inputs if isinstance(spec, TensorSpec)]
    sizes = {size for spec in inputs for size in _numbers_of_rows(spec)}
    batches = {spec.shape[0] for spec in inputs if spec.ndim and spec.shape not in states}
    drawn = set[str]()
    for operation in operations:
        if _is_drawn(operation, drawn) and kind_of(operation) == "pointwise":
            drawn |= {spec.buffer for spec in operation.outputs}
            sizes |= set(_numbers_of_rows(operation.outputs[0]))
            batches |= set(operation.outputs[0].shape[:1])
    work: dict[int, int] = {}
    for operation in operations:
        leading = operation.outputs[0].shape[:1]
        if leading and leading[0] > 1:
            flops = _product_flops(operation) if kind_of(operation) == "product" else 0
            if kind_of(operation) == "reduction":
                flops = sum(spec.num_elements for spec in operation.tensor_inputs)
            work[leading[0]] = work.get(leading[0], 0) + flops

    def cut_work(size: int) -> int:
        return sum(flops for rows, flops in work.items() if rows % size == 0)

    ranked = sorted((size for size in work if work[size] and size in sizes), key=lambda size: (-work[size], -size))
    labels = [1, *ranked[:_MAX_LABELS]]
    others = {size for size in batches - set(labels) if size >= _MIN_BATCH and cut_work(size)}
    return labels + sorted(others, key=lambda size: (-cut_work(size), -size))[:_MAX_BATCHES]


def _is_drawn(operation: Operation, drawn: Set[str]) -> bool:
    """Whether an operation draws its results by random numbers or indices, or continues what is ``drawn``."""
    return operation.op in _DRAWING or any(spec.buffer in drawn for spec in operation.tensor_inputs)


def _numbers_of_rows(spec: TensorSpec) -> list[int]:
    """The products of the first dims of an input."""
    return list(accumulate(spec.shape, mul))


# ---------------------------------------------------------------------------- what a label cuts


class Cuts:
    """What each operation of a program reads of its own rows under a label, found once."""

    def __init__(self, program: Program, label: int) -> None:
        self.label = label
        self.operations = [item for item in program.operations if isinstance(item, Operation) and _num_elements(item)]
        self.inputs = {spec.buffer: spec for spec in program.inputs}
        self._declared = {spec.buffer: spec for spec in program.buffers()}
        self._walker = AccessWalker({})
        self._found: dict[tuple[str, str], tuple[frozenset[str], frozenset[str]] | None] = {}

    def reads(self, operation: Operation, role: str) -> tuple[frozenset[str], frozenset[str]] | None:
        """Buffers of which the operation reads its own rows alone, and the others; None if it cannot be cut so."""
        key = operation.outputs[0].buffer, role
        if key not in self._found:
            self._found[key] = self._reads(operation, role)
        return self._found[key]

    def _reads(self, operation: Operation, role: str) -> tuple[frozenset[str], frozenset[str]] | None:
        fits = _computed_in_block(operation, self.label) if role == ROW else _may_be_partial(operation)
        found = accesses(operation, self._walker, self.label, role) if fits else None
        return None if found is None else by_alignment(found, self._declared, self.label)

    def has_row_of_input(self, own: frozenset[str]) -> bool:
        """Whether one of the buffers is an input that has as many rows as the label says."""
        if self.label == 1:
            return True
        inputs = [self.inputs[name] for name in own if name in self.inputs]
        return any(isinstance(spec, TensorSpec) and self.label in _numbers_of_rows(spec) for spec in inputs)


def classify(cuts: Cuts, outside: frozenset[str], all_rows: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The buffers computed row by row under a label, and those that sum over rows.

    The operations that make those ``outside`` are left to the whole grid; ``all_rows`` says which of them
    have rows all the same.
    """
    whole: set[str] = set()
    while True:
        walk = _Classification(cuts, whole | outside, outside & all_rows)
        if not walk.misread:
            return walk.result()
        whole |= walk.misread


class _Classification:
    """One walk: every operation takes the first role whose reads stay in its own rows.

    ``weak`` rows come from no operand with rows of its own (a mask, a function of weights alone);
    one of these or a ``shallow`` one that an operation with rows reads elsewhere than in its own is ``misread``, and
    better whole. ``shallow`` rows are pointwise functions of inputs alone (a moment times its decay): no reason to cut
    what continues a result of the whole grid. ``evaluable`` is what every block can evaluate of inputs alone (a weight
    rounded to 16 bits), ``free`` that of it which is no row; ``drawn`` is what random numbers or indices make of it
    (points, a mini-batch), and the rows that continue it.
    """

    def __init__(self, cuts: Cuts, whole: set[str], outside: frozenset[str]) -> None:
        self._cuts = cuts
        self._inputs = frozenset(cuts.inputs)
        self._outside = outside
        self._rows: set[str] = set()
        self._weak: set[str] = set()
        self._shallow: set[str] = set()
        self._partials: set[str] = set()
        self._evaluable: set[str] = set()
        self._free: set[str] = set()
        self._drawn: set[str] = set()
        self.misread: set[str] = set()
        for operation in cuts.operations:
            if operation.outputs[0].buffer not in whole:
                self._place(operation)
            self._note(operation)

    def _place(self, operation: Operation) -> None:
        operands = {spec.buffer for spec in operation.tensor_inputs}
        read_rows = operands & self._rows
        strangers = operands - self._rows - self._inputs - self._outside - self._free
        vague = self._shallow | (self._weak - self._drawn)
        if (read_rows - vague) or (operands & self._outside) or not strangers:
            reads = self._cuts.reads(operation, ROW)
            if reads is not None:
                own, astray = reads
                misread = astray & self._rows
                if misread and self._are_better_whole(misread, operands, own):
                    self.misread |= misread
                if not misread and (own & self._outside or not strangers or own & self._rows):
                    self._take(operation, read_rows, own)
                    return
        if read_rows or operands & self._outside:
            reads = self._cuts.reads(operation, PARTIAL)
            if reads is not None and reads[0] & (self._rows | self._outside):
                misread = reads[1] & self._rows
                if not misread:
                    self._partials.add(operation.outputs[0].buffer)
                elif misread <= self._weak & self._evaluable and reads[0] - self._weak:
                    self.misread |= misread

    def _are_better_whole(self, misread: Set[str], operands: Set[str], own: frozenset[str]) -> bool:
        """Whether what an operation reads elsewhere than in its own rows should be no rows, for its own to be some."""
        vague = self._weak | self._shallow
        if not misread <= vague:
            return False
        return self._has_rows(operands & self._rows - vague, own) or (
            misread <= self._evaluable and not operands.isdisjoint(self._drawn)
        )

    def _has_rows(self, read: Set[str], own: frozenset[str]) -> bool:
        """Whether what an operation reads by rows is rows of the batch: of an input, or of others that have them."""
        return bool(read) or bool(own & self._outside) or self._cuts.has_row_of_input(own)

    def _note(self, operation: Operation) -> None:
        """What an operation's results are beside rows or partials."""
        operands = {spec.buffer for spec in operation.tensor_inputs}
        outputs = {spec.buffer for spec in operation.outputs}
        if kind_of(operation) == "pointwise" and operands - self._inputs <= self._evaluable:
            self._evaluable |= outputs
            self._free |= outputs - self._rows
        if _is_drawn(operation, self._drawn) and (outputs <= self._evaluable or outputs <= self._rows):
            self._drawn |= outputs

    def _take(self, operation: Operation, read_rows: set[str], own: frozenset[str]) -> None:
        """An operation computed row by row."""
        outputs = {spec.buffer for spec in operation.outputs}
        self._rows |= outputs
        if not self._has_rows(read_rows - self._weak, own):
            self._weak |= outputs
        if kind_of(operation) == "pointwise" and read_rows <= self._shallow and not own & self._outside:
            self._shallow |= outputs

    def result(self) -> tuple[frozenset[str], frozenset[str]]:
        """Rows and partials, without rows that no other needs: weak ones not computed of drawn ones, shallow ones."""
        loose = self._weak - (self._drawn - self._evaluable)
        kept = self._rows - loose - (self._shallow if self._cuts.label > 1 else set())
        for operation in reversed(self._cuts.operations):
            name = operation.outputs[0].buffer
            if name in kept or name in self._partials:
                kept |= {spec.buffer for spec in operation.tensor_inputs} & self._rows
        return frozenset(kept), frozenset(self._partials)


def is_block_product(operation: Operation) -> bool:
    """Whether a product can be computed by rows near a block: in float32, and not empty."""
    a = operation.inputs[-2]
    assert isinstance(a, TensorSpec)
    return domain_of(operation) == "float32" and a.shape[-1] > 0 and scale_of(operation, "alpha") != 0


def _computed_in_block(operation: Operation, label: int) -> bool:
    """Whether an operation can be cut into rows; what cannot runs as a whole in a region of one piece."""
    kind = kind_of(operation)
    return label == 1 or (kind != "scan" and (kind != "product" or is_block_product(operation)))


def _may_be_partial(operation: Operation) -> bool:
    if kind_of(operation) == "product":
        plain = len(operation.tensor_inputs) == 2 and scale_of(operation, "alpha") == 1
        return plain and is_block_product(operation)
    return operation.op in SPLIT_REDUCTIONS


# ---------------------------------------------------------------------------- what it costs


def _product_flops(operation: Operation) -> int:
    a = operation.inputs[-2]
    assert isinstance(a, TensorSpec)
    return 2 * operation.outputs[0].num_elements * a.shape[-1]


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
        if not isinstance(item, Operation) or not _num_elements(item):
            return _ItemCost(None, outputs[0], operands, outputs, "", 0, 0, 0, 0.0, (), {}, {})
        kind = kind_of(item)
        return _ItemCost(
            item,
            outputs[0],
            operands,
            outputs,
            kind,
            _product_flops(item) if kind == "product" else 0,
            _num_elements(item),
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
            self._scratch_bytes(item, plan, evaluated) <= self._target.shared_bytes_per_block
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
        if split.pieces > 1 and slab_bytes > _SLAB_SHARE * self._target.shared_bytes_per_block:
            return float("inf")  # values would go through device memory, part by part
        kept_bytes, streamed_bytes = self._bytes_from_outside(inside, plan)
        room_bytes = _SHARED_SHARE * self._target.shared_bytes_per_block
        scratch_bytes = max((self._scratch_bytes(item, plan, frozenset()) for item in inside if item.tensor), default=0)
        if scratch_bytes:
            room_bytes = self._target.shared_bytes_per_block - scratch_bytes
        far_bytes = max(0.0, slab_bytes + kept_bytes - room_bytes)
        piece_us += far_bytes / _FAR_BYTES_PER_US
        blocks = min(split.partials, self._target.num_sms)
        moved_us = max(
            kept_bytes / _BLOCK_BYTES_PER_US + streamed_bytes / _STREAM_BYTES_PER_US,
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
        room_bytes = self._target.shared_bytes_per_block - scratch_bytes - slab_bytes
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
        if slab_bytes + scratch_bytes > self._target.shared_bytes_per_block:
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
        room = 0.6 * self._target.shared_bytes_per_block
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
    most = min(table.num_elements, _num_elements(operation))
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
