"""The measurements: compare_throughput.py, its rows and its workers."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import fails, load, python, run, succeeds, wait_until
from conftest import SCRIPTS, TF_DATA, at_night, numbered_examples, refused, write_tfrecord

import dali_tf_input as dti
from support import flags
from support.benchmark import Stats
from support.throughput import comparison, reference, worker
from support.throughput.candidates import Candidate
from support.throughput.rows import ROWS

SAMPLE = ["--files=data/sample/train-*"]
BRIEFLY = ["--seconds=0.1", "--repeats=2", "--batch_size=8", "--image_size=16"]
BRIEFLY.append("--warmup_batches=1")
FEW = ["tf_data", "dali_cpu"]
OTHERS = ["tf_data_serial", "tf_data_by_hand", "tf_data", "tf_data_plain", "dali_cpu_by_hand"]
OTHERS += ["dali_cpu_bare", "dali_cpu_buffer", "decode_simplejpeg", "decode_only"]


@pytest.fixture
def compares_here(monkeypatch):
    """Images are compared in this process; at night by another, which imports TensorFlow."""

    def compare(words):
        process = run(Path(words[1]).name, *words[2:])
        return process.returncode, process.stdout, process.stderr

    if at_night(True, False):
        monkeypatch.setattr("dali_tf_input.processes.run_command", compare)


def whole(process):
    return process.stdout, re.MULTILINE


@pytest.mark.slow
@pytest.mark.usefixtures("compares_here")
@pytest.mark.parametrize("rows", at_night([FEW], [FEW, OTHERS]))
def test_compare_throughput(sample_folder, tmp_path, monkeypatch, rows):
    """The plan, the rounds, the table, the file and the plot say the same."""
    monkeypatch.setattr(flags, "find_problem_of_dali", lambda: None)
    outputs = [f"--json={tmp_path}/rows.json", f"--plot={tmp_path}/plot.png"]
    arguments = [*SAMPLE, *BRIEFLY, *outputs, f"--backends={','.join(rows)}"]
    process = succeeds(run("compare_throughput.py", *arguments, cwd=sample_folder))
    plan = rf"^plan +{len(rows)} rows in turn, 2 rounds of 0.1 s each: about \d+ min$"
    assert re.search(plan, *whole(process))
    assert re.search(r"^images +DALI's to tf.data's: ", *whole(process))
    assert re.search(r"^round 2 of 2, images/s: .*\btf_data [0-9,]+", *whole(process))
    report = json.loads((tmp_path / "rows.json").read_text())
    assert report["conclusion"] in process.stdout
    assert (report["schema"], report["rounds"], report["reference"]) == (1, 2, "tf_data")
    assert report["package"]["version"] == dti.__version__
    assert report["data"]["is_sample"]
    assert report["data"]["num_records"] == report["data"]["sizes_read"] == 96
    assert report["cores"] == len(os.sched_getaffinity(0))
    assert "TfDataOptions(" in report["options"]["tf_data"]
    assert set(report["rows"]) == set(rows)
    for name, row in report["rows"].items():
        assert len(report["windows"][name]) == 2
        assert row["times_read"] > 8 / 96
        assert row["peak_memory_bytes"] > 1e8
        assert re.search(rf"^(this package|written by hand|parts)? +{name} ", *whole(process))
    assert set(report["rows"]["tf_data"]["ratio"].values()) == {1.0}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_augmentation_by_hand(dataset):
    """Keras's layers, which the process that measures makes."""
    augment = [dti.augment.RandAugment(), dti.augment.RandomErasing()]
    crop = dti.RandomResizedCrop()
    spec = dti.InputSpec.for_training(dataset, 16, crop=crop, augment=augment, order="buffer")
    task = {"candidate": ROWS["tf_data_by_hand"].candidate.to_json(), "seconds": 0.01}
    answer = worker.Pipelines(spec, 4).answer(task | {"warmup_batches": 0, "fresh": True})
    assert answer["images_taken"] >= 4


