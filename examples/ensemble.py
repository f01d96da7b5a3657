"""A sweep: 64 small networks, each with its own initial values and learning rate, trained at once by ``vmap``."""

import argparse

import numpy as np

import trainkernel as tk
from trainkernel import losses, nn, random
from trainkernel.data import load_digits

MEMBERS, BATCH = 64, 32


def init(size, members=MEMBERS, seed=0):
    first, second = random.split(random.key(seed))
    return {
        "w1": random.normal(first, (members, 64, size)) * np.float32(0.15),
        "b1": np.zeros((members, size), np.float32),
        "w2": random.normal(second, (members, size, 10)) * np.float32(size**-0.5),
        "b2": np.zeros((members, 10), np.float32),
    }


def loss(params, x, y):
    h = nn.relu(x @ params["w1"] + params["b1"])
    return losses.softmax_cross_entropy_with_integer_labels(h @ params["w2"] + params["b2"], y).mean()


def update(params, rate, x, y):
    value, grads = tk.value_and_grad(loss)(params, x, y)
    return {name: params[name] - rate * grads[name] for name in params}, value


def train(params, rates, images, labels, key, numbers):
    """One step of all networks for each of ``numbers``; the loss of each network at each step."""

    def step(params, number):
        rows = random.shuffled_batch(key, number, BATCH, len(images))
        return tk.vmap(update, in_axes=(0, 0, None, None))(params, rates, images[rows], labels[rows])

    return tk.scan(step, params, numbers)


def main(steps=1000, size=16, device=None, members=MEMBERS):
    images, labels = load_digits()
    rates = np.geomspace(1e-3, 3.0, members, dtype=np.float32)
    run = tk.jit(train, donate_argnums=0, device=device)
    _, values = run(
        init(size, members), rates, images, labels.astype(np.int32), random.key(1), np.arange(steps, dtype=np.int32)
    )
    curves = np.asarray(values)
    final = curves[-min(steps, 50) :].mean(0)
    for member in range(0, members, max(members // 8, 1)):
        print(f"learning rate {rates[member]:7.4f}  loss {curves[0, member]:.4f} to {final[member]:.4f}")
    print(f"best: learning rate {rates[final.argmin()]:.4f}, loss {final.min():.4f}")
    return curves.tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 1000), ("size", 16), ("members", MEMBERS)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device")
    main(**vars(parser.parse_args()))
