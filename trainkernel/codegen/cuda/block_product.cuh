// A float32 product of operands near the block: out[m, n] = sum over k of a[m, k] b[k, n] for M x N x K in
// shared memory (or, where that is full, read in place).
//
// Thread t is lane t % LANES_N along n, then one of GROUPS_M along m, then one of GROUPS_K along the
// depth. A group adds up DEPTH steps of k in order by fused multiply-add, the groups' sums are added in
// order: the order is fixed by the sizes alone. A thread owns MICRO_M neighbouring rows and MICRO_N
// columns LANES_N apart, so that a warp reads b without bank conflicts and a at one place. Element
// (outer, k) of an operand is at outer * STRIDE + k along the depth, else at k * STRIDE + outer. STEP 4
// takes four steps of k at once, by 16-byte reads along either dim; it asks for aligned rows and a K that 4 divides.

template <int OUTER, int STRIDE, bool ALONG_K, int STEP, int COUNT, int SPREAD>
__device__ __forceinline__ void tk_block_read(float (&values)[STEP][COUNT], const float* from, int first, int k) {
  constexpr bool EXACT = OUTER % (COUNT * SPREAD) == 0;
  if constexpr (STEP == 4 && !ALONG_K && SPREAD == 1 && COUNT % 4 == 0 && STRIDE % 4 == 0 && EXACT) {
#pragma unroll
    for (int u = 0; u < STEP; ++u)
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        const float4 four = *(const float4*)(from + (k + u) * STRIDE + first + i);
        values[u][i] = four.x;
        values[u][i + 1] = four.y;
        values[u][i + 2] = four.z;
        values[u][i + 3] = four.w;
      }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      // Beyond the end: any value, which nobody keeps.
      const int outer = EXACT ? first + i * SPREAD : tk_min(first + i * SPREAD, OUTER - 1);
      if constexpr (ALONG_K && STEP == 4) {
        const float4 four = *(const float4*)(from + outer * STRIDE + k);
        values[0][i] = four.x;
        values[1][i] = four.y;
        values[2][i] = four.z;
        values[3][i] = four.w;
      } else {
#pragma unroll
        for (int u = 0; u < STEP; ++u) values[u][i] = from[ALONG_K ? outer * STRIDE + k + u : (k + u) * STRIDE + outer];
      }
    }
  }
}

// What follows the sums, in shared memory: element (row, column) of a group is at row * STRIDE + column, the groups
// are M * STRIDE apart and added in order. The epilogue gets every sum inside `rows` x `columns` once:
// compute(row, column, sum, results) and, after a batch of them so that their loads overlap,
// write(row, column, results). WHOLE promises that nothing lies outside.
template <int M, int N, int STRIDE, int GROUPS, int THREADS, int BATCH, bool WHOLE, class Results, class Compute, class Write>
__device__ __forceinline__ void tk_block_finish(const float* sums, int rows, int columns, Compute compute, Write write) {
  constexpr bool EVEN = M * N % (BATCH * THREADS) == 0;
#pragma unroll 1
  for (unsigned first = threadIdx.x; first < M * N; first += BATCH * THREADS) {
    Results results[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      unsigned e = first + u * THREADS;
      if (!EVEN && WHOLE) e = e < M * N ? e : first;  // again the thread's own: no branch between the loads
      const int row = (int)(e / N), column = (int)(e % N);
      if (!WHOLE && ((!EVEN && e >= M * N) || row >= rows || column >= columns)) continue;
      const float* own = sums + row * STRIDE + column;
      float total = *own;
#pragma unroll
      for (int group = 1; group < GROUPS; ++group) total = __fadd_rn(total, own[group * M * STRIDE]);
      compute(row, column, total, results[u]);
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const unsigned e = first + u * THREADS;
      const int row = (int)(e / N), column = (int)(e % N);
      if ((EVEN || e < M * N) && (WHOLE || (row < rows && column < columns))) write(row, column, results[u]);
    }
  }
}

