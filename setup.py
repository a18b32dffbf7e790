"""What setup.cfg can't say: where site-packages is, for the start-up hook that belongs there."""

import os
import sys
import sysconfig

from setuptools import Distribution, setup


class WithData(Distribution):
    """A distribution whose editable wheels hold data files: setuptools asks for `has_data`."""

    def has_data(self) -> bool:
        """Tell whether there are data files."""
        return self.has_data_files()


site_packages = os.path.relpath(sysconfig.get_path("purelib"), sys.prefix)
setup(distclass=WithData, data_files=[(site_packages, ["mxamp/startup/mxamp_startup.pth"])])
