"""What a label is: how it is stored, and what comes out of it. So far, one integer."""

from dataclasses import dataclass

from dali_tf_input.errors import InputError, check


@dataclass(frozen=True, kw_only=True)
class ClassLabel:
    """A class, stored as one integer.

    Attributes:
      key: feature key of the label, an int64_list of one value.
      offset: subtracted from every label, so that classes count from 0; 1 for TF-slim's ImageNet.
      one_hot: number of classes n: labels come out as float32 (n,); None leaves them int64 scalars.
      smoothing: part of the 1 of a one-hot label that is spread evenly over all classes, in [0, 1).
    """

    key: str
    offset: int = 0
    one_hot: int | None = None
    smoothing: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one label: () without `one_hot`, (one_hot,) with it."""
        return () if self.one_hot is None else (self.one_hot,)

    @property
    def dtype(self) -> str:
        """The type of one label."""
        return "int64" if self.one_hot is None else "float32"

    @property
    def one_hot_values(self) -> tuple[float, float]:
        """What a one-hot label holds at its class, and elsewhere."""
        rest = self.smoothing / (self.one_hot or 1)
        return 1 - self.smoothing + rest, rest

    def check(self, highest: int) -> None:
        """Checks the fields against the highest label that comes out (0 if unknown).

        Raises:
          InputError: a field is out of range, or there are more classes than `one_hot`.
        """
        check(0 <= self.smoothing < 1, "label_smoothing", "in [0, 1)", self.smoothing)
        if self.one_hot is None and self.smoothing:
            raise InputError("`label_smoothing` needs `one_hot`, the number of classes.")
        holds = self.one_hot is None or highest < self.one_hot
        check(holds, "one_hot", f"above the highest label, {highest}", self.one_hot)
