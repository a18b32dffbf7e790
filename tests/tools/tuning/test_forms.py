"""The forms of a model: timed in turns, without those that don't run."""

import math
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
    assert time_in_turns(made, time.monotonic() + 0.3, [], math.inf) == made
    assert len(made[0].seconds) == len(made[1].seconds) >= 3
    assert order[-4:] == ["plain", "low"] * 2
    assert 15 < made[1].timing(made[0]).milliseconds < 200


class Slow(Form):
    def mean_seconds(self, repeats=1):
        self.runs = getattr(self, "runs", 0) + 1
        return self.block


def test_a_hopeless_form_is_given_up_after_one_run():
    made = [Slow("autocast", seconds, Batch(())) for seconds in (0.5, 0.1, 3.0, 0.9)]
    notes = []
    timed = time_in_turns(made, time.monotonic() + 100, notes, math.inf)
    assert timed == [made[0], made[1], made[3]] and made[2].runs == 1
    assert [len(form.seconds) for form in made] == [15, 15, 1, 15]  # compare reports both models
    assert time_in_turns(timed, 0, notes, math.inf) == timed
    assert [form.seconds for form in timed] == [[0.5], [0.1], [0.9]]
    assert time_in_turns(timed, 0, notes, limit=0) == timed[:1]
    given_up, *over = notes
    assert given_up.startswith("autocast in float32 was given up after a run of 3.0 s, 30 times")
    assert len(over) == 2 and all(" was not timed: the `budget` is over" in one for one in over)


def test_a_form_that_does_not_run_is_left_out(monkeypatch):
    net, data = small_net()

    def fails(*_, **__):
        raise RuntimeError("no")  # as OpenVINO does

    monkeypatch.setattr(forms, "convert_hybrid_block", fails)
    found = benchmarked(net, data)
    assert "fused" not in {t.way for t in found.timings}
    assert "fused in float32 does not run: no." in found.notes
