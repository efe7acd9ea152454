"""explore: what it finds in records with every fault, and the page."""

import base64
import io
import json
import re

import numpy as np
import pytest
from commands import run
from conftest import encode, jpeg, write_tfrecord
from PIL import Image

import dali_tf_input as dti

SCHEMA = dti.Checks(verify="schema")


def example(image, label):
    return {"image/encoded": image, "image/class/label": label}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A folder of records with every fault: sorted, uneven, with copies, leaks and odd sizes."""
    folder = tmp_path_factory.mktemp("faulty")
    train = [example(jpeg(40, 50, seed=n), 0) for n in range(100)]
    train += [example(jpeg(40, 50, seed=n), 1) for n in range(100, 140)]
    train += [example(jpeg(40, 50, seed=n), 2) for n in range(140, 144)]
    train[7] = example(train[3]["image/encoded"], 0)  # a copy
    train[105] = example(train[4]["image/encoded"], 1)  # with another label
    train[20] = example(jpeg(9, 12), 0)
    train[30] = example(jpeg(40, 200), 0)
    train[40] = example(b"no image", 0)
    held_out = [example(jpeg(40, 50, seed=n), n % 3) for n in range(200, 220)]
    held_out[5] = example(train[11]["image/encoded"], 0)
    held_out[6] = example(train[3]["image/encoded"], 0)  # of which train has two
    write_tfrecord(folder / "train-0", train[:70])
    write_tfrecord(folder / "train-1", train[70:])
    write_tfrecord(folder / "validation-0", held_out)
    (folder / "labels.txt").write_text("cat\ndog\n<bird>\n")
    dti.build_index(folder / "*-[01]", SCHEMA)
    return folder


def test_every_fault_is_found(faulty, tmp_path):
    arguments = ["--files=train-*", "--files=validation-*", f"--json={tmp_path}/found.json"]
    process = run("explore", *arguments, f"--out={tmp_path}/page.html", cwd=faulty)
    assert (process.returncode, process.stderr) == (0, "")
    for line in (
        "validation-*: 2 images also in train-*: leave them out of one of the two, records.exclude",
        "train-*: 2 images more than once, 1 of them with different labels: leave the others out",
        "train-*: 1 image cannot be used (text): index with --verify=decode.",
        "train-*: 1 image below 32 pixels, which say little.",
        "train-*: 1 image more than 3 times as long as wide, of which crops lose the most.",
        "train-*: 4 records of <bird>, 100 of cat: balance='class' in the spec serves them alike",
        "train-*: fewer than 10 records of <bird>: too few to learn from, or to judge by.",
        "train-*: sorted by class, more or less: order 'buffer' would make batches of few",
    ):
        assert f"- {line}" in process.stdout
    table = process.stdout.partition("\n\n")[0]
    assert re.search(r"^records +144 +20 *$", table, re.MULTILINE)
    assert re.search(r"^width +50 \(0 to 200\) +50 \(50 to 50\)", table, re.MULTILINE)
    assert re.search(r"^classes +3, of 4 \(<bird>\) to 100 records", table, re.MULTILINE)
    report = json.loads((tmp_path / "found.json").read_text())
    sets = {name: dti.Records.from_files(faulty / name) for name in ("train-*", "validation-*")}

    def id_of(one):
        return sets[one["set"]].find([(one["file"], one["record"])]).item()

    found = {
        finding["name"]: [[*map(id_of, group)] for group in finding["groups"]]
        for finding in report["findings"]
    }
    assert sorted(found["leaks"]) == [[3, 7, 6], [11, 5]]
    assert sorted(found["copies"]) == [[3, 7], [4, 105]]
    assert (found["tiny"], found["long"], found["unreadable"]) == ([[20]], [[30]], [[40]])
    assert report["sets"]["train-*"]["classes"] == {"0": 100, "1": 40, "2": 4}
    assert sets["train-*"].exclude([group[1] for group in found["copies"]]).num_records == 142


def test_the_page_stands_alone(faulty, tmp_path):
    process = run("explore", "--files=train-*", f"--out={tmp_path}/page.html", cwd=faulty)
    assert process.returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)='(?!data:)", page)
    assert "<bird>" not in page
    assert "&lt;bird&gt;" in page
    thumbnails = re.findall(r"src='data:image/jpeg;base64,([^']+)'", page)
    assert len(thumbnails) > 15
    for thumbnail in thumbnails:
        assert max(Image.open(io.BytesIO(base64.b64decode(thumbnail))).size) <= 96
    assert page.count("<circle") == 144
    assert page.count("<svg") == page.count("</svg>") == 3


def test_sound_records(tmp_path):
    """Without labels in the index."""
    write_tfrecord(tmp_path / "train-0", [example(jpeg(50, 60, seed=n), n) for n in range(5)])
    dti.build_index(tmp_path / "train-0")
    pattern = f"--files={tmp_path}/train-*"
    process = run("explore", pattern)
    assert process.returncode == 0
    assert "- (the index has no class of each record)" in process.stdout
    assert "Nothing that would hurt training was found." in process.stdout
    assert run("explore", pattern, "--sample=3").stdout.split()[2] == "3"


def test_odd_images(tmp_path):
    """What both backends do not decode is named, also where Pillow opens it, and shown as such."""
    bomb = bytearray(encode(np.zeros((9, 9, 3), np.uint8)))
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    gif = io.BytesIO()
    Image.new("RGB", (50, 50)).save(gif, "GIF")
    images = [bytes(bomb), gif.getvalue(), b"", jpeg(50, 60), jpeg(50, 60, seed=1)]
    write_tfrecord(tmp_path / "train-0", [example(image, 0) for image in images])
    dti.build_index(tmp_path / "train-0")
    out = [f"--out={tmp_path}/page.html", f"--json={tmp_path}/found.json"]
    process = run("explore", f"--files={tmp_path}/train-0", *out)
    assert (process.returncode, process.stderr) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    for reason, record in (("PNG image", 0), ("GIF image", 1), ("empty image", 2)):
        assert f": 1 image cannot be used ({reason}): index with" in process.stdout
        (finding,) = (one for one in found if f"({reason})" in one["text"])
        assert finding["groups"][0][0] | {"set": ""} == {
            "set": "",
            "file": "train-0",
            "record": record,
        }
    (tmp_path / "labels.txt").write_bytes(b"caf\xe9\n")
    assert "labels.txt is not UTF-8" in run("explore", f"--files={tmp_path}/train-0").stderr


def test_a_record_without_an_image(tmp_path):
    """That the sample of the index step has not seen."""
    examples = [example(jpeg(40, 50, seed=n), 0) for n in range(200)]
    examples[5] = {"image/class/label": 0}
    write_tfrecord(tmp_path / "train-0", examples)
    dti.build_index(tmp_path / "train-0")
    process = run("explore", f"--files={tmp_path}/train-0")
    assert (process.returncode, process.stderr) == (0, "")
    assert ": 1 image cannot be used (image missing): index with --verify" in process.stdout


def test_refuses(tmp_path, dataset):
    for arguments, message in (
        ([], "error: Name the TFRecord files: --files='path/train-*'"),
        ([f"--files={tmp_path}/none-*"], "error: "),
        ([f"--files={dataset.paths[0]}", "--out=page.png"], "error: `out` must end in .html"),
        ([f"--files={dataset.paths[0]}", "--sample=0"], "error: "),
    ):
        process = run("explore", *arguments)
        assert process.returncode == 1
        assert message in process.stderr
