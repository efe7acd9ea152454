"""The scripts, run as a user would run them: what they print, what they write, and how they fail."""

import contextlib
import importlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import keras
import kilobytes
import numpy as np
import pytest
import tensorflow as tf
import warm
from conftest import ROOT, SCRIPTS, image_zoo, jpeg, numbered_examples, write_tfrecord
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

import console
from dali_tf_input import DatasetSpec, InputError
from dali_tf_input.example import decode_example
from dali_tf_input.tfrecord import read_record, scan_records
from tfrecord_files import find_split

IMPORT_TENSORFLOW = {"train.py", "preview.py", "compare_images.py", "predict.py", "benchmark_order.py"}


def run(script, *arguments, cwd=None, **environment):
    """Runs a script; returns the finished process. What imports TensorFlow starts warm, see warm.py."""
    if script in IMPORT_TENSORFLOW:
        return warm.run([SCRIPTS / script, *arguments], cwd=cwd, env={**os.environ, **environment})
    return run_cold(script, *arguments, cwd=cwd, **environment)


def run_cold(script, *arguments, cwd=None, **environment):
    """Runs a script by its command line; returns the finished process."""
    return subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def run_on_terminal(script, *arguments, **environment):
    """Runs a script whose stdout is a terminal of 80 columns; returns the finished process."""
    terminal, ours = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as stream, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, SCRIPTS / script, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=ours,
            stderr=log,
            env={**os.environ, "COLUMNS": "80", **environment},
            start_new_session=True,
        )
        os.close(ours)
        watch = threading.Timer(300, os.killpg, [process.pid, signal.SIGKILL])
        watch.daemon = True
        watch.start()
        output = b""
        with contextlib.suppress(OSError):  # the terminal is gone when nobody writes to it any more
            while part := stream.read(1 << 16):
                output += part
        process.wait()
        watch.cancel()
        log.seek(0)
        errors = log.read().decode()
    return subprocess.CompletedProcess(process.args, process.returncode, output.decode().replace("\r\n", "\n"), errors)


def fails(process, *parts, faults=False):
    """Checks that a script failed with lines on stderr that hold `parts`, and no traceback; with `faults` these come first."""
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert faults or process.stderr.startswith("error: "), process.stderr
    for part in parts:
        assert part in process.stderr


def read_features(file):
    return [decode_example(read_record(str(file), offset)) for offset, _ in scan_records(str(file))]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of 10, 7 and 1 JPEGs; the files' numbers are their sizes."""
    root = tmp_path_factory.mktemp("photos")
    for class_name, count in (("zebra", 10), ("ant", 7), ("bee hive", 1)):
        (root / class_name).mkdir()
        for number in range(count):
            (root / class_name / f"{number}.{'JPEG' if number % 2 else 'jpg'}").write_bytes(jpeg(20 + number, 30 + number))
    (root / "labels.csv").write_text("not a class")
    return root


def rows(output):
    """Returns the (name, value) rows that a script prints."""
    return dict(re.split(r"(?<=:) |  +", line, maxsplit=1) for line in output.splitlines() if re.search(r"(?<=:) |  +", line))


def test_index(tmp_path):
    good = write_tfrecord(tmp_path / "train-0", numbered_examples(3))
    process = run("index_tfrecords.py", tmp_path / "train-*")
    assert process.returncode == 0
    assert process.stderr == ""
    assert [line.split()[0] for line in process.stdout.splitlines()] == ["files", "records", "size", "verified", "features"]
    shown = rows(process.stdout)
    assert (shown["files"], shown["records"], shown["verified"]) == ("1 indexed", "3", "framing 1 file")
    assert shown["features"] == "TF-slim: image/class/label, image/encoded"
    assert len(Path(good + ".idx").read_text().splitlines()) == 3
    assert rows(run("index_tfrecords.py", tmp_path / "train-*").stdout)["files"] == "0 indexed, 1 unchanged"
    assert rows(run("index_tfrecords.py", "--force", tmp_path / "train-*").stdout)["files"] == "1 indexed"
    shown = rows(run("index_tfrecords.py", "--verify=decode", tmp_path / "train-*").stdout)
    assert shown["labels"] == "0 to 2, 3 classes"
    assert shown["images"] == "median 37x41, largest height 44, largest width 52; JPEG 3"


def test_index_of_good_and_bad_files(tmp_path):
    """The good files are indexed, each bad one is named, nothing is left of them, and the exit code is 1."""
    write_tfrecord(tmp_path / "a", numbered_examples(3))
    cut = write_tfrecord(tmp_path / "b", numbered_examples(2))
    os.truncate(cut, os.path.getsize(cut) - 1)
    (tmp_path / "c").write_bytes(b"\x1f\x8b rest of a gzip file")
    (tmp_path / "d").touch()
    process = run("index_tfrecords.py", f"--index_dir={tmp_path}/index", tmp_path / "?")
    assert process.returncode == 1
    lines = process.stderr.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{cut}: record 1, byte ")
    assert "cut short: expected a record of" in lines[0]
    assert lines[1].startswith(f"{tmp_path}/c: GZIP file: ")
    assert f"gunzip -c {tmp_path}/c > {tmp_path}/c.tfrecord" in lines[1]
    assert lines[2] == f"{tmp_path}/d: empty file: expected records, found an empty file."
    assert lines[3].startswith("error: 3 faults in 3 of 4 files. Those files were not indexed.")
    assert lines[3].endswith(f"make index DATA='{tmp_path}/?' INDEX_DIR={tmp_path}/index ARGS=--on_bad=skip")
    assert rows(process.stdout)["files"] == "1 indexed, 3 with faults"
    assert rows(process.stdout)["GZIP file"] == "1"
    assert sorted(os.listdir(tmp_path / "index")) == ["a.idx", "index_manifest.json"]


def test_index_skips_bad_records(tmp_path):
    examples = numbered_examples(100)
    examples[40]["image/encoded"] = b"404 not found"
    write_tfrecord(tmp_path / "train", examples)
    assert run("index_tfrecords.py", tmp_path / "train").returncode == 0
    fails(run("index_tfrecords.py", "--verify=decode", tmp_path / "train"), "record 40, byte ", faults=True)
    process = run("index_tfrecords.py", "--verify=decode", "--on_bad=skip", tmp_path / "train")
    assert (process.returncode, process.stderr) == (0, "")
    assert rows(process.stdout)["left out"] == "1 record (1.00%), listed in bad_records.jsonl"
    assert json.loads((tmp_path / "bad_records.jsonl").read_text())["record"] == 40
    process = run(
        "index_tfrecords.py", "--verify=decode", "--on_bad=skip", "--max_bad_fraction=0.001", "--force", tmp_path / "train"
    )
    fails(process, "1 of 100 records are bad, 1.00%, over `max_bad_fraction` 0.10%", "--max_bad_fraction")
    assert DatasetSpec.from_files(tmp_path / "train").num_records == 99  # as it was before


