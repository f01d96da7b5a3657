// A float32 product tile: out[m, n] = sum over k in order of a[m, k] b[k, n], by fused multiply-add.
//
// One block computes TILE_M x TILE_N outputs. Each step of TILE_K goes from memory to registers,
// from there to one of two shared-memory buffers, and is multiplied while the next step's loads are
// under way. A thread owns MICRO_M x MICRO_N sums. The order of the sum is that of k alone, so tile
// sizes and thread counts do not change a bit. The finished sums go through shared memory to the
// epilogue, whose stores are then coalesced along n.

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
  static_assert(MICRO_M * MICRO_N == OUTPUTS && TILE_N % MICRO_N == 0 && TILE_M % MICRO_M == 0, "micro tile");
  static_assert(SKEW % 4 == 0 && TILE_M % 4 == 0 && TILE_N % 4 == 0 && TILE_K % 4 == 0, "128-bit accesses");
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

// One operand's share of a step, in registers: OUTER x TILE_K elements, dealt to the threads in runs
// of GROUP neighbours along the operand's contiguous dimension. Shared memory has the depth outermost.
template <int OUTER, int TILE_K, int THREADS, int STRIDE, bool ALONG_K, int GROUP>
struct TkTileStep {
  static constexpr int RUNS = OUTER * TILE_K / GROUP;
  static constexpr int PER_THREAD = (RUNS + THREADS - 1) / THREADS;
  float values[PER_THREAD][GROUP];

  static __device__ __forceinline__ bool place(int j, int& o, int& k) {
    int run = (int)threadIdx.x + j * THREADS;
    o = ALONG_K ? run / (TILE_K / GROUP) : run % (OUTER / GROUP) * GROUP;
    k = ALONG_K ? run % (TILE_K / GROUP) * GROUP : run / (OUTER / GROUP);
    return RUNS % THREADS == 0 || run < RUNS;
  }

  template <class Load>
  __device__ __forceinline__ void fetch(tk_index o0, tk_index o_end, tk_index k0, tk_index k_end, Load load) {
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
      int o, k;
      bool inside = place(j, o, k);
      if constexpr (GROUP == 1) {
        values[j][0] = inside && o0 + o < o_end && k0 + k < k_end ? load(o0 + o, k0 + k) : 0.0f;
      } else {
        load.run(values[j], inside ? o0 + o : o_end, o_end, k0 + k, k_end);
      }
    }
  }

  __device__ __forceinline__ void publish(float* shared) const {
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
      int o, k;
      if (!place(j, o, k)) continue;
      if constexpr (GROUP == 4 && !ALONG_K) {
        *(float4*)(shared + k * STRIDE + o) = make_float4(values[j][0], values[j][1], values[j][2], values[j][3]);
      } else {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) shared[(k + i) * STRIDE + o] = values[j][i];
      }
    }
  }
};

// load_a(m, k) and load_b(n, k) give elements; the sums end in shared[m * (TILE_N + SKEW) + n].
template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K, int GROUP_A, int GROUP_B,
          class LoadA, class LoadB>
__device__ __forceinline__ void tk_tile_sums(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                             tk_index k_end, float* shared, LoadA load_a, LoadB load_b) {
  using Tile = TkTile<TILE_M, TILE_N, TILE_K, THREADS, SKEW>;
  const int thread = (int)threadIdx.x;
  const int row = thread / Tile::THREADS_N * Tile::MICRO_M, column = thread % Tile::THREADS_N * Tile::MICRO_N;
  const bool works = Tile::WORKERS == THREADS || thread < Tile::WORKERS;
  float sums[Tile::MICRO_M][Tile::MICRO_N] = {};
  TkTileStep<TILE_M, TILE_K, THREADS, Tile::STRIDE_A, A_ALONG_K, GROUP_A> next_a;
  TkTileStep<TILE_N, TILE_K, THREADS, Tile::STRIDE_B, B_ALONG_K, GROUP_B> next_b;

  // Step k0: fetch it, multiply the step before it, then publish it in the other buffer.
  int buffer = 0;
  for (tk_index k0 = k_begin; k0 < k_end + TILE_K; k0 += TILE_K) {
    float* step = shared + buffer * Tile::STEP_FLOATS;
    buffer ^= 1;
    if (k0 < k_end) {
      next_a.fetch(m0, m_end, k0, k_end, load_a);
      next_b.fetch(n0, n_end, k0, k_end, load_b);
    }
    if (k0 > k_begin && works) {
      const float* a = shared + buffer * Tile::STEP_FLOATS;
      const float* b = a + TILE_K * Tile::STRIDE_A;
#pragma unroll 4
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
    if (k0 >= k_end) break;
    if (k0 == k_begin) __syncthreads();  // shared is free: the piece before may still read it
    next_a.publish(step);
    next_b.publish(step + TILE_K * Tile::STRIDE_A);
    __syncthreads();  // the step is complete, and the buffer before it has been read
  }
  __syncthreads();  // the last step has been read
  if (works) {
#pragma unroll
    for (int i = 0; i < Tile::MICRO_M; ++i)
#pragma unroll
      for (int j = 0; j < Tile::MICRO_N; ++j) shared[(row + i) * Tile::STRIDE_B + column + j] = sums[i][j];
  }
  __syncthreads();  // the sums are complete
}

// The same for operands that are plain views of memory: one function serves every product of these
// tiles. Reads four elements at a time where `vector_*` says that every run is whole and aligned.
template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K, class A, class B>
__device__ __noinline__ void tk_tile_sums_plain(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                                tk_index k_end, float* shared, TkMatrix<A> a, TkMatrix<B> b) {
  tk_tile_sums<TILE_M, TILE_N, TILE_K, THREADS, SKEW, A_ALONG_K, B_ALONG_K, 4, 4>(
      m0, n0, m_end, n_end, k_begin, k_end, shared, TkRuns<A, A_ALONG_K>{a}, TkRuns<B, B_ALONG_K>{b});
}
