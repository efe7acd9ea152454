"""explore: what it finds in records with every fault, and the page."""

import base64
import io
import json
import re
import sys

import numpy as np
import pytest
from commands import fails, rows, run, succeeds
from conftest import at_night, encode, jpeg, write_tfrecord
from PIL import Image
from scipy.sparse.csgraph import connected_components

import dali_tf_input as dti
from dali_tf_input.cli.explore.near import find_groups

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
    process = succeeds(run("explore", *arguments, f"--out={tmp_path}/page.html", cwd=faulty))
    for line in (
        "validation-*: 2 images also in train-* (identical files): leave them out of one of the two",
        "train-*: 2 images more than once (identical files), 1 of them with different labels: leave",
        "train-*: 1 image cannot be used (text): index with --verify=decode.",
        "train-*: 1 image below 32 pixels, which say little.",
        "train-*: 1 image with an aspect ratio above 3:1, of which crops lose the most.",
        "train-*: 4 records of <bird>, 100 of cat: balance='class' in the spec serves them alike",
        "train-*: 1 class has fewer than 10 images (<bird>): too few to train on, or to evaluate.",
        "train-*: more or less sorted by class: order 'buffer' would make batches of few classes.",
    ):
        assert f"- {line}" in process.stdout
    table = process.stdout.partition("\n\n")[0]
    assert re.search(r"^records +144 +20 *$", table, re.MULTILINE)
    assert re.search(r"^width +50 \(0 to 200\) +50 \(50 to 50\)", table, re.MULTILINE)
    counted = r"^classes +3, 4 \(<bird>\) to 100 \(cat\) records each"
    assert re.search(counted, table, re.MULTILINE)
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


