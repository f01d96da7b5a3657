"""A KernelReport as text, as a page of HTML with a timeline, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trainkernel.inspection import BarrierReport, Interval, KernelReport, LoopReport, PartReport, StageReport
from trainkernel.work import Work

COLUMNS = ("at least us", "measured us", "bytes read", "written", "flops", "pieces", "what")
_WIDTHS = (11, 11, 14, 14, 15, 7)


@dataclass(frozen=True)
class Row:
    """One line of the table; what it does not know is None."""

    depth: int
    what: str
    estimated_us: float | None = None
    measured_us: float | None = None
    work: Work | None = None
    num_pieces: int | None = None

    def cells(self) -> tuple[str, ...]:
        """Texts for all columns but the last; empty where nothing is known."""
        numbers = () if self.work is None else (self.work.read_bytes, self.work.written_bytes, self.work.flops)
        counts = [f"{number:,}" for number in numbers] or [""] * 3
        pieces = "" if self.num_pieces is None else f"{self.num_pieces:,}"
        return (_us(self.estimated_us), _us(self.measured_us), *counts, pieces)


def _us(microseconds: float | None) -> str:
    return "" if microseconds is None else f"{microseconds:,.3f}"


def _duration(interval: Interval | None) -> float | None:
    return None if interval is None else interval.duration_us


def notes(report: KernelReport) -> list[str]:
    """What the numbers mean, and what was assumed."""
    lines = [
        f"Estimates are lower bounds for {report.target}: bytes at full bandwidth, multiply-adds of products at the "
        "peak rate; in a loop of its first step."
    ]
    if report.measured_us is None:
        lines.append("Nothing was measured: a timeline shows the estimates. --measure measures on a GPU.")
    else:
        lines.append(
            f"Measured on {report.device}: medians of {report.num_launches} launches, of block 0; in a loop those of "
            "its last step, in a region those of the block's last piece. A barrier's time is that of waiting for the "
            "slowest block, too."
        )
    for loop in _loops(report.stages):
        if isinstance(loop.length, str):
            lines.append(f"The length {loop.length} of the loop {loop.name} is taken to be {loop.steps:,}.")
    return lines


def _loops(stages: Iterable[StageReport]) -> Iterator[LoopReport]:
    for stage in stages:
        if stage.loop is not None:
            yield stage.loop
            yield from _loops(stage.loop.stages)


# ---------------------------------------------------------------------------- the table


def rows(report: KernelReport) -> list[Row]:
    """The lines of the table, the whole kernel last."""
    total = Row(0, "the whole kernel", report.estimated_us, report.measured_us)
    return [*_stage_rows(report.stages, 0), total]


def _stage_rows(stages: Iterable[StageReport], depth: int) -> Iterator[Row]:
    for stage in stages:
        if stage.barrier is not None:
            yield _barrier_row(stage.barrier, f"{stage.barrier.scope} barrier", depth)
        measured = _duration(stage.measured)
        title = stage_title(stage)
        yield Row(depth, title, stage.estimated.duration_us, measured, stage.work, stage.num_pieces)
        if stage.parts and stage.parts[0].measured is not None and stage.measured is not None:
            lead_us = stage.parts[0].measured.start_us - stage.measured.start_us
            yield Row(depth + 1, "before the last piece's first part: copies to shared memory", None, lead_us)
        yield from (_part_row(part, depth + 1) for part in (*stage.parts, *stage.tasks))
        if stage.loop is not None:
            yield from _loop_rows(stage, stage.loop, depth + 1)


def stage_title(stage: StageReport) -> str:
    """Number, scope, and how a region or loop is made."""
    title = f"stage {stage.number} ({stage.scope})"
    if stage.split is not None:
        split = stage.split
        title += f": region of label {split.label}, {split}, {len(stage.parts)} parts"
    if stage.loop is not None:
        title += f": loop {stage.loop.name}, {stage.loop.steps:,} times"
    return title


def _barrier_row(barrier: BarrierReport, what: str, depth: int) -> Row:
    return Row(depth, what, barrier.estimated.duration_us, _duration(barrier.measured))


def _part_row(part: PartReport, depth: int) -> Row:
    how = f": {part.how}" if part.how else ""
    waits = "; after a block barrier" if part.waits else ""
    what = f"{part.kind} {part.name}{how}{waits}"
    return Row(depth, what, part.estimated.duration_us, _duration(part.measured), part.work, part.num_pieces)


def _loop_rows(stage: StageReport, loop: LoopReport, depth: int) -> Iterator[Row]:
    if loop.steps:
        measured = None if stage.measured is None else stage.measured.duration_us / loop.steps
        yield Row(depth, "a step, on average", stage.estimated.duration_us / loop.steps, measured)
    yield Row(depth, "the last step:" if stage.measured is not None else "each step:")
    yield from _stage_rows(loop.stages, depth + 1)
    if loop.back_edge is not None:
        yield _barrier_row(loop.back_edge, f"{loop.back_edge.scope} barrier at the end of a step", depth + 1)


def format_text(report: KernelReport) -> str:
    """The notes and the table, for a terminal."""
    lines = [*notes(report), "", _line(COLUMNS[:-1], COLUMNS[-1])]
    lines += [_line(row.cells(), "  " * row.depth + row.what) for row in rows(report)]
    return "\n".join(lines)


def _line(cells: Sequence[str], what: str) -> str:
    return "  ".join([*(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)), what])


# ---------------------------------------------------------------------------- the timeline


@dataclass(frozen=True)
class Bar:
    """Something that takes time: a ``"stage"``, ``"barrier"`` or ``"part"``."""

    kind: str
    name: str
    interval: Interval
    report: StageReport | PartReport | BarrierReport


def bars(stages: Iterable[StageReport], is_measured: bool) -> Iterator[Bar]:
    """The bars of some stages, without those inside loops. Tasks side by side have none of their own."""
    for stage in stages:
        if stage.barrier is not None:
            yield from _bar("barrier", f"{stage.barrier.scope} barrier", stage.barrier, is_measured)
        yield from _bar("stage", stage_title(stage), stage, is_measured)
        for part in stage.parts:
            yield from _bar("part", f"{part.kind} {part.name}", part, is_measured)


def _loop_bars(loop: LoopReport, is_measured: bool) -> Iterator[Bar]:
    yield from bars(loop.stages, is_measured)
    if loop.back_edge is not None:
        name = f"{loop.back_edge.scope} barrier at the end of a step"
        yield from _bar("barrier", name, loop.back_edge, is_measured)


def _bar(kind: str, name: str, report: StageReport | PartReport | BarrierReport, is_measured: bool) -> Iterator[Bar]:
    interval = report.measured if is_measured else report.estimated
    if interval is not None:
        yield Bar(kind, name, interval, report)


def format_trace(report: KernelReport) -> str:
    """JSON that chrome://tracing and ui.perfetto.dev open: one thread for stages, one for parts."""
    is_measured = report.measured_us is not None
    threads = {"stage": 1, "barrier": 1, "part": 2}
    found = [*bars(report.stages, is_measured)]
    for loop in _loops(report.stages):
        found += _loop_bars(loop, is_measured)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
        for number, name in ((1, "stages"), (2, "parts"))
    ]
    for bar in found:
        events.append(
            {
                "ph": "X",
                "name": bar.name,
                "cat": bar.kind,
                "pid": 1,
                "tid": threads[bar.kind],
                "ts": round(bar.interval.start_us, 6),
                "dur": round(bar.interval.duration_us, 6),
                "args": _arguments(bar.report),
            }
        )
    other = {"source": "measured" if is_measured else "estimated", "notes": notes(report)}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}, indent=1) + "\n"


