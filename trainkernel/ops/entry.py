"""The type of an entry of the op table, and the checks and shape rules that entries share.

An entry holds the op's operand count, its attributes with their checks, its shape rule, its
NumPy meaning, its CUDA expression (pointwise ops) or emitter kind (reductions, products), and
what the table-driven tests need: a sample range and an error bound.

Numbers: an operation computes in one domain (``trainkernel.ops.domains``); a Python scalar
operand or attribute is converted to it first. The reference gets float64 (or int64) arrays
holding the operands' exact values and its result is rounded once to the output's dtype. On the
device a pointwise op computes in its domain, floats with the correctly rounded intrinsics, which
no compiler contracts, and the result is converted to the output's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainkernel.errors import ProgramError, show
from trainkernel.ops.domains import to_float32

Array = NDArray[Any]
Attrs = Mapping[str, Any]
Shape = tuple[int, ...]


Rule: TypeAlias = "Callable[[Any, Sequence[Any], Sequence[Any], Sequence[Any], Attrs], Sequence[Any]]"
BatchRule: TypeAlias = "Callable[[Any, Sequence[Any], Sequence[bool], Attrs, int], Any]"


@dataclass(frozen=True)
class Op:
    """One entry of the table.

    Attributes
    ----------
    name : str
    kind : str
        ``"pointwise"``, ``"reduction"``, ``"product"`` or ``"scan"``: which emitter and which
        fusion rules.
    num_inputs : tuple of int, or range
        Allowed operand counts.
    shape : callable (input_shapes, attrs) -> tuple of output shapes
        The natural output shapes; raises ProgramError for shapes that do not fit. A pointwise
        output may be larger (broadcast), a reduction's may keep reduced dims as size 1.
    reference : callable (arrays, attrs, output_shapes) -> tuple of arrays
        Arrays are float64, in an integer domain int64.
    attrs : mapping of attribute name to (default, check)
        The check returns a message when a value is refused. A missing default is ``REQUIRED``.
    cuda : callable (operand expressions, attrs) -> expression
        Pointwise only: the float32 expression.
    typed : callable (operand expressions, attrs, domain) -> expression
        Pointwise only: the expression in any other domain; where left out, a call of the device
        function ``tk_<name>`` (``codegen/cuda/typed.cuh``).
    accepts : str
        ``"any"``, ``"float"`` or ``"int"``: see ``trainkernel.ops.domains.promote``.
    data_operands : tuple of int or None
        Operands that decide the domain and are converted to it; None means all. The others
        (indices, conditions, keys) keep the domain of their own dtype.
    constants : tuple of str
        Attributes that are numbers of the operation's domain.
    indexed : bool
        A pointwise op whose operands are read at other coordinates than its output's.
    vjp : callable (b, cotangents, outputs, inputs, attrs) -> cotangents of the inputs
        ``b`` builds operations (``trainkernel.primitives``); None stands for zero, among the
        cotangents too. Missing where the front end never emits the op.
    batch : callable (b, inputs, batched, attrs, size) -> outputs
        Batched operands and all outputs have the batch of ``size`` in front. Pointwise ops that
        are not indexed need none.
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
    picks : bool
        Pointwise only: each result is one of the operands' values, or 0, so that it needs no rounding where all of
        them have its dtype.
    overwrites : tuple of int
        Operands whose storage an output of the same shape and dtype may take over.
    """

    name: str
    kind: str
    num_inputs: Sequence[int]
    shape: Callable[[Sequence[Shape], Attrs], tuple[Shape, ...]]
    reference: Callable[[Sequence[Array], Attrs, Sequence[Shape]], tuple[Any, ...]]
    attrs: Mapping[str, tuple[Any, Callable[[Any], str | None]]] = field(default_factory=dict)
    cuda: Callable[[Sequence[str], Attrs], str] | None = None
    typed: Callable[[Sequence[str], Attrs, str], str] | None = None
    cost: float = 1.0
    sample: tuple[float, float] = (-2.0, 2.0)
    max_ulps: float = 0.5
    num_outputs: int = 1
    scalar_operands: bool = True
    picks: bool = False
    overwrites: tuple[int, ...] = ()
    accepts: str = "any"
    data_operands: tuple[int, ...] | None = None
    constants: tuple[str, ...] = ()
    indexed: bool = False
    vjp: Rule | None = None
    batch: BatchRule | None = None

    def attr(self, attrs: Attrs, key: str) -> Any:
        """The attribute's value, or its default."""
        return attrs[key] if key in attrs else self.attrs[key][0]

    def expression(self, args: Sequence[str], attrs: Attrs, domain: str) -> str:
        """The CUDA expression of a pointwise op over operand expressions in a domain."""
        if domain == "float32":
            assert self.cuda is not None
            return self.cuda(args, attrs)
        if self.typed is not None:
            return self.typed(args, attrs, domain)
        return f"tk_{self.name}({', '.join(args)})"


