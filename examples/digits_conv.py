"""A convolutional digit classifier: two convolutions, max-pooling, a dense layer, SGD with momentum."""

import argparse

import numpy as np

import trainkernel as tk
from trainkernel import losses, nn, optim, random
from trainkernel.data import load_digits

NUM_TRAIN, BATCH = 1437, 64
LAYOUT = ("NHWC", "HWIO", "NHWC")
optimizer = optim.sgd(0.05, momentum=0.9)


def init(size, seed=0):
    first, second, dense = random.split(random.key(seed), 3)
    weight = lambda key, *shape: random.normal(key, shape) * np.float32((2 / np.prod(shape[:-1])) ** 0.5)  # noqa: E731
    params = {
        "first": (weight(first, 3, 3, 1, size), np.zeros(size, np.float32)),
        "second": (weight(second, 3, 3, size, 2 * size), np.zeros(2 * size, np.float32)),
        "dense": (weight(dense, 8 * size, 10), np.zeros(10, np.float32)),
    }
    return params, optimizer.init(params), np.zeros((), np.int32)


def predict(params, images):
    x = images.reshape(-1, 8, 8, 1)
    for name in ("first", "second"):
        w, b = params[name]
        x = nn.relu(nn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT) + b)
        x = nn.max_pool(x, (2, 2), (2, 2))
    w, b = params["dense"]
    return x.reshape(len(x), -1) @ w + b


def loss(params, x, y):
    return losses.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()


def step(state, images, labels, key):
    params, moments, count = state
    rows = random.shuffled_batch(key, count, BATCH, len(images))
    value, grads = tk.value_and_grad(loss)(params, images[rows], labels[rows])
    updates, moments = optimizer.update(grads, moments, params)
    return (optim.apply_updates(params, updates), moments, count + 1), value


def main(steps=500, size=16, device=None):
    images, labels = load_digits()
    labels = labels.astype(np.int32)
    run = tk.jit(step, donate_argnums=0, device=device)
    state, curve = init(size), []
    for number in range(steps):
        state, value = run(state, images[:NUM_TRAIN], labels[:NUM_TRAIN], random.key(1))
        curve.append(value)
        if number % 100 == 99 or number == steps - 1:
            print(f"step {number + 1:5}  loss {float(np.asarray(value)):.4f}")
    guess = tk.jit(predict, device=device)(state[0], images[NUM_TRAIN:])
    print(f"accuracy on held-out images {np.mean(np.asarray(guess).argmax(1) == labels[NUM_TRAIN:]):.3f}")
    return [float(np.asarray(value)) for value in curve]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--device")
    main(**vars(parser.parse_args()))
