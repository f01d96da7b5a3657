"""Which accesses stay within the rows that a block owns.

A *label* is a number of rows (of a batch, of an ensemble) by which values are cut: row ``q`` of a
buffer of N elements is its elements ``q * N / label`` up to the next row's. A task may be cut in two
ways: ``ROW``, by its own elements, or ``PARTIAL``, by the elements that it sums over. What it then
reads of a buffer is *aligned* if row ``q`` of the task reads row ``q`` of the buffer alone, whatever
the buffer's dims: so a block that computes some rows of both needs nobody else's results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from trainkernel.access import Access, AccessWalker, ReductionSpace, scatter_coordinates
from trainkernel.arithmetic import kind_of, scale_of
from trainkernel.indexing import Index, delinearize, variable
from trainkernel.ir import Operation, TensorSpec
from trainkernel.reduction_plans import SCATTERS

ROW = "row"
PARTIAL = "partial"
_ROW_VARIABLE = "q"


def cut(name: str, size: int, label: int) -> Index | None:
    """The index ``q * own + name`` with ``own = size / label``; None if the label does not divide the size."""
    if size % label or not size:
        return None
    own = size // label
    return variable(_ROW_VARIABLE, label) * own + variable(name, own)


def is_aligned(access: Access, num_elements: int, label: int) -> bool:
    """Whether row ``q`` of a task reads row ``q`` of a buffer of ``num_elements`` by this access."""
    if label == 1:
        return True
    if num_elements % label or not num_elements:
        return False
    return access.index // (num_elements // label) == variable(_ROW_VARIABLE, label)


def by_alignment(
    found: Iterable[Access], declared: Mapping[str, TensorSpec], label: int
) -> tuple[frozenset[str], frozenset[str]]:
    """The buffers of which accesses touch their own rows alone, and the others.

    An input that is a view with gaps has no rows.
    """
    buffers, astray = set(), set()
    for access in found:
        spec = declared[access.buffer]
        buffers.add(access.buffer)
        if not is_aligned(access, spec.num_elements if spec.is_dense and not spec.offset else 0, label):
            astray.add(access.buffer)
    return frozenset(buffers - astray), frozenset(astray)


def accesses(operation: Operation, walker: AccessWalker, label: int = 1, role: str = ROW) -> list[Access] | None:
    """What an operation reads, over the coordinates of its task cut by a label; None if it cannot be cut so.

    The variables are ``i`` (pointwise), ``r`` and ``k`` (reductions, scans, scatters), or ``batch``,
    ``m``, ``n`` and ``k`` (products), and ``q`` where there is a label.
    """
    kind = kind_of(operation)
    if kind == "pointwise":
        return _pointwise(operation, walker, label, role)
    if operation.op in SCATTERS:
        return _scatter(operation, walker) if label == 1 else None
    if kind == "product":
        return _product(operation, walker, label, role)
    return _reduction(operation, walker, label, role)


def _cuts(sizes: Iterable[tuple[str, int]], label: int, which: str) -> dict[str, Index] | None:
    """The variables of some sizes, one of them cut by the label."""
    found: dict[str, Index] = {}
    for name, size in sizes:
        index = cut(name, size, label) if name == which else variable(name, size)
        if index is None:
            return None
        found[name] = index
    return found


def _pointwise(operation: Operation, walker: AccessWalker, label: int, role: str) -> list[Access] | None:
    out = operation.outputs[0]
    element = cut("i", out.num_elements, label)
    if element is None or role != ROW:
        return None
    return list(walker.pointwise(operation, delinearize(element, out.shape)))


def _reduction(operation: Operation, walker: AccessWalker, label: int, role: str) -> list[Access] | None:
    space = ReductionSpace.of(operation)
    source = operation.inputs[0]
    assert isinstance(source, TensorSpec)
    if not source.num_elements:
        return [] if label == 1 else None
    rows = prod(source.shape[dim] for dim in space.kept)
    count = prod(source.shape[dim] for dim in space.reduced)
    places = _cuts((("r", rows), ("k", count)), label, "r" if role == ROW else "k")
    if places is None:
        return None
    return list(walker.operand(source, space.coordinates(places["r"], places["k"])))


def _scatter(operation: Operation, walker: AccessWalker) -> list[Access]:
    indices, updates = operation.tensor_inputs
    found: list[Access] = []
    if updates.num_elements:
        result = variable("r", operation.outputs[0].num_elements)
        places = scatter_coordinates(operation, result, variable("k", updates.shape[0]))
        for operand, coordinates in zip((indices, updates), places, strict=True):
            found += walker.operand(operand, coordinates)
    return found


def _product(operation: Operation, walker: AccessWalker, label: int, role: str) -> list[Access] | None:
    *bias, a, b = operation.inputs
    assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
    batched = a.ndim == 3
    which = "k" if role == PARTIAL else "batch" if batched else "m"
    sizes = [("m", a.shape[-2]), ("n", b.shape[-1]), ("k", a.shape[-1])]
    places = _cuts([("batch", a.shape[0]), *sizes] if batched else sizes, label, which)
    if places is None:
        return None
    batch = (places["batch"],) if batched else ()
    m, n, k = places["m"], places["n"], places["k"]
    found: list[Access] = []
    if a.shape[-1] and scale_of(operation, "alpha") != 0:
        found += walker.operand(a, (*batch, m, k))
        found += walker.operand(b, (*batch, k, n))
    if scale_of(operation, "beta") != 0:
        for spec in bias:
            found += walker.operand(spec, (*batch, m, n))
    return found
