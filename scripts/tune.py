"""Finds the options that feed this machine fastest from these files, within the time given.

Only what changes the speed and not the pixels is tried. All combinations that may help start in
short windows; round by round the slower half is dropped. The last one left is then measured against
the default in rounds of its own. Only if it is faster beyond noise (signed-rank test, 5%), it is
written; otherwise the default is. `load_options` and train.py --options read the file. With
--replicas=N one pipeline is measured on its share of the cores.

example: python scripts/tune.py --files='path/train-*' --seconds=300 --out=tuned.json
"""

import dataclasses
import itertools
import math
import os
import random
import shlex
import statistics
import sys
import time
from typing import Any

from dali_tf_input import AUTOTUNE, DaliOptions, InputError, Stats, load_options, save_options
from support import cli, machine
from support.flags import FileFlags, WorkFlags, choose_backends
from support.throughput.candidates import (
    Candidate,
    CandidateError,
    Measurer,
    images_per_second,
    is_faster,
)

FLAGS = cli.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_ORDER = FLAGS.choice("order", "global", ["global", "buffer"], "How the records are mixed.")
_BACKENDS = FLAGS.list("backends", None, "Of tf_data, dali_cpu, dali_gpu; else all that work here.")
_SECONDS = FLAGS.number("seconds", 120.0, "How long to measure.", 1)
_REPLICAS = FLAGS.integer(
    "replicas", None, "Replicas that share the cores; else the GPUs, or 1.", 1
)
_OUT = FLAGS.string("out", "tuned.json", "File for the options that were found.")
_JSON = FLAGS.string("json", None, "File for everything that was measured.")
_EXHAUSTIVE = FLAGS.boolean("exhaustive", False, "Try every combination, however long it takes.")
_AGAINST = FLAGS.string("against", None, "Options of an earlier run, measured beside the winner.")

_COLUMNS = ("setting", "images/s", "x default", "min", "max", "windows", "verdict")
_WINDOW = 0.4  # seconds; doubles in each round of halving
_FINAL_PART = 0.35  # of the time is kept for the final rounds
_FINAL_ROUNDS = (8, 60)  # at least, where there is time, and at most


