// Augmentation of a uint8 image, height x width x 3, by rows of `Primitive`, which is documented in
// spec/primitives.py; and the final step, from bytes to the model's input.
#ifndef DALI_TF_INPUT_AUGMENT_H_
#define DALI_TF_INPUT_AUGMENT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "resample.h"

namespace dali_tf_input {

constexpr int kRowSize = 13;
enum Primitive {
  kNothing, kColor, kContrast, kSolarize, kPosterize, kAdd, kAutocontrast, kEqualize, kFilter, kBlur, kWarp, kErase,
  kNumPrimitives
};

// Fills line y of the output from a line of bytes, mirrored or not. `row` has room for the line.
DALI_TF_INPUT_CLONES inline void FinishLine(const Work& work, const uint8_t* line, bool mirror, int y, float* row, void* out) {
  const bool is_uint8 = work.output == kUint8;
  for (int x = 0; x < work.width; ++x) {
    const uint8_t* from = line + 3 * (mirror ? work.width - 1 - x : x);
    for (int channel = 0; channel < 3; ++channel) {
      const float value = from[channel];
      row[3 * x + channel] = is_uint8 ? value : (value - work.mean[channel]) * work.scale[channel];
    }
  }
  WriteOutput(row, work, y, out);
}

class Augmenter {
 public:
  Augmenter(int height, int width) : height_(height), width_(width), size_(static_cast<size_t>(3) * height * width) {}

  // Applies a row: its primitive and its 12 numbers. The result is in `pixels`.
  void Apply(const float* row, std::vector<uint8_t>* pixels) {
    const float* numbers = row + 1;
    uint8_t* image = pixels->data();
    switch (static_cast<int>(row[0])) {
      case kColor:
        return Color(numbers, image, size_);
      case kContrast:
        return Contrast(numbers[0], image);
      case kSolarize:
        return LookUp(image, [&](int value) { return static_cast<float>(static_cast<float>(value) < numbers[0] ? value : 255 - value); });
      case kPosterize:
        return LookUp(image, [&](int value) { return static_cast<float>(value & static_cast<int>(numbers[0])); });
      case kAdd:
        return LookUp(image, [&](int value) { return value < 128 ? static_cast<float>(value) + numbers[0] : static_cast<float>(value); });
      case kAutocontrast:
        return Autocontrast(image);
      case kEqualize:
        return Equalize(image);
      case kFilter:
        scratch_.resize(size_);
        Filter(numbers, image, scratch_.data());
        return pixels->swap(scratch_);
      case kBlur:
        return Blur(numbers[0], image);
      case kWarp:
        scratch_.resize(size_);
        numbers[7] != 0 ? WarpBilinear(numbers, image, scratch_.data()) : WarpNearest(numbers, image, scratch_.data());
        return pixels->swap(scratch_);
      case kErase:
        return Erase(numbers, image);
    }
  }

  // Applies rows to an image, which they change; mirrors, normalizes and casts it.
  void Finish(const Work& work, const float* rows, int64_t num_rows, bool mirror, std::vector<uint8_t>* pixels, void* out) {
    for (int64_t step = 0; step < num_rows; ++step) Apply(rows + kRowSize * step, pixels);
    const size_t stride = 3 * static_cast<size_t>(width_);
    row_.resize(std::max(row_.size(), stride + 1));
    for (int y = 0; y < height_; ++y) FinishLine(work, pixels->data() + stride * static_cast<size_t>(y), mirror, y, row_.data(), out);
  }

  bool Fits(const Work& work) const { return work.height == height_ && work.width == width_; }

 private:
  static DALI_TF_INPUT_CLONES void Color(const float* matrix, uint8_t* image, size_t size) {
    const float m[12] = {matrix[0], matrix[1], matrix[2], matrix[3], matrix[4],  matrix[5],
                         matrix[6], matrix[7], matrix[8], matrix[9], matrix[10], matrix[11]};
    for (size_t at = 0; at < size; at += 3) {
      const float red = image[at], green = image[at + 1], blue = image[at + 2];
      image[at] = ToUint8(m[0] * red + m[1] * green + m[2] * blue + m[3]);
      image[at + 1] = ToUint8(m[4] * red + m[5] * green + m[6] * blue + m[7]);
      image[at + 2] = ToUint8(m[8] * red + m[9] * green + m[10] * blue + m[11]);
    }
  }

