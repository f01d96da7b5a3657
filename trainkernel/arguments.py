"""What a kernel may be given: every array and scalar is checked before anything is written.

The rules are the same on every device. A tensor input must have its spec's shape, dtype and
strides (dims of size 1 and empty tensors aside); an output array is dense in its output's shape;
whatever is written must be writable and must share no byte with any other array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainkernel.dtypes import DTYPES
from trainkernel.errors import ArgumentError
from trainkernel.ir import Program, ScalarSpec, dense_strides, length_limits
from trainkernel.runtime.dlpack import ArrayView, view
from trainkernel.runtime.scalars import ScalarField


@dataclass(frozen=True)
class ArrayNeed:
    """What one array of a call must be.

    Attributes
    ----------
    label : str
        Names the argument in messages, by position and name.
    shape, strides : tuple of int
        Strides in elements.
    dtype : str
    written : bool
        The kernel writes it.
    alignment_bytes : int or None
        Of its address, beyond that of an element.
    """

    label: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    written: bool
    alignment_bytes: int | None = None

    @cached_property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * DTYPES[self.dtype].itemsize_bytes


@dataclass(frozen=True)
class Signature:
    """What the arguments of a program must be; make it by ``signature_of``.

    Attributes
    ----------
    inputs : tuple of ArrayNeed or ScalarField
        In the order of the program's inputs.
    outputs : tuple of ArrayNeed
        In the order of the program's outputs.
    inplace_outputs : mapping of int to int
        Output index to input index.
    """

    inputs: tuple[ArrayNeed | ScalarField, ...]
    outputs: tuple[ArrayNeed, ...]
    inplace_outputs: Mapping[int, int]

    @cached_property
    def scalars(self) -> tuple[ScalarField, ...]:
        return tuple(need for need in self.inputs if isinstance(need, ScalarField))


@dataclass(frozen=True)
class CheckedArguments:
    """Arguments that passed every check.

    Attributes
    ----------
    inputs : mapping of int to ArrayView
        The tensor inputs, by input index.
    scalars : mapping of int to number
        The scalar inputs, by input index.
    outputs : mapping of int to ArrayView
        The output arrays that were given, by output index; those in place are their inputs.
    """

    inputs: Mapping[int, ArrayView]
    scalars: Mapping[int, int | float]
    outputs: Mapping[int, ArrayView]


def signature_of(
    program: Program,
    inplace_outputs: Mapping[int, int],
    alignments: Mapping[tuple[str, int], int] | None = None,
    offsets: Mapping[int, int] | None = None,
) -> Signature:
    """The signature of a program.

    Parameters
    ----------
    program : Program
    inplace_outputs : mapping of int to int
    alignments : mapping, optional
        Bytes, by ``("input" | "output", index)``; an element's size where left out.
    offsets : mapping, optional
        Where each scalar lies in a parameter block, by input index.
    """
    alignments = alignments or {}
    written = set(inplace_outputs.values())
    limits = length_limits(program)
    inputs: list[ArrayNeed | ScalarField] = []
    for index, spec in enumerate(program.inputs):
        if isinstance(spec, ScalarSpec):
            high = limits.get(spec.buffer)
            low = None if high is None else 0
            offset = (offsets or {}).get(index, 0)
            inputs.append(ScalarField(index, spec.buffer, spec.dtype, offset, low, high))
        else:
            label = f"input {index} '{spec.buffer}'"
            alignment = alignments.get(("input", index))
            inputs.append(ArrayNeed(label, spec.shape, spec.strides, spec.dtype, index in written, alignment))
    outputs = tuple(
        ArrayNeed(
            f"output {index} '{spec.buffer}'",
            spec.shape,
            dense_strides(spec.shape),
            spec.dtype,
            True,
            alignments.get(("output", index)),
        )
        for index, spec in enumerate(program.outputs)
    )
    return Signature(tuple(inputs), outputs, dict(inplace_outputs))


def check_arguments(
    signature: Signature,
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None = None,
    *,
    device: tuple[str, int],
    stream: int | None = None,
) -> CheckedArguments:
    """Check the arguments of a call or of a bind.

    Parameters
    ----------
    signature : Signature
    inputs : sequence
        An array or a number for each input of the program.
    outputs : sequence, optional
        An array for each output; for one in place the input's array or None. Left out: the
        outputs that are not in place are still to be allocated.
    device : tuple of str and int
        Where the arrays must be: ``("cpu", 0)`` or ``("cuda", index)``.
    stream : int, optional
        Told to arrays lent by DLPack; see ``view``.

    Raises
    ------
    ArgumentError
        Naming the argument, what was got and what is needed.
    """
    check_sequence("inputs", inputs)
    if len(inputs) != len(signature.inputs):
        names = ", ".join(_name(need) for need in signature.inputs)
        raise ArgumentError(f"got {len(inputs)} inputs, needs {len(signature.inputs)}: {names}")
    views: dict[int, ArrayView] = {}
    scalars: dict[int, int | float] = {}
    for index, (need, value) in enumerate(zip(signature.inputs, inputs, strict=True)):
        if isinstance(need, ScalarField):
            scalars[index] = need.check(value)
        else:
            views[index] = _check_array(need, value, device, stream)
    given = _check_outputs(signature, views, inputs, outputs, device, stream)
    _check_overlap(signature, views, given)
    return CheckedArguments(views, scalars, given)


def check_sequence(what: str, values: Any) -> None:
    """Refuse what is no list of arguments, such as a single array.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray, memoryview)):
        raise ArgumentError(f"{what}: got {type(values).__name__}, needs a list or tuple with one entry for each")


