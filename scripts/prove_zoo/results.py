"""The results: a JSON file, the check of each model, and tables for terminals and docs/proof.md."""

import json
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from mxamp.framework.files import write_file
from mxamp.framework.machine import cpu_name, onednn_features
from zoo import DTYPES, FAMILIES, LEAST_AGREEMENT, TOLERANCE, Case, case_of

Result = Dict[str, Any]
#: An error beyond the family's tolerance passes if it is at most this many times the error of
#: rounding the weights alone; rounded activations add to it.
_OF_NOISE = 2.0


def read(path: Path) -> Dict[str, Any]:
    """Return the results in a JSON file; those of no model if there is no such file."""
    if not path.exists():
        return {"models": {}, "training": {}}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def write(path: Path, found: Dict[str, Any]) -> None:
    """Write the results atomically, so that an interrupted run keeps the finished models."""
    lines = ["{"]
    parts = [key for key in found if key not in ("models", "training")]
    lines += [f"{json.dumps(key)}: {json.dumps(found[key], sort_keys=True)}," for key in parts]
    for key, comma in (("models", ","), ("training", "")):
        rows = [
            f"  {json.dumps(name)}: {json.dumps(value)}"
            for name, value in sorted(found[key].items())
        ]
        lines += [f"{json.dumps(key)}: {{", ",\n".join(rows), "}" + comma]
    write_file(path, ("\n".join(line for line in lines if line) + "\n}\n").encode())


def in_float32(result: Result) -> bool:
    """Return whether a model runs in plain float32 with finite outputs."""
    return result.get("float32", {}).get("finite", False)


def problem(case: Case, dtype: str, found: Optional[Result]) -> Optional[str]:
    """Return the problem of a model in a dtype, or None."""
    if found is None:
        return "not run"
    if "failure" in found:
        return str(found["failure"])
    wrong = _exceeded_limit(case, dtype, found, found.get("noise", 0.0))
    loaded = found.get("loaded", {"equal": True})
    if wrong or loaded.get("equal"):
        return wrong
    if dtype == "float16":
        return f"loaded in plain MXNet: {loaded.get('failure', 'other outputs')}"
    wrong = loaded.get("failure") or _exceeded_limit(case, dtype, loaded, found.get("noise", 0.0))
    return f"loaded in plain MXNet: {wrong}" if wrong else None


def _exceeded_limit(case: Case, dtype: str, errors: Result, noise: float) -> Optional[str]:
    """Return the limit that a model's errors exceed, as text, or None."""
    if errors.get("lost"):
        return f"{errors['lost']} values are not finite"
    error, limit = errors.get("relative", 0.0), TOLERANCE[dtype]
    if error > max(limit, _OF_NOISE * noise):
        return f"relative error {error:.2g}, above {limit:g}"
    least = LEAST_AGREEMENT.get(FAMILIES[case.family].measure, {}).get(dtype, 0.0)
    share = errors.get("agreement", 1.0)
    if share < least and error > _OF_NOISE * noise:
        return f"{share:.0%} of the answers agree, below {least:.0%}"
    return None


def stock_problem(case: Case, dtype: str, found: Result) -> Optional[str]:
    """Return the problem of a model under `mxnet.contrib.amp`, or None."""
    theirs = found.get("stock", {"failure": "not run"})
    noise = {"noise": found["noise"]} if "noise" in found else {}
    return problem(case, dtype, {**theirs, **noise})


def summary(models: Dict[str, Result]) -> List[List[Any]]:
    """Return a row of counts and worst errors for each family and dtype."""
    rows = []
    for name, family in FAMILIES.items():
        of = {n: r for n, r in models.items() if case_of(n).family == name}
        running = {n: r for n, r in of.items() if in_float32(r)}
        if not of:
            continue
        for dtype in DTYPES:
            results = {n: r[dtype] for n, r in running.items() if dtype in r}
            right = [n for n, r in results.items() if problem(case_of(n), dtype, r) is None]
            stock = [n for n, r in results.items() if not stock_problem(case_of(n), dtype, r)]
            errors = [r["relative"] for r in results.values() if "relative" in r]
            theirs = [
                r["stock"]["relative"] for r in results.values() if "relative" in r.get("stock", {})
            ]
            shares = [r["agreement"] for r in results.values() if "agreement" in r]
            whole = [n for n, r in running.items() if "unhybridized" not in r["float32"]]
            rows.append(
                [family.title, dtype, len(of), len(running), len(whole), len(right), len(stock),
                 max(errors, default=None), max(theirs, default=None),
                 sum(shares) / len(shares) if shares else None]
            )  # fmt: skip
    return rows


