"""What tests of `convert` share: photos, conversions in this process, and what they wrote."""

import io
from pathlib import Path
from unittest import mock

from commands import run, succeeds
from conftest import InThisProcess, jpeg, scan_records
from PIL import Image

from dali_tf_input.cli.convert import writer
from dali_tf_input.records.example import decode_example
from dali_tf_input.records.tfrecord import read_record

here = mock.patch.object(writer, "Child", InThisProcess)


def convert(*arguments, decoder="none"):
    """Runs `convert` in this process, by default without decoding."""
    with here:
        return run("convert", "--num_processes=1", f"--decoder={decoder}", *arguments)


def make(*arguments, **options):
    """Runs `convert`, which must succeed; returns what it printed."""
    process = succeeds(convert(*arguments, **options))
    return process.stdout


def index(folder, *flags):
    """Indexes the files of a set; returns their pattern."""
    files = f"{folder}/*-of-*"
    succeeds(run("index", *flags, files))
    return files


def read_features(file):
    """Returns the features of each record of a file."""
    extents = scan_records(str(file))
    return [decode_example(read_record(str(file), offset)) for offset, _ in extents]


def read(folder, split="train"):
    """Returns the first values of all records of a split."""
    files = sorted(Path(folder).glob(f"{split}-*-of-?????"))
    records = [record for file in files for record in read_features(file)]
    return [{key: values[0] for key, (_, values) in one.items() if len(values)} for one in records]


def names(folder, split):
    """Returns the names of the images of a split."""
    return {record["image/filename"].decode() for record in read(folder, split)}


def images(folder, split):
    """Returns the bytes of the images of a split."""
    return {record["image/encoded"] for record in read(folder, split)}


def set_bytes(folder, *, indexes=False):
    """Returns the files of a set, but for the one that has its folder's name."""
    paths = (path for path in Path(folder).iterdir() if path.name != "dataset_info.json")
    return {path.name: path.read_bytes() for path in paths if indexes or path.suffix != ".idx"}


def opened(encoded):
    return Image.open(io.BytesIO(encoded))


def photo(path, seed, height=12, width=14):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jpeg(height, width, seed=seed))


def photos(folder, classes, numbers, seed=0):
    """Writes photos of some classes, each with bytes of its own."""
    for place, name in enumerate(classes):
        for number in numbers:
            photo(folder / name / f"{number}.jpg", seed + 1000 * place + number)


def write_table(folder, text, name="table.csv"):
    (folder / name).write_text(text)
    return folder / name
