// One pass from a decoded image to what the model sees: resize, crop, mirror, normalize, cast.
//
// Each output pixel is a weighted sum of source pixels, by rows and then by columns. Source pixel p covers [p, p + 1).
// The filters are those of TensorFlow's ScaleAndTranslate: weights of pixels outside the image are left out, and the
// others sum to 1. Source: tensorflow/core/kernels/image/{scale_and_translate_op,sampling_kernels}.
#ifndef DALI_TF_INPUT_RESAMPLE_H_
#define DALI_TF_INPUT_RESAMPLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "orientation.h"

// One build for every x86-64: the dynamic linker takes the version that the CPU can run.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DALI_TF_INPUT_PLAIN)
#define DALI_TF_INPUT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DALI_TF_INPUT_CLONES
#endif
#define DALI_TF_INPUT_INLINE inline __attribute__((always_inline))

namespace dali_tf_input {

enum Kernel { kNearest = 0, kTriangle = 1, kCubic = 2, kCopy = 3 };  // kCopy pads with zeros
enum Output { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kUint8 = 3 };

// What is done to every image of a pipeline.
struct Work {
  int height = 0, width = 0;  // of the output
  Kernel kernel = kTriangle;
  bool antialias = false;
  bool clip = false;  // pixels outside of the region count for nothing
  bool chw = false;
  Output output = kFloat32;
  float mean[3] = {0, 0, 0}, scale[3] = {1, 1, 1};  // (value - mean) * scale; not for kUint8
  float fill = 0;  // the value of outputs that do not show the image
};

// What differs from image to image. Height and width are those of the stored image, at the size at which it is decoded; the
// region is in pixels of the image as it is shown, y then x.
struct Image {
  int64_t height = 0, width = 0;
  int orientation = 1;
  double start[2] = {0, 0}, extent[2] = {0, 0};
  // How many output pixels along each axis show the region, or 0 if all do; and how many come before them.
  int shown[2] = {0, 0}, before[2] = {0, 0};
  bool mirror = false;

