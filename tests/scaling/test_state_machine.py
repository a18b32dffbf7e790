"""Random programs with scaled losses, held to a NumPy reference that knows the true gradients.

Each loss is linear in the weights, so its gradient is known without autograd. After every call the
weights equal those of the reference, and gradients without a loss scale equal the true gradients.
A call is *legal*, *wrong* (it has to raise `StateError`) or *doubtful* (it may raise `StateError`;
if it does not, the weights have to be right). A call that raises leaves everything as it was, except
that the losses of a failed backward pass are not used again.

| call | wrong | doubtful |
|---|---|---|
| scale_loss | one of its trainers holds unscaled gradients | |
| backward | | from losses of several scales, or of none and some; from a loss whose owner has stepped or unscaled, or that `scale_loss` forgot because of an error |
| unscale, clip | no loss scaled since the step; unscaled already; the GradScaler's trainer has stepped | on foreign gradients |
| step | a second one of a GradScaler's trainer before update | on foreign gradients |
| GradScaler.update | no step since the last update | |

A gradient is foreign if its pass was scaled, but not for its trainer, or was doubtful.

`MXAMP_EXAMPLES=400 MXAMP_SEED=3 scripts/test tests/scaling/test_state_machine.py::test_many_programs`
runs 400 other programs of 50 calls.
"""

import ctypes
import itertools
import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Set

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mxnet import autograd, gluon, nd

import mxamp as amp
from mxamp.frontends import automatic

RATE, MOMENTUM = 2.0**-6, 0.5
#: The operators of these programs run in float32.
FLOAT32 = amp.Policy.default("float16", "cpu").override(fp32=["FullyConnected"])
LEGAL, WRONG, DOUBTFUL = "legal", "wrong", "doubtful"

# ---------------------------------------------------------------------------------- the reference


@dataclass(eq=False)
class Weight:
    """A parameter as plain MXNet would have it: `gradient` is the true one, without a scale."""

    parameter: gluon.Parameter
    value: Any
    gradient: Any = field(default_factory=lambda: np.zeros(2))
    velocity: Any = field(default_factory=lambda: np.zeros(2))
    fresh: bool = False
    unscaled: bool = True  #: the gradient's buffer holds the true gradient
    from_scaled: bool = False  #: a pass from scaled losses wrote it, be it by 1
    foreign: bool = False
    hidden: bool = False  #: mxamp has seen an overflow, which later calls may have replaced

    @property
    def frozen(self):
        return self.parameter.grad_req == "null"

    @property
    def finite(self):
        return np.isfinite(self.gradient).all()

    def receive(self, gradient):
        adds = self.parameter.grad_req == "add"
        with np.errstate(invalid="ignore"):
            self.gradient = gradient + (self.gradient if adds else 0)
        self.fresh = True

    def update(self, momentum, batch_size):
        self.velocity = momentum * self.velocity - RATE / batch_size * self.gradient
        self.value = self.value + self.velocity
        self.fresh = False


@dataclass(eq=False)
class Scaling:
    """One call of `scale_loss` or `GradScaler.scale`; `spent` once an owner has used it up."""

    scale: float
    owners: List["Owner"]
    spent: bool = False


@dataclass(eq=False)
class Loss:
    """An array to call backward on, and its gradient by weight."""

    array: Any
    gradient: Dict[Weight, float]
    graphs: Set[int]
    scalings: List[Scaling] = field(default_factory=list)


