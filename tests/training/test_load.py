"""Strategies on two logical CPU devices: which records reach which replica, on which device, and
that `fit` trains.
"""

import contextlib
import gc
import itertools
import logging

import conftest
import numpy as np
import pytest
import tensorflow as tf
from commands import python
from conftest import DALI, TF_DATA, backends, refused, write_dataset, write_indexed
from conftest import spec_of as make_spec
from models import fit, make_model

from dali_tf_input import DaliOptions, Preprocess
from dali_tf_input.backends import dali as dali_backend
from dali_tf_input.backends.build import check_gpu
from dali_tf_input.training.load import enable_memory_growth, load


def none():
    return None


def one_device():
    return tf.distribute.OneDeviceStrategy("CPU:1")


def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


STRATEGIES = {none: ("CPU:0",), one_device: ("CPU:1",), mirrored: ("CPU:0", "CPU:1")}
strategies = pytest.mark.parametrize("make_strategy", STRATEGIES, ids=lambda make: make.__name__)


def spec_of(dataset, order="sequential"):
    return make_spec(dataset, order, Preprocess.for_training(24), buffer_size=8)


def per_replica(strategy, values):
    return strategy.experimental_local_results(values) if strategy else (values,)


def labels_by_replica(fed, strategy, steps):
    """Returns, for each replica, the labels of each step."""
    iterator = iter(fed.dataset.repeat())
    batches = [per_replica(strategy, next(iterator)[1]) for _ in range(steps)]
    return [[one.numpy().tolist() for one in batch] for batch in zip(*batches, strict=True)]


def records_by_replica(fed, strategy, steps):
    """Returns, for each replica, the labels of all steps."""
    return [list(itertools.chain(*one)) for one in labels_by_replica(fed, strategy, steps)]


@backends
@strategies
def test_each_batch_is_on_its_replicas_device(dataset, options, make_strategy):
    strategy = make_strategy()
    fed = load(spec_of(dataset), options, strategy=strategy, batch_size=6)
    assert fed.devices == STRATEGIES[make_strategy]
    images, labels = next(iter(fed.dataset))
    for values in (images, labels):
        for value, device in zip(per_replica(strategy, values), fed.devices, strict=True):
            assert value.device.endswith(device)
            assert value.shape[0] == 6 // len(fed.devices)


@backends
@strategies
def test_an_epoch_is_every_record_once(dataset, options, make_strategy):
    """24 records in steps of 8: each once, each replica its own shard."""
    strategy = make_strategy()
    fed = load(spec_of(dataset), options, strategy=strategy, batch_size=8)
    assert fed.steps_per_epoch == 3
    share = 24 // len(fed.devices)
    expected = [list(range(share * i, share * (i + 1))) for i in range(len(fed.devices))]
    assert records_by_replica(fed, strategy, 3) == expected


@backends
def test_shuffled_replicas_stay_disjoint(dataset, options):
    strategy = mirrored()
    fed = load(spec_of(dataset, "buffer"), options, strategy=strategy, batch_size=8)
    by_replica = list(map(set, records_by_replica(fed, strategy, 12)))
    assert by_replica == [set(range(12)), set(range(12, 24))]


@backends
def test_the_remainder_is_not_lost(tmp_path, options):
    """11 records, steps of 4: the second pass goes on where the first stopped."""
    strategy = mirrored()
    spec = spec_of(write_dataset(tmp_path, [4, 7]))
    fed = load(spec, options, strategy=strategy, batch_size=4)
    assert fed.steps_per_epoch == 2
    expected = [[[0, 1], [2, 3], [4, 0]], [[5, 6], [7, 8], [9, 10]]]
    assert labels_by_replica(fed, strategy, 3) == expected


@pytest.mark.slow
@backends
@strategies
def test_iterators_come_and_go(dataset, options, make_strategy):
    """TensorFlow's MultiDeviceIterator over a DALIDataset ends the process when dropped."""
    strategy = make_strategy()
    for _ in range(3):
        fed = load(spec_of(dataset, "buffer"), options, strategy=strategy, batch_size=6)
        for _ in range(3):
            iterator = iter(fed.dataset)
            next(iterator)
            del iterator
            gc.collect()


