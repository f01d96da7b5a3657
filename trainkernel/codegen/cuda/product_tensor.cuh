// A tensor-core product tile for float16 or bfloat16 operands, float32 sums.
//
// One block computes TILE_M x TILE_N outputs by mma.m16n8k16. Both operands lie in shared memory
// with the depth innermost, a[m][k] and b[n][k], each row padded by SKEW elements so that ldmatrix
// meets no bank conflict; what is not of the format yet is rounded to it on the way. Two buffers, and
// sums that go through shared memory to the epilogue, as in the float32 tile. A warp owns
// neighbouring 16 x 8 units. Depth beyond the end is zero.

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
  static constexpr int STRIDE_SUMS = TILE_N + 4;
  static_assert(TILE_M % 16 == 0 && TILE_N % 8 == 0 && TILE_K % 16 == 0, "whole mma tiles");
  static_assert(UNITS < WARPS || UNITS % WARPS == 0, "units are dealt evenly");
  static_assert(SKEW % 8 == 0, "ldmatrix rows are 16-byte aligned");
};

__device__ __forceinline__ void tk_load_four(float (&values)[4], const float* from) {
  float4 four = *(const float4*)from;
  values[0] = four.x;
  values[1] = four.y;
  values[2] = four.z;
  values[3] = four.w;
}
template <class T>
__device__ __forceinline__ void tk_load_four(float (&values)[4], const T* from) {
  uint2 four = *(const uint2*)from;
  values[0] = tk_value(T{(unsigned short)four.x});
  values[1] = tk_value(T{(unsigned short)(four.x >> 16)});
  values[2] = tk_value(T{(unsigned short)four.y});
  values[3] = tk_value(T{(unsigned short)(four.y >> 16)});
}

// One step of a plain operand: runs of four neighbours, four runs of a thread under way at a time.
template <class Format, int OUTER, int TILE_K, int THREADS, int STRIDE, bool ALONG_K, class T>
__device__ __forceinline__ void tk_tensor_fill(unsigned short* shared, tk_index o0, tk_index o_end, tk_index k0,
                                               tk_index k_end, const TkMatrix<T>& matrix) {
  constexpr int RUNS = OUTER * TILE_K / 4, BATCH = RUNS >= 4 * THREADS ? 4 : RUNS >= 2 * THREADS ? 2 : 1;
#pragma unroll 1
  for (int first = (int)threadIdx.x; first < RUNS; first += BATCH * THREADS) {
    float values[BATCH][4];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      int o, k;
      tk_place<OUTER, TILE_K, ALONG_K, 4>(first + u * THREADS, o, k);
      const T* from = matrix.base + (o0 + o) * matrix.outer_stride + (k0 + k) * matrix.depth_stride;
      const bool mine = first + u * THREADS < RUNS;
      values[u][0] = values[u][1] = values[u][2] = values[u][3] = 0.0f;
      if (matrix.vector) {
        if (mine && o0 + o < o_end && k0 + k < k_end) tk_load_four(values[u], from);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          bool inside = ALONG_K ? o0 + o < o_end && k0 + k + i < k_end : o0 + o + i < o_end && k0 + k < k_end;
          if (mine && inside) values[u][i] = tk_value(from[i * (ALONG_K ? matrix.depth_stride : matrix.outer_stride)]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      int o, k;
      tk_place<OUTER, TILE_K, ALONG_K, 4>(first + u * THREADS, o, k);
      if (first + u * THREADS >= RUNS) continue;
      if constexpr (ALONG_K) {
        uint2 four;
        four.x = Format::bits(values[u][0]) | Format::bits(values[u][1]) << 16;
        four.y = Format::bits(values[u][2]) | Format::bits(values[u][3]) << 16;
        *(uint2*)(shared + o * STRIDE + k) = four;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) shared[(o + i) * STRIDE + k] = (unsigned short)Format::bits(values[u][i]);
      }
    }
  }
}

