// Running totals of a row's elements load(k), each handed to store(k, total), in an order fixed by the
// number of threads alone. REVERSE begins at the last element.
//
// Op::merge adds two values, Op::identity() is nothing; the type of both is that of the totals.

// The element that is number `position` in the order of the scan.
template <bool REVERSE>
__device__ __forceinline__ tk_index tk_scan_element(tk_index position, tk_index count) {
  return REVERSE ? count - 1 - position : position;
}

// One thread per row; four loads in flight.
template <class Op, bool REVERSE, class Load, class Store>
__device__ __forceinline__ void tk_scan_thread(tk_index count, Load load, Store store) {
  auto total = Op::identity();
#pragma unroll 1
  for (tk_index first = 0; first < count; first += 4) {
    decltype(Op::identity()) values[4];
#pragma unroll
    for (int u = 0; u < 4; ++u)
      values[u] = first + u < count ? load(tk_scan_element<REVERSE>(first + u, count)) : Op::identity();
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      total = Op::merge(total, values[u]);
      if (first + u < count) store(tk_scan_element<REVERSE>(first + u, count), total);
    }
  }
}

// Each lane's total of the values of the lanes up to its own.
template <class Op, class T>
__device__ __forceinline__ T tk_scan_lanes(T value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    T before = __shfl_up_sync(0xffffffffu, value, distance);
    if (threadIdx.x % 32 >= distance) value = Op::merge(before, value);
  }
  return value;
}

// One warp per row: 32 neighbouring elements at a time.
template <class Op, bool REVERSE, class Load, class Store>
__device__ __forceinline__ void tk_scan_warp(tk_index count, Load load, Store store) {
  auto carry = Op::identity();
#pragma unroll 1
  for (tk_index first = 0; first < count; first += 32) {
    const tk_index position = first + threadIdx.x % 32;
    const tk_index k = tk_scan_element<REVERSE>(position, count);
    auto total = tk_scan_lanes<Op>(position < count ? load(k) : Op::identity());
    total = Op::merge(carry, total);
    if (position < count) store(k, total);
    carry = __shfl_sync(0xffffffffu, total, 31);
  }
}

// One block per row: four neighbouring elements per thread at a time. `shared` holds a total per warp.
template <class Op, int THREADS, bool REVERSE, class T, class Load, class Store>
__device__ __forceinline__ void tk_scan_block(tk_index count, T* shared, Load load, Store store) {
  T carry = Op::identity();
#pragma unroll 1
  for (tk_index first = 0; first < count; first += 4 * THREADS) {
    const tk_index position = first + 4 * (tk_index)threadIdx.x;
    T values[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const bool inside = position + u < count;
      values[u] = inside ? load(tk_scan_element<REVERSE>(position + u, count)) : Op::identity();
      if (u > 0) values[u] = Op::merge(values[u - 1], values[u]);
    }
    const T warp_total = tk_scan_lanes<Op>(values[3]);
    T before = __shfl_up_sync(0xffffffffu, warp_total, 1);
    if (threadIdx.x % 32 == 0) before = Op::identity();
    __syncthreads();  // shared is free: the step before may still read it
    if (threadIdx.x % 32 == 31) shared[threadIdx.x / 32] = warp_total;
    __syncthreads();
    T warps_before = carry;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) {
      if (warp == (int)threadIdx.x / 32) warps_before = carry;
      carry = Op::merge(carry, shared[warp]);
    }
    before = Op::merge(warps_before, before);
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (position + u < count)
        store(tk_scan_element<REVERSE>(position + u, count), Op::merge(before, values[u]));
  }
}
