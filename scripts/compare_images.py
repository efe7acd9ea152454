"""Shows that the backends make the same images: decodes evaluation images on both and compares them.

usage: compare_images.py --files=GLOB [--num_images=256] [--layout=HWC] [--antialias] [--most=0.01]
                         [--json]

Differences are in 0..255 units. Exit code 1 if the mean absolute difference is over --most.
"""

import json
import sys

from absl import flags

import console
import input_flags
from dali_tf_input import DaliOptions, InputError, InputSpec, Preprocess, TfDataOptions

_NUM_IMAGES = flags.DEFINE_integer("num_images", 256, "How many images are compared, at most.")
_LAYOUT = flags.DEFINE_enum("layout", "HWC", ["HWC", "CHW"], "Axes of an image.")
_ANTIALIAS = flags.DEFINE_boolean("antialias", False, "Whether the resize widens its filter when it shrinks.")
_MOST = flags.DEFINE_float("most", 0.01, "Largest mean absolute difference that passes, in 0..255 units.")
_JSON = flags.DEFINE_boolean("json", False, "Print the result as JSON.")


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}.")
    if _NUM_IMAGES.value < 1:
        raise InputError(f"`num_images` must be at least 1, got {_NUM_IMAGES.value}.")
    tf = console.import_tensorflow()
    import numpy as np

    from dali_tf_input.dataset import make_dataset

    dataset = input_flags.dataset_spec(input_flags.FILES.value)
    preprocess = Preprocess.for_evaluation(224, layout=_LAYOUT.value, antialias=_ANTIALIAS.value)
    spec = InputSpec(dataset=dataset, preprocess=preprocess, order="sequential")
    num_images = min(_NUM_IMAGES.value, dataset.num_records)
    batch_size = min(64, num_images)
    with tf.device("CPU:0"):  # else TensorFlow puts DALI's dataset on a GPU where there is one
        batches = {
            name: iter(make_dataset(spec, options, batch_size=batch_size))
            for name, options in (("DALI", DaliOptions(device="cpu")), ("tf.data", TfDataOptions()))
        }
    scale = np.float32(preprocess.std)
    if _LAYOUT.value == "CHW":
        scale = scale[:, None, None]
    total, worst, labels_equal = 0.0, 0.0, True
    num_batches = num_images // batch_size
    for _ in range(num_batches):
        (dali_images, dali_labels), (tf_images, tf_labels) = (next(batches[name]) for name in ("DALI", "tf.data"))
        difference = np.abs(dali_images.numpy() - tf_images.numpy()) * scale
        total += float(difference.mean())
        worst = max(worst, float(difference.max()))
        labels_equal &= bool((dali_labels.numpy() == tf_labels.numpy()).all())
    result = {
        "images": num_batches * batch_size,
        "mean_absolute_difference": total / num_batches,
        "largest_difference": worst,
        "labels_equal": labels_equal,
    }
    passed = result["mean_absolute_difference"] <= _MOST.value and labels_equal
    if _JSON.value:
        print(json.dumps(result))
    else:
        print(
            f"DALI and tf.data make the same {result['images']} evaluation images: mean absolute difference "
            f"{result['mean_absolute_difference']:.6f} of 255, largest {worst:.4f}; labels equal: {labels_equal}"
        )
    if not passed:
        print(f"error: the backends differ by more than {_MOST.value} on average, or in labels.", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    console.run(main)
