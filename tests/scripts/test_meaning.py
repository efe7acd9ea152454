"""Converting loses nothing of what data mean: numbers of classes, sides, groups, and every file."""

import json
import shutil
from pathlib import Path

import pytest
from commands import fails, rows, run
from conftest import jpeg, refused, scan_records, write_tfrecord

from dali_tf_input import __version__
from dali_tf_input.cli.convert.listing import LeftOut
from dali_tf_input.cli.convert.table import Columns, list_rows
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.tfrecord import read_record


def convert(*arguments):
    return run("convert", "--decoder=none", *map(str, arguments))


def read(folder, split):
    """Returns the values of all records of a split."""
    found = []
    for path in sorted(Path(folder).glob(f"{split}-*-of-?????")):
        for offset, _ in scan_records(str(path)):
            record = decode_example(read_record(str(path), offset))
            found.append({key: values[0] for key, (_, values) in record.items() if len(values)})
    return found


def names(folder, split):
    return {record["image/filename"].decode() for record in read(folder, split)}


def photo(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jpeg(12, 14, seed=seed))


def photos(folder, classes, numbers, seed=0):
    for place, name in enumerate(classes):
        for number in numbers:
            photo(folder / name / f"{number}.jpg", seed + 1000 * place + number)


def test_a_set_that_grows(tmp_path):
    """An image keeps its side when others come or go, and when files or folders are renamed."""
    photos(tmp_path / "a", "xyz", range(30))
    assert convert(tmp_path / "a", tmp_path / "first").returncode == 0
    held_out = {record["image/encoded"] for record in read(tmp_path / "first", "validation")}
    assert 3 <= len(held_out) <= 25
    photos(tmp_path / "a", "xyz", range(30, 45))
    photos(tmp_path / "a", ["new"], range(500, 520))
    for path in (tmp_path / "a" / "x").iterdir():
        path.rename(path.with_name(f"renamed {path.name}"))
    for number in range(0, 30, 4):
        (tmp_path / "a" / "y" / f"{number}.jpg").unlink()
    assert convert("--num_files=3", tmp_path / "a", tmp_path / "second").returncode == 0
    train = {record["image/encoded"] for record in read(tmp_path / "second", "train")}
    assert not train & held_out
    process = convert("--seed=1", tmp_path / "a", tmp_path / "other")
    assert process.returncode == 0
    other = {record["image/encoded"] for record in read(tmp_path / "other", "validation")}
    assert other & train


def test_a_set_like_an_earlier_one(tmp_path):
    """Whatever held its images out: here another seed; and images that were re-encoded."""
    photos(tmp_path / "a", "xy", range(20))
    convert(
        "--seed=7",
        "--validation_fraction=0.3",
        "--resize_shorter=8",
        tmp_path / "a",
        tmp_path / "first",
    )
    convert("--seed=7", "--validation_fraction=0.3", tmp_path / "a", tmp_path / "kept")
    photos(tmp_path / "a", "xy", range(20, 30))
    for old in ("first", "kept"):
        run("index", f"{tmp_path}/{old}/*-of-*")
        flags = [f"--like={tmp_path}/{old}/*-of-*"]
        process = convert(*flags, tmp_path / "a", tmp_path / f"{old} again")
        assert "*-of-*: 40 images of it" in process.stdout, process.stderr
        for split, other in (("train", "validation"), ("validation", "train")):
            assert names(tmp_path / old, split)
            assert not names(tmp_path / old, split) & names(tmp_path / f"{old} again", other)


