"""What the documentation shows that is written elsewhere: help texts, and the public names.

`python scripts/support/site.py` writes them into docs/commands.md and docs/api.md, so that they can
be read in a clone; a test compares. MkDocs has this file as a hook.
"""

import importlib
import inspect
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_HELP = re.compile(r"^<!-- help (\w+) -->\n.*?^```$", re.MULTILINE | re.DOTALL)
_NAMES = re.compile(r"^<!-- names -->\n.*?\n\n", re.MULTILINE | re.DOTALL)


def on_post_build(config: Any) -> None:
    """Copies what coding agents read to the root of the site."""
    shutil.copy(ROOT / "llms.txt", config["site_dir"])


def fill_pages() -> dict[pathlib.Path, str]:
    """Returns the pages as they should be."""
    commands, api = ROOT / "docs/commands.md", ROOT / "docs/api.md"
    return {
        commands: _HELP.sub(_show_help, commands.read_text("utf-8")),
        api: _NAMES.sub(lambda _: _list_names(), api.read_text("utf-8")),
    }


def _show_help(name: re.Match[str]) -> str:
    command = [sys.executable, "-m", "dali_tf_input", name[1], "--help"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"<!-- help {name[1]} -->\n```text\n{process.stdout.strip()}\n```"


def list_public() -> dict[str, Any]:
    """Returns the public names of the package, and those of its public modules, such as "a.B"."""
    package = importlib.import_module("dali_tf_input")
    public: dict[str, Any] = {}
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.ismodule(value):
            public |= {f"{name}.{inner}": getattr(value, inner) for inner in value.__all__}
        else:
            public[name] = value
    return public


def _list_names() -> str:
    rows = ["<!-- names -->", "| name | what |", "| --- | --- |"]
    public = list_public()
    for name in sorted(public, key=str.lower):
        text = (public[name].__doc__ or "").strip().split("\n\n")[0]
        rows.append(f"| `{name}` | {' '.join(text.split()).replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n\n"


if __name__ == "__main__":
    for page, text in fill_pages().items():
        page.write_text(text, "utf-8")
