// A tensor-core product tile for float16 or bfloat16 operands, float32 sums.
//
// One block computes TILE_M x TILE_N outputs by mma.m16n8k16. Both operands lie in shared memory
// with the depth innermost, a[m][k] and b[n][k], each row padded by SKEW elements so that ldmatrix
// meets no bank conflict. Two buffers, and sums that go through shared memory to the epilogue, as in
// the float32 tile. A warp owns neighbouring 16 x 8 units. Depth beyond the end is zero.

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
  static constexpr int SUM_STRIDE = TILE_N + 4;
  static_assert(TILE_M % 16 == 0 && TILE_N % 8 == 0 && TILE_K % 16 == 0, "whole mma tiles");
  static_assert(UNITS < WARPS || UNITS % WARPS == 0, "units are dealt evenly");
  static_assert(SKEW % 8 == 0, "ldmatrix rows are 16-byte aligned");
};

// One operand's share of a step: OUTER x TILE_K elements, dealt to the threads in runs of GROUP
// neighbours along the operand's contiguous dimension, kept as bits of the format.
template <class Format, int OUTER, int TILE_K, int THREADS, int STRIDE, bool ALONG_K, int GROUP>
struct TkTensorStep {
  static constexpr int RUNS = OUTER * TILE_K / GROUP;
  static constexpr int PER_THREAD = (RUNS + THREADS - 1) / THREADS;
  unsigned bits[PER_THREAD][GROUP / 2];

  static __device__ __forceinline__ bool place(int j, int& o, int& k) {
    int run = (int)threadIdx.x + j * THREADS;
    if constexpr (GROUP == 2) {  // a pair along the depth, whatever is contiguous
      o = ALONG_K ? run / (TILE_K / 2) : run % OUTER;
      k = 2 * (ALONG_K ? run % (TILE_K / 2) : run / OUTER);
    } else {
      o = ALONG_K ? run / (TILE_K / GROUP) : run % (OUTER / GROUP) * GROUP;
      k = ALONG_K ? run % (TILE_K / GROUP) * GROUP : run / (OUTER / GROUP);
    }
    return RUNS % THREADS == 0 || run < RUNS;
  }

  template <class Load>
  __device__ __forceinline__ void fetch(tk_index o0, tk_index o_end, tk_index k0, tk_index k_end, Load load) {
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
      int o, k;
      bool inside = place(j, o, k);
      float values[GROUP];
      if constexpr (GROUP == 2) {
        inside = inside && o0 + o < o_end;
        values[0] = inside && k0 + k < k_end ? load(o0 + o, k0 + k) : 0.0f;
        values[1] = inside && k0 + k + 1 < k_end ? load(o0 + o, k0 + k + 1) : 0.0f;
      } else {
        load.run(values, inside ? o0 + o : o_end, o_end, k0 + k, k_end);
      }
#pragma unroll
      for (int i = 0; i < GROUP; i += 2) bits[j][i / 2] = Format::bits(values[i]) | Format::bits(values[i + 1]) << 16;
    }
  }

  __device__ __forceinline__ void publish(unsigned short* shared) const {
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
      int o, k;
      if (!place(j, o, k)) continue;
#pragma unroll
      for (int i = 0; i < GROUP; i += 2) {
        if constexpr (GROUP == 2 || ALONG_K) {
          *(unsigned*)(shared + o * STRIDE + k + i) = bits[j][i / 2];
        } else {
          shared[(o + i) * STRIDE + k] = (unsigned short)bits[j][i / 2];
          shared[(o + i + 1) * STRIDE + k] = (unsigned short)(bits[j][i / 2] >> 16);
        }
      }
    }
  }
};

// load_a(m, k) and load_b(n, k) give elements; the sums end in ((float*)shared)[m * SUM_STRIDE + n].
template <class Format, int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K, int GROUP_A,
          int GROUP_B, class LoadA, class LoadB>
__device__ __forceinline__ void tk_tensor_sums(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                               tk_index k_end, unsigned short* shared, LoadA load_a, LoadB load_b) {
  using Tile = TkTensorTile<TILE_M, TILE_N, TILE_K, THREADS, SKEW>;
  const int thread = (int)threadIdx.x, lane = thread % 32, first_unit = thread / 32 * Tile::UNITS_PER_WARP;
  const bool works = first_unit < Tile::UNITS;
  float sums[Tile::UNITS_PER_WARP][4] = {};
  TkTensorStep<Format, TILE_M, TILE_K, THREADS, Tile::STRIDE, A_ALONG_K, GROUP_A> next_a;
  TkTensorStep<Format, TILE_N, TILE_K, THREADS, Tile::STRIDE, B_ALONG_K, GROUP_B> next_b;

  // Step k0: fetch it, multiply the step before it, then publish it in the other buffer.
  int buffer = 0;
  for (tk_index k0 = k_begin; k0 < k_end + TILE_K; k0 += TILE_K) {
    unsigned short* step = shared + buffer * Tile::STEP_ELEMENTS;
    buffer ^= 1;
    if (k0 < k_end) {
      next_a.fetch(m0, m_end, k0, k_end, load_a);
      next_b.fetch(n0, n_end, k0, k_end, load_b);
    }
    if (k0 > k_begin && works) {
      const unsigned short* a = shared + buffer * Tile::STEP_ELEMENTS;
      const unsigned short* b = a + TILE_M * Tile::STRIDE;
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
    if (k0 >= k_end) break;
    if (k0 == k_begin) __syncthreads();  // shared is free: the piece before may still read it
    next_a.publish(step);
    next_b.publish(step + TILE_M * Tile::STRIDE);
    __syncthreads();  // the step is complete, and the buffer before it has been read
  }
  __syncthreads();  // the last step has been read
  if (works) {
#pragma unroll
    for (int u = 0; u < Tile::UNITS_PER_WARP; ++u) {
      int m = (first_unit + u) / Tile::UNITS_N * 16 + lane / 4, n = (first_unit + u) % Tile::UNITS_N * 8 + lane % 4 * 2;
      float* low = (float*)shared + m * Tile::SUM_STRIDE + n;
      *(float2*)low = make_float2(sums[u][0], sums[u][1]);
      *(float2*)(low + 8 * Tile::SUM_STRIDE) = make_float2(sums[u][2], sums[u][3]);
    }
  }
  __syncthreads();  // the sums are complete
}

// The same for operands that are plain views of memory, rounded to the format on the way: one
// function serves every product of these tiles.
template <class Format, int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K, class A,
          class B>
__device__ __noinline__ void tk_tensor_sums_plain(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                                  tk_index k_end, unsigned short* shared, TkMatrix<A> a, TkMatrix<B> b) {
  tk_tensor_sums<Format, TILE_M, TILE_N, TILE_K, THREADS, SKEW, A_ALONG_K, B_ALONG_K, 4, 4>(
      m0, n0, m_end, n_end, k_begin, k_end, shared, TkRuns<A, A_ALONG_K>{a}, TkRuns<B, B_ALONG_K>{b});
}
