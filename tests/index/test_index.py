"""Indexing whole sets: what is written, kept and skipped, whatever happens meanwhile."""

import contextlib
import gzip
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from commands import children_of, python, run, wait_until
from conftest import (
    CRASHING,
    bytes_read,
    jpeg,
    numbered_examples,
    refused,
    scan_records,
    spec_of,
    write_tfrecord,
)

from dali_tf_input import Checks, ClassLabel, Preprocess, Records, build_index
from dali_tf_input.index.build import IndexFaultsError, IndexReport
from dali_tf_input.records.example import encode_example
from dali_tf_input.records.manifest import Manifest
from dali_tf_input.records.paths import find_files
from dali_tf_input.records.tfrecord import frame_record, masked_crc
from dali_tf_input.storage.staging import Staging

CRC, SCHEMA, DECODE = (Checks(verify=level) for level in ("crc", "schema", "decode"))
SKIP = {"on_bad": "skip", "max_bad_fraction": 1}
TINY = {"image": b"x", "label": 1}
ONE = numbered_examples(1)
from_files = Records.from_files


@pytest.fixture
def files(tmp_path):
    """Three files of 4, 5 and 6 records."""
    paths = [(n, tmp_path / f"train-{n}") for n in range(3)]
    return [write_tfrecord(path, numbered_examples(4 + n)) for n, path in paths]


@pytest.fixture
def train(files, tmp_path):
    """The pattern of these files."""
    return str(tmp_path / "train-?")


def index_with_faults(
    files, checks=None, **arguments
) -> tuple[IndexReport, list[tuple[str, int | None, str]]]:
    """Indexes files that have faults; returns the report and (base name, record, reason) of each
    fault.
    """
    faults = []

    def on_bad_record(file, fault):
        faults.append((os.path.basename(file), fault.record, fault.reason))

    try:
        report = build_index(files, checks, on_bad_record=on_bad_record, **arguments)
    except IndexFaultsError as error:
        report = error.report
    return report, faults


def index_of(file):
    return Path(f"{file}.idx")


def manifest_of(file):
    return Path(file).with_name("index_manifest.json")


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).rglob("*.idx")}


def bad_records(folder):
    """Returns the list of bad records that a run wrote."""
    return list(map(json.loads, (folder / "bad_records.jsonl").read_text().splitlines()))


def hidden(folder):
    """Returns what is left of temporary files."""
    return [name for name in os.listdir(folder) if name.startswith(".")]


def ruin(file, position):
    """Overwrites a byte of a file."""
    with open(file, "r+b") as stream:
        stream.seek(position)
        stream.write(b"\xff")


def ruin_data(file, record):
    """Overwrites a byte of a record's data, which framing does not see."""
    ruin(file, scan_records(file)[record][0] + 30)


def test_equals_tfrecord2idx(files):
    """Line for line what DALI's own tool writes, here without TensorFlow, to be faster."""
    build_index(files[0])
    tool, theirs = Path(sys.executable).with_name("tfrecord2idx"), files[0] + ".theirs"
    code = f"import runpy, sys; sys.modules['tensorflow'] = None; runpy.run_path({str(tool)!r})"
    assert python("-c", code, files[0], theirs).returncode == 0
    assert index_of(files[0]).read_text() == Path(theirs).read_text()
    assert len(index_of(files[0]).read_text().splitlines()) == 4


def test_only_what_changed_is_indexed_again(files, train, tmp_path):
    first = build_index(train)
    before, manifest = times(tmp_path), manifest_of(files[0])
    written = manifest.stat().st_mtime_ns
    again = build_index(train)
    assert (first.written, first.unchanged, first.summary.records) == (3, 0, 15)
    assert (again.written, again.unchanged, again.summary.records) == (0, 3, 15)
    assert times(tmp_path) == before
    assert manifest.stat().st_mtime_ns == written
    write_tfrecord(files[1], numbered_examples(2))
    write_tfrecord(tmp_path / "train-9", ONE)
    os.unlink(files[2])
    report = build_index(train)
    assert (report.written, report.unchanged, report.removed) == (2, 1, 1)
    assert report.summary.records == 7
    after = times(tmp_path)
    assert sorted(after) == ["train-0.idx", "train-1.idx", "train-9.idx"]
    assert after["train-0.idx"] == before["train-0.idx"]
    assert sorted(Manifest.read(str(tmp_path)).entries) == ["train-0", "train-1", "train-9"]
    assert build_index(train, force=True).written == 3


