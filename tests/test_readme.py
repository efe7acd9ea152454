"""The README is short, and what it names exists. Its examples run in test_snippets.py."""

import ast
import re

from conftest import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_front_door_comes_first_and_is_short():
    six_lines = EXAMPLES[0]
    assert len(ast.parse(six_lines).body) == 6
    assert len(README[: README.index(six_lines)].splitlines()) <= 20
    assert len(README.splitlines()) <= 120


def test_the_front_door_is_the_same_everywhere():
    for page in ("docs/index.md", "skills/dali-tf-input/SKILL.md"):
        assert EXAMPLES[0] in (ROOT / page).read_text()


def test_commands_and_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))  # in code, not in prose
    assert {"compare", "test", "install", "help", "docs"} <= verbs
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
    paths = set(re.findall(r"(?:scripts|docs)/\w+\.(?:py|md|ipynb|png)", README))
    paths |= set(re.findall(r"\]\(([^)#:]+)", README))
    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists(), path
