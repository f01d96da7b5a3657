"""Products: operands as matrices or function objects, a call of the template that fits the plan, the epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trainkernel.access import AccessWalker, cast_source
from trainkernel.arithmetic import domain_of, scale_of
from trainkernel.codegen import near
from trainkernel.codegen.bodies import TaskBody
from trainkernel.codegen.conversions import C_TYPES
from trainkernel.codegen.near import Epilogue, NearOperand, multiply
from trainkernel.codegen.regions import BlockProduct
from trainkernel.codegen.text import block, flag, function_object
from trainkernel.codegen.values import ValueScope
from trainkernel.indexing import ZERO, Index, Remainder, Variable, delinearize, linearize, variable
from trainkernel.ir import Operation, TensorSpec
from trainkernel.near_products import PANEL_PAD
from trainkernel.ops import literal
from trainkernel.product_costs import pipeline_stages, tile_groups, tile_sums_stride
from trainkernel.product_plans import ProductPlan, ceil_div
from trainkernel.shared import epilogue_cost, is_streamed

_GROUPED_ROWS = 8
"""Rows of tiles of a large tensor-core product that are taken together."""
_LARGE_TILE = 4096
_LARGE_BATCH = 8
"""Results that a thread of a tile with more outputs than that computes before it stores them."""
_HUGE_TILE = 16384
_HUGE_BATCH = 16
"""The same of a tile that has a multiprocessor to itself: what it reads for them has to keep device memory busy."""
_MAX_BATCH_RESULTS = 32
"""Numbers of such a batch, where an output has several results; a quarter of a thread's registers at most."""
_THIN_BATCH, _FUSED_THIN_BATCH = 16, 4
"""Steps of the depth that a thread reads together for one output; fewer where an operand is computed."""
_TILE_TEMPLATES = {
    "tile": {"product_tile"},
    "tensor": {"product_tensor", "product_pipeline"},
    "warpgroup": {"product_tensor", "warpgroup", "product_warpgroup"},
    "split": {"warpgroup", "product_split"},
}
_FORMATS = {"float16": "TkFloat16Format", "bfloat16": "TkBfloat16Format"}


