"""The report of a kernel's stages: what it counts, what stamps add, and how it is shown."""

from __future__ import annotations

import importlib
import json
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import trainkernel as tk
from trainkernel import Program, ProgramBuilder, TensorSpec
from trainkernel.codegen import generate
from trainkernel.errors import DeviceError, LaunchError, OptionError
from trainkernel.inspection import KernelReport, StageReport, inspect_kernel, loop_steps
from trainkernel.inspection_views import format_html, format_text, format_trace
from trainkernel.measurement import measure, with_stamps
from trainkernel.mlp import mlp_step
from trainkernel.sample_arrays import sample_inputs
from trainkernel.stamps import Stamps, decode_stamps, read_stamps, stamps_bytes
from trainkernel.target import Target

HOSTILE = "<script>alert('&\"')</script>"


def rows_step() -> Program:
    return mlp_step((6, 5, 3), 8, loss="mse", optimizer="sgd").program


def counted_loop(length: int | None) -> Program:
    """A loop over rows whose body needs two grid barriers; its length is a scalar if none is given."""
    inner = ProgramBuilder()
    w, x = inner.input("w", (256, 256)), inner.input("x", (256, 256))
    body = inner.build([inner.op("tanh", inner.op("mm", w, inner.op("mm", x, w)))])
    b = ProgramBuilder()
    start, rows = b.input("start", (256, 256)), b.input("rows", (7, 256, 256))
    steps: Any = b.scalar("steps", "int32") if length is None else length
    return b.build(b.loop(body, [start, rows], num_carry=1, num_xs=1, length=steps))


def small_loop() -> Program:
    """As ``counted_loop``, and quick to emulate."""
    inner = ProgramBuilder()
    w, x = inner.input("w", (4, 600)), inner.input("x", (4, 1))
    total = inner.op("sum", w, dims=(0,))
    body = inner.build([inner.op("sub", w, inner.op("mul", inner.op("tanh", total), x))])
    b = ProgramBuilder()
    start, rows = b.input("start", (4, 600)), b.input("rows", (7, 4, 1))
    return b.build(b.loop(body, [start, rows], num_carry=1, num_xs=1, length=b.scalar("steps", "int32")))


def stamped(report: KernelReport) -> list[str]:
    """What the stamps stand before, as the report walks."""

    def walk(stages: Iterable[StageReport]) -> Iterator[str]:
        for stage in stages:
            if stage.barrier is not None and stage.barrier.scope == "grid":
                yield "grid barrier"
            yield f"stage {stage.number}"
            yield from (part.name for part in stage.parts)
            if stage.loop is not None:
                yield from walk(stage.loop.stages)
                if stage.loop.back_edge is not None and stage.loop.back_edge.scope == "grid":
                    yield "grid barrier"

    return list(walk(report.stages))


def emulated_workspace(program: Program, inputs: list[Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> bytes:
    """The workspace that an emulated kernel with stamps leaves."""
    module: Any = importlib.import_module("trainkernel.emulator.emulate")
    bind, found = module._bind, []

    def catching(*arguments: Any) -> Any:
        found.append(bind(*arguments))
        return found[-1]

    monkeypatch.setattr(module, "_bind", catching)
    tk.emulator.run(program, inputs, stamps=True, **options)
    return bytes(found[0].workspace.bytes)


# ---------------------------------------------------------------------------- counted


def test_a_product_is_counted_by_hand() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (64, 32)), b.input("w", (32, 48))
    report = inspect_kernel(generate(b.build([b.op("tanh", b.op("mm", x, w))]), target=Target.preset("sm_90a")))
    (stage,) = report.stages
    assert (stage.scope, stage.barrier, stage.loop) == ("grid", None, None)
    assert stage.work.read_bytes == 4 * (64 * 32 + 32 * 48)
    assert stage.work.written_bytes == 4 * 64 * 48
    assert stage.work.flops >= 2 * 64 * 32 * 48
    assert stage.estimated.duration_us > 0 and report.estimated_us == stage.estimated.end_us


def test_a_gather_reads_the_rows_that_it_takes() -> None:
    b = ProgramBuilder()
    table, rows = b.input("table", (10_000, 8)), b.input("rows", (16,), "int32")
    report = inspect_kernel(generate(b.build([b.op("take", table, rows)])))
    assert report.stages[0].work.read_bytes == 4 * 16 * 8 + 4 * 16


def test_a_batched_product_counts_its_batch() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (5, 64, 32)), b.input("w", (5, 32, 48))
    report = inspect_kernel(generate(b.build([b.op("bmm", x, w)])))
    assert report.stages[0].work.flops == 5 * 2 * 64 * 32 * 48


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_region_has_its_split_and_parts(pieces: int) -> None:
    report = inspect_kernel(generate(rows_step(), region_pieces=pieces))
    first = report.stages[0]
    assert first.split is not None and first.split.pieces == pieces
    assert first.scope == ("block" if not first.tasks else "grid and block")
    assert len(first.parts) > 2 and any(part.waits for part in first.parts)
    ends = [part.estimated.end_us for part in first.parts]
    assert ends == sorted(ends) and ends[-1] <= first.estimated.end_us + 1e-9
    said = format_text(report)
    assert f"region of label {first.split.label}, {first.split}, {len(first.parts)} parts" in said
    assert all(part.name in said for part in first.parts) and "after a block barrier" in said
    if pieces > 1:
        assert report.stages[1].barrier is not None and report.stages[1].barrier.scope == "grid"


