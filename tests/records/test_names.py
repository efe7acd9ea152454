"""Ids and names of records: what they mean when an index skips another record, or files come."""

import dataclasses
import json
import os

import numpy as np
import pytest
from conftest import (
    TF_DATA,
    jpeg,
    numbered_examples,
    refused,
    spec_of,
    write_indexed,
    write_tfrecord,
)

import dali_tf_input as dti
from dali_tf_input.index.build import IndexFaultsError
from dali_tf_input.records.losses import read_losses, write_losses

SCHEMA = dti.Checks(verify="schema")
SKIP = {"on_bad": "skip", "max_bad_fraction": 1.0}


@pytest.fixture
def set_of_two(tmp_path):
    """Two files of 4 and 5 records with labels 0 to 8, of which record 1 has an empty image."""
    examples = numbered_examples(9)
    examples[1]["image/encoded"] = b""
    for number, part in enumerate((examples[:4], examples[4:])):
        write_tfrecord(tmp_path / f"train-{number}", part)
    return str(tmp_path / "train-?")


def index(files, checks=None):
    """Indexes files, by default at level "framing", which skips none."""
    dti.build_index(files, checks, **SKIP)
    return dti.Records.from_files(files)


def test_skipping_a_record_moves_no_other(set_of_two):
    """Ids and names, in all that takes them; the skipped one is gone from all."""
    before = index(set_of_two)
    assert before.ids.tolist() == [*range(9)]
    halves = [before.split(a=0.5, b=0.5)["a"].ids.tolist()]
    were = [(before.read(record), before.locate(record)) for record in range(9)]
    after = index(set_of_two, SCHEMA)
    assert after.ids.tolist() == [0, *range(2, 9)]
    assert (after.num_records, after.num_all, after.num_skipped) == (8, 9, 1)
    for record in after.ids.tolist():
        assert (after.read(record), after.locate(record)) == were[record]
        assert after.labels[after.ids.tolist().index(record)] == record
    for name in (5, ("train-1", 1)):
        assert after.relabel(ids={name: 100}).labels.tolist() == [0, 2, 3, 4, 100, 6, 7, 8]
        assert after.exclude([name]).labels.tolist() == [0, 2, 3, 4, 6, 7, 8]
        assert after.select([name, 0]).labels.tolist() == [0, 5]
    assert after.exclude([1]) == after  # as it was before
    assert after.relabel(ids={1: 7}).labels.tolist() == after.labels.tolist()
    with refused("`ids` must be ids of records that the index does not skip, got 1"):
        after.select([0, 1])
    with refused("The index skips record 1 of .*train-0, which is bad: bad_records.jsonl"):
        after.locate(1)
    halves.append(after.split(a=0.5, b=0.5)["a"].ids.tolist())
    assert [record for record in halves[0] if record != 1] == halves[1]


@pytest.mark.slow
def test_batches_name_the_same_records(set_of_two):
    """Record ids in batches, and of the steps of a plan."""
    records = index(set_of_two, SCHEMA)
    spec = spec_of(records, "global", dti.Preprocess(image_size=(8, 8)), record_ids=True)
    train = dti.load(spec, TF_DATA, batch_size=4)
    for step, (batch, labels) in enumerate(train):
        assert batch["record_id"].numpy().tolist() == labels.numpy().tolist()
        assert train.records_of(step).tolist() == labels.numpy().tolist()


def test_names(set_of_two, tmp_path):
    records = index(set_of_two)
    assert records.locate(6)[:2] == (str(tmp_path / "train-1"), 2)
    everything = [records.locate(record) for record in range(9)]
    assert records.find(everything).tolist() == [*range(9)]
    assert records.find([("train-1", np.int64(0)), 3]).tolist() == [4, 3]
    (tmp_path / "another").mkdir()
    other = write_indexed(tmp_path / "another" / "train-1", numbered_examples(3), SCHEMA)
    both = records + other
    assert both.find([("another/train-1", 2)]).tolist() != both.find([records.locate(6)]).tolist()
    for message, names in {
        "`ids` names a record of 'train-1': 2 of these files have that name": [("train-1", 0)],
        "`ids` names a record of 'rain-0': no file here has that name": [("rain-0", 0)],
        r"`ids` must be a number of a record of train-0, in .0, 4., got 4": [("train-0", 4)],
        r"`ids` must be ids, or .file, number. of records, got .'train-0',.": [("train-0",)],
        r"`ids` must be ids, or .file, number. of records, got .3, 'x'.": [(3, "x")],
    }.items():
        with refused(message):
            both.find(names)


