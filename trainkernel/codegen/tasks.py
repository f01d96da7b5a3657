"""One ``__device__`` function per task: comment, pointers, and the body of its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainkernel.codegen.bodies import TaskBody
from trainkernel.codegen.conversions import register_type
from trainkernel.codegen.elementwise import CopyBody, PointwiseBody
from trainkernel.codegen.products import ProductBody
from trainkernel.codegen.reductions import ReductionBody
from trainkernel.codegen.scans import ScanBody
from trainkernel.codegen.text import INDENT, comment
from trainkernel.codegen.values import PointerText, TaskScope, ValueScope, uniform_buffers
from trainkernel.indexing import ZERO
from trainkernel.memory import Frame
from trainkernel.schedule import BlockRegion, Task

_BODIES: Mapping[str, Callable[[Task, Frame, PointerText, PointerText, BlockRegion | None], TaskBody]] = {
    "pointwise": PointwiseBody,
    "copy": CopyBody,
    "reduction": ReductionBody,
    "product": ProductBody,
    "scan": ScanBody,
}


@dataclass(frozen=True)
class TaskFunction:
    """A task's function: its text, its name, what of the prelude it needs, its shared memory.

    ``needs_free_shared``: it writes shared memory before any block barrier of its own, so what used
    shared memory before it must have been read.
    """

    name: str
    text: str
    templates: frozenset[str]
    shared_bytes: int
    uses_uniform: bool
    needs_free_shared: bool


def emit_task(
    task: Task,
    task_id: int,
    stage: int,
    frame: Frame,
    base: PointerText,
    scalar: PointerText,
    region: BlockRegion | None = None,
) -> TaskFunction:
    """The function of one task (any kind but a loop or a region), or of one part of a region."""
    emitter = _BODIES[task.kind](task, frame, base, scalar, region)
    body = emitter.lines()
    name = f"task_{task_id}_{task.name}"
    steps = "".join(f", int step_{depth}" for depth in range(frame.depth))
    slabs = ", unsigned char* slabs" if region is not None and region.shared.end_bytes else ""
    shared = f"{slabs}, unsigned char* shared" if emitter.shared_bytes else slabs
    uses_uniform = any("u.v_" in line for line in emitter.scope.prologue() + body)
    uniform = ", const TkUniform& u" if uses_uniform else ""
    lines = [
        comment(f"Task {task_id}, stage {stage}: {line}" if i == 0 else f"  {line}")
        for i, line in enumerate(_describe(task))
    ]
    lines.append(f"__device__ __forceinline__ void {name}(const TkParams& p{uniform}, int piece{shared}{steps}) {{")
    lines += [INDENT + line for line in emitter.scope.prologue() + body]
    lines.append("}")
    return TaskFunction(
        name,
        "\n".join(lines),
        frozenset(emitter.templates | emitter.scope.templates),
        emitter.shared_bytes,
        uses_uniform,
        emitter.needs_free_shared,
    )


def emit_uniform(frame: Frame, base: PointerText, scalar: PointerText) -> tuple[list[str], frozenset[str]]:
    """The struct of values that are the same for the whole launch and the function that computes it; its templates."""
    names = uniform_buffers(frame)
    scope = TaskScope(frame, base, scalar, hoist=False)
    scope.uniform = ()
    values = ValueScope(scope, {}, None)
    results = [values.element(name, ZERO) for name in names]
    fields = " ".join(f"{register_type(scope.dtype(name))} v_{name};" for name in names)
    lines = [
        "// Values that depend on scalars alone, the same for the whole launch.",
        f"struct TkUniform {{ {fields} }};",
        "",
        "__device__ __forceinline__ TkUniform tk_uniform(const TkParams& p) {",
        *(INDENT + line for line in values.lines),
        f"{INDENT}return TkUniform{{{', '.join(results)}}};",
        "}",
        "",
    ]
    return lines, frozenset(scope.templates)


def _describe(task: Task) -> list[str]:
    if task.copy is not None:
        return [str(task)]
    return [str(task)] + [str(operation) for operation in task.operations]
