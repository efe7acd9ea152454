"""A record that stops training: the error names it, and its command fixes it."""

import dataclasses
import itertools
import os
import shutil
import subprocess
import tempfile
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from commands import fails, run
from conftest import BACKENDS, DALI, TF_DATA, jpeg, numbered_examples, spec_of, write_tfrecord
from models import fit, make_model

import dali_tf_input as dti
from dali_tf_input.spec.order import shuffle
from dali_tf_input.training.failures import BadRecordError, FailedInput, explain
from dali_tf_input.training.load import load
from dali_tf_input.training.resume import Resume

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


def training(dataset, order="global", **changes):
    return spec_of(dataset, order, dti.Preprocess.for_training(8), **changes)


def feed(dataset, backend, order="global", *, batch_size=4, options=None, **changes):
    spec, options = training(dataset, order, **changes), options or BACKENDS[backend]
    return load(spec, options, batch_size=batch_size)


def feed_evaluation(dataset, backend, *, batch_size=8):
    spec = spec_of(dataset, "sequential", dti.Preprocess.for_evaluation(8), repeat=False)
    return load(spec, BACKENDS[backend], batch_size=batch_size)


def make_classifier():
    pool = keras.layers.GlobalAveragePooling2D()
    return make_model(8, NUM_CLASSES, pool, weighted_metrics=["accuracy"])


def train_on(fed, model=None, epochs=2):
    model = model or make_classifier()
    with fed.explain_errors(model):
        fit(model, fed, epochs)


def stops(message):
    return pytest.raises(BadRecordError, match=message)


def explain_message(dataset, message, order="global", **arguments):
    """Explains an error of DALI's."""
    error = tf.errors.InternalError(None, None, f"DALI_ERROR\n{message}")
    return explain(error, [FailedInput(training(dataset, order), DALI, None, 4)], **arguments)


