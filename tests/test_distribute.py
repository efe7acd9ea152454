"""Strategies on two logical CPU devices: which records reach which replica, on which device, and
that `fit` trains.
"""

import contextlib
import gc
import itertools
import logging
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import numbered_examples, write_dataset, write_tfrecord

from dali_tf_input import (
    DaliOptions,
    DatasetSpec,
    InputError,
    InputSpec,
    Preprocess,
    TfDataOptions,
    build_index,
)
from dali_tf_input.backends import dali as dali_backend
from dali_tf_input.dataset import check_gpu
from dali_tf_input.distribution import Distributed, distribute, enable_memory_growth

BACKENDS = {"dali": DaliOptions(device="cpu"), "tf_data": TfDataOptions()}
backends = pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)


def none():
    return None


def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:1")


def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


STRATEGIES = {none: ("CPU:0",), one_device: ("CPU:1",), mirrored: ("CPU:0", "CPU:1")}
strategies = pytest.mark.parametrize(
    "make_strategy", STRATEGIES, ids=lambda function: function.__name__
)


def spec_of(dataset, *, order="sequential", size=24):
    return InputSpec(
        dataset=dataset, preprocess=Preprocess.for_training(size), order=order, buffer_size=8
    )


def labels_by_replica(fed: Distributed, strategy, steps):
    """Returns, for each replica, the labels of each step."""
    iterator = iter(fed.dataset)
    batches = [next(iterator)[1] for _ in range(steps)]
    locally = [
        strategy.experimental_local_results(batch) if strategy else (batch,) for batch in batches
    ]
    return [
        [batch[replica].numpy().tolist() for batch in locally]
        for replica in range(len(fed.devices))
    ]


@backends
@strategies
def test_each_batch_is_on_its_replicas_device(dataset, options, make_strategy):
    strategy = make_strategy()
    fed = distribute(spec_of(dataset), options, strategy=strategy, global_batch_size=6)
    assert fed.devices == STRATEGIES[make_strategy]
    images, labels = next(iter(fed.dataset))
    for values in (images, labels):
        for value, device in zip(
            strategy.experimental_local_results(values) if strategy else (values,),
            fed.devices,
            strict=True,
        ):
            assert value.device.endswith(device)
            assert value.shape[0] == 6 // len(fed.devices)


@backends
@strategies
def test_an_epoch_is_every_record_once(dataset, options, make_strategy):
    """24 records in steps of 8: three steps, over all replicas each record once, each replica its
    own shard.
    """
    strategy = make_strategy()
    fed = distribute(spec_of(dataset), options, strategy=strategy, global_batch_size=8)
    assert fed.steps_per_epoch == 3
    by_replica = [
        list(itertools.chain(*batches)) for batches in labels_by_replica(fed, strategy, 3)
    ]
    share = 24 // len(fed.devices)
    assert by_replica == [list(range(share * i, share * (i + 1))) for i in range(len(fed.devices))]


@backends
def test_shuffled_replicas_stay_disjoint(dataset, options):
    strategy = mirrored()
    fed = distribute(
        spec_of(dataset, order="buffer"), options, strategy=strategy, global_batch_size=8
    )
    by_replica = [
        set(itertools.chain(*batches)) for batches in labels_by_replica(fed, strategy, 12)
    ]
    assert by_replica == [set(range(12)), set(range(12, 24))]


@backends
def test_the_remainder_is_not_lost(tmp_path, options):
    """11 records, 2 replicas, steps of 4: two whole steps an epoch; the second pass goes on where
    the first stopped.
    """
    strategy = mirrored()
    fed = distribute(
        spec_of(write_dataset(tmp_path, [4, 7])), options, strategy=strategy, global_batch_size=4
    )
    assert fed.steps_per_epoch == 2
    assert labels_by_replica(fed, strategy, 3) == [
        [[0, 1], [2, 3], [4, 0]],
        [[5, 6], [7, 8], [9, 10]],
    ]


@pytest.mark.slow
@backends
@strategies
def test_iterators_come_and_go(dataset, options, make_strategy):
    """TensorFlow's MultiDeviceIterator over a DALIDataset ends the process when it is dropped; ours
    must not use it.
    """
    strategy = make_strategy()
    for _ in range(3):
        fed = distribute(
            spec_of(dataset, order="buffer"), options, strategy=strategy, global_batch_size=6
        )
        for _ in range(3):
            iterator = iter(fed.dataset)
            next(iterator)
            del iterator
            gc.collect()