def test_values_in_shared_memory_are_not_read() -> None:
    generated = generate(rows_step(), region_pieces=1)
    region = generated.schedule.stages[0].tasks[0].region
    assert region is not None and region.shared.slabs
    parts = {part.name: part for part in inspect_kernel(generated).stages[0].parts}
    for task in region.parts:
        if set(task.stores) <= set(region.shared.slabs):
            assert parts[task.name].work.written_bytes == 0


def test_a_loop_counts_all_of_its_steps() -> None:
    generated = generate(counted_loop(7))
    report = inspect_kernel(generated)
    (stage,) = [stage for stage in report.stages if stage.loop is not None]
    loop = stage.loop
    assert loop is not None and (loop.length, loop.steps) == (7, 7)
    step_us = (loop.back_edge.estimated if loop.back_edge else loop.stages[-1].estimated).end_us
    assert stage.estimated.duration_us == pytest.approx(7 * (step_us - stage.estimated.start_us))
    assert stage.work.flops == 7 * sum(inner.work.flops for inner in loop.stages)
    assert f"loop {loop.name}, 7 times" in format_text(report)
    numbers = [each.number for each in report.stages[: report.stages.index(stage) + 1]]
    assert [inner.number for inner in loop.stages] == [numbers[-1] + 1 + i for i in range(len(loop.stages))]


@pytest.mark.parametrize(("most", "steps"), [(None, 7), (3, 3), (10**30, 7)])
def test_a_length_by_value_is_stated(most: int | None, steps: int) -> None:
    generated = generate(counted_loop(None))
    chosen = loop_steps(generated, most)
    assert chosen == {2: steps}
    said = format_text(inspect_kernel(generated, chosen))
    assert "The length steps of the loop " in said and f"is taken to be {steps}." in said


