"""``scan``, ``fori_loop``, ``cond`` and theirs: control flow that becomes part of one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel import structure, tree
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int
from trainkernel.trace import Array, Aval, alias, as_value, at_user_line, aval_of, is_scalar, new_trace, parameter


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: Any = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Run ``carry, y = f(carry, x)`` over the leading dim of ``xs``: the meaning of ``jax.lax.scan``.

    At the top of a jitted function it is a Loop: one launch runs all steps.

    Parameters
    ----------
    f : callable
        Keeps the structure, shapes and dtypes of the carry.
    init : tree of arrays
    xs : tree of arrays, optional
        All with the same leading size.
    length : int, optional
        The number of steps, needed without ``xs``. An int argument of the jitted function is a
        length known at launch only; with ``xs`` it may be any number up to their leading size.
    reverse : bool
        From the last slice to the first.
    unroll : int or bool
        True, or at least the number of steps: the steps are traced one after the other, without a
        Loop. Any other number changes nothing.

    Returns
    -------
    carry, ys : tree, tree
        ``ys`` are the second results, stacked; of a dynamic length, rows beyond it are zero.

    Raises
    ------
    TraceError
        If the carry changes its structure, shape or dtype, or no length is given.
    """
    carry, ys = structure.settle(lambda: _scan(f, init, xs, length, reverse, unroll))
    return carry, ys