  // Replaces each value by that of a function of it.
  template <typename Function>
  void LookUp(uint8_t* image, Function function) const {
    uint8_t table[256];
    for (int value = 0; value < 256; ++value) table[value] = ToUint8(function(value));
    for (size_t at = 0; at < size_; ++at) image[at] = table[image[at]];
  }

  // The same for each channel.
  template <typename Function>
  void LookUpChannels(uint8_t* image, Function function) const {
    uint8_t tables[3][256];
    for (int channel = 0; channel < 3; ++channel) {
      for (int value = 0; value < 256; ++value) tables[channel][value] = ToUint8(function(channel, value));
    }
    for (size_t at = 0; at < size_; at += 3) {
      image[at] = tables[0][image[at]], image[at + 1] = tables[1][image[at + 1]], image[at + 2] = tables[2][image[at + 2]];
    }
  }

  void Contrast(float factor, uint8_t* image) const {
    uint64_t sums[3] = {0, 0, 0};
    for (size_t at = 0; at < size_; at += 3) sums[0] += image[at], sums[1] += image[at + 1], sums[2] += image[at + 2];
    const double sum = 0.299 * static_cast<double>(sums[0]) + 0.587 * static_cast<double>(sums[1]) + 0.114 * static_cast<double>(sums[2]);
    const float mean = static_cast<float>(sum / (static_cast<double>(size_) / 3));
    LookUp(image, [&](int value) { return mean + factor * (static_cast<float>(value) - mean); });
  }

  void Autocontrast(uint8_t* image) const {
    int low[3] = {255, 255, 255}, high[3] = {0, 0, 0};
    for (size_t at = 0; at < size_; at += 3) {
      for (int channel = 0; channel < 3; ++channel) {
        low[channel] = std::min<int>(low[channel], image[at + static_cast<size_t>(channel)]);
        high[channel] = std::max<int>(high[channel], image[at + static_cast<size_t>(channel)]);
      }
    }
    LookUpChannels(image, [&](int channel, int value) {
      const int range = high[channel] - low[channel];
      return range ? static_cast<float>(value - low[channel]) * 255.0f / static_cast<float>(range) : static_cast<float>(value);
    });
  }

  void Equalize(uint8_t* image) const {
    int counts[3][256] = {}, lowest[3];
    for (size_t at = 0; at < size_; at += 3) ++counts[0][image[at]], ++counts[1][image[at + 1]], ++counts[2][image[at + 2]];
    const int total = static_cast<int>(size_ / 3);
    for (int channel = 0; channel < 3; ++channel) {
      int* sums = counts[channel];
      lowest[channel] = *std::find_if(sums, sums + 256, [](int count) { return count > 0; });
      for (int value = 1; value < 256; ++value) sums[value] += sums[value - 1];
    }
    LookUpChannels(image, [&](int channel, int value) {
      const int rest = total - lowest[channel];
      if (!rest) return static_cast<float>(value);
      return static_cast<float>(counts[channel][value] - lowest[channel]) * 255.0f / static_cast<float>(rest);
    });
  }

  // Reflects a position beyond the border back into the image, without repeating the last pixel.
  static int Reflect(int place, int side) {
    if (side == 1) return 0;
    const int period = 2 * (side - 1);
    place = ((place % period) + period) % period;
    return std::min(place, period - place);
  }

  void Filter(const float* kernel, const uint8_t* image, uint8_t* out) {
    line_.resize(9 * (static_cast<size_t>(width_) + 2));
    const size_t stride = 3 * static_cast<size_t>(width_);
    for (int y = 0; y < height_; ++y) {
      float* lines[3];
      for (int tap = 0; tap < 3; ++tap) {
        lines[tap] = line_.data() + static_cast<size_t>(tap) * (stride + 6);
        Widen(image + stride * static_cast<size_t>(Reflect(y + tap - 1, height_)), 1, lines[tap]);
      }
      FilterLine(kernel, lines, out + stride * static_cast<size_t>(y), stride);
    }
  }

  static DALI_TF_INPUT_CLONES void FilterLine(const float* kernel, float* const* lines, uint8_t* out, size_t stride) {
    const float *above = lines[0], *at = lines[1], *below = lines[2];
    for (size_t x = 0; x < stride; ++x) {
      const float sum = kernel[0] * above[x] + kernel[1] * above[x + 3] + kernel[2] * above[x + 6] + kernel[3] * at[x] +
                        kernel[4] * at[x + 3] + kernel[5] * at[x + 6] + kernel[6] * below[x] + kernel[7] * below[x + 3] +
                        kernel[8] * below[x + 6];
      out[x] = ToUint8(sum);
    }
  }

