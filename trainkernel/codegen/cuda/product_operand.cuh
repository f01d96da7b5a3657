// Operands and results of product tiles.

// A plain view of a matrix in memory: element (outer, k) for a it is (m, k), for b it is (n, k).
// `vector` promises that four neighbours along the contiguous dimension are whole and aligned.
template <class T>
struct TkMatrix {
  const T* base;
  tk_index outer_stride, depth_stride;
  bool vector;
};

template <class T>
__device__ __forceinline__ TkMatrix<T> tk_matrix(const T* base, tk_index outer_stride, tk_index depth_stride, bool vector) {
  return TkMatrix<T>{base, outer_stride, depth_stride, vector && (unsigned long long)base % (4 * sizeof(T)) == 0};
}

__device__ __forceinline__ void tk_load_four(float (&values)[4], const float* from) {
  float4 four = *(const float4*)from;
  values[0] = four.x;
  values[1] = four.y;
  values[2] = four.z;
  values[3] = four.w;
}
__device__ __forceinline__ void tk_load_four(float (&values)[4], const tk_bfloat16* from) {
  uint2 four = *(const uint2*)from;
  values[0] = tk_bfloat16_bits_to_float((unsigned short)four.x);
  values[1] = tk_bfloat16_bits_to_float((unsigned short)(four.x >> 16));
  values[2] = tk_bfloat16_bits_to_float((unsigned short)four.y);
  values[3] = tk_bfloat16_bits_to_float((unsigned short)(four.y >> 16));
}
__device__ __forceinline__ void tk_load_four(float (&values)[4], const tk_float16* from) {
  uint2 four = *(const uint2*)from;
  values[0] = tk_float16_bits_to_float((unsigned short)four.x);
  values[1] = tk_float16_bits_to_float((unsigned short)(four.x >> 16));
  values[2] = tk_float16_bits_to_float((unsigned short)four.y);
  values[3] = tk_float16_bits_to_float((unsigned short)(four.y >> 16));
}
__device__ __forceinline__ void tk_load_four(float (&values)[4], const tk_bool* from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = tk_value(from[i]);
}

// Runs of four elements of a plain view along its contiguous dimension; zero outside.
template <class T, bool ALONG_K>
struct TkRuns {
  TkMatrix<T> matrix;

  __device__ __forceinline__ void run(float (&values)[4], tk_index o, tk_index o_end, tk_index k, tk_index k_end) const {
    const T* from = matrix.base + o * matrix.outer_stride + k * matrix.depth_stride;
    if (matrix.vector) {
      if (o < o_end && k < k_end) {
        tk_load_four(values, from);
      } else {
        values[0] = values[1] = values[2] = values[3] = 0.0f;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bool inside = ALONG_K ? o < o_end && k + i < k_end : o + i < o_end && k < k_end;
      values[i] = inside ? tk_value(from[i * (ALONG_K ? matrix.depth_stride : matrix.outer_stride)]) : 0.0f;
    }
  }
};

// The epilogue: every sum of the tile that lies inside the result, neighbours along n by neighbours.
template <int TILE_M, int TILE_N, int THREADS, int STRIDE, class Store>
__device__ __forceinline__ void tk_tile_store(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, const float* shared,
                                              Store store) {
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < TILE_M * TILE_N; e += THREADS) {
    tk_index m = m0 + e / TILE_N, n = n0 + e % TILE_N;
    if (m < m_end && n < n_end) store(m, n, shared[e / TILE_N * STRIDE + e % TILE_N]);
  }
}
