"""Reads by extent, by the compiled operation and by Python: the same records and errors."""

import dataclasses
import gc
import os
import resource
import shutil
import weakref
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from commands import python
from conftest import (
    TF_DATA,
    jpeg,
    numbered_examples,
    refused,
    spec_of,
    write_dataset,
    write_indexed,
)
from test_native import compile_native, needs_compiler

from dali_tf_input import InputError, Preprocess, Shard, TfDataOptions, build_index, make_dataset
from dali_tf_input.backends import locations
from dali_tf_input.backends.dali_reader import hold_indexes
from dali_tf_input.backends.reading import make_read
from dali_tf_input.records.tfrecord import read_record

kernels = pytest.mark.parametrize("kernel", ["native", "tensorflow"])
FAILURES = (tf.errors.OpError, InputError)  # in a dataset all are OpErrors
SIZES = [*range(70), 1000, 3071, 3072, 3073, 3080, 9000, 1 << 17, 3 << 20]


def write_records(file, payloads):
    with tf.io.TFRecordWriter(str(file)) as writer:
        for payload in payloads:
            writer.write(payload)


def make_reader(files, kernel, *, check_crc=True):
    """Returns the function that reads records of files of raw bytes by their numbers."""
    build_index([str(file) for file in files], num_processes=1)
    indexes = [np.loadtxt(f"{file}.idx", np.int64, ndmin=2) for file in files]
    states = [(os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    file_of = np.repeat(np.arange(len(files), dtype=np.int32), [len(one) for one in indexes])
    options = TfDataOptions(kernel=kernel, check_crc=check_crc)
    given = ([str(file) for file in files], states, file_of, np.concatenate(indexes))
    read = make_read(options, *map(tf.constant, given))
    return lambda numbers: read(tf.constant(numbers, tf.int64)).numpy().tolist()


@kernels
def test_records_of_all_sizes(tmp_path, kernel):
    random = np.random.default_rng(0)
    payloads = [random.bytes(size) for size in SIZES]
    half = len(SIZES) // 2
    files = [tmp_path / "a", tmp_path / "b é"]
    write_records(files[0], payloads[:half]), write_records(files[1], payloads[half:])
    read = make_reader(files, kernel)
    order = random.permutation(len(SIZES))
    assert read(order) == [payloads[number] for number in order]
    assert read([]) == []


@kernels
def test_damage_is_named(tmp_path, kernel):
    """Every bit of a record's data, length and checksum: an error that names file and byte."""
    file = tmp_path / "train"
    write_records(file, [b"0123456789abcdef" * 9] * 2)
    whole = file.read_bytes()
    offset, size = 160, 160
    read = make_reader([file], kernel)
    status = os.stat(file)
    for byte in [*range(8), *range(12, size, 7), size - 4, size - 1]:
        damaged = bytearray(whole)
        damaged[offset + byte] ^= 1
        file.write_bytes(damaged)
        os.utime(file, ns=(status.st_mtime_ns, status.st_mtime_ns))
        with pytest.raises(FAILURES, match=f"{file}.* byte {offset}"):
            read([0, 1])
    file.write_bytes(whole)
    os.utime(file, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert read([0, 1])[1] == whole[172:316]


@kernels
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_restored(tmp_path, kernel, is_replaced):
    """A file that was damaged, or cut, while it was open is read again once it is as before."""
    file, copy = tmp_path / "train", tmp_path / "copy"
    write_records(file, [b"0" * 50] * 3)
    read = make_reader([file], kernel)
    assert len(read([0, 1, 2])) == 3
    shutil.copy2(file, copy)
    os.truncate(file, 100)
    with pytest.raises(FAILURES, match=f"{file}.*(truncated|changed)"):
        read([2])
    if is_replaced:
        os.replace(copy, file)
    else:
        shutil.copy2(copy, file)
    assert len(read([0, 1, 2])) == 3


def test_what_is_no_file(tmp_path):
    """Neither a FIFO, which blocks who opens it, nor a name that C would cut."""
    for name, message in ((str(tmp_path / "fifo"), "not a regular file"), ("a\0b", "NUL byte")):
        if "NUL" not in message:
            os.mkfifo(name)
        given = ([name], np.full((1, 2), -1), np.zeros(1, np.int32), np.array([(0, 66)], np.int64))
        read = make_read(TfDataOptions(kernel="native"), *map(tf.constant, given))
        with pytest.raises(FAILURES, match=message):
            read(tf.constant([0], tf.int64))


def test_checksums_are_optional(tmp_path):
    file = tmp_path / "train"
    write_records(file, [b"0" * 50])
    read = make_reader([file], "native", check_crc=False)
    with open(file, "r+b") as stream:
        stream.seek(20), stream.write(b"1")
    os.utime(file, ns=(os.stat(file).st_atime_ns, os.stat(file).st_mtime_ns))
    with pytest.raises(FAILURES, match="changed since it was indexed"):
        read([0])
    assert b"1" in make_reader([file], "native", check_crc=False)([0])[0]


@kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "cannot be read: No such file or directory"),
        (lambda file: file.write_bytes(b""), "changed since it was indexed .*now 0"),
        (lambda file: os.utime(file, (1, 1)), "changed since it was indexed"),
        (lambda file: file.chmod(0), "cannot be read: Permission denied"),
    ],
)
def test_files_that_change(tmp_path, kernel, change, message):
    file = tmp_path / "train"
    write_records(file, [b"0" * 50])
    read = make_reader([file], kernel)
    change(file)
    if "Permission" in message and os.geteuid() == 0:
        pytest.skip("root may read everything")
    with pytest.raises(FAILURES, match=f"{file} {message}.*"):
        read([0])


