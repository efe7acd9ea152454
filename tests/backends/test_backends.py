"""Each backend on its own: records, order, shapes, and the crop's distribution; and both against
each other.
"""

import contextlib
import dataclasses
import functools

import conftest
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    DALI,
    TF_DATA,
    at_night,
    encode,
    refused,
    spec_of,
    table,
    write_dataset,
    write_indexed,
)

import dali_tf_input as dti
from dali_tf_input.backends import dali, dali_reader
from dali_tf_input.backends.buffer import runs_of
from dali_tf_input.backends.build import choose_options, make_dataset
from dali_tf_input.backends.dali_reading import pack_batches
from dali_tf_input.backends.stream import Stream

SERIAL = dti.TfDataOptions(
    num_parallel_reads=1, num_parallel_calls=1, prefetch_batches=0, autotune=False
)
AHEAD = {"read_ahead": True}
EITHER = (DALI, TF_DATA)
backends = pytest.mark.parametrize("options", EITHER)


def evaluation(dataset, size=24, **changes):
    preprocess = dti.Preprocess.for_evaluation(size, **changes)
    return spec_of(dataset, "sequential", preprocess)


def training(dataset, size=24, *, buffer_size=8, seed=0, **changes):
    preprocess = dti.Preprocess.for_training(size, **changes)
    return spec_of(dataset, "buffer", preprocess, buffer_size=buffer_size, seed=seed)


def serve(spec, options, count, **arguments):
    """Returns the images and labels of the first `count` batches."""
    return conftest.take(make_dataset(spec, options, **arguments), count)


@table("options, layout", [(TF_DATA, "HWC"), (DALI, "CHW")], [*EITHER, SERIAL], ["HWC", "CHW"])
def test_element_spec_is_true(dataset, options, layout):
    changes = {"layout": layout, "crop": dti.ResizeRandomCrop(resize=(30, 40))}
    made = make_dataset(training(dataset, (20, 28), **changes), options, batch_size=4)
    shape = (4, 20, 28, 3) if layout == "HWC" else (4, 3, 20, 28)
    expected = (tf.TensorSpec(shape, tf.float32), tf.TensorSpec((4,), tf.int64))
    assert made.element_spec == expected
    assert int(made.cardinality()) == len(made) == 6
    assert len(made.repeat().take(9)) == 9
    assert tuple(map(tf.TensorSpec.from_tensor, next(iter(made)))) == expected


@backends
def test_sequential_order_goes_round(dataset, options):
    """24 records in batches of 5: the fifth batch opens the second pass; nothing is dropped,
    nothing comes twice.
    """
    _, labels = serve(evaluation(dataset), options, 10, batch_size=5)
    assert labels.tolist() == [position % 20 for position in range(50)]


def test_how_much_is_read_at_a_time_changes_nothing(dataset):
    """Less than a record, and more than a file; it is of order "buffer"."""
    less, usual, more = (
        serve(training(dataset), dti.TfDataOptions(**how), 6, batch_size=4)
        for how in ({"read_buffer_bytes": 1}, {}, {"read_buffer_bytes": 1 << 24})
    )
    for one, expected, other in zip(less, usual, more, strict=True):
        np.testing.assert_array_equal(one, expected)
        np.testing.assert_array_equal(other, expected)


@backends
def test_a_buffer_serves_each_record_of_its_shard_once_a_pass(dataset, options):
    _, labels = serve(training(dataset), options, 4, batch_size=6, shard=dti.Shard(1, 2))
    first, second = labels.reshape(2, 12).tolist()
    assert sorted(first) == sorted(second) == [*range(12, 24)]
    assert len({tuple(first), tuple(second), tuple(range(12, 24))}) == 3


@backends
def test_the_seed_repeats_order_and_pixels(dataset, options):
    (images, labels), again, other = (
        serve(training(dataset, seed=seed), options, 4, batch_size=6) for seed in (7, 7, 8)
    )
    np.testing.assert_array_equal(images, again[0])
    np.testing.assert_array_equal(labels, again[1])
    assert not np.array_equal(images, other[0])
    assert labels.tolist() != other[1].tolist()


def test_serial_and_parallel_tf_data_are_equal(dataset):
    """The serial row of the comparison does the same work: with one file at a time the same pixels
    come out.
    """
    parallel = serve(training(dataset), dti.TfDataOptions(num_parallel_reads=1), 4, batch_size=6)
    for one, other in zip(parallel, serve(training(dataset), SERIAL, 4, batch_size=6), strict=True):
        np.testing.assert_array_equal(one, other)


