"""Every public callable checks its arguments: what does not fit is refused by name, odd values do no
harm, and a wrong keyword names the nearest right one.

Arguments and wrong values come from the signatures and their annotations, so that a new argument is
tried without a line here.
"""

import collections.abc
import dataclasses
import datetime
import decimal
import fractions
import inspect
import pathlib
import resource
import shutil
import typing
import warnings
from types import NoneType, UnionType

import numpy as np
import pytest
import tensorflow as tf
from conftest import at_night, jpeg, refused, write_indexed
from models import make_model

import dali_tf_input as dti
from dali_tf_input.errors import Within, WrongCallError
from support import site

ODD = [
    *(None, "", "x", "a\0b", "\ud800", "x" * 5000, b"x", "~nobody/x"),
    *(0, -1, 1.5, float("nan"), float("inf"), 10**9, 10**30, -(10**30), 1e-300, 1e300, 1e-45, 1e39),
    *(True, [], [None], (1, 2, 3), {}, {"a": 1}, {1: 2}, {-1: 0}, set(), object(), range(3)),
    *(np.array([1, 2]), np.array(2), np.int64(3), np.float32(2.5), np.array("x"), np.zeros((2, 2))),
    *(tf.constant("x"), tf.constant(3), tf.constant([1.0]), lambda *_: 0, int, len, Ellipsis),
    *(pathlib.Path("x"), pathlib.Path("a\0b"), datetime.date(2026, 1, 1), 1 + 2j, slice(1)),
    *(
        decimal.Decimal("0.5"),
        fractions.Fraction(1, 2),
        memoryview(b"x"),
        bytearray(b"x"),
        iter([]),
    ),
]
# How a message names an argument that it calls by what it is.
SAYS = {"files": "No file matches", "records": "file", "resume": "`folder` must be"}
# A number that may be meant, and takes that long.
MEANT = {("Input.fit", "epochs"), ("Input.fit", "steps_per_epoch"), ("Input.profile", "steps")}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """What a call writes, it writes here."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the methods belong to, and arguments that are right."""
    examples = [{"image": jpeg(9, 9, seed=n), "label": n % 3} for n in range(12)]
    file = tmp_path_factory.mktemp("odd") / "train-0"
    dataset = write_indexed(file, examples, dti.Checks(verify="schema"))
    training = dti.InputSpec.for_training(dataset, 8)
    evaluation = dti.InputSpec.for_evaluation(dataset, 8)
    model = make_model(8, 3, run_eagerly=True)
    train = dti.load(training, dti.TfDataOptions(), batch_size=4)
    train.fit(model, verbose=0)
    return {
        "dataset": dataset,
        "file": dataset.paths[0],
        "first": dataset.select([0]),
        "rest": dataset.exclude([0]),
        "resume": dti.Resume(file.parent / "runs", save_every=1),
        "training": training,
        "evaluation": evaluation,
        "train": train,
        "valid": dti.load(evaluation, dti.TfDataOptions(), batch_size=4),
        "model": model,
        "preprocess": evaluation.preprocess,
    }


def plain(kind, **right):
    """A callable, and arguments that are right: of what is made beforehand, by its name."""
    return lambda made: (
        kind,
        {
            name: made.get(value, value) if isinstance(value, str) else value
            for name, value in right.items()
        },
    )


def method(owner, name, **right):
    """A method of what is made beforehand."""
    return lambda made: plain(getattr(made[owner], name), **right)(made)


def list_batches(**how):
    return [*dti.serving.iterate_batches(**how)]


