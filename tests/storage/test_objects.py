"""TFRecords in an object store: the same records as local ones. The store is in memory here;
test_object_server.py has what only a server shows.
"""

import asyncio
import concurrent.futures
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from conftest import DALI, TF_DATA, at_night, refused, spec_of, write_dataset
from stores import set_credentials

import dali_tf_input as dti
from dali_tf_input import processes
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.cli.dask import connect_dask
from dali_tf_input.index.build import IndexFaultsError
from dali_tf_input.index.run import explain_executor
from dali_tf_input.storage import objects
from dali_tf_input.training.resume import make_fingerprint

SMALL = dti.Preprocess.for_training(16)
SET, FILES = "s3://bucket/set", "s3://bucket/set/train-*"
SKIP = {"on_bad": "skip", "max_bad_fraction": 0.5}


def fail_at(pattern, error):
    """Returns what raises an error before requests for keys that fit, "GET set/train-.*"."""

    async def before(method, key):
        if re.match(pattern, f"{method} {key}"):
            raise error

    return before


async def pass_all(method, key):
    pass


def take_pass(dataset, options, order="sequential", batches=None, **changes):
    """Returns images and labels of some batches, by default those of one pass."""
    changes |= {} if batches else {"repeat": False}
    spec = spec_of(dataset, order, SMALL, **changes)
    made = iter(make_dataset(spec, options, batch_size=4, endless=batches is not None))
    taken = [next(made) for _ in range(batches)] if batches else list(made)
    return [np.concatenate([batch[part].numpy() for batch in taken]) for part in (0, 1)]


def same(one, other):
    return all((a == b).all() for a, b in zip(one, other, strict=True))


def test_an_object_that_is_gone_since(stored):
    """A listing of what is there would not show it."""
    dti.build_index(FILES)
    stored.delete("set/train-00001-of-00003")
    with refused("set/train-00001-of-00003 was indexed and is gone. .* index --allow_missing 's3:"):
        dti.Records.from_files(FILES)
    assert dti.Records.from_files(f"{SET}/train-00000-of-00003").num_records == 5


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([DALI], [DALI, TF_DATA]))
def test_records_are_those_of_local_files(dataset, stored, tmp_path, options):
    """In order "global" over three epochs, in one pass, and in order "buffer"; read by ranges, with
    copies that are fetched, and with those that are there.
    """
    dti.build_index(FILES)
    counts = {"sequential": None, "global": 18, "buffer": 18}
    near = {order: take_pass(dataset, options, order, count) for order, count in counts.items()}
    cached = {"cache_dir": tmp_path / "copies"}
    for keep, orders in at_night(
        [({}, ["sequential", "global"]), (cached, ["buffer"])],
        [({}, ["sequential", "global"]), (cached, counts), (cached, counts)],
    ):
        far = dti.Records.from_files(FILES, **keep)
        assert far.locate(23)[1:] == dataset.locate(23)[1:]
        assert far.read(23) == dataset.read(23)
        for order in orders:
            assert same(take_pass(far, options, order, counts[order]), near[order])
    with refused(r"pass `cache_dir` .* [\d,]+ bytes free, or use order 'global'"):
        take_pass(dti.Records.from_files(FILES), options, "buffer", 1)


@pytest.mark.slow
def test_parts_of_stored_records(dataset, stored, tmp_path):
    """The same records as of files, from parts of the objects and from copies."""
    dti.build_index(FILES)

    def serve(records):
        some = records.sample(9)
        mixture = {some: 0.5, records.exclude(some.ids): 0.5}
        spec = dti.InputSpec.for_training(mixture, 16, record_ids=True, seed=3)
        batches = list(dti.load(spec, TF_DATA, batch_size=6))
        assert len(batches) == 3
        return [[batch["image"], labels, batch["record_id"], some.ids] for batch, labels in batches]

    near = serve(dataset)
    for cache_dir in (None, tmp_path / "copies"):
        far = serve(dti.Records.from_files(FILES, cache_dir=cache_dir))
        for one, other in zip(far, near, strict=True):
            for values, expected in zip(one, other, strict=True):
                np.testing.assert_array_equal(values, expected)


