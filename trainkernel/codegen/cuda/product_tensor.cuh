// Operands of tensor-core products: 16-bit elements in shared memory.
//
// A step of an operand is OUTER x TILE_K elements, laid out as in device memory: along the depth, a
// row of TILE_K for each outer place; else a row of OUTER for each depth, which ldmatrix transposes.
// A Layout says where an element lies; runs of eight stay together. Operands of the format
// are copied in the background, 16 bytes at a time where rows are aligned to them; others go through
// registers and are rounded to the format on the way. Elements outside the operand are zero.

struct TkFloat16Format {
  typedef tk_float16 Element;
  static __device__ __forceinline__ unsigned bits(float low, float high) {
    return tk_floats_to_float16_bits(low, high);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    tk_mma_m16n8k16_float16(d, a, b);
  }
};

struct TkBfloat16Format {
  typedef tk_bfloat16 Element;
  static __device__ __forceinline__ unsigned bits(float low, float high) {
    return tk_floats_to_bfloat16_bits(low, high);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    tk_mma_m16n8k16_bfloat16(d, a, b);
  }
};

// Elements of a step in its buffer, rows of so many along the depth, or across it.
template <int STRIDE, bool ALONG_K>
struct TkPadded {
  static constexpr bool ALONG = ALONG_K;
  static __device__ __forceinline__ int place(int o, int k) { return ALONG_K ? o * STRIDE + k : k * STRIDE + o; }
  // Elements between places so many rows apart, whatever the row.
  static constexpr int ROW = STRIDE, ROWS = 1;
};

// Whether steps of an operand are copied in the background: it is a matrix of the format's elements.
template <class Operand, class Element>
struct TkIsCopied {
  static constexpr bool value = false;
};
template <class Element>
struct TkIsCopied<TkMatrix<Element>, Element> {
  static constexpr bool value = true;
};

// Start one step of a matrix of the format, in runs of eight; without aligned rows, element by element.
template <int OUTER, int TILE_K, int THREADS, class Layout, class T>
__device__ __forceinline__ void tk_tensor_copy(unsigned short* shared, tk_index o0, tk_index o_end, tk_index k0, tk_index k_end,
                                               const TkMatrix<T>& matrix) {
  constexpr int RUNS = OUTER * TILE_K / 8, RUNS_PER_ROW = (Layout::ALONG ? TILE_K : OUTER) / 8;
  constexpr int ROWS = THREADS / RUNS_PER_ROW;
  if (matrix.vector && RUNS % THREADS == 0 && THREADS % RUNS_PER_ROW == 0 && ROWS % Layout::ROWS == 0) {
    // The runs of a thread are ROWS rows apart. Zeros arrive for what is not inside of the operand.
    int o, k;
    tk_place<OUTER, TILE_K, Layout::ALONG, 8>((int)threadIdx.x, o, k);
    const T* from = matrix.base + (o0 + o) * matrix.outer_stride + (k0 + k) * matrix.depth_stride;
    const tk_index distance = ROWS * (Layout::ALONG ? matrix.outer_stride : matrix.depth_stride);
    unsigned short* to = shared + Layout::place(o, k);
    const auto copy = [&](bool whole) {
#pragma unroll
      for (int i = 0; i < RUNS / THREADS; ++i) {
        const int outer = o + (Layout::ALONG ? i * ROWS : 0), depth = k + (Layout::ALONG ? 0 : i * ROWS);
        const bool inside = whole || (o0 + outer < o_end && k0 + depth < k_end);
        tk_cp_async_inside<16>(to + i * ROWS * Layout::ROW, from + i * distance, inside);
      }
    };
    if (o0 + OUTER <= o_end && k0 + TILE_K <= k_end)
      copy(true);
    else
      copy(false);
    return;
  }
  if (matrix.vector) {
#pragma unroll 1
    for (int first = 0; first < RUNS; first += THREADS) {
      const int run = first + (int)threadIdx.x;
      if (RUNS % THREADS != 0 && run >= RUNS) break;
      int o, k;
      tk_place<OUTER, TILE_K, Layout::ALONG, 8>(run, o, k);
      unsigned short* to = shared + Layout::place(o, k);
      if (o0 + o < o_end && k0 + k < k_end)
        tk_cp_async_16(to, matrix.base + (o0 + o) * matrix.outer_stride + (k0 + k) * matrix.depth_stride);
      else
        *(uint4*)to = make_uint4(0, 0, 0, 0);
    }
    return;
  }
#pragma unroll 1
  for (int run = (int)threadIdx.x; run < RUNS; run += THREADS) {
    int o, k;
    tk_place<OUTER, TILE_K, Layout::ALONG, 8>(run, o, k);
    const T* from = matrix.base + (o0 + o) * matrix.outer_stride + (k0 + k) * matrix.depth_stride;
    const tk_index stride = Layout::ALONG ? matrix.depth_stride : matrix.outer_stride;
    // How many of the eight lie inside of the operand.
    const tk_index left = Layout::ALONG ? (o0 + o < o_end ? k_end - k0 - k : 0) : (k0 + k < k_end ? o_end - o0 - o : 0);
    unsigned bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = i < left ? from[i * stride].bits : 0;
    *(uint4*)(shared + Layout::place(o, k)) =
        make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6] | bits[7] << 16);
  }
}

