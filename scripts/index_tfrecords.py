"""Indexes TFRecord files for DALI: one line `offset size`, in bytes, for each record.

usage: index_tfrecords.py [--index_dir=DIR] [--force] FILE_OR_GLOB...

Each index is written beside its file as <file>.idx, or under --index_dir. An index that stands already and fits its file is
kept. A file that cannot be indexed is named with the byte where it is wrong; the others are indexed all the same, and the
exit code is 1.
"""

import sys

from absl import flags

import console
from dali_tf_input import InputError, build_index, find_files, index_files_of

_INDEX_DIR = flags.DEFINE_string("index_dir", None, "Folder for the index files; beside each TFRecord file by default.")
_FORCE = flags.DEFINE_boolean("force", False, "Write every index anew, also where a valid one stands.")


def main(patterns: list[str]) -> int:
    files = find_files(patterns)
    index_files = index_files_of(files, index_dir=_INDEX_DIR.value)
    built, errors = [], []
    pairs = zip(files, index_files, strict=True)
    for file, index_file in console.progress(pairs, what="indexing", total=len(files)):
        try:
            built.append(build_index(file, index_file, force=_FORCE.value))
        except (InputError, OSError) as error:
            errors.append(error)
    written = sum(index.written for index in built)
    print(
        f"{sum(index.num_records for index in built):,} records in {len(built):,} files: "
        f"{written:,} indexes written, {len(built) - written:,} already there."
    )
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if errors:
        print(f"error: {len(errors):,} of {len(files):,} files were not indexed.", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    console.run(main)