def test_index_hints_at_labels_from_1(tmp_path):
    write_tfrecord(tmp_path / "train", [{"image": jpeg(9, 9), "label": label} for label in (1, 2, 5)])
    process = run("index_tfrecords.py", "--verify=schema", tmp_path / "train")
    assert rows(process.stdout)["labels"] == "1 to 5, 3 classes (train with --label_offset=1)"
    process = run("index_tfrecords.py", "--verify=schema", "--label_offset=1", "--num_classes=4", "--force", tmp_path / "train")
    fails(process, "label range: `label_key` 'label' must be in 1 to 4, found 5", faults=True)


def test_index_progress_without_a_terminal(capsys, monkeypatch):
    """Plain lines, and only where it takes long; on a terminal a bar, which the terminal shows."""
    import console
    from dali_tf_input.index import Progress

    with console.IndexProgress() as progress:
        progress.update(Progress(files=1, num_files=1024, records=1250, bytes=10**8, num_bytes=10**9))
        assert capsys.readouterr().err == ""
        later = time.monotonic() + 20
        monkeypatch.setattr(console.time, "monotonic", lambda: later)
        progress.update(Progress(files=1, num_files=1024, records=1250, bytes=10**8, num_bytes=10**9))
    line = capsys.readouterr().err
    assert line.startswith("indexing: 1 of 1,024 files, 1,250 records, 5 MB/s, 3 min ")
    assert line.endswith(" s left\n")


@pytest.mark.parametrize(("width", "lines"), [(200, 3), (48, 3), (47, 4), (33, 5), (10, 5)])
def test_tables_are_never_cut(capsys, monkeypatch, width, lines):
    """On a narrow terminal headers and texts are folded; where that is not enough the terminal wraps its lines."""
    terminal = {"force_terminal": True, "color_system": None, "width": width, "height": 25}
    monkeypatch.setattr(console, "Console", lambda **given: Console(**{**terminal, **given}))
    console.print_table(
        ("setting", "x default", "images/s so far"), [("num_reads=16, 文件=4", "1.05", "12,345"), ("none", "-", "1")]
    )
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines
    for word in ("setting", "default", "images/s", "num_reads=16,", "文件=4", "1.05", "12,345"):
        assert any(word in line for line in printed), word
    assert max(map(cell_len, printed)) <= max(width, 13 + 7 + 8 + 2 * 2)
    assert len(set(map(cell_len, printed))) == 1  # they align


def test_tables_show_what_is_in_them(capsys):
    """Which is no markup: errors of DALI have paths in brackets."""
    rows = [("[/opt/dali/x.cc:12] Assert :smile:", "-", "12", "1", "2"), ("[bold]", "1", "2", "3", "")]
    console.print_table(("what", "one header", "two headers", "n", ""), rows)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["what", "one", "header", "two", "headers", "n"]
    assert lines[0].split() == ["[/opt/dali/x.cc:12]", "Assert", ":smile:", "-", "12", "1", "2"]
    assert lines[1].split() == ["[bold]", "1", "2", "3"]


def test_index_without_files(tmp_path):
    fails(run("index_tfrecords.py", tmp_path / "none-*"), "No file matches")
    fails(run("index_tfrecords.py"), "at least one TFRecord file")
    fails(run("index_tfrecords.py", tmp_path), "is a directory")
    fails(
        run("index_tfrecords.py", "gs://bucket/train-*"), "gs://bucket/train-* is a URL", "`gcloud storage cp`", "mount the place"
    )
    fails(run("index_tfrecords.py", "s3://bucket/train-*"), "`aws s3 cp`")


def test_index_imports_no_tensorflow(tmp_path):
    write_tfrecord(tmp_path / "a", numbered_examples(1))
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    assert run("index_tfrecords.py", tmp_path / "a", PYTHONPATH=str(tmp_path)).returncode == 0


