"""Predicts the class of images, or of records, with a Keras model trained on this package's input.

MODEL is a file that Keras saved (train.py --save=MODEL), whose outputs are logits. Images are
preprocessed as in evaluation, at the size of the model's input. Images that cannot be read are
named, the others are still predicted, and the exit code is 1. For TFRecords (--files) it
shows how many predictions are right, and the mistakes that the model was surest of.

usage: predict.py [flags] MODEL IMAGE...
       predict.py --files=GLOB [--csv=FILE] [--sheet=FILE] [flags] MODEL

example: python scripts/predict.py --labels=records/labels.txt model.keras photo.jpg another.jpg
"""

import csv
import sys
from typing import Any

import dali_tf_input as dti
from dali_tf_input import InputError, Preprocess
from dali_tf_input.cli import command, pictures
from dali_tf_input.cli.flags import BACKENDS, FileFlags
from dali_tf_input.cli.label_names import find_names, read_names

FLAGS = command.Flags()
_LABELS = FLAGS.string("labels", None, "File with the name of label i in line i + 1.")
_TOP = FLAGS.integer("top", 5, "How many classes are shown for each image.", 1)
_BACKEND = FLAGS.choice("backend", "tf_data", list(BACKENDS), "What feeds the model.")
_BATCH_SIZE = FLAGS.integer("batch_size", 32, "Images in a batch.", 1)
_FILES = FileFlags(FLAGS)
_CSV = FLAGS.string("csv", None, "Of records, a file for id, file, label, prediction, probability.")
_SHEET = FLAGS.string("sheet", None, "Of records, a .png for pictures of the worst mistakes.")

_MISTAKES = 12  # that are shown


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 and not (arguments and _FILES.files.value):
        raise InputError("Name the model and at least one image: predict.py MODEL IMAGE...")
    path, *images = arguments
    if images and _FILES.files.value:
        raise InputError(f"Name images or records (--files), got both: {images[0]}.")
    command.check_writable(_CSV, suffix=".csv")
    command.check_writable(_SHEET, suffix=".png")
    dataset = None if images else _FILES.dataset()
    names = read_names(_LABELS.value) if _LABELS.value else None
    if dataset and not names:
        names = find_names(dataset.paths[0]) or None
    tf = command.import_tensorflow()
    from dali_tf_input.backends.build import enable_memory_growth

    enable_memory_growth()
    model, preprocess = load_model(path)
    if names and len(names) < model.output_shape[-1]:
        raise InputError(
            f"`labels` {_LABELS.value} names {len(names):,} labels, and {path} has "
            f"{model.output_shape[-1]:,} classes."
        )
    if dataset:
        return predict_records(dataset, model, preprocess, names or [])
    failed = 0

    def report(position: int, reason: str) -> None:
        nonlocal failed
        failed += 1
        print(f"error: {images[position]}: {reason}", file=sys.stderr)

    rows = []
    batches = dti.iterate_batches(
        images, preprocess, BACKENDS[_BACKEND.value], batch_size=_BATCH_SIZE.value, on_bad=report
    )
    for positions, batch in batches:
        probabilities = tf.nn.softmax(model(batch, training=False)).numpy()
        for position, row in zip(positions, probabilities, strict=True):
            best = row.argsort()[::-1][: _TOP.value]
            shown = (f"{names[label] if names else label} {row[label]:.1%}" for label in best)
            rows.append((images[position], ", ".join(shown)))
    if rows:
        command.print_table(("image", "classes"), rows)
    return 1 if failed else 0


def predict_records(
    dataset: dti.Records, model: Any, preprocess: Preprocess, names: list[str]
) -> int:
    """Predicts all records; prints and writes what came out."""
    import tensorflow as tf

    spec = dti.InputSpec.for_evaluation(dataset, preprocess, label=_FILES.label(), record_ids=True)
    options = BACKENDS[_BACKEND.value]
    fed = dti.load(spec, options, batch_size=_BATCH_SIZE.value)
    rows = []
    for x, labels in command.progress(fed, what="predicting", total=len(fed)):
        probabilities = tf.nn.softmax(model(x["image"], training=False)).numpy()
        best = probabilities.argmax(1)
        columns = (x["record_id"].numpy(), labels.numpy(), best, probabilities.max(1))
        rows += zip(*(column.tolist() for column in columns), strict=True)
    if _CSV.value:
        with open(_CSV.value, "w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(("id", "file", "label", "prediction", "probability"))
            for record, label, best, probability in rows:
                file = dataset.locate(record).file
                writer.writerow((record, file, label, best, f"{probability:.6f}"))
    right = sum(label == best for _, label, best, _ in rows)
    print(f"right  {right:,} of {len(rows):,} records, {right / len(rows):.2%}")
    wrong = sorted((row for row in rows if row[1] != row[2]), key=lambda row: -row[3])[:_MISTAKES]
    shown = []
    for record, label, best, probability in wrong:
        label, best = (pictures.name_label(class_id, names) for class_id in (label, best))
        where = dataset.locate(record)
        place = f"{where.number:,} of {where.file}"
        shown.append((str(record), label, best, f"{probability:.1%}", place))
    if shown:
        command.print_table(("id", "label", "prediction", "probability", "record"), shown)
    if _SHEET.value:
        tiles: list[Any] = []
        for record, label, best, sure, _ in shown:
            image = pictures.read_image(dataset, int(record))
            title = f"{record}: {label}\ntaken for {best}, {sure}"
            tiles.append(pictures.Tile(title, image))
        pictures.draw_sheet(tiles, path=_SHEET.value)
    return 0


def load_model(path: str) -> tuple:
    """Loads a model; returns it and what is done to its input images.

    Raises:
      InputError: it is not a saved model from square images, RGB or gray, to logits.
    """
    import keras

    try:
        model = keras.saving.load_model(path)
    except ValueError as error:
        words = str(error).splitlines()[0]
        raise InputError(f"{path} is not a model that Keras saved: {words}") from error
    shape = model.input_shape if isinstance(model.input_shape, tuple) else ()
    height, channels = (shape[1], shape[3]) if len(shape) == 4 else (None, None)
    if not height or shape[2] != height or channels not in (1, 3):
        rule = "it must take square images, (n, n, 3) or (n, n, 1)"
        raise InputError(f"{path} takes {shape[1:]}: {rule}.")
    if not isinstance(model.output_shape, tuple) or not model.output_shape[-1]:
        raise InputError(f"{path} returns {model.output_shape}: it must return logits of classes.")
    return model, Preprocess.for_evaluation(height, channels=channels)


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
