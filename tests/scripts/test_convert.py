"""Making TFRecords: of images, of TFRecords, of samples."""

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import kilobytes
import numpy as np
import pytest
import tensorflow as tf
from commands import fails, rows, run
from conftest import (
    SCRIPTS,
    image_zoo,
    jpeg,
    nightly,
    numbered_examples,
    refused,
    scan_records,
    write_tfrecord,
)
from index.test_decoders import LOSSLESS
from PIL import Image

from dali_tf_input.cli.convert import writer
from dali_tf_input.cli.convert.table import list_rows
from dali_tf_input.cli.convert.writer import find_split
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.tfrecord import read_record
from dali_tf_input.storage.staging import Staging


def read_features(file):
    return [decode_example(read_record(str(file), offset)) for offset, _ in scan_records(str(file))]


def convert(*arguments):
    """Without asking decoders, as TensorFlow takes seconds to import in each process."""
    return run("convert", "--decoder=none", *arguments)


CARD = ["dataset_info.json", "features.json", "image.class.label.labels.txt", "metadata.json"]


def counts(process):
    shown = rows(process.stdout)
    return shown["train"], shown["validation"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of 10, 7 and 1 JPEGs; the files' numbers are their sizes."""
    root = tmp_path_factory.mktemp("photos")
    for class_name, count in (("zebra", 10), ("ant", 7), ("bee hive", 1)):
        (root / class_name).mkdir()
        for number in range(count):
            name, seed = f"{number}.{'JPEG' if number % 2 else 'jpg'}", 10 * count + number
            (root / class_name / name).write_bytes(jpeg(20 + number, 30 + number, seed=seed))
    (root / "labels.csv").write_text("not a class")
    return root


def test_convert(tmp_path, photos):
    process = convert("--validation_fraction=0.2", "--num_files=3", photos, tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    shown = rows(process.stdout)
    held_out = int(shown["validation"].split()[0])
    assert 1 <= held_out <= 9
    assert (shown["train"], shown["classes"]) == (f"{18 - held_out} images", "3")
    assert shown["left out"] == f"1 file (1 not an image), listed in {tmp_path}/out/left_out.jsonl"
    assert shown["files"].startswith("4, ")
    assert shown["next:"].partition(" ")[2] == f"-m dali_tf_input index '{tmp_path}/out/*-of-*'"
    files = [f"train-0000{number}-of-00003" for number in range(3)]
    names = [*CARD, "labels.txt", "left_out.jsonl", *files, "validation-00000-of-00001"]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(names)
    assert os.listdir(tmp_path) == ["out"]  # nothing beside it
    assert (tmp_path / "out" / "labels.txt").read_text() == "ant\nbee hive\nzebra\n"
    train = [record for file in files for record in read_features(tmp_path / "out" / file)]
    validation = read_features(tmp_path / "out" / "validation-00000-of-00001")
    seen = []
    for record in train + validation:
        values = {key: value[0] for key, (_, value) in record.items()}
        text, filename = values["image/class/text"].decode(), values["image/filename"].decode()
        assert values["image/class/label"] == ["ant", "bee hive", "zebra"].index(text)
        assert filename.startswith(f"{text}/")
        assert values["image/encoded"] == (photos / filename).read_bytes()
        number = int(filename.split("/")[1].split(".")[0])
        assert (values["image/height"], values["image/width"]) == (20 + number, 30 + number)
        seen.append((text, filename))
    assert len(set(seen)) == len(seen) == 18
    # At least one of each class of five, and never a whole class.
    texts, held = (
        [record["image/class/text"][1][0] for record in some] for some in (train, validation)
    )
    assert {*held} == {b"ant", b"zebra"}
    assert {*texts} == {b"ant", b"zebra", b"bee hive"}
    assert texts != sorted(texts)  # shuffled


def set_bytes(folder):
    """Returns the files of a set, but for its indexes and the one that has its folder's name."""
    paths = (path for path in Path(folder).iterdir() if path.suffix != ".idx")
    return {path.name: path.read_bytes() for path in paths if path.name != "dataset_info.json"}


@pytest.mark.slow
def test_convert_follows_the_seed(tmp_path, photos):
    """Whatever the number of processes."""
    for out, seed, processes in (("a", 1, 1), ("b", 1, 3), ("c", 2, 2)):
        arguments = (f"--seed={seed}", f"--num_processes={processes}", "--num_files=2")
        process = convert(*arguments, "--resize_shorter=22", photos, tmp_path / out)
        assert process.returncode == 0
    first, same, other = (set_bytes(tmp_path / out) for out in "abc")
    assert first == same != other


def test_convert_refuses(tmp_path, photos):
    out = tmp_path / "out"
    (tmp_path / "empty" / "class").mkdir(parents=True)
    (tmp_path / "bad" / "class").mkdir(parents=True)
    (tmp_path / "bad" / "class" / "a.jpg").write_text("no image")
    unreadable = "Not one of the 1 train images can be read; the last is "
    for arguments, message in (
        ([photos], "Name the folder of images and the folder to write to"),
        ([tmp_path / "none", out], "No file matches"),
        ([tmp_path / "empty", out], "none of the 1 class folders holds an image"),
        ([tmp_path / "empty" / "class", out], "has no sub-folders"),
        (["--num_files=99", photos, out], "cannot fill 99 files"),
        (["--num_files=0", photos, out], "`num_files` must be at least 1, got 0"),
        (["--quality=101", photos, out], "`quality` must be in [1, 100], got 101"),
        (["--validation_fraction=1", photos, out], "_fraction` must be in [0, 1), got 1.0"),
        ([photos, "/proc/none/out"], "Cannot write to /proc/none"),
        ([tmp_path / "bad", out], f"{unreadable}{tmp_path}/bad/class/a.jpg"),
        (["--max_left_out=2", photos, out], "`max_left_out` must be in [0, 1], got 2.0"),
        (["--split=test", "--validation_fraction=0.1", photos, out], "leave out --validation_frac"),
    ):
        fails(convert(*arguments), message)
    assert not out.exists()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_convert_replaces_sets_whole_or_not_at_all(tmp_path, photos):
    out = tmp_path / "out"
    assert convert("--num_files=3", photos, out).returncode == 0
    before = set_bytes(out)
    fails(convert("--num_files=2", photos, out), f"{out} holds a set already", "--overwrite")
    assert set_bytes(out) == before
    arguments = ["--num_files=2", "--validation_fraction=0", "--overwrite"]
    assert convert(*arguments, photos, out).returncode == 0
    files = ["train-00000-of-00002", "train-00001-of-00002"]
    assert sorted(os.listdir(out)) == sorted([*CARD, "labels.txt", "left_out.jsonl", *files])
    (out / "thesis.txt").write_text("mine")
    message = f"{out} holds thesis.txt, which is no part of such a set"
    fails(convert("--overwrite", photos, out), message)
    message = "cannot be replaced by a folder: name a new one inside it"
    fails(convert("--overwrite", photos, "."), message)


@pytest.mark.slow
def test_convert_of_any_image(tmp_path):
    """Kept, or made JPEG, RGB, upright, smaller; the unreadable are left out and listed."""
    zoo = image_zoo()
    (tmp_path / "photos" / "all").mkdir(parents=True)
    for name, (encoded, _, _) in zoo.items():
        (tmp_path / "photos" / "all" / f"{name}.jpg").write_bytes(encoded)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(zoo["jpeg"][0])).save(turned, "JPEG", exif=exif)
    (tmp_path / "photos" / "all" / "turned.jpeg").write_bytes(turned.getvalue())
    (tmp_path / "photos" / "all" / "lossless.jpg").write_bytes(LOSSLESS)
    (tmp_path / "photos" / "all" / "notes.txt").write_text("not an image")
    arguments = ("--validation_fraction=0", tmp_path / "photos", tmp_path / "out")
    said = "9 of 25 images are left out, more than 1.00%, such as "
    fails(convert(*arguments), said, "Nothing was written. Repair them, or leave them out", "=0.36")
    assert not (tmp_path / "out").exists()
    arguments = ("--max_left_out=0.5", *arguments)
    process = run("convert", "--num_processes=1", *arguments)
    assert (process.returncode, process.stderr) == (0, "")
    assert "12 files (11 unreadable, 1 not an image)" in rows(process.stdout)["left out"]
    lines = (tmp_path / "out" / "left_out.jsonl").read_text().splitlines()
    listed = list(map(json.loads, lines))
    assert [Path(line["path"]).name for line in listed if line["reason"] == "not an image"] == [
        "notes.txt"
    ]
    listed = [line for line in listed if line["reason"] != "not an image"]
    unreadable = {"cut_in_half", "cut_by_one", "cut_in_its_header", "huge", "no_height"}
    unreadable |= {"damaged_png", "empty", "zeros", "text", "html", "garbage"}
    assert {Path(line["path"]).stem for line in listed} == unreadable
    assert all(line["reason"] for line in listed)
    records = {
        record["image/filename"][1][0].decode().removeprefix("all/").split(".")[0]: {
            key: value[0] for key, (_, value) in record.items()
        }
        for record in read_features(tmp_path / "out" / "train-00000-of-00001")
    }
    assert set(records) == {*zoo, "turned", "lossless"} - unreadable
    # Pillow reads it and DALI does not: its bytes are not kept, its pixels are.
    assert rows(process.stdout)["damaged JPEG re-encoded"] == "1 image"
    lossless = np.asarray(Image.open(io.BytesIO(records.pop("lossless")["image/encoded"])))
    assert np.abs(lossless.astype(int) - np.asarray(Image.open(io.BytesIO(LOSSLESS)))).max() < 9
    for name in ("jpeg", "progressive", "with_a_tail", "grayscale"):
        assert records[name]["image/encoded"] == zoo[name][0]
    for name, record in records.items():
        image = Image.open(io.BytesIO(record["image/encoded"]))
        assert image.format == "JPEG"
        size = (60, 90) if name == "turned" else (90, 60)
        assert image.size == (record["image/width"], record["image/height"]) == size
        assert image.mode == ("L" if name == "grayscale" else "RGB")
        if name not in ("progressive", "turned", "ycck"):  # its transform was only claimed
            original = np.asarray(Image.open(io.BytesIO(zoo["jpeg"][0]))).astype(float)
            difference = np.abs(np.asarray(image.convert("RGB")) - original).mean()
            assert difference < (60 if name in ("grayscale", "cmyk") else 12), (name, difference)
    assert rows(process.stdout)["turned upright"] == "1 image"
    assert rows(process.stdout)["CMYK made RGB"] == "2 images"
    process = convert("--keep_orientation", "--overwrite", *arguments)
    assert rows(process.stdout)["EXIF orientation kept"] == "1 image"
    written = tmp_path / "out" / "train-00000-of-00001"
    kept = {record["image/encoded"][1][0] for record in read_features(written)}
    assert turned.getvalue() in kept
    flags = ["--decoder=dali", "--resize_shorter=30", "--quality=80", "--overwrite"]
    process = run("convert", *flags, *arguments)
    for record in read_features(written):
        image = Image.open(io.BytesIO(record["image/encoded"][1][0]))
        assert image.size in ((45, 30), (30, 45), (8, 8))
        assert image.getexif().get(0x0112, 1) == 1
    process = run("index", "--verify=decode", tmp_path / "out" / "train-*")
    assert process.returncode == 0, process.stderr  # all that is written can be trained on


def test_class_folders_without_images(tmp_path, photos):
    """All are named at once; or they have no records, and keep their numbers."""
    shutil.copytree(photos, tmp_path / "photos")
    for name, file in (("camel", "1.heic"), ("dog", "2.avif"), ("eel", None)):
        (tmp_path / "photos" / name).mkdir()
        if file:
            (tmp_path / "photos" / name / file).touch()
    process = convert(tmp_path / "photos", tmp_path / "out")
    fails(process, "3 of 6 class folders hold no image: camel, dog, eel. Convert")
    assert "--skip_unreadable" in process.stderr
    flags = ["--skip_unreadable", "--max_left_out=0.2"]
    assert convert(*flags, tmp_path / "photos", tmp_path / "out").returncode == 0
    names = (tmp_path / "out" / "labels.txt").read_text().split("\n")
    assert names == ["ant", "bee hive", "camel", "dog", "eel", "zebra", ""]
    listed = (tmp_path / "out" / "left_out.jsonl").read_text()
    assert "images of this format are not read (.heic)" in listed


def test_sixteen_bits_a_pixel_are_scaled(tmp_path):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    gray = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(gray).save(tmp_path / "photos" / "a" / "deep.png")
    arguments = ["--validation_fraction=0", tmp_path / "photos", tmp_path / "out"]
    assert convert(*arguments).returncode == 0
    (record,) = read_features(tmp_path / "out" / "train-00000-of-00001")
    image = np.asarray(Image.open(io.BytesIO(record["image/encoded"][1][0])))
    assert np.abs(image - gray / 256).mean() < 2


def test_convert_from_tfrecords(tmp_path):
    """Every record once, shuffled again; bad ones left out; unknown features kept."""
    examples = numbered_examples(50)
    for number, example in enumerate(examples):
        example |= {"note": f"record {number}", "image/height": -1}
    examples[7]["image/encoded"] = examples[7]["image/encoded"][:-30]
    for position in range(2):
        write_tfrecord(tmp_path / f"old-{position}", examples[25 * position : 25 * position + 25])
    (tmp_path / "labels.txt").write_text("".join(f"class {number}\n" for number in range(50)))
    source = tmp_path / "old-*"
    process = convert(source, tmp_path / "new")
    fails(process, "2 of 2 files have no index", "-m dali_tf_input index ")
    assert run("index", source).returncode == 0
    flags = ["--num_files=5", "--validation_fraction=0.2", "--max_left_out=0.1"]
    arguments = ["--decoder=dali", *flags, source]
    process = run("convert", *arguments, tmp_path / "new")
    assert (process.returncode, process.stderr) == (0, "")
    names = sorted(path.name for path in (tmp_path / "new").glob("*-of-*"))
    files = [f"train-0000{number}-of-00005" for number in range(5)]
    assert names == [*files, "validation-00000-of-00001"]
    written = [record for name in names for record in read_features(tmp_path / "new" / name)]
    labels = [record["image/class/label"][1][0] for record in written]
    assert sorted(labels) == [number for number in range(50) if number != 7]
    assert labels != sorted(labels)
    for record, label in zip(written, labels, strict=True):
        assert {key: values[0] for key, (_, values) in record.items()} == {
            key: value.encode() if isinstance(value, str) else value
            for key, value in examples[label].items()
        }
    (line,) = (tmp_path / "new" / "left_out.jsonl").read_text().splitlines()
    assert json.loads(line)["path"].startswith(f"{tmp_path}/old-0 at byte ")
    assert (tmp_path / "new" / "labels.txt").read_text() == (tmp_path / "labels.txt").read_text()
    flags = ["--resize_shorter=32", "--max_left_out=0.1"]
    assert convert(*flags, source, tmp_path / "small").returncode == 0
    for record in read_features(tmp_path / "small" / "train-00000-of-00001"):
        original = Image.open(
            io.BytesIO(examples[record["image/class/label"][1][0]]["image/encoded"])
        )
        image = Image.open(io.BytesIO(record["image/encoded"][1][0]))
        assert min(image.size) == min(32, *original.size)
        assert record["note"][1][0].decode() == f"record {record['image/class/label'][1][0]}"
        assert record["image/height"][1][0] == (image.height if min(original.size) > 32 else -1)


def test_tfrecords_keep_their_splits(tmp_path, photos):
    before = convert("--validation_fraction=0.3", photos, tmp_path / "old")
    assert before.returncode == 0
    assert run("index", f"{tmp_path}/old/*-of-*").returncode == 0
    process = convert("--num_files=2", f"{tmp_path}/old/*-of-*", tmp_path / "new")
    assert counts(process) == counts(before)

    def names(folder, split):
        files = (tmp_path / folder).glob(f"{split}-*-of-?????")
        records = [record for path in files for record in read_features(path)]
        keys = ("image/class/text", "image/filename")
        return sorted(tuple(record[key][1][0] for key in keys) for record in records)

    for split in ("train", "validation"):
        assert names("old", split) == names("new", split)
    arguments = ["--validation_fraction=0.5", f"{tmp_path}/old/*-of-*", tmp_path / "again"]
    process = convert(*arguments)
    assert counts(process) != counts(before)
    assert sum(int(count.split()[0]) for count in counts(process)) == 18
    process = convert("--overwrite", f"{tmp_path}/old/train-*", tmp_path / "old")
    fails(process, f"{tmp_path}/old holds the TFRecords to be read")


def test_splits_are_known_by_the_names_of_slim_and_tfds(tmp_path):
    for split, count in (("train", 5), ("validation", 3), ("test", 2)):
        file = tmp_path / f"test-photos-{split}.tfrecord-00000-of-00001"
        write_tfrecord(file, numbered_examples(count))
    pattern = f"{tmp_path}/*.tfrecord-?????-of-?????"
    assert run("index", pattern).returncode == 0
    process = convert("--num_files=1", pattern, tmp_path / "all")
    assert (*counts(process), rows(process.stdout)["test"]) == ("5 images", "3 images", "2 images")
    pattern = f"{tmp_path}/*-[tv][ra]*.tfrecord-?????-of-?????"
    process = convert("--num_files=1", pattern, tmp_path / "out")
    assert counts(process) == ("5 images", "3 images")
    for split, names in {
        "train": ("train-0-of-4", "latest-0", "validated.tfrecord"),
        "validation": ("a/validation-0-of-4", "x_val-3"),
        "test": ("cub-test.tfrecord-0-of-1", "test2017-0-of-4", "testing-0"),
    }.items():
        assert {find_split(name) for name in names} == {split}


def test_convert_never_takes_away_what_is_not_its_own(tmp_path, photos):
    out = tmp_path / "out"
    assert convert(photos, out).returncode == 0
    (out / "train-notes.md").write_text("mine")
    said = "holds train-notes.md, which is no part of such a set"
    fails(convert("--overwrite", photos, out), said)
    os.unlink(out / "train-notes.md")
    (out / "train-00000-of-00009").mkdir()
    fails(convert("--overwrite", photos, out), "holds train-00000-of-00009, which is no part")


def test_convert_of_odd_names_and_depths(tmp_path):
    """Names that are no UTF-8; pixels whose value range is unknown are left out."""
    root = os.fsencode(tmp_path / "photos")
    for name in (b"c/a\xff.jpg", b"c/a\nb.jpg", b"d/bad\xff.jpg", b"d/good.jpg"):
        path = Path(os.fsdecode(os.path.join(root, name)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" if name.startswith(b"d/bad") else jpeg(9, 9))
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / "photos" / "d" / "float.tif")
    Image.fromarray(np.ones((9, 9), np.int32)).save(tmp_path / "photos" / "d" / "integer.tif")
    Image.new("1", (70_000, 1)).save(tmp_path / "photos" / "d" / "wide.png")
    flags = ["--validation_fraction=0", "--max_left_out=0.9"]
    process = convert(*flags, tmp_path / "photos", tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    assert rows(process.stdout)["train"] == "3 images"
    lines = (tmp_path / "out" / "left_out.jsonl").read_text().splitlines()
    listed = list(map(json.loads, lines))
    reasons = {os.fsencode(line["path"]).rsplit(b"/", 1)[1]: line["reason"] for line in listed}
    assert set(reasons) == {b"bad\xff.jpg", b"float.tif", b"integer.tif", b"wide.png"}
    assert reasons[b"float.tif"] == "pixels of mode F, whose value range is unknown"
    assert reasons[b"wide.png"].startswith("70000x1: a JPEG holds 65535 pixels each way")
    assert (tmp_path / "out" / "labels.txt").read_bytes() == b"c\nd\n"
    written = read_features(tmp_path / "out" / "train-00000-of-00001")
    names = {record["image/filename"][1][0] for record in written}
    assert names == {b"c/a\xff.jpg", b"c/a\nb.jpg", b"d/good.jpg"}
    for name in (b"e\nf", b"e\xff", "a\x85b".encode(), "a\u2028b".encode(), b"e "):
        os.mkdir(os.path.join(root, name))
        fails(convert(tmp_path / "photos", tmp_path / "x"), "cannot be the name of a class")
        os.rmdir(os.path.join(root, name))


def test_files_without_a_readable_image_are_none(tmp_path):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number in range(8):
        encoded = jpeg(9, 9, seed=number) if number < 2 else b"x%d" % number
        (tmp_path / "photos" / "a" / f"{number}.jpg").write_bytes(encoded)
    arguments = ["--num_files=6", "--validation_fraction=0", "--max_left_out=0.9"]
    process = convert(*arguments, tmp_path / "photos", tmp_path / "out")
    assert process.returncode == 0, process.stderr
    names = sorted(path.name for path in (tmp_path / "out").glob("*-of-*"))
    train = [name for name in names if name.startswith("train")]
    assert train == [f"train-{number:05d}-of-{len(train):05d}" for number in range(len(train))]
    assert 1 <= len(train) <= 2
    assert run("index", f"{tmp_path}/out/*-of-*").returncode == 0


@pytest.mark.slow
def test_a_converter_killed_alone_leaves_nothing_running(tmp_path, photos):
    command = [sys.executable, SCRIPTS / "make_sample_tfrecords.py", "--num_images=4096"]
    command += [tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    workers = []
    while not workers and process.poll() is None:
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        started = [child for task in tasks for child in task.read_text().split()]
        workers = [child for child in started if "dali_tf_input.processes" in command_of(child)]
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert workers
    for _ in range(300):  # half a minute: a worker may have to wait for a slow disk
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a worker outlived its parent")
    assert convert(photos, tmp_path / "out").returncode == 0
    assert os.listdir(tmp_path) == ["out"]


def command_of(process):
    """Returns the words of a process's command; none where it is gone or a zombie."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def test_the_number_of_files_follows_the_size(tmp_path, photos, monkeypatch):
    """Files of 100 to 200 MB; here of kilobytes.

    And whatever the calling program holds: a process that is forked from one that feeds TensorFlow
    waits for ever when Python collects a dataset's iterator there, whose threads it does not have.
    """
    numbers = tf.data.Dataset.range(10**6).map(lambda number: number + 1, num_parallel_calls=2)
    iterator = iter(numbers.prefetch(2))
    next(iterator)
    unreachable = [iterator]
    unreachable.append(unreachable)
    del iterator, unreachable
    from dali_tf_input.cli.convert import writer
    from dali_tf_input.cli.convert.writer import Record, Split, write_splits

    monkeypatch.setattr(writer, "_FILE_BYTES", 150_000)
    splits = [
        Split(name="train", items=range(900), num_files=None),
        Split(name="validation", items=range(20), num_files=None),
    ]
    written = write_splits(str(tmp_path / "out"), splits, kilobytes.make_kilobytes, labels=None)
    assert (written.num_files, written.records) == (6 + 1, {"train": 900, "validation": 20})
    sizes = [os.path.getsize(path) for path in sorted((tmp_path / "out").glob("train-*"))]
    assert len(sizes) == 6
    assert all(100_000 < size < 200_000 for size in sizes)
    assert Record(None, "").notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, nightly(16)])
def test_convert_killed_at_any_moment(tmp_path, photos, kills):
    """The set is there whole, the old one or the new one, or not at all; the next run clears up."""
    command = [sys.executable, "-m", "dali_tf_input", "convert", "--overwrite", "--num_files=4"]
    command += ["--decoder=none", photos, tmp_path / "out"]
    subprocess.run([*command, "--seed=0"], check=True, capture_output=True)
    start = time.perf_counter()
    subprocess.run([*command, "--seed=1"], check=True, capture_output=True)
    seconds = time.perf_counter() - start
    new = set_bytes(tmp_path / "out")
    subprocess.run([*command, "--seed=0"], check=True, capture_output=True)
    old = set_bytes(tmp_path / "out")
    assert old != new
    for number in range(kills):
        options = {"start_new_session": True, "stdout": subprocess.DEVNULL}
        process = subprocess.Popen([*command, "--seed=1"], **options)
        time.sleep(seconds * (0.3 + 0.8 * number / kills))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        sets = [set_bytes(path) for path in tmp_path.glob("out*")]
        assert sets
        assert all(found in (old, new) for found in sets)
    subprocess.run([*command, "--seed=1"], check=True, capture_output=True)
    assert set_bytes(tmp_path / "out") == new
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


@pytest.mark.slow
def test_sample_data_resembles_imagenet(tmp_path):
    flags = ["--num_images=400", "--num_validation_images=8"]
    process = run("make_sample_tfrecords.py", *flags, tmp_path)
    assert process.returncode == 0, process.stderr
    shown = rows(process.stdout)
    assert (*counts(process), shown["classes"]) == ("400 images", "8 images", "8")
    files = sorted(tmp_path.glob("train-*"))
    records = [record for file in files for record in read_features(file)]
    column = {key: [record[key][1][0] for record in records] for key in records[0]}
    assert len(records) == 400
    assert np.mean(column["image/height"]) == pytest.approx(401, rel=0.05)
    assert np.mean(column["image/width"]) == pytest.approx(468, rel=0.05)
    mean_bytes = np.mean(list(map(len, column["image/encoded"])))
    assert mean_bytes == pytest.approx(110e3, rel=0.07)
    assert sorted(set(column["image/class/label"])) == list(range(8))
    modes = [Image.open(io.BytesIO(encoded)).mode for encoded in column["image/encoded"]]
    assert modes.count("L") == 8  # 2%
    first = Image.open(io.BytesIO(column["image/encoded"][0]))
    assert first.size == (column["image/width"][0], column["image/height"][0])


def test_sample_data_refuses(tmp_path):
    for argument, said in (
        ("--num_images=-2", "`num_images` must be at least 1"),
        ("--num_images=2", "2 train images cannot fill 4 files"),
        ("--seed=-1", "`seed` must be at least 0"),
    ):
        fails(run("make_sample_tfrecords.py", argument, tmp_path / "x"), said)
    fails(run("make_sample_tfrecords.py"), "Name one folder")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_sample_data_follows_the_seed(tmp_path):
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        arguments = ("--num_images=8", "--num_validation_images=1", "--num_files=1")
        process = run("make_sample_tfrecords.py", *arguments, f"--seed={seed}", tmp_path / out)
        assert process.returncode == 0
    first, same, other = ((tmp_path / out / "train-00000-of-00001").read_bytes() for out in "abc")
    assert first == same != other


TABLE = [
    {"path": "a.jpg", "label": "dog", "labels": [0, 2], "values": [0.5, -1.0], "mask": "a.png"},
    {"path": "b.jpg", "label": "ant", "labels": [], "values": [1.0, 2.0], "mask": "b.png"},
]


@pytest.fixture
def table_folder(tmp_path):
    """Two images with masks: a gray one, and one with a palette, whose indexes are classes."""
    for name, mode in (("a", "L"), ("b", "P")):
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(20, 30))
        mask = Image.frombytes("L", (30, 20), bytes(range(200)) * 3)
        if mode == "P":
            mask.putpalette([value for one in range(256) for value in (255 - one, 0, one)])
        mask.save(tmp_path / f"{name}.png")
    return tmp_path


def write_table(folder, kind, table):
    path = folder / f"table.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    else:
        lists = [
            {
                key: " ".join(map(str, one)) if isinstance(one, list) else one
                for key, one in row.items()
            }
            for row in table
        ]
        lines = [",".join(map(str, row.values())) for row in lists]
        path.write_text("\n".join([",".join(table[0]), *lines]))
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table(table_folder, kind):
    """Everything that it names is in the records; names become integers by labels.txt."""
    path = write_table(table_folder, kind, TABLE)
    out = table_folder / "out"
    process = convert("--validation_fraction=0", "--resize_shorter=10", path, out)
    assert (process.returncode, process.stderr) == (0, "")
    assert (out / "labels.txt").read_text() == "ant\ndog\n"
    for features in read_features(out / "train-00000-of-00001"):
        name = features["image/filename"][1][0].decode()
        row = next(row for row in TABLE if row["path"] == name)
        assert features["image/class/label"][1] == [["ant", "dog"].index(row["label"])]
        assert [*features["image/class/labels"][1]] == row["labels"]
        assert [*features["image/values"][1]] == row["values"]
        mask = Image.open(io.BytesIO(features["image/segmentation/class/encoded"][1][0]))
        assert (mask.mode, mask.size) == ("L", (15, 10))
        stored = np.frombuffer(bytes(range(200)) * 3, np.uint8).reshape(20, 30)
        assert set(np.asarray(mask).ravel()) <= set(stored.ravel())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"values": ["1", "one"]}, "row 1: `values` must be finite numbers of float32, got "),
        ({"other": 1}, "row 1: nothing is known of the column `other`. --keep=other stores it"),
    ],
)
def test_tables_that_are_refused(table_folder, change, said):
    for kind in ("csv", "jsonl"):
        path = write_table(table_folder, kind, [TABLE[0] | change])
        fails(convert(path, table_folder / "out"), said)
    path.write_text("{")
    fails(convert(path, table_folder / "out"), "row 1: no JSON")
    path.write_text("")
    fails(convert(path, table_folder / "out"), "has no rows")


@pytest.mark.parametrize(
    ("mask", "said"),
    [(b"text", "its mask: cannot identify"), (jpeg(20, 30), "its mask is of mode RGB")],
)
def test_masks_that_are_refused(table_folder, mask, said):
    """The image is left out, and the reason listed."""
    (table_folder / "a.png").write_bytes(mask)
    path, out = write_table(table_folder, "csv", TABLE), table_folder / "out"
    fails(convert("--validation_fraction=0", path, out), "train images of class dog can be read")
    path.write_text(path.read_text().replace(",dog,", ",ant,"))  # a class keeps one image
    process = convert("--validation_fraction=0", "--max_left_out=0.5", path, out)
    assert rows(process.stdout)["train"] == "1 image"
    (line,) = (out / "left_out.jsonl").read_text().splitlines()
    assert said in json.loads(line)["reason"]


@pytest.mark.slow
def test_compressed_tfrecords(tmp_path, photos):
    """As TensorFlow writes them with `compression_type`; they keep their splits and labels.txt."""
    before = convert(photos, tmp_path / "out")
    for kind, compress in (("gz", gzip.compress), ("zlib", zlib.compress)):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "labels.txt").write_text((tmp_path / "out" / "labels.txt").read_text())
        for file in (tmp_path / "out").glob("*-of-*"):
            (folder / file.name).write_bytes(compress(file.read_bytes()))
        process = convert(folder / "*-of-*", tmp_path / f"{kind}-out")
        assert (process.returncode, process.stderr) == (0, "")
        assert counts(process) == counts(before)
        damaged = folder / file.name
        damaged.write_bytes(damaged.read_bytes()[:-9])
        fails(
            convert(folder / "*-of-*", tmp_path / "new"), f"{damaged} is damaged: it is cut short"
        )
        damaged.write_bytes(file.read_bytes())
        fails(convert(folder / "*-of-*", tmp_path / "new"), "is not compressed, others are")
        assert sorted(one.name for one in tmp_path.iterdir() if "inflated" in one.name) == []


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["2", "10", "1"], [2, 10, 1]),
        (["2", "10.0", "1.0"], [2, 10, 1]),  # as pandas writes a column that had a gap
        (["b", "a", "b"], [1, 0, 1]),
        (["-1", "0", "1"], [-1, 0, 1]),
        (["2", "", "1"], "row 2: `label` is empty"),
        (["2", None, "1"], "row 2: `label` is empty"),
        (
            ["2", "x", "1"],
            "number in all rows, or a name in all, found '2' in row 1 and 'x' in row 2",
        ),
        (["x", "1.5", "7"], "found '7' in row 3 and 'x' in row 1"),
        (["1", "nan", "7"], "found '1' in row 1 and 'nan' in row 2"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_labels_of_a_table(tmp_path, kind, labels, expected):
    """Numbers are numbers however they are written, and never turn into names."""
    table = [{"path": f"{number}.jpg", "label": label} for number, label in enumerate(labels)]
    path = write_table(tmp_path, kind, table)
    if kind == "csv":
        path.write_text(path.read_text().replace(",None", ""))
    catalog = str(tmp_path / "catalog")
    if isinstance(expected, str):
        with refused(expected):
            list_rows(str(path), catalog)
        return
    listed = list_rows(str(path), catalog)
    lines = [json.loads(line) for line in Path(catalog).read_text().splitlines()]
    assert [features["image/class/label"] for features, *_ in lines] == expected
    assert {label: len(starts) for (_, label), starts in listed.starts.items()} == {
        label: expected.count(label) for label in expected
    }
    assert listed.labels == (["a", "b"] if "a" in labels else None)


def test_a_row_that_is_too_long(tmp_path):
    (tmp_path / "table.csv").write_text("path,label\na,1\nb,1,2\n")
    with refused("table.csv: row 2 has more values than the header"):
        list_rows(str(tmp_path / "table.csv"), str(tmp_path / "catalog"))


def test_folders_of_splits(tmp_path, photos):
    """They stay what they are, with the same labels in both; other classes are refused."""
    for split in ("train", "val"):
        for number, name in enumerate(("ant", "zebra")):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for photo in range(3 if split == "train" else 1):
                (folder / f"{split}{photo}.jpg").write_bytes(jpeg(20, 30 + number))
    process = convert(tmp_path / "photos", tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    assert counts(process) == ("6 images", "2 images")
    for split, prefix in (("train", b"train"), ("validation", b"val")):
        for features in read_features(tmp_path / f"out/{split}-00000-of-00001"):
            assert features["image/filename"][1][0].startswith(prefix)
            names = {b"ant": 0, b"zebra": 1}
            assert features["image/class/label"][1] == [names[features["image/class/text"][1][0]]]
    flags = ["--validation_fraction=0.5", tmp_path / "photos", tmp_path / "new"]
    fails(convert(*flags), "There is a validation split: leave out --validation_fraction")
    (tmp_path / "photos/val/bee").mkdir()
    (tmp_path / "photos/val/bee/1.jpg").write_bytes(jpeg(20, 30))
    fails(
        convert(tmp_path / "photos", tmp_path / "new"), "holds classes that training does not: bee"
    )
    shutil.rmtree(tmp_path / "photos/val/bee")
    shutil.rmtree(tmp_path / "photos/val/ant")  # it may lack a class
    (tmp_path / "photos/train").rename(tmp_path / "photos/Train")
    shutil.copytree(tmp_path / "photos/val", tmp_path / "photos/TEST")
    process = convert(tmp_path / "photos", tmp_path / "new")
    assert (*counts(process), rows(process.stdout)["test"]) == ("6 images", "1 image", "1 image")
    (tmp_path / "photos/valid").mkdir()
    fails(
        convert(tmp_path / "photos", tmp_path / "x"), "val and valid, both of which are the valid"
    )
    (tmp_path / "photos/valid").rename(tmp_path / "photos/extra")
    said = "holds the splits TEST, Train, val, and beside them extra"
    fails(convert(tmp_path / "photos", tmp_path / "x"), said)
    shutil.rmtree(tmp_path / "photos/extra")
    shutil.rmtree(tmp_path / "photos/Train")
    fails(
        convert(tmp_path / "photos", tmp_path / "x"), "and no folder train: convert each by itself"
    )


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.csv", b'path,label\na.jpg,"a\nb"\n', r"row 1: 'a\\nb' cannot be the name of a class"),
        ("a.csv", b"path,label\na.jpg,caf\xe9\n", "a.csv is not UTF-8: .*Save it as UTF-8"),
        ("a.jsonl", b'{"path": 5, "label": 1}\n', "row 1: `path` must be a path, got 5"),
        (
            "a.jsonl",
            b'{"path": "a", "labels": [1.5]}\n',
            r"`labels` must be whole numbers, or names, got \[1.5",
        ),
        ("a.csv", b"path,label\na.jpg,007\nb.jpg,7\n", "found '7' in row 2 and '007' in row 1"),
    ],
)
def test_tables_that_would_lose_something(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with refused(said):
        list_rows(str(tmp_path / name), str(tmp_path / "catalog"))


def test_a_table_that_excel_wrote(tmp_path):
    """With a mark before its first column that is not seen."""
    (tmp_path / "a.csv").write_text("path,label\na.jpg,3\n", encoding="utf-8-sig")
    listed = list_rows(str(tmp_path / "a.csv"), str(tmp_path / "catalog"))
    assert listed.labels is None
    assert [*listed.starts] == [(None, 3)]


def test_a_split_without_images(tmp_path, photos):
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            suffix = "jpg" if split == "train" else "heic"
            (tmp_path / "photos" / split / name / f"1.{suffix}").write_bytes(jpeg(20, 30))
    process = convert(tmp_path / "photos", tmp_path / "out")
    fails(process, "2 of 4 images are left out, more than 1.00%", "(.heic)")
    assert not (tmp_path / "out").exists()


def test_an_earlier_set_comes_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/old").write_text("old")
    rename = os.replace

    def fail_at_the_new(source, target):
        if ".staging-" in source:
            raise OSError(5, "Input/output error")
        rename(source, target)

    with pytest.raises(OSError, match="output error"), Staging(str(tmp_path), "") as staging:
        os.makedirs(staging.path("set"))
        monkeypatch.setattr(os, "replace", fail_at_the_new)
        writer._put_in_place(staging, str(tmp_path / "set"))
    assert (tmp_path / "set/old").read_text() == "old"
    assert os.listdir(tmp_path) == ["set"]


def test_a_validation_split_alone_stays_one(tmp_path, photos):
    """It would become training data of the user who shrinks the two splits in two calls."""
    assert convert(photos, tmp_path / "set").returncode == 0
    assert run("index", f"{tmp_path}/set/*-of-*").returncode == 0
    for name in ("validation", "train"):
        process = convert(f"{tmp_path}/set/{name}-*", tmp_path / name)
        assert (process.returncode, process.stderr) == (0, "")
        files = [file.name for file in (tmp_path / name).iterdir() if "-of-" in file.name]
        assert {file.partition("-")[0] for file in files} == {name}


CRASHING = """if True:
    import os, sys
    sys.path[:] = sys.argv[2:]
    from dali_tf_input.cli.convert import images
    convert = images.convert_image

    def crash(encoded, conversion):
        if b"crashes" in encoded:
            os.abort()
        return convert(encoded, conversion)

    images.convert_image = crash
    from dali_tf_input import processes
    processes.serve(*eval(sys.argv[1]))
"""


def test_an_image_that_crashes_a_decoder_costs_no_other(tmp_path, photos, monkeypatch):
    shutil.copytree(photos, tmp_path / "photos")
    path = sorted((tmp_path / "photos" / "ant").iterdir())[1]
    path.write_bytes(path.read_bytes() + b"crashes")
    monkeypatch.setattr("dali_tf_input.processes._CODE", CRASHING)
    flags = ["--validation_fraction=0", "--max_left_out=0.1"]
    process = convert(*flags, tmp_path / "photos", tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    assert rows(process.stdout)["train"] == "17 images"
    _, line = (tmp_path / "out" / "left_out.jsonl").read_text().splitlines()
    fault = json.loads(line)
    assert fault == {"path": str(path), "reason": "decoding it failed: SIGABRT"}
