"""Steps that draw their own batch (points, a shuffled mini-batch): a block draws the rows that it computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import check

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import nn, random
from trainkernel.codegen import generate
from trainkernel.options import Options
from trainkernel.random.shuffle import MOST_WALKERS, domain_of
from trainkernel.regions import Cuts, classify, plan_region
from trainkernel.target import Target

KEY = random.key(3)
RATE = np.float32(0.01)


def init(*sizes: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((a, b), np.float32) / np.float32(a**0.5), np.zeros(b, np.float32))
        for a, b in itertools.pairwise(sizes)
    ]


def predict(params: Any, x: Any) -> Any:
    for w, b in params[:-1]:
        x = tnp.tanh(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


def updated(params: Any, loss: Callable[[Any], Any]) -> Any:
    value, grads = tk.value_and_grad(loss)(params)
    return tk.tree.map(lambda p, g: p - RATE * g, params, grads), value


def points(params: Any, key: Any, count: Any) -> Any:
    """Two rows of random numbers, one of each coordinate."""
    x, y = random.uniform(random.fold_in(key, count), (2, 200))
    at = tnp.stack([x, y], axis=1)
    return updated(params, lambda p: tnp.mean((predict(p, at)[:, 0] - tnp.sin(x) * y) ** 2))


def shuffled(params: Any, key: Any, count: Any, data: Any, labels: Any) -> Any:
    rows = random.shuffled_batch(key, count, 48, len(data))
    x, y = data[rows], labels[rows]
    return updated(params, lambda p: tnp.mean((predict(p, x)[:, 0] - y) ** 2))


def sampled(params: Any, key: Any, count: Any, data: Any, labels: Any) -> Any:
    rows = random.randint(random.fold_in(key, count), (120,), 0, len(data))
    x, y = data[rows], labels[rows]
    return updated(params, lambda p: tnp.mean((predict(p, x)[:, 0] - y) ** 2))


def actions(params: Any, key: Any, count: Any, data: Any, labels: Any) -> Any:
    """The value of the action taken, by each of the ways to write it: no gather, and no scatter for its derivative."""
    rows = random.randint(random.fold_in(key, count), (120,), 0, len(data))
    x, y = data[rows], labels[rows]
    taken = random.randint(random.fold_in(key, count + 1), (120,), 0, 5)

    def loss(params: Any) -> Any:
        values = predict(params, x)
        ways = (
            tnp.take_along_axis(values, taken[:, None], axis=1)[:, 0],
            values[tnp.arange(120), taken],
            tk.vmap(lambda each, action: each[action])(values, taken),
        )
        return sum(tnp.mean((way - y) ** 2) for way in ways)

    return updated(params, loss)


def images(params: Any, key: Any, count: Any, data: Any, labels: Any) -> Any:
    """A convolution and a pooling, whose places are rows, in front of a dense layer."""
    rows = random.shuffled_batch(key, count, 96, len(data))
    x, y = data[rows].reshape(-1, 4, 4, 1), labels[rows]

    def loss(params: Any) -> Any:
        (kernel, bias), *dense = params
        form = ("NHWC", "HWIO", "NHWC")
        h = nn.conv_general_dilated(x, kernel.reshape(3, 3, 1, 8), (1, 1), "SAME", dimension_numbers=form)
        h = nn.max_pool(nn.relu(h + bias), (2, 2), (2, 2))
        return tnp.mean((predict(dense, h.reshape(len(x), -1))[:, 0] - y) ** 2)

    return updated(params, loss)


DATA, LABELS = np.random.default_rng(1).standard_normal((301, 16), np.float32), np.linspace(0, 1, 301, dtype=np.float32)
STEPS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "points": (points, (init(2, 24, 24, 1), KEY, np.int32(5)), 200),
    "shuffled": (shuffled, (init(16, 32, 24, 1), KEY, np.int32(5), DATA, LABELS), 48),
    "sampled": (sampled, (init(16, 32, 24, 1), KEY, np.int32(5), DATA, LABELS), 120),
    "actions": (actions, (init(16, 32, 24, 5), KEY, np.int32(5), DATA, LABELS), 120),
    "images": (images, ([*init(9, 8), *init(32, 24, 1)], KEY, np.int32(5), DATA, LABELS), 96),
}
MAX_UNKNOWN = {
    "points": 0.0,
    "shuffled": 0.0,
    "sampled": 0.0,
    "actions": 0.0,
    "images": 0.1,
}  # which pixel of a pool is largest


@pytest.mark.parametrize("name", STEPS)
def test_a_block_draws_its_own_rows(name: str) -> None:
    """One region and the update: two stages; the same numbers on any grid, in any order, without a race."""
    step, arguments, rows = STEPS[name]
    lowered = tk.jit(step, donate_argnums=0, device="reference").lower(*arguments)
    inputs = [np.array(leaf) for leaf in tk.tree.leaves(arguments)]
    generated = generate(lowered.program)
    regions = [task.region for stage in generated.schedule.stages for task in stage.tasks if task.region]
    assert [region.split.label for region in regions] == [rows]
    assert len(generated.schedule.stages) == (3 if name == "actions" else 2)  # three means are added
    for num_blocks, order in ((1, "forward"), (3, "reverse"), (rows, 1)):
        check(lowered.program, inputs, num_blocks=num_blocks, order=order, max_unknown=MAX_UNKNOWN[name])
    check(lowered.program, inputs, num_blocks=2, region_pieces=0, max_unknown=MAX_UNKNOWN[name])


def test_rows_of_random_numbers_that_others_read_as_a_whole_are_none() -> None:
    """What draws both coordinates has two rows, not 200; each block evaluates what it needs of them."""
    lowered = tk.jit(points, device="reference").lower(*STEPS["points"][1])
    rows, partials = classify(Cuts(lowered.program, 200), frozenset(), frozenset())
    operations = {operation.outputs[0].buffer: operation for operation in lowered.program.operations}
    assert partials and all(operations[name].outputs[0].shape[0] == 200 for name in rows)


def test_weights_drawn_at_random_are_no_batch() -> None:
    """Noise on weights is read by every row: it must not become rows itself."""

    def step(params: Any, key: Any, x: Any) -> Any:
        noise = [0.1 * random.normal(key, w.shape) for w, _ in params]

        def loss(params: Any) -> Any:
            return tnp.mean(predict([(w + n, b) for (w, b), n in zip(params, noise, strict=True)], x) ** 2)

        return updated(params, loss)

    arguments = (init(32, 32, 32, 1), KEY, np.random.default_rng(2).standard_normal((64, 32), np.float32))
    lowered = tk.jit(step, donate_argnums=0, device="reference").lower(*arguments)
    plan = plan_region(lowered.program, Target.preset("sm_90a"), Options())
    assert plan is not None and plan.split.label == 64
    check(lowered.program, [np.array(leaf) for leaf in tk.tree.leaves(arguments)], num_blocks=3)


@pytest.mark.parametrize("size", [1437, 257, 5003])
def test_few_and_many_indices_are_of_one_order(size: int) -> None:
    """A mini-batch walks index by index, a long order by a table: the same permutation."""
    a, other = domain_of(size)
    assert a * other > size or size != 1437
    whole = np.asarray(random.shuffled_index(KEY, np.arange(2 * MOST_WALKERS, dtype=np.int32), size))[:size]
    few = np.asarray(random.shuffled_index(KEY, np.arange(min(size, MOST_WALKERS), dtype=np.int32), size))
    np.testing.assert_array_equal(whole[: len(few)], few)
    assert sorted(whole.tolist()) == list(range(size))
