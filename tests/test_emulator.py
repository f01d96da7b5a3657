"""The emulator, on kernels written by hand: what each builtin does, and how it is built."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator_support import (
    CHUNKS,
    F32,
    ORDERS,
    make_kernel,
    needs_compiler,
    normal,
    run_kernel,
    two_stages,
)

from trainkernel import emulator
from trainkernel.emulator import compiler
from trainkernel.errors import CompileError, EmulatorError, OptionError, RaceError
from trainkernel.runtime.cache import CubinCache

pytestmark = needs_compiler


# ---- A two-stage program on any grid ----


@pytest.mark.parametrize("check_races", [False, True])
def test_two_stages_give_the_same_bits_on_any_grid_in_any_order(check_races: bool) -> None:
    kernel, inputs = two_stages()
    first = emulator.emulate(kernel, inputs, check_races=check_races)
    np.testing.assert_allclose(first.outputs[0], inputs[0] * 2 + inputs[0].sum(), rtol=1e-4, atol=1e-3)
    for num_blocks in (1, 2, 3, 5):
        for order in ORDERS:
            again = emulator.emulate(kernel, inputs, check_races=check_races, num_blocks=num_blocks, order=order)
            np.testing.assert_array_equal(again.outputs[0], first.outputs[0])
            assert again.counters.grid_barriers == 1


def test_counters() -> None:
    kernel, inputs = two_stages()
    counters = emulator.emulate(kernel, inputs, num_blocks=3, check_races=True).counters
    # Two per chunk, and two in each block's grid barrier.
    assert counters.block_barriers == 2 * CHUNKS + 2 * 3
    assert counters.task_blocks == (3, 3)
    assert counters.arena_touched_bytes == 4 * CHUNKS
    # A block without a piece of the task does not count.
    few, inputs = two_stages(n=16 * 16)
    assert emulator.emulate(few, inputs, num_blocks=20, check_races=True).counters.task_blocks == (16, 20)
    assert emulator.emulate(few, inputs, num_blocks=2).counters.task_blocks is None


def test_default_grid_is_small_and_bounded() -> None:
    kernel, inputs = two_stages()
    for bounds, blocks in (({}, 4), ({"max_work_blocks": 3}, 3), ({"max_blocks": 2}, 2)):
        result = emulator.emulate(dataclasses.replace(kernel, **bounds), inputs, check_races=True)
        assert result.counters.block_barriers == 2 * CHUNKS + 2 * blocks


# ---- Warp operations ----


def test_shuffles() -> None:
    body = """
    y[thread] = __shfl_xor_sync(0xffffffffu, x[thread], 5);
    y[64 + thread] = __shfl_down_sync(0xffffffffu, x[thread], 3);
    y[128 + thread] = __shfl_sync(0xffffffffu, x[thread], 7);
    y[192 + thread] = __shfl_down_sync(0xffffffffu, x[thread], 3, 8);
    y[256 + thread] = (float)__shfl_xor_sync(0xffffffffu, -thread, 1);
    y[320 + thread] = (float)__shfl_sync(0xffffffffu, 3000000000u + thread, 2);
    """
    x = normal(64)
    lane = np.arange(64) % 32
    warp = np.arange(64) - lane
    for order in ORDERS:
        y = run_kernel(body, [("x", x)], [("y", (6, 64), F32)], order=order, num_blocks=1).outputs[0]
        np.testing.assert_array_equal(y[0], x[warp + (lane ^ 5)])
        np.testing.assert_array_equal(y[1], x[warp + np.where(lane + 3 < 32, lane + 3, lane)])
        np.testing.assert_array_equal(y[2], x[warp + 7])
        np.testing.assert_array_equal(y[3], x[warp + np.where(lane % 8 + 3 < 8, lane + 3, lane)])
        np.testing.assert_array_equal(y[4], -(np.arange(64) ^ 1).astype(F32))
        np.testing.assert_array_equal(y[5], (3000000000 + warp + 2).astype(F32))


MMA = """
    TK_TASK(0, 0);
    TK_DYNAMIC_SHARED(shared);
    unsigned short* sa = (unsigned short*)shared;           // [16][16]
    unsigned short* sb = (unsigned short*)shared + 16 * 16;  // [16][8]: k rows
    for (int i = thread; i < 16 * 16; i += 32) sa[i] = a[i];
    for (int i = thread; i < 16 * 8; i += 32) sb[i] = b[i];
    __syncwarp(); /* stored */
    unsigned ra[4], rb[2];
    tk_ldmatrix_x4(ra, sa + thread % 16 * 16 + thread / 16 * 8);
    tk_ldmatrix_x2_trans(rb, sb + thread % 16 * 8);
    float d[4];
    for (int i = 0; i < 4; i++) d[i] = c[(thread / 4 + i / 2 * 8) * 8 + thread % 4 * 2 + i % 2];
    tk_mma_m16n8k16_TYPE(d, ra, rb);
    for (int i = 0; i < 4; i++) y[(thread / 4 + i / 2 * 8) * 8 + thread % 4 * 2 + i % 2] = d[i];
