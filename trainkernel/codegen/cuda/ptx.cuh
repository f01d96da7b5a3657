// A function that several tasks call. ptxas 13.0 can leave a memory descriptor that is used after a call
// undefined (CUDA_ERROR_ILLEGAL_INSTRUCTION), so it gets a copy for each call.
#if defined(__CUDACC_RTC__) && __CUDACC_VER_MAJOR__ == 13 && __CUDACC_VER_MINOR__ == 0
#define TK_NOINLINE __forceinline__
#else
#define TK_NOINLINE __noinline__
#endif

// What needs PTX. The emulator's shim has C++ functions of the same names.

#if defined(__CUDACC_RTC__)

#define TK_TASK(stage, task)
#define TK_GRID_BARRIER_ARRIVE()
#define TK_GRID_BARRIER_DONE()
#define TK_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// Conversions to two 16-bit numbers at a time run at the full rate; those to one do not.
__device__ __forceinline__ unsigned tk_floats_to_bfloat16_bits(float low, float high) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
__device__ __forceinline__ unsigned short tk_float_to_bfloat16_bits(float value) {
  return (unsigned short)tk_floats_to_bfloat16_bits(value, 0.0f);
}
__device__ __forceinline__ float tk_bfloat16_bits_to_float(unsigned short bits) {
  return __uint_as_float((unsigned)bits << 16);
}
__device__ __forceinline__ unsigned tk_floats_to_float16_bits(float low, float high) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
__device__ __forceinline__ unsigned short tk_float_to_float16_bits(float value) {
  return (unsigned short)tk_floats_to_float16_bits(value, 0.0f);
}
__device__ __forceinline__ float tk_float16_bits_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Release: everything that this thread has seen happen is visible to whoever acquires the counter.
__device__ __forceinline__ void tk_red_release_gpu_add(unsigned* counter, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned tk_load_acquire_gpu(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ unsigned long long tk_globaltimer_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Copies from global to shared memory that go on in the background; both addresses are aligned to the
// size. A group has arrived for the issuing thread after tk_cp_async_wait.
typedef unsigned TkSharedAddress;
__device__ __forceinline__ TkSharedAddress tk_shared_address(const void* shared) {
  return (unsigned)__cvta_generic_to_shared(shared);
}
__device__ __forceinline__ void tk_cp_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tk_shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void tk_cp_async_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(tk_shared_address(shared)), "l"(global) : "memory");
}
// BYTES, 4 or 16, of which none are read and zeros arrive if the place is not inside of the operand.
template <int BYTES>
__device__ __forceinline__ void tk_cp_async_inside(void* shared, const void* global, bool inside) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tk_shared_address(shared)), "l"(global), "r"(inside ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(tk_shared_address(shared)), "l"(global), "r"(inside ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void tk_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void tk_cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Shared memory by its address.
template <class T>
__device__ __forceinline__ T tk_load_shared(TkSharedAddress from);
template <>
__device__ __forceinline__ float tk_load_shared<float>(TkSharedAddress from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ void tk_store_shared(TkSharedAddress to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
#define TK_LDMATRIX(name, form)                                                              \
  __device__ __forceinline__ void name(unsigned(&r)[4], TkSharedAddress row) {               \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                            \
                 : "r"(row)                                                                  \
                 : "memory");                                                                \
  }
TK_LDMATRIX(tk_ldmatrix_x4, "")
TK_LDMATRIX(tk_ldmatrix_x4_trans, ".trans")
#undef TK_LDMATRIX

// d += a b on 16 x 8 x 16 tiles, one warp; fragments as in PTX mma.m16n8k16.
#define TK_MMA(name, type)                                                                                   \
  __device__ __forceinline__ void name(float(&d)[4], const unsigned(&a)[4], const unsigned(&b)[2]) {         \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                      \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                        \
  }
TK_MMA(tk_mma_m16n8k16_float16, "f16")
TK_MMA(tk_mma_m16n8k16_bfloat16, "bf16")
#undef TK_MMA
// The same on 16 x 8 x 8 tiles of TF32 numbers.
__device__ __forceinline__ void tk_mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 8 x 8 matrices of 16-bit elements from rows in shared memory; the transposed form gives each lane two
// neighbours along a column.
#define TK_LDMATRIX_X4(name, kind)                                                                                    \
  __device__ __forceinline__ void name(unsigned(&r)[4], const void* shared_row) {                                     \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];"                           \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                     \
                 : "r"(tk_shared_address(shared_row))                                                                 \
                 : "memory");                                                                                         \
  }
TK_LDMATRIX_X4(tk_ldmatrix_x4, "")
TK_LDMATRIX_X4(tk_ldmatrix_x4_trans, ".trans")
#undef TK_LDMATRIX_X4
#define TK_LDMATRIX_X2(name, kind)                                                                                    \
  __device__ __forceinline__ void name(unsigned(&r)[2], const void* shared_row) {                                     \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" kind ".shared.b16 {%0, %1}, [%2];"                                   \
                 : "=r"(r[0]), "=r"(r[1])                                                                             \
                 : "r"(tk_shared_address(shared_row))                                                                 \
                 : "memory");                                                                                         \
  }
TK_LDMATRIX_X2(tk_ldmatrix_x2, "")
TK_LDMATRIX_X2(tk_ldmatrix_x2_trans, ".trans")
#undef TK_LDMATRIX_X2

#endif
