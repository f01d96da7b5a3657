"""The memory plan: byte offsets of the arena, and the barriers that its reuse needs.

One arena, typed sizes, 256-byte aligned. A buffer lives from the stage that writes it to the
last stage that reads it; space is reused after that, best fit. Barriers are placed where byte
ranges written since the last barrier are read or rewritten, or ranges read are rewritten; for a
loop's body, on its last and first stages of two neighbouring iterations. Where both sides touch
only the rows of their piece, of the same split, the block that owns them needs nobody else: the
barrier is a block barrier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from trainkernel.dtypes import DTYPES
from trainkernel.indexing import Index
from trainkernel.ir import Loop, ScalarSpec, TensorSpec
from trainkernel.region_plans import Split
from trainkernel.schedule import (
    ArenaPlace,
    BlockRegion,
    Copy,
    InputPlace,
    LoopSchedule,
    OutputPlace,
    Schedule,
    SharedPlace,
    Stage,
    Staged,
    Task,
)

Scope: TypeAlias = str | None

HEADER_BYTES = 256
ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class ArenaEntry:
    """One buffer's place in the workspace: offset from its start, and the stages it lives in."""

    offset_bytes: int
    size_bytes: int
    first_stage: int
    last_stage: int


@dataclass(frozen=True)
class MemoryPlan:
    """Arena layout and barriers of one schedule.

    Attributes
    ----------
    entries : mapping of buffer name to ArenaEntry
    loops : mapping of a loop's task name, which is its own, to the plan of its body
    barriers : tuple of str or None
        The scope of the barrier before each stage: ``"grid"``, ``"block"`` or None for no barrier.
    back_edge : str or None
        For a loop body: the scope of the barrier that ends each iteration.
    end_bytes : int
        End of the part of the workspace that this plan uses, header included.
    early : tuple of frozenset of str
        For each stage the buffers whose copies in its region may start before the grid barrier in front of it.
    """

    entries: Mapping[str, ArenaEntry]
    loops: Mapping[str, MemoryPlan]
    barriers: tuple[Scope, ...]
    back_edge: Scope
    end_bytes: int
    early: tuple[frozenset[str], ...] = ()

    @property
    def workspace_bytes(self) -> int:
        return self.end_bytes

    @property
    def grid_barriers(self) -> int:
        """Grid barriers in the source, per pass through each loop's body."""
        own = (*self.barriers, self.back_edge).count("grid")
        return own + sum(plan.grid_barriers for plan in self.loops.values())

    def all_entries(self) -> Iterator[tuple[str, ArenaEntry]]:
        """Entries of this plan and of all loop bodies."""
        yield from self.entries.items()
        for plan in self.loops.values():
            yield from plan.all_entries()

    def __str__(self) -> str:
        lines = [f"workspace {self.end_bytes} bytes, {self.grid_barriers} grid barriers"]
        for name, entry in sorted(self.all_entries(), key=lambda pair: (pair[1].offset_bytes, pair[0])):
            stages = f"stages {entry.first_stage}-{entry.last_stage}"
            lines.append(f"  {entry.offset_bytes:>10} +{entry.size_bytes:<10} {name} ({stages})")
        return "\n".join(lines)


# ---------------------------------------------------------------------------- where a buffer is


@dataclass(frozen=True)
class Storage:
    """The memory behind a buffer.

    ``space`` is ``"input"``, ``"output"`` (then ``index`` counts the program's inputs or
    outputs), ``"scalar"``, ``"arena"`` or ``"shared"`` (then ``index`` is a byte offset into the
    workspace or the block's shared memory). Element ``e`` of the buffer is element
    ``e + element_offset + sum(step * stride)`` of it, with one ``(variable, stride)`` for each
    surrounding loop that slices it, and for the piece whose rows lie in shared memory. There, ``padding``
    elements may follow every ``row`` of them, so ``e`` is first moved by the padding before it.
    """

    space: str
    index: int
    dtype: str
    size_bytes: int
    element_offset: int = 0
    steps: tuple[tuple[str, int], ...] = ()
    row: int = 1
    padding: int = 0

    def place(self, index: Index) -> Index:
        """Where the element lies, padding included."""
        if not self.padding:
            return index
        rows, column = divmod(index, self.row)
        return rows * (self.row + self.padding) + column

    def moved(self, elements: int) -> int:
        """A distance of whole rows, or inside of one, padding included."""
        return elements + elements // self.row * self.padding


