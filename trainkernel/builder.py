"""A small builder of Programs: it names buffers, infers shapes and keeps the order.

::

    b = ProgramBuilder()
    x = b.input("x", (32, 8))
    w = b.input("w", (8, 4))
    h = b.op("relu", b.op("mm", x, w), name="h")
    program = b.build([h])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainkernel.dtypes import DTYPES
from trainkernel.errors import ProgramError
from trainkernel.ir import InputSpec, Item, Loop, Operand, Operation, Program, ScalarSpec, TensorSpec, validate
from trainkernel.ops import OPS
from trainkernel.validation import check_call


def _default_dtype(op: str, operands: Sequence[Operand]) -> str:
    """The dtype of a result for which none is given; see ``ProgramBuilder.op``."""
    values = operands[1:] if op == "where" else operands
    dtypes = [operand.dtype for operand in values if isinstance(operand, TensorSpec)]
    numbers = [dtype for dtype in dtypes if dtype != "bool"]
    floats = [dtype for dtype in numbers if DTYPES[dtype].numpy.kind not in "iu"]
    all_bool = len(dtypes) == len(values) > 0 and set(dtypes) == {"bool"}
    return (floats or numbers or (["bool"] if all_bool else ["float32"]))[0]


def _natural_shapes(
    op: str, operands: Sequence[Operand], attrs: Mapping[str, Any], name: str
) -> tuple[tuple[int, ...], ...]:
    """The output shapes that an op gives, as ``validate`` will check them."""
    try:
        check_call(OPS[op], operands, attrs)
        return OPS[op].shape([operand.shape if isinstance(operand, TensorSpec) else () for operand in operands], attrs)
    except ProgramError as error:
        raise ProgramError(
            f"{error}\n  in operation {name!r}: {Operation(name, op, tuple(operands), (), attrs)}"
        ) from None


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
            Output dtype; if left out, that of the first floating-point operand whose value may
            become the result's (so not the condition of ``where``), else of the first integer one, else
            bool if all those are, else float32.
        name : str, optional
            Buffer name, made unique by a suffix.
        **attrs
            The op's attributes, for example ``dims=(0,)`` of ``sum`` or ``comparison="lt"`` of ``compare``;
            ``trainkernel.ops.OPS[op].attrs`` has them.

        Raises
        ------
        ProgramError
            For an unknown op, or operands or attributes that do not fit it.
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
        natural = _natural_shapes(op, operands, attrs, name or op)
        shapes = natural if shape is None else tuple(tuple(shape) for _ in natural)
        out_dtype = dtype or _default_dtype(op, operands)
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
