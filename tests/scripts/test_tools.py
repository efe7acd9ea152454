"""The commands that measure and check: short runs, what they conclude, and what they say to bad
input.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PACKAGE, children_of, fails, load, python, run, succeeds, wait_until
from conftest import DALI, SCRIPTS, at_night, numbered_examples, refused, write_tfrecord

from dali_tf_input import DaliOptions, TfDataOptions
from support import flags, processes
from support.throughput import candidates, costs, tuning, worker
from support.throughput.candidates import Candidate, CandidateError, Measurer

FILES = "--files=data/sample/train-*"
BRIEFLY = ["--batch_size=8", "--image_size=16", "--seconds=0.05", "--repeats=1"]
# Each command that reads records, and the flag that names its output.
TOOLS = {
    "--stages": "--json={}/out.json",
    "--tune": "--json={}/out.json",
    "preview": "--out={}/out.png",
    "explore": "--out={}/out.html",
    "train.py": "--save={}/out.keras",
}


def run_tool(tool, *arguments, **options):
    """Runs a command, or compare_throughput.py with a flag that says what to do instead."""
    words = ["compare_throughput.py", tool] if tool.startswith("--") else [tool]
    return run(*words, *arguments, **options)


@pytest.mark.parametrize("tool", TOOLS)
def test_files_and_outputs_that_are_not_there(tool, files, tmp_path):
    """Said before anything is measured; not even root can write to the kernel's folder."""
    out = TOOLS[tool].format(tmp_path)
    fails(run_tool(tool, out), "Name the TFRecord files: --files=")
    process = run_tool(tool, f"--files={tmp_path}/none-*", out)
    fails(process, f"No file matches '{tmp_path}/none-*'")
    file = write_tfrecord(tmp_path / "train", numbered_examples(2))
    said = "1 of 1 files have no index beside them (`index_dir` is None), the first is "
    fails(run_tool(tool, f"--files={file}", out), f"{said}{file}. Index them: ", f"index {file}")
    assert os.listdir(tmp_path) == ["train"]
    name = out.partition("=")[0].lstrip("-")
    for folder, said in ((tmp_path / "none", "there is no folder"), ("/proc/self", "cannot be")):
        process = run_tool(tool, files, TOOLS[tool].format(folder))
        fails(process, f"`{name}` {folder}/out", said)
        assert process.stdout == ""
    fails(run_tool(tool, files, "stray"), "Unknown arguments: stray")


BAD_FLAGS = {
    "--stages --seconds=0": "`seconds` must be at least 0.01, got 0",
    "--stages --seconds=nan": "`seconds` must be a finite number, got nan",
    "--stages --plot=x.svg": "`plot` must end in .png, got x.svg",
    "--stages --batch_size=25": "at most the 24 records, got 25",
    "--stages --replicas=2": "--replicas is of --tune",
    "--tune --batch_size=8 --backends=dali_gpu": "`backends` must be of tf_data, dali_cpu on this",
    "--tune --decode=region": "--tune chooses `decode` itself",
    "--tune --stages": "--stages and --tune are two runs",
    "--tune --plot=x.png": "--tune has no plot",
    "--tune --only=x": "`only` must be of decode, hw_decoder_load",
    "compare_throughput.py --order=buffer": "--order is of --stages and --tune",
    "compare_throughput.py --batch_size=8 --backends=x": "`backends` must be of tf_data, dali_gpu",
    "compare_throughput.py --batch_size=8 --backends=dali_gpu": "need an NVIDIA GPU",
    "preview --out=x.jpg": "`out` must end in .png",
    "explore --out=page.png": "`out` must end in .html",
    "explore --sample=0": "`sample` must be at least 1, got 0",
    "gpu_check.py": "There is no NVIDIA GPU here",
    "gpu_check.py --parts=all": "`parts` must be of probe, resident",
    "gpu_check.py --rehearse --out=/proc/self/none": "/proc/self/none cannot be",
    "gpu_check.py --rehearse": "A rehearsal is not a result",
}


@pytest.mark.parametrize("words", BAD_FLAGS)
def test_bad_flags(files, monkeypatch, words):
    monkeypatch.setattr(flags, "find_problem_of_dali", lambda: None)
    tool, *arguments = words.split()
    fails(run_tool(tool, files, *arguments), BAD_FLAGS[words])


