// Launches that run a part of the kernel: a stage at the top is one tick, a loop at the top one for each of its steps.

// Whether the ticks of a launch, from `first` to before `end`, hold one.
__device__ __forceinline__ bool tk_runs(long long first, long long end, long long tick) { return first <= tick && tick < end; }

// A number of ticks as steps of a loop: none before its first, its length after its last.
__device__ __forceinline__ int tk_part_of_loop(long long ticks, int length) {
  return ticks <= 0 ? 0 : ticks < length ? (int)ticks : length;
}
