// Runs the operations of op.cc on a stand-in for TensorFlow's C API that counts what is not freed.
//
//   exit FILE      the process exits while threads read, and deletes the kernel last
//   memory FILE EXAMPLE    `operator new` fails at the first, second, ... call of each operation
//   threads EXAMPLE             several calls make and pack batches at once
//   examples EXAMPLE ROUNDS     batches of Examples with changed bytes
#include "op.cc"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <thread>

static std::atomic<long> alive{0}, until_failure{-1};

void* operator new(size_t size) {
  if (until_failure.load() >= 0 && until_failure.fetch_sub(1) == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t size, std::align_val_t alignment) {
  if (until_failure.load() >= 0 && until_failure.fetch_sub(1) == 0) throw std::bad_alloc();
  const size_t multiple = static_cast<size_t>(alignment);
  if (void* memory = std::aligned_alloc(multiple, (size + multiple - 1) / multiple * multiple)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

struct TF_Status {
  int code = 0;
  char text[512] = "";
};
struct TF_TString {
  char* data;
  size_t size;
};
struct TF_Tensor {
  int64_t dims[4];
  int count;
  size_t bytes;
  void* data;
  bool is_string;
  void (*free)(void*, size_t, void*);
};
struct TF_OpKernelContext {
  TF_Tensor inputs[10];
  TF_Status failure;
};

static TF_Status* NewStatus() { return ++alive, new (std::malloc(sizeof(TF_Status))) TF_Status; }
static void DeleteStatus(TF_Status* status) { --alive, std::free(status); }
static void SetStatus(TF_Status* status, int code, const char* text) {
  status->code = code;
  std::snprintf(status->text, sizeof status->text, "%s", text);
}
static int GetCode(const TF_Status* status) { return status->code; }
static TF_Tensor* NewTensor(const TF_Tensor& value) {
  return ++alive, new (std::malloc(sizeof(TF_Tensor))) TF_Tensor(value);
}
static void GetInput(TF_OpKernelContext* context, int number, TF_Tensor** tensor, TF_Status*) {
  *tensor = NewTensor(context->inputs[number]);
  (*tensor)->is_string = false;  // the context owns what it holds
  (*tensor)->data = context->inputs[number].data;
  (*tensor)->bytes = context->inputs[number].bytes;
}
static TF_Tensor* AllocateOutput(TF_OpKernelContext*, int, int type, const int64_t* shape, int dims, size_t bytes, TF_Status*) {
  TF_Tensor tensor{{dims ? shape[0] : 1}, 1, bytes, std::calloc(1, bytes), type == kString};
  ++alive;
  return NewTensor(tensor);
}
static TF_Tensor* ForwardOrAllocate(TF_OpKernelContext* context, const int*, int, int number, const int64_t* shape, int dims,
                                    int* forwarded, TF_Status* status) {
  size_t bytes = sizeof(float);
  for (int dim = 0; dim < dims; ++dim) bytes *= static_cast<size_t>(shape[dim]);
  *forwarded = -1;
  return AllocateOutput(context, number, 1, shape, dims, bytes, status);
}
static TF_Tensor* NewOwned(int, const int64_t* shape, int dims, void* data, size_t bytes, void (*free)(void*, size_t, void*), void*) {
  TF_Tensor tensor{{dims ? shape[0] : 1}, 1, bytes, data, false, free};
  return NewTensor(tensor);
}
static bool IsOutput(const TF_Tensor* tensor, const TF_OpKernelContext* context) {
  for (const TF_Tensor& input : context->inputs) {
    if (input.data == tensor->data) return false;
  }
  return true;
}
static thread_local TF_OpKernelContext* current;
static void DeleteTensor(TF_Tensor* tensor) {
  if (tensor->free) {
    tensor->free(tensor->data, tensor->bytes, nullptr);
  } else if (IsOutput(tensor, current)) {
    auto* strings = static_cast<TF_TString*>(tensor->data);
    for (size_t place = 0; tensor->is_string && place < tensor->bytes / sizeof(TF_TString); ++place) {
      std::free(strings[place].data);
    }
    std::free(tensor->data), --alive;
  }
  --alive, std::free(tensor);
}
static void Failure(TF_OpKernelContext* context, TF_Status* status) { context->failure = *status; }
static void StringCopy(TF_TString* string, const char* from, size_t size) {
  string->data = static_cast<char*>(std::malloc(size ? size : 1)), string->size = size;
  if (size) std::memcpy(string->data, from, size);  // an empty record may lie nowhere
}

static void Install() {
  TF_NewStatus = NewStatus, TF_DeleteStatus = DeleteStatus, TF_SetStatus = SetStatus, TF_GetCode = GetCode;
  TF_GetInput = GetInput, TF_AllocateOutput = AllocateOutput, TF_DeleteTensor = DeleteTensor;
  TF_ForwardInputOrAllocateOutput = ForwardOrAllocate;
  TF_NewTensor = NewOwned, TF_SetOutput = [](TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*) {};
  TF_OpKernelContext_Failure = Failure, TF_StringCopy = StringCopy;
  TF_StringGetDataPointer = [](const TF_TString* string) -> const char* { return string->data; };
  TF_StringGetSize = [](const TF_TString* string) { return string->size; };
  TF_TensorByteSize = [](const TF_Tensor* tensor) { return tensor->bytes; };
  TF_TensorData = [](const TF_Tensor* tensor) { return tensor->data; };
  TF_NumDims = [](const TF_Tensor* tensor) { return tensor->count; };
  TF_Dim = [](const TF_Tensor* tensor, int dim) { return tensor->dims[dim]; };
  TF_OpKernelConstruction_GetAttrBool = [](TF_OpKernelConstruction*, const char*, unsigned char* value, TF_Status*) {
    *value = 0;  // CRCs are not checked
  };
  TF_TensorElementCount = [](const TF_Tensor* tensor) {
    int64_t count = 1;
    for (int dim = 0; dim < tensor->count; ++dim) count *= tensor->dims[dim];
    return count;
  };
}

// A file of one record of `size` bytes, and what a reader of it gets.
struct ReadCall {
  TF_TString name;
  int64_t state[2] = {-1, -1}, extent[2], number = 0;
  int32_t file = 0;
  TF_OpKernelContext context;

  ReadCall(char* path, int64_t size) : name{path, std::strlen(path)}, extent{0, size} {
    context.inputs[0] = {{1}, 1, sizeof name, &name, true};
    context.inputs[1] = {{1, 2}, 2, sizeof state, state, false};
    context.inputs[2] = {{1}, 1, sizeof file, &file, false};
    context.inputs[3] = {{1, 2}, 2, sizeof extent, extent, false};
    context.inputs[4] = {{1}, 1, sizeof number, &number, false};
  }
  void Run(void* kernel) {
    current = &context;
    ComputeRead(kernel, &context);
  }
};

// A batch of four copies of one record, and its kernel.
struct BatchCall {
  BatchKernel kernel;
  std::vector<char> bytes;
  TF_TString records[4];
  float uniforms[4 * 3] = {}, rows[4 * dali_tf_input::kRowSize] = {}, drawn[6] = {0.5f, 1, 1, 4, 4, 0};
  double parameters[3 + 16 + 1] = {1, 1e9, 1, 8, 8, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 3, 1, 0, 0};
  TF_OpKernelContext context;

  explicit BatchCall(const char* example) {
    kernel.keys.images = {"image"}, kernel.types = {kTypes[0]}, kernel.num_threads = 2;
    std::ifstream stream(example, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
    for (TF_TString& record : records) record = {bytes.data(), bytes.size()};
    for (int row = 0; row < 4; ++row) rows[dali_tf_input::kRowSize * row] = dali_tf_input::kEqualize;
    for (int number = 0; number < 5; ++number) context.inputs[number] = {{0}, 1, 0, nullptr, number == 0};
    context.inputs[5] = {{4}, 1, sizeof records, records, true};
    context.inputs[6] = {{4, 3}, 2, sizeof uniforms, uniforms, false};
    context.inputs[7] = {{4, 1, dali_tf_input::kRowSize}, 3, sizeof rows, rows, false};
    context.inputs[8] = {{6}, 1, sizeof drawn, drawn, false};
    context.inputs[9] = {{20}, 1, sizeof parameters, parameters, false};
    context.failure = {};
  }
};

// The same records, to be packed.
struct PackCall : BatchCall {
  int64_t settings[3] = {20, 0, 1};

  explicit PackCall(const char* example) : BatchCall(example) {
    context.inputs[6] = {{0}, 1, 0, nullptr, true};
    context.inputs[7] = {{3}, 1, sizeof settings, settings, false};
  }
};

// Makes and packs batches of Examples in which bytes are changed, or that are cut; each in memory of its very size.
static int ChangeExamples(const char* example, int rounds) {
  BatchCall made(example);
  PackCall packed(example);
  std::mt19937_64 random(1);
  int done = 0, refused = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<char>> changed(4, made.bytes);
    for (int number = 0; number < 4; ++number) {
      std::vector<char>& bytes = changed[static_cast<size_t>(number)];
      for (size_t count = 1 + random() % 3; count; --count) {
        const size_t near = random() % 2 ? random() % 60 : bytes.size() - 1 - random() % 60;  // mostly not in the image
        bytes[random() % 4 ? near : random() % bytes.size()] = static_cast<char>(random());
      }
      if (random() % 10 == 0) bytes.resize(random() % bytes.size());
      bytes.shrink_to_fit();
      made.records[number] = packed.records[number] = {bytes.data(), bytes.size()};
    }
    BatchCall* calls[] = {&made, &packed};
    void (*const computes[])(void*, TF_OpKernelContext*) = {ComputeBatch, ComputePack};
    for (int which = 0; which < 2; ++which) {
      current = &calls[which]->context, current->failure = {};
      computes[which](&calls[which]->kernel, current);
      const int code = current->failure.code;
      if (code && code != dali_tf_input::kDataLoss) return std::printf("%s\n", current->failure.text), 1;
      ++(code ? refused : done);
    }
  }
  std::printf("%d done, %d refused, %ld left\n", done, refused, alive.load());
  return 0;
}

static int MakeBatchesAtOnce(const char* example) {
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      BatchCall call(example);
      current = &call.context;
      for (int round = 0; round < 50; ++round) ComputeBatch(&call.kernel, &call.context);
      failed += call.context.failure.code != 0;
      PackCall packed(example);
      current = &packed.context;
      for (int round = 0; round < 50; ++round) ComputePack(&packed.kernel, &packed.context);
      failed += packed.context.failure.code != 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d failed, %ld left\n", failed.load(), alive.load());
  return 0;
}

static void* reader;

static void Wait() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }

static int ExitWhileReading(char* path, int64_t size) {
  for (int number = 0; number < 4; ++number) {
    std::thread([=] {
      ReadCall call(path, size);
      while (true) call.Run(reader);
    }).detach();
  }
  Wait();
  return 0;
}

static int FailAtEachAllocation(char* path, int64_t size, const char* example) {
  ReadCall read(path, size);
  Work work;
  work.height = work.width = 8, work.kernel = dali_tf_input::Kernel(1);
  std::vector<uint8_t> pixels(3 * 9 * 9);
  bool mirror = false;
  BatchCall made(example);
  PackCall packed(example);
  const size_t start = std::string(made.bytes.begin(), made.bytes.end()).find("\xFF\xD8\xFF");
  TF_TString image = {made.bytes.data() + start, made.bytes.size() - start};
  int32_t sides[2] = {40, 60}, plan[8] = {4, 1};
  TF_OpKernelContext inspect;
  inspect.inputs[0] = {{1}, 1, sizeof image, &image, true};
  inspect.inputs[1] = {{2}, 1, sizeof sides, sides, false};
  inspect.inputs[2] = {{3}, 1, sizeof made.uniforms / 4, made.uniforms, false};
  inspect.inputs[3] = made.context.inputs[9];
  TF_OpKernelContext finish;
  finish.inputs[0] = {{9, 9, 3}, 3, pixels.size(), pixels.data(), false};
  finish.inputs[1] = {{8}, 1, sizeof plan, plan, false};
  finish.inputs[2] = inspect.inputs[2];
  finish.inputs[3] = {{1, dali_tf_input::kRowSize}, 2, sizeof made.rows / 4, made.rows, false};
  finish.inputs[4] = made.context.inputs[9];
  std::vector<float> rows(dali_tf_input::kNumPrimitives * dali_tf_input::kRowSize);
  for (int primitive = 0; primitive < dali_tf_input::kNumPrimitives; ++primitive) {
    rows[static_cast<size_t>(primitive * dali_tf_input::kRowSize)] = static_cast<float>(primitive);
    rows[static_cast<size_t>(primitive * dali_tf_input::kRowSize + 1)] = 1;
  }
  TF_OpKernelContext augment;
  augment.inputs[0] = {{8, 8, 3}, 3, 3 * 8 * 8, pixels.data(), false};
  augment.inputs[1] = {{dali_tf_input::kNumPrimitives, dali_tf_input::kRowSize}, 2, rows.size() * 4, rows.data(), false};
  augment.inputs[2] = {{1}, 1, sizeof mirror, &mirror, false};
  std::vector<float> batch(2 * 3 * 8 * 8);
  float drawn[6] = {0.5f, 1, 1, 4, 4, 0};
  int64_t place_of = 1;
  TF_OpKernelContext place;
  place.inputs[0] = {{2, 8, 8, 3}, 4, batch.size() * 4, batch.data(), false};
  place.inputs[1] = {{1, 8, 8, 3}, 4, batch.size() * 2, batch.data(), false};
  place.inputs[2] = {{1}, 1, sizeof place_of, &place_of, false};
  place.inputs[3] = {{6}, 1, sizeof drawn, drawn, false};
  constexpr int kCalls = 7;
  TF_OpKernelContext* contexts[kCalls] = {&read.context, &inspect, &finish, &augment, &place, &made.context, &packed.context};
  void (*const computes[kCalls])(void*, TF_OpKernelContext*) = {ComputeRead,  ComputeInspect, ComputeFinish, ComputeAugment,
                                                                ComputePlace, ComputeBatch,   ComputePack};
  int failures[kCalls] = {};
  for (int which = 0; which < kCalls; ++which) {
    for (long at = 0;; ++at) {
      const long before = alive;
      DeleteRead(reader), reader = CreateRead(nullptr);  // closes all files
      current = contexts[which], current->failure = {};
      until_failure = at;
      // Kernels of a `Work` and of more than that begin with it.
      void* kernels[kCalls] = {reader, nullptr, &made.kernel.types, &work, &work, &made.kernel, &packed.kernel};
      computes[which](kernels[which], current);
      const bool has_failed = until_failure.exchange(-1) < 0;
      if (alive != before) return std::printf("%ld left at %ld\n", alive - before, at), 1;
      if (!has_failed) {
        if (current->failure.code) return std::printf("%s\n", current->failure.text), 1;
        break;
      }
      if (current->failure.code != 8) return std::printf("code %d at %ld\n", current->failure.code, at), 1;
      ++failures[which];
    }
  }
  for (int count : failures) std::printf("%d ", count);
  return 0;
}

int main(int, char** arguments) {
  Install();
  if (std::string(arguments[1]) == "threads") return MakeBatchesAtOnce(arguments[2]);
  if (std::string(arguments[1]) == "examples") return ChangeExamples(arguments[2], std::atoi(arguments[3]));
  std::atexit([] { Wait(), DeleteRead(reader); });  // after the destructors of what `CreateRead` made
  reader = CreateRead(nullptr);
  struct stat status;
  if (stat(arguments[2], &status) != 0) return 2;
  const bool exits = std::string(arguments[1]) == "exit";
  return exits ? ExitWhileReading(arguments[2], status.st_size) : FailAtEachAllocation(arguments[2], status.st_size, arguments[3]);
}
