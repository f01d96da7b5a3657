// Ways to merge two values of a reduction in float64 and the integers.

template <class T>
struct TkLimits;
template <>
struct TkLimits<double> {
  static __device__ __forceinline__ double least() { return __longlong_as_double(0xfff0000000000000ll); }
  static __device__ __forceinline__ double greatest() { return __longlong_as_double(0x7ff0000000000000ll); }
};
template <>
struct TkLimits<int> {
  static __device__ __forceinline__ int least() { return -2147483647 - 1; }
  static __device__ __forceinline__ int greatest() { return 2147483647; }
};
template <>
struct TkLimits<unsigned> {
  static __device__ __forceinline__ unsigned least() { return 0u; }
  static __device__ __forceinline__ unsigned greatest() { return 4294967295u; }
};
template <>
struct TkLimits<long long> {
  static __device__ __forceinline__ long long least() { return -9223372036854775807ll - 1; }
  static __device__ __forceinline__ long long greatest() { return 9223372036854775807ll; }
};

template <class T>
struct TkTypedSum {
  typedef T Value;
  static __device__ __forceinline__ T identity() { return (T)0; }
  static __device__ __forceinline__ T merge(T a, T b) { return tk_add(a, b); }
};
template <class T>
struct TkTypedProd {
  typedef T Value;
  static __device__ __forceinline__ T identity() { return (T)1; }
  static __device__ __forceinline__ T merge(T a, T b) { return tk_mul(a, b); }
};
template <class T>
struct TkTypedMax {
  typedef T Value;
  static __device__ __forceinline__ T identity() { return TkLimits<T>::least(); }
  static __device__ __forceinline__ T merge(T a, T b) { return tk_maximum(a, b); }
};
template <class T>
struct TkTypedMin {
  typedef T Value;
  static __device__ __forceinline__ T identity() { return TkLimits<T>::greatest(); }
  static __device__ __forceinline__ T merge(T a, T b) { return tk_minimum(a, b); }
};
