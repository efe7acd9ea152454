"""train.py: what it prints, resumes and refuses; the recipe of ResNet-50."""

import re

import pytest
import tensorflow as tf
from commands import fails, run, run_cold, succeeds
from conftest import at_night, numbered_examples, write_tfrecord
from models import make_model

from recipes import resnet50_imagenet

SAMPLE = ["--files=data/sample/train-*", "--validation_files=data/sample/validation-*"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", at_night(["dali_cpu"], ["dali_cpu", "tf_data"]))
def test_train_on_two_replicas_and_resume_on_one(sample_folder, tmp_path, monkeypatch, backend):
    """It learns; what is done is done. By day in this process, which has two devices already."""
    start = at_night(run, run_cold)
    if start is run:
        monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *_: None)
    arguments = [*SAMPLE, f"--backend={backend}", "--image_size=48", "--learning_rate=0.005"]
    arguments += [f"--resume={tmp_path}/run", "--save_every=2"]
    process = succeeds(
        start("train.py", *arguments, "--replicas=2", "--epochs=5", cwd=sample_folder)
    )
    assert re.search(r"^input +.* for CPU:0, CPU:1; ", process.stdout, re.MULTILINE)
    assert "validation  32 records" in process.stdout
    assert re.findall(r"^Epoch (\d)/5$", process.stdout, re.MULTILINE) == list("12345")
    losses = list(map(float, re.findall(r" - loss: ([\d.]+)", process.stdout)))
    assert len(losses) == 5
    assert losses[-1] < 0.8 * losses[0]
    assert "validation accuracy" in process.stdout

    def go_on(*more):
        return run("train.py", *arguments, *more, cwd=sample_folder)

    process = succeeds(go_on("--epochs=6"))
    assert re.findall(r"^Epoch (\d)/6$", process.stdout, re.MULTILINE) == ["6"]
    done = succeeds(go_on("--epochs=6"))
    assert "Epoch " not in done.stdout
    assert "in 6 epochs" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("network", at_night(["small"], ["small", "ResNet-50"]))
def test_the_resnet50_recipe(sample_folder, monkeypatch, capsys, network):
    """Some steps of it; by default with a smaller network."""
    if network == "small":
        monkeypatch.setattr(resnet50_imagenet, "make_resnet50", make_model)
    monkeypatch.chdir(sample_folder)
    files = [f"--{part}=data/sample/{part}-*" for part in ("train", "validation")]
    words = ["--num_classes=8", "--image_size=32", "--batch_size=8", "--epochs=1"]
    arguments = resnet50_imagenet.read_arguments([*files, *words, "--max_steps=2"])
    resnet50_imagenet.main(arguments)
    assert re.search(r"^top-1       \d", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.nightly
def test_the_network_of_the_resnet50_recipe():
    model = resnet50_imagenet.make_resnet50(224, 1000)
    assert model.count_params() == 25_610_152  # of torchvision's, with the moving averages


REFUSED = {
    "--batch_size=25": "at most the number of records, 24, got 25",
    "--save=model.h5": "`save` must end in .keras, got model.h5",
    "--save=file/model.keras": "there is no folder file",
    "--label_key=label": "`label.key` 'label' is not in the records, which hold",
    "--save_every=2": "--save_every is for --resume=FOLDER",
    "--resume=x --order=buffer": "--resume needs --order=global, got buffer",
    "--service=grpc://host:1 --backend=dali_cpu": "--service is for the tf.data backend",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_train_refuses(files, tmp_path, flags):
    (tmp_path / "file").touch()
    fails(run("train.py", files, "--num_classes=24", *flags.split(), cwd=tmp_path), REFUSED[flags])


def test_train_needs_classes(dataset):
    process = run("train.py", f"--files={dataset.paths[0]}")
    fails(process, "The number of classes is unknown: there is no")


def test_labels_that_do_not_name_all_classes(tmp_path):
    """Too few of them are an error before training, not in it."""
    file = write_tfrecord(tmp_path / "train", numbered_examples(8))
    assert run("index", file, "--verify=schema").returncode == 0
    arguments = [f"--files={file}", "--epochs=1", "--image_size=8", "--batch_size=4"]
    (tmp_path / "labels.txt").write_text("a\nb\n")
    said = "classes by labels.txt, and labels go up to 7: --num_classes must be above it"
    fails(run("train.py", *arguments), f"There are 2 {said}")
    said = "There are 7 classes by --num_classes, and labels go up to 7"
    fails(run("train.py", *arguments, "--num_classes=7"), said)