def test_a_part_of_the_files_leaves_the_others(train, tmp_path):
    build_index(train)
    write_tfrecord(tmp_path / "validation-0", ONE)
    report = build_index(tmp_path / "validation-0")
    assert (report.written, report.summary.records) == (1, 1)
    assert from_files(tmp_path / "*-?").num_records == 16
    (tmp_path / "other").mkdir()
    other = write_tfrecord(tmp_path / "other" / "train-0", numbered_examples(7))
    assert build_index([train, other]).summary.records == 22
    assert from_files([other]).num_records == 7


def change_version(file):
    manifest = manifest_of(file)
    manifest.write_text(manifest.read_text().replace('"version":4', '"version":2'))
    manifest.with_name("bad_records.jsonl").write_text("[")


DEEP = "--force --verify=decode --on_bad=skip"  # as what was skipped is not known


@pytest.mark.parametrize(
    ("spoil", "message", "named"),
    [
        (lambda file: write_tfrecord(file, ONE), "train-1 changed since it was indexed", "train-1"),
        (lambda file: index_of(file).write_text("0 17\n" * 5), "is not the one that", "train-1"),
        (change_version, f"not an .* value 2 .*: .* index {DEEP}", r"train-\?'"),
    ],
)
def test_what_changed_is_refused_and_fixed(files, train, spoil, message, named):
    """Training on it is refused with a command; what the command does fixes it."""
    build_index(train)
    spoil(files[1])
    with refused(f"{message}.*/{named}$"):
        from_files(train)
    force = "not an" in message
    if force:  # or what the manifest knew would be forgotten
        with refused("Restore it, or start a new one for all files of this folder: --force"):
            build_index(train)
    written = 1 if named == "train-1" else 3
    damaged = manifest_of(files[1]).read_bytes() if force else b""
    assert build_index(train, force=force).written == written
    if force:
        assert manifest_of(files[1]).with_suffix(".json.damaged").read_bytes() == damaged
    from_files(train)


def test_a_file_that_is_gone_since(files, train, tmp_path):
    """A pattern matches what is there: a lost file would be left out without a word."""
    build_index(train)
    os.unlink(files[1])
    said = re.escape(f"{files[1]} was indexed and is gone. Restore it, or go on without it: ")
    with refused(f"{said}.* index '{tmp_path}/train-\\?'$"):
        from_files(train)
    assert from_files([files[0], files[2]]).num_records == 10  # which are named
    assert build_index(train).removed == 1
    assert from_files(train).num_records == 10


def test_a_file_of_a_set_that_is_gone_since(tmp_path):
    """The printed command says that it may be missing; other splits, and folders, do not count."""
    for split in ("train", "validation"):
        for number in range(3):
            write_tfrecord(tmp_path / f"{split}-{number:05}-of-00003", ONE)
    index_dir = tmp_path / "index"
    for place in ({}, {"index_dir": index_dir}):
        build_index(tmp_path / "*-of-*", **place)
    os.unlink(tmp_path / "train-00001-of-00003")
    for place in ({}, {"index_dir": index_dir}):
        assert from_files(tmp_path / "validation-*", **place).num_records == 3
        with refused("train-00001-of-00003 was indexed and is gone. .* index --allow_missing "):
            from_files(tmp_path / "*-of-*", **place)
    deeper = tmp_path / "index" / "deeper"
    deeper.mkdir()
    file = write_tfrecord(deeper / "train-9", ONE)
    (tmp_path / "index" / "train-8").write_bytes(Path(file).read_bytes())
    build_index([file, tmp_path / "index" / "train-8"], index_dir=tmp_path / "both")
    os.unlink(file)
    assert from_files(tmp_path / "*" / "train-?", index_dir=tmp_path / "both").num_records == 1
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in [*tmp_path.glob("*-of-*"), tmp_path / "index_manifest.json"]:
        path.rename(moved / path.name)
    with refused("moved/train-00001-of-00003 was indexed and is gone. "):
        from_files(moved / "train-*-of-?????")
    assert from_files(moved / "validation-*").num_records == 3


