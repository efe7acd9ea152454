"""Child processes: what they answer, how they end, and errors that cross processes."""

import concurrent.futures
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from commands import python, succeeds, wait_until
from conftest import TF_DATA, numbered_examples, refused, spec_of, write_indexed, write_tfrecord

import dali_tf_input as dti
from dali_tf_input import __version__, processes
from dali_tf_input.index.build import IndexFaultsError, IndexReport
from dali_tf_input.index.decode import DecodingChild
from dali_tf_input.processes import Child, ChildDiedError, call_apart
from dali_tf_input.records import contents
from dali_tf_input.records.checks import InvalidRecord
from dali_tf_input.records.tfrecord import BadRecord


def test_a_child_calls_functions():
    """Again and again in the same process, with data in shared memory; it raises what they raise."""
    with Child() as child:
        first = child.call(os.getpid)
        assert first not in (os.getpid(), None)
        assert child.call(sorted, [3, 1, 2]) == [1, 2, 3]
        for data in ([], [b""], [b"abc", bytes(1 << 20), b"x"]):
            assert child.call(list, data=data) == data
        with pytest.raises(ZeroDivisionError):
            child.call(divmod, 1, 0)
        with pytest.raises(dti.InputError, match="lock"):  # an answer that cannot be pickled
            child.call(threading.Lock)
        assert child.call(os.getpid) == first


def test_a_child_that_dies_is_replaced():
    with Child() as child:
        first = child.call(os.getpid)
        with pytest.raises(ChildDiedError, match="SIGABRT") as caught:
            child.call(os.abort)
        assert caught.value.cause == "crash"
        with pytest.raises(ChildDiedError, match="exit code 7") as caught:
            child.call(os._exit, 7)
        assert caught.value.cause == "end"
        with pytest.raises(ChildDiedError, match=r"no answer within .* s") as caught:
            child.call(time.sleep, 600, seconds=0.1)
        assert caught.value.cause == "timeout"
        assert child.call(os.getpid) != first


FORK = """
import os
from dali_tf_input.processes import Child
with Child() as child:
    first = child.call(os.getpid)
    if not (fork := os.fork()):
        other = child.call(os.getpid)
        child.close()
        os._exit(other == first)
    assert os.waitpid(fork, 0)[1] == 0
    assert child.call(os.getpid) == first
"""


def test_a_fork_has_a_child_of_its_own():
    """Or each would take the other's answers for its own."""
    succeeds(python("-c", FORK))


def test_a_child_that_does_not_start(monkeypatch):
    monkeypatch.setattr(processes, "_CODE", "import os; os.abort()")
    with refused("The process that decodes images does not start: SIGABRT"):
        DecodingChild(dti.Checks(verify="decode"))


BUSY = """
import ctypes

def work(tell):
    while True:
        tell()

def hang(file):
    open(file, "w").close()
    ctypes.PyDLL(None).sleep(3600)  # with Python's lock, as a decoder may
"""
PARENT = """
import os, threading, time
from busy import hang, work
from dali_tf_input.processes import Child
children = [Child(), Child(), Child()]
print(*[child.call(os.getpid) for child in children], flush=True)
threading.Thread(target=children[1].call, args=(hang, "hangs"), daemon=True).start()
while not os.path.exists("hangs"):
    time.sleep(0.01)
children[0].call(work, on_progress=lambda: print("busy", flush=True))
"""


def test_children_whose_parent_is_killed_end(tmp_path):
    """One that waits for a call, one that tells of its progress, and one that hangs in C code."""
    (tmp_path / "busy.py").write_text(BUSY)
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        children = parent.stdout.readline().split()
        assert parent.stdout.readline() == "busy\n"
        parent.kill()
    wait_until(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))


def test_from_another_folder_with_modules_of_the_same_name(tmp_path):
    """A child imports what the program imported, whatever lies where it is now; and no guard is
    needed.
    """
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("json.py", "array.py", "dali_tf_input.py"):
        (elsewhere / name).write_text("print('shadow'); raise SystemExit(3)")
    head = "import os, threading; from dali_tf_input.processes import Child; os.chdir('elsewhere');"
    call = f"{head} print(Child().call(sorted, [3, 1]))"
    thread = "one = threading.Thread(target=lambda: print(Child().call(sorted, [3, 1])))"
    (tmp_path / "program.py").write_text(f"{head} {thread}; one.start(); one.join()")
    for words in ([tmp_path / "program.py"], ["-c", call]):
        process = python(*words, cwd=tmp_path)
        assert (process.stdout, process.stderr) == ("[1, 3]\n", "")


