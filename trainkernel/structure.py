"""Structural nodes: loops and calls, and the evaluation of graphs outside of any trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainkernel import tree
from trainkernel.dtypes import DTYPES
from trainkernel.errors import TraceError
from trainkernel.trace import (
    Array,
    Aval,
    Body,
    Node,
    as_value,
    at_user_line,
    aval_of,
    bind_to,
    close,
    is_scalar,
    is_tracing,
    make,
    new_trace,
    nodes_of,
    parameter,
)

Step = Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]


# ---------------------------------------------------------------------------- loops


def loop(
    step: Step, carry: Sequence[Any], xs: Sequence[Any], length: int | Array, room: int | None, reverse: bool
) -> tuple[list[Any], list[Any]]:
    """Run ``step`` ``length`` times.

    Parameters
    ----------
    step : callable (carry, slices) -> (carry, results)
        Flat lists; the carry keeps its shapes and dtypes.
    carry, xs : sequence of arrays
        Initial carry; stacked inputs, one slice of which each step gets.
    length : int or Array
        An int32 scalar Array is a length that is known at launch only.
    room : int or None
        Leading size of stacked tensors; None with a dynamic length and no ``xs``.
    reverse : bool
        The last slices come first.

    Returns
    -------
    carry, ys : list, list
        ``ys`` are the stacked results.
    """
    outs = loop_with_saved(step, carry, xs, length, room, reverse)
    num_ys = len(outs) - 2 * len(carry)
    return outs[: len(carry)], outs[len(carry) : len(carry) + num_ys]


def loop_with_saved(
    step: Step, carry: Sequence[Any], xs: Sequence[Any], length: int | Array, room: int | None, reverse: bool
) -> list[Any]:
    """``loop``, with the carries before each step, stacked, behind its results."""
    with new_trace("scan") as trace:
        carry_in = [parameter(_strong(value), trace) for value in carry]
        slices = [parameter(Aval(value.shape[1:], aval_of(value).dtype), trace) for value in xs]
        carry_out, results = step(carry_in, slices)
        carry_out = [fit(new, old) for new, old in zip(carry_out, carry_in, strict=True)]
        outputs = [*carry_out, *(_array(result) for result in results)]
        body, constants = close(outputs, trace, [*carry_in, *slices])
    return list(make_loop(body, [*constants, *carry, *xs], len(carry), len(xs), length, room, reverse))


def _strong(value: Any) -> Aval:
    aval = aval_of(value)
    return Aval(aval.shape, aval.dtype)


def _array(value: Any) -> Any:
    from trainkernel import primitives as b

    return b.cast(value, aval_of(value).dtype) if is_scalar(value) else value


def fit(new: Any, old: Any, what: str = "the carry") -> Any:
    """A step's carry in the shape and dtype of the carry before it; ``what`` is its name in errors."""
    from trainkernel import primitives as b

    aval, before = aval_of(new), aval_of(old)
    if aval.shape != before.shape or (aval.dtype != before.dtype and not aval.weak):
        raise TraceError(
            f"{what} changes from {before} to {aval}: each step must keep its shape and dtype{at_user_line()}"
        )
    return b.cast(new, before.dtype)


def make_loop(
    body: Body,
    operands: Sequence[Any],
    num_carry: int,
    num_xs: int,
    length: int | Array,
    room: int | None,
    reverse: bool,
) -> tuple[Array, ...]:
    """The node of a loop: final carries, stacked results, then the carries as they were before each step.

    The last are for derivatives; what no one reads is dropped when the Program is made.
    """
    avals = [out.aval if isinstance(out, Array) else aval_of(out) for out in body.outputs]
    stacked = [Aval((-1 if room is None else room, *aval.shape), aval.dtype) for aval in avals[num_carry:]]
    saved = [Aval((-1 if room is None else room, *aval.shape), aval.dtype) for aval in avals[:num_carry]]
    attrs = {
        "body": body,
        "num_carry": num_carry,
        "num_xs": num_xs,
        "room": room,
        "length": length if isinstance(length, int) else None,
        "reverse": reverse,
    }
    inputs = [*operands, length] if isinstance(length, Array) else list(operands)
    return make("loop", inputs, attrs, [*avals[:num_carry], *stacked, *saved])


