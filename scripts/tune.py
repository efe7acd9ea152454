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

from dali_tf_input import InputError, Stats, load_options, save_options
from support import cli
from support.flags import FileFlags, WorkFlags, backends_flag, begin
from support.throughput import candidates
from support.throughput.candidates import Candidate, CandidateError, Measurer, is_faster

FLAGS = cli.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_ORDER = FLAGS.choice("order", "global", ["global", "buffer"], "How the records are mixed.")
_BACKENDS = backends_flag(FLAGS)
_SECONDS = FLAGS.number("seconds", 120.0, "How long to measure.", 1)
_REPLICAS = FLAGS.integer("replicas", None, "Replicas that share the cores; else GPUs, or 1.", 1)
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
    about, backends = begin(_BACKENDS.value)
    replicas = _REPLICAS.value or max(1, about["tensorflow_gpus"])
    cores = max(1, about["cores"] // replicas)
    print(f"records   {spec.dataset.num_records:,}, order {spec.order}, {cores} cores per replica")
    defaults = [Candidate(_WORK.options(name), spec.order) for name in backends]
    plainly = spec.preprocess.resizes_plainly
    with (
        Measurer(_FILES, _WORK, f"--cores={cores}") as measurer,
        cli.Elapsed("tuning", seconds=None if _EXHAUSTIVE.value else _SECONDS.value) as elapsed,
    ):
        measurer.start()
        tuner = Tuner(measurer, elapsed)
        default = tuner.find_fastest(defaults)
        near = [one for one in defaults if tuner.best_rate(one) >= 0.7 * tuner.best_rate(default)]
        rivals = [rival for one in near for rival in list_rivals(one, cores, plainly=plainly)]
        winner = tuner.halve([one for one in rivals if one.key != default.key])
        beside = [winner, *([Candidate(against, spec.order)] if against else [])]
        ratios = tuner.compare([one for one in beside if one.key != default.key], default)
    return report(tuner, winner, default, ratios, {**about, "replicas": replicas})


def list_rivals(default: Candidate, cores: int, *, plainly: bool) -> list[Candidate]:
    """Returns the combinations of options that may be faster than a backend's default."""
    space = candidates.changes(default.options, default.order, cores, plainly=plainly)
    values = ([getattr(default.options, name), *others] for name, others in space.items())
    combined = (dict(zip(space, one, strict=True)) for one in itertools.product(*values))
    return [
        dataclasses.replace(default, options=dataclasses.replace(default.options, **one))
        for one in combined
    ]


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
        self._costs: list[float] = []  # seconds of a window, with the making of its pipeline

    def left(self, part: float = 1.0) -> float:
        """Returns the seconds left of a part of the time; infinite in an exhaustive run."""
        end = math.inf if _EXHAUSTIVE.value else self._start + part * _SECONDS.value
        return end - time.monotonic()

    def best_rate(self, candidate: Candidate) -> float:
        """Returns images/s of a candidate's fastest window; 0 if there is none."""
        return max(self.rates.get(candidate.key, [0.0]))

    def measure(self, candidate: Candidate, seconds: float = _WINDOW) -> float:
        """Measures a window; returns its images/s, 0 if the candidate is refused."""
        key = candidate.key
        self.candidates[key] = candidate
        if key in self.refused:
            return 0.0
        self._elapsed.show(f"{candidate.backend}: {describe(candidate)}")
        start = time.monotonic()
        try:
            rate = candidates.images_per_second(self._measurer.measure(candidate, seconds=seconds))
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
        if not self.rates:
            raise InputError(f"No backend could be measured: {'; '.join(self.refused.values())}")
        return max(defaults, key=self.best_rate)

    def halve(self, rivals: list[Candidate]) -> Candidate:
        """Drops the slower half in each round; windows double. Returns the last one left."""
        part = 1 - _FINAL_PART
        if _EXHAUSTIVE.value:
            print(f"combinations  {len(rivals):,}", flush=True)
        else:  # as many as the time allows; two rounds' worth of windows in all
            cost = statistics.median(self._costs) + 2 * _WINDOW
            fits = max(1, int(self.left(part) / (2 * cost)))
            rivals = random.Random(0).sample(rivals, min(len(rivals), fits))
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
        least, most = _FINAL_ROUNDS

        def is_over(number: int) -> bool:  # with little time, it is exceeded by a quarter
            return self.left() < (-_SECONDS.value / 4 if number < least else 0)

        return candidates.compare(
            {one.key: one for one in rivals},
            default,
            lambda one: self.measure(one, 2 * _WINDOW),
            rounds=most,
            is_over=is_over,
        )

    def describe_all(self, default: Candidate, ratios: dict) -> list[tuple[str, ...]]:
        """Returns the lines of the table: what was compared, the ten fastest, what was refused."""
        rates = {key: Stats.of(values) for key, values in self.rates.items()}
        by_rate = sorted(rates, key=lambda key: -rates[key].median)
        lines = []
        for key in sorted({default.key, *ratios, *by_rate[:10]} & set(rates), key=by_rate.index):
            one, base = rates[key], rates[default.key].median
            verdict = "default" if key == default.key else ""
            if ratios.get(key):
                verdict = "faster" if is_faster(ratios[key]) else "not faster beyond noise"
            shown = (f"{rate / base:.2f}" for rate in (one.median, one.minimum, one.maximum))
            windows = str(len(self.rates[key]))
            lines.append((self._name(key), f"{one.median:,.0f}", *shown, windows, verdict))
        for key, reason in self.refused.items():
            lines.append((self._name(key), *("-",) * 5, f"refused: {reason.splitlines()[0]}"))
        return lines

    def _name(self, key: str) -> str:
        return f"{self.candidates[key].backend}: {describe(self.candidates[key])}"


def describe(candidate: Candidate) -> str:
    """Returns how a candidate differs from the default of its backend."""
    return candidate.describe(Candidate(_WORK.options(candidate.backend), candidate.order))


def report(
    tuner: Tuner, winner: Candidate, default: Candidate, ratios: dict, about: dict[str, Any]
) -> int:
    """Prints what was found, and writes the files."""
    gains = ratios.get(winner.key, [])
    stats = Stats.of(gains or [1.0])
    better = is_faster(gains)
    print()
    cli.print_table(_COLUMNS, tuner.describe_all(default, ratios))
    print()
    spread = f"{stats.minimum:.2f} to {stats.maximum:.2f} in {len(gains)} rounds"
    if better:
        print(f"chosen    {winner.backend}: {describe(winner)}")
        text = f"times the images/s of {default.backend}'s default ({spread})"
        print(f"gain      {stats.median:.2f} {text}")
    else:
        print(f"chosen    the default, {default.backend}: no setting was significantly faster")
        if gains:
            print(f"closest   {describe(winner)}: {stats.median:.2f} ({spread})")
    taken = cli.format_seconds(_SECONDS.value - tuner.left())
    duration = "" if _EXHAUSTIVE.value else f" in {taken}"
    print(f"tried     {len(tuner.candidates):,} settings{duration}")
    about |= {"order": _ORDER.value, "batch_size": _WORK.batch_size.value}
    about |= {"work": _WORK.preprocess().describe(), "default": default.to_json()}
    about |= {"gain_over_default": vars(stats) if better else {"median": 1.0}}
    save_options((winner if better else default).options, _OUT.value, about=about)
    print(f"options   in {_OUT.value}: scripts/train.py --options={shlex.quote(_OUT.value)}")
    if _JSON.value:
        trials = [
            {**one.to_json(), "images_per_second": tuner.rates.get(key), "ratios": ratios.get(key)}
            for key, one in tuner.candidates.items()
        ]
        cli.write_json(_JSON.value, {**about, "trials": trials})
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, FLAGS))
