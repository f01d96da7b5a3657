"""The shared memory of a block region: what lies there, from which part to which, and its block barriers.

Three things want to be near: the rows of values that only the region's parts read (*slabs*), copies
of what comes from outside (*staged*: weights, biases, rows of the batch), which are fetched before
the first part, and scratch. Where a block computes several pieces, two more stay there over all of them:
weights that it rounds to 16 bits once (*rounded*), and its partial results (*sums*). Slabs come first, then
rounded weights, copies and sums, as far as there is room; what does not fit is read and written in device
memory by the same code.

Where one piece is a whole step of a loop, values stay near from step to step (*kept*): carries that
the step updates in place are slabs, fetched before the first step and written to their arrays after
the last; copies of what no step changes are fetched once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from trainkernel.access import cast_source
from trainkernel.arithmetic import scale_of
from trainkernel.block_tiles import block_tile
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Operation, TensorSpec
from trainkernel.near_products import (
    MAX_STAGED_BYTES,
    PANEL_PAD,
    SIXTEEN_BIT_PAD,
    block_sums_bytes,
    filled_bytes,
    panel_depth,
    stream_bytes,
    stream_columns,
)
from trainkernel.ops import OPS
from trainkernel.product_plans import SIXTEEN_BIT_FORMATS, TENSOR_DEPTHS, ProductPlan, ceil_div
from trainkernel.reduction_plans import WARP_COLUMNS, ReductionPlan
from trainkernel.region_plans import Split
from trainkernel.schedule import ArenaPlace, Place, Rounded, SharedLayout, SharedPlace, Staged, Task, runs_whole
from trainkernel.target import Target

_ALIGNMENT_BYTES = 128
_BANKS_APART = 16
_MAX_WHOLE_ELEMENTS = 1024
_MAX_EVALUATED_ELEMENTS = 32 * 1024
_STAGED_DTYPES = ("float32", "int32", "uint32")
_MAX_ROW_STRIDE = 2**29
_MAX_REDUCTION_SCRATCH_BYTES = 16 * 1024
_MAX_TILE_SCRATCH_BYTES = 96 * 1024


@dataclass(frozen=True)
class Interval:
    """Bytes of shared memory, and the parts, or the levels of parts, during which they are in use."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class LoopState:
    """What the steps of a loop share: inputs that no step changes, and carries updated in place, new name to old."""

    constants: frozenset[str] = frozenset()
    carries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RegionParts:
    """The parts of a region in order, and what is known of the buffers around them.

    Parts of one of the ``levels``, which go up, do not wait for each other; ``aligned[i]`` are the buffers of
    which part ``i`` reads the piece's own rows alone, ``scalars`` the inputs that are passed by value, ``inlined``
    the operations that their readers evaluate, ``threads`` those of a block of the ``target``; ``state`` is empty
    unless the region is a whole step of a loop.
    """

    parts: Sequence[Task]
    levels: Sequence[int]
    aligned: Sequence[frozenset[str]]
    split: Split
    declared: Mapping[str, TensorSpec]
    places: Mapping[str, Place]
    scalars: frozenset[str]
    inlined: Mapping[str, Operation]
    threads: int
    target: Target
    state: LoopState

    @cached_property
    def written(self) -> Mapping[str, int]:
        """The buffers that parts store, and by which part."""
        return {name: number for number, part in enumerate(self.parts) for name in part.stores}

    def is_outside(self, name: str) -> bool:
        """Whether a buffer is stored by others, in device memory."""
        return name not in self.written and name in self.places and name not in self.scalars

    def slab(self, name: str, other: str | None = None) -> SharedPlace:
        """The rows of one piece at byte 0, padded where a product reads several of them at once.

        The same place may be read under an ``other`` name.
        """
        spec, names = self.declared[name], (name, other)
        own = spec.num_elements // self.split.pieces
        row = spec.shape[-1] if spec.ndim else 1
        views = [(part, view) for part in self.parts for view in _product_operands(part) if view.buffer in names]
        padded = row % _BANKS_APART == 0 and own % row == 0 and all(keeps_rows(*each, row) for each in views)
        if padded and views:
            return SharedPlace(0, own, row, SIXTEEN_BIT_PAD if spec.dtype in SIXTEEN_BIT_FORMATS else PANEL_PAD)
        return SharedPlace(0, own)

    def bytes_of(self, name: str, slab: SharedPlace) -> int:
        """Size of a slab."""
        return slab.size * DTYPES[self.declared[name].dtype].itemsize_bytes

    def rounded(self, part: Task) -> list[Rounded]:
        """The operands of a part that a block rounds once: for all its pieces, or for several parts."""
        matrix = rounded_matrix(part, self.inlined)
        if matrix is None or not self.is_outside(matrix.buffer):
            return []
        uses = sum(rounded_matrix(other, self.inlined) == matrix for other in self.parts)
        return [matrix] if self.split.slices > 1 or uses > 1 else []

    def sums(self) -> Iterator[tuple[str, SharedPlace]]:
        """The partial results that could stay in shared memory until the block's last piece, at byte 0."""
        for part in self.parts if self.split.slices > 1 else ():
            if part.root is not None and part.root.op in ("product_partials", "reduce_partials"):
                out = part.root.outputs[0]
                own, row = out.num_elements // self.split.partials, out.shape[-1]
                apart = row % 32 == 0 and own % row == 0  # neighbouring rows at other banks
                yield out.buffer, SharedPlace(0, own, row, SIXTEEN_BIT_PAD) if apart else SharedPlace(0, own)

    def wishes(self, number: int, rounded: Set[Rounded]) -> list[Staged]:
        """Copies that part ``number`` would like to find in shared memory, beside those ``rounded`` there."""
        part, wishes, matrices, limit = self.parts[number], [], set(), _MAX_WHOLE_ELEMENTS
        if isinstance(part.plan, ProductPlan) and part.plan.path == "block" and part.root is not None:
            if part.plan.tensor in SIXTEEN_BIT_FORMATS:
                limit = _MAX_EVALUATED_ELEMENTS
            for position, operand in enumerate(part.root.inputs[-2:]):
                assert isinstance(operand, TensorSpec)
                copy = staged_matrix(part, position, self.split)
                if copy is not None and self.is_outside(operand.buffer) and copy.size_bytes <= MAX_STAGED_BYTES:
                    wishes.append(copy)
                    matrices.add(operand.buffer)
            matrices |= {matrix.buffer for matrix in self.rounded(part) if matrix in rounded}
        for name in part.reads:
            if self.is_outside(name) and name not in matrices and self.declared[name].dtype in _STAGED_DTYPES:
                copy = staged_elements(self.declared[name], name in self.aligned[number], self.split, limit)
                wishes += [copy] if copy is not None else []
        return wishes


