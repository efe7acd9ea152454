"""The rows of the throughput comparison: what each is, and what all of them do."""

from typing import NamedTuple

from absl import flags

import input_flags
from dali_tf_input import DaliOptions, InputSpec, Preprocess, TfDataOptions

BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Images in a batch.")


class Row(NamedTuple):
    """One row: the package's options for it (None where it is not the package that feeds) and what it is."""

    options: DaliOptions | TfDataOptions | None
    what: str


ROWS = {
    # The 2018 example's baseline: one image after another, nothing made ahead.
    "tf_data_serial": Row(
        TfDataOptions(num_parallel_reads=1, num_parallel_calls=1, prefetch_batches=0, autotune=False),
        "tf.data, one image after another",
    ),
    "tf_data_by_hand": Row(None, "tf.data in parallel, written by hand"),
    "tf_data": Row(TfDataOptions(), "this package on tf.data"),
    "dali_cpu_bare": Row(DaliOptions(device="cpu"), "DALI on CPU, without TensorFlow"),
    "dali_cpu": Row(DaliOptions(device="cpu"), "this package on DALI, CPU"),
    "dali_gpu_bare": Row(DaliOptions(device="gpu"), "DALI on GPU, without TensorFlow"),
    "dali_gpu": Row(DaliOptions(device="gpu"), "this package on DALI, GPU"),
}


def training_spec() -> InputSpec:
    """Returns what is measured: the package's core work at 224 pixels."""
    dataset = input_flags.dataset_spec(input_flags.FILES.value)
    return InputSpec(dataset=dataset, preprocess=Preprocess.for_training(224), order="buffer")