list_batches.__signature__ = inspect.signature(dti.serving.iterate_batches)
list_batches.__annotations__ = typing.get_type_hints(
    dti.serving.iterate_batches, include_extras=True
)
WITHOUT_ARGUMENTS = (
    *(dti.ClassLabel, dti.Stored, dti.Checks, dti.TfDataOptions, dti.Preprocess, dti.Shard),
    *(dti.NoCrop, dti.RandomCrop, dti.CoverCrop, dti.RandomResizedCrop, dti.Letterbox),
    *(getattr(dti.augment, name) for name in dti.augment.__all__),
)
# Calls with arguments that are right, by their names; each is then called with another one.
CALLS = {kind.__name__: plain(kind) for kind in WITHOUT_ARGUMENTS} | {
    "MultiHot": plain(dti.MultiHot, num_classes=3),
    "Values": plain(dti.Values, size=3),
    "SegmentationMask": plain(dti.SegmentationMask, key="mask"),
    "DaliOptions": plain(dti.DaliOptions, device="cpu"),
    "Mix": plain(dti.Mix, mixup=0.2, cutmix=1.0),
    "ResizeRandomCrop": plain(dti.ResizeRandomCrop, resize=(9, 9)),
    "CenterCrop": plain(dti.CenterCrop, resize_shorter=9),
    "Preprocess.for_training": plain(dti.Preprocess.for_training),
    "Preprocess.for_evaluation": plain(dti.Preprocess.for_evaluation),
    "InputSpec": plain(dti.InputSpec, records="dataset", preprocess="preprocess", order="global"),
    "InputSpec.for_training": plain(dti.InputSpec.for_training, records="dataset", preprocess=8),
    "InputSpec.for_evaluation": plain(
        dti.InputSpec.for_evaluation, records="dataset", preprocess=8
    ),
    "Records.from_files": plain(dti.Records.from_files, files="file"),
    "load": plain(dti.load, spec="training", batch_size=4),
    "make_dataset": plain(
        dti.make_dataset, spec="training", options=dti.TfDataOptions(), batch_size=4
    ),
    "build_index": plain(dti.build_index, files="file"),
    "iterate_batches": plain(list_batches, images=[b"x"], preprocess="preprocess"),
    "export_saved_model": plain(
        dti.serving.export_saved_model, model="model", preprocess="preprocess", folder="saved"
    ),
    "export_triton": plain(
        dti.serving.export_triton, preprocess="preprocess", folder="triton", device="cpu"
    ),
    "make_normalization": plain(dti.serving.make_normalization, preprocess="preprocess"),
    "denormalize": plain(
        dti.serving.denormalize, images=np.zeros((1, 8, 8, 3)), preprocess="preprocess"
    ),
    "Records.sample": method("dataset", "sample", num_records=3),
    "Records.sample_fraction": method("dataset", "sample_fraction", fraction=0.5),
    "Records.split": method("dataset", "split", train=0.5, valid=0.5),
    "Records.folds": method("dataset", "folds", num_folds=2),
    "Records.filter": method("dataset", "filter", labels=[0]),
    "Records.select": method("dataset", "select", ids=[0]),
    "Records.exclude": method("dataset", "exclude", ids=[0]),
    "Records.relabel": method("dataset", "relabel"),
    "Records.read": method("dataset", "read", record=0),
    "Records.locate": method("dataset", "locate", record=0),
    "Records.union": method("first", "union", other="rest"),
    "InputSpec.ids_of_step": method("training", "ids_of_step", step=0, batch_size=4),
    "Input.records_of": method("train", "records_of", step=0),
    "Input.batch_at": method("train", "batch_at", step=0),
    "Input.blame": method("train", "blame", folder="blame", loss="mse"),
    "Input.fit": method("train", "fit", model="model", steps_per_epoch=1, verbose=0),
    "Input.evaluate": method("valid", "evaluate", model="model", verbose=0),
    "Input.predict": method("valid", "predict", model="model", verbose=0),
    "Input.profile": method("train", "profile", model="model", steps=1),
    "Resume": plain(dti.Resume, folder="runs"),
    "Resume.restore": method("resume", "restore", model="model", spec="training", batch_size=4),
    "Resume.is_due": method("resume", "is_due", step=1),
}
# Those that take a second for an argument that is right.
SLOW = ("export_saved_model", "Input.fit", "Input.evaluate", "Input.predict", "Input.profile")


