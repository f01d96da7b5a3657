"""Small hand-written kernels for the emulator's tests, in the form that the generator emits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from trainkernel import emulator
from trainkernel.dtypes import name_of_numpy
from trainkernel.emulator.compiler import install_hint
from trainkernel.ir import Program, ScalarSpec, TensorSpec

needs_compiler = pytest.mark.skipif(
    not emulator.is_available(), reason=f"no C++ compiler for the emulator. {install_hint()}"
)

HEADER_BYTES = 256

# The grid barrier as the generated source has it: monotonic counter, release add, acquire poll.
BARRIER = """
#ifndef TRAINKERNEL_PRELUDE_TEST_BARRIER
#define TRAINKERNEL_PRELUDE_TEST_BARRIER
struct TkBarrier {
    unsigned* counter;
    unsigned* error;
    unsigned long long timeout_ns;
    unsigned target;
};
__device__ __noinline__ bool tk_grid_barrier(TkBarrier& barrier, int stage) {
    if (gridDim.x == 1) {
        __syncthreads();
        TK_GRID_BARRIER_DONE();
        return true;
    }
    barrier.target += gridDim.x;
    __syncthreads(); /* leading */
    if (threadIdx.x == 0) {
        TK_GRID_BARRIER_ARRIVE();
        tk_red_release_gpu_add(barrier.counter, 1);
        unsigned long long start = tk_globaltimer_ns();
        while (tk_load_acquire_gpu(barrier.counter) < barrier.target) {
            if (tk_load_acquire_gpu(barrier.error) != 0) break;
            if (barrier.timeout_ns != 0 && tk_globaltimer_ns() - start > barrier.timeout_ns)
                atomicExch(barrier.error, 1u + unsigned(stage));
        }
    }
    __syncthreads(); /* trailing */
    if (tk_load_acquire_gpu(barrier.error) != 0) return false;
    TK_GRID_BARRIER_DONE();
    return true;
}
#endif
"""


@dataclass(frozen=True)
class Slot:
    kind: str
    index: int
    name: str
    alignment_bytes: int | None = None


@dataclass(frozen=True)
class ScalarSlot:
    index: int
    name: str
    dtype: str
    offset_bytes: int


@dataclass(frozen=True)
class Task:
    stage: int
    name: str
    operations: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArenaRegion:
    name: str
    offset_bytes: int
    size_bytes: int
    first_stage: int
    last_stage: int


@dataclass(frozen=True)
class FakeKernel:
    """What the emulator reads of a GeneratedKernel."""

    program: Program
    source: str
    threads_per_block: int
    shared_bytes: int
    workspace_bytes: int
    slots: tuple[Slot, ...]
    scalars: tuple[ScalarSlot, ...]
    params_bytes: int
    tasks: tuple[Task, ...]
    regions: tuple[ArenaRegion, ...]
    unplanned_bytes: int = 0
    uses_tensor_table: bool = False
    inplace_outputs: Mapping[int, int] = field(default_factory=dict)
    max_work_blocks: int = 1024
    max_blocks: int | None = None
    cluster_blocks: int = 1


def make_kernel(
    body: str,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[tuple[str, tuple[int, ...], Any]] = (),
    *,
    functions: str = "",
    threads: int = 64,
    shared_bytes: int = 0,
    arena_bytes: int = 0,
    tasks: Sequence[Task] = (Task(0, "work", ("op",)),),
    regions: Sequence[ArenaRegion] = (),
    inplace_outputs: Mapping[int, int] | None = None,
    table: bool = False,
    cluster_blocks: int = 1,
) -> FakeKernel:
    """A kernel whose body is ``body``: in it ``arena``, the scalars, and every tensor are variables.

    A NumPy array in ``inputs`` stands for a tensor of its shape, strides and dtype, a Python number for a scalar.
    """
    inplace_outputs = dict(inplace_outputs or {})
    specs: list[TensorSpec | ScalarSpec] = []
    slots: list[Slot] = []
    scalars: list[ScalarSlot] = []
    pointers: list[tuple[str, str]] = []
    for index, (name, value) in enumerate(inputs):
        if not isinstance(value, np.ndarray):
            specs.append(ScalarSpec(name, "int32" if isinstance(value, int) else "float32"))
            continue
        strides = tuple(stride // value.itemsize for stride in value.strides)
        specs.append(TensorSpec(name, value.shape, strides, 0, name_of_numpy(value.dtype) or ""))
        slots.append(Slot("input", index, name))
        pointers.append((_ctype(value.dtype), name))
    results = []
    for index, (name, shape, dtype) in enumerate(outputs):
        results.append(TensorSpec.dense(name, shape, name_of_numpy(np.dtype(dtype)) or ""))
        if index not in inplace_outputs:
            slots.append(Slot("output", index, name))
            pointers.append((_ctype(np.dtype(dtype)), name))
    offset = 16 + 8 * (1 if table else len(pointers))
    fields, locals_ = [], []
    if table:
        fields.append("    void* const* tensors;")
        locals_ += [f"    {ctype}* {name} = ({ctype}*)p.tensors[{i}];" for i, (ctype, name) in enumerate(pointers)]
    else:
        fields += [f"    {ctype}* {name};" for ctype, name in pointers]
        locals_ += [f"    {ctype}* {name} = p.{name};" for ctype, name in pointers]
    for index, spec in enumerate(specs):
        if isinstance(spec, ScalarSpec):
            ctype = "int" if spec.dtype == "int32" else "float"
            fields.append(f"    {ctype} {spec.buffer};")
            locals_.append(f"    {ctype} {spec.buffer} = p.{spec.buffer};")
            scalars.append(ScalarSlot(index, spec.buffer, spec.dtype, offset))
            offset += 4
    nl = "\n"
    source = f"""// a test's program
