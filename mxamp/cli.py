"""The command `mxamp`: what this machine does, what the lists say, and converting saved models."""

import sys
import tempfile
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

import click
from rich.console import Console
from rich.table import Table

from ._compat import import_mxnet
from ._version import __version__
from .errors import AmpError

DTYPES = click.Choice(["float16", "bfloat16"])
DEVICES = click.Choice(["cpu", "gpu"])


class _Group(click.Group):
    """A group whose errors are one line on standard error and exit status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AmpError as error:
            click.echo(f"error: {error}", err=True)
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

    from . import machine

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


@main.command()
@click.argument("names", nargs=-1)
@click.option("--dtype", type=DTYPES, default="float16", show_default=True)
@click.option("--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU.")
@click.option("--class", "kind", help="Only operators of this class, such as low or fp32.")
def operators(names: Sequence[str], dtype: str, device: Optional[str], kind: Optional[str]) -> None:
    """Show the class of operators, by any of their NAMES, and why."""
    from .operators import resolve
    from .policy import Policy

    policy = Policy.default(dtype, device if dtype == "float16" else "cpu")
    chosen = [resolve(name).name for name in names] or sorted(policy.rules)
    table = Table("operator", "class", "reason")
    for name in chosen:
        rule = policy.rule(name)
        said = "conditional" if rule.conditions else rule.kind
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
def explain(
    prefix: str,
    epoch: int,
    dtype: str,
    device: Optional[str],
    keep_fp32: Sequence[str],
    name: str,
    precision: Optional[str],
    as_json: bool,
) -> None:
    """Show what mixed precision does to the saved model PREFIX, operator by operator."""
    from .explain import explain as explain_symbol
    from .policy import Policy

    symbol, args, auxs = _load(prefix, epoch)
    plan = explain_symbol(
        symbol, policy=Policy.default(dtype, device), excluded_sym_names=keep_fp32,
        params={**args, **auxs},
    )  # fmt: skip
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
    force: bool,
) -> None:
    """Convert PREFIX-symbol.json and PREFIX-NNNN.params to mixed precision."""
    import mxnet as mx

    from .convert import convert_model
    from .policy import Policy

    read, written = _files(prefix, epoch), _files(out, epoch)
    for path in written:
        if path.exists() and not force:
            raise AmpError(f"{str(path)!r} is there already; --force overwrites it")
    policy = Policy.default(dtype, device).override(fp32=fp32_op)
    symbol, args, auxs = _load(prefix, epoch)
    converted = convert_model(
        symbol,
        args,
        auxs,
        policy=policy,
        excluded_sym_names=keep_fp32,
        cast_optional_params=cast_params,
    )
    with tempfile.TemporaryDirectory(dir=written[0].parent) as folder:
        mx.model.save_checkpoint(str(Path(folder) / "model"), epoch, *converted)
        mx.nd.waitall()
        for made, path in zip(_files(str(Path(folder) / "model"), epoch), written):
            made.replace(path)
    sizes = [sum(path.stat().st_size for path in paths) for paths in (read, written)]
    click.echo(f"{written[0]}, {written[1]}: {sizes[1]:,} bytes, from {sizes[0]:,}")


def _load(prefix: str, epoch: int) -> Tuple[Any, Any, Any]:
    import mxnet as mx

    for path in _files(prefix, epoch):
        if not path.is_file():
            raise AmpError(f"there is no file {str(path)!r}")
    try:
        symbol, args, auxs = mx.model.load_checkpoint(prefix, epoch)
    except mx.base.MXNetError as error:
        raise AmpError(
            f"{prefix!r} can't be read as a model: {str(error).splitlines()[-1]}"
        ) from None
    return symbol, args, auxs


def _files(prefix: str, epoch: int) -> Tuple[Path, Path]:
    return Path(f"{prefix}-symbol.json"), Path(f"{prefix}-{epoch:04d}.params")


__all__: List[str] = ["main"]
