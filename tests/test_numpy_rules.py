"""Rules of ``trainkernel.numpy`` that no table of calls says: dtypes, weak numbers, methods, errors."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from numpy_cases import traced

import trainkernel.numpy as tnp
from trainkernel import losses
from trainkernel.errors import TraceError


def test_arrays_keep_their_dtype() -> None:
    for dtype in ("float64", "int64"):
        x = np.arange(6, dtype=dtype).reshape(2, 3)
        for result in (
            x + 1,
            tnp.sum(x),
            tnp.maximum(x, 2),
            tnp.matmul(x, x.T),
            tnp.where(x > 1, x, 0),
            tnp.clip(x, 1, 2),
        ):
            assert result.dtype == dtype
    assert tnp.exp(np.arange(3, dtype="int64")).dtype == np.float32


def test_python_numbers_are_weak_where_they_are_traced() -> None:
    low = np.ones(3, np.float16)

    def run(x: Any) -> Any:
        return x * tnp.sqrt(2), x + tnp.where(x > 0, 1.0, 0.0), x * tnp.exp(0.5), x + tnp.maximum(1, 2), tnp.sqrt(2)

    assert [result.dtype for result in traced(run, [low])] == [np.float16] * 4 + [np.float32]


def test_scalars_and_lists_are_arrays() -> None:
    assert tnp.exp(1).dtype == np.float32 and tnp.exp(1).shape == ()
    assert tnp.sum([1, 2, 3]).dtype == np.int32
    assert tnp.mean([[1, 2], [3, 4]]) == 2.5
    assert tnp.add(1, 2).dtype == np.int32 and tnp.add(1, 2.5).dtype == np.float32
    assert tnp.square(np.float64(3.0)).dtype == np.float64
    np.testing.assert_array_equal(tnp.concatenate([[1, 2], [3]]), [1, 2, 3])
    np.testing.assert_array_equal(tnp.where([True, False], [1, 2], 0), [1, 0])


def test_a_list_keeps_its_digits_in_the_dtype_that_is_asked_for() -> None:
    assert tnp.array([2**40, -1], dtype="int64").tolist() == [2**40, -1]
    assert tnp.asarray([[2**40]], np.float32).tolist() == [[2.0**40]]
    assert tnp.array([0.1], np.float64)[0] == 0.1
    assert tnp.array([2**32 - 1], "uint32")[0] == 2**32 - 1
    for dtype, number in ((None, 2**31), ("uint8", -1), ("int32", -(2**31) - 1)):
        with pytest.raises(TraceError, match=f"a list of numbers holds {number}, which is not a number of"):
            tnp.array([0, number], dtype)
    with pytest.raises(TraceError, match="holds 2147483648, which is not a number of int32"):
        tnp.sum([2**31, 1])


def test_no_array_is_written_in_place() -> None:
    x = np.ones(3, np.float32)
    functions = {name: getattr(tnp, name) for name in tnp.__all__}
    parameters = {name: inspect.signature(f).parameters for name, f in functions.items() if inspect.isfunction(f)}
    with_out = [name for name, found in parameters.items() if "out" in found]
    assert {"sum", "take", "einsum", "outer", "stack", "cumsum"} < set(with_out)
    for name in with_out:
        required = [
            each for each in parameters[name].values() if each.default is each.empty and each.kind < each.KEYWORD_ONLY
        ]
        args = ("i->i", x) if name == "einsum" else (x,) * len(required)
        with pytest.raises(TraceError, match="out= is not supported"):
            functions[name](*args, out=x)
    with pytest.raises(TraceError, match="out= is not supported"):
        traced(lambda m: np.mean(m, out=x), [x])


def test_methods_and_properties_are_numpys() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)

    def run(m: Any) -> Any:
        return [
            m.T,
            m.transpose(),
            m.reshape(3, 2),
            m.reshape(-1),
            m.ravel(),
            m.flatten(),
            m.sum(0),
            m.mean(axis=1),
            m.max(),
            m.min(0),
            m.prod(1),
            m.var(),
            m.std(0),
            m.argmax(1),
            m.argmin(),
            m.any(),
            m.all(1),
            m.clip(1, 3),
            m.cumsum(1),
            m.repeat(2),
            m.round(),
            m.squeeze(),
            m.swapaxes(0, 1),
            m.take([0, 1], axis=1),
            m.astype("int32"),
            m.dot(m.T),
            m.diagonal(),
            m.trace(),
            m.copy(),
            m.itemsize + m * 0,
            m.nbytes + m * 0,
            abs(-m),
            m[0],
            -m,
            m**2,
            m // 2,
            m % 2,
            divmod(m, 2)[1],
            divmod(7, m + 1)[0],
        ]

    for got, wanted in zip(traced(run, [x]), run(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_every_name_is_there_and_documented() -> None:
    assert len(set(tnp.__all__)) == len(tnp.__all__)
    for name in tnp.__all__:
        value = getattr(tnp, name)
        assert not callable(value) or value.__doc__, name


def test_dtype_questions() -> None:
    assert tnp.issubdtype("bfloat16", tnp.floating) and not tnp.issubdtype("int32", tnp.floating)
    assert tnp.result_type(np.float16(1), 2.0) == np.float16 and tnp.promote_types("float16", "bfloat16") == np.float32
    assert tnp.finfo("bfloat16").bits == 16 and tnp.iinfo(tnp.uint8).max == 255
    assert tnp.zeros(2, tnp.bfloat16).dtype == tnp.bfloat16


X34, X3 = np.zeros((3, 4), np.float32), np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: x + y, r"\[3, 4\] and \[3\] do not broadcast"),
        (lambda x, y: (x > 0) - (x < 0), "subtract of bools: use logical_xor"),
        (lambda x, y: -(x > 0), "negative of bools: use logical_not"),
        (lambda x, y: losses.softmax_cross_entropy(x, tnp.arange(3)), "softmax_cross_entropy_with_integer_labels"),
        (lambda x, y: x @ y, r"matmul: shapes \[3, 4\] and \[3\]"),
        (lambda x, y: tnp.einsum("ij,i->k", x, y), "'k' of the result"),
        (lambda x, y: tnp.einsum("ij,j->i", x, y), r"'j' has sizes 4 and 3 in shapes \[3, 4\] and \[3\]"),
        (lambda x, y: tnp.einsum("ijk,j->i", x, y), "'ijk' does not fit an operand of rank 2"),
        (lambda x, y: x.reshape(5, -1), r"cannot arrange shape \[3, 4\] \(12 elements\) as \[5, -1\]"),
        (lambda x, y: tnp.concatenate([x, y]), r"concatenate: shapes \[3, 4\], \[3\] differ"),
        (lambda x, y: tnp.stack([x, y]), r"stack: shapes \[3, 4\] and \[3\] differ"),
        (lambda x, y: tnp.where(x > 0, x, y), r"\[3, 4\] and \[3\] do not broadcast"),
        (lambda x, y: tnp.broadcast_to(x, (2, 4)), r"shape \[3, 4\] does not broadcast to \[2, 4\]"),
        (lambda x, y: x.sum(axis=2), "sum: axis 2 is out of range for an array of rank 2"),
        (lambda x, y: x.sum(axis=(0, -2)), "name an axis twice"),
        (lambda x, y: tnp.squeeze(x, 0), r"axis 0 of shape \[3, 4\] has size 3"),
        (lambda x, y: tnp.split(x, 3, axis=1), "does not divide into 3 parts"),
        (lambda x, y: tnp.max(x, where=x > 0), "needs an initial value"),
        (lambda x, y: tnp.max(x[:0]), "max of no elements"),
        (lambda x, y: tnp.arange(y[0]), "must be known when the function is traced"),
        (lambda x, y: tnp.where(x > 0), "shape that depends on values"),
        (lambda x, y: tnp.linalg.norm(x, ord=2), "singular values"),
        (lambda x, y: tnp.pad(x, 1, mode="mean"), "mode must be"),
        (lambda x, y: tnp.reshape(x, (12,), order="F"), "only order 'C'"),
        (lambda x, y: x.item(), "has no value yet"),
        (lambda x, y: tnp.convolve(x, y), r"convolve needs two rows with elements, got f32\[3, ?4\] and f32\[3\]"),
        (lambda x, y: tnp.correlate(y, y, "all"), "mode of correlate is 'full', 'same' or 'valid', got 'all'"),
        (lambda x, y: tnp.gradient(y[:1]), "gradient needs two elements along axis 0"),
        (lambda x, y: tnp.gradient(x, y, axis=1), "along an axis of 4 elements"),
        (lambda x, y: tnp.gradient(x, 1.0, 2.0, 3.0), "3 distances for 2 axes"),
        (lambda x, y: tnp.gradient(x, edge_order=2), "edge_order must be None, got 2"),
        (lambda x, y: tnp.block([[x], x]), "nested to different depths"),
        (lambda x, y: tnp.block([]), "block: a list is empty"),
        (lambda x, y: tnp.delete(x, y.astype("int32")), "known when it is traced"),
        (lambda x, y: tnp.delete(x, 5, axis=0), "delete: index 5 is out of bounds"),
        (lambda x, y: tnp.mgrid[0:], "mgrid needs slices with an end"),
        (lambda x, y: tnp.piecewise(y, [y > 0], [1, 2, 3]), "3 functions for 1 conditions"),
        (lambda x, y: tnp.vectorize(tnp.dot, signature="(n),(n)->()")(y), "1 arguments for the signature"),
        (lambda x, y: tnp.vectorize(tnp.dot, signature="n,n")(x, y), "is no signature such as"),
        (lambda x, y: tnp.vectorize(tnp.add)(x, y), r"\(3, 4\), \(3,\) do not broadcast"),
        (lambda x, y: tnp.vectorize(tnp.dot, signature="(n,m),(m)->(n)")(y, y), r"shapes \[3\], \[3\] for"),
        (lambda x, y: tnp.max([x[0], y]), "a list of traced arrays: make one array of them"),
        (lambda x, y: tnp.full(y.astype("int32")[0], 0), "must be known when the function is traced"),
    ],
)
def test_errors_name_shapes_and_the_line(call: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        traced(call, [X34, X3])
    assert "test_numpy_rules.py" in str(caught.value)
