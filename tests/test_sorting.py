"""What the table of NumPy's calls does not say of sorting: dtypes, order of ties and zeros, stages, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import lax
from trainkernel.codegen import generate
from trainkernel.numpy import sorting

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.bool, np.uint8, np.int32, np.uint32, np.int64)


def drawn(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Numbers that tie, the extremes of the dtype and, of floats, zeros of both signs, infinities and NaN."""
    rng = np.random.default_rng(5)
    values = np.asarray(rng.integers(0, 5, shape)).astype(dtype)
    specials = np.array([], dtype)
    if np.issubdtype(dtype, np.integer):
        specials = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    elif dtype is not np.bool:
        specials = np.array([np.nan, -0.0, np.inf, -np.inf, 0.0, np.nan], np.float32).astype(dtype)
    values.reshape(-1)[: 2 * len(specials) : 2] = specials
    return values


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_a_traced_sort_finds_the_order_that_numpy_finds(device: str) -> None:
    arrays = [drawn(dtype, (3, 20)) for dtype in DTYPES]

    def everything(arrays: Any) -> Any:
        return [(tnp.argsort(x), tnp.argsort(x, descending=True), tnp.sort(x), lax.top_k(x, 5)) for x in arrays]

    for x, got in zip(arrays, tk.jit(everything, device=device)(arrays), strict=True):
        wide = x.astype(np.float64) if x.dtype.kind in "fV" else x
        np.testing.assert_array_equal(got[0], np.argsort(wide, axis=-1, kind="stable"))
        for result, wanted in zip(got, everything([x])[0], strict=True):
            for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (result, wanted)), strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one.astype(np.float64), other.astype(np.float64))
        signs = [np.signbit(each.astype(np.float64)) for each in (got[2], np.take_along_axis(x, got[0], -1))]
        np.testing.assert_array_equal(*signs)


def test_all_pairs_are_compared_and_never_stored() -> None:
    x = np.zeros((30, 500), np.float32)
    for function in (tnp.sort, tnp.argsort, lambda x: lax.top_k(x, 3), tk.grad(lambda x: tnp.sum(tnp.sort(x) ** 3))):
        for values in (x, x[0]):
            kernel = generate(tk.jit(function, device="reference").lower(values).program)
            assert kernel.schedule.num_stages <= 4
            assert kernel.plan.workspace_bytes < 30 * values.size
    for function in (tnp.argsort, tk.vmap(tnp.argsort), tk.vmap(lambda x: tnp.lexsort((-x, x)))):
        integers = tk.jit(function, device="reference").lower(x.astype(np.int32)).program
        assert generate(integers).plan.workspace_bytes < 16 * x.size


def test_the_derivative_of_a_sort_is_a_gather() -> None:
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    weights = np.arange(6, dtype=np.float32)
    for function in (tnp.sort, lambda x: lax.top_k(x, 6)[0]):
        gradient = tk.jit(tk.grad(lambda x, f=function: tnp.sum(f(x) * weights)), device="reference")
        assert "scatter_add" not in str(gradient.lower(x).program)
    order = np.argsort(x, axis=-1)
    np.testing.assert_array_equal(tk.grad(lambda x: tnp.sum(tnp.sort(x) * weights))(x), np.argsort(order, -1))


def test_derivatives_of_all_kinds_go_through_a_sort() -> None:
    x = np.random.default_rng(1).standard_normal(5)
    order, rank = np.argsort(x), np.argsort(np.argsort(x))
    tangent = np.arange(5.0)
    value, slope = tk.jvp(lambda x: tnp.sort(x) ** 2, (x,), (tangent,))
    np.testing.assert_allclose(value, x[order] ** 2)
    np.testing.assert_allclose(slope, 2 * x[order] * tangent[order])
    second = tk.hessian(lambda x: tnp.sum(tnp.sort(x) ** 3 * tangent))(x)
    np.testing.assert_allclose(second, np.diag(6 * x * rank))
    rows = np.stack([x, -x])
    batched = tk.vmap(tk.grad(lambda x: tnp.sum(lax.top_k(x, 2)[0] * np.array([5.0, 7.0]))))(rows)
    wanted = [np.where(r == 4, 5.0, np.where(r == 3, 7.0, 0.0)) for r in (rank, 4 - rank)]
    np.testing.assert_array_equal(batched, wanted)


def test_ties_have_each_a_gradient_of_their_own() -> None:
    gradient = tk.grad(lambda x: tnp.sum(tnp.sort(x) * np.float32([1, 2, 4])))(np.float32([3, 3, 1]))
    np.testing.assert_array_equal(gradient, [2, 4, 1])


