"""Options as files, and the search for the best: on made machines of which the best setting is known."""

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys

import pytest
from absl import flags
from conftest import numbered_examples, write_tfrecord
from test_scripts import fails, run

from dali_tf_input import AUTOTUNE, DaliOptions, InputError, TfDataOptions, load_options, save_options


@pytest.fixture(scope="module")
def tuner_module():
    import tuner

    return tuner


@pytest.mark.parametrize(
    "options",
    [
        TfDataOptions(),
        TfDataOptions(num_parallel_calls=4, fuse="scaled", read_buffer_bytes=1 << 18, service="grpc://host:1"),
        DaliOptions(device="cpu", num_threads=3, read_mode="direct"),
        DaliOptions(device="gpu", hw_decoder_load=0.75, memory_hints=False, read_ahead=True),
    ],
)
def test_options_come_back_from_their_file(tmp_path, options):
    path = str(tmp_path / "options.json")
    save_options(options, path, about={"gain": 1.5})
    assert load_options(path) == options
    assert type(options).load(path) == options
    other = TfDataOptions if isinstance(options, DaliOptions) else DaliOptions
    with pytest.raises(InputError, match=rf"holds {type(options).__name__}, not {other.__name__}"):
        other.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["options.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "these are no options: FileNotFoundError"),
        ("{", "these are no options: JSONDecodeError"),
        ("[]", "these are no options: TypeError"),
        ('{"format": "other", "version": 1}', "expected 'dali_tf_input options', version 1"),
        ({"backend": "torch", "options": {}}, "these are no options: KeyError"),
        ({"backend": "tf_data", "options": {"num_threads": 2}}, "TfDataOptions has no `num_threads`. Tune again"),
        ({"backend": "dali", "options": {"device": "cpu", "num_threads": 0}}, "`num_threads` must be at least 1 or None, got 0"),
        ({"backend": "dali", "options": {"device": "cpu", "num_threads": "2"}}, "`num_threads` cannot be '2'"),
        ({"backend": "dali", "options": {"device": "cpu", "num_threads": 1.5}}, "`num_threads` cannot be 1.5"),
        ({"backend": "dali", "options": {"device": "cpu", "read_ahead": 1}}, "`read_ahead` cannot be 1"),
        ({"backend": "dali", "options": {"device": 1}}, "`device` cannot be 1"),
        ({"backend": "tf_data", "options": {"service": 5}}, "`service` cannot be 5"),
        ({"backend": "tf_data", "options": {"autotune": "no"}}, "`autotune` cannot be 'no'"),
        ({"backend": "tf_data", "options": {"num_parallel_calls": True}}, "`num_parallel_calls` cannot be True"),
        ({"backend": "dali", "options": {}}, "device"),
    ],
)
def test_files_that_hold_no_options(tmp_path, text, message):
    path = tmp_path / "options.json"
    if text is not None:
        head = {"format": "dali_tf_input options", "version": 1}
        path.write_text(text if isinstance(text, str) else json.dumps(head | text))
    with pytest.raises(InputError) as caught:
        load_options(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


class Machine:
    """A measuring process with a clock of its own, on which each setting has a rate of its own, and noise."""

    def __init__(self, rate, *, noise=0.01, seed=0, cost=1.0):
        self.now = 0.0
        self.measured = []
        self._rate, self._noise, self._cost = rate, noise, cost
        self._random = random.Random(seed)

    def measure(self, setting, *, seconds):
        self.now += self._cost + seconds
        self.measured.append(setting)
        rate = self._rate(setting) * (1 + self._noise * self._random.uniform(-1, 1))
        return {"measured_batches": rate, "batch_size": 1, "seconds": 1.0, "cpu_seconds": 1.0}


def tuned(tuner, machine, monkeypatch, *, seconds, defaults=None):
    """Runs the search; returns (winner, default, its final ratios, the tuner, the spaces)."""
    from settings import Setting
    from spaces import space_of

    monkeypatch.setattr(tuner.time, "monotonic", lambda: machine.now)
    defaults = defaults or [Setting(TfDataOptions()), Setting(DaliOptions(device="cpu"))]
    spaces = {one.backend: space_of(one.options, one.order, cores=4, fixed=True) for one in defaults}
    search = tuner.Tuner(machine, tuner.Clock(seconds), lambda text: None)
    winner = tuner.search(search, defaults, spaces)
    default = next(one for one in defaults if search.trial(one).rates)
    return winner, default, search.compare([winner], default)[winner.key] if winner != default else [], search, spaces


def rate_of(setting):
    """A machine that likes 6 threads and small buffers, and DALI's plan "off" with threads."""
    options = setting.options
    if isinstance(options, TfDataOptions):
        rate = {AUTOTUNE: 1000, 2: 700, 4: 1050, 6: 1150, 8: 1100}[options.num_parallel_calls]
        rate *= {1 << 18: 1.08, 1 << 20: 1.0, 1 << 22: 0.9}[options.read_buffer_bytes]
        return rate * (0.6 if options.fuse == "decode" else 1) * (1.04 if options.prefetch_batches == 4 else 1)
    return 900 * {None: 1, 2: 0.6, 4: 1, 6: 1.1, 8: 1.05}[options.num_threads] * (1.6 if options.fuse == "off" else 1)


@pytest.mark.parametrize("seed", range(5))
def test_search_finds_what_is_within_3_percent_of_the_best(tuner_module, monkeypatch, seed):
    """The best is known by trying all; it is of the backend that is slower by default."""
    machine = Machine(rate_of, seed=seed)
    winner, _, ratios, search, spaces = tuned(tuner_module, machine, monkeypatch, seconds=400)
    from settings import Setting
    from spaces import combinations

    defaults = {"tf_data": Setting(TfDataOptions()), "dali_cpu": Setting(DaliOptions(device="cpu"))}
    every = [one for name, space in spaces.items() for one in combinations(defaults[name], space)]
    assert len(every) > 100
    assert rate_of(winner) >= 0.97 * max(map(rate_of, every))
    assert winner.backend == "dali_cpu"
    assert machine.now <= 400 + 10
    assert len(search.trials) < len(every) / 4
    assert sorted(ratios)[len(ratios) // 2] > 1.3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("seconds", [20, 60, 200])
def test_what_is_chosen_is_never_below_the_default(tuner_module, monkeypatch, seed, seconds):
    """Every other setting is 6% slower, within noise of twice that: the default is what is kept."""
    from settings import Setting

    defaults = [Setting(TfDataOptions())]
    machine = Machine(lambda setting: 1000 if setting == defaults[0] else 940, noise=0.04, seed=seed)
    winner, default, gains, _, _ = tuned(tuner_module, machine, monkeypatch, seconds=seconds, defaults=defaults)
    assert winner == default or not tuner_module.is_faster(gains)


def test_noise_is_seldom_taken_for_a_gain(tuner_module, monkeypatch):
    """Where all settings are alike: the signed-rank test's 5%, twice over."""
    from settings import Setting

    taken = 0
    for seed in range(100):
        machine = Machine(lambda setting: 1000, noise=0.04, seed=seed)
        winner, default, gains, _, _ = tuned(tuner_module, machine, monkeypatch, seconds=120, defaults=[Setting(TfDataOptions())])
        taken += winner != default and tuner_module.is_faster(gains)
    assert taken <= 10


@pytest.mark.parametrize(
    ("gains", "faster"),
    [
        ([], False),
        ([1.1] * 4, False),
        ([1.1] * 5, True),
        ([1.1] * 4 + [0.95], False),
        ([1.1] * 8 + [0.95], True),
        ([1.05] * 17 + [0.98] * 23, False),  # the ranks alone would say so
    ],
)
def test_how_many_rounds_make_a_gain(tuner_module, gains, faster):
    assert tuner_module.is_faster(gains) == faster


@pytest.mark.parametrize("seed", range(20))
def test_signed_ranks_against_all_signs_there_are(tuner_module, seed):
    """The chance of the test, counted: of all ways to give the logarithms a sign, those whose positive ranks sum as high."""
    numbers = random.Random(seed)
    logs = [numbers.gauss(0.02, 0.03) for _ in range(9)]
    ranks = [1 + sum(abs(other) < abs(log) for other in logs) for log in logs]
    seen = sum(rank for rank, log in zip(ranks, logs, strict=True) if log > 0)
    signs = list(itertools.product([0, 1], repeat=len(logs)))
    as_high = sum(sum(itertools.compress(ranks, positive)) >= seen for positive in signs)
    assert tuner_module.is_faster([math.exp(log) for log in logs]) == (as_high / len(signs) <= 0.05)


def test_losers_are_dropped_early(tuner_module, monkeypatch):
    machine = Machine(rate_of, noise=0.0)
    _, _, _, search, _ = tuned(tuner_module, machine, monkeypatch, seconds=1000)
    slow = [one for one in machine.measured if getattr(one.options, "num_parallel_calls", 0) == 2]
    assert 1 <= len(slow) <= 2
    assert 1 <= sum(getattr(one.options, "fuse", "") == "decode" for one in machine.measured) <= 6
    tf_data, dali = search.screens
    assert dali.verdicts["plan", 0] == dali.verdicts["threads", 1] == "dropped: slower"
    assert tf_data.is_behind
    assert tf_data.rounds == 2


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_effects_and_their_errors(outliers):
    """What the values are worth is found again, and lies within two standard errors as often as it should."""
    import effects

    options = {"threads": [0.0, 0.03, -0.4, 0.05], "plan": [0.0, 0.02], "buffer": [0.0, -0.02, 0.0]}
    within = errors = 0
    for seed in range(25):
        numbers = random.Random(seed)
        found = effects.Effects({name: len(worth) for name, worth in options.items()})
        for number in range(8):
            speed = 6 + numbers.gauss(0, 0.1)
            for choice in effects.balanced_choices({name: list(range(len(worth))) for name, worth in options.items()}, numbers):
                noise = -0.5 if numbers.random() < outliers else numbers.gauss(0, 0.04)
                log = speed + noise + sum(options[name][value] for name, value in choice.items())
                found.add(number, choice, math.exp(log))
        found.fit()
        for name, worth in options.items():
            assert found.windows(name, 0) == found.windows(name, len(worth) - 1) or len(worth) == 3
            for value in range(1, len(worth)):
                difference, error = found.difference(name, value, 0)
                assert abs(difference - worth[value]) < 0.15
                within += abs(difference - worth[value]) < 2 * error
                errors += 1
    assert within / errors > 0.85


class SharedMachine(Machine):
    """One whose neighbours take a tenth of it, for some seconds each time."""

    def __init__(self, rate, *, seed):
        super().__init__(rate, noise=0.06, seed=seed, cost=0.65)
        self._moments = random.Random(seed)
        self._share, self._until = 1.0, 0.0

    def measure(self, setting, *, seconds):
        window = super().measure(setting, seconds=seconds)
        while self.now > self._until:
            self._share = 1.9 - self._share
            self._until += self._moments.expovariate(1 / 8)
        window["measured_batches"] *= self._share
        return window


def test_small_gains_on_a_shared_machine(tuner_module, monkeypatch):
    """Three options are worth 1 to 2% each, less than a window's noise: most searches find what comes within 3% of all three."""

    def rate(setting):
        options = setting.options
        of_threads = {AUTOTUNE: 1.0, 2: 0.99, 4: 1.01, 6: 1.015, 8: 1.025}[options.num_parallel_calls]
        of_reads = {4: 1.0, 1: 1.015, 16: 1.0}[options.num_parallel_reads]
        of_buffer = {1 << 20: 1.0, 1 << 18: 1.01, 1 << 22: 0.98}[options.read_buffer_bytes]
        return 1000 * of_threads * of_reads * of_buffer * (0.7 if options.fuse == "decode" else 1)

    from settings import Setting

    found = 0
    for seed in range(10):
        defaults = [Setting(TfDataOptions())]
        machine = SharedMachine(rate, seed=seed)
        winner, _, _, _, _ = tuned(tuner_module, machine, monkeypatch, seconds=300, defaults=defaults)
        assert machine.now <= 300 + 10
        found += rate(winner) >= 0.97 * 1000 * 1.025 * 1.015 * 1.01
    assert found >= 8


class Refusing(Machine):
    """One that refuses some settings, as if its process died over them."""

    def __init__(self, rate, refuses, **arguments):
        super().__init__(rate, **arguments)
        self._refuses, self.refused, self.in_a_row, self.most_in_a_row = refuses, 0, 0, 0

    def measure(self, setting, *, seconds):
        from settings import SettingError

        window = super().measure(setting, seconds=seconds)
        self.in_a_row = self.in_a_row + 1 if self._refuses(setting.options) else 0
        self.most_in_a_row = max(self.most_in_a_row, self.in_a_row)
        if self.in_a_row:
            self.refused += 1
            raise SettingError("the process died (SIGSEGV)")
        return window


@pytest.mark.parametrize("seed", range(5))
def test_values_that_are_refused(tuner_module, monkeypatch, seed):
    """They are found out one by one, and the rest of the search goes on."""
    from settings import Setting

    machine = Refusing(rate_of, lambda options: options.num_parallel_reads == 16 or options.num_parallel_calls == 6, seed=seed)
    winner, _, _, search, _ = tuned(tuner_module, machine, monkeypatch, seconds=400, defaults=[Setting(TfDataOptions())])
    screen = search.screens[0]
    refused = [key for key, verdict in screen.verdicts.items() if verdict == "refused: the process died (SIGSEGV)"]
    assert sorted(refused) == [("reads", 2), ("threads", 3)]
    assert machine.refused <= 6
    assert machine.most_in_a_row < 3  # after which the measuring process is given up
    assert rate_of(winner) >= 0.97 * 1100 * 1.08 * 1.04


def test_two_values_that_are_refused_together_only(tuner_module, monkeypatch):
    """Each stays; a winner that is refused is not kept."""
    from settings import Setting

    machine = Refusing(rate_of, lambda options: options.num_parallel_calls == 6 and options.read_buffer_bytes == 1 << 18)
    winner, default, gains, search, _ = tuned(
        tuner_module, machine, monkeypatch, seconds=400, defaults=[Setting(TfDataOptions())]
    )
    assert "refused" not in str(search.screens[0].verdicts)
    assert machine.most_in_a_row < 3
    assert machine.now <= 400 + 10
    assert winner == default or not gains or rate_of(winner) > 1000


def test_only_the_default_works(tuner_module, monkeypatch):
    """The search ends, soon, and its time is kept."""
    from settings import Setting

    machine = Refusing(rate_of, lambda options: options != TfDataOptions(), cost=5)
    winner, default, _, _, _ = tuned(tuner_module, machine, monkeypatch, seconds=120, defaults=[Setting(TfDataOptions())])
    assert winner == default
    assert machine.most_in_a_row < 3
    assert machine.now <= 120 + 10


def test_the_last_value_of_an_option_stays(tuner_module, monkeypatch):
    """Though it is refused, as the others, the default's too, were dropped before."""
    from settings import Setting
    from spaces import space_of

    machine = Refusing(rate_of, lambda options: options.num_parallel_calls == 6)
    monkeypatch.setattr(tuner_module.time, "monotonic", lambda: machine.now)
    search = tuner_module.Tuner(machine, tuner_module.Clock(1000), lambda text: None)
    default = Setting(TfDataOptions())
    screen = tuner_module.Screen(default, space_of(default.options, default.order, cores=4, fixed=True))
    choice = dict.fromkeys(screen.left, 0) | {"threads": 3}
    for left in ([1, 3], [3]):
        screen.left["threads"] = left.copy()
        screen._find_what_is_refused(search, choice)
        assert screen.left["threads"] == left[:1]


def test_every_combination_with_a_value_that_crashes(tuner_module, monkeypatch):
    """What works is measured in between, so that the measuring process is not given up; the best is found all the same."""
    from settings import Setting
    from spaces import space_of

    machine = Refusing(rate_of, lambda options: options.num_parallel_reads == 16, noise=0.0)
    monkeypatch.setattr(tuner_module.time, "monotonic", lambda: machine.now)
    default = Setting(TfDataOptions())
    space = space_of(default.options, default.order, cores=4, fixed=True)
    search = tuner_module.Tuner(machine, tuner_module.Clock(1), lambda text: None)
    best = tuner_module.try_all(search, [default], {"tf_data": space})
    assert rate_of(best) == pytest.approx(1150 * 1.08 * 1.04)
    assert machine.most_in_a_row == 1
    assert machine.refused > 10


def test_a_rival_that_is_refused_leaves_the_others_their_rounds(tuner_module, monkeypatch):
    from settings import Setting

    default, winner = Setting(TfDataOptions()), Setting(TfDataOptions(num_parallel_calls=6))
    other = Setting(TfDataOptions(num_parallel_reads=16))
    machine = Refusing(rate_of, lambda options: options.num_parallel_reads == 16)
    monkeypatch.setattr(tuner_module.time, "monotonic", lambda: machine.now)
    search = tuner_module.Tuner(machine, tuner_module.Clock(100), lambda text: None)
    ratios = search.compare([winner, other], default)
    assert len(ratios[winner.key]) >= tuner_module.FINAL_ROUNDS[0]
    assert ratios[other.key] == []
    assert search.trial(other).is_refused


@pytest.mark.parametrize("seconds", [0.5, 3, 10, 30, 60])
def test_time_is_kept(tuner_module, monkeypatch, seconds):
    """However short it is, the default is measured, and what is chosen was."""
    machine = Machine(rate_of)
    winner, default, _, search, _ = tuned(tuner_module, machine, monkeypatch, seconds=seconds)
    assert search.trial(winner).rates
    assert search.trial(default).rates
    assert machine.now <= max(seconds, 1.5) + 4


def test_a_backend_that_cannot_be_measured(tuner_module, monkeypatch):
    """The default that crashes is no reference; where all do, the reasons are told."""
    from settings import Setting, SettingError

    class Crashing(Machine):
        def measure(self, setting, *, seconds):
            if isinstance(setting.options, DaliOptions):
                raise SettingError("the process died (SIGSEGV)")
            return super().measure(setting, seconds=seconds)

    defaults = [Setting(DaliOptions(device="gpu")), Setting(TfDataOptions())]
    winner, default, _, search, _ = tuned(tuner_module, Crashing(rate_of), monkeypatch, seconds=100, defaults=defaults)
    assert default == defaults[1]
    assert winner.backend == "tf_data"
    assert search.trial(defaults[0]).verdict == "refused: the process died (SIGSEGV)"
    with pytest.raises(InputError, match=r"No backend could be measured. dali_gpu: refused: the process died \(SIGSEGV\)"):
        tuned(tuner_module, Crashing(rate_of), monkeypatch, seconds=100, defaults=defaults[:1])


def test_a_record_that_nothing_can_decode(tmp_path):
    """What DALI prints of it is no answer of the measuring process; the record is named."""
    examples = numbered_examples(8)
    examples[3]["image/encoded"] = b"this is no image"
    file = write_tfrecord(tmp_path / "train", examples)
    assert run("index_tfrecords.py", file).returncode == 0
    arguments = [f"--files={file}", "--batch_size=2", "--image_size=8", "--backends=dali_cpu"]
    process = run("tune.py", *arguments, "--seconds=3", f"--out={tmp_path}/out.json")
    fails(process, "No backend could be measured. dali_cpu: refused: ", f"{file}: record 3, byte ", "make index DATA=")
    process = run("profile_stages.py", *arguments, "--seconds=0.1", "--repeats=1")
    fails(process, "dali_cpu, cut after 'decode': ", f"{file}: record 3, byte ")


def test_a_measuring_process_that_dies_or_hangs(sample_folder, monkeypatch, tmp_path):
    import settings

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    files = [f"--files={sample_folder}/data/sample/train-*"]
    with settings.Worker(str(tmp_path / "log"), files=files, batch_size=4) as worker:
        setting = settings.Setting(TfDataOptions())
        assert worker.measure(setting, seconds=0.1)["measured_batches"] > 0
        os.kill(worker._process.pid, signal.SIGKILL)  # once is not the setting's fault
        worker._process.wait()
        assert worker.measure(setting, seconds=0.1)["measured_batches"] > 0
        with monkeypatch.context() as patched:

            def start():
                worker._process = subprocess.Popen([sys.executable, "-c", "exit(3)"], stdin=-1, stdout=-1, text=True)

            worker.__exit__()
            patched.setattr(worker, "start", start)
            for _ in range(2):
                with pytest.raises(settings.SettingError, match=r"the process died \(exit code 3\)"):
                    worker.measure(setting, seconds=0.1)
            with pytest.raises(InputError, match="The measuring process died 6 times in a row"):
                worker.measure(setting, seconds=0.1)
        assert worker.measure(setting, seconds=0.1)["measured_batches"] > 0
        os.kill(worker._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(settings, "_LIMIT", 1)
        with pytest.raises(settings.SettingError, match="no answer within 2 s"):
            worker.measure(setting, seconds=0.1)


def test_every_setting_that_is_tried_is_valid(tuner_module):
    from settings import Setting
    from spaces import combinations, space_of

    for options, order, fixed in itertools.product(
        (TfDataOptions(), DaliOptions(device="cpu"), DaliOptions(device="gpu")), ("buffer", "global"), (True, False)
    ):
        default = Setting(options, order)
        space = space_of(options, order, cores=3, fixed=fixed)
        every = list(combinations(default, space))
        assert every[0] == default  # the first value of each option is the default's
        assert all(Setting.from_json(json.loads(one.key)) == one for one in every[:: max(1, len(every) // 50)])
        assert ("reader" in space) == (isinstance(options, DaliOptions) and order == "buffer")


def test_tune(sample_folder, tmp_path):
    """A real search, as short as it gets on two backends; training takes its options."""
    out = tmp_path / "tuned.json"
    arguments = ["--files=data/sample/train-*", "--batch_size=16", "--image_size=32"]
    process = run("tune.py", *arguments, "--seconds=8", f"--out={out}", f"--json={tmp_path}/all.json", cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    options = load_options(str(out))
    document = json.loads(out.read_text())
    assert document["about"]["gain_over_default"]["median"] >= 1
    assert "best      " in process.stdout
    assert "tf_data: default" in process.stdout
    trials = json.loads((tmp_path / "all.json").read_text())["trials"]
    assert {trial["backend"] for trial in trials if trial["images_per_second"]} == {"dali", "tf_data"}
    arguments = ["--files=data/sample/train-*", f"--options={out}", "--epochs=1", "--image_size=32"]
    process = run("train.py", *arguments, cwd=sample_folder)
    assert process.returncode == 0, process.stderr
    assert repr(options) in process.stdout
    fails(run("train.py", *arguments, "--backend=tf_data", cwd=sample_folder), "--options says which backend it is")
