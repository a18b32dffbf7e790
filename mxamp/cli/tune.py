"""`mxamp tune`: a policy for a saved model, found by measuring it."""

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Mapping, Optional, Sequence, Tuple

import click
import mxnet as mx
from rich.markup import escape

from ..convert.arguments import checked_policy
from ..convert.compare import Model
from ..convert.saved import load_model, model_files, saved_semantics
from ..errors import ArgumentError, StateError
from ..framework.files import checked_writable
from ..framework.tables import cell_text
from ..graph.ir import Graph
from ..policy.evidence import Evidence
from ..policy.policy import Policy
from ..tools.tuning.tune import tune as tune_model
from ..tools.tuning.tuner import STOPPED
from .inputs import as_inputs, batches_in, dtypes_of_inputs, values_for
from .options import DTYPES, chosen_policy, saved_model_options, stop_status
from .output import IS_THERE, console, examples, in_options, table_of, usage_error

__all__ = ["tune"]

READ_TOO = "--out {path!r} is a file that is read here: give another --out"
TWO_WAYS = "--data holds batches of all inputs: give --data or --input, not both"
NO_GPU = (
    "the policy is for GPUs, and there is none here that MXNet can use: tune it on a machine with "
    "one, or for this machine with --device cpu"
)
RANDOM = (
    "The errors were measured on random numbers for {names}, and may be others on your own data: "
    "give that with --data FILE.npz or --input NAME:FILE.npy."
)
INTERRUPTED = "interrupted: the best policy so far is written"

UNDECIDED = (
    "not enough was compared to choose anything but float32: run the model as it is, or tune it "
    "again with a larger --budget"
)

_USES = {
    "plain": "nothing else was faster within the tolerance: run the model as it is, in float32",
    "autocast": "run the model with it: mxamp run --policy {out} SCRIPT, or convert it: {convert}",
    "converted": "convert the model with it: {convert}",
    "fused": "convert the model with it, which fuses it too: {convert}",
}

