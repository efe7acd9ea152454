"""Wrong calls end in an InputError that names the argument; NumPy's integers are integers."""

import collections.abc
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from conftest import jpeg

import dali_tf_input as dti
from support.benchmark import measure

TRAINING = dti.Preprocess.for_training(8)


def spec_of(dataset, **changes):
    return dti.InputSpec(
        **{"records": dataset, "preprocess": TRAINING, "order": "global", **changes}
    )


def feed(dataset, **changes):
    arguments = {"batch_size": 4, "options": dti.TfDataOptions(), **changes}
    return dti.load(spec_of(dataset), **arguments)


WRONG = {
    "batch_size": [(feed, "batch_size", value) for value in (4.0, "4", None, True, 0)],
    "start_step": [(feed, "start_step", value) for value in (1.0, "1", None, -1, np.float64(1))],
    "spec": [
        (spec_of, name, value)
        for name, values in {
            "seed": (1.5, "0", None, -1, 2**31, True),
            "order": ("random", 1, None, ["global"]),
            "preprocess": (None, "training", 224),
            "repeat": ("no", 0, None),
            "label": ("class", 7, dti.ClassLabel),
            "record_ids": (1, "yes", None),
            "features": (["a"], {"image/encoded": 3}, {"label": dti.Stored()}),
            "mask": ("mask", True),
            "class_weight": ("even", {-1: 1.0}, {0: float("nan")}),
            "buffer_size": (0, 1.5, 10**12),
            "shuffle_block_size": (0, 2.0),
        }.items()
        for value in values
    ],
    "preprocess": [
        (lambda _, **changes: dataclasses.replace(TRAINING, **changes), name, value)
        for name, values in {
            "image_size": (8, 16.5, (16.5, 16), ("16", 16), (8, 8, 8), (0, 8), (10**9, 8), None),
            "crop": (None, "center", dti.ResizeRandomCrop),
            "mirror_probability": (2, "1", None, float("nan"), True),
            "mean": (0.0, (1, 2), (float("nan"), 0, 0), ("a", "b", "c"), None),
            "std": ((0, 1, 1), (float("inf"), 1, 1)),
            "layout": ("NHWC", None, 3),
            "dtype": (np.float32, tf.float32, "float64"),
            "antialias": (1, "yes", None),
            "augment": (True, "rand", dti.RandAugment(), (dti.RandAugment,), ("rand",)),
        }.items()
        for value in values
    ],
    "labels": [
        (lambda _, **changes: dti.ClassLabel(**{"one_hot": True, "num_classes": 4, **changes}), *one)
        for one in (
            *(("num_classes", value) for value in (50.0, "50", 0, True, None)),
            *(("smoothing", value) for value in (float("nan"), "0.1", None, 1.0)),
            ("vocabulary", ("a", "a")),
        )
    ],
    "crops": [
        (lambda _, **changes: dti.RandomResizedCrop(**changes), "num_attempts", 1.5),
        (lambda _, **changes: dti.RandomResizedCrop(**changes), "area_range", 0.5),
        (lambda _, **changes: dti.ResizeRandomCrop(**changes), "resize", 256),
    ],
    "options": [
        (lambda _, make=make, **changes: make(**changes), name, value)
        for make, name, values in (
            (lambda **changes: dti.DaliOptions(device="cpu", **changes), "num_threads", (1.5, 0, 10**5)),
            (lambda **changes: dti.DaliOptions(device="cpu", **changes), "prefetch_queue_depth", (2.0,)),
            (dti.DaliOptions, "device", (0, None, "tpu")),
            (dti.TfDataOptions, "num_parallel_reads", (10**9, 0, "4")),
            (dti.TfDataOptions, "read_buffer_bytes", (10**15, 1.5)),
            (dti.TfDataOptions, "num_parallel_calls", (0, -2, None)),
            (dti.TfDataOptions, "prefetch_batches", (-2, 1.0)),
            (dti.TfDataOptions, "autotune", ("no", 0)),
            (dti.TfDataOptions, "service", (5050, "host:1")),
        )
        for value in values
    ],
    "others": [
        (lambda data, **changes: spec_of(data, **changes), "records", "train-*"),
        (lambda data, **changes: spec_of(data, **changes), "records", None),
        (lambda _, **changes: dti.Shard(**changes), "num_shards", 2.0),
        (lambda _, **changes: dti.Shard(**changes), "shard_id", "0"),
        (lambda _, **changes: dti.Checks(**changes), "verify", 1),
        (lambda _, **changes: dti.Checks(**changes), "max_pixels", 1e6),
        (lambda _, **changes: dti.Records.from_files(**changes), "files", None),
        (lambda _, **changes: dti.Records.from_files(**changes), "files", 5),
        (lambda _, **changes: dti.build_index(**changes), "files", [None]),
        (lambda _, **changes: dti.build_index("x", **changes), "checks", "crc"),
        (lambda _, **changes: dti.build_index("x", **changes), "num_processes", 2.5),
        (lambda _, **changes: dti.Checks(**changes), "label", "class"),
        (lambda _, **changes: dti.MultiHot(num_classes=3, **changes), "offset", 1.5),
        (lambda _, **changes: dti.InputSpec.for_training(**changes), "records", 5),
        (lambda data, **changes: dti.InputSpec.for_training(data, **changes), "preprocess", "224"),
        (lambda _, **changes: dti.Preprocess.for_training(**changes), "image_size", "224"),
        (lambda _, **changes: next(dti.iterate_batches([b""], TRAINING, **changes)), "batch_size", 1.5),
        (lambda _, **changes: measure(iter(()), batch_size=1, warmup_batches=0, **changes),
         "seconds", "1"),
        (lambda data, **changes: dti.make_dataset(spec_of(data), batch_size=1, **changes), "options", 0),
        (lambda data, **changes: dti.make_dataset(spec_of(data), **changes), "batch_size", 4.0),
        (lambda data, **changes: dti.make_dataset(spec_of(data), batch_size=1, **changes), "shard", 0),
        (lambda data, **changes: dti.load(batch_size=1, **changes), "spec", "data"),
        (feed, "strategy", "mirrored"),
        (feed, "options", 0),
    ],
}  # fmt: skip
CASES = [case for cases in WRONG.values() for case in cases]


