// Element types, conversions and index arithmetic.
//
// All arithmetic is done in float32. tk_value reads an element exactly, tk_store and tk_round_*
// round once to nearest even. Sums, products, quotients and square roots in the generated code are
// the *_rn intrinsics, which no compiler contracts, so that fusing never changes a bit.

struct tk_float16 { unsigned short bits; };
struct tk_bfloat16 { unsigned short bits; };
struct tk_bool { unsigned char byte; };

__device__ __forceinline__ float tk_value(const float& element) { return element; }
__device__ __forceinline__ float tk_value(const tk_float16& element) { return tk_float16_bits_to_float(element.bits); }
__device__ __forceinline__ float tk_value(const tk_bfloat16& element) { return tk_bfloat16_bits_to_float(element.bits); }
__device__ __forceinline__ float tk_value(const tk_bool& element) { return element.byte ? 1.0f : 0.0f; }

__device__ __forceinline__ void tk_store(float& element, float value) { element = value; }
__device__ __forceinline__ void tk_store(tk_float16& element, float value) { element.bits = tk_float_to_float16_bits(value); }
__device__ __forceinline__ void tk_store(tk_bfloat16& element, float value) { element.bits = tk_float_to_bfloat16_bits(value); }
__device__ __forceinline__ void tk_store(tk_bool& element, float value) { element.byte = value != 0.0f; }

__device__ __forceinline__ float tk_round_float16(float value) {
  return tk_float16_bits_to_float(tk_float_to_float16_bits(value));
}
__device__ __forceinline__ float tk_round_bfloat16(float value) {
  return tk_bfloat16_bits_to_float(tk_float_to_bfloat16_bits(value));
}
__device__ __forceinline__ float tk_round_bool(float value) { return value != 0.0f ? 1.0f : 0.0f; }

// Four neighbours, aligned to as many bytes as they have.
__device__ __forceinline__ void tk_load_four(float (&values)[4], const float* from) {
  float4 four = *(const float4*)from;
  values[0] = four.x;
  values[1] = four.y;
  values[2] = four.z;
  values[3] = four.w;
}
template <class T>
__device__ __forceinline__ void tk_load_four(float (&values)[4], const T* from) {
  uint2 four = *(const uint2*)from;
  values[0] = tk_value(T{(unsigned short)four.x});
  values[1] = tk_value(T{(unsigned short)(four.x >> 16)});
  values[2] = tk_value(T{(unsigned short)four.y});
  values[3] = tk_value(T{(unsigned short)(four.y >> 16)});
}

// The larger of two numbers; NaN if either is NaN.
__device__ __forceinline__ float tk_maximum(float a, float b) { return a > b || a != a ? a : b; }

// Quotient and remainder of non-negative indices by a positive constant.
__device__ __forceinline__ int tk_div(int a, int b) { return (int)((unsigned)a / (unsigned)b); }
__device__ __forceinline__ int tk_mod(int a, int b) { return (int)((unsigned)a % (unsigned)b); }
__device__ __forceinline__ long long tk_div(long long a, long long b) {
  return (long long)((unsigned long long)a / (unsigned long long)b);
}
__device__ __forceinline__ long long tk_mod(long long a, long long b) {
  return (long long)((unsigned long long)a % (unsigned long long)b);
}
__device__ __forceinline__ tk_index tk_min(tk_index a, tk_index b) { return a < b ? a : b; }

// The block's first piece of a task whose predecessors in the stage have `offset` pieces, so that
// independent tasks of one stage start on different blocks.
__device__ __forceinline__ int tk_first_piece(int block, int offset) {
  int first = block - offset % (int)gridDim.x;
  return first < 0 ? first + (int)gridDim.x : first;
}

// The same where a range of blocks has the task for itself, unless the grid is smaller; and the distance of its pieces.
__device__ __forceinline__ int tk_range_first(int block, int first, int width) {
  if ((int)gridDim.x < first + width) return tk_first_piece(block, first);
  const int place = block - first;
  return place >= 0 && place < width ? place : 0x3fffffff;
}
__device__ __forceinline__ int tk_range_step(int first, int width) { return (int)gridDim.x < first + width ? (int)gridDim.x : width; }
