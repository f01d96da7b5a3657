// Arithmetic in float64 and the integers, and conversions between all types.
//
// float64 by the correctly rounded intrinsics, which no compiler contracts. Integers wrap around, so
// their arithmetic is done on the unsigned type of the same size.

template <class T>
struct TkUnsigned;
template <>
struct TkUnsigned<int> {
  typedef unsigned Type;
};
template <>
struct TkUnsigned<unsigned> {
  typedef unsigned Type;
};
template <>
struct TkUnsigned<long long> {
  typedef unsigned long long Type;
};

#define TK_INTEGER_FUNCTION template <class T> __device__ __forceinline__ T
#define TK_FLOAT64_FUNCTION __device__ __forceinline__ double

// ---- integers

TK_INTEGER_FUNCTION tk_add(T a, T b) {
  typedef typename TkUnsigned<T>::Type U;
  return (T)((U)a + (U)b);
}
TK_INTEGER_FUNCTION tk_sub(T a, T b) {
  typedef typename TkUnsigned<T>::Type U;
  return (T)((U)a - (U)b);
}
TK_INTEGER_FUNCTION tk_mul(T a, T b) {
  typedef typename TkUnsigned<T>::Type U;
  return (T)((U)a * (U)b);
}
TK_INTEGER_FUNCTION tk_fma(T a, T b, T c) { return tk_add(tk_mul(a, b), c); }
TK_INTEGER_FUNCTION tk_neg(T x) { return tk_sub((T)0, x); }
TK_INTEGER_FUNCTION tk_abs(T x) { return x < (T)0 ? tk_neg(x) : x; }
TK_INTEGER_FUNCTION tk_sign(T x) { return (T)((x > (T)0) - (x < (T)0)); }
TK_INTEGER_FUNCTION tk_relu(T x) { return x < (T)0 ? (T)0 : x; }
TK_INTEGER_FUNCTION tk_floor(T x) { return x; }
TK_INTEGER_FUNCTION tk_ceil(T x) { return x; }
TK_INTEGER_FUNCTION tk_round(T x) { return x; }
TK_INTEGER_FUNCTION tk_maximum(T a, T b) { return a > b ? a : b; }
TK_INTEGER_FUNCTION tk_minimum(T a, T b) { return a < b ? a : b; }

// Rounded down. Division by zero gives all bits set, the remainder the dividend, as in XLA; the
// least number by -1 wraps around.
TK_INTEGER_FUNCTION tk_floor_divide(T a, T b) {
  if (b == (T)0) return (T)-1;
  if (b < (T)0 && b == (T)-1) return tk_neg(a);
  T rest = a % b;
  return a / b - (T)(rest != (T)0 && (rest < (T)0) != (b < (T)0));
}
TK_INTEGER_FUNCTION tk_remainder(T a, T b) {
  if (b == (T)0) return a;
  if (b < (T)0 && b == (T)-1) return (T)0;
  T rest = a % b;
  return rest != (T)0 && (rest < (T)0) != (b < (T)0) ? rest + b : rest;
}

TK_INTEGER_FUNCTION tk_bitwise_and(T a, T b) { return a & b; }
TK_INTEGER_FUNCTION tk_bitwise_or(T a, T b) { return a | b; }
TK_INTEGER_FUNCTION tk_bitwise_xor(T a, T b) { return a ^ b; }
TK_INTEGER_FUNCTION tk_bitwise_not(T x) { return ~x; }

// By the count modulo 64: all bits leave a 32-bit number from 32 on, its sign stays on the right.
TK_INTEGER_FUNCTION tk_shift_left(T a, T b) {
  typedef typename TkUnsigned<T>::Type U;
  unsigned count = (unsigned)b & 63u;
  return count < 8 * sizeof(T) ? (T)((U)a << count) : (T)0;
}
TK_INTEGER_FUNCTION tk_shift_right(T a, T b) {
  unsigned count = (unsigned)b & 63u;
  return count < 8 * sizeof(T) ? (T)(a >> count) : a < (T)0 ? (T)-1 : (T)0;
}

