"""Placement and stages: where each stored buffer lives, and which tasks may run side by side.

A value bound to an output is written straight into it; an in-place output takes over the input's
storage if every other reader of the old value can run before its writer, and is staged and
committed after all readers otherwise. The edges of the task graph are read-after-write and
write-after-read; a task's stage is its longest path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from trainkernel.arithmetic import kind_of
from trainkernel.balancing import balanced
from trainkernel.carried_casts import carry_casts
from trainkernel.errors import ProgramError, VerificationError
from trainkernel.fusion import FusedProgram, TaskDraft, aligned_reads, form_tasks
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec
from trainkernel.lowering import lower
from trainkernel.options import Options, whole_buffer
from trainkernel.passes import normalize
from trainkernel.product_costs import MAX_SHARED_TILE
from trainkernel.product_plans import ProductPlan, ceil_div
from trainkernel.products import plan_product
from trainkernel.reduction_plans import ReductionPlan, ScanPlan, plan_reduction, plan_scan
from trainkernel.region_costs import REGION_THREADS
from trainkernel.region_plans import RegionPlan, Split
from trainkernel.regions import plan_region
from trainkernel.row_groups import plan_row_groups
from trainkernel.schedule import (
    ArenaPlace,
    BlockRegion,
    Copy,
    InputPlace,
    LoopSchedule,
    OutputPlace,
    Place,
    Schedule,
    Stage,
    Task,
    are_row_group,
)
from trainkernel.shared import (
    LoopState,
    RegionParts,
    block_barriers,
    copies_of,
    first_warps,
    lay_out,
    may_stay_near,
    scratch_use,
)
from trainkernel.target import RESERVED_SHARED_BYTES, Target

MAX_ELEMENTS_PER_THREAD = 4
MAX_LIGHT_ELEMENTS = 16
_MAX_PIECES = 2**31 - 2**20


def build_schedule(program: Program, target: Target, options: Options, inplace_outputs: Mapping[int, int]) -> Schedule:
    """Passes, lowering, fusion, placement and stages of a validated program."""
    program = _with_staged_carries(carry_casts(normalize(program)))
    regions = _plan_regions(program, target, options)
    if options.threads_per_block is None and (
        any(regions.values()) or _fills_multiprocessors(program, target, options)
    ):
        options = replace(options, threads_per_block=REGION_THREADS)
    regions |= _plan_rows(program, target, options, regions)
    return _schedule_level(program, target, options, inplace_outputs, regions)


def _with_staged_carries(program: Program) -> Program:
    """The program with every loop's body made ready for its carries to be committed one by one."""
    items = [
        replace(item, body=_with_staged_carries(stage_carried_inputs(item))) if isinstance(item, Loop) else item
        for item in program.operations
    ]
    return replace(program, operations=tuple(items))


def _fills_multiprocessors(program: Program, target: Target, options: Options) -> bool:
    """Whether a tile takes a multiprocessor's shared memory: its one block should have more threads."""
    for item in program.operations:
        if isinstance(item, Loop):
            if _fills_multiprocessors(item.body, target, options):
                return True
        elif kind_of(item) == "product" and item.outputs[0].num_elements:
            plan = plan_product(item, target, options)
            if plan.path == "warpgroup" and plan.tile_m * plan.tile_n > MAX_SHARED_TILE:
                return True
    return False


Regions: TypeAlias = "Mapping[int, RegionPlan | None]"


def _plan_regions(program: Program, target: Target, options: Options) -> dict[int, RegionPlan | None]:
    """The region of each level, by the identity of its program."""
    found = {id(program): plan_region(program, target, options)}
    for item in program.operations:
        if isinstance(item, Loop):
            found |= _plan_regions(item.body, target, options)
    return found


def _plan_rows(program: Program, target: Target, options: Options, regions: Regions) -> dict[int, RegionPlan | None]:
    """The row groups of each level that has no region."""
    found = {}
    if regions[id(program)] is None:
        found[id(program)] = plan_row_groups(program, target, options)
    for item in program.operations:
        if isinstance(item, Loop):
            found |= _plan_rows(item.body, target, options, regions)
    return found


