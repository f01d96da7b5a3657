"""``x.at[index]``: against NumPy's assignment and JAX's updates, with derivatives and batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy_cases import (
    Arg,
    Case,
    assert_batch_is_loop,
    assert_close,
    assert_derivatives,
    assert_emulated,
    assert_jaxs,
    call_of,
    case,
    chunks,
    draw,
    flat,
    traced,
)

import trainkernel.numpy as tnp
from trainkernel.errors import TraceError

X = (3, 4)
SCALAR = Arg((), "int32", -3, 3)
TWICE = np.array([2, 0, 2])


def update(name: str, index: Any, value: Any, *more: Arg, method: str = "set", **options: Any) -> Case:
    """``x.at[index(...)].method(value)``; arguments after the value go to the index where it is a function."""

    def call(m: Any, x: Any, v: Any, *rest: Any) -> Any:
        where = index(*rest) if callable(index) else index
        return getattr(m.at(x)[where], method)(v, **options)

    return case(f"{method}: {name}", call, X, value, *more)


INDICES = (
    ("an int", 1, (4,), ()),
    ("two ints", (1, -1), (), ()),
    ("a slice", np.s_[1:], (4,), ()),
    ("a box", np.s_[1:3, 1:2], (2, 1), ()),
    ("everything", np.s_[:], (), ()),
    ("nothing", np.s_[2:1], (), ()),
    ("steps", np.s_[::2, 1::2], (2, 2), ()),
    ("backwards", np.s_[::-1, 3:0:-2], (3, 2), ()),
    ("newaxis", np.s_[1, None, 1:], (1, 3), ()),
    ("ellipsis", np.s_[..., 0], (3,), ()),
    ("known rows", np.array([2, 0]), (2, 4), ()),
    ("known columns", np.s_[:, np.array([3, 0])], (3, 2), ()),
    ("known rows twice", TWICE, (3, 4), ()),
    ("known elements", (np.array([0, 2, 0]), np.array([1, -1, 1])), (3,), ()),
    ("a mask", np.array([True, False, True]), (2, 4), ()),
    ("a scalar in a mask", np.eye(3, 4, dtype=bool), (), ()),
    ("a traced scalar", lambda i: i, (4,), (SCALAR,)),
    ("a traced element", lambda i, j: (i, j), (), (SCALAR, SCALAR)),
    ("traced rows", lambda i: i, (5, 4), (Arg((5,), "int32", -3, 3),)),
    ("a traced column out of range", lambda i: np.s_[:, i], (3,), (Arg((), "int32", 4, 9),)),
    ("traced rows out of range", lambda i: i, (3, 4), (Arg((3,), "int32", -9, 9),)),
    ("traced elements", lambda i, j: (i, j), (6,), (Arg((6,), "int32", 0, 3), Arg((6,), "int32", -4, 5))),
    ("traced rows of a slice", lambda i: np.s_[i, 1:3], (4, 2), (Arg((4,), "int32", 0, 3),)),
)
CASES = {
    each.name: each
    for each in (
        *(update(name, index, value, *more) for name, index, value, more in INDICES),
        *(update(name, index, value, *more, method="add") for name, index, value, more in INDICES),
        *(update(name, index, value, *more, method="multiply") for name, index, value, more in INDICES),
        *(update(name, index, value, *more, method="max") for name, index, value, more in INDICES),
        update("a slice", np.s_[1:], (4,), method="min"),
        update("known rows twice", TWICE, (3, 4), method="min"),
        update("known rows twice", TWICE, (3, 4), method="divide"),
        update("traced rows", lambda i: i, (5, 4), Arg((5,), "int32", -3, 3), method="min"),
        update("a promise", lambda i: i, (3, 4), Arg((3,), "int32", 1, 2), method="add", unique_indices=True),
        case("a traced mask", lambda m, x, c: m.at(x)[c].set(7.0), X, Arg(X, "bool")),
        case("a traced mask of rows", lambda m, x, c, v: m.at(x)[c].add(v), X, Arg((3,), "bool"), (4,)),
        case("apply", lambda m, x: m.at(x)[1:].apply(m.exp), X),
    )
}


class Theirs:
    """JAX with ``at`` as a function, and NumPy's functions."""

    def __init__(self, jnp: Any) -> None:
        self.exp = jnp.exp

    @staticmethod
    def at(x: Any) -> Any:
        return x.at


def is_jaxs(name: str) -> bool:
    """Not of masks that JAX refuses, or takes otherwise."""
    return "mask" not in name or not ("traced" in name or "scalar" in name)


def has_jaxs_derivative(name: str) -> bool:
    has_arrays = any(word in name for word in ("rows", "element", "column", "mask"))
    return name != "apply" and not (name.startswith(("max", "min", "multiply", "divide")) and has_arrays)


JAXS_CASES = [replace(each, is_smooth=has_jaxs_derivative(name)) for name, each in CASES.items() if is_jaxs(name)]


