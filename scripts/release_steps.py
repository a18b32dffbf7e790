"""The steps of scripts/release: build, check, install, measure coverage, and optionally publish."""

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Sequence

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")
#: The tests that run on every Python, outside the checkout. One Python runs all fast tests; the
#: coverage step runs the whole suite.
TESTS = (
    "tests/policy/test_decision.py", "tests/scaling/test_scaler.py",
    "tests/convert/test_symbols.py", "tests/test_cli.py",
)  # fmt: skip
FAST_ON = "3.11"
#: Extras whose dry run downloads gigabytes: only their pins are looked up.
LARGE = ("cu112",)
INSTALLED = "import sys, mxamp; assert mxamp.__file__.startswith(sys.prefix), mxamp.__file__"


class StepError(Exception):
    """A failed step; the table shows its message."""


class Row(NamedTuple):
    """A line of the table."""

    step: str
    passed: bool
    seconds: float
    note: str


class Options(NamedTuple):
    """The options of scripts/release, and the steps' working folder."""

    dry_run: bool
    repository: str
    only: Sequence[str]
    pythons: Sequence[str]
    folder: Path


def run(*command: object, cwd: Path = ROOT, **env: str) -> str:
    """Run a command and return its output; raise StepError with its last line if it fails."""
    # Without the checkout on the path, the installed package is tested.
    given = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**given, **env},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
        raise StepError(
            f"{Path(str(command[0])).name} ended with {done.returncode}: {''.join(last)}"
        )
    return done.stdout


def version() -> str:
    """Return the version to release."""
    return re.search(r'__version__ = "(.+)"', (ROOT / "mxamp" / "_version.py").read_text())[1]


