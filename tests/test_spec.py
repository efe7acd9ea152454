import dataclasses
import os
import re
from pathlib import Path

import pytest
from conftest import jpeg, numbered_examples, write_dataset, write_tfrecord

from dali_tf_input import (
    AUTOTUNE,
    BoxCrop,
    CenterCrop,
    Checks,
    DaliOptions,
    DatasetSpec,
    InputError,
    InputSpec,
    Preprocess,
    ResizeRandomCrop,
    TfDataOptions,
    build_index,
    find_files,
)
from dali_tf_input.backends.dali import decoder_hints
from dali_tf_input.index.files import index_command


def test_for_training():
    preprocess = Preprocess.for_training(224)
    assert preprocess.crop == ResizeRandomCrop(resize=(256, 256))
    assert preprocess.mirror_probability == 0.5
    assert preprocess.image_shape == (224, 224, 3)
    assert Preprocess.for_training(224, layout="CHW").image_shape == (3, 224, 224)


def test_for_evaluation():
    preprocess = Preprocess.for_evaluation(112, layout="CHW")
    assert preprocess.crop == CenterCrop(resize_shorter=128)
    assert preprocess.mirror_probability == 0
    assert preprocess.image_shape == (3, 112, 112)


def test_specs_are_frozen(dataset):
    for spec in (dataset, Preprocess.for_training(), DaliOptions(device="cpu"), TfDataOptions()):
        field = dataclasses.fields(spec)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec, field, None)


TRAINING = Preprocess.for_training(224)
EVALUATION = Preprocess.for_evaluation(224)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResizeRandomCrop(resize=(0, 9)), "`resize` must be at least 1 pixel"),
        (lambda: CenterCrop(resize_shorter=0), "`resize_shorter` must be at least 1 pixel"),
        (
            lambda: BoxCrop(top=-1, left=0, height=1, width=1),
            "A box starts at 0 or more .*`top` -1",
        ),
        (lambda: BoxCrop(top=0, left=0, height=9, width=0), "at least 1 pixel each way"),
        (
            lambda: dataclasses.replace(TRAINING, image_size=(0, 1)),
            "`image_size` must be at least 1 pixel",
        ),
        (
            lambda: dataclasses.replace(TRAINING, image_size=(224, 257)),
            "`resize` must not be below `image_size`",
        ),
        (
            lambda: dataclasses.replace(EVALUATION, image_size=(257, 1)),
            "`resize_shorter` must not be below `image_size`",
        ),
        (
            lambda: dataclasses.replace(TRAINING, mirror_probability=1.5),
            r"`mirror_probability` must be in \[0, 1\], got 1.5",
        ),
        (
            lambda: dataclasses.replace(TRAINING, mirror_probability=float("nan")),
            "`mirror_probability` must be a finite number, got nan",
        ),
        (
            lambda: dataclasses.replace(TRAINING, std=(1.0, 0.0, 1.0)),
            "`std` must be above 0 in every channel",
        ),
        (lambda: dataclasses.replace(TRAINING, mean=(1.0,)), "`mean` must be 3 values"),
        (
            lambda: dataclasses.replace(TRAINING, layout="NHWC"),
            "`layout` must be one of 'HWC', 'CHW', got 'NHWC'",
        ),
        (lambda: DaliOptions(device="cuda"), "`device` must be one of 'cpu', 'gpu', got 'cuda'"),
        (
            lambda: DaliOptions(device="cpu", num_threads=0),
            "`num_threads` must be at least 1 or None",
        ),
        (
            lambda: DaliOptions(device="cpu", prefetch_queue_depth=0),
            "`prefetch_queue_depth` must be at least 1",
        ),
        (
            lambda: DaliOptions(device="cpu", read_mode="fast"),
            "`read_mode` must be one of 'mmap', 'plain', 'direct', got 'fast'",
        ),
        (
            lambda: DaliOptions(device="cpu", read_mode="plain", read_ahead=True),
            "`read_ahead` is for `read_mode` 'mmap' only",
        ),
        (
            lambda: DaliOptions(device="cpu", hw_decoder_load=0.5),
            "`hw_decoder_load` is for `device` 'gpu' only, got 0.5",
        ),
        (
            lambda: DaliOptions(device="gpu", hw_decoder_load=1.5),
            r"`hw_decoder_load` must be in \[0, 1\] or None, got 1.5",
        ),
        (lambda: TfDataOptions(num_parallel_reads=0), "`num_parallel_reads` must be at least 1"),
        (
            lambda: TfDataOptions(read_buffer_bytes=0),
            "`read_buffer_bytes` must be at least 1, got 0",
        ),
        (
            lambda: TfDataOptions(num_parallel_calls=0),
            "`num_parallel_calls` must be at least 1 or AUTOTUNE",
        ),
        (
            lambda: TfDataOptions(prefetch_batches=-2),
            "`prefetch_batches` must be at least 0 or AUTOTUNE",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_autotune_is_tensorflows():
    import tensorflow as tf

    assert AUTOTUNE == tf.data.AUTOTUNE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"order": "shuffled"},
            "`order` must be one of 'sequential', 'buffer', 'global', got 'shuffled'",
        ),
        ({"buffer_size": 0}, "`buffer_size` must be at least 1"),
        ({"seed": -1}, r"`seed` must be in \[0, 2\*\*31\)"),
        ({"seed": 2**31}, r"`seed` must be in \[0, 2\*\*31\)"),
    ],
)
def test_input_spec_refuses(dataset, changes, message):
    with pytest.raises(InputError, match=message):
        InputSpec(**{"dataset": dataset, "preprocess": TRAINING, "order": "buffer", **changes})


