"""Prints what is wrong with the imported MXNet, and whether mixed precision is on."""

import sys

import mxnet as mx
from mxnet.gluon import Trainer

names = [n.split(".")[1] for n in sys.modules if n.startswith("mxnet.") and n.count(".") == 1]
print("missing", [n for n in names if not hasattr(mx, n)], mx.gluon.Trainer is Trainer)
print("spec", mx.__spec__.name, mx.__spec__.loader is mx.__loader__)
amp = sys.modules.get("mxamp")
print("on", amp is not None and amp.is_enabled())
print("same", amp is None or sys.modules["mxamp.framework.arrays"].mx is mx)
