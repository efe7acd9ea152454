"""What goes together in an `InputSpec`: a table of rules, each with what to say where it is broken.

A rule is a line of a generator: whether it holds, and the message. Rules are evaluated in their
order, up to the first that is broken, so that each may rely on those before it.
"""

from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING

from dali_tf_input.errors import InputError
from dali_tf_input.records.labels import ClassLabel, MultiHot, SegmentationMask, Stored

if TYPE_CHECKING:
    from dali_tf_input.spec.input import InputSpec

Rules = Iterator[tuple[bool, str]]


def check_rules(spec: "InputSpec") -> None:
    """Raises InputError for the first rule that a spec breaks.

    It also asks `Records` about its labels and features, which raises errors of its own.
    """
    for rules in (_rules_of_order, _rules_of_label, _rules_of_images, _rules_of_features):
        for holds, message in rules(spec):
            if not holds:
                raise InputError(message)


def _rules_of_order(spec: "InputSpec") -> Rules:
    order, block = spec.order, spec.shuffle_block_size
    is_global = order == "global"
    yield is_global or block == 1, _only_global("shuffle_block_size", f"{block} with {order!r}")
    yield (
        spec.repeat is True or order == "sequential",
        f"`repeat` False is for order 'sequential' only, got {order!r}: it is one epoch that serves"
        " each record once.",
    )
    yield 0 <= spec.seed < 2**31, _must("seed", "in [0, 2**31)", spec.seed)
    yield is_global or spec.balance is None, _only_global("balance", repr(order))
    yield is_global or spec.temperature == 1, _only_global("temperature", repr(order))
    yield is_global or spec.mixture is None, _only_global("mixture", repr(order))
    is_once = spec.repeated_augmentation == 1
    yield is_global or is_once, _only_global("repeated_augmentation", repr(order))
    if spec.is_balanced or spec.mixture:
        yield block == 1, "`balance` and a mixture need `shuffle_block_size` 1."
    if spec.mixture:
        yield not spec.is_balanced, "A mixture takes neither `balance` nor `temperature`."


def _rules_of_label(spec: "InputSpec") -> Rules:
    label, records = spec.label, spec.records
    is_class = isinstance(label, ClassLabel)
    yield (
        spec.class_weight is None or (spec.repeat and is_class),
        "`class_weight` is for training (`repeat` True) with a ClassLabel.",
    )
    if label is None:
        return
    if records.relabeled:  # the labels come from the index, not from the records
        text = "'global' for new labels"
        yield spec.has_fixed_order, _must("order", text, repr(spec.order))
        yield is_class, _must("label", "a ClassLabel for new labels", label)
        _ = records.labels  # raises if an index lacks some
        key = records.label_key
        yield label.key == key, _must("label.key", f"'{key}', as for the new labels", label.key)
    if not isinstance(label, ClassLabel | MultiHot):
        return
    if isinstance(label, MultiHot):
        size = find_vectors(spec)
        yield (
            size is None or size != label.num_classes,
            f"`label` '{label.key}' has {size} values in each record that was read, one for each"
            " class, and all of them 0 or 1, so they are no numbers of classes, as MultiHot takes:"
            f" Values(size={size}).",
        )
        has_count = label.num_classes is not None
        yield has_count, _must("num_classes", "given for MultiHot", None)
    if spec.label_range:
        lowest, highest = spec.label_range
        yield (
            lowest >= 0,
            f"`label.offset` must be at most the lowest label, {lowest + label.offset}, got"
            f" {label.offset}: it is subtracted from every label, and classes count from 0.",
        )
        count = label.num_classes if label.dtype == "float32" else None
        rule = f"above the highest label, {highest}"
        yield not count or highest < count, _must("num_classes", rule, count)


def find_vectors(spec: "InputSpec") -> int | None:
    """Returns the length of a `MultiHot`'s lists, if all that were read have it, and hold 0 and 1.

    They may be a 0 or 1 for each class, of which `MultiHot` would make the classes 0 and 1.
    """
    label = spec.label
    feature = spec.records.features.get(label.key or "") if isinstance(label, MultiHot) else None
    if feature is None or feature.range is None:
        return None
    (low, high), (shortest, longest) = feature.range, feature.lengths
    return int(longest) if low >= 0 and high <= 1 and shortest == longest > 1 else None


