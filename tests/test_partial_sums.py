"""Gradients of weights that several evaluations share: a block adds up its partial results before they leave it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from harness import check

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel.builder import ProgramBuilder
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program
from trainkernel.options import Options
from trainkernel.passes import normalize
from trainkernel.region_plans import PartialSums
from trainkernel.regions import plan_region
from trainkernel.target import Target

RNG = np.random.default_rng(0)
ROWS = 48


def shared_weights() -> tuple[Program, list[Any]]:
    """A net at two batches and its derivative at one: three gradients of each weight, one of them transposed."""
    params = {"w": RNG.standard_normal((12, 12), np.float32) / 4, "b": RNG.standard_normal(12, np.float32)}
    x, y = RNG.standard_normal((2, ROWS, 12), np.float32)

    def net(p: Any, x: Any) -> Any:
        return tnp.tanh(tnp.tanh(x @ p["w"] + p["b"]) @ p["w"] + p["b"])

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            slope = tk.grad(lambda x: net(p, x).sum())(x)
            return tnp.mean(net(p, x) ** 2) + tnp.mean(net(p, y) ** 2) + tnp.mean(slope**2)

        value, grads = tk.value_and_grad(loss)(p)
        return tk.tree.map(lambda p, g: p - np.float32(0.1) * g, p, grads), value

    program = tk.jit(step, device="reference").lower(params, x, y).program
    return program, [np.array(leaf) for leaf in tk.tree.leaves((params, x, y))]


@pytest.mark.parametrize(
    "options", [{}, {"fuse_pointwise": False}, {"fuse_epilogues": False}, {"threads_per_block": 128}]
)
@pytest.mark.parametrize("pieces", [8, ROWS])
def test_one_partial_result_leaves_a_block(pieces: int, options: dict[str, Any]) -> None:
    program, inputs = shared_weights()
    for num_blocks, order in ((1, "forward"), (5, "reverse"), (pieces, 1)):
        generated = check(program, inputs, num_blocks=num_blocks, order=order, region_pieces=pieces, **options)
    tasks = [task for stage in generated.schedule.stages for task in stage.tasks]
    region = next(task.region for task in tasks if task.region is not None)
    outside = {name for task in tasks if task.region is None for name in task.reads}
    left = {name for part in region.parts for name in part.stores if name in outside and "partials" in name}
    shapes = sorted(spec.shape for spec in generated.schedule.program.buffers() if spec.buffer in left)
    assert shapes.count((pieces, 12, 12)) == 1 and shapes.count((pieces, 12)) == 1


def test_which_additions_are_of_partial_results() -> None:
    """Neither those of a value that is read elsewhere, nor of a part of one, nor of a mean or of other values."""
    b = ProgramBuilder()
    x, y, w = b.input("x", (8, 3)), b.input("y", (8, 3)), b.input("w", (3, 3))
    first, second, third = b.op("mm", x.T, y), b.op("mm", y.T, x), b.op("mm", x.T, x)
    good = b.op("add", b.op("add", first, second.T), third)
    read = b.op("mm", y.T, y)
    bad = [b.op("add", read, w), b.op("exp", read)]
    means = b.op("add", b.op("mean", x, dims=(0,)), b.op("mean", y, dims=(0,)))
    row = b.op("sum", x, dims=(0,))
    part = b.op("add", row.broadcast_to((3, 3)), b.op("mm", y.T, x))
    program = b.build([good, *bad, means, part])
    partials = {op.outputs[0].buffer for op in program.operations if op.op in ("mm", "mean", "sum")}
    sums = PartialSums.of(program, partials)
    assert good.buffer in sums.results and len(sums.results) == 2
    assert {first.buffer, second.buffer, third.buffer} < sums.operands and len(sums.operands) == 4


def test_slices_add_up_each_sum_by_itself() -> None:
    """Several pieces of a block leave one partial result already."""
    program, inputs = shared_weights()
    target = Target.preset("portable")
    plan = plan_region(program, target, Options(region_pieces=ROWS))
    assert plan is not None and plan.sums.results
    generated = check(program, inputs, num_blocks=3, region_pieces=ROWS, target=replace(target, num_sms=40))
    region = next(task.region for stage in generated.schedule.stages for task in stage.tasks if task.region)
    assert region.split.slices > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
def test_a_small_product_of_depth_one_is_pointwise(dtype: str) -> None:
    b = ProgramBuilder()
    u, v = b.input("u", (2, 1), dtype), b.input("v", (1, 7), dtype)
    batch = b.op("bmm", b.input("s", (3, 5, 1), dtype), b.input("t", (3, 1, 4), dtype))
    program = b.build([b.op("neg", b.op("mm", u, v)), batch])
    assert all(operation.op not in ("mm", "bmm") for operation in normalize(program).operations)
    larger = b.build([b.op("mm", b.input("large", (9, 1), dtype), v)])
    assert normalize(larger).operations[0].op == "mm"
    inputs = [(4 * RNG.standard_normal(spec.shape)).astype(np.float32) for spec in program.tensor_inputs]
    generated = check(program, [array.astype(DTYPES[dtype].numpy) for array in inputs], num_blocks=2)
    assert len(generated.schedule.stages) == 1
