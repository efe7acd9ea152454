// Reads one record of a TFRecord file, whose extent is known, and checks it.
//
// A record is: uint64 length, uint32 masked CRC-32C of the length, data, uint32 masked CRC-32C of the data; all
// little-endian. Source: tensorflow/core/lib/io/record_writer.h.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace dali_tf_input {

constexpr int64_t kHeader = 12, kFooter = 4, kAround = kHeader + kFooter;  // bytes around the data

// CRC-32C (Castagnoli), by tables or by the processor's instruction. The instruction has a latency of three cycles, so
// three parts of a block are taken at once and their results combined: shifting a CRC over zeros is linear.
class Crc {
 public:
  Crc() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
      tables_[0][byte] = crc;
    }
    for (int table = 1; table < 8; ++table) {
      for (int byte = 0; byte < 256; ++byte) {
        const uint32_t before = tables_[table - 1][byte];
        tables_[table][byte] = before >> 8 ^ tables_[0][before & 255];
      }
    }
    const std::array<uint8_t, kPart> zeros{};
    for (int place = 0; place < 4; ++place) {
      for (uint32_t byte = 0; byte < 256; ++byte) shifts_[place][byte] = ByTables(byte << 8 * place, zeros.data(), kPart);
    }
#if defined(__x86_64__)
    by_instruction_ = __builtin_cpu_supports("sse4.2");
#endif
  }

  uint32_t operator()(const uint8_t* data, size_t size) const {
#if defined(__x86_64__)
    if (by_instruction_) return ~ByInstruction(~0u, data, size);
#endif
    return ~ByTables(~0u, data, size);
  }

  uint32_t ByTables(uint32_t crc, const uint8_t* data, size_t size) const {
    for (; size >= 8; data += 8, size -= 8) {
      uint32_t low, high;
      std::memcpy(&low, data, 4), std::memcpy(&high, data + 4, 4);
      low ^= crc;
      crc = tables_[7][low & 255] ^ tables_[6][low >> 8 & 255] ^ tables_[5][low >> 16 & 255] ^ tables_[4][low >> 24] ^
            tables_[3][high & 255] ^ tables_[2][high >> 8 & 255] ^ tables_[1][high >> 16 & 255] ^ tables_[0][high >> 24];
    }
    for (; size; ++data, --size) crc = crc >> 8 ^ tables_[0][(crc ^ *data) & 255];
    return crc;
  }

 private:
  static constexpr size_t kPart = 1024;  // bytes, a multiple of 8

#if defined(__x86_64__)
  __attribute__((target("sse4.2"))) uint32_t ByInstruction(uint32_t crc, const uint8_t* data, size_t size) const {
    const auto word = [](const uint8_t* from) {
      uint64_t value;
      std::memcpy(&value, from, 8);
      return value;
    };
    for (; size >= 3 * kPart; data += 3 * kPart, size -= 3 * kPart) {
      uint64_t parts[3] = {crc, 0, 0};
      for (size_t at = 0; at < kPart; at += 8) {
        parts[0] = _mm_crc32_u64(parts[0], word(data + at));
        parts[1] = _mm_crc32_u64(parts[1], word(data + kPart + at));
        parts[2] = _mm_crc32_u64(parts[2], word(data + 2 * kPart + at));
      }
      crc = Shift(Shift(static_cast<uint32_t>(parts[0])) ^ static_cast<uint32_t>(parts[1])) ^ static_cast<uint32_t>(parts[2]);
    }
    for (; size >= 8; data += 8, size -= 8) crc = static_cast<uint32_t>(_mm_crc32_u64(crc, word(data)));
    for (; size; ++data, --size) crc = _mm_crc32_u8(crc, *data);
    return crc;
  }
#endif

  uint32_t Shift(uint32_t crc) const {
    return shifts_[0][crc & 255] ^ shifts_[1][crc >> 8 & 255] ^ shifts_[2][crc >> 16 & 255] ^ shifts_[3][crc >> 24];
  }

  uint32_t tables_[8][256], shifts_[4][256];
  bool by_instruction_ = false;
};

inline uint32_t Masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xA282EAD8u; }

// What is wrong, and the TF_Code that says so; nothing if the text is empty.
struct Problem {
  int code = 0;
  std::string text;
};

// Values of TF_Code.
constexpr int kInvalidArgument = 3, kNotFound = 5, kPermissionDenied = 7, kResourceExhausted = 8, kFailedPrecondition = 9,
              kUnavailable = 14, kDataLoss = 15;

// Returns what a system call reported about a file. Only a file that is gone or replaced needs another index.
inline Problem SystemProblem(const std::string& name, int error) {
  const std::string text = name + " cannot be read: " + std::strerror(error);
  switch (error) {
    case EMFILE:
    case ENFILE:
      return {kResourceExhausted, text + ": raise the limit of open files (ulimit -n)."};
    case ENOMEM:
      return {kResourceExhausted, text + "."};
    case EACCES:
    case EPERM:
      return {kPermissionDenied, text + "."};
    case ENOENT:
    case ENOTDIR:
      return {kNotFound, text + ": index it again."};
    default:
      return {kUnavailable, text + "."};
  }
}

inline Problem BadRecord(const std::string& name, const char* what, int64_t offset) {
  return {kDataLoss, name + ": " + what + " record at byte " + std::to_string(offset) + ". Index the file again."};
}

inline Problem ChangedFile(const std::string& name, int64_t then, int64_t now) {
  return {kFailedPrecondition, name + " changed since it was indexed (then " + std::to_string(then) + " bytes, now " +
                                   std::to_string(now) + "): index it again."};
}

