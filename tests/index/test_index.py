"""Indexing whole sets: what is written, what is left alone, what is left out, and what survives a
kill.
"""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SCRIPTS, image_zoo, jpeg, numbered_examples, write_tfrecord

from dali_tf_input import Checks, DatasetSpec, IndexFaultsError, InputError, build_index, find_files
from dali_tf_input.index.build import IndexReport
from dali_tf_input.index.example import encode_example
from dali_tf_input.index.manifest import Manifest
from dali_tf_input.index.tfrecord import frame_record, read_data
from dali_tf_input.order import read_index

ROOM = Path(sys.executable).parent


@pytest.fixture
def files(tmp_path):
    """Three files of 4, 5 and 6 records."""
    return [
        write_tfrecord(
            tmp_path / f"train-{number}", numbered_examples(4 + number, first=10 * number)
        )
        for number in range(3)
    ]


def pattern(files):
    return os.path.join(os.path.dirname(files[0]), "train-?")


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


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*.idx")}


def ruin(file, position, value=b"\xff"):
    """Overwrites bytes of a file."""
    with open(file, "r+b") as stream:
        stream.seek(position)
        stream.write(value)


def test_equals_tfrecord2idx(files):
    """Line for line what DALI's own tool writes."""
    build_index(files[0])
    subprocess.run(
        [sys.executable, ROOM / "tfrecord2idx", files[0], files[0] + ".theirs"],
        check=True,
        capture_output=True,
    )
    assert Path(files[0] + ".idx").read_text() == Path(files[0] + ".theirs").read_text()
    assert len(Path(files[0] + ".idx").read_text().splitlines()) == 4


def test_a_run_over_unchanged_files_does_nothing(files):
    first = build_index(pattern(files))
    before = snapshot(os.path.dirname(files[0]))
    manifest = Path(files[0]).with_name("index_manifest.json")
    written = manifest.stat().st_mtime_ns
    again = build_index(pattern(files))
    assert (first.written, first.unchanged, first.summary.records) == (3, 0, 15)
    assert (again.written, again.unchanged, again.summary.records) == (0, 3, 15)
    assert snapshot(os.path.dirname(files[0])) == before
    assert manifest.stat().st_mtime_ns == written
    assert build_index(pattern(files), force=True).written == 3


def test_a_change_touches_only_itself(files, tmp_path):
    build_index(pattern(files))
    before = snapshot(tmp_path)
    write_tfrecord(Path(files[1]), numbered_examples(2))
    added = write_tfrecord(tmp_path / "train-9", numbered_examples(1))
    os.unlink(files[2])
    report = build_index(pattern(files))
    assert (report.written, report.unchanged, report.removed, report.summary.records) == (
        2,
        1,
        1,
        7,
    )
    after = snapshot(tmp_path)
    assert set(after) == {Path(file + ".idx") for file in (files[0], files[1], added)}
    assert after[Path(files[0] + ".idx")] == before[Path(files[0] + ".idx")]
    assert sorted(Manifest.read(str(tmp_path)).entries) == ["train-0", "train-1", "train-9"]


def test_a_part_of_the_files_leaves_the_others(files, tmp_path):
    build_index(pattern(files))
    write_tfrecord(tmp_path / "validation-0", numbered_examples(1))
    report = build_index(tmp_path / "validation-0")
    assert (report.written, report.summary.records) == (1, 1)
    assert DatasetSpec.from_files(tmp_path / "*-?").num_records == 16


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda file: write_tfrecord(Path(file), numbered_examples(1)),
            "changed since it was indexed",
        ),
        (lambda file: os.utime(file, ns=(1, 1)), "changed since it was indexed"),
        (
            lambda file: os.unlink(file + ".idx"),
            "1 of 3 files have no index, the first is .*train-1",
        ),
        (
            lambda file: Path(file + ".idx").write_text("0 17\n"),
            "this index is not the one that the manifest describes",
        ),
        (
            lambda file: os.unlink(Path(file).with_name("index_manifest.json")),
            "the manifest has no entry for this index",
        ),
        (
            lambda file: Path(file).with_name("index_manifest.json").write_text("{"),
            "is not an index manifest of this version",
        ),
        (
            lambda file: Path(file).with_name("index_manifest.json").write_text("[]"),
            "is not an index manifest of this version",
        ),
        (
            lambda file: Path(file).with_name("index_manifest.json").write_text('{"format": 1}'),
            "is not an index manifest of this",
        ),
    ],
)
def test_what_changed_is_refused_and_mended(files, spoil, message):
    """Training on it is refused with a command; what the command does mends it."""
    build_index(pattern(files))
    spoil(files[1])
    with pytest.raises(InputError, match=f"{message}.* -m dali_tf_input.index "):
        DatasetSpec.from_files(pattern(files))
    assert build_index(pattern(files)).written >= 1
    DatasetSpec.from_files(pattern(files))