def test_a_sample_is_not_taken_for_the_set(tmp_path):
    """Its few records of a class say nothing of the class; what it shows is said to be of it."""
    examples = [example(jpeg(40, 50, seed=n // 2), n % 2) for n in range(60)]
    write_tfrecord(tmp_path / "train-0", examples)
    pattern = f"--files={tmp_path}/train-0"
    dti.build_index(tmp_path / "train-0")
    output = run("explore", pattern).stdout
    assert "- (the index has no class of each record)" in output
    dti.build_index(tmp_path / "train-0", SCHEMA)
    process = run("explore", pattern, "--sample=40")
    assert process.returncode == 0
    assert "fewer than" not in process.stdout
    assert re.search(r"^classes +2, 30 \(class 0\) to 30", process.stdout, re.MULTILINE)
    assert "train-0, sample of 40: " in process.stdout
    assert rows(process.stdout)["looked at a sample of"].strip() == "40"
    write_tfrecord(tmp_path / "good-0", [example(jpeg(50, 60, seed=n), n) for n in range(5)])
    dti.build_index(tmp_path / "good-0")
    output = run("explore", f"--files={tmp_path}/good-0").stdout
    assert "Nothing that would hurt training was found." in output


def test_labels_below_0_and_names_that_are_missing(tmp_path):
    write_tfrecord(tmp_path / "train-0", [example(jpeg(9, 9, seed=n), n % 3) for n in range(30)])
    (tmp_path / "labels.txt").write_text("only\n")
    dti.build_index(tmp_path / "train-0", SCHEMA)
    process = run("explore", f"--files={tmp_path}/train-0", "--label_offset=2")
    fails(process, "`label_offset` 2 is above the lowest label of", "train-0, 0.")
    process = run("explore", f"--files={tmp_path}/train-0")
    assert "there are 1 name of classes, and labels run to 2: complete labels.txt" in process.stdout


def saved_again(image, quality, size):
    return encode(Image.open(io.BytesIO(image)).resize(size), "JPEG", quality=quality)


def drawn(seed):
    """Returns a JPEG of smooth colors, as a photo has, other than `jpeg`'s noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((200, 150), Image.Resampling.BICUBIC)
    return encode(image, "JPEG", quality=95)


def test_near_duplicates(tmp_path):
    """Within a set and across sets; identical files are not named again."""
    train = [drawn(seed) for seed in range(30)]
    train[7] = saved_again(train[3], 60, (100, 75))
    train[9] = train[2]
    held_out = [drawn(seed) for seed in range(50, 60)]
    held_out[4] = saved_again(train[20], 70, (300, 225))
    held_out[6] = b"\xff\xd8\xff damaged"
    for name, images in (("train-0", train), ("validation-0", held_out)):
        write_tfrecord(tmp_path / name, [example(image, 0) for image in images])
        dti.build_index(tmp_path / name, SCHEMA)
    files = [f"--files={tmp_path}/{name}-0" for name in ("train", "validation")]
    process = succeeds(run("explore", *files, "--near_duplicates", f"--json={tmp_path}/found.json"))
    kind = "near duplicates: the same picture saved again, resized, or slightly changed"
    assert f"- 1 group of {kind}, within a set: look at them" in process.stdout
    assert f"- 1 group of {kind}, across the sets: look at them" in process.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    found = {
        finding["name"]: [[one["record"] for one in group] for group in finding["groups"]]
        for finding in report["findings"]
    }
    assert (found["near copies"], found["near leaks"]) == ([[3, 7]], [[20, 4]])
    assert found["copies"] == [[2, 9]]
    assert "near duplicates" not in run("explore", *files).stdout


def test_near_duplicates_need_a_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagehash", None)
    process = run("explore", f"--files={tmp_path}/none", "--near_duplicates")
    fails(
        process, "`near_duplicates` needs the library imagehash: ", "pip install 'imagehash>=4.3'"
    )


@pytest.mark.parametrize("count", at_night([2, 300], [2, 300, 3000]))
def test_groups_of_near_hashes(count):
    """Against all pairs: chains of hashes within four bits, some of them equal."""
    random = np.random.default_rng(count)
    hashes = random.integers(0, 1 << 63, count, np.uint64)
    for _ in range(count // 2):
        first, second = random.integers(0, count, 2)
        flipped = np.bitwise_or.reduce(
            1 << random.integers(0, 64, random.integers(0, 7), np.uint64)
        )
        hashes[first] = hashes[second] ^ np.uint64(flipped)
    alike = [[(int(a) ^ int(b)).bit_count() <= 4 for b in hashes] for a in hashes]
    _, own = connected_components(np.array(alike))
    groups = [np.flatnonzero(own == one) for one in {*own}]
    expected = sorted(group.tolist() for group in groups if len(group) > 1)
    assert sorted(sorted(group.tolist()) for group in find_groups(hashes)) == expected


def test_odd_images(tmp_path):
    """What both backends do not decode is named, also where Pillow opens it, and shown as such."""
    bomb = bytearray(encode(np.zeros((9, 9, 3), np.uint8)))
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    gif = encode(Image.new("RGB", (50, 50)), "GIF")
    images = [bytes(bomb), gif, b"", jpeg(50, 60), jpeg(50, 60, seed=1)]
    write_tfrecord(tmp_path / "train-0", [example(image, 0) for image in images])
    dti.build_index(tmp_path / "train-0")
    out = [f"--out={tmp_path}/page.html", f"--json={tmp_path}/found.json"]
    process = succeeds(run("explore", f"--files={tmp_path}/train-0", *out))
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    for reason, record in (("PNG image", 0), ("GIF image", 1), ("empty image", 2)):
        assert f": 1 image cannot be used ({reason}): index with" in process.stdout
        (finding,) = (one for one in found if f"({reason})" in one["text"])
        assert finding["groups"][0][0] | {"set": ""} == {
            "set": "",
            "file": "train-0",
            "record": record,
        }


def test_a_record_without_an_image(tmp_path):
    """That the sample of the index step has not seen."""
    examples = [example(jpeg(40, 50, seed=n), 0) for n in range(200)]
    examples[5] = {"image/class/label": 0}
    write_tfrecord(tmp_path / "train-0", examples)
    dti.build_index(tmp_path / "train-0")
    process = succeeds(run("explore", f"--files={tmp_path}/train-0"))
    assert ": 1 image cannot be used (image missing): index with --verify" in process.stdout