def test_make_tfrecords(tmp_path, photos):
    process = run("make_tfrecords.py", "--validation_fraction=0.2", "--num_files=3", photos, tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    shown = rows(process.stdout)
    assert (shown["train"], shown["validation"], shown["classes"]) == ("15 images", "3 images", "3")
    assert shown["files"].startswith("4, ")
    assert shown["next:"] == f"make index DATA='{tmp_path}/out/*-of-*'"
    assert sorted(os.listdir(tmp_path / "out")) == [
        "labels.txt",
        *(f"train-0000{number}-of-00003" for number in range(3)),
        "validation-00000-of-00001",
    ]
    assert os.listdir(tmp_path) == ["out"]  # nothing beside it
    assert (tmp_path / "out" / "labels.txt").read_text() == "ant\nbee hive\nzebra\n"
    train = [record for number in range(3) for record in read_features(tmp_path / "out" / f"train-0000{number}-of-00003")]
    validation = read_features(tmp_path / "out" / "validation-00000-of-00001")
    seen = []
    for record in train + validation:
        values = {key: value[0] for key, (_, value) in record.items()}
        text, filename = values["image/class/text"].decode(), values["image/filename"].decode()
        assert values["image/class/label"] == ["ant", "bee hive", "zebra"].index(text)
        assert values["image/encoded"] == (photos / text / filename).read_bytes()
        number = int(filename.split(".")[0])
        assert (values["image/height"], values["image/width"]) == (20 + number, 30 + number)
        seen.append((text, filename))
    assert len(set(seen)) == len(seen) == 18
    # A fifth of each class, to the nearest image, and never a whole class.
    assert sorted(record["image/class/text"][1][0] for record in validation) == [b"ant", b"zebra", b"zebra"]
    texts = [record["image/class/text"][1][0] for record in train]
    assert texts != sorted(texts)  # shuffled


def set_bytes(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix != ".idx"}


def test_make_tfrecords_follows_the_seed(tmp_path, photos):
    """Whatever the number of processes."""
    for out, seed, processes in (("a", 1, 1), ("b", 1, 3), ("c", 2, 2)):
        arguments = (f"--seed={seed}", f"--num_processes={processes}", "--num_files=2", "--resize_shorter=22")
        assert run("make_tfrecords.py", *arguments, photos, tmp_path / out).returncode == 0
    first, same, other = (set_bytes(tmp_path / out) for out in "abc")
    assert first == same != other


def test_make_tfrecords_refuses(tmp_path, photos):
    out = tmp_path / "out"
    fails(run("make_tfrecords.py", photos), "Name the folder of images and the folder to write to")
    fails(run("make_tfrecords.py", tmp_path / "none", out), "No file matches")
    (tmp_path / "empty" / "class").mkdir(parents=True)
    fails(run("make_tfrecords.py", tmp_path / "empty", out), "holds no file that ends in .jpg, .jpeg, .png")
    fails(run("make_tfrecords.py", tmp_path / "empty" / "class", out), "has no sub-folders")
    fails(run("make_tfrecords.py", "--num_files=99", photos, out), "cannot fill 99 files")
    fails(run("make_tfrecords.py", "--num_files=0", photos, out), "`num_files` must be at least 1, got 0")
    fails(run("make_tfrecords.py", "--quality=101", photos, out), "`quality` must be in [1, 100], got 101")
    fails(run("make_tfrecords.py", "--validation_fraction=1", photos, out), "`validation_fraction` must be in [0, 1), got 1.0")
    fails(run("make_tfrecords.py", photos, "/proc/none/out"), "Cannot write to /proc/none")
    (tmp_path / "bad" / "class").mkdir(parents=True)
    (tmp_path / "bad" / "class" / "a.jpg").write_text("no image")
    fails(run("make_tfrecords.py", tmp_path / "bad", out), "Not one of the 1 images can be read; the last is ", "a.jpg")
    assert not out.exists()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_make_tfrecords_replaces_sets_whole_or_not_at_all(tmp_path, photos):
    out = tmp_path / "out"
    assert run("make_tfrecords.py", "--num_files=3", photos, out).returncode == 0
    before = set_bytes(out)
    fails(run("make_tfrecords.py", "--num_files=2", photos, out), f"{out} holds a set already", "--overwrite")
    assert set_bytes(out) == before
    assert run("make_tfrecords.py", "--num_files=2", "--validation_fraction=0", "--overwrite", photos, out).returncode == 0
    assert sorted(os.listdir(out)) == ["labels.txt", "train-00000-of-00002", "train-00001-of-00002"]
    (out / "thesis.txt").write_text("mine")
    fails(run("make_tfrecords.py", "--overwrite", photos, out), f"{out} holds thesis.txt, which is no part of such a set")
    fails(run("make_tfrecords.py", "--overwrite", photos, "."), "cannot be replaced by a folder: name a new one inside it")


def test_make_tfrecords_of_any_image(tmp_path):
    """What becomes of each kind: as it was, JPEG, RGB, upright, smaller; what cannot be read is left out and listed."""
    zoo = image_zoo()
    (tmp_path / "photos" / "all").mkdir(parents=True)
    for name, (encoded, _, _) in zoo.items():
        (tmp_path / "photos" / "all" / f"{name}.jpg").write_bytes(encoded)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(zoo["jpeg"][0])).save(turned, "JPEG", exif=exif)
    (tmp_path / "photos" / "all" / "turned.jpeg").write_bytes(turned.getvalue())
    (tmp_path / "photos" / "all" / "notes.txt").write_text("not an image")
    arguments = ("--validation_fraction=0", tmp_path / "photos", tmp_path / "out")
    process = run("make_tfrecords.py", *arguments)
    assert (process.returncode, process.stderr) == (0, "")
    assert "passed over: 1 file that do not end in" in process.stdout
    listed = [json.loads(line) for line in (tmp_path / "out" / "unreadable_images.jsonl").read_text().splitlines()]
    unreadable = {"cut_in_half", "cut_by_one", "cut_in_its_header", "huge", "no_height", "damaged_png"}
    unreadable |= {"empty", "zeros", "text", "html", "garbage"}
    assert {Path(line["image"]).stem for line in listed} == unreadable
    assert all(line["reason"] for line in listed)
    records = {
        record["image/filename"][1][0].decode().split(".")[0]: {key: value[0] for key, (_, value) in record.items()}
        for record in read_features(tmp_path / "out" / "train-00000-of-00001")
    }
    assert set(records) == {*zoo, "turned"} - unreadable
    for name in ("jpeg", "progressive", "with_a_tail", "grayscale"):
        assert records[name]["image/encoded"] == zoo[name][0]
    assert records["turned"]["image/encoded"] == turned.getvalue()
    for name, record in records.items():
        image = Image.open(io.BytesIO(record["image/encoded"]))
        assert (image.format, image.size) == ("JPEG", (record["image/width"], record["image/height"])) == ("JPEG", (90, 60))
        assert image.mode == ("L" if name == "grayscale" else "RGB")
        if name not in ("progressive", "turned", "ycck"):  # its transform was only claimed
            original = np.asarray(Image.open(io.BytesIO(zoo["jpeg"][0]))).astype(float)
            difference = np.abs(np.asarray(image.convert("RGB")) - original).mean()
            assert difference < (60 if name in ("grayscale", "cmyk") else 12), (name, difference)
    assert rows(process.stdout)["EXIF orientation kept"] == "1 image"
    assert rows(process.stdout)["CMYK made RGB"] == "2 images"
    process = run("make_tfrecords.py", "--apply_orientation", "--overwrite", *arguments)
    assert rows(process.stdout)["turned upright"] == "1 image"
    sizes = [record["image/height"][1][0] for record in read_features(tmp_path / "out" / "train-00000-of-00001")]
    assert sorted(sizes)[-1] == 90
    process = run("make_tfrecords.py", "--resize_shorter=30", "--quality=80", "--overwrite", *arguments)
    for record in read_features(tmp_path / "out" / "train-00000-of-00001"):
        image = Image.open(io.BytesIO(record["image/encoded"][1][0]))
        assert image.size in ((45, 30), (30, 45))
        assert image.getexif().get(0x0112, 1) == 1
    process = run("index_tfrecords.py", "--verify=decode", tmp_path / "out" / "train-*")
    assert process.returncode == 0, process.stderr  # all that is written can be trained on


def test_sixteen_bits_a_pixel_are_scaled(tmp_path):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    gray = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(gray).save(tmp_path / "photos" / "a" / "deep.png")
    assert run("make_tfrecords.py", "--validation_fraction=0", tmp_path / "photos", tmp_path / "out").returncode == 0
    (record,) = read_features(tmp_path / "out" / "train-00000-of-00001")
    image = np.asarray(Image.open(io.BytesIO(record["image/encoded"][1][0])))
    assert np.abs(image - gray / 256).mean() < 2


def test_make_tfrecords_from_tfrecords(tmp_path):
    """Shuffled anew over other files, every record once; bad ones left out; unknown features kept; smaller if asked for."""
    examples = numbered_examples(50)
    for number, example in enumerate(examples):
        example |= {"note": f"record {number}", "image/height": -1}
    examples[7]["image/encoded"] = examples[7]["image/encoded"][:-30]
    for position in range(2):
        write_tfrecord(tmp_path / f"old-{position}", examples[25 * position : 25 * position + 25])
    (tmp_path / "labels.txt").write_text("".join(f"class {number}\n" for number in range(50)))
    source = tmp_path / "old-*"
    fails(run("make_tfrecords.py", source, tmp_path / "new"), "2 of 2 files have no index", "make index DATA=")
    assert run("index_tfrecords.py", source).returncode == 0
    process = run("make_tfrecords.py", "--num_files=5", "--validation_fraction=0.2", source, tmp_path / "new")
    assert (process.returncode, process.stderr) == (0, "")
    names = sorted(path.name for path in (tmp_path / "new").glob("*-of-*"))
    assert names == [*(f"train-0000{number}-of-00005" for number in range(5)), "validation-00000-of-00001"]
    written = [record for name in names for record in read_features(tmp_path / "new" / name)]
    labels = [record["image/class/label"][1][0] for record in written]
    assert sorted(labels) == [number for number in range(50) if number != 7]
    assert labels != sorted(labels)
    for record, label in zip(written, labels, strict=True):
        assert {key: values[0] for key, (_, values) in record.items()} == {
            key: value.encode() if isinstance(value, str) else value for key, value in examples[label].items()
        }
    assert json.loads((tmp_path / "new" / "unreadable_images.jsonl").read_text())["image"].startswith(
        f"{tmp_path}/old-0 at byte "
    )
    assert (tmp_path / "new" / "labels.txt").read_text() == (tmp_path / "labels.txt").read_text()
    assert run("make_tfrecords.py", "--resize_shorter=32", source, tmp_path / "small").returncode == 0
    for record in read_features(tmp_path / "small" / "train-00000-of-00001"):
        original = Image.open(io.BytesIO(examples[record["image/class/label"][1][0]]["image/encoded"]))
        image = Image.open(io.BytesIO(record["image/encoded"][1][0]))
        assert min(image.size) == min(32, *original.size)
        assert record["note"][1][0].decode() == f"record {record['image/class/label'][1][0]}"
        assert record["image/height"][1][0] == (image.height if min(original.size) > 32 else -1)


