// A float32 product tile: out[m, n] = sum over k in order of a[m, k] b[k, n], by fused multiply-add.
//
// One block computes TILE_M x TILE_N outputs. Each step of TILE_K goes from memory to registers,
// from there to one of two shared-memory buffers, and is multiplied while the next step's loads are
// under way. A thread owns MICRO_M x MICRO_N outputs. The order of the sum is that of k alone, so
// tile sizes and thread counts do not change a bit.

template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW>
struct TkTile {
  static constexpr int OUTPUTS = TILE_M * TILE_N >= THREADS ? TILE_M * TILE_N / THREADS : 1;
  static constexpr int MICRO_N = OUTPUTS >= 4 ? 4 : OUTPUTS;
  static constexpr int MICRO_M = OUTPUTS / MICRO_N;
  static constexpr int THREADS_N = TILE_N / MICRO_N;
  static constexpr int WORKERS = THREADS_N * (TILE_M / MICRO_M);
  static constexpr int STRIDE_A = TILE_M + SKEW;
  static constexpr int STRIDE_B = TILE_N + SKEW;
  static constexpr int STEP_FLOATS = TILE_K * (STRIDE_A + STRIDE_B);
  static constexpr int LOADS_A = (TILE_M * TILE_K + THREADS - 1) / THREADS;
  static constexpr int LOADS_B = (TILE_N * TILE_K + THREADS - 1) / THREADS;
  static_assert(MICRO_M * MICRO_N == OUTPUTS && TILE_N % MICRO_N == 0 && TILE_M % MICRO_M == 0, "micro tile");
  static_assert(SKEW % 4 == 0 && TILE_M % 4 == 0 && TILE_N % 4 == 0, "128-bit shared-memory reads");
  static_assert(WORKERS <= THREADS, "a thread per micro tile");
};

// COUNT neighbouring floats from shared memory, by the widest reads that fit.
template <int COUNT>
__device__ __forceinline__ void tk_read_shared(float (&values)[COUNT], const float* shared) {
  if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      float4 four = *(const float4*)(shared + i);
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = shared[i];
  }
}

template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K, class LoadA, class LoadB,
          class Store>
__device__ __forceinline__ void tk_tile_product(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                                tk_index k_end, float* shared, LoadA load_a, LoadB load_b, Store store) {
  using Tile = TkTile<TILE_M, TILE_N, TILE_K, THREADS, SKEW>;
  const int thread = (int)threadIdx.x;
  const int row = thread / Tile::THREADS_N * Tile::MICRO_M, column = thread % Tile::THREADS_N * Tile::MICRO_N;
  float sums[Tile::MICRO_M][Tile::MICRO_N] = {};
  float next_a[Tile::LOADS_A], next_b[Tile::LOADS_B];

  auto place_a = [&](int j, int& m, int& k) {
    int e = thread + j * THREADS;
    m = A_ALONG_K ? e / TILE_K : e % TILE_M;
    k = A_ALONG_K ? e % TILE_K : e / TILE_M;
    return TILE_M * TILE_K % THREADS == 0 || e < TILE_M * TILE_K;
  };
  auto place_b = [&](int j, int& n, int& k) {
    int e = thread + j * THREADS;
    n = B_ALONG_K ? e / TILE_K : e % TILE_N;
    k = B_ALONG_K ? e % TILE_K : e / TILE_N;
    return TILE_N * TILE_K % THREADS == 0 || e < TILE_N * TILE_K;
  };
  auto fetch = [&](tk_index k0) {
#pragma unroll
    for (int j = 0; j < Tile::LOADS_A; ++j) {
      int m, k;
      bool inside = place_a(j, m, k) && m0 + m < m_end && k0 + k < k_end;
      next_a[j] = inside ? load_a(m0 + m, k0 + k) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < Tile::LOADS_B; ++j) {
      int n, k;
      bool inside = place_b(j, n, k) && n0 + n < n_end && k0 + k < k_end;
      next_b[j] = inside ? load_b(k0 + k, n0 + n) : 0.0f;
    }
  };

  if (k_begin < k_end) fetch(k_begin);
  __syncthreads();  // shared is free: the piece before may still read it
  int buffer = 0;
  for (tk_index k0 = k_begin; k0 < k_end; k0 += TILE_K) {
    float* a = shared + buffer * Tile::STEP_FLOATS;
    float* b = a + TILE_K * Tile::STRIDE_A;
#pragma unroll
    for (int j = 0; j < Tile::LOADS_A; ++j) {
      int m, k;
      if (place_a(j, m, k)) a[k * Tile::STRIDE_A + m] = next_a[j];
    }
#pragma unroll
    for (int j = 0; j < Tile::LOADS_B; ++j) {
      int n, k;
      if (place_b(j, n, k)) b[k * Tile::STRIDE_B + n] = next_b[j];
    }
    __syncthreads();  // the step is complete; the other buffer's readers have all arrived here
    if (k0 + TILE_K < k_end) fetch(k0 + TILE_K);
    if (Tile::WORKERS == THREADS || thread < Tile::WORKERS) {
#pragma unroll 8
      for (int k = 0; k < TILE_K; ++k) {
        float rows[Tile::MICRO_M], columns[Tile::MICRO_N];
        tk_read_shared(rows, a + k * Tile::STRIDE_A + row);
        tk_read_shared(columns, b + k * Tile::STRIDE_B + column);
#pragma unroll
        for (int i = 0; i < Tile::MICRO_M; ++i)
#pragma unroll
          for (int j = 0; j < Tile::MICRO_N; ++j) sums[i][j] = __fmaf_rn(rows[i], columns[j], sums[i][j]);
      }
    }
    buffer ^= 1;
  }
  if (Tile::WORKERS < THREADS && thread >= Tile::WORKERS) return;
#pragma unroll
  for (int i = 0; i < Tile::MICRO_M; ++i)
#pragma unroll
    for (int j = 0; j < Tile::MICRO_N; ++j)
      if (m0 + row + i < m_end && n0 + column + j < n_end) store(m0 + row + i, n0 + column + j, sums[i][j]);
}
