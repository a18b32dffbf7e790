"""Tables as text."""

from mxamp.tools.tables import text_table


def test_text_is_left_and_numbers_are_right():
    lines = text_table(("name", "n"), [("[b]&x", 1), ("y", 20)]).splitlines()
    assert lines == ["name    n", "[b]&x   1", "y      20"]
