// Philox 4x32-10: a counter-based generator (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011). The same counter and key give the same bits on any device and grid.

__device__ __forceinline__ void tk_philox_round(unsigned (&words)[4], unsigned key_0, unsigned key_1) {
  const unsigned long long first = 0xD2511F53ull * words[0], second = 0xCD9E8D57ull * words[2];
  words[0] = (unsigned)(second >> 32) ^ words[1] ^ key_0;
  words[1] = (unsigned)second;
  words[2] = (unsigned)(first >> 32) ^ words[3] ^ key_1;
  words[3] = (unsigned)first;
}

// Element number `element` of a key's bits: word element % 4 of the block with the counter
// (element / 4, counter, stream).
__device__ TK_RANDOM_BITS_IS unsigned tk_random_bits(tk_index element, unsigned counter, unsigned stream, unsigned key_0,
                                                   unsigned key_1) {
  const unsigned long long block = (unsigned long long)element / 4;
  unsigned words[4] = {(unsigned)block, (unsigned)(block >> 32), counter, stream};
#pragma unroll
  for (int round = 0; round < 10; ++round) tk_philox_round(words, key_0 + round * 0x9E3779B9u, key_1 + round * 0xBB67AE85u);
  const unsigned low = element % 2 ? words[1] : words[0], high = element % 2 ? words[3] : words[2];
  return element % 4 < 2 ? low : high;
}
