"""Predicts the class of images by a Keras model that was trained on this package's input.

usage: predict.py [--labels=labels.txt] [--top=5] [--backend=tf_data|dali_cpu|dali_gpu] [--batch_size=32]
                  MODEL IMAGE...

MODEL is a file that Keras saved (train.py --save=MODEL), whose outputs are logits. Images are fed as in evaluation, at the size
of the model's input. One that cannot be read is named, the others are predicted all the same, and the exit code is 1.
"""

import sys

from absl import flags

import console
from dali_tf_input import DaliOptions, InputError, Preprocess, TfDataOptions
from label_names import read_names

_BACKENDS = {"tf_data": TfDataOptions(), "dali_cpu": DaliOptions(device="cpu"), "dali_gpu": DaliOptions(device="gpu")}

_LABELS = flags.DEFINE_string("labels", None, "File with the name of label i in line i + 1.")
_TOP = flags.DEFINE_integer("top", 5, "How many classes are shown for each image.")
_BACKEND = flags.DEFINE_enum("backend", "tf_data", list(_BACKENDS), "What feeds the model.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Images in a batch.")


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        raise InputError("Name the model and at least one image: predict.py MODEL IMAGE...")
    if _TOP.value < 1:
        raise InputError(f"`top` must be at least 1, got {_TOP.value}.")
    path, *images = arguments
    names = read_names(_LABELS.value) if _LABELS.value else None
    tf = console.import_tensorflow()
    import keras  # after TensorFlow, whose chatter is held back

    from dali_tf_input.distribute import enable_memory_growth
    from dali_tf_input.predict import iterate_batches

    enable_memory_growth()
    try:
        model = keras.saving.load_model(path)
    except ValueError as error:
        raise InputError(f"{path} is no model that Keras saved: {str(error).splitlines()[0]}") from error
    shape = model.input_shape if isinstance(model.input_shape, tuple) else ()
    height = shape[1] if len(shape) == 4 else None
    if not height or shape[1:] != (height, height, 3):
        raise InputError(f"{path} takes {shape[1:]}: it must take images of a fixed, square size with 3 channels, (n, n, 3).")
    if not isinstance(model.output_shape, tuple) or not model.output_shape[-1]:
        raise InputError(f"{path} gives {model.output_shape}: it must give the logits of a known number of classes.")
    if names and len(names) < model.output_shape[-1]:
        raise InputError(
            f"`labels` {_LABELS.value} names {len(names):,} labels, and {path} tells {model.output_shape[-1]:,} apart."
        )
    failed = 0

    def report(position: int, reason: str) -> None:
        nonlocal failed
        failed += 1
        print(f"error: {images[position]}: {reason}", file=sys.stderr)

    rows = []
    batches = iterate_batches(
        images, Preprocess.for_evaluation(height), _BACKENDS[_BACKEND.value], batch_size=_BATCH_SIZE.value, on_bad=report
    )
    for positions, batch in batches:
        probabilities = tf.nn.softmax(model(batch, training=False)).numpy()
        for position, row in zip(positions, probabilities, strict=True):
            best = row.argsort()[::-1][: _TOP.value]
            shown = (f"{names[label] if names else label} {row[label]:.1%}" for label in best)
            rows.append((images[position], ", ".join(shown)))
    if rows:
        console.print_table(("image", "classes"), rows)
    return 1 if failed else 0


if __name__ == "__main__":
    console.run(main)
