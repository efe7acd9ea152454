"""The error for bad input, and the check for arguments that take one of a few values."""

from collections.abc import Collection


class InputError(ValueError):
    """A mistake in what this package was given: a file or an argument.

    The message says what is wrong, where, and, if a command fixes it, which one.
    """


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raises InputError unless the argument `name` has one of the values in `choices`."""
    if value not in choices:
        raise InputError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")
