"""A record that stops training: the error names it, and its command mends it."""

import itertools
import json
import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from commands import fails, run
from conftest import SCRIPTS, jpeg, numbered_examples, write_tfrecord

from dali_tf_input import (
    DaliOptions,
    DatasetSpec,
    InputError,
    InputSpec,
    Preprocess,
    TfDataOptions,
    bad_record,
    build_index,
)
from dali_tf_input.bad_record import BadRecordError, FailedInput, explain
from dali_tf_input.distribution import distribute
from dali_tf_input.order import read_index
from dali_tf_input.resume import Resume

BACKENDS = {"dali": DaliOptions(device="cpu"), "tf_data": TfDataOptions()}
COUNT, FILES = 40, 3
BAD = 63  # of all records: number 23 of the second file

DAMAGES = {
    "text": (
        {"image/encoded": b"404 not found"},
        "text: expected an encoded image, found b'404 not found'",
    ),
    "truncated": ({"image/encoded": jpeg(300, 400)[:4000]}, "truncated JPEG: "),
    "empty": ({"image/encoded": b""}, "empty image: `image_key` 'image/encoded' holds 0 bytes."),
}


def write(folder, changes, *, bad=BAD, skip=()):
    """Writes and indexes records of which one is bad; `skip` are left out by the index already."""
    folder.mkdir(exist_ok=True)
    examples = numbered_examples(COUNT * FILES)
    examples[bad] |= changes
    for number in skip:
        examples[number]["image/encoded"] = b""
    for part in range(FILES):
        write_tfrecord(folder / f"train-{part}", examples[part * COUNT : (part + 1) * COUNT])
    if skip:
        command = [
            sys.executable,
            SCRIPTS / "index_tfrecords.py",
            "--verify=schema",
            "--on_bad=skip",
            folder / "train-0",
        ]
        subprocess.run([*command, "--max_bad_fraction=1"], check=True, capture_output=True)
    build_index(str(folder / "train-*"))
    return DatasetSpec.from_files(str(folder / "train-*"))


