// Reads records by their positions, from files whose index is known.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api.h"
#include "read.h"

namespace dali_tf_input {

// The records of some files. Error messages are worded as in `reading.check_versions` and `records.tfrecord`.
struct Records {
  const char* names;  // TF_TString each
  size_t name_size;
  const int64_t* versions;
  int64_t num_files;
  const int32_t* file_of;
  const int64_t* extents;
  int64_t num_records;

  // Returns the file of a record that was found, and its offset in bytes.
  std::pair<std::string, int64_t> Locate(int64_t position) const {
    const auto* given = reinterpret_cast<const TF_TString*>(names + name_size * static_cast<size_t>(file_of[position]));
    return {{TF_StringGetDataPointer(given), TF_StringGetSize(given)}, extents[2 * position]};
  }

  // Opens the file of a record, and checks that the record is within it.
  Problem Find(int64_t position, std::string* name, std::shared_ptr<File>* file) const {
    const int64_t of = position >= 0 && position < num_records ? file_of[position] : -1;
    if (of < 0 || of >= num_files || extents[2 * position] < 0 || extents[2 * position + 1] < kAround) {
      return {kInvalidArgument, "no such record: " + std::to_string(position)};
    }
    *name = Locate(position).first;
    Problem problem = OpenFiles().Open(*name, versions[2 * of], versions[2 * of + 1], file);
    if (!problem.text.empty()) return problem;
    return CheckExtent(**file, *name, extents[2 * position], extents[2 * position + 1]);
  }

  // Has the system read records ahead of time, as far as it can; what is wrong with them, reading them will tell.
  void Announce(const int64_t* positions, int64_t count) const {
    std::string path;
    for (int64_t place = 0; place < count; ++place) {
      std::shared_ptr<File> file;
      if (!Find(positions[place], &path, &file).text.empty()) continue;
      const int64_t* extent = extents + 2 * positions[place];
      posix_fadvise(file->descriptor, extent[0], extent[1], POSIX_FADV_WILLNEED);
    }
  }

  // Reads records in turn: `to(place, size)` returns where a record of `size` bytes goes, with its header and footer, and
  // `done(place)` is called when it is there and valid. At a problem, `*place` is that of the record.
  template <typename To, typename Done>
  Problem Read(const int64_t* positions, int64_t count, bool check_crc, int64_t* place, To to, Done done) const {
    static const auto& crc = *new Crc;
    std::string path;
    for (*place = 0; *place < count; ++*place) {
      const int64_t position = positions[*place];
      Problem problem;
      for (int attempt = 0; attempt < 2; ++attempt) {
        std::shared_ptr<File> file;
        problem = Find(position, &path, &file);
        if (problem.text.empty()) {
          const int64_t offset = extents[2 * position], size = extents[2 * position + 1];
          problem = ReadRecord(*file, path, offset, size, check_crc ? &crc : nullptr, to(*place, static_cast<size_t>(size)));
          if (problem.text.empty()) break;
        }
        if (!file) return problem;
        OpenFiles().Forget(path, file);  // it may have been cut or replaced, and restored since
      }
      if (!problem.text.empty()) return problem;
      done(*place);
    }
    return {};
  }
};

}  // namespace dali_tf_input
