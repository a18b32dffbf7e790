"""Repeat experiments of the paper, and print a table of the results.

    python examples/paper/run.py [NAME ...] [--fast] [--seeds 3] [--json FILE]

Exits with 1 if a result of the paper is not reproduced.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import numpy as np

NAMES = ("classification", "detector", "language_model", "master_weights", "gan")


def shown(found, digits):
    """Return the mean and the standard deviation over seeds of each config."""
    return "<br>".join(
        f"{name}: {np.mean(values):.{digits}f} ± {np.std(values, ddof=len(values) > 1):.{digits}f}"
        for name, values in found.items()
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--fast", action="store_true", help="fewer steps, in seconds")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    options = parser.parse_args()
    if options.seeds < 1 or set(options.names) - set(NAMES):
        parser.error(f"--seeds must be 1 or more, and each NAME one of {', '.join(NAMES)}")
    measured, passed = {}, True
    print("| experiment | the paper | here | as the paper says |\n|---|---|---|---|")
    for name in options.names or NAMES:
        experiment = importlib.import_module(name).EXPERIMENT
        found = {
            config.name: np.array(
                [experiment.train(config, seed, options.fast) for seed in range(options.seeds)]
            )
            for config in experiment.configs
        }
        checks = experiment.verdict(found, options.fast)
        numbers = shown(found, experiment.digits)
        held = f"{sum(holds for _, holds in checks)} of {len(checks)}"
        print(f"| {experiment.title} | {experiment.paper} | {numbers} | {held} |", flush=True)
        for claim, holds in checks:
            print(f"{name}: {'yes' if holds else 'NO'}: {claim}", file=sys.stderr)
            passed = passed and bool(holds)
        measured[name] = {config: values.tolist() for config, values in found.items()}
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
