"""`doctor` in environments that are broken: each is a line of the report, with the command that
mends it.
"""

import importlib.metadata
import os
import shlex
import shutil
import types

import pytest
from commands import fails, load, run, run_cold
from conftest import jpeg, refused, write_dataset, write_tfrecord

from dali_tf_input import Checks, ClassLabel, build_index
from dali_tf_input.cli import machine
from dali_tf_input.records.installing import DALI, with_version
from dali_tf_input.records.paths import program, python_command

# Run by Python as it starts: what an import of a module meets.
HINDRANCE = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {what}

sys.meta_path.insert(0, Finder())
"""
PLUGIN = "nvidia.dali.plugin.tf"
OTHER_VERSION = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda package: "1.0" if "plugin" in package else version(package)
"""
NO_DALI = HINDRANCE.format(module="nvidia.dali", what="raise ImportError('none')")
CRASH = HINDRANCE.format(module=PLUGIN, what="import os; os.kill(os.getpid(), 11)")
OTHER_TENSORFLOW = HINDRANCE.format(module=PLUGIN, what="raise ImportError('undefined _Z')")


def write_smi(folder, command, shell="/bin/sh"):
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!{shell}\n{command}\n")
    (folder / "nvidia-smi").chmod(0o755)


def examine(tmp_path, *arguments, site=""):
    """Runs the doctor; returns its exit code and the lines it printed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    (tmp_path / "bin").mkdir(exist_ok=True)  # all that it finds: this machine's GPUs do not count
    path = f"{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}"
    process = run_cold("doctor", *arguments, PYTHONPATH=path, PATH=f"{tmp_path}/bin")
    assert process.stderr == ""
    return process.returncode, process.stdout.splitlines()


def line_of(lines, what):
    """Returns state and text of a line, and the line below it."""
    position = next(n for n, line in enumerate(lines) if line[9:].startswith(what + "  "))
    return lines[position].split()[0], lines[position], lines[position + 1]


@pytest.fixture
def doctor():
    """The command, with its flags read."""
    module = load("doctor")
    module.FLAGS(["test"])
    return module


class Answers:
    """Stands for a process that tries code; `answer(code)` is what it would print, or an error."""

    def __init__(self, answer):
        self.answer, self.tried = answer, []

    def attempt(self, code):
        self.tried.append(code)
        answer = self.answer(code)
        return not isinstance(answer, Exception), str(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def run_all(steps):
    """Returns what a generator yields, by the names of the lines, and what it returns."""
    findings = {}
    while True:
        try:
            finding = next(steps)
        except StopIteration as end:
            return findings, end.value
        findings[finding.what] = finding


def test_the_report(doctor, monkeypatch, capsys):
    """Each line has its state, what is broken has its fix; the exit code says whether all works."""
    monkeypatch.setattr(doctor.machine, "ask_driver", lambda _: None)
    answer = ["0"]
    monkeypatch.setattr(doctor, "Trier", lambda: Answers(lambda _: answer[0]))
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    states = {line[:7].strip() for line in lines[:-1] if "->" not in line}
    assert states <= {"ok", "warning"}
    assert lines[-1].startswith("No problems found, ")
    answer[0] = ImportError("none")
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    state, _, fix = line_of(lines, "TensorFlow")
    assert (state, "pip install --force-reinstall" in fix) == ("broken", True)
    assert lines[-1].startswith("3 problems, ")
    fails(run("doctor", "stray"), "error: Unknown arguments: stray")


@pytest.mark.slow
def test_a_sound_environment(tmp_path):
    """Of files whose labels were not checked a warning is the only one."""
    dataset = write_dataset(tmp_path / "records", [5, 12, 7])
    code, lines = examine(tmp_path, *(f"--files={file}" for file in dataset.paths))
    assert code == 0
    assert lines[-1].startswith("No problems found, ")
    bad = [line for line in lines[:-1] if line.split()[0] != "ok" and "->" not in line]
    assert [line.split()[1] for line in bad if "cores  " not in line] == ["labels"]
    assert "index --verify=schema " in line_of(lines, "labels")[2]
    assert "serves a batch on the CPU" in line_of(lines, "pipeline")[1]
    assert "24 in 3 files" in line_of(lines, "records")[1]


BROKEN = [
    (NO_DALI, "DALI", "ImportError: none"),
    (CRASH, "plugin", "died (SIGSEGV)"),
    (OTHER_TENSORFLOW, "plugin", "undefined _Z"),
    (OTHER_VERSION, "plugin", "1.0, compiled for another DALI than 2.4"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("site", "what", "found"), BROKEN)
def test_a_broken_environment(tmp_path, site, what, found):
    """Beside a GPU that TensorFlow does not see."""
    write_smi(tmp_path / "bin", "echo 'NVIDIA H100, 550.1'")
    code, lines = examine(tmp_path, site=site)
    state, line, fix = line_of(lines, what)
    assert (code, state) == (1, "broken")
    assert found in line
    assert "make install" in fix or "pip install" in fix
    state, line, _ = line_of(lines, "TensorFlow's GPUs")
    assert (state, "0 of 1" in line) == ("broken", True)
    assert lines[-1].startswith(f"{sum(line.startswith('broken') for line in lines)} problem")


@pytest.mark.parametrize(
    ("smi", "found"),
    [
        ("echo 'Failed to initialize NVML: version mismatch'; exit 18", "NVML: version"),
        ("echo 'NVIDIA H100, 515.65, 9 MiB, 80 MiB'", "CUDA 12 needs driver 525"),
        (f"exec {shutil.which('sleep')} 99", "nvidia-smi does not answer within 1 s"),
    ],
    ids=["broken", "old", "hangs"],
)
def test_a_driver(doctor, monkeypatch, tmp_path, smi, found):
    write_smi(tmp_path, smi)
    monkeypatch.setenv("PATH", str(tmp_path))
    if "99" in smi:
        monkeypatch.setattr(machine, "_SECONDS", 1)
        with refused(r"nvidia-smi does not answer within 1 s: the driver hangs.*doctor"):
            machine.ask_driver("name")
    (line,) = doctor.examine_driver()
    assert (line.state, line.what) == ("broken", "driver")
    assert found in line.found
    assert line.fix.startswith("nvidia-smi ")


GPU = "NVIDIA H100, 550.1\n"
OK, BAD = "ok", "broken"
ONE_OF_8 = OK, "1 of 8, those of CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("driver", "visible", "tensorflow", "dali", "found", "usable"),
    [
        (8, None, "8", "8", [(OK, "8"), (OK, "8")], True),
        (8, "2", "1", "1", [ONE_OF_8, ONE_OF_8], True),  # the others are left to others
        (8, "", "0", "0", [(BAD, "0 of 8"), (BAD, "0 of 8")], False),
        (8, "2", "0", "1", [(BAD, "0 of 1"), ONE_OF_8], False),
        (8, None, "0", "8", [(BAD, "0 of 8"), (OK, "8")], False),
        (None, None, "0", "2", [(BAD, "0 of 2"), (OK, "2")], False),  # without nvidia-smi
    ],
)
def test_gpus(doctor, monkeypatch, driver, visible, tensorflow, dali, found, usable):
    """Those that the driver, TensorFlow and DALI see; what is hidden on purpose is not missing."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    answer = driver and (True, GPU * driver)
    monkeypatch.setattr(doctor.machine, "ask_driver", lambda _: answer)
    trier = Answers(lambda code: dali if "dali as" in code else tensorflow)
    findings, on_gpu = run_all(doctor.examine_gpus(trier, ["TensorFlow", "DALI"]))
    lines = [findings[f"{name}'s GPUs"] for name in ("TensorFlow", "DALI")]
    assert [(line.state, line.found) for line in lines] == found
    assert on_gpu == usable == ("memory growth" in findings)
    reinstall = doctor.reinstall("tensorflow[and-cuda]", DALI)
    fix = "unset CUDA_VISIBLE_DEVICES" if visible == "" else reinstall
    assert {line.fix for line in lines if line.state == BAD} <= {fix}
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    trier = Answers(lambda code: OSError("libnvcuvid.so.1") if "nvcuvid" in code else "8")
    findings, _ = run_all(doctor.examine_gpus(trier, ["TensorFlow", "DALI"]))
    growth = findings["memory growth"]
    assert (growth.state, growth.fix) == (BAD, "unset TF_FORCE_GPU_ALLOW_GROWTH")
    if driver:
        decoder = findings["hardware JPEG decoder"]
        assert (decoder.state, "docker run" in decoder.fix) == ("warning", True)


