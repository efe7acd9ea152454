"""TFRecords in an object store: the same records as local ones, in every weather."""

import concurrent.futures
import dataclasses
import gc
import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from functools import partial
from pathlib import Path

import commands
import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    ROOT,
    SCRIPTS,
    TF_DATA,
    backends,
    jpeg,
    nightly,
    refused,
    spec_of,
    tf_data_nightly,
    write_dataset,
)
from stores import BUCKET, Proxy, ask, run_server, run_tls_server

import dali_tf_input as dti
from dali_tf_input import __version__, processes
from dali_tf_input.backends.build import make_dataset
from dali_tf_input.cli.dask import connect_dask
from dali_tf_input.index.build import IndexFaultsError
from dali_tf_input.index.run import explain_executor
from dali_tf_input.storage import objects
from dali_tf_input.training.resume import make_fingerprint

COUNTS = [5, 12, 7]
SMALL = dti.Preprocess.for_training(16)


@pytest.fixture(scope="module")
def server():
    with run_server() as port:
        yield port


@pytest.fixture
def proxy(server, monkeypatch, tmp_path):
    proxy = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # for local copies of indexes
    monkeypatch.setattr(objects, "_OBSTORE_SECONDS", 0.2)
    monkeypatch.setattr(objects, "_FIRST_PAUSE", 0.1)
    monkeypatch.setattr(objects, "_MOST_PAUSE", 0.4)
    objects._make_store.cache_clear()
    yield proxy
    # Iterators that died with their tests end their reads while the store answers, not by retries.
    proxy.fault = lambda method, path: None
    gc.collect()
    objects._make_store.cache_clear()
    monkeypatch.undo()
    proxy.close()


_numbers = itertools.count()


@pytest.fixture
def stored(proxy, server, dataset):
    """The URL of a folder that holds the files of `dataset`."""
    folder = f"set{next(_numbers)}"
    for file in dataset.paths:
        data = Path(file).read_bytes()
        ask(server, "PUT", f"/{BUCKET}/{folder}/{os.path.basename(file)}", data)
    return f"s3://{BUCKET}/{folder}"


def take_pass(dataset, options, order="sequential", batches=None, **changes):
    """Returns images and labels of some batches, by default those of one pass."""
    changes |= {} if batches else {"repeat": False}
    spec = spec_of(dataset, order, SMALL, **changes)
    made = iter(make_dataset(spec, options, batch_size=4, endless=batches is not None))
    taken = [next(made) for _ in range(batches)] if batches else list(made)
    return [np.concatenate([batch[part].numpy() for batch in taken]) for part in (0, 1)]


