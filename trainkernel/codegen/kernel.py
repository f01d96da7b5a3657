"""The whole source: prelude, parameter block, task functions, kernel body, C host entry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

from trainkernel.codegen.alike import share_functions
from trainkernel.codegen.body import MAX_SPREAD_BLOCKS, KernelBody
from trainkernel.codegen.generated import GeneratedKernel, Region, ScalarSlot, Slot, TaskInfo
from trainkernel.codegen.host_entry import HostEntryDescription, HostScalar, HostTensor, emit_host_entry
from trainkernel.codegen.parameters import itemsize_bytes, layout_parameters, params_struct
from trainkernel.codegen.parts import NO_HOST_ENTRY, find_segments, first_ticks
from trainkernel.codegen.tasks import emit_uniform
from trainkernel.codegen.text import INDENT, comment
from trainkernel.ir import Loop, Program, TensorSpec
from trainkernel.memory import Frame, MemoryPlan
from trainkernel.product_plans import ProductPlan, ceil_div
from trainkernel.schedule import Schedule, Stage, Task
from trainkernel.stamps import stamps_bytes
from trainkernel.target import MAX_SHARING_THREADS, RESERVED_SHARED_BYTES

ENTRY = "trainkernel_step"
MAX_INLINE_CALLS = {"tk_grid_barrier": 8, "tk_matrix_sums": 4, "tk_random_bits": 4}
"""Calls up to which a function of the prelude is inlined; in a kernel with more it is compiled once."""
MAX_SHARED_SUMS = 32
"""Sums of a thread up to which tiles leave registers to a second block."""
_INDEX_LIMIT = 2**31 - 2**16
_TEMPLATES = (
    "ptx",
    "numbers",
    "barrier",
    "reduce",
    "product_vector",
    "product_operand",
    "product_tile",
    "product_tensor",
    "product_pipeline",
    "warpgroup",
    "product_warpgroup",
    "product_split",
    "block_product",
    "tensor_sums",
    "staged",
    "bulk",
    "stamps",
    "spread",
    "parts",
    "functions",
    "typed",
    "reduce_more",
    "typed_reduce",
    "typed_product",
    "indexed",
    "random",
    "scan",
    "scatter",
)
_ALWAYS = frozenset(("ptx", "numbers", "barrier"))


def assemble(program: Program, schedule: Schedule, plan: MemoryPlan) -> GeneratedKernel:
    """Emit the source of a scheduled and planned program."""
    layout = layout_parameters(program, schedule.inplace_outputs, bool(schedule.options.parts))
    threads = schedule.options.threads
    max_work_blocks = max((stage.num_pieces for stage in _all_stages(schedule)), default=1)
    max_work_blocks = max(1, max_work_blocks)
    blocks_per_sm = schedule.options.blocks_per_sm or _default_blocks_per_sm(max_work_blocks, schedule)
    workspace_bytes = plan.workspace_bytes
    body = KernelBody(program, layout, num_blocks=_expected_blocks(schedule, blocks_per_sm, max_work_blocks))
    if blocks_per_sm > 1 and _has_tiles_in_a_loop(schedule):
        body.spread_offset = workspace_bytes
        workspace_bytes += 4 * MAX_SPREAD_BLOCKS
    if schedule.options.stamps:
        body.stamps_offset = workspace_bytes
    frame = Frame.outermost(schedule, plan)
    segments = find_segments(frame) if schedule.options.parts else ()
    if segments:
        body.templates.add("parts")
        body.ticks = first_ticks(segments, lambda index: f"p.scalar_{program.inputs[index].buffer}")
    body.emit_tasks(frame)
    body.shared = share_functions(body.emitted.values())
    body.spread()
    body.clock(0)
    body.schedule(frame, INDENT)
    body.clock(2)
    if body.stamps_offset is not None:
        workspace_bytes += stamps_bytes(len(body.stamps))
    arrivals_at = 16 * ceil_div(body.shared_bytes, 16)
    if body.num_arrivals:
        body.shared_bytes = arrivals_at + 8 * body.num_arrivals
    uniform: list[str] = []
    if body.uses_uniform:
        uniform, templates = emit_uniform(frame, body.base, body.scalar)
        body.templates |= templates
    compiled_blocks = _compiled_for_blocks(schedule, blocks_per_sm, body.shared_bytes)
    functions = body.function_texts(compiled_blocks)
    host = HostEntryDescription(
        tensors=tuple(_host_tensor(slot, program, schedule.inplace_outputs) for slot in layout.slots),
        scalars=tuple(_host_scalar(slot) for slot in layout.scalars),
        params_bytes=layout.size_bytes,
        uses_tensor_table=layout.uses_table,
        threads_per_block=threads,
        shared_bytes=body.shared_bytes,
        workspace_bytes=workspace_bytes,
        blocks_per_sm=blocks_per_sm,
        max_work_blocks=max_work_blocks,
        max_blocks=schedule.options.max_blocks or 0,
        stage_names=_stage_names(body.tasks, body.num_stages),
        entry=ENTRY,
    )
    source = "\n".join(
        [
            *_title(program, schedule, plan),
            "#if defined(__CUDACC_RTC__) || defined(TRAINKERNEL_EMULATOR)",
            "",
            f"typedef {_index_type(program, schedule)} tk_index;",
            "",
            *_inlining([*uniform, *functions, *body.lines]),
            "",
            *_prelude(body.templates, [*uniform, *functions]),
            *params_struct(layout),
            "",
            *uniform,
            "\n\n".join(functions),
            "",
            *_kernel_text(body, threads, compiled_blocks, arrivals_at),
            "",
            "#else",
            "",
            NO_HOST_ENTRY if schedule.options.parts else emit_host_entry(host),
            "#endif",
            "",
        ]
    )
    tasks = [task for task in schedule.tasks if task.loop is None and task.copy is None]
    return GeneratedKernel(
        program=program,
        target=schedule.target,
        schedule=schedule,
        plan=plan,
        source=source,
        entry=ENTRY,
        threads_per_block=threads,
        shared_bytes=body.shared_bytes,
        workspace_bytes=workspace_bytes,
        blocks_per_sm=blocks_per_sm,
        max_blocks=schedule.options.max_blocks,
        max_work_blocks=max_work_blocks,
        grid_barriers=plan.grid_barriers + (body.spread_offset is not None),
        materialized_operations=len(tasks),
        inlined_operations=_num_inlined(schedule),
        tensor_core_operations=sum(isinstance(t.plan, ProductPlan) and t.plan.on_tensor_cores for t in tasks),
        direct_outputs=schedule.direct_outputs,
        direct_state_commits=schedule.direct_state_commits,
        slots=layout.slots,
        uses_tensor_table=layout.uses_table,
        scalars=layout.scalars,
        params_bytes=layout.size_bytes,
        inplace_outputs=dict(schedule.inplace_outputs),
        tasks=tuple(body.tasks),
        unplanned_bytes=workspace_bytes - plan.workspace_bytes,
        stamps=tuple(body.stamps),
        segments=segments,
        ticks_offset_bytes=layout.ticks_offset_bytes,
        regions=tuple(
            Region(name, entry.offset_bytes, entry.size_bytes, entry.first_stage, entry.last_stage)
            for name, entry in plan.all_entries()
        ),
    )


def _all_stages(schedule: Schedule) -> list[Stage]:
    found = list(schedule.stages)
    for stage in schedule.stages:
        for task in stage.tasks:
            if task.loop is not None:
                found += _all_stages(task.loop.schedule)
    return found


def _num_inlined(schedule: Schedule) -> int:
    total = len(schedule.inlined)
    for stage in schedule.stages:
        for task in stage.tasks:
            if task.loop is not None:
                total += _num_inlined(task.loop.schedule)
            elif task.kind == "pointwise":
                total += sum(op.outputs[0].buffer not in task.stores for op in task.members)
    return total


def _default_blocks_per_sm(max_work_blocks: int, schedule: Schedule) -> int:
    return 1 if max_work_blocks <= schedule.target.num_sms else 2


def _expected_blocks(schedule: Schedule, blocks_per_sm: int, max_work_blocks: int) -> int:
    """The grid that a launch on the target's device will most likely get."""
    per_sm = blocks_per_sm if schedule.options.threads <= MAX_SHARING_THREADS else 1
    limit = schedule.options.max_blocks or max_work_blocks
    return max(1, min(schedule.target.num_sms * per_sm, max_work_blocks, limit))


