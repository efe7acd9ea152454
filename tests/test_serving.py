"""Prediction and serving: the pixels that the model was evaluated with, whatever feeds it."""

import dataclasses
import re

import conftest
import keras
import numpy as np
import nvidia.dali as dali
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, image_zoo, jpeg, refused, spec_of, take, write_indexed
from models import make_model

from dali_tf_input import DaliOptions, Preprocess
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.serving import export_saved_model, export_triton, iterate_batches

EVALUATION = Preprocess.for_evaluation(16)
OPTIONS = {"dali": DALI, "tf_data": TF_DATA, "none": None}
backends = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Ten encoded images, and what a dataset makes of them in evaluation."""
    examples = conftest.numbered_examples(10)
    dataset = write_indexed(tmp_path_factory.mktemp("predict") / "train", examples)
    spec = spec_of(dataset, "sequential", EVALUATION)
    images, _ = take(make_dataset(spec, TF_DATA, batch_size=10), 1)
    return [example["image/encoded"] for example in examples], images


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    return make_model(16, 4, keras.layers.GlobalAveragePooling2D())


@backends
def test_the_pixels_of_evaluation(evaluated, options):
    encoded, expected = evaluated
    batches = list(iterate_batches(encoded, EVALUATION, options, batch_size=4))
    assert [positions for positions, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    images = np.concatenate([images.numpy() for _, images in batches])
    np.testing.assert_allclose(images, expected, atol=1e-3)


@backends
def test_an_unreadable_image_is_reported_and_not_fatal(tmp_path, options):
    zoo = image_zoo()
    images = [encoded for encoded, _, _ in zoo.values()]
    for position, image in enumerate(images[:2]):
        (tmp_path / f"{position}.jpg").write_bytes(image)
        images[position] = tmp_path / f"{position}.jpg"
    images.append(tmp_path / "missing.jpg")
    bad = {}
    arguments = {"batch_size": 3, "on_bad": bad.__setitem__}
    batches = list(iterate_batches(images, EVALUATION, options, **arguments))
    sound = [number for number, (_, image_format, _) in enumerate(zoo.values()) if image_format]
    assert [position for positions, _ in batches for position in positions] == sound
    assert sorted(bad) == [number for number in range(len(images)) if number not in sound]
    assert "No such file" in bad[len(images) - 1]


def test_a_saved_model_takes_bytes(evaluated, model, tmp_path):
    """Bytes in, the logits that the model gives for the evaluation's pixels out."""
    encoded, images = evaluated
    export_saved_model(model, EVALUATION, tmp_path / "saved")
    served = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"]
    (logits,) = served(encoded=tf.constant(encoded)).values()
    np.testing.assert_allclose(logits.numpy(), model(images).numpy(), atol=1e-4)
    # It loads where this package is not installed: its graph has none of the compiled operations.
    assert b"DaliTfInput" not in (tmp_path / "saved" / "saved_model.pb").read_bytes()


@pytest.mark.parametrize(
    ("dtype", "layout"), [("float32", "HWC"), ("float16", "CHW"), ("uint8", "HWC")]
)
def test_triton(evaluated, tmp_path, dtype, layout):
    """The serialized pipeline, taken up again as Triton does, makes the same pixels; the config
    names its input and shape.
    """
    encoded, _ = evaluated
    preprocess = dataclasses.replace(EVALUATION, dtype=dtype, layout=layout)
    export_triton(preprocess, tmp_path / "preprocess", device="cpu", max_batch_size=16)
    config = (tmp_path / "preprocess" / "config.pbtxt").read_text()
    kind = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "uint8": "TYPE_UINT8"}[dtype]
    assert f"data_type: {kind}, dims: {list(preprocess.image_shape)}" in config
    assert 'name: "preprocess"\nbackend: "dali"\nmax_batch_size: 16\n' in config
    pipeline = dali.Pipeline.deserialize(filename=str(tmp_path / "preprocess" / "1" / "model.dali"))
    pipeline.build()
    pipeline.feed_input("encoded", [np.frombuffer(image, np.uint8) for image in encoded])
    (images,) = pipeline.run()
    ((_, expected),) = iterate_batches(encoded, preprocess, TF_DATA)
    made, atol = images.as_array().astype(float), 1 if dtype == "uint8" else 2e-3
    np.testing.assert_allclose(made, expected.numpy().astype(float), atol=atol)
    with refused("preprocess exists already"):
        export_triton(preprocess, tmp_path / "preprocess")


def test_refuses(model, tmp_path):
    training = Preprocess.for_training(16)
    for make in (
        lambda: list(iterate_batches([b"x"], training)),
        lambda: export_saved_model(model, training, tmp_path / "x"),
        lambda: export_triton(training, tmp_path / "x"),
    ):
        with refused("`preprocess` must not be random"):
            make()
    with refused(r"`dtype` must be one of .*, got 'bfloat16'"):
        export_triton(dataclasses.replace(EVALUATION, dtype="bfloat16"), tmp_path / "x")
    brain = dataclasses.replace(EVALUATION, dtype="bfloat16")
    with refused("DALI does not support `dtype` 'bfloat16'"):
        list(iterate_batches([jpeg(9, 9)], brain, DALI))
    with refused("needs GPU 0, but TensorFlow sees 0 GPUs"):
        list(iterate_batches([jpeg(9, 9)], EVALUATION, DaliOptions(device="gpu")))
    assert not (tmp_path / "x").exists()


def test_triton_for_a_gpu_takes_a_gpu(tmp_path):
    with refused("A pipeline for a GPU needs a machine with a GPU; or pass device='cpu'"):
        export_triton(EVALUATION, tmp_path / "preprocess")
    assert list(tmp_path.iterdir()) == []


def test_a_served_model_is_not_replaced(model, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/mine").write_text("mine")
    with refused(f"{tmp_path}/saved exists already: name a new folder"):
        export_saved_model(model, EVALUATION, tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "saved"]
    with refused("`folder` must be a local path, got gs://bucket/model: name one, and copy"):
        export_saved_model(model, EVALUATION, "gs://bucket/model")


def test_images_are_not_skipped_without_a_word(caplog, tmp_path):
    """Without `on_bad` a warning names each."""
    images = [tmp_path / "none.jpg", b"text", jpeg(9, 9)]
    (batch,) = iterate_batches(images, EVALUATION)
    assert batch[0] == [2]
    first, second = (record.message for record in caplog.records)
    assert re.search(f"{tmp_path}/none.jpg is skipped: .*No such file", first)
    assert second.startswith("image 1 is skipped: text: expected an encoded image")
