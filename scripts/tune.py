"""Finds the options that feed this machine fastest from these files, within the time given.

Only what changes the speed and not the pixels is tried. As many combinations as the time allows
start in short windows; round by round the slower half is dropped. The last one left is measured
against the default in separate rounds. If it is faster beyond noise (signed-rank test, 5%),
it is printed, as a Python expression to paste; otherwise the default is. With --replicas=N one
pipeline is measured on its share of the cores.

example: python scripts/tune.py --files='path/train-*' --seconds=300
"""

import dataclasses
import itertools
import math
import random
import statistics
import sys
import time
from typing import Any

from dali_tf_input import DaliOptions, InputError, TfDataOptions
from dali_tf_input.cli import command
from dali_tf_input.cli.flags import FileFlags, WorkFlags, backends_flag, begin, describe_work
from dali_tf_input.spec.options import AUTOTUNE
from support.benchmark import Stats, format_stats
from support.throughput.candidates import Candidate, CandidateError, Measurer, images_per_second

FLAGS = command.Flags()
_FILES = FileFlags(FLAGS)
_WORK = WorkFlags(FLAGS)
_ORDER = FLAGS.choice("order", "global", ["global", "buffer"], "How the records are mixed.")
_BACKENDS = backends_flag(FLAGS)
_SECONDS = FLAGS.number("seconds", 120.0, "How long to measure.", 1)
_REPLICAS = FLAGS.integer("replicas", None, "Replicas that share the cores; else GPUs, or 1.", 1)
_JSON = FLAGS.string("json", None, "File for everything that was measured.")

_COLUMNS = ("setting", "images/s", "x default", "min", "max", "windows", "verdict")
_WINDOW = 0.4  # seconds; doubles in each round of halving
_FINAL_PART = 0.35  # of the time is kept for the final rounds
_FINAL_ROUNDS = (8, 60)  # at least, where there is time, and at most