def test_a_moved_image_keeps_its_side_like_an_earlier_set(tmp_path):
    """Small classes have an image moved, which the card lists: it stays when they grow."""
    classes = [f"c{number:02}" for number in range(12)]
    photos(tmp_path / "a", classes, range(6))
    process = convert(tmp_path / "a", tmp_path / "first")
    like = f"--like={tmp_path}/first/*-of-*"
    assert "moved: one image each of c" in process.stdout
    chosen = json.loads((tmp_path / "first" / "metadata.json").read_text())
    assert chosen["dali_tf_input"]["held_out"]["chosen"]["validation"]
    run("index", f"{tmp_path}/first/*-of-*")
    photos(tmp_path / "a", classes, range(6, 30))
    assert convert(like, tmp_path / "a", tmp_path / "second").returncode == 0
    held_out = {record["image/encoded"] for record in read(tmp_path / "first", "validation")}
    assert len(held_out) >= 12
    shutil.copytree(tmp_path / "second", tmp_path / "third")
    assert convert("--overwrite", tmp_path / "a", tmp_path / "third").returncode == 0
    assert convert("--overwrite", tmp_path / "a", tmp_path / "first").returncode == 0
    for again in ("first", "second", "third"):
        train = {record["image/encoded"] for record in read(tmp_path / again, "train")}
        assert not train & held_out
    assert convert("--overwrite", "--seed=1", tmp_path / "a", tmp_path / "first").returncode == 0
    assert held_out & {record["image/encoded"] for record in read(tmp_path / "first", "train")}
    chosen["dali_tf_input"]["held_out"]["chosen"] = {"train": ["x"]}
    (tmp_path / "second" / "metadata.json").write_text(json.dumps(chosen))
    process = convert("--overwrite", tmp_path / "a", tmp_path / "second")
    fails(process, "second/metadata.json: `chosen` must list digests")


def test_what_given_splits_have_in_common(tmp_path):
    """Copies in two splits are counted and named; a group in two splits is an error."""
    photos(tmp_path / "a" / "train", "xy", range(4))
    photos(tmp_path / "a" / "test", "xy", range(2, 6))
    process = convert(tmp_path / "a", tmp_path / "out")
    assert process.returncode == 0
    assert "4 images of test in train, too, the first " in process.stdout
    process = convert(tmp_path / "a" / "train", tmp_path / "divided")
    assert "shared" not in process.stdout
    for number in range(3):
        photo(tmp_path / f"{number}.jpg", number)
    text = "path,patient,split\n0.jpg,p,train\n1.jpg,q,train\n2.jpg,p,test\n"
    table = write_table(tmp_path, text)
    process = convert("--group=patient", table, tmp_path / "x")
    fails(process, "row 3: group 'p' is in test, and in train in row 1", "--drop=patient")
    assert convert("--drop=patient", table, tmp_path / "x").returncode == 0


def test_an_earlier_set_that_divides_a_group(tmp_path):
    """Its images are for training now. Old sets know their images by class and name."""
    photos(tmp_path / "a", "xy", range(4))
    label, records = {"x": 0, "y": 1}, {"train": [], "validation": []}
    for path in sorted((tmp_path / "a").glob("*/*.jpg")):
        split = "validation" if path.stem == "3" else "train"
        about = {"image/filename": path.name, "image/class/text": path.parent.name}
        image = jpeg(9, 9, seed=label[path.parent.name] * 10 + int(path.stem))
        number = label[path.parent.name]
        records[split].append({"image/encoded": image, "image/class/label": number, **about})
    (tmp_path / "old").mkdir()
    for split, examples in records.items():
        write_tfrecord(tmp_path / "old" / f"{split}-00000-of-00001", examples)
    run("index", f"{tmp_path}/old/*-of-*")
    like = f"--like={tmp_path}/old/*-of-*"
    process = convert(like, tmp_path / "a", tmp_path / "out")
    assert "8 images of it" in process.stdout, process.stderr
    assert names(tmp_path / "out", "validation") == {"x/3.jpg", "y/3.jpg"}
    shutil.copy(tmp_path / "a" / "x" / "3.jpg", tmp_path / "a" / "x" / "2.jpg")
    process = convert(like, tmp_path / "a", tmp_path / "again")
    assert "1 group of images are on both sides there; all are for training now" in process.stdout
    assert names(tmp_path / "again", "validation") == {"y/3.jpg"}


def test_a_held_out_image_that_cannot_be_read(tmp_path):
    """It does not stop the rest, if it was chosen here."""
    photos(tmp_path / "a", "xyz", range(5))
    assert convert(tmp_path / "a", tmp_path / "out").returncode == 0
    held_out = names(tmp_path / "out", "validation")
    first = min(held_out)
    data = (tmp_path / "a" / first).read_bytes()
    assert len([name for name in held_out if name[0] == first[0]]) == 1
    # Digests are of the bytes, so the set is made like the first one, by names.
    (tmp_path / "a" / first).write_bytes(data[:60])
    run("index", f"{tmp_path}/out/*-of-*")
    flags = [f"--like={tmp_path}/out/*-of-*", "--max_left_out=0.5"]
    process = convert(*flags, tmp_path / "a", tmp_path / "again")
    assert process.returncode == 0, process.stderr
    said = f"not one of the validation images of class {first[0]} can be read"
    assert f"warning: {said}" in process.stdout
    assert names(tmp_path / "again", "validation") == held_out - {first}


