"""The README tells the truth: its examples run, its picture is the code's, its commands exist."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_floors import FLOORS

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TWO_REPLICAS = """
import tensorflow as tf
if not tf.config.list_physical_devices("GPU"):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
"""


@pytest.mark.parametrize("number", range(2))
def test_example_runs(number, sample_folder):
    """The Keras example as it stands; the multi-GPU example on two logical CPU devices where there is no GPU."""
    code = (TWO_REPLICAS if number == 1 else "") + EXAMPLES[number]
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=sample_folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr
    if number == 1:
        assert "('CPU:0', 'CPU:1')" in process.stdout or "GPU:0" in process.stdout


def test_examples_are_all_tested():
    assert len(EXAMPLES) == 2
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 15


def test_floors_in_the_picture_are_those_of_the_code():
    picture = dict(re.findall(r"^ ?(\d+)  ([a-z_| ]+?)(?:  |\n)", README, re.MULTILINE))
    rooms = {int(floor): set(names.split(" | ")) for floor, names in picture.items()}
    assert rooms.pop(len(FLOORS)) == {"scripts"}
    assert rooms == dict(enumerate(FLOORS))


def test_usage_names_every_flag():
    """What a script says of itself has each flag that it defines, with the default that it has."""
    for script in (ROOT / "scripts").glob("*.py"):
        text = script.read_text()
        usage = ast.get_docstring(ast.parse(text)) or ""
        if "usage:" not in usage or "[...]" in usage:
            continue
        for name, default, rest in re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)",\s*([^,]+),(.*)', text):
            if re.search("for soak.py itself|that this one starts", rest):
                continue
            found = re.search(rf"--(?:no)?{name}\b(?:=([\d.]+))?", usage)
            assert found, f"{script.name} --{name}"
            if found[1] and re.fullmatch(r"[\d_.]+", default):
                assert float(found[1]) == float(default), f"{script.name} --{name}"


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))  # in code, not in prose
    assert {"compare", "test", "index", "install", "train", "data", "help", "test-gpu"} <= verbs
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
    for script in set(re.findall(r"scripts/\w+\.py", README)):
        assert (ROOT / script).exists(), script
