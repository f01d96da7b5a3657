"""Functions of one element at a time: exponentials and hyperbolic functions, rounding, extrema, selection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.promotion import is_float, promote
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar, is_tracing

Value = Any

__all__ = [
    "abs", "absolute", "acosh", "arccosh", "arcsinh", "arctanh", "around", "asinh", "atanh", "cbrt", "ceil", "clip",
    "copysign", "cosh", "exp", "exp2", "expm1", "fabs", "fix", "floor", "fmax", "fmin", "heaviside", "hypot",
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "log", "log10", "log1p", "log2", "logaddexp", "logaddexp2",
    "maximum", "minimum", "nan_to_num", "reciprocal", "rint", "round", "select", "sign", "signbit", "sinh", "sqrt",
    "square", "tanh", "trunc", "where",
]  # fmt: skip


# ---------------------------------------------------------------------------- exponentials, logarithms and roots


def floating_function(name: str, op: Callable[..., Value], doc: str) -> Callable[[Value], Value]:
    """A function whose result is floating for integers too."""

    def function(x: Value, /) -> Value:
        return b.unary(op, x, floating=True)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


exp = floating_function("exp", b.exp, "e to the power of each element.")
expm1 = floating_function("expm1", b.expm1, "``exp(x) - 1``, exact for small ``x``.")
log = floating_function("log", b.log, "The natural logarithm of each element.")
log1p = floating_function("log1p", b.log1p, "``log(1 + x)``, exact for small ``x``.")
sqrt = floating_function("sqrt", b.sqrt, "The square root of each element.")
tanh = floating_function("tanh", b.tanh, "The hyperbolic tangent of each element.")
cbrt = floating_function("cbrt", b.cbrt, "The cube root of each element, of negative ones too.")
arcsinh = floating_function("arcsinh", b.arcsinh, "The inverse of ``sinh``.")
arccosh = floating_function("arccosh", b.arccosh, "The inverse of ``cosh``, not negative; NaN below 1.")


def exp2(x: Value, /) -> Value:
    """2 to the power of each element."""
    return b.unary(lambda value: b.power(2.0, value), x, floating=True)


def log2(x: Value, /) -> Value:
    """The logarithm to base 2 of each element."""
    return b.unary(lambda value: b.div(b.log(value), math.log(2.0)), x, floating=True)


def log10(x: Value, /) -> Value:
    """The logarithm to base 10 of each element."""
    return b.unary(lambda value: b.div(b.log(value), math.log(10.0)), x, floating=True)


def sinh(x: Value, /) -> Value:
    """The hyperbolic sine of each element."""
    return b.unary(_sinh, x, floating=True)


def _sinh(x: Value) -> Value:
    """By ``expm1`` near zero, where exponentials cancel; halves inside of the exponents do not overflow early."""
    near = b.compare(b.abs(x), 1.0, "lt")
    grown = b.expm1(b.where(near, x, 0))
    small = b.mul(b.add(grown, b.div(grown, b.add(grown, 1))), 0.5)
    half = math.log(2.0)
    return b.where(near, small, b.sub(b.exp(b.sub(x, half)), b.exp(b.sub(b.neg(x), half))))


def cosh(x: Value, /) -> Value:
    """The hyperbolic cosine of each element."""
    half = math.log(2.0)
    return b.unary(lambda v: b.add(b.exp(b.sub(v, half)), b.exp(b.sub(b.neg(v), half))), x, floating=True)


def arctanh(x: Value, /) -> Value:
    """The inverse of ``tanh``."""
    return b.unary(lambda v: b.mul(b.sub(b.log1p(v), b.log1p(b.neg(v))), 0.5), x, floating=True)


asinh, acosh, atanh = arcsinh, arccosh, arctanh


def logaddexp(x1: Value, x2: Value, /) -> Value:
    """``log(exp(x1) + exp(x2))``."""
    return b.binary(_logaddexp, x1, x2, floating=True)


def logaddexp2(x1: Value, x2: Value, /) -> Value:
    """``log2(2**x1 + 2**x2)``."""
    return b.binary(lambda x, y: _logaddexp(x, y, math.log(2)), x1, x2, floating=True)


def _logaddexp(x: Value, y: Value, unit: float = 1.0) -> Value:
    """Where both are the same infinity it is their sum; the logarithm of the base is the unit."""
    difference = b.sub(x, y)
    is_known = b.compare(difference, difference, "eq")
    apart = b.neg(b.abs(b.where(is_known, difference, 0)))
    more = b.log1p(b.exp(apart if unit == 1 else b.mul(apart, unit)))
    return b.where(is_known, b.add(b.maximum(x, y), more if unit == 1 else b.div(more, unit)), b.add(x, y))


def hypot(x1: Value, x2: Value, /) -> Value:
    """``sqrt(x1² + x2²)``, without overflow in between."""
    return b.binary(_hypot, x1, x2, floating=True)


def _hypot(x: Value, y: Value) -> Value:
    first, second = b.abs(x), b.abs(y)
    large, small = b.maximum(first, second), b.minimum(first, second)
    plain = b.bitwise_or(b.compare(large, 0.0, "eq"), b.compare(large, math.inf, "eq"))
    ratio = b.div(small, b.where(plain, 1.0, large))
    return b.where(plain, large, b.mul(large, b.sqrt(b.add(b.mul(ratio, ratio), 1.0))))


def square(x: Value, /) -> Value:
    """The square of each element, integers included."""
    return b.unary(lambda value: b.mul(value, value), b.numeric(x))


def reciprocal(x: Value, /) -> Value:
    """One divided by each element."""
    return b.unary(lambda value: b.div(1.0, value), x, floating=True)


# ---------------------------------------------------------------------------- signs and rounding


def abs(x: Value, /) -> Value:
    """The absolute value of each element."""
    return b.unary(b.abs, x)


absolute = abs


def fabs(x: Value, /) -> Value:
    """The absolute value of each element, floating for integers too."""
    return b.unary(b.abs, x, floating=True)


def sign(x: Value, /) -> Value:
    """-1, 0 or 1 by the sign of each element; NaN for NaN."""
    return b.unary(b.sign, x)


def _whole(name: str, op: Callable[..., Value], doc: str) -> Callable[[Value], Value]:
    """A way of rounding: integers and bools are left as they are."""

    def function(x: Value, /) -> Value:
        value = as_value(x)
        return b.unary(op, value) if is_float(aval_of(value).dtype) else b.as_array(value)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


floor = _whole("floor", b.floor, "The largest whole number not above each element.")
ceil = _whole("ceil", b.ceil, "The smallest whole number not below each element.")
trunc = _whole(
    "trunc",
    lambda x: b.where(b.compare(x, 0, "lt"), b.ceil(x), b.floor(x)),
    "Each element without its fraction.",
)
fix = trunc


def rint(x: Value, /) -> Value:
    """The nearest whole number, ties to even; floating for integers too."""
    return b.unary(b.round, x, floating=True)


def round(a: Value, decimals: int = 0) -> Value:
    """Each element rounded to ``decimals`` digits behind the point, ties to even.

    Raises
    ------
    TraceError
        For integers with negative ``decimals``.
    """
    value = as_value(a)
    if not is_float(aval_of(value).dtype):
        if decimals < 0:
            raise TraceError(f"integers are not rounded to {decimals} decimals: cast to a float{at_user_line()}")
        return b.as_array(value)
    if decimals == 0:
        return b.unary(b.round, value)
    factor = 10.0**decimals
    return b.unary(lambda x: b.div(b.round(b.mul(x, factor)), factor), value)


around = round


# ---------------------------------------------------------------------------- extrema


def maximum(x: Value, y: Value, /) -> Value:
    """The larger of two elements; NaN where one is NaN. Where they tie, each gets half of the gradient."""
    return b.binary(b.maximum, x, y)


def minimum(x: Value, y: Value, /) -> Value:
    """The smaller of two elements; NaN where one is NaN. Where they tie, each gets half of the gradient."""
    return b.binary(b.minimum, x, y)


def fmax(x1: Value, x2: Value) -> Value:
    """The larger of two elements, and the other one where one is NaN."""
    return where(isnan(x1), x2, where(isnan(x2), x1, maximum(x1, x2)))


def fmin(x1: Value, x2: Value) -> Value:
    """The smaller of two elements, and the other one where one is NaN."""
    return where(isnan(x1), x2, where(isnan(x2), x1, minimum(x1, x2)))


def clip(
    arr: Value,
    /,
    min: Value | None = None,
    max: Value | None = None,
    *,
    a_min: Value | None = None,
    a_max: Value | None = None,
) -> Value:
    """Each element, or the bound that it is beyond; NumPy's names ``a_min`` and ``a_max`` go too."""
    lower = a_min if min is None else min
    upper = a_max if max is None else max
    result = as_value(arr)
    if lower is not None:
        result = maximum(lower, result)
    if upper is not None:
        result = minimum(upper, result)
    return b.as_array(result)


