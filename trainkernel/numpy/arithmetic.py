"""Pointwise functions with NumPy's broadcasting and JAX's promotion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.promotion import is_float
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any

__all__ = [
    "add", "bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "divide", "divmod", "equal", "float_power", "floor_divide", "fmod", "greater", "greater_equal",
    "invert", "left_shift", "less", "less_equal", "logical_and", "logical_not", "logical_or", "logical_xor", "mod",
    "multiply", "negative", "not_equal", "positive", "power", "pow", "remainder", "right_shift", "subtract",
    "true_divide",
]  # fmt: skip

# ---------------------------------------------------------------------------- arithmetic


def add(x: Value, y: Value) -> Value:
    """The sum; of bools whether one is true."""
    return _arithmetic(b.add, x, y)


def subtract(x: Value, y: Value) -> Value:
    """The difference, but not of bools."""
    first, second = b.together((x, y))
    if all(aval_of(value).dtype == "bool" for value in (first, second)):
        raise TraceError(f"subtract of bools: use logical_xor, or cast them to a number{at_user_line()}")
    return b.sub(first, second)


def multiply(x: Value, y: Value) -> Value:
    """The product; of bools whether both are true."""
    return _arithmetic(b.mul, x, y)


def divide(x: Value, y: Value) -> Value:
    """The quotient, floating also for integers."""
    return b.binary(b.div, x, y, floating=True)


true_divide = divide


def floor_divide(x: Value, y: Value) -> Value:
    """The quotient rounded down."""
    return b.binary(b.floor_divide, b.numeric(x), b.numeric(y))


def remainder(x: Value, y: Value) -> Value:
    """The remainder with the sign of the divisor."""
    return b.binary(b.remainder, b.numeric(x), b.numeric(y))


mod = remainder


def divmod(x: Value, y: Value) -> tuple[Value, Value]:
    """``floor_divide`` and ``remainder``."""
    return floor_divide(x, y), remainder(x, y)


def fmod(x: Value, y: Value) -> Value:
    """The remainder with the sign of the dividend."""
    return b.binary(_fmod, b.numeric(x), b.numeric(y))


def _fmod(x: Value, y: Value) -> Value:
    rest = b.remainder(b.abs(x), b.abs(y))
    return b.where(b.compare(x, 0, "lt"), b.neg(rest), rest)


def negative(x: Value) -> Value:
    """The value with the other sign, but not of bools."""
    if aval_of(as_value(x)).dtype == "bool":
        raise TraceError(f"negative of bools: use logical_not, or cast them to a number{at_user_line()}")
    return b.unary(b.neg, x)


def positive(x: Value) -> Value:
    """The value itself."""
    return as_value(x)


def power(x: Value, y: Value) -> Value:
    """``x`` to the power ``y``; a small Python int is repeated multiplication, on integers too.

    Integers to the power of integers are integers and wrap.

    Raises
    ------
    TraceError
        For a negative Python int power of integers.
    """
    value, exponent = as_value(x), as_value(y)
    if isinstance(exponent, int) and not isinstance(exponent, bool):
        return _integer_power(b.cast(value, aval_of(value).dtype) if is_scalar(value) else value, exponent)
    if is_scalar(exponent) and is_float(aval_of(value).dtype):
        return b.pow(b.cast(value, aval_of(value).dtype) if is_scalar(value) else value, float(exponent))
    if not any(is_float(aval_of(each).dtype) for each in (value, exponent)):
        return b.binary(_power_of_integers, b.numeric(value), b.numeric(exponent))
    return b.binary(b.power, value, exponent, floating=True)


def _power_of_integers(x: Value, y: Value) -> Value:
    """By squaring, bit by bit of the exponents, which must not be negative; the result wraps."""
    dtype = next(aval_of(value).dtype for value in (x, y) if not is_scalar(value))
    x, y = (b.as_array(value, dtype) for value in (x, y))
    shape = tuple(np.broadcast_shapes(x.shape, y.shape))
    square, rest, result = b.stretch(x, shape), b.stretch(y, shape), b.full(shape, 1, dtype)
    for _ in range(_EXPONENT_BITS[dtype]):
        is_odd = b.compare(b.bitwise_and(rest, 1), 0, "ne")
        result = b.where(is_odd, b.mul(result, square), result)
        rest, square = b.shift_right(rest, 1), b.mul(square, square)
    return result


_EXPONENT_BITS = {"uint8": 8, "int32": 31, "uint32": 32, "int64": 63}


pow = power


def _integer_power(x: Value, exponent: int) -> Value:
    if not is_float(aval_of(x).dtype):
        if exponent < 0:
            raise TraceError(f"integers to the negative power {exponent}: cast to a float first{at_user_line()}")
        x = b.cast(x, "int32") if aval_of(x).dtype == "bool" else x
    elif exponent not in (0, 1, 2, 3, 4):
        return b.pow(x, exponent)
    if exponent == 0:
        return b.full(x.shape, 1, aval_of(x).dtype)
    result, square = None, x
    while exponent:
        if exponent & 1:
            result = square if result is None else b.mul(result, square)
        exponent >>= 1
        square = b.mul(square, square) if exponent else square
    return result


def float_power(x: Value, y: Value) -> Value:
    """``x`` to the power ``y``, floating for integers too."""
    return b.binary(b.power, x, y, floating=True)


def _arithmetic(op: Callable[..., Value], x: Value, y: Value) -> Value:
    """Sums and products of bools are logical in NumPy and integers here, as in JAX for everything but bool."""
    first, second = b.together((x, y))
    if all(aval_of(v).dtype == "bool" for v in (first, second)):
        return (b.bitwise_or if op is b.add else b.bitwise_and)(first, second)
    return op(first, second)


# ---------------------------------------------------------------------------- comparison and logic


def _comparison(name: str, comparison: str) -> Callable[[Value, Value], Value]:
    def function(x: Value, y: Value) -> Value:
        first, second = b.together((x, y))
        return b.compare(first, second, comparison)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Element by element, ``{name}`` as a bool array."
    return function


equal, not_equal = _comparison("equal", "eq"), _comparison("not_equal", "ne")
less, less_equal = _comparison("less", "lt"), _comparison("less_equal", "le")
greater, greater_equal = _comparison("greater", "gt"), _comparison("greater_equal", "ge")


def _truth(x: Value) -> Value:
    value = as_value(x)
    if is_scalar(value):
        return b.full((), bool(value), "bool")
    return value if aval_of(value).dtype == "bool" else b.compare(value, 0, "ne")


def logical_and(x: Value, y: Value) -> Value:
    """Whether both are true (not zero)."""
    return b.binary(b.bitwise_and, _truth(x), _truth(y))


def logical_or(x: Value, y: Value) -> Value:
    """Whether one is true (not zero)."""
    return b.binary(b.bitwise_or, _truth(x), _truth(y))


def logical_xor(x: Value, y: Value) -> Value:
    """Whether just one is true (not zero)."""
    return b.binary(b.bitwise_xor, _truth(x), _truth(y))


def logical_not(x: Value) -> Value:
    """Whether the value is false (zero)."""
    return b.compare(_truth(x), 0, "eq")


def _integers(name: str, x: Value, y: Value) -> list[Value]:
    values = b.together((x, y))
    dtype = next(aval_of(value).dtype for value in values if not is_scalar(value))
    if is_float(dtype):
        raise TraceError(f"{name} needs integers or bools, got {dtype}{at_user_line()}")
    return values


def bitwise_and(x: Value, y: Value) -> Value:
    """The bits that both have."""
    return b.bitwise_and(*_integers("bitwise_and", x, y))


def bitwise_or(x: Value, y: Value) -> Value:
    """The bits that one has."""
    return b.bitwise_or(*_integers("bitwise_or", x, y))


def bitwise_xor(x: Value, y: Value) -> Value:
    """The bits that just one has."""
    return b.bitwise_xor(*_integers("bitwise_xor", x, y))


def bitwise_not(x: Value) -> Value:
    """All bits the other way round; of bools ``logical_not``."""
    value = as_value(x)
    if aval_of(value).dtype == "bool":
        return logical_not(value)
    return b.bitwise_not(*_integers("bitwise_not", value, value)[:1])


invert = bitwise_invert = bitwise_not


def left_shift(x: Value, y: Value) -> Value:
    """Bits moved up by ``y`` places."""
    return b.shift_left(*_integers("left_shift", x, y))


def right_shift(x: Value, y: Value) -> Value:
    """Bits moved down by ``y`` places; the sign stays."""
    return b.shift_right(*_integers("right_shift", x, y))


bitwise_left_shift, bitwise_right_shift = left_shift, right_shift
