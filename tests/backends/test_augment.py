"""TrivialAugment and RandAugment on both backends; Mixup and CutMix in the training step."""

import dataclasses
import warnings

import numpy as np
import pytest
import tensorflow as tf
from conftest import BACKENDS, DALI, backends, jpeg, refused, spec_of, write_indexed
from conftest import take as take_batches

from dali_tf_input import Preprocess
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.backends.tf_augment import make_augmentation
from dali_tf_input.serving import iterate_batches
from dali_tf_input.spec.crops import NoCrop

SIZE = (96, 80)
PLAIN = Preprocess(image_size=SIZE, crop=NoCrop(), mirror_probability=0, dtype="uint8")
kinds = pytest.mark.parametrize("kind", ["trivial", "rand"])


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One image, 16 times: whatever differs between two that come out is augmentation."""
    examples = [{"image": jpeg(*SIZE, seed=5), "label": 0}] * 16
    return write_indexed(tmp_path_factory.mktemp("augment") / "train", examples)


def take(records, options, count, *, seed=0, endless=False, **changes):
    preprocess = dataclasses.replace(PLAIN, **changes)
    spec = spec_of(records, "sequential", preprocess, seed=seed)
    dataset = make_dataset(spec, options, batch_size=16, endless=endless)
    return take_batches(dataset, count // 16)[0]


@pytest.mark.slow
@kinds
@backends
def test_augments(records, options, kind):
    (original,) = take(records, options, 16)[:1]
    gray = take(records, options, 16, auto_augment=kind, channels=1, mean=(0,), std=(1,))
    assert gray.shape == (16, *SIZE, 1)
    made = take(records, options, 128, auto_augment=kind)
    assert made.shape == (128, *SIZE, 3)
    assert made.dtype == np.uint8
    assert len({image.tobytes() for image in made}) > 40
    unchanged = np.mean([(image == original).all() for image in made])
    assert unchanged < 0.2  # one of 14 operations is none, and some do little
    first, second = (take(records, options, 32, endless=True, auto_augment=kind) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (first[:16] != take(records, options, 16, auto_augment=kind, seed=1)).any()


@pytest.mark.slow
@kinds
def test_both_backends_augment_alike(records, kind):
    """Not the same pixels, but the same kinds of change as often and as strong."""
    shares = []
    for options in BACKENDS.values():
        original = take(records, options, 16)[0].astype(np.float32)
        made = take(records, options, 960, endless=True, auto_augment=kind).astype(np.float32)
        change = np.abs(made - original).mean((1, 2, 3))
        gray = (np.abs(made - 128).max(3) == 0).mean((1, 2))  # what a warp leaves empty
        levels = np.array([len(np.unique(image)) for image in made])
        shares.append(
            [
                (change < 0.5).mean(),  # left alone
                (change > 30).mean(),  # changed a great deal
                (gray > 0.02).mean(),  # moved, turned or sheared
                (levels < 65).mean(),  # posterised
                (np.abs(made.mean((1, 2, 3)) - original.mean()) > 10).mean(),  # brighter or darker
            ]
        )
    np.testing.assert_allclose(*shares, atol=0.09)


@kinds
def test_every_operation_of_keras(kind):
    """An image that is gray throughout stays of one color in each: warps fill with that gray, and
    the rest acts on colors.
    """
    augment = tf.function(make_augmentation(dataclasses.replace(PLAIN, auto_augment=kind)))
    ramp = np.linspace(20, 235, SIZE[0]).astype(np.uint8)
    image = np.tile(ramp[:, None, None], (1, SIZE[1], 3))
    image[..., 1] //= 2
    made = [augment(image, tf.constant([3, number], tf.int64)).numpy() for number in range(200)]
    np.testing.assert_array_equal(made[7], augment(image, tf.constant([3, 7], tf.int64)).numpy())
    kinds = {one.tobytes() for one in made}
    assert len(kinds) > (90 if kind == "trivial" else 60)
    flat = np.full_like(image, 128)
    # Of two operations the second may fill with another gray.
    for number in range(200 if kind == "trivial" else 0):
        one = augment(flat, tf.constant([3, number], tf.int64)).numpy()
        assert np.ptp(one, axis=(0, 1)).max() <= 1
    for one in made:
        assert one.shape == image.shape
        assert one.dtype == np.uint8


SLOW = [
    pytest.param(one, marks=pytest.mark.slow) for one in ({"dtype": "float32"}, {"layout": "CHW"})
]


@backends
@pytest.mark.parametrize("changes", [*SLOW, {"dtype": "float16", "layout": "CHW"}])
def test_types_and_layouts(records, options, changes):
    made = take(records, options, 16, auto_augment="trivial", **changes)
    assert made.shape == (16, *dataclasses.replace(PLAIN, **changes).image_shape)


def test_quiet(records, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(records, DALI, 16, auto_augment="rand")
    assert "deprecated" not in capfd.readouterr().err


def test_refuses():
    with refused("`auto_augment` must be one of 'trivial', 'rand' or None, got 'auto'"):
        dataclasses.replace(PLAIN, auto_augment="auto")
    with refused("must not be random"):
        next(iterate_batches([], dataclasses.replace(PLAIN, auto_augment="rand")))