def test_like_where_nothing_would_be_kept(tmp_path):
    photos(tmp_path / "a", "xy", range(6))
    photos(tmp_path / "b", "xy", range(6), seed=500_000)
    for name in "xy":
        for path in (tmp_path / "b" / name).iterdir():
            path.rename(path.with_name(f"other {path.name}"))
    convert(tmp_path / "a", tmp_path / "first")
    run("index", f"{tmp_path}/first/*-of-*")
    like = f"--like={tmp_path}/first/*-of-*"
    fails(convert(like, tmp_path / "b", tmp_path / "out"), "no image of the source", "--like")
    process = convert(like, "--split=test", tmp_path / "a", tmp_path / "out")
    fails(process, "nothing is divided: leave out --like")
    (tmp_path / "c").mkdir()
    for name in ("train", "val"):
        shutil.copytree(tmp_path / "a", tmp_path / "c" / name)
    process = convert(like, tmp_path / "c", tmp_path / "out")
    fails(process, "nothing is divided: leave out --like")
    assert not (tmp_path / "out").exists()


def test_tfrecords_and_folders_have_the_same_sides(tmp_path):
    photos(tmp_path / "a", "xy", range(30))
    convert(tmp_path / "a", tmp_path / "first")
    convert("--validation_fraction=0", tmp_path / "a", tmp_path / "all")
    run("index", f"{tmp_path}/all/train-*")
    flags = ["--validation_fraction=0.1"]
    assert convert(*flags, f"{tmp_path}/all/train-*", tmp_path / "again").returncode == 0
    assert names(tmp_path / "first", "validation") == names(tmp_path / "again", "validation")


def test_copies_are_on_one_side(tmp_path):
    """Also of other names, and in other classes, which is said."""
    photos(tmp_path / "a", "xy", range(40))
    for number in range(30):
        shutil.copy(
            tmp_path / "a" / "x" / f"{number}.jpg", tmp_path / "a" / "x" / f"copy{number}.jpg"
        )
    for number in range(5):
        shutil.copy(
            tmp_path / "a" / "x" / f"{number}.jpg", tmp_path / "a" / "y" / f"other{number}.jpg"
        )
    process = convert("--validation_fraction=0.3", tmp_path / "a", tmp_path / "out")
    said = "copies: 35 images of which there is another, 5 of them in another class; none is on"
    assert said in process.stdout
    sides = [
        {record["image/encoded"] for record in read(tmp_path / "out", split)}
        for split in ("train", "validation")
    ]
    assert sides[1]
    assert not sides[0] & sides[1]


def test_small_classes(tmp_path):
    """One of five is held out; a class of fewer may have none there, which is said."""
    photos(tmp_path / "a", "vwxyz", range(5))
    photos(tmp_path / "a", ["few"], range(800, 802))
    process = convert("--validation_fraction=0.001", tmp_path / "a", tmp_path / "out")
    assert rows(process.stdout)["validation"] == "5 images"
    assert "validation has no image of few" in process.stdout
    process = convert("--validation_fraction=0.999", tmp_path / "a", tmp_path / "most")
    assert rows(process.stdout)["train"] == "6 images"  # one of each


def write_table(folder, text, name="table.csv"):
    (folder / name).write_text(text)
    return folder / name


