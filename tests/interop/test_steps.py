"""The steps of ``examples/`` against the same steps written in JAX and optax.

Initial values, mini-batches, points and dropout masks are those of the example; all else is JAX's: models, losses,
derivatives and optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from example_steps import SCHEDULE_STEPS, load, training
from numpy_cases import compiled_by_jax

from trainkernel import random
from trainkernel.data import load_digits

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

NUM_STEPS = 40

# Losses are sums of float32 roundings in other orders on both sides: within a few units of 2**-24. These trainings are
# stable, so that what differs after a step fades in the next ones. Seen: 4 units in the first ten steps, 11 later.
UNIT = 2.0**-24
FIRST_STEPS, FIRST_UNITS, UNITS = 10, 16, 64

KEY = random.key(1)
IMAGES, LABELS = load_digits()
LABELS = LABELS.astype(np.int32)
LAYOUT = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class Oracle:
    """The same training in JAX: a loss of parameters and a batch, the batch of each step, and the optimizer."""

    loss: Callable[..., Any]
    batch: Callable[[ModuleType, int], tuple[Any, ...]]
    optimizer: Any
    size: int
    extent: int = 0


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def digits(module: ModuleType, step: int) -> tuple[Any, ...]:
    rows = random.shuffled_batch(KEY, step, module.BATCH, len(IMAGES))
    return IMAGES[rows], LABELS[rows]


# ---------------------------------------------------------------------------- the models


def mlp_loss(params: Any, x: Any, y: Any, masks: Any) -> Any:
    for layer, mask in zip(params[:-1], masks, strict=True):
        x = jnp.where(mask, jax.nn.relu(x @ layer["w"] + layer["b"]) / 0.9, 0.0)
    return cross_entropy(x @ params[-1]["w"] + params[-1]["b"], y)


def mlp_batch(module: ModuleType, step: int) -> tuple[Any, ...]:
    order_key, dropout_key = random.split(KEY)
    rows = random.shuffled_batch(order_key, step, module.BATCH, len(IMAGES))
    key, ones = random.fold_in(dropout_key, step), np.ones((module.BATCH, 16), np.float32)
    masks = [random.dropout(random.fold_in(key, number), ones, module.DROPOUT) > 0 for number in range(2)]
    return IMAGES[rows], LABELS[rows], masks


def burgers_u(params: Any, x: Any, t: Any) -> Any:
    h = jnp.array([x, t])
    for w, b in params[:-1]:
        h = jnp.tanh(w.T @ h + b)
    return (params[-1][0].T @ h + params[-1][1])[0]


def burgers_residual(params: Any, x: Any, t: Any) -> Any:
    u_x = jax.grad(burgers_u, 1)
    u_xx = jax.jvp(lambda x: u_x(params, x, t), (x,), (1.0,))[1]  # forward over reverse
    convection = burgers_u(params, x, t) * u_x(params, x, t)
    return jax.grad(burgers_u, 2)(params, x, t) + convection - 0.01 / np.pi * u_xx


def burgers_loss(params: Any, x: Any, t: Any) -> Any:
    residual, u = (jax.vmap(partial(f, params)) for f in (burgers_residual, burgers_u))
    start = u(x, jnp.zeros_like(t)) + jnp.sin(np.pi * x)
    return (residual(x, t) ** 2).mean() + (start**2).mean() + (u(jnp.sign(x), t) ** 2).mean()


def burgers_batch(module: ModuleType, step: int) -> tuple[Any, ...]:
    x, t = random.uniform(random.fold_in(KEY, step), (2, 64))
    return 2 * x - 1, t


def autoencoder_loss(params: Any, x: Any) -> Any:
    (w1, b1), (w2, b2), (w3, b3), (w4, b4) = params
    code = jax.nn.gelu(x @ w1 + b1) @ w2 + b2
    return ((jax.nn.sigmoid(jax.nn.gelu(code @ w3 + b3) @ w4 + b4) - x) ** 2).mean()


def normed(x: Any, scale: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def transformer_loss(params: Any, tokens: Any) -> Any:
    (batch, length), heads = (tokens.shape[0], tokens.shape[1] - 1), 4
    x = params["embed"][tokens[:, :-1]] + params["places"]
    for layer in params["layers"]:
        qkv = (normed(x, layer["norm1"]) @ layer["qkv"]).reshape(batch, length, 3, heads, -1)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(np.tri(length, dtype=bool), scores, -jnp.inf))
        x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normed(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    return cross_entropy(normed(x, params["norm"]) @ params["embed"].T, tokens[:, 1:])


def transformer_batch(module: ModuleType, step: int) -> tuple[Any, ...]:
    text, _ = module.characters()
    first = random.randint(random.fold_in(KEY, step), (module.BATCH, 1), 0, len(text) - 16)
    return (text[first + np.arange(17)],)


def conv_loss(params: Any, x: Any, y: Any) -> Any:
    x = x.reshape(-1, 8, 8, 1)
    for name in ("first", "second"):
        w, b = params[name]
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT) + b)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return cross_entropy(x.reshape(len(x), -1) @ params["dense"][0] + params["dense"][1], y)


def ensemble_loss(params: Any, x: Any, y: Any) -> Any:
    return cross_entropy(jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"], y)


ORACLES = {
    "autoencoder": Oracle(
        autoencoder_loss,
        lambda module, step: digits(module, step)[:1],
        optax.chain(
            optax.clip_by_global_norm(0.5),
            optax.adam(optax.warmup_cosine_decay_schedule(0.0, 3e-3, SCHEDULE_STEPS // 10, SCHEDULE_STEPS)),
        ),
        size=16,
    ),
    "burgers": Oracle(burgers_loss, burgers_batch, optax.adam(1e-3), size=8, extent=64),
    "digits_conv": Oracle(conv_loss, digits, optax.sgd(0.05, momentum=0.9), size=4),
    "digits_mlp": Oracle(mlp_loss, mlp_batch, optax.adamw(1e-3, weight_decay=1e-2), size=16),
    "transformer": Oracle(
        transformer_loss, transformer_batch, optax.adamw(1e-3, weight_decay=1e-2), size=16, extent=16
    ),
}


def jax_losses(oracle: Oracle, module: ModuleType, params: Any) -> Any:
    @compiled_by_jax
    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(oracle.loss)(params, *batch)
        updates, state = oracle.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = oracle.optimizer.init(params), []
    for number in range(NUM_STEPS):
        params, state, value = step(params, state, *oracle.batch(module, number))
        losses.append(value)
    return np.asarray(losses)


def assert_same(losses: Any, want: Any) -> None:
    assert losses.dtype == want.dtype == np.float32
    np.testing.assert_allclose(losses[:FIRST_STEPS], want[:FIRST_STEPS], rtol=FIRST_UNITS * UNIT)
    np.testing.assert_allclose(losses, want, rtol=UNITS * UNIT)


@pytest.mark.parametrize("name", ORACLES)
def test_losses_of_forty_steps(name: str) -> None:
    module, oracle = load(name), ORACLES[name]
    steps = training(module, oracle.size, NUM_STEPS, oracle.extent)
    _, reports = steps.run(NUM_STEPS, "reference")
    losses = reports[0] if name == "autoencoder" else reports
    want = jax_losses(oracle, module, jax.tree.map(jnp.asarray, steps.state[0]))
    assert_same(losses, want)
    assert losses[-1] < losses[0]


def test_an_ensemble_of_networks() -> None:
    module, members = load("ensemble"), 8
    steps = training(module, 8, NUM_STEPS, members)
    _, losses = steps.run(NUM_STEPS, "reference")

    @compiled_by_jax
    @partial(jax.vmap, in_axes=(0, 0, None, None))
    def step(params: Any, rate: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(ensemble_loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    params, want = steps.state, []
    for number in range(NUM_STEPS):
        params, values = step(params, steps.args[0], *digits(module, number))
        want.append(values)
    assert_same(losses, np.asarray(want))
