"""Builds the compiled operation under a name that Python cannot import, and a release's page.

TensorFlow loads the operation. If Python had imported it before, as tools that walk through all
modules do, it would be loaded already and never register itself.

Environment variables of a release, see .github/workflows/release.yml:
  DALI_TF_INPUT_REQUIRE_NATIVE: if set, a build fails that cannot compile the operation. Otherwise
    the package is built without it, and is slower.
  DALI_TF_INPUT_URL: the address of the repository, for the links of the package's page. Without it
    the links of README.md stay as they are, relative.
"""

import os
import pathlib
import re

from setuptools import setup
from setuptools.command.build_ext import build_ext

URL = os.environ.get("DALI_TF_INPUT_URL", "").rstrip("/")


class BuildOperation(build_ext):
    """Names the library as `tf_native` looks for it."""

    def finalize_options(self) -> None:
        """Makes the operation a must, if the environment says so."""
        super().finalize_options()
        for extension in self.extensions:
            extension.optional &= not os.environ.get("DALI_TF_INPUT_REQUIRE_NATIVE")

    def get_ext_filename(self, ext_name: str) -> str:
        """Returns the path of the library, relative to the folder of the packages."""
        return ext_name.replace(".", "/") + ".so.1"


def make_page() -> str:
    """Returns README.md with links that work on another site."""
    text = pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    pictures = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{URL}/raw/main/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({URL}/blob/main/", pictures) if URL else text


URLS = {"Repository": URL, "Issues": f"{URL}/issues", "Changelog": f"{URL}/blob/main/CHANGELOG.md"}

setup(
    cmdclass={"build_ext": BuildOperation},
    long_description=make_page(),
    long_description_content_type="text/markdown",
    project_urls=URLS if URL else {},
)