def test_losses_survive_skipping_and_further_files(set_of_two, tmp_path):
    before = index(set_of_two)
    write_losses(str(tmp_path / "blame"), before, np.arange(9, dtype=np.float32), [])
    more = write_tfrecord(tmp_path / "before", numbered_examples(2))
    after = index([more, set_of_two], SCHEMA)
    losses, _ = read_losses(str(tmp_path / "blame"), after)
    assert after.find([("train-0", 0)]).tolist() == [2]
    assert np.isnan(losses[:2]).all()
    assert losses[2:].tolist() == [*range(9)]
    write_indexed(tmp_path / "train-0", numbered_examples(4)[::-1], SCHEMA)  # other records
    with refused("holds the losses of other records, such as the 4 of a file train-0"):
        read_losses(str(tmp_path / "blame"), dti.Records.from_files(tmp_path / "train-0"))
    about = {"losses": np.zeros(9, np.float32), "spikes": []}
    np.savez(tmp_path / "blame" / "blame.npz", about="0", **about)
    with refused("an earlier version of dali_tf_input wrote it. Remove it, or name another"):
        read_losses(str(tmp_path / "blame"), after)


def as_earlier_version(folder):
    """Rewrites a manifest as version 3 had it."""
    path = folder / "index_manifest.json"
    document = json.loads(path.read_text())
    document["version"] = 3
    for entry in document["files"].values():
        del entry["skipped_numbers"], entry["framing_crc"]
    path.write_text(json.dumps({**document, "whole": {}}))


def test_a_manifest_of_an_earlier_version(set_of_two, tmp_path):
    """Its indexes are refused; the command in the message keeps the level and what is skipped, and
    a run over some files keeps what is known of the others.
    """
    index(set_of_two, SCHEMA)
    as_earlier_version(tmp_path)
    with refused(r"an earlier version .* made this index.* --on_bad=skip --max_bad_fraction=0.1"):
        dti.Records.from_files(set_of_two)
    dti.build_index(tmp_path / "train-1")  # at the level of before
    assert dti.Records.from_files(tmp_path / "train-1").num_records == 5
    with refused("an earlier version of dali_tf_input made this index"):
        dti.Records.from_files(set_of_two)
    with pytest.raises(IndexFaultsError, match="1 bad record in 1 of 1 files"):
        dti.build_index(tmp_path / "train-0")
    report = dti.build_index(set_of_two, **SKIP)
    assert report.summary.verified == {"schema": 2}
    assert dti.Records.from_files(set_of_two).num_records == 8


def test_a_manifest_that_is_gone(set_of_two, tmp_path):
    """That bad records were skipped is still known, by the list of them."""
    index(set_of_two, SCHEMA)
    os.unlink(tmp_path / "index_manifest.json")
    with refused("no entry for this index.* --verify=decode --on_bad=skip"):
        dti.Records.from_files(set_of_two)


def test_a_manifest_that_cannot_be_read(set_of_two, tmp_path, monkeypatch):
    """Is not taken for an empty one, and its files are not to blame."""
    index(set_of_two, SCHEMA)
    before = (tmp_path / "index_manifest.json").read_bytes()
    os.rename(tmp_path / "index_manifest.json", tmp_path / "kept")
    os.mkdir(tmp_path / "index_manifest.json")
    for call in (dti.Records.from_files, dti.build_index):
        with refused("index_manifest.json cannot be read: Is a directory"):
            call(set_of_two)
    assert (tmp_path / "kept").read_bytes() == before


