// A float32 product tile: out[m, n] = sum over k of a[m, k] b[k, n], by fused multiply-add.
//
// One block computes TILE_M x TILE_N outputs in steps of TILE_K. While one step is multiplied, the
// next is on its way into the other of two shared-memory buffers: plain operands by cp.async, fused
// ones through registers. A thread owns MICRO_M x MICRO_N sums. The threads are GROUPS groups, each of
// which adds up its part of every step in the order of k; so a thread has more sums, and multiplies a
// loaded value more often. The groups' sums go through shared memory to the epilogue, which adds them
// in order and whose stores are coalesced along n.

template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int GROUPS, int SKEW, bool A_ALONG_K, bool B_ALONG_K>
struct TkTile {
  static constexpr int OUTPUTS = TILE_M * TILE_N * GROUPS >= THREADS ? TILE_M * TILE_N * GROUPS / THREADS : 1;
  static constexpr int MICRO_N = OUTPUTS >= 4 ? 4 : OUTPUTS;
  static constexpr int MICRO_M = OUTPUTS / MICRO_N;
  static constexpr int THREADS_M = TILE_M / MICRO_M;
  static constexpr int THREADS_N = TILE_N / MICRO_N;
  static constexpr int WORKERS = THREADS_M * THREADS_N;
  static constexpr int LOW_M = THREADS_M % 2 == 0 ? 2 : 1;
  static constexpr int STRIDE_A = (A_ALONG_K ? TILE_K : TILE_M) + SKEW;
  static constexpr int STRIDE_B = (B_ALONG_K ? TILE_K : TILE_N) + SKEW;
  static constexpr int STRIDE_SUMS = TILE_N + (TILE_N % 32 == 0 ? 16 : SKEW);
  static constexpr int FLOATS_A = STRIDE_A * (A_ALONG_K ? TILE_M : TILE_K);
  static constexpr int FLOATS_B = STRIDE_B * (B_ALONG_K ? TILE_N : TILE_K);
  static constexpr int UNROLLED = OUTPUTS >= 16 ? 1 : 2;
  static_assert(MICRO_M * MICRO_N == OUTPUTS && TILE_N % MICRO_N == 0 && TILE_M % MICRO_M == 0, "micro tile");
  static_assert(SKEW % 4 == 0 && TILE_M % 4 == 0 && TILE_N % 4 == 0 && TILE_K % 4 == 0, "128-bit accesses");
  static_assert(WORKERS * GROUPS <= THREADS, "a thread per micro tile of each group");
};

// Start one step of a plain operand, in runs of GROUP neighbours along its contiguous dim; it has arrived after
// tk_cp_async_wait and a block barrier. A thread's runs of four lie ROWS rows apart wherever that comes out even, so
// that they differ by constants.
template <int OUTER, int TILE_K, int THREADS, int STRIDE, bool ALONG_K, int GROUP>
__device__ __forceinline__ void tk_tile_copy(float* shared, tk_index o0, tk_index o_end, tk_index k0, tk_index k_end,
                                             const TkMatrix<float>& matrix) {
  constexpr int RUNS = OUTER * TILE_K / GROUP, RUNS_PER_ROW = (ALONG_K ? TILE_K : OUTER) / GROUP;
  constexpr int TURNS = (RUNS + THREADS - 1) / THREADS, ROWS = THREADS / RUNS_PER_ROW, UNROLLED = TURNS < 8 ? TURNS : 8;
  int o, k;
  if constexpr (GROUP > 1 && THREADS % RUNS_PER_ROW == 0) {
    tk_place<OUTER, TILE_K, ALONG_K, GROUP>((int)threadIdx.x, o, k);
    const float* from = matrix.base + (o0 + o) * matrix.outer_stride + (k0 + k) * matrix.depth_stride;
    float* to = shared + (ALONG_K ? o * STRIDE + k : k * STRIDE + o);
    const tk_index distance = ROWS * (ALONG_K ? matrix.outer_stride : matrix.depth_stride);
    const tk_index left_o = o_end - o0 - o, left_k = k_end - k0 - k;
    const tk_index rows = ALONG_K ? (left_k > 0 ? left_o : 0) : left_o > 0 ? left_k : 0;  // inside, from the first on
#pragma unroll UNROLLED
    for (int i = 0; i < TURNS; ++i, from += distance)
      if (RUNS % THREADS == 0 || i * THREADS + (int)threadIdx.x < RUNS)
        tk_cp_async_inside<4 * GROUP>(to + i * ROWS * STRIDE, from, i * ROWS < rows);
  } else {
#pragma unroll 1
    for (int run = (int)threadIdx.x; run < RUNS; run += THREADS) {
      tk_place<OUTER, TILE_K, ALONG_K, GROUP>(run, o, k);
      tk_cp_async_inside<4 * GROUP>(shared + (ALONG_K ? o * STRIDE + k : k * STRIDE + o),
                                    matrix.base + (o0 + o) * matrix.outer_stride + (k0 + k) * matrix.depth_stride,
                                    o0 + o < o_end && k0 + k < k_end);
    }
  }
}
template <int OUTER, int TILE_K, int THREADS, int STRIDE, bool ALONG_K>
__device__ __forceinline__ void tk_tile_fill(float* shared, tk_index o0, tk_index o_end, tk_index k0, tk_index k_end,
                                             const TkMatrix<float>& matrix) {
  if (matrix.vector)
    tk_tile_copy<OUTER, TILE_K, THREADS, STRIDE, ALONG_K, 4>(shared, o0, o_end, k0, k_end, matrix);
  else
    tk_tile_copy<OUTER, TILE_K, THREADS, STRIDE, ALONG_K, 1>(shared, o0, o_end, k0, k_end, matrix);
}

