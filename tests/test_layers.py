"""The layers of the package: a layer imports only from layers above it, and what loads when."""

import ast
import os
from pathlib import Path

import pytest
from commands import python, succeeds
from conftest import ROOT, numbered_examples, write_tfrecord

import dali_tf_input as dti

PACKAGE = Path(dti.__file__).parent
LAYERS = [
    "errors",
    "random",
    "processes",
    "storage",
    "records",
    "spec",
    "augment",
    "pictures",
    "index",
    "backends",
    "training",
    "serving",
    "sheets",
    "cli",
]
UPWARDS = {("__main__.py", "cli")}  # ``python -m ...``
# Imported when they are used: optional packages, and what takes seconds or serves few.
LATE = {
    "imagehash",
    "scipy",
    "obstore",
    "distributed",
    "nvidia",
    "tensorflow",
    "PIL",
    "numpy",
    "pynvml",
}
LATE_LAYERS = {"index.decoders"}  # it brings TensorFlow
LATE_IN_CLI = {"backends", "serving", "sheets", "training"}  # as a command's help comes at once


def imports_of(path):
    """Yields (module, name, whether it stands in a function) for each import of a file."""
    tree = ast.parse(path.read_text())
    # What only annotations need is not imported.
    tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node)[:20]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node not in tree.body) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from ((node.module, alias.name, node not in tree.body) for alias in node.names)


def test_layers_import_only_from_layers_above():
    """Also inside functions, where only optional and slow modules are imported."""
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__main__", "__pycache__"} == set(LAYERS)
    for path in [*PACKAGE.glob("[a-z]*.py"), *PACKAGE.glob("*/**/*.py")]:
        file = path.relative_to(PACKAGE).as_posix()
        layer = file.split("/")[0].removesuffix(".py")
        for module, name, is_late in imports_of(path):
            package, *parts = [*module.split("."), name]
            is_public = layer == "cli" and parts[0] in {"", *dti.__all__}
            is_version = parts[-1:] == ["__version__"]
            if package == "dali_tf_input" and not (is_version or is_public):
                rank = LAYERS.index(parts[0])
                allowed = rank <= LAYERS.index(layer) or (file, parts[0]) in UPWARDS
                assert allowed, f"{file} imports {module}"
                may_be_late = ".".join(parts[:2]) in LATE_LAYERS
                may_be_late |= layer == "cli" and parts[0] in LATE_IN_CLI
                may_be_late |= file == "cli/main.py"  # Ctrl-C while it imports is handled
                assert not is_late or may_be_late, f"{file}: {module} late"
            elif is_late:
                assert package in LATE, f"{file} imports {module} late"


def test_the_package_brings_no_framework(tmp_path):
    """Not even where files are indexed or a spec is made."""
    code = """if True:
        import sys
        import dali_tf_input
        heavy = {"tensorflow", "keras", "nvidia", "numpy", "rich", "absl", "PIL", "google"}
        assert not heavy & {name.split(".")[0] for name in sys.modules}
        from dali_tf_input import Checks, DaliOptions, Records, InputSpec, Preprocess, build_index
        build_index(sys.argv[1])
        heavy = {"tensorflow", "keras", "nvidia"}
        assert not heavy & {name.split(".")[0] for name in sys.modules}
    """
    succeeds(python("-c", code, write_tfrecord(tmp_path / "a", numbered_examples(1))))


USER = """
import keras  # type: ignore[import-untyped, unused-ignore]

import dali_tf_input as dti

dti.build_index("records/*-of-*", dti.Checks(verify="schema"))
records = dti.Records.from_files("records/train-*")
spec = dti.InputSpec.for_training(records, 224, crop=dti.RandomResizedCrop(), seed=1)
held_out = dti.InputSpec.for_evaluation("records/validation-*", 224)
train = dti.load(spec, dti.TfDataOptions(), batch_size=256)
valid = dti.load(held_out, dti.DaliOptions(device="cpu", decode="region"), batch_size=256)
steps: int = train.steps_per_epoch
names: tuple[str | None, ...] | None = train.class_names
model = keras.Sequential()
history = train.fit(model, epochs=90, validation=valid, resume="runs/1", profile=True)
train.fit(model, epochs=90, resume=dti.Resume("runs/2", save_every=1000))
accuracy: float = valid.evaluate(model)["accuracy"]
wait: float = train.profile(model, steps=20).wait
for images, labels in train:
    pass
for images, labels in dti.make_dataset(spec, batch_size=32, shard=dti.Shard(0, 2)):
    pass
for positions, images in dti.serving.iterate_batches(["a.jpg"], dti.Preprocess.for_evaluation(224)):
    first: int = positions[0]
reveal_type(spec.preprocess.crop)
reveal_type(train)
"""


@pytest.mark.nightly
def test_type_checkers_know_the_names(tmp_path):
    """A user's file passes mypy --strict; a wrong type in it does not. `make check` runs this too."""
    (tmp_path / "none.ini").write_text("[mypy]\nfollow_imports_for_stubs = true\n")
    flags = ["--follow-imports=silent", f"--cache-dir={tmp_path}/cache"]
    flags += ["--strict", f"--config-file={tmp_path}/none.ini"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}

    def check(code):
        user = tmp_path / "user.py"
        user.write_text(code)
        return python("-m", "mypy", *flags, user, cwd=tmp_path, env=environment)

    process = check(USER)
    assert process.returncode == 0, process.stdout
    for kind in ("spec.crops.Crop", "training.input.Input"):
        assert f'Revealed type is "dali_tf_input.{kind}"' in process.stdout
    process = check(USER.replace("batch_size=32", "batch_size='32'"))
    assert 'incompatible type "str"' in process.stdout