def _rules_of_images(spec: "InputSpec") -> Rules:
    label = spec.label
    if spec.views:
        yield 2 <= len(spec.views) <= 64, _must("views", "2 to 64", len(spec.views))
        yield spec.preprocess == spec.views[0], "`preprocess` must be the first of `views`."
        is_alone = not (spec.mask or spec.mix)
        yield is_alone, "`views` works without `mask` and `mix` only."
        yield (
            len({view.apply_orientation for view in spec.views}) == 1,
            "`views` are of one decoded image: `apply_orientation` must be equal.",
        )
    if spec.mask:
        yield from _rules_of_mask(spec, spec.mask)
        yield (
            spec.transform is None,
            "`transform` works without `mask` only: it gets the image alone, and may move pixels.",
        )
    if spec.mix:
        yield (
            spec.repeat and not spec.mask and spec.class_weight is None,
            "`mix` is for training (`repeat` True) without `mask` and `class_weight`.",
        )
        if isinstance(label, ClassLabel):
            count = label.num_classes or (spec.label_range[1] + 1 if spec.label_range else "n")
            yield (
                label.one_hot,
                "`mix` needs labels that can be mixed:"
                f" label=ClassLabel(one_hot=True, num_classes={count}), and a categorical loss.",
            )
        is_mixable = isinstance(label, ClassLabel | MultiHot)
        yield is_mixable, f"`mix` needs a ClassLabel or a MultiHot, got {label}."


def _rules_of_mask(spec: "InputSpec", mask: SegmentationMask) -> Rules:
    """Compares the values that masks have with those that are meant, as far as they are known."""
    feature = spec.records.features.get(mask.key)
    if feature is None or feature.counts is None:
        return
    stored = [value for value, _ in feature.counts]
    served = mask.map_values(stored)
    found = f"the masks of these records have the values {', '.join(map(str, stored[:20]))}"
    for value, now in zip(stored, served, strict=True):
        is_class = mask.num_classes is None or now < mask.num_classes or now == mask.ignore
        yield (
            is_class,
            f"`mask.num_classes` must be above the value of each pixel, but for `ignore`"
            f" {mask.ignore}: {value} is {now}, and {found}.",
        )
    # Image editors write masks of two classes so: all of the second one would be ignored.
    yield (
        not ({*served} == {0, 255} and mask.ignore == 255 and mask.values is None),
        f"{found}, of which {mask.ignore} is `ignore`: no class but 0 would be left. If 255 is a"
        " class: values={0: 0, 255: 1}. If it is to be ignored: values={255: 255}.",
    )


def _rules_of_features(spec: "InputSpec") -> Rules:
    records = spec.records
    if spec.mask:
        records.check_feature("mask.key", spec.mask.key, ("bytes_list",), (1, 1))
    for key, stored in spec.features.items():
        is_stored = isinstance(stored, Stored)
        yield is_stored, _must("features", "Stored(...) by keys", spec.features)
        taken = ("image", *spec.image_views, "label", "mask", "record_id", "weight")
        yield key not in taken, f"`features` '{key}' would hide the value of that name."
        feature = records.features.get(key)
        # A list without values comes first.
        kind = "".join(feature.kinds[-1:]) if feature else ""
        numbers = {"int64_list": int, "float_list": Real}.get(kind, type(None))
        rule = f"a value like those of '{key}', {records.dtype_of(key)}"
        fits = stored.padding is None or not kind or isinstance(stored.padding, numbers)
        yield fits, _must("padding", rule, stored.padding)
        kinds = (kind,) if stored.padding is None else (kind, "")
        may_lack = stored.padding is not None
        records.check_feature("features", key, kinds, stored.lengths, may_lack=may_lack)


def _must(name: str, rule: str, value: object) -> str:
    return f"`{name}` must be {rule}, got {value}."


def _only_global(name: str, got: str) -> str:
    return f"`{name}` is for order 'global' only, got {got}."
