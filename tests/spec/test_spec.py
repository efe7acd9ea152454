"""What a dataset, a preprocessing and an input are, and what is refused."""

import dataclasses
import functools
import os
import re

import conftest
import pytest
from conftest import jpeg, numbered_examples, refused, spec_of, write_dataset, write_tfrecord

import dali_tf_input as dti
from dali_tf_input.backends.dali import decoder_hints
from dali_tf_input.records.example import decode_example, encode_example
from dali_tf_input.records.labels import find_label_problem
from dali_tf_input.records.paths import find_files, index_command
from dali_tf_input.records.tfrecord import frame_record
from dali_tf_input.spec.crops import CoverCrop

from_files = dti.Records.from_files
describe = dti.InputSpec.for_training
TRAINING = dti.Preprocess.for_training(224)
IMAGE = jpeg(9, 9)


def test_for_training():
    preprocess = dti.Preprocess.for_training(224)
    assert preprocess.crop.cover_of((224, 224)) == (256, 256)
    assert not dti.Preprocess.for_training(224, interpolation="nearest").antialias
    assert preprocess.image_shape == (224, 224, 3)
    assert dti.Preprocess.for_training(224, layout="CHW").image_shape == (3, 224, 224)


@pytest.mark.parametrize("make", [dti.Preprocess.for_training, dti.Preprocess.for_evaluation])
def test_further_fields_of_preprocess(make):
    """Any field replaces the default; `mean` and `std` those of `normalization`."""
    values = {
        "crop": dti.RandomResizedCrop(),
        "mirror_probability": 0.25,
        "layout": "CHW",
        "interpolation": "bicubic",
        "antialias": True,
        "channels": 1,
        "apply_orientation": True,
        "dtype": "uint8",
        "augment": (dti.augment.RandAugment(),),
        "mean": (1.0,),
        "std": (2.0,),
    }
    assert {"image_size", *values} == {field.name for field in dataclasses.fields(TRAINING)}
    assert make(32, normalization="-1..1", **values) == dti.Preprocess(
        image_size=(32, 32), **values
    )
    for name in {*values} - {"channels", "mean", "std"}:
        expected = dataclasses.replace(make(32), **{name: values[name]})
        assert make(32, **{name: values[name]}) == expected


def test_for_training_describes_the_input(dataset):
    pattern = os.path.join(os.path.dirname(dataset.paths[0]), "train-*")
    with refused("`index_dir` belongs to the records"):
        dti.InputSpec.for_training(pattern, index_dir="elsewhere")
    spec = dti.InputSpec.for_training(pattern)
    assert spec == dti.InputSpec(
        records=dataset, preprocess=dti.Preprocess.for_training(224), order="global"
    )
    assert spec == dti.InputSpec.for_training(list(dataset.paths), (224, 224))
    assert spec == dti.InputSpec.for_training(dataset, dti.Preprocess.for_training(224))


def test_for_evaluation_describes_the_input(dataset):
    spec = dti.InputSpec.for_evaluation(dataset, (32, 48))
    preprocess = dti.Preprocess.for_evaluation((32, 48))
    assert spec == spec_of(dataset, "sequential", preprocess, repeat=False)
    assert dti.InputSpec.for_evaluation(dataset, preprocess, repeat=True).repeat
    assert dti.InputSpec.for_training(dataset, 32, order="buffer", buffer_size=9).buffer_size == 9


@pytest.mark.parametrize("name", ["for_training", "for_evaluation"])
@pytest.mark.parametrize("as_object", [False, True])
def test_fields_of_both(dataset, name, as_object):
    """Of `Preprocess`, on top of a size or of an object, and of `InputSpec`."""
    make, preprocess = getattr(dti.InputSpec, name), getattr(dti.Preprocess, name)(32)
    changes = {"crop": dti.RandomResizedCrop(), "mirror_probability": 0, "dtype": "float16"}
    fields = {"seed": 1, "record_ids": True, "label": dti.ClassLabel(offset=-3)}
    spec = make(dataset, preprocess if as_object else 32, normalization="0..1", **changes, **fields)
    statistics = {"mean": (0.0,) * 3, "std": (255.0,) * 3}
    assert spec.preprocess == dataclasses.replace(preprocess, **changes, **statistics)
    assert (spec.seed, spec.record_ids, spec.label_range) == (1, True, (3, 26))
    size = (32, 48)  # by its name, too
    assert make(dataset, image_size=size).preprocess == getattr(dti.Preprocess, name)(size)
    gray = make(dataset, preprocess if as_object else 32, channels=1, normalization="imagenet")
    assert gray.preprocess == getattr(dti.Preprocess, name)(32, channels=1)


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        ((), {"normalization": "tf"}, "`normalization` must be one of 'imagenet', '0..1'"),
        (("224",), {}, "`preprocess` must be a Preprocess, an integer or 2 values, got '224'"),
        ((0,), {}, "`preprocess` must be a Preprocess, at least 1 pixel each way or 2 values"),
    ],
)
def test_for_training_refuses(dataset, arguments, fields, message):
    with refused(message):
        dti.InputSpec.for_training(dataset, *arguments, **fields)


