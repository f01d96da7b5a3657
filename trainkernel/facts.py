"""What a launch needs to know of a generated kernel, and its JSON: nothing here imports the generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Slot:
    """One pointer of the parameter block.

    ``index`` counts the program's inputs or outputs; ``alignment_bytes`` is what the address of
    the first element must be a multiple of.
    """

    kind: str
    index: int
    name: str
    alignment_bytes: int = 1


@dataclass(frozen=True)
class ScalarSlot:
    """One scalar by value in the parameter block; ``maximum`` bounds a loop's length."""

    index: int
    name: str
    dtype: str
    offset_bytes: int
    maximum: int | None = None


@dataclass(frozen=True)
class TaskInfo:
    """A task as reports name it; its position in ``LaunchFacts.tasks`` is its id."""

    stage: int
    name: str
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Segment:
    """Neighbouring ticks of a run that are alike: a stage, which is one tick, or the steps of a loop at the top.

    Attributes
    ----------
    length : int or None
        How many ticks.
    scalar : int or None
        Where ``length`` is None: the index of the scalar input that says it.
    inner : tuple of int
        Indices of the scalar inputs that are lengths of loops inside of a step.
    """

    length: int | None
    scalar: int | None = None
    inner: tuple[int, ...] = ()

    def num_ticks(self, values: Mapping[int, Any] | Sequence[Any]) -> int:
        """The ticks, with the values of the scalar inputs by input index."""
        return int(values[self.scalar]) if self.length is None else self.length  # type: ignore[index]


@dataclass(frozen=True)
class LaunchFacts:
    """The part of a ``GeneratedKernel`` that the runtime reads; its attributes have the same names there.

    Attributes
    ----------
    entry : str
        The kernel's name in the cubin.
    slots, scalars, params_bytes, uses_tensor_table
        Layout of the parameter block.
    tasks : tuple of TaskInfo
        For the messages of a barrier timeout.
    segments : tuple of Segment
        All ticks of a run, of which a launch runs a part; empty without the option ``parts``.
    ticks_offset_bytes : int or None
        Where the parameter block has the launch's first tick and, 8 bytes after it, the tick before which it ends.
    """

    entry: str
    threads_per_block: int
    shared_bytes: int
    workspace_bytes: int
    blocks_per_sm: int
    max_blocks: int | None
    max_work_blocks: int
    grid_barriers: int
    params_bytes: int
    uses_tensor_table: bool
    slots: tuple[Slot, ...]
    scalars: tuple[ScalarSlot, ...]
    tasks: tuple[TaskInfo, ...]
    inplace_outputs: Mapping[int, int]
    segments: tuple[Segment, ...]
    ticks_offset_bytes: int | None

    @staticmethod
    def of(generated: Any) -> LaunchFacts:
        """Those of a GeneratedKernel."""
        return LaunchFacts(**{field.name: getattr(generated, field.name) for field in fields(LaunchFacts)})

    def to_json(self) -> dict[str, Any]:
        """Lists, numbers and texts alone, from which ``from_json`` makes an equal record."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "slots": [[slot.kind, slot.index, slot.name, slot.alignment_bytes] for slot in self.slots],
            "scalars": [[s.index, s.name, s.dtype, s.offset_bytes, s.maximum] for s in self.scalars],
            "tasks": [[task.stage, task.name, *task.operations] for task in self.tasks],
            "inplace_outputs": [list(pair) for pair in self.inplace_outputs.items()],
            "segments": [[one.length, one.scalar, *one.inner] for one in self.segments],
        }

    @staticmethod
    def from_json(data: Any) -> LaunchFacts:
        """What ``to_json`` gave.

        Raises
        ------
        ValueError
            If it is anything else.
        """
        if not isinstance(data, dict) or set(data) != {*_PLAIN, *_ROWS}:
            raise ValueError("these are no launch facts")
        for name, kinds in _PLAIN.items():
            _check(data[name], kinds)
        return LaunchFacts(
            **{name: data[name] for name in _PLAIN},
            slots=tuple(Slot(*row) for row in _rows(data["slots"], (str, int, str, int))),
            scalars=tuple(ScalarSlot(*row) for row in _rows(data["scalars"], (int, str, str, int, _OPTIONAL_INT))),
            tasks=tuple(TaskInfo(stage, name, tuple(names)) for stage, name, *names in _tasks(data["tasks"])),
            inplace_outputs=dict(_rows(data["inplace_outputs"], (int, int))),
            segments=tuple(
                Segment(length, scalar, tuple(inner)) for length, scalar, *inner in _segments(data["segments"])
            ),
        )


_OPTIONAL_INT = (int, type(None))
_ROWS = ("slots", "scalars", "tasks", "inplace_outputs", "segments")
_PLAIN: Mapping[str, Any] = {
    "entry": str,
    "threads_per_block": int,
    "shared_bytes": int,
    "workspace_bytes": int,
    "blocks_per_sm": int,
    "max_blocks": _OPTIONAL_INT,
    "max_work_blocks": int,
    "grid_barriers": int,
    "params_bytes": int,
    "uses_tensor_table": bool,
    "ticks_offset_bytes": _OPTIONAL_INT,
}


def _check(value: Any, kinds: Any) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise ValueError(f"launch facts hold {value!r}")


def _rows(rows: Any, kinds: tuple[Any, ...]) -> list[list[Any]]:
    """Rows with one value of each kind."""
    _check(rows, list)
    for row in rows:
        _check(row, list)
        if len(row) != len(kinds):
            raise ValueError(f"launch facts hold a row {row!r}")
        for value, kind in zip(row, kinds, strict=True):
            _check(value, kind)
    return list(rows)


def _tasks(rows: Any) -> list[list[Any]]:
    _check(rows, list)
    for row in rows:
        _check(row, list)
        _check(row[0] if row else None, int)
        if len(row) < 2 or not all(isinstance(name, str) for name in row[1:]):
            raise ValueError(f"launch facts hold a task {row!r}")
    return list(rows)


def _segments(rows: Any) -> list[list[Any]]:
    _check(rows, list)
    for row in rows:
        _check(row, list)
        kinds = (_OPTIONAL_INT, _OPTIONAL_INT, *(int for _ in row[2:]))
        if len(row) < 2 or (row[0] is None) == (row[1] is None):
            raise ValueError(f"launch facts hold a segment {row!r}")
        for value, kind in zip(row, kinds, strict=True):
            _check(value, kind)
    return list(rows)
