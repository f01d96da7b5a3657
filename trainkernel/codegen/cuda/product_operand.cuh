// Operands and results of product tiles.
//
// A step of an operand is OUTER x TILE_K elements in shared memory, laid out as in device memory so
// that loads and stores both run along the contiguous dimension: along the depth, element (o, k) is
// at o * STRIDE + k; otherwise at k * STRIDE + o. Elements outside the operand are zero.

// A plain view of a matrix in memory: element (outer, k) for a it is (m, k), for b it is (n, k).
// `vector` promises that runs of neighbours along the contiguous dimension are whole and aligned: four
// elements, or eight of 16 bits that a tensor-core product takes as they are.
template <class T>
struct TkMatrix {
  const T* base;
  tk_index outer_stride, depth_stride;
  int vector;
};

template <class T>
__device__ __forceinline__ TkMatrix<T> tk_matrix(const T* base, tk_index outer_stride, tk_index depth_stride, bool vector) {
  return TkMatrix<T>{base, outer_stride, depth_stride, vector && (unsigned long long)base % 16 == 0};
}

// One that is known to be whole and aligned: nothing else is compiled for it.
template <class T>
__device__ __forceinline__ TkMatrix<T> tk_aligned_matrix(const T* base, tk_index outer_stride, tk_index depth_stride) {
  return TkMatrix<T>{base, outer_stride, depth_stride, true};
}

// Place of the run of GROUP neighbours that is number `run` of a step.
template <int OUTER, int TILE_K, bool ALONG_K, int GROUP>
__device__ __forceinline__ void tk_place(int run, int& o, int& k) {
  o = ALONG_K ? run / (TILE_K / GROUP) : run % (OUTER / GROUP) * GROUP;
  k = ALONG_K ? run % (TILE_K / GROUP) * GROUP : run / (OUTER / GROUP);
}

// The epilogue: every sum of the tile that lies inside the result, neighbours along n by neighbours; the groups'
// sums are added in order. All values of a batch are computed before any is written, so that their loads overlap;
// with WHOLE tiles and batches no check stands between them. Else, where a thread's batch runs down a column, it takes
// its first element, which is inside if any is, in the place of those outside. Results holds what one element stores.
template <int TILE_M, int TILE_N, int THREADS, int GROUPS, int STRIDE, int BATCH, bool WHOLE, class Results, class Compute, class Write>
__device__ __forceinline__ void tk_tile_store(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, const float* sums,
                                              Compute compute, Write write) {
  static_assert(!WHOLE || TILE_M * TILE_N % (BATCH * THREADS) == 0, "whole batches");
  constexpr bool COLUMN = !WHOLE && THREADS % TILE_N == 0;
  const auto is_inside = [&](int e) { return e < TILE_M * TILE_N && m0 + e / TILE_N < m_end && n0 + e % TILE_N < n_end; };
#pragma unroll 1
  for (int first = (int)threadIdx.x; first < TILE_M * TILE_N; first += BATCH * THREADS) {
    if (COLUMN && !is_inside(first)) break;
    Results results[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      int e = first + u * THREADS;
      if (COLUMN) e = is_inside(e) ? e : first;
      if (WHOLE || COLUMN || is_inside(e)) {
        const float* own = sums + e / TILE_N * STRIDE + e % TILE_N;
        float total = *own;
#pragma unroll
        for (int group = 1; group < GROUPS; ++group) total = __fadd_rn(total, own[group * TILE_M * STRIDE]);
        compute(m0 + e / TILE_N, n0 + e % TILE_N, total, results[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const int e = first + u * THREADS;
      if (WHOLE || is_inside(e)) write(m0 + e / TILE_N, n0 + e % TILE_N, results[u]);
    }
  }
}