@pytest.mark.parametrize(
    ("normalization", "black", "white"),
    [(None, 0, 255), ("0..1", 0, 1), ("-1..1", -1, 1), ("imagenet", -2.1179, 2.2489)],
)
def test_normalization_by_name(normalization, black, white):
    """What the red channel of black and white becomes."""
    for make in (dti.Preprocess.for_training, dti.Preprocess.for_evaluation):
        preprocess = make((32, 48), normalization=normalization)
        assert preprocess.image_size == (32, 48)
        mean, std = preprocess.mean[0], preprocess.std[0]
        assert ((0 - mean) / std, (255 - mean) / std) == pytest.approx((black, white), abs=1e-4)


@pytest.mark.parametrize("make", [dti.Preprocess.for_training, dti.Preprocess.for_evaluation])
def test_another_size_is_covered_anew(make):
    """However the size is changed, the default crop is that of the new size."""
    size = (64, 256)
    assert make(224).with_fields(image_size=size) == make(size)
    assert dataclasses.replace(make(300), image_size=size) == make(size)


train, evaluate = (
    functools.partial(
        dataclasses.replace, make(224, crop=CoverCrop(cover=(256, 256), position=position))
    )
    for make, position in (
        (dti.Preprocess.for_training, "random"),
        (dti.Preprocess.for_evaluation, "center"),
    )
)
cpu, gpu = (functools.partial(dti.DaliOptions, device=device) for device in ("cpu", "gpu"))
area, erase = dti.RandomResizedCrop, dti.augment.RandomErasing


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (dti.ResizeRandomCrop, {"resize": (0, 9)}, "`resize` must be at least 1 pixel"),
        (train, {"image_size": (0, 1)}, "`image_size` must be at least 1 pixel"),
        (train, {"image_size": (224, 257)}, "`cover` must not be below `image_size`"),
        (evaluate, {"image_size": (257, 1)}, "`cover` must not be below `image_size`"),
        (train, {"std": (1.0, 0.0, 1.0)}, "`std` must be above 0 in every channel"),
        (train, {"std": (0.2, 0.2, 0.2)}, "`std` is in 0..255 units, got .*0..1 by 255"),
        (train, {"mean": (1.0,)}, "`mean` must be one number for each of `channels`=3"),
        (train, {"channels": 1}, "`mean` must be one number for each of `channels`=1, got"),
        (train, {"interpolation": "nearest", "antialias": True}, "`antialias` has no meaning for"),
        (area, {"area_range": (0.5, 0.1)}, r"`area_range` must be \(smallest, largest\),"),
        (area, {"area_range": (0.5, 1.1)}, "`area_range` must be"),
        (area, {"aspect_ratio_range": (2, 1)}, "`aspect_ratio_range` must be"),
        (area, {"aspect_ratio_range": (0, 1)}, "`aspect_ratio_range` must be"),
        (erase, {"area_range": (0.5, 1.5)}, r"`area_range` must be .*, both in \(0, 1\)"),
        (erase, {"aspect_ratio_range": (2, 1)}, "`aspect_ratio_range` must be"),
        (
            dti.augment.GaussianBlur,
            {"sigma": (0, 1)},
            r"`sigma` must be .*, both in \[0.001, 30(.0)?\]",
        ),
        (
            dti.augment.RandAugment,
            {"increasing": False},
            "`increasing` False is for `dialect` 'tf' only",
        ),
        (cpu, {"read_mode": "plain", "read_ahead": True}, "`read_ahead` is for `read_mode` 'mmap'"),
        (cpu, {"hw_decoder_load": 0.5}, "`hw_decoder_load` is for `device` 'gpu' only, got 0.5"),
        (
            dti.TfDataOptions,
            {"num_parallel_calls": 0},
            "`num_parallel_calls` must be at least 1 or AUTOTUNE",
        ),
    ],
)
def test_refuses(make, arguments, message):
    with refused(message):
        make(**arguments)


