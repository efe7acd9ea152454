"""The commands that measure and check: short runs, what they conclude, and what they say to bad
input.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import fails, load, python, run
from conftest import SCRIPTS, numbered_examples, slowly, write_tfrecord

from dali_tf_input import DaliOptions, InputError, TfDataOptions
from dali_tf_input.spec.options import AUTOTUNE
from support import processes
from support.throughput import candidates, costs, tuning
from support.throughput.candidates import Candidate, CandidateError, Measurer

FILES = "--files=data/sample/train-*"
# Each command that reads records, the flag that names its output, and flags that make it short.
TOOLS = {
    "--stages": ("--json", ["--seconds=0.05", "--repeats=1"]),
    "--tune": ("--json", ["--seconds=0.05", "--repeats=1"]),
    "preview": ("--out", []),
}
SMALL = ["--batch_size=1", "--image_size=8"]


def run_tool(tool, *arguments, **options):
    """Runs a command, or compare_throughput.py with a flag that says what to do instead."""
    words = ["compare_throughput.py", tool] if tool.startswith("--") else [tool]
    return run(*words, *arguments, **options)


def output(script, folder):
    return f"{TOOLS[script][0]}={folder}/out{'.png' if script == 'preview' else '.json'}"


@pytest.mark.parametrize("script", TOOLS)
def test_no_files_and_no_index(script, tmp_path):
    out, short = output(script, tmp_path), TOOLS[script][1]
    fails(run_tool(script, *short, out), "Name the TFRecord files: --files=")
    pattern = f"--files={tmp_path}/none-*"
    fails(run_tool(script, pattern, *short, out), f"No file matches '{tmp_path}/none-*'")
    file = write_tfrecord(tmp_path / "train", numbered_examples(2))
    process = run_tool(script, f"--files={file}", *short, out)
    fails(
        process,
        "1 of 1 files have no index beside them (`index_dir` is None), the first is "
        f"{file}. Index them: ",
        f"index {file}",
    )
    assert sorted(os.listdir(tmp_path)) == ["train"]


@pytest.mark.parametrize("script", TOOLS)
def test_outputs_that_cannot_be_written(script, sample_folder, tmp_path):
    """Said before anything is measured; not even root can write to the kernel's folder."""
    name = TOOLS[script][0].lstrip("-")
    for folder, said in ((tmp_path / "none", "there is no folder"), ("/proc/self", "cannot be")):
        process = run_tool(
            script, FILES, *TOOLS[script][1], output(script, folder), cwd=sample_folder
        )
        fails(process, f"`{name}` {folder}/out", said)
        assert process.stdout == ""
    fails(run_tool(script, FILES, "stray", cwd=sample_folder), "Unknown arguments: stray")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("--stages", ["--seconds=0"], "`seconds` must be at least 0.01, got 0"),
        ("--stages", ["--seconds=nan"], "`seconds` must be a finite number, got nan"),
        ("--stages", ["--seconds=inf"], "`seconds` must be a finite number, got inf"),
        ("--stages", ["--repeats=0"], "`repeats` must be at least 1, got 0"),
        ("--stages", ["--plot=x.svg"], "`plot` must end in .png, got x.svg"),
        ("--stages", ["--batch_size=97"], "at most the 96 records, got 97"),
        ("--tune", ["--repeats=0"], "`repeats` must be at least 1, got 0"),
        ("--tune", ["--backends=dali_gpu"], "`backends` must be of tf_data, dali_cpu on this"),
        ("--tune", ["--decode=region"], "--tune chooses `decode` itself"),
        ("--tune", ["--replicas=0"], "`replicas` must be at least 1, got 0"),
        ("--tune", ["--stages"], "--stages and --tune are two runs"),
        ("--tune", ["--plot=x.png"], "--tune has no plot"),
        ("--stages", ["--replicas=2"], "--replicas is of --tune"),
        ("compare_throughput.py", ["--order=buffer"], "--order is of --stages and --tune"),
        ("preview", ["--num_images=0"], "`num_images` must be at least 1"),
        ("preview", ["--out=x.jpg"], "`out` must end in .png"),
        (
            "preview",
            ["--evaluation", "--crop=random_crop"],
            "--crop does nothing with --evaluation",
        ),
        ("gpu_check.py", [], "There is no NVIDIA GPU here"),
        ("gpu_check.py", ["--parts=all"], "`parts` must be of probe, resident"),
        (
            "gpu_check.py",
            ["--rehearse", "--out=/proc/self/none"],
            "`out` /proc/self/none cannot be",
        ),
        ("gpu_check.py", ["--rehearse"], "A rehearsal is not a result"),
        ("gpu_check.py", ["--minutes=0"], "`minutes` must be at least 0.1"),
        ("--tune", ["--only=x"], "`only` must be of decode, hw_decoder_load"),
        ("--stages", ["--only=decode"], "--only is of --tune"),
    ],
)
def test_bad_flags(sample_folder, script, arguments, message):
    fails(run_tool(script, FILES, *arguments, cwd=sample_folder, here=True), message)


