"""The sweep of compare_throughput.py: six kinds of work, each by the package and by hand."""

import contextlib
import glob
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from dali_tf_input import DatasetSpec, InputError, Stats, build_index
from dali_tf_input.index.example import decode_example, encode_example
from dali_tf_input.index.tfrecord import frame_record, read_record
from dali_tf_input.order import read_index
from support import cli, processes
from support.flags import FileFlags
from support.throughput.rows import ratios

_IMAGES = 256  # of each size: several batches, and a gigabyte when decoded
_COLUMNS = ("work", "row", "against", "ratio", "min", "max", "images/s")


class Work(NamedTuple):
    """One kind of work.

    Attributes:
      what: a few words.
      size: (height, width) that the images are resized to first; None leaves them.
      flags: of compare_throughput.py.
      pairs: (row, the rows of which the fastest is the reference).
    """

    what: str
    size: tuple[int, int] | None
    flags: tuple[str, ...]
    pairs: tuple[tuple[str, tuple[str, ...]], ...]


_TF_DATA = ("tf_data", ("tf_data_by_hand",))
_DALI = ("dali_cpu_bare", ("dali_cpu_by_hand",))
_BOTH = ("tf_data_by_hand", "dali_cpu_by_hand")

WORKS = (
    Work("256 resize, 224 random crop", None, (), (_TF_DATA, _DALI)),
    Work(
        "the same, antialias",
        None,
        ("--antialias",),
        (("tf_data", _BOTH), ("dali_cpu_bare", _BOTH)),
    ),
    Work(
        "533x800 to a 256 random crop",
        (533, 800),
        ("--crop=random_crop", "--image_size=256"),
        (_TF_DATA, _DALI),
    ),
    Work("1080x1920 to 224, scaled", (1080, 1920), ("--decode=scaled",), (_TF_DATA,)),
    Work("the same, antialias", (1080, 1920), ("--decode=scaled", "--antialias"), (_TF_DATA,)),
    Work("random resized crop to 224", None, ("--crop=random_resized_crop",), (_TF_DATA, _DALI)),
)


def run(dataset: DatasetSpec, files: FileFlags, arguments: list[str]) -> dict:
    """Measures all of `WORKS` and prints the table.

    Args:
      dataset: whose images are used, as they are or resized.
      files: the flags that name them.
      arguments: further flags of compare_throughput.py, for each work.

    Returns:
      Each work's report, as compare_throughput.py writes it.
    """
    reports, lines = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for number, work in enumerate(cli.progress(WORKS, what="comparing", total=len(WORKS))):
            patterns = files.as_arguments()
            if work.size:
                patterns = [f"--files={write_resized(dataset, work.size, folder)}"]
            path = os.path.join(folder, f"{number}.json")
            rows = dict.fromkeys(row for made, others in work.pairs for row in (made, *others))
            words = [sys.executable, sys.argv[0], *patterns, *arguments, *work.flags]
            words += [f"--backends={','.join(rows)}", f"--json={path}"]
            code, output, errors = processes.call(words)
            if code:
                raise InputError(f"'{work.what}' failed: {errors.strip() or output.strip()}")
            with open(path, encoding="utf-8") as stream:
                report = json.load(stream)
            reports[f"{work.what}, {work.size or 'as they are'}"] = report
            lines += _lines(work, report)
    print()
    cli.print_table(_COLUMNS, lines)
    return reports


def _lines(work: Work, report: dict) -> Iterator[tuple[str, ...]]:
    """Yields the lines of one work: the ratio of each pair, round by round."""
    for row, others in work.pairs:
        speeds = {
            name: report["rows"][name]["images_per_second"]["median"] for name in (row, *others)
        }
        reference = max(others, key=speeds.__getitem__)
        ratio = Stats.of(ratios(report["windows"][row], report["windows"][reference]))
        numbers = (f"{value:.2f}" for value in (ratio.median, ratio.minimum, ratio.maximum))
        yield (work.what, row, reference, *numbers, f"{speeds[row]:,.0f}")


def _read_features(dataset: DatasetSpec) -> Iterator[dict[str, Any]]:
    """Yields the features of at most `_IMAGES` records, as many from each file."""
    each = -(-_IMAGES // len(dataset.files))
    extents = (
        (file, offset)
        for file, index_file in zip(dataset.files, dataset.index_files, strict=True)
        for offset, _ in read_index(index_file)[:each].tolist()
    )
    for file, offset in itertools.islice(extents, _IMAGES):
        features = decode_example(read_record(file, offset))
        yield {key: values[0] for key, (_, values) in features.items() if values}


def write_resized(
    dataset: DatasetSpec, size: tuple[int, int], folder: str, *, at_least: int = 1
) -> str:
    """Writes the first images of `dataset`, resized, as indexed TFRecords; returns their pattern.

    Portrait images are turned, so that sizes mean the same for all. The records have TF-slim's
    keys; if there are fewer than `at_least`, they are repeated.
    """
    from PIL import Image

    height, width = size
    out = os.path.join(folder, f"{height}x{width}")
    pattern = os.path.join(glob.escape(out), "train-*")
    if os.path.exists(out):
        return pattern
    os.makedirs(out)
    examples = []
    for number, features in enumerate(_read_features(dataset)):
        with contextlib.closing(Image.open(io.BytesIO(features[dataset.image_key]))) as image:
            if image.height > image.width:
                image = image.transpose(Image.Transpose.ROTATE_90)
            resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        encoded = io.BytesIO()
        resized.save(encoded, "JPEG", quality=90)
        example = {"image/encoded": encoded.getvalue(), "image/class/label": number}
        examples.append(frame_record(encode_example(example)))
    with open(os.path.join(out, "train-00000-of-00001"), "wb") as stream:
        for number in range(max(at_least, len(examples))):
            stream.write(examples[number % len(examples)])
    build_index(pattern)
    return pattern
