"""The results as tables, for terminals and for docs/proof.md."""

import platform
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import results

Table = Tuple[Sequence[str], List[Sequence[Any]]]

_FAMILIES = (
    "family", "dtype", "models", "run in float32", "hybridized",
    "right", "right in mxnet.contrib.amp",
    "worst error", "worst error there", "answers that agree",
)  # fmt: skip


def machine() -> Dict[str, Any]:
    """Return what the results were measured on."""
    from importlib import metadata

    packages = ("mxnet", "mxamp", "numpy", "gluoncv", "gluonnlp")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "")
    flags = next((line for line in info if line.startswith("flags")), "")
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16") if f" {flag}" in flags]
    return {"cpu": model, "features": features, "versions": versions}


def tables(found: Dict[str, Any]) -> List[Table]:
    """Return headings and rows of each table."""
    return [
        (_FAMILIES, results.summary(found["models"])),
        (("model", "dtype", "what is wrong"), list(results.problems(found["models"]))),
        (("model", "does not run in float32 either"), results.broken(found["models"])),
        (("trains", "way", "losses"), results.losses(found["training"])),
    ]


def cell(value: Any) -> str:
    """Return a value as text: shares of answers and errors with two digits."""
    if value is None:
        return ""
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def markdown(found: Dict[str, Any]) -> str:
    """Return all tables in Markdown."""
    parts = []
    for headings, rows in tables(found):
        lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
        lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
