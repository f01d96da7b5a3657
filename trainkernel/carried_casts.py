"""A pass: 16-bit copies of a loop's carries are carried, too.

A step that rounds float32 weights to 16 bits before it multiplies by them reads them once more, converts them and waits
for that. The step before knows the new weights already: its update writes both. So the cast of a carry becomes a carry
of its own, which begins as the cast of the first value; the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainkernel.ir import Item, Loop, Operation, Program
from trainkernel.passes import fresh, map_bodies
from trainkernel.product_plans import SIXTEEN_BIT_FORMATS

_MIN_ELEMENTS = 32 * 1024
"""Of a carry: a small one is rounded by those who read it as quickly."""


def carry_casts(program: Program) -> Program:
    """The program whose loops carry the casts of large carries."""
    taken = {spec.buffer for spec in program.buffers()}
    items: list[Item] = []
    for item in program.operations:
        if isinstance(item, Loop):
            for position, cast in list(_casts(item)):
                item = _with_carry(item, position, cast, items, taken)
        items.append(item)
    return map_bodies(replace(program, operations=tuple(items)), carry_casts)


def _casts(loop: Loop) -> Iterator[tuple[int, Operation]]:
    """The casts in a loop's body of whole carries that each step makes anew, with the carry's position."""
    inputs, first = loop.body.inputs, loop.num_constants
    carries = {spec: position for position, spec in enumerate(inputs[first : first + loop.num_carry])}
    given = {spec.buffer for spec in inputs}
    for item in loop.body.operations:
        if not isinstance(item, Operation) or item.op != "cast" or item.outputs[0].dtype not in SIXTEEN_BIT_FORMATS:
            continue
        (source,) = item.tensor_inputs
        position = carries.get(source)
        if position is None or not source.is_dense:
            continue
        is_made = loop.body.outputs[position].buffer not in given
        if source.dtype == "float32" and source.num_elements >= _MIN_ELEMENTS and is_made:
            yield position, item


def _with_carry(loop: Loop, position: int, cast: Operation, before: list[Item], taken: set[str]) -> Loop:
    """The loop with one more carry, the result of ``cast``; what makes its first value is appended to ``before``."""
    out, body = cast.outputs[0], loop.body
    inside = {spec.buffer for spec in body.buffers()}
    following = replace(out, buffer=fresh(f"{out.buffer}_next", inside))
    update = Operation(following.buffer, "cast", (body.outputs[position],), following, {}, cast.location)
    first = replace(out, buffer=fresh(f"{out.buffer}_first", taken))
    last = replace(out, buffer=fresh(f"{out.buffer}_last", taken))
    start = loop.inputs[loop.num_constants + position]
    before.append(Operation(first.buffer, "cast", (start,), first, {}, cast.location))
    end = loop.num_constants + loop.num_carry
    others = tuple(item for item in body.operations if item is not cast)
    return replace(
        loop,
        body=replace(
            body,
            inputs=(*body.inputs[:end], out, *body.inputs[end:]),
            operations=(*others, update),
            outputs=(*body.outputs[: loop.num_carry], following, *body.outputs[loop.num_carry :]),
        ),
        inputs=(*loop.inputs[:end], first, *loop.inputs[end:]),
        outputs=(*loop.outputs[: loop.num_carry], last, *loop.outputs[loop.num_carry :]),
        num_carry=loop.num_carry + 1,
    )
