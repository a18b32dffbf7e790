"""Operator lists: TOML files that say what a policy does with each operator.

mxamp's own are `lists/float16.toml` and `lists/bfloat16.toml`.
"""

import logging
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, FrozenSet, Mapping, Optional, Tuple, Union

from ..errors import ArgumentError, located
from ..framework.wording import shortened, shown
from .custom_operators import CustomClasses
from .resolving import ListRules
from .rules import Rule
from .schema import check_list
from .targets import check_device

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["OperatorList", "list_of", "lists_folder", "loads", "own_list", "read_list"]

logger = logging.getLogger("mxamp")

Table = Mapping[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class OperatorList:
    """A list resolved against MXNet's registry, for one kind of device and set of CPU features."""

    target_dtype: str
    device: str
    rules: Mapping[str, Rule]  #: by canonical operator name
    #: names (with * and ?) of graph nodes that stay in float32; eager calls have none
    fp32_layers: Tuple[str, ...] = ()
    #: the faster equivalents that graphs about to run get: name, and its measured gain
    substitutions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


_ONE_OF_SEVERAL = re.compile(r"^ *\[(group|conditional|missing|by_shape|exempt)\]", re.MULTILINE)
OTHER_DEVICE = (
    'it is for the {own} alone (device = "{own}"), and the {given} was asked for: load it without '
    "a device, or load a file for the {given}"
)
NO_KERNELS = (
    "%s: MXNet has no %s kernel on a %s for %s, and no [[missing]] table says so: calls fail, or "
    "give wrong results. Copy the [[missing]] tables of %s"
)
SINGLE_BRACKETS = ". Tables of which there are several have two brackets: [[group]]"


def lists_folder() -> Path:
    """Return where mxamp's own lists are: in the package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    return next(path for path in (package / "lists", package.parent / "lists") if path.is_dir())


def own_list(
    dtype: str, device: str, features: FrozenSet[str], custom: CustomClasses
) -> OperatorList:
    """Return mxamp's own list for a dtype."""
    path = lists_folder() / f"{dtype}.toml"
    with located(path):
        return list_of(_parsed(path), device, features, custom)


def read_list(
    path: Union[str, Path],
    device: Optional[str],
    features: FrozenSet[str],
    custom: CustomClasses = (),
) -> OperatorList:
    """Read an operator list; every error names the file.

    `custom` are the classes of the user's own custom operators. A warning names operators that the
    list lowers, and that have no kernel for that.
    """
    data = _parsed(path)
    with located(path):
        found = list_of(data, device, features, custom)
    _warn_of_kernels(path, found, features)
    return found


def _warn_of_kernels(path: Union[str, Path], found: OperatorList, features: FrozenSet[str]) -> None:
    dtype, device = found.target_dtype, found.device
    known = own_list(dtype, device, features, ()).rules
    lacking = [
        name
        for name, rule in found.rules.items()
        if rule.op_class == "low" and rule.missing is None
        if name in known and known[name].missing is not None
    ]
    if lacking:
        own = lists_folder() / f"{dtype}.toml"
        logger.warning(NO_KERNELS, path, dtype, device.upper(), shortened(lacking), own)


def _parsed(path: Union[str, Path]) -> Table:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"a policy file must be given by its path, not by {shown(path)}")
    if not os.fspath(path):
        raise ArgumentError("the path of the policy file is empty: give that of a TOML file")
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return loads(text)
    except FileNotFoundError:
        raise ArgumentError(f"there is no policy file {str(path)!r}") from None
    except IsADirectoryError:
        raise ArgumentError(f"{str(path)!r} is a folder; give the path of a TOML file") from None
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentError(f"{str(path)!r} is not valid TOML: it is no UTF-8 text") from None
    except RecursionError:
        raise ArgumentError(f"{str(path)!r} is not valid TOML: nested too deeply") from None
    except ValueError as error:  # TOML's, with line and column, or a path that no file can have
        hint = SINGLE_BRACKETS if _ONE_OF_SEVERAL.search(text) else ""
        raise ArgumentError(f"{str(path)!r} is not valid TOML: {error}{hint}") from None


def loads(text: str) -> Table:
    """Return what TOML says; raise a `ValueError` for what is none."""
    data: Table = tomllib.loads(text)
    return data


def list_of(
    data: Table, device: Optional[str], features: FrozenSet[str], custom: CustomClasses = ()
) -> OperatorList:
    """Return the list that the data of a file are."""
    check_list(data)
    dtype, own = data["dtype"], data.get("device")
    found = check_device(dtype, device or own)
    if own not in (None, found):
        raise ArgumentError(OTHER_DEVICE.format(own=own, given=found))
    rules = ListRules(data)
    rules.add_missing(found, features)
    rules.add_shape_rules(found)
    rules.keep_later_kernels(found)
    rules.add_custom_operators(custom)
    return OperatorList(
        dtype,
        found,
        MappingProxyType(rules.by_name),
        tuple(dict.fromkeys(data.get("fp32_layers", ()))),
        MappingProxyType(dict(data.get("substitutions", {}))),
    )