def _compiled_for_blocks(schedule: Schedule, blocks_per_sm: int, shared_bytes: int) -> int:
    """Blocks per SM for which the compiler is to leave registers.

    Tiles leave it to a second block to work while one waits; the compiler would rather take more registers
    than two blocks have.
    """
    target, threads = schedule.target, schedule.options.threads
    plans = [task.plan for stage in _all_stages(schedule) for task in stage.tasks if _is_tile(task)]
    sums = [_sums(plan) for plan in plans if isinstance(plan, ProductPlan)]
    fit = 2 * (shared_bytes + RESERVED_SHARED_BYTES) <= target.shared_bytes_per_sm and threads <= MAX_SHARING_THREADS
    return 2 if sums and fit and blocks_per_sm > 1 and max(sums) <= MAX_SHARED_SUMS * threads else 1


def _sums(plan: ProductPlan) -> int:
    """The sums that a block's threads hold in registers at a time."""
    return plan.tile_m * plan.tile_n * (2 if plan.path == "split" else 1)


def _has_tiles_in_a_loop(schedule: Schedule, inside: bool = False) -> bool:
    """Whether tiles of products repeat, by blocks that own no rows but those of row groups."""
    tasks = [task for stage in schedule.stages for task in stage.tasks]
    if any(task.region is not None and not task.region.is_row_group for task in tasks):
        return False
    if inside and any(_is_tile(task) for task in tasks):
        return True
    return any(_has_tiles_in_a_loop(task.loop.schedule, True) for task in tasks if task.loop is not None)


