"""The order of the records: arithmetic first, exhausted over small cases, then real pipelines of
both backends.
"""

import dataclasses
import tracemalloc

import conftest
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    BACKENDS,
    DALI,
    TF_DATA,
    at_night,
    jpeg,
    refused,
    scan_records,
    spec_of,
    take,
    write_indexed,
    write_tfrecord,
)

from dali_tf_input import Checks, Preprocess, RandomResizedCrop, Records, Shard, build_index
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.spec.plan import Plan
from dali_tf_input.training.load import load

pytestmark = pytest.mark.usefixtures("checked_here")

SMALL = Preprocess.for_training(8)


def plan_of(num_slots, batch_size=1, num_shards=1, **fields):
    return Plan(num_slots=num_slots, shard_batch_size=batch_size, num_shards=num_shards, **fields)


def order_of(num_records, epoch, **fields):
    """Returns the order of all records of an epoch."""
    return plan_of(num_records, **fields).positions(epoch, np.arange(num_records))


def test_steps_exhausted():
    """All small numbers of records, replicas and images: equal steps, disjoint, no record twice; a
    pass with a shorter last step holds each once.
    """
    for num_records in range(1, at_night(33, 65)):
        for num_shards in range(1, at_night(11, 27)):
            for batch_size in at_night((1, 2, 3, 16), (*range(1, 6), 16)):
                group = batch_size * num_shards
                for keeps in (False, True):
                    plan = plan_of(num_records, batch_size, num_shards, keep_remainder=keeps)
                    slots = [plan.slots(shard) for shard in range(num_shards)]
                    assert [*map(len, slots)] == [*map(plan.num_images, range(num_shards))]
                    served = np.sort(np.concatenate(slots))
                    if keeps:
                        assert plan.steps_per_epoch == -(-num_records // group)
                        np.testing.assert_array_equal(served, np.arange(num_records))
                        assert max(map(len, slots)) - min(map(len, slots)) <= 1
                    else:
                        assert plan.steps_per_epoch == num_records // group
                        assert {*map(len, slots)} == {plan.steps_per_epoch * batch_size}
                        np.testing.assert_array_equal(served, np.arange(served.size))


def test_a_step_is_the_same_for_any_number_of_shards():
    """Whether it is asked for by shards, in parts, or for all shards together."""
    for num_shards in (1, 2, 3, 4, 6, 12):
        for keeps in (False, True):
            plan = plan_of(100, 12 // num_shards, num_shards, keep_remainder=keeps)
            slots = [plan.slots(shard) for shard in range(num_shards)]
            full = [part[: 8 * plan.shard_batch_size].reshape(8, -1) for part in slots]
            np.testing.assert_array_equal(np.concatenate(full, 1), np.arange(96).reshape(8, 12))
            steps = [plan.slots_of_step(step) for step in range(plan.steps_per_epoch)]
            np.testing.assert_array_equal(np.concatenate(steps), np.arange(100 if keeps else 96))
            for shard, whole in enumerate(slots):
                parts = [plan.slots(shard, first, first + 7) for first in range(0, 100, 7)]
                np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 100])
def test_an_epoch_has_each_record_once(block_size):
    """Blocks stay together, but for the one that begins where the files end."""
    for num_records in range(1, 40):
        for epoch in range(4):
            order = order_of(num_records, epoch, seed=5, block_size=block_size)
            np.testing.assert_array_equal(np.sort(order), np.arange(num_records))
            neighbors = np.count_nonzero(np.diff(order) % num_records == 1)
            size = min(block_size, num_records)
            assert neighbors >= num_records // size * (size - 1)


def test_the_order_is_a_function_of_seed_and_epoch():
    """The golden order: it must not change, or training that was stopped could not be taken up by
    another version.
    """
    how = [(0, 0, {}), (0, 1, {}), (1, 0, {}), (0, 0, {"block_size": 3})]
    orders = [order_of(12, epoch, seed=seed, **more).tolist() for seed, epoch, more in how]
    assert orders == GOLDEN


GOLDEN = [
    [10, 9, 0, 7, 2, 4, 1, 3, 8, 5, 6, 11],
    [3, 4, 6, 0, 2, 1, 11, 9, 8, 10, 5, 7],
    [0, 5, 3, 8, 11, 4, 6, 10, 1, 9, 7, 2],
    [10, 11, 0, 1, 2, 3, 7, 8, 9, 4, 5, 6],
]


def test_the_remainder_is_another_one_each_epoch():
    plan = plan_of(10, 4, seed=0)
    served = [plan.positions(epoch, plan.slots(0)) for epoch in range(40)]
    dropped = [frozenset(range(10)) - set(records.tolist()) for records in served]
    assert all(len(rest) == 2 for rest in dropped)
    assert len(set(dropped)) > 20
    assert set().union(*dropped) == set(range(10))


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_stored_order_is_mixed(block_size):
    """20 classes of 1000, stored class by class: the first batch of 256 holds 17 of them, in every
    epoch.
    """
    plan = plan_of(20_000, 256, seed=1, block_size=block_size)
    for epoch in range(at_night(5, 30)):
        classes = plan.positions(epoch, plan.slots_of_step(0)) // 1000
        assert len(set(classes.tolist())) >= (18 if block_size == 1 else 17)