_DATA_HELP = "A batch: an .npz file of arrays by name of input; may be given several times."
_INPUT_HELP = "Shape of an input, for random values, or a file with its values."
_EXAMPLES = examples(
    "mxamp tune model --data batch1.npz --data batch2.npz --out policy.toml",
    "mxamp tune model --input data:8,3,224,224 --budget 5m --rtol 0.01 --out policy.toml",
    "mxamp convert model --policy policy.toml --out model-tuned",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@click.option("--dtype", type=DTYPES, help="Default: float16 for GPUs, bfloat16 for CPUs.")
@click.option("--out", required=True, metavar="FILE", help="The policy file to write.")
@click.option("--data", multiple=True, metavar="FILE.npz", help=_DATA_HELP)
@click.option(
    "--input", "inputs", multiple=True, metavar="NAME:SHAPE|NAME:FILE.npy", help=_INPUT_HELP
)
@click.option(
    "--input-dtype",
    "dtypes",
    multiple=True,
    metavar="NAME:DTYPE",
    help="Dtype of an input that is not float32, such as index:int64.",
)
@click.option(
    "--budget", default="60s", show_default=True, metavar="TIME", help="Such as 90s, 5m or 1h."
)
@click.option(
    "--rtol",
    type=click.FloatRange(min=0, min_open=True),
    help="Largest relative error of an output that is allowed. Default: 0.05.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Of random numbers.",
)
@click.option("--accuracy-only", is_flag=True, help="Time nothing: for use on another machine.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def tune(
    prefix: str,
    epoch: int,
    device: Optional[str],
    keep_fp32: Sequence[str],
    dtype: Optional[str],
    out: str,
    data: Sequence[str],
    inputs: Sequence[str],
    dtypes: Sequence[str],
    budget: str,
    rtol: Optional[float],
    seed: int,
    accuracy_only: bool,
    force: bool,
) -> None:
    """Find a policy for a saved model: as accurate as you ask, and never slower than float32.

    The model is run in inference, on your data, in float32 and in low precision. Layers that cost
    too much accuracy stay in float32, and of what is accurate enough the fastest is taken, as
    measured on this machine. With --policy the search starts from that policy. Ctrl-C ends it with
    the best so far.
    """
    if data and inputs:
        raise usage_error(TWO_WAYS)
    _check_out(out, force, (*model_files(prefix, epoch), *map(Path, data), *_files_in(inputs)))
    input_dtypes = dtypes_of_inputs(dtypes)
    start = chosen_policy(dtype, device).with_evidence(None)
    with _context_of(start), saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        start = checked_policy(start, keep_fp32, Graph.from_symbol(model[0]))
        batches, drawn = _batches(model, data, inputs, input_dtypes, seed)
        stop_status()
        policy = tune_model(
            model,
            batches,
            policy=start,
            rtol=rtol,
            budget=budget,
            seed=seed,
            timed=not accuracy_only,
        )
    if drawn:
        policy = _noted(policy, RANDOM.format(names=", ".join(drawn)))
    target = _free(Path(out), force)
    policy.save(target)
    _show(policy, prefix, target)


def _files_in(inputs: Sequence[str]) -> Iterator[Path]:
    for text in inputs:
        value = text.partition(":")[2]
        if value.endswith(".npy"):
            yield Path(value)


def _check_out(out: str, force: bool, read: Iterable[Path]) -> None:
    """Raise before anything is measured where the policy can't be written."""
    target = Path(out)
    if out and os.path.lexists(target) and not target.is_dir():
        if target.exists() and any(path.exists() and target.samefile(path) for path in read):
            raise usage_error(READ_TOO.format(path=out))
        if not force:
            raise usage_error(IS_THERE.format(path=out))
    checked_writable(out)


def _free(target: Path, force: bool) -> Path:
    """Return where to write: not over a file that has come up in the meantime."""
    while os.path.lexists(target) and not force:
        target = target.with_name(f"tuned-{target.name}")
    return target


def _context_of(policy: Policy) -> Any:
    """Return the device to measure on, as a context to enter."""
    if policy.device == "gpu" and not mx.context.num_gpus():
        raise ArgumentError(NO_GPU)
    return mx.Context(policy.device, 0)


def _batches(
    model: Model,
    data: Sequence[str],
    inputs: Sequence[str],
    dtypes: Mapping[str, str],
    seed: int,
) -> Tuple[Iterable[Dict[str, Any]], Sequence[str]]:
    """Return batches of inputs by name, and the names of those that are random numbers."""
    if data:
        return batches_in(model, data, dtypes), ()
    values, drawn = values_for(model, inputs, dtypes, seed)
    return [as_inputs(model, values, dtypes)], drawn


def _noted(policy: Policy, note: str) -> Policy:
    """Return a tuned policy with one more note, which is saved with it."""
    evidence = policy.evidence
    if evidence is None:
        raise StateError("tune has measured nothing")
    return policy.with_evidence(replace(evidence, notes=(*evidence.notes, note)))


def _show(policy: Policy, prefix: str, target: Path) -> None:
    """Print what was measured, and how to use the policy."""
    evidence = policy.evidence
    if evidence is None:
        raise StateError("tune has measured nothing")
    _print_report(evidence)
    out = shlex.quote(str(target))
    line = f"mxamp convert {shlex.quote(prefix)} --policy {out} --out {shlex.quote(prefix)}-tuned"
    use = _USES[evidence.way] if evidence.complete or evidence.way != "plain" else UNDECIDED
    click.echo(f"{target}: {use.format(out=out, convert=line)}")
    if STOPPED in evidence.notes:
        click.echo(INTERRUPTED, err=True)


def _print_report(evidence: Evidence) -> None:
    screen = console()
    for sentence in evidence.sentences():
        click.echo(sentence)
    for title, headings, rows in evidence.tables():
        click.echo(f"\n{title}")
        cells = ([escape(cell_text(cell)) for cell in row] for row in rows)
        screen.print(table_of(headings, cells))
    click.echo("\nNotes")
    for note in evidence.notes:
        click.echo(in_options(note))
    click.echo()