  // Writes a line of the image, with `margin` reflected pixels at both ends, as floats.
  void Widen(const uint8_t* line, int margin, float* out) const {
    for (int x = -margin; x < 0; ++x) Copy(line, Reflect(x, width_), out + 3 * (x + margin));
    for (int at = 0; at < 3 * width_; ++at) out[3 * margin + at] = line[at];
    for (int x = width_; x < width_ + margin; ++x) Copy(line, Reflect(x, width_), out + 3 * (x + margin));
  }

  static void Copy(const uint8_t* line, int x, float* out) { out[0] = line[3 * x], out[1] = line[3 * x + 1], out[2] = line[3 * x + 2]; }

  void Blur(float sigma, uint8_t* image) {
    const int radius = static_cast<int>(std::ceil(3 * sigma));
    std::vector<float> kernel(static_cast<size_t>(2 * radius) + 1);
    float sum = 0;
    for (int tap = -radius; tap <= radius; ++tap) {
      const float distance = static_cast<float>(tap) / sigma;
      sum += kernel[static_cast<size_t>(tap + radius)] = std::exp(-0.5f * distance * distance);
    }
    for (float& weight : kernel) weight /= sum;
    const size_t stride = 3 * static_cast<size_t>(width_);
    const float* half = kernel.data() + radius;
    blurred_.resize(size_);  // down
    for (int y = 0; y < height_; ++y) {
      float* to = blurred_.data() + stride * static_cast<size_t>(y);
      const uint8_t* middle = image + stride * static_cast<size_t>(y);
      for (size_t x = 0; x < stride; ++x) to[x] = half[0] * middle[x];
      for (int tap = 1; tap <= radius; ++tap) {
        const uint8_t *above = image + stride * static_cast<size_t>(Reflect(y - tap, height_)), *below = image + stride * static_cast<size_t>(Reflect(y + tap, height_));
        AddLines(half[tap], above, below, to, stride);
      }
    }
    line_.resize(stride + 6 * static_cast<size_t>(radius));
    row_.resize(stride);
    for (int y = 0; y < height_; ++y) {  // across
      const float* from = blurred_.data() + stride * static_cast<size_t>(y);
      float* line = line_.data();
      std::copy(from, from + stride, line + 3 * radius);
      for (int x = 1; x <= radius; ++x) {
        for (int channel = 0; channel < 3; ++channel) {
          line[3 * (radius - x) + channel] = from[3 * Reflect(-x, width_) + channel];
          line[3 * (radius + width_ - 1 + x) + channel] = from[3 * Reflect(width_ - 1 + x, width_) + channel];
        }
      }
      SumLine(half, radius, line + 3 * radius, row_.data(), image + stride * static_cast<size_t>(y), stride);
    }
  }

  static DALI_TF_INPUT_CLONES void AddLines(float weight, const uint8_t* above, const uint8_t* below, float* to, size_t stride) {
    for (size_t x = 0; x < stride; ++x) to[x] += weight * static_cast<float>(above[x] + below[x]);
  }

  // The kernel is symmetric, from its middle on; the line goes on to both sides.
  static DALI_TF_INPUT_CLONES void SumLine(const float* half, int radius, const float* line, float* row, uint8_t* out, size_t stride) {
    for (size_t x = 0; x < stride; ++x) row[x] = half[0] * line[x];
    for (int tap = 1; tap <= radius; ++tap) {
      const float weight = half[tap], *before = line - 3 * tap, *after = line + 3 * tap;
      for (size_t x = 0; x < stride; ++x) row[x] += weight * (before[x] + after[x]);
    }
    for (size_t x = 0; x < stride; ++x) out[x] = ToUint8(row[x]);
  }

