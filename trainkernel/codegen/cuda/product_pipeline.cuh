// A tensor-core product tile for float16 or bfloat16 operands, float32 sums.
//
// One block computes TILE_M x TILE_N outputs by mma.m16n8k16 in steps of TILE_K. STAGES buffers in
// shared memory hold the step that is multiplied and those that are on their way. A warp owns a
// rectangle of the tile; while it multiplies 16 of the depth, it reads the fragments of the next 16.
// Depth beyond the end is zero. Every sum is added up in the order of the depth, whatever the tile.

// Warps along n; as many of the others as there is work for go along m.
__device__ constexpr int tk_warps_along_n(int tile_m, int tile_n, int warps) {
  int along_m = 1, along_n = 1;
  while (along_m * along_n < warps) {
    const int warp_m = tile_m / along_m, warp_n = tile_n / along_n;
    if (warp_m >= 32 && (warp_m > warp_n || warp_n < 16))
      along_m *= 2;
    else if (warp_n >= 16)
      along_n *= 2;
    else
      break;
  }
  return along_n;
}

template <int TILE_M, int TILE_N, int TILE_K, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K>
struct TkTensorTile {
  static constexpr int WARPS_N = tk_warps_along_n(TILE_M, TILE_N, THREADS / 32);
  static constexpr int WARPS_M = THREADS / 32 / WARPS_N < TILE_M / 16 ? THREADS / 32 / WARPS_N : TILE_M / 16;
  static constexpr int UNITS_M = TILE_M / WARPS_M / 16;
  static constexpr int UNITS_N = TILE_N / WARPS_N / 8;
  static constexpr int STRIDE_A = (A_ALONG_K ? TILE_K : TILE_M) + SKEW;
  static constexpr int STRIDE_B = (B_ALONG_K ? TILE_K : TILE_N) + SKEW;
  static constexpr int ELEMENTS_A = STRIDE_A * (A_ALONG_K ? TILE_M : TILE_K);
  static constexpr int STEP_ELEMENTS = ELEMENTS_A + STRIDE_B * (B_ALONG_K ? TILE_N : TILE_K);
  static constexpr int STRIDE_SUMS = TILE_N + 4;
  static_assert(TILE_M % 16 == 0 && TILE_N % 8 == 0 && TILE_K % 16 == 0, "whole mma tiles");
  static_assert(WARPS_M * UNITS_M * 16 == TILE_M && WARPS_N * UNITS_N * 8 == TILE_N, "warps share the tile evenly");
  static_assert(UNITS_N == 1 || UNITS_N % 2 == 0, "ldmatrix reads two units along n");
  static_assert(SKEW % 8 == 0, "ldmatrix rows are 16-byte aligned");
};

// Where in a step a lane's part of ldmatrix begins. ROW_FIRST: the second matrix is 8 rows of shared
// memory further and the third 8 columns; else the other way around.
template <int STRIDE, bool ROW_FIRST>
__device__ __forceinline__ int tk_lane_place(int lane) {
  return ROW_FIRST ? lane % 16 * STRIDE + lane / 16 * 8 : (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
}

// A warp's fragments of a for 16 of the depth.
template <int UNITS, int STRIDE, bool ALONG_K>
__device__ __forceinline__ void tk_read_rows(unsigned (&rows)[UNITS][4], const unsigned short* step, int k) {
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    if constexpr (ALONG_K)
      tk_ldmatrix_x4(rows[i], step + i * 16 * STRIDE + k);
    else
      tk_ldmatrix_x4_trans(rows[i], step + k * STRIDE + i * 16);
  }
}

// A warp's fragments of b for 16 of the depth, two units along n at a time.
template <int UNITS, int STRIDE, bool ALONG_K>
__device__ __forceinline__ void tk_read_columns(unsigned (&columns)[UNITS][2], const unsigned short* step, int k) {
  if constexpr (UNITS == 1) {
    if constexpr (ALONG_K)
      tk_ldmatrix_x2(columns[0], step + k);
    else
      tk_ldmatrix_x2_trans(columns[0], step + k * STRIDE);
  } else {
#pragma unroll
    for (int j = 0; j < UNITS; j += 2) {
      unsigned pair[4];
      if constexpr (ALONG_K)
        tk_ldmatrix_x4(pair, step + j * 8 * STRIDE + k);
      else
        tk_ldmatrix_x4_trans(pair, step + k * STRIDE + j * 8);
      columns[j][0] = pair[0];
      columns[j][1] = pair[1];
      columns[j + 1][0] = pair[2];
      columns[j + 1][1] = pair[3];
    }
  }
}

// Operands are TkMatrix or functions: a(m, k), b(n, k). Returns where the sums are: m, n at
// m * STRIDE_SUMS + n. They take the place of the steps, so a barrier must follow their last use.
template <class Format, int TILE_M, int TILE_N, int TILE_K, int STAGES, int THREADS, int SKEW, bool A_ALONG_K, bool B_ALONG_K,
          class A, class B>
