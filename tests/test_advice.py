"""What messages advise never costs data: each remedy is followed on a copy."""

import os
import re
import shlex
from pathlib import Path

import pytest
from commands import run
from conftest import TF_DATA, at_night, jpeg, spec_of, write_tfrecord

import dali_tf_input as dti

pytestmark = pytest.mark.usefixtures("checked_here")
COUNT = 300  # so few that one bad record may be skipped
NAMES = [f"class {number}".encode() for number in range(10)]
KEY = "image/class/label"


def write(folder, change=lambda number, example: example):
    """Writes two files; returns the records by their bytes of image."""
    image = jpeg(8, 8)
    examples = [change(number, {"image/encoded": image, KEY: number}) for number in range(COUNT)]
    for part, half in enumerate((examples[:150], examples[150:])):
        write_tfrecord(folder / f"train-{part}", half)
    return examples


def labels(number, example):
    return {**example, KEY: number % 10}


def from_1(number, example):
    return {**example, KEY: number % 100 + 1}


def damaged_image(number, example):
    return {**labels(number, example), **({"image/encoded": b"404"} if number == 7 else {})}


def one_other_label(number, example):
    return {**example, KEY: 99 if number == 7 else number % 10}


def without_label(number, example):
    return {"image/encoded": example["image/encoded"]}


def rot(folder):
    data = bytearray((folder / "train-0").read_bytes())
    data[3000] ^= 1
    (folder / "train-0").write_bytes(data)


