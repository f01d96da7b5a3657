"""Steps as users write them on a device: drawn batches, norms between products, clipped updates, shared weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from gpu_arrays import compile_program, in_threads, launch, torch_module
from test_drawn_batches import MAX_UNKNOWN, STEPS
from test_partial_sums import shared_weights
from test_row_groups import attention, groups, lowered, norms
from test_scalars import lower, step_inputs

import trainkernel as tk
from trainkernel import placement

pytestmark = pytest.mark.gpu


def test_blocks_draw_their_own_rows() -> None:
    torch_module()
    programs, inputs = [], []
    for step, arguments, _ in STEPS.values():
        programs.append(tk.jit(step, donate_argnums=0, device="reference").lower(*arguments).program)
        inputs.append([np.array(leaf) for leaf in tk.tree.leaves(arguments)])
    jobs: list[tuple[Any, dict[str, Any]]] = [(program, {}) for program in programs]
    for name, program, own, kernel in zip(STEPS, programs, inputs, in_threads(compile_program, jobs), strict=True):
        assert "region of" in str(kernel.schedule)
        assert assert_close(launch(kernel, own), program, own) <= MAX_UNKNOWN[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_groups(dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_module()
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path))  # the key of a program does not know of the next line
    monkeypatch.setattr(placement, "plan_region", lambda *_: None)
    cases = [lowered(function, dtype) for function in (norms, attention)]
    kernels = in_threads(compile_program, [(program, {}) for program, _ in cases])
    apart = in_threads(compile_program, [(program, {"region_pieces": 0}) for program, _ in cases])
    for (program, inputs), kernel, other in zip(cases, kernels, apart, strict=True):
        assert groups(kernel) and not groups(other)
        results = launch(kernel, inputs)
        assert assert_close(results, program, inputs) <= 0.1
        for one, two in zip(results, launch(other, inputs), strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(two), equal_nan=True)


def test_clipped_updates_and_shared_weights() -> None:
    torch_module()
    clipped, (weights, shared) = [lower(loop=loop).program for loop in (False, True)], shared_weights()
    cases = [(program, step_inputs()) for program in clipped] + [(weights, shared)]
    jobs: list[tuple[Any, dict[str, Any]]] = [(program, {"region_pieces": 2}) for program in clipped]
    jobs.append((weights, {"region_pieces": 8}))
    for (program, inputs), kernel in zip(cases, in_threads(compile_program, jobs), strict=True):
        assert assert_close(launch(kernel, inputs), program, inputs) == 0
