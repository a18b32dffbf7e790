"""Texts of the commands: errors, help, and the library's messages in terms of options."""

import re
import sys
from typing import NoReturn

import click

__all__ = [
    "IS_THERE",
    "POLICY_HOLDS",
    "examples",
    "exit_with",
    "help_paragraph",
    "in_options",
    "usage_error",
]

IS_THERE = "--out {path!r} is there already: give another --out, or overwrite it with --force"

POLICY_HOLDS = "--policy holds its target dtype: give --dtype or --policy, not both"

#: The library's messages put arguments in backquotes. These are the options for them.
_OPTIONS = {
    "budget": "--budget",
    "cast_optional_params": "--cast-params",
    "convert_hybrid_block(net, policy=policy)": "mxamp convert --policy",
    "excluded_sym_names": "--keep-fp32",
    "force=True": "--force",
    "fuse": "--fuse",
    "fuse=True": "--fuse",
    "input_dtypes": "--input-dtype",
    "input_shapes": "--input",
    "keep_io_types=False": "--cast-io",
    "out": "--out",
    "policy=Policy.default('float16', 'gpu')": "--device gpu",
    "rtol": "--rtol",
    "shapes": "--input",
    "tolerance": "--tolerance",
}


def in_options(message: str) -> str:
    """Return a message of the library with command options in place of argument names.

    >>> in_options("keep its readers in float32 with `excluded_sym_names`")
    'keep its readers in float32 with --keep-fp32'
    """
    return re.sub("`([^`]+)`", lambda match: _OPTIONS.get(match[1], match[0]), message)


def exit_with(message: str, status: int) -> NoReturn:
    """End the process with a message in one line on standard error."""
    click.echo(" ".join(message.split()), err=True)
    sys.exit(status)


def usage_error(message: str) -> click.UsageError:
    """Return the error for a bad option of the running command."""
    return click.UsageError(message, click.get_current_context())


def help_paragraph(heading: str, *lines: str) -> str:
    """Return a paragraph for a command's help: a heading and lines that click doesn't rewrap."""
    return "\n".join(["\b", f"{heading}:", *(f"  {line}" for line in lines), "", ""])


def examples(*commands: str) -> str:
    """Return the examples at the end of a command's help."""
    return help_paragraph("Examples", *commands)