def test_another_file_of_the_same_size_and_time(files):
    build_index(files[0])
    status = os.stat(files[0])
    record = frame_record(bytes(1000))
    Path(files[0]).write_bytes((record * (status.st_size // len(record) + 1))[: status.st_size])
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match=r"this index is not that of .*: expected a record of"):
        DatasetSpec.from_files(files[0])


def test_the_manifest_of_another_version(files, tmp_path):
    build_index(pattern(files))
    manifest = tmp_path / "index_manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 99'))
    with pytest.raises(
        InputError,
        match=f"{manifest} is not .*Invalid enum value 99 .*version.* -m dali_tf_input.index",
    ):
        DatasetSpec.from_files(pattern(files))
    assert build_index(pattern(files)).written == 3


def test_index_dir(files, tmp_path):
    """For data in a folder that cannot be written to."""
    build_index(pattern(files), index_dir=tmp_path / "index")
    assert sorted(os.listdir(tmp_path / "index")) == [
        "index_manifest.json",
        *(f"train-{number}.idx" for number in range(3)),
    ]
    dataset = DatasetSpec.from_files(pattern(files), index_dir=tmp_path / "index")
    assert dataset.num_records == 15
    with pytest.raises(InputError, match="3 of 3 files have no index"):
        DatasetSpec.from_files(pattern(files))
    (tmp_path / "other").mkdir()
    write_tfrecord(tmp_path / "other" / "train-0", numbered_examples(1))
    with pytest.raises(
        InputError, match="cannot hold the index of 2 files that are all named train-0"
    ):
        build_index([files[0], tmp_path / "other" / "train-0"], index_dir=tmp_path / "index")


def test_files_of_two_folders(files, tmp_path):
    (tmp_path / "other").mkdir()
    other = write_tfrecord(tmp_path / "other" / "train-0", numbered_examples(7))
    assert build_index([pattern(files), other]).summary.records == 22
    assert DatasetSpec.from_files([other]).num_records == 7


def test_moved_folder(files, tmp_path):
    build_index(pattern(files))
    (tmp_path / "new").mkdir()
    for path in list(tmp_path.iterdir()):
        if path.name != "new":
            path.rename(tmp_path / "new" / path.name)
    assert DatasetSpec.from_files(tmp_path / "new" / "train-?").num_records == 15


def test_every_fault_is_named(files):
    """Not only the first one; sound files are indexed all the same; the others are as they were."""
    offsets = [[offset for offset, _ in places(file)] for file in files]
    ruin(files[1], offsets[1][1])  # a length
    ruin(files[1], offsets[1][3] + 40)  # data, which framing does not see
    os.truncate(files[2], os.path.getsize(files[2]) - 1)
    report, faults = index_with_faults(pattern(files))
    assert faults == [("train-1", 1, "length CRC"), ("train-2", 5, "cut short")]
    assert report.reasons == {"length CRC": 1, "cut short": 1}
    assert (report.written, report.bad_files) == (1, 2)
    assert [path.name for path in snapshot(os.path.dirname(files[0]))] == ["train-0.idx"]
    report, faults = index_with_faults(pattern(files), Checks(verify="crc"))
    assert faults == [
        ("train-1", 1, "length CRC"),
        ("train-1", 3, "data CRC"),
        ("train-2", 5, "cut short"),
    ]


def places(file):
    from dali_tf_input.index.tfrecord import scan_records

    return list(scan_records(file))


def test_bad_records_are_left_out(files):
    """By the index, by the list of them, and by both backends."""
    found = places(files[1])
    ruin(files[1], found[1][0] + 40)
    ruin(files[1], found[3][0])
    report, faults = index_with_faults(
        pattern(files), Checks(verify="crc"), on_bad="skip", max_bad_fraction=0.5
    )
    assert faults == [("train-1", 1, "data CRC"), ("train-1", 3, "length CRC")]
    assert (report.written, report.summary.records, report.summary.skipped) == (3, 13, 2)
    assert read_index(files[1] + ".idx").tolist() == list(map(list, [found[0], found[2], found[4]]))
    lines = [
        json.loads(line)
        for line in Path(files[1]).with_name("bad_records.jsonl").read_text().splitlines()
    ]
    assert [(line["file"], line["record"], line["reason"]) for line in lines] == faults
    assert [(line["offset"], line["size"]) for line in lines] == [found[1], found[3]]
    assert all(line["detail"] for line in lines)
    dataset = DatasetSpec.from_files(pattern(files))
    assert (dataset.records_per_file, dataset.skipped_per_file) == ((4, 3, 6), (0, 2, 0))
    # Another run finds nothing to do, whatever it asks for, and leaves the index as it is.
    assert build_index(pattern(files)).unchanged == 3
    assert len(read_index(files[1] + ".idx")) == 3


def test_the_list_of_bad_records_follows_the_files(files, tmp_path):
    for file in files:
        ruin(file, places(file)[2][0] + 40)
    index_with_faults(pattern(files), Checks(verify="crc"), on_bad="skip", max_bad_fraction=0.5)
    bad_records = tmp_path / "bad_records.jsonl"

    def listed():
        return [json.loads(line)["file"] for line in bad_records.read_text().splitlines()]

    assert listed() == ["train-0", "train-1", "train-2"]
    write_tfrecord(Path(files[1]), numbered_examples(9))
    build_index(pattern(files), Checks(verify="crc"))
    assert listed() == ["train-0", "train-2"]
    os.unlink(files[2])
    build_index(pattern(files), Checks(verify="crc"))
    assert listed() == ["train-0"]
    write_tfrecord(Path(files[0]), numbered_examples(9))
    build_index(pattern(files), Checks(verify="crc"))
    assert not bad_records.exists()


@pytest.mark.parametrize("what", ["records", "bytes", "files"])
def test_too_many_bad_records_are_refused(tmp_path, what):
    """By any of three counts; nothing with faults is indexed then, and what stood before stands."""
    small = [{"image": b"x", "label": 1}] * 98
    for number in range(100 if what == "files" else 3):
        write_tfrecord(tmp_path / f"train-{number:03d}", small)
    if what == "records":
        for position in (3, 30, 60):
            ruin(tmp_path / "train-001", places(str(tmp_path / "train-002"))[position][0] + 13)
    elif what == "bytes":
        with open(tmp_path / "train-001", "ab") as stream:
            stream.write(b"x" * 3000)
    else:
        for number in (1, 2):
            (tmp_path / f"train-{number:03d}").write_bytes(b"version https://git-lfs")
    with pytest.raises(
        IndexFaultsError,
        match=rf"[\d,]+ of [\d,]+ {what} are bad, \d+\.\d+%, over `max_bad_fraction` 1.00%",
    ) as caught:
        build_index(tmp_path / "train-???", Checks(verify="crc"), on_bad="skip")
    assert caught.value.report.written == (98 if what == "files" else 2)
    assert not (tmp_path / "train-001.idx").exists()
    assert not (tmp_path / "bad_records.jsonl").exists()
    report = build_index(
        tmp_path / "train-???", Checks(verify="crc"), on_bad="skip", max_bad_fraction=0.9
    )
    assert report.summary.records == {"records": 291, "bytes": 294, "files": 98 * 98}[what]
    dataset = DatasetSpec.from_files(tmp_path / "train-???", image_key="image", label_key="label")
    assert (
        dataset.num_records == report.summary.records
    )  # files without any record are no part of it
    assert 0 not in dataset.records_per_file


def test_a_file_without_records_alone(tmp_path):
    (tmp_path / "train").write_bytes(b"")
    build_index(tmp_path / "train", on_bad="skip", max_bad_fraction=1)
    with pytest.raises(InputError, match="All 1 records of these 1 files are skipped"):
        DatasetSpec.from_files(tmp_path / "train")


@pytest.mark.slow
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

    def reasons(level, **changes):
        arguments = {"on_bad": "skip", "max_bad_fraction": 1}
        checks = Checks(verify=level, num_classes=5, **changes)
        report, faults = index_with_faults(file, checks, **arguments)
        return report.written, {record: reason for _, record, reason in faults}

    schema = {
        1: "label range",
        2: "label missing",
        3: "image missing",
        4: "image kind",
        5: "label kind",
        6: "empty image",
        7: "label range",
        10: "not an Example",
    }
    assert reasons("framing") == (1, {})
    assert reasons("crc") == (1, {11: "data CRC"})
    assert reasons("schema") == (1, schema | {11: "data CRC"})
    assert reasons("decode") == (1, schema | {8: "text", 11: "data CRC"})
    for level in ("framing", "crc", "schema", "decode"):
        assert reasons(level) == (0, {})  # covered by the last run
    assert reasons("decode", max_pixels=100) == (
        1,
        schema | {0: "too many pixels", 8: "text", 9: "too many pixels", 11: "data CRC"},
    )
    with_text = dict.fromkeys(range(10), "label missing") | {
        0: "label kind",
        3: "image missing",
        4: "image kind",
    }
    assert reasons("schema", label_key="text") == (
        1,
        with_text | {10: "not an Example", 11: "data CRC"},
    )


def test_what_the_manifest_says(tmp_path):
    """Features, labels and images, of each file and of the whole."""
    sizes = [(20, 30), (40, 20), (20, 90), (30, 30)]
    for number in range(2):
        examples = [
            {
                "image": jpeg(*sizes[2 * number + position], mode="L" if position else "RGB"),
                "label": 3 * number + position,
            }
            for position in range(2)
        ]
        if number:
            examples[1]["extra"] = "only here"
        write_tfrecord(tmp_path / f"train-{number}", examples)
    summary = build_index(tmp_path / "train-?", Checks(verify="decode")).summary
    assert summary.verified == {"decode": 2}
    assert {
        key: (feature.kinds, feature.lengths, feature.records)
        for key, feature in summary.features.items()
    } == {
        "extra": (("bytes_list",), (1, 1), 1),
        "image": (("bytes_list",), (1, 1), 4),
        "label": (("int64_list",), (1, 1), 4),
    }
    assert summary.without == {"extra": (str(tmp_path / "train-0"), 0)}
    assert (summary.labels.range, summary.labels.runs, summary.labels.num_classes) == (
        (0, 4),
        ((0, 1), (3, 4)),
        4,
    )
    assert summary.images.formats == {"JPEG": 2, "grayscale JPEG": 2}
    assert (summary.images.median_size, summary.images.largest_size) == ((20, 20), (40, 90))
    document = json.loads((tmp_path / "index_manifest.json").read_text())
    assert document["version"] == 2
    assert document["whole"]["records"] == 4
    assert document["whole"]["features"]["extra"]["records"] == 1
    entry = document["files"]["train-1"]
    assert (entry["records"], entry["verified"], entry["skipped"]) == (2, "decode", 0)
    assert entry["size"] == os.path.getsize(tmp_path / "train-1")
    assert entry["features"]["extra"]["first_without"] == 0
    assert Manifest.read(str(tmp_path)).entries["train-0"].images.largest_size == (40, 30)


@pytest.mark.parametrize("decoder", ["dali", "tf_data", "both"])
def test_decode_names_what_is_no_good_image(tmp_path, decoder):
    zoo = image_zoo()
    examples = [{"image": encoded, "label": 1} for encoded, _, _ in zoo.values()]
    write_tfrecord(tmp_path / "train", examples)
    checks = Checks(verify="decode", decoder=decoder)
    report, faults = index_with_faults(
        tmp_path / "train", checks, on_bad="skip", max_bad_fraction=1
    )
    names = list(zoo)
    assert {names[record]: reason for _, record, reason in faults} == {
        name: reason for name, (_, _, reason) in zoo.items() if reason
    }
    formats = [image_format for _, image_format, _ in zoo.values() if image_format]
    assert report.summary.images.formats == {name: formats.count(name) for name in formats}


def test_keys_that_no_preset_has(tmp_path):
    write_tfrecord(tmp_path / "train", [{"photo": jpeg(9, 9), "class": 1}])
    with pytest.raises(
        InputError,
        match=(
            r"The records hold 'class', 'photo', but not the keys of TF-slim or tfds: name the two"
        ),
    ):
        build_index(tmp_path / "train", Checks(verify="schema"))
    assert (
        build_index(
            tmp_path / "train", Checks(verify="schema", image_key="photo", label_key="class")
        ).written
        == 1
    )
    assert DatasetSpec.from_files(
        tmp_path / "train", image_key="photo", label_key="class"
    ).label_range == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_bad": "ignore"}, "`on_bad` must be one of 'error', 'skip', got 'ignore'"),
        ({"max_bad_fraction": 1.5}, r"`max_bad_fraction` must be in \[0, 1\], got 1.5"),
        ({"num_processes": 0}, "`num_processes` must be at least 1 or None, got 0"),
        (
            {"index_dir": "/proc/none"},
            "Cannot write to /proc/none: .*Name another folder with `index_dir`",
        ),
        ({"index_dir": "/dev/null/x"}, "Cannot write to /dev/null/x: Not a directory"),
    ],
)
def test_refuses(files, arguments, message):
    with pytest.raises(InputError, match=message):
        build_index(files, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"verify": "all"},
            "`verify` must be one of 'framing', 'crc', 'schema', 'decode', got 'all'",
        ),
        ({"decoder": "gpu"}, "`decoder` must be one of 'both', 'dali', 'tf_data', got 'gpu'"),
        ({"num_classes": 0}, "`num_classes` must be at least 1 or None, got 0"),
        ({"max_pixels": 0}, "`max_pixels` must be at least 1, got 0"),
    ],
)
def test_checks_refuse(changes, message):
    with pytest.raises(InputError, match=message):
        Checks(**changes)