def test_another_file_of_the_same_size_and_time(files):
    build_index(files[0])
    status = os.stat(files[0])
    record = frame_record(bytes(1000))
    Path(files[0]).write_bytes((record * (status.st_size // len(record) + 1))[: status.st_size])
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    with refused(r"this index is not that of .*: expected a record of"):
        from_files(files[0])


def test_index_dir(files, train, tmp_path):
    """For data in a folder that cannot be written to."""
    index_dir, other = tmp_path / "index", tmp_path / "other"
    build_index(train, index_dir=index_dir)
    names = ["index_manifest.json", "train-0.idx", "train-1.idx", "train-2.idx"]
    assert sorted(os.listdir(index_dir)) == names
    assert from_files(train, index_dir=index_dir).num_records == 15
    with refused("3 of 3 files have no index"):
        from_files(train)
    other.mkdir()
    write_tfrecord(other / "train-0", ONE)
    with refused("cannot hold the index of 2 files that are all named train-0"):
        build_index([files[0], other / "train-0"], index_dir=index_dir)
    os.unlink(files[1])
    assert build_index(train, index_dir=index_dir).removed == 1
    assert sorted(os.listdir(index_dir)) == [name for name in names if name != "train-1.idx"]


def test_an_index_dir_that_another_set_uses(files, tmp_path):
    index_dir = tmp_path / "index"
    build_index(files[0], index_dir=index_dir)
    (tmp_path / "other").mkdir()
    other = write_tfrecord(tmp_path / "other" / "train-0", numbered_examples(2))
    with refused(f"holds the index of {files[0]}, which that of {other} would replace"):
        build_index(other, index_dir=index_dir)
    os.rename(files[0], tmp_path / "moved")  # a set that moved is no other set
    assert build_index(other, index_dir=index_dir).written == 1


def test_every_fault_is_named(files, train, tmp_path):
    """Not only the first one; good files are indexed all the same; the others are as they were."""
    framing = [("train-1", 1, "length CRC"), ("train-2", 5, "cut short")]
    offset = scan_records(files[1])[1][0]
    ruin_data(files[1], 3)
    ruin(files[1], offset)  # a length
    os.truncate(files[2], os.path.getsize(files[2]) - 1)
    (tmp_path / "train-8").write_bytes(gzip.compress(Path(files[0]).read_bytes()))
    report, faults = index_with_faults(train)
    assert faults == [*framing, ("train-8", None, "GZIP file")]
    assert report.reasons == {"length CRC": 1, "cut short": 1, "GZIP file": 1}
    assert (report.written, report.bad_files) == (1, 3)
    assert list(times(tmp_path)) == ["train-0.idx"]
    (tmp_path / "train-8").unlink()
    _, faults = index_with_faults(train, CRC)
    assert faults == [framing[0], ("train-1", 3, "data CRC"), framing[1]]


def test_bad_records_are_skipped(files, train, tmp_path):
    """By the index, by the list of them, and by what is described."""
    found = scan_records(files[1])
    ruin_data(files[1], 1)
    ruin(files[1], found[3][0])
    report, faults = index_with_faults(train, CRC, **SKIP)
    assert faults == [("train-1", 1, "data CRC"), ("train-1", 3, "length CRC")]
    assert (report.written, report.summary.records, report.summary.skipped) == (3, 13, 2)
    assert np.loadtxt(files[1] + ".idx").tolist() == list(map(list, [found[0], found[2], found[4]]))
    listed = bad_records(tmp_path)
    assert [(one["file"], one["record"], one["reason"]) for one in listed] == faults
    assert [(one["offset"], one["size"]) for one in listed] == [found[1], found[3]]
    assert all(one["detail"] for one in listed)
    dataset = from_files(train)
    counts = [(file.num_records, file.num_skipped) for file in dataset.files]
    assert counts == [(4, 0), (3, 2), (6, 0)]
    # Where nothing listens, the first one is named.
    with pytest.raises(IndexFaultsError, match=r"the first: .*train-1: record 1, .*: data CRC: "):
        build_index(train, CRC, force=True)
    # Another run finds nothing to do, whatever it asks for, and leaves the index as it is; but what
    # it finds indexed counts too.
    assert build_index(train).unchanged == 3
    assert len(np.loadtxt(files[1] + ".idx")) == 3
    message = r"2 of 15 records are bad, 13.33%, over `max_bad_fraction` 0.00%"
    with pytest.raises(IndexFaultsError, match=message):
        build_index(train, on_bad="skip", max_bad_fraction=0)


def test_the_list_of_bad_records_follows_the_files(files, train, tmp_path):
    for file in files:
        ruin_data(file, 2)
    index_with_faults(train, CRC, **SKIP)
    assert [one["file"] for one in bad_records(tmp_path)] == ["train-0", "train-1", "train-2"]
    write_tfrecord(files[1], numbered_examples(9))
    build_index(train, CRC)
    assert [one["file"] for one in bad_records(tmp_path)] == ["train-0", "train-2"]
    os.unlink(files[2])
    build_index(train, CRC)
    assert [one["file"] for one in bad_records(tmp_path)] == ["train-0"]
    write_tfrecord(files[0], numbered_examples(9))
    build_index(train, CRC)
    assert not (tmp_path / "bad_records.jsonl").exists()


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        (range(3), "train-{:05}-of-00003"),
        (range(3), "x-train.tfrecord-{:05}-of-00003"),
        (range(4), "train-{}-of-4"),
        (range(1, 5), "train_{:03}_of_004.tfrec"),
        (range(1, 13), "train-{}-of-12"),
    ],
)
def test_a_missing_file_of_a_set(tmp_path, numbers, name):
    """As after a download that ended early; numbered from 0 or 1, padded or not, and in a folder
    whose name looks like a pattern. To name a part of a whole set is no mistake.
    """
    folder = tmp_path / "data [v2]"
    folder.mkdir()
    files = [write_tfrecord(folder / name.format(n), ONE) for n in numbers]
    pattern = folder / "*train*"
    assert build_index(files[:2]).written == 2
    assert build_index(pattern).summary.records == len(files)
    os.unlink(files[1])
    said = f"{re.escape(files[1])} is missing, of the set of {re.escape(files[0])}: restore it, or"
    for given in (files[:1], pattern):
        with refused(f"{said} .*--allow_missing"):
            build_index(given)
    assert build_index(pattern, allow_missing=True).summary.records == len(files) - 1
    assert run("index", pattern).returncode == 1
    assert run("index", "--allow_missing", pattern).returncode == 0
    assert from_files(pattern).num_records == len(files) - 1


def test_names_that_only_look_like_sets(tmp_path):
    huge = write_tfrecord(tmp_path / "huge-00000-of-999999999", ONE)
    with refused("huge-000000001-of-999999999 is missing, of the set of"):
        build_index(huge)
    (tmp_path / "fold_1_of_5").mkdir()
    assert build_index(write_tfrecord(tmp_path / "fold_1_of_5" / "train", ONE)).written == 1


def test_records_that_tfds_counted(tmp_path):
    """As after a copy that was cut at the end of a record. Damaged records count as there."""
    files = [tmp_path / f"x-train.tfrecord-{number:05}-of-00002" for number in range(2)]
    for number, file in enumerate(files):
        write_tfrecord(file, numbered_examples(3, first=3 * number))
    splits = [{"name": "train", "shardLengths": ["3", "4"]}]
    about = tmp_path / "dataset_info.json"
    about.write_text(json.dumps({"name": "x", "splits": splits}))
    with refused(f"{files[1]} holds 3 records, 4 by dataset_info.json: restore .*--allow_missing"):
        build_index(tmp_path / "x-train*")
    assert build_index(tmp_path / "x-train*", allow_missing=True).summary.records == 6
    for text in (
        "{",
        "[]",
        '{"splits": 1}',
        json.dumps({"splits": [splits[0] | {"name": "test"}]}),
    ):
        about.write_text(text)
        assert build_index(tmp_path / "x-train*").summary.records == 6


@pytest.mark.usefixtures("checked_here")
def test_deeper_levels(tmp_path):
    """What each level finds, and that a deeper one is asked for only once."""
    image = jpeg(20, 30)
    examples = [
        {"image": image, "label": 1, "text": "a"},
        {"image": image, "label": -1},
        {"image": image},
        {"label": 1},
        {"image": 3, "label": 1},
        {"image": image, "label": "one"},
        {"image": b"", "label": 1},
        {"image": image, "label": 5},
        {"image": b"no image", "label": 1},
        {"image": image, "label": 0},
    ]
    file = tmp_path / "train"
    records = [frame_record(encode_example(example)) for example in examples]
    ruined = bytearray(records[0])
    ruined[40] ^= 1
    file.write_bytes(b"".join([*records, frame_record(b"\xff\xff"), bytes(ruined)]))

    def reasons(level, key=None, **changes):
        label = ClassLabel(num_classes=5, key=key)
        checks = Checks(verify=level, decoder="dali", label=label, **changes)
        report, faults = index_with_faults(file, checks, **SKIP)
        return report.written, {record: reason for _, record, reason in faults}

    crc = {11: "data CRC"}
    missing = {3: "image missing", 4: "image kind", 10: "not an Example"}
    labels = {1: "label range", 2: "label missing", 5: "label kind", 7: "label range"}
    schema = crc | missing | labels | {6: "empty image"}
    assert reasons("framing") == (1, {})
    assert reasons("crc") == (1, crc)
    assert reasons("schema") == (1, schema)
    assert reasons("decode") == (1, schema | {8: "text"})
    for level in ("framing", "crc", "schema", "decode"):
        assert reasons(level) == (0, {})  # covered by the last run
    large = dict.fromkeys((0, 9), "too many pixels")
    assert reasons("decode", max_pixels=100) == (1, schema | {8: "text"} | large)
    texts = dict.fromkeys(range(10), "label missing") | {0: "label kind", 6: "empty image"}
    assert reasons("schema", key="text") == (1, texts | missing | crc)


def test_what_the_manifest_says(tmp_path):
    """Features and labels, of each file and of the whole."""
    first = [{"image": jpeg(20, 30), "label": label} for label in (0, 1)]
    second = [
        {"image": jpeg(20, 90), "label": 3},
        {"image": jpeg(9, 9), "label": 4, "extra": "here"},
    ]
    for number, examples in enumerate((first, second)):
        write_tfrecord(tmp_path / f"train-{number}", examples)
    summary = build_index(tmp_path / "train-?", SCHEMA).summary
    assert summary.verified == {"schema": 2}
    features = {
        key: (feature.kinds, feature.lengths, feature.records)
        for key, feature in summary.features.items()
    }
    assert features == {
        "extra": (("bytes_list",), (1, 1), 1),
        "image": (("bytes_list",), (1, 1), 4),
        "label": (("int64_list",), (1, 1), 4),
    }
    assert summary.without == {"extra": (str(tmp_path / "train-0"), 0)}
    label = summary.features["label"]
    assert label.range == (0, 4)
    assert label.counts == ((0, 1), (1, 1), (3, 1), (4, 1))


def test_keys_that_no_preset_has(tmp_path):
    file = write_tfrecord(tmp_path / "train", [{"photo": jpeg(9, 9), "class": 1}])
    said = "hold 'class', 'photo', not the keys of TF-slim or tfds or raw pixels: name the two"
    with refused(said):
        build_index(file, SCHEMA)
    label = ClassLabel(key="class")
    assert build_index(file, Checks(verify="schema", image_key="photo", label=label)).written == 1
    records = from_files(file, image_key="photo")
    assert spec_of(records, "global", Preprocess(), label=label).label_range == (1, 1)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/proc/none", "to /proc/none: .*Name another folder with `index_dir`"),
        ("/dev/null/x", "Cannot write to /dev/null/x: Not a directory"),
    ],
)
def test_a_folder_that_cannot_be_written(files, folder, message):
    with refused(message):
        build_index(files, index_dir=folder)


