// Bulk copies: rows of device memory that come to shared memory by themselves, without a thread's work for each
// 16 bytes, while the block does something else.
//
// They arrive on barriers in shared memory: each warp announces there what it has started, and a phase ends when all
// warps have and every byte has come. TkArrivals keeps in `phases` a bit for each barrier, which all threads turn when
// they wait.

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

// COUNT barriers of eight bytes.
template <int COUNT, int THREADS>
__device__ __forceinline__ TkArrivals tk_arrivals_init(unsigned char* mbarriers) {
  if (threadIdx.x < COUNT) {
    tk_mbarrier_init(mbarriers + 8 * threadIdx.x, THREADS / 32);
    tk_fence_async();
  }
  __syncthreads();
  return TkArrivals{mbarriers, 0};
}

// After the next block barrier every thread finds what the latest call of tk_fetch_rows for barrier `number` started.
__device__ __forceinline__ void tk_arrivals_wait(TkArrivals& arrivals, int number) {
  tk_mbarrier_wait(arrivals.mbarriers + 8 * number, arrivals.phases >> number & 1);
  arrivals.phases ^= 1u << number;
}

// An entry of a table of such copies: `rows` rows of `bytes`, a multiple of 16; the rest as in TkCopy.
struct TkRows {
  int tensor;
  unsigned to;
  long long from, piece_bytes, step_bytes;
  int rows;
  unsigned bytes, row_bytes, shared_row_bytes;
};

// The entries from `first` to `end`, which arrive on `mbarrier`; warps as in tk_fetch. Shared memory is free: a block
// barrier stands before.
__device__ TK_FETCH_ROWS_IS void tk_fetch_rows(const TkRows* table, int first, int end, void* const* tensors,
                                              const unsigned char* workspace, unsigned char* shared, int piece, long long step,
                                              unsigned char* mbarrier, int warp, int warps) {
  unsigned started = 0;
  tk_fence_async();
#pragma unroll 1
  for (int e = warp < 0 ? end : first + warp; e < end; e += warps) {
    const TkRows rows = table[e];
    const unsigned char* base = rows.tensor < 0 ? workspace : (const unsigned char*)tensors[rows.tensor];
    const unsigned char* source = base + rows.from + piece * rows.piece_bytes + step * rows.step_bytes;
    const bool aligned = (unsigned long long)source % 16 == 0;
    if (aligned) started += (unsigned)rows.rows * rows.bytes;
#pragma unroll 1
    for (int row = (int)threadIdx.x % 32; row < rows.rows; row += 32) {
      unsigned char* to = shared + rows.to + row * rows.shared_row_bytes;
      const unsigned char* from = source + (unsigned long long)row * rows.row_bytes;
      if (aligned) {
        tk_bulk_copy(to, from, rows.bytes, mbarrier);
      } else {
#pragma unroll 1
        for (unsigned byte = 0; byte < rows.bytes; byte += 4) *(float*)(to + byte) = *(const float*)(from + byte);
      }
    }
  }
  if (threadIdx.x % 32 == 0) tk_mbarrier_arrive(mbarrier, started);
}
