"""Making TFRecords: of images, of TFRecords, of samples."""

import gzip
import json
import os
import shutil
import zlib
from pathlib import Path

import commands
import numpy as np
import pytest
from commands import fails, rows, run, succeeds
from conftest import encode, exif, image_zoo, jpeg, numbered_examples, refused, write_tfrecord
from conversions import convert, here, index, make, opened, read, read_features, set_bytes
from index.test_decoders import LOSSLESS
from PIL import Image

from dali_tf_input.cli import command
from dali_tf_input.cli.convert import writer
from dali_tf_input.storage.staging import Staging

CARD = ["dataset_info.json", "features.json", "image.class.label.labels.txt", "metadata.json"]


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
    """In processes of its own: all images once, each class in training, and the next command."""
    flags = ["--validation_fraction=0.2", "--num_files=3", photos]
    own = ["--num_processes=2", "--decoder=none"]
    process = succeeds(run("convert", *own, *flags, tmp_path / "out"))
    shown = rows(process.stdout)
    held_out = int(shown["validation"].split()[0])
    assert 1 <= held_out <= 9
    assert (shown["train"], shown["classes"]) == (f"{18 - held_out} images", "3")
    assert shown["left out"] == f"1 file (1 not an image), listed in {tmp_path}/out/left_out.jsonl"
    assert shown["files"].startswith("4, ")
    assert shown["next:"].partition(" ")[2] == f"-m dali_tf_input index '{tmp_path}/out/*-of-*'"
    files = [f"train-0000{number}-of-00003" for number in range(3)]
    expected = [*CARD, "labels.txt", "left_out.jsonl", *files, "validation-00000-of-00001"]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(expected)
    assert os.listdir(tmp_path) == ["out"]  # nothing beside it
    assert (tmp_path / "out" / "labels.txt").read_text() == "ant\nbee hive\nzebra\n"
    train, validation = (read(tmp_path / "out", split) for split in ("train", "validation"))
    seen = []
    for record in train + validation:
        text, filename = record["image/class/text"].decode(), record["image/filename"].decode()
        assert record["image/class/label"] == ["ant", "bee hive", "zebra"].index(text)
        assert filename.startswith(f"{text}/")
        assert record["image/encoded"] == (photos / filename).read_bytes()
        number = int(filename.split("/")[1].split(".")[0])
        assert (record["image/height"], record["image/width"]) == (20 + number, 30 + number)
        seen.append((text, filename))
    assert len(set(seen)) == len(seen) == 18
    # At least one of each class of five, and never a whole class.
    texts, held = ([record["image/class/text"] for record in some] for some in (train, validation))
    assert {*held} == {b"ant", b"zebra"}
    assert {*texts} == {b"ant", b"zebra", b"bee hive"}
    assert texts != sorted(texts)  # shuffled
    # It follows the seed, and not the number of processes.
    for out, seed in (("same", 0), ("other", 1)):
        make(f"--seed={seed}", *flags, tmp_path / out)
    made, same, other = (set_bytes(tmp_path / out) for out in ("out", "same", "other"))
    assert made == same != other


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
        (["--quality=101", photos, out], "`quality` must be in [1, 100], got 101"),
        (["--validation_fraction=1", photos, out], "_fraction` must be in [0, 1), got 1.0"),
        ([f"--seed={2**31}", photos, out], "`seed` must be in"),
        ([photos, "/proc/none/out"], "Cannot write to /proc/none"),
        ([tmp_path / "bad", out], f"{unreadable}{tmp_path}/bad/class/a.jpg"),
        (["--max_left_out=2", photos, out], "`max_left_out` must be in [0, 1], got 2.0"),
        (["--split=test", "--validation_fraction=0.1", photos, out], "leave out --validation_frac"),
        ([photos, "."], "cannot be replaced by a folder: name a new one inside it"),
    ):
        fails(convert(*arguments), message)
    assert not out.exists()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_convert_replaces_sets_whole_or_not_at_all(tmp_path, photos):
    """And never takes away what is not its own."""
    out = tmp_path / "out"
    make("--num_files=3", photos, out)
    before = set_bytes(out)
    fails(convert("--num_files=2", photos, out), f"{out} holds a set already", "--overwrite")
    assert set_bytes(out) == before
    make("--num_files=2", "--validation_fraction=0", "--overwrite", photos, out)
    files = ["train-00000-of-00002", "train-00001-of-00002"]
    assert sorted(os.listdir(out)) == sorted([*CARD, "labels.txt", "left_out.jsonl", *files])
    for name in ("thesis.txt", "train-notes.md", "train-00000-of-00009/"):
        (out / name).mkdir() if name.endswith("/") else (out / name).write_text("mine")
        process = convert("--overwrite", photos, out)
        fails(process, f"{out} holds {name.strip('/')}, which is no part of such a set")
        (out / name).rename(tmp_path / name.strip("/"))


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


