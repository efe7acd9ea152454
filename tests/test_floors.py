"""The rooms of the package and what each may import: only rooms on lower floors, and frameworks only where they live."""

import ast
import subprocess
import sys
from pathlib import Path

import dali_tf_input

PACKAGE = Path(dali_tf_input.__file__).parent

FLOORS = [
    {"tfrecord"},
    {"example", "files", "staging", "summary", "options", "sharding", "stages", "benchmark", "worker_pool"},
    {"manifest", "checks", "preprocess", "order"},
    {"spec", "index_folder"},
    {"index"},
    {"dali_images", "tf_augment", "tf_images", "record_stream"},
    {"dali_backend", "decoders", "tf_data_backend"},
    {"dataset", "failures"},
    {"distribute", "index_worker", "predict"},
    {"input_profile", "resume"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TENSORFLOW_FROM = 5  # floors below it import neither TensorFlow nor DALI
DALI_ROOMS = {"dali_backend", "dali_images", "decoders"}


def imports_of(room):
    """Returns (module, whether at the top level) for each import of a room."""
    tree = ast.parse((PACKAGE / f"{room}.py").read_text())
    found = []
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            found += [(name.name, top) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.module == "dali_tf_input":
                found += [(f"dali_tf_input.{name.name}", top) for name in node.names]
            else:
                found.append((node.module, top))
    return found


def test_every_room_has_a_floor():
    rooms = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert rooms == set(FLOOR_OF)


def test_imports_point_down():
    for room, floor in FLOOR_OF.items():
        for module, _ in imports_of(room):
            if module.startswith("dali_tf_input."):
                assert FLOOR_OF[module.split(".")[1]] < floor, f"{room} imports {module}"


def test_frameworks_stay_on_their_floors():
    for room, floor in FLOOR_OF.items():
        for module, _ in imports_of(room):
            if module.split(".")[0] in ("tensorflow", "keras"):
                assert floor >= TENSORFLOW_FROM, f"{room} imports {module}"
            if module.startswith("nvidia"):
                assert room in DALI_ROOMS, f"{room} imports {module}"


def test_only_frameworks_are_imported_lazily():
    """The backend that is chosen, and the decoders that are asked for: each costs seconds, and nobody needs all."""
    lazy = {(room, module) for room in FLOOR_OF for module, top in imports_of(room) if not top}
    assert lazy == {
        ("dataset", "dali_tf_input.dali_backend"),
        ("predict", "dali_tf_input.dali_backend"),
        ("index_worker", "dali_tf_input.decoders"),
        ("index_worker", "PIL"),
        ("decoders", "dali_tf_input.tf_images"),
        ("decoders", "tensorflow"),
        ("decoders", "nvidia"),
    }


def test_the_package_itself_stays_on_the_lower_floors():
    modules = {module for module, _ in imports_of("__init__") if module.startswith("dali_tf_input.")}
    assert all(FLOOR_OF[module.split(".")[1]] < TENSORFLOW_FROM for module in modules)


def test_import_brings_no_framework():
    code = """if True:
        import sys
        import dali_tf_input
        heavy = {"tensorflow", "keras", "nvidia", "numpy", "rich", "absl", "PIL"} & {name.split(".")[0] for name in sys.modules}
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rooms_are_small():
    for path in PACKAGE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 350, path.name
