"""Copies of a region that come in bulk and start before the grid barrier in front of its stage.

What nobody has written since the barrier before may be fetched while a block waits for the others. Bulk copies are
made for that: a thread starts a whole row, and nobody waits for it until a part of the region does. They are longer
on their way than those of threads, so what starts with the region does not come in bulk.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from trainkernel.codegen.text import INDENT, block
from trainkernel.codegen.values import PointerText
from trainkernel.memory import Frame
from trainkernel.schedule import BlockRegion, Rounded, Staged

_ITEMSIZE_BYTES = 4
_MIN_ROW_BYTES = 128
_MIN_COPY_BYTES = 1024
_MIN_BYTES = 4 * 1024
"""Of a row, of a copy, of those that start together."""
_WARP = 32


@dataclass(frozen=True)
class _Rows:
    """One copy: what a call of ``tk_fetch_rows`` needs."""

    at: int
    source: str
    rows: int
    row_bytes: int
    distance_bytes: int
    shared_distance_bytes: int
    is_common: bool

    def call(self, threads: int) -> str:
        sizes = f"{self.rows}, {self.row_bytes}, {self.distance_bytes}, {self.shared_distance_bytes}, {threads}"
        return f"tk_fetch_rows<{sizes}>(shared + {self.at}, {self.source}, mbarrier, thread)"


@dataclass(frozen=True)
class BulkFetch:
    """Copies that arrive together, on the barrier in shared memory with the number ``arrival``."""

    rows: tuple[_Rows, ...]
    arrival: int

    def early(self, threads: int) -> list[str]:
        """The statements that start those of a block's first ``piece``, by the warps that do not wait for others."""
        waiting = _WARP if threads > _WARP else 0
        return ["{", *(INDENT + line for line in self._start(self.rows, waiting, threads - waiting)), "}"]

    def later(self, threads: int, is_first: str) -> list[str]:
        """The statements that start those of another ``piece``; ``is_first`` tells the first one of a block."""
        own = [rows for rows in self.rows if not rows.is_common]
        return block(f"if (!({is_first}))", self._start(own, 0, threads))

    def _start(self, rows: Sequence[_Rows], first_thread: int, threads: int) -> list[str]:
        moved = f" - {first_thread}" if first_thread else ""
        fence = ["tk_fence_async();"] if rows else []
        return [
            f"const int thread = (int)threadIdx.x{moved};",
            f"unsigned char* mbarrier = arrivals.mbarriers + {8 * self.arrival};",
            "unsigned started = 0;",
            *fence,
            *(f"started += {each.call(threads)};" for each in rows),
            "if (thread == 0) tk_mbarrier_arrive(mbarrier, started);",
        ]


@dataclass(frozen=True)
class BulkPlan:
    """What comes in bulk of a region's copies, by groups for which parts wait: the copies, and how they come.

    ``rounded`` are the matrices of 16-bit elements among what a block would round.
    """

    groups: tuple[tuple[list[Staged], BulkFetch | None], ...]
    rounded: frozenset[Rounded]


def plan_bulk(
    groups: Sequence[Sequence[Staged]], region: BlockRegion, frame: Frame, base: PointerText, early: Set[str]
) -> BulkPlan:
    """The copies that come in bulk, of the buffers in ``early``."""
    if not groups or not frame.schedule.target.has_bulk_copies:
        return BulkPlan(tuple(([], None) for _ in groups), frozenset())
    matrices = [matrix for matrix in region.shared.rounded if matrix.buffer in early and _is_copied(matrix, frame)]
    first_parts = region.copies[: second_wait(region)]
    found: list[tuple[list[Staged], BulkFetch | None]] = []
    for number, copies in enumerate(groups):
        long = _long_copies(copies, frame, early)
        rows = [_rows(copy, region, frame, base) for copy in long]
        for matrix in matrices:
            is_soon = len(groups) == 1 or any(matrix in own for own in first_parts)
            if is_soon == (number == 0):
                rows.append(_matrix_rows(matrix, region, frame, base))
        arrival = sum(fetch is not None for _, fetch in found)
        found.append((long, BulkFetch(tuple(rows), arrival) if rows else None))
    return BulkPlan(tuple(found), frozenset(matrices))


def second_wait(region: BlockRegion) -> int:
    """The number of the part before which the second block barrier of a piece stands; after the last without one."""
    waiting = [number for number, waits in enumerate(region.waits[:-1]) if waits]
    return waiting[1] if len(waiting) > 1 else len(region.parts)


def _long_copies(copies: Sequence[Staged], frame: Frame, early: Set[str]) -> list[Staged]:
    """The copies that come in bulk: early ones of long, aligned rows, if they are much."""
    long = [copy for copy in copies if copy.buffer in early and _is_long(copy) and _is_aligned(copy, frame)]
    return long if sum(copy.size_bytes for copy in long) >= _MIN_BYTES else []


def _is_copied(matrix: Rounded, frame: Frame) -> bool:
    """Whether a matrix to round is one of 16-bit elements in aligned rows of the arena, without zeros beside them."""
    storage = frame.storage(matrix.buffer)
    whole = matrix.shape == (matrix.rows, matrix.columns) and matrix.row_stride % 8 == matrix.offset % 8 == 0
    return whole and storage.dtype == matrix.dtype and storage.space == "arena" and not storage.steps


def _matrix_rows(matrix: Rounded, region: BlockRegion, frame: Frame, base: PointerText) -> _Rows:
    source = f"(const unsigned char*)({base(frame.storage(matrix.buffer))}) + {2 * matrix.offset}"
    sizes = (2 * matrix.columns, 2 * matrix.row_stride, 2 * matrix.stride)
    return _Rows(region.shared.rounded[matrix], source, matrix.rows, *sizes, is_common=True)


def _is_long(copy: Staged) -> bool:
    whole = all(size % 4 == 0 for size in (copy.columns, copy.piece_stride))
    if copy.rows > 1:
        whole = whole and copy.row_stride % 4 == copy.stride % 4 == 0
    return whole and copy.size_bytes >= _MIN_COPY_BYTES and _ITEMSIZE_BYTES * copy.columns >= _MIN_ROW_BYTES


def _is_aligned(copy: Staged, frame: Frame) -> bool:
    """Whether a copy begins at a whole 16 bytes wherever its array does."""
    storage = frame.storage(copy.buffer)
    return (storage.element_offset + copy.offset) % 4 == 0 and all(stride % 4 == 0 for _, stride in storage.steps)


def _rows(copy: Staged, region: BlockRegion, frame: Frame, base: PointerText) -> _Rows:
    storage = frame.storage(copy.buffer)
    source = f"(const unsigned char*)({base(storage)}) + {_ITEMSIZE_BYTES * (storage.element_offset + copy.offset)}"
    moves = [*storage.steps, *([("piece", copy.piece_stride)] if copy.piece_stride else [])]
    source += "".join(f" + (long long){name} * {_ITEMSIZE_BYTES * stride}" for name, stride in moves)
    rows, columns = copy.rows, copy.columns
    if copy.columns == copy.row_stride == copy.stride:
        rows, columns = 1, rows * columns
    return _Rows(
        region.shared.copies[copy],
        source,
        rows,
        _ITEMSIZE_BYTES * columns,
        _ITEMSIZE_BYTES * copy.row_stride,
        _ITEMSIZE_BYTES * copy.stride,
        copy.piece_stride == 0,
    )