# The other scripts are examples to copy from, which import TensorFlow first.
COMMANDS = sorted(
    {*SCRIPTS.glob("[!t]*.py"), *SCRIPTS.glob("benchmarks/*.py"), SCRIPTS / "train.py"}
)
LOAD_ALL = f"""if True:
    import runpy, sys
    sys.path.insert(0, {str(SCRIPTS)!r})
    for path in sys.argv[1:]:
        runpy.run_path(path, run_name="loaded")
        brought = {{"tensorflow", "keras", "nvidia.dali"}} & {{*sys.modules}}
        assert not brought, (path, brought)
"""


def test_help_comes_at_once():
    """Without importing a framework."""
    succeeds(python("-c", LOAD_ALL, *COMMANDS))


@pytest.mark.parametrize(
    "name", [*(str(path.relative_to(SCRIPTS)) for path in COMMANDS), *sorted(PACKAGE)]
)
def test_help(name):
    """Lists all flags and ends with an example; it says nothing of absl, and breaks no word."""
    module = load(name)
    text = run(name, "--help").stdout
    for flag in module.FLAGS:
        assert re.search(rf"--(\[no\])?{flag}\b", text), flag
    is_script = name.endswith(".py")
    start = "python (scripts/|-m dali)" if is_script else "dali-tf-input "
    assert re.search(rf"\n\nexample: {start}.*(\n  .*)?\n\Z", text)
    assert max(map(len, text.splitlines())) <= 110
    assert "repeat this option" not in text
    assert "<" not in text.partition("flags:")[2]
    choices = {"index": "framing,", "convert": "jpeg,", "preview": "random_crop,"}
    assert choices.get(name, "flags:") in text.split()


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


