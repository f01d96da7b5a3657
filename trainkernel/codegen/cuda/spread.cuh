// Numbers of blocks by which those that share a multiprocessor are far apart.
//
// The hardware may place neighbouring blocks on one multiprocessor while others have none of a stage's few pieces.
// Every block tells where it is; the first block of each multiprocessor comes before all second ones.

#if defined(__CUDACC_RTC__)
__device__ __forceinline__ unsigned tk_multiprocessor() {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}
#endif

// The block's number, -1 if the grid barrier timed out. `places` has room for MAX_BLOCKS, `shared` for twice as many;
// a larger grid keeps its own numbers.
template <int MAX_BLOCKS>
__device__ __forceinline__ int tk_spread_block(TkBarrier& barrier, unsigned* places, unsigned* shared) {
  const int blocks = (int)gridDim.x, own = (int)blockIdx.x;
  if (blocks > MAX_BLOCKS) return own;
  if (threadIdx.x == 0) places[own] = tk_multiprocessor();
  if (!tk_grid_barrier(barrier, 0)) return -1;
  for (int b = (int)threadIdx.x; b < blocks; b += (int)blockDim.x) shared[b] = places[b];
  __syncthreads();  // all places are near
  unsigned* ranks = shared + blocks;
  for (int b = (int)threadIdx.x; b < blocks; b += (int)blockDim.x) {
    unsigned rank = 0;
    for (int before = 0; before < b; ++before) rank += shared[before] == shared[b];
    ranks[b] = rank;
  }
  __syncthreads();  // all ranks are known
  int number = 0;
  for (int b = 0; b < blocks; ++b) number += ranks[b] < ranks[own] || (ranks[b] == ranks[own] && b < own);
  __syncthreads();  // shared is free
  return number;
}