  // The matrix says where in the image each place of the output comes from; both count from the edges of pixels.
  void WarpNearest(const float* matrix, const uint8_t* image, uint8_t* out) {
    const uint8_t fill[3] = {ToUint8(matrix[6]), ToUint8(matrix[6]), ToUint8(matrix[6])};
    places_.resize(static_cast<size_t>(width_));
    for (int y = 0; y < height_; ++y) {
      FindPlaces(matrix, y, height_, width_, places_.data());
      for (int x = 0; x < width_; ++x, out += 3) {
        const uint8_t* from = places_[static_cast<size_t>(x)] < 0 ? fill : image + 3 * static_cast<int64_t>(places_[static_cast<size_t>(x)]);
        out[0] = from[0], out[1] = from[1], out[2] = from[2];
      }
    }
  }

  // Finds the index of the source pixel for each pixel of an output line; -1 if outside the image.
  static DALI_TF_INPUT_CLONES void FindPlaces(const float* matrix, int y, int height, int width, int* places) {
    const float at_y = static_cast<float>(y) + 0.5f, right = static_cast<float>(width), bottom = static_cast<float>(height);
    const float xx = matrix[0], yx = matrix[3], across = matrix[1] * at_y + matrix[2], down = matrix[4] * at_y + matrix[5];
    for (int x = 0; x < width; ++x) {
      const float from_x = xx * (static_cast<float>(x) + 0.5f) + across, from_y = yx * (static_cast<float>(x) + 0.5f) + down;
      const bool is_inside = (from_x >= 0) & (from_x < right) & (from_y >= 0) & (from_y < bottom);
      const float inside_x = is_inside ? from_x : 0, inside_y = is_inside ? from_y : 0;
      const int place = static_cast<int>(inside_y) * width + static_cast<int>(inside_x);
      places[x] = is_inside ? place : -1;
    }
  }

  void WarpBilinear(const float* matrix, const uint8_t* image, uint8_t* out) const {
    for (int y = 0; y < height_; ++y) {
      const float at_y = static_cast<float>(y) + 0.5f;
      const float start[2] = {matrix[1] * at_y + matrix[2] - 0.5f, matrix[4] * at_y + matrix[5] - 0.5f};
      BlendLine(matrix, start, height_, width_, image, out);
      for (int x = 0; x < width_; ++x, out += 3) {
        const float from_x = matrix[0] * (static_cast<float>(x) + 0.5f) + start[0], from_y = matrix[3] * (static_cast<float>(x) + 0.5f) + start[1];
        if (!HasNeighbors(from_x, from_y, height_, width_)) BlendEdge(from_x, from_y, matrix[6], image, out);
      }
    }
  }

  static DALI_TF_INPUT_INLINE bool HasNeighbors(float x, float y, int height, int width) {
    return (x >= 0) & (x < static_cast<float>(width - 1)) & (y >= 0) & (y < static_cast<float>(height - 1));
  }

  // Blends the four pixels around each place of a line that has them all.
  static DALI_TF_INPUT_CLONES void BlendLine(const float* matrix, const float* start, int height, int width, const uint8_t* image, uint8_t* out) {
    const int64_t stride = 3 * int64_t{width};
    for (int x = 0; x < width; ++x) {
      const float from_x = matrix[0] * (static_cast<float>(x) + 0.5f) + start[0], from_y = matrix[3] * (static_cast<float>(x) + 0.5f) + start[1];
      if (!HasNeighbors(from_x, from_y, height, width)) continue;
      const int left = static_cast<int>(from_x), top = static_cast<int>(from_y);
      const int part_x = static_cast<int>((from_x - static_cast<float>(left)) * 256 + 0.5f);
      const int part_y = static_cast<int>((from_y - static_cast<float>(top)) * 256 + 0.5f);
      const int weights[4] = {(256 - part_x) * (256 - part_y), part_x * (256 - part_y), (256 - part_x) * part_y, part_x * part_y};
      const uint8_t *above = image + stride * top + 3 * left, *below = above + stride;
      for (int channel = 0; channel < 3; ++channel) {
        const int upper = above[channel] * weights[0] + above[channel + 3] * weights[1];
        out[3 * x + channel] = static_cast<uint8_t>((upper + below[channel] * weights[2] + below[channel + 3] * weights[3] + 32768) >> 16);
      }
    }
  }

