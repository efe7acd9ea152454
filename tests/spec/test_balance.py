"""How often classes and records come: `balance`, `temperature` and `repeated_augmentation`."""

import collections
import functools
from collections import Counter

import keras
import numpy as np
import pytest
from conftest import (
    BACKENDS,
    DALI,
    TF_DATA,
    at_night,
    numbered_examples,
    refused,
    spec_of,
    table,
    write_indexed,
)

import dali_tf_input as dti
from dali_tf_input.spec.plan import Groups, Plan, apportion_total

SMALL = dti.Preprocess.for_training(8)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """60 records: 36 of class 0 (stored as 1), 18 of class 1, 6 of class 2."""
    examples = numbered_examples(60)
    for number, example in enumerate(examples):
        example["image/class/label"] = 3 if number % 10 == 0 else 1 + (number % 10 > 6)
    file = tmp_path_factory.mktemp("classes") / "train-0"
    label = dti.ClassLabel(offset=1)
    return write_indexed(file, examples, dti.Checks(verify="schema", label=label))


def spec_with(records, **fields):
    fields = {"label": dti.ClassLabel(offset=1), "preprocess": SMALL, **fields}
    preprocess = fields.get("views", [fields.pop("preprocess")])[0]
    return spec_of(records, "global", preprocess, record_ids=True, **fields)


def list_epoch(classes, shares, batch_size, num_shards, *, repeats=1, epoch=0):
    """Returns what each shard serves in an epoch, (shards, images)."""
    sizes = tuple(np.bincount(classes, minlength=len(shares)).tolist())
    plan = Plan(
        num_slots=len(classes),
        shard_batch_size=batch_size,
        num_shards=num_shards,
        seed=3,
        repeats=repeats,
        groups=Groups(sizes, tuple(shares)),
    )
    members = np.argsort(classes, kind="stable")
    slots = [plan.slots(shard) for shard in range(num_shards)]
    return np.array([members[plan.positions(epoch, part)] for part in slots])


