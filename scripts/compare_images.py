"""Shows that the backends make the same images: compares evaluation images, in 0..255 units.

The exit code is 1 if the mean absolute difference exceeds --most, or if labels differ.

example: python scripts/compare_images.py --files='path/validation-*'
"""

import sys

import numpy as np

from dali_tf_input import DaliOptions, InputError, InputSpec, Preprocess, TfDataOptions
from support import cli, pictures
from support.flags import FileFlags

FLAGS = cli.Flags()
_FILES = FileFlags(FLAGS)
_NUM_IMAGES = FLAGS.integer("num_images", 256, "How many images are compared, at most.", 1)
_LAYOUT = FLAGS.choice("layout", "HWC", ["HWC", "CHW"], "Axes of an image.")
_ANTIALIAS = FLAGS.boolean("antialias", False, "Widen the filter when shrinking.")
_MOST = FLAGS.number("most", 0.01, "Largest mean absolute difference that passes.")


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    dataset = _FILES.dataset()
    cli.import_tensorflow()
    preprocess = Preprocess.for_evaluation(layout=_LAYOUT.value, antialias=_ANTIALIAS.value)
    one_pass = {"order": "sequential", "repeat": False}  # as stores need it, too
    spec = InputSpec(dataset=dataset, preprocess=preprocess, **one_pass)
    num_images = min(_NUM_IMAGES.value, dataset.num_records)
    batch_size = min(64, num_images)
    dali, tf_data = (
        pictures.make_batches(spec, options, batch_size)
        for options in (DaliOptions(device="cpu"), TfDataOptions())
    )
    means, worst, labels_equal = [], 0.0, True
    for _ in range(num_images // batch_size):
        one, other = next(dali), next(tf_data)
        difference = np.abs(one["image"] - other["image"])
        means.append(float(difference.mean()))
        worst = max(worst, float(difference.max()))
        labels_equal &= bool((one["label"] == other["label"]).all())
    mean, compared = float(np.mean(means)), f"{len(means) * batch_size} evaluation images"
    text = f"{compared}: mean absolute difference {mean:.6f} of 255, largest {worst:.4f}"
    if mean > _MOST.value or not labels_equal:
        text += f"; --most is {_MOST.value}; labels equal: {labels_equal}"
        raise InputError(f"DALI and tf.data differ in {text}.")
    print(f"DALI and tf.data agree in {text}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
