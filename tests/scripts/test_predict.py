"""The predict command: an exported model, its names, and images that are none."""

import csv

import keras
import pytest
from commands import fails, run
from conftest import jpeg, write_indexed
from models import make_model

import dali_tf_input as dti


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model of three classes, with and without names, and photos, some of which are none."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "set").mkdir()
    (folder / "set" / "labels.txt").write_text("cat\ndog\nowl\n")
    examples = [{"image": jpeg(20, 24, seed=n), "label": n % 3} for n in range(6)]
    records = write_indexed(folder / "set" / "train-0", examples, dti.Checks(verify="schema"))
    train = dti.load(dti.InputSpec.for_training(records, 8), dti.TfDataOptions(), batch_size=3)
    preprocess = dti.Preprocess.for_evaluation(8)
    model = make_model(8, 3)
    dti.export_saved_model(model, preprocess, folder / "unnamed")
    train.fit(model, verbose=0)
    dti.export_saved_model(model, preprocess, folder / "named")
    for number in range(5):
        path = folder / "photos" / "sub" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(20, 24, seed=number))
    (folder / "photos" / "bad.jpg").write_bytes(b"no image")
    return folder, model, preprocess


@pytest.mark.slow
def test_predict(exported):
    """The class and score of each image, as the model in Keras says; bad ones are named."""
    folder, model, preprocess = exported
    paths = [str(folder / "photos/sub" / f"{number}.jpg") for number in range(5)]
    ((_, images),) = dti.iterate_batches(paths, preprocess)
    scores = keras.ops.convert_to_numpy(model(images))
    process = run("predict", "--batch_size=2", folder / "named", folder / "photos")
    assert process.returncode == 1
    first, last = process.stderr.splitlines()
    assert first.startswith(f"{folder}/photos/bad.jpg: text: expected an encoded image")
    assert last == "error: 1 image of 6 cannot be decoded, see above"
    header, *lines = csv.reader(process.stdout.splitlines())
    assert header == ["file", "class", "score"]
    assert [line[0] for line in lines] == paths
    names = ["cat", "dog", "owl"]
    for (_, name, score), row in zip(lines, scores, strict=True):
        assert name == names[row.argmax()]
        assert abs(float(score) - row.max()) < 1e-3
    out = folder / "table.csv"
    process = run("predict", f"--out={out}", folder / "unnamed", *paths[:2])
    assert (process.returncode, process.stdout) == (0, "")
    _, *lines = csv.reader(out.read_text().splitlines())
    assert {name for _, name, _ in lines} <= {"0", "1", "2"}


def test_what_predict_refuses(tmp_path):
    fails(run("predict", tmp_path), "Name the folder of the model, and images")
    process = run("predict", tmp_path, "a.jpg")
    fails(process, "holds no SavedModel: dali_tf_input.export_saved_model")