def test_a_full_disk(files, tmp_path):
    """A limit on the size of files stands for it; nothing is left behind, and what stood before
    stands.
    """
    build_index(files[0])
    index = Path(files[0] + ".idx").read_bytes()
    write_tfrecord(tmp_path / "train-1", [{"label": 1}] * 5000)
    code = f"""if True:
        import resource
        from dali_tf_input import build_index
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            build_index({pattern(files)!r}, force=True)
        except ValueError as error:
            print(error)
    """
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert (
        f"Cannot write to {tmp_path}: File too large. The files there are complete. Free some"
        " space, or: name" in process.stdout
    )
    assert Path(files[0] + ".idx").read_bytes() == index
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
    DatasetSpec.from_files(files[0])


def test_a_file_that_cannot_be_read(files, monkeypatch):
    """It goes away between being found and being read: it is named, the others are indexed."""
    lost = []

    def lose(progress):
        if not lost:
            lost.append(os.unlink(files[2]))

    report, faults = index_with_faults(pattern(files), num_processes=1, on_progress=lose)
    assert faults == [("train-2", None, "unreadable")]
    assert report.written == 2


def test_a_file_that_is_still_being_written(tmp_path):
    file = write_tfrecord(tmp_path / "train", [{"image": bytes(1000), "label": 1}] * 60_000)

    def write_on(progress):
        with open(file, "ab") as stream:
            stream.write(frame_record(b"more"))

    _, faults = index_with_faults(file, Checks(verify="schema"), on_progress=write_on)
    assert faults == [("train", None, "unreadable")]


