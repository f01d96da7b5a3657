// float32 functions of the op table that CUDA has under no name of its own.

// The smaller of two numbers; NaN if either is NaN.
__device__ __forceinline__ float tk_minimum(float a, float b) { return a < b || a != a ? a : b; }

// -1, 0 or 1; NaN for NaN.
__device__ __forceinline__ float tk_sign(float x) { return x != x ? x : (float)((x > 0.0f) - (x < 0.0f)); }

// The same bits as IEEE's, but a zero (the moments of a gradient that is zero) does not send its warp through the
// slow way of the division and of the square root.
__device__ __forceinline__ float tk_divide(float a, float b) {
  const bool quick = a == 0.0f && (__float_as_uint(b) & 0x7f800000u) - 0x00800000u < 0x7f000000u;  // and b is normal
  const float quotient = __fdiv_rn(quick ? 1.0f : a, b);
  return quick ? __uint_as_float((__float_as_uint(a) ^ __float_as_uint(b)) & 0x80000000u) : quotient;
}
__device__ __forceinline__ float tk_square_root(float x) {
  const float root = __fsqrt_rn(x == 0.0f ? 1.0f : x);
  return x == 0.0f ? x : root;
}

// Correctly rounded steps, so that every device gives the same bits.
__device__ __forceinline__ float tk_rsqrt(float x) { return __fdiv_rn(1.0f, __fsqrt_rn(x)); }

// Never an exponential of a positive number: it could overflow.
__device__ __forceinline__ float tk_sigmoid(float x) {
  float small = expf(-fabsf(x));
  return __fdiv_rn(x < 0.0f ? small : 1.0f, __fadd_rn(1.0f, small));
}
__device__ __forceinline__ float tk_softplus(float x) { return __fadd_rn(tk_maximum(x, 0.0f), log1pf(expf(-fabsf(x)))); }

// fmodf is exact; the result has the divisor's sign, as in NumPy.
__device__ __forceinline__ float tk_remainder(float a, float b) {
  float rest = fmodf(a, b);
  if (rest == 0.0f) return copysignf(0.0f, b);
  return (rest < 0.0f) != (b < 0.0f) ? __fadd_rn(rest, b) : rest;
}

// Rounded down, by NumPy's steps in float64: a float32 quotient may be one off long before 2^24.
__device__ __forceinline__ float tk_floor_divide(float a, float b) {
  if (b == 0.0f) return __fdiv_rn(a, b);
  double rest = (double)fmodf(a, b);
  double quotient = __ddiv_rn(__dsub_rn((double)a, rest), (double)b);
  if (rest != 0.0 && (rest < 0.0) != (b < 0.0f)) quotient = __dsub_rn(quotient, 1.0);
  if (quotient == 0.0) return copysignf(0.0f, __fdiv_rn(a, b));
  double whole = floor(quotient);
  return (float)(__dsub_rn(quotient, whole) > 0.5 ? __dadd_rn(whole, 1.0) : whole);
}
