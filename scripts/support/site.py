"""Hooks of MkDocs: what the site shows that is written elsewhere."""

import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the help of commands and the changelog."""
    markdown = re.sub(r"^\{\{ help (\w+) \}\}$", _show_help, markdown, flags=re.MULTILINE)
    return markdown.replace("{{ changelog }}", (ROOT / "CHANGELOG.md").read_text())


def on_post_build(config: Any) -> None:
    """Copies what coding agents read to the root of the site."""
    shutil.copy(ROOT / "llms.txt", config["site_dir"])


def _show_help(name: re.Match[str]) -> str:
    command = [sys.executable, "-m", "dali_tf_input", name[1], "--help"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"```text\n{process.stdout.strip()}\n```"