def test_dali_dataset_equals_the_bare_pipeline(dataset):
    """Two ways, one answer: what DALIDataset yields is what pipe.run() yields, random crops and
    mirrors included. With DALI's own reader, which serves on a GPU.
    """
    spec, options = training(dataset, seed=3), dti.DaliOptions(device="cpu", num_threads=2)
    stream = Stream(spec=spec, shard_batch_size=5, shard=dti.Shard(1, 2))
    define = functools.partial(dali.build_pipeline, stream, options, None, uses_dali_reader=True)
    pipeline = define()
    pipeline.build()
    outputs = [((5, 24, 24, 3), tf.float32), ((5,), tf.int64)]
    iterator = iter(dali.make_dataset(define, outputs, stream, options, uses_dali_reader=True))
    for _ in range(8):
        bare_images, bare_labels = (output.as_array() for output in pipeline.run())
        images, labels = next(iterator)
        np.testing.assert_array_equal(images.numpy(), bare_images)
        np.testing.assert_array_equal(labels.numpy(), bare_labels)


@pytest.mark.parametrize("how", [{}, {"read_mode": "plain"}, {"read_mode": "direct"}, AHEAD])
def test_dalis_own_reader_reads_a_subset(dataset, how):
    """However it reads, and where a file has none of it; on a GPU it serves order "buffer"."""
    records = dataset.select([1, 4, *range(17, 24)])
    assert records.counts == [2, 0, 7]
    stream = Stream(spec=training(records), shard_batch_size=9)
    options = dti.DaliOptions(device="cpu", **how)
    pipeline = dali.build_pipeline(stream, options, None, uses_dali_reader=True)
    pipeline.build()
    for _ in range(3):
        images, labels = (output.as_array() for output in pipeline.run())
        assert sorted(labels.tolist()) == records.ids.tolist()
        assert images.std(axis=(1, 2, 3)).min() > 0.1