def test_groups(tmp_path):
    """The images of a patient are on one side, and so are two patients with an image in common."""
    lines = ["path,label,patient"]
    for number in range(120):
        photo(tmp_path / f"{number}.jpg", number)
        lines.append(f"{number}.jpg,{number % 3},p{number // 6}")
    shutil.copy(tmp_path / "0.jpg", tmp_path / "119.jpg")
    table = write_table(tmp_path, "\n".join(lines))
    fails(
        convert(table, tmp_path / "out"), "nothing is known of the column `patient`", "--group=pat"
    )
    flags = ["--validation_fraction=0.3", "--group=patient"]
    process = convert(*flags, table, tmp_path / "out")
    assert process.returncode == 0
    assert "joined: 1 group with another, as they have an image in common" in process.stdout
    groups = [
        {record["image/group"] for record in read(tmp_path / "out", split)}
        for split in ("train", "validation")
    ]
    assert all(groups)
    assert not groups[0] & groups[1]
    assert any({b"p0", b"p19"} <= side for side in groups)


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
    process = convert("--validation_fraction=0", tmp_path / "a", tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    assert rows(process.stdout)["train"] == "11 images"
    assert "5 files (3 not an image, 2 hidden)" in rows(process.stdout)["left out"]
    listed = [
        json.loads(line) for line in (tmp_path / "out/left_out.jsonl").read_text().splitlines()
    ]
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
    assert convert("--max_left_out=0.084", tmp_path / "a", tmp_path / "new").returncode == 0


def test_a_class_that_loses_all(tmp_path):
    photos(tmp_path / "a", "xy", range(60))
    for path in (tmp_path / "a" / "y").iterdir():
        path.write_bytes(b"no image")
    process = convert("--max_left_out=1", "--validation_fraction=0", tmp_path / "a", tmp_path / "o")
    fails(process, "Not one of the train images of class y can be read; the first is ")


def test_which_folders_are_the_classes(tmp_path):
    for name, seed in (("animals/cat", 0), ("animals/dog", 50), ("cars/van", 99)):
        photos(tmp_path / "a", [name], range(3), seed)
    fails(
        convert(tmp_path / "a", tmp_path / "out"),
        "Which folders are the classes?",
        "--class_depth=1",
    )
    for depth, labels in ((1, "animals\ncars\n"), (2, "animals/cat\nanimals/dog\ncars/van\n")):
        out = tmp_path / f"out{depth}"
        assert convert(f"--class_depth={depth}", tmp_path / "a", out).returncode == 0
        assert (out / "labels.txt").read_text() == labels
    photo(tmp_path / "a" / "loose.jpg", 7)
    fails(convert(tmp_path / "a", tmp_path / "out"), "1 images are in no class folder, such as ")
    (tmp_path / "a" / "loose.jpg").unlink()
    (tmp_path / "a" / "Animals").mkdir()
    fails(
        convert(tmp_path / "a", tmp_path / "out"), "'Animals'", "'animals'", "look like one class"
    )


def test_splits_of_a_folder(tmp_path):
    """What lies beside them is counted; a split, or a class in training, without images is said."""
    for name in ("train", "val"):
        photos(tmp_path / "a" / name, "xy", range(5), seed=len(name))
    (tmp_path / "a" / "README.txt").write_text("")
    (tmp_path / "a" / ".git").mkdir()
    process = convert(tmp_path / "a", tmp_path / "out")
    assert "2 files (1 not an image, 1 hidden)" in rows(process.stdout)["left out"]
    photo(tmp_path / "a" / "loose.jpg", 7)
    process = convert(tmp_path / "a", tmp_path / "new")
    fails(process, "1 images are in no class folder, such as ")
    (tmp_path / "a" / "loose.jpg").unlink()
    for path in (tmp_path / "a" / "train" / "x").iterdir():
        path.unlink()
    process = convert("--skip_unreadable", tmp_path / "a", tmp_path / "new")
    fails(process, "train has no image of x, which other splits have")
    shutil.rmtree(tmp_path / "a" / "val")
    photo(tmp_path / "a" / "train" / "x" / "1.jpg", 7)
    (tmp_path / "a" / "val").mkdir()
    fails(convert(tmp_path / "a", tmp_path / "new"), "val holds no image")
    assert not (tmp_path / "new").exists()


def test_validation_out_of_train_beside_test(tmp_path):
    for name in ("train", "test"):
        photos(tmp_path / "a" / name, "xy", range(10), seed=len(name) * 10_000)
    counts = {}
    for name, flags in (("as", []), ("part", ["--validation_fraction=0.2"])):
        process = convert(*flags, tmp_path / "a", tmp_path / name)
        assert process.returncode == 0, process.stderr
        splits = ("train", "validation", "test")
        counts[name] = [len(read(tmp_path / name, split)) for split in splits]
    assert counts["as"] == [20, 0, 20]
    assert counts["part"][1] > 0
    assert [sum(counts["part"][:2]), counts["part"][2]] == [20, 20]


@pytest.mark.parametrize(
    ("source", "flag"),
    [
        ("a", "--keep=x"),
        ("a", "--group=x"),
        ("a", "--index_dir=x"),
        ("a.csv", "--class_depth=2"),
        ("a.csv", "--skip_unreadable"),
        ("a-*", "--labels=x"),
        ("a-*", "--drop=x"),
    ],
)
def test_flags_of_another_kind_of_source(tmp_path, source, flag):
    (tmp_path / "a").mkdir()
    process = convert(flag, tmp_path / source, tmp_path / "out")
    fails(process, f"{flag.partition('=')[0]} does nothing for ", "leave it out")


def test_new_classes_of_no_list(tmp_path):
    (tmp_path / "a").mkdir()
    process = convert("--labels_grow", tmp_path / "a", tmp_path / "out")
    fails(process, "--labels_grow adds to the names of a file: name it with --labels")


def test_a_source_that_cannot_be_read_as_it_is(tmp_path):
    (tmp_path / "photos.zip").touch()
    fails(convert(tmp_path / "photos.zip", tmp_path / "out"), "is an archive: unpack it")
    (tmp_path / "a" / "cat").mkdir(parents=True)
    process = convert(tmp_path / "a", tmp_path / "a" / "out")
    fails(process, "out is inside ", "/a, and would be a part of it: name another folder")
    assert not (tmp_path / "a" / "out").exists()


def test_numbers_of_another_set(tmp_path):
    """A test set converted by itself, and a set that is made anew with other classes."""
    photos(tmp_path / "train", ["cat", "dog", "owl"], range(5))
    photos(tmp_path / "test", ["dog", "owl"], range(3), seed=40)
    labels = tmp_path / "out" / "labels.txt"
    assert convert("--validation_fraction=0", tmp_path / "train", tmp_path / "out").returncode == 0
    flags = [f"--labels={labels}", "--split=test"]
    assert convert(*flags, tmp_path / "test", tmp_path / "tested").returncode == 0
    assert (tmp_path / "tested" / "labels.txt").read_text() == labels.read_text()
    assert {record["image/class/label"] for record in read(tmp_path / "tested", "test")} == {1, 2}
    photos(tmp_path / "test", ["ant"], range(3), seed=90)
    process = convert(*flags, tmp_path / "test", tmp_path / "x")
    fails(process, "has classes that --labels does not name: ant", "--labels_grow")
    assert convert(*flags, "--labels_grow", tmp_path / "test", tmp_path / "x").returncode == 0
    assert (tmp_path / "x" / "labels.txt").read_text() == "cat\ndog\nowl\nant\n"
    process = convert("--overwrite", tmp_path / "test", tmp_path / "out")
    said = "holds a set whose class 0 is 'cat'; it would be 'ant', and models"
    fails(process, said, f"--labels={labels} --labels_grow", "--renumber")
    assert labels.read_text() == "cat\ndog\nowl\n"
    assert convert("--overwrite", "--renumber", tmp_path / "test", tmp_path / "out").returncode == 0
    assert labels.read_text() == "ant\ndog\nowl\n"


def test_a_table_with_splits_and_more(tmp_path):
    """As spreadsheets write it; names of several labels; further columns are stored, or left out."""
    lines = ["Path;Label;labels;Split;age;note"]
    for number, split in enumerate(["Train", "train", "VAL", "test", "train"]):
        photo(tmp_path / f"{number}.jpg", number)
        tags = "old cat|dog" if number % 2 else "dog"
        lines.append(f"{number}.jpg;{'ab'[number % 2]};{tags};{split};{20 + number};x")
    table = write_table(tmp_path, "\n".join(lines))
    process = convert("--keep=age", "--drop=note", table, tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    sizes = {split: len(read(tmp_path / "out", split)) for split in ("train", "validation", "test")}
    assert sizes == {"train": 3, "validation": 1, "test": 1}
    (record,) = read(tmp_path / "out", "test")
    assert (record["image/class/label"], record["age"]) == (1, b"23")
    assert (tmp_path / "out" / "image.class.labels.labels.txt").read_text() == "dog\nold cat\n"
    fails(convert("--keep=age", table, tmp_path / "x"), "nothing is known of the column `note`")


@pytest.mark.parametrize(
    ("labels", "numbers", "found"),
    [
        (["1_0", "1_1"], [0, 1], ["1_0", "1_1"]),
        (["\uff10", "\uff11"], [0, 1], ["\uff10", "\uff11"]),  # digits of another script
        ([str(2**53), str(2**53 + 1)], [2**53, 2**53 + 1], None),
        ([str(2**63 - 1), str(-(2**63))], [2**63 - 1, -(2**63)], None),
        (["inf", "nan"], [0, 1], ["inf", "nan"]),
    ],
)
def test_numbers_are_exact(tmp_path, labels, numbers, found):
    lines = [f"{number}.jpg,{label}" for number, label in enumerate(labels)]
    table = write_table(tmp_path, "\n".join(["path,label", *lines]))
    listed = list_rows(str(table), str(tmp_path / "catalog"))
    stored = [json.loads(line) for line in (tmp_path / "catalog").read_text().splitlines()]
    assert [features["image/class/label"] for features, *_ in stored] == numbers
    assert listed.labels == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path,label\na,1e0\nb,1e2\n", "'1e0' in row 1 is neither an integer of 64 bits"),
        ("path,label\na,0.5\nb,1.5\n", "'0.5' in row 1 is neither an integer"),
        (f"path,label\na,{2**63}\n", "is neither an integer of 64 bits"),
        ("path,label\na,Cat\nb,cat\n", "'Cat' .row 1. and 'cat' .row 2. look like one class"),
        ("path,label\na,caf\u00e9\nb,cafe\u0301\n", "look like one class"),
        ("path,label\na,1\nb,2\na,2\n", "row 3: a is in row 1, too: an image comes once"),
        ("path,values\na,nan\n", "`values` must be finite numbers of float32, got 'nan'"),
        ("path,values\na,1e39\n", "`values` must be finite numbers of float32"),
        ("filename,class\na,1\n", "a column `path` is needed.*Rename `filename`"),
        ("path,class\na,1\n", "nothing is known of the column `class`. Is it `label`?"),
        ("path,split\na,later\n", "`split` must be one of train, .*got 'later'"),
        ("path,group\na,\n", "`group` is empty"),
    ],
)
def test_tables_that_are_not_clear(tmp_path, text, said):
    with refused(said):
        list_rows(str(write_table(tmp_path, text)), str(tmp_path / "catalog"))