@dataclass(frozen=True)
class Frame:
    """A schedule in its surroundings: the outermost program, or a loop body inside a parent."""

    schedule: Schedule
    plan: MemoryPlan
    parent: Frame | None = None
    loop: Loop | None = None
    depth: int = 0
    declared: Mapping[str, TensorSpec] = field(default_factory=dict)

    @staticmethod
    def outermost(schedule: Schedule, plan: MemoryPlan) -> Frame:
        return Frame(schedule, plan, declared={spec.buffer: spec for spec in schedule.program.buffers()})

    def inside(self, loop: LoopSchedule, plan: MemoryPlan | None = None) -> Frame:
        """The frame of a loop's body."""
        declared = {spec.buffer: spec for spec in loop.schedule.program.buffers()}
        body_plan = self.plan.loops[loop.name] if plan is None else plan
        return Frame(loop.schedule, body_plan, self, loop.loop, self.depth + 1, declared)

    @property
    def step_name(self) -> str:
        """The C variable that counts this body's iterations."""
        return f"step_{self.depth - 1}"

    @cached_property
    def uniform_buffers(self) -> tuple[str, ...]:
        """Inlined values that depend on scalars by value alone; none in a loop's body."""
        known = {spec.buffer for spec in self.schedule.program.scalar_inputs} if self.parent is None else set()
        found = []
        for name, operation in self.schedule.inlined.items():
            operands = operation.tensor_inputs
            uniform = bool(operands) and all(spec.buffer in known for spec in operands)
            if uniform and operation.outputs[0].num_elements == 1:
                known.add(name)
                found.append(name)
        return tuple(found)

    def storage(self, buffer: str) -> Storage:
        """Where a stored buffer of this frame lives."""
        spec, place = self.declared[buffer], self.schedule.places[buffer]
        size = max(spec.last_index + 1 - spec.offset, 0) * DTYPES[spec.dtype].itemsize_bytes
        if isinstance(place, ArenaPlace):
            return Storage("arena", self.plan.entries[place.home or buffer].offset_bytes, spec.dtype, size)
        if isinstance(place, OutputPlace):
            return self._output(place.output_index, spec.dtype, size)
        if isinstance(place, SharedPlace):
            own_bytes = place.size * DTYPES[spec.dtype].itemsize_bytes
            steps = (("piece", -place.size),) if place.own_elements < spec.num_elements else ()
            return Storage("shared", place.offset_bytes, spec.dtype, own_bytes, 0, steps, place.row, place.padding)
        own = self.schedule.program.inputs[place.input_index].buffer == buffer
        return self._input(place.input_index, spec.offset if own else 0, size)

    def home(self, buffer: str) -> Storage:
        """Where an input of this frame lives in device memory, also while a region keeps it near."""
        spec = self.declared[buffer]
        index = next(index for index, own in enumerate(self.schedule.program.inputs) if own.buffer == buffer)
        return self._input(index, spec.offset, spec.num_elements * DTYPES[spec.dtype].itemsize_bytes)

    def destination(self, place: InputPlace | OutputPlace | str, dtype: str) -> Storage:
        """Where a copy task writes."""
        if isinstance(place, str):
            return self.storage(place)
        if isinstance(place, OutputPlace):
            return self._output(place.output_index, dtype, 0)
        return self._input(place.input_index, 0, 0)

    def _output(self, output_index: int, dtype: str, size: int) -> Storage:
        if self.parent is None or self.loop is None:
            return Storage("output", output_index, dtype, size)
        outer = self.parent.storage(self.loop.outputs[output_index].buffer)
        slice_elements = self.loop.body.outputs[output_index].num_elements
        return _moved(outer, 0, ((self.step_name, slice_elements),), size)

    def _input(self, input_index: int, origin: int, size: int) -> Storage:
        """Storage of an input whose element ``origin`` is the first one of the caller's array."""
        spec = self.schedule.program.inputs[input_index]
        if self.parent is None or self.loop is None:
            if isinstance(spec, ScalarSpec):
                return Storage("scalar", input_index, spec.dtype, 0)
            return Storage("input", input_index, spec.dtype, size, -origin)
        loop = self.loop
        operand = loop.inputs[input_index]
        if loop.num_constants <= input_index < loop.num_constants + loop.num_carry:
            carry = loop.outputs[input_index - loop.num_constants]
            return _moved(self.parent.storage(carry.buffer), -origin, (), size)
        outer = self.parent.storage(operand.buffer)
        steps = ((self.step_name, operand.strides[0]),) if input_index >= loop.num_constants + loop.num_carry else ()
        return _moved(outer, operand.offset - origin, steps, size)


