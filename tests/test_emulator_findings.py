"""What the emulator finds: races, stray accesses, deadlock and divergence, in kernels broken by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulator_support import (
    F32,
    ORDERS,
    TWO_STAGES,
    TWO_STAGES_BODY,
    ArenaRegion,
    Task,
    make_kernel,
    needs_compiler,
    normal,
    run_kernel,
    two_stages,
)

from trainkernel import emulator
from trainkernel.errors import EmulatorError, LaunchError, RaceError

pytestmark = needs_compiler

# ---- Races ----


def check_race(kernel: Any, inputs: list[Any], *texts: str, **options: Any) -> None:
    for order in ORDERS:
        with pytest.raises(RaceError) as caught:
            emulator.emulate(kernel, inputs, check_races=True, order=order, **options)
        for text in texts:
            assert text in str(caught.value)


@pytest.mark.parametrize("which", ["before", "after"])
def test_a_missing_syncthreads_is_a_race_in_shared_memory(which: str) -> None:
    functions = TWO_STAGES.replace(f"__syncthreads(); /* {which} */", "")
    kernel, inputs = two_stages(functions=functions)
    check_race(kernel, inputs, "shared memory", "task 0 'partial' (stage 0; sum_x)", num_blocks=2)


def test_a_missing_grid_barrier_is_a_race_in_the_arena() -> None:
    kernel, inputs = two_stages(body=TWO_STAGES_BODY.replace("if (!tk_grid_barrier(barrier, 0)) return;", ""))
    check_race(kernel, inputs, "'partials' +", "task 0 'partial'", "task 1 'scale' (stage 1; mul, add)")
    # One block needs a barrier too; a block barrier does.
    check_race(kernel, inputs, "'partials' +", num_blocks=1)
    block_only, inputs = two_stages(
        body=TWO_STAGES_BODY.replace("if (!tk_grid_barrier(barrier, 0)) return;", "__syncthreads();")
    )
    emulator.emulate(block_only, inputs, check_races=True, num_blocks=1)
    check_race(block_only, inputs, "'partials' +", num_blocks=2)


@pytest.mark.parametrize("which", ["leading", "trailing"])
def test_a_grid_barrier_without_its_syncthreads_is_found(which: str) -> None:
    kernel, inputs = two_stages()
    broken = dataclasses.replace(kernel, source=kernel.source.replace(f"__syncthreads(); /* {which} */", ""))
    # Thread 127 writes what other blocks read, so that only the block barrier publishes it.
    broken = dataclasses.replace(
        broken,
        source=broken.source.replace(
            "threadIdx.x == 0) {\n            float total", "threadIdx.x == 127) {\n            float total"
        ),
    )
    for order in ORDERS:
        with pytest.raises(EmulatorError, match=r"race|passed too early"):
            emulator.emulate(broken, inputs, check_races=True, num_blocks=2, order=order)


def test_a_barrier_that_does_not_wait_is_dishonest() -> None:
    kernel, inputs = two_stages()
    broken = dataclasses.replace(
        kernel, source=kernel.source.replace("barrier.target += gridDim.x", "barrier.target += 1")
    )
    with pytest.raises(EmulatorError, match=r"grid barrier passed too early by block \d+ thread \d+.*stage 0"):
        emulator.emulate(broken, inputs, num_blocks=3)


def test_a_write_after_a_read_in_an_earlier_stage_is_a_race() -> None:
    body = """
    TK_TASK(0, 0);
    float seen = state[(block * 64 + thread + 64) % 128];
    /* barrier */
    TK_TASK(1, 1);
    state[block * 64 + thread] = seen + 1.0f;
    """
    for barrier, races in (("", True), ("if (!tk_grid_barrier(barrier, 0)) return;", False)):
        state = normal(128)
        old = state.copy()
        kernel = make_kernel(
            body.replace("/* barrier */", barrier),
            [("state", state)],
            [("new_state", (128,), F32)],
            inplace_outputs={0: 0},
            tasks=(Task(0, "read"), Task(1, "write")),
        )
        if races:
            check_race(kernel, [state], "'state' element", "read by task 0", "write by task 1", num_blocks=2)
        else:
            (result,) = emulator.emulate(kernel, [state], check_races=True, num_blocks=2).outputs
            assert result is state
            np.testing.assert_array_equal(state, np.roll(old, -64) + 1)


WARP_EXCHANGE = """
    TK_TASK(0, 0);
    TK_DYNAMIC_SHARED(shared);
    float* mine = (float*)shared + thread / 32 * 32;
    mine[thread % 32] = x[thread];
    __syncwarp();
    float other = mine[31 - thread % 32];
    __syncwarp();
    mine[thread % 32] = other;
    y[thread] = mine[thread % 32];
