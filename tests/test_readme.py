"""The README tells the truth: it is short, its examples run, its links and commands exist."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT, jpeg

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TWO_REPLICAS = """
import tensorflow as tf
if not tf.config.list_physical_devices("GPU"):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_example_runs(number, sample_folder, tmp_path):
    """As they stand; the multi-GPU example on two logical CPU devices where there is no GPU."""
    (tmp_path / "data").symlink_to(sample_folder / "data")
    (tmp_path / "photo.jpg").write_bytes(jpeg(120, 160))
    code = (TWO_REPLICAS if number == 1 else "") + EXAMPLES[number]
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    if number == 1:
        assert "('CPU:0', 'CPU:1')" in process.stdout or "GPU:0" in process.stdout


def test_quickstart_comes_first_and_is_short():
    assert len(EXAMPLES) == 2
    assert len(EXAMPLES[0].splitlines()) <= 16
    assert len(README[: README.index(EXAMPLES[0])].splitlines()) <= 20
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