  int64_t Shown(int axis) const { return (axis == 0) != IsTransposed(orientation) ? height : width; }
};

// The weights of the source pixels along one axis: those of output i start at source pixel first[i]. Of rows, first[i]
// does not decrease.
struct Taps {
  int count = 0;
  std::vector<int> first;
  std::vector<float> weights;  // `count` for each output; unused ones are 0
  int low = 0, high = 0;       // source pixels in use: [low, high)
};

inline double Weight(Kernel kernel, double x) {
  x = std::abs(x);
  switch (kernel) {
    case kTriangle:
      return x < 1 ? 1 - x : 0;
    case kCubic:  // Keys, a = -0.5
      if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
      return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
    default:
      return 1;
  }
}

// Makes taps that copy pixels from `start` on; pixels outside the axis have weight 0.
inline Taps MakeCopyTaps(int outputs, int64_t size, double start, bool reversed) {
  Taps taps;
  taps.count = 1, taps.first.resize(outputs), taps.weights.resize(outputs);
  taps.low = static_cast<int>(size);
  for (int output = 0; output < outputs; ++output) {
    const int place = reversed ? outputs - 1 - output : output;
    const int64_t from = static_cast<int64_t>(start) + output, inside = std::min(std::max(from, int64_t{0}), size - 1);
    taps.first[place] = static_cast<int>(inside);
    taps.weights[place] = from == inside ? 1.0f : 0.0f;
    taps.low = std::min(taps.low, taps.first[place]);
    taps.high = std::max(taps.high, taps.first[place] + 1);
  }
  return taps;
}

// Computes the taps of `outputs` pixels that show [start, start + extent) of an axis of `size` pixels.
inline Taps MakeTaps(const Work& work, int outputs, int64_t size, double start, double extent, bool reversed) {
  if (work.kernel == kCopy) return MakeCopyTaps(outputs, size, start, reversed);
  const double step = extent / outputs;
  const double stretch = work.antialias ? std::max(step, 1.0) : 1.0;
  const double radius = stretch * (work.kernel == kNearest ? 0 : work.kernel);
  double low = 0, high = static_cast<double>(size) - 1;
  if (work.clip) {
    low = std::min(std::max(std::floor(start), low), high);
    high = std::max(std::min(std::ceil(start + extent) - 1, high), low);
  }
  Taps taps;
  // Filters are 0 at their radius: pixels just there are left out.
  taps.count = static_cast<int>(std::min(std::max(std::ceil(2 * radius), 1.0), high - low + 1));
  taps.first.resize(outputs);
  taps.weights.assign(static_cast<size_t>(outputs) * taps.count, 0.0f);
  std::vector<double> weights(taps.count);
  taps.low = static_cast<int>(high);
  for (int output = 0; output < outputs; ++output) {
    const int place = reversed ? outputs - 1 - output : output;
    const double center = start + (output + 0.5) * extent / outputs;
    double first = std::floor(center - radius - 0.5) + 1, last = std::ceil(center + radius - 0.5) - 1;
    if (work.kernel == kNearest) first = last = std::floor(center);
    first = std::min(std::max(first, low), high);
    last = std::max(std::min(last, high), first);
    const int used = std::min(static_cast<int>(last - first) + 1, taps.count);
    double sum = 0;
    for (int tap = 0; tap < used; ++tap) {
      weights[tap] = Weight(work.kernel, (first + tap + 0.5 - center) / stretch);
      sum += weights[tap];
    }
    if (std::abs(sum) < 1e-9) weights[0] = sum = 1;  // beyond the last pixel by rounding
    // All taps are read: the last ones must be inside too.
    const int begin = std::max(0, std::min(static_cast<int>(first), static_cast<int>(high) + 1 - taps.count));
    const int shift = static_cast<int>(first) - begin;
    taps.first[place] = begin;
    for (int tap = 0; tap < used && tap + shift < taps.count; ++tap) {
      taps.weights[static_cast<size_t>(place) * taps.count + tap + shift] = static_cast<float>(weights[tap] / sum);
    }
    taps.low = std::min(taps.low, begin);
    taps.high = std::max(taps.high, begin + taps.count);
  }
  return taps;
}

// Has taps count from the other end of their axis; the outputs stay in their order.
inline void TurnTaps(Taps* taps, int64_t size) {
  const int end = static_cast<int>(size), low = taps->low;
  for (size_t output = 0; output < taps->first.size(); ++output) {
    taps->first[output] = end - taps->count - taps->first[output];
    float* weights = &taps->weights[output * static_cast<size_t>(taps->count)];
    std::reverse(weights, weights + taps->count);
  }
  taps->low = end - taps->high, taps->high = end - low;
}

// The taps of an output along the axes of the stored image: `rows` of y, in ascending order, and `columns` of x; of the
// outputs that show the region.
struct Frame {
  Frame(const Work& work, const Image& image) : is_transposed(IsTransposed(image.orientation)) {
    const int axis = is_transposed ? 1 : 0;  // of the output, along the rows of the stored image
    int outputs[2] = {work.height, work.width}, before[2] = {0, 0};
    for (int of = 0; of < 2 && image.shown[0]; ++of) {
      before[of] = of == 1 && image.mirror ? outputs[of] - image.before[of] - image.shown[of] : image.before[of];
      outputs[of] = image.shown[of];
    }
    lines_before = before[axis], pixels_before = before[1 - axis];
    const auto make = [&](int of, bool reversed) {
      return MakeTaps(work, outputs[of], image.Shown(of), image.start[of], image.extent[of], reversed);
    };
    const bool turns = RunsBackward(image.orientation, 0);
    is_backward = turns != (axis == 1 && image.mirror);
    rows = make(axis, turns), columns = make(1 - axis, axis == 0 && image.mirror);
    if (turns) TurnTaps(&rows, image.height);
    if (RunsBackward(image.orientation, 1)) TurnTaps(&columns, image.width);
  }

