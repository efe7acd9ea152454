"""labels.txt: the name of label i in line i + 1."""

from dali_tf_input import InputError


def read_names(path: str) -> list[str]:
    """Returns the names of the labels; bytes that are not UTF-8 are replaced.

    Raises:
      InputError: the file cannot be read, or names nothing.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            names = [line.strip() for line in stream.read().rstrip().splitlines()]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if not names:
        raise InputError(
            f"{path} names no label: it needs one name per line. Write them, or remove it."
        )
    return names
