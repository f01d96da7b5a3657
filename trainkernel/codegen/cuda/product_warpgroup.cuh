// A tensor-core product tile for float16 or bfloat16 operands by wgmma, float32 sums.
//
// One block computes TILE_M x TILE_N outputs in steps of 64 along the depth. STAGES buffers hold the step that is
// multiplied, the one before, and those on their way. Each four warps, a warpgroup, own a rectangle of the tile.
// A step lies in parts of 128 bytes by as many rows as there are: along the depth, a row of 64 for each outer place;
// else for each 64 outer places a part with a row for each depth. Every sum is added up in the order of the depth.

TK_WGMMAS_16(TkFloat16Format, "f16")
TK_WGMMAS_16(TkBfloat16Format, "bf16")

// Elements of a step in its buffer, of which the first lies at a multiple of 1,024 bytes.
template <int OUTER, bool ALONG_K>
struct TkSwizzled {
  static constexpr bool ALONG = ALONG_K;
  static constexpr int ELEMENTS = OUTER * 64;
  static __device__ __forceinline__ int place(int o, int k) {
    const int row = ALONG_K ? o : k, column = ALONG_K ? k : o % 64;
    return (ALONG_K ? 0 : o / 64 * 4096) + row * 64 + ((column / 8 ^ row % 8) * 8 | column % 8);
  }
  // The matrix from outer place `o` on, 16 of the depth from `k` on.
  static __device__ __forceinline__ TkDescriptor descriptor(const unsigned short* step, int o) {
    return tk_descriptor(step + (ALONG_K ? o * 64 : o / 64 * 4096), ALONG_K ? 16 : 8192, 1024);
  }
  static constexpr int DEPTH_BYTES = ALONG_K ? 32 : 2048;
};

// Operands are TkMatrix or functions: a(m, k), b(n, k). Returns where the sums are: m, n at m * (TILE_N + 4) + n.
// They take the place of the steps, so a barrier must follow their last use.
template <class Format, int TILE_M, int TILE_N, int STAGES, int THREADS, bool A_ALONG_K, bool B_ALONG_K, class A, class B>
__device__ __forceinline__ const float* tk_warpgroup_sums(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end,
                                                          tk_index k_begin, tk_index k_end, unsigned short* shared, const A& a,
                                                          const B& b) {
  using StepA = TkSwizzled<TILE_M, A_ALONG_K>;
  using StepB = TkSwizzled<TILE_N, B_ALONG_K>;
  constexpr int TILE_K = 64, AHEAD = STAGES - 2, STRIDE_SUMS = TILE_N + 4;
  constexpr int WARPGROUPS_M = THREADS / 128 < TILE_M / 64 ? THREADS / 128 : TILE_M / 64;
  constexpr int UNITS_M = TILE_M / 64 / WARPGROUPS_M, OWN_N = TILE_N / (THREADS / 128 / WARPGROUPS_M);
  static_assert(AHEAD > 0 && THREADS % 128 == 0 && TILE_M % 64 == 0 && OWN_N % 64 == 0, "whole parts for each warpgroup");
  const int warpgroup = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
  const int own_m = warpgroup % WARPGROUPS_M * UNITS_M * 64, own_n = warpgroup / WARPGROUPS_M * OWN_N;
  float sums[UNITS_M][OWN_N / 2] = {};

  const int num_steps = (int)((k_end - k_begin + TILE_K - 1) / TILE_K);
  int to_start = 0, to_multiply = 0;  // buffers
  auto start = [&](int number) {
    if (number < num_steps) {
      const tk_index k0 = k_begin + (tk_index)number * TILE_K;
      unsigned short* step = shared + to_start * (StepA::ELEMENTS + StepB::ELEMENTS);
      tk_tensor_step<Format, TILE_M, TILE_K, THREADS, StepA>(step, m0, m_end, k0, k_end, a);
      tk_tensor_step<Format, TILE_N, TILE_K, THREADS, StepB>(step + StepA::ELEMENTS, n0, n_end, k0, k_end, b);
    }
    tk_cp_async_commit();
    to_start = to_start == STAGES - 1 ? 0 : to_start + 1;
  };
#pragma unroll 1
  for (int number = 0; number < AHEAD; ++number) start(number);
#pragma unroll 1
  for (int number = 0; number < num_steps; ++number) {
    tk_cp_async_wait<AHEAD - 1>();
    tk_fence_shared_async();
    __syncthreads();  // this step has arrived, and the last but one has been multiplied, for every thread
    const unsigned short* step = shared + to_multiply * (StepA::ELEMENTS + StepB::ELEMENTS);
    const TkDescriptor rows = StepA::descriptor(step, own_m), columns = StepB::descriptor(step + StepA::ELEMENTS, own_n);
    tk_wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_K / 16; ++k)
#pragma unroll
      for (int i = 0; i < UNITS_M; ++i)
        tk_wgmma<!A_ALONG_K, !B_ALONG_K>(Format(), sums[i], tk_moved(rows, k * StepA::DEPTH_BYTES + i * 8192),
                                         tk_moved(columns, k * StepB::DEPTH_BYTES));
    tk_wgmma_commit();
    to_multiply = to_multiply == STAGES - 1 ? 0 : to_multiply + 1;
    start(number + AHEAD);
    tk_wgmma_wait<1>();  // the step before has been multiplied
  }
  tk_wgmma_wait<0>();
  __syncthreads();  // all steps have been read
  float* finished = (float*)shared + (own_m + (int)threadIdx.x % 128 / 32 * 16 + lane / 4) * STRIDE_SUMS + own_n + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < UNITS_M; ++i) {
    tk_hold(sums[i]);
#pragma unroll
    for (int j = 0; j < OWN_N / 8; ++j) {
      float* low = finished + i * 64 * STRIDE_SUMS + j * 8;
      *(float2*)low = make_float2(sums[i][j * 4], sums[i][j * 4 + 1]);
      *(float2*)(low + 8 * STRIDE_SUMS) = make_float2(sums[i][j * 4 + 2], sums[i][j * 4 + 3]);
    }
  }
  __syncthreads();  // the sums are complete
  return (const float*)shared;
}