// One step of a fused operand: load(o, k) is evaluated for two pairs along the depth at a time.
template <class Format, int OUTER, int TILE_K, int THREADS, int STRIDE, bool ALONG_K, class Load>
__device__ __forceinline__ void tk_tensor_fill(unsigned short* shared, tk_index o0, tk_index o_end, tk_index k0,
                                               tk_index k_end, const Load& load) {
  constexpr int PAIRS = OUTER * TILE_K / 2;
#pragma unroll 1
  for (int first = (int)threadIdx.x; first < PAIRS; first += 2 * THREADS) {
    unsigned bits[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      int pair = first + u * THREADS, o = ALONG_K ? pair / (TILE_K / 2) : pair % OUTER;
      int k = 2 * (ALONG_K ? pair % (TILE_K / 2) : pair / OUTER);
      bool inside = pair < PAIRS && o0 + o < o_end;
      float low = inside && k0 + k < k_end ? load(o0 + o, k0 + k) : 0.0f;
      float high = inside && k0 + k + 1 < k_end ? load(o0 + o, k0 + k + 1) : 0.0f;
      bits[u] = Format::bits(low) | Format::bits(high) << 16;
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      int pair = first + u * THREADS, o = ALONG_K ? pair / (TILE_K / 2) : pair % OUTER;
      int k = 2 * (ALONG_K ? pair % (TILE_K / 2) : pair / OUTER);
      if (pair < PAIRS) *(unsigned*)(shared + o * STRIDE + k) = bits[u];
    }
  }
}

// Operands are TkMatrix or functions: a(m, k), b(n, k). Returns where the sums are: m, n at
// m * STRIDE_SUMS + n.
template <class Format, int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K, class A,
          class B>
__device__ __forceinline__ const float* tk_tensor_sums(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end,
                                                       tk_index k_begin, tk_index k_end, unsigned short* shared, const A& a,
                                                       const B& b) {
  using Tile = TkTensorTile<TILE_M, TILE_N, TILE_K, THREADS, SKEW>;
  const int lane = (int)threadIdx.x % 32, first_unit = (int)threadIdx.x / 32 * Tile::UNITS_PER_WARP;
  const bool works = first_unit < Tile::UNITS;
  float sums[Tile::UNITS_PER_WARP][4] = {};

  // The piece before may still read its sums, which nobody writes before the first barrier here.
  float* finished = (float*)(shared + 2 * Tile::STEP_ELEMENTS);
  // Step k0: place it, then multiply the step before it, which lies in the other buffer.
  unsigned short *placed = shared, *ready = shared + Tile::STEP_ELEMENTS;
#pragma unroll 1
  for (tk_index k0 = k_begin; k0 < k_end + TILE_K; k0 += TILE_K) {
    if (k0 < k_end) {
      tk_tensor_fill<Format, TILE_M, TILE_K, THREADS, Tile::STRIDE, A_ALONG_K>(placed, m0, m_end, k0, k_end, a);
      tk_tensor_fill<Format, TILE_N, TILE_K, THREADS, Tile::STRIDE, B_ALONG_K>(placed + TILE_M * Tile::STRIDE, n0, n_end, k0,
                                                                               k_end, b);
    }
    if (k0 > k_begin && works) {
      const unsigned short* step_b = ready + TILE_M * Tile::STRIDE;
      const int depth = (int)tk_min(k_end - (k0 - TILE_K), (tk_index)TILE_K);
#pragma unroll 1
      for (int k = 0; k < depth; k += 16) {
#pragma unroll
        for (int u = 0; u < Tile::UNITS_PER_WARP; ++u) {
          int unit_m = (first_unit + u) / Tile::UNITS_N, unit_n = (first_unit + u) % Tile::UNITS_N;
          unsigned rows[4], columns[2];
          tk_ldmatrix_x4(rows, ready + (unit_m * 16 + lane % 16) * Tile::STRIDE + k + lane / 16 * 8);
          tk_ldmatrix_x2(columns, step_b + (unit_n * 8 + lane % 8) * Tile::STRIDE + k + lane / 8 % 2 * 8);
          Format::mma(sums[u], rows, columns);
        }
      }
    }
    if (k0 < k_end) __syncthreads();  // the step is complete, and the one before it has been read
    unsigned short* swap = placed;
    placed = ready;
    ready = swap;
  }
  if (works) {
#pragma unroll
    for (int u = 0; u < Tile::UNITS_PER_WARP; ++u) {
      int m = (first_unit + u) / Tile::UNITS_N * 16 + lane / 4, n = (first_unit + u) % Tile::UNITS_N * 8 + lane % 4 * 2;
      float* low = finished + m * Tile::STRIDE_SUMS + n;
      *(float2*)low = make_float2(sums[u][0], sums[u][1]);
      *(float2*)(low + 8 * Tile::STRIDE_SUMS) = make_float2(sums[u][2], sums[u][3]);
    }
  }
  __syncthreads();  // the sums are complete
  return finished;
}
