// The TensorFlow operations of this package, and what each file beside this one is for:
//   DaliTfInputBatch     makes a batch from the positions of its records, or from records        batch.h
//   DaliTfInputInspect   says how TensorFlow is to decode an image that Batch refused            decode.h, format.h
//   DaliTfInputFinish    makes the views of that image when it is decoded                        decode.h
//   DaliTfInputPlace     places them in the batch, and mixes it                                  mix.h
//   DaliTfInputPack      packs a batch for DALI, from the same                                   split.h, packed.h
//   DaliTfInputFill      fills values into a packed batch                                        packed.h
//   DaliTfInputUniforms  draws random numbers for many keys                                      random.h
//   DaliTfInputList      lists images of an epoch and their records                              plan.h
//   DaliTfInputCheck     checks that files are those that were indexed                           read.h
//   DaliTfInputRead      reads records at known offsets in files                                 records.h
//   DaliTfInputAugment   augments a cropped image by rows                                        augment.h
// Beneath them: api.h and call.h (TensorFlow's C API, a call), job.h (what Batch and Pack share), pool.h and team.h (memory
// and threads of batches), read.h (files and CRCs), example.h (records), decode.h (from an image to its views), jpeg.h (the
// decoder), region.h (crops). And dali_images.cc is the operator of DALI's that takes the rows: a library of its own.
#include "api.h"
#include "augment.h"
#include "batch.h"
#include "call.h"
#include "decode.h"
#include "format.h"
#include "mix.h"
#include "plan.h"
#include "random.h"
#include "read.h"
#include "records.h"
#include "resample.h"
#include "packed.h"
#include "split.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

