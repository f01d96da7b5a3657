"""Block regions: what a label cuts, which plan is chosen, where barriers stand, and that the verifier knows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from harness import check

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel.access import AccessWalker
from trainkernel.alignment import PARTIAL, ROW, accesses, is_aligned
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.errors import VerificationError
from trainkernel.ir import Operation, Program
from trainkernel.memory import plan_memory
from trainkernel.mlp import mlp_step
from trainkernel.options import Options, check_options
from trainkernel.placement import build_schedule
from trainkernel.regions import Cuts, classify, plan_region
from trainkernel.schedule import BlockRegion, Schedule, Stage
from trainkernel.target import Target
from trainkernel.verify import verify_plan

TARGET = Target.preset("sm_90a")


def operation(op: str, *shapes: tuple[int, ...], view: str = "", **attrs: Any) -> tuple[Operation, Program]:
    b = ProgramBuilder()
    inputs = [b.input(f"x{number}", shape) for number, shape in enumerate(shapes)]
    if view == "T":
        inputs[0] = inputs[0].T
    program = b.build([b.op(op, *inputs, **attrs)])
    return program.operations[0], program


# (operation, label, role): the inputs of which it reads its own rows alone, or None where it cannot be cut.
CUTS = [
    (operation("exp", (12, 5)), 12, ROW, {"x0"}),
    (operation("exp", (12, 5)), 5, ROW, {"x0"}),
    (operation("exp", (12, 5)), 7, ROW, None),
    (operation("exp", (12, 5)), 4, ROW, {"x0"}),
    (operation("add", (12, 5), (5,)), 12, ROW, {"x0"}),
    (operation("add", (6, 6), (6, 6), view="T"), 6, ROW, {"x1"}),
    (operation("mm", (12, 5), (5, 7)), 12, ROW, {"x0"}),
    (operation("mm", (12, 5), (5, 7)), 5, ROW, None),
    (operation("mm", (5, 12), (5, 7), view="T"), 5, PARTIAL, {"x0", "x1"}),
    (operation("mm", (12, 5), (5, 7)), 5, PARTIAL, {"x1"}),
    (operation("bmm", (6, 4, 5), (6, 5, 3)), 6, ROW, {"x0", "x1"}),
    (operation("bmm", (6, 4, 5), (6, 5, 3)), 24, ROW, None),
    (operation("sum", (12, 5), dims=(1,)), 12, ROW, {"x0"}),
    (operation("sum", (12, 5), dims=(0,)), 12, PARTIAL, {"x0"}),
    (operation("sum", (12, 5), dims=(0,)), 12, ROW, None),
    (operation("sum", (12, 5)), 12, PARTIAL, {"x0"}),
    (operation("cumsum", (12, 5), dim=1), 12, ROW, {"x0"}),
]


@pytest.mark.parametrize(("case", "label", "role", "aligned"), CUTS, ids=[str(number) for number in range(len(CUTS))])
def test_what_a_label_cuts(case: tuple[Operation, Program], label: int, role: str, aligned: set[str] | None) -> None:
    item, program = case
    sizes = {spec.buffer: spec.num_elements for spec in program.buffers()}
    found = accesses(item, AccessWalker({}), label, role)
    if aligned is None:
        assert found is None
        return
    assert found is not None
    astray = {access.buffer for access in found if not is_aligned(access, sizes[access.buffer], label)}
    assert {access.buffer for access in found} - astray == aligned


def mlp(layers: tuple[int, ...], batch: int, optimizer: str = "adam", activation: str = "tanh") -> Any:
    return mlp_step(layers, batch, activation=activation, loss="mse", optimizer=optimizer, dtype="float32")


def regions(schedule: Schedule) -> list[BlockRegion]:
    return [task.region for stage in schedule.stages for task in stage.tasks if task.region is not None]


def test_a_net_with_a_large_batch_takes_one_grid_barrier() -> None:
    step = mlp((2, 64, 64, 1), 1024)
    generated = generate(step.program, target=TARGET, inplace_outputs=step.inplace_outputs)
    (region,) = regions(generated.schedule)
    assert region.split.label == 1024 and 64 <= region.split.pieces <= 132
    assert generated.plan.barriers == (None, "grid") and generated.grid_barriers == 1
    assert generated.threads_per_block == 512
    assert generate(step.program, target=TARGET, region_pieces=0).grid_barriers > 4


def test_a_small_net_runs_in_one_block() -> None:
    step = mlp((8, 32, 32, 1), 32, "sgd", "relu")
    generated = generate(step.program, target=TARGET, inplace_outputs=step.inplace_outputs)
    (region,) = regions(generated.schedule)
    assert region.split.pieces == 1 and generated.grid_barriers == 0 and generated.max_work_blocks == 1


def test_a_layer_too_large_for_a_block_is_left_to_the_grid() -> None:
    step = mlp((784, 256, 128, 10), 128)
    plan = plan_region(step.program, TARGET, Options())
    assert plan is not None and plan.split.label == 128
    products = {item.outputs[0].buffer for item in step.program.operations if isinstance(item, Operation)}
    assert "z0" in products - plan.rows and {"z1", "y"} <= plan.rows
    assert "grad_w0" not in plan.partials


def test_weights_rounded_in_the_step_are_evaluated_by_each_block() -> None:
    """Though a width is the batch's size, and a weight has as many rows."""
    b = ProgramBuilder()
    x, h = b.input("x", (128, 64), "bfloat16"), None
    for number, shape in enumerate([(64, 128), (128, 128), (128, 10)]):
        w = b.op("cast", b.input(f"w{number}", shape), dtype="bfloat16", name=f"c{number}")
        h = b.op("relu", b.op("mm", x if h is None else h, w, dtype="bfloat16", name=f"z{number}"), dtype="bfloat16")
    assert h is not None
    program = b.build([h, b.op("mm", x.T, h, dtype="bfloat16", name="grad")])
    rows, partials = classify(Cuts(program, 128), frozenset(), frozenset())
    assert {"z0", "z1", "z2"} <= rows and partials == {"grad"} and not rows & {"c0", "c1", "c2"}
    generated = generate(program, target=TARGET, region_pieces=8)
    (region,) = regions(generated.schedule)
    padded = {name for name, slab in region.shared.slabs.items() if slab.padding}
    assert all(part.plan.tensor == "bfloat16" for part in region.parts if part.root) and padded  # type: ignore[union-attr]


