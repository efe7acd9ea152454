"""The sweep of compare_throughput.py: six kinds of work, each by the package and by hand, on images of three sizes."""

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

import console
from backends import ratios
from dali_tf_input import DatasetSpec, InputError, Spread, build_index
from dali_tf_input.example import decode_example, encode_example
from dali_tf_input.manifest import read_index
from dali_tf_input.tfrecord import frame_record, read_record

_IMAGES = 256  # of each size: several batches, and a gigabyte when decoded
_COLUMNS = ("work", "row", "against", "ratio", "min", "max", "images/s", "target")
_AS_THEY_ARE = None


class Work(NamedTuple):
    """One kind of work: the flags that ask for it, and the pairs of rows that are compared.

    Attributes:
      what: a few words.
      size: (height, width) that the images are brought to first; None leaves them.
      flags: of compare_throughput.py.
      pairs: (row, the rows of which the fastest is the reference).
      target: the ratio aimed at.
    """

    what: str
    size: tuple[int, int] | None
    flags: tuple[str, ...]
    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    target: float


_TF_DATA = ("tf_data", ("tf_data_by_hand",))
_DALI = ("dali_cpu_bare", ("dali_cpu_by_hand",))
_BY_HAND = ("tf_data_by_hand", "dali_cpu_by_hand")

WORKS = (
    Work("256 resize, 224 random crop", _AS_THEY_ARE, (), (_TF_DATA, _DALI), 1.15),
    Work("the same, antialias", _AS_THEY_ARE, ("--antialias",), (("tf_data", _BY_HAND), ("dali_cpu_bare", _BY_HAND)), 1.5),
    Work("533x800 to a 256 random crop", (533, 800), ("--crop=random_crop", "--image_size=256"), (_TF_DATA, _DALI), 1.6),
    Work("1080x1920 to 224, scaled", (1080, 1920), ("--fuse=scaled",), (_TF_DATA,), 1.5),
    Work("the same, antialias", (1080, 1920), ("--fuse=scaled", "--antialias"), (_TF_DATA,), 1.5),
    Work("random resized crop to 224", _AS_THEY_ARE, ("--crop=random_resized_crop",), (_TF_DATA, _DALI), 1.3),
)


def run(dataset: DatasetSpec, files: list[str], arguments: list[str]) -> dict:
    """Measures all of `WORKS` and prints the table.

    Args:
      dataset: whose images are used, as they are or resized.
      files: the arguments that name them.
      arguments: further flags of compare_throughput.py, for each work.

    Returns:
      Each work's report, as compare_throughput.py writes it.
    """
    reports, lines = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for number, work in enumerate(console.progress(WORKS, what="comparing", total=len(WORKS))):
            patterns = files if work.size is None else [f"--files={resized(dataset, work.size, folder)}"]
            results = os.path.join(folder, f"{number}.json")
            rows = dict.fromkeys(row for made, references in work.pairs for row in (made, *references))
            command = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare_throughput.py")]
            command += [*patterns, *arguments, *work.flags, f"--backends={','.join(rows)}", f"--json={results}"]
            code, output, errors = console.call(command)
            if code:
                raise InputError(f"'{work.what}' could not be measured. {errors.strip() or output.strip()}")
            with open(results, encoding="utf-8") as stream:
                report = json.load(stream)
            reports[f"{work.what}, {work.size or 'as they are'}"] = report
            lines += _lines(work, report)
    print()
    console.print_table(_COLUMNS, lines)
    return reports


def _lines(work: Work, report: dict) -> Iterator[tuple[str, ...]]:
    """Yields the lines of one work: the ratio of each pair, round by round."""
    for row, references in work.pairs:
        reference = max(references, key=lambda name: report["rows"][name]["images_per_second"]["median"])
        ratio = Spread.of(ratios(report["windows"][row], report["windows"][reference]))
        yield (
            work.what,
            row,
            reference,
            *(f"{value:.2f}" for value in (ratio.median, ratio.minimum, ratio.maximum)),
            f"{report['rows'][row]['images_per_second']['median']:,.0f}",
            f"{work.target:.2f}",
        )


def _features(dataset: DatasetSpec) -> Iterator[dict[str, Any]]:
    """Yields the features of `_IMAGES` records at most, as many of each file."""
    each = -(-_IMAGES // len(dataset.files))
    places = (
        (file, offset)
        for file, index_file in zip(dataset.files, dataset.index_files, strict=True)
        for offset, _ in read_index(index_file)[:each]
    )
    for file, offset in itertools.islice(places, _IMAGES):
        yield {key: values[0] for key, (_, values) in decode_example(read_record(file, offset)).items() if values}


def resized(dataset: DatasetSpec, size: tuple[int, int], folder: str, *, at_least: int = 1) -> str:
    """Writes the first images of `dataset`, resized, as indexed TFRecords; returns the pattern of their files.

    An upright image is turned, so that sizes mean the same for all. The records have TF-slim's keys; where there are fewer than
    `at_least`, they are repeated.
    """
    from PIL import Image

    height, width = size
    out = os.path.join(folder, f"{height}x{width}")
    pattern = os.path.join(glob.escape(out), "train-*")
    if os.path.exists(out):
        return pattern
    os.makedirs(out)
    with open(os.path.join(out, "train-00000-of-00001"), "wb") as stream:
        examples = []
        for number, features in enumerate(_features(dataset)):
            with contextlib.closing(Image.open(io.BytesIO(features[dataset.image_key]))) as image:
                if image.height > image.width:
                    image = image.transpose(Image.Transpose.ROTATE_90)
                resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
            encoded = io.BytesIO()
            resized.save(encoded, "JPEG", quality=90)
            examples.append(frame_record(encode_example({"image/encoded": encoded.getvalue(), "image/class/label": number})))
        for number in range(max(at_least, len(examples))):
            stream.write(examples[number % len(examples)])
    build_index(pattern)
    return pattern
