"""Patches: whole or not at all, taken off in any order, and never somebody else's."""

import itertools
from types import SimpleNamespace

import pytest

from mxamp.framework.patching import FrontEnd, Patch, PatchSet, original


def adding(text):
    return lambda original: lambda: original() + text


@pytest.fixture
def owner():
    return SimpleNamespace(name=lambda: "original", other=lambda: "other")


def patch(owner, text, name="name"):
    return PatchSet([Patch(owner, name, adding(text))])


def test_a_set_is_put_on_and_taken_off(owner):
    original = owner.name
    one = patch(owner, "+1")
    assert not one.is_open
    one.open()
    one.open()
    assert one.is_open
    assert owner.name() == "original+1"
    one.close()
    one.close()
    assert owner.name is original


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_stacked_patches_are_taken_off_in_any_order(owner, order):
    original = owner.name
    sets = [patch(owner, f"+{i}") for i in range(3)]
    for one in sets:
        one.open()
    left = ["+0", "+1", "+2"]
    for i in order:
        assert owner.name() == "original" + "".join(left)
        sets[i].close()
        left.remove(f"+{i}")
    assert owner.name is original


def test_a_set_that_fails_leaves_nothing(owner):
    original = owner.other
    broken = PatchSet(
        [Patch(owner, "other", adding("!")), Patch(owner, "no_such_name", adding("!"))]
    )
    with pytest.raises(KeyError):
        broken.open()
    assert not broken.is_open
    assert owner.other is original


def test_somebody_elses_patch_on_top_stays(owner, caplog):
    one, two = patch(owner, "+1"), patch(owner, "+2")
    one.open()
    two.open()
    theirs = adding("+theirs")(owner.name)
    owner.name = theirs
    one.close()
    two.close()
    assert owner.name is theirs
    assert caplog.text.count("patched by other code") == 2


def test_close_all_closes_front_ends_the_last_one_first(owner):
    closed = []

    class Told(FrontEnd):
        def __init__(self, text):
            super().__init__([Patch(owner, "name", adding(text))])
            self.text = text

        def close(self):
            super().close()
            closed.append(self.text)

    for text in ("+1", "+2"):
        Told(text).open()
    FrontEnd.close_all()
    assert closed == ["+2", "+1"]
    assert owner.name() == "original"


def test_a_patch_on_top_stays_above_later_ones(owner):
    first = owner.name
    top = PatchSet([Patch(owner, "name", adding("+top"), on_top=True)])
    top.open()
    later = patch(owner, "+later")
    later.open()
    assert owner.name() == "original+later+top"
    assert original(owner, "name") is first
    later.close()
    assert owner.name() == "original+top"
    top.close()
    assert owner.name is first
