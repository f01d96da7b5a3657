"""Reverse-mode differentiation of traced graphs, by the op table's rules.

``backward`` walks the nodes between parameters and outputs from the end and adds the nodes of
each op's rule. These are ordinary nodes: they can be differentiated again, to any order, batched
and fused. Forward mode is the transpose of reverse mode, which is linear in its cotangents, so one
rule per op serves both; what is not needed is never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.ops import OPS
from trainkernel.promotion import is_float
from trainkernel.structure import loop, loop_operands
from trainkernel.trace import Array, Node, alias, aval_of, is_scalar, new_trace, nodes_between, recomputation

Cotangent = Any


# ---------------------------------------------------------------------------- the backward walk


def backward(outputs: Sequence[Any], cotangents: Sequence[Cotangent], parameters: Sequence[Array]) -> list[Cotangent]:
    """Cotangents of the parameters, given those of the outputs; None stands for zero."""
    sums: dict[int, Cotangent] = {}
    for out, cotangent in zip(outputs, cotangents, strict=True):
        _accumulate(sums, out, cotangent)
    for node in reversed(nodes_between(outputs, parameters)):
        given = [sums.pop(id(out), None) for out in node.outputs]
        if all(cotangent is None for cotangent in given):
            continue
        for operand, cotangent in zip(node.inputs, _transposed(node, given), strict=True):
            if isinstance(operand, Array) and is_float(operand.aval.dtype):
                _accumulate(sums, operand, cotangent)
    return [sums.get(id(parameter)) for parameter in parameters]


def _accumulate(sums: dict[int, Cotangent], array: Any, cotangent: Cotangent) -> None:
    if isinstance(array, Array) and cotangent is not None:
        known = sums.get(id(array))
        sums[id(array)] = cotangent if known is None else b.add(known, cotangent)


def _transposed(node: Node, cotangents: Sequence[Cotangent]) -> Sequence[Cotangent]:
    """The cotangents of a node's operands."""
    if node.op == "alias":
        return cotangents
    if node.op == "loop":
        return _loop_vjp(node, cotangents)
    if node.op == "call":
        return _call_vjp(node, cotangents)
    rule = OPS[node.op].vjp
    if rule is None:
        raise TraceError(f"{node.op} has no derivative{_at(node)}")
    given = [None if c is None else _whole(c, out) for c, out in zip(cotangents, node.outputs, strict=True)]
    results = rule(b, given, node.outputs, node.inputs, node.attrs)
    return [
        None if result is None or not isinstance(operand, Array) else _whole(result, operand)
        for result, operand in zip(results, node.inputs, strict=True)
    ]


def _whole(cotangent: Cotangent, like: Array) -> Cotangent:
    """A cotangent as an array of the shape and dtype of what it belongs to."""
    if is_scalar(cotangent):
        return b.full(like.shape, cotangent, like.aval.dtype)
    return b.cast(b.stretch(cotangent, like.shape), like.aval.dtype)


def _at(node: Node) -> str:
    return f"\n  at {node.location}" if node.location else ""


def push_forward(outputs: Sequence[Any], parameters: Sequence[Array], tangents: Sequence[Any]) -> list[Any]:
    """Tangents of the outputs: the pull back is linear in its cotangents, and this is its transpose."""
    with new_trace("grad") as trace:
        probes = [
            alias(b.full(aval_of(out).shape, 0, aval_of(out).dtype), trace) if is_float(aval_of(out).dtype) else None
            for out in outputs
        ]
        pulled = backward(outputs, probes, parameters)
    live = [probe for probe in probes if probe is not None]
    results = [None if ct is None else ct for ct in pulled]
    reached = [(ct, t) for ct, t in zip(results, tangents, strict=True) if ct is not None]
    pushed = iter(backward([ct for ct, _ in reached], [t for _, t in reached], live))
    found = []
    for out, probe in zip(outputs, probes, strict=True):
        tangent = next(pushed) if probe is not None else None
        aval = aval_of(out)
        found.append(b.full(aval.shape, 0, aval.dtype) if tangent is None else tangent)
    return found


# ---------------------------------------------------------------------------- loops and calls


def zeros(like: Any) -> Any:
    """Zeros of the shape and dtype of a value."""
    return b.full(aval_of(like).shape, 0, aval_of(like).dtype)


