// Memory that is used again: of batches, and of the records that are made into them.
//
// A batch of 256 images of 224 x 224, float32, is 154 MB. Fresh from the system, the first write to each of its pages is
// a page fault; together they take as long as a third of the decoding. So what TensorFlow frees is kept for the next
// batch. The C API has no other way to own a tensor's memory than to give it at the start (TF_NewTensor).
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <mutex>
#include <new>
#include <unordered_map>

namespace dali_tf_input {

// What is idle is at most as much as was in use at the same time not long ago; those pieces go first that were not used for
// longest. Without a user, none is kept.
class Pool {
 public:
  // The pools are apart, as records would drive out batches: they come and go more often. They are never destroyed, as
  // tensors may outlive the program's end.
  static Pool& OfBatches() {
    static auto& pool = *new Pool(64);
    return pool;
  }
  static Pool& OfRecords() {
    static auto& pool = *new Pool(4096);
    return pool;
  }

  void AddUser() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++users_;
  }

  void RemoveUser() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--users_ == 0) Drop(0);
  }

  // Returns at least `bytes`, from the start of a page on: TF_NewTensor would copy what is not aligned to 64 bytes.
  void* Take(size_t bytes) {
    const size_t size = Round(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (++taken_ % window_ == 0) peak_before_ = peak_, peak_ = in_use_;
    auto piece = idle_.end();
    while (piece != idle_.begin()) {  // from the newest on, as its pages are the most likely to be in a cache
      if ((--piece)->size == size) break;
    }
    if (piece != idle_.end() && piece->size == size) {
      used_.splice(used_.end(), idle_, piece), idle_bytes_ -= size;
    } else {
      Add(size);
    }
    in_use_ += size, peak_ = std::max(peak_, in_use_);
    return used_.back().memory;
  }

  // Takes a piece back. It must not fail, and so does not allocate.
  void Give(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto piece = pieces_.find(memory)->second;
    idle_.splice(idle_.end(), used_, piece);
    in_use_ -= piece->size, idle_bytes_ += piece->size;
    Drop(users_ > 0 ? std::max(peak_, peak_before_) : 0);
  }

  // Gives a batch's memory back: a deallocator for TF_NewTensor.
  static void FreeBatch(void* memory, size_t, void*) { OfBatches().Give(memory); }

  // Returns whether this is the start of a piece.
  bool Owns(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    return pieces_.count(memory) > 0;
  }

 private:
  struct Piece {
    void* memory;
    size_t size;
  };

  explicit Pool(int64_t window) : window_(window) {}

  // Rounds up to whole pages and, as records are of all sizes, to one of a few between two powers of 2.
  static size_t Round(size_t bytes) {
    size_t unit = 4096;
    while (unit * 8 <= bytes && unit < size_t{1} << 20) unit *= 2;
    return (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit;
  }

  void Add(size_t size) {
    used_.push_back({nullptr, size});
    try {
      void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      used_.back().memory = memory;
      pieces_[memory] = std::prev(used_.end());
    } catch (...) {
      if (used_.back().memory) munmap(used_.back().memory, size);
      used_.pop_back();
      throw;
    }
  }

  // Gives idle pieces back to the system until at most `most` bytes are idle.
  void Drop(size_t most) {
    while (idle_bytes_ > most) {
      const Piece oldest = idle_.front();
      pieces_.erase(oldest.memory), idle_.pop_front();
      munmap(oldest.memory, oldest.size), idle_bytes_ -= oldest.size;
    }
  }

  std::mutex mutex_;
  std::list<Piece> used_, idle_;  // in the order in which they were taken, or given back
  std::unordered_map<void*, std::list<Piece>::iterator> pieces_;  // all of them
  size_t in_use_ = 0, idle_bytes_ = 0, peak_ = 0, peak_before_ = 0;
  const int64_t window_;  // pieces taken until an earlier peak is forgotten
  int64_t taken_ = 0;
  int users_ = 0;
};

}  // namespace dali_tf_input
