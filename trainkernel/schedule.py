"""The schedule: tasks, and the stages that barriers separate.

A **task** is one piece of work with its fused producers and epilogue; a **stage** is the tasks
that run side by side between two barriers; a **scope** says who meets at the barrier.
``trainkernel.fusion`` forms tasks, ``trainkernel.placement`` says where buffers live, and
``build_schedule`` here orders tasks into stages by their hazards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from trainkernel.ir import Loop, Operation, Program, TensorSpec
from trainkernel.options import Options
from trainkernel.products import ProductPlan, ReductionPlan, ScanPlan
from trainkernel.target import Target


@dataclass(frozen=True)
class InputPlace:
    """In the caller's array of a program input."""

    input_index: int


@dataclass(frozen=True)
class OutputPlace:
    """In the caller's array of a program output."""

    output_index: int


@dataclass(frozen=True)
class ArenaPlace:
    """In the arena; the memory plan gives the offset."""


Place: TypeAlias = InputPlace | OutputPlace | ArenaPlace


@dataclass(frozen=True)
class Copy:
    """What a copy task moves: a view of a stored buffer (None: zeros) to a dense destination.

    ``destination`` is a program output's or input's array, or a buffer (a loop's carry).
    """

    source: TensorSpec | None
    destination: OutputPlace | InputPlace | str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Attributes
    ----------
    kind : str
        ``"pointwise"``, ``"reduction"``, ``"product"``, ``"scan"``, ``"copy"`` or ``"loop"``.
    name : str
        The buffer it is best known by.
    root : Operation or None
        The product, reduction or scan whose result the members continue.
    members : tuple of Operation
        Pointwise operations evaluated at the task's own index, in order.
    stores : tuple of str
        Buffers written, in order.
    reads : tuple of str
        Buffers read from memory.
    inlined : tuple of str
        Buffers of pointwise operations evaluated inside this task and stored nowhere.
    num_elements, num_pieces : int
        Iteration elements, and the units of work that blocks loop over.
    plan : ProductPlan, ReductionPlan, ScanPlan or None
    copy : Copy or None
    loop : LoopSchedule or None
    """

    kind: str
    name: str
    root: Operation | None = None
    members: tuple[Operation, ...] = ()
    stores: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    inlined: tuple[str, ...] = ()
    num_elements: int = 0
    num_pieces: int = 0
    plan: ProductPlan | ReductionPlan | ScanPlan | None = None
    copy: Copy | None = None
    loop: LoopSchedule | None = None

    @property
    def operations(self) -> tuple[Operation, ...]:
        return ((self.root,) if self.root else ()) + self.members

    def __str__(self) -> str:
        if self.copy is not None:
            source = "zeros" if self.copy.source is None else str(self.copy.source)
            return f"copy {self.name}: {source} -> {_format_place(self.copy.destination)}, {self.num_pieces} pieces"
        if self.loop is not None:
            return f"loop {self.name}: {self.loop.loop.length} x {self.loop.schedule.num_stages} stages"
        parts = [f"{self.kind} {self.name}: stores {', '.join(self.stores)}"]
        if self.root is not None and len(self.members):
            parts.append(f"epilogue {', '.join(op.outputs[0].buffer for op in self.members)}")
        if self.inlined:
            parts.append(f"inlines {', '.join(self.inlined)}")
        parts.append(f"{self.num_pieces} pieces")
        if self.plan is not None:
            parts.append(str(self.plan))
        return "; ".join(parts)


def _format_place(place: OutputPlace | InputPlace | str) -> str:
    if isinstance(place, OutputPlace):
        return f"output {place.output_index}"
    if isinstance(place, InputPlace):
        return f"input {place.input_index} (in place)"
    return place


@dataclass(frozen=True)
class Stage:
    """Tasks without hazards among each other; ``scope`` says who meets at the barrier before it."""

    tasks: tuple[Task, ...]
    scope: str = "grid"

    @property
    def num_pieces(self) -> int:
        return sum(task.num_pieces for task in self.tasks)


@dataclass(frozen=True)
class LoopSchedule:
    """A Loop's body, scheduled: its inputs and outputs are places of the surrounding program."""

    loop: Loop
    schedule: Schedule

    @property
    def name(self) -> str:
        """The first output's buffer: two loops may have one ``Loop.name``, never one buffer."""
        return self.loop.outputs[0].buffer


@dataclass(frozen=True)
class Schedule:
    """Stages of one program (or of one loop body), and where its buffers live.

    Attributes
    ----------
    program : Program
        The lowered program that the tasks compute.
    stages : tuple of Stage
    places : mapping of buffer name to Place
        For every stored buffer and every input; buffers evaluated inside consumers have none.
    inlined : mapping of buffer name to Operation
        Pointwise operations evaluated inside their consumers.
    inplace_outputs : mapping of output index to input index
    direct_outputs, direct_state_commits : int
        Outputs that a task writes straight, and those among them that are in place.
    target, options
    """

    program: Program
    stages: tuple[Stage, ...]
    places: Mapping[str, Place]
    inlined: Mapping[str, Operation]
    inplace_outputs: Mapping[int, int]
    direct_outputs: int
    direct_state_commits: int
    target: Target
    options: Options

    @property
    def num_stages(self) -> int:
        """Stages, those of loop bodies counted once."""
        return sum(
            1 + sum(task.loop.schedule.num_stages - 1 for task in stage.tasks if task.loop is not None)
            for stage in self.stages
        )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks in stage order, those of loop bodies in the place of their loop."""
        found: list[Task] = []
        for stage in self.stages:
            for task in stage.tasks:
                found.append(task)
                if task.loop is not None:
                    found.extend(task.loop.schedule.tasks)
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(_format_stages(self, ""))


def _format_stages(schedule: Schedule, indent: str) -> list[str]:
    lines = []
    for number, stage in enumerate(schedule.stages):
        lines.append(f"{indent}stage {number} ({stage.scope}, {stage.num_pieces} pieces)")
        for task in stage.tasks:
            lines.append(f"{indent}  {task}")
            if task.loop is not None:
                lines += _format_stages(task.loop.schedule, indent + "    ")
    return lines