def _scan(f: Callable[..., Any], init: Any, xs: Any, length: Any, reverse: bool, unroll: int | bool) -> tuple[Any, Any]:
    with new_trace("scan-setup"):
        carry_leaves, carry_def = tree.flatten(init)
        x_leaves, x_def = tree.flatten(xs)
        x_values = structure.as_arrays(x_leaves)
        steps, room = _length(x_values, length)
        carry = _initial(f, carry_leaves, carry_def, x_values, x_def)
    if isinstance(steps, int) and steps > 0 and _is_unrolled(unroll, steps):
        return _unrolled(f, tree.unflatten(carry_def, carry), x_values, x_def, steps, reverse)
    y_def: Any = None

    def step(values: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal y_def
        new, y = _results(f, tree.unflatten(carry_def, values), tree.unflatten(x_def, slices))
        leaves = _carry_leaves(carry_def, new, values)
        y_leaves, y_def = tree.flatten(y)
        if room is None and y_leaves:
            raise TraceError(
                "a scan of dynamic length without xs has no room for stacked results: give xs of as many rows "
                f"as there may be steps (arange will do), or a static length, or return None as the second "
                f"result{at_user_line()}"
            )
        return leaves, structure.as_arrays(y_leaves)

    final, ys = structure.loop(step, carry, x_values, steps, room, reverse)
    return tree.unflatten(carry_def, final), tree.unflatten(y_def, ys)


def _is_unrolled(unroll: int | bool, steps: int) -> bool:
    count = as_int(unroll, "unroll")
    return unroll is True or (unroll is not False and count >= steps)


def _results(f: Callable[..., Any], carry: Any, x: Any) -> tuple[Any, Any]:
    result = f(carry, x)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TraceError(f"the function of a scan must return (carry, y), got {result!r}{at_user_line()}")
    return result


def _carry_leaves(carry_def: tree.TreeDef, new: Any, before: Sequence[Any]) -> list[Any]:
    """The leaves of a step's carry, which has the structure, shapes and dtypes of the one before."""
    leaves, new_def = tree.flatten(new)
    if new_def != carry_def:
        raise TraceError(f"the carry changes its structure from {carry_def} to {new_def}{at_user_line()}")
    names = [f"the carry's leaf {path}" if path else "the carry" for path in tree.paths(new)]
    return [structure.fit(as_value(leaf), *rest) for leaf, *rest in zip(leaves, before, names, strict=True)]


def _length(xs: Sequence[Any], length: Any) -> tuple[int | Array, int | None]:
    """(number of steps, leading size of stacked tensors)."""
    sizes = {value.shape[0] if value.shape else None for value in xs}
    if len(sizes) > 1 or None in sizes:
        shapes = ", ".join(str(list(value.shape)) for value in xs)
        raise TraceError(f"the xs of a scan need one leading size, got shapes {shapes}{at_user_line()}")
    room = sizes.pop() if sizes else None
    if length is None:
        if room is None:
            raise TraceError(f"scan needs xs or a length{at_user_line()}")
        return room, room
    if isinstance(length, Array):
        if length.shape != () or length.aval.dtype != "int32":
            raise TraceError(f"a length is an int32 scalar, got {length.aval}{at_user_line()}")
        return length, room
    steps = as_int(length, "the length of a scan")
    if not 0 <= steps < 2**31:
        raise TraceError(f"the length of a scan is from 0 to 2147483647, got {steps}{at_user_line()}")
    if room is not None and steps != room:
        raise TraceError(f"length is {steps}, the xs of the scan have {room} slices{at_user_line()}")
    return steps, steps


def _initial(f: Any, leaves: Sequence[Any], carry_def: Any, xs: Sequence[Any], x_def: Any) -> list[Any]:
    """Initial carries as arrays; a Python number takes the dtype that a step gives it."""
    values = [as_value(leaf) for leaf in leaves]
    weak = [aval_of(value).weak for value in values]
    if not any(weak):
        return values
    with new_trace("scan-trial") as trace:
        carry = [parameter(aval_of(value), trace) for value in values]
        slices = [parameter(Aval(value.shape[1:], aval_of(value).dtype), trace) for value in xs]
        new, _ = _results(f, tree.unflatten(carry_def, carry), tree.unflatten(x_def, slices))
        after = [aval_of(as_value(leaf)) for leaf in tree.leaves(new)]
    if len(after) != len(values):
        raise TraceError(f"the carry changes its structure from {carry_def} to {tree.flatten(new)[1]}{at_user_line()}")
    return [
        b.cast(value, result.dtype if is_weak else aval_of(value).dtype)
        for value, is_weak, result in zip(values, weak, after, strict=True)
    ]


def _unrolled(
    f: Callable[..., Any], carry: Any, xs: Sequence[Any], x_def: Any, steps: int, reverse: bool
) -> tuple[Any, Any]:
    """The steps one after the other, on traced arrays as in a Loop."""
    results: list[Any] = [None] * steps
    with new_trace("scan-unrolled"):
        values, carry_def = tree.flatten(carry)
        for position in reversed(range(steps)) if reverse else range(steps):
            slices = [_row(value, position) for value in xs]
            traced = [value if isinstance(value, Array) else alias(value, None) for value in values]
            new, results[position] = _results(f, tree.unflatten(carry_def, traced), tree.unflatten(x_def, slices))
            values = _carry_leaves(carry_def, new, traced)
        kinds = [tree.flatten(result)[1] for result in results]
        if any(kind != kinds[0] for kind in kinds):
            found = ", ".join(sorted({str(kind) for kind in kinds}))
            raise TraceError(f"the steps of a scan return results of the structures {found}{at_user_line()}")
        return tree.unflatten(carry_def, values), tree.map(lambda *rows: _stack(rows), *results)


def _row(x: Any, position: int) -> Any:
    rest = x.shape[1:]
    row = b.slice(x, (position, *(0 for _ in rest)), (position + 1, *rest), (1,) * len(x.shape))
    return b.reshape(row, rest)


def _stack(rows: Sequence[Any]) -> Any:
    arrays = structure.as_arrays(rows)
    return b.concatenate(*(b.reshape(row, (1, *row.shape)) for row in arrays), dim=0)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any) -> Any:
    """``for i in range(lower, upper): val = body_fun(i, val)``: the meaning of ``jax.lax.fori_loop``.

    Bounds are ints; ``upper`` may be an int argument of the jitted function, with ``lower`` 0.
    """
    if isinstance(upper, Array) and not (is_scalar(lower) and lower == 0):
        raise TraceError(f"fori_loop with a dynamic upper bound must start at 0, got {lower!r}{at_user_line()}")
    if isinstance(lower, Array):
        raise TraceError(f"fori_loop needs a static lower bound, got {lower.aval}{at_user_line()}")
    first = as_int(lower, "the lower bound of fori_loop")
    if not -(2**31) <= first < 2**31:
        raise TraceError(f"the bounds of fori_loop are int32, got {first}{at_user_line()}")
    length = upper if isinstance(upper, Array) else max(as_int(upper, "the upper bound of fori_loop") - first, 0)

    def step(carry: Any, _: Any) -> tuple[Any, None]:
        position, value = carry
        return (b.add(position, 1), body_fun(position, value)), None

    start = np.asarray(first, np.int32)
    return scan(step, (start, init_val), None, length=length)[0][1]