@pytest.mark.parametrize(
    "path",
    [
        (slowly if path.name == "train_multi_worker.py" else pytest.param)(path, id=path.name)
        for path in sorted([*SCRIPTS.glob("*.py"), *SCRIPTS.glob("benchmarks/*.py")])
    ],
)
def test_help(path):
    """Lists all flags, without importing a framework, and ends with an example.

    The loop for several hosts is an example to copy from, so it imports TensorFlow first.
    """
    process = python("-X", "importtime", path, "--help")
    lines = process.stderr.splitlines()
    assert process.returncode == 0
    if path.name != "train_multi_worker.py":
        assert all(line.startswith("import time:") for line in lines)
        assert not {line.split()[-1] for line in lines} & {"tensorflow", "keras", "nvidia.dali"}
    module = load(path)
    for name in module.FLAGS:
        assert re.search(rf"--(\[no\])?{name}\b", process.stdout), name
    assert re.search(r"\n\nexample: python (scripts/|-m dali).*(\n  .*)?\n\Z", process.stdout)
    assert max(map(len, process.stdout.splitlines())) <= 110


def windows(*seconds):
    """Returns windows of 1000 images that took so long."""
    shared = {"measured_batches": 10, "batch_size": 100}
    return [{"window": {**shared, "seconds": one, "cpu_seconds": 2 * one}} for one in seconds]


def test_stages_never_add_up_to_more_than_the_whole():
    """A cut that is faster than the one before by chance costs nothing; the shares sum to 1."""
    made = {"read": windows(1, 2, 1), "decode": windows(3, 3, 5), "resize": windows(2.9, 2.8, 5)}
    rows = costs.summarize(made | {"dataset": windows(4, 4, 5)})
    seconds = {stage: row["seconds"] for stage, row in rows.items()}
    assert seconds == pytest.approx({"read": 1, "decode": 2, "resize": 0, "dataset": 1})
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows["decode"]["cpu"] == pytest.approx(4)
    assert rows["dataset"]["images_per_second"] == pytest.approx(250)
    assert costs.title("parse", {"parse": {}}) == "read and parse"  # by DALI's own reader
    assert costs.conclude("tf_data", rows) == "tf_data: decode costs most, 50% of the time."


def test_a_setting_is_chosen_if_its_slowest_round_beats_the_default():
    """The fastest of those; noise that overlaps keeps the default, and so does what is refused."""
    default, *settings = (Candidate(TfDataOptions(num_parallel_reads=n)) for n in (16, 1, 2, 3, 4))
    rates = dict(zip(settings, ([101, 150, 99], [103, 104, 105], [110, 111, 112], []), strict=True))
    assert tuning.choose({default: [100, 102, 98], **rates}, default) == settings[2]
    assert tuning.choose({default: [100, 115, 120], **rates}, default) == default


def test_settings_leave_the_pixels_and_are_few():
    for options in (TfDataOptions(), DaliOptions(device="cpu"), DaliOptions(device="gpu")):
        for plainly in (True, False):
            default = Candidate(options)
            settings = tuning.list_settings(default, 4, plainly=plainly)
            assert 4 <= len(settings) <= 12
            assert default not in settings
            assert len({*settings}) == len(settings)
            assert all(setting.options.decode != "scaled" for setting in settings)


