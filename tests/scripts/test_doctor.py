"""`make doctor` in environments that are really broken: each is a line of the report, with the
command that mends it.
"""

import contextlib
import importlib.metadata
import os
import shlex
import shutil
import types

import pytest
from commands import load, run_cold
from conftest import jpeg, nightly, write_dataset, write_tfrecord

from dali_tf_input import Checks, ClassLabel, InputError, build_index
from dali_tf_input.cli import machine
from dali_tf_input.records.installing import DALI, with_version
from dali_tf_input.records.paths import program, python_command

# Run by Python as it starts: what an import of the plugin meets.
HINDRANCE = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {what}

sys.meta_path.insert(0, Finder())
"""
PLUGIN = "nvidia.dali.plugin.tf"
NOT_INSTALLED = """
import importlib.metadata
version = importlib.metadata.version

def find(package):
    if "plugin" in package:
        raise importlib.metadata.PackageNotFoundError(package)
    return version(package)

importlib.metadata.version = find
"""
OTHER_VERSION = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda package: "1.0" if "plugin" in package else version(package)
"""


def hinder(module, what):
    return HINDRANCE.format(module=module, what=what)


def write_smi(folder, command, shell="/bin/sh"):
    (folder / "nvidia-smi").write_text(f"#!{shell}\n{command}\n")
    (folder / "nvidia-smi").chmod(0o755)