def test_a_large_batch_is_cut_into_slices_of_a_block() -> None:
    step = mlp_step((32, 64, 64, 16), 65536, dtype="bfloat16")
    plan = plan_region(step.program, TARGET, Options())
    assert plan is not None and plan.split.label == 65536
    assert plan.split.slices > 1 and plan.split.partials <= TARGET.num_sms
    assert plan.split.rows in (64, 128, 256)


def test_a_label_that_is_also_a_width_does_not_cut_the_update() -> None:
    step = mlp((17, 256, 256, 6), 256)
    rows, partials = classify(Cuts(step.program, 256), frozenset(), frozenset())
    assert {"z0", "z1", "grad_z0"} <= rows and {"grad_w1", "grad_b1"} <= partials
    assert not {name for name in rows if name.startswith(("new_", "m_gap", "change_"))}


def test_an_ensemble_is_rows_throughout() -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        return tnp.mean((tnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)

    def step(w: Any, x: Any, y: Any) -> Any:
        g = tk.vmap(tk.grad(loss))(w, x, y)
        return {name: w[name] - 0.1 * g[name] for name in w}

    w = {"a": np.ones((16, 4, 8), np.float32), "b": np.ones((16, 8, 2), np.float32)}
    x, y = np.ones((16, 32, 4), np.float32), np.ones((16, 32, 2), np.float32)
    lowered = tk.jit(step, donate_argnums=0, device="reference").lower(w, x, y)
    generated = generate(lowered.program, target=TARGET, region_pieces=8, inplace_outputs=dict(lowered.inplace_outputs))
    (region,) = regions(generated.schedule)
    assert region.split.label == 16 and generated.grid_barriers == 0 and len(generated.schedule.stages) == 1


def test_a_layer_norm_is_one_stage() -> None:
    def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
        mean = tnp.mean(x, -1, keepdims=True)
        return (x - mean) / tnp.sqrt(tnp.var(x, -1, keepdims=True) + 1e-5) * scale + shift

    arguments = (np.ones((2048, 128), np.float32), np.ones(128, np.float32), np.ones(128, np.float32))
    program = tk.jit(layer_norm, device="reference").lower(*arguments).program
    generated = generate(program, target=TARGET)
    assert len(generated.schedule.stages) == 1 and generated.grid_barriers == 0
    (region,) = regions(generated.schedule)
    assert region.split.label == 2048


def small_step() -> tuple[Program, dict[int, int]]:
    step = mlp((3, 8, 8, 2), 24, "sgd")
    return step.program, dict(step.inplace_outputs)


@pytest.mark.parametrize("pieces", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("threads", [128, 1024])
def test_any_number_of_pieces_is_right(pieces: int, threads: int) -> None:
    program, inplace = small_step()
    rng = np.random.default_rng(pieces)
    inputs = [
        0.01 if not hasattr(spec, "shape") or not spec.shape else rng.standard_normal(spec.shape).astype(np.float32)
        for spec in program.inputs
    ]
    generated = check(
        program, inputs, num_blocks=3, region_pieces=pieces, threads_per_block=threads, inplace_outputs=inplace
    )
    assert regions(generated.schedule)[0].split.pieces == pieces


def test_parts_of_one_level_do_not_wait_for_each_other() -> None:
    """Their values lie apart, and those that need few warps begin on different ones."""
    step = mlp((8, 32, 32, 1), 32, "sgd", "relu")
    generated = generate(step.program, target=TARGET, inplace_outputs=step.inplace_outputs)
    (region,) = regions(generated.schedule)
    # The staged copies, three layers, and three levels of gradients.
    assert sum(region.waits) == 6
    together: list[list[int]] = []
    for wait, first in zip(region.waits, region.first_warps, strict=False):
        if wait:
            together.append([])
        together[-1].append(first)
    assert any(len(set(firsts)) > 1 for firsts in together)


def test_values_that_do_not_fit_apart_share_places() -> None:
    program, _ = small_step()
    found = []
    for shared_bytes in (227 * 1024, 21 * 1024):
        target = replace(TARGET, shared_bytes_per_block=shared_bytes)
        (region,) = regions(generate(program, target=target, region_pieces=1).schedule)
        found.append((region.shared.end_bytes, -sum(region.waits), -len(region.shared.slabs)))
    assert found[0] > found[1] and found[0][1] > found[1][1] and found[0][2] == found[1][2]


def test_an_uneven_number_of_pieces_leaves_no_region() -> None:
    program, _ = small_step()
    assert not regions(generate(program, region_pieces=7).schedule)


def _without(schedule: Schedule, part: int) -> Schedule:
    """The schedule without the block barrier before one part of its first region."""
    stage = schedule.stages[0]
    task = stage.tasks[0]
    assert task.region is not None
    waits = tuple(wait and number != part for number, wait in enumerate(task.region.waits))
    cut = replace(task, region=replace(task.region, waits=waits))
    return replace(schedule, stages=(Stage((cut, *stage.tasks[1:])), *schedule.stages[1:]))


def test_the_verifier_misses_every_block_barrier_that_is_taken_away() -> None:
    program, inplace = small_step()
    schedule = build_schedule(program, TARGET, check_options({"region_pieces": 3}), inplace)
    verify_plan(schedule, plan_memory(schedule))
    waits = regions(schedule)[0].waits
    for part, wait in enumerate(waits):
        if wait:
            broken = _without(schedule, part)
            with pytest.raises(VerificationError, match="without a block barrier"):
                verify_plan(broken, plan_memory(broken))


def test_the_verifier_wants_the_grid_barrier_before_the_update() -> None:
    program, inplace = small_step()
    schedule = build_schedule(program, TARGET, check_options({"region_pieces": 3}), inplace)
    plan = plan_memory(schedule)
    assert plan.barriers == (None, "grid")
    for scope in ("block", None):
        with pytest.raises(VerificationError, match="without a grid barrier"):
            verify_plan(schedule, replace(plan, barriers=(None, scope)))
