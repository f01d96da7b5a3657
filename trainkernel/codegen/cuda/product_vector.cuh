// Products with one row, one column, or little depth: the depth from begin to end.

// 32 outputs per piece, one per lane; the warps share the depth: for a matrix whose neighbouring
// outputs lie side by side. The first warp stores.
template <int THREADS, class LoadVector, class LoadMatrix, class Store>
__device__ __forceinline__ void tk_vector_product_lanes(tk_index first, tk_index outputs, tk_index begin, tk_index end,
                                                        float* shared, LoadVector load_vector, LoadMatrix load_matrix,
                                                        Store store) {
  constexpr int WARPS = THREADS / 32;
  tk_index o = first + threadIdx.x % 32;
  float sum = 0.0f;
  if (o < outputs) {
#pragma unroll 4
    for (tk_index k = begin + threadIdx.x / 32; k < end; k += WARPS) sum = __fmaf_rn(load_vector(k), load_matrix(o, k), sum);
  }
  __syncthreads();  // shared is free: the piece before may still read it
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < 32 && o < outputs) {
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum = __fadd_rn(sum, shared[warp * 32 + threadIdx.x]);
    store(o, sum);
  }
}

// 32 outputs per piece, some by each warp, whose lanes share the depth: for a matrix that is contiguous along it.
// The outputs of a warp are summed side by side, so that what they read is on its way at the same time. Each of its
// first lanes stores one.
template <int THREADS, class LoadVector, class LoadMatrix, class Store>
__device__ __forceinline__ void tk_vector_product_warps(tk_index first, tk_index outputs, tk_index begin, tk_index end,
                                                        LoadVector load_vector, LoadMatrix load_matrix, Store store) {
  constexpr int WARPS = THREADS / 32, OWN = 32 / WARPS, UNROLLED = OWN < 4 ? 4 / OWN : 1;
  const tk_index own = first + threadIdx.x / 32;
  const int lane = (int)threadIdx.x % 32;
  float sums[OWN] = {};
#pragma unroll UNROLLED
  for (tk_index k = begin + lane; k < end; k += 32) {
    const float factor = load_vector(k);
#pragma unroll
    for (int i = 0; i < OWN; ++i)  // beyond the end: any output, whose sum nobody keeps
      sums[i] = __fmaf_rn(factor, load_matrix(tk_min(own + i * WARPS, outputs - 1), k), sums[i]);
  }
  float mine = 0.0f;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float sum = tk_merge_warp<TkSum>(sums[i]);
    if (lane == i) mine = sum;
  }
  if (lane < OWN && own + lane * WARPS < outputs) store(own + lane * WARPS, mine);
}

// THREADS outputs at a time, one of each thread, BATCH times: what a thread reads for all of them is on its way at the
// same time. product(i) sums up, compute(i, sum, results) finishes, write(i, results) stores. WHOLE promises that no
// output is beyond the end.
template <int THREADS, int BATCH, bool WHOLE, class Results, class Product, class Compute, class Write>
__device__ __forceinline__ void tk_thin_outputs(tk_index first, tk_index outputs, Product product, Compute compute, Write write) {
  Results results[BATCH];
#pragma unroll
  for (int u = 0; u < BATCH; ++u) {
    const tk_index i = first + u * THREADS + threadIdx.x;
    if (WHOLE || i < outputs) compute(i, product(i), results[u]);
  }
#pragma unroll
  for (int u = 0; u < BATCH; ++u) {
    const tk_index i = first + u * THREADS + threadIdx.x;
    if (WHOLE || i < outputs) write(i, results[u]);
  }
}

// One thread per output. A depth is read BATCH at a time: a thread has nothing else to do while a load is on its way.
template <int BATCH, class LoadA, class LoadB>
__device__ __forceinline__ float tk_thin_product(tk_index begin, tk_index end, LoadA load_a, LoadB load_b) {
  float sum = 0.0f;
#pragma unroll BATCH
  for (tk_index k = begin; k < end; ++k) sum = __fmaf_rn(load_a(k), load_b(k), sum);
  return sum;
}
