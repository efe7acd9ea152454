"""A record that stops training: the error names it, and its command fixes it."""

import dataclasses
import gc
import os
import re
import shlex
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from commands import fails, run, run_cold, succeeds
from conftest import (
    BACKENDS,
    DALI,
    TF_DATA,
    at_night,
    jpeg,
    numbered_examples,
    spec_of,
    table,
    write_indexed,
    write_tfrecord,
)
from models import make_model

import dali_tf_input as dti
from dali_tf_input.training import failures
from dali_tf_input.training.failures import explain, skip_command

pytestmark = pytest.mark.usefixtures("checked_here")
COUNT, FILES = 8, 3
NUM_CLASSES = COUNT * FILES
BAD = 13  # of all records: number 5 of the second file
TEXT = {"image/encoded": b"404 not found"}
TRUNCATED = {"image/encoded": jpeg(300, 400)[:4000]}
DAMAGES = {
    "text": (TEXT, "text: expected an encoded image, found b'404 not found'"),
    "truncated": (TRUNCATED, "truncated JPEG: "),
    "empty": ({"image/encoded": b""}, "empty image: `image_key` 'image/encoded' holds 0 bytes."),
}
backends = pytest.mark.parametrize("backend", BACKENDS)
BUFFER = {"order": "buffer", "buffer_size": 8}
SKIP = "-m dali_tf_input index --verify=decode --on_bad=skip"


def write(folder, changes, *, bad=BAD, skip=(), count=COUNT):
    """Writes and indexes records of which one is bad; `skip` are skipped by the index already."""
    folder.mkdir(exist_ok=True)
    examples = numbered_examples(count * FILES)
    examples[bad] |= changes
    for number in skip:
        examples[number]["image/encoded"] = b""
    for part in range(FILES):
        write_tfrecord(folder / f"train-{part}", examples[part * count : (part + 1) * count])
    if skip:
        checks = dti.Checks(verify="schema")
        dti.build_index(folder / "train-0", checks, on_bad="skip", max_bad_fraction=1)
    dti.build_index(folder / "train-*")
    return dti.Records.from_files(folder / "train-*")


def feed(records, backend, order="global", *, batch_size=4, **changes):
    spec = spec_of(records, order, dti.Preprocess.for_training(8), **changes)
    return dti.load(spec, BACKENDS[backend], batch_size=batch_size)


def feed_evaluation(records, backend):
    spec = spec_of(records, "sequential", dti.Preprocess.for_evaluation(8), repeat=False)
    return dti.load(spec, BACKENDS[backend], batch_size=2)


def make_classifier(**compiled):
    layer = keras.layers.GlobalAveragePooling2D()
    return make_model(8, NUM_CLASSES, layer, run_eagerly=True, **compiled)


def train_on(train, model=None, epochs=1, **arguments):
    return train.fit(model or make_classifier(), epochs=epochs, verbose=0, **arguments)


def stops(message):
    return pytest.raises(dti.BadRecordError, match=message)


def index(*arguments):
    process = succeeds(run("index", "--on_bad=skip", *arguments))
    return process.stdout


