"""A record that stops training: the error names it, and its command mends it."""

import subprocess
import sys
import types

import keras
import pytest
import tensorflow as tf
from conftest import SCRIPTS, jpeg, numbered_examples, write_tfrecord
from test_scripts import run

from dali_tf_input import DaliOptions, DatasetSpec, InputError, InputSpec, Preprocess, TfDataOptions, build_index, failures
from dali_tf_input.distribute import distribute
from dali_tf_input.failures import BadRecordError, explain
from dali_tf_input.resume import Resume

BACKENDS = {"dali": DaliOptions(device="cpu"), "tf_data": TfDataOptions()}
COUNT, FILES = 40, 3
BAD = 63  # of all records: number 23 of the second file

DAMAGES = {
    "text": ({"image/encoded": b"404 not found"}, "text: expected an encoded image, found b'404 not found'"),
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
        command = [sys.executable, SCRIPTS / "index_tfrecords.py", "--verify=schema", "--on_bad=skip", folder / "train-0"]
        subprocess.run([*command, "--max_bad_fraction=1"], check=True, capture_output=True)
    build_index(str(folder / "train-*"))
    return DatasetSpec.from_files(str(folder / "train-*"))


def make_model(strategy=None):
    with strategy.scope() if strategy else tf.device(None):
        model = keras.Sequential(
            [keras.layers.Input((8, 8, 3)), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(COUNT * FILES)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
    return model


def spec_of(dataset, order="global", **changes):
    return InputSpec(dataset=dataset, preprocess=Preprocess.for_training(8), order=order, **changes)


def fit(train, model, epochs=2):
    with train.explain_errors(model):
        model.fit(train.dataset, steps_per_epoch=train.steps_per_epoch, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["global", "buffer"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_error_names_the_record(tmp_path, backend, order, damage):
    changes, reason = DAMAGES[damage]
    dataset = write(tmp_path, changes)
    with pytest.raises(BadRecordError) as caught:
        fit(distribute(spec_of(dataset, order, buffer_size=8), BACKENDS[backend], global_batch_size=4), make_model())
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/train-1: record 23, byte ")
    assert reason in text
    assert text.endswith(f"Leave out what is bad: make index DATA='{tmp_path}/train-*' ARGS='--verify=decode --on_bad=skip'")
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    assert (caught.value.file, caught.value.fault.record) == (f"{tmp_path}/train-1", 23)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_command_mends_it(tmp_path, backend):
    """Trained by the script; the command that it prints is run as it stands, by the interpreter of this environment."""
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
    command = last.partition("Leave out what is bad: make index ")[2]
    assert command == f"DATA='{tmp_path}/train-*' ARGS='--verify=decode --on_bad=skip'"
    assert run("index_tfrecords.py", "--verify=decode", "--on_bad=skip", f"{tmp_path}/train-*").returncode == 0
    process = run("train.py", *arguments)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("fragment_size", [1, 7])
def test_a_plan_leads_to_the_record(tmp_path, monkeypatch, backend, num_replicas, fragment_size):
    """Of 120 records those of a few steps are looked at, whatever the epoch: so it is with a million too."""
    looked_at = []
    find_fault = failures._Search._find_fault
    monkeypatch.setattr(failures._Search, "_find_fault", lambda *given: looked_at.append(given[1]) or find_fault(*given))
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(num_replicas)])
    for seed, epoch in ((0, 0), (1, 2)):
        changes = {"image/encoded": b"404 not found"}
        dataset = write(tmp_path / f"{seed}", changes)
        spec = spec_of(dataset, seed=seed, fragment_size=fragment_size)
        train = distribute(spec, BACKENDS[backend], strategy=strategy, global_batch_size=2)
        # Begun behind the record in its epoch, so that it comes in a later one.
        order = failures.shuffle(
            COUNT * FILES, seed=seed, epoch=0, fragment_size=fragment_size, first_of_files=failures.np.array([0, 40, 80])
        )
        place = order.tolist().index(BAD)
        if epoch and place // 2 + 1 < train.steps_per_epoch:
            train.position.step = place // 2 + 1
        looked_at.clear()
        with pytest.raises(BadRecordError, match=r"train-1: record 23, byte"):
            fit(train, make_model(strategy), epochs=3)
        assert looked_at[-1] == BAD
        assert len(looked_at) <= (4 if backend == "tf_data" else 16)  # DALI may fail a few batches ahead


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_resuming_and_the_first_batch(tmp_path, backend):
    dataset = write(tmp_path / "records", DAMAGES["text"][0])
    pattern = r"train-1: record 23, byte [\d,]+: text: .* Leave out what is bad: make index"
    evaluation = InputSpec(dataset=dataset, preprocess=Preprocess.for_evaluation(8), order="sequential", repeat=False)
    validation = distribute(evaluation, BACKENDS[backend], global_batch_size=8)
    with pytest.raises(BadRecordError, match=pattern), validation.explain_errors():
        make_model().evaluate(validation.dataset, verbose=0)
    with pytest.raises(BadRecordError, match=pattern):
        Resume(tmp_path / "run", distribute(spec_of(dataset), BACKENDS[backend], global_batch_size=8)).fit(make_model(), epochs=1)
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
    train = distribute(spec_of(dataset, "buffer", buffer_size=1), TfDataOptions(num_parallel_reads=1), global_batch_size=4)
    with open(dataset.files[2], "r+b") as stream:
        stream.seek(5000)
        stream.write(b"\xff\0\xff")
    with pytest.raises(BadRecordError, match=r"train-2: record \d+, byte [\d,]+: unreadable: "):
        fit(train, make_model())


def test_other_errors_stay_as_they_are(tmp_path, dataset):
    """Of the model, of memory, of Python: nothing is looked for."""
    train = distribute(spec_of(dataset), TfDataOptions(), global_batch_size=4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"), train.explain_errors():
        tf.zeros(3) + tf.zeros(4)
    with pytest.raises(ZeroDivisionError), train.explain_errors():
        raise ZeroDivisionError
    error = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor [[IteratorGetNext]]")
    assert explain(error, train.spec, train.options, step=0, global_batch_size=4) is None


def test_an_input_error_without_a_bad_record(dataset):
    """What is known is said: the records were looked at, and the command that looks deeper."""
    train = distribute(spec_of(dataset), TfDataOptions(), global_batch_size=4)
    error = types.SimpleNamespace(message="[[IteratorGetNext]] is tired\nsecond line")
    found = explain(error, train.spec, train.options, step=0, global_batch_size=4)
    assert not isinstance(found, BadRecordError)
    assert "none of 24 records that were looked at is bad: [[IteratorGetNext]] is tired Check them all: make index" in str(found)
    found = explain(error, train.spec, train.options, step=None, global_batch_size=4, longest_search=0.0)
    assert "none of 0 records" in str(found)


def test_training_says_nothing_of_it_when_nothing_is_wrong(sample_folder):
    process = run("train.py", "--files=data/sample/train-*", "--epochs=1", "--image_size=16", cwd=sample_folder)
    assert (process.returncode, process.stderr) == (0, "")