def test_a_child_with_other_credentials_is_another_one(monkeypatch):
    """One that waits since before they were set would ask another store, for minutes; and one that
    waited for long has ended.
    """
    first = call_apart(__version__, os.getpid)
    assert call_apart(__version__, os.getpid) == first
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert call_apart(__version__, os.getenv, "AWS_ENDPOINT_URL") == "http://127.0.0.1:1"
    with Child(idle_seconds=0.2) as child:
        first = child.call(os.getpid)
        time.sleep(0.4)
        assert child.call(os.getpid) != first


def test_children_of_an_executor(monkeypatch):
    """A thread keeps one, and no two share it; what crashes ends the child, not the worker."""
    monkeypatch.setattr(processes, "_idle", [])
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        for _ in range(2):
            calls = [
                executor.submit(processes.call_apart, __version__, sorted, [3, one])
                for one in range(4)
            ]
            assert [call.result() for call in calls] == [[one, 3] for one in range(4)]
        work = executor.submit(processes.call_apart, __version__, os.abort)
        with pytest.raises(ChildDiedError, match="SIGABRT"):
            work.result()
        call = executor.submit(processes.call_apart, __version__, sorted, [3, 1, 2])
        assert call.result() == [1, 2, 3]
    assert 1 <= len(processes._idle) <= 2
    for child in processes._idle:
        child.close()


def test_a_call_that_another_thread_ends():
    """And no other one starts."""
    child = Child()
    child.call(os.getpid)
    timer = threading.Timer(0.1, child.kill)
    timer.start()
    with pytest.raises(ChildDiedError, match="SIGKILL"):
        child.call(time.sleep, 600)
    with pytest.raises(ChildDiedError, match="it was stopped"):
        child.call(os.getpid)
    timer.join()
    child.close()


def test_an_interrupted_call_leaves_no_answer_behind():
    """The next call would get it."""
    with Child() as child:

        def interrupt(*_):
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, interrupt)
        child.call(os.getpid)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            child.call(time.sleep, 600)
        signal.signal(signal.SIGALRM, previous)
        assert child.call(sorted, [2, 1]) == [1, 2]


FORKING = """if True:
    import multiprocessing, sys
    import dali_tf_input as dti

    def count(files):
        dti.build_index(files)
        return dti.Records.from_files(files).num_records

    assert count(sys.argv[1]) == 3
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(count, [sys.argv[1]])[0])
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            pool.map(count, [sys.argv[2]])
        except dti.InputError as error:
            print(type(error).__name__)
"""


def test_a_fork_reads_local_files_and_raises_what_is_wrong(tmp_path):
    """As no store was used before; and an error passes through the pool."""
    write_tfrecord(tmp_path / "train-0", [{"image": b"x", "label": 0}] * 3)
    (tmp_path / "bad-0").write_bytes(bytes(100))
    files = [str(tmp_path / name) for name in ("train-0", "bad-0")]
    process = python("-c", FORKING, *files)
    assert process.stdout.split() == ["3", "IndexFaultsError"], process.stderr


def test_errors_can_be_pickled():
    """As process pools do with what a function raises."""
    bad = BadRecord(record=3, offset=5, size=9, reason="data CRC", detail="It does not fit.")
    report = IndexReport(summary=contents.summarize({}), written=0, unchanged=0, removed=0)
    for error in (
        dti.BadRecordError("train-0", bad, "Skip it."),
        IndexFaultsError("1 bad record", report, "a mistake"),
        InvalidRecord("data CRC", "It does not fit."),
        ChildDiedError("SIGSEGV", "crash"),
        dti.InputError("wrong"),
    ):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 (its own)
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.slow
@pytest.mark.usefixtures("crashing_decoder")
def test_a_record_that_crashes_the_decoder_does_not_end_training(tmp_path):
    """The search for what stopped the input names it."""
    examples = numbered_examples(12)
    examples[7]["image/encoded"] = examples[7]["image/encoded"][:60] + b"crashes"
    records = write_indexed(tmp_path / "train-0", examples)
    spec = spec_of(records, "global", dti.Preprocess(image_size=(8, 8)))
    with pytest.raises(dti.BadRecordError, match=r"record 7, .* crashes the decoder: .* SIGSEGV"):
        list(dti.load(spec, TF_DATA, batch_size=2))
