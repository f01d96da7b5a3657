"""How far a correct device may lie from the reference: a running error bound per element.

``run_with_bounds`` interprets a Program like the reference does and carries, beside each value,
a bound on the difference to what a device that keeps the op table's promises may compute. So
the tolerance of a comparison follows from the table alone: it is never tuned, exact results
must be equal, and an element for which nothing can be promised (a division by an interval that
holds zero, an overflow within the error, an integer computed from an uncertain one) has the
bound infinity and is not compared.

The rules, with u the unit roundoff of the operation's domain (2**-24 for float32, 2**-53 for float64):

- Pointwise: an op sees operands from boxes ``x - e .. x + e``. Ops that are monotone in each
  operand take their extremes at corners; 0 is tried too where a box holds it, so that ``where``,
  division and the logarithm see their edge; a bool tries both values. Beyond the spread of the
  corners the device's result is off by the table's ``max_ulps`` (0.5 is correct rounding).
- Accumulations over n terms in any order: ``2 max_ulps (n - 1) u sum|x|`` (Higham, "Accuracy and
  Stability of Numerical Algorithms", section 4.2). Products of 16-bit operands may run on
  tensor cores, whose sums truncate instead of rounding: twice that.
- Integer arithmetic wraps around and is exact in any order.
- In float64 the reference rounds as well: accumulations have twice the bound, and functions that
  are not correctly rounded a few more ulps.
- The result is converted once to the output's dtype. Conversions are monotone, so the ends of the
  interval are converted exactly instead of being widened by another half unit.
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
from trainkernel.arithmetic import domain_of, operand_domains
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec
from trainkernel.ops import OPS, Op, domains, reduced_dims

Array = NDArray[Any]

UNITS = {"float32": 2.0**-24, "float64": 2.0**-53}
"""Half the distance from 1.0 to the next number of a floating domain."""
_LIBRARY_ULPS = 4.0
"""How far NumPy's own float64 functions may be off."""


@dataclass(frozen=True)
class Bounded:
    """The reference's elements (float64, integers int64) and a bound on the device's distance (float64)."""

    value: Array
    error: Array


def _held(array: Array) -> Array:
    """Stored elements as the reference computes with them: float64, integers int64."""
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


def _zeros(shape: Sequence[int] | int, dtype: str) -> Bounded:
    return Bounded(_held(np.zeros(shape, DTYPES[dtype].numpy)), np.zeros(shape))


def run_with_bounds(program: Program, inputs: Sequence[Any]) -> tuple[Bounded, ...]:
    """The reference's outputs, each with the bound on a device's distance, in output shapes."""
    buffers: dict[str, Bounded] = {}
    for position, (spec, value) in enumerate(zip(program.inputs, inputs, strict=True)):
        flat = _held(reference._input_buffer(position, spec, value))
        buffers[spec.buffer] = Bounded(flat, np.zeros(flat.shape))
    with np.errstate(all="ignore"):
        return _run_program(program, buffers)


def _view(buffer: Bounded, spec: TensorSpec) -> Bounded:
    return Bounded(reference._view(buffer.value, spec), reference._view(buffer.error, spec))


def _converted(center: Array, error: Array, domain: str, dtype: str, shape: tuple[int, ...]) -> Bounded:
    """The value and bound after converting anything in ``center +- error`` in a domain to ``dtype``.

    The device holds a number of the domain before it converts it, so the ends are rounded to it too.
    """
    result = _held(domains.convert(center, domain, dtype))
    if domain in domains.INTEGER_DOMAINS:
        is_same = dtype in (domain, "float32", "float64")
        bound = np.where(error > 0, 2 * error if is_same else np.inf, 0.0)
    elif dtype == "bool":
        underflows = (np.abs(center) < 2.0**-149) & (center != 0) & (domain == "float32")
        flips = ((error > 0) & (np.abs(center) <= error)) | underflows
        bound = np.where(flips | np.isinf(error), 1.0, 0.0)
    else:
        bound = np.zeros(result.shape)
        for end in (center - error, center + error):
            held = domains.convert(end, domain, domain).astype(np.float64)
            bound = np.maximum(bound, _distance(_held(domains.convert(held, domain, dtype)), result))
        bound = np.where(np.isnan(error) | np.isinf(error), np.inf, bound)
    return Bounded(result.reshape(shape), np.asarray(bound, np.float64).reshape(shape))


