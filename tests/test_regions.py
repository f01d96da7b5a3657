"""Block regions and panels: what a launch with few blocks or large operands must not get wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close
from harness import bits, check, check_statistics, emulate
from region_programs import SHAPES, RandomStep, product, random_inputs, random_step, region_step, tf32

import trainkernel as tk
import trainkernel.numpy as tnp
from trainkernel import emulator, reference
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.ir import Program, TensorSpec
from trainkernel.product_plans import ProductPlan
from trainkernel.runtime import nvrtc
from trainkernel.target import Target


def test_a_block_takes_one_panel_after_another() -> None:
    """A plain product from registers has no barrier of its own between its last read and the next fill."""
    b = ProgramBuilder()
    program = b.build([b.op("mm", b.input("x", (13, 9)), b.input("w", (9, 31)))])
    for num_blocks in (1, 2):
        generated = check(
            program, random_inputs(program), num_blocks=num_blocks, order=1, region_pieces=0, gemm_tile_n=64
        )
        plan = generated.schedule.tasks[0].plan
        assert isinstance(plan, ProductPlan) and plan.path == "panel" and plan.num_pieces > 1


def _step(rows: int, width: int, dtype: str) -> Program:
    """A layer with an epilogue, its weights cast first where they are not float32, and its gradient."""
    b = ProgramBuilder()
    x, w, bias = b.input("x", (rows, width)), b.input("w", (width, width), dtype), b.input("bias", (width,))
    h = b.op("tanh", b.op("addmm", bias, x, b.op("cast", w, dtype="float32") if dtype != "float32" else w))
    return b.build([b.op("mm", x.T, h), b.op("sum", h, dims=(0,))])


@pytest.mark.parametrize("target", ["sm_90a", "portable"])
@pytest.mark.parametrize("threads", [None, 128, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_region_fits_into_shared_memory(target: str, threads: int | None, dtype: str) -> None:
    """A region whose products need more scratch than a block has is none; fusion decides nothing about it."""
    cut = []
    for rows, width, pieces in ((4, 32, 1), (64, 32, 8), (4, 300, 1), (4, 300, 2), (256, 300, 1), (4, 1024, 2)):
        program = _step(rows, width, dtype)
        for fuse in (True, False):
            generated = generate(
                program,
                target=target,
                region_pieces=pieces,
                threads_per_block=threads,
                fuse_pointwise=fuse,
                fuse_epilogues=fuse,
            )
            assert generated.shared_bytes <= Target.preset(target).shared_bytes_per_block
            cut.append(any(task.region is not None for stage in generated.schedule.stages for task in stage.tasks))
    assert cut[0::2] == cut[1::2]
    assert cut[0] and (cut[2] or dtype != "float32")


def test_tables_of_copies_beyond_constant_memory() -> None:
    """Rows that are not whole runs of four elements take one entry each; some kernels have more than 64 KB of them."""
    b = ProgramBuilder()
    h = b.input("x", (16, 300))
    for number in range(5):
        h = b.op("tanh", b.op("mm", h, b.input(f"v{number}", (300, 65))))
        h = b.op("mm", h, b.input(f"w{number}", (300, 65)).T)
        h = b.op("sub", h, b.op("sum", h, dims=(0,)))
    program = b.build([h])
    generated = check(program, random_inputs(program), region_pieces=2, target="sm_90a", max_unknown=1.0)
    assert "__constant__ TkCopy" in generated.source and "__device__ const TkCopy" in generated.source
    assert nvrtc.compile_cubin(generated.source, "sm_90a")


# ---------------------------------------------------------------------------- tensor cores


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("batch", "layers", "pieces"), SHAPES)
def test_sixteen_bit_products_of_a_region(batch: int, layers: tuple[int, ...], pieces: int, dtype: str) -> None:
    """Every layout, ragged sizes, operands in place and evaluated; race-free and within the error bounds."""
    program = region_step(batch, layers, dtype)
    inputs = random_inputs(program)
    first = None
    for num_blocks, fuse in ((1, True), (3, True), (2, False)):
        generated = check(
            program, inputs, num_blocks=num_blocks, order=num_blocks, region_pieces=pieces, fuse_epilogues=fuse
        )
        assert "on tensor cores" in str(generated.schedule)
        outputs = [bits(output) for output in emulate(generated, inputs, num_blocks=num_blocks).outputs]
        first = first or outputs
        assert outputs == first


@pytest.mark.parametrize("pieces", [1, 4])
def test_tf32_rounds_operands_to_11_bits(pieces: int) -> None:
    """The default keeps all 24."""
    program = product(256, 48, 32)
    inputs = random_inputs(program)
    exact, short = inputs[0].astype(np.float64) @ inputs[1], tf32(inputs[0]) @ tf32(inputs[1])
    for precision, want, other in (("tf32", short, exact), ("highest", exact, short), (None, exact, short)):
        generated = generate(program, region_pieces=pieces, precision=precision, target="sm_90a")
        (found,) = emulate(generated, inputs, num_blocks=2, order=1).outputs
        assert ("on tensor cores" in str(generated.schedule)) == (precision == "tf32")
        assert np.abs(found - want).max() < 2e-5 < 5e-4 < np.abs(found - other).max()


@pytest.mark.parametrize("bits_of_nan", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_tf32_keeps_every_nan(bits_of_nan: int) -> None:
    """Also one whose lower bits would carry into the sign, as a device computes them, or be cut off."""
    program = product(64, 48, 32)
    inputs = random_inputs(program)
    inputs[0].view(np.uint32)[3, 5] = bits_of_nan
    inputs[1][2, 7] = np.inf
    generated = generate(program, region_pieces=1, precision="tf32", target="sm_90a")
    assert "on tensor cores" in str(generated.schedule)
    (found,) = emulate(generated, inputs, order=1).outputs
    nan = np.isnan(found)
    assert nan[3].all() and not np.delete(nan, 3, 0).any()
    assert np.isinf(np.delete(found[:, 7], 3)).all()


@pytest.mark.parametrize("width", [401, 402])
def test_the_last_columns_of_a_streamed_operand(width: int) -> None:
    """An odd number of columns has no whole pairs, though every step but the last has."""
    program = product(24, width, 128)
    inputs = random_inputs(program)
    generated = generate(program, region_pieces=1, precision="tf32", target="sm_90a", threads_per_block=128)
    assert "tile + 1 <" in generated.source and ("tk_tensor_product<" in generated.source) == (width % 2 == 0)
    (found,) = emulate(generated, inputs).outputs
    assert np.abs(found - tf32(inputs[0]) @ tf32(inputs[1])).max() < 2e-5


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_sums_of_tensor_cores_fit_whatever_follows_them(activation: str) -> None:
    """Sums that are too many for shared memory go to an epilogue from registers, also to a long one."""
    b = ProgramBuilder()
    x, w = b.input("x", (512, 16), "bfloat16"), b.input("w", (16, 120), "bfloat16")
    h = b.op("mm", x, w, dtype="bfloat16")
    for _ in range(3):
        h = b.op(activation, h, dtype="bfloat16")
    program = b.build([h, b.op("mm", x.T, h, dtype="float32")])
    generated = check(program, random_inputs(program), region_pieces=1, target="sm_90a")
    assert "bfloat16 on tensor cores" in str(generated.schedule)
    assert generated.shared_bytes <= Target.preset("sm_90a").shared_bytes_per_block


def test_a_view_across_the_padding_of_a_slab() -> None:
    """Two rows of a cast for each row of the slab, whose own rows another product reads on tensor cores."""
    b = ProgramBuilder()
    x, w = b.input("x", (96, 32)), b.input("w", (32, 64))
    h = b.op("mm", x, w)
    apart = b.op("cast", TensorSpec.dense(h.buffer, (192, 32), "float32"), dtype="bfloat16")
    wide = b.op("mm", apart, b.input("w1", (32, 64), "bfloat16"), dtype="float32")
    outputs = [b.op("tanh", b.op("mm", h, b.input("w2", (64, 48)))), b.op("sum", wide, dims=(0,)), b.op("mm", x.T, h)]
    program = b.build(outputs)
    inputs = [np.round(array.astype(np.float32)).astype(array.dtype) for array in random_inputs(program)]
    generated = generate(program, region_pieces=6, precision="tf32", target="sm_90a", fuse_epilogues=False)
    (region,) = (task.region for stage in generated.schedule.stages for task in stage.tasks if task.region)
    assert region.shared.slabs["mm"].padding and "cast" in generated.schedule.inlined
    for found, expected in zip(emulate(generated, inputs).outputs, reference.run(program, inputs), strict=True):
        assert np.allclose(found, expected, atol=1e-6)


def test_a_column_of_a_slab_whose_rows_are_padded() -> None:
    """The only column of an operand of tensor cores has any stride, here one that is not aligned."""
    b = ProgramBuilder()
    x, w = b.input("x", (3, 208, 24), "float16"), b.input("w", (3, 1, 24), "float16")
    h = b.op("tanh", x)
    row = b.op("sin", b.op("bmm", w, h.mT)).reshape((3, 208))
    program = b.build([b.op("bmm", h.mT, TensorSpec.dense(row.buffer, (3, 208, 1), "float16"))])
    generated = check(program, random_inputs(program), num_blocks=2, region_pieces=3)
    assert str(generated.schedule).count("float16 on tensor cores") == 2


# ---------------------------------------------------------------------------- several pieces of a block


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_adds_up_its_pieces(dtype: str) -> None:
    """More pieces than multiprocessors: consecutive ones are one block's, and share a partial result."""
    program = region_step(48, (6, 16, 4), dtype)
    target = replace(Target.preset("sm_90a"), num_sms=4)
    generated = generate(program, target=target, region_pieces=12)
    (region,) = (task.region for stage in generated.schedule.stages for task in stage.tasks if task.region)
    assert (region.split.pieces, region.split.slices, region.split.partials) == (12, 3, 4)
    inputs, first = random_inputs(program), None
    for num_blocks in (1, 2, 4):
        result = emulate(generated, inputs, num_blocks=num_blocks, order=num_blocks)
        assert_close(result.outputs, program, inputs, "slices")
        outputs = [bits(output) for output in result.outputs]
        first = first or outputs
        assert outputs == first


