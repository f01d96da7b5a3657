"""What the bodies of all tasks share: the task's scope, its members, its stores."""

from __future__ import annotations

from abc import ABC, abstractmethod

from trainkernel.codegen.conversions import register_type, store
from trainkernel.codegen.regions import near_elements
from trainkernel.codegen.values import PointerText, TaskScope, ValueScope
from trainkernel.dtypes import DTYPES
from trainkernel.indexing import Index, variable
from trainkernel.memory import Frame, Storage
from trainkernel.schedule import BlockRegion, Task


class TaskBody(ABC):
    """The statements of one task's function, and what they need: prelude files, shared memory.

    Parameters
    ----------
    task : Task
    frame : Frame
    base, scalar : callable
        As for ``TaskScope``.
    region : BlockRegion or None
        That the task is a part of.
    """

    def __init__(
        self, task: Task, frame: Frame, base: PointerText, scalar: PointerText, region: BlockRegion | None
    ) -> None:
        self.task = task
        self.frame = frame
        self.region = region
        near = near_elements(task, region, frame) if region is not None else None
        self.scope = TaskScope(frame, base, scalar, task.num_elements > 1, near)
        self.templates: set[str] = {"reduce"}
        self.shared_bytes = 0
        self.needs_free_shared = False
        self.threads = frame.schedule.options.threads

    @abstractmethod
    def lines(self) -> list[str]:
        """The statements."""

    def _members(self, registers: dict[str, str], element: Index) -> list[str]:
        """The statements of the members at the task's element; adds their registers."""
        values = ValueScope(self.scope, registers, element)
        for operation in self.task.members:
            values.member(operation, element)
        return values.lines

    def _epilogue(self, registers: dict[str, str], element: Index) -> list[str]:
        """Members at the task's element, then the stores."""
        lines = self._members(registers, element)
        return lines + [self._store(name, registers[name], element) for name in self.task.stores]

    def _register_type(self, buffer: str) -> str:
        return register_type(self.scope.dtype(buffer))

    def _store(self, buffer: str, value: str, element: Index) -> str:
        storage = self.frame.storage(buffer)
        pointer = self.scope.pointer(buffer, storage, const=False)
        text = store(pointer, storage.place(element), value, storage.dtype)
        found = self._own_sum(buffer, element)
        if found is None or self.region is None:
            return text
        pointer, place = found
        return f"if ({self.region.ends}) {text} else {store(pointer, place, value, storage.dtype)}"

    def _stored(self, buffer: str, element: Index) -> str:
        """The C expression of what a buffer that the task writes holds so far, in memory's type."""
        found = self._own_sum(buffer, element)
        if found is not None:
            pointer, place = found
            return f"{pointer}[{place}]"
        storage = self.frame.storage(buffer)
        return f"{self.scope.pointer(buffer, storage, const=False)}[{storage.place(element)}]"

    def _own_sum(self, buffer: str, element: Index) -> tuple[str, Index] | None:
        """The pointer to where a partial result stays until the block's last piece, and an element's place there."""
        place = None if self.region is None else self.region.shared.sums.get(buffer)
        if place is None or self.region is None:
            return None
        size_bytes = place.size * DTYPES[self.scope.dtype(buffer)].itemsize_bytes
        storage = Storage(
            "shared", place.offset_bytes, self.scope.dtype(buffer), size_bytes, row=place.row, padding=place.padding
        )
        own = element + variable(self.region.partial, self.region.split.partials) * -place.own_elements
        return self.scope.pointer(buffer, storage, const=False, own_sum=True), storage.place(own)

    def _partial_result(self) -> list[str]:
        """The number of the partial result that a piece adds to, where it is not the piece's own."""
        if self.region is None or self.region.adds is None:
            return []
        return [f"const int {self.region.partial} = piece / {self.region.split.slices};"]
