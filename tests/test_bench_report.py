"""What ``bench/`` makes of times: medians, merged results, the README's table and plot. Needs no JAX."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import report
import run_steps
import timing
from rows import fastest, is_peer, new_row, print_table

MACHINE = {"device": "NVIDIA H200", "driver": "1.2", "versions": {"torch": "2", "jax": "3"}, "date": "2026-01-02T03:04"}


def rows_of(workload: str, *times: tuple[str, int, float | None]) -> list[dict[str, Any]]:
    precision = report.WORKLOADS[workload].dtype
    return [
        new_row(workload, runner, precision, steps_per_launch=steps, us_per_step=time) for runner, steps, time in times
    ]


TINY = rows_of(
    "tiny",
    ("floor", 1, 0.5),
    ("torch_graph", 1, 60.0),
    ("jax_jit", 1, 100.0),
    ("jax_scan", 100, 25.0),
    ("jax_scan_sync", 1, 1.0),
    ("trainkernel", 1, 12.0),
    ("trainkernel", 100, 10.0),
    ("trainkernel", 1000, 8.0),
    ("trainkernel_sync", 1, 2.0),
)


def test_readme_is_up_to_date() -> None:
    assert report.main(["--check"]) == 0, "run python bench/report.py"


def test_a_line_has_the_fastest_rows() -> None:
    (line,) = report.lines_of(TINY)
    assert line.times_us == [0.5, 25.0, 12.0, 8.0]
    assert report.table_row(line).endswith("| jax scan | 25.0 | 12.0 | 8.00 | **3.12×** | 0.50 |")


def test_a_workload_without_jax_is_not_listed() -> None:
    assert list(report.lines_of(rows_of("pinn", ("torch_graph", 1, 60.0), ("trainkernel", 1, 12.0)))) == []


def test_failed_runners_leave_gaps() -> None:
    (line,) = report.lines_of(rows_of("pinn", ("torch_graph", 1, 60.0), ("jax_jit", 1, None), ("trainkernel", 1, None)))
    assert line.times_us == [None, 60.0, None, None]
    assert report.table_row(line).endswith("| torch, CUDA graph | 60.0 | - | - | - | - |")


def test_plot_and_table_of_a_device() -> None:
    files = {path.name: text for path, text in report.wanted_files([{**MACHINE, "rows": TINY}]).items()}
    assert "| tiny | 8-32-32-1 relu" in files["README.md"] and "docs/steps_h200.svg" in files["README.md"]
    circles = [node for node in ElementTree.fromstring(files["steps_h200.svg"]).iter() if node.tag.endswith("circle")]
    assert len(circles) == 2 * len(report.MARKS)  # the legend's, and one line's


def test_peers_are_other_libraries_that_nobody_waits_for() -> None:
    best = fastest(row for row in TINY if is_peer(row))
    assert best is not None and (best["runner"], best["us_per_step"]) == ("jax_scan", 25.0)


def test_printed_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(TINY)
    assert "tiny: trainkernel takes 0.32 of the time of the fastest peer, jax_scan, and 16.00 times the floor" in (
        capsys.readouterr().out
    )


def test_new_rows_replace_those_of_their_workload(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    pinn, tiny = rows_of("pinn", ("trainkernel", 1, 5.0)), rows_of("tiny", ("trainkernel", 1, 7.0))
    path.write_text(json.dumps({**MACHINE, "rows": [*TINY, *pinn]}))
    assert run_steps.merged(path, MACHINE, tiny)["rows"] == [*pinn, *tiny]
    assert run_steps.merged(path, MACHINE | {"driver": "other"}, tiny)["rows"] == tiny


def test_samples_last_long_enough() -> None:
    calls: list[int] = []

    def clock(run: timing.Run, count: int) -> float:
        calls.append(count)
        return count * 0.004

    measured = timing.time_steps(lambda: None, clock, steps_per_run=2)
    assert measured.us_per_step == pytest.approx(2000) and measured.spread_us == pytest.approx(0)
    assert len(measured.samples_us) == timing.NUM_REPEATS
    assert measured.launches * 0.004 >= 0.9 * timing.MIN_SAMPLE_SECONDS
