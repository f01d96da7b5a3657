"""``vmap``: a function of one example as a function of a batch.

The function is traced on one example; then its nodes are traced again with the batch in front of
every value that depends on a batched argument, by the op table's rules. Loops and calls are
batched as loops and calls.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trainkernel import primitives as b
from trainkernel import structure, tree
from trainkernel.errors import TraceError
from trainkernel.ops import OPS
from trainkernel.trace import (
    Aval,
    Body,
    Node,
    at_user_line,
    aval_of,
    bind_to,
    close,
    is_scalar,
    new_trace,
    nodes_between,
    parameter,
    replay,
)


def vmap(
    fun: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0, *, axis_size: int | None = None
) -> Callable[..., Any]:
    """``fun`` over a batch: the meaning of ``jax.vmap``.

    Parameters
    ----------
    fun : callable
    in_axes : int, None, or a tree prefix of the positional arguments
        Where each argument has its batch; None: it is the same for all. Keyword arguments have it in front.
    out_axes : int, None, or a tree prefix of the result
    axis_size : int, optional
        The batch size, needed where no argument has a batch.

    Raises
    ------
    TraceError
        If batch sizes differ, no argument has a batch, or a result that has one is to have none.
    """

    @functools.wraps(fun)
    def vmapped(*args: Any, **kwargs: Any) -> Any:
        return structure.settle(lambda: _batch_call_of(fun, args, kwargs, in_axes, out_axes, axis_size))

    return vmapped


def _batch_call_of(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: Any,
    out_axes: Any,
    axis_size: int | None,
) -> Any:
    leaves, treedef = tree.flatten((args, kwargs))
    axes = _axes_of(_as_tuple(in_axes, len(args)), args, "in_axes") + [0] * len(tree.leaves(kwargs))
    values = structure.as_arrays(leaves)
    size = _batch_size(values, axes, axis_size)
    batched: dict[int, Any] = {}
    parameters, arguments = [], []
    with new_trace("vmap") as trace:
        for value, axis in zip(values, axes, strict=True):
            if axis is None:
                arguments.append(value)
                continue
            front = move_axis(value, axis, 0)
            one = parameter(Aval(front.shape[1:], aval_of(front).dtype), trace)
            parameters.append(one)
            batched[id(one)] = front
            arguments.append(one)
        positional, named = tree.unflatten(treedef, arguments)
        result = fun(*positional, **named)
        outputs, structure_out = tree.flatten(result)
        outputs = structure.as_arrays(outputs)
    known = batch_nodes(nodes_between(outputs, parameters), batched, size)
    axes_out = _axes_of(out_axes, result, "out_axes")
    placed = [_place(out, known, axis, size) for out, axis in zip(outputs, axes_out, strict=True)]
    return tree.unflatten(structure_out, placed)


def _as_tuple(in_axes: Any, count: int) -> Any:
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple) and len(in_axes) != count:
        raise TraceError(f"in_axes has {len(in_axes)} entries for {count} arguments{at_user_line()}")
    return in_axes if isinstance(in_axes, tuple) else (in_axes,) * count


def _axes_of(prefix: Any, values: Any, what: str) -> list[int | None]:
    """The axis of each leaf, an int or None."""
    try:
        axes = tree.broadcast_prefix(prefix, values, what)
        return [None if axis is None else operator.index(axis) for axis in axes]
    except TypeError:
        raise TraceError(f"{what} needs ints and None, got {prefix!r}{at_user_line()}") from None
    except ValueError as error:
        raise TraceError(f"{error}{at_user_line()}") from None


def _batch_size(values: Sequence[Any], axes: Sequence[Any], wanted: int | None) -> int:
    sizes: dict[int, list[int]] = {} if wanted is None else {operator.index(wanted): []}
    for value, axis in zip(values, axes, strict=True):
        if axis is not None:
            if not -len(value.shape) <= axis < len(value.shape):
                raise TraceError(f"vmap over axis {axis} of an array of shape {list(value.shape)}{at_user_line()}")
            sizes.setdefault(value.shape[axis], list(value.shape))
    if wanted is not None and set(sizes) != {wanted}:
        other = next(size for size in sizes if size != wanted)
        raise TraceError(f"vmap needs axis_size {wanted}, got {other} (of shape {sizes[other]}){at_user_line()}")
    if len(sizes) != 1:
        found = ", ".join(f"{size} (of shape {shape})" for size, shape in sizes.items()) or "none"
        raise TraceError(f"vmap needs one batch size, got {found}{at_user_line()}")
    (size,) = sizes
    return int(size)


def move_axis(x: Any, source: int, destination: int) -> Any:
    """``x`` with one dim moved."""
    ndim = len(x.shape)
    order = [dim for dim in range(ndim) if dim != source % ndim]
    order.insert(destination % ndim, source % ndim)
    return b.transpose(x, order)


def _place(out: Any, known: dict[int, Any], axis: int | None, size: int) -> Any:
    value = known.get(id(out))
    if value is None:
        if axis is None:
            return out
        value = b.broadcast(out, (size, *out.shape), tuple(range(1, len(out.shape) + 1)))
    elif axis is None:
        raise TraceError(f"out_axes is None for a result that depends on the batch: {aval_of(out)}{at_user_line()}")
    if not -len(value.shape) <= axis < len(value.shape):
        raise TraceError(f"out_axes is {axis} for a result of shape {list(value.shape)}{at_user_line()}")
    return move_axis(value, 0, axis)


# ---------------------------------------------------------------------------- nodes


_NONE: Mapping[int, Any] = MappingProxyType({})


def batch_nodes(
    nodes: Sequence[Node], known: dict[int, Any], size: int, shared: Mapping[int, Any] = _NONE
) -> dict[int, Any]:
    """Trace nodes again on batched values.

    ``known`` maps ids of arrays to values with the batch in front, ``shared`` to values that all
    examples share; an array in neither stands for itself.
    """
    for node in nodes:
        batched = [id(operand) in known for operand in node.inputs]
        inputs = [known.get(id(operand), shared.get(id(operand), operand)) for operand in node.inputs]
        results = _batch_node(node, inputs, batched, size)
        known.update((id(out), result) for out, result in zip(node.outputs, results, strict=True))
    return known


def _batch_node(node: Node, inputs: Sequence[Any], batched: Sequence[bool], size: int) -> Sequence[Any]:
    if node.op == "alias":
        return inputs
    rule = {"loop": _batch_loop, "call": _batch_call}.get(node.op, _batch_op)
    return rule(node, inputs, batched, size)


def _batch_op(node: Node, inputs: Sequence[Any], batched: Sequence[bool], size: int) -> Sequence[Any]:
    op = OPS[node.op]
    if op.kind == "pointwise" and not op.indexed:
        return _batch_pointwise(node, inputs, batched, size)
    if op.batch is None:
        raise TraceError(f"{node.op} cannot be batched\n  at {node.location}")
    results = op.batch(b, inputs, batched, node.attrs, size)
    return results if isinstance(results, tuple) else (results,)


def _batch_pointwise(node: Node, inputs: Sequence[Any], batched: Sequence[bool], size: int) -> Sequence[Any]:
    aval = node.outputs[0].aval
    shape = (size, *aval.shape)
    operands = [
        value if is_batched or is_scalar(value) else b.broadcast(value, shape, tuple(range(1, len(shape))))
        for value, is_batched in zip(inputs, batched, strict=True)
    ]
    return bind_to(node.op, operands, node.attrs, [Aval(shape, aval.dtype, aval.weak)])


def _spread(value: Any, size: int) -> Any:
    return b.broadcast(value, (size, *value.shape), tuple(range(1, len(value.shape) + 1)))


def _batch_body(
    body: Body, arguments: Sequence[Any], batched: Sequence[bool], size: int
) -> tuple[list[Any], list[bool]]:
    """A body on arguments with the batch in front where ``batched``, and which results have it."""
    pairs = list(zip(body.parameters, arguments, batched, strict=True))
    unbatched = {id(p): value for p, value, is_batched in pairs if not is_batched}
    moving = [p for p, _, is_batched in pairs if is_batched]
    depends = nodes_between(body.outputs, moving)
    inside = set(depends)
    rest = [node for node in nodes_between(body.outputs, body.parameters) if node not in inside]
    replay(rest, unbatched)
    known = batch_nodes(depends, {id(p): value for p, value, is_batched in pairs if is_batched}, size, unbatched)
    outputs = [known.get(id(out), unbatched.get(id(out), out)) for out in body.outputs]
    return outputs, [id(out) in known for out in body.outputs]


# ---------------------------------------------------------------------------- loops and calls


def _batch_loop(node: Node, inputs: Sequence[Any], batched: Sequence[bool], size: int) -> Sequence[Any]:
    """A loop whose carries have the batch in front wherever a step gives it to them."""
    attrs, body = node.attrs, node.attrs["body"]
    operands, flags = list(inputs), list(batched)
    length: Any = attrs["length"]
    if length is None:
        length = operands.pop()
        if flags.pop():
            raise TraceError(f"a loop's length may not differ within a batch\n  at {node.location}")
    num_carry, num_xs = attrs["num_carry"], attrs["num_xs"]
    first_xs = len(operands) - num_xs
    first = first_xs - num_carry
    moving = list(flags[first:first_xs])
    results: list[bool] = []
    for _ in range(num_carry + 1):
        with new_trace("vmap"):
            _, results = _trial(body, operands, [*flags[:first], *moving, *flags[first_xs:]], first, first_xs, size)
        grown = [old or new for old, new in zip(moving, results[:num_carry], strict=True)]
        if grown == moving:
            break
        moving = grown
    carry = [
        value if was else _spread(value, size) if now else value
        for value, was, now in zip(operands[first:first_xs], flags[first:first_xs], moving, strict=True)
    ]
    xs = [
        move_axis(value, 0, 1) if is_batched else value
        for value, is_batched in zip(operands[first_xs:], flags[first_xs:], strict=True)
    ]
    of_results = results[num_carry:]

    def step(carry_in: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        arguments = [*operands[:first], *carry_in, *slices]
        outs, has = _batch_body(body, arguments, [*flags[:first], *moving, *flags[first_xs:]], size)
        new = [
            _spread(value, size) if want and not given else value
            for value, want, given in zip(outs[:num_carry], moving, has[:num_carry], strict=True)
        ]
        return new, outs[num_carry:]

    with_saved = structure.loop_with_saved(step, carry, xs, length, attrs["room"], attrs["reverse"])
    num_ys = len(body.outputs) - num_carry
    final, ys, saved = (
        with_saved[:num_carry],
        with_saved[num_carry : num_carry + num_ys],
        with_saved[num_carry + num_ys :],
    )
    stacked = [
        move_axis(value, 1, 0) if has else _spread(value, size) for value, has in zip(ys, of_results, strict=True)
    ]
    kept = [move_axis(value, 1, 0) if has else _spread(value, size) for value, has in zip(saved, moving, strict=True)]
    carried = [value if has else _spread(value, size) for value, has in zip(final, moving, strict=True)]
    return [*carried, *stacked, *kept]


def _trial(
    body: Body, operands: Sequence[Any], flags: Sequence[bool], first: int, first_xs: int, size: int
) -> tuple[list[Any], list[bool]]:
    """Which results of a step have the batch; the values are thrown away."""
    arguments = []
    for position, (p, is_batched) in enumerate(zip(body.parameters, flags, strict=True)):
        shape = (size, *p.shape) if is_batched else p.shape
        arguments.append(operands[position] if position < first else b.full(shape, 0, p.aval.dtype))
    return _batch_body(body, arguments, flags, size)


def _batch_call(node: Node, inputs: Sequence[Any], batched: Sequence[bool], size: int) -> Sequence[Any]:
    """A call of the batched body, whose derivative is the batched derivative."""
    body = node.attrs["body"]
    with new_trace("vmap") as trace:
        parameters = [parameter(Aval(value.shape, aval_of(value).dtype), trace) for value in inputs]
        outs, has = _batch_body(body, parameters, batched, size)
        outputs = [value if flag else _spread(value, size) for value, flag in zip(outs, has, strict=True)]
        closed, constants = close(outputs, trace, parameters)
    attrs = {key: value for key, value in node.attrs.items() if key != "body"}
    pull_back = attrs.get("pull_back")
    if pull_back is not None:
        attrs["pull_back"] = _batched_pull_back(pull_back, len(constants), batched, size)
    return structure.call(closed, [*constants, *inputs], attrs)


def _batched_pull_back(pull_back: Any, num_constants: int, batched: Sequence[bool], size: int) -> Any:
    """A derivative rule over a batch; an operand that all examples share gets the sum of their cotangents."""

    def rule(inputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        operands = inputs[num_constants:]
        present: list[bool] = []

        def one(*values: Any) -> list[Any]:
            results = pull_back(values[: len(operands)], values[len(operands) :])
            present[:] = [result is not None for result in results]
            return [result for result in results if result is not None]

        axes = tuple(0 if flag else None for flag in batched) + (0,) * len(cotangents)
        pulled = iter(vmap(one, in_axes=axes)(*operands, *cotangents))
        found: list[Any] = [next(pulled) if is_there else None for is_there in present]
        summed = [ct if ct is None or flag else b.sum(ct, dims=(0,)) for ct, flag in zip(found, batched, strict=True)]
        return [None] * num_constants + summed

    return rule
