"""``scan``, ``fori_loop`` and ``cond``: against Python loops, traced and not, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainkernel as tk
from trainkernel import primitives as b

XS = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
START = np.zeros(3, np.float32)


def step(carry: Any, x: Any) -> tuple[Any, Any]:
    new = b.tanh(b.add(carry, x))
    return new, {"sum": b.sum(new), "x": x}


def by_hand(reverse: bool) -> tuple[Any, Any, Any]:
    carry, sums = START, np.zeros(5, np.float32)
    for i in reversed(range(5)) if reverse else range(5):
        carry, y = step(carry, XS[i])
        sums[i] = y["sum"]
    return carry, sums, XS


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2, True])
@pytest.mark.parametrize("device", [None, "reference", "emulator"])
def test_scan_is_a_loop(reverse: bool, unroll: int | bool, device: str | None) -> None:
    def run(start: Any, xs: Any) -> Any:
        return tk.scan(step, start, xs, reverse=reverse, unroll=unroll)

    function = run if device is None else tk.jit(run, device=device)
    carry, ys = function(START, XS)
    want_carry, want_sums, want_x = by_hand(reverse)
    np.testing.assert_allclose(carry, want_carry, rtol=1e-6)
    np.testing.assert_allclose(ys["sum"], want_sums, rtol=1e-5)
    np.testing.assert_array_equal(ys["x"], want_x)


def test_the_length_is_an_argument_of_the_launch() -> None:
    def run(start: Any, xs: Any, rate: float, length: int) -> Any:
        return tk.scan(lambda c, x: (b.add(c, x * rate), c), start, xs, length=length)

    jitted = tk.jit(run, device="emulator")
    for length, rate in ((5, 0.5), (2, 1.0), (0, 1.0)):
        carry, ys = jitted(START, XS, rate, length)
        np.testing.assert_allclose(carry, (XS[:length] * np.float32(rate)).sum(0), rtol=1e-5, atol=1e-6)
        assert not ys[length:].any()
    assert len(jitted._compiled) == 1
    with pytest.raises(tk.ArgumentError, match="length"):
        jitted(START, XS, 1.0, 6)


def test_what_does_not_change_is_computed_outside() -> None:
    def run(w: Any, xs: Any) -> Any:
        return tk.scan(lambda c, x: (b.add(c, b.mul(b.exp(w), x)), None), START, xs)[0]

    program = tk.jit(run, device="reference").lower(START, XS).program
    (loop,) = [item for item in program.operations if isinstance(item, tk.Loop)]
    assert " = exp " not in str(loop.body) and " = exp " in str(program)


def test_results_and_carries_that_nobody_reads_are_dropped() -> None:
    def run(xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            used, unused = carry
            return (b.add(used, x), b.mul(unused, x)), b.exp(x)

        return tk.scan(body, (START, START), xs)[0][0]

    program = tk.jit(run, device="reference").lower(XS).program
    (loop,) = [item for item in program.operations if isinstance(item, tk.Loop)]
    assert (len(loop.outputs), loop.num_carry, loop.num_xs) == (1, 1, 1)


def test_nested_scans_and_their_derivatives() -> None:
    def run(w: Any, xs: Any) -> Any:
        def outer(carry: Any, x: Any) -> Any:
            inner = tk.scan(lambda c, _: (b.sin(b.add(b.mul(c, w), x)), None), carry, length=3)[0]
            return inner, b.sum(inner)

        carry, sums = tk.scan(outer, np.zeros(3), xs)
        return b.add(b.sum(sums), b.sum(carry))

    w, xs = np.array([0.5, -0.3, 0.8]), XS.astype(np.float64)
    gradient = tk.grad(run)(w, xs)
    for i, h in enumerate(np.eye(3) * 1e-6):
        assert gradient[i] == pytest.approx(float(run(w + h, xs) - run(w - h, xs)) / 2e-6, rel=1e-6)
    direction = np.array([1.0, 2.0, -1.0])
    second = tk.grad(lambda w: b.sum(b.mul(tk.grad(run)(w, xs), direction)))(w)
    step = 1e-5
    slope = [b.sum(b.mul(tk.grad(run)(w + step * h, xs), direction)) for h in (*np.eye(3), *-np.eye(3))]
    np.testing.assert_allclose(second, [(slope[i] - slope[i + 3]) / (2 * step) for i in range(3)], rtol=1e-6)
    jitted = tk.jit(tk.grad(run), device="emulator")(w.astype(np.float32), XS)
    np.testing.assert_allclose(jitted, gradient, rtol=1e-4)


@pytest.mark.parametrize("unroll", [1, True])
def test_no_steps(unroll: int | bool) -> None:
    carry, ys = tk.scan(lambda c, x: (c + x, c), START, XS[:0], unroll=unroll)
    np.testing.assert_array_equal(carry, START)
    assert ys.shape == (0, 3)


@pytest.mark.parametrize("unroll", [1, True])
def test_the_arithmetic_of_a_step_is_the_package_s(unroll: int | bool) -> None:
    def count(carry: Any, x: Any) -> tuple[Any, Any]:
        number, total = carry
        return (number + 1, total + number * 0.5), number * 0.5  # NumPy's product would be float64

    init = (np.array(1, np.int32), np.zeros((), np.float32))
    for run in (tk.scan, tk.jit(tk.scan, static_argnames=("f", "unroll"), device="reference")):
        (_, total), halves = run(count, init, XS, unroll=unroll)
        assert total == 7.5 and halves.dtype == total.dtype == np.float32


def test_python_numbers_take_the_dtype_of_the_carry() -> None:
    carry, _ = tk.scan(lambda c, x: (c + b.sum(x), None), 0, XS)
    assert carry.dtype == np.float32
    half = XS.astype(np.float16)
    carry, _ = tk.scan(lambda c, x: (c * 2.0 + x, None), half[0], half)
    assert carry.dtype == np.float16


def test_fori_loop_has_the_index() -> None:
    total = tk.fori_loop(2, 6, lambda i, v: v + i, np.int32(0))
    assert int(total) == 2 + 3 + 4 + 5
    jitted = tk.jit(lambda n, v: tk.fori_loop(0, n, lambda i, v: v * 2, v), device="emulator")
    assert [float(jitted(n, np.float32(1))) for n in (0, 1, 5)] == [1.0, 2.0, 32.0]


def test_cond_selects_where_it_is_traced() -> None:
    def pick(p: Any, x: Any) -> Any:
        return tk.cond(p, lambda x: (b.exp(x), 1), lambda x: (b.neg(x), 2), x)

    jitted = tk.jit(pick, device="emulator")
    for p in (True, False):
        got, want = jitted(np.asarray(p), START + 1), pick(p, START + 1)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
        assert int(got[1]) == want[1]


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_switch_clamps_its_index(device: str) -> None:
    branches = [lambda x: {"a": b.exp(x), "n": 1}, lambda x: {"a": b.neg(x), "n": 2}, lambda x: {"a": x * 3.0, "n": 3}]
    jitted = tk.jit(lambda i, x: tk.lax.switch(i, branches, x), device=device)
    for index, chosen in ((-1, 0), (0, 0), (1, 1), (2, 2), (9, 2)):
        want = branches[chosen](START + 1)
        for got in (jitted(index, START + 1), tk.lax.switch(np.int32(index), branches, START + 1)):
            np.testing.assert_allclose(got["a"], want["a"], rtol=1e-6)
            assert int(got["n"]) == want["n"]


def test_map_goes_over_slices() -> None:
    def f(x: Any) -> Any:
        return b.exp(x["a"]), b.sum(x["b"])

    xs = {"a": XS, "b": XS * 2}
    for run in (lambda xs: tk.lax.map(f, xs), tk.jit(lambda xs: tk.lax.map(f, xs), device="emulator")):
        exps, sums = run(xs)
        np.testing.assert_allclose(exps, np.exp(XS), rtol=1e-6)
        np.testing.assert_allclose(sums, 2 * XS.sum(1), rtol=1e-6)
    gradient = tk.grad(lambda xs: b.sum(tk.lax.map(lambda x: b.mul(x, x), xs)))(XS)
    np.testing.assert_allclose(gradient, 2 * XS, rtol=1e-6)


def results_of_two_structures() -> Any:
    results = iter([XS[0], (XS[0], XS[0])])
    return tk.scan(lambda c, _: (c, next(results)), START, length=2, unroll=True)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: tk.scan(lambda c, x: (b.sum(c), None), START, XS), "the carry changes from f32[3] to f32[]"),
    "dtype": (lambda: tk.scan(lambda c, x: (b.cast(c, "int32"), None), START, XS), "from f32[3] to i32[3]"),
    "leaf": (
        lambda: tk.scan(
            lambda c, x: ({"h": c["h"], "n": [c["n"][0] + 0.5]}, None), {"h": START, "n": [np.int32(1)]}, XS
        ),
        "the carry's leaf ['n'][0] changes from i32[] to f32[]",
    ),
    "structure": (lambda: tk.scan(lambda c, x: ((c, c), None), START, XS), "the carry changes its structure"),
    "pair": (lambda: tk.scan(lambda c, x: c, START, XS), "must return (carry, y)"),
    "length": (lambda: tk.scan(step, START, XS, length=4), "length is 4, the xs of the scan have 5"),
    "no length": (lambda: tk.scan(step, START), "needs xs or a length"),
    "leading sizes": (lambda: tk.scan(step, START, (XS, XS[:2])), "one leading size, got shapes [5, 3], [2, 3]"),
    "room": (
        lambda: tk.jit(lambda n: tk.scan(lambda c, _: (c, c), START, length=n), device="reference")(3),
        "no room for stacked results",
    ),
    "computed length": (
        lambda: tk.jit(lambda n: tk.scan(lambda c, _: (c, None), START, length=n + n)[0], device="reference")(3),
        "an int argument of the jitted function itself",
    ),
    "switch": (lambda: tk.lax.switch(np.float32(1), [b.exp], START), "needs an integer scalar and branches, got f32[]"),
    "branches": (
        lambda: tk.jit(lambda i: tk.lax.switch(i, [lambda: 1, lambda: 2.0]), device="reference")(1),
        "the sides of cond return",
    ),
    "float length": (lambda: tk.scan(step, START, length=2.5), "the length of a scan must be an int, got 2.5"),
    "long": (lambda: tk.scan(step, START, length=2**31), "from 0 to 2147483647, got 2147483648"),
    "far bound": (lambda: tk.fori_loop(2**31, 2**31, lambda i, c: c, START), "the bounds of fori_loop are int32"),
    "lengths": (lambda: tk.fori_loop(0, XS, lambda i, c: c, START), "the upper bound of fori_loop must be an int"),
    "unroll": (lambda: tk.scan(step, START, XS, unroll="a"), "unroll must be an int, got 'a'"),  # type: ignore
    "results": (results_of_two_structures, "return results of the structures PyTreeSpec((*, *)), PyTreeSpec(*)"),
    "unrolled shape": (
        lambda: tk.scan(lambda c, x: (b.sum(c), None), START, XS, unroll=True),
        "the carry changes from f32[3] to f32[]",
    ),
    "unrolled structure": (
        lambda: tk.scan(lambda c, x: ((c, c), None), START, XS, unroll=True),
        "the carry changes its structure",
    ),
    "while": (lambda: tk.while_loop(lambda v: True, lambda v: v, 0), "cannot be part of one kernel"),
    "cond of several": (lambda: tk.cond(XS > 0, lambda: 1, lambda: 2), "cond needs a scalar, got bool[5,3]"),
    "cond": (
        lambda: tk.jit(lambda p: tk.cond(p, lambda: 1, lambda: 2.0), device="reference")(np.asarray(True)),
        "the sides of cond return",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(tk.TraceError) as caught:
        call()
    assert message in str(caught.value)
    assert "test_scanning.py" in str(caught.value)
