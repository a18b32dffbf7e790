"""Run all experiments, two at a time, and print the table of docs/paper.md.

    python examples/paper/run_all.py [--fast] [--seeds 3] [--jobs 2] [--out paper-results]

Each experiment is a process with one thread. It writes NAME.json and NAME.png to the folder.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

FOLDER = Path(__file__).resolve().parent
#: The longest first.
NAMES = ("detector", "language_model", "gan", "master_weights", "classification")
IN_ORDER = ("classification", "detector", "language_model", "master_weights", "gan")
TITLES = {
    "classification": "Image classification",
    "detector": "Detector with small gradients",
    "language_model": "Language model",
    "master_weights": "Master weights",
    "gan": "GAN with two trainers",
}


def run(name, options):
    files = ["--json", str(options.out / f"{name}.json"), "--png", str(options.out / f"{name}.png")]
    fast = ["--fast"] if options.fast else []
    command = [sys.executable, str(FOLDER / f"{name}.py"), *files, *fast]
    command += ["--seeds", str(options.seeds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, check=False, **pipes)
    (options.out / f"{name}.log").write_text(done.stdout, encoding="utf-8")
    return done.returncode


def table(found):
    """Return the results of experiments, by name, as a table of Markdown."""
    lines = ["| experiment | the paper | here | as the paper says |", "|---|---|---|---|"]
    for name in IN_ORDER:
        if name not in found:
            continue
        result = found[name]
        numbers = "<br>".join(f"{config}: {text}" for config, text in result["summary"].items())
        checks = result["checks"]
        held = sum(check["holds"] for check in checks)
        lines.append(
            f"| {TITLES[name]}: {result['metric']} | {result['paper']} | {numbers} "
            f"| {held} of {len(checks)} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="smaller, in seconds")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--out", type=Path, default=Path("paper-results"), help="a folder")
    options = parser.parse_args()
    for name, value in (("--seeds", options.seeds), ("--jobs", options.jobs)):
        if value < 1:
            parser.error(f"{name} must be 1 or more, not {value}")
    options.out.mkdir(parents=True, exist_ok=True)
    start, console, codes = time.perf_counter(), Console(stderr=True), {}
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("experiments", total=len(NAMES))
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = {name: pool.submit(run, name, options) for name in NAMES}
            for name in NAMES:
                codes[name] = runs[name].result()
                progress.advance(task)
                console.print(f"{name}: {'as the paper says' if codes[name] == 0 else 'NOT so'}")
    files = {name: options.out / f"{name}.json" for name in NAMES}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    print(table(found))
    print(f"\n{(time.perf_counter() - start) / 60:.0f} minutes")
    sys.exit(any(codes.values()))


if __name__ == "__main__":
    main()
