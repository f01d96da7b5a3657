"""The schedule: tasks, and the stages that barriers separate.

A **task** is one piece of work with its fused producers and epilogue; a **stage** is the tasks
that run side by side between two barriers; a **scope** says who meets at the barrier.
``trainkernel.fusion`` forms tasks, ``trainkernel.placement`` says where buffers live, and
``build_schedule`` here orders tasks into stages by their hazards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from trainkernel.dtypes import DTYPES
from trainkernel.ir import Loop, Operation, Program, TensorSpec
from trainkernel.near_products import SIXTEEN_BIT_PAD
from trainkernel.options import Options
from trainkernel.product_plans import ProductPlan, ceil_div
from trainkernel.reduction_plans import ReductionPlan, ScanPlan
from trainkernel.region_plans import Split
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
    """In the arena; the memory plan gives the offset. With a ``home``, where the buffer of that name is."""

    home: str | None = None


@dataclass(frozen=True)
class SharedPlace:
    """In the shared memory of the block that computes the rows: a piece's own elements from a byte offset on.

    After every ``row`` elements ``padding`` more are left free, if there is padding.
    """

    offset_bytes: int
    own_elements: int
    row: int = 1
    padding: int = 0

    @property
    def size(self) -> int:
        """Elements with their padding."""
        return self.own_elements + self.own_elements // self.row * self.padding


Place: TypeAlias = InputPlace | OutputPlace | ArenaPlace | SharedPlace


@dataclass(frozen=True)
class Staged:
    """A copy in shared memory of part of a buffer from outside of a region.

    Row ``i`` of the copy for piece ``c`` begins at element ``offset + c * piece_stride + i * row_stride``
    of the buffer; in shared memory rows are ``columns + padding`` elements apart, ``columns`` rounded up
    to 4 where there is padding.
    """

    buffer: str
    offset: int
    rows: int
    columns: int
    row_stride: int
    piece_stride: int
    dtype: str
    padding: int

    @property
    def stride(self) -> int:
        """Elements between rows in shared memory."""
        return -(-self.columns // 4) * 4 + self.padding if self.padding else self.columns

    @property
    def size_bytes(self) -> int:
        return self.rows * self.stride * DTYPES[self.dtype].itemsize_bytes


@dataclass(frozen=True)
class Rounded:
    """A matrix from outside of a region in 16 bits, which each block rounds once for the products of all its pieces.

    Row ``i`` begins at element ``offset + i * row_stride`` of the buffer. In shared memory zeros follow in both
    dims, up to whole steps of tensor cores, so that either may be the depth.
    """

    buffer: str
    offset: int
    rows: int
    columns: int
    row_stride: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns in shared memory, zeros included."""
        return ceil_div(self.rows, 16) * 16, ceil_div(self.columns, 16) * 16

    @property
    def stride(self) -> int:
        """Elements between rows in shared memory."""
        return self.shape[1] + SIXTEEN_BIT_PAD

    @property
    def size_bytes(self) -> int:
        return 2 * self.shape[0] * self.stride


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets in a region's shared memory; scratch begins at ``end_bytes``.

    Attributes
    ----------
    slabs : mapping of buffer name to SharedPlace
        Values that only the region's parts read, and the carries of a loop that stay near from step to step,
        each under the name of the step's input and of its output.
    staged : mapping of Staged to byte offset
        Copies that are fetched for each piece.
    end_bytes : int
    rounded : mapping of Rounded to byte offset
    sums : mapping of buffer name to SharedPlace
        Where a block's partial result stays until its last piece, element by element in the thread that adds to it.
    kept : mapping of Staged to byte offset
        Copies that are fetched once, before a loop's first step: of what no step changes, and of carries.
    returned : frozenset of Staged
        Those of carries, which are written to their arrays after the last step.
    """

    slabs: Mapping[str, SharedPlace]
    staged: Mapping[Staged, int]
    end_bytes: int
    rounded: Mapping[Rounded, int] = field(default_factory=dict)
    sums: Mapping[str, SharedPlace] = field(default_factory=dict)
    kept: Mapping[Staged, int] = field(default_factory=dict)
    returned: frozenset[Staged] = frozenset()

    @cached_property
    def copies(self) -> Mapping[Staged, int]:
        """All staged copies, however often they are fetched."""
        return {**self.staged, **self.kept}

    def at(self, copy: Staged | Rounded) -> int:
        """The byte offset of a copy."""
        return self.copies[copy] if isinstance(copy, Staged) else self.rounded[copy]


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
        ``"pointwise"``, ``"reduction"``, ``"product"``, ``"scan"``, ``"copy"``, ``"loop"`` or ``"region"``.
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
    region : BlockRegion or None
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
    region: BlockRegion | None = None

    @property
    def operations(self) -> tuple[Operation, ...]:
        return ((self.root,) if self.root else ()) + self.members

    def __str__(self) -> str:
        if self.copy is not None:
            source = "zeros" if self.copy.source is None else str(self.copy.source)
            return f"copy {self.name}: {source} -> {_format_place(self.copy.destination)}, {self.num_pieces} pieces"
        if self.region is not None:
            return f"region of {self.region.split}, {len(self.region.parts)} parts"
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


def are_row_group(split: Split, parts: Sequence[Task]) -> bool:
    """Whether the parts of a region are no products and leave no partial results."""
    sums = (part.plan for part in parts if part.plan is not None)
    return split.pieces > 1 and all(isinstance(plan, ReductionPlan) and plan.partials == 1 for plan in sums)


@dataclass(frozen=True)
class BlockRegion:
    """Tasks that one block computes for its rows, one after another.

    Attributes
    ----------
    split : Split
    parts : tuple of Task
        In order; ``waits[i]`` says whether a block barrier stands before part ``i``, ``waits[-1]``
        whether one ends the piece. Part 0 always waits for the staged copies.
    aligned : frozenset of str
        Buffers of which every part touches the piece's own rows alone.
    shared : SharedLayout
    copies : tuple of tuple of Staged or Rounded
        The copies that each part reads.
    scratch : tuple of str or None
        How each part uses scratch: ``"write"``, or ``"read"`` if it waits by itself before it writes there.
    first_warps : tuple of int
        The warp with which each part begins: parts that need few warps have different ones until a barrier.
    """

    split: Split
    parts: tuple[Task, ...]
    waits: tuple[bool, ...]
    aligned: frozenset[str]
    shared: SharedLayout
    copies: tuple[tuple[Staged | Rounded, ...], ...]
    scratch: tuple[str | None, ...]
    first_warps: tuple[int, ...]

    @property
    def is_row_group(self) -> bool:
        """Whether the region has no product and no partial result: parts that others like them may resemble."""
        return are_row_group(self.split, self.parts)

    @property
    def copied(self) -> frozenset[str]:
        """The buffers of which a piece, or the block's first one, has copies in shared memory."""
        return frozenset({copy.buffer for copy in self.shared.staged} | {copy.buffer for copy in self.shared.rounded})

    @property
    def partial(self) -> str:
        """The C variable that counts the partial results of sums over the label."""
        return "piece" if self.split.slices == 1 else "partial"

    @property
    def adds(self) -> str | None:
        """The C condition under which a partial result is added to what the block's pieces before left there."""
        return f"piece % {self.split.slices} != 0" if self.split.slices > 1 else None

    def warp(self, part: Task, threads: int) -> str:
        """The C expression of a warp's number in a part."""
        first, warps = self.first_warps[self.parts.index(part)], threads // 32
        return f"(threadIdx.x / 32 + {warps - first}) % {warps}" if first else "threadIdx.x / 32"

    @property
    def ends(self) -> str:
        """The C condition under which a piece is the last one of a partial result."""
        return f"piece % {self.split.slices} == {self.split.slices - 1}"

    def is_first(self, block: str) -> str:
        """The C condition under which a piece is the first one of the block with the number ``block``."""
        return f"piece == (int){self.first_piece(block)}"

    def first_piece(self, block: str) -> str:
        """The C expression of the first piece of the block with the number ``block``."""
        return f"{block} * {self.split.slices}" if self.split.slices > 1 else block


