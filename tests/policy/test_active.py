"""The policy in force: the innermost region's, by execution context."""

import asyncio
import threading

from mxnet import nd

import mxamp as amp
from conftest import assert_unpatched
from helpers import kind, randn


def product():
    return kind(nd.dot(randn(2, 3), randn(3, 2)))


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
    async def task(dtype):
        found = []
        with amp.autocast(dtype):
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(amp.current_policy().target_dtype)
        assert found == [dtype] * 3

    async def both():
        await asyncio.gather(task("float16"), task("bfloat16"))

    asyncio.run(both())
    assert_unpatched()
