"""torch tensors on the host: seen, checked, and given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from runtime_support import step_program, step_stub

from trainkernel.arguments import check_arguments, signature_of
from trainkernel.dtypes import DTYPES
from trainkernel.errors import ArgumentError
from trainkernel.ir import Program, TensorSpec
from trainkernel.kernel import HostKernel
from trainkernel.runtime.dlpack import as_numpy, view

torch: Any = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_view(dtype: str) -> None:
    tensor = torch.arange(12).to(getattr(torch, dtype)).reshape(3, 4).T
    lent = view(tensor)
    assert (lent.framework, lent.dtype, lent.device) == ("torch", dtype, ("cpu", 0))
    assert (lent.shape, lent.strides, lent.pointer) == ((4, 3), (1, 4), tensor.data_ptr())
    assert np.array_equal(as_numpy(lent).astype(np.float32), tensor.float().numpy())


def test_views_share_memory() -> None:
    tensor = torch.zeros(8)[2:]
    as_numpy(view(tensor))[0] = 5
    assert tensor[0] == 5
    assert view(torch.zeros(0, 3)).num_elements == 0
    assert view(torch.tensor(1.0)).shape == ()


def test_refusals() -> None:
    program = Program((TensorSpec.dense("x", (3,)),), (), ())
    signature = signature_of(program, {})
    with pytest.raises(ArgumentError, match=r"requires grad.*pass \.detach\(\)"):
        check_arguments(signature, [torch.zeros(3, requires_grad=True)], device=("cpu", 0))
    check_arguments(signature, [torch.zeros(3, requires_grad=True).detach()], device=("cpu", 0))
    for wrong, message in ((torch.zeros(3, device="meta"), "on meta"), (torch.zeros(3).to_sparse(), "layout")):
        with pytest.raises(ArgumentError, match=message):
            view(wrong)


def test_kernel_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: Program, inputs: Any) -> Any:
        return inputs[1] + inputs[0], (inputs[1] + inputs[0])[::-1]

    monkeypatch.setattr("trainkernel.reference.run", run)
    kernel = HostKernel(step_program(), step_stub(), "reference", None)
    x, w = torch.arange(4096.0), torch.ones(4096)
    new_w, flipped = kernel(x, w, 0.5, 1, 0)
    assert new_w is w
    assert torch.equal(w, torch.arange(4096.0) + 1)
    assert torch.equal(flipped, w.flip(0))
