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

// 32 outputs per piece, each by one warp whose lanes share the depth: for a matrix that is
// contiguous along the depth. Lane 0 stores.
template <int THREADS, class LoadVector, class LoadMatrix, class Store>
__device__ __forceinline__ void tk_vector_product_warps(tk_index first, tk_index outputs, tk_index begin, tk_index end,
                                                        LoadVector load_vector, LoadMatrix load_matrix, Store store) {
#pragma unroll 1
  for (tk_index o = first + threadIdx.x / 32; o < tk_min(first + 32, outputs); o += THREADS / 32) {
    float sum = 0.0f;
#pragma unroll 4
    for (tk_index k = begin + threadIdx.x % 32; k < end; k += 32) sum = __fmaf_rn(load_vector(k), load_matrix(o, k), sum);
    sum = tk_merge_warp<TkSum>(sum);
    if (threadIdx.x % 32 == 0) store(o, sum);
  }
}

// One thread per output. A long depth is read in batches: a thread has nothing else to do while a load is on its way.
template <class LoadA, class LoadB>
__device__ __forceinline__ float tk_thin_product(tk_index begin, tk_index end, LoadA load_a, LoadB load_b) {
  float sum = 0.0f;
#pragma unroll 16
  for (tk_index k = begin; k < end; ++k) sum = __fmaf_rn(load_a(k), load_b(k), sum);
  return sum;
}