def _product_operands(part: Task) -> tuple[TensorSpec, ...]:
    """Both operands of a block product, each with its outer dim before the depth."""
    if not isinstance(part.plan, ProductPlan) or part.plan.path != "block" or part.root is None:
        return ()
    a, b = part.root.inputs[-2:]
    assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
    return a, b.mT


def keeps_rows(part: Task, view: TensorSpec, row: int) -> bool:
    """Whether a block product's operand steps over whole rows of its buffer, and goes along one of them."""
    assert isinstance(part.plan, ProductPlan)
    strides, sizes = view.strides, view.shape
    if part.plan.split > 1 and strides[-1] % row:
        return False
    along = [size for stride, size in zip(strides, sizes, strict=True) if stride == 1 and size > 1]
    whole = all(stride % row == 0 for stride, size in zip(strides, sizes, strict=True) if stride != 1 and size > 1)
    return whole and len(along) <= 1 and view.offset % row + max(along, default=1) <= row


def lay_out(region: RegionParts, private: Iterable[str]) -> SharedLayout:
    """Place slabs, copies and sums; ``private`` are the buffers that nobody else reads.

    Where it costs nothing its place near, a value takes another's place only at a later level, so that no barrier
    stands between the parts of one.
    """
    private = sorted(private, key=lambda name: (region.written[name], name))
    tight = _settled(region, private, range(len(region.parts)))
    apart = _settled(region, private, region.levels)
    return apart if _all_near(apart) == _all_near(tight) else tight


def _all_near(layout: SharedLayout) -> tuple[Set[object], ...]:
    """What has a place near."""
    return layout.slabs.keys(), layout.copies.keys(), layout.rounded.keys(), layout.sums.keys()


def _settled(region: RegionParts, private: Sequence[str], times: Sequence[int]) -> SharedLayout:
    """The layout in which a place is free again at the next of the parts' times.

    Operands that lie near need no scratch, which leaves room for more of them: so all are taken to lie there
    until some find no place.
    """
    rounded = dict.fromkeys((matrix for part in region.parts for matrix in region.rounded(part)), 0)
    near = SharedLayout({name: region.slab(name) for name in private}, {}, 0, rounded)
    while True:
        layout = _laid_out(region, private, near, times)
        if near.slabs.keys() <= layout.slabs.keys() and near.rounded.keys() == layout.rounded.keys():
            return layout
        slabs = {name: slab for name, slab in near.slabs.items() if name in layout.slabs}
        near = SharedLayout(slabs, {}, 0, layout.rounded)