def cut_index(folder):
    text = (folder / "train-0.idx").read_text()
    (folder / "train-0.idx").write_text(text[: len(text) // 2])


CASES = {
    # What is in the records, what happens after they were indexed, flags of the run, and how many
    # records are bad.
    "no index": (labels, lambda folder: (folder / "train-0.idx").unlink(), [], 0),
    "a cut index": (labels, cut_index, [], 0),
    "no manifest": (labels, lambda folder: (folder / "index_manifest.json").unlink(), [], 0),
    "touched": (labels, lambda folder: os.utime(folder / "train-1"), [], 0),
    "a flipped bit": (labels, rot, ["--verify=crc"], 1),
    "labels from 1": (from_1, None, ["--verify=schema", "--num_classes=100"], 0),
    "too few classes": (labels, None, ["--verify=schema", "--num_classes=9"], 0),
    "one other label": (one_other_label, None, ["--verify=schema", "--num_classes=10"], 1),
    "names": (
        lambda number, example: {**example, KEY: NAMES[number % 10]},
        None,
        ["--verify=schema", f"--label_key={KEY}"],
        0,
    ),
    "lists": (
        lambda number, example: {**example, KEY: [1, 2, 3][: number % 3 + 1]},
        None,
        ["--verify=schema", f"--label_key={KEY}"],
        0,
    ),
    "no labels": (without_label, None, ["--verify=schema", f"--label_key={KEY}"], 0),
    "another image key": (labels, None, ["--verify=schema", "--image_key=jpg"], 0),
    "a mask": (labels, None, ["--verify=schema", "--mask_key=mask"], 0),
}


BAD_IMAGE = (damaged_image, None, ["--verify=decode", "--decoder=dali"], 1)


def follow(folder, text):
    """Runs the commands that a message names; returns their messages."""
    commands = re.findall(
        r"-m dali_tf_input index ((?:'[^']*'|[^'\s])+(?: (?:'[^']*'|[^'\s])+)*)", text
    )
    return [index(folder, *shlex.split(command)) for command in commands]


def index(folder, *flags):
    process = run("index", *flags, cwd=folder)
    assert process.returncode in (0, 1), process.stderr
    return process.stderr


@pytest.mark.parametrize("case", CASES)
def test_the_index_step(tmp_path, case):
    check_the_index_step(tmp_path, *CASES[case])


@pytest.mark.slow
def test_the_index_step_of_a_bad_image(tmp_path):
    check_the_index_step(tmp_path, *BAD_IMAGE)


def check_the_index_step(tmp_path, change, happens, flags, num_bad):
    write(tmp_path, change)
    pattern = f"{tmp_path}/train-?"
    if happens:
        dti.build_index(pattern)
        happens(tmp_path)
    text = index(tmp_path, *flags, pattern) if flags else ""
    if not flags:
        with pytest.raises(dti.InputError) as caught:
            dti.Records.from_files(pattern)
        text = str(caught.value)
    for _ in range(3):  # what is advised, and then what that run advises
        texts = follow(tmp_path, text)
        text = texts[0] if texts else ""
    dti.build_index(pattern)  # what is indexed already stays as it is
    assert dti.Records.from_files(pattern, image_key="image/encoded").num_records == COUNT - num_bad


ADVICE = {
    "labels from 1": r"Labels count from 1: pass .*--label_offset=1",
    "too few classes": r"30 of 300 records do not hold what the checks name.*--num_classes",
    "names": r"Names need ClassLabel\(vocabulary=...\) \(--vocabulary\).*300 of 300 records",
    "lists": r"Lists of classes need MultiHot .*--label=multi_hot.*200 of 300 records",
    "no labels": r"300 of 300 records do not hold .*\(class, multi_hot, values or none\)",
    "a mask": r"300 of 300 records do not hold .*--mask_key",
}


@pytest.mark.parametrize("case", ADVICE)
def test_a_mistake_is_told_from_bad_records(tmp_path, case):
    """No skipping is advised, and none is done if it is asked for."""
    change, _, flags, _ = CASES[case]
    write(tmp_path, change)
    for more in ([], ["--on_bad=skip"], ["--on_bad=skip", "--max_bad_fraction=0.05"]):
        text = index(tmp_path, *flags, *more, f"{tmp_path}/train-?")
        *_, last = text.strip().splitlines()
        assert re.search(ADVICE[case].rpartition(".*")[2], last)
        assert more or re.search(ADVICE[case], text, re.DOTALL)
        assert "--on_bad=skip" not in text
        assert "--max_bad_fraction" not in text
        assert not list(tmp_path.glob("*.idx"))


def test_labels_from_0_may_end_early(tmp_path):
    """Class 0 is there: the one label beyond is wrong, and may be skipped."""
    write(tmp_path, lambda number, example: {**example, KEY: 10 if number == 7 else number % 10})
    flags = ["--verify=schema", "--num_classes=10"]
    text = index(tmp_path, *flags, f"{tmp_path}/train-?")
    assert "or skip the bad records" in text
    assert index(tmp_path, *flags, "--on_bad=skip", f"{tmp_path}/train-?") == ""
    assert dti.Records.from_files(f"{tmp_path}/train-?").num_records == COUNT - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", at_night(["a bad image", "names"], ["a bad image", "a flipped bit", "names"])
)
def test_training(tmp_path, case):
    change, happens, _, num_bad = CASES.get(case, BAD_IMAGE)
    write(tmp_path, change)
    pattern = f"{tmp_path}/train-?"
    dti.build_index(pattern)
    records = dti.Records.from_files(pattern)
    if happens:
        status = os.stat(tmp_path / "train-0")
        happens(tmp_path)
        os.utime(tmp_path / "train-0", ns=(status.st_atime_ns, status.st_mtime_ns))
    label = {"names": dti.ClassLabel(key=KEY, vocabulary=("class 0", "class 1"))}.get(case)
    preprocess = dti.Preprocess(image_size=(8, 8))
    spec = spec_of(records, "global", preprocess, label=label or dti.ClassLabel(key=KEY))
    with pytest.raises(dti.InputError) as caught:
        list(dti.load(spec, TF_DATA, batch_size=10))
    (Path(tmp_path) / "labels.txt").write_text("class 0\nclass 1\n")
    follow(tmp_path, str(caught.value))
    dti.build_index(pattern)
    assert dti.Records.from_files(pattern).num_records == COUNT - num_bad
