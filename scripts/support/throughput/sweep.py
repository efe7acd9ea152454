"""The sweep of compare_throughput.py: six kinds of work, each by the package and by hand."""

import io
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from PIL import Image

from dali_tf_input import DatasetSpec
from support import cli, processes
from support.convert.writer import write_images
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


_TF_DATA = ("tf_data", ("tf_data_by_hand", "tf_data_plain"))
_EACH = (_TF_DATA, ("dali_cpu_bare", ("dali_cpu_by_hand",)))
_BOTH = ("tf_data_by_hand", "dali_cpu_by_hand")
_FASTEST = (("tf_data", _BOTH), ("dali_cpu_bare", _BOTH))
_FULL_HD, _SCALED = (1080, 1920), "--decode=scaled"
_CROP = ("--crop=random_crop", "--image_size=256")

WORKS = (
    Work("256 resize, 224 random crop", None, (), _EACH),
    Work("the same, antialias", None, ("--antialias",), _FASTEST),
    Work("533x800 to a 256 random crop", (533, 800), _CROP, _EACH),
    Work("1080x1920 to 224, scaled", _FULL_HD, (_SCALED,), (_TF_DATA,)),
    Work("the same, antialias", _FULL_HD, (_SCALED, "--antialias"), (_TF_DATA,)),
    Work("random resized crop to 224", None, ("--crop=random_resized_crop",), _EACH),
)


def run(dataset: DatasetSpec, files: FileFlags, arguments: list[str]) -> dict:
    """Measures all of `WORKS`; prints the table and returns the report of each.

    `arguments` are further flags of compare_throughput.py, for each work.
    """
    reports, lines = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for work in cli.progress(WORKS, what="comparing", total=len(WORKS)):
            patterns = files.as_arguments()
            if work.size:
                patterns = [f"--files={write_resized(dataset, work.size, folder)}"]
            rows = [row for made, others in work.pairs for row in (made, *others)]
            report = compare_rows(rows, [*patterns, *arguments, *work.flags])
            reports[f"{work.what}, {work.size or 'as they are'}"] = report
            lines += _lines(work, report)
    print()
    cli.print_table(_COLUMNS, lines)
    return reports


def compare_rows(rows: list[str], arguments: list[str]) -> dict:
    """Runs compare_throughput.py; returns its report."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        flags = [f"--backends={','.join(rows)}", f"--json={path}"]
        processes.call_script("compare_throughput.py", *arguments, *flags)
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)


def _lines(work: Work, report: dict) -> Iterator[tuple[str, ...]]:
    """Yields the lines of one work: the ratio of each pair, round by round."""
    speeds = {name: row["images_per_second"]["median"] for name, row in report["rows"].items()}
    for row, others in work.pairs:
        reference = max(others, key=speeds.__getitem__)
        ratio = ratios(report["windows"][row], report["windows"][reference])
        numbers = (f"{value:.2f}" for value in (ratio.median, ratio.minimum, ratio.maximum))
        yield (work.what, row, reference, *numbers, f"{speeds[row]:,.0f}")


def _read_images(dataset: DatasetSpec) -> Iterator[bytes]:
    """Yields the images of at most `_IMAGES` records, as many from each file."""
    count = dataset.num_records
    for number in range(min(_IMAGES, count)):
        yield dataset.read(number * count // min(_IMAGES, count))[dataset.image_key][0]


def write_resized(
    dataset: DatasetSpec, size: tuple[int, int], folder: str, *, at_least: int = 1
) -> str:
    """Writes the first images of `dataset`, resized, as indexed TFRecords; returns their pattern.

    Portrait images are turned, so that sizes mean the same for all. The records have TF-slim's
    keys; if there are fewer than `at_least`, they are repeated.
    """
    height, width = size
    images = []
    for encoded in _read_images(dataset):
        image: Any = Image.open(io.BytesIO(encoded))
        if image.height > image.width:
            image = image.transpose(Image.Transpose.ROTATE_90)
        stream = io.BytesIO()
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        resized.save(stream, "JPEG", quality=90)
        images.append(stream.getvalue())
    out, num_records = os.path.join(folder, f"{height}x{width}"), max(at_least, len(images))
    return write_images(out, images, num_records=num_records, num_files=1)
