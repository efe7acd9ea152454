"""Photo-like images for the sample data, and their records: see make_sample_tfrecords.py."""

import functools
import io

import numpy as np
from PIL import Image, ImageDraw

from dali_tf_input.cli.convert.writer import Record, image_features
from dali_tf_input.records.example import encode_example

# Class name -> color of its shape, RGB in 0..255. The name ends in the shape.
_CLASSES = {
    "blue_square": (40, 80, 200),
    "cyan_triangle": (40, 190, 200),
    "green_disc": (50, 160, 60),
    "magenta_ring": (200, 50, 170),
    "orange_square": (230, 130, 30),
    "red_disc": (200, 40, 40),
    "violet_triangle": (110, 60, 190),
    "yellow_ring": (230, 210, 50),
}
CLASS_NAMES = sorted(_CLASSES)

# (height, width) in pixels and how often: ImageNet's commonest sizes; see `_draw_size`.
_COMMON_SIZES = (((375, 500), 0.46), ((333, 500), 0.14), ((500, 375), 0.15))
_GRAYSCALE_EVERY = 50  # 2% of ImageNet
_SUBSAMPLED_RATE = 0.22  # of 115 ImageNet photos 24 had 4:2:0 chroma and 2 had 4:2:2
_GROUND_SIZE = 1536  # height and width of the texture that the grounds are cut from, in pixels


def make_records(items: list[tuple[int, int]]) -> list[Record]:
    """Draws images; the class and all else of each follow from (seed, number)."""
    return [make_record(*item) for item in items]


def make_record(seed: int, number: int) -> Record:
    random = np.random.default_rng([seed, number])
    label = int(random.integers(len(CLASS_NAMES)))
    class_name = CLASS_NAMES[label]
    image = draw_image(random, class_name)
    encoded = encode_image(random, image, grayscale=number % _GRAYSCALE_EVERY == 0)
    size, filename = (image.height, image.width), f"sample_{number:07d}.jpg"
    features = image_features(encoded, size, key="image/encoded", filename=filename)
    features |= {"image/class/label": label, "image/class/text": class_name}
    return Record(encode_example(features), filename)


def draw_image(random: np.random.Generator, class_name: str) -> Image.Image:
    """Draws a shape of the class on a piece of the texture; RGB."""
    height, width = _draw_size(random)
    image = Image.fromarray(_cut_ground(random, height, width))
    draw = ImageDraw.Draw(image, "RGBA")
    radius = min(height, width) * random.uniform(0.22, 0.38)
    x, y = width * random.uniform(0.35, 0.65), height * random.uniform(0.35, 0.65)
    color = (np.clip(channel + random.normal(0, 12), 0, 255) for channel in _CLASSES[class_name])
    box = (x - radius, y - radius, x + radius, y + radius)
    fill = (*map(int, color), 205)  # a little of the texture shows through
    match class_name.rsplit("_", 1)[1]:
        case "disc":
            draw.ellipse(box, fill=fill)
        case "ring":
            draw.ellipse(box, outline=fill, width=int(radius * 0.4))
        case "square":
            angle = int(random.integers(90))
            draw.regular_polygon((x, y, radius * 1.2), 4, rotation=angle, fill=fill)
        case "triangle":
            angle = int(random.integers(120))
            draw.regular_polygon((x, y, radius * 1.3), 3, rotation=angle, fill=fill)
    return image


def encode_image(random: np.random.Generator, image: Image.Image, *, grayscale: bool) -> bytes:
    """Encodes as ImageNet's JPEGs are: quality 95 and 4:4:4 for most, 4:2:0 for some."""
    if grayscale:
        image = image.convert("L")
    subsampled = random.random() < _SUBSAMPLED_RATE
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90 if subsampled else 95, subsampling=2 if subsampled else 0)
    return stream.getvalue()


def _draw_size(random: np.random.Generator) -> tuple[int, int]:
    """Returns (height, width) in pixels: one of the common sizes, or a random one."""
    choice = random.random()
    for size, rate in _COMMON_SIZES:
        choice -= rate
        if choice < 0:
            return size
    shorter = int(np.clip(random.lognormal(np.log(370), 0.45), 100, 1000))
    longer = int(shorter * random.uniform(1.0, 1.5))
    return (shorter, longer) if random.random() < 0.6 else (longer, shorter)


def _cut_ground(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Returns a random piece of the texture, uint8 (height, width, 3)."""
    top, left = (random.integers(_GROUND_SIZE - side + 1) for side in (height, width))
    piece = _ground_texture()[top : top + height, left : left + width]
    if random.random() < 0.5:
        piece = piece[:, ::-1]
    contrast = random.lognormal(np.log(25.0), 0.3)  # standard deviation in 0..255 units
    tint = random.uniform(95, 160) + random.normal(0, 14, 3)
    return np.clip(piece * np.float32(contrast) + tint.astype(np.float32), 0, 255).astype(np.uint8)


@functools.cache
def _ground_texture() -> np.ndarray:
    """Makes the texture once per process: float32 of mean 0 and deviation 1.

    Its amplitude falls as a power of the frequency, as in natural images (Field 1987, "Relations
    between the statistics of natural images"), and its channels are mostly correlated. The power
    determines the bytes per pixel: 1.08 makes the JPEGs as large as ImageNet's.
    """
    random, size = np.random.default_rng(1987), _GROUND_SIZE
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :])
    frequency[0, 0] = np.inf  # no constant part
    layers = []
    for _ in range(4):
        spectrum = np.fft.rfft2(random.standard_normal((size, size))) / frequency**1.08
        layer = np.fft.irfft2(spectrum, s=(size, size))
        layers.append((layer / layer.std()).astype(np.float32))
    texture = np.stack([0.9 * layers[0] + 0.3 * layer for layer in layers[1:]], axis=-1)
    return np.ascontiguousarray(texture / texture.std())
