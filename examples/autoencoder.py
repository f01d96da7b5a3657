"""An autoencoder of digits: 64 pixels through 8 numbers and back, with a cosine schedule and clipped gradients."""

import argparse
from itertools import pairwise

import numpy as np

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import nn, optim, random
from trainkernel.data import load_digits

BATCH, CODE = 64, 8


def make_optimizer(steps):
    schedule = optim.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adam(schedule))


def init(size, optimizer, seed=0):
    widths = [64, size, CODE, size, 64]
    keys = random.split(random.key(seed), len(widths) - 1)
    params = [
        (random.normal(key, (n, m)) * np.float32(n**-0.5), np.zeros(m, np.float32))
        for key, (n, m) in zip(keys, pairwise(widths), strict=True)
    ]
    return params, optimizer.init(params)


def loss(params, x):
    h = x
    for number, (w, b) in enumerate(params):
        h = h @ w + b
        if number % 2 == 0:
            h = nn.gelu(h)
    return tnp.mean((nn.sigmoid(h) - x) ** 2)


def train(state, images, key, numbers, optimizer):
    """One step for each of ``numbers``, the counts of the steps before it."""

    def step(state, number):
        params, moments = state
        batch = images[random.shuffled_batch(key, number, BATCH, len(images))]
        value, grads = tk.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optim.apply_updates(params, updates), moments), (value, optim.global_norm(grads))

    return tk.scan(step, state, numbers)


def main(steps=2000, size=128, device=None):
    images, _ = load_digits()
    optimizer = make_optimizer(steps)
    run = tk.jit(train, donate_argnums=0, static_argnames="optimizer", device=device)
    _, (values, norms) = run(
        init(size, optimizer), images, random.key(1), np.arange(steps, dtype=np.int32), optimizer=optimizer
    )
    curve, norms = np.asarray(values).tolist(), np.asarray(norms)
    for number in range(steps):
        if number % max(steps // 10, 1) == 0 or number == steps - 1:
            print(f"step {number + 1:5}  loss {curve[number]:.5f}  gradient norm {norms[number]:.3f}")
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--device")
    main(**vars(parser.parse_args()))
