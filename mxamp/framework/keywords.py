"""Messages for calls that do not fit a function's parameters, and names that a module lacks."""

import difflib
import functools
import inspect
from typing import Any, Callable, Iterable, List, Mapping, Optional, Sequence, TypeVar, Union

from ..errors import ArgumentError, unknown

__all__ = ["Hint", "checked_call", "checked_methods", "missing_attribute"]

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

#: The optional parameters that a message shows.
_OPTIONAL = 3


#: What to write instead: a text, or a function of the call's arguments by name.
Hint = Union[str, Callable[[Mapping[str, Any]], str]]


def checked_call(**hints: Hint) -> Callable[[Function], Function]:
    """Return a decorator: a call that does not fit the parameters raises `ArgumentError`.

    `hints` say what to write, by the name of a parameter that is missing, is given twice, or that
    the function does not have.

    >>> @checked_call(dtype="write target_dtype='float16'")
    ... def init(target_dtype=None, policy=None): ...
    >>> init(dtype="float16")
    Traceback (most recent call last):
    mxamp.errors.ArgumentError: init takes no dtype here: write target_dtype='float16'
    >>> init(polcy="float16")
    Traceback (most recent call last):
    mxamp.errors.UnknownNameError: unknown argument of init 'polcy'; the closest is 'policy'
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            try:
                return function(*args, **keywords)
            except TypeError:
                error = _call_error(function, hints, args, keywords)
                if error is None:  # raised inside
                    raise
                raise error from None

        return wrapper  # type: ignore[return-value]

    return decorate


def checked_methods(kind: Kind) -> Kind:
    """Make the public methods of a class `checked_call`s; return the class."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, checked_call()(method))
    return kind


#: What to write for names of Apex's, PyTorch's and Paddle's modules.
_ELSEWHERE: Mapping[str, str] = {
    "auto_cast": "write amp.autocast(...)",
    "cuda": "write amp.autocast(...) and amp.GradScaler()",
    "disable_casts": "write amp.autocast(enabled=False)",
    "load_state_dict": "trainer.load_states reads the loss scaler's state too",
    "master_params": "write amp.clip_grad_global_norm(trainer, 1.0) to clip gradients",
    "scale": "write `with amp.scale_loss(loss, trainer) as scaled:`",
    "state_dict": "trainer.save_states writes the loss scaler's state too",
}


def missing_attribute(
    owner: str, name: str, public: Iterable[str], hints: Mapping[str, str] = _ELSEWHERE
) -> str:
    """Return the message for a name that a module or class lacks: what to write, or the closest.

    >>> missing_attribute("module 'mxamp'", "GradScalar", ["GradScaler", "init"])
    "module 'mxamp' has no attribute 'GradScalar'; the closest is 'GradScaler'"
    """
    close = difflib.get_close_matches(name, list(public), n=1)
    hint = hints.get(name) or (f"the closest is {close[0]!r}" if close else "")
    return f"{owner} has no attribute {name!r}{'; ' if hint else ''}{hint}"


def _call_error(
    function: Callable[..., Any],
    hints: Mapping[str, Hint],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Optional[ArgumentError]:
    """Return the error for arguments that a function can't be called with; None if it can."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **keywords)
        return None
    except TypeError as error:
        reason = str(error)
    qualified = function.__qualname__.rpartition("<locals>.")[2]
    is_method, name = "." in qualified, qualified.replace(".__init__", "")
    parameters = signature.parameters
    positional = [n for n, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    taken, own = positional[: len(args)], [*parameters][is_method:]

    def hint_for(parameter: str) -> str:
        hint = hints[parameter]
        return hint if isinstance(hint, str) else hint({**dict(zip(taken, args)), **keywords})

    for keyword in keywords:
        if keyword in hints and (keyword in taken or keyword not in parameters):
            return ArgumentError(f"{name} takes no {keyword} here: {hint_for(keyword)}")
        if keyword not in parameters:
            return unknown(f"argument of {name}", keyword, own)
    required = [n for n in own if parameters[n].default is inspect.Parameter.empty]
    for missing in required:
        if missing in hints and missing not in (*taken, *keywords):
            return ArgumentError(f"{name} needs {missing}: {hint_for(missing)}")
    return ArgumentError(f"{name}: {reason}; write {_call_text(name, required, own)}")


def _call_text(name: str, required: List[str], parameters: List[str]) -> str:
    """Return how to call a function, with its first optional parameters by keyword.

    >>> _call_text("step", ["trainer"], ["trainer", "a", "b", "c", "d"])
    'step(trainer, a=..., b=..., c=..., ...)'
    """
    optional = [f"{one}=..." for one in parameters if one not in required]
    more = ["..."] if len(optional) > _OPTIONAL else []
    return f"{name}({', '.join([*required, *optional[:_OPTIONAL], *more])})"
