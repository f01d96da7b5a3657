"""First values of weights: names and meanings of ``jax.nn.initializers``.

An initializer is a function of a key, a shape and a dtype. Fans are counted as JAX counts them:
``in_axis`` and ``out_axis`` are the features, the other axes a receptive field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from trainkernel import numpy as tnp
from trainkernel import primitives as b
from trainkernel import random
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_shape, one_axis, some_axes
from trainkernel.scanning import fori_loop
from trainkernel.trace import at_user_line

Value = Any
Initializer = Callable[..., Value]

__all__ = [
    "constant", "glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "kaiming_normal", "kaiming_uniform",
    "lecun_normal", "lecun_uniform", "normal", "ones", "orthogonal", "truncated_normal", "uniform", "variance_scaling",
    "xavier_normal", "xavier_uniform", "zeros",
]  # fmt: skip


def zeros(key: Value, shape: Any, dtype: Any = "float32") -> Value:
    """Zeros; the key is not used."""
    return tnp.zeros(shape, dtype)


def ones(key: Value, shape: Any, dtype: Any = "float32") -> Value:
    """Ones; the key is not used."""
    return tnp.ones(shape, dtype)


def constant(value: Value, dtype: Any = "float32") -> Initializer:
    """An initializer of one value."""
    default = dtype

    def init(key: Value, shape: Any, dtype: Any = None) -> Value:
        return tnp.full(shape, value, default if dtype is None else dtype)

    return init


def uniform(scale: float = 1e-2, dtype: Any = "float32") -> Initializer:
    """Evenly distributed between 0 and ``scale``."""
    default = dtype

    def init(key: Value, shape: Any, dtype: Any = None) -> Value:
        return tnp.multiply(random.uniform(key, as_shape(shape), default if dtype is None else dtype), scale)

    return init


def normal(stddev: float = 1e-2, dtype: Any = "float32") -> Initializer:
    """Normally distributed around 0."""
    default = dtype

    def init(key: Value, shape: Any, dtype: Any = None) -> Value:
        return tnp.multiply(random.normal(key, as_shape(shape), default if dtype is None else dtype), stddev)

    return init


def truncated_normal(
    stddev: float = 1e-2, dtype: Any = "float32", lower: float = -2.0, upper: float = 2.0
) -> Initializer:
    """Normally distributed around 0 between ``lower`` and ``upper`` standard deviations of the whole distribution."""
    default = dtype

    def init(key: Value, shape: Any, dtype: Any = None) -> Value:
        drawn = random.truncated_normal(key, lower, upper, as_shape(shape), default if dtype is None else dtype)
        return tnp.multiply(drawn, stddev)

    return init


# ---------------------------------------------------------------------------- by fan

_STD_OF_TRUNCATED = 0.87962566103423978
"""The standard deviation of a normal distribution cut off at two of its own."""


def _fans(shape: tuple[int, ...], in_axis: Any, out_axis: Any, batch_axis: Any) -> tuple[float, float]:
    """Inputs of an output, and outputs of an input."""
    if len(shape) < 2:
        raise TraceError(f"fans need a shape of at least two dims, got {list(shape)}{at_user_line()}")
    inputs, outputs, batch = (
        prod(shape[axis] for axis in some_axes(axes, len(shape), "an initializer"))
        for axes in (in_axis, out_axis, batch_axis)
    )
    field = prod(shape) / (inputs * outputs * batch)
    return inputs * field, outputs * field


def variance_scaling(
    scale: float,
    mode: str,
    distribution: str,
    in_axis: int | Sequence[int] = -2,
    out_axis: int | Sequence[int] = -1,
    batch_axis: int | Sequence[int] = (),
    dtype: Any = "float32",
) -> Initializer:
    """Values of variance ``scale / fan``.

    Parameters
    ----------
    scale : float
    mode : str
        "fan_in", "fan_out" or "fan_avg".
    distribution : str
        "truncated_normal", "normal" or "uniform".
    in_axis, out_axis, batch_axis : int or sequence of int
    dtype : dtype

    Raises
    ------
    TraceError
        For another mode or distribution, or when called with a shape of fewer than two dims.
    """
    default = dtype
    if mode not in ("fan_in", "fan_out", "fan_avg") or distribution not in ("truncated_normal", "normal", "uniform"):
        raise TraceError(
            f"variance_scaling: mode must be 'fan_in', 'fan_out' or 'fan_avg' and distribution 'truncated_normal', "
            f"'normal' or 'uniform', got {mode!r} and {distribution!r}{at_user_line()}"
        )

    def init(key: Value, shape: Any, dtype: Any = None) -> Value:
        sizes, name = as_shape(shape), default if dtype is None else dtype
        fan_in, fan_out = _fans(sizes, in_axis, out_axis, batch_axis)
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
        deviation = math.sqrt(scale / max(fan, 1.0))
        if distribution == "normal":
            return tnp.multiply(random.normal(key, sizes, name), deviation)
        if distribution == "uniform":
            bound = math.sqrt(3.0) * deviation
            return random.uniform(key, sizes, name, minval=-bound, maxval=bound)
        return tnp.multiply(random.truncated_normal(key, -2.0, 2.0, sizes, name), deviation / _STD_OF_TRUNCATED)

    return init


def _family(name: str, scale: float, mode: str, distribution: str, doc: str) -> Callable[..., Initializer]:
    def make(in_axis: Any = -2, out_axis: Any = -1, batch_axis: Any = (), dtype: Any = "float32") -> Initializer:
        return variance_scaling(scale, mode, distribution, in_axis, out_axis, batch_axis, dtype)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = doc
    return make


glorot_uniform = _family("glorot_uniform", 1.0, "fan_avg", "uniform", "Glorot and Bengio, 2010, uniform.")
glorot_normal = _family("glorot_normal", 1.0, "fan_avg", "truncated_normal", "Glorot and Bengio, 2010, normal.")
lecun_uniform = _family("lecun_uniform", 1.0, "fan_in", "uniform", "LeCun et al., 1998, uniform.")
lecun_normal = _family("lecun_normal", 1.0, "fan_in", "truncated_normal", "LeCun et al., 1998, normal.")
he_uniform = _family("he_uniform", 2.0, "fan_in", "uniform", "He et al., 2015, uniform: for ReLU.")
he_normal = _family("he_normal", 2.0, "fan_in", "truncated_normal", "He et al., 2015, normal: for ReLU.")
xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal = glorot_uniform, glorot_normal, he_uniform, he_normal


# ---------------------------------------------------------------------------- orthogonal


def orthogonal(scale: float = 1.0, column_axis: int = -1, dtype: Any = "float32") -> Initializer:
    """Orthogonal rows or columns, whichever are fewer, evenly distributed among all such matrices.

    A matrix of normal numbers is made orthogonal by Gram and Schmidt's process, each vector twice, in a
    loop: the Q of its QR decomposition where R has a positive diagonal (Saxe, McClelland and Ganguli,
    ICLR 2014; Mezzadri, "How to generate random matrices from the classical compact groups", 2007).

    Parameters
    ----------
    scale : float
        The length of the vectors.
    column_axis : int
        The axis of columns; the others together are rows.
    dtype : dtype

    Raises
    ------
    TraceError
        When called with a shape of fewer than two dims.
    """
    default = dtype

    def init(key: Value, shape: Any, dtype: Any = None) -> Value:
        sizes, name = as_shape(shape), default if dtype is None else dtype
        if len(sizes) < 2:
            raise TraceError(f"orthogonal needs a shape of at least two dims, got {list(sizes)}{at_user_line()}")
        axis = one_axis(column_axis, len(sizes), "orthogonal")
        columns, rest = sizes[axis], [size for place, size in enumerate(sizes) if place != axis]
        rows = prod(rest)
        few, many = min(rows, columns), max(rows, columns)
        inner = "float64" if b.dtype_name(name) == "float64" else "float32"
        vectors = _orthogonal_rows(random.normal(key, (few, many), inner))
        matrix = vectors if rows < columns else tnp.transpose(vectors)
        result = tnp.moveaxis(tnp.reshape(matrix, (*rest, columns)), -1, axis)
        return b.cast(tnp.multiply(result, scale), name)

    return init


def _orthogonal_rows(given: Value) -> Value:
    def step(index: Value, done: Value) -> Value:
        row = tnp.take(given, index, axis=0)
        for _ in range(2):  # what the first leaves is a rounding error
            row = tnp.subtract(row, tnp.matmul(tnp.matmul(done, row), done))
        return tnp.at(done)[index].set(tnp.divide(row, tnp.linalg.norm(row)))

    return fori_loop(0, given.shape[0], step, tnp.zeros_like(given))
