"""Compares the images that tf.data and DALI make of the same records.

The same crops and mirrors of both, from 0 to 255: it prints the mean and the largest difference.
With --most the exit code is 1 if the mean is larger.

example: python scripts/compare_images.py --files='path/train-*' --evaluation --most=0.01
"""

import dataclasses
import sys

import numpy as np

from dali_tf_input import DaliOptions, InputError, InputSpec, Preprocess
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import describe_work
from support.flags import FileFlags, WorkFlags

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_DEVICE = FLAGS.choice("device", "cpu", ["cpu", "gpu"], "Where DALI's images are made.")
_EVALUATION = FLAGS.boolean("evaluation", False, "Compare the preprocessing of evaluation.")
_LAYOUT = FLAGS.choice("layout", "HWC", ["HWC", "CHW"], "Axes of an image.")
_MOST = FLAGS.number("most", None, "Largest mean difference that passes, of 255.")
_NUM_IMAGES = FLAGS.integer("num_images", 256, "How many images are compared, at most.", 1)


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    preprocess = _WORK.preprocess()
    if _EVALUATION.value:
        preprocess = Preprocess.for_evaluation(preprocess.image_size, dtype=_WORK.dtype.value)
    spec = InputSpec(
        records=_FILES.dataset(),
        preprocess=dataclasses.replace(preprocess, layout=_LAYOUT.value),
        order="global",
        label=_FILES.label(),
        record_ids=True,
    )
    num_images = min(_NUM_IMAGES.value, spec.records.num_records)
    command.import_tensorflow()
    from dali_tf_input import sheets

    # DALI first, because TensorFlow must not take the GPU's memory before it.
    options = (_WORK.with_decode(DaliOptions(device=_DEVICE.value)), _WORK.options("tf_data"))
    theirs, ours = (next(sheets.make_batches(spec, one, num_images)) for one in options)
    print(f"images      {num_images} of {spec.records.num_records:,}: {describe_work(preprocess)}")
    if any((ours[name] != theirs[name]).any() for name in ("label", "record_id")):
        raise InputError(f"The backends serve other records: {ours}, {theirs}. Please report this.")
    difference = np.abs(ours["image"] - theirs["image"])
    print(f"difference  mean {difference.mean():.4f} of 255, largest {difference.max():.4f}")
    most = _MOST.value
    if most is not None and difference.mean() > most:
        raise InputError(
            f"The backends' images differ by {difference.mean():.6f}, --most is {most}."
        )
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
