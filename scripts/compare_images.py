"""Shows that the backends make the same images: compares evaluation images, in 0..255 units.

The exit code is 1 if the mean absolute difference exceeds --most, or if labels differ.

example: python scripts/compare_images.py --files='path/validation-*'
"""

import sys

from dali_tf_input import DaliOptions, InputSpec, Preprocess, TfDataOptions
from support import cli
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
    tf = cli.import_tensorflow()
    import numpy as np

    from dali_tf_input import denormalize, make_dataset

    preprocess = Preprocess.for_evaluation(layout=_LAYOUT.value, antialias=_ANTIALIAS.value)
    spec = InputSpec(dataset=dataset, preprocess=preprocess, order="sequential")
    num_images = min(_NUM_IMAGES.value, dataset.num_records)
    batch_size = min(64, num_images)
    with tf.device("CPU:0"):  # otherwise TensorFlow puts DALI's dataset on a GPU, if there is one
        both = [
            iter(make_dataset(spec, options, batch_size=batch_size))
            for options in (DaliOptions(device="cpu"), TfDataOptions())
        ]
    total, worst, labels_equal = 0.0, 0.0, True
    num_batches = num_images // batch_size
    for _ in range(num_batches):
        (images, labels), (other_images, other_labels) = (next(batches) for batches in both)
        shown = [denormalize(one.numpy(), preprocess) for one in (images, other_images)]
        difference = np.abs(shown[0] - shown[1])
        total += float(difference.mean())
        worst = max(worst, float(difference.max()))
        labels_equal &= bool((labels.numpy() == other_labels.numpy()).all())
    mean, compared = total / num_batches, f"{num_batches * batch_size} evaluation images"
    if mean > _MOST.value or not labels_equal:
        print(
            f"error: DALI and tf.data differ in {compared}: mean absolute difference {mean:.4f} of"
            f" 255, over {_MOST.value}; labels equal: {labels_equal}.",
            file=sys.stderr,
        )
        return 1
    print(
        f"DALI and tf.data agree in {compared}: mean absolute difference {mean:.6f} of 255, "
        f"largest {worst:.4f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