def _pull_back_body(body: Any, arguments: Sequence[Any], cotangents: Sequence[Cotangent]) -> list[Cotangent]:
    """Cotangents of a body's arguments; None for those that are not floating."""
    with new_trace("grad") as trace:
        aliases = [alias(value, trace) if is_float(aval_of(value).dtype) else None for value in arguments]
        outputs = body.call([value if a is None else a for a, value in zip(aliases, arguments, strict=True)])
    pulled = iter(backward(outputs, cotangents, [a for a in aliases if a is not None]))
    return [None if a is None else next(pulled) for a in aliases]


def _loop_vjp(node: Node, cotangents: Sequence[Cotangent]) -> list[Cotangent]:
    """A loop over the same steps from the last to the first.

    Each step recomputes the body from the carry that the loop saved before it, and pulls back.
    The cotangents of the constants are summed in the carry.
    """
    attrs, body = node.attrs, node.attrs["body"]
    constants, initial, xs, length = loop_operands(node)
    num_carry, num_ys = attrs["num_carry"], len(body.outputs) - attrs["num_carry"]
    if attrs["room"] is None:
        raise TraceError(f"a loop of dynamic length without stacked inputs has no derivative{_at(node)}")
    saved = list(node.outputs[num_carry + num_ys :])
    floats = [is_float(aval_of(value).dtype) for value in initial]
    of_constants = [position for position, value in enumerate(constants) if is_float(aval_of(value).dtype)]
    ct_carry, ct_ys = cotangents[:num_carry], cotangents[num_carry : num_carry + num_ys]
    ct_saved = cotangents[num_carry + num_ys :]
    first = [zeros(v) if ct is None else ct for v, ct, f in zip(initial, ct_carry, floats, strict=True) if f]
    first += [zeros(constants[position]) for position in of_constants]
    stacked = [*saved, *xs, *(ct for ct in (*ct_ys, *ct_saved) if ct is not None)]

    def step(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        rest = list(slices)
        carry_in, x = rest[:num_carry], rest[num_carry : num_carry + len(xs)]
        given = iter(rest[num_carry + len(xs) :])
        by_ys = [None if ct is None else next(given) for ct in ct_ys]
        by_saved = [None if ct is None else next(given) for ct in ct_saved]
        moving = iter(carry)
        by_carry = [next(moving) if is_moving else None for is_moving in floats]
        sums = list(moving)
        pulled = _pull_back_body(body, [*constants, *carry_in, *x], [*by_carry, *by_ys])
        by_inputs = pulled[len(constants) : len(constants) + num_carry]
        before = [
            _sum_of(pulled_ct, saved_ct, value)
            for pulled_ct, saved_ct, value, f in zip(by_inputs, by_saved, carry_in, floats, strict=True)
            if f
        ]
        totals = [
            total if pulled[position] is None else b.add(total, _whole(pulled[position], total))
            for total, position in zip(sums, of_constants, strict=True)
        ]
        by_xs = [
            _sum_of(ct, None, value)
            for ct, value in zip(pulled[len(constants) + num_carry :], x, strict=True)
            if is_float(aval_of(value).dtype)
        ]
        return [*before, *totals], by_xs

    final, by_xs = loop(step, first, stacked, length, attrs["room"], not attrs["reverse"])
    results: list[Cotangent] = [None] * len(node.inputs)
    moved = iter(final)
    for position, is_moving in enumerate(floats):
        results[len(constants) + position] = next(moved) if is_moving else None
    for position in of_constants:
        results[position] = next(moved)
    stacked_cts = iter(by_xs)
    for position, value in enumerate(xs):
        if is_float(aval_of(value).dtype):
            results[len(constants) + num_carry + position] = next(stacked_cts)
    return results


def _sum_of(first: Cotangent, second: Cotangent, like: Any) -> Any:
    """The sum of two cotangents, as an array like the value that they belong to."""
    present = [_whole(ct, like) for ct in (first, second) if ct is not None]
    return zeros(like) if not present else present[0] if len(present) == 1 else b.add(*present)


def _call_vjp(node: Node, cotangents: Sequence[Cotangent]) -> Sequence[Cotangent]:
    """A checkpoint computes its body again; a function with a rule of its own follows it."""
    pull_back = node.attrs.get("pull_back")
    if pull_back is None:
        with recomputation():
            return _pull_back_body(node.attrs["body"], node.inputs, cotangents)
    given = [zeros(out) if ct is None else _whole(ct, out) for ct, out in zip(cotangents, node.outputs, strict=True)]
    results: Sequence[Cotangent] = pull_back(node.inputs, given)
    return results
