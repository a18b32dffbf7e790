"""Log lines of waits that last long."""

import threading
import time

import pytest

from mxamp.framework import waiting


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A watcher that loses patience soon."""
    monkeypatch.setattr(waiting, "_PATIENCE", 0.05)
    monkeypatch.setattr(waiting, "_watcher", waiting._Watcher())


def logged(caplog, text, seconds=5.0):
    limit = time.monotonic() + seconds
    while text not in caplog.text and time.monotonic() < limit:
        time.sleep(0.01)
    return caplog.text.count(text)


def test_a_long_wait_is_logged_once(caplog):
    with waiting.waiting("worker %s waits", 3):
        assert logged(caplog, "worker 3 waits") == 1
        time.sleep(0.15)
    assert caplog.text.count("worker 3 waits") == 1


def test_a_short_one_is_not(caplog):
    with waiting.waiting("a short wait"):
        pass
    waiting.end(waiting.begin("another"))
    begun = waiting.begin("a long one")
    assert logged(caplog, "a long one")
    waiting.end(begun)
    assert "short" not in caplog.text and "another" not in caplog.text


def test_a_wait_that_fails_has_ended():
    with pytest.raises(ZeroDivisionError), waiting.waiting("it"):
        raise ZeroDivisionError
    assert not waiting._watcher.waits


def test_waits_of_several_threads_share_a_watcher(caplog):
    numbers = []
    threads = [
        threading.Thread(target=lambda i=i: numbers.append(waiting.begin("thread %d", i)))
        for i in range(3)
    ]
    before = threading.active_count()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(logged(caplog, f"thread {i}") == 1 for i in range(3))
    assert threading.active_count() <= before + 1
    assert len(set(numbers)) == 3
