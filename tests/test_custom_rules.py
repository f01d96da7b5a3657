"""Functions with rules of their own by tangents, ``linearize`` and ``eval_shape``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import lax

X = np.array([0.5, 1.5, -2.0])


def marked() -> Any:
    """``x ** 3``, whose rule says ``5 x ** 2``: a derivative that shows who made it."""
    function = tk.custom_jvp(lambda x: x**3)

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return function(x), 5.0 * x**2 * t

    return function


def test_the_rule_is_followed_in_both_directions() -> None:
    f = marked()
    np.testing.assert_allclose(f(X), X**3)
    np.testing.assert_allclose(tk.grad(lambda x: tnp.sum(f(x)))(X), 5 * X**2)
    value, tangent = tk.jvp(f, (X,), (np.ones(3),))
    np.testing.assert_allclose(value, X**3)
    np.testing.assert_allclose(tangent, 5 * X**2)
    np.testing.assert_allclose(tk.jacfwd(f)(X), np.diag(5 * X**2))
    np.testing.assert_allclose(tk.hessian(lambda x: tnp.sum(f(x)))(X), np.diag(10 * X))


def test_the_rule_is_followed_under_vmap_jit_and_in_loops() -> None:
    f = marked()
    rows = np.stack([X, 2 * X])
    np.testing.assert_allclose(tk.vmap(tk.grad(lambda x: tnp.sum(f(x))))(rows), 5 * rows**2)
    np.testing.assert_allclose(tk.grad(lambda x: tnp.sum(tk.vmap(f)(x)))(rows), 5 * rows**2)
    single = X.astype(np.float32)
    for device in ("reference", "emulator"):
        got = tk.jit(tk.value_and_grad(lambda x: tnp.sum(f(x))), device=device)(single)
        np.testing.assert_allclose(got[0], np.sum(single**3), rtol=1e-6)
        np.testing.assert_allclose(got[1], 5 * single**2, rtol=1e-6)

    def looped(x: Any) -> Any:
        return tnp.sum(lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0])

    np.testing.assert_allclose(tk.grad(looped)(X), 25 * X**2 * X**6)


def pair(m: Any) -> Any:
    """A rule with trees, an integer and a fixed argument, by trainkernel or by JAX."""

    def f(mode: str, tree: Any, n: Any) -> Any:
        return {"product": tree["x"] * tree["y"] * n, "mode": tree["x"] + len(mode)}

    function = m.custom_jvp(f, nondiff_argnums=(0,))

    @function.defjvp
    def rule(mode: str, primals: Any, tangents: Any) -> Any:
        tree, n = primals
        dot, _ = tangents
        product = 2.0 * n * (tree["x"] * dot["y"] + tree["y"] * dot["x"])
        return function(mode, tree, n), {"product": product, "mode": dot["x"] * len(mode)}

    return function


def loss_of(m: Any, tree: Any) -> Any:
    result = pair(m)("abc", tree, 4)
    return (result["product"] * result["mode"]).sum()


def test_rules_of_trees_are_jaxs() -> None:
    jax = pytest.importorskip("jax")
    tree = {"x": X.astype(np.float32), "y": np.float32([1.0, 2.0, 3.0])}
    wanted = jax.grad(lambda t: loss_of(jax, t))(tree)
    got = tk.grad(lambda t: loss_of(tk, t))(tree)
    second = jax.hessian(lambda t: loss_of(jax, t))(tree)
    own = tk.hessian(lambda t: loss_of(tk, t))(tree)
    for name in tree:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-6)
        for other in tree:
            np.testing.assert_allclose(own[name][other], second[name][other], rtol=1e-5)


def test_one_rule_for_each_argument() -> None:
    f = tk.custom_jvp(lambda x, y, z: x * y + z)
    f.defjvps(lambda t, value, x, y, z: 10.0 * t * y, None, lambda t, value, x, y, z: t * value)
    got = tk.grad(lambda *args: tnp.sum(f(*args)), argnums=(0, 1, 2))(X, X + 1, X + 2)
    value = X * (X + 1) + X + 2
    for result, wanted in zip(got, (10 * (X + 1), np.zeros(3), value), strict=True):
        np.testing.assert_allclose(result, wanted)
    nothing = tk.custom_jvp(lambda x: x)
    nothing.defjvps(None)
    np.testing.assert_array_equal(tk.grad(lambda x: tnp.sum(nothing(x)))(X), np.zeros(3))


def test_a_vjp_with_arguments_that_are_no_arrays() -> None:
    f = tk.custom_vjp(lambda scale, x, mode: x * scale, nondiff_argnums=(0, 2))
    f.defvjp(lambda scale, x, mode: (x * scale, x), lambda scale, mode, kept, ct: (ct * kept * len(mode) * scale,))
    np.testing.assert_allclose(tk.grad(lambda x: tnp.sum(f(2.0, x, "abc")))(X), 6 * X)
    np.testing.assert_allclose(tk.grad(lambda x: tnp.sum(f(2.0, x, mode="abc")))(X), 6 * X)


def test_linearize_is_jvp_with_the_tangents_later() -> None:
    tree = {"a": X, "b": np.float64(2.0)}

    def f(t: Any, y: Any) -> Any:
        return tnp.sin(t["a"]) * t["b"] + y, tnp.sum(y)

    (value, total), push = tk.linearize(f, tree, X + 1)
    np.testing.assert_allclose(value, np.sin(X) * 2 + X + 1)
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        tangents = ({"a": rng.standard_normal(3), "b": rng.standard_normal()}, rng.standard_normal(3))
        got, wanted = push(*tangents), tk.jvp(f, (tree, X + 1), tangents)[1]
        for result, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(result, other)
    assert total == np.sum(X + 1)


def test_linearize_traces_once_and_works_inside_of_others() -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(1)
        return x**2, {"aux": x}

    value, push, aux = tk.linearize(f, X, has_aux=True)
    np.testing.assert_allclose(value, X**2)
    np.testing.assert_allclose([push(np.ones(3)), push(X)], [2 * X, 2 * X**2])
    np.testing.assert_array_equal(aux["aux"], X)
    assert len(calls) == 1

    def slopes(x: Any) -> Any:
        _, push, _ = tk.linearize(f, x, has_aux=True)
        return tk.vmap(push)(np.eye(3, dtype=x.dtype))

    np.testing.assert_allclose(slopes(X), np.diag(2 * X))
    single = X.astype(np.float32)
    np.testing.assert_allclose(tk.jit(slopes, device="emulator")(single), np.diag(2 * single))
    np.testing.assert_allclose(tk.grad(lambda x: tnp.sum(slopes(x)))(X), np.full(3, 2.0))


def test_eval_shape_computes_nothing() -> None:
    w = tk.ShapeDtypeStruct((1_000_000, 50_000), "float32")
    key = tk.random.key(0)

    def f(w: Any, x: Any, scale: Any, *, key: Any) -> Any:
        noise = tk.random.normal(key, (3, 4), "bfloat16")
        return {"y": x @ w * scale, "n": noise}, tnp.argmax(x), tk.jit(lambda v: v > 0)(x)

    (named, place, positive) = tk.eval_shape(f, w, tk.ShapeDtypeStruct((7, 1_000_000), np.float16), 2.0, key=key)
    assert (named["y"].shape, named["y"].dtype) == ((7, 50_000), np.float32)
    assert (named["n"].shape, str(named["n"].dtype)) == ((3, 4), "bfloat16")
    assert place == tk.ShapeDtypeStruct((), "int32") and positive.dtype == np.bool
    assert (positive.size, positive.ndim, len(positive)) == (7_000_000, 2, 7)
    assert repr(place) == "ShapeDtypeStruct(shape=(), dtype=int32)" and len({place, place}) == 1
    gradient = tk.eval_shape(tk.grad(lambda w: tnp.sum(w)), w)
    assert gradient == w
    assert tk.eval_shape(lambda n: (n, 1.5), 3) == (
        tk.ShapeDtypeStruct((), "int32"),
        tk.ShapeDtypeStruct((), "float32"),
    )


def with_rule(rule: Callable[..., Any]) -> Any:
    function = tk.custom_jvp(lambda x: x * 2)
    function.defjvp(rule)
    return tk.grad(lambda x: tnp.sum(function(x)))(X)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no rule": (lambda: tk.custom_jvp(lambda x: x)(X), "has no derivative yet"),
    "no pair": (lambda: with_rule(lambda p, t: t[0]), "must return (value, tangent), got Array"),
    "shape": (lambda: with_rule(lambda p, t: (p[0], t[0][0])), "a tangent of shapes [[]] in"),
    "symbolic zeros": (lambda: tk.custom_jvp(lambda x: x).defjvp(print, symbolic_zeros=True), "no symbolic zeros"),
    "fixed": (lambda: tk.custom_jvp(lambda x: x, nondiff_argnums=(0,)).defjvps(None), "need defjvp"),
    "linearize": (lambda: tk.linearize(lambda x: x, X)[1](X, X), "the tangents have the structure"),
    "shape of a tangent": (lambda: tk.linearize(lambda x: x, X)[1](X[:1]), "has shape [1]"),
    "value in eval_shape": (lambda: tk.eval_shape(lambda x: float(x), X[0]), "traced: it has no value yet"),
    "no shape": (lambda: tk.eval_shape(lambda x: x, "text"), "expected an array or a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_where(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(tk.TraceError) as caught:
        call()
    assert message in str(caught.value)
    assert "test_custom_rules.py" in str(caught.value)
