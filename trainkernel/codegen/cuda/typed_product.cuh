// Products in float64 and the integers, and tile epilogues whose results are not all float.

// One thread per output; the depth from begin to end.
template <class T, class LoadA, class LoadB>
__device__ __forceinline__ T tk_typed_thin_product(tk_index begin, tk_index end, LoadA load_a, LoadB load_b) {
  T sum = (T)0;
#pragma unroll 4
  for (tk_index k = begin; k < end; ++k) sum = tk_fma(load_a(k), load_b(k), sum);
  return sum;
}

// As the epilogue of float results (product_operand.cuh), with one struct of results for each element.
template <int TILE_M, int TILE_N, int THREADS, int STRIDE, int BATCH, class Results, class Compute, class Write>
__device__ __forceinline__ void tk_tile_store(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, const float* sums,
                                              Compute compute, Write write) {
#pragma unroll 1
  for (int first = (int)threadIdx.x; first < TILE_M * TILE_N; first += BATCH * THREADS) {
    Results results[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      int e = first + u * THREADS;
      tk_index m = m0 + e / TILE_N, n = n0 + e % TILE_N;
      if (e < TILE_M * TILE_N && m < m_end && n < n_end) compute(m, n, sums[e / TILE_N * STRIDE + e % TILE_N], results[u]);
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      int e = first + u * THREADS;
      tk_index m = m0 + e / TILE_N, n = n0 + e % TILE_N;
      if (e < TILE_M * TILE_N && m < m_end && n < n_end) write(m, n, results[u]);
    }
  }
}
