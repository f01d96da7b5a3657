"""``vmap`` against a Python loop over the examples."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from differentiable import CASES

import trainkernel as tk
from trainkernel import primitives as b

SIZE = 3
RNG = np.random.default_rng(5)

# Functions of arguments that no derivative needs: integers, keys, starts.
OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "random_bits": (lambda key: b.random_bits(key, shape=(2, 3)), (np.array([1, 2], np.uint32),)),
    "counter": (
        lambda key, n: b.random_bits(key, n, shape=(5,), stream=1),
        (np.array([1, 2], np.uint32), np.array(7, np.uint32)),
    ),
    "take": (b.take, (RNG.random((4, 2)), np.array([[3, -1], [9, 0]], np.int32))),
    "scatter_add": (
        lambda i, x: b.scatter_add(i, x, size=3),
        (np.array([2, 0, -1, 2], np.int32), RNG.random((4, 2))),
    ),
    "dynamic_slice": (
        lambda x, i, j: b.dynamic_slice(x, i, j, sizes=(2, 3)),
        (RNG.random((4, 5)), np.array(1, np.int32), np.array(9, np.int32)),
    ),
    "dynamic_update": (
        b.dynamic_update,
        (RNG.random((4, 5)), RNG.random((2, 3)), np.array(1, np.int32), np.array(-3, np.int32)),
    ),
    "pad": (lambda x, v: b.pad(x, v, low=(1,), high=(0,), interior=(2,)), (RNG.random(3), np.array(0.5))),
    "compare": (lambda x, y: b.compare(x, y, "le"), (RNG.random(3), RNG.random(3))),
    "bits": (lambda x: b.bitwise_not(b.shift_left(x, 2)), (np.arange(4, dtype=np.int32),)),
    "floor": (lambda x: b.floor(b.mul(x, 3.0)), (RNG.random(3),)),
}


def spread(value: Any) -> Any:
    """Three versions of an argument, stacked."""
    if value.dtype.kind == "f":
        return np.stack([value, value * 0.9 + 0.05, value[..., ::-1] if value.ndim else value + 0.1])
    return np.stack([value, value + 1, value - 1]).astype(value.dtype)


@pytest.mark.parametrize("name", [*CASES, *(f"{name}, integers" for name in OTHERS)])
def test_every_op_against_a_loop(name: str) -> None:
    function, args = CASES[name] if name in CASES else OTHERS[name.removesuffix(", integers")]
    for flags in product([True, False], repeat=len(args)):
        if not any(flags):
            continue
        batched = [spread(a) if flag else a for a, flag in zip(args, flags, strict=True)]
        got = tk.vmap(function, in_axes=tuple(0 if flag else None for flag in flags))(*batched)
        rows = [[a[i] if f else a for a, f in zip(batched, flags, strict=True)] for i in range(SIZE)]
        want = np.stack([function(*row) for row in rows])
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
        assert got.dtype == want.dtype


def test_axes_and_trees() -> None:
    x = {"a": RNG.random((2, 3)), "b": (RNG.random((3, 4)), None)}
    got = tk.vmap(lambda x, k: (x["a"] * k, x["b"][0]), in_axes=({"a": 1, "b": 0}, None), out_axes=(1, -1))(x, 2.0)
    np.testing.assert_array_equal(got[0], x["a"] * 2)
    np.testing.assert_array_equal(got[1], x["b"][0].T)


def test_nested_with_gradients_of_each_example() -> None:
    w, x, y = RNG.random((4, 2)), RNG.random((5, 3, 4)), RNG.random((5, 3, 2))

    def loss(w: Any, x: Any, y: Any) -> Any:
        error = b.sub(b.reshape(b.mm(b.reshape(x, (1, 4)), w), (2,)), y)
        return b.sum(b.mul(error, error))

    per_example = tk.vmap(tk.vmap(tk.grad(loss), in_axes=(None, 0, 0)), in_axes=(None, 0, 0))(w, x, y)
    assert per_example.shape == (5, 3, 4, 2)
    np.testing.assert_allclose(per_example[2, 1], tk.grad(loss)(w, x[2, 1], y[2, 1]))


def test_an_ensemble_of_models_is_one_batched_product() -> None:
    weights, x = RNG.random((6, 4, 2)).astype(np.float32), RNG.random((8, 4)).astype(np.float32)
    step = tk.jit(tk.vmap(lambda w: b.tanh(b.mm(x, w))), device="reference")
    text = str(step.lower(weights).program)
    assert text.count(" = mm ") + text.count(" = bmm ") == 1
    np.testing.assert_allclose(step(weights), np.tanh(x @ weights), rtol=1e-6)


def test_a_loop_whose_carry_becomes_batched() -> None:
    def run(x: Any, start: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            total, count = carry
            return (b.add(total, b.mul(row, x)), b.add(count, 1)), b.mul(total, row)

        return tk.scan(step, (start, np.int32(0)), np.arange(4.0))

    xs = np.array([1.0, 2.0, 5.0])
    (total, count), ys = tk.vmap(run, in_axes=(0, None))(xs, np.float64(0.5))
    for i, x in enumerate(xs):
        (one, n), rows = run(x, np.float64(0.5))
        assert total[i] == one and count[i] == n
        np.testing.assert_array_equal(ys[i], rows)
    gradient = tk.vmap(tk.grad(lambda x: run(x, np.float64(0.5))[0][0]))(xs)
    np.testing.assert_allclose(gradient, np.full(3, 6.0))


def test_keyword_arguments_have_the_batch_in_front() -> None:
    x, y = RNG.random((3, 2)), {"a": RNG.random((2, 4)), "b": RNG.random(2)}
    got = tk.vmap(lambda x, *, y: b.mul(b.sum(x), b.add(b.sum(y["a"]), y["b"])), in_axes=1)(x, y=y)
    np.testing.assert_allclose(got, x.sum(0) * (y["a"].sum(1) + y["b"]))


def test_a_result_that_repeats_elements_has_memory_of_its_own() -> None:
    got = tk.vmap(lambda key: (key, b.full((3,), 0, "float32")))(np.arange(2))[1]
    assert got.shape == (2, 3) and got.flags.c_contiguous and got.flags.writeable
    step = tk.jit(lambda w: w + 1, donate_argnums=0, device="reference")
    np.testing.assert_array_equal(step(got), np.ones((2, 3)))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sizes": (lambda: tk.vmap(b.mul)(np.ones((2, 3)), np.ones((4, 3))), "one batch size, got 2 (of shape [2, 3]), 4"),
    "no batch": (lambda: tk.vmap(b.exp, in_axes=None)(np.ones(3)), "one batch size, got none"),
    "axis": (lambda: tk.vmap(b.exp, in_axes=2)(np.ones(3)), "axis 2 of an array of shape [3]"),
    "out_axes": (lambda: tk.vmap(b.exp, out_axes=None)(np.ones(3)), "depends on the batch"),
    "in_axes": (lambda: tk.vmap(b.mul, in_axes=(0,))(np.ones(3), np.ones(3)), "in_axes has 1 entries for 2 arguments"),
    "keyword": (lambda: tk.vmap(lambda x, y: x)(np.ones(3), y=True), "axis 0 of an array of shape []"),
    "no int": (lambda: tk.vmap(b.exp, in_axes="x")(np.ones(3)), "in_axes needs ints and None"),
    "prefix": (lambda: tk.vmap(b.exp, in_axes=({"a": 0},))(np.ones(3)), "does not fit the arguments"),
    "far out_axes": (lambda: tk.vmap(b.exp, out_axes=1)(np.ones(3)), "out_axes is 1 for a result of shape [3]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(tk.TraceError) as caught:
        call()
    assert message in str(caught.value)


def test_axis_size() -> None:
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(tk.vmap(lambda y: y * 2, None, axis_size=4)(x), np.tile(2 * x, (4, 1)))
    np.testing.assert_array_equal(tk.vmap(lambda y: y * 2, axis_size=3)(x), 2 * x)
    assert tk.vmap(lambda: x, axis_size=2)().shape == (2, 3)
    with pytest.raises(tk.TraceError, match=r"vmap needs axis_size 4, got 3 \(of shape \[3\]\)"):
        tk.vmap(lambda y: y, axis_size=4)(x)