def test_index_is_that_of_local_files(dataset, stored, tmp_path):
    """Beside the objects, in another folder of the store, in a local one; cheap the second time.

    `Resume` goes on with either.
    """
    for place in (None, "s3://bucket/index", str(tmp_path / "index")):
        for written in (3, 0):
            stored.seen.clear()
            report = dti.build_index(FILES, index_dir=place)
            assert (report.written, report.unchanged) == (written, 3 - written)
        assert stored.count("GET", "of-00003") == 0
        far = dti.Records.from_files(FILES, index_dir=place)
        for file, local in zip(far.files, dataset.files, strict=True):
            assert file.index_text() == local.index_text()
            assert file.num_records == local.num_records
        assert far.is_remote
        command = f"index .*{place}" if place else r"index --verify=schema 's3://.*train-0000\*"
        with refused(command):
            far.check_feature("image_key", "image/class/label", ("bytes_list",), (1, 1))
        specs = [spec_of(records, "global", SMALL) for records in (far, dataset)]
        assert make_fingerprint(specs[0], 8) == make_fingerprint(specs[1], 8)


def test_objects_are_checked_at_the_same_time(stored):
    """One object is not waited for before the next is asked for."""
    for verify in ("framing", "crc"):
        waiting, all_asked = set(), asyncio.Event()

        async def wait(method, key, waiting=waiting, all_asked=all_asked):
            if method == "GET" and "of-00003" in key:
                waiting.add(key)
                if len(waiting) == 3:
                    all_asked.set()
                await asyncio.wait_for(all_asked.wait(), 60)

        stored.before = wait
        checks = dti.Checks(verify=verify)
        assert dti.build_index(FILES, checks, num_processes=3, force=True).written == 3


def test_an_object_that_fails_alone(stored):
    """The others are indexed."""
    stored.before = fail_at("GET .*train-00001", FileNotFoundError())
    with pytest.raises(IndexFaultsError, match=r"train-00001.* no such object") as caught:
        dti.build_index(FILES)
    assert caught.value.report.written == 2


@pytest.mark.parametrize(("error", "at_file"), [(KeyboardInterrupt, 1), (BrokenPipeError, 0)])
def test_an_index_run_that_is_interrupted(stored, error, at_file):
    """It does not wait until a store is back that is down."""

    def interrupt(progress):
        if progress.files or not at_file:
            raise error

    stored.before = fail_at("GET .*train-0000[12]", ConnectionError("down"))
    with pytest.raises(error):
        dti.build_index(FILES, on_progress=interrupt)


def test_a_store_that_never_takes_the_manifest(stored, dataset):
    """Ends the run: others may always be faster, but not for ever. The next one does it all."""
    from obstore.exceptions import PreconditionError

    stored.before = fail_at("PUT .*manifest", PreconditionError(""))
    with refused("other runs keep replacing the manifest"):
        dti.build_index(FILES)
    stored.before = pass_all
    assert dti.build_index(FILES).written == 3
    far = dti.Records.from_files(FILES)
    for number in range(3):
        assert far.index(number).tolist() == dataset.index(number).tolist()


def test_bad_records_and_objects_that_go(stored, dataset):
    whole, key = Path(dataset.paths[2]).read_bytes(), "set/train-00002-of-00003"
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    stored.put(key, bytes(data))
    crc = dti.Checks(verify="crc")
    with pytest.raises(IndexFaultsError, match=f"1 bad record in 1 of 3 .*{SET}/train-00002"):
        dti.build_index(FILES, crc)
    report = dti.build_index(FILES, crc, **SKIP)
    assert (report.summary.records, report.summary.skipped) == (23, 1)
    assert stored.count("PUT", "bad_records.jsonl") == 1
    far = dti.Records.from_files(FILES)
    stored.put(key, whole)
    for check in (lambda: far.read(22), lambda: dti.Records.from_files(far.paths)):
        with refused("train-00002-of-00003 changed since it was indexed"):
            check()
    report = dti.build_index(FILES, **SKIP)
    assert (report.summary.records, report.summary.skipped, report.written) == (24, 0, 1)

    async def change(method, name):  # while it is indexed
        if (method, name) == ("GET", key):
            stored.before = pass_all
            stored.put(key, whole[:-1])

    stored.before = change
    with pytest.raises(IndexFaultsError, match="train-00002-of-00003 changed since"):
        dti.build_index(FILES, force=True)
    stored.put(key, whole)
    assert f"{SET}/bad_records.jsonl" not in objects.find_objects(f"{SET}/*")
    stored.delete(key)
    with refused("train-00002-of-00003 is missing"):
        dti.build_index(FILES)
    report = dti.build_index(FILES, allow_missing=True)
    assert (report.summary.records, report.removed) == (17, 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], [DALI, TF_DATA]))