@pytest.mark.parametrize("layers", [(40, 49, 17), (16, 32, 32, 3), (32, 64, 2)])
@pytest.mark.parametrize("shared_kib", [227, 24, 16])
def test_what_stays_near_a_block_over_its_pieces(layers: tuple[int, ...], shared_kib: int) -> None:
    """Weights rounded once, and partial results: as many as fit, with the same bits on any grid and whatever fits."""
    program = region_step(96, layers, "bfloat16")
    inputs, near, outputs = random_inputs(program), [], []
    for kib in (227, shared_kib):
        target = replace(Target.preset("sm_90a"), num_sms=3, shared_bytes_per_block=kib * 1024)
        generated = generate(program, target=target, region_pieces=6)
        assert generated.shared_bytes <= kib * 1024
        (region,) = (task.region for stage in generated.schedule.stages for task in stage.tasks if task.region)
        partials = {part.root.outputs[0].buffer for part in region.parts if part.root and "slices" in part.root.attrs}
        near.append((set(region.shared.rounded), set(region.shared.sums)))
        assert near[0][1] == partials and "w0" in {matrix.buffer for matrix in near[0][0]}
        for num_blocks in (1, 2, 3):
            found = emulate(generated, inputs, num_blocks=num_blocks, order=num_blocks).outputs
            outputs.append([bits(output) for output in found])
    assert all(found == outputs[0] for found in outputs)
    assert all(found <= wanted for found, wanted in zip(near[1], near[0], strict=True))
    assert near[1] != near[0] or shared_kib == 227