# ---------------------------------------------------------------------------- special values


def _constant(x: Value, value: bool) -> Value:
    return b.full(tuple(b.as_array(x).shape), value, "bool")


def _special(name: str, test: Callable[[Value], Value], of_integers: bool, doc: str) -> Callable[[Value], Value]:
    """A question to floats that has one answer for integers."""

    def function(x: Value, /) -> Value:
        value = b.as_array(x)
        return test(value) if is_float(aval_of(value).dtype) else _constant(value, of_integers)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


isnan = _special("isnan", lambda x: b.compare(x, x, "ne"), False, "Whether each element is NaN.")
isinf = _special("isinf", lambda x: b.compare(b.abs(x), math.inf, "eq"), False, "Whether each element is infinite.")
isposinf = _special("isposinf", lambda x: b.compare(x, math.inf, "eq"), False, "Whether each element is +inf.")
isneginf = _special("isneginf", lambda x: b.compare(x, -math.inf, "eq"), False, "Whether each element is -inf.")
isfinite = _special(
    "isfinite", lambda x: b.compare(b.abs(x), math.inf, "lt"), True, "Whether each element is neither NaN nor infinite."
)


def signbit(x: Value, /) -> Value:
    """Whether each element is negative, -0.0 included (its reciprocal tells)."""
    value = b.as_array(x)
    if not is_float(aval_of(value).dtype):
        return b.compare(value, 0, "lt")
    at_zero = b.bitwise_and(b.compare(value, 0.0, "eq"), b.compare(b.div(1.0, value), 0.0, "lt"))
    return b.bitwise_or(b.compare(value, 0.0, "lt"), at_zero)


