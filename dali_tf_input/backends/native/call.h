// One call of an operation: its inputs, outputs and status; and the attributes of an operation that makes images.
#pragma once

#include <cstring>
#include <exception>
#include <new>

#include "api.h"
#include "pool.h"
#include "read.h"
#include "resample.h"

namespace dali_tf_input {

constexpr int kTypes[] = {1, 19, 14, 4};  // TF_DataType by `Output`: TF_FLOAT, TF_HALF, TF_BFLOAT16, TF_UINT8
constexpr int kSizes[] = {4, 2, 2, 1};    // bytes
constexpr int kFloat = 1, kInt32 = 3, kString = 7, kInt64 = 9;  // TF_FLOAT, TF_INT32, TF_STRING, TF_INT64

// The status and the inputs of a call, and its outputs; freed at the end, which reports the status.
class Call {
 public:
  static constexpr int kMostInputs = 10, kMostOutputs = 4 + 64;  // the images of at most 64 views, and 4 more

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

  // Sets an output that lies in memory of the pool, once it is complete.
  void* Borrow(int number, int type, const int64_t* shape, int dims, size_t bytes) {
    void* memory = Pool::OfBatches().Take(bytes);
    outputs_[number] = TF_NewTensor(type, shape, dims, memory, bytes, Pool::FreeBatch, nullptr);
    return memory;
  }
  void SetBorrowed(int number) { TF_SetOutput(context_, number, outputs_[number], status); }

  void Fail(const Problem& problem) { TF_SetStatus(status, problem.code, problem.text.c_str()); }

  template <typename T>
  const T* Data(int number) const {
    return static_cast<const T*>(TF_TensorData(inputs[number]));
  }
  int64_t Count(int number) const { return TF_TensorElementCount(inputs[number]); }

  // Does the work. An exception must not reach TensorFlow's C code: it would end the process.
  template <typename Work>
  void Run(Work work) {
    if (!ok()) return;
    try {
      work();
    } catch (const std::bad_alloc&) {
      TF_SetStatus(status, kResourceExhausted, "dali_tf_input: there is no memory for this image or record.");
    } catch (const std::exception& error) {
      TF_SetStatus(status, kUnavailable, error.what());
    }
  }

 private:
  TF_OpKernelContext* context_;
  int count_;
  TF_Tensor* outputs_[kMostOutputs] = {};

 public:
  TF_Status* status;
  TF_Tensor* inputs[kMostInputs] = {};
};

// Creates a kernel, a `Work` or more than that.
template <typename Made>
void* Create(TF_OpKernelConstruction* context) {
  Made* work = new (std::nothrow) Made;
  TF_Status* status = TF_NewStatus();
  int64_t height = 0, width = 0, kernel = 0;
  unsigned char antialias = 0, clip = 0, chw = 0;
  int type = 0;
  if (!work) TF_SetStatus(status, kResourceExhausted, "dali_tf_input: there is no memory.");
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
    TF_SetStatus(status, kInvalidArgument, text);
  }
  if (TF_GetCode(status)) {
    TF_OpKernelConstruction_Failure(context, status);
  } else {
    work->height = static_cast<int>(height), work->width = static_cast<int>(width);
    work->kernel = static_cast<Kernel>(kernel);
    work->antialias = antialias, work->clip = clip, work->chw = chw;
    for (int output = 0; output < 4; ++output) {
      if (kTypes[output] == type) work->output = static_cast<Output>(output);
    }
  }
  TF_DeleteStatus(status);
  return work;
}

template <typename Made>
void Delete(void* kernel) {
  delete static_cast<Made*>(kernel);
}

}  // namespace dali_tf_input
