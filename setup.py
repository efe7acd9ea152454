"""Builds the compiled operation under a name that Python cannot import.

TensorFlow loads it. If Python had imported it before, as tools that walk through all modules do,
the operation would be loaded already and never register itself.
"""

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildOperation(build_ext):
    """Names the library as `tf_native` looks for it."""

    def get_ext_filename(self, ext_name: str) -> str:
        """Returns the path of the library, relative to the folder of the packages."""
        return ext_name.replace(".", "/") + ".so.1"


setup(cmdclass={"build_ext": BuildOperation})