def test_a_full_disk(files, train, tmp_path):
    """A limit on the size of files stands for it; nothing is left behind, and what stood before
    stands.
    """
    build_index(files[0])
    index = index_of(files[0]).read_bytes()
    write_tfrecord(tmp_path / "train-1", [{"label": 1}] * 5000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    message = "File too large. The files there are complete. Free some space, or: name"
    try:
        with refused(f"Cannot write to {tmp_path}: {message}"):
            build_index(train, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert index_of(files[0]).read_bytes() == index
    assert hidden(tmp_path) == []
    from_files(files[0])


def test_a_file_that_cannot_be_read(files, train):
    """It goes away between being found and being read: it is named, the others are indexed."""

    def lose(progress):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(files[2])

    report, faults = index_with_faults(train, num_processes=1, on_progress=lose)
    assert faults == [("train-2", None, "unreadable")]
    assert report.written == 2


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """A file of 20 MB, whose check takes a while and has a process of its own."""
    record = frame_record(encode_example({"image/encoded": bytes(1000), "image/class/label": 1}))
    path = tmp_path_factory.mktemp("long") / "train"
    path.write_bytes(record * 20_000)
    return path


def test_a_file_that_is_still_being_written(long_file, tmp_path):
    file = shutil.copy(long_file, tmp_path)

    def write_on(progress):
        with open(file, "ab") as stream:
            stream.write(frame_record(b"more"))

    _, faults = index_with_faults(file, SCHEMA, on_progress=write_on)
    assert faults == [("train", None, "unreadable")]


def test_a_listener_that_fails_ends_the_run(long_file):
    """As printing to a pipe that was closed does: an error, never a wait without end."""

    def fail(progress):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        build_index(long_file, SCHEMA, on_progress=fail)
    assert os.listdir(os.path.dirname(long_file)) == ["train"]


@pytest.mark.slow
def test_runs_at_once_do_no_harm(tmp_path):
    """Some over the same files, some over others in the same folder; every one succeeds, and
    nothing is lost.
    """
    for number in range(20):
        name = f"{'train' if number % 2 else 'validation'}-{number:02d}"
        write_tfrecord(tmp_path / name, [TINY] * 100)
    code = "import sys; from dali_tf_input import build_index; build_index(sys.argv[1], force=True)"
    runs = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path / name], stderr=subprocess.PIPE)
        for name in ("train-??", "validation-??", "*-??", "train-??")
    ]
    for process in runs:
        assert (process.communicate()[1], process.returncode) == (b"", 0)
    dataset = from_files(tmp_path / "*-??", image_key="image")
    assert dataset.num_records == 20 * 100
    assert hidden(tmp_path) == []


