"""Subsets of records: splits, folds, filters and unions, and what both backends serve of them."""

import dataclasses
import itertools
import os
import shutil

import numpy as np
import pytest
from conftest import (
    DALI,
    TF_DATA,
    at_night,
    numbered_examples,
    refused,
    spec_of,
    table,
    write_indexed,
    write_tfrecord,
)

import dali_tf_input as dti
from dali_tf_input.records.contents import pack_integers, unpack_integers
from dali_tf_input.records.subsets import apportion
from dali_tf_input.training.failures import BadRecordError

SCHEMA = dti.Checks(verify="schema")
SMALL = dti.Preprocess(image_size=(8, 8))


def write_classes(folder, counts, *, num_classes=4):
    """Writes files of `counts` records whose labels repeat; returns their records."""
    folder.mkdir(exist_ok=True)
    for number, count in enumerate(counts):
        examples = numbered_examples(count, first=100 * number)
        for position, example in enumerate(examples):
            example["image/class/label"] = [(position * position + number) % num_classes]
        write_tfrecord(folder / f"train-{number}", examples)
    dti.build_index(folder / "train-*", SCHEMA)
    return dti.Records.from_files(folder / "train-*")


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("classes") / "records", [40, 1, 27, 32])


def ids_of(records):
    return records.ids.tolist()


@pytest.mark.parametrize("by_label", [False, True])
@pytest.mark.parametrize(
    "shares", [{"train": 0.9, "held_out": 0.1}, {"a": 0.5, "b": 0.25, "c": 0.25}, {"all": 1.0}]
)
def test_each_record_is_in_one_part(classes, by_label, shares):
    for seed in range(20):
        parts = classes.split(by_label=by_label, seed=seed, **shares)
        assert [*parts] == [*shares]
        together = sorted(itertools.chain(*map(ids_of, parts.values())))
        assert together == [*range(100)]
        if by_label:
            for name, part in parts.items():
                assert part.num_records == round(100 * shares[name])
                has, all_of = (np.bincount(some.labels, minlength=4) for some in (part, classes))
                assert (abs(has - shares[name] * all_of) <= 1).all()
    assert classes.split(seed=1, a=0.5, b=0.5)["a"] != classes.split(seed=2, a=0.5, b=0.5)["a"]


def test_shares_are_met_on_average(classes):
    """Of 200 seeds each record is in the first part about 60 times: six standard deviations."""
    times = np.zeros(100)
    for seed in range(200):
        times[classes.split(seed=seed, first=0.3, rest=0.7)["first"].ids] += 1
    assert abs(times.mean() - 60) < 6 * (42 / 100) ** 0.5
    assert (abs(times - 60) < 6 * 42**0.5).all()


def names_of(records):
    """Returns (name of the file, byte) of each record."""
    extents = map(records.locate, ids_of(records))
    return {(os.path.basename(extent.file), extent.offset) for extent in extents}


