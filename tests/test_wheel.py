"""The wheel, in an environment of its own: what `pip install` gives a user, without a clone beside
it.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, jpeg, write_tfrecord
from packaging.requirements import Requirement
from test_snippets import BLOCK, SMALL_NETWORKS

pytestmark = pytest.mark.wheel

KERNEL = """
from dali_tf_input.backends.tf_native import uses_native
print("native:", uses_native("auto"))
"""


def find_required(names, without):
    """Returns the distributions that pip would install with `names`, but for some."""
    found, queue = {}, [*names]
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found or name in without:
            continue
        found[name] = importlib.metadata.distribution(name)
        queue += list_names(found[name])
    return found.values()


def list_names(distribution):
    requirements = map(Requirement, distribution.requires or ())
    return [
        one.name for one in requirements if not one.marker or one.marker.evaluate({"extra": ""})
    ]


def link(distributions, folder):
    """Puts distributions into the packages of another environment: nothing is downloaded."""
    for distribution in distributions:
        for file in distribution.files:
            path, own = Path(file), Path(distribution.locate_file(file))
            if path.parts[0] == ".." or "__pycache__" in path.parts:
                continue
            if path.parts[0] not in ("nvidia", "google"):  # which several distributions share
                path, own = Path(path.parts[0]), Path(distribution.locate_file(path.parts[0]))
            target = folder / path
            if not target.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(own)


WITHOUT = {"plugin": set(), "DALI": {"nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12"}}


@pytest.fixture(scope="module", params=[*WITHOUT])
def python(tmp_path_factory, request):
    """Returns the Python of an environment as `pip install` makes it, without the plugin, or DALI.

    It holds the wheel and what that requires, not what the tests or the documents need besides.
    """
    (wheel,) = (ROOT / "dist").glob("*.whl")  # of `make wheel`
    folder = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    (own,) = importlib.metadata.distributions(path=[str(packages)], name="dali_tf_input")
    link(find_required(list_names(own), WITHOUT[request.param]), packages)
    return python


def execute(python, folder, *words, fails=False):
    """Runs Python in `folder`, which is not the clone; returns what it printed, or its error."""
    path = os.environ["PATH"].replace(f"{ROOT}/tests/no_gpu:", "")
    environment = {**os.environ, "PATH": path}
    environment.pop("PYTHONPATH", None)
    process = subprocess.run(
        [python, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == fails, process.stderr + process.stdout
    assert "Traceback" not in process.stderr
    return process.stderr if fails else process.stdout


def test_from_photos_to_predictions(python, tmp_path):
    """Each step of getting started, the six lines of the README, and every command."""
    for number in range(48):
        photo = tmp_path / "photos" / ("cat" if number % 2 else "dog") / f"{number}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes(jpeg(60, 80, seed=number))
    where = execute(python, tmp_path, "-c", "import dali_tf_input; print(dali_tf_input.__file__)")
    assert where.startswith(str(python.parent.parent))
    program = python.parent / "dali-tf-input"
    assert "index    index and validate TFRecords" in execute(program, tmp_path)
    for name in ("index", "convert", "preview", "explore", "card", "predict", "doctor", "service"):
        assert f"\n\nexample: dali-tf-input {name} " in execute(program, tmp_path, name, "--help")

    for command in read_blocks("docs/getting_started.md", "bash"):
        name, *words = shlex.split(command)
        if name == "dali-tf-input":
            files = [path for word in words for path in sorted(tmp_path.glob(word)) or [word]]
            printed = execute(program, tmp_path, *(files if words[0] == "index" else words))
            assert words[0] != "convert" or "classes     2" in printed
    assert (tmp_path / "sheet.png").exists()
    assert (tmp_path / "page.html").exists()
    (tmp_path / "page.py").write_text(
        SMALL_NETWORKS
        + "".join(read_blocks("docs/getting_started.md", "python"))
        + AFTERWARDS
        + KERNEL
    )
    printed = execute(python, tmp_path, "page.py")
    assert re.search(r"^\{'accuracy': ", printed, re.MULTILINE)
    assert f"native: {bool(shutil.which('g++'))}" in printed
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "six.lines.py").write_text(SMALL_NETWORKS + SIX_LINES.format(read_six_lines()))
    assert "val_loss" in execute(python, tmp_path, "six.lines.py")

    pictures = execute(program, tmp_path, "predict", "served/1", "photos")
    assert len(pictures.splitlines()) == 48 + 1
    assert "dataset_info.json" in execute(program, tmp_path, "card", "--overwrite", *RECORDS)
    report = execute(program, tmp_path, "doctor", "--files=records/train-*-of-?????")
    assert "No problems found, 1 warning." in report


RECORDS = [f"records/{split}-00000-of-00001" for split in ("train", "validation")]
AFTERWARDS = """
dti.serving.export_saved_model(model, valid.spec, "served/1")
"""
SIX_LINES = """
model = make_small_network(classes=2, input_shape=(224, 224, 3))
model.compile("sgd", "sparse_categorical_crossentropy")
{}
"""


def read_blocks(page, language):
    blocks = [block for kind, block in BLOCK.findall((ROOT / page).read_text()) if kind == language]
    return "".join(blocks).splitlines() if language == "bash" else blocks


def read_six_lines():
    """Returns the program of the README, for few photos."""
    program = read_blocks("README.md", "python")[0]
    return program.replace("batch_size=256", "batch_size=4").replace("epochs=90", "epochs=1")


def test_what_is_missing_is_named(python, tmp_path):
    """Before anything starts, with the command that installs it."""
    write_tfrecord(tmp_path / "train-0", [{"image": jpeg(20, 20), "label": 0}] * 4)
    program = python.parent / "dali-tf-input"
    assert "1 indexed" in execute(program, tmp_path, "index", "--verify=decode", "train-0")
    for words, package in (
        (["preview", "--files=train-0", "--backend=dali_cpu"], "nvidia-dali-"),
        (["explore", "--files=train-0", "--near_duplicates"], "'imagehash>="),
        (["index", "s3://bucket/x-0"], "obstore"),
        (["index", "--dask=tcp://host:1", "train-0"], "'distributed>="),
    ):
        assert re.search(
            rf"pip install .*{package}", execute(program, tmp_path, *words, fails=True)
        )
    program = "import dali_tf_input as dti\n" + USES_DALI
    assert "pip install" in execute(python, tmp_path, "-c", program)


USES_DALI = """
try:
    dti.load(dti.InputSpec.for_training("train-0", 16), dti.DaliOptions(device='cpu'), batch_size=2)
except dti.InputError as error:
    print(error)
"""
