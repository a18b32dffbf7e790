"""What setup.cfg can't say: where the start-up hook goes, and the README without links to files."""

import os
import re
import sys
import sysconfig
import tempfile

from setuptools import Distribution, setup


class WithData(Distribution):
    """A distribution whose editable wheels hold data files: setuptools asks for `has_data`."""

    def has_data(self) -> bool:
        """Tell whether there are data files."""
        return self.has_data_files()


def long_description() -> str:
    """Return the README with links to files of the project as text: an index has no such files."""
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:)\1\)", r"\1", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)", r"\1 (\2)", text)
    return f"{text}\nThe files that are named here are in the source distribution.\n"


site_packages = os.path.relpath(sysconfig.get_path("purelib"), sys.prefix)
# Not in build/, where modules of before would still lie, and get into the wheel.
with tempfile.TemporaryDirectory() as build:
    setup(
        distclass=WithData,
        data_files=[(site_packages, ["mxamp/startup/mxamp_startup.pth"])],
        long_description=long_description(),
        long_description_content_type="text/markdown",
        options={"build": {"build_base": build}},
    )
