// Packs a batch: sets the image of each record apart, and copies it, or says where it is in its file. See packed.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "format.h"
#include "job.h"
#include "packed.h"

namespace dali_tf_input {

class Split : public Job {
 public:
  // The image of each record, as long as this lives. A refused one is empty.
  std::vector<Span> images;

  // Returns where the images are in their files, of records that were read.
  std::vector<Place> List() const {
    std::vector<Place> places;
    for (int64_t place = 0; place < count; ++place) {
      const Span& image = images[static_cast<size_t>(place)];
      const int64_t number = positions[place], before = image.at - Example(place).at;
      places.push_back({records->file_of[number], records->extents[2 * number] + kHeader + before, static_cast<int64_t>(image.size())});
    }
    return places;
  }

 protected:
  bool Make(int64_t place, const Span& image, int64_t* sides) override {
    images[static_cast<size_t>(place)] = image;
    if (keys->sides.empty()) {
      if (!IsAccepted(image)) Fail(place, Wrong(place, "no JPEG, PNG, BMP or WebP that both backends decode"));
      return true;
    }
    // Sides up to 2^30 cannot overflow.
    const bool is_small = sides[0] >= 0 && sides[1] >= 0 && (sides[0] | sides[1]) >> 30 == 0;
    return is_small && static_cast<uint64_t>(3 * sides[0] * sides[1]) == image.size();
  }
};

// Writes a packed batch, of `row_size` bytes a row, but for the values, which take `values_size` of them. Without `places`,
// the images are copied into the rows.
inline void WritePacked(const std::vector<Span>& images, const std::vector<Place>& places, int64_t row_size, int64_t values_size, uint8_t* rows) {
  const int64_t start = kPlaceSize + values_size, share = row_size - start, count = static_cast<int64_t>(images.size());
  int64_t written = 0;
  for (int64_t number = 0; number < count; ++number) {
    const Span& image = images[static_cast<size_t>(number)];
    const Place place = places.empty() ? Place{-1, written, static_cast<int64_t>(image.size())} : places[static_cast<size_t>(number)];
    std::memcpy(rows + row_size * number, &place, sizeof place);
    if (!places.empty()) continue;
    const uint8_t* from = image.at;
    ForParts(place, share, [&](int64_t row, int64_t at, int64_t size) {
      std::memcpy(rows + row_size * row + start + at, from, static_cast<size_t>(size));
      from += size;
    });
    written += place.size;
  }
  ForParts({-1, written, share * count - written}, share, [&](int64_t row, int64_t at, int64_t size) {
    std::memset(rows + row_size * row + start + at, 0, static_cast<size_t>(size));
  });
}

}  // namespace dali_tf_input
