"""What the commands share: tables, Ctrl-C, and what make and install.sh say."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import children_of, fails, load, python, run, succeeds, wait_until
from conftest import ROOT, SCRIPTS, at_night, jpeg, refused, write_tfrecord
from rich.cells import cell_len
from rich.console import Console

from dali_tf_input import __version__
from dali_tf_input.cli import command
from dali_tf_input.cli.main import main


@pytest.fixture
def terminal(capsys, monkeypatch):
    """Prints a table on a terminal of some width; returns the lines."""

    def show(width, *table):
        how = {"force_terminal": True, "color_system": None, "width": width, "height": 25}
        monkeypatch.setattr(command, "Console", lambda **given: Console(**{**how, **given}))
        command.print_table(*table)
        return capsys.readouterr().out.splitlines()

    return show


@pytest.mark.parametrize("width", [200, 48, 47, 33])
def test_tables_are_never_cut(terminal, width):
    """On a narrow terminal headers and texts are folded."""
    lines = terminal(
        width,
        ("setting", "x default", "images/s so far"),
        [("num_reads=16, 文件=4", "1.05", "12,345"), ("none", "-", "1")],
    )
    for word in ("setting", "default", "images/s", "num_reads=16,", "文件=4", "1.05", "12,345"):
        assert any(word in line for line in lines), word
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", [40, 20])
def test_tables_of_more_columns_than_fit(terminal, width):
    """Each comes by itself, with the names of the rows."""
    sets = [f"records/{name}-*" for name in ("train", "validation", "test")]
    rows = [("records", "1,281,167", "50,000", "100,000"), ("classes", "6", "5", "6")]
    printed = "\n".join(terminal(width, ("", *sets), rows))
    assert printed.count("records ") == printed.count("classes ") == 3
    for cell in (*sets, "1,281,167", "50,000", "100,000"):
        assert cell in printed


def test_tables_show_what_is_in_them(capsys):
    """Which is not markup: errors of DALI have paths in brackets."""
    rows = [
        ("[/opt/dali/x.cc:12] Assert :smile:", "-", "12", "1", "2"),
        ("[bold]", "1", "2", "3", ""),
    ]
    command.print_table(("what", "one header", "two headers", "n", "more"), rows)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["what", "one", "header", "two", "headers", "n", "more"]
    assert lines[0].split() == ["[/opt/dali/x.cc:12]", "Assert", ":smile:", "-", "12", "1", "2"]
    assert lines[1].split() == ["[bold]", "1", "2", "3"]


def is_running(process):
    """Whether a process runs, and not only waits for its parent to notice its end."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_text())
    except OSError:
        return False


INDEX = ["index", "--force", "--verify=decode", "--index_dir={}", "data/sample/train-*"]
CONVERT = ["convert", "--quality=90", "--resize_shorter=200", "data/sample/train-*", "{}/out"]
STOPPED = [(INDEX, signal.SIGINT), (CONVERT, signal.SIGTERM)]
MORE = [
    (["make_sample_tfrecords.py", "--num_images=4096", "{}/out"], signal.SIGINT),
    (["compare_throughput.py", "--files=data/sample/train-*"], signal.SIGINT),
    (INDEX, signal.SIGTERM),
    (CONVERT, signal.SIGHUP),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "number"),
    at_night(STOPPED, STOPPED + MORE),
    ids=lambda one: one[0] if isinstance(one, list) else one.name,
)
def test_signals_end_a_command_and_all_that_it_started(sample_folder, tmp_path, arguments, number):
    """A terminal sends Ctrl-C to the command's process group, a scheduler SIGTERM to it alone.

    The command ends its own processes, and leaves no folder of what it has not finished.
    """
    script, *rest = (argument.format(tmp_path) for argument in arguments)
    code = f"import os, signal, sys; signal.signal({number:d}, signal.SIG_DFL); "
    code += "os.execv(sys.executable, sys.argv[1:])"  # what runs the tests may have it ignored
    is_script = script.endswith(".py")
    program = [SCRIPTS / script] if is_script else ["-m", "dali_tf_input", script]
    words = [sys.executable, "-c", code, sys.executable, *program, *rest]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=sample_folder, start_new_session=True, **pipes)
    children = []
    while not children:
        assert process.poll() is None
        children = children_of(process.pid)
        time.sleep(0.01)
    time.sleep(1)
    children = children_of(process.pid)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number, errors
    words = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert errors.decode().splitlines()[-1] == words
    wait_until(lambda: not any(map(is_running, children)), "something is still running")
    left = [path.name for path in tmp_path.iterdir() if not path.name.endswith((".idx", ".json"))]
    assert left == []


def test_output_that_is_closed():
    words = f"{shlex.quote(sys.executable)} -m dali_tf_input index none >&-"
    process = subprocess.run(["bash", "-c", words], capture_output=True, check=False)
    assert process.returncode == 1
    assert process.stderr == b"error: The standard output is closed: > /dev/null discards it.\n"


