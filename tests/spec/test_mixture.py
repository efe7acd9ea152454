"""Mixtures: parts of several sets of files in exact proportions."""

import os
import shlex
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from commands import run
from conftest import DALI, TF_DATA, at_night, numbered_examples, refused, spec_of, write_indexed

import dali_tf_input as dti
from dali_tf_input.spec.balance import Mixture
from dali_tf_input.spec.plan import Groups, Plan, apportion_total, spread_evenly
from dali_tf_input.training.resume import make_fingerprint

SMALL = dti.Preprocess.for_training(8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_indexed(tmp_path_factory.mktemp("b") / "photos-0", numbered_examples(30))


@pytest.fixture(scope="module")
def drawings(tmp_path_factory):
    examples = numbered_examples(8, first=100)
    return write_indexed(tmp_path_factory.mktemp("a") / "drawings-0", examples)


def mixture_of(shares, **fields):
    return dti.InputSpec.for_training(shares, SMALL, record_ids=True, **fields)


def plan_of(num_slots, sizes, shares, batch_size=1, num_shards=1):
    groups = Groups(tuple(sizes), tuple(shares), are_parts=True)
    how = {"shard_batch_size": batch_size, "num_shards": num_shards, "seed": 5}
    return Plan(num_slots=num_slots, groups=groups, **how)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.7, 0.3), (0.9, 0.1), (0.6, 0.3, 0.1)])
