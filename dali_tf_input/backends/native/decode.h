// From an encoded image to what the model sees: decodes the part of a JPEG that its views need, and makes them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "augment.h"
#include "example.h"
#include "jpeg.h"
#include "pool.h"
#include "region.h"
#include "resample.h"

namespace dali_tf_input {

// What is made of each image; there may be several views of one.
struct View : Work {
  Crop crop = kNoCrop;
  int64_t num_uniforms = 0, num_rows = 0;  // of an image: random numbers, and rows of augmentation
  const double* numbers = nullptr;         // of the crop, see region.h
};

// Reads what `tf_native.describe_views` writes; returns false if it is anything else.
inline bool ReadViews(const double* at, int64_t count, std::vector<View>* views) {
  constexpr int kHead = 16;
  constexpr size_t kMostViews = 64;  // as in spec/rules.py
  while (count > 0) {
    if (count < kHead || views->size() == kMostViews) return false;
    const auto is_in = [at](int place, double low, double high) { return at[place] >= low && at[place] <= high; };
    if (!is_in(0, 1, 65535) || !is_in(1, 1, 65535) || !is_in(2, 0, 3) || !is_in(6, 0, 3)) return false;
    if (!is_in(13, 3, 1e6) || !is_in(14, 0, 1e6) || !is_in(15, 0, kLetterbox)) return false;
    View view;
    view.height = static_cast<int>(at[0]), view.width = static_cast<int>(at[1]);
    view.kernel = static_cast<Kernel>(static_cast<int>(at[2]));
    view.antialias = at[3] != 0, view.clip = at[4] != 0, view.chw = at[5] != 0;
    view.output = static_cast<Output>(static_cast<int>(at[6]));
    for (int channel = 0; channel < 3; ++channel) {
      view.mean[channel] = static_cast<float>(at[7 + channel]), view.scale[channel] = static_cast<float>(at[10 + channel]);
    }
    view.num_uniforms = static_cast<int64_t>(at[13]), view.num_rows = static_cast<int64_t>(at[14]);
    view.crop = static_cast<Crop>(static_cast<int>(at[15])), view.numbers = at + kHead;
    const int size = kHead + kNumbers[view.crop];
    if (count < size) return false;
    if (view.crop == kLetterbox) view.fill = static_cast<float>(view.numbers[1]);
    at += size, count -= size;
    views->push_back(view);
  }
  return count == 0 && !views->empty();
}

// An image as it is stored. One is refused if it is no baseline JPEG, has errors that libjpeg-turbo would report, or has
// `maximum` or more pixels for each of the output's along both axes. With `is_whole` the whole file must be valid, else
// the part that is needed. With `is_turned` it is shown upright, by its EXIF data. With `sides`, height and width, it is
// pixels, of which there must be as many.
struct Picture {
  Span bytes;
  const int64_t* sides = nullptr;
  bool is_whole = false, is_turned = false;
  double maximum = 0;
};

// The number of image pixels per output pixel, along the axis where it is smaller.
inline double Excess(const Work& work, const Image& image) {
  return std::min(image.extent[0] / work.height, image.extent[1] / work.width);
}

// A part of an image as it is stored, at 1 / `ratio` of its size: the pixels from (top, left) on.
struct Part {
  int64_t top = 0, left = 0, height = 0, width = 0;
  int ratio = 1;
};

// Has an image be 1 / `ratio` of its size, as libjpeg rounds it.
inline void Shrink(int ratio, Image* image) {
  image->height = (image->height + ratio - 1) / ratio, image->width = (image->width + ratio - 1) / ratio;
  for (int axis = 0; axis < 2; ++axis) image->start[axis] /= ratio, image->extent[axis] /= ratio;
}

// Returns the part of a JPEG that libjpeg is to decode for a view. With `scales` it is at 1/2, 1/4 or 1/8 of its size if that
// leaves a pixel for each output pixel. With `is_whole` an image at full size is decoded whole, as all of it must be valid.
inline Part ChoosePart(const View& view, const Image& image, bool is_whole, bool scales) {
  int ratio = 1;
  while (scales && ratio < 8 && Excess(view, image) >= 2 * ratio) ratio *= 2;
  Image scaled = image;
  Shrink(ratio, &scaled);
  Part part = {0, 0, scaled.height, scaled.width, ratio};
  if ((is_whole && ratio == 1) || Check(view, scaled)) return part;
  const Frame frame(view, scaled);
  // Two more pixels each way: libjpeg interpolates colors from fewer samples at the edges that it decodes.
  const auto cut = [](const Taps& taps, int64_t size, int64_t* start, int64_t* length) {
    *start = std::max<int64_t>(taps.low - 2, 0), *length = std::min<int64_t>(taps.high + 2, size) - *start;
  };
  cut(frame.rows, part.height, &part.top, &part.height), cut(frame.columns, part.width, &part.left, &part.width);
  return part;
}

// What a thread keeps from image to image.
class Decoding {
 public:
  // Makes all views of an image, `out` has the place of each. Returns false, with the places undefined, if the image is
  // refused. `uniforms` and `rows` are those of all views, one after the other. `size` is set to its height and width,
  // as it is stored, and its orientation.
  bool Make(const Picture& picture, const std::vector<View>& views, const float* uniforms, const float* rows, char* const* out,
            int64_t* size) {
    if (!Open(picture, size) || FindRegions(views, uniforms, size)) return false;
    for (size_t number = 0; number < views.size(); ++number) {
      if (!(Excess(views[number], images_[number]) < picture.maximum)) return false;
    }
    const uint8_t* pixels = picture.sides ? picture.bytes.at : nullptr;
    Part part = {0, 0, size[0], size[1]};
    if (!pixels && views.size() > 1) {
      if (!DecodeWindow(views, picture.is_whole, &part)) return false;
      pixels = window_.data();
    }
    const bool is_made = Show(views, rows, out, [&](Resampler* resampler) {
      return pixels ? FillFrom(pixels, part, resampler) : DecodeLines(resampler, picture.is_whole);
    });
    if (window_.capacity() > kMostKept) std::vector<uint8_t>().swap(window_);
    return is_made;
  }