def test_a_reader_that_ends():
    """What reads the output may end first, as `head` does."""
    command = [sys.executable, "-m", "dali_tf_input", "index", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr.read() == b""


def test_output_in_ascii(tmp_path):
    """As of cron: what cannot be written is escaped."""
    (tmp_path / "cat").mkdir()
    for seed in range(3):
        (tmp_path / "cat" / f"{seed}.jpg").write_bytes(jpeg(20, 20, seed=seed))
    process = succeeds(
        python(
            *("-m", "dali_tf_input", "convert", "--validation_fraction=0", "--decoder=none"),
            *(tmp_path, tmp_path.with_name("out \u00e4")),
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
    )
    assert "out \\xe4" in process.stdout


# The last flag of each.
USELESS = {
    "index x": [
        *("--num_classes=2", "--verify=crc --vocabulary=x", "--verify=schema --max_pixels=9"),
        "--verify=decode --max_bad_fraction=1",
    ],
    "convert {} out": [
        *("--store=pixels --quality=90", "--renumber", "--image_key=x"),
        *("--keep=x", "--group=x", "--index_dir=x"),
    ],
    "convert a.csv out": ["--class_depth=2", "--skip_unreadable"],
    "convert a-* out": ["--labels=x", "--drop=x"],
    "doctor": ["--label_key=x"],
    "preview": [
        *("--evaluation --crop=letterbox", "--evaluation --augment=rand"),
        *("--evaluation --recipe=deit", "--crop=all --evaluation", "--crop=all --recipe=deit"),
        *("--crop=all --num_images=2", "--blame=y --records=3", "--records=3 --num_images=2"),
    ],
}


@pytest.mark.parametrize(
    ("command", "flags"), [(command, one) for command, those in USELESS.items() for one in those]
)
def test_flags_that_do_nothing(tmp_path, files, command, flags):
    """They are refused, before anything is read."""
    name, *words = command.format(tmp_path).split()
    words += [files] if name == "preview" else []
    flag = flags.split()[-1].partition("=")[0]
    fails(run(name, *flags.split(), *words), f"{flag} does nothing ", ": leave it out.")


def test_outputs_are_local(tmp_path):
    for words in (
        ["explore", "--files=x", "--out=s3://bucket/page.html"],
        ["explore", "--files=x", "--json=gs://bucket/found.json"],
        ["preview", "--files=x", "--out=s3://bucket/sheet.png"],
    ):
        fails(run(*words), "is written to a local path, got ")
    fails(run("index", "--verify=schema", "--vocabulary=s3://b/x", "y"), "must be a local path")
    fails(run("preview", "--files=x", "--blame=s3://b/x"), "`blame` must be a local path")
    fails(run("convert", "s3://bucket/t.csv", tmp_path / "out"), "A table must be a local file")
    fails(run("convert", "--labels=s3://b/x", tmp_path, tmp_path / "../o"), "must be a local path")


def test_names_in_another_encoding(tmp_path):
    """It is Python's that is wrong, not the name."""
    write_tfrecord(tmp_path / "tr\u00e4in", [{"image": jpeg(9, 9), "label": 0}])
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = python(
        *("-m", "dali_tf_input", "index", f"{tmp_path}/tr*"), env={**os.environ, **ascii_only}
    )
    fails(process, "is in UTF-8, and Python reads names as ascii: PYTHONUTF8=1")


def test_a_plot_needs_matplotlib(monkeypatch, tmp_path):
    compare = load("compare_throughput.py")
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda _: None)
    with refused(r"--plot needs matplotlib: .*pip install 'matplotlib>="):
        compare.FLAGS(["", f"--plot={tmp_path}/a.png"])
        compare.main([])


@pytest.mark.parametrize("words", [["--version"], ["help", "card"], ["card", "--help"]])
def test_version_and_help(capsys, words):
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith((f"dali-tf-input {__version__}\n", "Writes the card of a set"))
    assert ("usage: dali-tf-input card [flags] FILES" in printed) == ("card" in words)


def test_install_reads_its_requirements_from_pyproject():
    """What install.sh passes to pip: whole requirements, one per argument."""
    lines = (SCRIPTS / "install.sh").read_text().splitlines()
    functions = [line for line in lines if line.startswith(("section()", "requirement()"))]
    calls = "section gpu; echo --; section plugin-build; echo --; requirement tensorflow; "
    calls += "requirement nvidia-dali-cuda120"
    words = ["bash", "-c", "\n".join([*functions, calls])]
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    gpu, build, requirements = process.stdout.split("--\n")
    assert gpu.splitlines() == ["tensorflow[and-cuda]>=2.20,<2.22"]
    assert build.splitlines()[:2] == ["nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime-cu12"]
    tensorflow, dali = requirements.splitlines()
    assert tensorflow == "tensorflow>=2.20,<2.22"
    assert dali.startswith("nvidia-dali-cuda120==2.4.*; ")


VERBS = ("index", "compare", "train", "profile", "tune", "preview", "soak", "gpu-check", "doctor")
VERBS += ("test", "test-slow", "test-gpu", "check", "format", "docs")


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_of_make(tmp_path, verb):
    """Each runs a command that is there, with flags that it knows."""
    words = ["make", "-n", "-C", ROOT, verb, "DATA=x-*", f"PYTHON_SITE={tmp_path}", "PYTHON=true"]
    words.append("ARGS=")  # those of `make test ARGS=...` are for pytest
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    process = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    lines = [line for line in process.stdout.splitlines() if f"PYTHONPATH='{tmp_path}" in line]
    assert lines
    for line in lines:
        name, *arguments = shlex.split(line.partition(" true ")[2].partition(">")[0])
        if name == "-m":
            name, *arguments = arguments
            assert importlib.util.find_spec(name)
            if name != "dali_tf_input":
                continue
            name, *arguments = arguments
        command = load(name.removeprefix("scripts/"))
        command.FLAGS(["", *arguments])
