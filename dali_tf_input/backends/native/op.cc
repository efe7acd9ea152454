// The TensorFlow operations of this package:
//   DaliTfInputRead: reads records at known offsets in files (read.h).
//   DaliTfInputPrepare: preprocesses a region of a decoded image for the model (resample.h).
//   DaliTfInputDecode: decodes a JPEG (jpeg.h), picks its region (region.h) and preprocesses it.
//   DaliTfInputDecodeViews: decodes the part of a JPEG that several views need.
//   DaliTfInputAugment: augments a cropped image by rows and preprocesses it (augment.h).
//   DaliTfInputMix: mixes a batch of preprocessed images in pairs (mix.h).
//   DaliTfInputPermute: permutes places by keys (random.h).
#include "api.h"
#include "augment.h"
#include "jpeg.h"
#include "mix.h"
#include "random.h"
#include "read.h"
#include "region.h"
#include "resample.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace {

using dali_tf_input::Image;
using dali_tf_input::Work;

constexpr int kTypes[] = {1, 19, 14, 4};  // TF_DataType by `Output`: TF_FLOAT, TF_HALF, TF_BFLOAT16, TF_UINT8
constexpr int kSizes[] = {4, 2, 2, 1};    // bytes
constexpr int kDouble = 2, kString = 7, kInt64 = 9, kBool = 10;  // TF_DOUBLE, TF_STRING, TF_INT64, TF_BOOL

using dali_tf_input::Problem;

// The status and the inputs of a call, and its outputs; freed at the end, which reports the status.
class Call {
 public:
  Call(TF_OpKernelContext* context, int count) : context_(context), count_(count), status(TF_NewStatus()) {
    for (int number = 0; number < count && ok(); ++number) TF_GetInput(context, number, &inputs[number], status);
  }

  ~Call() {
    if (!ok()) TF_OpKernelContext_Failure(context_, status);
    for (int number = 0; number < count_; ++number) {
      if (inputs[number]) TF_DeleteTensor(inputs[number]);
    }
    for (TF_Tensor* output : outputs_) {
      if (output) TF_DeleteTensor(output);
    }
    TF_DeleteStatus(status);
  }

  bool ok() const { return TF_GetCode(status) == 0; }

  // Returns the memory of an output; null, with the status set, if there is none.
  void* Allocate(int number, int type, const int64_t* shape, int dims, size_t bytes) {
    outputs_[number] = TF_AllocateOutput(context_, number, type, shape, dims, bytes, status);
    return ok() ? TF_TensorData(outputs_[number]) : nullptr;
  }

  // Allocates an image, the first output.
  void* AllocateImage(const Work& work) {
    int64_t shape[3] = {work.height, work.width, 3};
    if (work.chw) shape[0] = 3, shape[1] = work.height, shape[2] = work.width;
    const size_t bytes = static_cast<size_t>(3) * work.height * work.width * kSizes[work.output];
    return Allocate(0, kTypes[work.output], shape, 3, bytes);
  }

  // Returns the first input's memory as the first output's, or a copy of it.
  void* ForwardImages(const int64_t* shape) {
    TF_Tensor* images = inputs[0];
    const void* from = TF_TensorData(images);
    const size_t bytes = TF_TensorByteSize(images);
    TF_DeleteTensor(images);  // a reference: with it nobody could have the memory alone
    inputs[0] = nullptr;
    int number = 0, forwarded = -1;
    outputs_[0] = TF_ForwardInputOrAllocateOutput(context_, &number, 1, 0, shape, 4, &forwarded, status);
    if (!ok()) return nullptr;
    void* to = TF_TensorData(outputs_[0]);
    if (forwarded < 0) std::memcpy(to, from, bytes);  // the caller still holds it
    return to;
  }

  bool HasOutput(int number) const { return outputs_[number]; }

  // Does the work. An exception must not reach TensorFlow's C code: it would end the process.
  template <typename Work>
  void Run(Work work) {
    if (!ok()) return;
    try {
      work();
    } catch (const std::bad_alloc&) {
      TF_SetStatus(status, dali_tf_input::kResourceExhausted, "dali_tf_input: there is no memory for this image or record.");
    } catch (const std::exception& error) {
      TF_SetStatus(status, dali_tf_input::kUnavailable, error.what());
    }
  }

