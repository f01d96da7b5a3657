"""A language model: pre-norm transformer layers, causal attention, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workloads.workload import Array, Params, Workload


@dataclass(frozen=True, kw_only=True)
class Transformer(Workload):
    """``batch`` rows of ``length`` tokens."""

    depth: int
    width: int
    heads: int
    length: int
    vocabulary: int

    @property
    def shape(self) -> str:
        return f"transformer, {self.depth} layers, width {self.width}, {self.heads} heads, {self.length} tokens"

    def small(self) -> Transformer:
        return replace(self, batch=2, width=8, heads=2, length=8, vocabulary=12)

    def data(self) -> tuple[Array, ...]:
        """Tokens [batch, length + 1]: each is the one before it, moved by its row's stride, so it can be learned."""
        generator = np.random.default_rng(1)
        start, stride = generator.integers(self.vocabulary, size=(2, self.batch, 1))
        return (((start + stride * np.arange(self.length + 1)) % self.vocabulary).astype(np.int32),)

    def parameters(self) -> Params:
        generator = np.random.default_rng(0)

        def normal(fan_in: int, fan_out: int, deviation: float | None = None) -> Array:
            scale = np.float32(fan_in**-0.5 if deviation is None else deviation)
            return scale * generator.standard_normal((fan_in, fan_out), np.float32)

        d = self.width
        layers = [
            {
                "qkv": normal(d, 3 * d),
                "out": normal(d, d),
                "up": normal(d, 4 * d),
                "down": normal(4 * d, d),
                "norm1": np.ones(d, np.float32),
                "norm2": np.ones(d, np.float32),
            }
            for _ in range(self.depth)
        ]
        return {
            "embed": normal(self.vocabulary, d, 0.05),
            "places": normal(self.length, d, 0.05),
            "layers": layers,
            "norm": np.ones(d, np.float32),
        }

    def loss(self, lib: Any, params: Params, *data: Any) -> Any:
        tokens = data[0]
        chosen = lib.nn.one_hot(tokens[:, 1:], self.vocabulary)
        return -lib.numpy.mean(lib.numpy.sum(chosen * lib.nn.log_softmax(self.logits(lib, params, tokens[:, :-1])), -1))

    def logits(self, lib: Any, params: Params, tokens: Any) -> Any:
        """Of the next token, [batch, length, vocabulary]."""
        x = params["embed"][tokens] + params["places"]
        for layer in params["layers"]:
            qkv = _norm(lib, x, layer["norm1"]) @ layer["qkv"]
            q, k, v = (part.reshape(*part.shape[:2], self.heads, -1) for part in lib.numpy.split(qkv, 3, axis=-1))
            heads = lib.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + heads.reshape(x.shape) @ layer["out"]
            x = x + lib.nn.gelu(_norm(lib, x, layer["norm2"]) @ layer["up"]) @ layer["down"]
        return _norm(lib, x, params["norm"]) @ params["embed"].T


def _norm(lib: Any, x: Any, scale: Any) -> Any:
    xp = lib.numpy
    mean = xp.mean(x, axis=-1, keepdims=True)
    variance = xp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) / xp.sqrt(variance + 1e-5) * scale


TRANSFORMER = Transformer(
    name="transformer", batch=16, optimizer="adamw", depth=2, width=128, heads=4, length=128, vocabulary=64
)
