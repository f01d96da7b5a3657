"""C++ text of values: operands, inlined operations and members of a task.

A ``TaskScope`` belongs to one task function and declares its pointers and what does not change
between elements. A ``ValueScope`` belongs to one block of statements inside it (a lambda, a loop
body): it emits one line per value and remembers each, so that nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainkernel.access import operand_index
from trainkernel.arithmetic import domain_of, operand_domains, scale_of
from trainkernel.codegen.conversions import C_TYPES, loaded, operand_in, register_type, rounded
from trainkernel.codegen.indexed import emit_indexed
from trainkernel.dtypes import DTYPES
from trainkernel.indexing import ZERO, Index, delinearize, variable
from trainkernel.ir import Operand, Operation, TensorSpec
from trainkernel.memory import Frame, Storage
from trainkernel.ops import OPS, literal

PointerText = Callable[[Storage], str]


def uniform_buffers(frame: Frame) -> tuple[str, ...]:
    """Inlined values that depend on scalars by value alone, in the outermost program, in order.

    They are the same for the whole launch (an optimizer's bias corrections), so the kernel
    computes them once at its start.
    """
    return frame.uniform_buffers


@dataclass(frozen=True)
class Pointer:
    """A typed pointer of a task: ``kind name = address;``."""

    kind: str
    name: str
    address: str

    @property
    def declaration(self) -> str:
        return f"{self.kind} {self.name} = {self.address};"


class TaskScope:
    """One task function: its pointers, and values that are the same for every element.

    Parameters
    ----------
    frame : Frame
    base : callable
        The C expression of the address behind a Storage.
    scalar : callable
        The C expression of a scalar by value.
    hoist : bool
        Whether values at a constant index are computed once at the top of the function.
    near : mapping of buffer name to Storage, optional
        Buffers that are read from copies in shared memory.

    Attributes
    ----------
    buffers_read : set of str
        The buffers that the function's text reads from memory.
    templates : set of str
        The prelude's files that the function's text calls.
    """

    def __init__(
        self,
        frame: Frame,
        base: PointerText,
        scalar: PointerText,
        hoist: bool,
        near: Mapping[str, Storage] | None = None,
    ) -> None:
        self.frame = frame
        self._near = near or {}
        self.uniform = uniform_buffers(frame)
        self.inlined = frame.schedule.inlined
        self.hoist = hoist
        self.pointers: list[Pointer] = []
        self.templates: set[str] = set()
        self.constants = ValueScope(self, {}, None)
        self._num_variables = 0
        self._base = base
        self._scalar = scalar
        self._declared: set[str] = set()
        self.buffers_read: set[str] = set()
        self._names: dict[str, int] = {}

    def fresh(self, buffer: str) -> str:
        """A variable for an element of a buffer: ``v_x``, then ``v2_x``, which no other buffer can claim."""
        count = self._names.get(buffer, 0) + 1
        self._names[buffer] = count
        return f"v_{buffer}" if count == 1 else f"v{count}_{buffer}"

    def fresh_variable(self, stem: str) -> str:
        """A variable that holds no element of a buffer: ``c_1``, ``c_2``."""
        self._num_variables += 1
        return f"{stem}_{self._num_variables}"

    def dtype(self, buffer: str) -> str:
        """The dtype of a buffer, which says how its elements are held in registers."""
        operation = self.inlined.get(buffer)
        return self.frame.storage(buffer).dtype if operation is None else operation.outputs[0].dtype

    def storage(self, buffer: str) -> Storage:
        """Where a buffer is read."""
        return self._near.get(buffer) or self.frame.storage(buffer)

    def read(self, buffer: str, index: Index) -> str:
        """The C expression that reads one element into a register of its dtype."""
        storage = self.storage(buffer)
        if storage.space == "scalar":
            return self._scalar(storage)
        return loaded(f"{self.pointer(buffer, storage, const=True)}[{storage.place(index)}]", storage.dtype)

    def rounded(self, expression: str, domain: str, dtype: str) -> str:
        """A result in a domain, converted to a dtype and held in that dtype's register."""
        if (domain, register_type(dtype)) != ("float32", "float"):
            self.templates.add("typed")
        return rounded(expression, domain, dtype)

    def declaration(self, name: str, dtype: str, text: str) -> str:
        """The statement that keeps a value of a dtype in a register."""
        return f"const {register_type(dtype)} {name} = {text};"

    def pointer(self, buffer: str, storage: Storage, *, const: bool, own_sum: bool = False) -> str:
        """The name of the typed pointer to a buffer, declared at the top of the function.

        The same storage may be read under one name and written under another; a partial result may lie in two.
        """
        name = f"{'b' if const else 's' if own_sum else 'w'}_{buffer}"
        if const:
            self.buffers_read.add(buffer)
        if name not in self._declared:
            self._declared.add(name)
            kind = ("const " if const else "") + DTYPES[storage.dtype].cuda
            text = f"({kind}*)({self._base(storage)})"
            for step, stride in storage.steps:
                text += f" + (long long){step} * {stride}"
            if storage.element_offset:
                sign = "+" if storage.element_offset > 0 else "-"
                text += f" {sign} {abs(storage.element_offset)}"
            self.pointers.append(Pointer(f"{kind}*", name, text))
        return name


class ValueScope:
    """One block of statements; ``lines`` are its statements so far.

    Parameters
    ----------
    task : TaskScope
    registers : mapping of buffer name to variable
        Values of this task that are in registers at ``element``.
    element : Index or None
        The task's own element.
    """

    def __init__(self, task: TaskScope, registers: dict[str, str], element: Index | None) -> None:
        self._task = task
        self._registers = registers
        self._element = element
        self._known: dict[tuple[str, Index], str] = {}
        self._coordinates: dict[tuple[str, int], Index] = {}
        self.lines: list[str] = []

    def operand(self, operand: Operand, coordinates: Sequence[Index], domain: str = "float32") -> str:
        """The C expression of an operand at its consumer's coordinates, in a domain."""
        if not isinstance(operand, TensorSpec):
            return literal(operand, domain)
        if self._is_negative_zero(operand):
            return literal(-0.0, domain)  # as a literal, which where looks for
        register = self.element(operand.buffer, operand_index(operand, coordinates))
        return operand_in(register, operand.dtype, domain)

    def _is_negative_zero(self, operand: TensorSpec) -> bool:
        """Whether an operand is float32's -0 everywhere."""
        operation = self._task.inlined.get(operand.buffer)
        if operation is None or operation.op != "full" or operand.dtype != "float32":
            return False
        value = operation.attrs["value"]
        return value == 0 and math.copysign(1.0, value) < 0

    def element(self, buffer: str, index: Index) -> str:
        """The variable that holds one element of a buffer in a register of the buffer's dtype."""
        if buffer in self._registers and index == self._element:
            return self._registers[buffer]
        if buffer in self._task.uniform:
            return f"u.v_{buffer}"
        if not index.terms and self._task.hoist and self is not self._task.constants:
            return self._task.constants.element(buffer, index)
        if (buffer, index) not in self._known:
            operation = self._task.inlined.get(buffer)
            if operation is None:
                text = self._task.read(buffer, index)
            else:
                text = self.pointwise(operation, delinearize(index, operation.outputs[0].shape))
            name = self._task.fresh(buffer)
            self.lines.append(self._task.declaration(name, self._task.dtype(buffer), text))
            self._known[buffer, index] = name
        return self._known[buffer, index]

    def member(self, operation: Operation, element: Index) -> str:
        """Compute a member of the task at its element and keep it in a register."""
        out = operation.outputs[0]
        text = self.pointwise(operation, delinearize(element, out.shape))
        name = self._task.fresh(out.buffer)
        self.lines.append(self._task.declaration(name, out.dtype, text))
        self._registers[out.buffer] = name
        return name

    def pointwise(self, operation: Operation, coordinates: Sequence[Index]) -> str:
        """The C expression of a pointwise operation, converted to its output's dtype."""
        domain = domain_of(operation)
        if operation.op == "combine_partials":
            text = self._combine(operation, domain, coordinates)
        elif OPS[operation.op].indexed:
            text = emit_indexed(self, operation, coordinates)
        else:
            pairs = zip(operation.inputs, operand_domains(operation), strict=True)
            arguments = [self.operand(operand, coordinates, own) for operand, own in pairs]
            text = OPS[operation.op].expression(arguments, operation.attrs, domain)
            dtypes = {spec.dtype for spec in (*operation.tensor_inputs, *operation.outputs)}
            if OPS[operation.op].picks and len(dtypes) == 1 and domain == "float32":
                return text
        return self._task.rounded(text, domain, operation.outputs[0].dtype)

    # ------------------------------------------------------------------ for indexed operations

    def coordinate(self, text: str, size: int) -> Index:
        """The variable that holds a coordinate in ``range(size)``; 0 where the range has no other."""
        if size <= 1:
            return ZERO
        if (text, size) not in self._coordinates:
            name = self._task.fresh_variable("c")
            self.lines.append(f"const tk_index {name} = {text};")
            self._coordinates[text, size] = variable(name, size)
        return self._coordinates[text, size]

    def unset(self, stem: str, c_type: str) -> str:
        """A variable for branches to set."""
        name = self._task.fresh_variable(stem)
        self.lines.append(f"{c_type} {name};")
        return name

    def branch(self) -> ValueScope:
        """A scope for a block inside this one, which sees all values computed so far."""
        inner = ValueScope(self._task, self._registers, self._element)
        inner._known, inner._coordinates = dict(self._known), dict(self._coordinates)
        return inner

    def outside(self) -> ValueScope:
        """The scope of what is the same for every element."""
        return self._task.constants if self._task.hoist else self

    def use_template(self, name: str) -> None:
        """Ask for a file of the prelude."""
        self._task.templates.add(name)

    def _combine(self, operation: Operation, domain: str, coordinates: Sequence[Index]) -> str:
        partials, *bias = operation.inputs
        assert isinstance(partials, TensorSpec)
        count = partials.shape[0]
        index = operand_index(partials, (variable("s", count), *coordinates))
        kind = reduce_type(operation.attrs["reduce"], domain, self._task.templates)
        body = self._task.read(partials.buffer, index)
        total = f"tk_combine<{kind}, {count}>([&](int s) {{ return {body}; }})"
        return self.scaled(total, operation, bias, coordinates)

    def scaled(self, total: str, operation: Operation, bias: Sequence[Operand], coordinates: Sequence[Index]) -> str:
        """``alpha * total + beta * bias``, or ``total / divisor``, in the operation's domain."""
        domain = domain_of(operation)
        if domain != "float32":
            return self._typed_scaled(total, operation, bias, coordinates, domain)
        attrs = operation.attrs
        if attrs.get("divisor", 1) != 1:
            return f"__fdiv_rn({total}, {literal(attrs['divisor'], domain)})"
        alpha, beta = scale_of(operation, "alpha"), scale_of(operation, "beta")
        if not bias or beta == 0:
            return total if alpha == 1 else f"__fmul_rn({literal(float(alpha), domain)}, {total})"
        term = self.operand(bias[0], coordinates)
        if alpha == 1:
            return (
                f"__fadd_rn({total}, {term})"
                if beta == 1
                else f"__fmaf_rn({literal(float(beta), domain)}, {term}, {total})"
            )
        if beta == 1:
            return f"__fmaf_rn({literal(float(alpha), domain)}, {total}, {term})"
        # Products of two float32 are exact in float64, so the sum is rounded once.
        first = f"(double){literal(float(alpha), domain)} * (double){total}"
        return f"(float)({first} + (double){literal(float(beta), domain)} * (double){term})"

    def _typed_scaled(
        self, total: str, operation: Operation, bias: Sequence[Operand], coordinates: Sequence[Index], domain: str
    ) -> str:
        """The same in another domain, step by step as the reference does it."""
        self._task.templates.add("typed")
        attrs = operation.attrs
        if attrs.get("divisor", 1) != 1:
            return f"tk_div({total}, {literal(attrs['divisor'], domain)})"
        alpha, beta = attrs.get("alpha", 1), attrs.get("beta", 1)
        if alpha != 1:
            total = f"tk_mul({literal(alpha, domain)}, {total})"
        if not bias or beta == 0:
            return total
        term = self.operand(bias[0], coordinates, domain)
        return f"tk_add({total}, {term if beta == 1 else f'tk_mul({literal(beta, domain)}, {term})'})"


_REDUCE_TYPES = {"sum": "Sum", "mean": "Sum", "max": "Max", "min": "Min", "prod": "Prod"}


def reduce_type(kind: str, domain: str, templates: set[str]) -> str:
    """The struct that merges two values of a reduction; adds its file to ``templates``."""
    if domain == "float32":
        if kind in ("min", "prod"):
            templates |= {"functions", "reduce_more"}
        return f"Tk{_REDUCE_TYPES[kind]}"
    templates |= {"typed", "typed_reduce"}
    return f"TkTyped{_REDUCE_TYPES[kind]}<{C_TYPES[domain]}>"