def test_rows_that_are_left_out(files, monkeypatch):
    """By default those that cannot be measured here; each is named, with its reason."""
    compare = load("compare_throughput.py")
    compare.FLAGS(["compare", files])
    monkeypatch.setattr(compare, "find_problem_of_dali", lambda: None)
    monkeypatch.setattr(compare.machine, "count_gpus_of_tensorflow", lambda: 1)
    rows, left_out = compare.choose_rows([], is_remote=False)
    assert (left_out, [name for name in rows if "gpu" in name]) == ([], [])
    ours, left_out = compare.choose_rows([], is_remote=True)
    assert ours == ["tf_data", "dali_cpu"]
    assert left_out == ["what is written by hand, and parts: they read local files"]
    names, _ = compare.choose_rows(["some GPU"], is_remote=False)
    assert {*names} == {*rows, "dali_gpu", "dali_gpu_bare", "dali_gpu_buffer"}
    monkeypatch.setattr(compare, "find_problem_of_dali", lambda: "there is no plugin")
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    names, left_out = compare.choose_rows([], is_remote=False)
    assert names == [one for one in rows if "dali" not in one and one != "decode_simplejpeg"]
    assert left_out[0] == "DALI's rows: there is no plugin"
    assert "pip install simplejpeg" in left_out[1]
    compare.FLAGS["backends"].value = ["dali_cpu"]
    with refused("there is no plugin"):
        compare.choose_rows([], is_remote=False)


@pytest.mark.slow
def test_what_was_measured_is_kept(sample_folder, tmp_path):
    """Without DALI what needs none is measured. After Ctrl-C the rounds so far are shown, and
    are in the file; other data's results stay.
    """
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia/__init__.py").touch()  # hides the one that DALI is in
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    file = tmp_path / "rows.json"
    file.write_text('{"data": "other"}')
    words = [sys.executable, SCRIPTS / "compare_throughput.py", *SAMPLE, f"--json={file}"]
    words += [*BRIEFLY, "--backends=tf_data", "--repeats=10000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(words, cwd=sample_folder, env=environment, **pipes)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("round 3 "):
            break
    assert any(re.match("images +not compared", line) for line in lines)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert "warning: it ended early, after " in output
    report = json.loads(file.read_text())
    assert report["rounds"] >= 3
    assert len(report["windows"]["tf_data"]) == report["rounds"]
    assert [one.read_text() for one in tmp_path.glob("rows-*.json")] == ['{"data": "other"}']


def window(rate, *, cpu=1.0, others=0.0, disk=0):
    """Returns what a measurer returns, of a window of one second on two cores."""
    fields = {"measured_batches": rate, "batch_size": 1, "seconds": 1.0, "cpu_seconds": cpu}
    fields |= {"cores": 2, "other_cpu_seconds": others}
    details = {"images_taken": rate, "disk_bytes": disk, "first_batch_seconds": 1.0}
    return {"window": fields, **details, "peak_memory_bytes": 1}


def compare_rates(**rates):
    windows = {name: [window(rate) for rate in own] for name, own in rates.items()}
    data = {"is_sample": False, "is_remote": False, "num_records": 10, "bytes": 10}
    return {"data": data, "cores": 2, **comparison.summarize(windows, 10)}


def test_one_statistic():
    """A row whose windows are the faster ones by median, and the slower ones in most rounds."""
    report = compare_rates(
        tf_data=[100, 200, 90, 100, 100], tf_data_by_hand=[80, 120, 110, 80, 110]
    )
    rows = report["rows"]
    assert rows["tf_data_by_hand"]["ratio"]["median"] == 1.25
    assert rows["tf_data_by_hand"]["images_per_second"] == 80  # not 110, the median
    assert rows["tf_data"]["images_per_second"] == 100
    said = "no difference shown (0.8 to 1.7)"
    assert comparison.conclude(report).endswith(f"{said}.")


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([1.9, 1.8, 2.0, 1.9, 1.9], "1.9 (1.8 to 2.0)"),
        ([1.90, 1.91, 1.92, 1.91, 1.91], "1.91 (1.90 to 1.92)"),
        ([1.02, 1.1, 1.2, 1.1, 1.1], "1.10 (1.02 to 1.20)"),
        ([1.94, 1.88, 2.11, 1.94, 1.94], "1.94 (1.88 to 2.11)"),
        ([0.5, 0.6, 0.7, 0.6, 0.6], "0.6 (0.5 to 0.7)"),
        ([0.7, 1.1, 1.7, 1.1, 1.1], "no difference shown (0.7 to 1.7)"),
        ([2.0, 2.1, 2.2, 2.1], "2.1 in 4 rounds: too few to tell"),
    ],
)
def test_claims_are_what_the_rounds_support(ratios, text):
    assert comparison.format_ratio(vars(Stats.of(ratios)), len(ratios)) == text


