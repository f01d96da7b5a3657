// A tensor-core product tile for float16 or bfloat16 operands, float32 sums.
//
// One block computes TILE_M x TILE_N outputs by mma.m16n8k16. Both operands lie in shared memory
// with the depth innermost, a[m][k] and b[n][k], each row padded by SKEW elements so that ldmatrix
// meets no bank conflict; elements travel in pairs along the depth. Two buffers, as in the float32
// tile. A warp owns neighbouring 16 x 8 units of one row of units. Depth beyond the end is zero.

struct TkFloat16Format {
  static __device__ __forceinline__ unsigned bits(float value) { return tk_float_to_float16_bits(value); }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    tk_mma_m16n8k16_float16(d, a, b);
  }
};

struct TkBfloat16Format {
  static __device__ __forceinline__ unsigned bits(float value) { return tk_float_to_bfloat16_bits(value); }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    tk_mma_m16n8k16_bfloat16(d, a, b);
  }
};

template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW>
struct TkTensorTile {
  static constexpr int WARPS = THREADS / 32;
  static constexpr int UNITS_N = TILE_N / 8;
  static constexpr int UNITS = TILE_M / 16 * UNITS_N;
  static constexpr int UNITS_PER_WARP = UNITS >= WARPS ? UNITS / WARPS : 1;
  static constexpr int STRIDE = TILE_K + SKEW;
  static constexpr int STEP_ELEMENTS = STRIDE * (TILE_M + TILE_N);
  static constexpr int PAIRS_A = (TILE_M * TILE_K / 2 + THREADS - 1) / THREADS;
  static constexpr int PAIRS_B = (TILE_N * TILE_K / 2 + THREADS - 1) / THREADS;
  static_assert(TILE_M % 16 == 0 && TILE_N % 8 == 0 && TILE_K % 16 == 0, "whole mma tiles");
  static_assert(UNITS < WARPS || UNITS % WARPS == 0, "units are dealt evenly");
  static_assert(SKEW % 8 == 0, "ldmatrix rows are 16-byte aligned");
};

template <class Format, int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K,
          class LoadA, class LoadB, class Store>
__device__ __forceinline__ void tk_tensor_product(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                                  tk_index k_end, unsigned short* shared, LoadA load_a, LoadB load_b,
                                                  Store store) {
  using Tile = TkTensorTile<TILE_M, TILE_N, TILE_K, THREADS, SKEW>;
  const int thread = (int)threadIdx.x, lane = thread % 32, first_unit = thread / 32 * Tile::UNITS_PER_WARP;
  float sums[Tile::UNITS_PER_WARP][4] = {};
  unsigned next_a[Tile::PAIRS_A], next_b[Tile::PAIRS_B];

  auto place = [&](int j, int rows, bool along_k, int& r, int& k) {
    int e = thread + j * THREADS;
    r = along_k ? e / (TILE_K / 2) : e % rows;
    k = 2 * (along_k ? e % (TILE_K / 2) : e / rows);
    return e < rows * TILE_K / 2;
  };
  auto pair = [&](bool inside, tk_index k, auto element) {
    float low = inside && k < k_end ? element(k) : 0.0f;
    float high = inside && k + 1 < k_end ? element(k + 1) : 0.0f;
    return Format::bits(low) | Format::bits(high) << 16;
  };
  auto fetch = [&](tk_index k0) {
#pragma unroll
    for (int j = 0; j < Tile::PAIRS_A; ++j) {
      int m, k;
      bool inside = place(j, TILE_M, A_ALONG_K, m, k) && m0 + m < m_end;
      next_a[j] = pair(inside, k0 + k, [&](tk_index at) { return load_a(m0 + m, at); });
    }
#pragma unroll
    for (int j = 0; j < Tile::PAIRS_B; ++j) {
      int n, k;
      bool inside = place(j, TILE_N, B_ALONG_K, n, k) && n0 + n < n_end;
      next_b[j] = pair(inside, k0 + k, [&](tk_index at) { return load_b(at, n0 + n); });
    }
  };

  if (k_begin < k_end) fetch(k_begin);
  __syncthreads();  // shared is free: the piece before may still read it
  int buffer = 0;
  for (tk_index k0 = k_begin; k0 < k_end; k0 += TILE_K) {
    unsigned short* a = shared + buffer * Tile::STEP_ELEMENTS;
    unsigned short* b = a + TILE_M * Tile::STRIDE;
#pragma unroll
    for (int j = 0; j < Tile::PAIRS_A; ++j) {
      int m, k;
      if (place(j, TILE_M, A_ALONG_K, m, k)) *(unsigned*)(a + m * Tile::STRIDE + k) = next_a[j];
    }
#pragma unroll
    for (int j = 0; j < Tile::PAIRS_B; ++j) {
      int n, k;
      if (place(j, TILE_N, B_ALONG_K, n, k)) *(unsigned*)(b + n * Tile::STRIDE + k) = next_b[j];
    }
    __syncthreads();  // the step is complete; the other buffer's readers have all arrived here
    if (k0 + TILE_K < k_end) fetch(k0 + TILE_K);
    if (first_unit < Tile::UNITS) {
#pragma unroll
      for (int k = 0; k < TILE_K; k += 16) {
#pragma unroll
        for (int u = 0; u < Tile::UNITS_PER_WARP; ++u) {
          int unit_m = (first_unit + u) / Tile::UNITS_N, unit_n = (first_unit + u) % Tile::UNITS_N;
          unsigned rows[4], columns[2];
          tk_ldmatrix_x4(rows, a + (unit_m * 16 + lane % 16) * Tile::STRIDE + k + lane / 16 * 8);
          tk_ldmatrix_x2(columns, b + (unit_n * 8 + lane % 8) * Tile::STRIDE + k + lane / 8 % 2 * 8);
          Format::mma(sums[u], rows, columns);
        }
      }
    }
    buffer ^= 1;
  }
  if (first_unit >= Tile::UNITS) return;
#pragma unroll
  for (int u = 0; u < Tile::UNITS_PER_WARP; ++u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tk_index m = m0 + (first_unit + u) / Tile::UNITS_N * 16 + lane / 4 + i / 2 * 8;
      tk_index n = n0 + (first_unit + u) % Tile::UNITS_N * 8 + lane % 4 * 2 + i % 2;
      if (m < m_end && n < n_end) store(m, n, sums[u][i]);
    }
  }
}
