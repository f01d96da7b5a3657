"""The table of operations: everything that any stage knows of an op is in its one entry.

An entry holds the op's operand count, its attributes with their checks, its shape rule, its
NumPy meaning, its CUDA expression (pointwise ops) or emitter kind (reductions, products), and
what the table-driven tests need: a sample range and an error bound.

Numbers: a Python scalar operand or attribute is rounded to float32 first. The reference gets
float64 arrays holding the operands' exact values and its result is rounded once to the output's
dtype. On the device a pointwise op computes in float32 with the correctly rounded intrinsics,
which no compiler contracts, and rounds to the output's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainkernel.errors import ProgramError, show

Array = NDArray[np.float64]
Attrs = Mapping[str, Any]
Shape = tuple[int, ...]


class HasShape(Protocol):
    """What a shape rule sees of a tensor operand."""

    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True)
class Op:
    """One entry of the table.

    Attributes
    ----------
    name : str
    kind : str
        ``"pointwise"``, ``"reduction"`` or ``"product"``: which emitter and which fusion rules.
    num_inputs : tuple of int
        Allowed operand counts.
    shape : callable (input_shapes, attrs) -> tuple of output shapes
        The natural output shapes; raises ProgramError for shapes that do not fit. A pointwise
        output may be larger (broadcast), a reduction's may keep reduced dims as size 1.
    reference : callable (arrays, attrs, output_shapes) -> tuple of float64 arrays
    attrs : mapping of attribute name to (default, check)
        The check returns a message when a value is refused. A missing default is ``REQUIRED``.
    cuda : callable (operand expressions, attrs) -> expression, pointwise only
    cost : float
        Pointwise only: rough number of FMA-pipe instructions, for recompute against store.
    sample : (low, high)
        Range of the values that table-driven tests draw.
    max_ulps : float
        Error bound of the device's float32 result against the exact one, in units in the last
        place; 0.5 is correct rounding. For reductions and products per accumulated term.
    num_outputs : int
    scalar_operands : bool
        Whether Python scalars may be operands.
    overwrites : tuple of int
        Operands whose storage an output of the same shape and dtype may take over.
    """

    name: str
    kind: str
    num_inputs: tuple[int, ...]
    shape: Callable[[Sequence[Shape], Attrs], tuple[Shape, ...]]
    reference: Callable[[Sequence[Array], Attrs, Sequence[Shape]], tuple[Array, ...]]
    attrs: Mapping[str, tuple[Any, Callable[[Any], str | None]]] = field(default_factory=dict)
    cuda: Callable[[Sequence[str], Attrs], str] | None = None
    cost: float = 1.0
    sample: tuple[float, float] = (-2.0, 2.0)
    max_ulps: float = 0.5
    num_outputs: int = 1
    scalar_operands: bool = True
    overwrites: tuple[int, ...] = ()

    def attr(self, attrs: Attrs, key: str) -> Any:
        """The attribute's value, or its default."""
        return attrs[key] if key in attrs else self.attrs[key][0]


REQUIRED = object()


# ---------------------------------------------------------------------------- attribute checks