def make_model(strategy=None):
    with strategy.scope() if strategy else tf.device(None):
        model = keras.Sequential(
            [
                keras.layers.Input((8, 8, 3)),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(COUNT * FILES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
    return model


def spec_of(dataset, order="global", **changes):
    return InputSpec(dataset=dataset, preprocess=Preprocess.for_training(8), order=order, **changes)


def fit(train, model, epochs=2):
    with train.explain_errors(model):
        model.fit(
            train.dataset,
            steps_per_epoch=train.steps_per_epoch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
        )


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
        fit(
            distribute(
                spec_of(dataset, order, buffer_size=8), BACKENDS[backend], global_batch_size=4
            ),
            make_model(),
        )
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/train-1: record 23, byte ")
    assert reason in text
    assert text.endswith(
        f"-m dali_tf_input.index --verify=decode --on_bad=skip '{tmp_path}/train-*'"
    )
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    assert (caught.value.file, caught.value.bad_record.record) == (f"{tmp_path}/train-1", 23)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dali"])
def test_the_command_mends_it(tmp_path, backend):
    """Trained by the script; the command that it prints is run as it stands, by the interpreter of
    this environment.
    """
    write(tmp_path, DAMAGES["text"][0])
    arguments = [
        f"--files={tmp_path}/train-*",
        f"--backend={backend.replace('dali', 'dali_cpu')}",
        "--epochs=1",
        "--image_size=16",
    ]
    arguments.append(f"--num_classes={COUNT * FILES}")
    process = run("train.py", *arguments)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    last = process.stderr.splitlines()[-1]
    assert last.startswith(f"error: {tmp_path}/train-1: record 23, byte ")
    command = last.partition("Skip bad records: ")[2]
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, cwd=tmp_path)
    process = run("train.py", *arguments)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_block_size", [1, 7])
def test_a_plan_leads_to_the_record(tmp_path, monkeypatch, backend, shuffle_block_size):
    """Of 120 records those of a few steps are looked at, whatever the epoch: so it is with a
    million too.
    """
    checked = []
    check = bad_record._Search._check
    monkeypatch.setattr(
        bad_record._Search, "_check", lambda *given: checked.append(given[1]) or check(*given)
    )
    first_of_files = np.array([0, COUNT, 2 * COUNT])
    for seed, begun_behind in ((0, False), (1, True)):
        dataset = write(tmp_path / f"{seed}", DAMAGES["text"][0])
        train = distribute(
            spec_of(dataset, seed=seed, shuffle_block_size=shuffle_block_size),
            BACKENDS[backend],
            global_batch_size=2,
        )
        order = bad_record.shuffle(
            COUNT * FILES,
            seed=seed,
            epoch=0,
            shuffle_block_size=shuffle_block_size,
            first_of_files=first_of_files,
        )
        if begun_behind:  # the record in its epoch, so that it comes in the next one
            train.start_step.step = min(
                order.tolist().index(BAD) // 2 + 1, train.steps_per_epoch - 1
            )
        checked.clear()
        with pytest.raises(BadRecordError, match=r"train-1: record 23, byte"):
            fit(train, make_model(), epochs=3)
        assert checked[-1] == BAD
        assert len(checked) <= (
            4 if backend == "tf_data" else 16
        )  # DALI may fail a few batches ahead


def test_dali_names_file_and_byte(tmp_path, monkeypatch):
    """Where DALI reads there is no plan: its message is enough, and nothing else is looked at."""
    dataset = write(tmp_path, DAMAGES["truncated"][0])
    train = distribute(
        spec_of(dataset, "buffer"), DaliOptions(device="cpu", decode="full"), global_batch_size=4
    )
    monkeypatch.setattr(bad_record._Search, "check_first_bad", lambda *_: pytest.fail("searched"))
    with pytest.raises(BadRecordError) as caught:
        fit(train, make_model())
    assert (caught.value.file, caught.value.bad_record.record) == (
        str(tmp_path / "train-1"),
        BAD - COUNT,
    )


def test_what_dali_refuses_and_others_do_not(tmp_path):
    """A byte anywhere in a sound record: DALI is believed, and the number counts what the index
    leaves out.
    """
    dataset = write(tmp_path, {}, skip=(2, 5))
    place = read_index(dataset.index_files[0])[10]
    message = (
        f"DALI_ERROR\nFailed to decode sample #3 : {dataset.files[0]} at index"
        f" {place[0] + place[1] // 2}\nno"
    )
    found = explain(
        tf.errors.InternalError(None, None, message),
        [FailedInput(spec_of(dataset), BACKENDS["dali"], None, 4)],
    )
    assert isinstance(found, BadRecordError)
    assert (found.bad_record.record, found.bad_record.offset, found.bad_record.reason) == (
        12,
        place[0],
        "damaged image",
    )
    elsewhere = message.replace(dataset.files[0], "/another/file")
    found = explain(
        tf.errors.InternalError(None, None, elsewhere),
        [FailedInput(spec_of(dataset), BACKENDS["dali"], None, 4)],
    )
    assert not isinstance(found, BadRecordError)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tf_data"])
def test_two_replicas(tmp_path, backend):
    """In a process of its own: what failed in the middle of a step leaves TensorFlow's collectives
    behind for good.
    """
    write(tmp_path, DAMAGES["text"][0])
    arguments = [
        f"--files={tmp_path}/train-*",
        f"--backend={backend}",
        "--replicas=2",
        "--global_batch_size=4",
        "--image_size=16",
    ]
    process = run("train.py", *arguments, f"--num_classes={COUNT * FILES}")
    fails(process, f"error: {tmp_path}/train-1: record 23, byte ", bad_records=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_resuming_and_the_first_batch(tmp_path, backend):
    dataset = write(tmp_path / "records", DAMAGES["text"][0])
    pattern = r"train-1: record 23, byte [\d,]+: text: .* Skip bad records: .*dali_tf_input.index "
    evaluation = InputSpec(
        dataset=dataset, preprocess=Preprocess.for_evaluation(8), order="sequential", repeat=False
    )
    validation = distribute(evaluation, BACKENDS[backend], global_batch_size=8)
    with pytest.raises(BadRecordError, match=pattern), validation.explain_errors():
        make_model().evaluate(validation.dataset, verbose=0)
    with pytest.raises(BadRecordError, match=pattern):
        Resume(
            tmp_path / "run", distribute(spec_of(dataset), BACKENDS[backend], global_batch_size=8)
        ).fit(make_model(), epochs=1)
    with pytest.raises(BadRecordError, match=pattern):  # `distribute` itself takes a batch
        distribute(spec_of(dataset), BACKENDS[backend], global_batch_size=COUNT * FILES)


def test_numbers_count_what_the_index_leaves_out(tmp_path):
    dataset = write(tmp_path, DAMAGES["text"][0], bad=30, skip=(3, 4, 17))
    assert dataset.num_records == COUNT * FILES - 3
    with pytest.raises(BadRecordError, match=r"train-0: record 30, byte"):
        fit(distribute(spec_of(dataset), TfDataOptions(), global_batch_size=4), make_model())


def test_a_file_that_is_damaged_while_it_is_read(tmp_path):
    """The data's CRC fails in the middle of training."""
    dataset = write(tmp_path, {})
    train = distribute(
        spec_of(dataset, "buffer", buffer_size=1),
        TfDataOptions(num_parallel_reads=1),
        global_batch_size=4,
    )
    with open(dataset.files[2], "r+b") as stream:
        stream.seek(5000)
        stream.write(b"\xff\0\xff")
    with pytest.raises(BadRecordError, match=r"train-2: record \d+, byte [\d,]+: unreadable: "):
        fit(train, make_model())


@pytest.mark.parametrize(
    ("damage", "backend", "order"),
    [
        *itertools.product(["cut between records"], BACKENDS, ["global", "buffer"]),
        *(("cut in a record", *how) for how in (("dali", "buffer"), ("tf_data", "global"))),
        *(("emptied", *how) for how in (("dali", "global"), ("tf_data", "buffer"))),
        *(("length", *how) for how in (("dali", "global"), ("tf_data", "buffer"))),
        *(("removed", *how) for how in (("dali", "buffer"), ("tf_data", "global"))),
    ],
)
def test_a_file_that_changes_after_it_was_described(tmp_path, backend, order, damage):
    """No record is lost without a word, and none counts twice in its number: it is that of
    `bad_records.jsonl`.
    """
    dataset = write(tmp_path, {})
    train = distribute(
        spec_of(dataset, order, buffer_size=8), BACKENDS[backend], global_batch_size=4
    )
    offset, size = read_index(dataset.index_files[1])[23]
    file = tmp_path / "train-1"
    if damage == "removed":
        file.unlink()
    elif damage == "length":
        with open(file, "r+b") as stream:
            stream.seek(offset)
            stream.write(b"\xff")
    else:
        os.truncate(
            file,
            {"cut in a record": offset + size // 2, "cut between records": offset, "emptied": 0}[
                damage
            ],
        )
    with pytest.raises(InputError) as caught:
        fit(train, make_model())
    text = str(caught.value)
    assert f"-m dali_tf_input.index --verify=decode --on_bad=skip '{tmp_path}/train-*'" in text
    if damage == "removed":
        assert f"{file}" in text
        assert "Restore what is missing" in text
        return
    assert isinstance(caught.value, BadRecordError)
    assert caught.value.file == str(file)
    if damage in (
        "cut in a record",
        "length",
    ):  # else the records that are missing are behind all there are
        process = run(
            "index_tfrecords.py",
            "--verify=decode",
            "--on_bad=skip",
            "--max_bad_fraction=1",
            f"{tmp_path}/train-*",
        )
        assert process.returncode == 0, process.stderr
        listed = [
            json.loads(line)["record"]
            for line in (tmp_path / "bad_records.jsonl").read_text().splitlines()
        ]
        assert listed == [23]
        assert caught.value.bad_record.record >= 23
        if caught.value.bad_record.offset == offset:
            assert caught.value.bad_record.record == 23


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_its_own(tmp_path, backend):
    """An evaluation, a prediction and a second `fit` count from 0, and accumulated gradients count
    less than one a batch.
    """
    dataset = write(tmp_path, DAMAGES["truncated" if backend == "dali" else "text"][0])
    train = distribute(spec_of(dataset), BACKENDS[backend], global_batch_size=2)
    evaluation = InputSpec(
        dataset=dataset, preprocess=Preprocess.for_evaluation(8), order="sequential", repeat=False
    )
    validation = distribute(evaluation, BACKENDS[backend], global_batch_size=2)
    model = make_model()
    for look in (model.evaluate, model.predict):
        with (
            pytest.raises(BadRecordError, match="train-1: record 23, byte"),
            validation.explain_errors(model),
        ):
            look(validation.dataset, verbose=0)
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=30)
    model.compile(accumulating, model.loss)
    with pytest.raises(BadRecordError, match="train-1: record 23, byte"):
        fit(train, model)


def test_from_another_folder(tmp_path, monkeypatch):
    """Files that were named from a folder that the program left since."""
    write(tmp_path, DAMAGES["text"][0])
    monkeypatch.chdir(tmp_path)
    dataset = DatasetSpec.from_files("train-*")
    train = distribute(
        spec_of(dataset, "buffer", buffer_size=8), BACKENDS["dali"], global_batch_size=4
    )
    monkeypatch.chdir("/")
    with pytest.raises(BadRecordError) as caught:
        fit(train, make_model())
    assert caught.value.file == str(tmp_path / "train-1")
    assert f"--on_bad=skip '{tmp_path}/train-*'" in str(caught.value)


@pytest.mark.slow
def test_the_command_checks_as_before(tmp_path):
    """What an index left out by checks of its own stays out; what was decoded before is decoded
    again.
    """
    dataset = write(tmp_path, {"image/class/label": 9999})
    pattern = str(tmp_path / "train-*")
    for argument, options, expected in (
        ("--verify=schema --num_classes=300", BACKENDS["dali"], "--num_classes=300"),
        (
            "--verify=decode --num_classes=300 --decoder=tf_data --max_pixels=1000000",
            BACKENDS["tf_data"],
            "--num_classes=300 --decoder=tf_data --max_pixels=1000000 --force",
        ),
        (
            "--verify=decode --decoder=tf_data",
            BACKENDS["dali"],
            "--force",
        ),  # tf.data's was content: both are asked now
    ):
        process = run(
            "index_tfrecords.py",
            *argument.split(),
            "--on_bad=skip",
            "--max_bad_fraction=1",
            pattern,
        )
        assert process.returncode == 0, process.stderr
        dataset = DatasetSpec.from_files(pattern)
        command = bad_record._skip_command(dataset, options).partition(" -m ")[2]
        assert (
            command == f"dali_tf_input.index --verify=decode --on_bad=skip {expected} {pattern!r}"
        )


@pytest.mark.parametrize(
    "text",
    [
        (
            "Critical error in pipeline:\nFailed to decode sample #3 : {file} at index"
            " {offset}\nCurrent pipeline object"
        ),
        "Error while parsing TFRecord file: {file} at index {offset} (some reason)\n",
    ],
)
def test_what_dali_says(tmp_path, text):
    dataset = write(tmp_path, DAMAGES["text"][0])
    offset, _ = read_index(dataset.index_files[1])[23]
    error = tf.errors.InternalError(
        None, None, "DALI_ERROR\n" + text.format(file=dataset.files[1], offset=offset)
    )
    found = explain(
        error,
        [FailedInput(spec_of(dataset, "buffer"), BACKENDS["dali"], None, 4)],
        search_seconds=0,
    )
    assert isinstance(found, BadRecordError)
    assert found.bad_record.record == 23


def test_other_errors_stay_as_they_are(tmp_path, dataset):
    """Of the model, of memory, of Python: nothing is looked for."""
    train = distribute(spec_of(dataset), TfDataOptions(), global_batch_size=4)
    with (
        pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"),
        train.explain_errors(),
    ):
        tf.zeros(3) + tf.zeros(4)
    with pytest.raises(ZeroDivisionError), train.explain_errors():
        raise ZeroDivisionError
    error = tf.errors.ResourceExhaustedError(
        None, None, "OOM when allocating tensor [[IteratorGetNext]]"
    )
    assert explain(error, [FailedInput(train.spec, train.options, 0, 4)]) is None


def test_an_error_of_the_model_stays_as_it_is(tmp_path):
    """Though its text holds Python's stack, in which there are paths of this package, and a batch
    from the input.
    """
    dataset = write(tmp_path / "dali_records", {})
    model = keras.Sequential(
        [keras.layers.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    train = distribute(spec_of(dataset), DaliOptions(device="cpu"), global_batch_size=8)
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value"):
        Resume(tmp_path / "run", train).fit(model, epochs=1)


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
    changes = DAMAGES["text"][0]
    train = distribute(
        spec_of(write(tmp_path / "train", changes if bad == "train" else {})),
        BACKENDS[backend],
        global_batch_size=8,
    )
    evaluation = InputSpec(
        dataset=write(tmp_path / "validation", changes if bad == "validation" else {}),
        preprocess=Preprocess.for_evaluation(8),
        order="sequential",
        repeat=False,
    )
    validation = distribute(evaluation, BACKENDS[backend], global_batch_size=8)
    model = make_model()
    pattern = (
        rf"^{tmp_path}/{bad}/train-1: record 23, byte .* --on_bad=skip '{tmp_path}/{bad}/train-\*'"
    )
    with pytest.raises(BadRecordError, match=pattern):
        if resumed:
            Resume(tmp_path / "run", train).fit(model, epochs=1, validation=validation)
        with train.explain_errors(model, validation):
            model.fit(
                train.dataset,
                steps_per_epoch=train.steps_per_epoch,
                validation_data=validation.dataset,
                epochs=1,
                shuffle=False,
                verbose=0,
            )


@pytest.mark.slow
def test_training_goes_on_after_the_record_is_left_out(tmp_path):
    """With --resume: the state is that of the same files with one record more, and is gone on with
    at the same place.
    """
    write(tmp_path, DAMAGES["text"][0])
    arguments = [
        f"--files={tmp_path}/train-*",
        "--epochs=3",
        "--image_size=16",
        f"--num_classes={COUNT * FILES}",
    ]
    arguments += [
        "--global_batch_size=8",
        f"--resume={tmp_path}/run",
        "--save_every=1",
        "--backend=tf_data",
    ]
    process = run("train.py", *arguments)
    assert process.returncode == 1
    assert "record 23, byte " in process.stderr
    assert (
        run(
            "index_tfrecords.py", "--verify=decode", "--on_bad=skip", f"{tmp_path}/train-*"
        ).returncode
        == 0
    )
    process = run("train.py", *arguments)
    assert process.returncode == 0, process.stderr
    assert (
        "The index skips 1 more records than the saved state: resuming at step " in process.stderr
    )
    assert "Traceback" not in process.stderr
    build_index(str(tmp_path / "train-*"), force=True)  # and back: that is another set of records
    fails(run("train.py", *arguments), "`records` was 119, is 120")


@pytest.mark.parametrize(
    ("keys", "offset", "argument"),
    [
        (("jpg", "cls"), 0, "--image_key=jpg --label_key=cls"),
        (("image/encoded", "image/class/label"), -1, "--label_offset=-1"),
    ],
)
def test_the_command_has_what_the_spec_was_made_with(tmp_path, keys, offset, argument):
    examples = [
        {keys[0]: one["image/encoded"], keys[1]: one["image/class/label"] + offset}
        for one in numbered_examples(100)
    ]
    examples[7][keys[0]] = b"text"
    write_tfrecord(tmp_path / "train", examples)
    build_index(str(tmp_path / "train"))
    dataset = DatasetSpec.from_files(
        str(tmp_path / "train"), image_key=keys[0], label_key=keys[1], label_offset=offset
    )
    with pytest.raises(BadRecordError) as caught:
        fit(distribute(spec_of(dataset), TfDataOptions(), global_batch_size=4), make_model())
    assert str(caught.value).endswith(f"--on_bad=skip {argument} {tmp_path}/train")
    process = run(
        "index_tfrecords.py",
        "--verify=decode",
        "--on_bad=skip",
        *argument.split(),
        tmp_path / "train",
    )
    assert process.returncode == 0, process.stderr
    assert "1 record (1.00%), listed in bad_records.jsonl" in process.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_vanishes(tmp_path, backend):
    """The error names a file that is gone and what to do; no traceback of the search hides it."""
    dataset = write(tmp_path, DAMAGES["text"][0])
    train = distribute(spec_of(dataset), BACKENDS[backend], global_batch_size=4)
    for file in dataset.files[1:]:
        (tmp_path / file).unlink()
    with pytest.raises(InputError, match=r"train-[12]: .*|train-[12] cannot be read") as caught:
        fit(train, make_model())
    assert "Restore what is missing" in str(caught.value) or "Skip bad records" in str(caught.value)


def test_an_input_error_without_a_bad_record(dataset):
    """What is known is said: the records were looked at, and the command that looks deeper."""
    train = distribute(spec_of(dataset), TfDataOptions(), global_batch_size=4)
    head = (
        'Graph execution error:\n\nDetected at node DecodeJpeg defined at:\n  File "x.py", line 1,'
        " in f"
    )
    error = types.SimpleNamespace(message=f"{head}\n\nis tired\n\t [[{{{{node A}}}}]]")
    for step, checked in ((0, 24), (None, 24)):
        found = explain(error, [FailedInput(train.spec, train.options, step, 4)])
        assert not isinstance(found, BadRecordError)
        expected = (
            f"The input failed (is tired), and none of the {checked} records that were checked"
        )
        assert expected in str(found)
    found = explain(error, [FailedInput(train.spec, train.options, None, 4)], search_seconds=0.0)
    assert "none of the 0 records" in str(found)


@pytest.mark.slow
def test_training_says_nothing_of_it_when_nothing_is_wrong(sample_folder):
    process = run(
        "train.py",
        "--files=data/sample/train-*",
        "--epochs=1",
        "--image_size=16",
        cwd=sample_folder,
    )
    assert (process.returncode, process.stderr) == (0, "")
