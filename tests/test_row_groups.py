"""Row groups: sums over rows and pointwise tasks between products that share a stage where there is no region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import bits, check, emulate

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import nn, placement
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.ir import Program, TensorSpec
from trainkernel.options import Options
from trainkernel.row_groups import plan_row_groups
from trainkernel.target import Target

TARGET = Target.preset("sm_90a")
ROWS, WIDTH = 96, 24


@pytest.fixture(autouse=True)
def no_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of this size would be regions; larger ones take long in the emulator."""
    monkeypatch.setattr(placement, "plan_region", lambda *_: None)


def layer_norm(x: Any, scale: Any) -> Any:
    centered = x - tnp.mean(x, axis=-1, keepdims=True)
    return scale * centered / tnp.sqrt(tnp.mean(centered * centered, axis=-1, keepdims=True) + 1e-5)


def norms(params: Any, x: Any) -> Any:
    """Two layer norms between products, with a residual."""
    h = x @ params["first"]
    h = h + nn.gelu(layer_norm(h, params["scale"]) @ params["second"])
    return layer_norm(h, params["scale"]) @ params["third"]


def attention(params: Any, x: Any) -> Any:
    h = layer_norm(x, params["scale"]).reshape(4, ROWS // 4, WIDTH)
    q, k, v = (h @ params[name] for name in ("first", "second", "third"))
    scores = q @ tnp.swapaxes(k, 1, 2) / 5
    mixed = (nn.softmax(scores, axis=-1) @ v).reshape(ROWS, WIDTH)
    return layer_norm(x + mixed, params["scale"]) @ params["third"]


def lowered(
    function: Callable[..., Any], dtype: str = "float32", *, step: bool = True, num_steps: int = 0
) -> tuple[Program, list[Any]]:
    """A training step, or the function alone; or ``num_steps`` layers of it in a loop."""
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((WIDTH, WIDTH), np.float32) / 5 for name in ("first", "second", "third")}
    params["scale"] = np.ones(WIDTH, np.float32)
    x = rng.standard_normal((ROWS, WIDTH), np.float32)

    def training(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            cast = tk.tree.map(lambda leaf: leaf.astype(dtype), p)
            return tnp.mean(tnp.square(function(cast, x.astype(dtype))).astype(np.float32))

        value, grads = tk.value_and_grad(loss)(params)
        return tk.tree.map(lambda p, g: p - np.float32(0.1) * g, params, grads), value

    def layers(params: Any, x: Any) -> Any:
        cast = tk.tree.map(lambda leaf: leaf.astype(dtype), params)
        return tk.scan(lambda h, _: (function(cast, h), None), x.astype(dtype), None, length=num_steps)[0]

    call = training if step else layers if num_steps else function
    program = tk.jit(call, device="reference").lower(params, x).program
    return program, [np.array(leaf) for leaf in tk.tree.leaves((params, x))]


def groups(generated: Any) -> list[Any]:
    tasks = [task for stage in generated.schedule.stages for task in stage.tasks]
    return [task.region for task in tasks if task.region is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", [norms, attention])
def test_a_step_with_groups_in_the_emulator(function: Any, dtype: str) -> None:
    """Fewer stages, on every grid and in every order without a race, and the bits of the step without groups."""
    program, inputs = lowered(function, dtype)
    for num_blocks, order in ((1, "forward"), (5, "reverse"), (ROWS, 1)):
        generated = check(program, inputs, num_blocks=num_blocks, order=order, max_unknown=0.1)
    apart = generate(program, region_pieces=0)
    assert groups(generated) and not groups(apart)
    assert len(generated.schedule.stages) <= len(apart.schedule.stages) - 2
    pair = (emulate(each, inputs, num_blocks=3).outputs for each in (generated, apart))
    for one, other in zip(*pair, strict=True):
        assert bits(one) == bits(other)


def test_products_keep_their_epilogues() -> None:
    program, _ = lowered(norms, step=False)
    plan = plan_row_groups(program, TARGET, Options())
    assert plan is not None and plan.split.label == ROWS and not plan.partials
    operations = {operation.outputs[0].buffer: operation.op for operation in program.operations}
    assert {operations[name] for name in plan.rows} <= {"mean", "sub", "mul", "add", "sqrt", "div"}
    schedule = generate(program).schedule
    products = [task for stage in schedule.stages for task in stage.tasks if task.kind == "product"]
    assert any(task.members for task in products)
    assert len(schedule.stages) == 5  # three products, two groups


def test_what_saves_no_stage_stays_as_it_is() -> None:
    b = ProgramBuilder()
    x = b.input("x", (ROWS, WIDTH))
    program = b.build([b.op("sum", x, dims=(1,)), b.op("max", x, dims=(1,)), b.op("exp", x)])
    assert plan_row_groups(program, TARGET, Options()) is None
    # Too few rows for the grid; sums over columns, whose elements other rows of the group own.
    for shape, dim in (((8, 64), 1), ((64, ROWS), 0)):
        b = ProgramBuilder()
        x = b.input("x", shape)
        one = [1 if d == dim else size for d, size in enumerate(shape)]
        mean = b.op("mean", x, dims=(dim,)).reshape(tuple(one)).broadcast_to(shape)
        centered = b.op("exp", b.op("sub", x, mean))
        total = b.op("sum", centered, dims=(dim,)).reshape(tuple(one)).broadcast_to(shape)
        assert plan_row_groups(b.build([b.op("sub", centered, total)]), TARGET, Options()) is None


def test_groups_are_left_out_where_regions_are() -> None:
    program, _ = lowered(norms, step=False)
    assert plan_row_groups(program, TARGET, Options(region_pieces=0)) is None


def test_blocks_that_have_row_groups_in_a_loop_lie_far_apart() -> None:
    """Groups go by the same numbers of blocks as the tiles beside them."""
    program, inputs = lowered(norms, "bfloat16", step=False, num_steps=2)
    for num_blocks, order in ((1, "forward"), (5, "reverse"), (ROWS, 1)):
        generated = check(program, inputs, num_blocks=num_blocks, order=order, max_unknown=1.0, blocks_per_sm=2)
    assert "const int block = tk_spread_block<" in generated.source
    assert "for (int piece = block; piece < 96;" in generated.source


def test_a_group_leaves_shared_memory_to_a_second_block() -> None:
    """Rows that would fill a multiprocessor stay in device memory where two blocks of the kernel share it."""
    b = ProgramBuilder()
    h = b.op("mm", b.input("x", (1056, 64)), b.input("w", (64, 3072)))
    for _ in range(3):
        centered = b.op("sub", h, b.op("mean", h, dims=(1,)).reshape((1056, 1)).broadcast_to((1056, 3072)))
        h = b.op("add", b.op("mul", b.op("exp", centered), h), b.op("sqrt", b.op("abs", centered)))
    program = b.build([b.op("mm", h, b.input("v", (3072, 64)))])
    half_bytes = TARGET.shared_bytes_per_sm // 2 - 1024
    for threads, fits in ((256, True), (512, False)):
        generated = generate(program, target=TARGET, threads_per_block=threads)
        (group,) = groups(generated)
        assert (group.shared.end_bytes <= half_bytes) == fits
        assert group.shared.slabs


def test_no_group_waits_for_what_another_needs() -> None:
    """Beside two products run two groups, one after another; a third one continues both."""
    b = ProgramBuilder()
    x, w = b.input("x", (ROWS, WIDTH)), b.input("w", (WIDTH, WIDTH))

    def norm(x: TensorSpec) -> TensorSpec:
        centered = b.op("sub", x, b.op("mean", x, dims=(1,)).reshape((ROWS, 1)).broadcast_to((ROWS, WIDTH)))
        total = b.op("sum", b.op("exp", centered), dims=(1,)).reshape((ROWS, 1)).broadcast_to((ROWS, WIDTH))
        return b.op("div", centered, total)

    beside = norm(b.op("flip", norm(x), dims=(0,)))
    program = b.build([norm(b.op("add", norm(b.op("mm", b.op("mm", x, w), w)), beside))])
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape, np.float32) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH))]
    generated = check(program, inputs, num_blocks=3, order="reverse")
    assert len(groups(generated)) == len(generated.schedule.stages) == 3, str(generated.schedule)
