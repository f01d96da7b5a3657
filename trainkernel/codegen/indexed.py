"""C++ text of the indexed operations: pointwise ones that read their operands elsewhere.

A coordinate that is known on the device only becomes a variable (``const tk_index c_1 = ...``),
and index arithmetic goes on with it as an atom of the operand's range. ``trainkernel.access``
follows the same operands without code: a coordinate that it keeps must be kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainkernel.access import clamped_start, concatenated_parts
from trainkernel.arithmetic import domain_of, operand_domains
from trainkernel.codegen.conversions import C_TYPES
from trainkernel.indexing import ZERO, Index, linearize
from trainkernel.ir import Operation, TensorSpec, dense_strides
from trainkernel.ops import wrap_dim

if TYPE_CHECKING:
    from trainkernel.codegen.values import ValueScope

Coordinates = Sequence[Index]


def emit_indexed(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    """The C expression of an indexed operation at its output's coordinates, in its domain."""
    return _EMITTERS[operation.op](values, operation, coordinates)


def _data(values: ValueScope, operation: Operation, position: int, coordinates: Coordinates) -> str:
    """An operand in the operation's domain."""
    return values.operand(operation.inputs[position], coordinates, operand_domains(operation)[position])


def _clamped(values: ValueScope, text: str, size: int) -> Index:
    """The variable that holds a number clamped to ``range(size)``; 0 where that is all there is."""
    if size == 1:
        return ZERO
    values.use_template("indexed")
    return values.coordinate(f"tk_clamp({text}, {size - 1})", size)


def _term(index: Index) -> str:
    """An index as an operand of an arithmetic expression."""
    is_atom = len(index.terms) == 1 and index.constant == 0 and index.terms[0][1] == 1
    return str(index) if is_atom or not index.terms else f"({index})"


# ---------------------------------------------------------------------------- each operation


def _iota(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    last = coordinates[-1] if coordinates else ZERO
    return f"({C_TYPES[domain_of(operation)]}){_term(last)}"


def _flip(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    shape, places = operation.outputs[0].shape, list(coordinates)
    for dim in operation.attrs["dims"]:
        at = wrap_dim(dim, len(shape))
        places[at] = values.coordinate(f"{shape[at] - 1} - {_term(coordinates[at])}", shape[at])
    return _data(values, operation, 0, places)


def _pad(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    """The operand at the nearest of its elements, kept only where that is not beside the place asked for."""
    x = operation.inputs[0]
    assert isinstance(x, TensorSpec)
    value = _data(values, operation, 1, ())
    if x.num_elements == 0:
        return value
    places, conditions = list(coordinates), []
    sides = zip(operation.attrs["low"], operation.attrs["high"], operation.attrs["interior"], strict=True)
    for dim, (low, high, gap) in enumerate(sides):
        if low == high == gap == 0:
            continue
        moved = f"{coordinates[dim]} - {low}" if low else f"{coordinates[dim]}"
        if gap and x.shape[dim] > 1:
            places[dim] = _clamped(values, f"({moved}) / {gap + 1}", x.shape[dim])
            conditions.append(f"{moved} == {places[dim]} * {gap + 1}")
        else:
            places[dim] = _clamped(values, moved, x.shape[dim])
            conditions.append(f"{moved} == {places[dim]}")
    inside = _data(values, operation, 0, places)
    return f"({' && '.join(conditions)} ? {inside} : {value})" if conditions else inside


def _concatenate(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    """One branch per operand, so that each element is read from one of them only."""
    dim, parts = concatenated_parts(operation)
    if len(parts) == 1:
        return _data(values, operation, parts[0][0], coordinates)
    joined = values.unset("joined", C_TYPES[domain_of(operation)])
    for number, (position, first, size) in enumerate(parts):
        branch = values.branch()
        places = list(coordinates)
        places[dim] = branch.coordinate(f"{coordinates[dim]} - {first}" if first else f"{coordinates[dim]}", size)
        text = _data(branch, operation, position, places)
        head = f"if ({coordinates[dim]} < {first + size})" if number < len(parts) - 1 else ""
        values.lines.append(f"{'} else ' if number else ''}{head}{' ' if head else ''}{{")
        values.lines += [f"  {line}" for line in (*branch.lines, f"{joined} = {text};")]
    values.lines.append("}")
    return joined


def _take(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    x, indices = operation.inputs
    assert isinstance(x, TensorSpec) and isinstance(indices, TensorSpec)
    lead = indices.ndim
    row = ZERO
    if x.shape[0] > 1:
        row = _clamped(values, _data(values, operation, 1, coordinates[:lead]), x.shape[0])
    return _data(values, operation, 0, (row, *coordinates[lead:]))


def _start(values: ValueScope, operation: Operation, position: int, room: int) -> Index:
    """A window's start along one dim, clamped so that the window has ``room`` places to begin at."""
    known = clamped_start(operation.inputs[position], room)
    if known is not None:
        return Index((), known)
    scope = values.outside()
    return _clamped(scope, _data(scope, operation, position, ()), room)


def _dynamic_slice(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    x = operation.inputs[0]
    assert isinstance(x, TensorSpec)
    rooms = [whole - size + 1 for whole, size in zip(x.shape, operation.attrs["sizes"], strict=True)]
    starts = [_start(values, operation, 1 + dim, room) for dim, room in enumerate(rooms)]
    return _data(values, operation, 0, [at + start for at, start in zip(coordinates, starts, strict=True)])


def _dynamic_update(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    x, update = operation.inputs[:2]
    assert isinstance(x, TensorSpec) and isinstance(update, TensorSpec)
    outside = _data(values, operation, 0, coordinates)
    if update.num_elements == 0:
        return outside
    places, conditions = list(coordinates), []
    for dim, (whole, size) in enumerate(zip(x.shape, update.shape, strict=True)):
        if whole == size:
            continue
        start = _start(values, operation, 2 + dim, whole - size + 1)
        moved = f"{coordinates[dim]} - {start}" if start != ZERO else f"{coordinates[dim]}"
        places[dim] = _clamped(values, moved, size)
        conditions.append(f"{moved} == {places[dim]}")
    inside = _data(values, operation, 1, places)
    return f"({' && '.join(conditions)} ? {inside} : {outside})" if conditions else inside


def _random_bits(values: ValueScope, operation: Operation, coordinates: Coordinates) -> str:
    values.use_template("random")
    shape = operation.attrs["shape"]
    lead = coordinates[: len(coordinates) - len(shape)]
    element = linearize(coordinates[len(lead) :], dense_strides(tuple(shape)))
    domain = domain_of(operation)
    cast = "" if domain == "uint32" else "(unsigned)"
    key = [cast + _data(values, operation, 0, (*lead, Index((), word))) for word in range(2)]
    counter = cast + _data(values, operation, 1, lead) if len(operation.inputs) == 2 else "0u"
    bits = f"tk_random_bits({element}, {counter}, {operation.attrs['stream']}u, {', '.join(key)})"
    return bits if domain == "uint32" else f"({C_TYPES[domain]}){bits}"


_EMITTERS: Mapping[str, Callable[[ValueScope, Operation, Coordinates], str]] = {
    "iota": _iota,
    "flip": _flip,
    "pad": _pad,
    "concatenate": _concatenate,
    "take": _take,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update": _dynamic_update,
    "random_bits": _random_bits,
}
