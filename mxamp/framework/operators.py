"""MXNet's operator registry: the names, inputs and attributes of each operator.

MXNet 1.9.1 registers 886 operators under 1167 names. Aliases share one handle, so an operator is
identified by its handle or its one canonical name.
"""

import ctypes
import gc
import inspect
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import AbstractSet, Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.base import _LIB, check_call, mx_uint, py_str

from ..errors import UnknownNameError, unknown
from .data import own_tables
from .wording import shown


@dataclass(frozen=True)
class Operator:
    """One operator of MXNet's registry: its names, inputs and attributes.

    `inputs` are the names of its tensors in order; a variadic operator has one name for all.
    `attributes` are the names of its other arguments, `defaults` the printed defaults of optional
    arguments, `choices` the allowed words of enumerations. `mutable_inputs` are the positions of
    the inputs that the operator writes to, `zero_gradients` those of inputs whose gradient is zero
    by definition. The precision of a call may depend on its `decisive_attributes`.
    """

    name: str
    aliases: Tuple[str, ...]
    handle: int
    inputs: Tuple[str, ...]
    attributes: Tuple[str, ...]
    defaults: Mapping[str, str]
    choices: Mapping[str, Tuple[str, ...]]
    variadic: bool
    mutable_inputs: Tuple[int, ...]
    zero_gradients: Sequence[int]
    decisive_attributes: Tuple[str, ...]

    def positions(self, names: Tuple[str, ...], attributes: Mapping[str, str]) -> Tuple[int, ...]:
        """Return the positions of the inputs called `names` in a call with these attributes."""
        inputs = self.inputs
        if self.name == "RNN" and attributes.get("mode", "lstm") != "lstm":
            # Only an LSTM takes a cell state; in other modes the inputs after it move up.
            inputs = tuple(name for name in inputs if name != "state_cell")
        return tuple(inputs.index(name) for name in names if name in inputs)

    def check_argument(self, kind: str, name: str) -> str:
        """Return `name`; raise if the operator has no attribute or input (`kind`) of that name."""
        known = self.attributes if kind == "attribute" else self.inputs
        if name not in known and self.name not in with_trait("calls_python"):
            raise unknown(f"{kind} of {self.name}", name, known)
        return name

    def check_values(self, attribute: str, values: Iterable[Any]) -> Tuple[str, ...]:
        """Return attribute values as text; raise if the operator does not accept one of them."""
        listed, allowed = tuple(map(str, values)), self.choices.get(attribute, ())
        for value in listed:
            if allowed and value not in allowed:
                raise unknown(f"value of {attribute} of {self.name}", value, allowed)
        return listed


@lru_cache(maxsize=None)
def registry() -> Mapping[str, Operator]:
    """Return all operators of the loaded MXNet by canonical name (30 ms, cached)."""
    aliases: Dict[int, List[str]] = {}
    for name in sorted(mx.operator.get_all_registered_operators()):
        aliases.setdefault(handle_of(name), []).append(name)
    operators = (_read_operator(handle, tuple(names)) for handle, names in aliases.items())
    return MappingProxyType({operator.name: operator for operator in operators})


@lru_cache(maxsize=None)
def by_handle() -> Mapping[int, Operator]:
    """Return all operators of the loaded MXNet by their handles in MXNet's C API."""
    return MappingProxyType({operator.handle: operator for operator in registry().values()})


@lru_cache(maxsize=None)
def _by_name() -> Mapping[str, Operator]:
    """Return all operators by canonical name and by alias."""
    return {alias: op for op in registry().values() for alias in (*op.aliases, op.name)}


def _plain_name(name: str) -> str:
    """Simplify a layer's or operator's name, so that different spellings of it match.

    Drops the module, underscores and "2d", and makes it lower case.

    >>> _plain_name("nn.Conv2D"), _plain_name("batch_norm")
    ('conv', 'batchnorm')
    """
    return re.sub("[123]d|_", "", name.rpartition(".")[2].lower())


def resolve(name: str) -> Operator:
    """Return the operator with a name, which may be an alias; raise for an unknown name.

    >>> resolve("concat").name
    'Concat'

    Raises `UnknownNameError` with the closest names.
    """
    try:
        return _by_name()[name]
    except (KeyError, TypeError):
        given = name if isinstance(name, str) else getattr(name, "__name__", shown(name))
    layers = own_tables("operators")["gluon_layers"]
    plain = {**{_plain_name(one): one for one in registry()}, **layers}
    operator = plain.get(_plain_name(given))
    if operator is not None:
        raise UnknownNameError(f"unknown operator {shown(name)}; MXNet calls it {operator!r}")
    raise unknown("operator", given, [one for one in _by_name() if one[:10] != "_backward_"])


@lru_cache(maxsize=None)
def with_trait(trait: str) -> AbstractSet[str]:
    """Return the names of the operators that lists/operators.toml lists under the key `trait`.

    >>> "sin" in with_trait("keeps_sparse"), "cos" in with_trait("keeps_sparse")
    (True, False)
    """
    return dict.fromkeys(own_tables("operators")[trait]).keys()