def test_a_record_stays_on_its_side(classes, tmp_path):
    """When files are added before, moved to another folder, or indexed anew with a bad record."""
    folder = tmp_path / "moved"
    shutil.copytree(os.path.dirname(classes.paths[0]), folder)
    before = classes.split(train=0.7, held_out=0.3)
    write_tfrecord(folder / "train-", numbered_examples(30, first=900))
    path = folder / "train-2"
    data = bytearray(path.read_bytes())
    bad = classes.files[2].index()[3]
    data[bad[0] + bad[1] // 2] ^= 1
    path.write_bytes(data)
    checks = dataclasses.replace(SCHEMA, verify="schema")
    # Its framing is that of a copy.
    skip = {"on_bad": "skip", "max_bad_fraction": 0.1, "force": True}
    dti.build_index(folder / "train-*", checks, **skip)
    after = dti.Records.from_files(folder / "train-*").split(train=0.7, held_out=0.3)
    lost = {("train-2", int(bad[0]))}
    for name, part in before.items():
        assert names_of(part) - lost == {
            place for place in names_of(after[name]) if place[0] != "train-"
        }


def test_folds(classes):
    for by_label in (False, True):
        folds = classes.folds(5, by_label=by_label)
        assert sorted(itertools.chain(*(ids_of(held_out) for _, held_out in folds))) == [
            *range(100)
        ]
        for train, held_out in folds:
            assert sorted(ids_of(train) + ids_of(held_out)) == [*range(100)]


def test_take_filter_select_exclude_add(classes):
    assert classes.sample(7).num_records == 7
    assert {*ids_of(classes.sample(7))} < {*ids_of(classes.sample(8))}
    assert classes.sample(100) == classes.sample_fraction(1.0) == classes
    assert (
        classes.sample_fraction(0.3, seed=4) == classes.split(seed=4, first=0.3, rest=0.7)["first"]
    )
    shares = np.bincount(classes.sample(50, by_label=True).labels) / np.bincount(classes.labels)
    assert (abs(shares - 0.5) < 0.1).all()
    some = classes.filter(labels={1, 3})
    assert ids_of(some) == np.flatnonzero(np.isin(classes.labels, (1, 3))).tolist()
    assert {*some.labels.tolist()} == {1, 3}
    assert ids_of(classes.select([5, 3, 3, 99])) == [3, 5, 99]
    assert ids_of(classes.exclude(np.arange(1, 99))) == [0, 99]
    assert classes.exclude([]) == classes
    parts = [*classes.split(a=0.5, b=0.3, c=0.2).values()]
    assert parts[0] + parts[1] + parts[2] == classes
    assert sum(part.counts[0] for part in parts) == 40
    assert repr(classes.sample(7)).startswith("<Records: 7 of 100 in 4 files, /")
    for record in ids_of(parts[2]):  # ids are those of all records
        assert parts[2].read(record) == classes.read(record)


def test_records_of_other_files(classes, tmp_path):
    other = write_classes(tmp_path / "another", [6, 5], num_classes=9)
    first, second = classes.sample(10), other.exclude([2])
    both = first + second
    assert both.num_records == 20
    assert both.paths == tuple(sorted(classes.paths + other.paths))
    images = [sorted(map(str, map(part.read, part.ids))) for part in (both, first, second)]
    assert images[0] == sorted(images[1] + images[2])
    spec = spec_of(both, "global", SMALL, record_ids=True)
    assert spec.label_range == (0, 8)
    assert sorted(serve(spec, TF_DATA, 4)) == ids_of(both)
    with refused("Both have the same records of .*: each must come once"):
        classes.sample(10) + classes.sample(3)
    with refused("`stores_pixels` must be the same for both, False, got True"):
        classes + dataclasses.replace(other, image_key="image/pixels")


def serve(spec, options, batch_size, shards=1):
    """Returns the ids that an epoch of all shards serves."""
    ids = []
    for shard in range(shards):
        batches = dti.make_dataset(
            spec, options, batch_size=batch_size, shard=dti.Shard(shard, shards)
        )
        ids += np.concatenate([batch["record_id"] for batch, *_ in batches]).tolist()
    return ids


@pytest.mark.slow
@table(
    "order, num_records, options",
    [("sequential", 24, DALI), ("buffer", 61, DALI), ("global", 61, TF_DATA)],
    ["sequential", "buffer", "global"],
    [24, 61],
    [TF_DATA, DALI],
)
def test_both_backends_serve_the_subset(classes, order, num_records, options):
    records = classes.sample(num_records, seed=num_records)
    spec = spec_of(records, order, SMALL, record_ids=True)
    for shards in at_night((2,), (1, 2, 3)):
        size = num_records // shards
        served = serve(spec, options, size, shards)
        assert len({*served}) == len(served) == size * shards
        assert {*served} <= {*ids_of(records)}
    if order == "sequential":
        single = dataclasses.replace(spec, repeat=False)
        assert serve(single, options, 10) == ids_of(records)


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
@pytest.mark.parametrize("order", at_night(["global"], ["sequential", "global"]))
def test_a_bad_record_of_a_subset_is_named(tmp_path, order):
    """Also one with new labels."""
    examples = numbered_examples(12)
    examples[7]["image/encoded"] = b"no image"
    records = write_indexed(tmp_path / "train-0", examples, SCHEMA).exclude(range(5))
    records = records.relabel({9: 0}) if order == "global" else records
    label = dti.ClassLabel(num_classes=12)
    with pytest.raises(BadRecordError, match=r"train-0: record 7, byte"):
        list(dti.load(spec_of(records, order, SMALL, label=label), TF_DATA, batch_size=2))


@pytest.mark.parametrize(
    "values", [[], [0], [-1, 127], [128], [-(2**15), 2**15 - 1], [2**31], [-(2**63), 2**63 - 1]]
)
def test_packed_labels(values):
    assert unpack_integers(pack_integers(values)).tolist() == values


def test_an_index_without_labels(tmp_path, dataset):
    with refused("does not have a class for each record. .* --verify=schema"):
        _ = dataset.labels
    with refused("does not have a class for each record"):
        dataset.split(by_label=True, a=0.5, b=0.5)
    records = write_classes(tmp_path / "some", [4])
    damaged = dataclasses.replace(records.files[0], labels=b"\x03abc")
    with refused("does not have a class for each record"):
        _ = dataclasses.replace(records, files=(damaged,)).labels


def test_refuses(classes):
    for message, call in {
        "`train` must be a share in .0, 1., got 0": lambda: classes.split(train=0, a=1.0),
        "`train, a` must be 1 together, got 0.9": lambda: classes.split(train=0.5, a=0.4),
        "`shares` must be 1 together, got 0": classes.split,
        "`b` leaves none of these 100 records": lambda: classes.split(a=0.9999999, b=0.0000001),
        "`num_folds` must be .*2.*, got 1": lambda: classes.folds(1),
        "`num_records` must be in .1, 100., got 101": lambda: classes.sample(101),
        "`fraction` must be in .0, 1., got 1.5": lambda: classes.sample_fraction(1.5),
        "`fraction` leaves none of these": lambda: classes.sample_fraction(1e-9),
        "run from 0 to 3, got .9.": lambda: classes.filter(labels={1, 9}),
        "run from 0 to 3, got ..": lambda: classes.filter(labels=()),
        "`ids` must be in .0, 100., ids of records, got 100": lambda: classes.select([100]),
        "`ids` must be a list of integers, got .1.5.": lambda: classes.exclude([1.5]),
        "`exclude` leaves none": lambda: classes.exclude(range(100)),
        "ids of these 5 records, got": lambda: classes.sample(5).select(range(100)),
        "`ids` leaves none": lambda: classes.select([]),
    }.items():
        with refused(message):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [TF_DATA, DALI]))
