"""Figures of `scripts/bench/models`: save, load and compare them."""

import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import click

from mxamp.errors import AmpError
from mxamp.framework.files import write_file

#: A ratio counts as slower if it falls by more than this.
TOLERANCE = 0.02

Figures = Dict[str, Any]


def save(path: Path, found: Figures) -> None:
    """Write the figures atomically, so that an interrupted run keeps the earlier ones."""
    try:
        write_file(path, json.dumps(found, indent=2).encode())
    except AmpError as error:
        raise click.ClickException(str(error)) from None


def load(path: Path) -> Figures:
    """Read figures; raise a one-line error if the file holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        keys = [(r["model"], r["mode"], r["contender"]) for r in found["rows"]]
        complete = all(
            "failure" in r or {"least", "ratio", "greatest"} <= set(r) for r in found["rows"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path} has no figures of scripts/bench/models: {error!r}"
        raise click.ClickException(text) from None
    if not keys or not complete:
        raise click.ClickException(f"{path} has no rows with ratios")
    return dict(found)


def check_alike(old: Figures, new: Figures) -> None:
    """Raise if two sets of figures come from different machines or settings."""
    for part, keys in (("machine", ("cpu", "features", "cores")), ("setup", ("dtype", "device"))):
        for key in keys:
            before, now = (found.get(part, {}).get(key) for found in (old, new))
            if before != now:
                raise click.ClickException(
                    f"ratios of another {key} can't be compared: {before!r} before, {now!r} now"
                )


def slower(old: Figures, new: Figures) -> List[str]:
    """Return a line for each contender that got slower, or fails in the new figures only.

    Slower means that the median ratio fell by more than `TOLERANCE`, and that each median lies
    outside the range of the other's rounds.
    """
    before = {_key(row): row for row in old["rows"]}
    lines = [_line(before[_key(row)], row) for row in new["rows"] if _key(row) in before]
    if not lines:
        raise click.ClickException("the two sets of figures have no row in common")
    return [line for line in lines if line is not None]


def _key(row: Dict[str, Any]) -> Tuple[str, str, str]:
    return row["model"], row["mode"], row["contender"]


def _line(old: Dict[str, Any], new: Dict[str, Any]) -> Optional[str]:
    name = " ".join(_key(new))
    if "failure" in old:
        return None
    if "failure" in new:
        return f"{name}: fails now: {new['failure']}"
    change = new["ratio"] / old["ratio"]
    apart = new["ratio"] < old["least"] and old["ratio"] > new["greatest"]
    if change >= 1 - TOLERANCE or not apart:
        return None
    spans = [f"{r['ratio']:.2f} ({r['least']:.2f} to {r['greatest']:.2f})" for r in (old, new)]
    return f"{name}: {spans[0]} before, {spans[1]} now: {1 - change:.0%} slower"


def report(old: Figures, new: Figures) -> bool:
    """Print the contenders that got slower; return whether there are any."""
    check_alike(old, new)
    lines = slower(old, new)
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo("nothing got slower")
    return bool(lines)