KILLED = """if True:
    import sys
    from dali_tf_input.index import Checks, build, build_index
    build._COMMIT_SECONDS = 0.02
    build_index(sys.argv[1], Checks(verify="crc"), force=True, on_bad="skip")
"""


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path):
    """Killed with its workers again and again, a run leaves old indexes or new ones; the next run
    goes on.
    """
    generator = random.Random(0)
    for number in range(60):
        file = write_tfrecord(
            tmp_path / f"train-{number:02d}",
            [{"image": generator.randbytes(50), "label": 1}] * (200 + number),
        )
        ruin(file, places(file)[7][0] + 30)
    build_index(tmp_path / "train-??")
    old = {path: path.read_bytes() for path in tmp_path.glob("*.idx")}
    new = {
        path: b"".join(
            line for number, line in enumerate(text.splitlines(keepends=True)) if number != 7
        )
        for path, text in old.items()
    }
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "train-??"], check=True)
    seconds = time.perf_counter() - start
    outcomes = set()
    for number in range(14):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, tmp_path / "train-??"], start_new_session=True
        )
        time.sleep(seconds * (0.4 + 0.05 * number))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        indexes = {path: path.read_bytes() for path in tmp_path.glob("*.idx")}
        assert set(indexes) == set(old)
        assert all(text in (old[path], new[path]) for path, text in indexes.items())
        json.loads((tmp_path / "index_manifest.json").read_text())
        before = {text == new[path] for path, text in indexes.items()}
        outcomes.add(frozenset(before))
        build_index(tmp_path / "train-??")  # goes on: mends an index that stands without its entry
        DatasetSpec.from_files(tmp_path / "train-??")
        build_index(tmp_path / "train-??", force=True)
    assert len(outcomes) > 1  # some before, some after
    assert (
        sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    )  # what the killed ones left


