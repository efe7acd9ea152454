"""What the tests share: three logical CPU devices, and small TFRecords whose labels number the
records.
"""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dali_tf_input import DatasetSpec, build_index
from dali_tf_input.index.example import encode_example
from dali_tf_input.index.tfrecord import frame_record
from support.cli import import_tensorflow

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
tf = import_tensorflow()


def pytest_configure(config: pytest.Config) -> None:
    """Sets up the devices before anything touches one: CPU devices stand for replicas."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # Tests that need no GPU must come out the same where there is one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PATH"] = f"{ROOT}/tests/no_gpu:{os.environ['PATH']}"
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)


def jpeg(
    height: int, width: int, *, seed: int = 0, mode: str = "RGB", image_format: str = "JPEG"
) -> bytes:
    """Returns an encoded image of smooth colors with some noise."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image).astype(np.int16) + random.integers(-12, 13, (height, width, 3))
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode).save(stream, image_format)
    return stream.getvalue()


def image_zoo() -> dict[str, tuple[bytes, str | None, str | None]]:
    """Returns encoded images of many kinds, sound and not: name -> (bytes, format if sound, fault
    if not).
    """
    image = Image.open(io.BytesIO(jpeg(60, 90)))
    sound = jpeg(60, 90)

    def save(image_format: str, mode: str = "RGB", **options: object) -> bytes:
        stream = io.BytesIO()
        image.convert(mode).save(stream, image_format, **options)
        return stream.getvalue()

    cmyk = save("JPEG", "CMYK")
    transform = cmyk.index(b"Adobe") + 11  # 0 for CMYK, 2 for YCCK
    size = sound.index(b"\xff\xc0") + 5  # of the frame: height and width
    return {
        "jpeg": (sound, "JPEG", None),
        "progressive": (save("JPEG", progressive=True), "JPEG", None),
        "with_a_tail": (sound + b"tail" * 9, "JPEG", None),
        "grayscale": (save("JPEG", "L"), "grayscale JPEG", None),
        "cmyk": (cmyk, "CMYK JPEG", None),
        "ycck": (cmyk[:transform] + b"\2" + cmyk[transform + 1 :], "YCCK JPEG", None),
        "png": (save("PNG"), "PNG", None),
        "png_with_alpha": (save("PNG", "RGBA"), "PNG", None),
        "gif": (save("GIF"), None, "GIF image"),
        "webp": (save("WEBP"), None, "WebP image"),
        "bmp": (save("BMP"), None, "BMP image"),
        "cut_in_half": (sound[: len(sound) // 2], None, "truncated JPEG"),
        "cut_by_one": (sound[:-1], None, "truncated JPEG"),
        "cut_in_its_header": (sound[:40], None, "damaged JPEG"),
        "huge": (
            sound[:size] + (65500).to_bytes(2, "big") * 2 + sound[size + 4 :],
            None,
            "too many pixels",
        ),
        "no_height": (sound[:size] + bytes(2) + sound[size + 2 :], None, "damaged JPEG"),
        "damaged_png": (save("PNG")[:-60], None, "damaged PNG"),
        "empty": (b"", None, "empty image"),
        "zeros": (bytes(999), None, "zero bytes"),
        "text": (b"404 not found", None, "text"),
        "html": (b"<!DOCTYPE html><html>", None, "HTML page"),
        "garbage": (bytes(range(200, 256)) * 20, None, "not an image"),
    }


def write_tfrecord(path: Path, examples: list[dict]) -> str:
    """Writes examples (feature key -> value) as one TFRecord file, without an index."""
    path.write_bytes(b"".join(frame_record(encode_example(example)) for example in examples))
    return str(path)


def numbered_examples(count: int, *, first: int = 0) -> list[dict]:
    """Returns examples of small images of many sizes; the label is the number of the record."""
    return [
        {
            "image/encoded": jpeg(30 + 7 * number % 40, 30 + 11 * number % 50, seed=number),
            "image/class/label": number,
        }
        for number in range(first, first + count)
    ]


def write_dataset(folder: Path, counts: list[int]) -> DatasetSpec:
    """Writes and indexes one TFRecord file for each count; labels number the records through all
    files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for position, count in enumerate(counts):
        write_tfrecord(
            folder / f"train-{position:05d}-of-{len(counts):05d}",
            numbered_examples(count, first=first),
        )
        first += count
    build_index(str(folder / "train-*"))
    return DatasetSpec.from_files(str(folder / "train-*"))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetSpec:
    """24 records in three files of different lengths."""
    return write_dataset(tmp_path_factory.mktemp("records"), [5, 12, 7])


@pytest.fixture(scope="session")
def sample_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which data/sample holds a small, indexed piece of the sample data."""
    import subprocess

    folder = tmp_path_factory.mktemp("sample")
    out = folder / "data" / "sample"
    command = [
        sys.executable,
        SCRIPTS / "make_sample_tfrecords.py",
        "--num_images=96",
        "--num_validation_images=32",
        out,
    ]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(
        [sys.executable, SCRIPTS / "index_tfrecords.py", f"{out}/*-of-*"],
        check=True,
        capture_output=True,
    )
    return folder
