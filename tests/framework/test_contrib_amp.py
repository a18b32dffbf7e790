"""`mxnet.contrib.amp` and mxamp in one process: an error, whichever comes first."""

import mxnet as mx
import pytest
from mxnet import autograd, nd
from mxnet.contrib import amp as stock
from mxnet.contrib.amp import scale_loss as stock_scale_loss

import mxamp as amp
from helpers import backpropagate
from mxamp.framework.patching import _stacks
from training import batches, setup


@pytest.fixture
def stock_functions(monkeypatch):
    """`mxnet.contrib.amp` as it is, but for the changes that its `init` makes to operators."""
    changed = []
    for function in ("_wrap_symbol_functions", "_wrap_loss_output_functions"):
        monkeypatch.setattr(stock.amp, function, lambda *_: changed.append(1))
    for flag in ("_amp_initialized", "_amp_loss_scale_initialized", "_loss_scaler"):
        monkeypatch.setattr(stock.amp, flag, getattr(stock.amp, flag))
    return changed


@pytest.fixture
def stock_is_on(stock_functions):
    stock.init()


def use_grad_scaler(net, trainer):
    scaler = amp.GradScaler()
    backpropagate(lambda: scaler.scale(net(nd.ones((2, 4))).sum()))
    scaler.step(trainer, 2)


def use_region(net, trainer):
    with amp.autocast(enabled=False):
        net(nd.ones((2, 4)))


TO_REFUSE = {
    "init": lambda net, trainer: amp.init("bfloat16", ctx=mx.cpu()),
    "decorate": lambda net, trainer: amp.decorate(mx.optimizer.SGD()),
}


WAYS_ON = {
    **TO_REFUSE,
    "region": use_region,
    "init_trainer": lambda net, trainer: amp.init_trainer(trainer, amp.LossScaler()),
    "GradScaler": use_grad_scaler,
    "initialize": lambda net, trainer: amp.initialize(net, trainer, "O1", dtype="bfloat16"),
    "patch_contrib": lambda net, trainer: amp.patch_contrib(),
}


@pytest.mark.parametrize("use", WAYS_ON)
def test_mxamp_is_refused_after_stock_init(stock_is_on, use):
    net, trainer = setup()
    net(nd.ones((2, 4)))
    patched_before = {*_stacks}
    with pytest.raises(amp.StateError, match=r"contrib\.amp is on in this process.*patch_contrib"):
        WAYS_ON[use](net, trainer)
    assert {*_stacks} == patched_before
    assert not amp.is_enabled()


@pytest.mark.parametrize("init", [stock.init, stock.amp.init], ids=["imported by name", "module"])
@pytest.mark.parametrize("use", TO_REFUSE)
def test_stock_init_is_refused_while_mxamp_is_on(stock_functions, use, init):
    net, trainer = setup()
    TO_REFUSE[use](net, trainer)
    with pytest.raises(amp.StateError, match=r"call mxamp\.init, or mxamp\.patch_contrib\(\)"):
        init("bfloat16")
    assert not stock_functions
    assert not stock.amp._amp_initialized
    net(nd.ones((2, 4)))
    amp.shutdown()
    init("bfloat16")
    assert stock_functions
    assert stock.amp._amp_initialized


def test_stock_init_is_refused_in_a_region(stock_functions):
    with amp.autocast("bfloat16"), pytest.raises(amp.StateError, match=r"call mxamp\.init,"):
        stock.init("bfloat16")
    assert not stock_functions


@pytest.mark.parametrize("name", ["init_trainer", "unscale"])
@pytest.mark.parametrize("module", [stock, stock.amp])
def test_stock_init_trainer_is_refused_while_mxamp_is_on(module, name):
    amp.init("bfloat16", ctx=mx.cpu())
    with pytest.raises(amp.StateError, match=rf"call mxamp\.{name}, or mxamp\.patch_contrib"):
        getattr(module, name)(setup()[1])


def test_stock_init_on_a_trainer_that_mxamp_scales_fails_the_next_step(stock_functions):
    """`init_trainer` with a scaler of its own needs no `init`: nothing is patched."""
    net, trainer = setup()
    amp.init_trainer(trainer, amp.StaticLossScaler(1))
    stock.init("bfloat16")
    stock.init_trainer(trainer)
    weight = trainer._params[0].data().asnumpy()
    with pytest.raises(amp.StateError, match="contrib.amp is on in this process"):
        backward_by_stock(net, trainer, batches(1)[0])
        trainer.step(1)
    assert (trainer._params[0].data().asnumpy() == weight).all()


def test_a_trainer_of_stock_amp_is_refused(stock_is_on):
    _, trainer = setup()
    stock.init_trainer(trainer)
    with pytest.raises(amp.StateError, match=r"patch_contrib\(\)"):
        amp.init_trainer(trainer, amp.NoScaler())


def test_a_stock_scale_loss_on_a_trainer_of_mxamp_is_an_error():
    amp.patch_contrib()
    stock.init("float16", ctx=mx.cpu())
    net, trainer = setup()
    stock.init_trainer(trainer)
    with pytest.raises(amp.StateError, match=r"call mxamp\.scale_loss, .* mxamp\.patch_contrib"):
        backward_by_stock(net, trainer, batches(1)[0])
    assert trainer._scale == 1.0
    backward_by_stock(net, trainer, batches(1)[0], stock.scale_loss)  # as a library looks it up


def backward_by_stock(net, trainer, data, scale_loss=stock_scale_loss):
    with autograd.record():
        loss = (net(nd.array(data)) ** 2).sum()
        with scale_loss(loss, trainer) as scaled:
            scaled.backward()
