"""``trainkernel.numpy`` against NumPy and JAX: values and dtypes eagerly and traced, derivatives, batches."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from numpy_cases import (
    Case,
    assert_batch_is_loop,
    assert_close,
    assert_derivatives,
    assert_emulated,
    assert_jaxs,
    call_of,
    chunks,
    draw,
    traced,
)
from numpy_table import CASES

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel.dtypes import DTYPES

SMOOTH = {name: each for name, each in CASES.items() if each.is_smooth}


@pytest.mark.parametrize("name", [name for name, each in CASES.items() if each.oracle != "jax"])
def test_values_are_numpys(name: str) -> None:
    each = CASES[name]
    arrays = draw(each.args, name)
    with np.errstate(all="ignore"):
        wanted = each.call(np, *arrays)
    assert_close(each.call(tnp, *arrays), wanted, each.atol, check_dtype=False)


@pytest.mark.parametrize(
    "cases", chunks(each for each in CASES.values() if each.oracle != "numpy"), ids=lambda cases: cases[0].name
)
def test_values_dtypes_and_gradients_are_jaxs(cases: list[Case]) -> None:
    assert_jaxs(cases, tnp, pytest.importorskip("jax.numpy"), tnp)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "uint8", "bool"])
def test_dtypes_are_jaxs(dtype: str) -> None:
    """All cases with arrays of another dtype, where JAX takes them; nothing is computed."""
    jax = pytest.importorskip("jax")
    for name, each in CASES.items():
        if each.oracle == "numpy" or not each.args:
            continue
        kinds = [dtype if arg.dtype == "float32" else arg.dtype for arg in each.args]
        arrays = [np.ones(arg.shape, DTYPES[kind].numpy) for arg, kind in zip(each.args, kinds, strict=True)]
        try:
            with warnings.catch_warnings(action="ignore"):
                wanted = jax.eval_shape(call_of(each, jax.numpy), *arrays)
        except (TypeError, ValueError):
            continue
        specs = tk.jit(call_of(each, tnp)).lower(*arrays).program.outputs
        results = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
        assert [(spec.shape, spec.dtype) for spec in specs] == [(x.shape, str(x.dtype)) for x in results], name


@pytest.mark.parametrize("name", CASES)
def test_traced_is_eager(name: str) -> None:
    each = CASES[name]
    arrays = draw(each.args, name)
    assert_close(traced(call_of(each, tnp), arrays), each.call(tnp, *arrays), 1e-7)


@pytest.mark.parametrize("cases", chunks(CASES.values()), ids=lambda cases: cases[0].name)
def test_the_emitted_source_computes_it(cases: list[Case]) -> None:
    assert_emulated(cases, tnp, tnp)


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_finite_differences(name: str) -> None:
    """In float64: the gradient along a direction, and its derivative along another."""
    each = SMOOTH[name]
    arrays = draw(each.args, name, "float64")
    assert_derivatives(call_of(each, tnp), arrays, tnp)


@pytest.mark.parametrize("name", [name for name, each in CASES.items() if each.args])
def test_a_batch_is_a_loop(name: str) -> None:
    each = CASES[name]
    assert_batch_is_loop(call_of(each, tnp), [draw(each.args, f"{name} {row}") for row in range(3)], 1e-6)


@pytest.mark.parametrize("times", [lambda w, x: x @ w, lambda w, x: w @ x, lambda w, x: tnp.vecmat(x, w)])
def test_vectors_times_a_matrix_that_they_share_are_one_matrix_product(times: object) -> None:
    w, vectors = np.ones((4, 4), np.float32), np.ones((9, 4), np.float32)
    step = tk.jit(tk.vmap(times, in_axes=(None, 0))).lower(w, vectors)
    assert [item.op for item in step.program.operations] == ["mm"]
