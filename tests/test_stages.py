"""Pipelines that are cut after a stage: each does what the whole one does, up to there."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
from test_scripts import fails, run

from dali_tf_input import (
    DaliOptions,
    InputError,
    InputSpec,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
    Shard,
    TfDataOptions,
    dali_backend,
    tf_data_backend,
)
from dali_tf_input.example import decode_example
from dali_tf_input.manifest import read_index
from dali_tf_input.order import Position
from dali_tf_input.stages import STAGES
from dali_tf_input.tfrecord import read_record

OPTIONS = {"tf_data": TfDataOptions(), "dali": DaliOptions(device="cpu")}


def build(spec, options, until):
    with tf.device("CPU:0"):
        shared = {"batch_size": 6, "shard": Shard(0, 1), "position": Position(), "until": until}
        if isinstance(options, TfDataOptions):
            return tf_data_backend.build(spec, options, **shared)
        return dali_backend.build(spec, options, device_id=None, **shared)


def first(spec, options, until):
    batch = next(iter(build(spec, options, until)))
    return batch if until is None else tf.nest.flatten(batch)[0]  # DALI's dataset serves tuples only


@pytest.mark.parametrize("backend", OPTIONS)
@pytest.mark.parametrize("order", ["sequential", "buffer", "global"])
@pytest.mark.parametrize("until", STAGES)
def test_a_cut_serves_one_number_for_each_image(dataset, backend, order, until):
    spec = InputSpec(dataset=dataset, preprocess=Preprocess.for_training(16), order=order)
    if backend == "dali" and until == "read" and order != "global":
        with pytest.raises(InputError, match="DALI's own reader parses in the same step"):
            build(spec, OPTIONS[backend], until)
        return
    numbers = first(spec, OPTIONS[backend], until)
    assert (numbers.shape, numbers.dtype) == ((6,), tf.float32)
    assert len(set(numbers.numpy().tolist())) > 1


def test_what_is_read_and_parsed(dataset):
    """In the order of the files: the sizes of the records, and those of the images plus their labels."""
    spec = InputSpec(dataset=dataset, preprocess=Preprocess.for_training(16), order="sequential")
    records = [read_record(dataset.files[0], offset) for offset, _ in read_index(dataset.index_files[0])]
    found = first(spec, TfDataOptions(), "read").numpy()[: len(records)]
    assert found.tolist() == list(map(len, records))
    images = [decode_example(record)["image/encoded"][1][0] for record in records]
    for options in OPTIONS.values():
        found = first(spec, options, "parse").numpy()[: len(records)]
        assert found.tolist() == [len(image) + number for number, image in enumerate(images)]


@pytest.mark.parametrize("backend", OPTIONS)
@pytest.mark.parametrize("fuse", ["off", "decode"])
@pytest.mark.parametrize(
    ("crop", "antialias"), [(ResizeRandomCrop(resize=(20, 20)), True), (RandomResizedCrop(), False), (RandomCrop(), False)]
)
def test_the_last_cut_holds_the_corners_of_the_whole_pipelines_images(dataset, backend, fuse, crop, antialias):
    preprocess = Preprocess(image_size=(16, 16), crop=crop, mirror_probability=0.0, antialias=antialias)
    spec = InputSpec(dataset=dataset, preprocess=preprocess, order="global", seed=5)
    options = dataclasses.replace(OPTIONS[backend], fuse=fuse)
    images, _ = first(spec, options, None)
    np.testing.assert_array_equal(first(spec, options, "finish"), images[:, 0, 0, 0])
    resized = first(spec, options, "resize").numpy()  # before the mirror, which is off, and normalising
    np.testing.assert_allclose((resized - preprocess.mean[0]) / preprocess.std[0], images[:, 0, 0, 0], atol=1e-5)


def test_profile_stages(sample_folder, tmp_path):
    """The table, the plot, the sentence; the stages add up to the whole."""
    arguments = ["--files=data/sample/train-*", "--batch_size=16", "--image_size=32", "--seconds=0.1", "--repeats=1"]
    outputs = [f"--json={tmp_path}/stages.json", f"--plot={tmp_path}/stages.png"]
    process = run("profile_stages.py", *arguments, *outputs, cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    report = json.loads((tmp_path / "stages.json").read_text())
    assert list(report["stages"]["tf_data"]) == ["read", "parse", "decode", "resize", "finish", "batch"]
    for rows in report["stages"].values():
        whole = 1000 / rows["batch"]["images_per_second"]["median"]
        assert sum(row["seconds_per_1000_images"]["median"] for row in rows.values()) == pytest.approx(whole)
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert {row["setting"] for row in report["settings"]["dali_cpu"]} >= {"default", "fuse='off'", "tf_data", "dtype='uint8'"}
    assert "tf_data: decode costs most" in process.stdout or "tf_data: read costs most" in process.stdout
    assert "settings that were tried" in process.stdout
    assert (tmp_path / "stages.png").stat().st_size > 10_000
    arguments = [*arguments, "--backends=dali_cpu", "--order=buffer", "--nosettings"]
    process = run("profile_stages.py", *arguments, cwd=sample_folder)
    assert "read and parse" in process.stdout
    assert "tf_data" not in process.stdout
    fails(
        run("profile_stages.py", *arguments, "--backends=dali_gpu", cwd=sample_folder), "`backends` must be of tf_data, dali_cpu"
    )