def test_tfrecords_keep_their_splits(tmp_path, photos):
    assert run("make_tfrecords.py", "--validation_fraction=0.3", photos, tmp_path / "old").returncode == 0
    assert run("index_tfrecords.py", f"{tmp_path}/old/*-of-*").returncode == 0
    process = run("make_tfrecords.py", "--num_files=2", f"{tmp_path}/old/*-of-*", tmp_path / "new")
    assert (rows(process.stdout)["train"], rows(process.stdout)["validation"]) == ("13 images", "5 images")

    def names(folder, split):
        records = [record for path in (tmp_path / folder).glob(f"{split}-*-of-?????") for record in read_features(path)]
        return sorted((record["image/class/text"][1][0], record["image/filename"][1][0]) for record in records)

    for split in ("train", "validation"):
        assert names("old", split) == names("new", split)
    process = run("make_tfrecords.py", "--validation_fraction=0.5", f"{tmp_path}/old/*-of-*", tmp_path / "again")
    assert (rows(process.stdout)["train"], rows(process.stdout)["validation"]) == ("9 images", "9 images")
    process = run("make_tfrecords.py", "--overwrite", f"{tmp_path}/old/train-*", tmp_path / "old")
    fails(process, f"{tmp_path}/old holds the TFRecords that are to be read")


def test_splits_are_known_by_the_names_of_slim_and_tfds(tmp_path):
    for split, count in (("train", 5), ("validation", 3), ("test", 2)):
        write_tfrecord(tmp_path / f"test-photos-{split}.tfrecord-00000-of-00001", numbered_examples(count))
    assert run("index_tfrecords.py", f"{tmp_path}/*.tfrecord-?????-of-?????").returncode == 0
    fails(
        run("make_tfrecords.py", f"{tmp_path}/*.tfrecord-?????-of-?????", tmp_path / "out"),
        "is of a test split by its name, and 2 of 3 files are not",
    )
    assert not (tmp_path / "out").exists()
    process = run("make_tfrecords.py", "--num_files=1", f"{tmp_path}/*-[tv][ra]*.tfrecord-?????-of-?????", tmp_path / "out")
    assert (rows(process.stdout)["train"], rows(process.stdout)["validation"]) == ("5 images", "3 images")
    assert [
        find_split(name)
        for name in (
            "train-0-of-4",
            "a/validation-0-of-4",
            "x_val-3",
            "cub-test.tfrecord-0-of-1",
            "test2017-0-of-4",
            "testing-0",
            "latest-0",
            "validated.tfrecord",
        )
    ] == ["train", "validation", "validation", "test", "test", "test", "train", "train"]


def test_make_tfrecords_never_takes_away_what_is_not_its_own(tmp_path, photos):
    assert run("make_tfrecords.py", photos, tmp_path / "out").returncode == 0
    (tmp_path / "out" / "train-notes.md").write_text("mine")
    fails(
        run("make_tfrecords.py", "--overwrite", photos, tmp_path / "out"), "holds train-notes.md, which is no part of such a set"
    )
    os.unlink(tmp_path / "out" / "train-notes.md")
    (tmp_path / "out" / "train-00000-of-00009").mkdir()
    fails(run("make_tfrecords.py", "--overwrite", photos, tmp_path / "out"), "holds train-00000-of-00009, which is no part")


