"""The flags that say which records are read, shared by the scripts that read them."""

from absl import flags

from dali_tf_input import DatasetSpec, InputError

FILES = flags.DEFINE_multi_string("files", [], "TFRecord file or glob pattern of indexed files; may be given several times.")
INDEX_DIR = flags.DEFINE_string("index_dir", None, "Folder of the index files; beside each TFRecord file by default.")
IMAGE_KEY = flags.DEFINE_string("image_key", None, "Feature key of the encoded image; TF-slim's or tfds' by default.")
LABEL_KEY = flags.DEFINE_string("label_key", None, "Feature key of the integer label; TF-slim's or tfds' by default.")
LABEL_OFFSET = flags.DEFINE_integer("label_offset", 0, "Label of the first class as stored; 1 for TF-slim's ImageNet.")


def dataset_spec(files: list[str]) -> DatasetSpec:
    """Describes the records in `files` by the flags."""
    if not files:
        raise InputError("Name the TFRecord files: --files='path/train-*'")
    return DatasetSpec.from_files(
        files[0] if len(files) == 1 else files,
        index_dir=INDEX_DIR.value,
        image_key=IMAGE_KEY.value,
        label_key=LABEL_KEY.value,
        label_offset=LABEL_OFFSET.value,
    )


def as_arguments(files: list[str]) -> list[str]:
    """Returns these flags as command-line arguments for a script that shares them."""
    arguments = [f"--files={pattern}" for pattern in files]
    given = [flag for flag in (INDEX_DIR, IMAGE_KEY, LABEL_KEY, LABEL_OFFSET) if flag.value]
    return arguments + [f"--{flag.name}={flag.value}" for flag in given]
