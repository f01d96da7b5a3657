"""From a traced function to a Program: views become TensorSpecs, nodes Operations, loops Loops.

What no output needs is dropped first, through loops too: a carry, a stacked result or a saved
carry that nobody reads is no part of the Loop. Constants that are one number become literals.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from trainkernel.dtypes import DTYPES, name_of_numpy
from trainkernel.errors import TraceError
from trainkernel.ir import InputSpec, Item, Loop, Operation, Program, ScalarSpec, TensorSpec, dense_strides
from trainkernel.ops import OPS
from trainkernel.ops.views import broadcast_array
from trainkernel.reference import apply
from trainkernel.structure import loop_operands
from trainkernel.trace import Array, Body, Node, aval_of, is_scalar, nodes_of

# ---------------------------------------------------------------------------- what is needed


@dataclass(frozen=True)
class LiveLoop:
    """What of a loop is needed: positions of its carries, results, saved carries and operands; of its body, nodes."""

    carries: tuple[int, ...]
    results: tuple[int, ...]
    saved: tuple[int, ...]
    constants: tuple[int, ...]
    xs: tuple[int, ...]
    body: Liveness


@dataclass
class Liveness:
    """The nodes behind some outputs that are needed, in order, and the needed part of each loop."""

    nodes: list[Node] = field(default_factory=list)
    loops: dict[int, LiveLoop] = field(default_factory=dict)
    arrays: set[int] = field(default_factory=set)


def find_live(outputs: Iterable[Any]) -> Liveness:
    """Walk backwards from the outputs."""
    outputs = list(outputs)
    live = Liveness(arrays={id(out) for out in outputs if isinstance(out, Array)})
    for node in reversed(nodes_of(outputs)):
        needed = [position for position, out in enumerate(node.outputs) if id(out) in live.arrays]
        if not needed:
            continue
        live.nodes.append(node)
        operands = node.inputs
        if node.op == "loop":
            live.loops[id(node)] = _live_loop(node, needed)
            operands = _live_operands(node, live.loops[id(node)])
        elif node.op == "call":
            inner = find_live(node.attrs["body"].outputs[position] for position in needed)
            pairs = zip(node.attrs["body"].parameters, node.inputs, strict=True)
            operands = tuple(operand for parameter, operand in pairs if id(parameter) in inner.arrays)
        live.arrays.update([id(operand) for operand in operands if isinstance(operand, Array)])
    live.nodes.reverse()
    return live


def _live_loop(node: Node, needed: Sequence[int]) -> LiveLoop:
    attrs, body = node.attrs, node.attrs["body"]
    num_carry, num_results = attrs["num_carry"], len(body.outputs) - attrs["num_carry"]
    results = tuple(p - num_carry for p in needed if num_carry <= p < num_carry + num_results)
    saved = tuple(p - num_carry - num_results for p in needed if p >= num_carry + num_results)
    carries = {p for p in needed if p < num_carry} | set(saved)
    first_carry = len(body.parameters) - attrs["num_xs"] - num_carry
    first_xs = first_carry + num_carry
    while True:
        wanted = [body.outputs[p] for p in sorted(carries)] + [body.outputs[num_carry + p] for p in results]
        live = find_live(wanted)
        arrays = live.arrays
        read = {p for p in range(num_carry) if id(body.parameters[first_carry + p]) in arrays}
        if read <= carries:
            break
        carries |= read
    return LiveLoop(
        tuple(sorted(carries)),
        results,
        saved,
        tuple(p for p in range(first_carry) if id(body.parameters[p]) in arrays),
        tuple(p for p in range(attrs["num_xs"]) if id(body.parameters[first_xs + p]) in arrays),
        live,
    )


def _live_operands(node: Node, live: LiveLoop) -> tuple[Any, ...]:
    constants, carry, xs, length = loop_operands(node)
    operands = [constants[p] for p in live.constants] + [carry[p] for p in live.carries] + [xs[p] for p in live.xs]
    return (*operands, *((length,) if isinstance(length, Array) else ()))


# ---------------------------------------------------------------------------- views


@dataclass(frozen=True)
class Constant:
    """A tensor all of whose elements are one number."""

    value: float
    shape: tuple[int, ...]
    dtype: str


def view_of(spec: TensorSpec, node: Node) -> TensorSpec | None:
    """The TensorSpec of a view node's result; None for a reshape that needs a copy."""
    attrs = node.attrs
    if node.op == "stop_gradient":
        return spec
    if node.op == "transpose":
        dims = attrs["dims"]
        return _without_dims(spec, dims)
    if node.op == "broadcast":
        return _broadcast_view(spec, attrs["shape"], attrs["dims"])
    if node.op == "slice":
        return _slice_view(spec, attrs)
    strides = reshaped_strides(spec.shape, spec.strides, attrs["shape"])
    return None if strides is None else spec.view(tuple(attrs["shape"]), strides)


