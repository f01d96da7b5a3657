// What the emitted CUDA source needs, for the host's C++17 compiler. Header-free: this text and
// the source are one translation unit. Everything that concerns more than one thread, and the
// warp's instructions, live in the runtime (runtime.cpp) and are called by name.
#define TRAINKERNEL_EMULATOR 1

#define __device__
#define __constant__ static const
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// Compilers differ in what a barrier may do to a restricted pointer; here it means nothing.
#define __restrict__

// A matrix in shared memory that wgmma reads.
struct tk_emu_matrix {
    const void* start;
    unsigned part_bytes, rows_bytes, across;
};

extern "C" {
__attribute__((const)) unsigned tk_emu_thread_index();
__attribute__((const)) unsigned tk_emu_block_index();
__attribute__((const)) unsigned tk_emu_threads_per_block();
__attribute__((const)) unsigned tk_emu_num_blocks();
__attribute__((const)) void* tk_emu_dynamic_shared();
__attribute__((const)) unsigned tk_emu_cluster_rank();
__attribute__((const)) unsigned tk_emu_cluster_size();
void* tk_emu_cluster_map(void* shared, unsigned rank);
void tk_emu_cluster_barrier();
void tk_emu_syncthreads();
unsigned tk_emu_syncthreads_or(unsigned vote);
void tk_emu_syncwarp(unsigned mask);
unsigned tk_emu_shuffle(unsigned mask, unsigned value, unsigned kind, unsigned argument, unsigned width);
void tk_emu_task(unsigned stage, unsigned task);
void tk_emu_grid_arrive();
void tk_emu_grid_done();
unsigned tk_emu_atomic_add(unsigned* address, unsigned value);
unsigned tk_emu_atomic_exchange(unsigned* address, unsigned value);
unsigned tk_emu_load_acquire(const unsigned* address);
unsigned long long tk_emu_globaltimer_ns();
__forceinline__ long long tk_clock() { return static_cast<long long>(tk_emu_globaltimer_ns()); }
void tk_emu_ldmatrix(unsigned* registers, const void* row, unsigned matrices, unsigned transposed);
void tk_emu_mma(float* d, const unsigned* a, const unsigned* b, unsigned bfloat);
void tk_emu_mma_tf32(float* d, const unsigned* a, const unsigned* b);
void tk_emu_wgmma(float* d, unsigned columns, const tk_emu_matrix* a, const tk_emu_matrix* b, unsigned format, unsigned adds);
void tk_emu_wgmma_commit();
void tk_emu_wgmma_wait(unsigned pending_groups);
void tk_emu_cp_async(void* shared, const void* global, unsigned bytes, bool inside);
void tk_emu_cp_async_commit();
void tk_emu_cp_async_wait(unsigned pending_groups);
void tk_emu_mbarrier_init(void* mbarrier, unsigned count);
void tk_emu_mbarrier_arrive(void* mbarrier, unsigned bytes);
void tk_emu_mbarrier_wait(void* mbarrier, unsigned parity);
void tk_emu_fence_async();
void tk_emu_bulk_copy(void* shared, const void* global, unsigned bytes, void* mbarrier);
float expf(float);
float expm1f(float);
float logf(float);
float log1pf(float);
float tanhf(float);
float erff(float);
float sinf(float);
float cosf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float atan2f(float, float);
float asinhf(float);
float acoshf(float);
float cbrtf(float);
float floorf(float);
float ceilf(float);
float rintf(float);
float powf(float, float);
float fmodf(float, float);
float copysignf(float, float);
double exp(double);
double expm1(double);
double log(double);
double log1p(double);
double tanh(double);
double erf(double);
double sin(double);
double cos(double);
double asin(double);
double acos(double);
double atan(double);
double atan2(double, double);
double asinh(double);
double acosh(double);
double cbrt(double);
double fabs(double);
double floor(double);
double ceil(double);
double rint(double);
double pow(double, double);
double fmod(double, double);
double copysign(double, double);
}

struct tk_emu_index { unsigned x, y, z; };
#define threadIdx (tk_emu_index{tk_emu_thread_index(), 0, 0})
#define blockIdx (tk_emu_index{tk_emu_block_index(), 0, 0})
#define blockDim (tk_emu_index{tk_emu_threads_per_block(), 1, 1})
#define gridDim (tk_emu_index{tk_emu_num_blocks(), 1, 1})

