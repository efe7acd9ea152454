// The hash and the keyed permutation of dali_tf_input/random.py: the same numbers, for operations that draw them.
#pragma once

#include <cstdint>

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

}  // namespace dali_tf_input
