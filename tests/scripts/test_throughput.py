"""The measurements: compare_throughput.py, its rows and its workers."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import fails, load, run
from conftest import SCRIPTS, nightly, numbered_examples, write_tfrecord
from PIL import Image

import dali_tf_input as dti
from support.throughput import worker
from support.throughput.candidates import Candidate

SAMPLE = ["--files=data/sample/train-*"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [
        ["tf_data", "dali_cpu", "decode_only"],
        nightly(
            [
                *("tf_data_serial", "tf_data_by_hand", "tf_data", "tf_data_plain"),
                *("dali_cpu_by_hand", "dali_cpu_bare"),
            ]
        ),
    ],
    ids=["few", "others"],
)
def test_compare_throughput(sample_folder, tmp_path, rows):
    arguments = ["--files=data/sample/train-*", "--seconds=0.2", "--repeats=2", "--batch_size=16"]
    arguments += ["--warmup_batches=1", f"--json={tmp_path}/rows.json"]
    arguments += [f"--plot={tmp_path}/plot.png"]
    backends = f"--backends={','.join(rows)}"
    process = run("compare_throughput.py", *arguments, backends, cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
    said = "the package on tf.data, to decoding alone: " in process.stdout
    assert said == ("decode_only" in rows)
    report = json.loads((tmp_path / "rows.json").read_text())
    assert list(report["rows"]) == rows
    for name in rows:
        row = report["rows"][name]
        speed = row["images_per_second"]
        assert 0 < speed["minimum"] <= speed["median"] <= speed["maximum"]
        assert row["cpu_seconds_per_1000_images"] > 0
        assert row["first_batch_seconds"] > 0
        assert row["peak_memory_bytes"] > 1e8
        assert len(report["windows"][name]) == 2
        assert f"\n{name} " in process.stdout
    assert set(report["rows"]["tf_data"]["ratio_to_tf_data"].values()) == {1.0}
    assert report["versions"]["DALI"].startswith("2.4")
    assert report["num_records"] == 96
    assert report["cores"] == len(os.sched_getaffinity(0))
    assert "TfDataOptions(" in report["options"]["tf_data"]
    assert Image.open(tmp_path / "plot.png").width > 800


def test_the_usual_rows(dataset):
    compare = load("compare_throughput.py")
    compare.FLAGS(["compare", f"--files={dataset.paths[0]}"])
    rows = ["tf_data_serial", "tf_data_by_hand", "tf_data", "tf_data_plain"]
    rows += ["dali_cpu_by_hand", "dali_cpu_bare", "dali_cpu"]
    assert compare.choose_rows([], "buffer") == rows
    assert set(compare.choose_rows([], "global")) >= {"tf_data_global", "dali_cpu_global"}


@pytest.mark.slow
@pytest.mark.nightly
def test_benchmark_store(sample_folder, tmp_path):
    """Each row with its ratio; the images came from the server."""
    arguments = ["--files=data/sample/train-*", "--seconds=0.2", "--repeats=2", "--batch_size=16"]
    arguments += ["--milliseconds=1", f"--json={tmp_path}/store.json"]
    process = run("benchmarks/store.py", *arguments, cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
    rows = json.loads((tmp_path / "store.json").read_text())["rows"]
    names = ["local", "far", "cached", "failing", "far, CPU time without the server's", "index"]
    assert list(rows) == names
    for name, row in rows.items():
        assert 0 < row["minimum"] <= row["median"] <= row["maximum"]
        assert f"\n{name} " in process.stdout


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--backends=dali", "`backends` must be of tf_data_serial"),
        ("--batch_size=97", "at most the 96 records, got 97"),
        ("--seconds=0", "`seconds` must be at least 0.01"),
        ("--repeats=0", "`repeats` must be at least 1"),
        ("--json={}/no/x.json", "there is no folder"),
        ("--plot=x.svg", "`plot` must end in .png, got x.svg"),
        ("--backends=tf_data,dali_gpu", "need an NVIDIA GPU"),
    ],
)
def test_compare_throughput_refuses(sample_folder, tmp_path, argument, message):
    arguments = ["--files=data/sample/train-*", argument.format(tmp_path)]
    fails(run("compare_throughput.py", *arguments, cwd=sample_folder), message)


@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        (["--backends=tf_data,grain"], "grain opencv-python-headless"),
        (["--backends=torch", "--augment=trivial"], "torch opencv-python-headless torchvision"),
        (["--backends=decode_simplejpeg"], "simplejpeg"),
    ],
)
def test_packages_that_are_not_there(sample_folder, monkeypatch, arguments, packages):
    """They are named before anything is measured."""
    module = packages.split()[0]
    monkeypatch.setitem(sys.modules, module, None)
    process = run("compare_throughput.py", *SAMPLE, *arguments, cwd=sample_folder)
    fails(process, f"cannot be measured: No module named {module!r}. pip install {packages}\n")


def test_a_package_that_cannot_be_imported(dataset, monkeypatch):
    """The process that measures says so, and lives."""
    monkeypatch.setitem(sys.modules, "grain", None)
    spec = dti.InputSpec.for_training(dataset, 16, order="buffer")
    candidate = Candidate(dti.TfDataOptions(), "buffer", "grain").to_json()
    task = {"candidate": candidate, "seconds": 0.1, "warmup_batches": 0, "fresh": True}
    answer = worker.Pipelines(spec, 4).answer(task)
    assert "import of grain" in answer["error"]


@pytest.mark.slow
def test_benchmarks_refuse(tmp_path):
    fails(run("compare_throughput.py"), "Name the TFRecord files")
    said = "`num_files` must be whole numbers of at least 1, got 4,x"
    fails(run("benchmarks/index.py", "--num_files=4,x"), said)
    fails(run("benchmarks/index.py", f"--json={tmp_path}/no/x.json"), "there is no folder")


@pytest.mark.slow
def test_compare_throughput_reports_a_row_that_dies(tmp_path):
    """Undecodable records end it with an error, without a hang or half a table."""
    examples = numbered_examples(8)
    examples[3]["image/encoded"] = b"this is no image"
    file = write_tfrecord(tmp_path / "train", examples)
    assert run("index", file).returncode == 0
    arguments = [f"--files={file}", "--batch_size=4", f"--json={tmp_path}/result.json"]
    process = run("compare_throughput.py", *arguments)
    assert process.returncode == 1
    assert "The backends' images were not shown to be the same" in process.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_comparison_of_images(sample_folder, layout):
    arguments = ["--files=data/sample/validation-*", f"--layout={layout}", "--evaluation"]
    process = run("compare_images.py", *arguments, "--most=0.01", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("images      32 of 32: decode, CoverCrop")
    strict = run("compare_images.py", *arguments, "--most=1e-9", cwd=sample_folder)
    assert strict.returncode == 1
    assert "The backends' images differ by 0.00" in strict.stderr


def test_by_hand_does_the_same_work(sample_folder):
    """The baseline by hand yields the package's images: some mirrored, by the same operations."""
    from dali_tf_input import InputSpec, ResizeRandomCrop, TfDataOptions
    from dali_tf_input.backends.build import make_dataset
    from support.throughput import reference

    records = str(sample_folder / "data/sample/train-*")
    crop = ResizeRandomCrop(resize=(224, 224))  # of which there is one
    fields = {"crop": crop, "mirror_probability": 0.0, "order": "buffer"}
    spec = InputSpec.for_training(records, 224, **fields)
    ours = make_dataset(spec, TfDataOptions(), batch_size=96)
    theirs = reference.make_dataset(spec, batch_size=96)
    assert ours.element_spec == theirs.element_spec
    images, labels = (values.numpy() for values in next(iter(ours)))
    theirs, their_labels = (values.numpy() for values in next(iter(theirs)))
    # Several records share a label.
    order, their_order = (
        np.lexsort((np.abs(values).mean(axis=(1, 2, 3)), numbers))
        for values, numbers in ((images, labels), (theirs, their_labels))
    )
    np.testing.assert_array_equal(labels[order], their_labels[their_order])
    mirrored = 0
    for image, other in zip(images[order], theirs[their_order], strict=True):
        plain, flipped = (np.abs(image - view).max() for view in (other, other[:, ::-1]))
        assert min(plain, flipped) < 1e-3
        mirrored += flipped < plain
    assert 20 < mirrored < 76  # of 96


def test_a_measurer_dies_with_its_parent(sample_folder):
    """Also when it is paused, as between its turns, and the parent is killed."""
    code = f"""if True:
        import os, signal, sys
        sys.path.insert(0, "{SCRIPTS}")
        from support.throughput.candidates import Measurer
        measurer = Measurer("--files=data/sample/train-*", "--batch_size=8")
        measurer.start()
        measurer.pause()
        print(measurer._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    words = [sys.executable, "-c", code]
    parent = subprocess.run(words, cwd=sample_folder, capture_output=True, text=True, check=False)
    child = Path(f"/proc/{int(parent.stdout)}/status")
    deadline = time.monotonic() + 60
    while child.exists() and "State:\tZ" not in child.read_text():
        assert time.monotonic() < deadline, "the measurer outlived its parent"
        time.sleep(0.1)
