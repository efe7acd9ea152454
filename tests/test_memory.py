"""Memory, threads and descriptors stay flat over epochs, evaluations, and datasets in turn."""

import itertools
import os

import pytest
from commands import python, succeeds

PROGRAM = """if True:
    import ctypes, gc, os, sys
    import dali_tf_input as dti
    files, backend, part, count = sys.argv[1:]
    options = {"dali": dti.DaliOptions(device="cpu"), "tf_data": dti.TfDataOptions()}[backend]
    kind, _, order = part.partition(" ")
    spec = dti.InputSpec.for_training(files, 16, order=order or "global")

    def prepare_epochs():
        train = dti.load(spec, options, batch_size=8)
        return lambda: [None for batch in train]

    def prepare_evaluations():
        import keras
        valid = dti.load(dti.InputSpec.for_evaluation(files, 16), options, batch_size=8)
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(24)])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return lambda: valid.evaluate(model, verbose=0)

    def prepare_datasets():
        return lambda: next(iter(dti.load(spec, options, batch_size=8)))

    act = globals()[f"prepare_{kind}"]()
    for number in range(1 + int(count)):
        if number in (int(count) // 3, int(count)):
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # free memory is not growth
            (memory,) = (line for line in open("/proc/self/status") if line.startswith("VmRSS"))
            counts = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            print(memory.split()[1], *counts, flush=True)
        act()
    os._exit(0)
"""
# How often, and the most KB that one may add once caches are full.
PARTS = {
    "epochs global": (150, 60),
    "epochs buffer": (150, 60),
    "evaluations": (90, 100),
    "datasets": (90, 400),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "part"), [*itertools.product(["dali", "tf_data"], PARTS)])
def test_nothing_grows(dataset, backend, part):
    files = os.path.join(os.path.dirname(dataset.paths[0]), "train-*-of-?????")
    count, most = PARTS[part]
    process = succeeds(
        python("-c", PROGRAM, files, backend, part, count, timeout=1800), quiet=False
    )
    before, after = (map(int, line.split()) for line in process.stdout.splitlines())
    (memory, *counts), (memory_after, *counts_after) = before, after
    assert memory_after - memory < most * count * 2 / 3
    assert all(abs(now - then) <= 2 for now, then in zip(counts_after, counts, strict=True))
