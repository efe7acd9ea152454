"""The versions of the files that this package writes and reads again.

Each names the release that wrote it, so that an older release can say which one reads it.
"""

import msgspec

from dali_tf_input.errors import InputError


class _Head(msgspec.Struct):
    version: int
    release: str = "a later one"


def refuse_newer(path: str, document: bytes, version: int) -> None:
    """Raises InputError if a JSON document is of a version after the one that this release knows.

    What is no such document at all passes: its reader says what is wrong.
    """
    try:
        head = msgspec.json.decode(document, type=_Head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    if head.version > version:
        raise InputError(
            f"{path} is of version {head.version}, written by a newer release of dali_tf_input,"
            f" {head.release}; this one reads up to version {version}. Use that release here too:"
            " nothing was changed."
        )
