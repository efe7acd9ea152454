"""What each value of each option is worth, estimated from windows in which all options vary at once.

Each window tells of all of its values, not of one: for the same time far more is known of each than where one option is changed
after the other (a main-effects design; Box, Hunter and Hunter, Statistics for Experimenters, chapters 5 and 6).
"""

import math
import random

import numpy as np

_NOISE, _NOISE_WINDOWS = 0.04, 10  # of images/s, as seen on a shared machine; so many windows are needed to believe otherwise
_WORTH_AT_LEAST, _WORTH_AT_FIRST = 0.02, 0.5  # standard deviation of what the values of an option are worth
_HUBER = 1.5  # times the noise, beyond which a window pulls no harder
_STEPS = 20
_ROUND_PRIOR = 1e-3  # next to nothing: a round may be anything


class Effects:
    """The model: log(images/s) of a window = its round + the sum of what its values are worth + noise.

    Least squares with Huber's weights (Huber 1964), as a shared machine has windows that tell nothing; a round of its own takes
    up how fast the machine is just then. How much the values of an option differ at all is learnt with it (an empirical prior):
    where they hardly do, no value stands out by chance.
    """

    def __init__(self, options: dict[str, int]) -> None:
        """Makes a model without windows.

        Args:
          options: how many values each option has.
        """
        keys = [(name, value) for name, count in options.items() for value in range(count)]
        self._columns = {key: column for column, key in enumerate(keys)}
        self._choices: list[dict[str, int]] = []
        self._rounds: list[int] = []
        self._logs: list[float] = []
        self._base = 0.0
        self._free = 1e-9
        self._worth = np.zeros(len(self._columns))
        self._covariance = np.eye(len(self._columns)) * _WORTH_AT_FIRST**2
        self._options = [[self._columns[name, value] for value in range(count)] for name, count in options.items()]

    def add(self, round_number: int, choice: dict[str, int], images_per_second: float) -> None:
        """Adds a window: its round, from 0, the number of each option's value, and images/s above 0."""
        self._rounds.append(round_number)
        self._choices.append(choice)
        self._logs.append(math.log(images_per_second))

    def windows(self, name: str, value: int) -> int:
        """Returns how many windows had a value."""
        return sum(choice[name] == value for choice in self._choices)

    def fit(self) -> None:
        """Estimates anew what the values are worth; takes at least one window."""
        values, rounds = len(self._columns), np.array(self._rounds)
        design = np.zeros((len(self._logs), values))
        for row, choice in enumerate(self._choices):
            design[row, [self._columns[key] for key in choice.items()]] = 1
        logs = np.array(self._logs) - np.mean(self._logs)
        weights, noise = np.ones(len(logs)), _NOISE
        variances = np.full(values, _WORTH_AT_FIRST**2)
        for _ in range(_STEPS):
            weighted, prior = design * weights[:, None], noise**2 / variances
            # The normal equations of values and rounds, the rounds eliminated: no window is in two, so that their block is
            # diagonal, and the time grows with the windows and not with the third power of the rounds.
            of_rounds = np.bincount(rounds, weights) + _ROUND_PRIOR
            mixed = np.zeros((len(of_rounds), values))
            np.add.at(mixed, rounds, weighted)
            mixed /= of_rounds[:, None]
            means = np.bincount(rounds, weights * logs) / of_rounds
            normal = weighted.T @ design + np.diag(prior) - mixed.T @ (mixed * of_rounds[:, None])
            inverse = np.linalg.inv(normal)
            worth = inverse @ (weighted.T @ logs - mixed.T @ (means * of_rounds))
            levels = means - mixed @ worth
            covariance = inverse * noise**2
            for columns in self._options:  # a step of expectation maximization: how much the option's values differ
                mean = np.mean(worth[columns] ** 2 + covariance.diagonal()[columns])
                variances[columns] = max(_WORTH_AT_LEAST**2, mean)
            errors = np.abs(logs - design @ worth - levels[rounds])
            bent = values + len(of_rounds) - inverse.diagonal() @ prior
            bent -= _ROUND_PRIOR * np.sum(1 / of_rounds + np.einsum("rv,vw,rw->r", mixed, inverse, mixed))
            self._free = max(1e-9, len(logs) - bent)  # windows the model has not bent to
            seen = 1.4826 * np.median(errors) * math.sqrt(len(logs) / self._free)  # as of a normal distribution
            noise = math.sqrt((self._free * seen**2 + _NOISE_WINDOWS * _NOISE**2) / (self._free + _NOISE_WINDOWS))
            weights = np.minimum(1, _HUBER * noise / np.maximum(errors, 1e-12))
        self._worth, self._covariance = worth, covariance
        self._base = float(np.mean(self._logs) + levels[-1])  # of the last round

    def images_per_second(self, choice: dict[str, int]) -> float:
        """Returns what a setting should have reached in the last round."""
        return math.exp(self._base + sum(float(self._worth[self._columns[key]]) for key in choice.items()))

    def difference(self, name: str, value: int, other: int) -> tuple[float, float]:
        """Returns by how much log(images/s) is higher with a value of an option than with another one, and its standard error."""
        contrast = np.zeros(len(self._columns))
        contrast[self._columns[name, value]] += 1
        contrast[self._columns[name, other]] -= 1
        return float(contrast @ self._worth), math.sqrt(max(0.0, float(contrast @ self._covariance @ contrast)))

    def quantile(self, normal: float) -> float:
        """Returns of Student's distribution what `normal` is of the normal one, to first order (Abramowitz and Stegun 26.7.5)."""
        return normal + (normal**3 + normal) / (4 * self._free)

    def best(self, name: str, values: list[int]) -> int:
        """Returns which of the values is worth most."""
        return max(values, key=lambda value: self._worth[self._columns[name, value]])


def balanced_choices(options: dict[str, list[int]], random_numbers: random.Random) -> list[dict[str, int]]:
    """Returns as many choices as the longest option has values; in them the values of each come equally often, or nearly."""
    count = max(len(values) for values in options.values())
    columns = {}
    for name, values in options.items():
        first = random_numbers.randrange(len(values))
        column = [values[(first + number) % len(values)] for number in range(count)]
        random_numbers.shuffle(column)
        columns[name] = column
    return [{name: column[number] for name, column in columns.items()} for number in range(count)]
