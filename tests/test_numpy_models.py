"""Whole models written once for both packages: losses and gradients are JAX's, eagerly and as a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_cases import by_jax

import trainkernel as tk
from trainkernel import lax, nn, tree
from trainkernel import numpy as tnp

OWN = SimpleNamespace(np=tnp, nn=nn, lax=lax)
RNG = np.random.default_rng(11)


def weights(*shape: int) -> Any:
    return RNG.normal(0, shape[0] ** -0.5, shape).astype(np.float32)


def cross_entropy(m: Any, logits: Any, labels: Any) -> Any:
    logs = m.nn.log_softmax(logits)
    return -m.np.take_along_axis(logs, labels[..., None], axis=-1).mean()


# ---------------------------------------------------------------------------- models

TRANSFORMER = {
    "embed": weights(11, 8), "place": weights(6, 8), "qkv": weights(8, 24), "out": weights(8, 8),
    "up": weights(8, 16), "down": weights(16, 8), "scale": np.ones(8, np.float32),
}  # fmt: skip


def transformer(m: Any, w: Any, tokens: Any, labels: Any) -> Any:
    x = w["embed"][tokens] + w["place"][None, : tokens.shape[1]]
    q, k, v = m.np.split((m.nn.standardize(x) * w["scale"]) @ w["qkv"], 3, axis=-1)
    heads = [each.reshape(*each.shape[:2], 2, 4) for each in (q, k, v)]
    attended = m.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
    x = x + attended @ w["out"]
    x = x + m.nn.gelu(m.nn.standardize(x) @ w["up"]) @ w["down"]
    return cross_entropy(m, m.np.einsum("btd,vd->btv", x, w["embed"]), labels)


CONVNET = {
    "first": weights(3, 3, 1, 4),
    "deep": weights(3, 3, 1, 4),
    "wide": weights(1, 1, 4, 6),
    "head": weights(6, 5),
}
NHWC = ("NHWC", "HWIO", "NHWC")


def convnet(m: Any, w: Any, images: Any, labels: Any) -> Any:
    x = m.lax.conv_general_dilated(images, w["first"], (2, 2), "SAME", dimension_numbers=NHWC)
    x = m.nn.silu(x)
    x = m.lax.conv_general_dilated(x, w["deep"], (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=4)
    x = m.nn.relu(m.lax.conv_general_dilated(x, w["wide"], (1, 1), "VALID", dimension_numbers=NHWC))
    return cross_entropy(m, x.mean(axis=(1, 2)) @ w["head"], labels)


RECURRENT = {"cell": weights(7, 12), "head": weights(3, 4)}


def recurrent(m: Any, w: Any, xs: Any, labels: Any) -> Any:
    """A gated cell; its state is written into an array at each step."""

    def step(carry: Any, x: Any) -> Any:
        state, record, place = carry
        gates = m.np.concatenate([x, state]) @ w["cell"]
        forget, new, out, _ = m.np.split(gates, 4)
        state = m.nn.sigmoid(forget) * state + m.np.tanh(new) * m.nn.sigmoid(out)
        return (state, record.at[place].set(state), place + 1), state.max()

    start = (m.np.zeros(3), m.np.zeros((xs.shape[0], 3)), m.np.int32(0) if m is not OWN else np.int32(0))
    (_, record, _), peaks = m.lax.scan(step, start, xs)
    return cross_entropy(m, record @ w["head"], labels) + peaks.sum()


MODELS = {
    "transformer": (transformer, TRANSFORMER, RNG.integers(0, 11, (2, 5)), RNG.integers(0, 11, (2, 5))),
    "convnet": (convnet, CONVNET, RNG.normal(size=(2, 7, 6, 1)).astype(np.float32), RNG.integers(0, 5, 2)),
    "recurrent": (recurrent, RECURRENT, RNG.normal(size=(6, 4)).astype(np.float32), RNG.integers(0, 4, 6)),
}


def inputs_of(name: str) -> tuple[Any, ...]:
    model, w, x, y = MODELS[name]
    ints = [v.astype(np.int32) if v.dtype.kind == "i" else v for v in (x, y)]
    return model, w, *ints


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_jaxs(name: str) -> None:
    jax = pytest.importorskip("jax")
    model, w, x, y = inputs_of(name)
    theirs = SimpleNamespace(np=jax.numpy, nn=jax.nn, lax=jax.lax)
    wanted = by_jax(jax.value_and_grad(lambda w, x, y: model(theirs, w, x, y)), w, x, y)
    got = tk.value_and_grad(lambda w, x, y: model(OWN, w, x, y))(w, x, y)
    for one, other in zip(tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_computes_it(name: str) -> None:
    model, w, x, y = inputs_of(name)
    step = tk.value_and_grad(lambda w, x, y: model(OWN, w, x, y))
    eager, emulated = step(w, x, y), tk.jit(step, device="emulator")(w, x, y)
    for one, other in zip(tree.leaves(emulated), tree.leaves(eager), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_examples_are_a_loop(name: str) -> None:
    """``vmap`` of ``grad`` over a batch of models."""
    model, w, x, y = inputs_of(name)
    step = tk.grad(lambda w, x, y: model(OWN, w, x, y))
    scaled = tree.map(lambda leaf: np.stack([leaf, leaf * np.float32(0.5)]), w)
    both = tk.vmap(step, in_axes=(0, None, None))(scaled, x, y)
    for position, factor in enumerate((1.0, 0.5)):
        one = step(tree.map(lambda leaf, by=factor: leaf * np.float32(by), w), x, y)
        for got, wanted in zip(tree.leaves(both), tree.leaves(one), strict=True):
            np.testing.assert_allclose(got[position], wanted, rtol=2e-5, atol=2e-6)