@pytest.mark.parametrize(
    ("row", "keep", "said"),
    [
        ({"path": "a", "label": [1, 2]}, "", "`label` must be whole numbers, or names.*`labels`"),
        ({"path": "a", "labels": [{"x": 1}]}, "", "`labels` must be whole numbers, or names"),
        ({"path": "a\ud800"}, "", "`path` is not Unicode text"),
        ({"path": "a", "group": "\ud800"}, "", "`group` is not Unicode text"),
        ({"path": "a", "age": {"years": 3}}, "age", "`age` is no number and no text"),
        ({"path": "a", "image/encoded": "x"}, "image/encoded", "would be a key of images"),
    ],
)
def test_values_that_json_may_have(tmp_path, row, keep, said):
    table = tmp_path / "table.jsonl"
    table.write_text(json.dumps(row) + "\n")
    columns = Columns(keep=(keep,) if keep else ())
    with refused(said):
        list_rows(str(table), str(tmp_path / "catalog"), columns=columns)


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
    fails(convert(f"--seed={2**63}", tmp_path / "a", tmp_path / "out"), "`seed` must be in")


def test_the_part_of_each_class_of_a_table(tmp_path):
    lines = ["path,label"]
    for number in range(40):
        photo(tmp_path / f"{number}.jpg", number)
        lines.append(f"{number}.jpg,{'rare' if number < 6 else 'common'}")
    process = convert(write_table(tmp_path, "\n".join(lines)), tmp_path / "out")
    assert process.returncode == 0
    found = {record["image/class/text"] for record in read(tmp_path / "out", "validation")}
    assert found == {b"rare", b"common"}