@kernels
def test_wrong_numbers_are_refused(tmp_path, kernel):
    """Numbers, and extents of a wrong index, beyond what there is: an error, and no memory."""
    write_records(tmp_path / "train", [b"0" * 50])
    name, states = [str(tmp_path / "train")], np.full((1, 2), -1)
    extents = [(0, 66), (0, 1 << 62), ((1 << 63) - 1, 66), ((1 << 63) - 20, 1 << 62), (60, 66)]
    given = (name, states, np.zeros(5, np.int32), np.array(extents, np.int64))
    read = make_read(TfDataOptions(kernel=kernel), *map(tf.constant, given))
    wrong = (-1, 5, 1 << 40) if kernel == "tensorflow" else (-1, 5, 1 << 40, 1)
    for number in (*wrong, 2, 3, 4):
        with pytest.raises((*FAILURES, OSError)):
            read(tf.constant([number], tf.int64))
    assert len(read(tf.constant([0], tf.int64)).numpy()[0]) == 50


def test_more_files_than_may_be_open(tmp_path):
    """100 files, 40 descriptors for them."""
    files = [tmp_path / f"train-{number:03}" for number in range(100)]
    for number, file in enumerate(files):
        write_records(file, [b"%d" % number] * 3)
    read, unread = make_reader(files[1:], "native"), make_reader(files[:1], "native")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 40, before[1]))
    try:
        for _ in range(2):
            read_all = read(np.random.default_rng(0).permutation(297))
            assert sorted(map(int, read_all)) == sorted([*range(1, 100)] * 3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r"Too many open.*ulimit -n"):
            unread([0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


SLOW = """
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>
#include <atomic>
static std::atomic<int> running, most;
extern "C" int most_reads() { return most; }
extern "C" ssize_t pread(int descriptor, void* to, size_t size, off_t offset) {
  static auto* real = (ssize_t(*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, "pread");
  int now = ++running;
  for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {}
  usleep(5000);
  ssize_t got = real(descriptor, to, size, offset);
  --running;
  return got;
}
extern "C" ssize_t pread64(int d, void* to, size_t size, off_t offset) { return pread(d, to, size, offset); }
"""


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("kernel", ["batch", "native", "tensorflow"])
def test_slow_reads_overlap(tmp_path, kernel):
    """On storage with 5 ms a read: at least eight at a time, also in batches of eight."""
    dataset = write_indexed(tmp_path / "train", [{"image": jpeg(8, 8), "label": 1}] * 400)
    (tmp_path / "slow.cc").write_text(SLOW)
    compile_native(tmp_path / "slow.so", "-shared", "-fPIC", tmp_path / "slow.cc")
    program = f"""if True:
        import ctypes
        from dali_tf_input import *
        from dali_tf_input.backends.reading import read_records
        from dali_tf_input.backends.stream import Stream
        dataset = Records.from_files({list(dataset.paths)!r})
        spec = InputSpec(records=dataset, preprocess=Preprocess.for_training(8), order="global")
        if {kernel!r} == "batch":
            batches = make_dataset(spec, TfDataOptions(), batch_size=8)
            count = sum(len(images) for images, _ in batches)
        else:
            stream = Stream(spec=spec, shard_batch_size=8)
            count = len(list(read_records(stream, TfDataOptions(kernel={kernel!r})).take(400)))
        print(count, ctypes.CDLL(None).most_reads())
    """
    environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "slow.so")}
    found = python("-c", program, env=environment)
    count, most = map(int, found.stdout.split())
    assert count == 400
    assert most >= 8, found.stderr


