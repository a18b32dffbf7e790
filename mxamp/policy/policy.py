"""`Policy`: an immutable value that says in which precision each operator computes."""

from __future__ import annotations

import fnmatch
import json
import logging
import weakref
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Callable, Generic, Iterable, Literal, Mapping, TypeVar, Union

import tomli_w

from ..backends import backend_of
from ..errors import ArgumentError, prefix_errors, unknown
from ..framework.files import write_file
from ..framework.keywords import checked_call
from ..framework.machine import Device, Dtype, default_device
from ..framework.operators import resolve
from ..framework.wording import shortened, shown
from . import overrides, targets
from .lists import OperatorList, check_data, list_from_json, list_without_casts, own_data, read_toml
from .overrides import Change, Conditional, LayerArgument, Names
from .rules import SHOWN_CLASSES, UNLISTED, Rule, Surroundings, surroundings
from .targets import AUTO, DEFAULT_TARGET, DTYPES_OR_AUTO

logger = logging.getLogger("mxamp")

Value = TypeVar("Value")

HEAD = "# A policy: docs/policy-files.md of mxamp describes all tables and keys.\n"
NO_POLICY = "policy must be an mxamp.Policy, from default, load or override, not {given}"
BESIDE_LISTS = "a policy contains operator lists: give none beside it, use policy.override"
OTHER_DEVICE = "the policy is for the {own} only, not for the {given}: leave out `device`"
NO_KERNELS = "%s: no %s kernel on a %s for %s: copy the [[missing]] tables of mxamp's own list"


#: One policy object for each value in use: code that makes an equal policy in each step finds the
#: cached graphs and casts. By its fields, so that nothing here keeps it.
_policies: weakref.WeakValueDictionary[Any, Policy] = weakref.WeakValueDictionary()


