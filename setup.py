"""What setup.cfg can't say: where the start-up hook goes, and the README without links to files."""

import re
import tempfile

from setuptools import Distribution, setup

# isort: split
# Python 3.12 and later have no distutils but that of setuptools, once it is imported.
from distutils.command.install_data import install_data


class WithData(Distribution):
    """A distribution whose editable wheels hold data files: setuptools asks for `has_data`."""

    def has_data(self) -> bool:
        """Tell whether there are data files."""
        return self.has_data_files()


class BesidePackages(install_data):
    """Installs data files where Python looks for packages, the only place it reads .pth files in.

    In a wheel that is its root, whichever Python installs it.
    """

    def finalize_options(self) -> None:
        """Take the folder of the packages, not that of data."""
        self.set_undefined_options(
            "install", ("install_lib", "install_dir"), ("root", "root"), ("force", "force")
        )


def long_description() -> str:
    """Return the README with links to files of the project as text: an index has no such files."""
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:)\1\)", r"\1", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)", r"\1 (\2)", text)
    return (
        f"{text}\nFrom a package index install `mxamp[cpu]` or `mxamp[cu112]` in place of `.[cpu]` "
        "or `.[cu112]`. The files and scripts named here are in the source distribution.\n"
    )


# Not in build/, where modules of before would still lie, and get into the wheel.
with tempfile.TemporaryDirectory() as build:
    setup(
        distclass=WithData,
        cmdclass={"install_data": BesidePackages},
        data_files=[("", ["mxamp/startup/mxamp_startup.pth"])],
        long_description=long_description(),
        long_description_content_type="text/markdown",
        options={"build": {"build_base": build}},
    )