@pytest.mark.parametrize(("call", "name", "value"), CASES, ids=[f"{c[1]}={c[2]!r}" for c in CASES])
def test_wrong_calls_name_the_argument(dataset, call, name, value):
    with pytest.raises(dti.InputError, match=f"`{name}`"):
        call(dataset, **{name: value})


@pytest.mark.parametrize("options", [dti.TfDataOptions(), dti.DaliOptions(device="cpu")])
def test_integers_of_numpy_are_integers(dataset, options):
    fed = feed(dataset, options=options, batch_size=np.int64(4), start_step=np.int32(1))
    assert next(iter(fed.dataset))[1].shape == (4,)
    assert type(fed.batch_size) is int
    assert spec_of(dataset, seed=np.uint8(3)).seed == 3
    size = dataclasses.replace(TRAINING, image_size=[np.int64(8), 8]).image_size
    assert size == (8, 8)
    assert isinstance(size, tuple)


def test_an_evaluation_in_absurd_batches_is_refused(dataset):
    spec = spec_of(dataset, order="sequential", repeat=False)
    said = "`batch_size` must be at most 65,536 on each replica, got 1000000000000"
    with pytest.raises(dti.InputError, match=said):
        dti.load(spec, dti.TfDataOptions(), batch_size=10**12)


def test_sequences_that_make_their_images_late(dataset):
    """Only lists and tuples are looked into beforehand."""

    class Late(collections.abc.Sequence):
        def __len__(self):
            return 3

        def __getitem__(self, position):
            made.append(position)
            return jpeg(9, 9)

    made = []
    batches = dti.iterate_batches(Late(), dti.Preprocess.for_evaluation(8), batch_size=1)
    assert made == []
    next(batches)
    assert made == [0]
