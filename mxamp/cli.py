"""The command `mxamp`: what this machine does, what the lists say, and converting saved models."""

import sys
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import click
from rich.console import Console
from rich.table import Table

from ._version import __version__
from .errors import AmpError
from .framework.compat import import_mxnet

DTYPES = click.Choice(["float16", "bfloat16"])
DEVICES = click.Choice(["cpu", "gpu"])


class _Group(click.Group):
    """A group whose errors are one line on standard error and exit status 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; click's own errors, of usage, are one line too."""
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.Exit as done:
            sys.exit(done.exit_code)
        except click.Abort:
            _fail("interrupted")
        except click.UsageError as error:
            where = f" ({error.ctx.command_path} --help)" if error.ctx else ""
            _fail(" ".join(error.format_message().split()) + where)
        except (AmpError, OSError) as error:
            _fail(str(error))


def _fail(message: str) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mxamp")
def main() -> None:
    """Automatic mixed precision for Apache MXNet."""
    import_mxnet()


@main.command()
def info() -> None:
    """Say what this machine computes in which precision."""
    import mxnet as mx

    from .framework import machine

    found = machine.features()
    speed = "in hardware" if found & {"avx512_bf16", "amx_bf16"} else "right, but not faster"
    rows = [
        ("mxamp", __version__),
        ("MXNet", mx.__version__),
        ("CPU", machine.cpu_name()),
        ("oneDNN may use", ", ".join(sorted(found)) or "no avx512"),
        ("bfloat16 on the CPU", speed if "avx512" in found else "in float32 on rounded values"),
        ("float16 on the CPU", "true values, for trying and testing; not faster"),
        ("default device", machine.default_device()),
    ]
    table = Table(show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--dtype", type=DTYPES, help="Default: float16 with a GPU, else bfloat16.")
@click.option("--policy", "path", type=click.Path(), help="An operator list of your own (TOML).")
def run(script: str, arguments: Sequence[str], dtype: Optional[str], path: Optional[str]) -> None:
    """Run a Python SCRIPT with ARGUMENTS in mixed precision, loss scaling included.

    The script needs no change. One that uses mxamp or mxnet.contrib.amp itself is left alone.
    """
    import runpy
    import traceback
    from pathlib import Path

    from .frontends import automatic
    from .policy.policy import Policy

    if not Path(script).is_file():
        raise AmpError(f"there is no file {script!r}")
    if dtype and path:
        raise AmpError("--policy holds its target dtype: give --dtype or --policy, not both")
    automatic.show_log()
    own = automatic.uses_amp(script)
    if own is not None:
        automatic.logger.info(automatic.OWN_AMP, script, own)
    else:
        automatic.start(dtype, Policy.load(path) if path else None, name="mxamp run")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        # The script's own errors are shown as Python shows them.
        traceback.print_exc()
        sys.exit(1)


@main.command()
@click.argument("names", nargs=-1)
@click.option("--dtype", type=DTYPES, default="float16", show_default=True)
@click.option("--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU.")
@click.option("--class", "kind", help="Only operators of this class, such as low or fp32.")
def operators(names: Sequence[str], dtype: str, device: Optional[str], kind: Optional[str]) -> None:
    """Show the class of operators, by any of their NAMES, and why."""
    from .framework.operators import resolve
    from .policy.policy import Policy

    policy = Policy.default(dtype, device if dtype == "float16" else "cpu")
    chosen = [resolve(name).name for name in names] or sorted(policy.rules)
    table = Table("operator", "class", "reason")
    for name in chosen:
        rule = policy.rule(name)
        said = "conditional" if rule.conditions else rule.op_class
        if kind in (None, said):
            why = rule.reason + (f" (no kernel here: {rule.missing})" if rule.missing else "")
            table.add_row(name, said, why)
    Console().print(table)


@main.command()
@click.argument("prefix")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--dtype", type=DTYPES, default="float16", show_default=True)
@click.option("--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU.")
@click.option("--keep-fp32", multiple=True, metavar="PATTERN", help="Layers to keep in float32.")
@click.option("--name", default="*", help="Only operators of this name; * and ? are known.")
@click.option("--precision", help="Only operators of this precision, such as float32.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--graph", metavar="FILE", help="Draw it too, as .svg, .png, .pdf or .dot.")
@click.option(
    "--mode", type=click.Choice(["converted", "inference", "training"]), default="converted",
    show_default=True, help="Explain the converted model, or what runs while mxamp is on.",
)  # fmt: skip
@click.option("--input", "inputs", multiple=True, metavar="NAME:SHAPE", help="Shape of an input.")
def explain(
    prefix: str,
    epoch: int,
    dtype: str,
    device: Optional[str],
    keep_fp32: Sequence[str],
    name: str,
    precision: Optional[str],
    as_json: bool,
    graph: Optional[str],
    mode: str,
    inputs: Sequence[str],
) -> None:
    """Show what mixed precision does to the saved model PREFIX, operator by operator."""
    from .convert.files import load_model, saved_semantics
    from .debugging.drawing import draw
    from .debugging.explain import explain as explain_symbol
    from .policy.policy import Policy

    symbol, args, auxs = load_model(prefix, epoch)
    with saved_semantics(prefix, epoch):
        plan = explain_symbol(
            symbol, policy=Policy.default(dtype, device), excluded_sym_names=keep_fp32,
            params={**args, **auxs}, mode=mode, input_shapes=_inputs(inputs)[0],
        )  # fmt: skip
    if graph:
        draw(plan, graph)
    shown = plan.filter(name=name, precision=precision)
    if as_json:
        click.echo(shown.to_json())
        return
    table = Table()
    table.add_column("name", overflow="fold")
    for heading in ("operator", "precision", "reason"):
        table.add_column(heading)
    for node in shown.nodes:
        colour = {dtype: "green", "float32": "yellow"}.get(node.precision, "")
        cell = f"[{colour}]{node.precision}[/]" if colour else node.precision
        table.add_row(node.name, node.operator, cell, node.reason)
    console = Console()
    console.print(table)
    console.print(plan.summary(), highlight=False)


@main.command()
@click.argument("prefix")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--dtype", type=DTYPES, required=True)
@click.option("--out", required=True, help="Prefix of the files to write.")
@click.option("--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU.")
@click.option("--keep-fp32", multiple=True, metavar="PATTERN", help="Layers to keep in float32.")
@click.option("--fp32-op", multiple=True, metavar="NAME", help="Operators to keep in float32.")
@click.option("--cast-params", is_flag=True, help="Store parameters in DTYPE where all read it.")
@click.option("--cast-io", is_flag=True, help="Take and return DTYPE where that is computed in.")
@click.option(
    "--input", "inputs", multiple=True, metavar="NAME:SHAPE|NAME:FILE.npy",
    help="Shape or values of an input, such as data:1,3,224,224, for --check.",
)  # fmt: skip
@click.option(
    "--input-dtype", "dtypes", multiple=True, metavar="NAME:DTYPE",
    help="Dtype of an input that is not float32, such as index:int64.",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Run both models on the inputs, or random ones.")
@click.option("--fuse", is_flag=True, help="Fuse operators, for bfloat16 inference on CPUs only.")
@click.option("--force", is_flag=True, help="Overwrite files.")
def convert(
    prefix: str,
    epoch: int,
    dtype: str,
    out: str,
    device: Optional[str],
    keep_fp32: Sequence[str],
    fp32_op: Sequence[str],
    cast_params: bool,
    cast_io: bool,
    inputs: Sequence[str],
    dtypes: Sequence[str],
    check: bool,
    fuse: bool,
    force: bool,
) -> None:
    """Convert PREFIX-symbol.json and PREFIX-NNNN.params to mixed precision."""
    from .convert.compare import random_inputs
    from .convert.files import convert_files, load_model, saved_semantics
    from .policy.policy import Policy

    known = dict(_pair("--input-dtype", text) for text in dtypes)
    shapes, values = _inputs(inputs)
    if inputs and not check:
        raise click.UsageError("--input is for --check; give that too", click.get_current_context())
    check_inputs = None
    if check:
        rest = {**shapes, **{name: value.shape for name, value in values.items()}}
        with saved_semantics(prefix, epoch):
            check_inputs = {**random_inputs(load_model(prefix, epoch), rest, known), **values}
    policy = Policy.default(dtype, device).override(fp32=fp32_op)
    done = convert_files(
        prefix, out, epoch, excluded_sym_names=keep_fp32, cast_optional_params=cast_params,
        policy=policy, keep_io_types=not cast_io,
        input_dtypes=known, check_inputs=check_inputs, force=force, fuse=fuse,
    )  # fmt: skip
    if check:
        Console().print(_errors_table(done.errors))
    click.echo(
        f"{done.symbol}, {done.params}: {done.bytes_after:,} bytes, from {done.bytes_before:,}"
    )


def _pair(option: str, text: str) -> Tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (name and colon and value):
        raise click.UsageError(
            f"{option} takes NAME:VALUE, not {text!r}", click.get_current_context()
        )
    return name, value


def _inputs(texts: Sequence[str]) -> Tuple[Dict[str, Tuple[int, ...]], Dict[str, Any]]:
    """Return shapes and values of inputs, by name."""
    import numpy as np

    shapes, values = {}, {}
    for text in texts:
        name, value = _pair("--input", text)
        if value.endswith(".npy"):
            values[name] = np.load(value)
            continue
        try:
            shapes[name] = tuple(int(part) for part in value.split(","))
        except ValueError:
            raise click.UsageError(
                f"--input takes NAME:1,3,224,224 or NAME:FILE.npy, not {text!r}",
                click.get_current_context(),
            ) from None
    return shapes, values


def _errors_table(errors: Iterable[Any]) -> Table:
    table = Table("output", "shape", "relative error", "largest", "same argmax")
    for error in errors:
        same = "" if error.same_argmax is None else f"{error.same_argmax:.1%}"
        shape = "x".join(map(str, error.shape))
        table.add_row(error.name, shape, f"{error.relative:.2e}", f"{error.maximum:.2e}", same)
    return table


__all__: List[str] = ["main"]
