// A float32 product tile on tensor cores by wgmma.
//
// An operand's element is a TF32 number, its first 11 bits rounded, and what is left of it, another TF32 number. With
// PRODUCTS = 3 the product is high * low + low * high + high * high, summed over 16 of the depth by the tensor cores,
// whose sums round towards zero, and added up in float32: as exact as float32 multiply-adds. With PRODUCTS = 1 it is
// high * high alone. A step is 32 of the depth: a row of 128 bytes for each outer place, high, then low. While one step
// is multiplied, the next is on its way to registers. Infinities, and numbers that round to them, have no rest: where a
// sum is no number, it is computed again by float32 multiply-adds.

// Elements (o, k) to (o, k + 3) of an operand; zeros beyond its end.
template <bool ALONG_K>
__device__ __forceinline__ float4 tk_quad(const TkMatrix<float>& matrix, tk_index o, tk_index o_end, tk_index k, tk_index k_end) {
  float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (o >= o_end) return quad;
  const float* from = matrix.base + o * matrix.outer_stride + k * matrix.depth_stride;
  if (ALONG_K && matrix.vector) {
    if (k < k_end) quad = *(const float4*)from;
    return quad;
  }
  if (k < k_end) quad.x = from[0];
  if (k + 1 < k_end) quad.y = from[matrix.depth_stride];
  if (k + 2 < k_end) quad.z = from[2 * matrix.depth_stride];
  if (k + 3 < k_end) quad.w = from[3 * matrix.depth_stride];
  return quad;
}
template <bool ALONG_K, class Load>
__device__ __forceinline__ float4 tk_quad(const Load& load, tk_index o, tk_index o_end, tk_index k, tk_index k_end) {
  float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (o >= o_end) return quad;
  if (k < k_end) quad.x = load(o, k);
  if (k + 1 < k_end) quad.y = load(o, k + 1);
  if (k + 2 < k_end) quad.z = load(o, k + 2);
  if (k + 3 < k_end) quad.w = load(o, k + 3);
  return quad;
}
__device__ __forceinline__ float tk_element(const TkMatrix<float>& matrix, tk_index o, tk_index k) {
  return matrix.base[o * matrix.outer_stride + k * matrix.depth_stride];
}
template <class Load>
__device__ __forceinline__ float tk_element(const Load& load, tk_index o, tk_index k) { return load(o, k); }

// A number's first 11 bits, rounded; with IS_ALONE a NaN stays one, else only what is left of it has to.
template <bool IS_ALONE>
__device__ __forceinline__ float tk_high_bits(float value) {
  if (IS_ALONE && value != value) return value;
  return __uint_as_float((__float_as_uint(value) + 0x1000u) & 0xffffe000u);
}

// A thread's part of a step of an operand: COUNT quads, on their way and then in their place.
template <int OUTER, int THREADS, int PRODUCTS, bool ALONG_K>
struct TkSplitStep {
  static constexpr int COUNT = OUTER * 8 / THREADS;
  static constexpr int FLOATS = OUTER * 32;  // of each of its numbers
  static_assert(OUTER * 8 % THREADS == 0, "every thread has as many quads");
  float4 quads[COUNT];

  // Neighbouring threads read neighbours in memory, and write all banks of shared memory.
  static __device__ __forceinline__ int outer(int i) {
    const int quad = i * THREADS + (int)threadIdx.x;
    return ALONG_K ? quad / 8 : quad % OUTER;
  }
  static __device__ __forceinline__ int depth(int i) {
    const int quad = i * THREADS + (int)threadIdx.x;
    return ALONG_K ? quad % 8 * 4 : quad / OUTER * 4;
  }
  template <class Operand>
  __device__ __forceinline__ void fetch(const Operand& operand, tk_index o0, tk_index o_end, tk_index k0, tk_index k_end) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) quads[i] = tk_quad<ALONG_K>(operand, o0 + outer(i), o_end, k0 + depth(i), k_end);
  }
  __device__ __forceinline__ void put(float* step) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = outer(i);
      float4* to = (float4*)(step + row * 32 + (depth(i) / 4 ^ row % 8) * 4);
      const float4 value = quads[i];
      constexpr bool ALONE = PRODUCTS == 1;
      const float4 high = make_float4(tk_high_bits<ALONE>(value.x), tk_high_bits<ALONE>(value.y), tk_high_bits<ALONE>(value.z),
                                      tk_high_bits<ALONE>(value.w));
      *to = high;
      if (PRODUCTS == 3)
        to[FLOATS / 4] = make_float4(__fsub_rn(value.x, high.x), __fsub_rn(value.y, high.y), __fsub_rn(value.z, high.z),
                                     __fsub_rn(value.w, high.w));
    }
  }
};

