"""Fusion: which values are evaluated inside their consumers, and which operations share a task.

Three ways to avoid storing a value, tried in this order for each pointwise operation:

1. *epilogue*: it continues a product's or reduction's result element by element, and everything
   else it reads is there before: it runs in that task, on the value in a register;
2. *inlining*: each consumer evaluates it at the elements it reads, unless that would nest
   values, or the index expressions of views of views, without bound;
3. *group*: it continues pointwise tasks of the same element count: one task computes all of
   them, each element in one thread.

A value of a task is stored only if another task, a loop or an output needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from trainkernel.access import Access, AccessWalker
from trainkernel.alignment import PARTIAL, ROW, accesses, by_alignment
from trainkernel.arithmetic import kind_of
from trainkernel.dtypes import DTYPES
from trainkernel.errors import VerificationError
from trainkernel.indexing import Index, variable
from trainkernel.ir import Item, Loop, Operation, Program, TensorSpec
from trainkernel.ops import OPS
from trainkernel.options import Options
from trainkernel.product_costs import conversion_us, stored_cast_us
from trainkernel.product_plans import ceil_div
from trainkernel.products import plan_product
from trainkernel.reduction_plans import SCATTERS, plan_reduction
from trainkernel.region_plans import RegionPlan
from trainkernel.target import Target

_EVALUATIONS_PER_US = 7.0e6
_MAX_SINGLE_USE_US = 1.5
_MAX_RECOMPUTE_US = 1.0
_MAX_CHAIN_COST = 200.0
_MIN_EARLY_COST = 10.0
# Python recurses through nested values, and an index of views that do not cancel grows by a
# factor with each of them.
_MAX_INLINED_DEPTH = 32
_MAX_INDEX_CHARACTERS = 300
_PARTIALS_ROOTS = ("product_partials", "reduce_partials", "scatter_partials")


@dataclass(eq=False)
class TaskDraft:
    """A task while it is being formed.

    ``level`` are its stage and, ``inside`` of the region, its place among the parts of that stage, were each as early
    as what it reads allows: a task's is higher than those of all that it reads. ``accesses`` are its reads from
    memory; ``identity`` the buffers that it reads only at its own element and only from members, so that it may
    overwrite them.
    """

    kind: str
    level: tuple[int, int]
    num_elements: int
    root: Operation | None = None
    loop: Loop | None = None
    members: list[Operation] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    identity: set[str] = field(default_factory=set)
    inlined: list[str] = field(default_factory=list)
    inside: bool = False

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        if self.loop is not None:
            return self.loop.outputs
        operations = ([self.root] if self.root else []) + self.members
        return tuple(spec for operation in operations for spec in operation.outputs)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(access.buffer for access in self.accesses))


@dataclass(frozen=True)
class FusedProgram:
    """Task drafts in program order, and the operations evaluated inside consumers."""

    drafts: tuple[TaskDraft, ...]
    inlined: Mapping[str, Operation]


def form_tasks(
    program: Program,
    target: Target,
    options: Options,
    region: RegionPlan | None = None,
    updates: Set[str] = frozenset(),
) -> FusedProgram:
    """Group the operations of a lowered program into tasks, those of a region apart from the others.

    ``updates`` are the outputs that take over an input's storage.
    """
    live = [item for item in program.operations if any(spec.num_elements for spec in item.outputs)]
    looped = {spec.buffer for item in live if isinstance(item, Loop) for spec in item.inputs if spec.num_elements}
    must_store = {spec.buffer for spec in program.outputs} | looped
    if region is not None:
        must_store |= _leaving(live, region)
    scalars, costs = _Scalars(live, region), _chain_costs(live)
    reports = scalars.reports & must_store - looped - updates
    sums = {item.outputs[0].buffer for item in live if _is_partial_sum(item)}
    kept = must_store - reports | scalars.early(costs) | sums
    former = _Former(program, options, _may_inline(program, live, costs, kept, target, options), region, reports)
    for item in live:
        former.add(item)
    drafts = former.finish(must_store)
    return FusedProgram(tuple(drafts), former.inlined)


def _leaving(live: list[Item], region: RegionPlan) -> set[str]:
    """The region's values that are read outside of it: stored once, and not computed anew by the whole grid.

    With one piece there is nobody outside but loops, which read what is stored anyway.
    """
    read = {
        spec.buffer
        for item in live
        if isinstance(item, Operation) and item.outputs[0].buffer not in region.rows and "pieces" not in item.attrs
        for spec in item.tensor_inputs
    }
    return read & region.rows


def _is_partial_sum(item: Item) -> bool:
    """Whether a block adds up partial results of its piece."""
    return isinstance(item, Operation) and item.op == "add" and "pieces" in item.attrs


# ---------------------------------------------------------------------------- what may be inlined


class _Scalars:
    """The pointwise operations with one result, by what they wait for and who waits for them.

    Attributes
    ----------
    reports : set of str
        Those that wait for a sum or a product and have readers (the norm of a gradient): where they are returned,
        too, their readers need not wait for the task that stores them.
    """

    def __init__(self, live: list[Item], region: RegionPlan | None) -> None:
        self._readers: dict[str, list[Item]] = {}
        self._waiting: set[str] = set()
        self._stages: dict[str, int] = {}
        self._region = region
        scalars: list[Operation] = []
        for item in live:
            operands = {spec.buffer for spec in item.tensor_inputs}
            for name in operands:
                self._readers.setdefault(name, []).append(item)
            if isinstance(item, Loop) or kind_of(item) != "pointwise" or not operands.isdisjoint(self._waiting):
                self._waiting |= {spec.buffer for spec in item.outputs}
            self._stages |= dict.fromkeys((spec.buffer for spec in item.outputs), self._stage(item))
            if isinstance(item, Operation) and kind_of(item) == "pointwise" and item.outputs[0].num_elements == 1:
                scalars.append(item)
        self._names = {operation.outputs[0].buffer for operation in scalars}
        self.reports = {name for name in self._names & self._waiting if name in self._readers}

    def early(self, costs: Mapping[str, float]) -> set[str]:
        """Functions of inputs (a learning rate of the step's number) that only tasks of later stages read.

        One thread can compute them meanwhile, and a state that they read has no late readers, who would have to be
        waited for before it is overwritten.
        """
        ready = self._names - self._waiting
        return {
            name
            for name in ready
            if costs[name] >= _MIN_EARLY_COST
            and self._outer(name, ready)
            and all(map(self._is_late, self._outer(name, ready)))
        }

    def _outer(self, name: str, ready: set[str]) -> list[Item]:
        return [item for item in self._readers.get(name, ()) if item.outputs[0].buffer not in ready]

    def _stage(self, item: Item) -> int:
        """The first stage that may evaluate an item: pointwise ones as an epilogue of what they wait for."""
        operands = [spec.buffer for spec in item.tensor_inputs]
        before = max((self._stages.get(name, -1) for name in operands), default=-1)
        if isinstance(item, Loop) or kind_of(item) != "pointwise" or item.op == "combine_partials":
            return before + 1
        leaves = not self._has(item.outputs[0].buffer) and any(map(self._has, operands))
        return before + 1 if leaves else before

    def _has(self, name: str) -> bool:
        return self._region is not None and self._region.has(name)

    def _is_late(self, item: Item) -> bool:
        name = item.outputs[0].buffer
        return self._stages[name] > 0 and not self._has(name)


def _chain_costs(live: list[Item]) -> dict[str, float]:
    """Cost of evaluating each pointwise value from stored values, if all before it are inlined."""
    costs: dict[str, float] = {}
    for item in live:
        if isinstance(item, Loop) or kind_of(item) != "pointwise":
            continue
        if item.op == "combine_partials":
            own = 4.0 * item.tensor_inputs[0].shape[0]
        else:
            own = OPS[item.op].cost + 1.0
        total = own + sum(costs.get(spec.buffer, 1.0) for spec in item.tensor_inputs)
        costs[item.outputs[0].buffer] = min(total, 10 * _MAX_CHAIN_COST)
    return costs


def _may_inline(
    program: Program,
    live: list[Item],
    costs: Mapping[str, float],
    must_store: set[str],
    target: Target,
    options: Options,
) -> set[str]:
    """Buffers of pointwise operations that consumers may evaluate for themselves; ``costs`` are of their chains."""
    if options.fuse_pointwise is False:
        return set()
    inputs = {spec.buffer for spec in program.inputs}
    evaluations: dict[str, float] = {}
    positions: dict[str, int] = {}
    allowed: set[str] = set()
    kept = must_store | _stored_casts(live, target, options)
    for item in reversed(live):
        count = 0.0
        if not isinstance(item, Loop):
            out = item.outputs[0]
            count = float(out.num_elements)
            if kind_of(item) == "pointwise" and out.buffer not in kept:
                extra_us = (evaluations.get(out.buffer, 0.0) - count) * costs[out.buffer] / _EVALUATIONS_PER_US
                if _worth_inlining(item, positions.get(out.buffer, 0), extra_us, costs, inputs, options):
                    allowed.add(out.buffer)
                    count = evaluations.get(out.buffer, 0.0)
        for operand, times in _operand_evaluations(item, count, target, options):
            evaluations[operand] = evaluations.get(operand, 0.0) + times
            positions[operand] = positions.get(operand, 0) + 1
    return allowed


def _stored_casts(live: list[Item], target: Target, options: Options) -> set[str]:
    """Casts to 16 bits that tensor-core products read so often that a task of their own is faster."""
    if options.fuse_pointwise is not None or options.inline_input_casts:
        return set()
    lost_us: dict[str, float] = {}
    for item in live:
        if isinstance(item, Loop) or kind_of(item) != "product":
            continue
        plan = plan_product(item, target, options)
        if plan.is_tensor_tile:
            for operand, outer in zip(item.tensor_inputs[-2:], (plan.tile_m, plan.tile_n), strict=True):
                lost_us[operand.buffer] = lost_us.get(operand.buffer, 0.0) + conversion_us(plan, outer, target)
    found = set()
    for item in live:
        if isinstance(item, Loop) or item.op != "cast" or not item.tensor_inputs:
            continue
        out = item.outputs[0]
        moved_bytes = sum(DTYPES[spec.dtype].itemsize_bytes for spec in (item.tensor_inputs[0], out))
        if lost_us.get(out.buffer, 0.0) > stored_cast_us(out.num_elements, moved_bytes, target):
            found.add(out.buffer)
    return found


def _worth_inlining(
    operation: Operation,
    num_positions: int,
    extra_us: float,
    costs: Mapping[str, float],
    inputs: set[str],
    options: Options,
) -> bool:
    source = operation.tensor_inputs[0].buffer if operation.tensor_inputs else None
    if operation.op == "cast" and source in inputs and options.inline_input_casts is not False:
        return True
    if options.fuse_pointwise:
        return num_positions == 1
    if num_positions == 1:
        return extra_us < _MAX_SINGLE_USE_US
    cheap = costs[operation.outputs[0].buffer] <= _MAX_CHAIN_COST
    if operation.op == "cast" and source in inputs:
        return False
    return cheap and (extra_us < _MAX_RECOMPUTE_US or operation.outputs[0].num_elements == 1)


def _operand_evaluations(item: Item, count: float, target: Target, options: Options) -> list[tuple[str, float]]:
    """(buffer, elements evaluated) for each tensor operand position of an item."""
    if isinstance(item, Loop):
        return [(spec.buffer, float(spec.num_elements)) for spec in item.inputs]
    kind = kind_of(item)
    if kind == "product":
        a, b = item.inputs[-2:]
        assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
        plan = plan_product(item, target, options)
        times = [(a.buffer, a.num_elements * ceil_div(plan.n, plan.tile_n))]
        times.append((b.buffer, b.num_elements * ceil_div(plan.m, plan.tile_m)))
        times += [(spec.buffer, item.outputs[0].num_elements) for spec in item.tensor_inputs[:-2]]
        return [(buffer, float(number)) for buffer, number in times]
    if item.op in SCATTERS:
        indices, updates = item.tensor_inputs
        scatter = plan_reduction(item, target, options)
        looks = indices.num_elements * ceil_div(scatter.rows, scatter.rows_per_piece)
        return [(indices.buffer, float(looks)), (updates.buffer, float(updates.num_elements))]
    if kind in ("reduction", "scan"):
        passes = 2 if item.op in ("softmax_stats", "moments") else 1
        return [(spec.buffer, float(passes * spec.num_elements)) for spec in item.tensor_inputs]
    if item.op == "concatenate":
        share = count / item.outputs[0].num_elements
        return [(spec.buffer, share * spec.num_elements) for spec in item.tensor_inputs]
    return [(spec.buffer, count) for spec in item.tensor_inputs]


# ---------------------------------------------------------------------------- forming tasks


class _Former:
    """Goes through the operations in order, keeping the task and level of each stored value."""

    def __init__(
        self, program: Program, options: Options, may_inline: set[str], region: RegionPlan | None, reports: set[str]
    ) -> None:
        self._program = program
        self._reports = reports
        self._region = region
        self._options = options
        self._may_inline = may_inline
        self._home: dict[str, TaskDraft] = {}
        self._drafts: list[TaskDraft] = []
        self._offsets = {spec.buffer: getattr(spec, "offset", 0) for spec in program.inputs}
        operands = [spec.buffer for item in program.operations for spec in item.tensor_inputs]
        self._shared = {buffer for buffer, positions in Counter(operands).items() if positions > 1}
        self.inlined: dict[str, Operation] = {}
        self._walker = AccessWalker(self.inlined)
        self._depths: dict[str, int] = {}

    def add(self, item: Item) -> None:
        if isinstance(item, Loop):
            self._open(TaskDraft("loop", self._level_after(_loop_accesses(item), False), 0, loop=item))
        elif kind_of(item) == "pointwise":
            self._add_pointwise(item)
        else:
            inside, elements = self._inside(item), item.outputs[0].num_elements
            level = self._level_after(self._accesses(item), inside)
            self._open(TaskDraft(kind_of(item), level, elements, root=item, inside=inside))

    def _open(self, draft: TaskDraft) -> None:
        self._drafts.append(draft)
        for spec in draft.outputs:
            self._home[spec.buffer] = draft

    def _homes(self, accesses: Sequence[Access]) -> list[TaskDraft]:
        return [self._home[access.buffer] for access in accesses if access.buffer in self._home]

    def _level_after(self, accesses: Sequence[Access], inside: bool) -> tuple[int, int]:
        """The level of a task that reads these."""
        levels = [
            (draft.level[0], draft.level[1] + 1) if inside and draft.inside else (draft.level[0] + 1, 0)
            for draft in self._homes(accesses)
        ]
        return max(levels, default=(0, 0))

    def _accesses(self, operation: Operation) -> list[Access]:
        found = accesses(operation, self._walker)
        assert found is not None
        return found

    def _add_pointwise(self, operation: Operation) -> None:
        out = operation.outputs[0]
        accesses = self._accesses(operation)
        homes, inside = self._homes(accesses), self._inside(operation)
        last = max((draft.level for draft in homes), default=None)
        latest = list(dict.fromkeys(draft for draft in homes if draft.level == last))
        element = variable("i", out.num_elements)
        same_element = all(
            access.index == element for access in accesses if self._home.get(access.buffer) in latest
        ) and all(draft.num_elements == out.num_elements for draft in latest)
        depth = 1 + max((self._depths.get(spec.buffer, 0) for spec in operation.tensor_inputs), default=0)
        nests = depth <= _MAX_INLINED_DEPTH and all(
            len(str(access.index)) <= _MAX_INDEX_CHARACTERS for access in accesses
        )
        same_element = same_element and all(draft.inside == inside for draft in latest)
        shared = out.buffer in self._shared and self._groups(latest, same_element)
        if latest and same_element and self._joins_root(latest, operation):
            self._join(latest, operation)
        elif out.buffer in self._may_inline and nests and not shared:
            self.inlined[out.buffer] = operation
            self._depths[out.buffer] = depth
            if out.buffer in self._reports:
                self._open_pointwise(operation, accesses)
        elif self._groups(latest, same_element):
            self._join(latest, operation)
        else:
            self._open_pointwise(operation, accesses)

    def _open_pointwise(self, operation: Operation, accesses: Sequence[Access]) -> None:
        inside, elements = self._inside(operation), operation.outputs[0].num_elements
        level = self._level_after(accesses, inside)
        self._open(TaskDraft("pointwise", level, elements, members=[operation], inside=inside))

    def _inside(self, operation: Operation) -> bool:
        """Whether an operation of the lowered program belongs to the region."""
        if self._region is None:
            return False
        partial = operation.op in _PARTIALS_ROOTS and "pieces" in operation.attrs
        partial = partial or _is_partial_sum(operation)
        return partial or operation.outputs[0].buffer in self._region.rows

    def _joins_root(self, latest: list[TaskDraft], operation: Operation) -> bool:
        draft = latest[0]
        if len(latest) != 1 or draft.root is None or self._options.fuse_epilogues is False:
            return False
        return draft.root.op not in _PARTIALS_ROOTS or _is_partial_sum(operation)

    def _groups(self, latest: list[TaskDraft], same_element: bool) -> bool:
        if not latest or not same_element or self._options.fuse_pointwise is False:
            return False
        return all(draft.kind == "pointwise" for draft in latest)

    def _join(self, latest: list[TaskDraft], operation: Operation) -> None:
        draft = latest[0]
        for other in latest[1:]:
            draft.members += other.members
            self._drafts.remove(other)
            for spec in other.outputs:
                self._home[spec.buffer] = draft
        draft.members.append(operation)
        for spec in operation.outputs:
            self._home[spec.buffer] = draft

    # ------------------------------------------------------------------ what each task reads and stores

    def finish(self, must_store: set[str]) -> list[TaskDraft]:
        needed = set(must_store)
        order = {op.outputs[0].buffer: place for place, op in enumerate(self._program.operations)}
        for draft in self._drafts:
            draft.members.sort(key=lambda operation: order[operation.outputs[0].buffer])
            self._collect(draft)
            needed.update(access.buffer for access in draft.accesses)
        for draft in self._drafts:
            draft.stores = [spec.buffer for spec in draft.outputs if spec.buffer in needed]
            if draft.loop is None:
                draft.inlined += [op.outputs[0].buffer for op in draft.members if op.outputs[0].buffer not in needed]
        return [draft for draft in self._drafts if draft.stores or draft.loop is not None]

    def _collect(self, draft: TaskDraft) -> None:
        if draft.loop is not None:
            draft.accesses = _loop_accesses(draft.loop)
            return
        rooted = self._accesses(draft.root) if draft.root is not None else []
        members: list[Access] = []
        for operation in draft.members:
            members += self._accesses(operation)
        own = {spec.buffer for spec in draft.outputs}
        element = variable("i", draft.num_elements)
        foreign = [access for access in members if access.buffer not in own]
        moved = {a.buffer for a in foreign if a.index != element + self._offsets.get(a.buffer, 0)}
        moved |= {access.buffer for access in rooted}
        draft.accesses = list(dict.fromkeys(rooted + foreign))
        draft.identity = {access.buffer for access in foreign} - moved


def aligned_reads(
    draft: TaskDraft, label: int, inlined: Mapping[str, Operation], declared: Mapping[str, TensorSpec]
) -> frozenset[str]:
    """The buffers of which a task inside of a region reads its own rows alone."""
    aligned: set[str] = set()
    astray: set[str] = set()
    walker = AccessWalker(inlined)
    for operation in ([draft.root] if draft.root else []) + draft.members:
        role = PARTIAL if operation.op in _PARTIALS_ROOTS else ROW
        own_label = operation.attrs["pieces"] if _is_partial_sum(operation) else label
        reads = accesses(operation, walker, own_label, role)
        if reads is None:
            raise VerificationError(f"an operation inside of a region has no {label} rows\n  in operation: {operation}")
        found = by_alignment(reads, declared, own_label)
        aligned |= found[0]
        astray |= found[1]
    return frozenset(aligned - astray)


def _loop_accesses(loop: Loop) -> list[Access]:
    """The buffers that a loop reads; an empty one has no element to read, and no storage."""
    return [Access(spec.buffer, Index()) for spec in loop.inputs if spec.num_elements]