def main(arguments: list[str]) -> int:
    command.check_no_arguments(arguments)
    if _WORK.decode.present:
        raise InputError("tune.py chooses `decode` itself: leave out --decode.")
    command.check_writable(_JSON)
    spec = _WORK.spec(_FILES, _ORDER.value)
    about, backends = begin(_BACKENDS.value)
    replicas = _REPLICAS.value or max(1, about["tensorflow_gpus"])
    cores = max(1, about["cores"] // replicas)
    print(f"records   {spec.records.num_records:,}, order {spec.order}, {cores} cores per replica")
    defaults = [Candidate(_WORK.options(name), spec.order) for name in backends]
    flags = (*_FILES.as_arguments(), *_WORK.as_arguments(), f"--cores={cores}")
    with Measurer(*flags) as measurer, command.status("tuning") as status:
        measurer.start()
        tuner = Tuner(measurer, status)
        default = tuner.find_fastest(defaults)
        near = [
            candidate
            for candidate in defaults
            if tuner.best_rate(candidate) >= 0.7 * tuner.best_rate(default)
        ]
        plainly = spec.preprocess.resizes_plainly
        rivals = {
            rival for candidate in near for rival in list_rivals(candidate, cores, plainly=plainly)
        }
        winner = tuner.halve(sorted(rivals - {default}, key=repr))
        ratios = tuner.compare(winner, default)
    return report(tuner, winner, default, ratios, {**about, "replicas": replicas})


def list_rivals(default: Candidate, cores: int, *, plainly: bool) -> list[Candidate]:
    """Returns combinations of options that make a default's pixels, and may be faster.

    `plainly`: whether the preprocessing resizes plainly (`Preprocess.resizes_plainly`).
    """
    options = default.options
    threads = sorted({max(1, cores // 2), cores, 2 * cores})
    if isinstance(options, TfDataOptions):
        changes = {
            "decode": ["region" if plainly else "full"],
            "num_parallel_calls": threads,
            "num_parallel_reads": [1, 4],
            "read_buffer_bytes": [1 << 18],
            "prefetch_batches": [4, AUTOTUNE],
        }
    else:
        changes = {"num_threads": threads, "prefetch_queue_depth": [1, 4]}
        # Decoding regions was reported to crash on some GPUs.
        on_gpu = options.device == "gpu"
        changes |= {"hw_decoder_load": [0.0, 0.5, 0.75, 0.9]} if on_gpu else {"decode": ["full"]}
        reads_by_itself = on_gpu and default.order == "buffer"
        changes |= {"read_mode": ["plain"]} if reads_by_itself else {}
    values = ([getattr(options, name), *others] for name, others in changes.items())
    combined = (dict(zip(changes, choice, strict=True)) for choice in itertools.product(*values))
    replace = dataclasses.replace
    return [replace(default, options=replace(options, **fields)) for fields in combined]


def is_faster(ratios: list[float]) -> bool:
    """Whether ratios to the default, round by round, show a gain beyond noise.

    Wilcoxon's signed-rank test, one-sided, at 5%, and a median above 1. It takes at least five
    rounds.
    """
    from scipy import stats

    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 5 or not any(logs) or statistics.median(ratios) <= 1:
        return False
    return stats.wilcoxon(logs, alternative="greater").pvalue <= 0.05


class Tuner:
    """Measures candidates within the time given, and keeps all that was measured.

    Attributes:
      rates: images/s of each candidate's windows.
      refused: why candidates cannot be measured.
    """

    def __init__(self, measurer: Measurer, status: Any) -> None:
        self._measurer, self._status = measurer, status
        self._start = time.monotonic()
        self.rates: dict[Candidate, list[float]] = {}
        self.refused: dict[Candidate, str] = {}

    def left(self, part: float = 1.0) -> float:
        """Returns the seconds left of a part of the time."""
        return self._start + part * _SECONDS.value - time.monotonic()

    def best_rate(self, candidate: Candidate) -> float:
        """Returns images/s of a candidate's fastest window; 0 if there is none."""
        return max(self.rates.get(candidate, [0.0]))

    def measure(self, candidate: Candidate, seconds: float = _WINDOW) -> float:
        """Measures a window; returns its images/s, 0 if the candidate is refused."""
        if candidate in self.refused:
            return 0.0
        left = command.format_seconds(max(0.0, self.left()))
        self._status.update(f"tuning, {left} left: {describe(candidate)}")
        try:
            rate = images_per_second(self._measurer.measure(candidate, seconds=seconds))
        except CandidateError as error:
            self.refused[candidate] = str(error)
            return 0.0
        self.rates.setdefault(candidate, []).append(rate)
        return rate

    def find_fastest(self, defaults: list[Candidate]) -> Candidate:
        """Returns the fastest default, by the better of two windows."""
        for default in defaults * 2:
            if default not in self.rates or self.left(0.3) > 0:
                self.measure(default)
        if not self.rates:
            raise InputError(f"No backend could be measured: {'; '.join(self.refused.values())}")
        return max(defaults, key=self.best_rate)

    def halve(self, rivals: list[Candidate]) -> Candidate:
        """Drops the slower half in each round; windows double. Returns the last one left."""
        part = 1 - _FINAL_PART
        # As many as the time allows; two rounds' worth of windows in all, and longer ones later.
        cost = (_SECONDS.value - self.left()) / sum(map(len, self.rates.values())) + 2 * _WINDOW
        fits = max(1, int(self.left(part) / (2 * cost)))
        rivals = random.Random(0).sample(rivals, min(len(rivals), fits))
        seconds = _WINDOW
        while len(rivals) > 1:
            scores = {}
            for rival in random.Random(len(rivals)).sample(rivals, len(rivals)):
                if self.left(part) < 0:
                    break
                scores[rival] = self.measure(rival, seconds)
            if len(scores) < len(rivals):  # the time is up: the best of what was measured longest
                rivals = [candidate for candidate in rivals if candidate in self.rates] or rivals
                return max(
                    rivals, key=lambda candidate: Stats.of(self.rates.get(candidate, [0])).median
                )
            rivals.sort(key=lambda candidate: -scores[candidate])
            rivals, seconds = rivals[: len(rivals) // 2], 2 * seconds
        return rivals[0]

    def compare(self, rival: Candidate, default: Candidate) -> list[float]:
        """Measures a rival against the default, round by round; returns its ratios of images/s."""
        min_rounds, max_rounds = _FINAL_ROUNDS
        ratios: list[float] = []
        for number in range(max_rounds):
            # With little time, it is exceeded by a quarter.
            if self.left() < (-_SECONDS.value / 4 if number < min_rounds else 0):
                break
            turn = [default, rival][:: 1 if number % 2 else -1]
            rates = {candidate: self.measure(candidate, 2 * _WINDOW) for candidate in turn}
            if rates[rival] and rates[default]:
                ratios.append(rates[rival] / rates[default])
        return ratios


def describe(candidate: Candidate) -> str:
    """Returns a candidate's backend, and how it differs from its default."""
    return f"{candidate.backend}: {candidate.describe(_WORK.options(candidate.backend))}"


def format_rows(tuner: Tuner, verdicts: dict[Candidate, str]) -> list[tuple[str, ...]]:
    """Returns the lines of the table: what was compared, the ten fastest, what was refused."""
    rates = {candidate: Stats.of(values) for candidate, values in tuner.rates.items()}
    base = rates[next(iter(verdicts))].median
    by_rate = sorted(rates, key=lambda candidate: -rates[candidate].median)
    lines = []
    for candidate in by_rate:
        if candidate in verdicts or candidate in by_rate[:10]:
            stats, windows = rates[candidate], str(len(tuner.rates[candidate]))
            ratios = (f"{v / base:.2f}" for v in (stats.median, stats.minimum, stats.maximum))
            verdict = verdicts.get(candidate, "")
            lines.append((describe(candidate), f"{stats.median:,.0f}", *ratios, windows, verdict))
    for candidate, reason in tuner.refused.items():
        lines.append((describe(candidate), *("-",) * 5, f"refused: {reason.splitlines()[0]}"))
    return lines


def as_python(options: DaliOptions | TfDataOptions) -> str:
    """Returns the expression that makes `options`, to be pasted: without defaults."""
    fields = ((field, getattr(options, field.name)) for field in dataclasses.fields(options))
    arguments = [f"{field.name}={value!r}" for field, value in fields if value != field.default]
    return f"{type(options).__name__}({', '.join(arguments)})"


def report(
    tuner: Tuner, winner: Candidate, default: Candidate, ratios: list[float], about: dict[str, Any]
) -> int:
    """Prints what was found, and writes the files."""
    stats, better = Stats.of(ratios or [1.0]), is_faster(ratios)
    verdicts = {default: "default"}
    if ratios:
        verdicts[winner] = "faster" if better else "not faster beyond noise"
    print()
    command.print_table(_COLUMNS, format_rows(tuner, verdicts))
    print()
    text = f"times the images/s of {default.backend}'s default, in {len(ratios)} rounds"
    gain = f"{format_stats(stats)} {text}"
    if better:
        print(f"chosen    {describe(winner)}")
        print(f"gain      {gain}")
    else:
        print(f"chosen    the default, {default.backend}: no setting was significantly faster")
        if ratios:
            print(f"closest   {describe(winner)}: {gain}")
    tried = len(tuner.rates) + len(tuner.refused.keys() - tuner.rates)
    print(
        f"tried     {tried:,} settings in {command.format_seconds(_SECONDS.value - tuner.left())}"
    )
    about |= {"order": _ORDER.value, "batch_size": _WORK.batch_size.value}
    about |= {"work": describe_work(_WORK.preprocess()), "default": default.to_json()}
    about |= {"gain_over_default": vars(stats) if better else {"median": 1.0}}
    chosen = (winner if better else default).options
    print(f"options   {as_python(chosen)}")
    if _JSON.value:
        about |= {"options": dataclasses.asdict(chosen)}
        trials = [
            {**candidate.to_json(), "images_per_second": v} for candidate, v in tuner.rates.items()
        ]
        trials += [
            {**candidate.to_json(), "refused": text} for candidate, text in tuner.refused.items()
        ]
        command.write_json(_JSON, {**about, "ratios": ratios, "trials": trials})
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main, FLAGS))
