"""The table and the plots of README.md, from bench/results/*.json.

::

    python bench/report.py            write what is between the markers, and docs/steps_<device>.svg
    python bench/report.py --check    exit code 1 if that would change anything

A workload is listed once JAX was measured beside it; its best peer is the fastest of the row's run.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

from machine import RESULTS  # noqa: E402
from plot import Mark, draw  # noqa: E402
from rows import FLOOR, OURS, Row, fastest, is_peer  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

README = ROOT / "README.md"
BEGIN = "<!-- bench/report.py writes from here"
END = "<!-- to here -->"
PEER_NAMES = {
    "torch_eager": "torch",
    "torch_graph": "torch, CUDA graph",
    "torch_compile_graph": "torch.compile, CUDA graph",
    "jax_jit": "jax.jit",
    "jax_scan": "jax scan",
}
MARKS = (
    Mark("floor", "white", "#666"),
    Mark("fastest peer", "#e6862b", "#a05a14"),
    Mark("trainkernel, 1 step a launch", "#9ecae8", "#2a6fa8"),
    Mark("trainkernel, many steps", "#2a6fa8", "#17456c"),
)


@dataclass(frozen=True)
class Line:
    """The fastest rows of one workload; None where there is none."""

    workload: str
    floor: Row | None
    peer: Row
    single: Row | None
    many: Row | None

    @property
    def times_us(self) -> list[float | None]:
        """In the order of ``MARKS``."""
        rows = (self.floor, self.peer, self.single, self.many)
        return [None if row is None else float(row["us_per_step"]) for row in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not up to date")
    check = parser.parse_args(arguments).check
    files = wanted_files(reports())
    old = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in old:
        if check:
            print(f"{path.relative_to(ROOT)} is not up to date: run python bench/report.py")
        else:
            path.write_text(files[path])
    return 1 if check and old else 0


def reports() -> list[dict[str, Any]]:
    """The files of ``run_steps.py``."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    return [report for report in found if any(row.get("workload") in WORKLOADS for row in report["rows"])]


def wanted_files(found: list[dict[str, Any]]) -> dict[Path, str]:
    """Texts of the README and the plots."""
    files: dict[Path, str] = {}
    sections = []
    for report in found:
        lines = list(lines_of(report["rows"]))
        if not lines:
            continue
        device = report["device"]
        plot = ROOT / "docs" / f"steps_{device.split()[-1].lower()}.svg"
        files[plot] = draw(f"Time per training step, {device}", MARKS, {line.workload: line.times_us for line in lines})
        sections.append(section(report, lines, plot))
    text = (
        "\n".join(sections) or "No results with all peers yet: `python bench/run_steps.py --workload all` makes them.\n"
    )
    return {README: between_markers(README.read_text(), text), **files}


def lines_of(rows: list[Row]) -> Iterator[Line]:
    """What the table says, in the order of the workloads."""
    for name, workload in WORKLOADS.items():
        mine = [row for row in rows if row["workload"] == name and row["precision"] == workload.dtype]
        ours = [row for row in mine if row["runner"] == OURS]
        peer = fastest(row for row in mine if is_peer(row))
        if peer is None or not any(row["runner"].startswith("jax") for row in mine):
            continue
        yield Line(
            name,
            fastest(row for row in mine if row["runner"] == FLOOR),
            peer,
            fastest(row for row in ours if row["steps_per_launch"] == 1),
            fastest(row for row in ours if row["steps_per_launch"] > 1),
        )


# ---------------------------------------------------------------------------- text


def section(report: dict[str, Any], lines: list[Line], plot: Path) -> str:
    """A device's paragraph, table and plot."""
    versions = report["versions"]
    introduction = (
        f"Microseconds per training step on one {report['device']} (driver {report['driver']}, torch "
        f"{versions.get('torch', '-')}, JAX {versions.get('jax', '-')}, {report['date'][:10]}). Each row is from one "
        "run, with equal losses after 20 steps. The best peer is the fastest of those measured: torch eager and in a "
        "CUDA graph (perceptrons), jax.jit, and jax.lax.scan over 100 or 1000 steps; float32 products are float32 in "
        "all. The factor is the best peer's time over trainkernel's best; the floor is a model: barriers, memory "
        "traffic and products at the peak rate. A dash stands for what was not measured."
    )
    text = [
        textwrap.fill(introduction, 120),
        "",
        "| workload | step | best peer | | trainkernel, one step a launch | many steps | factor | floor |",
        "|---|---|---|---|---|---|---|---|",
        *(table_row(line) for line in lines),
        "",
        f"![The same numbers as a plot]({plot.relative_to(ROOT).as_posix()})",
    ]
    return "\n".join(text) + "\n"


def table_row(line: Line) -> str:
    floor, peer, single, many = line.times_us
    ours = [time for time in (single, many) if time is not None]
    factor = f"**{peer / min(ours):.2f}×**" if peer and ours else "-"
    name = PEER_NAMES[line.peer["runner"]]
    cells: list[str] = [line.workload, WORKLOADS[line.workload].summary, name]
    cells += [shown(time) for time in (peer, single, many)] + [factor, shown(floor)]
    return f"| {' | '.join(cells)} |"


def shown(time_us: float | None) -> str:
    """Three digits."""
    if time_us is None:
        return "-"
    return f"{time_us:,.0f}" if time_us >= 100 else f"{time_us:.1f}" if time_us >= 10 else f"{time_us:.2f}"


def between_markers(page: str, text: str) -> str:
    """The page with another text between the markers."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{README.name} needs one line '{BEGIN} ...' and one '{END}'")
    start = page.index("\n", page.index(BEGIN)) + 1
    return f"{page[:start]}\n{text}\n{page[page.index(END) :]}"


if __name__ == "__main__":
    sys.exit(main())