 private:
  TF_OpKernelContext* context_;
  int count_;
  TF_Tensor* outputs_[3] = {};

 public:
  TF_Status* status;
  TF_Tensor* inputs[5] = {};
};

// Creates a kernel, a `Work` or more than that.
template <typename Kernel>
void* Create(TF_OpKernelConstruction* context) {
  Kernel* work = new (std::nothrow) Kernel;
  TF_Status* status = TF_NewStatus();
  int64_t height = 0, width = 0, kernel = 0;
  unsigned char antialias = 0, clip = 0, chw = 0;
  int type = 0;
  if (!work) TF_SetStatus(status, dali_tf_input::kResourceExhausted, "dali_tf_input: there is no memory.");
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrInt64(context, "height", &height, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrInt64(context, "width", &width, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrInt64(context, "kernel", &kernel, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrBool(context, "antialias", &antialias, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrBool(context, "clip", &clip, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrBool(context, "chw", &chw, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrType(context, "T", &type, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrFloatList(context, "mean", work->mean, 3, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrFloatList(context, "scale", work->scale, 3, status);
  if (!TF_GetCode(status) && (height < 1 || width < 1 || height > 65535 || width > 65535 || kernel < 0 || kernel > 3)) {
    const char* text = "height and width must be in [1, 65535], kernel in [0, 3]";
    TF_SetStatus(status, dali_tf_input::kInvalidArgument, text);
  }
  if (TF_GetCode(status)) {
    TF_OpKernelConstruction_Failure(context, status);
  } else {
    work->height = static_cast<int>(height), work->width = static_cast<int>(width);
    work->kernel = static_cast<dali_tf_input::Kernel>(kernel);
    work->antialias = antialias, work->clip = clip, work->chw = chw;
    for (int output = 0; output < 4; ++output) {
      if (kTypes[output] == type) work->output = static_cast<dali_tf_input::Output>(output);
    }
  }
  TF_DeleteStatus(status);
  return work;
}

template <typename Kernel>
void Delete(void* kernel) {
  delete static_cast<Kernel*>(kernel);
}

// Its inputs: image, region (start, then extent, each y, x), whether it is mirrored.
void ComputePrepare(void* kernel, TF_OpKernelContext* context) {
  const Work& work = *static_cast<Work*>(kernel);
  Call call(context, 3);
  call.Run([&] {
    TF_Tensor** inputs = call.inputs;
    const char* wrong = nullptr;
    Image image;
    if (TF_NumDims(inputs[0]) != 3 || TF_Dim(inputs[0], 2) != 3) {
      wrong = "the image must be of shape (height, width, 3)";
    } else if (TF_TensorElementCount(inputs[1]) != 4 || TF_TensorElementCount(inputs[2]) != 1) {
      wrong = "the region must be 4 numbers, the mirror 1";
    } else {
      const double* region = static_cast<const double*>(TF_TensorData(inputs[1]));
      image.height = TF_Dim(inputs[0], 0), image.width = TF_Dim(inputs[0], 1);
      image.start[0] = region[0], image.start[1] = region[1], image.extent[0] = region[2], image.extent[1] = region[3];
      image.mirror = *static_cast<const bool*>(TF_TensorData(inputs[2]));
      wrong = dali_tf_input::Check(work, image);
    }
    if (wrong) return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, wrong);
    if (void* out = call.AllocateImage(work)) {
      dali_tf_input::Prepare(work, image, static_cast<const uint8_t*>(TF_TensorData(inputs[0])), out);
    }
  });
}

// Its inputs: image, of the output's size; rows of kRowSize numbers, float (n, kRowSize); whether it is mirrored.
void ComputeAugment(void* kernel, TF_OpKernelContext* context) {
  const Work& work = *static_cast<Work*>(kernel);
  Call call(context, 3);
  call.Run([&] {
    TF_Tensor** inputs = call.inputs;
    const int64_t count = TF_TensorElementCount(inputs[1]);
    const auto* rows = static_cast<const float*>(TF_TensorData(inputs[1]));
    const char* wrong = nullptr;
    if (TF_NumDims(inputs[0]) != 3 || TF_Dim(inputs[0], 0) != work.height || TF_Dim(inputs[0], 1) != work.width || TF_Dim(inputs[0], 2) != 3) {
      wrong = "the image must be of the output's size";
    } else if (count % dali_tf_input::kRowSize || TF_TensorElementCount(inputs[2]) != 1) {
      wrong = "rows must be of 13 numbers, the mirror 1";
    } else {
      wrong = dali_tf_input::CheckRows(rows, count);
    }
    if (wrong) return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, wrong);
    if (void* out = call.AllocateImage(work)) {
      const bool mirror = *static_cast<const bool*>(TF_TensorData(inputs[2]));
      dali_tf_input::Augment(work, static_cast<const uint8_t*>(TF_TensorData(inputs[0])), rows, count / dali_tf_input::kRowSize, mirror, out);
    }
  });
}

// Its inputs: a batch of images; the six numbers of `draw_mix`. The images are mixed in place if
// nothing else uses their memory.
void ComputeMix(void* kernel, TF_OpKernelContext* context) {
  const Work& work = *static_cast<Work*>(kernel);
  Call call(context, 2);
  call.Run([&] {
    TF_Tensor* images = call.inputs[0];
    const size_t item = static_cast<size_t>(kSizes[work.output]);
    int64_t shape[4] = {};
    const char* wrong = nullptr;
    if (TF_NumDims(images) != 4) {
      wrong = "the images must be of 4 axes";
    } else {
      for (int axis = 0; axis < 4; ++axis) shape[axis] = TF_Dim(images, axis);
      const int first = work.chw ? 2 : 1;
      if (shape[first] != work.height || shape[first + 1] != work.width) wrong = "the images must be of the output's size";
      if (TF_TensorElementCount(call.inputs[1]) != 6) wrong = "a mix is 6 numbers";
    }
    if (wrong) return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, wrong);
    const auto* numbers = static_cast<const float*>(TF_TensorData(call.inputs[1]));
    if (!(numbers[0] >= 0 && numbers[0] <= 1)) return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, "a weight must be in [0, 1]");
    const auto inside = [](float place, int side) { return static_cast<int64_t>(std::min(std::max(place, 0.0f), static_cast<float>(side))); };
    dali_tf_input::Mixing mixing;
    mixing.weight = numbers[0];
    mixing.top = inside(numbers[1], work.height), mixing.left = inside(numbers[2], work.width);
    mixing.bottom = std::max(mixing.top, inside(numbers[3], work.height)), mixing.right = std::max(mixing.left, inside(numbers[4], work.width));
    if (void* out = call.ForwardImages(shape)) dali_tf_input::Mix(work, mixing, shape[0], shape[work.chw ? 1 : 3], item, static_cast<char*>(out));
  });
}

// A decoder for one image at a time, and its buffer.
struct Decoding {
#if defined(DALI_TF_INPUT_JPEG)
  dali_tf_input::jpeg::Decoder decoder;
#endif
  std::vector<uint8_t> lines;
};

struct DecodeKernel : Work {
  // Returns one that is idle, or a new one.
  std::unique_ptr<Decoding> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Decoding>();
    std::unique_ptr<Decoding> decoding = std::move(idle_.back());
    idle_.pop_back();
    return decoding;
  }

  void Return(std::unique_ptr<Decoding> decoding) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(decoding));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Decoding>> idle_;
};

void* CreateIdle(TF_OpKernelConstruction*) { return new (std::nothrow) DecodeKernel; }

#if defined(DALI_TF_INPUT_JPEG)
// Decodes the lines that a resampler needs, a few at a time, and has it fill the output; returns false if the file is
// refused, or needs more than kMostBytes.
bool DecodeLines(Decoding* decoding, dali_tf_input::Resampler* resampler, bool is_whole) {
  constexpr size_t kMostBytes = 32 << 20;
  const dali_tf_input::Taps &rows = resampler->rows, &columns = resampler->columns;
  const int left = columns.low & ~15;
  const size_t stride = 3 * static_cast<size_t>(columns.high - left) + 64, bytes = stride * static_cast<size_t>(rows.count);
  if (bytes > kMostBytes) return false;
  if (decoding->lines.size() < bytes) decoding->lines.resize(bytes);
  struct Sink {
    uint8_t* At(int line) const { return lines + stride * static_cast<size_t>(line % resampler.rows.count); }
    uint8_t* Want(int line) const { return resampler.Needs(line) ? At(line) : nullptr; }
    void Take(int line) { resampler.Fill(line, left, [this](int number) { return At(number); }); }
    dali_tf_input::Resampler& resampler;
    uint8_t* lines;
    size_t stride;
    int left;
  } sink = {*resampler, decoding->lines.data(), stride, left};
  return decoding->decoder.Decode({rows.low, left, rows.high, columns.high}, is_whole, sink) && resampler->IsDone();
}
#endif

// Its inputs: an encoded image; its random numbers, float (n,); and parameters, double: the crop,
// whether the whole file must be valid, the limit of image pixels per output pixel, and the crop's
// numbers (region.h).
// Its outputs: the image, and whether it was decoded; if not, the image is undefined.
void ComputeDecode(void* kernel, TF_OpKernelContext* context) {
  DecodeKernel& work = *static_cast<DecodeKernel*>(kernel);
  Call call(context, 3);
  call.Run([&] {
    TF_Tensor** inputs = call.inputs;
    const int64_t count = TF_TensorElementCount(inputs[1]), numbers = TF_TensorElementCount(inputs[2]);
    const double* crop_parameters = static_cast<const double*>(TF_TensorData(inputs[2]));
    const int crop = numbers > 3 && crop_parameters[0] >= 0 && crop_parameters[0] <= dali_tf_input::kRandomCrop ? static_cast<int>(crop_parameters[0]) : -1;
    if (TF_TensorElementCount(inputs[0]) != 1 || count < 3 || crop < 0 || numbers != 3 + dali_tf_input::kNumbers[crop]) {
      return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, "one image, its random numbers and a crop are needed");
    }
    bool is_done = false;
#if defined(DALI_TF_INPUT_JPEG)
    const auto* encoded = static_cast<const TF_TString*>(TF_TensorData(inputs[0]));
    std::unique_ptr<Decoding> decoding = work.Take();
    dali_tf_input::jpeg::Decoder& decoder = decoding->decoder;
    if (decoder.Open(reinterpret_cast<const uint8_t*>(TF_StringGetDataPointer(encoded)), TF_StringGetSize(encoded))) {
      Image image;
      image.height = decoder.height, image.width = decoder.width;
      dali_tf_input::FindRegion(work, static_cast<dali_tf_input::Crop>(crop), crop_parameters + 3,
                                static_cast<const float*>(TF_TensorData(inputs[1])), count, &image);
      const double excess = std::min(image.extent[0] / work.height, image.extent[1] / work.width);
      if (excess < crop_parameters[2] && !dali_tf_input::Check(work, image)) {
        void* out = call.AllocateImage(work);
        if (!out) return;
        dali_tf_input::Resampler resampler(work, image, out);
        is_done = DecodeLines(decoding.get(), &resampler, crop_parameters[1] != 0);
      }
    }
    work.Return(std::move(decoding));
#endif
    const int64_t none[3] = {0, 0, 0};
    if (!call.HasOutput(0) && !call.Allocate(0, kTypes[work.output], none, 3, 0) && !call.ok()) return;
    if (void* flag = call.Allocate(1, kBool, nullptr, 0, 1)) *static_cast<bool*>(flag) = is_done;
  });
}

// The part of an image that one of several views needs, and its place in the image.
struct View : Work {
  int crop = 0;
  int64_t num_uniforms = 0;
  const double* numbers = nullptr;
  Image image;
};

// Reads the views of `ComputeDecodeViews`; returns false if they are none.
bool ReadViews(const double* at, int64_t count, int64_t num_uniforms, std::vector<View>* views) {
  constexpr int kHead = 7;
  while (count > 0) {
    View view;
    if (count < kHead || !(at[0] >= 1 && at[0] <= 65535 && at[1] >= 1 && at[1] <= 65535) || !(at[2] >= 0 && at[2] <= 3)) return false;
    view.height = static_cast<int>(at[0]), view.width = static_cast<int>(at[1]);
    view.kernel = static_cast<dali_tf_input::Kernel>(static_cast<int>(at[2]));
    view.antialias = at[3] != 0, view.clip = at[4] != 0;
    if (!(at[5] >= 3 && at[5] <= 1e6) || !(at[6] >= 0 && at[6] <= dali_tf_input::kRandomCrop)) return false;
    view.num_uniforms = static_cast<int64_t>(at[5]), view.crop = static_cast<int>(at[6]);
    view.numbers = at + kHead;
    const int size = kHead + dali_tf_input::kNumbers[view.crop];
    at += size, count -= size, num_uniforms -= view.num_uniforms;
    views->push_back(view);
  }
  return count == 0 && num_uniforms == 0 && !views->empty();
}

#if defined(DALI_TF_INPUT_JPEG)
// Decodes a window, whose left is a multiple of 16, to `out`; returns false if the file is refused.
bool DecodeWindow(Decoding* decoding, const dali_tf_input::jpeg::Window& window, bool is_whole, uint8_t* out) {
  const size_t width = 3 * static_cast<size_t>(window.right - window.left);
  if (decoding->lines.size() < width + 64) decoding->lines.resize(width + 64);
  struct Sink {
    uint8_t* Want(int line) const { return line >= top && line < bottom ? scratch : nullptr; }
    void Take(int line) { std::memcpy(out + width * static_cast<size_t>(line - top), scratch, width), ++done; }
    uint8_t *scratch, *out;
    size_t width;
    int top, bottom, done;
  } sink = {decoding->lines.data(), out, width, window.top, window.bottom, 0};
  return decoding->decoder.Decode(window, is_whole, sink) && sink.done == window.bottom - window.top;
}
#endif

// Decodes the part of an image that several views need.
// Its inputs: the image; the random numbers of all views; and parameters: whether the whole file
// must be valid, and for each view its height, width, `Kernel`, whether it antialiases and clips,
// how many random numbers it has, its `Crop`, and the crop's numbers.
// Its outputs: pixels, uint8 (h, w, 3); the region of each view in them, double (views, 4); and
// whether the image was decoded; if not, the others are undefined.
void ComputeDecodeViews(void* kernel, TF_OpKernelContext* context) {
  DecodeKernel& kept = *static_cast<DecodeKernel*>(kernel);
  Call call(context, 3);
  call.Run([&] {
    TF_Tensor** inputs = call.inputs;
    std::vector<View> views;
    const int64_t num_uniforms = TF_TensorElementCount(inputs[1]);
    const auto* crop_parameters = static_cast<const double*>(TF_TensorData(inputs[2]));
    const int64_t count = TF_TensorElementCount(inputs[2]);
    const bool is_right = TF_TensorElementCount(inputs[0]) == 1 && count > 0 && ReadViews(crop_parameters + 1, count - 1, num_uniforms, &views);
    if (!is_right) return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, "one image, random numbers and views are needed");
    const int64_t shape[2] = {static_cast<int64_t>(views.size()), 4};
    auto* regions = static_cast<double*>(call.Allocate(1, kDouble, shape, 2, views.size() * 4 * sizeof(double)));
    if (!regions) return;
    std::fill(regions, regions + 4 * views.size(), 0.0);
    bool is_done = false;
#if defined(DALI_TF_INPUT_JPEG)
    const auto* encoded = static_cast<const TF_TString*>(TF_TensorData(inputs[0]));
    std::unique_ptr<Decoding> decoding = kept.Take();
    dali_tf_input::jpeg::Decoder& decoder = decoding->decoder;
    if (decoder.Open(reinterpret_cast<const uint8_t*>(TF_StringGetDataPointer(encoded)), TF_StringGetSize(encoded))) {
      dali_tf_input::jpeg::Window window = {decoder.height, decoder.width, 0, 0};
      const auto* uniforms = static_cast<const float*>(TF_TensorData(inputs[1]));
      bool is_valid = true;
      for (View& view : views) {
        view.image.height = decoder.height, view.image.width = decoder.width;
        dali_tf_input::FindRegion(view, static_cast<dali_tf_input::Crop>(view.crop), view.numbers, uniforms, view.num_uniforms, &view.image);
        uniforms += view.num_uniforms;
        is_valid = is_valid && !dali_tf_input::Check(view, view.image);
        if (!is_valid) break;
        const dali_tf_input::Taps rows = dali_tf_input::MakeTaps(view, view.height, view.image.height, view.image.start[0], view.image.extent[0], false);
        const dali_tf_input::Taps columns = dali_tf_input::MakeTaps(view, view.width, view.image.width, view.image.start[1], view.image.extent[1], false);
        window.top = std::min(window.top, rows.low), window.bottom = std::max(window.bottom, rows.high);
        window.left = std::min(window.left, columns.low), window.right = std::max(window.right, columns.high);
      }
      window.left &= ~15;
      const int64_t size[3] = {window.bottom - window.top, window.right - window.left, 3};
      if (is_valid && size[0] > 0 && size[1] > 0) {
        void* out = call.Allocate(0, kTypes[dali_tf_input::kUint8], size, 3, static_cast<size_t>(size[0] * size[1] * 3));
        if (!out) return;
        is_done = DecodeWindow(decoding.get(), window, crop_parameters[0] != 0, static_cast<uint8_t*>(out));
        for (size_t view = 0; view < views.size(); ++view) {
          const Image& image = views[view].image;
          const double region[4] = {image.start[0] - window.top, image.start[1] - window.left, image.extent[0], image.extent[1]};
          std::copy(region, region + 4, regions + 4 * view);
        }
      }
    }
    kept.Return(std::move(decoding));
#endif
    const int64_t none[3] = {0, 0, 3};
    if (!call.HasOutput(0) && !call.Allocate(0, kTypes[dali_tf_input::kUint8], none, 3, 0) && !call.ok()) return;
    if (void* flag = call.Allocate(2, kBool, nullptr, 0, 1)) *static_cast<bool*>(flag) = is_done;
  });
}

