"""The policy in force: the innermost region's, by execution context."""

import asyncio
import threading

from mxnet import nd

import mxamp as amp
from conftest import assert_unpatched
from helpers import kind, randn
from mxamp.policy.active import current_policy, nearest_policy, suspended


def product():
    return kind(nd.dot(randn(2, 3), randn(3, 2)))


def test_suspended_turns_casting_off_and_patches_nothing():
    with suspended():
        assert_unpatched()
        assert not amp.is_enabled()
    with amp.autocast("float16"):
        assert product() == "float16"
        with suspended():
            assert product() == "float32"
            assert current_policy() is None
            assert nearest_policy().target_dtype == "float16"
        assert product() == "float16"


def test_one_object_may_be_entered_in_several_threads():
    region, inside, leave, seen = amp.autocast("float16"), threading.Event(), threading.Event(), []

    def other():
        with region:
            inside.set()
            leave.wait(10)
            seen.append(product())
        seen.append(product())

    thread = threading.Thread(target=other)
    with region:
        thread.start()
        inside.wait(10)
    assert product() == "float32"
    leave.set()
    thread.join()
    assert seen == ["float16", "float32"]


def test_tasks_that_take_turns_have_regions_of_their_own():
    async def task(dtype, turns):
        found = []
        with amp.autocast(dtype):
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(
                    kind(nd.FullyConnected(randn(32, 3), randn(2, 3), num_hidden=2, no_bias=True))
                )
        turns[dtype] = found

    async def both(turns):
        await asyncio.gather(task("float16", turns), task("bfloat16", turns))

    turns = {}
    asyncio.run(both(turns))
    assert turns == {"float16": ["float16"] * 3, "bfloat16": ["bfloat16"] * 3}
    assert not amp.is_enabled()
    assert_unpatched()
