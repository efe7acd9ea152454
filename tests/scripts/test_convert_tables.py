"""Converting tables: what each column becomes, and what is refused as it is not clear."""

import io
import json
import shutil

import numpy as np
import pytest
from commands import fails, rows
from conftest import refused
from conversions import convert, make, photo, read, read_features, write_table
from PIL import Image

from dali_tf_input.cli.convert.table import Columns, list_rows

TABLE = [
    {"path": "a.jpg", "label": "dog", "labels": [0, 2], "values": [0.5, -1.0], "mask": "a.png"},
    {"path": "b.jpg", "label": "ant", "labels": [], "values": [1.0, 2.0], "mask": "b.png"},
]


def write(folder, kind, table):
    """Writes rows as a .csv, without values that are None, or as a .jsonl."""
    if kind == "jsonl":
        text = "".join(json.dumps(row) + "\n" for row in table)
    else:
        words = [
            [" ".join(map(str, one)) if isinstance(one, list) else one for one in row.values()]
            for row in table
        ]
        lines = [",".join("" if one is None else str(one) for one in row) for row in words]
        text = "\n".join([",".join(table[0]), *lines])
    return write_table(folder, text, f"table.{kind}")


def list_table(table, **columns):
    """Returns what is listed of a table, and the features of its rows."""
    catalog = table.with_name("catalog")
    listed = list_rows(str(table), str(catalog), columns=Columns(**columns))
    return listed, [json.loads(line)[0] for line in catalog.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    """Two images with masks: a gray one, and one with a palette, whose indexes are classes."""
    for name, mode in (("a", "L"), ("b", "P")):
        photo(tmp_path / f"{name}.jpg", 0, 20, 30)
        mask = Image.frombytes("L", (30, 20), bytes(range(200)) * 3)
        if mode == "P":
            mask.putpalette([value for one in range(256) for value in (255 - one, 0, one)])
        mask.save(tmp_path / f"{name}.png")
    return tmp_path


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table(folder, kind):
    """Everything that it names is in the records; names become integers by labels.txt."""
    out = folder / "out"
    make("--validation_fraction=0", "--resize_shorter=10", write(folder, kind, TABLE), out)
    assert (out / "labels.txt").read_text() == "ant\ndog\n"
    for features in read_features(out / "train-00000-of-00001"):
        name = features["image/filename"][1][0].decode()
        row = next(row for row in TABLE if row["path"] == name)
        assert features["image/class/label"][1] == [["ant", "dog"].index(row["label"])]
        assert [*features["image/class/labels"][1]] == row["labels"]
        assert [*features["image/values"][1]] == row["values"]
        mask = Image.open(io.BytesIO(features["image/segmentation/class/encoded"][1][0]))
        assert (mask.mode, mask.size) == ("L", (15, 10))
        assert set(np.asarray(mask).ravel()) <= set(range(200))


def test_a_table_with_splits_and_more(tmp_path):
    """As spreadsheets write it; names of several labels; further columns are kept, or left out."""
    lines = ["Path;Label;labels;Split;age;note"]
    for number, split in enumerate(["Train", "train", "VAL", "test", "train"]):
        photo(tmp_path / f"{number}.jpg", number)
        tags = "old cat|dog" if number % 2 else "dog"
        lines.append(f"{number}.jpg;{'ab'[number % 2]};{tags};{split};{20 + number};x")
    table = write_table(tmp_path, "\n".join(lines))
    make("--keep=age", "--drop=note", table, tmp_path / "out")
    sizes = [len(read(tmp_path / "out", split)) for split in ("train", "validation", "test")]
    assert sizes == [3, 1, 1]
    (record,) = read(tmp_path / "out", "test")
    assert (record["image/class/label"], record["age"]) == (1, b"23")
    assert (tmp_path / "out" / "image.class.labels.labels.txt").read_text() == "dog\nold cat\n"
    fails(convert("--keep=age", table, tmp_path / "x"), "nothing is known of the column `note`")


def test_groups(tmp_path):
    """The images of a patient are on one side, and so are two patients with an image in common.

    A group that the table divides is an error.
    """
    lines = ["path,label,patient"]
    for number in range(60):
        photo(tmp_path / f"{number}.jpg", number)
        lines.append(f"{number}.jpg,{number % 3},p{number // 3}")
    shutil.copy(tmp_path / "0.jpg", tmp_path / "59.jpg")
    table = write_table(tmp_path, "\n".join(lines))
    process = convert(table, tmp_path / "out")
    fails(process, "nothing is known of the column `patient`", "--group=pat")
    flags = ["--validation_fraction=0.3", "--group=patient"]
    said = make(*flags, table, tmp_path / "out")
    assert "joined: 1 group with another, as they have an image in common" in said
    sides = [
        {record["image/group"] for record in read(tmp_path / "out", split)}
        for split in ("train", "validation")
    ]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert any({b"p0", b"p19"} <= side for side in sides)
    text = "path,patient,split\n0.jpg,p,train\n1.jpg,q,train\n2.jpg,p,test\n"
    table = write_table(tmp_path, text)
    process = convert("--group=patient", table, tmp_path / "x")
    fails(process, "row 3: group 'p' is in test, and in train in row 1", "--drop=patient")
    make("--drop=patient", table, tmp_path / "x")


def test_names_of_integer_labels(tmp_path):
    for number in range(3):
        photo(tmp_path / f"{number}.jpg", number)
    (tmp_path / "names").write_text("owl\njay\n")
    flags = [f"--labels={tmp_path}/names", "--validation_fraction=0"]
    table = write_table(tmp_path, "path,label\n0.jpg,0\n1.jpg,1\n2.jpg,1\n")
    make(*flags, table, tmp_path / "out")
    assert (tmp_path / "out" / "labels.txt").read_text() == "owl\njay\n"
    assert sorted(one["image/class/label"] for one in read(tmp_path / "out")) == [0, 1, 1]
    for label in (2, -1):
        table = write_table(tmp_path, f"path,label\n0.jpg,0\n1.jpg,{label}\n")
        said = f"row 2: --labels names the classes 0 to 1, and `label` is {label}."
        fails(convert(*flags, table, tmp_path / "new"), said)
    table = write_table(tmp_path, "path\n0.jpg\n")
    fails(convert(*flags, table, tmp_path / "new"), "and `label` is missing")


def test_columns_of_one_type(tmp_path):
    """An integer in one row is a float if another row has one; text is never mixed."""
    for number in range(4):
        photo(tmp_path / f"{number}.jpg", number)
    table = [{"path": f"{n}.jpg", "label": n % 2, "age": n / 2 if n % 2 else n} for n in range(4)]
    flags = ["--keep=age", "--validation_fraction=0"]
    make(*flags, write(tmp_path, "jsonl", table), tmp_path / "out")
    ages = sorted((record["age"], type(record["age"])) for record in read(tmp_path / "out"))
    assert ages == [(0.0, float), (0.5, float), (1.5, float), (2.0, float)]
    for value, said in (("old", "in rows 1 and 4"), (2**70, "row 4: `age` exceeds 64 bits")):
        table[-1]["age"] = value
        fails(convert(*flags, write(tmp_path, "jsonl", table), tmp_path / "new"), said)


def test_masks_that_are_refused(folder):
    """The image is left out, and the reason listed."""
    path, out = write(folder, "csv", TABLE), folder / "out"
    (folder / "a.png").write_bytes(b"text")
    fails(convert("--validation_fraction=0", path, out), "train images of class dog can be read")
    path.write_text(path.read_text().replace(",dog,", ",ant,"))  # a class keeps one image
    flags = ["--validation_fraction=0", "--max_left_out=0.5"]
    assert rows(make(*flags, path, out))["train"] == "1 image"
    (line,) = (out / "left_out.jsonl").read_text().splitlines()
    assert "its mask: cannot identify" in json.loads(line)["reason"]


LABELS = [
    (["2", "10", "1"], [2, 10, 1]),
    (["2", "10.0", "1.0"], [2, 10, 1]),  # as pandas writes a column that had a gap
    (["b", "a", "b"], [1, 0, 1]),
    (["-1", "0", "1"], [-1, 0, 1]),
    (["1_0", "1_1"], [0, 1]),
    (["\uff10", "\uff11"], [0, 1]),  # digits of another script
    (["inf", "nan"], [0, 1]),
    ([str(2**53), str(2**53 + 1)], [2**53, 2**53 + 1]),
    ([str(2**63 - 1), str(-(2**63))], [2**63 - 1, -(2**63)]),
    (["2", "", "1"], "row 2: `label` is empty"),
    (["2", None, "1"], "row 2: `label` is empty"),
    (["2", "x", "1"], "in all rows, or a name in all, found '2' in row 1 and 'x' in row 2"),
    (["x", "1.5", "7"], "found '7' in row 3 and 'x' in row 1"),
    (["1", "nan", "7"], "found '1' in row 1 and 'nan' in row 2"),
    (["007", "7"], "found '7' in row 2 and '007' in row 1"),
    (["1e0", "1e2"], "'1e0' in row 1 is neither an integer of 64 bits"),
    (["0.5", "1.5"], "'0.5' in row 1 is neither an integer"),
    ([str(2**63)], "is neither an integer of 64 bits"),
    (["Cat", "cat"], "'Cat' .row 1. and 'cat' .row 2. look like one class"),
    (["caf\u00e9", "cafe\u0301"], "look like one class"),
]
IS_NAME = ("b", "1_0", "\uff10", "inf")


@pytest.mark.parametrize(("labels", "expected"), LABELS)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_labels_of_a_table(tmp_path, kind, labels, expected):
    """Numbers are numbers however they are written, exact, and never turn into names."""
    table = [{"path": f"{number}.jpg", "label": label} for number, label in enumerate(labels)]
    path = write(tmp_path, kind, table)
    if isinstance(expected, str):
        with refused(expected):
            list_table(path)
        return
    listed, features = list_table(path)
    assert [one["image/class/label"] for one in features] == expected
    counts = {label: len(starts) for (_, label), starts in listed.starts.items()}
    assert counts == {label: expected.count(label) for label in expected}
    assert listed.labels == (sorted({*labels}) if labels[0] in IS_NAME else None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path,label\na,1\nb,2\na,2\n", "row 3: a is in row 1, too: an image comes once"),
        ("path,label\na,1\nb,1,2\n", "table.csv: row 2 has more values than the header"),
        ("path,label\n", "has no rows"),
        ('path,label\na.jpg,"a\nb"\n', r"row 1: 'a\\nb' cannot be the name of a class"),
        ("path,values\na,1 one\n", "row 1: `values` must be finite numbers of float32, got "),
        ("path,values\na,nan\n", "`values` must be finite numbers of float32, got 'nan'"),
        ("path,values\na,1e39\n", "`values` must be finite numbers of float32"),
        ("path,other\na,1\n", "row 1: nothing is known of the column `other`. --keep=other stores"),
        ("filename,class\na,1\n", "a column `path` is needed.*Rename `filename`"),
        ("path,class\na,1\n", "nothing is known of the column `class`. Is it `label`?"),
        ("path,split\na,later\n", "`split` must be one of train, .*got 'later'"),
        ("path,group\na,\n", "`group` is empty"),
        (",path,label\n0,a,1\n", "column 1 has no name.*index=False"),
        ("Label,path,label\n0,a,1\n", "more than one column is called `label`"),
        ("note,path,note\n0,a,1\n", "more than one column is called `note`"),
    ],
)
def test_tables_that_are_refused(tmp_path, text, said):
    with refused(said):
        list_table(write_table(tmp_path, text))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"path": 5, "label": 1}, "row 1: `path` must be a path, got 5"),
        ({"path": "a", "label": [1, 2]}, "`label` must be whole numbers, or names.*`labels`"),
        ({"path": "a", "labels": [1.5]}, r"`labels` must be whole numbers, or names, got \[1.5"),
        ({"path": "a", "labels": [{"x": 1}]}, "`labels` must be whole numbers, or names"),
        ({"path": "a", "values": ["1", "one"]}, "row 1: `values` must be finite numbers"),
        ({"path": "a", "other": 1}, "row 1: nothing is known of the column `other`"),
        ({"path": "a\ud800"}, "`path` is not Unicode text"),
        ({"path": "a", "group": "\ud800"}, "`group` is not Unicode text"),
        ({"path": "a", "age": {"years": 3}}, "`age` is no number and no text"),
        ({"path": "a", "image/encoded": "x"}, "would be a key of images"),
    ],
)
def test_rows_of_json_that_are_refused(tmp_path, row, said):
    keep = tuple({"age", "image/encoded"} & {*row})
    with refused(said):
        list_table(write_table(tmp_path, json.dumps(row) + "\n", "table.jsonl"), keep=keep)


def test_files_that_are_no_table(tmp_path):
    with refused("row 1: no JSON"):
        list_table(write_table(tmp_path, "{", "table.jsonl"))
    with refused("has no rows"):
        list_table(write_table(tmp_path, "", "table.jsonl"))
    (tmp_path / "a.csv").write_bytes(b"path,label\na.jpg,caf\xe9\n")
    with refused("a.csv is not UTF-8: .*Save it as UTF-8"):
        list_table(tmp_path / "a.csv")


def test_a_table_that_excel_wrote(tmp_path):
    """With a mark before its first column that is not seen."""
    (tmp_path / "a.csv").write_text("path,label\na.jpg,3\n", encoding="utf-8-sig")
    listed, _ = list_table(tmp_path / "a.csv")
    assert listed.labels is None
    assert [*listed.starts] == [(None, 3)]
