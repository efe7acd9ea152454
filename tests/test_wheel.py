"""The wheel, in an environment of its own: what `pip install` gives a user, without a clone beside
it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

import pytest
from conftest import QUICK_IMPORTS, ROOT, jpeg
from test_snippets import NETWORKS

pytestmark = pytest.mark.wheel

WITHOUT_PLUGIN = """
import sys
sys.modules["nvidia.dali.plugin.tf"] = None  # as if it were not installed
from dali_tf_input import DaliOptions, Records, InputError, InputSpec, Preprocess, make_dataset
dataset = Records.from_files("data/sample/train-*")
spec = InputSpec(records=dataset, preprocess=Preprocess.for_training(32), order="global")
try:
    make_dataset(spec, DaliOptions(device="cpu"), batch_size=4)
except InputError as error:
    print(error)
"""
WITHOUT_DALI = """
import sys
sys.modules["nvidia.dali"] = None
"""
KERNEL = """
from dali_tf_input.backends.tf_native import uses_native
print("native:", uses_native("auto"))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Returns the Python of an environment into which the wheel is installed."""
    (wheel,) = (ROOT / "dist").glob("*.whl")  # of `make wheel`
    folder = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True
    )
    # What the package depends on is taken from this environment: nothing is downloaded.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


def execute(python, folder, *words):
    """Runs Python in `folder`, which is not the clone; returns what it printed."""
    path = os.environ["PATH"].replace(f"{ROOT}/tests/no_gpu:", "")
    environment = {**os.environ, "PATH": path, "PYTHONPATH": QUICK_IMPORTS}
    process = subprocess.run(
        [python, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr + process.stdout
    return process.stdout


def test_wheel_in_another_folder(python, sample_folder, tmp_path):
    """The index command; the first training of the docs without DALI; what asks for its plugin."""
    where = execute(python, tmp_path, "-c", "import dali_tf_input; print(dali_tf_input.__file__)")
    assert where.startswith(str(python.parent.parent))
    (tmp_path / "data/sample").mkdir(parents=True)
    for file in (sample_folder / "data/sample").iterdir():
        if "-of-" in file.name and file.suffix != ".idx":
            shutil.copy(file, tmp_path / "data/sample")
    (tmp_path / "photo.jpg").write_bytes(jpeg(120, 160))
    (tmp_path / "records").symlink_to("data/sample")
    page = (ROOT / "docs/training.md").read_text()
    quickstart = NETWORKS + re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    index = execute(python, tmp_path, "-m", "dali_tf_input", "index", "data/sample/*-of-*")
    assert "indexed" in index
    printed = execute(python, tmp_path, "-c", WITHOUT_DALI + quickstart + KERNEL)
    assert f"native: {bool(shutil.which('g++'))}" in printed
    refusal = execute(python, tmp_path, "-c", WITHOUT_PLUGIN)
    assert "nvidia-dali-tf-plugin-cuda120" in refusal
    assert "pip install" in refusal


def test_the_command_of_a_pip_user(python, tmp_path):
    """From photos to a sheet, by the commands that the wheel installs; each message names them."""
    for number in range(24):
        photo = tmp_path / "photos" / ("cat" if number % 2 else "dog") / f"{number}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes(jpeg(60, 80, seed=number))
    program = python.parent / "dali-tf-input"
    assert "index    where each record is" in execute(program, tmp_path)
    for name in ("index", "convert", "preview", "doctor", "service"):
        assert f"\n\nexample: dali-tf-input {name} " in execute(program, tmp_path, name, "--help")
    written = execute(program, tmp_path, "convert", "photos", "records")
    (command,) = re.findall(r"^next: .*(dali_tf_input|dali-tf-input) (index .*)$", written, re.M)
    assert "24" in execute(program, tmp_path, *shlex.split(command[1]))
    preview = ["preview", "--files=records/train-*-of-?????", "--num_images=2", "--image_size=32"]
    execute(program, tmp_path, *preview)
    assert (tmp_path / "sheet.png").exists()
    report = execute(program, tmp_path, "doctor", "--files=records/train-*-of-?????")
    assert "0 things broken" in report