  // A pixel of which some neighbors, or all, are outside of the image.
  void BlendEdge(float from_x, float from_y, float fill, const uint8_t* image, uint8_t* out) const {
    if (from_x <= -1 || from_x >= static_cast<float>(width_) || from_y <= -1 || from_y >= static_cast<float>(height_)) {
      out[0] = out[1] = out[2] = ToUint8(fill);
      return;
    }
    const float left = std::floor(from_x), top = std::floor(from_y), part_x = from_x - left, part_y = from_y - top;
    float sum[3] = {0, 0, 0};
    for (int corner = 0; corner < 4; ++corner) {
      const float x = left + static_cast<float>(corner & 1), y = top + static_cast<float>(corner >> 1);
      const float weight = (corner & 1 ? part_x : 1 - part_x) * (corner >> 1 ? part_y : 1 - part_y);
      const bool is_inside = x >= 0 && x < static_cast<float>(width_) && y >= 0 && y < static_cast<float>(height_);
      const uint8_t* from = is_inside ? image + 3 * (static_cast<int64_t>(y) * width_ + static_cast<int64_t>(x)) : nullptr;
      for (int channel = 0; channel < 3; ++channel) sum[channel] += weight * (from ? static_cast<float>(from[channel]) : fill);
    }
    for (int channel = 0; channel < 3; ++channel) out[channel] = ToUint8(sum[channel]);
  }

  // The numbers of a drawn row: top, left, bottom, right, seed, nothing, and the fill and the noise of each channel.
  void Erase(const float* numbers, uint8_t* image) const {
    const int top = Inside(numbers[0], height_), left = Inside(numbers[1], width_);
    const int bottom = Inside(numbers[2], height_), right = Inside(numbers[3], width_);
    const float *fill = numbers + 6, *noise = numbers + 9;
    const bool is_noise = noise[0] != 0 || noise[1] != 0 || noise[2] != 0;
    const uint32_t seed = static_cast<uint32_t>(numbers[4]);
    for (int y = top; y < bottom; ++y) {
      for (int x = left; x < right; ++x) {
        const uint32_t number = 3 * (static_cast<uint32_t>(y) * static_cast<uint32_t>(width_) + static_cast<uint32_t>(x));
        for (uint32_t channel = 0; channel < 3; ++channel) {
          const float deviation = is_noise ? noise[channel] * Normal(number + channel + seed) : 0.0f;
          image[3 * (static_cast<size_t>(y) * static_cast<size_t>(width_) + static_cast<size_t>(x)) + channel] = ToUint8(fill[channel] + deviation);
        }
      }
    }
  }

  static int Inside(float place, int side) { return static_cast<int>(std::min(std::max(place, 0.0f), static_cast<float>(side))); }

  // A number that is normal except in the tails: the sum of the four bytes of a hash, which applies
  // murmur3's last steps.
  static float Normal(uint32_t hash) {
    hash ^= hash >> 16, hash *= 0x85ebca6bu, hash ^= hash >> 13, hash *= 0xc2b2ae35u, hash ^= hash >> 16;
    const uint32_t sum = (hash & 255) + (hash >> 8 & 255) + (hash >> 16 & 255) + (hash >> 24);
    return (static_cast<float>(sum) - 510.0f) / 147.8f;
  }

  const int height_, width_;
  const size_t size_;
  std::vector<uint8_t> scratch_;
  std::vector<float> blurred_, line_, row_;
  std::vector<int> places_;
};

// Returns what is wrong with rows; nullptr if nothing is.
inline const char* CheckRows(const float* rows, int64_t count) {
  for (int64_t at = 0; at < count; ++at) {
    if (!(std::abs(rows[at]) < 1 << 25)) return "the numbers of a row must be finite and below 2^25";
    if (at % kRowSize == 0 && (rows[at] < 0 || rows[at] >= kNumPrimitives)) return "there is no such primitive";
    if (at % kRowSize == 1 && rows[at - 1] == kBlur && !(rows[at] > 0 && rows[at] <= 30)) return "sigma must be in (0, 30]";
    if (at % kRowSize == 5 && rows[at - 5] == kErase && rows[at] < 0) return "a seed must not be negative";
  }
  return nullptr;
}

// Applies rows to an image, mirrors, normalizes and casts it.
inline void Augment(const Work& work, const uint8_t* image, const float* rows, int64_t num_rows, bool mirror, void* out) {
  std::vector<uint8_t> pixels(image, image + static_cast<size_t>(3) * work.height * work.width);
  Augmenter(work.height, work.width).Finish(work, rows, num_rows, mirror, &pixels, out);
}

}  // namespace dali_tf_input
#endif  // DALI_TF_INPUT_AUGMENT_H_
