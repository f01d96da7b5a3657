// Sums of the updates that an index sends to a row: each output is the sum of load(k, output), in the
// order of k, over every k whose index(k) is row(output). An index outside the rows is -1.
//
// A block has COUNT * THREADS neighbouring outputs, so it serves a few rows. It looks at many indices
// at once, lists those that one of its rows wants, in order, and only then reads their updates.

template <int THREADS>
struct TkScatterList {
  tk_index k[THREADS], row[THREADS];
  int counts[THREADS / 32];
};

// An index as a row, or -1 if there is no such row.
template <class T>
__device__ __forceinline__ tk_index tk_row(T index, tk_index rows) {
  const tk_index row = tk_clamp(index, rows - 1);
  return (T)row == index ? row : -1;
}

// Lists every thread's k whose row is not -1, in the order of the threads; returns their number.
template <int THREADS>
__device__ __forceinline__ int tk_scatter_collect(TkScatterList<THREADS>& list, tk_index row, tk_index k) {
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const unsigned wanted = __ballot_sync(0xffffffffu, row >= 0);
  if (lane == 0) list.counts[warp] = __popc(wanted);
  __syncthreads();  // the counts are there, and the list before has been read
  int place = __popc(wanted & ((1u << lane) - 1)), found = 0;
#pragma unroll
  for (int other = 0; other < THREADS / 32; ++other) {
    if (other < warp) place += list.counts[other];
    found += list.counts[other];
  }
  if (row >= 0) {
    list.k[place] = k;
    list.row[place] = row;
  }
  __syncthreads();  // the list is complete
  return found;
}

template <class Op, int THREADS, int COUNT, class Index, class Row, class Load, class Store>
__device__ __forceinline__ void tk_scatter(tk_index first, tk_index outputs, tk_index begin, tk_index end, void* shared,
                                           Index index, Row row, Load load, Store store) {
  TkScatterList<THREADS>& list = *(TkScatterList<THREADS>*)shared;
  const tk_index own = first + threadIdx.x;
  const tk_index first_row = row(first), last_row = row(tk_min(first + COUNT * THREADS, outputs) - 1);
  tk_index rows[COUNT];
  decltype(Op::identity()) totals[COUNT];
#pragma unroll
  for (int u = 0; u < COUNT; ++u) {
    rows[u] = own + u * THREADS < outputs ? row(own + u * THREADS) : -1;
    totals[u] = Op::identity();
  }
#pragma unroll 1
  for (tk_index start = begin; start < end; start += 4 * THREADS) {
    tk_index wanted[4];
    bool any = false;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const tk_index k = start + u * THREADS + threadIdx.x;
      wanted[u] = k < end ? index(k) : -1;
      if (wanted[u] < first_row || wanted[u] > last_row) wanted[u] = -1;
      any |= wanted[u] >= 0;
    }
    if (!__syncthreads_or(any)) continue;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int found = tk_scatter_collect<THREADS>(list, wanted[u], start + u * THREADS + threadIdx.x);
#pragma unroll 1
      for (int j = 0; j < found; ++j) {
#pragma unroll
        for (int v = 0; v < COUNT; ++v)
          if (rows[v] == list.row[j]) totals[v] = Op::merge(totals[v], load(list.k[j], own + v * THREADS));
      }
    }
  }
#pragma unroll
  for (int u = 0; u < COUNT; ++u)
    if (rows[u] >= 0) store(own + u * THREADS, totals[u]);
}
