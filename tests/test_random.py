"""trainkernel.random: known bits, exact formulas, distributions against their distribution functions."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tracing import run_traced

from trainkernel import random, structure
from trainkernel.batching import vmap
from trainkernel.derivatives import grad
from trainkernel.errors import TraceError
from trainkernel.ops.indexed import philox
from trainkernel.random import quantiles, shuffle

KEY = random.key(1234)
NORMAL = NormalDist()

# Random123's known answers for philox4x32-10: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def block(counter: tuple[int, ...], key: Any) -> list[int]:
    words = philox([np.array(word, np.uint64) for word in counter], [np.array(int(word), np.uint64) for word in key])
    return [int(word) for word in words]


# ---------------------------------------------------------------------------- keys and bits


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert block(counter, key) == list(words)


def test_bits_are_the_words_of_philox() -> None:
    assert random.bits(np.zeros(2, np.uint32), 4).tolist() == list(KNOWN[0][2])
    drawn = random.bits(KEY, (2, 5))
    assert drawn.dtype == np.uint32
    assert drawn.reshape(-1).tolist() == [block((i // 4, 0, 0, 0), KEY)[i % 4] for i in range(10)]
    assert random.bits(KEY, 5, "uint8").tolist() == (random.bits(KEY, 5) & 255).tolist()


def test_keys_of_seeds() -> None:
    assert random.key(0).tolist() == [0, 0] and random.key(0).dtype == np.uint32
    assert random.key(2**40 + 5).tolist() == [256, 5]
    assert random.key(-1).tolist() == [2**32 - 1] * 2
    assert random.key(np.int64(-2)).tolist() == random.key(-2).tolist()
    assert random.PRNGKey(7).tolist() == [0, 7]
    for seed in (np.int32(-3), np.int64(2**40 + 5), np.uint32(2**32 - 1)):
        assert run_traced(random.key, np.asarray(seed)).tolist() == random.key(seed).tolist()


def test_split_and_fold_in() -> None:
    keys = random.split(KEY, 5)
    assert keys.shape == (5, 2) and keys.dtype == np.uint32
    assert keys.reshape(-1).tolist()[:4] == block((0, 0, 0, 1), KEY)
    np.testing.assert_array_equal(random.split(KEY), keys[:2])
    np.testing.assert_array_equal(random.split(KEY, (5, 1))[:, 0], keys)
    assert random.fold_in(KEY, 9).tolist() == block((0, 0, 9, 2), KEY)[:2]
    assert random.fold_in(KEY, -1).tolist() == random.fold_in(KEY, np.uint32(2**32 - 1)).tolist()
    folded = {tuple(random.fold_in(KEY, step).tolist()) for step in range(100)}
    assert len(folded | {tuple(key) for key in keys.tolist()} | {tuple(KEY.tolist())}) == 106


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (0, "got 0: make one with key"),
        (np.zeros(2, np.int32), r"int32\[2\]"),
        (np.zeros(3, np.uint32), r"uint32\[3\]"),
        (np.zeros((4, 2), np.uint32), "take one of these keys, or use vmap"),
    ],
)
def test_what_is_no_key_is_refused(wrong: Any, said: str) -> None:
    for use in (random.split, random.bits, random.uniform, random.normal):
        with pytest.raises(TraceError, match=said):
            use(wrong)


@pytest.mark.parametrize(
    "use",
    [
        lambda: random.key(1.5),
        lambda: random.key(2**64),
        lambda: random.key(np.zeros(2, np.int32)),
        lambda: random.fold_in(KEY, 0.5),
        lambda: random.bits(KEY, (2, -1)),
        lambda: random.bits(KEY, (2,), "int64"),
        lambda: random.uniform(KEY, (2,), "int32"),
        lambda: random.uniform(KEY, (2,), minval=2, maxval=1),
        lambda: random.uniform(KEY, (2,), minval=np.zeros(3, np.float32)),
        lambda: random.randint(KEY, (2,), 3, 3),
        lambda: random.randint(KEY, (2,), 0, 300, "uint8"),
        lambda: random.randint(KEY, (2,), 0, 2**33, "int64"),
        lambda: random.randint(KEY, (2,), 0, 3, "float32"),
        lambda: random.randint(KEY, (2,), 0.0, 3),
        lambda: random.rademacher(KEY, (2,), "uint32"),
        lambda: random.choice(KEY, 3, (4,), replace=False),
        lambda: random.choice(KEY, 3, (2,), p=np.ones(4, np.float32)),
        lambda: random.categorical(KEY, np.zeros((2, 3), np.float32), shape=(3,)),
        lambda: random.permutation(KEY, 2.5),
        lambda: random.shuffled_index(KEY, 0, 0),
        lambda: random.shuffled_index(KEY, 0.5, 3),
        lambda: random.shuffled_batch(KEY, 0, 9, 8),
        lambda: random.dropout(KEY, np.ones(3, np.float32), 1.5),
        lambda: random.dropout(KEY, np.ones(3, np.int32), 0.5),
    ],
)
def test_wrong_arguments_are_refused(use: Callable[[], Any]) -> None:
    with pytest.raises(TraceError):
        use()


# ---------------------------------------------------------------------------- exact formulas


def test_uniform_is_the_documented_formula() -> None:
    words = random.bits(KEY, 1000)
    unit = (words >> 8).astype(np.float32) * np.float32(2.0**-24)
    np.testing.assert_array_equal(random.uniform(KEY, 1000), unit)
    scaled = random.uniform(KEY, 1000, minval=-0.3, maxval=0.7)
    np.testing.assert_array_equal(scaled, unit * np.float32(1.0) + np.float32(-0.3))
    bound = np.linspace(1, 2, 1000, dtype=np.float32)
    np.testing.assert_array_equal(random.uniform(KEY, 1000, maxval=bound), unit * bound)


@pytest.mark.parametrize(
    ("dtype", "num_bits"), [(np.float16, 11), (ml_dtypes.bfloat16, 8), (np.float32, 24), (np.float64, 53)]
)
def test_uniform_lies_on_the_grid_of_its_dtype(dtype: Any, num_bits: int) -> None:
    drawn = random.uniform(KEY, 3000, dtype)
    assert drawn.dtype == dtype
    on_grid = drawn.astype(np.float64) * 2.0**num_bits
    assert (on_grid == np.floor(on_grid)).all() and (drawn >= 0).all() and (drawn < 1).all()
    scaled = random.uniform(KEY, 3000, dtype, minval=1, maxval=2)
    assert scaled.dtype == dtype and (scaled >= 1).all() and (scaled < 2).all()


def test_double_uniform_uses_two_words() -> None:
    first, second = (random.keys.words(KEY, (100,), stream).astype(np.float64) for stream in (0, 3))
    exact = (np.floor(first / 32) * 2**26 + np.floor(second / 64)) * 2.0**-53
    np.testing.assert_array_equal(random.uniform(KEY, 100, "float64"), exact)


def test_randint_is_the_documented_formula() -> None:
    first, second = ([int(word) >> 1 for word in random.keys.words(KEY, (500,), stream)] for stream in (0, 3))
    numbers = [(high << 31) + low for high, low in zip(first, second, strict=True)]
    for low, high, dtype in [
        (0, 10, "int32"),
        (-7, 5, "int32"),
        (0, 256, "uint8"),
        (-(2**31), 2**31, "int32"),
        (0, 2**32, "uint32"),
        (2**40, 2**40 + 2**32, "int64"),
    ]:
        drawn = random.randint(KEY, 500, low, high, dtype)
        assert drawn.dtype == dtype
        assert drawn.tolist() == [low + (number * (high - low) >> 62) for number in numbers]
    bounds = np.arange(1, 501, dtype=np.int32)
    drawn = random.randint(KEY, 500, 0, bounds)
    assert drawn.tolist() == [number * int(bound) >> 62 for number, bound in zip(numbers, bounds, strict=True)]


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 4e-7), (np.float64, 1e-15)])
def test_normal_quantile_error(dtype: Any, error: float) -> None:
    bits = 24 if dtype is np.float32 else 52
    steps = np.random.default_rng(0).integers(0, 2 ** (bits - 1), 4000)
    far = 2 ** np.arange(0, bits - 2)
    odd = np.concatenate([2 * steps + 1, 2**bits - 2 * far - 1]).astype(np.float64)
    x = (np.concatenate([odd, -odd]) * 2.0**-bits).astype(dtype)
    assert (x.astype(np.float64) == np.concatenate([odd, -odd]) * 2.0**-bits).all() and (np.abs(x) < 1).all()
    exact = [math.copysign(-NORMAL.inv_cdf((1 - abs(float(v))) / 2), v) for v in x]
    np.testing.assert_allclose(quantiles.normal_quantile(x), np.array(exact), rtol=error, atol=error / 1e3)


def test_normal_is_symmetric_and_its_ends_are_finite() -> None:
    for dtype, bits, largest in ((np.float32, 24, 5.42), (np.float64, 52, 8.21)):
        end = np.array([1 - 2.0**-bits, 2.0**-bits, -(2.0**-bits), 2.0**-bits - 1], dtype)
        z = quantiles.normal_quantile(end)
        np.testing.assert_array_equal(z, -z[::-1])
        assert abs(z[0] - largest) < 0.01 and abs(z[1] / 2.0**-bits - math.sqrt(math.pi / 2)) < 1e-6


# ---------------------------------------------------------------------------- distributions

NUM_SAMPLES = 20_000


def normal_cdf(x: Any) -> Any:
    return np.vectorize(NORMAL.cdf)(x)


CONTINUOUS: list[tuple[str, Callable[..., Any], Callable[[Any], Any], float, float]] = [
    ("uniform", random.uniform, lambda x: x, 0.5, 1 / 12),
    ("normal", random.normal, normal_cdf, 0, 1),
    ("exponential", random.exponential, lambda x: -np.expm1(-x), 1, 1),
    ("gumbel", random.gumbel, lambda x: np.exp(-np.exp(-x)), np.euler_gamma, math.pi**2 / 6),
    ("laplace", random.laplace, lambda x: np.where(x < 0, np.exp(-np.abs(x)) / 2, 1 - np.exp(-np.abs(x)) / 2), 0, 2),
    ("logistic", random.logistic, lambda x: 1 / (1 + np.exp(-x)), 0, math.pi**2 / 3),
]


def distance(samples: Any, cdf: Callable[[Any], Any]) -> float:
    """The Kolmogorov-Smirnov statistic times sqrt(n): above 1.95 with probability 0.001."""
    ordered, num = np.sort(np.asarray(samples, np.float64)), len(samples)
    values = cdf(ordered)
    above, below = np.arange(1, num + 1) / num - values, values - np.arange(num) / num
    return float(max(above.max(), below.max()) * math.sqrt(num))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "draw", "cdf", "mean", "variance"), CONTINUOUS, ids=[row[0] for row in CONTINUOUS])
def test_continuous_distributions(name: str, draw: Any, cdf: Any, mean: float, variance: float, dtype: str) -> None:
    for seed in range(3):
        x = draw(random.key(seed), (NUM_SAMPLES,), dtype)
        assert x.dtype == dtype and np.isfinite(x).all()
        assert distance(x, cdf) < 1.95
        assert abs(x.mean() - mean) < 4 * math.sqrt(variance / NUM_SAMPLES)
        assert abs(x.var() / variance - 1) < 0.08


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "draw", [random.normal, random.exponential, random.gumbel, random.laplace, random.logistic, random.cauchy]
)
def test_short_floats_are_rounded_float32(draw: Any, dtype: Any) -> None:
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(draw(KEY, 500, dtype), draw(KEY, 500).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cauchy(dtype: str) -> None:
    x = random.cauchy(KEY, NUM_SAMPLES, dtype)
    assert x.dtype == np.dtype(dtype) and np.isfinite(x).all()
    assert distance(x, lambda v: 0.5 + np.arctan(v) / math.pi) < 1.95
    places = random.units.centred(KEY, (NUM_SAMPLES,), dtype).astype(np.float64)
    eps = np.finfo(dtype).eps
    if dtype == "float32":
        np.testing.assert_allclose(x, np.tan(math.pi / 2 * places), rtol=8 * eps)
    assert (np.sign(x) == np.sign(places)).all()


def test_truncated_normal() -> None:
    for low, high in [(-2.0, 2.0), (0.5, 3.0), (-math.inf, 0.0)]:
        first, last = NORMAL.cdf(low) if math.isfinite(low) else 0.0, NORMAL.cdf(high)
        x = random.truncated_normal(KEY, low, high, (NUM_SAMPLES,))
        assert (x >= low).all() and (x <= high).all()
        assert distance(x, lambda v, first=first, last=last: (normal_cdf(v) - first) / (last - first)) < 1.95
    assert random.truncated_normal(KEY, np.zeros((3, 1), np.float32), 1.0).shape == (3, 1)


def test_discrete_distributions() -> None:
    assert abs(random.bernoulli(KEY, 0.3, (NUM_SAMPLES,)).mean() - 0.3) < 4 * math.sqrt(0.21 / NUM_SAMPLES)
    assert random.bernoulli(KEY).dtype == np.bool_
    assert random.bernoulli(KEY, np.array([0.0, 1.0], np.float32)).tolist() == [False, True]
    signs = random.rademacher(KEY, (NUM_SAMPLES,))
    assert set(signs.tolist()) == {-1, 1} and abs(signs.mean()) < 4 / math.sqrt(NUM_SAMPLES)
    assert chi_square(random.randint(KEY, (NUM_SAMPLES,), 0, 10), np.full(10, 0.1)) < 27.9


def chi_square(samples: Any, p: Any) -> float:
    """Pearson's statistic; with 9 degrees of freedom it is above 27.9 with probability 0.001."""
    counts, expected = np.bincount(samples, minlength=len(p)), np.asarray(p) * len(samples)
    return float(((counts - expected) ** 2 / expected).sum())


