// Mixes the images of a batch in pairs, the first with the last: Mixup, or CutMix by a box.
#ifndef DALI_TF_INPUT_MIX_H_
#define DALI_TF_INPUT_MIX_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "resample.h"

namespace dali_tf_input {

// How a batch is mixed: `weight` is an image's own weight outside the box, which shows its partner.
struct Mixing {
  float weight = 1;
  int64_t top = 0, left = 0, bottom = 0, right = 0;
};

// Reads the six numbers of `tf_mix.draw_mix`; returns what is wrong with them, nullptr if nothing is.
inline const char* ReadMixing(const float* numbers, int64_t count, const Work& work, Mixing* mixing) {
  if (count != 6) return "a mix is 6 numbers";
  if (!(numbers[0] >= 0 && numbers[0] <= 1)) return "a weight must be in [0, 1]";
  const auto inside = [](float place, int side) { return static_cast<int64_t>(std::min(std::max(place, 0.0f), static_cast<float>(side))); };
  mixing->weight = numbers[0];
  mixing->top = inside(numbers[1], work.height), mixing->left = inside(numbers[2], work.width);
  mixing->bottom = std::max(mixing->top, inside(numbers[3], work.height));
  mixing->right = std::max(mixing->left, inside(numbers[4], work.width));
  return nullptr;
}

DALI_TF_INPUT_INLINE float FromHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
  uint32_t bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  if (exponent == 31) bits = sign | 0x7f800000 | (fraction << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  if (exponent == 0) value = (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
  return value;
}

DALI_TF_INPUT_INLINE float FromBfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <typename T, typename Load, typename Store>
DALI_TF_INPUT_INLINE void BlendPair(T* first, T* second, int64_t count, float weight, Load load, Store store) {
  for (int64_t at = 0; at < count; ++at) {
    const float one = load(first[at]), other = load(second[at]), rest = 1 - weight;
    first[at] = store(weight * one + rest * other), second[at] = store(weight * other + rest * one);
  }
}

DALI_TF_INPUT_CLONES inline void Blend(Output type, void* first, void* second, int64_t count, float weight) {
  switch (type) {
    case kFloat32:
      return BlendPair(static_cast<float*>(first), static_cast<float*>(second), count, weight,
                       [](float value) { return value; }, [](float value) { return value; });
    case kFloat16:
      return BlendPair(static_cast<uint16_t*>(first), static_cast<uint16_t*>(second), count, weight, FromHalf, ToHalf);
    case kBfloat16:
      return BlendPair(static_cast<uint16_t*>(first), static_cast<uint16_t*>(second), count, weight, FromBfloat16, ToBfloat16);
    case kUint8:
      return BlendPair(static_cast<uint8_t*>(first), static_cast<uint8_t*>(second), count, weight,
                       [](uint8_t value) { return static_cast<float>(value); }, ToUint8);
  }
}

// Mixes in place. `work` says the size, the layout and the type of the images, which have `depth` channels.
inline void Mix(const Work& work, const Mixing& mixing, int64_t batch_size, int64_t depth, size_t item, char* images) {
  const int64_t size = depth * work.height * work.width;
  const int64_t planes = work.chw ? depth : 1, channels = work.chw ? 1 : depth;
  for (int64_t place = 0; place < batch_size / 2; ++place) {
    char* first = images + static_cast<size_t>(place * size) * item;
    char* second = images + static_cast<size_t>((batch_size - 1 - place) * size) * item;
    if (mixing.weight != 1) Blend(work.output, first, second, size, mixing.weight);
    for (int64_t plane = 0; plane < planes; ++plane) {
      for (int64_t y = mixing.top; y < mixing.bottom; ++y) {
        const int64_t start = ((plane * work.height + y) * work.width + mixing.left) * channels;
        const size_t at = static_cast<size_t>(start) * item, bytes = static_cast<size_t>((mixing.right - mixing.left) * channels) * item;
        std::swap_ranges(first + at, first + at + bytes, second + at);
      }
    }
  }
}

}  // namespace dali_tf_input
#endif  // DALI_TF_INPUT_MIX_H_
