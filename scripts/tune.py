"""Finds the options that feed this machine fastest from these files: measures settings, within the time given.

usage: tune.py --files=GLOB [--seconds=120] [--out=tuned.json] [--backends=tf_data,dali_cpu] [--order=global] [--batch_size=64]
               [--crop=resize_random_crop] [--image_size=224] [--antialias] [--dtype=float32] [--json=PATH] [--exhaustive]
               [--replicas=N] [--against=OTHER.json]

Only what changes the speed and not the pixels is tried (on a GPU, whose hardware decoder may round otherwise than its cores, its
share too). Round after round varies all options at once, so that each window tells of each of them; values and backends that
lose are dropped early. Last the combination of the best values is measured against the default in rounds of its own; where it is
not faster beyond noise, the default is what is written. Options hold for each replica: with --replicas=N a pipeline is measured
on its share of the cores. `DaliOptions.load`, `TfDataOptions.load`, `load_options` and train.py --options read the file.
--exhaustive tries every combination, whatever it takes.
"""

import json
import math
import os
import shlex
import sys
import tempfile
from typing import Any

from absl import flags

import backends
import console
import machine
import settings
from dali_tf_input import InputError, Spread, load_options, save_options
from settings import Setting
from spaces import describe, space_of
from tuner import FINAL_ROUNDS, Clock, Screen, Tuner, is_faster, search, try_all

_BACKENDS = flags.DEFINE_list("backends", None, "Of tf_data, dali_cpu and dali_gpu; by default all that this machine has.")
_SECONDS = flags.DEFINE_float("seconds", 120.0, "How long to measure, from the moment TensorFlow is there; above 0.")
_REPLICAS = flags.DEFINE_integer(
    "replicas", None, "Copies of the model on this machine, which share its cores; by default as many as GPUs, or 1."
)
_OUT = flags.DEFINE_string("out", "tuned.json", "File for the options that were found.")
_JSON = flags.DEFINE_string("json", None, "File for everything that was measured.")
_EXHAUSTIVE = flags.DEFINE_boolean("exhaustive", False, "Measure every combination instead; --seconds then bounds nothing.")
_AGAINST = flags.DEFINE_string("against", None, "Options that an earlier run wrote, to be measured beside the winner.")

_COLUMNS = ("setting", "images/s", "x default", "min", "max", "windows", "verdict")
_EFFECT_COLUMNS = ("one option changed", "x default", "+-", "windows", "verdict")
_TOLD_APART = 0.03  # values that differ by less need not be told apart


