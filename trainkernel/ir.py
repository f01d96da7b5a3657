"""The language: frozen dataclasses that a training step is written in.

::

    Program   = (inputs: (TensorSpec | ScalarSpec)*, operations: (Operation | Loop)*, outputs: TensorSpec*)
    Operation = (name, op, inputs: (TensorSpec | int | float)*, output: TensorSpec | TensorSpec*, attrs)
    Loop      = (name, body: Program, inputs: TensorSpec*, outputs: TensorSpec*, num_carry, num_xs, length, reverse)
    TensorSpec = (buffer, shape, strides, offset, dtype)      a view of a named buffer
    ScalarSpec = (buffer, dtype)                              a scalar passed by value

Each buffer is written once, in the order of ``operations``; an operation's outputs are whole new
buffers. Views (transpose, slice, stride-0 broadcast) are TensorSpecs over an existing buffer and
are never operations. ``trainkernel.validation`` holds the rules, ``trainkernel.ops`` the table of
operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

from trainkernel.dtypes import DTYPES
from trainkernel.errors import show

MAX_LENGTH = 2**31 - 1
"""The most steps of a Loop."""


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    strides = []
    step = 1
    for size in shape[::-1]:
        strides.append(step)
        if size > 1:
            step *= size
    return tuple(strides[::-1])


def _dims(values: tuple[int, ...]) -> str:
    return ",".join(show(value) for value in values)


def _short(dtype: str) -> str:
    return DTYPES[dtype].short if isinstance(dtype, str) and dtype in DTYPES else str(dtype)


@dataclass(frozen=True)
class TensorSpec:
    """A view of a named buffer; ``strides`` and ``offset`` are in elements."""

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple:
            object.__setattr__(self, "shape", tuple(self.shape))
        if type(self.strides) is not tuple:
            object.__setattr__(self, "strides", tuple(self.strides))

    @staticmethod
    def dense(buffer: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorSpec:
        """The row-major tensor that fills a buffer."""
        shape = tuple(shape)
        return TensorSpec(buffer, shape, dense_strides(shape), 0, dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie in row-major order without gaps (size-1 dims aside)."""
        if len(self.shape) != len(self.strides) or not all(isinstance(size, int) for size in self.shape):
            return False  # refused by validate, which must be able to print it
        pairs = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        return self.num_elements == 0 or all(size == 1 or got == need for size, got, need in pairs)

    @property
    def last_index(self) -> int:
        """Buffer index of the last element touched; ``offset - 1`` for an empty view."""
        if self.num_elements == 0:
            return self.offset - 1
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorSpec:
        """Another view of the buffer, of the same offset."""
        return TensorSpec(self.buffer, shape, strides, self.offset, self.dtype)

    @property
    def T(self) -> TensorSpec:  # noqa: N802 - the field's name for it
        """The view with all dims reversed."""
        return TensorSpec(self.buffer, self.shape[::-1], self.strides[::-1], self.offset, self.dtype)

    @property
    def mT(self) -> TensorSpec:  # noqa: N802 - the field's name for it
        """The view with the last two dims exchanged."""
        shape, strides = self.shape, self.strides
        swapped = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
        return TensorSpec(self.buffer, *swapped, self.offset, self.dtype)

    def broadcast_to(self, shape: tuple[int, ...]) -> TensorSpec:
        """The stride-0 broadcast view; the shape must be compatible."""
        missing = len(shape) - self.ndim
        strides = (0,) * missing + tuple(
            0 if size == 1 and want != 1 else stride
            for size, stride, want in zip(self.shape, self.strides, shape[missing:], strict=True)
        )
        return TensorSpec(self.buffer, tuple(shape), strides, self.offset, self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> TensorSpec:
        """The dense view of another shape; only for dense specs of the same element count."""
        if not self.is_dense or prod(shape) != self.num_elements:
            raise ValueError(f"cannot view {self} as {list(shape)} without a copy")
        return TensorSpec(self.buffer, tuple(shape), dense_strides(tuple(shape)), self.offset, self.dtype)

    def __str__(self) -> str:
        text = f"{self.buffer}: {_short(self.dtype)}[{_dims(self.shape)}]"
        if not self.is_dense or self.offset:
            text += f" strides ({_dims(self.strides)})"
        if self.offset:
            text += f" offset {show(self.offset)}"
        return text


@dataclass(frozen=True)
class ScalarSpec:
    """A scalar input passed by value in the parameter block; read as a 0-d tensor."""

    buffer: str
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def spec(self) -> TensorSpec:
        """The 0-d TensorSpec by which operations read it."""
        return TensorSpec(self.buffer, (), (), 0, self.dtype)

    def __str__(self) -> str:
        return f"{self.buffer}: {_short(self.dtype)} by value"


Operand: TypeAlias = "TensorSpec | int | float"
InputSpec: TypeAlias = "TensorSpec | ScalarSpec"


@dataclass(frozen=True)
class Operation:
    """One entry of the op table applied to operands.

    ``output`` is one spec, or a tuple of specs for an op with several results; ``outputs`` sees
    both as a tuple. ``location`` (the user's file and line) travels along for errors and reports
    and never changes the generated bytes or equality.
    """

    name: str
    op: str
    inputs: tuple[Operand, ...]
    output: TensorSpec | tuple[TensorSpec, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    location: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        if isinstance(self.output, list):
            object.__setattr__(self, "output", tuple(self.output))
        object.__setattr__(self, "attrs", MappingProxyType(dict(self.attrs)))

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.output if isinstance(self.output, tuple) else (self.output,)

    @cached_property
    def tensor_inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(operand for operand in self.inputs if isinstance(operand, TensorSpec))

    def __str__(self) -> str:
        results = ", ".join(str(spec) for spec in self.outputs)
        operands = "".join(f" {format_operand(operand)}" for operand in self.inputs)
        attrs = "".join(f" {key}={show(self.attrs[key])}" for key in sorted(self.attrs, key=str))
        return f"{results} = {self.op}{operands}{attrs}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Operation, (self.name, self.op, self.inputs, self.output, dict(self.attrs), self.location))


@dataclass(frozen=True)
class Loop:
    """``length`` runs of ``body``, with the meaning of ``jax.lax.scan``.

    ``inputs`` are the constants, then ``num_carry`` initial carries, then ``num_xs`` stacked
    inputs whose leading dim is ``length``. ``body.inputs`` are the constants, the carries and one
    slice of each stacked input; ``body.outputs`` are the carries and one slice of each stacked
    output. ``outputs`` are the final carries and the stacked outputs.

    ``length`` is an int, or the name of an int32 scalar input: then stacked tensors have room for
    their leading dim's size, and the scalar may be any number from 0 to that size.
    """

    name: str
    body: Program
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    num_carry: int
    num_xs: int
    length: int | str
    reverse: bool = False
    location: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))

    @property
    def num_constants(self) -> int:
        return len(self.inputs) - self.num_carry - self.num_xs

    @property
    def tensor_inputs(self) -> tuple[TensorSpec, ...]:
        return self.inputs

    def __str__(self) -> str:
        results = ", ".join(str(spec) for spec in self.outputs)
        operands = "".join(f" {format_operand(operand)}" for operand in self.inputs)
        order = " reverse" if self.reverse else ""
        length = self.length if isinstance(self.length, str) else show(self.length)
        head = f"{results} = loop {length}{order} carry={show(self.num_carry)} xs={show(self.num_xs)}{operands}"
        body = "\n".join("    " + line for line in str(self.body).splitlines())
        return f"{head}\n{body}"


