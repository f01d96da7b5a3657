"""C++ text of values: operands, inlined operations and members of a task.

A ``TaskScope`` belongs to one task function and declares its pointers and what does not change
between elements. A ``ValueScope`` belongs to one block of statements inside it (a lambda, a loop
body): it emits one line per value and remembers each, so that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainkernel.access import operand_index
from trainkernel.dtypes import DTYPES
from trainkernel.indexing import Index, delinearize, variable
from trainkernel.ir import Operand, Operation, TensorSpec
from trainkernel.memory import Frame, Storage
from trainkernel.ops import OPS, float_literal, scale_of

PointerText = Callable[[Storage], str]


def uniform_buffers(frame: Frame) -> tuple[str, ...]:
    """Inlined values that depend on scalars by value alone, in the outermost program, in order.

    They are the same for the whole launch (an optimizer's bias corrections), so the kernel
    computes them once at its start.
    """
    if frame.parent is not None:
        return ()
    known = {spec.buffer for spec in frame.schedule.program.scalar_inputs}
    found = []
    for item in frame.schedule.program.operations:
        name = item.outputs[0].buffer
        inlined = name in frame.schedule.inlined and item.outputs[0].num_elements == 1
        if inlined and item.tensor_inputs and all(spec.buffer in known for spec in item.tensor_inputs):
            known.add(name)
            found.append(name)
    return tuple(found)


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
    """

    def __init__(self, frame: Frame, base: PointerText, scalar: PointerText, hoist: bool) -> None:
        self.frame = frame
        self.uniform = uniform_buffers(frame)
        self.inlined = frame.schedule.inlined
        self.hoist = hoist
        self.pointers: list[str] = []
        self.constants = ValueScope(self, {}, None)
        self._base = base
        self._scalar = scalar
        self._declared: set[str] = set()
        self._names: dict[str, int] = {}

    def fresh(self, buffer: str) -> str:
        """A variable for an element of a buffer: ``v_x``, then ``v2_x``, which no other buffer can claim."""
        count = self._names.get(buffer, 0) + 1
        self._names[buffer] = count
        return f"v_{buffer}" if count == 1 else f"v{count}_{buffer}"

    def read(self, buffer: str, index: Index) -> str:
        """The C expression that reads one element as float32."""
        storage = self.frame.storage(buffer)
        if storage.space == "scalar":
            text = self._scalar(storage)
            return text if storage.dtype == "float32" else f"(float){text}"
        element = f"{self.pointer(buffer, storage, const=True)}[{index}]"
        return element if storage.dtype == "float32" else f"tk_value({element})"

    def pointer(self, buffer: str, storage: Storage, *, const: bool) -> str:
        """The name of the typed pointer to a buffer, declared at the top of the function.

        The same storage may be read under one name and written under another.
        """
        name = f"{'b' if const else 'w'}_{buffer}"
        if name not in self._declared:
            self._declared.add(name)
            kind = ("const " if const else "") + DTYPES[storage.dtype].cuda
            text = f"({kind}*)({self._base(storage)})"
            for step, stride in storage.steps:
                text += f" + (long long){step} * {stride}"
            if storage.element_offset:
                sign = "+" if storage.element_offset > 0 else "-"
                text += f" {sign} {abs(storage.element_offset)}"
            self.pointers.append(f"{kind}* {name} = {text};")
        return name

    def prologue(self) -> list[str]:
        """Lines at the top of the function."""
        return self.pointers + self.constants.lines


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
        self.lines: list[str] = []

    def operand(self, operand: Operand, coordinates: Sequence[Index]) -> str:
        """The C expression of an operand at its consumer's coordinates."""
        if not isinstance(operand, TensorSpec):
            return float_literal(operand)
        return self.element(operand.buffer, operand_index(operand, coordinates))

    def element(self, buffer: str, index: Index) -> str:
        """The variable that holds one element of a buffer, rounded to the buffer's dtype."""
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
            self.lines.append(f"const float {name} = {text};")
            self._known[buffer, index] = name
        return self._known[buffer, index]

    def member(self, operation: Operation, element: Index) -> str:
        """Compute a member of the task at its element and keep it in a register."""
        out = operation.outputs[0]
        text = self.pointwise(operation, delinearize(element, out.shape))
        name = self._task.fresh(out.buffer)
        self.lines.append(f"const float {name} = {text};")
        self._registers[out.buffer] = name
        return name

    def pointwise(self, operation: Operation, coordinates: Sequence[Index]) -> str:
        """The C expression of a pointwise operation, rounded to its output's dtype."""
        dtype = operation.outputs[0].dtype
        if operation.op == "combine_partials":
            return rounded(self._combine(operation, coordinates), dtype)
        arguments = [self.operand(operand, coordinates) for operand in operation.inputs]
        expression = OPS[operation.op].cuda
        assert expression is not None
        return rounded(expression(arguments, operation.attrs), dtype)

    def _combine(self, operation: Operation, coordinates: Sequence[Index]) -> str:
        partials, *bias = operation.inputs
        assert isinstance(partials, TensorSpec)
        count = partials.shape[0]
        index = operand_index(partials, (variable("s", count), *coordinates))
        kind = {"sum": "TkSum", "max": "TkMax"}[operation.attrs["reduce"]]
        body = self._task.read(partials.buffer, index)
        total = f"tk_combine<{kind}, {count}>([&](int s) {{ return {body}; }})"
        return self.scaled(total, operation, bias, coordinates)

    def scaled(self, total: str, operation: Operation, bias: Sequence[Operand], coordinates: Sequence[Index]) -> str:
        """``alpha * total + beta * bias``, or ``total / divisor``, with one rounding."""
        attrs = operation.attrs
        if attrs.get("divisor", 1) != 1:
            return f"__fdiv_rn({total}, {float_literal(attrs['divisor'])})"
        alpha, beta = scale_of(attrs, "alpha"), scale_of(attrs, "beta")
        if not bias or beta == 0:
            return total if alpha == 1 else f"__fmul_rn({float_literal(float(alpha))}, {total})"
        term = self.operand(bias[0], coordinates)
        if alpha == 1:
            return (
                f"__fadd_rn({total}, {term})"
                if beta == 1
                else f"__fmaf_rn({float_literal(float(beta))}, {term}, {total})"
            )
        if beta == 1:
            return f"__fmaf_rn({float_literal(float(alpha))}, {total}, {term})"
        # Products of two float32 are exact in float64, so the sum is rounded once.
        first = f"(double){float_literal(float(alpha))} * (double){total}"
        return f"(float)({first} + (double){float_literal(float(beta))} * (double){term})"


def rounded(expression: str, dtype: str) -> str:
    """The expression rounded to a dtype and read back as float32."""
    return expression if dtype == "float32" else f"tk_round_{dtype}({expression})"


def store(pointer: str, index: Index | str, value: str, dtype: str) -> str:
    """The statement that writes one element."""
    if dtype == "float32":
        return f"{pointer}[{index}] = {value};"
    return f"tk_store({pointer}[{index}], {value});"
