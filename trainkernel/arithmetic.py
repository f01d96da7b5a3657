"""The kind of an operation of a lowered program, and the domain in which it computes, internal operations included."""

from __future__ import annotations

import numpy as np

from trainkernel.ir import Operation, TensorSpec
from trainkernel.ops import OPS
from trainkernel.ops.domains import constant, domain_of_dtype, domain_of_operand, operation_domain

INTERNAL_KINDS = {
    "product_partials": "product",
    "reduce_partials": "reduction",
    "scatter_partials": "reduction",
    "combine_partials": "pointwise",
}
_PARTIALS = ("product_partials", "reduce_partials", "scatter_partials")


def kind_of(operation: Operation) -> str:
    """``"pointwise"``, ``"reduction"``, ``"product"`` or ``"scan"``, internal operations included."""
    internal = INTERNAL_KINDS.get(operation.op)
    return internal if internal is not None else OPS[operation.op].kind


def domain_of(operation: Operation) -> str:
    """The domain in which an operation computes.

    Partial results are stored as their domain's own dtype, so that of an operation that makes or
    combines them is read off them.
    """
    if operation.op in _PARTIALS:
        return domain_of_dtype(operation.outputs[0].dtype)
    if operation.op == "combine_partials":
        return domain_of_dtype(operation.tensor_inputs[0].dtype)
    operands = [(operand, _dtype(operand)) for operand in operation.inputs]
    return operation_domain(OPS[operation.op], operands, operation.outputs[0].dtype)


def operand_domains(operation: Operation) -> tuple[str, ...]:
    """The domain that each operand is converted to: the operation's, or for indices, conditions and keys their own."""
    domain, data = domain_of(operation), OPS[operation.op].data_operands
    return tuple(
        domain if data is None or position in data else domain_of_operand(operand, _dtype(operand))
        for position, operand in enumerate(operation.inputs)
    )


def scale_of(operation: Operation, key: str) -> np.float64 | np.int64:
    """``alpha`` or ``beta`` as every stage sees it: a number that the domain rounds to 0 is 0."""
    return constant(operation.attrs.get(key, 1), domain_of(operation))


def _dtype(operand: object) -> str | None:
    return operand.dtype if isinstance(operand, TensorSpec) else None