@pytest.mark.slow
def test_a_worker_that_is_killed(files, long_file):
    """As by the kernel, for its memory: the file is named, and the others are checked."""
    before = children_of(os.getpid())

    def kill_worker(progress):
        for child in set(children_of(os.getpid())) - set(before) if progress.files == 0 else ():
            if "dali_tf_input.processes" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)

    first = Path(files[0]).with_name("first")
    os.link(long_file, first)
    arguments = {"num_processes": 1, "on_progress": kill_worker, **SKIP}
    report, faults = index_with_faults([first, *files], SCHEMA, **arguments)
    assert faults == [("first", None, "unreadable")]
    assert report.written == 3


def test_big_records_and_files_are_not_read(tmp_path):
    """A record of nearly 2 GB and a file of 5 GB, of holes: their index is a matter of headers."""
    file = tmp_path / "train"
    size = 2**31 - 100
    length = size.to_bytes(8, "little")
    with open(file, "wb") as stream:
        for start in (0, size + 16):
            stream.seek(start)
            stream.write(length + masked_crc(length).to_bytes(4, "little"))
        stream.seek(2 * (size + 16))
        stream.write(frame_record(b"last"))
    before = bytes_read()
    assert build_index(file).summary.records == 3
    assert bytes_read() - before < 10_000_000
    assert np.loadtxt(f"{file}.idx", np.int64)[2].tolist() == [2 * (size + 16), 20]


