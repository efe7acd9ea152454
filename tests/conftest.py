"""What tests share: three logical CPU devices, small TFRecords whose labels number the records, and
helpers.
"""

import fcntl
import functools
import gc
import importlib.util
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dali_tf_input as dti
from dali_tf_input.cli.command import import_tensorflow
from dali_tf_input.index import decode, run
from dali_tf_input.records.example import encode_example
from dali_tf_input.records.tfrecord import BadRecord, find_records, frame_record

# Python 3.10 has no obstore.
collect_ignore_glob = [] if importlib.util.find_spec("obstore") else ["storage/test_[clo]*.py"]
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
DALI, TF_DATA = dti.DaliOptions(device="cpu"), dti.TfDataOptions()
BACKENDS = {"dali": DALI, "tf_data": TF_DATA}
backends = pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)


def at_night(usual, thorough):
    """Returns `thorough` in the nightly run, `usual` in all others: rows of a table, or rounds."""
    return thorough if os.environ.get("NIGHTLY") else usual


def table(names, usual, *axes):
    """Runs a test with the rows `usual`, at night with all combinations of the axes."""
    return pytest.mark.parametrize(names, at_night(usual, [*itertools.product(*axes)]))


def pytest_configure(config: pytest.Config) -> None:
    """Sets up the devices before anything touches one: CPU devices stand for replicas."""
    on_gpu = "gpu" in config.option.markexpr.replace("not gpu", "")
    if not on_gpu:
        # Tests that need no GPU must come out the same where there is one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PATH"] = f"{ROOT}/tests/no_gpu:{os.environ['PATH']}"
    # Messages come out the same in an environment that is activated.
    folders = os.environ["PATH"].split(os.pathsep)
    folders = [folder for folder in folders if not os.path.exists(f"{folder}/dali-tf-input")]
    os.environ["PATH"] = os.pathsep.join(folders)
    if config.getoption("numprocesses", None):
        return  # its workers run the tests: this process needs no TensorFlow
    # A shell's background ignores Ctrl-C, and so would the programs that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # To optimize the graphs of small models and datasets takes longer than to run them: oneDNN's
    # passes take a fifth of the slow tests' time. The nightly run has TensorFlow's defaults.
    is_plain = not on_gpu and at_night(True, False)
    if is_plain:
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    tf = import_tensorflow()
    from dali_tf_input.training import failures  # which imports TensorFlow

    failures._IDLE_SECONDS = 3600  # a child that decodes takes seconds to start: tests share it
    gc.set_threshold(20_000)  # graphs are many objects; the default costs 5% of the time
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": is_plain})
    if on_gpu and os.environ.get("GPU_TESTS_ON") != "cpu":
        return  # with logical devices, also of the CPU, TensorFlow ignores memory growth
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names backends and pairs of values, so that ``-k dali`` finds what it should."""
    if isinstance(val, tuple) and all(isinstance(part, int | str) for part in val):
        return "-".join(map(str, val))
    return next((name for name, options in BACKENDS.items() if val is options), None)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported need not be looked through after each test


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Hides a test's name from its environment: children start anew when a variable changes."""
    name = os.environ.pop("PYTEST_CURRENT_TEST")
    try:
        return (yield)
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = name


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory):
    """Programs that tests kill leave temporary files: where pytest removes old ones."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def on_its_own():
    """Parts a test from those before it.

    TensorFlow remembers the shapes of what the replicas of earlier strategies exchanged. And an
    iterator that the traceback of an error holds dies as garbage: TensorFlow may then wait for its
    tuning thread, up to a minute for one that is a minute old.
    """
    import tensorflow as tf  # not before a worker needs it, see pytest_configure

    tf.distribute.MirroredStrategy._collective_key_base += 1000
    before = len(os.listdir("/proc/self/task"))
    yield
    if len(os.listdir("/proc/self/task")) > before:
        gc.collect()
        gc.freeze()  # what is alive now need not be looked through again


def refused(message: str):
    """Expects an InputError with this message, a regular expression."""
    return pytest.raises(dti.InputError, match=message)


def encode(image: Image.Image | np.ndarray, image_format: str = "PNG", **options) -> bytes:
    """Encodes an image, or its pixels clipped to 0..255."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image.clip(0, 255).astype(np.uint8))
    stream = io.BytesIO()
    image.save(stream, image_format, **options)
    return stream.getvalue()


def exif(orientation: int) -> Image.Exif:
    """Returns EXIF data of an orientation."""
    made = Image.Exif()
    made[0x0112] = orientation
    return made


