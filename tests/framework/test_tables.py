"""Tables as text and as HTML: what notebooks show of each result."""

from html.parser import HTMLParser

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.debugging import Finding, Statistics
from mxamp.framework.tables import html_lines, html_table, text_table
from mxamp.tools.tuning.benchmark import Benchmark, Timing

BAD = "<b>&x"


class _Cells(HTMLParser):
    """The cells of a page's tables as (text, style); fails where tags do not match."""

    def __init__(self, page):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in ("p", "table", "caption", "thead", "tbody", "tr", "th", "td", "span"), tag
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append(["", dict(attrs)["style"]])
        if tag == "span":  # a precision, on its color
            self.cells[-1][1] += f";{dict(attrs)['style']}"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th", "span"):
            self.cells[-1][0] += data


def test_text_is_left_and_numbers_are_right_and_precisions_are_colored():
    cells = _Cells(html_table(("name", "n"), [(BAD, 1), ("bfloat16", 2.5)])).cells
    styles = dict(cells)
    assert styles["name"] == styles[BAD] == "text-align:left"
    assert styles["n"] == styles["1"] == styles["2.5"] == "text-align:right"
    assert "background:" in styles["bfloat16"] and "color:#000" in styles["bfloat16"]
    assert '<td style="text-align:left"><span' in html_table(("",), [("bfloat16",)])
    assert html_lines(BAD, "y") == "<p>&lt;b&gt;&amp;x</p><p>y</p>"
    assert text_table(("name", "n"), [(BAD, 1)]).splitlines() == ["name   n", f"{BAD}  1"]


def plan():
    symbol = mx.sym.softmax(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name=BAD))
    return amp.explain(symbol, policy=amp.Policy.default("float16", "gpu"))


STATISTICS = Statistics("float16", (2,), 2, 1, 0, 0, 0, 0.5, 0.5, 0.5)
RESULTS = {
    "plan": (plan, (BAD, "float16", "float32")),
    "policy": (
        lambda: amp.Policy.default("float16", "gpu").override(fp32_layers=[BAD]),
        (BAD, "low", "float16", "float32"),
    ),
    "finding": (
        lambda: Finding("overflow", "forward", 3, BAD, "n", "dot", "output", "float16", STATISTICS),
        (BAD, "float16", "overflow", "3"),
    ),
    "benchmark": (
        lambda: Benchmark("bfloat16", "cpu", 5, (Timing("training", BAD, 2.0, 1.0, 2.0, (1.9, 2.1)),)),
        (BAD, "training", "2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_results_show_in_notebooks(name):
    make, expected = RESULTS[name]
    result = make()
    cells = _Cells(result._repr_html_()).cells
    texts = [text for text, _ in cells]
    assert set(expected) <= set(texts)
    assert not any("text-align" not in style for _, style in cells)
    for text, style in cells:
        assert ("background" in style) == (text in ("float16", "float32", "bfloat16"))
    # The repr is as before.
    assert repr(result).startswith(("<", "Finding("))
