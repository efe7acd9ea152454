"""Trains a small network with Keras `fit`, fed by either backend, on one replica or several; prints what it learned.

usage: train.py --files='path/train-*' --validation_files='path/validation-*' [--backend=auto] [--replicas=1]
                [--strategy=mirrored] [--order=global] [--resume=FOLDER [--save_every=N]]
                [--options=tuned.json] [--profile_input]
                [--auto_augment=rand] [--mixup=0.2] [--cutmix=1] [--label_smoothing=0.1] [...]

The number of classes comes from --num_classes, from labels.txt beside the first file (one name a line), or from the highest label
that the index step saw. With --resume a run that was stopped, by whatever, goes on where FOLDER says it was.
"""

import dataclasses
import os

from absl import flags

import console
import input_flags
import train_flags
from dali_tf_input import DaliOptions, DatasetSpec, InputError, InputSpec, Preprocess, TfDataOptions, load_options
from label_names import read_names

flags.adopt_module_key_flags(train_flags)  # so that --help lists them
_BACKENDS = {
    "auto": None,
    "dali_cpu": DaliOptions(device="cpu"),
    "dali_gpu": DaliOptions(device="gpu"),
    "tf_data": TfDataOptions(),
}


def main(arguments: list[str]) -> int:
    train_flags.check(arguments)
    records: DatasetSpec = input_flags.dataset_spec(input_flags.FILES.value)
    num_classes = train_flags.NUM_CLASSES.value or count_classes(records)
    if records.label_range and records.label_range[1] >= num_classes:
        raise InputError(
            f"There are {num_classes:,} classes by {'--num_classes' if train_flags.NUM_CLASSES.value else 'labels.txt'}, and "
            f"labels go up to {records.label_range[1]:,}: --num_classes must be above it."
        )
    preprocess = Preprocess.for_training(train_flags.IMAGE_SIZE.value)
    soft_labels = train_flags.MIXUP.value or train_flags.CUTMIX.value or train_flags.LABEL_SMOOTHING.value
    spec = InputSpec(
        dataset=records,
        preprocess=dataclasses.replace(preprocess, auto_augment=train_flags.AUTO_AUGMENT.value),
        order=train_flags.ORDER.value,
        seed=train_flags.SEED.value,
        one_hot=num_classes if soft_labels else None,
        label_smoothing=train_flags.LABEL_SMOOTHING.value,
    )
    options = load_options(train_flags.OPTIONS.value) if train_flags.OPTIONS.value else _BACKENDS[train_flags.BACKEND.value]
    if train_flags.SERVICE.value:
        if isinstance(options, DaliOptions):
            raise InputError(f"--service is for the tf.data backend, got {options!r}.")
        options = dataclasses.replace(options or TfDataOptions(), service=train_flags.SERVICE.value)
    from training import train_network  # after what can be wrong: TensorFlow takes seconds to come

    return train_network(spec, options, num_classes)


def count_classes(records: DatasetSpec) -> int:
    """Counts the lines of labels.txt beside the first file; without it, as many as the highest label asks for."""
    path = os.path.join(os.path.dirname(records.files[0]), "labels.txt")
    if not os.path.exists(path):
        if records.label_range:
            return records.label_range[1] + 1
        raise InputError(
            f"There is no {path} to count the classes by: give their number with --num_classes, or index with --verify=schema."
        )
    return len(read_names(path))


if __name__ == "__main__":
    console.run(main)