def loop_operands(node: Node, values: Sequence[Any] | None = None) -> tuple[list[Any], list[Any], list[Any], Any]:
    """(constants, initial carries, stacked inputs, length) of a loop's node, or of values of its inputs."""
    attrs = node.attrs
    operands = list(node.inputs if values is None else values)
    length = operands.pop() if attrs["length"] is None else attrs["length"]
    first_xs = len(operands) - attrs["num_xs"]
    first_carry = first_xs - attrs["num_carry"]
    return operands[:first_carry], operands[first_carry:first_xs], operands[first_xs:], length


# ---------------------------------------------------------------------------- calls


def call(body: Body, operands: Sequence[Any], attrs: dict[str, Any]) -> tuple[Array, ...]:
    """The node of a function that derivatives take as a whole (``checkpoint``, ``custom_vjp``)."""
    return make("call", operands, {"body": body, **attrs}, [aval_of(out) for out in body.outputs])


# ---------------------------------------------------------------------------- evaluation


def settle(run: Callable[[], Any]) -> Any:
    """The result of ``run``: traced inside of a trace, NumPy arrays outside of any."""
    result = run()
    if is_tracing():
        return result
    leaves, treedef = tree.flatten(result)
    return tree.unflatten(treedef, [_whole(value) for value in evaluate(leaves)])


def _whole(value: Any) -> Any:
    """The value, with memory for each element: a view that repeats some could be neither written nor donated."""
    if isinstance(value, np.ndarray) and any(
        step == 0 and size > 1 for step, size in zip(value.strides, value.shape, strict=True)
    ):
        return value.copy()
    return value


def evaluate(outputs: Sequence[Any]) -> list[Any]:
    """The values of traced arrays that depend on no parameter of an open trace."""
    return _evaluate(nodes_of(outputs), outputs, {})


def _evaluate(nodes: Sequence[Node], outputs: Sequence[Any], known: dict[int, Any]) -> list[Any]:
    """The values of outputs, given those of some arrays by id."""
    for node in nodes:
        inputs = [known.get(id(operand), operand) for operand in node.inputs]
        results = _evaluate_node(node, inputs)
        known.update((id(out), result) for out, result in zip(node.outputs, results, strict=True))
    return [known.get(id(out), out) for out in outputs]


def _evaluate_node(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    if node.op == "alias":
        return inputs
    if node.op == "call":
        return _body_evaluation(node.attrs["body"])(inputs)
    if node.op == "loop":
        return _evaluate_loop(node, inputs)
    if node.op == "parameter":
        raise TraceError(f"{node.outputs[0].aval} leaked out of its function: it has no value{at_user_line()}")
    return bind_to(node.op, inputs, node.attrs, [out.aval for out in node.outputs])


def _body_evaluation(body: Body) -> Callable[[Sequence[Any]], list[Any]]:
    """The body as a function of values; its graph is walked once."""
    nodes = [node for node in nodes_of(body.outputs) if node.op != "parameter"]

    def run(arguments: Sequence[Any]) -> list[Any]:
        known = {id(p): argument for p, argument in zip(body.parameters, arguments, strict=True)}
        return _evaluate(nodes, body.outputs, known)

    return run


def _evaluate_loop(node: Node, inputs: Sequence[Any]) -> list[Any]:
    attrs, step = node.attrs, _body_evaluation(node.attrs["body"])
    constants, carry, xs, length = loop_operands(node, inputs)
    length = int(length)
    room = length if attrs["room"] is None else attrs["room"]
    if not 0 <= length <= room:
        raise TraceError(f"the length {length} of a loop is not in 0..{room}")
    avals = [out.aval for out in node.outputs[attrs["num_carry"] :]]
    stacked = [np.zeros((room, *aval.shape[1:]), DTYPES[aval.dtype].numpy) for aval in avals]
    for index in reversed(range(length)) if attrs["reverse"] else range(length):
        results = step([*constants, *carry, *(x[index] for x in xs)])
        for array, value in zip(stacked, [*results[len(carry) :], *carry], strict=True):
            array[index] = value
        carry = results[: len(carry)]
    return [*(np.asarray(value) for value in carry), *stacked]


def as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Leaves as Arrays or ndarrays: Python numbers become 0-d arrays."""
    return [_array(as_value(leaf)) for leaf in leaves]