def test_locate_and_read(dataset):
    """Every record, once, as the files hold them."""
    for number in range(dataset.num_records):
        where = dataset.locate(number)
        data = read_record(where.file, where.offset)
        assert len(data) + 16 == where.size
        example = tf.train.Example.FromString(data)
        features = dataset.read(number)
        for key, feature in example.features.feature.items():
            kind = feature.WhichOneof("kind")
            assert list(features[key]) == list(getattr(feature, kind).value)
    for wrong in (-1, dataset.num_records):
        with refused(rf"`record` must be in \[0, {dataset.num_records}\), got {wrong}"):
            dataset.locate(wrong)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\n", b"\nx\n"),  # DALI's own reader would stop there, and begin again
        (b"\n", b"\n0 100\n"),
        (b"0 ", b"-5 "),
        (b"0 ", b"99999999 "),
        (b"0 ", b"9223372036854775807 "),
        (b"0 ", b"0x0 "),
        (b" ", b" 1"),
    ],
)
def test_a_forged_index(dataset, tmp_path, old, new):
    """Its manifest vouches for it: it is parsed and checked before anything reads by it."""
    first = dataset.files[0]
    text = Path(first.index_file).read_bytes().replace(old, new, 1)
    (tmp_path / "forged.idx").write_bytes(text)
    crc = google_crc32c.value(text)
    changes = {"index_file": str(tmp_path / "forged.idx"), "index_crc": crc}
    files = (dataclasses.replace(first, **changes), *dataset.files[1:])
    forged = dataclasses.replace(dataset, files=files)
    with refused(f"{tmp_path}/forged.idx changed since"):
        hold_indexes(forged)
    with refused(f"{tmp_path}/forged.idx changed since"):
        forged.index(0)


def test_what_dali_reads_by(dataset, tmp_path):
    """Spaces and signs that Python reads as numbers reach DALI as plain ones."""
    first = dataset.files[0]
    whole = Path(first.index_file).read_bytes()
    text = b"\v" + whole.replace(b" ", b" \f+", 1)
    (tmp_path / "odd.idx").write_bytes(text)
    changes = {"index_file": str(tmp_path / "odd.idx"), "index_crc": google_crc32c.value(text)}
    files = (dataclasses.replace(first, **changes), *dataset.files[1:])
    (path, *_) = hold_indexes(dataclasses.replace(dataset, files=files)).values()
    assert Path(path).read_bytes() == whole


def test_replicas_share_the_locations_of_records(tmp_path):
    """One table for all pipelines of a process, which goes with the last of their datasets."""
    others = [*locations._locations.values()]  # of tests before
    spec = spec_of(write_dataset(tmp_path, [24]), "global", Preprocess.for_training(16))
    made = [make_dataset(spec, TF_DATA, batch_size=4, shard=Shard(n, 2)) for n in range(2)]
    (kept,) = {*locations._locations.values()} - {*others}
    found = weakref.ref(kept)
    del kept
    assert all(sum(1 for _ in dataset) == 3 for dataset in made)
    made.clear()
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("order", ["global", "sequential", "buffer"])
def test_a_changed_file_is_noticed_by_each_iterator(tmp_path, order):
    """Also while another iterator lives, whose functions TensorFlow uses again: it must not keep
    what an earlier check found.
    """
    records = write_indexed(tmp_path / "train-0", numbered_examples(12))
    how = {"repeat": False} if order == "sequential" else {}
    spec = spec_of(records, order, Preprocess.for_training(16), **how)
    made = make_dataset(spec, TF_DATA, batch_size=4)
    alive = iter(made)
    next(alive)
    with open(tmp_path / "train-0", "ab") as stream:
        stream.write(b"more")
    with pytest.raises(tf.errors.OpError, match="changed since it was indexed"):
        list(made)
    del alive