@pytest.mark.parametrize("num_shards", at_night([1, 2, 3, 8], range(1, 9)))
def test_counts_are_exact(num_shards):
    """Of classes and of records, for all small numbers of records and of shards."""
    for num_records in range(num_shards, 65, at_night(7, 1)):
        for batch_size in {1, 2, num_records // num_shards}:
            for repeats in (1, 2, 4):
                step = batch_size * num_shards
                if step > num_records or step % repeats:
                    continue
                classes = np.arange(num_records) ** 2 % 5
                classes = np.unique(classes, return_inverse=True)[1]
                shares = np.arange(1.0, classes.max() + 2)
                how = {"repeats": repeats, "epoch": num_records}
                served = list_epoch(classes, shares, batch_size, num_shards, **how)
                total = num_records // step * step
                assert served.size == total
                expected = repeats * apportion_total(total // repeats, shares)
                np.testing.assert_array_equal(
                    np.bincount(classes[served].ravel(), minlength=len(shares)), expected
                )
                of_records = np.bincount(served.ravel(), minlength=num_records)
                for number in range(len(shares)):
                    own = of_records[classes == number]
                    assert own.max() - own.min() <= repeats
                # Each step has its records together, whatever the number of shards.
                steps = served.reshape(num_shards, -1, batch_size).swapaxes(0, 1)
                for one in steps.reshape(len(steps), -1):
                    assert set(Counter(one.tolist()).values()) <= {
                        repeats * times for times in range(1, 1 + len(one))
                    }


def test_any_number_of_shards_serves_the_same_steps():
    classes = np.arange(48) % 3
    served = [
        list_epoch(classes, [1.0, 2.0, 5.0], 16 // shards, shards, repeats=2)
        for shards in (1, 2, 4, 8)
    ]
    epochs = [epoch.reshape(len(epoch), 3, -1).swapaxes(0, 1) for epoch in served]
    for epoch in epochs:
        np.testing.assert_array_equal(epoch.reshape(3, 16), epochs[0].reshape(3, 16))


def test_which_records_come_once_more_is_drawn_anew():
    """Over 300 epochs each of 10 records comes 1.5 times an epoch: five standard deviations."""
    plan = Plan(num_slots=15, shard_batch_size=1, seed=1, groups=Groups((10,), (1.0,)))
    times = np.zeros(10)
    for epoch in range(300):
        times += np.bincount(plan.positions(epoch, np.arange(15)), minlength=10)
    assert times.sum() == 300 * 15
    assert (abs(times - 450) < 5 * (300 / 4) ** 0.5).all()


def test_a_total_is_apportioned():
    shares = np.array([3.0, 0.5, 1e-9, 1.5])
    for total in range(1, 30):
        parts = apportion_total(total, shares)
        assert parts.sum() == total
        assert (abs(parts - total * shares / 5) < 1).all()


# Fields, and how often each class comes.
ASKED = [
    ({"balance": "class"}, [20, 20, 20]),
    ({"balance": {2: 9.0}}, [20, 10, 30]),
    ({"balance": {0: 0.5, 1: 1.0}}, [26, 26, 8]),
    ({"temperature": 2.0}, [29, 20, 11]),
    ({"temperature": 1e6}, [20, 20, 20]),
    ({"balance": "class", "repeated_augmentation": 3}, [21, 21, 18]),
]


@pytest.mark.parametrize(("fields", "expected"), ASKED)
def test_classes_are_planned_as_asked(classes, fields, expected):
    spec, class_of = spec_with(classes, **fields), classes.labels - 1
    for epoch in range(2):
        steps = range(5 * epoch, 5 * epoch + 5)
        ids = np.concatenate([spec.ids_of_step(step, batch_size=12) for step in steps])
        np.testing.assert_allclose(np.bincount(class_of[ids]), expected, atol=1)


@pytest.mark.slow
@table("asked, options", [(ASKED[1], DALI), (ASKED[5], TF_DATA)], ASKED, BACKENDS.values())
def test_classes_are_served_as_asked(classes, asked, options):
    fields, expected = asked
    train = dti.load(spec_with(classes, **fields), options, batch_size=12)
    assert train.steps_per_epoch == 5
    for epoch in range(2):
        batches = [*train]
        labels = np.concatenate([labels for _, labels in batches])
        np.testing.assert_allclose(np.bincount(labels), expected, atol=1)
        for number, (batch, _) in enumerate(batches):
            ids = batch["record_id"].numpy()
            assert ids.tolist() == train.records_of(5 * epoch + number).tolist()
            if train.spec.repeated_augmentation > 1:
                assert {*Counter(ids.tolist()).values()} == {3}
                images = batch["image"].numpy()
                assert (images[0] != images[1]).any()  # another crop or mirror


ONE_HOT = dti.ClassLabel(offset=1, num_classes=3, one_hot=True)
WORK = {
    "crop": {"preprocess": dti.Preprocess.for_training(8, crop=dti.RandomResizedCrop())},
    "augment": {"preprocess": dti.Preprocess.for_training(16, recipe="deit")},
    "mix": {"label": ONE_HOT, "mix": dti.Mix(mixup=0.4, cutmix=1.0)},
    "views": {"views": (SMALL, SMALL, dti.Preprocess.for_training(12))},
    "features": {"features": {"image/class/label": dti.Stored(size=1)}, "label": None},
    "balance": {"balance": "class", "repeated_augmentation": 2},
    "temperature": {"temperature": 2.0},
}
SOME_WORK = [("augment", TF_DATA), ("mix", DALI), ("views", DALI), ("balance", TF_DATA)]


@pytest.mark.slow
@table("work, options", SOME_WORK, WORK, BACKENDS.values())
def test_a_step_is_the_same_wherever_training_starts(classes, work, options):
    """To the bit: by `batch_at`, from a later step, and by two shards; also of the next epoch."""
    spec = spec_with(classes.sample(41), **WORK[work])
    same = functools.partial(keras.tree.map_structure, np.testing.assert_array_equal)
    train = dti.load(spec, options, batch_size=8)
    steps = [batch for _ in range(2) for batch in train]
    for step in at_night([6], [0, 6, 9]):
        same(train.batch_at(step), steps[step])
    assert next(iter(train))[0]["record_id"].numpy().tolist() == train.records_of(10).tolist()
    for start in at_night([3], [3, 5]):
        later = dti.load(spec, options, batch_size=8, start_step=start)
        same([batch for _ in range(2) for batch in later][: 10 - start], steps[start:])
        shards = [
            dti.make_dataset(
                spec, options, batch_size=4, shard=dti.Shard(n, 2), start_step=start, endless=True
            )
            for n in range(2)
        ]
        for expected, *halves in zip(steps[start:], *shards, strict=False):
            if not spec.mix:  # each shard mixes its own
                joined = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *halves)
                same(joined, expected)
    if work == "views":
        assert (steps[0][0]["image_0"] != steps[0][0]["image_1"]).numpy().any()
    if work == "augment":  # the next epoch differs
        of_records = [
            dict(zip(batch["record_id"].numpy().tolist(), batch["image"].numpy(), strict=True))
            for batch, _ in steps
        ]
        first, second = collections.ChainMap(*of_records[:5]), collections.ChainMap(*of_records[5:])
        assert not any(np.array_equal(first[one], second[one]) for one in {*first} & {*second})


@pytest.mark.slow
def test_the_batches_of_a_pass(classes):
    valid = dti.load(
        dti.InputSpec.for_evaluation(classes, 8, record_ids=True, label=dti.ClassLabel(offset=1)),
        DALI,
        batch_size=25,
    )
    for step, (batch, _) in enumerate(valid):
        np.testing.assert_array_equal(batch["image"], valid.batch_at(step)[0]["image"])
        assert batch["record_id"].numpy().tolist() == valid.records_of(step).tolist()
    with refused(r"`step` must be in \[0, 3\), got 3"):
        valid.records_of(3)


def test_refuses(classes, dataset):
    for message, fields in {
        "`balance` must be": {"balance": "classes"},
        "a dict by classes that have records, got 3": {"balance": {3: 1.0}},
        "a dict of factors above 0, at most 1,000,000, got 0": {"balance": {0: 0}},
        "a dict of factors above 0, at most 1,000,000, got 1e.308": {"balance": {0: 1e308}},
        "at most 1,000,000, got 1000": {"balance": {0: 10**400}},
        "`balance` and a mixture need `shuffle_block_size` 1": {
            "balance": "class",
            "shuffle_block_size": 2,
        },
    }.items():
        with refused(message):
            spec_with(classes, **fields)
    for name, value in (("balance", "class"), ("temperature", 2.0), ("repeated_augmentation", 2)):
        with refused(f"`{name}` is for order 'global' only, got 'buffer'"):
            spec_of(classes, "buffer", SMALL, **{name: value})
    with refused("the index none. Index with --verify=schema and the same label"):
        spec_of(dataset, "global", SMALL, balance="class")
    with refused("`repeated_augmentation` must be a divisor of the 4 images of a step, got 3"):
        dti.load(spec_with(classes, repeated_augmentation=3), TF_DATA, batch_size=4)
    with refused("Order 'buffer' has no plan of its steps"):
        dti.load(spec_of(dataset, "buffer", SMALL), TF_DATA, batch_size=4).records_of(0)