P = np.array([0.05, 0.15, 0.1, 0.02, 0.08, 0.2, 0.1, 0.1, 0.05, 0.15], np.float32)


def test_categorical_and_choice_follow_their_weights() -> None:
    logits = np.log(P) + 3
    assert chi_square(random.categorical(KEY, logits, shape=(NUM_SAMPLES,)), P) < 27.9
    assert chi_square(random.choice(KEY, 10, (NUM_SAMPLES,), p=P * 2), P) < 27.9
    assert chi_square(random.choice(KEY, 10, (NUM_SAMPLES,)), np.full(10, 0.1)) < 27.9
    batch = np.stack([logits, -logits])
    drawn = random.categorical(KEY, batch, shape=(5, 2))
    assert drawn.shape == (5, 2) and drawn.dtype == np.int32
    assert random.categorical(KEY, batch.T, axis=0).shape == (2,)
    one = np.array([0.0, -np.inf, -np.inf], np.float32)
    assert (random.categorical(KEY, one, shape=(100,)) == 0).all()


def test_choice_without_replacement() -> None:
    firsts = []
    for drawn in vmap(lambda key: random.choice(key, 10, (4,), replace=False, p=P))(random.split(KEY, 2000)):
        assert len(set(drawn.tolist())) == 4
        firsts.append(int(drawn[0]))
    assert chi_square(np.array(firsts), P) < 27.9
    table = np.arange(12).reshape(3, 4).astype(np.float32)
    columns = random.choice(KEY, table, (2, 2), replace=False, axis=1)
    assert columns.shape == (3, 2, 2)
    assert sorted(columns[0].reshape(-1).tolist()) == [0, 1, 2, 3]
    assert random.choice(KEY, table, ()).shape == (4,)


