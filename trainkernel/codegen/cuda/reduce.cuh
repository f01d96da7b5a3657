// Reductions of count elements load(k) in an order fixed by the number of threads alone.
//
// A thread takes every L-th element of its row (L lanes share the row) and adds them up in order;
// the lanes' results are merged in a fixed tree. L is 1, 32 or the block. An Op has the type of its
// values, the identity, and merges two values.

struct TkSum {
  typedef float Value;
  static __device__ __forceinline__ float identity() { return 0.0f; }
  static __device__ __forceinline__ float merge(float a, float b) { return __fadd_rn(a, b); }
};

struct TkMax {
  typedef float Value;
  static __device__ __forceinline__ float identity() { return __uint_as_float(0xff800000u); }
  static __device__ __forceinline__ float merge(float a, float b) { return tk_maximum(a, b); }
};

// Elements first, first + LANES, ... below end, in order; FLIGHT loads under way, fewer where a lane has no more.
// No row has more than COUNT elements; with EXACT every row has all of them.
template <class Op, int LANES, tk_index COUNT, bool EXACT, int FLIGHT = 4, class Load>
__device__ __forceinline__ typename Op::Value tk_reduce_lane(tk_index first, tk_index end, Load load) {
  constexpr tk_index STEPS = COUNT > LANES ? (COUNT + LANES - 1) / LANES : 1;
  constexpr int BATCH = STEPS < FLIGHT ? (int)STEPS : FLIGHT;
  constexpr bool WHOLE = EXACT && COUNT % (BATCH * LANES) == 0;
  typename Op::Value total = Op::identity();
#pragma unroll 1
  for (tk_index k = first; k < end; k += BATCH * LANES) {
    typename Op::Value values[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) values[u] = WHOLE || k + u * LANES < end ? load(k + u * LANES) : Op::identity();
#pragma unroll
    for (int u = 0; u < BATCH; ++u) total = Op::merge(total, values[u]);
    if (STEPS == BATCH) break;  // no lane has more
  }
  return total;
}

// Merges the values of the lanes l with the same l % ROWS.
template <class Op, int ROWS = 1>
__device__ __forceinline__ typename Op::Value tk_merge_warp(typename Op::Value value) {
#pragma unroll
  for (int distance = 16; distance >= ROWS; distance /= 2)
    value = Op::merge(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

// ROWS neighbouring rows per warp, one for its lanes l with the same l % ROWS; every lane gets its row's result. Every
// warp takes part in the shuffles: the compiler does not know that all lanes of one are inside or none.
template <class Op, int ROWS, tk_index COUNT, bool EXACT, class Load>
__device__ __forceinline__ typename Op::Value tk_reduce_warp(bool inside, tk_index begin, tk_index end, Load load) {
  typename Op::Value value = Op::identity();
  if (inside) value = tk_reduce_lane<Op, 32 / ROWS, COUNT, EXACT>(begin + threadIdx.x % 32 / ROWS, end, load);
  return tk_merge_warp<Op, ROWS>(value);
}

// One block per row; thread 0 gets the result, with EVERYONE all threads do.
template <class Op, int THREADS, tk_index COUNT, bool EXACT, bool EVERYONE, class Load>
__device__ __forceinline__ typename Op::Value tk_reduce_block(tk_index begin, tk_index end, typename Op::Value* shared, Load load) {
  typename Op::Value value = tk_merge_warp<Op>(tk_reduce_lane<Op, THREADS, COUNT, EXACT>(begin + threadIdx.x, end, load));
  __syncthreads();  // shared is free: the piece before may still read it
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  if (EVERYONE || threadIdx.x == 0) {
    value = shared[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) value = Op::merge(value, shared[warp]);
  }
  return value;
}

// COLUMNS neighbouring rows per block, one per thread of its first ones; the other threads take further
// elements of the same rows. The first COLUMNS threads get the results, with EVERYONE all do.
template <class Op, int THREADS, int COLUMNS, tk_index COUNT, bool EXACT, bool EVERYONE, class Load>
__device__ __forceinline__ typename Op::Value tk_reduce_columns(bool inside, tk_index begin, tk_index end, typename Op::Value* shared, Load load) {
  constexpr int PARTS = THREADS / COLUMNS;
  typename Op::Value value = inside ? tk_reduce_lane<Op, PARTS, COUNT, EXACT, 8>(begin + threadIdx.x / COLUMNS, end, load) : Op::identity();
  __syncthreads();  // shared is free: the piece before may still read it
  shared[threadIdx.x] = value;
  __syncthreads();
  if (EVERYONE || threadIdx.x < COLUMNS) {
    value = shared[threadIdx.x % COLUMNS];
#pragma unroll
    for (int part = 1; part < PARTS; ++part) value = Op::merge(value, shared[part * COLUMNS + threadIdx.x % COLUMNS]);
  }
  return value;
}

// COUNT partial results load(s), merged in order.
template <class Op, int COUNT, class Load>
__device__ __forceinline__ typename Op::Value tk_combine(Load load) {
  typename Op::Value values[COUNT];
#pragma unroll
  for (int s = 0; s < COUNT; ++s) values[s] = load(s);
  typename Op::Value total = values[0];
#pragma unroll
  for (int s = 1; s < COUNT; ++s) total = Op::merge(total, values[s]);
  return total;
}