def test_conclusions():
    report = compare_rates(tf_data=[200] * 5, tf_data_by_hand=[100] * 5, decode_only=[150] * 5)
    start = "On this machine, with your records, this package on tf.data"
    said = comparison.conclude(report)
    assert said == (
        f"{start} serves 2.00 (2.00 to 2.00) times as many images per second as tf.data written"
        " by hand."
    )
    assert comparison.conclude(compare_rates(tf_data=[200] * 5)) == f"{start} serves 200 images/s."
    assert compare_rates(decode_only=[1], dali_cpu_bare=[2])["reference"] == "decode_only"
    assert compare_rates(tf_data_by_hand=[1], dali_cpu=[2])["reference"] == "dali_cpu"
    report = compare_rates(dali_gpu=[300] * 5, tf_data=[150] * 5, dali_gpu_bare=[310] * 5)
    assert report["reference"] == "dali_gpu"
    assert comparison.answer_questions(report) == [
        "dali_gpu over tf_data: 2.00 (2.00 to 2.00); target 3, by the median: missed",
        "dali_gpu over dali_gpu_bare: 0.97 (0.97 to 0.97); target 0.95, by the median: met",
    ]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (0.1, None),
        (0.9, "took up to 0.9 of the 2 cores in 1 of 2 windows"),
        (None, "is not known here"),
    ],
)
def test_a_busy_machine_is_named(others, said):
    windows = {"tf_data": [window(9, others=one) for one in (others and 0.0, others)]}
    warning = comparison.warn_if_busy({"cores": 2, **comparison.summarize(windows, 9)})
    assert said in warning if said else warning is None


def test_reads():
    """How often each image was read, and from where."""
    for rate, disk, said in (
        (40, 0, "read each image about 4 times, from memory"),
        (5, 0, "read about 50% of the images, from memory"),
        (40, 3_000_000, "about 4 times; 3 MB came from disk"),
        (40, None, "not known here"),
    ):
        windows = {"tf_data": [window(rate, disk=disk)]}
        data = {"is_remote": False, "bytes": 10_000_000}
        report = {"data": data, **comparison.summarize(windows, 10)}
        assert said in comparison.describe_reads(report)


@pytest.mark.slow
@pytest.mark.nightly
def test_benchmark_store(sample_folder, tmp_path):
    """Each row with its ratio; the images came from the server."""
    arguments = [*SAMPLE, "--seconds=0.2", "--repeats=2", "--batch_size=16", "--milliseconds=1"]
    arguments.append(f"--json={tmp_path}/store.json")
    process = succeeds(run("benchmarks/store.py", *arguments, cwd=sample_folder))
    rows = json.loads((tmp_path / "store.json").read_text())["rows"]
    names = ["local", "far", "cached", "failing", "far, CPU time without the server's", "index"]
    assert list(rows) == names
    assert all(f"\n{name} " in process.stdout for name in rows)