class ProductBody(TaskBody):
    """The body of a product."""

    def lines(self) -> list[str]:
        plan, root = self.task.plan, self.task.root
        assert isinstance(plan, ProductPlan) and root is not None
        if plan.path == "block":
            return self._block(plan, root)
        if plan.path == "thin":
            return self._thin(plan, root)
        if plan.path in ("gemv", "gemv_t"):
            return self._vector(plan, root)
        if plan.path == "panel":
            return self._panels(plan, root)
        return self._tiles(plan, root)

    def _block(self, plan: ProductPlan, root: Operation) -> list[str]:
        assert self.region is not None
        self.templates |= near.templates(plan)
        if is_streamed(self.task, self.region.split):
            self.templates |= {"product_operand", "product_tile"}
        a, b = self._operands(root)
        m, n, k = variable("m", plan.m), variable("n", plan.n), variable("k", plan.k)
        batch = variable("batch", plan.batch)
        operands = ((a, _matrix(a, batch, m, k), "m"), (b, _matrix(b, batch, k, n), "n"))
        product = BlockProduct(
            self.scope, self.task, self.region, lambda at: self._along(*operands[at][:2], "k", operands[at][2])
        )
        lines = product.emit(self._store_functions, self._epilogue_batch)
        self.shared_bytes = product.scratch_bytes
        return [*(self._partial_result() if root.op == "product_partials" else []), *lines]

    def _operands(self, root: Operation) -> tuple[TensorSpec, TensorSpec]:
        a, b = root.inputs[-2:]
        assert isinstance(a, TensorSpec) and isinstance(b, TensorSpec)
        return a, b

    def _load(
        self, name: str, operand: TensorSpec, coordinates: Sequence[Index], arguments: str, domain: str = "float32"
    ) -> list[str]:
        values = ValueScope(self.scope, {}, None)
        text = values.operand(operand, coordinates, domain) if operand.num_elements else literal(0, domain)
        return function_object(name, arguments, values.lines, text, C_TYPES[domain])

    def _result(self, root: Operation, coordinates: Sequence[Index]) -> tuple[list[str], dict[str, str]]:
        """From the accumulated ``sum`` to the product's value in a register."""
        out = root.outputs[0]
        values = ValueScope(self.scope, {}, None)
        bias = root.inputs[:-2] if scale_of(root, "beta") != 0 else ()
        name = self.scope.fresh(out.buffer)
        text = self.scope.rounded(values.scaled("sum", root, bias, coordinates), domain_of(root), out.dtype)
        return [*values.lines, self.scope.declaration(name, out.dtype, text)], {out.buffer: name}

    def _finish(self, root: Operation, coordinates: Sequence[Index], element: Index) -> list[str]:
        """From the accumulated ``sum`` to the stores."""
        lines, registers = self._result(root, coordinates)
        return lines + self._epilogue(registers, element)

    def _depth(self, plan: ProductPlan, root: Operation) -> int:
        return 0 if scale_of(root, "alpha") == 0 else plan.k

    def _thin(self, plan: ProductPlan, root: Operation) -> list[str]:
        a, b = self._operands(root)
        element = variable("i", plan.num_outputs)
        batch, m, n = delinearize(element, (plan.batch, plan.m, plan.n))
        k = variable("k", plan.k)
        tile, begin, end, head = self._depth_range(plan, root)
        domain = domain_of(root)
        c_type = C_TYPES[domain]
        body: list[str] = []
        if self._depth(plan, root) == 0:  # the operands need not be anywhere
            value = literal(0, domain)
        else:
            self.templates.add("product_vector")
            if domain != "float32":
                self.templates |= {"typed", "typed_product"}
            body = self._load("load_a", a, _matrix(a, batch, m, k), "tk_index k", domain)
            body += self._load("load_b", b, _matrix(b, batch, k, n), "tk_index k", domain)
            computed = any(operand.buffer in self.scope.inlined for operand in (a, b))
            steps = _FUSED_THIN_BATCH if computed else _THIN_BATCH
            function = f"tk_thin_product<{steps}>" if domain == "float32" else f"tk_typed_thin_product<{c_type}>"
            value = f"{function}({begin}, {end}, load_a, load_b)"
        stored = linearize((variable("s", plan.split), element), (plan.num_outputs, 1))
        coordinates = _matrix(a, batch, m, n)
        if plan.each > 1:
            product = function_object("product", "tk_index i", body, value)
            return [*head, *product, *self._thin_batch(plan, root, tile, coordinates, stored)]
        body += [f"const {c_type} sum = {value};", *self._finish(root, coordinates, stored)]
        head.append(f"const tk_index i = (tk_index)({tile}) * {self.threads} + threadIdx.x;")
        return head + block(f"if (i < {plan.num_outputs})", body)

    def _thin_batch(
        self, plan: ProductPlan, root: Operation, tile: str, coordinates: Sequence[Index], element: Index
    ) -> list[str]:
        """Some outputs of each thread, which ``product`` sums up: all are computed before any is stored."""
        functions, results = self._store_functions(root, coordinates, element, "tk_index i", [], False)
        outputs = plan.each * self.threads
        whole = flag(plan.num_outputs % outputs == 0)
        call = f"tk_thin_outputs<{self.threads}, {plan.each}, {whole}, {results}>"
        first = f"(tk_index)({tile}) * {outputs}"
        return [*functions, f"{call}({first}, {plan.num_outputs}, product, compute, write);"]

    def _depth_range(self, plan: ProductPlan, root: Operation) -> tuple[str, str, str, list[str]]:
        """(tile, begin, end, statements): the piece's tile and its part of the depth."""
        if plan.split == 1:
            return "piece", "0", str(self._depth(plan, root)), []
        head = [f"const tk_index s = piece / {plan.num_tiles};"]
        end = f"tk_min((s + 1) * {plan.chunk}, (tk_index){plan.k})"
        return f"piece % {plan.num_tiles}", f"s * {plan.chunk}", end, head

    def _batch(self, plan: ProductPlan, tile: str) -> tuple[Index, str, list[str]]:
        """(batch coordinate, the tile within one product, statements) of a piece's tile."""
        if plan.batch == 1:
            return ZERO, tile, []
        lines = [f"const tk_index batch = {tile} / {plan.tiles_per_product};"]
        return variable("batch", plan.batch), f"{tile} % {plan.tiles_per_product}", lines

    def _vector(self, plan: ProductPlan, root: Operation) -> list[str]:
        self.templates.add("product_vector")
        a, b = self._operands(root)
        outputs = max(plan.m, plan.n)
        o, k = variable("o", outputs), variable("k", plan.k)
        tile, begin, end, lines = self._depth_range(plan, root)
        batch, tile, which = self._batch(plan, tile)
        lines += which
        if plan.path == "gemv":
            vector, matrix = (a, _matrix(a, batch, ZERO, k)), (b, _matrix(b, batch, k, o))
            coordinates, (depth_stride, outer_stride) = _matrix(a, batch, ZERO, o), b.strides[-2:]
        else:
            vector, matrix = (b, _matrix(b, batch, k, ZERO)), (a, _matrix(a, batch, o, k))
            coordinates, (outer_stride, depth_stride) = _matrix(a, batch, o, ZERO), a.strides[-2:]
        lines += self._load("load_vector", *vector, "tk_index k")
        lines += self._load("load_matrix", *matrix, "tk_index o, tk_index k")
        element = linearize((variable("s", plan.split), batch, o), (plan.num_outputs, outputs, 1))
        lines += function_object("store", "tk_index o, float sum", self._finish(root, coordinates, element), None)
        # The order of the sum follows from the operation alone, wherever what is fused into it lies.
        if depth_stride == 1 and (outer_stride != 1 or outputs == 1):
            head, shared = f"tk_vector_product_warps<{self.threads}>", ""
        else:
            self.shared_bytes = self.threads * 4
            head, shared = f"tk_vector_product_lanes<{self.threads}>", "(float*)shared, "
        operands = "load_vector, load_matrix, store"
        first = tile if tile == "piece" else f"({tile})"
        return [*lines, f"{head}({first} * 32, {outputs}, {begin}, {end}, {shared}{operands});"]

    def _tile_operands(
        self, plan: ProductPlan, root: Operation
    ) -> tuple[list[str], tuple[str, str], tuple[bool, bool], Index]:
        """Statements that give the tile's place; both operands as C++; whether they lie along the depth; the batch."""
        a, b = self._operands(root)
        m, n, k = variable("m", plan.m), variable("n", plan.n), variable("k", plan.k)
        tile, self._begin, self._end, lines = self._depth_range(plan, root)
        batch, tile, which = self._batch(plan, tile)
        lines += which
        lines += _tile_origin(plan, tile)
        along_a, along_b = (
            self._along(operand, _matrix(operand, batch, row, column), "k", outer)
            for operand, row, column, outer in ((a, m, k, "m"), (b, k, n, "n"))
        )
        operand_a, operand_b = self._plain_matrix(a.mT, plan, along_a), self._plain_matrix(b, plan, along_b)
        if operand_a is None:
            lines += self._load("load_a", a, _matrix(a, batch, m, k), "tk_index m, tk_index k")
        if operand_b is None:
            lines += self._load("load_b", b, _matrix(b, batch, k, n), "tk_index n, tk_index k")
        return lines, (operand_a or "load_a", operand_b or "load_b"), (along_a, along_b), batch

    def _tile_place(self, plan: ProductPlan, root: Operation, batch: Index) -> tuple[tuple[Index, ...], Index]:
        """The coordinates that a tile's place ``m``, ``n`` has in the result, and the element that it is."""
        m, n = variable("m", plan.m), variable("n", plan.n)
        element = linearize((variable("s", plan.split), batch, m, n), (plan.num_outputs, plan.m * plan.n, plan.n, 1))
        return _matrix(self._operands(root)[1], batch, m, n), element

    def _panels(self, plan: ProductPlan, root: Operation) -> list[str]:
        """A tile whose operands are fetched over their whole depth at once."""
        self.templates |= {"product_operand", "product_tile"} | near.templates(plan)
        lines, operands, alongs, batch = self._tile_operands(plan, root)
        panels = []
        for operand, along, outer, name in zip(operands, alongs, (plan.tile_m, plan.tile_n), "mn", strict=True):
            stride = (plan.tile_k if along else outer) + PANEL_PAD
            pointer = f"(float*)(shared + {self.shared_bytes})"
            sizes = f"{outer}, {plan.tile_k}, {self.threads}, {stride}, {flag(along)}"
            bounds = f"{name}0, {getattr(plan, name)}, {self._begin}, {self._end}"
            lines.append(f"tk_tile_fill<{sizes}>({pointer}, {bounds}, {operand});")
            panels.append(NearOperand(pointer, stride, along, True))
            self.shared_bytes += 4 * stride * (outer if along else plan.tile_k)
        lines += ["tk_cp_async_commit();", "tk_cp_async_wait<0>();", "__syncthreads();  // both panels have arrived"]
        head = ["const tk_index m = m0 + row, n = n0 + column;"]
        coordinates, element = self._tile_place(plan, root, batch)
        functions = partial(self._store_functions, root, coordinates, element, "int row, int column", head)
        whole = plan.m % plan.tile_m == 0 and plan.n % plan.tile_n == 0
        inside = (
            f"(int)tk_min((tk_index){plan.tile_m}, {plan.m} - m0), (int)tk_min((tk_index){plan.tile_n}, {plan.n} - n0)"
        )
        epilogue = Epilogue(functions, epilogue_cost(self.task), inside, whole, self._epilogue_batch)
        schedule = self.frame.schedule
        product, sums_bytes = multiply(
            plan, schedule, panels[0], panels[1], self.shared_bytes, epilogue, "threadIdx.x / 32"
        )
        self.shared_bytes += sums_bytes
        self.needs_free_shared = True
        # With sums, the barrier before the epilogue does as well.
        free = plan.num_pieces > 1 and not sums_bytes
        tail = ["__syncthreads();  // the panels have been read: the next piece takes their place"] if free else []
        return [*lines, *product, *tail]

    def _tiles(self, plan: ProductPlan, root: Operation) -> list[str]:
        tensor = plan.is_tensor_tile
        self.templates |= {"product_operand"} | _TILE_TEMPLATES[plan.path]
        lines, operands, (along_a, along_b), batch = self._tile_operands(plan, root)
        shared = self._reserve_tiles(plan, along_a, along_b)
        plain = all(operand.startswith("tk_") for operand in operands)
        skew = self._skew(plan)
        if plan.path == "tensor":
            name = "tk_pipeline_sums"
            tile = [plan.tile_m, plan.tile_n, plan.tile_k, self._stages(plan), self.threads, skew]
        elif plan.path == "warpgroup":
            name = "tk_warpgroup_sums"
            tile = [plan.tile_m, plan.tile_n, self._stages(plan), self.threads]
        elif plan.path == "split":
            name = "tk_split_sums"
            tile = [plan.tile_m, plan.tile_n, self.threads, plan.tf32_products]
        else:
            name = "tk_matrix_sums" if plain else "tk_tile_sums"
            tile = [plan.tile_m, plan.tile_n, plan.tile_k, self.threads, self._groups(plan), skew]
        format_of = [_FORMATS[self._operands(root)[1].dtype]] if tensor else []
        sizes = ", ".join([*format_of, *map(str, tile), flag(along_a), flag(along_b)])
        bounds = f"m0, n0, {plan.m}, {plan.n}, {self._begin}, {self._end}, {shared}"
        lines.append(f"const float* sums = {name}<{sizes}>({bounds}, {operands[0]}, {operands[1]});")
        coordinates, element = self._tile_place(plan, root, batch)
        lines += self._tile_store(plan, root, coordinates, element, tile_sums_stride(plan))
        if plan.num_pieces > 1:
            lines.append("__syncthreads();  // the sums have been read: the next piece takes their place")
        return lines

    def _tile_store(
        self, plan: ProductPlan, root: Operation, coordinates: Sequence[Index], element: Index, stride: int
    ) -> list[str]:
        """The epilogue over the tile's sums."""
        lines, results = self._store_functions(root, coordinates, element, "tk_index m, tk_index n", [], False)
        outputs = plan.tile_m * plan.tile_n
        batch = self._epilogue_batch(lines, outputs)
        if outputs > _LARGE_TILE:
            batch = _HUGE_BATCH if outputs > _HUGE_TILE else _LARGE_BATCH
        most = min(_MAX_BATCH_RESULTS, 16384 // self.threads)
        while batch > 1 and batch * len(self.task.stores) > most:
            batch //= 2
        whole = plan.m % plan.tile_m == plan.n % plan.tile_n == outputs % (batch * self.threads) == 0
        groups = self._groups(plan) if plan.path == "tile" else 1
        sizes = f"{plan.tile_m}, {plan.tile_n}, {self.threads}, {groups}, {stride}, {batch}, {flag(whole)}, {results}"
        bounds = f"m0, n0, {plan.m}, {plan.n}, sums"
        return [*lines, f"tk_tile_store<{sizes}>({bounds}, compute, write);"]

    def _store_functions(
        self, root: Operation, coordinates: Sequence[Index], element: Index, place: str, head: list[str], pairs: bool
    ) -> tuple[list[str], str]:
        """``compute`` fills the results of one element of a product, ``write`` stores them; and the results' C type.

        ``place`` declares the element's place as arguments, from which ``head`` makes coordinates. With ``pairs``
        the second function stores the results of two neighbours along the row.
        """
        body: list[str] = []
        if root.op == "product_partials" and self.region is not None and self.region.adds is not None:
            body.append(
                f"if ({self.region.adds}) sum = __fadd_rn({self._stored(root.outputs[0].buffer, element)}, sum);"
            )
        lines, registers = self._result(root, coordinates)
        body += lines + self._members(registers, element)
        stores = self.task.stores
        types = [self._register_type(name) for name in stores]
        if set(types) == {"float"}:
            fields_of = [f"[{place}]" for place in range(len(stores))]
            lines, results, reference = [], f"float[{len(stores)}]", f"float (&results)[{len(stores)}]"
        else:
            fields_of = [f".r_{place}" for place in range(len(stores))]
            fields = " ".join(f"{c_type} r_{place};" for place, c_type in enumerate(types))
            lines, results, reference = [f"struct Results {{ {fields} }};"], "Results", "Results& results"
        body += [f"results{field} = {registers[name]};" for field, name in zip(fields_of, stores, strict=True)]
        lines += function_object("compute", f"{place}, float sum, {reference}", head + body, None)
        if pairs:
            both = f"const {reference}, const {reference.replace('results', 'next')}"
            writes = [
                line
                for field, name in zip(fields_of, stores, strict=True)
                for line in self._store_pair(name, f"results{field}", f"next{field}", element)
            ]
            lines += function_object("write", f"{place}, {both}", head + writes, None)
        else:
            writes = [
                self._store(name, f"results{field}", element) for field, name in zip(fields_of, stores, strict=True)
            ]
            lines += function_object("write", f"{place}, const {reference}", head + writes, None)
        return lines, results

    def _store_pair(self, buffer: str, first: str, second: str, element: Index) -> list[str]:
        """The statements that write an element of an even place and its neighbour."""
        storage = self.frame.storage(buffer)
        place, own = storage.place(element), self._own_sum(buffer, element)
        whole = storage.space in ("arena", "shared") and storage.element_offset % 2 == 0
        whole = whole and all(step % 2 == 0 for _, step in storage.steps) and self._is_even(place)
        whole = whole and (own is None or self._is_even(own[1]))
        if not whole or storage.dtype not in ("float32", *_FORMATS):
            return [self._store(buffer, first, element), self._store(buffer, second, element + 1)]
        self.templates.add("tensor_sums")
        pointer = self.scope.pointer(buffer, storage, const=False)
        text = f"tk_store_pair({pointer} + ({place}), {first}, {second});"
        if own is None or self.region is None:
            return [text]
        return [f"if ({self.region.ends}) {text}", f"else tk_store_pair({own[0]} + ({own[1]}), {first}, {second});"]

    def _is_even(self, place: Index) -> bool:
        """Whether a place is even where the column is."""
        assert isinstance(self.task.plan, ProductPlan)
        other = [scale for atom, scale in place.terms if atom != Variable("n", self.task.plan.n)]
        return place.constant % 2 == 0 and all(scale % 2 == 0 for scale in other)

    def _epilogue_batch(self, lines: Sequence[str], outputs: int) -> int:
        """Results that a thread computes before it stores them, where it reads anything for them."""
        reads = any(f"b_{name}[" in line for line in lines for name in self.task.reads)
        reads |= (
            self.region is not None
            and self.region.adds is not None
            and not self.region.shared.sums.keys() & {*self.task.stores}
        )
        return min(4, ceil_div(outputs, self.threads)) if reads else 1

    def _stages(self, plan: ProductPlan) -> int:
        return pipeline_stages(plan, self.frame.schedule.target)

    def _skew(self, plan: ProductPlan) -> int:
        """Padding of shared-memory rows in elements."""
        return plan.skew_bytes // (2 if plan.is_tensor_tile else 4)

    def _groups(self, plan: ProductPlan) -> int:
        """Groups of threads of a float32 tile."""
        return tile_groups(plan, self.threads, self.frame.schedule.target)

    def _reserve_tiles(self, plan: ProductPlan, along_a: bool, along_b: bool) -> str:
        """Reserve shared memory for the steps and the sums, which take their place."""
        skew = self._skew(plan)
        elements = 0
        for outer, along_k in ((plan.tile_m, along_a), (plan.tile_n, along_b)):
            row, count = (plan.tile_k, outer) if along_k else (outer, plan.tile_k)
            elements += (row + skew) * count
        if plan.is_tensor_tile:
            self.shared_bytes = max(self._stages(plan) * 2 * elements, 4 * plan.tile_m * tile_sums_stride(plan))
        elif plan.path == "split":
            numbers = 2 if plan.tf32_products == 3 else 1
            self.shared_bytes = 4 * max(2 * numbers * elements, plan.tile_m * tile_sums_stride(plan))
        else:
            sums = self._groups(plan) * plan.tile_m * tile_sums_stride(plan)
            self.shared_bytes = 4 * max(2 * elements, sums)
        self.needs_free_shared = True
        return "(unsigned short*)shared" if plan.is_tensor_tile else "(float*)shared"

    def _plain_matrix(self, operand: TensorSpec, plan: ProductPlan, along_k: bool) -> str | None:
        """``tk_matrix(...)`` of an operand [..., k, outer] that is a view of memory, or its cast; else None.

        A cast to the operand's dtype disappears, because the tensor-core step rounds to it anyway.
        """
        operand_dtype = operand.dtype
        if plan.is_tensor_tile:
            operand = cast_source(operand, self.scope.inlined)
        if operand.buffer in self.scope.inlined:
            return None
        storage = self.frame.storage(operand.buffer)
        plain = ("float32", "float16", "bfloat16") if plan.is_tensor_tile else ("float32",)
        if storage.space == "scalar" or storage.dtype not in plain or storage.padding:
            return None
        depth_stride, outer_stride = operand.strides[-2:]
        unit, other = (depth_stride, outer_stride) if along_k else (outer_stride, depth_stride)
        run = operand.shape[-2] if along_k else operand.shape[-1]
        group = 8 if plan.is_tensor_tile and storage.dtype == operand_dtype else 4
        sizes = [other, run, operand.offset + storage.element_offset]
        sizes += [plan.chunk] if along_k and plan.split > 1 else []
        sizes += operand.strides[:-2] if plan.batch > 1 else ()
        vector = unit == 1 and all(size % group == 0 for size in sizes)
        pointer = self.scope.pointer(operand.buffer, storage, const=True)
        base = f"{pointer} + {operand.offset}" if operand.offset else pointer
        if plan.batch > 1 and operand.strides[0]:
            base += f" + batch * {operand.strides[0]}"
        whole = plan.is_tensor_tile and storage.space == "arena" and all(step % group == 0 for _, step in storage.steps)
        if vector and whole:
            return f"tk_aligned_matrix({base}, {outer_stride}, {depth_stride})"
        return f"tk_matrix({base}, {outer_stride}, {depth_stride}, {flag(vector)})"

    def _along(self, operand: TensorSpec, coordinates: Sequence[Index], first: str, second: str) -> bool:
        """Whether neighbours in memory are neighbours along ``first`` rather than ``second``."""
        votes = 0
        for access in AccessWalker(self.scope.inlined).operand(operand, coordinates):
            if access.buffer not in self.frame.schedule.places:
                continue
            weight = self.frame.storage(access.buffer).size_bytes
            votes += weight * (_unit_stride(access.index, first) - _unit_stride(access.index, second))
        return votes > 0


def _tile_origin(plan: ProductPlan, tile: str) -> list[str]:
    """Statements that give a tile's first row ``m0`` and column ``n0``.

    Tiles are numbered along n. Of tensor-core products with many, some rows of tiles are taken together,
    column by column, so that blocks that run at the same time share what they fetch.
    """
    tiles_m, tiles_n = ceil_div(plan.m, plan.tile_m), ceil_div(plan.n, plan.tile_n)
    if not plan.is_tensor_tile or tiles_m <= _GROUPED_ROWS or tiles_n <= _GROUPED_ROWS:
        return [
            f"const tk_index m0 = (tk_index)({tile}) / {tiles_n} * {plan.tile_m};",
            f"const tk_index n0 = (tk_index)({tile}) % {tiles_n} * {plan.tile_n};",
        ]
    whole = _GROUPED_ROWS * tiles_n
    rows = str(_GROUPED_ROWS)
    lines = [f"const tk_index group = (tk_index)({tile}) / {whole}, place = (tk_index)({tile}) % {whole};"]
    if tiles_m % _GROUPED_ROWS:
        rows = "rows"
        lines.append(f"const tk_index rows = tk_min({tiles_m} - group * {_GROUPED_ROWS}, (tk_index){_GROUPED_ROWS});")
    return [
        *lines,
        f"const tk_index m0 = (group * {_GROUPED_ROWS} + place % {rows}) * {plan.tile_m};",
        f"const tk_index n0 = place / {rows} * {plan.tile_n};",
    ]


def _unit_stride(index: Index, name: str) -> bool:
    """Whether the next value of a variable is the next element, wrapping aside."""
    atoms = [atom for atom, scale in index.terms if scale == 1]
    return any(
        atom.name == name
        if isinstance(atom, Variable)
        else isinstance(atom, Remainder) and _unit_stride(atom.inner, name)
        for atom in atoms
    )


def _matrix(operand: TensorSpec, batch: Index, row: Index, column: Index) -> tuple[Index, ...]:
    """Coordinates of a product's operand or result, which has a batch in front or none."""
    return (batch, row, column) if operand.ndim == 3 else (row, column)
