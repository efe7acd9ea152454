"""The labels, masks and other features of records: how they are stored and returned."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal

from dali_tf_input.errors import MAX_SIZE, Count, InputError, Int64, Size, Within, check, checked

LabelKind = Literal["class", "multi_hot", "values", "none"]
Features = Mapping[str, tuple[str, Sequence[Any]]]  # kind and values by key, of one record
Lengths = tuple[int, float]  # the fewest and the most values of a list

_NUMBERS = ("int64_list", "float_list")
# What to do where records hold another label than a `ClassLabel` without options.
COUNT_FROM_1 = "Where labels count from 1, pass ClassLabel(offset=1) (--label_offset=1)."
_OTHER_LABELS = {
    "bytes_list": " Names need ClassLabel(vocabulary=...) (--vocabulary).",
    "int64_list": " Lists of classes need MultiHot (--label=multi_hot); a 0 or 1 for each class"
    " needs Values (--label=values).",
    "float_list": " Numbers need Values (--label=values).",
}
_MAX_FLOAT32 = 3.4e38
_MAX_WEIGHTED = 1 << 20  # classes with weights, which are a list
_OUTPUT_FIELDS = ("one_hot", "smoothing")


@checked
@dataclass(frozen=True, kw_only=True)
class ClassLabel:
    """One class, stored as an integer, or as a name.

    Examples:
      >>> label = ClassLabel(offset=1)  # stored labels count from 1, as in TF-slim's ImageNet
      >>> label = ClassLabel(vocabulary=("cat", "dog"))  # labels are stored as names

    Attributes:
      key: its feature key; None finds TF-slim's "image/class/label" or tfds' "label".
      num_classes: how many classes there are; None is the number of names, or unknown. A label out
        of range stops the input, which names its record.
      offset: the stored label of the first class, which is subtracted from every label so that
        classes count from 0.
      vocabulary: the names of the classes in their order, for labels stored as names.
      one_hot: whether to return labels as float32 (num_classes,), 1 at the class and 0 elsewhere;
        otherwise as int64 scalars.
      smoothing: label smoothing: the part of the 1 that is spread evenly over all classes, in
        [0, 1); needs `one_hot`.
    """

    key: str | None = None
    num_classes: Count | None = None
    offset: Int64 = 0
    vocabulary: tuple[str, ...] | None = None
    one_hot: bool = False
    smoothing: float = 0.0
    lengths: ClassVar[Lengths] = (1, 1)

    def __post_init__(self) -> None:
        names = self.vocabulary or ()
        check(len({*names}) == len(names), "vocabulary", "names that differ", names)
        object.__setattr__(self, "num_classes", self.num_classes or len(names) or None)
        check(0 <= self.smoothing < 1, "smoothing", "in [0, 1)", self.smoothing)
        if self.one_hot and not self.num_classes:
            raise InputError("`one_hot` needs `num_classes`.")
        if self.one_hot and self.num_classes:
            rule = f"at most {MAX_SIZE:,} with `one_hot`"
            check(self.num_classes <= MAX_SIZE, "num_classes", rule, self.num_classes)
        if self.smoothing and not self.one_hot:
            raise InputError("`smoothing` needs `one_hot`.")

    @property
    def is_integer(self) -> bool:
        """Whether records store classes as integers."""
        return not self.vocabulary

    @functools.cached_property
    def positions(self) -> dict[bytes, int]:
        """The class of each name of the vocabulary, by the bytes that records store."""
        return {name.encode(): number for number, name in enumerate(self.vocabulary or ())}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of list that store it."""
        return ("bytes_list",) if self.vocabulary else ("int64_list",)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one label."""
        return (self.num_classes or 0,) if self.one_hot else ()

    @property
    def dtype(self) -> str:
        """The type of one label."""
        return "float32" if self.one_hot else "int64"

    @property
    def one_hot_values(self) -> tuple[float, float]:
        """What a one-hot label holds at its class, and elsewhere."""
        rest = self.smoothing / (self.num_classes or 1)
        return 1 - self.smoothing + rest, rest


@checked
@dataclass(frozen=True, kw_only=True)
class MultiHot:
    """Any number of classes, stored as a list of integers, which may be empty.

    Labels come out as float32 (num_classes,), 1 at each class of the list and 0 elsewhere.

    Examples:
      >>> label = MultiHot(key="image/class/labels", num_classes=80)

    Attributes:
      num_classes: how many classes there are; None, for the index step only, sets no limit.
      key: see `ClassLabel`.
      offset: see `ClassLabel`.
    """

    num_classes: Size | None
    key: str | None = None
    offset: Int64 = 0
    kinds: ClassVar[tuple[str, ...]] = ("int64_list", "")
    lengths: ClassVar[Lengths] = (0, math.inf)
    is_integer: ClassVar[bool] = True
    dtype: ClassVar[str] = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one label."""
        return (self.num_classes or 0,)


