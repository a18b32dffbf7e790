"""The version, where a build can read it without importing MXNet."""

__version__ = "1.0.0"
