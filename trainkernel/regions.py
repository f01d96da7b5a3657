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

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from trainkernel.access import AccessWalker
from trainkernel.alignment import PARTIAL, ROW, accesses, is_aligned
from trainkernel.arithmetic import domain_of, kind_of, scale_of
from trainkernel.ir import Loop, Operation, Program, TensorSpec
from trainkernel.ops import OPS
from trainkernel.options import Options
from trainkernel.products import plan_product, product_cost_us
from trainkernel.target import Target

_MIN_PRODUCTS = 2
_MAX_LABELS = 3
_PARTIAL_REDUCTIONS = ("sum", "mean", "max", "min", "prod")
# Time of a part of a piece, microseconds, with 256 threads on one SM; measured on an H200.
_PART_US = 0.2
_BLOCK_FLOPS_PER_US = 1.5e5
_BLOCK_EVALUATIONS_PER_US = 2.5e4
_BLOCK_BYTES_PER_US = 4.0e4
_REGION_US = 0.8
_GRID_PART_US = 1.3
_PARTIAL_BYTES_PER_US = 3.0e6


@dataclass(frozen=True)
class Split:
    """A label, and the number of pieces (a divisor of it) into which its rows are cut."""

    label: int
    pieces: int

    @property
    def rows(self) -> int:
        """Rows of one piece."""
        return self.label // self.pieces

    def __str__(self) -> str:
        return f"{self.pieces} pieces of {self.rows} rows"


@dataclass(frozen=True)
class RegionPlan:
    """A split, the buffers computed row by row, and those that sum over rows."""

    split: Split
    rows: frozenset[str]
    partials: frozenset[str]

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
    if asked is None and sum(kind_of(operation) == "product" for operation in operations) < _MIN_PRODUCTS:
        return None
    nothing = RegionPlan(Split(1, 1), frozenset(), frozenset())
    best_us = _path_us(program, nothing, target, options) if asked is None else float("inf")
    best: RegionPlan | None = None
    for label in _labels(program, operations):
        choices = list(_divisors(label, target.num_sms)) if asked is None else _asked(label, asked)
        rows, partials = classify(program, label)
        for pieces in choices if rows else ():
            plan = RegionPlan(Split(label, pieces), rows, partials)
            cost = _region_us(program, plan, target) + _path_us(program, plan, target, options)
            if cost < best_us - 1e-9:
                best_us, best = cost, plan
    return best


def _num_elements(operation: Operation) -> int:
    return sum(spec.num_elements for spec in operation.outputs)


def _divisors(label: int, limit: int) -> Iterator[int]:
    """Numbers of pieces worth a look, fewest first; one piece of a label is the label 1."""
    if label == 1:
        yield 1
    for pieces in range(2, min(label, limit) + 1):
        if label % pieces == 0 and 8 * pieces >= min(label, limit):
            yield pieces


def _asked(label: int, pieces: int) -> list[int]:
    return [pieces] if label % pieces == 0 and (label == 1) == (pieces == 1) else []


def _labels(program: Program, operations: list[Operation]) -> list[int]:
    """One, and the leading sizes of inputs that most of the products' work has."""
    sizes = {spec.shape[0] for spec in program.inputs if isinstance(spec, TensorSpec) and spec.ndim and spec.shape[0] > 1}
    work: dict[int, int] = {}
    for operation in operations:
        if kind_of(operation) == "product":
            leading = operation.outputs[0].shape[0]
            if leading in sizes:
                work[leading] = work.get(leading, 0) + _product_flops(operation)
    ranked = sorted(work, key=lambda size: (-work[size], -size))
    return [1, *ranked[:_MAX_LABELS]]


# ---------------------------------------------------------------------------- what a label cuts


def classify(program: Program, label: int) -> tuple[frozenset[str], frozenset[str]]:
    """The buffers computed row by row under a label, and those that sum over rows."""
    declared = {spec.buffer: spec for spec in program.buffers()}
    whole: set[str] = set()
    while True:
        walk = _Classification(program, declared, label, whole)
        if not walk.misread:
            return walk.result()
        whole |= walk.misread