def turned_by_exif():
    """Returns a JPEG that its EXIF orientation turns."""
    return encode(opened(jpeg(60, 90)), "JPEG", exif=exif(6))


@pytest.mark.slow
def test_convert_of_any_image(tmp_path, request):
    """Kept, or made JPEG, RGB, upright, smaller; the unreadable are left out and listed."""
    zoo, turned, folder = image_zoo(), turned_by_exif(), tmp_path / "photos" / "all"
    folder.mkdir(parents=True)
    for name, (encoded, _, _) in zoo.items():
        (folder / f"{name}.jpg").write_bytes(encoded)
    (folder / "turned.jpeg").write_bytes(turned)
    (folder / "lossless.jpg").write_bytes(LOSSLESS)
    (folder / "notes.txt").write_text("not an image")
    arguments = ["--validation_fraction=0", tmp_path / "photos", tmp_path / "out"]
    said = "9 of 25 images are left out, more than 1.00%, such as "
    fails(convert(*arguments), said, "Nothing was written. Repair them, or leave them out", "=0.36")
    assert not (tmp_path / "out").exists()
    arguments = ["--max_left_out=0.5", *arguments]
    said = rows(make(*arguments, decoder="both"))
    assert "12 files (11 unreadable, 1 not an image)" in said["left out"]
    listed = map(json.loads, (tmp_path / "out" / "left_out.jsonl").read_text().splitlines())
    reasons = {Path(line["path"]).stem: line["reason"] for line in listed}
    assert all(reasons.values())
    unreadable = {"cut_in_half", "cut_by_one", "cut_in_its_header", "huge", "no_height"}
    unreadable |= {"damaged_png", "empty", "zeros", "text", "html", "garbage"}
    assert {*reasons} == {*unreadable, "notes"}
    records = {
        record["image/filename"].decode().removeprefix("all/").split(".")[0]: record
        for record in read(tmp_path / "out")
    }
    assert set(records) == {*zoo, "turned", "lossless"} - unreadable
    # Pillow reads it and DALI does not: its bytes are not kept, its pixels are.
    assert said["damaged JPEG re-encoded"] == "1 image"
    lossless = np.asarray(opened(records.pop("lossless")["image/encoded"]))
    assert np.abs(lossless.astype(int) - np.asarray(opened(LOSSLESS))).max() < 9
    for name in ("jpeg", "progressive", "with_a_tail", "grayscale"):
        assert records[name]["image/encoded"] == zoo[name][0]
    original = np.asarray(opened(zoo["jpeg"][0])).astype(float)
    for name, record in records.items():
        image = opened(record["image/encoded"])
        assert image.format == "JPEG"
        size = (60, 90) if name == "turned" else (90, 60)
        assert image.size == (record["image/width"], record["image/height"]) == size
        assert image.mode == ("L" if name == "grayscale" else "RGB")
        if name not in ("progressive", "turned", "ycck"):  # its transform was only claimed
            difference = np.abs(np.asarray(image.convert("RGB")) - original).mean()
            assert difference < (60 if name in ("grayscale", "cmyk") else 12), (name, difference)
    assert said["turned upright"] == "1 image"
    assert said["CMYK made RGB"] == "2 images"
    flags = ["--resize_shorter=30", "--quality=80", "--overwrite"]
    make(*flags, *arguments, decoder="dali")
    for record in read(tmp_path / "out"):
        image = opened(record["image/encoded"])
        assert image.size in ((45, 30), (30, 45), (8, 8))
        assert image.getexif().get(0x0112, 1) == 1
    request.getfixturevalue("checked_here")
    index(tmp_path / "out", "--verify=decode")  # all that is written can be trained on


