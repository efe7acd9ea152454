"""The commands that install what is missing, of the versions that this package works with."""

import importlib.metadata
import re
import shlex

from dali_tf_input.records.paths import python_command

DALI, PLUGIN = "nvidia-dali-cuda120", "nvidia-dali-tf-plugin-cuda120"


def pip_install(*packages: str, flags: str = "") -> str:
    """Returns the command for this environment; see `with_version` for the packages."""
    words = [with_version(package) for package in packages]
    return f"{python_command()} -m pip install {flags}{shlex.join(words)}"


def with_version(package: str) -> str:
    """Returns a package as this one requires it, such as "nvidia-dali-cuda120==2.4.*".

    The plugin is compiled for one DALI: it has the version of the one that is installed.
    """
    name = package.partition("[")[0]
    if name == PLUGIN and (dali := version_of(DALI)):
        return f"{PLUGIN}=={dali}"
    try:
        requirements = importlib.metadata.requires("dali_tf_input") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
        requirements = []
    for requirement in requirements:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?([^;]*)", requirement)
        if match and match[1] == name:
            return f"{package}{match[2].strip()}"
    return package


def plugin_command() -> str:
    """Returns the command that compiles DALI's TensorFlow plugin against what is installed.

    pip must neither hide TensorFlow and DALI from the build, nor take a plugin from its cache that
    was compiled against others.
    """
    flags = "--no-build-isolation --no-cache-dir --force-reinstall --no-deps "
    return pip_install(PLUGIN, flags=flags)


def version_of(package: str) -> str | None:
    """Returns the version of a package that is installed, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
