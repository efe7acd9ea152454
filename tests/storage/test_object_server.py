"""What only a server shows of object stores: S3's etags and errors, GCS, retries, and programs that
use a store.
"""

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
import urllib.parse
from functools import partial
from pathlib import Path

import commands
import pytest
from conftest import ROOT, SCRIPTS, at_night, jpeg, refused
from conversions import convert, make, set_bytes
from stores import BUCKET, Proxy, ask, run_server, run_tls_server, set_credentials

import dali_tf_input as dti
from dali_tf_input.cli.dask import connect_dask
from dali_tf_input.storage import objects

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    with run_server() as port:
        yield port


@pytest.fixture
def proxy(server, monkeypatch, tmp_path):
    proxy = Proxy(server)
    set_credentials(monkeypatch, f"http://127.0.0.1:{proxy.port}")
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


def check_records(far, dataset):
    assert [far.read(record) for record in (0, 7, 23)] == [
        dataset.read(record) for record in (0, 7, 23)
    ]


def test_etags_without_quotes_in_listings(dataset, stored, proxy):
    """As Azure has them; a manifest is replaced, and an object that changed is noticed."""
    proxy.edit = partial(re.sub, rb"<ETag>\W*(?:&quot;)?(\w+)[^<]*", rb"<ETag>\1")
    for verify in ("framing", "schema"):
        assert dti.build_index(f"{stored}/train-*", dti.Checks(verify=verify)).written == 3
    assert dti.build_index(f"{stored}/train-*").unchanged == 3
    far = dti.Records.from_files(f"{stored}/train-*")
    assert '"' not in far.files[0].etag
    check_records(far, dataset)
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