def test_every_public_callable_is_tried():
    tried = {name.partition(".")[0] for name in CALLS}
    names = {name.rpartition(".")[2] for name in site.list_public()}
    assert names - tried <= {"__version__", "InputError", "BadRecordError", "Input"}


def list_arguments(function, right):
    """Returns the names of the arguments of a call, of a dataclass also where they are passed on."""
    parameters = inspect.signature(function).parameters.values()
    names = [
        one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    kind = getattr(function, "__self__", None)
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if takes_more and dataclasses.is_dataclass(kind) and isinstance(kind, type):
        names += [field.name for field in dataclasses.fields(kind)]
    return [*dict.fromkeys([*names, *right])]


def annotations_of(function):
    """Returns the annotations of the arguments, of a dataclass also where they are passed on."""
    owner, hints = getattr(function, "__self__", None), {}
    for one in (owner, function):
        if dataclasses.is_dataclass(one) and isinstance(one, type):
            one = one.__init__
        if callable(one) and not isinstance(one, type):
            hints |= typing.get_type_hints(one, include_extras=True)
    return hints


def wrong_values(hint):
    """Returns values that an annotation does not allow: of other types, and beyond its bounds."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        values = wrong_values(parts[0])
        for bounds in (one for one in parts[1:] if isinstance(one, Within)):
            values += [bounds.low - 1 if bounds.also != bounds.low - 1 else bounds.low - 2]
            values += [bounds.high + 1] if bounds.high < 2**53 else []
        return values
    if origin in (typing.Union, UnionType):
        others = [part for part in parts if part is not NoneType]
        if len(others) > 1:
            return [object()]
        return [value for value in wrong_values(others[0]) if value is not None]
    if origin is typing.Literal:
        return ["?", 0.5, None, object()]
    if origin is tuple:
        return [3, "ab", None, *([(1,) * (len(parts) + 1)] if ... not in parts else [])]
    if origin in (
        collections.abc.Sequence,
        collections.abc.Iterable,
        collections.abc.Mapping,
        dict,
    ):
        return [3, None]
    if hint in (int, float, bool):
        return ["1", None, (1,), *([True] if hint is not bool else [1, 0.0])] + (
            [float("nan"), float("inf")] if hint is float else [1.5]
        )
    if hint is str:
        return [3, None, b"x"]
    return [object(), 3, None] if isinstance(hint, type) and hint is not object else []


@pytest.mark.parametrize("name", CALLS)
def test_what_an_annotation_does_not_allow_is_refused(made, name):
    """By the name of the argument, with the value."""
    function, right = CALLS[name](made)
    hints, accepted = annotations_of(function), []
    for argument in list_arguments(function, right):
        hint = hints.get(argument, typing.Any)
        for value in wrong_values(hint) if hint is not typing.Any else ():
            try:
                function(**{**right, argument: value})
            except dti.InputError as error:
                assert f"`{argument}" in str(error) or SAYS.get(argument, "?") in str(error), error
            else:
                accepted.append((argument, value))
    assert not accepted


@pytest.fixture
def with_little_memory():
    """A call that takes memory by a number alone fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def try_odd_values(name, made, one_in):
    """Nothing but an InputError is raised, and it names the argument."""
    function, right = CALLS[name](made)
    parameters, wrong = inspect.signature(function).parameters, []
    for place, argument in enumerate(list_arguments(function, right)):
        parameter = parameters.get(argument)  # none of `**more`
        takes_functions = "Callable" in str(parameter and parameter.annotation)
        # Each value with some argument of each callable; at night each with each.
        for value in at_night(ODD[place % one_in :: one_in], ODD):
            if (name, argument) in MEANT and isinstance(value, int) and value == 10**9:
                continue
            if takes_functions and callable(value):
                continue  # what it raises when it is called is its own error
            for folder in ("saved", "triton"):  # which must be new
                shutil.rmtree(folder, ignore_errors=True)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(**{**right, argument: value})
            except dti.InputError as error:
                text = str(error)
                if argument not in text and SAYS.get(argument, argument) not in text:
                    wrong.append((argument, repr(value)[:40], "unnamed", text[:90]))
            except Exception as error:  # what this test is for
                wrong.append((argument, repr(value)[:40], type(error).__name__, str(error)[:90]))
    lines = "\n".join(" | ".join(map(ascii, one)) for one in wrong)
    assert not wrong, f"{name}: {len(wrong)}\n{lines}"


@pytest.mark.usefixtures("with_little_memory")
@pytest.mark.parametrize("name", [name for name in CALLS if name not in SLOW])
def test_odd_values(made, name):
    """No process dies or waits, and no memory is taken by a number alone."""
    try_odd_values(name, made, one_in=3)


@pytest.mark.slow
@pytest.mark.usefixtures("with_little_memory")
@pytest.mark.parametrize("name", SLOW)
def test_odd_values_of_what_trains(made, name):
    try_odd_values(name, made, one_in=6)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "Records.split"])
