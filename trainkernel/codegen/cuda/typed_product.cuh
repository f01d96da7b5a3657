// Products in float64 and the integers.

// One thread per output; the depth from begin to end.
template <class T, class LoadA, class LoadB>
__device__ __forceinline__ T tk_typed_thin_product(tk_index begin, tk_index end, LoadA load_a, LoadB load_b) {
  T sum = (T)0;
#pragma unroll 4
  for (tk_index k = begin; k < end; ++k) sum = tk_fma(load_a(k), load_b(k), sum);
  return sum;
}
