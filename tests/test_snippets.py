"""Every Python block and every command of the README and the documentation runs.

Two need a program of their own and run only at night: the one on JAX, which only `make
test-nightly` installs, and the one for several workers, whose calls test_multi_worker.py makes.
"""

import contextlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import urllib.parse

import keras
import numpy as np
import pytest
import tensorflow as tf
from commands import load, python, succeeds
from conftest import ROOT, at_night, jpeg, make_once
from PIL import Image
from stores import BUCKET, ask, free_port, run_server, set_credentials

import dali_tf_input as dti
from dali_tf_input.cli.main import main

BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "skills/dali-tf-input/SKILL.md", *(ROOT / "docs").glob("*.md")]
PAGES = {page.stem: page for page in sorted(PAGES) if BLOCK.search(page.read_text())}
SMALLER = {"224": "64", "batch_size=256": "batch_size=16", "16 * strategy": "6 * strategy"}
SMALLER |= {"epochs=90": "epochs=2", "/data/": "", "/local/": ""}
# What pages print, besides that they end well.
PRINTED = {
    "README": [r"\nEpoch 2/2\n", "images_per_second: ", "for CPU:0, CPU:1;"],
    "distributed_training": [r"\nEpoch 2/2\n", "for CPU:0, CPU:1;"],
    "getting_started": [r"for CPU:0", r"^\{'accuracy': .*\}$", r"^class \d/\d+\.jpg class [0-7]$"],
    "labels": [r"^\(16, 64, 64, 3\) \[", r"^\[b'.*\.jpg'\]$"],
    "problems": [r"Extent\(file='.*/records/train-00000-of-00001', number=\d+"],
    "recipes": [r"'image_2': TensorShape\(\[8, 96, 96, 3\]\)", "Epoch 3/3"],
    "speed": [r"^\d+% of \d+\.\d ms are spent waiting for input$"],
    "training": [
        r"^\{'accuracy': .*\}$",
        "for CPU:0, CPU:1;",
        "^2 variables are trained$",
        "^LossScaleOptimizer float16$",
        r"^photos/class 1/1.jpg \d$",
    ],
}
LEFT = {"README": "runs/1/state.json", "problems": "mistakes.png", "training": "runs/2/state.json"}
ELSEWHERE = ("--dask", "service", "--files=GLOB")  # what needs other machines, or names no files
# A program of its own: what it sets comes before TensorFlow's first use.
ALONE = ("MultiWorkerMirroredStrategy", "keras.distribution")


HAS_JAX = importlib.util.find_spec("jax") is not None
NETWORKS = ("MobileNet", "MobileNetV2", "MobileNetV3Small")


class TwoReplicas(tf.distribute.MirroredStrategy):
    """Has two devices by default, of which tests have three."""

    def __init__(self, devices=("CPU:0", "CPU:1")):
        super().__init__([*devices])


def make_small_network(weights=None, classes=1000, input_shape=None, include_top=True, **how):
    """Stands for networks that take minutes to trace, or a download."""
    layers = [keras.Input(input_shape or (64, 64, 3)), keras.layers.Conv2D(4, 3, 4)]
    layers += [keras.layers.GlobalAveragePooling2D()] * (include_top or "pooling" in how)
    layers += [keras.layers.Dense(classes, activation="softmax", dtype="float32")] * include_top
    return keras.Sequential(layers)


# For programs of their own.
SMALL_NETWORKS = f"""
import keras

{inspect.getsource(make_small_network)}
for name in {NETWORKS}:
    setattr(keras.applications, name, make_small_network)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the pages are about: photos of eight classes, a table of them, and TFRecords."""
    return make_once(tmp_path_factory, "pages", make_photos)


def make_photos(folder):
    rows = ["path,label,labels,values,mask"]
    for number in range(120):
        photo = folder / f"photos/class {number % 8}/{number // 8}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes(jpeg(80, 96, seed=number))
        mask = Image.fromarray(np.full((80, 96), number % 3, np.uint8))
        mask.save(folder / f"{number}.png")
        classes = " ".join(map(str, range(number % 4)))
        name = photo.relative_to(folder)
        rows.append(f"{name},{photo.parent.name},{classes},0.1 0.2 {number / 30},{number}.png")
    (folder / "photos.csv").write_text("\n".join(rows))
    words = ["convert", "--decoder=none", f"{folder}/photos.csv", f"{folder}/records"]
    assert main(words) == 0
    tfds = folder / "tensorflow_datasets/oxford_flowers102/2.1.1"
    tfds.mkdir(parents=True)
    for split in ("train", "validation"):
        name = f"{split}-00000-of-00001"
        shutil.copy(
            folder / "records" / name,
            tfds / f"oxford_flowers102-{name.replace('-', '.tfrecord-', 1)}",
        )
    dti.build_index(folder / "records/*-of-*", dti.Checks(verify="schema"))