// One step of a matrix of other elements: runs of four neighbours, four runs of a thread under way at a time.
template <class Format, int OUTER, int TILE_K, int THREADS, class Layout, class T>
__device__ __forceinline__ void tk_tensor_fill(unsigned short* shared, tk_index o0, tk_index o_end, tk_index k0,
                                               tk_index k_end, const TkMatrix<T>& matrix) {
  constexpr int RUNS = OUTER * TILE_K / 4, BATCH = RUNS >= 4 * THREADS ? 4 : RUNS >= 2 * THREADS ? 2 : 1;
#pragma unroll 1
  for (int first = (int)threadIdx.x; first < RUNS; first += BATCH * THREADS) {
    float values[BATCH][4];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      int o, k;
      tk_place<OUTER, TILE_K, Layout::ALONG, 4>(first + u * THREADS, o, k);
      const T* from = matrix.base + (o0 + o) * matrix.outer_stride + (k0 + k) * matrix.depth_stride;
      const bool mine = first + u * THREADS < RUNS;
      values[u][0] = values[u][1] = values[u][2] = values[u][3] = 0.0f;
      if (matrix.vector) {
        if (mine && o0 + o < o_end && k0 + k < k_end) tk_load_four(values[u], from);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          bool inside = Layout::ALONG ? o0 + o < o_end && k0 + k + i < k_end : o0 + o + i < o_end && k0 + k < k_end;
          if (mine && inside) values[u][i] = tk_value(from[i * (Layout::ALONG ? matrix.depth_stride : matrix.outer_stride)]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      int o, k;
      tk_place<OUTER, TILE_K, Layout::ALONG, 4>(first + u * THREADS, o, k);
      if (first + u * THREADS >= RUNS) continue;
      *(uint2*)(shared + Layout::place(o, k)) =
          make_uint2(Format::bits(values[u][0], values[u][1]), Format::bits(values[u][2], values[u][3]));
    }
  }
}

// One step of a fused operand: load(o, k) is evaluated for two pairs of neighbours at a time.
template <class Format, int OUTER, int TILE_K, int THREADS, class Layout, class Load>
__device__ __forceinline__ void tk_tensor_fill(unsigned short* shared, tk_index o0, tk_index o_end, tk_index k0,
                                               tk_index k_end, const Load& load) {
  constexpr int PAIRS = OUTER * TILE_K / 2;
#pragma unroll 1
  for (int first = (int)threadIdx.x; first < PAIRS; first += 2 * THREADS) {
    unsigned bits[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      int o, k;
      tk_place<OUTER, TILE_K, Layout::ALONG, 2>(first + u * THREADS, o, k);
      const bool inside = first + u * THREADS < PAIRS && o0 + o < o_end && k0 + k < k_end;
      const bool next = inside && (Layout::ALONG ? k0 + k + 1 < k_end : o0 + o + 1 < o_end);
      float low = inside ? load(o0 + o, k0 + k) : 0.0f;
      float high = next ? load(o0 + o + !Layout::ALONG, k0 + k + Layout::ALONG) : 0.0f;
      bits[u] = Format::bits(low, high);
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      int o, k;
      tk_place<OUTER, TILE_K, Layout::ALONG, 2>(first + u * THREADS, o, k);
      if (first + u * THREADS < PAIRS) *(unsigned*)(shared + Layout::place(o, k)) = bits[u];
    }
  }
}

// One step of any operand. A copied one has arrived after tk_cp_async_wait and a block barrier, others after the barrier.
template <class Format, int OUTER, int TILE_K, int THREADS, class Layout, class Operand>
__device__ __forceinline__ void tk_tensor_step(unsigned short* shared, tk_index o0, tk_index o_end, tk_index k0, tk_index k_end,
                                               const Operand& operand) {
  if constexpr (TkIsCopied<Operand, typename Format::Element>::value)
    tk_tensor_copy<OUTER, TILE_K, THREADS, Layout>(shared, o0, o_end, k0, k_end, operand);
  else
    tk_tensor_fill<Format, OUTER, TILE_K, THREADS, Layout>(shared, o0, o_end, k0, k_end, operand);
}