"""


@pytest.mark.parametrize(("name", "dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_mma_and_ldmatrix(name: str, dtype: Any) -> None:
    a, b, c = normal(16, 16).astype(dtype), normal(16, 8, seed=1).astype(dtype), normal(16, 8, seed=2)
    inputs: Any = [("a", a), ("b", b), ("c", c)]
    options: Any = {"threads": 32, "shared_bytes": 1024, "num_blocks": 1}
    body = MMA.replace("TYPE", name)
    expected = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(F32)
    for order in ORDERS:
        result = run_kernel(body, inputs, [("y", (16, 8), F32)], **options, order=order, check_races=True)
        np.testing.assert_array_equal(result.outputs[0], expected)
    with pytest.raises(RaceError, match="shared memory"):
        run_kernel(
            body.replace("__syncwarp(); /* stored */", ""), inputs, [("y", (16, 8), F32)], **options, check_races=True
        )


MMA_TF32 = """
    TK_TASK(0, 0);
    const int row = thread / 4, quad = thread % 4;
    unsigned ra[4], rb[2];
    for (int i = 0; i < 4; i++) ra[i] = __float_as_uint(a[(row + i % 2 * 8) * 8 + quad + i / 2 * 4]);
    for (int i = 0; i < 2; i++) rb[i] = __float_as_uint(b[(quad + i * 4) * 8 + row]);
    float d[4];
    for (int i = 0; i < 4; i++) d[i] = c[(row + i / 2 * 8) * 8 + quad * 2 + i % 2];
    tk_mma_m16n8k8_tf32(d, ra, rb);
    for (int i = 0; i < 4; i++) y[(row + i / 2 * 8) * 8 + quad * 2 + i % 2] = d[i];