def test_a_sort_inside_of_a_loop() -> None:
    def step(carry: Any, row: Any) -> Any:
        carry = tnp.sort(carry + row)
        return carry, tnp.median(carry)

    rows = np.random.default_rng(2).standard_normal((4, 5)).astype(np.float32)
    start = np.zeros(5, np.float32)
    function = tk.jit(lambda start, rows: lax.scan(step, start, rows), device="emulator")
    carry, medians = function(start, rows)
    for row, found in zip(rows, medians, strict=True):
        start = np.sort(start + row)
        assert found == start[2]
    np.testing.assert_array_equal(carry, start)


def test_arrays_of_known_values_need_no_size() -> None:
    x = np.int32([[3, 1], [3, 0]])
    values, first, inverse, counts = tnp.unique(x, True, True, True)
    np.testing.assert_array_equal(values, [0, 1, 3])
    np.testing.assert_array_equal(first, [3, 1, 0])
    np.testing.assert_array_equal(values[inverse], x)
    np.testing.assert_array_equal(counts, [1, 1, 2])
    np.testing.assert_array_equal(tnp.bincount(x[0], minlength=5), [0, 1, 0, 1, 0])
    assert tnp.bincount(np.int32([])).shape == (0,)
    np.testing.assert_array_equal(tnp.unique(np.float32([]), size=2, fill_value=1), [1, 1])
    assert [each.shape for each in tnp.unique(np.zeros((0, 2)), True, True, True)] == [(0,), (0,), (0, 2), (0,)]


def test_quantiles_of_infinities_are_infinite() -> None:
    x = np.float32([1, np.inf, 2])
    assert tnp.quantile(x, 1.0) == np.inf and tnp.quantile(x, 0.5) == 2
    assert np.isnan(tnp.median(np.zeros(0, np.float32)))
    half = tnp.quantile(np.float16([1, 2, 4]), 0.75)
    assert half.dtype == np.float16 and half == 3


def test_arrays_have_the_methods() -> None:
    x = np.float32([[2, 1], [0, 3]])
    got = tk.jit(lambda x: (x.sort(), x.argsort(axis=0), x.sort(descending=True)), device="reference")(x)
    for result, wanted in zip(got, (np.sort(x), np.argsort(x, 0), np.sort(x)[:, ::-1]), strict=True):
        np.testing.assert_array_equal(result, wanted)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "long": (lambda x: tnp.sort(tnp.zeros(65537)), "rows of 65537 elements are too long to sort"),
    "axis": (lambda x: tnp.sort(x, axis=2), "sort: axis 2 is out of range"),
    "scalar": (lambda x: tnp.sort(x[0, 0]), "sort: axis -1 is out of range"),
    "kind": (lambda x: tnp.argsort(x, kind="heapsort"), "takes neither kind nor order"),
    "k": (lambda x: lax.top_k(x, 5), "top_k: 5 of 4 elements"),
    "kth": (lambda x: tnp.partition(x, 4), "place 4 is out of range for 4 elements"),
    "keys": (lambda x: tnp.lexsort((x, x[0])), "needs keys of one shape"),
    "num_keys": (lambda x: lax.sort((x, x), num_keys=3), "3 keys among"),
    "size": (lambda x: tnp.unique(x), "needs a size"),
    "slices": (lambda x: tnp.unique(x, axis=0, size=1), "axis must be None"),
    "length": (lambda x: tnp.bincount(x[0].astype("int32")), "needs its length"),
    "floats": (lambda x: tnp.bincount(x[0], length=2), "needs integers of rank 1"),
    "method": (lambda x: tnp.quantile(x, 0.5, method="inverted_cdf"), "the method of a quantile is one of"),
    "weights": (lambda x: tnp.quantile(x, 0.5, weights=x), "neither overwrite_input nor weights"),
    "q": (lambda x: tnp.quantile(x, x), "q has at most one dim"),
    "side": (lambda x: tnp.searchsorted(x[0], x, "middle"), "is 'left' or 'right'"),
    "row": (lambda x: tnp.searchsorted(x, x), "needs one row of ordered numbers"),
    "points": (lambda x: tnp.interp(x, x[0], x[0, :2]), "4 places with 2 values"),
    "end": (lambda x: tnp.interp(x, x[0], x[0], left="fill"), "left is a number or 'extrapolate'"),
    "cases": (lambda x: lax.select_n(x > 0, x, x, x), "3 cases by bool[3,4]"),
    "bins": (lambda x: tnp.histogram(x, bins="auto"), "bins are a number of them or their edges"),
    "vectors": (lambda x: tnp.cross(x, x), "needs vectors of 2 or 3 elements"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_where(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(tk.TraceError) as caught:
        tk.jit(call, device="reference").lower(np.zeros((3, 4), np.float32))
    assert message in str(caught.value)
    assert "test_sorting.py" in str(caught.value)


def test_rows_of_known_values_may_be_longer() -> None:
    x = np.random.default_rng(0).standard_normal(sorting.LONGEST_SORTED + 1)
    np.testing.assert_array_equal(tnp.sort(x), np.sort(x))