  // Makes all views of an image of this size from `pixels`, the part of it that was decoded: height x width x 3. Returns
  // what is wrong, or a null pointer.
  const char* MakeOf(const uint8_t* pixels, const Part& part, const int64_t* size, const std::vector<View>& views, const float* uniforms,
                     const float* rows, char* const* out) {
    if (const char* wrong = FindRegions(views, uniforms, size)) return wrong;
    for (Image& image : images_) Shrink(part.ratio, &image);
    const bool is_made = Show(views, rows, out, [&](Resampler* resampler) { return FillFrom(pixels, part, resampler); });
    return is_made ? nullptr : "a part of the image is not what the views need";
  }

 private:
  static constexpr size_t kMostBytes = 32 << 20, kMostKept = 8 << 20;

  // Finds the region of each view in an image of this height, width and orientation; returns what is wrong with them.
  const char* FindRegions(const std::vector<View>& views, const float* uniforms, const int64_t* size) {
    images_.assign(views.size(), Image());
    for (size_t number = 0; number < views.size(); ++number) {
      const View& view = views[number];
      Image& image = images_[number];
      image.height = size[0], image.width = size[1], image.orientation = static_cast<int>(size[2]);
      if (const char* wrong = CheckSides(image)) return wrong;
      FindRegion(view, view.crop, view.numbers, uniforms, view.num_uniforms, &image);
      uniforms += view.num_uniforms;
      if (const char* wrong = Check(view, image)) return wrong;
    }
    return nullptr;
  }

  // Fills the output from the pixels of a part; returns false if it needs others.
  static bool FillFrom(const uint8_t* pixels, const Part& part, Resampler* resampler) {
    const Taps &rows = resampler->rows, &columns = resampler->columns;
    const int64_t bottom = part.top + part.height, right = part.left + part.width;
    if (rows.low < part.top || rows.high > bottom || columns.low < part.left || columns.high > right) return false;
    const auto get = [&](int line) { return pixels + 3 * part.width * (line - part.top); };
    resampler->Fill(static_cast<int>(bottom) - 1, static_cast<int>(part.left), get);
    return resampler->IsDone();
  }

  // Makes the views of `images_`, each by `resample`, which may return false.
  template <typename Resample>
  bool Show(const std::vector<View>& views, const float* rows, char* const* out, Resample resample) {
    for (size_t number = 0; number < views.size(); ++number) {
      const View& view = views[number];
      Image& image = images_[number];
      const bool is_mirrored = image.mirror;
      Work work = view;
      void* to = out[number];
      if (view.num_rows) {  // they change bytes, before the mirror
        pixels_.resize(static_cast<size_t>(3) * view.height * view.width);
        work.output = kUint8, work.chw = false, image.mirror = false, to = pixels_.data();
      }
      Resampler resampler(work, image, to);
      if (!resample(&resampler)) return false;
      if (view.num_rows) {
        if (!augmenter_ || !augmenter_->Fits(view)) augmenter_ = std::make_unique<Augmenter>(view.height, view.width);
        augmenter_->Finish(view, rows, view.num_rows, is_mirrored, &pixels_, out[number]);
        rows += kRowSize * view.num_rows;
      }
    }
    return true;
  }

