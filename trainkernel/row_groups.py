"""Row groups: neighbouring sums over rows and pointwise tasks that one block runs for its rows, without a grid barrier.

A layer norm inside of a larger step is a mean, a difference, a mean of squares and a quotient, each
of which waits for the one before, but only for the same row. Where no block region computes a step
as a whole, such tasks are made one: a region of their rows alone, whose products and their
epilogues stay with the grid. A sum is grouped only if that leaves the order of its additions as it
was, so that grouping does not change a bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainkernel.errors import VerificationError
from trainkernel.fusion import FusedProgram, TaskDraft, aligned_reads, form_tasks
from trainkernel.ir import Operation, Program, TensorSpec
from trainkernel.lowering import lower
from trainkernel.options import Options
from trainkernel.reduction_plans import SCATTERS, plan_reduction
from trainkernel.region_plans import RegionPlan, Split
from trainkernel.target import Target

_MAX_LABELS = 2
_MIN_SAVED_STAGES = 2
_BLOCKS_PER_SM = 2
_ORDERED_PATHS = ("thread", "warp", "block")


def plan_row_groups(program: Program, target: Target, options: Options) -> RegionPlan | None:
    """The rows of all groups of a program that has no region (of one level, loop bodies apart), if they save stages."""
    if options.region_pieces is not None:
        return None
    lowered = lower(program, target, options, None)
    fused = form_tasks(lowered, target, options)
    sums = Counter(_num_rows(draft) for draft in fused.drafts if _is_row_sum(draft))
    if sum(sums.values()) < _MIN_SAVED_STAGES:
        return None
    declared = {spec.buffer: spec for spec in lowered.buffers()}
    best: tuple[int, RegionPlan] | None = None
    for label, _ in sorted(sums.most_common(), key=lambda pair: (-pair[1], pair[0]))[:_MAX_LABELS]:
        split = _split(label, target)
        if split is None:
            continue
        groups = _Groups(fused, declared, split, target, options)
        saved = groups.num_saved_stages
        if saved >= _MIN_SAVED_STAGES and (best is None or saved > best[0]):
            best = (saved, RegionPlan(split, groups.rows, frozenset(), apart=True))
    return None if best is None else best[1]


def _is_row_sum(draft: TaskDraft) -> bool:
    root = draft.root
    return draft.kind == "reduction" and root is not None and root.op not in SCATTERS and "chunk" not in root.attrs


def _num_rows(draft: TaskDraft) -> int:
    assert draft.root is not None
    return draft.root.outputs[0].num_elements


def _split(label: int, target: Target) -> Split | None:
    """As many pieces as run at the same time; None if that is no number for which there are rows."""
    most = _BLOCKS_PER_SM * target.num_sms
    pieces = next(pieces for pieces in range(min(label, most), 0, -1) if label % pieces == 0)
    return Split(label, pieces) if pieces >= target.num_sms // 2 else None


@dataclass(frozen=True)
class _Member:
    """A task that could be part of a group, and the buffers of which it reads its own rows alone."""

    draft: TaskDraft
    aligned: frozenset[str]


class _Groups:
    """The tasks that share a stage with others whose rows they read, under one split.

    Attributes
    ----------
    rows : frozenset of str
        What they compute.
    num_saved_stages : int
    """

    def __init__(
        self,
        fused: FusedProgram,
        declared: Mapping[str, TensorSpec],
        split: Split,
        target: Target,
        options: Options,
    ) -> None:
        self._fused, self._declared, self._split = fused, declared, split
        self._target, self._options = target, options
        writer = {spec.buffer: draft for draft in fused.drafts for spec in draft.outputs}
        self._before = {
            id(draft): {id(writer[name]): writer[name] for name in draft.reads if name in writer}
            for draft in fused.drafts
        }
        members = {id(member.draft): member for member in map(self._member, fused.drafts) if member is not None}
        alone, levels = self._levels({}), self._levels(members)
        while len(kept := self._neighbours(members, levels)) < len(members):
            members = kept
            levels = self._levels(members)
        self.num_saved_stages = len(set(alone.values())) - len(set(levels.values()))
        self.rows = frozenset(spec.buffer for member in members.values() for spec in member.draft.outputs)

    def _member(self, draft: TaskDraft) -> _Member | None:
        """A task as part of a group; None if it cannot be cut into the rows, or would compute in another order."""
        if draft.kind not in ("pointwise", "reduction") or any(
            operation.op == "combine_partials" for operation in draft.members
        ):
            return None
        if draft.kind == "reduction" and not (_is_row_sum(draft) and self._keeps_order(draft.root)):
            return None
        if any(spec.num_elements % self._split.label for spec in draft.outputs):
            return None
        try:
            return _Member(draft, aligned_reads(draft, self._split.label, self._fused.inlined, self._declared))
        except VerificationError:
            return None

    def _keeps_order(self, root: Operation | None) -> bool:
        """Whether a block that has only some of the rows adds up each as before."""
        assert root is not None
        before = plan_reduction(root, self._target, self._options)
        cut = replace(root, attrs={**root.attrs, "pieces": self._split.pieces})
        after = plan_reduction(cut, self._target, self._options)
        return before.path == after.path and before.path in _ORDERED_PATHS and before.partials == 1

    def _is_near(self, member: _Member | None, other: TaskDraft, members: Mapping[int, _Member]) -> bool:
        """Whether a task needs only its own rows of what another one computes."""
        if member is None or id(other) not in members:
            return False
        shared = {spec.buffer for spec in other.outputs} & set(member.draft.reads)
        return shared <= member.aligned

    def _levels(self, members: Mapping[int, _Member]) -> dict[int, int]:
        """The stage of each task, by its longest path."""
        levels: dict[int, int] = {}
        for draft in sorted(self._fused.drafts, key=lambda draft: draft.level):  # each after what it reads
            steps = [
                levels[key] + (not self._is_near(members.get(id(draft)), other, members))
                for key, other in self._before[id(draft)].items()
            ]
            levels[id(draft)] = max(steps, default=0)
        return levels

    def _neighbours(self, members: Mapping[int, _Member], levels: Mapping[int, int]) -> dict[int, _Member]:
        """The members that share their stage with another one whose rows they read, or that reads theirs."""
        joined: set[int] = set()
        for key, member in members.items():
            for other in self._before[key]:
                if levels[other] == levels[key] and self._is_near(member, members[other].draft, members):
                    joined |= {key, other}
        return {key: member for key, member in members.items() if key in joined}
