"""docs/: the site builds without a warning, the tutorial runs, the picture of the layers is that of
the package, and what pages name exists.
"""

import contextlib
import json
import os
import re
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from commands import PACKAGE as COMMANDS
from commands import run
from conftest import ROOT, at_night
from conversions import here
from PIL import Image, ImageDraw

import dali_tf_input
from support import site

PACKAGE = ROOT / "dali_tf_input"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [ROOT / "llms.txt", ROOT / "skills/dali-tf-input/SKILL.md"]


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
def test_tutorial_runs(tmp_path, monkeypatch, capsys):
    """All cells run, on drawings instead of photos; at night what was trained predicts well.

    Its commands run in this process.
    """
    epochs = f"EPOCHS = {at_night(2, 9)}"
    if at_night(True, False):  # one process at a time, for which this one stands
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    random = np.random.default_rng(0)
    for number in range(480):
        shape = ("disk", "square", "triangle")[number % 3]
        path = tmp_path / shape / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        draw(shape, random).save(path)
    monkeypatch.setenv("PHOTOS", str(tmp_path))
    in_process = SimpleNamespace(run=lambda words, **_: run(*words[3:]))
    notebook = json.loads((ROOT / "docs/tutorial.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)  # which would hold photos
    plt.close("all")  # of other tests
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"]).replace("96", "48").replace("EPOCHS = 15", epochs)
        with at_night(here, contextlib.nullcontext()):
            exec(compile(source, f"cell {number}", "exec"), names)
        names["subprocess"] = in_process  # once the first cell has imported it
    assert "validation records: (49, 3)" in capsys.readouterr().out
    predicted = zip(names["files"], names["titles"], strict=True)
    right = [file.parent.name == title.split()[0] for file, title in predicted]
    assert len(right) == 12
    if at_night(False, True):
        assert sum(right) >= 9
    assert len(plt.get_fignums()) == 4
    plt.close("all")


def draw(shape, random):
    """Returns a picture of a shape, of any color, size and place."""
    height, width = random.integers(90, 160, 2)
    background, color = (tuple(map(int, random.integers(*of, 3))) for of in ((0, 90), (120, 255)))
    image = Image.new("RGB", (int(width), int(height)), background)
    radius = random.integers(20, 40)
    x, y = random.integers(radius, width - radius), random.integers(radius, height - radius)
    corners = {"disk": None, "square": 4, "triangle": 3}[shape]
    canvas = ImageDraw.Draw(image)
    if corners is None:
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    else:
        canvas.regular_polygon((int(x), int(y), int(radius)), corners, fill=color)
    return image


def test_api_reference_is_complete():
    """It has every public name, under the module that defines it, and no name that is gone."""
    reference = (ROOT / "docs/api.md").read_text()
    shown = set(re.findall(r"^::: dali_tf_input\.([\w.]+)$", reference, re.MULTILINE))
    for name, value in site.list_public().items():
        module = value.__module__.removeprefix("dali_tf_input.")
        assert {f"{module}.{value.__name__}", module} & shown, name
    for path in shown:
        module, _, name = path.rpartition(".")
        source = (
            PACKAGE / f"{path.replace('.', '/')}.py",
            PACKAGE / f"{module.replace('.', '/')}.py",
        )
        assert source[0].exists() or re.search(
            rf"^(class|def) {name}\b", source[1].read_text(), re.MULTILINE
        ), path


def test_every_page_has_its_place():
    """In the site's navigation, and each command in the command reference."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation
    shown = re.findall(r"^<!-- help (\w+) -->$", (ROOT / "docs/commands.md").read_text(), re.M)
    assert {*shown} == COMMANDS


def test_help_and_names_are_those_of_the_package():
    """If they are not: python scripts/support/site.py."""
    for page, text in site.fill_pages().items():
        assert page.read_text("utf-8") == text


def test_the_picture_of_the_layers_is_the_package():
    page = (ROOT / "docs/design.md").read_text()
    layers = re.findall(r"^([a-z]+(?:/|\.py)) {3,}", page, re.MULTILINE)
    entries = {
        entry.name + "/" * entry.is_dir()
        for entry in PACKAGE.iterdir()
        if entry.name not in ("__pycache__", "py.typed") and not entry.name.startswith("__")
    }
    assert len(layers) == len({*layers})
    assert {*layers} == entries


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
    for name in re.findall(r"\bdti\.((?:augment\.|serving\.)?\w+)", text):
        assert name in [*site.list_public(), *dali_tf_input.__all__], name


def test_the_first_program_is_the_same_everywhere():
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    for page in ("docs/index.md", "skills/dali-tf-input/SKILL.md"):
        assert program in (ROOT / page).read_text()


def anchors(page):
    """The anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in words}