// Operands are TkMatrix<float> or functions: a(m, k), b(n, k). Returns where the sums are: m, n at
// m * (TILE_N + 4) + n. They take the place of the steps, so a barrier must follow their last use.
template <int TILE_M, int TILE_N, int THREADS, int PRODUCTS, bool A_ALONG_K, bool B_ALONG_K, class A, class B>
__device__ __forceinline__ const float* tk_split_sums(tk_index m0, tk_index n0, tk_index m_end, tk_index n_end, tk_index k_begin,
                                                      tk_index k_end, float* shared, const A& a, const B& b) {
  using StepA = TkSplitStep<TILE_M, THREADS, PRODUCTS, A_ALONG_K>;
  using StepB = TkSplitStep<TILE_N, THREADS, PRODUCTS, B_ALONG_K>;
  constexpr int TILE_K = 32, CHUNK = 16, STRIDE_SUMS = TILE_N + 4, KINDS = PRODUCTS == 3 ? 2 : 1;
  constexpr int WARPGROUPS_M = THREADS / 128 < TILE_M / 64 ? THREADS / 128 : TILE_M / 64;
  constexpr int UNITS_M = TILE_M / 64 / WARPGROUPS_M, OWN_N = TILE_N / (THREADS / 128 / WARPGROUPS_M);
  static_assert(UNITS_M == 1 && OWN_N % 16 == 0 && THREADS % 128 == 0, "a warpgroup has 64 rows");
  const int warpgroup = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
  const int own_m = warpgroup % WARPGROUPS_M * 64, own_n = warpgroup / WARPGROUPS_M * OWN_N;
  float sums[OWN_N / 2] = {}, part[OWN_N / 2] = {};
  StepA next_a;
  StepB next_b;
  next_a.fetch(a, m0, m_end, k_begin, k_end);
  next_b.fetch(b, n0, n_end, k_begin, k_end);
  float* step = shared;
#pragma unroll 1
  for (tk_index k0 = k_begin; k0 < k_end; k0 += TILE_K) {
    float* step_b = step + KINDS * StepA::FLOATS;
    next_a.put(step);
    next_b.put(step_b);
    tk_fence_shared_async();
    __syncthreads();  // this step is there, and the one before has been multiplied, for every thread
    next_a.fetch(a, m0, m_end, k0 + TILE_K, k_end);
    next_b.fetch(b, n0, n_end, k0 + TILE_K, k_end);
    const TkDescriptor rows = tk_descriptor(step + own_m * 32, 16, 1024), columns = tk_descriptor(step_b + own_n * 32, 16, 1024);
#pragma unroll
    for (int chunk = 0; chunk < TILE_K; chunk += CHUNK) {
      tk_wgmma_fence();
#pragma unroll
      for (int k = chunk; k < chunk + CHUNK; k += 8) {
        const TkDescriptor high_a = tk_moved(rows, k * 4), high_b = tk_moved(columns, k * 4);
        if (PRODUCTS == 3) {
          tk_wgmma_tf32(part, high_a, tk_moved(high_b, 4 * StepB::FLOATS), k > chunk);
          tk_wgmma_tf32(part, tk_moved(high_a, 4 * StepA::FLOATS), high_b, true);
        }
        tk_wgmma_tf32(part, high_a, high_b, PRODUCTS == 3 || k > chunk);
      }
      tk_wgmma_commit();
      tk_wgmma_wait<0>();
      tk_hold(part);
#pragma unroll
      for (int i = 0; i < OWN_N / 2; ++i) sums[i] = __fadd_rn(sums[i], part[i]);
    }
    step = step == shared ? shared + KINDS * (StepA::FLOATS + StepB::FLOATS) : shared;
  }
  __syncthreads();  // all steps have been read
  int is_number = 1;
#pragma unroll
  for (int j = 0; j < OWN_N / 8; ++j) {
    const int row = own_m + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    float* low = shared + row * STRIDE_SUMS + own_n + j * 8 + lane % 4 * 2;
    *(float2*)low = make_float2(sums[j * 4], sums[j * 4 + 1]);
    *(float2*)(low + 8 * STRIDE_SUMS) = make_float2(sums[j * 4 + 2], sums[j * 4 + 3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) is_number &= sums[j * 4 + i] == sums[j * 4 + i];
  }
  // The sums are complete.
  if (__syncthreads_or(!is_number) && PRODUCTS == 3) {
#pragma unroll 1
    for (int e = (int)threadIdx.x; e < TILE_M * TILE_N; e += THREADS) {
      const tk_index m = m0 + e / TILE_N, n = n0 + e % TILE_N;
      float* sum = shared + e / TILE_N * STRIDE_SUMS + e % TILE_N;
      if (m >= m_end || n >= n_end || *sum == *sum) continue;
      float total = 0.0f;
#pragma unroll 1
      for (tk_index k = k_begin; k < k_end; ++k) total = __fmaf_rn(tk_element(a, m, k), tk_element(b, n, k), total);
      *sum = total;
    }
    __syncthreads();  // the sums are complete
  }
  return shared;
}
