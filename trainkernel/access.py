"""Which elements an operand reads: views composed through inlined values, down to memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TypeAlias

from trainkernel.indexing import ZERO, Index, delinearize, linearize, variable
from trainkernel.ir import Operand, Operation, TensorSpec
from trainkernel.ops import OPS, reduced_dims, wrap_dim

Read: TypeAlias = "tuple[Operand, Sequence[Index]]"


@dataclass(frozen=True)
class Access:
    """One element read from a stored buffer (in that buffer's own elements)."""

    buffer: str
    index: Index


def operand_index(operand: TensorSpec, coordinates: Sequence[Index]) -> Index:
    """Buffer index of an operand at its consumer's coordinates, broadcasting size-1 and missing dims."""
    missing = len(coordinates) - operand.ndim
    own = tuple(
        ZERO if size == 1 else coordinate for size, coordinate in zip(operand.shape, coordinates[missing:], strict=True)
    )
    return linearize(own, operand.strides, operand.offset)


class AccessWalker:
    """Finds the memory accesses of operands, looking through inlined operations.

    What it found behind an element it knows from then on, so more may be inlined later, but
    nothing that it has looked at.

    Parameters
    ----------
    inlined : mapping of buffer name to the pointwise Operation evaluated in its consumers
    """

    def __init__(self, inlined: Mapping[str, Operation]) -> None:
        self._inlined = inlined
        self._known: dict[tuple[str, Index], tuple[Access, ...]] = {}

    def operand(self, operand: object, coordinates: Sequence[Index]) -> tuple[Access, ...]:
        """Accesses of one operand read at its consumer's coordinates, each once."""
        if not isinstance(operand, TensorSpec):
            return ()
        return self.element(operand.buffer, operand_index(operand, coordinates))

    def element(self, buffer: str, index: Index) -> tuple[Access, ...]:
        """Accesses behind one element of a buffer, each once."""
        found = self._known.get((buffer, index))
        if found is None:
            operation = self._inlined.get(buffer)
            if operation is None:
                found = (Access(buffer, index),)
            else:
                found = self.pointwise(operation, delinearize(index, operation.outputs[0].shape))
            self._known[buffer, index] = found
        return found

    def pointwise(self, operation: Operation, coordinates: Sequence[Index]) -> tuple[Access, ...]:
        """Accesses of a pointwise operation evaluated at its output's coordinates, each once."""
        parts = [self.operand(operand, places) for operand, places in pointwise_reads(operation, coordinates)]
        return parts[0] if len(parts) == 1 else tuple(dict.fromkeys(chain.from_iterable(parts)))


def pointwise_reads(operation: Operation, coordinates: Sequence[Index]) -> Iterator[Read]:
    """Operands of a pointwise operation and where it reads them, at its output's coordinates."""
    operands = operation.inputs
    if operation.op in OPS and OPS[operation.op].indexed:
        yield from indexed_reads(operation, coordinates)
        return
    if operation.op == "combine_partials":
        partials = operands[0]
        assert isinstance(partials, TensorSpec)
        yield partials, (variable("s", partials.shape[0]), *coordinates)
        operands = operands[1:]
    for operand in operands:
        yield operand, coordinates


# ---------------------------------------------------------------------------- indexed operations

PICKS = ("take", "dynamic_slice")
"""Operations that read at most as many elements of their first operand as they have results."""


def _moved(coordinate: Index, size: int) -> Index:
    """A coordinate somewhere along a dim of ``size``, in step with another one.

    The variable has the range of the dim, so that no quotient or remainder makes it vanish that
    would not make the true coordinate vanish.
    """
    return ZERO if size <= 1 else (coordinate + variable("?", size)) % size


def clamped_start(start: Operand, room: int) -> int | None:
    """The first of ``room`` places at which a window begins, where the program alone tells it."""
    if room == 1:
        return 0
    return None if isinstance(start, TensorSpec) else min(max(int(start), 0), room - 1)


def concatenated_parts(operation: Operation) -> tuple[int, list[tuple[int, int, int]]]:
    """The dim, and (position, first coordinate, size) of each operand that is not empty."""
    dim = wrap_dim(operation.attrs["dim"], operation.outputs[0].ndim)
    parts, first = [], 0
    for position, operand in enumerate(operation.tensor_inputs):
        size = operand.shape[dim]
        if size:
            parts.append((position, first, size))
        first += size
    return dim, parts


def _flip_reads(operation: Operation, at: Sequence[Index]) -> Iterator[Read]:
    shape = operation.outputs[0].shape
    dims = {wrap_dim(dim, len(shape)) for dim in operation.attrs["dims"]}
    yield operation.inputs[0], [_moved(c, shape[d]) if d in dims else c for d, c in enumerate(at)]


def _pad_reads(operation: Operation, at: Sequence[Index]) -> Iterator[Read]:
    x, value = operation.inputs
    assert isinstance(x, TensorSpec)
    attrs = operation.attrs
    moves = [any(attrs[key][dim] for key in ("low", "high", "interior")) for dim in range(x.ndim)]
    yield x, [_moved(c, x.shape[d]) if moves[d] else c for d, c in enumerate(at)]
    yield value, ()


def _concatenate_reads(operation: Operation, at: Sequence[Index]) -> Iterator[Read]:
    dim, parts = concatenated_parts(operation)
    for position, _, size in parts:
        place = at[dim] if len(parts) == 1 else _moved(at[dim], size)
        yield operation.inputs[position], (*at[:dim], place, *at[dim + 1 :])


def _take_reads(operation: Operation, at: Sequence[Index]) -> Iterator[Read]:
    x, indices = operation.tensor_inputs
    yield indices, at[: indices.ndim]
    yield x, (variable("?", x.shape[0]), *at[indices.ndim :])


def _window_reads(starts: Sequence[Operand], x: TensorSpec, window: Sequence[int]) -> Iterator[Read]:
    for start, whole, size in zip(starts, x.shape, window, strict=True):
        if clamped_start(start, whole - size + 1) is None:
            yield start, ()


def _dynamic_slice_reads(operation: Operation, at: Sequence[Index]) -> Iterator[Read]:
    x = operation.tensor_inputs[0]
    yield from _window_reads(operation.inputs[1:], x, operation.attrs["sizes"])
    moves = [whole != size for whole, size in zip(x.shape, operation.attrs["sizes"], strict=True)]
    yield x, [_moved(c, x.shape[d]) if moves[d] else c for d, c in enumerate(at)]


def _dynamic_update_reads(operation: Operation, at: Sequence[Index]) -> Iterator[Read]:
    x, update = operation.tensor_inputs[:2]
    yield from _window_reads(operation.inputs[2:], x, update.shape)
    yield x, at
    moves = [whole != size for whole, size in zip(x.shape, update.shape, strict=True)]
    yield update, [_moved(c, update.shape[d]) if moves[d] else c for d, c in enumerate(at)]


def _random_reads(operation: Operation, at: Sequence[Index]) -> Iterator[Read]:
    lead = at[: len(at) - len(operation.attrs["shape"])]
    yield operation.inputs[0], (*lead, variable("?", 2))
    for counter in operation.inputs[1:]:
        yield counter, lead


_READS: Mapping[str, Callable[[Operation, Sequence[Index]], Iterator[Read]]] = {
    "iota": lambda operation, at: iter(()),
    "flip": _flip_reads,
    "pad": _pad_reads,
    "concatenate": _concatenate_reads,
    "take": _take_reads,
    "dynamic_slice": _dynamic_slice_reads,
    "dynamic_update": _dynamic_update_reads,
    "random_bits": _random_reads,
}


def indexed_reads(operation: Operation, coordinates: Sequence[Index]) -> Iterator[Read]:
    """Operands of an indexed operation and where it reads them, at its output's coordinates.

    A coordinate that the operation moves holds a variable that is no coordinate of anything else,
    so such a read is never taken for one at the same element.
    """
    for operand, places in _READS[operation.op](operation, coordinates):
        if not isinstance(operand, TensorSpec) or operand.num_elements:
            yield operand, places


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
            for dim, coordinate in zip(dims, delinearize(index, tuple(self.shape[d] for d in dims)), strict=True):
                result[dim] = coordinate
        return tuple(result)


def scatter_coordinates(operation: Operation, result: Index, element: Index) -> tuple[tuple[Index], tuple[Index, ...]]:
    """Where a scatter reads its indices and its updates for element ``k`` of one result, counted row-major."""
    updates = operation.inputs[1]
    assert isinstance(updates, TensorSpec)
    rest = updates.shape[1:]
    return (element,), (element, *delinearize(result % prod(rest), rest))


def cast_source(operand: TensorSpec, inlined: Mapping[str, Operation]) -> TensorSpec:
    """What an operand's elements are cast from where it is a view of an inlined cast; else the operand."""
    operation = inlined.get(operand.buffer)
    if operation is None or operation.op != "cast":
        return operand
    source, out = operation.inputs[0], operation.outputs[0]
    if not isinstance(source, TensorSpec) or source.shape != out.shape or source.buffer in inlined:
        return operand
    strides = _view_strides(operand, out, source)
    if strides is None:
        return operand
    return TensorSpec(source.buffer, operand.shape, *strides, source.dtype)


def _view_strides(view: TensorSpec, whole: TensorSpec, source: TensorSpec) -> tuple[tuple[int, ...], int] | None:
    """Strides and offset over ``source`` of a view of ``whole``, its element-by-element copy: a permutation of dims."""
    sizes = dict(zip(whole.strides, whole.shape, strict=True))
    if view.offset != 0 or len(sizes) != whole.ndim or sorted(view.strides) != sorted(sizes):
        return None
    if any(sizes[stride] != size for stride, size in zip(view.strides, view.shape, strict=True)):
        return None
    by_stride = dict(zip(whole.strides, source.strides, strict=True))
    return tuple(by_stride[stride] for stride in view.strides), source.offset