  // Finds the size of an image; returns false if it is refused at once.
  bool Open(const Picture& picture, int64_t* size) {
    size[2] = 1;
    if (picture.sides) {
      const int64_t height = picture.sides[0], width = picture.sides[1];
      constexpr int64_t kMostSide = 1 << 24;
      const bool is_image = height > 0 && height <= kMostSide && width > 0 && width <= kMostSide;
      size[0] = height, size[1] = width;
      return is_image && picture.bytes.size() == 3 * static_cast<uint64_t>(height) * static_cast<uint64_t>(width);
    }
#if defined(DALI_TF_INPUT_JPEG)
    if (!decoder_.Open(picture.bytes.at, picture.bytes.size())) return false;
    size[0] = decoder_.height, size[1] = decoder_.width;
    if (picture.is_turned) size[2] = decoder_.orientation;
    return true;
#else
    return false;
#endif
  }

#if defined(DALI_TF_INPUT_JPEG)
  // Decodes the lines that a resampler needs, a few at a time, and has it fill the output; returns false if the file is
  // refused, or needs more than kMostBytes.
  bool DecodeLines(Resampler* resampler, bool is_whole) {
    const Taps &rows = resampler->rows, &columns = resampler->columns;
    const int left = columns.low & ~15;
    const size_t stride = 3 * static_cast<size_t>(columns.high - left) + 64, bytes = stride * static_cast<size_t>(rows.count);
    if (bytes > kMostBytes) return false;
    if (lines_.size() < bytes) lines_.resize(bytes);
    struct Sink {
      uint8_t* At(int line) const { return lines + stride * static_cast<size_t>(line % resampler.rows.count); }
      uint8_t* Want(int line) const { return resampler.Needs(line) ? At(line) : nullptr; }
      void Take(int line) { resampler.Fill(line, left, [this](int number) { return At(number); }); }
      Resampler& resampler;
      uint8_t* lines;
      size_t stride;
      int left;
    } sink = {*resampler, lines_.data(), stride, left};
    return decoder_.Decode({rows.low, left, rows.high, columns.high}, is_whole, sink) && resampler->IsDone();
  }

  // Decodes the part of the image that the views need.
  bool DecodeWindow(const std::vector<View>& views, bool is_whole, Part* part) {
    jpeg::Window window = {decoder_.height, decoder_.width, 0, 0};
    for (size_t number = 0; number < views.size(); ++number) {
      const View& view = views[number];
      const Image& image = images_[number];
      const Frame frame(view, image);
      const Taps &rows = frame.rows, &columns = frame.columns;
      window.top = std::min(window.top, rows.low), window.bottom = std::max(window.bottom, rows.high);
      window.left = std::min(window.left, columns.low), window.right = std::max(window.right, columns.high);
    }
    window.left &= ~15;
    if (window.bottom <= window.top || window.right <= window.left) return false;
    const int height = window.bottom - window.top;
    const size_t width = 3 * static_cast<size_t>(window.right - window.left);
    *part = {window.top, window.left, height, window.right - window.left};
    window_.resize(width * static_cast<size_t>(height)), lines_.resize(std::max(lines_.size(), width + 64));
    struct Sink {
      uint8_t* Want(int line) const { return line >= top && line < bottom ? scratch : nullptr; }
      void Take(int line) { std::memcpy(out + width * static_cast<size_t>(line - top), scratch, width), ++done; }
      uint8_t *scratch, *out;
      size_t width;
      int top, bottom, done;
    } sink = {lines_.data(), window_.data(), width, window.top, window.bottom, 0};
    return decoder_.Decode(window, is_whole, sink) && sink.done == height;
  }

  jpeg::Decoder decoder_;
#else
  bool DecodeLines(Resampler*, bool) { return false; }
  bool DecodeWindow(const std::vector<View>&, bool, Part*) { return false; }
#endif
  std::vector<Image> images_;                     // of each view
  std::vector<uint8_t> lines_, window_, pixels_;  // lines being resampled; what several views need; a view in bytes
  std::unique_ptr<Augmenter> augmenter_;
};

}  // namespace dali_tf_input