def test_dropout() -> None:
    x = np.full((100, 200), 3.0, np.float32)
    y = random.dropout(KEY, x, 0.25)
    assert set(np.unique(y).tolist()) == {0.0, 4.0}
    assert abs((y == 0).mean() - 0.25) < 0.02
    assert random.dropout(KEY, x, 0) is x
    assert not random.dropout(KEY, x, 1.0).any()
    np.testing.assert_array_equal(random.dropout(KEY, x, np.float32(0.25)), y)
    by_x = grad(lambda v: random_sum(random.dropout(KEY, v, 0.25)))(x)
    np.testing.assert_array_equal(by_x, y / 3)


def random_sum(x: Any) -> Any:
    from trainkernel import primitives as b

    return b.sum(x)


def test_split_keys_are_independent() -> None:
    num = 64
    draws = np.stack([random.normal(key, (2000,)) for key in random.split(KEY, num)])
    folded = np.stack([random.normal(random.fold_in(KEY, step), (2000,)) for step in range(num)])
    seeds = np.stack([random.normal(random.key(seed), (2000,)) for seed in range(num)])
    correlations = np.corrcoef(np.concatenate([draws, folded, seeds]))
    off = correlations[~np.eye(3 * num, dtype=bool)]
    assert np.abs(off).max() < 5.5 / math.sqrt(2000)
    assert abs(off.std() * math.sqrt(2000) - 1) < 0.05


