"""The examples in the docstrings of the public names run, each in a folder of records."""

import doctest
import re
import shutil

import keras
import models
import pytest
from conftest import jpeg, write_tfrecord

import dali_tf_input as dti
from support import site

PUBLIC = site.list_public()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the examples are about: 24 records for each split, and 3 files of images."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "records").mkdir()
    for split in ("train", "validation", "test"):
        examples = [
            {"image/encoded": jpeg(240, 320, seed=label), "image/class/label": label}
            for label in range(1, 25)
        ]
        write_tfrecord(folder / f"records/{split}-00000-of-00001", examples)
    dti.build_index(folder / "records/*-of-*", dti.Checks(verify="schema"))
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(jpeg(240, 320))
    return folder


def make_model():
    return models.make_model(224, 25, keras.layers.GlobalMaxPool2D())


def make_train():
    return dti.load(dti.InputSpec.for_training("records/train-*", 224), batch_size=8)


@pytest.fixture
def names(name, folder, tmp_path, monkeypatch):
    """The public names, those files in a folder of its own, and a model and an input if used."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    source = "".join(example.source for found in find(name) for example in found.examples)
    made = {"model": make_model, "train": make_train}
    values = {key: make() for key, make in made.items() if re.search(rf"\b{key}\b[.,)]", source)}
    values["paths"] = [tmp_path / f"{number}.jpg" for number in range(3)]
    return values | {public: getattr(dti, public) for public in dti.__all__}


def find(name):
    """Returns the docstrings of a public name that hold examples."""
    found = doctest.DocTestFinder().find(PUBLIC[name], name)
    return [example for example in found if example.examples]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_its_examples_run(name, names):
    examples = find(name)
    assert examples, f"{name} shows no example"
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    for example in examples:
        example.globs = dict(names)
        assert not runner.run(example).failed, f"see the output: {example.name}"
