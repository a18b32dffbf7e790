"""Imports mxamp in a way that nobody sees before, and calls one of its functions."""

import importlib
import sys

import mxnet as mx

import digits

amp = importlib.import_module("mxamp")
if sys.argv[1] == "init":
    amp.init("float16", ctx=mx.cpu())
    print("policy", amp.current_policy().target_dtype)
else:
    with amp.scale_loss(mx.nd.ones(1), digits.trainer_of(digits.network())):
        pass
