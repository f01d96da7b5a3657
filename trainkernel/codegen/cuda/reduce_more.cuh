// Further ways to merge two float32 values of a reduction.

struct TkMin {
  typedef float Value;
  static __device__ __forceinline__ float identity() { return __uint_as_float(0x7f800000u); }
  static __device__ __forceinline__ float merge(float a, float b) { return tk_minimum(a, b); }
};

struct TkProd {
  typedef float Value;
  static __device__ __forceinline__ float identity() { return 1.0f; }
  static __device__ __forceinline__ float merge(float a, float b) { return __fmul_rn(a, b); }
};