Item: TypeAlias = "Operation | Loop"


@dataclass(frozen=True)
class Program:
    """Inputs, operations in an order that computes each buffer before it is read, and outputs."""

    inputs: tuple[InputSpec, ...]
    operations: tuple[Item, ...]
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "operations", tuple(self.operations))
        object.__setattr__(self, "outputs", tuple(self.outputs))

    @property
    def tensor_inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if isinstance(spec, TensorSpec))

    @property
    def scalar_inputs(self) -> tuple[ScalarSpec, ...]:
        return tuple(spec for spec in self.inputs if isinstance(spec, ScalarSpec))

    def buffers(self) -> Iterator[TensorSpec]:
        """The spec by which each buffer was declared: inputs first, then results in order."""
        for spec in self.inputs:
            yield spec.spec if isinstance(spec, ScalarSpec) else spec
        for item in self.operations:
            yield from item.outputs

    def to_json(self) -> str:
        """Versioned JSON text; ``Program.from_json`` gives an equal Program back."""
        from trainkernel.serialization import program_to_json

        return program_to_json(self)

    @staticmethod
    def from_json(text: str) -> Program:
        """The Program that ``to_json`` wrote.

        Raises
        ------
        ProgramError
            If the text is not such a Program or comes from a newer format version.
        """
        from trainkernel.serialization import program_from_json

        return program_from_json(text)

    def __str__(self) -> str:
        lines = [f"input {spec}" for spec in self.inputs]
        lines += [str(item) for item in self.operations]
        lines += [f"return {format_operand(spec)}" for spec in self.outputs]
        return "\n".join(lines)


def length_limits(program: Program) -> dict[str, int]:
    """The most steps that each scalar input used as a Loop's length, at any depth, may ask for."""
    limits: dict[str, int] = {}

    def visit(items: tuple[Item, ...], names: Mapping[str, str]) -> None:
        for item in items:
            if not isinstance(item, Loop):
                continue
            if isinstance(item.length, str) and item.length in names:
                stacked = item.inputs[len(item.inputs) - item.num_xs :] + item.outputs[item.num_carry :]
                room = min((spec.shape[0] for spec in stacked), default=MAX_LENGTH)
                name = names[item.length]
                limits[name] = min(room, limits.get(name, MAX_LENGTH))
            inner = {
                spec.buffer: names[operand.buffer]
                for spec, operand in zip(item.body.inputs, item.inputs, strict=True)
                if operand.buffer in names
            }
            visit(item.body.operations, inner)

    visit(program.operations, {spec.buffer: spec.buffer for spec in program.scalar_inputs})
    return limits


def format_operand(operand: Operand) -> str:
    """An operand as programs print it: a buffer name, with its view where it is not plain."""
    if not isinstance(operand, TensorSpec):
        return show(operand)
    if operand.is_dense and operand.offset == 0:
        return operand.buffer
    offset = f"+{show(operand.offset)}" if operand.offset else ""
    return f"{operand.buffer}{offset}[{_dims(operand.shape)}:{_dims(operand.strides)}]"


def validate(program: Program) -> None:
    """Refuse a Program that breaks a rule of the language.

    Raises
    ------
    ProgramError
        A ``ValueError`` that prints the operation.
    """
    from trainkernel.validation import validate_program

    validate_program(program)
