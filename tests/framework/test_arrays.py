import mxnet as mx
import pytest

from helpers import kind
from mxamp.framework import arrays


@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (1,), (3,)])
def test_empty_arrays_are_cast_by_what_knows_them(shape, dtype, monkeypatch):
    # Empty grids can't be launched on GPUs: amp_cast tries to, Cast asks for the size.
    used, invoke = [], arrays.invoke
    monkeypatch.setattr(arrays, "invoke", lambda *call: used.append(call[0]) or invoke(*call))
    mx.npx.set_np()
    low = arrays.cast(mx.np.ones(shape), dtype, True)
    assert kind(low) == dtype
    assert low.shape == shape
    special = low.size <= (1 if dtype == "bfloat16" else 0)
    assert used == [arrays._CAST if special else arrays._AMP_CAST]
