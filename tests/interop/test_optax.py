"""trainkernel.optim against optax: the same calls give the same states and, but for rounding, the same numbers."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy_cases import compiled_by_jax

from trainkernel import optim, tree
from trainkernel.errors import TraceError

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

Build = Callable[[Any], Any]

NUM_STEPS = 20

# In units of the last place of the largest elements. optax's CPU backend has its own rsqrt and sums in another order;
# everything else is the same roundings in the same order, and equal, but where optax compiles a step (lax.cond). Errors
# of the power in RAdam's rectification grow with b2: 0.999 leaves two digits of its first factors, here and in optax.
EQUAL, MAX_ULPS, MAX_ULPS_OF_MOMENTUM = 0, 4, 32

# Beside a bfloat16 array JAX rounds numbers such as 0.9 to bfloat16, and here they stay float32: structure and dtypes
# are compared alone.
ROUNDED_NUMBERS = math.inf


def mask(params: Any) -> Any:
    return {"w": True, "b": False, "n": (True, None)}


OPTIMIZERS: dict[str, tuple[Build, int]] = {
    "sgd": (lambda m: m.sgd(0.1), EQUAL),
    "sgd momentum": (lambda m: m.sgd(0.1, momentum=0.9), EQUAL),
    "sgd nesterov": (lambda m: m.sgd(0.1, momentum=0.9, nesterov=True), EQUAL),
    "sgd schedule": (lambda m: m.sgd(m.linear_schedule(0.1, 0.01, 10), momentum=0.9), EQUAL),
    "sgd accumulator": (lambda m: m.sgd(0.1, 0.9, accumulator_dtype="bfloat16"), ROUNDED_NUMBERS),
    "adam": (lambda m: m.adam(1e-2), EQUAL),
    "adam options": (lambda m: m.adam(1e-2, b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4), EQUAL),
    "adam nesterov": (lambda m: m.nadam(1e-2), EQUAL),
    "adam mu_dtype": (lambda m: m.adam(1e-2, mu_dtype="bfloat16"), ROUNDED_NUMBERS),
    "adam schedule": (lambda m: m.adam(m.cosine_decay_schedule(1e-2, 15)), EQUAL),
    "adamw": (lambda m: m.adamw(1e-2, weight_decay=0.1), EQUAL),
    "adamw mask": (lambda m: m.adamw(1e-2, weight_decay=0.1, mask=mask), EQUAL),
    "adamw mask tree": (lambda m: m.adamw(1e-2, weight_decay=0.1, mask=mask(None)), EQUAL),
    "adamw prefix mask": (
        lambda m: m.adamw(1e-2, weight_decay=0.1, mask={"w": True, "b": True, "n": False}),
        EQUAL,
    ),
    "nadamw": (lambda m: m.nadamw(1e-2), EQUAL),
    "lamb": (lambda m: m.lamb(1e-2, weight_decay=0.1), MAX_ULPS),
    "lion": (lambda m: m.lion(1e-2), EQUAL),
    "lion mu_dtype": (lambda m: m.lion(1e-2, mu_dtype="bfloat16", weight_decay=0.0), ROUNDED_NUMBERS),
    "adagrad": (lambda m: m.adagrad(0.1), MAX_ULPS),
    "rmsprop": (lambda m: m.rmsprop(1e-2), MAX_ULPS),
    "rmsprop eps": (lambda m: m.rmsprop(1e-2, eps_in_sqrt=False, initial_scale=1.0), EQUAL),
    "rmsprop momentum": (lambda m: m.rmsprop(1e-2, decay=0.99, momentum=0.9, nesterov=True), MAX_ULPS_OF_MOMENTUM),
    "rmsprop bias": (lambda m: m.rmsprop(1e-2, bias_correction=True), MAX_ULPS),
    "rmsprop centered": (
        lambda m: m.rmsprop(1e-2, eps=1e-4, initial_scale=1.0, centered=True, momentum=0.5),
        MAX_ULPS_OF_MOMENTUM,
    ),
    "clipped": (lambda m: m.chain(m.clip_by_global_norm(1.0), m.sgd(0.1)), MAX_ULPS),
    "clip": (lambda m: m.chain(m.clip(0.3), m.sgd(0.1)), EQUAL),
    "clip block": (lambda m: m.chain(m.clip_by_block_rms(0.5), m.sgd(0.1)), MAX_ULPS),
    "ema": (lambda m: m.chain(m.ema(0.9), m.scale(-0.1)), EQUAL),
    "ema plain": (lambda m: m.chain(m.ema(0.9, debias=False), m.scale(-0.1)), EQUAL),
    "trust ratio": (lambda m: m.chain(m.scale_by_trust_ratio(0.1, 0.01, 1e-6), m.scale(-1.0)), MAX_ULPS),
    "decay schedule": (
        lambda m: m.chain(m.add_decayed_weights(m.linear_schedule(0.1, 0.2, 10)), m.sgd(0.1)),
        EQUAL,
    ),
    "ascent": (lambda m: m.scale_by_learning_rate(0.1, flip_sign=False), EQUAL),
    "set_to_zero": (lambda m: m.set_to_zero(), EQUAL),
    "identity": (lambda m: m.identity(), EQUAL),
    "masked": (lambda m: m.masked(m.sgd(0.1, 0.9), mask), EQUAL),
    "groups": (
        lambda m: m.partition({"a": m.sgd(0.1), "b": m.lion(1e-2)}, {"w": "a", "b": "b", "n": "a"}),
        EQUAL,
    ),
    "injected": (lambda m: m.inject_hyperparams(m.adam)(1e-2), EQUAL),
    "injected schedule": (
        lambda m: m.inject_hyperparams(m.sgd)(m.linear_schedule(0.1, 0.01, 10), momentum=0.9),
        EQUAL,
    ),
    "adabelief": (lambda m: m.adabelief(1e-2), MAX_ULPS),
    "adabelief nesterov": (lambda m: m.adabelief(1e-2, b1=0.8, eps=1e-3, nesterov=True), MAX_ULPS),
    "radam": (lambda m: m.radam(1e-2, b2=0.8), MAX_ULPS_OF_MOMENTUM),
    "radam options": (
        lambda m: m.radam(1e-2, b2=0.9, eps_root=1e-4, threshold=4.5, nesterov=True),
        MAX_ULPS_OF_MOMENTUM,
    ),
    "adamax": (lambda m: m.adamax(1e-2), EQUAL),
    "adamaxw": (lambda m: m.adamaxw(1e-2, weight_decay=0.1, mask=mask), EQUAL),
    "amsgrad": (lambda m: m.amsgrad(1e-2, b2=0.8), EQUAL),
    "amsgrad biased": (
        lambda m: m.amsgrad(1e-2, eps_root=1e-4, bias_correction_mu=False, bias_correction_nu=False),
        EQUAL,
    ),
    "amsgrad mu_dtype": (lambda m: m.amsgrad(1e-2, mu_dtype="bfloat16"), ROUNDED_NUMBERS),
    "adaptive clip": (lambda m: m.chain(m.adaptive_grad_clip(0.3), m.sgd(0.1)), MAX_ULPS),
    "zero_nans": (lambda m: m.chain(m.zero_nans(), m.sgd(0.1)), EQUAL),
    "apply_if_finite": (lambda m: m.apply_if_finite(m.adam(1e-2), 2), MAX_ULPS),
    "multi steps": (lambda m: m.MultiSteps(m.adam(1e-2), 3), MAX_ULPS),
    "multi steps sum": (lambda m: m.MultiSteps(m.sgd(0.1, 0.9), 4, use_grad_mean=False), MAX_ULPS),
    "multi steps schedule": (
        lambda m: m.MultiSteps(m.lion(1e-2), lambda step: 1 + step % 3).gradient_transformation(),
        MAX_ULPS,
    ),
    "multi steps skipped": (
        lambda m: m.MultiSteps(
            m.sgd(0.1), 2, should_skip_update_fn=functools.partial(m.skip_large_updates, max_squared_norm=30.0)
        ),
        MAX_ULPS,
    ),
}


def params(dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(3, 4)).astype(dtype),
        "b": rng.normal(size=4).astype(dtype),
        "n": (np.asarray(rng.normal()).astype(dtype), None),
    }


def on_jax(values: Any) -> Any:
    return jax.tree.map(jax.numpy.asarray, values)


def gradients(like: Any) -> Any:
    rng = np.random.default_rng(1)
    for _ in range(NUM_STEPS):
        yield tree.map(lambda p: np.asarray(rng.normal(size=p.shape) * rng.choice([0.1, 1, 3])).astype(p.dtype), like)


def ulps(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype.kind in "ib":
        return float((ours != theirs).any()) * 1e9
    eps = float(ml_dtypes.finfo(ours.dtype).eps)
    x, y = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.abs(x - y).max(initial=0) / (eps * max(np.abs(y).max(initial=0), 1e-30)))


def same_tree(ours: Any, theirs: Any, where: str = "state") -> float:
    """The largest difference in ulps of two trees of the same nodes."""
    if ours is None or theirs is None:
        assert ours is theirs, where
        return 0.0
    if isinstance(ours, dict):
        assert sorted(ours) == sorted(theirs), where
        return max((same_tree(ours[key], theirs[key], f"{where}.{key}") for key in ours), default=0.0)
    if isinstance(ours, (tuple, list)):
        assert type(ours).__name__ == type(theirs).__name__, where
        assert len(ours) == len(theirs), where
        names = getattr(ours, "_fields", range(len(ours)))
        assert tuple(names) == tuple(getattr(theirs, "_fields", range(len(theirs)))), where
        pairs = zip(names, ours, theirs, strict=True)
        return max((same_tree(x, y, f"{where}.{name}") for name, x, y in pairs), default=0.0)
    assert isinstance(ours, np.ndarray), f"{where} is a {type(ours)}"
    return ulps(ours, theirs)


def update_of(name: str, optimizer: Any) -> Any:
    """optax's update, compiled once where it branches: a ``lax.cond`` alone compiles its branches at every call."""
    branches = name.startswith(("apply_if_finite", "multi steps"))
    return compiled_by_jax(optimizer.update) if branches else optimizer.update


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_optax(name: str) -> None:
    build, limit = OPTIMIZERS[name]
    mine, other = build(optim), build(optax)
    other_update = update_of(name, other)
    p = params()
    state, other_state = mine.init(p), other.init(on_jax(p))
    assert same_tree(state, other_state) == 0
    worst = 0.0
    for g in gradients(p):
        updates, state = mine.update(g, state, p)
        other_updates, other_state = other_update(on_jax(g), other_state, on_jax(p))
        worst = max(worst, same_tree(updates, other_updates, "updates"), same_tree(state, other_state))
        new = optim.apply_updates(p, updates)
        worst = max(worst, same_tree(new, optax.apply_updates(on_jax(p), on_jax(updates)), "params"))
        p = new
    assert worst <= limit


