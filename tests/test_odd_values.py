"""Every public callable takes odd values for each of its arguments, or refuses them by name.

The arguments are those of the signatures, so a new one is tried without a line here. Nothing but an
`InputError` is raised, no process dies or waits, and no memory is taken by a number alone.
"""

import dataclasses
import datetime
import decimal
import fractions
import inspect
import pathlib
import resource
import shutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import jpeg, write_indexed

import dali_tf_input as dti
from dali_tf_input import serving

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
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    train = dti.load(training, dti.TfDataOptions(), batch_size=4)
    train.fit(model, verbose=0)
    return {
        "dataset": dataset,
        "training": training,
        "evaluation": evaluation,
        "train": train,
        "valid": dti.load(evaluation, dti.TfDataOptions(), batch_size=4),
        "model": model,
        "preprocess": evaluation.preprocess,
    }


# Calls with arguments that are right, by their names; each is then called with an odd one.
CALLS = {
    **{
        kind.__name__: (lambda _, kind=kind: (kind, {}))
        for kind in (
            *(dti.ClassLabel, dti.Stored, dti.Checks, dti.TfDataOptions, dti.Preprocess),
            *(dti.RandAugment, dti.TrivialAugment, dti.ColorJitter, dti.RandomGrayscale),
            *(dti.GaussianBlur, dti.Solarize, dti.RandomErasing, dti.VerticalMirror),
            *(dti.RandomResizedCrop, dti.Letterbox, dti.NoCrop, dti.RandomCrop),
        )
    },
    "MultiHot": lambda _: (dti.MultiHot, {"num_classes": 3}),
    "Values": lambda _: (dti.Values, {"size": 3}),
    "SegmentationMask": lambda _: (dti.SegmentationMask, {"key": "mask"}),
    "DaliOptions": lambda _: (dti.DaliOptions, {"device": "cpu"}),
    "Mix": lambda _: (dti.Mix, {"mixup": 0.2, "cutmix": 1.0}),
    "Shard": lambda _: (dti.Shard, {}),
    "ResizeRandomCrop": lambda _: (dti.ResizeRandomCrop, {"resize": (9, 9)}),
    "CenterCrop": lambda _: (dti.CenterCrop, {"resize_shorter": 9}),
    "Preprocess.for_training": lambda _: (dti.Preprocess.for_training, {}),
    "Preprocess.for_evaluation": lambda _: (dti.Preprocess.for_evaluation, {}),
    "InputSpec": lambda made: (
        dti.InputSpec,
        {"records": made["dataset"], "preprocess": made["preprocess"], "order": "global"},
    ),
    "InputSpec.for_training": lambda made: (
        dti.InputSpec.for_training,
        {"records": made["dataset"], "preprocess": 8},
    ),
    "Records.from_files": lambda made: (
        dti.Records.from_files,
        {"files": made["dataset"].paths[0]},
    ),
    "load": lambda made: (dti.load, {"spec": made["training"], "batch_size": 4}),
    "make_dataset": lambda made: (
        dti.make_dataset,
        {"spec": made["training"], "options": dti.TfDataOptions(), "batch_size": 4},
    ),
    "build_index": lambda made: (dti.build_index, {"files": made["dataset"].paths[0]}),
    "iterate_batches": lambda made: (
        lambda **how: [*dti.iterate_batches(**how)],
        {"images": [b"x"], "preprocess": made["preprocess"]},
    ),
    "export_saved_model": lambda made: (
        dti.export_saved_model,
        {"model": made["model"], "preprocess": made["preprocess"], "folder": "model"},
    ),
    "export_triton": lambda made: (
        serving.export_triton,
        {"preprocess": made["preprocess"], "folder": "triton", "device": "cpu"},
    ),
    "make_normalization": lambda made: (
        serving.make_normalization,
        {"preprocess": made["preprocess"]},
    ),
    "denormalize": lambda made: (
        serving.denormalize,
        {"images": np.zeros((1, 8, 8, 3)), "preprocess": made["preprocess"]},
    ),
    **{
        f"Records.{name}": (
            lambda made, name=name, right=right: (getattr(made["dataset"], name), right)
        )
        for name, right in {
            "sample": {"num_records": 3},
            "sample_fraction": {"fraction": 0.5},
            "split": {"train": 0.5, "valid": 0.5},
            "folds": {"count": 2},
            "filter": {"labels": [0]},
            "select": {"ids": [0]},
            "exclude": {"ids": [0]},
            "relabel": {},
            "read": {"record": 0},
            "locate": {"record": 0},
        }.items()
    },
    "Records.union": lambda made: (
        made["dataset"].select([0]).union,
        {"other": made["dataset"].exclude([0])},
    ),
    "InputSpec.ids_of_step": lambda made: (
        made["training"].ids_of_step,
        {"step": 0, "batch_size": 4},
    ),
    **{
        f"Input.{name}": (
            lambda made, name=name, right=right: (getattr(made["train"], name), right)
        )
        for name, right in {"records_of": {"step": 0}, "batch_at": {"step": 0}}.items()
    },
    "Input.blame": lambda made: (made["train"].blame, {"folder": "blame", "loss": "mse"}),
    "Input.fit": lambda made: (
        made["train"].fit,
        {"model": made["model"], "steps_per_epoch": 1, "verbose": 0},
    ),
    "Input.evaluate": lambda made: (made["valid"].evaluate, {"model": made["model"], "verbose": 0}),
    "Input.predict": lambda made: (made["valid"].predict, {"model": made["model"], "verbose": 0}),
    "Input.profile": lambda made: (made["train"].profile, {"model": made["model"], "steps": 1}),
    "Resume": lambda _: (dti.Resume, {"folder": "runs"}),
    "Resume.restore": lambda made: (
        dti.Resume("runs").restore,
        {"model": made["model"], "spec": made["training"], "batch_size": 4},
    ),
    "Resume.is_due": lambda _: (dti.Resume("runs", save_every=1).is_due, {"step": 1}),
}
SLOW = ("export_saved_model", "Input.fit", "Input.evaluate", "Input.predict", "Input.profile")


def list_arguments(function, right):
    """Returns the names of the arguments of a call, of a dataclass also where they are passed on."""
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    names = [name for name in names if name not in ("how", "arguments", "shares")]
    kind = getattr(function, "__self__", None)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        names += [field.name for field in dataclasses.fields(kind)]
    return [*dict.fromkeys([*names, *right])]


@pytest.fixture(autouse=True)
def with_little_memory():
    """A call that takes memory by a number alone fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in CALLS]
)
def test_odd_values(made, name):
    function, right = CALLS[name](made)
    wrong = []
    for argument in list_arguments(function, right):
        for value in ODD:
            if (name, argument) in MEANT and isinstance(value, int) and value == 10**9:
                continue
            for folder in ("model", "triton"):  # which must be new
                shutil.rmtree(folder, ignore_errors=True)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(**{**right, argument: value})
            except dti.InputError as error:
                text = str(error)
                if argument not in text and SAYS.get(argument, argument) not in text:
                    wrong.append((argument, repr(value)[:40], "unnamed", str(error)[:90]))
            except Exception as error:  # what this test is for
                wrong.append((argument, repr(value)[:40], type(error).__name__, str(error)[:90]))
    lines = "\n".join(" | ".join(map(ascii, one)) for one in wrong)
    assert not wrong, f"{name}: {len(wrong)}\n{lines}"


def test_every_public_callable_is_tried():
    tried = {name.partition(".")[0] for name in CALLS}
    assert {*dti.__all__} - tried <= {"__version__", "InputError", "BadRecordError", "Input"}
