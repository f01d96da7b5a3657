// Copies of device memory that a block keeps near, each a few rows of four-byte elements, listed in a table.
//
// A warp takes every so many-th entry, so that many small copies are under way at once. They go on in the
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

// The entries from `first` to `end`, shared by so many `warps`, of which this is one; -1: none of them.
template <bool BACK = false>
__device__ TK_FETCH_IS void tk_fetch(const TkCopy* copies, int first, int end, void* const* tensors,
                                     const unsigned char* workspace, unsigned char* shared, int piece, long long step,
                                     int warp, int warps) {
  const TkSharedAddress base = tk_shared_address(shared);
#pragma unroll 1
  for (int c = warp < 0 ? end : first + warp; c < end; c += warps) {
    const TkCopy copy = copies[c];
    const unsigned char* tensor = copy.tensor < 0 ? workspace : (const unsigned char*)tensors[copy.tensor];
    const unsigned char* source = tensor + copy.from + piece * copy.piece_bytes + step * copy.step_bytes;
    const bool vector = copy.width == 4 && (unsigned long long)source % 16 == 0;
    // A lane's next run is 32 runs on: some rows and columns further, a row more where that is beyond the row's end.
    const int per_row = copy.runs_per_row, run_bytes = (int)copy.width * 4;
    const int lane = (int)threadIdx.x % 32;
    const int row = per_row == 1 ? lane : (int)__umulhi((unsigned)lane, copy.reciprocal);
    const int rows_on = per_row == 1 ? 32 : (int)__umulhi(32u, copy.reciprocal), columns_on = 32 - rows_on * per_row;
    int column = lane - row * per_row;
    int to = (int)(copy.to + row * copy.shared_row_bytes) + column * run_bytes;
    const unsigned char* from = source + (long long)row * copy.row_bytes + column * run_bytes;
    const int to_on = rows_on * (int)copy.shared_row_bytes + columns_on * run_bytes;
    const int to_wrap = (int)copy.shared_row_bytes - per_row * run_bytes;
    const long long from_on = (long long)rows_on * copy.row_bytes + columns_on * run_bytes;
    const long long from_wrap = (long long)copy.row_bytes - per_row * run_bytes;
#pragma unroll 1
    for (int run = lane; run < copy.runs; run += 32) {
      if (BACK && vector) {
        *(float4*)(unsigned char*)from = *(const float4*)(shared + to);
      } else if (BACK) {
#pragma unroll 1
        for (int byte = 0; byte < run_bytes; byte += 4) *(float*)(unsigned char*)(from + byte) = *(const float*)(shared + to + byte);
      } else if (vector) {
        tk_cp_async_16(base + to, from);
      } else {
#pragma unroll 1
        for (int byte = 0; byte < run_bytes; byte += 4) tk_cp_async_4(base + to + byte, from + byte);
      }
      column += columns_on;
      to += to_on;
      from += from_on;
      if (column >= per_row) {
        column -= per_row;
        to += to_wrap;
        from += from_wrap;
      }
    }
  }
}