def test_make_tfrecords_of_odd_names_and_depths(tmp_path):
    """Bytes that are no UTF-8 and line breaks in names; pixels whose range nothing tells are left out, not made black."""
    root = os.fsencode(tmp_path / "photos")
    for folder, name in ((b"c\xff", b"a\xff.jpg"), (b"c\xff", b"a\nb.jpg"), (b"d", b"bad\xff.jpg"), (b"d", b"good.jpg")):
        os.makedirs(os.path.join(root, folder), exist_ok=True)
        Path(os.fsdecode(os.path.join(root, folder, name))).write_bytes(b"x" if name.startswith(b"bad") else jpeg(9, 9))
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / "photos" / "d" / "float.tif")
    Image.fromarray(np.ones((9, 9), np.int32)).save(tmp_path / "photos" / "d" / "integer.tif")
    Image.new("1", (70_000, 1)).save(tmp_path / "photos" / "d" / "wide.png")
    process = run("make_tfrecords.py", "--validation_fraction=0", tmp_path / "photos", tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    assert rows(process.stdout)["train"] == "3 images"
    listed = [json.loads(line) for line in (tmp_path / "out" / "unreadable_images.jsonl").read_text().splitlines()]
    reasons = {os.fsencode(line["image"]).rsplit(b"/", 1)[1]: line["reason"] for line in listed}
    assert set(reasons) == {b"bad\xff.jpg", b"float.tif", b"integer.tif", b"wide.png"}
    assert reasons[b"float.tif"] == "pixels of mode F, whose range nothing tells"
    assert reasons[b"wide.png"].startswith("70000x1: a JPEG holds 65535 pixels each way")
    assert (tmp_path / "out" / "labels.txt").read_bytes() == b"c\xff\nd\n"
    names = {record["image/filename"][1][0] for record in read_features(tmp_path / "out" / "train-00000-of-00001")}
    assert names == {b"a\xff.jpg", b"a\nb.jpg", b"good.jpg"}
    os.mkdir(os.path.join(root, b"e\nf"))
    fails(run("make_tfrecords.py", tmp_path / "photos", tmp_path / "x"), "a line break in the name of a class")


def test_files_without_a_readable_image_are_none(tmp_path):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number in range(8):
        (tmp_path / "photos" / "a" / f"{number}.jpg").write_bytes(jpeg(9, 9) if number < 2 else b"x")
    process = run("make_tfrecords.py", "--num_files=6", "--validation_fraction=0.2", tmp_path / "photos", tmp_path / "out")
    assert process.returncode == 0, process.stderr
    names = sorted(path.name for path in (tmp_path / "out").glob("*-of-*"))
    train = [name for name in names if name.startswith("train")]
    assert train == [f"train-{number:05d}-of-{len(train):05d}" for number in range(len(train))]
    assert 1 <= len(train) <= 2
    assert run("index_tfrecords.py", f"{tmp_path}/out/*-of-*").returncode == 0


def test_a_converter_killed_alone_leaves_nothing_running(tmp_path, photos):
    command = [sys.executable, SCRIPTS / "make_sample_tfrecords.py", "--num_images=4096", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = []
    while not workers and process.poll() is None:
        workers = [child for child in children.read_text().split() if "spawn_main" in command_of(child)]
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert workers
    for _ in range(300):  # half a minute: a worker may have to wait for a slow disk before it can go
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a worker outlived its parent")
    assert run("make_tfrecords.py", photos, tmp_path / "out").returncode == 0
    assert os.listdir(tmp_path) == ["out"]


def pgrep(flag, number):
    return subprocess.run(["pgrep", flag, str(number)], capture_output=True, text=True, timeout=60, check=False).stdout.split()


def command_of(process):
    """Returns the words of a process's command; none where it is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def test_ctrl_c_in_code_that_python_does_not_see():
    """It is told that something is waited for, and a second one ends it."""
    code = f"""if True:
        import signal, sys
        sys.path.insert(0, {str(SCRIPTS)!r})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        import console

        def main(arguments):
            tf = console.import_tensorflow()
            queue = tf.queue.FIFOQueue(1, tf.int32)
            print("waits", flush=True)
            queue.dequeue()

        console._PATIENCE = 0.5
        console.run(main)
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "waits\n"
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "waiting for what runs to end; Ctrl-C again does not wait\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "moments"),
    [
        (["make_sample_tfrecords.py", "--num_images=4096", "{}/out"], (0.1, 0.7, 1.3)),
        (["index_tfrecords.py", "--force", "--verify=decode", "--index_dir={}", "data/sample/train-*"], (0.2,)),
        (["compare_throughput.py", "--files=data/sample/train-*"], (5,)),
        (["soak.py", "--images=100000"], (1,)),
        (["data_service.py", "--role=dispatcher", "--port=0"], (1,)),
    ],
    ids=lambda given: given[0].partition(".")[0] if isinstance(given[0], str) else "",
)
def test_ctrl_c_ends_it_and_all_that_it_started(sample_folder, tmp_path, arguments, moments):
    """A terminal sends it to the script and to all its processes. They end, with one word."""
    # What runs the tests may have it ignored.
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    for moment in moments:
        script, *rest = (argument.format(tmp_path) for argument in arguments)
        command = [sys.executable, "-c", code, sys.executable, SCRIPTS / script, *rest]
        process = subprocess.Popen(
            command, cwd=sample_folder, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if script == "data_service.py":
            assert process.stdout.readline()
        while script != "data_service.py" and not pgrep("-P", process.pid):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        errors = errors.replace("waiting for what runs to end; Ctrl-C again does not wait\n", "")  # where the machine is busy
        assert (process.returncode, errors) == (130, "interrupted\n")
        deadline = time.monotonic() + 60
        while any(command_of(found) for found in pgrep("-s", process.pid)):
            assert time.monotonic() < deadline, "something runs on"
            time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith((".idx", ".json"))] == []


def test_a_worker_that_is_told_of_its_parent_too_late_ends(tmp_path):
    """The parent is killed between the start of the worker and its call of `die_with_parent`."""
    code = """if True:
        import sys, time
        sys.path.insert(0, sys.argv[1])
        import console
        from concurrent.futures import ProcessPoolExecutor

        def begin():
            time.sleep(1)
            console.die_with_parent()

        with ProcessPoolExecutor(1, initializer=begin) as pool:
            pool.submit(time.sleep, 60).result()
    """
    process = subprocess.Popen([sys.executable, "-c", code, SCRIPTS])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (workers := children.read_text().split()) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert workers
    deadline = time.monotonic() + 20
    while Path(f"/proc/{workers[0]}").exists():
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.1)


def run_printed(text):
    """Runs the last `make index` or script command in `text` as it stands, by this Python."""
    environment = Path(sys.executable).parent.parent
    command = re.findall(r"(?:make index|\.venv/bin/python scripts/index_tfrecords\.py) .*", text.strip())[-1]
    command = command.replace(".venv/bin/python", sys.executable)
    made = f"{environment}/.installed"
    command = command.replace("make index", f"make --no-print-directory -o {made} VENV={environment} index")
    command = f"unset MAKEFLAGS ARGS DATA INDEX_DIR; {command}"  # `make test ARGS=...` is of these tests, and not of the command
    return subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_printed_commands_mend(tmp_path):
    """What a message tells to run is run, as it stands, and mends the matter."""
    # Faults by given checks stay faults by the command that leaves them out.
    write_tfrecord(tmp_path / "a file's name", [{"photo": jpeg(9, 9), "class": label} for label in range(200)])
    arguments = ("--verify=schema", "--num_classes=199", "--image_key=photo", "--label_key=class")
    process = run("index_tfrecords.py", *arguments, tmp_path / "a file's name")
    fails(process, "label range", faults=True)
    mended = run_printed(process.stderr)
    assert (mended.returncode, mended.stderr) == (0, "")
    dataset = DatasetSpec.from_files(tmp_path / "a file's name", image_key="photo", label_key="class")
    assert (dataset.num_records, dataset.label_range) == (199, (0, 198))
    # Many files that changed, in a folder that holds other things too; the keys are those of before.
    (tmp_path / "set").mkdir()
    for number in range(5):
        write_tfrecord(tmp_path / "set" / f"train-{number}-of-5", [{"photo": jpeg(9, 9), "class": 1}] * 300)
    pattern = f"{tmp_path}/set/*-of-*"
    assert run("index_tfrecords.py", *arguments, pattern).returncode == 0
    (tmp_path / "set" / "labels.txt").write_text("a\nb\n")
    for path in (tmp_path / "set").glob("*-of-5"):
        os.utime(path)
    with pytest.raises(InputError) as caught:
        DatasetSpec.from_files(pattern, image_key="photo", label_key="class")
    mended = run_printed(str(caught.value))
    assert (mended.returncode, mended.stderr) == (0, "")
    assert rows(mended.stdout)["verified"] == "schema 5 files"
    assert DatasetSpec.from_files(pattern, image_key="photo", label_key="class").label_range == (1, 1)


def test_the_number_of_files_follows_the_size(tmp_path, photos, monkeypatch):
    """Files of 100 to 200 MB; here of kilobytes.

    And whatever the calling program holds: a process that is forked from one that feeds TensorFlow waits for ever when Python
    collects a dataset's iterator there, whose threads it does not have.
    """
    iterator = iter(tf.data.Dataset.range(10**6).map(lambda number: number + 1, num_parallel_calls=2).prefetch(2))
    next(iterator)
    unreachable = [iterator]
    unreachable.append(unreachable)
    del iterator, unreachable
    import tfrecord_files
    from tfrecord_files import Record, Split, write_splits

    monkeypatch.setattr(tfrecord_files, "_FILE_BYTES", 150_000)
    splits = [Split(name="train", items=range(900), num_files=None), Split(name="validation", items=range(20), num_files=None)]
    written = write_splits(str(tmp_path / "out"), splits, kilobytes.make_kilobyte, labels=None)
    assert (written.num_files, written.records) == (6 + 1, {"train": 900, "validation": 20})
    sizes = [os.path.getsize(path) for path in sorted((tmp_path / "out").glob("train-*"))]
    assert len(sizes) == 6
    assert all(100_000 < size < 200_000 for size in sizes)
    assert Record(None, "").notes == ()


