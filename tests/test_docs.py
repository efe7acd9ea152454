"""docs/: the site builds without a warning, the tutorial runs, the picture of the rooms is that of
the package, and what pages name exists.
"""

import os
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest
from conftest import ROOT

import dali_tf_input

PACKAGE = ROOT / "dali_tf_input"
# index_step.md still names a test that moved; it joins when it is rewritten.
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "index_step.md"]
PAGES += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


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
    printed = "".join(
        output.text
        for output in last.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert int(printed.splitlines()[-1]) >= 9


def test_api_reference_is_complete():
    """It has every public name, under the module that defines it, and no name that is gone."""
    reference = (ROOT / "docs/api.md").read_text()
    shown = set(re.findall(r"^::: dali_tf_input\.([\w.]+)$", reference, re.MULTILINE))
    stub = (ROOT / "dali_tf_input/__init__.pyi").read_text()
    public = re.findall(r"^from \.([\w.]+) import (\w+) as", stub, re.MULTILINE)
    assert {name for _, name in public} == set(dali_tf_input.__all__)
    for module, name in public:
        assert {f"{module}.{name}", module} & shown, name
    for path in shown:
        module, _, name = path.rpartition(".")
        source = (
            PACKAGE / f"{path.replace('.', '/')}.py",
            PACKAGE / f"{module.replace('.', '/')}.py",
        )
        assert source[0].exists() or re.search(
            rf"^(class|def) {name}\b", source[1].read_text(), re.MULTILINE
        ), path


def test_the_picture_of_the_rooms_is_the_package():
    page = (ROOT / "docs/design.md").read_text()
    rooms = re.findall(r"^([a-z]+(?:/|\.py)) {3,}", page, re.MULTILINE)
    entries = {
        entry.name + "/" * entry.is_dir()
        for entry in PACKAGE.iterdir()
        if entry.name not in ("__pycache__", "py.typed") and not entry.name.startswith("__")
    }
    assert len(rooms) == len({*rooms})
    assert {*rooms} == entries


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    """Its links, files, make verbs and modules, and all that it calls `dti.name`."""
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
    for path in re.findall(r"\b(?:scripts|tests|dali_tf_input)/[\w/]+\.\w+\b", text):
        assert path in ("scripts/name.py", "dali_tf_input/cli/name.py") or (ROOT / path).exists(), (
            path
        )
    makefile = (ROOT / "Makefile").read_text()
    for verb in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
    for name in re.findall(r"\bdti\.(\w+)", text):
        assert name in dali_tf_input.__all__, name


def anchors(page):
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in words}
