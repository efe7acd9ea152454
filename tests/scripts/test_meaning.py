"""Converting loses nothing of what data mean: numbers of classes, sides, groups, and every file."""

import json
import shutil

import pytest
from commands import fails, rows, run, succeeds
from conftest import jpeg, write_tfrecord
from conversions import convert, images, index, make, names, photo, photos, read, write_table

from dali_tf_input import __version__
from dali_tf_input.cli.convert.writer import find_split


def test_a_set_that_grows(tmp_path):
    """An image keeps its side when others come or go, and when files or folders are renamed."""
    photos(tmp_path / "a", "xyz", range(30))
    make(tmp_path / "a", tmp_path / "first")
    held_out = images(tmp_path / "first", "validation")
    assert 3 <= len(held_out) <= 25
    photos(tmp_path / "a", "xyz", range(30, 45))
    photos(tmp_path / "a", ["new"], range(500, 520))
    for path in (tmp_path / "a" / "x").iterdir():
        path.rename(path.with_name(f"renamed {path.name}"))
    for number in range(0, 30, 4):
        (tmp_path / "a" / "y" / f"{number}.jpg").unlink()
    make("--num_files=3", tmp_path / "a", tmp_path / "second")
    assert not images(tmp_path / "second", "train") & held_out
    make("--seed=1", tmp_path / "a", tmp_path / "other")
    assert images(tmp_path / "other", "validation") & images(tmp_path / "second", "train")
    # TFRecords of the set are divided as its images are.
    make("--validation_fraction=0", tmp_path / "a", tmp_path / "all")
    files = index(tmp_path / "all")
    make("--validation_fraction=0.1", files, tmp_path / "again")
    assert names(tmp_path / "second", "validation") == names(tmp_path / "again", "validation")


def test_a_set_like_an_earlier_one(tmp_path):
    """Whatever held its images out: here another seed; and images that were re-encoded."""
    photos(tmp_path / "a", "xy", range(20))
    flags = ["--seed=7", "--validation_fraction=0.3"]
    make(*flags, "--resize_shorter=8", tmp_path / "a", tmp_path / "first")
    make(*flags, tmp_path / "a", tmp_path / "kept")
    photos(tmp_path / "a", "xy", range(20, 30))
    for old in ("first", "kept"):
        like = f"--like={index(tmp_path / old)}"
        assert "*-of-*: 40 images of it" in make(like, tmp_path / "a", tmp_path / f"{old} again")
        for split, other in (("train", "validation"), ("validation", "train")):
            assert names(tmp_path / old, split)
            assert not names(tmp_path / old, split) & names(tmp_path / f"{old} again", other)


