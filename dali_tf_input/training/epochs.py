"""Training datasets that end with their epoch; the next iterator serves the next epoch."""

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from dali_tf_input.errors import InputError
from dali_tf_input.spec.order import StartStep
from dali_tf_input.training.strategies import OneDeviceDataset


@dataclass
class _Use:
    """What is known of an iterator since its epoch began, of `most` batches."""

    most: int
    taken: int = 0  # by Python
    # Whether a `tf.function` was given the iterator. How much it took is not known, and
    # counts as the epoch: Keras counts the batches itself.
    by_graph: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the epoch was used up."""
        return self.by_graph or self.taken >= self.most


class Epochs:
    """A dataset without end, served epoch by epoch.

    One iterator of TensorFlow's serves all epochs: a new one would start DALI's pipeline and
    tf.data's threads again, and repeat the order of "buffer". But if a Python loop takes only
    part of an epoch, that epoch starts again with a new iterator: Keras takes one batch to build
    a model. If the order is not fixed, this applies only until one epoch was used up. After a
    `fit` that was interrupted the next epoch starts where the iterator is.

    In a `tf.function` a loop over it never ends, nor do transformations but `map` and `prefetch`:
    use `take`, which starts at the same step each time.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        steps_per_epoch: int,
        start_step: StartStep,
        fixed_order: bool,
        on_gpu: bool,
    ) -> None:
        self._endless = dataset
        self._start_step, self._fixed_order, self._on_gpu = start_step, fixed_order, on_gpu
        self._iterator: Any = None
        self._use = _Use(steps_per_epoch)
        self._first_step = start_step.step  # of the iterator's epoch
        self._goes_on = False

    @property
    def element_spec(self) -> Any:
        """The types and shapes of its elements."""
        return self._endless.element_spec

    @property
    def next_step(self) -> int:
        """The step at which the next iterator starts, with a fixed order."""
        step = self._start_step.step
        unmoved = self._fixed_order and step == self._first_step
        return step + self._use.most if unmoved and self._use.is_over else step

    def cardinality(self) -> tf.Tensor:
        """Returns the number of batches in an epoch."""
        return tf.constant(self._use.most, tf.int64)

    def repeat(self) -> Any:
        """Returns the dataset without end, for training by `steps_per_epoch`."""
        return self._endless

    def map(self, *arguments: Any, **options: Any) -> Any:
        """As `tf.data.Dataset.map`; the result ends with its epoch too."""
        self._check_place()
        if not isinstance(self._endless, tf.data.Dataset):
            raise InputError(
                "A dataset of a strategy cannot be mapped, as Keras does for `class_weight`: weigh"
                " the classes in the loss."
            )
        return self._wrap(self._endless.map(*arguments, **options))

    def prefetch(self, *arguments: Any, **options: Any) -> Any:
        """As `tf.data.Dataset.prefetch`; the result ends with its epoch too."""
        self._check_place()
        return self._wrap(self._endless.prefetch(*arguments, **options))

    def _wrap(self, dataset: Any) -> "Epochs":
        return type(self)(
            dataset,
            steps_per_epoch=self._use.most,
            start_step=self._start_step,
            fixed_order=self._fixed_order,
            on_gpu=self._on_gpu,
        )

    def _check_place(self) -> None:
        if self._on_gpu:
            raise InputError(
                "TensorFlow cannot transform a dataset of DALI's on a GPU (`map`, `take`, ..., nor"
                " Keras with `class_weight`): do it in the model or in the loop, or use"
                " TfDataOptions()."
            )

    def __iter__(self) -> Any:
        """Returns the iterator of the next epoch, or of this one if it was not used up."""
        use, step = self._use, self.next_step
        self._goes_on = self._goes_on or (use.is_over and not self._fixed_order)
        reached = self._first_step + use.most * (self._fixed_order and use.is_over)
        usable = self._goes_on or use.is_over or not use.taken
        if self._iterator is None or not usable or step != reached:
            self._iterator = None  # frees its pipeline before there is another
            self._iterator = add(_Counted, iter(self._endless))
        self._use = self._iterator.use = _Use(use.most)
        self._start_step.step = self._first_step = step
        return self._iterator


class EpochDataset(Epochs, tf.data.Dataset):  # type: ignore[misc]
    """What `load` returns without a strategy. Other transformations have no end."""

    def __init__(self, dataset: Any, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        tf.data.Dataset.__init__(self, tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._endless]

    @property
    def _variant_tensor(self) -> Any:  # asked for by every transformation
        self._check_place()
        return super()._variant_tensor


class OneDeviceEpochs(EpochDataset, tf.distribute.DistributedDataset):  # type: ignore[misc]
    """The same of a `OneDeviceDataset`."""


def end_epochs(dataset: Any, **arguments: Any) -> Any:
    """Wraps a dataset without end, as `load` makes it; `arguments` are those of `Epochs`."""
    if isinstance(dataset, OneDeviceDataset):
        return OneDeviceEpochs(dataset, **arguments)
    if isinstance(dataset, tf.data.Dataset):
        return EpochDataset(dataset, **arguments)
    epochs = add(Epochs, dataset)  # a strategy's, whose class Keras looks for
    Epochs.__init__(epochs, dataset, **arguments)
    return epochs


class _Counted:
    """What is added to an iterator of TensorFlow's: the end of its epoch."""

    use: _Use

    def __next__(self) -> Any:
        if self.use.taken >= self.use.most:
            raise StopIteration
        batch = super().__next__()  # type: ignore[misc]
        self.use.taken += 1
        return batch

    @property
    def _type_spec(self) -> Any:  # asked of what a `tf.function` is given
        self.use.by_graph = True
        return super()._type_spec  # type: ignore[misc]


class Padded:
    """What is added to a strategy's dataset whose last step is padded: a warning, once."""

    _warned = False

    def __iter__(self) -> Any:
        frame = None if self._warned else sys._getframe(1)
        while frame:
            model = frame.f_locals.get("self")
            if frame.f_code.co_name == "evaluate" and isinstance(model, keras.Model):
                if "test_step" not in vars(model):  # `Input.evaluate` sets one
                    self._warned = True
                    text = "Keras's own `evaluate` counts the padding of the last step in `metrics`"
                    warnings.warn(f"{text}: use held_out.evaluate(model).", stacklevel=2)
                break
            frame = frame.f_back
        return super().__iter__()  # type: ignore[misc]


def add(kind: type, value: Any) -> Any:
    """Returns a copy of an object of TensorFlow's, of a class that `kind` adds to its own."""
    both = type(kind.__name__, (kind, type(value)), {})
    made: Any = object.__new__(both)
    vars(made).update(vars(value))
    return made