@dataclass(frozen=True, repr=False)
class Policy:
    """An immutable choice of the precision of every operator, for one kind of device.

    >>> policy = Policy.default("float16", device="cpu")
    >>> policy.rule("Convolution").op_class
    'low'

    A policy consists of mxamp's own operator list for a dtype and a kind of device, and of changes
    to the list. `Policy.default`, `Policy.load` and `policy.override` return policies, and
    `amp.tune` finds a policy for a model. Policies are immutable and compare by value.

    Parameters
    ----------
    target_dtype : str
        "float16", "bfloat16" or "float32".
    device : str
        The kind of device, "cpu" or "gpu".
    changes : tuple of Change
        The changes that turn mxamp's own list into this policy, in order.
    """

    target_dtype: str
    device: str
    changes: tuple[Change, ...] = ()
    _surroundings: Surroundings | None = None

    def __post_init__(self) -> None:
        if self._surroundings is None:
            object.__setattr__(self, "_surroundings", surroundings(self.device))

    @cached_property
    def _list(self) -> OperatorList:
        """The policy's operator list: mxamp's own list after all of the policy's changes."""
        features, custom = self._surroundings or surroundings(self.device)
        *before, last = self.changes or (None,)
        if last is None and self.target_dtype == "float32":
            return list_without_casts(backend_of(self.device).float32_substitutions())
        if last is None or last.operator_list is not None:
            text = own_data(self.target_dtype) if last is None else last.operator_list
            return list_from_json(text, self.device, features, custom)
        outer = policy_of(self.target_dtype, self.device, tuple(before), self._surroundings)
        return last.apply(outer._list, self.target_dtype)

    @cached_property
    def rules(self) -> Mapping[str, Rule]:
        """The precision rule of each operator, by canonical operator name."""
        return self._list.rules

    @cached_property
    def fp32_layers(self) -> tuple[str, ...]:
        """The names of layers to keep in float32; they may contain the wildcards * and ?."""
        return self._list.fp32_layers

    @cached_property
    def substitutions(self) -> Mapping[str, str]:
        """The faster equivalents of operators that graphs may use: name to measured gain."""
        return self._list.substitutions

    def rule(self, operator: str) -> Rule:
        """Return the precision rule of an operator.

        Parameters
        ----------
        operator : str
            Any name of the operator in MXNet; aliases work too.

        Raises
        ------
        UnknownNameError
            MXNet has no such operator.
        """
        found = self.rules.get(operator)
        return found if found is not None else self.rules.get(resolve(operator).name, UNLISTED)

    def keeps_layer(self, name: str) -> bool:
        """Return whether `fp32_layers` keeps the layer `name` in float32."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.fp32_layers)

    @cached_property
    def depends_on_shapes(self) -> bool:
        """Whether the precision of an operator in a graph may depend on shapes and neighbors."""
        return bool(self.substitutions) or any(rule.by_shape for rule in self.rules.values())

    @cached_property
    def lowers(self) -> bool:
        """Whether the policy runs any operator in 16 bits."""
        return self.target_dtype != "float32" and any(rule.lowers for rule in self.rules.values())

    @property
    def precision(self) -> str:
        """The lowest dtype in which the policy runs operators: float32 if none runs in 16 bits."""
        return self.target_dtype if self.lowers else "float32"

    def operators(self, op_class: str) -> list[str]:
        """Return the names of the operators in one precision class, sorted.

        >>> "Convolution" in Policy.default("float16", "cpu").operators("low")
        True

        Parameters
        ----------
        op_class : str
            "low", "fp32", "widest", "neutral", "untouched", or "conditional" for operators that
            depend on an attribute.
        """
        if op_class not in SHOWN_CLASSES:
            raise unknown("class", op_class, SHOWN_CLASSES)
        classes = {n: "conditional" if r.conditions else r.op_class for n, r in self.rules.items()}
        return sorted(name for name, found in classes.items() if found == op_class)

    def __repr__(self) -> str:
        given = [item for one in self.changes for item in one.given().items()]
        changes = shortened([f"{name}={shown(value)}" for name, value in given])
        return f"<Policy {self.target_dtype} on {self.device}{': ' if given else ''}{changes}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return policy_of, (self.target_dtype, self.device, self.changes)

    @classmethod
    @checked_call
    def default(cls, target_dtype: Dtype = "float16", device: Device | None = None) -> Policy:
        """Return mxamp's own policy for a dtype and a kind of device.

        >>> Policy.default("float16", device="gpu").target_dtype
        'float16'

        Parameters
        ----------
        target_dtype : str or dtype, default "float16"
            "float16", "bfloat16", or "float32": faster equivalents of operators, and no casts down.
        device : str or Context, optional
            The kind of device, such as "cpu" or "gpu". The default is the GPU if there is one, else
            the CPU.
        """
        dtype = targets.check_target(target_dtype)
        kind = targets.check_device(dtype, targets.device_type(device, "device"))
        return _own_policy(dtype, kind, now=surroundings(kind))

    @classmethod
    @checked_call
    def load(cls, path: str | Path, device: Device | None = None) -> Policy:
        """Read a policy from a TOML file: one written by `save`, or your own operator list.

        ::

            amp.Policy.default("bfloat16").save("my.toml")
            policy = amp.Policy.load("my.toml")

        Parameters
        ----------
        path : str or Path
            The file to read.
        device : str or Context, optional
            The kind of device, such as "cpu" or "gpu". The default is the file's, else that of
            `default`.

        Raises
        ------
        ArgumentError
            There is no such file, or it has a mistake: the message names the file and the table.
        """
        kind = targets.device_type(device, "device")
        data = read_toml(path)
        with prefix_errors(path):
            policy = policy_from_data(data, kind)
        own = Policy.default(policy.target_dtype, policy.device)
        low = policy.operators("low")
        lacking = [n for n in low if own.rule(n).no_kernel and not policy.rule(n).no_kernel]
        if lacking:
            names, device = shortened(lacking), policy.device.upper()
            logger.warning(NO_KERNELS, path, policy.target_dtype, device, names)
        return policy

    @checked_call
    def save(self, path: str | Path) -> None:
        """Write the policy to a TOML file that `load` reads back as the same policy.

        ::

            policy = amp.Policy.default("bfloat16").override(fp32=["Convolution"])
            policy.save("my.toml")
            assert amp.Policy.load("my.toml") == policy

        An existing file is replaced whole, or not at all. Classes of custom operators
        (`register_custom_operator`) belong to a process and are not saved.

        Parameters
        ----------
        path : str or Path
            The file to write, such as "my.toml".

        Raises
        ------
        ArgumentError
            `path` can't name a file.
        WriteError
            The file can't be written.
        """
        write_file(path, self.to_toml().encode())

    def to_toml(self) -> str:
        """Return the policy as TOML text, which `save` writes to a file."""
        return HEAD + tomli_w.dumps(self._data)

    @cached_property
    def text(self) -> str:
        """The policy as one line of JSON, which `autocast(policy=...)` records in graph nodes."""
        return json.dumps(self._data)

    @property
    def _data(self) -> dict[str, Any]:
        """The tables of the policy's TOML file, as a dict."""
        changes = [one.given() for one in self.changes]
        data: dict[str, Any] = {"format": 2, "dtype": self.target_dtype, "device": self.device}
        if changes and "operator_list" in changes[0]:
            data = {**json.loads(changes.pop(0)["operator_list"]), **data}
        return {**data, "change": changes} if changes else data

    @checked_call
    def override(
        self,
        low: Names = None,
        fp32: Names = None,
        widest: Names = None,
        conditional: Iterable[Conditional] | None = None,
        *,
        replace_lists: bool = False,
        fp32_layers: LayerArgument = (),
        substitutions: Iterable[str] | None = None,
    ) -> Policy:
        """Return a copy of the policy with some operators moved to other precision classes.

        >>> policy = Policy.default("float16", "cpu").override(fp32=["Convolution"])
        >>> policy.rule("Convolution").op_class
        'fp32'

        Parameters
        ----------
        low : list of str, optional
            Operators to run in the target dtype, whatever their shapes.
        fp32 : list of str, optional
            Operators to run in float32.
        widest : list of str, optional
            Operators to run in the widest dtype of their inputs.
        conditional : list of (str, str, list of str), optional
            (operator, attribute, values) as in `mxnet.contrib.amp`: the operator runs in float32 if
            its attribute has one of the values.
        replace_lists : bool, default False
            Replace the policy's own list by each list that you pass, as `mxnet.contrib.amp.init`
            does. Operators of the old list that no new list names become neutral.
        fp32_layers : list of str or Block, optional
            Layers to keep in float32: Gluon blocks, or names that `explain` shows, with * and ?.
        substitutions : list of str, optional
            Those of the policy's substitutions to keep.

        Raises
        ------
        UnknownNameError
            MXNet does not know a name.
        ArgumentError
            A name is in two lists.
        """
        layers = overrides.layer_patterns("fp32_layers", fp32_layers)
        change = Change(
            overrides.checked_operators("low", low),
            overrides.checked_operators("fp32", fp32),
            overrides.checked_operators("widest", widest),
            overrides.checked_conditional(conditional),
            bool(replace_lists),
            tuple(dict.fromkeys(pattern for patterns in layers for pattern in patterns)),
            overrides.checked_substitutions(substitutions),
        )
        return self.changed(change)

    def untuned(self) -> Policy:
        """Return the policy without choices made only for speed, such as faster equivalents.

        >>> Policy.default("bfloat16").untuned().substitutions
        mappingproxy({})

        Under it, eager calls, graphs and converted models agree bit for bit in bfloat16 too.
        """
        return self.changed(Change(untuned=True))

    def in_float32(self) -> Policy:
        """Return the policy with every operator that runs in 16 bits moved to float32.

        >>> Policy.default("bfloat16").in_float32().operators("low")
        []

        Under it, float32 models compute in float32 throughout. Substitutions stay, so graphs may
        use faster equivalents of their operators; without them graphs are as in plain MXNet.
        """
        return self.changed(Change(in_float32=True))

    def changed(self, change: Change) -> Policy:
        """Return the policy with a change appended; the same object if the change has no effect."""
        changes = *self.changes, change
        policy = policy_of(self.target_dtype, self.device, changes, self._surroundings)
        return self if policy._list == self._list else policy


