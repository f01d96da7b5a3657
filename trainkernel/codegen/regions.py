"""The parts of block regions: what is fetched before them, and products whose operands lie near."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from trainkernel.access import cast_source
from trainkernel.codegen.bulk import BulkFetch, plan_bulk, second_wait
from trainkernel.codegen.conversions import C_TYPES
from trainkernel.codegen.near import Epilogue, NearOperand, multiply
from trainkernel.codegen.text import INDENT, block, comment, escape, flag, function_object
from trainkernel.codegen.values import PointerText, TaskScope, ValueScope
from trainkernel.dtypes import DTYPES
from trainkernel.indexing import ZERO, Index, linearize, variable
from trainkernel.ir import Operation, TensorSpec
from trainkernel.memory import Frame, Storage
from trainkernel.near_products import PANEL_PAD, filled_shape, panel_depth, stream_columns
from trainkernel.ops import literal
from trainkernel.product_plans import SIXTEEN_BIT_FORMATS, ProductPlan
from trainkernel.schedule import BlockRegion, Rounded, Staged, Task
from trainkernel.shared import (
    epilogue_cost,
    filled_stride,
    is_near,
    is_read_in_place,
    is_streamed,
    keeps_rows,
    rounded_matrix,
    staged_elements,
    staged_matrix,
)

_ITEMSIZE_BYTES = 4
_MAX_RUNS = 128
_MIN_LATER_BYTES = 8 * 1024
_COPY_BYTES = 56
_MAX_CONSTANT_BYTES = 60 * 1024
StoreFunctions: TypeAlias = Callable[[Operation, Sequence[Index], Index, str, list[str], bool], tuple[list[str], str]]


@dataclass(frozen=True)
class Fetch:
    """The copies that start together: a table of them, and what a call of ``tk_fetch`` needs.

    The first ``num_common`` entries are the same for every piece; a block's first piece fetches them.
    """

    name: str
    entries: tuple[str, ...]
    num_common: int
    step: str

    @property
    def table_bytes(self) -> int:
        """Size of the table."""
        return _COPY_BYTES * len(self.entries)

    def table(self, tables_bytes: int) -> str:
        """The table: in constant memory, where it has room beside those before it, ``tables_bytes`` in all."""
        rows = "".join(f"{INDENT}{entry},\n" for entry in self.entries)
        space = "__constant__" if tables_bytes + self.table_bytes <= _MAX_CONSTANT_BYTES else "__device__ const"
        return f"{space} TkCopy {self.name}[{len(self.entries)}] = {{\n{rows}}};"

    def call(self, threads: int, tensors: str, is_first: str) -> str:
        """The statement that starts the copies of ``piece``; ``is_first`` tells the first one of a block."""
        first = f"{is_first} ? 0 : {self.num_common}" if self.num_common else "0"
        arguments = f"{self.name}, {first}, {len(self.entries)}, {tensors}, p.workspace, shared, piece, {self.step}"
        return f"tk_fetch<{threads}>({arguments});"

    def whole_call(self, threads: int, tensors: str, *, back: bool) -> str:
        """The statement that starts all copies, or makes them ``back`` to where they came from."""
        arguments = f"{self.name}, 0, {len(self.entries)}, {tensors}, p.workspace, shared, 0, {self.step}"
        return f"tk_fetch<{threads}{', true' if back else ''}>({arguments});"


@dataclass(frozen=True)
class FetchGroup:
    """Copies for which the same parts wait: tables, one for each loop's step, and rows that come in bulk."""

    tables: tuple[Fetch, ...]
    bulk: BulkFetch | None


@dataclass(frozen=True)
class RegionCopies:
    """The copies of a piece: ``groups`` for which parts wait, one after another; what a block rounds.

    ``rounds_early``: all of that can be read before the grid barrier in front of the stage.
    """

    groups: tuple[FetchGroup, ...]
    rounded: tuple[Rounded, ...]
    rounds_early: bool


