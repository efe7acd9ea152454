"""Images of records, and sheets of pictures to look at."""

import functools
import io
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from dali_tf_input.records.checks import SIZE_KEYS
from dali_tf_input.records.records import Records

_SIDE, _GAP, _LINE = 240, 16, 20  # pixels: height of a picture, space between them, line of text


def read_image(dataset: Records, record: int, *, upright: bool = True) -> Image.Image:
    """Returns the image of a record in RGB, turned by its EXIF orientation if `upright`."""
    features = dataset.read(record)
    stored = features[dataset.image_key][0]
    if not dataset.stores_pixels:
        image: Image.Image = Image.open(io.BytesIO(stored))
        if image.mode.startswith("I"):  # 16 bits, of which Pillow would cut off what is over 255
            return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
        return (ImageOps.exif_transpose(image) if upright else image).convert("RGB")
    height, width = (features[key][0] for key in SIZE_KEYS)
    return Image.frombytes("RGB", (width, height), stored)


def name_label(label: Any, names: Sequence[str | None]) -> str:
    """Returns a label as text: a class and its name, several classes, or numbers."""
    if np.ndim(label) == 0:
        name = names[label] if 0 <= label < len(names) else None
        return str(label) if name is None else f"{label} {name}"
    if set(np.unique(label)) <= {0.0, 1.0}:
        classes = np.flatnonzero(label)[:6].tolist()
        texts = ((names[n] if n < len(names) else None) or str(n) for n in classes)
        return ", ".join(texts) or "none"
    return ", ".join(f"{value:.3g}" for value in label[:6])


class Tile(NamedTuple):
    """A picture of a sheet: uint8 (height, width, 3); box: (top, left, height, width) in it."""

    title: str
    pixels: Any
    box: Any = None


def draw_sheet(
    tiles: Sequence[Tile], *, path: str, across: int = 4, aspect: float = 1.0, title: str = ""
) -> None:
    """Draws tiles, `across` in a row. `aspect` is the width over the height."""
    width, height = round(_SIDE * min(2.0, max(0.5, aspect))), _SIDE
    texts = [_wrap(tile.title, width) for tile in tiles]
    text_height = _LINE * max(map(len, texts), default=0) + _GAP // 2
    header = _wrap(title, across * (width + _GAP) - _GAP) if title else []
    top = _GAP + _LINE * len(header) + (_GAP if header else 0)
    down = max(1, -(-len(tiles) // across))
    size = (_GAP + across * (width + _GAP), top + down * (text_height + height + _GAP))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    draw.multiline_text((_GAP, _GAP), "\n".join(header), fill="black", font=_font(), spacing=4)
    for number, (tile, lines) in enumerate(zip(tiles, texts, strict=True)):
        left = _GAP + number % across * (width + _GAP)
        y = top + number // across * (text_height + height + _GAP)
        draw.multiline_text((left, y), "\n".join(lines), fill="black", font=_font(), spacing=4)
        _paste(sheet, draw, tile, (left, y + text_height), (width, height))
    sheet.save(path)


def _paste(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    tile: Tile,
    place: tuple[int, int],
    size: tuple[int, int],
) -> None:
    """Puts a picture, and its box, as large as it fits into a sheet."""
    pixels = tile.pixels
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.squeeze(pixels))
    scale = min(size[0] / picture.width, size[1] / picture.height)
    shown = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    enlarged = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS
    sheet.paste(picture.convert("RGB").resize(shown, enlarged), place)
    if tile.box:
        top, left, height, width = map(float, tile.box)
        # A crop may reach beyond its image, as a letterbox does: what is seen of it is framed.
        right, bottom = min(left + width, picture.width), min(top + height, picture.height)
        sides = max(left, 0.0), max(top, 0.0), right, bottom
        corners = [
            start + scale * side for start, side in zip((*place, *place), sides, strict=True)
        ]
        draw.rectangle(corners, outline="#ff3b30", width=3)


def _wrap(text: str, width: int) -> list[str]:
    """Breaks text into lines of at most `width` pixels, at spaces where there are some."""
    most = max(1, int(width / _font().getlength("0")))
    return [part for line in text.splitlines() for part in textwrap.wrap(line, most) or [""]]


@functools.cache
def _font() -> Any:
    return ImageFont.load_default(_LINE - 6)