def test_a_moved_image_keeps_its_side_like_an_earlier_set(tmp_path):
    """Small classes have an image moved, which the card lists: it stays when they grow."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    classes = [f"c{number:02}" for number in range(12)]
    photos(tmp_path / "a", classes, range(6))
    assert "moved: one image each of c" in make(tmp_path / "a", first)
    chosen = json.loads((first / "metadata.json").read_text())
    assert chosen["dali_tf_input"]["held_out"]["chosen"]["validation"]
    like = f"--like={index(first)}"
    photos(tmp_path / "a", classes, range(6, 18))
    make(like, tmp_path / "a", second)
    held_out = images(first, "validation")
    assert len(held_out) >= 12
    shutil.copytree(second, third)
    make("--overwrite", tmp_path / "a", third)
    make("--overwrite", tmp_path / "a", first)
    for again in (first, second, third):
        assert not images(again, "train") & held_out
    make("--overwrite", "--seed=1", tmp_path / "a", first)
    assert held_out & images(first, "train")
    chosen["dali_tf_input"]["held_out"]["chosen"] = {"train": ["x"]}
    (second / "metadata.json").write_text(json.dumps(chosen))
    process = convert("--overwrite", tmp_path / "a", second)
    fails(process, "second/metadata.json: `chosen` must list digests")


def test_an_earlier_set_that_divides_a_group(tmp_path):
    """Its images are for training now. Old sets know their images by class and name."""
    photos(tmp_path / "a", "xy", range(4))
    records = {"train": [], "validation": []}
    for path in sorted((tmp_path / "a").glob("*/*.jpg")):
        about = {"image/filename": path.name, "image/class/text": path.parent.name}
        about["image/class/label"] = label = "xy".index(path.parent.name)
        image = jpeg(9, 9, seed=label * 10 + int(path.stem))
        split = "validation" if path.stem == "3" else "train"
        records[split].append({"image/encoded": image, **about})
    (tmp_path / "old").mkdir()
    for split, examples in records.items():
        write_tfrecord(tmp_path / "old" / f"{split}-00000-of-00001", examples)
    like = f"--like={index(tmp_path / 'old')}"
    assert "8 images of it" in make(like, tmp_path / "a", tmp_path / "out")
    assert names(tmp_path / "out", "validation") == {"x/3.jpg", "y/3.jpg"}
    shutil.copy(tmp_path / "a" / "x" / "3.jpg", tmp_path / "a" / "x" / "2.jpg")
    said = make(like, tmp_path / "a", tmp_path / "again")
    assert "1 group of images are on both sides there; all are for training now" in said
    assert names(tmp_path / "again", "validation") == {"y/3.jpg"}


def test_a_held_out_image_that_cannot_be_read(tmp_path):
    """It does not stop the rest, if it was chosen here."""
    photos(tmp_path / "a", "xyz", range(5))
    make(tmp_path / "a", tmp_path / "out")
    held_out = names(tmp_path / "out", "validation")
    first = min(held_out)
    data = (tmp_path / "a" / first).read_bytes()
    assert len([name for name in held_out if name[0] == first[0]]) == 1
    # Digests are of the bytes, so the set is made like the first one, by names.
    (tmp_path / "a" / first).write_bytes(data[:60])
    flags = [f"--like={index(tmp_path / 'out')}", "--max_left_out=0.5"]
    said = make(*flags, tmp_path / "a", tmp_path / "again")
    assert f"warning: not one of the validation images of class {first[0]} can be read" in said
    assert names(tmp_path / "again", "validation") == held_out - {first}


def test_like_where_nothing_would_be_kept(tmp_path):
    photos(tmp_path / "a", "xy", range(6))
    photos(tmp_path / "b", "xy", range(6, 9), seed=500_000)
    make(tmp_path / "a", tmp_path / "first")
    like = f"--like={index(tmp_path / 'first')}"
    fails(convert(like, tmp_path / "b", tmp_path / "out"), "no image of the source", "--like")
    for name in ("train", "val"):
        shutil.copytree(tmp_path / "a", tmp_path / "c" / name)
    for flags in ([like, "--split=test", tmp_path / "a"], [like, tmp_path / "c"]):
        fails(convert(*flags, tmp_path / "out"), "nothing is divided: leave out --like")
    assert not (tmp_path / "out").exists()


def test_copies_are_on_one_side(tmp_path):
    """Also of other names, and in other classes, which is said."""
    photos(tmp_path / "a", "xy", range(40))
    for number in range(30):
        source = tmp_path / "a" / "x" / f"{number}.jpg"
        shutil.copy(source, tmp_path / "a" / "x" / f"copy{number}.jpg")
        if number < 5:
            shutil.copy(source, tmp_path / "a" / "y" / f"other{number}.jpg")
    said = make("--validation_fraction=0.3", tmp_path / "a", tmp_path / "out")
    assert (
        "copies: 35 images of which there is another, 5 of them in another class; none is" in said
    )
    sides = [images(tmp_path / "out", split) for split in ("train", "validation")]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_small_classes(tmp_path):
    """One of five is held out; a class of fewer may have none there, which is said."""
    photos(tmp_path / "a", "vwxyz", range(5))
    photos(tmp_path / "a", ["few"], range(800, 802))
    said = make("--validation_fraction=0.001", tmp_path / "a", tmp_path / "out")
    assert rows(said)["validation"] == "5 images"
    assert "validation has no image of few" in said
    said = make("--validation_fraction=0.999", tmp_path / "a", tmp_path / "most")
    assert rows(said)["train"] == "6 images"  # one of each


def test_every_file_is_counted(tmp_path):
    """Images of any depth and suffix are converted; what is left out is listed with its reason."""
    photos(tmp_path / "a", "xy", range(3))
    for seed, name in enumerate(("2024/1/deep.jpg", "b.jfif", "none", "C.JPE", "c.JPEG"), 50):
        photo(tmp_path / "a" / "x" / name, seed)
    (tmp_path / "a" / "x" / "again").symlink_to(tmp_path / "a" / "x")  # no way out
    for name in ("x/README.txt", "x/.hidden.jpg", ".git/a.jpg", "notes.md", "y/clip.mp4"):
        path = tmp_path / "a" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no image")
    said = make("--validation_fraction=0", tmp_path / "a", tmp_path / "out")
    assert rows(said)["train"] == "11 images"
    assert "5 files (3 not an image, 2 hidden)" in rows(said)["left out"]
    listed = map(json.loads, (tmp_path / "out/left_out.jsonl").read_text().splitlines())
    found = {line["path"].removeprefix(f"{tmp_path}/a/"): line["reason"] for line in listed}
    assert found == {
        "x/README.txt": "not an image",
        "x/.hidden.jpg": "hidden",
        ".git": "hidden",
        "notes.md": "not an image",
        "y/clip.mp4": "not an image",
    }
    (tmp_path / "a" / "y" / "phone.HEIC").touch()
    process = convert(tmp_path / "a", tmp_path / "new")
    said = "1 of 12 images are left out, more than 1.00%, such as "
    fails(process, said, "images of this format are not read (.heic)", "--max_left_out=0.084")
    assert not (tmp_path / "new").exists()
    make("--max_left_out=0.084", tmp_path / "a", tmp_path / "new")


def test_classes_without_images(tmp_path):
    """All such folders are named at once; or they have no records, and keep their numbers.

    No class may lose all of its images.
    """
    photos(tmp_path / "a", ["ant", "zebra"], range(10))
    for name, file in (("camel", "1.heic"), ("dog", "2.avif"), ("eel", None)):
        (tmp_path / "a" / name).mkdir()
        if file:
            (tmp_path / "a" / name / file).touch()
    process = convert(tmp_path / "a", tmp_path / "out")
    fails(process, "3 of 5 class folders hold no image: camel, dog, eel. ", "--skip_unreadable")
    make("--skip_unreadable", "--max_left_out=0.2", tmp_path / "a", tmp_path / "out")
    assert (tmp_path / "out" / "labels.txt").read_text() == "ant\ncamel\ndog\neel\nzebra\n"
    listed = (tmp_path / "out" / "left_out.jsonl").read_text()
    assert "images of this format are not read (.heic)" in listed
    for path in (tmp_path / "a" / "zebra").iterdir():
        path.write_bytes(b"no image")
    flags = ["--skip_unreadable", "--max_left_out=1", "--validation_fraction=0"]
    process = convert(*flags, tmp_path / "a", tmp_path / "new")
    fails(process, "Not one of the train images of class zebra can be read; the first is ")


def test_which_folders_are_the_classes(tmp_path):
    for name, seed in (("animals/cat", 0), ("animals/dog", 50), ("cars/van", 99)):
        photos(tmp_path / "a", [name], range(3), seed)
    process = convert(tmp_path / "a", tmp_path / "out")
    fails(process, "Which folders are the classes?", "--class_depth=1")
    for depth, labels in ((1, "animals\ncars\n"), (2, "animals/cat\nanimals/dog\ncars/van\n")):
        out = tmp_path / f"out{depth}"
        make(f"--class_depth={depth}", tmp_path / "a", out)
        assert (out / "labels.txt").read_text() == labels
    photo(tmp_path / "a" / "loose.jpg", 7)
    fails(convert(tmp_path / "a", tmp_path / "out"), "1 images are in no class folder, such as ")
    (tmp_path / "a" / "loose.jpg").unlink()
    (tmp_path / "a" / "Animals").mkdir()
    process = convert(tmp_path / "a", tmp_path / "out")
    fails(process, "'Animals'", "'animals'", "look like one class")


@pytest.fixture
def splits(tmp_path):
    """Folders of splits, each with two classes of 10 photos."""
    for name in ("train", "test"):
        photos(tmp_path / "a" / name, "xy", range(10), seed=len(name) * 10_000)
    return tmp_path / "a"


def count(folder):
    """Returns how many records the training, validation and test splits have."""
    return [len(read(folder, split)) for split in ("train", "validation", "test")]


def test_folders_of_splits(splits, tmp_path):
    """They stay what they are, with the same labels; validation may be held out of training."""
    make("--validation_fraction=0.2", splits, tmp_path / "part")
    first, second, third = count(tmp_path / "part")
    assert second > 0
    assert (first + second, third) == (20, 20)
    shutil.copytree(splits / "test", splits / "val")
    shutil.rmtree(splits / "val" / "x")  # it may lack a class
    (splits / "train").rename(splits / "Train")
    (splits / "test").rename(splits / "TEST")
    (splits / "README.txt").write_text("")
    (splits / ".git").mkdir()
    said = make(splits, tmp_path / "out")
    assert "2 files (1 not an image, 1 hidden)" in rows(said)["left out"]
    assert "10 images of test in validation, too, the first " in said
    assert count(tmp_path / "out") == [20, 10, 20]
    for split in ("train", "validation", "test"):
        for record in read(tmp_path / "out", split):
            assert record["image/class/label"] == "xy".index(record["image/class/text"].decode())
    assert "shared" not in make(splits / "Train", tmp_path / "divided")


def test_folders_of_splits_that_are_not_clear(splits, tmp_path):
    """What lies beside them, or is missing in one of them, is said; nothing is written."""
    (splits / "test").rename(splits / "val")

    def refuse(*parts, flags=()):
        fails(convert(*flags, splits, tmp_path / "out"), *parts)
        assert not (tmp_path / "out").exists()

    refuse("is a validation split: leave out --valid", flags=["--validation_fraction=0.5"])
    photo(splits / "loose.jpg", 7)
    refuse("1 images are in no class folder, such as ")
    (splits / "loose.jpg").unlink()
    photo(splits / "val/bee/1.jpg", 7)
    refuse("holds classes that training does not: bee")
    shutil.rmtree(splits / "val/bee")
    (splits / "valid").mkdir()
    refuse("val and valid, both of which are the valid")
    (splits / "valid").rename(splits / "extra")
    refuse("holds the splits train, val, and beside them extra")
    shutil.rmtree(splits / "extra")
    for path in (splits / "train" / "x").iterdir():
        path.unlink()
    refuse("train has no image of x, which other splits have", flags=["--skip_unreadable"])
    photo(splits / "train" / "x" / "1.jpg", 7)
    for path in [*(splits / "val").glob("*/*.jpg")]:
        path.rename(path.with_suffix(".heic"))
    refuse("20 of 31 images are left out, more than 1.00%", "(.heic)")
    shutil.rmtree(splits / "val")
    (splits / "val").mkdir()
    refuse("val holds no image")
    shutil.rmtree(splits / "train")
    refuse("and no folder train: convert each by itself")


def test_tfrecords_keep_their_splits(tmp_path):
    """Unless another part is asked for. One alone stays what it is: it would become training data
    of the user who shrinks two splits in two calls.
    """
    photos(tmp_path / "a", "xy", range(12))
    make("--validation_fraction=0.3", tmp_path / "a", tmp_path / "old")
    files = index(tmp_path / "old")
    make("--num_files=2", files, tmp_path / "new")
    for split in ("train", "validation"):
        assert names(tmp_path / "old", split) == names(tmp_path / "new", split) != set()
        make(f"{tmp_path}/old/{split}-*", tmp_path / split)
        assert {path.name.partition("-")[0] for path in (tmp_path / split).glob("*-of-*")} == {
            split
        }
    make("--validation_fraction=0.5", files, tmp_path / "again")
    assert count(tmp_path / "again") != count(tmp_path / "old")
    assert sum(count(tmp_path / "again")) == 24
    process = convert("--overwrite", f"{tmp_path}/old/train-*", tmp_path / "old")
    fails(process, f"{tmp_path}/old holds the TFRecords to be read")


def test_splits_are_known_by_the_names_of_slim_and_tfds(tmp_path):
    for split, number in (("train", 5), ("validation", 3), ("test", 2)):
        file = tmp_path / f"test-photos-{split}.tfrecord-00000-of-00001"
        examples = [{"image": jpeg(8, 8, seed=one), "label": one} for one in range(number)]
        write_tfrecord(file, examples)
    make("--num_files=1", index(tmp_path), tmp_path / "out")
    assert count(tmp_path / "out") == [5, 3, 2]
    for split, files in {
        "train": ("train-0-of-4", "latest-0", "validated.tfrecord"),
        "validation": ("a/validation-0-of-4", "x_val-3"),
        "test": ("cub-test.tfrecord-0-of-1", "test2017-0-of-4", "testing-0"),
    }.items():
        assert {find_split(file) for file in files} == {split}


def test_sources_that_cannot_be_read_as_they_are(tmp_path):
    (tmp_path / "photos.zip").touch()
    fails(convert(tmp_path / "photos.zip", tmp_path / "out"), "is an archive: unpack it")
    (tmp_path / "a" / "cat").mkdir(parents=True)
    process = convert(tmp_path / "a", tmp_path / "a" / "out")
    fails(process, "out is inside ", "/a, and would be a part of it: name another folder")
    assert not (tmp_path / "a" / "out").exists()
    process = convert("--labels_grow", tmp_path / "a", tmp_path / "out")
    fails(process, "--labels_grow adds to the names of a file: name it with --labels")


def test_numbers_of_another_set(tmp_path):
    """A test set converted by itself, and a set that is made anew with other classes."""
    photos(tmp_path / "train", ["cat", "dog", "owl"], range(5))
    photos(tmp_path / "test", ["dog", "owl"], range(3), seed=40)
    labels = tmp_path / "out" / "labels.txt"
    make("--validation_fraction=0", tmp_path / "train", tmp_path / "out")
    flags = [f"--labels={labels}", "--split=test"]
    make(*flags, tmp_path / "test", tmp_path / "tested")
    assert (tmp_path / "tested" / "labels.txt").read_text() == labels.read_text()
    assert {record["image/class/label"] for record in read(tmp_path / "tested", "test")} == {1, 2}
    photos(tmp_path / "test", ["ant"], range(3), seed=90)
    process = convert(*flags, tmp_path / "test", tmp_path / "x")
    fails(process, "has classes that --labels does not name: ant", "--labels_grow")
    make(*flags, "--labels_grow", tmp_path / "test", tmp_path / "x")
    assert (tmp_path / "x" / "labels.txt").read_text() == "cat\ndog\nowl\nant\n"
    process = convert("--overwrite", tmp_path / "test", tmp_path / "out")
    said = "holds a set whose class 0 is 'cat'; it would be 'ant', and models"
    fails(process, said, f"--labels={labels} --labels_grow", "--renumber")
    assert labels.read_text() == "cat\ndog\nowl\n"
    make("--overwrite", "--renumber", tmp_path / "test", tmp_path / "out")
    assert labels.read_text() == "ant\ndog\nowl\n"


def test_names_that_a_file_cannot_hold(tmp_path):
    """Names of all classes that look numbered, a name twice, and names that look alike."""
    photos(tmp_path / "ratios", ["4:3", "16:9"], range(2))
    fails(convert(tmp_path / "ratios", tmp_path / "out"), "All classes are called like '16:9'")
    photos(tmp_path / "a", ["cat", "dog"], range(2))
    labels = tmp_path / "labels"
    for text, said in (
        ("cat\ndog\ncat\n", "--labels names 'cat' in lines 1 and 3"),
        ("Cat\ndog\n", "'Cat' (in --labels) and 'cat' (new) look like one class"),
    ):
        labels.write_text(text)
        process = convert(f"--labels={labels}", "--labels_grow", tmp_path / "a", tmp_path / "out")
        fails(process, said)


def test_a_card_is_written(tmp_path):
    """What tfds reads; a set is replaced with its card, and a file of the user's is not."""
    photos(tmp_path / "a", "xy", range(8))
    out = tmp_path / "My set"
    make(tmp_path / "a", out)
    info = json.loads((out / "dataset_info.json").read_text())
    assert info["name"] == "my_set"
    lengths = {split["name"]: sum(map(int, split["shardLengths"])) for split in info["splits"]}
    assert lengths == {split: len(read(out, split)) for split in ("train", "validation")}
    for split in info["splits"]:
        size = sum(path.stat().st_size for path in out.glob(f"{split['name']}-*-of-?????"))
        assert int(split["numBytes"]) == size - 16 * lengths[split["name"]]
    features = json.loads((out / "features.json").read_text())["featuresDict"]["features"]
    assert set(features) == set(read(out, "train")[0])
    assert features["image/class/label"]["classLabel"] == {"numClasses": "2"}
    assert (out / "image.class.label.labels.txt").read_bytes() == (out / "labels.txt").read_bytes()
    own = json.loads((out / "metadata.json").read_text())["dali_tf_input"]
    assert own["held_out"].items() >= {"by": "image", "seed": 0, "fraction": 0.1}.items()
    (out / "metadata.json").write_text('{"mine": 1}')
    make("--overwrite", tmp_path / "a", out)
    metadata = json.loads((out / "metadata.json").read_text())
    assert metadata == {"mine": 1, "dali_tf_input": own | {"version": 1}}
    for name in ("notes.json", "mine.labels.txt"):
        (out / name).write_text("{}")
        process = convert("--overwrite", tmp_path / "a", out)
        fails(process, f"holds {name}, which is no part of such")
        (out / name).unlink()