def copysign(x1: Value, x2: Value, /) -> Value:
    """The size of ``x1`` with the sign of ``x2``, -0.0 included; a NaN counts as positive."""
    return b.binary(_copysign, x1, x2, floating=True)


def _copysign(x: Value, y: Value) -> Value:
    dtype = next(aval_of(value).dtype for value in (x, y) if not is_scalar(value))
    size = b.abs(b.as_array(x, dtype))
    return _where(signbit(y), b.neg(size), size)


def nan_to_num(
    x: Value,
    copy: bool = True,
    nan: Value = 0.0,
    posinf: Value | None = None,
    neginf: Value | None = None,
) -> Value:
    """``x`` with numbers for NaN and the infinities: the largest finite ones where none are given."""
    value = b.as_array(x)
    dtype = aval_of(value).dtype
    if not is_float(dtype):
        return value
    largest = _largest(dtype)
    value = where(isnan(value), nan, value)
    value = where(isposinf(value), largest if posinf is None else posinf, value)
    return where(isneginf(value), -largest if neginf is None else neginf, value)


def _largest(dtype: str) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------------- selection


def where(condition: Value, x: Value | None = None, y: Value | None = None, /) -> Value:
    """Elements of ``x`` where the condition holds, of ``y`` elsewhere; all three broadcast together.

    The gradient of what is not selected is zero; it is NaN where its derivative is infinite, so
    make the argument harmless there too, as in JAX.

    Raises
    ------
    TraceError
        With the condition alone in a traced function: the number of results is not known there.
    """
    if x is None and y is None:
        if is_tracing():
            raise TraceError(f"where(condition) has a shape that depends on values: give x and y{at_user_line()}")
        return tuple(found.astype(np.int32) for found in np.nonzero(np.asarray(condition)))
    if x is None or y is None:
        raise TraceError(f"where needs both x and y, or neither{at_user_line()}")
    test = as_value(condition)
    if is_scalar(test):
        test = b.full((), bool(test), "bool")
    elif aval_of(test).dtype != "bool":
        test = b.compare(test, 0, "ne")
    return _where(test, *_choices(x, y))


def _choices(x: Value, y: Value) -> list[Value]:
    """Both in their common dtype; two Python numbers stay numbers, so that the result is as weak as they are."""
    values = [as_value(x), as_value(y)]
    dtype, _ = promote([aval_of(value) for value in values])
    if dtype == "bool" or not all(is_scalar(value) for value in values):
        return b.together(values)
    return [float(value) if is_float(dtype) else int(value) for value in values]


def _where(test: Value, x: Value, y: Value) -> Value:
    shapes = [tuple(value.shape) for value in (test, x, y) if not is_scalar(value)]
    try:
        shape = tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        listed = " and ".join(str(list(each)) for each in shapes)
        raise TraceError(f"where: shapes {listed} do not broadcast together{at_user_line()}") from None
    operands = [value if is_scalar(value) else b.stretch(value, shape) for value in (test, x, y)]
    return b.where(*operands)


def select(condlist: Sequence[Value], choicelist: Sequence[Value], default: Value = 0) -> Value:
    """Each element from the first choice whose condition holds, or the default."""
    if len(condlist) != len(choicelist) or not condlist:
        raise TraceError(
            f"select needs as many conditions as choices, got {len(condlist)} and {len(choicelist)}{at_user_line()}"
        )
    result = default
    for condition, choice in reversed(list(zip(condlist, choicelist, strict=True))):
        result = where(condition, choice, result)
    return result


def heaviside(x1: Value, x2: Value, /) -> Value:
    """0 for negative elements, 1 for positive ones, ``x2`` for zeros."""
    value, middle = b.together((x1, x2), floating=True)
    value = b.as_array(value, aval_of(middle).dtype)
    return where(
        isnan(value), value, select([b.compare(value, 0, "lt"), b.compare(value, 0, "gt")], [0.0, 1.0], middle)
    )