def plan_fetches(
    region: BlockRegion,
    frame: Frame,
    tensor: Callable[[Storage], int],
    base: PointerText,
    prefix: str,
    early: Set[str],
) -> RegionCopies:
    """The copies of a piece in the order in which parts wait for them.

    Buffers in ``early`` may be read before the grid barrier in front of the region's stage.
    """
    groups = _in_order_of_use(region)
    plan = plan_bulk(groups, region, frame, base, early)
    found = []
    for name, copies, (long, bulk) in zip("ab", groups, plan.groups, strict=False):
        rest = [copy for copy in copies if copy not in long]
        found.append(FetchGroup(tuple(_tables(rest, region, frame.storage, tensor, f"{prefix}_{name}")), bulk))
    rounded = tuple(matrix for matrix in region.shared.rounded if matrix not in plan.rounded)
    return RegionCopies(tuple(found), rounded, all(matrix.buffer in early for matrix in rounded))


def plan_kept(
    region: BlockRegion, frame: Frame, tensor: Callable[[Storage], int], prefix: str
) -> tuple[list[Fetch], list[Fetch]]:
    """The copies that stay near from step to step: those of carries, and of what no step changes."""
    kept = sorted(region.shared.kept, key=lambda copy: region.shared.kept[copy])
    carries = [copy for copy in kept if copy in region.shared.returned]
    constants = [copy for copy in kept if copy not in region.shared.returned]
    return (
        _tables(carries, region, frame.home, tensor, f"{prefix}_c"),
        _tables(constants, region, frame.home, tensor, f"{prefix}_k"),
    )


def _tables(
    copies: Sequence[Staged],
    region: BlockRegion,
    storage_of: Callable[[str], Storage],
    tensor: Callable[[Storage], int],
    prefix: str,
) -> list[Fetch]:
    """One table of copies for each step of surrounding loops on which their places depend."""
    common: dict[str, list[str]] = {}
    own: dict[str, list[str]] = {}
    for copy in copies:
        storage = storage_of(copy.buffer)
        step, stride = ("0", 0)
        if len(storage.steps) == 1:
            step, stride = storage.steps[0]
        elif storage.steps:
            step, stride = " + ".join(f"(long long){name} * {each}" for name, each in storage.steps), 1
        kind = common if copy.piece_stride == 0 else own
        at = region.shared.copies[copy]
        kind.setdefault(step, []).extend(_entries(copy, at, storage, tensor(storage), stride))
    return [
        Fetch(f"{prefix}{number}", (*common.get(step, ()), *own.get(step, ())), len(common.get(step, ())), step)
        for number, step in enumerate(dict.fromkeys([*common, *own]))
    ]


def _in_order_of_use(region: BlockRegion) -> list[list[Staged]]:
    """The staged copies: first what the parts up to the second barrier read, then, if it is much, the rest."""
    copies = sorted(region.shared.staged, key=lambda copy: region.shared.staged[copy])
    if second_wait(region) < len(region.parts):
        first = {copy for own in region.copies[: second_wait(region)] for copy in own}
        later = [copy for copy in copies if copy not in first]
        if first and sum(copy.size_bytes for copy in later) >= _MIN_LATER_BYTES:
            return [[copy for copy in copies if copy in first], later]
    return [copies] if copies else []


