"""Trains a small network with Keras, fed by either backend, on one or several replicas.

The number of classes comes from --num_classes, from labels.txt beside the first file (one name per
line), or from the highest label that the index step saw (--verify=schema). With --resume, a run
that was interrupted continues where the folder says it was. This is also an example to copy from:
support/train/fit.py has the training, support/train/worker_loop.py the loop for several hosts.

example: python scripts/train.py --files='path/train-*' --validation_files='path/validation-*'
  --epochs=3
"""

import dataclasses
import sys

import dali_tf_input as dti
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import BACKENDS
from dali_tf_input.cli.label_names import find_names
from support.train.flags import TrainFlags

FLAGS = command.Flags()
_TRAIN = TrainFlags(FLAGS)


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    _TRAIN.check()
    records = _TRAIN.records.dataset()
    spec = dti.InputSpec.for_training(
        records,
        _TRAIN.image_size.value,
        auto_augment=_TRAIN.auto_augment.value,
        order=_TRAIN.order.value,
        seed=_TRAIN.seed.value,
        label=_TRAIN.records.label(),
    )
    num_classes = _TRAIN.num_classes.value or count_classes(spec)
    if spec.label_range and spec.label_range[1] >= num_classes:
        source = "--num_classes" if _TRAIN.num_classes.value else "labels.txt"
        raise dti.InputError(
            f"There are {num_classes:,} classes by {source}, and labels go up to "
            f"{spec.label_range[1]:,}: --num_classes must be above it."
        )
    smoothing = _TRAIN.label_smoothing.value
    if _TRAIN.mixup.value or _TRAIN.cutmix.value or smoothing:
        fields = {"num_classes": num_classes, "one_hot": True, "smoothing": smoothing}
        spec = dataclasses.replace(spec, label=_TRAIN.records.label(**fields))
    options = BACKENDS.get(_TRAIN.backend.value)
    if _TRAIN.service.value:
        if isinstance(options, dti.DaliOptions):
            raise dti.InputError(f"--service is for the tf.data backend, got {options!r}.")
        options = dataclasses.replace(options or dti.TfDataOptions(), service=_TRAIN.service.value)
    command.import_tensorflow()  # only now: it takes seconds
    from support.train.fit import train_model

    return train_model(_TRAIN, spec, options, num_classes)


def count_classes(spec: dti.InputSpec) -> int:
    """Returns the number of lines in labels.txt, or the highest label plus 1."""
    file = spec.records.paths[0]
    names = find_names(file)
    if names:
        return len(names)
    if spec.label_range and spec.class_counts:  # not of a sample
        return spec.label_range[1] + 1
    raise dti.InputError(
        f"The number of classes is unknown: there is no labels.txt beside {file}."
        " Pass --num_classes=N, or index with --verify=schema."
    )


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