def test_columns_that_a_table_may_have():
    columns = Columns(keep=("age",), drop=("note",), group="patient")
    assert {"path", "split", "patient", "age", "note", "label", "mask"} <= columns.known
    assert "group" not in columns.known


def test_what_is_left_out_is_counted(tmp_path):
    with open(tmp_path / "list", "w+b") as stream:
        left_out = LeftOut(stream)
        left_out.add("a", "not an image", is_image=False)
        left_out.add("b", "cut", is_image=True, kind="unreadable")
        left_out.add("c", "odd", is_image=True, kind="unreadable")
        assert left_out.reasons == {"not an image": 1, "unreadable": 2}
        assert (left_out.num_images, left_out.first) == (2, "b (cut)")
    assert left_out.reasons.total() == 3


def test_a_card_is_written(tmp_path):
    """What tfds reads; a set is replaced with its card, and a file of the user's is not."""
    photos(tmp_path / "a", "xy", range(8))
    out = tmp_path / "My set"
    assert convert(tmp_path / "a", out).returncode == 0
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
    assert convert("--overwrite", tmp_path / "a", out).returncode == 0
    metadata = json.loads((out / "metadata.json").read_text())
    assert metadata == {"mine": 1, "dali_tf_input": own | {"version": 1}}
    (out / "notes.json").write_text("{}")
    fails(convert("--overwrite", tmp_path / "a", out), "holds notes.json, which is no part of such")
    (out / "notes.json").rename(out / "mine.labels.txt")
    fails(convert("--overwrite", tmp_path / "a", out), "holds mine.labels.txt, which is no part of")