@functools.cache
def jpeg(height: int, width: int, *, seed: int = 0) -> bytes:
    """Returns an encoded image of smooth colors with some noise."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = random.integers(-12, 13, (height, width, 3))
    return encode(np.asarray(image).astype(np.int16) + noise, "JPEG")


def image_zoo() -> dict[str, tuple[bytes, str | None, str | None]]:
    """Returns valid and invalid encoded images of many kinds: name -> (bytes, format if valid,
    fault if not).
    """
    good = jpeg(60, 90)
    image = Image.open(io.BytesIO(good))
    cmyk, png = encode(image.convert("CMYK"), "JPEG"), encode(image)
    transform = cmyk.index(b"Adobe") + 11  # 0 for CMYK, 2 for YCCK
    size = good.index(b"\xff\xc0") + 5  # of the frame: height and width
    start, end = good[:size], good[size + 4 :]
    return {
        "jpeg": (good, "JPEG", None),
        "progressive": (encode(image, "JPEG", progressive=True), "JPEG", None),
        "with_a_tail": (good + b"tail" * 9, "JPEG", None),
        "grayscale": (encode(image.convert("L"), "JPEG"), "grayscale JPEG", None),
        "cmyk": (cmyk, "CMYK JPEG", None),
        "ycck": (cmyk[:transform] + b"\2" + cmyk[transform + 1 :], "YCCK JPEG", None),
        "png": (png, "PNG", None),
        "png_with_alpha": (encode(image.convert("RGBA")), "PNG", None),
        "gif": (encode(image, "GIF"), None, "GIF image"),
        "webp": (encode(image, "WEBP"), "WebP", None),
        "bmp": (encode(image, "BMP"), "BMP", None),
        "tiff": (encode(image, "TIFF"), None, "TIFF image"),
        "cut_in_half": (good[: len(good) // 2], None, "truncated JPEG"),
        "cut_by_one": (good[:-1], None, "truncated JPEG"),
        "cut_in_its_header": (good[:40], None, "damaged JPEG"),
        "huge": (start + (65500).to_bytes(2, "big") * 2 + end, None, "too many pixels"),
        "no_height": (start + bytes(2) + good[size + 2 :], None, "damaged JPEG"),
        "damaged_png": (png[:-60], None, "damaged PNG"),
        "empty": (b"", None, "empty image"),
        "zeros": (bytes(999), None, "zero bytes"),
        "text": (b"404 not found", None, "text"),
        "html": (b"<!DOCTYPE html><html>", None, "HTML page"),
        "garbage": (bytes(range(200, 256)) * 20, None, "not an image"),
    }


def valid_images() -> list[bytes]:
    """Returns the images of `image_zoo` that both backends decode."""
    return [image for image, image_format, _ in image_zoo().values() if image_format]


def write_tfrecord(path: Path | str, examples: list[dict]) -> str:
    """Writes examples (feature key -> value) as one TFRecord file, without an index."""
    Path(path).write_bytes(b"".join(frame_record(encode_example(example)) for example in examples))
    return str(path)


def scan_records(file: Path | str) -> list[tuple[int, int]]:
    """Returns (offset, size) of each record of a file; raises InputError for what is none."""
    records = []
    with open(file, "rb") as stream:
        for found in find_records(str(file), stream.fileno()):
            if isinstance(found, BadRecord):
                raise dti.InputError(f"{file}: byte {found.offset}: {found.detail}")
            records += found
    return records


def bytes_read() -> int:
    """Returns how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def numbered_examples(count: int, *, first: int = 0) -> list[dict]:
    """Returns examples of small images of many sizes; the label is the number of the record."""
    return [
        {
            "image/encoded": jpeg(30 + 7 * number % 40, 30 + 11 * number % 50, seed=number),
            "image/class/label": number,
        }
        for number in range(first, first + count)
    ]


def write_indexed(file: Path, examples: list[dict], checks=None, **arguments) -> dti.Records:
    """Writes and indexes one TFRecord file; `checks` and `arguments` are for `build_index`."""
    write_tfrecord(file, examples)
    dti.build_index(file, checks, **arguments)
    return dti.Records.from_files(file)


def write_dataset(folder: Path, counts: list[int], checks=None) -> dti.Records:
    """Writes and indexes one TFRecord file for each count; labels number the records through all
    files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for position, count in enumerate(counts):
        file = folder / f"train-{position:05d}-of-{len(counts):05d}"
        write_tfrecord(file, numbered_examples(count, first=sum(counts[:position])))
    dti.build_index(folder / "train-*", checks)
    return dti.Records.from_files(folder / "train-*")


def spec_of(
    dataset: dti.Records, order: str, preprocess: dti.Preprocess, **changes
) -> dti.InputSpec:
    return dti.InputSpec(records=dataset, preprocess=preprocess, order=order, **changes)


def take(batches, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and the labels of the first `count` batches, each joined.

    Of as many epochs as it takes.
    """
    iterator = (batch for _ in itertools.count() for batch in batches)
    taken = [next(iterator) for _ in range(count)]
    return tuple(np.concatenate([batch[part].numpy() for batch in taken]) for part in (0, 1))


