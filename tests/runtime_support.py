"""A hand-written kernel and a stand-in for GeneratedKernel, for the tests of the runtime.

The runtime gets source, sizes and pointers. These sources follow the same conventions as the
generated ones (parameter block, workspace header) and come from no Program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainkernel.facts import ScalarSlot, Slot, TaskInfo
from trainkernel.ir import Program, ScalarSpec, TensorSpec

BARRIER = r"""
struct Header { unsigned counter; unsigned error; };

static __device__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

static __device__ unsigned load_acquire(const unsigned* p) {
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

static __device__ bool grid_barrier(unsigned char* workspace, unsigned long long timeout_ns, int stage) {
    __shared__ int failed;
    Header* header = reinterpret_cast<Header*>(workspace);
    __syncthreads();
    if (threadIdx.x == 0) {
        failed = 0;
        __threadfence();
        const unsigned old = atomicAdd(&header->counter, 1u);
        const unsigned target = (old / gridDim.x + 1u) * gridDim.x;
        const unsigned long long start = now_ns();
        while (static_cast<int>(load_acquire(&header->counter) - target) < 0) {
            if (timeout_ns != 0 && now_ns() - start > timeout_ns) atomicExch(&header->error, 1u + stage);
            if (load_acquire(&header->error) != 0) { failed = 1; break; }
        }
    }
    __syncthreads();
    return failed == 0;
}
"""

# w -= lr * x, `repeat` times; then, after a barrier, flipped[i] = w[n - 1 - i], which another block wrote.
STEP_SOURCE = (
    BARRIER
    + r"""
struct TkParams {
    unsigned char* workspace;
    unsigned long long barrier_timeout_ns;
    const float* x;
    float* w;
    float* flipped;
    float lr;
    int repeat;
    int skip;
    int unused;
};

extern "C" __global__ void __launch_bounds__(256) trainkernel_step(const __grid_constant__ TkParams p) {
    const int n = 4096;
    const int first = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = first; i < n; i += gridDim.x * blockDim.x) {
        float value = p.w[i];
        for (int k = 0; k < p.repeat; ++k) value = __fsub_rn(value, __fmul_rn(p.lr, p.x[i]));
        p.w[i] = value;
    }
    if (p.skip != 0 && blockIdx.x == 0) return;  // a lost barrier: the others wait for this block
    if (!grid_barrier(p.workspace, p.barrier_timeout_ns, 0)) return;
    for (int i = first; i < n; i += gridDim.x * blockDim.x) p.flipped[i] = p.w[n - 1 - i];
}
"""
)

TABLE_SOURCE = r"""
struct TkParams { unsigned char* workspace; unsigned long long barrier_timeout_ns; void* const* tensors; };

extern "C" __global__ void __launch_bounds__(128) trainkernel_step(const __grid_constant__ TkParams p) {
    const int num_inputs = 600, n = 32;
    float* out = static_cast<float*>(p.tensors[num_inputs]);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float total = 0.0f;
        for (int k = 0; k < num_inputs; ++k) total += static_cast<const float*>(p.tensors[k])[i];
        out[i] = total;
    }
}
"""

# Copies elements of two bytes, so it does for bfloat16 and float16.
COPY16_SOURCE = r"""
struct TkParams {
    unsigned char* workspace;
    unsigned long long barrier_timeout_ns;
    const unsigned short* x;
    unsigned short* y;
};

extern "C" __global__ void __launch_bounds__(128) trainkernel_step(const __grid_constant__ TkParams p) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < COUNT; i += gridDim.x * blockDim.x) p.y[i] = p.x[i];
}
"""


@dataclass(frozen=True)
class StubGenerated:
    """What the runtime reads of a GeneratedKernel."""

    program: Program
    source: str
    slots: tuple[Any, ...]
    params_bytes: int
    scalars: tuple[Any, ...] = ()
    inplace_outputs: dict[int, int] = field(default_factory=dict)
    threads_per_block: int = 256
    shared_bytes: int = 0
    workspace_bytes: int = 256
    blocks_per_sm: int = 1
    max_blocks: int | None = None
    max_work_blocks: int = 16
    grid_barriers: int = 1
    uses_tensor_table: bool = False
    entry: str = "trainkernel_step"
    tasks: tuple[Any, ...] = ()
    segments: tuple[Any, ...] = ()
    ticks_offset_bytes: int | None = None
    schedule: str = "the schedule"
    plan: str = "the plan"


def step_program() -> Program:
    """Inputs x, w, lr, repeat, skip; outputs w (in place) and flipped."""
    x = TensorSpec.dense("x", (4096,))
    w = TensorSpec.dense("w", (4096,))
    scalars = (ScalarSpec("lr"), ScalarSpec("repeat", "int32"), ScalarSpec("skip", "int32"))
    return Program((x, w, *scalars), (), (TensorSpec.dense("new_w", (4096,)), TensorSpec.dense("flipped", (4096,))))


def step_stub(**changes: Any) -> StubGenerated:
    values: dict[str, Any] = {
        "program": step_program(),
        "source": STEP_SOURCE,
        "slots": (Slot("input", 0, "x"), Slot("input", 1, "w"), Slot("output", 1, "flipped")),
        "params_bytes": 56,
        "scalars": (
            ScalarSlot(2, "lr", "float32", 40),
            ScalarSlot(3, "repeat", "int32", 44),
            ScalarSlot(4, "skip", "int32", 48),
        ),
        "inplace_outputs": {0: 1},
        "tasks": (TaskInfo(0, "update", ()),),
    }
    return StubGenerated(**{**values, **changes})


def table_stub() -> StubGenerated:
    inputs = tuple(TensorSpec.dense(f"x{i}", (32,)) for i in range(600))
    program = Program(inputs, (), (TensorSpec.dense("total", (32,)),))
    slots = (*(Slot("input", i, f"x{i}") for i in range(600)), Slot("output", 0, "total"))
    return StubGenerated(program, TABLE_SOURCE, slots, 24, threads_per_block=128, uses_tensor_table=True)


def copy_stub(shape: tuple[int, ...], dtype: str) -> StubGenerated:
    count = 1
    for size in shape:
        count *= size
    program = Program((TensorSpec.dense("x", shape, dtype),), (), (TensorSpec.dense("y", shape, dtype),))
    source = COPY16_SOURCE.replace("COUNT", str(count))
    return StubGenerated(program, source, (Slot("input", 0, "x"), Slot("output", 0, "y")), 32, threads_per_block=128)
