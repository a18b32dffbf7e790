"""The results as JSON: read, written after each model, judged and summed up by family."""

import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from mxamp.framework.files import write_file
from zoo import DTYPES, FAMILIES, Case, case_of

Result = Dict[str, Any]
#: Beyond a family's tolerance an error may be as large as this many roundings of all weights: those
#: of activations come on top.
_OF_NOISE = 2.0


def read(path: Path) -> Dict[str, Any]:
    """Return the results of before, or none."""
    if not path.exists():
        return {"models": {}, "training": {}}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def write(path: Path, found: Dict[str, Any]) -> None:
    """Write the results, whole: whoever stops the command keeps what is done."""
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
    """Tell whether a model runs in plain float32, with finite values."""
    return result.get("float32", {}).get("finite", False)


def problem(case: Case, dtype: str, found: Optional[Result]) -> Optional[str]:
    """Return what is wrong with a model in a dtype, or None."""
    if found is None:
        return "not run"
    if "failure" in found:
        return str(found["failure"])
    wrong = _beyond(case, dtype, found, found.get("noise", 0.0))
    loaded = found.get("loaded", {"equal": True})
    if wrong or loaded.get("equal"):
        return wrong
    if dtype == "float16":
        return f"loaded in plain MXNet: {loaded.get('failure', 'other outputs')}"
    wrong = loaded.get("failure") or _beyond(case, dtype, loaded, found.get("noise", 0.0))
    return f"loaded in plain MXNet: {wrong}" if wrong else None


def _beyond(case: Case, dtype: str, errors: Result, noise: float) -> Optional[str]:
    """Return which limit of the family outputs are beyond, or None."""
    family = FAMILIES[case.family]
    if errors.get("lost"):
        return f"{errors['lost']} values are not finite"
    error, limit = errors.get("relative", 0.0), family.tolerance[dtype]
    if error > max(limit, _OF_NOISE * noise):
        return f"relative error {error:.2g}, above {limit:g}"
    share, least = errors.get("agreement", 1.0), family.agreement[dtype]
    if share < least and error > _OF_NOISE * noise:
        return f"{share:.0%} of the answers agree, below {least:.0%}"
    return None


def stock_problem(case: Case, dtype: str, found: Result) -> Optional[str]:
    """Return what is wrong with what `mxnet.contrib.amp` makes of a model, or None."""
    theirs = found.get("stock", {"failure": "not run"})
    noise = {"noise": found["noise"]} if "noise" in found else {}
    return problem(case, dtype, {**theirs, **noise})


def summary(models: Dict[str, Result]) -> List[List[Any]]:
    """Return a row for each family and dtype: counts, and the worst error."""
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
    """Return (model, dtype, what is wrong), for models that float32 runs."""
    found = []
    for name, result in models.items():
        for dtype in DTYPES:
            if in_float32(result) and dtype in result:
                wrong = problem(case_of(name), dtype, result[dtype])
                if wrong:
                    found.append((name, dtype, wrong))
    return found


def broken(models: Dict[str, Result]) -> List[Sequence[str]]:
    """Return (model, why) of the models that do not run in float32."""
    found = []
    for name, result in models.items():
        if not in_float32(result):
            plain = result.get("float32", result)
            found.append((name, plain.get("failure", "gives NaN or infinity")))
    return found


def line(name: str, result: Result) -> str:
    """Return a result of a model or of training in one line."""
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


def losses(training: Dict[str, Result]) -> List[Sequence[str]]:
    """Return (model, way, losses or what went wrong)."""
    return [(*key.split(": ", 1), line(key, result)) for key, result in training.items()]


def trains(result: Result) -> bool:
    """Tell whether losses are finite and fall."""
    found = result.get("losses", [])
    return len(found) > 1 and all(abs(x) < float("inf") for x in found) and found[-1] < found[0]


def untrained(training: Dict[str, Result]) -> List[str]:
    """Return what does not train with mxamp, though it does in float32."""
    return [
        key
        for key, result in training.items()
        if "mxamp" in key
        and not trains(result)
        and trains(training.get(f"{key.split(': ')[0]}: float32", {}))
    ]
