"""What a model is fed: a frozen description that both backends read.

A `*Spec` and a `Preprocess` say what comes out, the same for every backend; an `*Options` says how
fast. Everything is checked in Python when it is made, before any pipeline exists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from dali_tf_input.errors import Count, InputError, Within, check, check_fields
from dali_tf_input.records import labels
from dali_tf_input.records.labels import ClassLabel, Label, MultiHot, SegmentationMask, Stored
from dali_tf_input.records.records import Records
from dali_tf_input.records.schema import name_keys
from dali_tf_input.spec.preprocess import Preprocess

Order = Literal["sequential", "buffer", "global"]


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """All that comes out, the same on both backends.

    Attributes:
      records: the records there are.
      preprocess: what the model sees of them.
      order: "global" (training): in each epoch every order of the records is equally likely (with
        `shuffle_block_size`, every order of the blocks), the same one on both backends and for any
        number of replicas, a function of (seed, epoch). "buffer" (training from slow disks): each
        next record is drawn at random from a buffer, which the next record of the files then fills.
        The files come in a new order each epoch, several in turn; DALI's own reader, on a GPU,
        reads them in their order. "sequential" (evaluation): the order of the files.
      buffer_size: records in that buffer, at least 1, for each pipeline. It holds encoded images:
        1024 of ImageNet's take 113 MB. The default is DALI's own (`initial_fill`).
      seed: makes order, crops and mirrors repeatable, in [0, 2**31). Order "buffer" repeats with
        the same number of replicas and the same `num_parallel_reads`.
      shuffle_block_size: for order "global" on storage that is slow to seek: this many neighbors in
        a file stay together, at least 1.
      repeat: False is one pass that serves each record once, for evaluation; order "sequential"
        only. The last batch holds the remainder; on several replicas some may have none of it.
      label: what a label is and how it comes out: a `ClassLabel`, `MultiHot` or `Values`; None for
        images without labels.
      class_weight: weights of the classes in the loss, by class, 1 for others; or "balanced",
        records / (classes * records of the class), for records that were indexed at level
        "schema". Batches then hold sample weights, which work under strategies and on DALI, as
        Keras's own `class_weight` does not.
      record_ids: whether the numbers of the records come out too, int64, in [0, num_records):
        `records.locate` and `records.read` take them.
      mask: the mask that comes out too, with the crop and the mirror of its image.
      features: further features that come out as they are stored, by their keys.
    """

    records: Records
    preprocess: Preprocess
    order: Order
    buffer_size: Annotated[int, Within(1, 1 << 30)] = 1024
    seed: int = 0
    shuffle_block_size: Count = 1
    repeat: bool = True
    label: Label | None = field(default_factory=ClassLabel)
    class_weight: dict[int, float] | Literal["balanced"] | None = field(default=None, hash=False)
    record_ids: bool = False
    mask: SegmentationMask | None = None
    features: dict[str, Stored] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shuffle_block_size > 1 and self.order != "global":
            raise InputError(
                f"`shuffle_block_size` is for order 'global' only, got {self.shuffle_block_size}"
                f" with {self.order!r}."
            )
        if not self.repeat and self.order != "sequential":
            raise InputError(
                f"`repeat` False is for order 'sequential' only, got {self.order!r}: it is one pass"
                " that serves each record once."
            )
        check(0 <= self.seed < 2**31, "seed", "in [0, 2**31)", self.seed)
        self._check_label()
        if self.mask:
            self.records.check_feature("mask.key", self.mask.key, ("bytes_list",), (1, 1))
            if self.preprocess.auto_augment or self.preprocess.apply_orientation:
                text = "`mask` works without `auto_augment` and `apply_orientation` only."
                raise InputError(text)
        for key, stored in self.features.items():
            check(isinstance(stored, Stored), "features", "Stored(...) by keys", self.features)
            if key in ("image", "label", "mask", "record_id", "weight"):
                raise InputError(f"`features` '{key}' would hide the value of that name.")
            found = self.records.features.get(key)
            kind = "".join(found.kinds[-1:]) if found else ""  # a list without values comes first
            kinds = (kind,) if stored.padding is None else (kind, "")
            self.records.check_feature("features", key, kinds, stored.lengths)

    def _check_label(self) -> None:
        """Completes `label` by what the dataset knows and checks it."""
        label, records = self.label, self.records
        if self.class_weight is not None and not (self.repeat and isinstance(label, ClassLabel)):
            raise InputError("`class_weight` is for training (`repeat` True) with a ClassLabel.")
        if label is None:
            return
        key = label.key or records.label_key
        if key is None:
            raise name_keys(records.features)
        label = replace(label, key=key)
        records.check_feature("label_key", key, label.kinds, label.lengths)
        if not isinstance(label, labels.Values):
            offset = records.label_offset if label.offset is None else label.offset
            label = replace(label, offset=offset)
            found = records.label_range if key == records.label_key else None
            if isinstance(label, MultiHot):
                check(label.num_classes is not None, "num_classes", "given for MultiHot", None)
            count = label.num_classes if label.dtype == "float32" else None
            if found and count and "int64_list" in label.kinds:
                highest = found[1] + records.label_offset - offset
                check(highest < count, "num_classes", f"above the highest label, {highest}", count)
        object.__setattr__(self, "label", label)
        self.class_weights()  # raises if they are none

    @property
    def has_fixed_order(self) -> bool:
        """Whether the records of each step are fixed, as with all orders but "buffer"."""
        return self.order != "buffer"

    def class_weights(self) -> list[float]:
        """Returns the weight of each class, from 0 on; none without `class_weight`."""
        if self.class_weight is None or not isinstance(self.label, ClassLabel):
            return []
        known = self.records.label_range or (0, 0)
        count = max(self.label.num_classes or 1, known[1] + 1)
        return labels.class_weights(self.class_weight, self.records.class_counts, count)

    @property
    def outputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of all that comes out of a record, by name."""
        found: dict[str, tuple[tuple[int, ...], str]]
        found = {"image": (self.preprocess.image_shape, str(self.preprocess.dtype))}
        if self.label:
            found["label"] = (self.label.shape, self.label.dtype)
        if self.mask:
            found["mask"] = (self.preprocess.image_size, "int32")
        if self.class_weight is not None:
            found["weight"] = ((), "float32")
        if self.record_ids:
            found["record_id"] = ((), "int64")
        for key, stored in self.features.items():
            found[key] = (stored.shape, self.records.dtype_of(key))
        return found

    def arrange(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arranges values by name, see `outputs`, as Keras takes them: (x, y, sample weight).

        x is the image, or with `record_ids` or `features` a dictionary of "image", "record_id" and
        the keys; y the label or the mask, or a dictionary of both. Absent values are omitted.
        """
        named = {name: values[name] for name in self.outputs}
        weights = [named.pop("weight")] if "weight" in named else []
        targets = {name: named.pop(name) for name in ("label", "mask") if name in named}
        parts = [part for part in (named, targets) if part]
        return (*(part if len(part) > 1 else next(iter(part.values())) for part in parts), *weights)

    @property
    def is_structured(self) -> bool:
        """Whether `arrange` makes dictionaries."""
        return self.record_ids or bool(self.features) or bool(self.label and self.mask)

    @property
    def is_mapped(self) -> bool:
        """Whether batches are transformed once more, which a GPU's DALI dataset cannot be.

        Those of a pass, whose last one is shorter, and those with more than (image, label, weight).
        """
        return self.is_structured or not self.repeat

    @property
    def label_range(self) -> tuple[int, int] | None:
        """The lowest and the highest label as they come out, if the index knows them."""
        return self.records.label_range