@pytest.mark.parametrize("total", [10, 23, 64])
def test_counts_are_exact_and_spread(shares, total):
    """In each epoch, in each stretch of it, and of each record over all epochs."""
    sizes = np.array([11, 5, 3][: len(shares)])
    parts = np.repeat(np.arange(len(shares)), sizes)
    plan, quotas = plan_of(total, sizes, shares), apportion_total(total, shares)
    served = np.zeros((0,), np.int64)
    for epoch in range(12):
        drawn = plan.positions(epoch, np.arange(total))
        assert np.bincount(parts[drawn], minlength=len(shares)).tolist() == quotas.tolist()
        for part, quota in enumerate(quotas):
            before = np.append(0, np.cumsum(parts[drawn] == part))
            due = np.arange(total + 1) * quota / total
            assert abs(before - due).max() <= 1
        served = np.append(served, drawn)
    for part, size in enumerate(sizes):
        own = served[parts[served] == part]
        for start in range(0, len(own) - size + 1, size):  # whole passes
            assert len({*own[start : start + size].tolist()}) == size
        passes = own[: len(own) // size * size].reshape(-1, size).tolist()
        if len(passes) > 4:
            assert len({*map(tuple, passes)}) > 2


def test_many_parts_are_spread_evenly():
    """Any number of parts of any shares: in each stretch within three records, exact at the end."""
    random = np.random.default_rng(0)
    for _ in range(at_night(30, 100)):
        quotas = random.integers(0, random.choice([2, 10, 1000]), random.integers(1, 40))
        quotas[0] += 1
        total = int(quotas.sum())
        parts, before = spread_evenly(np.arange(total), quotas)
        assert np.bincount(parts, minlength=len(quotas)).tolist() == quotas.tolist()
        for part, quota in enumerate(quotas):
            own = np.flatnonzero(parts == part)
            assert before[own].tolist() == [*range(quota)]
            ahead = np.append(0, np.cumsum(parts == part)) - np.arange(total + 1) * quota / total
            assert ahead.max() - ahead.min() < 3
        some = random.integers(0, total, 50)  # each place by itself
        assert spread_evenly(some, quotas)[0].tolist() == parts[some].tolist()


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_any_number_of_shards_serves_the_same(num_shards):
    parts, mixed = np.repeat([0, 1], [40, 9]), ((40, 9), (0.75, 0.25))
    plan = plan_of(53, *mixed, 24 // num_shards, num_shards)
    served = np.array([plan.positions(0, plan.slots(shard)) for shard in range(num_shards)])
    together = served.reshape(num_shards, 2, -1).swapaxes(0, 1).reshape(-1)
    expected = plan_of(53, *mixed, 24).positions(0, np.arange(48))
    np.testing.assert_array_equal(together, expected)
    assert np.bincount(parts[expected]).tolist() == [36, 12]


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_a_mixture_is_served(photos, drawings, options):
    """The label tells where an image is from; ids count over the files of both."""
    spec = mixture_of({photos: 0.75, drawings: 0.25})
    train = dti.load(spec, options, batch_size=8)
    assert train.steps_per_epoch == 5  # 40 records
    both = photos + drawings
    seen = []
    for epoch in range(2):
        for step, (batch, labels) in enumerate(train):
            ids = batch["record_id"].numpy()
            assert ids.tolist() == train.records_of(5 * epoch + step).tolist()
            assert (labels.numpy() >= 100).sum() == 2
            for record, label in zip(ids, labels.numpy(), strict=True):
                assert both.read(record)["image/class/label"][0] == label
            seen += labels.numpy().tolist()
    times = Counter(seen)
    assert {times[label] for label in range(30)} == {2}
    assert {times[label] for label in range(100, 108)} == {2, 3}
    again = train.batch_at(7)
    assert again[0]["record_id"].numpy().tolist() == train.records_of(7).tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The structure of .inputs.")  # the model leaves the ids alone
def test_parts_of_one_set_and_resuming(photos, tmp_path, caplog):
    """Subsets of the same files mix; training goes on at the same record, or says what changed."""
    halves = photos.split(first=0.5, rest=0.5)
    first, rest = halves.values()
    spec = mixture_of({first: 0.25, rest: 0.75})
    assert spec.records == photos

    def fit(spec, epochs, **fields):
        layers = tf.keras.layers
        image = layers.Input((8, 8, 3), name="image")
        model = tf.keras.Model(image, layers.Dense(200)(layers.Flatten()(image)))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=True)
        train = dti.load(spec, DALI, batch_size=4)
        resume = dti.Resume(tmp_path / "state", **fields)
        return train.fit(model, epochs=epochs, resume=resume, verbose=0)

    fit(spec, 1)
    assert len(fit(spec, 2).epoch) == 2
    other = mixture_of({first: 0.5, rest: 0.5})
    with refused("belongs to training on other input: `mixture` was <Mixture: 0.25 of"):
        fit(other, 3)
    with caplog.at_level("WARNING", "dali_tf_input"):
        assert len(fit(other, 3, allow_changed_data=True).epoch) == 3
    steps = other.plan(4).steps_per_epoch
    assert "This is other input than the saved state's: `mixture` was <Mixture: 0.25" in caplog.text
    assert f"resuming at step {2 * steps}, in a new order." in caplog.text
    assert len(fit(other, 3).epoch) == 3  # which is done


def test_resuming_where_the_folder_was_moved(tmp_path):
    """What the order depends on is the same in another folder."""
    prints = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        records = write_indexed(tmp_path / place / "photos-0", numbered_examples(10))
        parts = records.split(a=0.5, b=0.5).values()
        prints.append(make_fingerprint(mixture_of(dict.fromkeys(parts, 0.5)), 4))
    assert prints[0] == prints[1]
    assert "<Mixture: 0.5 of " in prints[0]["mixture"]


def test_refuses(photos, drawings, dataset):
    for message, shares in {
        "`records` must be shares that are 1 together, got 0.9": {photos: 0.5, drawings: 0.4},
        "`records` must be shares in .0, 1., got 0": {photos: 1.0, drawings: 0},
        "`records` must be parts by their shares": {},
        "Both have the same records of": {photos: 0.5, photos.sample(3): 0.5},
    }.items():
        with refused(message):
            mixture_of(shares)
    with refused("`mixture` is for order 'global' only, got 'buffer'"):
        mixture_of({photos: 0.5, drawings: 0.5}, order="buffer")
    for fields in ({"balance": "class"}, {"temperature": 2.0}):
        with refused("A mixture takes neither `balance` nor `temperature`"):
            mixture_of({photos: 0.5, drawings: 0.5}, **fields)
    with refused("An epoch would have 30,000,000 records, as long as it takes to serve the first"):
        mixture_of({photos: 1e-6, drawings: 1 - 1e-6})
    with refused("`batch_size` must be at most"):
        dti.load(mixture_of({photos: 0.5, drawings: 0.5}), TF_DATA, batch_size=64)
    mixture = Mixture.of({photos: 0.5, drawings: 0.5})
    with refused("`mixture` is of other records"):
        spec_of(dataset, "global", SMALL, mixture=mixture)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Records with the keys of tfds, whose labels count from 40."""
    examples = [
        {"image": example["image/encoded"], "label": 40 + example["image/class/label"]}
        for example in numbered_examples(8)
    ]
    path = tmp_path_factory.mktemp("c") / "pictures-0"
    return write_indexed(path, examples, dti.Checks(verify="schema"))


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], [DALI, TF_DATA]))
def test_parts_with_other_keys(tmp_path, pictures, options):
    """Each part's images and labels are those that it serves alone."""
    write_indexed(tmp_path / "photos-0", numbered_examples(24), dti.Checks(verify="schema"))
    photos = dti.Records.from_files(tmp_path / "photos-0")
    others = pictures.relabel({label: label - 10 for label in range(40, 48)})
    both = photos + others
    assert both.image_keys == ("image/encoded", "image")
    assert sorted(both.labels) == [*range(24), *range(30, 38)]
    shares = {photos: 0.75, others: 0.25}
    train = dti.load(mixture_of(shares, seed=2), options, batch_size=8)
    alone = {}
    for records, offset in ((photos, 0), (pictures, 10)):
        spec = dti.InputSpec.for_evaluation(records, dti.Preprocess(image_size=(8, 8)))
        for images, labels in dti.load(spec, options, batch_size=8):
            alone |= dict(zip(labels.numpy() - offset, images.numpy(), strict=True))
    spec = dti.InputSpec.for_evaluation(both, dti.Preprocess(image_size=(8, 8)))
    served = {}
    for images, labels in dti.load(spec, options, batch_size=8):
        served |= dict(zip(labels.numpy(), images.numpy(), strict=True))
    assert sorted(served) == sorted(alone)
    for label, image in served.items():
        np.testing.assert_array_equal(image, alone[label])
    seen = np.concatenate([labels.numpy() for _, labels in train])
    assert (seen >= 30).sum() == 8
    assert {*seen[seen < 30].tolist()} == {*range(24)}


def test_other_keys_without_labels_of_the_index(tmp_path, pictures):
    photos = write_indexed(tmp_path / "photos-0", numbered_examples(24))
    with refused("The index of .*photos-0 does not have a class for each record.*photos-0$"):
        mixture_of({photos: 0.5, pictures: 0.5})
    spec = mixture_of({photos: 0.5, pictures: 0.5}, label=None)
    (batch,) = next(iter(dti.load(spec, DALI, batch_size=8)))
    assert batch["image"].shape == (8, 8, 8, 3)
    both_keys = {"image/encoded": b"", "image": b"", "image/class/label": 1}
    mixed = write_indexed(tmp_path / "mixed-0", [both_keys])
    with refused("`image_key` 'image' of some of the records is a feature of the others too"):
        mixed + pictures


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
def test_a_bad_record_with_other_keys_is_named(tmp_path, pictures):
    """With the command for its own set of files, which the next training accepts."""
    examples = numbered_examples(24)
    examples[5]["image/encoded"] = examples[5]["image/encoded"][:200]
    write_indexed(tmp_path / "photos-0", examples, dti.Checks(verify="schema"))
    photos = dti.Records.from_files(tmp_path / "photos-0")
    train = dti.load(mixture_of({pictures: 0.5, photos: 0.5}), TF_DATA, batch_size=8)
    with pytest.raises(dti.BadRecordError, match=r"record 5, byte .*photos-0$") as caught:
        for _ in range(4):
            list(train)
    command = str(caught.value).split("dali_tf_input ")[-1].split("dali-tf-input ")[-1]
    assert run(*shlex.split(command), "--max_bad_fraction=0.1").returncode == 0
    photos = dti.Records.from_files(tmp_path / "photos-0")
    assert photos.num_records == 23
    train = dti.load(mixture_of({pictures: 0.5, photos: 0.5}), TF_DATA, batch_size=8)
    list(train)
    with open(tmp_path / "photos-0", "ab") as file:
        file.write(b"more")
    with pytest.raises(dti.InputError, match="changed since it was indexed") as caught:
        list(train)
    first, second = str(caught.value).split(" && ")  # a run for each set of keys
    assert "--image_key=image " in f"{first}{second} "
    assert "--image_key=image/encoded " in f"{first}{second} "
    os.truncate(tmp_path / "photos-0", os.path.getsize(tmp_path / "photos-0") - 4)
    dti.build_index(
        tmp_path / "photos-0",
        dti.Checks(verify="decode", decoder="dali"),
        on_bad="skip",
        force=True,
        max_bad_fraction=0.1,
    )
    photos = dti.Records.from_files(tmp_path / "photos-0")
    assert len([*dti.load(mixture_of({pictures: 0.5, photos: 0.5}), DALI, batch_size=8)]) == 2
