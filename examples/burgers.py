"""A physics-informed network: Burgers' equation u_t + u u_x = (0.01 / pi) u_xx on new points in every step."""

import argparse
from itertools import pairwise

import numpy as np

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import optim, random

VISCOSITY = 0.01 / np.pi
optimizer = optim.adam(1e-3)


def init(size, seed=0):
    widths = [2, size, size, size, 1]
    keys = random.split(random.key(seed), len(widths) - 1)
    params = [
        (random.normal(key, (n, m)) * np.float32((2 / (n + m)) ** 0.5), np.zeros(m, np.float32))
        for key, (n, m) in zip(keys, pairwise(widths), strict=True)
    ]
    return params, optimizer.init(params), np.zeros((), np.int32)


def u(params, x, t):
    h = tnp.stack([x, t])
    for w, b in params[:-1]:
        h = tnp.tanh(h @ w + b)
    w, b = params[-1]
    return (h @ w + b)[0]


def residual(params, x, t):
    u_x, u_t = tk.grad(u, (1, 2))(params, x, t)
    u_xx = tk.grad(tk.grad(u, 1), 1)(params, x, t)
    return u_t + u(params, x, t) * u_x - VISCOSITY * u_xx


def loss(params, x, t):
    """Equation inside, u(x, 0) = -sin(pi x), u(-1, t) = u(1, t) = 0."""

    def over(f):
        return tk.vmap(f, in_axes=(None, 0, 0))

    inside = over(residual)(params, x, t)
    start = over(u)(params, x, tnp.zeros_like(t)) + tnp.sin(np.pi * x)
    sides = over(u)(params, tnp.sign(x), t)
    return tnp.mean(inside**2) + tnp.mean(start**2) + tnp.mean(sides**2)


def step(state, key, points):
    params, moments, count = state
    x, t = random.uniform(random.fold_in(key, count), (2, points))
    value, grads = tk.value_and_grad(loss)(params, 2 * x - 1, t)
    updates, moments = optimizer.update(grads, moments, params)
    return (optim.apply_updates(params, updates), moments, count + 1), value


def main(steps=2000, size=32, device=None, points=1024):
    run = tk.jit(step, donate_argnums=0, static_argnames="points", device=device)
    state, curve = init(size), []
    for number in range(steps):
        state, value = run(state, random.key(1), points=points)
        curve.append(value)
        if number % 500 == 499 or number == steps - 1:
            print(f"step {number + 1:5}  loss {float(np.asarray(value)):.5f}")
    return [float(np.asarray(value)) for value in curve]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--points", type=int, default=1024)
    parser.add_argument("--device")
    main(**vars(parser.parse_args()))
