"""Mixup and CutMix: what is drawn, and the same mixed batches by each backend."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, at_night, jpeg, refused, spec_of, table, write_indexed

import dali_tf_input as dti
from dali_tf_input import Mix, Preprocess, Shard, TfDataOptions
from dali_tf_input.backends import tf_mix, tf_native
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.backends.stream import Stream
from dali_tf_input.records.labels import ClassLabel
from dali_tf_input.spec.crops import NoCrop
from dali_tf_input.spec.mix import _beta_quantiles

SIZE = (24, 32)
PLAIN = Preprocess(image_size=SIZE, crop=NoCrop(), mean=(0,) * 3, std=(1,) * 3)
EITHER = (DALI, TF_DATA)
LABEL = ClassLabel(one_hot=True, num_classes=24)
BOTH = Mix(mixup=0.8, cutmix=1.0)
ALONE = Shard(0, 1)


def feed(records, options, *, batch_size=6, shard=ALONE, start_step=0, **changes):
    fields = {"label": LABEL, "mix": BOTH, "preprocess": PLAIN, "seed": 3, **changes}
    spec = spec_of(records, "global", fields.pop("preprocess"), **fields)
    return make_dataset(spec, options, batch_size=batch_size, shard=shard, start_step=start_step)


def take(dataset, count):
    batches = (batch for _ in itertools.count() for batch in dataset)
    return [
        tuple(values.numpy().astype(np.float32) for values in batch)
        for batch in itertools.islice(batches, count)
    ]


def mixed_by_hand(batch, drawn):
    """Returns what a batch becomes, from the definition."""
    weight, top, left, bottom, right = drawn[:5]
    images, labels = batch
    box = (slice(None), slice(int(top), int(bottom)), slice(int(left), int(right)))
    made = weight * images + (1 - weight) * images[::-1]
    made[box] = images[::-1][box]
    area = (bottom - top) * (right - left) / np.prod(SIZE)
    part = weight * (1 - area)
    assert drawn[5] == pytest.approx(part, abs=1e-6)
    return made, part * labels + (1 - part) * labels[::-1]


MIXES = (Mix(mixup=0.8), Mix(cutmix=1.0), BOTH, Mix(mixup=1.0, p=0.4))


@pytest.mark.slow
@table("mix, batch_size, options", [(BOTH, 5, TF_DATA), (MIXES[3], 6, DALI)], MIXES, (5, 6), EITHER)
def test_batches_by_hand(dataset, options, mix, batch_size):
    """Each batch of two epochs, of an odd size too: the images and labels as they are defined."""
    made = take(feed(dataset, options, batch_size=batch_size, mix=mix), 8)
    plain = take(feed(dataset, options, batch_size=batch_size, mix=None), 8)
    stream = Stream(
        spec=spec_of(dataset, "global", PLAIN, label=LABEL, mix=mix, seed=3),
        shard_batch_size=batch_size,
    )
    per_epoch, kinds = 24 // batch_size, set()
    for step in range(8):
        epoch, number = divmod(step, per_epoch)
        key = tf.constant((epoch << 40) + number * batch_size + 2, tf.int64)
        drawn = tf_mix.draw_mix(stream, key).numpy()
        images, labels = mixed_by_hand(plain[step], drawn)
        np.testing.assert_allclose(made[step][0], images, atol=1e-3)
        np.testing.assert_allclose(made[step][1], labels, atol=1e-5)
        np.testing.assert_allclose(made[step][1].sum(1), 1, atol=1e-5)
        kinds.add("box" if drawn[3] > drawn[1] else "blend" if drawn[0] < 1 else "none")
    assert kinds <= {"box" if mix.cutmix else "blend", "blend" if mix.mixup else "box", "none"}


WORK = [
    {"dtype": "float16", "layout": "CHW"},
    {"dtype": "uint8"},
    {"channels": 1, "mean": (0,), "std": (1,), "layout": "CHW"},
    {"augment": (dti.augment.RandAugment(),), "mirror_probability": 0.5},
]


@pytest.mark.parametrize("changes", at_night(WORK[:1], WORK))
def test_both_backends(dataset, changes):
    """And of each kernel, for types and layouts."""
    preprocess = dataclasses.replace(PLAIN, **changes)
    kinds = (TF_DATA, TfDataOptions(kernel="tensorflow"), DALI)
    first, *others = (take(feed(dataset, kind, preprocess=preprocess), 4) for kind in kinds)
    for made in others:
        for step in range(4):
            for one, other in zip(first[step], made[step], strict=True):
                assert np.abs(one - other).mean() < 0.05
                assert np.quantile(np.abs(one - other), 0.98) <= 1


def test_of_each_shard(dataset):
    """Two shards mix their own halves, in ways of their own."""
    shards = [take(feed(dataset, DALI, batch_size=4, shard=Shard(n, 2)), 3) for n in range(2)]
    plain = take(feed(dataset, DALI, batch_size=8, mix=None), 3)
    for step in range(3):
        for number in range(2):
            classes = plain[step][1][4 * number :][:4].argmax(1)
            labels = shards[number][step][1]
            for place, own in enumerate(labels):
                assert {*np.flatnonzero(own)} <= {classes[place], classes[3 - place]}
    assert not np.array_equal(shards[0][0][1].max(), shards[1][0][1].max())


def test_draws(tmp_path):
    """How often each kind; parts as of a Beta distribution; boxes of the area that is drawn."""
    alphas = {0.1: 0.2, 0.2: 0.5, 1.0: 1.0, 8.0: 3.0}
    for alpha in alphas:
        values = _beta_quantiles(alpha)
        assert (np.diff(values) >= 0).all()
        np.testing.assert_allclose(values + values[::-1], 1, atol=1e-6)
        assert values.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.01)
    np.testing.assert_allclose(_beta_quantiles(1.0), (np.arange(1024) + 0.5) / 1024, atol=1e-5)

    examples = [{"image": jpeg(8, 8), "label": 0}] * 4
    mix = Mix(mixup=0.5, cutmix=1.0, p=0.8, switch=0.3)

    records = write_indexed(tmp_path / "train", examples)
    preprocess = dataclasses.replace(PLAIN, image_size=(100, 200))
    spec = spec_of(records, "global", preprocess, label=LABEL, mix=mix)
    stream = Stream(spec=spec, shard_batch_size=4)
    keys = tf.data.Dataset.range(0, 40_000, 4)
    draws = keys.map(lambda key: tf_mix.draw_mix(stream, key)).batch(10_000)
    drawn = next(draws.as_numpy_iterator())
    weight, top, left, bottom, right, part = drawn.T
    is_cut = bottom > top
    assert (is_cut | (weight < 1)).mean() == pytest.approx(0.8, abs=0.02)
    assert is_cut.mean() == pytest.approx(0.24, abs=0.02)
    assert (weight[is_cut] == 1).all()
    blended = weight[weight < 1]
    assert blended.var() == pytest.approx(1 / 8, rel=0.05)
    assert blended.mean() == pytest.approx(0.5, abs=0.015)
    assert (top >= 0).all()
    assert (bottom <= 100).all()
    assert (right <= 200).all()
    centers = ((top + bottom) / 2)[is_cut & (bottom - top < 20) & (top > 0) & (bottom < 100)]
    assert centers.std() > 20
    areas = ((bottom - top) * (right - left))[is_cut] / 20_000
    np.testing.assert_allclose(1 - areas, part[is_cut], atol=1e-5)
    # Boxes that are clipped at an edge are smaller: of the mean area 1/2 a bit over half is left.
    assert 0.2 < areas.mean() < 0.45


def test_a_batch_that_others_hold():
    """The operation mixes in place only what nobody else has."""
    images = tf.constant(np.arange(4 * 2 * 2 * 3, dtype=np.float32).reshape(4, 2, 2, 3))
    before = images.numpy().copy()
    preprocess = dataclasses.replace(PLAIN, image_size=(2, 2))
    blended = tf_native.mix(images, tf.constant([0.25, 0, 0, 0, 0, 0.25]), preprocess)
    np.testing.assert_allclose(blended, 0.25 * before + 0.75 * before[::-1])
    cut = tf_native.mix(images, tf.constant([1.0, 0, 0, 1, 1, 0.75]), preprocess).numpy()
    np.testing.assert_array_equal(cut[:, 0, 0], before[::-1][:, 0, 0])
    np.testing.assert_array_equal(cut[:, 1], before[:, 1])
    np.testing.assert_array_equal(images, before)
    for drawn, shape, message in (
        ([1] * 5, (4, 2, 2, 3), "a mix is 6 numbers"),
        ([1] * 6, (4, 3, 2, 3), "of the output's size"),
        ([1] * 6, (2, 2, 3), "of 4 axes"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            tf_native.mix(tf.zeros(shape), tf.constant(drawn, tf.float32), preprocess)
    wild = tf.constant([0.5, -9, np.inf, 1e9, -np.inf, 0])
    assert np.isfinite(tf_native.mix(images, wild, preprocess).numpy()).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": ClassLabel()}, r"label=ClassLabel\(one_hot=True, num_classes=24\), and a categ"),
        ({"label": None}, "`mix` needs a ClassLabel or a MultiHot, got None"),
        ({"repeat": False}, "`repeat` False is for order"),
        ({"class_weight": {0: 2.0}}, "without `mask` and `class_weight`"),
    ],
)
def test_refuses(dataset, changes, message):
    with refused(message):
        feed(dataset, TF_DATA, **changes)


def test_refuses_a_mix_of_nothing():
    with refused(r"Mix needs `mixup` or `cutmix` above 0, such as Mix\(mixup=0.2\)"):
        Mix()
