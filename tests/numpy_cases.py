"""Tables of calls that are compared with NumPy and JAX: eagerly, traced, differentiated and batched."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel import derivatives
from trainkernel.batching import vmap

Array = NDArray[Any]


@dataclass(frozen=True)
class Arg:
    """An array to draw: ``shape``, ``dtype`` and the range of its values."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float = -2.0
    high: float = 2.0


@dataclass(frozen=True)
class Case:
    """A call of one function.

    Attributes
    ----------
    name : str
        What is called, for the test's id.
    call : callable (module, *arrays)
        ``module`` is the package under test, or the one that it is compared with.
    args : tuple of Arg
    is_smooth : bool
        Whether derivatives are compared too.
    atol : float
    oracle : str
        "both", "numpy" or "jax": which modules have the function with this meaning.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Arg, ...]
    is_smooth: bool = True
    atol: float = 2e-6
    oracle: str = "both"


def case(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """A case; a tuple among its arguments is the shape of a float32 array."""
    return Case(name, call, tuple(arg if isinstance(arg, Arg) else Arg(tuple(arg)) for arg in args), **options)


def draw(args: Sequence[Arg], seed: str, dtype: str | None = None) -> list[Array]:
    """Arrays for a case; floating ones of ``dtype`` where one is given."""
    generator = np.random.default_rng(zlib.crc32(seed.encode()))
    arrays = []
    for arg in args:
        values = generator.uniform(arg.low, arg.high, arg.shape)
        is_float = arg.dtype.startswith(("float", "bfloat"))
        if arg.dtype == "bool":
            arrays.append(np.asarray(values > (arg.low + arg.high) / 2))
        elif not is_float:
            arrays.append(np.floor(values).astype(arg.dtype))
        else:
            arrays.append(values.astype(dtype or arg.dtype))
    return arrays


def flat(value: Any) -> list[Array]:
    """The arrays of a result."""
    return [np.asarray(each) for each in value] if isinstance(value, (tuple, list)) else [np.asarray(value)]


def assert_close(result: Any, wanted: Any, atol: float, check_dtype: bool = True) -> None:
    """Shapes and values of results, in order."""
    got, expected = flat(result), flat(wanted)
    assert len(got) == len(expected)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        if check_dtype:
            assert x.dtype == y.dtype
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=max(atol, 2e-6), atol=atol)


def traced(function: Callable[..., Any], arrays: Sequence[Array]) -> Any:
    """The function of traced parameters, evaluated on arrays."""
    return derivatives.checkpoint(function)(*arrays)


def scalar_of(function: Callable[..., Any], weights: Sequence[Array], module: Any) -> Callable[..., Any]:
    """The sum of a function's results times weights."""

    def total(*arrays: Any) -> Any:
        result = function(*arrays)
        results = result if isinstance(result, (tuple, list)) else [result]
        return sum((module.sum(x * w) for x, w in zip(results, weights, strict=True)), start=0.0)

    return total


def gradient(function: Callable[..., Any], arrays: Sequence[Array], argnums: tuple[int, ...]) -> tuple[Array, ...]:
    """The gradient by ``derivatives.grad``."""
    return tuple(derivatives.grad(function, argnums=argnums)(*arrays))


def batched(function: Callable[..., Any], arrays: Sequence[Array], axes: Any = 0) -> Any:
    """The function over a batch by ``vmap``."""
    return vmap(function, in_axes=axes)(*arrays)