namespace {

using dali_tf_input::Batch;
using dali_tf_input::Call;
using dali_tf_input::Create;
using dali_tf_input::Delete;
using dali_tf_input::Image;
using dali_tf_input::Job;
using dali_tf_input::kPlaceSize;
using dali_tf_input::kFloat;
using dali_tf_input::kInt32;
using dali_tf_input::kInt64;
using dali_tf_input::kInvalidArgument;
using dali_tf_input::kSizes;
using dali_tf_input::kString;
using dali_tf_input::kTypes;
using dali_tf_input::Pool;
using dali_tf_input::Problem;
using dali_tf_input::Records;
using dali_tf_input::Span;
using dali_tf_input::View;
using dali_tf_input::Work;

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

// What the operations that read need to know of files: the names, string (f,); their sizes in bytes and
// times of modification in ns, -1 if unknown, int64 (f, 2); the file of each record, int32 (n,); offset and size of each
// in bytes, int64 (n, 2). They are the first four inputs.
bool ReadFiles(const Call& call, Records* records) {
  records->num_files = call.Count(0), records->num_records = call.Count(2);
  if (records->num_files < 1 || call.Count(1) != 2 * records->num_files || call.Count(3) != 2 * records->num_records) return false;
  records->names = call.Data<char>(0);
  records->name_size = TF_TensorByteSize(call.inputs[0]) / static_cast<size_t>(records->num_files);
  records->versions = call.Data<int64_t>(1);
  records->file_of = call.Data<int32_t>(2);
  records->extents = call.Data<int64_t>(3);
  return true;
}

constexpr char kFilesNeeded[] = "a version for each file and an extent for each record are needed";

// Reads the inputs of `ReadFiles` and the two after them: the positions of the records to read, int64 (k,), or none, and then
// the records, string (k,). Returns what is wrong, or a null pointer.
const char* ReadGiven(const Call& call, Records* records, Job* job) {
  job->count = std::max(call.Count(4), call.Count(5));
  if (call.Count(4)) {
    if (call.Count(5)) return "positions or records are needed, not both";
    if (!ReadFiles(call, records)) return kFilesNeeded;
    job->records = records, job->positions = call.Data<int64_t>(4), job->string_size = records->name_size;
  } else if (job->count) {
    job->given = call.Data<char>(5), job->string_size = TF_TensorByteSize(call.inputs[5]) / static_cast<size_t>(job->count);
  }
  return nullptr;
}

// The kernel of DaliTfInputBatch, and, without types, of DaliTfInputPack.
struct BatchKernel {
  dali_tf_input::ImageKeys keys;
  std::vector<int> types;
  bool check_crc = true;
  int num_readers = 1, num_threads = 1;
};

// Reads an attribute that is a list of strings.
void ReadStrings(TF_OpKernelConstruction* context, const char* name, std::vector<std::string>* strings, TF_Status* status) {
  int32_t number = 0, bytes = 0;
  TF_OpKernelConstruction_GetAttrSize(context, name, &number, &bytes, status);
  if (TF_GetCode(status)) return;
  const size_t count = static_cast<size_t>(number);
  std::vector<char> text(static_cast<size_t>(bytes) + 1);
  std::vector<char*> values(count + 1);
  std::vector<size_t> sizes(count + 1);
  TF_OpKernelConstruction_GetAttrStringList(context, name, values.data(), sizes.data(), number, text.data(), text.size(), status);
  for (size_t at = 0; at < count && !TF_GetCode(status); ++at) strings->emplace_back(values[at], sizes[at]);
}

// Reads the types of the views.
void ReadTypes(TF_OpKernelConstruction* context, std::vector<int>* types, TF_Status* status) {
  int32_t number = 0, bytes = 0;
  TF_OpKernelConstruction_GetAttrSize(context, "T", &number, &bytes, status);
  if (TF_GetCode(status)) return;
  types->resize(static_cast<size_t>(number));
  TF_OpKernelConstruction_GetAttrTypeList(context, "T", types->data(), number, status);
}

// Reads the attributes into the kernel; stops at the first error.
void ReadAttributes(TF_OpKernelConstruction* context, bool has_types, BatchKernel* kernel, TF_Status* status) {
  unsigned char check_crc = 1;
  int64_t readers = 1, threads = 1;
  if (has_types) ReadTypes(context, &kernel->types, status);
  if (!TF_GetCode(status)) ReadStrings(context, "image_keys", &kernel->keys.images, status);
  if (!TF_GetCode(status)) ReadStrings(context, "size_keys", &kernel->keys.sides, status);
  if (TF_GetCode(status)) return;
  const size_t images = kernel->keys.images.size(), sides = kernel->keys.sides.size();
  if (images < 1 || images > 60 || (sides && sides != 2)) {
    return TF_SetStatus(status, kInvalidArgument, "1 to 60 image keys are needed, and no or 2 size keys");
  }
  TF_OpKernelConstruction_GetAttrBool(context, "check_crc", &check_crc, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrInt64(context, "num_readers", &readers, status);
  if (!TF_GetCode(status)) TF_OpKernelConstruction_GetAttrInt64(context, "num_threads", &threads, status);
  if (TF_GetCode(status)) return;
  if (readers < 1 || readers > 1024 || threads < 1 || threads > 1024) {
    return TF_SetStatus(status, kInvalidArgument, "num_readers and num_threads must be in [1, 1024]");
  }
  kernel->check_crc = check_crc, kernel->num_readers = static_cast<int>(readers), kernel->num_threads = static_cast<int>(threads);
}

template <bool has_types>
void* CreateBatch(TF_OpKernelConstruction* context) {
  TF_Status* status = TF_NewStatus();
  BatchKernel* kernel = nullptr;
  try {
    kernel = new BatchKernel;
    ReadAttributes(context, has_types, kernel, status);
  } catch (const std::exception&) {
    TF_SetStatus(status, dali_tf_input::kResourceExhausted, "dali_tf_input: there is no memory.");
  }
  if (TF_GetCode(status)) TF_OpKernelConstruction_Failure(context, status);
  TF_DeleteStatus(status);
  dali_tf_input::OpenFiles().AddReader(), Pool::OfBatches().AddUser(), Pool::OfRecords().AddUser();
  return kernel;
}

void DeleteBatch(void* kernel) {
  delete static_cast<BatchKernel*>(kernel);
  dali_tf_input::OpenFiles().RemoveReader(), Pool::OfBatches().RemoveUser(), Pool::OfRecords().RemoveUser();
}

// What is made of each image, as `tf_native.describe_views` writes it.
struct Parameters {
  bool is_whole = false, is_turned = false;  // see Picture
  double maximum = 0;
  std::vector<View> views;
  int64_t num_uniforms = 0, num_rows = 0;  // of an image: of all its views

  // Returns false if an input is anything else.
  bool Read(const Call& call, int number) {
    const auto* numbers = call.Data<double>(number);
    if (call.Count(number) < 4 || !dali_tf_input::ReadViews(numbers + 3, call.Count(number) - 3, &views)) return false;
    is_whole = numbers[0] != 0, maximum = numbers[1], is_turned = numbers[2] != 0;
    for (const View& view : views) num_uniforms += view.num_uniforms, num_rows += view.num_rows;
    return true;
  }
};

// Its inputs: those of `ReadGiven`; the random numbers of all views, float (k, u); their rows of augmentation, float (k, r, kRowSize); how the batch
// is mixed, see mix.h, or nothing; and parameters, double: whether whole files must be valid, the limit of image pixels
// per output pixel, whether images are turned upright, and the views.
// Its outputs: the images of each view, of shape (k, height, width, 3) or (k, 3, height, width); the Examples without
// their images, string (k,); the images' heights, widths and orientations, int64 (k, 3), 0 if refused; the places of refused images,
// int64 (n,), which hold anything; and their records, string (n,). If there are any, the batch is not mixed. A refused
// image's Example may have its image.
void ComputeBatch(void* given, TF_OpKernelContext* context) {
  const BatchKernel& kernel = *static_cast<BatchKernel*>(given);
  Call call(context, 10);
  call.Run([&] {
    Records records;
    Parameters parameters;
    const std::vector<View>& views = parameters.views;
    const auto fail = [&](const char* text) { TF_SetStatus(call.status, kInvalidArgument, text); };
    if (!parameters.Read(call, 9) || views.size() != kernel.types.size()) return fail("parameters of each view are needed");
    Batch batch;
    if (const char* wrong = ReadGiven(call, &records, &batch)) return fail(wrong);
    for (const View& view : views) {
      if (kTypes[view.output] != kernel.types[static_cast<size_t>(&view - views.data())]) return fail("a view is of another type");
    }
    batch.num_uniforms = parameters.num_uniforms, batch.num_rows = parameters.num_rows;
    batch.uniforms = call.Data<float>(6), batch.rows = call.Data<float>(7);
    if (call.Count(6) != batch.num_uniforms * batch.count || call.Count(7) != dali_tf_input::kRowSize * batch.num_rows * batch.count) {
      return fail("random numbers and rows for all views of each image are needed");
    }
    if (const char* wrong = dali_tf_input::CheckRows(batch.rows, call.Count(7))) return fail(wrong);
    dali_tf_input::Mixing mixing;
    if (call.Count(8)) {
      if (views.size() > 1) return fail("several views cannot be mixed");
      if (const char* wrong = dali_tf_input::ReadMixing(call.Data<float>(8), call.Count(8), views[0], &mixing)) return fail(wrong);
    }
    batch.check_crc = kernel.check_crc, batch.keys = &kernel.keys, batch.views = &views;
    batch.is_whole = parameters.is_whole, batch.maximum = parameters.maximum, batch.is_turned = parameters.is_turned;
    const int num_views = static_cast<int>(views.size());
    for (int number = 0; number < num_views; ++number) {
      const View& view = views[static_cast<size_t>(number)];
      int64_t shape[4] = {batch.count, view.height, view.width, 3};
      if (view.chw) shape[1] = 3, shape[2] = view.height, shape[3] = view.width;
      batch.image_bytes.push_back(static_cast<size_t>(3) * view.height * view.width * kSizes[view.output]);
      const size_t bytes = batch.image_bytes.back() * static_cast<size_t>(batch.count);
      void* images = bytes ? call.Borrow(number, kTypes[view.output], shape, 4, bytes)
                           : call.Allocate(number, kTypes[view.output], shape, 4, 0);
      if (!call.ok()) return;
      batch.images.push_back(static_cast<char*>(images));
    }
    batch.rests = static_cast<char*>(call.Allocate(num_views, kString, &batch.count, 1, batch.string_size * static_cast<size_t>(batch.count)));
    if (!call.ok()) return;
    const int64_t sides[2] = {batch.count, 3};
    const size_t sides_bytes = 3 * sizeof(int64_t) * static_cast<size_t>(batch.count);
    batch.sizes = static_cast<int64_t*>(call.Allocate(num_views + 1, kInt64, sides, 2, sides_bytes));
    if (!call.ok()) return;
    std::memset(batch.sizes, 0, sides_bytes);
    const Problem problem = batch.Run(kernel.num_readers, kernel.num_threads);
    if (!problem.text.empty()) return call.Fail(problem);
    const int64_t num_refused = static_cast<int64_t>(batch.refused.size());
    void* places = call.Allocate(num_views + 2, kInt64, &num_refused, 1, batch.refused.size() * sizeof(int64_t));
    if (!call.ok()) return;
    auto* examples = static_cast<char*>(call.Allocate(num_views + 3, kString, &num_refused, 1, batch.string_size * batch.refused.size()));
    if (!call.ok()) return;
    for (int64_t place : batch.refused) {
      const Span example = batch.Example(place);
      TF_StringCopy(reinterpret_cast<TF_TString*>(examples), reinterpret_cast<const char*>(example.at), example.size());
      examples += batch.string_size;
    }
    if (num_refused) {
      std::memcpy(places, batch.refused.data(), batch.refused.size() * sizeof(int64_t));
    } else if (call.Count(8)) {
      dali_tf_input::Mix(views[0], mixing, batch.count, 3, static_cast<size_t>(kSizes[views[0].output]), batch.images[0]);
    }
    for (int number = 0; number < num_views && batch.count && call.ok(); ++number) call.SetBorrowed(number);
  });
}

// Its inputs: an image, string; its height and width, int32 (2,), zeros if all of it is to be decoded; its random numbers,
// float (u,); and parameters, as for Batch. Its output says how it is to be decoded, int32 (8,): the decoder, 0 to 3 for a
// JPEG at 1 / 2^n of its size, 4 for another format and 5 for a PNG of 16 bits; the orientation; the height and width that
// were given; and the window of the image, at that size, that is to be decoded: its top, left, height and width.
void ComputeInspect(void*, TF_OpKernelContext* context) {
  constexpr int kOther = 4, kDeepPng = 5;
  constexpr int64_t kNumbers = 8;
  Call call(context, 4);
  call.Run([&] {
    const auto fail = [&](const char* text) { TF_SetStatus(call.status, kInvalidArgument, text); };
    Parameters parameters;
    if (!parameters.Read(call, 3) || call.Count(2) != parameters.num_uniforms) return fail("parameters and random numbers are needed");
    if (call.Count(0) != 1 || call.Count(1) != 2) return fail("an image, its height and its width are needed");
    const auto* text = call.Data<TF_TString>(0);
    const auto* data = reinterpret_cast<const uint8_t*>(TF_StringGetDataPointer(text));
    const Span encoded = {data, data + TF_StringGetSize(text)};
    if (!dali_tf_input::IsAccepted(encoded)) return fail("corrupted record: no JPEG, PNG, BMP or WebP that both backends decode");
    auto* plan = static_cast<int32_t*>(call.Allocate(0, kInt32, &kNumbers, 1, kNumbers * sizeof(int32_t)));
    if (!plan) return;
    std::memset(plan, 0, kNumbers * sizeof *plan);
    const bool is_jpeg = data[0] == 0xFF, is_png = data[0] == 0x89;
    if (!is_jpeg) plan[0] = is_png && encoded.size() > 24 && data[24] == 16 ? kDeepPng : kOther;
    plan[1] = parameters.is_turned ? dali_tf_input::FindOrientation(data, encoded.size()) : 1;
    const auto* size = call.Data<int32_t>(1);
    if (!is_jpeg || size[0] < 1 || size[1] < 1) return;
    const View& view = parameters.views[0];
    Image image;
    image.height = size[0], image.width = size[1], image.orientation = plan[1];
    dali_tf_input::FindRegion(view, view.crop, view.numbers, call.Data<float>(2), view.num_uniforms, &image);
    const dali_tf_input::Part part = ChoosePart(view, image, parameters.is_whole, std::isfinite(parameters.maximum));
    while (1 << plan[0] < part.ratio) ++plan[0];
    const int64_t numbers[] = {size[0], size[1], part.top, part.left, part.height, part.width};
    std::copy(std::begin(numbers), std::end(numbers), plan + 2);
  });
}

// Its inputs: what was decoded of an image, uint8 (height, width, 3); how, as Inspect says, with zeros for a height and width
// that it did not know; its random numbers, float (u,); its rows of augmentation, float (r, kRowSize); and parameters, as
// for Batch. Its outputs: the image's views, and its height, width and orientation as it is stored, int64 (3,).
void ComputeFinish(void* given, TF_OpKernelContext* context) {
  const auto& types = *static_cast<std::vector<int>*>(given);
  Call call(context, 5);
  call.Run([&] {
    const auto fail = [&](const char* text) { TF_SetStatus(call.status, kInvalidArgument, text); };
    Parameters parameters;
    const std::vector<View>& views = parameters.views;
    if (!parameters.Read(call, 4) || views.size() != types.size()) return fail("parameters of each view are needed");
    if (call.Count(2) != parameters.num_uniforms || call.Count(3) != dali_tf_input::kRowSize * parameters.num_rows) {
      return fail("random numbers and rows for all views are needed");
    }
    if (const char* wrong = dali_tf_input::CheckRows(call.Data<float>(3), call.Count(3))) return fail(wrong);
    if (TF_NumDims(call.inputs[0]) != 3 || TF_Dim(call.inputs[0], 2) != 3) return fail("the image must be of shape (height, width, 3)");
    const auto* plan = call.Data<int32_t>(1);
    if (call.Count(1) != 8 || plan[0] < 0 || plan[0] > 5 || plan[1] < 1 || plan[1] > 8) return fail("what Inspect says is needed");
    const int64_t height = TF_Dim(call.inputs[0], 0), width = TF_Dim(call.inputs[0], 1);
    Image image;
    image.height = height, image.width = width;
    dali_tf_input::Part part = {0, 0, height, width};
    if (plan[2]) image.height = plan[2], image.width = plan[3], part = {plan[4], plan[5], height, width, plan[0] < 4 ? 1 << plan[0] : 1};
    std::vector<char*> out;
    for (const View& view : views) {
      const size_t number = out.size();
      if (kTypes[view.output] != types[number]) return fail("a view is of another type");
      int64_t shape[3] = {view.height, view.width, 3};
      if (view.chw) shape[0] = 3, shape[1] = view.height, shape[2] = view.width;
      const size_t bytes = static_cast<size_t>(3) * view.height * view.width * kSizes[view.output];
      out.push_back(static_cast<char*>(call.Allocate(static_cast<int>(number), kTypes[view.output], shape, 3, bytes)));
      if (!call.ok()) return;
    }
    const int64_t three = 3, size[] = {image.height, image.width, plan[1]};
    void* sizes = call.Allocate(static_cast<int>(views.size()), kInt64, &three, 1, sizeof size);
    if (!call.ok()) return;
    std::memcpy(sizes, size, sizeof size);
    static thread_local dali_tf_input::Decoding decoding;
    const auto* pixels = call.Data<uint8_t>(0);
    if (const char* wrong = decoding.MakeOf(pixels, part, size, views, call.Data<float>(2), call.Data<float>(3), out.data())) fail(wrong);
  });
}

void* CreateFinish(TF_OpKernelConstruction* context) {
  TF_Status* status = TF_NewStatus();
  std::vector<int>* types = nullptr;
  try {
    types = new std::vector<int>;
    ReadTypes(context, types, status);
  } catch (const std::exception&) {
    TF_SetStatus(status, dali_tf_input::kResourceExhausted, "dali_tf_input: there is no memory.");
  }
  if (TF_GetCode(status)) TF_OpKernelConstruction_Failure(context, status);
  TF_DeleteStatus(status);
  return types;
}

// Its inputs: a batch of images, as Batch makes them; images of the same kind, and their places in it, int64 (n,); and
// how the batch is mixed, see mix.h, or nothing. Its output is the batch: in the memory of the first input if that is the
// pool's, for which TensorFlow would always make a copy. So nothing else may use that input, see tf_batch.py.
void ComputePlace(void* kernel, TF_OpKernelContext* context) {
  const Work& work = *static_cast<Work*>(kernel);
  Call call(context, 4);
  call.Run([&] {
    int64_t shape[4] = {};
    const auto fail = [&](const char* text) { TF_SetStatus(call.status, kInvalidArgument, text); };
    if (TF_NumDims(call.inputs[0]) != 4) return fail("the images must be of 4 axes");
    for (int axis = 0; axis < 4; ++axis) shape[axis] = TF_Dim(call.inputs[0], axis);
    const int first = work.chw ? 2 : 1;
    if (shape[first] != work.height || shape[first + 1] != work.width) return fail("the images must be of the output's size");
    const int64_t count = call.Count(2), depth = shape[work.chw ? 1 : 3], size = depth * work.height * work.width;
    if (call.Count(1) != count * size) return fail("an image is needed for each place");
    const auto* places = call.Data<int64_t>(2);
    for (int64_t number = 0; number < count; ++number) {
      if (places[number] < 0 || places[number] >= shape[0]) return fail("places must be in the batch");
    }
    dali_tf_input::Mixing mixing;
    if (call.Count(3)) {
      if (const char* wrong = dali_tf_input::ReadMixing(call.Data<float>(3), call.Count(3), work, &mixing)) return fail(wrong);
    }
    const size_t item = static_cast<size_t>(kSizes[work.output]), bytes = static_cast<size_t>(size) * item;
    void* own = TF_TensorData(call.inputs[0]);
    const bool is_pooled = Pool::OfBatches().Owns(own);
    auto* out = static_cast<char*>(is_pooled ? own : call.ForwardImages(shape));
    if (!out) return;
    for (int64_t number = 0; number < count; ++number) {
      std::memcpy(out + bytes * static_cast<size_t>(places[number]), call.Data<char>(1) + bytes * static_cast<size_t>(number), bytes);
    }
    if (call.Count(3)) dali_tf_input::Mix(work, mixing, shape[0], depth, item, out);
    if (is_pooled) TF_SetOutput(context, 0, call.inputs[0], call.status);
  });
}

// Its inputs: those of `ReadGiven`; or images, string (k,); and int64 (3,): how many bytes the values of an image take,
// whether the batch says where images are in their files, and whether they are returned, too. Its outputs: the packed batch,
// see packed.h, without values, uint8 (k, size), if no image is refused; the Examples without their images, string (k,),
// unless images are given; how many images are refused, int64; and the images, string (k,), or none.
void ComputePack(void* given, TF_OpKernelContext* context) {
  const BatchKernel& kernel = *static_cast<BatchKernel*>(given);
  Call call(context, 8);
  call.Run([&] {
    const auto fail = [&](const char* text) { TF_SetStatus(call.status, kInvalidArgument, text); };
    Records records;
    dali_tf_input::Split split;
    if (const char* wrong = ReadGiven(call, &records, &split)) return fail(wrong);
    const int64_t num_images = call.Count(6), *settings = call.Data<int64_t>(7);
    if (split.count && num_images) return fail("records or images are needed, not both");
    if (call.Count(7) != 3 || settings[0] < 0 || settings[0] > 1 << 30) return fail("the size of the values and two flags are needed");
    const int64_t values_size = settings[0];
    split.check_crc = kernel.check_crc, split.keys = &kernel.keys;
    split.images.resize(static_cast<size_t>(split.count + num_images));
    split.rests = static_cast<char*>(call.Allocate(1, kString, &split.count, 1, split.string_size * static_cast<size_t>(split.count)));
    if (!call.ok()) return;
    const Problem problem = split.Run(kernel.num_readers, kernel.num_threads);
    if (!problem.text.empty()) return call.Fail(problem);
    for (int64_t number = 0; number < num_images; ++number) {
      const size_t string_size = TF_TensorByteSize(call.inputs[6]) / static_cast<size_t>(num_images);
      const auto* text = reinterpret_cast<const TF_TString*>(call.Data<char>(6) + string_size * static_cast<size_t>(number));
      const auto* data = reinterpret_cast<const uint8_t*>(TF_StringGetDataPointer(text));
      split.images[static_cast<size_t>(number)] = {data, data + TF_StringGetSize(text)};
    }
    auto* num_refused = static_cast<int64_t*>(call.Allocate(2, kInt64, nullptr, 0, sizeof(int64_t)));
    if (!call.ok()) return;
    *num_refused = static_cast<int64_t>(split.refused.size());
    int64_t shape[2] = {*num_refused ? 0 : split.count + num_images, kPlaceSize + values_size}, bytes = 0;
    std::vector<dali_tf_input::Place> places;
    if (settings[1] && split.records && !*num_refused) {
      places = split.List();
    } else if (shape[0]) {
      for (const Span& image : split.images) bytes += static_cast<int64_t>(image.size());
      shape[1] += (bytes + shape[0] - 1) / shape[0];
    }
    const int64_t num_returned = settings[2] && !num_images ? shape[0] : 0;
    const size_t string_size = split.string_size;  // images that are given are not returned
    auto* returned = static_cast<char*>(call.Allocate(3, kString, &num_returned, 1, string_size * static_cast<size_t>(num_returned)));
    if (!call.ok()) return;
    for (int64_t number = 0; number < num_returned; ++number, returned += string_size) {
      const Span& image = split.images[static_cast<size_t>(number)];
      TF_StringCopy(reinterpret_cast<TF_TString*>(returned), reinterpret_cast<const char*>(image.at), image.size());
    }
    const int type = kTypes[dali_tf_input::kUint8];
    const size_t size = static_cast<size_t>(shape[0] * shape[1]);
    void* rows = size ? call.Borrow(0, type, shape, 2, size) : call.Allocate(0, type, shape, 2, 0);
    if (!call.ok() || !size) return;
    dali_tf_input::WritePacked(split.images, places, shape[1], values_size, static_cast<uint8_t*>(rows));
    call.SetBorrowed(0);
  });
}

// Its inputs: a batch of DaliTfInputPack, which nothing else may use, and its values, uint8 (k, size). Its output: the
// batch, in the same memory, as for Place.
void ComputeFill(void*, TF_OpKernelContext* context) {
  Call call(context, 2);
  call.Run([&] {
    const auto fail = [&](const char* text) { TF_SetStatus(call.status, kInvalidArgument, text); };
    if (TF_NumDims(call.inputs[0]) != 2 || TF_NumDims(call.inputs[1]) != 2) return fail("rows and values are needed");
    const int64_t count = TF_Dim(call.inputs[0], 0), row_size = TF_Dim(call.inputs[0], 1), size = TF_Dim(call.inputs[1], 1);
    if (TF_Dim(call.inputs[1], 0) != count || size > row_size - kPlaceSize) return fail("the values of each row are needed");
    auto* rows = static_cast<uint8_t*>(TF_TensorData(call.inputs[0]));
    if (count && !Pool::OfBatches().Owns(rows)) return fail("a batch of DaliTfInputPack is needed");
    for (int64_t row = 0; row < count; ++row) {
      std::memcpy(rows + row_size * row + kPlaceSize, call.Data<uint8_t>(1) + size * row, static_cast<size_t>(size));
    }
    TF_SetOutput(context, 0, call.inputs[0], call.status);
  });
}

// Its inputs: keys, int64 (k,); a seed, int64; how many numbers each key has, int64. Its output: float (k, count).
void ComputeUniforms(void*, TF_OpKernelContext* context) {
  Call call(context, 3);
  call.Run([&] {
    const int64_t count = call.Count(1) == 1 && call.Count(2) == 1 ? *call.Data<int64_t>(2) : -1;
    if (count < 0 || count > 1 << 20) return TF_SetStatus(call.status, kInvalidArgument, "a seed and a count are needed");
    const int64_t shape[2] = {call.Count(0), count};
    auto* out = static_cast<float*>(call.Allocate(0, kFloat, shape, 2, static_cast<size_t>(shape[0] * count) * sizeof(float)));
    if (!out) return;
    for (int64_t row = 0; row < shape[0]; ++row) {
      dali_tf_input::DrawUniforms(*call.Data<int64_t>(1), call.Data<int64_t>(0)[row], count, out + count * row);
    }
  });
}

// Its inputs: those of `ReadFiles`, and the positions of the records to read, int64 (k,). Its output: string (k,).
void ComputeRead(void* kernel, TF_OpKernelContext* context) {
  constexpr int64_t kAtOnce = 32;  // announced to the system together
  Call call(context, 5);
  call.Run([&] {
    Records records;
    if (!ReadFiles(call, &records)) return TF_SetStatus(call.status, kInvalidArgument, kFilesNeeded);
    const int64_t count = call.Count(4);
    auto* out = static_cast<char*>(call.Allocate(0, kString, &count, 1, records.name_size * static_cast<size_t>(count)));
    if (!out) return;
    std::vector<uint8_t> bytes;
    size_t size = 0;
    const auto to = [&](int64_t, size_t wanted) {
      size = wanted;
      if (bytes.size() < size) bytes.resize(size);
      return bytes.data();
    };
    for (int64_t start = 0, place = 0; start < count; start += kAtOnce) {
      const auto done = [&](int64_t at) {
        TF_StringCopy(reinterpret_cast<TF_TString*>(out + records.name_size * static_cast<size_t>(start + at)),
                      reinterpret_cast<const char*>(bytes.data()) + dali_tf_input::kHeader, size - dali_tf_input::kAround);
      };
      const bool check_crc = *static_cast<bool*>(kernel);
      records.Announce(call.Data<int64_t>(4) + start, std::min(kAtOnce, count - start));
      const Problem problem = records.Read(call.Data<int64_t>(4) + start, std::min(kAtOnce, count - start), check_crc, &place, to, done);
      if (!problem.text.empty()) return call.Fail(problem);
    }
  });
}

// The kernel is a pointer to a bool: whether to check CRCs.
void* CreateRead(TF_OpKernelConstruction* context) {
  unsigned char check_crc = 1;
  TF_Status* status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrBool(context, "check_crc", &check_crc, status);
  if (TF_GetCode(status)) TF_OpKernelConstruction_Failure(context, status);
  TF_DeleteStatus(status);
  dali_tf_input::OpenFiles().AddReader();
  static bool kernels[] = {false, true};
  return &kernels[check_crc != 0];
}

void DeleteRead(void*) { dali_tf_input::OpenFiles().RemoveReader(); }

void SetUnknownShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

// Lists images of a shard. Its inputs: the plan's numbers, its groups and nodes, see plan.h, int64; and an epoch, the
// first image and how many, int64 each. Its outputs: the keys of the images and the positions of their records, int64 (k,);
// fewer at the end of the epoch.
void ComputeList(void*, TF_OpKernelContext* context) {
  Call call(context, 6);
  call.Run([&] {
    const auto fail = [&](const char* text) { TF_SetStatus(call.status, kInvalidArgument, text); };
    dali_tf_input::Plan plan;
    if (call.Count(0) != plan.kNumbers || call.Count(3) != 1 || call.Count(4) != 1 || call.Count(5) != 1) {
      return fail("a plan, an epoch, an image and a count are needed");
    }
    const auto* numbers = call.Data<int64_t>(0);
    plan = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4],  numbers[5],        numbers[6],       numbers[7],
            numbers[8], numbers[9], numbers[10], call.Data<int64_t>(1), call.Data<int64_t>(2), call.Count(1) / 2, call.Count(2) / 4, {}, {}};
    const int64_t epoch = *call.Data<int64_t>(3), first = *call.Data<int64_t>(4);
    if (!plan.Complete() || epoch < 0 || epoch >= int64_t{1} << 22 || first < 0) return fail("these are not the numbers of a plan");
    const int64_t count = std::max<int64_t>(0, std::min(*call.Data<int64_t>(5), plan.num_images - first));
    const size_t bytes = static_cast<size_t>(count) * sizeof(int64_t);
    auto* keys = static_cast<int64_t*>(call.Allocate(0, kInt64, &count, 1, bytes));
    auto* records = call.ok() ? static_cast<int64_t*>(call.Allocate(1, kInt64, &count, 1, bytes)) : nullptr;
    for (int64_t place = 0; place < count && records; ++place) {
      const int64_t slot = plan.Slot(first + place);
      keys[place] = epoch * dali_tf_input::kStride + slot, records[place] = plan.Record(epoch, slot);
    }
  });
}