def zeros_for(function: Any, *arguments: Any) -> Any:
    """Zeros of the shapes and dtypes of a function's results, which are not computed."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *arguments))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_are_those_of_optax(name: str) -> None:
    build, dtype = OPTIMIZERS[name][0], ml_dtypes.bfloat16
    mine, other = build(optim), build(optax)
    p = params(dtype)
    state, other_state = mine.init(p), other.init(on_jax(p))
    g = next(iter(gradients(p)))
    updates, new = mine.update(g, state, p)
    other_updates, other_new = zeros_for(other.update, on_jax(g), other_state, on_jax(p))
    for ours, theirs in ((state, other_state), (updates, other_updates), (new, other_new)):
        same_tree(ours, theirs)
    assert [leaf.dtype for leaf in tree.leaves(optim.apply_updates(p, updates))] == [dtype] * 3


# ---------------------------------------------------------------------------- schedules

SCHEDULES: dict[str, Build] = {
    "constant": lambda m: m.constant_schedule(0.3),
    "linear": lambda m: m.linear_schedule(0.3, 0.01, 10, 5),
    "linear up": lambda m: m.linear_schedule(0.0, 0.7, 13),
    "linear none": lambda m: m.linear_schedule(0.3, 0.01, 0),
    "polynomial": lambda m: m.polynomial_schedule(0.3, 0.01, 2, 20, 3),
    "polynomial root": lambda m: m.polynomial_schedule(0.3, 0.01, 0.5, 20),
    "cosine": lambda m: m.cosine_decay_schedule(0.3, 25),
    "cosine options": lambda m: m.cosine_decay_schedule(0.3, 25, alpha=0.1, exponent=2.0),
    "warmup cosine": lambda m: m.warmup_cosine_decay_schedule(0.0, 0.3, 7, 30, 0.01),
    "warmup cosine exponent": lambda m: m.warmup_cosine_decay_schedule(0.1, 0.3, 7, 30, exponent=1.5),
    "exponential": lambda m: m.exponential_decay(0.3, 5, 0.9),
    "exponential options": lambda m: m.exponential_decay(0.3, 5, 0.8, 4, True, 0.1),
    "exponential growth": lambda m: m.exponential_decay(0.3, 5, 1.2, end_value=0.6),
    "exponential none": lambda m: m.exponential_decay(0.3, 5, 0.0),
    "piecewise": lambda m: m.piecewise_constant_schedule(0.3, {10: 0.1, 5: 0.5, 20: 0.0}),
    "piecewise none": lambda m: m.piecewise_constant_schedule(0.3),
    "interpolated": lambda m: m.piecewise_interpolate_schedule("linear", 0.3, {10: 0.1, 20: 3.0}),
    "interpolated cosine": lambda m: m.piecewise_interpolate_schedule("cosine", 0.3, {10: 0.1, 20: 3.0}),
    "onecycle": lambda m: m.linear_onecycle_schedule(30, 0.3),
    "onecycle cosine": lambda m: m.cosine_onecycle_schedule(30, 0.3),
    "warmup constant": lambda m: m.warmup_constant_schedule(0.0, 0.3, 10),
    "warmup exponential": lambda m: m.warmup_exponential_decay_schedule(0.0, 0.3, 6, 5, 0.9),
    "restarts": lambda m: m.sgdr_schedule(
        [{"init_value": 0.0, "peak_value": peak, "warmup_steps": 3, "decay_steps": 12} for peak in (0.3, 0.2, 0.1)]
    ),
    "joined": lambda m: m.join_schedules(
        [m.constant_schedule(0.1), m.linear_schedule(0.1, 0.3, 10), m.cosine_decay_schedule(0.3, 10)], [5, 15]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_optax(name: str) -> None:
    mine, other = SCHEDULES[name](optim), compiled_by_jax(SCHEDULES[name](optax))
    for count in range(41):
        ours = np.asarray(mine(np.int32(count)), np.float32)
        np.testing.assert_array_equal(ours, np.asarray(mine(count), np.float32))
        theirs = np.asarray(other(jax.numpy.asarray(count)), np.float32)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=3e-8, err_msg=str(count))


# ---------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("size", [0.0, 1e-10, 0.5, 100.0])
def test_global_norm(size: float) -> None:
    g = tree.map(lambda leaf: leaf * np.float32(size), params())
    g = tree.map(np.asarray, g)
    assert ulps(optim.global_norm(g), optax.tree.norm(g)) <= 2
    ours, _ = optim.clip_by_global_norm(1.0).update(g, optim.EmptyState())
    theirs, _ = optax.clip_by_global_norm(1.0).update(on_jax(g), optax.EmptyState())
    assert same_tree(ours, theirs) <= MAX_ULPS


BROKEN: dict[str, Build] = {
    "zero_nans": lambda m: m.chain(m.zero_nans(), m.sgd(0.1)),
    "apply_if_finite": lambda m: m.apply_if_finite(m.adam(1e-2), 2),
    "multi steps": lambda m: m.MultiSteps(m.sgd(0.1), 2, should_skip_update_fn=m.skip_not_finite),
}


@pytest.mark.parametrize("name", BROKEN)
def test_gradients_that_are_not_finite(name: str) -> None:
    mine, other = BROKEN[name](optim), BROKEN[name](optax)
    other_update = update_of(name, other)
    p = params()
    state, other_state = mine.init(p), other.init(on_jax(p))
    for step, g in enumerate(gradients(p)):
        if step % 7 in (1, 3, 4, 5):
            g["w"][1, 2] = math.nan if step % 2 or name == "zero_nans" else math.inf
        updates, state = mine.update(g, state, p)
        other_updates, other_state = other_update(on_jax(g), other_state, on_jax(p))
        pairs = list(zip(tree.leaves((updates, state)), jax.tree.leaves((other_updates, other_state)), strict=True))
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reset", [False, True])
def test_lookahead(reset: bool) -> None:
    mine, other = (m.lookahead(m.sgd(0.1, 0.9), 3, 0.25, reset) for m in (optim, optax))
    p, other_p = optim.LookaheadParams.init_synced(params()), optax.LookaheadParams.init_synced(on_jax(params()))
    state, other_state = mine.init(p), other.init(other_p)
    for g in gradients(params()):
        updates, state = mine.update(g, state, p)
        other_updates, other_state = other.update(on_jax(g), other_state, other_p)
        p, other_p = optim.apply_updates(p, updates), optax.apply_updates(other_p, other_updates)
        assert same_tree(state, other_state) <= MAX_ULPS and same_tree(p, other_p) <= MAX_ULPS_OF_MOMENTUM
    with pytest.raises(TraceError, match="sync_period must be at least 1, got 0"):
        optim.lookahead(optim.sgd(0.1), 0, 0.5)


def test_multi_steps_tell_whether_they_stepped() -> None:
    opt, p = optim.MultiSteps(optim.sgd(0.1), 3), params()
    state, seen = opt.init(p), []
    for g in gradients(p):
        _, state = opt.update(g, state)
        seen.append(bool(opt.has_updated(state)))
    assert seen == [step % 3 == 2 for step in range(NUM_STEPS)]


def test_incremental_update() -> None:
    old, new = params(), tree.map(lambda leaf: np.asarray(leaf * 2 + 1), params())
    assert same_tree(optim.incremental_update(new, old, 0.1), optax.incremental_update(new, old, 0.1)) <= 1


def test_periodic_update() -> None:
    old, new = params(), tree.map(lambda leaf: np.asarray(leaf * 2 + 1), params())
    for steps in (0, 1, 3, 6):
        assert same_tree(optim.periodic_update(new, old, steps, 3), optax.periodic_update(new, old, steps, 3)) == 0


def test_signatures_are_those_of_optax() -> None:
    for name in optim.__all__:
        ours = getattr(optim, name)
        if not inspect.isfunction(ours):
            continue
        theirs = list(inspect.signature(getattr(optax, name)).parameters)
        assert list(inspect.signature(ours).parameters) == theirs[: len(inspect.signature(ours).parameters)], name
