"""The scripts that look at things: what they print and draw, and what they say to bad input."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, numbered_examples, write_tfrecord
from PIL import Image
from test_scripts import fails, run, run_on_terminal

from dali_tf_input import (
    DatasetSpec,
    InputSpec,
    NoCrop,
    Preprocess,
    RandomCrop,
    RandomResizedCrop,
    ResizeRandomCrop,
    TfDataOptions,
)
from dali_tf_input.dataset import denormalise, make_dataset

FILES = "--files=data/sample/train-*"
# Each script that reads records, and the flag that names its output.
TOOLS = {
    "profile_stages.py": "--json",
    "tune.py": "--out",
    "preview.py": "--out",
    "gpu_check.py": "--out",
    "soak.py": "--json",
}
SUFFIX = {"preview.py": ".png"}


def output(script, folder):
    return f"{TOOLS[script]}={folder}/out{SUFFIX.get(script, '.json')}"


def small(script):
    """Returns the flags that make a script short."""
    return {
        "profile_stages.py": [
            "--seconds=0.05",
            "--repeats=1",
            "--batch_size=1",
            "--image_size=8",
            "--nosettings",
            "--backends=tf_data",
        ],
        "tune.py": ["--seconds=1", "--batch_size=1", "--image_size=8", "--backends=tf_data"],
        "preview.py": ["--image_size=8"],
        "gpu_check.py": ["--rehearse", "--parts=devices_reader"],
        "soak.py": ["--images=1000", "--evaluations=10", "--datasets=20", "--backends=tf_data"],
    }[script]


@pytest.mark.parametrize("script", TOOLS)
def test_no_files_and_no_index(script, tmp_path):
    named = script != "soak.py"  # which makes images where none are named
    if named:
        fails(run(script, *small(script), output(script, tmp_path)), "Name the TFRecord files: --files=")
    pattern = f"--files={tmp_path}/none-*"
    fails(run(script, pattern, *small(script), output(script, tmp_path)), f"No file matches '{tmp_path}/none-*'")
    file = write_tfrecord(tmp_path / "train", numbered_examples(2))
    process = run(script, f"--files={file}", *small(script), output(script, tmp_path))
    fails(process, f"1 of 1 files have no index, the first is {file}. Index them: make index DATA={file}")
    assert sorted(os.listdir(tmp_path)) == ["train"]


@pytest.mark.parametrize("script", TOOLS)
def test_outputs_that_cannot_be_written(script, sample_folder, tmp_path):
    """Said before anything is measured; a folder of the kernel's is one that root cannot write to either."""
    for folder, said in ((tmp_path / "none", "there is no folder"), ("/proc/self", "cannot be written")):
        process = run(script, FILES, *small(script), output(script, folder), cwd=sample_folder)
        fails(process, f"`{TOOLS[script].lstrip('-')}` {folder}/out", said)
        assert process.stdout == ""
    fails(run(script, FILES, "stray", cwd=sample_folder), "Unknown arguments: stray")