def is_number(value: Any) -> bool:
    """Whether ``value`` is a Python int or float (a bool is neither)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def to_float32(value: float) -> np.float32:
    """A Python number rounded to float32 (an int beyond its range becomes infinite)."""
    try:
        with np.errstate(over="ignore"):
            return np.float32(value)
    except OverflowError:
        return np.float32(math.inf if value > 0 else -math.inf)


def scale_of(attrs: Attrs, key: str) -> np.float32:
    """``alpha`` or ``beta`` as every stage sees it; a number that float32 rounds to 0 is 0."""
    return to_float32(attrs.get(key, 1))


def float_literal(value: float) -> str:
    """The float32 value of a Python number as a C++ expression, exact for every value."""
    rounded = to_float32(value)
    if np.isnan(rounded):
        return "__uint_as_float(0x7fffffffu)"
    if np.isinf(rounded):
        return "__uint_as_float(0x7f800000u)" if rounded > 0 else "__uint_as_float(0xff800000u)"
    text = repr(float(rounded))
    short = np.format_float_positional(rounded, unique=True) if 1e-4 <= abs(rounded) < 1e9 else str(rounded)
    if np.float32(short) == rounded:
        text = short
    if text.endswith("."):
        text += "0"
    if "." not in text and "e" not in text:
        text += ".0"
    return f"{text}f"


def _number(value: Any) -> str | None:
    return None if is_number(value) else f"must be a Python int or float, got {show(value)}"


def _optional_dims(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or not all(isinstance(d, int) and not isinstance(d, bool) for d in value):
        return f"must be None or a tuple of ints, got {show(value)}"
    return None


COMPARISONS: Mapping[str, str] = MappingProxyType(
    {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
)


def _comparison(value: Any) -> str | None:
    known = isinstance(value, str) and value in COMPARISONS
    return None if known else f"must be one of {', '.join(COMPARISONS)}, got {show(value)}"


_NUMBER = {name: (default, _number) for name, default in (("alpha", 1), ("beta", 1), ("threshold", 0), ("exponent", 2))}


# ---------------------------------------------------------------------------- shape rules


def broadcast_shapes(shapes: Sequence[Shape]) -> Shape:
    """The common broadcast shape.

    Raises
    ------
    ProgramError
        If the shapes do not broadcast together.
    """
    ndim = max((len(shape) for shape in shapes), default=0)
    result = []
    for place in range(-ndim, 0):
        sizes = {shape[place] for shape in shapes if len(shape) >= -place} - {1}
        if len(sizes) > 1:
            raise ProgramError(f"operand shapes {[list(s) for s in shapes]} do not broadcast together")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def broadcasts_to(shape: Shape, target: Shape) -> bool:
    """Whether ``shape`` broadcasts to ``target`` without enlarging it."""
    padded = (1,) * (len(target) - len(shape)) + shape
    return len(padded) == len(target) and all(size in (1, want) for size, want in zip(padded, target, strict=True))


def _pointwise_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    return (broadcast_shapes(shapes),)


def reduced_dims(shape: Shape, attrs: Attrs) -> tuple[int, ...]:
    """The dims that a reduction reduces, sorted; attr ``dims`` absent or None means all.

    Raises
    ------
    ProgramError
        If a dim is out of range or given twice.
    """
    dims = attrs.get("dims")
    if dims is None:
        return tuple(range(len(shape)))
    wrapped = []
    for dim in dims:
        if not -len(shape) <= dim < len(shape):
            raise ProgramError(f"reduction dim {show(dim)} is out of range for shape {list(shape)}")
        wrapped.append(dim % len(shape))
    if len(set(wrapped)) != len(wrapped):
        raise ProgramError(f"reduction dims {show(tuple(dims))} name a dim twice for shape {list(shape)}")
    return tuple(sorted(wrapped))


def _reduction_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    dims = reduced_dims(shapes[0], attrs)
    return (tuple(size for dim, size in enumerate(shapes[0]) if dim not in dims),)


def _max_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    dims = reduced_dims(shapes[0], attrs)
    if prod(shapes[0][dim] for dim in dims) == 0:
        raise ProgramError(f"the maximum of no elements is undefined: shape {list(shapes[0])}, dims {dims}")
    return _reduction_shape(shapes, attrs)


def _stats_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    return _max_shape(shapes, attrs) * 2


def _mm_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    a, b = shapes[-2:]
    if len(a) != 2 or len(b) != 2 or a[1] != b[0]:
        raise ProgramError(f"a matrix product needs shapes [m,k] and [k,n], got {list(a)} and {list(b)}")
    return ((a[0], b[1]),)


def _addmm_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    result = _mm_shape(shapes, attrs)
    if not broadcasts_to(shapes[0], result[0]):
        raise ProgramError(f"bias of shape {list(shapes[0])} does not broadcast to {list(result[0])}")
    return result


# ---------------------------------------------------------------------------- references


def _unary(function: Callable[[Array], Array]) -> Callable[[Sequence[Array], Attrs, Sequence[Shape]], tuple[Array]]:
    return lambda arrays, attrs, shapes: (function(arrays[0]),)


def _binary(function: Callable[[Array, Array], Array]) -> Callable[..., tuple[Array]]:
    return lambda arrays, attrs, shapes: (function(arrays[0], arrays[1]),)


def _scaled_sum(sign: float) -> Callable[..., tuple[Array]]:
    def reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
        a, b = arrays
        return (a + sign * np.float64(scale_of(attrs, "alpha")) * b,)

    return reference


def _pow_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    exponent = arrays[1] if len(arrays) == 2 else np.float64(to_float32(attrs.get("exponent", 2)))
    # Not np.power: it takes a square root for the exponent 0.5, which differs at -0 and -inf.
    return (arrays[0] * arrays[0] if exponent == 2 else np.float_power(arrays[0], exponent),)


def _threshold_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    grad, x = arrays
    return (np.where(x <= np.float64(to_float32(attrs.get("threshold", 0))), 0.0, grad),)


def _full_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (np.full(shapes[0], np.float64(to_float32(attrs["value"]))),)


def _compare_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    function = {
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
    }[attrs["comparison"]]
    return (function(arrays[0], arrays[1]).astype(np.float64),)


def _sum_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (np.sum(arrays[0], axis=reduced_dims(arrays[0].shape, attrs)),)


def _mean_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    dims = reduced_dims(arrays[0].shape, attrs)
    count = np.float64(prod(arrays[0].shape[dim] for dim in dims))
    return (np.asarray(np.sum(arrays[0], axis=dims)) / count,)


def _max_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (np.max(arrays[0], axis=reduced_dims(arrays[0].shape, attrs)),)


def _stats_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array, Array]:
    dims = reduced_dims(arrays[0].shape, attrs)
    # A row's maximum that is infinite must not turn the row's sum into NaN by inf - inf.
    largest = np.max(arrays[0], axis=dims, keepdims=True)
    shifted = np.where(arrays[0] == largest, 0.0, arrays[0] - largest)
    return np.max(arrays[0], axis=dims), np.sum(np.exp(shifted), axis=dims)


def _product(a: Array, b: Array) -> Array:
    return np.matmul(a, b) if a.shape[1] else np.zeros((a.shape[0], b.shape[1]))


def _mm_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (_product(arrays[0], arrays[1]),)


def _addmm_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    bias, a, b = arrays
    alpha = np.float64(scale_of(attrs, "alpha"))
    beta = np.float64(scale_of(attrs, "beta"))
    result = np.zeros(shapes[0]) if alpha == 0 else alpha * _product(a, b)
    return (result if beta == 0 else result + beta * np.broadcast_to(bias, shapes[0]),)


# ---------------------------------------------------------------------------- CUDA expressions


def _call(function: str) -> Callable[[Sequence[str], Attrs], str]:
    return lambda args, attrs: f"{function}({', '.join(args)})"


def _scaled_sum_cuda(function: str, sign: float) -> Callable[[Sequence[str], Attrs], str]:
    def expression(args: Sequence[str], attrs: Attrs) -> str:
        alpha = scale_of(attrs, "alpha")
        if alpha == 1:
            return f"{function}({args[0]}, {args[1]})"
        return f"__fmaf_rn({float_literal(sign * float(alpha))}, {args[1]}, {args[0]})"

    return expression


def _div_cuda(args: Sequence[str], attrs: Attrs) -> str:
    """A quotient; by a power of two it is the product with the exact reciprocal, the same bits."""
    divisor = args[1].removesuffix("f")
    if divisor.replace(".", "", 1).isdigit() and math.frexp(float(divisor))[0] == 0.5:
        return f"__fmul_rn({args[0]}, {float_literal(1.0 / float(divisor))})"
    return f"__fdiv_rn({args[0]}, {args[1]})"


def _pow_cuda(args: Sequence[str], attrs: Attrs) -> str:
    exponent = args[1] if len(args) == 2 else float_literal(attrs.get("exponent", 2))
    if exponent == "2.0f":
        return f"__fmul_rn({args[0]}, {args[0]})"
    return f"powf({args[0]}, {exponent})"


def _threshold_cuda(args: Sequence[str], attrs: Attrs) -> str:
    return f"({args[1]} <= {float_literal(attrs.get('threshold', 0))} ? 0.0f : {args[0]})"


def _compare_cuda(args: Sequence[str], attrs: Attrs) -> str:
    return f"({args[0]} {COMPARISONS[attrs['comparison']]} {args[1]} ? 1.0f : 0.0f)"


def _pointwise(
    name: str,
    num_inputs: tuple[int, ...],
    reference: Callable[..., tuple[Array, ...]],
    cuda: Callable[[Sequence[str], Attrs], str],
    **rest: Any,
) -> Op:
    rest.setdefault("overwrites", tuple(range(max(num_inputs))))
    return Op(name, "pointwise", num_inputs, _pointwise_shape, reference, cuda=cuda, **rest)


_DIMS = {"dims": (None, _optional_dims)}

_ENTRIES = (
    _pointwise("add", (2,), _scaled_sum(1.0), _scaled_sum_cuda("__fadd_rn", 1.0), attrs={"alpha": _NUMBER["alpha"]}),
    _pointwise("sub", (2,), _scaled_sum(-1.0), _scaled_sum_cuda("__fsub_rn", -1.0), attrs={"alpha": _NUMBER["alpha"]}),
    _pointwise("mul", (2,), _binary(np.multiply), _call("__fmul_rn")),
    _pointwise("div", (2,), _binary(np.divide), _div_cuda, cost=8),
    # Not a minus sign: ptxas turns the negation of a selected 0 or 1 (a bool operand) into an
    # integer conversion, which gives +0 for -0. A product by -1 is exact and survives.
    _pointwise("neg", (1,), _unary(np.negative), lambda args, attrs: f"__fmul_rn(-1.0f, {args[0]})"),
    _pointwise("cast", (1,), _unary(lambda x: x), lambda args, attrs: args[0], cost=0),
    _pointwise(
        "relu",
        (1,),
        _unary(lambda x: np.where(x < 0, 0.0, x)),
        lambda args, attrs: f"({args[0]} < 0.0f ? 0.0f : {args[0]})",
    ),
    _pointwise(
        "pow",
        (1, 2),
        _pow_reference,
        _pow_cuda,
        attrs={"exponent": _NUMBER["exponent"]},
        cost=20,
        sample=(0.25, 2.0),
        max_ulps=8,
    ),
    _pointwise(
        "threshold_backward", (2,), _threshold_reference, _threshold_cuda, attrs={"threshold": _NUMBER["threshold"]}
    ),
    _pointwise(
        "full",
        (0,),
        _full_reference,
        lambda args, attrs: float_literal(attrs["value"]),
        attrs={"value": (REQUIRED, _number)},
        cost=0,
    ),
    _pointwise("exp", (1,), _unary(np.exp), _call("expf"), cost=8, max_ulps=2),
    _pointwise("log", (1,), _unary(np.log), _call("logf"), cost=12, sample=(0.1, 4.0), max_ulps=2),
    _pointwise("tanh", (1,), _unary(np.tanh), _call("tanhf"), cost=14, max_ulps=3),
    _pointwise("sqrt", (1,), _unary(np.sqrt), _call("__fsqrt_rn"), cost=8, sample=(0.0, 4.0)),
    _pointwise("maximum", (2,), _binary(np.maximum), _call("tk_maximum")),
    _pointwise("compare", (2,), _compare_reference, _compare_cuda, attrs={"comparison": (REQUIRED, _comparison)}),
    _pointwise(
        "where",
        (3,),
        lambda arrays, attrs, shapes: (np.where(arrays[0] != 0, arrays[1], arrays[2]),),
        lambda args, attrs: f"({args[0]} != 0.0f ? {args[1]} : {args[2]})",
    ),
    Op("sum", "reduction", (1,), _reduction_shape, _sum_reference, attrs=_DIMS, scalar_operands=False),
    Op("mean", "reduction", (1,), _reduction_shape, _mean_reference, attrs=_DIMS, scalar_operands=False),
    Op("max", "reduction", (1,), _max_shape, _max_reference, attrs=_DIMS, scalar_operands=False),
    Op(
        "softmax_stats",
        "reduction",
        (1,),
        _stats_shape,
        _stats_reference,
        attrs=_DIMS,
        max_ulps=4,
        num_outputs=2,
        scalar_operands=False,
    ),
    Op("mm", "product", (2,), _mm_shape, _mm_reference, scalar_operands=False),
    Op(
        "addmm",
        "product",
        (3,),
        _addmm_shape,
        _addmm_reference,
        attrs={"alpha": _NUMBER["alpha"], "beta": _NUMBER["beta"]},
        scalar_operands=False,
    ),
)

OPS: Mapping[str, Op] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""Every operation by name."""
