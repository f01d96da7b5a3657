"""Which elements an operand reads: views composed through inlined values, down to memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from trainkernel.indexing import ZERO, Index, delinearize, linearize, variable
from trainkernel.ir import Operation, TensorSpec
from trainkernel.ops import reduced_dims, wrap_dim


@dataclass(frozen=True)
class Access:
    """One element read from a stored buffer (in that buffer's own elements)."""

    buffer: str
    index: Index


def operand_index(operand: TensorSpec, coordinates: Sequence[Index]) -> Index:
    """Buffer index of an operand at its consumer's coordinates, broadcasting size-1 and missing dims."""
    missing = len(coordinates) - operand.ndim
    own = [
        ZERO if size == 1 else coordinate for size, coordinate in zip(operand.shape, coordinates[missing:], strict=True)
    ]
    return linearize(own, operand.strides, operand.offset)


class AccessWalker:
    """Finds the memory accesses of operands, looking through inlined operations.

    Parameters
    ----------
    inlined : mapping of buffer name to the pointwise Operation evaluated in its consumers
    """

    def __init__(self, inlined: Mapping[str, Operation]) -> None:
        self._inlined = inlined
        self._seen: set[tuple[str, Index]] = set()

    def operand(self, operand: object, coordinates: Sequence[Index]) -> Iterator[Access]:
        """Accesses of one operand read at its consumer's coordinates."""
        if isinstance(operand, TensorSpec):
            yield from self.element(operand.buffer, operand_index(operand, coordinates))

    def element(self, buffer: str, index: Index) -> Iterator[Access]:
        """Accesses behind one element of a buffer."""
        if (buffer, index) in self._seen:
            return
        self._seen.add((buffer, index))
        operation = self._inlined.get(buffer)
        if operation is None:
            yield Access(buffer, index)
        else:
            yield from self.pointwise(operation, delinearize(index, operation.outputs[0].shape))

    def pointwise(self, operation: Operation, coordinates: Sequence[Index]) -> Iterator[Access]:
        """Accesses of a pointwise operation evaluated at its output's coordinates."""
        operands = operation.inputs
        if operation.op == "combine_partials":
            partials = operands[0]
            assert isinstance(partials, TensorSpec)
            yield from self.operand(partials, (variable("s", partials.shape[0]), *coordinates))
            operands = operands[1:]
        for operand in operands:
            yield from self.operand(operand, coordinates)


@dataclass(frozen=True)
class ReductionSpace:
    """The two index spaces of a reduction or scan: rows ``r``, and the elements ``k`` of each."""

    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(operation: Operation) -> ReductionSpace:
        source = operation.inputs[0]
        assert isinstance(source, TensorSpec)
        if "dim" in operation.attrs:
            dims: tuple[int, ...] = (wrap_dim(operation.attrs["dim"], source.ndim),)
        else:
            dims = reduced_dims(source.shape, operation.attrs)
        kept = tuple(dim for dim in range(source.ndim) if dim not in dims)
        return ReductionSpace(kept, dims, source.shape)

    def coordinates(self, row: Index, element: Index) -> tuple[Index, ...]:
        """Source coordinates of element ``k`` of row ``r``."""
        result = [ZERO] * len(self.shape)
        for dims, index in ((self.kept, row), (self.reduced, element)):
            for dim, coordinate in zip(dims, delinearize(index, [self.shape[d] for d in dims]), strict=True):
                result[dim] = coordinate
        return tuple(result)


def scatter_coordinates(operation: Operation, result: Index, element: Index) -> tuple[tuple[Index], tuple[Index, ...]]:
    """Where a scatter reads its indices and its updates for element ``k`` of one result, counted row-major."""
    updates = operation.inputs[1]
    assert isinstance(updates, TensorSpec)
    rest = updates.shape[1:]
    return (element,), (element, *delinearize(result % prod(rest), rest))