def test_convert_of_odd_names_and_pixels(tmp_path):
    """Names that are no UTF-8; pixels whose value range is unknown are left out, and those of 16
    bits are scaled.
    """
    root = os.fsencode(tmp_path / "photos")
    for name in (b"c/a\xff.jpg", b"c/a\nb.jpg", b"d/bad\xff.jpg", b"d/good.jpg"):
        path = Path(os.fsdecode(os.path.join(root, name)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" if name.startswith(b"d/bad") else jpeg(9, 9))
    gray = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(gray).save(tmp_path / "photos" / "d" / "deep.png")
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / "photos" / "d" / "float.tif")
    Image.fromarray(np.ones((9, 9), np.int32)).save(tmp_path / "photos" / "d" / "integer.tif")
    Image.new("1", (70_000, 1)).save(tmp_path / "photos" / "d" / "wide.png")
    flags = ["--validation_fraction=0", "--max_left_out=0.9"]
    make(*flags, tmp_path / "photos", tmp_path / "out")
    listed = map(json.loads, (tmp_path / "out" / "left_out.jsonl").read_text().splitlines())
    reasons = {os.fsencode(line["path"]).rsplit(b"/", 1)[1]: line["reason"] for line in listed}
    assert set(reasons) == {b"bad\xff.jpg", b"float.tif", b"integer.tif", b"wide.png"}
    assert reasons[b"float.tif"] == "pixels of mode F, whose value range is unknown"
    assert reasons[b"wide.png"].startswith("70000x1: a JPEG holds 65535 pixels each way")
    assert (tmp_path / "out" / "labels.txt").read_bytes() == b"c\nd\n"
    written = {one["image/filename"]: one["image/encoded"] for one in read(tmp_path / "out")}
    assert set(written) == {b"c/a\xff.jpg", b"c/a\nb.jpg", b"d/good.jpg", b"d/deep.png"}
    assert np.abs(np.asarray(opened(written[b"d/deep.png"])) - gray / 256).mean() < 2
    for name in (b"e\nf", b"e\xff", "a\x85b".encode(), "a\u2028b".encode(), b"e "):
        os.mkdir(os.path.join(root, name))
        fails(convert(tmp_path / "photos", tmp_path / "x"), "cannot be the name of a class")
        os.rmdir(os.path.join(root, name))


def test_files_without_a_readable_image_are_none(tmp_path):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number in range(8):
        encoded = jpeg(9, 9, seed=number) if number < 2 else b"x%d" % number
        (tmp_path / "photos" / "a" / f"{number}.jpg").write_bytes(encoded)
    flags = ["--num_files=6", "--validation_fraction=0", "--max_left_out=0.9"]
    make(*flags, tmp_path / "photos", tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("train-*"))
    assert files == [f"train-{number:05d}-of-{len(files):05d}" for number in range(len(files))]
    assert 1 <= len(files) <= 2
    index(tmp_path / "out")


def test_convert_from_tfrecords(tmp_path):
    """Every record once, shuffled again; bad ones left out; unknown features kept."""
    examples = numbered_examples(20)
    for number, example in enumerate(examples):
        example |= {"note": f"record {number}", "image/height": -1}
    examples[7]["image/encoded"] = examples[7]["image/encoded"][:-30]
    for position in range(2):
        write_tfrecord(tmp_path / f"old-{position}", examples[10 * position : 10 * position + 10])
    (tmp_path / "labels.txt").write_text("".join(f"class {number}\n" for number in range(20)))
    source = tmp_path / "old-*"
    process = convert(source, tmp_path / "new")
    fails(process, "2 of 2 files have no index", "-m dali_tf_input index ")
    assert run("index", source).returncode == 0
    flags = ["--num_files=5", "--validation_fraction=0.2", "--max_left_out=0.1"]
    make(*flags, source, tmp_path / "new", decoder="dali")
    files = [f"train-0000{number}-of-00005" for number in range(5)]
    found = sorted(path.name for path in (tmp_path / "new").glob("*-of-*"))
    assert found == [*files, "validation-00000-of-00001"]
    written = [record for name in found for record in read_features(tmp_path / "new" / name)]
    labels = [record["image/class/label"][1][0] for record in written]
    assert sorted(labels) == [number for number in range(20) if number != 7]
    assert labels != sorted(labels)
    for record, label in zip(written, labels, strict=True):
        assert {key: values[0] for key, (_, values) in record.items()} == {
            key: value.encode() if isinstance(value, str) else value
            for key, value in examples[label].items()
        }
    (line,) = (tmp_path / "new" / "left_out.jsonl").read_text().splitlines()
    assert json.loads(line)["path"].startswith(f"{tmp_path}/old-0 at byte ")
    assert (tmp_path / "new" / "labels.txt").read_text() == (tmp_path / "labels.txt").read_text()
    make("--resize_shorter=32", "--max_left_out=0.1", source, tmp_path / "small")
    for record in read(tmp_path / "small"):
        label, image = record["image/class/label"], opened(record["image/encoded"])
        original = opened(examples[label]["image/encoded"])
        assert min(image.size) == min(32, *original.size)
        assert record["note"].decode() == f"record {label}"
        assert record["image/height"] == (image.height if min(original.size) > 32 else -1)


@pytest.mark.slow
def test_compressed_tfrecords(tmp_path, photos):
    """As TensorFlow writes them with `compression_type`; they keep their splits and labels.txt."""
    make(photos, tmp_path / "out")
    for kind, compress in (("gz", gzip.compress), ("zlib", zlib.compress)):
        folder = tmp_path / kind
        folder.mkdir()
        shutil.copy(tmp_path / "out" / "labels.txt", folder)
        for file in (tmp_path / "out").glob("*-of-*"):
            (folder / file.name).write_bytes(compress(file.read_bytes()))
        make(folder / "*-of-*", tmp_path / f"{kind}-out")
        for split in ("train", "validation"):
            counts = [len(read(tmp_path / out, split)) for out in ("out", f"{kind}-out")]
            assert counts[0] == counts[1] > 0
        names = [(tmp_path / out / "labels.txt").read_text() for out in ("out", f"{kind}-out")]
        assert names[0] == names[1]
        damaged = folder / file.name
        damaged.write_bytes(damaged.read_bytes()[:-9])
        process = convert(folder / "*-of-*", tmp_path / "new")
        fails(process, f"{damaged} is damaged: it is cut short")
        damaged.write_bytes(file.read_bytes())
        fails(convert(folder / "*-of-*", tmp_path / "new"), "is not compressed, others are")
        assert [one.name for one in tmp_path.iterdir() if "inflated" in one.name] == []


def test_compressed_files_of_one_name(tmp_path):
    """Of two folders: what comes of them is what comes of those that are not compressed."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        file = write_tfrecord(
            tmp_path / str(number) / "train-0", numbered_examples(3, first=3 * number)
        )
        Path(f"{file}.gz").write_bytes(gzip.compress(Path(file).read_bytes()))
        names = "".join(f"class {number}\n" for number in range(3 * number + 3))
        (tmp_path / str(number) / "labels.txt").write_text(names)
        succeeds(run("index", file))
    plain, compressed = (tmp_path / "?" / name for name in ("train-0", "train-0.gz"))
    for source in (plain, compressed):
        make("--validation_fraction=0", source, tmp_path / f"of {source.name}")
    made = [set_bytes(tmp_path / f"of {source.name}") for source in (plain, compressed)]
    assert made[0] == made[1]
    assert made[0]["labels.txt"].count(b"\n") == 6
    (tmp_path / "0" / "labels.txt").write_text("another\n")
    for source in (plain, compressed):
        fails(convert(source, tmp_path / "new"), "Class 0 is 'class 0' in ", ", and 'another' in ")


def test_the_number_of_files_follows_the_size(tmp_path, monkeypatch):
    """Files of 100 to 200 MB; here of kilobytes."""

    def make_kilobytes(numbers):
        return [writer.Record(bytes([number % 256]) * 1000, str(number)) for number in numbers]

    monkeypatch.setattr(writer, "_FILE_BYTES", 150_000)
    splits = [
        writer.Split(name="train", items=range(900), num_files=None),
        writer.Split(name="validation", items=range(20), num_files=None),
    ]
    with here:
        written = writer.write_splits(str(tmp_path / "out"), splits, make_kilobytes, labels=None)
    assert (written.num_files, written.records) == (6 + 1, {"train": 900, "validation": 20})
    sizes = [os.path.getsize(path) for path in sorted((tmp_path / "out").glob("train-*"))]
    assert len(sizes) == 6
    assert all(100_000 < size < 200_000 for size in sizes)


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


@pytest.mark.slow
def test_an_image_that_crashes_a_decoder_costs_no_other(tmp_path, photos, monkeypatch):
    shutil.copytree(photos, tmp_path / "photos")
    path = sorted((tmp_path / "photos" / "ant").iterdir())[1]
    path.write_bytes(path.read_bytes() + b"crashes")
    monkeypatch.setattr("dali_tf_input.processes._CODE", CRASHING)
    flags = ["--decoder=none", "--num_processes=1", "--validation_fraction=0", "--max_left_out=0.1"]
    process = succeeds(run("convert", *flags, tmp_path / "photos", tmp_path / "out"))
    assert rows(process.stdout)["train"] == "17 images"
    _, line = (tmp_path / "out" / "left_out.jsonl").read_text().splitlines()
    assert json.loads(line) == {"path": str(path), "reason": "decoding it failed: SIGABRT"}


def make_sample(*arguments):
    """Runs make_sample_tfrecords.py in this process; returns its exit code."""
    script = commands.load("make_sample_tfrecords.py")
    with here:
        return command.run(script.main, script.FLAGS, [*map(str, arguments)])


@pytest.mark.slow
def test_sample_data_resembles_imagenet(tmp_path, capsys):
    flags = ["--num_images=200", "--num_validation_images=8"]
    assert make_sample(*flags, tmp_path) == 0
    shown = rows(capsys.readouterr().out)
    assert (shown["train"], shown["validation"]) == ("200 images", "8 images")
    assert shown["classes"] == "8"
    records = read(tmp_path)
    column = {key: [record[key] for record in records] for key in records[0]}
    assert len(records) == 200
    assert np.mean(column["image/height"]) == pytest.approx(401, rel=0.05)
    assert np.mean(column["image/width"]) == pytest.approx(468, rel=0.05)
    mean_bytes = np.mean(list(map(len, column["image/encoded"])))
    assert mean_bytes == pytest.approx(110e3, rel=0.07)
    assert sorted(set(column["image/class/label"])) == list(range(8))
    modes = [opened(encoded).mode for encoded in column["image/encoded"]]
    assert modes.count("L") == 4  # 2%
    first = opened(column["image/encoded"][0])
    assert first.size == (column["image/width"][0], column["image/height"][0])


def test_sample_data_follows_the_seed(tmp_path):
    flags = ["--num_images=3", "--num_validation_images=1", "--num_files=1"]
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert make_sample(*flags, f"--seed={seed}", tmp_path / out) == 0
    first, same, other = ((tmp_path / out / "train-00000-of-00001").read_bytes() for out in "abc")
    assert first == same != other
    with refused("Name one folder"):
        commands.load("make_sample_tfrecords.py").main([])