def _moved(storage: Storage, offset: int, steps: tuple[tuple[str, int], ...], size: int) -> Storage:
    return Storage(
        storage.space,
        storage.index,
        storage.dtype,
        size if storage.space != "arena" else storage.size_bytes,
        storage.element_offset + offset,
        storage.steps + steps,
    )


# ---------------------------------------------------------------------------- hazards


@dataclass(frozen=True)
class ByteRange:
    """Part of one memory space; inputs and outputs count as a whole.

    With a ``split``, whoever touches it touches only the rows of its own piece.
    """

    space: str
    start: int
    end: int
    split: Split | None = None

    def overlaps(self, other: ByteRange) -> bool:
        return self.space == other.space and self.start < other.end and other.start < self.end

    def scope(self, other: ByteRange) -> Scope:
        """Who must meet between two touches of which one writes."""
        if not self.overlaps(other):
            return None
        near = self.space == "shared" or (self.split is not None and self == other)
        return "block" if near else "grid"


@dataclass(frozen=True)
class Footprint:
    """Byte ranges that a task, a stage or a stretch of stages reads and writes."""

    reads: frozenset[ByteRange] = frozenset()
    writes: frozenset[ByteRange] = frozenset()

    def __or__(self, other: Footprint) -> Footprint:
        return Footprint(self.reads | other.reads, self.writes | other.writes)

    def outside(self) -> Footprint:
        """Without shared memory, which stages hand on by a rule of their own."""
        reads, writes = (frozenset(i for i in items if i.space != "shared") for items in (self.reads, self.writes))
        return Footprint(reads, writes)

    def scope(self, later: Footprint) -> Scope:
        """The scope of the barrier that must stand between this footprint and a later one."""
        pairs = ((self.writes, later.reads), (self.reads, later.writes), (self.writes, later.writes))
        scopes = {first.scope(second) for ours, theirs in pairs for first in ours for second in theirs}
        return "grid" if "grid" in scopes else "block" if "block" in scopes else None


def byte_range(storage: Storage) -> ByteRange | None:
    """The bytes that a storage covers; None for scalars by value."""
    if storage.space == "scalar":
        return None
    if storage.space in ("arena", "shared"):
        return ByteRange(storage.space, storage.index, storage.index + storage.size_bytes)
    return ByteRange(f"{storage.space}{storage.index}", 0, 1)


def task_footprint(task: Task, frame: Frame) -> Footprint:
    """What one task reads and writes."""
    reads = [_touched(task, name, frame) for name in task.reads]
    writes = [_touched(task, name, frame) for name in task.stores if task.loop is None]
    copies = [task] if task.region is None else task.region.parts
    for part in copies:
        if part.copy is not None:
            writes.append(copied_range(part.copy, frame, task.region))
    if task.region is not None:
        for copy in task.region.shared.kept:
            (writes if copy in task.region.shared.returned else reads).append(kept_range(copy, task.region))
    footprint = Footprint(
        frozenset(item for item in reads if item is not None), frozenset(item for item in writes if item is not None)
    )
    if task.loop is not None:
        inner = frame.inside(task.loop)
        for stage in task.loop.schedule.stages:
            footprint |= stage_footprint(stage, inner)
        footprint = footprint.outside() | _kept_footprint(task.loop, inner)
    return footprint