def test_gcs(dataset, stored, proxy, monkeypatch):
    """Its own client, on a server that answers as GCS does where it differs from S3."""
    account = {"gcs_base_url": f"http://127.0.0.1:{proxy.port}", "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    url = stored.replace("s3://", "gs://")
    for part, total in (("train-0000[01]*", 17), ("train-*", 24)):
        report = dti.build_index(f"{url}/{part}", allow_missing=True)
        assert report.summary.records == total
    check_records(dti.Records.from_files(f"{url}/train-*"), dataset)
    manifest = f"{url}/index_manifest.json"
    (about,) = objects.find_objects(manifest).values()
    assert not objects.write(manifest, dataset.paths[0], replaces="")
    assert not objects.write(manifest, dataset.paths[0], replaces='"other"')
    assert objects.write(manifest, dataset.paths[0], replaces=about.etag)
    assert not objects.write(f"{url}/none", dataset.paths[0], replaces=about.etag)


def test_requests_that_fail_are_repeated(dataset, stored, proxy):
    """Of each kind one in 20: every record is read."""
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
    for record in range(24):
        assert far.read(record) == dataset.read(record)
    assert came == set(faults)
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
    proxy.fault = lambda method, path: "403"
    far = dataclasses.replace(far, retry_seconds=1e6)
    for check in (lambda: far.read(3), lambda: dti.build_index(f"{stored}/train-*")):
        with pytest.raises(dti.InputError, match=r"no permission: .*AWS_\*") as caught:
            check()
        assert "secret" not in str(caught.value)
    proxy.fault = lambda method, path: None
    for call in (dti.build_index, dti.Records.from_files):
        with refused("there is no bucket nobucket-here"):
            call("s3://nobucket-here/train-*")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
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


def test_a_certificate(proxy, monkeypatch, tmp_path):
    """Is trusted if AWS_CA_BUNDLE names it."""
    with run_tls_server(tmp_path / "certificate") as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{port}")
        with refused(r"certificate of localhost:\d+ is not trusted \(UnknownIssuer\): .*CA_BUNDLE"):
            objects.find_objects(f"s3://{BUCKET}/a")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificate"))
        objects._make_store.cache_clear()
        assert objects.find_objects(f"s3://{BUCKET}/a") == {}


TRAIN = ["train.py", "--epochs=1", "--image_size=16", "--batch_size=8"]
PREVIEW = ["preview", "--out=sheet.png", "--image_size=16"]


@pytest.mark.parametrize(
    "words", at_night([PREVIEW], [PREVIEW, TRAIN, [*TRAIN, "--order=buffer"]]), ids=" ".join
)
def test_commands_take_urls(stored, server, tmp_path, caplog, words):
    ask(server, "PUT", f"/{BUCKET}/{stored.rpartition('/')[2]}/labels.txt", b"a\n" * 24)
    dti.build_index(f"{stored}/train-*")
    keep = [f"--cache_dir={tmp_path}/copies"] if words != TRAIN else []
    commands.succeeds(commands.run(*words, f"--files={stored}/train-*", *keep, cwd=tmp_path))
    said = [one.getMessage() for one in caplog.records if one.name != "tensorflow"]
    assert len(said) == len(keep)
    assert re.match("Copying [0-9,]+ bytes of objects .* are free" if keep else "", "".join(said))


def test_convert_from_a_store(stored, dataset, proxy, server, tmp_path):
    """Makes what it makes of local files, of compressed ones too."""
    dti.build_index(f"{stored}/train-*")
    name = f"{stored.rpartition('/')[2]}-gz"
    data = gzip.compress(Path(dataset.paths[1]).read_bytes())
    ask(server, "PUT", f"/{BUCKET}/{name}/train-00000-of-00001.gz", data)
    flags = ["--num_files=2", "--validation_fraction=0.2"]
    pairs = {
        "all": (f"{stored}/train-*", f"{os.path.dirname(dataset.paths[0])}/train-*"),
        "one": (f"s3://{BUCKET}/{name}/train-*", dataset.paths[1]),
    }
    for what, sources in pairs.items():
        made = []
        for number, source in enumerate(sources):
            out = tmp_path / f"{what}{number}"
            make(*flags, source, out)
            made.append(set_bytes(out))
        assert made[0] == made[1]
    names = b"".join(b"class %d\n" % number for number in range(24))
    ask(server, "PUT", f"/{BUCKET}/{name}/labels.txt", names)
    for url in (f"s3://{BUCKET}", f"http://127.0.0.1:{proxy.port}/{BUCKET}"):
        out = tmp_path / url.partition(":")[0]
        make(*flags, f"{url}/{name}/train-00000-of-00001.gz", out)
        assert (out / "labels.txt").read_bytes() == names
    process = convert(sources[0], f"s3://{BUCKET}/out")
    commands.fails(process, "a set is written to a local folder")


def test_convert_folders_of_a_store(proxy, server, tmp_path):
    """Makes what it makes of a local folder, to the byte; names what cannot be read."""
    for split in ("train", "val"):
        for number, kind in enumerate(("a cat", "b+dog")):
            folder = tmp_path / "photos" / split / kind
            folder.mkdir(parents=True)
            for image in range(4 + number):
                data = jpeg(10, 12, seed=image) if image else b"no image"[: 8 * number]
                (folder / f"{image}.jpg").write_bytes(data)
                path = urllib.parse.quote(f"/{BUCKET}/photos/{split}/{kind}/{image}.jpg")
                ask(server, "PUT", path, data)
    made = []
    for number, source in enumerate((tmp_path / "photos", f"s3://{BUCKET}/photos/")):
        make("--max_left_out=0.5", source, tmp_path / f"out{number}")
        files = set_bytes(tmp_path / f"out{number}")
        bad = files.pop("left_out.jsonl").decode().splitlines()
        assert len(bad) == 4
        assert all(f"{str(source).rstrip('/')}/" in line for line in bad)
        made.append(files)
    assert made[0] == made[1]
    # The classes alone, and no such folder.
    flags = ["--max_left_out=0.5", "--validation_fraction=0"]
    make(*flags, f"s3://{BUCKET}/photos/train/", tmp_path / "classes")
    assert (tmp_path / "classes" / "labels.txt").read_text() == "a cat\nb+dog\n"
    process = convert(f"s3://{BUCKET}/none/", tmp_path / "none")
    said = f"s3://{BUCKET}/none is no object, and has no sub-folders of images"
    commands.fails(process, said)


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


@pytest.mark.nightly
@pytest.mark.parametrize("store", ["slow", "down"])
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
        threading.Timer(1, answers.set).start()  # it may end before or after
        assert process.wait(120) == 0


def test_by_dask(stored, tmp_path, monkeypatch):
    """Records are converted, and indexed while one of two workers is killed."""
    from distributed import Client, LocalCluster

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SCRIPTS}:{os.environ.get('PYTHONPATH', '')}")
    checks = dti.Checks(verify="decode", decoder="dali")
    dti.build_index(f"{stored}/train-*", checks, index_dir=tmp_path / "own")
    dti.build_index(f"{stored}/train-*")
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster) as client:
        address, workers = cluster.scheduler_address, list(client.run(os.getpid).values())
        for name, where in (("here", ()), ("there", (f"--dask={address}",))):
            words = ["convert", "--num_files=2", "--decoder=none", *where]
            commands.succeeds(commands.run(*words, f"{stored}/train-*", tmp_path / name))
        assert set_bytes(tmp_path / "here") == set_bytes(tmp_path / "there")
        with connect_dask(address) as executor:
            os.kill(workers[0], signal.SIGKILL)
            how = {"index_dir": tmp_path / "dask", "executor": executor}
            dti.build_index(f"{stored}/train-*", checks, **how)
    own, by_dask = (set_bytes(tmp_path / name, indexes=True) for name in ("own", "dask"))
    assert own == by_dask


SCHEDULER = """
import asyncio
from distributed import Scheduler

async def serve():
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        print(scheduler.address, flush=True)
        await scheduler.finished()

asyncio.run(serve())
"""


def test_a_dask_scheduler_that_dies_ends_the_run(dataset, tmp_path):
    command = [sys.executable, "-c", SCHEDULER]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scheduler,
        connect_dask(scheduler.stdout.readline().strip()) as executor,
    ):
        threading.Timer(1, scheduler.kill).start()  # there are no workers: the run waits
        with refused("The executor failed at .*: its scheduler is gone"):
            dti.build_index(dataset.paths, index_dir=tmp_path, executor=executor)
