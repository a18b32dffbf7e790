"""Fixtures of the command's tests."""

import pytest

from nets import convolutional, made


@pytest.fixture
def folder(tmp_path):
    """The folder of an exported model, `net`."""
    net, data = made(convolutional)
    net.hybridize()
    net(*data)
    net.export(str(tmp_path / "net"))
    return tmp_path
