"""Finds the options that feed this machine fastest from these files: measures settings, within the time given.

usage: tune.py --files=GLOB [--seconds=120] [--out=tuned.json] [--backends=tf_data,dali_cpu] [--order=global] [--batch_size=64]
               [--crop=resize_random_crop] [--image_size=224] [--antialias] [--dtype=float32] [--json=PATH] [--exhaustive]
               [--against=OTHER.json]

Only what changes the speed and not the pixels is tried. From the default of each backend on, one option after the other is
changed and measured against the best so far, in turn; losers are dropped after one window. Last the winner is measured against
the default anew; where it is not faster beyond noise, the default is what is written. `DaliOptions.load`, `TfDataOptions.load`,
`load_options` and train.py --options read the file. --exhaustive tries every combination, whatever it takes.
"""

import dataclasses
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

import backends
import console
import machine
import settings
from dali_tf_input import AUTOTUNE, DaliOptions, InputError, Spread, TfDataOptions, load_options, save_options
from settings import Setting

_BACKENDS = flags.DEFINE_list("backends", None, "Of tf_data, dali_cpu and dali_gpu; by default all that this machine has.")
_SECONDS = flags.DEFINE_float("seconds", 120.0, "How long to measure, from the moment TensorFlow is there; above 0.")
_OUT = flags.DEFINE_string("out", "tuned.json", "File for the options that were found.")
_JSON = flags.DEFINE_string("json", None, "File for everything that was measured.")
_EXHAUSTIVE = flags.DEFINE_boolean("exhaustive", False, "Measure every combination instead; --seconds then bounds nothing.")
_AGAINST = flags.DEFINE_string("against", None, "Options that an earlier run wrote, to be measured beside the winner.")

_FINAL_ROUNDS = (3, 9)  # of the winner against the default: at least, where there is time, and at most
_RESERVED_ROUNDS = 5  # for which the search leaves time
_WINDOW_PART, _WINDOW = 0.008, (0.3, 2.0)  # of the time, in seconds
_LOSES = 0.97  # times the best so far in its first window, and a setting is dropped
_WINS = 1.01  # times the best so far in the median of three windows, and a setting takes its place
_TRIES = 3
_HOPELESS = 0.7  # times the best default, and a backend is dropped
_COLUMNS = ("setting", "images/s", "x default", "min", "max", "windows", "verdict")