def _broadcast_view(spec: TensorSpec, shape: tuple[int, ...], dims: Sequence[int]) -> TensorSpec:
    strides = [0] * len(shape)
    for size, stride, dim in zip(spec.shape, spec.strides, dims, strict=True):
        strides[dim] = stride if size == shape[dim] and size != 1 else 0
    return spec.view(tuple(shape), tuple(strides))


def _broadcast_to(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """A view in a shape to which NumPy's rules broadcast it."""
    if spec.shape == shape:
        return spec
    return _broadcast_view(spec, shape, range(len(shape) - spec.ndim, len(shape)))


def _slice_view(spec: TensorSpec, attrs: Mapping[str, Any]) -> TensorSpec:
    bounds = list(zip(attrs["start"], attrs["limit"], attrs["stride"], strict=True))
    shape = tuple(-(-(limit - start) // step) for start, limit, step in bounds)
    offset = spec.offset
    if prod(shape):
        offset += sum(start * stride for (start, _, _), stride in zip(bounds, spec.strides, strict=True))
    strides = tuple(stride * step for stride, (_, _, step) in zip(spec.strides, bounds, strict=True))
    return TensorSpec(spec.buffer, shape, strides, offset, spec.dtype)


def reshaped_strides(shape: Sequence[int], strides: Sequence[int], new_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a view in another shape; None if no view has it."""
    if prod(shape) == 0:
        return dense_strides(tuple(new_shape))
    old = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    result: list[int] = []
    position = 0
    pending: list[int] = []  # new sizes, innermost last, of the run of old dims under way
    run = 1
    for size in new_shape:
        if size == 1:
            pending.append(1)
            continue
        pending.append(size)
        run *= size
        group, covered = position, 1
        while group < len(old) and covered < run:
            covered *= old[group][0]
            group += 1
        if covered != run:
            continue  # more new dims belong to this run of old ones
        strides_of_run = _merge(old[position:group], pending)
        if strides_of_run is None:
            return None
        result += strides_of_run
        position, pending, run = group, [], 1
    if run != 1 or position != len(old):
        return None
    return tuple(result + [1] * len(pending))


def _merge(old: Sequence[tuple[int, int]], new: Sequence[int]) -> list[int] | None:
    """Strides of new dims over a run of old ones, which must lie like one dim."""
    for (_, outer), (size, inner) in pairwise(old):
        if outer != size * inner:
            return None
    step = old[-1][1]
    strides: list[int] = []
    for size in reversed(new):
        strides.append(step)
        step *= size
    return strides[::-1]


# ---------------------------------------------------------------------------- programs


Value = Any  # TensorSpec, Constant, or a Python number


@dataclass
class Assembly:
    """A Program under construction; ``names`` are taken, ``values`` are known by id of the array."""

    inputs: list[InputSpec] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    values: dict[int, Value] = field(default_factory=dict)
    captured: list[np.ndarray[Any, Any]] = field(default_factory=list)
    _captured_specs: dict[int, TensorSpec] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _known: dict[Any, tuple[TensorSpec, ...]] = field(default_factory=dict)

    def fresh(self, hint: str) -> str:
        """A buffer name that is not taken yet."""
        base = _identifier(hint)
        name, count = base, self._counts.get(base, 1)
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self.names.add(name)
        self._counts[base] = count
        return name

    def add_input(self, array: Array, spec: InputSpec) -> None:
        """Declare an input and what it stands for."""
        self.inputs.append(spec)
        self.values[id(array)] = spec.spec if isinstance(spec, ScalarSpec) else spec

    def value(self, operand: Any) -> Value:
        """The value of an operand: an Array, an ndarray or a Python number."""
        if isinstance(operand, Array):
            return self.values[id(operand)]
        return operand if is_scalar(operand) else self._capture(operand)

    def _capture(self, array: np.ndarray[Any, Any]) -> Value:
        """A constant array: a number where all elements are the same, else an input of its own."""
        if array.size and _is_one_number(array):
            return Constant(array.flat[0].item(), array.shape, str(name_of_numpy(array.dtype)))
        if id(array) not in self._captured_specs:
            spec = TensorSpec.dense(self.fresh("constant"), array.shape, str(name_of_numpy(array.dtype)))
            self.captured.append(np.array(array, order="C"))  # as it is now: a later change is not seen
            self._captured_specs[id(array)] = spec
        return self._captured_specs[id(array)]

    def tensor(self, operand: Any, location: str | None = None) -> TensorSpec:
        """The operand as a tensor: a constant is stored, if need be."""
        value = self.value(operand)
        if isinstance(value, TensorSpec):
            return value
        if not isinstance(value, Constant):
            aval = aval_of(value)
            value = Constant(value, (), aval.dtype)
        return self.operation("full", (), value.shape, value.dtype, {"value": _number(value)}, location)

    def operation(
        self,
        op: str,
        inputs: Sequence[Any],
        shape: tuple[int, ...],
        dtype: str,
        attrs: Mapping[str, Any],
        location: str | None,
    ) -> TensorSpec:
        """Append an Operation with one output."""
        return self.operations(op, inputs, [(shape, dtype)], attrs, location)[0]

    def operations(
        self,
        op: str,
        inputs: Sequence[Any],
        results: Sequence[tuple[tuple[int, ...], str]],
        attrs: Mapping[str, Any],
        location: str | None,
        recomputation: object = None,
    ) -> tuple[TensorSpec, ...]:
        """Append an Operation, unless an equal one is there; one of another recomputation is not equal."""
        operands = [value if isinstance(value, TensorSpec) else (type(value), repr(value)) for value in inputs]
        key = (op, tuple(operands), tuple(results), repr(sorted(attrs.items())) if attrs else "", recomputation)
        outs = self._known.get(key)
        if outs is None:
            outs = tuple([TensorSpec.dense(self.fresh(op), shape, dtype) for shape, dtype in results])
            output = outs[0] if len(outs) == 1 else outs
            self.items.append(Operation(outs[0].buffer, op, tuple(inputs), output, attrs, location))
            self._known[key] = outs
        return outs

    def copy(self, spec: TensorSpec, location: str | None = None) -> TensorSpec:
        """The values of a view in a buffer of their own."""
        out = TensorSpec.dense(self.fresh("copy"), spec.shape, spec.dtype)
        self.items.append(Operation(out.buffer, "cast", (spec,), out, {}, location))
        return out

    # ------------------------------------------------------------------ nodes

    def nodes(self, live: Liveness) -> None:
        """Append everything that some outputs need."""
        for node in live.nodes:
            if node.op == "parameter":
                continue
            if node.op == "alias":
                self.values[id(node.outputs[0])] = self.value(node.inputs[0])
            elif node.op == "call":
                self._call(node, live)
            elif node.op == "loop":
                self._loop(node, live.loops[id(node)])
            else:
                self._op(node)

    def _op(self, node: Node) -> None:
        op = OPS[node.op]
        out = node.outputs[0]
        if node.op == "full":
            self.values[id(out)] = Constant(node.attrs["value"], out.shape, out.aval.dtype)
        elif op.kind == "view":
            self.values[id(out)] = self._view(node)
        elif node.op == "cast" and self._is_identity(node):
            self.values[id(out)] = self.value(node.inputs[0])
        elif op.kind == "pointwise" and not op.indexed:
            self._pointwise(node)
        else:
            self._other(node)

    def _is_identity(self, node: Node) -> bool:
        value = self.value(node.inputs[0])
        return isinstance(value, (TensorSpec, Constant)) and value.dtype == node.outputs[0].aval.dtype

    def _view(self, node: Node) -> Value:
        value = self.value(node.inputs[0])
        if isinstance(value, Constant):
            return replace(value, shape=node.outputs[0].shape)
        if is_scalar(value):
            return Constant(value, node.outputs[0].shape, node.outputs[0].aval.dtype)
        view = view_of(value, node)
        if view is None:
            return self.copy(value, node.location).reshape(node.outputs[0].shape)
        return view

    def _pointwise(self, node: Node) -> None:
        values = [self.value(operand) for operand in node.inputs]
        tensors = [position for position, value in enumerate(values) if isinstance(value, TensorSpec)]
        if not tensors:
            self.values[id(node.outputs[0])] = _folded(node, values)
            return
        operands = [_number(value) if isinstance(value, Constant) else value for value in values]
        same = _unchanged(node, operands)
        if same is not None:
            self.values[id(node.outputs[0])] = same
            return
        data = OPS[node.op].data_operands
        if data is not None and not set(data) & set(tensors):
            # Numbers alone would lose their dtype, which decides how the operation computes.
            first = data[0] if isinstance(values[data[0]], Constant) else data[-1]
            operands[first] = self._zero_dim(node.inputs[first], values[first], node.location)
        self._append_narrow(node, operands)

    def _zero_dim(self, operand: Any, value: Value, location: str | None) -> TensorSpec:
        """A number as a tensor without dims."""
        if not isinstance(value, Constant):
            return self.tensor(operand, location)
        return self.operation("full", (), (), value.dtype, {"value": _number(value)}, location)

    def _append_narrow(self, node: Node, operands: Sequence[Any]) -> None:
        """A pointwise operation without the dims along which all of its operands repeat: the result repeats too."""
        (out,) = node.outputs
        shape = out.aval.shape
        whole = [_broadcast_to(value, shape) if isinstance(value, TensorSpec) else value for value in operands]
        strides = [value.strides for value in whole if isinstance(value, TensorSpec)]
        kept: Sequence[int] = range(len(shape))
        if all(0 in steps for steps in strides):
            kept = [dim for dim, size in enumerate(shape) if size <= 1 or any(steps[dim] for steps in strides)]
        repeats = len(kept) < len(shape)
        if repeats:
            whole = [_without_dims(value, kept) if isinstance(value, TensorSpec) else value for value in whole]
        result = (tuple([shape[dim] for dim in kept]), out.aval.dtype)
        (spec,) = self.operations(node.op, whole, [result], node.attrs, node.location, node.recomputation)
        self.values[id(out)] = _broadcast_view(spec, shape, kept) if repeats else spec

    def _other(self, node: Node) -> None:
        """Reductions, products, scans, indexed operations."""
        op = OPS[node.op]
        operands = []
        for operand in node.inputs:
            value = self.value(operand)
            if op.scalar_operands and not isinstance(value, TensorSpec) and aval_of(operand).shape == ():
                operands.append(_number(value) if isinstance(value, Constant) else value)
            else:
                operands.append(self.tensor(operand, node.location))
        self._append(node, operands)

    def _append(self, node: Node, operands: Sequence[Any]) -> None:
        results = [(out.shape, out.aval.dtype) for out in node.outputs]
        specs = self.operations(node.op, operands, results, node.attrs, node.location, node.recomputation)
        self.values.update((id(out), spec) for out, spec in zip(node.outputs, specs, strict=True))

    # ------------------------------------------------------------------ calls and loops

    def _call(self, node: Node, live: Liveness) -> None:
        """A body's nodes in place of its call; each call has values of its own."""
        body = node.attrs["body"]
        needed = [position for position, out in enumerate(node.outputs) if id(out) in live.arrays]
        pairs = zip(body.parameters, node.inputs, strict=True)
        known = {id(p): self.value(operand) for p, operand in pairs if self.knows(operand)}
        inner = replace(self, values=known)  # it appends to the same Program
        inner.nodes(find_live(body.outputs[position] for position in needed))
        for position in needed:
            self.values[id(node.outputs[position])] = inner.value(body.outputs[position])

    def knows(self, operand: Any) -> bool:
        """Whether an operand has a value; one that is not needed has none."""
        return not isinstance(operand, Array) or id(operand) in self.values

    def _loop(self, node: Node, live: LiveLoop) -> None:
        constants, carry, xs, length = loop_operands(node)
        body: Body = node.attrs["body"]
        first_carry = len(constants)
        first_xs = first_carry + len(carry)
        inner = Assembly()
        operands: list[TensorSpec] = []
        for position in live.constants:
            self._loop_constant(inner, operands, body.parameters[position], constants[position])
        length_name = self._loop_length(length, node)
        num_constants = len(operands)
        carries = [(body.parameters[first_carry + p], carry[p]) for p in live.carries]
        for parameter, operand in carries:
            spec = self.tensor(operand, node.location)
            spec = self.copy(spec, node.location) if self._by_value(spec) else spec
            operands.append(spec)
            dense = TensorSpec.dense(inner.fresh(spec.buffer), spec.shape, spec.dtype)
            inner.add_input(parameter, dense)
        for position in live.xs:
            spec = self.tensor(xs[position], node.location)
            operands.append(spec)
            slice_of = TensorSpec(inner.fresh(spec.buffer), spec.shape[1:], spec.strides[1:], 0, spec.dtype)
            inner.add_input(body.parameters[first_xs + position], slice_of)
        num_carry = node.attrs["num_carry"]
        results = [body.outputs[p] for p in live.carries]
        results += [body.outputs[num_carry + p] for p in live.results]
        inner.nodes(live.body)
        saved = [body.parameters[first_carry + p] for p in live.saved]
        body_outputs = [inner.tensor(out, node.location) for out in (*results, *saved)]
        outs = self._loop_outputs(node, live, body_outputs)
        program = inner.program(body_outputs)
        assert not inner.captured
        loop_item = Loop(
            outs[0].buffer if outs else "loop",
            program,
            tuple(operands),
            tuple(outs),
            len(carries),
            len(live.xs),
            length_name,
            node.attrs["reverse"],
            node.location,
        )
        assert num_constants == loop_item.num_constants
        self.items.append(loop_item)

    def _loop_constant(self, inner: Assembly, operands: list[TensorSpec], parameter: Array, operand: Any) -> None:
        """A constant of a loop's body: a number stays one, a scalar by value too, else it is an operand."""
        value = self.value(operand)
        if not isinstance(value, TensorSpec):
            inner.values[id(parameter)] = value
            return
        by_value = self._by_value(value)
        outside = replace(value, shape=(), strides=()) if by_value else value
        if outside not in operands:
            operands.append(outside)
            name = inner.fresh(value.buffer)
            dense = TensorSpec(name, value.shape, value.strides, 0, value.dtype)
            inner.inputs.append(ScalarSpec(name, value.dtype) if by_value else dense)
        name = inner.inputs[operands.index(outside)].buffer
        inner.values[id(parameter)] = replace(value, buffer=name, offset=0)

    def _by_value(self, spec: TensorSpec) -> bool:
        """Whether a tensor is a view of a scalar that is passed by value."""
        return any(isinstance(i, ScalarSpec) and i.buffer == spec.buffer for i in self.inputs)

    def _loop_length(self, length: int | Array, node: Node) -> int | str:
        if isinstance(length, int):
            return length
        spec = self.value(length)
        if isinstance(spec, Constant):
            return int(spec.value)
        if not isinstance(spec, TensorSpec) or not self._by_value(spec) or spec.shape or spec.dtype != "int32":
            raise TraceError(
                "the length of a loop must be a Python int, or an int argument of the jitted function itself "
                f"(it is passed by value at each launch; a NumPy integer is an array, int(length) is none)\n"
                f"  at {node.location}"
            )
        return spec.buffer

    def _loop_outputs(self, node: Node, live: LiveLoop, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        num_carry = node.attrs["num_carry"]
        num_results = len(node.outputs) - 2 * num_carry
        positions = list(live.carries)
        positions += [num_carry + p for p in live.results]
        positions += [num_carry + num_results + p for p in live.saved]
        outs = []
        for position, spec in zip(positions, specs, strict=True):
            out = node.outputs[position]
            dense = TensorSpec.dense(self.fresh(spec.buffer), out.shape, out.aval.dtype)
            outs.append(dense)
            self.values[id(out)] = dense
        return outs

    def program(self, outputs: Sequence[TensorSpec]) -> Program:
        """The Program so far; captured constants are its last inputs."""
        return Program((*self.inputs, *self._captured_specs.values()), tuple(self.items), tuple(outputs))


@functools.cache
def _identifier(hint: str) -> str:
    """The start of a buffer's name."""
    base = re.sub(r"[^A-Za-z0-9_]+", "_", hint).strip("_")[:60] or "x"
    return f"x{base}" if base[0].isdigit() else base


def _is_one_number(array: np.ndarray[Any, Any]) -> bool:
    """Whether all elements are one number, also in the sign of zero; NaN is no number."""
    first = array.flat[0]
    return bool((array == first).all() and (first != 0 or (np.signbit(array) == np.signbit(first)).all()))


def _unchanged(node: Node, operands: Sequence[Any]) -> TensorSpec | None:
    """The operand that a product or quotient by 1 is, bit for bit."""
    if node.op not in ("mul", "div") or node.outputs[0].aval.dtype == "bool":
        return None
    first, second = operands
    pairs = ((first, second),) if node.op == "div" else ((first, second), (second, first))
    for value, number in pairs:
        if isinstance(value, TensorSpec) and not isinstance(number, TensorSpec) and number == 1:
            return value if value.dtype == node.outputs[0].aval.dtype else None
    return None


def _folded(node: Node, values: Sequence[Any]) -> Constant:
    """A pointwise operation on numbers, as the reference computes it."""
    out = node.outputs[0]
    operands = [
        np.asarray(value.value, DTYPES[value.dtype].numpy) if isinstance(value, Constant) else value for value in values
    ]
    with np.errstate(all="ignore"):
        (result,) = apply(node.op, operands, node.attrs, [TensorSpec.dense("x", (), out.aval.dtype)])
    return Constant(result.item(), out.shape, out.aval.dtype)


def _without_dims(spec: TensorSpec, kept: Sequence[int]) -> TensorSpec:
    """A view of the dims that are kept, in their order, at the first place of all others."""
    return spec.view(tuple([spec.shape[d] for d in kept]), tuple([spec.strides[d] for d in kept]))


def _number(constant: Constant) -> float:
    """A Constant as an operand: bools are 0 and 1."""
    return int(constant.value) if isinstance(constant.value, bool) else constant.value


__all__ = ["Assembly", "broadcast_array", "find_live", "reshaped_strides"]
