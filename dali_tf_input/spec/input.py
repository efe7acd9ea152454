"""The backend-independent description of a model's input.

An `InputSpec` and its `Preprocess` define what batches contain; the options of a backend define how
it produces them. All fields are validated in Python at construction, before any pipeline exists.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from dali_tf_input.errors import (
    Count,
    InputError,
    Path,
    Pixels,
    Within,
    check,
    check_keywords,
    checked,
)
from dali_tf_input.random import Integers
from dali_tf_input.records.checks import find_keys, unknown_keys_error
from dali_tf_input.records.class_names import MAIN_KEYS, Names, shift_names
from dali_tf_input.records.contents import MAX_CLASSES, Counts, FeatureStats
from dali_tf_input.records.labels import (
    ClassLabel,
    Label,
    MultiHot,
    SegmentationMask,
    Stored,
    Values,
    class_weights,
)
from dali_tf_input.records.records import Records
from dali_tf_input.spec.balance import Balance, Mixture, find_classes, is_label_of_index
from dali_tf_input.spec.mix import Mix
from dali_tf_input.spec.plan import Groups, Plan
from dali_tf_input.spec.preprocess import Preprocess
from dali_tf_input.spec.rules import check_rules

Order = Literal["sequential", "buffer", "global"]


@checked
@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """Describes the batches to produce, independent of the backend.

    `for_training` and `for_evaluation` provide the usual defaults.

    Examples:
      >>> spec = InputSpec(
      ...     records=Records.from_files("records/train-*"),
      ...     preprocess=Preprocess.for_training(224),
      ...     order="global",
      ...     label=ClassLabel(offset=1),
      ... )

    Attributes:
      records: the records to read.
      preprocess: the preprocessing of the images.
      order: "global" (training): a new pseudo-random permutation of all records in each epoch
        (with `shuffle_block_size`, of all blocks). It is a function of (seed, epoch), the same on
        both backends and for any number of replicas.
        "buffer" (training from slow disks): each record is drawn at random from a buffer and
        replaced there by the next record of the files. Files are read in a new order each epoch,
        several at a time; DALI's own reader, on a GPU, reads them in the given order.
        "sequential" (evaluation): the order of the files.
      buffer_size: number of records in each pipeline's shuffle buffer, at least 1. The buffer holds
        encoded images: 1024 ImageNet images take 113 MB. The default is DALI's `initial_fill`.
      seed: makes order, crops and mirrors repeatable, in [0, 2**31). Order "buffer" is repeatable
        only with the same number of replicas and the same `num_parallel_reads`.
      shuffle_block_size: how many neighboring records stay together, at least 1; for order
        "global" on storage that is slow to seek.
      repeat: False serves each record exactly once, for evaluation; order "sequential" only. The
        last batch holds the remainder; with several replicas, some may receive none of it.
      label: the label and its output format: a `ClassLabel`, `MultiHot` or `Values`; None for
        images without labels.
      class_weight: a dict that maps classes to their weights in the loss; other classes have weight
        1. Or "balanced": number of records / (number of classes * records of the class), for
        records that were indexed at level "schema". Batches then include sample weights, which,
        unlike Keras's own `class_weight`, work under strategies and with DALI.
      balance: how often each class is served, without changing the length of an epoch; order
        "global" only, for records that were indexed at level "schema". "class" serves all classes
        equally often. A dict maps classes to sampling factors, above 0; other classes have
        factor 1. Records of the same class occur equally often, to within one.
      temperature: evens out very different class sizes, at least 1: classes are served in
        proportion to ``(records * factor) ** (1 / temperature)``. 1 keeps the stored proportions;
        larger values make classes more equal. Source: Arivazhagan et al., 2019,
        https://arxiv.org/abs/1907.05019.
      mixture: the parts of `records` that are served in exact proportions; set by `for_training`.
      repeated_augmentation: how many times each record occurs in a batch, each time with a
        different crop and mirror; an epoch has that many times fewer distinct records. Must divide
        the number of images in a step. Order "global" only. Source: Hoffer et al., 2019,
        https://arxiv.org/abs/1901.09335.
      record_ids: whether batches include the ids of the records, int64, for `records.locate` and
        `records.read`.
      mask: the mask to serve with each image, with the same crop and mirror.
      features: additional features to serve as they are stored, by key.
      transform: a custom function, tf.data only: ``transform(image, seed)`` gets the image after
        its crop and `preprocess.augment`, uint8 (*preprocess.image_size, 3), and returns an image
        of the same type and shape, which is then mirrored and normalized. The seed, int64 (2,), is
        for `tf.random.stateless_*`: it differs for each image and epoch, and is the same again
        after a resume.
      mix: how images of a batch are mixed, with their one-hot labels; for training.
      views: several preprocessings of each image, for self-supervised training; the image is
        decoded once. Batches have "image_0", "image_1", ... instead of the image, each with its own
        random numbers. `preprocess` must be the first one.
    """

    EXAMPLE: ClassVar[str] = "InputSpec.for_training('records/train-*', 224)"
    records: Records
    preprocess: Preprocess
    order: Order
    buffer_size: Annotated[int, Within(1, 1 << 30)] = 1024
    seed: int = 0
    shuffle_block_size: Count = 1
    repeat: bool = True
    label: Label | None = field(default_factory=ClassLabel)
    class_weight: dict[int, float] | Literal["balanced"] | None = field(default=None, hash=False)
    balance: Balance = field(default=None, hash=False)
    temperature: Annotated[float, Within(1)] = 1.0
    mixture: Mixture | None = None
    repeated_augmentation: Count = 1
    record_ids: bool = False
    mask: SegmentationMask | None = None
    features: dict[str, Stored] = field(default_factory=dict, hash=False)
    transform: Callable[..., Any] | None = None
    mix: Mix | None = None
    views: tuple[Preprocess, ...] = ()

    def __post_init__(self) -> None:
        if self.label:
            object.__setattr__(self, "label", self._with_key(self.label))
        check_rules(self)
        if self.is_balanced or self.mixture:
            _ = self._groups  # raises if there are none
        self.class_weights()  # raises if they are none

    def _with_key(self, label: Label) -> Label:
        """Returns `label` with its key, checked against what is known about the records."""
        records = self.records
        _, key = find_keys(records.features, image_key=records.image_key, label_key=label.key)
        if records.relabeled:
            key = label.key or records.label_key or key
        if key is None:
            raise unknown_keys_error(records.features)
        if records.relabeled:  # the labels are not those of the records
            own, indexed = getattr(label, "vocabulary", None), records.label_vocabulary
            if own and indexed and own != indexed:
                raise InputError(
                    "`label.vocabulary` differs from the one that the records were indexed with, by"
                    " which `relabel` and `+` number them. Use that one, or index again with"
                    " --vocabulary."
                )
            return replace(label, key=key)
        kinds = label.kinds
        if isinstance(label, Values) and key in records.features:  # lists of one kind are parsed
            stored = [kind for kind in kinds if kind in records.features[key].kinds]
            if len(stored) > 1:
                raise InputError(
                    f"`label.key` '{key}' holds {' and '.join(stored)} in different records, of"
                    " which Values needs one: write all records with one type."
                )
            kinds = tuple(stored) or kinds
        records.check_feature("label.key", key, kinds, label.lengths)
        return replace(label, key=key)

    @property
    def label_range(self) -> tuple[int, int] | None:
        """The lowest and highest class seen by the index step, after subtracting the offset.

        Covers all records at index level "schema" or above, otherwise a sample. None if labels are
        not integers, or if nothing is known about them.
        """
        feature, offset = self._label_feature
        if counts := self._label_counts:
            return counts[0][0] - offset, counts[-1][0] - offset
        if feature is None or feature.range is None:
            return None
        return int(feature.range[0]) - offset, int(feature.range[1]) - offset

    @property
    def class_counts(self) -> Counts | None:
        """The (class, count) pairs of all classes that occur, after subtracting the offset.

        None if a file was not indexed at level "schema" with this label, if there are more than
        10,000 classes, or for a subset with a `MultiHot`.
        """
        feature, offset = self._label_feature
        counts = self._label_counts
        if counts is None and feature and not self.records.subset:
            counts = feature.counts
        if counts is None or len(counts) > MAX_CLASSES:
            return None
        return tuple((label - offset, count) for label, count in counts)

    @functools.cached_property
    def class_names(self) -> Names | None:
        """The names of the classes, as labels are served; None where one is not known.

        They are those of the vocabulary, or of the records, counted from the label's offset. Where
        it takes the highest label to tell whether the first name is that of 0 or of the offset,
        they are None unless the index step has seen all labels. Other labels than the set's main
        one are named by ``<key>.labels.txt``, as tfds writes it.

        Raises:
          InputError: as `Records.class_names`.
        """
        label = self.label
        if not isinstance(label, ClassLabel | MultiHot):
            return None
        if isinstance(label, ClassLabel) and label.vocabulary:
            return label.vocabulary
        main_keys = (self.records.label_key,) if self.records.label_key else MAIN_KEYS
        is_main = label.key in main_keys
        names = self.records.class_names if is_main else self.records.find_names(label.key)
        feature, offset = self._label_feature
        if names and offset > 0 and feature and feature.range:
            # Names of labels from 1 on may have a line for 0, or none.
            if feature.range[1] - offset >= len(names) - 1:
                return names
            num_records = sum(file.num_records for file in self.records.files)
            if feature.records < num_records and not feature.counts:
                return None  # the highest label of a sample does not tell
        return shift_names(names, label.offset)

    @functools.cached_property
    def mask_names(self) -> Names | None:
        """The names of the mask's classes, in ``<key>.labels.txt``; None if they are not known.

        Raises:
          InputError: as `Records.class_names`.
        """
        return self.records.find_names(self.mask.key) if self.mask else None

    @property
    def _label_counts(self) -> Counts | None:
        """The number of these records with each label, if the index has their labels."""
        is_known = is_label_of_index(self.records, self.label)
        return self.records.label_counts if is_known else None

    @property
    def _label_feature(self) -> tuple[FeatureStats | None, int]:
        """The label's feature, if known and of integers, else None; and the label's offset."""
        label = self.label
        if not isinstance(label, ClassLabel | MultiHot) or not label.is_integer:
            return None, 0
        return self.records.features.get(label.key or ""), label.offset

    @classmethod
    @checked
    def for_training(
        cls,
        records: Records | Path | Sequence[Path] | dict[Records, float],
        preprocess: Preprocess | Pixels | tuple[Pixels, Pixels] = 224,
        **fields: Any,
    ) -> "InputSpec":
        """Describes training input: all records, reshuffled each epoch, repeating indefinitely.

        Images are preprocessed as by `Preprocess.for_training`: resized to 8/7 of the size, cropped
        at random, mirrored with probability 0.5, and normalized.

        Examples:
          >>> spec = InputSpec.for_training("records/train-*", 224)
          >>> changes = {"crop": RandomResizedCrop(), "augment": (augment.RandAugment(),)}
          >>> spec = InputSpec.for_training("records/train-*", 224, **changes, seed=1)

        Args:
          records: indexed TFRecord files, given as a path, a URL, a pattern or a list of them, as
            for `Records.from_files`; or a `Records`; or a mixture, a dict from `Records` to shares
            that are above 0 and sum to 1. Any contiguous part of an epoch then keeps these
            proportions to within one record with two parts, and three with more. A part is served
            completely before it starts over in a new order; an epoch ends when the first part has
            been served once. Parts may have different feature keys if their files were indexed at
            level "schema"; `Records.relabel` can map their labels to common classes.
          preprocess: height and width of the images in pixels, or (height, width), or a
            `Preprocess`.
          **fields: further fields of `InputSpec`, such as `label` and `seed`; fields of
            `Preprocess`, such as `crop` and `dtype`, which override those of `preprocess`; and
            `normalization`, see `Preprocess.for_training`. `order` defaults to "global" and
            `repeat` to True.

        Raises:
          InputError: see `Records.from_files`; also if a field is unknown or has an invalid value.
        """
        fields = {"order": "global", "repeat": True, **fields}
        return cls._make("for_training", records, preprocess, fields)

    @classmethod
    @checked
    def for_evaluation(
        cls,
        records: Records | Path | Sequence[Path],
        preprocess: Preprocess | Pixels | tuple[Pixels, Pixels] = 224,
        **fields: Any,
    ) -> "InputSpec":
        """Describes evaluation input: one epoch over all records, in the order of the files.

        Images are preprocessed as by `Preprocess.for_evaluation`: the shorter side is resized to
        8/7 of the size, and the center is cropped and normalized.

        Examples:
          >>> spec = InputSpec.for_evaluation("records/validation-*", 224)
          >>> spec = InputSpec.for_evaluation("records/test-*", 224, record_ids=True)

        Args:
          records: as in `for_training`.
          preprocess: as in `for_training`.
          **fields: as in `for_training`, but `order` defaults to "sequential" and `repeat` to
            False.

        Raises:
          InputError: as in `for_training`.
        """
        fields = {"order": "sequential", "repeat": False, **fields}
        return cls._make("for_evaluation", records, preprocess, fields)

    @classmethod
    def _make(
        cls,
        name: Literal["for_training", "for_evaluation"],
        records: Records | Path | Sequence[Path] | dict[Records, float],
        preprocess: Preprocess | int | tuple[int, int],
        fields: dict[str, Any],
    ) -> "InputSpec":
        own = [field.name for field in dataclasses.fields(cls)]
        of_preprocess = [field.name for field in dataclasses.fields(Preprocess)]
        of_preprocess += ["normalization", "recipe"][: 2 if name == "for_training" else 1]
        for key in ("index_dir", "image_key", "cache_dir"):
            if key in fields:
                call = f"InputSpec.{name}(Records.from_files(files, {key}=...), ...)"
                raise InputError(f"`{key}` belongs to the records: {call}.")
        check_keywords(f"InputSpec.{name}", fields, [*own, *of_preprocess])
        changes = {key: value for key, value in fields.items() if key in of_preprocess}
        views = fields.get("views", ())
        is_list = isinstance(views, tuple | list)
        are_right = is_list and all(isinstance(view, Preprocess) for view in views)
        if not are_right or views:
            if changes or not are_right:
                rule = "a tuple of Preprocess, which have all fields of the images"
                raise InputError(f"`views` must be {rule}, got {views} and {[*changes]}.")
            preprocess = views[0]
        if isinstance(preprocess, Preprocess):
            made = preprocess.with_fields(**changes)
        else:
            made = getattr(Preprocess, name)(changes.pop("image_size", preprocess), **changes)
        if isinstance(records, dict):
            fields["mixture"] = mixture = Mixture.of(records)
            records = mixture.records
        elif not isinstance(records, Records):
            records = Records.from_files(records)
        rest = {key: value for key, value in fields.items() if key in own}
        return cls(records=records, preprocess=made, **rest)

    @property
    def has_fixed_order(self) -> bool:
        """Whether the records of each step are fixed, as with all orders but "buffer"."""
        return self.order != "buffer"

    def class_weights(self) -> list[float]:
        """Returns the weight of each class, from 0 on; none without `class_weight`."""
        if self.class_weight is None or not isinstance(self.label, ClassLabel):
            return []
        _, highest = self.label_range or (0, 0)
        count = max(self.label.num_classes or 1, highest + 1)
        counts = self._label_counts  # of more classes, too, than `class_counts` lists
        if counts is not None:
            counts = tuple((label - self.label.offset, number) for label, number in counts)
        return class_weights(self.class_weight, counts or self.class_counts, count)

    @property
    def is_balanced(self) -> bool:
        """Whether classes are served in other proportions than they are stored."""
        return self.balance is not None or self.temperature != 1

    @functools.cached_property
    def _groups(self) -> tuple[Groups, Integers]:
        """The classes of `balance`, or the parts of the mixture, and the group of each record.

        Groups count from 0. Classes are in the order of their labels, without those that have no
        records.

        Raises:
          InputError: the labels are not known, or a class of `balance` has no records.
        """
        if self.mixture:
            group, shares = self.mixture.find_parts(self.records), self.mixture.shares
        else:
            group, shares = find_classes(self.records, self.label, self.balance, self.temperature)
        sizes = np.bincount(group, minlength=len(shares))
        return Groups(tuple(sizes.tolist()), shares, are_parts=self.mixture is not None), group

    @functools.cached_property
    def grouped_records(self) -> Integers | None:
        """The records, from 0, sorted by class or part: `Plan.positions` counts in this order.

        None if records are served without regard to classes and parts.
        """
        if not (self.is_balanced or self.mixture):
            return None
        return np.argsort(self._groups[1], kind="stable")

    @property
    def outputs_of_index(self) -> tuple[str, ...]:
        """The values that do not come from the records: "record_id", and "label" if relabeled."""
        new = ("label",) if self.records.relabeled and self.label else ()
        return (("record_id",) if self.record_ids else ()) + new

    @property
    def records_per_epoch(self) -> int:
        """How many records an epoch has, including a remainder that does not fill a step."""
        return (self.mixture or self.records).num_records

    def plan(self, shard_batch_size: int, *, num_shards: int = 1) -> Plan:
        """Returns the plan of an epoch, for `shard_batch_size` images in each shard's batch.

        Raises:
          InputError: `repeated_augmentation` does not divide a step.
        """
        size = shard_batch_size * num_shards
        rule = f"a divisor of the {size} images of a step"
        check(
            size % self.repeated_augmentation == 0,
            "repeated_augmentation",
            rule,
            self.repeated_augmentation,
        )
        return Plan(
            num_slots=self.records_per_epoch,
            shard_batch_size=shard_batch_size,
            num_shards=num_shards,
            keep_remainder=not self.repeat,
            seed=self.seed if self.order == "global" else None,
            block_size=self.shuffle_block_size,
            repeats=self.repeated_augmentation,
            groups=self._groups[0] if self.is_balanced or self.mixture else None,
        )

    @checked
    def ids_of_step(self, step: Annotated[int, Within(0, 2**62)], *, batch_size: Count) -> Integers:
        """Returns the record ids of a step, in the order of its images: int64 (batch_size,).

        Steps count over all epochs. `batch_size` is the global one. The last step of an evaluation
        may be shorter. Order "buffer" has no such list.
        """
        plan = self.plan(batch_size)
        count = self.records_per_epoch
        rule = f"at most the {count:,} records of an epoch"
        check(plan.steps_per_epoch > 0, "batch_size", rule, batch_size)
        epoch, step = divmod(step, plan.steps_per_epoch)
        positions = plan.positions(epoch, plan.slots_of_step(step))
        if (grouped := self.grouped_records) is not None:
            positions = grouped[positions]
        return self.records.ids_at(positions)

    @property
    def outputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each output of a record, by name."""
        outputs: dict[str, tuple[tuple[int, ...], str]]
        outputs = {
            name: (preprocess.image_shape, str(preprocess.dtype))
            for name, preprocess in self.image_views.items()
        }
        if self.label:
            outputs["label"] = (self.label.shape, self.label.dtype)
        if self.mask:
            outputs["mask"] = (self.preprocess.image_size, "int32")
        if self.class_weight is not None:
            outputs["weight"] = ((), "float32")
        if self.record_ids:
            outputs["record_id"] = ((), "int64")
        for key, stored in self.features.items():
            outputs[key] = (stored.shape, self.records.dtype_of(key))
        return outputs

    @property
    def image_views(self) -> dict[str, Preprocess]:
        """The preprocessing of each image output, by name."""
        if not self.views:
            return {"image": self.preprocess}
        return {f"image_{number}": view for number, view in enumerate(self.views)}

    def arrange(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arranges values, named as in `outputs`, for Keras: (x, y, sample weight).

        x is the image or, with `views`, `record_ids` or `features`, a dictionary of the images,
        "record_id" and the features. y is the label, the mask, or a dictionary of both. Absent
        values are omitted.
        """
        inputs = {name: values[name] for name in self.outputs}
        weights = [inputs.pop("weight")] if "weight" in inputs else []
        targets = {name: inputs.pop(name) for name in ("label", "mask") if name in inputs}
        parts = [part for part in (inputs, targets) if part]
        return (*(part if len(part) > 1 else next(iter(part.values())) for part in parts), *weights)

    @property
    def is_structured(self) -> bool:
        """Whether `arrange` makes dictionaries."""
        return bool(self.record_ids or self.features or self.views or (self.label and self.mask))
