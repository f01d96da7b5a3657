"""Initializers: spread, bounds and dtypes, and the fans that JAX counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trainkernel import random
from trainkernel.errors import TraceError
from trainkernel.jitted import jit
from trainkernel.nn import initializers

KEY = random.key(3)
# Deviation and bound of a [3, 3, 40, 60] kernel: 360 inputs of an output, 540 outputs of an input.
FAMILIES = {
    "glorot_uniform": (1 / 450, math.sqrt(3 / 450)),
    "glorot_normal": (1 / 450, 2 * math.sqrt(1 / 450) / 0.8796),
    "lecun_uniform": (1 / 360, math.sqrt(3 / 360)),
    "lecun_normal": (1 / 360, 2 * math.sqrt(1 / 360) / 0.8796),
    "he_uniform": (2 / 360, math.sqrt(6 / 360)),
    "kaiming_normal": (2 / 360, 2 * math.sqrt(2 / 360) / 0.8796),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_variance_is_that_of_the_fan(name: str) -> None:
    variance, bound = FAMILIES[name]
    w = getattr(initializers, name)()(KEY, (3, 3, 40, 60))
    assert w.dtype == np.float32 and abs(w).max() <= bound * 1.001
    np.testing.assert_allclose(w.var(), variance, rtol=0.05)
    np.testing.assert_allclose(w.mean(), 0, atol=0.05 * bound)


def test_plain_initializers() -> None:
    assert not initializers.zeros(KEY, (2, 3)).any() and initializers.ones(KEY, (2,), "int32").dtype == np.int32
    assert (initializers.constant(2.5)(KEY, (3,)) == 2.5).all()
    w = initializers.uniform(0.5)(KEY, (1000,))
    assert w.min() >= 0 and w.max() <= 0.5
    np.testing.assert_allclose(initializers.normal(0.2)(KEY, (4000,)).std(), 0.2, rtol=0.05)
    assert initializers.normal(dtype="float16")(KEY, (3,)).dtype == np.float16
    assert abs(initializers.truncated_normal(1.0, lower=-1, upper=1)(KEY, (500,))).max() <= 1


def test_fans_by_axes() -> None:
    """A stack of dense layers has no receptive field along its batch axis."""
    w = initializers.he_normal(batch_axis=0)(KEY, (7, 50, 60))
    np.testing.assert_allclose(w.var(), 2 / 50, rtol=0.05)
    w = initializers.lecun_normal(in_axis=(0, 1), out_axis=2)(KEY, (8, 10, 90))
    np.testing.assert_allclose(w.var(), 1 / 80, rtol=0.05)


@pytest.mark.parametrize(
    ("shape", "axis", "fewer"),
    [((6, 9), -1, 6), ((9, 6), -1, 6), ((5, 5), -1, 5), ((2, 3, 4), 1, 3), ((3, 4, 2), -1, 2), ((7, 2), 0, 2)],
)
def test_orthogonal_vectors(shape: tuple[int, ...], axis: int, fewer: int) -> None:
    init = initializers.orthogonal(2.0, axis)
    w = init(KEY, shape)
    assert w.dtype == np.float32 and w.shape == shape
    matrix = np.moveaxis(np.asarray(w, np.float64), axis, -1).reshape(-1, shape[axis])
    product = matrix @ matrix.T if matrix.shape[0] == fewer else matrix.T @ matrix
    np.testing.assert_allclose(product, 4 * np.eye(fewer), atol=3e-6)
    np.testing.assert_allclose(jit(lambda key: init(key, shape), device="reference")(KEY), w, atol=1e-6)
    many = max(matrix.shape)
    q, r = np.linalg.qr(random.normal(KEY, (fewer, many)).astype(np.float64).T)
    expected = 2 * q * np.sign(np.diag(r))
    np.testing.assert_allclose(matrix if matrix.shape[0] == many else matrix.T, expected, atol=3e-5)
    assert init(KEY, shape, "float64").dtype == np.float64 and init(KEY, shape, "bfloat16").dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: initializers.orthogonal()(KEY, (3,)), r"orthogonal needs a shape of at least two dims, got \[3\]"),
        (lambda: initializers.he_normal()(KEY, (3,)), r"at least two dims, got \[3\]"),
        (lambda: initializers.variance_scaling(1.0, "fan", "normal"), "mode must be 'fan_in'.*'fan'"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        call()