@pytest.mark.parametrize("field", ["vocabulary", "offset"])
def test_files_with_other_labels_are_not_joined(tmp_path, field):
    """Equal numbers would mean other classes."""
    values = {"vocabulary": [("cat", "dog"), ("dog", "cat")], "offset": [0, 1]}[field]
    for number, value in enumerate(values):
        examples = numbered_examples(3)
        for example in examples:
            stored = "cat" if field == "vocabulary" else 1
            example["image/class/label"] = stored
        file = write_tfrecord(tmp_path / f"train-{number}", examples)
        dti.build_index(file, dataclasses.replace(SCHEMA, label=dti.ClassLabel(**{field: value})))
        assert dti.Records.from_files(file).num_records == 3
    with refused(r"train-0 and .*train-1 were indexed with other labels, --.* -m dali_tf_input"):
        dti.Records.from_files(tmp_path / "train-?")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b"cat \ndog\n\n", ("cat", "dog")),
        (b"a\xc2\x85b\r\nc\x0bd\n", ("a\x85b", "c\x0bd")),
        (b"cat\n\ndog\n", "line 2 is empty"),
        (b"caf\xe9\n", "is not UTF-8"),
        (b" \n", "names no label"),
        (b"\xef\xbb\xbfcat\ndog\n", ("cat", "dog")),
        (b"1:dog\n0: cat\n2:a:b\n", ("cat", "dog", "a:b")),
        (b"1:dog\n2:cat\n", "its lines are numbered, but not by 0 to 1"),
        (b"0:dog\ncat\n", ("0:dog", "cat")),
        (b"crane\nbird\ncrane\n", ("crane", "bird", "crane")),
    ],
)
def test_class_names(tmp_path, text, names):
    """One line, one name: for all that reads them."""
    (tmp_path / "labels.txt").write_bytes(text)
    records = write_indexed(tmp_path / "train", numbered_examples(2))
    if isinstance(names, str):
        with refused(f"labels.txt.*{names}"):
            _ = records.class_names
    else:
        assert records.class_names == names


def test_a_disk_that_is_not_mounted_is_not_a_deleted_set(tmp_path):
    """A run over other files must not remove the results of the deepest check."""
    for name in ("mounted", "other"):
        (tmp_path / name).mkdir()
        for number in range(2):
            write_tfrecord(tmp_path / name / f"{name}-{number}", numbered_examples(2))
    shared = {"index_dir": tmp_path / "index"}
    dti.build_index(tmp_path / "mounted" / "*", SCHEMA, **shared)
    os.rename(tmp_path / "mounted", tmp_path / "disk")
    (tmp_path / "mounted").mkdir()  # the mount point, which is empty
    assert dti.build_index(tmp_path / "other" / "*", **shared).removed == 0
    (tmp_path / "mounted").rmdir()
    os.rename(tmp_path / "disk", tmp_path / "mounted")
    assert dti.Records.from_files(tmp_path / "mounted" / "*", **shared).num_records == 4
    os.unlink(tmp_path / "mounted" / "mounted-0")  # this one is gone: the other is there
    assert dti.build_index(tmp_path / "other" / "*", **shared).removed == 1


def named_set(folder, names, labels, files=("labels.txt",)):
    """Writes and indexes a set whose classes have names."""
    folder.mkdir()
    for file in files:
        (folder / file).write_text("".join(f"{name}\n" for name in names))
    examples = [{"image": jpeg(8, 8, seed=n), "label": label} for n, label in enumerate(labels)]
    return write_indexed(folder / "train-0", examples, dti.Checks(verify="schema"))


def test_names_of_a_part_that_is_numbered_anew(tmp_path):
    """A class that has no record there gives its name to none that moves to its number."""
    write_tfrecord(tmp_path / "train-0", [{"image": b"x", "label": n % 4} for n in range(16)])
    (tmp_path / "labels.txt").write_text("ant\nbee\ncat\ndog\n")
    dti.build_index(tmp_path / "train-0", dti.Checks(verify="schema"))
    records = dti.Records.from_files(tmp_path / "train-0")
    some = records.filter(labels={1, 3}).relabel({1: 0, 3: 1})
    assert some.class_names[:2] == ("bee", "dog")
    assert records.relabel({1: 0}).class_names[0] == "ant"  # which has records
    moved = records.relabel({0: 2**31 - 1}).class_names
    assert moved == (None, "bee", "cat", "dog")  # and not two billion names
    spec = dti.InputSpec.for_training(records, 8, label=dti.ClassLabel(offset=-(10**9)))
    assert spec.class_names is None


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ({0: 2, 1: 3, 2: 4}, (None, None, "cat", "dog", "owl")),
        ({0: 1, 1: 0}, ("dog", "cat", "owl")),
        ({1: 0, 2: 0}, ("cat",)),  # they join the cats
        ({0: 7, 1: 7}, (None, None, "owl", None, None, None, None, "cat|dog")),
        ({2: -1}, ("cat", "dog")),
        ({}, ("cat", "dog", "owl")),
    ],
)
def test_names_move_with_labels(tmp_path, labels, names):
    records = named_set(tmp_path / "set", ("cat", "dog", "owl"), [0, 1, 2, 2])
    assert records.relabel(labels).class_names == names
    part = records.relabel(labels).select([0, 3])
    assert part.class_names == names
    lowest = min(labels.values(), default=0)
    label = dti.ClassLabel(offset=min(0, lowest))
    spec = spec_of(part, "global", dti.Preprocess.for_training(8), label=label)
    assert spec.class_names == (None,) * max(0, -lowest) + names