def test_from_files(tmp_path):
    """By paths and by patterns, as strings or not."""
    dataset = write_dataset(tmp_path, [2, 3])
    names = ["train-00000-of-00002", "train-00001-of-00002"]
    assert dataset.paths == tuple(f"{tmp_path}/{name}" for name in names)
    for file, count in zip(dataset.files, (2, 3), strict=True):
        assert file.index_file == file.path + ".idx"
        status = os.stat(file.path)
        assert (file.size, file.mtime_ns) == (status.st_size, status.st_mtime_ns)
        assert (file.num_records, file.num_skipped, file.etag) == (count, 0, None)
    assert (dataset.num_records, dataset.num_skipped, dataset.is_remote) == (5, 0, False)
    assert dataset.locate(3)[:2] == (dataset.paths[1], 1)
    assert dataset.read(3)["image/class/label"] == [3]
    assert from_files(str(tmp_path / "train-*")) == dataset
    assert from_files([tmp_path / name for name in names[::-1]]) == dataset
    with refused("No file matches"):
        from_files(str(tmp_path / "validation-*"))


@pytest.mark.parametrize(
    ("example", "keys", "message"),
    [
        ({"a": b"x", "b": 1}, ("a", None), "hold 'a', 'b', not the keys of"),
        ({"a": b"x", "b": 1}, ("a", "c"), "`label.key` 'c' is not in the records, .* 'a', 'b'"),
        ({"image/encoded": b"x"}, (None, None), "hold 'image/encoded', not the keys of TF-slim or"),
        ({}, (None, None), "not Examples with features"),
        ({"image": b"x", "label": "dog"}, (None, None), "'label' must be int64_list of 1 value"),
        ({"image": 7, "label": 7}, (None, None), "'image' must be bytes_list of 1"),
    ],
)
def test_from_files_with_other_features(tmp_path, example, keys, message):
    file = write_tfrecord(tmp_path / "train", [example])
    dti.build_index(file)
    with refused(message):
        records = from_files(file, image_key=keys[0])
        spec_of(records, "global", TRAINING, label=dti.ClassLabel(key=keys[1]))


def test_from_files_finds_the_keys(tmp_path):
    slim, tfds = ("image/encoded", "image/class/label"), ("image", "label")
    for name, keys in (("slim", slim), ("tfds", tfds)):
        dataset = conftest.write_indexed(
            tmp_path / name, [{keys[0]: IMAGE, keys[1]: 1, "other": 3}]
        )
        assert (dataset.image_key, spec_of(dataset, "global", TRAINING).label.key) == keys
    assert from_files(tmp_path / "tfds", image_key="image") == dataset


def test_from_files_without_a_label_in_some_records(tmp_path):
    """DALI would serve any number for it."""
    write_tfrecord(tmp_path / "train-0", [{"image": IMAGE, "label": 1}])
    file = write_tfrecord(tmp_path / "train-1", [{"image": IMAGE}, {"image": IMAGE, "label": 1}])
    dti.build_index(tmp_path / "train-*")
    records = from_files(tmp_path / "train-*")
    with refused(f"`label.key` 'label' is not in record 0 of {file}"):
        spec_of(records, "global", TRAINING)
    assert spec_of(records, "global", TRAINING, label=None).label is None


def test_label_offset(tmp_path):
    examples = [{"image": IMAGE, "label": label} for label in (1, 3, 1000)]
    file = write_tfrecord(tmp_path / "train", examples)
    dti.build_index(file)
    counts = ((0, 1), (2, 1), (999, 1))
    for checks, known in ((dti.Checks(), None), (dti.Checks(verify="schema"), counts)):
        dti.build_index(file, checks)
        assert describe(file).label_range == (1, 1000)
        spec = describe(file, label=dti.ClassLabel(offset=1))
        assert (spec.label_range, spec.class_counts) == ((0, 999), known)
        for label in (dti.ClassLabel, functools.partial(dti.MultiHot, num_classes=2000)):
            with refused("`label.offset` must be at most the lowest label, 1, got 2: it is"):
                describe(file, label=label(offset=2))
    values = describe(file, label=dti.Values(size=1))
    assert (values.label_range, values.class_counts) == (None, None)


def test_what_is_known_of_some_files_is_not_known(tmp_path):
    examples = [{"image": IMAGE, "label": 5, "coarse": number} for number in range(4)]
    for name in ("train-0", "train-1"):
        write_tfrecord(tmp_path / name, examples)
    dti.build_index(tmp_path / "train-0", dti.Checks(verify="decode", decoder="dali"))
    dti.build_index(tmp_path / "train-1")
    spec = describe(tmp_path / "train-?")
    assert (spec.class_counts, spec.records.largest_image) == (None, None)
    with refused("`label.offset` must be at most the lowest label, 5, got 6"):
        describe(tmp_path / "train-?", label=dti.ClassLabel(offset=6))
    assert describe(tmp_path / "train-0").class_counts == ((5, 4),)
    coarse = describe(tmp_path / "train-0", label=dti.ClassLabel(key="coarse"))
    assert (coarse.label_range, coarse.class_counts) == ((0, 3), None)
    assert coarse.records.largest_image == (9, 9)