def test_a_wrong_keyword_names_the_nearest(made, name):
    """Of each argument, without its last letter."""
    function, right = CALLS[name](made)
    parameters = inspect.signature(function).parameters
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    # What a function passes on to Keras or to a class is compared with the names there.
    hint = r"(Did you mean `\w+`\?$|It has `)" if takes_more else r"Did you mean `\w+`\?$"
    known = list_arguments(function, right)
    for argument in known:
        wrong = argument[:-1]
        if len(wrong) < 3 or wrong in known:
            continue
        with refused(rf"\(\) has no argument `{wrong}`\. {hint}") as caught:
            function(**{**right, wrong: 1})
        assert isinstance(caught.value, WrongCallError)
        assert isinstance(caught.value, TypeError)
    with refused(r"\(\) has no argument `xyzzy`\. It has (`|none)"):
        function(**{**right, "xyzzy": 1})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dti.ClassLabel(label_smoothing=0.1), "ClassLabel.*Did you mean `smoothing`"),
        (lambda: dti.InputSpec.for_training("x", mirror=1), "Did you mean `mirror_probability`"),
        (lambda: dti.load(global_batch_size=6), "^load.. has no .* Did you mean `batch_size`"),
        (lambda: dti.InputSpec(order="global"), "^InputSpec..: missing a required .*'records'"),
        (lambda: dti.InputSpec.for_training(), "^InputSpec.for_training..: missing .*'records'"),
        (lambda: dti.Shard(0, 1, 2), "^Shard..: too many positional arguments"),
        (lambda: dti.Shard(0, shard_id=0), "^Shard..: multiple values for argument 'shard_id'"),
        (lambda: dataclasses.replace(dti.NoCrop(), size=1), "^NoCrop.. has no argument `size`"),
        (lambda: dti.Preprocess().with_fields(crops=1), "^Preprocess.. has no argument `crops`. D"),
    ],
)
def test_a_call_that_does_not_fit(call, message):
    with refused(message) as caught:
        call()
    assert isinstance(caught.value, TypeError)


def test_integers_of_numpy_are_integers(made):
    train = dti.load(
        made["training"], dti.TfDataOptions(), batch_size=np.int64(4), start_step=np.int32(1)
    )
    assert next(iter(train))[1].shape == (4,)
    assert type(train.batch_size) is int
    assert dataclasses.replace(made["training"], seed=np.uint8(3)).seed == 3
    size = dti.Preprocess(image_size=[np.int64(8), 8]).image_size
    assert size == (8, 8)
    assert isinstance(size, tuple)


def test_sequences_that_make_their_images_late():
    """Only lists and tuples are looked into beforehand."""

    class Late(collections.abc.Sequence):
        def __len__(self):
            return 3

        def __getitem__(self, position):
            made.append(position)
            return jpeg(9, 9)

    made = []
    batches = dti.serving.iterate_batches(Late(), dti.Preprocess.for_evaluation(8), batch_size=1)
    assert made == []
    next(batches)
    assert made == [0]