"""


def test_syncwarp_orders_a_warp_and_shuffles_do_not() -> None:
    x = normal(64)
    arguments: Any = ([("x", x)], [("y", (64,), F32)])
    result = run_kernel(WARP_EXCHANGE, *arguments, shared_bytes=256, check_races=True, num_blocks=1)
    np.testing.assert_array_equal(result.outputs[0], x.reshape(2, 32)[:, ::-1].ravel())
    for broken in (
        WARP_EXCHANGE.replace("__syncwarp();", "", 1),
        WARP_EXCHANGE.replace("__syncwarp();\n    mine", "mine"),
        WARP_EXCHANGE.replace("__syncwarp();", "__shfl_xor_sync(0xffffffffu, 1.0f, 1);", 1),
    ):
        kernel = make_kernel(broken, *arguments, shared_bytes=256)
        check_race(kernel, [x], "shared memory", "task 0 'work' (stage 0; op)", num_blocks=1)


def test_a_partial_syncwarp_orders_only_its_lanes() -> None:
    body = """
    TK_TASK(0, 0);
    TK_DYNAMIC_SHARED(shared);
    float* s = (float*)shared;
    s[thread] = x[thread];
    __syncwarp(thread < 16 ? 0x0000ffffu : 0xffff0000u);
    y[thread] = s[thread ^ XOR];
    """
    x = normal(32)
    arguments: Any = ([("x", x)], [("y", (32,), F32)])
    options: Any = {"threads": 32, "shared_bytes": 128}
    result = run_kernel(body.replace("XOR", "8"), *arguments, **options, check_races=True, num_blocks=1)
    np.testing.assert_array_equal(result.outputs[0], x[np.arange(32) ^ 8])
    check_race(make_kernel(body.replace("XOR", "16"), *arguments, **options), [x], "shared memory", num_blocks=1)


def test_two_readers_are_both_remembered() -> None:
    # Thread 5 reads, then thread 40 of another warp; the writer is ordered after neither.
    body = """
    TK_TASK(0, 0);
    float seen = thread == 5 || thread == 40 ? state[0] : 0.0f;
    seen_by[thread] = seen;
    if (thread == WRITER) state[0] = seen + 1.0f;
    """
    for writer in (5, 40):
        state = np.zeros(1, F32)
        kernel = make_kernel(
            body.replace("WRITER", str(writer)),
            [("state", state)],
            [("out", (1,), F32), ("seen_by", (64,), F32)],
            inplace_outputs={0: 0},
        )
        check_race(kernel, [state], "'state' element 0", num_blocks=1)


def test_bytes_side_by_side_do_not_race() -> None:
    body = "    TK_TASK(0, 0);\n    y[block * 64 + thread] = x[block * 64 + thread];"
    x = np.arange(256) % 3 == 0
    result = run_kernel(body, [("x", x)], [("y", (256,), np.bool_)], check_races=True, num_blocks=4)
    np.testing.assert_array_equal(result.outputs[0], x)


# ---- Stray accesses ----


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("y[thread] = x[thread + 1];", "out of bounds: 4-byte read by task 0 'work'.*0 bytes past the end of 'x'"),
        ("y[thread] = x[thread]; if (thread == 9) y[64] = 1.0f;", "4-byte write by .*past the end of 'output 0 y'"),
        ("y[thread] = x[thread]; ((unsigned char*)y)[-1] = 1;", "1-byte write by .*1 bytes before 'output 0 y'"),
        ("y[thread] = *(float*)((char*)x + 253);", "misaligned 4-byte read|reaches past its 256 bytes"),
        ("y[thread] = ((float*)arena)[64 + thread];", "past the end of 'arena'"),
        ("TK_DYNAMIC_SHARED(s); s[64] = 1; y[thread] = x[thread];", "shared memory \\+64 is past"),
        ("y[thread] = x[thread]; x[thread] = 0.0f;", "write to an input that is not in place, 'x' element 0"),
        ("float4 v = *(const float4*)(x + 1); y[thread] = v.x + v.z;", "misaligned 16-byte .*'x' element 1 "),
        ("y[thread] = ((const float2*)(x + 1))->x;", "misaligned 8-byte"),
    ],
)
def test_stray_accesses_are_reported(body: str, text: str) -> None:
    found = emulator.find_compiler()
    if "float4" in body and found is not None and "clang" in found.version:
        pytest.skip("clang splits a float4 copy before it looks at the alignment; g++ sees it")
    with pytest.raises(EmulatorError, match=text):
        run_kernel(
            "    TK_TASK(0, 0);\n    " + body,
            [("x", normal(64))],
            [("y", (64,), F32)],
            arena_bytes=256,
            shared_bytes=64,
            check_races=True,
            num_blocks=1,
        )


def test_memory_of_no_plan_region_is_out_of_bounds() -> None:
    body = "    TK_TASK(0, 0);\n    ((float*)arena)[24] = 1.0f;\n    y[thread] = x[thread];"
    with pytest.raises(EmulatorError, match="32 bytes past the end of 'arena'"):
        run_kernel(
            body,
            [("x", normal(64))],
            [("y", (64,), F32)],
            arena_bytes=512,
            regions=(ArenaRegion("a", 256, 64, 0, 0), ArenaRegion("b", 512, 64, 0, 0)),
            check_races=True,
        )


def test_without_race_checks_guards_and_faults_are_caught() -> None:
    arguments: Any = ([("x", normal(64))], [("y", (64,), F32)])
    with pytest.raises(EmulatorError, match="just outside output 0"):
        run_kernel("    y[thread] = x[thread];\n    y[64] = 0.0f;", *arguments)
    with pytest.raises(EmulatorError, match="shared memory \\+32 is past"):
        run_kernel("    TK_DYNAMIC_SHARED(s);\n    s[40] = 0;\n    y[thread] = s[40];", *arguments, shared_bytes=32)
    with pytest.raises(EmulatorError, match="illegal address 0x10 in task 0 'work'"):
        run_kernel(
            "    TK_TASK(0, 0);\n    y[thread] = *(volatile float*)(unsigned long long)(x[0] < 99.0f ? 16 : 0);",
            *arguments,
        )


def test_uninitialised_reads_and_unwritten_outputs() -> None:
    arguments: Any = ([("x", normal(64))], [("y", (64,), F32)])
    options: Any = {"arena_bytes": 256, "shared_bytes": 256, "check_races": True, "num_blocks": 1}
    for body, place in (
        ("y[thread] = ((float*)arena)[thread];", "arena"),
        ("TK_DYNAMIC_SHARED(s); y[thread] = ((float*)s)[thread];", "shared memory"),
        ("y[thread] = y[63 - thread] + 1.0f;", "output 0 y"),
    ):
        with pytest.raises(EmulatorError, match=f"uninitialised read at .*{place}.* by task 0"):
            run_kernel("    TK_TASK(0, 0);\n    " + body, *arguments, **options)
    with pytest.raises(EmulatorError, match=r"'output 0 y' element 63 .* was never written \(4 bytes"):
        run_kernel("    if (thread < 63) y[thread] = x[thread];", *arguments, **options)
    # Without race checks they are poison: NaN in every float type.
    poison = run_kernel("    y[thread] = ((float*)arena)[thread];", *arguments, arena_bytes=256).outputs[0]
    assert np.isnan(poison).all()


# ---- Deadlock and divergence ----


def test_deadlocks_are_reported() -> None:
    arguments: Any = ([("x", normal(64))], [("y", (64,), F32)])
    with pytest.raises(EmulatorError, match=r"deadlock: .*block 0 thread 0 in polling a counter .*__syncthreads"):
        run_kernel(
            "    TK_TASK(0, 0);\n    if (block == 1) return;\n    if (!tk_grid_barrier(barrier, 3)) return;",
            *arguments,
            num_blocks=2,
        )
    with pytest.raises(EmulatorError, match="deadlock: 64 threads wait for ever"):
        run_kernel("    if (thread < 32) __syncthreads(); else tk_cluster_barrier();", *arguments, num_blocks=1)


def test_a_barrier_timeout_names_the_stage() -> None:
    body = "    if (block == 1) return;\n    if (!tk_grid_barrier(barrier, 3)) return;\n    y[thread] = x[thread];"
    with pytest.raises(LaunchError, match="barrier of stage 3 was not passed in time"):
        run_kernel(
            body, [("x", normal(64))], [("y", (64,), F32)], num_blocks=2, barrier_timeout_ns=10**9, check_races=True
        )


def test_divergence_is_reported() -> None:
    arguments: Any = ([("x", normal(64))], [("y", (64,), F32)])
    with pytest.raises(EmulatorError, match=r"divergent __syncthreads: .* 1 threads of the block .*thread 17"):
        run_kernel("    if (thread == 17) return;\n    __syncthreads();", *arguments)
    for body in (
        "    if (thread == 3) return;\n    __syncwarp();",
        "    if (thread % 32 < 16) __syncwarp(); else __shfl_sync(0xffffffffu, thread, 0);",
        "    __syncwarp(1u);",
    ):
        with pytest.raises(EmulatorError, match="divergent warp"):
            run_kernel(body, *arguments)


@pytest.mark.parametrize(
    "order", ["forward", "reverse"]
)  # the first thread has the lowest stack, the last another below
def test_a_deep_stack_is_reported(order: str) -> None:
    body = """
    volatile float big[15 * 1024];
    for (int i = 0; i < 15 * 1024; i++) big[i] = x[thread];
    __syncthreads();
    volatile float more[3 * 1024];
    for (int i = 0; i < 3 * 1024; i++) more[i] = big[i];
    __syncthreads();
    y[thread] = big[thread] + more[thread];
    """
    with pytest.raises(EmulatorError, match=r"stack overflow in .*: a thread's local variables need more than 64 KiB"):
        run_kernel(body, [("x", normal(32))], [("y", (32,), F32)], threads=32, num_blocks=1, order=order)
