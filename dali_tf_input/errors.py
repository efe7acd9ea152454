"""The error for bad input, and the checks of arguments that raise it."""

from collections.abc import Collection


class InputError(ValueError):
    """A mistake in what this package was given: a file or an argument.

    The message says what is wrong, where, and, if a command fixes it, which one.
    """


def check(holds: bool, name: str, rule: str, value: object) -> None:
    """Raises InputError unless the rule for the argument `name` holds for its value."""
    if not holds:
        raise InputError(f"`{name}` must be {rule}, got {value}.")


def check_at_least(least: int, *, or_none: bool = False, **values: int | None) -> None:
    """Raises InputError for the first argument below `least`; None passes."""
    rule = f"at least {least}{' or None' if or_none else ''}"
    for name, value in values.items():
        check(value is None or value >= least, name, rule, value)


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raises InputError unless the argument `name` has one of the values in `choices`."""
    check(value in choices, name, f"one of {', '.join(map(repr, choices))}", repr(value))