#if defined(__CUDACC_RTC__) || defined(TRAINKERNEL_EMULATOR)
{BARRIER}
struct TkParams {{
    unsigned char* workspace;
    unsigned long long barrier_timeout_ns;
{nl.join(fields)}
}};
{functions}
#ifndef TRAINKERNEL_ENTRY
#define TRAINKERNEL_ENTRY trainkernel_step
#endif
extern "C" __global__ void __launch_bounds__({threads}) TRAINKERNEL_ENTRY(const __grid_constant__ TkParams p) {{
    TkBarrier barrier{{(unsigned*)p.workspace, (unsigned*)(p.workspace + 4), p.barrier_timeout_ns, 0}};
    unsigned char* arena = p.workspace + {HEADER_BYTES};
    int thread = threadIdx.x, block = blockIdx.x;
{nl.join(locals_)}
{body}
}}
#else
#error "the emulator must not see the host entry"
#endif
"""
    return FakeKernel(
        program=Program(tuple(specs), (), tuple(results)),
        source=source,
        threads_per_block=threads,
        shared_bytes=shared_bytes,
        workspace_bytes=HEADER_BYTES + arena_bytes,
        slots=tuple(slots),
        scalars=tuple(scalars),
        params_bytes=(offset + 7) // 8 * 8,
        tasks=tuple(tasks),
        regions=tuple(regions),
        uses_tensor_table=table,
        inplace_outputs=inplace_outputs,
        cluster_blocks=cluster_blocks,
    )


def _ctype(dtype: np.dtype[Any]) -> str:
    return {4: "float", 2: "unsigned short", 1: "unsigned char"}[dtype.itemsize] if dtype != np.uint32 else "unsigned"


def run_kernel(body: str, inputs: Sequence[tuple[str, Any]], *arguments: Any, **options: Any) -> Any:
    """``make_kernel`` and ``emulate`` in one; returns the EmulationResult."""
    emulate = {
        key: options.pop(key) for key in ("num_blocks", "order", "check_races", "barrier_timeout_ns") if key in options
    }
    kernel = make_kernel(body, inputs, *arguments, **options)
    return emulator.emulate(kernel, [value for _, value in inputs], **emulate)


F32 = np.float32
ORDERS: tuple[str | int, ...] = ("forward", "reverse", 0, 7)


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


# A two-stage program: partial sums, a grid barrier, scale.
CHUNKS = 16
TWO_STAGES = """
__device__ void task_partial(const TkParams& p) {
    TK_TASK(0, 0);
    TK_DYNAMIC_SHARED(shared);
    float* sums = (float*)shared;
    float* partial = (float*)(p.workspace + 256);
    for (int chunk = blockIdx.x; chunk < 16; chunk += gridDim.x) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < p.n / 16; i += blockDim.x) sum = __fadd_rn(sum, p.x[chunk * (p.n / 16) + i]);
        for (int step = 16; step; step >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
        __syncthreads(); /* before */
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads(); /* after */
        if (threadIdx.x == 0) {
            float total = 0.0f;
            for (int w = 0; w < blockDim.x / 32; w++) total = __fadd_rn(total, sums[w]);
            partial[chunk] = total;
        }
    }
}
__device__ void task_scale(const TkParams& p) {
    TK_TASK(1, 1);
    const float* partial = (const float*)(p.workspace + 256);
    float total = 0.0f;
    for (int i = 0; i < 16; i++) total = __fadd_rn(total, partial[i]);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += gridDim.x * blockDim.x)
        p.y[i] = __fmaf_rn(p.x[i], p.scale, total);
}
"""
TWO_STAGES_BODY = """
    task_partial(p);
    if (!tk_grid_barrier(barrier, 0)) return;
    task_scale(p);
"""


def two_stages(n: int = 2048, **replacements: Any) -> tuple[Any, list[Any]]:
    x = normal(n)
    options: dict[str, Any] = {"threads": 128, "shared_bytes": 64, "arena_bytes": 256}
    options.update(replacements)
    kernel = make_kernel(
        options.pop("body", TWO_STAGES_BODY),
        [("x", x), ("scale", 2.0), ("n", n)],
        [("y", (n,), F32)],
        functions=options.pop("functions", TWO_STAGES),
        tasks=(Task(0, "partial", ("sum_x",)), Task(1, "scale", ("mul", "add"))),
        regions=(ArenaRegion("partials", 256, 4 * CHUNKS, 0, 1),),
        **options,
    )
    return kernel, [x, 2.0, n]