def test_new_labels(classes, options):
    """Of classes and of single records, in subsets, with an offset, one-hot and weights."""
    records = classes.relabel({0: 10, 1: 10, 2: 11}, ids={5: 13}).sample(60)
    stored = dict(zip(ids_of(classes), classes.labels.tolist(), strict=True))
    for order in ("global", "sequential"):
        spec = spec_of(
            records,
            order,
            SMALL,
            record_ids=True,
            label=dti.ClassLabel(offset=3),
            class_weight={0: 2.0},
        )
        assert spec.label_range == (0, 10)
        for batch, labels, weights in dti.make_dataset(spec, options, batch_size=20):
            for record, label, weight in zip(
                *map(np.array, (batch["record_id"], labels, weights)), strict=True
            ):
                new = 13 if record == 5 else {0: 10, 1: 10, 2: 11, 3: 3}[stored[record]]
                assert label == new - 3
                assert weight == 1 + (label == 0)
    label = dti.ClassLabel(offset=3, num_classes=11, one_hot=True)
    batches = dti.make_dataset(
        spec_of(records, "global", SMALL, label=label), options, batch_size=60
    )
    ((_, one_hot),) = batches
    assert sorted(one_hot.numpy().argmax(1) + 3) == sorted(records.labels)
    balanced = spec_of(records, "global", SMALL, label=dti.ClassLabel(offset=3), balance="class")
    _, counts = np.unique(
        next(iter(dti.make_dataset(balanced, options, batch_size=60)))[1], return_counts=True
    )
    assert (counts == 60 // len(counts)).all()


@pytest.mark.slow
def test_a_mixture_of_two_spaces_of_labels(classes, tmp_path):
    """The second set counts its classes from 0 too; a corrected record keeps its new label."""
    other = write_classes(tmp_path / "another", [16], num_classes=2).relabel({0: 4, 1: 5})
    first = classes.relabel(ids={0: 3})
    spec = dti.InputSpec.for_training({first: 0.8, other: 0.2}, SMALL)
    assert spec.label_range == (0, 5)
    (_, labels), *_ = dti.load(spec, TF_DATA, batch_size=100)
    assert (labels.numpy() >= 4).sum() == 20
    (_, again), *_ = dti.load(
        dti.InputSpec.for_training({classes: 0.8, other: 0.2}, SMALL), TF_DATA, batch_size=100
    )
    assert (labels.numpy() >= 4).tolist() == (again.numpy() >= 4).tolist()


def test_relabel_refuses(classes, dataset):
    for message, call in {
        "`labels` must be labels of these records, got 9": lambda: classes.relabel({9: 1}),
        "`ids` must be in .0, 100.": lambda: classes.relabel(ids={100: 1}),
        "A new label must be an integer, got 'cat'": lambda: classes.relabel({1: "cat"}),
        "A new label must be an integer, got 1.5": lambda: classes.relabel({1: 1.5}),
        "does not have a class for each record": lambda: dataset.relabel({1: 2}),
        "has other labels in one of the two": lambda: (
            classes.sample(4).relabel({0: 9}) + classes.exclude(classes.sample(4).ids)
        ),
        "`order` must be 'global' for new labels, got 'buffer'": lambda: spec_of(
            classes.relabel({0: 9}), "buffer", SMALL
        ),
        "`label` must be a ClassLabel for new labels": lambda: spec_of(
            classes.relabel({0: 9}), "global", SMALL, label=dti.MultiHot(num_classes=10)
        ),
    }.items():
        with refused(message):
            call()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """1,500 records in 3 files: enough to tell shares from accidents."""
    folder = tmp_path_factory.mktemp("many")
    (example,) = numbered_examples(1)
    for number in range(3):
        examples = [{**example, "image/class/label": place % 7} for place in range(500)]
        write_tfrecord(folder / f"train-{number}", examples)
    dti.build_index(folder / "train-*", SCHEMA)
    return dti.Records.from_files(folder / "train-*")


@pytest.mark.parametrize("by_label", [False, True])
def test_parts_are_divided_again(many, by_label):
    """With the same seed too: the second division is another draw. Five standard deviations."""

    def has_share(part, whole, share):
        spread = (whole.num_records * share * (1 - share)) ** 0.5
        assert abs(part.num_records - whole.num_records * share) < 5 * spread
        assert {*ids_of(part)} < {*ids_of(whole)}

    parts = many.split(train=0.8, held_out=0.2, by_label=by_label)
    for part in (
        *parts.values(),
        many.sample_fraction(0.3),
        many.sample(400),
        many.filter(labels={1, 2, 3}),
    ):
        has_share(part.sample_fraction(0.5, by_label=by_label), part, 0.5)
        halves = part.split(a=0.5, b=0.5, by_label=by_label)
        has_share(halves["a"], part, 0.5)
        has_share(halves["a"].sample_fraction(0.5), halves["a"], 0.5)
        for train, held_out in part.folds(4, by_label=by_label):
            has_share(held_out, part, 0.25)
            has_share(train.sample_fraction(0.5), train, 0.5)
            has_share((train + held_out).sample_fraction(0.5), part, 0.5)
    assert (
        many.sample_fraction(0.5) == many.split(a=0.5, b=0.5)["a"]
    )  # of the same set the same draw
    assert parts["train"] + parts["held_out"] == many
    assert (parts["train"] + parts["held_out"]).sample(9) == many.sample(9)


def test_parts_by_label_are_within_one_record():
    """Of each class and of all, for any number of parts and small classes too."""
    random = np.random.default_rng(0)
    for _ in range(200):
        counts = random.integers(1, 12, random.integers(1, 40))
        shares = random.dirichlet(np.ones(random.integers(2, 9)))
        if random.random() < 0.5:
            shares = np.full(len(shares), 1 / len(shares))
        given = apportion(counts, shares)
        assert (given.sum(1) == counts).all()
        assert (abs(given - counts[:, None] * shares) < 1).all()
        assert abs(given.sum(0) - counts.sum() * shares).max() < 1.5


def test_folds_of_small_classes_are_even(many):
    ids = np.concatenate([np.flatnonzero(many.labels == label)[:3] for label in range(7)])
    sizes = [held_out.num_records for _, held_out in many.select(ids).folds(5, by_label=True)]
    assert max(sizes) - min(sizes) <= 1


def test_counts_and_ranges_are_those_of_the_subset(many):
    some = many.filter(labels={2, 5})
    label = dti.ClassLabel(offset=2, num_classes=4, one_hot=True)
    assert spec_of(some, "global", SMALL, label=label).label_range == (0, 3)
    assert spec_of(some, "global", SMALL).label_range == (2, 5)
    half = many.exclude(range(0, 1500, 2))
    weights = spec_of(half, "global", SMALL, class_weight="balanced").class_weights()
    np.testing.assert_allclose(weights, 750 / (7 * np.bincount(half.labels)))


def test_counts_of_several_classes_are_unknown_for_a_subset(tmp_path):
    examples = numbered_examples(6)
    for number, example in enumerate(examples):
        example["image/class/label"] = [number % 2, 2, 2]  # which counts once
    label = dti.MultiHot(num_classes=3)
    records = write_indexed(
        tmp_path / "train-0", examples, dti.Checks(verify="schema", label=label)
    )
    assert spec_of(records, "global", SMALL, label=label).class_counts == ((0, 3), (1, 3), (2, 6))
    assert spec_of(records.sample(3), "global", SMALL, label=label).class_counts is None


def test_unions_of_overlapping_files(many):
    first = dti.Records.from_files(many.paths[0])
    both = first + many.exclude(range(500))
    assert both == many
    assert both.features == many.features
    weights = [
        spec_of(records, "global", SMALL, class_weight="balanced").class_weights()
        for records in (both, many)
    ]
    assert weights[0] == weights[1]
    one, other = (dti.Records.from_files([*paths]) for paths in (many.paths[:2], many.paths[1:]))
    with refused("Each has files that the other has too, and files of its own"):
        one.exclude(range(500, 1000)) + other
    apart = first + dti.Records.from_files([*many.paths[1:]])
    assert apart.features["image/class/label"] == many.features["image/class/label"]


def test_groups_stay_together(tmp_path):
    """In parts, folds, and whatever the files are."""
    examples = [
        {**example, "patient": f"p{number // 4}", "many": [1, 2]}
        for number, example in enumerate(numbered_examples(120))
    ]
    records = write_indexed(tmp_path / "train-0", examples)
    parts = records.split(a=0.6, b=0.4, group_key="patient", seed=3)
    groups = {
        name: {part.read(record)["patient"][0] for record in part.ids}
        for name, part in parts.items()
    }
    assert sum(part.num_records for part in parts.values()) == 120
    assert groups["a"]
    assert groups["b"]
    assert not groups["a"] & groups["b"]
    other = write_indexed(tmp_path / "renamed-0", examples[40:])
    again = other.split(a=0.6, b=0.4, group_key="patient", seed=3)["a"]
    assert {again.read(record)["patient"][0] for record in again.ids} <= groups["a"]
    for train, held_out in records.folds(3, group_key="patient"):
        sides = [{part.read(n)["patient"][0] for n in part.ids} for part in (train, held_out)]
        assert not sides[0] & sides[1]
    with refused("one value in all records; record 0 of .* has 2"):
        records.split(a=0.5, b=0.5, group_key="many")
    with refused("has 0 values of 'none'"):
        records.split(a=0.5, b=0.5, group_key="none")
    with refused("`by_label` or by `group_key`, not by both"):
        records.split(a=0.5, b=0.5, group_key="patient", by_label=True)
