// TensorFlow's operations DaliTfInputRead: a record of a file whose extent is known (read.h), and DaliTfInputPrepare: a
// decoded image and a region of it to what the model sees (resample.h).
#include "api.h"
#include "read.h"
#include "resample.h"

#include <vector>

namespace {

using dali_tf_input::Image;
using dali_tf_input::Work;

constexpr int kTypes[] = {1, 19, 14, 4};  // TF_DataType by `Output`: TF_FLOAT, TF_HALF, TF_BFLOAT16, TF_UINT8
constexpr int kSizes[] = {4, 2, 2, 1};    // bytes
constexpr int kString = 7;                // TF_STRING
constexpr int kInvalidArgument = 3, kDataLoss = 15;  // TF_Code

void GetInputs(TF_OpKernelContext* context, TF_Tensor** inputs, int count, TF_Status* status) {
  for (int number = 0; number < count && !TF_GetCode(status); ++number) {
    TF_GetInput(context, number, &inputs[number], status);
  }
}

void Finish(TF_OpKernelContext* context, TF_Tensor** inputs, int count, TF_Status* status) {
  if (TF_GetCode(status)) TF_OpKernelContext_Failure(context, status);
  for (int number = 0; number < count; ++number) {
    if (inputs[number]) TF_DeleteTensor(inputs[number]);
  }
  TF_DeleteStatus(status);
}

void* CreatePrepare(TF_OpKernelConstruction* context) {
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
  if (!TF_GetCode(status) && (height < 1 || width < 1 || height > 65535 || width > 65535 || kernel < 0 || kernel > 3)) {
    TF_SetStatus(status, kInvalidArgument, "height and width must be in [1, 65535], kernel in [0, 3]");
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

void DeletePrepare(void* work) { delete static_cast<Work*>(work); }

// Its inputs: image, region (start, then extent, each y, x), whether it is mirrored.
void ComputePrepare(void* kernel, TF_OpKernelContext* context) {
  const Work& work = *static_cast<Work*>(kernel);
  TF_Status* status = TF_NewStatus();
  TF_Tensor* inputs[3] = {};
  GetInputs(context, inputs, 3, status);
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
  Finish(context, inputs, 3, status);
}

dali_tf_input::Files& OpenFiles() {
  static dali_tf_input::Files files;
  return files;
}

// The kernel is whether CRCs are checked.
void* CreateRead(TF_OpKernelConstruction* context) {
  unsigned char check_crc = 1;
  TF_Status* status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrBool(context, "check_crc", &check_crc, status);
  if (TF_GetCode(status)) TF_OpKernelConstruction_Failure(context, status);
  TF_DeleteStatus(status);
  OpenFiles().AddReader();
  return new bool(check_crc);
}

void DeleteRead(void* kernel) {
  OpenFiles().RemoveReader();
  delete static_cast<bool*>(kernel);
}

// The records of some files, and the reader of them. What is wrong is said in the words of `reading.check_states` and
// `index.tfrecord`.
struct Records {
  const char* names;  // TF_TString each
  size_t name_size;
  const int64_t* states;
  int64_t num_files;
  const int32_t* file_of;
  const int64_t* extents;
  int64_t num_records;

  // Returns "" or what is wrong; sets where a record is.
  std::string Find(int64_t number, std::string* name, std::shared_ptr<dali_tf_input::File>* file) const {
    const int64_t of = number >= 0 && number < num_records ? file_of[number] : -1;
    if (of < 0 || of >= num_files || extents[2 * number] < 0 || extents[2 * number + 1] < dali_tf_input::kAround) {
      return "no such record: " + std::to_string(number);
    }
    const auto* given = reinterpret_cast<const TF_TString*>(names + name_size * static_cast<size_t>(of));
    name->assign(TF_StringGetDataPointer(given), TF_StringGetSize(given));
    const int64_t size = states[2 * of], mtime = states[2 * of + 1];
    *file = OpenFiles().Open(*name, size, mtime);
    if (!*file) return *name + " cannot be read: " + std::strerror(errno) + ": index it again.";
    if (size < 0 || ((*file)->size == size && (*file)->mtime == mtime)) return "";
    return *name + " changed since it was indexed (then " + std::to_string(size) + " bytes, now " +
           std::to_string((*file)->size) + "): index it again.";
  }

  std::string Read(const int64_t* numbers, int64_t count, bool check_crc, char* records) const {
    static const dali_tf_input::Crc crc;
    std::string name;
    std::shared_ptr<dali_tf_input::File> file;
    std::vector<uint8_t> bytes;
    for (const bool ahead : {true, false}) {
      for (int64_t place = 0; place < count; ++place) {
        std::string wrong = Find(numbers[place], &name, &file);
        if (!wrong.empty()) return wrong;
        const int64_t offset = extents[2 * numbers[place]], size = extents[2 * numbers[place] + 1];
        if (!dali_tf_input::Holds(*file, offset, size)) {
          return name + ": truncated record at byte " + std::to_string(offset) + ". Index the file again.";
        }
        if (ahead) {
          posix_fadvise(file->descriptor, offset, size, POSIX_FADV_WILLNEED);
          continue;
        }
        if (bytes.size() < static_cast<size_t>(size)) bytes.resize(static_cast<size_t>(size));
        wrong = dali_tf_input::ReadRecord(*file, name, offset, size, check_crc ? &crc : nullptr, bytes.data());
        if (!wrong.empty()) return wrong;
        TF_StringCopy(reinterpret_cast<TF_TString*>(records + name_size * static_cast<size_t>(place)),
                      reinterpret_cast<const char*>(bytes.data()) + dali_tf_input::kHeader,
                      static_cast<size_t>(size - dali_tf_input::kAround));
      }
    }
    return "";
  }
};

// Its inputs: the names of the files, string (f,); their sizes in bytes and times of modification in ns, -1 if unknown,
// int64 (f, 2); the file of each record, int32 (n,); offset and size of each in bytes, int64 (n, 2); the numbers of the
// records to read, int64 (k,).
void ComputeRead(void* kernel, TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  TF_Tensor* inputs[5] = {};
  GetInputs(context, inputs, 5, status);
  if (!TF_GetCode(status)) {
    Records held;
    held.num_files = TF_TensorElementCount(inputs[0]), held.num_records = TF_TensorElementCount(inputs[2]);
    const int64_t count = TF_TensorElementCount(inputs[4]);
    if (held.num_files < 1 || TF_TensorElementCount(inputs[1]) != 2 * held.num_files ||
        TF_TensorElementCount(inputs[3]) != 2 * held.num_records) {
      TF_SetStatus(status, kInvalidArgument, "a state for each file and an extent for each record are needed");
    } else {
      held.names = static_cast<const char*>(TF_TensorData(inputs[0]));
      held.name_size = TF_TensorByteSize(inputs[0]) / static_cast<size_t>(held.num_files);
      held.states = static_cast<const int64_t*>(TF_TensorData(inputs[1]));
      held.file_of = static_cast<const int32_t*>(TF_TensorData(inputs[2]));
      held.extents = static_cast<const int64_t*>(TF_TensorData(inputs[3]));
      const size_t bytes = held.name_size * static_cast<size_t>(count);
      TF_Tensor* out = TF_AllocateOutput(context, 0, kString, &count, 1, bytes, status);
      if (!TF_GetCode(status)) {
        const auto* numbers = static_cast<const int64_t*>(TF_TensorData(inputs[4]));
        const bool check_crc = *static_cast<bool*>(kernel);
        const std::string wrong = held.Read(numbers, count, check_crc, static_cast<char*>(TF_TensorData(out)));
        if (!wrong.empty()) TF_SetStatus(status, kDataLoss, wrong.c_str());
      }
      if (out) TF_DeleteTensor(out);
    }
  }
  Finish(context, inputs, 5, status);
}

void SetUnknownShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

void Register(const char* name, std::initializer_list<const char*> inputs, const char* output,
              std::initializer_list<const char*> attributes, TF_KernelBuilder* kernel) {
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(name);
  for (const char* input : inputs) TF_OpDefinitionBuilderAddInput(builder, input);
  TF_OpDefinitionBuilderAddOutput(builder, output);
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
  Register("DaliTfInputRead",
           {"names: string", "states: int64", "file_of: int32", "extents: int64", "numbers: int64"}, "records: string",
           {"check_crc: bool"}, TF_NewKernelBuilder("DaliTfInputRead", "CPU", CreateRead, ComputeRead, DeleteRead));
  Register("DaliTfInputPrepare", {"image: uint8", "region: double", "mirror: bool"}, "prepared: T",
           {"height: int", "width: int", "kernel: int", "antialias: bool", "clip: bool", "chw: bool", "mean: list(float)",
            "scale: list(float)", "T: {float, half, bfloat16, uint8}"},
           TF_NewKernelBuilder("DaliTfInputPrepare", "CPU", CreatePrepare, ComputePrepare, DeletePrepare));
}

}  // namespace
