// What a warpgroup, four warps, needs for wgmma, which reads both operands from shared memory: sm_90a alone.
//
// A matrix there has rows of 128 bytes, in which the 16-byte chunks of row r are exchanged by (r % 8), so that neither
// copies nor the tensor cores meet a bank conflict. It begins at a multiple of 1,024 bytes. The emulator's shim has
// C++ functions of the same names.

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

// d += a b on 64 x N x DEPTH, N = 2 * size of d, one warpgroup; a is 64 x DEPTH, b is DEPTH x N. Not if it is to
// `add`: d = a b. _ACROSS: an operand's neighbours in memory lie across the depth.
#define TK_PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TK_PLACES_16 TK_PLACES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TK_PLACES_32 \
  TK_PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
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
#define TK_SUMS_16(i) TK_SUMS_8(i), TK_SUMS_8(i + 8)
#define TK_SUMS_32(i) TK_SUMS_16(i), TK_SUMS_16(i + 16)
#define TK_SUMS_64(i) TK_SUMS_32(i), TK_SUMS_32(i + 32)
#define TK_SUMS_128(i) TK_SUMS_64(i), TK_SUMS_64(i + 64)
#define TK_WGMMA_TEXT(shape, type, places, a, b, add, across)                                             \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" shape ".f32." type "." type \
  " {" places "}, " a ", " b ", p, 1, 1" across ";\n}"
#define TK_WGMMA_16(Format, type, n, sums, a, b, add, a_across, b_across)                                               \
  template <bool A_ACROSS, bool B_ACROSS>                                                                               \
  __device__ __forceinline__ void tk_wgmma(Format, float(&d)[sums], TkDescriptor descriptor_a, TkDescriptor descriptor_b) { \
    asm volatile(TK_WGMMA_TEXT(n "k16", type, TK_PLACES_##sums, a, b, add, ", " a_across ", " b_across)                 \
                 : TK_SUMS_##sums(0)                                                                                    \
                 : "l"(descriptor_a), "l"(descriptor_b), "r"(1), "n"(A_ACROSS), "n"(B_ACROSS)                           \
                 : "memory");                                                                                           \
  }
#define TK_WGMMAS_16(Format, type)                                          \
  TK_WGMMA_16(Format, type, "64", 32, "%32", "%33", "%34", "%35", "%36")    \
  TK_WGMMA_16(Format, type, "128", 64, "%64", "%65", "%66", "%67", "%68")   \
  TK_WGMMA_16(Format, type, "256", 128, "%128", "%129", "%130", "%131", "%132")
#define TK_WGMMA_TF32(n, sums, a, b, add)                                                                              \
  __device__ __forceinline__ void tk_wgmma_tf32(float(&d)[sums], TkDescriptor descriptor_a, TkDescriptor descriptor_b, \
                                                bool adds) {                                                           \
    asm volatile(TK_WGMMA_TEXT(n "k8", "tf32", TK_PLACES_##sums, a, b, add, "")                                        \
                 : TK_SUMS_##sums(0)                                                                                   \
                 : "l"(descriptor_a), "l"(descriptor_b), "r"((int)adds)                                                \
                 : "memory");                                                                                          \
  }
TK_WGMMA_TF32("16", 8, "%8", "%9", "%10")
TK_WGMMA_TF32("32", 16, "%16", "%17", "%18")
TK_WGMMA_TF32("64", 32, "%32", "%33", "%34")
#endif