def test_a_parent_killed_alone_takes_its_workers_along(tmp_path):
    write_tfrecord(tmp_path / "train", [{"image": bytes(1000), "label": 1}] * 100_000)
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "train"])
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    while not (workers := Path(children).read_text().split()) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    for _ in range(100):
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a worker outlived its parent")


def test_runs_at_once_do_no_harm(tmp_path):
    """Some over the same files, some over others in the same folder; every one succeeds, and
    nothing is lost.
    """
    for number in range(40):
        write_tfrecord(
            tmp_path / f"{'train' if number % 2 else 'validation'}-{number:02d}",
            [{"image": b"x", "label": 1}] * 300,
        )
    code = "import sys; from dali_tf_input import build_index; build_index(sys.argv[1], force=True)"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / name], stderr=subprocess.PIPE, text=True
        )
        for name in ("train-??", "validation-??", "*-??", "train-??")
    ]
    for run in runs:
        assert (run.wait(), run.stderr.read()) == (0, "")
        run.stderr.close()
    assert (
        DatasetSpec.from_files(tmp_path / "*-??", image_key="image", label_key="label").num_records
        == 40 * 300
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_worker_that_is_killed(files):
    """As by the kernel, for its memory: the file is named, and the others are gone through."""
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False
    ).stdout.split()

    def kill_worker(progress):
        if progress.files == 0:
            children = subprocess.run(
                ["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False
            ).stdout.split()
            for child in set(children) - set(found):
                if "index.worker" in Path(f"/proc/{child}/cmdline").read_text():
                    os.kill(int(child), signal.SIGKILL)

    big = write_tfrecord(
        Path(files[0]).with_name("first"),
        [{"image/encoded": bytes(2000), "image/class/label": 1}] * 60_000,
    )
    report, faults = index_with_faults(
        [big, *files],
        Checks(verify="schema"),
        num_processes=1,
        on_progress=kill_worker,
        on_bad="skip",
        max_bad_fraction=1,
    )
    assert faults == [("first", None, "unreadable")]
    assert report.written == 3


def test_big_records_and_files_are_not_read(tmp_path):
    """A record of nearly 2 GB and a file of 5 GB, of holes: their index is a matter of headers."""
    from dali_tf_input.index.tfrecord import masked_crc

    file = tmp_path / "train"
    size = 2**31 - 100
    with open(file, "wb") as stream:
        for _ in range(2):
            length = size.to_bytes(8, "little")
            stream.write(length + masked_crc(length).to_bytes(4, "little"))
            stream.seek(size + 4, os.SEEK_CUR)
        stream.truncate()
        stream.write(frame_record(b"last"))
    os.truncate(file, 2 * (size + 16))
    with open(file, "ab") as stream:
        stream.write(frame_record(b"last"))
    start = time.perf_counter()
    assert build_index(file).summary.records == 3
    assert time.perf_counter() - start < 5
    assert read_index(f"{file}.idx")[2].tolist() == [2 * (size + 16), 20]


def test_fuzzed_examples(tmp_path):
    """Records whose data is damaged, under a CRC that fits: each is sound or a named fault; the
    backends' checks never crash.
    """
    generator = random.Random(3)
    images = [encoded for encoded, image_format, _ in image_zoo().values() if image_format]
    records = []
    for _ in range(1500):
        data = bytearray(
            encode_example({"image": generator.choice(images), "label": generator.randrange(10)})
        )
        for _ in range(generator.randint(1, 3)):
            position = generator.randrange(len(data))
            match generator.randrange(4):
                case 0:
                    data[position] ^= 1 << generator.randrange(8)
                case 1:
                    del data[position : position + generator.randint(1, 30)]
                case 2:
                    data[position:position] = generator.randbytes(generator.randint(1, 30))
                case _:
                    data[position : position + 9] = data[:9]
            data = data or bytearray(b"x")
        records.append(frame_record(bytes(data)))
    (tmp_path / "train").write_bytes(
        frame_record(encode_example({"image": images[0], "label": 1})) + b"".join(records)
    )
    report, faults = index_with_faults(
        tmp_path / "train", Checks(verify="decode"), on_bad="skip", max_bad_fraction=1
    )
    assert report.summary.records + len(faults) == 1501
    assert len(faults) > 500
    assert "unreadable" not in report.reasons


def test_a_touched_file_is_looked_at_as_deep_as_before(files):
    """Or its bad records would come back with the next `make train`, which asks for the default
    only.
    """
    ruin(files[1], places(files[1])[2][0] + 40)
    index_with_faults(pattern(files), Checks(verify="crc"), on_bad="skip", max_bad_fraction=0.5)
    os.utime(files[1])
    with pytest.raises(
        InputError, match=f"changed since .* -m dali_tf_input.index --on_bad=skip {files[1]}"
    ):
        DatasetSpec.from_files(pattern(files))
    report, faults = index_with_faults(pattern(files))
    assert faults == [("train-1", 2, "data CRC")]
    report, _ = index_with_faults(pattern(files), on_bad="skip", max_bad_fraction=0.5)
    assert (report.summary.records, report.summary.verified) == (14, {"crc": 3})
    assert build_index(pattern(files), force=True).summary.verified == {"framing": 3}  # by order


def test_a_run_does_not_undo_what_another_found_meanwhile(files, tmp_path):
    ruin(files[1], places(files[1])[2][0] + 40)
    command = [
        sys.executable,
        SCRIPTS / "index_tfrecords.py",
        "--verify=crc",
        "--on_bad=skip",
        "--max_bad_fraction=0.5",
        pattern(files),
    ]
    other = []

    def run_another(progress):
        if not other:
            other.append(subprocess.run(command, check=True, capture_output=True))

    report = build_index(pattern(files), on_progress=run_another)
    assert (report.summary.records, report.summary.verified) == (14, {"crc": 3})
    assert DatasetSpec.from_files(pattern(files)).num_records == 14
    assert (tmp_path / "bad_records.jsonl").exists()


def test_what_is_left_out_is_kept_when_a_run_ends_early(files, monkeypatch):
    """As with kill -9: what was committed so far is not gone through again, files with faults
    included.
    """
    monkeypatch.setattr("dali_tf_input.index.build._COMMIT_SECONDS", 0)
    for file in files:
        ruin(file, places(file)[2][0] + 40)
    done = []

    def stop(progress):
        done.append(progress.files)
        if progress.files == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(
            pattern(files),
            Checks(verify="crc"),
            on_bad="skip",
            max_bad_fraction=0.5,
            num_processes=1,
            on_progress=stop,
        )
    report, _ = index_with_faults(
        pattern(files), Checks(verify="crc"), on_bad="skip", max_bad_fraction=0.5
    )
    assert (report.unchanged, report.written) == (2, 1)


def test_what_stands_counts_too(files):
    ruin(files[1], places(files[1])[2][0] + 40)
    index_with_faults(pattern(files), Checks(verify="crc"), on_bad="skip", max_bad_fraction=0.5)
    with pytest.raises(
        IndexFaultsError, match=r"1 of 15 records are bad, 6.67%, over `max_bad_fraction` 0.00%"
    ):
        build_index(pattern(files), on_bad="skip", max_bad_fraction=0)


def test_a_bad_first_record_hides_nothing(tmp_path):
    """Keys and features are found in the first records that are sound."""
    examples = [{"image": jpeg(9, 9), "label": number} for number in range(4)]
    del examples[1]["label"]
    file = write_tfrecord(tmp_path / "train", examples)
    ruin(file, 30)
    for level in ("framing", "crc"):
        build_index(file, Checks(verify=level), on_bad="skip", max_bad_fraction=0.5, force=True)
        with pytest.raises(InputError, match="The records hold 'image', not the keys"):
            DatasetSpec.from_files(file)
    _, faults = index_with_faults(
        file, Checks(verify="schema"), on_bad="skip", max_bad_fraction=0.5
    )
    assert faults == [("train", 0, "data CRC"), ("train", 1, "label missing")]
    assert DatasetSpec.from_files(file).label_range == (2, 3)


CRASHING = """if True:
    import os, signal, sys, time
    sys.path[:] = sys.argv[1:]
    from dali_tf_input.index import trial_decode
    make_decode = trial_decode.make_trial_decode

    def make_crashing_decode(checks):
        decode = make_decode(checks)

        def crash(encoded):
            if b"crash" in encoded:
                os.kill(os.getpid(), signal.SIGSEGV)
            while b"hang" in encoded:
                time.sleep(1)
            return decode(encoded)

        return crash

    trial_decode.make_trial_decode = make_crashing_decode
    from dali_tf_input.index.worker import serve
    serve()
"""


def test_a_record_that_crashes_the_decoder(tmp_path, monkeypatch):
    """It is named and left out, and so is a second one; the caller does not notice."""
    monkeypatch.setattr("dali_tf_input.index.pool._CODE", CRASHING)
    examples = numbered_examples(9)
    for number in (2, 7):
        examples[number]["image/encoded"] += b"crash"
    write_tfrecord(tmp_path / "train-0", examples)
    write_tfrecord(tmp_path / "train-1", numbered_examples(3))
    checks = Checks(verify="decode", decoder="dali")
    report, faults = index_with_faults(
        tmp_path / "train-?", checks, on_bad="skip", max_bad_fraction=0.5, num_processes=1
    )
    assert faults == [("train-0", 2, "crashes the decoder"), ("train-0", 7, "crashes the decoder")]
    assert report.summary.records == 10


def test_a_record_that_hangs_the_decoder(tmp_path, monkeypatch):
    monkeypatch.setattr("dali_tf_input.index.pool._CODE", CRASHING)
    monkeypatch.setattr("dali_tf_input.index.pool._LONGEST_DECODE", 2)
    examples = numbered_examples(9)
    examples[4]["image/encoded"] += b"hang"
    write_tfrecord(tmp_path / "train-0", examples)
    checks = Checks(verify="decode", decoder="dali")
    report, faults = index_with_faults(
        tmp_path / "train-?", checks, on_bad="skip", max_bad_fraction=0.5
    )
    assert faults == [("train-0", 4, "hangs the decoder")]
    assert report.summary.records == 8


ODD_ENTRIES = [
    {"records": 4},
    {"records": 99},
    {"records": None},
    {"records": "5"},
    {"skipped": None},
    {"size": True},
    {"verified": "all"},
    {"checked_by": None},
    {"features": []},
    {"features": {"a": {}}},
    {"features": {"a": {"kinds": ["x"], "lengths": [], "records": 1, "first_without": None}}},
    {"labels": {"range": [1], "runs": None, "changes": 0}},
    {"labels": {"range": [1, 2], "runs": [[1]], "changes": 0}},
    {"images": {}},
    {"folder": 3},
]


@pytest.mark.parametrize("changes", ODD_ENTRIES, ids=str)
def test_a_manifest_that_was_tampered_with(files, tmp_path, changes):
    build_index(pattern(files))
    document = json.loads((tmp_path / "index_manifest.json").read_text())
    document["files"]["train-1"] |= changes
    (tmp_path / "index_manifest.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"-m dali_tf_input\.index "):
        DatasetSpec.from_files(pattern(files))
    assert build_index(pattern(files)).written >= 1
    assert DatasetSpec.from_files(pattern(files)).num_records == 15


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"null",
        b"3",
        b"[" * 200_000,
        b'{"file": 3}\n',
        b'{"format": "x", "version": 1}',
    ],
)
def test_files_of_ours_that_are_something_else(files, tmp_path, content):
    build_index(pattern(files))
    (tmp_path / "index_manifest.json").write_bytes(content)
    (tmp_path / "bad_records.jsonl").write_bytes(content + b"\n")
    with pytest.raises(
        InputError,
        match=(
            r"is not an index manifest of this version of dali_tf_input: .* -m dali_tf_input.index "
        ),
    ):
        DatasetSpec.from_files(pattern(files))
    ruin(files[1], places(files[1])[2][0] + 40)
    report, _ = index_with_faults(
        pattern(files), Checks(verify="crc"), on_bad="skip", max_bad_fraction=0.5
    )
    assert report.written == 3
    assert [
        json.loads(line)["file"]
        for line in (tmp_path / "bad_records.jsonl").read_text().splitlines()
    ] == ["train-1"]