def test_a_copied_set_is_recognized(files, train, tmp_path):
    """By its framing: nothing is checked again, and what was skipped stays skipped."""
    ruin_data(files[1], 2)
    index_with_faults(train, CRC, **SKIP)
    copied = tmp_path.with_name(f"{tmp_path.name}-copied")
    subprocess.run(["cp", "-r", tmp_path, copied], check=True)
    with refused("changed since it was indexed .its time of modification differs: it was copied"):
        from_files(copied / "train-*")
    listed = (copied / "bad_records.jsonl").read_bytes()
    report, faults = index_with_faults(copied / "train-*")
    assert (report.unchanged, report.written, faults) == (3, 0, [])
    assert (report.summary.records, report.summary.verified) == (14, {"crc": 3})
    records = from_files(copied / "train-*")
    assert (records.num_records, (copied / "bad_records.jsonl").read_bytes()) == (14, listed)
    assert build_index(copied / "train-*").unchanged == 3  # which knows the new times


def test_a_set_that_moved_is_recognized_in_its_new_place(files, train, tmp_path):
    index_dir = tmp_path / "index"
    build_index(train, CRC, index_dir=index_dir)
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in files:
        shutil.copyfile(file, moved / os.path.basename(file))
        os.unlink(file)
    report = build_index(moved / "train-*", index_dir=index_dir)
    assert (report.unchanged, report.summary.verified) == (3, {"crc": 3})
    entries = Manifest.read(str(index_dir)).entries.values()
    assert {entry.folder for entry in entries} == {str(moved)}


@pytest.mark.parametrize("place", ["data", "footer", "length", "header"])
def test_a_file_that_was_written_is_not_recognized(files, train, place):
    """Another record of the same size has another CRC; so has the last one."""
    build_index(train, CRC)
    extents = scan_records(files[1])
    offset, size = extents[-1 if place == "footer" else 1]
    data = Path(files[1]).read_bytes()
    body = data[offset + 12 : offset + size - 4]
    new = frame_record(body[:-1] + bytes([body[-1] ^ 1]))
    if place == "length":  # two records become one of the same size in all
        new = frame_record(bytes(size + extents[2][1] - 16))
        size += extents[2][1]
    if place == "header":  # what is no record any more takes up as many bytes
        new = bytes([data[offset] ^ 1]) + data[offset + 1 : offset + size]
    Path(files[1]).write_bytes(data[:offset] + new + data[offset + size :])
    report, faults = index_with_faults(train)
    if place == "header":
        assert faults == [("train-1", 1, "length CRC")]
    else:
        assert (report.unchanged, report.summary.verified) == (2, {"crc": 3})