inline int64_t TimeOf(const struct stat& status) {
  return status.st_mtim.tv_sec * int64_t{1000000000} + status.st_mtim.tv_nsec;
}

// Checks that a file has a size and a time of modification, unless they are -1, unknown.
inline Problem CheckVersion(const std::string& name, int64_t size, int64_t mtime) {
  struct stat status;
  if (size < 0) return {};
  if (stat(name.c_str(), &status) != 0) return SystemProblem(name, errno);
  return status.st_size == size && TimeOf(status) == mtime ? Problem{} : ChangedFile(name, size, status.st_size);
}

// A file that is open, and what it was when it was opened.
struct File {
  int descriptor;
  int64_t size, mtime;  // bytes; nanoseconds

  File(int opened, int64_t bytes, int64_t time) : descriptor(opened), size(bytes), mtime(time) {}
  File(const File&) = delete;
  ~File() { close(descriptor); }
};

// Keeps the most recently used files open, up to a quarter of the process's limit, until the last reader is removed. DALI's
// operator, a library of its own, keeps as many.
class Files {
 public:
  Files() {
    rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur / 4 < most_) most_ = limit.rlim_cur / 4;
  }

  void AddReader() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++readers_;
  }

  void RemoveReader() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--readers_ == 0) open_.clear();
  }

  // Opens a file, or reuses an open one. `size` and `mtime` are the index's, or -1 if unknown.
  Problem Open(const std::string& name, int64_t size, int64_t mtime, std::shared_ptr<File>* file) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto entry = open_.find(name);
      if (entry != open_.end()) {
        const File& known = *entry->second.file;
        if (size < 0 || (known.size == size && known.mtime == mtime)) {
          entry->second.used = ++time_;
          *file = entry->second.file;
          return {};
        }
        open_.erase(entry);  // it may have been replaced
      }
    }
    if (name.find('\0') != std::string::npos) return {kInvalidArgument, "the name of a file holds a NUL byte"};
    int descriptor = -1;
    while ((descriptor = open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) < 0) {  // a FIFO would block
      const int error = errno;
      if (error == EINTR) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      if (error != EMFILE || !Drop()) return SystemProblem(name, error);
    }
    *file = std::make_shared<File>(descriptor, 0, 0);
    struct stat status;
    if (fstat(descriptor, &status) != 0) return SystemProblem(name, errno);
    if (!S_ISREG(status.st_mode)) return {kFailedPrecondition, name + " is not a regular file: index it again."};
    (*file)->size = status.st_size;
    (*file)->mtime = TimeOf(status);
    if (size >= 0 && ((*file)->size != size || (*file)->mtime != mtime)) {
      return ChangedFile(name, size, (*file)->size);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    while (open_.size() >= most_ && Drop()) continue;
    open_[name] = {*file, ++time_};
    return {};
  }

  // Has the next `Open` open the file again, unless another thread has done so.
  void Forget(const std::string& name, const std::shared_ptr<File>& file) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = open_.find(name);
    if (entry != open_.end() && entry->second.file == file) open_.erase(entry);
  }

 private:
  struct Entry {
    std::shared_ptr<File> file;
    int64_t used;
  };

  // Drops the file that was used least recently; returns whether there was one.
  bool Drop() {
    if (open_.empty()) return false;
    auto oldest = open_.begin();
    for (auto entry = open_.begin(); entry != open_.end(); ++entry) {
      if (entry->second.used < oldest->second.used) oldest = entry;
    }
    open_.erase(oldest);
    return true;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, Entry> open_;
  size_t most_ = 1024;
  int64_t time_ = 0;
  int readers_ = 0;
};

// The files that the process has open. Never destroyed: threads may still read when the process exits.
inline Files& OpenFiles() {
  static auto& files = *new Files;
  return files;
}

// Checks that an extent is within a file as it is now: a wrong index must not ask for any amount of memory.
inline Problem CheckExtent(const File& file, const std::string& name, int64_t offset, int64_t size) {
  struct stat status;
  if (size <= file.size && offset <= file.size - size) return {};
  if (fstat(file.descriptor, &status) != 0) return SystemProblem(name, errno);
  if (size <= status.st_size && offset <= status.st_size - size) return {};
  return BadRecord(name, "truncated", offset);
}

// Reads the `size` bytes at `offset` into `bytes`.
inline Problem ReadBytes(const File& file, const std::string& name, int64_t offset, int64_t size, uint8_t* bytes) {
  for (int64_t done = 0; done < size;) {
    const ssize_t got = pread(file.descriptor, bytes + done, static_cast<size_t>(size - done), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemProblem(name, errno);
    if (got == 0) return BadRecord(name, "truncated", offset);
    done += got;
  }
  return {};
}

// Reads the record of `size` bytes at `offset` into `bytes`, and checks it; its CRCs if there is a `crc`.
inline Problem ReadRecord(const File& file, const std::string& name, int64_t offset, int64_t size, const Crc* crc,
                          uint8_t* bytes) {
  Problem problem = ReadBytes(file, name, offset, size, bytes);
  if (!problem.text.empty()) return problem;
  uint64_t length;
  uint32_t length_crc, data_crc;
  std::memcpy(&length, bytes, 8), std::memcpy(&length_crc, bytes + 8, 4), std::memcpy(&data_crc, bytes + size - kFooter, 4);
  const bool is_whole = length == static_cast<uint64_t>(size - kAround) &&
                        (!crc || (Masked((*crc)(bytes, 8)) == length_crc &&
                                  Masked((*crc)(bytes + kHeader, static_cast<size_t>(length))) == data_crc));
  return is_whole ? Problem{} : BadRecord(name, "corrupted", offset);
}

}  // namespace dali_tf_input