// ---- float64

TK_FLOAT64_FUNCTION tk_add(double a, double b) { return __dadd_rn(a, b); }
TK_FLOAT64_FUNCTION tk_sub(double a, double b) { return __dsub_rn(a, b); }
TK_FLOAT64_FUNCTION tk_mul(double a, double b) { return __dmul_rn(a, b); }
TK_FLOAT64_FUNCTION tk_div(double a, double b) { return __ddiv_rn(a, b); }
TK_FLOAT64_FUNCTION tk_fma(double a, double b, double c) { return __fma_rn(a, b, c); }
TK_FLOAT64_FUNCTION tk_neg(double x) { return __dmul_rn(-1.0, x); }
TK_FLOAT64_FUNCTION tk_abs(double x) { return fabs(x); }
TK_FLOAT64_FUNCTION tk_sign(double x) { return x != x ? x : (double)((x > 0.0) - (x < 0.0)); }
TK_FLOAT64_FUNCTION tk_relu(double x) { return x < 0.0 ? 0.0 : x; }
TK_FLOAT64_FUNCTION tk_floor(double x) { return floor(x); }
TK_FLOAT64_FUNCTION tk_ceil(double x) { return ceil(x); }
TK_FLOAT64_FUNCTION tk_round(double x) { return rint(x); }
TK_FLOAT64_FUNCTION tk_maximum(double a, double b) { return a > b || a != a ? a : b; }
TK_FLOAT64_FUNCTION tk_minimum(double a, double b) { return a < b || a != a ? a : b; }
TK_FLOAT64_FUNCTION tk_power(double a, double b) { return pow(a, b); }
TK_FLOAT64_FUNCTION tk_exp(double x) { return exp(x); }
TK_FLOAT64_FUNCTION tk_expm1(double x) { return expm1(x); }
TK_FLOAT64_FUNCTION tk_log(double x) { return log(x); }
TK_FLOAT64_FUNCTION tk_log1p(double x) { return log1p(x); }
TK_FLOAT64_FUNCTION tk_tanh(double x) { return tanh(x); }
TK_FLOAT64_FUNCTION tk_erf(double x) { return erf(x); }
TK_FLOAT64_FUNCTION tk_sin(double x) { return sin(x); }
TK_FLOAT64_FUNCTION tk_cos(double x) { return cos(x); }
TK_FLOAT64_FUNCTION tk_arcsin(double x) { return asin(x); }
TK_FLOAT64_FUNCTION tk_arccos(double x) { return acos(x); }
TK_FLOAT64_FUNCTION tk_arctan(double x) { return atan(x); }
TK_FLOAT64_FUNCTION tk_arctan2(double y, double x) { return atan2(y, x); }
TK_FLOAT64_FUNCTION tk_arcsinh(double x) { return asinh(x); }
TK_FLOAT64_FUNCTION tk_arccosh(double x) { return acosh(x); }
TK_FLOAT64_FUNCTION tk_cbrt(double x) { return cbrt(x); }
TK_FLOAT64_FUNCTION tk_sqrt(double x) { return __dsqrt_rn(x); }
TK_FLOAT64_FUNCTION tk_rsqrt(double x) { return __ddiv_rn(1.0, __dsqrt_rn(x)); }
TK_FLOAT64_FUNCTION tk_sigmoid(double x) {
  double small = exp(-fabs(x));
  return __ddiv_rn(x < 0.0 ? small : 1.0, __dadd_rn(1.0, small));
}
TK_FLOAT64_FUNCTION tk_softplus(double x) { return __dadd_rn(tk_maximum(x, 0.0), log1p(exp(-fabs(x)))); }
TK_FLOAT64_FUNCTION tk_remainder(double a, double b) {
  double rest = fmod(a, b);
  if (rest == 0.0) return copysign(0.0, b);
  return (rest < 0.0) != (b < 0.0) ? __dadd_rn(rest, b) : rest;
}
TK_FLOAT64_FUNCTION tk_floor_divide(double a, double b) {
  if (b == 0.0) return __ddiv_rn(a, b);
  double rest = fmod(a, b), quotient = __ddiv_rn(__dsub_rn(a, rest), b);
  if (rest != 0.0 && (rest < 0.0) != (b < 0.0)) quotient = __dsub_rn(quotient, 1.0);
  if (quotient == 0.0) return copysign(0.0, __ddiv_rn(a, b));
  double whole = floor(quotient);
  return __dsub_rn(quotient, whole) > 0.5 ? __dadd_rn(whole, 1.0) : whole;
}

