// The orientation of an image: how it is to be turned to be upright, as its EXIF data say.
//
// Source: the Exif standard, tag 0x0112. Of a stored image (y, x) is shown at (y, x) with orientation 1; 2, 3 and 4 mirror
// it; 5 to 8 swap the axes, too. records/orientation.py and tf_orientation.py read it to the same value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

// Returns what the first EXIF data of a JPEG, PNG or WebP say, as `find_orientation` of records/orientation.py: 1 if there
// are none.
inline int FindOrientation(const uint8_t* data, size_t size) {
  constexpr char kPrefix[] = "Exif\0";  // and the zero at its end
  const auto starts = [=](size_t at, const char* text, size_t length) {
    return at <= size && size - at >= length && !std::memcmp(data + at, text, length);
  };
  const auto read = [=](size_t from, size_t bytes, bool is_big) {
    size_t value = 0;
    for (size_t number = 0; number < bytes; ++number) value = value << 8 | data[from + (is_big ? number : bytes - 1 - number)];
    return value;
  };
  if (starts(0, "\xFF\xD8", 2)) {
    for (size_t at = 2; at + 4 <= size && data[at] == 0xFF;) {
      const int marker = data[at + 1];
      const size_t length = read(at + 2, 2, true), next = std::min(size, at + 2 + length);
      if (marker == 0xFF) {  // a byte of padding
        ++at;
      } else if (marker == 0xDA || length < 2) {  // the scan
        return 1;
      } else if (marker == 0xE1 && length >= 8 && starts(at + 4, kPrefix, 6)) {
        return ReadOrientation(data + at + 10, next - at - 10);
      } else {
        at = next;
      }
    }
    return 1;
  }
  const bool is_png = starts(0, "\x89PNG\r\n\x1A\n", 8);
  // The header of a WebP announces EXIF data.
  if (!is_png && !(starts(0, "RIFF", 4) && starts(8, "WEBPVP8X", 8) && size > 20 && data[20] & 0x08)) return 1;
  for (size_t at = is_png ? 8 : 12; at + 8 <= size;) {
    const size_t length = read(at + (is_png ? 0 : 4), 4, is_png), next = std::min(size, at + 8 + length);
    if (starts(at + (is_png ? 4 : 0), is_png ? "eXIf" : "EXIF", 4)) {
      at += 8;
      if (next - at >= 6 && starts(at, kPrefix, 6)) at += 6;
      return ReadOrientation(data + at, next - at);
    }
    at = next + (is_png ? 4 : length % 2);  // its CRC, or a byte of padding
  }
  return 1;
}

}  // namespace dali_tf_input