def test_the_card_of_tfrecords(tmp_path):
    """Lists of any length are such, whatever the first record has; a label of tfds' has names.

    What a sample of the records has is not taken for what all have.
    """
    (tmp_path / "set").mkdir()
    image = jpeg(8, 8)
    examples = [
        {"image": image, "label": n % 2, "boxes": [0.5] * (n % 7), "tags": [n] * (3 - n % 2)}
        for n in range(150)
    ]
    files = tmp_path / "set" / "birds-train.tfrecord-00000-of-00001"
    write_tfrecord(files, examples)
    (tmp_path / "set" / "label.labels.txt").write_text("owl\njay\n")
    index(tmp_path / "set", "--verify=schema")
    make(files, tmp_path / "out")
    features = json.loads((tmp_path / "out" / "features.json").read_text())
    features = features["featuresDict"]["features"]
    assert features["label"]["classLabel"] == {"numClasses": "2"}
    assert features["boxes"]["sequence"]["length"] == "-1"
    assert features["tags"]["sequence"]["length"] == "-1"
    info = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    keys = [item["featureKey"] for item in info["supervisedKeys"]["tuple"]["items"]]
    assert keys == ["image", "label"]
    (tmp_path / "set" / "index_manifest.json").unlink()  # of a deeper level, which would stay
    index(tmp_path / "set")
    said = make(files, tmp_path / "sampled")
    assert "card        not written: the index knows a sample of the records" in said
    assert not (tmp_path / "sampled" / "features.json").exists()


