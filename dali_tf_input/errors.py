"""The errors for bad input, and the annotation-based argument checks that raise them."""

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import os
import typing
from collections.abc import Callable, Collection, Iterable
from numbers import Real
from types import UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, overload

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_FIELDS = "__dataclass_fields__"
_NAMES = {bool: "True or False", str: "text", bytes: "bytes", type(None): "None", dict: "a dict"}


class InputError(ValueError):
    """Raised for bad input: a file or an argument that this package cannot use.

    The message says what is wrong and where, and names the command that fixes it, if there is one.

    Examples:
      >>> Shard(2, num_shards=2)
      Traceback (most recent call last):
      dali_tf_input.errors.InputError: `shard_id` must be in [0, 2), got 2
    """


class WrongCallError(InputError, TypeError):
    """A call with an argument that the function does not have, or without a required one."""


@dataclasses.dataclass(frozen=True)
class Within:
    """The bounds of a number, both included, as in ``Annotated[int, Within(1)]``.

    Attributes:
      low: the smallest value.
      high: the largest.
      unit: what a message adds to a bound.
      also: one more allowed value.
    """

    low: float
    high: float = math.inf
    unit: str = ""
    also: float | None = None

    def check(self, value: float) -> None:
        """Raises `_Refused` with the bound that `value` exceeds."""
        if not self.low <= value <= self.high and value != self.also:
            if self.high <= 100:
                raise _Refused(f"in [{self.low}, {self.high}]")
            bound = f"at least {self.low:,}" if value < self.low else f"at most {self.high:,}"
            raise _Refused(bound + self.unit)


Path = str | os.PathLike[str]
Count = Annotated[int, Within(1, 2**31 - 1)]  # TensorFlow's int32
# The length of a vector that each record becomes: 16 MB of float32.
MAX_SIZE = 1 << 22
Size = Annotated[int, Within(1, MAX_SIZE)]
Int64 = Annotated[int, Within(-(2**62), 2**62)]  # with room for a difference
MAX_BATCH_SIZE = 1 << 16
BatchSize = Annotated[int, Within(1, MAX_BATCH_SIZE)]
Pixels = Annotated[int, Within(1, 65_535, " pixel each way")]
Fraction = Annotated[float, Within(0, 1)]


class _Refused(Exception):  # noqa: N818 (it becomes an InputError)
    """Raised if a value does not fit its annotation; the text says what it must be."""


def check(holds: bool, name: str, rule: str, value: object) -> None:
    """Raises InputError unless the rule for the argument `name` holds for its value."""
    if not holds:
        raise InputError(f"`{name}` must be {rule}, got {value}.")


@overload
def checked(function: type[_T]) -> type[_T]: ...
@overload
def checked(function: Callable[_P, _R]) -> Callable[_P, _R]: ...
def checked(function: Any) -> Any:
    """Makes a function or a dataclass check its arguments against their annotations.

    NumPy integers become Python integers, and lists annotated as tuples become tuples. A call
    raises InputError if a value has the wrong type, is not finite, or is out of bounds, and
    WrongCallError for an unknown keyword, with the closest known one.
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    signature = inspect.signature(function)
    plain = [name for name, param in signature.parameters.items() if param.kind not in _SEVERAL]
    takes_any = any(
        param.kind is inspect.Parameter.VAR_KEYWORD for param in signature.parameters.values()
    )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            name = function.__qualname__.removesuffix(".__init__")
            if not takes_any:
                check_keywords(name, kwargs, [one for one in plain if one not in ("self", "cls")])
            raise WrongCallError(f"{name}(): {error}.") from error
        hints = _hints_of(function)
        for name, value in bound.arguments.items():
            if name in plain and name in hints:
                bound.arguments[name] = _check(name, value, hints[name])
        return function(*bound.args, **bound.kwargs)

    return call


def check_keywords(function: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises WrongCallError for the first of `names` that is not an argument of `function`."""
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"It has {_list_names(known) or 'none'}."
            if nearest:
                hint = f"Did you mean `{nearest[0]}`?"
            raise WrongCallError(f"{function}() has no argument `{name}`. {hint}")


def _list_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@functools.cache
def _hints_of(owner: Any) -> dict[str, Any]:
    return typing.get_type_hints(owner, include_extras=True)


def _check(name: str, value: Any, hint: Any) -> Any:
    try:
        return _conform(value, hint)
    except _Refused as refused:
        shown = str(value) if isinstance(value, Real | tuple | list) else repr(value)
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        raise InputError(f"`{name}` must be {refused}, got {shown}.") from None


def _conform(value: Any, hint: Any) -> Any:
    """Returns `value` converted to the type `hint`; raises `_Refused` if it does not fit."""
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = _conform(value, arguments[0])
        for bounds in arguments[1:]:
            bounds.check(value)
        return value
    if origin in (Union, UnionType):
        return _conform_to_one_of(value, arguments)
    if origin is Literal:
        known = any(type(value) is type(literal) and value == literal for literal in arguments)
        _require(known, f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin in (tuple, collections.abc.Sequence):
        listed = isinstance(value, collections.abc.Sequence) and not isinstance(
            value, str | bytes | bytearray | memoryview
        )
        if origin is tuple and ... not in arguments:
            _require(listed and len(value) == len(arguments), f"{len(arguments)} values")
            return tuple(map(_conform, value, arguments))
        _require(listed, "a sequence")
        if origin is tuple:
            return tuple(_conform(item, arguments[0]) for item in value)
        # Others may make their items late.
        for item in value if isinstance(value, list | tuple | range) else ():
            try:
                _conform(item, arguments[0])
            except _Refused as refused:
                raise _Refused(f"a sequence of {refused}") from None
        return value
    if hint is int:
        with contextlib.suppress(Exception):  # of tensors also others than TypeError
            if not isinstance(value, bool):
                return operator.index(value)
        raise _Refused("an integer")
    if hint is float:
        is_scalar = isinstance(value, Real) or getattr(value, "shape", None) == ()
        if is_scalar and not isinstance(value, bool):
            with contextlib.suppress(Exception):
                if math.isfinite(number := float(value)):
                    return number
        raise _Refused("a finite number")
    if origin is collections.abc.Callable:
        _require(callable(value), "a function")
    elif isinstance(origin or hint, type):
        kind = origin or hint
        name = "a path" if kind is os.PathLike else _NAMES.get(kind, _with_article(kind.__name__))
        subclasses: list[type] = kind.__subclasses__() if hasattr(kind, _FIELDS) else []
        if subclasses:  # of Crop
            name = f"one of {', '.join(subclass.__name__ for subclass in subclasses)}"
            _require(type(value) is not kind, name)
        if example := getattr(kind, "EXAMPLE", ""):
            name = f"{name}, such as {example}"
        _require(isinstance(value, kind), name)
    return value


def _conform_to_one_of(value: Any, hints: tuple[Any, ...]) -> Any:
    rules = []
    for hint in hints:
        try:
            return _conform(value, hint)
        except _Refused as refused:
            rules.append(str(refused))
    *first, last = dict.fromkeys(rules)
    raise _Refused(f"{', '.join(first)} or {last}" if first else last)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise _Refused(rule)