def _check_outputs(
    signature: Signature,
    views: Mapping[int, ArrayView],
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None,
    device: tuple[str, int],
    stream: int | None,
) -> dict[int, ArrayView]:
    given = {index: views[target] for index, target in signature.inplace_outputs.items()}
    if outputs is None:
        return given
    check_sequence("outputs", outputs)
    if len(outputs) != len(signature.outputs):
        names = ", ".join(need.label for need in signature.outputs)
        raise ArgumentError(f"got {len(outputs)} outputs, needs {len(signature.outputs)}: {names}")
    for index, (need, value) in enumerate(zip(signature.outputs, outputs, strict=True)):
        target = signature.inplace_outputs.get(index)
        if target is None:
            given[index] = _check_array(need, value, device, stream)
        elif value is not None and value is not inputs[target]:
            other = _check_array(need, value, device, stream)
            if other.num_elements and other.pointer != views[target].pointer:
                raise ArgumentError(
                    f"{need.label} is in place: got another array than input {target}'s, needs that one or None"
                )
    return given


def _name(need: ArrayNeed | ScalarField) -> str:
    return need.label if isinstance(need, ArrayNeed) else f"input {need.index} '{need.name}'"


def _view_as(label: str, value: Any, stream: int | None) -> ArrayView:
    try:
        return view(value, stream=stream)
    except ArgumentError as error:
        raise ArgumentError(f"{label}: {error}") from error


def _check_array(need: ArrayNeed, value: Any, device: tuple[str, int], stream: int | None) -> ArrayView:
    array = _view_as(need.label, value, stream)
    if array.shape != need.shape:
        raise ArgumentError(f"{need.label}: got shape {list(array.shape)}, needs {list(need.shape)}")
    if array.dtype != need.dtype:
        raise ArgumentError(f"{need.label}: got dtype {array.dtype}, needs {need.dtype}")
    _check_device(need, array, device)
    empty = 0 in array.shape
    if array.strides != need.strides and not empty:
        for size, got, wanted in zip(array.shape, array.strides, need.strides, strict=True):
            if size != 1 and got != wanted:
                raise ArgumentError(
                    f"{need.label}: got strides {list(array.strides)} (in elements), needs {list(need.strides)}; "
                    "make a copy of that layout first"
                )
    if array.requires_grad:
        raise ArgumentError(
            f"{need.label}: got a torch tensor that requires grad, but autograd would not record the kernel's use of "
            "it; pass .detach(), which shares its memory"
        )
    if need.written and array.framework == "jax":
        raise ArgumentError(f"{need.label}: got a JAX array, which may never be changed, for an array that is written")
    if need.written and array.readonly:
        raise ArgumentError(f"{need.label}: got a read-only array for one that is written")
    if not empty:
        alignment = max(need.alignment_bytes or 1, array.itemsize_bytes)
        if array.pointer % alignment:
            raise ArgumentError(
                f"{need.label}: got data at address {array.pointer:#x}, needs a multiple of {alignment}; make a copy"
            )
        if array.pointer == 0:
            raise ArgumentError(f"{need.label}: got a null pointer for {array.num_elements} elements")
    return array


def _check_device(need: ArrayNeed, array: ArrayView, device: tuple[str, int]) -> None:
    if array.device == device or (array.managed and device[0] == "cuda"):
        return
    if device[0] == "cpu":
        wanted = "an array in host memory: this kernel runs on the host"
    elif array.device[0] == "cpu":
        kind = "pinned host memory" if array.pinned else "host memory"
        raise ArgumentError(
            f"{need.label}: got {array} ({kind}), needs an array on cuda:{device[1]}; copy it there first"
        )
    else:
        wanted = f"one on cuda:{device[1]}"
    raise ArgumentError(f"{need.label}: got {array}, needs {wanted}")


def _check_overlap(signature: Signature, inputs: Mapping[int, ArrayView], outputs: Mapping[int, ArrayView]) -> None:
    """Refuse two arrays that share bytes, one of which is written. One sweep over the addresses."""
    if not outputs:  # those in place are among them, so nothing given is written
        return
    spans: list[tuple[int, int, bool, str]] = []
    for index, array in inputs.items():
        need = signature.inputs[index]
        assert isinstance(need, ArrayNeed)
        spans.append((array.pointer, need.span_bytes, need.written, need.label))
    for index, array in outputs.items():
        if index not in signature.inplace_outputs:
            need = signature.outputs[index]
            spans.append((array.pointer, need.span_bytes, True, need.label))
    spans.sort()
    reach = written_reach = 0  # where the arrays so far end, and those of them that are written
    last = last_written = ""
    for start, size_bytes, written, label in spans:
        if size_bytes == 0:
            continue
        if start < (reach if written else written_reach):
            raise ArgumentError(
                f"{label} and {last if written else last_written} share memory, and one of them is written: needs "
                "arrays that do not overlap; copy one of them"
            )
        end = start + size_bytes
        if end > reach:
            reach, last = end, label
        if written and end > written_reach:
            written_reach, last_written = end, label
