"""The README tells the truth: it is short, its examples run, its links and commands exist."""

import ast
import functools
import re

import numpy as np
import pytest
from commands import python
from conftest import ROOT, jpeg
from PIL import Image

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TWO_REPLICAS = """
import tensorflow as tf
if not tf.config.list_physical_devices("GPU"):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
"""


SIX_LINES, QUICKSTART, SEVERAL_GPUS = EXAMPLES


@pytest.mark.slow
def test_examples_run(tmp_path):
    """As they stand; the six lines with fewer and smaller images, the multi-GPU example on two
    logical CPU devices where there is no GPU.
    """
    for number in range(96):
        photo = tmp_path / "photos" / f"class {number % 6}" / f"{number}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes(jpeg(120, 160, seed=number))
    (command,) = re.findall(r"`dali-tf-input (convert [^`]+)`", README)
    run = functools.partial(python, cwd=tmp_path)
    written = run("-m", "dali_tf_input", *command.split())
    assert written.returncode == 0, written.stderr
    six_lines = SIX_LINES
    for long, short in ((", 224)", ", 96)"), ("batch_size=256", "batch_size=32")):
        assert six_lines.count(long) == 2
        six_lines = six_lines.replace(long, short)
    assert six_lines.count("epochs=90") == 2
    six_lines = six_lines.replace("epochs=90", "epochs=1")
    quickstart = run("-c", f"{QUICKSTART}{six_lines}print(*model.history.epoch)")
    assert quickstart.returncode == 0, quickstart.stderr
    assert re.search(r"^\{'accuracy': .*\}$", quickstart.stdout, re.MULTILINE)  # evaluate
    assert re.search(r"^\[[0-5]( [0-5]){11}\]$", quickstart.stdout, re.MULTILINE)  # predict
    assert quickstart.stdout.endswith("\n0\n")  # one epoch of Keras's own fit
    assert (tmp_path / "runs/1/state.json").exists()
    several = run("-c", TWO_REPLICAS + SEVERAL_GPUS)
    assert several.returncode == 0, several.stderr
    assert "for CPU:0, CPU:1;" in several.stdout or "GPU:0" in several.stdout
    assert "images_per_second: " in several.stdout


@pytest.mark.slow
def test_the_page_on_labels_runs(tmp_path):
    """Several labels, regression, segmentation and class weights, from the table that it names."""
    rows = ["path,label,labels,values,mask"]
    for number in range(40):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(80, 96, seed=number))
        mask = Image.fromarray(np.full((80, 96), number % 3, np.uint8))
        mask.save(tmp_path / f"{number}.png")
        classes = " ".join(map(str, range(number % 4)))
        rows.append(f"{number}.jpg,{number % 2},{classes},0.1 0.2 {number / 40},{number}.png")
    (tmp_path / "photos.csv").write_text("\n".join(rows))
    page = (ROOT / "docs" / "labels.md").read_text()
    (command,) = re.findall(r"`dali-tf-input (convert [^`]+)`", page)
    made = python("-m", "dali_tf_input", *command.split(), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    process = python("-c", example, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("loss: ") >= 3
    shape, filename = process.stdout.splitlines()[-2:]
    assert shape.startswith("(16, 64, 64, 3) [")
    assert re.fullmatch(r"\[b'\d+\.jpg'\]", filename)


@pytest.mark.slow
def test_the_page_on_subsets_runs(sample_folder, tmp_path):
    (tmp_path / "records").symlink_to(sample_folder / "data" / "sample")
    page = (ROOT / "docs" / "subsets.md").read_text()
    examples = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    process = python("-c", examples, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert re.search(r"Extent\(file='.*/records/train-0000\d-of-00004', number=\d+", process.stdout)


@pytest.mark.slow
def test_the_page_on_recipes_runs(sample_folder, tmp_path):
    (tmp_path / "records").symlink_to(sample_folder / "data" / "sample")
    page = (ROOT / "docs" / "recipes.md").read_text()
    examples = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    (tmp_path / "recipes.py").write_text(examples.replace("224", "64"))  # it takes a minute less
    process = python("recipes.py", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "'image_2': TensorShape([8, 96, 96, 3])" in process.stdout
    assert "Epoch 3/3" in process.stdout


def test_the_front_door_comes_first_and_is_short():
    assert len(ast.parse(SIX_LINES).body) == 6
    assert len(README[: README.index(SIX_LINES)].splitlines()) <= 20
    assert len([line for line in QUICKSTART.splitlines() if line]) <= 15
    assert len(README.splitlines()) <= 150


def test_commands_and_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))  # in code, not in prose
    assert {"compare", "test", "index", "install", "train", "help", "docs", "gpu-check"} <= verbs
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
    paths = set(re.findall(r"(?:scripts|docs)/\w+\.(?:py|md|ipynb|png)", README))
    paths |= set(re.findall(r"\]\(([^)#:]+)", README))
    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists(), path