def runs_whole(part: Task) -> bool:
    """Whether a part is no run of rows: it goes through all of its own pieces, in a region of one piece."""
    if part.kind == "product":
        return isinstance(part.plan, ProductPlan) and part.plan.path != "block"
    return part.kind == "scan" or (isinstance(part.plan, ReductionPlan) and part.plan.path == "scatter")


@dataclass(frozen=True)
class LoopSchedule:
    """A Loop's body, scheduled: its inputs and outputs are places of the surrounding program."""

    loop: Loop
    schedule: Schedule

    @property
    def name(self) -> str:
        """The first output's buffer: two loops may have one ``Loop.name``, never one buffer."""
        return self.loop.outputs[0].buffer

    @property
    def keeper(self) -> BlockRegion | None:
        """The region that is a whole step and keeps values near from step to step, if there is one."""
        tasks = [task for stage in self.schedule.stages for task in stage.tasks]
        region = tasks[0].region if len(tasks) == 1 else None
        return region if region is not None and region.shared.kept else None


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
        """All tasks in stage order: those of loop bodies in the place of their loop, the parts of regions in theirs."""
        found: list[Task] = []
        for stage in self.stages:
            for task in stage.tasks:
                if task.region is not None:
                    found.extend(task.region.parts)
                    continue
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
            if task.region is not None:
                lines += [f"{indent}    {part}" for part in task.region.parts]
            if task.loop is not None:
                lines += _format_stages(task.loop.schedule, indent + "    ")
    return lines
