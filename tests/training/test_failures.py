"""A record that stops training: the error names it, and its command fixes it."""

import dataclasses
import gc
import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from commands import fails, run
from conftest import (
    BACKENDS,
    DALI,
    TF_DATA,
    cases,
    jpeg,
    numbered_examples,
    slowly,
    spec_of,
    write_indexed,
    write_tfrecord,
)
from models import make_model

import dali_tf_input as dti
from dali_tf_input.training import failures
from dali_tf_input.training.failures import explain, skip_command

pytestmark = pytest.mark.usefixtures("one_worker")
COUNT, FILES = 40, 3
NUM_CLASSES = COUNT * FILES
BAD = 63  # of all records: number 23 of the second file
TEXT = {"image/encoded": b"404 not found"}
TRUNCATED = {"image/encoded": jpeg(300, 400)[:4000]}
DAMAGES = {
    "text": (TEXT, "text: expected an encoded image, found b'404 not found'"),
    "truncated": (TRUNCATED, "truncated JPEG: "),
    "empty": ({"image/encoded": b""}, "empty image: `image_key` 'image/encoded' holds 0 bytes."),
}
backends = pytest.mark.parametrize("backend", BACKENDS)
SKIP = "-m dali_tf_input index --verify=decode --on_bad=skip"


def write(folder, changes, *, bad=BAD, skip=()):
    """Writes and indexes records of which one is bad; `skip` are skipped by the index already."""
    folder.mkdir(exist_ok=True)
    examples = numbered_examples(NUM_CLASSES)
    examples[bad] |= changes
    for number in skip:
        examples[number]["image/encoded"] = b""
    for part in range(FILES):
        write_tfrecord(folder / f"train-{part}", examples[part * COUNT : (part + 1) * COUNT])
    if skip:
        checks = dti.Checks(verify="schema")
        dti.build_index(folder / "train-0", checks, on_bad="skip", max_bad_fraction=1)
    dti.build_index(folder / "train-*")
    return dti.Records.from_files(folder / "train-*")


def feed(records, backend, order="global", *, batch_size=4, **changes):
    spec = spec_of(records, order, dti.Preprocess.for_training(8), **changes)
    return dti.load(spec, BACKENDS[backend], batch_size=batch_size)


def feed_evaluation(records, backend, *, batch_size=8):
    spec = spec_of(records, "sequential", dti.Preprocess.for_evaluation(8), repeat=False)
    return dti.load(spec, BACKENDS[backend], batch_size=batch_size)


def make_classifier(**compiled):
    return make_model(8, NUM_CLASSES, keras.layers.GlobalAveragePooling2D(), **compiled)


def train_on(train, model=None, epochs=2, **arguments):
    return train.fit(model or make_classifier(), epochs=epochs, verbose=0, **arguments)


def stops(message):
    return pytest.raises(dti.BadRecordError, match=message)


