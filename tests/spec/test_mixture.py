"""Mixtures: parts of several sets of files in exact proportions."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, numbered_examples, refused, spec_of, write_indexed

import dali_tf_input as dti
from dali_tf_input.spec.balance import Mixture, draw_mixed, share_out
from dali_tf_input.spec.order import EpochSteps, Shard, list_records
from dali_tf_input.training.resume import make_fingerprint

SMALL = dti.Preprocess.for_training(16)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_indexed(tmp_path_factory.mktemp("b") / "photos-0", numbered_examples(30))


@pytest.fixture(scope="module")
def drawings(tmp_path_factory):
    examples = numbered_examples(8, first=100)
    return write_indexed(tmp_path_factory.mktemp("a") / "drawings-0", examples)


def mixture_of(shares, **fields):
    return dti.InputSpec.for_training(shares, SMALL, record_ids=True, **fields)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.7, 0.3), (0.9, 0.1), (0.6, 0.3, 0.1)])
@pytest.mark.parametrize("total", [10, 23, 64])
def test_counts_are_exact_and_spread(shares, total):
    """In each epoch, in each stretch of it, and of each record over all epochs."""
    sizes = np.array([11, 5, 3][: len(shares)])
    parts = np.repeat(np.arange(len(shares)), sizes)
    quotas = share_out(total, np.array(shares))
    served = np.zeros((0,), np.int64)
    for epoch in range(12):
        drawn = draw_mixed(parts, quotas, seed=5, epoch=epoch)
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
        if len(own) > 4 * size:
            assert own[:size].tolist() != own[size : 2 * size].tolist()


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_any_number_of_shards_serves_the_same(num_shards):
    parts, shares = np.repeat([0, 1], [40, 9]), np.array([0.75, 0.25])
    steps = EpochSteps(
        num_records=53, batch_size=24 // num_shards, num_shards=num_shards, padded=False
    )
    how = {"classes": parts, "shares": shares, "mixed": True, "seed": 1}
    served = np.array(
        [
            list_records([49], steps=steps, shard=Shard(shard, num_shards), **how)
            for shard in range(num_shards)
        ]
    )
    together = served.reshape(num_shards, 2, -1).swapaxes(0, 1).reshape(-1)
    one = dataclasses.replace(steps, batch_size=24, num_shards=1)
    expected = list_records([49], steps=one, shard=Shard(), **how)
    np.testing.assert_array_equal(together, expected)
    assert np.bincount(parts[expected]).tolist() == [36, 12]


@pytest.mark.parametrize("options", [TF_DATA, DALI], ids=["tf_data", "dali"])
def test_both_backends_mix(photos, drawings, options):
    """The label tells where an image is from; ids count over the files of both."""
    spec = mixture_of({photos: 0.75, drawings: 0.25})
    train = dti.load(spec, options, batch_size=8)
    assert train.steps_per_epoch == 5  # 40 records
    both = photos + drawings
    seen = []
    for epoch in range(3):
        for step, (batch, labels) in enumerate(train):
            ids = batch["record_id"].numpy()
            assert ids.tolist() == train.records_of(5 * epoch + step).tolist()
            assert (labels.numpy() >= 100).sum() == 2
            for record, label in zip(ids, labels.numpy(), strict=True):
                assert both.read(record)["image/class/label"][0] == label
            seen += labels.numpy().tolist()
    times = Counter(seen)
    assert {times[label] for label in range(30)} == {3}
    assert {times[label] for label in range(100, 108)} == {3, 4}
    again = train.batch_at(11)
    assert again[0]["record_id"].numpy().tolist() == train.records_of(11).tolist()


def test_parts_of_one_set_and_resuming(photos, tmp_path, caplog):
    """Subsets of the same files mix; training goes on at the same record, or says what changed."""
    halves = photos.split(first=0.5, rest=0.5)
    first, rest = halves.values()
    spec = mixture_of({first: 0.25, rest: 0.75})
    assert spec.records == photos

    def fit(spec, epochs, **fields):
        layers = tf.keras.layers
        image = layers.Input((16, 16, 3), name="image")
        model = tf.keras.Model(image, layers.Dense(200)(layers.Flatten()(image)))
        model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        train = dti.load(spec, TF_DATA, batch_size=4)
        resume = dti.Resume(tmp_path / "state", **fields)
        return train.fit(model, epochs=epochs, resume=resume, verbose=0)

    fit(spec, 1)
    assert len(fit(spec, 2).epoch) == 2
    with refused("belongs to training on other input: `mixture` was <Mixture: 0.25 of"):
        fit(mixture_of({first: 0.5, rest: 0.5}), 3)
    with caplog.at_level("WARNING", "dali_tf_input"):
        history = fit(mixture_of({first: 0.5, rest: 0.5}), 4, allow_changed_data=True)
    assert history.epoch == [0, 1, 2, 3]
    steps = mixture_of({first: 0.5, rest: 0.5}).steps(4).per_epoch
    assert "This is other input than the saved state's: `mixture` was <Mixture: 0.25" in caplog.text
    assert f"resuming at step {2 * steps}, in a new order." in caplog.text
    fit(mixture_of({first: 0.5, rest: 0.5}), 5)


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
        "`records` must be a dict of Records, got records": {"records": 1.0},
        "`records` must be parts by their shares": {},
        "Both have the same records of": {photos: 0.5, photos.take(3): 0.5},
        "`image_key` must be the same": {
            photos: 0.5,
            dataclasses.replace(drawings, image_key="other"): 0.5,
        },
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