def _laid_out(region: RegionParts, private: Sequence[str], near: SharedLayout, times: Sequence[int]) -> SharedLayout:
    """The layout beside the scratch that parts need if what is ``near`` lies in shared memory."""
    parts, split = region.parts, region.split
    scratch_bytes = max((_scratch_bytes(region, part, near) for part in parts), default=0)
    limit_bytes = region.target.task_shared_bytes - scratch_bytes
    taken: list[Interval] = []

    def placed(size_bytes: int, first: int, last: int) -> int | None:
        interval = _place(taken, size_bytes, first, last, limit_bytes)
        if interval is None:
            return None
        taken.append(interval)
        return interval.start

    slabs: dict[str, SharedPlace] = {}
    for name in private:
        first = region.written[name]
        last = max((number for number, part in enumerate(parts) if name in part.reads), default=first)
        slab = region.slab(name)
        start = placed(region.bytes_of(name, slab), times[first], times[last])
        if start is not None:
            slabs[name] = replace(slab, offset_bytes=start)
    kept: dict[Staged, int] = {}
    for new, old in sorted(region.state.carries.items(), key=lambda pair: region.declared[pair[0]].num_elements):
        slab = region.slab(old, new)
        start = placed(region.bytes_of(old, slab), 0, len(parts))
        if start is not None:
            slabs[old] = slabs[new] = replace(slab, offset_bytes=start)
            kept[_whole(old, region.declared[old].dtype, slab)] = start
    returned = frozenset(kept)
    rounded: dict[Rounded, int] = {}
    for matrix in sorted(near.rounded, key=lambda matrix: matrix.size_bytes):
        start = placed(matrix.size_bytes, 0, len(parts))
        if start is not None:
            rounded[matrix] = start
    wanted: dict[Staged, int] = {}
    for number in range(len(parts)):
        for copy in region.wishes(number, near.rounded.keys()):
            # What is the same for every piece, or every step, stays for the next one.
            stays = copy.buffer in region.state.constants or (split.pieces > 1 and not copy.piece_stride)
            if copy.buffer not in slabs:
                wanted[copy] = len(parts) if stays else times[number]
    staged: dict[Staged, int] = {}
    for copy, last in sorted(wanted.items(), key=lambda pair: pair[0].size_bytes):
        start = placed(copy.size_bytes, 0, last)
        if start is not None:
            (kept if copy.buffer in region.state.constants else staged)[copy] = start
    sums: dict[str, SharedPlace] = {}
    for name, place in sorted(region.sums(), key=lambda pair: pair[1].size):
        start = placed(region.bytes_of(name, place), 0, len(parts))
        if start is not None:
            sums[name] = replace(place, offset_bytes=start)
    end = max((interval.end for interval in taken), default=0)
    return SharedLayout(slabs, staged, end, rounded, sums, kept, returned)


