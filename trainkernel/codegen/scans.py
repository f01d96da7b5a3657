"""C++ text of scans and scatters: what their task functions do before their epilogues."""

from __future__ import annotations

from collections.abc import Callable

from trainkernel.access import ReductionSpace, scatter_coordinates
from trainkernel.arithmetic import domain_of
from trainkernel.codegen.bodies import TaskBody
from trainkernel.codegen.conversions import C_TYPES
from trainkernel.codegen.text import block, flag, function_object
from trainkernel.codegen.values import TaskScope, ValueScope, reduce_type
from trainkernel.dtypes import DTYPES
from trainkernel.indexing import Index, linearize, variable
from trainkernel.ir import Operation, TensorSpec
from trainkernel.ops import literal
from trainkernel.ops.domains import domain_of_dtype
from trainkernel.product_plans import ceil_div
from trainkernel.reduction_plans import ReductionPlan, ScanPlan

Finish = Callable[[dict[str, str], Index], list[str]]
"""From registers at an element of the task to the stores there."""


def emit_scan(scope: TaskScope, root: Operation, plan: ScanPlan, threads: int, finish: Finish) -> list[str]:
    """The statements of a scan's piece."""
    scope.templates.add("scan")
    source, out, domain = root.tensor_inputs[0], root.outputs[0], domain_of(root)
    coordinates = ReductionSpace.of(root).coordinates(variable("r", plan.rows), variable("k", plan.count))
    values = ValueScope(scope, {}, None)
    text = values.operand(source, coordinates, domain)
    name = scope.fresh(out.buffer)
    body = [scope.declaration(name, out.dtype, scope.rounded("total", domain, out.dtype))]
    body += finish({out.buffer: name}, linearize(coordinates, out.strides))
    lines = function_object("load", "tk_index k", values.lines, text, C_TYPES[domain])
    lines += function_object("store", f"tk_index k, {C_TYPES[domain]} total", body, None)
    op, reverse = reduce_type("sum", domain, scope.templates), flag(root.attrs.get("reverse", False))
    if plan.path == "block":
        call = f"tk_scan_block<{op}, {threads}, {reverse}>({plan.count}, ({C_TYPES[domain]}*)shared, load, store);"
        return [*_row("piece", plan), *lines, call]
    per_row = {"thread": "threadIdx.x", "warp": "threadIdx.x / 32"}[plan.path]
    call = f"tk_scan_{plan.path}<{op}, {reverse}>({plan.count}, load, store);"
    return [
        *_row(f"(tk_index)piece * {plan.rows_per_piece} + {per_row}", plan),
        *block(f"if (r < {plan.rows})", [*lines, call]),
    ]


def scan_shared_bytes(root: Operation, plan: ScanPlan, threads: int) -> int:
    """Shared memory of a scan's piece: a total per warp where a block shares a row."""
    return threads // 32 * DTYPES[domain_of(root)].itemsize_bytes if plan.path == "block" else 0


def _row(text: str, plan: ScanPlan) -> list[str]:
    return [f"const tk_index r = {text};"] if plan.rows > 1 or plan.path != "block" else []


def scatter_shared_bytes(threads: int) -> int:
    """Shared memory of a scatter's piece: the list of wanted updates, and how many each warp found."""
    return threads * 2 * DTYPES["int64"].itemsize_bytes + threads // 32 * 4


def emit_scatter(scope: TaskScope, root: Operation, plan: ReductionPlan, threads: int, finish: Finish) -> list[str]:
    """The statements of a scatter's piece."""
    scope.templates |= {"indexed", "scatter"}
    out, domain = root.outputs[0], domain_of(root)
    result = variable("r", plan.rows)
    lines, bounds = _part(plan)
    lines += _updates(scope, root, plan, domain)
    columns = max(plan.rows // max(root.attrs["size"], 1), 1)
    lines += function_object("row", "tk_index r", [], str(result // columns), "tk_index")
    name = scope.fresh(out.buffer)
    body = [scope.declaration(name, out.dtype, scope.rounded("total", domain, out.dtype))]
    body += finish({out.buffer: name}, linearize((variable("c", plan.partials), result), (plan.rows, 1)))
    lines += function_object("store", f"tk_index r, {C_TYPES[domain]} total", body, None)
    sizes = f"{reduce_type('sum', domain, scope.templates)}, {threads}, {plan.rows_per_piece // threads}"
    return [*lines, f"tk_scatter<{sizes}>({bounds}, shared, index, row, load, store);"]


def _part(plan: ReductionPlan) -> tuple[list[str], str]:
    """Statements, and the arguments that say which results and which updates the piece has."""
    if plan.partials == 1:
        return [], f"(tk_index)piece * {plan.rows_per_piece}, {plan.rows}, 0, {plan.count}"
    pieces = ceil_div(plan.rows, plan.rows_per_piece)
    lines = [
        f"const tk_index c = piece / {pieces};",
        f"const tk_index begin = c * {plan.chunk};",
        f"const tk_index end = tk_min(begin + {plan.chunk}, (tk_index){plan.count});",
    ]
    return lines, f"(tk_index)(piece % {pieces}) * {plan.rows_per_piece}, {plan.rows}, begin, end"


def _updates(scope: TaskScope, root: Operation, plan: ReductionPlan, domain: str) -> list[str]:
    """The function objects ``index(k)`` and ``load(k, r)``."""
    indices, updates = root.inputs
    assert isinstance(indices, TensorSpec) and isinstance(updates, TensorSpec)
    index_at, update_at = scatter_coordinates(root, variable("r", plan.rows), variable("k", plan.count))
    index_values, update_values = ValueScope(scope, {}, None), ValueScope(scope, {}, None)
    place, update = "-1", literal(0, domain)
    if updates.num_elements:
        place = index_values.operand(indices, index_at, domain_of_dtype(indices.dtype))
        place = f"tk_row({place}, {root.attrs['size']})"
        update = update_values.operand(updates, update_at, domain)
    lines = function_object("index", "tk_index k", index_values.lines, place, "tk_index")
    return lines + function_object("load", "tk_index k, tk_index r", update_values.lines, update, C_TYPES[domain])


class ScanBody(TaskBody):
    """The body of a scan."""

    def lines(self) -> list[str]:
        plan, root = self.task.plan, self.task.root
        assert isinstance(plan, ScanPlan) and root is not None
        self.shared_bytes = scan_shared_bytes(root, plan, self.threads)
        return emit_scan(self.scope, root, plan, self.threads, self._epilogue)
