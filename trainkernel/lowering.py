"""Lowering: products and reductions whose depth is split become two operations.

``mm`` with split depth becomes ``product_partials`` (one partial product per chunk of the depth,
stacked in front) and ``combine_partials`` (their sum in order, with alpha, beta and bias). Long
reductions become ``reduce_partials`` and ``combine_partials`` or a second reduction. A
``combine_partials`` is pointwise: it fuses with the optimizer's update like any other.

The internal operations are refused by ``validate``: they exist between this pass and the source.
"""

from __future__ import annotations

from dataclasses import replace

from trainkernel.arithmetic import domain_of, scale_of
from trainkernel.ir import Item, Operation, Program, TensorSpec
from trainkernel.options import Options
from trainkernel.passes import map_bodies
from trainkernel.products import plan_product, plan_reduction
from trainkernel.target import Target

INTERNAL_KINDS = {
    "product_partials": "product",
    "reduce_partials": "reduction",
    "scatter_partials": "reduction",
    "combine_partials": "pointwise",
}
COMBINE_IN_ORDER = 32


def lower(program: Program, target: Target, options: Options) -> Program:
    """Replace operations whose work is split along the depth by their two phases."""
    taken = {spec.buffer for spec in program.buffers()}
    items: list[Item] = []
    for item in program.operations:
        if isinstance(item, Operation) and item.op in ("mm", "addmm", "bmm"):
            items += _lower_product(item, target, options, taken)
        elif isinstance(item, Operation) and item.op == "scatter_add":
            items += _lower_scatter(item, target, options, taken)
        elif isinstance(item, Operation) and item.op in ("sum", "mean", "max", "min", "prod"):
            items += _lower_reduction(item, target, options, taken)
        else:
            items.append(item)
    lowered = replace(program, operations=tuple(items))
    return map_bodies(lowered, lambda body: lower(body, target, options))


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


def _lower_reduction(operation: Operation, target: Target, options: Options, taken: set[str]) -> list[Item]:
    plan = plan_reduction(operation, target, options)
    if plan.partials == 1:
        return [operation]
    out = operation.outputs[0]
    kind = "sum" if operation.op == "mean" else operation.op
    partials = _partials_spec(operation, plan.partials, taken)
    attrs = {"reduce": kind, "chunk": plan.chunk, "dims": operation.attrs.get("dims")}
    first = Operation(operation.name, "reduce_partials", operation.inputs, partials, attrs, operation.location)
    divisor = plan.count if operation.op == "mean" else 1
    if plan.partials <= COMBINE_IN_ORDER:
        combine = {"reduce": kind, "divisor": divisor}
        return [first, Operation(operation.name, "combine_partials", (partials,), out, combine, operation.location)]
    final = {"dims": (0,)} if divisor == 1 else {"dims": (0,), "divisor": divisor}
    return [first, Operation(operation.name, kind, (partials,), out, final, operation.location)]
