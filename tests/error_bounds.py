"""How far a correct device may lie from the reference: a running error bound per element.

``run_with_bounds`` interprets a Program like the reference does and carries, beside each value,
a bound on the difference to what a device that keeps the op table's promises may compute. So
the tolerance of a comparison follows from the table alone: it is never tuned, exact results
must be equal, and an element for which nothing can be promised (a division by an interval that
holds zero, an overflow within the error) has the bound infinity and is not compared.

The rules, with u = 2**-24:

- Pointwise: an op sees operands from boxes ``x - e .. x + e``. Ops that are monotone in each
  operand take their extremes at corners; 0 is tried too where a box holds it, so that ``where``,
  division and the logarithm see their edge; a bool tries both values. Beyond the spread of the
  corners the device's float32 result is off by the table's ``max_ulps`` (0.5 is correct rounding).
- Accumulations over n terms in any order: ``2 max_ulps (n - 1) u sum|x|`` (Higham, "Accuracy and
  Stability of Numerical Algorithms", section 4.2). Products of 16-bit operands may run on
  tensor cores, whose sums truncate instead of rounding: twice that.
- The result rounds once to the output's dtype. Rounding is monotone, so the ends of the interval
  are rounded exactly instead of being widened by another half unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel import reference
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec
from trainkernel.ops import OPS, Op, domains, reduced_dims, to_float32

Array = NDArray[np.float64]

UNIT = 2.0**-24
"""Half the distance from 1.0 to the next float32."""


@dataclass(frozen=True)
class Bounded:
    """A buffer or value: the reference's elements (float64) and a bound on the device's distance."""

    value: Array
    error: Array


def run_with_bounds(program: Program, inputs: Sequence[Any]) -> tuple[Bounded, ...]:
    """The reference's outputs, each with the bound on a device's distance, in output shapes."""
    buffers: dict[str, Bounded] = {}
    for position, (spec, value) in enumerate(zip(program.inputs, inputs, strict=True)):
        flat = reference._input_buffer(position, spec, value).astype(np.float64)
        buffers[spec.buffer] = Bounded(flat, np.zeros_like(flat))
    with np.errstate(all="ignore"):
        return _run_program(program, buffers)


def _view(buffer: Bounded, spec: TensorSpec) -> Bounded:
    return Bounded(reference._view(buffer.value, spec), reference._view(buffer.error, spec))


def _round(value: Array, dtype: str) -> Array:
    return domains.convert(value, "float32", dtype).astype(np.float64)


def _rounded(center: Array, error: Array, dtype: str, shape: tuple[int, ...]) -> Bounded:
    """The value and bound after rounding anything in ``center +- error`` to ``dtype``.

    The device holds a float32 before it rounds to the output's dtype, so the ends do too.
    """
    result = _round(center, dtype)
    if dtype == "bool":
        underflows = (np.abs(center) < 2.0**-149) & (center != 0)
        flips = ((error > 0) & (np.abs(center) <= error)) | underflows
        bound = np.where(flips | np.isinf(error), 1.0, 0.0)
        return Bounded(result.reshape(shape), bound.reshape(shape))
    bound = np.zeros(result.shape)
    for end in (center - error, center + error):
        bound = np.maximum(bound, _distance(_round(_round(end, "float32"), dtype), result))
    bound = np.where(np.isnan(error), np.inf, bound)
    return Bounded(result.reshape(shape), bound.reshape(shape))


def _ulp(value: Array) -> Array:
    """The distance from \\|value\\| to the next float32, the smallest denormal at least."""
    magnitude = np.abs(value)
    exponent = np.floor(np.log2(np.where(magnitude > 0, magnitude, 2.0**-140)))
    return np.where(np.isfinite(value), np.exp2(np.maximum(exponent - 23, -149)), 0.0)


# ---------------------------------------------------------------------------- programs


def _run_program(program: Program, buffers: dict[str, Bounded]) -> tuple[Bounded, ...]:
    for item in program.operations:
        results = _run_loop(item, buffers) if isinstance(item, Loop) else _run_operation(item, buffers)
        for spec, result in zip(item.outputs, results, strict=True):
            buffers[spec.buffer] = Bounded(result.value.reshape(-1), result.error.reshape(-1))
    outputs = []
    for spec in program.outputs:
        view = _view(buffers[spec.buffer], spec)
        outputs.append(_rounded(view.value, view.error, spec.dtype, spec.shape))
    return tuple(outputs)


def _run_loop(loop: Loop, buffers: dict[str, Bounded]) -> list[Bounded]:
    values = [_view(buffers[spec.buffer], spec) for spec in loop.inputs]
    first_carry, first_xs = loop.num_constants, loop.num_constants + loop.num_carry
    carries = values[first_carry:first_xs]
    length = loop.length if isinstance(loop.length, int) else int(buffers[loop.length].value[0])
    stacked = [Bounded(np.zeros(spec.shape), np.zeros(spec.shape)) for spec in loop.outputs[loop.num_carry :]]
    for step in reversed(range(length)) if loop.reverse else range(length):
        slices = [Bounded(value.value[step], value.error[step]) for value in values[first_xs:]]
        inner = {
            spec.buffer: _as_buffer(spec, value)
            for spec, value in zip(loop.body.inputs, values[:first_carry] + carries + slices, strict=True)
        }
        results = _run_program(loop.body, inner)
        carries = list(results[: loop.num_carry])
        for whole, part in zip(stacked, results[loop.num_carry :], strict=True):
            whole.value[step] = part.value
            whole.error[step] = part.error
    return [*carries, *stacked]


def _as_buffer(spec: TensorSpec | ScalarSpec, value: Bounded) -> Bounded:
    view = spec.spec if isinstance(spec, ScalarSpec) else spec
    size = max(view.last_index + 1, 0)
    buffer = Bounded(np.zeros(size), np.zeros(size))
    if view.num_elements:
        reference._view(buffer.value, view)[...] = value.value
        reference._view(buffer.error, view)[...] = value.error
    return buffer


def _run_operation(operation: Operation, buffers: dict[str, Bounded]) -> list[Bounded]:
    op = OPS[operation.op]
    operands, dtypes = [], []
    for operand in operation.inputs:
        if isinstance(operand, TensorSpec):
            operands.append(_view(buffers[operand.buffer], operand))
            dtypes.append(operand.dtype)
        else:
            number = np.asarray(to_float32(operand), np.float64)
            operands.append(Bounded(number, np.zeros(())))
            dtypes.append("float32")
    shapes = [spec.shape for spec in operation.outputs]
    values = op.reference([operand.value for operand in operands], operation.attrs, shapes)
    if op.indexed:
        errors = [_moved_error(op, operation.attrs, operands, np.asarray(values[0]), shapes)]
    elif op.kind == "scan":
        errors = [_scan_error(op, operation.attrs, operands[0])]
    elif op.name == "scatter_add":
        errors = [_scatter_error(op, operation.attrs, operands, shapes)]
    elif op.kind == "pointwise":
        errors = [_pointwise_error(op, operation, operands, dtypes, values[0], shapes)]
    elif op.kind == "product":
        errors = [_product_error(op, operation.attrs, operands, dtypes)]
    else:
        errors = _REDUCTION_ERRORS[op.name](op, operands[0], operation.attrs)
    results = []
    for value, error, spec in zip(values, errors, operation.outputs, strict=True):
        value, error = np.asarray(value, np.float64), np.asarray(error, np.float64)
        if op.kind == "pointwise":
            value, error = np.broadcast_to(value, spec.shape), np.broadcast_to(error, spec.shape)
        results.append(_rounded(value, error, spec.dtype, spec.shape))
    return results


# ---------------------------------------------------------------------------- pointwise


def _candidates(operand: Bounded, dtype: str) -> list[Array]:
    """Values of an operand at which the op may take its extremes."""
    value, error = operand.value, operand.error
    if not np.any(error > 0):
        return [value]
    if dtype == "bool":
        return [value, np.where(error > 0, 1.0 - value, value)]
    zero = np.where((error > 0) & (np.abs(value) <= error), 0.0, value)
    return [value - error, value + error, zero]


def _pointwise_error(
    op: Op,
    operation: Operation,
    operands: Sequence[Bounded],
    dtypes: Sequence[str],
    center: Array,
    shapes: Sequence[tuple[int, ...]],
) -> Array:
    center = np.asarray(center)
    error = np.zeros(center.shape)
    choices = [_candidates(operand, dtype) for operand, dtype in zip(operands, dtypes, strict=True)]
    corners = product(*choices) if any(len(choice) > 1 for choice in choices) else ()
    for corner in corners:
        error = np.fmax(error, _distance(np.asarray(op.reference(corner, operation.attrs, shapes)[0]), center))
    if op.name == "compare":
        # eq and ne are not monotone: any comparison may flip where the boxes touch.
        gap = np.abs(operands[0].value - operands[1].value)
        reach = operands[0].error + operands[1].error
        error = np.where((reach > 0) & (gap <= reach), 1.0, error)
    for operand in operands:
        error = np.where(np.isinf(operand.error), np.inf, error)
    # The corners were evaluated in float64, which is itself off by a rounding.
    error = np.where(error > 0, error * (1 + 2.0**-40) + np.abs(center) * 2.0**-50, error)
    if operation.attrs.get("alpha", 1) != 1:
        # The device's fused multiply-add rounds once, float64 twice: they may part at a tie.
        error = error + _finite(np.abs(center)) * 2.0**-51
    return error + (op.max_ulps * _ulp(np.abs(center) + error) if op.max_ulps > 0.5 else 0.0)


def _moved_error(
    op: Op,
    attrs: Mapping[str, Any],
    operands: Sequence[Bounded],
    center: Array,
    shapes: Sequence[tuple[int, ...]],
) -> Array:
    """Errors move with their elements; where an index, or what bits come from, may be another, nothing is known."""
    data = range(len(operands)) if op.data_operands is None else op.data_operands
    if op.name == "random_bits":
        data = ()
    if any(np.any(operand.error) for at, operand in enumerate(operands) if at not in data):
        return np.full(center.shape, np.inf)
    if not any(np.any(operands[at].error) for at in data):
        return np.zeros(center.shape)
    moved = [operand.error if at in data else operand.value for at, operand in enumerate(operands)]
    return np.asarray(op.reference(moved, attrs, shapes)[0])


def _distance(corner: Array, center: Array) -> Array:
    both_nan = np.isnan(corner) & np.isnan(center)
    distance = np.abs(corner - center)
    distance = np.where(np.isnan(distance), np.inf, distance)
    return np.where(both_nan | (corner == center), 0.0, distance)


# ---------------------------------------------------------------------------- reductions


def _split(operand: Bounded, attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    dims = reduced_dims(operand.value.shape, attrs)
    return dims, prod(operand.value.shape[dim] for dim in dims)


def _finite(value: Array) -> Array:
    return np.where(np.isfinite(value), value, 0.0)


def _settled(operand: Bounded, dims: tuple[int, ...], error: Array) -> Array:
    """No error where an infinite or NaN term decides the result."""
    decided = np.any(~np.isfinite(operand.value) & (operand.error == 0), axis=dims)
    return np.where(decided & np.isfinite(error), 0.0, error)


def _sum_error(op: Op, operand: Bounded, attrs: Mapping[str, Any]) -> list[Array]:
    dims, count = _split(operand, attrs)
    spread = np.sum(operand.error, axis=dims)
    total = np.sum(_finite(np.abs(operand.value)), axis=dims) + spread
    return [_settled(operand, dims, spread + 2 * op.max_ulps * max(count - 1, 0) * UNIT * total)]


def _mean_error(op: Op, operand: Bounded, attrs: Mapping[str, Any]) -> list[Array]:
    dims, count = _split(operand, attrs)
    if count == 0:
        return [np.zeros(np.sum(operand.error, axis=dims).shape)]
    error = _sum_error(op, operand, attrs)[0] / count
    average: Array = np.abs(_finite(np.mean(operand.value, axis=dims)))
    # An exact sum is divided with one rounding, the reference's own.
    return [np.where(error > 0, error + 0.5 * _ulp(average + error), error)]


def _max_error(op: Op, operand: Bounded, attrs: Mapping[str, Any]) -> list[Array]:
    dims, _ = _split(operand, attrs)
    center = np.max(operand.value, axis=dims)
    low = np.max(operand.value - operand.error, axis=dims)
    high = np.max(operand.value + operand.error, axis=dims)
    return [np.fmax(_distance(low, center), _distance(high, center))]


def _stats_error(op: Op, operand: Bounded, attrs: Mapping[str, Any]) -> list[Array]:
    """The maximum, and the sum of exponentials of the differences to it.

    Each term's argument is off by the operands' errors and a few roundings (an online algorithm
    rescales its running sum, at most by the whole distance), each exponential by ``max_ulps``.
    """
    dims, count = _split(operand, attrs)
    (largest_error,) = _max_error(op, operand, attrs)
    largest = np.max(operand.value, axis=dims, keepdims=True)
    shifted = np.where(operand.value == largest, 0.0, operand.value - largest)
    argument_error = operand.error + np.reshape(largest_error, largest.shape) + 4 * UNIT * np.abs(_finite(shifted))
    terms = np.exp(shifted)
    spread = np.sum(_finite(terms) * np.expm1(argument_error), axis=dims)
    total = np.sum(_finite(terms), axis=dims) + spread
    return [largest_error, spread + 2 * op.max_ulps * (count + 2) * UNIT * total]


def _scan_error(op: Op, attrs: Mapping[str, Any], operand: Bounded) -> Array:
    """That of a sum of as many terms as each element has."""

    def scanned(array: Array) -> Array:
        return np.asarray(op.reference([array], attrs, [array.shape])[0], np.float64)

    spread = scanned(operand.error)
    total = scanned(_finite(np.abs(operand.value))) + spread
    count = scanned(np.ones(operand.value.shape))
    error = spread + 2 * op.max_ulps * (count - 1) * UNIT * total
    decided = scanned(np.where(~np.isfinite(operand.value) & (operand.error == 0), 1.0, 0.0)) > 0
    return np.where(decided & np.isfinite(error), 0.0, error)


def _scatter_error(
    op: Op, attrs: Mapping[str, Any], operands: Sequence[Bounded], shapes: Sequence[tuple[int, ...]]
) -> Array:
    """That of a sum of as many terms as each row gets."""
    places, updates = operands
    if np.any(places.error):
        return np.full(shapes[0], np.inf)

    def summed(array: Array) -> Array:
        return np.asarray(op.reference([places.value, array], attrs, shapes)[0], np.float64)

    spread = summed(updates.error)
    total = summed(_finite(np.abs(updates.value))) + spread
    count = summed(np.ones(updates.value.shape))
    error = spread + 2 * op.max_ulps * np.maximum(count - 1, 0) * UNIT * total
    decided = summed(np.where(~np.isfinite(updates.value) & (updates.error == 0), 1.0, 0.0)) > 0
    return np.where(decided & np.isfinite(error), 0.0, error)


_REDUCTION_ERRORS: Mapping[str, Callable[[Op, Bounded, Mapping[str, Any]], list[Array]]] = {
    "sum": _sum_error,
    "mean": _mean_error,
    "max": _max_error,
    "softmax_stats": _stats_error,
}


# ---------------------------------------------------------------------------- products


def _product_error(op: Op, attrs: Mapping[str, Any], operands: Sequence[Bounded], dtypes: Sequence[str]) -> Array:
    a, b = operands[-2:]
    depth = a.value.shape[-1]
    size_a, size_b = np.abs(_finite(a.value)), np.abs(_finite(b.value))
    terms: Array = size_a @ size_b if depth else np.zeros((*size_a.shape[:-1], size_b.shape[-1]))
    spread: Array = a.error @ (size_b + b.error) + size_a @ b.error if depth else terms
    spread = np.where(np.isnan(spread), np.inf, spread)
    tensor_cores = all(DTYPES[dtype].itemsize_bytes == 2 for dtype in dtypes[-2:])
    # One term is exact only where the product of the operands is: 8 + 8 or 11 + 11 bits are.
    roundings = max(depth - 1, 0) if tensor_cores else depth
    decided = np.any(~np.isfinite(a.value), axis=-1)[..., None] | np.any(~np.isfinite(b.value), axis=-2)[..., None, :]
    error: Array = spread + (4 if tensor_cores else 2) * op.max_ulps * roundings * UNIT * (terms + spread)
    error = np.where(decided & np.isfinite(error), 0.0, error)
    if depth == 1 and not np.any(spread):
        error = np.zeros_like(error)
    if op.name != "addmm":
        return error
    bias = operands[0]
    alpha, beta = (abs(float(to_float32(attrs.get(key, 1)))) for key in ("alpha", "beta"))
    error = alpha * error if alpha else np.zeros_like(error)
    scaled = alpha * terms + beta * np.abs(_finite(bias.value))
    if beta:
        error = error + beta * bias.error
    # alpha times the sum plus beta times the bias: a multiply and a fused multiply-add.
    return error + 2 * UNIT * (scaled + error)


# ---------------------------------------------------------------------------- comparison


def assert_close(results: Sequence[NDArray[Any]], program: Program, inputs: Sequence[Any], label: str = "") -> float:
    """Assert that outputs lie within the running error bound of the reference.

    NaN and infinities must stand exactly where the reference has them. Returns the share of
    elements for which nothing could be promised, so that a caller can see that it compares.

    Raises
    ------
    AssertionError
        Naming the output, the element, the values and the bound, and printing the program.
    """
    expected = run_with_bounds(program, inputs)
    assert len(results) == len(expected), f"{len(results)} outputs, needs {len(expected)}"
    num_elements = num_unknown = 0
    for position, (got, want) in enumerate(zip(results, expected, strict=True)):
        spec = program.outputs[position]
        assert got.shape == spec.shape and got.dtype == DTYPES[spec.dtype].numpy, (
            f"{label} output {position}: {got.dtype}{got.shape}, needs {spec}"
        )
        values = got.astype(np.float64)
        with np.errstate(all="ignore"):
            equal = (values == want.value) | (np.isnan(values) & np.isnan(want.value))
            bad = ~(equal | np.isinf(want.error) | (np.abs(values - want.value) <= want.error))
        num_elements += values.size
        num_unknown += int(np.isinf(want.error).sum())
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise AssertionError(
                f"{label} output {position} ({spec}): {int(bad.sum())} of {bad.size} elements are off; "
                f"at {list(where)} got {values[where]!r}, reference {want.value[where]!r}, "
                f"bound {want.error[where]:.3g}\n{program}"
            )
    return num_unknown / max(num_elements, 1)
