"""How tune.py searches: which settings are measured, and which is kept."""

import functools
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import settings
from dali_tf_input import InputError, Spread
from effects import Effects, balanced_choices
from settings import Setting
from spaces import change, combinations, describe

FINAL_ROUNDS = (5, 100)  # of the winner against the default: at least, where there is time, and at most
_FINAL_PART = 0.35  # of the time is left for them
_LARGEST_CHANCE = 0.05
_WINDOW, _WINDOW_BATCHES, _WINDOW_PART = 0.4, 5, 0.02  # seconds; more for so many batches, up to that part of the time
_SURE = 2.5  # standard errors: a value has many rounds in which to look bad by chance
_SAME = 0.003  # a value is dropped that is surely no more than this above the default's
_WORTH_A_CHANGE = 0.3  # standard errors above the default's value, for a value to be taken into the winner
_HOPELESS = 0.7  # times the best default, and a backend is dropped
_BEHIND = 0.9  # times what the fastest backend should reach, and a backend is dropped
_ROUNDS = 2  # in a row, before that; and of the best of each backend beside one another


class Trial:
    """A setting, its windows, and what came of it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rates: list[float] = []
        self.verdict = ""

    @property
    def is_refused(self) -> bool:
        """Whether it cannot be measured."""
        return self.verdict.startswith("refused")

    def to_json(self) -> dict[str, Any]:
        """Returns what the file of everything measured holds of it."""
        return {**self.setting.to_json(), "images_per_second": self.rates, "verdict": self.verdict}


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.seconds = seconds
        self.window = _WINDOW

    @property
    def left(self) -> float:
        """Seconds; below 0 when time is out."""
        return self._end - time.monotonic()

    def fit_window(self, batch_seconds: float) -> None:
        """Makes windows long enough for some batches that take so long each, where the time allows it."""
        self.window = max(_WINDOW, min(_WINDOW_BATCHES * batch_seconds, _WINDOW_PART * self.seconds))


class Tuner:
    """Measures settings within the time given, and keeps all that was measured.

    Attributes:
      clock: the time that is left.
      trials: the windows of each setting, by its key.
      screens: of each backend whose options were varied, what its values are worth.
    """

    def __init__(self, worker: settings.Worker, clock: Clock, show: Callable[[str], None]) -> None:
        self._worker = worker
        self.clock = clock
        self._show = show
        self.trials: dict[str, Trial] = {}
        self.screens: list[Screen] = []
        self._batch_seconds = math.inf  # the least
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
            self._costs.append(time.monotonic() - start)
            return None
        backends_so_far = {known.setting.backend for known in self.trials.values() if known.rates}
        if setting.backend in backends_so_far:  # the first window of a backend has its libraries loaded, and is no measure
            self._costs.append(time.monotonic() - start)
        trial.rates.append(settings.images_per_second(window))
        self._batch_seconds = min(self._batch_seconds, window["seconds"] / window["measured_batches"])
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
        self.clock.fit_window(self._batch_seconds)
        return kept

    @property
    def reserve(self) -> float:
        """Seconds that are left for the winner against the default."""
        return _FINAL_PART * self.clock.seconds

    def compare(self, rivals: list[Setting], reference: Setting, *, rounds: int | None = None) -> dict[str, list[float]]:
        """Measures settings against a reference, round by round, in the time that is left; returns their ratios by key."""
        ratios: dict[str, list[float]] = {setting.key: [] for setting in rivals}
        rivals = list(rivals)
        for number in range(rounds or FINAL_ROUNDS[1]):
            if not rivals:
                break
            if rounds is None and number >= FINAL_ROUNDS[0] and not self.has_time_for(len(rivals) + 1):
                break
            if rounds is None and number < FINAL_ROUNDS[0] and self.clock.left < -self.clock.window:
                break  # the time was far too short
            turn = [reference, *rivals] if number % 2 == 0 else [*reversed(rivals), reference]
            rates = {setting.key: self.measure(setting) for setting in turn}
            base = rates[reference.key]
            if base is None:
                break
            rivals = [setting for setting in rivals if rates[setting.key] is not None]
            for setting in rivals:
                ratios[setting.key].append(rates[setting.key] / base)
        return ratios


class Screen:
    """The options of a backend, all varied at once, and which of their values are still in the running.

    Attributes:
      default: where it begins.
      space: the values of each option (or of several, as a dict), the default's first.
      effects: what they are worth.
      left: the numbers of the values of each option that were not dropped.
      verdicts: why the others were.
      rounds: how many were measured.
      images_per_second: what the best values should reach by the last round; before it, the default's best.
      times_behind: rounds in a row in which another backend was much faster.
    """

    def __init__(self, default: Setting, space: dict[str, list[Any]]) -> None:
        self.default = default
        self.space = space
        self.effects = Effects({name: len(values) for name, values in space.items()})
        self.left = {name: list(range(len(values))) for name, values in space.items()}
        self.verdicts: dict[tuple[str, int], str] = {}
        self.rounds = 0
        self.images_per_second = 0.0
        self.times_behind = 0
        self._random = random.Random(0)

    @property
    def is_behind(self) -> bool:
        """Whether another backend is so much faster that this one was left."""
        return self.times_behind >= _ROUNDS

    def setting(self, choice: dict[str, int]) -> Setting:
        """Returns the setting of these values; of options that are not named, the default's."""
        values = [self.space[name][value] for name, value in choice.items()]
        return functools.reduce(change, values, self.default)

    def measure_round(self, tuner: Tuner) -> bool:
        """Measures a round and drops what loses; returns False where nothing is left to tell apart, or no time."""
        self.images_per_second = self.images_per_second or max(tuner.trial(self.default).rates)
        choices = balanced_choices(self.left, self._random)
        if len(choices) == 1 or not tuner.has_time_for(len(choices), reserve=tuner.reserve):
            return False
        tried = measured = False
        for choice in choices:
            setting = self.setting(choice)
            if tuner.trial(setting).is_refused or any(value not in self.left[name] for name, value in choice.items()):
                continue
            if not tuner.has_time_for(1, reserve=tuner.reserve):
                break  # what was refused took it
            tried = True
            rate = tuner.measure(setting)
            if rate is None:
                self._find_what_is_refused(tuner, choice)
            else:
                measured = True
                self.effects.add(self.rounds, choice, rate)
        if measured:
            self.rounds += 1
            self.effects.fit()
            self._drop_losers()
            self.images_per_second = self.effects.images_per_second({name: self._best_value(name) for name in self.left})
        return tried

    def best(self) -> Setting:
        """Returns the setting of the best values; of those that are hardly above the default's, the default's."""
        choice = {name: self._best_value(name) for name in self.left}
        for name, values in self.left.items():
            if 0 in values:
                gain, error = self.effects.difference(name, choice[name], 0)
                choice[name] = choice[name] if gain > _WORTH_A_CHANGE * error else 0
        return self.setting(choice)

    def _best_value(self, name: str) -> int:
        measured = [value for value in self.left[name] if self.effects.windows(name, value)]
        return self.effects.best(name, measured) if measured else self.left[name][0]

    def _drop_losers(self) -> None:
        """Drops the values that are surely below the best of their option, or surely no better than the default's."""
        sure = self.effects.quantile(_SURE)
        for name, values in self.left.items():
            best = self._best_value(name)
            for value in [value for value in values if value != best]:
                loss, error = self.effects.difference(name, best, value)
                if loss > sure * error:
                    self._drop(name, value, "dropped: slower")
            for value in [value for value in values if value and 0 in values]:
                gain, error = self.effects.difference(name, value, 0)
                if gain + sure * error < _SAME:
                    self._drop(name, value, "dropped: no faster")

    def _drop(self, name: str, value: int, verdict: str) -> None:
        self.left[name].remove(value)
        self.verdicts[name, value] = verdict

    def _find_what_is_refused(self, tuner: Tuner, choice: dict[str, int]) -> None:
        """Drops those values of a refused choice that are refused by themselves."""
        tuner.measure(self.default)  # between two that may crash: several crashes in a row end the run
        for name, value in choice.items():
            alone = self.setting({name: value})
            known = tuner.trial(alone).rates or tuner.trial(alone).is_refused
            if value and not known and not self.effects.windows(name, value) and tuner.has_time_for(2, reserve=tuner.reserve):
                tuner.measure(alone)
                tuner.measure(self.default)
            if value and tuner.trial(alone).is_refused and len(self.left[name]) > 1:
                self._drop(name, value, tuner.trial(alone).verdict)


