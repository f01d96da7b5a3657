"""trainkernel.optim against plain NumPy formulas: optimizers, schedules, trees, traced code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tracing import run_traced

import trainkernel as tk
from trainkernel import optim, structure, tree
from trainkernel.batching import vmap
from trainkernel.derivatives import grad
from trainkernel.errors import TraceError
from trainkernel.trace import Array

NUM_STEPS = 20
LR = 0.05

Rule = Callable[[np.ndarray, np.ndarray, dict[str, Any], int], np.ndarray]


@dataclass
class Layer:
    weight: Any
    bias: Any = None


# ---------------------------------------------------------------------------- rules in NumPy, in float64


def sgd(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    return -LR * g


def momentum(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    state["t"] = g + 0.9 * state.get("t", 0)
    return -LR * state["t"]


def nesterov(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    state["t"] = g + 0.9 * state.get("t", 0)
    return -LR * (g + 0.9 * state["t"])


def moments(g: Any, state: dict[str, Any], b1: float, b2: float, step: int) -> tuple[Any, Any]:
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    return state["m"] / (1 - b1**step), state["v"] / (1 - b2**step)


def adam(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    m, v = moments(g, state, 0.9, 0.99, step)
    return -LR * m / (np.sqrt(v) + 1e-8)


def adamw(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    m, v = moments(g, state, 0.9, 0.99, step)
    return -LR * (m / (np.sqrt(v) + 1e-8) + 0.1 * p)


def lamb(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    m, v = moments(g, state, 0.9, 0.99, step)
    u = m / (np.sqrt(v) + 1e-6) + 0.1 * p
    return -LR * u * np.linalg.norm(p) / np.linalg.norm(u)


def rmsprop(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    state["v"] = 0.9 * state.get("v", 0) + 0.1 * g * g
    return -LR * g / np.sqrt(state["v"] + 1e-8)


def rmsprop_centered(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.9 * state.get("v", 0) + 0.1 * g * g
    state["t"] = -LR * g / (np.sqrt(state["v"] - state["m"] ** 2) + 1e-3) + 0.5 * state.get("t", 0)
    return state["t"]


def adagrad(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    state["s"] = state.get("s", 0.1) + g * g
    return -LR * g / np.sqrt(state["s"] + 1e-7)


def lion(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    sign = np.sign(0.1 * g + 0.9 * state.get("m", 0))
    state["m"] = 0.99 * state.get("m", 0) + 0.01 * g
    return -LR * (sign + 0.1 * p)


def amsgrad(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    m, v = moments(g, state, 0.9, 0.99, step)
    state["largest"] = np.maximum(state.get("largest", 0), v)
    return -LR * m / (np.sqrt(state["largest"]) + 1e-8)


def adamax(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["u"] = np.maximum(np.abs(g) + 1e-8, 0.99 * state.get("u", 0))
    return -LR * state["m"] / (1 - 0.9**step) / state["u"]


def adabelief(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["s"] = 0.99 * state.get("s", 0) + 0.01 * (g - state["m"]) ** 2 + 1e-16
    return -LR * state["m"] / (1 - 0.9**step) / (np.sqrt(state["s"] / (1 - 0.99**step)) + 1e-16)


def radam(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    m, v = moments(g, state, 0.9, 0.99, step)
    longest = 2 / (1 - 0.99) - 1
    length = longest - 2 * step * 0.99**step / (1 - 0.99**step)
    if length < 5:
        return -LR * m
    factor = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return -LR * np.sqrt(factor) * m / (np.sqrt(v) + 1e-8)


def gathered(g: Any, p: Any, state: dict[str, Any], step: int) -> Any:
    state["sum"] = state.get("sum", 0) + g
    return -LR * state.pop("sum") / 3 if step % 3 == 0 else 0 * g


RULES: dict[str, tuple[optim.GradientTransformation, Rule]] = {
    "sgd": (optim.sgd(LR), sgd),
    "momentum": (optim.sgd(LR, momentum=0.9), momentum),
    "nesterov": (optim.sgd(LR, momentum=0.9, nesterov=True), nesterov),
    "adam": (optim.adam(LR, b2=0.99), adam),
    "adamw": (optim.adamw(LR, b2=0.99, weight_decay=0.1), adamw),
    "lamb": (optim.lamb(LR, b2=0.99, weight_decay=0.1), lamb),
    "rmsprop": (optim.rmsprop(LR), rmsprop),
    "rmsprop centered": (optim.rmsprop(LR, eps=1e-3, eps_in_sqrt=False, centered=True, momentum=0.5), rmsprop_centered),
    "adagrad": (optim.adagrad(LR), adagrad),
    "lion": (optim.lion(LR, weight_decay=0.1), lion),
    "amsgrad": (optim.amsgrad(LR, b2=0.99), amsgrad),
    "adamax": (optim.adamax(LR, b2=0.99), adamax),
    "adabelief": (optim.adabelief(LR, b2=0.99), adabelief),
    "radam": (optim.radam(LR, b2=0.99), radam),
    "zero_nans": (optim.chain(optim.zero_nans(), optim.sgd(LR)), sgd),
    "apply_if_finite": (optim.apply_if_finite(optim.adam(LR, b2=0.99), 3), adam),
    "gathered": (
        optim.MultiSteps(optim.sgd(LR), 3, accumulator_dtype="float64").gradient_transformation(),
        gathered,
    ),
}


def params(dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(0)
    return {
        "layers": [
            Layer(rng.normal(size=(3, 4)).astype(dtype), rng.normal(size=4).astype(dtype)),
            Layer(make(rng, dtype)),
        ],
        "scale": (make(rng, dtype), None),
    }


def make(rng: np.random.Generator, dtype: Any) -> np.ndarray:
    return np.asarray(rng.normal(), dtype)


def gradients(like: Any, num: int = NUM_STEPS) -> Iterator[Any]:
    rng = np.random.default_rng(1)
    for _ in range(num):
        yield tree.map(lambda p: np.asarray(rng.normal(size=p.shape)).astype(p.dtype), like)


def assert_close(ours: Any, theirs: Any, relative: float) -> None:
    for x, y in zip(tree.leaves(ours), tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=relative, atol=relative)


@pytest.mark.parametrize(("dtype", "relative"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("name", RULES)
def test_rules(name: str, dtype: Any, relative: float) -> None:
    opt, rule = RULES[name]
    p = params(dtype)
    exact, memory = [np.asarray(leaf, np.float64) for leaf in tree.leaves(p)], [{} for _ in tree.leaves(p)]
    state = opt.init(p)
    assert all(isinstance(leaf, np.ndarray) for leaf in tree.leaves(state))
    for step, g in enumerate(gradients(p), 1):
        updates, state = opt.update(g, state, p)
        p = optim.apply_updates(p, updates)
        exact = [
            old + rule(np.asarray(leaf, np.float64), old, own, step)
            for leaf, old, own in zip(tree.leaves(g), exact, memory, strict=True)
        ]
        assert_close(p, exact, relative)
    assert isinstance(p["layers"][0], Layer) and p["scale"][1] is None
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype == dtype for leaf in tree.leaves(p))


@pytest.mark.parametrize("name", RULES)
def test_traced_steps_are_the_eager_ones(name: str) -> None:
    opt, _ = RULES[name]

    def step(p: Any, state: Any, g: Any) -> Any:
        updates, state = opt.update(g, state, p)
        return optim.apply_updates(p, updates), state

    p = traced_p = params()
    state, traced_state = opt.init(p), run_traced(opt.init, p)
    for g in gradients(p, 3):
        p, state = step(p, state, g)
        traced_p, traced_state = run_traced(step, traced_p, traced_state, g)
        assert tree.flatten(traced_state)[1] == tree.flatten(state)[1]
        for x, y in zip(tree.leaves((traced_p, traced_state)), tree.leaves((p, state)), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            np.testing.assert_array_equal(x, y)


def test_short_floats_are_rounded_once_an_operation() -> None:
    """Numbers such as 0.9 are float32 beside bfloat16 arrays, and results are rounded to bfloat16."""
    bf16 = ml_dtypes.bfloat16
    p, g = np.full(3, 1.5, bf16), np.array([0.3, -2, 7], bf16)
    opt = optim.sgd(0.1, 0.9)
    state = opt.init(p)
    t = np.zeros(3, bf16)
    for _ in range(5):
        updates, state = opt.update(g, state)
        decayed = (np.float32(0.9) * t.astype(np.float32)).astype(bf16)
        t = (g.astype(np.float32) + decayed.astype(np.float32)).astype(bf16)
        np.testing.assert_array_equal(state[0].trace, t)
        np.testing.assert_array_equal(updates, (np.float32(-0.1) * t.astype(np.float32)).astype(bf16))
    assert optim.apply_updates(p, tree.map(lambda u: u.astype(np.float32), updates)).dtype == bf16


def test_states_keep_their_dtypes() -> None:
    p = params(ml_dtypes.bfloat16)
    for opt in [*(opt for opt, _ in RULES.values()), optim.adam(LR, mu_dtype="float32"), optim.ema(0.9)]:
        state = opt.init(p)
        _, new = opt.update(next(gradients(p)), state, p)
        assert tree.flatten(new)[1] == tree.flatten(state)[1]
        assert [leaf.dtype for leaf in tree.leaves(new)] == [leaf.dtype for leaf in tree.leaves(state)]


def test_named_states() -> None:
    p = params()
    adam_state, scaled = optim.adamw(optim.constant_schedule(1e-3)).init(p)[::2]
    assert isinstance(adam_state, optim.ScaleByAdamState) and adam_state._fields == ("count", "mu", "nu")
    assert adam_state.count.dtype == np.int32 and adam_state.count.shape == ()
    assert isinstance(scaled, optim.ScaleByScheduleState)
    assert isinstance(optim.sgd(0.1, 0.9).init(p)[0], optim.TraceState)
    assert optim.sgd(0.1).init(p) == (optim.EmptyState(), optim.EmptyState())


def test_step_count_stops_at_the_largest_int() -> None:
    assert optim.safe_increment(np.asarray(5, np.int32)) == 6
    last = np.asarray(2**31 - 1, np.int32)
    assert optim.safe_increment(last) == last and optim.safe_increment(last).dtype == np.int32


# ---------------------------------------------------------------------------- learning rates


def test_learning_rate_may_be_traced() -> None:
    p = params()
    g = next(gradients(p))

    def step(p: Any, g: Any, rate: Any) -> Any:
        assert isinstance(rate, Array)
        opt = optim.adamw(rate)
        return opt.update(g, opt.init(p), p)[0]

    opt = optim.adamw(0.125)
    expected, _ = opt.update(g, opt.init(p), p)
    for x, y in zip(tree.leaves(run_traced(step, p, g, np.float32(0.125))), tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_learning_rate_may_be_batched_and_differentiated() -> None:
    p, g = np.arange(3, dtype=np.float32), np.ones(3, np.float32)

    def moved(rate: Any) -> Any:
        updates, _ = optim.sgd(rate).update(g, optim.sgd(rate).init(p))
        return optim.apply_updates(p, updates)

    rates = np.array([0.1, 0.5], np.float32)
    np.testing.assert_array_equal(vmap(moved)(rates), p - rates[:, None])
    assert grad(lambda rate: optim.global_norm(moved(rate)))(np.float32(0.0)) == pytest.approx(-3 / math.sqrt(5))


def test_schedule_counts_steps() -> None:
    opt = optim.sgd(optim.piecewise_constant_schedule(1.0, {2: 0.5}))
    g = np.ones(2, np.float32)
    state, seen = opt.init(g), []
    for _ in range(4):
        updates, state = opt.update(g, state)
        seen.append(float(updates[0]))
    assert seen == [-1.0, -1.0, -0.5, -0.5]
    assert state[1].count == 4


def test_injected_hyperparameters() -> None:
    p, g = params(), next(gradients(params()))
    opt = optim.inject_hyperparams(optim.adamw, static_args="mask")(
        1e-2, mask=lambda p: tree.map(lambda x: x.ndim > 0, p)
    )
    state = opt.init(p)
    assert set(state.hyperparams) == {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"}
    assert all(value.dtype == np.float32 for value in state.hyperparams.values())
    first, _ = opt.update(g, state, p)
    state.hyperparams["learning_rate"] = np.float32(2e-2)
    second, new = run_traced(opt.update, g, state, p)
    for x, y in zip(tree.leaves(second), tree.leaves(first), strict=True):
        np.testing.assert_array_equal(x, 2 * y)
    assert new.count == 1 and new.hyperparams["learning_rate"] == np.float32(2e-2)
    half = optim.inject_hyperparams(optim.adam)(1e-2, mu_dtype=np.float16).init(p)
    assert half.inner_state[0].mu["layers"][0].weight.dtype == np.float16
    scheduled = optim.inject_hyperparams(optim.sgd)(optim.linear_schedule(1.0, 0.0, 4))
    state = scheduled.init(p)
    for _ in range(3):
        _, state = scheduled.update(g, state, p)
    assert state.hyperparams["learning_rate"] == 0.5
    with pytest.raises(TraceError, match=r"'rate'.*no arguments of sgd"):
        optim.inject_hyperparams(optim.sgd, static_args="rate")


SCHEDULES: dict[str, tuple[Callable[[Any], Any], Callable[[int], float]]] = {
    "constant": (optim.constant_schedule(0.3), lambda n: 0.3),
    "linear": (optim.linear_schedule(1.0, 0.2, 8, 2), lambda n: 1 - 0.8 * min(max(n - 2, 0), 8) / 8),
    "polynomial": (optim.polynomial_schedule(1.0, 0.2, 3, 8), lambda n: 0.8 * (1 - min(n, 8) / 8) ** 3 + 0.2),
    "cosine": (
        optim.cosine_decay_schedule(0.5, 10, alpha=0.1),
        lambda n: 0.5 * (0.9 * 0.5 * (1 + math.cos(math.pi * min(n, 10) / 10)) + 0.1),
    ),
    "exponential": (optim.exponential_decay(0.5, 4, 0.7), lambda n: 0.5 * 0.7 ** (n / 4)),
    "staircase": (optim.exponential_decay(0.5, 4, 0.7, 2, True), lambda n: 0.5 * 0.7 ** max((n - 2) // 4, 0)),
    "piecewise": (
        optim.piecewise_constant_schedule(2.0, {3: 0.5, 6: 0.1}),
        lambda n: 2.0 * (0.5 if n >= 3 else 1) * (0.1 if n >= 6 else 1),
    ),
    "joined": (
        optim.join_schedules([optim.constant_schedule(1.0), optim.linear_schedule(1.0, 0.0, 4)], [5]),
        lambda n: 1.0 if n < 5 else 1 - min(n - 5, 4) / 4,
    ),
    "warmup": (
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 4, 12, 0.25),
        lambda n: n / 4 if n < 4 else 0.75 * 0.5 * (1 + math.cos(math.pi * min(n - 4, 8) / 8)) + 0.25,
    ),
    "onecycle": (
        optim.linear_onecycle_schedule(20, 1.0, 0.3, 0.85, 10.0, 100.0),
        lambda n: np.interp(n, [0, 6, 17, 20], [0.1, 1.0, 0.1, 0.001]),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    schedule, formula = SCHEDULES[name]
    for count in range(25):
        value = np.asarray(schedule(count), np.float32)
        assert value == pytest.approx(formula(count), rel=1e-6, abs=1e-7)
        traced = run_traced(schedule, np.asarray(count, np.int32))
        assert traced.dtype == np.float32 and traced.shape == ()
        assert traced == value
    counts = np.arange(25, dtype=np.int32)
    np.testing.assert_array_equal(vmap(schedule)(counts), [np.float32(schedule(int(n))) for n in counts])


def test_schedule_bounds_may_be_traced() -> None:
    def value(peak: Any, count: Any) -> Any:
        return optim.warmup_cosine_decay_schedule(0.0, peak, 4, 12)(count)

    for count in (2, 7):
        assert run_traced(value, np.float32(0.5), np.int32(count)) == pytest.approx(value(0.5, count), rel=1e-6)


# ---------------------------------------------------------------------------- bounds


def test_clipping() -> None:
    g = {"a": np.array([3.0, -4.0], np.float32), "b": [np.array([[12.0]], np.float32), None]}
    assert optim.global_norm(g) == 13.0 and optim.global_norm({}) == 0.0
    clipped, _ = optim.clip_by_global_norm(6.5).update(g, optim.EmptyState())
    assert clipped["a"].tolist() == [1.5, -2.0] and clipped["b"][0].tolist() == [[6.0]]
    unchanged, _ = optim.clip_by_global_norm(20).update(g, optim.EmptyState())
    assert unchanged["a"].tolist() == [3.0, -4.0]
    zero = tree.map(np.zeros_like, g)
    for limit in (1.0, np.float32(1.0)):
        clipped, _ = optim.clip_by_global_norm(limit).update(zero, optim.EmptyState())
        assert all((leaf == 0).all() for leaf in tree.leaves(clipped))
    each, _ = optim.clip(3.5).update(g, optim.EmptyState())
    assert each["a"].tolist() == [3.0, -3.5]
    block, _ = optim.clip_by_block_rms(1.0).update(g, optim.EmptyState())
    np.testing.assert_allclose(block["a"], np.array([3.0, -4.0]) / math.sqrt(12.5), rtol=1e-6)
    traced, _ = run_traced(optim.clip_by_global_norm(6.5).update, g, optim.EmptyState())
    assert traced["a"].tolist() == [1.5, -2.0]


# ---------------------------------------------------------------------------- composition


def test_masked_passes_the_others_on() -> None:
    p = params()
    g = next(gradients(p))
    is_matrix = tree.map(lambda leaf: leaf.ndim == 2, p)
    for mask in (is_matrix, lambda values: tree.map(lambda leaf: len(leaf.shape) == 2, values)):
        opt = optim.masked(optim.sgd(0.5, 0.9), mask)
        state = opt.init(p)
        assert isinstance(state, optim.MaskedState)
        assert len(tree.leaves(state)) == 1
        updates, _ = run_traced(opt.update, g, state, p)
        np.testing.assert_array_equal(updates["layers"][0].weight, np.float32(-0.5) * g["layers"][0].weight)
        np.testing.assert_array_equal(updates["layers"][0].bias, g["layers"][0].bias)
    prefix = optim.masked(optim.sgd(0.5, 0.9), {"layers": False, "scale": True})
    assert prefix.init(p).inner_state[0].trace["layers"] == optim.MaskedNode()


def test_groups() -> None:
    p, g = params(), next(gradients(params()))
    opt = optim.multi_transform(
        {"slow": optim.sgd(0.5), "still": optim.set_to_zero()}, {"layers": "slow", "scale": "still"}
    )
    updates, state = opt.update(g, opt.init(p), p)
    np.testing.assert_array_equal(updates["layers"][0].bias, np.float32(-0.5) * g["layers"][0].bias)
    assert updates["scale"][0] == 0
    assert isinstance(state, optim.PartitionState) and set(state.inner_states) == {"slow", "still"}
    with pytest.raises(TraceError, match=r"no transformation for the labels \['fast'\]"):
        optim.partition({"slow": optim.sgd(0.5)}, {"layers": "slow", "scale": "fast"}).init(p)


@pytest.mark.parametrize(("steps", "expected"), [(0, "new"), (1, "old"), (3, "new"), (5, "old"), (6, "new")])
def test_a_periodic_update_takes_the_new_values_at_multiples_of_the_period(steps: int, expected: str) -> None:
    trees = {
        "old": {"a": np.zeros(2, np.float32), "b": np.int32(3)},
        "new": {"a": np.ones(2, np.float32), "b": np.int32(5)},
    }
    update = tk.jit(lambda steps: optim.periodic_update(trees["new"], trees["old"], steps, 3), device="reference")
    for got in (optim.periodic_update(trees["new"], trees["old"], steps, 3), update(np.int32(steps))):
        np.testing.assert_array_equal(got["a"], trees[expected]["a"])
        assert got["b"] == trees[expected]["b"] and got["b"].dtype == np.int32


def test_incremental_update_and_ema() -> None:
    old, new = np.zeros(2, np.float32), np.array([1.0, 2.0], np.float32)
    np.testing.assert_allclose(optim.incremental_update({"a": new}, {"a": old}, 0.25)["a"], [0.25, 0.5])
    average = optim.ema(0.9)
    state = average.init(old)
    for _ in range(3):
        value, state = average.update(new, state)
        np.testing.assert_allclose(value, new, rtol=1e-6)
    np.testing.assert_allclose(state.ema, new * (1 - 0.9**3), rtol=1e-6)
    plain, _ = optim.ema(0.9, debias=False).update(new, average.init(old))
    np.testing.assert_allclose(plain, 0.1 * new, rtol=1e-6)


def test_stateless_functions() -> None:
    g = {"a": np.array([1.0, -2.0], np.float32)}
    halved, state = optim.stateless(lambda u, p: tree.map(lambda x: x / 2, u)).update(g, optim.EmptyState())
    assert halved["a"].tolist() == [0.5, -1.0] and state == optim.EmptyState()
    signed, _ = optim.stateless_with_tree_map(lambda u, p: u * p).update(g, state, g)
    assert signed["a"].tolist() == [1.0, 4.0]


def test_what_cannot_be_done_is_said() -> None:
    p = params()
    g = next(gradients(p))
    with pytest.raises(TraceError, match=r"add_decayed_weights needs the parameters.*update\(updates, state, params\)"):
        optim.adamw(LR).update(g, optim.adamw(LR).init(p))
    with pytest.raises(TraceError, match="a chain of 2 transformations got 1 states"):
        optim.sgd(LR).update(g, (optim.EmptyState(),))
    with pytest.raises(ValueError, match="structure"):
        optim.apply_updates(p, [1.0])
    with pytest.raises(TraceError, match="positive decay_steps, got 0"):
        optim.cosine_decay_schedule(0.1, 0)
    with pytest.raises(TraceError, match=r"scale -1.0 at step 3"):
        optim.piecewise_constant_schedule(0.1, {3: -1.0})
    with pytest.raises(TraceError, match="'linear' or 'cosine'"):
        optim.piecewise_interpolate_schedule("cubic", 0.1)
    with pytest.raises(TraceError, match="positive transition_steps"):
        optim.linear_onecycle_schedule(0, 0.1)


def test_states_are_carried_through_loops() -> None:
    opt, p = optim.adamw(optim.linear_schedule(0.1, 0.0, 10)), params()
    all_gradients = list(gradients(p, 5))
    state = opt.init(p)
    flat, treedef = tree.flatten((p, state))

    def step(carry: Any, slices: Any) -> Any:
        values, state = tree.unflatten(treedef, carry)
        updates, state = opt.update(tree.unflatten(tree.flatten(p)[1], slices), state, values)
        return tree.leaves((optim.apply_updates(values, updates), state)), []

    stacked = [np.stack(leaves) for leaves in zip(*map(tree.leaves, all_gradients), strict=True)]
    carried, _ = structure.settle(lambda: structure.loop(step, flat, stacked, 5, 5, False))
    for g in all_gradients:
        updates, state = opt.update(g, state, p)
        p = optim.apply_updates(p, updates)
    for x, y in zip(carried, tree.leaves((p, state)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_training_descends() -> None:
    """Gradients, clipping, a schedule and AdamW together, in traced code."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(32, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5], np.float32)
    opt = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(optim.warmup_cosine_decay_schedule(0.0, 0.3, 5, 40), weight_decay=1e-4),
    )

    def loss(w: Any, x: Any, y: Any) -> Any:
        from trainkernel import primitives as b

        difference = b.reshape(b.mm(x, b.reshape(w, (3, 1))), (32,)) - y
        return b.mean(difference * difference)

    def step(w: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = opt.update(grad(loss)(w, x, y), state, w)
        return optim.apply_updates(w, updates), state

    w = np.zeros(3, np.float32)
    state = opt.init(w)
    first = loss(w, x, y)
    for _ in range(40):
        w, state = run_traced(step, w, state, x, y)
    assert loss(w, x, y) < 0.02 * first


# ---------------------------------------------------------------------------- what does not fit


def wrong_update(updates: Any, state_of: Any, params: Any) -> Any:
    opt = optim.chain(optim.clip(1.0), optim.adamw(0.1))
    return opt.update(updates, opt.init(state_of), params)


ONE, TWO = np.ones(2, np.float32), {"w": [np.ones(2, np.float32)], "b": np.zeros(3, np.float32)}
MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "not called": (lambda: optim.chain(optim.clip(1.0), optim.sgd), r"argument 1 of chain is sgd, .*call it: sgd\("),
    "a number": (lambda: optim.chain(0.1), "argument 0 of chain is 0.1, a float, and no GradientTransformation"),
    "updates": (
        lambda: wrong_update({"w": [ONE]}, TWO, TWO),
        "not the structure of the parameters: at the root, .*'b'",
    ),
    "state": (lambda: wrong_update(TWO, {"w": ONE}, TWO), "do not fit the state of transformation 0 of the chain"),
    "applied": (lambda: optim.apply_updates(TWO, {**TWO, "w": ONE}), r"at \['w'\], a leaf instead of a list of 1"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(name: str) -> None:
    call, message = MISFITS[name]
    with pytest.raises(TypeError, match=message) as caught:
        call()
    assert isinstance(caught.value, TraceError) and "test_optim.py:" in str(caught.value)