@checked
@dataclass(frozen=True, kw_only=True)
class Values:
    """A vector of numbers, such as a regression target, returned as float32 (size,).

    Examples:
      >>> label = Values(key="image/values", size=4)

    Attributes:
      size: how many numbers, at least 1.
      key: its feature key, of a float_list or an int64_list; None as for `ClassLabel`.
    """

    size: Size
    key: str | None = None
    kinds: ClassVar[tuple[str, ...]] = _NUMBERS
    is_integer: ClassVar[bool] = False
    dtype: ClassVar[str] = "float32"

    @property
    def lengths(self) -> Lengths:
        """How many values a record holds."""
        return self.size, self.size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one label."""
        return (self.size,)


Label = ClassLabel | MultiHot | Values
_KINDS: dict[LabelKind, type[Label]] = {
    "class": ClassLabel,
    "multi_hot": MultiHot,
    "values": Values,
}


def label_kind(label: Label | None) -> LabelKind:
    """Returns the word for a kind of label: "none" for no label."""
    kinds = (name for name, kind in _KINDS.items() if isinstance(label, kind))
    return next(kinds, "none")


def label_to_json(label: Label | None) -> dict[str, Any] | None:
    """Returns how a label is stored, as JSON values; None for no label.

    How it comes out, `one_hot` and `smoothing` of a `ClassLabel`, is omitted.
    """
    if label is None:
        return None
    kind = label_kind(label)
    fields = {
        field.name: getattr(label, field.name)
        for field in dataclasses.fields(label)
        if field.name not in _OUTPUT_FIELDS
    }
    names = fields.get("vocabulary")
    return {"kind": kind, **fields, **({"vocabulary": [*names]} if names else {})}


def label_from_json(values: Mapping[str, Any] | None) -> Label | None:
    """Returns the label that `label_to_json` described; raises InputError for anything else."""
    if values is None:
        return None
    fields = dict(values)
    kind = fields.pop("kind", None)
    check(kind in _KINDS, "kind", f"one of {', '.join(_KINDS)}", kind)
    return _KINDS[kind](**fields)


@checked
@dataclass(frozen=True, kw_only=True)
class SegmentationMask:
    """A class for each pixel; the mask is cropped, resized (nearest) and mirrored like its image.

    It has the size of its image, as it is stored, and is a PNG with one channel, or raw bytes, one
    uint8 per pixel. It is turned like its image, and returned as int32 (height, width).

    Examples:
      >>> label = SegmentationMask(key="image/segmentation/class/encoded")
      >>> label = SegmentationMask(key="mask", num_classes=2, values={0: 0, 255: 1})

    Attributes:
      key: its feature key.
      ignore: the value of pixels that a crop adds outside the image, in [0, 255].
      num_classes: how many classes there are: values are below it, or `ignore`. None sets no limit.
        The values are known, and checked, of records that were indexed at level "decode" with
        `mask_key`.
      values: what stored values become, each in [0, 255]; others stay. None changes none.
    """

    key: str
    ignore: Annotated[int, Within(0, 255)] = 255
    num_classes: Annotated[int, Within(1, 256)] | None = None
    values: dict[int, int] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        numbers = [*(self.values or {}), *(self.values or {}).values()]
        rule = "a dict of numbers in [0, 255]"
        are_bytes = all(isinstance(one, Integral) and 0 <= one <= 255 for one in numbers)
        check(are_bytes, "values", rule, self.values)

    def map_values(self, stored: Sequence[int]) -> list[int]:
        """Returns what stored values become."""
        values = self.values or {}
        return [values.get(value, value) for value in stored]


@checked
@dataclass(frozen=True, kw_only=True)
class Stored:
    """A feature that is returned as it is stored: int64, float32 or string.

    Examples:
      >>> feature = Stored(size=40, padding=-1.0)  # float32 (40,), shorter lists are padded

    Attributes:
      size: the length of the returned vector; None returns a single value as a scalar.
      padding: the value that fills the vector, or is the scalar, where a record holds fewer or
        lacks the feature; None rejects such records.
    """

    size: Size | None = None
    padding: Int64 | float | None = None

    @property
    def lengths(self) -> Lengths:
        """How many values a record holds."""
        size = self.size or 1
        return (size if self.padding is None else 0), size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what comes out for one record."""
        return () if self.size is None else (self.size,)


