// The orientation of an image: how it is to be turned to be upright, as its EXIF data say.
//
// Source: the Exif standard, tag 0x0112. Of a stored image (y, x) is shown at (y, x) with orientation 1; 2, 3 and 4 mirror
// it; 5 to 8 swap the axes, too. records/orientation.py and tf_orientation.py read it to the same value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dali_tf_input {

// Whether the axes of the stored image are swapped to show it, and which of them run backward.
inline bool IsTransposed(int orientation) { return orientation >= 5; }
inline bool RunsBackward(int orientation, int axis) {  // 0 is y
  const int backward[] = {3, 4, 6, 7, 2, 3, 7, 8};
  for (int number = 0; number < 4; ++number) {
    if (backward[4 * axis + number] == orientation) return true;
  }
  return false;
}

// Returns what EXIF data say, 1 to 8; 1 if they say nothing, or are damaged.
inline int ReadOrientation(const uint8_t* data, size_t size) {
  constexpr int kTag = 0x0112, kShort = 3, kLong = 4;
  if (size < 8 || data[0] != data[1] || (data[0] != 'I' && data[0] != 'M')) return 1;
  const auto read = [data](size_t at, size_t bytes) {
    size_t value = 0;
    for (size_t number = 0; number < bytes; ++number) {
      value = value << 8 | data[at + (data[0] == 'M' ? number : bytes - 1 - number)];
    }
    return value;
  };
  size_t at = read(4, 4);
  if (read(2, 2) != 42 || at > size - 2) return 1;
  size_t count = read(at, 2);
  for (at += 2; count && at + 12 <= size; --count, at += 12) {
    if (read(at, 2) != kTag) continue;
    const size_t type = read(at + 2, 2), value = type == kShort ? read(at + 8, 2) : type == kLong ? read(at + 8, 4) : 1;
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

}  // namespace dali_tf_input
