// Which encoded images are accepted: those that both backends decode to the same pixels.
//
// index/decoders.py (`read_header`) has the list in words; tf_formats.py (`is_accepted`) does the same with TensorFlow.
#pragma once

#include <cstring>

#include "example.h"

namespace dali_tf_input {

// Returns whether DALI's parser of WebP finds the EXIF data that a header announces; it refuses the image if not. It does
// not skip the byte that pads a chunk of odd size.
inline bool FindsExif(const Span& webp) {
  uint64_t place = 12;
  while (place + 8 <= webp.size()) {
    const uint8_t* at = webp.at + place;
    place += 8 + (at[4] | at[5] << 8 | at[6] << 16 | uint64_t{at[7]} << 24);
    if (!std::memcmp(at, "EXIF", 4)) return place <= webp.size();
  }
  return false;
}

inline bool IsAccepted(const Span& image) {
  const uint8_t* at = image.at;
  const auto starts = [&](size_t place, const char* text, size_t size) {
    return image.size() >= place + size && !std::memcmp(at + place, text, size);
  };
  if (starts(0, "\xFF\xD8\xFF", 3) || starts(0, "\x89PNG\r\n\x1A\n", 8)) return true;
  if (starts(0, "BM", 2)) {
    if (image.size() < 30) return false;
    const int bits = at[28] | at[29] << 8;
    if (bits == 24 || bits == 32) return true;
    if (bits != 8 || !starts(14, "\x28", 1) || image.size() < 54 + 4 * 256) return false;
    for (int number = 0; number < 256; ++number) {  // a palette of shades of gray, in their order
      const uint8_t* color = at + 54 + 4 * number;
      if (color[0] != number || color[1] != number || color[2] != number) return false;
    }
    return true;
  }
  if (!starts(0, "RIFF", 4) || !starts(8, "WEBP", 4) || image.size() < 25) return false;
  if (starts(12, "VP8L", 4)) return !(at[24] & 0x10);  // transparency
  if (starts(12, "VP8 ", 4)) return true;
  return starts(12, "VP8X", 4) && !(at[20] & 0x12) && (!(at[20] & 0x08) || FindsExif(image));  // 0x02: an animation
}

}  // namespace dali_tf_input
