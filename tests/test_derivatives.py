"""Derivatives against finite differences in float64, to second order, and their rules' API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from differentiable import CASES, NOT_DIFFERENTIABLE, X, draw

import trainkernel as tk
from trainkernel import primitives as b
from trainkernel.ops import OPS


def test_every_op_with_a_derivative_is_a_case() -> None:
    assert set(CASES) == set(OPS) - NOT_DIFFERENTIABLE


def total(function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    """A scalar: the result weighted element by element."""

    def scalar(*args: Any) -> Any:
        return b.sum(b.mul(function(*args), weights))

    return scalar


def along(function: Callable[..., Any], args: tuple[Any, ...], direction: tuple[Any, ...], step: float) -> float:
    """The central difference of a scalar function along a direction."""
    forward = function(*(a + step * d for a, d in zip(args, direction, strict=True)))
    backward = function(*(a - step * d for a, d in zip(args, direction, strict=True)))
    return float((forward - backward) / (2 * step))


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_order_against_finite_differences(name: str) -> None:
    function, args = CASES[name]
    rng = np.random.default_rng(1)
    result = function(*args)
    scalar = total(function, rng.standard_normal(result.shape))
    direction = tuple(rng.standard_normal(a.shape) for a in args)
    other = tuple(rng.standard_normal(a.shape) for a in args)
    everything = tuple(range(len(args)))

    def slope(*values: Any) -> Any:
        """The derivative along ``direction``: a scalar function again."""
        gradients = tk.grad(scalar, everything)(*values)
        return sum_of(b.sum(b.mul(g, d)) for g, d in zip(gradients, direction, strict=True))

    first = along(scalar, args, direction, 1e-6)
    assert float(slope(*args)) == pytest.approx(first, rel=1e-7, abs=1e-8)
    second = along(slope, args, other, 1e-6)
    gradients = tk.grad(slope, everything)(*args)
    got = sum(float(np.sum(g * d)) for g, d in zip(gradients, other, strict=True))
    assert got == pytest.approx(second, rel=1e-6, abs=1e-7)


def sum_of(values: Any) -> Any:
    result = None
    for value in values:
        result = value if result is None else b.add(result, value)
    return result


@pytest.mark.parametrize("name", CASES)
def test_jvp_is_the_slope(name: str) -> None:
    function, args = CASES[name]
    rng = np.random.default_rng(2)
    tangents = tuple(rng.standard_normal(a.shape) for a in args)
    value, tangent = tk.jvp(function, args, tangents)
    np.testing.assert_array_equal(value, function(*args))
    step = 1e-6
    forward = function(*(a + step * t for a, t in zip(args, tangents, strict=True)))
    backward = function(*(a - step * t for a, t in zip(args, tangents, strict=True)))
    np.testing.assert_allclose(tangent, (forward - backward) / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("op", ["sum", "mean", "moments"])
def test_the_gradient_of_a_reduction_of_nothing(op: str) -> None:
    """An empty batch has statistics that are NaN, and a gradient without elements."""

    def loss(x: Any) -> Any:
        results = getattr(b, op)(x, dims=(0,))
        return b.sum(results[0] + results[1] if op == "moments" else results)

    assert tk.grad(loss)(np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_third_derivatives_and_products_of_them() -> None:
    def f(x: Any) -> Any:
        return b.mul(b.sin(x), b.exp(x))

    x = np.float64(0.7)
    third = tk.grad(tk.grad(tk.grad(f)))(x)
    assert float(third) == pytest.approx(2 * np.exp(0.7) * (np.cos(0.7) - np.sin(0.7)))


def test_an_inner_gradient_sees_the_outer_variable_as_a_constant() -> None:
    def outer(x: Any) -> Any:
        y = x * x
        return tk.grad(lambda z: z * y)(x)  # y, though it depends on x

    assert float(tk.grad(outer)(np.float64(3.0))) == 6.0


def test_value_and_grad_of_trees_with_aux() -> None:
    params = {"w": np.ones((2, 2), np.float32), "rest": (np.float32(2.0), None)}

    def loss(p: Any, scale: float) -> tuple[Any, Any]:
        value = b.sum(b.mul(p["w"], p["w"])) * scale * p["rest"][0]
        return value, {"twice": value * 2}

    (value, aux), gradient = tk.value_and_grad(loss, has_aux=True)(params, 0.5)
    assert (float(value), float(aux["twice"])) == (4.0, 8.0)
    np.testing.assert_array_equal(gradient["w"], np.full((2, 2), 2.0))
    assert float(gradient["rest"][0]) == 2.0 and gradient["rest"][1] is None


def test_gradients_of_several_arguments_come_as_a_tuple() -> None:
    gradient = tk.grad(lambda x, y: x * y, argnums=(0, 1))(np.float32(2), np.float32(5))
    assert [float(g) for g in gradient] == [5.0, 2.0]


def test_stop_gradient_is_a_constant() -> None:
    gradient = tk.grad(lambda x: x * tk.stop_gradient(x))(np.float32(3))
    assert float(gradient) == 3.0


def test_vjp_gives_the_value_and_pulls_back() -> None:
    x = np.array([1.0, 2.0])
    value, pull_back = tk.vjp(lambda x, y: {"p": b.mul(x, y)}, x, x + 1)
    np.testing.assert_array_equal(value["p"], [2.0, 6.0])
    by_x, by_y = pull_back({"p": np.array([1.0, 10.0])})
    np.testing.assert_array_equal(by_x, [2.0, 30.0])
    np.testing.assert_array_equal(by_y, [1.0, 20.0])


def test_checkpoint_recomputes_and_changes_no_value() -> None:
    def f(x: Any) -> Any:
        return b.sum(b.exp(b.sin(x)))

    x = draw(5)
    np.testing.assert_array_equal(tk.grad(tk.checkpoint(f))(x), tk.grad(f)(x))
    program = tk.jit(tk.grad(tk.checkpoint(f)), device="reference").lower(x).program
    plain = tk.jit(tk.value_and_grad(f), device="reference").lower(x).program
    kept = tk.jit(tk.value_and_grad(tk.checkpoint(f)), device="reference").lower(x).program
    assert str(plain).count(" = sin ") == 1 and str(kept).count(" = sin ") == 2
    assert str(program).count(" = sin ") == 1


def test_custom_vjp_is_followed_also_under_vmap() -> None:
    @tk.custom_vjp
    def clipped(x: Any, scale: Any) -> Any:
        return b.mul(x, scale)

    clipped.defvjp(lambda x, scale: (b.mul(x, scale), x), lambda kept, ct: (b.minimum(ct, 1.0), b.mul(ct, kept)))
    x, scale = np.array([1.0, 2.0]), np.array([3.0, 4.0])

    def f(x: Any, scale: Any) -> Any:
        return clipped(x, scale) * 5.0

    by_x, by_scale = tk.vmap(tk.grad(f, (0, 1)))(x, scale)
    np.testing.assert_array_equal(by_x, [1.0, 1.0])
    np.testing.assert_array_equal(by_scale, [5.0, 10.0])


def product(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    function = tk.custom_vjp(lambda x, y: x * y)
    function.defvjp(forward, backward)
    return function


def kept(x: Any, y: Any) -> Any:
    return x * y, y


def test_custom_cotangents_have_the_dtype_of_their_arguments() -> None:
    for cotangent in (2, 2.0, np.full(3, 2.0), np.full(3, 2)):
        function = product(kept, lambda y, ct, value=cotangent: (value, None))
        got = tk.grad(lambda x, f=function: tk.numpy.sum(f(x, y=np.arange(3))))(np.ones(3, np.float32))
        np.testing.assert_array_equal(got, np.full(3, 2.0))
        assert got.dtype == np.float32


def gradient_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    return tk.grad(lambda x: tk.numpy.sum(product(forward, backward)(x, X)))(X)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not a scalar": (lambda: tk.grad(b.exp)(X), "returns one scalar, got f64[3,4]"),
    "integers": (lambda: tk.grad(lambda x: x)(np.int32(3)), "argument 0 holds int32"),
    "integer result": (lambda: tk.grad(lambda x: b.cast(x, "int32"))(np.float32(3)), "needs a floating result"),
    "argnums": (lambda: tk.grad(lambda x: x, argnums=1)(np.float32(3)), "names argument 1, and 1 were given"),
    "aux": (lambda: tk.grad(lambda x: x, has_aux=True)(np.float32(3)), "must return (value, aux)"),
    "no rule": (lambda: tk.grad(tk.custom_vjp(lambda x: x))(np.float32(3)), "has no derivative yet"),
    "shape of a custom cotangent": (
        lambda: gradient_of(kept, lambda y, ct: (ct[0], None)),
        "a custom backward returned f64[4] for an argument f64[3,4]",
    ),
    "custom forward": (lambda: gradient_of(lambda x, y: x, kept), "must return (value, kept), got Array"),
    "value of a custom forward": (
        lambda: gradient_of(lambda x, y: (x[0], y), kept),
        "a value of shapes [[4]] in PyTreeSpec(*), the function [[3, 4]]",
    ),
    "argnums of letters": (lambda: tk.grad(lambda x: x, argnums="x")(1.0), "argnums needs ints"),  # type: ignore
    "tangents": (
        lambda: tk.jvp(lambda x: x["a"], ({"a": X, "b": X},), ({"a": X, "c": X},)),
        "the tangents have the structure",
    ),
    "primals": (lambda: tk.jvp(lambda x: x, X, X), "the primals of jvp are a tuple or a list, got ndarray"),
    "cotangent": (lambda: tk.vjp(b.exp, X)[1](np.ones(3)), "a cotangent has shape [3], the result [3, 4]"),
    "tangent": (lambda: tk.jvp(b.exp, (X,), (X[0],)), "a tangent has shape [4], the primal [3, 4]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_where(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(tk.TraceError) as caught:
        call()
    assert message in str(caught.value)
    assert "test_derivatives.py" in str(caught.value)