def index(*arguments):
    process = run("index", "--on_bad=skip", *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(
    ("backend", "order", "damage"),
    [
        *itertools.product(BACKENDS, ("global", "buffer"), ("truncated",)),
        ("dali", "global", "text"),
        ("tf_data", "buffer", "text"),
        ("dali", "buffer", "empty"),
        ("tf_data", "global", "empty"),
    ],
)
def test_the_error_names_the_record(tmp_path, backend, order, damage):
    changes, reason = DAMAGES[damage]
    dataset = write(tmp_path, changes)
    with pytest.raises(BadRecordError) as caught:
        train_on(feed(dataset, backend, order, buffer_size=8))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/train-1: record 23, byte ")
    assert reason in text
    command = "-m dali_tf_input.index --verify=decode --on_bad=skip"
    assert text.endswith(f"{command} '{tmp_path}/train-*'")
    assert isinstance(caught.value, dti.InputError)
    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    assert (caught.value.file, caught.value.bad_record.record) == (f"{tmp_path}/train-1", 23)


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


@backends
@pytest.mark.parametrize("block", [1, 7])
def test_a_plan_leads_to_the_record(tmp_path, monkeypatch, backend, block):
    """Only the records of a few steps are checked, whatever the epoch."""
    checked = []
    check = dti.bad_record._Search._check
    monkeypatch.setattr(
        dti.bad_record._Search, "_check", lambda *given: checked.append(given[1]) or check(*given)
    )
    dataset = write(tmp_path, TEXT)
    files = {"shuffle_block_size": block, "first_of_files": np.array([0, COUNT, 2 * COUNT])}
    for seed, begun_behind in ((0, False), (1, True)):
        fed = feed(dataset, backend, batch_size=2, seed=seed, shuffle_block_size=block)
        order = shuffle(NUM_CLASSES, seed=seed, epoch=0, **files).tolist()
        if begun_behind:  # the record in its epoch, so that it comes in the next one
            fed.start_step.step = min(order.index(BAD) // 2 + 1, fed.steps_per_epoch - 1)
        checked.clear()
        with stops(r"train-1: record 23, byte"):
            train_on(fed, epochs=3)
        assert checked[-1] == BAD
        # DALI may fail a few batches ahead.
        assert len(checked) <= (4 if backend == "tf_data" else 16)


def test_dali_names_file_and_byte(tmp_path, monkeypatch):
    """Where DALI reads there is no plan: its message is enough, and nothing else is checked."""
    dataset = write(tmp_path, TRUNCATED)
    fed = feed(dataset, "dali", "buffer", options=dti.DaliOptions(device="cpu", decode="full"))
    monkeypatch.setattr(
        dti.bad_record._Search, "check_first_bad", lambda *_: pytest.fail("searched")
    )
    with pytest.raises(BadRecordError) as caught:
        train_on(fed)
    file = str(tmp_path / "train-1")
    assert (caught.value.file, caught.value.bad_record.record) == (file, BAD - COUNT)


def test_what_dali_refuses_and_others_do_not(tmp_path):
    """DALI names any byte of it; its number counts what the index skips."""
    dataset = write(tmp_path, {}, skip=(2, 5))
    offset, size = dataset.index(0)[10]
    message = f"Failed to decode sample #3 : {{}} at index {offset + size // 2}\nno"
    found = explain_message(dataset, message.format(dataset.paths[0]))
    assert isinstance(found, BadRecordError)
    bad = found.bad_record
    assert (bad.record, bad.offset, bad.reason) == (12, offset, "damaged image")
    elsewhere = explain_message(dataset, message.format("/another/file"))
    assert not isinstance(elsewhere, BadRecordError)


@pytest.mark.slow
def test_two_replicas(tmp_path):
    """In a process of its own: a failed step leaves collectives behind."""
    write(tmp_path, TEXT)
    flags = ["--backend=tf_data", "--replicas=2", "--batch_size=4"]
    process = train_by_script(tmp_path, *flags)
    fails(process, f"error: {tmp_path}/train-1: record 23, byte ", bad_records=True)


@backends
def test_evaluation_resuming_and_the_first_batch(tmp_path, backend):
    dataset = write(tmp_path / "records", TEXT)
    pattern = r"train-1: record 23, byte [\d,]+: text: .* Skip bad records: .*dali_tf_input.index "
    validation = feed_evaluation(dataset, backend)
    with stops(pattern), validation.explain_errors():
        make_classifier().evaluate(validation.dataset, verbose=0)
    with stops(pattern):
        Resume(tmp_path / "run", feed(dataset, backend)).fit(make_classifier(), epochs=1)
    with stops(pattern):  # `load` itself takes a batch
        feed(dataset, backend, batch_size=NUM_CLASSES)


def test_numbers_count_what_the_index_skips(tmp_path):
    dataset = write(tmp_path, TEXT, bad=30, skip=(3, 4, 17))
    assert dataset.num_records == NUM_CLASSES - 3
    with stops(r"train-0: record 30, byte"):
        train_on(feed(dataset, "tf_data"))


def test_a_file_that_is_damaged_while_it_is_read(tmp_path):
    """The data's CRC fails in the middle of training."""
    dataset = dataclasses.replace(write(tmp_path, {}), states=())
    one_by_one = dti.TfDataOptions(num_parallel_reads=1)
    fed = feed(dataset, "tf_data", "buffer", options=one_by_one, buffer_size=1)
    with open(dataset.paths[2], "r+b") as stream:
        stream.seek(5000)
        stream.write(b"\xff\0\xff")
    with stops(r"train-2: record \d+, byte [\d,]+: unreadable: "):
        train_on(fed)


@pytest.mark.parametrize(
    ("damage", "backend", "order"),
    [
        *itertools.product(["cut between records"], BACKENDS, ["global", "buffer"]),
        *(("cut in a record", *how) for how in (("dali", "buffer"), ("tf_data", "global"))),
        *(("emptied", *how) for how in (("dali", "global"), ("tf_data", "buffer"))),
        *(("length", *how) for how in (("dali", "global"), ("tf_data", "buffer"))),
        *(
            ("removed", *how)
            for how in (("dali", "buffer"), *itertools.product(BACKENDS, ["global"]))
        ),
    ],
)
def test_a_file_that_changes_after_it_was_described(tmp_path, backend, order, damage):
    """No record is lost without a word, and none counts twice in its number: it is that of
    `bad_records.jsonl`. Without `states`, as a file may also change after it was opened.
    """
    dataset = write(tmp_path, {})
    if damage != "removed":  # what is open stays readable
        dataset = dataclasses.replace(dataset, states=())
    fed = feed(dataset, backend, order, buffer_size=8)
    offset, size = dataset.index(1)[23]
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
        train_on(fed)
    text = str(caught.value)
    assert f"-m dali_tf_input.index --verify=decode --on_bad=skip '{tmp_path}/train-*'" in text
    if damage == "removed":
        assert f"{file}" in text
        assert "Restore what is missing" in text
        return
    assert isinstance(caught.value, BadRecordError)
    assert caught.value.file == str(file)
    if damage in ("cut in a record", "length"):  # else all that is missing comes after the others
        listed = []
        dti.build_index(
            tmp_path / "train-*",
            on_bad="skip",
            max_bad_fraction=1,
            on_bad_record=lambda file, bad: listed.append(bad.record),
        )
        assert listed == [23]
        found = caught.value.bad_record
        assert found.record >= 23
        if found.offset == offset:
            assert found.record == 23


@backends
@pytest.mark.parametrize("order", ["global", "buffer"])
def test_another_file_in_its_place(tmp_path, backend, order):
    """A valid file with one more record in front: none of its records is served as another."""
    dataset = write(tmp_path, {})
    fed = feed(dataset, backend, order, buffer_size=8)
    file, (first, *_) = tmp_path / "train-1", numbered_examples(1)
    whole = file.read_bytes()
    write_tfrecord(tmp_path / "other", [first])
    (tmp_path / "other").write_bytes((tmp_path / "other").read_bytes() + whole)
    os.replace(tmp_path / "other", file)
    changed = rf"train-1 changed since it was indexed \(then {len(whole):,} bytes, now "
    with pytest.raises(dti.InputError, match=changed) as caught:
        train_on(fed)
    assert "-m dali_tf_input.index --verify=decode" in str(caught.value)
    with pytest.raises(dti.InputError, match=changed):
        feed(dataset, backend, order)


@backends
@pytest.mark.parametrize(
    "order", ["global", "buffer", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_an_index_that_goes_or_is_replaced(tmp_path, backend, order):
    """What `load` checked is out of reach: each iterator serves every record once."""
    dataset = write(tmp_path, {})
    fed = feed(dataset, backend, order, **({"buffer_size": 8} if order == "buffer" else {}))
    cut, replaced, removed = (Path(file.index_file) for file in dataset.files)
    os.truncate(cut, 20)
    replaced.write_bytes(removed.read_bytes())
    removed.unlink()
    for _ in range(2):
        labels = [batch[1].numpy() for batch in itertools.islice(fed.dataset, NUM_CLASSES // 4)]
        assert sorted(np.concatenate(labels)) == list(range(NUM_CLASSES))
    with pytest.raises(
        dti.InputError, match=r"train-0\.idx changed since `Records.from_files` read"
    ):
        feed(dataset, "tf_data")


def test_index_copies_that_go_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    dataset = write(tmp_path / "records", {})
    for _ in range(2):
        assert len(list(feed(dataset, "dali", "buffer", buffer_size=8).dataset)) == NUM_CLASSES // 4
        shutil.rmtree(tmp_path / "temporary" / f"dali_tf_input-{os.getuid()}")


@backends
def test_steps_of_its_own(tmp_path, backend):
    """Evaluation and prediction count from 0, accumulated gradients less than one a batch."""
    dataset = write(tmp_path, TRUNCATED if backend == "dali" else TEXT)
    fed = feed(dataset, backend, batch_size=2)
    validation = feed_evaluation(dataset, backend, batch_size=2)
    model = make_classifier()
    for use in (model.evaluate, model.predict):
        with stops("train-1: record 23, byte"), validation.explain_errors(model):
            use(validation.dataset, verbose=0)
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=30)
    model.compile(accumulating, model.loss)
    with stops("train-1: record 23, byte"):
        train_on(fed, model)


def test_from_another_folder(tmp_path, monkeypatch):
    """Files that were named from a folder that the program left since."""
    write(tmp_path, TEXT)
    monkeypatch.chdir(tmp_path)
    fed = feed(dti.Records.from_files("train-*"), "dali", "buffer", buffer_size=8)
    monkeypatch.chdir("/")
    with pytest.raises(BadRecordError) as caught:
        train_on(fed)
    assert caught.value.file == str(tmp_path / "train-1")
    assert f"--on_bad=skip '{tmp_path}/train-*'" in str(caught.value)


@pytest.mark.slow
def test_the_command_checks_as_before(tmp_path):
    """What an index skipped stays skipped; what was decoded before is decoded again."""
    write(tmp_path, {"image/class/label": 9999})
    pattern = str(tmp_path / "train-*")
    both = "--num_classes=300 --decoder=tf_data --max_pixels=1000000"
    for flags, options, expected in (
        ("--verify=schema --num_classes=300", DALI, "--num_classes=300"),
        (f"--verify=decode {both}", TF_DATA, f"{both} --force"),
        # tf.data's decoder was content: both are asked now.
        ("--verify=decode --decoder=tf_data", DALI, "--force"),
    ):
        index("--max_bad_fraction=1", *flags.split(), pattern)
        spec = spec_of(dti.Records.from_files(pattern), "global", dti.Preprocess())
        command = dti.bad_record.skip_command(spec, options)
        head = "dali_tf_input.index --verify=decode --on_bad=skip"
        assert command.partition(" -m ")[2] == f"{head} {expected} {pattern!r}"


@pytest.mark.parametrize(
    "text",
    [
        "Critical error in pipeline:\nFailed to decode sample #3 : {} at index {}\nCurrent",
        "Error while parsing TFRecord file: {} at index {} (some reason)\n",
    ],
)
def test_what_dali_says(tmp_path, text):
    dataset = write(tmp_path, TEXT)
    offset, _ = dataset.index(1)[23]
    message = text.format(dataset.paths[1], offset)
    found = explain_message(dataset, message, "buffer", search_seconds=0)
    assert isinstance(found, BadRecordError)
    assert found.bad_record.record == 23


def test_other_errors_stay_as_they_are(dataset):
    """Of the model, of memory, of Python: nothing is searched."""
    fed = feed(dataset, "tf_data")
    shapes = pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes")
    with shapes, fed.explain_errors():
        tf.zeros(3) + tf.zeros(4)
    with pytest.raises(ZeroDivisionError), fed.explain_errors():
        raise ZeroDivisionError
    message = "OOM when allocating tensor [[IteratorGetNext]]"
    error = tf.errors.ResourceExhaustedError(None, None, message)
    assert explain(error, [FailedInput(fed.spec, fed.options, 0, 4)]) is None


def test_an_error_of_the_model_stays_as_it_is(tmp_path):
    """Though its text holds a stack with paths of this package, and a batch."""
    dataset = write(tmp_path / "dali_records", {})
    gather = keras.layers.Lambda(
        lambda images: tf.gather(tf.reshape(images, (-1, 192)), [192], axis=1), (1,)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="192 is not in"):
        Resume(tmp_path / "run", feed(dataset, "dali")).fit(make_model(8, 120, gather), epochs=1)


@pytest.mark.parametrize(
    ("backend", "resumed", "bad"),
    [
        ("tf_data", False, "train"),
        ("tf_data", False, "validation"),
        ("tf_data", True, "validation"),
        ("dali", True, "train"),
        ("dali", False, "validation"),
    ],
)
def test_training_and_validation_are_told_apart(tmp_path, backend, resumed, bad):
    changes = {bad: TEXT}
    fed = feed(write(tmp_path / "train", changes.get("train", {})), backend, batch_size=8)
    validation = write(tmp_path / "validation", changes.get("validation", {}))
    validation = feed_evaluation(validation, backend)
    model = make_classifier()
    folder = f"{tmp_path}/{bad}"
    with stops(rf"^{folder}/train-1: record 23, byte .* --on_bad=skip '{folder}/train-\*'"):
        if resumed:
            Resume(tmp_path / "run", fed).fit(model, epochs=1, validation=validation)
        with fed.explain_errors(model, validation):
            fit(model, fed, validation_data=validation.dataset)


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
    message = "The index skips 1 more records than the saved state: resuming at step "
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    dti.build_index(tmp_path / "train-*", force=True)  # and back: that is another set of records
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
    label = dti.ClassLabel(key=keys[1], offset=offset)
    records = dti.Records.from_files(file, image_key=keys[0])
    with pytest.raises(BadRecordError) as caught:
        train_on(feed(records, "tf_data", label=label))
    assert str(caught.value).endswith(f"--on_bad=skip {argument} {file}")
    output = index("--verify=decode", "--decoder=dali", *argument.split(), file)
    assert "1 record (1.00%), listed in bad_records.jsonl" in output


def test_an_input_error_without_a_bad_record(dataset):
    """What is known is said: the records were checked, and the command that checks more deeply."""
    fed = feed(dataset, "tf_data")
    head = "Graph execution error:\n\nDetected at node DecodeJpeg defined at:\n"
    message = f'{head}  File "x.py", line 1, in f\n\nis tired\n\t [[{{{{node A}}}}]]'
    error = types.SimpleNamespace(message=message)
    for step in (0, None):
        found = explain(error, [FailedInput(fed.spec, fed.options, step, 4)])
        assert not isinstance(found, BadRecordError)
        expected = "The input failed (is tired), and none of the 24 records that were checked"
        assert expected in str(found)
    found = explain(error, [FailedInput(fed.spec, fed.options, None, 4)], search_seconds=0.0)
    assert "none of the 0 records" in str(found)
