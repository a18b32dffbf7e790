"""Shared parts of the benchmarks: timing in turn, worker processes, tables, files, the machine."""

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Sequence

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

# mxamp is imported by functions alone: it reads OMP_NUM_THREADS, which scripts set first.

OUT = click.Path(dir_okay=False, path_type=Path)
#: The option --json of every benchmark.
json_option = click.option("--json", "json_path", type=OUT, help="Write the figures here.")
rounds_option = click.option("--rounds", default=7, show_default=True)


def seconds(function: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of a call, until MXNet has computed everything."""
    from mxnet import nd

    nd.waitall()
    began = time.perf_counter()
    function()
    nd.waitall()
    return time.perf_counter() - began


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Dict[str, float]:
    """Return the median, the least and the greatest ratio of two series, one value a round."""
    found = [a / b for a, b in zip(above, below)]
    return {"ratio": statistics.median(found), "least": min(found), "greatest": max(found)}


def compare_in_turn(
    measure: Callable[[], float], measure_base: Callable[[], float], rounds: int
) -> Dict[str, float]:
    """Return the ratio of two times, measured in turn in each round after one that warms up.

    The median comes with the least and the greatest, with the base's median "seconds", and with the
    median of what the other one takes more, "added".
    """
    console = Console(stderr=True)
    turns = track(range(rounds + 1), "measuring", console=console, transient=True)
    measured, base = zip(*[(measure(), measure_base()) for _ in turns][1:])
    return {
        **ratio_of(measured, base),
        "seconds": statistics.median(base),
        "added": statistics.median(a - b for a, b in zip(measured, base)),
    }


def ratio_cell(row: Mapping[str, float]) -> str:
    """Return the text of a row's ratio, with the least and the greatest."""
    return f"{row['ratio']:.2f} ({row['least']:.2f} to {row['greatest']:.2f})"


def json_from_process(command: Sequence[str]) -> Any:
    """Run a command and return the JSON in its last line; raise with its last error line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise click.ClickException(f"{' '.join(command[-4:])}: {lines[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def machine(cores: int = 1) -> Dict[str, Any]:
    """Return the CPU's name, its features and the cores in use, for a file of figures."""
    from mxamp.backends.onednn.cpu import onednn_features
    from mxamp.framework.machine import cpu_name

    return {"cpu": cpu_name(), "features": sorted(onednn_features()), "cores": cores}


def print_machine(console: Console, cores: int = 1) -> None:
    """Print the CPU's name, its features and the cores in use."""
    found = machine(cores)
    named = ", ".join(found["features"]) or "no avx512"
    console.print(f"{found['cpu']}, {named}; cores: {cores}", highlight=False)


def print_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings."""
    table = Table(*headings)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def save(path: Optional[Path], figures: Dict[str, Any]) -> None:
    """Write figures as JSON, atomically: an interrupted run keeps the earlier file."""
    from mxamp.errors import AmpError
    from mxamp.framework.files import write_file

    if path is None:
        return
    try:
        write_file(path, (json.dumps(figures, indent=2) + "\n").encode())
    except AmpError as error:
        raise click.ClickException(str(error)) from None
