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
from trainkernel.codegen.text import INDENT, block, comment
from trainkernel.codegen.values import Pointer, PointerText, TaskScope, ValueScope, uniform_buffers
from trainkernel.errors import VerificationError
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
    """A task's function, and what it needs: prelude files, shared memory.

    ``parameters`` follow the kernel's; ``needs_free_shared``: it writes shared memory before any block
    barrier of its own, so what used shared memory before it must have been read.
    """

    task: Task
    parameters: str
    pointers: tuple[Pointer, ...]
    statements: tuple[str, ...]
    templates: frozenset[str]
    shared_bytes: int
    uses_uniform: bool
    needs_free_shared: bool

    def name(self, task_id: int) -> str:
        """The function's name."""
        return f"task_{task_id}_{self.task.name}"

    def title(self, task_id: int, stage: int) -> list[str]:
        """The comment above the function."""
        first, *others = _describe(self.task)
        return [comment(f"Task {task_id}, stage {stage}: {first}"), *(comment(f"  {line}") for line in others)]

    def text(self, task_id: int, stage: int) -> str:
        """The comment and the function."""
        body = [*(pointer.declaration for pointer in self.pointers), *self.statements]
        head = f"__device__ __forceinline__ void {self.name(task_id)}({self.parameters})"
        return "\n".join([*self.title(task_id, stage), *block(head, body)])


def emit_task(
    task: Task, frame: Frame, base: PointerText, scalar: PointerText, region: BlockRegion | None = None
) -> TaskFunction:
    """The function of one task (any kind but a loop or a region), or of one part of a region.

    Raises
    ------
    VerificationError
        If its text reads what the task does not say that it reads: another value may lie there by then.
    """
    emitter = _BODIES[task.kind](task, frame, base, scalar, region)
    body = emitter.lines()
    unplanned = emitter.scope.buffers_read - set(task.reads) - set(task.stores)
    if unplanned:
        raise VerificationError(f"task {task.name!r} reads {sorted(unplanned)}, of which the memory plan does not know")
    pointers, statements = emitter.scope.pointers, emitter.scope.constants.lines + body
    steps = "".join(f", int step_{depth}" for depth in range(frame.depth))
    slabs = ", unsigned char* slabs" if region is not None and region.shared.end_bytes else ""
    shared = f"{slabs}, unsigned char* shared" if emitter.shared_bytes else slabs
    uses_uniform = any("u.v_" in line for line in statements)
    uniform = ", const TkUniform& u" if uses_uniform else ""
    return TaskFunction(
        task,
        f"const TkParams& p{uniform}, int piece{shared}{steps}",
        tuple(pointers),
        tuple(statements),
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