def test_the_plugin(doctor, monkeypatch):
    """A pipeline is tried on each device; a broken one is compiled again. It is optional."""
    for on_gpu, pipelines in ((False, ["pipeline"]), (True, ["pipeline", "GPU pipeline"])):
        trier = Answers(lambda _: "1")
        found = list(doctor.examine_plugin(trier, on_gpu=on_gpu))
        states = [(finding.what, finding.state) for finding in found]
        assert states == [(what, OK) for what in ("plugin", "operator of DALI", *pipelines)]
        assert f"device_id = {0 if on_gpu else None}" in trier.tried[-1]
    for part, what, state in (
        ("DALIDataset(", "pipeline", BAD),
        ("load_operator", "operator of DALI", "warning"),
    ):
        trier = Answers(lambda code, part=part: OSError("no") if part in code else "1")
        (found,) = (one for one in doctor.examine_plugin(trier, on_gpu=False) if one.state != OK)
        assert found[:3] == (state, what, "no")
        operator = f"{python_command()} -m dali_tf_input.backends.dali_operator"
        assert found.fix == (doctor._install_plugin() if state == BAD else operator)

    def version(package):
        if "plugin" in package:
            raise importlib.metadata.PackageNotFoundError(package)
        return "2.4"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor.sys, "prefix", "/usr")
    (finding,) = doctor.examine_plugin(None, on_gpu=False)
    assert (finding.state, finding.what) == ("warning", "plugin")
    assert "tf.data alone works" in finding.found
    assert "pip install --no-build-isolation" in finding.fix


