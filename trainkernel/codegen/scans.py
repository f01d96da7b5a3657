"""C++ text of scans and scatters: what their task functions do before their epilogues."""

from __future__ import annotations

from collections.abc import Callable

from trainkernel.access import ReductionSpace, scatter_coordinates
from trainkernel.arithmetic import domain_of
from trainkernel.codegen.conversions import C_TYPES
from trainkernel.codegen.text import block, function_object
from trainkernel.codegen.values import TaskScope, ValueScope, reduce_type
from trainkernel.dtypes import DTYPES
from trainkernel.indexing import Index, linearize, variable
from trainkernel.ir import Operation, TensorSpec
from trainkernel.ops import literal
from trainkernel.ops.domains import domain_of_dtype
from trainkernel.products import ReductionPlan, ScanPlan

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
    op, reverse = reduce_type("sum", domain, scope.templates), "true" if root.attrs.get("reverse", False) else "false"
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


def scatter_sum(scope: TaskScope, root: Operation, plan: ReductionPlan, begin: str, end: str) -> tuple[list[str], str]:
    """Statements before it, and the expression of one result's sum over the updates that its row gets."""
    scope.templates |= {"indexed", "scatter"}
    indices, updates = root.inputs
    assert isinstance(indices, TensorSpec) and isinstance(updates, TensorSpec)
    index_domain, domain = domain_of_dtype(indices.dtype), domain_of(root)
    result = variable("r", plan.rows)
    index_at, update_at = scatter_coordinates(root, result, variable("k", plan.count))
    index_values, update_values = ValueScope(scope, {}, None), ValueScope(scope, {}, None)
    place, update = "-1", literal(0, domain)
    if updates.num_elements:
        place = f"tk_row({index_values.operand(indices, index_at, index_domain)}, {root.attrs['size']})"
        update = update_values.operand(updates, update_at, domain)
    lines = function_object("index", "tk_index k", index_values.lines, place, "tk_index")
    lines += function_object("load", "tk_index k", update_values.lines, update, C_TYPES[domain])
    row = result // max(updates.num_elements // max(updates.shape[0], 1), 1)
    op = reduce_type("sum", domain, scope.templates)
    return lines, f"tk_scatter_lane<{op}>({row}, {begin}, {end}, index, load)"
