"""How tune.py searches: which settings there are, which of them are measured, and which is kept."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import settings
from dali_tf_input import AUTOTUNE, DaliOptions, InputError, Spread, TfDataOptions
from settings import Setting

FINAL_ROUNDS = (5, 9)  # of the winner against the default: at least, where there is time, and at most
_RESERVED = (5, 0.4)  # rounds for which the search leaves time, and the largest part of all time that is
_LARGEST_CHANCE = 0.05
_WINDOW_PART, _WINDOW = 0.008, (0.3, 2.0)  # of the time, in seconds
_LOSES = 0.97  # times the best so far in its first window, and a setting is dropped
_WINS = 1.01  # times the best so far in the median of three windows, and a setting takes its place
_TRIES = 3
_HOPELESS = 0.7  # times the best default, and a backend is dropped


class Trial:
    """A setting, its windows, and what came of it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rates: list[float] = []
        self.verdict = ""

    def to_json(self) -> dict[str, Any]:
        """Returns what the file of everything measured holds of it."""
        return {**self.setting.to_json(), "images_per_second": self.rates, "verdict": self.verdict}


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.seconds = seconds
        self.window = min(max(_WINDOW_PART * seconds, _WINDOW[0]), _WINDOW[1])

    @property
    def left(self) -> float:
        """Seconds; below 0 when time is out."""
        return self._end - time.monotonic()


class Tuner:
    """Measures settings within the time given, and keeps all that was measured.

    Attributes:
      clock: the time that is left.
      trials: what is known of each setting, by its key.
    """

    def __init__(self, worker: settings.Worker, clock: Clock, show: Callable[[str], None]) -> None:
        self._worker = worker
        self.clock = clock
        self._show = show
        self.trials: dict[str, Trial] = {}
        self._costs = [2 * clock.window]  # seconds that a window takes with all that comes with it; the first is a guess

    def trial(self, setting: Setting) -> Trial:
        """Returns what is known of a setting."""
        return self.trials.setdefault(setting.key, Trial(setting))

    def has_time_for(self, windows: int, *, reserve: float = 0.0) -> bool:
        """Whether that many windows fit into what is left beside `reserve` seconds."""
        return self.clock.left - reserve >= windows * self.cost

    @property
    def cost(self) -> float:
        """Seconds that a window takes, with some allowance."""
        return 1.2 * statistics.median(self._costs)

    def measure(self, setting: Setting) -> float | None:
        """Measures a window; returns its images/s, None where the setting is refused."""
        trial = self.trial(setting)
        self._show(f"{setting.backend}: {describe(setting)}")
        start = time.monotonic()
        try:
            window = self._worker.measure(setting, seconds=self.clock.window)
        except settings.SettingError as error:
            trial.verdict = f"refused: {error}"
            return None
        backends_so_far = {known.setting.backend for known in self.trials.values() if known.rates}
        if setting.backend in backends_so_far:  # the first window of a backend has its libraries loaded, and is no measure
            self._costs.append(time.monotonic() - start)
        trial.rates.append(settings.images_per_second(window))
        return trial.rates[-1]

    def refusals(self, defaults: list[Setting]) -> str:
        """Says why the default of each backend could not be measured."""
        return "; ".join(f"{setting.backend}: {self.trial(setting).verdict or 'not tried'}" for setting in defaults)

    def choose_backends(self, defaults: list[Setting]) -> list[Setting]:
        """Measures the default of each backend; returns those that are not hopeless, the fastest first."""
        for turn in range(2):
            for setting in defaults:
                begun = any(known.rates for known in self.trials.values())  # one window is measured however short the time is
                if not self.trial(setting).verdict and (not begun or self.has_time_for(1, reserve=turn * self.reserve)):
                    self.measure(setting)
        measured = [setting for setting in defaults if self.trial(setting).rates]
        if not measured:
            raise InputError(f"No backend could be measured. {self.refusals(defaults)}")
        ranked = sorted(measured, key=lambda setting: -max(self.trial(setting).rates))
        best = max(self.trial(ranked[0]).rates)
        kept = [setting for setting in ranked if max(self.trial(setting).rates) >= _HOPELESS * best]
        for setting in ranked[len(kept) :]:
            self.trial(setting).verdict = "dropped: its backend is too slow here"
        return kept

    @property
    def reserve(self) -> float:
        """Seconds that are left for the winner against the default."""
        rounds, part = _RESERVED
        return min(2 * rounds * self.cost, part * self.clock.seconds)

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
        for number in range(rounds or FINAL_ROUNDS[1]):
            if rounds is None and number >= FINAL_ROUNDS[0] and not self.has_time_for(len(rivals) + 1):
                break
            if rounds is None and number < FINAL_ROUNDS[0] and self.clock.left < -self.clock.window:
                break  # the time was far too short
            turn = [reference, *rivals] if number % 2 == 0 else [*rivals, reference]
            rates = {setting.key: self.measure(setting) for setting in turn}
            base = rates[reference.key]
            if base is None or any(rate is None for rate in rates.values()):
                break
            for setting in rivals:
                ratios[setting.key].append(rates[setting.key] / base)
        return ratios


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
        del space["plan"]  # regions were reported to crash some GPUs' decoders: gpu_check.py tries that
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


def is_faster(gains: list[float]) -> bool:
    """Whether the winner beats the default beyond noise, by its ratios to it, round by round.

    A sign test: that so many of the rounds or more are above 1 has a chance of at most 5% where both are equal. It takes five.
    """
    above = sum(gain > 1 for gain in gains)
    chance = sum(math.comb(len(gains), count) for count in range(above, len(gains) + 1)) / 2 ** len(gains)
    return chance <= _LARGEST_CHANCE


def try_all(tuner: Tuner, defaults: list[Setting], spaces: dict[str, dict[str, list[Any]]]) -> Setting:
    """Measures every combination once, the better half of them again, and so on; returns the best."""
    rivals = [setting for default in defaults for setting in combinations(default, spaces[default.backend])]
    print(f"combinations  {len(rivals):,}", flush=True)
    done = False
    while len(rivals) > 1 or not done:
        done = True
        for setting in rivals:
            tuner.measure(setting)
        measured = [setting for setting in rivals if tuner.trial(setting).rates]
        if not measured:
            raise InputError(f"No setting could be measured. {tuner.refusals(defaults)}")
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
