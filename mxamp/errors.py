"""The exceptions that mxamp raises. Messages say what is wrong, what is allowed, what to do."""

import contextlib
import difflib
from typing import Any, Iterable, Iterator, Sequence

#: How many names an error lists where none is close to the one that was given.
_LISTED = 9


class AmpError(Exception):
    """Base class of all exceptions that mxamp raises.

    >>> import mxamp as amp
    >>> try:
    ...     amp.Policy.default("float64")
    ... except amp.AmpError as error:
    ...     print(type(error).__name__)
    ArgumentError
    """


class ArgumentError(AmpError, ValueError):
    """Raised for an invalid argument, operator list or file.

    The message shows the invalid argument, and what is allowed. `ArgumentError` is a `ValueError`.

    >>> import mxamp as amp
    >>> try:
    ...     amp.LossScaler(growth_factor=1)
    ... except amp.ArgumentError as error:
    ...     print(error)
    growth_factor must be more than 1, not 1
    """


class UnknownNameError(ArgumentError, LookupError):
    """Raised for an unknown name of an operator, layer or input; shows the closest names.

    >>> import mxamp as amp
    >>> try:
    ...     amp.Policy.default().override(fp32=["Convolutoin"])
    ... except amp.UnknownNameError as error:
    ...     print(error)
    unknown operator 'Convolutoin'; the closest are 'Convolution', 'Convolution_v1', 'Deconvolution'
    """


class StateError(AmpError, RuntimeError):
    """Raised for a call out of order: too early, or a second time.

    The message names the call that is missing or superfluous.

    >>> import mxamp as amp
    >>> amp.init("bfloat16")
    >>> try:
    ...     amp.init("bfloat16", tuned=False)
    ... except amp.StateError:
    ...     amp.shutdown()  # needed before `init` with other arguments
    """


class CheckError(StateError):
    """Raised if a converted or exported model computes wrong outputs; has each output's error.

    Catch a `CheckError` to see the errors. To make the outputs right, keep more layers in float32::

        inputs = {"data": data}
        try:
            amp.convert_files("resnet", "resnet-fp16", check_inputs=inputs)
        except amp.CheckError as error:
            print([(output.name, output.relative, output.lost) for output in error.errors])
            layers = ["dense1_fwd"]
            amp.convert_files(
                "resnet", "resnet-fp16", check_inputs=inputs, excluded_sym_names=layers
            )

    Parameters
    ----------
    message : str
        The text of the error.
    errors : sequence of OutputError
        The error of each output, as of `compare_models`.
    """

    def __init__(self, message: str, errors: Sequence[Any]) -> None:
        super().__init__(message)
        self.errors = tuple(errors)


class WriteError(AmpError, OSError):
    """Raised if a file can't be written; an existing file stays unchanged.

    For example, the disk is full or read-only. `WriteError` is an `OSError`. Write elsewhere::

        policy = amp.Policy.default("bfloat16")
        try:
            policy.save("/proc/policy.toml")
        except amp.WriteError:
            policy.save("policy.toml")
    """


class InstallError(AmpError, ImportError):
    """Raised if MXNet, or a package that a tool needs, is missing or broken.

    The message says what to install. `InstallError` is an `ImportError`::

        model = mx.model.load_checkpoint("resnet", 0)
        try:
            amp.export_onnx(model, "resnet.onnx", {"data": data})
        except amp.InstallError as error:
            print(error)
    """


def unknown(kind: str, name: object, candidates: Iterable[str], hint: str = "") -> UnknownNameError:
    """Return an `UnknownNameError` that suggests the closest of `candidates`.

    >>> print(unknown("operator", "Convolutoin", ["Convolution", "Pooling"]))
    unknown operator 'Convolutoin'; the closest is 'Convolution'
    >>> print(unknown("input", "x", ["data", "mask"]))
    unknown input 'x'; there are 'data', 'mask'
    """
    found = closest(name, candidates)
    return UnknownNameError(f"unknown {kind} {name!r}{found}{'. ' + hint if hint else ''}")


def closest(name: object, candidates: Iterable[str]) -> str:
    """Return the end of an error message that suggests the `candidates` closest to a name.

    >>> closest("haed_*", ["head_fwd", "body_fwd"]), closest("conv0", ["net0_conv0", "net0_conv1"])
    ("; the closest is 'head_fwd'", "; the closest is 'net0_conv0'")
    """
    known = list(dict.fromkeys(candidates))
    # Gluon puts the names of blocks before those of operators.
    close = [one for one in known if one.endswith(f"_{name}")][:3]
    close = close or difflib.get_close_matches(str(name).strip("*"), known, n=3, cutoff=0.6)
    listed, said = (close, "the closest") if close else (known[:_LISTED], "there")
    if not listed:
        return ""
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED and not close else ""
    verb = "is" if len(close or known) == 1 else "are"
    return f"; {said} {verb} " + ", ".join(map(repr, listed)) + more


@contextlib.contextmanager
def prefix_errors(place: object) -> Iterator[None]:
    """Prefix messages of `ArgumentError` with `place`, such as a file (a context manager)."""
    try:
        yield
    except ArgumentError as error:
        raise type(error)(f"{place}: {error}") from None
