"""JAX arrays on the host: read, never written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from runtime_support import copy_stub

from trainkernel.arguments import check_arguments, signature_of
from trainkernel.dtypes import DTYPES
from trainkernel.errors import ArgumentError
from trainkernel.ir import Program, TensorSpec
from trainkernel.kernel import HostKernel
from trainkernel.runtime.dlpack import as_numpy, view

jax: Any = pytest.importorskip("jax")


def on_host(values: Any, dtype: str) -> Any:
    return jax.device_put(np.asarray(values).astype(jax.numpy.dtype(dtype)), jax.devices("cpu")[0])


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in ("float64", "int64")])
def test_view(dtype: str) -> None:
    array = on_host(np.arange(12).reshape(3, 4), dtype)
    lent = view(array)
    assert (lent.framework, lent.dtype, lent.device, lent.readonly) == ("jax", dtype, ("cpu", 0), True)
    assert (lent.shape, lent.strides) == ((3, 4), (4, 1))
    assert np.array_equal(as_numpy(lent), np.asarray(array))
    assert not as_numpy(lent).flags.writeable


def test_never_written() -> None:
    signature = signature_of(Program((TensorSpec.dense("x", (3,)),), (), (TensorSpec.dense("y", (3,)),)), {0: 0})
    with pytest.raises(ArgumentError, match="got a JAX array, which may never be changed"):
        check_arguments(signature, [on_host([1, 2, 3], "float32")], device=("cpu", 0))


def test_tracers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="call the kernel outside"):
        jax.jit(lambda x: (view(x), x)[1])(on_host([1.0], "float32"))


def test_kernel_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkernel.reference.run", lambda program, inputs: (inputs[0].copy(),))
    stub = copy_stub((3,), "bfloat16")
    x = on_host([1, 2, 3], "bfloat16")
    (y,) = HostKernel(stub.program, stub, "reference", None)(x)
    assert isinstance(y, jax.Array)
    assert y.dtype == jax.numpy.bfloat16
    assert np.array_equal(np.asarray(y), np.asarray(x))
