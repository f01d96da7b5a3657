// Time stamps of block 0, for profiles: number 0 and 1 hold the clocks of device and multiprocessor at the
// start, 2 and 3 those at the end, the others the multiprocessor's clock where the source says so.

#if defined(__CUDACC_RTC__)
__device__ __forceinline__ long long tk_clock() {
  long long now;
  asm volatile("mov.s64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}
#endif

__device__ __forceinline__ void tk_stamp(unsigned char* stamps, int number) {
  if (blockIdx.x == 0 && threadIdx.x == 0) ((long long*)stamps)[number] = tk_clock();
}

__device__ __forceinline__ void tk_stamp_both(unsigned char* stamps, int number) {
  if (blockIdx.x == 0 && threadIdx.x == 0) ((long long*)stamps)[number] = (long long)tk_globaltimer_ns();
  tk_stamp(stamps, number + 1);
}
