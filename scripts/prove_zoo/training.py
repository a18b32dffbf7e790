"""A few steps of training on one batch, by whichever mixed precision has been switched on."""

from contextlib import contextmanager
from typing import Any, Dict, Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

from tasks import made

#: Updates, and steps at most: loss scaling leaves some out until the scale fits.
_UPDATES, _STEPS = 3, 24


def train(name: str, amp: Any) -> Dict[str, Any]:
    """Return the losses before each update and after the last; `amp` is None for float32."""
    net, compute, rate = made(name)

    def losses() -> Any:
        # What dropout and detectors draw is the same in each step: only the weights differ.
        mx.random.seed(0)
        return compute()

    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": rate}, update_on_kvstore=False
    )
    if amp is not None:
        amp.init_trainer(trainer)
    with autograd.record():
        losses()  # parameters get their shapes
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    found, left_out = [], 0
    for _ in range(_STEPS):
        before = [p.data().copy() for p in trained]
        with autograd.record():
            loss = losses()
            with _scaled(amp, loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(loss.size, ignore_stale_grad=True)
        if all(np.array_equal(a.asnumpy(), p.data().asnumpy()) for a, p in zip(before, trained)):
            left_out += 1
            continue
        found.append(float(_values(loss).mean()))
        if len(found) == _UPDATES:
            break
    with autograd.record():
        found.append(float(_values(losses()).mean()))
    nd.waitall()
    return {"losses": found, "left_out": left_out}


def _values(loss: Any) -> Any:
    return loss.astype("float32").asnumpy()


@contextmanager
def _scaled(amp: Any, loss: Any, trainer: Any) -> Iterator[Any]:
    if amp is None:
        yield loss
    else:
        with amp.scale_loss(loss, trainer) as scaled:
            yield scaled
