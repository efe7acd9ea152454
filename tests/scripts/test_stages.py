"""Pipelines that are cut after a stage: each does what the whole one does, up to there."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
from conftest import BACKENDS, DALI, TF_DATA, at_night, numbered_examples, refused, write_indexed

import dali_tf_input as dti
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.tfrecord import read_record
from support.throughput import stages
from support.throughput.stages import STAGES, TF_DATA_STAGES


def build(spec, options, stage):
    with tf.device("CPU:0"):
        if stage is None:
            return dti.make_dataset(spec, options, batch_size=6)
        return stages.make_dataset(stage, spec, options, batch_size=6)


def first(spec, options, stage):
    batch = next(iter(build(spec, options, stage)))
    return batch if stage is None else tf.nest.flatten(batch)[0]  # DALI serves tuples only


ORDERS = ("sequential", "buffer", "global")
CUTS = [("tf_data", stage) for stage in TF_DATA_STAGES] + [("dali", stage) for stage in STAGES]
ALL = [(order, *cut) for order in ORDERS for cut in CUTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "backend", "stage"), at_night([("buffer", "dali", "decode")], ALL)
)
def test_a_cut_serves_one_number_for_each_image(dataset, order, backend, stage):
    spec = dti.InputSpec(records=dataset, preprocess=dti.Preprocess.for_training(16), order=order)
    numbers = first(spec, BACKENDS[backend], stage)
    assert (numbers.shape, numbers.dtype) == ((6,), tf.float32)
    assert len(set(numbers.numpy().tolist())) > 1


def test_dalis_own_reader_has_no_read_stage(tmp_path):
    """It reads on a GPU, in order "buffer"."""
    records = write_indexed(tmp_path / "train", numbered_examples(4), dti.Checks(verify="schema"))
    spec = dti.InputSpec.for_training(records, 16, order="buffer")
    with refused("DALI's own reader reads and parses"):
        build(spec, dti.DaliOptions(device="gpu"), "read")


def test_what_is_read_and_parsed(dataset):
    """In the order of the files: the sizes of the records, and those of the images plus their
    labels.
    """
    spec = dti.InputSpec(
        records=dataset, preprocess=dti.Preprocess.for_training(16), order="sequential"
    )
    offsets = dataset.index(0)[:, 0].tolist()
    records = [read_record(dataset.paths[0], offset) for offset in offsets]
    found = first(spec, TF_DATA, "read").numpy()[: len(records)]
    assert found.tolist() == list(map(len, records))
    images = [decode_example(record)["image/encoded"][1][0] for record in records]
    for options in BACKENDS.values():
        found = first(spec, options, "parse").numpy()[: len(records)]
        assert found.tolist() == [len(image) + label for label, image in enumerate(images)]


RESIZED = dti.ResizeRandomCrop(resize=(20, 20))
CROPS = (RESIZED, dti.RandomResizedCrop(), dti.RandomCrop())
VIEWS = [("full", CROPS[1])], [*itertools.product(("full", "region"), CROPS)]


@pytest.mark.slow
@pytest.mark.parametrize(("decode", "crop"), at_night(*VIEWS))
def test_the_last_cut_holds_the_corners_of_the_whole_pipelines_images(dataset, decode, crop):
    preprocess = dti.Preprocess(
        image_size=(16, 16), crop=crop, mirror_probability=0.0, antialias=crop is RESIZED
    )
    spec = dti.InputSpec(records=dataset, preprocess=preprocess, order="global", seed=5)
    options = dataclasses.replace(DALI, decode=decode)
    images, _ = first(spec, options, None)
    np.testing.assert_array_equal(first(spec, options, "normalize"), images[:, 0, 0, 0])
    # Before the mirror, which is off, and normalizing.
    resized = first(spec, options, "resize").numpy()
    normalized = (resized - preprocess.mean[0]) / preprocess.std[0]
    np.testing.assert_allclose(normalized, images[:, 0, 0, 0], atol=1e-5)
