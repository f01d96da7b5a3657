"""Pointwise entries: one element of the output from the same element of each operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainkernel.ops.domains import to_float32
from trainkernel.ops.entry import (
    COMPARISONS,
    NUMBER,
    REQUIRED,
    Array,
    Attrs,
    Op,
    Rule,
    Shape,
    check_comparison,
    check_number,
    float_literal,
    is_number,
    literal,
    pointwise_shape,
)

Reference = Callable[[Sequence[Array], Attrs, Sequence[Shape]], tuple[Any, ...]]
Cuda = Callable[[Sequence[str], Attrs], str]
Typed = Callable[[Sequence[str], Attrs, str], str]

# ---------------------------------------------------------------------------- references


def _unary(function: Callable[[Array], Array]) -> Reference:
    return lambda arrays, attrs, shapes: (function(arrays[0]),)


def _binary(function: Callable[[Array, Array], Array]) -> Reference:
    return lambda arrays, attrs, shapes: (function(arrays[0], arrays[1]),)


def _scaled_sum(sign: int) -> Reference:
    def reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
        a, b = arrays
        return (a + sign * attrs.get("alpha", 1) * b,)

    return reference


def _pow_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    exponent = arrays[1] if len(arrays) == 2 else attrs.get("exponent", 2)
    # Not np.power: it takes a square root for the exponent 0.5, which differs at -0 and -inf.
    return (arrays[0] * arrays[0] if np.ndim(exponent) == 0 and exponent == 2 else np.float_power(arrays[0], exponent),)


def _threshold_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    grad, x = arrays
    return (np.where(x <= attrs.get("threshold", 0), 0, grad),)


def _full_reference(arrays: Sequence[Array], attrs: Attrs, shapes: Sequence[Shape]) -> tuple[Array]:
    return (np.full(shapes[0], attrs["value"]),)


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


def _floor_divide(a: Array, b: Array) -> Array:
    """Rounded down; an integer divided by zero gives -1 (all bits set), as XLA does."""
    if a.dtype.kind == "f":
        return np.floor_divide(a, b)
    return np.where(b == 0, -1, np.floor_divide(a, np.where(b == 0, 1, b)))


def _remainder(a: Array, b: Array) -> Array:
    """With the divisor's sign; an integer modulo zero is the dividend, as in XLA."""
    if a.dtype.kind == "f":
        return np.remainder(a, b)
    return np.where(b == 0, a, np.remainder(a, np.where(b == 0, 1, b)))


