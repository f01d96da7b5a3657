// Bulk copies: rows of device memory that come to shared memory by themselves, without a thread's work for each
// 16 bytes, while the block does something else.
//
// They arrive on barriers in shared memory: a thread announces there how many bytes have started, and a phase ends
// when they have come. TkArrivals keeps in `phases` a bit for each barrier, which all threads turn when they wait.

#if defined(__CUDACC_RTC__)
__device__ __forceinline__ void tk_mbarrier_init(void* mbarrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(tk_shared_address(mbarrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void tk_mbarrier_arrive(void* mbarrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(tk_shared_address(mbarrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tk_mbarrier_wait(void* mbarrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
                 : "=r"(done)
                 : "r"(tk_shared_address(mbarrier)), "r"(parity)
                 : "memory");
  } while (!done);
}
__device__ __forceinline__ void tk_bulk_copy(void* shared, const void* global, unsigned bytes, void* mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(tk_shared_address(shared)),
               "l"(global), "r"(bytes), "r"(tk_shared_address(mbarrier))
               : "memory");
}
// What this thread has seen happen has happened for the copies, too, that it starts from now on.
__device__ __forceinline__ void tk_fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
#endif

struct TkArrivals {
  unsigned char* mbarriers;
  unsigned phases;
};

// COUNT barriers of eight bytes, ready after the next block barrier: that of the grid barrier before the first copy.
template <int COUNT>
__device__ __forceinline__ TkArrivals tk_arrivals_init(unsigned char* mbarriers) {
  if (threadIdx.x < COUNT) {
    tk_mbarrier_init(mbarriers + 8 * threadIdx.x, 1);
    tk_fence_async();
  }
  return TkArrivals{mbarriers, 0};
}

// After the next block barrier every thread finds what arrives on barrier `number` in this phase.
__device__ __forceinline__ void tk_arrivals_wait(TkArrivals& arrivals, int number) {
  tk_mbarrier_wait(arrivals.mbarriers + 8 * number, arrivals.phases >> number & 1);
  arrivals.phases ^= 1u << number;
}

// ROWS rows of BYTES, a multiple of 16, which are ROW_BYTES apart and SHARED_ROW_BYTES in shared memory, by THREADS of
// which this is number `thread`. Returns the bytes of all of them, or 0 if the source is not aligned: then they come
// by cp.async, four bytes at a time. Shared memory is free: a block barrier stands before.
template <int ROWS, int BYTES, long long ROW_BYTES, int SHARED_ROW_BYTES, int THREADS>
__device__ __forceinline__ unsigned tk_fetch_rows(unsigned char* shared, const unsigned char* source, unsigned char* mbarrier, int thread) {
  if ((unsigned long long)source % 16 != 0) {
    constexpr int COLUMNS = BYTES / 4;
#pragma unroll 1
    for (int element = thread; thread >= 0 && element < ROWS * COLUMNS; element += THREADS) {
      const int row = element / COLUMNS, column_bytes = element % COLUMNS * 4;
      tk_cp_async_4(shared + row * SHARED_ROW_BYTES + column_bytes, source + row * ROW_BYTES + column_bytes);
    }
    return 0;
  }
#pragma unroll 1
  for (int row = thread; thread >= 0 && row < ROWS; row += THREADS)
    tk_bulk_copy(shared + row * SHARED_ROW_BYTES, source + row * ROW_BYTES, BYTES, mbarrier);
  return ROWS * BYTES;
}
