"""The scripts, run as a user would run them: what they print, what they write, and how they fail."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, jpeg, numbered_examples, write_tfrecord
from PIL import Image

from dali_tf_input import DatasetSpec
from dali_tf_input.tfrecord import decode_example, read_record, scan_records


def run(script, *arguments, cwd=None, **environment):
    """Runs a script; returns the finished process."""
    return subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def fails(process, *parts):
    """Checks that a script failed with one line on stderr for each mistake, and no traceback."""
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert process.stderr.startswith("error: "), process.stderr
    for part in parts:
        assert part in process.stderr


def read_features(file):
    return [decode_example(read_record(str(file), offset)) for offset, _ in scan_records(str(file))]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of 10, 7 and 1 JPEGs; the files' numbers are their sizes."""
    root = tmp_path_factory.mktemp("photos")
    for class_name, count in (("zebra", 10), ("ant", 7), ("bee hive", 1)):
        (root / class_name).mkdir()
        for number in range(count):
            (root / class_name / f"{number}.{'JPEG' if number % 2 else 'jpg'}").write_bytes(jpeg(20 + number, 30 + number))
    (root / "labels.csv").write_text("not a class")
    return root


def test_index(tmp_path):
    good = write_tfrecord(tmp_path / "train-0", numbered_examples(3))
    process = run("index_tfrecords.py", tmp_path / "train-*")
    assert process.returncode == 0
    assert process.stdout == "3 records in 1 files: 1 indexes written, 0 already there.\n"
    assert process.stderr == ""
    assert len(Path(good + ".idx").read_text().splitlines()) == 3
    assert "0 indexes written, 1 already there" in run("index_tfrecords.py", tmp_path / "train-*").stdout
    assert "1 indexes written" in run("index_tfrecords.py", "--force", tmp_path / "train-*").stdout


def test_index_of_good_and_bad_files(tmp_path):
    """The good files are indexed, each bad one is named, nothing is left of them, and the exit code is 1."""
    good = write_tfrecord(tmp_path / "a", numbered_examples(3))
    cut = write_tfrecord(tmp_path / "b", numbered_examples(2))
    os.truncate(cut, os.path.getsize(cut) - 1)
    (tmp_path / "c").write_bytes(b"\x1f\x8b rest of a gzip file")
    (tmp_path / "d").touch()
    process = run("index_tfrecords.py", f"--index_dir={tmp_path}/index", tmp_path / "?")
    fails(process, f"{cut}: byte ", "c: byte 0: expected a TFRecord header, found GZIP", "found an empty file", "3 of 4 files")
    assert "3 records in 1 files: 1 indexes written" in process.stdout
    assert os.listdir(tmp_path / "index") == [os.path.basename(good) + ".idx"]


def test_index_without_files(tmp_path):
    fails(run("index_tfrecords.py", tmp_path / "none-*"), "No file matches")
    fails(run("index_tfrecords.py"), "at least one TFRecord file")
    fails(run("index_tfrecords.py", tmp_path), "is a directory")


def test_index_imports_no_tensorflow(tmp_path):
    write_tfrecord(tmp_path / "a", numbered_examples(1))
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    assert run("index_tfrecords.py", tmp_path / "a", PYTHONPATH=str(tmp_path)).returncode == 0


def test_make_tfrecords(tmp_path, photos):
    process = run("make_tfrecords.py", "--validation_fraction=0.2", "--num_files=3", photos, tmp_path / "out")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("15 train and 3 validation images of 3 classes\n4 files, ")
    assert f"make index DATA='{tmp_path}/out/*-of-*'" in process.stdout
    assert sorted(os.listdir(tmp_path / "out")) == [
        "labels.txt",
        *(f"train-0000{number}-of-00003" for number in range(3)),
        "validation-00000-of-00001",
    ]
    assert (tmp_path / "out" / "labels.txt").read_text() == "ant\nbee hive\nzebra\n"
    train = [record for number in range(3) for record in read_features(tmp_path / "out" / f"train-0000{number}-of-00003")]
    validation = read_features(tmp_path / "out" / "validation-00000-of-00001")
    seen = []
    for record in train + validation:
        values = {key: value[0] for key, (_, value) in record.items()}
        text, filename = values["image/class/text"].decode(), values["image/filename"].decode()
        assert values["image/class/label"] == ["ant", "bee hive", "zebra"].index(text)
        assert values["image/encoded"] == (photos / text / filename).read_bytes()
        number = int(filename.split(".")[0])
        assert (values["image/height"], values["image/width"]) == (20 + number, 30 + number)
        seen.append((text, filename))
    assert len(set(seen)) == len(seen) == 18
    # A fifth of each class, to the nearest image, and never a whole class.
    assert sorted(record["image/class/text"][1][0] for record in validation) == [b"ant", b"zebra", b"zebra"]
    texts = [record["image/class/text"][1][0] for record in train]
    assert texts != sorted(texts)  # shuffled


