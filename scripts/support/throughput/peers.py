"""The same input by other packages, installed by hand: Grain, PyTorch, and decoding alone.

Each reads the same JPEGs, from memory, and does the work of the spec with OpenCV: decode, resize,
random crop, mirror, normalize; and augments with torchvision. They are what a user of these
packages would write, tuned as their documentation says.
"""

import concurrent.futures
import importlib.util
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

import dali_tf_input as dti

PEERS = ("decode_only", "decode_simplejpeg", "grain", "torch")
# What each imports, and what installs it.
_PACKAGES = {
    "decode_simplejpeg": {"simplejpeg": "simplejpeg"},
    "grain": {"grain": "grain", "cv2": "opencv-python-headless"},
    "torch": {"torch": "torch", "cv2": "opencv-python-headless"},
}


def find_missing(name: str, *, augments: bool) -> str | None:
    """Returns which module a row needs that is not installed, and the command; None if all are.

    Args:
      name: a row.
      augments: whether the images are augmented.
    """
    packages = dict(_PACKAGES.get(name, {}))
    if augments and "cv2" in packages:
        packages["torchvision"] = "torchvision"
    for module in packages:
        if importlib.util.find_spec(module) is None:
            return f"No module named {module!r}. pip install {' '.join(packages.values())}"
    return None


def check_installed(name: str, *, augments: bool) -> None:
    """Raises InputError if a row cannot be measured because a package is not installed."""
    if missing := find_missing(name, augments=augments):
        raise dti.InputError(f"{name} cannot be measured: {missing}")


def make_batches(name: str, spec: dti.InputSpec, *, batch_size: int) -> Iterator[Any]:
    """Returns an infinite iterator over batches of images (batch_size, height, width, 3).

    Those that only decode yield as many of anything.

    Raises:
      ImportError: the package is not installed.
      InputError: the spec's work is not written for it.
    """
    return iter(globals()[f"_{name}"](spec, batch_size))


def _decode_only(spec: dti.InputSpec, batch_size: int) -> Any:
    import tensorflow as tf

    key = spec.records.image_key

    @tf.autograph.experimental.do_not_convert
    def decode(record: Any) -> Any:
        features = tf.io.parse_single_example(record, {key: tf.io.FixedLenFeature([], tf.string)})
        return tf.shape(tf.io.decode_jpeg(features[key], 3, dct_method="INTEGER_ACCURATE"))

    dataset = tf.data.TFRecordDataset(list(spec.records.paths), num_parallel_reads=tf.data.AUTOTUNE)
    dataset = dataset.shuffle(spec.buffer_size).repeat()
    dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def _decode_simplejpeg(spec: dti.InputSpec, batch_size: int) -> Iterator[Any]:
    import simplejpeg

    def decode(images: tuple[bytes, ...]) -> int:
        return sum(simplejpeg.decode_jpeg(image).ndim == 3 for image in images)

    def decode_all() -> Iterator[Any]:
        for batch in batches:
            running.append(pool.submit(decode, batch))
            yield np.empty(running.pop(0).result())

    threads = len(os.sched_getaffinity(0))
    images = itertools.cycle(_read_images(spec))
    batches = iter(lambda: tuple(itertools.islice(images, batch_size)), ())
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    running = [pool.submit(decode, next(batches)) for _ in range(2 * threads)]
    return decode_all()


def _grain(spec: dti.InputSpec, batch_size: int) -> Any:
    import grain

    prepare = _Preparation(spec)
    threads = len(os.sched_getaffinity(0)) + 1
    dataset = grain.MapDataset.source(_read_images(spec)).shuffle(seed=0).repeat()
    dataset = dataset.random_map(prepare, seed=0).to_iter_dataset(
        grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * batch_size)
    )
    return dataset.batch(batch_size, drop_remainder=True)