def test_a_touched_file_is_checked_as_deeply_as_before(files, train):
    """Or its bad records would come back with the next run at the default level."""
    ruin_data(files[1], 2)
    index_with_faults(train, CRC, **SKIP)
    os.utime(files[1])
    flags = "--on_bad=skip --max_bad_fraction=0.2[0-9]*"
    with refused(f"changed since .* -m dali_tf_input index {flags} {files[1]}"):
        from_files(train)
    report, faults = index_with_faults(train)
    assert (report.summary.records, faults) == (14, [])  # recognized
    report, faults = index_with_faults(train, force=True)
    assert faults == [("train-1", 2, "data CRC")]
    report, _ = index_with_faults(train, force=True, **SKIP)
    assert (report.summary.records, report.summary.verified) == (14, {"crc": 3})


def test_a_run_does_not_undo_what_another_found_meanwhile(files, train, tmp_path):
    ruin_data(files[1], 2)
    others = []

    def run_another(progress):
        if not others:
            others.append(None)
            others.append(build_index(train, CRC, **SKIP))

    report = build_index(train, on_progress=run_another)
    assert others[1].written == 3
    assert (report.summary.records, report.summary.verified) == (14, {"crc": 3})
    assert from_files(train).num_records == 14
    assert (tmp_path / "bad_records.jsonl").exists()


def test_what_is_skipped_is_kept_when_a_run_ends_early(files, train, monkeypatch):
    """As with kill -9: what was committed is not checked again, files with faults included."""
    monkeypatch.setattr("dali_tf_input.index.build._COMMIT_SECONDS", 0)
    monkeypatch.setattr("dali_tf_input.index.build._COMMIT_RATIO", 0)
    for file in files:
        ruin_data(file, 2)

    def stop(progress):
        if progress.files == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(train, CRC, num_processes=1, on_progress=stop, **SKIP)
    report, _ = index_with_faults(train, CRC, **SKIP)
    assert (report.unchanged, report.written) == (2, 1)