@dataclass(eq=False)
class Owner:
    """A net and its trainer."""

    kind: str  #: who scales its losses: "nobody", "scale_loss", "decorate", or a `GradScaler`
    net: gluon.Block
    trainer: gluon.Trainer
    weights: List[Weight]
    scaler: Optional[amp.GradScaler] = None
    marked: bool = False  #: a loss was scaled for it since its last step
    unscaled: bool = False
    stepped: bool = False  #: since the last `update` of its `GradScaler`
    saved: Any = None

    @property
    def fresh(self):
        return [one for one in self.weights if one.fresh and not one.frozen]

    @property
    def checks(self):
        return self.kind in ("decorate", "GradScaler") or self.marked

    @property
    def forgot_to_scale(self):
        """Whether a `GradScaler` would take a scale out of gradients that never had it: it warns."""
        used = self.marked or self.stepped or any(one.from_scaled for one in self.fresh)
        return self.kind == "GradScaler" and not used


# ---------------------------------------------------------------------------------- the machine


class Net(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.a = self.params.get("a", shape=(2,), init=mx.init.One())
            self.b = self.params.get("b", shape=(2,), init=mx.init.One())


KINDS = st.sampled_from(["scale_loss", "GradScaler", "another GradScaler", "decorate", "nobody"])
MODES = st.sampled_from(["", "", "", "init", "initialize", "automatic"])
SCALES = st.sampled_from([1.0, 2.0, 8.0, 1024.0, 65536.0])
#: By net and parameter: the factor, which is the gradient. Infinite factors overflow.
TERMS = st.dictionaries(
    st.tuples(st.integers(0, 2), st.integers(0, 1)),
    st.sampled_from([1, 2, -1, 3, np.inf]),
    min_size=1,
    max_size=6,
)
PICK = st.integers(0, 11)


class Programs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.owners, self.losses, self.scalers = [], [], []
        self.numbers = itertools.count()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(
        kinds=st.lists(KINDS, min_size=1, max_size=3),
        mode=MODES,
        scales=st.lists(SCALES, min_size=3, max_size=3),
        grows=st.sampled_from([0, 1, 2]),
        momentum=st.sampled_from([0.0, MOMENTUM]),
    )
    def start(self, kinds, mode, scales, grows, momentum):
        self.momentum = momentum
        if mode == "init":
            amp.init(policy=FLOAT32)
        elif mode == "automatic":
            automatic.start(policy=FLOAT32)
        self.scalers = [
            amp.GradScaler(scale, growth_interval=grows or 2000) for scale in scales[:2]
        ]
        for kind, scale in zip(kinds, scales):
            kind = {"initialize": "scale_loss", "automatic": "decorate"}.get(mode, kind)
            net = Net()
            net.initialize()
            optimizer = mx.optimizer.SGD(learning_rate=RATE, momentum=momentum)
            if kind == "decorate" and mode != "automatic":
                optimizer = amp.decorate(
                    optimizer, scale, grows or 2000, use_dynamic_loss_scaling=grows > 0
                )
            trainer = gluon.Trainer(net.collect_params(), optimizer)
            if kind == "scale_loss" and mode != "initialize":
                dynamic = amp.LossScaler(scale, growth_interval=grows or 2000)
                static = amp.NoScaler() if scale == 1 else amp.StaticLossScaler(scale)
                amp.init_trainer(trainer, dynamic if grows else static)
            weights = [Weight(one, np.ones(2)) for one in (net.a, net.b)]
            scaler = None
            if kind.endswith("GradScaler"):
                scaler, kind = self.scalers[kind.startswith("another")], "GradScaler"
            self.owners.append(Owner(kind, net, trainer, weights, scaler))
        if mode == "initialize":
            levels = {0: ("O0", None), 1: ("O1", "dynamic"), 2: ("O1", scales[0])}
            level, scale = levels[grows]
            nets, trainers = zip(*((one.net, one.trainer) for one in self.owners))
            amp.initialize([*nets], [*trainers], opt_level=level, loss_scale=scale, ctx=mx.cpu())

    def teardown(self):
        amp.shutdown()
        self.folder.cleanup()

    @contextmanager
    def expect(self, legality):
        """Context of a call; the `raised` of the result says whether it raised `StateError`."""
        result = SimpleNamespace(raised=False)
        try:
            yield result
        except amp.StateError:
            if legality is LEGAL:
                raise
            result.raised = True
        assert result.raised or legality is not WRONG, "no StateError"

    def owner(self, pick):
        return self.owners[pick % len(self.owners)]

    @property
    def weights(self):
        return [weight for owner in self.owners for weight in owner.weights]

    # ------------------------------------------------------------------ losses

    def record(self, terms, constant):
        """Return a new loss whose value is `constant`, or None if it depends on no weight."""
        gradient = {}
        for (net, index), factor in terms.items():
            weight = self.owner(net).weights[index]
            if not weight.frozen:
                gradient[weight] = float(factor)
        if not gradient:
            return None
        with autograd.record():
            array = nd.ones(1)
            for weight, factor in gradient.items():
                data = weight.parameter.data()
                change = data - data.detach()  # zero
                # The gradient of a square root of zero is infinite, and its value is finite.
                terms = change.sqrt() if factor == np.inf else change * nd.full(2, factor)
                array = array + terms.sum()
            array = array * constant if constant != 1 else array
        gradient = {weight: factor * constant for weight, factor in gradient.items()}
        return Loss(array, gradient, {next(self.numbers)})

    def keep(self, *losses):
        self.losses = [*self.losses, *losses][-8:]

    def ways_to_scale(self):
        """Return each list of trainers for `scale_loss`, and each `GradScaler` in use."""
        explicit = [one for one in self.owners if one.kind == "scale_loss"]
        lists = (itertools.combinations(explicit, n + 1) for n in range(len(explicit)))
        used = [one for one in self.scalers if any(o.scaler is one for o in self.owners)]
        return [*map(list, itertools.chain.from_iterable(lists)), *used]

    @rule(
        terms=TERMS,
        constant=st.sampled_from([1, 1, 1, 8, 1024]),
        scaled=PICK,
        use=st.sampled_from(["backward", "backward", "outside", "keep", "keep", "error"]),
        retain=st.booleans(),
    )
    def new_loss(self, terms, constant, scaled, use, retain):
        """Record a loss, scale it or not, call backward or keep it for later."""
        loss = self.record(terms, constant)
        if loss is None:
            return
        ways = [None, *self.ways_to_scale(), *self.ways_to_scale()]
        self.use(loss, ways[scaled % len(ways)], use, retain)

    @rule(pick=PICK, scaled=PICK, retain=st.booleans(), use=st.sampled_from(["backward", "keep"]))
    @precondition(lambda self: any(not loss.scalings for loss in self.losses))
    def scale_again(self, pick, scaled, use, retain):
        """Scale a loss that was recorded before, perhaps scaled for another trainer too."""
        losses = [loss for loss in self.losses if not loss.scalings]
        ways = self.ways_to_scale()
        if ways:
            self.use(losses[pick % len(losses)], ways[scaled % len(ways)], use, retain)

    def use(self, loss, way, use, retain):
        """Scale a loss in one of `ways_to_scale`, or not at all; call backward or keep it."""
        if way is None:
            self.keep(loss)
            if use != "keep":
                self.run([loss], retain)
            return
        if isinstance(way, amp.GradScaler):
            with autograd.record():
                array = way.scale(loss.array)
            scaled = self.scaled(loss, array, [one for one in self.owners if one.scaler is way])
            for one in scaled.scalings[0].owners:
                one.marked = True
            self.keep(loss, scaled)
            if use != "keep":
                self.run([scaled], retain)
            return
        scaled = None
        legality = WRONG if any(one.unscaled for one in way) else LEGAL
        with self.expect(legality) as result:
            try:
                with autograd.record(), amp.scale_loss(
                    loss.array, [o.trainer for o in way]
                ) as array:
                    scaled = self.scaled(loss, array, way)
                    self.keep(loss, scaled)
                    if use == "error":
                        scaled.scalings[0].spent = True
                    if use in ("backward", "error"):
                        self.run([scaled], retain)
                    if use == "error":
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            else:
                for one in way:
                    one.marked = True
        if not result.raised and use == "outside":
            self.run([scaled], retain)

    def scaled(self, loss, array, owners):
        scale = (array / loss.array).asscalar()
        return Loss(array, loss.gradient, loss.graphs, [Scaling(scale, owners)])

    @rule(one=PICK, other=PICK, use=st.sampled_from(["backward", "keep"]), retain=st.booleans())
    @precondition(lambda self: len(self.losses) > 1)
    def add_losses(self, one, other, use, retain):
        """Add two losses, both scaled or neither: the sum of one scaled alone is documented as wrong."""
        one = self.losses[one % len(self.losses)]
        alike = [loss for loss in self.losses if bool(loss.scalings) == bool(one.scalings)]
        other = alike[other % len(alike)]
        with autograd.record():
            array = one.array + other.array
        scalings, graphs = one.scalings + other.scalings, one.graphs | other.graphs
        summed = Loss(array, total(one, other), graphs, scalings)
        self.keep(summed)
        if use == "backward":
            self.run([summed], retain)

    # ------------------------------------------------------------------ backward passes

    @rule(picks=st.lists(PICK, min_size=1, max_size=2), retain=st.booleans())
    @precondition(lambda self: self.losses)
    def backward(self, picks, retain):
        self.run([self.losses[pick % len(self.losses)] for pick in dict.fromkeys(picks)], retain)

    def run(self, losses, retain):
        """Call backward on losses."""
        losses = list(
            {id(loss.array): loss for loss in losses}.values()
        )  # a scale of 1 copies none
        scalings = [scaling for loss in losses for scaling in loss.scalings]
        scales = {s.scale for s in scalings} | {1.0 for loss in losses if not loss.scalings}
        reused = any(s.spent and s.scale != 1 for s in scalings)
        gradient, doubtful = total(*losses), reused or len(scales) > 1
        with self.expect(DOUBTFUL if doubtful else LEGAL) as result:
            if len(losses) == 1:
                losses[0].array.backward(retain_graph=retain)
            else:
                autograd.backward([loss.array for loss in losses], retain_graph=retain)
        if not retain or result.raised:
            graphs = set().union(*(loss.graphs for loss in losses))
            self.losses = [loss for loss in self.losses if not loss.graphs & graphs]
        if result.raised:
            return
        for owner in self.owners:
            owned = all(owner in s.owners for s in scalings if s.scale != 1)
            for weight in owner.weights:
                if weight in gradient:
                    adds = weight.parameter.grad_req == "add"
                    foreign = scales != {1.0} and (doubtful or not owned or owner.unscaled)
                    weight.receive(gradient[weight])
                    weight.foreign = foreign or (adds and weight.foreign)
                    weight.from_scaled = bool(scalings) or (adds and weight.from_scaled)
                    weight.unscaled = scales == {1.0} and (not adds or weight.unscaled)
                    if owner.kind == "decorate":
                        weight.hidden = adds and (weight.hidden or not weight.finite)

    # ------------------------------------------------------------------ gradients

    @rule(pick=PICK)
    def zero_grad(self, pick):
        owner = self.owner(pick)
        owner.net.collect_params().zero_grad()
        for weight in owner.weights:
            if owner.kind == "decorate" and weight.fresh and not weight.finite:
                weight.hidden = True
            weight.gradient = np.zeros(2)

    @rule(pick=PICK, which=st.integers(1, 3), req=st.sampled_from(["add", "add", "write", "null"]))
    def set_grad_req(self, pick, which, req):
        """MXNet makes new gradients, which are zero, and forgets that it has used the old ones."""
        owner = self.owner(pick)
        for weight in (weight for i, weight in enumerate(owner.weights) if which & 1 << i):
            if weight.parameter.grad_req == req:
                continue
            weight.parameter.grad_req = req
            weight.gradient = np.zeros(2)
            weight.fresh = weight.foreign = weight.from_scaled = False
            weight.unscaled = True
            self.losses = [loss for loss in self.losses if weight not in loss.gradient]

    def expect_unscale(self, owner):
        nothing = not owner.marked and owner.kind != "GradScaler"
        if nothing or owner.unscaled or owner.stepped:
            return self.expect(WRONG)
        return self.expect(DOUBTFUL if any(one.foreign for one in owner.fresh) else LEGAL)

    @rule(pick=PICK, limit=st.sampled_from([None, None, 1.0, 16.0]))
    @precondition(lambda self: any(o.kind in ("scale_loss", "GradScaler") for o in self.owners))
    def unscale(self, pick, limit):
        """Unscale the gradients of a trainer; with a limit, clip those that are fresh."""
        owners = [one for one in self.owners if one.kind in ("scale_loss", "GradScaler")]
        owner = owners[pick % len(owners)]
        if owner.forgot_to_scale:
            return
        with self.expect_unscale(owner) as result:
            if owner.scaler:
                limit = None
                owner.scaler.unscale_(owner.trainer)
            elif limit:
                norm = amp.clip_grad_global_norm(owner.trainer, limit)
            else:
                amp.unscale(owner.trainer)
        if result.raised:
            return
        owner.unscaled = owner.marked = True
        if limit:
            self.clip(owner.fresh, limit, norm)
        for weight in owner.weights:
            weight.unscaled, weight.foreign = True, False
            weight.hidden = weight.fresh and not weight.finite

    @rule(pick=PICK, limit=st.sampled_from([1.0, 16.0]))
    def clip_unscaled(self, pick, limit):
        """Clip by MXNet's own function: all gradients of a trainer, or those of all trainers."""
        owners = self.owners if pick > 8 else [self.owner(pick)]
        weights = [weight for one in owners for weight in one.weights if not weight.frozen]
        if weights and all(weight.unscaled and weight.finite for weight in weights):
            arrays = [weight.parameter.grad() for weight in weights]
            self.clip(weights, limit, gluon.utils.clip_global_norm(arrays, limit))

    def clip(self, weights, limit, norm):
        expected = np.sqrt(sum((weight.gradient**2).sum() for weight in weights))
        np.testing.assert_allclose(norm, expected, rtol=1e-5)
        if np.isfinite(norm) and norm > limit:
            for weight in weights:
                weight.gradient = weight.gradient * (limit / expected)

    # ------------------------------------------------------------------ steps

    @rule(
        pick=PICK,
        batch_size=st.sampled_from([1, 2]),
        ignore_stale_grad=st.booleans(),
        in_two=st.booleans(),
        reuse=st.booleans(),
    )
    def step(self, pick, batch_size, ignore_stale_grad, in_two, reuse):  # noqa: PLR0912
        owner = self.owner(pick)
        overflows = not all(weight.finite for weight in owner.fresh)
        if owner.forgot_to_scale or (overflows and not owner.checks):
            return  # float32 would ruin the weights, too
        trainer, legality = owner.trainer, LEGAL
        if any(weight.foreign for weight in owner.fresh):
            legality = DOUBTFUL
        if any(not weight.fresh for weight in owner.weights if not weight.frozen):
            ignore_stale_grad = True
        old_scale = getattr(trainer, "amp_loss_scale", 1)
        with self.expect(WRONG if owner.stepped else legality) as result:
            if owner.scaler:
                owner.scaler.step(trainer, batch_size, ignore_stale_grad)
            elif in_two:
                trainer.allreduce_grads()
                trainer.update(batch_size, ignore_stale_grad)
            else:
                trainer.step(batch_size, ignore_stale_grad)
        if result.raised:
            return
        fresh, skipped = owner.fresh, overflows
        if owner.checks and fresh:
            skipped = not trainer.amp_last_step.stepped
            seen_before = any(weight.hidden for weight in fresh)
            assert skipped == overflows or seen_before, "skipped" if skipped else "not skipped"
        if owner.kind == "scale_loss":
            assert (
                trainer.amp_loss_scale <= old_scale
                if skipped
                else trainer.amp_loss_scale >= old_scale
            )
        for weight in fresh:
            if skipped:
                weight.fresh = False
            else:
                weight.update(self.momentum, batch_size)
            weight.hidden = False
        if owner.kind != "decorate" and owner.checks and not owner.unscaled:
            for weight in owner.weights:
                weight.unscaled = False
        if owner.kind == "scale_loss":
            self.spend(owner, reuse)
        owner.stepped = owner.kind == "GradScaler"
        owner.marked = owner.unscaled = False

    def spend(self, owner, reuse):
        """Note which losses have been used for a step; forget them if the program won't `reuse` them."""
        for loss in self.losses:
            for scaling in loss.scalings:
                scaling.spent = scaling.spent or owner in scaling.owners
        if not reuse:
            self.losses = [one for one in self.losses if not any(s.spent for s in one.scalings)]

    @rule(pick=st.integers(0, 1), reuse=st.booleans())
    @precondition(lambda self: any(owner.scaler for owner in self.owners))
    def update_scaler(self, pick, reuse):
        owners = [one for one in self.owners if one.scaler is self.scalers[pick]]
        if not owners:
            return
        with self.expect(LEGAL if any(one.stepped for one in owners) else WRONG) as result:
            self.scalers[pick].update()
        if not result.raised:
            self.spend(owners[0], reuse)
            for owner in owners:
                owner.stepped = owner.marked = False

    # ------------------------------------------------------------------ files

    @rule(pick=PICK)
    def save_or_load_states(self, pick):
        owner = self.owner(pick)
        if owner.saved is None:
            file = os.path.join(self.folder.name, str(next(self.numbers)))
            owner.trainer.save_states(file)
            owner.saved = file, [weight.velocity for weight in owner.weights]
        elif not owner.marked and not owner.stepped:
            file, velocities = owner.saved
            owner.trainer.load_states(file)
            owner.saved = None
            for weight, velocity in zip(owner.weights, velocities):
                weight.velocity = velocity

    # ------------------------------------------------------------------ the comparison

    @invariant()
    def as_in_the_reference(self):
        for weight in self.weights:
            found = weight.parameter.data().asnumpy()
            np.testing.assert_allclose(found, weight.value, rtol=1e-5, atol=1e-6)
            weight.value = found.astype("float64")  # rounding errors don't add up
            if weight.fresh and weight.unscaled and not weight.frozen:
                found = weight.parameter.grad().asnumpy()
                np.testing.assert_allclose(found, weight.gradient, rtol=1e-5)


def total(*losses):
    """Return the gradient of a sum of losses."""
    result = {}
    for loss in losses:
        for weight, factor in loss.gradient.items():
            result[weight] = result.get(weight, np.zeros(2)) + factor
    return result


class Modules(RuleBasedStateMachine):
    """Programs of the Module API, whose modules share one loss scale."""

    @initialize(
        mode=st.sampled_from(["", "init", "automatic"]),
        named=st.booleans(),
        scale=st.sampled_from([1.0, 2.0, 8.0, 1024.0]),
        grows=st.sampled_from([1, 2, 2000]),
        momentum=st.sampled_from([0.0, MOMENTUM]),
        count=st.integers(1, 2),
    )
    def start(self, mode, named, scale, grows, momentum, count):
        if mode == "init":
            amp.init(policy=FLOAT32)
        elif mode == "automatic":
            automatic.start(policy=FLOAT32)
        self.momentum, self.scaling, self.skips = momentum, None, 0
        options = {"learning_rate": RATE, "momentum": momentum}
        optimizer = "sgd" if named else mx.optimizer.SGD(**options, rescale_grad=0.5)
        if mode != "automatic":
            optimizer = amp.decorate(optimizer, scale, grows)
            self.scaling = optimizer.scaling
        data, weight = mx.sym.var("data"), mx.sym.var("weight", shape=(1, 2), init=mx.init.One())
        loss = mx.sym.MakeLoss(mx.sym.broadcast_mul(data, weight))
        self.modules = []
        for _ in range(count):
            module = mx.mod.Module(loss, label_names=None)
            module.bind([("data", (2, 2))])
            module.init_params()
            module.init_optimizer(optimizer=optimizer, optimizer_params=options if named else ())
            one = SimpleNamespace(module=module, weight=Weight(None, np.ones((1, 2))), factor=None)
            one.weight.velocity = np.zeros((1, 2))
            self.modules.append(one)

    @rule(pick=st.integers(0, 1), factor=st.sampled_from([1, 2, 3, np.inf]), backward=st.booleans())
    def forward(self, pick, factor, backward):
        one = self.modules[pick % len(self.modules)]
        one.factor = factor
        one.module.forward(mx.io.DataBatch([nd.full((2, 2), factor)]), is_train=True)
        if backward:
            self.backward(pick=pick)

    @rule(pick=st.integers(0, 1))
    def backward(self, pick):
        one = self.modules[pick % len(self.modules)]
        if one.factor is not None:
            one.module.backward()
            one.weight.gradient, one.weight.fresh = np.full((1, 2), 2.0 * one.factor), True
            one.factor = None

    @rule(pick=st.integers(0, 1))
    def update(self, pick):
        one = self.modules[pick % len(self.modules)]
        if not one.weight.fresh:
            return
        one.module.update()
        if one.weight.finite:
            one.weight.update(self.momentum, batch_size=2)
        else:
            one.weight.fresh = False
            self.skips += 1

    @invariant()
    def as_in_the_reference(self):
        for one in self.modules:
            found = one.module.get_params()[0]["weight"].asnumpy()
            np.testing.assert_allclose(found, one.weight.value, rtol=1e-5, atol=1e-6)
            one.weight.value = found.astype("float64")
        assert self.scaling is None or self.scaling.skips == self.skips

    def teardown(self):
        amp.shutdown()


def run_machine(machine, examples, **options):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            phases=[Phase.generate, Phase.shrink],
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


# Its generator of random numbers is looked for among objects, some of which conftest has frozen.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random`")


@pytest.mark.parametrize("machine, examples", [(Programs, 20), (Modules, 20)])
def test_some_programs(machine, examples):
    run_machine(machine, examples, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("machine, examples", [(Programs, 300), (Modules, 100)])
def test_many_programs(machine, examples):
    examples = int(os.environ.get("MXAMP_EXAMPLES", examples))
    if "MXAMP_SEED" in os.environ:
        run_machine(seed(int(os.environ["MXAMP_SEED"]))(machine), examples)
    else:
        run_machine(machine, examples, derandomize=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and calls a function of glibc")
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
def test_losses_that_are_scaled_and_never_used_are_let_go(way):
    """Validation losses, of 1 MB each with what their backward passes would need."""
    weight = gluon.Parameter("weight", shape=(2**18,), init=mx.init.One())
    weight.initialize()
    trainer, scaler = gluon.Trainer([weight], "sgd"), amp.GradScaler()
    amp.init_trainer(trainer, amp.LossScaler())

    def resident():
        mx.nd.waitall()
        ctypes.CDLL(None).malloc_trim(0)  # returns the memory that earlier tests have freed
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    before = resident()
    for _ in range(600):
        with autograd.record():
            loss = weight.data().square().square().sum()
            if way == "GradScaler":
                scaler.scale(loss)
            else:
                with amp.scale_loss(loss, trainer):
                    pass
    assert resident() - before < 100