// Never destroyed: threads may still read when the process exits.
dali_tf_input::Files& OpenFiles() {
  static auto& files = *new dali_tf_input::Files;
  return files;
}

// The kernel is a pointer to a bool: whether to check CRCs.
void* CreateRead(TF_OpKernelConstruction* context) {
  unsigned char check_crc = 1;
  TF_Status* status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrBool(context, "check_crc", &check_crc, status);
  if (TF_GetCode(status)) TF_OpKernelConstruction_Failure(context, status);
  TF_DeleteStatus(status);
  OpenFiles().AddReader();
  static bool kernels[] = {false, true};
  return &kernels[check_crc != 0];
}

void DeleteRead(void*) { OpenFiles().RemoveReader(); }

// The records of some files, and functions to read them. Error messages are worded as in
// `reading.check_versions` and `records.tfrecord`.
struct Records {
  const char* names;  // TF_TString each
  size_t name_size;
  const int64_t* versions;
  int64_t num_files;
  const int32_t* file_of;
  const int64_t* extents;
  int64_t num_records;

  // Opens the file of a record, and checks that the record is within it.
  Problem Find(int64_t number, std::string* name, std::shared_ptr<dali_tf_input::File>* file) const {
    const int64_t of = number >= 0 && number < num_records ? file_of[number] : -1;
    if (of < 0 || of >= num_files || extents[2 * number] < 0 || extents[2 * number + 1] < dali_tf_input::kAround) {
      return {dali_tf_input::kInvalidArgument, "no such record: " + std::to_string(number)};
    }
    const auto* given = reinterpret_cast<const TF_TString*>(names + name_size * static_cast<size_t>(of));
    name->assign(TF_StringGetDataPointer(given), TF_StringGetSize(given));
    Problem problem = OpenFiles().Open(*name, versions[2 * of], versions[2 * of + 1], file);
    if (!problem.text.empty()) return problem;
    return dali_tf_input::CheckExtent(**file, *name, extents[2 * number], extents[2 * number + 1]);
  }

