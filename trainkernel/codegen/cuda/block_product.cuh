// A float32 product of operands near the block: out[m, n] = sum over k of a[m, k] b[k, n] for M x N x K in
// shared memory (or, where that is full, read in place).
//
// A warp has WARP_M x WARP_N x LANES_K lanes and one tile of the product at a time; lane (m, n, k) has MICRO_M
// neighbouring rows and MICRO_N neighbouring columns of it, and every LANES_K-th STEP of the depth, which it adds up
// in order by fused multiply-add. The lanes along the depth then add up their sums by halves: the order is fixed by
// the sizes alone. Neighbouring lanes are two along n, then those along m: a 16-byte load takes two cycles of shared
// memory where lane i shares its address with lane i ^ 1 or with lane i ^ 2, else four. Element (outer, k) of an
// operand is at outer * STRIDE + k along the depth, else at k * STRIDE + outer. STEP 4 takes four steps of k at once,
// by reads of up to 16 bytes along either dim; it asks for aligned rows and a K that 4 divides.

template <int OUTER, int STRIDE, bool ALONG_K, int STEP, int COUNT, bool EXACT>
__device__ __forceinline__ void tk_block_read(float (&values)[STEP][COUNT], const float* from, int first, int k) {
  if constexpr (STEP == 4 && !ALONG_K && COUNT % 2 == 0 && STRIDE % (COUNT < 4 ? 2 : 4) == 0 && EXACT) {
#pragma unroll
    for (int u = 0; u < STEP; ++u) {
      const float* row = from + (k + u) * STRIDE + first;
      if constexpr (COUNT == 2) {
        const float2 two = *(const float2*)row;
        values[u][0] = two.x;
        values[u][1] = two.y;
      } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
          const float4 four = *(const float4*)(row + i);
          values[u][i] = four.x;
          values[u][i + 1] = four.y;
          values[u][i + 2] = four.z;
          values[u][i + 3] = four.w;
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      // Beyond the end: any value, which nobody keeps.
      const int outer = EXACT ? first + i : tk_min(first + i, OUTER - 1);
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
  constexpr bool EVEN = M * N % (BATCH * THREADS) == 0, COLUMN = !WHOLE && THREADS % N == 0;
  const auto is_inside = [&](unsigned e) {
    return (EVEN || e < M * N) && (WHOLE || ((int)(e / N) < rows && (int)(e % N) < columns));
  };
#pragma unroll 1
  for (unsigned first = threadIdx.x; first < M * N; first += BATCH * THREADS) {
    if (COLUMN && !is_inside(first)) break;  // nor are those below it
    Results results[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      unsigned e = first + u * THREADS;
      if (WHOLE || COLUMN) e = is_inside(e) ? e : first;  // again the thread's own: no branch between the loads
      if (!WHOLE && !COLUMN && !is_inside(e)) continue;
      const float* own = sums + e / N * STRIDE + e % N;
      float total = *own;
#pragma unroll
      for (int group = 1; group < GROUPS; ++group) total = __fadd_rn(total, own[group * M * STRIDE]);
      compute((int)(e / N), (int)(e % N), total, results[u]);
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const unsigned e = first + u * THREADS;
      if (is_inside(e)) write((int)(e / N), (int)(e % N), results[u]);
    }
  }
}

// Adds up the sums of lanes SPREAD apart: each HALF of them keeps half of the COUNT sums, as long as there are two.
// Returns the number of the first sum that the lane keeps. Sizes that the compiler knows keep the sums in registers.
template <int COUNT, int HALF, int SPREAD, int SUMS>
__device__ __forceinline__ int tk_block_merge(float (&total)[SUMS], int lane_k) {
  if constexpr (HALF == 0) {
    return 0;
  } else {
    constexpr int KEPT = COUNT > 1 ? COUNT / 2 : 1, OTHER = COUNT > 1 ? KEPT : 0;
    const bool upper = (lane_k & HALF) != 0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const float own = upper ? total[i + OTHER] : total[i], given = upper ? total[i] : total[i + OTHER];
      total[i] = __fadd_rn(own, __shfl_xor_sync(0xffffffffu, given, HALF * SPREAD));
    }
    return (upper ? OTHER : 0) + tk_block_merge<KEPT, HALF / 2, SPREAD>(total, lane_k);
  }
}

// The product and its epilogue, which works on registers with DIRECT, BATCH results of a lane at a time; else by way of
// `sums` (M * N floats), so that all threads share it. Warp number `warp` takes every (THREADS / 32)-th tile from
// that one on.
template <int M, int N, int K, int THREADS, int WARP_N, int LANES_K, int MICRO_M, int MICRO_N, int STEP, int STRIDE_A, bool A_ALONG_K,
          int STRIDE_B, bool B_ALONG_K, bool DIRECT, int BATCH, bool WHOLE, class Results, class Compute, class Write>
__device__ __forceinline__ void tk_block_product(const float* a, const float* b, float* sums, int warp, int rows, int columns,
                                                 Compute compute, Write write) {
  static_assert(K % STEP == 0, "whole steps");
  constexpr int WARP_M = 32 / (WARP_N * LANES_K), LOW_N = WARP_N > 1 ? 2 : 1, SUMS = MICRO_M * MICRO_N;
  constexpr int TILE_M = WARP_M * MICRO_M, TILE_N = WARP_N * MICRO_N;
  constexpr int TILES_N = (N + TILE_N - 1) / TILE_N, TILES = (M + TILE_M - 1) / TILE_M * TILES_N;
  constexpr bool EXACT_M = M % TILE_M == 0, EXACT_N = N % TILE_N == 0, EXACT_K = K % (LANES_K * STEP) == 0;
  constexpr int STEPS = (K + LANES_K * STEP - 1) / (LANES_K * STEP), TOGETHER = SUMS * STEP <= 32 ? 2 : 1;
  const int lane = (int)threadIdx.x % 32, lane_k = lane / (WARP_M * WARP_N);
  const int lane_m = lane / LOW_N % WARP_M, lane_n = lane % LOW_N + lane / (LOW_N * WARP_M) % (WARP_N / LOW_N) * LOW_N;
  // Every warp takes part in the shuffles: the compiler does not know that a warp's lanes have the same tile.
#pragma unroll 1
  for (int first_tile = 0; first_tile < TILES; first_tile += THREADS / 32) {
    const int tile = first_tile + warp;
    const bool inside = TILES % (THREADS / 32) == 0 || tile < TILES;
    const int m = tile / TILES_N * TILE_M + lane_m * MICRO_M, n = tile % TILES_N * TILE_N + lane_n * MICRO_N;
    float total[SUMS] = {};
    if (inside) {
#pragma unroll TOGETHER
      for (int step = 0; step < STEPS; ++step) {
        const int k = (step * LANES_K + lane_k) * STEP;
        if (!EXACT_K && k >= K) break;
        float values_a[STEP][MICRO_M], values_b[STEP][MICRO_N];
        tk_block_read<M, STRIDE_A, A_ALONG_K, STEP, MICRO_M, EXACT_M>(values_a, a, m, k);
        tk_block_read<N, STRIDE_B, B_ALONG_K, STEP, MICRO_N, EXACT_N>(values_b, b, n, k);
#pragma unroll
        for (int u = 0; u < STEP; ++u)
#pragma unroll
          for (int i = 0; i < SUMS; ++i) total[i] = __fmaf_rn(values_a[u][i / MICRO_N], values_b[u][i % MICRO_N], total[i]);
      }
    }
    const int first = tk_block_merge<SUMS, LANES_K / 2, WARP_M * WARP_N>(total, lane_k);
    constexpr int KEPT = SUMS > LANES_K ? SUMS / LANES_K : 1, COPIES = LANES_K > SUMS ? LANES_K / SUMS : 1;
    constexpr int FLIGHT = DIRECT ? BATCH : 1;
    if (!inside || lane_k % COPIES != 0) continue;
    const auto is_mine = [&](int row, int column) {
      return (EXACT_M || row < M) && (EXACT_N || column < N) && (WHOLE || !DIRECT || (row < rows && column < columns));
    };
#pragma unroll
    for (int i = 0; i < KEPT; i += FLIGHT) {
      Results results[FLIGHT];
#pragma unroll
      for (int u = 0; u < FLIGHT; ++u) {
        const int row = m + (first + i + u) / MICRO_N, column = n + (first + i + u) % MICRO_N;
        if (!is_mine(row, column)) continue;
        if constexpr (DIRECT) {
          compute(row, column, total[i + u], results[u]);
        } else {
          sums[row * N + column] = total[i + u];
        }
      }
#pragma unroll
      for (int u = 0; DIRECT && u < FLIGHT; ++u) {
        const int row = m + (first + i + u) / MICRO_N, column = n + (first + i + u) % MICRO_N;
        if (is_mine(row, column)) write(row, column, results[u]);
      }
    }
  }
  if constexpr (!DIRECT) {
    __syncthreads();  // the sums are complete
    tk_block_finish<M, N, N, 1, THREADS, BATCH, WHOLE, Results>(sums, rows, columns, compute, write);
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
