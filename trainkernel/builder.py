"""A small builder of Programs: it names buffers, infers shapes and keeps the order.

::

    b = ProgramBuilder()
    x = b.input("x", (32, 8))
    w = b.input("w", (8, 4))
    h = b.op("relu", b.op("mm", x, w), name="h")
    program = b.build([h])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainkernel.errors import ProgramError
from trainkernel.ir import InputSpec, Item, Loop, Operand, Operation, Program, ScalarSpec, TensorSpec, validate
from trainkernel.ops import OPS


def _check_shape(shape: object, where: str) -> None:
    if not isinstance(shape, Sequence):
        raise ProgramError(f"{where}: shape must be a tuple of ints, got {shape!r}")


class ProgramBuilder:
    """Collects inputs and operations; ``build`` makes the frozen Program."""

    def __init__(self) -> None:
        self._inputs: list[InputSpec] = []
        self._items: list[Item] = []
        self._names: set[str] = set()

    def _unique(self, name: str) -> str:
        candidate, suffix = name, 1
        while candidate in self._names:
            candidate = f"{name}_{suffix}"
            suffix += 1
        self._names.add(candidate)
        return candidate

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32") -> TensorSpec:
        """Declare a row-major tensor input; a name that is taken gets a suffix."""
        _check_shape(shape, f"input {name!r}")
        spec = TensorSpec.dense(self._unique(name), tuple(shape), dtype)
        self._inputs.append(spec)
        return spec

    def input_view(self, spec: TensorSpec) -> TensorSpec:
        """Declare a tensor input with strides and offset of its own."""
        self._names.add(spec.buffer)
        self._inputs.append(spec)
        return spec

    def scalar(self, name: str, dtype: str = "float32") -> TensorSpec:
        """Declare a scalar passed by value; the result is the 0-d operand that reads it."""
        scalar = ScalarSpec(self._unique(name), dtype)
        self._inputs.append(scalar)
        return scalar.spec

    def op(
        self,
        op: str,
        *operands: Operand,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        name: str | None = None,
        **attrs: Any,
    ) -> TensorSpec:
        """Append an operation with one output and return that output's spec.

        Parameters
        ----------
        op : str
            A name in ``trainkernel.ops.OPS``.
        shape : sequence of int, optional
            Output shape; the op's natural shape if left out. Where the op has an attribute of this
            name, the attribute.
        dtype : str, optional
            Output dtype; that of the first tensor operand if left out, else float32.
        name : str, optional
            Buffer name, made unique by a suffix.
        **attrs
            The op's attributes, for example ``dims=(0,)`` of ``sum`` or ``comparison="lt"`` of ``compare``;
            ``trainkernel.ops.OPS[op].attrs`` has them.

        Raises
        ------
        ProgramError
            For an unknown op or operand shapes that do not fit; ``build`` checks the rest.
        """
        return self.multi(op, *operands, shape=shape, dtype=dtype, name=name, **attrs)[0]

    def multi(
        self,
        op: str,
        *operands: Operand,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        name: str | None = None,
        **attrs: Any,
    ) -> tuple[TensorSpec, ...]:
        """Append an operation and return the specs of all its outputs."""
        if op not in OPS:
            raise ProgramError(f"unknown op {op!r}; known: {', '.join(sorted(OPS))}")
        if shape is not None:
            _check_shape(shape, f"op {op!r}")
        if shape is not None and "shape" in OPS[op].attrs:
            attrs, shape = {**attrs, "shape": tuple(shape)}, None
        tensors = [operand for operand in operands if isinstance(operand, TensorSpec)]
        operand_shapes = [operand.shape if isinstance(operand, TensorSpec) else () for operand in operands]
        natural = OPS[op].shape(operand_shapes, attrs)
        shapes = natural if shape is None else tuple(tuple(shape) for _ in natural)
        out_dtype = dtype or (tensors[0].dtype if tensors else "float32")
        specs = tuple(TensorSpec.dense(self._unique(name or op), out_shape, out_dtype) for out_shape in shapes)
        output = specs[0] if len(specs) == 1 else specs
        self._items.append(Operation(specs[0].buffer, op, operands, output, attrs))
        return specs

    def loop(
        self,
        body: Program,
        inputs: Sequence[TensorSpec],
        *,
        num_carry: int,
        num_xs: int = 0,
        length: int | TensorSpec,
        room: int | None = None,
        reverse: bool = False,
        name: str = "loop",
    ) -> tuple[TensorSpec, ...]:
        """Append a Loop and return its outputs: the final carries, then the stacked outputs.

        ``inputs`` are the constants, then ``num_carry`` initial carries, then ``num_xs`` stacked
        inputs, of which each run of ``body`` gets a slice; ``body`` returns the carries, then a slice
        of each stacked output. ``length`` is an int or an int32 scalar declared by ``scalar``; then
        ``room`` is the leading dim of stacked outputs.
        """
        if not isinstance(length, (int, TensorSpec)):
            raise ProgramError(f"a Loop's length must be an int or an int32 scalar of this builder, got {length!r}")
        steps = length if isinstance(length, int) else room
        outputs = []
        for position, spec in enumerate(body.outputs):
            shape = spec.shape if position < num_carry else (int(steps or 0), *spec.shape)
            outputs.append(TensorSpec.dense(self._unique(f"{name}_{spec.buffer}"), shape, spec.dtype))
        count = length if isinstance(length, int) else length.buffer
        self._items.append(Loop(name, body, tuple(inputs), tuple(outputs), num_carry, num_xs, count, reverse))
        return tuple(outputs)

    def build(self, outputs: Sequence[TensorSpec]) -> Program:
        """The validated Program."""
        if isinstance(outputs, TensorSpec):
            raise ProgramError("the outputs must be a list, also of one: build([output])")
        program = Program(tuple(self._inputs), tuple(self._items), tuple(outputs))
        validate(program)
        return program
