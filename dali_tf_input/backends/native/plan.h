// Which record is served where: the plan of an epoch, as dali_tf_input/spec/plan.py explains and computes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "random.h"

namespace dali_tf_input {

constexpr int64_t kStride = int64_t{1} << 40;  // between the keys of two epochs; as in stream.py

// Purposes of random numbers, as in dali_tf_input/random.py.
enum class Purpose : uint64_t { kOrder = 1, kBlocks = 2, kClass = 3, kPart = 4 };

// A shard's plan. It lies in the memory of `Plan.to_numbers`.
struct Plan {
  enum Kind { kAll, kClasses, kParts };  // of groups
  static constexpr int64_t kNumbers = 11;

  int64_t num_slots, shard_batch_size, num_shards, shard_id, num_images, remainder_start, seed, block_size, repeats, kind, total;
  const int64_t* groups;  // sizes and quotas
  const int64_t* nodes;   // of parts: each has the quota and the number of its first, and of its second, node or part
  int64_t num_groups, num_nodes;
  std::vector<int64_t> ends, starts;  // of the groups' places; and before each group, how many records

  // Completes the plan; returns false if the numbers are not those of one, as then an image may lead astray.
  bool Complete() {
    if (num_slots < 1 || shard_batch_size < 1 || num_shards < 1 || shard_id < 0 || shard_id >= num_shards) return false;
    if (num_images < 0 || num_images > num_slots || remainder_start < 0 || block_size < 1 || repeats < 1) return false;
    if (num_slots >= kStride || shard_batch_size >> 20 || num_shards >> 20) return false;  // so that no product overflows
    if (kind == kAll) return true;
    if (num_groups < 1 || total < 1 || total > num_slots || (kind != kClasses && kind != kParts)) return false;
    if (kind == kParts && total >> 31) return false;  // `FindPart` multiplies two such numbers
    int64_t sum = 0, before = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t size = groups[2 * group], quota = groups[2 * group + 1];
      if (size < 1 || size >= kStride || quota < 0 || quota > total) return false;
      sum += quota, ends.push_back(sum);
      starts.push_back(before), before += size;
    }
    for (int64_t node = 0; node < num_nodes; ++node) {
      for (int64_t child = 0; child < 2; ++child) {
        const int64_t quota = nodes[4 * node + 2 * child], number = nodes[4 * node + 2 * child + 1];
        if (quota < 1 || quota > total || number < 0 || number >= num_groups + node) return false;
      }
    }
    return sum == total;
  }

  // Returns the slot of an image of the shard.
  int64_t Slot(int64_t image) const {
    const int64_t full_steps = num_slots / (shard_batch_size * num_shards), step = image / shard_batch_size;
    if (step >= full_steps) return remainder_start + image - full_steps * shard_batch_size;
    return (step * num_shards + shard_id) * shard_batch_size + image % shard_batch_size;
  }

  // Returns the record in a slot of an epoch.
  int64_t Record(int64_t epoch, int64_t slot) const {
    if (seed < 0) return slot;
    const int64_t place = slot / repeats;
    if (kind != kAll) return RecordOfGroup(epoch, place);
    const int64_t size = std::min(block_size, num_slots), num_blocks = num_slots / size;
    int64_t record = place;
    if (place < num_blocks * size) record = Move(place / size, num_blocks, Key(Purpose::kOrder, epoch)) * size + place % size;
    if (size == 1) return record;
    const int64_t start = static_cast<int64_t>(Key(Purpose::kBlocks, epoch) % static_cast<uint64_t>(num_slots));
    return (record + start) % num_slots;
  }

 private:
  uint64_t Key(Purpose purpose, int64_t number) const {
    const uint64_t seeded = HashWord(0, static_cast<uint64_t>(seed));
    return HashWord(HashWord(seeded, static_cast<uint64_t>(purpose)), static_cast<uint64_t>(number));
  }

  static int64_t Move(int64_t place, int64_t size, uint64_t key) {
    return static_cast<int64_t>(Permute(static_cast<uint64_t>(place), static_cast<uint64_t>(size), key));
  }

  int64_t RecordOfGroup(int64_t epoch, int64_t place) const {
    place %= total;  // as it is, of every slot that is served
    int64_t group, served = place;
    if (kind == kParts) {
      group = FindPart(&served);
      served += epoch * groups[2 * group + 1];
    } else {
      served = Move(place, total, Key(Purpose::kOrder, epoch));
      group = std::upper_bound(ends.begin(), ends.end(), served) - ends.begin();
      served -= ends[static_cast<size_t>(group)] - groups[2 * group + 1];
    }
    const int64_t size = groups[2 * group], number = kind == kParts ? served / size : epoch;
    const uint64_t key = HashWord(Key(kind == kParts ? Purpose::kPart : Purpose::kClass, group), static_cast<uint64_t>(number));
    return starts[static_cast<size_t>(group)] + Move(served % size, size, key);
  }

  // Returns the part that is served at a place, and how many places of that part come before it.
  int64_t FindPart(int64_t* place) const {
    int64_t node = num_groups + num_nodes - 1;
    if (!num_nodes) {
      for (node = 0; !groups[2 * node + 1];) ++node;  // the only part that is served
    }
    while (node >= num_groups) {
      const int64_t* row = nodes + 4 * (node - num_groups);
      const int64_t quota = row[0] + row[2], count = (*place * row[0] + quota / 2) / quota;
      const bool is_first = ((*place + 1) * row[0] + quota / 2) / quota > count;
      node = is_first ? row[1] : row[3];
      *place = is_first ? count : *place - count;
    }
    return node;
  }
};

}  // namespace dali_tf_input
