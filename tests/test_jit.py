"""``jit``: signatures, donation, trees, numbers by value, and errors that name the user's line."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, make_dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import trainkernel as tk
from trainkernel import primitives as b

X = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
ROW = np.ones(4, np.float32)


@dataclass(frozen=True)
class State:
    w: Any
    moments: Any


def reference(fun: Callable[..., Any], **options: Any) -> Any:
    return tk.jit(fun, device="reference", **options)


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_operators_broadcast_and_mix_with_numpy(device: str) -> None:
    def f(x: Any, row: Any) -> Any:
        return (2 * x - row) / (row + 1.0) + np.float32(3) * x**2 - (-x) * ROW, x < row, 1 - x

    for got, want in zip(tk.jit(f, device=device)(X, ROW), f(X, ROW), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.dtype == want.dtype


def test_trees_of_every_kind_go_in_and_come_out() -> None:
    def f(tree: Any, *rest: Any, scale: Any) -> Any:
        state = tree["state"]
        return {"state": State(state.w * scale, (state.moments[0] + 1, None)), "list": [rest[0], ()]}

    tree = {"state": State(X, (ROW, None)), "ignored": None}
    got = reference(f)(tree, ROW, scale=2.0)
    assert isinstance(got["state"], State) and got["state"].moments[1] is None and got["list"][1] == ()
    np.testing.assert_array_equal(got["state"].w, X * 2)
    np.testing.assert_array_equal(got["list"][0], ROW)


def test_threads_may_meet_a_dataclass_at_once() -> None:
    def take_apart(cls: Any, barrier: threading.Barrier) -> int:
        barrier.wait()
        return len(tk.tree.leaves(cls(X)))

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            cls, barrier = make_dataclass("Fresh", ["x"]), threading.Barrier(4)
            found = [pool.submit(take_apart, cls, barrier) for _ in range(4)]
            assert [each.result() for each in found] == [1] * 4


def test_one_trace_for_each_signature() -> None:
    traced = []

    def f(x: Any, rate: float, name: str) -> Any:
        traced.append(name)
        return x * rate

    jitted = reference(f, static_argnames="name")
    for rate in (0.5, 2.0):
        np.testing.assert_array_equal(jitted(X, rate, "a"), X * np.float32(rate))
    jitted(X, 1, "a")  # an int is another dtype
    jitted(X, 1.0, "b")
    jitted(X[:2], 1.0, "b")
    jitted(np.asfortranarray(X), 1.0, name="b")
    jitted(X.astype(np.float64), 1.0, "b")
    assert traced == ["a", "a", "b", "b", "b", "b"]


def test_donated_arrays_are_updated_in_place_and_returned() -> None:
    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] + x, "n": state["n"] + 1, "kept": state["kept"]}, b.sum(state["w"])

    state = {"w": X.copy(), "n": np.zeros((), np.int32), "kept": ROW.copy()}
    jitted = reference(step, donate_argnums=0)
    new, total = jitted(state, X)
    assert all(new[name] is state[name] for name in state)
    np.testing.assert_array_equal(state["w"], X + X)
    assert float(total) == pytest.approx(float(X.sum())) and int(state["n"]) == 1
    by_name = reference(step, donate_argnames=("state",))(state, X)[0]
    assert by_name["w"] is state["w"]


def test_donated_arrays_may_change_places() -> None:
    def swap(pair: Any) -> Any:
        return pair[1], pair[0] * 2

    a, c = X.copy(), X + 1
    for device in ("reference", "emulator"):
        first, second = tk.jit(swap, donate_argnums=0, device=device)((a.copy(), c.copy()))
        np.testing.assert_array_equal(first, c)
        np.testing.assert_array_equal(second, a * 2)


def test_in_place_results_are_not_an_option_of_jit() -> None:
    with pytest.raises(tk.OptionError, match="use donate_argnums") as caught:
        reference(b.exp, inplace_outputs={0: 0})
    assert "test_jit.py" in str(caught.value)


def test_a_donated_array_that_no_result_fits_is_told() -> None:
    jitted = reference(lambda w, rest: w * np.sqrt(np.float64(2)), donate_argnums=(0, 1))
    with pytest.warns(tk.DonationWarning) as told:
        jitted(X.copy(), ROW.copy())
    messages = [str(warning.message) for warning in told]
    assert (
        "donated argument w is not updated in place" in messages[0]
        and "results of that shape are float64" in messages[0]
    )
    assert "donated argument rest" in messages[1] and "test_jit.py" in messages[1]


def test_a_donated_array_given_twice_is_refused() -> None:
    x = X.copy()
    with pytest.raises(tk.ArgumentError, match="share memory"):
        reference(lambda x, y: x + y, donate_argnums=0)(x, x)


def test_names_may_be_those_of_keywords_without_a_parameter() -> None:
    step = reference(lambda x, **options: x * len(options["mode"]), static_argnames="mode")
    np.testing.assert_array_equal(step(X, mode="ab"), X * 2)


def test_a_donated_view_of_which_nothing_is_stored_is_taken() -> None:
    with pytest.warns(tk.DonationWarning):
        total = reference(b.sum, donate_argnums=0)(X.T)
    np.testing.assert_allclose(total, X.sum(), rtol=1e-6)


def test_views_need_no_operations() -> None:
    def f(x: Any) -> Any:
        y = b.reshape(b.transpose(x, (1, 0)), (4, 3, 1))
        return b.mul(b.slice(y, (1, 0, 0), (4, 3, 1), (2, 1, 1)), 2.0)

    step = reference(f).lower(X)
    assert len(step.program.operations) == 1
    np.testing.assert_array_equal(reference(f)(X), (X.T.reshape(4, 3, 1) * 2)[1:4:2])


def test_constants_become_numbers_or_inputs_of_their_own() -> None:
    zeros, table = np.zeros((3, 4), np.float32), np.arange(4, dtype=np.float32)
    step = reference(lambda x: x + zeros * 2.0 + table).lower(X)
    assert [spec.buffer for spec in step.program.inputs] == ["x", "constant"]
    assert len(step.program.operations) == 2 and step.captured[0] is not None


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_captured_arrays_are_as_they_were_when_traced(device: str) -> None:
    zeros, nothing, ramp = np.array([0.0, -0.0], np.float32), np.array(np.nan, np.float32), np.ones(2, np.float32)
    ramp[1] = 2
    jitted = tk.jit(lambda x: (x / zeros, x + nothing, x + ramp), device=device)
    for _ in range(2):
        signs, nan, moved = jitted(np.ones(2, np.float32))
        np.testing.assert_array_equal(signs, [np.inf, -np.inf])
        assert np.isnan(nan).all()
        np.testing.assert_array_equal(moved, [2, 3])
        ramp[:] = 7


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_bools_that_are_one_number_are_stored(device: str) -> None:
    yes = np.ones(3, bool)
    carry, kept = tk.jit(lambda x: tk.scan(lambda c, u: (c ^ (u > 1), c), yes, x), device=device)(np.arange(3))
    np.testing.assert_array_equal(carry, ~yes)
    np.testing.assert_array_equal(kept[:, 0], [True, True, True])
    assert tk.jit(lambda: (yes, True, np.array(False)), device=device)()[0].dtype == bool


def test_static_arguments_that_are_equal_and_not_the_same_trace_again() -> None:
    jitted = reference(lambda x, n: x / n[0], static_argnums=1)
    one = np.ones(1, np.float32)
    assert [float(jitted(one, (zero,))[0]) for zero in (0.0, -0.0)] == [np.inf, -np.inf]
    assert [str(jitted(np.ones(1, np.int32), (n,)).dtype) for n in (1, 1.0)] == ["float32", "float32"]
    kinds = reference(lambda x, n: x * len(type(n).__name__), static_argnums=1)
    assert [float(kinds(one, n)[0]) for n in (1, 1.0, True)] == [3, 5, 4]


def test_copies_of_a_traced_array_are_the_array() -> None:
    def f(tree: Any) -> Any:
        twin = copy.deepcopy(tree)
        return copy.copy(twin["x"]) + tree["x"]

    np.testing.assert_array_equal(reference(f)({"x": X}), X + X)


def test_equal_work_is_done_once() -> None:
    program = reference(lambda x: b.exp(x) + b.exp(x)).lower(X).program
    assert str(program).count(" = exp ") == 1


def test_dtypes_follow_the_arrays_beside_numbers() -> None:
    half = X.astype(ml_dtypes.bfloat16)
    got = reference(lambda x, rate: (x * 2.0, x * rate, x * (rate * 0.5), rate + 1))(half, 0.5)
    assert [value.dtype.name for value in got] == ["bfloat16", "bfloat16", "bfloat16", "float32"]
    ints = np.arange(4, dtype=np.int32)
    got = reference(lambda i, u: (i + 1, i * 0.5, i + u, i / 2, i + True))(ints, ints.astype(np.uint32))
    assert [value.dtype.name for value in got] == ["int32", "float32", "int64", "float32", "int32"]


def test_jit_inside_of_jit_is_one_program() -> None:
    inner = reference(lambda x: x * 2.0)
    program = reference(lambda x: inner(x) + 1.0).lower(X).program
    assert len(program.operations) == 2


def test_methods_are_functions_too() -> None:
    class Model:
        scale = 3.0

        @tk.jit(device="reference", static_argnums=0)
        def apply(self, x: Any) -> Any:
            return x * self.scale

    np.testing.assert_array_equal(Model().apply(X), X * 3)


def test_negative_positions_count_from_the_last_argument() -> None:
    w = X.copy()
    got = reference(lambda x, w: x + w, donate_argnums=-1)(X, w)
    assert got is w
    np.testing.assert_array_equal(w, 2 * X)
    assert reference(lambda x, name, *, scale: x, static_argnums=-1)(X, "name", scale=1.0).shape == X.shape
    with pytest.raises(tk.TraceError, match="names argument -3; the function takes 2"):
        reference(lambda x, w: x, static_argnums=-3)


def test_a_description_stands_for_an_array_where_none_is_read() -> None:
    jitted = reference(lambda state, x: (state["w"] + x, state["n"] + 1), donate_argnums=0)
    state = {"w": tk.ShapeDtypeStruct((3, 4), np.float32), "n": tk.ShapeDtypeStruct((), "int32")}
    described = jitted.lower(state, tk.ShapeDtypeStruct((4,), "float32"))
    assert described == jitted.lower({"w": X, "n": np.zeros((), np.int32)}, ROW)
    with pytest.raises(tk.TraceError, match=r"argument state\['n'\] is ShapeDtypeStruct"):
        jitted(state, ROW)


def test_the_kernel_can_be_looked_at() -> None:
    jitted = reference(lambda x: b.exp(x))
    kernel = jitted.kernel(X)
    assert kernel.program == jitted.lower(X).program and "expf" in kernel.source


LEAKED: list[Any] = []


def leak(x: Any) -> Any:
    LEAKED.append(x * 2.0)
    return x


def use_leaked() -> Any:
    reference(leak)(X)
    return reference(lambda x: x + LEAKED[-1])(X)


def returns_leaked() -> Any:
    reference(leak)(X)
    return reference(lambda x: LEAKED[-1])(X)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "branch": (lambda: reference(lambda x: x if b.sum(x) > 0 else -x)(X), "its truth cannot be had"),
    "float": (lambda: reference(lambda x: float(b.sum(x)))(X), "a float of it cannot be had"),
    "numpy": (lambda: reference(lambda x: np.add.reduce(x))(X), "use trainkernel.numpy instead of numpy here"),
    "in place": (lambda: reference(lambda x: np.zeros((3, 4)).__iadd__(x))(X), "write y = y + x, not y += x"),
    "range": (lambda: reference(lambda n: list(range(n)))(3), "an index of it cannot be had"),
    "assignment": (lambda: reference(lambda x: x.__setitem__(0, 1.0))(X), "x = x.at[index].set(value)"),
    "leaked": (use_leaked, "the array leaked out of its function"),
    "leaked result": (returns_leaked, "the array leaked out of its function"),
    "leaked argument": (lambda: (reference(leak)(X), reference(leak)(LEAKED[-1])), "the array leaked"),
    "format": (lambda: reference(lambda x: f"{b.sum(x):.3f}")(X), "its text as '.3f' cannot be had"),
    "pickle": (lambda: reference(lambda x: pickle.dumps(x))(X), "a pickle of it cannot be had"),
    "deletion": (lambda: reference(lambda x: x.__delitem__(0))(X), "join slices of it instead"),
    "no function": (lambda: reference(3), "jit needs a function, got int"),  # type: ignore[arg-type]
    "unknown name": (lambda: reference(leak, donate_argnames="w"), "donate_argnames names 'w'; the function's"),
    "static and donated": (lambda: reference(leak, donate_argnums=0, static_argnames="x"), "or static, not both"),
    "not row-major": (
        lambda: reference(lambda x: x + 1, donate_argnums=0)(X.T),
        "donated argument x of shape [4, 3] has strides",
    ),
    "shapes": (lambda: reference(lambda x, y: x + y)(X, np.ones(3, np.float32)), "[3, 4] and [3] do not broadcast"),
    "product": (lambda: reference(lambda x: b.mm(x, x))(X), "got [3, 4] and [3, 4]"),
    "string": (lambda: reference(lambda x, s: x)(X, "s"), "argument s is str: 's'"),
    "unhashable": (lambda: reference(lambda x, s: x, static_argnums=1)(X, [1]), "must be hashable, got list"),
    "result": (lambda: reference(lambda x: "a")(X), "returns trees of arrays, got str"),
    "dtype": (lambda: reference(lambda x: x)(X.astype(np.complex64)), "dtype complex64, which is not supported"),
    "donated": (lambda: reference(lambda x: x, donate_argnums=3), "donate_argnums names argument 3"),
    "donated name": (
        lambda: reference(lambda x, y: x, donate_argnames="w"),
        "names 'w'; the function's arguments are x, y",
    ),
    "static name": (lambda: reference(lambda x: x, static_argnames=("x", "n")), "static_argnames names 'n'"),
    "donated view": (
        lambda: reference(lambda w: {"a": w["a"] + 1}, donate_argnums=0)({"a": X.T}),
        "donated argument w['a'] of shape [4, 3] has strides [1, 4], and only a contiguous array is updated in place",
    ),
    "flipped in place": (
        lambda: reference(lambda x: x + 1, donate_argnums=0)(X[::-1]),
        "negative strides (-16, 4), and only an array without them is updated in place; pass np.ascontiguousarray(x)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_users_line(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(tk.TraceError) as caught:
        call()
    assert message in str(caught.value)
    assert "test_jit.py:" in str(caught.value)


def test_flipped_arrays_are_copied() -> None:
    double = reference(lambda x, y: {"sum": x + y, "same": x})
    for x in (X[::-1], X[:, ::-1], X[::-2, ::-1], X[:0:-1]):
        found = double(x, 2.0 * X[: len(x)])
        np.testing.assert_array_equal(found["sum"], x + 2.0 * X[: len(x)])
        np.testing.assert_array_equal(found["same"], x)
    again = X.copy()
    np.testing.assert_array_equal(double(again[::-1], X)["sum"], again[::-1] + X)
    again += 1  # same signature, other values
    np.testing.assert_array_equal(double(again[::-1], X)["sum"], again[::-1] + X)


def test_inputs_are_named_by_what_one_writes_to_get_them() -> None:
    arguments = {"layers": [{"w": X, 3: ROW}], "state": State(X, (ROW,)), "adam": tk.optim.ScaleByAdamState(ROW, X, X)}
    paths = ["['adam'].count", "['adam'].mu", "['adam'].nu", "['layers'][0][3]", "['layers'][0]['w']"]
    assert tk.tree.paths(arguments) == [*paths, "['state'].w", "['state'].moments[0]"]
    inputs = reference(lambda tree: tree["state"].w + 1).lower(arguments).program.inputs
    names = ["tree_adam_count", "tree_adam_mu", "tree_adam_nu", "tree_layers_0_3", "tree_layers_0_w"]
    assert [spec.buffer for spec in inputs] == [*names, "tree_state_w", "tree_state_moments_0"]
