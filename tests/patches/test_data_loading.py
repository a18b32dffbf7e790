"""Data loaders compute as without mxamp."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

import mxamp as amp
from helpers import kind, randn, untuned


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "thread_pool": True}])
def test_transforms_are_left_alone(dtype, options):
    def transform(x):
        return nd.dot(x, nd.eye(4)) * 1.001

    values = np.random.RandomState(0).randn(8, 3, 4).astype("float32")
    dataset = gluon.data.ArrayDataset(values).transform(lambda x: transform(nd.array(x)))
    amp.init(policy=untuned(dtype))
    loader, inside = gluon.data.DataLoader(dataset, batch_size=4, **options), []
    for batch in loader:
        inside.append(
            kind(nd.FullyConnected(randn(32, 4), randn(2, 4), num_hidden=2, no_bias=True))
        )
        assert kind(batch) == "float32"
    assert inside == [dtype] * 2
    batches = np.concatenate([batch.asnumpy() for batch in loader])
    np.testing.assert_array_equal(batches, values * np.float32(1.001))


def test_images_are_resized_in_float32():
    amp.init("float16", ctx=mx.cpu())
    image = nd.dot(randn(12, 12), randn(12, 12)).reshape((8, 6, 3))
    assert kind(image) == "float16"
    assert mx.image.imresize(image, 4, 4).shape == (4, 4, 3)
