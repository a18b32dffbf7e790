"""Compare two files of figures that `scripts/bench/models --json` has written."""

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import click

#: A ratio counts as slower if it falls by more than this.
TOLERANCE = 0.02

Figures = Dict[str, Any]


def load(path: Path) -> Figures:
    """Return the figures in a JSON file; raise a one-line error if the file holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = [
            bool(row["model"] and row["mode"] and row["contender"])
            and ("failure" in row or {"least", "ratio", "greatest"} <= set(row))
            for row in found["rows"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path} has no figures of scripts/bench/models: {error!r}"
        raise click.ClickException(text) from None
    if not whole or not all(whole):
        raise click.ClickException(f"{path} has no rows with ratios")
    return dict(found)


def check_same_setup(old: Figures, new: Figures) -> None:
    """Raise if two sets of figures come from different machines or settings."""
    for part, keys in (("machine", ("cpu", "features", "cores")), ("setup", ("dtype", "device"))):
        for key in keys:
            before, now = (figures.get(part, {}).get(key) for figures in (old, new))
            if before != now:
                raise click.ClickException(
                    f"ratios of another {key} can't be compared: {before!r} before, {now!r} now"
                )


def slower_lines(old: Figures, new: Figures) -> List[str]:
    """Return a line for each contender that got slower, or fails in the new figures only.

    Slower means that the median ratio fell by more than `TOLERANCE`, and that each median lies
    outside the range of the other's rounds.
    """
    before = {_name(row): row for row in old["rows"]}
    lines = [_slower_line(before[_name(row)], row) for row in new["rows"] if _name(row) in before]
    if not lines:
        raise click.ClickException("the two sets of figures have no row in common")
    return [line for line in lines if line is not None]


def _name(row: Dict[str, Any]) -> str:
    """Return "mlp-64 training mxamp"."""
    return f"{row['model']} {row['mode']} {row['contender']}"


def _slower_line(old: Dict[str, Any], new: Dict[str, Any]) -> Optional[str]:
    """Return the line for a contender that got slower or fails now, else None."""
    if "failure" in old:
        return None
    if "failure" in new:
        return f"{_name(new)}: fails now: {new['failure']}"
    change = new["ratio"] / old["ratio"]
    apart = new["ratio"] < old["least"] and old["ratio"] > new["greatest"]
    if change >= 1 - TOLERANCE or not apart:
        return None
    spans = [f"{r['ratio']:.2f} ({r['least']:.2f} to {r['greatest']:.2f})" for r in (old, new)]
    return f"{_name(new)}: {spans[0]} before, {spans[1]} now: {1 - change:.0%} slower"


def print_slower(old: Figures, new: Figures) -> bool:
    """Print the contenders that got slower; return whether there are any."""
    check_same_setup(old, new)
    lines = slower_lines(old, new)
    click.echo("\n".join(lines or ["nothing got slower"]))
    return bool(lines)
