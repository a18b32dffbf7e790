"""Prove mxamp on real networks: the models of GluonCV and GluonNLP, and NumPy-style ones.

    .venv/bin/python scripts/prove_zoo [--only NAME] [--dtype DTYPE] [--jobs N] [--json FILE]
        [--train] [--no-stock] [--fresh] [--timeout SECONDS] [--markdown]

Each model runs in a separate process. It is built without downloads, gets weights that keep its
activations in range, runs in float32, is converted to float16 and bfloat16, runs, is saved, and is
loaded by a process of plain MXNet. mxnet.contrib.amp converts the same model for comparison.
--train trains one model of each family for three steps instead.

The file of --json is written after each model. Models in it are skipped unless --fresh is given.
--markdown prints the tables of docs/proof.md, which explains the columns.
"""

import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import results
import zoo
from processes import Server

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "measured" / "proof.json"

#: A task: its name, the server's script, and its arguments.
Task = Tuple[str, str, Tuple[str, ...]]


def run_tasks(
    tasks: List[Task], jobs: int, limit: float, done: Callable[[str, Dict[str, Any]], None]
) -> None:
    """Run tasks, `jobs` at a time, and call `done` with each result."""
    left: "queue.SimpleQueue[Task]" = queue.SimpleQueue()
    for task in tasks:
        left.put(task)
    lock = threading.Lock()

    def work() -> None:
        servers: Dict[str, Server] = {}
        try:
            while True:
                name, script, arguments = left.get_nowait()
                server = servers.setdefault(script, Server(script))
                found = server.ask(limit, *arguments)
                with lock:
                    done(name, found)
        except queue.Empty:
            pass
        finally:
            for server in servers.values():
                server.close()

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def model_names() -> List[str]:
    """Return the names of the models of all installed packages."""
    server = Server("worker.py")
    try:
        return list(server.ask(120.0)["names"])
    finally:
        server.close()


def conversion_tasks(only: Tuple[str, ...], dtypes: Tuple[str, ...], stock: bool) -> List[Task]:
    """Return a task for each model that `only` selects: its conversion to the dtypes."""
    cases = [case for case in zoo.select_cases(model_names(), only) if case.left_out is None]
    return [
        (c.name, "worker.py", (c.name, ",".join(dtypes), "stock" if stock else "")) for c in cases
    ]


def training_tasks(only: Tuple[str, ...], dtypes: Tuple[str, ...], stock: bool) -> List[Task]:
    """Return a task for each way to train each representative that `only` selects."""
    ways = ["float32", *(f"mxamp {dtype}" for dtype in dtypes)]
    ways += [f"stock {dtype}" for dtype in dtypes] if stock else []
    return [
        (f"{name}: {way}", "training.py stock" if "stock" in way else "training.py", (name, way))
        for name in zoo.REPRESENTATIVES
        if not only or name in only
        for way in ways
    ]


def show(found: Dict[str, Any], console: Console) -> bool:
    """Print the tables; return whether no model has a problem."""
    for headings, rows in results.tables(found):
        if rows:
            table = Table(*headings)
            for row in rows:
                table.add_row(*(results.cell(value) for value in row))
            console.print(table)
    return not results.problems(found["models"]) and not results.failed_trainings(found["training"])


@click.command(help=(__doc__ or "").strip())
@click.option("--only", multiple=True, metavar="NAME", help="A model, a pattern, or a family.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(zoo.DTYPES))
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--json", "path", default=RESULTS, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--train", is_flag=True, help="Train one model of each family.")
@click.option("--stock/--no-stock", default=True, help="Compare with mxnet.contrib.amp.")
@click.option("--resume/--fresh", default=True, help="Skip the models that the file holds.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for a model.")
@click.option("--markdown", is_flag=True, help="Print the tables of the file, and run nothing.")
def main(
    only: Tuple[str, ...], dtypes: Tuple[str, ...], jobs: int, path: Path, train: bool,
    stock: bool, resume: bool, timeout: float, markdown: bool,
) -> None:  # fmt: skip
    """Run the tasks that are not in the file yet, and print the tables."""
    found = results.read(path)
    if markdown:
        click.echo(results.markdown(found))
        return
    part = found["training" if train else "models"]
    tasks = (training_tasks if train else conversion_tasks)(only, dtypes or zoo.DTYPES, stock)
    tasks = [task for task in tasks if not resume or task[0] not in part]
    console = Console()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))

        def done(name: str, result: Dict[str, Any]) -> None:
            part[name] = result
            found["machine"] = results.machine()
            results.write(path, found)
            progress.update(bar, advance=1, description=name)
            if not console.is_terminal:
                console.print(
                    f"{name}: {results.summary_line(name, result)}", markup=False, highlight=False
                )

        run_tasks(tasks, jobs, timeout, done)
    sys.exit(0 if show(found, console) else 1)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    main()
