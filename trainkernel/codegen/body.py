"""The kernel's body: its statements in the order of execution, and the functions that they call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainkernel.block_ranges import BlockRange, block_ranges, share_of
from trainkernel.codegen.alike import Family, SharedFunction, find_families
from trainkernel.codegen.generated import TaskInfo
from trainkernel.codegen.parameters import ParameterLayout
from trainkernel.codegen.parts import loop_of, runs, step_range
from trainkernel.codegen.regions import Fetch, RegionCopies, emit_rounded, plan_fetches, plan_kept
from trainkernel.codegen.tasks import TaskFunction, emit_task
from trainkernel.codegen.text import INDENT, block, comment
from trainkernel.ir import Program
from trainkernel.memory import Frame, Scope, Storage
from trainkernel.product_plans import ProductPlan
from trainkernel.schedule import BlockRegion, LoopSchedule, Stage, Task, runs_whole
from trainkernel.stamps import NUM_CLOCK_STAMPS

MAX_SPREAD_BLOCKS = 1024
"""The largest grid whose blocks are numbered by multiprocessor."""


@dataclass
class KernelBody:
    """The kernel's statements and task functions, gathered in the order of execution.

    ``num_blocks`` are to be expected, ``block`` is the expression of a block's number. ``emitted`` are the functions
    of the tasks that run by themselves, by the tasks' identities; ``shared`` serves them; ``places`` are ids and
    stages of functions that were registered; ``ticks`` the first ticks of the stages at the top, if launches run parts.
    """

    program: Program
    layout: ParameterLayout
    lines: list[str] = field(default_factory=list)
    emitted: dict[int, TaskFunction] = field(default_factory=dict)
    shared: list[SharedFunction] = field(default_factory=list)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    functions: list[str | SharedFunction] = field(default_factory=list)
    tasks: list[TaskInfo] = field(default_factory=list)
    templates: set[str] = field(default_factory=set)
    shared_bytes: int = 0
    tables_bytes: int = 0
    num_arrivals: int = 0
    num_stages: int = 0
    uses_uniform: bool = False
    shared_in_use: bool = False
    num_blocks: int = 1
    block: str = "blockIdx.x"
    spread_offset: int | None = None
    stamps_offset: int | None = None
    stamps: list[str] = field(default_factory=list)
    ticks: list[str] = field(default_factory=list)

    # Expressions behind storages -----------------------------------------------------------

    def base(self, storage: Storage) -> str:
        if storage.space == "shared":
            return f"slabs + {storage.index}"
        if storage.space == "arena":
            return f"p.workspace + {storage.index}"
        if not self.layout.uses_table:
            prefix = (
                f"in_{self.program.inputs[storage.index].buffer}"
                if storage.space == "input"
                else f"out_{storage.index}"
            )
            return f"p.{prefix}"
        return f"p.tensors[{self.tensor(storage)}]"

    def tensor(self, storage: Storage) -> int:
        """The position of a storage's pointer among the tensors of the parameter block; -1: the workspace."""
        if storage.space == "arena":
            return -1
        return next(
            place
            for place, slot in enumerate(self.layout.slots)
            if slot.kind == storage.space and slot.index == storage.index
        )

    def scalar(self, storage: Storage) -> str:
        return f"p.scalar_{self.program.inputs[storage.index].buffer}"

    # Statements ----------------------------------------------------------------------------

    def stamp(self, what: str, indent: str) -> None:
        """A time stamp before something, where they are asked for."""
        if self.stamps_offset is not None:
            number = NUM_CLOCK_STAMPS + len(self.stamps)
            self.stamps.append(what)
            self.lines.append(f"{indent}tk_stamp(p.workspace + {self.stamps_offset}, {number});")

    def clock(self, number: int) -> None:
        """The stamps of both clocks at the start and the end."""
        if self.stamps_offset is not None:
            self.templates.add("stamps")
            self.lines.append(f"{INDENT}tk_stamp_both(p.workspace + {self.stamps_offset}, {number});")

    def spread(self) -> None:
        """Numbers of blocks that lie far apart where they share a multiprocessor, if they are asked for."""
        if self.spread_offset is not None:
            self.templates.add("spread")
            self.shared_bytes = 8 * MAX_SPREAD_BLOCKS
            self.block = "block"
            arguments = f"barrier, (unsigned*)(p.workspace + {self.spread_offset}), (unsigned*)shared"
            self.lines += [
                f"{INDENT}const int block = tk_spread_block<{MAX_SPREAD_BLOCKS}>({arguments});",
                f"{INDENT}if (block < 0) return;",
            ]

    def emit_tasks(self, frame: Frame) -> None:
        """The functions of the tasks that run by themselves or in row groups, those inside of loops too."""
        for task in (task for stage in frame.schedule.stages for task in stage.tasks):
            if task.loop is not None:
                self.emit_tasks(frame.inside(task.loop))
            elif task.region is None:
                self.emitted[id(task)] = emit_task(task, frame, self.base, self.scalar)
            elif task.region.is_row_group:
                for part in task.region.parts:
                    self.emitted[id(part)] = emit_task(part, frame, self.base, self.scalar, task.region)

    def schedule(self, frame: Frame, indent: str) -> None:
        plan = frame.plan
        ticks = self.ticks if frame.parent is None else []
        for place, (stage, scope) in enumerate(zip(frame.schedule.stages, plan.barriers, strict=True)):
            number = self.num_stages
            self.num_stages += 1
            fetches = {
                id(task): plan_fetches(
                    task.region, frame, self.tensor, self.base, f"tk_copies_{number}", plan.early[place]
                )
                for task in stage.tasks
                if task.region is not None
            }
            early = self.early_calls(stage, fetches, frame)
            title = ["", f"{indent}{comment(_stage_title(number, stage))}"]
            if ticks and loop_of(stage) is None:
                self.lines += [*title, f"{indent}if ({runs(ticks[place])}) {{"]
                self.barrier(scope, number, indent + INDENT, early)
                self.stage(stage, fetches, number, frame, indent + INDENT)
                self.lines.append(f"{indent}}}")
                continue
            self.barrier(scope, number, indent, early)
            self.stamp(f"stage {number}", indent)
            self.lines += title
            if ticks:
                self.part_of_loop(stage, number, ticks[place], frame, indent)
            else:
                self.stage(stage, fetches, number, frame, indent)

    def stage(self, stage: Stage, fetches: Mapping[int, RegionCopies], number: int, frame: Frame, indent: str) -> None:
        """What the blocks do in a stage: a loop, or the pieces of its region, then those of other tasks.

        The region comes first among the stage's tasks: its early copies lie where the others have their scratch.
        """
        loop = loop_of(stage)
        if loop is not None:
            self.loop(loop, frame, indent, "0", self.length(loop, frame))
            return
        alone = [self.emitted[id(task)] for task in stage.tasks if id(task) in self.emitted]
        families = {id(family.functions[0].task): family for family in find_families(self.shared, alone)}
        work: list[Task | Family] = [
            families.get(id(task), task) for task in stage.tasks if id(task) in families or task.region is not None
        ]
        offset = 0
        for one, blocks in zip(work, self.ranges(work, frame), strict=True):
            if isinstance(one, Family):
                self.family(one, number, offset, blocks, frame, indent)
            elif one.region is not None:
                self.region(one.region, fetches[id(one)], number, frame, indent)
            offset += one.num_pieces

    def ranges(self, work: Sequence[Task | Family], frame: Frame) -> list[BlockRange | None]:
        """The blocks that have a stage's tasks, where not all have them one after another."""
        target, threads = frame.schedule.target, frame.schedule.options.threads
        tasks = [[one] if isinstance(one, Task) else [function.task for function in one.functions] for one in work]
        return block_ranges([share_of(own, target, threads) for own in tasks], self.num_blocks)

    def early_calls(self, stage: Stage, fetches: Mapping[int, RegionCopies], frame: Frame) -> list[str]:
        """The statements that copy and round for a stage's region before the grid barrier in front of it."""
        lines, threads = [], frame.schedule.options.threads
        for task in stage.tasks:
            if task.region is None:
                continue
            copies = fetches[id(task)]
            bulk = [group.bulk for group in copies.groups if group.bulk is not None]
            if bulk:
                self.templates.add("bulk")
                self.num_arrivals = max(self.num_arrivals, len(bulk))
            starts = [line for fetch in bulk for line in fetch.early(threads)]
            if copies.rounded and copies.rounds_early:
                starts.append(self.rounding(copies, task.region, self.num_stages - 1, frame))
            if starts:
                split, piece = task.region.split, task.region.first_piece(self.block)
                head = [f"TK_TASK({self.num_stages - 1}, {len(self.tasks)});", f"const int piece = {piece};"]
                lines += block(f"if ({self.block} < {split.partials})", (head if bulk else head[:1]) + starts)
        return lines

    def rounding(self, copies: RegionCopies, region: BlockRegion, stage: int, frame: Frame) -> str:
        """The statement that rounds weights of a region, whose function is registered."""
        name = f"tk_round_{stage}"
        self.functions.append(emit_rounded(copies.rounded, region, frame, self.base, self.scalar, name))
        self.templates.add("tensor_sums")
        steps = "".join(f", step_{depth}" for depth in range(frame.depth))
        return f"{name}(p, shared{steps});"

    def barrier(self, scope: Scope, stage: int, indent: str, early: Sequence[str] = ()) -> None:
        """A barrier of the scope; ``early`` is what a block does between arriving and waiting."""
        if scope == "grid":
            self.stamp("grid barrier", indent)
            if early:
                self.lines.append(f"{indent}tk_grid_barrier_arrive(barrier);  // what nobody writes comes meanwhile")
                self.lines += [f"{indent}{line}" for line in early]
                self.lines.append(f"{indent}if (!tk_grid_barrier_wait(barrier, {stage})) return;")
            else:
                self.lines.append(f"{indent}if (!tk_grid_barrier(barrier, {stage})) return;")
        elif scope == "block":
            self.lines.append(f"{indent}__syncthreads();  // the rows of this block's pieces are complete")
        if scope is not None:
            self.shared_in_use = False

    def register(self, function: TaskFunction, stage: int, scratch: int = 0) -> int:
        """Notes what a task's function needs above some bytes of scratch; returns the task's id."""
        task = function.task
        self.templates |= function.templates
        self.shared_bytes = max(self.shared_bytes, scratch + function.shared_bytes)
        names = tuple(str(operation) for operation in task.operations) or (str(task),)
        self.tasks.append(TaskInfo(stage, task.name, names))
        self.uses_uniform |= function.uses_uniform
        self.places[id(function)] = len(self.tasks) - 1, stage
        return len(self.tasks) - 1

    def function_texts(self, blocks_per_sm: int) -> list[str]:
        """The functions; what serves several tasks stands before the first of them.

        A function that is called has fewer registers. Where two blocks share a multiprocessor's, a product on
        tensor cores would have to keep sums in memory while it multiplies, so it is inlined for each stage.
        """
        texts = []
        for function in self.functions:
            if isinstance(function, SharedFunction):
                ids, stages = zip(*(self.places[id(one)] for one in function.functions), strict=True)
                plan = function.functions[0].task.plan
                inlined = blocks_per_sm > 1 and isinstance(plan, ProductPlan) and plan.on_tensor_cores
                texts.append(function.text(ids, stages, inlined))
            else:
                texts.append(function)
        return texts

    def arguments(self, function: TaskFunction, frame: Frame, scratch: int = 0) -> str:
        """The arguments of a call for ``piece``."""
        uniform = ", u" if function.uses_uniform else ""
        shared = (f", shared + {scratch}" if scratch else ", shared") if function.shared_bytes else ""
        shared = f", shared{shared}" if scratch else shared
        steps = "".join(f", step_{depth}" for depth in range(frame.depth))
        return f"p{uniform}, piece{shared}{steps}"

    def family(
        self, family: Family, stage: int, offset: int, blocks: BlockRange | None, frame: Frame, indent: str
    ) -> None:
        """The pieces of a task, or of tasks that are alike, that a block computes.

        They follow ``offset`` others, unless some blocks have them for themselves.
        """
        first, distance = f"tk_first_piece({self.block}, {offset})" if offset else self.block, "gridDim.x"
        if blocks is not None:
            first = f"tk_range_first({self.block}, {blocks.first}, {blocks.width})"
            distance = f"tk_range_step({blocks.first}, {blocks.width})"
        leader = family.functions[0]
        ids = [self.register(function, stage) for function in family.functions]
        if self.shared_in_use and leader.needs_free_shared:
            self.lines.append(f"{indent}__syncthreads();  // shared is free: the task before may still read it")
        self.shared_in_use |= leader.shared_bytes > 0
        if leader is family.shared.functions[0]:
            self.functions.append(family.shared)
        first_id, _ = self.places[id(family.shared.functions[0])]
        self.lines.append("#pragma unroll 1")
        loop = family.loop(ids, first_id, stage, first, distance, self.arguments(leader, frame))
        self.lines += [f"{indent}{line}" for line in loop]

    def part(self, part: Task, stage: int, frame: Frame, region: BlockRegion) -> list[str]:
        """A part's mark for the emulator and the call of its function for ``piece``."""
        scratch = region.shared.end_bytes
        if id(part) in self.emitted:
            return self.shared_part(self.emitted[id(part)], stage, frame, scratch)
        function = emit_task(part, frame, self.base, self.scalar, region)
        task_id = self.register(function, stage, scratch)
        self.functions.append(function.text(task_id, stage))
        call = f"{function.name(task_id)}({self.arguments(function, frame, scratch)});"
        if runs_whole(part):
            call = f"for (int piece = 0; piece < {part.num_pieces}; ++piece) {call}"
        return [f"TK_TASK({stage}, {task_id});", call]

    def shared_part(self, function: TaskFunction, stage: int, frame: Frame, scratch: int) -> list[str]:
        """A part's mark and the call of the function that serves it and the parts of other groups that are alike."""
        shared, number = next(
            (one, number) for one in self.shared for number, each in enumerate(one.functions) if each is function
        )
        task_id = self.register(function, stage, scratch)
        if number == 0:
            self.functions.append(shared)
        first_id, _ = self.places[id(shared.functions[0])]
        call = shared.call(number, first_id, self.arguments(function, frame, scratch))
        if len(call) > 1:
            call = ["{", *(INDENT + line for line in call), "}"]
        return [f"TK_TASK({stage}, {task_id});", *call]

    @property
    def tensors(self) -> str:
        """The C expression of the tensors' pointers."""
        return "p.tensors" if self.layout.uses_table else "(void* const*)&p + 2"

    def tables(self, fetches: list[Fetch]) -> None:
        """The tables of copies."""
        for fetch in fetches:
            self.functions.append(fetch.table(self.tables_bytes))
            self.tables_bytes += fetch.table_bytes
            self.templates.add("staged")

    def region(self, region: BlockRegion, copies: RegionCopies, stage: int, frame: Frame, indent: str) -> None:
        """The pieces of a region that a block computes, one after another; the parts of each in order."""
        groups = copies.groups
        inner = indent + INDENT
        threads = frame.schedule.options.threads
        self.tables([fetch for group in groups for fetch in group.tables])
        self.shared_bytes = max(self.shared_bytes, region.shared.end_bytes)
        if self.shared_in_use:
            self.lines.append(f"{indent}__syncthreads();  // shared is free: what ran before may still read it")
        slices = region.split.slices
        self.lines += [
            "#pragma unroll 1",
            f"{indent}for (int {region.partial} = {self.block}; {region.partial} < {region.split.partials}; "
            f"{region.partial} += gridDim.x) {{",
        ]
        if slices > 1:
            self.lines += [
                "#pragma unroll 1",
                f"{indent}for (int piece = partial * {slices}; piece < (partial + 1) * {slices}; ++piece) {{",
            ]
        if groups or region.shared.rounded:
            self.lines.append(f"{inner}TK_TASK({stage}, {len(self.tasks)});")
        is_first = region.is_first(self.block)
        for group in groups:
            lines = [fetch.call(threads, self.tensors, is_first) for fetch in group.tables]
            lines += group.bulk.later(threads, is_first) if group.bulk is not None else []
            self.lines += [f"{inner}{line}" for line in lines]
            self.lines.append(f"{inner}tk_cp_async_commit();")
        if copies.rounded and not copies.rounds_early:
            self.lines.append(f"{inner}if ({is_first}) {self.rounding(copies, region, stage, frame)}")
        under_way = len(groups)
        for part, waits in zip(region.parts, region.waits, strict=False):
            lines = self.part(part, stage, frame, region)
            if waits:
                if under_way:
                    bulk = groups[-under_way].bulk
                    under_way -= 1
                    self.lines.append(f"{inner}tk_cp_async_wait<{under_way}>();")
                    if bulk is not None:
                        self.lines.append(f"{inner}tk_arrivals_wait(arrivals, {bulk.arrival});")
                self.lines.append(f"{inner}__syncthreads();")
            self.stamp(part.name, inner)
            self.lines += [f"{inner}{line}" for line in lines]
        if region.waits[-1]:
            self.lines.append(f"{inner}__syncthreads();  // the next piece takes the same shared memory")
        self.lines += [f"{indent}}}"] * (2 if slices > 1 else 1)
        self.shared_in_use = self.shared_bytes > 0

    def length(self, loop: LoopSchedule, frame: Frame) -> str:
        """The C expression of a loop's length."""
        length = loop.loop.length
        return self.scalar(frame.storage(length)) if isinstance(length, str) else str(length)

    def part_of_loop(self, stage: Stage, number: int, tick: str, frame: Frame, indent: str) -> None:
        """The steps of a loop at the top that a launch runs; what stays near does so from its first to its last."""
        loop = loop_of(stage)
        assert loop is not None
        self.lines += step_range(tick, self.length(loop, frame), number, indent)
        self.lines.append(f"{indent}if (first_{number} < end_{number}) {{")
        self.loop(loop, frame, indent + INDENT, f"first_{number}", f"end_{number}")
        self.lines.append(f"{indent}}}")
        self.shared_in_use = True  # where no step ran, that of the stage before may be

    def loop(self, scheduled: LoopSchedule, frame: Frame, indent: str, first: str, end: str) -> None:
        """The steps of a loop from ``first`` to before ``end``."""
        loop, inner = scheduled.loop, frame.inside(scheduled)
        counter = f"count_{inner.depth - 1}"
        step = f"{self.length(scheduled, frame)} - 1 - {counter}" if loop.reverse else counter
        keeper = scheduled.keeper
        carries, constants = (
            plan_kept(keeper, inner, self.tensor, f"tk_copies_{self.num_stages}") if keeper is not None else ([], [])
        )
        self.fetch_kept([*carries, *constants], frame, indent)
        self.lines += [
            "#pragma unroll 1",
            f"{indent}for (int {counter} = {first}; {counter} < {end}; ++{counter}) {{",
            f"{indent}{INDENT}const int {inner.step_name} = {step};",
        ]
        self.shared_in_use |= inner.plan.back_edge is None  # an iteration may follow another directly
        self.schedule(inner, indent + INDENT)
        self.barrier(inner.plan.back_edge, self.num_stages - 1, indent + INDENT)
        self.lines.append(f"{indent}}}")
        self.return_kept(carries, inner, indent)

    def fetch_kept(self, fetches: list[Fetch], frame: Frame, indent: str) -> None:
        """What a block keeps near during a loop, before the first step."""
        if not fetches:
            return
        self.tables(fetches)
        if self.shared_in_use:
            self.lines.append(f"{indent}__syncthreads();  // shared is free: what ran before may still read it")
        threads = frame.schedule.options.threads
        self.lines += [
            f"{indent}if ({self.block} == 0) {{  // what stays near from step to step",
            f"{indent}{INDENT}TK_TASK({self.num_stages}, {len(self.tasks)});",
            *(f"{indent}{INDENT}{fetch.whole_call(threads, self.tensors, back=False)}" for fetch in fetches),
            f"{indent}{INDENT}tk_cp_async_commit();",
            f"{indent}{INDENT}tk_cp_async_wait<0>();",
            f"{indent}}}",
            f"{indent}__syncthreads();",
        ]
        self.shared_in_use = False

    def return_kept(self, carries: list[Fetch], inner: Frame, indent: str) -> None:
        """The carries that stayed near, written to their arrays after the last step, which ended with a barrier."""
        if not carries:
            return
        assert inner.plan.back_edge is not None
        threads = inner.schedule.options.threads
        self.lines.append(f"{indent}if ({self.block} == 0) {{  // the carries that stayed near")
        self.lines += [f"{indent}{INDENT}{fetch.whole_call(threads, self.tensors, back=True)}" for fetch in carries]
        self.lines.append(f"{indent}}}")
        self.shared_in_use = True


def _stage_title(number: int, stage: Stage) -> str:
    names = [str(task) if task.region else task.name for task in stage.tasks]
    return f"Stage {number}: {', '.join(names)}"