#define TK_DYNAMIC_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(tk_emu_dynamic_shared())
#define TK_TASK(stage, task) tk_emu_task(stage, task)
#define TK_GRID_BARRIER_ARRIVE() tk_emu_grid_arrive()
#define TK_GRID_BARRIER_DONE() tk_emu_grid_done()

struct __attribute__((aligned(16))) float4 { float x, y, z, w; };
struct __attribute__((aligned(16))) uint4 { unsigned x, y, z, w; };
struct __attribute__((aligned(16))) int4 { int x, y, z, w; };
struct __attribute__((aligned(8))) float2 { float x, y; };
struct __attribute__((aligned(8))) uint2 { unsigned x, y; };
struct __attribute__((aligned(8))) int2 { int x, y; };

__forceinline__ float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
__forceinline__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
__forceinline__ int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
__forceinline__ float2 make_float2(float x, float y) { return {x, y}; }
__forceinline__ uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
__forceinline__ int2 make_int2(int x, int y) { return {x, y}; }

__forceinline__ unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
__forceinline__ unsigned __float_as_uint(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
__forceinline__ float __uint_as_float(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

__forceinline__ double __longlong_as_double(long long bits) {
    double value;
    __builtin_memcpy(&value, &bits, 8);
    return value;
}
__forceinline__ float __double2float_rz(double value) {
    float near = (float)value;
    double excess = value < 0 ? value - (double)near : (double)near - value;
    return excess > 0 ? __uint_as_float(__float_as_uint(near) - 1) : near;
}

// The compiler is told not to contract, so plain operators round once each.
__forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__forceinline__ float __fsub_rn(float a, float b) { return a - b; }
__forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__forceinline__ float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
__forceinline__ float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__forceinline__ double __dadd_rn(double a, double b) { return a + b; }
__forceinline__ double __dsub_rn(double a, double b) { return a - b; }
__forceinline__ double __dmul_rn(double a, double b) { return a * b; }
__forceinline__ double __ddiv_rn(double a, double b) { return a / b; }
__forceinline__ double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
__forceinline__ double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
__forceinline__ float tk_emu_fabs(float a) { return __builtin_fabsf(a); }

// As CUDA's: a NaN gives the other operand, and -0 is less than +0.
__forceinline__ float tk_emu_fmax(float a, float b) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == b) return __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
    return a > b ? a : b;
}
__forceinline__ float tk_emu_fmin(float a, float b) {
    if (a != a) return b;
    if (b != b) return a;
    if (a == b) return __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
    return a < b ? a : b;
}
#define fmaxf tk_emu_fmax
#define fminf tk_emu_fmin
#define fabsf tk_emu_fabs
#define sqrtf __fsqrt_rn
#define fmaf __fmaf_rn

template <typename T>
__forceinline__ T __ldg(const T* address) {
    return *address;
}

__forceinline__ void __syncthreads() { tk_emu_syncthreads(); }
__forceinline__ int __syncthreads_or(int vote) { return (int)tk_emu_syncthreads_or((unsigned)vote); }
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) { tk_emu_syncwarp(mask); }
__forceinline__ unsigned atomicAdd(unsigned* address, unsigned value) { return tk_emu_atomic_add(address, value); }
__forceinline__ unsigned atomicExch(unsigned* address, unsigned value) {
    return tk_emu_atomic_exchange(address, value);
}