  // Reads records into TF_TStrings, a few at a time: their files are held open.
  Problem Read(const int64_t* numbers, int64_t count, bool check_crc, char* records) const {
    constexpr int64_t kAtOnce = 32;
    Problem problem;
    for (int64_t start = 0; start < count && problem.text.empty(); start += kAtOnce) {
      const int64_t few = std::min(kAtOnce, count - start);
      problem = ReadFew(numbers + start, few, check_crc, records + name_size * static_cast<size_t>(start));
    }
    return problem;
  }

  Problem ReadFew(const int64_t* numbers, int64_t count, bool check_crc, char* records) const {
    static const auto& crc = *new dali_tf_input::Crc;
    std::vector<std::string> paths(static_cast<size_t>(count));
    std::vector<std::shared_ptr<dali_tf_input::File>> files(static_cast<size_t>(count));
    std::vector<uint8_t> bytes;
    for (int64_t place = 0; place < count; ++place) {
      Problem problem = Find(numbers[place], &paths[place], &files[place]);
      if (!problem.text.empty() && files[place]) {  // it may have been cut, and restored since
        OpenFiles().Forget(paths[place], files[place]);
        problem = Find(numbers[place], &paths[place], &files[place]);
      }
      if (!problem.text.empty()) return problem;
      const int64_t* extent = extents + 2 * numbers[place];
      posix_fadvise(files[place]->descriptor, extent[0], extent[1], POSIX_FADV_WILLNEED);
    }
    for (int64_t place = 0; place < count; ++place) {
      std::string& path = paths[place];
      std::shared_ptr<dali_tf_input::File>& file = files[place];
      const int64_t offset = extents[2 * numbers[place]], size = extents[2 * numbers[place] + 1];
      if (bytes.size() < static_cast<size_t>(size)) bytes.resize(static_cast<size_t>(size));
      const auto read = [&] {
        return dali_tf_input::ReadRecord(*file, path, offset, size, check_crc ? &crc : nullptr, bytes.data());
      };
      Problem problem = read();
      if (!problem.text.empty()) {
        OpenFiles().Forget(path, file);
        problem = Find(numbers[place], &path, &file);
        if (problem.text.empty()) problem = read();
      }
      if (!problem.text.empty()) return problem;
      TF_StringCopy(reinterpret_cast<TF_TString*>(records + name_size * static_cast<size_t>(place)),
                    reinterpret_cast<const char*>(bytes.data()) + dali_tf_input::kHeader,
                    static_cast<size_t>(size - dali_tf_input::kAround));
    }
    return {};
  }
};