def write_set(folder, template, labels, *, class_names=()):
    folder.mkdir()
    for split, own in labels.items():
        examples = [
            {"image/encoded": jpeg(12, 14, seed=n), "image/class/label": label, "note": "x" * n}
            for n, label in enumerate(own)
        ]
        write_tfrecord(folder / template.format(split), examples)
    if class_names:
        (folder / "labels.txt").write_text("".join(f"{name}\n" for name in class_names))
    return index(folder, "--verify=schema")


BIRDS = ("birds-{}.tfrecord-00000-of-00001", {"train": [0, 1, 2], "test": [1, 1]})


def test_a_card_for_a_set_that_has_none(tmp_path):
    """It describes what all records have; names of its own are not replaced without a word."""
    files = write_set(tmp_path / "set", *BIRDS, class_names=["owl", "jay", "tit"])
    (tmp_path / "set" / "metadata.json").write_text('{"mine": 1}')
    process = succeeds(run("card", files))
    info = json.loads((tmp_path / "set" / "dataset_info.json").read_text())
    lengths = {split["name"]: split["shardLengths"] for split in info["splits"]}
    assert lengths == {"train": ["3"], "test": ["2"]}
    assert info["splits"][0]["filepathTemplate"] == "birds-{SPLIT}.tfrecord-{SHARD_X_OF_Y}"
    metadata = json.loads((tmp_path / "set" / "metadata.json").read_text())
    assert metadata == {"mine": 1, "dali_tf_input": {"version": 1, "release": __version__}}
    assert (tmp_path / "set/image.class.label.labels.txt").read_text() == "owl\njay\ntit\n"
    assert run("card", files).returncode == 0  # the same again
    (tmp_path / "set" / "features.json").write_text("{}")
    fails(run("card", files), "holds another features.json", "--overwrite")
    assert run("card", "--overwrite", files).returncode == 0
    (tmp_path / "names").write_text("owl\njay\n")
    process = run("card", f"--labels={tmp_path}/names", files)
    fails(process, "There are 2 names, and labels go up to 2")
    fails(run("card"), "Name the TFRecord files")
    (tmp_path / "set" / "metadata.json").write_text("[]")
    fails(run("card", files), "metadata.json is no JSON object")
    files = write_set(tmp_path / "odd", "{}-0-of-1", {"train": [0]})
    fails(run("card", files), "tfds cannot name ")


