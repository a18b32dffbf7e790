"""Random programs with scaled losses, held to a NumPy reference that knows the true gradients.

Every loss is linear in the weights, so the reference knows its gradient without autograd. After
each call the weights equal the reference's, and so do the fresh gradients that carry no scale.
A call is legal, wrong (it must raise `StateError`) or doubtful (it raises `StateError`, or the
weights are right in the end):

| call | wrong | doubtful |
|---|---|---|
| `backward` | | heads of several scales, or scaled beside unscaled heads; a loss scaled before its trainer's last `step`, or its GradScaler's last `update`; gradients of a trainer after `unscale`; an error has ended its `scale_loss` |
| `unscale`, clip | without a scaled loss; after `unscale`; with a GradScaler, after `step` | a foreign gradient; a loss used again; a copied GradScaler that scaled no loss |
| `step` | twice before a GradScaler's `update` | the same |
| `update` | before any `step` or `unscale` | |

A loss is used again after its trainer's `step` or `unscale`. A gradient is foreign if the pass that wrote it was doubtful, or scaled without this trainer. A call
that raises changes nothing; the program then drops the losses of the failed pass. Three programs
are not generated: the sum of a scaled and an unscaled loss, a step of GradScaler without any scaled
loss (the docs call both mistakes), and an update that would ruin float32 weights too.

To run 400 other programs of 50 calls:

    MXAMP_EXAMPLES=400 MXAMP_SEED=3 scripts/test tests/scaling/test_state_machine.py::test_many_programs
"""

import copy
import ctypes
import itertools
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
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
from helpers import initialized, parallel, shut_down
from models import module_of
from mxamp.frontends import automatic
from training import OwnOptimizer, run_backward

RATE = 2.0**-6
#: A float16 policy under which the operators of these programs run in float32.
POLICY = amp.Policy.default("float16", "cpu").override(fp32=["FullyConnected"])
#: By action and stage of the trainer.
WRONG = {("step", "stepped"), *(("unscale", stage) for stage in ("none", "unscaled", "stepped"))}
RAISED = object()


def attempt(legality, function, *args):
    """Return the result of a call, or `RAISED`; fail if a legal call raises or a wrong one works."""
    try:
        result = function(*args)
    except amp.StateError:
        if legality == "legal":
            raise
        return RAISED
    assert legality != "wrong", "no StateError"
    return result


# ------------------------------------------------------------------------------- the reference


@dataclass(eq=False)
class Weight:
    """A parameter in plain MXNet; `gradient` is the true gradient, without a scale."""

    parameter: gluon.Parameter
    value: Any
    gradient: Any = 0.0
    velocity: Any = 0.0
    fresh: bool = False
    unscaled: bool = True  #: MXNet's array holds the true gradient
    scaled_once: bool = False  #: a scaled loss wrote the gradient, perhaps with a scale of 1
    foreign: bool = False
    overflowed: bool = False  #: `unscale` or `decorate` saw an overflow; it may be gone since

    @property
    def frozen(self):
        return self.parameter.grad_req == "null"

    @property
    def finite(self):
        return np.isfinite(self.gradient).all()

    def receive(self, gradient, adds):
        with np.errstate(invalid="ignore"):  # inf - inf
            self.gradient, self.fresh = gradient + (self.gradient if adds else 0.0), True

    def update(self, momentum, batch_size, rescales=True):
        rate = RATE / batch_size if rescales else RATE
        self.velocity = momentum * self.velocity - rate * self.gradient
        self.value = self.value + self.velocity

    def compare(self, value):
        np.testing.assert_allclose(value, self.value, rtol=1e-5, atol=1e-5)
        self.value = value.astype("float64")  # rounding errors must not add up