class Trial:
    """A setting, its windows, and what came of it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.ratios: list[float] = []  # to the default of the package, or of the round
        self.rates: list[float] = []
        self.verdict = ""

    def to_json(self) -> dict[str, Any]:
        return {**self.setting.to_json(), "images_per_second": self.rates, "verdict": self.verdict}


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.seconds = seconds
        self.window = min(max(_WINDOW_PART * seconds, _WINDOW[0]), _WINDOW[1])

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


class Tuner:
    """Measures settings within the time given, and keeps all that was measured."""

    def __init__(self, worker: settings.Worker, clock: Clock, show: Callable[[str], None]) -> None:
        self._worker = worker
        self._clock = clock
        self._show = show
        self.trials: dict[str, Trial] = {}
        self._costs = [2.0]  # seconds that a window takes with all that comes with it; the first is a guess

    def trial(self, setting: Setting) -> Trial:
        """Returns what is known of a setting."""
        return self.trials.setdefault(setting.key, Trial(setting))

    def has_time_for(self, windows: int, *, reserve: float = 0.0) -> bool:
        """Whether that many windows fit into what is left beside `reserve` seconds."""
        return self._clock.left - reserve >= windows * self.cost

    @property
    def cost(self) -> float:
        """Seconds that a window takes, with some allowance."""
        return 1.1 * sum(self._costs) / len(self._costs)

    def measure(self, setting: Setting) -> float | None:
        """Measures a window; returns its images/s, None where the setting is refused."""
        trial = self.trial(setting)
        self._show(f"{setting.backend}: {describe(setting)}")
        start = time.monotonic()
        try:
            window = self._worker.measure(setting, seconds=self._clock.window)
        except settings.SettingError as error:
            trial.verdict = f"refused: {error}"
            return None
        if not any(known.rates for known in self.trials.values()):
            self._costs.clear()
        self._costs.append(time.monotonic() - start)
        trial.rates.append(settings.images_per_second(window))
        return trial.rates[-1]

    def choose_backends(self, defaults: list[Setting]) -> list[Setting]:
        """Measures the default of each backend; returns those that are not hopeless, the fastest first."""
        for turn in range(2):
            for setting in defaults:
                begun = any(known.rates for known in self.trials.values())  # one window is measured however short the time is
                if not self.trial(setting).verdict and (not begun or self.has_time_for(1, reserve=turn * self.reserve)):
                    self.measure(setting)
        measured = [setting for setting in defaults if self.trial(setting).rates]
        if not measured:
            refusals = "; ".join(f"{setting.backend}: {self.trial(setting).verdict}" for setting in defaults)
            raise InputError(f"No backend could be measured. {refusals}")
        ranked = sorted(measured, key=lambda setting: -max(self.trial(setting).rates))
        best = max(self.trial(ranked[0]).rates)
        kept = [setting for setting in ranked if max(self.trial(setting).rates) >= _HOPELESS * best]
        for setting in ranked[len(kept) :]:
            self.trial(setting).verdict = "dropped: its backend is too slow here"
        return kept

    @property
    def reserve(self) -> float:
        """Seconds that are left for the winner against the default."""
        return 2 * _RESERVED_ROUNDS * self.cost

    def climb(self, best: Setting, space: dict[str, list[Any]]) -> Setting:
        """Changes one option after the other and keeps what is faster; returns the best that was found.

        Args:
          best: where to begin.
          space: values of each option (or of several, as a dict) in the order in which they are tried.
        """
        for values in space.values():
            rivals = [changed for value in values if (changed := change(best, value)) != best]
            rivals = [rival for rival in rivals if not self.trial(rival).verdict]
            ratios: dict[str, list[float]] = {rival.key: [] for rival in rivals}
            for turn in range(_TRIES):
                if not rivals or not self.has_time_for(len(rivals) + 1, reserve=self.reserve):
                    break
                reference = self.measure(best)
                if reference is None:
                    break
                for rival in list(rivals):
                    rate = self.measure(rival)
                    if rate is not None:
                        ratios[rival.key].append(rate / reference)
                    hopeless = turn == 0 and rate is not None and rate < _LOSES * reference
                    if turn == 1 and ratios[rival.key]:
                        hopeless = max(ratios[rival.key]) < 1  # two of three would have to be above
                    if rate is None or hopeless:
                        rivals.remove(rival)
                        self.trial(rival).verdict = self.trial(rival).verdict or "dropped early"
            for rival in rivals:
                self.trial(rival).verdict = "no faster" if len(ratios[rival.key]) == _TRIES else "no time left"
            whole = [rival for rival in rivals if len(ratios[rival.key]) == _TRIES]
            if whole:
                fastest = max(whole, key=lambda rival: Spread.of(ratios[rival.key]).median)
                spread = Spread.of(ratios[fastest.key])
                if spread.median >= _WINS and sorted(ratios[fastest.key])[1] > 1:
                    self.trial(fastest).verdict = "kept for a while"
                    best = fastest
        return best

    def compare(self, rivals: list[Setting], reference: Setting, *, rounds: int | None = None) -> dict[str, list[float]]:
        """Measures settings against a reference, round by round, in the time that is left; returns their ratios by key."""
        ratios: dict[str, list[float]] = {setting.key: [] for setting in rivals}
        for number in range(rounds or _FINAL_ROUNDS[1]):
            if rounds is None and number >= _FINAL_ROUNDS[0] and not self.has_time_for(len(rivals) + 1):
                break
            if rounds is None and number < _FINAL_ROUNDS[0] and self._clock.left < -self._clock.window:
                break  # the time was far too short
            turn = [reference, *rivals] if number % 2 == 0 else [*rivals, reference]
            rates = {setting.key: self.measure(setting) for setting in turn}
            base = rates[reference.key]
            if base is None or any(rate is None for rate in rates.values()):
                break
            for setting in rivals:
                ratios[setting.key].append(rates[setting.key] / base)
        return ratios


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files='path/train-*'.")
    if _SECONDS.value <= 0:
        raise InputError(f"`seconds` must be above 0, got {_SECONDS.value}.")
    console.check_writable(_OUT.value, flag="out", suffix=".json")
    if _JSON.value:
        console.check_writable(_JSON.value, flag="json")
    against = load_options(_AGAINST.value) if _AGAINST.value else None
    spec = settings.training_spec()
    about = machine.describe()
    has_gpu = bool(about["gpus"]) and machine.tensorflow_sees_a_gpu()
    here = settings.default_options(has_gpu=has_gpu)
    unknown = [name for name in _BACKENDS.value or [] if name not in here]
    if unknown or _BACKENDS.value == []:
        raise InputError(f"`backends` must be of {', '.join(here)} on this machine, got {', '.join(unknown) or 'none'}.")
    defaults = [Setting(here[name], spec.order) for name in _BACKENDS.value or here]
    machine.print_lines(about)
    print(f"records   {spec.dataset.num_records:,} in {console.count(len(spec.dataset.files), 'file')}, order {spec.order}")
    spaces = {
        setting.backend: space_of(setting.options, spec.order, cores=about["cores"], fixed=spec.preprocess.resizes_plainly)
        for setting in defaults
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        settings.Worker(os.path.join(folder, "log")) as worker,
        console.Elapsed("tuning", seconds=None if _EXHAUSTIVE.value else _SECONDS.value) as elapsed,
    ):
        worker.start()
        tuner = Tuner(worker, Clock(_SECONDS.value), elapsed.show)
        find = try_all if _EXHAUSTIVE.value else search
        winner = find(tuner, defaults, spaces)
        rivals = [setting for setting in dict.fromkeys([winner.key]) if winner.key != defaults[0].key]
        beside = [winner] if rivals else []
        other = Setting(against, spec.order) if against else None
        if other and other.key not in (winner.key, defaults[0].key):
            beside.append(other)
        rounds = _FINAL_ROUNDS[1] if _EXHAUSTIVE.value else None
        ratios = tuner.compare(beside, defaults[0], rounds=rounds) if beside else {}
    return report(tuner, winner, defaults, ratios, other, {"about": about, "spec": spec, "spaces": spaces})


def space_of(options: DaliOptions | TfDataOptions, order: str, *, cores: int, fixed: bool) -> dict[str, list[dict[str, Any]]]:
    """Returns the values of each option of a backend, those first that were seen to matter most.

    Args:
      options: the default.
      order: DALI reads "buffer" by itself.
      cores: that this process may use.
      fixed: whether the whole image is resized, so that `fuse` "auto" is "off" on tf.data.
    """
    threads = sorted({max(1, cores // 2), cores, cores + cores // 2, 2 * cores})
    if isinstance(options, TfDataOptions):
        return {
            "plan": [{"fuse": "auto"}, {"fuse": "decode" if fixed else "off"}],
            "threads": [{"num_parallel_calls": number} for number in (AUTOTUNE, *threads)],
            "reads": [{"num_parallel_reads": number} for number in (4, 1, 16)],
            "buffer": [{"read_buffer_bytes": size} for size in (1 << 20, 1 << 18, 1 << 22)],
            "prefetch": [{"prefetch_batches": number} for number in (2, 1, 4, AUTOTUNE)],
        }
    space: dict[str, list[dict[str, Any]]] = {
        "threads": [{"num_threads": number} for number in (None, *threads)],
        "plan": [{"fuse": "auto"}, {"fuse": "off" if options.device == "cpu" else "decode"}],
        "prefetch": [{"prefetch_queue_depth": number} for number in (2, 1, 3, 4)],
    }
    if options.device == "gpu":
        loads = [{"hw_decoder_load": load} for load in (None, 0.0, 0.25, 0.5, 0.75, 0.9, 1.0)]
        space = {"hardware decoder": loads, **space, "memory": [{"memory_hints": True}, {"memory_hints": False}]}
    if order == "buffer":
        modes = (("mmap", False), ("mmap", True), ("plain", False), ("direct", False))
        space["reader"] = [{"read_mode": mode, "read_ahead": ahead} for mode, ahead in modes]
    return space


def change(setting: Setting, values: dict[str, Any]) -> Setting:
    """Returns a setting with other options."""
    return dataclasses.replace(setting, options=dataclasses.replace(setting.options, **values))


def search(tuner: Tuner, defaults: list[Setting], spaces: dict[str, dict[str, list[Any]]]) -> Setting:
    """Returns the best setting that a climb from each backend's default finds in the time."""
    found = [tuner.climb(setting, spaces[setting.backend]) for setting in tuner.choose_backends(defaults)]
    return max(found, key=lambda setting: Spread.of(tuner.trial(setting).rates).median)


