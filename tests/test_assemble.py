"""From graphs to Programs: views, liveness, constants and equal work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import primitives as b
from trainkernel.assemble import reshaped_strides
from trainkernel.ir import Loop, dense_strides

X = np.arange(24, dtype=np.float32).reshape(4, 6)


def program_of(fun: Any, *args: Any) -> tk.Program:
    program: tk.Program = tk.jit(fun, device="reference").lower(*args).program
    return program


def counts(program: tk.Program) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in program.operations:
        name = "loop" if isinstance(item, Loop) else item.op
        found[name] = found.get(name, 0) + 1
    return found


def test_strides_of_a_reshape_are_numpys() -> None:
    """Against NumPy, which makes a view where one exists: random shapes, strides and targets."""
    rng = np.random.default_rng(0)
    shapes = [(2, 3, 4), (4, 3, 2), (6, 4), (24,), (2, 12), (1, 24, 1), (2, 1, 3, 4), (3, 8), (2, 2, 2, 3)]
    seen = {True: 0, False: 0}
    for _ in range(3000):
        shape = shapes[rng.integers(len(shapes))]
        padded = np.zeros([size + int(rng.integers(2)) for size in shape], np.int8)
        view = padded[tuple(slice(0, size) for size in shape)].transpose(rng.permutation(len(shape)))
        target = shapes[rng.integers(len(shapes))]
        got = reshaped_strides(view.shape, view.strides, target)
        reshaped = view.reshape(target)
        is_view = np.shares_memory(reshaped, padded)
        assert (got is not None) == is_view, (view.shape, view.strides, target)
        seen[is_view] += 1
        if got is not None:
            pairs = zip(target, got, reshaped.strides, strict=True)
            assert all(size == 1 or mine == numpys for size, mine, numpys in pairs)
    assert min(seen.values()) > 100


def test_strides_of_broadcast_and_empty_views() -> None:
    assert reshaped_strides((2, 3), (0, 0), (6,)) == (0,)
    assert reshaped_strides((2, 3), (0, 1), (6,)) is None
    assert reshaped_strides((2, 0, 3), (5, 7, 1), (0, 6)) == dense_strides((0, 6))
    assert reshaped_strides((), (), (1, 1)) == (1, 1)


def test_a_reshape_that_is_no_view_is_one_copy() -> None:
    program = program_of(lambda x: b.exp(b.reshape(b.transpose(x, (1, 0)), (24,))), X)
    assert counts(program) == {"cast": 1, "exp": 1}
    np.testing.assert_allclose(
        tk.jit(lambda x: b.exp(b.reshape(b.transpose(x, (1, 0)), (24,))), device="reference")(X),
        np.exp(X.T.reshape(24)),
        rtol=1e-6,
    )


def test_only_what_is_needed_is_there() -> None:
    def f(x: Any) -> Any:
        b.exp(x)  # nobody reads it
        _, total = b.softmax_stats(x, dims=(1,))
        return total

    assert counts(program_of(f, X)) == {"softmax_stats": 1}


def test_operations_on_numbers_are_done_at_once() -> None:
    program = program_of(lambda x: x * (b.full((4, 6), 2.0, "float32") / 8.0) + b.full((), 1, "int32") * 3, X)
    assert counts(program) == {"mul": 1, "add": 1}
    assert program.operations[0].inputs[1] == 0.25


def test_a_product_or_quotient_by_one_is_no_operation() -> None:
    program = program_of(lambda x: (1.0 * x, x * 1, x / 1, 1 / x), X)
    assert counts(program) == {"div": 1}


def test_numbers_keep_their_dtype_where_it_decides() -> None:
    def f(condition: Any) -> Any:
        return b.where(condition, b.full((4, 6), 300, "int32"), b.full((4, 6), 2, "int32"))

    got = tk.jit(f, device="reference")(X > 3)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, np.where(X > 3, 300, 2))


def test_results_that_are_arguments_constants_or_twice_the_same() -> None:
    table = np.arange(3, dtype=np.float32)

    def f(x: Any, n: int) -> Any:
        y = b.neg(x)
        return x, y, y, table, 2.5, np.float32(1), n, b.transpose(y, (1, 0))

    for device in ("reference", "emulator"):
        got = tk.jit(f, device=device)(X, 3)
        want = (X, -X, -X, table, np.float32(2.5), np.float32(1), np.int32(3), -X.T)
        for value, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(value, expected)
            assert value.dtype == expected.dtype


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_donated_state_that_is_passed_on_copied_or_shared(device: str) -> None:
    def f(state: Any, x: Any) -> Any:
        a, c, d, e = state
        return (a, b.add(x, 1.0), b.transpose(b.transpose(c, (1, 0)), (1, 0)), b.add(x, 1.0)), d + e

    state = tuple(X + i for i in range(4))
    before = [array.copy() for array in state]
    new, total = tk.jit(f, device=device, donate_argnums=0)(state, X)
    assert all(value is given for value, given in zip(new, state, strict=True))
    for value, expected in zip(new, (before[0], X + 1, before[1], X + 1), strict=True):
        np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(total, before[2] + before[3])


def test_hostile_names_of_arguments_are_no_code() -> None:
    tree = {"a b */ evil()": X, "ä": X, "": X, "1": X, "for": X}
    program = program_of(lambda t: sum(t.values()), tree)
    assert all(spec.buffer.isidentifier() and spec.buffer.isascii() for spec in program.inputs)
    got = tk.jit(lambda t: sum(t.values()), device="emulator")(tree)
    np.testing.assert_array_equal(got, X * 5)


def test_what_repeats_is_computed_once_and_stays_a_view() -> None:
    """A row's statistic is worked on once for each row, also where the code broadcasts it first."""

    def normalized(x: Any) -> Any:
        mean = tnp.mean(x, axis=1, keepdims=True) + tnp.zeros_like(x)
        return x * tnp.exp(mean * 2.0 + 1.0)

    program = program_of(normalized, X)
    shapes = {item.op: item.outputs[0].shape for item in program.operations}
    assert shapes == {"mean": (4,), "add": (4,), "mul": (4, 6), "exp": (4,)}
    want = X * np.exp(X.mean(1, keepdims=True) * 2 + 1)
    np.testing.assert_allclose(tk.jit(normalized, device="reference")(X), want, rtol=1e-6)


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_results_that_repeat_are_whole_arrays(device: str) -> None:
    def step(carry: Any, _: Any) -> Any:
        repeated = tnp.exp(tnp.broadcast_to(carry[:, :1] * 0.1, carry.shape))
        return repeated, repeated + 1

    x = X.copy()
    carry, rows = tk.jit(lambda c: tk.scan(step, c, length=3), donate_argnums=0, device=device)(x)
    want, wanted = X, []
    for _ in range(3):
        want = np.exp(np.broadcast_to(want[:, :1] * np.float32(0.1), X.shape))
        wanted.append(want + 1)
    assert carry is x
    np.testing.assert_allclose(carry, want, rtol=1e-6)
    np.testing.assert_allclose(rows, np.stack(wanted), rtol=1e-6)


def test_a_number_between_numbers_has_no_dims() -> None:
    program = program_of(lambda x: tnp.where(x > 3, 1.0, -0.5), X)
    assert {item.op: item.outputs[0].shape for item in program.operations}["full"] == ()
    np.testing.assert_array_equal(
        tk.jit(lambda x: tnp.where(x > 3, 1.0, -0.5), device="emulator")(X), np.where(X > 3, 1, -0.5)
    )
