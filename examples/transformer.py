"""A language model of the characters of the licence: two transformer layers, tied embeddings, AdamW."""

import argparse
from pathlib import Path

import numpy as np

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import losses, nn, optim, random

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
LAYERS, HEADS, LENGTH, BATCH = 2, 4, 64, 16
optimizer = optim.adamw(1e-3, weight_decay=1e-2)


def characters():
    """The text as int32 numbers of characters, and how many different ones there are."""
    letters, text = np.unique(list(TEXT.read_text()), return_inverse=True)
    return text.astype(np.int32), len(letters)


def init(size, num_letters, length=LENGTH, seed=0):
    keys = iter(random.split(random.key(seed), 2 + 4 * LAYERS))

    def weight(*shape):
        return random.normal(next(keys), shape) * np.float32(shape[0] ** -0.5)

    shapes = {"qkv": (size, 3 * size), "out": (size, size), "up": (size, 4 * size), "down": (4 * size, size)}
    layers = [{name: weight(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    for layer in layers:
        layer["norm1"], layer["norm2"] = np.ones(size, np.float32), np.ones(size, np.float32)
    embed, places = (random.normal(next(keys), (n, size)) * np.float32(0.05) for n in (num_letters, length))
    params = {"embed": embed, "places": places, "layers": layers, "norm": np.ones(size, np.float32)}
    return params, optimizer.init(params), np.zeros((), np.int32)


def logits(params, tokens):
    batch, length = tokens.shape
    x = params["embed"][tokens] + params["places"]
    for layer in params["layers"]:
        qkv = (nn.layer_norm(x, layer["norm1"]) @ layer["qkv"]).reshape(batch, length, 3, HEADS, -1)
        heads = nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + heads.reshape(x.shape) @ layer["out"]
        x = x + nn.gelu(nn.layer_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    return nn.layer_norm(x, params["norm"]) @ params["embed"].T


def loss(params, tokens):
    guess = logits(params, tokens[:, :-1])
    return losses.softmax_cross_entropy_with_integer_labels(guess, tokens[:, 1:]).mean()


def step(state, text, key):
    params, moments, count = state
    length = len(params["places"])
    first = random.randint(random.fold_in(key, count), (BATCH, 1), 0, len(text) - length)
    value, grads = tk.value_and_grad(loss)(params, text[first + tnp.arange(length + 1)])
    updates, moments = optimizer.update(grads, moments, params)
    return (optim.apply_updates(params, updates), moments, count + 1), value


def main(steps=1000, size=64, device=None, length=LENGTH):
    text, num_letters = characters()
    run = tk.jit(step, donate_argnums=0, device=device)
    state, curve = init(size, num_letters, length), []
    for number in range(steps):
        state, value = run(state, text, random.key(1))
        curve.append(value)
        if number % 100 == 99 or number == steps - 1:
            print(f"step {number + 1:5}  loss {float(np.asarray(value)):.4f}")
    return [float(np.asarray(value)) for value in curve]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 1000), ("size", 64), ("length", LENGTH)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device")
    main(**vars(parser.parse_args()))
