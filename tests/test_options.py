"""Schedule rows and tuning options: barriers, grids, reduction and product paths, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from harness import bits, check, emulate
from numpy.typing import NDArray

import trainkernel as tk
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.dtypes import DTYPES
from trainkernel.errors import OptionError, ProgramError
from trainkernel.ir import Operation, Program, ScalarSpec, TensorSpec
from trainkernel.target import Target

OFF: dict[str, Any] = {"fuse_pointwise": False, "fuse_epilogues": False, "inline_input_casts": False}


def inputs_of(program: Program) -> list[Any]:
    rng = np.random.default_rng(5)
    return [
        0.25 if isinstance(spec, ScalarSpec) else rng.standard_normal(spec.shape).astype(DTYPES[spec.dtype].numpy)
        for spec in program.inputs
    ]


def product(m: int, k: int, n: int, dtype: str = "float32", other: str | None = None) -> Program:
    b = ProgramBuilder()
    return b.build([b.op("mm", b.input("x", (m, k), dtype), b.input("w", (k, n), other or dtype), dtype="float32")])


def plans(generated: GeneratedKernel) -> list[Any]:
    """Plans of products and reductions, in stage order."""
    return [task.plan for task in generated.schedule.tasks if task.plan is not None]


# ---------------------------------------------------------------------------- barriers


def test_independent_tasks_share_a_stage() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (33, 20)), b.input("w", (20, 9))
    program = b.build([b.op("exp", x), b.op("mm", x, w), b.op("sum", w, dims=(0,)), b.op("max", x)])
    assert check(program, inputs_of(program), num_blocks=4, **OFF).grid_barriers == 0


def test_a_barrier_for_each_dependency() -> None:
    b = ProgramBuilder()
    x = b.input("x", (33, 20))
    centred = b.op("sub", x, b.op("mean", x, dims=(0,)))
    program = b.build([b.op("mm", centred, centred.T), b.op("sum", centred)])
    generated = check(program, inputs_of(program), num_blocks=4, region_pieces=0, **OFF)
    assert generated.grid_barriers == 2
    counted = emulate(generated, inputs_of(program), num_blocks=4).counters.grid_barriers
    assert counted == generated.grid_barriers
    assert generate(program, region_pieces=1, **OFF).grid_barriers == 0


def test_write_after_read_of_state_needs_a_barrier() -> None:
    b = ProgramBuilder()
    w, g = b.input("w", (40, 40)), b.input("g", (40, 40))
    program = b.build([b.op("sub", w, g), b.op("mm", w, g)])
    assert check(program, inputs_of(program), num_blocks=4).grid_barriers == 0
    generated = check(program, inputs_of(program), num_blocks=4, inplace_outputs={0: 0})
    assert generated.grid_barriers == 1 and generated.direct_state_commits == 1


def test_recycled_arena_space_needs_a_barrier() -> None:
    """Space taken over in the next stage was read in this one: the race detector sees a lost barrier."""
    b = ProgramBuilder()
    x = b.input("x", (1000,))
    value = x
    for step in range(5):
        value = b.op("add", value, b.op("sum", value)) if step % 2 else b.op("mul", value, 0.5)
    program = b.build([value])
    for order in ("forward", "reverse", 5):
        check(program, inputs_of(program), num_blocks=4, order=order, **OFF)


# ---------------------------------------------------------------------------- grids


def mixed() -> Program:
    b = ProgramBuilder()
    x, w, v = b.input("x", (70, 33)), b.input("w", (33, 65)), b.input("v", (1, 200))
    h = b.op("tanh", b.op("mm", x, w))
    largest, total = b.multi("softmax_stats", h, dims=(1,), shape=(70, 1))
    weights = b.op("div", b.op("exp", b.op("sub", h, largest)), total)
    line = b.op("mm", v, b.input("u", (200, 33)))
    return b.build([weights, b.op("sum", weights, dims=(0,)), b.op("add", line, b.op("mean", x, dims=(0,)))])


@pytest.mark.parametrize("options", [{}, OFF, {"threads_per_block": 1024}, {"threads_per_block": 128}], ids=str)
def test_any_grid_gives_the_same_bits(options: dict[str, Any]) -> None:
    program = mixed()
    generated = generate(program, **options)
    found = set()
    for num_blocks in (1, 2, 3, 5, 8, 17, generated.max_work_blocks):
        result = emulate(generated, inputs_of(program), num_blocks=num_blocks, order=num_blocks)
        found.add(tuple(bits(output) for output in result.outputs))
        assert_close(result.outputs, program, inputs_of(program))
        if num_blocks > 1:
            assert result.counters.grid_barriers == generated.grid_barriers
    assert len(found) == 1


def test_max_work_blocks_is_what_a_task_can_use() -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (90, 70)), b.input("w", (70, 90))
    specs = [b.op("exp", x), x.T, b.op("sum", x, dims=(1,)), b.op("sum", x, dims=(0,)), b.op("mm", x, w)]
    for spec in specs:
        program = b.build([spec])
        generated = generate(program)
        result = emulate(generated, inputs_of(program), num_blocks=generated.max_work_blocks + 2)
        assert result.counters.task_blocks is not None
        assert max(result.counters.task_blocks) == generated.max_work_blocks


def test_one_block_uses_the_block_barrier() -> None:
    generated = generate(mixed())
    assert generated.grid_barriers >= 1
    result = emulate(generated, inputs_of(mixed()), num_blocks=1)
    assert result.counters.block_barriers >= generated.grid_barriers


def test_bounds_of_the_grid_are_kept_for_the_launch() -> None:
    generated = generate(mixed(), max_blocks=3, blocks_per_sm=2)
    assert generated.max_blocks == 3 and generated.blocks_per_sm == 2
    default = generate(mixed())
    assert default.max_blocks is None and 1 <= default.blocks_per_sm <= 8


# ---------------------------------------------------------------------------- reductions


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("shape", [(131_073,), (1_000_000,), (2, 131_073), (50_000, 3)])
def test_big_reductions_have_two_ordered_phases(op: str, shape: tuple[int, ...]) -> None:
    """Small integers add up exactly in float32, whatever the order: the result must be exact."""
    b = ProgramBuilder()
    dims = (0,) if len(shape) == 1 or shape[0] > shape[1] else (1,)
    program = b.build([b.op(op, b.input("x", shape), dims=dims)])
    inputs: list[NDArray[Any]] = [np.random.default_rng(1).integers(-2, 4, shape).astype(np.float32)]
    generated = generate(program)
    assert 1 < plans(generated)[0].partials <= 256
    partials = plans(generated)[0]
    assert partials.partials * partials.chunk >= partials.count > (partials.partials - 1) * partials.chunk
    found = set()
    for num_blocks, races in ((4, inputs[0].size < 200_000), (7, False)):
        result = emulate(generated, inputs, num_blocks=num_blocks, order=num_blocks, check_races=races)
        found.add(bits(result.outputs[0]))
        exact = inputs[0].astype(np.float64)
        want = getattr(np, op)(exact, axis=dims)
        assert np.array_equal(result.outputs[0], np.asarray(want, np.float32))
    assert len(found) == 1


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 127, 128, 129, 4096, 4097])
@pytest.mark.parametrize("rows", [1, 7, 8, 300])
def test_every_reduction_path(rows: int, count: int) -> None:
    if rows * count > 100_000:
        pytest.skip("too many elements for the emulator")
    b = ProgramBuilder()
    x, y = b.input("x", (rows, count)), b.input("y", (count, rows))
    program = b.build(
        [b.op("sum", x, dims=(1,)), b.op("mean", y, dims=(0,)), *b.multi("softmax_stats", x, dims=(1,)), b.op("max", y)]
    )
    check(program, inputs_of(program), num_blocks=3, order=count)


def test_small_rows_do_not_take_a_block_each() -> None:
    b = ProgramBuilder()
    program = b.build([b.op("sum", b.input("x", (64, 128)), dims=(1,))])
    generated = check(program, inputs_of(program))
    assert plans(generated)[0].path in ("thread", "warp") and generated.max_work_blocks <= 16
    b = ProgramBuilder()
    program = b.build([b.op("sum", b.input("x", (64, 1000)), dims=(1,))])
    assert generate(program).max_work_blocks == 64


# ---------------------------------------------------------------------------- products

PATHS = [
    ((1, 64, 40), "float32", "gemv"),
    ((1, 1000, 3), "bfloat16", "gemv"),
    ((1, 63, 40), "float32", "thin"),
    ((40, 8, 33), "float32", "thin"),
    ((4, 100, 33), "bfloat16", "thin"),
    ((40, 9, 33), "float32", "panel"),
    ((5, 9, 2), "float32", "panel"),
    ((40, 9, 33), "bfloat16", "tensor"),
    ((40, 9, 33), "float16", "tensor"),
    ((16, 16, 16), "float16", "tensor"),
    ((130, 70, 100), "bfloat16", "tensor"),
    ((130, 70, 100), "float32", "panel"),
]


@pytest.mark.parametrize(("size", "dtype", "path"), PATHS)
def test_product_paths(size: tuple[int, int, int], dtype: str, path: str) -> None:
    program = product(*size, dtype)
    generated = check(program, inputs_of(program), num_blocks=3, order=1)
    assert plans(generated)[0].path == path
    assert generated.tensor_core_operations == (path == "tensor")


def test_mixed_operands_do_not_use_tensor_cores() -> None:
    for dtype, other in (("float16", "bfloat16"), ("bfloat16", "float32")):
        program = product(40, 33, 40, dtype, other)
        generated = check(program, inputs_of(program))
        assert plans(generated)[0].path == "panel" and generated.tensor_core_operations == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("gemm_k_tile", [16, 32])
@pytest.mark.parametrize("gemm_tile_n", [32, 64])
@pytest.mark.parametrize("shared_skew", [0, 16])
def test_tile_options_are_obeyed(dtype: str, gemm_k_tile: int, gemm_tile_n: int, shared_skew: int) -> None:
    options = {"gemm_k_tile": gemm_k_tile, "gemm_tile_n": gemm_tile_n, "shared_skew": shared_skew}
    b = ProgramBuilder()
    x, w = b.input("x", (37, 75), dtype), b.input("w", (75, 70), dtype)
    y, v = b.input("y", (75, 37), dtype), b.input("v", (70, 75), dtype)
    program = b.build([b.op("mm", x, w), b.op("mm", y.T, v.T), b.op("mm", x, v.T), b.op("mm", y.T, w)])
    generated = check(program, inputs_of(program), num_blocks=3, **options)
    for plan in plans(generated):
        assert (plan.tile_k, plan.tile_n, plan.skew_bytes) == (gemm_k_tile, gemm_tile_n, shared_skew)


@pytest.mark.parametrize("m", [5, 9, 16, 17, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_products(m: int, dtype: str) -> None:
    for k, n in ((9, 17), (33, 65), (64, 31)):
        program = product(m, k, n, dtype)
        check(program, inputs_of(program), num_blocks=3, order=m)


def test_deep_products_split_their_depth_in_order() -> None:
    for dtype in ("float32", "bfloat16"):
        program = product(20, 3000, 24, dtype)
        generated = generate(program)
        found = {
            bits(emulate(generated, inputs_of(program), num_blocks=blocks, order=blocks).outputs[0])
            for blocks in (1, 3, 6)
        }
        assert len(found) == 1
        check(program, inputs_of(program))


def test_split_k_gemv() -> None:
    for flag, path in ((True, "gemv"), (False, "thin")):
        generated = check(product(1, 300, 40), inputs_of(product(1, 300, 40)), split_k_gemv=flag)
        assert plans(generated)[0].path == path
    # Nothing to apply to: accepted.
    check(product(40, 30, 40), inputs_of(product(40, 30, 40)), split_k_gemv=True)


def test_integers_in_float16_products_are_exact() -> None:
    """Sums of small integers are exact on tensor cores too: any error is an indexing error."""
    rng = np.random.default_rng(2)
    for dtype in ("float16", "bfloat16", "float32"):
        for m, k, n in ((33, 70, 65), (16, 16, 16), (1, 129, 7), (3, 50, 9), (70, 7, 40)):
            program = product(m, k, n, dtype)
            a, b = (rng.integers(-4, 5, shape).astype(DTYPES[dtype].numpy) for shape in ((m, k), (k, n)))
            (result,) = emulate(generate(program), [a, b]).outputs
            assert np.array_equal(result, a.astype(np.float64) @ b.astype(np.float64))


# ---------------------------------------------------------------------------- threads per block


@pytest.mark.parametrize("threads", [128, 256, 512, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_per_block(threads: int, dtype: str) -> None:
    b = ProgramBuilder()
    x, w, v = b.input("x", (40, 70), dtype), b.input("w", (70, 33), dtype), b.input("v", (1, 70), dtype)
    h = b.op("mm", x, w, dtype="float32")
    outputs = [b.op("relu", h), *b.multi("softmax_stats", h, dims=(1,)), b.op("sum", h, dims=(0,))]
    outputs += [
        b.op("mm", v, w),
        b.op("mm", TensorSpec("x", (40, 5), (70, 1), 0, dtype), TensorSpec("w", (5, 33), (33, 1), 0, dtype)),
    ]
    program = b.build([*outputs, b.op("sum", b.input("long", (9000,)))])
    generated = check(program, inputs_of(program), num_blocks=3, threads_per_block=threads)
    assert generated.threads_per_block == threads
    assert f"__launch_bounds__({threads}" in generated.source


# ---------------------------------------------------------------------------- refusals

BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("blocks_per_sm", 0, "1, 2, 3, 4, 5, 6, 7, 8"),
    ("blocks_per_sm", 9, "1, 2, 3, 4, 5, 6, 7, 8"),
    ("blocks_per_sm", 2.0, "int"),
    ("blocks_per_sm", True, "int"),
    ("max_blocks", 0, "1"),
    ("max_blocks", -3, "1"),
    ("max_blocks", "4", "int"),
    ("max_blocks", True, "int"),
    ("gemm_k_tile", 8, "16, 32"),
    ("gemm_k_tile", True, "int"),
    ("gemm_tile_n", 48, "32, 64"),
    ("gemm_tile_n", 32.0, "int"),
    ("shared_skew", 8, "0, 16"),
    ("shared_skew", False, "int"),
    ("threads_per_block", 64, "128, 256, 512, 1024"),
    ("threads_per_block", 2048, "128, 256, 512, 1024"),
    ("threads_per_block", None.__class__, "int"),
    ("precision", "high", "highest, tf32"),
    ("precision", True, "highest, tf32"),
    ("fuse_pointwise", 1, "True"),
    ("fuse_epilogues", "yes", "True"),
    ("split_k_gemv", 0, "True"),
    ("inline_input_casts", 1.0, "True"),
    ("target", 90, "preset"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_OPTIONS, ids=[f"{n}={v!r}" for n, v, _ in BAD_OPTIONS])
def test_refused(name: str, value: Any, message: str) -> None:
    for refuse in (generate, _compiled):
        with pytest.raises(OptionError) as caught:
            refuse(mixed(), **{name: value})
        assert isinstance(caught.value, ValueError)
        assert name in str(caught.value) and message in str(caught.value)


def _compiled(program: Program, **options: Any) -> None:
    tk.compile(program, device="reference", **options)


def test_all_options_at_their_defaults() -> None:
    names: tuple[str, ...] = (
        "blocks_per_sm",
        "fuse_pointwise",
        "max_blocks",
        "fuse_epilogues",
        "gemm_k_tile",
        "gemm_tile_n",
    )
    names += ("shared_skew", "split_k_gemv", "threads_per_block", "inline_input_casts", "inplace_outputs")
    given = generate(mixed(), target=Target.preset("portable"), **dict.fromkeys(names))
    assert given.source == generate(mixed()).source


@pytest.mark.parametrize("target", ["portable", "sm_80", "sm_90a", "sm_120"])
def test_every_target(target: str) -> None:
    program = mixed()
    check(program, inputs_of(program), num_blocks=4, target=Target.preset(target))


def test_invalid_programs_are_refused_with_the_operation() -> None:
    x = TensorSpec.dense("x", (3,))
    bad = Program((x,), (Operation("culprit", "conv", (x,), TensorSpec.dense("y", (3,))),), ())
    with pytest.raises(ProgramError, match="culprit"):
        generate(bad)


def test_options_are_validated_on_the_reference_and_have_no_effect() -> None:
    program = product(5, 6, 7)
    inputs = inputs_of(program)
    plain = tk.compile(program, device="reference")(*inputs)[0]
    tuned = tk.compile(program, device="reference", gemm_k_tile=16, max_blocks=1, fuse_pointwise=False)(*inputs)[0]
    assert bits(plain) == bits(tuned)


# ---------------------------------------------------------------------------- text


@pytest.mark.parametrize("name", ["two\nlines", "*/ int evil; /*", 'quo"te', "größe \u2028", "\\", "%s{}", "\0"])
def test_free_text_cannot_change_the_source(name: str) -> None:
    def program(label: str) -> Program:
        x, y, _z = (TensorSpec.dense(buffer, (40,)) for buffer in ("x", "y", "z"))
        first = Operation(label, "exp", (x,), y, location=f"{label}.py:1")
        return Program(
            (x,), (first, Operation(label, "sum", (y,), TensorSpec.dense("s", ()))), (y, TensorSpec.dense("s", ()))
        )

    generated = check(program(name), inputs_of(program(name)))
    assert generated.source.isascii()
    plain = emulate(generate(program("plain")), inputs_of(program("plain"))).outputs
    named = emulate(generated, inputs_of(program(name))).outputs
    assert [bits(output) for output in plain] == [bits(output) for output in named]


def test_buffer_names_that_are_words_of_c() -> None:
    b = ProgramBuilder()
    names = ["int", "float", "p", "threadIdx", "template", "exp", "tk_load", "TkParams", "__global__", "i", "printf"]
    inputs = [b.input(name, (5,)) for name in names]
    total = inputs[0]
    for spec in inputs[1:]:
        total = b.op("add", total, spec, name="return")
    program = b.build([total])
    check(program, inputs_of(program), **OFF)
    check(program, inputs_of(program))


def test_the_location_does_not_change_the_source() -> None:
    x, y = TensorSpec.dense("x", (40,)), TensorSpec.dense("y", (40,))
    here = Program((x,), (Operation("o", "exp", (x,), y, location="a.py:1"),), (y,))
    there = Program((x,), (Operation("o", "exp", (x,), y, location="b.py:2"),), (y,))
    assert generate(here).source == generate(there).source


# ---------------------------------------------------------------------------- many tensors


@pytest.mark.parametrize("num_inputs", [478, 479, 480, 600])
def test_more_tensors_than_fit_the_parameter_block(num_inputs: int) -> None:
    b = ProgramBuilder()
    specs = [b.input(f"x{index}", (3,)) for index in range(num_inputs)]
    rate, steps = b.scalar("rate"), b.scalar("shift")
    picked = [specs[0], specs[num_inputs // 2], specs[-1]]
    total = b.op("add", b.op("mul", picked[0], rate), steps)
    for spec in picked[1:]:
        total = b.op("sub", total, spec)
    program = b.build([total, specs[1]])
    generated = check(program, inputs_of(program), inplace_outputs={0: num_inputs - 1})
    assert generated.uses_tensor_table == (len(generated.slots) > 480)
    assert generated.params_bytes <= 4096
