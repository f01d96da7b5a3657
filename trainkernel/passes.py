"""Passes: functions from Program to Program that keep its meaning.

Each recurses into the bodies of Loops through ``map_bodies``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import TypeGuard

from trainkernel.arithmetic import kind_of
from trainkernel.ir import Item, Loop, Operand, Operation, Program, ScalarSpec, TensorSpec, dense_strides
from trainkernel.ops import OPS

_MAX_OUTER_ROWS = 4


def map_bodies(program: Program, rewrite: Callable[[Program], Program]) -> Program:
    """The program with ``rewrite`` applied to the body of each of its Loops."""
    if not any(isinstance(item, Loop) for item in program.operations):
        return program
    items = (replace(item, body=rewrite(item.body)) if isinstance(item, Loop) else item for item in program.operations)
    return replace(program, operations=tuple(items))


def eliminate_dead(program: Program) -> Program:
    """Drop every item none of whose outputs is needed."""
    needed = {spec.buffer for spec in program.outputs}
    kept: list[Item] = []
    for item in reversed(program.operations):
        if not any(spec.buffer in needed for spec in item.outputs):
            continue
        kept.append(item)
        needed.update(spec.buffer for spec in item.tensor_inputs)
        if isinstance(item, Loop) and isinstance(item.length, str):
            needed.add(item.length)
    return map_bodies(replace(program, operations=tuple(reversed(kept))), eliminate_dead)


def _substitute(
    program: Program, items: list[Item], views: Mapping[str, Callable[[TensorSpec], TensorSpec]]
) -> Program:
    """``items`` and the outputs with each operand over a buffer in ``views`` rewritten."""

    def rewrite(operand: Operand) -> Operand:
        if isinstance(operand, TensorSpec) and operand.buffer in views:
            return views[operand.buffer](operand)
        return operand

    def rewrite_spec(spec: TensorSpec) -> TensorSpec:
        return views[spec.buffer](spec) if spec.buffer in views else spec

    rewritten: list[Item] = []
    for item in items:
        if isinstance(item, Loop):
            rewritten.append(replace(item, inputs=tuple(rewrite_spec(spec) for spec in item.inputs)))
        else:
            rewritten.append(replace(item, inputs=tuple(rewrite(operand) for operand in item.inputs)))
    return replace(program, operations=tuple(rewritten), outputs=tuple(rewrite_spec(spec) for spec in program.outputs))


def _whole_dense(spec: TensorSpec, out: TensorSpec) -> bool:
    """Whether ``spec`` is the whole dense tensor of a buffer."""
    return spec.offset == 0 and spec.shape == out.shape and spec.strides == out.strides


def _transposed_dense(spec: TensorSpec, out: TensorSpec) -> bool:
    """Whether ``spec`` is the transpose of the whole dense tensor of a buffer."""
    return spec.ndim >= 2 and _whole_dense(spec.mT, out)


def canonicalize_transposed_mm(program: Program) -> Program:
    """Rewrite a product that is only read transposed as the product of the transposes.

    ``(a b)^T = b^T a^T``, so that the transposed copy, or the transposed access, is gone. What is computed of such
    products alone, element by element (the sum of two gradients of a weight), turns with them.
    """
    turned = _read_transposed(program)
    if turned:
        items = [
            _transposed_elementwise(item) if _is_elementwise(item, turned) else item for item in program.operations
        ]
        # Reads first: a product that is itself rewritten then transposes what it reads by now.
        views = dict.fromkeys(turned, lambda spec: replace(spec, strides=dense_strides(spec.shape)))
        program = _substitute(program, items, views)
        items = [_transposed_product(item) if _is_product(item, turned) else item for item in program.operations]
        program = replace(program, operations=tuple(items))
    return map_bodies(program, canonicalize_transposed_mm)


def _read_transposed(program: Program) -> set[str]:
    """The products, and values of them element by element, whose every read that stays is of the transpose."""
    reads: dict[str, list[tuple[Item | None, TensorSpec]]] = {}
    for item in program.operations:
        for spec in item.tensor_inputs:
            reads.setdefault(spec.buffer, []).append((item, spec))
    for spec in program.outputs:
        reads.setdefault(spec.buffer, []).append((None, spec))
    declared = {spec.buffer: spec for spec in program.buffers()}
    matrices = [item for item in program.operations if _is_matrix(item) and item.outputs[0].buffer in reads]
    # Those with one reader turn as soon as that one does.
    ready: set[str] = set()
    for item in matrices:
        name = item.outputs[0].buffer
        if len(reads[name]) == 1 and (_is_product(item) or _may_turn(item, ready, declared)):
            ready.add(name)
    turned: set[str] = set()
    for item in reversed(matrices):
        out = item.outputs[0]
        wanted = all(
            (_whole_dense if _is_elementwise(reader, turned) else _transposed_dense)(spec, out)
            for reader, spec in reads[out.buffer]
        )
        if wanted and (_is_product(item) or _may_turn(item, ready, declared)):
            turned.add(out.buffer)
    return turned


def _is_matrix(item: Item) -> bool:
    """Whether an item makes matrices of several rows and columns, as products or element by element."""
    if not _is_product(item) and not _is_elementwise(item):
        return False
    out = item.outputs[0]
    return out.ndim >= 2 and min(out.shape[-2:]) > 1


def _may_turn(operation: Item, ready: Container[str], declared: Mapping[str, TensorSpec]) -> bool:
    """Whether all that an operation reads turns with it, is read transposed until then, or is the same either way."""
    turns = False
    for operand in operation.tensor_inputs:
        spec = operand.broadcast_to(operation.outputs[0].shape)
        own = declared[spec.buffer]
        if _transposed_dense(spec, own) or (spec.buffer in ready and _whole_dense(spec, own)):
            turns = True
        elif spec.strides[-2:] != (0, 0):
            return False
    return turns


def _is_product(item: Item | None, buffers: Container[str] | None = None) -> TypeGuard[Operation]:
    """Whether an item is a product, and its result one of the buffers."""
    return _makes(item, buffers) and item.op in ("mm", "addmm", "bmm")


def _is_elementwise(item: Item | None, buffers: Container[str] | None = None) -> TypeGuard[Operation]:
    """Whether an item computes each element from those at its place, and its result is one of the buffers."""
    return _makes(item, buffers) and kind_of(item) == "pointwise" and not OPS[item.op].indexed


def _transposed_elementwise(operation: Operation) -> Operation:
    shape = operation.outputs[0].shape
    return _across(operation, *(_turned_operand(operand, shape) for operand in operation.inputs))


def _turned_operand(operand: Operand, shape: tuple[int, ...]) -> Operand:
    """An operand that is read element by element for a result of that shape, for the transpose of it."""
    return operand.broadcast_to(shape).mT if isinstance(operand, TensorSpec) else operand


def _across(operation: Operation, *inputs: Operand) -> Operation:
    """The operation of other operands whose result is the transpose, in the same buffer."""
    out = operation.outputs[0]
    return replace(operation, inputs=inputs, output=TensorSpec.dense(out.buffer, out.mT.shape, out.dtype))


def _makes(item: Item | None, buffers: Container[str] | None) -> TypeGuard[Operation]:
    """Whether an operation's result is one of the buffers (None: any)."""
    return isinstance(item, Operation) and (buffers is None or item.outputs[0].buffer in buffers)


