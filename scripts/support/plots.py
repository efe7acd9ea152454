"""The plots of the commands' results; each says what was measured, where and how."""

import contextlib
import textwrap
from collections.abc import Iterator
from typing import Any

from support import machine

_COLORS = {"tf_data": "#e8833a", "dali_cpu": "#4c8c2b", "dali_gpu": "#76b900"}


@contextlib.contextmanager
def _figure(
    path: str, title: str, note: str, size: tuple[float, float], panes: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Makes a figure of panes with a title and a note; saves it at the end, and says where."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, panes, figsize=size, sharey=True, layout="constrained")
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
    """Plots images/s of each row: the median, from the slowest to the fastest window."""
    rows = report["rows"]
    kilobytes = report["bytes"] / report["num_records"] / 1e3
    note = (
        f"Each image: {report['work']}; batch {report['batch_size']}. Bars: median of"
        f" {report['repeats']} windows of {report['seconds']:g} s, measured in turn; lines: slowest"
        f" to fastest. {report['num_records']:,} records of {kilobytes:,.0f} KB."
        f" {machine.describe_in_a_line(report)}."
    )
    title = "Feeding TensorFlow from TFRecords of JPEGs"
    with _figure(path, title, note, (11, 2 + 0.6 * len(rows))) as (_, axes):
        fastest = max(row["images_per_second"]["maximum"] for row in rows.values())
        for position, (name, row) in enumerate(rows.items()):
            speed = row["images_per_second"]
            middle = speed["median"]
            spread = [[middle - speed["minimum"]], [speed["maximum"] - middle]]
            color = next((value for key, value in _COLORS.items() if name.startswith(key)), "gray")
            pale = name.endswith(("_bare", "_by_hand", "_serial"))
            axes.barh(position, middle, color=color, alpha=0.45 if pale else 1.0)
            axes.errorbar(middle, position, xerr=spread, color="black", capsize=4, linewidth=1)
            ratio = row["ratio_to_tf_data"]
            times = f"  ({ratio['median']:.2f} x tf_data)" if ratio and name != "tf_data" else ""
            end = speed["maximum"] + 0.012 * fastest
            axes.text(end, position, f"{middle:,.0f}{times}", va="center")
        axes.set_yticks(range(len(rows)), [f"{row['what']}\n{name}" for name, row in rows.items()])
        axes.invert_yaxis()
        axes.set_xlim(0, fastest * 1.25)
        axes.set_xlabel("images per second (higher is better)")
        axes.grid(axis="x", alpha=0.3)


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
