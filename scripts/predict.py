"""Predicts the class of images with a Keras model that was trained on this package's input.

MODEL is a file that Keras saved (train.py --save=MODEL), whose outputs are logits. Images are
preprocessed as in evaluation, at the size of the model's input. Images that cannot be read are
named, the others are predicted nevertheless, and the exit code is 1.

usage: predict.py [flags] MODEL IMAGE...

example: python scripts/predict.py --labels=records/labels.txt model.keras photo.jpg another.jpg
"""

import sys

from dali_tf_input import InputError, Preprocess
from support import cli
from support.flags import BACKENDS
from support.train.label_names import read_names

FLAGS = cli.Flags()
_LABELS = FLAGS.string("labels", None, "File with the name of label i in line i + 1.")
_TOP = FLAGS.integer("top", 5, "How many classes are shown for each image.", 1)
_BACKEND = FLAGS.choice("backend", "tf_data", list(BACKENDS), "What feeds the model.")
_BATCH_SIZE = FLAGS.integer("batch_size", 32, "Images in a batch.", 1)


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        raise InputError("Name the model and at least one image: predict.py MODEL IMAGE...")
    path, *images = arguments
    names = read_names(_LABELS.value) if _LABELS.value else None
    tf = cli.import_tensorflow()
    from dali_tf_input import enable_memory_growth, iterate_batches

    enable_memory_growth()
    model, height = load_model(path)
    if names and len(names) < model.output_shape[-1]:
        raise InputError(
            f"`labels` {_LABELS.value} names {len(names):,} labels, and {path} has "
            f"{model.output_shape[-1]:,} classes."
        )
    failed = 0

    def report(position: int, reason: str) -> None:
        nonlocal failed
        failed += 1
        print(f"error: {images[position]}: {reason}", file=sys.stderr)

    rows = []
    batches = iterate_batches(
        images,
        Preprocess.for_evaluation(height),
        BACKENDS[_BACKEND.value],
        batch_size=_BATCH_SIZE.value,
        on_bad=report,
    )
    for positions, batch in batches:
        probabilities = tf.nn.softmax(model(batch, training=False)).numpy()
        for position, row in zip(positions, probabilities, strict=True):
            best = row.argsort()[::-1][: _TOP.value]
            shown = (f"{names[label] if names else label} {row[label]:.1%}" for label in best)
            rows.append((images[position], ", ".join(shown)))
    if rows:
        cli.print_table(("image", "classes"), rows)
    return 1 if failed else 0


def load_model(path: str) -> tuple:
    """Loads a model; returns it and the height of its input images.

    Raises:
      InputError: it is not a saved model from square images to logits.
    """
    import keras

    try:
        model = keras.saving.load_model(path)
    except ValueError as error:
        words = str(error).splitlines()[0]
        raise InputError(f"{path} is not a model that Keras saved: {words}") from error
    shape = model.input_shape if isinstance(model.input_shape, tuple) else ()
    height = shape[1] if len(shape) == 4 else None
    if not height or shape[1:] != (height, height, 3):
        raise InputError(f"{path} takes {shape[1:]}: it must take square images, (n, n, 3).")
    if not isinstance(model.output_shape, tuple) or not model.output_shape[-1]:
        raise InputError(f"{path} returns {model.output_shape}: it must return logits of classes.")
    return model, height


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