def _ulp(value: Array, domain: str = "float32") -> Array:
    """The distance from \\|value\\| to the domain's next number, the smallest denormal at least."""
    mantissa_bits, least = (23, -149) if domain == "float32" else (52, -1074)
    magnitude = np.abs(value)
    exponent = np.floor(np.log2(np.where(magnitude > 0, magnitude, 2.0 ** (least + 9))))
    return np.where(np.isfinite(value), np.exp2(np.maximum(exponent - mantissa_bits, least)), 0.0)


# ---------------------------------------------------------------------------- programs


def _run_program(program: Program, buffers: dict[str, Bounded]) -> tuple[Bounded, ...]:
    for item in program.operations:
        results = _run_loop(item, buffers) if isinstance(item, Loop) else _run_operation(item, buffers)
        for spec, result in zip(item.outputs, results, strict=True):
            buffers[spec.buffer] = Bounded(result.value.reshape(-1), result.error.reshape(-1))
    declared = {spec.buffer: spec.dtype for spec in program.buffers()}
    outputs = []
    for spec in program.outputs:
        view = _view(buffers[spec.buffer], spec)
        dtype = declared[spec.buffer]
        if dtype != spec.dtype:
            view = _converted(view.value, view.error, domains.domain_of_dtype(dtype), spec.dtype, spec.shape)
        outputs.append(view)
    return tuple(outputs)


def _run_loop(loop: Loop, buffers: dict[str, Bounded]) -> list[Bounded]:
    values = [_view(buffers[spec.buffer], spec) for spec in loop.inputs]
    first_carry, first_xs = loop.num_constants, loop.num_constants + loop.num_carry
    carries = values[first_carry:first_xs]
    length = loop.length if isinstance(loop.length, int) else int(buffers[loop.length].value[0])
    stacked = [_zeros(spec.shape, spec.dtype) for spec in loop.outputs[loop.num_carry :]]
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
    buffer = _zeros(max(view.last_index + 1, 0), spec.dtype)
    if view.num_elements:
        reference._view(buffer.value, view)[...] = value.value
        reference._view(buffer.error, view)[...] = value.error
    return buffer


def _operand(operand: Any, buffers: dict[str, Bounded], domain: str) -> Bounded:
    """An operand in a domain. What is known of its error may grow by the rounding of an integer."""
    if not isinstance(operand, TensorSpec):
        number = np.asarray(domains.constant(operand, domain))
        return Bounded(number, np.zeros(()))
    view = _view(buffers[operand.buffer], operand)
    stored = view.value.astype(DTYPES[operand.dtype].numpy)
    value = domains.load(stored, domain)
    rounds = view.value.dtype.kind == "i" and domain in UNITS
    error = np.where(view.error > 0, view.error + _ulp(value, domain), 0.0) if rounds else view.error
    return Bounded(value, error)


def _run_operation(operation: Operation, buffers: dict[str, Bounded]) -> list[Bounded]:
    op, domain = OPS[operation.op], domain_of(operation)
    pairs = zip(operation.inputs, operand_domains(operation), strict=True)
    operands = [_operand(operand, buffers, own) for operand, own in pairs]
    dtypes = [operand.dtype if isinstance(operand, TensorSpec) else "float32" for operand in operation.inputs]
    attrs = {
        key: domains.constant(value, domain) if key in op.constants else value for key, value in operation.attrs.items()
    }
    shapes = [spec.shape for spec in operation.outputs]
    values = op.reference([operand.value for operand in operands], attrs, shapes)
    if op.indexed:
        errors = [_moved_error(op, attrs, operands, np.asarray(values[0]), shapes)]
    elif domain in domains.INTEGER_DOMAINS:
        errors = _integer_errors(op, operands, attrs, values)
    elif op.kind == "scan" or op.name == "scatter_add":
        errors = [_running_error(op, attrs, domain, operands, shapes)]
    elif op.kind == "pointwise":
        errors = [_pointwise_error(op, attrs, domain, operands, dtypes, values[0], shapes)]
    elif op.kind == "product":
        errors = [_product_error(op, attrs, domain, operands, dtypes)]
    else:
        errors = _REDUCTION_ERRORS[op.name](op, operands[0], attrs, domain)
    results = []
    for value, error, spec in zip(values, errors, operation.outputs, strict=True):
        value, error = np.asarray(value), np.asarray(error, np.float64)
        if op.kind == "pointwise":
            value, error = np.broadcast_to(value, spec.shape), np.broadcast_to(error, spec.shape)
        else:
            value, error = value.reshape(spec.shape), error.reshape(spec.shape)
        results.append(_converted(value, error, domain, spec.dtype, spec.shape))
    return results