def test_candidates_come_back_and_say_how_they_differ():
    tf_data, dali = TfDataOptions(), DaliOptions(device="cpu")
    for base, options, text in (
        (tf_data, tf_data, "default"),
        (tf_data, TfDataOptions(num_parallel_calls=AUTOTUNE, decode="full"), "decode='full'"),
        (tf_data, TfDataOptions(prefetch_batches=-1), "prefetch_batches=AUTOTUNE"),
        (
            dali,
            DaliOptions(device="cpu", num_threads=3, read_ahead=True),
            "num_threads=3, read_ahead=True",
        ),
    ):
        other = Candidate(options, "buffer", "bare")
        assert other.describe(base) == text
        assert Candidate.from_json(json.loads(json.dumps(other.to_json()))) == other


@pytest.mark.slow
def test_a_measuring_process_that_dies_or_hangs(sample_folder, monkeypatch, tmp_path):
    """It is restarted once; what hangs is given up; one death after the other ends the run."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from support import processes\n"
        "def answer(task):\n"
        "    if task['seconds'] == 3: time.sleep(1000)\n"
        "    if task['seconds'] == 2: os.kill(os.getpid(), 11)\n"
        "    return {'error': 'refused'} if task['seconds'] == 1 else task\n"
        "processes.serve(answer)\n"
    )
    monkeypatch.setattr(candidates, "_WORKER", str(script))
    monkeypatch.setattr(candidates, "_LIMIT", 60)
    base = Candidate(TfDataOptions())
    with Measurer() as measurer:
        assert measurer.measure(base, seconds=10)["candidate"] == base.to_json()
        with pytest.raises(CandidateError, match="refused"):
            measurer.measure(base, seconds=1)
        with pytest.raises(CandidateError, match=r"the process died \(SIGSEGV\)"):
            measurer.measure(base, seconds=2)
        monkeypatch.setattr(candidates, "_LIMIT", -28)
        with pytest.raises(CandidateError, match="no answer within 2 s"):
            measurer.measure(base, seconds=3)
        monkeypatch.setattr(candidates, "_LIMIT", 60)
        for _ in range(6):  # over one after the other
            with pytest.raises(CandidateError, match="SIGSEGV"):
                measurer.measure(base, seconds=2)
        assert measurer.measure(base, seconds=10)["seconds"] == 10


def test_a_worker_that_does_not_start():
    with pytest.raises(
        InputError, match=r"does not start: the process died .exit code 1.: .*no way"
    ):
        processes.JsonWorker([sys.executable, "-c", "raise SystemExit('no way')"]).start()


@pytest.mark.slow
def test_gpu_check_rehearsed(sample_folder, tmp_path):
    """All parts on the CPU; the second call finds that nothing is left to do."""
    out = tmp_path / "rehearsal.json"
    arguments = [FILES, "--rehearse", f"--out={out}", "--minutes=600"]
    process = python(SCRIPTS / "gpu_check.py", *arguments, cwd=sample_folder, timeout=3600)
    assert process.returncode == 0, (process.stdout, process.stderr)
    parts = load("gpu_check.py").PARTS
    assert f"\npassed    {', '.join(parts)}\n" in process.stdout
    for line in (
        "speed     batch 8: ",
        "training  dali_cpu: ",
        "memory    it ",
        "This was a rehear",
    ):
        assert f"\n{line}" in process.stdout
    report = json.loads(out.read_text())
    assert report["rehearsal"]
    assert list(report["parts"]) == list(parts)
    for name in ("resident", "throughput", "training", "decoder", "memory", "pair", "replicas"):
        assert all(result["results"] for result in report["parts"][name]), name
    assert "images on CPU:0: labels as tf.data has them" in process.stdout
    process = run("gpu_check.py", *arguments, "--resume", cwd=sample_folder)
    assert process.returncode == 0, (process.stdout, process.stderr)
    assert "$ python" not in process.stdout


@pytest.fixture
def gpu_check(sample_folder, tmp_path, monkeypatch):
    """The script with its flags read, as a rehearsal."""
    monkeypatch.chdir(sample_folder)
    module = load("gpu_check.py")
    module.FLAGS(["", FILES, "--rehearse", f"--out={tmp_path}/out.json"])
    return module


def test_a_command_that_dies(gpu_check):
    """How it ended is a result, with what it said before."""
    result, _ = gpu_check.run(["-c", "import os; print('begun', flush=True); os.abort()"], 60)
    assert (result["state"], result["code"], result["output"]) == ("failed", -6, "begun\n")


LONG = """if True:
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with open(sys.argv[-1].removeprefix("--json="), "w") as file:
    file.write(sys.argv[1])
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("is_short", "state"), [(False, "failed"), (True, "stopped")], ids=["its", "what is left"]
)
@pytest.mark.parametrize(("written", "read"), [('{"rows": 1}', {"rows": 1}), ('{"rows"', None)])
def test_a_command_that_takes_too_long(gpu_check, tmp_path, capsys, is_short, state, written, read):
    """It is told to end, and what it wrote until then is kept: lines, and its file."""
    script = tmp_path / "script.py"
    script.write_text(LONG.replace("if True:\n", ""))
    result, _ = gpu_check.run([str(script), written], 3, is_short=is_short)
    assert (result["state"], result["code"], result["output"]) == (state, 7, "begun\n")
    assert result["results"] == read
    assert f"begun\n{state.upper()}: no end within 3 s: " in capsys.readouterr().out


