"""Predicts the classes of images with a model that serving.export_saved_model wrote.

IMAGES are files, or folders, of which all files are taken. Each line of the table has a file, its
class, by name if the model has names, and the score of the class. Images that cannot be decoded are
named on stderr, and make the exit code 1.

usage: dali-tf-input predict [flags] MODEL IMAGES...

example: dali-tf-input predict --out=predicted.csv served/1 photos/
"""

import contextlib
import csv
import os
import sys
from collections.abc import Iterator

import numpy as np

from dali_tf_input import InputError
from dali_tf_input.cli import command
from dali_tf_input.records.checks import Checks, InvalidRecord
from dali_tf_input.records.class_names import LABELS_NAME, read_class_names

FLAGS = command.Flags()
_OUT = FLAGS.string("out", None, "CSV file for the table (default: print it).")
_BATCH_SIZE = FLAGS.integer("batch_size", 32, "Images per batch.", 1)


def main(arguments: list[str]) -> int:
    """Predicts; returns the exit code."""
    if len(arguments) < 2:
        raise InputError("Name the folder of the model, and images or folders of them.")
    folder, *images = map(os.path.expanduser, arguments)
    if not os.path.exists(os.path.join(folder, "saved_model.pb")):
        raise InputError(
            f"{folder} holds no SavedModel: dali_tf_input.serving.export_saved_model(model,"
            " preprocess, folder) writes one that takes images."
        )
    command.check_writable(_OUT, suffix=".csv")
    paths = [*find_images(images)]
    tf = command.import_tensorflow()
    model = tf.saved_model.load(folder)
    predict = model.signatures.get("serving_default") or next(iter(model.signatures.values()))
    (given,) = predict.structured_input_signature[1].values()
    if given.dtype != tf.string:
        text = f"{folder} takes {given.dtype.name}, not images"
        raise InputError(f"{text}: see serving.export_saved_model.")
    names_file = os.path.join(folder, "assets.extra", LABELS_NAME)
    names = read_class_names(names_file) if os.path.exists(names_file) else ()
    num_bad = 0
    with contextlib.ExitStack() as stack:
        stream = sys.stdout
        if _OUT.value:
            stream = stack.enter_context(open(_OUT.value, "w", newline="", encoding="utf-8"))
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["file", "class", "score"])
        for first in range(0, len(paths), _BATCH_SIZE.value):
            batch = [*read_images(paths[first : first + _BATCH_SIZE.value])]
            good = [(path, data) for path, data, problem in batch if not problem]
            for path, _, problem in batch:
                if problem:
                    print(f"{path}: {problem}", file=sys.stderr)
                    num_bad += 1
            if not good:
                continue
            encoded = tf.constant([data for _, data in good])
            outputs = [*predict(**{given.name.partition(":")[0]: encoded}).values()]
            if len(outputs) != 1 or outputs[0].ndim != 2 or outputs[0].shape[1] < 2:
                shapes = ", ".join(str(one.shape) for one in outputs)
                raise InputError(
                    f"{folder} gives {shapes} for {len(good)} images: one output with a score for"
                    " each of at least two classes is needed."
                )
            (scores,) = outputs
            for (path, _), row in zip(good, np.reshape(scores, (len(good), -1)), strict=True):
                best = int(row.argmax())
                name = names[best] if best < len(names) else best
                table.writerow([path, name, f"{row[best]:.6g}"])
    if num_bad:
        count = command.format_count(num_bad, "image")
        print(f"error: {count} of {len(paths):,} cannot be decoded, see above", file=sys.stderr)
    return 1 if num_bad else 0


def find_images(paths: list[str]) -> Iterator[str]:
    """Yields the files, and those of folders, sorted; hidden ones of folders are left out."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            names = sorted(name for name in files if not name.startswith("."))
            yield from (os.path.join(folder, name) for name in names)


def read_images(paths: list[str]) -> Iterator[tuple[str, bytes, str]]:
    """Yields each file, its bytes, and what is wrong with it, or ""."""
    from dali_tf_input.index.decoders import make_trial_decode

    decode = make_trial_decode(Checks(decoder="tf_data"))
    for path in paths:
        try:
            with open(path, "rb") as stream:
                data = stream.read()
            decode(data)
        except InvalidRecord as error:
            yield path, b"", f"{error.reason}: {error.detail}"
        except OSError as error:
            yield path, b"", f"cannot be read: {error.strerror}"
        else:
            yield path, data, ""
