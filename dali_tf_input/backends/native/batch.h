// Makes a batch: decodes the image of each record, and makes its views in the batch's memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "decode.h"
#include "job.h"

namespace dali_tf_input {

class Batch : public Job {
 public:
  // What is given.
  const std::vector<View>* views = nullptr;
  const float *uniforms = nullptr, *rows = nullptr;
  int64_t num_uniforms = 0, num_rows = 0;  // of an image: of all its views
  bool is_whole = false, is_turned = false;  // see Picture
  double maximum = 0;

  // Where the results go.
  std::vector<char*> images;        // of each view
  std::vector<size_t> image_bytes;  // of one image of each view
  int64_t* sizes = nullptr;         // height, width and orientation of each image; zeros, which stay if it is refused

 protected:
  bool Make(int64_t place, const Span& image, int64_t* sides) override {
    static thread_local Decoding decoding;
    std::vector<char*> out(images);
    for (size_t view = 0; view < out.size(); ++view) out[view] += image_bytes[view] * static_cast<size_t>(place);
    const float *own_uniforms = uniforms + num_uniforms * place, *own_rows = rows + kRowSize * num_rows * place;
    const Picture picture = {image, keys->sides.empty() ? nullptr : sides, is_whole, is_turned, maximum};
    int64_t size[3] = {};
    if (!decoding.Make(picture, *views, own_uniforms, own_rows, out.data(), size)) return false;
    std::copy(size, size + 3, sizes + 3 * place);
    Free(place);
    return true;
  }
};

}  // namespace dali_tf_input