# `Policy("mixed_float16")` is Keras' call.
Policy.__init__ = checked_call(Policy.__init__)  # type: ignore[method-assign]


class PerPolicy(Generic[Value]):
    """A cache of one value for each policy, computed on first use and freed with the policy."""

    def __init__(self, make: Callable[[Policy], Value]) -> None:
        self._make, self._name = make, f"_derived_{id(self)}"

    def __call__(self, policy: Policy) -> Value:
        """Return the cached value for a policy; compute it on first use."""
        # In the policy itself: a value may refer to the policy, and so would keep a weak key alive.
        try:
            return policy.__dict__[self._name]  # type: ignore[no-any-return]
        except KeyError:
            return policy.__dict__.setdefault(self._name, self._make(policy))  # type: ignore[no-any-return]


def policy_of(
    dtype: str, device: str, changes: tuple[Change, ...] = (), now: Surroundings | None = None
) -> Policy:
    """Return the policy with these fields; equal policies in use share one object."""
    key = (dtype, device, changes, surroundings(device) if now is None else now)
    found = _policies.get(key)
    return found if found is not None else _policies.setdefault(key, Policy(*key))


#: mxamp's own policies, kept for the process: the caches of casts belong to a policy object.
_own_policy = lru_cache(maxsize=None)(policy_of)