"""


def test_mma_of_tf32_numbers() -> None:
    """The lower 13 bits of the operands do not count."""
    a, b, c = normal(16, 8), normal(8, 8, seed=1), normal(16, 8, seed=2)
    inputs: Any = [("a", a), ("b", b), ("c", c)]
    short_a, short_b = ((x.view(np.uint32) & 0xFFFFE000).view(F32).astype(np.float64) for x in (a, b))
    expected = (short_a @ short_b + c).astype(F32)
    for order in ORDERS:
        result = run_kernel(MMA_TF32, inputs, [("y", (16, 8), F32)], threads=32, num_blocks=1, order=order)
        np.testing.assert_array_equal(result.outputs[0], expected)


def test_ldmatrix_layouts() -> None:
    body = """
    TK_TASK(0, 0);
    TK_DYNAMIC_SHARED(shared);
    for (int i = thread; i < 256; i += 32) ((unsigned short*)shared)[i] = x[i];
    __syncwarp();
    unsigned r4[4], t4[4], r2[2];
    tk_ldmatrix_x4(r4, shared + thread * 16);
    tk_ldmatrix_x4_trans(t4, shared + thread * 16);
    tk_ldmatrix_x2(r2, thread < 16 ? shared + thread * 16 : nullptr);
    for (int m = 0; m < 4; m++) for (int i = 0; i < 2; i++) {
        y[((m * 32) + thread) * 2 + i] = r4[m] >> (16 * i);
        y[256 + ((m * 32) + thread) * 2 + i] = t4[m] >> (16 * i);
        if (m < 2) y[512 + ((m * 32) + thread) * 2 + i] = r2[m] >> (16 * i);
    }
    """
    x = np.arange(256, dtype=np.uint16).view(np.float16).reshape(4, 8, 8)
    result = run_kernel(
        body,
        [("x", x)],
        [("y", (640,), np.float16)],
        threads=32,
        shared_bytes=512,
        check_races=True,
        num_blocks=1,
    )
    y = result.outputs[0].view(np.uint16)
    matrices = x.view(np.uint16)
    np.testing.assert_array_equal(y[:256], matrices.ravel())
    np.testing.assert_array_equal(y[256:512].reshape(4, 64), matrices.transpose(0, 2, 1).reshape(4, 64))
    np.testing.assert_array_equal(y[512:], matrices[:2].ravel())


# ---- cp.async ----

CP_ASYNC = """
    TK_TASK(0, 0);
    TK_DYNAMIC_SHARED(shared);
    float* s = (float*)shared;
    tk_cp_async_16(s + thread * 4, x + thread * 4);
    tk_cp_async_commit();
    tk_cp_async_4(s + 256 + thread, x + 256 + thread);
    tk_cp_async_commit();
    tk_cp_async_wait<1>();
    float sum = s[thread * 4] + s[thread * 4 + 3];
    tk_cp_async_wait<0>();
    __syncthreads(); /* visible */
    y[thread] = sum + s[256 + 63 - thread];
"""


def test_cp_async_and_its_missing_waits() -> None:
    x = normal(320)
    arguments: Any = ([("x", x)], [("y", (64,), F32)])
    options: Any = {"shared_bytes": 1280, "num_blocks": 1}
    expected = x[:256:4] + x[3:256:4] + x[256:][::-1]
    result = run_kernel(CP_ASYNC, *arguments, **options, check_races=True)
    np.testing.assert_array_equal(result.outputs[0], expected)
    for broken in (CP_ASYNC.replace("tk_cp_async_wait<1>();", ""), CP_ASYNC.replace("_wait<0>", "_wait<1>")):
        with pytest.raises(EmulatorError, match=r"cp.async in flight at shared memory"):
            run_kernel(broken, *arguments, **options, check_races=True)
        assert np.isnan(run_kernel(broken, *arguments, **options).outputs[0]).all()
    with pytest.raises(RaceError, match="shared memory"):
        run_kernel(CP_ASYNC.replace("__syncthreads(); /* visible */", ""), *arguments, **options, check_races=True)
    with pytest.raises(EmulatorError, match="misaligned 16-byte"):
        run_kernel(CP_ASYNC.replace("s + thread * 4, x", "s + thread * 4 + 1, x"), *arguments, **options)


def test_what_is_not_inside_arrives_as_zeros_and_is_not_read() -> None:
    """Where the operand ends, and only after the wait."""
    x = normal(266)
    source = CP_ASYNC.replace("_16(", "_inside<16>(").replace("x + thread * 4)", "x + thread * 4, thread % 2)")
    source = source.replace("_4(", "_inside<4>(").replace("x + 256 + thread)", "x + 256 + thread, thread < 10)")
    arguments: Any = ([("x", x)], [("y", (64,), F32)])
    options: Any = {"shared_bytes": 1280, "num_blocks": 1}
    inside = np.append(x[256:], np.zeros(54, np.float32))
    expected = np.where(np.arange(64) % 2, x[:256:4] + x[3:256:4], np.float32(0)) + inside[::-1]
    np.testing.assert_array_equal(run_kernel(source, *arguments, **options, check_races=True).outputs[0], expected)
    for broken in (source.replace("tk_cp_async_wait<1>();", ""), source.replace("_wait<0>", "_wait<1>")):
        assert np.isnan(run_kernel(broken, *arguments, **options).outputs[0]).all()
    with pytest.raises(EmulatorError, match="out of bounds"):
        run_kernel(source.replace("thread < 10", "thread < 11"), *arguments, **options, check_races=True)


# ---- Clusters ----

CLUSTER = """
    TK_TASK(0, 0);
    TK_DYNAMIC_SHARED(shared);
    float* mine = (float*)shared;
    mine[thread] = x[block * 64 + thread];
    tk_cluster_barrier(); /* stored */
    unsigned next = (tk_cluster_rank() + 1) % tk_cluster_size();
    const float* theirs = (const float*)tk_cluster_map(mine, next);
    y[block * 64 + thread] = theirs[63 - thread];
    tk_cluster_barrier(); /* read */
