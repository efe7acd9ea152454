"""The share of an epoch that each class, or each part of a mixture, gets."""

import functools
import math
import operator
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import numpy as np

from dali_tf_input.errors import InputError, check
from dali_tf_input.random import Integers
from dali_tf_input.records.labels import ClassLabel, Label
from dali_tf_input.records.records import Records

_MAX_FACTOR = 1_000_000
_MAX_EPOCHS = 1000  # the longest epoch of a mixture, in times all records
Balance = dict[int, float] | Literal["class"] | None


def is_label_of_index(records: Records, label: Label | None) -> bool:
    """Whether the index has this label's class of every record, with the same numbers."""
    return (
        isinstance(label, ClassLabel)
        and label.key == records.label_key
        and label.vocabulary == records.label_vocabulary
    )


def find_classes(
    records: Records, label: Label | None, balance: Balance, temperature: float
) -> tuple[Integers, tuple[float, ...]]:
    """Returns the class of each record, and the relative share of each class in an epoch.

    See `InputSpec.balance`. Classes are numbered from 0, leaving out those without records.
    """
    key = records.label_key
    if not is_label_of_index(records, label):
        found = f"that of '{key}'" if key else "none"
        name = "temperature" if balance is None else "balance"
        raise InputError(
            f"`{name}` needs a ClassLabel, and its value for every record in the index:"
            f" the spec has {label!r}, the index {found}. Index with --verify=schema and the same"
            " label."
        )
    stored, classes, counts = np.unique(records.labels, return_inverse=True, return_counts=True)
    factors = np.ones(len(stored))
    if isinstance(balance, dict):
        offset = getattr(label, "offset", 0)
        places = {int(value) - offset: place for place, value in enumerate(stored)}
        for value, factor in balance.items():
            check(value in places, "balance", "a dict by classes that have records", value)
            is_number = isinstance(factor, Real) and not isinstance(factor, bool)
            rule = f"a dict of factors above 0, at most {_MAX_FACTOR:,}"
            check(is_number and 0 < factor <= _MAX_FACTOR, "balance", rule, factor)
            factors[places[value]] = factor
    exponent = 0 if balance == "class" else 1 / temperature
    return classes, tuple(((counts * factors) ** exponent).tolist())


@dataclass(frozen=True)
class Mixture:
    """Parts of the records that are served in exact proportions, see `InputSpec.for_training`.

    Attributes:
      records: the records of all parts.
      parts: the parts, which have no record in common.
      shares: the share of each part; shares are positive and sum to 1.
    """

    records: Records
    parts: tuple[Records, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, shares: Mapping[Records, float]) -> "Mixture":
        """Makes a mixture from a mapping of parts to their shares.

        Raises:
          InputError: the shares are not positive or do not sum to 1, or parts have a record in
            common or differ in how they are read.
        """
        check(bool(shares), "records", "parts by their shares", shares)
        for part, share in shares.items():
            check(isinstance(part, Records), "records", "a dict of Records", part)
            is_number = isinstance(share, Real) and not isinstance(share, bool)
            check(is_number and 0 < share <= 1, "records", "shares in (0, 1]", share)
        total = math.fsum(shares.values())
        check(abs(total - 1) < 1e-9, "records", "shares that are 1 together", f"{total:.6g}")
        records = functools.reduce(operator.add, shares)
        mixture = cls(records, tuple(shares), tuple(map(float, shares.values())))
        if mixture.num_records > _MAX_EPOCHS * records.num_records:
            raise InputError(
                f"An epoch would have {mixture.num_records:,} records, as long as it takes to serve"
                " the first part once: name a part of a larger share first."
            )
        return mixture

    def __repr__(self) -> str:
        """Identifies everything that the order of records depends on."""
        parts = []
        for part, share in zip(self.parts, self.shares, strict=True):
            ids = zlib.crc32(part.ids.tobytes())
            parts.append(f"{share:.6g} of {ids:08x} in {os.path.basename(part.paths[0])}")
        return f"<Mixture: {', '.join(parts)}>"

    @property
    def num_records(self) -> int:
        """How many records an epoch has, so that it serves the first part once."""
        return max(1, round(self.parts[0].num_records / self.shares[0]))

    def find_parts(self, records: Records) -> Integers:
        """Returns the part number of each record; the files may have become local copies."""
        if records.counts != self.records.counts:
            raise InputError("`mixture` is of other records: describe the input again.")
        first_ids = dict(zip(self.records.paths, self.records.first_ids, strict=True))
        found = np.zeros(records.num_all, np.int64)
        for number, part in enumerate(self.parts):
            shifts = [
                first_ids[path] - first
                for path, first in zip(part.paths, part.first_ids, strict=True)
            ]
            found[part.ids + np.repeat(shifts, part.counts)] = number
        return found[records.ids]