@pytest.mark.parametrize("script", [script for script in TOOLS if script != "soak.py"])  # see test_soak
def test_one_record_on_a_terminal_without_colour(script, tmp_path):
    """One record is enough for all of them, where the batch is one; nothing is written in colours or to stderr."""
    file = write_tfrecord(tmp_path / "train", numbered_examples(1))
    assert run("index_tfrecords.py", file).returncode == 0
    process = run_on_terminal(script, f"--files={file}", *small(script), output(script, tmp_path), NO_COLOR="1", TERM="dumb")
    assert (process.returncode, process.stderr) == (0, "")
    assert "\x1b" not in process.stdout
    assert "…" not in process.stdout  # nothing is cut where the terminal is narrow
    assert os.path.getsize(output(script, tmp_path).partition("=")[2]) > 100
    if script in ("profile_stages.py", "tune.py"):
        process = run(script, f"--files={file}", output(script, tmp_path))
        fails(process, "`batch_size` must be from 1 to the 1 record of these files, got 64", "--batch_size=1")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("profile_stages.py", ["--seconds=0"], "`seconds` must be above 0"),
        ("profile_stages.py", ["--repeats=0"], "`repeats` must be at least 1"),
        ("profile_stages.py", ["--plot=x.svg"], "`plot` must end in .png, got x.svg"),
        ("tune.py", ["--seconds=0"], "`seconds` must be above 0"),
        ("tune.py", ["--backends=dali_gpu"], "`backends` must be of tf_data, dali_cpu on this machine, got dali_gpu"),
        ("tune.py", ["--out=x.txt"], "`out` must end in .json"),
        ("tune.py", ["--against=none.json"], "none.json: these are no options"),
        ("preview.py", ["--num_images=0"], "`num_images` must be at least 1"),
        ("preview.py", ["--amplify=0"], "`amplify` must be above 0"),
        ("preview.py", ["--out=x.jpg"], "`out` must end in .png"),
        ("preview.py", ["--evaluation", "--crop=random_crop"], "--evaluation takes the centre"),
        ("gpu_check.py", [], "There is no NVIDIA GPU here"),
        ("gpu_check.py", ["--parts=all"], "`parts` must be of probe, pixels_reader"),
        ("tune.py", ["--fuse=decode"], "tune.py chooses `fuse` itself"),
        ("tune.py", ["--replicas=0"], "`replicas` must be at least 1, got 0"),
        ("preview.py", ["--mean=1,2"], "`mean` must have one value for each of R, G and B"),
        ("preview.py", ["--std=1,x,2"], "`std` must be three numbers like 123,117,104, got 1,x,2"),
        ("gpu_check.py", ["--rehearse"], "A rehearsal is no result"),
        ("soak.py", ["--images=10"], "`images` must be at least 1,000, got 10"),
        ("soak.py", ["--backends=torch"], "`backends` must be of tf_data, dali_cpu on this machine, got torch"),
    ],
)
def test_numbers_and_names_out_of_range(sample_folder, script, arguments, message):
    fails(run(script, FILES, *arguments, cwd=sample_folder), message)


@pytest.mark.parametrize(
    ("arguments", "largest"),
    [
        ([], 0.01),
        (["--crop=random_resized_crop", "--antialias", "--dtype=float16", "--layout=CHW"], 0.2),
        (["--crop=random_crop", "--image_size=300", "--dtype=uint8"], 0.01),
        (["--evaluation", "--num_images=3", "--seed=4"], 0.01),
        (["--image_width=90", "--interpolation=bicubic", "--mean=0,0,0", "--std=255,255,255"], 0.2),
    ],
)
def test_preview(sample_folder, tmp_path, arguments, largest):
    """The sheet holds what the backends made: where they agree, the difference is black."""
    process = run("preview.py", FILES, f"--out={tmp_path}/sheet.png", *arguments, cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
    line = next(line for line in process.stdout.splitlines() if line.startswith("difference"))
    assert float(line.split()[1]) <= largest
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("L"))
    assert sheet.shape[0] > 250
    assert sheet.shape[1] > 800
    assert 0 < (sheet < 10).mean() < 0.6


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_denormalise(dataset, dtype, layout):
    """What any spec makes of an image comes back as what uint8 makes of it."""
    made = []
    for changes in ({"dtype": dtype, "layout": layout}, {"dtype": "uint8"}):
        preprocess = Preprocess(image_size=(20, 30), crop=NoCrop(), mirror_probability=0, mean=(9.0, 20.0, 30.0), **changes)
        spec = InputSpec(dataset=dataset, preprocess=preprocess, order="sequential")
        images, _ = next(iter(make_dataset(spec, TfDataOptions(), batch_size=4)))
        made.append(denormalise(images.numpy(), preprocess))
    assert made[0].shape == made[1].shape == (4, 20, 30, 3)
    assert made[0].dtype == np.float32
    # Of rounding to whole numbers, and of values between 4 and 8 in the type, times the largest `std`.
    bound = {"float32": 0.5001, "float16": 0.5 + 2**-9 * 58.4, "bfloat16": 0.5 + 2**-6 * 58.4, "uint8": 0}[dtype]
    assert np.abs(made[0] - made[1]).max() <= bound