OPTIONS = [
    TfDataOptions(),
    TfDataOptions(num_parallel_calls=4, decode="region", read_buffer_bytes=9),
    DaliOptions(device="gpu", hw_decoder_load=0.75, read_ahead=True),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_printed_options_make_the_options_again(options):
    names = {"TfDataOptions": TfDataOptions, "DaliOptions": DaliOptions}
    assert eval(tuning.as_python(options), names) == options


@pytest.mark.parametrize("plainly", [True, False])
@pytest.mark.parametrize("options", [TfDataOptions(), DALI, DaliOptions(device="gpu")])
def test_settings_leave_the_pixels(options, plainly):
    default = Candidate(options)
    settings = tuning.list_settings(default, 4, plainly=plainly)
    assert len({default, *settings}) == len(settings) + 1 > 4
    assert all(setting.options.decode != "scaled" for setting in settings)


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
        for _ in range(2):  # over one after the other
            with pytest.raises(CandidateError, match="SIGSEGV"):
                measurer.measure(base, seconds=2)
        assert measurer.measure(base, seconds=10)["seconds"] == 10


def test_a_worker_that_does_not_start():
    with refused(r"does not start: the process died .exit code 1.: .*no way"):
        processes.JsonWorker([sys.executable, "-c", "raise SystemExit('no way')"]).start()


@pytest.mark.slow
@pytest.mark.parametrize("parts", at_night([["memory"]], [None]))
def test_gpu_check_rehearsed(sample_folder, tmp_path, monkeypatch, parts):
    """A part of it on the CPU, at night all; the second call finds that nothing is left to do."""
    monkeypatch.chdir(sample_folder)
    monkeypatch.setattr(flags, "find_problem_of_dali", lambda: None)
    out = tmp_path / "rehearsal.json"
    arguments = [FILES, "--rehearse", f"--out={out}", "--minutes=600"]
    arguments += [f"--parts={','.join(parts)}"] if parts else []
    process = run("gpu_check.py", *arguments)
    assert process.returncode == 0, (process.stdout, process.stderr)
    parts = parts or list(load("gpu_check.py").PARTS)
    assert f"\npassed    {', '.join(parts)}\n" in process.stdout
    lines = {"memory": "memory    it ", "throughput": "speed     batch 8: "}
    lines |= {"training": "training  dali_cpu: "}
    for line in ("This was a rehear", *(lines[part] for part in parts if part in lines)):
        assert f"\n{line}" in process.stdout
    report = json.loads(out.read_text())
    assert report["rehearsal"]
    assert list(report["parts"]) == parts
    for name in {*parts} - {"probe", "tests"}:
        assert all(result["results"] for result in report["parts"][name]), name
    said = "images on CPU:0: labels as tf.data has them"
    assert (said in process.stdout) == ("resident" in parts)
    process = run("gpu_check.py", *arguments, "--resume")
    assert process.returncode == 0, (process.stdout, process.stderr)
    assert "$ python" not in process.stdout


@pytest.fixture
def gpu_check(files, tmp_path, monkeypatch):
    """The script with its flags read, as a rehearsal, where DALI is there."""
    module = load("gpu_check.py")
    monkeypatch.setattr(module, "find_problem_of_dali", lambda: None)
    module.FLAGS(["", files, "--rehearse", f"--out={tmp_path}/out.json"])
    return module


# Ends by SIGTERM, and has written its results before.
LONG = """import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with open(sys.argv[-1].removeprefix("--json="), "w") as file:
    file.write(sys.argv[1])
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("is_short", "state", "written", "read"),
    [(False, "failed", '{"rows": 1}', {"rows": 1}), (True, "stopped", '{"rows"', None)],
    ids=["its time", "what is left"],
)
def test_a_command_that_takes_too_long(gpu_check, tmp_path, capsys, is_short, state, written, read):
    """It is told to end, and what it wrote until then is kept: lines, and its file."""
    script = tmp_path / "script.py"
    script.write_text(LONG)
    result, _ = gpu_check.run([str(script), written], 3, is_short=is_short)
    assert (result["state"], result["code"], result["output"]) == (state, 7, "begun\n")
    assert result["results"] == read
    assert f"begun\n{state.upper()}: no end within 3 s: " in capsys.readouterr().out


def test_a_command_that_crashes(gpu_check):
    result, _ = gpu_check.run(["-c", "import os; print('begun', flush=True); os.abort()"], 60)
    assert (result["state"], result["code"], result["output"]) == ("failed", -6, "begun\n")


def test_what_does_not_fit(gpu_check, files, tmp_path, capsys):
    """It is named as not run, not as failed."""
    gpu_check.FLAGS(["", files, "--rehearse", f"--out={tmp_path}/out.json", "--minutes=0.1"])
    assert gpu_check.main([]) == 0
    output = capsys.readouterr().out
    assert f"\nnot run   {', '.join(gpu_check.PARTS)}: run it again with --resume\n" in output
    assert "failed" not in output


def test_what_passed_is_not_run_again(gpu_check, files, tmp_path, capsys):
    """Command by command; what did not pass stays until it is run again."""
    out = tmp_path / "out.json"
    assert gpu_check.read_earlier([]) == {}
    first, second = ["-c", "print('first')"], ["-c", "print('second')"]
    gpu_check.list_commands = lambda *_: [first, second]
    results = [{"command": first, "state": "passed", "results": None}]
    results.append({"command": second, "state": "stopped", "results": None})
    parts = {"probe": results, "tests": [{"command": [], "state": "failed", "results": None}]}
    out.write_text(json.dumps({"gpus": [], "rehearsal": True, "parts": parts}))
    gpu_check.FLAGS(["", files, "--rehearse", f"--out={out}", "--resume", "--parts=probe"])
    assert gpu_check.main([]) == 0
    output = capsys.readouterr().out
    assert "\nsecond\n" in output
    assert "\nfirst\n" not in output
    assert "passed    probe\nfailed    tests\n" in output
    states = [one["state"] for one in json.loads(out.read_text())["parts"]["probe"]]
    assert states == ["passed", "passed"]
    with refused("is of other GPUs, or of a rehearsal"):
        gpu_check.read_earlier(["some GPU"])
    for text in ("{}", '{"gpus": [], "rehearsal": true, "parts": {"probe": [{}]}}', "[", "[]"):
        out.write_text(text)
        with refused("is not a file of this command"):
            gpu_check.read_earlier([])


def test_what_the_parts_need(gpu_check, monkeypatch):
    """It is looked for before the first part."""
    monkeypatch.setattr(gpu_check, "find_problem_of_dali", lambda: "there is no plugin")
    with refused("there is no plugin"):
        gpu_check.main([])
    monkeypatch.setitem(sys.modules, "psutil", None)
    with refused(r"The parts need psutil: .*pip install 'psutil"):
        gpu_check.main([])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_gpu_check_that_is_stopped(files, tmp_path, number):
    """Its command ends with it; the file has what the command wrote, and what is missing."""
    (tmp_path / "script.py").write_text(LONG)
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(SCRIPTS)!r})
        import gpu_check
        from dali_tf_input.cli import command
        words = [{str(tmp_path / "script.py")!r}, '{{"conclusions": ["so far"]}}']
        gpu_check.list_commands = lambda *_: [words]
        gpu_check.find_problem_of_dali = lambda: None
        sys.exit(command.run(gpu_check.main, gpu_check.FLAGS))
    """
    words = [sys.executable, "-c", code, files, "--rehearse", f"--out={tmp_path}/out.json"]
    words.append("--parts=training,memory")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, **pipes)
    for line in iter(process.stdout.readline, "begun\n"):
        assert line
    (child,) = children_of(process.pid)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    wait_until(lambda: not Path(f"/proc/{child}").exists())
    report = json.loads((tmp_path / "out.json").read_text())
    (result,) = report["parts"]["training"]
    assert result["state"] == "stopped"
    if number == signal.SIGTERM:
        assert (process.returncode, errors) == (143, "stopped by SIGTERM\n")
        assert "\npassed    none\nnot run   training, memory: run it again" in output
        assert "\ntraining  so far\n" in output
        assert result["output"] == "begun\n"