def examine(tmp_path, *arguments, site="", smi=None):
    """Runs the doctor; returns its exit code and the lines it printed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    (tmp_path / "bin").mkdir()  # all that it finds: what this machine has of GPUs does not count
    if smi is not None:
        write_smi(tmp_path / "bin", smi)
    path = f"{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}"
    process = run_cold("doctor", *arguments, PYTHONPATH=path, PATH=f"{tmp_path}/bin")
    assert process.stderr == ""
    return process.returncode, process.stdout.splitlines()


def import_doctor():
    doctor = load("doctor")
    doctor.FLAGS(["test"])
    return doctor


def line_of(lines, what):
    """Returns state and text of a line, and the line below it."""
    position = next(n for n, line in enumerate(lines) if line[9:].startswith(what + "  "))
    return lines[position].split()[0], lines[position], lines[position + 1]


@pytest.mark.slow
def test_a_sound_environment(tmp_path):
    dataset = write_dataset(tmp_path / "records", [5, 12, 7])
    build_index(dataset.paths, Checks(verify="schema"))
    code, lines = examine(tmp_path, *(f"--files={file}" for file in dataset.paths))
    assert code == 0
    assert lines[-1].startswith("No problems found, ")
    bad = [line for line in lines[:-1] if line.split()[0] != "ok" and "->" not in line]
    assert [line for line in bad if "cores  " not in line] == []
    assert "serves a batch on the CPU" in line_of(lines, "pipeline")[1]
    assert "24 in 3 files" in line_of(lines, "records")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "what", "found"),
    [
        (hinder("nvidia.dali", "raise ImportError('none')"), "DALI", "ImportError: none"),
        nightly(hinder(PLUGIN, "raise ImportError('undefined _Z')"), "plugin", "undefined _Z"),
        (hinder(PLUGIN, "import os; os.kill(os.getpid(), 11)"), "plugin", "died (SIGSEGV)"),
        nightly(OTHER_VERSION, "plugin", "1.0, compiled for another DALI than 2.4"),
    ],
    ids=["no_dali", "other_tf", "crash", "other_dali"],
)
def test_a_broken_environment(tmp_path, site, what, found):
    code, lines = examine(tmp_path, site=site)
    state, line, fix = line_of(lines, what)
    assert (code, state) == (1, "broken")
    assert found in line
    assert "make install" in fix or "pip install" in fix
    assert lines[-1].startswith("1 problem, ")


@pytest.mark.parametrize(
    ("smi", "found"),
    [
        ("echo 'Failed to initialize NVML: version mismatch'; exit 18", "NVML: version"),
        ("echo 'NVIDIA H100, 515.65, 9 MiB, 80 MiB'", "CUDA 12 needs driver 525"),
    ],
    ids=["broken", "old"],
)
def test_a_driver(monkeypatch, tmp_path, smi, found):
    write_smi(tmp_path, smi)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (line,) = import_doctor().examine_driver()
    assert (line.state, line.what) == ("broken", "driver")
    assert found in line.found
    assert line.fix.startswith("nvidia-smi ")


@pytest.mark.slow
def test_a_gpu_that_tensorflow_does_not_see(tmp_path):
    code, lines = examine(tmp_path, smi="echo 'NVIDIA H100, 550.1'")
    state, line, _ = line_of(lines, "TensorFlow's GPUs")
    assert (code, state) == (1, "broken")
    assert "0 of 1" in line


@pytest.mark.parametrize(("force", "state"), [(None, "ok"), ("true", "ok"), ("false", "broken")])
def test_memory_growth_and_a_pipeline_on_the_gpu(monkeypatch, tmp_path, force, state):
    """What would be tried where both see the GPU; the answers are made up here."""
    doctor = load("doctor")
    tried = []

    class Trier(doctor.Trier):
        def attempt(self, code):
            tried.append(code)
            return True, "1"

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_smi(tmp_path, "echo 'NVIDIA H100, 550.1'")
    if force:
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", force)
    else:
        monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    trier, findings = Trier(), {}
    gpus = doctor.examine_gpus(trier, ["TensorFlow", "DALI"])
    with contextlib.suppress(StopIteration):
        while True:
            finding = next(gpus)
            findings[finding.what] = finding
    assert findings["memory growth"].state == state
    if force == "false":
        assert findings["memory growth"].fix == "unset TF_FORCE_GPU_ALLOW_GROWTH"
    for on_gpu, pipelines in ((False, ["pipeline"]), (True, ["pipeline", "GPU pipeline"])):
        found = list(doctor.examine_plugin(trier, on_gpu=on_gpu))
        states = [(finding.what, finding.state) for finding in found[1:]]
        assert states == [(what, "ok") for what in ("operator of DALI", *pipelines)]
    assert "device_id = 0" in tried[-1]
    assert any("enable_memory_growth" in code for code in tried) == (state == "ok")
    monkeypatch.setattr(Trier, "attempt", lambda _, code: ("DALIDataset(" not in code, "no"))
    *_, pipeline = doctor.examine_plugin(trier, on_gpu=False)
    assert pipeline[2:] == ("no", doctor._install_plugin())
    assert pipeline.state == "broken"
    monkeypatch.setattr(Trier, "attempt", lambda _, code: ("load_operator" not in code, "no"))
    operator = next(one for one in doctor.examine_plugin(trier, on_gpu=False) if one.state != "ok")
    assert (operator.what, operator.state) == ("operator of DALI", "warning")
    assert operator.fix.endswith("python -m dali_tf_input.backends.dali_operator")


def test_gpus_that_only_the_libraries_see(monkeypatch, tmp_path):
    """As in a container without nvidia-smi."""
    doctor = load("doctor")

    class Trier(doctor.Trier):
        def attempt(self, code):
            return True, "2" if "DALI" in code or "dali" in code else "0"

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    dali, tensorflow = sorted(doctor.examine_gpus(Trier(), ["TensorFlow", "DALI"]))[::-1]
    assert (dali.what, dali.state) == ("DALI's GPUs", "ok")
    assert (tensorflow.what, tensorflow.found) == ("TensorFlow's GPUs", "0 of 2")
    assert tensorflow.fix == doctor.reinstall("tensorflow[and-cuda]", DALI)


ONE_OF_8 = ("ok", "1 of 8, those of CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("visible", "tensorflow", "dali", "found"),
    [
        ("2", "1", "1", [ONE_OF_8, ONE_OF_8]),
        ("", "0", "0", [("broken", "0 of 8"), ("broken", "0 of 8")]),
        (None, "8", "8", [("ok", "8"), ("ok", "8")]),
        ("2", "0", "1", [("broken", "0 of 1"), ONE_OF_8]),
        (None, "0", "8", [("broken", "0 of 8"), ("ok", "8")]),
    ],
)
def test_gpus_that_are_left_to_others(monkeypatch, tmp_path, visible, tensorflow, dali, found):
    doctor = load("doctor")
    write_smi(tmp_path, "for gpu in 1 2 3 4 5 6 7 8; do echo 'NVIDIA H100, 550.1'; done")
    monkeypatch.setenv("PATH", str(tmp_path))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    answers = types.SimpleNamespace(
        attempt=lambda code: (True, dali if "dali as" in code else tensorflow)
    )
    lines = doctor.examine_gpus(answers, ["TensorFlow", "DALI"])
    lines = [finding for finding in lines if "'s GPUs" in finding.what]
    assert [(line.state, line.found) for line in lines] == found
    if visible == "":
        assert lines[0].fix == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize("text", ["libnvcuvid.so.1: cannot open", "NVMLError: Not Supported"])
def test_a_gpu_without_its_jpeg_decoder(monkeypatch, tmp_path, text):
    write_smi(tmp_path, "echo 'NVIDIA H100, 550.1'")
    monkeypatch.setenv("PATH", str(tmp_path))
    doctor = load("doctor")
    trier = types.SimpleNamespace(attempt=lambda code: (False, text))
    found = {line.what: line for line in doctor.examine_gpus(trier, [])}["hardware JPEG decoder"]
    assert (found.state, "docker run" in found.fix) == ("warning", "Not" not in text)


def test_a_driver_that_hangs(monkeypatch, tmp_path):
    doctor = load("doctor")
    write_smi(tmp_path, f"exec {shutil.which('sleep')} 99", shell=shutil.which("sh"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_SECONDS", 1)
    (finding,) = doctor.examine_driver()
    assert (finding.state, finding.found) == ("broken", "nvidia-smi does not answer within 1 s")
    with pytest.raises(
        InputError, match=r"nvidia-smi does not answer within 1 s: the driver hangs.*doctor"
    ):
        machine.ask_driver("name")


def test_cores(monkeypatch, tmp_path):
    doctor = load("doctor")
    quota = tmp_path / "cpu.max"
    allowed = tmp_path / "cpuset"
    for text, number in (("0-3,8\n", 5), ("2", 1), ("0-7", 8), ("", None)):
        allowed.write_text(text)
        assert doctor.cpus_allowed(str(allowed)) == number
    assert doctor.cpus_allowed(str(tmp_path / "none")) is None
    found = []
    for text in ("max 100000", "150000 100000", "rubbish", None):
        quota.write_text(text) if text else quota.unlink()
        found.append(doctor.cpu_quota(str(quota)))
    assert found == [None, 1.5, None, None]
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 8)
    for usable, part, cpuset, state in (
        (2, None, None, "warning"),
        (2, None, 4, "warning"),
        (2, None, 2, "ok"),  # docker --cpuset-cpus
        (8, 2.5, 8, "warning"),  # docker --cpus
        (8, None, 8, "ok"),
    ):
        cores = set(range(usable))
        monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _, cores=cores: cores)
        monkeypatch.setattr(doctor, "cpu_quota", lambda part=part: part)
        monkeypatch.setattr(doctor, "cpus_allowed", lambda cpuset=cpuset: cpuset)
        (finding,) = doctor.examine_cores()
        assert (finding.state, bool(finding.fix)) == (state, state == "warning")


def test_what_is_tried():
    """A process that fails, dies or hangs is told, and the next try has a fresh one."""
    doctor = load("doctor")
    trier = doctor.Trier()
    assert trier.attempt("import os; print('noise'); print(os.getpid())")[0]
    first = trier.attempt("import os; print(os.getpid())")
    assert trier.attempt("import os; os.write(1, b'chatter'); print(os.getpid())") == first
    said = (False, "ImportError: no such thing")
    assert trier.attempt("raise ImportError('no such thing')") == said
    second = trier.attempt("import os; print(os.getpid())")
    assert second != first
    says = (
        "Critical error in pipeline:\\n\\n[/dali.cc:7] Assert failed: no driver\\nCurrent pipeline"
        " object is no longer valid."
    )
    said = (False, "[/dali.cc:7] Assert failed: no driver")
    assert trier.attempt(f"raise RuntimeError('{says}')") == said
    ends = {"os.abort()": "SIGABRT", "os._exit(3)": "exit code 3", "os._exit(0)": "exit code 0"}
    for code, how in ends.items():
        works, text = trier.attempt(f"import os; {code}")
        assert (works, text) == (False, f"the process died ({how})")
    trier.close()


def test_what_hangs_is_told(monkeypatch):
    doctor = load("doctor")
    trier = doctor.Trier()
    assert trier.attempt("print('well')") == (True, "well")
    monkeypatch.setattr(doctor, "_SECONDS", 1)
    assert trier.attempt("import time; time.sleep(99)") == (False, "no answer within 1 s")


@pytest.mark.slow
def test_files_that_are_not_well(tmp_path):
    file = write_tfrecord(tmp_path / "train", [{"image": jpeg(8, 8), "label": n} for n in range(3)])
    doctor = import_doctor()
    (finding,) = doctor.examine_files([file])
    assert (finding.what, finding.state) == ("records", "broken")
    assert "have no index" in finding.found
    assert finding.fix.endswith(f"python -m dali_tf_input index {file}")
    (finding,) = doctor.examine_files([f"{tmp_path}/none-*"])
    assert (finding.what, finding.state) == ("records", "broken")
    assert finding.fix.startswith(f"ls {tmp_path} ")
    build_index(file)
    code, lines = examine(tmp_path, f"--files={file}")
    assert (code, lines[-1].split(",")[0]) == (0, "No problems found")
    state, _, fix = line_of(lines, "labels")
    assert state == "warning"
    assert fix.endswith(f"python -m dali_tf_input index --verify=schema {file}")


def test_what_is_wrong_with_records_is_fixed_by_its_own_command(tmp_path, monkeypatch):
    """Not by the index command in every case."""
    doctor = import_doctor()
    examples = [{"image": jpeg(8, 8) if n else b"", "label": n} for n in range(3)]
    file = write_tfrecord(tmp_path / "train", examples)
    build_index(file, Checks(verify="schema"), on_bad="skip", max_bad_fraction=1)
    os.utime(file, (1, 1))
    (finding,) = doctor.examine_files([file])
    flags = "--on_bad=skip --max_bad_fraction=0.334"
    assert finding.fix.endswith(f"python -m dali_tf_input index {flags} {file}")
    assert finding.found.endswith(finding.fix)
    (finding,) = doctor.examine_files([str(tmp_path)])
    assert finding.fix == f"{program()} doctor --files='{tmp_path}/*-of-*'"
    (finding,) = doctor.examine_files(["hdfs://host/train-*"])
    assert "got hdfs://" in finding.found
    assert not finding.fix
    other = write_tfrecord(tmp_path / "other", [{"jpg": jpeg(8, 8), "cls": 1}])
    build_index(other, Checks(verify="schema", image_key="jpg", label=ClassLabel(key="cls")))
    (finding,) = doctor.examine_files([other])
    assert finding.fix == f"{program()} doctor --files={other} --image_key=KEY --label_key=KEY"
    bad = write_tfrecord(tmp_path / "bad", [{"image": b"", "label": 1}])
    build_index(bad, Checks(verify="schema"), on_bad="skip", max_bad_fraction=1)
    (finding,) = doctor.examine_files([bad])
    assert finding.fix == f"head {tmp_path}/bad_records.jsonl"


def test_files_that_lost_records(tmp_path, monkeypatch):
    doctor = import_doctor()
    examples = [{"image": jpeg(8, 8) if n else b"", "label": n} for n in range(3)]
    file = write_tfrecord(tmp_path / "train", examples)
    build_index(file, Checks(verify="schema"), on_bad="skip", max_bad_fraction=1)
    records, labels = doctor.examine_files([file])
    assert (records.state, records.found) == ("warning", "2 in 1 file, 1 skipped")
    assert records.fix.startswith(f"head {tmp_path}/bad_records.jsonl")
    assert (labels.state, labels.found) == ("ok", "1 to 2")
    monkeypatch.setattr(doctor._FILES, "dataset", lambda _: os.stat("/proc/self/mem/none"))
    (finding,) = doctor.examine_files([file])  # what cannot be read is a line of the report too
    assert (finding.what, finding.state) == ("records", "broken")


def test_flags():
    process = run_cold("doctor", "stray")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("error: Unknown arguments: stray")


@pytest.mark.parametrize("is_made", [True, False])
def test_a_fix_is_for_the_environment_it_runs_in(tmp_path, monkeypatch, is_made):
    """Nothing is removed but the mark of `make install`, in an environment that it made."""
    doctor = load("doctor")
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


def test_the_plugin_is_optional(monkeypatch):
    """Without it tf.data works: no more than a warning, with the command that compiles it."""
    doctor = load("doctor")

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