def _whole(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A rounding to whole numbers, which integers are already."""
    return lambda x: function(x) if x.dtype.kind == "f" else x


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


# ---------------------------------------------------------------------------- float32 expressions


def _call(function: str) -> Cuda:
    return lambda args, attrs: f"{function}({', '.join(args)})"


def _scaled_sum_cuda(function: str, sign: float) -> Cuda:
    def expression(args: Sequence[str], attrs: Attrs) -> str:
        alpha = to_float32(attrs.get("alpha", 1))
        if alpha == 1:
            return f"{function}({args[0]}, {args[1]})"
        return f"__fmaf_rn({float_literal(sign * float(alpha))}, {args[1]}, {args[0]})"

    return expression


def _div_cuda(args: Sequence[str], attrs: Attrs) -> str:
    """A quotient; by a power of two it is the product with the exact reciprocal, the same bits."""
    divisor = args[1].removesuffix("f")
    if divisor.replace(".", "", 1).isdigit() and math.frexp(float(divisor))[0] == 0.5:
        return f"__fmul_rn({args[0]}, {float_literal(1.0 / float(divisor))})"
    return f"tk_divide({args[0]}, {args[1]})"


def _pow_cuda(args: Sequence[str], attrs: Attrs) -> str:
    exponent = args[1] if len(args) == 2 else float_literal(attrs.get("exponent", 2))
    if exponent == "2.0f":
        return f"__fmul_rn({args[0]}, {args[0]})"
    return f"powf({args[0]}, {exponent})"


def _threshold_cuda(args: Sequence[str], attrs: Attrs) -> str:
    return f"({args[1]} <= {float_literal(attrs.get('threshold', 0))} ? 0.0f : {args[0]})"


def _negated(text: str) -> str:
    if text.startswith("-"):
        return text[1:]
    return f"-{text}" if text[0].isdigit() else f"__fmul_rn(-1.0f, {text})"


def _where_cuda(args: Sequence[str], attrs: Attrs) -> str:
    """A choice; with -0 among the values, minus one times the choice of the negated values.

    ptxas turns any choice between the constants -0.0f and -1.0f, however they are spelled, into the
    conversion of an integer 0 or -1, which gives +0. It leaves a product by -1 alone.
    """
    condition, a, b = args
    if "-0.0f" in (a, b):
        return f"__fmul_rn(-1.0f, ({condition} != 0.0f ? {_negated(a)} : {_negated(b)}))"
    return f"({condition} != 0.0f ? {a} : {b})"


def _compare_cuda(args: Sequence[str], attrs: Attrs) -> str:
    return f"({args[0]} {COMPARISONS[attrs['comparison']]} {args[1]} ? 1.0f : 0.0f)"


# ---------------------------------------------------------------------------- expressions in other domains


def _scaled_sum_typed(function: str) -> Typed:
    def expression(args: Sequence[str], attrs: Attrs, domain: str) -> str:
        alpha = attrs.get("alpha", 1)
        second = args[1] if alpha == 1 else f"tk_mul({literal(alpha, domain)}, {args[1]})"
        return f"{function}({args[0]}, {second})"

    return expression


def _cast_typed(args: Sequence[str], attrs: Attrs, domain: str) -> str:
    return args[0]


def _pow_typed(args: Sequence[str], attrs: Attrs, domain: str) -> str:
    exponent = args[1] if len(args) == 2 else literal(attrs.get("exponent", 2), domain)
    return f"tk_mul({args[0]}, {args[0]})" if exponent == "2.0" else f"tk_power({args[0]}, {exponent})"


def _threshold_typed(args: Sequence[str], attrs: Attrs, domain: str) -> str:
    return f"({args[1]} <= {literal(attrs.get('threshold', 0), domain)} ? {literal(0, domain)} : {args[0]})"


def _full_typed(args: Sequence[str], attrs: Attrs, domain: str) -> str:
    return literal(attrs["value"], domain)


def _compare_typed(args: Sequence[str], attrs: Attrs, domain: str) -> str:
    return f"({args[0]} {COMPARISONS[attrs['comparison']]} {args[1]} ? {literal(1, domain)} : {literal(0, domain)})"


def _where_typed(args: Sequence[str], attrs: Attrs, domain: str) -> str:
    return f"({args[0]} != 0 ? {args[1]} : {args[2]})"


# ---------------------------------------------------------------------------- derivatives


def _unary_vjp(rule: Callable[[Any, Any, Any, Any], Any]) -> Rule:
    """``rule(b, ct, y, x)`` gives the cotangent of the one operand."""
    return lambda b, cts, outs, ins, attrs: (rule(b, cts[0], outs[0], ins[0]),)


def _binary_vjp(rule: Callable[[Any, Any, Any, Any, Any], Sequence[Any]]) -> Rule:
    """``rule(b, ct, out, x, y)`` gives both cotangents."""
    return lambda b, cts, outs, ins, attrs: rule(b, cts[0], outs[0], ins[0], ins[1])


def _no_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    """The derivative is zero, or the values are integers."""
    return (None,) * len(ins)


def _scaled_sum_vjp(sign: int) -> Rule:
    def rule(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
        factor = sign * attrs.get("alpha", 1)
        second = cts[0] if factor == 1 else -cts[0] if factor == -1 else cts[0] * factor
        return cts[0], second

    return rule


def _pow_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    exponent = ins[1] if len(ins) == 2 else attrs.get("exponent", 2)
    x, rest = ins[0], (None,) * (len(ins) - 1)
    if exponent == 0:
        return (None, *rest)
    inner = 1.0 if exponent == 1 else x if exponent == 2 else b.pow(x, exponent - 1)
    return (cts[0] * (inner * exponent), *rest)


def _power_vjp(b: Any, ct: Any, out: Any, x: Any, y: Any) -> Sequence[Any]:
    """Zero where the exponent is zero, and for the exponent where the base is zero, as in JAX."""
    if is_number(x):
        return None, ct * (out * (math.log(x) if x > 0 else 0.0 if x == 0 else math.nan))
    base = ct * y * b.power(x, b.where(b.compare(y, 0, "eq"), 1, y - 1))
    exponent = ct * b.log(b.where(b.compare(x, 0, "eq"), 1, x)) * out
    return base, exponent


def _arctan2_vjp(b: Any, ct: Any, out: Any, y: Any, x: Any) -> Sequence[Any]:
    share = ct / (x * x + y * y)
    return share * x, -(share * y)


def _extremum_vjp(b: Any, ct: Any, out: Any, x: Any, y: Any) -> Sequence[Any]:
    """Half to each where they tie, as in JAX."""

    def share(own: Any, other: Any) -> Any:
        half = b.where(b.compare(own, other, "eq"), ct * 0.5, ct)
        return b.where(b.compare(own, out, "eq"), half, 0)

    return share(x, y), share(y, x)


def _where_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return None, b.where(ins[0], cts[0], 0), b.where(ins[0], 0, cts[0])


def _threshold_vjp(b: Any, cts: Sequence[Any], outs: Sequence[Any], ins: Sequence[Any], attrs: Attrs) -> Sequence[Any]:
    return b.threshold_backward(cts[0], ins[1], threshold=attrs.get("threshold", 0)), None


# ---------------------------------------------------------------------------- entries


def _pointwise(name: str, num_inputs: tuple[int, ...], reference: Reference, cuda: Cuda, **rest: Any) -> Op:
    rest.setdefault("overwrites", tuple(range(max(num_inputs))))
    return Op(name, "pointwise", num_inputs, pointwise_shape, reference, cuda=cuda, **rest)


def _float(name: str, reference: Callable[[Array], Array], cuda: str, vjp: Any, **rest: Any) -> Op:
    """A function of one floating operand."""
    return _pointwise(name, (1,), _unary(reference), _call(cuda), accepts="float", vjp=_unary_vjp(vjp), **rest)


def _step(name: str, reference: Callable[[Array], Array], cuda: str) -> Op:
    """A function of one operand with derivative zero."""
    return _pointwise(name, (1,), _unary(reference), _call(cuda), vjp=_no_vjp)


def _bitwise(name: str, num_inputs: int, reference: Callable[..., Array]) -> Op:
    unary_or_binary = _unary(reference) if num_inputs == 1 else _binary(reference)
    return _pointwise(name, (num_inputs,), unary_or_binary, _call(f"tk_{name}"), accepts="int", vjp=_no_vjp)


def _shift(direction: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A shift by at least the width, or by a negative count, is the caller's error; it is taken modulo 64 here."""
    return lambda a, b: direction(a, b & 63)


POINTWISE = (
    _pointwise(
        "add",
        (2,),
        _scaled_sum(1),
        _scaled_sum_cuda("__fadd_rn", 1.0),
        typed=_scaled_sum_typed("tk_add"),
        attrs={"alpha": NUMBER["alpha"]},
        constants=("alpha",),
        vjp=_scaled_sum_vjp(1),
    ),
    _pointwise(
        "sub",
        (2,),
        _scaled_sum(-1),
        _scaled_sum_cuda("__fsub_rn", -1.0),
        typed=_scaled_sum_typed("tk_sub"),
        attrs={"alpha": NUMBER["alpha"]},
        constants=("alpha",),
        vjp=_scaled_sum_vjp(-1),
    ),
    _pointwise(
        "mul",
        (2,),
        _binary(np.multiply),
        _call("__fmul_rn"),
        vjp=_binary_vjp(lambda b, ct, out, x, y: (ct * y, ct * x)),
    ),
    _pointwise(
        "div",
        (2,),
        _binary(np.divide),
        _div_cuda,
        cost=8,
        accepts="float",
        vjp=_binary_vjp(lambda b, ct, out, x, y: (ct / y, -(ct * out) / y)),
    ),
    # Not a minus sign: ptxas turns the negation of a selected 0 or 1 (a bool operand) into an
    # integer conversion, which gives +0 for -0. A product by -1 is exact and survives.
    _pointwise(
        "neg",
        (1,),
        _unary(np.negative),
        lambda args, attrs: f"__fmul_rn(-1.0f, {args[0]})",
        vjp=_unary_vjp(lambda b, ct, y, x: -ct),
    ),
    _pointwise(
        "cast",
        (1,),
        _unary(lambda x: x),
        lambda args, attrs: args[0],
        typed=_cast_typed,
        cost=0,
        vjp=_unary_vjp(lambda b, ct, y, x: b.cast(ct, x.dtype)),
    ),
    _pointwise(
        "relu",
        (1,),
        _unary(lambda x: np.where(x < 0, 0, x)),
        lambda args, attrs: f"({args[0]} < 0.0f ? 0.0f : {args[0]})",
        picks=True,
        vjp=_unary_vjp(lambda b, ct, y, x: b.threshold_backward(ct, y)),
    ),
    _pointwise(
        "pow",
        (1, 2),
        _pow_reference,
        _pow_cuda,
        typed=_pow_typed,
        attrs={"exponent": NUMBER["exponent"]},
        constants=("exponent",),
        accepts="float",
        cost=20,
        sample=(0.25, 2.0),
        max_ulps=8,
        vjp=_pow_vjp,
    ),
    _pointwise(
        "power",
        (2,),
        _binary(np.power),
        _call("powf"),
        accepts="float",
        cost=20,
        sample=(0.25, 2.0),
        max_ulps=8,
        vjp=_binary_vjp(_power_vjp),
    ),
    _pointwise(
        "threshold_backward",
        (2,),
        _threshold_reference,
        _threshold_cuda,
        typed=_threshold_typed,
        attrs={"threshold": NUMBER["threshold"]},
        constants=("threshold",),
        picks=True,
        vjp=_threshold_vjp,
    ),
    _pointwise(
        "full",
        (0,),
        _full_reference,
        lambda args, attrs: float_literal(attrs["value"]),
        typed=_full_typed,
        attrs={"value": (REQUIRED, check_number)},
        constants=("value",),
        cost=0,
        vjp=_no_vjp,
    ),
    _float("exp", np.exp, "expf", lambda b, ct, y, x: ct * y, cost=8, max_ulps=2),
    _float("expm1", np.expm1, "expm1f", lambda b, ct, y, x: ct * (y + 1), cost=12, max_ulps=2),
    _float("log", np.log, "logf", lambda b, ct, y, x: ct / x, cost=12, sample=(0.1, 4.0), max_ulps=2),
    _float("log1p", np.log1p, "log1pf", lambda b, ct, y, x: ct / (x + 1), cost=14, sample=(-0.9, 4.0), max_ulps=2),
    _float("tanh", np.tanh, "tanhf", lambda b, ct, y, x: ct * (1 - y * y), cost=14, max_ulps=3),
    _float("sigmoid", _sigmoid, "tk_sigmoid", lambda b, ct, y, x: ct * (y * (1 - y)), cost=16, max_ulps=4),
    _float("softplus", _softplus, "tk_softplus", lambda b, ct, y, x: ct * b.sigmoid(x), cost=24, max_ulps=4),
    _float(
        "erf",
        _erf,
        "erff",
        lambda b, ct, y, x: ct * (b.exp(-(x * x)) * (2 / math.sqrt(math.pi))),
        cost=16,
        max_ulps=3,
    ),
    _float("sin", np.sin, "sinf", lambda b, ct, y, x: ct * b.cos(x), cost=20, max_ulps=3),
    _float("cos", np.cos, "cosf", lambda b, ct, y, x: -(ct * b.sin(x)), cost=20, max_ulps=3),
    _float(
        "arcsin",
        np.arcsin,
        "asinf",
        lambda b, ct, y, x: ct * b.rsqrt(1 - x * x),
        cost=24,
        sample=(-0.9, 0.9),
        max_ulps=3,
    ),
    _float(
        "arccos",
        np.arccos,
        "acosf",
        lambda b, ct, y, x: -(ct * b.rsqrt(1 - x * x)),
        cost=24,
        sample=(-0.9, 0.9),
        max_ulps=3,
    ),
    _float("arctan", np.arctan, "atanf", lambda b, ct, y, x: ct / (x * x + 1), cost=20, max_ulps=3),
    _pointwise(
        "arctan2",
        (2,),
        _binary(np.arctan2),
        _call("atan2f"),
        accepts="float",
        cost=32,
        max_ulps=4,
        vjp=_binary_vjp(_arctan2_vjp),
    ),
    _float("arcsinh", np.arcsinh, "asinhf", lambda b, ct, y, x: ct * b.rsqrt(x * x + 1), cost=24, max_ulps=4),
    _float(
        "arccosh",
        np.arccosh,
        "acoshf",
        lambda b, ct, y, x: ct * b.rsqrt((x - 1) * (x + 1)),
        cost=24,
        sample=(1.1, 4.0),
        max_ulps=5,
    ),
    _float("cbrt", np.cbrt, "cbrtf", lambda b, ct, y, x: ct / (y * y * 3), cost=16, max_ulps=2),
    _float("sqrt", np.sqrt, "tk_square_root", lambda b, ct, y, x: ct / (y * 2), cost=8, sample=(0.0, 4.0)),
    _float(
        "rsqrt",
        lambda x: 1.0 / np.sqrt(x),
        "tk_rsqrt",
        lambda b, ct, y, x: ct * (y / x * -0.5),
        cost=16,
        sample=(0.1, 4.0),
        max_ulps=2,
    ),
    _pointwise("abs", (1,), _unary(np.abs), _call("fabsf"), vjp=_unary_vjp(lambda b, ct, y, x: ct * b.sign(x)), cost=1),
    _step("sign", np.sign, "tk_sign"),
    _step("floor", _whole(np.floor), "floorf"),
    _step("ceil", _whole(np.ceil), "ceilf"),
    _step("round", _whole(np.rint), "rintf"),
    _pointwise("maximum", (2,), _binary(np.maximum), _call("tk_maximum"), vjp=_binary_vjp(_extremum_vjp)),
    _pointwise("minimum", (2,), _binary(np.minimum), _call("tk_minimum"), vjp=_binary_vjp(_extremum_vjp)),
    _pointwise(
        "remainder",
        (2,),
        _binary(_remainder),
        _call("tk_remainder"),
        cost=20,
        sample=(0.25, 3.0),
        vjp=_binary_vjp(lambda b, ct, out, x, y: (ct, -(ct * b.floor(x / y)))),
    ),
    _pointwise(
        "floor_divide",
        (2,),
        _binary(_floor_divide),
        _call("tk_floor_divide"),
        cost=20,
        sample=(0.25, 3.0),
        vjp=_no_vjp,
    ),
    _pointwise(
        "compare",
        (2,),
        _compare_reference,
        _compare_cuda,
        typed=_compare_typed,
        attrs={"comparison": (REQUIRED, check_comparison)},
        vjp=_no_vjp,
    ),
    _pointwise(
        "where",
        (3,),
        lambda arrays, attrs, shapes: (np.where(arrays[0] != 0, arrays[1], arrays[2]),),
        _where_cuda,
        typed=_where_typed,
        data_operands=(1, 2),
        vjp=_where_vjp,
    ),
    _bitwise("bitwise_and", 2, np.bitwise_and),
    _bitwise("bitwise_or", 2, np.bitwise_or),
    _bitwise("bitwise_xor", 2, np.bitwise_xor),
    _bitwise("bitwise_not", 1, np.bitwise_not),
    _bitwise("shift_left", 2, _shift(np.left_shift)),
    _bitwise("shift_right", 2, _shift(np.right_shift)),
)