#define TK_EMU_SHUFFLE(name, kind, argument_type)                                                         \
    __forceinline__ unsigned name(unsigned mask, unsigned value, argument_type argument, int width = 32) { \
        return tk_emu_shuffle(mask, value, kind, unsigned(argument), unsigned(width));                    \
    }                                                                                                     \
    __forceinline__ int name(unsigned mask, int value, argument_type argument, int width = 32) {          \
        return int(tk_emu_shuffle(mask, unsigned(value), kind, unsigned(argument), unsigned(width)));     \
    }                                                                                                     \
    __forceinline__ float name(unsigned mask, float value, argument_type argument, int width = 32) {      \
        unsigned bits = __float_as_uint(value);                                                           \
        return __uint_as_float(tk_emu_shuffle(mask, bits, kind, unsigned(argument), unsigned(width)));    \
    }                                                                                                     \
    template <class T>                                                                                    \
    __forceinline__ T name(unsigned mask, T value, argument_type argument, int width = 32) {              \
        static_assert(sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");                                    \
        unsigned words[2];                                                                                \
        __builtin_memcpy(words, &value, 8);                                                               \
        words[0] = tk_emu_shuffle(mask, words[0], kind, unsigned(argument), unsigned(width));             \
        words[1] = tk_emu_shuffle(mask, words[1], kind, unsigned(argument), unsigned(width));             \
        __builtin_memcpy(&value, words, 8);                                                               \
        return value;                                                                                     \
    }
TK_EMU_SHUFFLE(__shfl_sync, 0, int)
TK_EMU_SHUFFLE(__shfl_down_sync, 1, unsigned)
TK_EMU_SHUFFLE(__shfl_xor_sync, 2, int)
TK_EMU_SHUFFLE(__shfl_up_sync, 3, unsigned)

// A bit per lane, for whole warps only: the lanes' bits are gathered by shuffles.
__forceinline__ unsigned __ballot_sync(unsigned mask, int vote) {
    unsigned bits = vote ? 1u << threadIdx.x % 32 : 0u;
    for (int distance = 16; distance; distance /= 2) bits |= __shfl_xor_sync(mask, bits, distance);
    return bits;
}
__forceinline__ int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Conversions round to nearest even and keep denormals. NaN becomes 0x7fff, as cvt.rn does.
__forceinline__ float tk_bfloat16_bits_to_float(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }
__forceinline__ unsigned short tk_float_to_bfloat16_bits(float value) {
    unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
__forceinline__ float tk_float16_bits_to_float(unsigned short bits) {
    unsigned sign = unsigned(bits & 0x8000) << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x400) return __uint_as_float(sign | ((magnitude << 13) + (112u << 23)));
    return __uint_as_float(sign | __float_as_uint(float(int(magnitude)) * 0x1p-24f));
}
__forceinline__ unsigned short tk_float_to_float16_bits(float value) {
    unsigned bits = __float_as_uint(value);
    unsigned sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
    if (value != value) return 0x7fff;
    if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00);  // 65520 and above
    if (magnitude < 0x38800000u) {
        // Below 2^-14 the result counts units of 2^-24: adding 0.5 makes the float's last bit that unit.
        float shifted = __uint_as_float(magnitude) + 0.5f;
        return static_cast<unsigned short>(sign | (__float_as_uint(shifted) - 0x3f000000u));
    }
    unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
    return static_cast<unsigned short>(sign | (rounded - (112u << 23)) >> 13);
}

__forceinline__ unsigned tk_floats_to_bfloat16_bits(float low, float high) {
    return tk_float_to_bfloat16_bits(low) | unsigned(tk_float_to_bfloat16_bits(high)) << 16;
}
__forceinline__ unsigned tk_floats_to_float16_bits(float low, float high) {
    return tk_float_to_float16_bits(low) | unsigned(tk_float_to_float16_bits(high)) << 16;
}

__forceinline__ void tk_red_release_gpu_add(unsigned* counter, unsigned value) { tk_emu_atomic_add(counter, value); }
__forceinline__ unsigned tk_load_acquire_gpu(const unsigned* counter) { return tk_emu_load_acquire(counter); }
__forceinline__ unsigned tk_multiprocessor() { return tk_emu_block_index() / 2; }
__forceinline__ unsigned long long tk_globaltimer_ns() { return tk_emu_globaltimer_ns(); }

__forceinline__ void tk_mma_m16n8k16_float16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    tk_emu_mma(d, a, b, 0);
}
__forceinline__ void tk_mma_m16n8k16_bfloat16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    tk_emu_mma(d, a, b, 1);
}
__forceinline__ void tk_mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    tk_emu_mma_tf32(d, a, b);
}
__forceinline__ void tk_ldmatrix_x4(unsigned (&r)[4], const void* row) { tk_emu_ldmatrix(r, row, 4, 0); }
__forceinline__ void tk_ldmatrix_x4_trans(unsigned (&r)[4], const void* row) { tk_emu_ldmatrix(r, row, 4, 1); }
__forceinline__ void tk_ldmatrix_x2(unsigned (&r)[2], const void* row) { tk_emu_ldmatrix(r, row, 2, 0); }
__forceinline__ void tk_ldmatrix_x2_trans(unsigned (&r)[2], const void* row) { tk_emu_ldmatrix(r, row, 2, 1); }