def _schedule_level(
    program: Program,
    target: Target,
    options: Options,
    inplace_outputs: Mapping[int, int],
    regions: Regions,
    loop: Loop | None = None,
) -> Schedule:
    """The schedule of a program, or of one loop's body."""
    region = regions[id(program)]
    program = lower(program, target, options, region)
    updates = {program.outputs[index].buffer for index in inplace_outputs}
    fused = form_tasks(program, target, options, region, updates)
    graph = _Graph(program, fused, target, options, region, regions, loop)
    graph.place_outputs(inplace_outputs)
    return Schedule(
        program=program,
        stages=balanced(graph.stages(), target, options),
        places=graph.places,
        inlined=fused.inlined,
        inplace_outputs=dict(inplace_outputs),
        direct_outputs=graph.direct_outputs,
        direct_state_commits=graph.direct_state_commits,
        target=target,
        options=options,
    )


@dataclass(eq=False)
class _Node:
    """A task in the graph; ``before`` are the nodes that must have finished.

    Those in ``near`` have finished where it matters once the block that runs this task has run its
    own rows of them. ``aligned`` are the buffers of which a task ``inside`` a region reads its own
    rows alone.
    """

    task: Task
    reads: set[str]
    writes: set[str]
    inside: bool
    aligned: frozenset[str]
    before: set[_Node] = field(default_factory=set)
    near: set[_Node] = field(default_factory=set)
    after: set[_Node] = field(default_factory=set)


