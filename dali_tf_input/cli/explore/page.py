"""The page of ``explore``: one HTML file with its plots and thumbnails."""

import base64
import html
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image

from dali_tf_input import pictures
from dali_tf_input.cli.explore.findings import Finding, Set, summarize

_COLORS = ("#3b6ea8", "#d1783c", "#4f9d69", "#8e5ea2")  # of the sets
_THUMBNAIL, _MOST_GROUPS, _MOST_CLASSES, _MOST_POINTS = 96, 24, 40, 2000
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem .2rem 0; text-align: left; }
figure { display: inline-block; margin: .3rem; font-size: 12px; vertical-align: top; }
figure img { display: block; } .group { border: 1px solid #ddd; display: inline-block;
margin: .2rem; } svg text { font: 12px system-ui, sans-serif; } .key { font-weight: bold; }
"""


def write_page(path: str, sets: list[Set], findings: list[Finding]) -> None:
    """Writes the page."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in _make_page(sets, findings))


def _make_page(sets: list[Set], findings: list[Finding]) -> Iterator[str]:
    title = html.escape(", ".join(one.name for one in sets))
    yield f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
    yield f"<h1>{title}</h1>"
    keys = (
        f"<th><span class='key' style='color:{color}'>{html.escape(one.name)}</span></th>"
        for one, color in zip(sets, _COLORS * len(sets), strict=False)
    )
    yield f"<table><tr><th></th>{''.join(keys)}</tr>"
    for row in summarize(sets):
        yield f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
    yield "</table><h2>What would hurt training</h2><ul>"
    yield from (f"<li>{html.escape(finding.text)}</li>" for finding in findings)
    yield "</ul>" if findings else "<li>Nothing was found.</li></ul>"
    if any(one.all_labels is not None for one in sets):
        yield from _draw_classes(sets)
    yield "<h2>Sizes in pixels, and kilobytes of a record</h2>"
    yield _draw_sizes(sets)
    yield _draw_histogram([one.num_bytes / 1000 for one in sets])
    for finding in findings:
        if finding.groups:
            yield f"<h3>{html.escape(finding.text)}</h3>"
            yield from _show_groups(finding)
    yield "<h2>Some of each class</h2>"
    yield from _show_classes(sets[0])


def _draw_classes(sets: list[Set]) -> Iterator[str]:
    """Draws how many records the classes have: all, or the largest and the smallest."""
    labels = [one.all_labels for one in sets if one.all_labels is not None]
    classes, counts = np.unique(np.concatenate(labels), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    shown = order
    if len(order) > _MOST_CLASSES:
        shown = np.concatenate([order[: _MOST_CLASSES // 2], order[-_MOST_CLASSES // 2 :]])
    which = "" if len(shown) == len(order) else f": the largest and smallest {_MOST_CLASSES // 2}"
    yield f"<h2>Records of {len(order):,} classes{which}</h2>"
    bars, y, scale = [], 0, 460 / counts.max()
    for place in shown:
        label = int(classes[place])
        name = _text(sets[0].name_of(label))
        bars.append(f"<text x='150' y='{y + 12}' text-anchor='end'>{name}</text>")
        x = 160.0
        for one, color in zip(sets, _COLORS * len(sets), strict=False):
            count = 0 if one.all_labels is None else int((one.all_labels == label).sum())
            width = count * scale
            bars.append(
                f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='14' fill='{color}'/>"
            )
            x += width
        bars.append(f"<text x='{x + 6:.1f}' y='{y + 12}'>{counts[place]:,}</text>")
        y += 18
    yield f"<svg width='700' height='{y}'>{''.join(bars)}</svg>"


def _text(text: str) -> str:
    return html.escape(text if len(text) <= 22 else f"{text[:21]}…")


def _draw_sizes(sets: list[Set]) -> str:
    """Draws a point at the width and height of each image, for at most 2,000 images per set."""
    largest = max(1, *(int(one.sizes.max()) for one in sets))
    parts = [_axes(largest, largest, "width", "height")]
    for one, color in zip(sets, _COLORS * len(sets), strict=False):
        step = -(-len(one.sizes) // _MOST_POINTS)
        for height, width in one.sizes[::step].tolist():
            x, y = 60 + 320 * width / largest, 330 - 320 * height / largest
            point = f"<circle cx='{x:.0f}' cy='{y:.0f}' r='2.5' fill='{color}' fill-opacity='.35'/>"
            parts.append(point)
    return f"<svg width='420' height='370'>{''.join(parts)}</svg>"


def _draw_histogram(values: Sequence[Any]) -> str:
    edges = np.histogram_bin_edges(np.concatenate(values), 40)
    counts = [np.histogram(one, edges)[0] for one in values]
    highest = max(1, *(int(one.max()) for one in counts))
    parts = [_axes(float(edges[-1]), highest, "KB", "records", low=float(edges[0]))]
    for one, color in zip(counts, _COLORS * len(counts), strict=False):
        for place, count in enumerate(one.tolist()):
            height = 320 * count / highest
            parts.append(_bar(60 + 8 * place, 330 - height, 7.5, height, color))
    return f"<svg width='420' height='370'>{''.join(parts)}</svg>"


def _bar(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}'"
        f" fill='{color}' fill-opacity='.7'/>"
    )


def _axes(right: float, top: float, x: str, y: str, low: float = 0) -> str:
    return (
        "<path d='M60 10V330H380' fill='none' stroke='#999'/>"
        f"<text x='60' y='346'>{low:,.0f}</text>"
        f"<text x='380' y='346' text-anchor='end'>{right:,.0f}</text>"
        f"<text x='220' y='364' text-anchor='middle'>{x}</text>"
        f"<text x='54' y='20' text-anchor='end'>{top:,.0f}</text>"
        f"<text x='54' y='330' text-anchor='end'>0</text>"
        f"<text x='54' y='175' text-anchor='end'>{y}</text>"
    )


def _show_groups(finding: Finding) -> Iterator[str]:
    for group in finding.groups[:_MOST_GROUPS]:
        shown = "".join(_show(one, place) for one, place in group[:6])
        yield f"<div class='group'>{shown}</div>"
    if len(finding.groups) > _MOST_GROUPS:
        yield f"<p>and {len(finding.groups) - _MOST_GROUPS:,} more</p>"


def _show_classes(one: Set) -> Iterator[str]:
    """Shows six records of each class, or of all."""
    labels = np.zeros(len(one.hashes), np.int64) if one.labels is None else one.labels
    for label in np.unique(labels)[:_MOST_CLASSES].tolist():
        own = np.flatnonzero(labels == label)
        for place in own[:: max(1, len(own) // 6)][:6].tolist():
            yield _show(one, place)
        yield "<br>"


def _show(one: Set, place: int) -> str:
    """Returns a record's thumbnail, with its id, size and class."""
    record = int(one.records.ids[place])
    height, width = one.sizes[place].tolist()
    label = "" if one.labels is None else f"{_text(one.name_of(int(one.labels[place])))}, "
    size = f"{width}x{height}" if height else "unreadable"
    text = f"{label}{size}<br>id {record} of {html.escape(one.name[-30:])}"
    try:
        image = pictures.read_image(one.records, record)
    except (OSError, ValueError, Image.DecompressionBombError):
        return f"<figure><figcaption>{text}</figcaption></figure>"
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    data = base64.b64encode(stream.getvalue()).decode()
    picture = f"<img src='data:image/jpeg;base64,{data}' alt='record {record}'>"
    return f"<figure>{picture}<figcaption>{text}</figcaption></figure>"
