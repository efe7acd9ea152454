"""Pipelines that are cut after a stage: each does what the whole one does, up to there."""

import dataclasses
import json
import re
import types

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


def test_what_a_stage_costs():
    """What its cut takes more than the one before in the same round; where that is less, nothing, and no other gets its share."""
    import profile_stages

    def windows(*seconds):  # of 1000 images each
        return [{"measured_batches": 10, "batch_size": 100, "seconds": each, "cpu_seconds": 2 * each} for each in seconds]

    made = {"read": windows(1, 2, 1), "decode": windows(3, 3, 5), "resize": windows(2.9, 3, 5), "batch": windows(4, 4, 5)}
    rows = profile_stages.summarise(made)
    costs = {stage: row["seconds_per_1000_images"]["median"] for stage, row in rows.items()}
    assert costs == pytest.approx({"read": 1, "decode": 2, "resize": 0, "batch": 1})
    assert rows["resize"]["seconds_per_1000_images"]["minimum"] == pytest.approx(-0.1)
    assert rows["decode"]["cpu_seconds_per_1000_images"] == pytest.approx({"median": 4, "minimum": 2, "maximum": 8})
    assert {stage: row["share"] for stage, row in rows.items()} == pytest.approx(
        {"read": 0.25, "decode": 0.5, "resize": 0, "batch": 0.25}
    )
    assert rows["batch"]["images_per_second"]["median"] == pytest.approx(250)
    text = profile_stages.conclude("tf_data", rows, None)
    assert text == "tf_data: decode costs most, 50% of the time."
    settings = [
        {"setting": "fuse='off'", "ratio": {"median": 1.5}, "changes": "", "again": [1.1, 1.2, 1.3, 1.2, 1.1, 1.2]},
        {"setting": "default", "ratio": {"median": 1.0}},
    ]
    assert "Of 1 settings that were tried fuse='off' helps most: 1.20 times" in profile_stages.conclude("x", rows, settings)
    settings[0]["again"][:2] = [0.9, 0.9]  # it was luck
    expected = "Of 1 settings the best, fuse='off', does not help beyond noise: "
    assert expected in profile_stages.conclude("x", rows, settings)
    del settings[0]["again"]  # it was no faster at first
    assert "None of 1 settings that were tried is faster" in profile_stages.conclude("x", rows, settings)
    settings[0]["again"] = []
    assert "fuse='off' seemed to help most, and then could not be measured" in profile_stages.conclude("x", rows, settings)
    rows["read"]["share"] = 0.5
    assert "take longer windows" in profile_stages.conclude("x", rows, None)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (TfDataOptions(fuse="scaled"), "fuse='scaled'"),
        (TfDataOptions(fuse="off"), "fuse='off'"),
        (DaliOptions(device="cpu", fuse="off"), "fuse='off'"),
    ],
)
def test_settings_are_tried_against_those_of_the_flags(dataset, options, missing, monkeypatch):
    """A candidate that the flags chose already is no candidate; what changes the pixels, to "scaled" or from it, says so."""
    import profile_stages

    for flag, value in (("_REPEATS", 2), ("_SECONDS", 1.0)):
        monkeypatch.setattr(profile_stages, flag, types.SimpleNamespace(value=value))

    class Worker:
        def measure(self, setting, *, seconds):
            return {"measured_batches": 1, "batch_size": 1, "seconds": 1}

    name = "tf_data" if isinstance(options, TfDataOptions) else "dali_cpu"
    spec = InputSpec(dataset=dataset, preprocess=Preprocess.for_training(16), order="global")
    rows = profile_stages.try_settings(Worker(), name, options, spec, {})
    changes = {row["setting"]: row["changes"] for row in rows}
    assert len(changes) == len(rows) >= 5
    assert missing not in changes
    for setting, changed in changes.items():
        assert (changed == "the pixels") == ("fuse=" in setting and "scaled" in (options.fuse, setting[6:-1]))


def test_profile_stages(sample_folder, tmp_path):
    """The table, the plot, the sentence."""
    arguments = ["--files=data/sample/train-*", "--batch_size=16", "--image_size=32", "--seconds=0.1", "--repeats=1"]
    outputs = [f"--json={tmp_path}/stages.json", f"--plot={tmp_path}/stages.png"]
    process = run("profile_stages.py", *arguments, *outputs, cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    report = json.loads((tmp_path / "stages.json").read_text())
    assert list(report["stages"]["tf_data"]) == ["read", "parse", "decode", "resize", "finish", "batch"]
    for rows in report["stages"].values():
        assert all(row["images_per_second"]["median"] > 0 for row in rows.values())
    assert {row["setting"] for row in report["settings"]["dali_cpu"]} >= {"default", "fuse='off'", "tf_data", "dtype='uint8'"}
    assert re.search("^tf_data: [a-z ]+ costs most, [0-9]+% of the time", process.stdout, re.MULTILINE)
    assert len(re.findall(r" (?:Of|None of) \d+ settings ", process.stdout)) == 2
    assert (tmp_path / "stages.png").stat().st_size > 10_000
    arguments = [*arguments, "--backends=dali_cpu", "--order=buffer", "--nosettings"]
    process = run("profile_stages.py", *arguments, cwd=sample_folder)
    assert "read and parse" in process.stdout
    assert "tf_data" not in process.stdout
    fails(
        run("profile_stages.py", *arguments, "--backends=dali_gpu", cwd=sample_folder), "`backends` must be of tf_data, dali_cpu"
    )