def test_numbering_by_name(tmp_path):
    records = named_set(tmp_path / "set", ("dog", "owl", "rare"), [0, 1, 1])
    moved = records.relabel(names=["cat", "dog", "owl"])  # "rare" has no record
    assert moved.labels.tolist() == [1, 2, 2]
    assert moved.class_names == ("cat", "dog", "owl")
    with refused("names of all classes of these records, once each: class 1 is 'owl'"):
        records.relabel(names=["cat", "dog"])
    with refused("once each: class 0 is 'dog'"):
        records.relabel(names=["dog", "owl", "dog"])
    with refused("given without `labels` and `ids`"):
        records.relabel({0: 1}, names=["dog", "owl"])
    (tmp_path / "set" / "labels.txt").unlink()
    unnamed = dti.Records.from_files(tmp_path / "set" / "train-0")
    with refused("those of these records are not known: write them to labels.txt"):
        unnamed.relabel(names=["dog", "owl"])


def test_sets_that_number_classes_differently(tmp_path):
    """They are not put together; unless one says so, or one has no names, or fewer."""
    first = named_set(tmp_path / "first", ("cat", "dog"), [0, 1])
    second = named_set(tmp_path / "second", ("dog", "cat"), [0, 1])
    fewer = named_set(tmp_path / "fewer", ("cat",), [0])
    unnamed = named_set(tmp_path / "unnamed", (), [0, 1], files=())
    both = "Label 0 is 'cat' in .*first, and 'dog' in .*second. Number one like the other"
    with refused(f"{both}: other.relabel.*union.other, compare=False"):
        first + second
    with refused(both):
        dti.InputSpec.for_training({first: 0.5, second: 0.5}, 8)
    with refused("Class 0 is 'cat' in .*first, and 'dog' in .*second"):
        dti.Records.from_files([tmp_path / "first/train-0", tmp_path / "second/train-0"])
    united = first.union(second, compare=False)
    assert (united.num_records, united.class_names) == (4, None)
    united = first + second.relabel(names=first.class_names)
    assert united.class_names == ("cat", "dog")
    assert united.label_counts == ((0, 2), (1, 2))
    for other in (fewer, unnamed):
        assert (first + other).class_names == (other + first).class_names == ("cat", "dog")


def test_names_of_other_labels(tmp_path):
    """As tfds names them: by their keys, with dots; and two files of one set must not differ."""
    folder = tmp_path / "set"
    records = named_set(
        folder, ("cat", "dog"), [0, 1], ["labels.txt", "image.class.label.labels.txt"]
    )
    assert records.class_names == ("cat", "dog")
    (folder / "image.class.tags.labels.txt").write_text("new\nold\n")
    assert records.find_names("image/class/tags") == ("new", "old")
    assert records.find_names("image/class/other") is None
    (folder / "image.class.label.labels.txt").write_text("dog\ncat\n")
    with refused("labels.txt and .*image.class.label.labels.txt name classes differently"):
        _ = dti.Records.from_files(folder / "train-0").class_names


def test_a_vocabulary_that_is_not_the_indexes(tmp_path):
    """Where labels come from the index, they are numbered by its vocabulary."""
    names = ("owl", "cat")
    examples = [{"image": jpeg(8, 8), "name": name} for name in ("cat", "owl", "cat")]
    path, label = tmp_path / "train-0", dti.ClassLabel(key="name", vocabulary=names)
    write_tfrecord(path, examples)
    dti.build_index(path, dti.Checks(verify="schema", label=label))
    records = dti.Records.from_files(path)
    assert records.class_names == names
    assert records.labels.tolist() == [1, 0, 1]
    preprocess = dti.Preprocess.for_evaluation(8)
    other = dti.ClassLabel(key="name", vocabulary=names[::-1])
    spec_of(records, "sequential", preprocess, label=other)  # the records themselves say it
    with refused("`label.vocabulary` differs from the one that the records were indexed with"):
        spec_of(records.relabel({}), "sequential", preprocess, label=other)
