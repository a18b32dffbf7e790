"""Report pages: complete, escaped, small, and laid out in a browser."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import mxnet as mx
import pytest
from click.testing import CliRunner

import mxamp as amp
from mxamp.cli.main import main
from mxamp.tools.debugging.charts import COLUMNS, HEIGHT, PAGE, hover_data, runs_of, ticks
from mxamp.tools.debugging.report import report_page
from mxamp.tools.debugging.trace_lines import TraceStep
from mxamp.tools.debugging.trace_reading import TraceFile, read_trace

EVIL = "</script><img src=x onerror=alert(1)>'\""
HEADER = {"kind": "header", "schema": 1, "time": 1.7e9, "mxamp": "1.0.0", "mxnet": "1.9.1", "numpy": "1.23.5",
          "python": "3.11.7", "machine": {"cpu": "A CPU", "cores": 2, "features": ["avx512"]}, "dtype": "float16",
          "policy": {"target_dtype": "float16", "device": "cpu", "fp32_layers": ["head*"]}, "rank": None,
          "trainers": [{"optimizer": "Adam", "learning_rate": 0.1, "parameters": 4, "elements": 58,
                        "scaled_by": "init_trainer"}]}  # fmt: skip
HISTOGRAM = {"exponents": [-30, -20, 0, 20], "share": [0.1, 0.2, 0.5, 0.1], "zero": 0.1, "scale": 1024.0,
             "dtype": "float32"}  # fmt: skip


def line_of(step, **values):
    return {"kind": "step", "trainer": 0, "step": step, "loss": 1 / step, "loss_scale": 1024.0, "stepped": True,
            "seconds": 0.1, "memory": 2**30 + step, "nonfinite": [], **values}  # fmt: skip


def record(kind, data, step=3):
    return {"kind": kind, "step": step, "data": data}


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, *lines)))
    return path


def full(path, name="layer0_weight"):
    skip = line_of(
        2, stepped=False, loss="NaN", loss_finite=False, nonfinite=[name], next_loss_scale=512.0
    )
    return written(
        path,
        line_of(1),
        skip,
        line_of(3, loss_scale=512.0),
        record("operators", {"operators": [{"operator": name, "dtype": "float16", "calls": 7}],
                             "casts": [{"source": "float32", "target": "float16", "casts": 3, "bytes": 4096}]}),
        record("plan", {"nodes": [{"name": name, "operator": "dot", "precision": "float16", "reason": "because"}],
                        "casts": [{}]}),
        record("histogram", HISTOGRAM),
        record("culprit", {"step": 2, "phase": "backward", "block": name, "operator": "exp", "min": "-Infinity"}),
        record("mine", {"text": name}),
    )  # fmt: skip


def report(*arguments, status=0):
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def chart_named(name, page):
    return page.split(f'data-chart="{name}"')[1].split("</svg>")[0]


def test_findings_of_numerics_are_shown(tmp_path):
    with amp.debugging.check_numerics(on="collect") as check:
        mx.nd.log(mx.nd.zeros((3,)))
    culprit = record("culprit", check.first.to_dict())
    page = report_page([read_trace(written(tmp_path / "a.jsonl", line_of(1), culprit))])
    (row,) = re.findall(r"<tr>(?:(?!</tr>).)*forward.*?</tr>", page, re.S)
    cells = re.findall(r"<td[^>]*>(?:<span[^>]*>)?(.*?)<", row)
    assert {"log", "float32", "3"} <= set(cells), cells


def test_the_page_shows_what_the_trace_holds(tmp_path):
    out = tmp_path / "report.html"
    out.write_text("an older page")
    trace = full(tmp_path / "a.jsonl")
    assert "3 steps, 1 skipped" in report(trace, "--out", out, "--force").output
    page = out.read_text()
    for words in (
        "layer0_weight", "because", "1 in float16; 1 cast", "A CPU, 2 cores", "avx512", "Adam, learning rate 0.1",
        "4 parameters of 58 elements", "scaled by init_trainer", "float32 layers: head*", "4,096", "nan (not finite)",
        "1024 to 512", "normal in float16 50.00%", "vanishes in float16 10.00%", "zero 10.00%", "1 (33.33%)",
        "2023-11-14 22:13:20 UTC", "skipped <b>1</b>", "loss not finite <b>1</b>", "-inf", "loss scale 1024.0",
    ):  # fmt: skip
        assert words in page, words
    assert page.count('<figure class="chart" data-chart=') == 4


def test_the_page_opens_with_its_summary(tmp_path):
    traces = [read_trace(full(tmp_path / name)) for name in ("a.jsonl", "b.jsonl")]
    for count in (1, 2):
        opening = report_page(traces[:count]).split("</h1>")[1].split("<figure")[0]
        titles = re.findall("<dt>(.*?)</dt>", opening)
        assert titles[:3] == ["steps", "skipped", "last loss scale"]
        assert titles.count("machine") == opening.count("<dd>A CPU, 2 cores</dd>") == count
        assert re.findall(r">(\w.jsonl)</p>", opening) == ["a.jsonl", "b.jsonl"] * (count - 1)


class Elements(HTMLParser):
    """The elements of a page, which closes each that it opens."""

    VOID = ("meta", "path", "rect", "br", "i")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def elements(page):
    parser = Elements()
    parser.feed(page)
    assert not parser.open
    return parser.seen


def test_everything_is_escaped_and_nothing_is_loaded(tmp_path):
    trace = full(tmp_path / "a&b<i>.jsonl", name=EVIL)
    page = report_page([read_trace(trace), read_trace(trace)])
    seen = elements(page)
    assert not [tag for tag, _ in seen if tag in ("img", "link", "iframe")]
    assert [tag for tag, _ in seen].count("script") == 2
    for _, attributes in seen:
        assert not [name for name in attributes if name in ("src", "href") or name.startswith("on")]
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page


def test_charts_have_alt_text(tmp_path):
    seen = elements(report_page([read_trace(full(tmp_path / "a.jsonl"))]))
    pictures = [a for tag, a in seen if tag == "svg"]
    assert all(a.get("aria-hidden") or len(a["aria-label"]) > 20 for a in pictures)
    assert "first 1, last 0.3333" in pictures[0]["aria-label"]
    assert ("html", {"lang": "en"}) in seen
    assert all(a.get("aria-label") for tag, a in seen if a.get("role") == "region")


def contrast(one, two):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear))

    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_contrast_with_their_background():
    schemes = re.findall(r"\.mxamp \{(.*?)\}", (PAGE / "report.css").read_text(), re.S)[:2]
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        pairs = [("warn", "warn-back"), ("text", "panel"), ("soft", "panel")]
        pairs += [(front, "back") for front in ("text", "soft", *(f"c{i}" for i in range(6)))]
        for front, back in pairs:
            assert contrast(colours[front], colours[back]) >= 4.5, (front, back)
    assert len(schemes) == 2


@pytest.mark.slow
def test_a_long_trace_makes_a_small_page_with_every_skip_and_peak(tmp_path):
    count, skips = 100_000, {7, 50_000, 50_400, 99_999}
    steps = tuple(
        TraceStep(i, loss=1e6 if i == 31_415 else 1.0, stepped=i not in skips, seconds=0.1, memory=2**30,
                  nonfinite=("w",) * (i in skips))
        for i in range(1, count + 1)
    )  # fmt: skip
    trace = TraceFile("a", (HEADER,), steps, ())
    page = report_page([trace])
    assert len(page) < 2e6
    (marks,) = set(re.findall(r'class="mark s0" d="(.*?)"', page))
    assert marks.count("M") == len(skips)
    assert "from 1 to 1e+06" in page
    (band,) = re.findall(r'class="band f0" d="(.*?)"', page)[:1]
    heights = [float(spot.split()[1]) for spot in re.split("[MLZ]", band) if spot]
    assert min(heights) < HEIGHT * 0.1 and max(heights) > HEIGHT * 0.9
    rows = json.loads(hover_data(runs_of("a", trace.steps)))["runs"][0]["rows"]
    assert len(rows) <= COLUMNS + 1
    assert sum(row[-1] for row in rows) == len(skips)
    assert max(row[2][-1] for row in rows) == 1e6


def test_charts_of_several_traces_are_overlaid(tmp_path):
    (tmp_path / "x").mkdir()
    paths = [full(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "x/a.jsonl")]
    report(*paths, "--out", tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert page.count('<figure class="chart" data-chart=') == 4
    for label in (str(paths[0]), "b.jsonl", str(paths[2])):
        assert f"{label}</li>" in page
    loss = chart_named("loss", page)
    assert all(f'class="line s{i}"' in loss for i in range(3))
    assert page.count("<section>") == 3


def test_each_trainer_of_a_trace_has_a_line(tmp_path):
    trace = written(tmp_path / "a.jsonl", line_of(1), line_of(1, trainer=1))
    assert "a.jsonl, trainer 1</li>" in report_page([read_trace(trace)])


@pytest.mark.parametrize(
    "lines, words",
    [
        ([], "No step was traced."),
        ([line_of(5)], "data-chart"),
        ([line_of(1, loss=None, seconds=None, memory=None)], 'data-chart="scale"'),
        ([line_of(1, loss="NaN"), line_of(2, loss="Infinity")], 'data-chart="scale"'),
        ([line_of(1, loss_scale=0), line_of(2, loss_scale=-3)], "data-chart"),
        ([line_of(1, loss=-1e300), line_of(2, loss=1e300)], "data-chart"),
        *(
            ([line_of(1, **{name: one}), line_of(2, **{name: two})], "data-chart")
            for name in ("loss", "seconds", "loss_scale")
            for one, two in [(-1e308, 1e308), (5e-324, 1.7e308), (0.0, 5e-324), (1.7e308, 1.7e308),
                             (5e-324, 5e-324), ("Infinity", 1.0), ("NaN", "-Infinity"), (-1.7e308, 0)]
        ),
        ([line_of(1, memory=2**63), line_of(2**62), line_of(2**63, trainer=2**40)], "data-chart"),
        ([record("histogram", {"exponents": [10**400, 1], "share": [0.5, 0.5]})], "no histogram"),
        ([record("histogram", {"exponents": [0, 1], "share": [1e308, 1e308]})], "no histogram"),
        ([line_of(i, loss=0.0) for i in (1, 2)], "data-chart"),
        ([{**HEADER, "resumed_after": 12}], "resumed after step 12"),
        ([record("operators", {}), record("plan", {"nodes": 3}), record("culprit", {})], "No casts."),
        ([record("histogram", {"exponents": [1], "share": []})], "no histogram"),
        ([record("histogram", {"exponents": ["x"], "share": [1]})], "no histogram"),
        ([record("operators", {"operators": [1, {"calls": {}}], "casts": 2})], "What ran"),
        ([line_of(1, nonfinite=["\ud800"], stepped=False)], "skipped"),
    ],
)  # fmt: skip
def test_pages_of_odd_traces(lines, words, tmp_path):
    report(written(tmp_path / "a.jsonl", *lines), "--out", tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert words in page
    elements(page)


def test_a_cut_last_line_is_reported(tmp_path):
    path = full(tmp_path / "a.jsonl")
    path.write_text(path.read_text()[:-20])
    done = report(path, "--out", tmp_path / "out.html")
    assert "the last line is cut" in done.output
    assert "the last line is cut" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: [p / "none.jsonl"], "there is no trace"),
        (lambda p: [full(p / "a.jsonl"), "--out", p / "a.jsonl"], "would replace the trace"),
        (lambda p: [full(p / "a.jsonl"), "--out", p / "no" / "x"], "there is no folder"),
        (lambda p: [full(p / "a.jsonl"), "--out", p], "is a folder: give the name of a file"),
        (lambda p: [], "Missing argument"),
        (lambda p: [full(p / "a.jsonl"), "--out", __file__], "is there already"),
    ],
)
def test_errors_are_one_line(make, words, tmp_path):
    done = report(*make(tmp_path), status=2)
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    "low, high, whole, expected",
    [(0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1, 4, True, [1, 2, 3, 4]), (3, 3, False, [3])],
)
def test_ticks_are_round(low, high, whole, expected):
    assert ticks(low, high, whole=whole) == pytest.approx(expected)


def test_a_gap_is_not_drawn_over():
    losses = (0.0, None, 1.0, 0.5)
    steps = tuple(TraceStep(i, loss=loss) for i, loss in enumerate(losses, 1))
    loss = chart_named("loss", report_page([TraceFile("a", (HEADER,), steps, ())]))
    (path,) = re.findall(r'class="line s0" d="(.*?)"', loss)
    assert re.findall("[A-Za-z]", path) == [*"MhMhL"]


CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
# Put into the page, which tells the one around it: a frame may be narrower than any window.
PROBE = """<script>
let errors = 0;
addEventListener("error", () => errors++);
addEventListener("load", () => {
  const chart = document.querySelector(".chart[data-chart]");
  chart.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
  const values = document.querySelector(".values");
  parent.postMessage(JSON.stringify({
    wide: Math.max(document.documentElement.scrollWidth, document.body.scrollWidth),
    inner: innerWidth, errors, values: values.textContent, high: values.getBoundingClientRect().width,
    filters: document.querySelectorAll("label.filter").length,
  }), "*");
});
</script>"""
FRAME = """<body style="margin: 0"><script>
addEventListener("message", (event) => { document.body.dataset.found = btoa(event.data); });
</script><iframe src="page.html" style="border: 0; width: {width}px; height: 2000px"></iframe>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to look at the page with")
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_in_a_browser(width, tmp_path):
    lines = [line_of(i, nonfinite=[f"a_long_name_of_a_parameter_{i}_weight" * 3], stepped=i % 2 == 0)
             for i in range(1, 30)]  # fmt: skip
    traces = [full(tmp_path / "a.jsonl"), written(tmp_path / f"{'b' * 90}.jsonl", *lines)]
    page = report_page([read_trace(trace) for trace in traces])
    (tmp_path / "page.html").write_text(page.replace("<style>", PROBE + "<style>", 1))
    frame, picture = tmp_path / "frame.html", tmp_path / "page.png"
    frame.write_text(FRAME.replace("{width}", str(width)))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", "--window-size=1280,2000", "--virtual-time-budget=2000",
         f"--screenshot={picture}", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    found = json.loads(base64.b64decode(re.search('data-found="(.*?)"', done.stdout)[1]))
    assert found["inner"] == width
    assert found["wide"] <= width
    assert found["errors"] == 0
    assert found["filters"] >= 1
    assert "step 1\nloss 1\n" in found["values"] and found["high"] > 50
    assert "CONSOLE" not in done.stderr, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