PROGRAMS = {
    "rows": (rows_step, {"region_pieces": 4}),
    "one block": (rows_step, {"region_pieces": 1}),
    "grid": (rows_step, {"region_pieces": 0}),
    "loop": (lambda: counted_loop(7), {}),
    "small loop": (small_loop, {"region_pieces": 0}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_report_walks_as_the_source_stamps(name: str) -> None:
    make, options = PROGRAMS[name]
    generated = generate(make(), stamps=True, **options)
    assert stamped(inspect_kernel(generated)) == list(generated.stamps)


# ---------------------------------------------------------------------------- stamps


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def test_stamps_are_decoded() -> None:
    """2 cycles per nanosecond, from 1000 ns and 50 cycles on; whatever lies before does not matter."""
    workspace = b"\xff" * 512 + words(1000, 50, 6000, 10050, 50, 2050, 8050)
    stamps = decode_stamps(workspace, 3)
    assert stamps == Stamps(5.0, (0.0, 1.0, 4.0))
    assert stamps.intervals_us == (1.0, 3.0, 1.0)
    assert decode_stamps(workspace[-stamps_bytes(3) :], 3) == stamps


@pytest.mark.parametrize("clocks", [(0, 0, 0, 0), (1000, 50, 1000, 90), (1000, 90, 2000, 50)])
def test_a_workspace_without_stamps_is_refused(clocks: tuple[int, ...]) -> None:
    with pytest.raises(LaunchError, match="no time lies between them"):
        decode_stamps(words(*clocks, 0), 1)


class FakeBound:
    """A workspace whose launches take longer each time."""

    def __init__(self, num_stamps: int, arena_bytes: int) -> None:
        self._num_stamps, self._arena = num_stamps, b"\x01" * arena_bytes
        self.launches = 0

    def launch(self) -> None:
        self.launches += 1

    def read_workspace(self, size_bytes: int, offset_bytes: int = 0) -> bytes:
        step = 1000 * self.launches
        end = step * (self._num_stamps + 1)
        stamps = [step * (number + 1) for number in range(self._num_stamps)]
        workspace = self._arena + words(0, 0, end, end, *stamps)
        return workspace[offset_bytes : offset_bytes + size_bytes]


def test_stamps_of_launches_become_medians() -> None:
    generated = generate(rows_step(), region_pieces=4, stamps=True)
    kernel = tk.compile(rows_step(), arch="sm_90a", region_pieces=4, stamps=True)
    count = len(generated.stamps)
    bound = FakeBound(count, generated.workspace_bytes - stamps_bytes(count))
    samples = read_stamps(kernel, bound.launch, bound, 3)
    assert [sample.total_us for sample in samples] == [count + 1, 2 * (count + 1), 3 * (count + 1)]
    report = with_stamps(inspect_kernel(generated), samples, "a made up GPU")
    assert (report.measured_us, report.num_launches) == (2 * (count + 1), 3)
    for part in report.stages[0].parts:
        assert part.measured is not None and part.measured.duration_us == pytest.approx(2.0)
    assert report.stages[0].measured is not None
    assert report.stages[0].measured.duration_us == pytest.approx(2.0 * (1 + len(report.stages[0].parts)))
    said = format_text(report)
    assert "a made up GPU: medians of 3 launches" in said
    assert "before the last piece's first part" in said


def test_stamps_of_a_loop_that_took_no_step_are_left_out() -> None:
    generated = generate(small_loop(), region_pieces=0, stamps=True)
    report = inspect_kernel(generated)
    names = stamped(report)
    inside = names.index(f"stage {next(stage for stage in report.stages if stage.loop).number}") + 1
    times = [float(number) if number < inside else -5.0 for number in range(len(names))]
    measured = with_stamps(report, [Stamps(float(len(names)), tuple(times))], "a made up GPU")
    loop = next(stage.loop for stage in measured.stages if stage.loop)
    assert all(stage.measured is None for stage in loop.stages)
    assert format_text(measured) and json.loads(format_trace(measured))
    assert format_html(measured, "x")


@pytest.mark.skipif(not tk.emulator.is_available(), reason="needs a C++ compiler")
def test_the_emulator_stamps_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small_loop()
    generated = generate(program, region_pieces=0, stamps=True)
    inputs = [np.ones((4, 600), np.float32), np.ones((7, 4, 1), np.float32), 5]
    workspace = emulated_workspace(program, inputs, monkeypatch, region_pieces=0)
    stamps = decode_stamps(workspace, len(generated.stamps))
    report = with_stamps(inspect_kernel(generated, {2: 5}), [stamps], "the emulator")
    stage = next(stage for stage in report.stages if stage.loop is not None)
    assert stage.loop is not None and stage.measured is not None and stage.loop.steps == 5
    for inner in stage.loop.stages:
        assert inner.measured is not None
        assert inner.measured.start_us > stage.measured.start_us
        assert inner.measured.end_us <= stage.measured.end_us
    last_step_us = stage.measured.end_us - stage.loop.stages[0].measured.start_us  # type: ignore[union-attr]
    assert last_step_us < 0.5 * stage.measured.duration_us
    said = format_text(report)
    assert "a step, on average" in said and "the last step:" in said


@pytest.mark.skipif(not tk.emulator.is_available(), reason="needs a C++ compiler")
def test_the_emulator_stamps_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    step = mlp_step((6, 5, 3), 8, loss="mse", optimizer="sgd")
    generated = generate(step.program, region_pieces=4, stamps=True)
    workspace = emulated_workspace(step.program, step.initial_inputs(), monkeypatch, region_pieces=4)
    report = with_stamps(inspect_kernel(generated), [decode_stamps(workspace, len(generated.stamps))], "the emulator")
    first = report.stages[0]
    assert first.measured is not None and first.parts
    assert all(part.measured is not None and part.measured.end_us <= first.measured.end_us for part in first.parts)
    assert report.stages[1].barrier is not None and report.stages[1].barrier.measured is not None


# ---------------------------------------------------------------------------- inputs of a measured run


def test_inputs_of_a_measured_run() -> None:
    b = ProgramBuilder()
    x = b.input_view(TensorSpec("x", (4, 3), (1, 8)))
    h, i, flag = b.input("h", (5,), "bfloat16"), b.input("i", (6,), "int32"), b.input("flag", (2,), "bool")
    rate = b.scalar("rate")
    program = b.build([b.op("mul", x, rate), b.op("neg", h), b.op("neg", i), b.op("where", flag, 1.0, 2.0)])
    values = sample_inputs(program, {})
    assert values[0].shape == (3 + 2 * 8 + 1,) and values[0].dtype == np.float32
    assert np.abs(values[0]).max() <= 1 and np.unique(values[0]).size > 10
    assert values[1].dtype == tk.dtypes.DTYPES["bfloat16"].numpy
    assert not values[2].any() and not values[3].any() and values[4] == 1
    assert sample_inputs(counted_loop(None), {2: 7})[2] == 7


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(DeviceError, match="compiled for an architecture alone"):
        measure(tk.compile(rows_step(), arch="sm_90a", stamps=True), {})
    with pytest.raises(DeviceError, match="for device 'reference'"):
        measure(tk.compile(rows_step(), device="reference"), {})
    kernel = tk.compile(rows_step(), arch="sm_90a")
    kernel.device = "cuda:0"
    with pytest.raises(OptionError, match="stamps=True"):
        measure(kernel, {})


# ---------------------------------------------------------------------------- page and trace


class Page(HTMLParser):
    """The tags and attributes of a page; all but void tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def with_hostile_names(report: KernelReport) -> KernelReport:
    """Programs refuse such names; whoever makes reports otherwise might not."""
    stages = []
    for stage in report.stages:
        parts = tuple(replace(part, name=HOSTILE, how=HOSTILE) for part in stage.parts)
        tasks = tuple(replace(task, name=HOSTILE) for task in stage.tasks)
        loop = None if stage.loop is None else replace(stage.loop, name=HOSTILE, length=HOSTILE)
        stages.append(replace(stage, parts=parts, tasks=tasks, loop=loop))
    return replace(report, stages=tuple(stages), target=HOSTILE, device=HOSTILE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_page_holds_all_by_itself_and_no_name_is_markup(name: str) -> None:
    make, options = PROGRAMS[name]
    report = with_hostile_names(inspect_kernel(generate(make(), **options)))
    page = format_html(report, HOSTILE)
    assert "<script" not in page and "&lt;script&gt;" in page
    parsed = Page(page)
    assert not {"script", "img", "link", "a", "iframe"} & set(parsed.tags)
    assert {key for key, _ in parsed.attributes} <= {"lang", "charset", "class", "style", "title"}
    assert "://" not in page and "url(" not in page
    assert "estimated, not measured" in page
    assert ('class="part"' in page) == any(stage.parts for stage in report.stages)


def test_a_measured_page_says_so() -> None:
    generated = generate(rows_step(), region_pieces=4, stamps=True)
    count = len(generated.stamps)
    stamps = Stamps(float(count), tuple(float(number) for number in range(count)))
    report = with_stamps(inspect_kernel(generated), [stamps], "cuda:0")
    page = format_html(report, "a step")
    assert "Timeline (measured)" in page and "not measured" not in page
    widths = [
        float(width) for width in re.findall(r'class="(?:stage|barrier)" style="left:[\d.]+%;width:([\d.]+)%"', page)
    ]
    assert sum(widths) == pytest.approx(100, abs=0.01)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("is_measured", [False, True])
def test_a_trace_is_valid(name: str, is_measured: bool) -> None:
    make, options = PROGRAMS[name]
    generated = generate(make(), stamps=True, **options)
    report = inspect_kernel(generated)
    if is_measured:
        count = len(generated.stamps)
        stamps = Stamps(float(count), tuple(float(number) for number in range(count)))
        report = with_stamps(report, [stamps], "cuda:0")
    trace = json.loads(format_trace(report))
    assert trace["otherData"]["source"] == ("measured" if is_measured else "estimated")
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"stages", "parts"}
    bars = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in bars)
    assert any(event["tid"] == 2 for event in bars) == any(stage.parts for stage in report.stages)
    for tid in (1, 2):  # bars of a thread follow each other or lie inside each other
        own = sorted((event for event in bars if event["tid"] == tid), key=lambda event: (event["ts"], -event["dur"]))
        ends: list[float] = []
        for event in own:
            end = event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"] + 1e-5:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-5, event
            ends.append(end)
