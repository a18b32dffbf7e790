"""The forms of a model: timed in turns, without those that don't run."""

import time

import mxnet as mx
from mxnet.gluon import nn

import mxamp as amp
from mxamp.tools.debugging.measured import Batch
from mxamp.tools.tuning import forms
from mxamp.tools.tuning.forms import Form, time_in_turns


def small_net():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=4), nn.BatchNorm(in_channels=8), nn.Dropout(0.5), nn.Dense(2))
    net.initialize(mx.init.Xavier())
    return net, mx.nd.random.normal(shape=(6, 4))


def benchmarked(net, batch, *arguments, dtype="bfloat16"):
    return amp.benchmark(net, batch, *arguments, target_dtype=dtype, budget=0.01)


def test_forms_take_turns():
    order = []
    made = [Form("plain", name, Batch(())) for name in ("plain", "low")]
    for form in made:
        form.run = lambda name=form.block: order.append(name) or time.sleep(0.02)
    time_in_turns(made, 0)
    assert [len(form.seconds) for form in made] == [3, 3]
    assert order[-4:] == ["plain", "low"] * 2
    assert 15 < made[1].timing(made[0]).milliseconds < 200


def test_the_converted_model_is_fused_and_leaves_out_what_can_not_be_converted(monkeypatch):
    net, data = small_net()
    made, convert = [], forms.convert_hybrid_block

    def watched(*args, **options):
        made.append(options["fuse"])
        return convert(*args, **options)

    monkeypatch.setattr(forms, "convert_hybrid_block", watched)
    for dtype in ("bfloat16", "float16"):
        benchmarked(net, data, dtype=dtype)
    assert made == [True, False]  # the fused kernels are oneDNN's

    def fails(*_, **__):
        raise RuntimeError("no")  # as OpenVINO does

    monkeypatch.setattr(forms, "convert_hybrid_block", fails)
    found = benchmarked(net, data)
    assert "fused" not in {t.way for t in found.timings}
    assert "Form fused does not run: no." in found.notes
