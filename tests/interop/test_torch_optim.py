"""trainkernel.optim against torch.optim, where the rules are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainkernel import optim

torch: Any = pytest.importorskip("torch")

NUM_STEPS = 20

# torch divides by the learning rate's correction in another order: a few roundings of a step.
RELATIVE = 2e-6

Make = Callable[[list[Any]], Any]
OPTIMIZERS: dict[str, tuple[optim.GradientTransformation, Make]] = {
    "sgd": (optim.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (optim.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "nesterov": (optim.sgd(0.1, 0.9, True), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    "sgd decay": (
        optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.1, 0.9)),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (optim.adam(1e-2), lambda p: torch.optim.Adam(p, 1e-2)),
    "adam options": (
        optim.adam(1e-2, b1=0.8, b2=0.95, eps=1e-3),
        lambda p: torch.optim.Adam(p, 1e-2, betas=(0.8, 0.95), eps=1e-3),
    ),
    "adamw": (optim.adamw(1e-2, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)),
    "rmsprop": (
        optim.rmsprop(1e-2, decay=0.99, eps=1e-8, eps_in_sqrt=False),
        lambda p: torch.optim.RMSprop(p, 1e-2),
    ),
    "rmsprop centered": (
        optim.rmsprop(1e-2, decay=0.9, eps=1e-3, eps_in_sqrt=False, centered=True, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 1e-2, alpha=0.9, eps=1e-3, centered=True, momentum=0.9),
    ),
    "adagrad": (
        optim.adagrad(0.1, initial_accumulator_value=0.1, eps=0.0),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1, eps=0.0),
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_torch(name: str, dtype: Any) -> None:
    opt, make = OPTIMIZERS[name]
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(5, 4)).astype(dtype), rng.normal(size=7).astype(dtype)]
    tensors = [torch.tensor(p, requires_grad=True) for p in params]
    other, state = make(tensors), opt.init(params)
    for _ in range(NUM_STEPS):
        gradients = [rng.normal(size=p.shape).astype(dtype) for p in params]
        updates, state = opt.update(gradients, state, params)
        params = optim.apply_updates(params, updates)
        for tensor, g in zip(tensors, gradients, strict=True):
            tensor.grad = torch.tensor(g)
        other.step()
    relative = RELATIVE if dtype is np.float32 else 1e-14
    for ours, tensor in zip(params, tensors, strict=True):
        theirs = tensor.detach().numpy()
        assert ours.dtype == theirs.dtype
        assert np.abs(ours - theirs).max() <= relative * 4 * np.abs(theirs).max()