def check_iterators(dataset, expected: list[np.ndarray]) -> None:
    """Checks the first images of iterators in turn, after some that were dropped, and at once."""
    one, two = iter(dataset), iter(dataset)
    for images in expected:
        np.testing.assert_array_equal(next(one)[0], images)
        np.testing.assert_array_equal(next(two)[0], images)
    for _ in range(5):  # dropped early, and never used
        next(iter(dataset))
        iter(dataset)
    problems = []

    def read():
        try:
            for batch, images in zip(dataset, expected, strict=False):
                np.testing.assert_array_equal(batch[0], images)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> dti.Records:
    """24 records in three files of different lengths."""
    return write_dataset(tmp_path_factory.mktemp("records"), [5, 12, 7])


@pytest.fixture
def files(dataset: dti.Records) -> str:
    """The flag that names these records."""
    return f"--files={Path(dataset.paths[0]).parent}/train-*"


@pytest.fixture
def store(monkeypatch, tmp_path_factory):
    """An object store in memory."""
    from stores import memory_store

    return memory_store(monkeypatch, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def stored(store, dataset):
    """The same with the files of `dataset`."""
    for file in dataset.paths:
        store.put(f"set/{os.path.basename(file)}", Path(file).read_bytes())
    return store


@pytest.fixture
def no_training(monkeypatch):
    """`fit` ends where it would begin to train: what it refuses and warns of comes before."""
    monkeypatch.setattr("dali_tf_input.training.input.train", lambda *_, **__: None)


class InThisProcess:
    """Calls functions as a `Child` does, without a process, which takes seconds to start.

    In place of one process, not of several: DALI's decoder crashes if two threads use it.
    """

    def __init__(self, **_):
        pass

    def call(self, function, *arguments, data=None, on_progress=None, **_):
        more = {"tell": on_progress} if on_progress else {}
        return function(*arguments, *([list(data)] if data is not None else []), **more)

    def kill(self):
        pass

    close = kill


@pytest.fixture
def checked_here(monkeypatch):
    """Records are checked, and images decoded for that, in this process; at night by others."""
    from dali_tf_input.training import failures

    if at_night(False, True):
        yield
        return
    for module in (run, decode):
        monkeypatch.setattr(module, "Child", InThisProcess)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as in the process that decodes
    for module in (run, failures):
        anew = functools.lru_cache(1)(module._decoding_child.__wrapped__)
        monkeypatch.setattr(module, "_decoding_child", anew)
    yield


CRASHING = """if True:
    import os, signal, sys, time
    sys.path[:] = sys.argv[2:]
    from dali_tf_input.index import decoders

    def make_crashing_decode(checks):
        def crash(encoded):
            if b"crashes" in encoded:
                os.kill(os.getpid(), signal.SIGSEGV)
            while b"hangs" in encoded:
                time.sleep(1)
            with open(os.environ["COUNT"], "a") as stream:
                stream.write("x")
            return ("JPEG", 9, 9)

        return crash

    decoders.make_trial_decode = make_crashing_decode
    from dali_tf_input import processes
    from dali_tf_input.index import decode
    processes._CODE, decode._LONGEST_SECONDS = os.environ["CODE"], 2
    processes.serve(*eval(sys.argv[1]))
"""


@pytest.fixture
def crashing_decoder(tmp_path, monkeypatch):
    """All children have a decoder that crashes, or hangs, at images that say so."""
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    monkeypatch.setenv("CODE", CRASHING)
    monkeypatch.setattr("dali_tf_input.processes._CODE", CRASHING)
    from dali_tf_input.training import failures

    anew = functools.cache(failures._decoding_child.__wrapped__)
    monkeypatch.setattr(failures, "_decoding_child", anew)


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns a folder that `make(folder)` has made, once for all processes that run tests."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / f"{name}_of_all"
    with open(base / f"{name}_lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make(folder)
    return folder


@pytest.fixture(scope="session")
def sample_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which data/sample holds a small, indexed piece of the sample data."""

    def make(folder: Path) -> None:
        script = SCRIPTS / "make_sample_tfrecords.py"
        command = [sys.executable, script, "--num_images=96", "--num_validation_images=32"]
        subprocess.run([*command, folder], check=True, capture_output=True)

    folder = tmp_path_factory.mktemp("sample")
    shutil.copytree(make_once(tmp_path_factory, "sample", make), folder / "data" / "sample")
    dti.build_index(folder / "data" / "sample" / "*-of-*")
    return folder