def try_all(tuner: Tuner, defaults: list[Setting], spaces: dict[str, dict[str, list[Any]]]) -> Setting:
    """Measures every combination once, the better half of them again, and so on; returns the best."""
    rivals = [setting for default in defaults for setting in combinations(default, spaces[default.backend])]
    print(f"combinations  {len(rivals):,}", flush=True)
    while len(rivals) > 1:
        for setting in rivals:
            tuner.measure(setting)
        measured = [setting for setting in rivals if tuner.trial(setting).rates]
        measured.sort(key=lambda setting: -Spread.of(tuner.trial(setting).rates).median)
        rivals = measured[: max(1, len(measured) // 2)]
        for setting in measured[len(rivals) :]:
            tuner.trial(setting).verdict = "slower"
    return rivals[0]


def combinations(default: Setting, space: dict[str, list[Any]]) -> Iterator[Setting]:
    """Yields every combination of the values of a backend."""
    for values in itertools.product(*space.values()):
        setting = default
        for value in values:
            setting = change(setting, value)
        yield setting


def describe(setting: Setting) -> str:
    """Says in what a setting differs from the default of its backend."""
    device = setting.options.device if isinstance(setting.options, DaliOptions) else None
    default = DaliOptions(device=device) if device else TfDataOptions()
    return settings.describe_difference(setting, dataclasses.replace(setting, options=default))


def report(
    tuner: Tuner,
    winner: Setting,
    defaults: list[Setting],
    ratios: dict[str, list[float]],
    other: Setting | None,
    known: dict[str, Any],
) -> int:
    """Prints the table and what was found, and writes the files."""
    default = defaults[0]
    gains = ratios.get(winner.key, [])
    spread = Spread.of(gains) if gains else None
    better = spread is not None and spread.median > 1 and sum(gain > 1 for gain in gains) > len(gains) / 2
    chosen = winner if better else default
    print()
    print_trials(tuner, default, chosen, winner)
    print()
    tried = sum(bool(trial.rates) for trial in tuner.trials.values())
    all_settings = sum(len(values) - 1 for space in known["spaces"].values() for values in space.values()) + len(defaults)
    if chosen is winner and spread:
        print(
            f"best      {winner.backend}: {describe(winner)}\n"
            f"gain      {spread.median:.2f} times the images/s of the default, {default.backend} "
            f"({spread.minimum:.2f} to {spread.maximum:.2f} in {len(gains)} rounds of {tuner._clock.window:.1f} s)"
        )
    else:
        found = f"; {describe(winner)} came to {spread.median:.2f}" if spread else ""
        print(f"best      the default, {default.backend}: nothing tried was faster beyond noise{found}")
    unfinished = sum(trial.verdict in ("", "no time left") for trial in tuner.trials.values() if trial.setting not in defaults)
    unmeasured = sum(not tuner.trial(setting).rates and not tuner.trial(setting).verdict for setting in defaults)
    if not _EXHAUSTIVE.value and (unfinished or unmeasured):
        print(
            f"time      {_SECONDS.value:g} s were enough for {tried} of about {all_settings} settings only: give more --seconds"
        )
    if other:
        beside = Spread.of(ratios[other.key]) if ratios.get(other.key) else None
        if beside and gains:
            pairs = Spread.of([one / two for one, two in zip(ratios[other.key], gains, strict=True)])
            print(
                f"against   {_AGAINST.value} is {beside.median:.2f} times the default, {pairs.median:.3f} of the best "
                f"({pairs.minimum:.3f} to {pairs.maximum:.3f})"
            )
        elif other.key == chosen.key:
            print(f"against   {_AGAINST.value} holds the same options")
    gain = vars(spread) if better and spread else {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    about = {
        "command": shlex.join(sys.argv),
        **known["about"],
        "num_records": known["spec"].dataset.num_records,
        "order": known["spec"].order,
        "batch_size": backends.BATCH_SIZE.value,
        "preprocess": repr(known["spec"].preprocess),
        "gain_over_default": gain,
        "default": default.to_json(),
    }
    save_options(chosen.options, _OUT.value, about=about)
    print(f"options   in {_OUT.value}: load_options({_OUT.value!r}), or scripts/train.py --options={shlex.quote(_OUT.value)}")
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as stream:
            json.dump(
                {**about, "ratios": ratios, "trials": [trial.to_json() for trial in tuner.trials.values()]}, stream, indent=2
            )
            stream.write("\n")
        print(f"all       in {_JSON.value}")
    return 0


def print_trials(tuner: Tuner, default: Setting, chosen: Setting, winner: Setting) -> None:
    """Prints what was measured, the fastest first (of an exhaustive run the first forty)."""
    base = Spread.of(tuner.trial(default).rates).median if tuner.trial(default).rates else None
    lines = []
    measured = [trial for trial in tuner.trials.values() if trial.rates]
    for trial in sorted(measured, key=lambda trial: -Spread.of(trial.rates).median)[:40]:
        rates = Spread.of(trial.rates)
        ratios = [f"{rate / base:.2f}" if base else "-" for rate in (rates.median, rates.minimum, rates.maximum)]
        verdict = trial.verdict
        if trial.setting == chosen:
            verdict = "best"
        elif trial.setting == default:
            verdict = "the default"
        elif not verdict:
            verdict = "another backend" if describe(trial.setting) == "default" else "time ran out"
        elif trial.setting == winner:
            verdict = "no faster than the default beyond noise"
        setting = f"{trial.setting.backend}: {describe(trial.setting)}"
        lines.append((setting, f"{rates.median:,.0f}", *ratios, str(len(trial.rates)), verdict))
    lines += [
        (f"{trial.setting.backend}: {describe(trial.setting)}", *("-",) * 5, trial.verdict.splitlines()[0])
        for trial in tuner.trials.values()
        if trial.verdict.startswith("refused")
    ]
    console.print_table(_COLUMNS, lines)


if __name__ == "__main__":
    console.run(main)