def handle_of(name: str) -> int:
    """Return the C API handle of the operator with a name, which may be an alias."""
    handle = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return int(handle.value or 0)


def starts_backward(operator_name: str, attributes: Mapping[str, Any]) -> bool:
    """Return whether an operator computes its gradient without head gradients, as losses do.

    >>> starts_backward("SoftmaxOutput", {}), starts_backward("softmax", {})
    (True, False)

    A `Custom` operator does if its class was made with `need_top_grad=False`.
    """
    if operator_name == "Custom":
        return not _custom_properties(attributes)[0]
    if operator_name == "_Native":  # the legacy Python API
        return str(attributes.get("need_top_grad", True)).lower() not in ("1", "true")
    return operator_name in with_trait("starts_backward")


def _read_operator(handle: int, aliases: Tuple[str, ...]) -> Operator:
    """Return the `Operator` for a handle, read through MXNet's C API."""
    strings = ctypes.POINTER(ctypes.c_char_p)
    name, about, key_var, returns = (ctypes.c_char_p() for _ in range(4))
    count, names, types, texts = mx_uint(), strings(), strings(), strings()
    check_call(
        _LIB.MXSymbolGetAtomicSymbolInfo(
            ctypes.c_void_p(handle),
            *map(ctypes.byref, (name, about, count, names, types, texts, key_var, returns)),
        )
    )
    arguments = [(py_str(names[i]), py_str(types[i])) for i in range(count.value)]
    tensors = [arg for arg, what in arguments if "NDArray" in what or "Symbol" in what]
    canonical, traits = py_str(name.value), own_tables("operators")
    zeros: Sequence[int] = traits["zero_gradient_inputs"].get(canonical, ())
    if canonical in with_trait("zero_gradients"):
        zeros = range(sys.maxsize)
    return Operator(
        name=canonical,
        aliases=tuple(alias for alias in aliases if alias != canonical),
        handle=handle,
        inputs=tuple(tensors),
        attributes=tuple(arg for arg, _ in arguments if arg not in tensors),
        # Descriptions: "int, optional, default='1'" and "{'relu', 'tanh'}, required".
        defaults={
            arg: match[1].strip("'")
            for arg, what in arguments
            if (match := re.search(r"default=(.*)$", what))
        },
        choices={
            arg: tuple(word.strip(" '") for word in match[1].split(","))
            for arg, what in arguments
            if (match := re.match(r"\{(.*?)\}", what))
        },
        variadic=bool(py_str(key_var.value)) or any(what.endswith("[]") for _, what in arguments),
        mutable_inputs=tuple(traits["mutable_inputs"].get(canonical, ())),
        zero_gradients=zeros,
        decisive_attributes=tuple(traits["decisive_attributes"].get(canonical, ())),
    )


# ---------------------------------------------------------------------- custom operators


#: The `CustomOpProp` classes in MXNet's registry by op_type, and how many entries were read: each
#: call of a custom operator adds an entry.
_classes: Dict[str, type] = {}
_seen = 0


def prop_class(op_type: str) -> Optional[type]:
    """Return the `CustomOpProp` class registered as `op_type`; None if not registered.

    MXNet keeps the class only in the closure of the function behind a ctypes callback.
    """
    global _seen  # noqa: PLW0603
    registered = mx.operator._registry
    count = registered.counter
    for number in range(_seen, count):
        thunks = getattr(registered.ref_holder.get(number), "_objects", None) or {}
        for function in gc.get_referents(*thunks.values()):
            if inspect.isfunction(function) and function.__name__ == "creator":
                held = inspect.getclosurevars(function).nonlocals
                _classes[held["reg_name"]] = held["prop_cls"]
    _seen = count  # last: another thread must not miss a class
    return _classes.get(op_type)


def auxiliary_states(attributes: Mapping[str, Any]) -> int:
    """Return the number of a `Custom` operator's auxiliary states, which are its last inputs."""
    return _custom_properties(attributes)[1]


def _custom_properties(attributes: Mapping[str, Any]) -> Tuple[bool, int]:
    """Return whether a `Custom` operator needs head gradients, and its auxiliary state count.

    An unknown op_type needs it, and so does one whose constructor fails.
    """
    cls = prop_class(str(attributes.get("op_type", "")))
    # The constructor does not get op_type, nor the attributes that begin with `__`.
    arguments = ((k, str(v)) for k, v in attributes.items() if k != "op_type" and k[:2] != "__")
    return (True, 0) if cls is None else _read_properties(cls, tuple(sorted(arguments)))


@lru_cache(maxsize=1024)  # called at every eager call
def _read_properties(cls: type, arguments: Tuple[Tuple[str, str], ...]) -> Tuple[bool, int]:
    """Instantiate a `CustomOpProp`; return need_top_grad and the number of auxiliary states."""
    try:
        prop = cls(**dict(arguments))
        return bool(getattr(prop, "need_top_grad_", True)), len(prop.list_auxiliary_states())
    except Exception:  # the user's code failed; MXNet reports it when it creates the operator
        return True, 0