def map(f: Callable[[Any], Any], xs: Any) -> Any:
    """``f`` of each slice of ``xs``, one after the other: as ``jax.lax.map``. ``vmap`` takes all at once."""
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
    """``true_fun(*operands)`` where ``pred`` holds, else ``false_fun(*operands)``: as ``jax.lax.cond``.

    With a traced ``pred`` both are computed, and the results selected: meant for cheap sides.

    Raises
    ------
    TraceError
        If the two results differ in structure, shape or dtype.
    """
    value = as_value(pred)
    if aval_of(value).shape != ():
        raise TraceError(f"cond needs a scalar, got {aval_of(value)}{at_user_line()}")
    if not isinstance(value, Array):
        return true_fun(*operands) if bool(np.asarray(value)) else false_fun(*operands)
    first, first_def = tree.flatten(true_fun(*operands))
    second, second_def = tree.flatten(false_fun(*operands))
    if first_def != second_def:
        raise TraceError(f"the sides of cond return {first_def} and {second_def}{at_user_line()}")
    pairs = [_same(x, y) for x, y in zip(first, second, strict=True)]
    return tree.unflatten(first_def, [_select(value, x, y) for x, y in pairs])


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """``branches[index](*operands)``, an index out of range clamped: as ``jax.lax.switch``.

    With a traced ``index`` all branches are computed, and the results selected: meant for cheap ones.

    Raises
    ------
    TraceError
        If the index is no integer scalar, or results differ in structure, shape or dtype.
    """
    value = as_value(index)
    aval = aval_of(value)
    if aval.shape != () or aval.dtype not in ("int32", "int64", "uint32", "uint8") or not branches:
        raise TraceError(f"switch needs an integer scalar and branches, got {aval}, {len(branches)}{at_user_line()}")
    if not isinstance(value, Array):
        return branches[min(max(int(value), 0), len(branches) - 1)](*operands)
    result = branches[0](*operands)
    for number, branch in enumerate(branches[1:], start=1):
        result = cond(b.compare(value, number, "ge"), branch, lambda *_, before=result: before, *operands)
    return result


def _same(x: Any, y: Any) -> tuple[Any, Any]:
    first, second = structure.as_arrays((x, y))
    if first.shape != second.shape or aval_of(first).dtype != aval_of(second).dtype:
        raise TraceError(f"the sides of cond return {aval_of(first)} and {aval_of(second)}{at_user_line()}")
    return first, second


def _select(pred: Array, x: Any, y: Any) -> Any:
    return b.where(b.broadcast(pred, x.shape, ()), x, y)


def while_loop(cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: Any) -> Any:
    """Refused: how long it runs would be known on the device alone.

    Raises
    ------
    TraceError
        Always. ``fori_loop`` and ``scan`` take a number of steps that is known at launch; ``where``
        keeps a value from changing once a condition holds.
    """
    raise TraceError(
        "while_loop cannot be part of one kernel: the number of steps must be known at launch. Use fori_loop or "
        f"scan with a bound, and where() to keep a value from changing{at_user_line()}"
    )
