"""`mxamp explain`."""

from helpers import run_mxamp as run


def test_explain_shows_operators_by_name_and_precision(folder):
    command = ["explain", folder / "net-symbol.json", "--dtype", "float16", "--device", "gpu"]
    shown = run(*command, "--precision", "float16", "--name", "*conv*").output
    head, *rows, _, summary = shown.splitlines()
    assert head.split() == ["name", "operator", "precision", "reason"]
    assert rows and all(" Convolution  float16 " in row for row in rows)
    assert "casts" in summary


def test_explain_shows_float32_as_a_form(folder):
    shown = run("explain", folder / "net", "--dtype", "float32").output
    assert "if converted to float32: " in shown


def test_explain_shows_a_converted_model_as_it_is(folder, monkeypatch, caplog):
    monkeypatch.chdir(folder)
    run("convert", "net", "--dtype", "float16", "--device", "gpu", "--out", "half")
    shown = run("explain", "half").output
    assert "the model as it is: 14 operators: " in shown and " in float16" in shown
    run("convert", "net", "--dtype", "float16", "--device", "cpu", "--out", "rounded")
    (row, *_) = [one for one in run("explain", "rounded").output.splitlines() if " Conv" in one]
    assert row.endswith(" float32    its inputs are float32, rounded to float16")
    for other in ("bfloat16", "float32"):
        assert f"if converted to {other}" in run("explain", "half", "--dtype", other).output
    run("convert", "net", "--dtype", "float32", "--fuse", "--out", "fused")
    run("convert", "half", "--dtype", "float32", "--out", "wide")
    _, first, *_, summary = run("explain", "fused").output.splitlines()
    assert first.split()[1:3] == ["_sg_mkldnn_conv", "float32"] and summary.count(" in ") == 1
    assert not [one for one in caplog.messages if one.startswith("the model ")]
    again = "--dtype bfloat16 --device cpu --out again".split()
    run("convert", "half", *again)
    assert any("may hold rounded parameters" in one for one in caplog.messages)
    assert "it was before --fuse, " in run("convert", "fused", *again, "--force", status=2).output
