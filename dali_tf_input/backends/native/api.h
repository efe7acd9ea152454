// TensorFlow's C API for kernels, looked up when the library is loaded: it needs no header and no library of TensorFlow's
// to be compiled, and one build serves every TensorFlow with that API.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>

// Source of these declarations: tensorflow/c/{ops,kernels,tf_tensor,tf_status}.h.
extern "C" {
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_TString TF_TString;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
}

#define FUNCTIONS(F)                                                                                                  \
  F(TF_NewStatus, TF_Status*, ())                                                                                     \
  F(TF_DeleteStatus, void, (TF_Status*))                                                                              \
  F(TF_SetStatus, void, (TF_Status*, int, const char*))                                                               \
  F(TF_GetCode, int, (const TF_Status*))                                                                              \
  F(TF_NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                                \
  F(TF_OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                                      \
  F(TF_OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                                     \
  F(TF_OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                                    \
  F(TF_OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                                       \
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
  F(TF_OpKernelConstruction_GetAttrSize, void,                                                                        \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                                          \
  F(TF_OpKernelConstruction_GetAttrTypeList, void,                                                                    \
    (TF_OpKernelConstruction*, const char*, int*, int, TF_Status*))                                                   \
  F(TF_OpKernelConstruction_GetAttrStringList, void,                                                                  \
    (TF_OpKernelConstruction*, const char*, char**, size_t*, int, void*, size_t, TF_Status*))                         \
  F(TF_OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                              \
  F(TF_GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                           \
  F(TF_AllocateOutput, TF_Tensor*,                                                                                    \
    (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*))                                         \
  F(TF_ForwardInputOrAllocateOutput, TF_Tensor*,                                                                      \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                               \
  F(TF_NewTensor, TF_Tensor*, (int, const int64_t*, int, void*, size_t, void (*)(void*, size_t, void*), void*))       \
  F(TF_SetOutput, void, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                                     \
  F(TF_StringCopy, void, (TF_TString*, const char*, size_t))                                                          \
  F(TF_StringGetDataPointer, const char*, (const TF_TString*))                                                        \
  F(TF_StringGetSize, size_t, (const TF_TString*))                                                                    \
  F(TF_DeleteTensor, void, (TF_Tensor*))                                                                              \
  F(TF_TensorByteSize, size_t, (const TF_Tensor*))                                                                    \
  F(TF_TensorData, void*, (const TF_Tensor*))                                                                         \
  F(TF_NumDims, int, (const TF_Tensor*))                                                                              \
  F(TF_Dim, int64_t, (const TF_Tensor*, int))                                                                         \
  F(TF_TensorElementCount, int64_t, (const TF_Tensor*))

#define DECLARE(name, result, arguments) static result(*name) arguments = nullptr;
FUNCTIONS(DECLARE)
#undef DECLARE

// Looks the functions up; returns the name of one that this TensorFlow lacks, or nullptr.
inline const char* LookUp() {
  void* libraries[] = {dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_LAZY),
                       dlopen("libtensorflow_cc.so.2", RTLD_NOLOAD | RTLD_LAZY)};
  for (void* library : libraries) {
    if (!library) continue;
#define LOOK_UP(name, result, arguments) \
  if (!name) name = reinterpret_cast<result(*) arguments>(dlsym(library, #name));
    FUNCTIONS(LOOK_UP)
#undef LOOK_UP
  }
#define NAME_MISSING(name, result, arguments) \
  if (!name) return #name;
  FUNCTIONS(NAME_MISSING)
#undef NAME_MISSING
  return nullptr;
}
