"""train.py: what it prints, resumes and refuses."""

import re

import keras
import pytest
from commands import fails, load, run, run_cold
from conftest import nightly, numbered_examples, slowly, write_tfrecord
from models import make_model

from dali_tf_input.cli import command

SAMPLE = ["--files=data/sample/train-*", "--validation_files=data/sample/validation-*"]


@pytest.mark.parametrize("backend", ["dali_cpu", nightly("tf_data")])
@pytest.mark.slow
def test_train_on_two_replicas(sample_folder, backend):
    arguments = [*SAMPLE, f"--backend={backend}", "--replicas=2", "--epochs=5", "--image_size=48"]
    process = run_cold("train.py", *arguments, "--learning_rate=0.005", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""  # quiet when nothing is wrong
    assert re.search(r"^input +.* for CPU:0, CPU:1; ", process.stdout, re.MULTILINE)
    assert re.findall(r"^Epoch (\d)/5$", process.stdout, re.MULTILINE) == list("12345")
    losses = list(map(float, re.findall(r" - loss: ([\d.]+)", process.stdout)))
    assert len(losses) == 5
    assert losses[-1] < 0.8 * losses[0]
    assert "validation accuracy" in process.stdout


@pytest.mark.slow
def test_train_chooses_a_backend(sample_folder):
    process = run("train.py", SAMPLE[0], "--epochs=1", "--image_size=32", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert "input       " in process.stdout
    assert "validation  " not in process.stdout


@pytest.mark.slow
def test_train_resumes(sample_folder, tmp_path):
    """On one replica, then on two; what changed is refused, what is done is done."""
    arguments = [*SAMPLE, "--image_size=32", f"--resume={tmp_path}/run", "--save_every=2"]
    first = run("train.py", *arguments, "--epochs=1", cwd=sample_folder)
    assert first.returncode == 0, first.stderr
    assert "validation  32 records" in first.stdout
    second = run("train.py", *arguments, "--epochs=2", "--replicas=2", cwd=sample_folder)
    assert second.returncode == 0, second.stderr
    assert second.stderr == ""
    assert "Epoch 2/2" in second.stdout
    assert "Epoch 1/2" not in second.stdout
    done = run("train.py", *arguments, "--epochs=2", cwd=sample_folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Epoch " not in done.stdout
    assert "in 2 epochs" in done.stdout
    process = run("train.py", *arguments, "--epochs=3", "--seed=1", cwd=sample_folder, here=True)
    fails(process, "`seed` was 0, is 1")
    process = run("train.py", *arguments, "--order=buffer", cwd=sample_folder, here=True)
    fails(process, "--resume needs --order=global, got buffer")
    process = run(
        "train.py", *arguments, "--epochs=3", "--num_classes=50", cwd=sample_folder, here=True
    )
    fails(process, "belongs to training of another model", ".units` was 8, is 50")


@pytest.mark.slow
def test_train_augments(sample_folder):
    arguments = [*SAMPLE, "--replicas=2", "--epochs=1", "--image_size=32"]
    process = run("train.py", *arguments, "--augment=trivial,erasing", cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
    assert "validation accuracy" in process.stdout


@pytest.mark.parametrize("network", [slowly("small"), nightly("ResNet-50")])
def test_the_resnet50_recipe(sample_folder, monkeypatch, capsys, network):
    """Some steps of it."""
    recipe = load("recipes/resnet50_imagenet.py")
    if network == "small":
        monkeypatch.setattr(recipe, "make_resnet50", lambda _, *sizes: make_model(*sizes))
    monkeypatch.chdir(sample_folder)
    files = [f"--{part}=data/sample/{part}-*" for part in ("train", "validation")]
    arguments = ["--num_classes=8", "--image_size=32", "--batch_size=8", "--epochs=1"]
    assert command.run(recipe.main, recipe.FLAGS, [*files, *arguments, "--max_steps=2"]) == 0
    assert re.search(r"^top-1       \d", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_the_network_of_the_resnet50_recipe():
    model = load("recipes/resnet50_imagenet.py").make_resnet50(keras, 224, 1000)
    assert model.count_params() == 25_610_152  # of torchvision's, with the moving averages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch_size=97"], "at most the number of records, 96, got 97"),
        slowly(["--batch_size=9", "--replicas=2"], "multiple of the 2 replicas"),
        (["--epochs=0"], "`epochs` must be at least 1, got 0"),
        (["--replicas=0"], "`replicas` must be at least 1"),
        (["--save=model.h5"], "`save` must end in .keras, got model.h5"),
        (["--save={}/no/model.keras"], "there is no folder"),
        (["--save={}/file/m.keras"], "there is no folder {}/file"),
        (["--label_key=label"], "`label.key` 'label' is not in the records, which hold"),
        (["--save_every=2"], "--save_every is for --resume=FOLDER"),
    ],
)
def test_train_refuses(sample_folder, tmp_path, arguments, message):
    (tmp_path / "file").touch()
    arguments = [SAMPLE[0], *(one.format(tmp_path) for one in arguments)]
    here = "--replicas=2" not in arguments  # which makes devices of its own
    process = run("train.py", *arguments, cwd=sample_folder, here=here)
    fails(process, message.format(tmp_path))


def test_train_needs_files_and_classes(dataset):
    fails(run("train.py", here=True), "Name the TFRecord files: --files='path/train-*'")
    fails(run("train.py", "--files=none-*", here=True), "No file matches 'none-*'")
    process = run("train.py", f"--files={dataset.paths[0]}", here=True)
    fails(process, "The number of classes is unknown: there is no")


@pytest.mark.slow
def test_labels_that_do_not_name_all_classes(tmp_path):
    """Too few of them, or another encoding, are an error before training, not in it."""
    file = write_tfrecord(tmp_path / "train", numbered_examples(8))
    assert run("index", file, "--verify=schema").returncode == 0
    arguments = [f"--files={file}", "--epochs=1", "--image_size=8", "--batch_size=4"]
    (tmp_path / "labels.txt").write_text("a\nb\n")
    said = (
        "There are 2 classes by labels.txt, and labels go up to 7: --num_classes must be above it"
    )
    fails(run("train.py", *arguments, here=True), said)
    said = "There are 7 classes by --num_classes, and labels go up to 7"
    fails(run("train.py", *arguments, "--num_classes=7", here=True), said)
    (tmp_path / "labels.txt").write_text("\n")
    fails(run("train.py", *arguments, here=True), "labels.txt names no label")
    (tmp_path / "labels.txt").write_bytes(b"\xe9\n" * 8 + b"\n")
    fails(run("train.py", *arguments, here=True), "labels.txt is not UTF-8")