def test_make_tfrecords_killed_at_any_moment(tmp_path, photos):
    """The set is there whole, the old one or the new one, or not at all; the next run clears up."""
    command = [sys.executable, SCRIPTS / "make_tfrecords.py", "--overwrite", "--num_files=4", photos, tmp_path / "out"]
    subprocess.run([*command, "--seed=0"], check=True, capture_output=True)
    start = time.perf_counter()
    subprocess.run([*command, "--seed=1"], check=True, capture_output=True)
    seconds = time.perf_counter() - start
    new = set_bytes(tmp_path / "out")
    subprocess.run([*command, "--seed=0"], check=True, capture_output=True)
    old = set_bytes(tmp_path / "out")
    assert old != new
    for number in range(8):
        process = subprocess.Popen([*command, "--seed=1"], start_new_session=True, stdout=subprocess.DEVNULL)
        time.sleep(seconds * (0.3 + 0.1 * number))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        sets = [set_bytes(path) for path in tmp_path.glob("out*")]
        assert sets
        assert all(found in (old, new) for found in sets)
    subprocess.run([*command, "--seed=1"], check=True, capture_output=True)
    assert set_bytes(tmp_path / "out") == new
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_sample_data_resembles_imagenet(tmp_path):
    process = run("make_sample_tfrecords.py", "--num_images=400", "--num_validation_images=8", tmp_path)
    assert process.returncode == 0, process.stderr
    shown = rows(process.stdout)
    assert (shown["train"], shown["validation"], shown["classes"]) == ("400 images", "8 images", "8")
    records = [record for path in sorted(tmp_path.glob("train-*")) for record in read_features(path)]
    column = {key: [record[key][1][0] for record in records] for key in records[0]}
    assert len(records) == 400
    assert np.mean(column["image/height"]) == pytest.approx(401, rel=0.05)
    assert np.mean(column["image/width"]) == pytest.approx(468, rel=0.05)
    assert np.mean([len(encoded) for encoded in column["image/encoded"]]) == pytest.approx(110e3, rel=0.07)
    assert sorted(set(column["image/class/label"])) == list(range(8))
    modes = [Image.open(io.BytesIO(encoded)).mode for encoded in column["image/encoded"]]
    assert modes.count("L") == 8  # 2%
    first = Image.open(io.BytesIO(column["image/encoded"][0]))
    assert first.size == (column["image/width"][0], column["image/height"][0])


def test_sample_data_refuses(tmp_path):
    fails(run("make_sample_tfrecords.py", "--num_images=-2", tmp_path / "x"), "`num_images` must be at least 1")
    fails(run("make_sample_tfrecords.py", "--num_images=2", tmp_path / "x"), "2 train images cannot fill 4 files")
    fails(run("make_sample_tfrecords.py", "--seed=-1", tmp_path / "x"), "`seed` must be at least 0")
    fails(run("make_sample_tfrecords.py"), "Name one folder")
    assert not (tmp_path / "x").exists()


def test_sample_data_follows_the_seed(tmp_path):
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        arguments = ("--num_images=8", "--num_validation_images=1", "--num_files=1", f"--seed={seed}", tmp_path / out)
        assert run("make_sample_tfrecords.py", *arguments).returncode == 0
    first, same, other = ((tmp_path / out / "train-00000-of-00001").read_bytes() for out in "abc")
    assert first == same != other


