"""The garbage collector pauses while graphs are made."""

import gc

import pytest

from mxamp.graph.ir import collector_paused


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_pauses_and_is_as_before(enabled):
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(KeyError), collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() == enabled
