"""Schedules, which change the spec in later epochs: image size, augmentation, mixing."""

import contextlib
import dataclasses
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, TypeAlias

from dali_tf_input.errors import InputError, check
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.preprocess import Preprocess

Stage: TypeAlias = Preprocess | InputSpec
Stages: TypeAlias = Mapping[int, Stage] | Callable[[int], Stage]

_CHANGES = ("preprocess", "views", "mix", "transform", "balance", "temperature", "mixture")


def describe_function(function: Callable[..., Any]) -> str:
    """Returns the name of a function and a hash of what it does, to tell it from another one.

    That is its source; of a lambda, whose line may hold another one, the compiled code; and the
    numbers and text of the functions around it that it uses.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    source = ""
    if code and name.endswith("<lambda>"):
        source = re.sub(r" at 0x[0-9a-f]+", "", repr((code.co_code, code.co_names, code.co_consts)))
    else:
        with contextlib.suppress(OSError, TypeError):  # built in, or typed in
            source = inspect.getsource(function)
    with contextlib.suppress(ValueError):  # a variable around it has no value yet
        around = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        plain = [one for one in around if isinstance(one, bool | int | float | str | tuple)]
        source += repr(plain) if plain else ""
    return f"{name} ({hashlib.sha256(source.encode()).hexdigest()[:8]})"


class Schedule:
    """The spec of each epoch.

    Attributes:
      spec: the spec of the epochs before the first stage.
      stages: a dict that maps the first epoch of each stage to its spec or just its `preprocess`;
        or a function of the epoch; or None for one spec throughout.
    """

    def __init__(self, spec: InputSpec, stages: Stages | None, *, batch_size: int) -> None:
        """Checks the stages, as far as they are known.

        Raises:
          InputError: epochs are below 0, or a stage changes more than it may.
        """
        self.spec, self._batch_size = spec, batch_size
        self._function: Callable[[int], Stage] | None = None
        self._stages: dict[int, InputSpec] = {}
        if stages is None:
            return
        if not spec.repeat:
            raise InputError("`schedule` is for training: an evaluation has one epoch.")
        if not isinstance(stages, Mapping):
            check(callable(stages), "schedule", "a dict by epochs or a function", repr(stages))
            self._function = stages
            self.spec_of(0)
            return
        for epoch, stage in stages.items():
            is_epoch = isinstance(epoch, Integral) and not isinstance(epoch, bool) and epoch >= 0
            check(is_epoch, "schedule", "a dict by epochs, from 0", repr(epoch))
            self._stages[int(epoch)] = self._check(int(epoch), stage)

    @property
    def is_constant(self) -> bool:
        """Whether all epochs have the same spec."""
        return self._function is None and not self._stages

    @property
    def specs(self) -> list[InputSpec]:
        """All specs that are known before training."""
        return [self.spec, *self._stages.values()]

    def spec_of(self, epoch: int) -> InputSpec:
        """Returns the spec of an epoch of the records, from 0."""
        if self._function:
            try:
                stage = self._function(epoch)
            except Exception as error:  # whatever a user's function raises
                text = f"`schedule` fails for epoch {epoch}: {type(error).__name__}: {error}"
                raise InputError(text) from error
            return self._check(epoch, stage)
        first = max((first for first in self._stages if first <= epoch), default=None)
        return self.spec if first is None else self._stages[first]

    def end_of(self, epoch: int, end: int) -> int:
        """Returns the first epoch after `epoch` that has another spec, or `end`."""
        if self.is_constant:
            return end
        spec = self.spec_of(epoch)
        later = (number for number in range(epoch + 1, end) if self.spec_of(number) != spec)
        return next(later, end)

    def __repr__(self) -> str:
        """Describes the changes of each stage and the epoch where it starts."""
        if self._function:
            return f"by {describe_function(self._function)}"
        return repr({first: self._changes(spec) for first, spec in sorted(self._stages.items())})

    def _changes(self, spec: InputSpec) -> dict[str, Any]:
        changes = {}
        for name in (field.name for field in dataclasses.fields(spec)):
            value = getattr(spec, name)
            if value != getattr(self.spec, name):
                changes[name] = describe_function(value) if name == "transform" else value
        return changes

    def _check(self, epoch: int, stage: Stage) -> InputSpec:
        """Returns the spec of a stage; raises InputError if training cannot continue with it."""
        if isinstance(stage, Preprocess):
            views = () if stage != self.spec.preprocess else self.spec.views
            stage = dataclasses.replace(self.spec, preprocess=stage, views=views)
        if not isinstance(stage, InputSpec):
            raise InputError(
                f"`schedule` must give a Preprocess or an InputSpec, got {stage!r} for epoch"
                f" {epoch}."
            )
        changed = self._changes(stage)
        for name in changed:
            if name not in _CHANGES:
                raise InputError(
                    f"`schedule` may change {', '.join(_CHANGES)}; for epoch {epoch} it changes"
                    f" `{name}`. Begin another training with it."
                )
        steps, now = (spec.plan(self._batch_size).steps_per_epoch for spec in (self.spec, stage))
        if now != steps:
            raise InputError(
                f"An epoch of `schedule` must have {steps:,} steps as the others, epoch {epoch} has"
                f" {now:,}."
            )
        names, others = (", ".join(sorted(spec.outputs)) for spec in (self.spec, stage))
        if names != others:
            raise InputError(
                f"`schedule` must keep what comes out, {names}; epoch {epoch} has {others}."
            )
        return stage
