"""The forms of a model: timed in turns, without those that don't run."""

import time

from mxamp.tools.debugging.measured import Batch
from mxamp.tools.tuning import forms
from mxamp.tools.tuning.forms import Form, time_in_turns
from tuned import benchmarked, small_net


def test_forms_take_turns():
    order = []
    made = [Form("plain", name, Batch(())) for name in ("plain", "low")]
    for form in made:
        form.run = lambda name=form.block: order.append(name) or time.sleep(0.02)
    time_in_turns(made, 0)
    assert [len(form.seconds) for form in made] == [3, 3]
    assert order[-4:] == ["plain", "low"] * 2
    assert 15 < made[1].timing(made[0]).milliseconds < 200


def test_a_form_that_does_not_run_is_left_out(monkeypatch):
    net, data = small_net()

    def fails(*_, **__):
        raise RuntimeError("no")  # as OpenVINO does

    monkeypatch.setattr(forms, "convert_hybrid_block", fails)
    found = benchmarked(net, data)
    assert "fused" not in {t.way for t in found.timings}
    assert "Form fused does not run: no." in found.notes
