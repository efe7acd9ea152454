"""Runs the steps of the workflows that this machine can run, each job in a clone and environment of its own.

usage: python .github/run_workflows.py [JOB...]

Steps that only GitHub has (`uses:`) are replaced, checkout by a clone and setup-python by a virtual environment, or left
out. Jobs for other machines and for versions of Python that are not here are left out, and named.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
HERE = "ubuntu-24.04"


def main(wanted: list[str]) -> int:
    failed = 0
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, job in workflow["jobs"].items():
            if not wanted or name in wanted:
                for values in list_matrix(job):
                    label = f"{path.stem} / {name} {' '.join(values.values())}"
                    failed += not run_job(label, job, values, workflow.get("env", {}))
    return failed


def list_matrix(job: dict) -> list[dict[str, str]]:
    axes = job.get("strategy", {}).get("matrix", {})
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def run_job(label: str, job: dict, values: dict[str, str], shared: dict[str, str]) -> bool:
    """Runs a job in a folder of its own; returns whether no step failed."""
    with tempfile.TemporaryDirectory() as folder:
        return run_steps(label, job, values, shared, folder)


def run_steps(
    label: str, job: dict, values: dict[str, str], shared: dict[str, str], folder: str
) -> bool:
    def fill(text: object) -> str:
        names = {f"matrix.{name}": value for name, value in values.items()}
        names |= {"github.server_url": "https://example.org", "github.repository": "them/it"}
        names["github.workspace"] = f"{folder}/clone"
        return re.sub(r"\$\{\{ *([\w.]+) *\}\}", lambda one: names.get(one[1], ""), str(text))

    if "steps" not in job or fill(job["runs-on"]) != HERE:
        print(f"{label}: left out, on {fill(job.get('runs-on', job.get('uses')))}")
        return True
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"GITHUB_REF_NAME": "v0.0.0", **{n: fill(v) for n, v in shared.items()}}
    subprocess.run(["git", "clone", "--quiet", ROOT, f"{folder}/clone"], check=True)
    environment |= {n: fill(v) for n, v in job.get("env", {}).items()}
    for step in job["steps"]:
        if "setup-python" in step.get("uses", ""):
            version = fill(step["with"]["python-version"])
            if subprocess.run(
                [f"python{version}", "-m", "venv", f"{folder}/env"], check=False
            ).returncode:
                print(f"{label}: left out, there is no Python {version}")
                return True
            environment["PATH"] = f"{folder}/env/bin:{environment['PATH']}"
        if "run" not in step:
            continue
        start, own = time.monotonic(), {n: fill(v) for n, v in step.get("env", {}).items()}
        words = ["bash", "-e", "-o", "pipefail", "-c", fill(step["run"])]
        with open(f"{folder}/log", "w+", encoding="utf-8") as log:
            how = {"cwd": f"{folder}/clone", "env": environment | own, "stdout": log, "stderr": log}
            code = subprocess.run(words, check=False, **how).returncode
            log.seek(0)
            lines = log.read().splitlines()
        first = step.get("name", step["run"].splitlines()[0])
        print(f"{label}: {first}: exit code {code} in {time.monotonic() - start:.0f} s", flush=True)
        if code:
            print("\n".join(f"    {line}" for line in lines[-15:]))
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