def test_make_tfrecords_follows_the_seed(tmp_path, photos):
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run("make_tfrecords.py", f"--seed={seed}", "--num_files=1", photos, tmp_path / out).returncode == 0
    first, same, other = ((tmp_path / out / "train-00000-of-00001").read_bytes() for out in "abc")
    assert first == same != other


def test_make_tfrecords_refuses(tmp_path, photos):
    out = tmp_path / "out"
    fails(run("make_tfrecords.py", photos), "Name the folder of images and the folder to write to")
    fails(run("make_tfrecords.py", tmp_path / "none", out), "is no folder")
    (tmp_path / "empty" / "class").mkdir(parents=True)
    fails(run("make_tfrecords.py", tmp_path / "empty", out), "holds no file that ends in .jpg or .jpeg")
    fails(run("make_tfrecords.py", tmp_path / "empty" / "class", out), "has no sub-folders")
    fails(run("make_tfrecords.py", "--num_files=99", photos, out), "cannot fill 99 files")
    fails(run("make_tfrecords.py", "--validation_fraction=1", photos, out), "`validation_fraction` must be in [0, 1), got 1.0")
    bad = shutil.copytree(photos, tmp_path / "bad")
    (bad / "ant" / "png.jpg").write_bytes(jpeg(9, 9, image_format="PNG"))
    (bad / "ant" / "text.jpg").write_text("hello")
    fails(run("make_tfrecords.py", bad, out), "2 of 20 images cannot be used", "png.jpg: a PNG, not a JPEG", "text.jpg: ")
    assert not out.exists()


def test_make_tfrecords_does_not_mix_sets(tmp_path, photos):
    assert run("make_tfrecords.py", "--num_files=2", photos, tmp_path).returncode == 0
    assert run("make_tfrecords.py", "--num_files=2", photos, tmp_path).returncode == 0  # the same set: replaced
    fails(run("make_tfrecords.py", "--num_files=3", photos, tmp_path), "holds 2 files of another set")


def test_sample_data_resembles_imagenet(tmp_path):
    process = run("make_sample_tfrecords.py", "--num_images=400", "--num_validation_images=8", tmp_path)
    assert process.returncode == 0, process.stderr
    assert "400 train and 8 validation images of 8 classes" in process.stdout
    records = [record for path in sorted(tmp_path.glob("train-*")) for record in read_features(path)]
    column = {key: [record[key][1][0] for record in records] for key in records[0]}
    assert len(records) == 400
    assert np.mean(column["image/height"]) == pytest.approx(401, rel=0.05)
    assert np.mean(column["image/width"]) == pytest.approx(468, rel=0.05)
    assert np.mean([len(encoded) for encoded in column["image/encoded"]]) == pytest.approx(110e3, rel=0.07)
    assert sorted(set(column["image/class/label"])) == list(range(8))
    import io

    modes = [Image.open(io.BytesIO(encoded)).mode for encoded in column["image/encoded"]]
    assert modes.count("L") == 8  # 2%
    first = Image.open(io.BytesIO(column["image/encoded"][0]))
    assert first.size == (column["image/width"][0], column["image/height"][0])


def test_make_tfrecords_leaves_no_old_validation_split(tmp_path, photos):
    assert run("make_tfrecords.py", "--num_files=2", photos, tmp_path).returncode == 0
    again = run("make_tfrecords.py", "--num_files=2", "--validation_fraction=0", photos, tmp_path)
    fails(again, "holds 1 files of another set")


def test_sample_data_refuses(tmp_path):
    fails(run("make_sample_tfrecords.py", "--num_images=-2", tmp_path / "x"), "`num_images` must be at least 1")
    fails(run("make_sample_tfrecords.py", "--num_images=2", tmp_path / "x"), "2 train images cannot fill 4 files")
    fails(run("make_sample_tfrecords.py", "--seed=-1", tmp_path / "x"), "`seed` must be at least 0")
    fails(run("make_sample_tfrecords.py"), "Name one folder")
    assert not (tmp_path / "x").exists()


