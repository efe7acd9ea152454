"""The flags that say which records are read, shared by the scripts that read them."""

from absl import flags

from dali_tf_input import DatasetSpec, InputError

FILES = flags.DEFINE_multi_string("files", [], "TFRecord file or glob pattern of indexed files; may be given several times.")
INDEX_DIR = flags.DEFINE_string("index_dir", None, "Folder of the index files; beside each TFRecord file by default.")
IMAGE_KEY = flags.DEFINE_string("image_key", "image/encoded", "Feature key of the encoded image.")
LABEL_KEY = flags.DEFINE_string("label_key", "image/class/label", "Feature key of the integer label.")


def dataset_spec(files: list[str]) -> DatasetSpec:
    """Describes the records in `files` by the flags."""
    if not files:
        raise InputError("Name the TFRecord files: --files='path/train-*'")
    return DatasetSpec.from_files(
        files[0] if len(files) == 1 else files,
        index_dir=INDEX_DIR.value,
        image_key=IMAGE_KEY.value,
        label_key=LABEL_KEY.value,
    )


def as_arguments(files: list[str]) -> list[str]:
    """Returns these flags as command-line arguments for a script that shares them."""
    arguments = [f"--files={pattern}" for pattern in files]
    arguments += [f"--image_key={IMAGE_KEY.value}", f"--label_key={LABEL_KEY.value}"]
    return arguments + ([f"--index_dir={INDEX_DIR.value}"] if INDEX_DIR.value else [])