@dataclass(eq=False)
class Owner:
    """A net and its trainer."""

    kind: str  #: of loss scaling: "scale_loss", "GradScaler", "decorate" or "none"
    net: gluon.Block
    trainer: gluon.Trainer
    weights: List[Weight]
    scaler: Optional[amp.GradScaler] = None
    stage: str = "none"  #: or "scaled", "unscaled", "stepped", as in docs/loss-scaling.md
    used_again: bool = False  #: a loss that was scaled before the last step or `unscale`
    copied: bool = False  #: another GradScaler scaled its earlier losses
    saved: Any = None  #: file and velocities
    rescales: bool = True  #: its optimizer multiplies gradients by `rescale_grad`

    @property
    def fresh(self):
        return [weight for weight in self.weights if weight.fresh and not weight.frozen]

    @property
    def checks_overflow(self):
        return self.kind in ("decorate", "GradScaler") or self.stage != "none"

    @property
    def forgot_to_scale(self):
        """Whether only plain losses come before a call of GradScaler, which warns of it."""
        scaled = self.stage != "none" or any(weight.scaled_once for weight in self.fresh)
        return self.kind == "GradScaler" and not scaled

    def legality(self, action):
        foreign = any(weight.foreign for weight in self.fresh)
        foreign |= self.copied and self.stage == "none"
        if self.stage != "stepped" and (foreign or self.used_again):
            return "doubtful"
        if (action, self.stage) in WRONG and (self.kind, self.stage) != ("GradScaler", "none"):
            return "wrong"
        return "legal"


@dataclass(eq=False)
class Scaling:
    """One `scale_loss` or `GradScaler.scale`."""

    scale: float
    owners: List[Owner]
    spent: bool = False  #: by a step, `unscale` or `update`, or ended by an error


@dataclass(eq=False)
class Loss:
    """A head for backward passes."""

    array: Any
    gradient: Dict[Weight, float]
    graphs: Set[int]  #: of the losses that it is made of
    scalings: List[Scaling] = field(default_factory=list)


def total(losses):
    """Return the gradient of a sum of losses."""
    weights = {weight for loss in losses for weight in loss.gradient}
    return {weight: sum(loss.gradient.get(weight, 0.0) for loss in losses) for weight in weights}


# ----------------------------------------------------------------------------------- programs


