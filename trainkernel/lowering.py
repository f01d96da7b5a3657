"""Lowering: products and reductions whose depth is split become two operations.

The depth is split where a cost model finds that it pays, or by the pieces of a block region, one
partial result per piece.

``mm`` with split depth becomes ``product_partials`` (one partial product per chunk of the depth,
stacked in front) and ``combine_partials`` (their sum in order, with alpha, beta and bias). Long
reductions become ``reduce_partials`` and ``combine_partials`` or a second reduction. A
``combine_partials`` is pointwise: it fuses with the optimizer's update like any other.

The internal operations are refused by ``validate``: they exist between this pass and the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainkernel.alignment import ROW
from trainkernel.arithmetic import domain_of, kind_of, scale_of
from trainkernel.ir import Item, Operation, Program, TensorSpec
from trainkernel.options import Options
from trainkernel.products import plan_product
from trainkernel.reduction_plans import SCATTERS, SPLIT_REDUCTIONS, ReductionPlan, plan_reduction, reduced_count
from trainkernel.region_plans import RegionPlan, Split, is_block_product
from trainkernel.target import Target

COMBINE_IN_ORDER = 32


def lower(program: Program, target: Target, options: Options, region: RegionPlan | None) -> Program:
    """Replace operations whose work is split along the depth by their two phases; loop bodies stay as they are.

    A product or reduction inside of the region gets the attribute ``pieces``: of its rows, or partial results, each
    of which is the sum of ``slices``.
    """
    taken = {spec.buffer for spec in program.buffers()}
    added: dict[str, TensorSpec] = {}
    items: list[Item] = []
    for item in program.operations:
        role = region.role(item) if region is not None and isinstance(item, Operation) else None
        name = item.outputs[0].buffer
        if region is not None and (role is not None or name in region.sums.results):
            lowered = _lower_inside(item, region.split, role, taken, added)
            if name in region.sums.operands:
                added[name] = lowered[0].outputs[0]
                del lowered[1:]  # the addition takes the partial results
            items += lowered
        elif isinstance(item, Operation) and item.op in ("mm", "addmm", "bmm"):
            items += _lower_product(item, target, options, taken)
        elif isinstance(item, Operation) and item.op == "scatter_add":
            items += _lower_scatter(item, target, options, taken)
        elif isinstance(item, Operation) and item.op in SPLIT_REDUCTIONS:
            items += _lower_reduction(item, plan_reduction(item, target, options), taken)
        else:
            items.append(item)
    return replace(program, operations=tuple(items))


def _lower_inside(
    item: Item, split: Split, role: str | None, taken: set[str], added: Mapping[str, TensorSpec]
) -> list[Item]:
    """An operation of a block region; without a role, an addition of partial results, ``added`` by what they sum to."""
    assert isinstance(item, Operation)
    if role is None:
        partials = _partials_spec(item, split.pieces, taken)
        views = (_stacked(operand, added[operand.buffer]) for operand in item.tensor_inputs)
        first = Operation(item.name, "add", tuple(views), partials, {"pieces": split.pieces}, item.location)
        return [first, _summed(item, "sum", partials, 1)]
    if role == ROW:
        cut = kind_of(item) == "reduction" and item.op not in SCATTERS and item.tensor_inputs[0].num_elements
        cut = cut or (kind_of(item) == "product" and is_block_product(item))
        return [replace(item, attrs={**item.attrs, "pieces": split.pieces})] if cut else [item]
    attrs = {"pieces": split.partials} | ({"slices": split.slices} if split.slices > 1 else {})
    if kind_of(item) == "product":
        partials = _partials_spec(item, split.partials, taken)
        first = Operation(item.name, "product_partials", item.inputs[-2:], partials, attrs, item.location)
        return [first, _summed(item, "sum", partials, 1)]
    return _two_phases(item, split.partials, attrs, reduced_count(item), taken)


def _stacked(view: TensorSpec, partials: TensorSpec) -> TensorSpec:
    """The same view of each partial result."""
    strides = (partials.strides[0], *view.strides)
    return replace(partials, shape=(partials.shape[0], *view.shape), strides=strides, offset=view.offset)


def _partials_spec(operation: Operation, count: int, taken: set[str]) -> TensorSpec:
    """Partial results of an operation, stored as the dtype of the domain in which it computes."""
    out = operation.outputs[0]
    buffer = f"{out.buffer}_partials"
    while buffer in taken:
        buffer += "_"
    taken.add(buffer)
    return TensorSpec.dense(buffer, (count, *out.shape), domain_of(operation))


def _lower_product(operation: Operation, target: Target, options: Options, taken: set[str]) -> list[Item]:
    plan = plan_product(operation, target, options)
    if plan.split == 1 or scale_of(operation, "alpha") == 0:
        return [operation]
    *bias, a, b = operation.inputs
    out = operation.outputs[0]
    partials = _partials_spec(operation, plan.split, taken)
    first = Operation(operation.name, "product_partials", (a, b), partials, {"chunk": plan.chunk}, operation.location)
    attrs = {"reduce": "sum", **operation.attrs}
    if scale_of(operation, "beta") == 0:
        bias = []
    second = Operation(operation.name, "combine_partials", (partials, *bias), out, attrs, operation.location)
    return [first, second]


def _lower_scatter(operation: Operation, target: Target, options: Options, taken: set[str]) -> list[Item]:
    plan = plan_reduction(operation, target, options)
    if plan.partials == 1:
        return [operation]
    out = operation.outputs[0]
    partials = _partials_spec(operation, plan.partials, taken)
    attrs = {**operation.attrs, "chunk": plan.chunk}
    first = Operation(operation.name, "scatter_partials", operation.inputs, partials, attrs, operation.location)
    return [
        first,
        Operation(operation.name, "combine_partials", (partials,), out, {"reduce": "sum"}, operation.location),
    ]


def _lower_reduction(operation: Operation, plan: ReductionPlan, taken: set[str]) -> list[Item]:
    if plan.partials == 1:
        return [operation]
    return _two_phases(operation, plan.partials, {"chunk": plan.chunk}, plan.count, taken)


def _two_phases(operation: Operation, partials: int, attrs: dict[str, Any], count: int, taken: set[str]) -> list[Item]:
    """A reduction of ``count`` elements by its partial results and theirs."""
    kind = "sum" if operation.op == "mean" else operation.op
    spec = _partials_spec(operation, partials, taken)
    attrs = {"reduce": kind, **attrs, "dims": operation.attrs.get("dims")}
    first = Operation(operation.name, "reduce_partials", operation.inputs, spec, attrs, operation.location)
    return [first, _summed(operation, kind, spec, count if operation.op == "mean" else 1)]


def _summed(operation: Operation, kind: str, partials: TensorSpec, divisor: int) -> Operation:
    """The operation that reduces partial results to an operation's output."""
    out = operation.outputs[0]
    if partials.shape[0] <= COMBINE_IN_ORDER:
        combine = {"reduce": kind, "divisor": divisor}
        return Operation(operation.name, "combine_partials", (partials,), out, combine, operation.location)
    final = {"dims": (0,)} if divisor == 1 else {"dims": (0,), "divisor": divisor}
    return Operation(operation.name, kind, (partials,), out, final, operation.location)