def _arguments(report: StageReport | PartReport | BarrierReport) -> dict[str, Any]:
    found: dict[str, Any] = {"at least us": round(report.estimated.duration_us, 6)}
    if not isinstance(report, BarrierReport):
        work = report.work
        found |= {"bytes read": work.read_bytes, "bytes written": work.written_bytes, "flops": work.flops}
        found["pieces"] = report.num_pieces
    if isinstance(report, StageReport):
        found["tasks"] = [f"{task.kind} {task.name}" for task in report.tasks]
    return found


# ---------------------------------------------------------------------------- HTML

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
table { border-collapse: collapse; }
td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
td:last-child, th:last-child { text-align: left; }
.lane { position: relative; height: 26px; margin: 3px 0; background: #f2f2f2; }
.lane div { position: absolute; top: 0; height: 26px; min-width: 1px; overflow: hidden; white-space: nowrap;
  font-size: 11px; line-height: 26px; box-sizing: border-box; border-left: 1px solid #fff; }
.stage { background: #8fb8de; } .barrier { background: #e0a08f; } .part { background: #a9d3a0; }
"""


def format_html(report: KernelReport, title: str) -> str:
    """One self-contained page: notes, a timeline of the kernel and of a step of each loop, the table."""
    is_measured = report.measured_us is not None
    source = "measured" if is_measured else "estimated, not measured"
    figures = [_figure(f"Timeline ({source})", list(bars(report.stages, is_measured)))]
    for loop in _loops(report.stages):
        step = "last step, measured" if is_measured else "a step, estimated, not measured"
        figures.append(_figure(f"Loop {loop.name} ({step})", list(_loop_bars(loop, is_measured))))
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    lines = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>',
        f"<body><h1>{escape(title)}</h1>",
        *(f"<p>{escape(note)}</p>" for note in notes(report)),
        *figures,
        f"<h2>Stages</h2><table><thead><tr>{head}</tr></thead><tbody>",
        *(_table_row(row) for row in rows(report)),
        "</tbody></table></body></html>",
    ]
    return "\n".join(lines) + "\n"


def _table_row(row: Row) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells())
    return f'<tr>{cells}<td style="padding-left:{10 + 20 * row.depth}px">{escape(row.what)}</td></tr>'


def _figure(title: str, found: Sequence[Bar]) -> str:
    start_us = min((bar.interval.start_us for bar in found), default=0.0)
    length_us = max((bar.interval.end_us for bar in found), default=0.0) - start_us
    lines = [f"<h2>{escape(title)}</h2><p>{_us(length_us)} us</p>"]
    for kinds in (("stage", "barrier"), ("part",)):
        lane = [_div(bar, start_us, length_us or 1.0) for bar in found if bar.kind in kinds]
        lines += [f'<div class="lane">{"".join(lane)}</div>'] if lane else []
    return "\n".join(lines)


def _div(bar: Bar, start_us: float, length_us: float) -> str:
    left = 100 * (bar.interval.start_us - start_us) / length_us
    width = 100 * bar.interval.duration_us / length_us
    name = escape(bar.name)
    tip = f"{name}: {_us(bar.interval.duration_us)} us"
    return f'<div class="{bar.kind}" style="left:{left:.4f}%;width:{width:.4f}%" title="{tip}">{name}</div>'