class Net(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            for name in "ab":
                self.params.get(name, shape=(2,), init=mx.init.One())


def neighbor(scale):
    """Return a function that takes three steps of a net of its own, beside those of the program."""
    param = initialized(gluon.Parameter("neighbor", shape=(2,), init="ones", grad_req="add"))
    trainer = gluon.Trainer([param], "sgd", {"learning_rate": RATE}, kvstore=None)
    if scale:
        amp.init_trainer(trainer, amp.StaticLossScaler(scale))

    def train():
        expected = param.data().asnumpy() - 3 * 2 * RATE
        for _ in range(3):
            way = "scale_loss" if scale else "plain"
            run_backward(lambda: (param.data() * 2).sum(), trainer, way)
            trainer.step(1)
            param.zero_grad()
        np.testing.assert_allclose(param.data().asnumpy(), expected, rtol=1e-6)

    return train


def build_trainer(kind, net, scale, interval, momentum, rescales=True):
    """Return a trainer; `interval` is None for a constant scale."""
    optimizer = (mx.optimizer.SGD if rescales else OwnOptimizer)(learning_rate=RATE)
    optimizer.momentum = momentum
    if kind == "decorate":
        dynamic = {"use_dynamic_loss_scaling": bool(interval)}
        optimizer = amp.decorate(optimizer, scale, interval or 2000, **dynamic)
    trainer = gluon.Trainer(net.collect_params(), optimizer)
    if kind == "scale_loss":
        dynamic = amp.LossScaler(scale, growth_interval=interval or 2000)
        amp.init_trainer(trainer, dynamic if interval else amp.StaticLossScaler(scale))
    return trainer


KINDS = st.sampled_from(["scale_loss", "GradScaler", "GradScaler", "decorate", "none"])
MODES = st.sampled_from(["", "", "", "init", "initialize", "automatic"])
SCALES = st.sampled_from([1.0, 2.0, 8.0, 1024.0, 65536.0])
INTERVALS = st.sampled_from([None, 1, 2])
#: Gradients by net and parameter.
PARAMETERS = st.tuples(st.integers(0, 2), st.integers(0, 1))
VALUES = st.sampled_from([1.0, 2.0, -1.0, 3.0])
FINITE = st.dictionaries(PARAMETERS, VALUES, min_size=1, max_size=6)
#: One of them overflows in some losses, and all in others.
GRADIENTS = FINITE.flatmap(
    lambda finite: st.sampled_from([0, 0, 0, 1, 6]).map(
        lambda count: {**finite, **dict.fromkeys([*finite][:count], np.inf)}
    )
)
#: Factors in the network, which may equal a loss scale.
CONSTANTS = st.sampled_from([1, 1, 1, 2, 8])
USES = st.sampled_from(["inside", "inside", "outside", "later", "later", "error"])
REQUESTS = st.sampled_from(["add", "add", "write", "null"])
PICK, FLAG = st.integers(0, 11), st.booleans()


class Programs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.owners, self.losses, self.numbers = [], [], itertools.count()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(
        owners=st.lists(st.tuples(KINDS, SCALES, FLAG, FLAG), min_size=1, max_size=3),
        mode=MODES,
        scales=st.tuples(SCALES, SCALES),
        interval=INTERVALS,
        momentum=st.sampled_from([0.0, 0.5]),
        beside=st.sampled_from([None, 1.0, 32.0]),
    )
    def start(self, owners, mode, scales, interval, momentum, beside):
        self.momentum = momentum
        if mode == "init":
            amp.init(policy=POLICY)
        elif mode == "automatic":
            automatic.start(policy=POLICY)
        scalers = [amp.GradScaler(scale, growth_interval=interval or 2000) for scale in scales]
        self.neighbor = neighbor(None if mode in ("automatic", "initialize") else beside)
        for kind, scale, rescales, other in owners:
            kind = kind if mode in ("", "init") else mode
            net = initialized(Net())
            weights = [Weight(one, np.ones(2)) for one in net.collect_params().values()]
            trainer = build_trainer(kind, net, scale, interval, momentum, rescales)
            kind = {"initialize": "scale_loss", "automatic": "decorate"}.get(kind, kind)
            scaler = scalers[other] if kind == "GradScaler" else None
            self.owners.append(Owner(kind, net, trainer, weights, scaler, rescales=rescales))
        if mode == "initialize":
            nets, trainers = zip(*((one.net, one.trainer) for one in self.owners))
            level, scale = {None: ("O0", 1.0), 1: ("O1", "dynamic"), 2: ("O1", scales[0])}[interval]
            amp.initialize([*nets], [*trainers], opt_level=level, loss_scale=scale, ctx=mx.cpu())

    def teardown(self):
        shut_down()
        self.folder.cleanup()

    @invariant()
    def equals_the_reference(self):
        for weight in (weight for owner in self.owners for weight in owner.weights):
            weight.compare(weight.parameter.data().asnumpy())
            if weight.fresh and weight.unscaled and not weight.frozen:
                found = weight.parameter.grad().asnumpy()
                np.testing.assert_allclose(found, weight.gradient, rtol=1e-5, atol=1e-4)

    def owner(self, pick):
        return self.owners[pick % len(self.owners)]

    # ------------------------------------------------------------------------------- losses

    @rule(gradients=GRADIENTS, constant=CONSTANTS, way=PICK, use=USES, retain=FLAG)
    def new_loss(self, gradients, constant, way, use, retain):
        """Record a loss; leave it unscaled or scale it; call backward on it now or later."""
        gradient = {self.owner(i).weights[j]: value for (i, j), value in gradients.items()}
        gradient = {weight: value for weight, value in gradient.items() if not weight.frozen}
        if not gradient:
            return
        with autograd.record():
            array = nd.ones(1)  # so that the loss is `constant`, whatever the weights
            for weight, value in gradient.items():
                zero = weight.parameter.data() - weight.parameter.data().detach()
                # The square root of zero is finite, and its gradient is not.
                array = array + (zero * nd.full(2, value) if value < np.inf else zero.sqrt()).sum()
            array = array * constant if constant != 1 else array
        gradient = {weight: value * constant for weight, value in gradient.items()}
        loss = Loss(array, gradient, {next(self.numbers)})
        self.keep(loss)
        ways = self.ways_to_scale()
        if way % (len(ways) + 1):
            self.scale(loss, ways[way % (len(ways) + 1) - 1], use, retain)
        elif use != "later":
            self.run([loss], retain)

    @rule(pick=PICK, way=PICK, use=USES, retain=FLAG)
    @precondition(lambda self: any(not loss.scalings for loss in self.losses))
    def scale_older_loss(self, pick, way, use, retain):
        """Scale an older loss, which may have been used unscaled or scaled for another trainer."""
        unscaled, ways = [one for one in self.losses if not one.scalings], self.ways_to_scale()
        if ways:
            self.scale(unscaled[pick % len(unscaled)], ways[way % len(ways)], use, retain)

    def ways_to_scale(self):
        """Return the arguments of `scale`: lists of trainers' owners, and each GradScaler."""
        explicit = [one for one in self.owners if one.kind == "scale_loss"]
        lists = [list(c) for n in (1, 2, 3) for c in itertools.combinations(explicit, n)]
        return [*lists, *dict.fromkeys(one.scaler for one in self.owners if one.scaler)]

    def scale(self, loss, way, use, retain):
        if isinstance(way, amp.GradScaler):
            owners = [one for one in self.owners if one.scaler is way]
            with autograd.record():
                scaled = self.keep_scaled(loss, way.scale(loss.array), owners)
        else:
            scaled = self.scale_for_trainers(loss, way, use, retain)
            owners = [] if use == "error" else way
            use = "later" if use != "outside" else use
        for one in owners:
            # Another `scale_loss` drops unscaled gradients.
            one.stage = "scaled" if one.stage == "none" or not one.scaler else one.stage
        if use != "later":
            self.run([scaled], retain)

    def scale_for_trainers(self, loss, owners, use, retain):
        try:
            with autograd.record(), amp.scale_loss(
                loss.array, [o.trainer for o in owners]
            ) as array:
                scaled = self.keep_scaled(loss, array, owners)
                scaled.scalings[0].spent = use == "error"
                if use in ("inside", "error"):
                    self.run([scaled], retain)
                if use == "error":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        return scaled

    def keep_scaled(self, loss, array, owners):
        scale = (array / loss.array).asscalar()
        return self.keep(Loss(array, loss.gradient, loss.graphs, [Scaling(scale, owners)]))

    def keep(self, loss):
        self.losses = [*self.losses, loss][-8:]
        return loss

    @rule(one=PICK, other=PICK, now=FLAG, retain=FLAG)
    @precondition(lambda self: self.losses)
    def add_losses(self, one, other, now, retain):
        one = self.losses[one % len(self.losses)]
        alike = [loss for loss in self.losses if bool(loss.scalings) == bool(one.scalings)]
        other = alike[other % len(alike)]
        with autograd.record():
            array = one.array + other.array
        scalings, graphs = one.scalings + other.scalings, one.graphs | other.graphs
        loss = self.keep(Loss(array, total([one, other]), graphs, scalings))
        if now:
            self.run([loss], retain)

    @rule(pick=PICK, factor=st.sampled_from([1.0, 2.0, 0.5]), now=FLAG, retain=FLAG)
    @precondition(lambda self: self.losses)
    def compute_head(self, pick, factor, now, retain):
        """Use a mean of a multiple of a loss, scaled or not, as a head."""
        loss = self.losses[pick % len(self.losses)]
        with autograd.record():
            array = (loss.array * nd.array([factor])).mean().reshape((1,))
        gradient = {weight: value * factor for weight, value in loss.gradient.items()}
        head = self.keep(Loss(array, gradient, loss.graphs, loss.scalings))
        if now:
            self.run([head], retain)

    # ----------------------------------------------------------------------- backward passes

    @rule(picks=st.lists(PICK, min_size=1, max_size=2), retain=FLAG)
    @precondition(lambda self: self.losses)
    def backward(self, picks, retain):
        self.run([self.losses[pick % len(self.losses)] for pick in picks], retain)

    def run(self, losses, retain):
        """Call backward on losses, and update the reference."""
        # With a scale of 1 the scaled loss is the loss itself.
        losses = [*{id(loss.array): loss for loss in losses}.values()]
        scalings = [one for loss in losses for one in loss.scalings]
        scales = {one.scale for one in scalings} | {1.0 for loss in losses if not loss.scalings}
        is_scaled, gradients = scales != {1.0}, total(losses)
        touched = {
            weight: one for one in self.owners for weight in one.weights if weight in gradients
        }
        spent = any(one.spent and one.scale != 1 for one in scalings)
        late = is_scaled and any(one.stage == "unscaled" for one in touched.values())
        doubtful = spent or late or len(scales) > 1
        heads = [loss.array for loss in losses]
        call = [heads[0].backward] if len(heads) == 1 else [autograd.backward, heads]
        raised = attempt("doubtful" if doubtful else "legal", *call, None, retain) is RAISED
        if raised or not retain:
            graphs = set().union(*(loss.graphs for loss in losses))
            self.losses = [loss for loss in self.losses if not loss.graphs & graphs]
        for owner in () if raised else self.owners:
            again = owner.stage in ("none", "unscaled")
            owner.used_again |= again and any(owner in one.owners for one in scalings)
        for weight, owner in () if raised else touched.items():
            adds = weight.parameter.grad_req == "add"
            weight.overflowed &= not adds or np.any(weight.gradient)  # 0 begins a new sum
            owned = all(owner in one.owners for one in scalings)
            weight.receive(gradients[weight], adds)
            weight.foreign = (is_scaled and (doubtful or not owned)) or (adds and weight.foreign)
            weight.scaled_once = bool(scalings) or (adds and weight.scaled_once)
            weight.unscaled = not is_scaled and (not adds or weight.unscaled)
            if owner.kind == "decorate":
                weight.overflowed = adds and (weight.overflowed or not weight.finite)

    # ----------------------------------------------------------------------------- gradients

    @rule(pick=PICK)
    def zero_grad(self, pick):
        owner = self.owner(pick)
        owner.net.collect_params().zero_grad()
        for weight in owner.weights:
            if owner.kind == "decorate" or owner.stage == "unscaled":  # also before a `shutdown`
                weight.overflowed |= weight.fresh and not weight.finite
            weight.gradient = np.zeros(2)

    @rule(pick=PICK, which=st.integers(0, 1), request=REQUESTS)
    def set_grad_req(self, pick, which, request):
        """Change `grad_req`, after which MXNet has a new gradient of zero, which is not fresh."""
        weight = self.owner(pick).weights[which]
        if weight.parameter.grad_req != request:
            weight.parameter.grad_req = request
            weight.gradient, weight.unscaled = np.zeros(2), True
            weight.fresh = weight.foreign = weight.scaled_once = weight.overflowed = False
            self.losses = [loss for loss in self.losses if weight not in loss.gradient]

    @rule(pick=PICK, limit=st.sampled_from([None, None, 1.0, 16.0]))
    def unscale(self, pick, limit):
        """Unscale the gradients of a trainer; with a limit, clip them."""
        owner = self.owner(pick)
        if owner.kind in ("decorate", "none") or owner.forgot_to_scale:
            return
        call = [amp.unscale, owner.trainer]
        if owner.scaler:
            call = [owner.scaler.unscale_, owner.trainer]
        elif limit:
            call = [amp.clip_grad_global_norm, owner.trainer, limit]
        norm = attempt(owner.legality("unscale"), *call)
        if norm is RAISED:
            return
        owner.stage, owner.used_again = "unscaled", False
        if norm is not None:
            self.clip(owner.fresh, limit, norm)
        for weight in owner.weights:
            weight.unscaled, weight.foreign = True, False
            weight.overflowed = weight.fresh and not weight.finite
        if owner.scaler and limit:
            self.clip_unscaled(pick=pick, limit=limit, everywhere=False)

    @rule(pick=PICK, limit=st.sampled_from([1.0, 16.0]), everywhere=FLAG)
    def clip_unscaled(self, pick, limit, everywhere):
        """Clip the gradients of one or all trainers, stale ones included, in plain MXNet."""
        owners = self.owners if everywhere else [self.owner(pick)]
        weights = [weight for one in owners for weight in one.weights if not weight.frozen]
        if weights and all(weight.unscaled and weight.finite for weight in weights):
            gradients = [weight.parameter.grad() for weight in weights]
            self.clip(weights, limit, gluon.utils.clip_global_norm(gradients, limit))

    def clip(self, weights, limit, norm):
        expected = np.sqrt(sum(np.sum(weight.gradient**2 * np.ones(2)) for weight in weights))
        np.testing.assert_allclose(norm, expected, rtol=1e-5, atol=1e-4)
        if np.isfinite(norm) and norm > limit:
            for weight in weights:
                weight.gradient = weight.gradient * (limit / expected)

    # --------------------------------------------------------------------------------- steps

    @rule(pick=PICK, batch_size=st.integers(1, 2), ignore=FLAG, in_two=FLAG, reuse=FLAG)
    def step(self, pick, batch_size, ignore, in_two, reuse):
        """Take a step; with `reuse`, the program may use its scaled losses again."""
        owner = self.owner(pick)
        trainer, fresh = owner.trainer, owner.fresh
        overflows = not all(weight.finite for weight in fresh)
        if owner.forgot_to_scale or (overflows and not owner.checks_overflow):
            return
        ignore = ignore or len(fresh) < sum(not weight.frozen for weight in owner.weights)

        def call():
            if owner.scaler:
                owner.scaler.step(trainer, batch_size, ignore)
            elif in_two:
                trainer.allreduce_grads()
                trainer.update(batch_size, ignore)
            else:
                trainer.step(batch_size, ignore)

        if attempt(owner.legality("step"), call) is RAISED:
            return
        skipped = overflows
        if owner.checks_overflow and fresh:
            skipped = not trainer.amp_last_step.stepped
            assert skipped == overflows or any(weight.overflowed for weight in fresh)
        for weight in fresh:
            if not skipped:
                weight.update(self.momentum, batch_size, owner.rescales)
            weight.fresh = weight.overflowed = False
        if owner.stage != "unscaled" and owner.kind != "decorate":
            for weight in owner.weights:
                weight.unscaled = False  # the update may have divided by the scale
        owner.stage, owner.used_again = "stepped" if owner.scaler else "none", False
        if owner.kind == "scale_loss":
            self.spend(owner, reuse)

    def spend(self, owner, reuse):
        for scaling in (one for loss in self.losses for one in loss.scalings):
            scaling.spent |= owner in scaling.owners
        if not reuse:
            self.losses = [one for one in self.losses if not any(s.spent for s in one.scalings)]

    @rule(pick=PICK, reuse=FLAG)
    def update_grad_scaler(self, pick, reuse):
        scaler = self.owner(pick).scaler
        owners = [one for one in self.owners if scaler and one.scaler is scaler]
        checked = any(one.stage in ("stepped", "unscaled") for one in owners)
        legality = "legal" if checked else "wrong"
        if owners and attempt(legality, scaler.update) is not RAISED:
            self.spend(owners[0], reuse)
            for one in owners:
                one.stage = "none"

    @rule(pick=PICK)
    def copy_grad_scaler(self, pick):
        scaler = self.owner(pick).scaler
        owners = [one for one in self.owners if scaler and one.scaler is scaler]
        if owners and all(one.stage == "none" for one in owners):
            owners[0].scaler, owners[0].copied = copy.deepcopy(scaler), True

    @rule(chance=st.integers(0, 3), again=FLAG)
    def shut_down(self, chance, again):
        """Shut down, after which no trainer is decorated; losses and gradients keep their scale."""
        if chance:
            return
        amp.shutdown()
        if again:
            amp.init(policy=POLICY)
        for owner in self.owners:
            if owner.kind == "decorate":
                owner.kind, owner.stage = "none", "unscaled" if owner.fresh else "none"

    @rule(gradients=GRADIENTS, way=PICK, pick=PICK)
    def train(self, gradients, way, pick):
        self.new_loss(gradients=gradients, constant=1, way=way, use="inside", retain=False)
        self.step(pick=pick, batch_size=1, ignore=False, in_two=False, reuse=False)
        self.update_grad_scaler(pick=pick, reuse=False)

    @rule(gradients=FINITE, way=PICK, pick=PICK)
    def train_beside_a_thread(self, gradients, way, pick):
        with parallel(self.neighbor):
            self.train(gradients=gradients, way=way, pick=pick)

    @rule(pick=PICK)
    def save_or_load_states(self, pick):
        owner = self.owner(pick)
        if owner.saved is None:
            file = os.path.join(self.folder.name, str(next(self.numbers)))
            owner.trainer.save_states(file)
            owner.saved = file, [weight.velocity for weight in owner.weights]
        elif owner.stage == "none":
            file, velocities = owner.saved
            owner.trainer.load_states(file)
            owner.saved = None
            for weight, velocity in zip(owner.weights, velocities):
                weight.velocity = velocity


class Modules(RuleBasedStateMachine):
    """Programs of one or two modules that share a loss scale."""

    @initialize(
        mode=st.sampled_from(["", "init", "automatic"]),
        named=FLAG,
        scale=SCALES,
        interval=INTERVALS,
        momentum=st.sampled_from([0.0, 0.5]),
        count=st.integers(1, 2),
    )
    def start(self, mode, named, scale, interval, momentum, count):
        if mode == "init":
            amp.init(policy=POLICY)
        elif mode == "automatic":
            automatic.start(policy=POLICY)
        self.momentum, self.skips = momentum, 0
        options = {"learning_rate": RATE, "momentum": momentum, "rescale_grad": 1.0}
        optimizer = "sgd" if named else mx.optimizer.SGD(**options)
        if mode != "automatic":
            optimizer = amp.decorate(optimizer, scale, interval or 2000)
        self.scaling = getattr(optimizer, "scaling", None)
        data, weight = mx.sym.var("data"), mx.sym.var("weight", shape=(1, 2), init=mx.init.One())
        loss = mx.sym.MakeLoss(mx.sym.broadcast_mul(data, weight))
        self.modules, self.weights = [], [Weight(None, np.ones((1, 2))) for _ in range(count)]
        self.factors = [None] * count  #: of the forward passes without a backward pass
        for _ in range(count):
            module = module_of(loss, (1, 2))
            module.init_optimizer(optimizer=optimizer, optimizer_params=options if named else ())
            self.modules.append(module)

    @rule(pick=PICK, factor=st.sampled_from([1.0, 2.0, 3.0, np.inf]), and_backward=FLAG)
    def forward(self, pick, factor, and_backward):
        i = pick % len(self.modules)
        self.modules[i].forward(mx.io.DataBatch([nd.full((1, 2), factor)]), is_train=True)
        self.factors[i] = factor
        if and_backward:
            self.backward(pick=pick)

    @rule(pick=PICK)
    def backward(self, pick):
        i = pick % len(self.modules)
        if self.factors[i] is not None:
            self.modules[i].backward()
            dropped = self.weights[i].fresh and not self.weights[i].finite
            self.weights[i].receive(self.factors[i], adds=False)
            self.skips += dropped and not self.weights[i].finite  # by the program
            self.factors[i] = None

    @rule(pick=PICK)
    def update(self, pick):
        module, weight = (of[pick % len(self.modules)] for of in (self.modules, self.weights))
        if weight.fresh:
            module.update()
            self.skips += not weight.finite
            if weight.finite:
                weight.update(self.momentum, batch_size=1)
            weight.fresh = False

    @invariant()
    def equals_the_reference(self):
        for module, weight in zip(self.modules, self.weights):
            weight.compare(module.get_params()[0]["weight"].asnumpy())
        assert self.scaling is None or self.scaling.skips == self.skips

    def teardown(self):
        shut_down()


# -------------------------------------------------------------------------------------- tests


def run_machine(machine, examples, **options):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            phases=[Phase.generate, Phase.shrink],
            database=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


# Hypothesis looks for its generator of random numbers among objects that conftest has frozen.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random`")


@pytest.mark.parametrize("machine", [Programs, Modules])
def test_some_programs(machine):
    run_machine(machine, 20, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("machine, examples", [(Programs, 200), (Modules, 60)])
def test_many_programs(machine, examples):
    examples = int(os.environ.get("MXAMP_EXAMPLES", examples))
    if "MXAMP_SEED" in os.environ:
        run_machine(seed(int(os.environ["MXAMP_SEED"]))(machine), examples)
    else:
        run_machine(machine, examples, derandomize=True)


def resident_megabytes():
    mx.nd.waitall()
    ctypes.CDLL(None).malloc_trim(0)  # or memory that earlier tests have freed would be reused
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and glibc")
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler", "no scaling"])
def test_scaled_losses_without_a_step_are_freed(way):
    """Each of these validation losses has a graph of 1 MB."""
    weight = initialized(gluon.Parameter("weight", shape=(2**18,), init=mx.init.One()))
    trainer, scaler = gluon.Trainer([weight], "sgd"), amp.GradScaler()
    amp.init_trainer(trainer, amp.LossScaler())
    before = resident_megabytes()
    for _ in range(600):
        with autograd.record():
            loss = weight.data().square().square().sum()
        if way == "GradScaler":
            scaler.scale(loss)
        elif way == "scale_loss":
            with amp.scale_loss(loss, trainer):
                pass
    assert resident_megabytes() - before < 100