def kept_range(copy: Staged, region: BlockRegion) -> ByteRange:
    """The bytes of shared memory in which a copy stays from step to step."""
    start = region.shared.kept[copy]
    return ByteRange("shared", start, start + copy.size_bytes)


def home_range(copy: Staged, region: BlockRegion, inner: Frame) -> ByteRange:
    """The bytes of device memory that a copy which stays near is fetched from, and a carry's returned to."""
    place = byte_range(inner.home(copy.buffer))
    assert place is not None
    return replace(place, split=region.split)


def _kept_footprint(loop: LoopSchedule, inner: Frame) -> Footprint:
    """What is fetched before the first step of a loop, and returned after the last."""
    region = loop.keeper
    if region is None:
        return Footprint()
    reads = {home_range(copy, region, inner) for copy in region.shared.kept}
    return Footprint(frozenset(reads), frozenset(home_range(copy, region, inner) for copy in region.shared.returned))


def _touched(task: Task, name: str, frame: Frame) -> ByteRange | None:
    place = byte_range(frame.storage(name))
    if place is not None and task.region is not None and name in task.region.aligned:
        return replace(place, split=task.region.split)
    return place


def copied_range(copy: Copy, frame: Frame, region: BlockRegion | None) -> ByteRange | None:
    """The bytes that a copy writes; inside of a region, the rows of its piece."""
    place = byte_range(frame.destination(copy.destination, copy.dtype))
    return place if place is None or region is None else replace(place, split=region.split)


def stage_footprint(stage: Stage, frame: Frame) -> Footprint:
    """What the tasks of a stage read and write."""
    total = Footprint()
    for task in stage.tasks:
        total |= task_footprint(task, frame)
    return total


# ---------------------------------------------------------------------------- planning


def plan_memory(schedule: Schedule) -> MemoryPlan:
    """Lay out the arena and place the barriers."""
    layout = _layout(schedule, HEADER_BYTES)
    return _with_barriers(Frame.outermost(schedule, layout))


def _align(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _layout(schedule: Schedule, base: int) -> MemoryPlan:
    declared = {spec.buffer: spec for spec in schedule.program.buffers()}
    lifetimes: dict[str, list[int]] = {}
    for number, stage in enumerate(schedule.stages):
        for task in stage.tasks:
            touched = list(task.stores) + list(task.reads)
            copies = [task] if task.region is None else task.region.parts
            touched += [c.copy.destination for c in copies if c.copy and isinstance(c.copy.destination, str)]
            for name in touched:
                place = schedule.places.get(name)
                if isinstance(place, ArenaPlace):
                    lifetimes.setdefault(place.home or name, [number, number])[1] = number
    entries: dict[str, ArenaEntry] = {}
    for name, (first, last) in lifetimes.items():
        spec = declared[name]
        size = _align(spec.num_elements * DTYPES[spec.dtype].itemsize_bytes)
        entries[name] = ArenaEntry(_best_fit(entries.values(), size, first, last, base), size, first, last)
    end = max((entry.offset_bytes + entry.size_bytes for entry in entries.values()), default=base)
    loops: dict[str, MemoryPlan] = {}
    for number, stage in enumerate(schedule.stages):
        for task in stage.tasks:
            if task.loop is None:
                continue
            size = _layout(task.loop.schedule, 0).end_bytes
            live = [*entries.values()]
            start = _best_fit(live, size, number, number, base)
            loops[task.loop.name] = _layout(task.loop.schedule, start)
            end = max(end, start + size)
    return MemoryPlan(entries, loops, (), None, end)


def _best_fit(entries: object, size: int, first: int, last: int, base: int) -> int:
    """Offset of the smallest gap that holds ``size`` among the entries alive in the stages."""
    busy = sorted(
        (entry.offset_bytes, entry.offset_bytes + entry.size_bytes)
        for entry in entries  # type: ignore[attr-defined]
        if entry.first_stage <= last and first <= entry.last_stage
    )
    best: tuple[int, int] | None = None
    cursor = base
    for start, end in busy:
        gap = start - cursor
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, cursor)
        cursor = max(cursor, end)
    return best[1] if best is not None else cursor


