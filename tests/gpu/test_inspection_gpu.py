"""Stages measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkernel import ProgramBuilder, TensorSpec, cli
from trainkernel import compile as compile_program
from trainkernel.inspection import inspect_kernel
from trainkernel.measurement import measure, with_stamps
from trainkernel.mlp import mlp_step

pytestmark = pytest.mark.gpu


def test_inspect_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, page, trace = (tmp_path / name for name in ("program.json", "stages.html", "stages.json"))
    program.write_text(mlp_step((64, 128, 64, 10), 128, loss="cross_entropy", optimizer="adam").program.to_json())
    assert cli.main(["inspect", str(program), "--measure", "--html", str(page), "--trace", str(trace)]) == 0
    assert "medians of 100 launches" in capsys.readouterr().out
    assert "Timeline (measured)" in page.read_text()
    assert json.loads(trace.read_text())["otherData"]["source"] == "measured"


def test_stages_and_barriers_add_up() -> None:
    b = ProgramBuilder()
    x = b.input_view(TensorSpec("x", (256, 64), (1, 256)))
    w, rate = b.input("w", (64, 64)), b.scalar("rate")
    change = b.op("mm", x.T, b.op("tanh", b.op("mm", x, w)))
    program = b.build([b.op("sub", w, b.op("mul", change, rate))])
    kernel = compile_program(program, device="cuda", stamps=True, inplace_outputs={0: 1})
    report = with_stamps(inspect_kernel(kernel.stats), measure(kernel, {}), "cuda")
    assert report.measured_us is not None and report.measured_us > 0
    spent_us = 0.0
    for stage in report.stages:
        assert stage.measured is not None and stage.measured.duration_us > 0
        spent_us += stage.measured.duration_us
        if stage.barrier is not None and stage.barrier.measured is not None:
            spent_us += stage.barrier.measured.duration_us
    assert spent_us <= report.measured_us + 1e-3
