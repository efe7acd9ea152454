"""`make doctor` in environments that are really broken: each is a line of the report, with the command that mends it."""

import importlib
import os
import subprocess
import sys

import pytest
from absl import flags
from conftest import SCRIPTS, jpeg, write_tfrecord

from dali_tf_input import Checks, build_index

# Run by Python as it starts: what an import of the plugin meets.
HINDRANCE = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {what}

sys.meta_path.insert(0, Finder())
"""
OTHER_VERSION = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda package: "1.0" if "plugin" in package else version(package)
"""


def examine(tmp_path, *arguments, site="", smi=None):
    """Runs the doctor; returns its exit code and the lines it printed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    path = os.environ["PATH"]
    if smi is not None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
        (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
        path = f"{tmp_path}/bin:{path}"
    process = subprocess.run(
        [sys.executable, SCRIPTS / "doctor.py", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}", "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.stderr == ""
    return process.returncode, process.stdout.splitlines()


def line_of(lines, what):
    """Returns state and text of a line, and the line below it."""
    position = next(n for n, line in enumerate(lines) if line[9:].startswith(what + "  "))
    return lines[position].split()[0], lines[position], lines[position + 1]


def test_a_sound_environment(tmp_path, dataset):
    build_index(dataset.files, Checks(verify="schema"))
    code, lines = examine(tmp_path, *(f"--files={file}" for file in dataset.files))
    assert (code, lines[-1]) == (0, "0 things broken, 0 warnings.")
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * (len(lines) - 1)
    assert "serves a batch on the CPU" in line_of(lines, "pipeline")[1]
    assert "24 in 3 files" in line_of(lines, "records")[1]


@pytest.mark.parametrize(
    ("site", "what", "found"),
    [
        (HINDRANCE.format(module="nvidia.dali", what="raise ImportError('there is none')"), "DALI", "there is none"),
        (
            HINDRANCE.format(module="nvidia.dali.plugin.tf", what="raise ImportError('undefined symbol: _Z')"),
            "plugin",
            "undefined symbol",
        ),
        (
            HINDRANCE.format(module="nvidia.dali.plugin.tf", what="import os; os.kill(os.getpid(), 11)"),
            "plugin",
            "the process died (SIGSEGV)",
        ),
        (OTHER_VERSION, "plugin", "1.0, made for another DALI than 2.4"),
    ],
    ids=["no_dali", "plugin_of_another_tensorflow", "plugin_that_crashes", "plugin_of_another_dali"],
)
def test_a_broken_environment(tmp_path, site, what, found):
    code, lines = examine(tmp_path, site=site)
    state, line, mend = line_of(lines, what)
    assert (code, state) == (1, "broken")
    assert found in line
    assert mend.strip() == "-> rm -rf .venv && make install"
    assert "1 thing broken" in lines[-1]


@pytest.mark.parametrize(
    ("smi", "what", "found"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "driver", "version mismatch"),
        ("echo 'NVIDIA H100, 550.1'", "TensorFlow's GPUs", "0 of 1"),
    ],
    ids=["driver", "gpu_that_tensorflow_does_not_see"],
)
def test_a_broken_gpu(tmp_path, smi, what, found):
    code, lines = examine(tmp_path, smi=smi)
    state, line, _ = line_of(lines, what)
    assert (code, state) == (1, "broken")
    assert found in line


def test_files_that_are_not_well(tmp_path):
    file = write_tfrecord(tmp_path / "train", [{"image": jpeg(8, 8), "label": n} for n in range(3)])
    doctor = importlib.import_module("doctor")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    (finding,) = doctor.examine_files([file])
    assert (finding.what, finding.state) == ("records", "broken")
    assert "have no index" in finding.found
    build_index(file)
    code, lines = examine(tmp_path, f"--files={file}")
    assert (code, lines[-1]) == (0, "0 things broken, 1 warning.")
    state, _, mend = line_of(lines, "labels")
    assert state == "warning"
    assert mend.strip() == f"-> make index DATA={file} ARGS=--verify=schema"