def _whole(buffer: str, dtype: str, slab: SharedPlace) -> Staged:
    """The copy of a whole buffer that fills a slab."""
    columns = slab.row if slab.padding else slab.own_elements
    return Staged(buffer, 0, slab.own_elements // columns, columns, columns, 0, dtype, slab.padding)


def may_stay_near(old: TensorSpec, new: TensorSpec) -> bool:
    """Whether a carry, in place from one step to the next, is of a kind that is kept near."""
    dense = old.is_dense and new.is_dense and not old.offset and not new.offset
    return dense and old.dtype == new.dtype and old.dtype in _STAGED_DTYPES and 0 < old.num_elements == new.num_elements


def epilogue_cost(part: Task) -> float:
    """Cost of what follows a product's sums: bias, scale, members; 0 where the sums are stored as they are."""
    root = part.root
    assert root is not None
    scaled = len(root.tensor_inputs) > 2 or scale_of(root, "alpha") != 1
    return scaled + sum(OPS[member.op].cost + 1 for member in part.members if member.op in OPS)


def is_read_in_place(operand: TensorSpec, is_stored: bool, tensor: str, depth: int) -> bool:
    """Whether a block product can read an operand where it lies, with a contiguous dim, in the format that it takes.

    Tensor cores take 16-bit elements in whole runs of 8, and whole steps of the ``depth`` of a piece.
    """
    if not is_stored or 1 not in operand.strides[-2:]:
        return False
    if tensor not in SIXTEEN_BIT_FORMATS:
        return operand.dtype == "float32"
    along = operand.shape[-1 if operand.strides[-1] == 1 else -2]
    return operand.dtype == tensor and along % 8 == 0 and depth % TENSOR_DEPTHS[tensor] == 0


def _filled_bytes(region: RegionParts, part: Task, near: SharedLayout, count: int = 2) -> int:
    """A bound of the scratch for the first operands of a block product that are evaluated before it."""
    plan, root = part.plan, part.root
    assert isinstance(plan, ProductPlan) and root is not None
    if plan.tensor in SIXTEEN_BIT_FORMATS:
        sizes = enumerate(filled_bytes(plan))
        return sum(size for position, size in sizes if not is_near(part, position, near, region.inlined))
    total = 0
    for operand, outer in list(zip(root.inputs[-2:], (plan.tile_m, plan.tile_n), strict=True))[:count]:
        assert isinstance(operand, TensorSpec)
        stored = operand.buffer in region.places and operand.buffer not in region.scalars
        if plan.tensor or not is_read_in_place(operand, stored, "", plan.tile_k):
            total += 4 * max(outer * filled_stride(plan.tile_k), plan.tile_k * filled_stride(outer))
    return total


def is_near(part: Task, position: int, layout: SharedLayout, inlined: Mapping[str, Operation]) -> bool:
    """Whether tensor cores find a 16-bit operand of a product in shared memory, in rows aligned to 16 bytes."""
    plan = part.plan
    assert isinstance(plan, ProductPlan)
    if position == 1 and rounded_matrix(part, inlined) in layout.rounded:
        return True
    view = _product_operands(part)[position]
    slab = layout.slabs.get(view.buffer)
    if slab is None or slab.padding != SIXTEEN_BIT_PAD or view.offset % 8 or not keeps_rows(part, view, slab.row):
        return False
    stride = view.strides[-2 if view.strides[-1] == 1 else -1]
    if stride % 8:
        return False  # of a single row, which may have any
    # The rows of a piece begin at a multiple of eight, along which of both dims they lie.
    aligned = plan.split > 1 or plan.batch > 1 or view.strides[-1] == 1 or plan.tile_m % 8 == 0
    return aligned and is_read_in_place(view, True, plan.tensor, plan.tile_k)


def filled_stride(columns: int) -> int:
    """Elements between rows of an operand in scratch."""
    return panel_depth(columns) + PANEL_PAD


def _scratch_bytes(region: RegionParts, part: Task, near: SharedLayout) -> int:
    """A bound of the scratch of a part, if what is ``near`` lies in shared memory."""
    plan = part.plan
    if not isinstance(plan, ProductPlan):
        return _MAX_REDUCTION_SCRATCH_BYTES
    if plan.path != "block":
        return _MAX_TILE_SCRATCH_BYTES
    b = part.root.inputs[-1] if part.root is not None else None
    if isinstance(b, TensorSpec) and region.is_outside(b.buffer) and is_streamed(part, region.split):
        columns = stream_columns(plan)
        tile = replace(plan, tile_n=columns)
        streamed = stream_bytes(plan, columns)
        return _filled_bytes(region, part, near, 1) + streamed + _sums_bytes(region, part, tile)
    return _filled_bytes(region, part, near) + _sums_bytes(region, part, plan)


def _sums_bytes(region: RegionParts, part: Task, plan: ProductPlan) -> int:
    return block_sums_bytes(plan, region.threads, epilogue_cost(part), region.target)


def is_streamed(part: Task, split: Split) -> bool:
    """Whether a block product fetches its second operand, too large to stay, a few columns at a time."""
    plan = part.plan
    assert isinstance(plan, ProductPlan)
    if plan.split > 1 or plan.batch > 1 or plan.tensor in SIXTEEN_BIT_FORMATS:
        return False
    copy = staged_matrix(part, 1, split)
    return copy is not None and copy.size_bytes > MAX_STAGED_BYTES


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _place(taken: Sequence[Interval], size: int, first: int, last: int, limit: int) -> Interval | None:
    """The lowest free place of ``size`` bytes from a part or level to another, or None."""
    size, start = _round_up(max(size, 1)), 0
    busy = sorted((i.start, i.end) for i in taken if i.first <= last and first <= i.last)
    for begin, end in busy:
        if begin - start >= size:
            break
        start = max(start, end)
    return Interval(start, start + size, first, last) if start + size <= limit else None


# ---------------------------------------------------------------------------- what is staged


def staged_matrix(part: Task, position: int, split: Split) -> Staged | None:
    """The copy of a product's operand ``position`` (0: a, 1: b) as a padded matrix; None where it is no plain one."""
    plan, root = part.plan, part.root
    assert isinstance(plan, ProductPlan) and root is not None
    operand = root.inputs[-2:][position]
    assert isinstance(operand, TensorSpec)
    if operand.dtype != "float32":
        return None
    view = operand if position == 0 else operand.mT
    outer, depth = (plan.tile_m, plan.tile_n)[position], plan.tile_k
    outer_stride, depth_stride = view.strides[-2:]
    count, piece_stride = 1, 0
    if plan.batch > 1:
        count = plan.batch // split.pieces if plan.split == 1 else plan.batch
        if plan.split == 1:
            piece_stride = count * view.strides[0]
    elif plan.split == 1 and position == 0:
        piece_stride = plan.tile_m * outer_stride
    if plan.split > 1:
        piece_stride = plan.tile_k * depth_stride
    if split.pieces == 1:
        piece_stride = 0
    if depth_stride == 1:
        rows, row_stride, columns = outer, outer_stride, depth
    elif outer_stride == 1:
        rows, row_stride, columns = depth, depth_stride, outer
    else:
        return None
    if (count > 1 and view.strides[0] != rows * row_stride) or row_stride >= _MAX_ROW_STRIDE:
        return None
    return Staged(operand.buffer, operand.offset, count * rows, columns, row_stride, piece_stride, "float32", PANEL_PAD)


def rounded_matrix(part: Task, inlined: Mapping[str, Operation]) -> Rounded | None:
    """The second operand of a 16-bit block product if it is the same plain matrix for all pieces, or its cast."""
    plan, root = part.plan, part.root
    if not isinstance(plan, ProductPlan) or plan.path != "block" or root is None:
        return None
    if plan.tensor not in SIXTEEN_BIT_FORMATS or plan.split > 1 or plan.batch > 1:
        return None
    operand = root.inputs[-1]
    assert isinstance(operand, TensorSpec)
    view = cast_source(operand.mT, inlined)
    outer_stride, depth_stride = view.strides[-2:]
    if view.dtype not in ("float32", plan.tensor) or view.buffer in inlined or 1 not in (outer_stride, depth_stride):
        return None
    if depth_stride == 1:
        return Rounded(view.buffer, view.offset, plan.n, plan.k, outer_stride, plan.tensor)
    return Rounded(view.buffer, view.offset, plan.k, plan.n, depth_stride, plan.tensor)


def staged_elements(
    spec: TensorSpec, aligned: bool, split: Split, limit: int = _MAX_EVALUATED_ELEMENTS
) -> Staged | None:
    """The copy of a buffer's rows of a piece, or of a whole buffer of at most ``limit`` elements; None for others."""
    if not spec.is_dense or spec.offset:
        return None
    if aligned and split.label > 1:
        own = spec.num_elements // split.pieces
        return Staged(spec.buffer, 0, 1, own, own, own, spec.dtype, 0)
    if spec.num_elements <= limit:
        return Staged(spec.buffer, 0, 1, spec.num_elements, spec.num_elements, 0, spec.dtype, 0)
    return None


# ---------------------------------------------------------------------------- block barriers


@dataclass(frozen=True)
class _Touches:
    """Memory that one part, or several, reads and writes: (space, start, end)."""

    reads: frozenset[tuple[str, int, int]] = frozenset()
    writes: frozenset[tuple[str, int, int]] = frozenset()

    def __or__(self, other: _Touches) -> _Touches:
        return _Touches(self.reads | other.reads, self.writes | other.writes)

    def conflicts(self, later: _Touches) -> bool:
        return (
            _overlap(self.writes, later.reads)
            or _overlap(self.reads, later.writes)
            or _overlap(self.writes, later.writes)
        )


def _overlap(first: Iterable[tuple[str, int, int]], second: Iterable[tuple[str, int, int]]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in first for b in second)


_SCRATCH = ("scratch", 0, 1)


def block_barriers(region: RegionParts, layout: SharedLayout) -> tuple[bool, ...]:
    """Before which parts a block barrier stands; the last one ends a piece that another may follow."""
    copies: list[Staged | Rounded] = [*layout.staged, *layout.rounded]
    pending = _Touches(writes=_bytes_of_copies(copies, layout))
    # What is the same for every piece is fetched once.
    head = _Touches(writes=_bytes_of_copies([copy for copy in layout.staged if copy.piece_stride], layout))
    head_is_open = True
    waits = []
    for number in range(len(region.parts)):
        touches = _touches(region, number, layout)
        waits.append(pending.conflicts(touches))
        if waits[-1]:
            pending, head_is_open = _Touches(), False
        if head_is_open:
            head |= touches
        pending |= touches
        if scratch_use(region, region.parts[number], layout) == "read":
            pending |= _Touches(reads=frozenset((_SCRATCH,)))
    return (*waits, region.split.pieces > 1 and _near(pending).conflicts(_near(head)))


def first_warps(region: RegionParts, waits: Sequence[bool], layout: SharedLayout) -> tuple[int, ...]:
    """The warp with which each part begins: those between two barriers that need few warps stand side by side."""
    warps, first, found = region.threads // 32, 0, []
    for part, wait in zip(region.parts, waits, strict=False):
        busy = _busy_warps(region, part, layout)
        first = 0 if wait else first
        found.append(first if busy < warps else 0)
        first = (first + busy) % warps
    return tuple(found)


def _busy_warps(region: RegionParts, part: Task, layout: SharedLayout) -> int:
    """Warps that have work in a part; all of them where that is not told by the plan alone."""
    plan, warps = part.plan, region.threads // 32
    if isinstance(plan, ReductionPlan) and part.root is not None:
        rows = plan.rows if part.root.op == "reduce_partials" else plan.rows // region.split.pieces
        per_warp = {"thread": 32, "warp": 1, "warp_columns": WARP_COLUMNS}.get(plan.path)
        return min(warps, ceil_div(rows, per_warp)) if per_warp else warps
    if (
        isinstance(plan, ProductPlan)
        and plan.path == "block"
        and not plan.tensor
        and not _scratch_bytes(region, part, layout)
    ):
        tile = block_tile(plan.tile_m, plan.tile_n, plan.tile_k, region.threads)
        return min(warps, tile.num_tiles(plan.tile_m, plan.tile_n))
    return warps


def _bytes_of_copies(copies: Iterable[Staged | Rounded], layout: SharedLayout) -> frozenset[tuple[str, int, int]]:
    return frozenset(("shared", layout.at(copy), layout.at(copy) + copy.size_bytes) for copy in copies)


def _near(touches: _Touches) -> _Touches:
    """What lies in shared memory; the rows of the next piece lie elsewhere in device memory."""
    return _Touches(
        *(
            frozenset(item for item in items if item[0] in ("shared", "scratch"))
            for items in (touches.reads, touches.writes)
        )
    )


def _touches(region: RegionParts, number: int, layout: SharedLayout) -> _Touches:
    part = region.parts[number]
    reads = {*_bytes_of_copies(copies_of(region, number, layout), layout)}
    reads |= {_where(region, name, layout) for name in part.reads}
    writes = {_where(region, name, layout) for name in part.stores}
    if part.copy is not None:
        destination = part.copy.destination
        writes.add(_where(region, destination, layout) if isinstance(destination, str) else (str(destination), 0, 1))
    if scratch_use(region, part, layout) == "write":
        writes.add(_SCRATCH)
    return _Touches(frozenset(reads), frozenset(writes))


def copies_of(region: RegionParts, number: int, layout: SharedLayout) -> tuple[Staged | Rounded, ...]:
    """The copies that a part reads."""
    staged = [copy for copy in region.wishes(number, layout.rounded.keys()) if copy in layout.copies]
    return *staged, *(matrix for matrix in region.rounded(region.parts[number]) if matrix in layout.rounded)


def scratch_use(region: RegionParts, part: Task, layout: SharedLayout) -> str | None:
    """``"write"`` if a part writes to scratch; ``"read"`` if it waits by itself before, so that only readers matter."""
    if isinstance(part.plan, ReductionPlan) and part.plan.path in ("block", "columns"):
        return "read"
    if runs_whole(part) or (isinstance(part.plan, ProductPlan) and _scratch_bytes(region, part, layout)):
        return "write"
    return None


def _where(region: RegionParts, name: str, layout: SharedLayout) -> tuple[str, int, int]:
    slab = layout.slabs.get(name)
    if slab is not None:
        return "shared", slab.offset_bytes, slab.offset_bytes + region.bytes_of(name, slab)
    place = region.places[name]
    return (f"arena {place.home or name}" if isinstance(place, ArenaPlace) else str(place)), 0, 1