@pytest.mark.slow
def test_tfds_reads_it(tmp_path):
    """Sets of folders, of a table with all that one may have, of TFRecords of these, and one that
    had no card.
    """
    tfds = pytest.importorskip("tensorflow_datasets")
    photos(tmp_path / "a", "xy", range(12))
    lines = ["path,label,labels,values,split,group,age"]
    for number in range(9):
        photo(tmp_path / f"{number}.jpg", 500 + number)
        split = ("train", "val", "test")[number % 3]
        tags = "b|a" if number % 2 else "a"
        lines.append(f"{number}.jpg,{number % 3},{tags},1.5 {number},{split},g{number},{number}")
    make("--num_files=2", tmp_path / "a", tmp_path / "folders")
    make("--keep=age", write_table(tmp_path, "\n".join(lines)), tmp_path / "table")
    make(index(tmp_path / "table", "--verify=schema"), tmp_path / "again")
    for name in ("folders", "table", "again"):
        builder = tfds.builder_from_directory(str(tmp_path / name))
        for split in builder.info.splits:
            found = tfds.as_numpy(builder.as_dataset(split=split))
            theirs = sorted(one["image/filename"] for one in found)
            ours = sorted(record["image/filename"] for record in read(tmp_path / name, split))
            assert theirs == ours
        image, label = next(iter(builder.as_dataset(split="train", as_supervised=True)))
        assert (image.shape, label.dtype.name) == ((12, 14, 3), "int64")
    assert builder.info.features["image/class/labels"].feature.names == ["a", "b"]
    builder = tfds.builder_from_directory(str(tmp_path / "folders"))
    assert builder.info.features["image/class/label"].names == ["x", "y"]
    builder = tfds.builder_from_directory(str(tmp_path / "table"))
    (one,) = tfds.as_numpy(builder.as_dataset(split="test[:1]"))
    assert one["image/values"].shape == (2,)
    assert {*one["image/class/labels"]} <= {0, 1}
    files = write_set(tmp_path / "set", *BIRDS, class_names=["owl", "jay", "tit"])
    assert run("card", files).returncode == 0
    builder = tfds.builder_from_directory(str(tmp_path / "set"))
    found = [one["image/class/label"] for one in tfds.as_numpy(builder.as_dataset(split="test"))]
    assert found == [1, 1]
    assert builder.info.features["image/class/label"].names == ["owl", "jay", "tit"]