def test_sample_data_follows_the_seed(tmp_path):
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        arguments = ("--num_images=8", "--num_validation_images=1", "--num_files=1", f"--seed={seed}", tmp_path / out)
        assert run("make_sample_tfrecords.py", *arguments).returncode == 0
    first, same, other = ((tmp_path / out / "train-00000-of-00001").read_bytes() for out in "abc")
    assert first == same != other


@pytest.mark.parametrize("backend", ["dali_cpu", "tf_data"])
def test_train_on_two_replicas(sample_folder, backend):
    process = run(
        "train.py",
        "--files=data/sample/train-*",
        "--validation_files=data/sample/validation-*",
        f"--backend={backend}",
        "--replicas=2",
        "--epochs=5",
        "--image_size=48",
        "--learning_rate=0.005",
        cwd=sample_folder,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""  # quiet when nothing is wrong
    assert "replicas    2: CPU:0, CPU:1" in process.stdout
    lines = [line.split() for line in process.stdout.splitlines()]
    epochs = [line for line in lines if line and line[0].isdigit()]
    assert [line[0] for line in epochs] == ["1", "2", "3", "4", "5"]
    assert float(epochs[-1][1]) < 0.8 * float(epochs[0][1])  # the training loss falls
    assert "validation accuracy" in process.stdout


def test_train_chooses_a_backend(sample_folder):
    process = run("train.py", "--files=data/sample/train-*", "--epochs=1", "--image_size=32", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert "input       " in process.stdout
    assert "validation  0 images" in process.stdout


def test_train_refuses(sample_folder, dataset, tmp_path):
    sample = "--files=data/sample/train-*"
    fails(run("train.py"), "Name the TFRecord files: --files='path/train-*'")
    fails(run("train.py", "--files=none-*"), "No file matches 'none-*'")
    fails(run("train.py", sample, "--global_batch_size=97", cwd=sample_folder), "at most the number of records, 96, got 97")
    fails(run("train.py", sample, "--global_batch_size=9", "--replicas=2", cwd=sample_folder), "multiple of the 2 replicas")
    fails(run("train.py", sample, "--epochs=0", cwd=sample_folder), "`epochs` must be at least 1, got 0")
    fails(run("train.py", sample, "--replicas=0", cwd=sample_folder), "`replicas` must be at least 1")
    fails(run("train.py", sample, "--label_key=label", cwd=sample_folder), "`label_key` 'label' is not in the first record")
    fails(run("train.py", f"--files={dataset.files[0]}"), "labels.txt to count the classes by: give their number")


def test_compare_throughput(sample_folder, tmp_path):
    process = run(
        "compare_throughput.py",
        "--files=data/sample/train-*",
        "--seconds=0.2",
        "--repeats=2",
        "--warmup_batches=1",
        "--batch_size=16",
        f"--json={tmp_path}/result.json",
        f"--plot={tmp_path}/plot.png",
        cwd=sample_folder,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    report = json.loads((tmp_path / "result.json").read_text())
    rows = ["tf_data_serial", "tf_data_by_hand", "tf_data", "dali_cpu_bare", "dali_cpu"]
    assert list(report["rows"])[:5] == rows
    for name in rows:
        row = report["rows"][name]
        speed = row["images_per_second"]
        assert 0 < speed["minimum"] <= speed["median"] <= speed["maximum"]
        assert row["cpu_seconds_per_1000_images"] > 0
        assert row["first_batch_seconds"] > 0
        assert row["peak_memory_bytes"] > 1e8
        assert len(report["windows"][name]["windows"]) == 2
        assert f"\n{name} " in process.stdout
    assert report["rows"]["tf_data"]["ratio_to_tf_data"] == {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    assert report["evaluation_images"]["mean_absolute_difference"] < 0.01
    assert report["versions"]["DALI"].startswith("2.4")
    assert report["dataset"]["num_records"] == 96
    assert report["cores"] == len(os.sched_getaffinity(0))
    assert "TfDataOptions(" in report["options"]["tf_data"]
    assert Image.open(tmp_path / "plot.png").width > 800


def test_compare_throughput_refuses(sample_folder, tmp_path):
    sample = "--files=data/sample/train-*"
    fails(run("compare_throughput.py"), "Name the TFRecord files")
    fails(run("compare_throughput.py", sample, "--backends=dali", cwd=sample_folder), "`backends` must be of tf_data_serial")
    fails(run("compare_throughput.py", sample, "--batch_size=97", cwd=sample_folder), "at most the 96 records, got 97")
    fails(run("compare_throughput.py", sample, "--seconds=0", cwd=sample_folder), "`seconds` must be above 0")
    fails(run("compare_throughput.py", sample, "--repeats=0", cwd=sample_folder), "`repeats` must be at least 1")
    fails(run("compare_throughput.py", sample, f"--json={tmp_path}/no/x.json", cwd=sample_folder), "folder is missing")
    fails(run("compare_throughput.py", sample, "--plot=x.svg", cwd=sample_folder), "`plot` must end in .png, got x.svg")
    fails(run("compare_throughput.py", sample, "--backends=tf_data,dali_gpu", cwd=sample_folder), "need an NVIDIA GPU")


def test_compare_throughput_reports_a_row_that_dies(tmp_path):
    """A record that no decoder can read ends the measurement with an error, not with a hang or a half-written table."""
    examples = numbered_examples(8)
    examples[3]["image/encoded"] = b"this is no image"
    file = write_tfrecord(tmp_path / "train", examples)
    assert run("index_tfrecords.py", file).returncode == 0
    process = run("compare_throughput.py", f"--files={file}", "--batch_size=4", f"--json={tmp_path}/result.json")
    assert process.returncode == 1
    assert "The backends' images were not shown to be the same" in process.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_compare_images(sample_folder, layout):
    process = run("compare_images.py", "--files=data/sample/validation-*", f"--layout={layout}", "--json", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["images"] == 32
    assert result["labels_equal"]
    assert result["mean_absolute_difference"] < 0.001
    strict = run("compare_images.py", "--files=data/sample/validation-*", "--most=1e-9", cwd=sample_folder)
    assert strict.returncode == 1
    assert "the backends differ by more than 1e-09" in strict.stderr


def test_by_hand_does_the_same_work(sample_folder):
    """The hand-written baseline yields what the package's does, in kind; its decode and resize are the same operations."""
    import tensorflow as tf

    import by_hand
    from dali_tf_input import InputSpec, Preprocess, TfDataOptions
    from dali_tf_input.dataset import make_dataset

    records = DatasetSpec.from_files(str(sample_folder / "data/sample/train-*"))
    spec = InputSpec(dataset=records, preprocess=Preprocess.for_training(224), order="buffer")
    ours = make_dataset(spec, TfDataOptions(), batch_size=96)
    theirs = by_hand.make_dataset(tf, spec, batch_size=96)
    assert ours.element_spec == theirs.element_spec
    (our_images, our_labels), (their_images, their_labels) = next(iter(ours)), next(iter(theirs))
    assert sorted(our_labels.numpy()) == sorted(their_labels.numpy())
    assert float(tf.reduce_mean(our_images)) == pytest.approx(float(tf.reduce_mean(their_images)), abs=0.02)


def test_describe_images(sample_folder):
    process = run("describe_images.py", "--files=data/sample/train-*", "--num_images=20", "--repeats=2", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    header, row = process.stdout.splitlines()
    assert header.split()[:4] == ["files", "images", "height", "width"]
    assert row.split()[:2] == ["data/sample/train-*", "20"]


def test_a_measurer_dies_with_its_parent(sample_folder):
    """Also when it is stopped, as between its turns, and the parent has no time to clean up."""
    code = f"""if True:
        import os, signal, subprocess, sys
        command = [sys.executable, "{SCRIPTS}/measure_throughput.py", "--files=data/sample/train-*", "--backend=dali_cpu_bare"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    parent = subprocess.run([sys.executable, "-c", code], cwd=sample_folder, capture_output=True, text=True, check=False)
    child = Path(f"/proc/{int(parent.stdout)}/status")
    for _ in range(100):
        if not child.exists() or "State:\tZ" in child.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the measurer outlived its parent")


def test_install_reads_its_requirements_from_pyproject():
    """What install.sh hands to pip: whole requirements, one an argument."""
    functions = [
        line for line in (SCRIPTS / "install.sh").read_text().splitlines() if line.startswith(("section()", "requirement()"))
    ]
    code = "\n".join(
        [
            *functions,
            "section gpu; echo --; section plugin-build; echo --; requirement tensorflow; requirement nvidia-dali-cuda120",
        ]
    )
    shown = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("--\n")
    assert shown[0].splitlines() == ["tensorflow[and-cuda]>=2.20,<2.22"]
    assert shown[1].splitlines()[:2] == ["nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime-cu12"]
    assert shown[2].splitlines() == ["tensorflow>=2.20,<2.22", "nvidia-dali-cuda120==2.4.*"]


def test_make_help():
    process = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, check=True)
    for verb in ("install", "data", "index", "compare", "train", "test", "check", "format", "clean", "help"):
        assert f"make {verb} " in process.stdout