def test_fuzzed_manifests(files, tmp_path):
    """Whatever becomes of the manifest, it is refused or describes the files as they are."""
    build_index(pattern(files), Checks(verify="schema"))
    manifest = tmp_path / "index_manifest.json"
    whole = manifest.read_bytes()
    generator = random.Random(5)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        position = generator.randrange(len(content))
        match generator.randrange(3):
            case 0:
                content[position] = generator.randrange(32, 127)
            case 1:
                del content[position : position + generator.randint(1, 20)]
            case _:
                content[position:position] = content[: generator.randint(1, 20)]
        manifest.write_bytes(content)
        try:
            assert DatasetSpec.from_files(pattern(files)).num_records == 15
        except InputError:
            refused += 1
    assert refused > 300


def test_odd_names(tmp_path):
    """Spaces, quotes, dollars, line breaks, bytes that are no UTF-8, and as long as a name may be."""
    names = [
        b"a b",
        b"it's",
        b"$HOME",
        b"line\nbreak",
        b"\xff\xfe",
        "\u00e9\u4e2d".encode(),
        b"*?[x]",
        b"x" * 249,
    ]
    for name in names:
        path = os.path.join(os.fsencode(tmp_path), name)
        write_tfrecord(Path(os.fsdecode(path)), numbered_examples(3))
        ruin(path, 60)
    files = [os.fsdecode(os.path.join(os.fsencode(tmp_path), name)) for name in names]
    _, faults = index_with_faults(files, Checks(verify="crc"), on_bad="skip", max_bad_fraction=0.5)
    assert sorted(faults) == sorted((os.fsdecode(name), 0, "data CRC") for name in names)
    assert DatasetSpec.from_files(files).num_records == 16
    for file in files:
        os.utime(file)
        with pytest.raises(InputError, match="changed since"):
            DatasetSpec.from_files(file)


