// A tensor-core product tile by wgmma, which reads both operands from shared memory: sm_90a alone.
//
// One block computes TILE_M x TILE_N outputs in steps of 64 along the depth. STAGES buffers hold the step that is
// multiplied, the one before, and those on their way. Each four warps, a warpgroup, own a rectangle of the tile.
// A step lies in parts of 128 bytes by as many rows as there are, with the 16-byte chunks of row r exchanged by
// (r % 8), so that neither copies nor the tensor cores meet a bank conflict: along the depth, a row of 64 for each
// outer place; else for each 64 outer places a part with a row for each depth. Every sum is added up in the order
// of the depth.

#if defined(__CUDACC_RTC__)
// How wgmma finds a matrix in shared memory: its first byte; the distance of its parts of 64 places, if they lie
// across the depth; that of 8 rows.
typedef unsigned long long TkDescriptor;
__device__ __forceinline__ TkDescriptor tk_descriptor(const void* shared, int part_bytes, int rows_bytes) {
  const unsigned long long swizzle_128 = 1ull << 62;
  return (tk_shared_address(shared) & 0x3ffff) >> 4 | (unsigned long long)(part_bytes >> 4) << 16 |
         (unsigned long long)(rows_bytes >> 4) << 32 | swizzle_128;
}
__device__ __forceinline__ TkDescriptor tk_moved(TkDescriptor descriptor, int bytes) { return descriptor + (bytes >> 4); }

// Between what threads have written to shared memory and wgmma's reads; between registers and wgmma.
__device__ __forceinline__ void tk_fence_shared_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void tk_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void tk_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void tk_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The sums are read after what stands before, not earlier.
template <int SUMS>
__device__ __forceinline__ void tk_hold(float (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// d += a b on 64 x N x 16, N = 2 * size of d, one warpgroup; a is 64 x 16, b is 16 x N. _ACROSS: an operand's
// neighbours in memory lie across the depth.
#define TK_PLACES_32                                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31"
#define TK_PLACES_64                                                                                             \
  TK_PLACES_32                                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TK_PLACES_128                                                                                              \
  TK_PLACES_64                                                                                                     \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "   \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, "   \
  "%107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"
#define TK_SUMS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define TK_SUMS_32(i) TK_SUMS_8(i), TK_SUMS_8(i + 8), TK_SUMS_8(i + 16), TK_SUMS_8(i + 24)
#define TK_SUMS_64(i) TK_SUMS_32(i), TK_SUMS_32(i + 32)
#define TK_SUMS_128(i) TK_SUMS_64(i), TK_SUMS_64(i + 64)
#define TK_WGMMA(Format, type, n, sums, a, b, a_across, b_across)                                                      \
  template <bool A_ACROSS, bool B_ACROSS>                                                                              \
  __device__ __forceinline__ void tk_wgmma(Format, float(&d)[sums], TkDescriptor descriptor_a, TkDescriptor descriptor_b) { \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
                 " {" TK_PLACES_##sums "}, " a ", " b ", p, 1, 1, " a_across ", " b_across ";\n}"                       \
                 : TK_SUMS_##sums(0)                                                                                   \
                 : "l"(descriptor_a), "l"(descriptor_b), "n"(A_ACROSS), "n"(B_ACROSS)                                  \
                 : "memory");                                                                                          \
  }
#define TK_WGMMAS(Format, type)                                  \
  TK_WGMMA(Format, type, "64", 32, "%32", "%33", "%34", "%35")   \
  TK_WGMMA(Format, type, "128", 64, "%64", "%65", "%66", "%67")  \
  TK_WGMMA(Format, type, "256", 128, "%128", "%129", "%130", "%131")
TK_WGMMAS(TkFloat16Format, "f16")
TK_WGMMAS(TkBfloat16Format, "bf16")
#endif

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