def search(tuner: Tuner, defaults: list[Setting], spaces: dict[str, dict[str, list[Any]]]) -> Setting:
    """Returns the setting that should be the fastest by what the values of each option are worth, as far as the time allows.

    Round after round varies all options of each backend at once; values and backends that lose are dropped.
    """
    tuner.screens = [Screen(default, spaces[default.backend]) for default in tuner.choose_backends(defaults)]
    running = list(tuner.screens)
    while measured := [screen for screen in running if screen.measure_round(tuner)]:
        fastest = max(screen.images_per_second for screen in measured)
        for screen in measured:
            screen.times_behind = screen.times_behind + 1 if screen.images_per_second < _BEHIND * fastest else 0
        running = [screen for screen in running if not screen.is_behind]
    found = [screen.best() for screen in sorted(running, key=lambda screen: -screen.images_per_second)]
    if len(found) == 1 or not tuner.has_time_for(_ROUNDS * len(found), reserve=tuner.reserve / 2):
        return found[0]
    ratios = tuner.compare(found[1:], found[0], rounds=_ROUNDS)
    return max(found, key=lambda one: Spread.of(ratios.get(one.key) or [1.0]).median)


def is_faster(gains: list[float]) -> bool:
    """Whether the winner beats the default beyond noise, by its ratios to it, round by round.

    Wilcoxon's signed-rank test (Wilcoxon 1945), exact, one-sided: ratios that lie so far above 1, by their ranks, have a chance
    of at most 5% where both are equal; and a median above 1, which is the gain that is told. It takes five.
    """
    logs = sorted((math.log(gain) for gain in gains), key=abs)
    above = sum(rank for rank, log in enumerate(logs, 1) if log > 0)
    ways = [1] + [0] * (len(logs) * (len(logs) + 1) // 2)  # to choose ranks of a sum
    for rank in range(1, len(logs) + 1):
        ways = [count + (ways[total - rank] if total >= rank else 0) for total, count in enumerate(ways)]
    return sum(ways[above:]) <= _LARGEST_CHANCE * 2 ** len(logs) and statistics.median(gains) > 1


def try_all(tuner: Tuner, defaults: list[Setting], spaces: dict[str, dict[str, list[Any]]]) -> Setting:
    """Measures every combination once, the better half of them again, and so on; returns the best."""
    rivals = [setting for default in defaults for setting in combinations(default, spaces[default.backend])]
    print(f"combinations  {len(rivals):,}", flush=True)
    done = False
    while len(rivals) > 1 or not done:
        done = True
        for setting in rivals:
            if tuner.measure(setting) is None:  # between two that may crash: several crashes in a row end the run
                works = next((known for known in rivals if tuner.trial(known).rates), None)
                if works:
                    tuner.measure(works)
        measured = [setting for setting in rivals if tuner.trial(setting).rates]
        if not measured:
            raise InputError(f"No setting could be measured. {tuner.refusals(defaults)}")
        measured.sort(key=lambda setting: -Spread.of(tuner.trial(setting).rates).median)
        rivals = measured[: max(1, len(measured) // 2)]
        for setting in measured[len(rivals) :]:
            tuner.trial(setting).verdict = "slower"
    return rivals[0]