@pytest.mark.slow
@backends
@strategies
def test_fit_learns(dataset, options, make_strategy):
    """Keras `fit` with validation from the other backend: the loss of a linear model on 24 labels
    falls.
    """
    strategy = make_strategy()
    train = distribute(
        spec_of(dataset, order="buffer"), options, strategy=strategy, global_batch_size=8
    )
    evaluation = InputSpec(
        dataset=dataset, preprocess=Preprocess.for_evaluation(24), order="sequential"
    )
    other = TfDataOptions() if isinstance(options, DaliOptions) else DaliOptions(device="cpu")
    validation = distribute(evaluation, other, strategy=strategy, global_batch_size=12)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [keras.layers.Input((24, 24, 3)), keras.layers.Flatten(), keras.layers.Dense(24)]
        )
        model.compile(
            keras.optimizers.Adam(3e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(
        train.dataset,
        steps_per_epoch=train.steps_per_epoch,
        validation_data=validation.dataset,
        validation_steps=validation.steps_per_epoch,
        epochs=12,
        shuffle=False,
        verbose=0,
    ).history
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert len(history["val_loss"]) == 12


@backends
def test_a_custom_loop_trains(dataset, options):
    strategy = mirrored()
    fed = distribute(spec_of(dataset), options, strategy=strategy, global_batch_size=8)

    @tf.function
    def step(iterator):
        def mean(images, labels):
            return tf.reduce_mean(images), tf.reduce_sum(labels)

        means, sums = strategy.run(mean, args=next(iterator))
        return strategy.reduce("MEAN", means, axis=None), strategy.reduce("SUM", sums, axis=None)

    iterator = iter(fed.dataset)
    results = [step(iterator) for _ in range(fed.steps_per_epoch)]
    assert sum(int(labels) for _, labels in results) == sum(range(24))
    assert all(np.isfinite(float(mean)) for mean, _ in results)


def test_the_default_strategy_is_none(dataset):
    fed = distribute(spec_of(dataset), strategy=tf.distribute.get_strategy(), global_batch_size=6)
    assert isinstance(fed.dataset, tf.data.Dataset)
    assert fed.devices == ("CPU:0",)


def test_no_options_chooses_and_says_so(dataset, caplog):
    with caplog.at_level(logging.INFO, "dali_tf_input"):
        fed = distribute(spec_of(dataset), global_batch_size=6)
    assert fed.options == TfDataOptions()
    assert "options=None: TensorFlow sees no GPU, so TfDataOptions(" in caplog.text


@backends
def test_distribute_refuses(dataset, options):
    spec, strategy = spec_of(dataset), mirrored()
    for global_batch_size, message in (
        (7, "multiple of the 2 replicas, got 7: use 6 or 8"),
        (26, "at most the number of records, 24, got 26"),
        (0, "must be at least 1, got 0"),
    ):
        with pytest.raises(InputError, match=message):
            distribute(spec, options, strategy=strategy, global_batch_size=global_batch_size)
    unsupported = tf.distribute.experimental.CentralStorageStrategy()
    with pytest.raises(
        InputError,
        match=(
            r"must be None, .*, got a CentralStorageStrategy.*: for several GPUs of one host use"
            r" Mirrored"
        ),
    ):
        distribute(spec, options, strategy=unsupported, global_batch_size=6)


def test_an_empty_shard(tmp_path):
    """One record for two replicas: refused as a batch larger than the data, before a replica could
    wait for nothing.
    """
    dataset = write_dataset(tmp_path, [1])
    with pytest.raises(InputError, match="at most the number of records, 1, got 2"):
        distribute(spec_of(dataset), TfDataOptions(), strategy=mirrored(), global_batch_size=2)


@strategies
def test_a_gpu_where_there_is_none(dataset, make_strategy):
    with pytest.raises(
        InputError,
        match=(
            r"needs every replica on a GPU, but the replicas are on CPU:.*pip install .tensorflow"
        ),
    ):
        distribute(
            spec_of(dataset),
            DaliOptions(device="gpu"),
            strategy=make_strategy(),
            global_batch_size=6,
        )


@backends
def test_a_first_batch_that_cannot_be_made(tmp_path, options):
    """Garbage instead of an image: a Python error that names the record, not an aborted process."""
    examples = numbered_examples(6)
    examples[1]["image/encoded"] = b"this is no image"
    file = write_tfrecord(tmp_path / "train", examples)
    build_index(file)
    with pytest.raises(
        InputError, match=r"train: record 1, byte \d+: text: .*-m dali_tf_input.index "
    ):
        distribute(spec_of(DatasetSpec.from_files(file)), options, global_batch_size=4)


def test_memory_growth():
    assert enable_memory_growth() == len(tf.config.list_physical_devices("GPU"))


@pytest.mark.parametrize(
    ("growth", "force", "message"),
    [
        (True, None, None),
        (
            False,
            None,
            (
                r"unless its memory growth is on, and leaves none for DALI: call"
                r" dali_tf_input.enable_memory"
            ),
        ),
        (True, "false", "TF_FORCE_GPU_ALLOW_GROWTH=false makes TensorFlow take all memory"),
    ],
)
def test_a_gpu_whose_memory_tensorflow_takes(monkeypatch, growth, force, message):
    """With a GPU made up; DALI would end the process where no memory is left."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["one"])
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: growth)
    monkeypatch.setattr(dali_backend, "count_gpus", lambda: 1)
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    if force:
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", force)
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        check_gpu(0)


@pytest.mark.slow
def test_tf_data_needs_no_dali(dataset):
    """Who trains by tf.data never waits for DALI, nor needs it."""
    code = f"""if True:
        import sys
        sys.modules["nvidia.dali"] = None  # any import of it fails
        from dali_tf_input import DatasetSpec, InputSpec, Preprocess, TfDataOptions
        from dali_tf_input.distribution import distribute
        spec = InputSpec(
            dataset=DatasetSpec.from_files({list(dataset.files)!r}), preprocess=Preprocess.for_training(24), order="buffer"
        )
        print(distribute(spec, TfDataOptions(), global_batch_size=8).steps_per_epoch)
    """
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert process.stdout.strip() == "3"