def test_a_relu_of_rounded_numbers_is_not_rounded_again() -> None:
    """The same numbers all the same, NaN, infinite and subnormal ones too."""
    b = ProgramBuilder()
    x, y = b.input("x", (64,), "bfloat16"), b.input("y", (64,))
    rounded = b.op("relu", b.op("add", x, x, dtype="bfloat16"), dtype="bfloat16")
    program = b.build([rounded, b.op("relu", y, dtype="bfloat16")])
    inputs = random_inputs(program)
    inputs[0].view(np.uint16)[:6] = [0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x0001, 0x8001]
    generated = generate(program)
    found = emulate(generated, inputs).outputs
    with np.errstate(over="ignore", invalid="ignore"):
        expected = reference.run(program, inputs)
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(right, np.float32))
    (first,), (second,) = (
        re.findall(rf"const float v_{spec.buffer} = (.*);", generated.source) for spec in program.outputs
    )
    assert "tk_round_bfloat16" not in first and "tk_round_bfloat16" in second


def test_weights_are_rounded_anew_in_each_step_of_a_loop() -> None:
    generator = np.random.default_rng(3)
    x, w = (generator.standard_normal(shape).astype(np.float32) for shape in ((48, 16), (16, 16)))

    def step(w: Any, _: Any) -> Any:
        def loss(w: Any) -> Any:
            return tnp.mean((x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32") ** 2)

        value, gradient = tk.value_and_grad(loss)(w)
        return w - 2.0 * gradient, value

    train = tk.jit(lambda w: tk.scan(step, w, None, length=3), device="reference")
    program = train.lower(w).program
    generated = generate(program, target=replace(Target.preset("sm_90a"), num_sms=2), region_pieces=6)
    assert "tk_round_" in generated.source and "3 for each block" in str(generated.schedule)
    inputs = [w, *train.lower(w).captured]
    for num_blocks in (1, 2):
        found = emulate(generated, inputs, num_blocks=num_blocks, order=num_blocks).outputs
        for result, expected in zip(found, reference.run(program, inputs), strict=True):
            assert np.allclose(result, expected, rtol=2e-2, atol=2e-3)
        assert found[1][2] < 0.9 * found[1][0]


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_every_reduction_adds_up_pieces(op: str) -> None:
    b = ProgramBuilder()
    x, w = b.input("x", (24, 8)), b.input("w", (8, 5))
    h = b.op("tanh", b.op("mm", x, w))
    program = b.build([b.op(op, h, dims=(0,)), b.op("mm", x.T, h)])
    generated = generate(program, target=replace(Target.preset("sm_90a"), num_sms=3), region_pieces=12)
    assert "4 for each block" in str(generated.schedule)
    inputs = random_inputs(program)
    assert_close(emulate(generated, inputs, num_blocks=2, order=1).outputs, program, inputs, op)


# ---------------------------------------------------------------------------- random steps


def _check_step(step: RandomStep, fused: GeneratedKernel, apart: GeneratedKernel) -> None:
    """Right, within the target's shared memory, and the same bits on any grid, in any order, fused or not."""
    assert fused.shared_bytes <= fused.target.shared_bytes_per_block
    first = emulate(fused, step.inputs, num_blocks=2, order=1)
    check_statistics(fused, first.counters)
    if step.options["precision"] != "tf32":
        assert_close(first.outputs, step.program, step.inputs, step.name)
    for found, expected in zip(first.outputs, reference.run(step.program, step.inputs), strict=True):
        # On average: what is rounded to 11 bits may fall on the other side of a relu's edge.
        wide = np.asarray(expected, np.float32)
        assert np.abs(np.asarray(found, np.float32) - wide).mean() <= 0.01 * np.abs(wide).max()
    for generated, num_blocks, order in ((fused, 1, "reverse"), (apart, 3, "forward")):
        again = emulate(generated, step.inputs, num_blocks=num_blocks, order=order)
        assert [bits(array) for array in again.outputs] == [bits(array) for array in first.outputs]


@pytest.mark.parametrize("chunk", range(3))
def test_random_steps(chunk: int) -> None:
    """One run of the compiler serves a chunk of seeds; all their failures are reported together."""
    steps = [random_step(seed) for seed in range(chunk * 8, chunk * 8 + 8)]
    switches = {"fuse_pointwise": False, "fuse_epilogues": False, "inline_input_casts": False}
    kernels = [[generate(step.program, **step.options, **more) for more in ({}, switches)] for step in steps]
    emulator.prepare([generated for pair in kernels for generated in pair], check_races=True)
    failures = []
    for step, (fused, apart) in zip(steps, kernels, strict=True):
        try:
            _check_step(step, fused, apart)
        except Exception as error:
            failures.append(f"{step.name}, {step.options}: {type(error).__name__}: {error}")
    assert not failures, "\n\n".join(failures)