def _transposed_product(operation: Operation) -> Operation:
    *bias, a, b = operation.inputs
    assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
    shape = operation.outputs[0].shape
    return _across(operation, *(_turned_operand(operand, shape) for operand in bias), b.mT, a.mT)


def replace_outer_products(program: Program) -> Program:
    """Rewrite products of depth one with few rows or columns as multiplications.

    They (a derivative's direction times weights) fuse like any pointwise operation. Larger ones would be evaluated
    by every product that reads them: they stay products, with an epilogue.
    """
    items = [_outer_product(item) if _is_outer_product(item) else item for item in program.operations]
    return map_bodies(replace(program, operations=tuple(items)), replace_outer_products)


def _is_outer_product(item: Item) -> TypeGuard[Operation]:
    if not isinstance(item, Operation) or item.op not in ("mm", "bmm") or item.tensor_inputs[-1].shape[-2] != 1:
        return False
    return min(item.outputs[0].shape[-2:]) <= _MAX_OUTER_ROWS


def _outer_product(operation: Operation) -> Operation:
    shape = operation.outputs[0].shape
    return replace(operation, op="mul", inputs=tuple(spec.broadcast_to(shape) for spec in operation.tensor_inputs))


def remove_identity_casts(program: Program) -> Program:
    """Drop casts that copy a whole computed buffer to another of the same dtype."""
    declared = {spec.buffer: spec for item in program.operations for spec in item.outputs}
    views: dict[str, Callable[[TensorSpec], TensorSpec]] = {}
    items: list[Item] = []
    for item in program.operations:
        source = item.inputs[0] if isinstance(item, Operation) and item.op == "cast" else None
        if isinstance(source, TensorSpec) and source.buffer in declared:
            buffer, out = declared[source.buffer], item.outputs[0]
            whole = source.is_dense and source.num_elements == buffer.num_elements == out.num_elements
            if whole and source.dtype == out.dtype:
                name = source.buffer
                while name in views:
                    name = views[name](replace(source, buffer=name)).buffer
                views[out.buffer] = lambda spec, name=name: replace(spec, buffer=name)  # type: ignore[misc]
                continue
        items.append(item)
    program = _substitute(program, items, views) if views else program
    return map_bodies(program, remove_identity_casts)


