// The sums of a product on tensor cores, of operands near the block: sums[group][i][j] is the sum over the
// group's part of the depth of a[i, k] b[j, k].
//
// A warp has 16 ROWS x 8 UNITS sums at a time; warp w takes tiles w % 2^log_m along i, then w / 2^log_m % 2^log_n along j,
// then a group along the depth, so the order of all sums is fixed by the arguments alone. Sizes are arguments, not
// template parameters: one function serves all products of a kernel.

// An operand in shared memory, its rows `row_bytes` apart.
struct TkNear {
  TkSharedAddress at;
  int row_bytes;
};
template <class T>
__device__ __forceinline__ TkNear tk_near(const T* from, int stride) {
  return TkNear{tk_shared_address(from), stride * (int)sizeof(T)};
}

struct TkTensorWork {
  int m, n, depth, last_depth, groups, log_m, log_n, stride_m, stride_n, stride_group;
};

// float32 operands, whose upper 19 bits TF32 numbers are; tensor cores ignore the lower 13.
struct TkTf32 {
  static constexpr int DEPTH = 8;
  static __device__ __forceinline__ unsigned load(TkSharedAddress from) {
    const float value = tk_load_shared<float>(from);
    // A NaN, which the carry would make a number, stays one.
    return value == value ? (__float_as_uint(value) + 0x1000u) & 0xffffe000u : 0x7fffffffu;
  }
  // Element (outer, k), for the lane's own outer and k.
  template <bool ALONG_K>
  static __device__ __forceinline__ TkSharedAddress place(const TkNear& operand, int outer, int k) {
    return operand.at + (ALONG_K ? outer * operand.row_bytes + k * 4 : k * operand.row_bytes + outer * 4);
  }
  template <int ROWS, int UNITS, bool A_ALONG_K, bool B_ALONG_K>
  struct Step {
    static_assert(ROWS == 1, "16 rows");
    TkSharedAddress rows[2], columns[UNITS];
    int bytes_a, bytes_b;  // from one k to the next
    __device__ __forceinline__ Step(const TkNear& a, const TkNear& b, int m, int m_end, int n, int n_end, int k)
        : bytes_a(A_ALONG_K ? 4 : a.row_bytes), bytes_b(B_ALONG_K ? 4 : b.row_bytes) {
      // Beyond the end: any value, which nobody keeps.
      const int row = (int)(threadIdx.x % 32 / 4), quad = (int)(threadIdx.x % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) rows[i] = place<A_ALONG_K>(a, tk_min(m + 8 * i + row, m_end - 1), k + quad);
#pragma unroll
      for (int u = 0; u < UNITS; ++u) columns[u] = place<B_ALONG_K>(b, tk_min(n + 8 * u + row, n_end - 1), k + quad);
    }
    __device__ __forceinline__ void add(float (&total)[ROWS][UNITS][4]) {
      unsigned values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = load(rows[i % 2] + i / 2 * 4 * bytes_a);
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        const unsigned pair[2] = {load(columns[u]), load(columns[u] + 4 * bytes_b)};
        tk_mma_m16n8k8_tf32(total[0][u], values, pair);
        columns[u] += DEPTH * bytes_b;
      }
      rows[0] += DEPTH * bytes_a;
      rows[1] += DEPTH * bytes_a;
    }
  };
};