// One step of a fused operand: load(o, k) is evaluated for four elements at a time.
template <int OUTER, int TILE_K, int THREADS, int STRIDE, bool ALONG_K, class Load>
__device__ __forceinline__ void tk_tile_fill(float* shared, tk_index o0, tk_index o_end, tk_index k0, tk_index k_end,
                                             const Load& load) {
#pragma unroll 1
  for (int first = (int)threadIdx.x; first < OUTER * TILE_K; first += 4 * THREADS) {
    float values[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      int o, k;
      tk_place<OUTER, TILE_K, ALONG_K, 1>(first + u * THREADS, o, k);
      values[u] = first + u * THREADS < OUTER * TILE_K && o0 + o < o_end && k0 + k < k_end ? load(o0 + o, k0 + k) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      int o, k;
      tk_place<OUTER, TILE_K, ALONG_K, 1>(first + u * THREADS, o, k);
      if (first + u * THREADS < OUTER * TILE_K) shared[ALONG_K ? o * STRIDE + k : k * STRIDE + o] = values[u];
    }
  }
}

// A thread's COUNT rows (or columns) of an operand for four steps of k.
template <int COUNT, int SPREAD, int STRIDE, bool ALONG_K>
__device__ __forceinline__ void tk_tile_read(float (&values)[4][COUNT], const float* shared, int thread, int k) {
  if constexpr (ALONG_K) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float4 four = *(const float4*)(shared + (thread + i * SPREAD) * STRIDE + k);
      values[0][i] = four.x;
      values[1][i] = four.y;
      values[2][i] = four.z;
      values[3][i] = four.w;
    }
  } else {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const float* from = shared + (k + u) * STRIDE + thread * COUNT;
      if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
          float4 four = *(const float4*)(from + i);
          values[u][i] = four.x;
          values[u][i + 1] = four.y;
          values[u][i + 2] = four.z;
          values[u][i + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[u][i] = from[i];
      }
    }
  }
}