def test_from_files(tmp_path):
    dataset = write_dataset(tmp_path, [2, 3])
    assert [os.path.basename(file) for file in dataset.files] == [
        "train-00000-of-00002",
        "train-00001-of-00002",
    ]
    assert dataset.index_files == tuple(file + ".idx" for file in dataset.files)
    assert dataset.records_per_file == (2, 3)
    assert dataset.num_records == 5


def test_from_files_without_a_file(tmp_path):
    with pytest.raises(InputError, match="No file matches"):
        DatasetSpec.from_files(str(tmp_path / "train-*"))


def test_from_files_without_an_index(tmp_path):
    dataset = write_dataset(tmp_path, [2, 3, 1])
    os.unlink(dataset.index_files[1])
    pattern = str(tmp_path / "train-*")
    with pytest.raises(InputError) as caught:
        DatasetSpec.from_files(pattern)
    text = str(caught.value)
    first = dataset.files[1]
    assert text.startswith(f"1 of 3 files have no index, the first is {first}. Index them: ")
    assert text.endswith(f"python -m dali_tf_input.index {first}")


def test_from_files_with_a_stale_index(tmp_path):
    dataset = write_dataset(tmp_path, [2])
    write_tfrecord(Path(dataset.files[0]), numbered_examples(3))
    with pytest.raises(
        InputError,
        match=f"{dataset.files[0]} changed since .*-m dali_tf_input.index {dataset.files[0]}",
    ):
        DatasetSpec.from_files(dataset.files)


@pytest.mark.parametrize(
    ("example", "keys", "message"),
    [
        (
            {"a": b"x", "b": 1},
            {"image_key": "a"},
            "hold 'a', 'b', not the keys of TF-slim or tfds: name the two",
        ),
        (
            {"a": b"x", "b": 1},
            {"image_key": "a", "label_key": "c"},
            "`label_key` 'c' is not in the records, which hold 'a', 'b'",
        ),
        (
            {"image/encoded": b"x"},
            {},
            "The records hold 'image/encoded', not the keys of TF-slim or tfds",
        ),
        ({}, {}, "not Examples with features"),
        (
            {"image": b"x", "label": "dog"},
            {},
            "'label' must be int64_list of 1 value, found bytes_list of 1 in .*--verify=schema",
        ),
        (
            {"image": 7, "label": 7},
            {},
            "'image' must be bytes_list of 1 value, found int64_list of 1 in ",
        ),
    ],
)
def test_from_files_with_other_features(tmp_path, example, keys, message):
    file = write_tfrecord(tmp_path / "train", [example])
    build_index(file)
    with pytest.raises(InputError, match=message):
        DatasetSpec.from_files(file, **keys)


def test_from_files_finds_the_keys(tmp_path):
    for name, keys in (
        ("slim", ("image/encoded", "image/class/label")),
        ("tfds", ("image", "label")),
    ):
        file = write_tfrecord(tmp_path / name, [{keys[0]: jpeg(9, 9), keys[1]: 1, "other": 3}])
        build_index(file)
        dataset = DatasetSpec.from_files(file)
        assert (dataset.image_key, dataset.label_key) == keys


def test_from_files_without_a_label_in_some_records(tmp_path):
    """DALI would serve any number for it."""
    good = {"image": jpeg(9, 9), "label": 1}
    write_tfrecord(tmp_path / "train-0", [good])
    file = write_tfrecord(tmp_path / "train-1", [{"image": jpeg(9, 9)}, good])
    build_index(tmp_path / "train-*")
    with pytest.raises(InputError, match=f"`label_key` 'label' is not in record 0 of {file}"):
        DatasetSpec.from_files(tmp_path / "train-*")


def test_label_offset(tmp_path):
    file = write_tfrecord(
        tmp_path / "train", [{"image": jpeg(9, 9), "label": label} for label in (1, 3, 1000)]
    )
    build_index(file)
    assert DatasetSpec.from_files(file, label_offset=1).label_range is None  # not looked at yet
    build_index(file, Checks(verify="schema"))
    assert DatasetSpec.from_files(file).label_range == (1, 1000)
    assert DatasetSpec.from_files(file, label_offset=1).label_range == (0, 999)
    with pytest.raises(
        InputError, match="`label_offset` must be at most the lowest label, 1, got 2"
    ):
        DatasetSpec.from_files(file, label_offset=2)


