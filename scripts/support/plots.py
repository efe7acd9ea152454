"""The plots of the commands' results; each says what was measured, where and how."""

import contextlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from support import machine
from support.throughput import comparison
from support.throughput.rows import GROUPS

_COLORS = dict(zip(GROUPS, ("#76b900", "#e8833a", "#b0b0b0"), strict=True))


@contextlib.contextmanager
def _figure(
    path: str,
    title: str,
    note: str,
    size: tuple[float, float],
    *,
    panes: int = 1,
    widths: Sequence[float] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Makes a figure of panes with a title and a note; saves it at the end, and says where."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, panes, figsize=size, sharey=True, width_ratios=widths, layout="constrained"
    )
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_axisbelow(True)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    width = int(12 * figure.get_size_inches()[0])
    figure.supxlabel("\n".join(textwrap.wrap(note, width)), fontsize=8, color="#444444")
    yield figure, axes
    figure.savefig(path, dpi=100)
    plt.close(figure)
    print(f"plot in {path}")


def plot_throughput(report: dict, *, path: str) -> None:
    """Plots images/s of each row, with what this package gains over it, and CPU ms of an image."""
    import matplotlib

    rows, reference, rounds = report["rows"], report["reference"], report["rounds"]
    decodes = " This package decodes only the region that a crop needs."
    decodes = decodes if reference == "tf_data" and report["decode"] != "full" else ""
    note = (
        f"Each image: {report['work']}; batch {report['batch_size']}. {rounds} windows of"
        f" {report['seconds']:g} s of each row, measured in turn. A bar is the median of"
        f" {reference}, divided by the ratio of the same rounds; lines: smallest to largest ratio."
        f" {comparison.describe_reads(report)}{decodes} {machine.describe_in_a_line(report)}."
    )
    where = f"{machine.describe_hardware(report)}\n{comparison.describe_data(report['data'])}"
    warning, size = comparison.warn_if_busy(report), (13, 3 + 0.55 * len(rows))
    busy = " The machine was busy." if warning and report["others"] else ""
    title = textwrap.fill(report["conclusion"] + busy, 90)
    with _figure(path, title, note, size, panes=2, widths=(2.8, 1)) as (_, (speeds, costs)):
        fastest = max(row["images_per_second"] for row in rows.values())
        dearest = max(row["cpu_ms_per_image"] for row in rows.values())
        places = _place_in_groups([row["group"] for row in rows.values()])
        for place, (name, row) in zip(places, rows.items(), strict=True):
            speed, ratio, color = row["images_per_second"], row["ratio"], _COLORS[row["group"]]
            speeds.barh(place, speed, color=color, height=0.7)
            end = speed
            if name != reference:
                least, most = (speed * ratio["median"] / ratio[x] for x in ("maximum", "minimum"))
                spread, end = [[speed - least], [most - speed]], max(speed, most)
                style = {"color": "black", "capsize": 3, "linewidth": 1}
                speeds.errorbar(speed, place, xerr=spread, **style)
            text = f"{speed:,.0f}   {_describe_gain(row, reference, rounds)}"
            text = f"{speed:,.0f}" if name == reference else text
            speeds.text(end + 0.012 * fastest, place, text, va="center")
            cost = row["cpu_ms_per_image"]
            costs.barh(place, cost, color=color, height=0.7)
            costs.text(cost + 0.02 * dearest, place, f"{cost:.2f}", va="center")
        speeds.set_yticks(places, [f"{row['what']}\n{name}" for name, row in rows.items()])
        speeds.get_yticklabels()[[*rows].index(reference)].set_fontweight("bold")
        speeds.set_ylim(places[-1] + (1.6 if warning else 0.6), places[0] - 0.6)
        speeds.set_xlim(0, fastest * 1.4)
        costs.set_xlim(0, dearest * 1.25)
        speeds.set_title(f"{where}\n\nimages per second (more is better)", fontsize=10, loc="left")
        costs.set_title("CPU ms an image (less is better)", fontsize=10, loc="left")
        if warning:
            style = {"color": "#c00000", "fontweight": "bold", "va": "center"}
            text = textwrap.fill(warning, 70)
            speeds.text(0.01 * fastest, places[-1] + 1, text, in_layout=False, **style)
        for axes in (speeds, costs):
            axes.grid(axis="x", alpha=0.3)
        shown = {row["group"] for row in rows.values()}
        handles = [
            matplotlib.patches.Patch(color=color, label=group)
            for group, color in _COLORS.items()
            if group in shown
        ]
        where_to: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3}
        where_to |= {"borderaxespad": 0, "columnspacing": 1, "handlelength": 1.2}
        speeds.legend(handles=handles, frameon=False, **where_to)


def _describe_gain(row: dict, reference: str, rounds: int) -> str:
    """Returns what this package, the reference, gains over a row; in few words."""
    ratio = row["ratio"]
    if not comparison.is_shown(ratio, rounds):
        return comparison.format_ratio(ratio, rounds)
    return f"{reference} is {ratio['median']:.{comparison.count_digits(ratio)}f} x as fast"


def _place_in_groups(groups: list[str]) -> list[float]:
    """Returns the place of each row on the axis, with space between groups."""
    places, place = list[float](), 0.0
    for number, group in enumerate(groups):
        place += 1.0 if number == 0 or group == groups[number - 1] else 1.5
        places.append(place)
    return places


def plot_stages(report: dict, *, names: dict[str, str], path: str) -> None:
    """Plots what each stage costs: a stacked bar for each backend, in time and in CPU time."""
    import matplotlib.pyplot as plt

    stages = report["stages"]
    note = (
        f"Medians of {report['repeats']} windows of {report['seconds']:g} s of the pipeline cut"
        f" after each stage. {report['work']}; {report['num_records']:,} records, order"
        f" {report['order']}, batch {report['batch_size']}. {machine.describe_in_a_line(report)}."
    )
    panels = {"seconds": "seconds per 1000 images"}
    panels["cpu"] = "CPU seconds per 1000 images, all threads"
    title, size = "What each stage of the input costs", (13, 2.8 + 0.8 * len(stages))
    with _figure(path, title, note, size, panes=2) as (figure, panes):
        colors = dict(zip(names, plt.color_sequences["tab10"], strict=False))
        for axes, (measure, unit) in zip(panes, panels.items(), strict=True):
            widest = max(sum(row[measure] for row in rows.values()) for rows in stages.values())
            shown = set[str]()  # what the legend has
            for position, rows in enumerate(stages.values()):
                left = 0.0
                for stage, row in rows.items():
                    width = row[measure]
                    label = None if stage in shown else names[stage]
                    shown.add(stage)
                    style = {"color": colors[stage], "label": label, "height": 0.6}
                    axes.barh(position, width, left=left, **style)
                    if width > 0.06 * widest:
                        middle, text = left + width / 2, f"{row['share']:.0%}"
                        text = text if measure == "seconds" else f"{width:.2f}"
                        axes.text(middle, position, text, ha="center", va="center", color="white")
                    left += width
                axes.text(left + 0.01 * widest, position, f"{left:.2f} s", va="center")
            axes.set_xlim(0, 1.15 * widest)
            axes.set_title(f"{unit} (less is better)", fontsize=11)
            axes.grid(axis="x", alpha=0.3)
        panes[0].set_yticks(range(len(stages)), list(stages), fontsize=11)
        panes[0].invert_yaxis()
        handles, labels = panes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