def _torch(spec: dti.InputSpec, batch_size: int) -> Iterator[Any]:
    import torch

    loader = torch.utils.data.DataLoader(
        _TorchImages(_read_images(spec), _Preparation(spec)),
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=len(os.sched_getaffinity(0)),
        persistent_workers=True,
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


class _TorchImages:
    """A map-style dataset, as PyTorch's loader takes it."""

    def __init__(self, images: list[bytes], prepare: "_Preparation") -> None:
        self._images, self._prepare = images, prepare
        self._random = np.random.default_rng()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._prepare(self._images[number], self._random)


def _read_images(spec: dti.InputSpec) -> list[bytes]:
    records = spec.records
    return [records.read(number)[records.image_key][0] for number in range(records.num_records)]


class _Preparation:
    """Decodes and preprocesses an image with OpenCV, which antialiases by `INTER_AREA`."""

    def __init__(self, spec: dti.InputSpec) -> None:
        import cv2

        cv2.setNumThreads(0)
        preprocess = spec.preprocess
        self._crop, self._size = preprocess.crop, preprocess.image_size
        crops = (dti.ResizeRandomCrop, dti.RandomResizedCrop, dti.RandomCrop)
        if not isinstance(self._crop, crops) or preprocess.dtype != "float32":
            text = "only random crops and float32 are written for other packages"
            raise dti.InputError(f"{text}: leave out grain and torch.")
        self._method = cv2.INTER_AREA if preprocess.antialias else cv2.INTER_LINEAR
        self._mean = np.array(preprocess.mean, np.float32)
        self._scale = 1 / np.array(preprocess.std, np.float32)
        self._augment = [*map(_make_transform, preprocess.augment)]

    def __call__(self, data: bytes, random: np.random.Generator) -> np.ndarray:
        """Returns float32 (height, width, 3)."""
        import cv2

        how = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION  # as in all other rows
        image = cv2.imdecode(np.frombuffer(data, np.uint8), how)
        size, out = image.shape[:2], self._size
        if isinstance(self._crop, dti.RandomResizedCrop):
            image = _crop_at_random(image, _draw_size(size, self._crop, random), random)
            image = cv2.resize(image, out[::-1], interpolation=self._method)
        else:
            if isinstance(self._crop, dti.ResizeRandomCrop):
                image = cv2.resize(image, self._crop.resize[::-1], interpolation=self._method)
            image = _crop_at_random(image, out, random)
        if random.random() < 0.5:
            image = image[:, ::-1]
        if self._augment:
            image = _apply(self._augment, image)
        normalized = np.subtract(image, self._mean, dtype=np.float32)
        return np.multiply(normalized, self._scale, out=normalized)


def _make_transform(augmentation: Any) -> Any:
    """Returns torchvision's transform for an augmentation."""
    import torch
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    match augmentation:
        case dti.augment.RandAugment(num_ops=num_ops, magnitude=magnitude):
            return v2.RandAugment(num_ops, int(magnitude))
        case dti.augment.TrivialAugment():
            return v2.TrivialAugmentWide()
        case dti.augment.RandomErasing(p=p, area_range=area, aspect_ratio_range=ratios):
            return v2.RandomErasing(p, area, ratios, value="random")
        case _:
            name = type(augmentation).__name__
            raise dti.InputError(f"{name} is not written for other packages: leave the rows out.")


def _apply(transforms: list[Any], image: np.ndarray) -> np.ndarray:
    """Applies torchvision's transforms to an image (height, width, 3)."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    for transform in transforms:
        tensor = transform(tensor)
    return np.asarray(tensor.permute(1, 2, 0))


def _draw_size(
    size: tuple[int, int], crop: dti.RandomResizedCrop, random: np.random.Generator
) -> tuple[int, int]:
    """Returns (height, width) of a region as torchvision's RandomResizedCrop draws it."""
    for _ in range(crop.num_attempts):
        area = size[0] * size[1] * random.uniform(*crop.area_range)
        ratio = math.exp(random.uniform(*np.log(crop.aspect_ratio_range)))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= size[0] and 0 < width <= size[1]:
            return height, width
    return size


def _crop_at_random(
    image: np.ndarray, size: tuple[int, int], random: np.random.Generator
) -> np.ndarray:
    """Returns `size` (height, width) of an image at a random position; larger ones as they are."""
    y, x = (
        int(random.integers(max(0, whole - part) + 1))
        for whole, part in zip(image.shape, size, strict=False)
    )
    return image[y : y + size[0], x : x + size[1]]
