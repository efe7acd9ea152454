// The output's region in an image: the plans of spec/crops.py, which documents them, to the bit.
#ifndef DALI_TF_INPUT_REGION_H_
#define DALI_TF_INPUT_REGION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "resample.h"

namespace dali_tf_input {

// `CROPS` in tf_native.py. What each has in `numbers`, after the probability of a mirror:
enum Crop {
  kNoCrop = 0,
  kCenterCrop = 1,         // resize_shorter
  kResizeRandomCrop = 2,   // height and width to resize to
  kRandomResizedCrop = 3,  // areas from, to; logarithms of the aspect ratios from, to; aspect ratios from, to
  kRandomCrop = 4,
  kCoverCrop = 5,  // height and width to cover; whether the position is random
  kLetterbox = 6,  // the value of what does not show the image
};
constexpr int kNumbers[] = {1, 2, 3, 7, 1, 4, 2};

// Finds the region of an image of known size. `uniforms`: for the mirror, for the position (y, x), and for
// kRandomResizedCrop the areas and then the aspect ratios of all attempts.
inline void FindRegion(const Work& work, Crop crop, const double* numbers, const float* uniforms, int64_t count, Image* image) {
  const double size[2] = {static_cast<double>(image->Shown(0)), static_cast<double>(image->Shown(1))};
  const double out[2] = {static_cast<double>(work.height), static_cast<double>(work.width)};
  double *start = image->start, *extent = image->extent;
  image->mirror = uniforms[0] < static_cast<float>(numbers[0]);
  if (crop == kLetterbox) {
    const double scale = std::min(out[0] / size[0], out[1] / size[1]);
    for (int axis = 0; axis < 2; ++axis) {
      const double resized = std::min(std::max(std::floor(size[axis] * scale + 0.5), 1.0), out[axis]);
      image->shown[axis] = static_cast<int>(resized), image->before[axis] = static_cast<int>((out[axis] - resized) / 2);
      start[axis] = 0, extent[axis] = size[axis];
    }
    return;
  }
  bool fits = false;  // of a kRandomResizedCrop, any attempt
  if (crop == kRandomResizedCrop) {
    extent[0] = std::min(size[0], std::floor(size[1] / numbers[5] + 0.5));
    extent[1] = std::min(size[1], std::floor(size[0] * numbers[6] + 0.5));
    const int64_t attempts = (count - 3) / 2;
    for (int64_t attempt = 0; attempt < attempts; ++attempt) {
      const double part = uniforms[3 + attempt], place = uniforms[3 + attempts + attempt];
      const double area = (numbers[1] + part * (numbers[2] - numbers[1])) * size[0] * size[1];
      const double ratio = std::exp(numbers[3] + place * (numbers[4] - numbers[3]));
      const double height = std::max(std::floor(std::sqrt(area / ratio) + 0.5), 1.0);
      const double width = std::max(std::floor(std::sqrt(area * ratio) + 0.5), 1.0);
      if (height <= size[0] && width <= size[1]) {
        extent[0] = height, extent[1] = width, fits = true;
        break;
      }
    }
  }
  for (int axis = 0; axis < 2; ++axis) {
    const double position = uniforms[1 + axis];
    if (crop == kRandomResizedCrop) {
      const double excess = size[axis] - extent[axis];
      start[axis] = fits ? std::floor(position * (excess + 1)) : std::floor(excess / 2);
    } else if (crop == kRandomCrop) {
      const double excess = size[axis] - out[axis];
      start[axis] = excess >= 0 ? std::floor(position * (excess + 1)) : std::floor(excess / 2);
      extent[axis] = out[axis];
    } else {
      double resized = out[axis], corner = 0;
      if (crop == kCenterCrop) {
        resized = std::floor(size[axis] * (numbers[1] / std::min(size[0], size[1])) + 0.5);
        corner = std::floor((resized - out[axis]) / 2);
      } else if (crop == kCoverCrop) {
        resized = std::floor(size[axis] * std::max(numbers[1] / size[0], numbers[2] / size[1]) + 0.5);
        corner = std::floor(numbers[3] != 0 ? position * (resized - out[axis] + 1) : (resized - out[axis]) / 2);
      } else if (crop == kResizeRandomCrop) {
        resized = numbers[1 + axis];
        corner = std::floor(position * (resized - out[axis] + 1));
      }
      start[axis] = corner * size[axis] / resized;
      extent[axis] = out[axis] * size[axis] / resized;
    }
  }
}

}  // namespace dali_tf_input
#endif  // DALI_TF_INPUT_REGION_H_
