"""The steps of ``examples/`` as tests run them: a jitted function, its state and its other arguments."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import trainkernel as tk
from trainkernel import random, tree
from trainkernel.data import load_digits

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCHEDULE_STEPS = 100
NAMES = tuple(sorted(path.stem for path in EXAMPLES.glob("*.py")))


def load(name: str) -> ModuleType:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Training:
    """``call(state, *args, **static)`` runs ``num_steps`` steps and returns the state after them and their losses."""

    call: Any
    state: Any
    args: tuple[Any, ...]
    static: Mapping[str, Any] = field(default_factory=dict)
    in_one_launch: bool = False

    def jitted(self, device: str) -> Any:
        """The function, with its state donated."""
        return tk.jit(self.call, donate_argnums=0, static_argnames=tuple(self.static), device=device)

    def run(self, num_steps: int, device: str) -> tuple[Any, Any]:
        """The final state and a tree of arrays ``[num_steps, ...]``: losses and what else a step reports."""
        jitted = self.jitted(device)
        state = tree.map(np.array, self.state)
        if self.in_one_launch:
            state, reports = jitted(state, *self.args, **self.static)
            return tree.map(np.asarray, (state, reports))
        rows = []
        for _ in range(num_steps):
            state, report = jitted(state, *self.args, **self.static)
            rows.append(np.asarray(report))
        return tree.map(np.asarray, state), np.stack(rows)


def training(module: ModuleType, size: int, num_steps: int, extent: int) -> Training:
    """An example at a width and an extent: points of the equation, characters in a row, members of the ensemble."""
    name, key = module.__name__.removeprefix("example_"), random.key(1)
    images, labels = load_digits()
    labels = labels.astype(np.int32)
    numbers = np.arange(num_steps, dtype=np.int32)
    if name == "digits_mlp":
        return Training(module.train, module.init(size), (images, labels, key), {"steps": num_steps}, True)
    if name == "burgers":
        return Training(module.step, module.init(size), (key,), {"points": extent})
    if name == "autoencoder":
        optimizer = module.make_optimizer(SCHEDULE_STEPS)
        state = module.init(size, optimizer)
        return Training(module.train, state, (images, key, numbers), {"optimizer": optimizer}, True)
    if name == "transformer":
        text, num_letters = module.characters()
        return Training(module.step, module.init(size, num_letters, extent), (text, key))
    if name == "digits_conv":
        return Training(module.step, module.init(size), (images, labels, key))
    assert name == "ensemble", f"tests/example_steps.py does not know the example {name}"
    rates = np.geomspace(1e-3, 0.3, extent, dtype=np.float32)
    return Training(module.train, module.init(size, extent), (rates, images, labels, key, numbers), {}, True)