def _is_tile(task: Task) -> bool:
    return isinstance(task.plan, ProductPlan) and task.plan.is_tile


def _index_type(program: Program, schedule: Schedule) -> str:
    """32-bit indices where every index fits, those of partial results included."""
    largest = 0
    pending = [program, schedule.program]
    while pending:
        current = pending.pop()
        for spec in current.buffers():
            largest = max(largest, spec.last_index + 1, spec.num_elements)
        for item in current.operations:
            if isinstance(item, Loop):
                pending.append(item.body)
            for spec in item.tensor_inputs:
                largest = max(largest, spec.num_elements)
        largest = max([largest, *(spec.num_elements for spec in current.outputs)])
    for stage in _all_stages(schedule):
        for task in stage.tasks:
            if task.loop is not None:
                pending_specs = list(task.loop.schedule.program.buffers())
                largest = max([largest, *(spec.num_elements for spec in pending_specs)])
    return "int" if largest < _INDEX_LIMIT else "long long"


def _title(program: Program, schedule: Schedule, plan: MemoryPlan) -> list[str]:
    lines = [
        f"Training step in one cooperative kernel: {len(program.operations)} operations, {schedule.num_stages} stages, "
        f"{plan.grid_barriers} grid barriers, {plan.workspace_bytes} bytes of workspace.",
        f"Generated by trainkernel for target {schedule.target.name}. Do not edit.",
    ]
    return [comment(line) for line in lines]


def _prelude(templates: set[str], functions: list[str]) -> list[str]:
    """The prelude's files that the program needs, in their order."""
    needed = _ALWAYS | templates
    defined = re.findall(r"^__device__ .*? (tk_\w+)\(", _template("functions"), re.MULTILINE)
    if any(f"{name}(" in text for name in defined for text in functions):
        needed |= {"functions"}
    return [_template(name) for name in _TEMPLATES if name in needed]


def _inlining(texts: list[str]) -> list[str]:
    """How often-called functions of the prelude are compiled: macros that stand in their declarations."""
    lines = []
    for name, limit in MAX_INLINE_CALLS.items():
        calls = sum(len(re.findall(rf"\b{name}[<(]", text)) for text in texts)
        lines.append(f"#define {name.upper()}_IS {'__forceinline__' if calls <= limit else 'TK_NOINLINE'}")
    return lines


def _template(name: str) -> str:
    path = files("trainkernel.codegen") / "cuda" / f"{name}.cuh"
    return path.read_text(encoding="ascii")


def _kernel_text(body: KernelBody, threads: int, blocks_per_sm: int, arrivals_at: int) -> list[str]:
    lines = [
        "#ifndef TRAINKERNEL_ENTRY",
        f"#define TRAINKERNEL_ENTRY {ENTRY}",
        "#endif",
        "",
        f'extern "C" __global__ void __launch_bounds__({threads}, {blocks_per_sm})',
        "TRAINKERNEL_ENTRY(const __grid_constant__ TkParams p) {",
        "  TkBarrier barrier = tk_barrier_init(p.workspace, p.barrier_timeout_ns);",
    ]
    if body.uses_uniform:
        lines.append("  const TkUniform u = tk_uniform(p);")
    if body.shared_bytes:
        lines.append("  TK_DYNAMIC_SHARED(shared);")
    if body.num_arrivals:
        call = f"tk_arrivals_init<{body.num_arrivals}>(shared + {arrivals_at})"
        lines.append(f"  TkArrivals arrivals = {call};")
    return lines + body.lines + ["}"]


def _host_tensor(slot: Slot, program: Program, inplace_outputs: Mapping[int, int]) -> HostTensor:
    if slot.kind == "input":
        spec = program.inputs[slot.index]
        assert isinstance(spec, TensorSpec)
        span = max(spec.last_index + 1 - spec.offset, 0)
        in_place = slot.index in inplace_outputs.values()
    else:
        spec = program.outputs[slot.index]
        span, in_place = spec.num_elements, False
    size_bytes = span * itemsize_bytes(spec.dtype)
    return HostTensor(slot.kind, slot.name, spec.dtype, size_bytes, slot.alignment_bytes, in_place)


def _host_scalar(slot: ScalarSlot) -> HostScalar:
    minimum = 0 if slot.maximum is not None else None
    return HostScalar(slot.name, slot.dtype, slot.offset_bytes, minimum, slot.maximum)


def _stage_names(tasks: list[TaskInfo], num_stages: int) -> tuple[str, ...]:
    names: list[list[str]] = [[] for _ in range(num_stages)]
    for task in tasks:
        names[task.stage].append(task.name)
    return tuple(", ".join(stage) for stage in names)