def test_the_card_of_tfrecords(tmp_path):
    """Lists of any length are such lists, whatever the first record has; a label of tfds' has names.

    What a sample of the records has is not taken for what all have.
    """
    (tmp_path / "set").mkdir()
    examples = [
        {
            "image": jpeg(12, 14, seed=n),
            "label": n % 2,
            "boxes": [0.5] * n,
            "tags": [n] * (3 - n % 2),
        }
        for n in range(600)
    ]
    files = tmp_path / "set" / "birds-train.tfrecord-00000-of-00001"
    write_tfrecord(files, examples)
    (tmp_path / "set" / "label.labels.txt").write_text("owl\njay\n")
    run("index", "--verify=schema", files)
    assert convert(files, tmp_path / "out").returncode == 0
    features = json.loads((tmp_path / "out" / "features.json").read_text())
    features = features["featuresDict"]["features"]
    assert features["label"]["classLabel"] == {"numClasses": "2"}
    assert features["boxes"]["sequence"]["length"] == "-1"
    assert features["tags"]["sequence"]["length"] == "-1"
    info = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    keys = [item["featureKey"] for item in info["supervisedKeys"]["tuple"]["items"]]
    assert keys == ["image", "label"]
    (tmp_path / "set" / "index_manifest.json").unlink()  # of a deeper level, which would stay
    run("index", files)
    process = convert(files, tmp_path / "sampled")
    assert process.returncode == 0, process.stderr
    assert "card        not written: the index knows a sample of the records" in process.stdout
    assert not (tmp_path / "sampled" / "features.json").exists()


def test_names_of_integer_labels(tmp_path):
    for number in range(3):
        photo(tmp_path / f"{number}.jpg", number)
    (tmp_path / "names").write_text("owl\njay\n")
    table = write_table(tmp_path, "path,label\n0.jpg,0\n1.jpg,1\n2.jpg,1\n")
    flags = [f"--labels={tmp_path}/names", "--validation_fraction=0"]
    process = convert(*flags, table, tmp_path / "out")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "out" / "labels.txt").read_text() == "owl\njay\n"
    found = [record["image/class/label"] for record in read(tmp_path / "out", "train")]
    assert sorted(found) == [0, 1, 1]
    for label in (2, -1):
        table = write_table(tmp_path, f"path,label\n0.jpg,0\n1.jpg,{label}\n")
        said = f"row 2: --labels names the classes 0 to 1, and `label` is {label}."
        fails(convert(*flags, table, tmp_path / "new"), said)
    table = write_table(tmp_path, "path\n0.jpg\n")
    fails(convert(*flags, table, tmp_path / "new"), "and `label` is missing")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (",path,label", ["column 1 has no name", "index=False"]),
        ("Label,path,label", ["more than one column is called `label`"]),
        ("note,path,note", ["more than one column is called `note`"]),
    ],
)
def test_columns_without_names_of_their_own(tmp_path, header, said):
    table = write_table(tmp_path, f"{header}\n0,0.jpg,1\n")
    fails(convert(table, tmp_path / "out"), *said)


def test_columns_of_one_type(tmp_path):
    """A number that is an integer in one row is a float if another row's is; text is never mixed."""
    for number in range(4):
        photo(tmp_path / f"{number}.jpg", number)
    lines = [{"path": f"{n}.jpg", "label": n % 2, "age": n / 2 if n % 2 else n} for n in range(4)]
    table = write_table(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "t.jsonl")
    flags = ["--keep=age", "--validation_fraction=0"]
    process = convert(*flags, table, tmp_path / "out")
    assert process.returncode == 0, process.stderr
    ages = sorted(
        (record["age"], type(record["age"])) for record in read(tmp_path / "out", "train")
    )
    assert ages == [(0.0, float), (0.5, float), (1.5, float), (2.0, float)]
    for value, said in (("old", "in rows 1 and 4"), (2**70, "row 4: `age` exceeds 64 bits")):
        lines[-1]["age"] = value
        write_table(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "t.jsonl")
        fails(convert(*flags, table, tmp_path / "new"), said)