@pytest.fixture
def measured_here(monkeypatch):
    """Windows are measured in this process, at night by another, which imports TensorFlow."""
    made = {}

    def ask(measurer, task, *, seconds):
        if measurer not in made:
            worker.FLAGS(measurer._words[1:])
            spec = worker._WORK.spec(worker._FILES, "buffer")
            made[measurer] = worker.Pipelines(spec, worker._WORK.batch_size.value)
        return json.loads(json.dumps(made[measurer].answer(json.loads(json.dumps(task)))))

    if at_night(True, False):
        monkeypatch.setattr(Measurer, "ask", ask)


@pytest.mark.slow
@pytest.mark.usefixtures("measured_here")
@pytest.mark.parametrize("more", at_night([[]], [[], ["--backends=dali_cpu", "--order=buffer"]]))
def test_stages(sample_folder, tmp_path, more):
    """The table, the plot, the sentence; results of other files are kept."""
    outputs = [f"--json={tmp_path}/stages.json", f"--plot={tmp_path}/stages.png"]
    (tmp_path / "stages.json").write_text('{"files": "other"}')
    arguments = ["--stages", FILES, *BRIEFLY, *outputs, *more]
    process = succeeds(run("compare_throughput.py", *arguments, cwd=sample_folder))
    (kept,) = tmp_path.glob("stages-*.json")
    assert kept.read_text() == '{"files": "other"}'
    report = json.loads((tmp_path / "stages.json").read_text())
    stages = {"dali_cpu": ["read", "parse", "decode", "resize", "normalize", "dataset"]}
    stages |= {} if more else {"tf_data": ["read", "parse", "whole"]}
    assert {name: list(rows) for name, rows in report["stages"].items()} == stages
    for name, rows in report["stages"].items():
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
        said = f"^{name}: [a-z ]+ costs most, [0-9]+% of the time"
        assert re.search(said, process.stdout, re.MULTILINE)
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("measured_here")
@pytest.mark.parametrize("only", at_night(["--only=decode"], ["--only=decode", "--replicas=1"]))
def test_tune(sample_folder, tmp_path, only):
    """The options are printed as Python, and are in the report."""
    outputs = [f"--json={tmp_path}/all.json", "--backends=tf_data", only]
    arguments = ["--tune", FILES, *BRIEFLY, *outputs]
    process = succeeds(run("compare_throughput.py", *arguments, cwd=sample_folder))
    assert "\ntf_data: default " in process.stdout
    report = json.loads((tmp_path / "all.json").read_text())
    assert len(report["trials"]) >= 2
    (pasted,) = re.findall(r"^options +(TfDataOptions\(.*\))$", process.stdout, re.MULTILINE)
    names = {"TfDataOptions": TfDataOptions}
    assert eval(pasted, names) == eval(report["options"], names)
