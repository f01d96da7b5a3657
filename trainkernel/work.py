"""What a task moves and computes, counted from its shapes: bytes, floating-point operations, a bound of its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from trainkernel.access import PICKS
from trainkernel.arithmetic import kind_of
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Operation, TensorSpec
from trainkernel.ops import OPS
from trainkernel.product_plans import ProductPlan
from trainkernel.schedule import Schedule, SharedPlace, Task
from trainkernel.target import Target


@dataclass(frozen=True)
class Work:
    """Bytes of device memory read and written, and floating-point operations.

    A byte counts once, however often it is read; values in a block's shared memory do not count. A
    product's multiply-add is two operations, a reduction or scan has one for each element that it reads,
    a pointwise operation the op table's cost for each of its results, of whatever dtype. All are of the
    whole grid.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0


class WorkCounter:
    """Counts the work of the tasks of one schedule, loop bodies apart."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._declared = {spec.buffer: spec for spec in schedule.program.buffers()}
        self._scalars = {spec.buffer for spec in schedule.program.scalar_inputs}

    def task(self, task: Task) -> Work:
        """The work of a task that is no loop; for a region that of its parts, what several read counted once."""
        tasks = (task,) if task.region is None else task.region.parts
        if task.copy is not None:
            size = prod(task.copy.shape) * DTYPES[task.copy.dtype].itemsize_bytes
            return Work(0 if task.copy.source is None else size, size, 0)
        operations = [operation for each in tasks for operation in self._operations(each)]
        written = sum(self._bytes(name) for name in task.stores)
        copies = [self.task(part) for part in tasks if part.copy is not None]
        return Work(
            sum(self._read_bytes(task.reads, operations)) + sum(copy.read_bytes for copy in copies),
            written + sum(copy.written_bytes for copy in copies),
            sum(_flops(each, self._operations(each)) for each in tasks),
        )

    def _operations(self, task: Task) -> list[Operation]:
        """What a task computes: each operation once, those evaluated on the way included."""
        found = {operation.outputs[0].buffer: operation for operation in task.operations}
        for name in task.inlined:
            if name in self._schedule.inlined:
                found.setdefault(name, self._schedule.inlined[name])
        return list(found.values())

    def _read_bytes(self, names: Iterable[str], operations: list[Operation]) -> Iterator[int]:
        """For each buffer: the elements that views of it reach, at most all of them."""
        for name in names:
            spec = self._declared.get(name)
            if spec is None or name in self._scalars or isinstance(self._schedule.places.get(name), SharedPlace):
                continue
            uses = [_reach(operation, operand) for operation, operand in _operands(operations, name)]
            elements = min(spec.num_elements, sum(uses)) if uses else spec.num_elements
            yield elements * DTYPES[spec.dtype].itemsize_bytes

    def _bytes(self, name: str) -> int:
        spec = self._declared.get(name)
        if spec is None or isinstance(self._schedule.places.get(name), SharedPlace):
            return 0
        return spec.num_elements * DTYPES[spec.dtype].itemsize_bytes


def _operands(operations: Iterable[Operation], name: str) -> Iterator[tuple[Operation, TensorSpec]]:
    for operation in operations:
        for operand in operation.tensor_inputs:
            if operand.buffer == name:
                yield operation, operand


def _reach(operation: Operation, operand: TensorSpec) -> int:
    """Different elements of a view that an operation reads; what it picks by an index, at most its results."""
    if operand.num_elements == 0:
        return 0
    elements = prod(size for size, stride in zip(operand.shape, operand.strides, strict=True) if stride)
    return min(elements, operation.outputs[0].num_elements) if operation.op in PICKS else elements


def _flops(task: Task, operations: list[Operation]) -> int:
    total = 0
    for operation in operations:
        kind = kind_of(operation)
        if kind == "product" and isinstance(task.plan, ProductPlan):
            total += _product_flops(task.plan)
        elif kind == "pointwise" and operation.op in OPS:
            total += round(OPS[operation.op].cost * sum(spec.num_elements for spec in operation.outputs))
        else:
            total += sum(spec.num_elements for spec in operation.tensor_inputs)
    return total


def _product_flops(plan: ProductPlan) -> int:
    return 2 * plan.batch * plan.m * plan.n * plan.k


def bound_us(task: Task, work: Work, num_pieces: int, target: Target) -> float:
    """At least this long: bytes at full bandwidth, multiply-adds at the peak of as many SMs as there are pieces."""
    us = (work.read_bytes + work.written_bytes) / target.memory_bytes_per_us
    if isinstance(task.plan, ProductPlan):
        rate = target.tensor_flops_per_us if task.plan.is_tensor_tile else target.fma_flops_per_us
        us = max(us, _product_flops(task.plan) / (rate * min(1.0, max(num_pieces, 1) / target.num_sms)))
    return us