__device__ __forceinline__ const float* tk_pipeline_sums(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end,
                                                       tk_index k_begin, tk_index k_end, unsigned short* shared, const A& a,
                                                       const B& b) {
  using Tile = TkTensorTile<TILE_M, TILE_N, TILE_K, THREADS, SKEW, A_ALONG_K, B_ALONG_K>;
  constexpr int UNITS_M = Tile::UNITS_M, UNITS_N = Tile::UNITS_N, LAST = TILE_K / 16 - 1;
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const bool works = warp < Tile::WARPS_M * Tile::WARPS_N;
  const int warp_m = warp / Tile::WARPS_N * UNITS_M * 16, warp_n = warp % Tile::WARPS_N * UNITS_N * 8;
  const int place_a = tk_lane_place<Tile::STRIDE_A, A_ALONG_K>(lane) + warp_m * (A_ALONG_K ? Tile::STRIDE_A : 1);
  const int place_b =
      Tile::ELEMENTS_A + tk_lane_place<Tile::STRIDE_B, !B_ALONG_K>(lane) + warp_n * (B_ALONG_K ? Tile::STRIDE_B : 1);
  float sums[UNITS_M][UNITS_N][4] = {};
  unsigned rows[2][UNITS_M][4], columns[2][UNITS_N][2];

  auto read = [&](const unsigned short* step, int part) {
    tk_read_rows<UNITS_M, Tile::STRIDE_A, A_ALONG_K>(rows[part % 2], step + place_a, part * 16);
    tk_read_columns<UNITS_N, Tile::STRIDE_B, B_ALONG_K>(columns[part % 2], step + place_b, part * 16);
  };
  auto multiply = [&](int part) {
#pragma unroll
    for (int i = 0; i < UNITS_M; ++i)
#pragma unroll
      for (int j = 0; j < UNITS_N; ++j) Format::mma(sums[i][j], rows[part % 2][i], columns[part % 2][j]);
  };

  // Round by round: start the step that is STAGES - 1 ahead, in the buffer that was multiplied in the round
  // before; multiply the step of this round, the last 16 of its depth while the next step is first read.
  const int num_steps = (int)((k_end - k_begin + TILE_K - 1) / TILE_K);
  int started = 0, arrived = 0;
#pragma unroll 1
  for (int round = 1 - STAGES; round < num_steps; ++round) {
    if (round + STAGES - 1 < num_steps) {
      const tk_index k0 = k_begin + (tk_index)(round + STAGES - 1) * TILE_K;
      unsigned short* step = shared + started * Tile::STEP_ELEMENTS;
      tk_tensor_step<Format, TILE_M, TILE_K, THREADS, TkPadded<Tile::STRIDE_A, A_ALONG_K>>(step, m0, m_end, k0, k_end, a);
      tk_tensor_step<Format, TILE_N, TILE_K, THREADS, TkPadded<Tile::STRIDE_B, B_ALONG_K>>(step + Tile::ELEMENTS_A, n0, n_end,
                                                                                           k0, k_end, b);
    }
    tk_cp_async_commit();
    started = started == STAGES - 1 ? 0 : started + 1;
    if (round >= 0 && works) {
      const unsigned short* step = shared + arrived * Tile::STEP_ELEMENTS;
#pragma unroll
      for (int part = 0; part < LAST; ++part) {
        read(step, part + 1);
        multiply(part);
      }
    }
    if (round >= 0) arrived = arrived == STAGES - 1 ? 0 : arrived + 1;
    if (round < -1) continue;
    tk_cp_async_wait<STAGES - 2>();
    __syncthreads();  // the next step has arrived, for every thread, and this one has been read
    if (!works) continue;
    if (LAST % 2 == 0 && round >= 0) multiply(LAST);  // the next fragments take the place of the last ones
    if (round + 1 < num_steps) read(shared + arrived * Tile::STEP_ELEMENTS, 0);
    if (LAST % 2 != 0 && round >= 0) multiply(LAST);
  }
  float* finished = (float*)shared;
  if (works) {
#pragma unroll
    for (int i = 0; i < UNITS_M; ++i)
#pragma unroll
      for (int j = 0; j < UNITS_N; ++j) {
        float* low = finished + (warp_m + i * 16 + lane / 4) * Tile::STRIDE_SUMS + warp_n + j * 8 + lane % 4 * 2;
        *(float2*)low = make_float2(sums[i][j][0], sums[i][j][1]);
        *(float2*)(low + 8 * Tile::STRIDE_SUMS) = make_float2(sums[i][j][2], sums[i][j][3]);
      }
  }
  __syncthreads();  // the sums are complete
  return finished;
}