# ---------------------------------------------------------------------------- shuffled orders


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 255, 256, 257, 258, 997, 1024, 4099, 10_007, 60_000])
def test_each_index_is_hit_exactly_once(size: int) -> None:
    for seed in range(2):
        order = random.permutation(random.key(seed), size)
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_long_walks_are_exact() -> None:
    """Sizes with a large rest: the walks are as long as it."""
    rests = {}
    for size in range(257, 3000):
        a, other = shuffle.domain_of(size)
        assert a * other >= size and a <= other + 1 and other <= 4 * a
        rests.setdefault(a * other - size, size)
    assert max(rests) <= 20
    for size in rests.values():
        np.testing.assert_array_equal(np.sort(random.permutation(KEY, size)), np.arange(size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_short_orders_are_equally_frequent(size: int) -> None:
    orders: dict[tuple[int, ...], int] = {}
    num = 1800
    for order in map(tuple, vmap(lambda key: random.permutation(key, size))(random.split(KEY, num)).tolist()):
        orders[order] = orders.get(order, 0) + 1
    expected = num / math.factorial(size)
    assert len(orders) == math.factorial(size)
    assert sum((count - expected) ** 2 / expected for count in orders.values()) < 49.8


@pytest.mark.parametrize("size", [257, 331, 1031])
def test_places_and_distances_are_equally_frequent(size: int) -> None:
    """Over many keys: where an index goes, and how far apart two of them come to lie."""
    num = 20_000
    orders = vmap(lambda key: random.shuffled_index(key, np.arange(3), size))(random.split(KEY, num))
    for counts in (
        np.bincount(orders[:, 0], minlength=size),
        np.bincount((orders[:, 1] - orders[:, 0]) % size, minlength=size)[1:],
        np.bincount((orders[:, 2] - orders[:, 1]) % size, minlength=size)[1:],
    ):
        expected = num / len(counts)
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert abs(statistic - len(counts) + 1) < 4 * math.sqrt(2 * len(counts))


@pytest.mark.parametrize("size", [256, 257, 1000])
def test_orders_are_uniform(size: int) -> None:
    """Where an index goes, and how far apart neighbours come to lie, over many keys."""
    first, gaps = [], []
    draw = vmap(lambda key: random.shuffled_index(key, np.arange(20), size))
    for order in draw(random.split(KEY, 400)).astype(np.float64):
        first += [(value + 0.5) / size for value in order[:10]]
        gaps += [((after - before) % size - 0.5) / (size - 1) for before, after in itertools.pairwise(order)]
    assert distance(np.array(first), lambda x: x) < 2.2
    assert distance(np.array(gaps), lambda x: x) < 2.2


def test_shuffled_index_is_the_order_at_positions() -> None:
    for size in (100, 1000):
        order = random.permutation(KEY, size)
        positions = np.array([[5, 99], [0, size - 1]])
        np.testing.assert_array_equal(random.shuffled_index(KEY, positions, size), order[positions])
        assert random.shuffled_index(KEY, 7, size) == order[7]
        assert random.shuffled_index(KEY, size + 7, size) == order[7]
        assert random.shuffled_index(KEY, np.int32(-1), size) == order[-1]
        traced = run_traced(lambda key, at, size=size: random.shuffled_index(key, at, size), KEY, positions)
        np.testing.assert_array_equal(traced, order[positions])
    assert random.shuffled_index(KEY, np.array([2**31 - 2]), 2**31 - 1).item() < 2**31 - 1


def test_permutation_of_arrays() -> None:
    x = np.arange(24).reshape(4, 6).astype(np.float32)
    for axis in (0, 1, -1):
        shuffled = random.permutation(KEY, x, axis)
        np.testing.assert_array_equal(shuffled, np.take(x, random.permutation(KEY, x.shape[axis]), axis))
    assert random.permutation(KEY, 0).shape == (0,)
    assert random.permutation(KEY, x[:0]).shape == (0, 6)


def test_shuffled_batches_cover_an_epoch() -> None:
    size, batch = 500, 64
    per_epoch = size // batch
    epochs = [
        np.concatenate([random.shuffled_batch(KEY, epoch * per_epoch + step, batch, size) for step in range(per_epoch)])
        for epoch in range(2)
    ]
    for indices in epochs:
        assert len(set(indices.tolist())) == per_epoch * batch
    assert (epochs[0] != epochs[1]).mean() > 0.9
    order = random.permutation(random.fold_in(KEY, 1), size)
    np.testing.assert_array_equal(epochs[1], order[: per_epoch * batch])
    step = run_traced(lambda key, step: random.shuffled_batch(key, step, batch, size), KEY, np.int32(9))
    np.testing.assert_array_equal(step, random.shuffled_batch(KEY, 9, batch, size))


# ---------------------------------------------------------------------------- traced and batched

USES: dict[str, Callable[..., Any]] = {
    "bits": lambda key: random.bits(key, (3, 2)),
    "split": lambda key: random.split(key, 3),
    "fold_in": lambda key: random.fold_in(key, 5),
    "uniform": lambda key: random.uniform(key, (3, 2), minval=-1, maxval=3),
    "uniform64": lambda key: random.uniform(key, (3, 2), "float64"),
    "normal": lambda key: random.normal(key, (5,)),
    "normal64": lambda key: random.normal(key, (5,), "float64"),
    "truncated": lambda key: random.truncated_normal(key, -1, 2, (5,)),
    "exponential": lambda key: random.exponential(key, (5,), "bfloat16"),
    "gumbel": lambda key: random.gumbel(key, (5,)),
    "laplace": lambda key: random.laplace(key, (5,)),
    "logistic": lambda key: random.logistic(key, (5,)),
    "cauchy": lambda key: random.cauchy(key, (5,)),
    "bernoulli": lambda key: random.bernoulli(key, 0.5, (9,)),
    "rademacher": lambda key: random.rademacher(key, (5,), "float32"),
    "randint": lambda key: random.randint(key, (5,), 0, np.array(7)),
    "categorical": lambda key: random.categorical(key, np.log(P), shape=(4,)),
    "choice": lambda key: random.choice(key, 10, (4,), p=P),
    "choice once": lambda key: random.choice(key, 10, (4,), replace=False, p=P),
    "permutation": lambda key: random.permutation(key, 20),
    "long permutation": lambda key: random.shuffled_index(key, np.arange(4), 1001),
    "dropout": lambda key: random.dropout(key, np.ones((3, 4), np.float32), 0.5),
}


@pytest.mark.parametrize("name", USES)
def test_eager_traced_and_batched_agree(name: str) -> None:
    use, keys = USES[name], random.split(KEY, 4)
    eager = [use(key) for key in keys]
    assert all(isinstance(value, np.ndarray) for value in eager)
    np.testing.assert_array_equal(eager[0], use(keys[0]))
    np.testing.assert_array_equal(run_traced(use, keys[0]), eager[0])
    batched = vmap(use)(keys)
    assert batched.dtype == eager[0].dtype
    np.testing.assert_array_equal(batched, np.stack(eager))
    np.testing.assert_array_equal(run_traced(vmap(use), keys), batched)


def test_keys_are_carried_through_loops() -> None:
    def step(carry: Any, slices: Any) -> Any:
        return [random.fold_in(carry[0], 1)], [random.normal(carry[0], (3,))]

    carry, drawn = structure.settle(lambda: structure.loop(step, [KEY], [], 4, 4, False))
    key, expected = KEY, []
    for _ in range(4):
        expected.append(random.normal(key, (3,)))
        key = random.fold_in(key, 1)
    np.testing.assert_array_equal(carry[0], key)
    np.testing.assert_array_equal(drawn[0], np.stack(expected))


def test_signatures_are_those_of_jax() -> None:
    jax_random = pytest.importorskip("jax.random")
    for name in random.__all__:
        if name in ("dropout", "shuffled_index", "shuffled_batch"):
            continue
        ours = list(inspect.signature(getattr(random, name)).parameters)
        theirs = list(inspect.signature(getattr(jax_random, name)).parameters)
        assert ours == theirs[: len(ours)] or name in ("choice", "categorical"), (name, ours, theirs)
