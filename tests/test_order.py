"""The order of the records: arithmetic first, exhausted over small cases, then real pipelines of
both backends.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from conftest import image_zoo, jpeg, write_tfrecord

from dali_tf_input import (
    Checks,
    DaliOptions,
    DatasetSpec,
    InputError,
    InputSpec,
    Preprocess,
    RandomResizedCrop,
    Shard,
    TfDataOptions,
    build_index,
)
from dali_tf_input.dataset import make_dataset
from dali_tf_input.distribution import distribute
from dali_tf_input.order import EpochSteps, Extents, Plan, StartStep, find_runs, shuffle

SMALL = Preprocess.for_training(16)
BACKENDS = {"dali": DaliOptions(device="cpu"), "tf_data": TfDataOptions()}


def index_of(counts):
    """Returns an index of files with records of 100 bytes, as (offset, size)."""
    return [np.stack([100 * np.arange(count), np.full(count, 100)], 1) for count in counts]


def test_steps_exhausted():
    """Every N to 64, replicas to 8, batches to 16: equal steps, disjoint, no record twice; padded
    passes hold each once.
    """
    for num_records in range(1, 65):
        for num_shards in range(1, 9):
            for batch_size in range(1, 17):
                group = batch_size * num_shards
                steps = EpochSteps(
                    num_records=num_records,
                    batch_size=batch_size,
                    num_shards=num_shards,
                    padded=False,
                )
                assert steps.per_epoch == num_records // group
                places = [steps.slots(shard) for shard in range(num_shards)]
                assert {len(one) for one in places} == {steps.per_epoch * batch_size}
                np.testing.assert_array_equal(
                    np.sort(np.concatenate(places)), np.arange(steps.per_epoch * group)
                )
                padded = dataclasses.replace(steps, padded=True)
                places = [padded.slots(shard) for shard in range(num_shards)]
                assert {len(one) for one in places} == {padded.per_epoch * batch_size}
                served = np.sort(np.concatenate(places))
                np.testing.assert_array_equal(served, np.arange(padded.per_epoch * group))
                assert 0 <= len(served) - num_records < group


def test_a_step_is_the_same_for_any_number_of_shards():
    for num_shards in (1, 2, 3, 4, 6, 12):
        steps = EpochSteps(
            num_records=100, batch_size=12 // num_shards, num_shards=num_shards, padded=False
        )
        by_step = np.concatenate(
            [steps.slots(shard).reshape(8, -1) for shard in range(num_shards)], 1
        )
        np.testing.assert_array_equal(by_step, np.arange(96).reshape(8, 12))
        np.testing.assert_array_equal(
            steps.slots(0, start_step=5), steps.slots(0)[5 * steps.batch_size :]
        )


@pytest.mark.parametrize("shuffle_block_size", [1, 2, 3, 7, 100])
def test_shuffle_is_a_permutation(shuffle_block_size):
    for num_records in range(1, 40):
        firsts = np.unique([0, num_records // 3, num_records // 2])
        for epoch in range(4):
            order = shuffle(
                num_records,
                seed=5,
                epoch=epoch,
                shuffle_block_size=shuffle_block_size,
                first_of_files=firsts,
            )
            np.testing.assert_array_equal(np.sort(order), np.arange(num_records))


def test_shuffle_is_a_function_of_seed_and_epoch():
    """The golden order: it must not change, or training that was stopped could not be taken up by
    another version.
    """
    assert shuffle(12, seed=0, epoch=0).tolist() == GOLDEN[0]
    assert shuffle(12, seed=0, epoch=1).tolist() == GOLDEN[1]
    assert shuffle(12, seed=1, epoch=0).tolist() == GOLDEN[2]
    firsts = np.array([0, 5])
    assert (
        shuffle(12, seed=0, epoch=0, shuffle_block_size=3, first_of_files=firsts).tolist()
        == GOLDEN[3]
    )


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
    steps = EpochSteps(num_records=10, batch_size=4, num_shards=1, padded=False)
    plan = Plan(Extents.of(index_of([6, 4])), steps=steps, shard=Shard(0, 1), seed=0)
    skipped = [frozenset(range(10)) - set(plan.records(epoch)) for epoch in range(40)]
    assert all(len(rest) == 2 for rest in skipped)
    assert len(set(skipped)) > 20
    assert set().union(*skipped) == set(range(10))


def test_find_runs():
    index = index_of([5, 4])
    index[0][3:, 0] += 50  # something was left out before record 3
    files = np.array([0] * 5 + [1] * 4, np.int32)
    offsets, sizes = np.concatenate(index).T
    arguments = {"files": files, "offsets": offsets, "ends": offsets + sizes, "longest": 3}
    assert find_runs(np.arange(9), **arguments).tolist() == [0, 3, 5, 8]
    assert find_runs(np.array([4, 3, 2, 1]), **arguments).tolist() == [0, 1, 2, 3]
    assert find_runs(np.array([7]), **arguments).tolist() == [0]


@pytest.mark.parametrize("shuffle_block_size", [1, 4])
def test_a_stored_order_is_mixed(shuffle_block_size):
    """20 classes of 1000, stored class by class: the first batch of 256 holds 18 of them, in every
    epoch.
    """
    for epoch in range(30):
        order = shuffle(
            20_000,
            seed=1,
            epoch=epoch,
            shuffle_block_size=shuffle_block_size,
            first_of_files=np.arange(0, 20_000, 1000),
        )
        assert len(set(order[:256] // 1000)) >= (18 if shuffle_block_size == 1 else 17)


def labels_of(dataset, count):
    iterator = iter(dataset)
    return [next(iterator)[1].numpy().tolist() for _ in range(count)]


def make(dataset, options, **arguments):
    order = arguments.pop("order", "global")
    batch = {
        name: arguments.pop(name)
        for name in ("batch_size", "shard", "start_step")
        if name in arguments
    }
    spec = InputSpec(
        dataset=dataset, preprocess=arguments.pop("preprocess", SMALL), order=order, **arguments
    )
    return make_dataset(spec, options, **batch)


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize(
    ("num_shards", "batch_size"), [(1, 1), (1, 5), (2, 3), (3, 2), (4, 6), (1, 24)]
)
def test_pipelines_serve_the_plan(dataset, options, num_shards, batch_size):
    """Three epochs: in each every record at most once over all shards, in the order of the
    arithmetic.
    """
    group = num_shards * batch_size
    steps = 24 // group
    served = [
        labels_of(
            make(dataset, options, batch_size=batch_size, shard=Shard(shard, num_shards), seed=4),
            3 * steps,
        )
        for shard in range(num_shards)
    ]
    for epoch in range(3):
        order = shuffle(24, seed=4, epoch=epoch)[: steps * group].tolist()
        together = [
            label
            for step in range(epoch * steps, (epoch + 1) * steps)
            for shard in served
            for label in shard[step]
        ]
        assert together == order


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_iterators_start_at_the_start_step(dataset, options):
    """The same records and the same pixels as without stopping, across the bounds of epochs; and
    each iterator anew.
    """
    preprocess = dataclasses.replace(SMALL, crop=RandomResizedCrop())
    whole = iter(make(dataset, options, batch_size=5, preprocess=preprocess))
    batches = [next(whole) for _ in range(12)]
    start_step = StartStep()
    resumed = make(dataset, options, batch_size=5, preprocess=preprocess, start_step=start_step)
    for step in (0, 3, 4, 7, 11):
        start_step.step = step
        images, labels = next(iter(resumed))
        np.testing.assert_array_equal(labels, batches[step][1])
        np.testing.assert_array_equal(images, batches[step][0])


def test_both_backends_train_on_the_same_images(tmp_path):
    """In global order crops and mirrors are the same too; images of every kind that is read."""
    images = [image for image, image_format, _ in image_zoo().values() if image_format] + [
        jpeg(90, 70, seed=2)
    ] * 4
    build_index(
        write_tfrecord(
            tmp_path / "train", [{"image": image, "label": n} for n, image in enumerate(images)]
        )
    )
    dataset = DatasetSpec.from_files(tmp_path / "train")
    preprocess = dataclasses.replace(
        SMALL, image_size=(32, 24), crop=RandomResizedCrop(), mean=(0, 0, 0), std=(1, 1, 1)
    )
    made = [
        iter(make(dataset, options, batch_size=6, preprocess=preprocess))
        for options in BACKENDS.values()
    ]
    for _ in range(6):
        (dali_images, dali_labels), (tf_images, tf_labels) = (next(one) for one in made)
        np.testing.assert_array_equal(dali_labels, tf_labels)
        assert np.abs(dali_images - tf_images).max() < 0.02


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_records_left_out_are_never_served(tmp_path, options):
    examples = [{"image": jpeg(20, 20, seed=n), "label": n} for n in range(12)]
    for bad in (0, 5, 6, 11):
        examples[bad]["image"] = b"no image"
    build_index(
        write_tfrecord(tmp_path / "train", examples),
        Checks(verify="decode"),
        on_bad="skip",
        max_bad_fraction=0.9,
    )
    dataset = DatasetSpec.from_files(tmp_path / "train")
    for order in ("global", "sequential"):
        spec = {"order": order} if order == "global" else {"order": order, "repeat": False}
        labels = sorted(np.concatenate(labels_of(make(dataset, options, batch_size=4, **spec), 2)))
        assert labels == [1, 2, 3, 4, 7, 8, 9, 10]


def test_fragments_stay_together(dataset):
    served = np.concatenate(
        labels_of(make(dataset, TfDataOptions(), batch_size=4, shuffle_block_size=4), 6)
    )
    assert sorted(served) == list(range(24))
    neighbors = np.mean(np.diff(served) == 1)
    assert 0.4 < neighbors < 0.9


def test_refuses(dataset):
    with pytest.raises(InputError, match="`shuffle_block_size` must be at least 1, got 0"):
        make(dataset, TfDataOptions(), batch_size=4, shuffle_block_size=0)
    with pytest.raises(
        InputError, match="`shuffle_block_size` is for order 'global' only, got 2 with 'buffer'"
    ):
        make(dataset, TfDataOptions(), batch_size=4, order="buffer", shuffle_block_size=2)
    with pytest.raises(
        InputError, match="`repeat` False is for order 'sequential' only, got 'buffer'"
    ):
        make(dataset, TfDataOptions(), batch_size=4, order="buffer", repeat=False)
    with pytest.raises(
        InputError, match="Only order 'global' can start at a step, got step 3 with order 'buffer'"
    ):
        make(dataset, TfDataOptions(), batch_size=4, order="buffer", start_step=StartStep(3))
    with pytest.raises(InputError, match=r"`start_step` must be an int in \[0, .*\), got -1"):
        make(dataset, TfDataOptions(), batch_size=4, start_step=StartStep(-1))
    with pytest.raises(InputError, match="must be an int in"):
        make(dataset, TfDataOptions(), batch_size=24, start_step=StartStep(10**8))
    with pytest.raises(
        InputError,
        match="`batch_size` 5 in 5 shards is a step of 25 records, more than the 24 there are",
    ):
        make(dataset, TfDataOptions(), batch_size=5, shard=Shard(4, 5))


@pytest.mark.parametrize("text", [None, "", "0 10\n", "x y\n", "0 10 20"])
def test_an_index_that_changed_since(tmp_path, text):
    build_index(
        write_tfrecord(tmp_path / "train", [{"image": jpeg(8, 8), "label": n} for n in range(3)])
    )
    dataset = DatasetSpec.from_files(tmp_path / "train")
    (tmp_path / "train.idx").unlink()
    if text is not None:
        (tmp_path / "train.idx").write_text(text)
    with pytest.raises(
        InputError, match=r"train.idx changed since `DatasetSpec.from_files` read it"
    ):
        make(dataset, TfDataOptions(), batch_size=1)


def test_an_epoch_of_imagenet_is_planned_quickly():
    """1.28M records of 1024 files: the memory of a plan, by what it holds."""
    plan = Plan(Extents.of(index_of([1250] * 1024)), steps=EpochSteps(num_records=1_280_000, batch_size=32, num_shards=8, padded=False),
                shard=Shard(3, 8), seed=0)  # fmt: skip
    assert (
        sum(getattr(plan, name).nbytes for name in ("_files", "_offsets", "_sizes"))
        == 20 * 1_280_000
    )
    files, offsets, counts = plan.runs(2, 0)
    assert counts.sum() == 5000 * 32
    assert (offsets % 100 == 0).all()
    assert files.max() < 1024


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_two_replicas_share_each_step(dataset, options):
    spec = InputSpec(dataset=dataset, preprocess=SMALL, order="global", seed=9)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    train = distribute(spec, options, strategy=strategy, global_batch_size=8, start_step=2)
    assert train.steps_per_epoch == 3
    iterator = iter(train.dataset)
    for step in range(2, 7):
        labels = strategy.experimental_local_results(next(iterator)[1])
        order = shuffle(24, seed=9, epoch=step // 3)
        assert np.concatenate(labels).tolist() == order[step % 3 * 8 :][:8].tolist()
