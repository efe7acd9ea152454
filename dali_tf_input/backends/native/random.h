// The hash and the keyed permutation of dali_tf_input/random.py, and TensorFlow's stateless random numbers: the same
// numbers, for operations that draw them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace dali_tf_input {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;  // 2**64 over the golden ratio: spreads small counters
constexpr int kRounds = 6, kMinBits = 6;

// SplitMix64's finalizer.
inline uint64_t Mix64(uint64_t value) {
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
  value = (value ^ value >> 27) * 0x94D049BB133111EBu;
  return value ^ value >> 31;
}

// Adds a word to a hash, which begins as 0.
inline uint64_t HashWord(uint64_t hash, uint64_t word) { return Mix64(hash + kGolden + word); }

// Moves places as a pseudo-random permutation of [0, size) for each key.
inline uint64_t Permute(uint64_t place, uint64_t size, uint64_t key) {
  if (size <= 1) return place;
  int bits = 64 - __builtin_clzll(size - 1);
  if (bits < kMinBits) bits = kMinBits;
  const int high_bits = bits / 2, low_bits = bits - high_bits;
  const uint64_t low_mask = (uint64_t{1} << low_bits) - 1, high_mask = (uint64_t{1} << high_bits) - 1;
  do {  // a Feistel network permutes the next power of two; walk until the place is below `size`
    uint64_t high = place >> low_bits, low = place & low_mask;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t round_key = key + static_cast<uint64_t>(round) * kGolden;
      if (round % 2) {
        low ^= Mix64(high + round_key) & low_mask;
      } else {
        high ^= Mix64(low + round_key) & high_mask;
      }
    }
    place = high << low_bits | low;
  } while (place >= size);
  return place;
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
inline void Philox(const uint32_t* key, const uint32_t* counter, uint32_t* out) {
  uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {key[0], key[1]};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9, k[1] += 0xBB67AE85;
  }
  std::copy(c, c + 4, out);
}

// Draws `count` numbers in [0, 1), as StatelessRandomUniform does for the seed (seed, key).
// Source: tensorflow/core/kernels/stateless_random_ops.cc and lib/random/random_distributions.h.
inline void DrawUniforms(int64_t seed, int64_t key, int64_t count, float* out) {
  const uint32_t kScramble[2] = {0x3ec8f720, 0x02461e29};
  const uint32_t words[4] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32),
                             static_cast<uint32_t>(key), static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32)};
  uint32_t mixed[4], drawn[4];
  Philox(kScramble, words, mixed);
  uint32_t counter[4] = {0, 0, mixed[2], mixed[3]};
  for (int64_t at = 0; at < count; ++at) {
    if (at % 4 == 0) {
      Philox(mixed, counter, drawn);
      if (!++counter[0]) ++counter[1];
    }
    const uint32_t bits = 0x3F800000 | (drawn[at % 4] & 0x7FFFFF);  // in [1, 2)
    std::memcpy(out + at, &bits, 4);
    out[at] -= 1;
  }
}

}  // namespace dali_tf_input
