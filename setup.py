"""What setup.cfg can't say: that the start-up hook belongs beside the packages."""

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


setup(
    distclass=WithData,
    cmdclass={"install_data": BesidePackages},
    data_files=[("", ["mxamp/startup/mxamp_startup.pth"])],
)