@pytest.fixture
def page(folder, tmp_path, monkeypatch, checked_here):
    """The folder in which a page runs, on two replicas at most and with small networks."""
    shutil.copytree(folder, tmp_path / "page")
    monkeypatch.chdir(tmp_path / "page")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in NETWORKS:
        monkeypatch.setattr(keras.applications, name, make_small_network)
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", TwoReplicas)
    yield tmp_path / "page"
    keras.mixed_precision.set_global_policy("float32")


def make_model():
    model = make_small_network(classes=8)
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page(name):
    """They compile, and its commands have the flags that it gives them."""
    for language, block in blocks_of(name):
        if language == "python":
            compile(block, f"{name}.md", "exec")
        for line in block.splitlines() if language == "bash" else ():
            if line.startswith("dali-tf-input "):
                _, command, *words = shlex.split(line, comments=True)
                load(command).FLAGS(["", *words])


def test_the_readme_runs(folder, page, monkeypatch, capfd):
    """With the lines that other pages begin with, too."""
    run_page("README", folder, page, monkeypatch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAGES if name != "README"])
def test_a_page_runs(name, folder, page, monkeypatch, capfd):
    run_page(name, folder, page, monkeypatch, capfd)


def test_what_is_expected_is_of_pages_that_are_there():
    assert {*PRINTED, *LEFT} <= {*PAGES}


def blocks_of(name):
    return BLOCK.findall(PAGES[name].read_text())


def run_page(name, folder, page, monkeypatch, capfd):
    """Runs the blocks of a page in their order, with smaller images and networks."""
    text, alone = PAGES[name].read_text(), []
    if "s3://" in text:
        pytest.importorskip("obstore")
    names = {"__name__": "__main__", "model": make_model()}
    elsewhere = blocks_of("README") if name != "README" else ()
    with serve(folder, monkeypatch) if "s3://" in text else contextlib.nullcontext():
        for language, block in (one for one in blocks_of(name) if one not in elsewhere):
            for long, short in SMALLER.items():
                block = block.replace(long, short)
            if language == "bash":
                for line in block.splitlines():
                    call(line)
            elif any(word in block for word in ALONE):
                alone.append(block)
            else:
                exec(compile(block, f"{name}.md", "exec"), names)
                print(names.get("train"))  # says which replicas it feeds
    printed = capfd.readouterr().out
    for pattern in PRINTED.get(name, ()):
        assert re.search(pattern, printed, re.MULTILINE), (pattern, printed)
    assert (page / LEFT.get(name, "")).exists()
    for block in at_night([], alone):
        if HAS_JAX or "keras.distribution" not in block:
            run_alone(block, page)


def run_alone(block, folder):
    """Runs a block as a program: of one worker, or on JAX."""
    cluster = {"worker": [f"localhost:{free_port()}"]}
    environment = os.environ | {
        "KERAS_BACKEND": "jax" if "keras.distribution" in block else "tensorflow",
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}),
    }
    process = python("-c", SMALL_NETWORKS + block, cwd=folder, env=environment)
    succeeds(process, quiet=False)


@contextlib.contextmanager
def serve(folder, monkeypatch):
    """Serves the photos and records as stored objects."""
    with run_server() as port:
        for file in sorted(path for path in folder.glob("photos/*/*") if path.stem in "01"):
            name = urllib.parse.quote(str(file.relative_to(folder)))
            ask(port, "PUT", f"/{BUCKET}/{name}", file.read_bytes())
        for file in (folder / "records").glob("*-of-00001"):
            ask(port, "PUT", f"/{BUCKET}/imagenet/{file.name}", file.read_bytes())
        set_credentials(monkeypatch, f"http://127.0.0.1:{port}")
        yield


def call(line):
    """Runs a line of a shell if it is one of this package's commands."""
    if not line.startswith("dali-tf-input "):
        return
    _, command, *words = shlex.split(line, comments=True)
    if any(word in line for word in ELSEWHERE):
        words = ["--help"]
    elif command == "convert":
        words += ["--overwrite", "--decoder=none"]  # which takes no second process
    assert main([command, *words]) == 0, line
