"""Faster options for this machine and these files, for `compare_throughput.py --tune`.

A dozen settings of the fastest backend are measured against its default, in turn, round by
round. A setting is chosen only if its slowest round beats the default's median, and if it changes
the speed and not the pixels.
"""

import dataclasses
import sys
from typing import Any

from dali_tf_input import DaliOptions, InputError, TfDataOptions
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import check_list
from support.benchmark import Stats
from support.flags import BACKENDS, FileFlags, WorkFlags, begin
from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second

_COLUMNS = ("setting", "images/s", "min", "max", "x default", "")
TRIED = (
    *("decode", "hw_decoder_load", "jpeg_fancy_upsampling", "num_parallel_calls", "read_mode"),
    *("num_parallel_reads", "num_threads", "prefetch_batches", "prefetch_queue_depth"),
    "read_buffer_bytes",
)

Rates = dict[Candidate, list[float]]  # images/s of each window; none of those that are refused


def tune(
    files: FileFlags,
    work: WorkFlags,
    order: str,
    backends: list[str] | None,
    *,
    replicas: int | None,
    only: list[str] | None = None,
    **window: Any,
) -> dict[str, Any]:
    """Chooses options, prints them as Python, and returns what was measured.

    `replicas` share the cores, by default one for each GPU; `only`: the options that are tried, by
    default all; `window`: seconds and repeats.
    """
    check_list("only", only, list(TRIED))
    if work.decode.present:
        raise InputError("--tune chooses `decode` itself: leave out --decode.")
    spec = work.spec(files, order)
    about, names = begin(backends)
    replicas = replicas or max(1, about["tensorflow_gpus"])
    cores = max(1, about["cores"] // replicas)
    print(f"records   {spec.records.num_records:,}, order {order}, {cores} cores per replica")
    defaults = [Candidate(work.options(name), order) for name in names]
    with Measurer(*files.as_arguments(), *work.as_arguments(), f"--cores={cores}") as measurer:
        rates = measure(measurer, defaults, **window | {"repeats": 1})
        if not any(rates.values()):
            raise InputError("No backend could be measured.")
        default = max(defaults, key=lambda candidate: max(rates[candidate], default=0))
        settings = list_settings(default, cores, plainly=spec.preprocess.resizes_plainly, only=only)
        rates = measure(measurer, [default, *settings], **window)
    chosen = choose(rates, default)
    print()
    command.print_table(_COLUMNS, [format_row(candidate, rates, chosen) for candidate in rates])
    print()
    if chosen == default:
        why = "no setting's slowest round beats its median"
        why = "one round chooses nothing: --repeats=3" if window["repeats"] == 1 else why
        print(f"chosen    the default: {why}")
    print(f"options   {as_python(chosen.options)}")
    trials = [
        {**candidate.to_json(), "images_per_second": values} for candidate, values in rates.items()
    ]
    shared = {"replicas": replicas, "order": order, "options": repr(chosen.options)}
    shared["num_records"] = spec.records.num_records
    return {**about, **shared, "trials": trials}


def list_settings(
    default: Candidate, cores: int, *, plainly: bool, only: list[str] | None = None
) -> list[Candidate]:
    """Returns options that may be faster: each with one change, but for chroma also with two.

    They make the default's pixels, but for chroma (`changes_pixels`).

    Args:
      default: what they are compared with.
      cores: how many a replica has.
      plainly: whether the preprocessing resizes plainly (`Preprocess.resizes_plainly`).
      only: the options that are changed; None changes all.

    Raises:
      InputError: none of `only` is tried on this backend.
    """
    options = default.options
    threads = [max(1, cores // 2), cores, cores + 1, 2 * cores]
    if isinstance(options, TfDataOptions):
        changes: dict[str, list[Any]] = {
            "num_parallel_calls": threads,
            "num_parallel_reads": [1, 4, 64],
            "decode": ["region" if plainly else "full"],
            "read_buffer_bytes": [1 << 18],
            "prefetch_batches": [4],
        }
    else:
        changes = {"num_threads": threads, "prefetch_queue_depth": [1, 4]}
        on_gpu = options.device == "gpu"
        changes |= {"hw_decoder_load": [0.5, 0.8, 0.9, 1.0]} if on_gpu else {"decode": ["full"]}
        uses_dali_reader = on_gpu and default.order == "buffer"
        changes |= {"read_mode": ["plain"]} if uses_dali_reader else {}
        changes |= {"jpeg_fancy_upsampling": [False]} if on_gpu else {}
    assert set(changes) <= set(TRIED)
    names = check_list("only", only and [one for one in only if one in changes], list(changes))
    settings = [
        dataclasses.replace(default, options=dataclasses.replace(options, **{name: value}))
        for name, values in changes.items()
        for value in values
        if name in names
    ]
    if "jpeg_fancy_upsampling" in names:
        both: dict[str, Any] = {"jpeg_fancy_upsampling": False, "hw_decoder_load": 0.9}
        settings.append(dataclasses.replace(default, options=dataclasses.replace(options, **both)))
    return list(dict.fromkeys(setting for setting in settings if setting != default))


def measure(
    measurer: Measurer, candidates: list[Candidate], *, seconds: float, repeats: int
) -> Rates:
    """Measures candidates in turn, round by round, in one process that starts again if it dies."""
    rates: Rates = {candidate: [] for candidate in candidates}
    refused: set[Candidate] = set()
    turns = [
        candidate
        for number in range(repeats)
        for candidate in candidates[:: 1 if number % 2 else -1]
    ]
    for candidate in command.progress(turns, what="tuning", total=len(turns)):
        if candidate in refused:
            continue
        try:
            window = measurer.measure(candidate, seconds=seconds)
            rates[candidate].append(images_per_second(window))
            if not sys.stderr.isatty():  # else a bar is shown; kept if this is stopped
                print(f"{describe(candidate)}: {rates[candidate][-1]:,.0f} images/s", flush=True)
        except CandidateError as error:
            refused.add(candidate)
            rates[candidate] = []
            print(f"refused   {describe(candidate)}: {str(error).splitlines()[0]}")
    return rates


def choose(rates: Rates, default: Candidate) -> Candidate:
    """Returns the candidate of the highest median whose slowest round beats the default's median.

    The default if there is none, or if there was one round only. Never one that changes pixels.
    """
    if len(rates[default]) == 1:
        return default
    base = Stats.of(rates[default]).median if rates[default] else 0.0
    stats = {candidate: Stats.of(values) for candidate, values in rates.items() if values}
    faster = [one for one in stats if stats[one].minimum > base and not changes_pixels(one)]
    return max(faster, key=lambda candidate: stats[candidate].median, default=default)


def changes_pixels(candidate: Candidate) -> bool:
    """Returns whether a setting makes other pixels than the default."""
    return not getattr(candidate.options, "jpeg_fancy_upsampling", True)


def describe(candidate: Candidate) -> str:
    """Returns a candidate's backend, and how it differs from its default."""
    return f"{candidate.backend}: {candidate.describe(BACKENDS[candidate.backend])}"


def format_row(candidate: Candidate, rates: Rates, chosen: Candidate) -> tuple[str, ...]:
    """Returns the line of a candidate in the table; the default comes first."""
    if not rates[candidate]:
        return describe(candidate), "-", "-", "-", "-", "refused"
    default = next(iter(rates))
    stats, base = Stats.of(rates[candidate]), Stats.of(rates[default] or [1.0]).median
    speeds = (f"{rate:,.0f}" for rate in (stats.median, stats.minimum, stats.maximum))
    verdict = "other chroma" if changes_pixels(candidate) else ""
    verdict = "chosen" if candidate == chosen else verdict
    return describe(candidate), *speeds, f"{stats.median / base:.2f}", verdict


def as_python(options: DaliOptions | TfDataOptions) -> str:
    """Returns the expression that makes `options`, to be pasted: without defaults."""
    fields = ((field, getattr(options, field.name)) for field in dataclasses.fields(options))
    arguments = [f"{field.name}={value!r}" for field, value in fields if value != field.default]
    return f"{type(options).__name__}({', '.join(arguments)})"
