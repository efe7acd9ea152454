"""What must agree where two inputs meet, such as those of training and of validation.

Compared are values: names, numbers, floats; not how an argument was spelled. What one of the two
does not know is not compared. Each comparison returns what to say, with the remedy, or None.
"""

from collections.abc import Callable

import numpy as np

from dali_tf_input.errors import InputError
from dali_tf_input.records.class_names import find_difference
from dali_tf_input.records.labels import ClassLabel, MultiHot, Values
from dali_tf_input.records.records import Records
from dali_tf_input.spec.crops import NoCrop, RandomCrop, RandomResizedCrop, ResizeRandomCrop
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.preprocess import Preprocess

_IF_RIGHT = "Or, if that is right, compare=False."


def compare_names(one: InputSpec, other: InputSpec) -> str | None:
    """Equal labels name the same class; one may have fewer classes."""
    mine, theirs = one.class_names, other.class_names
    number = find_difference(mine, theirs)
    if number is None or mine is None or theirs is None:
        return None
    return (
        f"class {number} is {mine[number]!r} and {theirs[number]!r}. Number one like the other:"
        " records.relabel(names=train.class_names), or convert --labels=FILE"
    )


def compare_labels(one: InputSpec, other: InputSpec) -> str | None:
    """Labels have one form: a class, several, or numbers; as integers, or one-hot."""
    mine, theirs = one.label, other.label
    if mine is None or theirs is None:
        return None
    if isinstance(mine, ClassLabel) and isinstance(theirs, ClassLabel):
        if mine.one_hot != theirs.one_hot:
            return "labels are one-hot in one of them, integers in the other: set `one_hot` alike"
        counts = {one for one in (mine.num_classes, theirs.num_classes) if one}
        if len(counts) > 1:
            return f"`num_classes` is {mine.num_classes} and {theirs.num_classes}"
    elif type(mine) is not type(theirs):
        kinds = f"{type(mine).__name__} and {type(theirs).__name__}"
        return f"labels are {kinds}: give both the same `label`"
    elif isinstance(mine, MultiHot | Values) and mine.shape != theirs.shape:
        return f"labels are of shape {mine.shape} and {theirs.shape}"
    return None


def compare_masks(one: InputSpec, other: InputSpec) -> str | None:
    """Both have masks or none, and equal values of their pixels name the same class."""
    if (one.mask is None) != (other.mask is None):
        return "one of them has masks: give both the same `mask`"
    mine, theirs = one.mask_names, other.mask_names
    number = find_difference(mine, theirs)
    if number is None or mine is None or theirs is None:
        return None
    return f"class {number} of masks is {mine[number]!r} and {theirs[number]!r}"


def compare_images(one: InputSpec, other: InputSpec) -> str | None:
    """Pixels mean the same, in all views."""
    views = [[*spec.image_views.values()] for spec in (one, other)]
    if len(views[0]) != len(views[1]):
        return f"there are {len(views[0])} and {len(views[1])} `views`"
    problems = map(compare_pixels, *views)
    return next((problem for problem in problems if problem), None)


def compare_pixels(one: Preprocess, other: Preprocess) -> str | None:
    """Pixels mean the same: their scale, their channels, and the order of their axes."""
    for name in ("channels", "layout"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            return f"`{name}` is {mine!r} and {theirs!r}"
    (mean, std), (other_mean, other_std) = map(_scale_of, (one, other))
    if np.allclose([mean, std], [other_mean, other_std], rtol=1e-4, atol=1e-4):
        return None
    return (
        f"pixels are normalized by mean {_show(mean)} and std {_show(std)}, and by mean"
        f" {_show(other_mean)} and std {_show(other_std)}: give both the same `normalization`"
    )


def compare_inputs(one: InputSpec, other: InputSpec) -> str | None:
    """The inputs of the model have the same names."""
    mine, theirs = (
        [name for name in spec.outputs if name not in ("label", "mask", "weight")]
        for spec in (one, other)
    )
    if mine == theirs:
        return None
    return (
        f"the inputs of the model are {', '.join(mine)}, and {', '.join(theirs)}: set `record_ids`,"
        " `features` and `views` alike"
    )


# What must agree of training and validation, and, as far as labels are used, of training and a
# later evaluation or prediction.
Comparison = Callable[[InputSpec, InputSpec], str | None]
ALL: tuple[Comparison, ...] = (
    compare_names,
    compare_images,
    compare_labels,
    compare_masks,
    compare_inputs,
)
WITHOUT_LABELS: tuple[Comparison, ...] = (compare_images, compare_inputs)


def check_agreement(
    one: InputSpec,
    other: InputSpec,
    what: tuple[str, str],
    *,
    comparisons: tuple[Comparison, ...] = ALL,
) -> None:
    """Raises InputError unless two inputs agree; `what` says what they are for."""
    for compare in comparisons:
        if problem := compare(one, other):
            first, second = what
            raise InputError(f"{first} and {second} differ: {problem}. {_IF_RIGHT}")


def find_doubts(spec: InputSpec, validation: InputSpec | None) -> list[str]:
    """Returns what is likely not meant in a training run, but may be."""
    if validation is None:
        return []
    doubts = []
    if isinstance(validation.label, ClassLabel) and validation.label.smoothing:
        doubts.append("val_loss is that of smoothed labels: validation has `smoothing`, too.")
    squeezed = [_squeezes(one.preprocess) for one in (spec, validation)]
    if {*squeezed} == {True, False}:
        which = ("training", "validation") if squeezed[0] else ("validation", "training")
        doubts.append(
            f"{which[0]} squeezes images to another aspect ratio, {which[1]} keeps it: give both"
            " a `crop` that does the same, as the default."
        )
    if common := find_common(spec.records, validation.records):
        count = f"{common:,} of {validation.records.num_records:,} validation records"
        doubts.append(f"{count} are training records, too.")
    return doubts


def _squeezes(preprocess: Preprocess) -> bool | None:
    """Whether images get another aspect ratio; None if that is random, or their own is kept."""
    crop = preprocess.crop
    if isinstance(crop, RandomResizedCrop | RandomCrop):
        return None
    return isinstance(crop, ResizeRandomCrop | NoCrop)


def normalizes(preprocess: Preprocess) -> bool:
    """Whether pixels come out on another scale than 0 to 255."""
    zeros, ones = (0.0,) * preprocess.channels, (1.0,) * preprocess.channels
    return _scale_of(preprocess) != (zeros, ones)


def find_common(one: Records, other: Records) -> int:
    """Returns how many records of the same files are in both."""
    places = [dict(zip(records.paths, records.first_ids, strict=True)) for records in (one, other)]
    common = 0
    for path in places[0].keys() & places[1].keys():
        size = one.files[one.paths.index(path)].num_framed
        mine, theirs = [
            records.ids[slice(*np.searchsorted(records.ids, [first[path], first[path] + size]))]
            - first[path]
            for records, first in zip((one, other), places, strict=True)
        ]
        common += len(np.intersect1d(mine, theirs, assume_unique=True))
    return common


def _scale_of(preprocess: Preprocess) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean that is subtracted from a pixel of 0 to 255, and by what it is divided."""
    if preprocess.dtype == "uint8":
        return (0.0,) * preprocess.channels, (1.0,) * preprocess.channels
    return tuple(preprocess.mean), tuple(preprocess.std)


def _show(values: tuple[float, ...]) -> str:
    texts = [f"{value:.4g}" for value in values]
    return texts[0] if len({*texts}) == 1 else f"({', '.join(texts)})"