def policy_from_data(data: Mapping[str, Any], device: str | None = None) -> Policy:
    """Return the policy in a policy file's parsed TOML; raise if it is invalid.

    `device` is the kind of device that is asked for. A file may hold a whole operator list.
    """
    check_data(data)
    dtype, own = data["dtype"], data.get("device")
    found = targets.check_device(dtype, device or own)
    if own not in (None, found):
        raise ArgumentError(OTHER_DEVICE.format(own=own, given=found))
    policy = policy_of(dtype, found)
    # `form` is for `mxamp convert`: how the model was the fastest under the policy. `save` once
    # wrote `mxamp` and `lists`, which say with which operator lists it did.
    others = ("format", "device", "change", "fp32_layers", "form", "mxamp", "lists")
    listed = {k: v for k, v in data.items() if k not in others}
    if listed.keys() - {"dtype"}:
        whole = Change(operator_list=json.dumps(listed, sort_keys=True))
        policy = policy_of(dtype, found, (whole,))
    policy = policy.override(fp32_layers=data.get("fp32_layers"))
    for table in data.get("change", ()):
        with prefix_errors("[[change]]"):
            is_step = table in ({"untuned": True}, {"in_float32": True})
            policy = policy.changed(Change(**table)) if is_step else policy.override(**table)
    return policy


# ---------------------------------------------------------------------- the policy of a call


class _PlainFloat32:
    """Type of `PLAIN_FLOAT32`: "auto" found no fast 16-bit dtype, so MXNet runs unchanged."""

    target_dtype, lowers = "float32", False

    def __bool__(self) -> Literal[False]:
        # No policy is in force under it.
        return False

    def __repr__(self) -> str:
        return "<float32, mixed precision off>"


PLAIN_FLOAT32 = _PlainFloat32()

#: A policy, or float32 chosen by "auto".
PolicyChoice = Union[Policy, _PlainFloat32]


def float32_choice(device: str) -> PolicyChoice:
    """Return a device's float32 policy, or `PLAIN_FLOAT32` if that has no faster equivalents."""
    policy = Policy.default("float32", device)
    return policy if policy.substitutions else PLAIN_FLOAT32


def requested_policy(
    target_dtype: Dtype, *lists: Any, policy: Policy | None = None, ctx: Device | None = None
) -> Policy:
    """Return the policy for the dtype, operator lists or `policy` passed to `convert_*`.

    That is `policy` if given; else the default policy for `target_dtype` and the kind of device of
    `ctx`, with each given operator list (low, fp32, widest, conditional) in place of its own.

    Raises `ArgumentError` if `policy` is no policy, is given beside operator lists, or is for
    another dtype or device than `target_dtype` and `ctx`; and the errors of `override`.
    """
    given = any(one is not None for one in lists)
    if policy is None:
        base = Policy.default(targets.check_target(target_dtype), targets.device_type(ctx))
        return base.override(*lists, replace_lists=True) if given else base
    if not isinstance(policy, Policy):
        raise ArgumentError(NO_POLICY.format(given=shown(policy)))
    if given:
        raise ArgumentError(BESIDE_LISTS)
    targets.check_same_target(policy.target_dtype, policy.device, target_dtype, ctx)
    return policy


def chosen_policy(
    target_dtype: Dtype, *lists: object, policy: Policy | None = None, ctx: Device | None = None
) -> PolicyChoice:
    """Return the policy for the dtype, operator lists or `policy` passed to `init`.

    Like `requested_policy`, but `target_dtype` may be "auto". Arguments are checked even where
    "auto" means float32, under which they have no meaning.
    """
    if policy is None or target_dtype is not DEFAULT_TARGET:
        target_dtype = targets.check_target(target_dtype, DTYPES_OR_AUTO)
    if target_dtype != AUTO:
        return requested_policy(target_dtype, *lists, policy=policy, ctx=ctx)
    device = targets.device_type(ctx) or default_device()
    dtype = backend_of(device).fast_dtype()
    own = targets.default_dtype(device) if policy is None else DEFAULT_TARGET
    wanted = requested_policy(own, *lists, policy=policy, ctx=ctx)
    if dtype == "float32" and wanted.target_dtype != "float32":
        return float32_choice(device)
    with prefix_errors(f"'auto' is {dtype} on the {device.upper()} here"):
        targets.check_same_target(wanted.target_dtype, wanted.device, dtype, device)
    return wanted