def test_removed_files_of_an_index_dir(files, tmp_path):
    index_dir = tmp_path / "index"
    build_index(pattern(files), index_dir=index_dir)
    os.unlink(files[1])
    assert build_index(pattern(files), index_dir=index_dir).removed == 1
    assert sorted(os.listdir(index_dir)) == ["index_manifest.json", "train-0.idx", "train-2.idx"]


def test_an_index_dir_that_another_set_uses(files, tmp_path):
    index_dir = tmp_path / "index"
    build_index(files[0], index_dir=index_dir)
    (tmp_path / "other").mkdir()
    other = write_tfrecord(tmp_path / "other" / "train-0", numbered_examples(2))
    with pytest.raises(
        InputError, match=f"holds the index of {files[0]}, which that of {other} would replace"
    ):
        build_index(other, index_dir=index_dir)
    os.rename(files[0], tmp_path / "moved")  # a set that moved is no other set
    assert build_index(other, index_dir=index_dir).written == 1


def test_a_listener_that_fails_ends_the_run(tmp_path):
    """As printing to a pipe that was closed does: an error, never a wait without end."""
    write_tfrecord(tmp_path / "train", [{"image": bytes(1000), "label": 1}] * 60_000)

    def fail(progress):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        build_index(tmp_path / "train", Checks(verify="schema"), on_progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_framing_reads_no_data_but_the_first_record(tmp_path, monkeypatch):
    import io

    from dali_tf_input.index import file_check

    file = write_tfrecord(tmp_path / "train", [{"image": b"x", "label": 1}] * 20)
    read = []
    monkeypatch.setattr(
        file_check, "read_data", lambda *place: read.append(place) or read_data(*place)
    )
    nothing = {
        "decode": None,
        "crashing": {},
        "on_decode": print,
        "on_bad_record": print,
        "on_progress": lambda *_: None,
    }
    entry = file_check.check_file(file, io.BytesIO(), Checks(), **nothing)
    assert (entry.parsed, len(read)) == (1, 1)


def test_links_count_once(files, tmp_path):
    (tmp_path / "a-link").symlink_to(files[0])
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert find_files(tmp_path / "*-*") == tuple(files)
    with pytest.raises(InputError, match="broken is a link to a file that does not exist"):
        find_files(tmp_path / "b*")


def test_from_another_folder_with_modules_of_the_same_name(files, tmp_path):
    """The worker processes import what the program imported, whatever lies where it is now; and no
    guard is needed.
    """
    (tmp_path / "elsewhere").mkdir()
    for name in ("json.py", "array.py", "dali_tf_input.py"):
        (tmp_path / "elsewhere" / name).write_text("print('shadow'); raise SystemExit(3)")
    (tmp_path / "program.py").write_text(
        "import os, threading\nfrom dali_tf_input import"
        f" build_index\nos.chdir({str(tmp_path / 'elsewhere')!r})\nthread ="
        f" threading.Thread(target=lambda: print(build_index({files!r}).written)); thread.start();"
        " thread.join()\n"
    )
    process = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False
    )
    assert (process.stdout, process.stderr) == ("3\n", "")
    code = "import os; from dali_tf_input import build_index; os.chdir('elsewhere'); "
    code += f"print(build_index({files!r}, force=True).written)"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (process.stdout, process.stderr) == ("3\n", "")


def test_gzip_of_real_records(files, tmp_path):
    (tmp_path / "train-8").write_bytes(gzip.compress(Path(files[0]).read_bytes()))
    _, faults = index_with_faults(pattern(files))
    assert faults == [("train-8", None, "GZIP file")]
