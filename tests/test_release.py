"""What a release is made of: its tag, the page of the package, its workflows."""

import os
import runpy
import subprocess
import sys

import pytest
import setuptools
import yaml
from conftest import ROOT

import dali_tf_input as dti

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()
}


def read_step(job):
    (step,) = (step for step in WORKFLOWS["release"]["jobs"][job]["steps"] if "run" in step)
    return step["run"]


@pytest.mark.parametrize("tag", ["own", "v9.9.9", "none"])
def test_a_tag_is_that_of_the_version(tmp_path, tag):
    """And the changelog has a date for it."""
    (tmp_path / "dali_tf_input").mkdir()
    (tmp_path / "dali_tf_input/__init__.py").write_text(f'__version__ = "{dti.__version__}"\n')
    dated = f"## {dti.__version__} - 2026-01-01\n" if tag == "own" else "## unreleased\n"
    (tmp_path / "CHANGELOG.md").write_text(dated)
    name = tag if tag == "v9.9.9" else f"v{dti.__version__}"
    process = subprocess.run(
        ["bash", "-e", "-c", read_step("version")],
        cwd=tmp_path,
        env={**os.environ, "GITHUB_REF_NAME": name},
        capture_output=True,
        text=True,
        check=False,
    )
    said = {"own": "", "v9.9.9": "the tag is v9.9.9, the version ", "none": "CHANGELOG.md has no"}
    assert process.stdout.startswith(said[tag]), process.stderr
    assert process.returncode == (tag != "own")


def test_tests_gate_what_is_published():
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert {*jobs["publish"]["needs"]} == {"wheels", "sdist"}
    for job in ("wheels", "sdist"):
        assert {*jobs[job]["needs"]} == {"tests", "version"}


@pytest.mark.parametrize("url", ["", "https://example.org/them/it/"])
def test_links_of_the_page(monkeypatch, url):
    """They work on the site of the package, and in a clone."""
    given = {}
    monkeypatch.setenv("DALI_TF_INPUT_URL", url)
    monkeypatch.setattr(setuptools, "setup", lambda **how: given.update(how))
    runpy.run_path(str(ROOT / "setup.py"))
    page, readme = given["long_description"], (ROOT / "README.md").read_text()
    assert (page == readme) == (not url)
    assert bool(given["project_urls"]) == bool(url)
    if url:
        assert "](docs/" not in page
        assert "](https://example.org/them/it/blob/main/docs/install.md)" in page


@pytest.mark.wheel
@pytest.mark.parametrize("required", ["", "1"])
def test_a_wheel_without_its_operations(tmp_path, required):
    """Without a compiler it is slower, or, where it must not be, is not made."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "dali_tf_input"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "CXX": "false", "CC": "false"}
    environment["DALI_TF_INPUT_REQUIRE_NATIVE"] = required
    words = ["setup.py", "-q", "build_ext", "--build-lib=lib", "--build-temp=temp"]
    process = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert (process.returncode != 0) == bool(required)
    assert not [*(tmp_path / "lib").rglob("*.so.1")]