def same(one, other):
    return all((a == b).all() for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@tf_data_nightly
def test_records_are_those_of_local_files(dataset, stored, tmp_path, options):
    """In order "global" over three epochs, in one pass, and in order "buffer"; read by ranges, with
    copies that are fetched, and with those that are there.
    """
    dti.build_index(f"{stored}/train-*")
    cached = {"cache_dir": tmp_path / "cache"}
    for keep in ({}, cached, cached):
        far = dti.Records.from_files(f"{stored}/train-*", **keep)
        assert far.locate(23)[1:] == dataset.locate(23)[1:]
        assert far.read(23) == dataset.read(23)
        assert same(take_pass(far, options), take_pass(dataset, options))
        for order in ("global", "buffer"):
            if order == "buffer" and not keep:
                with refused(r"pass `cache_dir` .* [\d,]+ bytes free, or use order 'global'"):
                    take_pass(far, options, order, 1)
                continue
            given = [take_pass(one, options, order, 18) for one in (far, dataset)]
            assert same(*given)


def test_fingerprint_is_that_of_local_files(dataset, stored):
    """`Resume` goes on with either."""
    dti.build_index(f"{stored}/train-*")
    far = dti.Records.from_files(f"{stored}/train-*")
    specs = [spec_of(records, "global", SMALL) for records in (far, dataset)]
    assert make_fingerprint(specs[0], 8) == make_fingerprint(specs[1], 8)


def test_index_is_that_of_local_files(dataset, stored, proxy, tmp_path):
    """Beside the objects, in another folder of the store, in a local one; cheap the second time."""
    other = f"{stored}-index"
    for place in (None, other, str(tmp_path / "index")):
        for written in (3, 0):
            proxy.seen.clear()
            report = dti.build_index(f"{stored}/train-*", index_dir=place)
            assert (report.written, report.unchanged) == (written, 3 - written)
        assert proxy.gets("train-.*-of-00003$") == 0
        far = dti.Records.from_files(f"{stored}/train-*", index_dir=place)
        for file, local in zip(far.files, dataset.files, strict=True):
            assert file.index_text() == local.index_text()
            assert file.num_records == local.num_records
        assert far.is_remote
        command = f"index .*{place}" if place else r"index --verify=schema 's3://.*train-0000\*"
        with refused(command):
            far.check_feature("image_key", "image/class/label", ("bytes_list",), (1, 1))


def test_etags_without_quotes_in_listings(dataset, stored, proxy, tmp_path):
    """As Azure has them; a manifest is replaced, and an object that changed is noticed."""
    proxy.edit = partial(re.sub, rb"<ETag>\W*(?:&quot;)?(\w+)[^<]*", rb"<ETag>\1")
    for verify in ("framing", "schema"):
        assert dti.build_index(f"{stored}/train-*", dti.Checks(verify=verify)).written == 3
    assert dti.build_index(f"{stored}/train-*").unchanged == 3
    far = dti.Records.from_files(f"{stored}/train-*")
    assert '"' not in far.files[0].etag
    assert same(take_pass(far, TF_DATA), take_pass(dataset, TF_DATA))
    other = dataclasses.replace(far.files[0], etag="0")
    wrong = dataclasses.replace(far, files=(other, *far.files[1:]))
    with refused("train-00000-of-00003 changed since it was indexed"):
        wrong.read(0)


def test_weak_etags(stored, proxy, server, dataset):
    """They cannot be asked for; an object that changed is noticed by its answer."""
    url = f"{stored.replace('s3:/', f'http://127.0.0.1:{proxy.port}')}/train-00000-of-00003"
    proxy.weak = "W/"
    near = dti.Records.from_files(dataset.paths[0])
    dti.build_index(url, index_dir=f"{stored}-index", allow_missing=True)
    far = dti.Records.from_files(url, index_dir=f"{stored}-index")
    assert far.read(1) == near.read(1)
    path = url.partition(str(proxy.port))[2]
    ask(server, "PUT", path, Path(dataset.paths[0]).read_bytes() + b"!")
    with refused("train-00000-of-00003 changed since it was indexed"):
        far.read(1)


def test_objects_are_checked_at_the_same_time(stored, proxy):
    """By threads: one object is not waited for before the next is asked for."""
    all_asked = threading.Barrier(3)

    def wait(method, path):
        if method == "GET" and "of-00003" in path:
            all_asked.wait(timeout=300)

    proxy.fault = wait
    for verify in ("framing", "crc"):
        report = dti.build_index(
            f"{stored}/train-*", dti.Checks(verify=verify), num_processes=3, force=True
        )
        assert report.written == 3


def test_an_object_that_fails_alone(stored, proxy):
    """The others are indexed."""
    proxy.fault = lambda method, path: "404" if "train-00001" in path and method == "GET" else None
    with pytest.raises(IndexFaultsError, match=r"train-00001.* no such object") as caught:
        dti.build_index(f"{stored}/train-*")
    assert caught.value.report.written == 2


@pytest.mark.parametrize(("error", "at_file"), [(KeyboardInterrupt, 1), (BrokenPipeError, 0)])
def test_an_index_run_that_is_interrupted(stored, proxy, error, at_file):
    """It does not wait until a store is back that is down."""

    def stay_down(method, path):
        return "503" if method == "GET" and re.search("train-0000[12]", path) else None

    def interrupt(progress):
        if progress.files or not at_file:
            raise error

    proxy.fault = stay_down
    with pytest.raises(error):
        dti.build_index(f"{stored}/train-*", on_progress=interrupt)


def test_a_store_that_never_takes_the_manifest(stored, proxy, dataset):
    """Ends the run: others may always be faster, but not for ever. The next one does it all."""
    proxy.fault = lambda method, path: "412" if method == "PUT" and "manifest" in path else None
    with refused("other runs keep replacing the manifest"):
        dti.build_index(f"{stored}/train-*")
    proxy.fault = lambda method, path: None
    assert dti.build_index(f"{stored}/train-*").written == 3
    far = dti.Records.from_files(f"{stored}/train-*")
    assert [far.index(n).tolist() for n in range(3)] == [
        dataset.index(n).tolist() for n in range(3)
    ]


def test_parts_of_stored_records(dataset, stored, tmp_path):
    """The same records as of files, from parts of the objects and from copies."""
    dti.build_index(f"{stored}/train-*")
    for cache_dir in (None, tmp_path / "copies"):
        far = dti.Records.from_files(f"{stored}/train-*", cache_dir=cache_dir)
        first, rest = far.sample(9), far.exclude(dataset.sample(9).ids)
        assert first.ids.tolist() == dataset.sample(9).ids.tolist()
        assert same(take_pass(first, TF_DATA), take_pass(dataset.sample(9), TF_DATA))
        how = {"record_ids": True, "seed": 3}
        spec = dti.InputSpec.for_training({first: 0.5, rest: 0.5}, 16, **how)
        train = dti.load(spec, TF_DATA, batch_size=6)
        near = {dataset.sample(9): 0.5, dataset.exclude(first.ids): 0.5}
        expected = dti.load(dti.InputSpec.for_training(near, 16, **how), TF_DATA, batch_size=6)
        assert len(train) == len(expected) == 3
        for (batch, labels), (other, same_labels) in zip(train, expected, strict=True):
            assert (batch["image"] == other["image"]).numpy().all()
            assert labels.numpy().tolist() == same_labels.numpy().tolist()
            assert batch["record_id"].numpy().tolist() == other["record_id"].numpy().tolist()


def test_gcs(dataset, stored, proxy, server, monkeypatch):
    """Its own client, on a server that answers as GCS does where it differs from S3."""
    account = {"gcs_base_url": f"http://127.0.0.1:{proxy.port}", "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    url = stored.replace("s3://", "gs://")
    for part, total in (("train-0000[01]*", 17), ("train-*", 24)):
        report = dti.build_index(f"{url}/{part}", allow_missing=True)
        assert report.summary.records == total
    far = dti.Records.from_files(f"{url}/train-*")
    assert same(take_pass(far, TF_DATA), take_pass(dataset, TF_DATA))
    manifest = f"{url}/index_manifest.json"
    (about,) = objects.find_objects(manifest).values()
    assert not objects.write(manifest, dataset.paths[0], replaces="")
    assert not objects.write(manifest, dataset.paths[0], replaces='"other"')
    assert objects.write(manifest, dataset.paths[0], replaces=about.etag)
    assert not objects.write(f"{url}/none", dataset.paths[0], replaces=about.etag)


def test_bad_records_and_objects_that_go(stored, server, dataset, proxy):
    data = bytearray(Path(dataset.paths[2]).read_bytes())
    data[len(data) // 2] ^= 1
    name = f"/{BUCKET}/{stored.rpartition('/')[2]}/train-00002-of-00003"
    ask(server, "PUT", name, bytes(data))
    with pytest.raises(IndexFaultsError, match=f"1 bad record in 1 of 3 .*{stored}/train-00002"):
        dti.build_index(f"{stored}/train-*", dti.Checks(verify="crc"))
    skips = {"on_bad": "skip", "max_bad_fraction": 0.5}
    report = dti.build_index(f"{stored}/train-*", dti.Checks(verify="crc"), **skips)
    assert (report.summary.records, report.summary.skipped) == (23, 1)
    listed = [one for one in proxy.seen if "PUT" in one and "bad_records.jsonl" in one]
    assert len(listed) == 1
    far = dti.Records.from_files(f"{stored}/train-*")
    ask(server, "PUT", name, Path(dataset.paths[2]).read_bytes())
    for check in (lambda: take_pass(far, TF_DATA), lambda: dti.Records.from_files(far.paths)):
        with refused("train-00002-of-00003 changed since it was indexed"):
            check()
    report = dti.build_index(f"{stored}/train-*", **skips)
    assert (report.summary.records, report.summary.skipped, report.written) == (24, 0, 1)

    def change(method, path):  # while it is indexed
        if method == "GET" and path == name and proxy.fault is change:
            proxy.fault = lambda *_: None
            ask(server, "PUT", name, Path(dataset.paths[2]).read_bytes()[:-1])

    proxy.fault = change
    with pytest.raises(IndexFaultsError, match="train-00002-of-00003 changed since"):
        dti.build_index(f"{stored}/train-*", force=True)
    ask(server, "PUT", name, Path(dataset.paths[2]).read_bytes())
    assert ask(server, "GET", f"{name.rpartition('/')[0]}/bad_records.jsonl")[0].status == 404
    ask(server, "DELETE", name)
    with refused("train-00002-of-00003 is missing"):
        dti.build_index(f"{stored}/train-*")
    report = dti.build_index(f"{stored}/train-*", allow_missing=True)
    assert (report.summary.records, report.removed) == (17, 1)


@backends
def test_a_record_that_stops_training_is_named(stored, server, dataset, options, tmp_path):
    data = Path(dataset.paths[1]).read_bytes()
    offset = int(dataset.index(1)[4, 0])
    name = f"/{BUCKET}/{stored.rpartition('/')[2]}/train-00001-of-00003"
    ask(server, "PUT", name, data[: offset + 100] + bytes(50) + data[offset + 150 :])
    dti.build_index(f"{stored}/train-*")
    far = dti.Records.from_files(f"{stored}/train-*")
    with pytest.raises(dti.BadRecordError) as caught:
        list(dti.load(spec_of(far, "global", SMALL), options, batch_size=8))
    place = caught.value.file, caught.value.bad_record.record
    assert place == (f"{stored}/train-00001-of-00003", 4)
    assert f"index --verify=decode --on_bad=skip '{stored}/train-" in str(caught.value)


def test_requests_that_fail_are_repeated(dataset, stored, proxy):
    """Of each kind one in 20: every record comes once."""
    dti.build_index(f"{stored}/train-*")
    far = dti.Records.from_files(f"{stored}/train-*")
    counter, faults, came = itertools.count(), ("503", "429", "cut", "short"), set()

    def fail(method, path):
        number = next(counter)
        if number % 5 or "of-00003" not in path:
            return None
        came.add(faults[number // 5 % 4])
        return faults[number // 5 % 4]

    proxy.fault = fail
    labels = take_pass(far, TF_DATA, "global", 96)[1]
    assert came == set(faults)
    np.testing.assert_array_equal(labels, take_pass(dataset, TF_DATA, "global", 96)[1])
    proxy.fault = lambda method, path: "cut" if next(counter) % 5 == 0 else None
    assert dti.build_index(f"{stored}/train-*", force=True).written == 3


def test_a_store_that_stays_down(stored, dataset, proxy):
    """Names the object and the cause after `retry_seconds`; a refusal at once."""
    dti.build_index(f"{stored}/train-*")
    far = dti.Records.from_files(f"{stored}/train-*", retry_seconds=0.5)
    proxy.fault = lambda method, path: "503" if "of-00003" in path else None
    with refused(rf"{stored}/train-0000.* cannot be read \(tried for 0.\d s\): .*503"):
        far.read(3)
    left = iter(range(20))
    proxy.fault = lambda method, path: "503" if next(left, None) is not None else None
    assert dataclasses.replace(far, retry_seconds=300).read(3) == dataset.read(3)  # it came back
    proxy.fault = lambda method, path: "503" if "of-00003" in path else None
    with pytest.raises(tf.errors.OpError, match=rf"{stored}/train-0000.* cannot be read"):
        take_pass(far, TF_DATA)
    proxy.fault = lambda method, path: "403"
    far = dataclasses.replace(far, retry_seconds=1e6)
    for check in (lambda: far.read(3), lambda: dti.build_index(f"{stored}/train-*")):
        with pytest.raises(dti.InputError, match=r"no permission: .*AWS_\*") as caught:
            check()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("ftp://host/train-*", r"objects are read from s3://, .*, got ftp://"),
        ("s3://nobucket-here/train-*", "there is no bucket nobucket-here"),
        (f"s3://{BUCKET}/none-*", "No object matches"),
        (f"s3://{BUCKET}/none", "No object matches"),
        (f"s3://{BUCKET}", r"must name a bucket and an object"),
    ],
)
def test_what_is_not_there(proxy, files, message):
    with refused(message):
        dti.build_index(files)
    with refused(message):
        dti.Records.from_files(files)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("403 AccessDenied", r"no permission: check the environment variables AWS_\*"),
        ("403 InvalidAccessKeyId", r"does not take the credentials \(InvalidAccessKeyId\)"),
        ("403 RequestTimeTooSkewed", "this machine's clock is wrong"),
        ("400 region 'us-east-1' is wrong; expecting 'eu-west-1'", "is in region eu-west-1: set"),
        ("301", "the bucket is in another region: set AWS_REGION"),
    ],
)
def test_what_a_store_says(proxy, fault, message):
    """Is said with what to do about it, for an object as for a pattern, and by doctor.py."""
    proxy.fault = lambda method, path: fault
    for url in (f"s3://{BUCKET}/a", f"s3://{BUCKET}/a*"):
        with refused(message):
            objects.find_objects(url)
    (finding,) = commands.load("doctor").examine_files([url])
    assert (finding.what, finding.state) == ("records", "broken")
    assert re.search(message, finding.found)


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://127.0.0.1:1", "127.0.0.1:1 refuses connections"),
        ("http://nowhere.invalid", "no host nowhere.invalid is known"),
    ],
)
def test_a_store_that_is_not_reached(proxy, monkeypatch, endpoint, message):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with refused(message):
        objects.find_objects(f"s3://{BUCKET}/a", retry_seconds=0)


