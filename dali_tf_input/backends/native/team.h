// Threads that all operations of a process share.
//
// An operation hands out its images one by one and waits. So two calls keep any number of cores busy, and no more batches
// are in memory than calls: with a call per core there would be a batch for each core.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace dali_tf_input {

enum class Role { kRead, kDecode };

class Team {
 public:
  // Returns the process's team of that many threads. Teams are never destroyed, as they may work while the process ends;
  // a forked process has none of its parent's threads, and so makes its own.
  static Team& Get(Role role, int size) {
    static std::mutex mutex;
    static auto& teams = *new std::map<std::pair<Role, int>, std::pair<pid_t, Team*>>;
    std::lock_guard<std::mutex> lock(mutex);
    auto& entry = teams[{role, size}];
    if (!entry.second || entry.first != getpid()) entry = {getpid(), new Team};
    entry.second->Grow(size);
    return *entry.second;
  }

  // Has a thread do the task; tasks are begun in the order of these calls.
  void Post(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void Grow(int size) {
    for (; size_ < size; ++size_) std::thread(&Team::Loop, this).detach();
  }

  void Loop() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  int size_ = 0;
};

}  // namespace dali_tf_input
