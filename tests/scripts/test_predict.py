"""The predict command: an exported model, its names, and images that are none."""

import csv

import keras
import pytest
from commands import fails, run
from conftest import jpeg
from models import make_model

import dali_tf_input as dti

PREPROCESS = dti.Preprocess.for_evaluation(8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of five photos in a folder of their own, and one that is none."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "sub").mkdir()
    for number in range(5):
        (folder / "sub" / f"{number}.jpg").write_bytes(jpeg(20, 24, seed=number))
    (folder / "bad.jpg").write_bytes(b"no image")
    return folder


def check_table(text, model, photos, names):
    """Checks the class and score of each photo: as the model in Keras says."""
    paths = [str(photos / "sub" / f"{number}.jpg") for number in range(5)]
    ((_, images),) = dti.serving.iterate_batches(paths, PREPROCESS)
    scores = keras.ops.convert_to_numpy(model(images))
    header, *lines = csv.reader(text.splitlines())
    assert header == ["file", "class", "score"]
    assert [line[0] for line in lines] == paths
    for (_, name, score), row in zip(lines, scores, strict=True):
        assert name == names[row.argmax()]
        assert abs(float(score) - row.max()) < 1e-3


def test_predict(tmp_path, photos):
    """With numbers, or the names of the classes; what is no image is named."""
    model = make_model(8, 3)
    dti.serving.export_saved_model(model, PREPROCESS, tmp_path / "model")
    process = run("predict", "--batch_size=2", tmp_path / "model", photos)
    assert process.returncode == 1
    first, last = process.stderr.splitlines()
    assert first.startswith(f"{photos}/bad.jpg: text: expected an encoded image")
    assert last == "error: 1 image of 6 cannot be decoded, see above"
    check_table(process.stdout, model, photos, "012")
    # As it is exported with a model that was trained on a set of such names.
    (tmp_path / "model/assets.extra").mkdir()
    (tmp_path / "model/assets.extra/labels.txt").write_text("cat\ndog\nowl\n")
    out = tmp_path / "table.csv"
    process = run("predict", f"--out={out}", tmp_path / "model", photos / "sub")
    assert (process.returncode, process.stdout) == (0, "")
    check_table(out.read_text(), model, photos, ["cat", "dog", "owl"])


def test_what_predict_refuses(tmp_path):
    fails(run("predict", tmp_path), "Name the folder of the model, and images")
    process = run("predict", tmp_path, "a.jpg")
    fails(process, "holds no SavedModel: dali_tf_input.serving.export_saved_model")