// Its inputs: the names of the files, string (f,); their sizes in bytes and times of modification in ns, -1 if unknown,
// int64 (f, 2); the file of each record, int32 (n,); offset and size of each in bytes, int64 (n, 2); the numbers of the
// records to read, int64 (k,).
void ComputeRead(void* kernel, TF_OpKernelContext* context) {
  Call call(context, 5);
  call.Run([&] {
    TF_Tensor** inputs = call.inputs;
    Records records;
    records.num_files = TF_TensorElementCount(inputs[0]), records.num_records = TF_TensorElementCount(inputs[2]);
    const int64_t count = TF_TensorElementCount(inputs[4]);
    if (records.num_files < 1 || TF_TensorElementCount(inputs[1]) != 2 * records.num_files ||
        TF_TensorElementCount(inputs[3]) != 2 * records.num_records) {
      const char* text = "a state for each file and an extent for each record are needed";
      return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, text);
    }
    records.names = static_cast<const char*>(TF_TensorData(inputs[0]));
    records.name_size = TF_TensorByteSize(inputs[0]) / static_cast<size_t>(records.num_files);
    records.versions = static_cast<const int64_t*>(TF_TensorData(inputs[1]));
    records.file_of = static_cast<const int32_t*>(TF_TensorData(inputs[2]));
    records.extents = static_cast<const int64_t*>(TF_TensorData(inputs[3]));
    void* out = call.Allocate(0, kString, &count, 1, records.name_size * static_cast<size_t>(count));
    if (!out) return;
    const auto* numbers = static_cast<const int64_t*>(TF_TensorData(inputs[4]));
    const Problem problem = records.Read(numbers, count, *static_cast<bool*>(kernel), static_cast<char*>(out));
    if (!problem.text.empty()) TF_SetStatus(call.status, problem.code, problem.text.c_str());
  });
}

void SetUnknownShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

// Permutes places, see random.h. Its inputs, of the same length: the places, the sizes of their permutations, and keys.
void ComputePermute(void*, TF_OpKernelContext* context) {
  Call call(context, 3);
  call.Run([&] {
    const int64_t count = TF_TensorElementCount(call.inputs[0]);
    const int64_t* values[3];
    for (int number = 0; number < 3; ++number) {
      values[number] = static_cast<const int64_t*>(TF_TensorData(call.inputs[number]));
      if (TF_TensorElementCount(call.inputs[number]) != count) {
        return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, "as many places, sizes and keys are needed");
      }
    }
    for (int64_t row = 0; row < count; ++row) {
      if (values[0][row] < 0 || values[0][row] >= values[1][row]) {
        return TF_SetStatus(call.status, dali_tf_input::kInvalidArgument, "places must be in [0, size)");
      }
    }
    auto* moved = static_cast<int64_t*>(call.Allocate(0, kInt64, &count, 1, static_cast<size_t>(count) * sizeof(int64_t)));
    if (!moved) return;
    for (int64_t row = 0; row < count; ++row) {
      const uint64_t place = static_cast<uint64_t>(values[0][row]), size = static_cast<uint64_t>(values[1][row]);
      moved[row] = static_cast<int64_t>(dali_tf_input::Permute(place, size, static_cast<uint64_t>(values[2][row])));
    }
  });
}

