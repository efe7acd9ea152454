"""The order of the records: arithmetic first, exhausted over small cases, then real pipelines of
both backends.
"""

import dataclasses

import conftest
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    BACKENDS,
    TF_DATA,
    backends,
    dali_slowly,
    jpeg,
    nightly,
    refused,
    slowly,
    spec_of,
    take,
    write_indexed,
)

from dali_tf_input import Checks, Preprocess, RandomResizedCrop, Shard
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.spec.order import EpochSteps, list_records, shuffle
from dali_tf_input.training.load import load

SMALL = Preprocess.for_training(16)


def steps_of(num_records, batch_size, num_shards, *, padded=False):
    return EpochSteps(
        num_records=num_records, batch_size=batch_size, num_shards=num_shards, padded=padded
    )


def test_steps_exhausted():
    """Every N to 64, replicas to 8, batches to 16: equal steps, disjoint, no record twice; a pass
    with a shorter last step holds each once.
    """
    for num_records in range(1, 65):
        for num_shards in range(1, 9):
            for batch_size in range(1, 17):
                group = batch_size * num_shards
                for padded in (False, True):
                    steps = steps_of(num_records, batch_size, num_shards, padded=padded)
                    places = [steps.slots(shard) for shard in range(num_shards)]
                    served = np.sort(np.concatenate(places))
                    if padded:
                        assert steps.per_epoch == -(-num_records // group)
                        np.testing.assert_array_equal(served, np.arange(num_records))
                    else:
                        assert steps.per_epoch == num_records // group
                        assert {len(slots) for slots in places} == {steps.per_epoch * batch_size}
                        np.testing.assert_array_equal(served, np.arange(steps.per_epoch * group))


def test_a_step_is_the_same_for_any_number_of_shards():
    for num_shards in (1, 2, 3, 4, 6, 12):
        steps = steps_of(100, 12 // num_shards, num_shards)
        places = [steps.slots(shard).reshape(8, -1) for shard in range(num_shards)]
        np.testing.assert_array_equal(np.concatenate(places, 1), np.arange(96).reshape(8, 12))
        later = steps.slots(0)[5 * steps.batch_size :]
        np.testing.assert_array_equal(steps.slots(0, start_step=5), later)


@pytest.mark.parametrize("shuffle_block_size", [1, 2, 3, 7, 100])
def test_shuffle_is_a_permutation(shuffle_block_size):
    for num_records in range(1, 40):
        firsts = np.unique([0, num_records // 3, num_records // 2])
        files = {"shuffle_block_size": shuffle_block_size, "first_of_files": firsts}
        for epoch in range(4):
            order = shuffle(num_records, seed=5, epoch=epoch, **files)
            np.testing.assert_array_equal(np.sort(order), np.arange(num_records))


def test_shuffle_is_a_function_of_seed_and_epoch():
    """The golden order: it must not change, or training that was stopped could not be taken up by
    another version.
    """
    files = {"shuffle_block_size": 3, "first_of_files": np.array([0, 5])}
    how = [(0, 0, {}), (0, 1, {}), (1, 0, {}), (0, 0, files)]
    orders = [shuffle(12, seed=seed, epoch=epoch, **given).tolist() for seed, epoch, given in how]
    assert orders == GOLDEN


GOLDEN = [
    [0, 2, 11, 9, 1, 8, 5, 4, 3, 10, 6, 7],
    [5, 3, 7, 8, 11, 2, 4, 1, 10, 0, 6, 9],
    [3, 5, 2, 9, 7, 10, 0, 8, 6, 11, 1, 4],
    [2, 3, 4, 0, 1, 10, 11, 7, 8, 9, 5, 6],
]


def test_every_order_is_as_likely():
    """All 24 orders of 4 records, over 4800 epochs: each 200 times, give or take five standard
    deviations.
    """
    orders = [tuple(shuffle(4, seed=3, epoch=epoch)) for epoch in range(4800)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert min(counts) > 130
    assert max(counts) < 270


def test_the_remainder_is_another_one_each_epoch():
    how = {"steps": steps_of(10, 4, 1), "shard": Shard(0, 1), "seed": 0}
    served = [list_records([6, 4], **how, epoch=epoch) for epoch in range(40)]
    skipped = [frozenset(range(10)) - set(one) for one in served]
    assert all(len(rest) == 2 for rest in skipped)
    assert len(set(skipped)) > 20
    assert set().union(*skipped) == set(range(10))


@pytest.mark.parametrize("shuffle_block_size", [1, 4])
def test_a_stored_order_is_mixed(shuffle_block_size):
    """20 classes of 1000, stored class by class: the first batch of 256 holds 18 of them, in every
    epoch.
    """
    files = {"shuffle_block_size": shuffle_block_size, "first_of_files": np.arange(0, 20_000, 1000)}
    for epoch in range(30):
        order = shuffle(20_000, seed=1, epoch=epoch, **files)
        assert len(set(order[:256] // 1000)) >= (18 if shuffle_block_size == 1 else 17)


def make(dataset, options, batch_size, *, order="global", preprocess=SMALL, **arguments):
    pipeline = {
        name: arguments.pop(name)
        for name in ("shard", "start_step", "endless")
        if name in arguments
    }
    spec = spec_of(dataset, order, preprocess, **arguments)
    return make_dataset(spec, options, batch_size=batch_size, **pipeline)


@backends
@pytest.mark.parametrize(
    ("num_shards", "batch_size"),
    [(1, 5), (2, 3), (1, 24), nightly(1, 1), nightly(3, 2), slowly(4, 6)],
)
def test_pipelines_serve_the_plan(dataset, options, num_shards, batch_size):
    """Three epochs: in each every record at most once over all shards, in the order of the
    arithmetic.
    """
    group = num_shards * batch_size
    steps = 24 // group
    shards = [Shard(shard, num_shards) for shard in range(num_shards)]
    made = [make(dataset, options, batch_size, shard=shard, seed=4) for shard in shards]
    labels = [take(one, 3 * steps)[1].reshape(3, steps, batch_size) for one in made]
    for epoch, served in enumerate(np.stack(labels, 2)):  # step, shard, position
        order = shuffle(24, seed=4, epoch=epoch)[: steps * group].tolist()
        assert served.ravel().tolist() == order


@pytest.mark.slow
@backends
def test_iterators_start_at_the_start_step(dataset, options):
    """The same records and the same pixels as without stopping, across the bounds of epochs."""
    preprocess = dataclasses.replace(SMALL, crop=RandomResizedCrop())
    whole = iter(make(dataset, options, 5, preprocess=preprocess, endless=True))
    batches = [next(whole) for _ in range(12)]
    for step in (0, 3, 4, 7, 11):
        resumed = make(dataset, options, 5, preprocess=preprocess, start_step=step)
        images, labels = next(iter(resumed))
        np.testing.assert_array_equal(labels, batches[step][1])
        np.testing.assert_array_equal(images, batches[step][0])


def test_both_backends_train_on_the_same_images(tmp_path):
    """In global order crops and mirrors are the same too; images of every kind that is read."""
    images = conftest.valid_images() + [jpeg(90, 70, seed=2)] * 4
    examples = [{"image": image, "label": number} for number, image in enumerate(images)]
    dataset = write_indexed(tmp_path / "train", examples)
    raw = {"mean": (0, 0, 0), "std": (1, 1, 1), "image_size": (32, 24)}
    preprocess = dataclasses.replace(SMALL, crop=RandomResizedCrop(), **raw)
    (dali_images, dali_labels), (tf_images, tf_labels) = (
        take(make(dataset, options, 6, preprocess=preprocess), 6) for options in BACKENDS.values()
    )
    np.testing.assert_array_equal(dali_labels, tf_labels)
    assert np.abs(dali_images - tf_images).max() < 0.02


@pytest.fixture(scope="module")
def skipping(tmp_path_factory):
    """Twelve records of which the index skips four."""
    examples = [{"image": jpeg(20, 20, seed=n), "label": n} for n in range(12)]
    for bad in (0, 5, 6, 11):
        examples[bad]["image"] = b"no image"
    file = tmp_path_factory.mktemp("skipping") / "train"
    checks = Checks(verify="decode", decoder="dali")
    return write_indexed(file, examples, checks, on_bad="skip", max_bad_fraction=0.9)


@backends
def test_skipped_records_are_never_served(skipping, options):
    for changes in ({"order": "global"}, {"order": "sequential", "repeat": False}):
        _, labels = take(make(skipping, options, 4, **changes), 2)
        assert sorted(labels) == [1, 2, 3, 4, 7, 8, 9, 10]


def test_fragments_stay_together(dataset):
    _, served = take(make(dataset, TF_DATA, 4, shuffle_block_size=4), 6)
    assert sorted(served) == list(range(24))
    neighbors = np.mean(np.diff(served) == 1)
    assert 0.4 < neighbors < 0.9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shuffle_block_size": 0}, "`shuffle_block_size` must be at least 1, got 0"),
        (
            {"order": "buffer", "shuffle_block_size": 2},
            "`shuffle_block_size` is for order 'global' only, got 2 with 'buffer'",
        ),
        (
            {"order": "buffer", "repeat": False},
            "`repeat` False is for order 'sequential' only, got 'buffer'",
        ),
        (
            {"order": "buffer", "start_step": 3},
            "Order 'buffer' can start at the first step of an epoch only, one in 6, got step 3",
        ),
        ({"start_step": -1}, r"`start_step` must be in \[0, .*\), got -1"),
        ({"batch_size": 24, "start_step": 10**8}, r"`start_step` must be in \[0, "),
        (
            {"batch_size": 5, "shard": Shard(4, 5)},
            "`batch_size` must be at most 4 in each of 5 shards, as there are 24 records, got 5",
        ),
    ],
)
def test_refuses(dataset, changes, message):
    with refused(message):
        make(dataset, TF_DATA, **{"batch_size": 4, **changes})


@pytest.mark.parametrize("text", [None, "", "0 10\n", "x y\n", "0 10 20"])
def test_an_index_that_changed_since(tmp_path, text):
    examples = [{"image": jpeg(8, 8), "label": number} for number in range(3)]
    dataset = write_indexed(tmp_path / "train", examples)
    (tmp_path / "train.idx").unlink()
    if text is not None:
        (tmp_path / "train.idx").write_text(text)
    with refused(r"train.idx changed since `Records.from_files` read it"):
        make(dataset, TF_DATA, 1)


@dali_slowly
def test_two_replicas_share_each_step(dataset, options):
    spec = spec_of(dataset, "global", SMALL, seed=9)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    train = load(spec, options, strategy=strategy, batch_size=8, start_step=2)
    assert train.steps_per_epoch == 3
    iterator = (batch for _ in range(3) for batch in train)
    for step in range(2, 7):
        labels = strategy.experimental_local_results(next(iterator)[1])
        order = shuffle(24, seed=9, epoch=step // 3)
        assert np.concatenate(labels).tolist() == order[step % 3 * 8 :][:8].tolist()