@pytest.mark.parametrize("backend", ["dali_cpu", "tf_data"])
def test_train_on_two_replicas(sample_folder, backend):
    process = run_cold(
        "train.py",
        "--files=data/sample/train-*",
        "--validation_files=data/sample/validation-*",
        f"--backend={backend}",
        "--replicas=2",
        "--epochs=5",
        "--image_size=48",
        "--learning_rate=0.005",
        cwd=sample_folder,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""  # quiet when nothing is wrong
    assert "replicas    2: CPU:0, CPU:1" in process.stdout
    lines = [line.split() for line in process.stdout.splitlines()]
    epochs = [line for line in lines if line and line[0].isdigit()]
    assert [line[0] for line in epochs] == ["1", "2", "3", "4", "5"]
    assert float(epochs[-1][1]) < 0.8 * float(epochs[0][1])  # the training loss falls
    assert "validation accuracy" in process.stdout


def test_train_chooses_a_backend(sample_folder):
    process = run("train.py", "--files=data/sample/train-*", "--epochs=1", "--image_size=32", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert "input       " in process.stdout
    assert "validation  0 images" in process.stdout


def test_benchmark_order(tmp_path):
    process = run("benchmark_order.py", "--num_records=700", "--num_files=3", "--shards=1,3", f"--plot={tmp_path}/order.png")
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    lines = [line.split() for line in process.stdout.splitlines()]
    assert [line[:2] for line in lines if line[:1] == ["global"]][:2] == [["global", "1"], ["global", "3"]]
    assert ["global", "20", "20", "20.0"] in [line[:4] for line in lines]
    assert Image.open(tmp_path / "order.png").width > 1000
    fails(run("benchmark_order.py", "--num_files=0"), "`num_files` and `shards` must be at least 1")
    fails(run("benchmark_order.py", "--shards=a"), "`shards` must be whole numbers, got a")
    fails(run("benchmark_order.py", "--plot=x.svg"), "`plot` must end in .png, got x.svg")


def test_train_resumes(sample_folder, tmp_path):
    """On one replica, then on two; what changed is refused, what is done is done."""
    arguments = ["--files=data/sample/train-*", "--validation_files=data/sample/validation-*", "--image_size=32"]
    arguments += [f"--resume={tmp_path}/run", "--save_every=2"]
    first = run("train.py", *arguments, "--epochs=1", cwd=sample_folder)
    assert first.returncode == 0, first.stderr
    assert "validation  32 images" in first.stdout
    second = run("train.py", *arguments, "--epochs=2", "--replicas=2", cwd=sample_folder)
    assert second.returncode == 0, second.stderr
    assert second.stderr == ""
    assert f"resume      after step 3 of 6, from {tmp_path}/run" in second.stdout
    assert "\n    2 " in second.stdout
    assert "\n    1 " not in second.stdout
    done = run("train.py", *arguments, "--epochs=2", cwd=sample_folder)
    assert "Nothing to do: 2 epochs are done." in done.stdout
    fails(run("train.py", *arguments, "--epochs=3", "--seed=1", cwd=sample_folder), "`seed` was 0, is 1")
    fails(
        run("train.py", *arguments, "--order=buffer", cwd=sample_folder),
        "--resume takes an order that is planned: --order=global",
    )
    fails(run("train.py", "--files=x", "--save_every=2"), "--save_every is for --resume=FOLDER")
    process = run("train.py", *arguments, "--epochs=3", "--num_classes=50", cwd=sample_folder)
    fails(process, "is damaged, or of another model")


def test_train_mixes_and_augments(sample_folder):
    process = run(
        "train.py",
        "--files=data/sample/train-*",
        "--validation_files=data/sample/validation-*",
        "--replicas=2",
        "--epochs=2",
        "--image_size=32",
        "--auto_augment=trivial",
        "--mixup=0.2",
        "--cutmix=1",
        "--label_smoothing=0.1",
        cwd=sample_folder,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert "validation accuracy" in process.stdout


def test_mixup_and_cutmix():
    """What the step trains on: pairs of images and their labels, in the same parts."""
    mixing = importlib.import_module("mixing")
    images = np.arange(1, 9, dtype=np.float32)[:, None, None, None] * np.ones((8, 16, 16, 3), np.float32)
    labels = np.eye(8, dtype=np.float32)
    for mixup, cutmix in ((0.4, 0.0), (0.0, 1.0), (0.4, 1.0)):
        model = mixing.Mixing(keras.Sequential([keras.layers.Flatten()]), mixup=mixup, cutmix=cutmix)
        for _ in range(4):
            mixed, soft = (value.numpy() for value in model.mix(tf.constant(images), tf.constant(labels)))
            assert mixed.shape == images.shape
            np.testing.assert_allclose(soft.sum(1), 1, rtol=1e-5)
            assert ((soft > 1e-6).sum(1) <= 2).all()
            # An image of the number n alone is labelled n - 1: the label's mean is the image's, whatever was mixed.
            np.testing.assert_allclose(soft @ np.arange(1, 9), mixed.mean((1, 2, 3)), atol=0.9 if cutmix else 1e-4)


def test_train_refuses(sample_folder, dataset, tmp_path):
    sample = "--files=data/sample/train-*"
    fails(run("train.py"), "Name the TFRecord files: --files='path/train-*'")
    fails(run("train.py", "--files=none-*"), "No file matches 'none-*'")
    fails(run("train.py", sample, "--global_batch_size=97", cwd=sample_folder), "at most the number of records, 96, got 97")
    fails(run("train.py", sample, "--global_batch_size=9", "--replicas=2", cwd=sample_folder), "multiple of the 2 replicas")
    fails(run("train.py", sample, "--epochs=0", cwd=sample_folder), "`epochs` must be at least 1, got 0")
    fails(run("train.py", sample, "--mixup=-1", cwd=sample_folder), "`mixup` must be at least 0")
    fails(run("train.py", sample, "--label_smoothing=1", cwd=sample_folder), "`label_smoothing` must be in [0, 1), got 1.0")
    fails(run("train.py", sample, "--replicas=0", cwd=sample_folder), "`replicas` must be at least 1")
    fails(run("train.py", sample, "--save=model.h5", cwd=sample_folder), "`save` must end in .keras, got model.h5")
    fails(run("train.py", sample, f"--save={tmp_path}/no/model.keras", cwd=sample_folder), "there is no folder")
    fails(
        run("train.py", sample, "--label_key=label", cwd=sample_folder), "`label_key` 'label' is not in the records, which hold"
    )
    fails(run("train.py", f"--files={dataset.files[0]}"), "labels.txt to count the classes by: give their number")
    fails(run("train.py", sample, f"--save={dataset.files[0]}/m.keras", cwd=sample_folder), f"{dataset.files[0]} is no folder")


def test_labels_that_do_not_name_all_classes(tmp_path):
    """Names in whatever encoding count; too few of them are an error before training, not in it."""
    file = write_tfrecord(tmp_path / "train", numbered_examples(8))
    assert run("index_tfrecords.py", file, "--verify=schema").returncode == 0
    arguments = [f"--files={file}", "--epochs=1", "--image_size=8", "--global_batch_size=4"]
    (tmp_path / "labels.txt").write_text("a\nb\n")
    fails(run("train.py", *arguments), "There are 2 classes by labels.txt, and labels go up to 7: --num_classes must be above it")
    fails(run("train.py", *arguments, "--num_classes=7"), "There are 7 classes by --num_classes, and labels go up to 7")
    (tmp_path / "labels.txt").write_text("\n")
    fails(run("train.py", *arguments), "labels.txt names no label")
    (tmp_path / "labels.txt").write_bytes(b"\xe9\n" * 8 + b"\n")
    process = run("train.py", *arguments)
    assert (process.returncode, process.stderr) == (0, "")
    assert run("describe_images.py", f"--files={file}", "--num_images=4", "--repeats=1").returncode == 0
    fails(run("benchmark_index.py", "--num_files=4,x"), "`num_files` must be whole numbers of at least 1, got 4,x")
    fails(run("benchmark_index.py", f"--json={tmp_path}/no/x.json"), "there is no folder")


def test_images_are_described_without_those_that_are_left_out(tmp_path):
    examples = numbered_examples(6)
    examples[2]["image/encoded"] = b"text"
    file = write_tfrecord(tmp_path / "train", examples)
    assert run("index_tfrecords.py", file, "--verify=decode", "--on_bad=skip", "--max_bad_fraction=1").returncode == 0
    process = run("describe_images.py", f"--files={file}", "--num_images=9", "--repeats=1")
    assert (process.returncode, process.stderr) == (0, "")
    assert re.search(rf"{file} +5 ", process.stdout)


def test_a_shell_expands_a_pattern_to_indexes_too(tmp_path):
    """The second time; they are passed over, as those that a pattern matches are."""
    for number in range(2):
        write_tfrecord(tmp_path / f"train-{number}", numbered_examples(2))
    for _ in range(2):
        process = run("index_tfrecords.py", *sorted(tmp_path.iterdir()))
        assert process.returncode == 0, process.stderr
    fails(run("index_tfrecords.py", tmp_path / "train-0.idx"), "No file matches")


def test_compare_throughput(sample_folder, tmp_path):
    process = run(
        "compare_throughput.py",
        "--files=data/sample/train-*",
        "--seconds=0.2",
        "--repeats=2",
        "--warmup_batches=1",
        "--batch_size=16",
        f"--json={tmp_path}/result.json",
        f"--plot={tmp_path}/plot.png",
        cwd=sample_folder,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    report = json.loads((tmp_path / "result.json").read_text())
    rows = ["tf_data_serial", "tf_data_by_hand", "tf_data", "dali_cpu_by_hand", "dali_cpu_bare", "dali_cpu"]
    assert list(report["rows"])[:6] == rows
    for name in rows:
        row = report["rows"][name]
        speed = row["images_per_second"]
        assert 0 < speed["minimum"] <= speed["median"] <= speed["maximum"]
        assert row["cpu_seconds_per_1000_images"] > 0
        assert row["first_batch_seconds"] > 0
        assert row["peak_memory_bytes"] > 1e8
        assert len(report["windows"][name]["windows"]) == 2
        assert f"\n{name} " in process.stdout
    assert report["rows"]["tf_data"]["ratio_to_tf_data"] == {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    assert report["evaluation_images"]["mean_absolute_difference"] < 0.01
    assert report["versions"]["DALI"].startswith("2.4")
    assert report["dataset"]["num_records"] == 96
    assert report["cores"] == len(os.sched_getaffinity(0))
    assert "TfDataOptions(" in report["options"]["tf_data"]
    assert Image.open(tmp_path / "plot.png").width > 800


def test_compare_throughput_refuses(sample_folder, tmp_path):
    sample = "--files=data/sample/train-*"
    fails(run("compare_throughput.py"), "Name the TFRecord files")
    fails(run("compare_throughput.py", sample, "--backends=dali", cwd=sample_folder), "`backends` must be of tf_data_serial")
    fails(run("compare_throughput.py", sample, "--batch_size=97", cwd=sample_folder), "at most the 96 records, got 97")
    fails(run("compare_throughput.py", sample, "--seconds=0", cwd=sample_folder), "`seconds` must be above 0")
    fails(run("compare_throughput.py", sample, "--repeats=0", cwd=sample_folder), "`repeats` must be at least 1")
    fails(run("compare_throughput.py", sample, f"--json={tmp_path}/no/x.json", cwd=sample_folder), "there is no folder")
    fails(run("compare_throughput.py", sample, "--plot=x.svg", cwd=sample_folder), "`plot` must end in .png, got x.svg")
    fails(run("compare_throughput.py", sample, "--backends=tf_data,dali_gpu", cwd=sample_folder), "need an NVIDIA GPU")


def test_sweep(sample_folder, monkeypatch, capsys):
    """Two of its kinds of work, one on images that are resized first; all of them take minutes."""
    monkeypatch.setattr(sys, "argv", ["compare_throughput.py"])
    sweep = importlib.import_module("sweep")
    monkeypatch.setattr(sweep, "WORKS", (sweep.WORKS[1], sweep.WORKS[3]))
    monkeypatch.setattr(sweep, "_IMAGES", 32)
    files = str(sample_folder / "data/sample/train-*")
    arguments = ["--seconds=0.1", "--repeats=1", "--warmup_batches=0", "--batch_size=16", "--dtype=uint8"]
    reports = sweep.run(DatasetSpec.from_files(files), [f"--files={files}"], arguments)
    assert [report["spec"]["preprocess"].count("uint8") for report in reports.values()] == [1, 1]
    assert "antialias=True" in reports["the same, antialias, as they are"]["spec"]["preprocess"]
    report = reports["1080x1920 to 224, scaled, (1080, 1920)"]
    assert "fuse='scaled'" in report["options"]["tf_data"]
    table = capsys.readouterr().out
    assert table.count("dali_cpu_bare") + table.count("tf_data_by_hand") >= 2
    fails(run("compare_throughput.py", f"--files={files}", "--sweep", "--antialias"), "--sweep chooses --antialias itself")
    fails(run("compare_throughput.py", f"--files={files}", "--sweep", "--batch_size=500"), "at most the 96 records, got 500")


def test_compare_throughput_reports_a_row_that_dies(tmp_path):
    """A record that no decoder can read ends the measurement with an error, not with a hang or a half-written table."""
    examples = numbered_examples(8)
    examples[3]["image/encoded"] = b"this is no image"
    file = write_tfrecord(tmp_path / "train", examples)
    assert run("index_tfrecords.py", file).returncode == 0
    process = run("compare_throughput.py", f"--files={file}", "--batch_size=4", f"--json={tmp_path}/result.json")
    assert process.returncode == 1
    assert "The backends' images were not shown to be the same" in process.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_compare_images(sample_folder, layout):
    process = run("compare_images.py", "--files=data/sample/validation-*", f"--layout={layout}", "--json", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["images"] == 32
    assert result["labels_equal"]
    assert result["mean_absolute_difference"] < 0.001
    strict = run("compare_images.py", "--files=data/sample/validation-*", "--most=1e-9", cwd=sample_folder)
    assert strict.returncode == 1
    assert "the backends differ by more than 1e-09" in strict.stderr


def test_by_hand_does_the_same_work(sample_folder):
    """The hand-written baseline yields what the package's does, in kind; its decode and resize are the same operations."""
    import tensorflow as tf

    import by_hand
    from dali_tf_input import InputSpec, Preprocess, TfDataOptions
    from dali_tf_input.dataset import make_dataset

    records = DatasetSpec.from_files(str(sample_folder / "data/sample/train-*"))
    spec = InputSpec(dataset=records, preprocess=Preprocess.for_training(224), order="buffer")
    ours = make_dataset(spec, TfDataOptions(), batch_size=96)
    theirs = by_hand.make_dataset(tf, spec, batch_size=96)
    assert ours.element_spec == theirs.element_spec
    (our_images, our_labels), (their_images, their_labels) = next(iter(ours)), next(iter(theirs))
    assert sorted(our_labels.numpy()) == sorted(their_labels.numpy())
    assert float(tf.reduce_mean(our_images)) == pytest.approx(float(tf.reduce_mean(their_images)), abs=0.02)


def test_describe_images(sample_folder):
    process = run("describe_images.py", "--files=data/sample/train-*", "--num_images=20", "--repeats=2", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    header, row = process.stdout.splitlines()
    assert header.split()[:4] == ["files", "images", "height", "width"]
    assert row.split()[:2] == ["data/sample/train-*", "20"]


def test_a_measurer_dies_with_its_parent(sample_folder):
    """Also when it is stopped, as between its turns, and the parent has no time to clean up."""
    code = f"""if True:
        import os, signal, subprocess, sys
        command = [sys.executable, "{SCRIPTS}/measure_throughput.py", "--files=data/sample/train-*", "--backend=dali_cpu_bare"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    parent = subprocess.run([sys.executable, "-c", code], cwd=sample_folder, capture_output=True, text=True, check=False)
    child = Path(f"/proc/{int(parent.stdout)}/status")
    for _ in range(100):
        if not child.exists() or "State:\tZ" in child.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the measurer outlived its parent")


def test_install_reads_its_requirements_from_pyproject():
    """What install.sh hands to pip: whole requirements, one an argument."""
    functions = [
        line for line in (SCRIPTS / "install.sh").read_text().splitlines() if line.startswith(("section()", "requirement()"))
    ]
    code = "\n".join(
        [
            *functions,
            "section gpu; echo --; section plugin-build; echo --; requirement tensorflow; requirement nvidia-dali-cuda120",
        ]
    )
    shown = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("--\n")
    assert shown[0].splitlines() == ["tensorflow[and-cuda]>=2.20,<2.22"]
    assert shown[1].splitlines()[:2] == ["nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime-cu12"]
    assert shown[2].splitlines() == ["tensorflow>=2.20,<2.22", "nvidia-dali-cuda120==2.4.*"]


def test_make_help():
    process = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, check=True)
    for verb in ("install", "data", "index", "compare", "train", "test", "check", "format", "clean", "help"):
        assert f"make {verb} " in process.stdout
