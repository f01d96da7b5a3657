"""Reductions: one function object that loads an element, and a call of the template that fits the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainkernel.access import ReductionSpace
from trainkernel.arithmetic import domain_of
from trainkernel.codegen.bodies import TaskBody
from trainkernel.codegen.conversions import C_TYPES
from trainkernel.codegen.scans import emit_scatter, scatter_shared_bytes
from trainkernel.codegen.text import block, flag, function_object
from trainkernel.codegen.values import ValueScope, reduce_type
from trainkernel.dtypes import DTYPES
from trainkernel.indexing import Index, linearize, variable
from trainkernel.ir import Operation, TensorSpec
from trainkernel.ops import literal
from trainkernel.product_plans import ceil_div
from trainkernel.reduction_plans import WARP_COLUMNS, ReductionPlan
from trainkernel.schedule import BlockRegion


@dataclass(frozen=True)
class _TwoPasses:
    """A reduction in two passes over its row.

    ``kind`` is how the first reduces, ``first`` names its result; the second sums ``term``, an
    expression by domain over an element ``x``, which the function object ``load`` evaluates.
    """

    kind: str
    first: str
    load: str
    term: Mapping[str, str]


_WARP_ROWS = {"warp": 1, "warp_columns": WARP_COLUMNS}
"""Rows that a warp reduces at the same time."""
# An infinite maximum must not meet itself as inf - inf.
_TWO_PASSES = {
    "softmax_stats": _TwoPasses(
        "max",
        "largest",
        "load_exp",
        {
            "float32": "x == largest ? 1.0f : expf(__fsub_rn(x, largest))",
            "float64": "x == largest ? 1.0 : exp(__dsub_rn(x, largest))",
        },
    ),
    "moments": _TwoPasses(
        "sum",
        "mean",
        "load_square",
        {
            "float32": "__fmul_rn(__fsub_rn(x, mean), __fsub_rn(x, mean))",
            "float64": "__dmul_rn(__dsub_rn(x, mean), __dsub_rn(x, mean))",
        },
    ),
}


class ReductionBody(TaskBody):
    """The body of a reduction or a scatter."""

    _inside: str | None = None

    def lines(self) -> list[str]:
        plan, root = self.task.plan, self.task.root
        assert isinstance(plan, ReductionPlan) and root is not None
        if plan.path == "scatter":
            self.shared_bytes = scatter_shared_bytes(self.threads)
            return emit_scatter(self.scope, root, plan, self.threads, self._epilogue)
        if self.region is not None:
            return self._reduction_of_piece(plan, root, self.region)
        row_pieces = ceil_div(plan.rows, plan.rows_per_piece)
        lines: list[str] = []
        begin, end = "0", str(plan.count)
        piece = "piece"
        if plan.partials > 1:
            piece = f"piece % {row_pieces}"
            lines.append(f"const tk_index begin = (tk_index)(piece / {row_pieces}) * {plan.chunk};")
            lines.append(f"const tk_index end = tk_min(begin + {plan.chunk}, (tk_index){plan.count});")
            begin, end = "begin", "end"
        if plan.rows > 1 or plan.path != "block":
            lines.append(f"const tk_index r = {self._row(plan, piece)};")
        lines += self._load_element(root, plan)
        results, reduce_lines = self._reduce_calls(root, plan, begin, end)
        element: Index = variable("r", plan.rows)
        if root.op == "reduce_partials":
            element = linearize((variable("c", plan.partials), element), (plan.rows, 1))
            if plan.partials > 1:
                reduce_lines.append(f"const tk_index c = piece / {row_pieces};")
        return lines + self._reduced(plan, root, results, reduce_lines, element)

    def _reduction_of_piece(self, plan: ReductionPlan, root: Operation, region: BlockRegion) -> list[str]:
        """The rows of a piece, or, of a reduction over rows, the piece's part of every result."""
        partial, pieces = root.op == "reduce_partials", region.split.pieces
        rows = plan.rows if partial else plan.rows // pieces
        first = f"piece * {rows} + " if pieces > 1 and not partial else ""
        warp = region.warp(self.task, self.threads)
        lane = {
            "thread": "threadIdx.x" if warp == "threadIdx.x / 32" else f"{warp} * 32 + threadIdx.x % 32",
            "warp": warp,
            "warp_columns": f"{warp} * {WARP_COLUMNS} + threadIdx.x % {WARP_COLUMNS}",
            "block": "0",
            "columns": f"threadIdx.x % {plan.rows_per_piece}",
        }[plan.path]
        lines: list[str] = []
        begin, end = "0", str(plan.count)
        if partial and pieces > 1:
            own = plan.own_count
            lines.append(f"const tk_index begin = (tk_index)piece * {own}, end = begin + {own};")
            begin, end = "begin", "end"
        if partial:
            lines += self._partial_result()
        inner: list[str] = []
        if plan.rows > 1 or plan.path != "block":
            inner.append(
                f"const tk_index own_row = row + {lane}, r = {first}own_row;"
                if lane != "0"
                else f"const tk_index r = {first}row;"
            )
        inner += self._load_element(root, plan)
        self._inside = f"own_row < {rows}"
        results, reduce_lines = self._reduce_calls(root, plan, begin, end)
        element: Index = variable("r", plan.rows)
        if partial:
            element = linearize((variable(region.partial, plan.partials), element), (plan.rows, 1))
        inner += self._reduced(plan, root, results, reduce_lines, element)
        if rows <= plan.rows_per_piece:
            return [*lines, "const tk_index row = 0;", *inner]
        head = f"for (tk_index row = 0; row < {rows}; row += {plan.rows_per_piece})"
        return [*lines, "#pragma unroll 1", *block(head, inner)]

    def _reduced(
        self, plan: ReductionPlan, root: Operation, results: list[str], reduce_lines: list[str], element: Index
    ) -> list[str]:
        """The reduction and its epilogue, by the threads that have a result."""
        registers = {spec.buffer: name for spec, name in zip(root.outputs, results, strict=True)}
        finish = self._merged(root, registers, element) + self._epilogue(registers, element)
        inside = self._inside or f"r < {plan.rows}"
        lines: list[str] = []
        if plan.path == "thread":
            return lines + block(f"if ({inside})", reduce_lines + finish)
        if plan.path in _WARP_ROWS:
            rows = _WARP_ROWS[plan.path]
            first = "threadIdx.x % 32 == 0" if rows == 1 else f"threadIdx.x % 32 < {rows}"
            return lines + reduce_lines + block(f"if ({first} && {inside})", finish)
        if plan.path == "block":
            return lines + reduce_lines + block("if (threadIdx.x == 0)", finish)
        return lines + reduce_lines + block(f"if (threadIdx.x < {plan.rows_per_piece} && {inside})", finish)

    def _merged(self, root: Operation, registers: dict[str, str], element: Index) -> list[str]:
        """A partial result together with that of the block's pieces before, which becomes its register."""
        if self.region is None or self.region.adds is None or root.op != "reduce_partials":
            return []
        out = root.outputs[0]
        kind = reduce_type(root.attrs["reduce"], domain_of(root), self.scope.templates)
        name, value = self.scope.fresh(out.buffer), registers[out.buffer]
        text = f"{self.region.adds} ? {kind}::merge({self._stored(out.buffer, element)}, {value}) : {value}"
        registers[out.buffer] = name
        return [self.scope.declaration(name, out.dtype, text)]

    def _row(self, plan: ReductionPlan, piece: str) -> str:
        if plan.path == "thread":
            return f"(tk_index)({piece}) * {self.threads} + threadIdx.x"
        if plan.path == "warp":
            return f"(tk_index)({piece}) * {self.threads // 32} + threadIdx.x / 32"
        if plan.path == "block":
            return piece
        return f"(tk_index)({piece}) * {plan.rows_per_piece} + threadIdx.x % {plan.rows_per_piece}"

    def _load_element(self, root: Operation, plan: ReductionPlan) -> list[str]:
        source, domain = root.inputs[0], domain_of(root)
        assert isinstance(source, TensorSpec)
        space = ReductionSpace.of(root)
        values = ValueScope(self.scope, {}, None)
        text = literal(0, domain)
        if source.num_elements:
            coordinates = space.coordinates(variable("r", plan.rows), variable("k", plan.count))
            text = values.operand(source, coordinates, domain)
        return function_object("load", "tk_index k", values.lines, text, C_TYPES[domain])

    def _reduce_calls(self, root: Operation, plan: ReductionPlan, begin: str, end: str) -> tuple[list[str], list[str]]:
        if root.op in _TWO_PASSES:
            return self._two_passes(root, plan, begin, end)
        domain, out = domain_of(root), root.outputs[0]
        kind = root.attrs.get("reduce", root.op)
        call = self._reduce_call(kind, domain, plan, begin, end, "load", everyone=False)
        divisor = plan.count if root.op == "mean" else root.attrs.get("divisor", 1)
        if root.op == "mean" or divisor != 1:
            # Not scaled(): the mean of no elements is 0 / 0.
            call = _divided(call, divisor, domain)
        name = self.scope.fresh(out.buffer)
        return [name], [self.scope.declaration(name, out.dtype, self.scope.rounded(call, domain, out.dtype))]

    def _two_passes(self, root: Operation, plan: ReductionPlan, begin: str, end: str) -> tuple[list[str], list[str]]:
        """A reduction whose second pass over its row needs the result of the first."""
        passes, domain = _TWO_PASSES[root.op], domain_of(root)
        first = self._reduce_call(passes.kind, domain, plan, begin, end, "load", everyone=True)
        if root.op == "moments":
            first = _divided(first, plan.count, domain)
        lines = [f"const {C_TYPES[domain]} {passes.first} = {first};"]
        body = [f"const {C_TYPES[domain]} x = load(k);"]
        lines += function_object(passes.load, "tk_index k", body, passes.term[domain], C_TYPES[domain])
        second = self._reduce_call("sum", domain, plan, begin, end, passes.load, everyone=False)
        if root.op == "moments":
            second = _divided(second, plan.count, domain)
        names = [self.scope.fresh(spec.buffer) for spec in root.outputs]
        for name, spec, value in zip(names, root.outputs, (passes.first, second), strict=True):
            lines.append(self.scope.declaration(name, spec.dtype, self.scope.rounded(value, domain, spec.dtype)))
        return names, lines

    def _reduce_call(
        self, kind: str, domain: str, plan: ReductionPlan, begin: str, end: str, load: str, *, everyone: bool
    ) -> str:
        op = reduce_type(kind, domain, self.scope.templates)
        c_type, itemsize_bytes = C_TYPES[domain], DTYPES[domain].itemsize_bytes
        own = plan.own_count
        whole = f"{own}, {flag(own == 0 or plan.count % own == 0)}"
        if plan.path == "thread":
            return f"tk_reduce_lane<{op}, 1, {whole}>({begin}, {end}, {load})"
        inside = self._inside or f"r < {plan.rows}"
        if plan.path in _WARP_ROWS:
            return f"tk_reduce_warp<{op}, {_WARP_ROWS[plan.path]}, {whole}>({inside}, {begin}, {end}, {load})"
        if plan.path == "block":
            self.shared_bytes = max(self.shared_bytes, self.threads // 32 * itemsize_bytes)
            sizes = f"{op}, {self.threads}, {whole}, {flag(everyone)}"
            return f"tk_reduce_block<{sizes}>({begin}, {end}, ({c_type}*)shared, {load})"
        self.shared_bytes = max(self.shared_bytes, self.threads * itemsize_bytes)
        sizes = f"{op}, {self.threads}, {plan.rows_per_piece}, {whole}, {flag(everyone)}"
        return f"tk_reduce_columns<{sizes}>({inside}, {begin}, {end}, ({c_type}*)shared, {load})"


def _divided(text: str, divisor: int, domain: str) -> str:
    """A quotient; by a power of two it is the product with the exact reciprocal, the same bits."""
    if domain != "float32":
        return f"tk_div({text}, {literal(divisor, domain)})"
    if divisor > 0 and divisor & (divisor - 1) == 0:
        return f"__fmul_rn({text}, {literal(1 / divisor, domain)})"
    return f"__fdiv_rn({text}, {literal(divisor, domain)})"
