"""A digit classifier: shuffled mini-batches, dropout and AdamW, a thousand steps in one launch."""

import argparse
from itertools import pairwise

import numpy as np

import trainkernel as tk
from trainkernel import losses, nn, optim, random
from trainkernel.data import load_digits

NUM_TRAIN, BATCH, DROPOUT = 1437, 64, 0.1
optimizer = optim.adamw(1e-3, weight_decay=1e-2)


def init(size, seed=0):
    widths = [64, size, size, 10]
    keys = random.split(random.key(seed), len(widths) - 1)
    params = [
        {"w": random.normal(key, (n, m)) * np.float32((2 / n) ** 0.5), "b": np.zeros(m, np.float32)}
        for key, (n, m) in zip(keys, pairwise(widths), strict=True)
    ]
    return params, optimizer.init(params), np.zeros((), np.int32)


def predict(params, x, key=None):
    for number, layer in enumerate(params[:-1]):
        x = nn.relu(x @ layer["w"] + layer["b"])
        if key is not None:
            x = random.dropout(random.fold_in(key, number), x, DROPOUT)
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, x, y, key):
    return losses.softmax_cross_entropy_with_integer_labels(predict(params, x, key), y).mean()


def train(state, images, labels, key, steps):
    order_key, dropout_key = random.split(key)

    def step(state, _):
        params, moments, count = state
        rows = random.shuffled_batch(order_key, count, BATCH, len(images))
        value, grads = tk.value_and_grad(loss)(params, images[rows], labels[rows], random.fold_in(dropout_key, count))
        updates, moments = optimizer.update(grads, moments, params)
        return (optim.apply_updates(params, updates), moments, count + 1), value

    return tk.scan(step, state, length=steps)


def main(steps=3000, size=128, device=None):
    images, labels = load_digits()
    labels = labels.astype(np.int32)
    run = tk.jit(train, donate_argnums=0, static_argnames="steps", device=device)
    state, curve = init(size), []
    for start in range(0, steps, 1000):
        state, values = run(
            state, images[:NUM_TRAIN], labels[:NUM_TRAIN], random.key(1), steps=min(1000, steps - start)
        )
        curve += np.asarray(values).tolist()
        print(f"step {len(curve):5}  loss {np.mean(curve[-20:]):.4f}")
    guess = tk.jit(predict, device=device)(state[0], images[NUM_TRAIN:])
    print(f"accuracy on held-out images {np.mean(np.asarray(guess).argmax(1) == labels[NUM_TRAIN:]):.3f}")
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--device")
    main(**vars(parser.parse_args()))
