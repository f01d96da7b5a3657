"""The cost model of reductions: who adds up a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel.ir import Operation, TensorSpec
from trainkernel.options import Options
from trainkernel.products import plan_reduction
from trainkernel.target import Target

H100 = Target.preset("sm_90")


def path(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, op: str = "sum") -> str:
    """The path of a reduction over the last dim."""
    source = TensorSpec.dense("x", shape) if strides is None else TensorSpec("x", shape, strides, 0, "float32")
    out = TensorSpec.dense("out", shape[:-1])
    return plan_reduction(Operation("out", op, (source,), out, {"dims": (len(shape) - 1,)}), H100, Options()).path


def test_many_short_rows_have_a_thread_each() -> None:
    assert path((32768, 2)) == path((8192, 16), op="max") == "thread"
    assert path((64, 10)) == path((32768, 64)) == "warp"
    assert path((4, 64)) == path((1024, 1000)) == "block"


def test_neighbours_in_memory_decide_not_the_order_of_the_dims() -> None:
    columns = (1, 1024)
    assert path((4, 4, 8, 16, 2), (1024, 256, 16, 1, 128)) == "thread"
    assert path((1024, 200), columns) == "columns"


@pytest.mark.parametrize("op", [tnp.max, tnp.sum])
def test_a_thread_per_row_in_the_emulator(op: Any) -> None:
    x = np.random.default_rng(0).standard_normal((4200, 3), np.float32)
    got, want = (tk.jit(lambda x: op(x, axis=1), device=device)(x) for device in ("emulator", "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