typedef unsigned char* TkSharedAddress;
__forceinline__ TkSharedAddress tk_shared_address(const void* shared) { return (TkSharedAddress)shared; }
template <class T>
__forceinline__ T tk_load_shared(TkSharedAddress from) { return *(const T*)from; }
template <class T>
__forceinline__ void tk_store_shared(TkSharedAddress to, T value) { *(T*)to = value; }

__forceinline__ void tk_cp_async_16(void* shared, const void* global) { tk_emu_cp_async(shared, global, 16, true); }
__forceinline__ void tk_cp_async_4(void* shared, const void* global) { tk_emu_cp_async(shared, global, 4, true); }
template <int BYTES>
__forceinline__ void tk_cp_async_inside(void* shared, const void* global, bool inside) {
    tk_emu_cp_async(shared, global, BYTES, inside);
}
__forceinline__ void tk_cp_async_commit() { tk_emu_cp_async_commit(); }
template <int N>
__forceinline__ void tk_cp_async_wait() {
    tk_emu_cp_async_wait(N);
}

__forceinline__ void tk_mbarrier_init(void* mbarrier, unsigned count) { tk_emu_mbarrier_init(mbarrier, count); }
__forceinline__ void tk_mbarrier_arrive(void* mbarrier, unsigned bytes) { tk_emu_mbarrier_arrive(mbarrier, bytes); }
__forceinline__ void tk_mbarrier_wait(void* mbarrier, unsigned parity) { tk_emu_mbarrier_wait(mbarrier, parity); }
__forceinline__ void tk_bulk_copy(void* shared, const void* global, unsigned bytes, void* mbarrier) {
    tk_emu_bulk_copy(shared, global, bytes, mbarrier);
}
__forceinline__ void tk_fence_async() { tk_emu_fence_async(); }

typedef tk_emu_matrix TkDescriptor;
__forceinline__ TkDescriptor tk_descriptor(const void* shared, int part_bytes, int rows_bytes) {
    return TkDescriptor{shared, static_cast<unsigned>(part_bytes), static_cast<unsigned>(rows_bytes), 0};
}
__forceinline__ TkDescriptor tk_moved(TkDescriptor descriptor, int bytes) {
    descriptor.start = static_cast<const unsigned char*>(descriptor.start) + bytes;
    return descriptor;
}
__forceinline__ void tk_fence_shared_async() {}
__forceinline__ void tk_wgmma_fence() {}
__forceinline__ void tk_wgmma_commit() { tk_emu_wgmma_commit(); }
template <int N>
__forceinline__ void tk_wgmma_wait() { tk_emu_wgmma_wait(N); }
template <int SUMS>
__forceinline__ void tk_hold(float (&)[SUMS]) {}
template <bool A_ACROSS, bool B_ACROSS, class Format, int SUMS>
__forceinline__ void tk_wgmma(Format, float (&d)[SUMS], TkDescriptor a, TkDescriptor b) {
    a.across = A_ACROSS;
    b.across = B_ACROSS;
    const unsigned bfloat16_one = 0x3f80;
    tk_emu_wgmma(d, 2 * SUMS, &a, &b, Format::bits(1.0f, 0.0f) == bfloat16_one, 1);
}
template <int SUMS>
__forceinline__ void tk_wgmma_tf32(float (&d)[SUMS], TkDescriptor a, TkDescriptor b, bool adds) {
    tk_emu_wgmma(d, 2 * SUMS, &a, &b, 2, adds);
}
#define TK_WGMMAS_16(Format, type)

__forceinline__ unsigned tk_cluster_rank() { return tk_emu_cluster_rank(); }
__forceinline__ unsigned tk_cluster_size() { return tk_emu_cluster_size(); }
__forceinline__ void tk_cluster_barrier() { tk_emu_cluster_barrier(); }
__forceinline__ void* tk_cluster_map(void* shared, unsigned rank) { return tk_emu_cluster_map(shared, rank); }

// The source's own functions are calls unless the compiler finds them small: inlined wherever they are called, as on the
// device, large products take it twice as long.
#undef __forceinline__
#define __forceinline__ inline