STORED = {"image": IMAGE, "class": 3, "name": "dog", "list": [1, 5], "box": [0.5, -1.0]}


@pytest.mark.parametrize(
    ("label", "bad", "message", "known"),
    [
        (
            dti.ClassLabel(key="class", offset=1, num_classes=3),
            {"class": 4},
            "'class' must be in 1 to 3, found 4",
            ((2, 2), ((2, 2),)),
        ),
        (
            dti.ClassLabel(key="class", offset=1),
            {"class": 0},
            "'class' must be at least 1, found 0",
            ((2, 2), ((2, 2),)),
        ),
        (
            dti.ClassLabel(key="name", vocabulary=("cat", "dog")),
            {"name": "cow"},
            "one of the 2 names of the vocabulary",
            ((1, 1), ((1, 2),)),
        ),
        (
            dti.MultiHot(key="list", num_classes=6),
            {"list": [2, 6]},
            "'list' must be in 0 to 5, found 6",
            ((1, 5), ((1, 2), (5, 2))),
        ),
        (
            dti.Values(key="box", size=2),
            {"box": [0.5]},
            "'box' must be .* of 2 values, found",
            (None, None),
        ),
        (None, {"image": ""}, "'image' holds 0 bytes", (None, None)),
    ],
    ids=["class", "without a number of classes", "name", "multi-hot", "values", "none"],
)
def test_one_label_object(tmp_path, label, bad, message, known):
    """`Checks` and `InputSpec` take the same one; a second run with it has nothing to do."""
    file = write_tfrecord(tmp_path / "train", [STORED, STORED | bad, STORED])
    checks = dti.Checks(verify="schema", label=label)
    with refused(f"record 1, byte .*: .*{message}"):
        dti.build_index(file, checks)
    assert dti.build_index(file, checks, on_bad="skip", max_bad_fraction=0.5).written == 1
    assert dti.build_index(file, checks, on_bad="skip", max_bad_fraction=0.5).unchanged == 1
    spec = describe(file, label=label)
    assert spec.label == label
    assert (spec.label_range, spec.class_counts) == known


@pytest.mark.parametrize(
    ("stored", "hint"),
    [
        (3, "found 3. Where labels count from 1, pass ClassLabel.offset=1. .--label_offset=1.[.]$"),
        (4, "found 4[.]$"),
        (-1, "found -1[.]$"),
        ("dog", "found bytes_list of 1. Names need ClassLabel.vocabulary=.... .--vocabulary.[.]$"),
        (
            [1, 2],
            "found int64_list of 2. Lists of classes need MultiHot .--label=multi_hot.; a 0 or 1"
            " for each class needs Values .--label=values.[.]$",
        ),
        (0.5, "found float_list of 1. Numbers need Values .--label=values.[.]$"),
    ],
)
def test_a_bad_label_hints_at_the_right_one(stored, hint):
    features = decode_example(encode_example({"label": stored}))
    _, detail = find_label_problem(dti.ClassLabel(key="label", num_classes=3), features)
    assert re.search(hint, detail), detail


def test_what_comes_out_of_a_label_is_not_checked_again(tmp_path):
    """A one-hot label is stored as any other."""
    file = write_tfrecord(tmp_path / "train", [{"image": IMAGE, "label": 1}])
    dti.build_index(file, dti.Checks(verify="schema", label=dti.ClassLabel(num_classes=3)))
    label = dti.ClassLabel(num_classes=3, one_hot=True, smoothing=0.1)
    assert dti.build_index(file, dti.Checks(verify="schema", label=label)).unchanged == 1
    label = dti.ClassLabel(num_classes=2)
    assert dti.build_index(file, dti.Checks(verify="schema", label=label)).written == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": dti.Values(key="mixed", size=2)}, "'mixed' holds int64_list and float_list"),
        ({"features": {"list": dti.Stored(size=3, padding=0.5)}}, "those of 'list', int64"),
        ({"features": {"name": dti.Stored(size=3, padding=0)}}, "those of 'name', string"),
        ({"class_weight": {0: "1"}}, r"`class_weight` must be .* in \[0, 1,048,576\)"),
        ({"class_weight": {10**9: 1.0}}, "`class_weight` must be finite weights"),
    ],
)
def test_outputs_that_records_do_not_hold(tmp_path, fields, message):
    examples = [STORED | {"mixed": mixed} for mixed in ([1, 2], [0.5, 2.0])]
    dti.build_index(write_tfrecord(tmp_path / "train", examples))
    with refused(message):
        describe(tmp_path / "train", **{"label": dti.ClassLabel(key="class"), **fields})