@pytest.mark.parametrize("num_shards", [1, 8])
def test_a_plan_of_billions_takes_no_memory(num_shards):
    """Far more than memory would hold a table of: any step, at once."""
    plan = plan_of(1 << 36, 32, num_shards, seed=3, block_size=16)
    steps = plan.steps_per_epoch
    tracemalloc.start()
    for step in (0, steps // 2, steps - 1):
        records = plan.positions(7, plan.slots_of_step(step))
        assert len(set(records.tolist())) == 32 * num_shards
        assert 0 <= records.min() <= records.max() < 1 << 36
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def make(dataset, options, batch_size, *, order="global", preprocess=SMALL, **arguments):
    pipeline = {
        name: arguments.pop(name)
        for name in ("shard", "start_step", "endless")
        if name in arguments
    }
    spec = spec_of(dataset, order, preprocess, **arguments)
    return make_dataset(spec, options, batch_size=batch_size, **pipeline)


SHAPES = [(1, 5), (2, 3), (1, 24), (1, 1), (3, 2), (4, 6)]


@pytest.mark.parametrize(
    ("num_shards", "batch_size", "options"),
    at_night(
        [(2, 5, DALI), (1, 24, DALI), (1, 5, TF_DATA)],
        [(*shape, options) for shape in SHAPES for options in BACKENDS.values()],
    ),
)
def test_pipelines_serve_the_plan(dataset, options, num_shards, batch_size):
    """Two epochs: in each every record at most once over all shards, in the order of the
    arithmetic.
    """
    group = num_shards * batch_size
    steps = 24 // group
    shards = [Shard(shard, num_shards) for shard in range(num_shards)]
    made = [make(dataset, options, batch_size, shard=shard, seed=4) for shard in shards]
    labels = [take(one, 2 * steps)[1].reshape(2, steps, batch_size) for one in made]
    for epoch, served in enumerate(np.stack(labels, 2)):  # step, shard, position
        order = order_of(24, epoch, seed=4)[: steps * group].tolist()
        assert served.ravel().tolist() == order


@pytest.mark.slow
def test_both_backends_train_on_the_same_images(tmp_path):
    """In global order crops and mirrors are the same too; images of every kind that is read."""
    images = conftest.valid_images() + [jpeg(90, 70, seed=2)] * 4
    examples = [{"image": image, "label": number} for number, image in enumerate(images)]
    dataset = write_indexed(tmp_path / "train", examples)
    raw = {"mean": (0, 0, 0), "std": (1, 1, 1), "image_size": (32, 24), "antialias": False}
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
    for bad in (0, 5, 6):
        examples[bad]["image"] = b"no image"
    file = tmp_path_factory.mktemp("skipping") / "train"
    write_tfrecord(file, examples)
    with open(file, "r+b") as stream:  # the length of the last record
        stream.seek(scan_records(file)[11][0])
        stream.write(b"\xff")
    checks = Checks(verify="decode", decoder="dali")
    build_index(file, checks, on_bad="skip", max_bad_fraction=0.9)
    return Records.from_files(file)


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], BACKENDS.values()))
def test_skipped_records_are_never_served(skipping, options):
    for changes in (
        {"order": "global"},
        {"order": "buffer"},
        {"order": "sequential", "repeat": False},
    ):
        _, labels = take(make(skipping, options, 4, **changes), 2)
        assert sorted(labels) == [1, 2, 3, 4, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"order": "buffer", "shuffle_block_size": 2},
            "`shuffle_block_size` is for order 'global'",
        ),
        ({"order": "buffer", "repeat": False}, "`repeat` False is for order 'sequential'"),
        ({"batch_size": 24, "start_step": 10**8}, r"`start_step` must be in \[0, "),
    ],
)
def test_refuses(dataset, changes, message):
    with refused(message):
        make(dataset, TF_DATA, **{"batch_size": 4, **changes})


def test_an_index_that_changed_since(tmp_path):
    examples = [{"image": jpeg(8, 8), "label": number} for number in range(3)]
    dataset = write_indexed(tmp_path / "train", examples)
    for text in (None, "", "0 10\n", "x y\n", "0 10 20"):
        (tmp_path / "train.idx").unlink()
        if text is not None:
            (tmp_path / "train.idx").write_text(text)
        with refused(r"train.idx changed since `Records.from_files` read it"):
            make(dataset, TF_DATA, 1)
        (tmp_path / "train.idx").touch()


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], BACKENDS.values()))
def test_two_replicas_share_each_step(dataset, options):
    spec = spec_of(dataset, "global", SMALL, seed=9)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    train = load(spec, options, strategy=strategy, batch_size=8, start_step=2)
    assert train.steps_per_epoch == 3
    iterator = (batch for _ in range(3) for batch in train)
    for step in range(2, 7):
        labels = strategy.experimental_local_results(next(iterator)[1])
        order = order_of(24, step // 3, seed=9)
        assert np.concatenate(labels).tolist() == order[step % 3 * 8 :][:8].tolist()