def remove_empty_loops(program: Program) -> Program:
    """Replace each Loop that takes no step: its carries are their initial values, all else is empty."""
    items: list[Item] = []
    for item in program.operations:
        if isinstance(item, Loop) and _takes_no_step(item):
            carries = zip(item.outputs[: item.num_carry], item.inputs[item.num_constants :], strict=False)
            items += [Operation(out.buffer, "cast", (start,), out, {}, item.location) for out, start in carries]
            stacked = item.outputs[item.num_carry :]
            items += [Operation(out.buffer, "full", (), out, {"value": 0}, item.location) for out in stacked]
        else:
            items.append(item)
    return map_bodies(replace(program, operations=tuple(items)), remove_empty_loops)


def _takes_no_step(loop: Loop) -> bool:
    """Whether the length is 0, or dynamic with stacked tensors that have no room for a step."""
    if isinstance(loop.length, int):
        return loop.length == 0
    stacked = loop.inputs[len(loop.inputs) - loop.num_xs :] + loop.outputs[loop.num_carry :]
    return any(spec.shape[0] == 0 for spec in stacked)


def materialize_loop_operands(program: Program) -> Program:
    """Copy each Loop operand whose strides are not those that the body's input declares."""
    taken = {spec.buffer for spec in program.buffers()}
    items: list[Item] = []
    for item in program.operations:
        if isinstance(item, Loop):
            operands = []
            for position, (operand, inner) in enumerate(zip(item.inputs, item.body.inputs, strict=True)):
                first = 1 if position >= len(item.inputs) - item.num_xs else 0
                if isinstance(inner, TensorSpec) and not _same_strides(operand, inner, first):
                    copy = fresh(f"{item.outputs[0].buffer}_operand_{position}", taken)
                    spans = max(inner.last_index - inner.offset + 1, 0)
                    operand = _copy_operand(items, operand, inner, copy, spans, first)
                operands.append(operand)
            item = replace(item, inputs=tuple(operands))
        items.append(item)
    return map_bodies(replace(program, operations=tuple(items)), materialize_loop_operands)


def fresh(name: str, taken: set[str]) -> str:
    """A name that is not ``taken``, and is from now on."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _same_strides(operand: TensorSpec, inner: TensorSpec, first: int) -> bool:
    pairs = zip(inner.shape, operand.strides[first:], inner.strides, strict=True)
    return operand.num_elements == 0 or all(size == 1 or got == need for size, got, need in pairs)


def _copy_operand(
    items: list[Item], operand: TensorSpec, inner: TensorSpec, name: str, spans: int, first: int
) -> TensorSpec:
    """Append the copy of ``operand`` into a new buffer laid out as the body's input declares."""
    order = sorted(range(inner.ndim), key=lambda dim: -inner.strides[dim])
    dense = TensorSpec.dense(name, (*operand.shape[:first], *(inner.shape[dim] for dim in order)), inner.dtype)
    permuted = [0] * inner.ndim
    for place, dim in enumerate(order):
        permuted[dim] = dense.strides[first + place]
    view = TensorSpec(name, operand.shape, (*dense.strides[:first], *permuted), 0, inner.dtype)
    if not _same_strides(view, inner, first) or spans != inner.num_elements:
        from trainkernel.errors import ProgramError

        raise ProgramError(f"loop operand {operand} cannot be laid out as the body's input {inner}, which has gaps")
    strides = (*operand.strides[:first], *(operand.strides[first + dim] for dim in order))
    source = TensorSpec(operand.buffer, dense.shape, strides, operand.offset, operand.dtype)
    items.append(Operation(name, "cast", (source,), dense, {}))
    return view


def normalize(program: Program) -> Program:
    """All passes that ``generate`` runs before it plans products, in order."""
    program = eliminate_dead(program)
    program = remove_empty_loops(program)
    program = canonicalize_transposed_mm(program)
    program = replace_outer_products(program)
    program = remove_identity_casts(program)
    program = materialize_loop_operands(program)
    return eliminate_dead(program)


def scalar_names(program: Program) -> frozenset[str]:
    """Names of the scalar inputs of a program."""
    return frozenset(spec.buffer for spec in program.inputs if isinstance(spec, ScalarSpec))
