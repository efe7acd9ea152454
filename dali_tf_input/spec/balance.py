"""How often each class comes in an epoch."""

import math
from numbers import Real
from typing import Literal

import numpy as np
import numpy.typing as npt

from dali_tf_input.errors import InputError, check
from dali_tf_input.records.index_file import Integers
from dali_tf_input.records.labels import ClassLabel, Label
from dali_tf_input.records.records import Records

Shares = npt.NDArray[np.float64]
Balance = dict[int, float] | Literal["class"] | None


def find_shares(
    records: Records, label: Label | None, balance: Balance, temperature: float
) -> tuple[Integers, Shares]:
    """Returns the class of each record, and the share of each class, in proportion.

    See `InputSpec.balance`. Classes are counted here from 0 over those that have records.
    """
    key = records.label_key
    if not isinstance(label, ClassLabel) or not label.is_integer or label.key != key:
        found = f"that of '{key}'" if key else "none"
        raise InputError(
            "`balance` needs a ClassLabel of integers whose value in each record the index has:"
            f" the spec has {label!r}, the index {found}. Index with --verify=schema and the same"
            " label."
        )
    stored, classes, counts = np.unique(records.labels, return_inverse=True, return_counts=True)
    factors = np.ones(len(stored))
    if isinstance(balance, dict):
        places = {int(value) - label.offset: place for place, value in enumerate(stored)}
        for value, factor in balance.items():
            check(value in places, "balance", "a dict by classes that have records", value)
            is_number = isinstance(factor, Real) and not isinstance(factor, bool)
            holds = is_number and 0 < float(factor) < math.inf
            check(holds, "balance", "a dict of factors above 0", factor)
            factors[places[value]] = factor
    exponent = 0 if balance == "class" else 1 / temperature
    return classes, (counts * factors) ** exponent


def draw_balanced(classes: Integers, quotas: Integers, *, seed: int, epoch: int) -> Integers:
    """Returns records of which an epoch has a given number of each class, class by class.

    Each record of a class comes as often as every other one, or once more; which ones do is drawn
    anew in each epoch.

    Args:
      classes: the class of each record, from 0; each has one at least.
      quotas: int64 (classes,), how many of each class an epoch has.
      seed: see `shuffle`.
      epoch: see `shuffle`.

    Returns:
      int64 (sum of `quotas`,).
    """
    raw = np.random.Philox(key=[seed + 2**31, epoch]).random_raw  # other draws than `shuffle`
    order = np.lexsort((raw(len(classes)), classes))
    counts = np.bincount(classes, minlength=len(quotas))
    within = np.arange(quotas.sum()) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    rows = np.repeat(np.cumsum(counts) - counts, quotas) + within % np.repeat(counts, quotas)
    served: Integers = order[rows]
    return served


def share_out(total: int, shares: Shares) -> Integers:
    """Returns whole parts of `total` in proportion to `shares`, by the largest remainders."""
    exact = total * shares / shares.sum()
    parts: Integers = np.floor(exact).astype(np.int64)
    largest = np.argsort(parts - exact, kind="stable")[: total - int(parts.sum())]
    parts[largest] += 1
    return parts