// ---- conversions

// A number as a float that rounds to 16 bits as the number itself does: made odd where it is not exact
// (Boldo and Melquiond, "When double rounding is odd").
__device__ __forceinline__ float tk_odd_float(double x) {
  float near_zero = __double2float_rz(x);
  return (double)near_zero == x ? near_zero : __uint_as_float(__float_as_uint(near_zero) | 1u);
}
__device__ __forceinline__ float tk_odd_float(int x) { return tk_odd_float((double)x); }
__device__ __forceinline__ float tk_odd_float(unsigned x) { return tk_odd_float((double)x); }
__device__ __forceinline__ float tk_odd_float(long long x) {
  // What float64 cannot hold is gathered in the last bit that it can.
  bool fits = x < (1ll << 53) && x > -(1ll << 53);
  return tk_odd_float((double)(fits ? x : (x & ~2047ll) | ((x & 2047) != 0 ? 2048ll : 0ll)));
}

template <class T>
__device__ __forceinline__ float tk_to_float32(T x) {
  return (float)x;
}
template <class T>
__device__ __forceinline__ double tk_to_float64(T x) {
  return (double)x;
}
template <class T>
__device__ __forceinline__ float tk_to_float16(T x) {
  return tk_round_float16(tk_odd_float(x));
}
template <class T>
__device__ __forceinline__ float tk_to_bfloat16(T x) {
  return tk_round_bfloat16(tk_odd_float(x));
}
template <class T>
__device__ __forceinline__ float tk_to_bool(T x) {
  return x != (T)0 ? 1.0f : 0.0f;
}

// Towards zero; numbers beyond give the least or the greatest, NaN gives 0. The bounds lie just outside.
template <class T, class F>
__device__ __forceinline__ T tk_truncated(F x, F low, F high, T least, T greatest) {
  return x <= low ? least : x >= high ? greatest : x == x ? (T)x : (T)0;
}

#define TK_TO_INTEGER(name, type, stored, low, high, least, greatest)                                             \
  __device__ __forceinline__ type name(float x) {                                                                 \
    return tk_truncated<type, float>(x, (float)low, (float)high, least, greatest);                                \
  }                                                                                                               \
  __device__ __forceinline__ type name(double x) { return tk_truncated<type, double>(x, low, high, least, greatest); } \
  __device__ __forceinline__ type name(int x) { return (type)(stored)x; }                                         \
  __device__ __forceinline__ type name(unsigned x) { return (type)(stored)x; }                                    \
  __device__ __forceinline__ type name(long long x) { return (type)(stored)x; }
TK_TO_INTEGER(tk_to_uint8, int, unsigned char, -1.0, 256.0, 0, 255)
TK_TO_INTEGER(tk_to_int32, int, int, -2147483649.0, 2147483648.0, -2147483647 - 1, 2147483647)
TK_TO_INTEGER(tk_to_uint32, unsigned, unsigned, -1.0, 4294967296.0, 0u, 4294967295u)
TK_TO_INTEGER(tk_to_int64, long long, long long, -9223372036854775808.0, 9223372036854775808.0,
              -9223372036854775807ll - 1, 9223372036854775807ll)
#undef TK_TO_INTEGER
#undef TK_INTEGER_FUNCTION
#undef TK_FLOAT64_FUNCTION
