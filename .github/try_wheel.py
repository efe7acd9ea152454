"""Uses the installed package as the README says: photos, records, the six lines.

usage: python .github/try_wheel.py [native|tensorflow]

It fails unless images are prepared by that kernel.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

README = Path(__file__).resolve().parents[1] / "README.md"


def main(kernel: str = "native") -> None:
    random = np.random.default_rng(0)
    for number in range(40):
        photo = Path("photos", f"class {number % 2}", f"{number}.jpg")
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (60, 80, 3), dtype=np.uint8)).save(photo)
    command = [sys.executable, "-m", "dali_tf_input"]
    subprocess.run([*command, "convert", "photos", "records"], check=True)
    subprocess.run(
        [*command, "index", "--verify=decode", *Path("records").glob("*-of-*")], check=True
    )

    import keras

    layers = [keras.Input((224, 224, 3)), keras.layers.GlobalAveragePooling2D()]
    model = keras.Sequential([*layers, keras.layers.Dense(2, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    (program, *_) = re.findall(
        r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    program = program.replace("batch_size=256", "batch_size=4").replace("epochs=90", "epochs=1")
    exec(compile(program, str(README), "exec"), {"model": model})

    from dali_tf_input.backends.tf_native import uses_native

    found = "native" if uses_native("auto") else "tensorflow"
    if found != kernel:
        sys.exit(f"The kernel is {found}, not {kernel}.")
    print(f"The six lines of the README work; images are prepared by kernel {found!r}.")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main(*sys.argv[1:])