@table(
    "backend, order, damage",
    [
        ("dali", "global", "truncated"),
        ("dali", "sequential", "text"),
        ("tf_data", "sequential", "truncated"),
        ("tf_data", "global", "empty"),
    ],
    BACKENDS,
    ("global", "sequential"),
    DAMAGES,
)
def test_the_error_names_the_record(tmp_path, backend, order, damage):
    changes, reason = DAMAGES[damage]
    records = write(tmp_path, changes)
    with pytest.raises(dti.BadRecordError) as caught:
        list(feed(records, backend, order))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/train-1: record 5, byte ")
    assert reason in text
    assert text.endswith(f"Skip bad records: {text.rpartition('records: ')[2]}")
    assert text.endswith(f"{SKIP} '{tmp_path}/train-*'")
    assert isinstance(caught.value, dti.InputError)
    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    assert (caught.value.file, caught.value.bad_record.record) == (f"{tmp_path}/train-1", 5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", at_night(["dali"], BACKENDS))
def test_a_buffer_has_no_plan(tmp_path, backend):
    """Its error has the command that finds the record."""
    records = write(tmp_path, TEXT)
    said = r"The input failed after step \d+ .*To check all records: .*--verify=decode '.*train-\*'"
    with pytest.raises(dti.InputError, match=said) as caught:
        list(feed(records, backend, **BUFFER))
    assert not isinstance(caught.value, dti.BadRecordError)
    command = str(caught.value).rpartition("records: ")[2]
    _, _, _, *arguments = shlex.split(command)
    assert command.startswith(f"{sys.executable} -m dali_tf_input index ")
    assert f"{tmp_path}/train-1: record 5, byte " in run(*arguments).stderr


@pytest.mark.slow
def test_training_resumes_after_the_command_has_fixed_it(tmp_path, caplog):
    """The script's error has a command; after it training goes on, on one record less.

    And on one replica instead of two, by the other backend.
    """
    write(tmp_path, TEXT)
    flags = [f"--resume={tmp_path}/run", "--save_every=1"]
    flags += ["--batch_size=4", "--epochs=2"]
    # On two replicas in a process of its own: a failed step leaves collectives behind.
    files = [f"--files={tmp_path}/train-*", f"--num_classes={NUM_CLASSES}", "--image_size=16"]
    process = run_cold("train.py", *files, *flags, "--replicas=2", "--backend=tf_data")
    fails(process, f"error: {tmp_path}/train-1: record 5, byte ", bad_records=True)
    command = process.stderr.splitlines()[-1].partition("Skip bad records: ")[2]
    _, _, _, *words = shlex.split(command)
    assert run(*words, "--max_bad_fraction=0.1", cwd=tmp_path).returncode == 0
    process = succeeds(run("train.py", *files, *flags, "--backend=dali_cpu"))
    message = "The index skips 1 more record than the saved state: resuming at step "
    assert message in caplog.text  # stderr may be that of an earlier test, which pytest keeps
    assert "Traceback" not in process.stderr
    (tmp_path / "index_manifest.json").unlink()
    dti.build_index(tmp_path / "train-*")  # and back: that is another set of records
    fails(run("train.py", *files, *flags), "`records` was 23, is 24")


@pytest.mark.slow
@table("backend, block", [("tf_data", 7)], BACKENDS, [1, 7])
def test_a_plan_leads_to_the_record(tmp_path, monkeypatch, backend, block):
    """Only the records of a few steps are checked, whatever the epoch."""
    checked = []
    find = failures._RecordCheck.find_problem
    monkeypatch.setattr(
        failures._RecordCheck,
        "find_problem",
        lambda *given: checked.append(given[1]) or find(*given),
    )
    records = write(tmp_path, TEXT, bad=63, count=40)
    for seed, begins_behind in ((0, False), (1, True)):
        train = feed(records, backend, batch_size=2, seed=seed, shuffle_block_size=block)
        order = train.spec.plan(2).positions(0, np.arange(records.num_records)).tolist()
        if begins_behind:  # the record in its epoch, so that it comes in the next one
            step = min(order.index(63) // 2 + 1, train.steps_per_epoch - 1)
            train = dti.load(train.spec, train.options, batch_size=2, start_step=step)
        checked.clear()
        with stops(r"train-1: record 23, byte"):
            for _ in range(3):
                list(train)
        assert checked[-1] == 63
        # Pipelines may fail a few batches ahead.
        assert len(checked) <= 2 * (2 + failures._STEPS_AHEAD)


@pytest.mark.slow
@pytest.mark.parametrize("backend", at_night(["dali"], BACKENDS))
def test_training_evaluation_prediction_and_resuming(tmp_path, backend):
    """Each counts steps of its own; accumulated gradients are less than one a batch."""
    records = write(tmp_path / "records", TRUNCATED)
    valid = feed_evaluation(records, backend)
    model = make_classifier(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=30))
    resumed = str(tmp_path / "run")
    for call in (
        lambda: list(valid),
        lambda: valid.evaluate(model, verbose=0),
        lambda: valid.predict(model, verbose=0),
        lambda: train_on(feed(records, backend, batch_size=2), model, resume=resumed),
        lambda: train_on(feed(records, backend, batch_size=NUM_CLASSES)),  # the first batch
    ):
        with stops("train-1: record 5, byte"):
            call()


def test_numbers_count_what_the_index_skips(tmp_path):
    records = write(tmp_path, TEXT, bad=6, skip=(1, 3, 4))
    assert records.num_records == NUM_CLASSES - 3
    with stops(r"train-0: record 6, byte"):
        list(feed(records, "dali", batch_size=3))


def test_a_file_whose_bytes_rot(tmp_path):
    """Size and time are those of the index: the CRC fails in the middle of training."""
    records = write(tmp_path, {})
    train = feed(records, "dali", "sequential")
    file = records.files[2]
    with open(file.path, "r+b") as stream:
        stream.seek(5000)
        stream.write(b"\xff\0\xff")
    os.utime(file.path, ns=(file.mtime_ns, file.mtime_ns))
    with stops(r"train-2: record \d+, byte [\d,]+: unreadable: "):
        list(train)


DAMAGES_OF_FILES = ("cut between records", "cut in a record", "emptied", "length", "removed")
DAMAGES_OF_FILES += ("one more record in front",)


def damage_file(file, what, offset, size):
    """Damages a file, at a record in its middle."""
    ends = {"cut in a record": offset + size // 2, "cut between records": offset, "emptied": 0}
    if what == "removed":
        file.unlink()
    elif what == "one more record in front":  # all are valid, and none must pass for another
        whole = file.read_bytes()
        write_tfrecord(file, numbered_examples(1))
        file.write_bytes(file.read_bytes() + whole)
    elif what == "length":
        with open(file, "r+b") as stream:
            stream.seek(offset)
            stream.write(b"\xff")
    else:
        os.truncate(file, ends[what])


@table(
    "damage, backend, order",
    [
        ("cut between records", "dali", "global"),
        ("cut between records", "tf_data", "buffer"),
        ("cut in a record", "dali", "buffer"),
        ("emptied", "dali", "global"),
        ("length", "dali", "buffer"),
        ("removed", "dali", "buffer"),
        ("removed", "tf_data", "global"),
        ("one more record in front", "dali", "global"),
        ("one more record in front", "dali", "buffer"),
    ],
    DAMAGES_OF_FILES,
    BACKENDS,
    ["global", "buffer"],
)
def test_a_file_that_changes_after_it_was_described(tmp_path, backend, order, damage):
    """No record is lost without a word."""
    records = write(tmp_path, {})
    train = feed(records, backend, order, buffer_size=8)
    file = tmp_path / "train-1"
    damage_file(file, damage, *records.index(1)[5])
    said = "cannot be read: No such file" if damage == "removed" else "changed since it was indexed"
    for call in (lambda: list(train), lambda: feed(records, backend, order)):
        with pytest.raises(dti.InputError, match=re.escape(f"{file} {said}")):
            call()


@pytest.mark.slow
@table(
    "backend, order",
    [("dali", "global"), ("tf_data", "buffer")],
    BACKENDS,
    ["global", "buffer", "sequential"],
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
        list(train)
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
    train = feed(dataset, "tf_data")  # nothing is read
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
    """Also where its input is in a folder that is named like a backend."""
    records = write(tmp_path / "dali_records", {})
    gather = keras.layers.Lambda(
        lambda images: tf.gather(tf.reshape(images, (-1, 192)), [192], axis=1), (1,)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="192 is not in"):
        train_on(
            feed(records, "dali"), make_model(8, NUM_CLASSES, gather), resume=str(tmp_path / "run")
        )


@pytest.mark.slow
@table("backend, bad", [("dali", "valid")], BACKENDS, ["train", "valid"])
def test_training_and_validation_are_told_apart(tmp_path, backend, bad):
    changes = {bad: TEXT}
    train = feed(write(tmp_path / "train", changes.get("train", {})), backend, batch_size=8)
    valid = feed_evaluation(write(tmp_path / "valid", changes.get("valid", {})), backend)
    folder = f"{tmp_path}/{bad}"
    with stops(rf"^{folder}/train-1: record 5, byte .* --on_bad=skip '{folder}/train-\*'"):
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
        train_on(feed(records, "dali", label=label), make_model(8, 8, run_eagerly=True))
    label = dataclasses.replace(label, offset=1)
    assert train_on(feed(records, "dali", label=label), make_model(8, 8, run_eagerly=True))


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
        for one in numbered_examples(20)
    ]
    examples[7][keys[0]] = b"text"
    dti.build_index(write_tfrecord(file, examples))
    records = dti.Records.from_files(file, image_key=keys[0])
    label = dti.ClassLabel(key=keys[1], offset=offset)
    with pytest.raises(dti.BadRecordError) as caught:
        list(feed(records, "dali", label=label))
    assert str(caught.value).endswith(f"{argument} --on_bad=skip {file}")


@pytest.mark.parametrize("options", at_night([DALI], BACKENDS.values()))
def test_labels_that_are_not_utf8(tmp_path, options):
    """TensorFlow's message would hold the record's bytes, and then not be text."""
    examples = [{**example, "name": b"cat"} for example in numbered_examples(8)]
    examples[5]["name"] = b"\xff\xfe"
    records = write_indexed(tmp_path / "train", examples)
    label = dti.ClassLabel(key="name", vocabulary=("cat", "dog"))
    spec = spec_of(records, "global", dti.Preprocess(image_size=(8, 8)), label=label)
    with pytest.raises(dti.BadRecordError, match=r"record 5, .* of the vocabulary, found b'\\xff"):
        list(dti.load(spec, options, batch_size=4))


@pytest.mark.slow
@pytest.mark.parametrize("options", at_night([TF_DATA], BACKENDS.values()))
def test_values_of_two_types(tmp_path, options):
    """Each record is valid, so no index helps: the error says what does."""
    examples = [{**example, "score": [3]} for example in numbered_examples(8)]
    examples[5]["score"] = [0.5]
    records = write_indexed(tmp_path / "train", examples, dti.Checks(verify="schema"))
    feature = dataclasses.replace(records.features["score"], kinds=("int64_list",))
    records = dataclasses.replace(records, features={**records.features, "score": feature})
    said = "record 5, .*: label type: 'score' must be int64_list.* Write all records with one"
    label = dti.Values(key="score", size=1)
    spec = spec_of(records, "global", dti.Preprocess(image_size=(8, 8)), label=label)
    with pytest.raises(dti.InputError, match=said):
        list(dti.load(spec, options, batch_size=4))
