"""What a comparison found: one statistic for its sentence, table, plot and JSON.

The statistic is the ratio of images/s of this package (the reference row) to those of a row, in the
same round: its median, and its range. Rounds are minutes apart, so a machine that slows down for a
while changes windows by far, and ratios by little. The images/s that are shown for a row are the
reference's median divided by that ratio, so that no bar contradicts a ratio.
"""

import statistics
from typing import Any

from support.benchmark import Stats, Window
from support.throughput.rows import GROUPS, ROWS, Windows, rates, ratios

SCHEMA = 1  # of the JSON
_REFERENCES = ("dali_gpu", "tf_data")  # what `load` chooses, with a GPU and without
_LEAST_ROUNDS = 5  # that a claim rests on: by chance all fall on one side once in 16 times
_LITTLE = 0.05  # of the data, read from disk: programs read their own files, too
_BUSY = 0.1  # of the cores, taken by other programs

# Ratios that the reference's do not answer, and what is aimed at: row, other row, target.
_QUESTIONS: tuple[tuple[str, str, float | None], ...] = (
    ("dali_gpu", "tf_data", 3),
    ("dali_gpu", "dali_gpu_bare", 0.95),
    ("dali_gpu", "dali_gpu_buffer", 0.95),
    ("dali_cpu", "dali_cpu_bare", None),
    ("dali_cpu_bare", "dali_cpu_by_hand", None),
)


def summarize(windows: Windows, num_records: int) -> dict[str, Any]:
    """Returns what is shown of the windows: `reference`, `rows`, `questions`, `others`."""
    reference = find_reference(windows)
    speed = Stats.of(rates(windows[reference])).median
    rows = {
        name: _summarize_row(name, windows[name], windows[reference], speed, num_records)
        for name in sorted(windows, key=lambda name: GROUPS.index(ROWS[name].group))
    }
    questions = [
        {"row": name, "other": other, "target": target, "ratio": vars(ratio)}
        for name, other, target in _QUESTIONS
        if name in windows and other in windows and (target or name != reference)
        for ratio in [ratios(windows[name], windows[other])]
    ]
    return {
        "reference": reference,
        "rounds": len(windows[reference]),
        "rows": rows,
        "questions": questions,
        "others": find_others(windows),
    }


def find_reference(windows: Windows) -> str:
    """Returns the row that others are compared with: this package's, as `load` chooses it."""
    ours = [name for name in windows if ROWS[name].group == GROUPS[0]]
    return next(name for name in (*_REFERENCES, *ours, *windows) if name in windows)


def _summarize_row(
    name: str,
    measured: list[dict[str, Any]],
    reference: list[dict[str, Any]],
    speed: float,
    num_records: int,
) -> dict[str, Any]:
    row, ratio = ROWS[name], ratios(reference, measured)
    windows = [Window(**measurement["window"]) for measurement in measured]
    images = sum(measurement["images_taken"] for measurement in measured)
    disk = [measurement["disk_bytes"] for measurement in measured]
    return {
        "group": row.group,
        "what": row.what,
        "order": row.candidate.order,
        "images_per_second": speed / ratio.median,
        "ratio": vars(ratio),  # of the reference to this row
        "cpu_ms_per_image": statistics.median(one.cpu_seconds_per_1000_images for one in windows),
        "times_read": images / num_records,
        "disk_bytes": None if None in disk else sum(disk),
        "first_batch_seconds": measured[0]["first_batch_seconds"],
        "peak_memory_bytes": max(measurement["peak_memory_bytes"] for measurement in measured),
    }


def find_others(windows: Windows) -> dict[str, Any] | None:
    """Returns in how many `windows` other programs took cores (`busy`), and the largest share.

    None if that is not known. On a quiet machine they take 1% to 2%.
    """
    made = [Window(**answer["window"]) for measured in windows.values() for answer in measured]
    shares = [
        one.other_cpu_seconds / one.seconds / one.cores
        for one in made
        if one.other_cpu_seconds is not None
    ]
    busy = sum(share > _BUSY for share in shares)
    return {"windows": len(shares), "busy": busy, "most": max(shares)} if shares else None