@pytest.mark.parametrize("cases", chunks(JAXS_CASES), ids=lambda cases: cases[0].name)
def test_values_and_gradients_are_jaxs(cases: list[Case]) -> None:
    assert_jaxs(cases, tnp, Theirs(pytest.importorskip("jax.numpy")), tnp)


@pytest.mark.parametrize("name", CASES)
def test_traced_is_eager(name: str) -> None:
    each = CASES[name]
    arrays = draw(each.args, name)
    before = [x.copy() for x in arrays]
    assert_close(traced(call_of(each, tnp), arrays), each.call(tnp, *arrays), 1e-7)
    assert_close(arrays, before, 0)


@pytest.mark.parametrize("cases", chunks(CASES.values()), ids=lambda cases: cases[0].name)
def test_the_emitted_source_computes_it(cases: list[Case]) -> None:
    assert_emulated(cases, tnp, tnp)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_finite_differences(name: str) -> None:
    each = CASES[name]
    assert_derivatives(call_of(each, tnp), draw(each.args, name, "float64"), tnp)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_a_loop(name: str) -> None:
    each = CASES[name]
    assert_batch_is_loop(call_of(each, tnp), [draw(each.args, f"{name} {row}") for row in range(3)], 1e-6)


@pytest.mark.parametrize(
    ("name", "index", "value", "more"), [each for each in INDICES if "out of range" not in each[0]]
)
def test_set_is_numpys_assignment(name: str, index: Any, value: tuple[int, ...], more: tuple[Arg, ...]) -> None:
    x, v, *rest = draw((Arg(X), Arg(value), *more), name)
    where = index(*rest) if callable(index) else index
    wanted = x.copy()
    wanted[where] = v
    np.testing.assert_array_equal(tnp.at(x)[where].set(v), wanted)
    np.add.at(wanted := x.copy(), where, v)
    np.testing.assert_allclose(tnp.at(x)[where].add(v), wanted, rtol=1e-6)


def test_property_get_and_dtype() -> None:
    def run(x: Any) -> Any:
        return x.at[1].get(), x.at[0].set(2.7), x.at[0].subtract(1)

    row, replaced, less = traced(run, [np.arange(6, dtype=np.int32).reshape(2, 3)])
    np.testing.assert_array_equal(row, [3, 4, 5])
    np.testing.assert_array_equal(replaced, [[2, 2, 2], [3, 4, 5]])
    assert replaced.dtype == np.int32
    np.testing.assert_array_equal(less[0], [-1, 0, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x[4], "index 4 is out of range for dim 0 of shape"),
        (lambda x: x[0, 0, 0], "3 indices for an array of shape"),
        (lambda x: x[..., ...], "more than one ellipsis"),
        (lambda x: x[0.5], "an index must be ints, slices or bools"),
        (lambda x: x[x > 0], "is traced, and how many elements it picks"),
        (lambda x: x[x.astype("int32")[0, 0] :], "bounds of slice.*dynamic_slice"),
        (lambda x: x[np.zeros(3, int), np.zeros(2, int)], r"\[3\] and \[2\] do not broadcast"),
        (lambda x: x[np.zeros(2, bool)], r"a mask of shape \[2\] does not fit shape \[3, 4\]"),
        (
            lambda x: x.at[0].set(np.zeros(3, np.float32)),
            r"shape \[3\] does not broadcast to the elements of shape \[4\]",
        ),
        (lambda x: x.at[x > 0].set(x), "is traced, so it takes one value"),
        (lambda x: x.at[0].set(0, mode="clip"), "mode 'clip' is not supported"),
        (lambda x: x.at[0].set(0, extra=1), "unknown options extra"),
        (lambda x: x.__setitem__(0, 1), "cannot be changed in place"),
        (lambda x: tnp.take(x, x), "indices must be integers"),
        (lambda x: tnp.take_along_axis(x, np.zeros(3, np.int32), 1), "need the rank of shape"),
        (lambda x: tnp.take_along_axis(x, np.zeros((2, 1), np.int32), 1), "do not broadcast to shape"),
    ],
)
def test_errors_name_shapes_and_the_line(call: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        traced(call, [np.zeros((3, 4), np.float32)])
    assert "test_numpy_updates.py" in str(caught.value)


def test_a_lone_index_costs_one_window() -> None:
    """No gather, and no comparison of pairs."""
    import trainkernel as tk

    def run(x: Any, i: Any) -> Any:
        return x.at[i].set(x[i] + 1)

    program = tk.jit(run).lower(np.zeros((3, 4), np.float32), np.int32(1)).program
    ops = {operation.op for operation in program.operations}
    assert "dynamic_update" in ops and "take" not in ops and "scatter_add" not in ops
    assert flat(traced(run, [np.zeros((3, 4), np.float32), np.asarray(1, np.int32)]))[0][1].tolist() == [1.0] * 4
