"""Whatever stands in a file that is read, the answer is a result or an InputError.

A thousand examples of each kind of file are tried; or, for ten minutes each, as many as fit:
``FUZZ_SECONDS=600 pytest -m nightly -o faulthandler_timeout=0 tests/test_fuzz.py``.
"""

import json
import os
import time

import msgspec
import pytest
from conftest import jpeg, numbered_examples, write_dataset, write_tfrecord
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dali_tf_input import Checks, ClassLabel, InputError, Records, Resume, build_index
from dali_tf_input.index.folder import _read_lines
from dali_tf_input.index.scan import check_file
from dali_tf_input.records.class_names import read_class_names
from dali_tf_input.records.example import encode_example
from dali_tf_input.records.tfrecord import frame_record
from dali_tf_input.training.resume import State

pytestmark = pytest.mark.nightly
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
NUMBERS = st.sampled_from([-1, 0, 1, 10**9, 2**63, 10**40]) | st.integers()


@st.composite
def changed_bytes(draw, whole: bytes) -> bytes:
    """Bytes of a valid file, with some replaced, removed or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 16)))
        data[start:end] = draw(st.binary(max_size=16))
    return bytes(data)


@st.composite
def changed_json(draw, whole: object) -> bytes:
    """A valid document in which one value or key is another."""
    document = json.loads(json.dumps(whole))
    node, path = document, []
    while isinstance(node, dict | list) and node and (not path or draw(st.booleans())):
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        path.append((node, key))
        node = node[key]
    parent, key = path[-1]
    if isinstance(parent, dict) and draw(st.booleans()):
        value = parent.pop(key)
        parent[draw(st.text(max_size=12) | st.sampled_from(["../x", "/tmp/x", ".."]))] = value
    else:
        parent[key] = draw(JSON | NUMBERS)
    return json.dumps(document).encode()


def fuzz(strategy, read) -> None:
    """Calls `read` on examples; anything but a result or an InputError fails."""
    end = time.monotonic() + SECONDS
    tried = 0

    @settings(
        max_examples=10**9 if SECONDS else 1000,
        deadline=None,
        derandomize=not SECONDS,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def attempt(data):
        nonlocal tried
        if SECONDS and time.monotonic() > end:
            pytest.skip(f"{tried} examples in {SECONDS:.0f} s")
        tried += 1
        try:
            read(data)
        except InputError as error:
            assert str(error)

    attempt()


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "set", [3, 2])
    (tmp_path / "notes.idx").write_text("mine")
    return tmp_path / "set"


def read_set(folder):
    dataset = Records.from_files(folder / "train-?????-of-?????")
    for file in range(len(dataset.files)):
        dataset.index(file)
    return dataset.num_records


def test_manifest(folder):
    """It is refused or describes the files as they are; a new one can be made in its place."""
    path, files = folder / "index_manifest.json", folder / "train-?????-of-?????"
    whole = path.read_bytes()

    def read(data):
        path.write_bytes(data)
        try:
            assert read_set(folder) == 5
        except InputError as error:
            assert "-m dali_tf_input index " in str(error) or "newer release" in str(error)
            build_index(files, num_processes=1, force=True)
            assert read_set(folder) == 5
        assert (folder.parent / "notes.idx").read_text() == "mine"

    made = changed_bytes(whole) | changed_json(json.loads(whole))
    fuzz(made | JSON.map(json.dumps).map(str.encode), read)


def test_index(folder):
    path = next(folder.glob("*.idx"))
    manifest = folder / "index_manifest.json"
    entries = json.loads(manifest.read_text())
    lines = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4)
    text = lines.map(lambda rows: "".join(f"{a} {b}\n" for a, b in rows).encode())

    def read(data):
        import google_crc32c

        path.write_bytes(data)
        entry = entries["files"][path.stem]  # forged: it vouches for this index
        entry |= {"index_crc": google_crc32c.value(data), "records": data.count(b"\n")}
        manifest.write_text(json.dumps(entries))
        read_set(folder)

    fuzz(changed_bytes(path.read_bytes()) | text, read)


def test_tfrecord(tmp_path):
    path = tmp_path / "train"
    write_tfrecord(path, numbered_examples(3))
    label = ClassLabel(key="image/class/label")
    checks = Checks(verify="schema", image_key="image/encoded", label=label)

    def read(data):
        path.write_bytes(data)
        with open(os.devnull, "wb") as index:
            how = {"decode": None, "on_bad_record": str, "on_progress": max}
            check_file(str(path), index, checks, **how)

    fuzz(changed_bytes(path.read_bytes()) | st.binary(max_size=64), read)


def test_examples(tmp_path):
    """Damaged data under a CRC that fits: each record is valid or a named fault."""
    path = tmp_path / "train"
    whole = encode_example({"image": jpeg(16, 16), "label": 1, "values": [0.5, 1.0]})
    checks = Checks(verify="schema", image_key="image", label=ClassLabel(key="label"))

    def read(data):
        path.write_bytes(frame_record(data))
        bad = []
        with open(os.devnull, "wb") as index:
            how = {"decode": None, "on_bad_record": bad.append, "on_progress": max}
            entry = check_file(str(path), index, checks, **how)
        assert entry.records + len(bad) == 1
        assert all(one.reason for one in bad)

    read(whole)
    fuzz(changed_bytes(whole), read)


def test_bad_records(tmp_path):
    path = tmp_path / "bad_records.jsonl"
    line = {"file": "train-0", "record": 1, "offset": 5, "size": 9}
    line |= {"reason": "data CRC", "detail": ""}

    def read(data):
        path.write_bytes(data)
        list(_read_lines(str(path), without={"other"}))

    whole = json.dumps(line).encode() + b"\n"
    fuzz(changed_bytes(2 * whole) | changed_json(line) | st.binary(max_size=64), read)


def test_state(tmp_path):
    path = tmp_path / "state.json"
    weights = tmp_path / "step-3.weights.h5"
    state = State(3, 3, "Adam", {"records": 9}, [(0, {"loss": 0.5})], [("History", {"epoch": 0})])
    document = {**msgspec.to_builtins(state), "weights": weights.name}
    resume = Resume(str(tmp_path))

    def read(data):
        weights.write_bytes(b"")
        path.write_bytes(data)
        found = resume._read()
        assert found is None or isinstance(found, State)

    fuzz(changed_bytes(json.dumps(document).encode()) | changed_json(document), read)


def test_label_names(tmp_path):
    path = tmp_path / "labels.txt"

    def read(data):
        path.write_bytes(data)
        read_class_names(str(path))

    fuzz(st.binary(max_size=64), read)
