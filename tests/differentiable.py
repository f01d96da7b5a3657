"""One differentiable function for each op of the table, with float64 arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainkernel import primitives as b

RNG = np.random.default_rng(3)
LOW, HIGH = 0.3, 1.4


def draw(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.uniform(LOW, HIGH, shape)


X, Y, COLUMN = draw(3, 4), draw(3, 4), draw(4, 2)
ROWS = np.array([2, 0, 0], np.int32)
STACK = (draw(2, 3, 4), draw(2, 4, 2))

# One function for each op that has a derivative, of floating arrays alone.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (lambda x, y: b.add(b.mul(x, y), y, alpha=0.5), (X, Y)),
    "sub": (lambda x, y: b.sub(b.mul(x, y), y, alpha=3), (X, Y)),
    "mul": (b.mul, (X, Y)),
    "div": (b.div, (X, Y)),
    "neg": (b.neg, (X,)),
    "cast": (lambda x: b.mul(b.cast(x, "float64"), x), (X,)),
    "relu": (lambda x: b.relu(b.sub(b.mul(x, x), 0.7)), (X,)),
    "pow": (lambda x: b.pow(x, 2.5), (X,)),
    "power": (b.power, (X, Y)),
    "threshold_backward": (lambda g, x: b.threshold_backward(b.mul(g, g), x, threshold=0.8), (X, Y)),
    "exp": (b.exp, (X,)),
    "expm1": (b.expm1, (X,)),
    "log": (b.log, (X,)),
    "log1p": (b.log1p, (X,)),
    "tanh": (b.tanh, (X,)),
    "sigmoid": (b.sigmoid, (X,)),
    "softplus": (b.softplus, (X,)),
    "erf": (b.erf, (X,)),
    "sin": (b.sin, (X,)),
    "cos": (b.cos, (X,)),
    "arcsin": (lambda x: b.arcsin(b.mul(x, 0.6)), (X,)),
    "arccos": (lambda x: b.arccos(b.mul(x, 0.6)), (X,)),
    "arctan": (b.arctan, (X,)),
    "arctan2": (lambda y, x: b.arctan2(b.sub(y, 0.8), b.sub(x, 0.8)), (X, Y)),
    "arcsinh": (b.arcsinh, (X,)),
    "arccosh": (lambda x: b.arccosh(b.add(x, 1.0)), (X,)),
    "cbrt": (b.cbrt, (X,)),
    "sqrt": (b.sqrt, (X,)),
    "rsqrt": (b.rsqrt, (X,)),
    "abs": (lambda x: b.abs(b.sub(x, 0.8)), (X,)),
    "maximum": (lambda x, y: b.maximum(b.mul(x, x), y), (X, Y)),
    "minimum": (lambda x, y: b.minimum(b.mul(x, x), y), (X, Y)),
    "remainder": (lambda x, y: b.remainder(b.mul(x, 3.0), y), (X, Y)),
    "where": (lambda x, y: b.where(b.compare(x, 0.8, "lt"), b.mul(x, y), y), (X, Y)),
    "flip": (lambda x: b.mul(b.flip(x, dims=(0,)), x), (X,)),
    "pad": (lambda x: b.pad(b.mul(x, x), 0.0, low=(1, 0), high=(0, 2), interior=(0, 1)), (X,)),
    "concatenate": (lambda x, y: b.concatenate(b.mul(x, y), y, dim=1), (X, Y)),
    "take": (lambda x: b.mul(b.take(x, ROWS), b.take(x, ROWS)), (X,)),
    "dynamic_slice": (lambda x: b.exp(b.dynamic_slice(x, 1, 2, sizes=(2, 2))), (X,)),
    "dynamic_update": (lambda x, y: b.dynamic_update(b.exp(x), b.slice(y, (0, 0), (2, 2), (1, 1)), 1, 1), (X, Y)),
    "sum": (lambda x: b.sum(b.mul(x, x), dims=(1,)), (X,)),
    "mean": (lambda x: b.mean(b.mul(x, x), dims=(0,)), (X,)),
    "max": (lambda x: b.max(b.mul(x, x), dims=(1,)), (X,)),
    "min": (lambda x: b.min(b.mul(x, x), dims=(1,)), (X,)),
    "prod": (lambda x: b.prod(x, dims=(1,)), (X,)),
    "softmax_stats": (lambda x: _logsumexp(x), (X,)),
    "moments": (lambda x: b.mul(*b.moments(b.mul(x, x), dims=(1,))), (X,)),
    "scatter_add": (lambda x: b.exp(b.scatter_add(ROWS, x, size=3)), (X,)),
    "cumsum": (lambda x: b.exp(b.cumsum(x, dim=1, reverse=True)), (X,)),
    "mm": (b.mm, (X, COLUMN)),
    "bmm": (b.bmm, STACK),
    "reshape": (lambda x: b.exp(b.reshape(x, (2, 6))), (X,)),
    "transpose": (lambda x: b.exp(b.transpose(x, (1, 0))), (X,)),
    "broadcast": (lambda x: b.exp(b.mul(b.broadcast(x, (3, 5, 4), (0, 2)), 0.5)), (X,)),
    "slice": (lambda x: b.exp(b.slice(x, (0, 1), (3, 4), (2, 2))), (X,)),
}
NOT_DIFFERENTIABLE = {
    *("full", "iota", "random_bits", "compare", "sign", "floor", "ceil", "round", "floor_divide"),
    *("stop_gradient", "addmm", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right"),
}


def _logsumexp(x: Any) -> Any:
    largest, total = b.softmax_stats(x, dims=(1,))
    return b.add(largest, b.log(total))