def _entries(copy: Staged, at: int, storage: Storage, tensor: int, step_stride: int) -> Iterator[str]:
    """Rows of the table, each of at most ``_MAX_RUNS`` runs."""
    vector = copy.columns % 4 == 0 and (copy.rows == 1 or (copy.row_stride % 4 == 0 and copy.stride % 4 == 0))
    width = 4 if vector else 1
    runs_per_row = copy.columns // width
    rows = max(1, min(copy.rows, _MAX_RUNS // runs_per_row))
    columns = copy.columns if copy.rows > 1 else min(copy.columns, width * _MAX_RUNS)
    start = storage.element_offset + copy.offset + (storage.index // _ITEMSIZE_BYTES if tensor < 0 else 0)
    for row in range(0, copy.rows, rows):
        for column in range(0, copy.columns, columns):
            own_rows, own_runs = min(rows, copy.rows - row), min(columns, copy.columns - column) // width
            numbers = [
                tensor,
                at + _ITEMSIZE_BYTES * (row * copy.stride + column),
                _ITEMSIZE_BYTES * (start + row * copy.row_stride + column),
                _ITEMSIZE_BYTES * copy.piece_stride,
                _ITEMSIZE_BYTES * step_stride,
                own_rows * own_runs,
                own_runs,
                -(-(2**32) // own_runs) % 2**32,
                _ITEMSIZE_BYTES * copy.row_stride,
                _ITEMSIZE_BYTES * copy.stride,
                width,
            ]
            values = ", ".join(f"{number}u" if number >= 2**31 else str(number) for number in numbers)
            yield f"{{{values}}} /* {escape(copy.buffer)} */"


def emit_rounded(
    rounded: Sequence[Rounded], region: BlockRegion, frame: Frame, base: PointerText, scalar: PointerText, name: str
) -> str:
    """The function that rounds some of a region's weights for all pieces of a block."""
    scope = TaskScope(frame, base, scalar, hoist=False)
    threads = frame.schedule.options.threads
    statements = []
    for number, matrix in enumerate(rounded):
        source = scope.pointer(matrix.buffer, frame.storage(matrix.buffer), const=True)
        first = f"{source} + {matrix.offset}" if matrix.offset else source
        to = f"({DTYPES[matrix.dtype].cuda}*)(slabs + {region.shared.rounded[matrix]})"
        rows, columns = matrix.shape
        if matrix.shape == (matrix.rows, matrix.columns) and matrix.row_stride % 4 == 0:
            sizes = f"{rows}, {columns}, {threads}, {matrix.stride}"
            statements.append(f"tk_block_fill_matrix<{sizes}>({to}, {first}, {matrix.row_stride});")
            continue
        text = f"tk_value(({first})[row * {matrix.row_stride} + column])"
        statements += function_object(f"load_{number}", "int row, int column", [], text, "float")
        sizes = f"{matrix.rows}, {matrix.columns}, {rows}, {columns}, {threads}, {matrix.stride}, true"
        statements.append(f"tk_block_fill_rows<{sizes}>({to}, load_{number});")
    steps = "".join(f", int step_{depth}" for depth in range(frame.depth))
    head = f"__device__ __forceinline__ void {name}(const TkParams& p, unsigned char* slabs{steps})"
    body = [*(pointer.declaration for pointer in scope.pointers), *statements]
    return "\n".join([comment("What the pieces of a block multiply by, rounded once."), *block(head, body)])


def near_elements(task: Task, region: BlockRegion, frame: Frame) -> dict[str, Storage]:
    """Where the buffers are that a part finds as staged copies, element by element."""
    found, copies = {}, region.copies[region.parts.index(task)]
    for name in task.reads:
        spec = frame.declared[name]
        copy = staged_elements(spec, name in region.aligned, region.split)
        if copy is not None and copy in copies:
            steps = (("piece", -copy.piece_stride),) if copy.piece_stride else ()
            found[name] = Storage("shared", region.shared.copies[copy], copy.dtype, copy.size_bytes, 0, steps)
    return found


class BlockProduct:
    """Emits the body of a product of one piece.

    Parameters
    ----------
    scope : TaskScope
    task : Task
    region : BlockRegion
    along : callable
        Whether neighbours in memory of a fused operand lie along the depth.
    """

    def __init__(self, scope: TaskScope, task: Task, region: BlockRegion, along: Callable[[int], bool]) -> None:
        assert task.root is not None and isinstance(task.plan, ProductPlan)
        self._scope, self._task, self._region, self._along = scope, task, region, along
        self._root: Operation = task.root
        self._plan: ProductPlan = task.plan
        self._threads = scope.frame.schedule.options.threads
        self._fills: list[str] = []
        self.scratch_bytes = 0

    def emit(self, store_functions: StoreFunctions, batch_of: Callable[[Sequence[str], int], int]) -> list[str]:
        """The statements.

        ``store_functions`` makes the epilogue's functions, ``batch_of`` says how many results it has under way.
        """
        plan, count = self._plan, self._count
        a = self._operand(0)
        if is_streamed(self._task, self._region.split) and self._is_in_memory(1):
            return self._streamed(a, store_functions, batch_of)
        b = self._operand(1)
        lines = self._filled_operands()
        lines += self._multiply(plan, a, b, store_functions, batch_of, "column", str(plan.tile_n))
        if plan.batch == 1:
            return lines
        first = "" if plan.split > 1 or self._region.split.pieces == 1 else f"piece * {count} + "
        head = [f"const tk_index batch = {first}own;"]
        tail = ["__syncthreads();  // the sums have been read"] if count > 1 and self.scratch_bytes else []
        return ["#pragma unroll 1", *block(f"for (int own = 0; own < {count}; ++own)", [*head, *lines, *tail])]

    def _multiply(
        self,
        plan: ProductPlan,
        a: NearOperand,
        b: NearOperand,
        store_functions: StoreFunctions,
        batch_of: Callable[[Sequence[str], int], int],
        column: str,
        columns: str,
    ) -> list[str]:
        """The product with its epilogue; reserves the sums."""
        whole = self._plan.n % plan.tile_n == 0
        bounds = f"{plan.tile_m}, {columns}"
        functions = partial(self._epilogue, store_functions, column)
        epilogue = Epilogue(functions, epilogue_cost(self._task), bounds, whole, batch_of)
        warp = self._region.warp(self._task, self._threads)
        lines, sums_bytes = multiply(plan, self._scope.frame.schedule, a, b, self.scratch_bytes, epilogue, warp)
        self.scratch_bytes += sums_bytes
        return lines

    def _is_in_memory(self, position: int) -> bool:
        """Whether an operand can be read where it lies, in device memory."""
        view = self._view(position)
        return self._in_place(position) is not None and self._scope.storage(view.buffer).space != "shared"

    def _streamed(
        self, a: NearOperand, store_functions: StoreFunctions, batch_of: Callable[[Sequence[str], int], int]
    ) -> list[str]:
        """The product some columns after others, whose part of ``b`` arrives while those before are multiplied."""
        columns, depth = stream_columns(self._plan), panel_depth(self._plan.tile_k)
        plan = replace(self._plan, tile_n=columns)
        view, b = self._view(1), self._in_place(1)
        assert b is not None
        stride = (depth if b.along_k else columns) + PANEL_PAD
        floats = stride * (columns if b.along_k else depth)
        at = self.scratch_bytes
        self.scratch_bytes += 2 * 4 * floats
        outer_stride, depth_stride = view.strides[-2:]
        run, other = (plan.k, outer_stride) if b.along_k else (plan.n, depth_stride)
        vector = run % 4 == 0 and other % 4 == 0 and view.offset % 4 == 0
        steps = -(-plan.n // columns)
        buffer = f"(float*)(shared + {at}) + tile % 2 * {floats}"
        arrived = NearOperand(buffer, stride, b.along_k, True)
        inside = f"tk_min({columns}, {plan.n} - tile * {columns})"
        product = self._multiply(plan, a, arrived, store_functions, batch_of, f"tile * {columns} + column", inside)
        matrix = f"tk_matrix({b.pointer}, {outer_stride}, {depth_stride}, {flag(vector)})"
        sizes = f"{columns}, {depth}, {self._threads}, {stride}, {flag(b.along_k)}"
        following = f"(float*)(shared + {at}) + (tile + 1) % 2 * {floats}"
        fetch = f"tk_tile_fill<{sizes}>({following}, (tile + 1) * {columns}, {plan.n}, 0, {plan.k}, {matrix});"
        body = [
            f"if (tile + 1 < {steps}) {fetch}",
            "tk_cp_async_commit();",
            "if (tile < 0) continue;",
            "tk_cp_async_wait<1>();",
            "__syncthreads();  // these columns have arrived, for every thread",
            *product,
            "__syncthreads();  // they have been read",
        ]
        return [
            *self._filled_operands(),
            "#pragma unroll 1",
            *block(f"for (int tile = -1; tile < {steps}; ++tile)", body),
        ]

    def _epilogue(self, store_functions: StoreFunctions, column: str, pairs: bool) -> tuple[list[str], str]:
        plan, pieces = self._plan, self._region.split.pieces
        m, n = variable("m", plan.m), variable("n", plan.n)
        batch = variable("batch", plan.batch)
        coordinates = (batch, m, n) if self._root.inputs[-1].ndim == 3 else (m, n)  # type: ignore[union-attr]
        chunk = variable(self._region.partial, plan.split)
        element = linearize((chunk, batch, m, n), (plan.num_outputs, plan.m * plan.n, plan.n, 1))
        first = f"piece * {plan.tile_m} + " if plan.batch == 1 and plan.split == 1 and pieces > 1 else ""
        head = [f"const tk_index m = {first}row, n = {column};"]
        return store_functions(self._root, coordinates, element, "int row, int column", head, pairs)

    def _operand(self, position: int) -> NearOperand:
        staged = staged_matrix(self._task, position, self._region.split)
        if staged is not None and staged in self._region.shared.copies:
            at = self._region.shared.copies[staged]
            rows = staged.rows // self._count
            which = f" + own * {rows * staged.stride}" if self._plan.batch > 1 else ""
            view = self._view(position)
            along = view.strides[-1] == 1
            return NearOperand(f"(const float*)(slabs + {at}){which}", staged.stride, along, True)
        matrix = rounded_matrix(self._task, self._scope.inlined) if position == 1 else None
        if matrix in self._region.shared.rounded:
            assert matrix is not None
            pointer = f"(const {DTYPES[matrix.dtype].cuda}*)(slabs + {self._region.shared.rounded[matrix]})"
            along = cast_source(self._view(1), self._scope.inlined).strides[-1] == 1
            return NearOperand(pointer, matrix.stride, along, True)
        found = self._in_place(position)
        if found is not None and (found.is_aligned or not self._plan.tensor):
            return found
        if self._plan.tensor in SIXTEEN_BIT_FORMATS:
            assert not is_near(self._task, position, self._region.shared, self._scope.inlined), "no scratch is left"
        return self._rounded(position) or self._filled(position)

    @property
    def _count(self) -> int:
        """Products of a batch in one piece."""
        plan = self._plan
        return plan.batch if plan.split > 1 else max(1, plan.batch // self._region.split.pieces)

    def _filled_operands(self) -> list[str]:
        """Operands that are evaluated into scratch before the product, complete for every thread."""
        return [*self._fills, "__syncthreads();  // the operands are complete"] if self._fills else []

    def _view(self, position: int) -> TensorSpec:
        """The operand with its outer dim before the depth."""
        operand = self._root.inputs[-2:][position]
        assert isinstance(operand, TensorSpec)
        return operand if position == 0 else operand.mT

    def _first(self, position: int) -> tuple[Index, Index]:
        """Where the piece begins: outer coordinate and depth."""
        plan, pieces = self._plan, self._region.split.pieces
        piece = variable("piece", pieces)
        if plan.split > 1:
            return ZERO, piece * plan.tile_k
        return (piece * plan.tile_m if position == 0 and plan.batch == 1 else ZERO), ZERO

    def _in_place(self, position: int) -> NearOperand | None:
        """A float32 view of memory, or what tensor cores can take, read where it is."""
        view = self._view(position)
        if not is_read_in_place(view, self._is_stored(view), self._plan.tensor, self._plan.tile_k):
            return None
        return self._stored(position, view, 16 // DTYPES[view.dtype].itemsize_bytes)

    def _is_stored(self, view: TensorSpec) -> bool:
        """Whether a view's strides lead through memory: not where they would cross a slab's padding."""
        scalars = {spec.buffer for spec in self._scope.frame.schedule.program.scalar_inputs}
        if view.buffer in self._scope.inlined or view.buffer in scalars:
            return False
        storage = self._scope.storage(view.buffer)
        return not storage.padding or keeps_rows(self._task, view, storage.row)

    def _stored(self, position: int, view: TensorSpec, run: int) -> NearOperand:
        """A view of memory with a contiguous dim; aligned if whole runs of so many elements are."""
        storage = self._scope.storage(view.buffer)
        outer_stride, depth_stride, offset = map(storage.moved, (*view.strides[-2:], view.offset))
        batch_stride = storage.moved(view.strides[0]) if self._plan.batch > 1 else 0
        along = depth_stride == 1
        stride = outer_stride if along else depth_stride
        if along and view.shape[-2] == 1 and not self._plan.tensor:
            stride = 0  # nobody steps over the only row
        outer, depth = self._first(position)
        start = outer * outer_stride + depth * depth_stride
        batch = f" + batch * {batch_stride}" if batch_stride else ""
        text = (
            self._scope.pointer(view.buffer, storage, const=True)
            + (f" + {start + offset}" if start.terms or offset else "")
            + batch
        )
        numbers = [offset, batch_stride, *(c for _, c in start.terms)]
        numbers += [stride] + [own for _, own in storage.steps] + [storage.element_offset]
        # Tensor cores read shared memory alone; of device memory, only the arena is known to be aligned.
        near = storage.space == "shared" or (storage.space == "arena" and not self._plan.tensor)
        aligned = near and all(number % run == 0 for number in numbers)
        return NearOperand(text, stride, along, aligned)

    def _rounded(self, position: int) -> NearOperand | None:
        """A plain matrix, or its cast, copied to scratch in whole runs of four 16-bit elements."""
        plan, tensor = self._plan, self._plan.tensor
        view = cast_source(self._view(position), self._scope.inlined)
        if tensor not in SIXTEEN_BIT_FORMATS or not self._is_stored(view) or 1 not in view.strides[-2:]:
            return None
        outer = (plan.tile_m, plan.tile_n)[position]
        source = self._stored(position, view, 4)
        rows, columns, stride = filled_shape(outer, plan.tile_k, source.along_k)
        whole = rows * columns == outer * plan.tile_k and columns % 4 == 0 and source.stride % 4 == 0
        if view.dtype not in ("float32", tensor) or not whole:
            return None
        to = self._reserve(2 * rows * stride, DTYPES[tensor].cuda)
        sizes = f"{rows}, {columns}, {self._threads}, {stride}"
        self._fills.append(f"tk_block_fill_matrix<{sizes}>({to}, {source.pointer}, {source.stride});")
        return NearOperand(to, stride, source.along_k, True)

    def _reserve(self, size_bytes: int, c_type: str) -> str:
        """A typed pointer to scratch."""
        at = self.scratch_bytes
        self.scratch_bytes += size_bytes
        return f"({c_type}*)(shared + {at})"

    def _filled(self, position: int) -> NearOperand:
        """A fused operand, or a view with gaps, evaluated into scratch."""
        plan, operand = self._plan, self._root.inputs[-2:][position]
        assert isinstance(operand, TensorSpec)
        outer_name, outer_size = ("m", plan.tile_m) if position == 0 else ("n", plan.tile_n)
        whole = plan.m if position == 0 else plan.n
        batch = (variable("batch", plan.batch),) if operand.ndim == 3 else ()
        outer, depth = variable(outer_name, whole), variable("k", plan.k)
        coordinates = (*batch, outer, depth) if position == 0 else (*batch, depth, outer)
        values = ValueScope(self._scope, {}, None)
        text = values.operand(operand, coordinates) if operand.num_elements else literal(0, "float32")
        first_outer, first_depth = self._first(position)
        head = [f"const tk_index {outer_name} = {_sum(first_outer, 'row')}, k = {_sum(first_depth, 'depth')};"]
        along, name = self._along(position), f"load_{'ab'[position]}"
        self._fills += function_object(name, "int row, int depth", [*head, *values.lines], text, C_TYPES["float32"])
        sizes = f"{outer_size}, {plan.tile_k}"
        if plan.tensor in SIXTEEN_BIT_FORMATS:
            c_type = DTYPES[plan.tensor].cuda
            rows, columns, stride = filled_shape(outer_size, plan.tile_k, along)
            to = self._reserve(2 * stride * rows, c_type)
            call = f"tk_block_fill_rows<{sizes}, {rows}, {columns}, {self._threads}, {stride}, {flag(along)}>"
        else:
            rows = outer_size if along else plan.tile_k
            stride = filled_stride(plan.tile_k if along else outer_size)
            to = self._reserve(4 * stride * rows, "float")
            call = f"tk_block_fill<{sizes}, {self._threads}, {stride}, {flag(along)}>"
        self._fills.append(f"{call}({to}, {name});")
        return NearOperand(to, stride, along, True)


def _sum(first: Index, name: str) -> str:
    return f"{first} + {name}" if first.terms else name
