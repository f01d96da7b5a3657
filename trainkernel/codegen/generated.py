"""What ``generate`` returns: the source, and the counts of what the source really does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainkernel.facts import ScalarSlot, Segment, Slot, TaskInfo
from trainkernel.ir import Program
from trainkernel.memory import MemoryPlan
from trainkernel.schedule import Schedule
from trainkernel.target import Target

__all__ = ["GeneratedKernel", "Region", "ScalarSlot", "Slot", "TaskInfo"]


@dataclass(frozen=True)
class Region:
    """A buffer's place in the workspace, and the stages it lives in."""

    name: str
    offset_bytes: int
    size_bytes: int
    first_stage: int
    last_stage: int


@dataclass(frozen=True)
class GeneratedKernel:
    """A generated kernel: source text, launch facts and statistics.

    Attributes
    ----------
    source : str
        Self-contained, header-free text: CUDA for NVRTC, the raw C host entry for a host
        compiler, the same kernel for the emulator.
    workspace_bytes : int
        Header and arena that a launch needs.
    materialized_operations : int
        Tasks that store results; a fused group counts one.
    inlined_operations : int
        Operations evaluated inside a consumer, epilogue members not included.
    tensor_core_operations : int
        Products on tensor-core tiles.
    blocks_per_sm : int
        Upper bound of resident blocks per SM that the grid uses.
    max_work_blocks : int
        The most blocks that the tasks of any stage can use side by side, at least 1.
    grid_barriers : int
        Grid barriers in the source, per pass through a Loop's body.
    direct_outputs : int
        Outputs that a task writes straight, in-place ones included.
    direct_state_commits : int
        In-place outputs that their writer updates directly.
    shared_bytes : int
        Dynamic shared memory per block.
    slots, scalars, params_bytes, uses_tensor_table
        Layout of the parameter block.
    tasks : tuple of TaskInfo
    regions : tuple of Region
    unplanned_bytes : int
        At the end of the workspace, of no value of the program: places of blocks, then time stamps.
    stamps : tuple of str
        What each time stamp comes before, after the four of start and end; they fill the end of the
        workspace. Empty without the option ``stamps``.
    segments, ticks_offset_bytes
        What a launch may run a part of, and where its arguments are; see ``LaunchFacts``.
    """

    program: Program
    target: Target
    schedule: Schedule
    plan: MemoryPlan
    source: str
    entry: str
    threads_per_block: int
    shared_bytes: int
    workspace_bytes: int
    blocks_per_sm: int
    max_blocks: int | None
    max_work_blocks: int
    grid_barriers: int
    materialized_operations: int
    inlined_operations: int
    tensor_core_operations: int
    direct_outputs: int
    direct_state_commits: int
    slots: tuple[Slot, ...]
    uses_tensor_table: bool
    scalars: tuple[ScalarSlot, ...]
    params_bytes: int
    inplace_outputs: Mapping[int, int]
    tasks: tuple[TaskInfo, ...]
    regions: tuple[Region, ...]
    unplanned_bytes: int = 0
    stamps: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()
    ticks_offset_bytes: int | None = None

    def __str__(self) -> str:
        names = (
            "materialized_operations",
            "inlined_operations",
            "tensor_core_operations",
            "grid_barriers",
            "direct_outputs",
            "direct_state_commits",
            "max_work_blocks",
            "blocks_per_sm",
            "max_blocks",
            "threads_per_block",
            "shared_bytes",
            "workspace_bytes",
            "params_bytes",
        )
        lines = [f"kernel {self.entry} for target {self.target.name}"]
        lines += [f"  {name} = {getattr(self, name)}" for name in names]
        lines.append(f"  source: {len(self.source.splitlines())} lines")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"GeneratedKernel(target={self.target.name!r}, stages={self.schedule.num_stages}, "
            f"grid_barriers={self.grid_barriers}, workspace_bytes={self.workspace_bytes})"
        )