  Taps rows, columns;
  bool is_transposed, is_backward;  // whether rows are columns of the output; whether the first row is its last one
  int lines_before, pixels_before;  // how many output lines, and pixels of a line, come before the region
};

typedef float Pixel __attribute__((vector_size(16), aligned(4), may_alias));  // red, green, blue and what follows

DALI_TF_INPUT_INLINE uint16_t ToHalf(float value) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits >= 0x477ff000) return sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00);  // rounds to infinity, or NaN
  if (bits < 0x38800000) {                                                       // subnormal: add the implicit bit's place
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

DALI_TF_INPUT_INLINE uint16_t ToBfloat16(float value) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

DALI_TF_INPUT_INLINE uint8_t ToUint8(float value) {  // half up
  return static_cast<uint8_t>(std::min(std::max(value + 0.5f, 0.0f), 255.0f));
}

template <typename T, typename Cast>
DALI_TF_INPUT_INLINE void WriteRow(const float* row, T* out, const Work& work, int y, Cast cast) {
  const int64_t width = work.width, plane = work.height * width;
  if (!work.chw) {
    for (int64_t x = 0; x < 3 * width; ++x) out[3 * y * width + x] = cast(row[x]);
    return;
  }
  for (int channel = 0; channel < 3; ++channel) {
    T* to = out + channel * plane + y * width;
    for (int64_t x = 0; x < width; ++x) to[x] = cast(row[3 * x + channel]);
  }
}

template <typename T, typename Cast>
DALI_TF_INPUT_INLINE void WriteColumn(const float* column, T* out, const Work& work, int x, Cast cast) {
  const int64_t width = work.width, plane = work.height * width;
  const int64_t step = work.chw ? width : 3 * width, channel = work.chw ? plane : 1;
  T* to = out + (work.chw ? x : 3 * x);
  for (int64_t y = 0; y < work.height; ++y, to += step, column += 3) {
    to[0] = cast(column[0]), to[channel] = cast(column[1]), to[2 * channel] = cast(column[2]);
  }
}

template <bool is_column, typename T, typename Cast>
DALI_TF_INPUT_INLINE void Write(const float* values, T* out, const Work& work, int at, Cast cast) {
  if constexpr (is_column) {
    WriteColumn(values, out, work, at, cast);
  } else {
    WriteRow(values, out, work, at, cast);
  }
}

// Writes line `at` of the output, or column, in its type and layout.
template <bool is_column = false>
DALI_TF_INPUT_INLINE void WriteOutput(const float* values, const Work& work, int at, void* out) {
  switch (work.output) {
    case kFloat32:
      return Write<is_column>(values, static_cast<float*>(out), work, at, [](float value) { return value; });
    case kFloat16:
      return Write<is_column>(values, static_cast<uint16_t*>(out), work, at, ToHalf);
    case kBfloat16:
      return Write<is_column>(values, static_cast<uint16_t*>(out), work, at, ToBfloat16);
    case kUint8:
      return Write<is_column>(values, static_cast<uint8_t*>(out), work, at, ToUint8);
  }
}

// Fills a line of the output, or a column, from the source lines of the taps of row y, each from column `left` on. `source`
// and `row` have room for the columns in use and for the line, times 3, plus 1; in `row` are the pixels that do not show
// the region.
DALI_TF_INPUT_CLONES void FillLine(const Work& work, const Frame& frame, const uint8_t* const* lines, int left, int y,
                                   float* source, float* row, void* out) {
  const Taps &rows = frame.rows, &columns = frame.columns;
  const int64_t used = 3 * static_cast<int64_t>(columns.high - columns.low), from = 3 * static_cast<int64_t>(columns.low - left);
  const bool is_uint8 = work.output == kUint8;
  const Pixel mean = {work.mean[0], work.mean[1], work.mean[2], 0}, scale = {work.scale[0], work.scale[1], work.scale[2], 0};
  const float* weights = &rows.weights[static_cast<size_t>(y) * rows.count];
  const uint8_t* pixels = lines[0] + from;
  int tap = 1;
  if (rows.count == 1) {
    for (int64_t x = 0; x < used; ++x) source[x] = weights[0] * pixels[x];
  } else {
    // With two taps, interpolate linearly: the result for two equal pixels is then exact.
    const uint8_t* next = lines[1] + from;
    if (rows.count == 2) {
      for (int64_t x = 0; x < used; ++x) source[x] = pixels[x] + weights[1] * (next[x] - pixels[x]);
    } else {
      for (int64_t x = 0; x < used; ++x) source[x] = weights[0] * pixels[x] + weights[1] * next[x];
    }
    tap = 2;
  }
  for (; tap < rows.count; ++tap) {
    const uint8_t* next = lines[tap] + from;
    for (int64_t x = 0; x < used; ++x) source[x] += weights[tap] * next[x];
  }
  const float* weight = columns.weights.data();
  const int outputs = static_cast<int>(columns.first.size());
  float *to = row + 3 * frame.pixels_before, *end = to + 3 * outputs;
  const float after = *end;
  for (int x = 0; x < outputs; ++x) {
    const float* at = source + 3 * (columns.first[x] - columns.low);
    Pixel sum = {0, 0, 0, 0};
    if (columns.count == 2) {
      sum = *reinterpret_cast<const Pixel*>(at);
      sum += weight[1] * (*reinterpret_cast<const Pixel*>(at + 3) - sum);
    } else {
      for (int t = 0; t < columns.count; ++t) sum += weight[t] * *reinterpret_cast<const Pixel*>(at + 3 * t);
    }
    weight += columns.count;
    if (!is_uint8) sum = (sum - mean) * scale;
    *reinterpret_cast<Pixel*>(to + 3 * x) = sum;  // the next pixel overwrites the fourth value
  }
  *end = after;
  const int at = frame.lines_before + (frame.is_backward ? static_cast<int>(rows.first.size()) - 1 - y : y);
  if (frame.is_transposed) return WriteOutput<true>(row, work, at, out);
  WriteOutput(row, work, at, out);
}

// Returns what is wrong with the sides of an image; nullptr if nothing is.
inline const char* CheckSides(const Image& image) {
  const bool is_image = std::min(image.height, image.width) >= 1 && std::max(image.height, image.width) <= 1 << 24;
  return is_image ? nullptr : "an image needs 1 to 16,777,216 pixels each way";
}

// Returns what is wrong with an image or its region; nullptr if nothing is.
inline const char* Check(const Work& work, const Image& image) {
  if (const char* wrong = CheckSides(image)) return wrong;
  const int64_t size[2] = {image.Shown(0), image.Shown(1)};
  int outputs[2] = {work.height, work.width};
  for (int axis = 0; axis < 2; ++axis) {
    if (image.shown[0] || image.shown[1]) {
      const int shown = image.shown[axis], before = image.before[axis];
      if (shown < 1 || before < 0 || before > outputs[axis] - shown) return "what shows the image must be in the output";
      outputs[axis] = shown;
    }
    const double start = image.start[axis], end = start + image.extent[axis];
    const double half = 0.5 * image.extent[axis] / outputs[axis];  // from an edge to the nearest sample
    if (!std::isfinite(start) || !std::isfinite(end)) return "a region must be finite";
    if (work.kernel == kCopy) {
      if (std::abs(start) > 1 << 30) return "a region must be near its image";
    } else if (!(half > 0) || start + half < -1 || end - half > static_cast<double>(size[axis]) + 1) {
      return "a region must show its image, and not be empty";
    }
  }
  return nullptr;
}

// Does the work on an image that `Check` accepts, line by line.
class Resampler {
  const Frame frame_;

 public:
  Resampler(const Work& work, const Image& image, void* out)
      : frame_(work, image), rows(frame_.rows), columns(frame_.columns), work_(work), out_(out),
        lines_(static_cast<size_t>(rows.count)), source_(3 * static_cast<size_t>(columns.high - columns.low) + 1),
        row_(3 * static_cast<size_t>(frame_.is_transposed ? work.height : work.width) + 1) {
    if (image.shown[0]) FillRest();
  }

  // Returns whether the output is complete.
  bool IsDone() const { return next_ == static_cast<int>(rows.first.size()); }
  // Returns whether the rest of the output may still need a source line.
  bool Needs(int line) const { return !IsDone() && line >= rows.first[next_]; }

  // Fills what the lines up to this one allow. `get(line)` returns a line, one of the last `rows.count`, from `left` on.
  template <typename Get>
  void Fill(int line, int left, Get get) {
    for (; !IsDone() && rows.first[next_] + rows.count - 1 <= line; ++next_) {
      for (int tap = 0; tap < rows.count; ++tap) lines_[static_cast<size_t>(tap)] = get(rows.first[next_] + tap);
      FillLine(work_, frame_, lines_.data(), left, next_, source_.data(), row_.data(), out_);
    }
  }

  const Taps &rows, &columns;

 private:
  // Fills the lines, or columns, that do not show the region, and those pixels of `row_`.
  void FillRest() {
    for (size_t place = 0; place < row_.size(); ++place) {
      const size_t channel = place % 3;
      row_[place] = work_.output == kUint8 ? work_.fill : (work_.fill - work_.mean[channel]) * work_.scale[channel];
    }
    const int lines = frame_.is_transposed ? work_.width : work_.height, end = frame_.lines_before + static_cast<int>(rows.first.size());
    for (int line = 0; line < lines; ++line) {
      if (line >= frame_.lines_before && line < end) continue;
      if (frame_.is_transposed) {
        WriteOutput<true>(row_.data(), work_, line, out_);
      } else {
        WriteOutput(row_.data(), work_, line, out_);
      }
    }
  }

  const Work& work_;
  void* out_;
  int next_ = 0;  // line of the output
  std::vector<const uint8_t*> lines_;
  std::vector<float> source_, row_;
};

}  // namespace dali_tf_input
#endif  // DALI_TF_INPUT_RESAMPLE_H_
