"""Training loops of PyTorch, translated by the table on docs/coming-from.md alone."""

import re
import runpy
from contextlib import suppress

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import ROOT, initialized, leaf

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## PyTorch\n")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| (.*) \| (.*) \|$", SECTION, re.MULTILINE)[1:])
LOSS = gluon.loss.L2Loss()


@pytest.fixture
def names():
    """What the table's snippets use, after a backward pass: `batch_size` to `x`."""
    net = initialized(gluon.nn.Dense(2, in_units=3))
    trainer, scaler = gluon.Trainer(net.collect_params(), "sgd"), amp.GradScaler(init_scale=8)
    x, batch_size = nd.ones((4, 3)), 4
    x.attach_grad()
    with autograd.record(), amp.autocast("float16"):
        loss, other = net(x).sum(), net(x).mean()
    scaler.scale(loss).backward(retain_graph=True)
    yield {**globals(), **locals()}
    with suppress(amp.StateError):  # a row has stepped
        scaler.step(trainer, batch_size, ignore_stale_grad=True)


@pytest.mark.parametrize("torch", ROWS)
def test_a_row_of_the_table_runs(torch, names, tmp_path):
    codes = [code for code in re.findall(r"`([^`]+)`", ROWS[torch]) if re.search(r"[.(]", code)]
    assert codes or "not needed" in ROWS[torch]
    for code in codes:
        body = "\ndef decorated(x):\n    return x\ndecorated(x)" if code[0] == "@" else ""
        (tmp_path / "row.py").write_text(code + body)
        with amp.autocast("float16"):
            runpy.run_path(str(tmp_path / "row.py"), names)


class Cube(autograd.Function):
    """`@custom_fwd(cast_inputs=torch.float32)`."""

    @amp.float_function
    def forward(self, x):
        assert not amp.is_enabled()
        self.save_for_backward(x)
        return x**3

    @amp.float_function
    def backward(self, dy):
        assert not amp.is_enabled()
        return 3 * self.saved_tensors[0] ** 2 * dy


def train(enabled):
    """Return the weights after two steps with all of the table's calls."""
    ones = mx.init.One()
    nets = [initialized(gluon.nn.Dense(2, in_units=n, weight_initializer=ones)) for n in (3, 2)]
    trainers, parameters = [], []
    for net in nets:
        net.collect_params().setattr("grad_req", "add")
        parameters += net.collect_params().values()
        trainers.append(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))
    scaler = amp.GradScaler(init_scale=1024.0, enabled=enabled)

    @amp.autocast("float16", enabled=enabled)
    def forward(x):
        assert amp.is_enabled() == enabled
        assert not enabled or amp.current_policy().target_dtype == "float16"
        first, second = Cube()(nets[0](x)), nets[1](nets[0](x))
        return [LOSS(one, nd.ones((4, 2))).mean() / 2 for one in (first, second)]

    for number in range(1, 5):
        x = leaf(nd.array(np.arange(12).reshape(4, 3) / (9 + number)))
        with autograd.record():
            losses = forward(x)
            with amp.autocast(enabled=False):
                plain = nets[0](x)
            slope = autograd.grad(scaler.scale(plain), [x], create_graph=True)[0]
            losses[0] = losses[0] + nd.square(slope / scaler.get_scale()).sum() / 8
        autograd.backward(scaler.scale(losses))
        if number % 2 == 0:
            for net, trainer in zip(nets, trainers):
                scaler.unscale_(trainer)
                gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 1.0)
                scaler.step(trainer, 1)
                net.collect_params().zero_grad()
            scaler.update()
            scaler.load_state_dict(scaler.state_dict())
    return [param.data().asnumpy() for param in parameters]


def test_a_torch_loop_with_all_of_its_calls():
    for half, plain, start in zip(train(True), train(False), (1, 0, 1, 0)):
        np.testing.assert_allclose(half, plain, rtol=2e-3, atol=2e-4)
        assert abs(plain - start).min() > 1e-3