def index(*arguments):
    process = run("index", "--on_bad=skip", *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(
    ("backend", "order", "damage"),
    [
        *itertools.product(BACKENDS, ("global", "sequential"), ("truncated",)),
        *(("dali", "global", damage) for damage in ("text", "empty")),
        ("tf_data", "global", "empty"),
    ],
)
def test_the_error_names_the_record(tmp_path, backend, order, damage):
    changes, reason = DAMAGES[damage]
    records = write(tmp_path, changes)
    with pytest.raises(dti.BadRecordError) as caught:
        train_on(feed(records, backend, order))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/train-1: record 23, byte ")
    assert reason in text
    assert text.endswith(f"Skip bad records: {text.rpartition('records: ')[2]}")
    assert text.endswith(f"{SKIP} '{tmp_path}/train-*'")
    assert isinstance(caught.value, dti.InputError)
    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    assert (caught.value.file, caught.value.bad_record.record) == (f"{tmp_path}/train-1", 23)


@pytest.mark.slow
@backends
def test_a_buffer_has_no_plan(tmp_path, backend):
    """Its error has the command that finds the record."""
    records = write(tmp_path, TEXT)
    said = r"The input failed after step \d+ .*To check all records: .*--verify=decode '.*train-\*'"
    with pytest.raises(dti.InputError, match=said) as caught:
        train_on(feed(records, backend, "buffer", buffer_size=8))
    assert not isinstance(caught.value, dti.BadRecordError)
    command = str(caught.value).rpartition("records: ")[2]
    _, _, _, *arguments = shlex.split(command)
    assert command.startswith(f"{sys.executable} -m dali_tf_input index ")
    found = run(*arguments)
    assert f"{tmp_path}/train-1: record 23, byte " in found.stderr


def train_by_script(folder, *arguments):
    files, classes = f"--files={folder}/train-*", f"--num_classes={NUM_CLASSES}"
    return run("train.py", files, classes, "--image_size=16", *arguments)


@pytest.mark.slow
def test_the_command_fixes_it(tmp_path):
    """Trained by the script; the command that it prints is run as it stands."""
    write(tmp_path, TEXT)
    process = train_by_script(tmp_path, "--backend=dali_cpu", "--epochs=1")
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    last = process.stderr.splitlines()[-1]
    assert last.startswith(f"error: {tmp_path}/train-1: record 23, byte ")
    command = last.partition("Skip bad records: ")[2]
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, cwd=tmp_path)
    process = train_by_script(tmp_path, "--backend=dali_cpu", "--epochs=1")
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("backend", "block"), cases(BACKENDS, [1, 7], fast=[("dali", 1), ("tf_data", 7)])
)
def test_a_plan_leads_to_the_record(tmp_path, monkeypatch, backend, block):
    """Only the records of a few steps are checked, whatever the epoch."""
    checked = []
    find = failures._RecordCheck.find_problem
    monkeypatch.setattr(
        failures._RecordCheck,
        "find_problem",
        lambda *given: checked.append(given[1]) or find(*given),
    )
    records = write(tmp_path, TEXT)
    for seed, begins_behind in ((0, False), (1, True)):
        train = feed(records, backend, batch_size=2, seed=seed, shuffle_block_size=block)
        plan = train.spec.plan(2)
        order = plan.records(0, np.arange(NUM_CLASSES)).tolist()
        if begins_behind:  # the record in its epoch, so that it comes in the next one
            step = min(order.index(BAD) // 2 + 1, train.steps_per_epoch - 1)
            train = dti.load(train.spec, train.options, batch_size=2, start_step=step)
        checked.clear()
        with stops(r"train-1: record 23, byte"):
            train_on(train, epochs=3)
        assert checked[-1] == BAD
        # Pipelines may fail a few batches ahead.
        assert len(checked) <= 2 * (2 + failures._STEPS_AHEAD)


@pytest.mark.slow
def test_two_replicas(tmp_path):
    """In a process of its own: a failed step leaves collectives behind."""
    write(tmp_path, TEXT)
    flags = ["--backend=tf_data", "--replicas=2", "--batch_size=4"]
    process = train_by_script(tmp_path, *flags)
    fails(process, f"error: {tmp_path}/train-1: record 23, byte ", bad_records=True)


@pytest.mark.parametrize("backend", ["dali", slowly("tf_data")])
def test_loops_evaluation_prediction_and_resuming(tmp_path, backend):
    """Each counts steps of its own; accumulated gradients are less than one a batch."""
    records = write(tmp_path / "records", TRUNCATED if backend == "dali" else TEXT)
    named, valid = (
        stops("train-1: record 23, byte"),
        feed_evaluation(records, backend, batch_size=2),
    )
    model = make_classifier(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=30))
    with named:
        list(valid)
    with named:
        list(feed(records, backend))
    with named:
        valid.evaluate(model, verbose=0)
    with named:
        valid.predict(model, verbose=0)
    with named:
        train_on(feed(records, backend, batch_size=2), model, resume=str(tmp_path / "run"))
    with named:  # the first batch
        train_on(feed(records, backend, batch_size=NUM_CLASSES))


