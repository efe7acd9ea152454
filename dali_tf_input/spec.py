"""What a model is fed: a frozen description that both backends read.

A `*Spec` and a `Preprocess` say what comes out, the same for every backend; an `*Options` says how
fast. Everything is checked in Python when it is made, before any pipeline exists.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from dali_tf_input.dataset_spec import DatasetSpec
from dali_tf_input.errors import Count, InputError, Within, check, check_fields
from dali_tf_input.labels import ClassLabel
from dali_tf_input.preprocess import Preprocess

Order = Literal["sequential", "buffer", "global"]


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """All of what comes out, equal for both backends.

    Attributes:
      dataset: the records there are.
      preprocess: what the model sees of them.
      order: "global" (training): in each epoch every order of the records is equally likely (with
        `shuffle_block_size`, every order of the blocks), the same one on both backends and for any
        number of replicas, a function of (seed, epoch). "buffer" (training from slow disks): each
        next record is drawn at random from a buffer, which the next record of the files then fills;
        DALI reads the files in their order, tf.data in a new order each pass and
        `num_parallel_reads` of them in turn, and so mixes better. "sequential" (evaluation): the
        order of the files.
      buffer_size: records in that buffer, at least 1, for each pipeline. It holds encoded images:
        1024 of ImageNet's take 113 MB. The default is DALI's own (`initial_fill`).
      seed: makes order, crops and mirrors repeatable, in [0, 2**31). Order "buffer" repeats on the
        same backend with the same number of replicas and, for tf.data, the same
        `num_parallel_reads` and `tf.random.set_seed`.
      shuffle_block_size: for order "global" on storage that is slow to seek: this many neighbors in
        a file stay together, at least 1.
      repeat: False is one pass that serves each record once, for evaluation; order "sequential"
        only. Batches then hold a third value, sample weights float32 (batch,). On one replica that
        is a CPU's the last batch is short and all weights are 1. Otherwise padding of weight 0
        fills the last step, and records weigh a constant of at least 1, such that Keras's mean
        loss over all batches, with its default reduction, is the mean over the records.
      one_hot: number of classes n: labels come out as float32 (n,), 1 at the label and 0 elsewhere,
        and all 0 for a label out of range (index level "schema" finds those); None leaves them
        int64.
      label_smoothing: part of the 1 that is spread evenly over all classes, in [0, 1); needs
        `one_hot`.
    """

    dataset: DatasetSpec
    preprocess: Preprocess
    order: Order
    buffer_size: Annotated[int, Within(1, 1 << 30)] = 1024
    seed: int = 0
    shuffle_block_size: Count = 1
    repeat: bool = True
    one_hot: Count | None = None
    label_smoothing: float = 0.0

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
        self.label.check(self.dataset.label_range[1] if self.dataset.label_range else 0)

    @property
    def has_fixed_order(self) -> bool:
        """Whether each step's records are fixed: with order "global", or in one pass."""
        return self.order == "global" or not self.repeat

    @property
    def label(self) -> ClassLabel:
        """How labels are stored, and what comes out of them."""
        return ClassLabel(
            key=self.dataset.label_key,
            offset=self.dataset.label_offset,
            one_hot=self.one_hot,
            smoothing=self.label_smoothing,
        )