@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        (["--backends=tf_data,grain"], "grain opencv-python-headless"),
        (["--backends=torch", "--augment=trivial"], "torch opencv-python-headless torchvision"),
        (["--backends=decode_simplejpeg"], "simplejpeg"),
    ],
)
def test_packages_that_are_not_there(files, monkeypatch, arguments, packages):
    """They are named before anything is measured."""
    module = packages.split()[0]
    monkeypatch.setitem(sys.modules, module, None)
    process = run("compare_throughput.py", files, "--batch_size=8", *arguments)
    fails(process, f"cannot be measured: No module named {module!r}. pip install {packages}\n")


def test_a_package_that_cannot_be_imported(dataset, monkeypatch):
    """The process that measures says so, and lives."""
    monkeypatch.setitem(sys.modules, "grain", None)
    spec = dti.InputSpec.for_training(dataset, 16, order="buffer")
    candidate = Candidate(TF_DATA, "buffer", "grain").to_json()
    task = {"candidate": candidate, "seconds": 0.1, "warmup_batches": 0, "fresh": True}
    answer = worker.Pipelines(spec, 4).answer(task)
    assert "import of grain" in answer["error"]


@pytest.mark.usefixtures("compares_here")
def test_records_that_cannot_be_decoded(tmp_path, monkeypatch):
    """They end it with an error before anything is measured."""
    monkeypatch.setattr(flags, "find_problem_of_dali", lambda: None)
    examples = numbered_examples(8)
    examples[3]["image/encoded"] = b"this is no image"
    file = write_tfrecord(tmp_path / "train", examples)
    assert run("index", file).returncode == 0
    arguments = [f"--files={file}", "--batch_size=4", f"--json={tmp_path}/result.json"]
    process = run("compare_throughput.py", *arguments, "--backends=tf_data,dali_cpu")
    assert process.returncode == 1
    assert "The backends' images were not shown to be the same" in process.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", at_night(["CHW"], ["CHW", "HWC"]))
def test_comparison_of_images(files, layout):
    """The small difference between the backends is shown, and refused if it must be smaller."""
    arguments = [files, "--image_size=32", f"--layout={layout}", "--evaluation"]
    process = run("compare_images.py", *arguments, "--most=1e-9")
    fails(process, "The backends' images differ by 0.00")
    assert process.stdout.startswith("images      24 of 24: decode, CoverCrop")


def test_by_hand_does_the_same_work(dataset):
    """The baseline by hand yields the package's images: some mirrored, by the same operations."""
    crop = dti.ResizeRandomCrop(resize=(32, 32))  # of which there is one
    fields = {"crop": crop, "mirror_probability": 0.0, "order": "buffer"}
    spec = dti.InputSpec.for_training(dataset, 32, **fields)
    ours = dti.make_dataset(spec, TF_DATA, batch_size=24)
    theirs = reference.make_dataset(spec, batch_size=24)
    assert ours.element_spec == theirs.element_spec
    images, labels = (values.numpy() for values in next(iter(ours)))
    theirs, their_labels = (values.numpy() for values in next(iter(theirs)))
    order, their_order = np.argsort(labels), np.argsort(their_labels)  # each record has its own
    np.testing.assert_array_equal(labels[order], their_labels[their_order])
    mirrored = 0
    for image, other in zip(images[order], theirs[their_order], strict=True):
        plain, flipped = (np.abs(image - view).max() for view in (other, other[:, ::-1]))
        assert min(plain, flipped) < 1e-3
        mirrored += flipped < plain
    assert 0 < mirrored < 24


def test_a_worker_dies_with_its_parent():
    """Also when it is paused, as between its turns, and the parent is killed."""
    code = f"""if True:
        import os, signal, sys
        sys.path.insert(0, "{SCRIPTS}")
        from support.processes import JsonWorker, serve
        if sys.argv[1:]:
            serve(os.getpid.__call__)
        program = sys.orig_argv[-1]
        worker = JsonWorker([sys.executable, "-c", program, "serves"])
        worker.start()
        worker.pause()
        print(worker._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child = Path(f"/proc/{int(python('-c', code).stdout)}/status")
    wait_until(lambda: not child.exists() or "State:\tZ" in child.read_text())