"""


def test_cluster_barrier_and_distributed_shared_memory() -> None:
    x = normal(4, 64)
    arguments: Any = ([("x", x)], [("y", (4, 64), F32)])
    options: Any = {"shared_bytes": 256, "cluster_blocks": 2, "num_blocks": 4}
    for order in ORDERS:
        result = run_kernel(CLUSTER, *arguments, **options, order=order, check_races=True)
        np.testing.assert_array_equal(result.outputs[0], x[[1, 0, 3, 2], ::-1])
        stored = CLUSTER.replace("tk_cluster_barrier(); /* stored */", "__syncthreads();")
        with pytest.raises(RaceError, match="shared memory"):
            run_kernel(stored, *arguments, **options, order=order, check_races=True)
    with pytest.raises(EmulatorError, match="a block that has left the kernel"):
        run_kernel(CLUSTER.replace("tk_cluster_barrier(); /* read */", ""), *arguments, **options, check_races=True)
    with pytest.raises(OptionError, match="whole clusters"):
        run_kernel(CLUSTER, *arguments, **{**options, "num_blocks": 3})


# ---- Numbers ----

CONVERT = """
    for (int i = block * 256 + thread; i < N; i += gridDim.x * 256) {
        BODY
    }
"""


def convert(body: str, x: np.ndarray[Any, Any], out: Any) -> np.ndarray[Any, Any]:
    text = CONVERT.replace("N", str(x.size)).replace("BODY", body)
    result: np.ndarray[Any, Any] = run_kernel(text, [("x", x)], [("y", x.shape, out)], threads=256).outputs[0]
    return result


@pytest.mark.parametrize(("name", "dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_conversions(name: str, dtype: Any) -> None:
    patterns = np.arange(65536, dtype=np.uint16).view(dtype)
    widened = convert(f"y[i] = tk_{name}_bits_to_float(x[i]);", patterns, F32)
    expected = patterns.astype(F32)
    np.testing.assert_array_equal(widened, expected)  # NaN equals NaN here
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(widened[number]), np.signbit(expected[number]))

    # Every value, the midpoints between neighbours and the floats beside those, and random bits.
    finite = np.sort(expected[np.isfinite(expected)].astype(np.float64))
    ties = ((finite[1:] + finite[:-1]) / 2).astype(F32)
    random = np.random.default_rng(0).integers(0, 2**32, 50000, dtype=np.uint32).view(F32)
    top = finite[-1]
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, top, top * (1 + 2.0**-12), 3.4e38, 1e-45, -1e-45], F32)
    x = np.concatenate([ties, np.nextafter(ties, F32(np.inf)), np.nextafter(ties, F32(-np.inf)), random, edges])
    narrowed = convert(f"y[i] = tk_float_to_{name}_bits(x[i]);", x, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(dtype)
    nan = np.isnan(x)
    assert np.isnan(narrowed[nan].astype(F32)).all()
    np.testing.assert_array_equal(narrowed.view(np.uint16)[~nan], wanted.view(np.uint16)[~nan])


def test_arithmetic_rounds_once_and_keeps_denormals() -> None:
    # The product is not representable: a contraction would keep its lost bits.
    a = np.concatenate([normal(252), np.array([1e-30, 1e-40, 3e38, 1e-45], F32)])
    x = np.concatenate([a, a * F32(1e-9)])
    body = "y[i] = OP;"
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for op, expected in (
            ("x[i] * x[i] + x[i]", x * x + x),
            ("__fadd_rn(__fmul_rn(x[i], x[i]), x[i])", x * x + x),
            ("__fmaf_rn(x[i], x[i], x[i])", (x.astype(np.float64) ** 2 + x).astype(F32)),
            ("__fdiv_rn(1.0f, x[i])", 1 / x),
            ("__fsqrt_rn(fabsf(x[i]))", np.sqrt(np.abs(x))),
            ("x[i] * 0.5f", x * F32(0.5)),
        ):
            np.testing.assert_array_equal(convert(body.replace("OP", op), x, F32), expected, err_msg=op)
    # A double rounding would give 1.0 here.
    fused = convert("y[i] = __fmaf_rn(x[i], x[i], 1.0f);", np.full(1, 2.0**-12 * (1 + 2.0**-23), F32), F32)
    assert fused[0] == np.nextafter(F32(1), F32(2))


def test_fmax_and_fmin_as_cuda_has_them() -> None:
    x = np.array([np.nan, 1.0, -0.0, 0.0, 2.0, -1.0], F32)
    greater = convert("y[i] = fmaxf(x[i], i == 3 ? -0.0f : 0.0f);", x, F32)
    smaller = convert("y[i] = fminf(x[i], i == 3 ? -0.0f : 0.0f);", x, F32)
    np.testing.assert_array_equal(greater, np.array([0, 1, 0, 0, 2, 0], F32))
    np.testing.assert_array_equal(smaller, np.array([0, 0, 0, 0, 0, -1], F32))
    assert not np.signbit(greater[[2, 3]]).any()
    assert np.signbit(smaller[[2, 3]]).all()


def test_functions_and_vector_types() -> None:
    body = """
    float4 v = *(const float4*)(x + thread * 4);
    float2 w = __ldg((const float2*)(x + thread * 4));
    float last = powf(fabsf(v.w), 1.5f) + w.x - w.x;
    *(float4*)(y + thread * 4) = make_float4(expf(v.x), tanhf(v.y), logf(fabsf(v.z)), last);
    """
    x = normal(64, 4)
    y = run_kernel(body, [("x", x)], [("y", (64, 4), F32)], check_races=True, num_blocks=1).outputs[0]
    a = np.abs(x)
    expected = np.stack([np.exp(x[:, 0]), np.tanh(x[:, 1]), np.log(a[:, 2]), a[:, 3] ** 1.5], 1)
    np.testing.assert_allclose(y, expected, rtol=3e-6, atol=1e-6)


# ---- Parameters and memory ----


def test_table_of_tensors_scalars_and_empty_tensors() -> None:
    inputs: Any = [(f"x{i}", normal(64, seed=i)) for i in range(5)]
    inputs[2:2] = [("scale", 1.5), ("empty", np.zeros((0, 3), F32)), ("shift", -3)]
    body = "    TK_TASK(0, 0);\n    y[thread] = (x0[thread] + x4[thread]) * scale + (float)shift;\n"
    body += "    if (thread == 0) { z[0] = empty == nullptr ? 1.0f : 0.0f; }"
    for table in (False, True):
        result = run_kernel(
            body,
            inputs,
            [("y", (64,), F32), ("z", (1,), F32), ("none", (0,), F32)],
            table=table,
            check_races=True,
            num_blocks=1,
        )
        expected = (inputs[0][1] + inputs[-1][1]) * F32(1.5) - F32(3)
        np.testing.assert_array_equal(result.outputs[0], expected)
        assert result.outputs[1][0] == 1
        assert result.outputs[2].shape == (0,)


def test_strided_inputs_are_passed_as_they_are() -> None:
    base = normal(64, 3)
    x = base[:, 1]
    body = "    TK_TASK(0, 0);\n    y[thread] = x[thread * 3];"
    result = run_kernel(body, [("x", x)], [("y", (64,), F32)], check_races=True, num_blocks=1)
    np.testing.assert_array_equal(result.outputs[0], x)
    with pytest.raises(EmulatorError, match="past the end of 'x'"):
        run_kernel(body.replace("* 3", "* 3 + 1"), [("x", x)], [("y", (64,), F32)], check_races=True, num_blocks=1)


def test_one_array_given_twice() -> None:
    x = normal(64)
    body = "    TK_TASK(0, 0);\n    y[thread] = a[thread] + b[thread];"
    result = run_kernel(body, [("a", x), ("b", x)], [("y", (64,), F32)], check_races=True, num_blocks=1)
    np.testing.assert_array_equal(result.outputs[0], x + x)


def test_a_misaligned_array_is_copied_for_a_kernel_that_loads_vectors() -> None:
    body = "    TK_TASK(0, 0);\n    float4 v = ((float4*)s)[thread];\n    v.x += 1.0f;\n    ((float4*)s)[thread] = v;"
    raw = np.zeros(64 * 4 + 4, F32)
    start = next(i for i in range(4) if (raw.ctypes.data + 4 * i) % 16 == 4)
    state = raw[start : start + 256]
    kernel = make_kernel(body, [("s", state)], [("out", (256,), F32)], inplace_outputs={0: 0})
    kernel = dataclasses.replace(kernel, slots=tuple(dataclasses.replace(s, alignment_bytes=16) for s in kernel.slots))
    (out,) = emulator.emulate(kernel, [state], num_blocks=1, check_races=True).outputs
    assert out is state
    assert raw.sum() == 64 and (state[::4] == 1).all()


def test_constants_of_the_program_may_be_read() -> None:
    functions = "static const float tk_numbers[4] = {1.0f, 2.0f, 3.0f, 4.0f};"
    body = "    y[thread] = tk_numbers[(thread + (int)x[0]) % 4];"
    result = run_kernel(
        body, [("x", np.zeros(64, F32))], [("y", (64,), F32)], functions=functions, check_races=True, num_blocks=1
    )
    np.testing.assert_array_equal(result.outputs[0], np.arange(64) % 4 + 1)


# ---- Compiling ----


def test_many_programs_in_one_compile() -> None:
    bodies = [f"    TK_TASK(0, 0);\n    y[thread] = x[thread] * {i}.0f;" for i in range(1, 6)]
    x = normal(64)
    kernels = [make_kernel(body, [("x", x)], [("y", (64,), F32)]) for body in bodies]
    kernels.append(two_stages()[0])
    emulator.prepare(kernels, check_races=True)
    for i, kernel in enumerate(kernels[:-1], 1):
        (y,) = emulator.emulate(kernel, [x], check_races=True, num_blocks=1).outputs
        np.testing.assert_array_equal(y, x * F32(i))
    emulator.emulate(*two_stages(), check_races=True)


def test_a_refused_source_shows_what_the_compiler_says() -> None:
    with pytest.raises(CompileError, match=r"(?s)refused an emitted source.*no_such_function"):
        run_kernel("    y[thread] = no_such_function(x[thread]);", [("x", normal(64))], [("y", (64,), F32)])


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert emulator.find_compiler() is None
    assert not emulator.is_available()
    with pytest.raises(CompileError, match=r"apt-get install g\+\+|xcode-select"):
        emulator.compile_sources(["int x;"], check_races=False)


def test_an_unsafe_cache_directory_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path))
    assert compiler.cache_directory() == tmp_path / "emulator"
    for index, folder in enumerate(("", "emulator")):  # a writable parent lets others replace what is in it
        open_to_all = tmp_path / f"open{index}"
        (open_to_all / "emulator").mkdir(parents=True)
        (open_to_all / folder).chmod(0o777)
        monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(open_to_all))
        assert compiler.cache_directory() is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path / "file"))
    assert compiler.cache_directory() is None


def test_processes_share_an_empty_cache(tmp_path: Any) -> None:
    code = (
        "from trainkernel.emulator import compile_sources\n"
        "source = 'struct TkParams { int n; }; extern \"C\" void TRAINKERNEL_ENTRY(const TkParams) {}'\n"
        "print(len(compile_sources([source] * 2, check_races=True)))\n"
    )
    environment = {**os.environ, "TRAINKERNEL_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in started] == ["2", "2"]
    names = sorted(path.suffix for path in (tmp_path / "emulator").iterdir())
    assert names == [".so", ".so"]


SMALLEST = 'struct TkParams { int n; }; extern "C" void TRAINKERNEL_ENTRY(const TkParams) {}'


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Path:
    """An empty cache, and a process that has loaded nothing from it but the runtime."""
    compiler.load_runtime()
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path))
    return Path(tmp_path) / "emulator"


def replace(path: Path, data: bytes) -> None:
    path.unlink()  # not in its place: the old object may still be mapped
    path.write_bytes(data)


def truncate(path: Path) -> None:
    replace(path, path.read_bytes()[:5000])  # the loader would crash on it


def flip(path: Path) -> None:
    replace(path, path.read_bytes()[:-1] + b"\xff")


def become_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere.so")
    path.symlink_to(path.parent.parent / "elsewhere.so")


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [truncate, flip, become_link, become_folder, become_fifo])
def test_a_damaged_object_is_built_again(own_cache: Path, damage: Callable[[Path], None]) -> None:
    compiler.compile_sources([SMALLEST])
    (path,) = own_cache.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    whole = path.read_bytes()
    damage(path)
    assert compiler._find_object(own_cache, path.name[:40]) is None
    assert len(compiler.compile_sources([SMALLEST])) == 1
    assert damage is become_folder or path.read_bytes() == whole
    assert [item.name for item in own_cache.iterdir()] == [path.name]


def test_a_full_disk_costs_only_the_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler, "write_atomically", fail)
    assert len(compiler.compile_sources([SMALLEST])) == 1
    assert list(own_cache.iterdir()) == []


def test_no_temporary_folder_is_named(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(own_cache / "missing"))
    with pytest.raises(CompileError, match=r"needs a folder to compile in: .*Name one in \$TMPDIR"):
        compiler.compile_sources([SMALLEST])


def test_the_cache_is_bounded(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile_sources([SMALLEST])
    (first,) = own_cache.iterdir()
    monkeypatch.setattr(compiler, "_MAX_CACHE_BYTES", first.stat().st_size + 100)
    compiler.compile_sources([SMALLEST + "  // another"])
    (second,) = own_cache.iterdir()
    assert second != first


def test_both_caches_share_a_folder_under_any_umask(own_cache: Path) -> None:
    before = os.umask(0o002)
    try:
        compiler.compile_sources([SMALLEST])
        assert CubinCache.from_environment().put("00" * 32, b"cubin", {})
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ('g++ "', "which is no command"),
        ("true", "'true' accepted its runtime and wrote nothing"),
        ("{folder}/foreign", "refused its runtime:\nerreur \ufffd"),
    ],
)
def test_a_wrong_compiler_is_named(cxx: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nprintf "erreur \\351\\n" >&2\nexit 1\n')
    foreign.chmod(0o700)
    monkeypatch.setenv("CXX", cxx.format(folder=tmp_path))
    with pytest.raises(CompileError, match=re.escape(message)):
        compiler._load_runtime.__wrapped__()


FORKED = """
import os, threading, time
import numpy as np
from trainkernel import ProgramBuilder, emulator

