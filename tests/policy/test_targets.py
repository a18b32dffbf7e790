"""Target dtypes and devices, by any name."""

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp

SYMBOL = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")


@pytest.mark.parametrize(
    "dtype, name",
    [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), (np.float16, "float16")],
)
def test_names_of_dtypes_in_other_libraries(dtype, name):
    assert amp.Policy.default(dtype, "cpu").target_dtype == name
    assert amp.convert_symbol(SYMBOL, "fp32").tojson() == SYMBOL.tojson()


def test_contexts_are_devices():
    policy = amp.Policy.default("bfloat16", mx.cpu())
    assert policy == amp.Policy.default("bfloat16", "cpu")
    assert amp.Policy.default("float16", mx.gpu(1)).device == "gpu"


@pytest.mark.parametrize(
    "use", [amp.Policy.default, lambda dtype: amp.convert_symbol(SYMBOL, dtype), amp.list_lp16_ops]
)
def test_what_needs_one_dtype_says_so(use):
    with pytest.raises(amp.ArgumentError, match="must be 'float16'.*, not 'auto'"):
        use("auto")
