"""mxamp's version, in a module that a build can read without importing MXNet."""

__version__ = "2.0.0"