def format_ratio(ratio: dict[str, float], rounds: int) -> str:
    """Returns what the rounds support: "1.9 (1.8 to 2.0)", or that they show no difference."""
    digits = count_digits(ratio)
    names = ("minimum", "median", "maximum")
    low, middle, high = (f"{ratio[name]:.{digits}f}" for name in names)
    if rounds < _LEAST_ROUNDS:
        return f"{middle} in {rounds} round{'s' if rounds > 1 else ''}: too few to tell"
    if not is_shown(ratio, rounds):
        return f"no difference shown ({low} to {high})"
    return f"{middle} ({low} to {high})"


def count_digits(ratio: dict[str, float]) -> int:
    """Returns the decimals of a ratio: 2 if the range is narrow, or rounding would hide it."""
    is_narrow = ratio["maximum"] - ratio["minimum"] < 0.05 * ratio["median"]
    near_one = any(0.95 <= value < 1.05 for value in ratio.values())
    look_alike = len({f"{value:.1f}" for value in ratio.values()}) < 3
    return 2 if is_narrow or near_one or look_alike else 1


def is_shown(ratio: dict[str, float], rounds: int) -> bool:
    """Returns whether the rounds, at least five, all show the same sign of a difference."""
    return rounds >= _LEAST_ROUNDS and not ratio["minimum"] <= 1 <= ratio["maximum"]


def conclude(report: dict[str, Any]) -> str:
    """Returns the comparison in one sentence: this package, and the same work written by hand."""
    rows, reference, rounds = report["rows"], report["reference"], report["rounds"]
    names = ["tf_data_by_hand", *rows]
    other = next((name for name in names if name in rows and name != reference), None)
    where = f"On this machine, with {describe_owner(report['data'])}, {rows[reference]['what']}"
    if other is None:
        speed = rows[reference]["images_per_second"]
        return f"{where} serves {speed:,.0f} images/s."
    ratio, what = rows[other]["ratio"], rows[other]["what"]
    text = format_ratio(ratio, rounds)
    if not is_shown(ratio, rounds):
        return f"{where} and {what} were measured: {text}."
    return f"{where} serves {text} times as many images per second as {what}."


def warn_if_busy(report: dict[str, Any]) -> str | None:
    """Returns a warning if other programs took cores, or that this is not known."""
    others, cores = report["others"], report["cores"]
    if others is None:
        return "Whether other programs took part of the cores is not known here."
    if not others["busy"]:
        return None
    return (
        f"Other programs took up to {others['most'] * cores:.1f} of the {cores} cores in"
        f" {others['busy']} of {others['windows']} windows. Repeat it on a quiet machine."
    )


def answer_questions(report: dict[str, Any]) -> list[str]:
    """Returns a line for each ratio that the table does not have."""
    lines = []
    for question in report["questions"]:
        text = format_ratio(question["ratio"], report["rounds"])
        target, middle = question["target"], question["ratio"]["median"]
        verdict = ""
        if target and report["rounds"] >= _LEAST_ROUNDS:
            verdict = f"; target {target}, by the median: {'met' if middle >= target else 'missed'}"
        lines.append(f"{question['row']} over {question['other']}: {text}{verdict}")
    return lines


def describe_owner(data: dict[str, Any]) -> str:
    """Returns whose records were read."""
    return "the sample data" if data["is_sample"] else "your records"


def describe_data(data: dict[str, Any]) -> str:
    """Returns which records were read, and how large their images are."""
    owner = "sample data: drawings of ImageNet's sizes" if data["is_sample"] else "your records"
    kilobytes = data["bytes"] / data["num_records"] / 1e3
    parts = [owner, f"{data['num_records']:,} images of {kilobytes:,.0f} KB"]
    if data["mean_size"]:
        height, width = data["mean_size"]
        parts.append(f"{height:.0f}x{width:.0f} pixels (mean of {data['sizes_read']:,})")
    return ", ".join(parts)


def describe_reads(report: dict[str, Any]) -> str:
    """Returns how often the images were read, and from where."""
    rows = report["rows"].values()
    times = statistics.median(row["times_read"] for row in rows)
    disk = [row["disk_bytes"] for row in rows]
    if times >= 1.5:
        often = f"Each row read each image about {times:,.0f} times"
    else:
        often = f"Each row read about {min(times, 1):.0%} of the images"
    if None in disk:
        return f"{often}; whether from disk or memory is not known here."
    total = sum(disk)
    if total < _LITTLE * report["data"]["bytes"] and not report["data"]["is_remote"]:
        return f"{often}, from memory (the page cache): no disk was measured."
    return f"{often}; {total / 1e6:,.0f} MB came from disk."
