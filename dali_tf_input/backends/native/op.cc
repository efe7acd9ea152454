// TensorFlow's operation DaliTfInputPrepare: a decoded image and a region of it to what the model sees (resample.h).
//
// It is registered through TensorFlow's C API for kernels, whose functions are looked up when the library is loaded: so
// it needs no header and no library of TensorFlow's to be compiled, and one build serves every TensorFlow with that API.
#include <dlfcn.h>

#include "resample.h"

// Source of these declarations: tensorflow/c/{ops,kernels,tf_tensor,tf_status}.h.
extern "C" {
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
}

namespace {

using dali_tf_input::Image;
using dali_tf_input::Work;

constexpr int kTypes[] = {1, 19, 14, 4};  // TF_DataType by `Output`: TF_FLOAT, TF_HALF, TF_BFLOAT16, TF_UINT8
constexpr int kSizes[] = {4, 2, 2, 1};    // bytes
constexpr int kInvalidArgument = 3;       // TF_INVALID_ARGUMENT

#define FUNCTIONS(F)                                                                                                  \
  F(TF_NewStatus, TF_Status*, ())                                                                                     \
  F(TF_DeleteStatus, void, (TF_Status*))                                                                              \
  F(TF_SetStatus, void, (TF_Status*, int, const char*))                                                               \
  F(TF_GetCode, int, (const TF_Status*))                                                                              \
  F(TF_NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                                \
  F(TF_OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                                      \
  F(TF_OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                                     \
  F(TF_OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                                    \
  F(TF_OpDefinitionBuilderSetShapeInferenceFunction, void,                                                            \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))                                       \
  F(TF_ShapeInferenceContextSetUnknownShape, void, (TF_ShapeInferenceContext*, TF_Status*))                           \
  F(TF_RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                                             \
  F(TF_NewKernelBuilder, TF_KernelBuilder*,                                                                           \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*), void (*)(void*, TF_OpKernelContext*),             \
     void (*)(void*)))                                                                                                \
  F(TF_RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                                     \
  F(TF_OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                                    \
  F(TF_OpKernelConstruction_GetAttrInt64, void, (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))        \
  F(TF_OpKernelConstruction_GetAttrBool, void, (TF_OpKernelConstruction*, const char*, unsigned char*, TF_Status*))   \
  F(TF_OpKernelConstruction_GetAttrType, void, (TF_OpKernelConstruction*, const char*, int*, TF_Status*))             \
  F(TF_OpKernelConstruction_GetAttrFloatList, void,                                                                   \
    (TF_OpKernelConstruction*, const char*, float*, int, TF_Status*))                                                 \
  F(TF_OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                              \
  F(TF_GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                           \
  F(TF_AllocateOutput, TF_Tensor*,                                                                                    \
    (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*))                                         \
  F(TF_DeleteTensor, void, (TF_Tensor*))                                                                              \
  F(TF_TensorData, void*, (const TF_Tensor*))                                                                         \
  F(TF_NumDims, int, (const TF_Tensor*))                                                                              \
  F(TF_Dim, int64_t, (const TF_Tensor*, int))                                                                         \
  F(TF_TensorElementCount, int64_t, (const TF_Tensor*))

#define DECLARE(name, result, arguments) result(*name) arguments = nullptr;
FUNCTIONS(DECLARE)
#undef DECLARE

void* Create(TF_OpKernelConstruction* context) {
  Work* work = new Work;
  TF_Status* status = TF_NewStatus();
  int64_t height = 0, width = 0, kernel = 0;
  unsigned char antialias = 0, clip = 0, chw = 0;
  int type = 0;
  TF_OpKernelConstruction_GetAttrInt64(context, "height", &height, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrInt64(context, "width", &width, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrInt64(context, "kernel", &kernel, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrBool(context, "antialias", &antialias, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrBool(context, "clip", &clip, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrBool(context, "chw", &chw, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrType(context, "T", &type, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrFloatList(context, "mean", work->mean, 3, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrFloatList(context, "scale", work->scale, 3, status);
  if (!TF_GetCode(status) && (height < 1 || width < 1 || height > 65535 || width > 65535 || kernel < 0 || kernel > 4)) {
    TF_SetStatus(status, kInvalidArgument, "height and width must be in [1, 65535], kernel in [0, 4]");
  }
  work->height = static_cast<int>(height), work->width = static_cast<int>(width);
  work->kernel = static_cast<dali_tf_input::Kernel>(kernel);
  work->antialias = antialias, work->clip = clip, work->chw = chw;
  for (int output = 0; output < 4; ++output) {
    if (kTypes[output] == type) work->output = static_cast<dali_tf_input::Output>(output);
  }
  if (TF_GetCode(status)) TF_OpKernelConstruction_Failure(context, status);
  TF_DeleteStatus(status);
  return work;
}

void Delete(void* work) { delete static_cast<Work*>(work); }

// The inputs: image, region (start, then extent, each y, x), whether it is mirrored.
void Compute(void* kernel, TF_OpKernelContext* context) {
  const Work& work = *static_cast<Work*>(kernel);
  TF_Status* status = TF_NewStatus();
  TF_Tensor* inputs[3] = {nullptr, nullptr, nullptr};
  for (int number = 0; number < 3 && !TF_GetCode(status); ++number) {
    TF_GetInput(context, number, &inputs[number], status);
  }
  const char* wrong = nullptr;
  Image image;
  if (!TF_GetCode(status)) {
    if (TF_NumDims(inputs[0]) != 3 || TF_Dim(inputs[0], 2) != 3) {
      wrong = "the image must be of shape (height, width, 3)";
    } else if (TF_TensorElementCount(inputs[1]) != 4 || TF_TensorElementCount(inputs[2]) != 1) {
      wrong = "the region must be 4 numbers, the mirror 1";
    } else {
      const double* region = static_cast<const double*>(TF_TensorData(inputs[1]));
      image.pixels = static_cast<const uint8_t*>(TF_TensorData(inputs[0]));
      image.height = TF_Dim(inputs[0], 0), image.width = TF_Dim(inputs[0], 1);
      image.start[0] = region[0], image.start[1] = region[1], image.extent[0] = region[2], image.extent[1] = region[3];
      image.mirror = *static_cast<const bool*>(TF_TensorData(inputs[2]));
      wrong = dali_tf_input::Check(work, image);
    }
  }
  if (wrong) TF_SetStatus(status, kInvalidArgument, wrong);
  if (!TF_GetCode(status)) {
    int64_t shape[3] = {work.height, work.width, 3};
    if (work.chw) shape[0] = 3, shape[1] = work.height, shape[2] = work.width;
    const size_t bytes = static_cast<size_t>(3) * work.height * work.width * kSizes[work.output];
    TF_Tensor* out = TF_AllocateOutput(context, 0, kTypes[work.output], shape, 3, bytes, status);
    if (!TF_GetCode(status)) dali_tf_input::Prepare(work, image, TF_TensorData(out));
    if (out) TF_DeleteTensor(out);
  }
  if (TF_GetCode(status)) TF_OpKernelContext_Failure(context, status);
  for (TF_Tensor* input : inputs) {
    if (input) TF_DeleteTensor(input);
  }
  TF_DeleteStatus(status);
}

void SetUnknownShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

// Registers operation and kernel when the library is loaded; does nothing where TensorFlow has no such API.
__attribute__((constructor)) void Register() {
  void* tensorflow = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_LAZY);
  if (!tensorflow) return;
#define LOOK_UP(name, result, arguments)                                             \
  name = reinterpret_cast<result(*) arguments>(dlsym(tensorflow, #name)); \
  if (!name) return;
  FUNCTIONS(LOOK_UP)
#undef LOOK_UP
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder("DaliTfInputPrepare");
  TF_OpDefinitionBuilderAddInput(op, "image: uint8");
  TF_OpDefinitionBuilderAddInput(op, "region: double");
  TF_OpDefinitionBuilderAddInput(op, "mirror: bool");
  TF_OpDefinitionBuilderAddOutput(op, "prepared: T");
  for (const char* attribute : {"height: int", "width: int", "kernel: int", "antialias: bool", "clip: bool", "chw: bool",
                                "mean: list(float)", "scale: list(float)", "T: {float, half, bfloat16, uint8}"}) {
    TF_OpDefinitionBuilderAddAttr(op, attribute);
  }
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, SetUnknownShape);
  TF_Status* status = TF_NewStatus();
  TF_RegisterOpDefinition(op, status);
  if (!TF_GetCode(status)) {
    TF_KernelBuilder* builder = TF_NewKernelBuilder("DaliTfInputPrepare", "CPU", Create, Compute, Delete);
    TF_RegisterKernelBuilder("DaliTfInputPrepare", builder, status);
  }
  TF_DeleteStatus(status);
}

}  // namespace
