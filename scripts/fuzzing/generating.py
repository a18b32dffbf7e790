"""Generate random programs."""

import random
from typing import Any, Dict, List

from .operators import Builder, Shape, grow
from .programs import Program, Step, pruned

__all__ = ["random_program"]

WAYS = "block", "block", "block", "bind", "simple_bind", "module", "bucketing", "trainer"
NUMPY_SHARE = 0.25

#: Shapes of data: images, sequences, rows. Some are large enough for the substitutions of long sums
#: and broadcasts.
SHAPES = (
    (2, 4, 6, 6), (2, 3, 8, 8), (2, 16, 6, 6), (4, 1, 8, 8), (2, 32, 4, 4), (2, 64, 5, 5),
    (6, 8), (8, 32), (64, 32), (8, 600), (2, 5, 16), (4, 6, 48), (8, 32, 16), (16, 64, 48),
)  # fmt: skip


def random_program(number: int) -> Program:
    """Return a random program; the same one for the same number."""
    chance = random.Random(number)
    way = chance.choice(WAYS)
    policy = chance.choice(("float32", "float32", "bfloat16", "float16"))
    numpy = way in ("block", "trainer") and chance.random() < NUMPY_SHARE
    shape = chance.choice(SHAPES)
    g = Builder(chance, numpy, shape)
    wanted = chance.randint(1, 9)
    for _ in range(3 * wanted):
        if len(g.nodes) < wanted:
            grow(g)
    heads = [g.values[-1][0]]
    heads += [ref for ref, _ in g.values[1:-1] if g.rarely(8)]
    special: Dict[str, str] = {}
    if policy == "float32" and way != "trainer" and g.rarely(12):
        special = {g.pick("data", "head"): g.pick("nan", "inf")}
    steps = _STEPS[way](g, shape, policy)
    front = g.pick("autocast", "autocast", "init")
    inside = "enabled=False" if policy != "float32" and g.rarely(12) else None
    network = numpy, g.params, g.nodes, heads
    return pruned(Program(way, policy, front, *network, steps, 0, special, inside))


def _other_shape(g: Builder, shape: Shape) -> Shape:
    """Return a shape with another batch size or larger images, or the same one."""
    kind = g.pick("same", "batch", "size", "batch", "empty")
    if kind == "batch":
        return (g.pick(1, 3, 7), *shape[1:])
    if kind == "size" and len(shape) > 2:
        return (*shape[:2], *(size + g.pick(1, 4) for size in shape[2:]))
    if kind == "empty" and g.rarely(3):
        return (0, *shape[1:])
    return shape


def _block(g: Builder, shape: Shape, policy: str) -> List[Step]:
    """Return random calls of a block, with changes of it between them."""
    train = g.flag()
    first: List[Step] = []
    flags: Dict[str, Any] = {}
    if not g.rarely(5):
        flags = g.pick({}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True})
        first = [Step("hybridize", {**flags})]
    steps = [*first, Step("call", {"shape": shape, "train": train})]
    converted = False
    while g.rarely(2) and len(steps) < 7:
        kind = g.pick("shape", "mode", "set_data", "hybridize", "grad_req", "off", "policy",
                      "cast", "export", "convert")  # fmt: skip
        if kind == "set_data" and not converted:
            steps.append(Step(kind, {"seed": g.pick(1, 2)}))
        elif kind == "hybridize":
            steps.append(Step(kind, {"static_alloc": g.flag(), "active": not g.rarely(3)}))
        elif kind == "grad_req" and not converted:
            steps.append(Step(kind, {"pattern": g.pick(".*", ".*weight.*", ".*bias.*|.*beta.*"),
                                     "req": g.pick("null", "add", "write")}))  # fmt: skip
        elif kind == "cast" and not converted:
            steps.append(Step(kind))
        elif kind == "export" and first and not converted:
            steps.append(Step(kind, {"policy": None}))
            steps.append(Step("hybridize"))
        elif kind == "convert" and first and not converted and policy != "float16":
            options = g.pick({}, {"cast_optional_params": True}, {} if g.numpy else {"fuse": True})
            steps.append(Step(kind, {"shape": shape, "policy": None, **options}))
            train, converted = train and not options, True
        now = {"shape": _other_shape(g, shape) if kind == "shape" else shape}
        now["train"] = g.flag() if kind == "mode" and not converted else train
        if kind == "off" or converted:
            now["policy"] = None
        elif kind == "policy" and policy != "float32":
            now["policy"] = g.pick("float32", "bfloat16", "float16")
        steps.append(Step("call", now))
    return steps


def _trainer(g: Builder, shape: Shape, policy: str) -> List[Step]:
    """Return one to three random steps of a trainer."""
    optimizer = g.pick("sgd", "adam")
    kind = g.pick("init_trainer", "decorate")
    steps = [Step(kind, {"shape": shape, "optimizer": optimizer})]
    if g.flag():
        steps.append(Step("hybridize", {"static_alloc": g.flag()}))
    for _ in range(g.pick(1, 2, 3)):
        now = _other_shape(g, shape) if g.rarely(4) else shape
        steps.append(Step("train", {"shape": now, "overflow": g.rarely(5)}))
        if g.rarely(5):
            steps.append(
                Step("grad_req", {"pattern": ".*weight.*", "req": g.pick("write", "null")})
            )
    return steps


def _executor(g: Builder, shape: Shape, policy: str) -> List[Step]:
    """Return random runs of an executor, of a converted symbol at times, and reshapes."""
    train = g.flag()
    first: Dict[str, Any] = {"shape": shape, "train": train}
    if not g.rarely(3):
        bound: Dict[str, Any] = {}
    else:
        fuse = {} if policy == "float16" else {"fuse": True}
        options = g.pick({}, {"cast_optional_params": True}, fuse)
        train = train and not options
        bound = {"policy": None}
        first = {"shape": shape, "train": train, "convert": options}
    steps = [Step("bind", {**first, **bound}), Step("execute", {**first, **bound})]
    for _ in range(g.pick(0, 0, 1, 2)):
        now = _other_shape(g, shape)
        steps.append(Step("reshape", {"shape": now, **bound}))
        steps.append(Step("execute", {"shape": now, "train": train, **bound}))
    return steps


def _module(g: Builder, shape: Shape, policy: str) -> List[Step]:
    """Return random runs of a module: those of an executor without reshapes."""
    return [step for step in _executor(g, shape, policy) if step.kind != "reshape"]


_STEPS = {
    "block": _block, "trainer": _trainer, "bind": _executor, "simple_bind": _executor,
    "module": _module, "bucketing": _module,
}  # fmt: skip