def test_a_bad_first_record_hides_nothing(tmp_path):
    """Keys and features are found in the first valid records."""
    examples = [{"image": jpeg(9, 9), "label": number} for number in range(4)]
    del examples[1]["label"]
    file = write_tfrecord(tmp_path / "train", examples)
    ruin(file, 30)
    for level in ("framing", "crc"):
        build_index(file, Checks(verify=level), force=True, **SKIP)
        with refused("`label.key` 'label' is not in record 1 of"):
            spec_of(from_files(file), "global", Preprocess())
    _, faults = index_with_faults(file, SCHEMA, **SKIP)
    assert faults == [("train", 0, "data CRC"), ("train", 1, "label missing")]
    assert from_files(file).features["label"].range == (2, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("crashing_decoder")
def test_records_that_end_the_decoder(tmp_path):
    """Each is named and skipped, unnoticed by the caller; no other record is decoded twice."""
    examples, bad = numbered_examples(9), {2: "crashes", 4: "hangs", 7: "crashes"}
    for number, fault in bad.items():
        examples[number]["image/encoded"] += fault.encode()
    write_tfrecord(tmp_path / "train-0", examples)
    write_tfrecord(tmp_path / "train-1", numbered_examples(3))
    checks = Checks(verify="decode", decoder="dali")
    report, faults = index_with_faults(tmp_path / "train-?", checks, num_processes=1, **SKIP)
    assert faults == [("train-0", number, f"{fault} the decoder") for number, fault in bad.items()]
    assert report.summary.records == 12 - len(bad)
    # Only images of the same call are decoded twice.
    assert len((tmp_path / "count").read_text()) <= 12 - len(bad) + 7


@pytest.mark.usefixtures("crashing_decoder")
def test_ctrl_c_while_an_image_hangs(tmp_path, monkeypatch):
    """The processes end, also the one that hangs, and the next run starts others."""
    (first, second), count = numbered_examples(2), tmp_path / "count"
    second["image/encoded"] += b"hangs"
    file = write_tfrecord(tmp_path / "train", [first, second])
    checks = Checks(verify="decode", decoder="dali")

    code = CRASHING.replace('["CODE"], 2', '["CODE"], 600')  # seconds that an image may take
    monkeypatch.setenv("CODE", code)
    monkeypatch.setattr("dali_tf_input.processes._CODE", code)
    decoding = []

    def interrupt():
        wait_until(count.exists)
        decoding.extend(one for child in children_of(os.getpid()) for one in children_of(child))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        build_index(file, checks)
    assert decoding
    wait_until(lambda: not any(os.path.exists(f"/proc/{process}") for process in decoding))
    write_tfrecord(file, [first])
    assert build_index(file, checks).written == 1


def test_odd_names(tmp_path):
    """Spaces, quotes, dollars, line breaks, other scripts, and the longest name."""
    names = ["a b", "it's", "$HOME", "line\nbreak", "*?[x]", "x" * 249, "\u00e9\u4e2d"]
    files = [write_tfrecord(f"{tmp_path}/{name}", numbered_examples(3)) for name in names]
    for file in files:
        ruin(file, 60)
    _, faults = index_with_faults(files, CRC, **SKIP)
    assert sorted(faults) == sorted((name, 0, "data CRC") for name in names)
    assert from_files(files).num_records == 14
    for file in files:
        os.utime(file)
        with refused("changed since"):
            from_files(file)


def test_names_that_are_not_utf8(tmp_path):
    """Neither backend can open them: of files, and of folders."""
    file = write_tfrecord(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"), [TINY])
    for files in (file, [file], tmp_path / "*"):
        with refused(r"/\\xff\\xfe' is not the name of a file in UTF-8, .*: rename it"):
            build_index(files)
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    with refused("is not the name of a file in UTF-8"):
        build_index(write_tfrecord(tmp_path / os.fsdecode(b"\xff") / "train", [TINY]))


def test_links_count_once(files, tmp_path):
    (tmp_path / "a-link").symlink_to(files[0])
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert find_files(tmp_path / "*-*") == tuple(files)
    with refused("broken is a link to a file that does not exist"):
        find_files(tmp_path / "b*")


def test_records_are_read_while_indexes_are_replaced(files, train, monkeypatch):
    """New indexes stand there before their manifest: who reads waits for it."""
    build_index(train)
    for file in files:
        ruin_data(file, 1)
    monkeypatch.setattr("dali_tf_input.index.build._COMMIT_SECONDS", 1000)  # all files at once
    replaced, counts = threading.Event(), []
    commit = Staging.commit

    def commit_late(staging, name, *target):
        if name == "index_manifest.json":
            replaced.set()
            time.sleep(0.3)  # the reader has all the time to meet them
        commit(staging, name, *target)

    monkeypatch.setattr(Staging, "commit", commit_late)
    index = threading.Thread(
        target=build_index, args=(train, CRC), kwargs={"num_processes": 1, **SKIP}
    )
    index.start()
    assert replaced.wait(60)
    counts.append(from_files(train).num_records)
    index.join()
    assert counts == [from_files(train).num_records]


def test_labels_from_1_are_not_indexed_on_the_way(tmp_path, monkeypatch):
    """Early commits, of few records, cannot know: files with such labels wait."""
    monkeypatch.setattr("dali_tf_input.index.build._COMMIT_SECONDS", 0)
    monkeypatch.setattr("dali_tf_input.index.build._COMMIT_RATIO", 0)
    for file in range(6):
        examples = [{**TINY, "label": label + 1} for label in range(10)]
        write_tfrecord(tmp_path / f"train-{file}", examples)
    checks = Checks(verify="schema", label=ClassLabel(num_classes=10))
    with pytest.raises(IndexFaultsError, match=r"only seem to be out of range.*count from 1"):
        build_index(tmp_path / "train-?", checks, num_processes=1, **SKIP)
    assert not list(tmp_path.glob("*.idx"))


def test_a_file_that_joins_others_is_checked_as_they_are(tmp_path):
    """So that the labels of all are known, or of none."""
    for number in range(2):
        write_tfrecord(tmp_path / f"part-{number}", numbered_examples(3))
    files = tmp_path / "part-?"
    build_index(files, Checks(verify="schema"))
    write_tfrecord(tmp_path / "part-2", numbered_examples(4))
    report = build_index(files)
    assert (report.written, report.unchanged) == (1, 2)
    assert report.summary.verified == {"schema": 3}
    assert len(Records.from_files(files).labels) == 10
    write_tfrecord(tmp_path / "part-3", numbered_examples(2))
    build_index(tmp_path / "part-3")  # by itself it joins none
    assert build_index(files).summary.verified == {"framing": 1, "schema": 3}


def test_a_split_without_labels_joins_none_that_has_them(tmp_path):
    write_tfrecord(tmp_path / "train-00000-of-00001", numbered_examples(3))
    build_index(tmp_path / "*-of-*", SCHEMA)
    unlabeled = [{"image/encoded": jpeg(8, 8, seed=number)} for number in range(2)]
    write_tfrecord(tmp_path / "test-00000-of-00001", unlabeled)
    assert build_index(tmp_path / "*-of-*").summary.verified == {"framing": 1, "schema": 1}