@pytest.mark.parametrize("crop", [ResizeRandomCrop(resize=(60, 60)), RandomResizedCrop(), RandomCrop()], ids=repr)
def test_preview_shows_the_originals_of_its_images(sample_folder, crop):
    """An original, cut at its frame, mirrored where it says so, and resized by Pillow, is what the model is shown to see."""
    import preview

    dataset = DatasetSpec.from_files(str(sample_folder / "data/sample/train-*"))
    preprocess = Preprocess(image_size=(48, 48), crop=crop, mirror_probability=0.5, antialias=True)
    spec = InputSpec(dataset=dataset, preprocess=preprocess, order="global", seed=3)
    images, _ = next(iter(make_dataset(spec, TfDataOptions(), batch_size=12)))
    seen = denormalise(images.numpy(), preprocess)
    mirrors = set()
    for place, encoded in enumerate(preview.read_originals(spec, 12)):
        original, box, mirrored = preview.open_original(encoded, spec, place)
        cut = original.resize((48, 48), Image.Resampling.BILINEAR, box=box)
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cut
        assert np.abs(np.asarray(cut, np.float32) - seen[place]).mean() < 2
        mirrors.add(mirrored)
    assert mirrors == {False, True}


def test_gpu_check_rehearsed(sample_folder, tmp_path):
    """Parts on the CPU, in two runs that share their file; what is no result makes no table, and what died is told."""
    files = "--files=data/sample/validation-*"
    out = tmp_path / "rehearsal.json"
    for parts in ("probe,pixels_reader,pixels_planned,devices_planned", "throughput,hw_decoder_load,training,dali_alone,memory"):
        arguments = [files, "--rehearse", f"--out={out}", f"--parts={parts}", "--seconds=0.1", "--repeats=1"]
        process = run("gpu_check.py", *arguments, cwd=sample_folder)
        assert process.returncode == 0 or "not measured: memory;" in process.stderr  # how a host's allocator grows is its own
        assert "This was a rehearsal on the CPU" in process.stdout
    report = json.loads(out.read_text())
    names = ["probe", "pixels_reader", "pixels_planned", "devices_planned"]
    assert list(report["parts"]) == [*names, "throughput", "hw_decoder_load", "training", "dali_alone", "memory"]
    assert all(report["parts"][name]["passed"] for name in names)
    for found in report["parts"]["throughput"].values():
        assert list(found["rows"]) == ["tf_data_serial", "tf_data", "dali_cpu_bare", "dali_cpu"]
        assert all(row["images_per_second"]["median"] > 0 for row in found["rows"].values())
    assert len(report["parts"]["memory"]["bytes"]) == 10
    assert {row["batch_size"] for row in report["parts"]["hw_decoder_load"]["1080p"]} == {8}
    assert all(row["images_per_second"] for rows in report["parts"]["hw_decoder_load"].values() for row in rows)
    assert set(report["parts"]["training"]["rows"]) == {"tf_data", "dali_cpu"}
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    fails(run("gpu_table.py", f"--file={out}", f"--readme={readme}"), "is a rehearsal on the CPU, not a result")
    report["cores"] += 1
    out.write_text(json.dumps(report))
    arguments = [files, "--rehearse", f"--out={out}", "--parts=devices_reader"]
    fails(run("gpu_check.py", *arguments, cwd=sample_folder), "to add to: it was made on another machine, or with other versions")
    out.write_text("{}")
    fails(run("gpu_check.py", *arguments, cwd=sample_folder), "no result of gpu_check.py to add to")


