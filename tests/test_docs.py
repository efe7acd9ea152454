"""docs/: the site builds without a warning, the tutorial runs, and the picture of the floors is the
code's.
"""

import os
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest
from conftest import ROOT
from test_floors import FLOORS


@pytest.mark.slow
def test_site_builds(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "iterate_batches" in (tmp_path / "api/index.html").read_text()


@pytest.mark.slow
def test_tutorial_runs():
    """All cells run, and what was trained predicts well."""
    notebook = nbformat.read(ROOT / "docs/tutorial.ipynb", as_version=4)
    last = notebook.cells[-1]
    last.source += (
        "\nprint(sum(title.split()[0] == ('disk', 'square', 'triangle')[i % 3] for i, title in"
        " enumerate(titles)))"
    )
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "docs")}}
    )
    client.execute()
    (printed,) = (
        one.text for one in last.outputs if one.output_type == "stream" and one.name == "stdout"
    )
    assert int(printed) >= 9


def test_api_reference_is_complete():
    """It has every public name."""
    reference = (ROOT / "docs/api.md").read_text()
    stub = (ROOT / "dali_tf_input/__init__.pyi").read_text()
    found = re.findall(r"^from \.([\w.]+) import (\w+) as", stub, re.MULTILINE)
    assert len(found) > 40
    for module, name in found:
        if (name[0].isupper() and not name.isupper() and module != "crops") or name.islower():
            assert f"dali_tf_input.{module}.{name}" in reference, name


def test_floors_in_the_picture_are_those_of_the_code():
    picture = (ROOT / "docs/design.md").read_text()
    floors = re.findall(r"^ ?(\d+)  ([a-z_| ]+?)(?:  |\n)", picture, re.MULTILINE)
    rooms = {int(floor): set(names.split(" | ")) for floor, names in floors}
    assert rooms.pop(len(FLOORS)) == {"scripts"}
    assert rooms == dict(enumerate(FLOORS))
