"""``jacrev``, ``jacfwd``, ``hessian`` against differences, at once and traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainkernel as tk
from trainkernel import numpy as tnp
from trainkernel import tree

RNG = np.random.default_rng(0)
A, X, W = RNG.normal(size=(3, 4)), RNG.normal(size=4), RNG.normal(size=(4, 2))

# A function, its arguments, argnums.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "vector": (lambda x: tnp.sin(A @ x), (X,), 0),
    "scalar": (lambda x: tnp.sum(x**3) * x[0], (X,), 0),
    "of a number": (lambda x: x * A, (np.float64(0.5),), 0),
    "matrix": (lambda x, w: tnp.tanh(x * w.T), (X, W), 1),
    "linear": (lambda x: x[::-1], (X,), 0),
    "constant": (lambda x: tnp.ones(3) + 0 * x[0], (X,), 0),
    "one argument in a tuple": (lambda x, w: x @ w, (X, W), (1,)),
    "two arguments": (lambda x, w: tnp.exp(x @ w), (X, W), (0, 1)),
    "trees": (
        lambda p, k: {"s": tnp.sum(p["a"] ** 3) * p["b"], "v": [p["a"] * k]},
        ({"a": X, "b": A[0, 0]}, A[1, 1]),
        0,
    ),
}


def by_differences(fun: Callable[..., Any], args: tuple[Any, ...], argnums: Any, step: float = 1e-6) -> list[Any]:
    """The Jacobian's arrays in order: for each leaf of the result, each leaf of the chosen arguments."""
    positions = (argnums,) if isinstance(argnums, int) else argnums
    chosen, treedef = tree.flatten([args[p] for p in positions])

    def moved(leaf: int, element: int, by: float) -> list[Any]:
        leaves = [np.array(value, np.float64) for value in chosen]
        leaves[leaf].flat[element] += by
        values = list(args)
        for position, value in zip(positions, tree.unflatten(treedef, leaves), strict=True):
            values[position] = value
        return [np.asarray(out) for out in tree.leaves(fun(*values))]

    jacobians = []
    for place, out in enumerate(tree.leaves(fun(*args))):
        for leaf, value in enumerate(chosen):
            columns = [
                (moved(leaf, element, step)[place] - moved(leaf, element, -step)[place]) / (2 * step)
                for element in range(np.size(value))
            ]
            jacobians.append(np.stack(columns, -1).reshape(np.shape(out) + np.shape(value)))
    return jacobians


@pytest.mark.parametrize("jacobian", [tk.jacrev, tk.jacfwd])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_jacobian_is_that_of_differences(name: str, jacobian: Callable[..., Any]) -> None:
    fun, args, argnums = FUNCTIONS[name]
    expected = by_differences(fun, args, argnums)
    for run in (jacobian(fun, argnums), tk.jit(jacobian(fun, argnums), device="reference")):
        got = tree.leaves(run(*args))
        assert [np.shape(g) for g in got] == [e.shape for e in expected]
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


def test_the_result_has_the_argument_in_place_of_each_array() -> None:
    fun, args, _ = FUNCTIONS["trees"]
    for jacobian in (tk.jacrev, tk.jacfwd):
        got = jacobian(fun, (0, 1))(*args)
        assert set(got) == {"s", "v"} and isinstance(got["v"], list)
        of_params, of_number = got["v"][0]
        assert of_params["a"].shape == (4, 4) and of_params["b"].shape == of_number.shape == (4,)


@pytest.mark.parametrize("name", ["scalar", "vector", "trees"])
def test_a_hessian_is_the_jacobian_of_the_jacobian(name: str) -> None:
    fun, args, argnums = FUNCTIONS[name]
    expected = by_differences(tk.jacrev(fun, argnums), args, argnums)
    for one, other in zip(tree.leaves(tk.hessian(fun, argnums)(*args)), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_network_learns_a_laplacian_in_one_kernel() -> None:
    """Reverse over forward over reverse, batched, on the emulator."""

    def u(w: Any, x: Any) -> Any:
        return tnp.sum(tnp.tanh(x @ w))

    def loss(w: Any, points: Any) -> Any:
        laplacian = tk.vmap(lambda x: tnp.trace(tk.hessian(u, 1)(w, x)))(points)
        return tnp.mean(laplacian**2)

    w, points = RNG.normal(size=(2, 3)).astype(np.float32), RNG.normal(size=(4, 2)).astype(np.float32)
    got = np.asarray(tk.jit(tk.grad(loss), device="emulator")(w, points))
    precise = tk.grad(loss)(w.astype(np.float64), points.astype(np.float64))
    np.testing.assert_allclose(got, precise, rtol=1e-3, atol=1e-4)


def test_keyword_arguments_are_passed_on() -> None:
    got = tk.jacfwd(lambda x, *, k: x * k)(X, k=2.0)
    np.testing.assert_array_equal(got, 2 * np.eye(4))


def test_arguments_that_are_not_floating_are_refused() -> None:
    for jacobian in (tk.jacrev, tk.jacfwd):
        with pytest.raises(tk.TraceError, match="argument 0 holds int64"):
            jacobian(lambda x: x * 2.0)(np.arange(3))
        with pytest.raises(tk.TraceError, match="argnums names argument 1, and 1 were given"):
            jacobian(lambda x: x, 1)(X)