def test_cores(doctor, monkeypatch, tmp_path):
    """A quota, or cores that are left out, is a warning; a container's own set of cores is none."""
    file = tmp_path / "file"
    for read, numbers in (
        (doctor.cpus_allowed, {"0-3,8\n": 5, "2": 1, "0-7": 8, "": None}),
        (doctor.cpu_quota, {"max 100000": None, "150000 100000": 1.5, "rubbish": None}),
    ):
        for text, number in numbers.items():
            file.write_text(text)
            assert read(str(file)) == number
        assert read(str(tmp_path / "none")) is None
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 8)
    for usable, quota, allowed, state in (
        (2, None, None, "warning"),
        (2, None, 4, "warning"),
        (2, None, 2, OK),  # docker --cpuset-cpus
        (8, 2.5, 8, "warning"),  # docker --cpus
        (8, None, 8, OK),
    ):
        values = {"cpu_quota": quota, "cpus_allowed": allowed}
        for name, value in values.items():
            monkeypatch.setattr(doctor, name, lambda value=value: value)
        monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _, n=usable: {*range(n)})
        (finding,) = doctor.examine_cores()
        assert (finding.state, bool(finding.fix)) == (state, state == "warning")


def test_what_is_tried(doctor, monkeypatch):
    """A process that fails, dies or hangs is told, and the next try has a fresh one."""
    says = (
        "Critical error in pipeline:\\n\\n[/dali.cc:7] Assert failed: no driver\\nCurrent pipeline"
        " object is no longer valid."
    )
    said = "[/dali.cc:7] Assert failed: no driver"
    with doctor.Trier() as trier:
        first = trier.attempt("import os; print('noise'); print(os.getpid())")
        assert first[0]
        assert trier.attempt("import os; os.write(1, b'chatter'); print(os.getpid())") == first
        assert trier.attempt("raise ImportError('no such')") == (False, "ImportError: no such")
        assert trier.attempt("import os; print(os.getpid())") != first
        assert trier.attempt(f"raise RuntimeError('{says}')") == (False, said)
        for code, how in (("os.abort()", "SIGABRT"), ("os._exit(0)", "exit code 0")):
            assert trier.attempt(f"import os; {code}") == (False, f"the process died ({how})")
        assert trier.attempt("print('well')") == (True, "well")
        monkeypatch.setattr(doctor, "_SECONDS", 1)
        assert trier.attempt("import time; time.sleep(99)") == (False, "no answer within 1 s")


