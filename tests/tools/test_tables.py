"""Tables as text."""

from mxamp.tools.tables import text_table


def test_text_is_left_and_numbers_are_right():
    lines = text_table(("name", "n"), [("[b]&x", 1), ("y", 20)]).splitlines()
    assert lines == ["name    n", "[b]&x   1", "y      20"]


def test_a_column_without_values_is_left_out_but_not_those_of_an_empty_table():
    rows = [("x", None, None), ("y", None, 2.0)]
    assert text_table(("name", "error", "n"), rows).splitlines() == ["name  n", "x", "y     2"]
    assert text_table(("name", "n"), []) == "name  n"