def main(arguments: list[str]) -> int:
    cli.check_no_arguments(arguments)
    if _WORK.decode.present:
        raise InputError("tune.py chooses `decode` itself: leave out --decode.")
    cli.check_writable(_OUT.value, flag="out", suffix=".json")
    cli.check_writable(_JSON.value, flag="json")
    if _JSON.value and os.path.realpath(_JSON.value) == os.path.realpath(_OUT.value):
        raise InputError(f"`json` and `out` name the same file, {_OUT.value}: give each its own.")
    against = load_options(_AGAINST.value) if _AGAINST.value else None
    spec = _WORK.spec(_FILES.dataset(), _ORDER.value)
    about = machine.describe()
    num_gpus = machine.count_gpus_of_tensorflow() if about["gpus"] else 0
    backends = choose_backends(_BACKENDS.value, has_gpu=num_gpus > 0)
    replicas = _REPLICAS.value or max(1, num_gpus)
    cores = max(1, about["cores"] // replicas)
    machine.print_lines(about)
    print(f"records   {spec.dataset.num_records:,}, order {spec.order}, {cores} cores per replica")
    defaults = [Candidate(_WORK.options(name), spec.order) for name in backends]
    with (
        Measurer(_FILES, _WORK, f"--cores={cores}") as measurer,
        cli.Elapsed("tuning", seconds=None if _EXHAUSTIVE.value else _SECONDS.value) as elapsed,
    ):
        measurer.start()
        tuner = Tuner(measurer, elapsed)
        default = tuner.find_fastest(defaults)
        plainly = spec.preprocess.resizes_plainly
        rivals = [
            rival
            for one in defaults
            if tuner.is_in_reach(one, default)
            for rival in list_rivals(one, spec.order, cores=cores, resizes_plainly=plainly)
        ]
        winner = tuner.halve([one for one in rivals if one.key != default.key])
        beside = [one for one in (winner, against and Candidate(against, spec.order)) if one]
        ratios = tuner.compare([one for one in beside if one.key != default.key], default)
    return report(tuner, winner, default, ratios, {**about, "replicas": replicas})


def list_rivals(
    default: Candidate, order: str, *, cores: int, resizes_plainly: bool
) -> list[Candidate]:
    """Returns the combinations of options that may be faster than a backend's default."""
    threads = sorted({max(1, cores // 2), cores, 2 * cores})
    space: dict[str, list[Any]]
    if isinstance(default.options, DaliOptions):
        gpu = default.options.device == "gpu"
        space = {"num_threads": [None, *threads], "prefetch_queue_depth": [2, 1, 4]}
        # Decoding regions was reported to crash on some GPUs.
        space |= {"hw_decoder_load": [None, 0.0, 0.5, 0.9]} if gpu else {"decode": ["auto", "full"]}
        if order == "buffer":
            space["read_mode"] = ["mmap", "plain"]
    else:
        space = {
            "decode": ["auto", "region" if resizes_plainly else "full"],
            "num_parallel_calls": [AUTOTUNE, *threads],
            "num_parallel_reads": [4, 1, 16],
            "read_buffer_bytes": [1 << 20, 1 << 18],
            "prefetch_batches": [2, 4],
        }
    options = (
        dataclasses.replace(default.options, **dict(zip(space, values, strict=True)))
        for values in itertools.product(*space.values())
    )
    return [dataclasses.replace(default, options=one) for one in options]


class Tuner:
    """Measures candidates within the time given, and keeps all that was measured.

    Attributes:
      rates: images/s of each candidate's windows, by its key.
      refused: why candidates cannot be measured, by key.
      candidates: by key.
    """

    def __init__(self, measurer: Measurer, elapsed: cli.Elapsed) -> None:
        self._measurer, self._elapsed = measurer, elapsed
        self._start = time.monotonic()
        self.rates: dict[str, list[float]] = {}
        self.refused: dict[str, str] = {}
        self.candidates: dict[str, Candidate] = {}
        self._costs = [
            1.0
        ]  # seconds of a window, with the making of its pipeline; the first is a guess

    def left(self, part: float = 1.0) -> float:
        """Returns the seconds left of a part of the time; infinite in an exhaustive run."""
        return (
            math.inf
            if _EXHAUSTIVE.value
            else self._start + part * _SECONDS.value - time.monotonic()
        )

    def measure(self, candidate: Candidate, seconds: float = _WINDOW) -> float:
        """Measures a window; returns its images/s, 0 if the candidate is refused."""
        key = candidate.key
        self.candidates[key] = candidate
        if key in self.refused:
            return 0.0
        self._elapsed.show(f"{candidate.backend}: {describe(candidate)}")
        start = time.monotonic()
        try:
            rate = images_per_second(self._measurer.measure(candidate, seconds=seconds))
        except CandidateError as error:
            self.refused[key] = str(error)
            return 0.0
        self._costs.append(time.monotonic() - start)
        self.rates.setdefault(key, []).append(rate)
        return rate

    def find_fastest(self, defaults: list[Candidate]) -> Candidate:
        """Returns the fastest default, by the better of two windows."""
        for default in defaults * 2:
            if default.key not in self.rates or self.left(0.3) > 0:
                self.measure(default)
        measured = [one for one in defaults if one.key in self.rates]
        if not measured:
            raise InputError(f"No backend could be measured: {'; '.join(self.refused.values())}")
        return max(measured, key=lambda one: max(self.rates[one.key]))

    def is_in_reach(self, one: Candidate, fastest: Candidate) -> bool:
        """Whether a backend is not hopelessly behind, so that its options are worth trying."""
        return max(self.rates.get(one.key, [0])) >= 0.7 * max(self.rates[fastest.key])

    def halve(self, rivals: list[Candidate]) -> Candidate:
        """Drops the slower half in each round; windows double. Returns the last one left."""
        part = 1 - _FINAL_PART
        cost = statistics.median(self._costs[1:] or self._costs) + 2 * _WINDOW
        if not _EXHAUSTIVE.value:  # as many as the time allows; two rounds' worth of windows in all
            fits = max(1, int(self.left(part) / (2 * cost)))
            rivals = random.Random(0).sample(rivals, min(len(rivals), fits))
        else:
            print(f"combinations  {len(rivals):,}", flush=True)
        seconds = _WINDOW
        while len(rivals) > 1:
            scores = {}
            for rival in random.Random(len(rivals)).sample(rivals, len(rivals)):
                if self.left(part) < 0:
                    break
                scores[rival.key] = self.measure(rival, seconds)
            if len(scores) < len(rivals):  # the time is up: the best of what was measured longest
                rivals = [one for one in rivals if self.rates.get(one.key)] or rivals
                return max(rivals, key=lambda one: Stats.of(self.rates.get(one.key, [0])).median)
            rivals.sort(key=lambda one: -scores[one.key])
            rivals, seconds = rivals[: len(rivals) // 2], 2 * seconds
        return rivals[0]

    def compare(self, rivals: list[Candidate], default: Candidate) -> dict[str, list[float]]:
        """Measures rivals against the default, round by round; returns their ratios by key."""
        ratios: dict[str, list[float]] = {one.key: [] for one in rivals}
        for number in range(_FINAL_ROUNDS[1] if rivals else 0):
            if number >= _FINAL_ROUNDS[0] and self.left() < 0:
                break
            if self.left() < -_SECONDS.value / 4:
                break  # the time was far too short
            turn = [default, *rivals] if number % 2 else [*rivals, default]
            rates = {one.key: self.measure(one, 2 * _WINDOW) for one in turn}
            for one in rivals:
                if rates[one.key] and rates[default.key]:
                    ratios[one.key].append(rates[one.key] / rates[default.key])
        return ratios


def describe(candidate: Candidate) -> str:
    """Returns how a candidate differs from the default of its backend."""
    default = Candidate(_WORK.options(candidate.backend), candidate.order)
    return candidate.describe(default)


def report(
    tuner: Tuner, winner: Candidate, default: Candidate, ratios: dict, about: dict[str, Any]
) -> int:
    """Prints what was found, and writes the files."""
    gains = ratios.get(winner.key, [])
    stats = Stats.of(gains or [1.0])
    better = is_faster(gains)
    chosen = winner if better else default
    base = Stats.of(tuner.rates[default.key]).median
    lines = []
    by_rate = sorted(tuner.rates, key=lambda key: -Stats.of(tuner.rates[key]).median)
    shown = dict.fromkeys([default.key, *ratios, *by_rate[:10]])
    for key in sorted(shown, key=by_rate.index):
        rates = Stats.of(tuner.rates[key])
        verdict = "default" if key == default.key else ""
        if ratios.get(key):
            verdict = "faster" if is_faster(ratios[key]) else "not faster beyond noise"
        candidate = tuner.candidates[key]
        compared = (rates.median, rates.minimum, rates.maximum)
        lines.append(
            (
                f"{candidate.backend}: {describe(candidate)}",
                f"{rates.median:,.0f}",
                *(f"{rate / base:.2f}" for rate in compared),
                str(len(tuner.rates[key])),
                verdict,
            )
        )
    for key, reason in tuner.refused.items():
        candidate = tuner.candidates[key]
        text = f"refused: {reason.splitlines()[0]}"
        lines.append((f"{candidate.backend}: {describe(candidate)}", *("-",) * 5, text))
    print()
    cli.print_table(_COLUMNS, lines)
    print()
    spread = f"{stats.minimum:.2f} to {stats.maximum:.2f} in {len(gains)} rounds"
    if better:
        print(f"chosen    {winner.backend}: {describe(winner)}")
        print(
            f"gain      {stats.median:.2f} times the images/s of {default.backend}'s default"
            f" ({spread})"
        )
    else:
        print(f"chosen    the default, {default.backend}: no setting was significantly faster")
        if gains:
            print(f"closest   {describe(winner)}: {stats.median:.2f} ({spread})")
    taken = cli.format_seconds(_SECONDS.value - tuner.left())
    duration = "" if _EXHAUSTIVE.value else f" in {taken}"
    print(f"tried     {len(tuner.candidates):,} settings{duration}")
    about = {
        "command": shlex.join(sys.argv),
        **about,
        "order": _ORDER.value,
        "batch_size": _WORK.batch_size.value,
        "work": _WORK.preprocess().describe(),
        "gain_over_default": vars(stats) if better else {"median": 1.0},
        "default": default.to_json(),
    }
    save_options(chosen.options, _OUT.value, about=about)
    print(f"options   in {_OUT.value}: scripts/train.py --options={shlex.quote(_OUT.value)}")
    if _JSON.value:
        trials = [
            {
                **one.to_json(),
                "images_per_second": tuner.rates.get(key, []),
                "ratios": ratios.get(key),
            }
            for key, one in tuner.candidates.items()
        ]
        cli.write_json(_JSON.value, {**about, "trials": trials})
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