// 16-bit operands: whole runs of 8 elements along a row, aligned to 16 bytes, and whole steps of k.
template <bool BFLOAT>
struct TkSixteen {
  static constexpr int DEPTH = 16;
  template <int ROWS, int UNITS, bool A_ALONG_K, bool B_ALONG_K>
  struct Step {
    static_assert(UNITS % 2 == 0, "pairs of units");
    TkSharedAddress rows[ROWS], columns[UNITS / 2];
    int bytes_a, bytes_b;  // from one step to the next
    __device__ __forceinline__ Step(const TkNear& a, const TkNear& b, int m, int m_end, int n, int n_end, int k)
        : bytes_a(DEPTH * (A_ALONG_K ? 2 : a.row_bytes)), bytes_b(DEPTH * (B_ALONG_K ? 2 : b.row_bytes)) {
      // A lane gives the address of one run of 8 elements. Beyond the end: any, which nobody keeps.
      const int eighth = (int)(threadIdx.x % 8), first = (int)(threadIdx.x / 8 % 2 * 8), second = (int)(threadIdx.x / 16 % 2 * 8);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int own = m + 16 * r + first;
        rows[r] = A_ALONG_K ? a.at + tk_min(own + eighth, m_end - 1) * a.row_bytes + (k + second) * 2
                            : a.at + (k + second + eighth) * a.row_bytes + (own < m_end ? own : m) * 2;
      }
#pragma unroll
      for (int u = 0; u < UNITS / 2; ++u) {
        const int own = n + 16 * u + second;
        columns[u] = B_ALONG_K ? b.at + tk_min(own + eighth, n_end - 1) * b.row_bytes + (k + first) * 2
                               : b.at + (k + first + eighth) * b.row_bytes + (own < n_end ? own : n) * 2;
      }
    }
    __device__ __forceinline__ void add(float (&total)[ROWS][UNITS][4]) {
      unsigned values[ROWS][4];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if constexpr (A_ALONG_K) tk_ldmatrix_x4(values[r], rows[r]);
        else tk_ldmatrix_x4_trans(values[r], rows[r]);
        rows[r] += bytes_a;
      }
#pragma unroll
      for (int u = 0; u < UNITS / 2; ++u) {
        unsigned four[4];
        if constexpr (B_ALONG_K) tk_ldmatrix_x4(four, columns[u]);
        else tk_ldmatrix_x4_trans(four, columns[u]);
        columns[u] += bytes_b;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned pair[2] = {four[2 * i], four[2 * i + 1]};
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            if constexpr (BFLOAT) tk_mma_m16n8k16_bfloat16(total[r][2 * u + i], values[r], pair);
            else tk_mma_m16n8k16_float16(total[r][2 * u + i], values[r], pair);
          }
        }
      }
    }
  };
};

template <class Format, int ROWS, int UNITS, bool A_ALONG_K, bool B_ALONG_K>
__device__ __noinline__ void tk_tensor_sums(TkNear a, TkNear b, float* sums, TkTensorWork work) {
  const int warp = (int)(threadIdx.x / 32), row = (int)(threadIdx.x % 32 / 4), column = (int)(threadIdx.x % 4 * 2);
  const int group = warp >> (work.log_m + work.log_n);
  if (group >= work.groups) return;
  const int begin = group * work.depth, depth = group == work.groups - 1 ? work.last_depth : work.depth;
  const TkSharedAddress out = tk_shared_address(sums + group * work.stride_group);
#pragma unroll 1
  for (int m = (warp & ((1 << work.log_m) - 1)) * 16 * ROWS; m < work.m; m += 16 * ROWS << work.log_m) {
#pragma unroll 1
    for (int n = (warp >> work.log_m & ((1 << work.log_n) - 1)) * 8 * UNITS; n < work.n; n += 8 * UNITS << work.log_n) {
      typename Format::template Step<ROWS, UNITS, A_ALONG_K, B_ALONG_K> step(a, b, m, work.m, n, work.n, begin);
      float total[ROWS][UNITS][4] = {};
#pragma unroll 1
      for (int k = 0; k < depth; k += Format::DEPTH) step.add(total);
#pragma unroll
      for (int u = 0; u < ROWS * UNITS; ++u)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own_m = m + 16 * (u / UNITS) + row + i / 2 * 8, own_n = n + 8 * (u % UNITS) + column + i % 2;
          if (own_m < work.m && own_n < work.n)
            tk_store_shared(out + (own_m * work.stride_m + own_n * work.stride_n) * 4, total[u / UNITS][u % UNITS][i]);
        }
    }
  }
}

// Two neighbours, each rounded to 16 bits.
__device__ __forceinline__ unsigned tk_pair(tk_float16, float low, float high) { return tk_floats_to_float16_bits(low, high); }
__device__ __forceinline__ unsigned tk_pair(tk_bfloat16, float low, float high) {
  return tk_floats_to_bfloat16_bits(low, high);
}

// To an even place, of memory that is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void tk_store_pair(T* to, float low, float high) {
  *(unsigned*)to = tk_pair(T(), low, high);
}
__device__ __forceinline__ void tk_store_pair(float* to, float low, float high) { *(float2*)to = make_float2(low, high); }

// The product and its epilogue on registers: compute(row, column, sum, results) for two neighbours of a row, then
// write(row, column, results, results of the next), all of a warp's tile first, so that what it reads for a column is
// read once. WHOLE promises whole tiles with nothing outside.
template <class Format, int ROWS, int UNITS, bool A_ALONG_K, bool B_ALONG_K, int M, int N, int DEPTH, int LOG_M, int LOG_N, bool WHOLE,
          class Results, class Compute, class Write>