class _Classification:
    """One walk: every operation takes the first role whose reads stay in its own rows.

    ``weak`` rows come from no operand with rows of its own (a mask, a function of weights alone);
    one that an operation with rows reads elsewhere than in its own is ``misread``, and better whole.
    """

    def __init__(self, program: Program, declared: dict[str, TensorSpec], label: int, whole: set[str]) -> None:
        self._declared = declared
        self._label = label
        self._walker = AccessWalker({})
        self._inputs = {spec.buffer: spec for spec in program.inputs}
        self._whole = whole
        self._operations = [item for item in program.operations if isinstance(item, Operation)]
        self._rows: set[str] = set()
        self._weak: set[str] = set()
        self._partials: set[str] = set()
        self.misread: set[str] = set()
        for operation in self._operations:
            if _num_elements(operation) and operation.outputs[0].buffer not in whole:
                self._place(operation)

    def _place(self, operation: Operation) -> None:
        operands = {spec.buffer for spec in operation.tensor_inputs}
        read_rows = operands & self._rows
        outside = operands - self._rows - set(self._inputs)
        if read_rows or not outside:
            astray = self._astray(operation, ROW)
            if astray is not None and astray <= self._weak and read_rows - self._weak:
                self.misread |= astray
            if astray is not None and not astray and _computed_in_block(operation, self._label):
                self._rows |= {spec.buffer for spec in operation.outputs}
                if not (read_rows - self._weak) and not self._reads_row_of_input(operation):
                    self._weak |= {spec.buffer for spec in operation.outputs}
                return
        if read_rows and _may_be_partial(operation):
            astray = self._astray(operation, PARTIAL)
            if astray is not None and not astray:
                self._partials.add(operation.outputs[0].buffer)

    def _astray(self, operation: Operation, role: str) -> set[str] | None:
        """Buffers with rows that the operation reads elsewhere than in its own; None if it cannot be cut so."""
        found = accesses(operation, self._walker, self._label, role)
        if found is None:
            return None
        return {
            access.buffer
            for access in found
            if access.buffer in self._rows
            and not is_aligned(access, self._declared[access.buffer].num_elements, self._label)
        }

    def _reads_row_of_input(self, operation: Operation) -> bool:
        if self._label == 1:
            return True
        found = accesses(operation, self._walker, self._label, ROW) or []
        for access in found:
            spec = self._inputs.get(access.buffer)
            if isinstance(spec, TensorSpec) and spec.ndim and spec.shape[0] == self._label and spec.is_dense:
                if is_aligned(access, spec.num_elements, self._label):
                    return True
        return False

    def result(self) -> tuple[frozenset[str], frozenset[str]]:
        """Rows, without weak ones that no row needs, and partials."""
        kept = self._rows - self._weak
        for operation in reversed(self._operations):
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
        return plain and is_block_product(operation) and operation.outputs[0].dtype == "float32"
    return operation.op in _PARTIAL_REDUCTIONS


# ---------------------------------------------------------------------------- what it costs


def _product_flops(operation: Operation) -> int:
    a = operation.inputs[-2]
    assert isinstance(a, TensorSpec)
    return 2 * operation.outputs[0].num_elements * a.shape[-1]


def _region_us(program: Program, plan: RegionPlan, target: Target) -> float:
    """Time of one wave of pieces after another, and of the partial results that they leave."""
    split = plan.split
    piece_us, partial_bytes, fresh = _REGION_US, 0, set()
    for item in program.operations:
        if isinstance(item, Loop) or plan.role(item) is None:
            continue
        partial = item.outputs[0].buffer in plan.partials
        if partial:
            partial_bytes += 4 * split.pieces * item.outputs[0].num_elements
        piece_us += _part_us(item, split.pieces, partial)
        fresh |= {spec.buffer for spec in item.tensor_inputs} - plan.rows
    declared = {spec.buffer: spec for spec in program.buffers()}
    for buffer in fresh:
        spec = declared[buffer]
        own = spec.ndim and spec.shape[0] == split.label
        piece_us += 4 * spec.num_elements / (split.pieces if own else 1) / _BLOCK_BYTES_PER_US / 2
    waves = -(-split.pieces // target.num_sms)
    return waves * piece_us + 2 * partial_bytes / _PARTIAL_BYTES_PER_US


def _part_us(operation: Operation, pieces: int, partial: bool) -> float:
    kind, elements = kind_of(operation), _num_elements(operation)
    if kind == "product":
        stored = elements if partial else elements / pieces
        return _PART_US + _product_flops(operation) / pieces / _BLOCK_FLOPS_PER_US + 4 * stored / _BLOCK_BYTES_PER_US
    if kind in ("reduction", "scan"):
        read = sum(spec.num_elements for spec in operation.tensor_inputs)
        return _PART_US + read / pieces / _BLOCK_EVALUATIONS_PER_US
    return elements / pieces * (OPS[operation.op].cost + 1) / 4 / _BLOCK_EVALUATIONS_PER_US


def _path_us(program: Program, plan: RegionPlan, target: Target, options: Options) -> float:
    """Time of the longest path through the operations outside of the region, each a stage of the grid."""
    finished: dict[str, float] = {}
    for item in program.operations:
        start = max((finished.get(spec.buffer, 0.0) for spec in item.tensor_inputs), default=0.0)
        own_us = 0.0
        if isinstance(item, Operation) and plan.role(item) is None:
            own_us = _stage_us(item, target, options)
        elif isinstance(item, Operation) and item.outputs[0].buffer in plan.partials and plan.split.pieces > 1:
            own_us = target.grid_barrier_us + _GRID_PART_US
        for spec in item.outputs:
            finished[spec.buffer] = start + own_us
    return max(finished.values(), default=0.0)


def _stage_us(operation: Operation, target: Target, options: Options) -> float:
    """Time of an operation on the whole grid, the barrier after it included; pointwise ones are fused."""
    kind = kind_of(operation)
    if kind == "pointwise":
        evaluations = prod(operation.outputs[0].shape) * (OPS[operation.op].cost + 1)
        return evaluations / 4 / _BLOCK_EVALUATIONS_PER_US / target.num_sms
    if kind == "product":
        return target.grid_barrier_us + product_cost_us(plan_product(operation, target, options), target)
    return target.grid_barrier_us + _GRID_PART_US
