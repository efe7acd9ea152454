// Does something with the image of each record of a batch, which it reads: what DaliTfInputBatch and DaliTfInputRows share.
//
// The calling thread waits. One team of threads reads, so that slow storage does not hold up the other, which makes what
// is asked for.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "example.h"
#include "pool.h"
#include "records.h"
#include "team.h"

namespace dali_tf_input {

class Job {
 public:
  // What is given.
  const Records* records = nullptr;  // to read from; or null, and then
  const char* given = nullptr;       // TF_TString each: the records of the batch, without headers
  size_t string_size = 0;            // of a TF_TString, in bytes
  const int64_t* positions = nullptr;  // of the records to read
  int64_t count = 0;                 // images
  bool check_crc = true;
  const ImageKeys* keys = nullptr;

  // Where the results go.
  char* rests = nullptr;  // TF_TString each: the Examples without their images, or not plain ones as they are

  // After `Run`: the places of refused images, in order; see `Example`.
  std::vector<int64_t> refused;

  virtual ~Job() {
    for (Piece& piece : pieces_) piece.Free();
  }

  // Does it all, by `num_readers` and `num_threads` threads. The problem is that of the smallest place, whichever
  // thread meets one first.
  Problem Run(int num_readers, int num_threads) {
    if (!count) return {};
    is_refused_.assign(static_cast<size_t>(count), 0), first_problem_ = count;
    Try(0, [&] {  // as one more task, so that this does not return before all others have ended
      Team& decoders = Team::Get(Role::kDecode, num_threads);
      if (!records) {
        for (int64_t place = 0; place < count; ++place) Post(decoders, place, [this, place] { Do(place); });
        return;
      }
      pieces_.resize(static_cast<size_t>(count));
      records->Announce(positions, count);
      Team& readers = Team::Get(Role::kRead, num_readers);
      const int64_t few = std::max<int64_t>(1, std::min(kMostAtOnce, count / num_readers));
      for (int64_t start = 0; start < count; start += few) {
        Post(readers, start, [this, start, few, &decoders] { Read(start, std::min(few, count - start), decoders); });
      }
    });
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return pending_ == 0; });
    if (exception_) std::rethrow_exception(exception_);
    for (int64_t place = 0; place < count; ++place) {
      if (is_refused_[static_cast<size_t>(place)]) refused.push_back(place);
    }
    return problem_;
  }

  // Returns the serialized Example at a place; of records that were read, only of a refused one.
  Span Example(int64_t place) const {
    if (!records) {
      const auto* text = reinterpret_cast<const TF_TString*>(given + string_size * static_cast<size_t>(place));
      const auto* data = reinterpret_cast<const uint8_t*>(TF_StringGetDataPointer(text));
      return {data, data + TF_StringGetSize(text)};
    }
    const Piece& piece = pieces_[static_cast<size_t>(place)];
    return {piece.memory + kHeader, piece.memory + piece.size - kFooter};
  }

 protected:
  // Makes what is asked for of the image at a place; returns false if it is refused. `sides` are its height and width, if
  // it is stored as pixels. The record stays in memory until `Free`.
  virtual bool Make(int64_t place, const Span& image, int64_t* sides) = 0;

  void Free(int64_t place) {
    if (records) pieces_[static_cast<size_t>(place)].Free();
  }

  void Fail(int64_t place, Problem problem, std::exception_ptr exception = nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (place < first_problem_) first_problem_ = place, problem_ = std::move(problem), exception_ = std::move(exception);
  }

  // What is wrong with the record at a place: it is `text`.
  Problem Wrong(int64_t place, const std::string& text) const {
    if (!records) return {kDataLoss, "a record is " + text + "."};
    const auto [name, offset] = records->Locate(positions[place]);
    return {kDataLoss, name + ": the record at byte " + std::to_string(offset) + " is " + text + ". Index the file again."};
  }

 private:
  // A record that was read; memory of the pool, or none.
  struct Piece {
    uint8_t* memory = nullptr;
    size_t size = 0;

    void Free() {
      if (memory) Pool::OfRecords().Give(memory);
      memory = nullptr;
    }
  };

  static constexpr int64_t kMostAtOnce = 4;  // records that a reader reads in one go

  // Has a team do a task for the image at a place.
  template <typename Task>
  void Post(Team& team, int64_t place, Task task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++pending_;
    }
    try {
      team.Post([this, place, task] { Try(place, task); });
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      --pending_;
      throw;
    }
  }

  // Does a task, unless an image before has a problem. An exception must not end the thread.
  template <typename Task>
  void Try(int64_t place, Task task) {
    if (place < first_problem_) {
      try {
        task();
      } catch (...) {
        Fail(place, {}, std::current_exception());
      }
    }
    std::lock_guard<std::mutex> lock(mutex_);  // `Run` does not return while it is held
    if (--pending_ == 0) finished_.notify_all();
  }

  // Reads a few records, and has each decoded when it is there.
  void Read(int64_t start, int64_t few, Team& decoders) {
    int64_t place = 0;
    const auto to = [&](int64_t at, size_t size) {
      Piece& piece = pieces_[static_cast<size_t>(start + at)];
      piece.Free();  // of a first attempt
      piece.memory = static_cast<uint8_t*>(Pool::OfRecords().Take(size)), piece.size = size;
      return piece.memory;
    };
    const auto done = [&](int64_t at) { Post(decoders, start + at, [this, at = start + at] { Do(at); }); };
    Problem problem = records->Read(positions + start, few, check_crc, &place, to, done);
    if (!problem.text.empty()) Fail(start + place, std::move(problem));
  }

  // Splits the record at a place, and has what is asked for made of its image.
  void Do(int64_t place) {
    static thread_local std::string rest;
    const Span example = Example(place);
    Span image;
    int64_t sides[2] = {};
    const bool is_plain = SplitExample(example, *keys, &image, sides, &rest);
    if (!is_plain && !IsMessage(Message::kExample, example)) return Fail(place, Wrong(place, "not a serialized tf.train.Example"));
    if (!is_plain) rest.assign(reinterpret_cast<const char*>(example.at), example.size());
    TF_StringCopy(reinterpret_cast<TF_TString*>(rests + string_size * static_cast<size_t>(place)), rest.data(), rest.size());
    if (!is_plain || !Make(place, image, sides)) is_refused_[static_cast<size_t>(place)] = 1;
  }

  std::vector<Piece> pieces_;
  std::vector<char> is_refused_;  // one for each thread's image: bits would share bytes
  std::mutex mutex_;
  std::condition_variable finished_;
  int64_t pending_ = 1;  // tasks, with that of `Run`
  std::atomic<int64_t> first_problem_{0};
  Problem problem_;
  std::exception_ptr exception_;
};

}  // namespace dali_tf_input