// The product and its epilogue. With DIRECT and one group along the depth the epilogue works on registers, else by
// way of `sums` (GROUPS_K * M * N floats), so that all threads share it.
template <int M, int N, int K, int THREADS, int LANES_N, int GROUPS_M, int GROUPS_K, int MICRO_M, int MICRO_N, int DEPTH, int STEP,
          int STRIDE_A, bool A_ALONG_K, int STRIDE_B, bool B_ALONG_K, bool DIRECT, int BATCH, bool WHOLE, class Results, class Compute, class Write>
__device__ __forceinline__ void tk_block_product(const float* a, const float* b, float* sums, int rows, int columns,
                                                 Compute compute, Write write) {
  static_assert(LANES_N * GROUPS_M * GROUPS_K <= THREADS && (GROUPS_K - 1) * DEPTH < K && GROUPS_K * DEPTH >= K, "threads");
  static_assert(STEP == 1 || (K % STEP == 0 && DEPTH % STEP == 0), "whole steps");
  const int lane = (int)threadIdx.x % LANES_N, group_m = (int)threadIdx.x / LANES_N % GROUPS_M;
  const int group_k = (int)threadIdx.x / (LANES_N * GROUPS_M);
  constexpr bool STORE = DIRECT && GROUPS_K == 1, EXACT = M % MICRO_M == 0 && N % (LANES_N * MICRO_N) == 0;
  if (group_k < GROUPS_K) {
    const int k_begin = group_k * DEPTH, k_end = tk_min(k_begin + DEPTH, K);
#pragma unroll 1
    for (int m = group_m * MICRO_M; m < M; m += GROUPS_M * MICRO_M) {
#pragma unroll 1
      for (int n = lane; n < N; n += LANES_N * MICRO_N) {
        float total[MICRO_M][MICRO_N] = {};
#pragma unroll 1
        for (int k = k_begin; k < k_end; k += STEP) {
          float values_a[STEP][MICRO_M], values_b[STEP][MICRO_N];
          tk_block_read<M, STRIDE_A, A_ALONG_K, STEP, MICRO_M, 1>(values_a, a, m, k);
          tk_block_read<N, STRIDE_B, B_ALONG_K, STEP, MICRO_N, LANES_N>(values_b, b, n, k);
#pragma unroll
          for (int u = 0; u < STEP; ++u)
#pragma unroll
            for (int i = 0; i < MICRO_M; ++i)
#pragma unroll
              for (int j = 0; j < MICRO_N; ++j) total[i][j] = __fmaf_rn(values_a[u][i], values_b[u][j], total[i][j]);
        }
#pragma unroll
        for (int i = 0; i < MICRO_M; ++i)
#pragma unroll
          for (int j = 0; j < MICRO_N; ++j) {
            const int row = m + i, column = n + j * LANES_N;
            if (!EXACT && (row >= M || column >= N)) continue;
            if constexpr (STORE) {
              if (!WHOLE && (row >= rows || column >= columns)) continue;
              Results results;
              compute(row, column, total[i][j], results);
              write(row, column, results);
            } else {
              sums[(group_k * M + row) * N + column] = total[i][j];
            }
          }
      }
    }
  }
  if constexpr (!STORE) {
    __syncthreads();  // the groups' sums are complete
    tk_block_finish<M, N, N, GROUPS_K, THREADS, BATCH, WHOLE, Results>(sums, rows, columns, compute, write);
  }
}

// A fused operand, evaluated once: load(outer, k).
template <int OUTER, int DEPTH, int THREADS, int STRIDE, bool ALONG_K, class Load>
__device__ __forceinline__ void tk_block_fill(float* to, Load load) {
#pragma unroll 1
  for (unsigned e = threadIdx.x; e < OUTER * DEPTH; e += THREADS) {
    const int outer = (int)(ALONG_K ? e / DEPTH : e % OUTER), k = (int)(ALONG_K ? e % DEPTH : e / OUTER);
    to[ALONG_K ? outer * STRIDE + k : k * STRIDE + outer] = load(outer, k);
  }
}