def describe_list(kinds: Sequence[str], lengths: Lengths) -> str:
    """Returns a description such as "int64_list of 1 value"."""
    low, high = lengths
    count = "any number" if high == math.inf else f"{high}" if low == high else f"{low} to {high}"
    return f"{' or '.join(filter(None, kinds))} of {count} value{'' if high == 1 else 's'}"


def find_label_problem(label: Label, features: Features) -> tuple[str, str] | None:
    """Returns (reason, detail) if a record does not hold such a label; its key must be known."""
    key = label.key or ""
    name = f"`label.key` '{key}'"
    if key not in features:
        keys = ", ".join(f"'{feature}'" for feature in sorted(features)[:20]) or "no features"
        return "label missing", f"{name} is not in this record, which holds {keys}."
    kind, values = features[key]
    low, high = label.lengths
    if kind not in label.kinds or not low <= len(values) <= high:
        expected, actual = describe_list(label.kinds, label.lengths), kind or "an empty feature"
        detail = f"{name} must be {expected}, found {actual} of {len(values)}."
        if isinstance(label, ClassLabel):
            detail += _OTHER_LABELS.get(kind, "")
        return "label kind", detail
    if isinstance(label, Values):
        wrong = next((value for value in values if not math.isfinite(value)), None)
        rule, hint = "finite", ""
    elif isinstance(label, ClassLabel) and label.vocabulary:
        names = label.positions
        wrong = next((value for value in values if value not in names), None)
        rule, hint = f"one of the {len(names)} names of the vocabulary", ""
    else:
        first, count = label.offset, label.num_classes or math.inf
        wrong = next((value for value in values if not first <= value < first + count), None)
        rule = f"in {first} to {first + count - 1}" if label.num_classes else f"at least {first}"
        hint = f" {COUNT_FROM_1}" if (first, wrong) == (0, count) else ""
    if wrong is None:
        return None
    return "label range", f"{name} must be {rule}, found {wrong!r}.{hint}"


def class_weights(
    class_weight: Mapping[int, float] | Literal["balanced"],
    counts: Sequence[tuple[int, int]] | None,
    num_classes: int,
) -> list[float]:
    """Returns the weight of each class; 1 for those that are not given.

    "balanced" is records / (classes * records of the class), as in scikit-learn; `counts` are the
    classes that occur, and the records of each.
    """
    if class_weight == "balanced":
        if counts is None:
            text = "`class_weight` 'balanced' needs the classes of all records"
            raise InputError(f"{text}: index them with --verify=schema.")
        total = sum(count for _, count in counts)
        class_weight = {label: total / (len(counts) * count) for label, count in counts}
    rule = f"finite weights of at least 0, by classes in [0, {_MAX_WEIGHTED:,})"
    check(num_classes <= _MAX_WEIGHTED, "num_classes", f"at most {_MAX_WEIGHTED:,}", num_classes)
    for label, weight in class_weight.items():
        is_class = isinstance(label, Integral) and 0 <= label < _MAX_WEIGHTED
        is_weight = isinstance(weight, Real) and 0 <= weight <= _MAX_FLOAT32
        check(is_class and is_weight, "class_weight", rule, class_weight)
    return [
        class_weight.get(label, 1.0) for label in range(max([num_classes - 1, *class_weight]) + 1)
    ]
