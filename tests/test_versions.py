"""Files that earlier releases wrote are read; those of newer ones are refused, and stay."""

import json
import os

import pytest
from conftest import refused, write_dataset
from models import make_model, save_at

import dali_tf_input as dti
from dali_tf_input import __version__
from dali_tf_input.records.card import merge_metadata, read_facts
from dali_tf_input.records.example import encode_example
from dali_tf_input.records.tfrecord import frame_record

# A manifest of version 4 as the first release wrote it, without `release` and `content_crc`.
LABEL = {"kind": "class", "key": "label", "num_classes": None, "offset": 0, "vocabulary": None}
ONE = {"lengths": [1, 1], "records": 4}
CLASSES = {"range": [0, 4], "counts": [[0, 1], [1, 1], [3, 1], [4, 1]]}
ENTRY = {
    "size": 260,
    "mtime_ns": 10**18,
    "etag": None,
    "folder": None,
    "records": 4,
    "skipped": 1,
    "skipped_numbers": "AQI=",
    "skipped_bytes": 52,
    "index_crc": 1256857139,
    "framing_crc": 3514212546,
    "verified": "schema",
    "parsed": 4,
    "images": None,
    "labels": "AQABAwQ=",
    "turned": 0,
    "checked_by": {"image_key": "image", "label": LABEL, "mask_key": None},
    "features": {
        "image": {"kinds": ["bytes_list"], **ONE},
        "label": {"kinds": ["int64_list"], **ONE, **CLASSES},
    },
}
BAD = {"file": "train-0", "record": 2, "offset": 104, "size": 52, "reason": "data CRC"}
BAD["detail"] = "the data of this record does not fit its CRC."


@pytest.fixture
def folder(tmp_path):
    """Five records, of which the index skips the third."""
    records = [
        frame_record(encode_example({"image": b"\xff\xd8" + bytes([number]), "label": number}))
        for number in range(5)
    ]
    records[2] = records[2][:-1] + bytes([records[2][-1] ^ 1])
    (tmp_path / "train-0").write_bytes(b"".join(records))
    (tmp_path / "train-0.idx").write_text("0 52\n52 52\n156 52\n208 52\n")
    (tmp_path / "bad_records.jsonl").write_text(json.dumps(BAD) + "\n")
    os.utime(tmp_path / "train-0", ns=(10**18, 10**18))
    return tmp_path


def write_manifest(folder, version, entry, **more):
    document = {"format": "dali_tf_input index manifest", "version": version, **more}
    document["files"] = {"train-0": entry}
    (folder / "index_manifest.json").write_text(json.dumps(document))


def test_a_manifest_of_version_4(folder):
    """Level, labels and what is skipped are those of the release that wrote it, and stay."""
    write_manifest(folder, 4, ENTRY)
    records = dti.Records.from_files(folder / "train-0")
    assert (records.num_records, records.labels.tolist()) == (4, [0, 1, 3, 4])
    report = dti.build_index(folder / "train-0")
    assert (report.unchanged, report.summary.verified) == (1, {"schema": 1})
    (folder / "validation-0").write_bytes((folder / "train-0").read_bytes()[:52])
    dti.build_index(folder / "validation-0")
    written = json.loads((folder / "index_manifest.json").read_text())
    assert written["release"] == __version__
    assert written["files"]["train-0"]["skipped_numbers"] == ENTRY["skipped_numbers"]


@pytest.mark.parametrize("force", [False, True])
def test_a_newer_manifest_is_refused(folder, force):
    write_manifest(folder, 5, {"of": "the future"}, release="0.3.0")
    before = (folder / "index_manifest.json").read_bytes()
    message = "is of version 5, written by a newer release of dali_tf_input, 0.3.0"
    with refused(message):
        dti.Records.from_files(folder / "train-0")
    with refused(message):
        dti.build_index(folder / "train-0", force=force)
    assert (folder / "index_manifest.json").read_bytes() == before


def test_a_state(tmp_path):
    """One without its release, as the first release wrote it, goes on; a newer one is refused."""
    spec, model = (
        dti.InputSpec.for_training(write_dataset(tmp_path / "set", [6]), 8),
        make_model(8, 24),
    )

    def train_until(step):
        return save_at(step, tmp_path / "run", model, spec, batch_size=3)

    train_until(2)
    path = tmp_path / "run" / "state.json"
    state = json.loads(path.read_text())
    assert (state["version"], state.pop("release")) == (6, __version__)
    del state["sha256"]
    path.write_text(json.dumps(state))
    assert train_until(4) == 2
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "version": 7, "release": "0.9.0", "new": 1}))
    before = {entry: entry.read_bytes() for entry in (tmp_path / "run").iterdir()}
    with refused("state.json is of version 7, written by a newer release .*, 0.9.0"):
        train_until(6)
    assert {entry: entry.read_bytes() for entry in (tmp_path / "run").iterdir()} == before
    path.write_text(json.dumps({**state, "steps_per_epoch": 3}))
    with refused("it is damaged, as its SHA-256 says"):
        train_until(6)


def test_a_card(tmp_path):
    path = tmp_path / "metadata.json"
    path.write_text(json.dumps({"dali_tf_input": {"version": 1, "chosen": {"a": 1}}, "mine": 2}))
    assert read_facts(str(tmp_path))["chosen"] == {"a": 1}
    assert json.loads(merge_metadata(str(tmp_path), b'{"dali_tf_input": {}}'))["mine"] == 2
    path.write_text(json.dumps({"dali_tf_input": {"version": 2, "release": "0.4.0"}}))
    for call in (read_facts, lambda folder: merge_metadata(folder, b"{}")):
        with refused("metadata.json is of version 2, written by a newer release .*, 0.4.0"):
            call(str(tmp_path))