@pytest.fixture(scope="module")
def coordinates(tmp_path_factory):
    """An 8x8 image whose red channel says the row of a pixel and whose green channel its column."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(8)[:, None] * 30, np.arange(8)[None, :] * 30
    image = encode(pixels)
    examples = [{"image": image, "label": number} for number in range(4800)]
    return write_indexed(tmp_path_factory.mktemp("coordinates") / "train", examples)


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], EITHER))
def test_crops_and_mirrors_are_uniform(coordinates, options):
    """Each of the 3 x 5 positions of a 6x4 crop in 8x8, mirrored or not, is drawn as often as any
    other.
    """
    raw = {"mirror_probability": 0.25, "mean": (0, 0, 0), "std": (1, 1, 1)}
    crop = dti.ResizeRandomCrop(resize=(8, 8))
    spec = spec_of(coordinates, "sequential", dti.Preprocess(image_size=(6, 4), crop=crop, **raw))
    images, _ = serve(spec, options, 300, batch_size=16)
    images = np.rint(images / 30).astype(int)
    mirrored = images[:, 0, 0, 1] > images[:, 0, -1, 1]
    top, left = images[:, 0, 0, 0], np.minimum(images[:, 0, 0, 1], images[:, 0, -1, 1])
    counts = np.zeros((3, 5), int)
    np.add.at(counts, (top, left), 1)
    expected = len(images) / 15  # 320; five standard deviations are 87
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected * 14 / 15)
    assert abs(mirrored.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / len(images))
    both = np.histogram2d(left, mirrored, bins=(5, 2))[0] / len(images)
    independent = np.outer([0.2] * 5, [0.75, 0.25])
    np.testing.assert_allclose(both, independent, atol=0.03)


@pytest.mark.parametrize("options", at_night([DALI], EITHER))
def test_shards_draw_different_crops(coordinates, options):
    preprocess = dti.Preprocess.for_training(4, crop=dti.ResizeRandomCrop(resize=(8, 8)))
    spec = spec_of(coordinates, "sequential", preprocess)
    first, second = (
        serve(spec, options, 4, batch_size=8, shard=dti.Shard(number, 2))[0] for number in range(2)
    )
    assert not np.array_equal(first, second)


@backends
def test_make_dataset_refuses(dataset, options):
    """test_sharding.py has the other messages."""
    spec = training(dataset)
    with refused("`batch_size` must be at most 8 in each of 3 shards, as there are 24 "):
        make_dataset(spec, options, batch_size=9, shard=dti.Shard(1, 3))
    with refused("`device_id` is for"):
        make_dataset(spec, options, batch_size=1, device_id=0)


@pytest.mark.parametrize("order", ["buffer", "global"])
@pytest.mark.parametrize("said", [None, "CUDA: out of memory", "nvJPEG: damaged"])
def test_memory_is_tried_before_tensorflow_aborts(dataset, order, said, monkeypatch):
    """As on a GPU: one batch by DALI alone. Other errors are left to the iterator."""
    spec = dataclasses.replace(training(dataset), order=order)
    stream = Stream(spec=spec, shard_batch_size=5)
    uses_dali_reader = order == "buffer"
    pipeline = dali.build_pipeline(stream, DALI, None, uses_dali_reader=uses_dali_reader)
    packed = None if uses_dali_reader else pack_batches(stream)
    outputs, run = [], type(pipeline).run

    def run_or_fail(self):
        if said:
            raise RuntimeError(said)
        outputs.extend(run(self))

    monkeypatch.setattr(type(pipeline), "run", run_or_fail)
    refusal = refused("The GPU's memory does not suffice: CUDA: out of memory. See nvidia-smi")
    with refusal if said and "memory" in said else contextlib.nullcontext():
        dali.check_pipeline(pipeline, packed, runs=True)
    assert [len(one) for one in outputs] == ([] if said else [5, 5])


def test_the_trial_leaves_bad_records_to_the_iterator(dataset):
    stream = Stream(spec=evaluation(dataset), shard_batch_size=5)
    pipeline = dali.build_pipeline(stream, DALI, None, uses_dali_reader=False)
    packed = pack_batches(stream).map(lambda _: tf.io.decode_raw(tf.io.read_file("/gone"), "uint8"))
    dali.check_pipeline(pipeline, packed, runs=True)


def test_what_dali_refuses_is_a_python_error(dataset, tmp_path, monkeypatch):
    """DALIDataset would end the process on this one: a file that is gone."""
    stream = Stream(spec=training(dataset), shard_batch_size=2)
    define = functools.partial(dali.build_pipeline, stream, DALI, None, uses_dali_reader=True)
    monkeypatch.setattr(
        dali_reader,
        "hold_indexes",
        lambda _: dict.fromkeys(dataset.paths, str(tmp_path / "gone.idx")),
    )
    with refused("DALI cannot build the pipeline"):
        dali.make_dataset(define, [], stream, DALI, uses_dali_reader=True)


def test_a_gpu_where_there_is_none(dataset):
    with refused("needs GPU 0, but TensorFlow sees 0 GPUs"):
        make_dataset(training(dataset), dti.DaliOptions(device="gpu"), batch_size=2)
    assert isinstance(choose_options(), dti.TfDataOptions)


@pytest.mark.parametrize("options", at_night([TF_DATA], EITHER))
def test_many_small_files(tmp_path, options):
    """Files of one record, and a shard that spans several of them."""
    dataset = write_dataset(tmp_path, [1] * 9)
    _, labels = serve(evaluation(dataset), options, 2, batch_size=3, shard=dti.Shard(1, 3))
    assert labels.tolist() == [3, 4, 5, 3, 4, 5]


def test_runs_around_what_is_left_out(tmp_path):
    """Every subset of a file of seven, for every division: the runs hold its records in order."""
    whole = write_dataset(tmp_path, [7, 7])
    offsets = whole.index(0)[:, 0].tolist(), whole.index(1)[:, 0].tolist()
    for mask in range(1, 1 << 7):
        kept = [position for position in range(7) if mask >> position & 1]
        records = whole.select([*kept, *range(7, 14)])
        for num_shards in (1, 2, 3, 5):
            for shard in (dti.Shard(number, num_shards) for number in range(num_shards)):
                read, numbers = [], []
                for file, offset, count, at in zip(*runs_of(records, shard), strict=True):
                    first = 7 * file + offsets[file].index(offset) if offset else 7 * file
                    read += range(first, first + count)
                    numbers += range(at, at + count)
                expected = records.ids[[*shard.records(records.num_records)]].tolist()
                assert read == numbers == expected