def problems(models: Dict[str, Result]) -> List[Sequence[str]]:
    """Return (model, dtype, problem) for models that run in float32."""
    found = []
    for name, result in models.items():
        for dtype in DTYPES:
            if in_float32(result) and dtype in result:
                wrong = problem(case_of(name), dtype, result[dtype])
                if wrong:
                    found.append((name, dtype, wrong))
    return found


def float32_failures(models: Dict[str, Result]) -> List[Sequence[str]]:
    """Return (model, error) for models that do not run in float32 either."""
    found = []
    for name, result in models.items():
        if not in_float32(result):
            plain = result.get("float32", result)
            found.append((name, plain.get("failure", "gives NaN or infinity")))
    return found


def summary_line(name: str, result: Result) -> str:
    """Return a model's errors, or a training's losses, as one line of text."""
    if "losses" in result:
        return " ".join(f"{loss:.4g}" for loss in result["losses"])
    if not in_float32(result):
        return str(result.get("float32", result).get("failure", "float32 is not finite"))
    parts = []
    for dtype in DTYPES:
        if dtype in result:
            wrong = problem(case_of(name), dtype, result[dtype])
            parts.append(f"{dtype} {wrong or result[dtype].get('relative')}")
    return f"{', '.join(parts)} ({result.get('seconds')} s)"


def losses_fall(result: Result) -> bool:
    """Return whether a training's losses are finite and the last is below the first."""
    found = result.get("losses", [])
    return len(found) > 1 and all(abs(x) < float("inf") for x in found) and found[-1] < found[0]


def failed_trainings(training: Dict[str, Result]) -> List[str]:
    """Return the names of trainings that fail with mxamp and succeed in float32."""
    return [
        key
        for key, result in training.items()
        if "mxamp" in key
        and not losses_fall(result)
        and losses_fall(training.get(f"{key.split(': ')[0]}: float32", {}))
    ]


# ---------------------------------------------------------------------- tables

Table = Tuple[Sequence[str], List[Sequence[Any]]]

_FAMILIES = (
    "family", "dtype", "models", "run in float32", "hybridized",
    "right", "right in mxnet.contrib.amp",
    "worst error", "worst error there", "answers that agree",
)  # fmt: skip


def machine() -> Dict[str, Any]:
    """Return the CPU, its features and the versions of the packages, for the file of results."""
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for name in ("mxnet", "mxamp", "numpy", "gluoncv", "gluonnlp"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"cpu": cpu_name(), "features": sorted(onednn_features()), "versions": versions}


def tables(found: Dict[str, Any]) -> List[Table]:
    """Return the headings and rows of each table of a file of results."""
    return [
        (_FAMILIES, summary(found["models"])),
        (("model", "dtype", "what is wrong"), list(problems(found["models"]))),
        (("model", "does not run in float32 either"), float32_failures(found["models"])),
        loss_table(found["training"]),
    ]


def loss_table(training: Dict[str, Result]) -> Table:
    """Return a row for each model that trained: its losses, or its failure, in each way."""

    def line(key: str) -> Optional[str]:
        return summary_line(key, training[key]) if key in training else None

    models, ways = (
        list(dict.fromkeys(key.split(": ", 1)[part] for key in training)) for part in (0, 1)
    )
    rows = [(model, *(line(f"{model}: {way}") for way in ways)) for model in models]
    return ("trains", *ways), rows


def cell(value: Any) -> str:
    """Return a table's value as text, floats with two digits."""
    if value is None:
        return ""
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def markdown(found: Dict[str, Any]) -> str:
    """Return all tables of a file of results in Markdown."""
    parts = []
    for headings, rows in tables(found):
        lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
        for row in rows:
            cells = (cell(value).replace("|", "\\|") for value in row)
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
