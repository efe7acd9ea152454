"""Every Python block and every command of the README and the documentation runs."""

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import urllib.parse

import numpy as np
import pytest
import warm
from commands import python
from conftest import QUICK_IMPORTS, ROOT, jpeg, make_once
from PIL import Image
from stores import BUCKET, ask, run_server

import dali_tf_input as dti

BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "skills/dali-tf-input/SKILL.md", *(ROOT / "docs").glob("*.md")]
PAGES = {page.stem: page for page in sorted(PAGES) if BLOCK.search(page.read_text())}
# In place of networks that take minutes to trace, or a download.
NETWORKS = """
import keras


def small_network(weights=None, classes=1000, input_shape=None, include_top=True, **_):
    layers = [keras.Input(input_shape or (64, 64, 3)), keras.layers.Conv2D(4, 3, 4)]
    layers += [keras.layers.GlobalAveragePooling2D()] * (include_top or "pooling" in _)
    layers += [keras.layers.Dense(classes, activation="softmax", dtype="float32")] * include_top
    return keras.Sequential(layers)


for name in ("MobileNet", "MobileNetV2", "MobileNetV3Small"):
    setattr(keras.applications, name, small_network)
"""
MODEL = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
model = small_network(classes=8)
model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
"""
SMALLER = {"224": "64", "batch_size=256": "batch_size=16", "16 * strategy": "6 * strategy"}
SMALLER |= {"epochs=90": "epochs=2", "/data/": "", "/local/": ""}
# What pages print, besides that they end well.
PRINTED = {
    "README": [r"\nEpoch 2/2\n", "images_per_second: ", "for CPU:0, CPU:1;"],
    "distributed_training": [r"\nEpoch 2/2\n", "for CPU:0, CPU:1;"],
    "fine_tuning": [
        "^2 variables are trained$",
        "^LossScaleOptimizer float16$",
        r"^dict_keys\(\['loss'\]\)$",
    ],
    "getting_started": [r"for CPU:0", r"^\{'accuracy': .*\}$", r"^class \d/\d+\.jpg class [0-7]$"],
    "labels": [r"^\(16, 64, 64, 3\) \[", r"^\[b'.*\.jpg'\]$"],
    "problems": [r"Extent\(file='.*/records/train-00000-of-00001', number=\d+"],
    "recipes": [r"'image_2': TensorShape\(\[8, 96, 96, 3\]\)", "Epoch 3/3"],
    "serving": [r"^photos/class 1/1.jpg \d$"],
    "speed": [r"^\d+% of \d+\.\d ms are spent waiting for input$"],
    "training": [r"^\{'accuracy': .*\}$", "for CPU:0, CPU:1;"],
}
LEFT = {"README": "runs/1/state.json", "problems": "mistakes.png", "training": "runs/2/state.json"}
ELSEWHERE = ("--dask", "service", "--files=GLOB")  # what needs other machines, or names no files
# A program of its own: what it sets comes before TensorFlow's first use.
ALONE = ("MultiWorkerMirroredStrategy", "keras.distribution")


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
    made = python("-m", "dali_tf_input", "convert", "photos.csv", "records", cwd=folder)
    assert made.returncode == 0, made.stderr
    tfds = folder / "tensorflow_datasets/oxford_flowers102/2.1.1"
    tfds.mkdir(parents=True)
    for split in ("train", "validation"):
        name = f"{split}-00000-of-00001"
        shutil.copy(
            folder / "records" / name,
            tfds / f"oxford_flowers102-{name.replace('-', '.tfrecord-', 1)}",
        )
    dti.build_index(folder / "records/*-of-*", dti.Checks(verify="schema"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name, folder, tmp_path):
    """Its blocks run in their order, with smaller images and networks."""
    shutil.copytree(folder, tmp_path / "page")
    text = PAGES[name].read_text()
    if "s3://" in text:
        pytest.importorskip("obstore")
    program, alone = NETWORKS + MODEL, []
    for language, block in BLOCK.findall(text):
        for long, short in SMALLER.items():
            block = block.replace(long, short)
        if language == "bash":
            program += "".join(map(call, block.splitlines()))
        elif any(word in block for word in ALONE):
            alone.append(block)
        else:
            program += block
    if "MirroredStrategy()" in program:
        program += "print(train)\n"  # says which replicas it feeds
    (tmp_path / "page.py").write_text(program)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with serve(folder) if "s3://" in text else contextlib.nullcontext({}) as store:
        environment |= store
        process = warm.run([tmp_path / "page.py"], cwd=tmp_path / "page", env=environment)
    assert process.returncode == 0, process.stderr
    for pattern in PRINTED.get(name, ()):
        assert re.search(pattern, process.stdout, re.MULTILINE), (pattern, process.stdout)
    assert (tmp_path / "page" / LEFT.get(name, "")).exists()
    paths = environment["PYTHONPATH"].split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != QUICK_IMPORTS)
    for block in alone:
        on_jax = "keras.distribution" in block
        environment["KERAS_BACKEND"] = "jax" if on_jax else "tensorflow"
        with socket.create_server(("localhost", 0)) as free:
            cluster = {"worker": [f"localhost:{free.getsockname()[1]}"]}
        task = {"type": "worker", "index": 0}
        environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        words, where = ["-c", NETWORKS + block], {"cwd": tmp_path / "page", "env": environment}
        process = python(*words, **where) if on_jax else warm.run(words, **where)
        assert process.returncode == 0, process.stderr


@contextlib.contextmanager
def serve(folder):
    """Serves the photos and records as stored objects; gives what the environment says of it."""
    with run_server() as port:
        for file in sorted(path for path in folder.glob("photos/*/*") if path.stem in "01"):
            name = urllib.parse.quote(str(file.relative_to(folder)))
            ask(port, "PUT", f"/{BUCKET}/{name}", file.read_bytes())
        for file in (folder / "records").glob("*-of-00001"):
            ask(port, "PUT", f"/{BUCKET}/imagenet/{file.name}", file.read_bytes())
        environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
        yield environment | {"AWS_ACCESS_KEY_ID": "secret", "AWS_SECRET_ACCESS_KEY": "secret"}


def call(line: str) -> str:
    """Returns Python that runs a line of a shell if it is one of this package's commands."""
    if not line.startswith("dali-tf-input "):
        return ""
    words = shlex.split(line, comments=True)
    if any(word in line for word in ELSEWHERE):
        words = [*words[:2], "--help"]
    elif words[1] == "convert":
        words += ["--overwrite", "--decoder=none"]  # which takes no second process
    elif words[1] == "preview":  # here, as TensorFlow is imported
        return f"from dali_tf_input.cli.main import main\nassert main({words[1:]}) == 0\n"
    return (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-m', 'dali_tf_input', *{words[1:]}], check=True)\n"
    )