REQUIRED = object()


# ---------------------------------------------------------------------------- attribute checks


def is_number(value: Any) -> bool:
    """Whether ``value`` is a Python int or float (a bool is neither)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


def _double_literal(value: float) -> str:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if math.isfinite(number):
        return repr(number)
    bits = "0x7ff8000000000000" if math.isnan(number) else "0x7ff0000000000000" if number > 0 else "0xfff0000000000000"
    return f"__longlong_as_double({bits}ll)"


_INTEGER_SUFFIXES = {"int32": "", "uint32": "u", "int64": "ll"}


def literal(value: float, domain: str) -> str:
    """A Python number as a C++ expression of a domain's type, exact for every value that the domain holds."""
    if domain == "float32":
        return float_literal(value)
    if domain == "float64":
        return _double_literal(value)
    suffix = _INTEGER_SUFFIXES[domain]
    if value in (-(2**31), -(2**63)):
        return f"({value + 1}{suffix} - 1)"  # the positive number is beyond the type
    return f"{value}{suffix}"


def check_number(value: Any) -> str | None:
    return None if is_number(value) else f"must be a Python int or float, got {show(value)}"


def check_optional_dims(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or not all(isinstance(d, int) and not isinstance(d, bool) for d in value):
        return f"must be None or a tuple of ints, got {show(value)}"
    return None


COMPARISONS: Mapping[str, str] = MappingProxyType(
    {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
)


def check_dims(value: Any) -> str | None:
    """A tuple of ints."""
    return "must be a tuple of ints, got None" if value is None else check_optional_dims(value)


def check_dim(value: Any) -> str | None:
    """One int."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return None if is_int else f"must be an int, got {show(value)}"


def check_sizes(value: Any) -> str | None:
    """A tuple of ints that are not negative."""
    message = check_dims(value)
    if message is None and any(size < 0 for size in value):
        return f"must hold ints >= 0, got {show(value)}"
    return message


def check_flag(value: Any) -> str | None:
    """A bool."""
    return None if isinstance(value, bool) else f"must be True or False, got {show(value)}"


def wrap_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front.

    Raises
    ------
    ProgramError
        If it is out of range.
    """
    if not -ndim <= dim < ndim:
        raise ProgramError(f"dim {dim} is out of range for a tensor of rank {ndim}")
    return dim % ndim


def check_comparison(value: Any) -> str | None:
    known = isinstance(value, str) and value in COMPARISONS
    return None if known else f"must be one of {', '.join(COMPARISONS)}, got {show(value)}"


NUMBER = {
    name: (default, check_number) for name, default in (("alpha", 1), ("beta", 1), ("threshold", 0), ("exponent", 2))
}


# ---------------------------------------------------------------------------- shape rules


def broadcast_shapes(shapes: Sequence[Shape]) -> Shape:
    """The common broadcast shape.

    Raises
    ------
    ProgramError
        If the shapes do not broadcast together.
    """
    if not shapes:
        return ()
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    ndim = max([len(shape) for shape in shapes])
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


def pointwise_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
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
    message = check_optional_dims(dims)
    if message is not None:
        raise ProgramError(f"attribute 'dims' {message}")
    wrapped = []
    for dim in dims:
        if not -len(shape) <= dim < len(shape):
            raise ProgramError(f"reduction dim {show(dim)} is out of range for shape {list(shape)}")
        wrapped.append(dim % len(shape))
    if len(set(wrapped)) != len(wrapped):
        raise ProgramError(f"reduction dims {show(tuple(dims))} name a dim twice for shape {list(shape)}")
    return tuple(sorted(wrapped))


def reduction_shape(shapes: Sequence[Shape], attrs: Attrs) -> tuple[Shape, ...]:
    dims = reduced_dims(shapes[0], attrs)
    return (tuple(size for dim, size in enumerate(shapes[0]) if dim not in dims),)