b = ProgramBuilder()
x = b.input("x", (64,))
program = b.build([b.op("add", x, 1.0)])
ones = np.ones(64, np.float32)
emulator.run(program, [ones])
stop = threading.Event()

def work():
    while not stop.is_set():
        emulator.run(program, [ones])

thread = threading.Thread(target=work)
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        emulator.run(program, [ones])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
print("done")
"""


def test_a_process_forked_while_another_thread_emulates_can_emulate() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize(
    "bad",
    [
        {"num_blocks": 0},
        {"num_blocks": True},
        {"order": "sideways"},
        {"order": True},
        {"check_races": "yes"},
        {"barrier_timeout_ns": -1},
        {"barrier_timeout_ns": 1.5},
        {"barrier_timeout_ns": 1 << 64},
    ],
)
def test_options_are_checked(bad: dict[str, Any]) -> None:
    kernel, inputs = two_stages()
    with pytest.raises(OptionError, match=next(iter(bad))):
        emulator.emulate(kernel, inputs, **bad)


def test_launches_leave_no_memory_behind() -> None:
    kernel, inputs = two_stages()

    def resident_kib() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs /proc/self/statm to see the process's memory")
    for _ in range(5):
        emulator.emulate(kernel, inputs, check_races=True)
    before = resident_kib()
    for _ in range(60):
        emulator.emulate(kernel, inputs, check_races=True)
    assert resident_kib() - before < 4096