void Register(const char* name, std::initializer_list<const char*> inputs, std::initializer_list<const char*> outputs,
              std::initializer_list<const char*> attributes, TF_KernelBuilder* kernel) {
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(name);
  for (const char* input : inputs) TF_OpDefinitionBuilderAddInput(builder, input);
  for (const char* output : outputs) TF_OpDefinitionBuilderAddOutput(builder, output);
  for (const char* attribute : attributes) TF_OpDefinitionBuilderAddAttr(builder, attribute);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, SetUnknownShape);
  TF_Status* status = TF_NewStatus();
  TF_RegisterOpDefinition(builder, status);
  if (!TF_GetCode(status)) TF_RegisterKernelBuilder(name, kernel, status);
  TF_DeleteStatus(status);
}

// Registers the operations when the library is loaded; does nothing where TensorFlow has no such API.
__attribute__((constructor)) void RegisterAll() {
  if (!LookUp()) return;
  const auto image = {"height: int", "width: int", "kernel: int", "antialias: bool", "clip: bool", "chw: bool",
                      "mean: list(float)", "scale: list(float)", "T: {float, half, bfloat16, uint8}"};
  Register("DaliTfInputRead",
           {"names: string", "versions: int64", "file_of: int32", "extents: int64", "numbers: int64"}, {"records: string"},
           {"check_crc: bool"}, TF_NewKernelBuilder("DaliTfInputRead", "CPU", CreateRead, ComputeRead, DeleteRead));
  Register("DaliTfInputPrepare", {"image: uint8", "region: double", "mirror: bool"}, {"prepared: T"}, image,
           TF_NewKernelBuilder("DaliTfInputPrepare", "CPU", Create<Work>, ComputePrepare, Delete<Work>));
  Register("DaliTfInputAugment", {"image: uint8", "rows: float", "mirror: bool"}, {"augmented: T"}, image,
           TF_NewKernelBuilder("DaliTfInputAugment", "CPU", Create<Work>, ComputeAugment, Delete<Work>));
  Register("DaliTfInputMix", {"images: T", "drawn: float"}, {"mixed: T"}, image,
           TF_NewKernelBuilder("DaliTfInputMix", "CPU", Create<Work>, ComputeMix, Delete<Work>));
  // A kernel without a state: a null pointer.
  Register("DaliTfInputPermute", {"places: int64", "sizes: int64", "keys: int64"}, {"moved: int64"}, {},
           TF_NewKernelBuilder(
               "DaliTfInputPermute", "CPU", [](TF_OpKernelConstruction*) -> void* { return nullptr; }, ComputePermute,
               [](void*) {}));
  Register("DaliTfInputDecodeViews", {"encoded: string", "uniforms: float", "views: double"},
           {"pixels: uint8", "regions: double", "is_done: bool"}, {},
           TF_NewKernelBuilder("DaliTfInputDecodeViews", "CPU", CreateIdle, ComputeDecodeViews, Delete<DecodeKernel>));
  Register("DaliTfInputDecode", {"encoded: string", "uniforms: float", "crop_parameters: double"}, {"prepared: T", "is_done: bool"}, image,
           TF_NewKernelBuilder("DaliTfInputDecode", "CPU", Create<DecodeKernel>, ComputeDecode, Delete<DecodeKernel>));
}

}  // namespace
