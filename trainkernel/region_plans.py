"""What a block region is: rows of a label cut into pieces, sums over them, and sums of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from trainkernel.alignment import PARTIAL, ROW
from trainkernel.arithmetic import domain_of, kind_of, scale_of
from trainkernel.ir import Operand, Operation, Program, TensorSpec


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


def num_elements(operation: Operation) -> int:
    """Results of an operation."""
    return sum(spec.num_elements for spec in operation.outputs)


def product_flops(operation: Operation) -> int:
    """Floating-point operations of a product."""
    a = operation.inputs[-2]
    assert isinstance(a, TensorSpec)
    return 2 * operation.outputs[0].num_elements * a.shape[-1]


def is_block_product(operation: Operation) -> bool:
    """Whether a product can be computed by rows near a block: in float32, and not empty."""
    a = operation.inputs[-2]
    assert isinstance(a, TensorSpec)
    return domain_of(operation) == "float32" and a.shape[-1] > 0 and scale_of(operation, "alpha") != 0