def state(options: Options) -> str:
    """Check the version, the changelog, the tree and the tag; return the version."""
    head = re.search(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    if not re.fullmatch(rf"## \[{re.escape(version())}\] - \d{{4}}-\d\d-\d\d", head):
        raise StepError(
            f"CHANGELOG.md must begin with '## [{version()}] - YYYY-MM-DD', not '{head}'"
        )
    missing = []
    if run("git", "status", "--porcelain").strip():
        missing.append("a clean tree")
    if f"v{version()}" not in run("git", "tag", "--points-at", "HEAD").split():
        missing.append(f"the tag v{version()} on this commit")
    if missing and not options.dry_run:
        raise StepError(f"to publish, there must be {' and '.join(missing)}")
    return f"{version()}; still missing: {', '.join(missing)}" if missing else version()


def build(options: Options) -> str:
    """Build the source distribution, and the wheel from that."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    return ", ".join(f"{path.name} ({path.stat().st_size >> 10} KB)" for path in _built().values())


def _built() -> Dict[str, Path]:
    """Return the built wheel and source distribution; raise if there are none."""
    found = {
        "wheel": DIST / f"mxamp-{version()}-py3-none-any.whl",
        "sdist": DIST / f"mxamp-{version()}.tar.gz",
    }
    for path in found.values():
        if not path.exists():
            raise StepError(f"there is no {path.name} in dist/: run the step build too")
    return found


def metadata(options: Options) -> str:
    """Check the metadata as a package index does."""
    run(sys.executable, "-m", "twine", "check", "--strict", *_built().values())
    return "twine check --strict"


def find_pythons(text: str) -> List[str]:
    """Return the Pythons that `--pythons` lists, or all supported ones on the PATH."""
    if text:
        return text.split(",")
    return [name for name in (f"python{number}" for number in PYTHONS) if _version_of(name)]


def _version_of(python: str) -> str:
    """Return a Python's version, such as 3.11, or "" if it does not run."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.check_output(
            [python, "-c", program], text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (subprocess.CalledProcessError, OSError):
        return ""


def install(python: str, kind: str, options: Options) -> str:
    """Install a distribution into a fresh environment, and use it from outside the checkout."""
    folder = options.folder / f"{_version_of(python)}-{kind}"
    place = folder / "elsewhere"
    place.mkdir(parents=True)
    run(python, "-m", "venv", folder / "venv")
    installed = folder / "venv" / "bin" / "python"
    _pip_install(installed, _built()[kind], ["test"] if kind == "wheel" else [])
    run(installed, "-W", "ignore", "-c", INSTALLED, cwd=place)
    run(installed, "-W", "ignore", ROOT / "scripts" / "smoke.py", cwd=place)
    said = run(folder / "venv" / "bin" / "mxamp", "--version", cwd=place)
    if version() not in said:
        raise StepError(f"mxamp --version says {said.strip()!r}")
    note = "trains, converts"
    if kind == "wheel":
        note += f"; {_run_tests(installed, folder)}"
    shutil.rmtree(folder)
    return note


def _pip_install(python: Path, artifact: Path, extras: Sequence[str]) -> None:
    """Install MXNet and a distribution with extras for a Python."""
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", CONSTRAINTS]
    run(*pip, "pip", "setuptools", "wheel")
    if _version_of(str(python)) == "3.13":
        # MXNet requires NumPy below 2, which 3.13 lacks, but runs on 2.1.3.
        run(*pip, "--no-deps", "mxnet")
        run(*pip, "requests", "graphviz")
    else:
        extras = ["cpu", *extras]
    run(*pip, f"{artifact}[{','.join(extras)}]" if extras else artifact)


def _run_tests(python: Path, folder: Path) -> str:
    """Run the source distribution's tests on the installed package; return pytest's last line."""
    shutil.unpack_archive(_built()["sdist"], folder, "gztar")
    unpacked = folder / f"mxamp-{version()}"
    tests = TESTS
    if _version_of(str(python)) == FAST_ON:
        tests = ("tests",)  # some of them read the sources
    else:
        shutil.rmtree(unpacked / "mxamp")
    # `python -m pytest` or worker processes would import the sources, not the installed package.
    said = run(
        python.with_name("pytest"), "-q", "-m", "not slow and not proof", *tests, cwd=unpacked
    )
    return said.strip().splitlines()[-1]


def extras(name: str, requirements: Sequence[str], options: Options) -> str:
    """Check that pip can resolve an extra together with mxamp."""
    pip = [sys.executable, "-m", "pip"]
    if name in LARGE:
        for requirement in requirements:
            wanted = Requirement(requirement)
            said = run(*pip, "index", "versions", wanted.name)
            there = re.search(r"Available versions: (.*)", said)
            if there is None or not any(map(wanted.specifier.contains, there[1].split(", "))):
                raise StepError(f"there is no {requirement}")
        return f"all {len(requirements)} versions are there"
    artifact = f"{_built()['wheel']}[{name}]"
    said = run(*pip, "install", "--dry-run", "--ignore-installed", "-c", CONSTRAINTS, artifact)
    return f"{len(said.splitlines()[-1].split()) - 2} packages"


def _extras() -> Dict[str, List[str]]:
    """Return the requirements of each extra in setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return {
        name: [line for line in text.splitlines() if line and not line.startswith("#")]
        for name, text in config["options.extras_require"].items()
    }


def docs(options: Options) -> str:
    """Build the manual as a site; a warning is a failure."""
    run(sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", options.folder / "site")
    return "no warnings"


def coverage(options: Options) -> str:
    """Run the whole suite and measure line coverage of the package."""
    data = {"COVERAGE_FILE": str(options.folder / ".coverage")}
    tool = [sys.executable, "-m", "coverage"]
    cores = str(min(len(os.sched_getaffinity(0)), 4))
    tests = ["-m", "pytest", "-q", "-n", cores, "--dist", "worksteal"]
    said = run(*tool, "run", *tests, **data).strip().splitlines()[-1]
    run(*tool, "combine", "-q", **data)
    report = run(*tool, "report", **data)
    print(report)
    return f"{report.strip().split()[-1]} of the lines; {said}"


def publish(options: Options) -> str:
    """Upload the distributions."""
    run(sys.executable, "-m", "twine", "upload", "-r", options.repository, *_built().values())
    return options.repository


def all_steps(options: Options) -> Dict[str, Callable[[], str]]:
    """Return all steps but `publish` in order; `--only` selects by the name before the colon."""
    found: Dict[str, Callable[[], str]] = {
        "state": partial(state, options),
        "build": partial(build, options),
        "metadata": partial(metadata, options),
    }
    for python in options.pythons:
        for kind in ("wheel", "sdist"):
            found[f"install: {python}, {kind}"] = partial(install, python, kind, options)
    for name, requirements in _extras().items():
        found[f"extras: {name}"] = partial(extras, name, requirements, options)
    found["docs"] = partial(docs, options)
    found["coverage"] = partial(coverage, options)
    return found


def run_step(name: str, step: Callable[[], str]) -> Row:
    """Run a step, and return its row of the table."""
    print(f"{name} ...", flush=True)
    begun = time.monotonic()
    try:
        note, passed = step(), True
    except StepError as failure:
        note, passed = str(failure), False
    except Exception as error:
        traceback.print_exc()
        note, passed = f"{type(error).__name__}: {error}", False
    print(f"    {'passed' if passed else 'FAILED'}: {note}", flush=True)
    return Row(name, passed, time.monotonic() - begun, note)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table("step", "", "seconds", "result")
    for row in rows:
        table.add_row(
            row.step, "passed" if row.passed else "FAILED", f"{row.seconds:.0f}", row.note
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments passed on by scripts/release."""
    parser = argparse.ArgumentParser(prog="scripts/release")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--repository", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--pythons", default="")
    given = parser.parse_args(arguments)
    if given.dry_run and given.repository:
        parser.error(
            "--dry-run publishes nothing, and --repository says where to: give one of them"
        )
    known = ("state", "build", "metadata", "install", "extras", "docs", "coverage")
    given.only = given.only.split(",") if given.only else []
    for name in given.only:
        if name not in known:
            parser.error(f"unknown step {name!r} in --only; there are {', '.join(known)}")
    return given


def main(arguments: Sequence[str]) -> int:
    """Run the steps, print the table, and publish on request if all passed."""
    given = parse_options(arguments)
    chosen = find_pythons(given.pythons)
    for python in chosen:
        if _version_of(python) not in PYTHONS:
            print(f"error: {python!r} is no Python {PYTHONS[0]} to {PYTHONS[-1]}", file=sys.stderr)
            return 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="mxamp-release-") as folder:
        options = Options(given.dry_run, given.repository, given.only, chosen, Path(folder))
        for name, step in all_steps(options).items():
            if options.only and name.split(":")[0] not in options.only:
                continue
            rows.append(run_step(name, step))
            if not rows[-1].passed and name in ("state", "build"):
                break
        whole = not options.only and all(row.passed for row in rows)
        if options.repository and whole:
            rows.append(run_step("publish", partial(publish, options)))
    show(rows)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