def test_a_certificate(proxy, monkeypatch, tmp_path):
    """Is trusted if AWS_CA_BUNDLE names it."""
    with run_tls_server(tmp_path / "certificate") as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{port}")
        with refused(r"certificate of localhost:\d+ is not trusted \(UnknownIssuer\): .*CA_BUNDLE"):
            objects.find_objects(f"s3://{BUCKET}/a")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificate"))
        objects._make_store.cache_clear()
        assert objects.find_objects(f"s3://{BUCKET}/a") == {}


def test_without_the_library(proxy, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with refused("pip install obstore"):
        dti.Records.from_files("s3://bucket/train-*")


def test_index_by_an_executor(dataset, stored, tmp_path):
    """The same bytes as by processes of its own, also of bad records; errors are told."""
    (tmp_path / "set").mkdir()
    local = write_dataset(tmp_path / "set", [3, 4])
    damaged = Path(local.paths[0])
    damaged.write_bytes(damaged.read_bytes()[:-5])
    for files in (f"{stored}/train-*", tmp_path / "set" / "train-*"):
        made = {}
        with concurrent.futures.ThreadPoolExecutor(2) as executor:
            for name, how in (("own", {}), ("executor", {"executor": executor})):
                folder = tmp_path / name
                dti.build_index(files, index_dir=folder, on_bad="skip", max_bad_fraction=1.0, **how)
                made[name] = read_set(folder)
        assert made["own"] == made["executor"]
        assert "index_manifest.json" in made["own"]
    assert "bad_records.jsonl" in made["own"]

    class Broken(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *_):
            return super().submit(lambda: 1 / 0)

    with Broken(1) as executor, refused("The executor failed at .*ZeroDivisionError"):
        dti.build_index(files, force=True, executor=executor)
    with refused("A worker has dali_tf_input .*, this program 0.0: install the same"):
        processes.call_apart("0.0", sorted, [])
    with refused("No Dask scheduler answers at nowhere://"), connect_dask("nowhere://x:1"):
        pass


def test_an_executor_works_in_parallel(dataset, tmp_path, monkeypatch):
    """As many files at a time as it has threads, and no thread is left."""
    together, call = threading.Barrier(3), processes.Child.call

    def call_together(*arguments):
        together.wait(60)
        return call(*arguments)

    monkeypatch.setattr(processes.Child, "call", call_together)
    before = threading.active_count()
    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        assert dti.build_index(dataset.paths, index_dir=tmp_path, executor=executor).written == 3
    assert threading.active_count() <= before


@pytest.mark.slow
def test_an_idle_worker_learns_of_other_credentials(stored, proxy, tmp_path, monkeypatch):
    """One that waits for jobs since before they were set would ask another store, for minutes."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        with monkeypatch.context() as other:
            other.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
            local = write_dataset(tmp_path / "set", [3])
            dti.build_index(local.paths, force=True, executor=executor)
        files = f"{stored}/train-*"
        report = dti.build_index(files, index_dir=tmp_path / "index", executor=executor)
    assert report.written == 3


@pytest.mark.slow
def test_what_crashes_ends_a_child_of_the_worker():
    """Not the worker, whose next call another child answers."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        work = executor.submit(processes.call_apart, __version__, os.abort)
        with pytest.raises(processes.ChildDiedError, match="SIGABRT"):
            work.result()
        call = executor.submit(processes.call_apart, __version__, sorted, [3, 1, 2])
        assert call.result() == [1, 2, 3]
        with refused(r"0.0: .* must have dali_tf_input "):
            raise explain_executor(ImportError(), "0.0")


@pytest.mark.slow
def test_commands_take_urls(stored, dataset, server, tmp_path):
    ask(server, "PUT", f"/{BUCKET}/{stored.rpartition('/')[2]}/labels.txt", b"a\n" * 24)
    dti.build_index(f"{stored}/train-*")
    files = f"--files={stored}/train-*"
    cached = [f"--cache_dir={tmp_path}/cache"]
    for words in (
        ["train.py", "--epochs=1", "--image_size=16", "--batch_size=8"],
        ["train.py", "--epochs=1", "--image_size=16", "--batch_size=8", "--order=buffer"],
        ["preview", f"--out={tmp_path}/sheet.png", "--image_size=16"],
    ):
        keep = cached if "--order=buffer" in words else []
        process = commands.run(*words, files, *keep)
        assert process.returncode == 0, process.stderr
        said = "Copying [0-9,]+ bytes of objects .* are free.\n" if keep else ""
        assert re.fullmatch(said, process.stderr), words


def test_names_are_those_of_the_index_step(stored, proxy, server, tmp_path):
    """Training asks the store for none; another index run finds new ones, and checks no file."""
    folder = f"/{BUCKET}/{stored.rpartition('/')[2]}"
    ask(server, "PUT", f"{folder}/labels.txt", b"cat\ndog\n")
    place = {"index_dir": f"{tmp_path}/index"}
    dti.build_index(f"{stored}/train-*", **place)
    asked = []

    def fault(method, path):
        asked.extend([path] if "labels.txt" in path else [])

    proxy.fault = fault
    records = dti.Records.from_files(f"{stored}/train-*", **place)
    assert (records.class_names, asked) == (("cat", "dog"), [])
    for data, said in ((b"owl\n\nant\n", None), (b"owl\nant\n", ("owl", "ant"))):
        ask(server, "PUT", f"{folder}/labels.txt", data)
        assert dti.build_index(f"{stored}/train-*", **place).written == 0
        records = dti.Records.from_files(f"{stored}/train-*", **place)
        if said is None:
            with refused(r"labels.txt: line 2 is empty.* Then index again"):
                _ = records.class_names
        else:
            assert records.class_names == said


@pytest.mark.slow
def test_convert_from_a_store(stored, dataset, server, tmp_path):
    """Makes what it makes of local files, of compressed ones too."""
    dti.build_index(f"{stored}/train-*")
    name = f"{stored.rpartition('/')[2]}-gz"
    data = gzip.compress(Path(dataset.paths[1]).read_bytes())
    ask(server, "PUT", f"/{BUCKET}/{name}/train-00000-of-00001.gz", data)
    arguments = ["--num_files=2", "--validation_fraction=0.2", "--decoder=none"]
    pairs = {
        "all": (f"{stored}/train-*", f"{os.path.dirname(dataset.paths[0])}/train-*"),
        "one": (f"s3://{BUCKET}/{name}/train-*", dataset.paths[1]),
    }
    for what, sources in pairs.items():
        made = []
        for number, source in enumerate(sources):
            out = tmp_path / f"{what}{number}"
            process = commands.run("convert", *arguments, source, out)
            assert (process.returncode, process.stderr) == (0, "")
            made.append(read_set(out))
        assert made[0] == made[1]
    process = commands.run("convert", sources[0], f"s3://{BUCKET}/out")
    commands.fails(process, "a set is written to a local folder")


def read_set(folder):
    """Returns the files of a set, but for the one that has its folder's name."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name != "dataset_info.json"
    }


@pytest.mark.slow
@pytest.mark.parametrize("splits", [("",), ("train/", "val/")], ids=["classes", "splits"])
def test_convert_folders_of_a_store(stored, server, tmp_path, splits):
    """Makes what it makes of a local folder, to the byte; names what cannot be read."""
    name = f"photos{len(splits)}"
    for split in splits:
        for number, kind in enumerate(("a cat", "b+dog")):
            folder = tmp_path / "photos" / split / kind
            folder.mkdir(parents=True)
            for image in range(4 + number):
                data = jpeg(40, 50, seed=image) if image else b"no image"[: 8 * number]
                (folder / f"{image}.jpg").write_bytes(data)
                path = urllib.parse.quote(f"/{BUCKET}/{name}/{split}{kind}/{image}.jpg")
                ask(server, "PUT", path, data)
    made = []
    for number, source in enumerate((tmp_path / "photos", f"s3://{BUCKET}/{name}/")):
        flags = ["--decoder=none", "--max_left_out=0.5"]
        process = commands.run("convert", *flags, source, tmp_path / f"out{number}")
        assert (process.returncode, process.stderr) == (0, "")
        files = read_set(tmp_path / f"out{number}")
        bad = files.pop("left_out.jsonl").decode().splitlines()
        assert len(bad) == 2 * len(splits)
        assert all(f"{str(source).rstrip('/')}/" in line for line in bad)
        made.append(files)
    assert made[0] == made[1]
    process = commands.run("convert", f"s3://{BUCKET}/none{name}/", tmp_path / "none")
    commands.fails(
        process, f"s3://{BUCKET}/none{name} is no object, and has no sub-folders of images"
    )


@pytest.mark.slow
@pytest.mark.parametrize("store", [nightly("down"), "slow"])
def test_a_program_ends(stored, proxy, tmp_path, store):
    """It waits neither for `retry_seconds` nor, for ever, for what it asked for."""
    dti.build_index(f"{stored}/train-*")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(files=f"{stored}/train-*"))
    down, asked, answers = (threading.Event() for _ in range(3))

    def fault(method, path):
        if not down.is_set() or "of-00003" not in path:
            return None
        asked.set()
        if store == "down":
            return "503"
        answers.wait()
        return None

    proxy.fault = fault
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, program], **pipes) as process:
        process.stdout.readline()  # the first batch came
        down.set()
        assert asked.wait(120)
        process.stdin.write(b"end\n")
        process.stdin.close()
        time.sleep(1)  # not needed: it may end later
        answers.set()
        assert process.wait(120) == 0


PROGRAM = """
import dali_tf_input as dti
dataset = dti.Records.from_files("{files}")
spec = dti.InputSpec(records=dataset, preprocess=dti.Preprocess.for_training(16), order="global")
fed = dti.load(spec, dti.TfDataOptions(), batch_size=8)
iterator = iter(fed.dataset)
next(iterator)
print("first", flush=True)
import threading
threading.Thread(target=lambda: [list(fed.dataset) for _ in iter(int, 1)], daemon=True).start()
input()
"""


@pytest.fixture
def dask(monkeypatch):
    """A scheduler on this machine with two workers, and their processes."""
    from distributed import Client, LocalCluster

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SCRIPTS}:{os.environ['PYTHONPATH']}")
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster) as client:
        yield cluster.scheduler_address, list(client.run(os.getpid).values())


@pytest.mark.slow
def test_index_by_dask(stored, tmp_path, dask):
    """By two workers, of which one is killed."""
    address, (victim, *_) = dask
    checks = dti.Checks(verify="decode", decoder="dali")
    dti.build_index(f"{stored}/train-*", checks, index_dir=tmp_path / "own")
    with connect_dask(address) as executor:
        os.kill(victim, signal.SIGKILL)
        dti.build_index(f"{stored}/train-*", checks, index_dir=tmp_path / "dask", executor=executor)
    for path in (tmp_path / "own").iterdir():
        assert path.read_bytes() == (tmp_path / "dask" / path.name).read_bytes()


@pytest.mark.slow
def test_convert_by_dask(stored, tmp_path, dask):
    dti.build_index(f"{stored}/train-*")
    for name, where in (("here", ()), ("there", (f"--dask={dask[0]}",))):
        words = ["convert", "--num_files=2", "--decoder=dali", *where]
        process = commands.run(*words, f"{stored}/train-*", tmp_path / name)
        assert (process.returncode, process.stderr) == (0, "")
    assert read_set(tmp_path / "here") == read_set(tmp_path / "there")


SCHEDULER = """
import asyncio
from distributed import Scheduler

async def serve():
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        print(scheduler.address, flush=True)
        await scheduler.finished()

asyncio.run(serve())
"""


@pytest.mark.slow
def test_a_dask_scheduler_that_dies_ends_the_run(dataset, tmp_path):
    command = [sys.executable, "-c", SCHEDULER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scheduler,
        connect_dask(scheduler.stdout.readline().strip()) as executor,
    ):
        threading.Timer(1, scheduler.kill).start()  # there are no workers: the run waits
        with refused("The executor failed at .*: its scheduler is gone"):
            dti.build_index(dataset.paths, index_dir=tmp_path, executor=executor)


@pytest.mark.slow
def test_a_child_that_waited_for_too_long(dataset, tmp_path, monkeypatch):
    """Another one does the work; a thread of an executor keeps one, and no two share it."""
    monkeypatch.setattr(processes, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(processes, "_idle", [])
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        for _ in range(2):
            report = dti.build_index(
                dataset.paths, index_dir=tmp_path, executor=executor, force=True
            )
            assert report.written == 3
            time.sleep(0.5)
    assert 1 <= len(processes._idle) <= 2