_MONOTONE = ("add", "sub", "mul", "neg", "cast", "relu", "abs", "sign", "floor", "ceil", "round", "maximum", "minimum")


def _integer_errors(
    op: Op, operands: Sequence[Bounded], attrs: Mapping[str, Any], values: Sequence[Any]
) -> list[Array]:
    """Little is known of what depends on an uncertain operand; the rest is exact."""
    if op.name in _MONOTONE and all(np.all(operand.error < 2**20) for operand in operands):
        return [_corner_error(op, attrs, operands, values[0])]
    if op.kind == "pointwise":
        unknown = sum((operand.error for operand in operands), np.zeros(np.shape(values[0])))
    elif op.kind == "product":
        a, b = operands[-2:]
        unknown = np.any(a.error > 0, axis=-1)[..., None] | np.any(b.error > 0, axis=-2)[..., None, :]
        for bias in operands[:-2]:
            unknown = unknown | (bias.error > 0)
    elif op.kind == "scan" or op.name == "scatter_add":
        shapes = [np.shape(value) for value in values]
        unknown = _running_sum(op, attrs, operands, shapes, (operands[-1].error > 0).astype(np.float64))
        unknown = unknown + any(np.any(places.error) for places in operands[:-1])
    else:
        unknown = np.any(operands[0].error > 0, axis=reduced_dims(operands[0].value.shape, attrs))
    error = np.where(np.asarray(unknown) > 0, np.inf, 0.0)
    return [np.broadcast_to(error, np.broadcast_shapes(error.shape, np.shape(value))) for value in values]


# ---------------------------------------------------------------------------- pointwise


def _corner_error(op: Op, attrs: Mapping[str, Any], operands: Sequence[Bounded], center: Array) -> Array:
    """The error of a monotone operation on small integers; that of large ones, which may wrap, is unknown."""
    error = np.zeros(np.shape(center))
    ends = [
        (operand.value - operand.error.astype(np.int64), operand.value + operand.error.astype(np.int64))
        for operand in operands
    ]
    for corner in product(*ends):
        error = np.fmax(error, _distance(np.asarray(op.reference(corner, attrs, [error.shape])[0]), center))
    return np.where((error > 0) & (np.abs(center) + error > 2.0**30), np.inf, error)


def _candidates(operand: Bounded, dtype: str) -> list[Array]:
    """Values of an operand at which the op may take its extremes."""
    value, error = operand.value, operand.error
    if not np.any(error > 0):
        return [value]
    if dtype == "bool":
        return [value, np.where(error > 0, 1 - value, value)]
    zero = np.where((error > 0) & (np.abs(value) <= error), 0, value)
    return [value - error, value + error, zero]


