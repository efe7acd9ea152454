"""What only a machine with an NVIDIA GPU can show: `make test-gpu`."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from dali_tf_input import DaliOptions, InputSpec, Preprocess, dali_backend
from dali_tf_input.dataset import choose_options
from dali_tf_input.distribute import distribute, enable_memory_growth

pytestmark = pytest.mark.gpu

GPU = DaliOptions(device="gpu")


@pytest.fixture(scope="module", autouse=True)
def memory_growth():
    assert enable_memory_growth() > 0, "TensorFlow sees no GPU: make install GPU=1"


def evaluation(dataset, **changes):
    preprocess = dataclasses.replace(Preprocess.for_evaluation(32), **changes)
    return InputSpec(dataset=dataset, preprocess=preprocess, order="sequential")


def test_dali_and_tensorflow_see_the_same_gpus():
    assert dali_backend.count_gpus() == len(tf.config.list_physical_devices("GPU"))
    assert choose_options() == GPU


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_gpu_pixels_are_near_the_cpus(dataset, layout):
    """nvJPEG and libjpeg-turbo upsample chroma differently, so the bound is on the mean."""
    images = []
    for options in (GPU, DaliOptions(device="cpu")):
        fed = distribute(evaluation(dataset, layout=layout, std=(1.0, 1.0, 1.0)), options, global_batch_size=24)
        batch, labels = next(iter(fed.dataset))
        assert labels.numpy().tolist() == list(range(24))
        images.append(batch.numpy())
    assert np.abs(images[0] - images[1]).mean() < 3  # of 255


@pytest.mark.parametrize(
    "make_strategy",
    [
        lambda: None,
        lambda: tf.distribute.OneDeviceStrategy("GPU:0"),
        lambda: tf.distribute.MirroredStrategy(["GPU:0"]),
        lambda: tf.distribute.MirroredStrategy(),
    ],
    ids=["none", "one_device", "mirrored_one", "mirrored_all"],
)
def test_batches_are_on_the_gpu(dataset, make_strategy):
    strategy = make_strategy()
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    fed = distribute(evaluation(dataset), GPU, strategy=strategy, global_batch_size=2 * num_replicas)
    assert fed.devices == tuple(f"GPU:{replica}" for replica in range(num_replicas))
    for _ in range(3):
        iterator = iter(fed.dataset)
        for _ in range(4):
            images, labels = next(iterator)
        local = strategy.experimental_local_results if strategy else lambda value: (value,)
        assert all("GPU" in value.device for value in (*local(images), *local(labels)))
