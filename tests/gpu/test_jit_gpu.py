"""Jitted functions on a GPU: against the reference, with arrays of NumPy, of our own and of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trainkernel as tk
from trainkernel import numpy as tnp
from trainkernel.runtime.device_array import DeviceArray

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
XS = RNG.standard_normal((6, 32, 8)).astype(np.float32)
YS = np.sin(XS.sum(2, keepdims=True)).astype(np.float32)


def initial() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "w": (rng.standard_normal((8, 16)) * 0.3).astype(np.float32),
        "b": np.zeros(16, np.float32),
        "v": (rng.standard_normal((16, 1)) * 0.3).astype(np.float32),
        "count": np.zeros((), np.int32),
    }


def loss(floats: Any, x: Any, y: Any) -> Any:
    error = tnp.tanh(x @ floats["w"] + floats["b"]) @ floats["v"] - y
    return (error**2).mean()


def step(params: Any, batch: Any, rate: float) -> Any:
    floats = {name: value for name, value in params.items() if name != "count"}
    value, gradient = tk.value_and_grad(loss)(floats, *batch)
    new = {name: floats[name] - rate * gradient[name] for name in floats}
    return {**new, "count": params["count"] + 1}, value


def train(params: Any, xs: Any, ys: Any, rate: float, length: int) -> Any:
    return tk.scan(lambda p, batch: step(p, batch, rate), params, (xs, ys), length=length)


@pytest.mark.parametrize("length", [6, 2, 0])
def test_numpy_arrays_go_to_the_device_and_state_stays_there(length: int) -> None:
    want, want_losses = tk.jit(train, device="reference")(initial(), XS, YS, 0.1, length)
    jitted = tk.jit(train, device="cuda", donate_argnums=0)
    state, losses = jitted(initial(), XS, YS, 0.1, length)
    assert all(isinstance(value, DeviceArray) for value in state.values())
    again, _ = jitted(state, XS, YS, 0.1, 0)
    assert all(again[name] is state[name] for name in state)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5, atol=1e-6)
    for name, value in want.items():
        np.testing.assert_allclose(np.asarray(state[name]), value, rtol=1e-4, atol=1e-6)
    assert int(state["count"]) == length


def test_torch_tensors_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    jitted = tk.jit(train, device="cuda", donate_argnums=0)
    state = {name: torch.tensor(value, device="cuda") for name, value in initial().items()}
    xs, ys = torch.tensor(XS, device="cuda"), torch.tensor(YS, device="cuda")
    new, losses = jitted(state, xs, ys, 0.1, 6)
    assert new["w"] is state["w"] and isinstance(losses, torch.Tensor)
    want, want_losses = tk.jit(train, device="reference")(initial(), XS, YS, 0.1, 6)
    np.testing.assert_allclose(losses.cpu().numpy(), want_losses, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(new["w"].cpu().numpy(), want["w"], rtol=1e-4, atol=1e-6)


def test_jax_arrays_in_and_out() -> None:
    jax = pytest.importorskip("jax")
    jitted = tk.jit(lambda x, w: tnp.exp(x @ w), device="cuda")
    x, w = jax.numpy.asarray(XS[0]), jax.numpy.asarray(initial()["w"])
    got = jitted(x, w)
    assert isinstance(got, jax.Array)
    np.testing.assert_allclose(np.asarray(got), np.exp(XS[0] @ initial()["w"]), rtol=1e-5)


def test_second_derivatives_of_each_example() -> None:
    def u(p: Any, x: Any, t: Any) -> Any:
        hidden = tnp.tanh(tnp.stack([x, t]) @ p["w"][:2] + p["b"])
        return (hidden @ p["v"])[0]

    def residual(p: Any, x: Any, t: Any) -> Any:
        u_t = tk.grad(u, 2)(p, x, t)
        u_xx = tk.grad(tk.grad(u, 1), 1)(p, x, t)
        return u_t + u(p, x, t) * tk.grad(u, 1)(p, x, t) - 0.01 * u_xx

    def objective(p: Any, x: Any, t: Any) -> Any:
        return (tk.vmap(residual, in_axes=(None, 0, 0))(p, x, t) ** 2).mean()

    p = {name: value for name, value in initial().items() if name != "count"}
    x, t = RNG.uniform(-1, 1, (2, 100)).astype(np.float32)
    value, gradient = tk.jit(tk.value_and_grad(objective), device="cuda")(p, x, t)
    want, want_gradient = tk.jit(tk.value_and_grad(objective), device="reference")(p, x, t)
    np.testing.assert_allclose(float(value), want, rtol=1e-4)
    for name, expected in want_gradient.items():
        np.testing.assert_allclose(np.asarray(gradient[name]), expected, rtol=1e-3, atol=1e-5)


def test_every_dtype_indices_and_bits() -> None:
    def f(i: Any, big: Any, wide: Any, key: Any, table: Any) -> Any:
        order = (i * 3 + 1) % 7
        bits = tk.random.bits(key, (5,))
        rows = tnp.take(table, order, axis=0)
        return (
            order,
            big // 3 - big % 5,
            wide * wide / 3.0,
            bits,
            rows.sum(),
            tnp.cumsum(rows, axis=0),
            rows.at[1].add(2.0),
        )

    i = np.arange(-4, 8, dtype=np.int32)
    args = (
        i,
        np.array([2**40 + 1, -(2**35)], np.int64),
        np.linspace(-1, 1, 5),
        np.array([1, 2], np.uint32),
        RNG.standard_normal((7, 3)).astype(np.float32),
    )
    got, want = tk.jit(f, device="cuda")(*args), tk.jit(f, device="reference")(*args)
    for position, (value, expected) in enumerate(zip(got, want, strict=True)):
        result = np.asarray(value)
        assert result.dtype == expected.dtype
        if result.dtype.kind == "f":
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6, err_msg=str(position))
        else:
            np.testing.assert_array_equal(result, expected, err_msg=str(position))