// Checks that files have the sizes and times that they had when they were indexed. Its inputs: their names, string (f,),
// and versions, int64 (f, 2). Its output: how many there are, int64.
void ComputeCheck(void*, TF_OpKernelContext* context) {
  Call call(context, 2);
  call.Run([&] {
    const int64_t count = call.Count(0);
    if (call.Count(1) != 2 * count) return TF_SetStatus(call.status, kInvalidArgument, "a version for each file is needed");
    const size_t string_size = count ? TF_TensorByteSize(call.inputs[0]) / static_cast<size_t>(count) : 0;
    for (int64_t number = 0; number < count; ++number) {
      const auto* name = reinterpret_cast<const TF_TString*>(call.Data<char>(0) + string_size * static_cast<size_t>(number));
      const int64_t* version = call.Data<int64_t>(1) + 2 * number;
      const Problem problem = dali_tf_input::CheckVersion({TF_StringGetDataPointer(name), TF_StringGetSize(name)}, version[0], version[1]);
      if (!problem.text.empty()) return call.Fail(problem);
    }
    if (void* out = call.Allocate(0, kInt64, nullptr, 0, sizeof count)) std::memcpy(out, &count, sizeof count);
  });
}

// Of an operation that is stateful TensorFlow must not compute the result once and keep it: it depends on files.
void Register(const char* name, std::initializer_list<const char*> inputs, std::initializer_list<const char*> outputs,
              std::initializer_list<const char*> attributes, TF_KernelBuilder* kernel, bool is_stateful = false) {
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(name);
  for (const char* input : inputs) TF_OpDefinitionBuilderAddInput(builder, input);
  for (const char* output : outputs) TF_OpDefinitionBuilderAddOutput(builder, output);
  for (const char* attribute : attributes) TF_OpDefinitionBuilderAddAttr(builder, attribute);
  TF_OpDefinitionBuilderSetIsStateful(builder, is_stateful);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, SetUnknownShape);
  TF_Status* status = TF_NewStatus();
  TF_RegisterOpDefinition(builder, status);
  if (!TF_GetCode(status)) TF_RegisterKernelBuilder(name, kernel, status);
  TF_DeleteStatus(status);
}