@pytest.mark.slow
@backends
@strategies
def test_fit_learns(dataset, options, make_strategy):
    """Keras `fit`, validated by the other backend: the loss on 24 labels falls."""
    strategy = make_strategy()
    train = load(spec_of(dataset, "buffer"), options, strategy=strategy, batch_size=8)
    evaluation = make_spec(dataset, "sequential", Preprocess.for_evaluation(24))
    other = TF_DATA if options == DALI else DALI
    validation = load(evaluation, other, strategy=strategy, batch_size=12)
    adam = {"class_name": "adam", "config": {"learning_rate": 3e-3}}  # made in the scope
    model = make_model(24, 24, strategy=strategy, optimizer=adam)
    history = fit(
        model,
        train,
        epochs=12,
        validation_data=validation.dataset,
        validation_steps=validation.steps_per_epoch,
    )
    assert history.history["loss"][-1] < 0.7 * history.history["loss"][0]
    assert len(history.history["val_loss"]) == 12


@backends
def test_a_custom_loop_trains(dataset, options):
    strategy = mirrored()
    fed = load(spec_of(dataset), options, strategy=strategy, batch_size=8)

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
    fed = load(spec_of(dataset), strategy=tf.distribute.get_strategy(), batch_size=6)
    assert isinstance(fed.dataset, tf.data.Dataset)
    assert fed.devices == ("CPU:0",)


def test_no_options_chooses_and_says_so(dataset, caplog):
    with caplog.at_level(logging.INFO, "dali_tf_input"):
        fed = load(spec_of(dataset), batch_size=6)
    assert fed.options == TF_DATA
    assert "options=None: TensorFlow sees no GPU, so TfDataOptions(" in caplog.text


@backends
def test_distribute_refuses(dataset, options):
    spec, strategy = spec_of(dataset), mirrored()
    for batch_size, message in (
        (7, "multiple of the 2 replicas, got 7: use 6 or 8"),
        (26, "at most the number of records, 24, got 26"),
        (0, "must be at least 1, got 0"),
    ):
        with refused(message):
            load(spec, options, strategy=strategy, batch_size=batch_size)
    unsupported = tf.distribute.experimental.CentralStorageStrategy()
    with refused(
        "must be None, .* MirroredStrategy .several GPUs. .*, got a CentralStorageStrategy"
    ):
        load(spec, options, strategy=unsupported, batch_size=6)


def test_an_empty_shard(tmp_path):
    """Refused as a batch larger than the data, before a replica waits for nothing."""
    spec = spec_of(write_dataset(tmp_path, [1]))
    with refused("at most the number of records, 1, got 2"):
        load(spec, TF_DATA, strategy=mirrored(), batch_size=2)


@strategies
def test_a_gpu_where_there_is_none(dataset, make_strategy):
    spec, gpu = spec_of(dataset), DaliOptions(device="gpu")
    with refused(r"every replica on a GPU, but the replicas are on CPU:.*pip install .tensorflow"):
        load(spec, gpu, strategy=make_strategy(), batch_size=6)


@backends
def test_a_first_batch_that_cannot_be_made(tmp_path, options):
    """Garbage instead of an image: a Python error that names the record, not an aborted process."""
    examples = conftest.numbered_examples(6)
    examples[1]["image/encoded"] = b"this is no image"
    spec = spec_of(write_indexed(tmp_path / "train", examples))
    with refused(r"train: record 1, byte \d+: text: .*-m dali_tf_input.index "):
        load(spec, options, batch_size=4)


def test_memory_growth():
    assert enable_memory_growth() == len(tf.config.list_physical_devices("GPU"))


@pytest.mark.parametrize(
    ("growth", "force", "message"),
    [
        (True, None, None),
        (False, None, "unless its memory growth is on, .*: call dali_tf_input.enable_memory"),
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
    with refused(message) if message else contextlib.nullcontext():
        check_gpu(0)


@pytest.mark.slow
def test_tf_data_needs_no_dali(dataset):
    """Who trains by tf.data never waits for DALI, nor needs it."""
    code = f"""if True:
        import sys
        sys.modules["nvidia.dali"] = None  # any import of it fails
        from dali_tf_input import Records, InputSpec, Preprocess, TfDataOptions
        from dali_tf_input.training.load import load
        records = Records.from_files({list(dataset.paths)!r})
        spec = InputSpec(records=records, preprocess=Preprocess.for_training(24), order="buffer")
        print(load(spec, TfDataOptions(), batch_size=8).steps_per_epoch)
    """
    process = python("-c", code)
    assert process.stdout.strip() == "3", process.stderr