def test_what_does_not_fit(gpu_check, tmp_path, capsys):
    """It is named as not run, not as failed."""
    gpu_check.FLAGS(["", FILES, "--rehearse", f"--out={tmp_path}/out.json", "--minutes=0.1"])
    assert gpu_check.main([]) == 0
    output = capsys.readouterr().out
    assert f"\nnot run   {', '.join(gpu_check.PARTS)}: run it again with --resume\n" in output
    assert "failed" not in output


def test_what_passed_is_not_run_again(gpu_check, tmp_path, capsys):
    """Command by command; what did not pass stays until it is run again."""
    out = tmp_path / "out.json"
    assert gpu_check.read_earlier([]) == {}
    first, second = ["-c", "print('first')"], ["-c", "print('second')"]
    gpu_check.list_commands = lambda *_: [first, second]
    results = [{"command": first, "state": "passed", "results": None}]
    results.append({"command": second, "state": "stopped", "results": None})
    parts = {"probe": results, "tests": [{"command": [], "state": "failed", "results": None}]}
    out.write_text(json.dumps({"gpus": [], "rehearsal": True, "parts": parts}))
    gpu_check.FLAGS(["", FILES, "--rehearse", f"--out={out}", "--resume", "--parts=probe"])
    assert gpu_check.main([]) == 0
    output = capsys.readouterr().out
    assert "\nsecond\n" in output
    assert "\nfirst\n" not in output
    assert "passed    probe\nfailed    tests\n" in output
    states = [one["state"] for one in json.loads(out.read_text())["parts"]["probe"]]
    assert states == ["passed", "passed"]
    with pytest.raises(InputError, match="is of other GPUs, or of a rehearsal"):
        gpu_check.read_earlier(["some GPU"])
    for text in ("{}", '{"gpus": [], "rehearsal": true, "parts": {"probe": [{}]}}', "[", "[]"):
        out.write_text(text)
        with pytest.raises(InputError, match="is not a file of this command"):
            gpu_check.read_earlier([])


def test_earlier_results_are_kept(gpu_check, tmp_path):
    out = tmp_path / "out.json"
    out.write_text("precious")
    gpu_check.list_commands = lambda *_: [["-c", ""]]
    assert gpu_check.main([]) == 0
    assert [one.read_text() for one in tmp_path.glob("out-*.json")] == ["precious"]