def _ends_with_barrier(stage: Stage, plans: Mapping[str, MemoryPlan]) -> bool:
    """Whether a stage is a loop whose every iteration ends with a grid barrier."""
    loops = [task.loop for task in stage.tasks if task.loop is not None]
    return len(loops) == len(stage.tasks) == 1 and plans[loops[0].name].back_edge == "grid"


class _Pending:
    """Footprints since the last barrier of each scope, and from the start to the first one."""

    def __init__(self) -> None:
        self._since = {"grid": Footprint(), "block": Footprint()}
        self._head = {"grid": Footprint(), "block": Footprint()}
        self._open = {"grid", "block"}

    def barrier_before(self, footprint: Footprint) -> Scope:
        """The scope of the barrier that a footprint needs, which is then taken to stand there."""
        scope = self._needed(footprint, footprint)
        passed = {"grid": ("grid", "block"), "block": ("block",), None: ()}[scope]
        for each in passed:
            self._since[each] = Footprint()
            self._open.discard(each)
        return scope

    def _needed(self, grid: Footprint, block: Footprint) -> Scope:
        if self._since["grid"].scope(grid) == "grid":
            return "grid"
        return "block" if self._since["block"].scope(block) else None

    @property
    def written(self) -> frozenset[ByteRange]:
        """What was written since the last grid barrier."""
        return self._since["grid"].writes

    def add(self, footprint: Footprint, ends_with_barrier: bool) -> None:
        """A stage has run; a loop that ends with a barrier leaves nothing to wait for."""
        for scope in ("grid", "block"):
            if scope in self._open:
                self._head[scope] |= footprint
            if not ends_with_barrier:
                self._since[scope] |= footprint

    def back_edge(self) -> Scope:
        """The scope of the barrier between the end and the start."""
        return self._needed(self._head["grid"], self._head["block"])


def _with_barriers(frame: Frame) -> MemoryPlan:
    plan = frame.plan
    loops = dict(plan.loops)
    for stage in frame.schedule.stages:
        for task in stage.tasks:
            if task.loop is not None:
                inner = frame.inside(task.loop)
                loops[task.loop.name] = _with_barriers(inner)
    barriers: list[Scope] = []
    written: list[frozenset[ByteRange]] = []
    pending = _Pending()
    for stage in frame.schedule.stages:
        footprint = stage_footprint(stage, frame)
        written.append(pending.written)
        barriers.append(pending.barrier_before(footprint))
        pending.add(footprint, _ends_with_barrier(stage, loops))
    back_edge = pending.back_edge() if frame.loop is not None else None
    early = []
    # Before its first grid barrier a step does not know what the one before it wrote, unless they meet between.
    knows = frame.loop is None or back_edge == "grid"
    for stage, scope, before in zip(frame.schedule.stages, barriers, written, strict=True):
        early.append(_early_copies(stage, before, frame) if scope == "grid" and knows else frozenset())
        knows |= scope == "grid"
    return MemoryPlan(plan.entries, loops, tuple(barriers), back_edge, plan.end_bytes, tuple(early))


def _early_copies(stage: Stage, written: frozenset[ByteRange], frame: Frame) -> frozenset[str]:
    """The buffers of which a region of the stage has copies and that nobody has written since the last grid barrier."""
    names = {name for task in stage.tasks if task.region is not None for name in task.region.copied}
    places = {name: byte_range(frame.storage(name)) for name in names}
    return frozenset(
        name for name, place in places.items() if place and not any(place.overlaps(other) for other in written)
    )
