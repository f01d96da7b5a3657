// Sums of the updates that an index sends to a row: for each output, load(k) of every k in order
// whose index(k) is the output's row. An index outside the rows is -1.
//
// A thread has one output, and a warp's outputs lie side by side, so most warps serve one row or a
// few. The warp looks at 32 indices at a time and visits only those that one of its rows wants.
// Every lane of the warp must call.

// An index as a row, or -1 if there is no such row.
template <class T>
__device__ __forceinline__ tk_index tk_row(T index, tk_index rows) {
  const tk_index row = tk_clamp(index, rows - 1);
  return (T)row == index ? row : -1;
}

template <class Op, class Index, class Load>
__device__ __forceinline__ auto tk_scatter_lane(tk_index row, tk_index begin, tk_index end, Index index, Load load) {
  const tk_index first_row = __shfl_sync(0xffffffffu, row, 0), last_row = __shfl_sync(0xffffffffu, row, 31);
  auto total = Op::identity();
#pragma unroll 1
  for (tk_index first = begin; first < end; first += 32) {
    const tk_index k = first + threadIdx.x % 32;
    const tk_index mine = k < end ? index(k) : -1;
    unsigned wanted = __ballot_sync(0xffffffffu, mine >= first_row && mine <= last_row);
#pragma unroll 1
    for (; wanted; wanted &= wanted - 1) {
      const int lane = __ffs((int)wanted) - 1;
      if (__shfl_sync(0xffffffffu, mine, lane) == row) total = Op::merge(total, load(first + lane));
    }
  }
  return total;
}