def test_largest_image(tmp_path):
    for number, size in enumerate([(20, 90), (70, 30)]):
        examples = [{"image": image, "label": 1} for image in (jpeg(*size), IMAGE)]
        write_tfrecord(tmp_path / f"train-{number}", examples)
    dti.build_index(tmp_path / "train-*", dti.Checks(verify="decode", decoder="dali"))
    dataset = from_files(tmp_path / "train-*")
    assert dataset.largest_image == (70, 90)
    spec = spec_of(dataset, "global", dti.Preprocess.for_training(16))
    upsampling = {"jpeg_fancy_upsampling": True}
    hints = {**upsampling, "preallocate_height_hint": 70, "preallocate_width_hint": 90}
    assert decoder_hints(spec, gpu()) == hints
    assert decoder_hints(spec, cpu()) == {}
    assert decoder_hints(spec, gpu(memory_hints=False)) == upsampling
    with pytest.warns(UserWarning, match="on some GPUs .nvImageCodec issue 55.: try it first"):
        assert decoder_hints(spec, gpu(memory_hints=False, decode="region")) == {}
    load = {"hw_decoder_load": 0.0}
    assert decoder_hints(spec, gpu(memory_hints=False, **load)) == load | upsampling
    plain = {"jpeg_fancy_upsampling": False}
    assert decoder_hints(spec, gpu(memory_hints=False, **plain)) == plain
    with refused("`jpeg_fancy_upsampling` is for `device` 'gpu' only"):
        cpu(**plain)


def test_from_files_looks_into_every_file(tmp_path):
    """DALI would serve whatever its memory holds for a label of another kind."""
    dataset = write_dataset(tmp_path, [2, 1, 2, 2])
    other = {"image/encoded": IMAGE, "image/class/label": "dog"}
    dti.build_index(write_tfrecord(dataset.paths[1], [other]))
    records = from_files(dataset.paths)
    with refused(f"found bytes_list of 1 in {dataset.paths[1]}"):
        spec_of(records, "global", TRAINING)


def test_from_files_of_no_examples(tmp_path):
    file = tmp_path / "train"
    file.write_bytes(frame_record(b"\xff\xff\xff"))
    dti.build_index(file)
    with refused(r"not Examples with features.*-m dali_tf_input index .*--verify=schema"):
        from_files(file)


def test_behind_a_link(tmp_path, monkeypatch):
    """The folder above a link's is that of where it leads, and not of where it stands."""
    for folder in ("cwd", "there/sub", "there/data", "data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cwd" / "link").symlink_to(tmp_path / "there" / "sub")
    write_tfrecord(tmp_path / "there" / "data" / "t-0", numbered_examples(3))
    dti.build_index(write_tfrecord(tmp_path / "data" / "t-0", numbered_examples(1)))
    monkeypatch.chdir(tmp_path / "cwd")
    dti.build_index("link/../data/t-0")
    dataset = from_files("link/../data/t-*")
    assert dataset.num_records == 3
    monkeypatch.chdir("/")
    assert os.path.samefile(dataset.paths[0], tmp_path / "there" / "data" / "t-0")
    assert os.path.isabs(dataset.files[0].index_file)


def test_the_command_for_many_files_of_odd_names(tmp_path):
    """It is a pattern of exactly these, whatever of a pattern is in their names; a pattern that is
    given stays one.
    """
    folder = tmp_path / "d [v2]"
    folder.mkdir()
    files = [
        write_tfrecord(folder / f"t[1]*-{number}", numbered_examples(1)) for number in range(5)
    ]
    write_tfrecord(folder / "t1x-7", numbered_examples(1))  # the names would match it as patterns
    with pytest.raises(dti.InputError, match="5 of 5 files have no index") as caught:
        from_files(files)
    pattern = re.search("-m dali_tf_input index '(.*)'$", str(caught.value))[1]
    assert list(find_files(pattern)) == files
    patterns = [f"{tmp_path}/train-{number}*" for number in range(5)]
    command = f"-m dali_tf_input index '{tmp_path}/train-*'"
    assert index_command(patterns).partition(" ")[2] == command
