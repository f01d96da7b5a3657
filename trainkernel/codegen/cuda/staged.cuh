// Copies of device memory that a block keeps near: ROWS rows of COLUMNS four-byte elements, ROW_STRIDE
// apart in device memory and STRIDE apart in shared memory. They go on in the background and have
// arrived after tk_cp_async_wait<0> and a block barrier.

template <int ROWS, int COLUMNS, int ROW_STRIDE, int STRIDE, int THREADS>
__device__ __forceinline__ void tk_stage(unsigned char* shared, const void* from) {
  constexpr bool WHOLE = COLUMNS % 4 == 0 && (ROWS == 1 || (ROW_STRIDE % 4 == 0 && STRIDE % 4 == 0));
  constexpr int RUNS = (COLUMNS + 3) / 4;
  const bool vector = WHOLE && (unsigned long long)from % 16 == 0;
#pragma unroll 1
  for (int e = (int)threadIdx.x; e < ROWS * RUNS; e += THREADS) {
    const int row = e / RUNS, column = e % RUNS * 4;
    float* to = (float*)shared + row * STRIDE + column;
    const float* element = (const float*)from + (long long)row * ROW_STRIDE + column;
    if (vector) {
      tk_cp_async_16(to, element);
    } else {
#pragma unroll 1
      for (int i = 0; i < 4 && column + i < COLUMNS; ++i) tk_cp_async_4(to + i, element + i);
    }
  }
}
