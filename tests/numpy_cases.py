"""Tables of calls that are compared with NumPy and JAX: eagerly, traced, differentiated and batched."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trainkernel as tk
from trainkernel import derivatives, tree
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
        values = np.asarray(generator.uniform(arg.low, arg.high, arg.shape))
        is_float = arg.dtype.startswith(("float", "bfloat"))
        if arg.dtype == "bool":
            arrays.append(np.asarray(values > (arg.low + arg.high) / 2))
        elif not is_float:
            arrays.append(np.asarray(np.floor(values)).astype(arg.dtype))
        else:
            arrays.append(np.asarray(values).astype(dtype or arg.dtype))
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
    """The function as a Program, run by the reference."""
    step = tk.jit(function).lower(*arrays)
    outputs = tk.reference.run(step.program, [*arrays, *step.captured])
    return tree.unflatten(step.structure, [outputs[result.output] for result in step.results])


CASES_PER_KERNEL = 16


def chunks(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that share a kernel, so that a table costs few compilations."""
    listed = list(cases)
    return [listed[first : first + CASES_PER_KERNEL] for first in range(0, len(listed), CASES_PER_KERNEL)]


def assert_emulated(cases: Sequence[Case], module: Any, functions: Any) -> None:
    """The emitted source computes all cases and their gradients, in one kernel, as they are computed eagerly.

    ``functions`` has ``sum``.
    """
    arguments = [draw(each.args, each.name) for each in cases]
    calls = [call_of(each, module) for each in cases]
    slopes = [_slope(each, module, functions, x) for each, x in zip(cases, arguments, strict=True)]

    def everything(values: Any) -> Any:
        pairs = [(call(*x), slope(*x)) for call, slope, x in zip(calls, slopes, values, strict=True)]
        return [result for result, _ in pairs], [gradient for _, gradient in pairs]

    for each, result, slope, x in zip(cases, *tk.jit(everything, device="emulator")(arguments), arguments, strict=True):
        atol = max(each.atol, 2e-5)
        assert_close(result, each.call(module, *x), atol)
        assert_close(slope, _slope(each, module, functions, x)(*x), atol)


def assert_jaxs(cases: Sequence[Case], module: Any, theirs: Any, functions: Any) -> None:
    """Values, dtypes and gradients of all cases are those of JAX, which computes them in one compilation.

    ``theirs`` is JAX's part for ``module``; ``functions`` has ``sum``.
    """
    import jax

    arguments = [draw(each.args, each.name) for each in cases]
    calls = [call_of(each, theirs) for each in cases]
    slopes = [
        jax.grad(scalar_of(call, _weights(each, module, x), jax.numpy), argnums=_differentiable(x))
        if each.is_smooth
        else lambda *values: ()
        for each, call, x in zip(cases, calls, arguments, strict=True)
    ]

    def everything(values: Any) -> Any:
        pairs = [(call(*x), slope(*x)) for call, slope, x in zip(calls, slopes, values, strict=True)]
        return [result for result, _ in pairs], [gradient for _, gradient in pairs]

    failures = []
    for each, result, slope, x in zip(cases, *by_jax(everything, arguments), arguments, strict=True):
        try:
            assert_close(each.call(module, *x), result, each.atol)
            assert_close(_slope(each, module, functions, x)(*x), slope, max(1e-5, each.atol))
        except AssertionError as error:
            failures.append(f"{each.name}: {error}")
    assert not failures, f"{len(failures)} of {len(cases)} cases differ\n\n" + "\n\n".join(failures)


def _slope(each: Case, module: Any, functions: Any, arrays: Sequence[Array]) -> Callable[..., Any]:
    """The gradient of a weighted sum of the results of a smooth case; of any other nothing."""
    if not each.is_smooth:
        return lambda *values: ()
    total = scalar_of(call_of(each, module), _weights(each, module, arrays), functions)
    return derivatives.grad(total, argnums=_differentiable(arrays))


def _weights(each: Case, module: Any, arrays: Sequence[Array]) -> list[Array]:
    """Numbers of the shapes of a case's results, no two of them alike."""
    results = flat(each.call(module, *arrays))
    return [np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape) for y in results]


def _differentiable(arrays: Sequence[Array]) -> tuple[int, ...]:
    return tuple(position for position, x in enumerate(arrays) if x.dtype == np.float32)


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


def call_of(each: Case, module: Any) -> Callable[..., Any]:
    """The call of a case as a function of its arrays."""
    return lambda *arrays: each.call(module, *arrays)


def by_jax(function: Callable[..., Any], *arrays: Any) -> Any:
    """JAX's result in one compilation, where each of its operations would need its own."""
    return compiled_by_jax(function)(*arrays)


def compiled_by_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as ``jax.jit`` makes it.

    It does without the optimizations: they take longer than such a small function, and change what it rounds.
    """
    import jax

    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options)


def assert_derivatives(function: Callable[..., Any], arrays: Sequence[Array], module: Any) -> None:
    """In float64: the gradient along a direction, and its derivative along it, are finite differences."""
    numbers = tuple(position for position, x in enumerate(arrays) if x.dtype == np.float64)
    generator = np.random.default_rng(7)
    weights = [generator.uniform(0.5, 1.5, y.shape) for y in flat(function(*arrays))]
    total = scalar_of(function, weights, module)
    direction = {position: generator.uniform(-1, 1, arrays[position].shape) for position in numbers}

    def moved(step: float) -> list[Any]:
        return [x + step * direction[p] if p in direction else x for p, x in enumerate(arrays)]

    def along(*values: Any) -> Any:
        slopes = derivatives.grad(total, argnums=numbers)(*values)
        return sum((module.sum(slope * direction[p]) for slope, p in zip(slopes, numbers, strict=True)), start=0.0)

    step = 1e-6
    slope = (total(*moved(step)) - total(*moved(-step))) / (2 * step)
    np.testing.assert_allclose(along(*arrays), slope, rtol=1e-6, atol=1e-7)
    curvature = (along(*moved(step)) - along(*moved(-step))) / (2 * step)
    second = gradient(along, arrays, numbers)
    got = sum(float(np.sum(g * direction[p])) for g, p in zip(second, numbers, strict=True))
    np.testing.assert_allclose(got, curvature, rtol=1e-5, atol=1e-6)


def assert_batch_is_loop(function: Callable[..., Any], rows: Sequence[Sequence[Array]], atol: float) -> None:
    """``vmap`` over all arguments, and over the first alone."""

    def stacked(results: Sequence[Any]) -> list[Array]:
        return [np.stack(column) for column in zip(*(flat(result) for result in results), strict=True)]

    everything = [np.stack(column) for column in zip(*rows, strict=True)]
    assert_close(flat(vmap(function)(*everything)), stacked([function(*row) for row in rows]), atol)
    if len(everything) > 1:
        rest = rows[0][1:]
        got = vmap(function, in_axes=(0, *(None for _ in rest)))(everything[0], *rest)
        assert_close(flat(got), stacked([function(row[0], *rest) for row in rows]), atol)