// A kernel without a state.
TF_KernelBuilder* Stateless(const char* name, void (*compute)(void*, TF_OpKernelContext*)) {
  return TF_NewKernelBuilder(name, "CPU", [](TF_OpKernelConstruction*) -> void* { return nullptr; }, compute, [](void*) {});
}

const char* missing_function = nullptr;

// Registers the operations when the library is loaded, if TensorFlow has all functions that they need.
__attribute__((constructor)) void RegisterAll() {
  missing_function = LookUp();
  if (missing_function) return;
  const auto image = {"height: int", "width: int", "kernel: int", "antialias: bool", "clip: bool", "chw: bool",
                      "mean: list(float)", "scale: list(float)", "T: {float, half, bfloat16, uint8}"};
  Register("DaliTfInputBatch",
           {"names: string", "versions: int64", "file_of: int32", "extents: int64", "positions: int64", "records: string",
            "uniforms: float", "rows: float", "drawn: float", "parameters: double"},
           {"images: T", "rests: string", "sizes: int64", "places: int64", "refused: string"},
           {"T: list({float, half, bfloat16, uint8}) >= 1", "image_keys: list(string)", "size_keys: list(string)", "check_crc: bool", "num_readers: int", "num_threads: int"},
           TF_NewKernelBuilder("DaliTfInputBatch", "CPU", CreateBatch<true>, ComputeBatch, DeleteBatch));
  Register("DaliTfInputPack",
           {"names: string", "versions: int64", "file_of: int32", "extents: int64", "positions: int64", "records: string",
            "images: string", "settings: int64"},
           {"packed: uint8", "rests: string", "num_refused: int64", "returned: string"},
           {"image_keys: list(string)", "size_keys: list(string)", "check_crc: bool", "num_readers: int", "num_threads: int"},
           TF_NewKernelBuilder("DaliTfInputPack", "CPU", CreateBatch<false>, ComputePack, DeleteBatch));
  Register("DaliTfInputFill", {"packed: uint8", "values: uint8"}, {"filled: uint8"}, {}, Stateless("DaliTfInputFill", ComputeFill));
  Register("DaliTfInputInspect", {"image: string", "size: int32", "uniforms: float", "parameters: double"}, {"plan: int32"}, {},
           Stateless("DaliTfInputInspect", ComputeInspect));
  Register("DaliTfInputFinish", {"image: uint8", "plan: int32", "uniforms: float", "rows: float", "parameters: double"},
           {"views: T", "size: int64"}, {"T: list({float, half, bfloat16, uint8}) >= 1"},
           TF_NewKernelBuilder("DaliTfInputFinish", "CPU", CreateFinish, ComputeFinish, Delete<std::vector<int>>));
  Register("DaliTfInputPlace", {"images: T", "made: T", "places: int64", "drawn: float"}, {"placed: T"}, image,
           TF_NewKernelBuilder("DaliTfInputPlace", "CPU", Create<Work>, ComputePlace, Delete<Work>));
  Register("DaliTfInputUniforms", {"keys: int64", "seed: int64", "count: int64"}, {"uniforms: float"}, {},
           Stateless("DaliTfInputUniforms", ComputeUniforms));
  Register("DaliTfInputList",
           {"plan: int64", "groups: int64", "nodes: int64", "epoch: int64", "first: int64", "count: int64"},
           {"keys: int64", "positions: int64"}, {}, Stateless("DaliTfInputList", ComputeList));
  Register("DaliTfInputCheck", {"names: string", "versions: int64"}, {"count: int64"}, {}, Stateless("DaliTfInputCheck", ComputeCheck), true);
  Register("DaliTfInputRead",
           {"names: string", "versions: int64", "file_of: int32", "extents: int64", "positions: int64"}, {"records: string"},
           {"check_crc: bool"}, TF_NewKernelBuilder("DaliTfInputRead", "CPU", CreateRead, ComputeRead, DeleteRead));
  Register("DaliTfInputAugment", {"image: uint8", "rows: float", "mirror: bool"}, {"augmented: T"}, image,
           TF_NewKernelBuilder("DaliTfInputAugment", "CPU", Create<Work>, ComputeAugment, Delete<Work>));
}

}  // namespace

// The name of a function that this TensorFlow lacks, or a null pointer.
extern "C" __attribute__((visibility("default"))) const char* DaliTfInputMissingFunction() { return missing_function; }