__device__ __forceinline__ void tk_tensor_product(const TkNear& a, const TkNear& b, int rows, int columns, Compute compute,
                                                  Write write) {
  const int warp = (int)(threadIdx.x / 32), lane_row = (int)(threadIdx.x % 32 / 4), lane_column = (int)(threadIdx.x % 4 * 2);
  if (warp >> (LOG_M + LOG_N)) return;
#pragma unroll 1
  for (int m = (warp & ((1 << LOG_M) - 1)) * 16 * ROWS; m < M; m += 16 * ROWS << LOG_M) {
#pragma unroll 1
    for (int n = (warp >> LOG_M) * 8 * UNITS; n < N; n += 8 * UNITS << LOG_N) {
      typename Format::template Step<ROWS, UNITS, A_ALONG_K, B_ALONG_K> step(a, b, m, M, n, N, 0);
      float total[ROWS][UNITS][4] = {};
      Results results[2 * ROWS][UNITS][2];
#pragma unroll 1
      for (int k = 0; k < DEPTH; k += Format::DEPTH) step.add(total);
#pragma unroll
      for (int i = 0; i < 2 * ROWS * UNITS; ++i) {
        const int half = i / UNITS, u = i % UNITS, row = m + lane_row + 8 * half, column = n + 8 * u + lane_column;
        if (!WHOLE && (row >= rows || column >= columns)) continue;
        compute(row, column, total[half / 2][u][half % 2 * 2], results[half][u][0]);
        compute(row, column + 1, total[half / 2][u][half % 2 * 2 + 1], results[half][u][1]);
      }
#pragma unroll
      for (int i = 0; i < 2 * ROWS * UNITS; ++i) {
        const int half = i / UNITS, u = i % UNITS, row = m + lane_row + 8 * half, column = n + 8 * u + lane_column;
        if (WHOLE || (row < rows && column < columns)) write(row, column, results[half][u][0], results[half][u][1]);
      }
    }
  }
}

// A fused operand, evaluated once into rows of 16-bit numbers: load(outer, k), and zeros up to ROWS x COLUMNS.
template <int OUTER, int DEPTH, int ROWS, int COLUMNS, int THREADS, int STRIDE, bool ALONG_K, class T, class Load>
__device__ __forceinline__ void tk_block_fill_rows(T* to, Load load) {
  constexpr bool WHOLE = (ALONG_K ? ROWS : COLUMNS) == OUTER && (ALONG_K ? COLUMNS : ROWS) == DEPTH;
#pragma unroll 1
  for (unsigned e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
    const int row = (int)(e / COLUMNS), column = (int)(e % COLUMNS), outer = ALONG_K ? row : column, k = ALONG_K ? column : row;
    tk_store(to[row * STRIDE + column], WHOLE || (outer < OUTER && k < DEPTH) ? load(outer, k) : 0.0f);
  }
}

// The same for a plain matrix, whose rows of whole runs of four are `row_stride` apart.
template <int ROWS, int COLUMNS, int THREADS, int STRIDE, class T, class Source>
__device__ __forceinline__ void tk_block_fill_matrix(T* to, const Source* from, tk_index row_stride) {
  constexpr int RUNS = ROWS * COLUMNS / 4, BATCH = RUNS >= 4 * THREADS ? 4 : RUNS >= 2 * THREADS ? 2 : 1;
  const bool vector = (unsigned long long)from % (4 * sizeof(Source)) == 0;
#pragma unroll 1
  for (unsigned first = threadIdx.x; first < RUNS; first += BATCH * THREADS) {
    float values[BATCH][4];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const unsigned run = tk_min(first + u * THREADS, RUNS - 1);
      const Source* four = from + run / (COLUMNS / 4) * row_stride + run % (COLUMNS / 4) * 4;
      if (vector) {
        tk_load_four(values[u], four);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[u][i] = tk_value(four[i]);
      }
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const unsigned run = first + u * THREADS;
      if (run >= RUNS) continue;
      const uint2 four = make_uint2(tk_pair(T(), values[u][0], values[u][1]), tk_pair(T(), values[u][2], values[u][3]));
      *(uint2*)(to + run / (COLUMNS / 4) * STRIDE + run % (COLUMNS / 4) * 4) = four;
    }
  }
}