def _pointwise_error(
    op: Op,
    attrs: Mapping[str, Any],
    domain: str,
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
        error = np.fmax(error, _distance(np.asarray(op.reference(corner, attrs, shapes)[0]), center))
    if op.name == "compare":
        # eq and ne are not monotone: any comparison may flip where the boxes touch.
        gap = np.abs(operands[0].value - operands[1].value)
        reach = operands[0].error + operands[1].error
        error = np.where((reach > 0) & (gap <= reach), 1.0, error)
    if op.name in ("sin", "cos"):
        error = np.fmax(error, np.minimum(operands[0].error, 2.0))  # a box may hold an extreme
    for operand in operands:
        error = np.where(np.isinf(operand.error), np.inf, error)
    if domain == "float64":
        approximate = op.max_ulps > 0.5
        return np.where(error > 0, error * (1 + 2.0**-40) + 2 * _ulp(np.abs(center) + error, domain), error) + (
            (op.max_ulps + _LIBRARY_ULPS) * _ulp(np.abs(center) + error, domain) if approximate else 0.0
        )
    # The corners were evaluated in float64, which is itself off by a rounding.
    error = np.where(error > 0, error * (1 + 2.0**-40) + np.abs(center) * 2.0**-50, error)
    if attrs.get("alpha", 1) != 1:
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
    if corner.dtype.kind == "i" and center.dtype.kind == "i":
        return np.abs(corner.astype(np.float64) - center.astype(np.float64)) + (corner != center)
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


def _accumulation(op: Op, domain: str, roundings: Any, total: Array) -> Array:
    """What adding up in another order may change; in float64 the reference's order is another as well.

    Nothing is known of a sum whose parts may overflow.
    """
    factor = 2 if domain == "float32" else 4
    error: Array = factor * op.max_ulps * roundings * UNITS[domain] * total
    return np.where(total > np.finfo(domain).max, np.inf, error)


def _sum_error(op: Op, operand: Bounded, attrs: Mapping[str, Any], domain: str) -> list[Array]:
    dims, count = _split(operand, attrs)
    spread = np.sum(operand.error, axis=dims)
    total = np.sum(_finite(np.abs(operand.value)), axis=dims) + spread
    return [_settled(operand, dims, spread + _accumulation(op, domain, max(count - 1, 0), total))]


def _mean_error(op: Op, operand: Bounded, attrs: Mapping[str, Any], domain: str) -> list[Array]:
    dims, count = _split(operand, attrs)
    if count == 0:
        return [np.zeros(np.sum(operand.error, axis=dims).shape)]
    error = _sum_error(op, operand, attrs, domain)[0] / count
    average: Array = np.abs(_finite(np.mean(operand.value, axis=dims)))
    # An exact sum is divided with one rounding, the reference's own.
    return [np.where(error > 0, error + _ulp(average + error, domain), error)]


def _extremum_error(op: Op, operand: Bounded, attrs: Mapping[str, Any], domain: str) -> list[Array]:
    dims, _ = _split(operand, attrs)
    function = np.min if op.name == "min" else np.max
    center = function(operand.value, axis=dims)
    low = function(operand.value - operand.error, axis=dims)
    high = function(operand.value + operand.error, axis=dims)
    return [np.fmax(_distance(low, center), _distance(high, center))]


def _prod_error(op: Op, operand: Bounded, attrs: Mapping[str, Any], domain: str) -> list[Array]:
    """Relative errors add up, as long as no partial product of any order leaves the normal numbers."""
    dims, count = _split(operand, attrs)
    size = np.abs(_finite(operand.value))
    center = np.prod(size, axis=dims)
    spread = np.prod(size + operand.error, axis=dims) - center
    roundings = (2 if domain == "float32" else 4) * op.max_ulps * count * UNITS[domain]
    error = spread + (center + spread) * roundings
    powers = np.log2(np.where((size > 0) & np.isfinite(operand.value), size + operand.error, 1.0))
    limit = 120.0 if domain == "float32" else 1000.0
    high = np.sum(np.maximum(powers, 0), axis=dims)
    low = np.sum(np.minimum(powers, 0), axis=dims)
    error = np.where((high > limit) | (low < -limit), np.inf, error)
    nan = np.any(np.isnan(operand.value) & (operand.error == 0), axis=dims)
    return [np.where(nan | (_all_exact(operand, dims) & (center == 0)), 0.0, error)]


def _all_exact(operand: Bounded, dims: tuple[int, ...]) -> Array:
    return np.all(operand.error == 0, axis=dims)


def _stats_error(op: Op, operand: Bounded, attrs: Mapping[str, Any], domain: str) -> list[Array]:
    """The maximum, and the sum of exponentials of the differences to it.

    Each term's argument is off by the operands' errors and a few roundings (an online algorithm
    rescales its running sum, at most by the whole distance), each exponential by ``max_ulps``.
    """
    dims, count = _split(operand, attrs)
    (largest_error,) = _extremum_error(op, operand, attrs, domain)
    largest = np.max(operand.value, axis=dims, keepdims=True)
    shifted = np.where(operand.value == largest, 0.0, operand.value - largest)
    roundings = 4 * UNITS[domain] * np.abs(_finite(shifted))
    argument_error = operand.error + np.reshape(largest_error, largest.shape) + roundings
    terms = np.exp(shifted)
    spread = np.sum(_finite(terms) * np.expm1(argument_error), axis=dims)
    total = np.sum(_finite(terms), axis=dims) + spread
    return [largest_error, spread + _accumulation(op, domain, count + 2, total)]


def _moments_error(op: Op, operand: Bounded, attrs: Mapping[str, Any], domain: str) -> list[Array]:
    """The mean, and the mean of squares of the differences to it: each is off by both operands' errors."""
    dims, count = _split(operand, attrs)
    mean_error = _mean_error(op, operand, attrs, domain)[0]
    if count == 0:
        return [mean_error, mean_error]
    mean = np.mean(operand.value, axis=dims, keepdims=True)
    size = np.abs(_finite(operand.value - mean))
    own = operand.error + np.reshape(mean_error, mean.shape)
    own = own + 2 * UNITS[domain] * (size + own)
    squares = size**2 + (2 * size + own) * own
    spread = np.sum((2 * size + own) * own, axis=dims)
    error = (spread + _accumulation(op, domain, count + 2, np.sum(squares, axis=dims))) / count
    return [mean_error, _settled(operand, dims, error)]


def _running_sum(
    op: Op, attrs: Mapping[str, Any], operands: Sequence[Bounded], shapes: Sequence[tuple[int, ...]], terms: Array
) -> Array:
    """What a scan or a scatter makes of other terms."""
    return np.asarray(op.reference([*(operand.value for operand in operands[:-1]), terms], attrs, shapes)[0])


def _running_error(
    op: Op,
    attrs: Mapping[str, Any],
    domain: str,
    operands: Sequence[Bounded],
    shapes: Sequence[tuple[int, ...]],
) -> Array:
    """A scan or a scatter: for each result that of a sum of as many terms as it has."""
    terms = operands[-1]
    if any(np.any(places.error) for places in operands[:-1]):
        return np.full(shapes[0], np.inf)
    spread = _running_sum(op, attrs, operands, shapes, terms.error)
    total = _running_sum(op, attrs, operands, shapes, _finite(np.abs(terms.value))) + spread
    count = _running_sum(op, attrs, operands, shapes, np.ones(terms.value.shape))
    error = spread + _accumulation(op, domain, np.maximum(count - 1, 0), total)
    settled = np.where(~np.isfinite(terms.value) & (terms.error == 0), 1.0, 0.0)
    decided = _running_sum(op, attrs, operands, shapes, settled) > 0
    return np.where(decided & np.isfinite(error), 0.0, error)


_REDUCTION_ERRORS: Mapping[str, Callable[[Op, Bounded, Mapping[str, Any], str], list[Array]]] = {
    "sum": _sum_error,
    "mean": _mean_error,
    "max": _extremum_error,
    "min": _extremum_error,
    "prod": _prod_error,
    "softmax_stats": _stats_error,
    "moments": _moments_error,
}


# ---------------------------------------------------------------------------- products


def _product_error(
    op: Op, attrs: Mapping[str, Any], domain: str, operands: Sequence[Bounded], dtypes: Sequence[str]
) -> Array:
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
    error: Array = spread + (2 if tensor_cores else 1) * _accumulation(op, domain, roundings, terms + spread)
    error = np.where(decided & np.isfinite(error), 0.0, error)
    if depth == 1 and not np.any(spread):
        error = np.zeros_like(error)
    if op.name != "addmm":
        return error
    bias = operands[0]
    alpha, beta = (abs(float(attrs.get(key, 1))) for key in ("alpha", "beta"))
    error = alpha * error if alpha else np.zeros_like(error)
    scaled = alpha * terms + beta * np.abs(_finite(bias.value))
    if beta:
        error = error + beta * bias.error
    # alpha times the sum plus beta times the bias: a multiply and a fused multiply-add.
    return error + (2 if domain == "float32" else 4) * UNITS[domain] * (scaled + error)


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
        values = _held(got)
        with np.errstate(all="ignore"):
            bad = ~(np.isinf(want.error) | (_distance(values, want.value) <= want.error))
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
