"""The operator of DALI that takes packed batches: compiled against the installed DALI, loaded.

It uses DALI's C++ classes, so it fits only the DALI that it was compiled against: it comes with no
wheel. ``python -m dali_tf_input.backends.dali_operator`` compiles it.
"""

import functools
import glob
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import zlib

import nvidia.dali as dali
from nvidia.dali import plugin_manager
from nvidia.dali import sysconfig as dali_sysconfig

from dali_tf_input.errors import InputError
from dali_tf_input.records.paths import python_command

_NATIVE = pathlib.Path(__file__).with_name("native")
_SOURCES = ("dali_images.cc", "read.h", "packed.h")
_COMMAND = f"{python_command()} -m {__spec__.name}"
# DALI's headers include CUDA's. TensorFlow comes with a part of them, too.
_CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_config.h", "nv/target")
_OF_TENSORFLOW = "tensorflow/include/**/libcudacxx/include"


def find_library() -> pathlib.Path:
    """Returns the path of the compiled operator, which names the DALI and the source it is of."""
    crc = 0
    for name in _SOURCES:
        crc = zlib.crc32((_NATIVE / name).read_bytes(), crc)
    return _NATIVE.parent / f"libdali_images-{dali.__version__}-{crc:08x}.so"


@functools.cache
def load_operator() -> None:
    """Loads the operator, `fn.dali_tf_input_images`.

    Raises:
      InputError: it was not compiled for the installed DALI, or cannot be loaded.
    """
    library = find_library()
    if not library.exists():
        raise InputError(
            f"DaliOptions needs an operator that is compiled against the installed DALI,"
            f" {dali.__version__}; {library} is not there. With g++ and CUDA's headers"
            f" (docs/install.md), compile it: {_COMMAND}. Or use TfDataOptions()."
        )
    try:
        plugin_manager.load_library(str(library))
    except RuntimeError as error:
        text = f"{library} cannot be loaded: {error}. Compile it again: {_COMMAND}"
        raise InputError(text) from error


def find_headers() -> list[str]:
    """Returns the folders of CUDA's headers: those of wheels, of a toolkit, of TensorFlow.

    Raises:
      InputError: a header is in none of them.
    """
    site = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(dali.__file__))))
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    folders = [
        *sorted(glob.glob(os.path.join(glob.escape(site), "nvidia", "cuda_*", "include"))),
        *(os.path.join(home, "include") for home in homes if home),
        *sorted(glob.glob(os.path.join(glob.escape(site), _OF_TENSORFLOW), recursive=True)),
    ]
    for header in _CUDA_HEADERS:
        if not any(os.path.exists(os.path.join(folder, header)) for folder in folders):
            raise InputError(
                f"CUDA's header {header} is not there: {python_command()} -m pip install"
                " nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12 nvidia-cuda-cccl-cu12"
            )
    return folders


def compile_operator() -> pathlib.Path:
    """Compiles the operator, which takes seconds, and removes those of other sources.

    Raises:
      InputError: there is no compiler, a header is missing, it does not compile, or the folder of
        this package cannot be written.
    """
    library = find_library()
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, library.name)
        command = [
            *(*compiler, "-shared", "-fPIC", "-O3", "-fvisibility=hidden", "-w"),
            *dali_sysconfig.get_compile_flags(),
            "-std=c++17",
            *(f"-isystem{folder}" for folder in find_headers()),
            *(str(_NATIVE / _SOURCES[0]), "-o", made),
            *dali_sysconfig.get_link_flags(),
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            text = f"There is no {compiler[0]}. Install it, for example: apt-get install g++"
            raise InputError(text) from None
        if result.returncode:
            raise InputError(f"The operator does not compile:\n{result.stderr[:4000]}")
        try:
            with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as stream:
                stream.write(pathlib.Path(made).read_bytes())
            os.chmod(stream.name, 0o644)
            os.replace(stream.name, library)
            for old in library.parent.glob(f"libdali_images-{dali.__version__}-*.so"):
                if old != library:  # of another source; another environment may use another DALI
                    old.unlink(missing_ok=True)
        except OSError as error:
            text = f"{library} cannot be written: {error}. Run the command as who owns the folder"
            raise InputError(f"{text}: {_COMMAND}") from error
    load_operator()
    return library


def main() -> int:
    """Compiles the operator; returns the exit code."""
    try:
        print(f"compiled {compile_operator()}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