def test_what_is_wrong_with_records_is_fixed_by_its_own_command(doctor, tmp_path, monkeypatch):
    """Not by the index command in every case."""

    def write(name, first=None, *, index=True, image="image", label="label", **how):
        first = jpeg(8, 8) if first is None else first
        examples = [{image: jpeg(8, 8) if n else first, label: n} for n in range(3)]
        (tmp_path / name).mkdir()
        file = write_tfrecord(tmp_path / name / "train", examples)
        if index:
            checks = Checks(verify="schema", image_key=image, label=ClassLabel(key=label))
            build_index(file, checks, **how)
        return file

    def find(files):
        return list(doctor.examine_files([files]))

    new = write("new", index=False)
    keys = write("keys", image="jpg", label="cls")
    skipped = write("skipped", b"", on_bad="skip", max_bad_fraction=1)
    records, labels = find(skipped)
    assert (records.state, records.found) == ("warning", "2 in 1 file, 1 skipped")
    assert records.fix.startswith(f"head {tmp_path}/skipped/bad_records.jsonl")
    assert (labels.state, labels.found) == (OK, "1 to 2")
    os.utime(skipped, (1, 1))
    flags = "--on_bad=skip --max_bad_fraction=0.334"
    for files, said, fix in (
        (new, "have no index", f"{python_command()} -m dali_tf_input index {new}"),
        (
            f"{tmp_path}/none-*",
            "",
            f"ls {tmp_path}    # what is there? then --files='path/train-*'",
        ),
        (skipped, flags, f"{python_command()} -m dali_tf_input index {flags} {skipped}"),
        (str(tmp_path), "", f"{program()} doctor --files='{tmp_path}/*-of-*'"),
        ("hdfs://host/train-*", "got hdfs://", ""),
        (keys, "", f"{program()} doctor --files={keys} --image_key=KEY --label_key=KEY"),
    ):
        (finding,) = find(files)
        assert (finding.what, finding.state, finding.fix) == ("records", BAD, fix)
        assert said in finding.found
    (tmp_path / "bad").mkdir()
    bad = write_tfrecord(tmp_path / "bad/train", [{"image": b"", "label": 1}])
    build_index(bad, Checks(verify="schema"), on_bad="skip", max_bad_fraction=1)
    (finding,) = find(bad)
    assert finding.fix == f"head {tmp_path}/bad/bad_records.jsonl"
    broken = types.SimpleNamespace(dataset=lambda _: os.stat("/proc/self/mem/none"))
    monkeypatch.setattr(doctor, "_FILES", broken)
    (finding,) = find(new)  # what cannot be read is a line of the report too
    assert (finding.what, finding.state) == ("records", BAD)


@pytest.mark.parametrize("is_made", [True, False])
def test_a_fix_is_for_the_environment_it_runs_in(doctor, tmp_path, monkeypatch, is_made):
    """Nothing is removed but the mark of `make install`, in an environment that it made."""
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path / ".venv"))
    (tmp_path / ".venv").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/install.sh").write_text("")  # a clone, whoever made .venv in it
    if is_made:
        (tmp_path / ".venv/.installed-gpu").touch()
    remake = f"cd {tmp_path} && rm -f .venv/.installed* && make install GPU=1"
    compile_it = "--no-build-isolation --no-cache-dir --force-reinstall --no-deps "
    compile_it += f"nvidia-dali-tf-plugin-cuda120=={importlib.metadata.version(DALI)}"
    assert (remake if is_made else compile_it) in doctor._install_plugin()
    fix = doctor.reinstall("tensorflow[and-cuda]", DALI)
    words = shlex.split(fix.partition("--force-reinstall ")[2])
    assert fix.startswith(f"{python_command()} -m pip install --force-reinstall ")
    assert words == ["tensorflow[and-cuda]<2.22,>=2.20", "nvidia-dali-cuda120==2.4.*"]


def test_packages_of_other_names_have_no_version():
    assert with_version("no-such-package") == "no-such-package"
    assert with_version("keras") != with_version("keras[extra]") != "keras[extra]"