def test_what_the_parts_need(gpu_check, monkeypatch):
    """It is looked for before the first part."""
    monkeypatch.setattr(gpu_check, "find_problem_of_dali", lambda: "there is no plugin")
    with pytest.raises(InputError, match="there is no plugin"):
        gpu_check.main([])
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(InputError, match=r"The parts need psutil: .*pip install 'psutil"):
        gpu_check.check_installation()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_gpu_check_that_is_stopped(sample_folder, tmp_path, number):
    """Its command ends with it; the file has what the command wrote, and what is missing."""
    (tmp_path / "script.py").write_text(LONG.replace("if True:\n", ""))
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(SCRIPTS)!r})
        import gpu_check
        from dali_tf_input.cli import command
        words = [{str(tmp_path / "script.py")!r}, '{{"conclusions": ["so far"]}}']
        gpu_check.list_commands = lambda *_: [words]
        sys.exit(command.run(gpu_check.main, gpu_check.FLAGS))
    """
    words = [sys.executable, "-c", code, FILES, "--rehearse", f"--out={tmp_path}/out.json"]
    words.append("--parts=training,memory")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=sample_folder, **pipes)
    for line in iter(process.stdout.readline, "begun\n"):
        assert line
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    while Path(f"/proc/{child}").exists():  # the kernel may take a moment
        time.sleep(0.05)
    report = json.loads((tmp_path / "out.json").read_text())
    (result,) = report["parts"]["training"]
    assert result["state"] == "stopped"
    if number == signal.SIGTERM:
        assert (process.returncode, errors) == (143, "stopped by SIGTERM\n")
        assert "\npassed    none\nnot run   training, memory: run it again" in output
        assert "\ntraining  so far\n" in output
        assert result["output"] == "begun\n"


@pytest.mark.slow
def test_stages(sample_folder, tmp_path):
    """The table, the plot, the sentence."""
    arguments = [FILES, "--batch_size=16", "--image_size=32", "--seconds=0.1", "--repeats=1"]
    outputs = [f"--json={tmp_path}/stages.json", f"--plot={tmp_path}/stages.png"]
    (tmp_path / "stages.json").write_text('{"files": "other"}')
    process = run("compare_throughput.py", "--stages", *arguments, *outputs, cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
    (kept,) = tmp_path.glob("stages-*.json")
    assert kept.read_text() == '{"files": "other"}'
    report = json.loads((tmp_path / "stages.json").read_text())
    stages = {"dali_cpu": ["read", "parse", "decode", "resize", "normalize", "dataset"]}
    stages["tf_data"] = ["read", "parse", "whole"]
    for name, rows in report["stages"].items():
        assert list(rows) == stages[name]
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert re.search("^tf_data: [a-z ]+ costs most, [0-9]+% of the time", process.stdout, re.M)
    assert (tmp_path / "stages.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.nightly
def test_stages_of_one_backend(sample_folder):
    arguments = [FILES, "--batch_size=16", "--image_size=32", "--seconds=0.1", "--repeats=1"]
    arguments += ["--stages", "--backends=dali_cpu", "--order=buffer"]
    process = run("compare_throughput.py", *arguments, cwd=sample_folder)
    assert re.search("^dali_cpu +read ", process.stdout, re.M)
    assert "tf_data" not in process.stdout


@pytest.mark.slow
def test_tune(sample_folder, tmp_path):
    """The options are printed as Python, and are in the report."""
    report = tmp_path / "all.json"
    arguments = [FILES, "--batch_size=16", "--image_size=32", "--seconds=0.1", "--backends=tf_data"]
    arguments += ["--repeats=1"]
    process = run(
        "compare_throughput.py", "--tune", *arguments, f"--json={report}", cwd=sample_folder
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "\ntf_data: default " in process.stdout
    assert len(json.loads(report.read_text())["trials"]) >= 2
    (pasted,) = re.findall(r"^options +(TfDataOptions\(.*\))$", process.stdout, re.MULTILINE)
    names = {"TfDataOptions": TfDataOptions}
    found = eval(pasted, names)
    assert found == eval(json.loads(report.read_text())["options"], names)
