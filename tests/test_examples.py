"""The scripts in ``examples/``: their generated source against the reference, and their main functions."""

from __future__ import annotations

import numpy as np
import pytest
from example_steps import NAMES, load, training

from trainkernel import emulator, tree

SIZE, EXTENT, NUM_STEPS = 8, 16, 3

# Both round every operation to float32 and differ in products, sums and exp, log, tanh, which the reference computes in
# float64: by some units of 2**-24 relative to the largest elements of an array, since sums cancel. Three steps carry
# that on without making it larger. Seen: 4 units for losses, 24 for moments.
UNIT = 2.0**-24
LOSS_UNITS, STATE_UNITS = 16, 128


@pytest.mark.skipif(not emulator.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("name", NAMES)
def test_updates_in_the_emulator(name: str) -> None:
    steps = training(load(name), SIZE, NUM_STEPS, EXTENT)
    state, reports = steps.run(NUM_STEPS, "emulator")
    want_state, want_reports = steps.run(NUM_STEPS, "reference")
    for got, want in zip(tree.leaves(reports), tree.leaves(want_reports), strict=True):
        assert got.shape[0] == NUM_STEPS
        np.testing.assert_allclose(got, want, rtol=LOSS_UNITS * UNIT)
    for path, got, want in zip(tree.paths(state), tree.leaves(state), tree.leaves(want_state), strict=True):
        atol = 0 if got.dtype.kind == "i" else STATE_UNITS * UNIT * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=path)


@pytest.mark.parametrize("name", NAMES)
def test_main(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    curve = load(name).main(steps=2, size=4, device="reference")
    assert np.shape(curve)[0] == 2 and np.isfinite(curve).all()
    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_all_of_the_state_is_updated_in_place(name: str) -> None:
    steps = training(load(name), SIZE, NUM_STEPS, EXTENT)
    lowered = steps.jitted("reference").lower(steps.state, *steps.args, **steps.static)
    assert len(lowered.inplace_outputs) == len(tree.leaves(steps.state))