// Operands are TkMatrix<float> or functions: a(m, k), b(n, k). Returns where the sums are: m, n of a group at
// m * STRIDE_SUMS + n, the groups TILE_M * STRIDE_SUMS apart. They take the place of the steps: the piece before
// must have been read.
template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int GROUPS, int SKEW, bool A_ALONG_K, bool B_ALONG_K, class A, class B>
__device__ __forceinline__ const float* tk_tile_sums(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                                     tk_index k_end, float* shared, const A& a, const B& b) {
  using Tile = TkTile<TILE_M, TILE_N, TILE_K, THREADS, GROUPS, SKEW, A_ALONG_K, B_ALONG_K>;
  const int worker = (int)threadIdx.x % Tile::WORKERS, group = (int)threadIdx.x / Tile::WORKERS;
  // Neighbouring lanes are two along m, then those along n: so a load of 16 bytes takes two cycles of shared memory.
  const int thread_m = worker % Tile::LOW_M + worker / (Tile::LOW_M * Tile::THREADS_N) * Tile::LOW_M;
  const int thread_n = worker / Tile::LOW_M % Tile::THREADS_N;
  const bool works = Tile::WORKERS * GROUPS == THREADS || group < GROUPS;
  float sums[Tile::MICRO_M][Tile::MICRO_N] = {};

  auto fill = [&](tk_index k0, float* step) {
    tk_tile_fill<TILE_M, TILE_K, THREADS, Tile::STRIDE_A, A_ALONG_K>(step, m0, m_end, k0, k_end, a);
    tk_tile_fill<TILE_N, TILE_K, THREADS, Tile::STRIDE_B, B_ALONG_K>(step + Tile::FLOATS_A, n0, n_end, k0, k_end, b);
  };

  // Step k0: start it, then multiply the step before it, which lies in the other buffer.
  float *started = shared, *arrived = shared + Tile::FLOATS_A + Tile::FLOATS_B;
#pragma unroll 1
  for (tk_index k0 = k_begin; k0 < k_end + TILE_K; k0 += TILE_K) {
    if (k0 < k_end) fill(k0, started);
    tk_cp_async_commit();
    if (k0 > k_begin) {
      tk_cp_async_wait<1>();
      __syncthreads();  // the step before has arrived, for every thread
      if (works) {
        const int depth = (int)tk_min(k_end - (k0 - TILE_K), (tk_index)TILE_K);
        const int own = (depth + 4 * GROUPS - 1) / (4 * GROUPS) * 4, end = tk_min((group + 1) * own, depth);
#pragma unroll Tile::UNROLLED
        for (int k = group * own; k < end; k += 4) {
          float rows[4][Tile::MICRO_M], columns[4][Tile::MICRO_N];
          tk_tile_read<Tile::MICRO_M, Tile::THREADS_M, Tile::STRIDE_A, A_ALONG_K>(rows, arrived, thread_m, k);
          tk_tile_read<Tile::MICRO_N, Tile::THREADS_N, Tile::STRIDE_B, B_ALONG_K>(columns, arrived + Tile::FLOATS_A, thread_n, k);
#pragma unroll
          for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int i = 0; i < Tile::MICRO_M; ++i)
#pragma unroll
              for (int j = 0; j < Tile::MICRO_N; ++j) sums[i][j] = __fmaf_rn(rows[u][i], columns[u][j], sums[i][j]);
        }
      }
      __syncthreads();  // the step before has been read: the next fill, or the sums, take its buffer
    }
    float* swap = started;
    started = arrived;
    arrived = swap;
  }
  if (works) {
    float* own = shared + group * TILE_M * Tile::STRIDE_SUMS;
#pragma unroll
    for (int i = 0; i < Tile::MICRO_M; ++i)
#pragma unroll
      for (int j = 0; j < Tile::MICRO_N; ++j) {
        int m = A_ALONG_K ? thread_m + i * Tile::THREADS_M : thread_m * Tile::MICRO_M + i;
        int n = B_ALONG_K ? thread_n + j * Tile::THREADS_N : thread_n * Tile::MICRO_N + j;
        own[m * Tile::STRIDE_SUMS + n] = sums[i][j];
      }
  }
  __syncthreads();  // the sums are complete
  return shared;
}

// Of plain operands: no task's own code is in it, so that tasks of the same tile share it.
template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int GROUPS, int SKEW, bool A_ALONG_K, bool B_ALONG_K>
__device__ TK_MATRIX_SUMS_IS const float* tk_matrix_sums(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                                         tk_index k_end, float* shared, TkMatrix<float> a, TkMatrix<float> b) {
  return tk_tile_sums<TILE_M, TILE_N, TILE_K, THREADS, GROUPS, SKEW, A_ALONG_K, B_ALONG_K>(m0, n0, m_end, n_end, k_begin, k_end,
                                                                                           shared, a, b);
}
