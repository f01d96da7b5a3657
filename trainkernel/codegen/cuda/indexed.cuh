// Numbers from memory as coordinates: clamped to 0..last before they become an index. NaN is 0.

__device__ __forceinline__ tk_index tk_clamp(int value, tk_index last) { return value < 0 ? 0 : value > last ? last : value; }
__device__ __forceinline__ tk_index tk_clamp(unsigned value, tk_index last) {
  return (long long)value > (long long)last ? last : (tk_index)value;
}
__device__ __forceinline__ tk_index tk_clamp(long long value, tk_index last) {
  return value < 0 ? 0 : value > (long long)last ? last : (tk_index)value;
}
__device__ __forceinline__ tk_index tk_clamp(double value, tk_index last) {
  return value > 0.0 ? value < (double)last ? (tk_index)value : last : 0;
}
__device__ __forceinline__ tk_index tk_clamp(float value, tk_index last) { return tk_clamp((double)value, last); }