def main(arguments: list[str]) -> int:
    if arguments:
        raise InputError(f"Unknown arguments: {' '.join(arguments)}. Files are named by --files='path/train-*'.")
    if _SECONDS.value <= 0:
        raise InputError(f"`seconds` must be above 0, got {_SECONDS.value}.")
    if _REPLICAS.value is not None and _REPLICAS.value < 1:
        raise InputError(f"`replicas` must be at least 1, got {_REPLICAS.value}.")
    if backends.FUSE.present:
        raise InputError("tune.py chooses `fuse` itself: leave out --fuse.")
    console.check_writable(_OUT.value, flag="out", suffix=".json")
    if _JSON.value:
        console.check_writable(_JSON.value, flag="json")
        if os.path.realpath(_JSON.value) == os.path.realpath(_OUT.value):
            raise InputError(f"`json` and `out` name the same file, {_OUT.value}: give each its own.")
    against = load_options(_AGAINST.value) if _AGAINST.value else None
    spec = settings.training_spec()
    about = machine.describe()
    num_gpus = machine.count_gpus_of_tensorflow() if about["gpus"] else 0
    here = settings.default_options(has_gpu=num_gpus > 0)
    unknown = [name for name in _BACKENDS.value or [] if name not in here]
    if unknown or _BACKENDS.value == []:
        raise InputError(f"`backends` must be of {', '.join(here)} on this machine, got {', '.join(unknown) or 'none'}.")
    defaults = [Setting(here[name], spec.order) for name in here if name in (_BACKENDS.value or here)]
    replicas = _REPLICAS.value or max(1, num_gpus)
    cores = max(1, about["cores"] // replicas)
    machine.print_lines(about)
    if replicas > 1:
        print(f"replicas  {replicas}: one pipeline is measured, on {cores} of the {about['cores']} cores")
    print(f"records   {spec.dataset.num_records:,} in {console.count(len(spec.dataset.files), 'file')}, order {spec.order}")
    known: dict[str, Any] = {"about": {**about, "replicas": replicas}, "spec": spec, "defaults": defaults}
    known["spaces"] = spaces = {
        setting.backend: space_of(setting.options, spec.order, cores=cores, fixed=spec.preprocess.resizes_plainly)
        for setting in defaults
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        settings.Worker(os.path.join(folder, "log"), cores=cores) as worker,
        console.Elapsed("tuning", seconds=None if _EXHAUSTIVE.value else _SECONDS.value) as elapsed,
    ):
        worker.start()
        tuner = Tuner(worker, Clock(_SECONDS.value), elapsed.show)
        find = try_all if _EXHAUSTIVE.value else search
        winner = find(tuner, defaults, spaces)
        default = next(setting for setting in defaults if tuner.trial(setting).rates)  # the package's choice, where it works
        other = Setting(against, spec.order) if against else None
        beside = {setting.key: setting for setting in (winner, other) if setting and setting.key != default.key}
        rounds = FINAL_ROUNDS[1] if _EXHAUSTIVE.value else None
        ratios = tuner.compare(list(beside.values()), default, rounds=rounds) if beside else {}
    return report(tuner, winner, default, ratios, other, known)


def report(
    tuner: Tuner,
    winner: Setting,
    default: Setting,
    ratios: dict[str, list[float]],
    other: Setting | None,
    known: dict[str, Any],
) -> int:
    """Prints the table and what was found, and writes the files."""
    gains = ratios.get(winner.key, [])
    spread = Spread.of(gains) if gains else None
    better = is_faster(gains) and not tuner.trial(winner).is_refused
    chosen = winner if better else default
    print()
    print_trials(tuner, default, chosen, winner, other)
    print_effects(tuner)
    print()
    if chosen is winner and spread:
        print(
            f"best      {winner.backend}: {describe(winner)}\n"
            f"gain      {spread.median:.2f} times the images/s of the default, {default.backend} "
            f"({spread.minimum:.2f} to {spread.maximum:.2f} in {len(gains)} rounds of {tuner.clock.window:.1f} s)"
        )
    else:
        found = f"; {describe(winner)} came to {spread.median:.2f}" if spread else ""
        print(f"best      the default, {default.backend}: nothing tried was faster beyond noise{found}")
        if 0 < len(gains) < FINAL_ROUNDS[0]:
            print(f"time      {len(gains)} of the {FINAL_ROUNDS[0]} rounds that a verdict takes: give more --seconds")
    if not _EXHAUSTIVE.value:
        print_limits(tuner, known["defaults"])
    if other:
        print(f"against   {describe_other(tuner, other, default, winner if better else None, ratios)}")
    gain = vars(spread) if better and spread else {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    about = {
        "command": shlex.join(sys.argv),
        **known["about"],
        "num_records": known["spec"].dataset.num_records,
        "order": known["spec"].order,
        "batch_size": backends.BATCH_SIZE.value,
        "preprocess": repr(known["spec"].preprocess),
        "gain_over_default": gain,
        "default": default.to_json(),
    }
    save_options(chosen.options, _OUT.value, about=about)
    print(f"options   in {_OUT.value}: load_options({_OUT.value!r}), or scripts/train.py --options={shlex.quote(_OUT.value)}")
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as stream:
            json.dump(
                {
                    **about,
                    "ratios": ratios,
                    "trials": [trial.to_json() for trial in tuner.trials.values()],
                    "effects": [row for screen in tuner.screens for row in effects_of(screen)],
                },
                stream,
                indent=2,
            )
            stream.write("\n")
        print(f"all       in {_JSON.value}")
    return 0


def describe_other(tuner: Tuner, other: Setting, default: Setting, best: Setting | None, ratios: dict[str, list[float]]) -> str:
    """Says how the options of --against do beside what is written: `best`, or the default where that is None."""
    name = _AGAINST.value
    if other.key in (best.key if best else default.key, default.key):
        return f"{name} holds {'the same options' if best is None or other.key == best.key else 'the default'}"
    if tuner.trial(other).is_refused:
        return f"{name} cannot be measured here: {tuner.trial(other).verdict}"
    if not ratios.get(other.key):
        return f"{name} was not measured: no time left"
    text = f"{name} is {Spread.of(ratios[other.key]).median:.2f} times the default"
    if best:
        pairs = Spread.of([one / two for one, two in zip(ratios[other.key], ratios[best.key], strict=False)])
        text += f", {pairs.median:.3f} times the best ({pairs.minimum:.3f} to {pairs.maximum:.3f})"
    return text


def print_trials(tuner: Tuner, default: Setting, chosen: Setting, winner: Setting, other: Setting | None) -> None:
    """Prints the settings that were measured by themselves, the fastest first (of an exhaustive run the first forty of all)."""
    base = Spread.of(tuner.trial(default).rates).median if tuner.trial(default).rates else None
    lines = []
    alone = {setting.key for setting in (default, winner, other) if setting} | {screen.default.key for screen in tuner.screens}
    shown = [trial for key, trial in tuner.trials.items() if _EXHAUSTIVE.value or trial.verdict or key in alone]
    measured = [trial for trial in shown if trial.rates]
    for trial in sorted(measured, key=lambda trial: -Spread.of(trial.rates).median)[:40]:
        rates = Spread.of(trial.rates)
        ratios = [f"{rate / base:.2f}" if base else "-" for rate in (rates.median, rates.minimum, rates.maximum)]
        verdict = trial.verdict
        if trial.setting == chosen:
            verdict = "best"
        elif trial.setting == default:
            verdict = "the default"
        elif trial.setting == winner:
            verdict = "no faster than the default beyond noise"
        elif trial.setting == other:
            verdict = "of --against"
        elif not verdict:
            verdict = "another backend"
        setting = f"{trial.setting.backend}: {describe(trial.setting)}"
        lines.append((setting, f"{rates.median:,.0f}", *ratios, str(len(trial.rates)), verdict))
    lines += [
        (f"{trial.setting.backend}: {describe(trial.setting)}", *("-",) * 5, trial.verdict.splitlines()[0])
        for trial in shown
        if trial.verdict.startswith("refused")
    ]
    console.print_table(_COLUMNS, lines)


def effects_of(screen: Screen) -> list[dict[str, Any]]:
    """Returns what is known of each value of a backend's options: of the default's, 1."""
    rows = []
    for name, values in screen.space.items():
        for number, value in enumerate(values):
            log, error = screen.effects.difference(name, number, 0)
            rows.append(
                {
                    "backend": screen.default.backend,
                    "options": value,
                    "is_default": number == 0,
                    "times_default": math.exp(log),
                    "standard_error": math.exp(log) * error,
                    "windows": screen.effects.windows(name, number),
                    "verdict": screen.verdicts.get((name, number), ""),
                }
            )
    return rows


def print_effects(tuner: Tuner) -> None:
    """Prints what each value is worth, whatever the other options are."""
    lines = []
    for screen in tuner.screens:
        best = screen.best().options
        for row in effects_of(screen) if screen.rounds else []:
            taken = all(getattr(best, name) == value for name, value in row["options"].items())
            if row["verdict"]:
                verdict = row["verdict"]
            elif screen.is_behind:
                verdict = "dropped: its backend is too slow here"
            elif not row["windows"]:
                verdict = "not measured"
            else:
                verdict = "best" if taken else "not told from the best"
            values = ", ".join(f"{name}={settings.as_python(value)}" for name, value in row["options"].items())
            error = "" if row["is_default"] else f"{row['standard_error']:.3f}"
            known = f"{row['times_default']:.3f}" if row["windows"] or row["is_default"] else "-"
            lines.append((f"{row['backend']}: {values}", known, error if row["windows"] else "-", str(row["windows"]), verdict))
    if lines:
        print()
        console.print_table(_EFFECT_COLUMNS, lines)


def print_limits(tuner: Tuner, defaults: list[Setting]) -> None:
    """Says what the time was too short for."""
    short = f"time      {_SECONDS.value:g} s were enough for "
    unmeasured = [setting.backend for setting in defaults if not tuner.trial(setting).rates and not tuner.trial(setting).verdict]
    running = [screen for screen in tuner.screens if not screen.is_behind and screen.rounds]
    errors = [
        2 * screen.effects.difference(name, value, values[0])[1]
        for screen in running
        for name, values in screen.left.items()
        for value in values[1:]
        if screen.effects.windows(name, value)
    ]
    if unmeasured:
        print(f"{short}no window of {', '.join(unmeasured)}: give more --seconds")
    elif idle := [screen.default.backend for screen in tuner.screens if not screen.rounds]:
        print(f"{short}the default only of {', '.join(idle)}: give more --seconds")
    elif errors and max(errors) > _TOLD_APART:
        print(f"{short}values that differ by {max(errors):.0%} or more: give more --seconds to tell closer ones apart")


if __name__ == "__main__":
    console.run(main)