class _Graph:
    def __init__(
        self,
        program: Program,
        fused: FusedProgram,
        target: Target,
        options: Options,
        region: RegionPlan | None,
        regions: Regions,
        loop: Loop | None,
    ) -> None:
        self._program = program
        self._loop = loop
        self._regions = regions
        self._region = region
        self._fused = fused
        self._target = target
        self._options = options
        self._inputs = {spec.buffer: index for index, spec in enumerate(program.inputs)}
        self._declared = {spec.buffer: spec for spec in program.buffers()}
        self._drafts: dict[_Node, TaskDraft] = {}
        self._nodes: list[_Node] = []
        self._writer: dict[str, _Node] = {}
        self._no_init: set[str] = set()
        self.places: dict[str, Place] = {}
        self.direct_outputs = 0
        self.direct_state_commits = 0
        for name, index in self._inputs.items():
            self.places[name] = InputPlace(index)
        for draft in fused.drafts:
            self._add_draft(draft)
        for node in self._nodes:
            self._follow_writers(node)  # a draft that others joined may stand behind what reads it

    # ------------------------------------------------------------------ nodes and edges

    def _add_draft(self, draft: TaskDraft) -> None:
        aligned: frozenset[str] = frozenset()
        if self._region is not None and draft.inside:
            aligned = aligned_reads(draft, self._region.split.label, self._fused.inlined, self._declared)
        node = self._node(self._task(draft), set(draft.reads), set(draft.stores), draft.inside, aligned)
        self._drafts[node] = draft
        for name in draft.stores:
            self._writer[name] = node
            self.places[name] = ArenaPlace()
        if draft.loop is not None:
            for spec in draft.loop.outputs:
                self._writer[spec.buffer] = node
                self.places[spec.buffer] = ArenaPlace()
                node.writes.add(spec.buffer)
            if isinstance(draft.loop.length, str):
                node.reads.add(draft.loop.length)

    def _node(
        self, task: Task, reads: set[str], writes: set[str], inside: bool = False, aligned: frozenset[str] = frozenset()
    ) -> _Node:
        node = _Node(task, reads, writes, inside, aligned)
        self._nodes.append(node)
        self._follow_writers(node)
        return node

    def _follow_writers(self, node: _Node) -> None:
        for name in sorted(node.reads):
            if name in self._writer:
                self._edge(self._writer[name], node, name in node.aligned)

    @staticmethod
    def _edge(first: _Node, second: _Node, same_rows: bool) -> None:
        """``second`` runs after ``first``; ``same_rows`` says that what they share is cut into the same rows."""
        if first is second:
            return
        near = same_rows and first.inside and second.inside and (first not in second.before or first in second.near)
        second.before.add(first)
        first.after.add(second)
        (second.near.add if near else second.near.discard)(first)

    @staticmethod
    def _reachable(starts: Iterable[_Node]) -> set[_Node]:
        """The nodes that come after some, and these."""
        seen = set(starts)
        stack = list(seen)
        while stack:
            fresh = stack.pop().after - seen
            seen |= fresh
            stack.extend(fresh)
        return seen

    def _readers(self, name: str) -> list[_Node]:
        return [node for node in self._nodes if name in node.reads]

    # ------------------------------------------------------------------ tasks

    def _task(self, draft: TaskDraft) -> Task:
        threads = self._options.threads
        if draft.loop is not None:
            return self._loop_task(draft.loop, draft)
        plan: ProductPlan | ReductionPlan | ScanPlan | None = None
        if draft.kind == "product":
            assert draft.root is not None
            plan = plan_product(draft.root, self._target, self._options)
            if draft.root.op != "product_partials":
                plan = replace(plan, split=1, chunk=plan.k)
            pieces = plan.num_pieces
        elif draft.kind == "reduction":
            assert draft.root is not None
            plan = plan_reduction(draft.root, self._target, self._options)
            if draft.root.op not in ("reduce_partials", "scatter_partials"):
                plan = replace(plan, partials=1, chunk=plan.count)
            pieces = plan.num_pieces
        elif draft.kind == "scan":
            assert draft.root is not None
            plan = plan_scan(draft.root, self._target, self._options)
            pieces = plan.num_pieces
        else:
            pieces = pointwise_pieces(draft.num_elements, threads, self._target, is_light(draft))
        return Task(
            kind=draft.kind,
            name=draft.stores[-1],
            root=draft.root,
            members=tuple(draft.members),
            stores=tuple(draft.stores),
            reads=draft.reads,
            inlined=tuple(draft.inlined),
            num_elements=draft.num_elements,
            num_pieces=pieces,
            plan=plan,
        )

    def _loop_task(self, loop: Loop, draft: TaskDraft) -> Task:
        inplace = {position: loop.num_constants + position for position in range(loop.num_carry)}
        schedule = _schedule_level(loop.body, self._target, self._options, inplace, self._regions, loop)
        names = tuple(spec.buffer for spec in loop.outputs)
        return Task(
            kind="loop",
            name=names[0],
            stores=names,
            reads=draft.reads,
            loop=LoopSchedule(loop, schedule),
        )

    def _copy_task(
        self, name: str, source: TensorSpec | None, destination: OutputPlace | InputPlace | str, spec: TensorSpec
    ) -> _Node:
        copy = Copy(source, destination, spec.dtype, spec.shape)
        pieces = pointwise_pieces(spec.num_elements, self._options.threads, self._target)
        reads = (source.buffer,) if source is not None else ()
        task = Task("copy", name, reads=reads, num_elements=spec.num_elements, num_pieces=pieces, copy=copy)
        inside = self._is_copied_in_rows(source)
        return self._node(task, set(reads), set(), inside, frozenset(reads) if inside else frozenset())

    def _is_copied_in_rows(self, source: TensorSpec | None) -> bool:
        """Whether a copy may be part of the region."""
        if self._region is None:
            return False
        if self._region.split.label == 1:
            return True
        return source is not None and source.buffer in self._region.rows and self._is_direct(source)

    # ------------------------------------------------------------------ outputs

    def place_outputs(self, inplace_outputs: Mapping[int, int]) -> None:
        """Bind outputs to storage: in place, straight, or by copies."""
        commits: list[tuple[int, int]] = []
        bound: set[str] = set()
        for output_index, input_index in inplace_outputs.items():
            spec = self._program.outputs[output_index]
            if spec.num_elements == 0 or self._is_same_input(spec, input_index):
                continue
            if spec.buffer not in bound and self._try_in_place(output_index, input_index):
                bound.add(spec.buffer)
            else:
                commits.append((output_index, input_index))
        for output_index, spec in enumerate(self._program.outputs):
            if output_index in inplace_outputs or spec.num_elements == 0:
                continue
            if spec.buffer not in bound and self._is_direct(spec):
                self.places[spec.buffer] = OutputPlace(output_index)
                self.direct_outputs += 1
                bound.add(spec.buffer)
            else:
                self._copy_task(f"output_{output_index}", spec, OutputPlace(output_index), spec)
        self._initialise_loops()
        for output_index, input_index in commits:
            self._commit(output_index, input_index)
        self._order_state_writers()

    def _is_same_input(self, spec: TensorSpec, input_index: int) -> bool:
        """Whether an in-place output is its own input (a carry that the body passes on)."""
        target = self._program.inputs[input_index]
        return spec.buffer == target.buffer and isinstance(target, TensorSpec) and whole_buffer(spec, target)

    def _is_direct(self, spec: TensorSpec) -> bool:
        if spec.buffer in self._inputs or spec.buffer not in self._writer:
            return False
        declared = self._declared[spec.buffer]
        return spec.dtype == declared.dtype and whole_buffer(spec, declared)

    def _try_in_place(self, output_index: int, input_index: int) -> bool:
        spec, target = self._program.outputs[output_index], self._program.inputs[input_index]
        if not self._is_direct(spec):
            return False
        if any(other.buffer == target.buffer for other in self._program.outputs):
            return False
        returned = sum(other.buffer == spec.buffer for other in self._program.outputs)
        writer = self._writer[spec.buffer]
        if returned != 1 or not self._may_overwrite(writer, spec, target.buffer):
            return False
        readers = [node for node in self._readers(target.buffer) if node is not writer]
        if not self._reachable([writer]).isdisjoint(readers):
            return False
        for reader in readers:
            self._edge(reader, writer, target.buffer in reader.aligned)
        loop = self._drafts[writer].loop
        if loop is not None and any(operand.buffer == target.buffer for operand in loop.inputs):
            self._no_init.add(spec.buffer)  # the carry starts as the state that it takes over
        self.places[spec.buffer] = InputPlace(input_index)
        self.direct_outputs += 1
        self.direct_state_commits += 1
        return True

    def _may_overwrite(self, writer: _Node, spec: TensorSpec, state: str) -> bool:
        draft = self._drafts[writer]
        if draft.loop is None:
            return state not in writer.reads or state in draft.identity
        loop = draft.loop
        reads = [position for position, operand in enumerate(loop.inputs) if operand.buffer == state]
        carry = [out.buffer for out in loop.outputs[: loop.num_carry]]
        if not reads:
            return True
        if spec.buffer not in carry or reads != [loop.num_constants + carry.index(spec.buffer)]:
            return False
        return whole_buffer(loop.inputs[reads[0]], self._declared[state])

    def _initialise_loops(self) -> None:
        """Copy each carry's initial value into the carry's storage, unless it is that storage."""
        for node in list(self._nodes):
            loop = self._drafts[node].loop if node in self._drafts else None
            if loop is None:
                continue
            first = loop.num_constants
            for spec, initial in zip(loop.outputs[: loop.num_carry], loop.inputs[first:], strict=False):
                if spec.buffer in self._no_init or not spec.num_elements:
                    continue
                if self._may_begin_there(node, loop, spec, initial):
                    self.places[initial.buffer] = ArenaPlace(spec.buffer)
                else:
                    self._write_before(node, spec, initial)
            if isinstance(loop.length, str):
                for spec in loop.outputs[loop.num_carry :]:
                    if spec.num_elements:
                        self._write_before(node, spec, None)

    def _may_begin_there(self, loop_node: _Node, loop: Loop, spec: TensorSpec, initial: TensorSpec) -> bool:
        """Whether a carry's first value, which nobody else reads, may be computed where the carry is."""
        if not self._is_direct(initial) or self._drafts[self._writer[initial.buffer]].loop is not None:
            return False
        own = [self.places[name] for name in (spec.buffer, initial.buffer)]
        reads = sum(operand.buffer == initial.buffer for operand in loop.inputs)
        returned = any(output.buffer == initial.buffer for output in self._program.outputs)
        alone = self._readers(initial.buffer) == [loop_node] and reads == 1 and not returned
        return alone and all(place == ArenaPlace() for place in own)

    def _write_before(self, loop_node: _Node, spec: TensorSpec, source: TensorSpec | None) -> None:
        node = self._copy_task(spec.buffer, source, spec.buffer, spec)
        node.writes.add(spec.buffer)
        self._edge(node, loop_node, False)
        place = self.places[spec.buffer]
        if isinstance(place, InputPlace):
            state = self._program.inputs[place.input_index].buffer
            for reader in self._readers(state):
                if reader is not node:
                    self._edge(reader, node, False)

    def _commit(self, output_index: int, input_index: int) -> None:
        spec = self._program.outputs[output_index]
        state = self._program.inputs[input_index].buffer
        node = self._copy_task(f"commit_{state}", spec, InputPlace(input_index), spec)
        for reader in self._readers(state):
            self._edge(reader, node, state in reader.aligned)

    def _order_state_writers(self) -> None:
        """Every copy that reads an input placed last must still run before that input's writer."""
        for name, place in self.places.items():
            if not isinstance(place, InputPlace) or name in self._inputs:
                continue
            state = self._program.inputs[place.input_index].buffer
            for reader in self._readers(state):
                if reader is not self._writer[name]:
                    self._edge(reader, self._writer[name], state in reader.aligned)

    # ------------------------------------------------------------------ stages

    def stages(self) -> tuple[Stage, ...]:
        """Tasks by longest path; each loop is a stage of its own, each region the first task of its stage."""
        self._start_together()
        levels = self._levels()
        by_level: dict[int, list[_Node]] = {}
        for node in self._nodes:
            by_level.setdefault(levels[node], []).append(node)
        state = self._loop_state() if len(by_level) == 1 else LoopState()
        regions = {level: self._region_of(nodes, state) for level, nodes in by_level.items()}
        stages = []
        for level in sorted(by_level):
            tasks = [node.task for node in by_level[level] if node.task.loop is None and not node.inside]
            region = regions[level]
            side_by_side = (*((region,) if region else ()), *(task for task in tasks if task.num_pieces))
            if side_by_side:
                _check_pieces(side_by_side)
                stages.append(Stage(side_by_side))
            stages += [Stage((node.task,)) for node in by_level[level] if node.task.loop is not None]
        return tuple(stages)

    def _loop_state(self) -> LoopState:
        """What the steps of a loop share, if a region of one piece is a whole step and nothing is beside it."""
        tasks = [node for node in self._nodes if node.task.num_pieces or node.task.loop is not None]
        if self._loop is None or self._region is None or self._region.split.pieces > 1:
            return LoopState()
        if not all(node.inside for node in tasks):
            return LoopState()
        first, constants, carries = self._loop.num_constants, set(), {}
        for index, spec in enumerate(self._program.inputs[: first + self._loop.num_carry]):
            if isinstance(spec, ScalarSpec):
                continue
            out = self._program.outputs[index - first] if index >= first else None
            if out is None or self._is_same_input(out, index):
                constants.add(spec.buffer)
            elif self.places.get(out.buffer) == InputPlace(index) and may_stay_near(spec, self._declared[out.buffer]):
                carries[out.buffer] = spec.buffer
        return LoopState(frozenset(constants), carries)

    def _region_of(self, nodes: list[_Node], state: LoopState) -> Task | None:
        """The task of the nodes of one level that are inside of the region, or None; places what only they touch."""
        levels = _by_level([node for node in nodes if node.inside and node.task.num_pieces])
        inside = list(levels)
        if not inside or self._region is None:
            return None
        split = self._region.split
        parts = tuple(node.task for node in inside)
        scalars = frozenset(spec.buffer for spec in self._program.scalar_inputs)
        aligned = [node.aligned for node in inside]
        region = RegionParts(
            parts,
            tuple(levels.values()),
            aligned,
            split,
            self._declared,
            self.places,
            scalars,
            self._fused.inlined,
            self._options.threads,
            self._room(split, parts),
            state,
        )
        private = [name for name in region.written if self._is_private(name, inside)]
        layout = lay_out(region, private)
        self.places.update(layout.slabs)
        waits = block_barriers(region, layout)
        reads = tuple(dict.fromkeys(name for part in parts for name in part.reads if name not in layout.slabs))
        strangers = {name for node in inside for name in node.reads - node.aligned}
        stores = tuple(name for name in region.written if name not in layout.slabs)
        near = frozenset((set(reads) | set(stores)) - strangers)
        copies = tuple(copies_of(region, number, layout) for number in range(len(parts)))
        scratch = tuple(scratch_use(region, part, layout) for part in parts)
        block = BlockRegion(split, parts, waits, near, layout, copies, scratch, first_warps(region, waits, layout))
        return Task("region", parts[-1].name, stores=stores, reads=reads, num_pieces=split.partials, region=block)

    def _room(self, split: Split, parts: Sequence[Task]) -> Target:
        """The target of a region: a row group leaves half of a multiprocessor to a second block, if it has two."""
        if not are_row_group(split, parts) or self._options.threads >= REGION_THREADS:
            return self._target
        half_bytes = self._target.shared_bytes_per_sm // 2 - RESERVED_SHARED_BYTES
        return replace(self._target, shared_bytes_per_block=min(half_bytes, self._target.shared_bytes_per_block))

    def _is_private(self, name: str, inside: Sequence[_Node]) -> bool:
        """Whether a value lies in the arena and nobody outside of these nodes reads it."""
        if not isinstance(self.places[name], ArenaPlace):
            return False
        return all(reader in inside and name in reader.aligned for reader in self._readers(name))

    def _start_together(self) -> None:
        """Let a region that nobody interrupts wait as a whole for what some of it needs.

        Else what others compute meanwhile (a step count's powers) would split it in two, and its rows would
        travel through device memory.
        """
        if self._region is None or self._region.apart:
            return
        inside = [node for node in self._nodes if node.inside and node.task.num_pieces]
        later = {node for node in self._reachable(inside) if not node.inside}
        if any(after.inside for node in later for after in node.after):
            return
        for first in {before for node in inside for before in node.before if not before.inside}:
            for node in inside:
                node.before.add(first)
                first.after.add(node)

    def _levels(self) -> dict[_Node, int]:
        waiting = {node: len(node.before) for node in self._nodes}
        ready = [node for node in self._nodes if not node.before]
        levels: dict[_Node, int] = {}
        while ready:
            node = ready.pop()
            steps = [levels[before] + (before not in node.near) for before in node.before]
            levels[node] = max(steps, default=0)
            for after in node.after:
                waiting[after] -= 1
                if waiting[after] == 0:
                    ready.append(after)
        if len(levels) != len(self._nodes):
            raise VerificationError("the task graph has a cycle")
        return levels