def test_a_record_that_stops_training_is_named(stored, dataset, options):
    data = Path(dataset.paths[1]).read_bytes()
    offset = int(dataset.index(1)[4, 0])
    damaged = data[: offset + 100] + bytes(50) + data[offset + 150 :]
    stored.put("set/train-00001-of-00003", damaged)
    dti.build_index(FILES)
    far = dti.Records.from_files(FILES)
    with pytest.raises(dti.BadRecordError) as caught:
        list(dti.load(spec_of(far, "global", SMALL), options, batch_size=8))
    place = caught.value.file, caught.value.bad_record.record
    assert place == (f"{SET}/train-00001-of-00003", 4)
    assert f"index --verify=decode --on_bad=skip '{SET}/train-" in str(caught.value)


@pytest.mark.slow
def test_a_store_that_fails_stops_the_input(stored):
    """The error names the object."""
    dti.build_index(FILES)
    far = dti.Records.from_files(FILES)
    stored.before = fail_at("GET .*of-00003", PermissionError("denied"))
    with pytest.raises(tf.errors.OpError, match=rf"{SET}/train-0000.* cannot be read"):
        take_pass(far, TF_DATA)


def test_names_are_those_of_the_index_step(stored, tmp_path):
    """Training asks the store for none; another index run finds new ones, and checks no file."""
    place = {"index_dir": f"{tmp_path}/index"}
    stored.put("set/labels.txt", b"cat\ndog\n")
    dti.build_index(FILES, **place)
    stored.seen.clear()
    assert dti.Records.from_files(FILES, **place).class_names == ("cat", "dog")
    assert stored.count("GET", "labels.txt") == 0
    stored.put("set/labels.txt", b"owl\n\nant\n")
    assert dti.build_index(FILES, **place).written == 0
    with refused(r"labels.txt: line 2 is empty.* Then index again"):
        _ = dti.Records.from_files(FILES, **place).class_names
    stored.put("set/labels.txt", b"owl\nant\n")
    assert dti.build_index(FILES, **place).written == 0
    assert dti.Records.from_files(FILES, **place).class_names == ("owl", "ant")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("s3://bucket/none-*", "No object matches"),
        ("s3://bucket/none", "No object matches"),
        ("s3://bucket", r"must name a bucket and an object"),
    ],
)
def test_what_is_not_there(store, files, message):
    for call in (dti.build_index, dti.Records.from_files):
        with refused(message):
            call(files)


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://127.0.0.1:1", "127.0.0.1:1 refuses connections"),
        ("http://nowhere.invalid", "no host nowhere.invalid is known"),
    ],
)
def test_a_store_that_is_not_reached(monkeypatch, endpoint, message):
    monkeypatch.setattr(objects, "_OBSTORE_SECONDS", 0.2)
    set_credentials(monkeypatch, endpoint)
    with refused(message):
        objects.find_objects("s3://bucket/a", retry_seconds=0)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with refused("pip install obstore"):
        dti.Records.from_files(FILES)


@pytest.mark.slow
def test_index_by_an_executor(tmp_path):
    """The same bytes as by processes of its own, also of bad records; as many files at a time as it
    has threads, of which none is left; errors are told.
    """
    local = write_dataset(tmp_path / "set", [3, 4, 2])
    damaged = Path(local.paths[0])
    damaged.write_bytes(damaged.read_bytes()[:-5])
    made, together, call = [], threading.Barrier(3), processes.Child.call

    def call_together(*arguments):
        together.wait(60)
        return call(*arguments)

    before = threading.active_count()
    for name in ("own", "executor"):
        how = {"index_dir": tmp_path / name, **SKIP}
        if name == "executor":
            with (
                concurrent.futures.ThreadPoolExecutor(3) as executor,
                pytest.MonkeyPatch.context() as patch,
            ):
                patch.setattr(processes.Child, "call", call_together)
                dti.build_index(local.paths, executor=executor, **how)
        else:
            dti.build_index(local.paths, **how)
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert threading.active_count() <= before
    assert made[0] == made[1]
    assert {"index_manifest.json", "bad_records.jsonl"} < {*made[0]}


def test_an_executor_that_fails(dataset, tmp_path):
    class Broken(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *_):
            return super().submit(lambda: 1 / 0)

    with Broken(1) as executor, refused("The executor failed at .*ZeroDivisionError"):
        dti.build_index(dataset.paths, index_dir=tmp_path, executor=executor)
    with refused("A worker has dali_tf_input .*, this program 0.0: install the same"):
        processes.call_apart("0.0", sorted, [])
    with refused(r"0.0: .* must have dali_tf_input "):
        raise explain_executor(ImportError(), "0.0")
    with refused("No Dask scheduler answers at nowhere://"), connect_dask("nowhere://x:1"):
        pass