def test_gpu_table(tmp_path):
    """The README's table is what its script makes of the file in benchmarks/, or says that there is none."""
    text = (ROOT / "README.md").read_text()
    copy = tmp_path / "copy.md"
    copy.write_text(text)
    process = run("gpu_table.py", f"--readme={copy}", cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert copy.read_text() == text
    assert process.stdout == f"{copy}: unchanged\n"
    rate = {"median": 12345.6, "minimum": 12000.0, "maximum": 13000.0}
    rows = {row: {"images_per_second": rate} for row in ("tf_data_serial", "tf_data", "dali_gpu_bare", "dali_gpu")}
    report = {
        "rehearsal": False,
        "gpus": ["Made Up 1"],
        "cores": 16,
        "cpu": "a CPU",
        "date": "2030-01-01T00:00:00",
        "versions": {"Python": "3", "TensorFlow": "2", "DALI": "2"},
        "parts": {
            "probe": {"passed": False, "died": "SIGSEGV"},
            "pixels_planned": {"passed": True},
            "throughput": {"photos": {"batch_size": 256, "rows": rows}, "1080p": {"died": "error: a\nerror: b"}},
            "training": {"rows": {"dali_gpu": {"wait": 0.01, "images_per_second": 1.0}}},
        },
    }
    file, readme = tmp_path / "gpu.json", tmp_path / "README.md"
    readme.write_text(text)
    file.write_text(json.dumps(report))
    assert run("gpu_table.py", f"--file={file}", f"--readme={readme}").stdout == f"{readme}: written anew\n"
    table = readme.read_text()
    assert "| `dali_gpu` | 12,346 (12,000 to 13,000) | not yet measured |" in table
    assert "1080p: could not be measured: error: b" in table
    assert "probe: died (SIGSEGV); pixels_planned: passed; dali_gpu waits 1% of the step" in table
    assert table.replace(table[table.index("<!-- GPU") : table.index("<!-- end of the GPU")], "") == text.replace(
        text[text.index("<!-- GPU") : text.index("<!-- end of the GPU")], ""
    )


def in_scripts(code, *given):
    """Runs code that imports a script, in a process of its own, as scripts have flags of one name; returns what it prints."""
    process = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, cwd=SCRIPTS, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_gpu_check_judges():
    """What died, failed or was not measured is no success; targets are told by the ratios of the windows."""
    code = """if True:
        import json, sys
        sys.argv = ["gpu_check.py"]
        import gpu_check
        windows = lambda rate: {"windows": [{"measured_batches": rate, "batch_size": 1, "seconds": 1}] * 3}
        rates = {"tf_data_serial": 100, "tf_data": 200, "dali_gpu_bare": 600, "dali_gpu": 590}
        photos = {"windows": {row: windows(rate) for row, rate in rates.items()}}
        report = {"cores": 16, "parts": {"throughput": {"photos": photos}}}
        well = [gpu_check.went_well(found) for found in (
            {"passed": True}, {"photos": {"rows": {}}}, {"photos": [{"images_per_second": [1]}]},
            {"passed": False}, {"died": "x"}, {"photos": {"rows": {}}, "1080p": {"died": "x"}}, [], {},
            {"photos": [{"failed": "x"}]}, {"photos": []})]
        print(json.dumps([well, gpu_check.targets(report), gpu_check.targets({"parts": {}})]))
    """
    well, lines, none = in_scripts(code)
    assert well == [True] * 3 + [False] * 7
    assert [line.split()[0] for line in lines] == ["MISSED", "met", "MISSED"]
    assert "2.95 times tf_data on 16 cores, target 3 (2.95 to 2.95)" in lines[0]
    assert none[0].startswith("not measured ")


def test_soak_judges():
    """Flat passes; memory that climbs, or a thread or descriptor that is left, does not; what warms up is not judged."""
    code = """if True:
        import json, sys
        sys.argv = ["soak.py"]
        import soak
        def judged(part, memory, threads=lambda n: 5, files=lambda n: 7):
            return soak.judge(part, [soak.Sample(n + 1, memory(n), threads(n), files(n)) for n in range(100)])["passed"]
        flat = lambda n: 10**9 + (n % 3) * 10**6
        print(json.dumps([
            judged("stream", flat), judged("evaluations", flat), judged("datasets", lambda n: flat(n) + min(n, 20) * 10**8),
            judged("stream", flat, threads=lambda n: 5 + n % 2, files=lambda n: 7 + n % 3),
            judged("stream", lambda n: 10**9 + n * 4 * 10**5), judged("evaluations", lambda n: flat(n) + n * 10**5),
            judged("datasets", flat, threads=lambda n: 5 + n // 30), judged("datasets", flat, files=lambda n: 7 + n // 60),
            judged("evaluations", flat, threads=lambda n: 5 + n // 50),
            *(judged("evaluations", lambda n: 10**9 + n * leak) for leak in (49_000, 51_000)),
            *(judged("resident", lambda n: flat(n) + n * leak) for leak in (450_000, 550_000)),
        ]))
    """
    assert in_scripts(code) == [True] * 4 + [False] * 5 + [True, False] * 2


def test_soak_judges_what_is_held(tmp_path, monkeypatch):
    """What threads take and give back is no growth of evaluations and datasets, though glibc's arenas keep it resident."""
    code = """if True:
        import ctypes, json, sys, threading
        sys.path.insert(0, SCRIPTS)
        sys.argv = ["soak.py"]
        import soak
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
        libc.free(libc.malloc(30 << 20))  # from now on glibc keeps up to 60 MB at the top of an arena, see mallopt(3)
        together = threading.Barrier(4)
        def work():
            together.wait()
            taken = [libc.malloc(10_000) for _ in range(1000)]
            for pointer in taken:
                ctypes.memset(pointer, 1, 10_000)
            together.wait()
            for pointer in taken[1:]:  # one is kept
                libc.free(pointer)
        for number in range(10):
            print(json.dumps(soak.Sample.take(number, trim=True)), flush=True)
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
    """
    (tmp_path / "work.py").write_text(code.replace("SCRIPTS", repr(str(SCRIPTS))))
    collects = """if True:
        import json, sys
        soak_file, sys.argv = sys.argv[1], ["soak.py"]
        import soak
        from absl import flags
        flags.FLAGS(sys.argv)
        soak.__file__ = soak_file
        collected = [soak.collect(part, "tf_data", []) for part in soak.PARTS]
        print(json.dumps([samples[-1].memory - samples[0].memory for samples in collected]))
    """
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    stream, evaluations, resident, datasets = in_scripts(collects, str(tmp_path / "work.py"))
    assert max(evaluations, datasets) < 3_000_000
    assert min(stream, resident) > 10_000_000  # as in a training process: what the two above are spared


def test_soak_makes_images():
    code = """if True:
        import json, sys, tempfile
        sys.argv = ["soak.py"]
        import soak
        from dali_tf_input import DatasetSpec
        with tempfile.TemporaryDirectory() as folder:
            dataset = DatasetSpec.from_files(soak.make_files(folder).removeprefix("--files="))
            print(json.dumps([dataset.num_records, len(dataset.files)]))
    """
    assert in_scripts(code) == [8192, 4]


def test_soak(tmp_path):
    """A short one, of one record, with its plot; memory is still settling, so its verdict may be either, and says which."""
    file = write_tfrecord(tmp_path / "train", [numbered_examples(1)[0] | {"image/class/label": 765}])
    assert run("index_tfrecords.py", file).returncode == 0
    arguments = ["--images=1000", "--evaluations=10", "--datasets=20", "--backends=tf_data", f"--files={file}"]
    process = run("soak.py", *arguments, f"--json={tmp_path}/soak.json", f"--plot={tmp_path}/soak.png", NO_COLOR="1", TERM="dumb")
    assert process.returncode in (0, 1)
    assert process.stderr.startswith("error: grows beyond its bound: tf_data, ") or not process.stderr
    assert "\x1b" not in process.stdout
    report = json.loads((tmp_path / "soak.json").read_text())
    assert all(len(rows["tf_data"]) >= 3 for rows in report["samples"].values())
    assert process.returncode == (not all(rows["tf_data"]["passed"] for rows in report["verdicts"].values()))
    assert (tmp_path / "soak.png").stat().st_size > 10_000
