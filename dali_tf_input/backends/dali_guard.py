"""A guard against a TensorFlow crash: strategies reject DALI's datasets.

A strategy reads a dataset through TensorFlow's MultiDeviceIterator, which frees a DALIDataset while
a thread is still reading it: the process dies (SIGSEGV) when an iterator is dropped. Observed with
TensorFlow 2.21 and DALI 2.4. When tests/backends/test_dali_guard.py fails, the bug is fixed and
this module can be removed.

No public hook is called on that path only. So two methods of `tf.distribute.Strategy` are replaced
by wrappers that check their dataset first, using a private method that lists a dataset's inputs. A
OneDeviceStrategy gets a `OneDeviceDataset` instead. Keras requires it to be both a tf.data and a
distributed dataset, so it defines that private method, too.
"""

import functools
from typing import Any

import tensorflow as tf

from dali_tf_input.errors import InputError

_REAL = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.experimental.CentralStorageStrategy,
    tf.distribute.experimental.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
)  # not the default strategy, which leaves a dataset as it is


@functools.cache
def guard_strategies(kinds: tuple[type, ...]) -> None:
    """Makes strategies refuse datasets of `kinds`, also transformed ones."""
    name = "experimental_distribute_dataset"
    owner = next(kind for kind in tf.distribute.Strategy.__mro__ if name in vars(kind))
    distribute, from_function = getattr(owner, name), owner.distribute_datasets_from_function

    @functools.wraps(distribute)
    def distribute_dataset(self: Any, dataset: Any, options: Any = None) -> Any:
        if isinstance(self, _REAL):
            refuse(dataset, kinds)
        return distribute(self, dataset, options)

    @functools.wraps(from_function)
    def distribute_function(self: Any, dataset_fn: Any, options: Any = None) -> Any:
        def make(context: Any) -> Any:
            return refuse(dataset_fn(context), kinds)

        fetches = options is None or options.experimental_fetch_to_device
        return from_function(self, make if fetches else dataset_fn, options)

    owner.experimental_distribute_dataset = distribute_dataset
    owner.distribute_datasets_from_function = distribute_function


def refuse(dataset: Any, kinds: tuple[type, ...]) -> Any:
    """Returns `dataset`; raises InputError if it is made of one of `kinds`."""
    if is_made_of(dataset, kinds):
        raise InputError(
            "No strategy may distribute a dataset of DALI's, as Keras does with a model that was"
            " made under a strategy's scope: TensorFlow would crash. Pass the strategy:"
            " load(spec, options, batch_size=..., strategy=strategy)."
        )
    return dataset


def is_made_of(dataset: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a dataset, or one that it transforms, is of `kinds`."""
    if isinstance(dataset, kinds):
        return True
    if not isinstance(dataset, tf.data.Dataset):
        return False
    return any(is_made_of(source, kinds) for source in dataset._inputs())  # noqa: SLF001


class OneDeviceDataset(tf.data.Dataset, tf.distribute.DistributedDataset):
    """A DALI dataset marked as distributed, so that Keras iterates it on its own device."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        super().__init__(tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """The types and shapes of its elements."""
        return self._dataset.element_spec
