// The grid barrier: one counter, no reset between launches, any grid size.
//
// Each barrier adds 2^31 to the counter in total: block 0 adds 2^31 - (blocks - 1), every other
// block adds 1. So the top bit flips exactly when the last block arrives, and the low bits are zero
// again after every barrier, whatever the grid. A block reads the top bit before its first arrival;
// nobody can flip it before that arrival. A grid of one block needs the block barrier only.
//
// With a timeout, a block that waits too long records 1 + stage in the second word of the header
// and leaves; the kernel ends, the context survives, the host reads the word.

struct TkBarrier {
  unsigned* counter;
  unsigned phase;
  unsigned long long timeout_ns;
};

__device__ __forceinline__ TkBarrier tk_barrier_init(unsigned char* workspace, unsigned long long timeout_ns) {
  TkBarrier barrier;
  barrier.counter = (unsigned*)workspace;
  barrier.timeout_ns = timeout_ns;
  barrier.phase = 0;
  if (threadIdx.x == 0 && gridDim.x > 1) barrier.phase = tk_load_acquire_gpu(barrier.counter) & 0x80000000u;
  return barrier;
}

__device__ __forceinline__ void tk_grid_arrive(unsigned* counter) {
  __syncthreads();
  if (threadIdx.x == 0 && gridDim.x > 1) {
    TK_GRID_BARRIER_ARRIVE();
    tk_red_release_gpu_add(counter, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
  }
}

// False if the wait for a phase timed out: the whole block gets the same answer and must leave the kernel.
__device__ __forceinline__ bool tk_grid_wait(unsigned* counter, unsigned phase, unsigned long long timeout_ns, int stage) {
  if (gridDim.x == 1) return true;
  int late = 0;
  if (threadIdx.x == 0) {
    if (timeout_ns == 0) {
#pragma unroll 1
      while ((tk_load_acquire_gpu(counter) & 0x80000000u) != phase) {
      }
    } else {
      unsigned long long start = tk_globaltimer_ns();
      while (!late && (tk_load_acquire_gpu(counter) & 0x80000000u) != phase)
        late = tk_globaltimer_ns() - start > timeout_ns;
      if (late) atomicExch(counter + 1, (unsigned)stage + 1);
    }
  }
  bool passed = __syncthreads_or(late) == 0;
  if (passed) TK_GRID_BARRIER_DONE();
  return passed;
}

__device__ TK_GRID_BARRIER_IS bool tk_grid_meet(unsigned* counter, unsigned phase, unsigned long long timeout_ns, int stage) {
  tk_grid_arrive(counter);
  return tk_grid_wait(counter, phase, timeout_ns, stage);
}

__device__ __forceinline__ bool tk_grid_barrier(TkBarrier& barrier, int stage) {
  barrier.phase ^= 0x80000000u;
  return tk_grid_meet(barrier.counter, barrier.phase, barrier.timeout_ns, stage);
}

// The same in two parts. What the block does between them must not touch what others write before or after.
__device__ __forceinline__ void tk_grid_barrier_arrive(TkBarrier& barrier) {
  barrier.phase ^= 0x80000000u;
  tk_grid_arrive(barrier.counter);
}
__device__ __forceinline__ bool tk_grid_barrier_wait(TkBarrier& barrier, int stage) {
  return tk_grid_wait(barrier.counter, barrier.phase, barrier.timeout_ns, stage);
}