@pytest.mark.slow
def test_tfds_reads_it(tmp_path):
    """Sets of folders, of a table with all that one may have, and of TFRecords of these."""
    tfds = pytest.importorskip("tensorflow_datasets")
    photos(tmp_path / "a", "xy", range(12))
    lines = ["path,label,labels,values,split,group,age"]
    for number in range(9):
        photo(tmp_path / f"{number}.jpg", 500 + number)
        split = ("train", "val", "test")[number % 3]
        tags = "b|a" if number % 2 else "a"
        lines.append(f"{number}.jpg,{number % 3},{tags},1.5 {number},{split},g{number},{number}")
    table = write_table(tmp_path, "\n".join(lines))
    assert convert("--num_files=2", tmp_path / "a", tmp_path / "folders").returncode == 0
    assert convert("--keep=age", table, tmp_path / "table").returncode == 0
    run("index", "--verify=schema", f"{tmp_path}/table/*-of-*")
    assert convert(f"{tmp_path}/table/*-of-*", tmp_path / "again").returncode == 0
    for name in ("folders", "table", "again"):
        builder = tfds.builder_from_directory(str(tmp_path / name))
        for split in builder.info.splits:
            theirs = sorted(
                one["image/filename"] for one in tfds.as_numpy(builder.as_dataset(split=split))
            )
            ours = sorted(record["image/filename"] for record in read(tmp_path / name, split))
            assert theirs == ours
        image, label = next(iter(builder.as_dataset(split="train", as_supervised=True)))
        assert (image.shape, label.dtype.name) == ((12, 14, 3), "int64")
    assert builder.info.features["image/class/labels"].feature.names == ["a", "b"]
    builder = tfds.builder_from_directory(str(tmp_path / "folders"))
    assert builder.info.features["image/class/label"].names == ["x", "y"]
    (one,) = tfds.as_numpy(
        tfds.builder_from_directory(str(tmp_path / "table")).as_dataset(split="test[:1]")
    )
    assert one["image/values"].shape == (2,)
    assert {*one["image/class/labels"]} <= {0, 1}


def write_set(folder, template, labels, *, names=None):
    folder.mkdir()
    for split, own in labels.items():
        examples = [
            {"image/encoded": jpeg(12, 14, seed=n), "image/class/label": label, "note": "x" * n}
            for n, label in enumerate(own)
        ]
        write_tfrecord(folder / template.format(split), examples)
    if names:
        (folder / "labels.txt").write_text("".join(f"{name}\n" for name in names))
    run("index", "--verify=schema", f"{folder}/*-of-*")
    return f"{folder}/*-of-*"


def test_a_card_for_a_set_that_has_none(tmp_path):
    """It describes what all records have; names of its own are not replaced without a word."""
    template, labels = "birds-{}.tfrecord-00000-of-00001", {"train": [0, 1, 2], "test": [1, 1]}
    files = write_set(tmp_path / "set", template, labels, names=["owl", "jay", "tit"])
    (tmp_path / "set" / "metadata.json").write_text('{"mine": 1}')
    process = run("card", files)
    assert process.returncode == 0, process.stderr
    info = json.loads((tmp_path / "set" / "dataset_info.json").read_text())
    assert {split["name"]: split["shardLengths"] for split in info["splits"]} == {
        "train": ["3"],
        "test": ["2"],
    }
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
def test_tfds_reads_a_set_that_had_no_card(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    template, labels = "birds-{}.tfrecord-00000-of-00001", {"train": [0, 1, 2], "test": [1, 1]}
    files = write_set(tmp_path / "set", template, labels, names=["owl", "jay", "tit"])
    assert run("card", files).returncode == 0
    builder = tfds.builder_from_directory(str(tmp_path / "set"))
    found = [one["image/class/label"] for one in tfds.as_numpy(builder.as_dataset(split="test"))]
    assert found == [1, 1]
    assert builder.info.features["image/class/label"].names == ["owl", "jay", "tit"]