def test_numbers_count_what_the_index_skips(tmp_path):
    records = write(tmp_path, TEXT, bad=30, skip=(3, 4, 17))
    assert records.num_records == NUM_CLASSES - 3
    with stops(r"train-0: record 30, byte"):
        train_on(feed(records, "tf_data"))


def test_a_file_whose_bytes_rot(tmp_path):
    """Size and time are those of the index: the CRC fails in the middle of training."""
    records = write(tmp_path, {})
    train = feed(records, "tf_data", "sequential")
    file = records.files[2]
    with open(file.path, "r+b") as stream:
        stream.seek(5000)
        stream.write(b"\xff\0\xff")
    os.utime(file.path, ns=(file.mtime_ns, file.mtime_ns))
    with stops(r"train-2: record \d+, byte [\d,]+: unreadable: "):
        train_on(train)


@pytest.mark.parametrize(
    ("damage", "backend", "order"),
    [
        *itertools.product(["cut between records"], BACKENDS, ["global", "buffer"]),
        *(("cut in a record", *how) for how in (("dali", "buffer"), ("tf_data", "global"))),
        *(("emptied", *how) for how in (("dali", "global"), ("tf_data", "buffer"))),
        *(("length", *how) for how in (("dali", "global"), ("tf_data", "buffer"))),
        *(("removed", *how) for how in itertools.product(BACKENDS, ["global", "buffer"])),
    ],
)
def test_a_file_that_changes_after_it_was_described(tmp_path, backend, order, damage):
    """No record is lost without a word."""
    records = write(tmp_path, {})
    train = feed(records, backend, order, buffer_size=8)
    offset, size = records.index(1)[23]
    ends = {"cut in a record": offset + size // 2, "cut between records": offset, "emptied": 0}
    file = tmp_path / "train-1"
    if damage == "removed":
        file.unlink()
    elif damage == "length":
        with open(file, "r+b") as stream:
            stream.seek(offset)
            stream.write(b"\xff")
    else:
        os.truncate(file, ends[damage])
    with pytest.raises(dti.InputError) as caught:
        train_on(train)
    said = "cannot be read: No such file" if damage == "removed" else "changed since it was indexed"
    assert f"{file} {said}" in str(caught.value)


@backends
@pytest.mark.parametrize("order", ["global", "buffer"])
def test_another_file_in_its_place(tmp_path, backend, order):
    """A valid file with one more record in front: none of its records is served as another."""
    records = write(tmp_path, {})
    train = feed(records, backend, order, buffer_size=8)
    file, (first, *_) = tmp_path / "train-1", numbered_examples(1)
    whole = file.read_bytes()
    write_tfrecord(tmp_path / "other", [first])
    (tmp_path / "other").write_bytes((tmp_path / "other").read_bytes() + whole)
    os.replace(tmp_path / "other", file)
    changed = rf"train-1 changed since it was indexed \(then {len(whole):,} bytes, now "
    with pytest.raises(dti.InputError, match=changed):
        train_on(train)
    with pytest.raises(dti.InputError, match=changed):
        feed(records, backend, order)


@backends
@pytest.mark.parametrize(
    "order", ["global", "buffer", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_an_index_that_goes_or_is_replaced(tmp_path, backend, order):
    """What a dataset has read is out of reach: each iterator serves every record once."""
    records = write(tmp_path, {})
    train = feed(records, backend, order, **({"buffer_size": 8} if order == "buffer" else {}))
    batches = train.dataset
    cut, replaced, removed = (Path(file.index_file) for file in records.files)
    os.truncate(cut, 20)
    replaced.write_bytes(removed.read_bytes())
    removed.unlink()
    for _ in range(2):
        labels = [batch[1].numpy() for batch in batches]
        assert sorted(np.concatenate(labels)) == list(range(NUM_CLASSES))
    del train, batches  # their iterators share what they have read of the index
    gc.collect()
    with pytest.raises(
        dti.InputError, match=r"train-0\.idx changed since `Records.from_files` read"
    ):
        list(feed(records, "tf_data"))


def test_from_another_folder(tmp_path, monkeypatch):
    """Files that were named from a folder that the program left since."""
    write(tmp_path, TEXT)
    monkeypatch.chdir(tmp_path)
    train = feed(dti.Records.from_files("train-*"), "dali")
    monkeypatch.chdir("/")
    with pytest.raises(dti.BadRecordError) as caught:
        train_on(train)
    assert caught.value.file == str(tmp_path / "train-1")
    assert f"--on_bad=skip '{tmp_path}/train-*'" in str(caught.value)


@pytest.mark.slow
def test_the_command_checks_as_before(tmp_path):
    """What an index skipped stays skipped; what was decoded before is decoded again."""
    write(tmp_path, {"image/class/label": 9999})
    pattern = str(tmp_path / "train-*")
    both = "--num_classes=300 --decoder=tf_data --max_pixels=1000000"
    for flags, options, expected in (
        ("--verify=schema --num_classes=300", DALI, "--num_classes=300 --on_bad=skip"),
        (f"--verify=decode {both}", TF_DATA, f"{both} --on_bad=skip --force"),
        # tf.data's decoder was content: both are asked now.
        ("--verify=decode --decoder=tf_data", DALI, "--on_bad=skip --force"),
    ):
        index("--max_bad_fraction=1", *flags.split(), pattern)
        spec = spec_of(dti.Records.from_files(pattern), "global", dti.Preprocess())
        command = skip_command(spec, options)
        head = "dali_tf_input index --verify=decode"
        assert command.partition(" -m ")[2] == f"{head} {expected} {pattern!r}"


def test_other_errors_stay_as_they_are(dataset):
    """Of memory, of the model, of Python: nothing is blamed on the input."""
    train = feed(dataset, "tf_data")
    message = "OOM when allocating tensor [[IteratorGetNext]]"
    shared = {"batch_size": 4, "step": 0}
    error = tf.errors.ResourceExhaustedError(None, None, message)
    assert explain(error, train.spec, train.options, **shared) is None
    message = "Detected at node sequential/GatherV2\n [[{{node GatherV2}}]] [[IteratorGetNext/_2]]"
    error = tf.errors.InvalidArgumentError(None, None, message)
    assert explain(error, train.spec, train.options, **shared) is None
    error = tf.errors.InvalidArgumentError(None, None, "Detected at node IteratorGetNext defined")
    found = explain(error, train.spec, train.options, **shared)
    assert "The input failed after step 0 (InvalidArgumentError), and no bad record is" in str(
        found
    )


def test_an_error_of_the_model_stays_as_it_is(tmp_path):
    records = write(tmp_path / "dali_records", {})
    gather = keras.layers.Lambda(
        lambda images: tf.gather(tf.reshape(images, (-1, 192)), [192], axis=1), (1,)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="192 is not in"):
        train_on(feed(records, "dali"), make_model(8, 120, gather), resume=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("backend", "bad"),
    cases(BACKENDS, ["train", "valid"], fast=[("dali", "train"), ("tf_data", "valid")]),
)
def test_training_and_validation_are_told_apart(tmp_path, backend, bad):
    changes = {bad: TEXT}
    train = feed(write(tmp_path / "train", changes.get("train", {})), backend, batch_size=8)
    valid = feed_evaluation(write(tmp_path / "valid", changes.get("valid", {})), backend)
    folder = f"{tmp_path}/{bad}"
    with stops(rf"^{folder}/train-1: record 23, byte .* --on_bad=skip '{folder}/train-\*'"):
        train_on(train, validation=valid)


@pytest.mark.parametrize("is_known", [True, False])
def test_labels_that_count_from_1(tmp_path, is_known):
    """Known beforehand, by a sample, or by the step that fails."""
    examples = [{**one, "image/class/label": n + 1} for n, one in enumerate(numbered_examples(8))]
    dti.build_index(write_tfrecord(tmp_path / "train", examples))
    records = dti.Records.from_files(tmp_path / "train")
    said = "Labels run from 1 to 8, the model has 8 outputs, for labels 0 to 7"
    if not is_known:
        records = dataclasses.replace(records, features={})
        said = r"record 7, byte .* `label.key` 'image/class/label' must be in 0 to 7, found 8"
    label = dti.ClassLabel(key="image/class/label")
    with pytest.raises(dti.InputError, match=rf"{said}.* pass ClassLabel\(offset=1\)"):
        train_on(feed(records, "tf_data", label=label), make_model(8, 8))
    label = dataclasses.replace(label, offset=1)
    assert train_on(feed(records, "tf_data", label=label), make_model(8, 8))


@pytest.mark.slow
def test_training_resumes_after_the_record_is_skipped(tmp_path):
    """With --resume: training continues at the same place, on one record less."""
    write(tmp_path, TEXT)
    flags = [f"--resume={tmp_path}/run", "--save_every=1", "--backend=tf_data"]
    flags += ["--batch_size=8", "--epochs=3"]
    process = train_by_script(tmp_path, *flags)
    assert process.returncode == 1
    assert "record 23, byte " in process.stderr
    index("--verify=decode", f"{tmp_path}/train-*")
    process = train_by_script(tmp_path, *flags)
    assert process.returncode == 0, process.stderr
    message = "The index skips 1 more record than the saved state: resuming at step "
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    (tmp_path / "index_manifest.json").unlink()
    dti.build_index(tmp_path / "train-*")  # and back: that is another set of records
    fails(train_by_script(tmp_path, *flags), "`records` was 119, is 120")


@pytest.mark.parametrize(
    ("keys", "offset", "argument"),
    [
        (("jpg", "cls"), 0, "--image_key=jpg --label_key=cls"),
        (("image/encoded", "image/class/label"), -1, "--label_offset=-1"),
    ],
)
def test_the_command_has_what_the_spec_was_made_with(tmp_path, keys, offset, argument):
    file = str(tmp_path / "train")
    examples = [
        {keys[0]: one["image/encoded"], keys[1]: one["image/class/label"] + offset}
        for one in numbered_examples(100)
    ]
    examples[7][keys[0]] = b"text"
    dti.build_index(write_tfrecord(file, examples))
    records = dti.Records.from_files(file, image_key=keys[0])
    label = dti.ClassLabel(key=keys[1], offset=offset)
    with pytest.raises(dti.BadRecordError) as caught:
        train_on(feed(records, "tf_data", label=label))
    assert str(caught.value).endswith(f"{argument} --on_bad=skip {file}")
    output = index("--verify=decode", "--decoder=dali", *argument.split(), file)
    assert "1 record (1.00%), listed in bad_records.jsonl" in output


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_labels_that_are_not_utf8(tmp_path, options):
    """TensorFlow's message would hold the record's bytes, and then not be text."""
    examples = [{**example, "name": b"cat"} for example in numbered_examples(8)]
    examples[5]["name"] = b"\xff\xfe"
    records = write_indexed(tmp_path / "train", examples)
    label = dti.ClassLabel(key="name", vocabulary=("cat", "dog"))
    spec = spec_of(records, "global", dti.Preprocess(image_size=(8, 8)), label=label)
    with pytest.raises(dti.BadRecordError, match=r"record 5, .* of the vocabulary, found b'\\xff"):
        list(dti.load(spec, options, batch_size=4))


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("is_known", [True, False])
def test_values_of_two_types(tmp_path, options, is_known):
    """Each is a sound record, so no index helps: it is said what does."""
    examples = [{**example, "score": [3]} for example in numbered_examples(8)]
    examples[5]["score"] = [0.5]
    records = write_indexed(tmp_path / "train", examples, dti.Checks(verify="schema"))
    said = "'score' holds int64_list and float_list in different records, .* with one type"
    if not is_known:
        feature = dataclasses.replace(records.features["score"], kinds=("int64_list",))
        records = dataclasses.replace(records, features={**records.features, "score": feature})
        said = "record 5, .*: label type: 'score' must be int64_list.* Write all records with one"
    with pytest.raises(dti.InputError, match=said):
        label = dti.Values(key="score", size=1)
        spec = spec_of(records, "global", dti.Preprocess(image_size=(8, 8)), label=label)
        list(dti.load(spec, options, batch_size=4))