def test_what_is_known_of_other_labels_or_of_some_files_is_not_known(tmp_path):
    for name in ("train-0", "train-1"):
        write_tfrecord(
            tmp_path / name,
            [{"image": jpeg(9, 9), "label": 5, "coarse": number} for number in range(4)],
        )
    build_index(tmp_path / "train-0", Checks(verify="decode", decoder="dali"))
    build_index(tmp_path / "train-1")
    dataset = DatasetSpec.from_files(tmp_path / "train-?")
    assert (dataset.label_range, dataset.largest_image) == (None, None)
    with pytest.raises(
        InputError, match="`label_offset` must be at most the lowest label, 5, got 6"
    ):
        DatasetSpec.from_files(tmp_path / "train-?", label_offset=6)
    assert DatasetSpec.from_files(tmp_path / "train-0").label_range == (5, 5)
    coarse = DatasetSpec.from_files(tmp_path / "train-0", image_key="image", label_key="coarse")
    assert (coarse.label_range, coarse.largest_image) == (None, (9, 9))


def test_largest_image(tmp_path):
    for number, (height, width) in enumerate([(20, 90), (70, 30)]):
        write_tfrecord(
            tmp_path / f"train-{number}",
            [{"image": jpeg(height, width), "label": 1}, {"image": jpeg(9, 9), "label": 1}],
        )
    build_index(tmp_path / "train-*", Checks(verify="decode", decoder="dali"))
    dataset = DatasetSpec.from_files(tmp_path / "train-*")
    assert dataset.largest_image == (70, 90)
    assert decoder_hints(dataset, DaliOptions(device="gpu")) == {
        "preallocate_height_hint": 70,
        "preallocate_width_hint": 90,
    }
    assert decoder_hints(dataset, DaliOptions(device="cpu")) == {}
    assert decoder_hints(dataset, DaliOptions(device="gpu", memory_hints=False)) == {}
    assert decoder_hints(
        dataset, DaliOptions(device="gpu", memory_hints=False, hw_decoder_load=0.0)
    ) == {"hw_decoder_load": 0.0}


def test_from_files_looks_into_every_file(tmp_path):
    """DALI would serve whatever its memory holds for a label of another kind."""
    dataset = write_dataset(tmp_path, [2, 1, 2, 2])
    write_tfrecord(
        Path(dataset.files[1]), [{"image/encoded": jpeg(9, 9), "image/class/label": "dog"}]
    )
    build_index(dataset.files[1])
    with pytest.raises(InputError, match=f"found bytes_list of 1 in {dataset.files[1]}"):
        DatasetSpec.from_files(dataset.files)


def test_from_files_takes_paths(tmp_path):
    write_dataset(tmp_path, [2])
    assert DatasetSpec.from_files(tmp_path / "train-*").num_records == 2
    assert DatasetSpec.from_files([tmp_path / "train-00000-of-00001"]).num_records == 2


def test_from_files_with_named_keys(tmp_path):
    file = write_tfrecord(tmp_path / "train", [{"image": jpeg(9, 9), "label": 1}])
    build_index(file)
    assert DatasetSpec.from_files(file, image_key="image", label_key="label").num_records == 1


def test_from_files_of_no_examples(tmp_path):
    from dali_tf_input.index.tfrecord import frame_record

    (tmp_path / "train").write_bytes(frame_record(b"\xff\xff\xff"))
    file = str(tmp_path / "train")
    build_index(file)
    with pytest.raises(
        InputError, match=r"not Examples with features.*-m dali_tf_input.index .*--verify=schema"
    ):
        DatasetSpec.from_files(file)


def test_behind_a_link(tmp_path, monkeypatch):
    """The folder above a link's is that of where it leads, and not of where it stands."""
    for folder in ("cwd", "there/sub", "there/data", "data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cwd" / "link").symlink_to(tmp_path / "there" / "sub")
    write_tfrecord(tmp_path / "there" / "data" / "t-0", numbered_examples(3))
    build_index(write_tfrecord(tmp_path / "data" / "t-0", numbered_examples(1)))
    monkeypatch.chdir(tmp_path / "cwd")
    build_index("link/../data/t-0")
    dataset = DatasetSpec.from_files("link/../data/t-*")
    assert dataset.num_records == 3
    monkeypatch.chdir("/")
    assert os.path.samefile(dataset.files[0], tmp_path / "there" / "data" / "t-0")
    assert os.path.isabs(dataset.index_files[0])


def test_the_command_for_many_files_of_odd_names(tmp_path):
    """It is a pattern of exactly these, whatever of a pattern is in their names; a pattern that is
    given stays one.
    """
    folder = tmp_path / "d [v2]"
    folder.mkdir()
    files = [
        write_tfrecord(folder / f"t[1]*-{number}", numbered_examples(1)) for number in range(5)
    ]
    write_tfrecord(
        folder / "t1x-7", numbered_examples(1)
    )  # which the names would match as patterns
    with pytest.raises(InputError, match="5 of 5 files have no index") as caught:
        DatasetSpec.from_files(files)
    pattern = re.search("-m dali_tf_input.index '(.*)'$", str(caught.value))[1]
    assert list(find_files(pattern)) == files
    patterns = [f"{tmp_path}/train-{number}*" for number in range(5)]
    assert (
        index_command(patterns).partition(" ")[2] == f"-m dali_tf_input.index '{tmp_path}/train-*'"
    )
