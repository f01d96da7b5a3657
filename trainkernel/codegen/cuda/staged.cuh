// Copies of device memory that a block keeps near, each a few rows of four-byte elements, listed in a table.
//
// A warp takes every WARPS-th entry, so that many small copies are under way at once. They go on in the
// background and have arrived after tk_cp_async_wait<0> and a block barrier. An entry's source begins at
// byte `from` of tensor number `tensor` (-1: the workspace) and moves by `piece_bytes` and `step_bytes` from
// piece to piece and from step to step of a loop; rows are `row_bytes` apart there and `shared_row_bytes` in
// shared memory. With BACK the copies go the other way, at once: to the arrays, from what changed near the block.
// `runs` are its rows times the runs in each, of four elements or, with `width` 1, of one; a
// division by `runs_per_row` is a multiplication with `reciprocal`.

struct TkCopy {
  int tensor;
  unsigned to;
  long long from, piece_bytes, step_bytes;
  int runs, runs_per_row;
  unsigned reciprocal, row_bytes, shared_row_bytes, width;
};

// The entries from `first` to `end`.
template <int THREADS, bool BACK = false>
__device__ __forceinline__ void tk_fetch(const TkCopy* copies, int first, int end, void* const* tensors,
                                         const unsigned char* workspace, unsigned char* shared, int piece, long long step) {
#pragma unroll 1
  for (int c = first + (int)threadIdx.x / 32; c < end; c += THREADS / 32) {
    const TkCopy copy = copies[c];
    const unsigned char* base = copy.tensor < 0 ? workspace : (const unsigned char*)tensors[copy.tensor];
    const unsigned char* source = base + copy.from + piece * copy.piece_bytes + step * copy.step_bytes;
    const bool vector = copy.width == 4 && (unsigned long long)source % 16 == 0;
#pragma unroll 1
    for (int run = (int)threadIdx.x % 32; run < copy.runs; run += 32) {
      const unsigned row = copy.runs_per_row == 1 ? (unsigned)run : __umulhi((unsigned)run, copy.reciprocal);
      const unsigned column_bytes = ((unsigned)run - row * (unsigned)copy.runs_per_row) * copy.width * 4;
      unsigned char* to = shared + copy.to + row * copy.shared_row_bytes + column_bytes;
      const unsigned char* from = source + (unsigned long long)row * copy.row_bytes + column_bytes;
      if (BACK && vector) {
        *(float4*)(unsigned char*)from = *(const float4*)to;
      } else if (BACK) {
#pragma unroll 1
        for (unsigned byte = 0; byte < copy.width * 4; byte += 4) *(float*)(unsigned char*)(from + byte) = *(const float*)(to + byte);
      } else if (vector) {
        tk_cp_async_16(to, from);
      } else {
#pragma unroll 1
        for (unsigned byte = 0; byte < copy.width * 4; byte += 4) tk_cp_async_4(to + byte, from + byte);
      }
    }
  }
}
