"""The command with those of its commands that import no MXNet."""

from .doctor import doctor, info
from .launch import launch
from .output import OneLineErrors

__all__ = ["without_mxnet"]

without_mxnet = OneLineErrors("mxamp", commands={"doctor": doctor, "info": info, "launch": launch})
