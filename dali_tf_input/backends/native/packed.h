// A packed batch, which DALI's TensorFlow plugin gives to the operator of dali_images.cc.
//
// The plugin takes one dense tensor for a batch, and images differ in size. So each image has a row, and all rows are as
// long: a `Place`; the values of the image, such as its label, of a size that the graph knows; and a share of the bytes of
// all images, one after the other, in the last share followed by zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dali_tf_input {

// Where an image is: at an offset in a file, or, if `file` is -1, in the shares of the rows.
struct Place {
  int64_t file, offset, size;
};

constexpr int64_t kPlaceSize = sizeof(Place);

// Calls `part(row, at, size)` for each part of an image in the shares of rows: a row, and from where in its share.
template <typename Part>
void ForParts(const Place& place, int64_t share, Part part) {
  for (int64_t offset = place.offset, left = place.size; left > 0;) {
    const int64_t at = offset % share, size = left < share - at ? left : share - at;
    part(offset / share, at, size);
    offset += size, left -= size;
  }
}

}  // namespace dali_tf_input