def _by_level(nodes: list[_Node]) -> dict[_Node, int]:
    """Nodes with their longest path among them, in its order, else as they came."""
    levels: dict[_Node, int] = {}
    waiting = list(nodes)
    while waiting:
        node = next(node for node in waiting if not any(other in node.before for other in waiting))
        waiting.remove(node)
        levels[node] = max((levels[before] + 1 for before in node.before if before in levels), default=0)
    return {node: levels[node] for node in sorted(nodes, key=lambda node: levels[node])}


def _check_pieces(tasks: Sequence[Task]) -> None:
    """Refuse a stage whose pieces an int does not count; blocks step over them by the grid's size."""
    if sum(task.num_pieces for task in tasks) <= _MAX_PIECES:
        return
    largest = max(tasks, key=lambda task: task.num_pieces)
    operations = "; ".join(str(operation) for operation in largest.operations) or str(largest)
    raise ProgramError(
        f"the work is cut into more than {_MAX_PIECES} pieces, most of them by task {largest.name!r} "
        f"({largest.num_pieces} pieces); reduce its tensors\n  in operation: {operations}"
    )


def stage_carried_inputs(loop: Loop) -> Program:
    """The loop's body with a copy for each carry output that is a view of another input.

    After it every carry output is its own carry input or a computed value, so that carries can be
    committed one by one whatever they exchange.
    """
    body = loop.body
    inputs = {spec.buffer: spec for spec in body.inputs}
    taken = {spec.buffer for spec in body.buffers()}
    operations, outputs = list(body.operations), list(body.outputs)
    for position in range(loop.num_carry):
        spec, own = outputs[position], body.inputs[loop.num_constants + position]
        if spec.buffer not in inputs:
            continue
        if spec.buffer == own.buffer and isinstance(own, TensorSpec) and whole_buffer(spec, own):
            continue
        name = f"{own.buffer}_next"
        while name in taken:
            name += "_"
        taken.add(name)
        source = replace(spec, dtype=_dtype_of(inputs[spec.buffer]))
        outputs[position] = TensorSpec.dense(name, spec.shape, spec.dtype)
        operations.append(Operation(name, "cast", (source,), outputs[position], {}))
    return replace(body, operations=tuple(operations), outputs=tuple(outputs))


def _dtype_of(spec: TensorSpec | ScalarSpec) -> str:
    return spec.dtype


def elements_per_thread(num_elements: int, threads: int, target: Target, light: bool = False) -> int:
    """Elements that one thread of a pointwise task computes; more at a time of a light one, which waits for memory."""
    most = MAX_LIGHT_ELEMENTS if light else MAX_ELEMENTS_PER_THREAD
    return max(1, min(most, num_elements // (threads * target.num_sms)))


def is_light(task: Task | TaskDraft) -> bool:
    """Whether a pointwise task is one operation that reads one buffer and writes one."""
    return len(task.members) == len(task.stores) == 1 and len(task.reads) <= 1 and not task.inlined


def pointwise_pieces(num_elements: int, threads: int, target: Target, light: bool = False) -> int:
    """Pieces of a pointwise task of ``num_elements`` elements."""
    return ceil_div(num_elements, threads * elements_per_thread(num_elements, threads, target, light))
