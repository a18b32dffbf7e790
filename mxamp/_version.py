"""The version, where a build can read it without importing MXNet."""

__version__ = "2.0.0"
